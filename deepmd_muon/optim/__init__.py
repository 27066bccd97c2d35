"""HybridMuon and its parts, for any torch model; independent of the rest of the package."""

from __future__ import annotations

import warnings
from importlib import import_module
from typing import TYPE_CHECKING, Any

from deepmd_muon.optim.buildable import IMPORT_BUILDERS

if TYPE_CHECKING:
    from deepmd_muon.optim.buildable import Buildable
    from deepmd_muon.optim.clip_gradients import clip_adam_grad_norm_
    from deepmd_muon.optim.config import HybridMuonConfig
    from deepmd_muon.optim.errors import (
        CaptureError,
        ForeignStateError,
        InvalidGradientError,
        InvalidParameterError,
        InvalidSettingError,
        InvalidShapeError,
        NonFiniteGradientError,
        QKClipError,
        RoutingMismatchError,
    )
    from deepmd_muon.optim.front_door import muon_for
    from deepmd_muon.optim.hybrid_muon import HybridMuon
    from deepmd_muon.optim.other_configs import (
        AdamConfig,
        AdamWConfig,
        Advanced,
        MuonConfig,
        register_optimizer,
    )
    from deepmd_muon.optim.polar import SCHEDULES, Schedule, orthogonalize
    from deepmd_muon.optim.polar.dispatch import describe as describe_kernels
    from deepmd_muon.optim.routing.routes import RouteEntry, RouteTable, RoutingRules
    from deepmd_muon.optim.rules.interface import MatrixRule, StateTensor
    from deepmd_muon.optim.rules.registry import register_rule
    from deepmd_muon.optim.state.deepmd_kit import name_deepmd_kit_state
    from deepmd_muon.optim.state.others import import_state

_NAMES = {
    "buildable": ("Buildable",),
    "clip_gradients": ("clip_adam_grad_norm_",),
    "config": ("HybridMuonConfig",),
    "errors": (
        *(
            "CaptureError",
            "ForeignStateError",
            "InvalidGradientError",
            "InvalidParameterError",
            "InvalidSettingError",
        ),
        *("InvalidShapeError", "NonFiniteGradientError", "QKClipError", "RoutingMismatchError"),
    ),
    "front_door": ("muon_for",),
    "hybrid_muon": ("HybridMuon",),
    "other_configs": ("AdamConfig", "AdamWConfig", "Advanced", "MuonConfig", "register_optimizer"),
    "polar": ("SCHEDULES", "Schedule", "orthogonalize"),
    "qk_clip": ("QKClip",),
    "routing.routes": ("RouteEntry", "RouteTable", "RoutingRules"),
    "rules.interface": ("MatrixRule", "StateTensor"),
    "rules.registry": ("register_rule",),
    "state.deepmd_kit": ("name_deepmd_kit_state",),
    "state.others": ("import_state",),
}
_MODULES = {name: module for module, names in _NAMES.items() for name in names}
_MODULES["describe_kernels"] = "polar.dispatch:describe"

__all__ = [
    "SCHEDULES",
    "AdamConfig",
    "AdamWConfig",
    "Advanced",
    "Buildable",
    "CaptureError",
    "ForeignStateError",
    "HybridMuon",
    "HybridMuonConfig",
    "InvalidGradientError",
    "InvalidParameterError",
    "InvalidSettingError",
    "InvalidShapeError",
    "MatrixRule",
    "MuonConfig",
    "NonFiniteGradientError",
    "QKClip",
    "QKClipError",
    "RouteEntry",
    "RouteTable",
    "RoutingMismatchError",
    "RoutingRules",
    "Schedule",
    "StateTensor",
    "clip_adam_grad_norm_",
    "describe_kernels",
    "import_state",
    "muon_for",
    "name_deepmd_kit_state",
    "orthogonalize",
    "register_optimizer",
    "register_rule",
]


IMPORT_BUILDERS.append(lambda: import_module(f"{__name__}.build"))


def __getattr__(name: str) -> Any:
    if name == "HybridMuonOptimizer":  # of deepmd-kit
        text = "HybridMuonOptimizer is called HybridMuon in deepmd_muon.optim"
        warnings.warn(text, DeprecationWarning, stacklevel=2)
        name = "HybridMuon"
    # The input checker reads settings and must not import torch.
    if name in _MODULES:
        module, _, inside = _MODULES[name].partition(":")
        return getattr(import_module(f"{__name__}.{module}"), inside or name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
