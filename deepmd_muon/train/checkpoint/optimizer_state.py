"""The optimizer's state in checkpoints: in the order of deepmd-kit's parameters, checked and converted when loaded."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from deepmd_muon.checkpoint_file.directory import read_into
from deepmd_muon.checkpoint_file.errors import CheckpointError
from deepmd_muon.checkpoint_file.file import OWN_KEY
from deepmd_muon.model import EnergyModel
from deepmd_muon.model.branches import Branches
from deepmd_muon.model.deepmd_kit import deepmd_kit_parameter_names, own_parameter_name
from deepmd_muon.optim import HybridMuon, name_deepmd_kit_state
from deepmd_muon.optim.dtensors import local_of
from deepmd_muon.optim.errors import ForeignStateError, RoutingMismatchError
from deepmd_muon.optim.routing.routes import canonical_name
from deepmd_muon.optim.state.deepmd_kit import is_deepmd_kit

log = logging.getLogger(__name__)

_MOMENTS = ("exp_avg", "exp_avg_sq")
# Adam's groups tell by this key whether the decay is decoupled; of older versions of torch they lack it.
_KIND = "decoupled_weight_decay"
_DECOUPLED = {False: "Adam", True: "AdamW"}
# The routing manifest's entry of a parameter without elements, which only deepmd-kit's models have.
_EMPTY = {"routes": "frozen", "views": "", "shapes": "0"}


def load_optimizer_state(
    optimizer: torch.optim.Optimizer,
    model: EnergyModel | Branches,
    content: Mapping[str, Any],
    source: Path,
) -> None:
    """Load the optimizer state of a checkpoint, ours or deepmd-kit's, after checking that it belongs to this optimizer.

    Raises
    ------
    CheckpointError
        When there is no optimizer state, it is of another kind, or routes or matrix views differ.
    """
    state = content.get("optimizer")
    advice = f"to start from its weights with a fresh optimizer, use --init-model {source}"
    if not state:
        raise CheckpointError(
            f"{source} holds no optimizer state, so training cannot continue from it; {advice}"
        )

    def done() -> int:
        return int(content["model"]["_extra_state"]["train_infos"]["step"]) + 1

    if not state["state"] and done():
        raise CheckpointError(
            f"{source}: its optimizer state is empty after {done()} steps; {advice}"
        )
    try:
        if not isinstance(optimizer, HybridMuon):
            if not isinstance(optimizer, torch.optim.Adam):
                _check_kind(optimizer, state)
            elif OWN_KEY not in content:  # of our own, the inputs are compared
                _report_changes(optimizer, state["param_groups"], source)
            _load_by_name(optimizer, state, model)
        elif is_deepmd_kit(state["param_groups"]) and "routes" not in state["param_groups"][0]:
            names = [own_parameter_name(name) for name in deepmd_kit_parameter_names(model)]
            optimizer.load_state_dict(name_deepmd_kit_state(state, names, done()))
        else:
            optimizer.load_state_dict(_with_names(state, model))
    except ForeignStateError as error:
        raise CheckpointError(f"{source}: {error}; {advice}") from error
    except RoutingMismatchError as error:
        raise CheckpointError(f"{source}: {error}") from error


def check_state(
    optimizer: torch.optim.Optimizer, average: Mapping[str, torch.Tensor], source: Path
) -> None:
    """Refuse a loaded optimizer state or `average` of parameters that would spoil the weights in the first step.

    Every rank checks the elements that it holds.

    Raises
    ------
    CheckpointError
        Naming the tensors that hold NaN or infinity, and second moments below zero, whose root is NaN.
    """
    state = optimizer.state_dict()
    names = {
        number: canonical_name(name)
        for group in state["param_groups"]
        for number, name in zip(group["params"], group["param_names"], strict=True)
    }
    spoiled = [f"average of {name}" for name, x in average.items() if not _is_finite(x)]
    for number, values in state["state"].items():
        for key, x in values.items():
            if not _is_finite(x) or (key == "exp_avg_sq" and bool((local_of(x) < 0).any())):
                spoiled.append(f"{key} of {names[number]}")
    if spoiled:
        examples = ", ".join(spoiled[:3]) + (", …" if len(spoiled) > 3 else "")
        raise CheckpointError(
            f"{source}: {len(spoiled)} tensors of its optimizer state or average hold NaN, infinity or negative "
            f"second moments ({examples}): take an earlier checkpoint, or start from its weights with --init-model"
        )


def _is_finite(x: Any) -> bool:
    return not isinstance(x, torch.Tensor) or bool(torch.isfinite(local_of(x)).all())


def _with_names(state: Mapping[str, Any], model: EnergyModel | Branches) -> dict[str, Any]:
    """Attach names to deepmd-kit's Adam state, which is by position, empty parameters included."""
    groups = state["param_groups"]
    if len(groups) != 1 or {"routes", "param_names"} & groups[0].keys():
        return dict(state)
    names = [own_parameter_name(name) for name in deepmd_kit_parameter_names(model)]
    if len(groups[0]["params"]) != len(names):
        return dict(state)
    return {**state, "param_groups": [{**groups[0], "param_names": names}]}


