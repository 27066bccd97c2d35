"""The run's optimizer."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import torch
from torch import nn

from deepmd_muon.optim.config import HybridMuonConfig
from deepmd_muon.optim.other_configs import MuonConfig, OptimizerConfig

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

    DeePMD's weights are stored (in, out), so `layout` 'auto' becomes 'in_out', except with deepmd-kit's own arithmetic,
    which takes weights as stored.
    """
    if not isinstance(config, HybridMuonConfig | MuonConfig):
        return config.build(model, lr, replicas if state_in_parts else None)
    as_deepmd_kit = isinstance(config, HybridMuonConfig) and config.deepmd_kit_arithmetic
    if config.layout == "auto" and not as_deepmd_kit:
        config = dataclasses.replace(config, layout="in_out")
    if state_in_parts:
        config = dataclasses.replace(config, sharded=dataclasses.replace(config.sharded, state="sharded"))
    return config.build(model, lr, replicas)
