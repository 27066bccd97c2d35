"""Freezing: a checkpoint's model as a TorchScript file that is compared with the checkpoint."""

from __future__ import annotations

import io
import logging
import os
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np
import torch

from deepmd_muon.checkpoint_file.frozen_archive import MANIFEST, WEIGHTS, manifest_of
from deepmd_muon.deploy.errors import FreezeError
from deepmd_muon.deploy.program import Program
from deepmd_muon.deploy.structures import random_structures
from deepmd_muon.files import make_folder_of, named_file, replacement
from deepmd_muon.infer.prediction import Prediction
from deepmd_muon.infer.predictor import Predictor
from deepmd_muon.model import DescriptorModel
from deepmd_muon.model.deepmd_kit import UNKNOWN_DISTANCE, to_deepmd_kit
from deepmd_muon.model.nn.networks import dtype_of

log = logging.getLogger(__name__)

# Largest difference between file and checkpoint, relative to the largest force (or energy per atom,
# …), by precision.
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-3}


@dataclass(frozen=True)
class Difference:
    """The largest difference between a frozen file and its checkpoint, over all random structures.

    Attributes
    ----------
    energy
        Of the energy [eV/atom].
    force
        Of a force component [eV/Å].
    virial
        Of a virial component [eV/atom].
    relative
        The largest of these over the largest value of its kind.
    """

    energy: float
    force: float
    virial: float
    relative: float

    def __str__(self) -> str:
        return (
            f"energy {self.energy:.1e} eV/atom, forces {self.force:.1e} eV/Å, "
            f"virial {self.virial:.1e} eV/atom"
        )


def freeze(
    model: DescriptorModel,
    output: str | os.PathLike[str],
    *,
    min_distance: float = UNKNOWN_DISTANCE,
) -> Difference:
    """Write a model as a frozen file, and compare the file with the model.

    Parameters
    ----------
    model
        The model, on the CPU.
    output
        The file; it appears only after the comparison.
    min_distance
        Smallest distance in the training data [Å], for `dp compress`; negative when unknown.

    Returns
    -------
    Difference
        Between the file and the model on random structures.

    Raises
    ------
    ModelError
        When a part of the model cannot be frozen.
    FreezeError
        When the results of the file and of the model differ.
    """
    output = Path(output)
    make_folder_of(output)
    with replacement(output) as temporary:
        save(program_of(model, min_distance), model, temporary, output)
        difference = compare(model, temporary)
        check_equal(model, difference, "the frozen file differs from the checkpoint", output)
    return difference


def program_of(model: DescriptorModel, min_distance: float = UNKNOWN_DISTANCE) -> Program:
    """Return the program of a model."""
    section = to_deepmd_kit(model, {})["_extra_state"]["model_params"]
    return Program(model, section, min_distance).eval()


def save(program: Program, model: DescriptorModel, temporary: Path, output: Path) -> None:
    """Write a program, its weights and a manifest to `temporary`; errors name `output`."""
    weights = io.BytesIO()
    torch.save(to_deepmd_kit(model, {}), weights)
    extra: dict[str, bytes | str] = {WEIGHTS: weights.getvalue()}
    with warnings.catch_warnings():
        # TorchScript is deprecated, but LAMMPS's plugin reads nothing else.
        warnings.simplefilter("ignore", DeprecationWarning)
        scripted = torch.jit.script(program)
        # The manifest lists the other parts: it is made from an archive without it.
        archive = io.BytesIO()
        torch.jit.save(scripted, archive, _extra_files=extra)
        extra[MANIFEST] = manifest_of(archive.getvalue())
        with named_file(temporary, output) as file:
            torch.jit.save(scripted, file, _extra_files=extra)


def check_equal(model: DescriptorModel, difference: Difference, problem: str, output: Path) -> None:
    """Raise FreezeError with a problem if a difference is larger than rounding errors."""
    allowed = max(TOLERANCE[precision] for precision in precisions_of(model))
    if not difference.relative <= allowed:
        raise FreezeError(
            f"{problem} by {difference} (relative {difference.relative:.1e}, allowed "
            f"{allowed:.0e}); nothing was written to {output}: report this with the input file"
        )


def precisions_of(model: DescriptorModel) -> set[torch.dtype]:
    """Return the precisions of a model's parts."""
    sections = (model.settings.descriptor, model.settings.fitting_net)
    return {dtype_of(getattr(settings, "precision", "default")) for settings in sections}


def compare(model: DescriptorModel, path: str | os.PathLike[str], seed: int = 0) -> Difference:
    """Compare a frozen file with a model on random structures, periodic and not."""
    reference = Predictor(model, device="cpu")
    frozen = Predictor(path, device="cpu")
    if frozen.type_map != reference.type_map:
        raise FreezeError(
            f"the file has types {frozen.type_map}, the checkpoint {reference.type_map}"
        )
    structures = random_structures(model, seed)
    return difference_of(
        [reference.predict(*structure) for structure in structures],
        [frozen.predict(*structure) for structure in structures],
    )


def difference_of(expected: Sequence[Prediction], results: Sequence[Prediction]) -> Difference:
    """Return the largest difference between expected predictions and results."""
    pairs = list(zip(map(_per_atom, expected), map(_per_atom, results), strict=True))
    largest: dict[str, float] = {}
    size: dict[str, float] = {}
    for name in ("energy", "atom_energy", "force", "virial"):
        differences = [np.abs(value[name] - result[name]) for value, result in pairs]
        largest[name] = max(float(difference.max()) for difference in differences)
        size[name] = max(float(np.abs(value[name]).max()) for value, _ in pairs)
    # If energies of atoms have both signs, their sum may be small.
    size["energy"] = max(size["energy"], size["atom_energy"])
    ratios = [largest[name] / (size[name] or 1.0) for name in largest]
    return Difference(
        energy=max(largest["energy"], largest["atom_energy"]),
        force=largest["force"],
        virial=largest["virial"],
        relative=float(np.max(ratios)),  # NaN in either must not pass: np.max returns it
    )


def _per_atom(prediction: Prediction) -> dict[str, np.ndarray]:
    """Return the results by name, energy and virial per atom."""
    natoms = prediction.atom_energy.shape[1]
    values = {
        field.name: np.asarray(getattr(prediction, field.name)) for field in fields(prediction)
    }
    values["energy"] = values["energy"] / natoms
    values["virial"] = values["virial"] / natoms
    return values
