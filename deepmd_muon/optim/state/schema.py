"""The state tensors of each route: one table of their extent, dtype and initial value, and the rules' beside it.

All code that creates, loads, checks or offloads state reads this table.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from deepmd_muon.optim.routing.param_groups import Group
from deepmd_muon.optim.routing.rules import Route, RouteEntry
from deepmd_muon.optim.rules.interface import MatrixRule, StateTensor
from deepmd_muon.optim.rules.master_weights import MASTER, NARROW
from deepmd_muon.optim.rules.registry import known_rules, matrix_rules, tensors_of

# An optimizer's state: by parameter, then by key.
State = dict[Tensor, dict[str, Any]]

_MUON = {"momentum_buffer": StateTensor("parameter", "parameter")}
_ADAM = {
    "step": StateTensor("scalar", "float32"),
    "exp_avg": StateTensor("parameter", "moment"),
    "exp_avg_sq": StateTensor("parameter", "moment"),
}
# What a route keeps by itself; on the Muon route, rules may add tensors.
STATE_OF_ROUTE: dict[Route, Mapping[str, StateTensor]] = {"muon": _MUON, "adam": _ADAM, "adamw": _ADAM}

# State tensors shaped like their parameter: by route, and all of them. These are the ones that can be offloaded.
MOMENTS: dict[Route, tuple[str, ...]] = {
    route: tuple(key for key, tensor in tensors.items() if tensor.extent == "parameter")
    for route, tensors in STATE_OF_ROUTE.items()
}
ALL_MOMENTS = (*dict.fromkeys(key for keys in MOMENTS.values() for key in keys), MASTER)


def state_tensors(
    route: Route, rules: Iterable[MatrixRule], dtype: torch.dtype | None = None
) -> dict[str, StateTensor]:
    """Return the state tensors of a parameter of this route, with those of these rules.

    Parameters
    ----------
    route
        Outside of the Muon route, rules have no state but master weights.
    rules
        Of its group.
    dtype
        Of the parameter; master weights are those of 16-bit parameters. None for any.
    """
    of_rules = {
        key: tensor
        for key, tensor in tensors_of(rules).items()
        if (dtype is None or dtype in NARROW if key == MASTER else route == "muon")
    }
    return {**STATE_OF_ROUTE[route], **of_rules}


def moments_of(route: Route, rules: Iterable[MatrixRule], dtype: torch.dtype) -> tuple[str, ...]:
    """Return the keys of the state tensors shaped like their parameter."""
    return tuple(key for key, x in state_tensors(route, rules, dtype).items() if x.extent == "parameter")


def known_tensors() -> dict[str, StateTensor]:
    """Return the state tensors of all routes and all rules that are known."""
    return {**_MUON, **tensors_of(known_rules()), **_ADAM}


class StateFactory(Protocol):
    """Creates state tensors with the device and layout of one parameter's state."""

    @property
    def entry(self) -> RouteEntry:
        """The parameter's route."""

    @property
    def dtype(self) -> torch.dtype:
        """The parameter's dtype."""

    def full(self, tensor: StateTensor) -> Tensor:
        """Return a new state tensor, filled with its initial value."""


@dataclasses.dataclass(frozen=True)
class LocalStateFactory:
    """Creates the state of a parameter that only this process holds."""

    p: Tensor
    entry: RouteEntry

    @property
    def dtype(self) -> torch.dtype:
        """The parameter's dtype."""
        return self.p.dtype

    def full(self, tensor: StateTensor) -> Tensor:
        """Return a new state tensor, filled with its initial value."""
        dtype = tensor.dtype_for(self.p.dtype)
        if tensor.extent == "parameter":
            return torch.zeros_like(self.p, dtype=dtype, memory_format=torch.preserve_format)
        assert tensor.extent == "scalar" or self.entry.view is not None
        shape = tensor.shape_for(self.entry.shape, self.entry.view)
        return torch.full(shape, tensor.start, dtype=dtype, device=self.p.device)


def complete_rules(state: State, groups: Iterable[Group], holder_of: Callable[[Tensor], StateFactory | None]) -> None:
    """Create the missing tensors of rules where a parameter has a momentum, so that a file lacks none of them.

    Master weights are created by a step: before, they say nothing that the parameter does not.
    """
    for group in groups:
        rules = matrix_rules(group.settings)
        keys = tensors_of(rules).keys() - {MASTER}
        for p, entry in group.routed:
            if "momentum_buffer" in state.get(p, {}) and entry.route == "muon" and not keys <= state[p].keys():
                complete_state(state[p], holder_of(p) or LocalStateFactory(p, entry), rules)


def complete_state(state: dict[str, Any], holder: StateFactory, rules: Iterable[MatrixRule] = ()) -> dict[str, Any]:
    """Create the missing tensors of one parameter's state, and return it.

    Parameters
    ----------
    state
        Of one parameter; existing tensors stay.
    holder
        Creates the tensors.
    rules
        The rules of its group.
    """
    for key, tensor in state_tensors(holder.entry.route, rules, holder.dtype).items():
        if key not in state:
            state[key] = holder.full(tensor)
    return state
