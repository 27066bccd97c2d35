"""The state tensors of each route: a table of extent, dtype and initial value.

All code that creates, loads, checks or offloads state reads this table.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from deepmd_muon.optim.dtensors import full_tensor, spec_of
from deepmd_muon.optim.groups.param_groups import Group
from deepmd_muon.optim.routing.routes import Route, RouteEntry
from deepmd_muon.optim.rules.interface import Extent, MatrixRule, StateTensor
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
# State tensors of each route; on the Muon route, rules may add others.
STATE_OF_ROUTE: dict[Route, Mapping[str, StateTensor]] = {
    "muon": _MUON,
    "adam": _ADAM,
    "adamw": _ADAM,
}

# State tensors shaped like their parameter; only these can be offloaded.
ALL_MOMENTS = ("momentum_buffer", "exp_avg", "exp_avg_sq", MASTER)


def state_tensors(
    route: Route, rules: Iterable[MatrixRule], dtype: torch.dtype | None = None
) -> dict[str, StateTensor]:
    """Return the state tensors of a parameter of this route, with those of its group's rules.

    Only 16-bit parameters have master weights; outside of the Muon route, rules have no other
    state. A `dtype` of None includes master weights.
    """
    of_rules = {
        key: tensor
        for key, tensor in tensors_of(rules).items()
        if (dtype is None or dtype in NARROW if key == MASTER else route == "muon")
    }
    return {**STATE_OF_ROUTE[route], **of_rules}


def known_tensors() -> dict[str, StateTensor]:
    """Return the state tensors of all routes and of all known rules."""
    return {**_MUON, **tensors_of(known_rules()), **_ADAM}


@dataclasses.dataclass(frozen=True)
class StateHolder:
    """Creates and lays out the state of one parameter.

    This class is for parameters that only this process holds.
    """

    p: Tensor
    entry: RouteEntry

    def gradient(self) -> Tensor | None:
        """Return the gradient of the elements whose moments are on this rank."""
        return self.p.grad

    def full(self, tensor: StateTensor) -> Tensor:
        """Return a new state tensor, filled with its initial value."""
        dtype = tensor.dtype_for(self.p.dtype)
        if tensor.extent == "parameter":
            return torch.zeros_like(self.p, dtype=dtype, memory_format=torch.preserve_format)
        assert tensor.extent == "scalar" or self.entry.view is not None
        shape = tensor.shape_for(self.entry.shape, self.entry.view)
        return torch.full(shape, tensor.start, dtype=dtype, device=self.p.device)

    def complete(self, state: dict[str, Any], rules: Iterable[MatrixRule]) -> dict[str, Any]:
        """Create the missing tensors of the parameter's state, including those of rules."""
        for key, tensor in state_tensors(self.entry.route, rules, self.p.dtype).items():
            if key not in state:
                state[key] = self.full(tensor)
        return state

    def of(self, value: Tensor, extent: Extent) -> Tensor:
        """Convert a state tensor from any layout to the layout of this parameter's state."""
        return value if spec_of(self.p) is not None else full_tensor(value)

    def place(self, key: str, value: Tensor, *, offloaded: bool) -> Tensor:
        """Copy a saved state tensor to its device, in the dtype and layout of the state.

        All ranks must call this together, because a tensor in another layout needs collectives. The
        layout of a DTensor parameter's state is checked before the step, not here.
        """
        tensor = known_tensors()[key]
        device = self.p.device
        dtype = tensor.dtype_for(self.p.dtype)
        if tensor.extent != "scalar":
            value = self.of(value, tensor.extent)
        if tensor.extent == "parameter":
            device = torch.device("cpu") if offloaded else device
            if spec_of(value) is None:
                # With the parameter's strides, like newly initialised state.
                return torch.empty_like(
                    self.p, dtype=dtype, device=device, requires_grad=False
                ).copy_(value.detach())
        value = value.detach().to(device, dtype, copy=True)
        return value.view(()) if tensor.extent == "scalar" else value

    def cut(self, key: str, whole: Tensor, *, offloaded: bool) -> Tensor:
        """Place a tensor that every rank has whole, as `place` does but without communication."""
        return self.place(key, whole, offloaded=offloaded)


def complete_rules(
    state: State, groups: Iterable[Group], holders: Mapping[Tensor, StateHolder]
) -> None:
    """Create the missing tensors of rules for parameters with a momentum, for a checkpoint.

    Master weights are created by a step; before it, they would equal the parameter. `holders` are
    those of the parameters that live on several ranks.
    """
    for group in groups:
        rules = matrix_rules(group.settings)
        keys = tensors_of(rules).keys() - {MASTER}
        for p, entry in group.routed:
            if (
                "momentum_buffer" in state.get(p, {})
                and entry.route == "muon"
                and not keys <= state[p].keys()
            ):
                holders.get(p, StateHolder(p, entry)).complete(state[p], rules)
