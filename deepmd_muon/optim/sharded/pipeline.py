"""The Muon route on several ranks: momenta, exchanges and updates, in one order on all ranks.

A `Pipeline` is what all steps share: this rank's buckets, their buffers and views. A `PipelineStep`
is one step. The words are in the glossary of this package.

    call by `StepParts`         when                                             communication
    `Pipeline(…)`               in the first step, at its start                  none
    `Pipeline.bind(…)`          before a step, if tensors or settings are new    none
    `PipelineStep(…)`           in a step, before the Adam routes                first gathers start
    `PipelineStep.finish()`     in a step, after the Adam routes                 all the others

The five stages of a bucket
---------------------------
`_pack` advances momenta, packs directions and starts the gather; `_orthogonalize` also starts the
return; `_apply` is the last stage.

1. **advance**: m ← β m + (1 − β) g, and the directions, of parameters that no earlier bucket has
   advanced.
2. **pack** pieces of directions, and start the gather: they travel to the owners of their blocks.
3. **orthogonalize**: the owner assembles whole matrices, and computes their updates with the rules
   of their parameter group.
4. **return**: pack the pieces of the updates, and start their way back.
5. **apply**: p ← p (1 − lr λ) − lr · update.

m is the momentum, g the gradient and p the parameter. β is the setting `momentum`, and λ is
`weight_decay`.

For example, ranks 0 and 1 have 4 rows each of a matrix (8, 6), and rank 0 owns it:

    stage            rank 0                               rank 1
    advance          its momentum (4, 6)                  its momentum (4, 6)
    pack             a piece (4, 6) to itself             a piece (4, 6) to rank 0
    orthogonalize    assembles (8, 6), updates it         nothing: it owns no matrix
    return           a piece to itself, one to rank 1     nothing to send, but it takes part
    apply            to its rows 0 … 3                    to its rows 4 … 7

Portions, which are buckets of jobs that stay on this rank, take the same stages without
collectives. `missing_gradients` says what differs without a gradient.

The order of a step
-------------------
The setting `slots` is the number of buckets that may be on their way. Bucket k + `slots` is packed
as soon as bucket k has been applied, into the same buffers. With three slots (`StepParts` steps the
Adam routes after pack 2):

    work    pack 0│pack 1│pack 2│portions│orth 0│orth 1│apply 0│pack 3│orth 2│apply 1│…
    gather        ├───────── 0 ──────────┤                            ├─ 3 …
                         ├───────── 1 ──────────┤
                                ├───────────────── 2 ─────────────────┤
    return                                      ├─ 0 ──┤                     ├─ 2 …
                                                       ├───────── 1 ─────────┤

Bars run from the start of a collective to its wait. On a GPU collectives run one after the other.

All ranks of a domain must start its collectives in the same order, or they wait for each other for
ever. They do, because a bucket has the same number k on all of them: sets of ranks are nested or
disjoint (the plan refuses others), domains of more ranks come first, and the order within a domain
follows from the plan alone. The order must never depend on this rank's messages or gradients.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from deepmd_muon.optim.dtensors import local_of
from deepmd_muon.optim.rules.interface import MatrixRule, Pieces
from deepmd_muon.optim.rules.master_weights import MASTER
from deepmd_muon.optim.rules.registry import matrix_rules, tensors_of
from deepmd_muon.optim.sharded.bucket import Bucket, LocalParameter, MomentumBatch, OwnedBlocks
from deepmd_muon.optim.sharded.elements import gathered_parts
from deepmd_muon.optim.sharded.jobs import staying_jobs, travelling_jobs
from deepmd_muon.optim.sharded.missing_gradients import MissingGradients
from deepmd_muon.optim.sharded.params import ShardedParameter
from deepmd_muon.optim.sharded.pieces import local_shape, part_slices_of
from deepmd_muon.optim.sharded.plan import Plan
from deepmd_muon.optim.sharded.rule_statistics import StatisticsTable, pieces_of
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

# ----- what all steps share ----------------------------------------------------------------------


class Pipeline:
    """The buckets of one rank, of all domains that do not gather momenta (`RepeatedMuon` does).

    Parameters
    ----------
    plan
        The plan of the Muon route.
    sharded_params
        The parameters of these domains, at least one, by position in the plan.
    process_groups
        The process group of each domain of the plan.
    collectives
        Launches all collectives.

    Attributes
    ----------
    travelling
        The buckets exchanged between ranks. A bucket has the same number on all ranks of its
        domain.
    staying
        The portions: jobs that stay on this rank.
    n_slots
        Number of buckets that may be on their way.
    n_first
        Number of travelling buckets that the constructor of `PipelineStep` packs.
    packing_order
        All buckets in the order in which they are packed: the first ones, the portions, the others.
    last_bucket
        By position in the plan: the last bucket that packs or updates a piece of the parameter.
    idle
        Parameters of which this rank packs and updates no piece.
    part_gathers
        All-gathers of 16-bit parameters with sharded master weights, after their update. Each rank
        updates the part of a parameter of which it has the master weights, and sends it to all.
    statistics
        The rows of statistics of rules.
    momenta
        By position in the plan: the local momentum; set by `bind`, emptied by `StepParts.release`.
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
                continue
            for jobs in travelling_jobs(plan, domain, self.rank):
                self.travelling.append(Bucket(jobs, group_numbers, process_group, self.device))
            for jobs in staying_jobs(plan, domain, self.rank):
                self.staying.append(Bucket(jobs, group_numbers, None, self.device))

        # Portions are computed while the first gathers, one in each slot, are on their way.
        self.n_slots = plan.settings.slots
        self.n_first = min(self.n_slots, len(self.travelling))
        self.packing_order = [
            *self.travelling[: self.n_first],
            *self.staying,
            *self.travelling[self.n_first :],
        ]

        # A parameter's blocks may be in several buckets. The first one to use it advances its
        # momentum for all of them; the last one releases what is packed.
        first_bucket: dict[int, Bucket] = {}
        self.last_bucket: dict[int, Bucket] = {}
        for bucket in self.packing_order:
            for i in bucket.parameters:
                first_bucket.setdefault(i, bucket)
                self.last_bucket[i] = bucket
        for bucket in self.packing_order:
            positions = [i for i in bucket.parameters if first_bucket[i] is bucket]
            bucket.momentum_batches = self._momentum_batches(positions)
        self.idle = [param for i, param in sharded_params.items() if i not in self.last_bucket]

        self.statistics = StatisticsTable(plan, self.packing_order, self.device)

        with_masters = [
            (param.p, param.sharding)
            for i, param in sharded_params.items()
            if plan.parameters[i].masters
        ]
        self.part_gathers = gathered_parts(with_masters, collectives, keep=False)
        self._allocate()

    def _momentum_batches(self, positions: Sequence[int]) -> list[MomentumBatch]:
        """Return these parameters in batches of one parameter group and dtype."""
        by_kind: dict[tuple[int, torch.dtype], list[int]] = defaultdict(list)
        for i in positions:
            param = self.sharded_params[i]
            by_kind[param.group, param.p.dtype].append(i)
        return [
            MomentumBatch(
                group=group,
                parameters=members,
                shapes=[local_shape(self.plan, i, self.rank, "gather") for i in members],
                part_slices=[part_slices_of(self.plan, i, self.rank) for i in members],
            )
            for (group, _dtype), members in by_kind.items()
        ]

    def _allocate(self) -> None:
        """Allocate, as float64, the buffers and the workspace of matrices, which buckets share.

        Bucket k + `n_slots` has the buffers of bucket k. Portions share further buffers, and all
        buckets the workspace: only one is orthogonalized at a time.
        """

        def memory(words: Iterator[int]) -> Tensor:
            size = max(words, default=0)
            return torch.empty(size, dtype=torch.float64, device=self.device)

        workspace = memory(bucket.workspace_words for bucket in self.packing_order)
        slots = [self.travelling[k :: self.n_slots] for k in range(self.n_slots)]
        for buckets in (*slots, self.staying):
            holder_buffer = memory(bucket.exchange.holder_words for bucket in buckets)
            owner_buffer = memory(bucket.exchange.owner_words for bucket in buckets)
            for bucket in buckets:
                bucket.use_buffers(holder_buffer, owner_buffer, workspace)

    def bind(self, context: StepContext) -> None:
        """Create missing state, and all views of parameters and state."""
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
                first_statistics_row=self.statistics.first_row.get(i, 0),
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


