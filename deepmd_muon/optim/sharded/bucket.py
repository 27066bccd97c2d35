"""One exchange, or portion, on one rank: what it packs, orthogonalizes and updates.

Between which views of buffers, matrices and parameters elements are copied depends on the plan
alone. All views are created once, by `Bucket.bind`. In a step, each method is a few operations on
lists of views.

The order of use is `pack`, the gather, `assemble`, orthogonalization by the caller, `unpack`, the
return, `take_state`, and the update of `update_lists` by the caller.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from deepmd_muon.optim.rules.interface import Input, MatrixRule
from deepmd_muon.optim.rules.master_weights import MASTER
from deepmd_muon.optim.sharded.messages import Piece, Stack, local_shape, piece_of, rectangles
from deepmd_muon.optim.sharded.plan import Domain, Leg, Plan, carried
from deepmd_muon.optim.sharded.rule_state import CopyList, RuleState
from deepmd_muon.optim.sharded.transport import End, Exchange, Payload
from deepmd_muon.optim.torch_hooks import phase


@dataclasses.dataclass(frozen=True)
class LocalParameter:
    """A parameter on this rank: its elements, its rules' state by key, and its group."""

    p: Tensor
    state: Mapping[str, Tensor]
    group: int


@dataclasses.dataclass(frozen=True)
class OwnedBlocks:
    """Properties of an owner's matrices, gathered with their pieces; one tensor per stack.

    Attributes
    ----------
    present
        Positive if any piece had a gradient, float64 (matrices,).
    measured
        Statistics of rules, (matrices,).
    state
        State of rules by key, (matrices,) or (matrices, rows or columns).
    """

    present: list[Tensor]
    measured: dict[MatrixRule, list[Tensor]]
    state: list[dict[str, Tensor]]


@dataclasses.dataclass
class UpdateList:
    """Pieces of one parameter group and dtype that are updated together.

    Attributes
    ----------
    positions
        Positions in `Bucket.applying`.
    targets, updates
        Views of the parameters, and of the buffer that their updates arrive in, in the wire type.
    masters
        Views of the float32 master weights of 16-bit parameters; empty without them.
    """

    positions: list[int] = dataclasses.field(default_factory=list)
    targets: list[Tensor] = dataclasses.field(default_factory=list)
    updates: list[Tensor] = dataclasses.field(default_factory=list)
    masters: list[Tensor] = dataclasses.field(default_factory=list)


class PackSource(NamedTuple):
    """Where a piece's elements are on this rank."""

    parameter: int
    shape: tuple[int, int, int]  # of the local tensor, (batch, rows, columns)
    local_index: tuple[int, slice, slice] | None  # of the piece in it; None: all of it


