"""What a step works on: parameters by route, device and dtype, remembered while they stay the same."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from operator import is_
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor

from deepmd_muon.optim.adam import adam_, moment_dtype
from deepmd_muon.optim.config import HybridMuonConfig
from deepmd_muon.optim.gradients import StepControl, gradients_of, waves
from deepmd_muon.optim.groups import adam_lr_ratio, group_settings
from deepmd_muon.optim.muon import muon_
from deepmd_muon.optim.offload import Lot
from deepmd_muon.optim.polar.dispatch import unavailable
from deepmd_muon.optim.routing import Route, RouteEntry
from deepmd_muon.optim.state import state_of

if TYPE_CHECKING:
    from deepmd_muon.optim.fused import FusedSteps
    from deepmd_muon.optim.hybrid_muon import HybridMuon

States = list[dict[str, Tensor]]

# What of a route's state has the size of its parameters.
MOMENTS: dict[Route, tuple[str, ...]] = {
    "muon": ("momentum_buffer",),
    "adam": ("exp_avg", "exp_avg_sq"),
    "adamw": ("exp_avg", "exp_avg_sq"),
}


class Wave(NamedTuple):
    """Parameters of one group, route, device and dtype that are stepped together, and their state.

    Where moments are in host memory, `lot` is them: parameter by parameter, in the order of `MOMENTS`.
    """

    members: list[tuple[Tensor, RouteEntry]]
    states: States
    lot: Lot | None


class GroupWork:
    """The waves of one parameter group, and what they depend on."""

    def __init__(
        self, optimizer: HybridMuon, group: dict[str, Any], members: Sequence[tuple[Tensor, RouteEntry]]
    ) -> None:
        self._key = _key(optimizer, group)
        self._params = [p for p, _ in members]
        self.waves: list[Wave] = []
        routes: tuple[Route, ...] = ("muon", "adam", "adamw")
        for route in routes:
            taken = [(p, entry) for p, entry in members if entry.route == route]
            # Equal shapes side by side: where not all fit in one wave, they are still orthogonalized in batches.
            taken.sort(key=lambda member: (member[1].view.rows, member[1].view.columns) if member[1].view else (0, 0))
            for wave in waves(taken, elements_at_a_time(optimizer, group, route, [p for p, _ in taken])):
                states = [state_of(optimizer, p, entry, damped=group["magma_muon"]) for p, entry in wave]
                self.waves.append(Wave(wave, states, lot_of(optimizer, [p for p, _ in wave], route)))
        self._states = [optimizer.state[p] for p in self._params]

    def holds(self, optimizer: HybridMuon, group: dict[str, Any], members: Sequence[tuple[Tensor, RouteEntry]]) -> bool:
        """Return whether the waves would come out the same now."""
        return (
            len(members) == len(self._params)
            and _key(optimizer, group) == self._key
            and all(map(is_, [p for p, _ in members], self._params))
            and all(map(is_, map(optimizer.state.get, self._params), self._states))
            and all(self._states)
        )


def _key(optimizer: HybridMuon, group: dict[str, Any]) -> tuple[Any, ...]:
    return group["magma_muon"], group["foreach"], optimizer.workspace


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


def step_waves(
    optimizer: HybridMuon, work: Sequence[Sequence[tuple[Tensor, RouteEntry]]], control: StepControl
) -> None:
    """Step each group's parameters that have a gradient."""
    todo: list[tuple[dict[str, Any], Wave]] = []
    for number, (group, members) in enumerate(zip(optimizer.param_groups, work, strict=True)):
        known = optimizer._work.get(number)
        if known is None or not known.holds(optimizer, group, members):
            known = optimizer._work[number] = GroupWork(optimizer, group, members)
        todo += [(group, wave) for wave in known.waves]
    for (group, wave), states in zip(todo, _ready(optimizer, [wave for _, wave in todo]), strict=True):
        step_wave(optimizer, wave.members, states, group, control.on(wave.members[0][0].device))


def _ready(optimizer: HybridMuon, todo: Sequence[Wave]) -> Iterator[States]:
    """Yield the state of each wave, on its device."""
    if optimizer._offload is None:
        yield from (wave.states for wave in todo)
        return
    carried = optimizer._offload.carry([wave.lot for wave in todo if wave.lot is not None])
    for wave, moments in zip(todo, carried, strict=True):
        yield on_device(wave.states, wave.members[0][1].route, moments)


def step_wave(
    optimizer: HybridMuon,
    wave: Sequence[tuple[Tensor, RouteEntry]],
    states: Sequence[dict[str, Tensor]],
    group: dict[str, Any],
    control: StepControl,
) -> None:
    """Step some parameters of one group, route, device and dtype."""
    settings = group_settings(group)
    params = [p for p, _ in wave]
    route = wave[0][1].route
    if route == "muon":
        lists = (
            params,
            [state["momentum_buffer"] for state in states],
            [state["magma_score"] for state in states] if settings.magma_muon else [],
            [entry.view for _, entry in wave if entry.view is not None],
        )
        fused = _fused_steps(optimizer, params[0], settings)
        values: dict[str, Any] = {"lr": group["lr"], "settings": settings, "control": control}
        if fused is None or not fused.step(*lists, **values, maximize=group["maximize"]):
            muon_(*lists, **values, maximize=group["maximize"])
    else:
        step_elements(params, gradients_of(params), states, route, group, control)


def step_elements(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    states: Sequence[dict[str, Tensor]],
    route: Route,
    group: dict[str, Any],
    control: StepControl,
) -> None:
    """Take a step of one of the Adam routes, on parameters of one group, device and dtype."""
    settings = group_settings(group)
    ratio = adam_lr_ratio(settings)
    adam_(
        params,
        grads,
        *([state[key] for state in states] for key in ("exp_avg", "exp_avg_sq", "step")),
        lr=group["lr"] if ratio == 1.0 else group["lr"] * ratio,
        betas=(settings.adam_beta1, settings.adam_beta2),
        weight_decay=settings.weight_decay if route == "adamw" else 0.0,
        control=control,
        maximize=group["maximize"],
    )


def _fused_steps(optimizer: HybridMuon, p: Tensor, settings: HybridMuonConfig) -> FusedSteps | None:
    """Return what steps the Muon route in few launches; None where torch's operations do it."""
    if not p.is_cuda or not settings.flash_muon or settings.deepmd_kit_arithmetic:
        return None
    if optimizer._fused is None and not unavailable():
        from deepmd_muon.optim.fused import FusedSteps

        optimizer._fused = FusedSteps()
    return optimizer._fused
