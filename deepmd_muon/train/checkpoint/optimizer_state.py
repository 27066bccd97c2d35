"""The optimizer's state in checkpoints: in deepmd-kit's order, checked and converted when loaded.

Three forms are read: this package's (parameters by name, in one group), deepmd-kit's Adam and AdamW
(by position) and deepmd-kit's HybridMuon (by position, converted by `name_deepmd_kit_state`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from deepmd_muon.checkpoint_file.errors import CheckpointError
from deepmd_muon.checkpoint_file.file import OWN_KEY
from deepmd_muon.model import EnergyModel
from deepmd_muon.model.branches import Branches
from deepmd_muon.model.deepmd_kit import (
    deepmd_kit_parameter_names,
    naming_of,
    own_parameter_name,
)
from deepmd_muon.optim import HybridMuon, name_deepmd_kit_state
from deepmd_muon.optim.dtensors import local_of
from deepmd_muon.optim.errors import ForeignStateError, RoutingMismatchError
from deepmd_muon.optim.groups.group_settings import unfolded
from deepmd_muon.optim.routing.routes import canonical_name, current_routes
from deepmd_muon.optim.state.deepmd_kit import is_deepmd_kit

log = logging.getLogger(__name__)

# By this key of their groups, Adam (False) and AdamW (True) differ; older versions of torch lack
# it.
_DECOUPLED = "decoupled_weight_decay"
# The route of a parameter without elements, which only deepmd-kit's models have.
_EMPTY_ROUTE = "frozen 0"


# ----- load --------------------------------------------------------------------------------------


def load_optimizer_state(
    optimizer: torch.optim.Optimizer,
    model: EnergyModel | Branches,
    content: Mapping[str, Any],
    path: Path,
) -> None:
    """Load the optimizer state of a checkpoint after checking that it belongs to this optimizer.

    Raises
    ------
    CheckpointError
        If there is no optimizer state, it is of another kind, or routes or matrix views differ.
    """
    state = content.get("optimizer")
    advice = f"to start from its weights with a fresh optimizer, use --init-model {path}"
    if not state:
        raise CheckpointError(
            f"{path} holds no optimizer state, so training cannot continue from it; {advice}"
        )
    if not state["state"] and (steps := _steps_done(content)):
        raise CheckpointError(f"{path}: its optimizer state is empty after {steps} steps; {advice}")
    try:
        if isinstance(optimizer, HybridMuon):
            optimizer.load_state_dict(_for_hybrid_muon(state, model, content))
        else:
            if not isinstance(optimizer, torch.optim.Adam):
                _check_kind(optimizer, state)
            elif OWN_KEY not in content:  # of our own checkpoints, the inputs are compared
                _report_changes(optimizer, state["param_groups"], path)
            _load_by_name(optimizer, state, model)
    except ForeignStateError as error:
        raise CheckpointError(f"{path}: {error}; {advice}") from error
    except RoutingMismatchError as error:
        raise CheckpointError(f"{path}: {error}") from error


def _steps_done(content: Mapping[str, Any]) -> int:
    return int(content["model"]["_extra_state"]["train_infos"]["step"]) + 1


def _for_hybrid_muon(
    state: Mapping[str, Any], model: EnergyModel | Branches, content: Mapping[str, Any]
) -> dict[str, Any]:
    """Return a state dict with names, for HybridMuon, which itself converts states of Adam."""
    groups = state["param_groups"]
    if is_deepmd_kit(groups) and "routes" not in groups[0]:
        return name_deepmd_kit_state(state, _names_by_position(model), _steps_done(content))
    if len(groups) != 1 or {"routes", "param_names"} & groups[0].keys():
        return dict(state)
    # deepmd-kit's Adam state is by position, empty parameters included.
    names = _names_by_position(model)
    if len(groups[0]["params"]) != len(names):
        return dict(state)
    return {**state, "param_groups": [{**groups[0], "param_names": names}]}


def _names_by_position(model: EnergyModel | Branches) -> list[str]:
    """Return our names of the parameters of deepmd-kit's model, in its order."""
    return list(map(naming_of(model), deepmd_kit_parameter_names(model)))


