"""HybridMuon and what it is made of; usable with any torch model, needs nothing else of this package."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from deepmd_muon.optim.config import AdamConfig, AdamWConfig, HybridMuonConfig
    from deepmd_muon.optim.errors import InvalidGradientError, RoutingMismatchError
    from deepmd_muon.optim.hybrid_muon import HybridMuon
    from deepmd_muon.optim.polar import orthogonalize
    from deepmd_muon.optim.routing import RouteEntry, RouteTable, RoutingRules

_HOMES = {
    "AdamConfig": "config",
    "AdamWConfig": "config",
    "HybridMuon": "hybrid_muon",
    "HybridMuonConfig": "config",
    "InvalidGradientError": "errors",
    "RouteEntry": "routing",
    "RouteTable": "routing",
    "RoutingMismatchError": "errors",
    "RoutingRules": "routing",
    "orthogonalize": "polar",
}

__all__ = [
    "AdamConfig",
    "AdamWConfig",
    "HybridMuon",
    "HybridMuonConfig",
    "InvalidGradientError",
    "RouteEntry",
    "RouteTable",
    "RoutingMismatchError",
    "RoutingRules",
    "orthogonalize",
]


def __getattr__(name: str) -> Any:
    # Settings are read by the input checker, which must not pay for importing torch.
    if name in _HOMES:
        from importlib import import_module

        return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