class Bucket:
    """One exchange, compiled for this rank.

    `groups` has the number of the parameter group of each parameter, by position in the plan.

    Attributes
    ----------
    parameters
        Positions in the plan of the parameters of which this rank packs or updates a piece. Their
        momenta advance on every replica, even if another replica's momentum is sent.
    fresh
        The parameters among these that no earlier bucket advances; set by `Pipeline`.
    measuring
        The rules with statistics in the headers.
    asked
        The inputs that rules request besides directions; each is one more plane.
    applying
        The pieces that this rank updates, in the order of the messages.
    stacks
        The matrices that this rank orthogonalizes.
    elements
        Number of elements of these matrices and of their inputs.
    matrices, inputs
        These matrices as tensors, (count, rows, columns) each, and their inputs; set by `bind`.
    update_lists
        The updates of this rank, with their parameter group; set by `bind`.
    """

    def __init__(
        self,
        plan: Plan,
        domain: Domain,
        exchange: Exchange,
        groups: Mapping[int, int],
        rank: int,
        device: torch.device,
    ) -> None:
        self.exchange = exchange
        self.measuring = tuple(rule for rule in domain.rules if rule.sums)
        self.asked = carried(domain.rules).inputs
        self.fresh: tuple[int, ...] = ()
        self._plan = plan
        self._rank = rank
        self._device = device

        sending = exchange.sending
        receiving = exchange.receiving
        # As a holder, this rank handles its own pieces; as an owner, its peers' pieces.
        self._packing = self._pieces("gather", sending["gather"], holder=rank)
        self.applying = self._pieces("return", receiving["return"], holder=rank)
        self._arriving = self._pieces("gather", receiving["gather"])
        self._leaving = self._pieces("return", sending["return"])
        # Each once, in the order of the messages, which is the same in every process.
        positions = [piece.parameter for piece in (*self._packing, *self.applying)]
        self.parameters = tuple(dict.fromkeys(positions))

        self.stacks = self._stack_owned_blocks(groups)
        self.elements = (1 + len(self.asked)) * sum(stack.elements for stack in self.stacks)
        self._place_of_job = {
            job: (stack_number, index)
            for stack_number, stack in enumerate(self.stacks)
            for index, job in enumerate(stack.jobs)
        }
        # Headers are read and written in the order of the stacks.
        stacked_jobs = [job for stack in self.stacks for job in stack.jobs]
        block_number = {job: number for number, job in enumerate(stacked_jobs)}
        self._headers_of_block = _padded_table(
            [block_number[payload.job] for payload in receiving["gather"].payloads],
            len(stacked_jobs),
        ).to(device)
        self._block_of_leaving = _index(
            [block_number[payload.job] for payload in sending["return"].payloads], device
        )
        self._rule_state = RuleState(
            plan=plan,
            rules=domain.rules,
            exchange=exchange,
            stacks=self.stacks,
            place_of_job=self._place_of_job,
            rank=rank,
            device=device,
        )

    def _pieces(self, leg: Leg, end: End, *, holder: int | None = None) -> list[Piece]:
        """Return the piece of each payload, which `holder` holds, or else the rank's peer."""
        pieces = []
        for payload, peer in zip(end.payloads, end.peers_of_pieces, strict=True):
            job = self.exchange.messages.jobs[payload.job]
            rank = peer if holder is None else holder
            pieces.append(piece_of(self._plan, job.parameter, job.block, rank, leg))
        return pieces

    def _stack_owned_blocks(self, groups: Mapping[int, int]) -> list[Stack]:
        jobs_by_kind: dict[tuple[int, tuple[int, int]], list[int]] = {}
        for j in self.exchange.messages.owned:
            job = self.exchange.messages.jobs[j]
            shapes = self._plan.parameters[job.parameter].view.block_shapes
            # The parts of all matrices are alike.
            shape = shapes[job.block % len(shapes)]
            jobs_by_kind.setdefault((groups[job.parameter], shape), []).append(j)
        return [
            Stack(group=group, shape=shape, jobs=tuple(members))
            for (group, shape), members in jobs_by_kind.items()
        ]

    # ----- views, created once -------------------------------------------------------------------

    def bind(
        self,
        buffers: tuple[Tensor, Tensor],
        workspace: Tensor,
        local_params: Mapping[int, LocalParameter],
        momenta: Mapping[int, Tensor],
        rows: Mapping[int, int],
    ) -> None:
        """Create all views.

        Parameters
        ----------
        buffers
            Of the holders' and the owners' side.
        workspace
            Memory for the matrices, float64.
        local_params, momenta
            This rank's parameters and their local momenta, by position in the plan.
        rows
            Each parameter's first row in the table of statistics that `pack` takes.
        """
        self.exchange.bind(*buffers)
        self._bind_packing(momenta, rows)
        self._bind_matrices(workspace)
        self._bind_applying(local_params)
        self._rule_state.bind({i: param.state for i, param in local_params.items()})

    def _bind_packing(self, momenta: Mapping[int, Tensor], rows: Mapping[int, int]) -> None:
        """Create the views into which `pack` writes elements, and the headers."""
        plan = self._plan
        sending = self.exchange.sending["gather"]
        planes = [sending.element_views(plane) for plane in range(sending.planes)]
        self._pack_sources: list[PackSource] = []
        self._pack_targets: list[list[Tensor]] = [[] for _ in range(sending.planes)]
        measured_pieces = []
        statistics_rows = []
        for k, piece in enumerate(self._packing):
            planned = plan.parameters[piece.parameter]
            batch, n_rows, n_columns = local_shape(plan, piece.parameter, self._rank, "gather")
            if piece.elements:
                index: tuple[int, slice, slice] | None
                piece_shape: Sequence[int]
                if piece.elements == batch * n_rows * n_columns:
                    # The whole local tensor: copied as it is, without a reshape in every step.
                    index = None
                    piece_shape = momenta[piece.parameter].shape
                else:
                    index = piece.local_index
                    piece_shape = piece.rows.size, piece.columns.size
                source = PackSource(piece.parameter, (batch, n_rows, n_columns), index)
                self._pack_sources.append(source)
                for targets, plane in zip(self._pack_targets, planes, strict=True):
                    targets.append(plane[k].view(piece_shape))
            if carried(planned.rules).sums:
                n_parts = max(1, len(planned.view.sizes))
                row_in_parameter = (piece.block % n_parts) * batch + max(piece.batch, 0)
                measured_pieces.append(k)
                statistics_rows.append(rows[piece.parameter] + row_in_parameter)
        n_sums = sum(rule.sums for rule in self.measuring)
        fields = 1 + len(self._rule_state.keys) + n_sums
        self._headers = torch.zeros(
            len(self._packing), fields, dtype=torch.float64, device=self._device
        )
        self._headers[:, 0] = 1.0  # has a gradient; `pack` clears it for a missing gradient
        # A slice needs no gather on the device; usually all pieces are measured.
        all_measured = len(measured_pieces) == len(self._packing)
        self._measured_pieces = (
            slice(None) if all_measured else _index(measured_pieces, self._device)
        )
        self._statistics_rows = _index(statistics_rows, self._device)

    def _bind_matrices(self, workspace: Tensor) -> None:
        """Create matrices and inputs in the workspace, and the views of the owners' buffer."""
        flat = workspace.view(self.exchange.full_dtype)
        start = 0
        planes: list[list[Tensor]] = []
        for _ in ("direction", *self.asked):
            plane = []
            for stack in self.stacks:
                plane.append(flat[start : start + stack.elements].view(-1, *stack.shape))
                start += stack.elements
            planes.append(plane)
        self.matrices = planes[0]
        self.inputs: dict[Input, list[Tensor]] = dict(zip(self.asked, planes[1:], strict=True))

        receiving = self.exchange.receiving["gather"]
        self._arrive = CopyList()
        for number, plane in enumerate(planes):
            self._add_copies(
                self._arrive,
                payloads=receiving.payloads,
                pieces=self._arriving,
                flats=receiving.element_views(number),
                matrices=plane,
            )
        sending = self.exchange.sending["return"]
        self._leave = CopyList()
        self._add_copies(
            self._leave,
            payloads=sending.payloads,
            pieces=self._leaving,
            flats=sending.element_views(),
            matrices=self.matrices,
        )

    def _add_copies(
        self,
        copies: CopyList,
        payloads: Sequence[Payload],
        pieces: Sequence[Piece],
        flats: Sequence[Tensor],
        matrices: Sequence[Tensor],
    ) -> None:
        """Add every rectangle of the pieces as a view of its matrix and as a view of the buffer."""
        for payload, piece, flat in zip(payloads, pieces, flats, strict=True):
            if not piece.elements:
                continue
            stack_number, index = self._place_of_job[payload.job]
            matrix = matrices[stack_number][index]
            in_buffer = flat.view(piece.rows.size, piece.columns.size)
            for in_piece, in_block in rectangles(piece):
                copies.local.append(matrix[in_block])
                copies.buffer.append(in_buffer[in_piece])

    def _bind_applying(self, local_params: Mapping[int, LocalParameter]) -> None:
        """Create the views of parameters and master weights, and of their updates."""
        flats = self.exchange.receiving["return"].element_views()
        by_kind: dict[tuple[int, torch.dtype], UpdateList] = defaultdict(UpdateList)
        for k, (piece, flat) in enumerate(zip(self.applying, flats, strict=True)):
            if not piece.elements:
                continue
            param = local_params[piece.parameter]
            shape = local_shape(self._plan, piece.parameter, self._rank, "return")
            update_list = by_kind[param.group, param.p.dtype]
            update_list.positions.append(k)
            update_list.targets.append(param.p.view(shape)[piece.local_index])
            update_list.updates.append(flat.view(piece.rows.size, piece.columns.size))
            if MASTER in param.state:
                update_list.masters.append(param.state[MASTER].view(shape)[piece.local_index])
        self.update_lists = [(group, updates) for (group, _dtype), updates in by_kind.items()]

    # ----- a step --------------------------------------------------------------------------------

    @phase("gather")
    def pack(
        self,
        planes: Sequence[Mapping[int, Tensor]],
        statistics: Tensor | None,
        absent: Mapping[int, Tensor],
    ) -> None:
        """Write elements and headers into the buffer for the owners.

        Parameters
        ----------
        planes
            This rank's directions by parameter of the plan, shaped like the local momentum; then
            each input in `asked`.
        statistics
            The tables of the momentum updates that advanced this bucket's parameters, float64
            (rows, sums).
        absent
            The parameters without a gradient on this rank.
        """
        for targets, plane in zip(self._pack_targets, planes, strict=True):
            if targets:
                sources = [
                    plane[source.parameter]
                    if source.local_index is None
                    else plane[source.parameter].reshape(source.shape)[source.local_index]
                    for source in self._pack_sources
                ]
                torch._foreach_copy_(targets, sources)
        headers = self._headers
        without_gradient = [k for k, piece in enumerate(self._packing) if piece.parameter in absent]
        if without_gradient:
            headers = headers.clone()
            # Views, because a list as an index would be copied from the host.
            torch._foreach_zero_([headers[k, :1] for k in without_gradient])
        self._rule_state.pack(headers)
        if statistics is not None:
            statistics_start = 1 + len(self._rule_state.keys)
            headers[self._measured_pieces, statistics_start:] = statistics[self._statistics_rows]
        self.exchange.sending["gather"].set_headers(headers)

    @phase("gather")
    def assemble(self) -> OwnedBlocks:
        """Assemble the received pieces in `matrices` and `inputs`."""
        self._arrive.read_buffer()
        headers = self.exchange.receiving["gather"].headers()
        # A last row of zeros is what the table is padded with.
        headers = torch.cat([headers, headers.new_zeros(1, headers.shape[1])])
        of_blocks = headers[self._headers_of_block]  # (blocks, most pieces of a block, fields)
        stack_sizes = [len(stack.jobs) for stack in self.stacks]
        present = of_blocks[:, :, 0].amax(dim=1).split(stack_sizes)
        measured = {}
        column = 1 + len(self._rule_state.keys)
        for rule in self.measuring:
            sums = of_blocks[:, :, column : column + rule.sums]
            measured[rule] = list(rule.combine(sums).split(stack_sizes))
            column += rule.sums
        # All holders of a block have the same state per block: the first one's will do.
        state = self._rule_state.arrive(of_blocks[:, 0])
        return OwnedBlocks(list(present), measured, state)

    @phase("return")
    def unpack(self, updates: Sequence[Tensor], owned: OwnedBlocks) -> None:
        """Write every holder's piece of the updates into the buffer for the holders.

        There is one tensor of updates per stack.
        """
        if updates:
            torch._foreach_copy_(self.matrices, list(updates))
        self._leave.write_buffer()
        if not self.stacks:
            return
        columns = [torch.cat(owned.present), *self._rule_state.leave(owned.state)]
        headers = torch.stack(columns, dim=1)[self._block_of_leaving]
        self.exchange.sending["return"].set_headers(headers)

    @phase("return")
    def take_state(self) -> None:
        """Write the returned state of rules to the state on this rank."""
        self._rule_state.take(self.returned_headers)

    def returned_headers(self) -> Tensor:
        """Return the headers of returned pieces, (pieces, fields); presence is the first field."""
        return self.exchange.receiving["return"].headers()

    def changed_by_updates(self) -> Iterator[tuple[int, list[Tensor]]]:
        """Yield the number in `applying` of each piece, and views of what its update changes.

        They are views of its parameter and, if any, of its master weight.
        """
        for _, update_list in self.update_lists:
            for index, k in enumerate(update_list.positions):
                masters = update_list.masters[index : index + 1]
                yield k, [update_list.targets[index], *masters]


def _index(positions: Sequence[int], device: torch.device) -> Tensor:
    return torch.tensor(positions, dtype=torch.int64, device=device)


def _padded_table(block_of_piece: Sequence[int], n_blocks: int) -> Tensor:
    """Return each block's pieces, int64 (blocks, most pieces of a block).

    The padding is the number of all pieces.
    """
    pieces_of_block: list[list[int]] = [[] for _ in range(n_blocks)]
    for piece, block in enumerate(block_of_piece):
        pieces_of_block[block].append(piece)
    max_pieces = max((len(pieces) for pieces in pieces_of_block), default=1)
    padding = len(block_of_piece)
    rows = [pieces + [padding] * (max_pieces - len(pieces)) for pieces in pieces_of_block]
    # On the CPU even under a default device: the caller moves it.
    return torch.tensor(rows, dtype=torch.int64, device="cpu").view(n_blocks, max_pieces)