def read_state_part(
    optimizer: torch.optim.Optimizer, content: Mapping[str, Any], path: Path
) -> bool:
    """Load the optimizer state of a directory on several ranks, reading only this rank's part of every tensor.

    Return whether that was possible: parameters, routes, views, shapes and types are those that were saved. Otherwise
    nothing has been changed, and the state is to be read whole. `content` has meta tensors in the optimizer's state.
    """
    saved = content.get("optimizer")
    if not isinstance(optimizer, HybridMuon | torch.optim.Adam):
        return False
    if (
        not saved
        or len(saved["param_groups"]) != 1
        or "param_names" not in saved["param_groups"][0]
    ):
        return False
    saved = in_own_order(
        saved, [canonical_name(n) for each in optimizer.param_groups for n in each["param_names"]]
    )
    (group,) = saved["param_groups"]
    if isinstance(optimizer, HybridMuon):
        if any(group.get(key) != value for key, value in optimizer.routing.manifest().items()):
            return False
        fresh = optimizer.fresh_state()
    else:
        (present,) = optimizer.param_groups
        pairs = zip(present["param_names"], present["params"], strict=True)
        fresh = {
            n: {"step": torch.zeros(()), **{k: torch.empty_like(p) for k in _MOMENTS}}
            for n, p in pairs
        }
    names = {
        i: canonical_name(name)
        for i, name in zip(group["params"], group["param_names"], strict=True)
    }
    numbers = {names[i]: i for i in saved["state"]}
    if _kinds(fresh) != _kinds({names[i]: values for i, values in saved["state"].items()}):
        return False
    targets = {
        ("optimizer", "state", numbers[n], key): x
        for n, state in fresh.items()
        for key, x in state.items()
    }
    read_into(path, {place: x for place, x in targets.items() if x.numel()})
    if isinstance(optimizer, HybridMuon):
        optimizer.load_state_dict(
            {"state": {numbers[name]: x for name, x in fresh.items()}, "param_groups": [group]}
        )
    else:
        groups = optimizer.state_dict()["param_groups"]
        optimizer.load_state_dict(
            {"state": dict(enumerate(fresh.values())), "param_groups": groups}
        )
    return True


def _kinds(
    state: Mapping[str, Mapping[str, Any]],
) -> dict[str, dict[str, tuple[torch.Size, torch.dtype]]]:
    return {
        name: {key: (x.shape, x.dtype) for key, x in values.items()}
        for name, values in state.items()
    }


