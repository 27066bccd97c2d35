"""Parameter groups: names for parameters given without, and a group's settings as the dataclass that checks them."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

from torch import Tensor

from deepmd_muon.optim.config import HybridMuonConfig
from deepmd_muon.optim.views import MatrixView

Params = Iterable[Tensor] | Iterable[tuple[str, Tensor]] | Iterable[dict[str, Any]]

_PLAIN_SETTINGS = (
    *("momentum", "weight_decay", "lr_adjust", "lr_adjust_coeff", "muon_mode", "enable_gram", "flash_muon"),
    *("magma_muon", "nesterov", "scaling", "adam_lr_ratio", "schedule", "precision", "min_matrix_dim"),
    "on_route_change",
)


def with_names(params: Params, named_parameters: Iterable[tuple[str, Tensor]] | None) -> list[Any]:
    """Turn plain parameters and their names, given apart, into the (name, parameter) pairs torch knows."""
    given: list[Any] = list(params)
    if named_parameters is None:
        return given
    names = {p: name for name, p in named_parameters}

    def pair(p: Any) -> Any:
        if not isinstance(p, Tensor):
            return p  # already a pair
        if p not in names:
            raise ValueError(f"named_parameters has no name for a parameter of shape {tuple(p.shape)}")
        return names[p], p

    return [
        {**item, "params": [pair(p) for p in _as_list(item["params"])]} if isinstance(item, dict) else pair(item)
        for item in given
    ]


def _as_list(params: Any) -> list[Any]:
    return [params] if isinstance(params, Tensor) else list(params)


@functools.lru_cache(maxsize=256)
def _settings(**values: Any) -> HybridMuonConfig:
    return HybridMuonConfig(**values)


def group_settings(group: dict[str, Any]) -> HybridMuonConfig:
    """Return a parameter group's settings as the dataclass that checks them."""
    beta1, beta2 = group["adam_betas"]
    return _settings(
        adam_beta1=beta1,
        adam_beta2=beta2,
        adam_patterns=tuple(group["adam_patterns"]),
        adamw_patterns=tuple(group["adamw_patterns"]),
        **{key: group[key] for key in _PLAIN_SETTINGS},
    )


def update_scale(view: MatrixView, settings: HybridMuonConfig) -> float:
    """Return the factor of lr · O for matrices of this view."""
    scaling = settings.scaling or ("match_rms" if settings.lr_adjust <= 0 else "rectangular")
    if scaling == "match_rms":
        return float(settings.lr_adjust_coeff * max(view.rows, view.columns) ** 0.5)
    return float(max(1.0, view.rows / view.columns) ** 0.5)


def adam_lr_ratio(settings: HybridMuonConfig) -> float:
    """Return the learning rate of the Adam routes divided by that of the Muon route."""
    if settings.adam_lr_ratio is not None:
        return settings.adam_lr_ratio
    return 1.0 if settings.lr_adjust <= 0 else 1.0 / settings.lr_adjust