class PipelineStep:
    """One step in progress: the constructor starts the first gathers, `finish` does the rest.

    Parameters
    ----------
    moments
        None without offload. Otherwise it yields the offloaded momenta of each bucket that advances
        some, on the device, in the order of `packing_order`. Between the buckets of the constructor
        and those of `finish`, `StepParts` takes the moments of other routes from it.
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
        # The tensors that buckets pack, by kind and position in the plan, until the last bucket of
        # a parameter has packed them. Weights are views of the parameters, which `_apply` changes
        # meanwhile: but only blocks that have been packed.
        self._plane_tensors: dict[str, dict[int, Tensor]] = {
            "direction": {},
            "gradient": {},
            "weight": {},
        }
        self._statistics = pipeline.statistics.new()
        self._missing = MissingGradients(pipeline.plan, pipeline.rank)
        # For each bucket on its way: the wait for its gather, later the one for its return.
        self._waits: dict[Bucket, Wait] = {}
        # Buckets update parts with master weights in the buffers that these gathers send.
        for gather in pipeline.part_gathers:
            gather.read_parts()
        for bucket in pipeline.travelling[: pipeline.n_first]:
            self._pack(bucket)

    def finish(self) -> list[Wait]:
        """Take all other stages, in the order of the module's diagram.

        Return the waits of `part_gathers`, which also write the parts of other ranks to parameters.
        """
        pipeline = self._pipeline
        for portion in pipeline.staying:
            self._pack(portion)
            self._orthogonalize(portion)
            self._apply(portion)
        n_travelling = len(pipeline.travelling)
        # A bucket's updates return while the next bucket is orthogonalized. With one slot the next
        # bucket needs its buffers first.
        delay = 1 if pipeline.n_slots > 1 else 0
        for k in range(n_travelling + delay):
            if k < n_travelling:
                self._orthogonalize(pipeline.travelling[k])
            if k >= delay:
                self._apply_and_refill(k - delay)

        waits = [gather.start() for gather in pipeline.part_gathers]
        if self._moments is not None:
            # All routes have taken theirs. Exhausting it copies the last batch back to the host.
            batch = next(self._moments, None)
            assert batch is None
        self._write_momenta_of_missing_gradients()
        if pipeline.plan.settings.free_gradients:
            for param in pipeline.idle:
                param.p.grad = None
        return waits

    def _apply_and_refill(self, number: int) -> None:
        """Apply a travelling bucket, and pack the next one of its slot."""
        travelling = self._pipeline.travelling
        self._apply(travelling[number])
        next_number = number + self._pipeline.n_slots
        if next_number < len(travelling):
            self._pack(travelling[next_number])

    # ----- stages 1 and 2: advance and pack ------------------------------------------------------

    def _pack(self, bucket: Bucket) -> None:
        """Advance the bucket's momenta, pack its pieces, and start its gather."""
        self._advance(bucket)
        plane_tensors = [self._plane_tensors[kind] for kind in ("direction", *bucket.input_kinds)]
        bucket.pack(
            plane_tensors, statistics=self._statistics, without_gradient=self._missing.momenta
        )
        for i in bucket.parameters:
            if self._pipeline.last_bucket[i] is bucket:
                for tensors in self._plane_tensors.values():
                    tensors.pop(i, None)  # frees the memory
        self._waits[bucket] = bucket.exchange.start("gather", self._pipeline.collectives)

    def _advance(self, bucket: Bucket) -> None:
        """Advance the bucket's momenta, and write its rows of the table of statistics."""
        if self._moments is not None and bucket.momentum_batches:
            bucket_momenta = next(self._moments)
        else:
            bucket_momenta = [self._pipeline.momenta[i] for i in bucket.advanced]
        remaining = iter(bucket_momenta)
        to_measure: list[Pieces] = []
        for batch in bucket.momentum_batches:
            momenta, grads = self._advance_batch(batch, [next(remaining) for _ in batch.parameters])
            self._set_plane_tensors(bucket, batch, momenta, grads)
            if any(rule.sums for rule in matrix_rules(self._groups[batch.group].settings)):
                to_measure += pieces_of(batch, momenta, grads)
            if self._pipeline.plan.settings.free_gradients:
                for i in batch.parameters:
                    self._pipeline.sharded_params[i].p.grad = None
        self._pipeline.statistics.measure(bucket, to_measure, self._statistics)

    def _advance_batch(
        self, batch: MomentumBatch, momenta: list[Tensor]
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Advance momenta in place; for parameters without a gradient, advance copies instead.

        The copies replace their momenta in the list `momenta`. Return momenta and gradients in the
        wider of float32 and the dtype of the momenta.
        """
        grads = []
        for k, i in enumerate(batch.parameters):
            grad = self._pipeline.sharded_params[i].gradient()
            if grad is None:
                momenta[k] = self._missing.copy_momentum(i, momenta[k])
                grad = torch.zeros_like(momenta[k])
            grads.append(grad)
        group = self._groups[batch.group]
        return advance_momenta(
            grads, momenta, group.settings, self._control, maximize=group.values["maximize"]
        )

    def _set_plane_tensors(
        self, bucket: Bucket, batch: MomentumBatch, momenta: list[Tensor], grads: list[Tensor]
    ) -> None:
        """Compute the directions of a batch; note them, and the inputs of rules, for packing."""
        settings = self._groups[batch.group].settings
        directions = directions_of(momenta, grads, settings)
        if self._moments is not None and not settings.nesterov:
            # Without Nesterov directions are the momenta themselves, and a later transfer batch
            # overwrites their memory.
            directions = [direction.clone() for direction in directions]
        self._plane_tensors["direction"].update(zip(batch.parameters, directions, strict=True))
        if bucket.input_kinds:
            weights = [self._pipeline.sharded_params[i].elements() for i in batch.parameters]
            self._plane_tensors["gradient"].update(zip(batch.parameters, grads, strict=True))
            self._plane_tensors["weight"].update(zip(batch.parameters, weights, strict=True))

    # ----- stages 3 and 4: orthogonalize and return ----------------------------------------------

    def _orthogonalize(self, bucket: Bucket) -> None:
        """Wait for a bucket's pieces, orthogonalize its matrices, and start the return."""
        self._wait(bucket)
        owned = bucket.assemble()
        stacks_of_group: dict[int, list[int]] = defaultdict(list)
        for number, stack in enumerate(bucket.stacks):
            stacks_of_group[stack.group].append(number)
        updates: dict[int, Tensor] = {}  # by number of the stack
        for group_number, stack_numbers in stacks_of_group.items():
            group_updates, rule_state = self._update_stacks(
                bucket, owned, group_number, stack_numbers
            )
            updates.update(zip(stack_numbers, group_updates, strict=True))
            # `pack_updates` sends the new state back, so it replaces the gathered one.
            for key, values in rule_state.items():
                for number, value in zip(stack_numbers, values, strict=True):
                    state = owned.state[number]
                    state[key] = self._keep_or_replace(state[key], value, owned.present[number])
        bucket.pack_updates([updates[k] for k in range(len(bucket.stacks))], owned)
        self._waits[bucket] = bucket.exchange.start("return", self._pipeline.collectives)

    def _wait(self, bucket: Bucket) -> None:
        """Wait for the collective of a bucket."""
        wait = self._waits.pop(bucket)
        wait()

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

        A skipped step keeps the old state, too. `present`, (blocks,), is above 0 for blocks with a
        gradient on any rank.
        """
        replaced = present > 0  # (blocks,)
        if self._control.skip is not None:
            replaced = replaced & (self._control.skip <= 0)
        trailing = [1] * (new.ndim - 1)
        return torch.where(replaced.view(-1, *trailing), new, old)

    # ----- stage 5: apply ------------------------------------------------------------------------

    def _apply(self, bucket: Bucket) -> None:
        """Wait for a bucket's updates and apply them; store the state of rules that came along."""
        self._wait(bucket)
        bucket.take_state()
        undecided = self._missing.undecided_pieces(bucket)  # copies of what the updates change
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
        for piece in undecided:
            piece.settle()

    def _write_momenta_of_missing_gradients(self) -> None:
        """Write the copies that have advanced to this rank's momenta; see `missing_gradients`."""
        if not self._missing.momenta:
            return
        if self._context.memory is not None:
            self._context.memory.wait()  # copies to the host may still write these momenta
        momenta = {}
        for i in self._missing.momenta:
            p = self._pipeline.sharded_params[i].p
            momenta[i] = local_of(self._context.state[p]["momentum_buffer"])
        self._missing.write_momenta(momenta)
