"""The run's optimizer: how it is made, and how its state comes back from a checkpoint."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from deepmd_muon.model import EnergyModel
from deepmd_muon.model.deepmd_kit import deepmd_kit_parameter_names
from deepmd_muon.optim import HybridMuon, name_deepmd_kit_state
from deepmd_muon.optim.config import HybridMuonConfig, OptimizerConfig
from deepmd_muon.optim.errors import ForeignStateError, RoutingMismatchError
from deepmd_muon.optim.foreign import is_deepmd_kit
from deepmd_muon.train.errors import CheckpointError


def build_optimizer(config: OptimizerConfig, model: nn.Module, lr: float) -> torch.optim.Optimizer:
    """Make the run's optimizer.

    DeePMD's weights are stored (in, out); HybridMuon is told so unless the input says otherwise or asks for
    deepmd-kit's own arithmetic, which takes them as stored.
    """
    if isinstance(config, HybridMuonConfig) and config.layout == "as_stored" and not config.deepmd_kit_arithmetic:
        config = dataclasses.replace(config, layout="in_out")
    return config.build(model, lr)


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
            _load_adam_state(optimizer, state)
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


def _load_adam_state(optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
    """Load torch's Adam state; its own loading is by position, so names are compared first."""
    kind = type(optimizer).__name__
    groups = state["param_groups"]
    if any("routes" in group for group in groups):
        raise ForeignStateError(f"the optimizer state is HybridMuon's, the input asks for {kind}")
    saved = [name for group in groups for name in group.get("param_names", [])]
    present = [name for group in optimizer.param_groups for name in group["param_names"]]
    if saved != present:
        only_saved, only_present = sorted(set(saved) - set(present)), sorted(set(present) - set(saved))
        raise ForeignStateError(
            f"the optimizer state is not of these parameters: {len(saved)} were saved, {len(present)} are here; "
            f"only saved: {only_saved[:5]}; only here: {only_present[:5]}"
        )
    optimizer.load_state_dict(dict(state))
