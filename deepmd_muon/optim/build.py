"""Build optimizers from their configurations, and log the result."""

from __future__ import annotations

import glob
import logging
import warnings
from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from deepmd_muon.optim.buildable import register_builder
from deepmd_muon.optim.config import DEFAULT_ADAMW_PATTERNS, AdamImplementation, HybridMuonConfig
from deepmd_muon.optim.errors import IdleSettingWarning
from deepmd_muon.optim.hybrid_muon import HybridMuon
from deepmd_muon.optim.other_configs import AdamConfig, AdamWConfig, MuonConfig
from deepmd_muon.optim.routing.modules import (
    attention_splits,
    convolutions,
    declared_splits,
    tables_and_heads,
)
from deepmd_muon.optim.routing.views import FusedSplit
from deepmd_muon.optim.torch_hooks import Adam, AdamW

if TYPE_CHECKING:
    from deepmd_muon.optim.buildable import Replicas
    from deepmd_muon.optim.qk_clip.layers import QKClip

log = logging.getLogger(__name__)

_IMPLEMENTATIONS: dict[AdamImplementation, dict[str, bool]] = {
    "fused": {"fused": True},
    "foreach": {"foreach": True},
    "for-loop": {"foreach": False, "fused": False},
}


@register_builder(HybridMuonConfig)
@register_builder(MuonConfig)
def build_muon(
    config: HybridMuonConfig | MuonConfig,
    model: nn.Module,
    lr: float | Tensor,
    replicas: Replicas | None = None,
    qk_clip: QKClip | None = None,
) -> HybridMuon:
    """Make a HybridMuon, or a plain Muon with AdamW for the rest, for a model."""
    splits = [*config.splits, *declared_splits(model)]
    settings = {**vars(config), "qk_clip": qk_clip}
    if isinstance(config, MuonConfig):
        settings["lr_adjust_coeff"] = settings.pop("rms_coefficient")
        settings |= {"magma_muon": False, "vector_route": "adamw"}
        splits += attention_splits(model)
        if config.adamw_patterns is None:
            fused = [FusedSplit.parse(split).pattern for split in splits]
            matrices = (*config.expert_patterns, *config.muon_patterns, *fused)
            settings["adamw_patterns"] = _patterns_of(model, matrices)
    else:
        settings["adam_betas"] = (settings.pop("adam_beta1"), settings.pop("adam_beta2"))
    if config.conv_patterns is None:
        kernels = convolutions(model)
        if kernels:
            log.info("matrices (out, in times kernel) of convolutions: %s", ", ".join(kernels))
        settings["conv_patterns"] = tuple(map(glob.escape, kernels))
        splits += [
            f"{glob.escape(name)}: rows {groups}" for name, groups in kernels.items() if groups > 1
        ]
    settings["splits"] = tuple(splits)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        optimizer = HybridMuon(model.named_parameters(), lr, replicas=replicas, **settings)
    for warning in caught:  # settings cause them, not code, so they belong in the log
        # `Buildable.build` names these as the configuration does.
        if not issubclass(warning.category, IdleSettingWarning):
            log.warning("%s", warning.message)
    _report(optimizer, model)
    return optimizer


def _patterns_of(model: nn.Module, matrices: Sequence[str]) -> tuple[str, ...]:
    """Return patterns of tables, heads, positions and tokens that are not declared as matrices."""
    declared = (*matrices, *DEFAULT_ADAMW_PATTERNS)
    reasons = {
        name: reason
        for name, reason in tables_and_heads(model).items()
        if not any(fnmatchcase(name, pattern) for pattern in declared)
    }
    if reasons:
        listed = ", ".join(f"{name} ({reason})" for name, reason in reasons.items())
        log.info("AdamW by type of module: %s", listed)
    return (*DEFAULT_ADAMW_PATTERNS, *map(glob.escape, reasons))


@register_builder(AdamConfig)
@register_builder(AdamWConfig)
def build_adam(
    config: AdamConfig, model: nn.Module, lr: float | Tensor, replicas: Replicas | None = None
) -> torch.optim.Adam:
    """Make torch's Adam or AdamW for the trainable named parameters of `model`.

    `replicas` share its state.
    """
    kind: type[torch.optim.Adam] = AdamW if isinstance(config, AdamWConfig) else Adam
    options: dict[str, Any] = {
        "lr": lr,
        "betas": (config.adam_beta1, config.adam_beta2),
        "eps": config.adam_eps,
        "weight_decay": config.weight_decay,
    }
    options |= _IMPLEMENTATIONS[config.adam_implementation]
    trainable = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    if replicas is None:
        optimizer = kind(trainable, **options)
    else:
        from deepmd_muon.optim.sharded.zero import shard_state  # imports torch.distributed

        optimizer = shard_state(kind, trainable, replicas, **options)
    _report(optimizer, model)
    return optimizer


def _report(optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
    """Log the numbers of parameters and weights, and the names not trained, on rank 0."""
    if (
        torch.distributed.is_available()
        and torch.distributed.is_initialized()
        and torch.distributed.get_rank() != 0
    ):
        return
    kind = type(optimizer).__name__
    params = list(model.parameters())
    trainable = [p for p in params if p.requires_grad]
    log.info(
        "%s: %d parameters (%d weights), %d of them trainable (%d weights)",
        kind,
        len(params),
        sum(p.numel() for p in params),
        len(trainable),
        sum(p.numel() for p in trainable),
    )
    if isinstance(optimizer, HybridMuon):
        log.info("%s routing: %s", kind, optimizer.routing.summary())
        routes = {entry.route for entry in optimizer.routing}
        if "muon" not in routes and routes & {"adam", "adamw"}:
            log.warning(
                "no matrix takes the Muon route, so that %s steps as Adam does: lower "
                "min_matrix_dim or change the patterns, or set type Adam",
                kind,
            )
    untrained = [name for name, p in model.named_parameters() if not p.requires_grad]
    if untrained:
        log.info("not trainable: %s", ", ".join(untrained))