def _check_kind(optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
    """Refuse the state of another optimizer, whose groups have other keys, for an optimizer of another package."""
    for present, saved in zip(optimizer.param_groups, state["param_groups"], strict=False):
        missing = sorted(present.keys() - saved.keys() - {"initial_lr"})
        if missing:
            raise ForeignStateError(
                f"the optimizer state is not that of {type(optimizer).__name__}: its groups lack {', '.join(missing)}"
            )


def _report_changes(
    optimizer: torch.optim.Adam, saved: Sequence[Mapping[str, Any]], source: Path
) -> None:
    """Log the settings of Adam or AdamW that are others than in deepmd-kit's run; deepmd-kit would keep the saved."""
    changes: list[str] = []
    for former, present in zip(saved, optimizer.param_groups, strict=False):
        names = [_DECOUPLED[bool(group[_KIND])] for group in (former, present) if _KIND in group]
        if len({*names}) == 2:
            changes.append(f"type was {names[0]}, is {names[1]}")
        changes += [
            f"{key} was {former[key]}, is {present[key]}"
            for key in ("weight_decay", "betas", "eps")
            if key in former and former[key] != present[key]
        ]
    if changes:
        log.warning(
            "since %s was written, the optimizer has changed: %s", source, "; ".join(changes)
        )


def _load_by_name(
    optimizer: torch.optim.Optimizer, state: Mapping[str, Any], model: EnergyModel | Branches
) -> None:
    """Load the state of Adam or of another package's optimizer; torch's loading is by position, so names come first."""
    groups = state["param_groups"]
    if any("routes" in group for group in groups) or is_deepmd_kit(groups):
        raise ForeignStateError(
            f"the optimizer state is HybridMuon's, the input asks for {type(optimizer).__name__}"
        )
    keys = [key for group in groups for key in group["params"]]
    saved = [name for group in groups for name in group.get("param_names", [])]
    if not saved and len(keys) == len(names := deepmd_kit_parameter_names(model)):
        # deepmd-kit's own state: by position, empty parameters included
        saved = [own_parameter_name(name) for name in names]
    present = [name for group in optimizer.param_groups for name in group["param_names"]]
    missing = sorted(set(present) - set(saved))
    if missing or len(saved) != len(keys):
        raise ForeignStateError(
            f"the optimizer state is not of these parameters: {len(keys)} were saved, {len(saved)} of them with a "
            f"name, {len(present)} are here; without state: {missing[:5]}"
        )
    key_of = dict(zip(saved, keys, strict=True))
    values = {
        i: state["state"][key_of[name]]
        for i, name in enumerate(present)
        if key_of[name] in state["state"]
    }
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for i, state_of in values.items() if isinstance(optimizer, torch.optim.Adam) else ():
        for key, shape in (
            ("step", torch.Size()),
            *((key, parameters[i].shape) for key in _MOMENTS),
        ):
            found = torch.as_tensor(state_of.get(key, ())).shape
            if found != shape and (key != "step" or found.numel() != 1):
                raise ForeignStateError(
                    f"the optimizer state is damaged: {key} of {present[i]} has shape {tuple(found)} instead of "
                    f"{tuple(shape)}"
                )
    here = optimizer.state_dict()["param_groups"]
    optimizer.load_state_dict({"state": values, "param_groups": here})


def parameter_order(model: EnergyModel | Branches) -> Sequence[str]:
    """Return the parameters of deepmd-kit's model in its order; none where it has no such model."""
    try:
        return deepmd_kit_parameter_names(model)
    except CheckpointError:
        return ()


def in_deepmd_kits_order(state_dict: Mapping[str, Any], order: Sequence[str]) -> dict[str, Any]:
    """Return an optimizer's state dict that deepmd-kit's optimizer of the same kind loads by position.

    It lists the parameters of deepmd-kit's model (`parameter_order`) by its names, empty ones included, and Adam's
    state beside HybridMuon's carries the powers of the decays from which deepmd-kit corrects its bias. This package
    reads by name (`in_own_names`) and ignores both. State of several groups, or without names, comes back as it is.
    """
    groups, state = state_dict["param_groups"], state_dict["state"]
    names = [canonical_name(name) for name in groups[0].get("param_names", ())]
    order_of_ours = [own_parameter_name(name) for name in order]
    if len(groups) != 1 or not names or not set(names) <= set(order_of_ours):
        return dict(state_dict)
    (group,) = groups
    place = {name: index for index, name in enumerate(names)}
    lists: dict[str, list[Any]] = {"params": list(range(len(order))), "param_names": list(order)}
    for key, empty in _EMPTY.items():
        if key in group:
            lists[key] = [
                group[key][place[name]] if name in place else empty for name in order_of_ours
            ]
    keys = {
        index: group["params"][place[name]]
        for index, name in enumerate(order_of_ours)
        if name in place
    }
    moved = {index: _with_powers(state[key], group) for index, key in keys.items() if key in state}
    return {**state_dict, "state": moved, "param_groups": [{**group, **lists}]}


def in_own_names(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """Return an optimizer's state dict whose groups name parameters as this package's models do, if at all."""
    groups = [
        {
            **group,
            "param_names": [
                own_parameter_name(canonical_name(name)) for name in group["param_names"]
            ],
        }
        if "param_names" in group
        else group
        for group in state_dict.get("param_groups", [])
    ]
    return {**state_dict, "param_groups": groups}


def in_own_order(state_dict: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """Undo `in_deepmd_kits_order` for an optimizer of these parameters; the keys of the state stay."""
    groups = []
    for group in state_dict["param_groups"]:
        place = {canonical_name(name): index for index, name in enumerate(group["param_names"])}
        kept = [place[name] for name in names if name in place]
        lists = {
            key: [group[key][i] for i in kept]
            for key in ("params", "param_names", *_EMPTY)
            if key in group
        }
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
    return {
        **values,
        **{f"beta{i}_pow": beta**steps for i, beta in enumerate(group["adam_betas"], start=1)},
    }
