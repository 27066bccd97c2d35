"""HybridMuon's step on several ranks: a plan of who orthogonalizes what, and the transport that carries it out."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from deepmd_muon.optim.sharded.layout import Layout, Split
    from deepmd_muon.optim.sharded.plan import Plan, PlannedParameter, make_plan, plan_from_routes
    from deepmd_muon.optim.sharded.settings import ShardedSettings

_HOMES = {
    "Layout": "layout",
    "Plan": "plan",
    "PlannedParameter": "plan",
    "ShardedSettings": "settings",
    "Split": "layout",
    "make_plan": "plan",
    "plan_from_routes": "plan",
}

__all__ = ["Layout", "Plan", "PlannedParameter", "ShardedSettings", "Split", "make_plan", "plan_from_routes"]


def __getattr__(name: str) -> Any:
    # Single-process training never imports torch.distributed because of this package.
    if name in _HOMES:
        from importlib import import_module

        return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
