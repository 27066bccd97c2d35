"""Read a state dict of any optimizer that HybridMuon understands: its parameters by name.

| groups have | written by | read by |
|---|---|---|
| `routes` | this package | `_read_own` |
| `adam_betas`, `lr_adjust` … | deepmd-kit's HybridMuon | `read_deepmd_kit` |
| the keys of another Muon | torch, K. Jordan, Moonlight, dion | `read_another_muon` |
| `betas` | torch.optim.Adam, AdamW | `_read_adam` |
"""

from __future__ import annotations

import dataclasses
import glob
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from deepmd_muon.optim.config import HybridMuonConfig
from deepmd_muon.optim.errors import ForeignStateError, InvalidSettingError
from deepmd_muon.optim.groups.group_settings import as_tuple, current_spelling, group_settings
from deepmd_muon.optim.groups.param_groups import Group
from deepmd_muon.optim.routing.modules import ATTENTION_SPLIT, is_computed_from
from deepmd_muon.optim.routing.routes import (
    ROUTES,
    Route,
    RouteEntry,
    RouteTable,
    RoutingRules,
    canonical_name,
    choose_route,
)
from deepmd_muon.optim.routing.views import matrix_view
from deepmd_muon.optim.rules.interface import MatrixRule
from deepmd_muon.optim.rules.registry import matrix_rules, unknown_rules
from deepmd_muon.optim.state.deepmd_kit import is_deepmd_kit, read_deepmd_kit
from deepmd_muon.optim.state.migrate import SavedParameter
from deepmd_muon.optim.state.others import is_another_muon, read_another_muon
from deepmd_muon.optim.state.schema import STATE_OF_ROUTE, known_tensors

# Powers of the decays, which our states hold for deepmd-kit's class only.
_POWERS = ("beta1_pow", "beta2_pow")


def read_state(state_dict: Mapping[str, Any], groups: Sequence[Group]) -> dict[str, SavedParameter]:
    """Return the parameters of a state dict by name; `groups` are the present ones.

    Raises
    ------
    ForeignStateError
        When it is no state dict of an optimizer, or one of an optimizer that is not understood.
    """
    saved_groups, state = _parts_of(state_dict)
    saved_groups = _with_names(saved_groups, groups)
    present = RouteTable([entry for group in groups for _, entry in group.routed])
    if all("routes" in group for group in saved_groups):
        saved = _read_own([current_spelling(group) for group in saved_groups], state, groups)
    elif is_deepmd_kit(saved_groups):
        muon_modes = [group.settings.muon_mode for group in groups for _ in group.routed]
        saved = read_deepmd_kit(saved_groups, state, present, muon_modes)
    elif is_another_muon(saved_groups):
        saved = read_another_muon(saved_groups, state, present)
    elif all({"betas", "param_names"} <= group.keys() for group in saved_groups):
        saved = _read_adam(saved_groups, state, present)
    else:
        keys = {key for values in state.values() for key in values}
        kind = "another optimizer"
        if "exp_avg" in keys:
            kind = "Adam or AdamW"
        elif "momentum_buffer" in keys:
            kind = "SGD with momentum"
        raise ForeignStateError(
            f"the optimizer state looks like that of {kind} and cannot be loaded: it has no list "
            "of routes. Adam's state loads if it has names of parameters, or as many parameters in "
            "every group as this optimizer"
        )
    return {name: _with_tensors(parameter) for name, parameter in saved.items()}


