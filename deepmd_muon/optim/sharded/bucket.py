"""One exchange, or portion, on one rank: what it packs, orthogonalizes and updates.

The glossary of this package has the words. Between which views of buffers, matrices and parameters
elements are copied depends on the plan alone. All views are created once, by `Bucket.allocate` and
`Bucket.bind`. In a step, each method is a few operations on lists of views.

The order of use is `pack`, the gather, `assemble`, orthogonalization by the caller, `pack_updates`,
the return, `take_state`, and the update of `update_lists` by the caller.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from deepmd_muon.optim.rules.interface import Input, MatrixRule
from deepmd_muon.optim.rules.master_weights import MASTER
from deepmd_muon.optim.sharded.messages import (
    RankJobs,
    Side,
    index_of,
    local_shape,
    rectangles,
    stacks_of,
)
from deepmd_muon.optim.sharded.plan import carried
from deepmd_muon.optim.sharded.rule_state import CopyList, RuleState
from deepmd_muon.optim.sharded.transport import Exchange
from deepmd_muon.optim.torch_hooks import phase

_WORKSPACE_WORD = 8  # bytes of an element of the workspace, float64


@dataclasses.dataclass(frozen=True)
class LocalParameter:
    """A parameter on this rank.

    Attributes
    ----------
    p, momentum, state
        Its elements, its momentum, and its rules' state by key.
    group
        Number of its parameter group.
    first_row
        Its first row in the table of statistics.
    """

    p: Tensor
    momentum: Tensor
    state: Mapping[str, Tensor]
    group: int
    first_row: int


@dataclasses.dataclass(frozen=True)
class MomentumGroup:
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
    """One exchange, compiled for this rank.

    `groups` has the number of the parameter group of each parameter, by position in the plan.

    Attributes
    ----------
    parameters
        Positions in the plan of the parameters of which this rank packs or updates a piece. Their
        momenta advance on every replica, even if another replica's momentum is sent.
    momentum_groups
        The momenta among these that no earlier bucket has advanced; set by `Pipeline`.
    rows
        The rows of these momenta in the table of statistics; set by `Pipeline`.
    measuring
        The rules with statistics in the headers.
    n_sums
        Number of values of these statistics.
    asked
        The inputs that rules request besides directions; each is one more plane.
    applying
        The pieces that this rank updates, in the order of the messages.
    stacks
        The matrices that this rank orthogonalizes.
    matrices, inputs
        These matrices as tensors, (count, rows, columns) each, and their inputs; set by `allocate`.
    update_lists
        The updates of this rank, with their parameter group; set by `bind`.
    changed
        Views of what the update of each piece changes, by number in `applying`: of its parameter
        and, if any, of its master weight. Set by `bind`.
    """

    def __init__(
        self,
        rank_jobs: RankJobs,
        groups: Mapping[int, int],
        process_group: dist.ProcessGroup | None,
        device: torch.device,
    ) -> None:
        rules = rank_jobs.domain.rules
        self.exchange = Exchange(rank_jobs, process_group, device)
        self.momentum_groups: list[MomentumGroup] = []
        self.rows = slice(0, 0)
        self.measuring = tuple(rule for rule in rules if rule.sums)
        self.n_sums = carried(rules).sums
        self.asked = carried(rules).inputs
        self._rank_jobs = rank_jobs
        self._device = device

        self._packed = [x.piece for x in self.exchange.packing.pieces]
        self.applying = [x.piece for x in self.exchange.applying.pieces]
        # Each once, in the order of the messages, which is the same in every process.
        positions = [piece.parameter for piece in (*self._packed, *self.applying)]
        self.parameters = tuple(dict.fromkeys(positions))

        self.stacks = stacks_of(rank_jobs, groups)
        self._place_of_job = {
            job: (stack_number, index)
            for stack_number, stack in enumerate(self.stacks)
            for index, job in enumerate(stack.jobs)
        }
        self._arriving_of_block = self._find_arriving().to(device)
        # Headers are read and written in the order of the stacks.
        block_number = {job: number for number, job in enumerate(self._place_of_job)}
        leaving = [block_number[x.job] for x in self.exchange.leaving.pieces]
        self._block_of_leaving = torch.tensor(leaving, dtype=torch.int64, device=device)

    def _find_arriving(self) -> Tensor:
        """Return the numbers of each owned block's arriving pieces, int64 (blocks, most pieces).

        A block of fewer pieces has the number after the last one, where `assemble` adds zeros.
        """
        pieces_of_job: dict[int, list[int]] = {job: [] for job in self._place_of_job}
        arriving = self.exchange.arriving.pieces
        for number, message_piece in enumerate(arriving):
            pieces_of_job[message_piece.job].append(number)
        # Padded, but column by column.
        columns = itertools.zip_longest(*pieces_of_job.values(), fillvalue=len(arriving))
        rows = [*zip(*columns, strict=True)]
        # On the CPU even under a default device: the caller moves it.
        return torch.tensor(rows, dtype=torch.int64, device="cpu")

    @property
    def advanced(self) -> list[int]:
        """Positions in the plan of the parameters in `momentum_groups`, in this order."""
        return [i for momenta in self.momentum_groups for i in momenta.parameters]

    @property
    def workspace_words(self) -> int:
        """Words that the matrices and their inputs need of the workspace."""
        elements = (1 + len(self.asked)) * sum(stack.elements for stack in self.stacks)
        return elements * self._rank_jobs.full_dtype.itemsize // _WORKSPACE_WORD + 1

    # ----- views, created once -------------------------------------------------------------------

    def allocate(self, holder_buffer: Tensor, owner_buffer: Tensor, workspace: Tensor) -> None:
        """Use these buffers, and create matrices and inputs in the workspace.

        All three are float64; the matrices are views in full precision.
        """
        self.exchange.bind(holder_buffer, owner_buffer)
        self._rule_state = RuleState(
            self._rank_jobs,
            self.exchange,
            stacks=self.stacks,
            place_of_job=self._place_of_job,
            device=self._device,
        )
        flat = workspace.view(self._rank_jobs.full_dtype)
        start = 0
        stacks_of_planes: list[list[Tensor]] = []
        for _ in ("direction", *self.asked):
            matrices = []
            for stack in self.stacks:
                matrices.append(flat[start : start + stack.elements].view(-1, *stack.shape))
                start += stack.elements
            stacks_of_planes.append(matrices)
        self.matrices, *inputs = stacks_of_planes
        self.inputs: dict[Input, list[Tensor]] = dict(zip(self.asked, inputs, strict=True))
        self._arrive = CopyList()
        for plane, matrices in enumerate(stacks_of_planes):
            self._add_copies(self._arrive, self.exchange.arriving, plane, matrices)
        self._leave = CopyList()
        self._add_copies(self._leave, self.exchange.leaving, 0, self.matrices)

    def _add_copies(
        self, copies: CopyList, side: Side, plane: int, matrices: Sequence[Tensor]
    ) -> None:
        """Add every rectangle of the pieces as a view of its matrix and as a view of the buffer."""
        for message_piece, in_buffer in zip(side.pieces, side.element_views(plane), strict=True):
            stack_number, index = self._place_of_job[message_piece.job]
            matrix = matrices[stack_number][index]
            for in_piece, in_block in rectangles(message_piece.piece):
                copies.add(in_buffer[in_piece], matrix[in_block])

    def bind(self, local_params: Mapping[int, LocalParameter]) -> None:
        """Create all views of this rank's parameters, by position in the plan."""
        self._rule_state.bind({i: param.state for i, param in local_params.items()})
        self._bind_packing(local_params)
        self._bind_applying(local_params)

    def _bind_packing(self, local_params: Mapping[int, LocalParameter]) -> None:
        """Create the views into which `pack` writes elements, and the headers."""
        plan = self._rank_jobs.plan
        side = self.exchange.packing
        views_of_planes = [side.element_views(plane) for plane in range(side.planes)]
        self._pack_sources: list[PackSource] = []
        self._pack_targets: list[list[Tensor]] = [[] for _ in views_of_planes]
        measured_pieces = []
        statistics_rows = []
        for k, piece in enumerate(self._packed):
            planned = plan.parameters[piece.parameter]
            param = local_params[piece.parameter]
            shape = local_shape(plan, piece.parameter, piece.rank, "gather")
            assert piece.elements  # no source is without (`Job.sources`)
            # The whole local tensor is copied as it is, without a reshape in every step.
            is_whole = piece.elements == param.momentum.numel()
            index = None if is_whole else piece.local_index
            self._pack_sources.append(PackSource(piece.parameter, shape, index))
            for targets, views in zip(self._pack_targets, views_of_planes, strict=True):
                target = views[k]
                targets.append(target.view(param.momentum.shape) if is_whole else target)
            if carried(planned.rules).sums:
                # Part by part, each with a row for every matrix on this rank.
                part_number = piece.block % len(planned.view.block_shapes)
                measured_pieces.append(k)
                statistics_rows.append(param.first_row + part_number * shape[0] + piece.batch)
        self._headers = torch.zeros(side.headers.shape, dtype=torch.float64, device=self._device)
        self._headers[:, 0] = 1.0  # has a gradient; `pack` clears it for a missing gradient
        self._measured_pieces = index_of(measured_pieces, len(self._packed), self._device)
        self._statistics_rows = torch.tensor(
            statistics_rows, dtype=torch.int64, device=self._device
        )

    def _bind_applying(self, local_params: Mapping[int, LocalParameter]) -> None:
        """Create the views of parameters and master weights, and of their updates."""
        plan = self._rank_jobs.plan
        updates = self.exchange.applying.element_views()
        by_kind: dict[tuple[int, torch.dtype], UpdateList] = defaultdict(UpdateList)
        self.changed: dict[int, list[Tensor]] = {}
        for k, (piece, update) in enumerate(zip(self.applying, updates, strict=True)):
            if not piece.elements:
                continue
            param = local_params[piece.parameter]
            shape = local_shape(plan, piece.parameter, piece.rank, "return")
            target = param.p.view(shape)[piece.local_index]
            update_list = by_kind[param.group, param.p.dtype]
            update_list.targets.append(target)
            update_list.updates.append(update)
            self.changed[k] = [target]
            if MASTER in param.state:
                master = param.state[MASTER].view(shape)[piece.local_index]
                update_list.masters.append(master)
                self.changed[k].append(master)
        self.update_lists = [(group, pieces) for (group, _dtype), pieces in by_kind.items()]

    # ----- a step --------------------------------------------------------------------------------

    @phase("gather")
    def pack(
        self,
        planes: Sequence[Mapping[int, Tensor]],
        statistics: Tensor,
        absent: Mapping[int, Tensor],
    ) -> None:
        """Write elements and headers into the buffer for the owners.

        Parameters
        ----------
        planes
            The directions of this rank by position in the plan, each shaped like the local
            momentum; then, likewise, each input in `asked`.
        statistics
            The table of statistics of this rank's momenta, float64 (rows, sums).
        absent
            The parameters without a gradient on this rank.
        """
        for targets, values in zip(self._pack_targets, planes, strict=True):
            if targets:
                sources = [
                    values[source.parameter]
                    if source.local_index is None
                    else values[source.parameter].reshape(source.shape)[source.local_index]
                    for source in self._pack_sources
                ]
                torch._foreach_copy_(targets, sources)
        headers = self._headers
        without_gradient = [k for k, piece in enumerate(self._packed) if piece.parameter in absent]
        if without_gradient:
            headers = headers.clone()
            # Views, because a list as an index would be copied from the host.
            torch._foreach_zero_([headers[k, :1] for k in without_gradient])
        self._rule_state.pack(headers)
        if self.n_sums:
            sums = statistics[:, : self.n_sums][self._statistics_rows]
            headers[self._measured_pieces, -self.n_sums :] = sums
        self.exchange.packing.write_headers(headers)

    @phase("gather")
    def assemble(self) -> OwnedBlocks:
        """Assemble the received pieces in `matrices` and `inputs`."""
        if not self.stacks:
            return OwnedBlocks(present=[], measured={}, state=[])
        self._arrive.read_buffer()
        headers = self.exchange.arriving.read_headers()
        # A row of zeros at the end is the padding of `_find_arriving`.
        headers = torch.cat([headers, headers.new_zeros(1, headers.shape[1])])
        of_blocks = headers[self._arriving_of_block]  # (blocks, most pieces of a block, fields)
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
    def pack_updates(self, updates: Sequence[Tensor], owned: OwnedBlocks) -> None:
        """Write every holder's piece of the updates into the buffer for the holders.

        There is one tensor of updates per stack.
        """
        if not self.stacks:
            return
        torch._foreach_copy_(self.matrices, list(updates))
        self._leave.write_buffer()
        columns = [torch.cat(owned.present), *self._rule_state.leave(owned.state)]
        headers = torch.stack(columns, dim=1)[self._block_of_leaving]
        self.exchange.leaving.write_headers(headers)

    @phase("return")
    def take_state(self) -> None:
        """Write the returned state of rules to the state on this rank."""
        self._rule_state.take()
