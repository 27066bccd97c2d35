"""Read states of deepmd-kit's HybridMuon, up to 3.2.0, which hold neither names nor routes.

The route follows from a state's keys (``momentum_buffer``: Muon; ``exp_avg``: Adam or AdamW), the
view from the settings in its group. The first version had no `muon_mode`: it routed by the raw
number of dimensions, without names, and flattened a tensor to (first dimension, all others).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from deepmd_muon.optim.config import MuonMode
from deepmd_muon.optim.errors import ForeignStateError
from deepmd_muon.optim.routing.routes import (
    Route,
    RouteEntry,
    RouteTable,
    RoutingRules,
    canonical_name,
    choose_route,
)
from deepmd_muon.optim.routing.views import MatrixView, Shape, matrix_view
from deepmd_muon.optim.state.migrate import SavedParameter

# Below this, the power of a decay no longer determines the number of steps, and 1 minus it is 1 in
# float64.
_LEAST_POWER = 1e-300


def is_deepmd_kit(groups: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether parameter groups are those of deepmd-kit's HybridMuon."""
    return all({"adam_betas", "lr_adjust", "lr_adjust_coeff"} <= group.keys() for group in groups)


def name_deepmd_kit_state(
    state_dict: Mapping[str, Any], names: Iterable[str], step: int | None = None
) -> dict[str, Any]:
    """Attach names to a state dict of deepmd-kit's HybridMuon, so that it loads by name.

    This is needed if its parameters or their order differ from the present ones.

    Parameters
    ----------
    state_dict
        The key ``optimizer`` of a deepmd-kit checkpoint.
    names
        Name of every parameter of the state dict, in its order; wrapper prefixes do not matter.
    step
        Number of steps (``train_infos`` of the checkpoint), for the bias correction if the state no
        longer shows it.

    Returns
    -------
    dict
        A state dict for `HybridMuon.load_state_dict`; it shares the tensors of `state_dict`.

    Raises
    ------
    ForeignStateError
        When the number of names differs from the number of parameters.
    """
    names = list(names)
    count = sum(len(group["params"]) for group in state_dict["param_groups"])
    if count != len(names):
        raise ForeignStateError(
            f"the state dict lists {count} parameters; found {len(names)} names"
        )
    remaining_names = iter(names)
    groups = [
        {**group, "param_names": [next(remaining_names) for _ in group["params"]]}
        for group in state_dict["param_groups"]
    ]
    state = dict(state_dict["state"])
    if step is not None:
        state = {key: {**values, "steps_taken": step} for key, values in state.items()}
    return {"state": state, "param_groups": groups}


def read_deepmd_kit(
    groups: Sequence[Mapping[str, Any]],
    state: Mapping[Any, Mapping[str, Any]],
    present: RouteTable,
    muon_modes: Sequence[MuonMode],
) -> dict[str, SavedParameter]:
    """Read a state dict of deepmd-kit's HybridMuon; return it by parameter name, under our keys.

    Its keys are names of parameters; or numbers, in the order of ``param_names`` or, without these,
    in the present order. `muon_modes` has the present setting of each present parameter.

    Raises
    ------
    ForeignStateError
        When parameters can be matched neither by name nor by position.
    """
    names = _names(groups, present)
    present_entries = {entry.name: entry for entry in present}
    present_modes = {entry.name: mode for entry, mode in zip(present, muon_modes, strict=True)}
    parameters: dict[str, SavedParameter] = {}
    for group in groups:
        for key in group["params"]:
            name = names[key]
            values = state.get(key, {})
            if values:
                parameters[name] = _saved(
                    name, values, group, present_entries.get(name), present_modes.get(name)
                )
            elif name in present_entries:  # never stepped, so its route is unknown
                parameters[name] = SavedParameter(present_entries[name], {})
    return parameters


def _names(groups: Sequence[Mapping[str, Any]], present: RouteTable) -> dict[Any, str]:
    """Return the name of each key of the state dict."""
    keys = [key for group in groups for key in group["params"]]
    if all("param_names" in group for group in groups):
        return {
            key: canonical_name(name)
            for g in groups
            for key, name in zip(g["params"], g["param_names"], strict=True)
        }
    if all(isinstance(key, str) for key in keys):
        return {key: canonical_name(key) for key in keys}
    if len(keys) != len(present):
        raise ForeignStateError(
            f"the optimizer state of deepmd-kit lists {len(keys)} parameters without names, but "
            f"there are {len(present)}; attach names with deepmd_muon.optim.name_deepmd_kit_state"
        )
    return {key: entry.name for key, entry in zip(keys, present, strict=True)}


