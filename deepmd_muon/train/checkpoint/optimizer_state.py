"""The optimizer's state in checkpoints: checked against the present optimizer and converted where it may be."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from deepmd_muon.checkpoint_file.directory import read_into
from deepmd_muon.checkpoint_file.errors import CheckpointError
from deepmd_muon.model import EnergyModel
from deepmd_muon.model.branches import Branches
from deepmd_muon.model.deepmd_kit import deepmd_kit_parameter_names
from deepmd_muon.optim import HybridMuon, name_deepmd_kit_state
from deepmd_muon.optim.errors import ForeignStateError, RoutingMismatchError
from deepmd_muon.optim.routing.rules import canonical_name
from deepmd_muon.optim.state.deepmd_kit import is_deepmd_kit
from deepmd_muon.train.checkpoint.for_deepmd_kit import in_own_order

_MOMENTS = ("exp_avg", "exp_avg_sq")


def load_optimizer_state(
    optimizer: torch.optim.Optimizer, model: EnergyModel | Branches, content: Mapping[str, Any], source: Path
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
        raise CheckpointError(f"{source} holds no optimizer state, so training cannot continue from it; {advice}")

    def done() -> int:
        return int(content["model"]["_extra_state"]["train_infos"]["step"]) + 1

    if not state["state"] and done():
        raise CheckpointError(f"{source}: its optimizer state is empty after {done()} steps; {advice}")
    try:
        if not isinstance(optimizer, HybridMuon):
            if not isinstance(optimizer, torch.optim.Adam):
                _check_kind(optimizer, state)
            _load_by_name(optimizer, state, model)
        elif is_deepmd_kit(state["param_groups"]) and "routes" not in state["param_groups"][0]:
            names = deepmd_kit_parameter_names(model)
            optimizer.load_state_dict(name_deepmd_kit_state(state, names, done()))
        else:
            optimizer.load_state_dict(_with_names(state, model))
    except ForeignStateError as error:
        raise CheckpointError(f"{source}: {error}; {advice}") from error
    except RoutingMismatchError as error:
        raise CheckpointError(f"{source}: {error}") from error


def _with_names(state: Mapping[str, Any], model: EnergyModel | Branches) -> dict[str, Any]:
    """Attach names to deepmd-kit's Adam state, which is by position, empty parameters included."""
    groups = state["param_groups"]
    if len(groups) != 1 or {"routes", "param_names"} & groups[0].keys():
        return dict(state)
    names = deepmd_kit_parameter_names(model)
    if len(groups[0]["params"]) != len(names):
        return dict(state)
    return {**state, "param_groups": [{**groups[0], "param_names": names}]}


def read_state_part(optimizer: torch.optim.Optimizer, content: Mapping[str, Any], path: Path) -> bool:
    """Load the optimizer state of a directory on several ranks, reading only this rank's part of every tensor.

    Return whether that was possible: parameters, routes, views, shapes and types are those that were saved. Otherwise
    nothing has been changed, and the state is to be read whole. `content` has meta tensors in the optimizer's state.
    """
    saved = content.get("optimizer")
    if not isinstance(optimizer, HybridMuon | torch.optim.Adam):
        return False
    if not saved or len(saved["param_groups"]) != 1 or "param_names" not in saved["param_groups"][0]:
        return False
    saved = in_own_order(saved, [canonical_name(n) for each in optimizer.param_groups for n in each["param_names"]])
    (group,) = saved["param_groups"]
    if isinstance(optimizer, HybridMuon):
        if any(group.get(key) != value for key, value in optimizer.routing.manifest().items()):
            return False
        fresh = optimizer.fresh_state()
    else:
        (present,) = optimizer.param_groups
        pairs = zip(present["param_names"], present["params"], strict=True)
        fresh = {n: {"step": torch.zeros(()), **{k: torch.empty_like(p) for k in _MOMENTS}} for n, p in pairs}
    names = {i: canonical_name(name) for i, name in zip(group["params"], group["param_names"], strict=True)}
    numbers = {names[i]: i for i in saved["state"]}
    if _kinds(fresh) != _kinds({names[i]: values for i, values in saved["state"].items()}):
        return False
    targets = {("optimizer", "state", numbers[n], key): x for n, state in fresh.items() for key, x in state.items()}
    read_into(path, {place: x for place, x in targets.items() if x.numel()})
    if isinstance(optimizer, HybridMuon):
        optimizer.load_state_dict({"state": {numbers[name]: x for name, x in fresh.items()}, "param_groups": [group]})
    else:
        groups = optimizer.state_dict()["param_groups"]
        optimizer.load_state_dict({"state": dict(enumerate(fresh.values())), "param_groups": groups})
    return True


def _kinds(state: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, tuple[torch.Size, torch.dtype]]]:
    return {name: {key: (x.shape, x.dtype) for key, x in values.items()} for name, values in state.items()}


def _check_kind(optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
    """Refuse the state of another optimizer, whose groups have other keys, for an optimizer of another package."""
    for present, saved in zip(optimizer.param_groups, state["param_groups"], strict=False):
        missing = sorted(present.keys() - saved.keys() - {"initial_lr"})
        if missing:
            raise ForeignStateError(
                f"the optimizer state is not that of {type(optimizer).__name__}: its groups lack {', '.join(missing)}"
            )


def _load_by_name(optimizer: torch.optim.Optimizer, state: Mapping[str, Any], model: EnergyModel | Branches) -> None:
    """Load the state of Adam or of another package's optimizer; torch's loading is by position, so names come first."""
    groups = state["param_groups"]
    if any("routes" in group for group in groups) or is_deepmd_kit(groups):
        raise ForeignStateError(f"the optimizer state is HybridMuon's, the input asks for {type(optimizer).__name__}")
    keys = [key for group in groups for key in group["params"]]
    saved = [name for group in groups for name in group.get("param_names", [])]
    if not saved and len(keys) == len(names := deepmd_kit_parameter_names(model)):
        saved = names  # deepmd-kit's own state: by position, empty parameters included
    present = [name for group in optimizer.param_groups for name in group["param_names"]]
    missing = sorted(set(present) - set(saved))
    if missing or len(saved) != len(keys):
        raise ForeignStateError(
            f"the optimizer state is not of these parameters: {len(keys)} were saved, {len(saved)} of them with a "
            f"name, {len(present)} are here; without state: {missing[:5]}"
        )
    key_of = dict(zip(saved, keys, strict=True))
    values = {i: state["state"][key_of[name]] for i, name in enumerate(present) if key_of[name] in state["state"]}
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for i, state_of in values.items() if isinstance(optimizer, torch.optim.Adam) else ():
        for key, shape in (("step", torch.Size()), *((key, parameters[i].shape) for key in _MOMENTS)):
            found = torch.as_tensor(state_of.get(key, ())).shape
            if found != shape and (key != "step" or found.numel() != 1):
                raise ForeignStateError(
                    f"the optimizer state is damaged: {key} of {present[i]} has shape {tuple(found)} instead of "
                    f"{tuple(shape)}"
                )
    here = optimizer.state_dict()["param_groups"]
    optimizer.load_state_dict({"state": values, "param_groups": here})
