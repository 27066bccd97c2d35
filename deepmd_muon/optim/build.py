"""Build optimizers from their configurations, and log the result."""

from __future__ import annotations

import glob
import json
import logging
import math
import warnings
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from deepmd_muon.optim.buildable import register_builder
from deepmd_muon.optim.config import AdamImplementation, HybridMuonConfig
from deepmd_muon.optim.errors import IdleSettingWarning
from deepmd_muon.optim.groups.group_settings import CHOSEN, constructed_of
from deepmd_muon.optim.hybrid_muon import HybridMuon
from deepmd_muon.optim.other_configs import (
    CHOSEN_BY_BUILD,
    AdamConfig,
    AdamWConfig,
    MuonConfig,
)
from deepmd_muon.optim.routing.modules import (
    convolutions,
    declared_routes,
    declared_splits,
    fused_splits,
    rates_and_undecayed,
    shapes_of_tables,
    stacked_matrices,
    tables_and_heads,
)
from deepmd_muon.optim.routing.routes import RouteTable, RoutingRules, choose_route
from deepmd_muon.optim.routing.views import FusedSplit, effective_shape
from deepmd_muon.optim.torch_hooks import Adam, AdamW

if TYPE_CHECKING:
    from deepmd_muon.optim.buildable import Replicas
    from deepmd_muon.optim.qk_clip.layers import QKClip

log = logging.getLogger(__name__)

# See `_ratio_by_width`.
_WIDTH_OF_EQUAL_RATES = 64

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
    **arguments: Any,
) -> HybridMuon:
    """Make a HybridMuon, or a plain Muon with AdamW for the rest, for a model."""
    settings = {**vars(config), **arguments, "qk_clip": qk_clip}
    for key, names in _declared_patterns(config, model).items():
        settings[key] = (*(settings[key] or ()), *names)
    splits = [*config.splits, *declared_splits(model)]
    if config.conv_patterns is None:
        kernels = convolutions(model)
        if kernels:
            log.info("matrices (out, in times kernel) of convolutions: %s", ", ".join(kernels))
        settings["conv_patterns"] = tuple(map(glob.escape, kernels))
        splits += [
            f"{glob.escape(name)}: rows {groups}" for name, groups in kernels.items() if groups > 1
        ]
    omitted: list[str] = []  # settings and patterns that the model decides
    if isinstance(config, MuonConfig):
        fused = fused_splits(model)
        splits += fused
        settings["lr_adjust_coeff"] = settings.pop("rms_coefficient")
        settings["magma_muon"] = False
        choices = _chosen_settings(config, model, settings, splits)
        rates = {*choices.get("adam_patterns", ())} - {*settings["adam_patterns"]}
        omitted = [key for key in CHOSEN_BY_BUILD if getattr(config, key) is None]
        omitted += [*fused, *sorted(rates)]
        settings |= choices
    else:
        settings["adam_betas"] = (settings.pop("adam_beta1"), settings.pop("adam_beta2"))
    settings["splits"] = tuple(splits)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        optimizer = HybridMuon(model.named_parameters(), lr, replicas=replicas, **settings)
    if omitted:
        for group in optimizer.param_groups:
            group["constructed"] = json.dumps({**constructed_of(group), CHOSEN: omitted})
    for warning in caught:  # settings cause them, not code, so they belong in the log
        # `Buildable.build` names these as the configuration does.
        if not issubclass(warning.category, IdleSettingWarning):
            log.warning("%s", warning.message)
    _report(optimizer, model)
    return optimizer


_PATTERNS_OF_ROUTE = {
    "muon": "muon_patterns",
    "adam": "adam_patterns",
    "adamw": "adamw_patterns",
}


def _declared_patterns(
    config: HybridMuonConfig | MuonConfig, model: nn.Module
) -> dict[str, list[str]]:
    """Return patterns of the routes that the model declares; patterns of the user come first."""
    patterns = [
        pattern for key in _PATTERNS_OF_ROUTE.values() for pattern in getattr(config, key) or ()
    ]
    declared: dict[str, list[str]] = {}
    for name, route in declared_routes(model).items():
        if not _matches(name, patterns):
            declared.setdefault(_PATTERNS_OF_ROUTE[route], []).append(glob.escape(name))
    return declared


