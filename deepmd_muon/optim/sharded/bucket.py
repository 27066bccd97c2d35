"""A bucket, or portion, on one rank: directions go to the owners of matrices, updates come back.

What happens to one matrix
--------------------------
Ranks 0 and 1 have 4 rows each of a matrix (8, 6), of its momentum and of its weights, and rank 0 is
its owner. Both ranks have a `Bucket` with this job, and the `PipelineStep` of each makes the same
calls. The bucket moves data between tensors and messages. `PipelineStep` computes, and starts the
collectives:

    `PipelineStep`       rank 0, owner and holder                   rank 1, a holder
    advance              direction (4, 6) of its rows               direction (4, 6) of its rows
    `pack`               header and direction → a message           the same
    gather               has its own message and that of rank 1     sends its message to rank 0
    `assemble`           both messages → `matrices`, (8, 6)         –
    orthogonalize        computes the update, (8, 6)                –
    `pack_updates`       the update → a message for each rank       –
    return               sends a message to rank 1                  has its message
    `take_state`         header → state of rules                    the same
    apply                the update to its rows, `update_lists`     the same

A bucket has many such jobs, and a rank may be a holder in some and the owner in others. Each method
handles all jobs at once, with a few operations on lists of views. The owner's half is in
`owned_matrices`, the state of rules of both halves in `rule_state`, the format of messages in
`messages`.

When views are created
----------------------
The plan fixes sizes and places, so views are created once. Only views of directions and inputs are
created in every step, because these are new tensors.

    __init__       the sizes of messages and workspace. `Pipeline` needs those of all buckets to
                   allocate the memory that buckets share.
    use_buffers    views of this memory
    bind           views of parameters, state and buffers; again when parameters or state are other
                   tensors
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from deepmd_muon.optim.rules.interface import Input
from deepmd_muon.optim.rules.master_weights import MASTER
from deepmd_muon.optim.sharded.jobs import RankJobs, stacks_of
from deepmd_muon.optim.sharded.messages import PRESENCE, first_sum, header_rows
from deepmd_muon.optim.sharded.owned_matrices import OwnedBlocks, OwnedMatrices, workspace_words
from deepmd_muon.optim.sharded.pieces import Piece, local_shape
from deepmd_muon.optim.sharded.plan import Plan, rule_values
from deepmd_muon.optim.sharded.rule_state import HeldRuleState
from deepmd_muon.optim.sharded.transport import Exchange
from deepmd_muon.optim.torch_hooks import phase

__all__ = ["Bucket", "LocalParameter", "MomentumBatch", "OwnedBlocks", "UpdateList"]


@dataclasses.dataclass(frozen=True)
class LocalParameter:
    """A parameter on this rank.

    Attributes
    ----------
    p, momentum, state
        The elements that this rank updates, its local momentum, and the local state of its rules
        by key.
    group
        Number of its parameter group.
    first_statistics_row
        Its first row in the table of statistics (`rule_statistics`).
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