def _check_kind(optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
    """Refuse the state of another optimizer, for an optimizer of another package.

    The groups of another optimizer lack some of its keys.
    """
    for present, saved in zip(optimizer.param_groups, state["param_groups"], strict=False):
        missing = sorted(present.keys() - saved.keys() - {"initial_lr"})
        if missing:
            raise ForeignStateError(
                f"the optimizer state is not that of {type(optimizer).__name__}: "
                f"its groups lack {', '.join(missing)}"
            )


def _report_changes(
    optimizer: torch.optim.Adam, saved_groups: Sequence[Mapping[str, Any]], path: Path
) -> None:
    """Log the settings of Adam or AdamW that differ from deepmd-kit's run.

    deepmd-kit itself would keep the saved ones.
    """
    changes: list[str] = []
    for saved, present in zip(saved_groups, optimizer.param_groups, strict=False):
        both_tell = _DECOUPLED in saved and _DECOUPLED in present
        if both_tell and _adam_name(saved) != _adam_name(present):
            changes.append(f"type was {_adam_name(saved)}, is {_adam_name(present)}")
        changes += [
            f"{key} was {saved[key]}, is {present[key]}"
            for key in ("weight_decay", "betas", "eps")
            if key in saved and saved[key] != present[key]
        ]
    if changes:
        log.warning("since %s was written, the optimizer has changed: %s", path, "; ".join(changes))


def _adam_name(group: Mapping[str, Any]) -> str:
    return "AdamW" if group[_DECOUPLED] else "Adam"


def _load_by_name(
    optimizer: torch.optim.Optimizer, state: Mapping[str, Any], model: EnergyModel | Branches
) -> None:
    """Load the state of Adam or of another package's optimizer.

    torch loads by position, so the state is brought into the order of the present names first.
    """
    groups = state["param_groups"]
    if any("routes" in group for group in groups) or is_deepmd_kit(groups):
        raise ForeignStateError(
            f"the optimizer state is HybridMuon's, the input asks for {type(optimizer).__name__}"
        )
    keys = [key for group in groups for key in group["params"]]
    saved_names = [name for group in groups for name in group.get("param_names", [])]
    if not saved_names and len(keys) == len(deepmd_kit_parameter_names(model)):
        # deepmd-kit's own state is by position, empty parameters included.
        saved_names = _names_by_position(model)
    names = [name for group in optimizer.param_groups for name in group["param_names"]]
    missing = sorted(set(names) - set(saved_names))
    if missing or len(saved_names) != len(keys):
        raise ForeignStateError(
            f"the optimizer state is not of these parameters: {len(keys)} were saved, "
            f"{len(saved_names)} of them with a name, {len(names)} are here; "
            f"without state: {missing[:5]}"
        )
    key_of = dict(zip(saved_names, keys, strict=True))
    # torch numbers the state by position in the present groups.
    state_by_position = {
        position: state["state"][key_of[name]]
        for position, name in enumerate(names)
        if key_of[name] in state["state"]
    }
    if isinstance(optimizer, torch.optim.Adam):
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        for position, tensors in state_by_position.items():
            _check_adam_shapes(tensors, names[position], parameters[position].shape)
    present_groups = optimizer.state_dict()["param_groups"]
    optimizer.load_state_dict({"state": state_by_position, "param_groups": present_groups})


def _check_adam_shapes(tensors: Mapping[str, Any], name: str, shape: torch.Size) -> None:
    """Refuse a count of steps or moments of other shapes; torch would load them."""
    expected = {"step": torch.Size(), "exp_avg": shape, "exp_avg_sq": shape}
    for key, expected_shape in expected.items():
        saved_shape = torch.as_tensor(tensors.get(key, ())).shape
        if key == "step" and saved_shape.numel() == 1:
            continue
        if saved_shape != expected_shape:
            raise ForeignStateError(
                f"the optimizer state is damaged: {key} of {name} has shape {tuple(saved_shape)} "
                f"instead of {tuple(expected_shape)}"
            )


def check_state(
    optimizer: torch.optim.Optimizer, average: Mapping[str, torch.Tensor], path: Path
) -> None:
    """Refuse an optimizer state or average that would spoil the weights in the first step.

    Every rank checks the elements that it holds.

    Raises
    ------
    CheckpointError
        Naming tensors with NaN or infinity, and second moments below zero, of which the root is
        NaN.
    """
    state = optimizer.state_dict()
    names = {
        number: canonical_name(name)
        for group in state["param_groups"]
        for number, name in zip(group["params"], group["param_names"], strict=True)
    }
    unusable = [f"average of {name}" for name, x in average.items() if not _is_finite(x)]
    for number, tensors in state["state"].items():
        for key, x in tensors.items():
            if not _is_finite(x) or (key == "exp_avg_sq" and bool((local_of(x) < 0).any())):
                unusable.append(f"{key} of {names[number]}")
    if unusable:
        examples = ", ".join(unusable[:3]) + (", …" if len(unusable) > 3 else "")
        raise CheckpointError(
            f"{path}: {len(unusable)} tensors of its optimizer state or average hold NaN, "
            f"infinity or negative second moments ({examples}): take an earlier checkpoint, "
            "or start from its weights with --init-model"
        )


def _is_finite(x: Any) -> bool:
    return not isinstance(x, torch.Tensor) or bool(torch.isfinite(local_of(x)).all())


# ----- names and order ---------------------------------------------------------------------------


def parameter_order(model: EnergyModel | Branches) -> Sequence[str]:
    """Return the parameters of deepmd-kit's model in its order; none if it has no such model."""
    try:
        return deepmd_kit_parameter_names(model)
    except CheckpointError:
        return ()


def in_deepmd_kits_order(
    state_dict: Mapping[str, Any],
    order: Sequence[str],
    own_name_of: Callable[[str], str] = own_parameter_name,
) -> dict[str, Any]:
    """Return an optimizer's state dict that deepmd-kit's optimizer of the same kind loads.

    It lists the parameters of deepmd-kit's model (`parameter_order`) by its names, empty ones
    included, because deepmd-kit loads by position. HybridMuon's Adam state gets the powers of the
    decays from which deepmd-kit corrects its bias, and its group the setting `lr_adjust`. This
    package reads by name (`in_own_names`) and ignores both. Each setting is a key of the group.
    State of several groups, or without names, comes back as it is.
    """
    groups = state_dict["param_groups"]
    state = state_dict["state"]
    names = [canonical_name(name) for name in groups[0].get("param_names", ())]
    own_names = list(map(own_name_of, order))
    if len(groups) != 1 or not names or not set(names) <= set(own_names):
        return dict(state_dict)
    group = unfolded(groups[0])
    position = {name: i for i, name in enumerate(names)}
    lists: dict[str, Any] = {"params": list(range(len(order))), "param_names": list(order)}
    if "routes" in group:
        lists["routes"] = [
            group["routes"][position[name]] if name in position else _EMPTY_ROUTE
            for name in own_names
        ]
    if "scaling" in group:
        rectangular = group["scaling"] == "rectangular"
        lists["lr_adjust"] = 1.0 / group["adam_lr_ratio"] if rectangular else 0.0
    reordered = {}
    for i, name in enumerate(own_names):
        if name in position:  # deepmd-kit's empty parameters have no state
            number = group["params"][position[name]]
            if number in state:
                reordered[i] = dict(state[number])
                if "step" in reordered[i] and "adam_betas" in group:
                    steps = float(reordered[i]["step"])
                    beta1, beta2 = group["adam_betas"]
                    reordered[i] |= {"beta1_pow": beta1**steps, "beta2_pow": beta2**steps}
    return {**state_dict, "state": reordered, "param_groups": [{**group, **lists}]}


def in_own_names(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """Return an optimizer's state dict with our names of parameters, if it has names at all."""
    groups = []
    for group in state_dict.get("param_groups", []):
        group = dict(group)
        if "param_names" in group:
            canonical = map(canonical_name, group["param_names"])
            group["param_names"] = [own_parameter_name(name) for name in canonical]
        groups.append(group)
    return {**state_dict, "param_groups": groups}


def in_own_order(state_dict: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """Undo `in_deepmd_kits_order` for an optimizer of these parameters; keys of the state stay."""
    groups = []
    for group in map(current_routes, state_dict["param_groups"]):
        position = {canonical_name(name): i for i, name in enumerate(group["param_names"])}
        positions = [position[name] for name in names if name in position]
        lists = {
            key: [group[key][i] for i in positions]
            for key in ("params", "param_names", "routes")
            if key in group
        }
        groups.append({**group, **lists})
    state = {
        number: {key: x for key, x in tensors.items() if not key.endswith("_pow")}
        for number, tensors in state_dict["state"].items()
    }
    return {**state_dict, "state": state, "param_groups": groups}