def _chosen_settings(
    config: MuonConfig, model: nn.Module, settings: Mapping[str, Any], splits: Sequence[str]
) -> dict[str, Any]:
    """Return the settings that a `MuonConfig` leaves to the model.

    `settings` have the patterns of convolutions and of declared routes, `splits` all splits.
    """
    fused = [FusedSplit.parse(split).pattern for split in splits]
    adamw_patterns = settings["adamw_patterns"] or ()
    decided = [*settings["muon_patterns"], *settings["adam_patterns"], *adamw_patterns]
    choices: dict[str, Any] = {
        "vector_route": config.vector_route or "adam",
        "expert_patterns": config.expert_patterns or (),
    }
    if config.adamw_patterns is None:
        matrices = [*decided, *fused, *(config.expert_patterns or ())]
        rates = _undecided(rates_and_undecayed(model), matrices)
        tables = _undecided(tables_and_heads(model), [*matrices, *map(glob.escape, rates)])
        _log_found("Adam", rates)
        _log_found("AdamW", tables)
        choices["adam_patterns"] = (*settings["adam_patterns"], *map(glob.escape, rates))
        choices["adamw_patterns"] = (*adamw_patterns, *map(glob.escape, tables))
        decided += [*choices["adam_patterns"], *choices["adamw_patterns"]]
    if config.expert_patterns is None and config.muon_mode == "2d":
        stacks = _undecided(stacked_matrices(model), [*decided, *settings["conv_patterns"]])
        _log_found("Muon", stacks)
        choices["expert_patterns"] = tuple(map(glob.escape, stacks))
    routing = {**settings, **choices, "splits": tuple(splits)}
    choices["adam_lr_ratio"] = config.adam_lr_ratio or _ratio_by_width(model, routing)
    return choices


def _ratio_by_width(model: nn.Module, settings: Mapping[str, Any]) -> float:
    """Return the rate of AdamW's part divided by Muon's, from the width of the largest table.

    Tables are those of embeddings and output layers of their shape; positions, tokens and
    classifiers are none. The width is their last dimension. Up to `_WIDTH_OF_EQUAL_RATES` both
    rates are best equal; beyond it, AdamW's is best proportional to 1/width
    (`source/benchmarks/small_gpt_race.py --sizes`, 0.1 to 100 million weights). Without tables both
    are equal: in a ViT of width 192 a third of the rate is worse. With the scaling 'match_rms',
    Muon's rate is one of AdamW's.
    """
    if settings["scaling"] == "match_rms":
        return 1.0
    rules = RoutingRules(**{key: settings[key] for key in RoutingRules.__dataclass_fields__})
    shapes = shapes_of_tables(model)
    tables = [
        p.shape
        for name, p in model.named_parameters()
        if tuple(p.shape) in shapes
        and choose_route(name, tuple(p.shape), rules, trainable=p.requires_grad).route == "adamw"
    ]
    if not tables:
        return 1.0
    return min(1.0, _WIDTH_OF_EQUAL_RATES / max(tables, key=math.prod)[-1])


def _matches(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _undecided(reasons: Mapping[str, str], patterns: Sequence[str]) -> dict[str, str]:
    """Return the names that no pattern matches, with their reasons."""
    return {name: reason for name, reason in reasons.items() if not _matches(name, patterns)}


def _log_found(route: str, reasons: Mapping[str, str]) -> None:
    if reasons:
        listed = ", ".join(f"{name} ({reason})" for name, reason in reasons.items())
        log.info("%s by the model's modules: %s", route, listed)


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
        _warn_without_view(optimizer.routing)
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


def _warn_without_view(routing: RouteTable) -> None:
    """Warn if weights of three or more dimensions that are seen as no matrices are the majority."""
    sizes = {entry: math.prod(entry.shape) for entry in routing if entry.route != "frozen"}
    without = [
        entry for entry in sizes if entry.route != "muon" and len(effective_shape(entry.shape)) > 2
    ]
    if sum(sizes[entry] for entry in without) * 2 > sum(sizes.values()):
        log.warning(
            "more than half of the weights have no matrix route: %s. Name them in expert_patterns "
            "(one matrix for each index of the first dimension), in conv_patterns or muon_patterns",
            ", ".join(f"{entry.name} {entry.shape}" for entry in without),
        )
