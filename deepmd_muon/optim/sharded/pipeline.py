"""The Muon route on several ranks: momenta, exchanges and updates, in one order on all ranks.

The story of a step
-------------------
A bucket passes through five stages. `PipelineStep` runs them; the words are in the glossary of this
package.

1. **advance**: m ← β m + (1 − β) g for the parameters of which this rank packs or updates a piece,
   and their directions.
2. **pack** and start the gather: the pieces of all directions travel to the owners of their blocks.
3. **orthogonalize**: the owner assembles whole matrices and computes their updates with the rules
   of their group.
4. **return**: the pieces of the updates travel to the ranks that hold the parameters.
5. **apply**: p ← p (1 − lr λ) − lr · update.

Both collectives are asynchronous. The setting `slots` is the largest number of buckets in flight;
each slot has two buffers, and the portions share two more. With three slots:

    work    pack 0│pack 1│pack 2│portions│orth 0│orth 1│apply 0│pack 3│orth 2│apply 1│…
    gather        ├───────── 0 ──────────┤                            ├─ 3 …
                         ├───────── 1 ──────────┤
                                ├───────────────── 2 ─────────────────┤
    return                                      ├─ 0 ──┤                     ├─ 2 …
                                                       ├───────── 1 ─────────┤

Bars run from the start of a collective to its wait. On a GPU collectives run one after the other.

Portions (jobs that stay on this rank) need no collective. They are computed while the first gathers
are on their way.

All ranks of a domain start its gathers and returns in the same order: sets of ranks are nested or
disjoint (the plan refuses others), larger domains come first, and the order within a domain follows
from the plan alone. Whether the next gather may start must therefore never depend on this rank's
own messages, which have other lengths on other ranks.

A parameter without a gradient
------------------------------
A rank may have no gradient where another one has, as in a mixture of experts. The owner learns that
from the headers of the gather, the other ranks from the headers of the return. Until then such a
rank works on a copy of the momentum (`tentative`), and undoes its updates of blocks that turn out
to have no gradient on any source. The sources of a job are ranks of one replica of the momentum, so
replicas must agree on gradients: `StepComparison` compares them.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from deepmd_muon.optim.dtensors import local_of
from deepmd_muon.optim.rules.interface import MatrixRule, Pieces
from deepmd_muon.optim.rules.master_weights import MASTER
from deepmd_muon.optim.rules.registry import matrix_rules, tensors_of
from deepmd_muon.optim.sharded.bucket import Bucket, LocalParameter, MomentumBatch, OwnedBlocks
from deepmd_muon.optim.sharded.elements import gathered_parts
from deepmd_muon.optim.sharded.messages import (
    PRESENCE,
    local_shape,
    part_slices_of,
    piece_of,
    staying_jobs,
    travelling_jobs,
)
from deepmd_muon.optim.sharded.params import ShardedParameter
from deepmd_muon.optim.sharded.plan import Plan, rule_values
from deepmd_muon.optim.sharded.transport import CollectiveStream, Wait
from deepmd_muon.optim.state.host_memory import TransferBatch, moments_of
from deepmd_muon.optim.state.schema import State
from deepmd_muon.optim.update.gradients import StepControl
from deepmd_muon.optim.update.muon import (
    advance_momenta,
    apply_updates,
    directions_of,
    effective_lr,
    update_blocks,
)
from deepmd_muon.optim.waves import StepContext

# ----- what is compiled once from the plan -------------------------------------------------------


class Pipeline:
    """The domains of a plan that exchange pieces, compiled for this rank.

    Their parameters are `sharded_params`, at least one, by position in the plan. `process_groups`
    has the process group of each domain of the plan.

    Attributes
    ----------
    travelling, staying
        The buckets exchanged between ranks, and the portions of jobs that stay on this rank.
    n_slots
        Number of buckets that may be in flight.
    n_first
        Number of travelling buckets that the constructor of `PipelineStep` packs.
    packing_order
        All buckets in the order in which they are packed: the first ones, the portions, the others.
    last_reader
        By position in the plan: the last bucket that packs or updates a piece of the parameter.
    idle
        Parameters of which this rank packs and updates no piece.
    part_gathers
        All-gathers after the step of 16-bit parameters of which each rank updates the part that it
        has master weights of.
    momenta
        By position in the plan: the local momentum; set by `bind`.
    """

    def __init__(
        self,
        plan: Plan,
        sharded_params: Mapping[int, ShardedParameter],
        process_groups: Sequence[dist.ProcessGroup | None],
        collectives: CollectiveStream,
    ) -> None:
        self.plan = plan
        self.sharded_params = sharded_params
        self.rank = dist.get_rank()
        self.device = local_of(next(iter(sharded_params.values())).p).device
        self.collectives = collectives
        self.momenta: dict[int, Tensor] = {}

        self.travelling: list[Bucket] = []
        self.staying: list[Bucket] = []
        group_numbers = {i: param.group for i, param in sharded_params.items()}
        for domain, process_group in zip(plan.domains, process_groups, strict=True):
            if domain.gathers_momenta:
                continue  # `RepeatedMuon` steps it
            for jobs in travelling_jobs(plan, domain, self.rank):
                self.travelling.append(Bucket(jobs, group_numbers, process_group, self.device))
            for jobs in staying_jobs(plan, domain, self.rank):
                self.staying.append(Bucket(jobs, group_numbers, None, self.device))

        # The first gathers start before the portions, to overlap with them: as many as there are
        # slots.
        self.n_slots = plan.settings.slots
        self.n_first = min(self.n_slots, len(self.travelling))
        self.packing_order = [
            *self.travelling[: self.n_first],
            *self.staying,
            *self.travelling[self.n_first :],
        ]
        # A later bucket replaces an earlier one.
        self.last_reader = {i: bucket for bucket in self.packing_order for i in bucket.parameters}
        self._assign_momenta()
        self._lay_out_statistics()
        self.idle = [param for i, param in sharded_params.items() if i not in self.last_reader]
        with_masters = [
            (param.p, param.sharding)
            for i, param in sharded_params.items()
            if plan.parameters[i].masters
        ]
        self.part_gathers = gathered_parts(with_masters, collectives, keep=False)
        self._allocate()

    def _assign_momenta(self) -> None:
        """Let the first bucket that packs or updates a parameter advance its momentum."""
        assigned: set[int] = set()
        for bucket in self.packing_order:
            by_kind: dict[tuple[int, torch.dtype], list[int]] = defaultdict(list)
            for i in bucket.parameters:
                if i not in assigned:
                    param = self.sharded_params[i]
                    by_kind[param.group, param.p.dtype].append(i)
            assigned.update(bucket.parameters)
            bucket.momentum_batches = [
                MomentumBatch(
                    group=group,
                    parameters=positions,
                    shapes=[local_shape(self.plan, i, self.rank, "gather") for i in positions],
                    part_slices=[part_slices_of(self.plan, i, self.rank) for i in positions],
                )
                for (group, _dtype), positions in by_kind.items()
            ]

    def _lay_out_statistics(self) -> None:
        """Give momenta their rows of the table of statistics.

        Rows are in the order in which `_momenta_and_gradients` lists pieces: by bucket, momentum
        batch, parameter, part of the matrix, and last by index of the matrix in this rank's batch.
        """
        self._first_row: dict[int, int] = {}
        n_rows = 0
        for bucket in self.packing_order:
            first_row = n_rows
            for batch in bucket.momentum_batches:
                for i, shape, slices in zip(
                    batch.parameters, batch.shapes, batch.part_slices, strict=True
                ):
                    self._first_row[i] = n_rows
                    if rule_values(self.plan.parameters[i].rules).sums:
                        n_rows += shape[0] * len(slices)
            bucket.statistics_rows = slice(first_row, n_rows)
        self._n_rows = n_rows

    def _allocate(self) -> None:
        """Allocate, as float64, the buffers and the workspace of matrices, which buckets share.

        Bucket k has the buffers of bucket k − `n_slots`. Buckets start and end in one order, so
        they are free when fewer than `n_slots` buckets are in flight. Portions share further
        buffers, and all buckets the workspace: only one is orthogonalized at a time.
        """

        def memory(words: Iterator[int]) -> Tensor:
            size = max(words, default=0)
            return torch.empty(size, dtype=torch.float64, device=self.device)

        workspace = memory(bucket.workspace_words for bucket in self.packing_order)
        sharing = [self.travelling[k :: self.n_slots] for k in range(self.n_slots)]
        for buckets in (*sharing, self.staying):
            holder_buffer = memory(bucket.exchange.holder_words for bucket in buckets)
            owner_buffer = memory(bucket.exchange.owner_words for bucket in buckets)
            for bucket in buckets:
                bucket.use_buffers(holder_buffer, owner_buffer, workspace)

    def statistics(self) -> Tensor:
        """Return a new table of the rules' statistics of this rank's momenta, (rows, sums)."""
        n_sums = max((bucket.n_sums for bucket in self.packing_order), default=0)
        return torch.empty(self._n_rows, n_sums, dtype=torch.float64, device=self.device)

    def bind(self, context: StepContext) -> None:
        """Create missing state, and all views of buffers, parameters and state.

        There is no communication.
        """
        self._complete_state(context)
        state = context.state
        self.momenta = {
            i: local_of(state[param.p]["momentum_buffer"])
            for i, param in self.sharded_params.items()
        }
        local_params = self._local_parameters(state)
        for bucket in self.packing_order:
            bucket.bind(local_params)

    def _complete_state(self, context: StepContext) -> None:
        """Create the state tensors that are missing.

        Every rank has all state tensors in the same order, even without local elements: code that
        gathers a state dict tensor by tensor relies on it.
        """
        state = context.state
        for param in self.sharded_params.values():
            state.setdefault(param.p, {})
        # By bucket, so that no more than one bucket's momenta are on the device before they are
        # offloaded; then those that no bucket advances.
        batches = [
            [self.sharded_params[i] for i in bucket.advanced] for bucket in self.packing_order
        ]
        for params in (*batches, self.idle):
            for param in params:
                rules = matrix_rules(context.groups[param.group].settings)
                param.complete(state[param.p], rules)
            if context.memory is not None:
                context.memory.offload(state, moments_of(state, [param.p for param in params]))

    def _local_parameters(self, state: State) -> dict[int, LocalParameter]:
        """Return this rank's part of each parameter, by position in the plan."""
        # A part with master weights is updated in the buffer from which it is sent.
        sent_parts = {
            p: part for gather in self.part_gathers for p, part in gather.sent_parts.items()
        }
        local_params = {}
        for i, param in self.sharded_params.items():
            param_state = state[param.p]
            rule_keys = tensors_of(self.plan.parameters[i].rules).keys() & param_state.keys()
            local_params[i] = LocalParameter(
                p=sent_parts[param.p] if param.p in sent_parts else local_of(param.p).detach(),
                momentum=self.momenta[i],
                state={key: local_of(param_state[key]) for key in rule_keys},
                group=param.group,
                first_statistics_row=self._first_row.get(i, 0),
            )
        return local_params

    def transfer_batches(
        self, context: StepContext, buckets: Sequence[Bucket]
    ) -> list[TransferBatch]:
        """Return the transfer batches of the offloaded momenta that these buckets advance."""
        assert context.memory is not None
        batches = []
        for bucket in buckets:
            momenta = [(self.sharded_params[i].p, "momentum_buffer") for i in bucket.advanced]
            if momenta:
                batches.append(context.memory.transfer_batch(context.state, momenta))
        return batches


