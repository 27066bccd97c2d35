"""The Muon route of parameters on several ranks: momenta, exchanges one after another, updates.

While bucket i is orthogonalized, the pieces of bucket i + 1 travel to their owners and the updates of bucket i − 1
travel back: collectives are asynchronous, and a result is waited for only where it is used.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from deepmd_muon.optim import magma
from deepmd_muon.optim.config import HybridMuonConfig
from deepmd_muon.optim.gradients import StepControl
from deepmd_muon.optim.groups import group_settings
from deepmd_muon.optim.muon import advance_momenta, apply_updates, running_lr, scaled_polar_factors
from deepmd_muon.optim.sharded import magma_sums
from deepmd_muon.optim.sharded.bucket import Bucket, Moving
from deepmd_muon.optim.sharded.groups import check_agreement, group_of
from deepmd_muon.optim.sharded.members import Member, local_part, local_twin, muon_state
from deepmd_muon.optim.sharded.plan import Plan
from deepmd_muon.optim.sharded.routes import Piece, local_parts, local_shape, staying_routes, travelling_route
from deepmd_muon.optim.sharded.transport import Exchange, Flight

if TYPE_CHECKING:
    from deepmd_muon.optim.hybrid_muon import HybridMuon

_WIDE = {4: torch.float32, 8: torch.float64}


class Pipeline:
    """A plan compiled for this rank, ready to take steps.

    Parameters
    ----------
    optimizer
        Whose groups and state are used.
    plan
        Of `members`, in the same order.
    members
        The parameters of the Muon route that live on several ranks; at least one.

    Raises
    ------
    PlanMismatchError, UnsupportedTransportError
        On all ranks alike, before any step.
    """

    def __init__(self, optimizer: HybridMuon, plan: Plan, members: Sequence[Member]) -> None:
        self.optimizer = optimizer
        self.plan = plan
        self.members = members
        self.rank = dist.get_rank()
        self.device = local_part(members[0].p).device
        self.travelling: list[Bucket] = []
        self.staying: list[Bucket] = []
        numbers = [member.group for member in members]
        for domain in plan.domains:
            group = group_of(domain.ranks, self.device)
            check_agreement(plan, domain, group, self.device)

            wide = _WIDE[domain.itemsize]
            for number in range(domain.buckets):
                route = travelling_route(plan, domain, number, self.rank)
                exchange = Exchange(plan, domain, route, number, group, wide, self.device)
                self.travelling.append(Bucket(plan, domain, exchange, numbers, self.rank, self.device))
            for route in staying_routes(plan, domain, self.rank):
                exchange = Exchange(plan, domain, route, None, None, wide, self.device)
                self.staying.append(Bucket(plan, domain, exchange, numbers, self.rank, self.device))
        self.last_use = {i: bucket for bucket in (*self.travelling, *self.staying) for i in bucket.parameters}

    def begin(self, control: StepControl) -> Run:
        """Start a step: the first pieces leave for their owners."""
        return Run(self, control)


class Run:
    """One step under way."""

    def __init__(self, pipeline: Pipeline, control: StepControl) -> None:
        self._pipeline = pipeline
        self._optimizer = pipeline.optimizer
        self._control = control.on(pipeline.device)
        self._moving: dict[int, Moving] = {}
        self._tentative: dict[int, Tensor] = {}
        self._waiting = deque(pipeline.travelling)
        self._gathering: deque[tuple[Bucket, Flight]] = deque()
        for member in pipeline.members:  # every rank has all state, also where it holds no element
            settings = group_settings(self._optimizer.param_groups[member.group])
            muon_state(self._optimizer, member, damped=settings.magma_muon)
        self._launch(max(1, pipeline.plan.settings.ahead))

    def finish(self) -> None:
        """Orthogonalize what stays here and what arrives, and apply all updates."""
        for bucket in self._pipeline.staying:
            self._apply(bucket, self._orthogonalize(bucket, self._pack(bucket)))
        returning: tuple[Bucket, Flight] | None = None
        ahead = self._pipeline.plan.settings.ahead
        while self._gathering:
            bucket, flight = self._gathering.popleft()
            back = self._orthogonalize(bucket, flight, meanwhile=ahead)
            if returning is not None:
                self._apply(*returning)
            returning = bucket, back
            if not ahead:
                self._apply(*returning)
                returning = None
                self._launch(1)
        if returning is not None:
            self._apply(*returning)

    def _launch(self, count: int) -> None:
        """Send the pieces of further buckets until `count` are under way."""
        while self._waiting and len(self._gathering) < count:
            bucket = self._waiting.popleft()
            self._gathering.append((bucket, self._pack(bucket)))

    def _pack(self, bucket: Bucket) -> Flight:
        self._prepare([i for i in bucket.parameters if i not in self._moving])
        flight = bucket.start_gather(self._moving)
        for i in bucket.parameters:
            if self._pipeline.last_use[i] is bucket:
                del self._moving[i]
        return flight

    def _prepare(self, parameters: Sequence[int]) -> None:
        """Advance the momenta of some parameters of the plan."""
        kinds: dict[tuple[int, torch.dtype], list[int]] = defaultdict(list)
        for i in parameters:
            member = self._pipeline.members[i]
            kinds[member.group, member.p.dtype].append(i)
        for (number, _), chosen in kinds.items():
            group = self._optimizer.param_groups[number]
            settings = group_settings(group)
            members = [self._pipeline.members[i] for i in chosen]
            twins = [local_twin(member.p, missing_as_zero=True) for member in members]
            states = [muon_state(self._optimizer, member, damped=settings.magma_muon) for member in members]
            buffers = [local_part(state["momentum_buffer"]) for state in states]
            for k, (i, member) in enumerate(zip(chosen, members, strict=True)):
                if member.p.grad is None:
                    # Whether another rank has a gradient is known only at the end: the momentum waits until then.
                    buffers[k] = self._tentative[i] = buffers[k].clone()
            advanced = advance_momenta(twins, buffers, settings, self._control, maximize=group["maximize"])
            momenta, gradients, directions = advanced
            sums: list[Tensor | None] = [None] * len(chosen)
            if settings.magma_muon:
                sums = [*self._sums(chosen, momenta, gradients)]
            for i, member, u, x in zip(chosen, members, directions, sums, strict=True):
                shape = local_shape(self._pipeline.plan, i, self._pipeline.rank)
                self._moving[i] = Moving(u.reshape(shape), x, i not in self._tentative)
                if self._pipeline.plan.settings.free_gradients:
                    member.p.grad = None

    def _sums(self, parameters: Sequence[int], momenta: Sequence[Tensor], gradients: Sequence[Tensor]) -> list[Tensor]:
        """Return Magma's sums of this rank's piece of every block of each parameter: float64 (blocks here, 5)."""
        plan, rank = self._pipeline.plan, self._pipeline.rank
        pairs, parts = [], []
        for i, m, g in zip(parameters, momenta, gradients, strict=True):
            shape = local_shape(plan, i, rank)
            cuts = local_parts(plan, i, rank)
            views = [x.reshape(shape) for x in (m, g)]
            pairs += [(views[0][:, r, c].flatten(1), views[1][:, r, c].flatten(1)) for r, c in cuts]
            parts.append(len(cuts))
        sums = iter(magma_sums.piece_sums_of_many(pairs))
        return [torch.stack([next(sums) for _ in range(n)], dim=1).flatten(0, 1) for n in parts]

    def _orthogonalize(self, bucket: Bucket, flight: Flight, meanwhile: int = 0) -> Flight:
        """Wait for a bucket's pieces, send the next buckets', orthogonalize, and send the updates back."""
        matrices, headers = bucket.assemble(flight)
        self._launch(meanwhile)
        updates: list[Tensor] = list(matrices)
        numbers = [stack.group for stack in bucket.stacks]
        for number in dict.fromkeys(numbers):
            mine = [k for k, other in enumerate(numbers) if other == number]
            settings = group_settings(self._optimizer.param_groups[number])
            done = scaled_polar_factors([matrices[k] for k in mine], settings)
            for k, update in zip(mine, done, strict=True):
                updates[k] = update
        return bucket.start_return(updates, headers)

    def _apply(self, bucket: Bucket, flight: Flight) -> None:
        """Wait for a bucket's updates and apply them."""
        headers, flats = flight.wait()
        factors = self._damping(bucket, headers)
        kinds: dict[tuple[int, torch.dtype], list[int]] = defaultdict(list)
        for k, piece in enumerate(bucket.applying):
            if piece.elements:
                member = self._pipeline.members[piece.parameter]
                kinds[member.group, member.p.dtype].append(k)
        for (number, _), chosen in kinds.items():
            group = self._optimizer.param_groups[number]
            settings = group_settings(group)
            targets = [self._piece(local_part(self._member(bucket, k).p).detach(), bucket.applying[k]) for k in chosen]
            updates = [flats[k].view(x.shape) for k, x in zip(chosen, targets, strict=True)]
            if settings.magma_muon:
                updates = list(torch._foreach_mul(updates, [factors[k].view(1, 1) for k in chosen]))
            before = {k: x.clone() for k, x in zip(chosen, targets, strict=True) if self._undecided(bucket, k)}
            apply_updates(targets, updates, running_lr(group["lr"], self._control), settings.weight_decay)
            for k, x in zip(chosen, targets, strict=True):
                if k in before:
                    self._settle(bucket, k, headers[k, 0] > 0, x, before[k])

    def _damping(self, bucket: Bucket, headers: Tensor) -> dict[int, Tensor]:
        """Advance the scores of a bucket's blocks on this rank; return the factor of each of its pieces."""
        damped = [k for k in range(len(bucket.applying)) if self._group_settings(bucket, k).magma_muon]
        sure = [k for k in damped if not self._undecided(bucket, k)]
        factors: dict[int, Tensor] = {}
        cosines = headers[:, -1].float()
        for lot in [sure] * bool(sure) + [[k] for k in damped if self._undecided(bucket, k)]:
            scores = []
            for k in lot:
                state = muon_state(self._optimizer, self._member(bucket, k), damped=True)
                scores.append(local_part(state["magma_score"])[bucket.scores[k] :][:1])
            skip = self._control.skip
            if lot is not sure:
                nobody = (headers[lot[0], 0] == 0).float()
                skip = nobody if skip is None else torch.maximum(skip, nobody)
            lot_cosines = [cosines[k : k + 1] for k in lot]
            factors.update(zip(lot, magma.update_scores(scores, lot_cosines, skip), strict=True))
        return factors

    def _group_settings(self, bucket: Bucket, k: int) -> HybridMuonConfig:
        return group_settings(self._optimizer.param_groups[self._member(bucket, k).group])

    def _member(self, bucket: Bucket, k: int) -> Member:
        return self._pipeline.members[bucket.applying[k].parameter]

    def _undecided(self, bucket: Bucket, k: int) -> bool:
        """Whether this rank has no gradient for a piece, so that only its header says if the block moves."""
        return bucket.applying[k].parameter in self._tentative

    def _piece(self, local: Tensor, piece: Piece) -> Tensor:
        """Return a view of a piece in a local tensor."""
        shape = local_shape(self._pipeline.plan, piece.parameter, self._pipeline.rank)
        (r0, r1, _), (c0, c1, _) = piece.rows, piece.columns
        return local.view(shape)[piece.batch, r0:r1, c0:c1]

    def _settle(self, bucket: Bucket, k: int, moved: Tensor, target: Tensor, before: Tensor) -> None:
        """Keep or take back the update of a piece without a gradient here, and its momentum."""
        target.copy_(torch.where(moved, target, before))
        piece = bucket.applying[k]
        state = self._optimizer.state[self._member(bucket, k).p]
        buffer = self._piece(local_part(state["momentum_buffer"]), piece)
        buffer.copy_(torch.where(moved, self._piece(self._tentative[piece.parameter], piece), buffer))
