"""What a step works on: parameters by route, device and dtype, remembered while they stay the same."""

from __future__ import annotations

from collections.abc import Sequence
from operator import is_
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor

from deepmd_muon.optim.gradients import waves
from deepmd_muon.optim.routing import RouteEntry
from deepmd_muon.optim.state import state_of

if TYPE_CHECKING:
    from deepmd_muon.optim.hybrid_muon import HybridMuon


class Wave(NamedTuple):
    """Parameters of one group, route, device and dtype that are stepped together, and their state."""

    members: list[tuple[Tensor, RouteEntry]]
    states: list[dict[str, Tensor]]


class GroupWork:
    """The waves of one parameter group, and what they depend on."""

    def __init__(
        self, optimizer: HybridMuon, group: dict[str, Any], members: Sequence[tuple[Tensor, RouteEntry]]
    ) -> None:
        self._key = _key(optimizer, group)
        self._params = [p for p, _ in members]
        self.waves: list[Wave] = []
        for route in ("muon", "adam", "adamw"):
            taken = [(p, entry) for p, entry in members if entry.route == route]
            for wave in waves(taken, optimizer.workspace if group["foreach"] is not False else 0):
                states = [state_of(optimizer, p, entry, damped=group["magma_muon"]) for p, entry in wave]
                self.waves.append(Wave(wave, states))
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