def _parts_of(
    state_dict: Mapping[str, Any],
) -> tuple[Sequence[Mapping[str, Any]], Mapping[Any, dict[str, Any]]]:
    """Return the groups and the state of a state dict.

    Raise ForeignStateError if it has neither.
    """
    if not {"param_groups", "state"} <= state_dict.keys():
        message = (
            "not an optimizer state dict: it must hold 'state' and 'param_groups'; found keys "
            f"{list(state_dict)[:5]}"
        )
        if any(isinstance(key, str) and key.startswith("state.") for key in state_dict):
            message += (
                "; torch flattened it (flatten_optimizer_state_dict): load it by "
                "set_optimizer_state_dict"
            )
        raise ForeignStateError(message)
    groups = state_dict["param_groups"]
    state = state_dict["state"]
    well_formed = isinstance(state, Mapping) and all(
        isinstance(group, Mapping) and "params" in group for group in groups
    )
    if not well_formed:
        raise ForeignStateError(
            "damaged optimizer state dict: 'state' must be a dictionary and every parameter group "
            f"must list its 'params'; found a {type(state).__name__} and groups with keys "
            f"{[list(group)[:5] for group in groups]}"
        )
    return groups, state


def _with_names(
    saved_groups: Sequence[Mapping[str, Any]], groups: Sequence[Group]
) -> Sequence[Mapping[str, Any]]:
    """Return saved groups with the present names, in order, if either side has no names.

    torch's optimizers load by position, too. Here, all groups must have as many parameters as the
    present ones.
    """
    named = all("param_names" in group for group in saved_groups) and all(
        "param_names" in group.values for group in groups
    )
    by_number = all(isinstance(key, int) for group in saved_groups for key in group["params"])
    saved_sizes = [len(group["params"]) for group in saved_groups]
    if named or not by_number or saved_sizes != [len(group.routed) for group in groups]:
        return saved_groups
    return [
        {**saved, "param_names": [entry.name for _, entry in group.routed]}
        for saved, group in zip(saved_groups, groups, strict=True)
    ]


def _with_tensors(saved: SavedParameter) -> SavedParameter:
    """Turn plain numbers, as which old versions of torch count steps, into tensors."""
    tensors = known_tensors()
    numbers = {
        key: torch.tensor(float(value), device="cpu")
        for key, value in saved.values.items()
        if isinstance(value, (int, float)) and key in tensors and tensors[key].extent == "scalar"
    }
    return dataclasses.replace(saved, values={**saved.values, **numbers}) if numbers else saved


def _read_own(
    saved_groups: Sequence[Mapping[str, Any]],
    state: Mapping[Any, dict[str, Any]],
    groups: Sequence[Group],
) -> dict[str, SavedParameter]:
    """Read a state dict of this package.

    Its keys of parameters are numbers, or names if torch.distributed wrote it.
    """
    present = {entry.name: (entry, group) for group in groups for _, entry in group.routed}
    saved_groups = [_with_shapes(group, present) for group in saved_groups]
    table = RouteTable.from_groups(saved_groups)
    keys = _keys_by_name(saved_groups, table)
    parameters = {}
    entries = iter(table)
    for group in saved_groups:
        rules = _saved_rules(group)
        for entry in itertools.islice(entries, len(group["routes"])):
            values = state.get(keys[entry.name], {})
            # set_optimizer_state_dict passes {} for a key that a flattened state lacks.
            missing = {key for key, value in values.items() if isinstance(value, dict)}
            parameters[entry.name] = SavedParameter(
                entry=entry,
                values={
                    key: value
                    for key, value in values.items()
                    if key not in missing and key not in _POWERS
                },
                explained=_explained_by_build(entry, group, present.get(entry.name)),
                left_out=bool(missing) and entry.route != "frozen",
                rules=rules,
            )
    return parameters


def _with_shapes(
    group: Mapping[str, Any], present: Mapping[str, tuple[RouteEntry, Group]]
) -> Mapping[str, Any]:
    """Complete routes of an earlier version from which torch has dropped shapes and views.

    torch.distributed.checkpoint loads only the keys that today's groups have. Shapes and views of
    the state are then those of the present parameters.
    """
    routes = list(group["routes"])
    names = map(canonical_name, group.get("param_names", ()))
    for i, (name, route) in enumerate(zip(names, routes, strict=False)):
        if route in ROUTES and name in present:
            entry = present[name][0]
            view = entry.view or matrix_view(entry.shape, "slice")
            saved = dataclasses.replace(entry, route=route, view=view if route == "muon" else None)
            routes[i] = saved.text
    return {**group, "routes": routes}


