"""What a step works on: parameters by route, device and dtype, remembered while they stay the same.

A small model's step is bound by the host, so that each step looks at little: parameters, gradients and state in one
pass, and the groups' settings as they were given.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterable, Iterator, Sequence
from operator import eq, is_
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from deepmd_muon.optim.config import HybridMuonConfig, adam_lr_ratio
from deepmd_muon.optim.cuda import SideStream
from deepmd_muon.optim.errors import InvalidGradientError
from deepmd_muon.optim.polar.dispatch import unavailable
from deepmd_muon.optim.routing.param_groups import given_settings, group_settings, rate_of
from deepmd_muon.optim.routing.rules import Route, RouteEntry
from deepmd_muon.optim.routing.views import MatrixView
from deepmd_muon.optim.state.host_memory import Lot
from deepmd_muon.optim.state.schema import MOMENTS, States, state_of
from deepmd_muon.optim.update.adam import adam_, moment_dtype
from deepmd_muon.optim.update.gradients import StepControl, gradients_of, waves
from deepmd_muon.optim.update.muon import muon_

if TYPE_CHECKING:
    from deepmd_muon.optim.hybrid_muon import HybridMuon
    from deepmd_muon.optim.update.fused import FusedSteps


_SMALL = 4 * 2**20  # elements


Members = list[tuple[Tensor, RouteEntry]]


class Wave(NamedTuple):
    """Parameters of one group, route, device and dtype that are stepped together, and their state.

    Where moments are in host memory, `lot` is them: parameter by parameter, in the order of `MOMENTS`.
    """

    group: dict[str, Any]
    settings: HybridMuonConfig
    route: Route
    device: torch.device
    params: list[Tensor]
    views: list[MatrixView]
    states: States
    lot: Lot | None


class Work:
    """The parameters that have a gradient, as one step or many find them.

    Attributes
    ----------
    members
        By parameter group.
    params
        All of them.
    beside
        Where the Adam routes run beside the other; None where they follow it.

    Raises
    ------
    InvalidGradientError
        When a gradient is sparse.
    """

    def __init__(self, optimizer: HybridMuon) -> None:
        groups = optimizer.param_groups
        self._groups = list(groups)
        self._given = copy.deepcopy([_given(optimizer, group) for group in groups])
        self._sizes = [len(group["params"]) for group in groups]
        self._all = [p for group in groups for p in group["params"]]
        self._trained = [p.requires_grad for p in self._all]
        self._layouts = [None if (g := p.grad) is None else g.layout for p in self._all]
        self.members = [_with_gradient(group, optimizer._entries[i]) for i, group in enumerate(groups)]
        self.params = [p for members in self.members for p, _ in members]
        self.beside: SideStream | None = None
        self._waves: list[Wave] | None = None
        self._states: list[dict[str, Tensor]] = []

    def holds(self, optimizer: HybridMuon) -> bool:
        """Return whether it would come out the same now."""
        groups, state = optimizer.param_groups, optimizer.state
        params = [p for group in groups for p in group["params"]]
        return (
            self._waves is not None
            and [len(group["params"]) for group in groups] == self._sizes
            and all(map(is_, groups, self._groups))
            and all(map(eq, [_given(optimizer, group) for group in groups], self._given))
            and all(map(is_, params, self._all))
            and [None if (g := p.grad) is None else g.layout for p in params] == self._layouts
            and [p.requires_grad for p in params] == self._trained
            and len(state) == len(self._states)
            and all(map(is_, state.values(), self._states))
            and all(map(all, [wave.states for wave in self._waves]))
            and all(wave.params[0].device == wave.device for wave in self._waves)
        )

    def waves(self, optimizer: HybridMuon, members: Sequence[Members]) -> list[Wave]:
        """Return what is stepped together of what is left for this process to step alone, the same in every step."""
        if self._waves is None:
            groups = zip(optimizer.param_groups, members, strict=True)
            self._waves = [wave for group, some in groups for wave in _waves_of(optimizer, group, some)]
            self._waves.sort(key=lambda wave: wave.route != "muon")  # what takes longest starts first
            self.beside = _beside(optimizer, self._waves)
            self._states = list(optimizer.state.values())
        return self._waves


def _given(optimizer: HybridMuon, group: dict[str, Any]) -> tuple[Any, ...]:
    """Return what of a group and its optimizer decides what is stepped together, and how."""
    return given_settings(group), group["foreach"], optimizer.workspace


def _with_gradient(group: dict[str, Any], entries: Sequence[RouteEntry]) -> Members:
    """Return one group's parameters that have a usable gradient."""
    members = []
    for p, entry in zip(group["params"], entries, strict=True):
        if p.grad is None or entry.route == "frozen":
            continue
        if p.grad.layout != torch.strided:
            raise InvalidGradientError(
                f"the gradient of {entry.name!r} is sparse; HybridMuon needs dense gradients "
                "(for an embedding set sparse=False)"
            )
        members.append((p, entry))
    return members


def _waves_of(optimizer: HybridMuon, group: dict[str, Any], members: Members) -> Iterator[Wave]:
    """Cut one group's parameters into waves; make the state of those that have none."""
    settings = group_settings(group)
    routes: tuple[Route, ...] = ("muon", "adam", "adamw")
    for route in routes:
        taken = [(p, entry) for p, entry in members if entry.route == route]
        # Equal shapes side by side: where not all fit in one wave, they are still orthogonalized in batches.
        taken.sort(key=lambda member: (member[1].view.rows, member[1].view.columns) if member[1].view else (0, 0))
        for wave in waves(taken, elements_at_a_time(optimizer, group, route, [p for p, _ in taken])):
            params = [p for p, _ in wave]
            views = [entry.view for _, entry in wave if entry.view is not None]
            states = [state_of(optimizer, p, entry, damped=settings.magma_muon) for p, entry in wave]
            lot = lot_of(optimizer, params, route)
            yield Wave(group, settings, route, params[0].device, params, views, states, lot)


