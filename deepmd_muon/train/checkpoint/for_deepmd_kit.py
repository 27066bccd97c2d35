"""The optimizer's state as deepmd-kit's trainer expects it in a checkpoint, so that its `--restart` continues ours."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from deepmd_muon.checkpoint_file.errors import CheckpointError
from deepmd_muon.model import EnergyModel
from deepmd_muon.model.branches import Branches
from deepmd_muon.model.deepmd_kit import deepmd_kit_parameter_names
from deepmd_muon.optim.routing.rules import canonical_name

# The routing manifest's entry of a parameter without elements, which only deepmd-kit's models have.
_EMPTY = {"routes": "frozen", "views": "", "shapes": "0"}


def parameter_order(model: EnergyModel | Branches) -> Sequence[str]:
    """Return the parameters of deepmd-kit's model in its order; none where it has no such model."""
    try:
        return deepmd_kit_parameter_names(model)
    except CheckpointError:
        return ()


def in_deepmd_kits_order(state_dict: Mapping[str, Any], order: Sequence[str]) -> dict[str, Any]:
    """Return an optimizer's state dict that deepmd-kit's optimizer of the same kind loads by position.

    It lists the parameters of deepmd-kit's model (`parameter_order`), empty ones included, and Adam's state beside
    HybridMuon's carries the powers of the decays from which deepmd-kit corrects its bias. This package reads by name
    and ignores both. State of several groups, or without names, comes back as it is.
    """
    groups, state = state_dict["param_groups"], state_dict["state"]
    names = [canonical_name(name) for name in groups[0].get("param_names", ())]
    if len(groups) != 1 or not names or not set(names) <= set(order):
        return dict(state_dict)
    (group,) = groups
    place = {name: index for index, name in enumerate(names)}
    lists: dict[str, list[Any]] = {"params": list(range(len(order))), "param_names": list(order)}
    for key, empty in _EMPTY.items():
        if key in group:
            lists[key] = [group[key][place[name]] if name in place else empty for name in order]
    keys = {index: group["params"][place[name]] for index, name in enumerate(order) if name in place}
    moved = {index: _with_powers(state[key], group) for index, key in keys.items() if key in state}
    return {**state_dict, "state": moved, "param_groups": [{**group, **lists}]}


def in_own_order(state_dict: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """Undo `in_deepmd_kits_order` for an optimizer of these parameters; the keys of the state stay."""
    groups = []
    for group in state_dict["param_groups"]:
        place = {canonical_name(name): index for index, name in enumerate(group["param_names"])}
        kept = [place[name] for name in names if name in place]
        lists = {key: [group[key][i] for i in kept] for key in ("params", "param_names", *_EMPTY) if key in group}
        groups.append({**group, **lists})
    state = {
        key: {what: x for what, x in values.items() if not what.endswith("_pow")}
        for key, values in state_dict["state"].items()
    }
    return {**state_dict, "state": state, "param_groups": groups}


def _with_powers(values: Mapping[str, Any], group: Mapping[str, Any]) -> dict[str, Any]:
    """Add the powers of both decays to the Adam state of HybridMuon."""
    if "step" not in values or "adam_betas" not in group:
        return dict(values)
    steps = float(values["step"])
    return {**values, **{f"beta{i}_pow": beta**steps for i, beta in enumerate(group["adam_betas"], start=1)}}
