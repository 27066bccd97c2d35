"""A bucket, or portion, on one rank: what the rank packs, orthogonalizes and updates.

The glossary of this package has the words. The plan, and the groups and dtypes of parameters,
determine the views of buffers, matrices and parameters. They are created once, by
`Bucket.use_buffers` and `Bucket.bind`, so that in a step each method is a few operations on lists
of views.

The order of use is `pack`, the gather, `assemble`, orthogonalization by the caller, `pack_updates`,
the return, `take_state`, and the update of `update_lists` by the caller.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from deepmd_muon.optim.rules.interface import Input, MatrixRule
from deepmd_muon.optim.rules.master_weights import MASTER
from deepmd_muon.optim.sharded.messages import (
    FIRST_STATE,
    PRESENCE,
    MatrixPlace,
    RankJobs,
    Side,
    local_shape,
    rectangles,
    rows_index,
    stacks_of,
)
from deepmd_muon.optim.sharded.plan import WORD_BYTES, rule_values
from deepmd_muon.optim.sharded.rule_state import CopyList, RuleState
from deepmd_muon.optim.sharded.transport import Exchange
from deepmd_muon.optim.torch_hooks import phase


@dataclasses.dataclass(frozen=True)
class LocalParameter:
    """A parameter on this rank.

    Attributes
    ----------
    p, momentum, state
        The elements that this rank updates, its momentum, and its rules' state by key.
    group
        Number of its parameter group.
    first_statistics_row
        Its first row in the table of statistics.
    """

    p: Tensor
    momentum: Tensor
    state: Mapping[str, Tensor]
    group: int
    first_statistics_row: int


@dataclasses.dataclass(frozen=True)
class MomentumBatch:
    """Momenta of one parameter group and dtype that advance together.

    Attributes
    ----------
    group
        Number of the parameter group.
    parameters
        Positions in the plan.
    shapes
        Shapes of the local momenta, (batch, rows, columns).
    part_slices
        For each parameter, the rows and columns of each part of its matrix: several in a fused
        weight.
    """

    group: int
    parameters: list[int]
    shapes: list[tuple[int, int, int]]
    part_slices: list[list[tuple[slice, slice]]]


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
        State of rules by key: (matrices,) per block; per line (matrices, lines), or
        (matrices, lines, values) if the rule keeps vectors.
    """

    present: list[Tensor]
    measured: dict[MatrixRule, list[Tensor]]
    state: list[dict[str, Tensor]]


@dataclasses.dataclass
class UpdateList:
    """Pieces of one parameter group and dtype that are updated together.

    Attributes
    ----------
    targets, updates
        Views of the parameters, and of the buffer that their updates arrive in, in the wire type.
    masters
        Views of the float32 master weights of 16-bit parameters; empty without them.
    """

    targets: list[Tensor] = dataclasses.field(default_factory=list)
    updates: list[Tensor] = dataclasses.field(default_factory=list)
    masters: list[Tensor] = dataclasses.field(default_factory=list)


class PackSource(NamedTuple):
    """Where a piece's elements are on this rank."""

    parameter: int
    shape: tuple[int, int, int]  # of the local tensor, (batch, rows, columns)
    local_index: tuple[int, slice, slice] | None  # of the piece in it; None: all of it