def elements_at_a_time(optimizer: HybridMuon, group: dict[str, Any], route: Route, params: Sequence[Tensor]) -> int:
    """Return how many elements of such parameters are worked on together."""
    if group["foreach"] is False:
        return 0
    if optimizer._offload is None or not params:
        return optimizer.workspace
    # Moments are at least float32 on the Adam routes.
    wide = 1 if route == "muon" else -(-moment_dtype(params[0].dtype).itemsize // params[0].element_size())
    return min(optimizer.workspace, optimizer._offload.elements(params, wide * len(MOMENTS[route])))


def lot_of(optimizer: HybridMuon, params: Sequence[Tensor], route: Route) -> Lot | None:
    """Return the moments of some parameters as what travels together; None where they stay on the device."""
    if optimizer._offload is None:
        return None
    return optimizer._offload.lot(optimizer.state, [(p, key) for p in params for key in MOMENTS[route]])


def on_device(states: States, route: Route, moments: Sequence[Tensor]) -> States:
    """Return states with their moments replaced by those of their lot."""
    keys = MOMENTS[route]
    found = iter(moments)
    return [{**state, **{key: next(found) for key in keys}} for state in states]


def _beside(optimizer: HybridMuon, waves: Sequence[Wave]) -> SideStream | None:
    """Return where the Adam routes run beside the other: on one GPU, if they are small.

    (The memory that a stream once took is no other's, and large work leaves no room on the device anyway.)
    """
    devices, routes = {wave.device for wave in waves}, {wave.route for wave in waves}
    small = sum(p.numel() for wave in waves if wave.route != "muon" for p in wave.params) <= _SMALL
    if not small or len(devices) != 1 or "muon" not in routes or len(routes) == 1 or optimizer._offload is not None:
        return None
    (device,) = devices
    if device.type == "cuda" and (optimizer._beside is None or optimizer._beside.device != device):
        optimizer._beside = SideStream(device)
    return optimizer._beside if device.type == "cuda" else None


def step_waves(optimizer: HybridMuon, work: Work, members: Sequence[Members], control: StepControl) -> None:
    """Step those of some work's parameters that are left for this process to step alone."""
    waves = work.waves(optimizer, members)
    if work.beside is not None:
        control = control.on(work.beside.device)
        work.beside.open()
    for wave, states in zip(waves, _ready(optimizer, waves), strict=True):
        here = control.on(wave.device)
        if wave.route == "muon":
            _step_matrices(optimizer, wave, states, here)
        else:
            with work.beside or contextlib.nullcontext():
                grads = gradients_of(wave.params)
                step_elements(wave.params, grads, states, wave.route, wave.group, here, wave.settings)


def _ready(optimizer: HybridMuon, waves: Sequence[Wave]) -> Iterable[States]:
    """Return the state of each wave, on its device when its turn comes."""
    if optimizer._offload is None:
        return [wave.states for wave in waves]
    carried = optimizer._offload.carry([wave.lot for wave in waves if wave.lot is not None])
    return (on_device(wave.states, wave.route, moments) for wave, moments in zip(waves, carried, strict=True))


def _step_matrices(optimizer: HybridMuon, wave: Wave, states: States, control: StepControl) -> None:
    """Take a step of the Muon route."""
    buffers = [state["momentum_buffer"] for state in states]
    scores = [state["magma_score"] for state in states] if wave.settings.magma_muon else []
    lists = wave.params, buffers, scores, wave.views
    lr, settings, maximize = rate_of(wave.group), wave.settings, wave.group["maximize"]
    fused = _fused_steps(optimizer, wave.device, settings)
    if fused is None or not fused.step(*lists, lr=lr, settings=settings, control=control, maximize=maximize):
        muon_(*lists, lr=lr, settings=settings, control=control, maximize=maximize)


def step_elements(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    states: Sequence[dict[str, Tensor]],
    route: Route,
    group: dict[str, Any],
    control: StepControl,
    settings: HybridMuonConfig | None = None,
) -> None:
    """Take a step of one of the Adam routes, on parameters of one group, device and dtype."""
    settings = settings or group_settings(group)
    lr, ratio = rate_of(group), adam_lr_ratio(settings)
    adam_(
        params,
        grads,
        *([state[key] for state in states] for key in ("exp_avg", "exp_avg_sq", "step")),
        lr=lr if ratio == 1.0 else lr * ratio,
        betas=(settings.adam_beta1, settings.adam_beta2),
        weight_decay=settings.weight_decay if route == "adamw" else 0.0,
        control=control,
        maximize=group["maximize"],
    )


def _fused_steps(optimizer: HybridMuon, device: torch.device, settings: HybridMuonConfig) -> FusedSteps | None:
    """Return what steps the Muon route in few launches; None where torch's operations do it."""
    if device.type != "cuda" or not settings.flash_muon or settings.deepmd_kit_arithmetic:
        return None
    if optimizer._fused is None and not unavailable():
        from deepmd_muon.optim.update.fused import FusedSteps

        optimizer._fused = FusedSteps()
    return optimizer._fused