# ----- one step ----------------------------------------------------------------------------------


class InFlight(NamedTuple):
    """A bucket with a collective on its way."""

    bucket: Bucket
    wait: Wait


class PipelineStep:
    """One step in progress: the constructor starts the first gathers, `finish` does the rest.

    Parameters
    ----------
    moments
        Yields offloaded moments on the device in the order of `packing_order`; nothing for a bucket
        that advances no momentum. After the first `n_first` buckets `ShardedStep` takes those of
        the Adam routes and of `RepeatedMuon`. None without offload.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        context: StepContext,
        control: StepControl,
        moments: Iterator[list[Tensor]] | None,
    ) -> None:
        self._pipeline = pipeline
        self._context = context
        self._groups = context.groups
        self._control = control.on(pipeline.device)
        self._moments = moments
        # The tensors that buckets pack, by kind and position in the plan, until the last reader has
        # packed them. Weights are views of the parameters: an earlier bucket changes other blocks.
        self._plane_tensors: dict[str, dict[int, Tensor]] = {
            "direction": {},
            "gradient": {},
            "weight": {},
        }
        self._statistics = pipeline.statistics()
        # Advanced copies of the momenta of parameters without a gradient on this rank, by position
        # in the plan; and by (position, block), for their blocks, whether any rank has a gradient.
        self._tentative: dict[int, Tensor] = {}
        self._has_gradient: dict[tuple[int, int], Tensor] = {}
        self._expected_order = iter(pipeline.packing_order)
        self._not_started = deque(pipeline.travelling)
        self._gathering: deque[InFlight] = deque()
        self._returning: deque[InFlight] = deque()
        # Buckets update parts with master weights in the buffers that these gathers send.
        for gather in pipeline.part_gathers:
            gather.read_parts()
        self._start_gathers()

    def finish(self) -> list[Wait]:
        """Take the step of the portions and of all buckets.

        Return functions that wait for the parts that all ranks have updated, and write them.
        """
        for bucket in self._pipeline.staying:
            self._apply(self._orthogonalize(InFlight(bucket, self._pack(bucket))))
        while self._gathering:
            returning = self._orthogonalize(self._gathering.popleft())
            # The previous bucket's updates have had the time of this orthogonalization to return.
            if self._returning:
                self._apply(self._returning.popleft())
            self._returning.append(returning)
            self._start_gathers()
            if not self._gathering and self._not_started:
                # With one slot, its buffers are free only after its updates have been applied.
                self._apply(self._returning.popleft())
                self._start_gathers()
        for returning in self._returning:
            self._apply(returning)
        waits = [gather.start() for gather in self._pipeline.part_gathers]
        if self._moments is not None:
            # All routes have taken theirs. Exhausting it copies the last batch back to the host.
            batch = next(self._moments, None)
            assert batch is None
        self._settle_tentative_momenta()
        if self._pipeline.plan.settings.free_gradients:
            for param in self._pipeline.idle:
                param.p.grad = None
        return waits

    def _start_gathers(self) -> None:
        """Pack further buckets and start their gathers while slots are free.

        Only the number of buckets in flight decides. When a bucket's turn comes, this number is the
        same on all ranks of its domain, because larger domains come first.
        """
        n_slots = self._pipeline.n_slots
        while self._not_started and len(self._gathering) + len(self._returning) < n_slots:
            bucket = self._not_started.popleft()
            self._gathering.append(InFlight(bucket, self._pack(bucket)))

    # ----- stages 1 and 2: advance and pack ------------------------------------------------------

    def _pack(self, bucket: Bucket) -> Wait:
        """Advance the bucket's momenta, pack its pieces, and start its gather."""
        pipeline = self._pipeline
        # Another order would take another bucket's offloaded momenta, and start collectives that
        # other ranks do not start.
        expected_bucket = next(self._expected_order)
        assert expected_bucket is bucket
        if self._moments is not None and bucket.momentum_batches:
            local_momenta = next(self._moments)
        else:
            local_momenta = [pipeline.momenta[i] for i in bucket.advanced]
        self._advance(bucket, local_momenta)
        plane_tensors = [self._plane_tensors[kind] for kind in ("direction", *bucket.input_kinds)]
        bucket.pack(plane_tensors, statistics=self._statistics, without_gradient=self._tentative)
        for i in bucket.parameters:
            if pipeline.last_reader[i] is bucket:
                for tensors in self._plane_tensors.values():
                    tensors.pop(i, None)  # frees the memory
        return bucket.exchange.start("gather", pipeline.collectives)

    def _advance(self, bucket: Bucket, local_momenta: Sequence[Tensor]) -> None:
        """Advance the bucket's momenta, and write their statistics.

        Write the tensors to pack to `_plane_tensors`, and the copies of momenta without a gradient
        to `_tentative`. Set `p.grad` to None with `free_gradients`.
        """
        remaining = iter(local_momenta)
        to_measure: list[Pieces] = []
        for momentum_batch in bucket.momentum_batches:
            positions = momentum_batch.parameters
            params = [self._pipeline.sharded_params[i] for i in positions]
            settings = self._groups[momentum_batch.group].settings
            momenta = [next(remaining) for _ in params]
            grads = []
            for k, (i, param) in enumerate(zip(positions, params, strict=True)):
                grad = param.gradient()
                if grad is None:
                    momenta[k] = momenta[k].clone()  # it advances in place
                    self._tentative[i] = momenta[k]
                    grad = torch.zeros_like(momenta[k])
                grads.append(grad)
            # From here momenta and gradients are in the wider of float32 and the dtype of the local
            # momenta.
            momenta, grads = advance_momenta(
                grads,
                momenta,
                settings,
                self._control,
                maximize=self._groups[momentum_batch.group].values["maximize"],
            )
            directions = directions_of(momenta, grads, settings)
            if self._moments is not None and not settings.nesterov:
                # Here directions are the momenta themselves, and a later transfer batch overwrites
                # their memory.
                directions = [direction.clone() for direction in directions]
            self._plane_tensors["direction"].update(zip(positions, directions, strict=True))
            if bucket.input_kinds:
                weights = [param.elements() for param in params]
                self._plane_tensors["gradient"].update(zip(positions, grads, strict=True))
                self._plane_tensors["weight"].update(zip(positions, weights, strict=True))
            if any(rule.sums for rule in matrix_rules(settings)):
                to_measure += _momenta_and_gradients(momenta, grads, momentum_batch)
            if self._pipeline.plan.settings.free_gradients:
                for param in params:
                    param.p.grad = None
        sums = [rule.measure(to_measure, self._pipeline.device) for rule in bucket.measuring_rules]
        if sums:
            rows = self._statistics[bucket.statistics_rows, : bucket.n_sums]
            torch.cat(sums, dim=1, out=rows)

    # ----- stages 3 and 4: orthogonalize and return ----------------------------------------------

    def _orthogonalize(self, gathering: InFlight) -> InFlight:
        """Wait for a bucket's pieces, orthogonalize its matrices, and start the return."""
        bucket = gathering.bucket
        gathering.wait()
        owned = bucket.assemble()
        updates: dict[int, Tensor] = {}  # by position in `stacks`
        for group_number in dict.fromkeys(stack.group for stack in bucket.stacks):
            stack_numbers = [
                number for number, stack in enumerate(bucket.stacks) if stack.group == group_number
            ]
            scaled, rule_state = self._update_stacks(bucket, owned, group_number, stack_numbers)
            updates.update(zip(stack_numbers, scaled, strict=True))
            # `pack_updates` sends the new state back, so it replaces the gathered one.
            for key, values in rule_state.items():
                for number, value in zip(stack_numbers, values, strict=True):
                    state = owned.state[number]
                    state[key] = self._keep_or_replace(state[key], value, owned.present[number])
        bucket.pack_updates([updates[k] for k in range(len(bucket.stacks))], owned)
        return InFlight(bucket, bucket.exchange.start("return", self._pipeline.collectives))

    def _update_stacks(
        self, bucket: Bucket, owned: OwnedBlocks, group_number: int, stack_numbers: Sequence[int]
    ) -> tuple[list[Tensor], dict[str, Sequence[Tensor]]]:
        """Return the scaled updates of the stacks of one group, and the new state of its rules."""
        group = self._groups[group_number]
        rules = matrix_rules(group.settings)
        # Master weights are elements, not state of a block: `apply_updates` changes them.
        state_keys = tensors_of(rules).keys() - {MASTER}
        measured: Mapping[MatrixRule, Sequence[Tensor]] = {
            rule: [owned.measured[rule][k] for k in stack_numbers] for rule in rules if rule.sums
        }
        return update_blocks(
            directions=[bucket.matrices[k] for k in stack_numbers],
            inputs={
                kind: [stacks[k] for k in stack_numbers] for kind, stacks in bucket.inputs.items()
            },
            state={key: [owned.state[k][key] for k in stack_numbers] for key in state_keys},
            measured=measured,
            rules=rules,
            settings=group.settings,
            lr=effective_lr(group.lr, self._control),
        )

    def _keep_or_replace(self, old: Tensor, new: Tensor, present: Tensor) -> Tensor:
        """Return the new state of blocks, or the old state if no rank has a gradient.

        A skipped step keeps the old state, too.
        """
        replaced = present > 0  # (blocks,)
        if self._control.skip is not None:
            replaced = replaced & (self._control.skip <= 0)
        trailing = [1] * (new.ndim - 1)
        return torch.where(replaced.view(-1, *trailing), new, old)

    # ----- stage 5: apply ------------------------------------------------------------------------

    def _apply(self, returning: InFlight) -> None:
        """Wait for a bucket's updates and apply them."""
        bucket = returning.bucket
        returning.wait()
        bucket.take_state()
        # Pieces without a local gradient: whether any rank has one is known only now, on the
        # device. Keep the old values, and choose with `where`: only an offloaded master weight
        # makes the host wait.
        undecided = [
            k for k, piece in enumerate(bucket.updated_pieces) if piece.parameter in self._tentative
        ]
        old_values: dict[int, list[Tensor]] = {}
        if undecided:
            present = bucket.exchange.applying.read_headers()[:, PRESENCE] > 0
            for k in undecided:
                piece = bucket.updated_pieces[k]
                self._has_gradient[piece.parameter, piece.block] = present[k]
                old_values[k] = [x.clone() for x in bucket.changed[k]]
        for group_number, update_list in bucket.update_lists:
            group = self._groups[group_number]
            apply_updates(
                update_list.targets,
                update_list.updates,
                lr=effective_lr(group.lr, self._control),
                weight_decay=group.settings.weight_decay,
                rules=matrix_rules(group.settings),
                masters=update_list.masters or None,
            )
        for k, old_tensors in old_values.items():
            piece = bucket.updated_pieces[k]
            has_gradient = self._has_gradient[piece.parameter, piece.block]
            for x, old in zip(bucket.changed[k], old_tensors, strict=True):
                # A master weight may be in host memory.
                x.copy_(torch.where(has_gradient.to(x.device), x, old))

    def _settle_tentative_momenta(self) -> None:
        """Write the advanced copies of blocks back if another rank has a gradient."""
        pipeline = self._pipeline
        plan = pipeline.plan
        if self._tentative and self._context.memory is not None:
            self._context.memory.wait()  # copies to the host may still write these momenta
        for i, advanced in self._tentative.items():
            param = pipeline.sharded_params[i]
            momentum = local_of(self._context.state[param.p]["momentum_buffer"])
            shape = local_shape(plan, i, pipeline.rank, "gather")
            for block in range(plan.parameters[i].view.blocks):
                piece = piece_of(plan, i, block, pipeline.rank, "gather")
                if piece.elements:
                    old = momentum.view(shape)[piece.local_index]
                    new = advanced.view(shape)[piece.local_index]
                    # A rank with a piece of a block's momentum also updates a piece of the block,
                    # so `_apply` has set this.
                    has_gradient = self._has_gradient[i, block]
                    # An offloaded momentum is in host memory.
                    old.copy_(torch.where(has_gradient, new, old.to(new.device)))


def _momenta_and_gradients(
    momenta: Sequence[Tensor], grads: Sequence[Tensor], momentum_batch: MomentumBatch
) -> list[Pieces]:
    """Return momentum and gradient of every part of every parameter.

    Parts are (batch, elements); a matrix of one part keeps its shape, without a copy.
    """
    pieces = []
    for momentum, grad, shape, slices in zip(
        momenta, grads, momentum_batch.shapes, momentum_batch.part_slices, strict=True
    ):
        batch, n_rows, n_columns = shape
        if len(slices) == 1:
            pieces.append(Pieces(momentum, grad, (batch, n_rows * n_columns)))
            continue
        for rows, columns in slices:
            momentum_part = momentum.reshape(shape)[:, rows, columns].flatten(1)
            grad_part = grad.reshape(shape)[:, rows, columns].flatten(1)
            pieces.append(Pieces(momentum_part, grad_part, (batch, momentum_part.shape[1])))
    return pieces
