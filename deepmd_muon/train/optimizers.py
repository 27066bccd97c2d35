"""The run's optimizer: how it is made, and how its state comes back from a checkpoint."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from deepmd_muon.model import EnergyModel
from deepmd_muon.model.deepmd_kit import deepmd_kit_parameter_names
from deepmd_muon.optim import HybridMuon, name_deepmd_kit_state
from deepmd_muon.optim.config import HybridMuonConfig, OptimizerConfig
from deepmd_muon.optim.errors import ForeignStateError, RoutingMismatchError
from deepmd_muon.optim.foreign import is_deepmd_kit
from deepmd_muon.train.errors import CheckpointError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def build_optimizer(
    config: OptimizerConfig,
    model: nn.Module,
    lr: float,
    *,
    replicas: DeviceMesh | None = None,
    state_in_parts: bool = False,
) -> torch.optim.Optimizer:
    """Make the run's optimizer.

    The ranks of `replicas` hold the same parameters and gradients: HybridMuon shares its work among them, the others
    take the same step on each. With `state_in_parts` each of them keeps a part of the optimizer's state.

    DeePMD's weights are stored (in, out); HybridMuon is told so unless the input says otherwise or asks for
    deepmd-kit's own arithmetic, which takes them as stored.
    """
    if not isinstance(config, HybridMuonConfig):
        return config.build(model, lr, replicas if state_in_parts else None)
    if config.layout == "auto" and not config.deepmd_kit_arithmetic:
        config = dataclasses.replace(config, layout="in_out")
    if state_in_parts:
        config = dataclasses.replace(config, sharded=dataclasses.replace(config.sharded, state="sharded"))
    return config.build(model, lr, replicas)


def load_optimizer_state(
    optimizer: torch.optim.Optimizer, model: EnergyModel, content: Mapping[str, Any], source: Path
) -> None:
    """Load the optimizer state of a checkpoint after checking that it belongs to this optimizer.

    Parameters
    ----------
    optimizer
        The run's optimizer.
    model
        The model it moves.
    content
        The checkpoint, ours or deepmd-kit's.
    source
        Its file, for messages.

    Raises
    ------
    CheckpointError
        When there is no optimizer state, it is of another kind, or routes or matrix views differ.
    """
    state = content.get("optimizer")
    advice = f"to start from its weights with a fresh optimizer, use --init-model {source}"
    if not state:
        raise CheckpointError(f"{source} holds no optimizer state, so training cannot continue from it; {advice}")
    try:
        if not isinstance(optimizer, HybridMuon):
            _load_adam_state(optimizer, state, model)
        elif is_deepmd_kit(state["param_groups"]) and "routes" not in state["param_groups"][0]:
            step = int(content["model"]["_extra_state"]["train_infos"]["step"]) + 1
            names = deepmd_kit_parameter_names(model)
            optimizer.load_state_dict(name_deepmd_kit_state(state, names, step))
        else:
            optimizer.load_state_dict(state)
    except ForeignStateError as error:
        raise CheckpointError(f"{source}: {error}; {advice}") from error
    except RoutingMismatchError as error:
        raise CheckpointError(f"{source}: {error}") from error


def _load_adam_state(optimizer: torch.optim.Optimizer, state: Mapping[str, Any], model: EnergyModel) -> None:
    """Load torch's Adam state; its own loading is by position, so names are compared first."""
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
    here = optimizer.state_dict()["param_groups"]
    optimizer.load_state_dict({"state": values, "param_groups": here})
