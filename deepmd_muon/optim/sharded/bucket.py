"""One exchange on one rank: the pieces that it packs, the matrices that it orthogonalizes, the pieces it updates.

The views of buffers and parameters between which pieces are copied depend on the plan alone and are created once. A
step is then a few operations on lists of views.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from deepmd_muon.optim.phases import phase
from deepmd_muon.optim.rules.interface import MatrixRule
from deepmd_muon.optim.rules.master_weights import MASTER
from deepmd_muon.optim.sharded.messages import Piece, local_shape, piece_of, rectangles
from deepmd_muon.optim.sharded.plan import Domain, Leg, Plan, carried
from deepmd_muon.optim.sharded.rule_state import RuleState
from deepmd_muon.optim.sharded.transport import Exchange, Side


@dataclasses.dataclass(frozen=True)
class LocalParameter:
    """A parameter of the plan on this rank: its elements, the state of its rules by key, and its group."""

    p: Tensor
    state: Mapping[str, Tensor]
    group: int


@dataclasses.dataclass(frozen=True)
class Stack:
    """Matrices of one parameter group and shape that a rank orthogonalizes together."""

    group: int
    shape: tuple[int, int]
    jobs: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class OwnedBlocks:
    """Properties of an owner's matrices, gathered with their pieces; one tensor per stack.

    `present`, float64 (matrices,), is positive if any piece had a gradient. `measured` has the statistics of rules,
    (matrices,); `state` has their state by key, (matrices,) or (matrices, rows or columns).
    """

    present: list[Tensor]
    measured: dict[MatrixRule, list[Tensor]]
    state: list[dict[str, Tensor]]


@dataclasses.dataclass
class UpdateList:
    """Pieces of one parameter group and dtype that are updated together: `targets` take `updates`."""

    positions: list[int] = dataclasses.field(default_factory=list)
    targets: list[Tensor] = dataclasses.field(default_factory=list)
    updates: list[Tensor] = dataclasses.field(default_factory=list)
    masters: list[Tensor] = dataclasses.field(
        default_factory=list
    )  # of 16-bit parameters with master weights


class Bucket:
    """One exchange, compiled for this rank.

    `groups` has the number of the parameter group of every parameter of the plan.

    Attributes
    ----------
    parameters
        Positions in the plan of the parameters of which this rank packs or updates a piece. Their momenta advance on
        every replica, even if another replica's momentum is sent.
    measuring
        The rules whose statistics the headers carry.
    fresh
        The parameters among these whose momenta no earlier bucket advances.
    applying
        The pieces whose updates arrive here, in the order of the messages.
    stacks
        The matrices that this rank orthogonalizes.
    matrices, inputs
        These matrices as tensors, (count, rows, columns) each, and the inputs that rules request; set by `bind`.
    update_lists
        The updates of this rank, with their parameter group; set by `bind`.
    """

    def __init__(
        self,
        plan: Plan,
        domain: Domain,
        exchange: Exchange,
        groups: Sequence[int],
        rank: int,
        device: torch.device,
    ) -> None:
        self.exchange = exchange
        self.measuring = tuple(rule for rule in domain.rules if rule.sums)
        self.asked = carried(domain.rules).inputs
        self.fresh: tuple[int, ...] = ()
        self._plan, self._rank, self._device = plan, rank, device
        jobs = exchange.messages.jobs

        def pieces(leg: Leg, side: Side, ranks: Sequence[int]) -> list[Piece]:
            at = ((jobs[j], r) for (j, _, _), r in zip(side.payloads, ranks, strict=True))
            return [piece_of(plan, job.parameter, job.block, r, leg) for job, r in at]

        out, into = exchange.outward, exchange.inward
        self._packing = pieces("gather", out["gather"], [rank] * len(out["gather"].payloads))
        self.applying = pieces("return", into["return"], [rank] * len(into["return"].payloads))
        self._arriving = pieces("gather", into["gather"], into["gather"].peers)
        self._leaving = pieces("return", out["return"], out["return"].peers)
        self.parameters = tuple(
            dict.fromkeys(piece.parameter for piece in (*self._packing, *self.applying))
        )
        stacks: dict[tuple[int, tuple[int, int]], list[int]] = {}
        for j in exchange.messages.owned:
            p = plan.parameters[jobs[j].parameter]
            shape = p.view.block_shapes[jobs[j].block % len(p.view.block_shapes)]
            stacks.setdefault((groups[jobs[j].parameter], shape), []).append(j)
        self.stacks = [Stack(*key, tuple(members)) for key, members in stacks.items()]
        # Elements of the matrices, and of the inputs that rules request beside them.
        sizes = [len(stack.jobs) * stack.shape[0] * stack.shape[1] for stack in self.stacks]
        self.elements = (1 + len(self.asked)) * sum(sizes)
        self._slots = {
            j: (s, i) for s, stack in enumerate(self.stacks) for i, j in enumerate(stack.jobs)
        }
        order = {j: i for i, j in enumerate(j for stack in self.stacks for j in stack.jobs)}
        self._header_table = _table(
            [order[j] for j, _, _ in into["gather"].payloads], len(order)
        ).to(device)
        self._header_of_leaving = _index([order[j] for j, _, _ in out["return"].payloads], device)
        stacked = [(stack.jobs, stack.shape) for stack in self.stacks]
        self._rule_state = RuleState(plan, domain.rules, exchange, stacked, rank, device)

    def bind(
        self,
        buffers: tuple[Tensor, Tensor],
        workspace: Tensor,
        local_params: Mapping[int, LocalParameter],
        momenta: Sequence[Tensor],
        rows: Mapping[int, int],
    ) -> None:
        """Create all views.

        `workspace`, float64, holds the matrices. `local_params` and `momenta` are those of all parameters of the plan
        on this rank; `rows` has each parameter's first row in the table of sums that `pack` takes.
        """
        self.exchange.bind(*buffers)
        flat, start = workspace.view(self.exchange.dtype), 0
        planes: list[list[Tensor]] = [[] for _ in range(1 + len(self.asked))]
        for plane in planes:
            for stack in self.stacks:
                size = len(stack.jobs) * stack.shape[0] * stack.shape[1]
                plane.append(flat[start : start + size].view(-1, *stack.shape))
                start += size
        self.matrices, self.inputs = planes[0], dict(zip(self.asked, planes[1:], strict=True))
        self._bind_packing(local_params, momenta, rows)
        into, out = self.exchange.inward["gather"], self.exchange.outward["return"]
        self._arrive: tuple[list[Tensor], list[Tensor]] = [], []
        for number, plane in enumerate(planes):
            flats = into.elements(self.exchange.received["gather"], number)
            in_blocks, in_buffer = self._rectangles(into.payloads, self._arriving, flats, plane)
            self._arrive[0].extend(in_blocks)
            self._arrive[1].extend(in_buffer)
        flats = out.elements(self.exchange.sent["return"])
        self._leave = self._rectangles(out.payloads, self._leaving, flats, self.matrices)
        self._bind_applying(local_params)
        self._rule_state.bind({i: own.state for i, own in local_params.items()})

    def _bind_packing(
        self,
        local_params: Mapping[int, LocalParameter],
        momenta: Sequence[Tensor],
        rows: Mapping[int, int],
    ) -> None:
        """Create the views into which `pack` writes directions, inputs and sums of rules, and their state."""
        side, plan = self.exchange.outward["gather"], self._plan
        self._pack_into: list[list[Tensor]] = [[] for _ in range(side.planes)]
        planes = [
            side.elements(self.exchange.sent["gather"], plane) for plane in range(side.planes)
        ]
        self._pack_from: list[
            tuple[int, tuple[int, int, int], tuple[int, slice, slice] | None]
        ] = []
        summed, found = [], []
        for k, (piece, *flats) in enumerate(zip(self._packing, *planes, strict=True)):
            shape = local_shape(plan, piece.parameter, self._rank, "gather")
            parameter = plan.parameters[piece.parameter]
            size: Sequence[int] = piece.rows.size, piece.columns.size
            where: tuple[int, slice, slice] | None = None
            if piece.elements == shape[0] * shape[1] * shape[2]:
                size = momenta[piece.parameter].shape
            else:
                where = piece.batch, slice(*piece.rows[:2]), slice(*piece.columns[:2])
            if piece.elements:
                self._pack_from.append((piece.parameter, shape, where))
                for into, flat in zip(self._pack_into, flats, strict=True):
                    into.append(flat.view(size))
            if carried(parameter.rules).sums:
                part = piece.block % max(1, len(parameter.view.sizes))
                summed.append(k)
                found.append(rows[piece.parameter] + part * shape[0] + max(piece.batch, 0))
        fields = 1 + len(self._rule_state.keys) + sum(rule.sums for rule in self.measuring)
        self._headers = torch.zeros(
            len(self._packing), fields, dtype=torch.float64, device=self._device
        )
        self._headers[:, 0] = 1.0
        everything = len(summed) == len(self._packing)
        self._summed = slice(None) if everything else _index(summed, self._device)
        self._sums_of_packed = _index(found, self._device)

    def _bind_applying(self, local_params: Mapping[int, LocalParameter]) -> None:
        """Create the views of parameters and of the rules' state that are updated, and of their updates."""
        side, plan = self.exchange.inward["return"], self._plan
        update_lists: dict[tuple[int, torch.dtype], UpdateList] = defaultdict(UpdateList)
        flats = side.elements(self.exchange.received["return"])
        for k, (piece, flat) in enumerate(zip(self.applying, flats, strict=True)):
            mine = local_params[piece.parameter]
            if piece.elements:
                update_list = update_lists[mine.group, mine.p.dtype]
                shape = local_shape(plan, piece.parameter, self._rank, "return")
                rows, columns = slice(*piece.rows[:2]), slice(*piece.columns[:2])
                update_list.positions.append(k)
                update_list.targets.append(mine.p.view(shape)[piece.batch, rows, columns])
                if MASTER in mine.state:
                    update_list.masters.append(
                        mine.state[MASTER].view(shape)[piece.batch, rows, columns]
                    )
                update_list.updates.append(flat.view(piece.rows.size, piece.columns.size))
        self.update_lists = [
            (group, update_list) for (group, _), update_list in update_lists.items()
        ]

    def _rectangles(
        self,
        payloads: Sequence[tuple[int, int, int]],
        pieces: Sequence[Piece],
        flats: Sequence[Tensor],
        matrices: Sequence[Tensor],
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Return the rectangles of pieces as views of the matrices, and as views of the buffer."""
        in_blocks, in_buffer = [], []
        for (j, _, _), piece, flat in zip(payloads, pieces, flats, strict=True):
            if not piece.elements:
                continue
            s, i = self._slots[j]
            for in_piece, in_block in rectangles(piece):
                in_blocks.append(matrices[s][i][in_block])
                in_buffer.append(flat.view(piece.rows.size, piece.columns.size)[in_piece])
        return in_blocks, in_buffer

    @phase("gather")
    def pack(
        self,
        planes: Sequence[Mapping[int, Tensor]],
        sums: Tensor | None,
        absent: Mapping[int, Tensor],
    ) -> None:
        """Write directions, inputs of rules, presence, state and sums of rules into the buffer for the owners.

        `planes` has this rank's directions by parameter of the plan, shaped like the local momentum, and likewise each
        input in `asked`. `sums`, float64 (…, sums), has the rules' statistics of the pieces of all parameters. `absent`
        has the parameters without a gradient on this rank.
        """
        for into, plane in zip(self._pack_into, planes, strict=True):
            if into:
                sources = [
                    plane[i] if where is None else plane[i].reshape(shape)[where]
                    for i, shape, where in self._pack_from
                ]
                torch._foreach_copy_(into, sources)
        headers = self._headers
        gone = (
            [k for k, piece in enumerate(self._packing) if piece.parameter in absent]
            if absent
            else []
        )
        if gone:
            headers = headers.clone()
            torch._foreach_zero_(
                [headers[k, :1] for k in gone]
            )  # a list as index would be copied from the host
        self._rule_state.pack(headers)
        if sums is not None:
            headers[self._summed, 1 + len(self._rule_state.keys) :] = sums[self._sums_of_packed]
        self.exchange.sent["gather"][self.exchange.outward["gather"].headers] = headers

    @phase("gather")
    def assemble(self) -> OwnedBlocks:
        """Assemble the received pieces in `matrices`."""
        if self._arrive[0]:
            torch._foreach_copy_(*self._arrive)
        headers = self.exchange.received["gather"][self.exchange.inward["gather"].headers]
        padded = torch.cat([headers, headers.new_zeros(1, headers.shape[1])])[self._header_table]
        sizes = [len(stack.jobs) for stack in self.stacks]
        present = padded[:, :, 0].amax(dim=1).split(sizes)
        measured, column = {}, 1 + len(self._rule_state.keys)
        for rule in self.measuring:
            measured[rule] = list(
                rule.combine(padded[:, :, column : column + rule.sums]).split(sizes)
            )
            column += rule.sums
        # All senders of pieces of a block have the same state per block.
        return OwnedBlocks(list(present), measured, self._rule_state.arrive(padded[:, 0]))

    @phase("scatter")
    def unpack(self, updates: Sequence[Tensor], owned: OwnedBlocks) -> None:
        """Write every holder's piece of the updates, one tensor per stack, into the buffer for the holders."""
        if updates:
            torch._foreach_copy_(self.matrices, list(updates))
        if self._leave[0]:
            torch._foreach_copy_(self._leave[1], self._leave[0])
        columns = (
            [torch.cat(owned.present), *self._rule_state.leave(owned.state)] if self.stacks else []
        )
        if not columns:
            return
        headers = torch.stack(columns, dim=1)[self._header_of_leaving]
        self.exchange.sent["return"][self.exchange.outward["return"].headers] = headers

    def changed_by_updates(self) -> Iterator[tuple[int, list[Tensor]]]:
        """Yield, for each piece updated here, its number and views of the parameter and, if any, the master weight."""
        for _, kind in self.update_lists:
            masters: Iterable[list[Tensor]] = (
                ([x] for x in kind.masters) if kind.masters else itertools.repeat([])
            )
            for k, target, master in zip(kind.positions, kind.targets, masters, strict=False):
                yield k, [target, *master]

    @phase("scatter")
    def take_state(self) -> None:
        """Write the returned state of rules to the state on this rank."""
        self._rule_state.take(self.returned_headers)

    def returned_headers(self) -> Tensor:
        """Return the header of every returned piece, (pieces, fields), which begins with its block's presence."""
        return self.exchange.received["return"][self.exchange.inward["return"].headers]


def _index(positions: Sequence[int], device: torch.device) -> Tensor:
    return torch.tensor(positions, dtype=torch.int64, device=device)


def _table(owners: Sequence[int], count: int) -> Tensor:
    """Return int64 (count, most): each owned block's positions of pieces, padded with the number of pieces."""
    pieces: list[list[int]] = [[] for _ in range(count)]
    for i, owner in enumerate(owners):
        pieces[owner].append(i)
    most = max((len(found) for found in pieces), default=1)
    rows = [found + [len(owners)] * (most - len(found)) for found in pieces]
    return torch.tensor(rows, dtype=torch.int64, device="cpu").view(count, most)
