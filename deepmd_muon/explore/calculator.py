"""The work of a labelling process: build an ASE calculator by name and label one structure. No torch is imported."""

from __future__ import annotations

import multiprocessing
import os
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from multiprocessing.connection import wait
from typing import Any

import numpy as np

from deepmd_muon.explore.settings import ExploreError


@dataclass(frozen=True)
class Structure:
    """A structure in plain arrays: symbols, positions `(natoms, 3)` [Å], cell `(3, 3)` [Å] or None."""

    symbols: tuple[str, ...]
    positions: np.ndarray
    cell: np.ndarray | None

    def atoms(self) -> Any:
        """Return it as `ase.Atoms`."""
        from ase import Atoms

        return Atoms(
            self.symbols, positions=self.positions, cell=self.cell, pbc=self.cell is not None
        )


def make_calculator(name: str, arguments: Mapping[str, Any], prefix: str = "labels/") -> Any:
    """Return the calculator module:Class, built with keyword arguments.

    Errors name the settings that gave both, `calculator` and `arguments` behind a prefix.

    Raises
    ------
    ExploreError
        When module or class do not exist, or the class refuses the arguments.
    """
    module, _, kind = name.partition(":")
    try:
        found = getattr(import_module(module), kind)
    except ImportError as error:
        raise ExploreError(
            f"{prefix}calculator: {module} cannot be imported ({error}): install it in this environment, "
            "or name another"
        ) from error
    except AttributeError as error:
        raise ExploreError(
            f"{prefix}calculator: {module} has no {kind}; name one of its calculators"
        ) from error
    try:
        calculator = found(**arguments)
    except Exception as error:
        raise ExploreError(
            f"{prefix}arguments: {kind} refuses {dict(arguments)}: {error}"
        ) from error
    if not callable(getattr(calculator, "calculate", None)):
        raise ExploreError(
            f"{prefix}calculator: {name} is not an ASE calculator; it has no method calculate"
        )
    return calculator


def begin() -> None:
    """Prepare a labelling process: one thread a library unless the user says otherwise, and an end with its parent."""

    def follow() -> None:
        parent = multiprocessing.parent_process()
        if parent is not None:
            wait([parent.sentinel])
            os._exit(1)

    threading.Thread(target=follow, daemon=True).start()
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ.setdefault(name, "1")


def label(
    name: str, arguments: Mapping[str, Any], structure: Structure, *, stress: bool
) -> dict[str, Any] | str:
    """Return energy [eV], forces [eV/Å] and stress [eV/Å³] of a structure, or why there are none.

    Every structure has a calculator of its own, so that no label depends on the structure before.
    """
    atoms = structure.atoms()
    atoms.calc = make_calculator(name, arguments)
    try:
        results: dict[str, Any] = {"energy": float(atoms.get_potential_energy())}
        results["forces"] = np.array(atoms.get_forces(), dtype=float)
        if stress and structure.cell is not None:
            results["stress"] = np.array(atoms.get_stress(), dtype=float)
    except Exception as error:  # a calculator may raise anything
        return f"{type(error).__name__}: {' '.join(str(error).split()) or 'no message'}"
    if len(atoms) != len(structure.symbols) or results["forces"].shape != structure.positions.shape:
        return (
            f"{len(structure.symbols)} atoms went in, forces of {len(results['forces'])} came back"
        )
    wrong = [key for key, value in results.items() if not np.isfinite(value).all()]
    return f"{' and '.join(wrong)} not finite" if wrong else results
