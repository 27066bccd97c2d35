"""The Muon route of parameters on several ranks: momenta, exchanges and updates, in a fixed order.

While bucket i is orthogonalized, the pieces of bucket i + 1 are sent to their owners and the updates of bucket i − 1
back: collectives are asynchronous, and the step waits for a result only where it uses it.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from deepmd_muon.optim.dtensors import local_of
from deepmd_muon.optim.routing.param_groups import Group
from deepmd_muon.optim.rules.interface import Pieces
from deepmd_muon.optim.rules.master_weights import MASTER
from deepmd_muon.optim.rules.registry import matrix_rules, tensors_of
from deepmd_muon.optim.sharded.bucket import Bucket, LocalParameter
from deepmd_muon.optim.sharded.elements import gathered_parts
from deepmd_muon.optim.sharded.messages import (
    local_messages,
    local_parts,
    local_shape,
    piece_of,
    rank_messages,
)
from deepmd_muon.optim.sharded.params import ShardedParameter
from deepmd_muon.optim.sharded.plan import Plan, carried
from deepmd_muon.optim.sharded.transport import CollectiveStream, Exchange
from deepmd_muon.optim.state.host_memory import HostMemory, TransferBatch, moments_of
from deepmd_muon.optim.state.schema import State
from deepmd_muon.optim.update.gradients import StepControl
from deepmd_muon.optim.update.muon import (
    advance_momenta,
    apply_updates,
    directions_of,
    effective_lr,
    update_blocks,
)

_WIDE = {4: torch.float32, 8: torch.float64}


@dataclasses.dataclass
class MomentumGroup:
    """Momenta of one parameter group and dtype that a bucket advances, by positions in the plan.

    `shapes` are those of the local momenta, (batch, rows, columns); `parts` has the rows and columns of each part of a
    matrix.
    """

    group: int
    parameters: list[int]
    shapes: list[tuple[int, int, int]]
    parts: list[list[tuple[slice, slice]]]


class MomentumUpdate:
    """The momenta to advance before a bucket is packed."""

    def __init__(
        self, plan: Plan, sharded_params: Sequence[ShardedParameter], bucket: Bucket, rank: int
    ) -> None:
        self.measuring, self.asked = bucket.measuring, bucket.asked
        kinds: dict[tuple[int, torch.dtype], list[int]] = {}
        for i in bucket.fresh:
            kinds.setdefault((sharded_params[i].group, sharded_params[i].p.dtype), []).append(i)
        self.momenta_groups = [
            MomentumGroup(
                group,
                some,
                [local_shape(plan, i, rank, "gather") for i in some],
                [local_parts(plan, i, rank) for i in some],
            )
            for (group, _), some in kinds.items()
        ]
        self.order = [i for momenta in self.momenta_groups for i in momenta.parameters]
        self.rows: dict[int, int] = {}  # each parameter's first row of sums
        self.height = 0
        for momenta in self.momenta_groups:
            for i, shape, parts in zip(
                momenta.parameters, momenta.shapes, momenta.parts, strict=True
            ):
                if carried(plan.parameters[i].rules).sums:
                    self.rows[i] = self.height
                    self.height += shape[0] * len(parts)
        self.buffers: list[Tensor] = []  # the momenta, on this rank, in `order`


class Pipeline:
    """A plan compiled for this rank; its parameters are `sharded_params`, at least one, in the same order.

    Attributes
    ----------
    travelling, staying
        The buckets exchanged between ranks, and portions of the work that stays on this rank.
    parts
        The gathers of parameters of which each rank updates the part that it has master weights of.
    """

    def __init__(
        self,
        plan: Plan,
        sharded_params: Sequence[ShardedParameter],
        groups: Sequence[dist.ProcessGroup | None],
        collectives: CollectiveStream,
    ) -> None:
        self.plan = plan
        self.sharded_params = sharded_params
        self.rank = dist.get_rank()
        self.device = local_of(sharded_params[0].p).device
        self.collectives = collectives
        self.travelling: list[Bucket] = []
        self.staying: list[Bucket] = []
        numbers = [param.group for param in sharded_params]
        for domain, group in zip(plan.domains, groups, strict=True):
            wide = _WIDE[domain.itemsize]
            for number in range(domain.buckets):
                jobs = [job for job in domain.jobs if job.bucket == number]
                mine = [
                    j
                    for j in jobs
                    if self.rank == j.owner or self.rank in j.sources or self.rank in j.destinations
                ]
                messages = rank_messages(plan, domain, mine, domain.ranks, self.rank)
                exchange = Exchange(plan, domain, messages, number, group, wide, self.device)
                self.travelling.append(
                    Bucket(plan, domain, exchange, numbers, self.rank, self.device)
                )
            for messages in local_messages(plan, domain, self.rank):
                exchange = Exchange(plan, domain, messages, None, None, wide, self.device)
                self.staying.append(Bucket(plan, domain, exchange, numbers, self.rank, self.device))
        # The order in which buckets are packed; see `PipelineStep`.
        self.first = plan.settings.slots
        self.order = [*self.travelling[: self.first], *self.staying, *self.travelling[self.first :]]
        self.last_use = {i: bucket for bucket in self.order for i in bucket.parameters}
        seen: set[int] = set()
        for bucket in self.order:
            bucket.fresh = tuple(i for i in bucket.parameters if i not in seen)
            seen.update(bucket.fresh)
        self.momentum_updates = [
            MomentumUpdate(plan, sharded_params, bucket, self.rank) for bucket in self.order
        ]
        # Parameters of which this rank has neither state nor updates.
        self.idle = [param for i, param in enumerate(sharded_params) if i not in seen]
        chosen = [
            param
            for param, planned in zip(sharded_params, plan.parameters, strict=True)
            if planned.masters
        ]
        self.parts = gathered_parts(chosen, collectives, keep=False)

        def widest(buckets: Sequence[Bucket]) -> tuple[Tensor, Tensor]:
            words = [bucket.exchange.words for bucket in buckets]
            most = [max(side, default=0) for side in zip(*words, strict=True)]
            holders, owners = (
                torch.empty(n, dtype=torch.float64, device=self.device) for n in most
            )
            return holders, owners

        by_slot = [self.travelling[k :: self.first] for k in range(self.first)] + [self.staying]
        self._slots = [(widest(buckets), buckets) for buckets in by_slot if buckets]
        words = max(
            (b.elements * b.exchange.dtype.itemsize // 8 + 1 for b in self.order), default=0
        )
        self._workspace = torch.empty(words, dtype=torch.float64, device=self.device)

    def bind(self, groups: Sequence[Group], state: State, memory: HostMemory | None) -> None:
        """Create all views of buffers, parameters and state; no communication."""
        # Every rank has all state tensors in the same order, even without local elements: code that gathers a state
        # dict tensor by tensor relies on it. Offloaded momenta are created one bucket at a time.
        for param in self.sharded_params:
            state.setdefault(param.p, {})
        everything = range(len(self.sharded_params))
        for positions in (*(update.order for update in self.momentum_updates), everything):
            chosen = [self.sharded_params[i] for i in positions]
            for param in chosen:
                param.complete(state[param.p], matrix_rules(groups[param.group].settings))
            if memory is not None:
                memory.offload(state, moments_of(state, [param.p for param in chosen]))
        states = [state[param.p] for param in self.sharded_params]
        local = {}
        parts = {p: part for several in self.parts for p, part in several.own.items()}
        for i, (param, own) in enumerate(zip(self.sharded_params, states, strict=True)):
            keys = tensors_of(self.plan.parameters[i].rules).keys() & own.keys()
            of_rules = {key: local_of(own[key]) for key in keys}
            elements = parts[param.p] if param.p in parts else local_of(param.p).detach()
            local[i] = LocalParameter(elements, of_rules, param.group)
        self.needed: list[list[int]] = []  # for each bucket, the tables of sums that it reads
        maker = {i: k for k, update in enumerate(self.momentum_updates) for i in update.order}
        rows: list[dict[int, int]] = []
        for bucket in self.order:
            needed = sorted({maker[i] for i in bucket.parameters})
            heights = itertools.accumulate(
                (self.momentum_updates[k].height for k in needed), initial=0
            )
            start = dict(zip(needed, heights, strict=False))
            self.needed.append(needed)
            where = {
                i: self.momentum_updates[maker[i]].rows.get(i, 0) + start[maker[i]]
                for i in bucket.parameters
            }
            rows.append(where)
        momenta = [local_of(state["momentum_buffer"]) for state in states]
        for slot, buckets in self._slots:
            for bucket in buckets:
                bucket.bind(slot, self._workspace, local, momenta, rows[self.order.index(bucket)])
        for update in self.momentum_updates:
            update.buffers = [momenta[i] for i in update.order]

    def transfer_batches(
        self, state: State, memory: HostMemory
    ) -> tuple[list[TransferBatch], list[TransferBatch]]:
        """Return the transfer batches of offloaded momenta, before and after those of the element-wise routes."""
        found = []
        for update in self.momentum_updates:
            wanted = [(self.sharded_params[i].p, "momentum_buffer") for i in update.order]
            found.append([memory.transfer_batch(state, wanted)] if wanted else [])
        first = min(self.first, len(self.travelling))
        before, after = found[:first], found[first:]
        return [*itertools.chain(*before)], [*itertools.chain(*after)]


class PipelineStep:
    """One step in progress: constructing it sends the first pieces; `finish` does the rest.

    `moments` yields each bucket's offloaded momenta on the device, in order.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        groups: Sequence[Group],
        state: State,
        memory: HostMemory | None,
        control: StepControl,
        moments: Iterator[list[Tensor]] | None,
    ) -> None:
        self._pipeline, self._groups, self._state, self._memory = pipeline, groups, state, memory
        self._control = control.on(pipeline.device)
        self._moments = moments
        self._planes: dict[str, dict[int, Tensor]] = {"direction": {}, "gradient": {}, "weight": {}}
        self._tables: dict[int, Tensor] = {}
        self._tentative: dict[int, Tensor] = {}
        self._moved: dict[tuple[int, int], Tensor] = {}
        self._packed = 0
        self._waiting = deque(pipeline.travelling)
        self._gathering: deque[tuple[Bucket, Callable[[], Any]]] = deque()
        self._returning: deque[tuple[Bucket, Callable[[], Any]]] = deque()
        for parts in pipeline.parts:
            parts.read()
        self._launch(in_use=0)

    def finish(self) -> list[Callable[[], None]]:
        """Orthogonalize local and received matrices, and apply all updates.

        Return functions that wait for the parts that other ranks have updated, and write them.
        """
        for bucket in self._pipeline.staying:
            self._apply(bucket, self._orthogonalize(bucket, self._pack(bucket)))
        while self._gathering:
            bucket, arrived = self._gathering.popleft()
            back = self._orthogonalize(bucket, arrived, meanwhile=True)
            if self._returning:
                self._apply(*self._returning.popleft())
            self._returning.append((bucket, back))
            self._launch(in_use=len(self._returning))
            if not self._gathering and self._waiting:  # a single buffer
                self._apply(*self._returning.popleft())
                self._launch(in_use=0)
        for bucket, back in self._returning:
            self._apply(bucket, back)
        arriving = [parts.gather() for parts in self._pipeline.parts]
        if self._moments is not None:
            for _ in self._moments:  # copies the last batch back to the host
                pass
        self._settle()
        for param in self._pipeline.idle if self._pipeline.plan.settings.free_gradients else ():
            param.p.grad = None
        return arriving

    def _launch(self, in_use: int) -> None:
        """Send the pieces of further buckets while buffers are free."""
        while self._waiting and len(self._gathering) + in_use < self._pipeline.plan.settings.slots:
            bucket = self._waiting.popleft()
            self._gathering.append((bucket, self._pack(bucket)))

    def _pack(self, bucket: Bucket) -> Callable[[], Any]:
        pipeline, number = self._pipeline, self._packed
        assert pipeline.order[number] is bucket
        self._packed += 1
        update = pipeline.momentum_updates[number]
        buffers = update.buffers
        if self._moments is not None and update.order:
            buffers = next(self._moments)
        self._tables[number] = self._advance(update, buffers)
        tables = [self._tables[k] for k in pipeline.needed[number]]
        sums = None
        if bucket.measuring and tables:
            sums = tables[0] if len(tables) == 1 else torch.cat(tables)
        bucket.pack(
            [self._planes[kind] for kind in ("direction", *bucket.asked)], sums, self._tentative
        )
        for i in bucket.parameters:
            if pipeline.last_use[i] is bucket:
                for plane in self._planes.values():
                    plane.pop(i, None)
        return bucket.exchange.start("gather", pipeline.collectives)

    def _advance(self, update: MomentumUpdate, buffers: Sequence[Tensor]) -> Tensor:
        """Advance momenta; return the rules' statistics of this rank's pieces, float64 (pieces, sums)."""
        start = 0
        pairs: list[Pieces] = []
        for momenta_group in update.momenta_groups:
            settings, group = (
                self._groups[momenta_group.group].settings,
                self._groups[momenta_group.group].values,
            )
            sharded_params = [self._pipeline.sharded_params[i] for i in momenta_group.parameters]
            mine = list(buffers[start : start + len(sharded_params)])
            start += len(sharded_params)
            grads = []
            for k, param in enumerate(sharded_params):
                grad = param.gradient()
                if grad is None:
                    # Only the end of the exchange shows whether another rank has a gradient, so advance a copy.
                    mine[k] = self._tentative[momenta_group.parameters[k]] = mine[k].clone()
                    grad = torch.zeros_like(mine[k])
                grads.append(grad)
            momenta, gradients = advance_momenta(
                grads, mine, settings, self._control, maximize=group["maximize"]
            )
            directions = directions_of(momenta, gradients, settings)
            if self._moments is not None and not settings.nesterov:
                directions = [
                    u.clone() for u in directions
                ]  # a later transfer batch overwrites this memory
            self._planes["direction"].update(zip(momenta_group.parameters, directions, strict=True))
            if update.asked:
                weights = [param.elements() for param in sharded_params]
                self._planes["gradient"].update(
                    zip(momenta_group.parameters, gradients, strict=True)
                )
                self._planes["weight"].update(zip(momenta_group.parameters, weights, strict=True))
            if any(rule.sums for rule in matrix_rules(settings)):
                pairs += _pairs(momenta, gradients, momenta_group)
            if self._pipeline.plan.settings.free_gradients:
                for param in sharded_params:
                    param.p.grad = None
        tables = [rule.measure(pairs, self._pipeline.device) for rule in update.measuring]
        return (
            torch.cat(tables, dim=1) if tables else torch.empty(0, 0, device=self._pipeline.device)
        )

    def _orthogonalize(
        self, bucket: Bucket, arrived: Callable[[], Any], *, meanwhile: bool = False
    ) -> Callable[[], Any]:
        """Wait for a bucket's pieces, send those of later buckets, orthogonalize, and send the updates back."""
        arrived()
        owned = bucket.assemble()
        if meanwhile:
            self._launch(in_use=1 + len(self._returning))
        updates: list[Tensor] = list(bucket.matrices)
        for number in dict.fromkeys(stack.group for stack in bucket.stacks):
            mine = [k for k, stack in enumerate(bucket.stacks) if stack.group == number]
            settings = self._groups[number].settings
            rules = matrix_rules(settings)
            keys = tensors_of(rules).keys() - {MASTER}
            state = {key: [owned.state[k][key] for k in mine] for key in keys}
            measured = {
                rule: [owned.measured[rule][k] for k in mine] for rule in rules if rule.sums
            }
            inputs = {kind: [plane[k] for k in mine] for kind, plane in bucket.inputs.items()}
            rate = effective_lr(self._groups[number].lr, self._control)
            directions = [bucket.matrices[k] for k in mine]
            done, new = update_blocks(directions, inputs, state, measured, rules, settings, rate)
            for k, update in zip(mine, done, strict=True):
                updates[k] = update
            for key, values in new.items():
                for k, value in zip(mine, values, strict=True):
                    # The old state stays if no rank has a gradient, and in a skipped step.
                    moves = owned.present[k] > 0
                    moves = (
                        moves if self._control.skip is None else moves & (self._control.skip <= 0)
                    )
                    moves = moves.view(-1, *[1] * (value.ndim - 1))
                    owned.state[k][key] = torch.where(moves, value, owned.state[k][key])
        bucket.unpack(updates, owned)
        return bucket.exchange.start("return", self._pipeline.collectives)

    def _apply(self, bucket: Bucket, returned: Callable[[], Any]) -> None:
        """Wait for a bucket's updates and apply them."""
        returned()
        bucket.take_state()
        undecided = [
            k for k, piece in enumerate(bucket.applying) if piece.parameter in self._tentative
        ]
        before: dict[int, list[Tensor]] = {}
        if undecided:
            moved = bucket.returned_headers()[:, 0] > 0
            self._moved.update({bucket.applying[k][:2]: moved[k] for k in undecided})
            before = {
                k: [x.clone() for x in xs]
                for k, xs in bucket.changed_by_updates()
                if k in undecided
            }
        for number, kind in bucket.update_lists:
            group = self._groups[number]
            lr = effective_lr(group.lr, self._control)
            rules = matrix_rules(group.settings)
            apply_updates(
                kind.targets,
                kind.updates,
                lr,
                group.settings.weight_decay,
                rules,
                kind.masters or None,
            )
        for k, changed in bucket.changed_by_updates() if before else ():
            if k in before:  # undo the update of a block that has no gradient on any rank
                keep = self._moved[bucket.applying[k][:2]]
                for x, old in zip(changed, before[k], strict=True):
                    x.copy_(torch.where(keep.to(x.device), x, old))

    def _settle(self) -> None:
        """Keep or discard the advanced copies of momenta without a local gradient, block by block."""
        pipeline = self._pipeline
        if self._tentative and self._memory is not None:
            self._memory.wait()
        for i, advanced in self._tentative.items():
            param = pipeline.sharded_params[i]
            buffer = local_of(self._state[param.p]["momentum_buffer"])
            shape = local_shape(pipeline.plan, i, pipeline.rank, "gather")
            for block in range(pipeline.plan.parameters[i].view.blocks):
                piece = piece_of(pipeline.plan, i, block, pipeline.rank, "gather")
                if piece.elements:
                    where = piece.batch, slice(*piece.rows[:2]), slice(*piece.columns[:2])
                    old = buffer.view(shape)[where]
                    new = advanced.view(shape)[where]
                    old.copy_(torch.where(self._moved[i, block], new, old.to(new.device)))


def _pairs(
    momenta: Sequence[Tensor], gradients: Sequence[Tensor], momenta_group: MomentumGroup
) -> list[Pieces]:
    """Return momentum and gradient of every part of every parameter."""
    pairs = []
    for m, g, shape, parts in zip(
        momenta, gradients, momenta_group.shapes, momenta_group.parts, strict=True
    ):
        if len(parts) == 1:
            pairs.append(Pieces(m, g, (shape[0], shape[1] * shape[2])))
            continue
        views = m.reshape(shape), g.reshape(shape)
        for r, c in parts:
            a, b = (x[:, r, c].flatten(1) for x in views)
            pairs.append(Pieces(a, b, (a.shape[0], a.shape[1])))
    return pairs
