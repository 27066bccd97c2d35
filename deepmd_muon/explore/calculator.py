"""The work of a labelling process: build an ASE calculator by name and label structures.

This module does not import torch.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import typing
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from multiprocessing.connection import Connection, wait
from typing import Any

import numpy as np

from deepmd_muon.explore.settings import ExploreError
from deepmd_muon.setting import shown


@dataclass(frozen=True)
class Structure:
    """A structure in plain arrays."""

    symbols: tuple[str, ...]
    positions: np.ndarray  # (natoms, 3) [Å]
    cell: np.ndarray | None  # (3, 3) [Å]

    def atoms(self) -> Any:
        """Return it as `ase.Atoms`."""
        from ase import Atoms

        return Atoms(
            self.symbols, positions=self.positions, cell=self.cell, pbc=self.cell is not None
        )


@dataclass(frozen=True)
class CalculatorChoice:
    """An ASE calculator as module:Class, its keyword arguments, and the settings that errors name.

    These settings are `calculator` and `arguments` behind `prefix`: "labels/" in a file, "--" on a
    command line.
    """

    name: str
    arguments: Mapping[str, Any]
    prefix: str = "labels/"


@dataclass(frozen=True)
class Job:
    """Work for a labelling process: label a structure; without one, only make the calculator."""

    calculator: CalculatorChoice
    structure: Structure | None = None
    stress: bool = False


#: Labels of a structure (see `label`), the reason why it has none, or a mistake in the settings.
Answer = dict[str, Any] | str | ExploreError


def make_calculator(choice: CalculatorChoice) -> Any:
    """Import a module, and call its class or function only if that is one of ASE's calculators.

    Raises
    ------
    ExploreError
        When module or class do not exist, the class is not a calculator, or it refuses the
        arguments.
    """
    module, _, name = choice.name.partition(":")
    setting = f"{choice.prefix}calculator"
    if find_spec("ase") is None:
        raise ExploreError(f"{setting}: ASE is not installed: pip install ase")
    try:
        imported = import_module(module)
    except (Exception, SystemExit) as error:  # a module may raise anything, or end its program
        raise ExploreError(
            f"{setting}: {module} cannot be imported ({_describe(error)}): install it in this "
            "environment, or name another"
        ) from error
    try:
        kind = getattr(imported, name)
    except AttributeError as error:
        raise ExploreError(
            f"{setting}: {module} has no {name}; name one of its calculators"
        ) from error
    if not (_is_calculator(kind) or _returns_calculator(kind)):
        raise ExploreError(
            f"{setting}: {choice.name} is not an ASE calculator class, so it is not called; name a "
            "class that derives from ase.calculators.calculator.Calculator, or a function "
            "annotated to return one"
        )
    try:
        calculator = kind(**choice.arguments)
    except (Exception, SystemExit) as error:
        arguments = shown(str(dict(choice.arguments)))
        raise ExploreError(
            f"{choice.prefix}arguments: {name} refuses {arguments}: {_describe(error)}"
        ) from error
    if not callable(getattr(calculator, "calculate", None)):
        raise ExploreError(
            f"{setting}: {choice.name} is not an ASE calculator; it has no method calculate"
        )
    return calculator


def _is_calculator(kind: object) -> bool:
    """Return whether an object is a class of ASE calculators."""
    from ase.calculators.abc import GetPropertiesMixin

    return (
        isinstance(kind, type)
        and issubclass(kind, GetPropertiesMixin)
        and callable(getattr(kind, "calculate", None))
    )


def _returns_calculator(function: object) -> bool:
    """Return whether a function of Python is annotated to return a calculator."""
    if not callable(function) or isinstance(function, type):
        return False
    try:
        return _is_calculator(typing.get_type_hints(function).get("return"))
    except Exception:  # names in annotations may not exist
        return False


def _describe(error: BaseException) -> str:
    """Return kind and message of an error of another package, on one line and shortened."""
    message = " ".join(str(error).split()) or "no message"
    return f"{type(error).__name__}: {message[:500]}"


def serve(jobs: Connection) -> None:
    """Answer the jobs of a pipe until its other end closes; to be run in a process of its own."""
    _prepare()
    while True:
        try:
            job = jobs.recv()
        except EOFError:
            return
        jobs.send(_answer(job))


def _answer(job: Job) -> Answer:
    try:
        if job.structure is not None:
            return label(job.calculator, job.structure, stress=job.stress)
        make_calculator(job.calculator)
    except ExploreError as error:
        return error
    return {}


def _prepare() -> None:
    """Lead a group of processes, and end it with the parent; use one thread a library by default.

    A calculator may start programs. They are in the group, so the parent can end them with the
    calculator.
    """
    os.setsid()  # Without a terminal: a program that reads from it gets an error and does not stop.

    def end_with_parent() -> None:
        parent = multiprocessing.parent_process()
        if parent is not None:
            wait([parent.sentinel])
            with suppress(ProcessLookupError):
                os.killpg(os.getpid(), signal.SIGKILL)

    threading.Thread(target=end_with_parent, daemon=True).start()
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ.setdefault(name, "1")


def label(choice: CalculatorChoice, structure: Structure, *, stress: bool) -> dict[str, Any] | str:
    """Return energy [eV], forces [eV/Å] and stress [eV/Å³] of a structure, or why there are none.

    Every structure gets a new calculator, so that no label depends on the structure before.

    Raises
    ------
    ExploreError
        When the calculator cannot be made.
    """
    atoms = structure.atoms()
    atoms.calc = make_calculator(choice)
    try:
        results: dict[str, Any] = {"energy": float(atoms.get_potential_energy())}
        results["forces"] = np.array(atoms.get_forces(), dtype=float)
        if stress and structure.cell is not None:
            results["stress"] = np.array(atoms.get_stress(), dtype=float)
    except Exception as error:  # a calculator may raise anything
        return _describe(error)
    if len(atoms) != len(structure.symbols) or results["forces"].shape != structure.positions.shape:
        return (
            f"positions of shape {structure.positions.shape} went in, "
            f"forces of shape {results['forces'].shape} came back"
        )
    not_finite = [key for key, value in results.items() if not np.isfinite(value).all()]
    if not_finite:
        return f"{' and '.join(not_finite)} not finite"
    return results
