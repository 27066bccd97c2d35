"""Read the states of other Muons: torch's, K. Jordan's, Moonlight's, dion's and their successors.

Their momenta follow one of two conventions, m ← β m + (1 − β) g as here, or m ← β m + g, which is
1/(1 − β) times larger. The keys of a parameter group identify the optimizer:

| group | momentum | as here | Adam's moments |
|---|---|---|---|
| torch.optim.Muon (2.13): ``adjust_lr_fn`` | ``momentum_buffer`` | yes | |
| K. Jordan: ``use_muon`` | ``momentum_buffer`` | yes | ``exp_avg``, ``exp_avg_sq``, ``step`` |
| K. Jordan, without AdamW: lr, weight_decay, momentum alone | ``momentum_buffer`` | yes | |
| Moonlight, early K. Jordan, pytorch_optimizer: ``ns_steps`` | ``momentum_buffer`` | no |
  ``moment1/2``; ``step``, also in the group |
| Motif: ``names`` | ``momentum_buffer`` | no | ``moment1/2``, ``step`` |
| dion, xtuner: ``algorithm`` | ``momentum`` | no | ``momentum``, ``variance``; ``step`` in the
  group |
| torch.optim.Adam, AdamW: ``betas`` | | | ``exp_avg``, ``exp_avg_sq``, ``step`` |
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from deepmd_muon.optim.errors import ForeignStateError
from deepmd_muon.optim.routing.routes import Route, RouteEntry, RouteTable, canonical_name
from deepmd_muon.optim.routing.views import MatrixView, matrix_view
from deepmd_muon.optim.rules.normuon import NorMuon
from deepmd_muon.optim.state.migrate import SavedParameter

# Optimizers by a key of their groups; the first that matches counts.
_KINDS = {
    "algorithm": "dion",
    "names": "moonlight",
    "adjust_lr_fn": "torch",
    "use_muon": "jordan",
    "ns_steps": "moonlight",
    "betas": "adam",
}
_BARE = {"lr", "weight_decay", "momentum"}
_BESIDES = {"params", "param_names", "initial_lr"}


def is_another_muon(groups: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether groups are those of another Muon, possibly beside those of an AdamW."""
    kinds = [_kind(group) for group in groups]
    return None not in kinds and any(kind != "adam" for kind in kinds)


def _kind(group: Mapping[str, Any]) -> str | None:
    """Identify the optimizer of a parameter group by its keys; None for an unknown one."""
    keys = group.keys()
    for needed, kind in _KINDS.items():
        if needed in keys:
            return kind
    return "jordan" if keys - _BESIDES == _BARE else None


def import_state(
    *state_dicts: Mapping[str, Any], names: Iterable[str] | None = None
) -> dict[str, Any]:
    """Join states of other optimizers of one model into one for `HybridMuon.load_state_dict`.

    Parameters
    ----------
    *state_dicts
        State dicts of torch.optim.Muon, Adam and AdamW, of K. Jordan's Muons, Moonlight's and
        dion's; e.g. those of a Muon and of the AdamW beside it.
    names
        Name of every parameter, in the order of the state dicts and their groups; None if all have
        ``param_names``.

    Returns
    -------
    dict
        The joined state dict; it shares the tensors of the given ones.

    Raises
    ------
    ForeignStateError
        When names are missing, or the number of names differs from the number of parameters.
    """
    all_groups = [group for state_dict in state_dicts for group in state_dict["param_groups"]]
    count = sum(len(group["params"]) for group in all_groups)
    all_names = None if names is None else list(names)
    if all_names is not None and len(all_names) != count:
        raise ForeignStateError(
            f"the state dicts list {count} parameters; found {len(all_names)} names"
        )
    groups: list[dict[str, Any]] = []
    state: dict[int, Mapping[str, Any]] = {}
    start = 0  # number of the group's first parameter
    for state_dict in state_dicts:
        for group in state_dict["param_groups"]:
            stop = start + len(group["params"])
            if all_names is not None:
                group_names = all_names[start:stop]
            elif "param_names" in group or "names" in group:
                group_names = _names_of(group)
            else:
                raise ForeignStateError("a state dict has no names of its parameters; give names=")
            numbers = list(range(start, stop))
            for number, key in zip(numbers, group["params"], strict=True):
                if key in state_dict["state"]:
                    state[number] = state_dict["state"][key]
            groups.append({**group, "params": numbers, "param_names": group_names})
            start = stop
    return {"state": state, "param_groups": groups}


