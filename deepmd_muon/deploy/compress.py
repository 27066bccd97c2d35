"""Compression: frozen files with tables in place of embedding nets, compared with the nets."""

from __future__ import annotations

import logging
import math
import os
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from deepmd_muon.deploy.errors import FreezeError
from deepmd_muon.deploy.freeze import (
    Difference,
    check_equal,
    difference_of,
    precisions_of,
    program_of,
    save,
)
from deepmd_muon.deploy.program import Program, check_coverage
from deepmd_muon.deploy.structures import Structure, structures_with_close_atoms
from deepmd_muon.files import make_folder_of, replacement
from deepmd_muon.infer.frozen import FrozenModel
from deepmd_muon.infer.prediction import Prediction
from deepmd_muon.infer.predictor import Predictor
from deepmd_muon.model import DescriptorModel
from deepmd_muon.model.deepmd_kit import UNKNOWN_DISTANCE
from deepmd_muon.model.registry import DESCRIPTORS

log = logging.getLogger(__name__)

STEPS = tuple(0.4 * 0.5**k for k in range(7))
"""Intervals of the tables to choose from, in units of the nets' input."""

EXTRAPOLATE = 2.0
"""The tables reach by default to this multiple of the largest 1/distance in the training data."""

FORCE = 1e-6
"""Largest change of a force that a chosen step may cause [eV/Å]."""

ROUNDING = {torch.float64: 1e-12, torch.float32: 1e-5}
"""Allowance for rounding errors in addition to `FORCE`, relative to the largest force."""

ASSUMED_DISTANCE = 0.5  # [Å] if that of the data is unknown; bonds with hydrogen have 0.74 and more


@dataclass(frozen=True)
class Compression:
    """The result of `compress`.

    Attributes
    ----------
    difference
        Between the file and the model on random structures, some with atoms at and below the
        smallest distance.
    step
        Interval of the tables in the input of the nets.
    nearest
        Smallest distance that the tables cover [Å].
    allowed
        Largest difference of forces with which a step is accepted [eV/Å].
    """

    difference: Difference
    step: float
    nearest: float
    allowed: float


def compress(
    model: DescriptorModel,
    output: str | os.PathLike[str],
    *,
    min_distance: float = UNKNOWN_DISTANCE,
    step: float | None = None,
    extrapolate: float = EXTRAPOLATE,
) -> Compression:
    """Write a model as a frozen file with tables in place of its embedding nets.

    Parameters
    ----------
    model
        The model, on the CPU.
    output
        The file; it appears only after the comparison.
    min_distance
        Smallest distance in the training data [Å]; 0.5 is taken if it is negative, or infinite as
        in data without neighbours.
    step
        Interval of the tables in the input of the nets; by default the longest of `STEPS` that
        changes forces by at most `FORCE`.
    extrapolate
        The tables reach down to min_distance/extrapolate. Below that, the program evaluates the
        nets themselves.

    Raises
    ------
    ModelError
        When a part of the model cannot be frozen, or a table would be too large.
    FreezeError
        When the descriptor has no tables, or no step is fine enough.
    """
    output = Path(output)
    tabulated = _table_of(model)
    settings = model.settings.descriptor
    label = f"compressed {DESCRIPTORS.name_of(settings)!r}"
    check_coverage(label, getattr(tabulated, "covers", None), settings)
    program = program_of(model, min_distance)
    closest = min_distance if 0 < min_distance < math.inf else ASSUMED_DISTANCE
    nearest = closest / extrapolate
    reference = Predictor(model, device="cpu")
    structures = structures_with_close_atoms(model, closest)
    expected = [reference.predict(*structure) for structure in structures]

    with_nets: Any = program.descriptor
    nets_difference = difference_of(expected, _evaluate_all(program, structures))
    check_equal(
        model,
        nets_difference,
        "the program with the nets themselves differs from the model",
        output,
    )
    rounding = max(ROUNDING[precision] for precision in precisions_of(model))
    allowed = FORCE + rounding * max(float(np.abs(p.force).max()) for p in expected)
    for tried in STEPS if step is None else (step,):
        program.descriptor = tabulated(with_nets, step=tried, nearest=nearest)
        from_tables = _evaluate_all(program, structures)
        difference = difference_of(expected, from_tables)
        log.debug("step %g: %s", tried, difference)
        if difference.force <= allowed:
            break
    else:
        # A user's step may be coarse, but not useless.
        if step is None or not difference.relative < 1e-2:
            raise FreezeError(
                f"tables of step {tried:g} change {difference}, where {allowed:.0e} eV/Å was "
                f"allowed; nothing was "
                "written: use dp freeze, whose file holds the nets (activations with a kink, like "
                "relu, need them)"
            )

    program.descriptor.warned = False  # the file warns its users again
    make_folder_of(output)
    with replacement(output) as temporary:
        save(program, model, temporary, output)
        frozen = Predictor(temporary, device="cpu")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # about the structures with close atoms
            from_file = [frozen.predict(*structure) for structure in structures]
        written = difference_of(from_tables, from_file)
        check_equal(model, written, "the frozen file differs from the program in it", output)
    return Compression(
        difference=difference_of(expected, from_file),
        step=tried,
        nearest=nearest,
        allowed=allowed,
    )


def _table_of(model: DescriptorModel) -> Any:
    """Return the class of the compressed descriptor."""
    tabulated = DESCRIPTORS.tabulated(model.settings.descriptor)
    if tabulated is None:
        kind = DESCRIPTORS.name_of(model.settings.descriptor)
        raise FreezeError(
            f"the descriptor {kind!r} cannot be compressed: tables need features that depend on "
            f"one distance, as those "
            "of se_e2_a and of DPA-1 without attention do. Nothing was written: use dp freeze"
        )
    return tabulated


def _evaluate_all(program: Program, structures: list[Structure]) -> list[Prediction]:
    return [evaluate(program, structure) for structure in structures]


def evaluate(program: Program, structure: Structure) -> Prediction:
    """Return the results of a program that is not in a file."""
    arguments = [
        None if array is None else torch.from_numpy(array)[None]
        for array in structure.for_program()
    ]
    with warnings.catch_warnings(), torch.enable_grad():  # a program may differentiate
        warnings.simplefilter("ignore", UserWarning)
        results = program(*arguments)
    values = {name: value.detach().double().numpy() for name, value in results.items()}
    return Prediction(
        values["energy"][:, 0], values["force"], values["virial"], values["atom_energy"][..., 0]
    )


def restored(path: str | os.PathLike[str], *, trust: bool = False) -> tuple[DescriptorModel, float]:
    """Return the model of a frozen file of this package, and the smallest distance in its data [Å].

    The distance is −1 if it is unknown.

    Raises
    ------
    CheckpointError
        When the file cannot be read.
    FreezeError
        When the file does not hold the weights that it was made from.
    """
    frozen = FrozenModel(path, "cpu", trust=trust)
    model = frozen.restored()
    if not isinstance(model, DescriptorModel):
        raise FreezeError(
            f"{path} does not hold the weights that it was made from: give the checkpoint, dp "
            "compress -i model.ckpt.pt"
        )
    program: Any = frozen.program
    return model, float(program.get_min_nbor_dist())
