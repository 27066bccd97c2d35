"""Molecular dynamics of many structures at once, on CPU and GPU.

One force call evaluates all structures.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from deepmd_muon.dynamics.forces import ForceField
    from deepmd_muon.dynamics.integrators import Barostat, Langevin, Lost, Snapshot, simulate
    from deepmd_muon.dynamics.systems import Systems

_MODULES = {
    "Barostat": "integrators",
    "ForceField": "forces",
    "Langevin": "integrators",
    "Lost": "integrators",
    "Snapshot": "integrators",
    "Systems": "systems",
    "simulate": "integrators",
}
__all__ = [
    "Barostat",
    "ForceField",
    "Langevin",
    "Lost",
    "Snapshot",
    "Systems",
    "simulate",
]


def __getattr__(name: str) -> Any:
    """Import torch when the first name is accessed."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"deepmd_muon.dynamics.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
