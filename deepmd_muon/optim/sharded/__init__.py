"""HybridMuon's step on several ranks: a plan of which rank orthogonalizes which matrix, and its execution."""

from __future__ import annotations

import warnings
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from deepmd_muon.optim.sharded.layout import Layout, ShardPlacement
    from deepmd_muon.optim.sharded.plan import Plan, PlannedParameter, make_plan, plan_from_routes
    from deepmd_muon.optim.sharded_config import ShardedSettings

_MODULES = {
    "Layout": f"{__name__}.layout",
    "Plan": f"{__name__}.plan",
    "PlannedParameter": f"{__name__}.plan",
    "ShardPlacement": f"{__name__}.layout",
    "ShardedSettings": "deepmd_muon.optim.sharded_config",
    "make_plan": f"{__name__}.plan",
    "plan_from_routes": f"{__name__}.plan",
}

__all__ = [
    "Layout",
    "Plan",
    "PlannedParameter",
    "ShardPlacement",
    "ShardedSettings",
    "make_plan",
    "plan_from_routes",
]


def __getattr__(name: str) -> Any:
    # Lazily, so that single-process training does not import torch.distributed.
    if name == "Split":
        warnings.warn(
            "deepmd_muon.optim.sharded.Split is now ShardPlacement",
            DeprecationWarning,
            stacklevel=2,
        )
        name = "ShardPlacement"
    if name in _MODULES:
        return getattr(import_module(_MODULES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