def _saved(
    name: str,
    values: Mapping[str, Any],
    group: Mapping[str, Any],
    present: RouteEntry | None,
    muon_mode: MuonMode | None,
) -> SavedParameter:
    """Infer one parameter's route and view, and translate its state."""
    if "momentum_buffer" in values:
        shape = tuple(values["momentum_buffer"].shape)
        mode = group.get("muon_mode")
        view = matrix_view(shape, mode) if mode else None
        if view is None:
            view = MatrixView(1, shape[0], math.prod(shape[1:]))
        entry = RouteEntry(name, shape, view, "muon", "inferred")
        translated: dict[str, Tensor] = {"momentum_buffer": values["momentum_buffer"]}
        if "magma_score" in values and values["magma_score"].numel() == view.blocks:
            translated["magma_score"] = values["magma_score"]
    else:
        shape = tuple(values["exp_avg"].shape)
        entry = RouteEntry(name, shape, None, _adam_route(name, shape, group), "inferred")
        translated = {
            "exp_avg": values["exp_avg"],
            "exp_avg_sq": values["exp_avg_sq"],
            "step": _steps(values, group),
        }
    explained = (
        present is not None
        and muon_mode is not None
        and _explained(entry, present, group, muon_mode)
    )
    return SavedParameter(entry, translated, explained)


def _saved_rules(group: Mapping[str, Any], muon_mode: MuonMode) -> RoutingRules:
    """Return today's rules with the settings of a saved group, all that deepmd-kit has for routes.

    The first version had `muon_2d_only` and `min_2d_dim`. The present `muon_mode` replaces the
    former only if it is today's default.
    """
    if "muon_mode" in group:
        return RoutingRules(group["muon_mode"])
    former: MuonMode = "2d" if group.get("muon_2d_only", True) else "flat"
    default = RoutingRules().muon_mode
    return RoutingRules(
        muon_mode=default if muon_mode == default else former,
        min_matrix_dim=group.get("min_2d_dim", 1),
    )


def _adam_route(name: str, shape: Shape, group: Mapping[str, Any]) -> Route:
    """Return which of Adam and AdamW a parameter had.

    Their states are alike, only name and shape tell.
    """
    if "muon_mode" not in group:  # the first version had Adam alone
        return "adam"
    route = choose_route(name, shape, _saved_rules(group, group["muon_mode"])).route
    return "adamw" if route == "adamw" else "adam"


def _explained(
    saved: RouteEntry, present: RouteEntry, group: Mapping[str, Any], muon_mode: MuonMode
) -> bool:
    """Return whether an older version's rules explain the saved route, and today's the present.

    Settings of routes that were changed since then explain nothing: today's rules are taken with
    the saved settings.
    """
    rules_today = _saved_rules(group, muon_mode)
    routed_today = choose_route(present.name, present.shape, rules_today)
    if saved.shape != present.shape or routed_today.placement != present.placement:
        return False
    mode = group.get("muon_mode")
    if mode is not None:  # an intermediate version, with today's views but without names
        return choose_route(None, saved.shape, RoutingRules(mode)).placement == saved.placement
    # The first version took matrices, and with `muon_2d_only` False tensors of more dimensions.
    n_dims = len(saved.shape)
    if n_dims == 2:
        was_muon = min(saved.shape) >= rules_today.min_matrix_dim
    else:
        was_muon = n_dims > 2 and not group.get("muon_2d_only", True)
    return (saved.route == "muon") == was_muon


def _steps(values: Mapping[str, Any], group: Mapping[str, Any]) -> Tensor:
    """Return the number of steps, computed from the powers of the decays.

    They are in the parameter's state, up to 3.2.0 as numbers `beta1_pow`, since then as
    `bias_correction1` = 1 − β₁^t; or for all parameters in the group, as `beta1_pow_device`.
    """
    for number, beta in zip("21", reversed(group["adam_betas"]), strict=True):
        power = float(values.get(f"beta{number}_pow", group.get(f"beta{number}_pow_device", 0.0)))
        if (correction := values.get(f"bias_correction{number}")) is not None:
            power = 1.0 - float(correction)
        if _LEAST_POWER < power <= 1.0 and 0.0 < beta < 1.0:
            return torch.tensor(float(round(math.log(power) / math.log(beta))), device="cpu")
    # So many steps that no bias is left to correct.
    many = math.ceil(math.log(_LEAST_POWER) / math.log(max(*group["adam_betas"], 0.5)))
    return torch.tensor(float(values.get("steps_taken") or many), device="cpu")
