"""The optimizer's step where parameters live on several ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from deepmd_muon.optim.dtensors import local_of
from deepmd_muon.optim.errors import (
    CaptureError,
    NonFiniteGradientError,
    ShardingError,
    UnsupportedTransportError,
)
from deepmd_muon.optim.polar.schedules import coefficients_of
from deepmd_muon.optim.routing.param_groups import group_settings
from deepmd_muon.optim.routing.rules import RouteEntry
from deepmd_muon.optim.sharded.elements import Elements
from deepmd_muon.optim.sharded.params import (
    DTYPES,
    Member,
    Replicas,
    Settled,
    StateCut,
    element_state,
    layout_of,
    muon_state,
    problem_of,
    state_cut,
)
from deepmd_muon.optim.sharded.pipeline import Pipeline, Run
from deepmd_muon.optim.sharded.plan import PlannedParameter, make_plan
from deepmd_muon.optim.sharded.presence import Presence, Watched
from deepmd_muon.optim.sharded.process_groups import check_agreement, group_of
from deepmd_muon.optim.sharded.reference import step_everywhere
from deepmd_muon.optim.sharded.transport import Lane
from deepmd_muon.optim.sharded_config import ShardedSettings
from deepmd_muon.optim.update.adam import moment_dtype
from deepmd_muon.optim.update.gradients import StepControl, nonfinite

if TYPE_CHECKING:
    from deepmd_muon.optim.hybrid_muon import HybridMuon

Work = list[list[tuple[Tensor, RouteEntry]]]


def sharded_step(optimizer: HybridMuon, replicas: Replicas | None, settings: ShardedSettings) -> ShardedStep | None:
    """Return the step of those of an optimizer's parameters that live on several ranks; None when none does.

    Raises
    ------
    UnsupportedTransportError
        When one has elements of another type than float16, bfloat16, float32 or float64.
    """
    members = []
    for number, group in enumerate(optimizer.param_groups):
        for p, entry in zip(group["params"], optimizer._entries[number], strict=True):
            layout = layout_of(p, replicas)
            if layout is not None and entry.route != "frozen":
                cut = None
                if settings.state == "sharded" and replicas is not None and not isinstance(p, DTensor):
                    cut = state_cut(p, replicas, matrices=entry.route == "muon")
                members.append(Member(p, entry, number, layout, p.device, cut))
                if p.dtype not in DTYPES:
                    raise UnsupportedTransportError(
                        f"{members[-1]}: {p.dtype} cannot be stepped; freeze it, or keep it in bfloat16 or wider"
                    )
    return ShardedStep(optimizer, members, settings) if members else None


class ShardedStep:
    """Steps the parameters that live on several ranks.

    Parameters
    ----------
    optimizer
        Whose groups and state are used.
    members
        Those parameters, in the optimizer's order.
    settings
        Of the exchange.

    Attributes
    ----------
    plan
        Of the Muon route; plain values, made without communication.
    """

    def __init__(self, optimizer: HybridMuon, members: Sequence[Member], settings: ShardedSettings) -> None:
        self._optimizer = optimizer
        self._settings = settings
        self._members = list(members)
        self._here = {member.p for member in members}
        trained = sum(entry.route != "frozen" for entries in optimizer._entries.values() for entry in entries)
        self._all = len(self._here) == trained
        self._muon = [member for member in members if member.entry.route == "muon"]
        self.plan = make_plan([self._planned(member) for member in self._muon], settings)
        # Replicas that repeat the work take one process's own step, with all its fast paths, once their plans agree.
        plain = not any(isinstance(member.p, DTensor) for member in members)
        cut = any(member.cut is not None for member in members)
        self._repeating = plain and not cut and not any(domain.buckets for domain in self.plan.domains)
        self._agreed = False
        self._groups: list[dist.ProcessGroup | None] | None = None
        self._pipeline: Pipeline | None = None
        self._elements: Elements | None = None
        self._settled: Settled | None = None
        self._presence: Presence | None = None

    def forget(self) -> None:
        """Look at parameters and state anew in the next step, and let go of their tensors."""
        self._settled = None
        if self._elements is not None:
            self._elements.forget()
        for preparation in self._pipeline.preparations if self._pipeline is not None else ():
            preparation.buffers = []

    def finish(self) -> None:
        """Raise what the last step has found out too late; without communication.

        Raises
        ------
        MissingGradientError
            As `step`.
        """
        if self._presence is not None:
            self._presence.finish()

    def cut_of(self, p: Tensor) -> StateCut | None:
        """Return how a parameter's state is cut, where the parameter itself is not."""
        return next((member.cut for member in self._members if member.p is p), None)

    def fresh_state(self) -> dict[str, dict[str, Tensor]]:
        """Return state laid out as the first step would make it, by parameter name; the optimizer's is left alone."""
        optimizer = self._optimizer
        before = dict(optimizer.state)
        optimizer.state.clear()
        try:
            for member in self._members:
                if member.entry.route == "muon":
                    muon_state(optimizer, member, damped=optimizer.param_groups[member.group]["magma_muon"])
                else:
                    element_state(optimizer, member)
            return {member.entry.name: optimizer.state[member.p] for member in self._members}
        finally:
            optimizer.state.clear()
            optimizer.state.update(before)

    def _planned(self, member: Member) -> PlannedParameter:
        settings = group_settings(self._optimizer.param_groups[member.group])
        entry = member.entry
        assert entry.view is not None
        return PlannedParameter(
            entry.name,
            entry.shape,
            entry.view,
            member.layout,
            itemsize=moment_dtype(member.p.dtype).itemsize,
            damped=settings.magma_muon,
            steps=len(coefficients_of(settings.schedule)),
            gram=settings.enable_gram,
            state_layout=member.cut.layout if member.cut else None,
        )

    def step(self, work: Work) -> tuple[Work, StepControl]:
        """Step them; return the work that is left, on parameters of this rank alone, and what holds for it.

        Raises
        ------
        ShardingError
            When something cannot be exchanged; on all ranks alike, and nothing has been changed.
        NonFiniteGradientError
            On all ranks when a gradient of any is not finite and `on_nonfinite` is 'error'.
        MissingGradientError
            On all ranks when replicas that do not travel have a gradient on some of them only; on a GPU in the step
            after that, or by `finish`.
        PlanMismatchError
            On all ranks, in the first step, when some have other parameters than the others.
        CaptureError
            While a CUDA graph is being captured.
        """
        if not self._repeating and torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            raise CaptureError("a step on several ranks cannot be captured in a CUDA graph")
        settled = self._settled is not None and self._settled.holds(self._optimizer)
        problem = None
        if not settled:
            self._settled = None
            problem = problem_of(self._optimizer, self._members)
        self._agree(problem)
        control = self._control()
        if self._repeating:
            return work, control
        self._step(control, settled=settled)
        if self._settled is None:
            self._settled = Settled(self._optimizer, self._members)
        if self._all:
            return [[] for _ in work], control
        return [[(p, entry) for p, entry in members if p not in self._here] for members in work], control

    def _step(self, control: StepControl, *, settled: bool) -> None:
        """Take the step of both routes; the element-wise one while the first pieces of the other travel."""
        if self._elements is None:
            lane = Lane(self._members[0].device)
            rest = [member for member in self._members if member.entry.route != "muon"]
            self._elements = Elements(self._optimizer, rest, lane)
            if self._muon and self._settings.exchange == "owners":
                self._pipeline = Pipeline(self._optimizer, self.plan, self._muon, self._groups or [], lane)
        if not settled:
            self._elements.forget()
            if self._pipeline is not None:
                self._pipeline.bind()
        offload, moments = self._optimizer._offload, None
        if offload is not None:
            before, after = self._pipeline.lots() if self._pipeline is not None else ([], [])
            moments = offload.carry([*before, *self._elements.lots(), *after])
        run = None if self._pipeline is None else Run(self._pipeline, control, moments)
        finish = self._elements.step(control, moments)
        if run is not None:
            run.finish()
        elif self._muon:
            step_everywhere(self._optimizer, self.plan, self._muon, self._groups or [], control)
        for _ in moments or ():  # the last lot goes home
            pass
        finish()

    def _agree(self, problem: ShardingError | None) -> None:
        """Compare the plans of all ranks once, with what any of them cannot step then; raise this rank's problem."""
        device = self._members[0].device
        if self._groups is None:
            self._groups = [group_of(domain.ranks, device) for domain in self.plan.domains]
        if not self._agreed:
            for domain, group in zip(self.plan.domains, self._groups, strict=True):
                check_agreement(self.plan, domain, group, device, problem)
        if problem is not None:
            raise problem
        self._agreed = True

    def _watch(self) -> Presence:
        """Return what compares gradients among ranks, where replicas would differ if one were missing on some."""
        everywhere = self._settings.exchange == "reference"
        still = self._repeating or everywhere
        members = self._members if still else [m for m in self._members if m.entry.route != "muon"]
        watched = [
            Watched(member.p, f"{member} (route {member.entry.route})", tuple(sorted(member.layout.ranks)))
            for member in members
            if len(member.layout.replicas()) > 1
        ]
        known = [tuple(sorted(member.layout.ranks)) for member in self._members]
        return Presence(watched, known, self._members[0].device, late=False if everywhere else None)

    def _control(self) -> StepControl:
        """Decide on all ranks alike whether there is a step, and on the device whether it is left out."""
        if self._presence is None:
            self._presence = self._watch()
        optimizer = self._optimizer
        scale, skip = getattr(optimizer, "grad_scale", None), getattr(optimizer, "found_inf", None)
        if optimizer.on_nonfinite == "ignore" and skip is None:
            self._presence.compare()
            return StepControl(None, scale)
        parameters = [
            x
            for number, group in enumerate(optimizer.param_groups)
            for x in zip(group["params"], optimizer._entries[number], strict=True)
        ]
        told = optimizer.on_nonfinite == "error" and skip is None
        device = self._members[0].device
        flags = torch.zeros(len(parameters) if told else 1, device=device)
        if skip is not None:
            flags = flags.maximum(skip.to(device))
        if optimizer.on_nonfinite != "ignore":
            grads = {
                i: local_of(p.grad) for i, (p, e) in enumerate(parameters) if p.grad is not None and e.route != "frozen"
            }
            found = {i: grad for i, grad in grads.items() if grad.numel()}
            if found:
                bad = nonfinite(list(found.values())).to(device, torch.float32)
                if told:  # the host waits anyway
                    flags[list(found)] = bad
                else:
                    flags = flags.maximum(bad.amax())
        agreed = self._presence.compare(flags)
        assert agreed is not None
        if told and agreed.any():
            names = [e.name for (_, e), is_bad in zip(parameters, agreed.tolist(), strict=True) if is_bad]
            raise NonFiniteGradientError(names)
        return StepControl(agreed.amax(), scale)
