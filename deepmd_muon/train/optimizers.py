"""The run's optimizer."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from deepmd_muon.model.branches import Branches, for_any_name
from deepmd_muon.optim.buildable import Buildable
from deepmd_muon.optim.config import HybridMuonConfig
from deepmd_muon.optim.other_configs import MuonConfig
from deepmd_muon.setting import InvalidSettingError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

# Settings that are patterns on names of parameters; those of `splits` begin with one, and are taken as they are.
_PATTERNS = ("adam_patterns", "adamw_patterns", "muon_patterns", "expert_patterns", "local_patterns")


def build_optimizer(
    config: Buildable,
    model: nn.Module,
    lr: float,
    *,
    replicas: DeviceMesh | None = None,
    state_in_parts: bool = False,
) -> torch.optim.Optimizer:
    """Make the run's optimizer.

    The ranks of `replicas` hold the same parameters and gradients: HybridMuon shares its work among them, the others
    take the same step on each. With `state_in_parts` each of them keeps a part of the optimizer's state.

    DeePMD's weights are stored (in, out), so `layout` 'auto' becomes 'in_out', except with deepmd-kit's own arithmetic,
    which takes weights as stored. A parameter that several branches share has the name of each for patterns.
    """
    if isinstance(config, HybridMuonConfig | MuonConfig):
        if isinstance(config, HybridMuonConfig) and isinstance(model, Branches):
            found: dict[str, Any] = {key: for_any_name(getattr(config, key), model) for key in _PATTERNS}
            config = dataclasses.replace(config, **found)
        as_deepmd_kit = isinstance(config, HybridMuonConfig) and config.deepmd_kit_arithmetic
        if config.layout == "auto" and not as_deepmd_kit:
            config = dataclasses.replace(config, layout="in_out")
        if state_in_parts:
            config = dataclasses.replace(config, sharded=dataclasses.replace(config.sharded, state="sharded"))
        return config.build(model, lr, replicas)
    optimizer = config.build(model, lr, replicas if state_in_parts else None)
    if not all("param_names" in group for group in optimizer.param_groups):
        raise InvalidSettingError(
            f"optimizer: {type(config).__name__}.build made {type(optimizer).__name__} without names of "
            "parameters, which checkpoints need; give it model.named_parameters()"
        )
    return optimizer
