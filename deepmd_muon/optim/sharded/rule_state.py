"""The rules' state in the messages of one bucket: holders pack it, owners advance it, and holders take it back.

Headers of pieces contain the numbers per block; the numbers per row or column follow the headers, before the elements.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from deepmd_muon.optim.rules.interface import MatrixRule
from deepmd_muon.optim.rules.registry import tensors_of
from deepmd_muon.optim.sharded.layout import overlap, score_runs_by_rank
from deepmd_muon.optim.sharded.messages import lines_of
from deepmd_muon.optim.sharded.plan import Plan, carried
from deepmd_muon.optim.sharded.transport import Exchange, Side

Copies = tuple[list[Tensor], list[Tensor]]  # views of a buffer, and views of the state, pairwise


class RuleState:
    """State of rules in one bucket on this rank.

    `stacks` has the jobs of each stack of matrices that this rank owns, and the shape of its matrices.

    Attributes
    ----------
    keys
        Keys of the state tensors with one number per block; their columns in the headers start at 1.
    """

    def __init__(
        self,
        plan: Plan,
        rules: tuple[MatrixRule, ...],
        exchange: Exchange,
        stacks: Sequence[tuple[Sequence[int], tuple[int, int]]],
        rank: int,
        device: torch.device,
    ) -> None:
        self._plan, self._exchange, self._rank, self._device = plan, exchange, rank, device
        self._jobs = exchange.messages.jobs
        self.keys = carried(rules).blocks
        self._dtypes = {
            key: tensor.dtype_for(exchange.dtype) for key, tensor in tensors_of(rules).items()
        }
        self._slots = {j: (s, i) for s, (jobs, _) in enumerate(stacks) for i, j in enumerate(jobs)}
        self._sizes = [len(jobs) for jobs, _ in stacks]
        # The rows and columns of owned matrices, from their arrival until they have left.
        self._owned: list[dict[str, Tensor]] = []
        for jobs, shape in stacks:
            new = {}
            for key, tensor in carried(plan.parameters[self._jobs[jobs[0]].parameter].rules).lines:
                count = shape[0] if tensor.extent == "rows" else shape[1]
                size = len(jobs), count, tensor.length(*shape)
                new[key] = torch.zeros(size, dtype=torch.float64, device=device)
            self._owned.append(new)
        self._scalar_lines = {key for key, tensor in carried(rules).lines if tensor.along is None}

    def bind(self, state: Mapping[int, Mapping[str, Tensor]]) -> None:
        """Create all views of the exchange's buffers and of the state, by parameter of the plan and key."""
        out, into = self._exchange.outward["gather"], self._exchange.inward["return"]
        sent, received = self._exchange.sent, self._exchange.received
        self._packed = self._numbers_of(out, state), self._lines_here(out, sent["gather"], state)
        self._returned = (
            self._numbers_of(into, state),
            self._lines_here(into, received["return"], state),
        )
        self._arrive = self._lines_owned(self._exchange.inward["gather"], received["gather"])
        self._leave = self._lines_owned(self._exchange.outward["return"], sent["return"])

    def _numbers_of(
        self, side: Side, state: Mapping[int, Mapping[str, Tensor]]
    ) -> dict[str, tuple[slice | Tensor, list[Tensor]]]:
        """Return, by key, the positions of this rank's pieces that have a number of their block, and views of these."""
        found = {}
        for key in self.keys:
            positions, views = [], []
            for k, payload in enumerate(side.payloads):
                job = self._jobs[payload.job]
                if key in state[job.parameter]:
                    p = self._plan.parameters[job.parameter]
                    own = score_runs_by_rank(p.shape, p.view, p.layout)[self._rank]
                    at = overlap(own, job.block, job.block + 1).start
                    positions.append(k)
                    views.append(state[job.parameter][key][at : at + 1])
            index = torch.tensor(positions, dtype=torch.int64, device=self._device)
            found[key] = (slice(None) if len(positions) == len(side.payloads) else index), views
        return found

    def _lines_here(
        self, side: Side, buffer: Tensor, state: Mapping[int, Mapping[str, Tensor]]
    ) -> Copies:
        """Return the copies between a buffer of this rank's pieces and its state."""
        found: Copies = [], []
        for payload, (start, _) in zip(side.payloads, side.lines, strict=True):
            job = self._jobs[payload.job]
            for key, tensor in carried(self._plan.parameters[job.parameter].rules).lines:
                lines = lines_of(self._plan, job.parameter, job.block, self._rank, tensor)
                if lines.length:
                    local = state[job.parameter][key].view(lines.shape)[..., : lines.values]
                    found[0].append(buffer[start : start + lines.length].view(-1, lines.values))
                    found[1].append(
                        local[lines.batch, lines.inside.start : lines.inside.stop, lines.part]
                    )
                    start += lines.length
        return found

    def _lines_owned(self, side: Side, buffer: Tensor) -> Copies:
        """Return the copies between a buffer of other ranks' pieces and the rows and columns of owned matrices."""
        found: Copies = [], []
        for payload, peer, (start, _) in zip(side.payloads, side.peers, side.lines, strict=True):
            job = self._jobs[payload.job]
            s, i = self._slots[payload.job]
            for key, tensor in carried(self._plan.parameters[job.parameter].rules).lines:
                lines = lines_of(self._plan, job.parameter, job.block, peer, tensor)
                for first, last in lines.inside.runs if lines.length else ():
                    length = (last - first) * lines.values
                    found[0].append(buffer[start : start + length].view(-1, lines.values))
                    found[1].append(self._owned[s][key][i, first:last])
                    start += length
        return found

    def pack(self, headers: Tensor) -> None:
        """Write this rank's state to the headers of its pieces, (pieces, fields), and to the buffer."""
        numbers, (buffer, state) = self._packed
        for column, (where, views) in enumerate(numbers.values(), start=1):
            if views:
                headers[where, column] = torch.cat(views).double()
        if buffer:
            torch._foreach_copy_(buffer, state)

    def arrive(self, headers: Tensor) -> list[dict[str, Tensor]]:
        """Return the state of the owned matrices, stack by stack, given a header of each, (matrices, fields)."""
        buffer, owned = self._arrive
        if buffer:
            torch._foreach_copy_(owned, buffer)
        found = [
            {
                key: (x[:, :, 0] if key in self._scalar_lines else x).to(
                    self._dtypes[key], copy=True
                )
                for key, x in lines.items()
            }
            for lines in self._owned
        ]
        for column, key in enumerate(self.keys, start=1):
            for own, x in zip(
                found, headers[:, column].to(self._dtypes[key]).split(self._sizes), strict=True
            ):
                own[key] = x
        return found

    def leave(self, state: Sequence[Mapping[str, Tensor]]) -> Iterator[Tensor]:
        """Write the state of the owned matrices to the buffer; yield the columns of their headers, (matrices,)."""
        for lines, own in zip(self._owned, state, strict=True):
            for key, x in lines.items():
                x.copy_(own[key].view(x.shape))
        buffer, owned = self._leave
        if buffer:
            torch._foreach_copy_(buffer, owned)
        for key in self.keys:
            yield torch.cat([own[key] for own in state]).double()

    def take(self, headers_of: Callable[[], Tensor]) -> None:
        """Take back the state from the headers of this rank's pieces, (pieces, fields), and from the buffer."""
        numbers, (buffer, state) = self._returned
        headers = headers_of() if any(views for _, views in numbers.values()) else None
        for column, (where, views) in enumerate(numbers.values(), start=1):
            if views and headers is not None:
                torch._foreach_copy_(
                    views, list(headers[where, column].to(views[0].dtype).split(1))
                )
        if buffer:
            torch._foreach_copy_(state, buffer)
