"""Molecular dynamics and relaxations of many structures at once: one force call for all of them, on CPU and GPU."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from deepmd_muon.dynamics.barostat import Barostat
    from deepmd_muon.dynamics.forces import ForceField
    from deepmd_muon.dynamics.integrators import Langevin, Lost, Snapshot, simulate
    from deepmd_muon.dynamics.relaxation import Relaxed, relax
    from deepmd_muon.dynamics.systems import Systems

_PLACES = {
    "Barostat": "barostat",
    "ForceField": "forces",
    **dict.fromkeys(("Langevin", "Lost", "Snapshot", "simulate"), "integrators"),
    **dict.fromkeys(("Relaxed", "relax"), "relaxation"),
    "Systems": "systems",
}
__all__ = [
    "Barostat",
    "ForceField",
    "Langevin",
    "Lost",
    "Relaxed",
    "Snapshot",
    "Systems",
    "relax",
    "simulate",
]


def __getattr__(name: str) -> Any:
    """Import torch when the first name is accessed."""
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"deepmd_muon.dynamics.{_PLACES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
