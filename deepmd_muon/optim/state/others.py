"""Read the states of other Muons: torch's, K. Jordan's, Moonlight's and dion's.

Their momenta follow one of two conventions, m ← β m + (1 − β) g as here, or m ← β m + g, which is
1/(1 − β) times larger. The keys of a parameter group identify the optimizer:

| group | momentum | as here | Adam's moments |
|---|---|---|---|
| torch.optim.Muon (2.13): ``adjust_lr_fn`` | ``momentum_buffer`` | yes | |
| K. Jordan: ``use_muon`` | ``momentum_buffer`` | yes | ``exp_avg``, ``exp_avg_sq``, ``step`` |
| K. Jordan, without AdamW: lr, weight_decay, momentum alone | ``momentum_buffer`` | yes | |
| Moonlight, and K. Jordan until 2024: ``ns_steps`` | ``momentum_buffer`` | no | ``moment1``, ``moment2``, ``step`` |
| dion: ``algorithm`` | ``momentum`` | no | ``momentum``, ``variance``; ``step`` in the group |
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
from deepmd_muon.optim.state.migrate import SavedParameter

_BARE = {"lr", "weight_decay", "momentum"}
_BESIDES = {"params", "param_names", "initial_lr"}


def is_another_muon(groups: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether groups are those of another Muon, possibly beside those of an AdamW."""
    kinds = [_kind(group) for group in groups]
    return None not in kinds and any(kind != "adam" for kind in kinds)


def _kind(group: Mapping[str, Any]) -> str | None:
    """Identify the optimizer of a parameter group by its keys; None for an unknown one."""
    keys = group.keys()
    for kind, needed in (("dion", "algorithm"), ("torch", "adjust_lr_fn"), ("jordan", "use_muon")):
        if needed in keys:
            return kind
    if "ns_steps" in keys:
        return "moonlight"
    if "betas" in keys:
        return "adam"
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
    count = sum(len(group["params"]) for each in state_dicts for group in each["param_groups"])
    given = None if names is None else list(names)
    if given is not None and len(given) != count:
        raise ForeignStateError(
            f"the state dicts list {count} parameters; found {len(given)} names"
        )
    groups: list[dict[str, Any]] = []
    state: dict[int, Mapping[str, Any]] = {}
    first = 0
    for each in state_dicts:
        for group in each["param_groups"]:
            last = first + len(group["params"])
            if given is None and "param_names" not in group:
                raise ForeignStateError("a state dict has no names of its parameters; give names=")
            named = list(group["param_names"]) if given is None else given[first:last]
            state |= {
                first + i: each["state"][key]
                for i, key in enumerate(group["params"])
                if key in each["state"]
            }
            groups.append({**group, "params": list(range(first, last)), "param_names": named})
            first = last
    return {"state": state, "param_groups": groups}


def read_another_muon(
    groups: Sequence[Mapping[str, Any]], state: Mapping[Any, Mapping[str, Any]], present: RouteTable
) -> dict[str, SavedParameter]:
    """Return the content of another Muon's state dict by parameter name; state keys are ours.

    Raises ForeignStateError when parameters have no names, or a group's algorithm has no
    counterpart here.
    """
    known = {entry.name: entry for entry in present}
    found: dict[str, SavedParameter] = {}
    for group in groups:
        if "param_names" not in group:
            raise ForeignStateError(
                "the state of another Muon has no names of its parameters, and its groups have "
                "other sizes than here; "
                "attach names with deepmd_muon.optim.import_state"
            )
        for name, key in zip(
            map(canonical_name, group["param_names"]), group["params"], strict=True
        ):
            values = _values(group, state.get(key, {}))
            entry = _entry(name, values, known.get(name))
            if entry is not None:
                found[name] = SavedParameter(entry, values if entry.route != "frozen" else {})
    return found


def _values(group: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return a parameter's state under our keys, with the momentum in our convention."""
    kind = _kind(group)
    if kind == "dion":
        if group["algorithm"] not in ("muon", "adamw"):
            raise ForeignStateError(
                f"a state of dion's {group['algorithm']!r} has no counterpart here"
            )
        if group["algorithm"] == "adamw":
            names = {"exp_avg": "momentum", "exp_avg_sq": "variance"}
            return _adam(
                {
                    **{ours: values[key] for ours, key in names.items() if key in values},
                    "step": group["step"],
                }
            )
        return (
            {"momentum_buffer": values["momentum"] * (1 - group["mu"])}
            if "momentum" in values
            else {}
        )
    if "momentum_buffer" in values:
        scale = 1 - group["momentum"] if kind == "moonlight" else None
        buffer = values["momentum_buffer"]
        return {"momentum_buffer": buffer if scale is None else buffer * scale}
    if "moment1" in values:
        return _adam(
            {"exp_avg": values["moment1"], "exp_avg_sq": values["moment2"], "step": values["step"]}
        )
    return _adam(values)


def _adam(values: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return Adam's state with the step as a tensor; {} if the parameter was never stepped."""
    if "exp_avg" not in values:
        return {}
    step = torch.tensor(float(values["step"]), device="cpu")
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
    view = matrix_view(shape, "slice") or MatrixView(
        1, shape[0] if shape else 1, math.prod(shape[1:])
    )
    return RouteEntry(name, shape, view, "muon", "inferred")
