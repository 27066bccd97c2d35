"""Freezing: a checkpoint's model as a TorchScript file, compared with the checkpoint before it gets its final name."""

from __future__ import annotations

import io
import logging
import os
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from deepmd_muon.deploy.errors import FreezeError
from deepmd_muon.deploy.program import Program
from deepmd_muon.files import make_folder_of, named_file, replacement
from deepmd_muon.infer.frozen_archive import MANIFEST, WEIGHTS, manifest_of
from deepmd_muon.infer.prediction import Prediction
from deepmd_muon.infer.predictor import Predictor
from deepmd_muon.model import EnergyModel
from deepmd_muon.model.deepmd_kit import UNKNOWN_DISTANCE, to_deepmd_kit
from deepmd_muon.model.nn.networks import dtype_of

log = logging.getLogger(__name__)

# Largest difference between file and checkpoint, relative to the largest force (or energy per atom, …), by precision.
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-3}
STRUCTURES = 4
VOLUME_PER_ATOM = 10.0  # [Å³], about that of water


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
        return f"energy {self.energy:.1e} eV/atom, forces {self.force:.1e} eV/Å, virial {self.virial:.1e} eV/atom"


def freeze(
    model: EnergyModel, output: str | os.PathLike[str], *, min_distance: float = UNKNOWN_DISTANCE
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
        allowed = max(TOLERANCE[precision] for precision in precisions_of(model))
        if not difference.relative <= allowed:
            raise FreezeError(
                f"the frozen file differs from the checkpoint by {difference} (relative {difference.relative:.1e}, "
                f"allowed {allowed:.0e}); nothing was written to {output}: report this with the input file"
            )
    return difference


def program_of(model: EnergyModel, min_distance: float = UNKNOWN_DISTANCE) -> Program:
    """Return the program of a model."""
    return Program(
        model, to_deepmd_kit(model, {})["_extra_state"]["model_params"], min_distance
    ).eval()


def save(program: Program, model: EnergyModel, temporary: Path, output: Path) -> None:
    """Write a program, the weights and the list of all parts to `temporary`; errors name the file `output`."""
    weights, plain = io.BytesIO(), io.BytesIO()
    torch.save(to_deepmd_kit(model, {}), weights)
    extra: dict[str, bytes | str] = {WEIGHTS: weights.getvalue()}
    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore", DeprecationWarning
        )  # of TorchScript: LAMMPS's plugin reads nothing else
        scripted = torch.jit.script(program)
        torch.jit.save(scripted, plain, _extra_files=extra)
        with named_file(temporary, output) as file:
            torch.jit.save(
                scripted, file, _extra_files=extra | {MANIFEST: manifest_of(plain.getvalue())}
            )


def precisions_of(model: EnergyModel) -> set[torch.dtype]:
    """Return the precisions of a model's parts."""
    parts = model.settings.descriptor, model.settings.fitting_net
    return {dtype_of(getattr(part, "precision", "default")) for part in parts}


def compare(model: EnergyModel, path: str | os.PathLike[str], seed: int = 0) -> Difference:
    """Compare a frozen file with a model on random structures, periodic and not."""
    reference, frozen = Predictor(model, device="cpu"), Predictor(path, device="cpu")
    if frozen.type_map != reference.type_map:
        raise FreezeError(
            f"the file has types {frozen.type_map}, the checkpoint {reference.type_map}"
        )
    random = np.random.default_rng(seed)
    structures = [
        random_structure(random, model, periodic=n < STRUCTURES - 1) for n in range(STRUCTURES)
    ]
    return difference_of(
        [
            tuple(predictor.predict(*structure) for predictor in (reference, frozen))
            for structure in structures
        ]
    )


class Structure(NamedTuple):
    """The arguments of `Predictor.predict` for one frame.

    Attributes
    ----------
    coord
        Positions (natoms, 3) [Å].
    box
        Cell vectors (3, 3) [Å], or None.
    atype
        Types (natoms,).
    fparam, aparam
        Frame parameters (numb_fparam,) and atomic parameters (natoms, numb_aparam); None where the model reads none.
    """

    coord: np.ndarray
    box: np.ndarray | None
    atype: np.ndarray
    fparam: np.ndarray | None = None
    aparam: np.ndarray | None = None

    def for_program(self) -> tuple[np.ndarray | None, ...]:
        """Return the arguments of `Program.forward` in their order, without the axis of frames."""
        return self.coord, self.atype, self.box, self.fparam, self.aparam


def random_structure(
    random: np.random.Generator, model: EnergyModel, *, periodic: bool
) -> Structure:
    """Return atoms on a jittered grid, about 1 Å apart, in a triclinic cell or none, and parameters like the data's."""
    points = 3
    edge = (VOLUME_PER_ATOM * points**3) ** (1 / 3)
    box = edge * (np.eye(3) + random.uniform(-0.1, 0.1, size=(3, 3)))
    grid = np.stack(np.meshgrid(*[np.arange(points)] * 3, indexing="ij"), axis=-1).reshape(-1, 3)
    coord = (grid + random.uniform(-0.2, 0.2, size=grid.shape)) / points @ box
    atype = random.integers(model.ntypes, size=len(coord))
    drawn: list[np.ndarray | None] = []
    for name, atoms in (("fparam", ()), ("aparam", (len(coord),))):
        mean = getattr(model.atomic_model.fitting_net, f"{name}_avg", None)
        if mean is None:
            drawn.append(None)
            continue
        scale = getattr(model.atomic_model.fitting_net, f"{name}_inv_std").double().cpu().numpy()
        drawn.append(mean.double().cpu().numpy() + random.normal(size=(*atoms, len(scale))) / scale)
    return Structure(coord, box if periodic else None, atype, *drawn)


def _per_atom(prediction: Prediction) -> dict[str, np.ndarray]:
    natoms = prediction.atom_energy.shape[1]
    values = {
        field.name: np.asarray(getattr(prediction, field.name)) for field in fields(prediction)
    }
    return values | {"energy": values["energy"] / natoms, "virial": values["virial"] / natoms}


def difference_of(predictions: Sequence[tuple[Prediction, ...]]) -> Difference:
    """Return the largest difference between pairs of predictions, relative to the largest value of the first ones."""
    pairs = [(_per_atom(one), _per_atom(other)) for one, other in predictions]
    found, relative = {}, 0.0
    for name in ("energy", "atom_energy", "force", "virial"):
        found[name] = max(float(np.abs(one[name] - other[name]).max()) for one, other in pairs)
        scale = max(float(np.abs(one[name]).max()) for one, _ in pairs)
        # NaN in either must not pass: comparisons with it are false.
        relative = max(
            relative, found[name] / scale if scale else found[name], key=lambda x: (np.isnan(x), x)
        )
    return Difference(
        max(found["energy"], found["atom_energy"]), found["force"], found["virial"], relative
    )
