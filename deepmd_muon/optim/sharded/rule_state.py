"""The rules' state in the messages of one bucket.

Holders pack it, owners advance it, and holders take it back. The headers of pieces contain the
numbers per block. The numbers per row or column (*lines*) follow the headers, before the elements.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from deepmd_muon.optim.rules.interface import MatrixRule, StateTensor
from deepmd_muon.optim.rules.registry import tensors_of
from deepmd_muon.optim.sharded.layout import overlap, score_runs_by_rank
from deepmd_muon.optim.sharded.messages import Stack, lines_of
from deepmd_muon.optim.sharded.plan import Plan, carried
from deepmd_muon.optim.sharded.transport import End, Exchange, Payload

LocalState = Mapping[int, Mapping[str, Tensor]]
"""This rank's state tensors, by parameter of the plan and key."""


class BlockNumbers(NamedTuple):
    """Numbers per block of some of this rank's pieces.

    Attributes
    ----------
    pieces
        The positions of these pieces: an index of rows of headers. A slice if it is all of them.
    state
        For each of these pieces, its block's number as a view of the state, (1,).
    """

    pieces: slice | Tensor
    state: list[Tensor]


@dataclasses.dataclass
class CopyList:
    """Pairs of views of equal shapes: elements are copied between `buffer` and `local` memory."""

    buffer: list[Tensor] = dataclasses.field(default_factory=list)
    local: list[Tensor] = dataclasses.field(default_factory=list)

    def write_buffer(self) -> None:
        """Copy from the local memory to the buffer."""
        if self.buffer:
            torch._foreach_copy_(self.buffer, self.local)

    def read_buffer(self) -> None:
        """Copy from the buffer to the local memory."""
        if self.buffer:
            torch._foreach_copy_(self.local, self.buffer)