class Bucket:
    """A bucket, or portion, compiled for this rank.

    `group_numbers` has the parameter group of each parameter, by position in the plan.

    Attributes
    ----------
    parameters
        Positions in the plan of the parameters of which this rank packs or updates a piece. Their
        momenta advance on every replica, even if another replica's momentum is sent.
    momentum_batches
        The momenta among these that no earlier bucket has advanced; set by `Pipeline`.
    statistics_rows
        The rows of these momenta in the table of statistics; set by `Pipeline`.
    measuring_rules
        The rules with statistics in the headers.
    n_sums
        Number of values of these statistics.
    input_kinds
        The inputs that rules request besides directions; each is one more plane.
    updated_pieces
        The pieces that this rank updates, in the order of the messages.
    stacks
        The matrices that this rank orthogonalizes.
    matrices, inputs
        Each stack as a tensor (matrices, rows, columns), and its inputs by kind; set by
        `use_buffers`. `matrices` are directions after `assemble`, updates after `pack_updates`.
    update_lists
        The updates of this rank, with their parameter group; set by `bind`.
    changed
        For each of `updated_pieces`: views of the parameter and of the master weight, if any, that
        its update changes; empty for a piece without elements. Set by `bind`.
    """

    # Set by `use_buffers`.
    _rule_state: RuleState
    _arriving_copies: CopyList
    _leaving_copies: CopyList
    # Set by `bind`. Item k is for piece k of `_packed_pieces`.
    _pack_sources: list[PackSource]
    _pack_targets: list[list[Tensor]]  # by plane, then by piece
    _headers: Tensor  # float64 (pieces, words of a header)
    # Set by `bind`, with an item for each piece with sums.
    _measured_pieces: slice | Tensor
    _measured_rows: Tensor

    def __init__(
        self,
        rank_jobs: RankJobs,
        group_numbers: Mapping[int, int],
        process_group: dist.ProcessGroup | None,
        device: torch.device,
    ) -> None:
        rules = rank_jobs.domain.rules
        self.exchange = Exchange(rank_jobs, process_group, device)
        self.momentum_batches: list[MomentumBatch] = []
        self.statistics_rows = slice(0, 0)
        self.measuring_rules = tuple(rule for rule in rules if rule.sums)
        self.n_sums = rule_values(rules).sums
        self.input_kinds = rule_values(rules).inputs
        self._rank_jobs = rank_jobs
        self._device = device

        self._packed_pieces = [x.piece for x in self.exchange.packing.pieces]
        self.updated_pieces = [x.piece for x in self.exchange.applying.pieces]
        # Each once, in the order of this rank's messages.
        positions = [piece.parameter for piece in (*self._packed_pieces, *self.updated_pieces)]
        self.parameters = tuple(dict.fromkeys(positions))

        self.stacks = stacks_of(rank_jobs, group_numbers)
        self._place_of_job = {
            job_number: MatrixPlace(stack_number, index)
            for stack_number, stack in enumerate(self.stacks)
            for index, job_number in enumerate(stack.job_numbers)
        }
        # Owned matrices are numbered stack by stack.
        self._pieces_of_matrix = self._index_of_arriving_pieces().to(device)
        matrix_of_job = {job_number: i for i, job_number in enumerate(self._place_of_job)}
        leaving = [matrix_of_job[x.job_number] for x in self.exchange.leaving.pieces]
        self._matrix_of_leaving = torch.tensor(leaving, dtype=torch.int64, device=device)

    def _index_of_arriving_pieces(self) -> Tensor:
        """Return the index of each owned matrix's arriving pieces, int64 (matrices, most pieces).

        Matrices of fewer pieces are padded with the index after the last, where `assemble` adds
        zeros.
        """
        pieces_of_job: dict[int, list[int]] = {job_number: [] for job_number in self._place_of_job}
        arriving = self.exchange.arriving.pieces
        for number, message_piece in enumerate(arriving):
            pieces_of_job[message_piece.job_number].append(number)
        most = max(map(len, pieces_of_job.values()), default=0)
        padded = [
            numbers + [len(arriving)] * (most - len(numbers)) for numbers in pieces_of_job.values()
        ]
        # On the CPU even under a default device: the caller moves it.
        return torch.tensor(padded, dtype=torch.int64, device="cpu")

    @property
    def advanced(self) -> list[int]:
        """Positions in the plan of the parameters in `momentum_batches`, in this order."""
        return [i for batch in self.momentum_batches for i in batch.parameters]

    @property
    def _first_sum(self) -> int:
        """The first word of the sums in a header of the gather."""
        return FIRST_STATE + len(self._rule_state.keys)

    @property
    def workspace_words(self) -> int:
        """Words that the matrices and their inputs need of the workspace."""
        elements = (1 + len(self.input_kinds)) * sum(stack.elements for stack in self.stacks)
        return -(-elements * self._rank_jobs.full_dtype.itemsize // WORD_BYTES)  # rounded up

    # ----- views, created once -------------------------------------------------------------------

    def use_buffers(self, holder_buffer: Tensor, owner_buffer: Tensor, workspace: Tensor) -> None:
        """Create the views of these buffers, and matrices and inputs as views of the workspace.

        All three are float64; the matrices are in full precision.
        """
        self.exchange.use_buffers(holder_buffer, owner_buffer)
        self._rule_state = RuleState(
            self._rank_jobs,
            self.exchange,
            stacks=self.stacks,
            place_of_job=self._place_of_job,
            device=self._device,
        )
        flat = workspace.view(self._rank_jobs.full_dtype)
        start = 0
        # Plane 0 is directions, then `input_kinds`. A tensor is (matrices, rows, columns).
        stacks_of_planes: list[list[Tensor]] = []
        for _ in ("direction", *self.input_kinds):
            tensors_of_stacks = []
            for stack in self.stacks:
                tensor = flat[start : start + stack.elements].view(-1, *stack.shape)
                tensors_of_stacks.append(tensor)
                start += stack.elements
            stacks_of_planes.append(tensors_of_stacks)
        self.matrices, *inputs = stacks_of_planes
        self.inputs: dict[Input, list[Tensor]] = dict(zip(self.input_kinds, inputs, strict=True))
        self._arriving_copies = self._copies(self.exchange.arriving, stacks_of_planes)
        self._leaving_copies = self._copies(self.exchange.leaving, [self.matrices])

    def _copies(self, side: Side, stacks_of_planes: Sequence[Sequence[Tensor]]) -> CopyList:
        """Return the copies between the elements of pieces and the matrices of each plane."""
        copies = CopyList()
        for plane, tensors_of_stacks in enumerate(stacks_of_planes):
            views = side.element_views(plane)
            for message_piece, in_buffer in zip(side.pieces, views, strict=True):
                place = self._place_of_job[message_piece.job_number]
                matrix = tensors_of_stacks[place.stack][place.matrix]
                for in_piece, in_block in rectangles(message_piece.piece):
                    copies.add(in_buffer[in_piece], matrix[in_block])
        return copies

    def bind(self, local_params: Mapping[int, LocalParameter]) -> None:
        """Create all views of this rank's parameters, by position in the plan."""
        self._rule_state.bind({i: param.state for i, param in local_params.items()})
        self._bind_packing(local_params)
        self._bind_applying(local_params)

    def _bind_packing(self, local_params: Mapping[int, LocalParameter]) -> None:
        """Create the views into which `pack` writes elements, and the headers of a usual step."""
        plan = self._rank_jobs.plan
        side = self.exchange.packing
        views_of_planes = [side.element_views(plane) for plane in range(side.n_planes)]
        self._pack_sources = []
        self._pack_targets = [[] for _ in views_of_planes]
        # For headers with sums: positions of their pieces, and rows in the table of statistics.
        measured_pieces = []
        measured_rows = []
        for k, piece in enumerate(self._packed_pieces):
            planned = plan.parameters[piece.parameter]
            param = local_params[piece.parameter]
            shape = local_shape(plan, piece.parameter, piece.rank, "gather")
            assert piece.elements  # no source is without (`Job.sources`)
            # A piece of all elements has their order, too: the local tensor is copied as it is,
            # without a reshape in every step.
            is_whole = piece.elements == param.momentum.numel()
            index = None if is_whole else piece.local_index
            self._pack_sources.append(PackSource(piece.parameter, shape, index))
            for targets, views in zip(self._pack_targets, views_of_planes, strict=True):
                target = views[k]
                targets.append(target.view(param.momentum.shape) if is_whole else target)
            if rule_values(planned.rules).sums:
                # In the order of rows of `Pipeline._lay_out_statistics`.
                part_number = piece.block % len(planned.view.block_shapes)
                row = part_number * shape[0] + piece.batch_index
                measured_pieces.append(k)
                measured_rows.append(param.first_statistics_row + row)
        self._headers = torch.zeros(
            side.header_index.shape, dtype=torch.float64, device=self._device
        )
        self._headers[:, PRESENCE] = 1.0  # `pack` clears it where a gradient is missing
        self._measured_pieces = rows_index(measured_pieces, len(self._packed_pieces), self._device)
        self._measured_rows = torch.tensor(measured_rows, dtype=torch.int64, device=self._device)

    def _bind_applying(self, local_params: Mapping[int, LocalParameter]) -> None:
        """Create the views of parameters and master weights, and of their updates."""
        plan = self._rank_jobs.plan
        updates = self.exchange.applying.element_views()
        # By parameter group and dtype, which decide on masters: all pieces of a list have them, or
        # none.
        by_kind: dict[tuple[int, torch.dtype], UpdateList] = defaultdict(UpdateList)
        self.changed: list[list[Tensor]] = [[] for _ in self.updated_pieces]
        for k, (piece, update) in enumerate(zip(self.updated_pieces, updates, strict=True)):
            if not piece.elements:
                continue
            param = local_params[piece.parameter]
            shape = local_shape(plan, piece.parameter, piece.rank, "return")
            target = param.p.view(shape)[piece.local_index]  # a view: updated in place
            update_list = by_kind[param.group, param.p.dtype]
            update_list.targets.append(target)
            update_list.updates.append(update)
            self.changed[k].append(target)
            if MASTER in param.state:
                master = param.state[MASTER].view(shape)[piece.local_index]
                update_list.masters.append(master)
                self.changed[k].append(master)
        self.update_lists = [
            (group, update_list) for (group, _dtype), update_list in by_kind.items()
        ]

    # ----- a step --------------------------------------------------------------------------------

    @phase("gather")
    def pack(
        self,
        plane_tensors: Sequence[Mapping[int, Tensor]],
        *,
        statistics: Tensor,
        without_gradient: Collection[int],
    ) -> None:
        """Write elements and headers into the buffer for the owners.

        Parameters
        ----------
        plane_tensors
            The directions of this rank by position in the plan, each shaped like the local
            momentum; then, likewise, each input in `input_kinds`.
        statistics
            The table of statistics of this rank's momenta, float64 (rows, sums).
        without_gradient
            The parameters without a gradient on this rank, by position in the plan.
        """
        for targets, values in zip(self._pack_targets, plane_tensors, strict=True):
            if targets:
                sources = [
                    values[source.parameter]
                    if source.local_index is None
                    else values[source.parameter].reshape(source.shape)[source.local_index]
                    for source in self._pack_sources
                ]
                torch._foreach_copy_(targets, sources)
        headers = self._headers
        absent = [
            k for k, piece in enumerate(self._packed_pieces) if piece.parameter in without_gradient
        ]
        if absent:
            # Every step overwrites the same fields, and PRESENCE is not one of them: `_headers`
            # must keep it.
            headers = headers.clone()
            # Views, because a list as an index would be copied from the host.
            torch._foreach_zero_([headers[k, PRESENCE : PRESENCE + 1] for k in absent])
        self._rule_state.pack(headers)
        if self.n_sums:
            sums = statistics[:, : self.n_sums][self._measured_rows]
            headers[self._measured_pieces, self._first_sum :] = sums
        self.exchange.packing.write_headers(headers)

    @phase("gather")
    def assemble(self) -> OwnedBlocks:
        """Assemble the received pieces in `matrices` and `inputs`."""
        if not self.stacks:
            return OwnedBlocks(present=[], measured={}, state=[])
        self._arriving_copies.read_buffer()
        headers = self.exchange.arriving.read_headers()
        padding = headers.new_zeros(1, headers.shape[1])  # see `_index_of_arriving_pieces`
        # (matrices, most pieces, words of a header)
        headers = torch.cat([headers, padding])[self._pieces_of_matrix]
        stack_sizes = [len(stack.job_numbers) for stack in self.stacks]
        present = headers[:, :, PRESENCE].amax(dim=1).split(stack_sizes)
        measured = {}
        column = self._first_sum
        for rule in self.measuring_rules:
            sums = headers[:, :, column : column + rule.sums]
            measured[rule] = list(rule.combine(sums).split(stack_sizes))
            column += rule.sums
        # All holders of a matrix have the same state per block: take the first piece's header.
        state = self._rule_state.arrive(headers[:, 0])
        return OwnedBlocks(list(present), measured, state)

    @phase("return")
    def pack_updates(self, updates: Sequence[Tensor], owned: OwnedBlocks) -> None:
        """Write every holder's piece of the updates into the buffer for the holders.

        There is one tensor of updates per stack.
        """
        if not self.stacks:
            return
        torch._foreach_copy_(self.matrices, list(updates))
        self._leaving_copies.write_buffer()
        # In the order of PRESENCE, FIRST_STATE, …
        columns = [torch.cat(owned.present), *self._rule_state.leave(owned.state)]
        headers = torch.stack(columns, dim=1)[self._matrix_of_leaving]
        self.exchange.leaving.write_headers(headers)

    @phase("return")
    def take_state(self) -> None:
        """Write the returned state of rules to the state on this rank."""
        self._rule_state.take()