def _keys_by_name(
    saved_groups: Sequence[Mapping[str, Any]], table: RouteTable
) -> dict[str, int | str]:
    """Return the key of each parameter in the state."""
    keys = [key for group in saved_groups for key in group["params"]]
    by_name: dict[str, int | str] = {
        canonical_name(key): key for key in keys if isinstance(key, str)
    }
    if {entry.name for entry in table} <= by_name.keys():
        return by_name
    if len(keys) != len(table):
        raise ForeignStateError(
            f"the state dict lists {len(keys)} parameters but routes {len(table)} of them: it is "
            "damaged"
        )
    return {entry.name: key for entry, key in zip(table, keys, strict=True)}


def _saved_rules(group: Mapping[str, Any]) -> tuple[MatrixRule, ...]:
    """Return the known rules that were on in a saved group; none if its settings are invalid."""
    if "nesterov" not in group:  # the settings are unknown, as in `replaced.move_state`
        return ()
    names = [name for name in group.get("rules", ()) if not unknown_rules([name])]
    try:
        return matrix_rules(group_settings({**vars(HybridMuonConfig()), **group, "rules": names}))
    except InvalidSettingError:
        return ()


def _explained_by_build(
    saved: RouteEntry, group: Mapping[str, Any], present: tuple[RouteEntry, Group] | None
) -> bool:
    """Return whether the version that saved a parameter explains its route.

    `build` finds more in modules today. Versions without `conv_patterns` found no kernels. Later
    ones found no kernels and tables that modules compute from this parameter (`weights_of`), and
    did not split q, k and v of attention modules.
    """
    if present is None:
        return False
    rules = RoutingRules.of(present[1].settings)
    attention_split = f"{glob.escape(saved.name)}: {ATTENTION_SPLIT}"
    if attention_split in rules.splits and attention_split not in _patterns(group, "splits"):
        other_splits = tuple(split for split in rules.splits if split != attention_split)
        return _routes_alike(saved, dataclasses.replace(rules, splits=other_splits))
    if is_computed_from(saved.name):
        return any(
            glob.escape(saved.name) in {*getattr(rules, key)} - {*_patterns(group, key)}
            for key in ("conv_patterns", "adamw_patterns")
        )
    if "conv_patterns" in group or _routes_alike(saved, dataclasses.replace(rules, splits=())):
        return False
    return _routes_alike(saved, dataclasses.replace(rules, conv_patterns=(), splits=()))


def _patterns(group: Mapping[str, Any], key: str) -> tuple[str, ...]:
    return as_tuple(group.get(key)) or ()


def _routes_alike(saved: RouteEntry, rules: RoutingRules) -> bool:
    """Return whether these rules give a parameter its saved route and view."""
    return choose_route(saved.name, saved.shape, rules).placement == saved.placement


def _read_adam(
    saved_groups: Sequence[Mapping[str, Any]],
    state: Mapping[Any, Mapping[str, Any]],
    present: RouteTable,
) -> dict[str, SavedParameter]:
    """Read a state dict of torch's Adam or AdamW; all its parameters have that route."""
    present_entries = {entry.name: entry for entry in present}
    parameters = {}
    for group in saved_groups:
        route: Route = "adamw" if group.get("decoupled_weight_decay") else "adam"
        names = map(canonical_name, group["param_names"])
        for name, key in zip(names, group["params"], strict=True):
            values = {
                state_key: value
                for state_key, value in state.get(key, {}).items()
                if state_key in STATE_OF_ROUTE[route]
            }
            if isinstance(values.get("exp_avg"), Tensor):
                shape = tuple(values["exp_avg"].shape)
                entry = RouteEntry(name, shape, None, route, "recorded")
                parameters[name] = SavedParameter(entry, values)
            elif name in present_entries:  # never stepped: there is nothing to compare
                parameters[name] = SavedParameter(present_entries[name], {})
    return parameters
