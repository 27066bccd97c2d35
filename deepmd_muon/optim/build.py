"""From settings to optimizer: what each configuration's `build` method does."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor, nn

from deepmd_muon.optim.config import AdamConfig, AdamWConfig, HybridMuonConfig
from deepmd_muon.optim.hybrid_muon import HybridMuon


def build_hybrid_muon(config: HybridMuonConfig, model: nn.Module, lr: float | Tensor) -> HybridMuon:
    """Make a HybridMuon for every named parameter of `model`, the frozen ones included."""
    settings = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    betas = (settings.pop("adam_beta1"), settings.pop("adam_beta2"))
    return HybridMuon(model.named_parameters(), lr, adam_betas=betas, **settings)


def build_adam(config: AdamConfig, model: nn.Module, lr: float | Tensor) -> torch.optim.Adam:
    """Make torch's fused Adam for the trainable named parameters of `model`."""
    return torch.optim.Adam(_trainable(model), lr=lr, **_adam_settings(config))


def build_adamw(config: AdamWConfig, model: nn.Module, lr: float | Tensor) -> torch.optim.AdamW:
    """Make torch's fused AdamW for the trainable named parameters of `model`."""
    return torch.optim.AdamW(_trainable(model), lr=lr, **_adam_settings(config))


def _adam_settings(config: AdamConfig | AdamWConfig) -> dict[str, Any]:
    return {
        "betas": (config.adam_beta1, config.adam_beta2),
        "weight_decay": config.weight_decay,
        "fused": True,
    }


def _trainable(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return [(name, p) for name, p in model.named_parameters() if p.requires_grad]