class RuleState:
    """State of rules in one bucket on this rank.

    `stacks` are the matrices that this rank owns; `place_of_job` has the number of each job's stack
    and the index of its matrix in the stack.

    Attributes
    ----------
    keys
        Keys of the state tensors with one number per block; their columns in the headers start
        at 1.
    """

    def __init__(
        self,
        plan: Plan,
        rules: tuple[MatrixRule, ...],
        exchange: Exchange,
        stacks: Sequence[Stack],
        place_of_job: Mapping[int, tuple[int, int]],
        rank: int,
        device: torch.device,
    ) -> None:
        self._plan = plan
        self._exchange = exchange
        self._rank = rank
        self._device = device
        self._jobs = exchange.messages.jobs
        self.keys = carried(rules).block_keys
        self._dtypes = {
            key: tensor.dtype_for(exchange.full_dtype) for key, tensor in tensors_of(rules).items()
        }
        self._single_values = {
            key for key, tensor in carried(rules).line_tensors if tensor.along is None
        }
        self._place_of_job = place_of_job
        self._stack_sizes = [len(stack.jobs) for stack in stacks]
        # The lines of owned matrices, (matrices, lines, values), from their arrival until they
        # have left.
        self._owned: list[dict[str, Tensor]] = []
        for stack in stacks:
            rows, columns = stack.shape
            lines = {}
            for key, tensor in self._line_tensors(stack.jobs[0]):
                n_lines = rows if tensor.extent == "rows" else columns
                size = (len(stack.jobs), n_lines, tensor.length(rows, columns))
                lines[key] = torch.zeros(size, dtype=torch.float64, device=device)
            self._owned.append(lines)

    def _line_tensors(self, job: int) -> tuple[tuple[str, StateTensor], ...]:
        """Return key and description of the state per row or column of a job's parameter."""
        return carried(self._plan.parameters[self._jobs[job].parameter].rules).line_tensors

    # ----- views, created once -------------------------------------------------------------------

    def bind(self, state: LocalState) -> None:
        """Create all views of the exchange's buffers and of the state."""
        sending = self._exchange.sending
        receiving = self._exchange.receiving
        self._packed_numbers = self._block_numbers(sending["gather"], state)
        self._packed_lines = self._local_lines(sending["gather"], state)
        self._returned_numbers = self._block_numbers(receiving["return"], state)
        self._returned_lines = self._local_lines(receiving["return"], state)
        self._arriving_lines = self._owned_lines(receiving["gather"])
        self._leaving_lines = self._owned_lines(sending["return"])

    def _block_numbers(self, end: End, state: LocalState) -> list[BlockNumbers]:
        """Return, in the order of `keys`, the numbers of the blocks of this rank's pieces."""
        return [self._numbers_of_key(key, end.payloads, state) for key in self.keys]

    def _numbers_of_key(
        self, key: str, payloads: Sequence[Payload], state: LocalState
    ) -> BlockNumbers:
        pieces = []
        views = []
        for number, payload in enumerate(payloads):
            job = self._jobs[payload.job]
            if key in state[job.parameter]:
                p = self._plan.parameters[job.parameter]
                local_blocks = score_runs_by_rank(p.shape, p.view, p.layout)[self._rank]
                index = overlap(local_blocks, job.block, job.block + 1).start
                pieces.append(number)
                views.append(state[job.parameter][key][index : index + 1])
        if len(pieces) == len(payloads):
            return BlockNumbers(slice(None), views)  # needs no gather on the device
        return BlockNumbers(torch.tensor(pieces, dtype=torch.int64, device=self._device), views)

    def _local_lines(self, end: End, state: LocalState) -> CopyList:
        """Return the copies between a buffer of this rank's pieces and its state."""
        copies = CopyList()
        for payload, start in zip(end.payloads, end.line_starts, strict=True):
            job = self._jobs[payload.job]
            for key, tensor in self._line_tensors(payload.job):
                lines = lines_of(self._plan, job.parameter, job.block, self._rank, tensor)
                if not lines.length:
                    continue
                stop = start + lines.length
                copies.buffer.append(end.buffer[start:stop].view(-1, lines.values))
                # Vectors of smaller blocks are padded in storage.
                local = state[job.parameter][key].view(lines.shape)[..., : lines.values]
                in_local = slice(lines.inside.start, lines.inside.stop)
                copies.local.append(local[lines.batch, in_local, lines.part_number])
                start = stop
        return copies

    def _owned_lines(self, end: End) -> CopyList:
        """Return the copies between a buffer of holders' pieces and the lines of owned matrices."""
        copies = CopyList()
        for payload, peer, start in zip(
            end.payloads, end.peers_of_pieces, end.line_starts, strict=True
        ):
            job = self._jobs[payload.job]
            stack_number, index = self._place_of_job[payload.job]
            for key, tensor in self._line_tensors(payload.job):
                lines = lines_of(self._plan, job.parameter, job.block, peer, tensor)
                if not lines.length:
                    continue
                for run_start, run_stop in lines.inside.runs:
                    stop = start + (run_stop - run_start) * lines.values
                    copies.buffer.append(end.buffer[start:stop].view(-1, lines.values))
                    copies.local.append(self._owned[stack_number][key][index, run_start:run_stop])
                    start = stop
        return copies

    # ----- a step --------------------------------------------------------------------------------

    def pack(self, headers: Tensor) -> None:
        """Write this rank's state to its pieces' headers, (pieces, fields), and to the buffer."""
        for column, numbers in enumerate(self._packed_numbers, start=1):
            if numbers.state:
                headers[numbers.pieces, column] = torch.cat(numbers.state).double()
        self._packed_lines.write_buffer()

    def arrive(self, headers: Tensor) -> list[dict[str, Tensor]]:
        """Return the state of the owned matrices by stack.

        `headers` has a header of each matrix, (matrices, fields).
        """
        self._arriving_lines.read_buffer()
        state: list[dict[str, Tensor]] = []
        for lines in self._owned:
            stack_state = {}
            for key, x in lines.items():
                if key in self._single_values:
                    x = x[:, :, 0]
                # A copy: `leave` writes the new state to `_owned`.
                stack_state[key] = x.to(self._dtypes[key], copy=True)
            state.append(stack_state)
        for column, key in enumerate(self.keys, start=1):
            numbers = headers[:, column].to(self._dtypes[key]).split(self._stack_sizes)
            for stack_state, x in zip(state, numbers, strict=True):
                stack_state[key] = x
        return state

    def leave(self, state: Sequence[Mapping[str, Tensor]]) -> Iterator[Tensor]:
        """Write the state of the owned matrices to the buffer; yield the columns of their headers.

        Each column is float64 (matrices,).
        """
        for lines, stack_state in zip(self._owned, state, strict=True):
            for key, x in lines.items():
                x.copy_(stack_state[key].view(x.shape))
        self._leaving_lines.write_buffer()
        for key in self.keys:
            yield torch.cat([stack_state[key] for stack_state in state]).double()

    def take(self, returned_headers: Callable[[], Tensor]) -> None:
        """Take the state back from the headers of this rank's pieces and from the buffer.

        `returned_headers` reads the headers, (pieces, fields), which costs a kernel on a GPU.
        """
        if any(numbers.state for numbers in self._returned_numbers):
            headers = returned_headers()
            for column, numbers in enumerate(self._returned_numbers, start=1):
                if numbers.state:
                    values = headers[numbers.pieces, column].to(numbers.state[0].dtype)
                    torch._foreach_copy_(numbers.state, list(values.split(1)))
        self._returned_lines.read_buffer()
