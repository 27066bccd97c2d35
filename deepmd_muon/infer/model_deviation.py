"""Model deviation: the disagreement of several models, by which active learning selects structures."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from deepmd_muon.data import Frames, Parameters, System
from deepmd_muon.files import append_to, fresh_file, make_folder_of
from deepmd_muon.infer.errors import PredictionInputError
from deepmd_muon.infer.prediction import Prediction
from deepmd_muon.infer.predictor import Predictor, naming

#: Columns of `model_devi.out`, in order.
COLUMNS = (
    *(f"{kind}_devi_{quantity}" for quantity in "vf" for kind in ("max", "min", "avg")),
    "devi_e",
)


@dataclass(frozen=True)
class DeviationSettings:
    """The definition of a deviation.

    Attributes
    ----------
    real_error
        Root mean square error against the labels instead of the spread between models.
    relative
        Divide the deviation of a force by its magnitude plus this level [eV/Å]; None does not divide.
    relative_virial
        The same for the virial [eV/atom].
    """

    real_error: bool = False
    relative: float | None = None
    relative_virial: float | None = None


def _spread(values: np.ndarray, real: np.ndarray | None) -> np.ndarray:
    """Return the standard deviation over the first axis, or the root mean square error against `real`."""
    spread: np.ndarray = (
        np.std(values, axis=0) if real is None else np.sqrt(np.mean((values - real) ** 2, axis=0))
    )
    return spread


def _relative(
    deviation: np.ndarray, values: np.ndarray, real: np.ndarray | None, level: float | None
) -> np.ndarray:
    if level is None:
        return deviation
    reference = np.mean(values, axis=0) if real is None else real
    magnitude = np.linalg.norm(reference, axis=-1)
    per_value = (
        magnitude.reshape(magnitude.shape + (1,) * (deviation.ndim - magnitude.ndim)) + level
    )
    divided: np.ndarray = deviation / per_value
    return divided


def deviation_of_force(
    forces: np.ndarray, real: np.ndarray | None = None, relative: float | None = None
) -> np.ndarray:
    """Return the deviation of the force on every atom (nframes, natoms) [eV/Å].

    Parameters
    ----------
    forces
        Of every model (nmodels, nframes, natoms, 3) [eV/Å].
    real
        Labels (nframes, natoms, 3); None compares the models with their mean.
    relative
        See `DeviationSettings`.
    """
    return _relative(np.linalg.norm(_spread(forces, real), axis=-1), forces, real, relative)


def model_deviation(
    predictors: Sequence[Predictor], frames: Frames, settings: DeviationSettings
) -> tuple[np.ndarray, np.ndarray]:
    """Evaluate frames with several models.

    Parameters
    ----------
    predictors
        The models; they need the same type map.
    frames
        Frames, with labels for `real_error`; padding counts as atoms, as in deepmd-kit.
    settings
        The quantities to compute.

    Returns
    -------
    tuple
        (nframes, 7): largest, smallest and root mean square deviation of the nine virial components [eV/atom], largest,
        smallest and mean deviation of the forces on atoms [eV/Å], deviation of the energy [eV/atom]; and the deviation
        of the force on every atom (nframes, natoms) [eV/Å].

    Raises
    ------
    PredictionInputError
        When `real_error` lacks a label.
    """
    found = [predictor.evaluate(frames) for predictor in predictors]
    real = _labels(frames) if settings.real_error else (None, None, None)
    return deviations(found, settings, real)


def deviations(
    found: Sequence[Prediction],
    settings: DeviationSettings,
    real: tuple[np.ndarray | None, np.ndarray | None, np.ndarray | None] = (None, None, None),
) -> tuple[np.ndarray, np.ndarray]:
    """Return what `model_deviation` describes from predictions of several models for the same frames.

    Parameters
    ----------
    found
        The predictions.
    settings
        The quantities to compute.
    real
        Labels of energy per atom (nframes,), force (nframes, natoms, 3) and virial per atom (nframes, 9) to compare
        with instead of the mean of the models.
    """
    natoms = found[0].force.shape[1]
    energy = np.stack([prediction.energy for prediction in found]) / natoms
    force = np.stack([prediction.force for prediction in found])
    virial = np.stack([prediction.virial for prediction in found]) / natoms
    of_virial = _relative(_spread(virial, real[2]), virial, real[2], settings.relative_virial)
    of_force = deviation_of_force(force, real[1], settings.relative)
    columns = (
        *(of_virial.max(axis=1), of_virial.min(axis=1), np.linalg.norm(of_virial, axis=1) / 3.0),
        *(of_force.max(axis=1), of_force.min(axis=1), of_force.mean(axis=1)),
        _spread(energy, real[0]),
    )
    return np.stack(columns, axis=1), of_force


def common_parameters(predictors: Sequence[Predictor]) -> Parameters:
    """Return the frame and atomic parameters that all models read.

    Raises
    ------
    PredictionInputError
        When models read different numbers of them, or have different defaults.
    """
    first, *others = [predictor.parameters for predictor in predictors]
    for other in others:
        if other != first:
            raise PredictionInputError(
                f"the models read different parameters: the first {first.fparam} of a frame and {first.aparam} of an "
                f"atom (default {first.default_fparam}), another {other.fparam} and {other.aparam} "
                f"(default {other.default_fparam})"
            )
    return first


def _labels(frames: Frames) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return energy and virial per atom and forces; labels that a system lacks count as zero, as in deepmd-kit."""
    if frames.energy is None and frames.force is None and frames.virial is None:
        raise PredictionInputError(
            "the errors of models need labels; the system has neither energy, force nor virial"
        )
    energy = np.zeros(frames.nframes) if frames.energy is None else frames.energy
    force = np.zeros_like(frames.coord) if frames.force is None else frames.force
    virial = np.zeros((frames.nframes, 9)) if frames.virial is None else frames.virial
    return energy / frames.natoms, force, virial.reshape(-1, 9) / frames.natoms


class DeviationFile:
    """Write `model_devi.out` in deepmd-kit's format: a header and the rows of each system.

    Parameters
    ----------
    path
        The file; an older one is replaced.
    atomic
        Add the deviation of the force on every atom.
    """

    def __init__(self, path: Path, *, atomic: bool = False) -> None:
        self._path, self._atomic = path, atomic
        make_folder_of(path)
        fresh_file(path).close()

    def add(self, system: str, steps: np.ndarray, table: np.ndarray, of_force: np.ndarray) -> None:
        """Append the rows of one system; `steps` numbers them."""
        header = f"{system}\n{'step':10s}" + "".join(f"{name:19s}" for name in COLUMNS)
        rows = [steps[:, None], table]
        if self._atomic:
            header += f"{'atm_devi_f(N)':19s}"
            rows.append(of_force)
        joined = np.concatenate(rows, axis=1)
        with append_to(self._path) as file:
            formats = ["%12d"] + ["%19.6e"] * (joined.shape[1] - 1)
            np.savetxt(file, joined, fmt=formats, delimiter="", header=header)


def system_deviation(
    predictors: Sequence[Predictor],
    system: System,
    settings: DeviationSettings,
    chunk_atoms: int = 1 << 16,
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield `model_deviation` of runs of a system's frames, in order, in chunks that bound the memory."""
    system = system.with_parameters(common_parameters(predictors))
    count = max(1, chunk_atoms // max(1, system.natoms))
    for start in range(0, system.nframes, count):
        numbers = np.arange(start, min(start + count, system.nframes))
        frames = system.frames(numbers)
        for run in frames.runs():
            part = frames.rows(run)
            with naming(system.name, numbers[run], part):
                found = model_deviation(predictors, part, settings)
            yield found
