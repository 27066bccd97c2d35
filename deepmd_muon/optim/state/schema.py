"""The state tensors of each route: one table of their extent, dtype and initial value.

All code that creates, loads, checks or offloads state reads this table.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from deepmd_muon.optim.routing.rules import Route, RouteEntry
from deepmd_muon.optim.update.adam import moment_dtype
from deepmd_muon.optim.update.magma import SCORE_START

# An optimizer's state: by parameter, then by key.
State = dict[Tensor, dict[str, Any]]


@dataclasses.dataclass(frozen=True)
class StateTensor:
    """One state tensor of a parameter.

    Attributes
    ----------
    extent
        'parameter': the parameter's shape and layout; 'blocks': one number per matrix; 'scalar': one number.
    dtype
        'parameter': the parameter's; 'moment': the wider of float32 and the parameter's; 'float32'.
    start
        Value of every element before the first step.
    """

    extent: Literal["parameter", "blocks", "scalar"]
    dtype: Literal["parameter", "moment", "float32"]
    start: float = 0.0

    def dtype_for(self, parameter: torch.dtype) -> torch.dtype:
        """Return the dtype of this tensor for a parameter of the given dtype."""
        if self.dtype == "float32":
            return torch.float32
        return parameter if self.dtype == "parameter" else moment_dtype(parameter)


_MUON = {
    "momentum_buffer": StateTensor("parameter", "parameter"),
    "magma_score": StateTensor("blocks", "float32", SCORE_START),  # only where Magma is on
}
_ADAM = {
    "step": StateTensor("scalar", "float32"),
    "exp_avg": StateTensor("parameter", "moment"),
    "exp_avg_sq": StateTensor("parameter", "moment"),
}
STATE_OF_ROUTE: dict[Route, Mapping[str, StateTensor]] = {"muon": _MUON, "adam": _ADAM, "adamw": _ADAM}
STATE_TENSORS: dict[str, StateTensor] = {**_MUON, **_ADAM}

# State tensors shaped like their parameter: by route, and all of them. These are the ones that can be offloaded.
MOMENTS: dict[Route, tuple[str, ...]] = {
    route: tuple(key for key, tensor in tensors.items() if tensor.extent == "parameter")
    for route, tensors in STATE_OF_ROUTE.items()
}
ALL_MOMENTS = tuple(dict.fromkeys(key for keys in MOMENTS.values() for key in keys))


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
        shape = (self.entry.view.blocks,) if tensor.extent == "blocks" and self.entry.view else ()
        return torch.full(shape, tensor.start, dtype=dtype, device=self.p.device)


def complete_state(state: dict[str, Any], holder: StateFactory, *, damped: bool) -> dict[str, Any]:
    """Create the missing tensors of one parameter's state, and return it.

    Parameters
    ----------
    state
        Of one parameter; existing tensors stay.
    holder
        Creates the tensors.
    damped
        Whether Magma is on and needs scores.
    """
    for key, tensor in STATE_OF_ROUTE[holder.entry.route].items():
        if key not in state and (damped or key != "magma_score"):
            state[key] = holder.full(tensor)
    return state