def read_another_muon(
    groups: Sequence[Mapping[str, Any]], state: Mapping[Any, Mapping[str, Any]], present: RouteTable
) -> dict[str, SavedParameter]:
    """Return the content of another Muon's state dict by parameter name; state keys are ours.

    Raises ForeignStateError when parameters have no names, or a group's algorithm has no
    counterpart here.
    """
    present_entries = {entry.name: entry for entry in present}
    parameters: dict[str, SavedParameter] = {}
    for group in groups:
        if not {"param_names", "names"} & group.keys():
            raise ForeignStateError(
                "the state of another Muon has no names of its parameters, and its groups have "
                "other sizes than here; attach names with deepmd_muon.optim.import_state"
            )
        names = map(canonical_name, _names_of(group))
        for name, key in zip(names, group["params"], strict=True):
            values = _values(group, state.get(key, {}))
            entry = _entry(name, values, present_entries.get(name))
            if entry is not None:
                parameters[name] = SavedParameter(entry, values if entry.route != "frozen" else {})
    return parameters


def _names_of(group: Mapping[str, Any]) -> list[str]:
    """Return the names of a group's parameters, which Motif's Muon stores under another key."""
    return list(group["param_names"] if "param_names" in group else group["names"])


def _values(group: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return a parameter's state under our keys, with the momentum in our convention."""
    kind = _kind(group)
    if kind == "dion":
        return _values_of_dion(group, values)
    if "momentum_buffer" in values:
        buffer = values["momentum_buffer"]
        if kind == "moonlight":
            buffer = buffer * (1 - group["momentum"])
        return {"momentum_buffer": buffer}
    if "moment1" in values:
        moments = {"exp_avg": values["moment1"], "exp_avg_sq": values["moment2"]}
        return _adam(group, {**values, **moments})
    return _adam(group, values)


def _values_of_dion(group: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Tensor]:
    if group["algorithm"] == "adamw":
        names = {"momentum": "exp_avg", "variance": "exp_avg_sq"}
        moments = {names[key]: value for key, value in values.items() if key in names}
        return _adam(group, moments)
    if group["algorithm"] not in ("muon", "normuon"):
        raise ForeignStateError(f"a state of dion's {group['algorithm']!r} has no counterpart here")
    if "momentum" not in values:
        return {}
    state = {"momentum_buffer": values["momentum"] * (1 - group["mu"])}
    if "variance_neuron" in values:
        state[NorMuon(neurons="rows").key] = values["variance_neuron"]
    return state


def _adam(group: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return Adam's state with the step as a tensor; {} if the parameter was never stepped.

    Raises ForeignStateError if neither the parameter nor its group has counted steps.
    """
    if "exp_avg" not in values:
        return {}
    count = values.get("step", group.get("step"))
    if count is None:
        raise ForeignStateError(
            "a state of AdamW has moments and no number of steps: add 'step' to its group"
        )
    step = torch.tensor(float(count), device="cpu")
    return {"step": step, "exp_avg": values["exp_avg"], "exp_avg_sq": values["exp_avg_sq"]}


def _entry(name: str, values: dict[str, Tensor], present: RouteEntry | None) -> RouteEntry | None:
    """Infer a parameter's route and view from its state.

    Return the present ones if it was never stepped.
    """
    if not values:
        return present
    if "momentum_buffer" not in values:
        # Adam and AdamW have the same state; take the present route.
        route: Route = "adam" if present is not None and present.route == "adam" else "adamw"
        return RouteEntry(name, tuple(values["exp_avg"].shape), None, route, "inferred")
    shape = tuple(values["momentum_buffer"].shape)
    if present is not None and math.prod(present.shape) == math.prod(shape):
        # Moonlight's momentum of a kernel has two dimensions; a momentum does not depend on the
        # view.
        values["momentum_buffer"] = values["momentum_buffer"].reshape(present.shape)
        shape = present.shape
        if present.route == "muon":
            return present
    rows = shape[0] if shape else 1
    view = matrix_view(shape, "slice") or MatrixView(1, rows, math.prod(shape[1:]))
    return RouteEntry(name, shape, view, "muon", "inferred")
