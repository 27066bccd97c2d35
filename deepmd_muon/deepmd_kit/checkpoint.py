"""Convert optimizer states of deepmd-kit's trainers, at any `zero_stage`, for HybridMuon.

A state dict lists its parameters by number (`zero_stage` 0 and 1) or by name (2 and 3, by
torch.distributed). Our class writes names and routes into its groups; deepmd-kit's own class writes
neither.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

from deepmd_muon.optim import HybridMuon, name_deepmd_kit_state
from deepmd_muon.optim.routing.routes import canonical_name, current_routes

# The lists of a group with one entry per parameter.
PER_PARAMETER = ("params", "param_names", "routes")


def with_names(state_dict: Mapping[str, Any], names: Sequence[str], step: int) -> dict[str, Any]:
    """Return a state dict, deepmd-kit's or ours, whose groups name their parameters.

    Parameters without names get the present `names`, in the trainer's order. If a state of
    deepmd-kit's class does not contain the number of steps taken, the bias correction uses `step`.
    """
    groups = state_dict["param_groups"]
    if all("param_names" in group for group in groups):
        return dict(state_dict)
    if all(isinstance(key, str) for group in groups for key in group["params"]):
        names = [key for group in groups for key in group["params"]]
    return name_deepmd_kit_state(state_dict, names, step)


def of_parameters(state_dict: Mapping[str, Any], names: Collection[str]) -> dict[str, Any]:
    """Return the part of a state dict with names that belongs to the parameters of these names."""
    canonical_names = {canonical_name(name) for name in names}
    groups = []
    state = {}
    for group in map(current_routes, state_dict["param_groups"]):
        positions = [
            i
            for i, name in enumerate(group["param_names"])
            if canonical_name(name) in canonical_names
        ]
        own_group = dict(group)
        for key in PER_PARAMETER:
            if key in group:
                own_group[key] = [group[key][i] for i in positions]
        groups.append(own_group)
        for key in own_group["params"]:
            if key in state_dict["state"]:
                state[key] = state_dict["state"][key]
    return {"state": state, "param_groups": groups}


def laid_out(state_dict: Mapping[str, Any], optimizer: HybridMuon) -> dict[str, Any]:
    """Shard the tensors of a state dict with names like the optimizer's own state.

    Every rank has the same whole tensors, so this needs no communication. The optimizer's
    parameters are DTensors or plain tensors.
    """
    fresh_state = optimizer.fresh_state()
    parameters: dict[str, Tensor] = {}
    for group in optimizer.param_groups:
        for name, p in zip(group["param_names"], group["params"], strict=True):
            parameters[canonical_name(name)] = p
    state = dict(state_dict["state"])
    for group in state_dict["param_groups"]:
        for key, saved_name in zip(group["params"], group["param_names"], strict=True):
            name = canonical_name(saved_name)
            if name not in parameters:
                continue
            patterns = fresh_state.get(name, {})
            state[key] = {
                kind: _shard_like(patterns.get(kind, parameters[name]), value)
                for kind, value in state.get(key, {}).items()
            }
    return {**state_dict, "state": state}


def _shard_like(pattern: Any, value: Any) -> Any:
    """Shard a tensor like a DTensor of its shape; return anything else as it is."""
    if not isinstance(value, Tensor) or not isinstance(pattern, DTensor):
        return value
    if value.shape != pattern.shape:
        return value
    return distribute_tensor(
        value.to(pattern.device), pattern.device_mesh, pattern.placements, src_data_rank=None
    )