class Bucket:
    """A bucket, or portion, compiled for this rank.

    `group_numbers` has the parameter group of each parameter, by position in the plan.

    Attributes
    ----------
    exchange
        The two collectives of the bucket, and the four sides of their messages.
    parameters
        Positions in the plan of the parameters of which this rank packs or updates a piece. Their
        momenta advance on every replica, even if another replica's momentum is sent.
    input_kinds
        The inputs that rules request besides directions; each is one more plane of the gather.
    measuring_rules, n_sums
        The rules with statistics, and the number of their sums in a header.
    stacks, matrices, inputs
        The matrices that this rank owns; see `OwnedMatrices`. The last two are set by
        `use_buffers`.
    workspace_words
        Words of the workspace that it needs.
    updated_pieces
        The pieces that this rank updates, in the order of the messages.
    update_lists
        The updates of this rank, with their parameter group; set by `bind`.
    changed
        For each of `updated_pieces`: views of the parameter and of the master weight, if any, that
        its update changes; empty for a piece without elements. Set by `bind`.
    momentum_batches
        Of the momenta of `parameters`, those that no earlier bucket advances. Set by `Pipeline` for
        its own use.
    statistics_rows
        The rows of these momenta in the table of statistics. Set by `StatisticsTable`.
    """

    # Set by `use_buffers`.
    matrices: list[Tensor]
    inputs: dict[Input, list[Tensor]]
    _owned_matrices: OwnedMatrices
    # Set by `bind`.
    update_lists: list[tuple[int, UpdateList]]
    changed: list[list[Tensor]]
    _rule_state: HeldRuleState
    # Item k is for piece k of `exchange.packing`. Source and target of a copy have the same shape.
    _sources: list[_PackedSource]
    _targets: list[list[Tensor]]  # by plane, then by piece
    # Float64 (pieces, words). Every step overwrites the words of state and sums. The others stay:
    # PRESENCE, which is 1 in a usual step, and 0 for rules that a parameter does not have.
    _headers: Tensor
    # Of the headers with sums: which ones they are, and their rows in the table of statistics.
    _measured_headers: slice | Tensor
    _measured_rows: Tensor

    def __init__(
        self,
        rank_jobs: RankJobs,
        group_numbers: Mapping[int, int],
        process_group: dist.ProcessGroup | None,
        device: torch.device,
    ) -> None:
        rules = rank_jobs.domain.rules
        self._rank_jobs = rank_jobs
        self._device = device
        self.exchange = Exchange(rank_jobs, process_group, device)
        self.input_kinds = rule_values(rules).inputs
        self.measuring_rules = tuple(rule for rule in rules if rule.sums)
        self.n_sums = rule_values(rules).sums
        self._first_sum = first_sum(rank_jobs.domain)
        self.stacks = stacks_of(rank_jobs, group_numbers)
        self.workspace_words = workspace_words(rank_jobs, self.stacks)

        self._packed_pieces = [x.piece for x in self.exchange.packing.pieces]
        self.updated_pieces = [x.piece for x in self.exchange.applying.pieces]
        # Each once, in the order of this rank's messages.
        positions = [piece.parameter for piece in (*self._packed_pieces, *self.updated_pieces)]
        self.parameters = tuple(dict.fromkeys(positions))

        self.momentum_batches: list[MomentumBatch] = []
        self.statistics_rows = slice(0, 0)

    @property
    def advanced(self) -> list[int]:
        """Positions in the plan of the parameters in `momentum_batches`, in this order."""
        return [i for batch in self.momentum_batches for i in batch.parameters]

    # ----- views, created once -------------------------------------------------------------------

    def use_buffers(self, holder_buffer: Tensor, owner_buffer: Tensor, workspace: Tensor) -> None:
        """Create the views of these buffers and of the workspace of matrices, all float64."""
        self.exchange.use_buffers(holder_buffer, owner_buffer)
        self._owned_matrices = OwnedMatrices(
            self._rank_jobs, self.exchange, self.stacks, workspace, self._device
        )
        self.matrices = self._owned_matrices.matrices
        self.inputs = self._owned_matrices.inputs

    def bind(self, local_params: Mapping[int, LocalParameter]) -> None:
        """Create all views of parameters and state.

        `local_params` has at least `parameters`, by position in the plan. Call `use_buffers` first.
        """
        state = {i: param.state for i, param in local_params.items()}
        self._rule_state = HeldRuleState(self._rank_jobs, self.exchange, state, self._device)
        self._bind_elements(local_params)
        self._bind_headers(local_params)
        self._bind_updates(local_params)

    def _bind_elements(self, local_params: Mapping[int, LocalParameter]) -> None:
        """Create the views of the buffer that `pack` fills, and note what it copies to them."""
        side = self.exchange.packing
        self._sources = [
            _PackedSource.of(self._rank_jobs.plan, piece, local_params[piece.parameter].momentum)
            for piece in self._packed_pieces
        ]
        self._targets = []
        for plane in range(side.n_planes):
            views = []
            for source, view in zip(self._sources, side.element_views(plane), strict=True):
                is_whole = source.local_index is None
                momentum = local_params[source.parameter].momentum
                views.append(view.view(momentum.shape) if is_whole else view)
            self._targets.append(views)

    def _bind_headers(self, local_params: Mapping[int, LocalParameter]) -> None:
        """Create the headers of a usual step, and the indices of the statistics that they carry."""
        plan = self._rank_jobs.plan
        self._headers = torch.zeros(
            self.exchange.packing.header_index.shape, dtype=torch.float64, device=self._device
        )
        self._headers[:, PRESENCE] = 1.0
        measured_pieces = []
        statistics_rows = []
        for k, piece in enumerate(self._packed_pieces):
            planned = plan.parameters[piece.parameter]
            if not rule_values(planned.rules).sums:
                continue
            # In the order of rows of the table in `rule_statistics`: parts, then matrices.
            n_matrices, _, _ = local_shape(plan, piece.parameter, piece.rank, "gather")
            part_number = piece.block % len(planned.view.block_shapes)
            matrix, _, _ = piece.local_index
            first_row = local_params[piece.parameter].first_statistics_row
            measured_pieces.append(k)
            statistics_rows.append(first_row + part_number * n_matrices + matrix)
        self._measured_headers = header_rows(
            measured_pieces, len(self._packed_pieces), self._device
        )
        self._measured_rows = torch.tensor(statistics_rows, dtype=torch.int64, device=self._device)

    def _bind_updates(self, local_params: Mapping[int, LocalParameter]) -> None:
        """Create the views of parameters and master weights, and of their updates."""
        plan = self._rank_jobs.plan
        updates = self.exchange.applying.element_views()
        # By parameter group and dtype, which decide on masters: all pieces of a list have them, or
        # none.
        by_kind: dict[tuple[int, torch.dtype], UpdateList] = defaultdict(UpdateList)
        self.changed = [[] for _ in self.updated_pieces]
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

    # ----- a step; each method is in a range of the profiler (`phase`) ---------------------------

    @phase("gather")
    def pack(
        self,
        plane_tensors: Sequence[Mapping[int, Tensor]],
        *,
        statistics: Tensor,
        without_gradient: Collection[int],
    ) -> None:
        """Write elements, lines and headers of this rank's pieces into the buffer for the owners.

        Parameters
        ----------
        plane_tensors
            The directions of this rank by position in the plan, each shaped like the local
            momentum; then, likewise, each input in `input_kinds`.
        statistics
            The table of statistics of this rank's momenta, float64 (rows, sums). Further columns
            belong to buckets with more sums.
        without_gradient
            The parameters without a gradient on this rank, by position in the plan.
        """
        if self._sources:
            for targets, tensors in zip(self._targets, plane_tensors, strict=True):
                sources = [source.of_tensor(tensors[source.parameter]) for source in self._sources]
                torch._foreach_copy_(targets, sources)
        headers = self._headers
        absent = [
            k for k, piece in enumerate(self._packed_pieces) if piece.parameter in without_gradient
        ]
        if absent:
            headers = headers.clone()  # PRESENCE of `_headers` must stay
            # Views, because a list as an index would be copied from the host.
            torch._foreach_zero_([headers[k, PRESENCE : PRESENCE + 1] for k in absent])
        self._rule_state.pack(headers)
        if self.n_sums:
            sums = statistics[:, : self.n_sums][self._measured_rows]
            headers[self._measured_headers, self._first_sum :] = sums
        self.exchange.packing.write_headers(headers)

    @phase("gather")
    def assemble(self) -> OwnedBlocks:
        """Assemble the received pieces in `matrices` and `inputs`."""
        if not self.stacks:
            return OwnedBlocks(present=[], measured={}, state=[])
        return self._owned_matrices.assemble()

    @phase("return")
    def pack_updates(self, updates: Sequence[Tensor], owned_blocks: OwnedBlocks) -> None:
        """Write every holder's piece of the updates into the buffer for the holders.

        There is one tensor of updates per stack. `owned_blocks` is the result of `assemble`; the
        caller has replaced its state by the new one, which returns to the holders.
        """
        if self.stacks:
            self._owned_matrices.pack_updates(updates, owned_blocks)

    @phase("return")
    def take_state(self) -> None:
        """Write the returned state of rules to the state on this rank."""
        self._rule_state.take()


class _PackedSource(NamedTuple):
    """Where the elements of a packed piece are in a tensor shaped like the local momentum."""

    parameter: int  # position in the plan
    shape: tuple[int, int, int]  # of the tensor as (batch, rows, columns)
    local_index: tuple[int, slice, slice] | None  # of the piece in it; None: all of it

    @classmethod
    def of(cls, plan: Plan, piece: Piece, momentum: Tensor) -> _PackedSource:
        assert piece.elements  # a source of a job has some (`Job.sources`)
        shape = local_shape(plan, piece.parameter, piece.rank, "gather")
        # A piece of all elements has their order, too: the tensor is copied as it is, without a
        # reshape in every step.
        is_whole = piece.elements == momentum.numel()
        return cls(piece.parameter, shape, None if is_whole else piece.local_index)

    def of_tensor(self, tensor: Tensor) -> Tensor:
        """Return the elements of the piece, (rows, columns); a whole tensor keeps its shape."""
        if self.local_index is None:
            return tensor
        return tensor.reshape(self.shape)[self.local_index]
