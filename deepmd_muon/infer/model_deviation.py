"""Model deviation: the disagreement of several models.

Active learning selects structures by it. Definitions and file format are those of deepmd-kit.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from deepmd_muon.data import Frames, Parameters, System
from deepmd_muon.files import append_to, fresh_file, make_folder_of
from deepmd_muon.infer.errors import PredictionInputError
from deepmd_muon.infer.prediction import Prediction
from deepmd_muon.infer.predictor import Predictor, naming

#: Columns of `model_devi.out`, in order.
COLUMNS = (
    "max_devi_v",
    "min_devi_v",
    "avg_devi_v",
    "max_devi_f",
    "min_devi_f",
    "avg_devi_f",
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
        Divide the deviation of a force by its magnitude plus this level [eV/Å]; None does not
        divide.
    relative_virial
        The same for the virial [eV/atom].
    """

    real_error: bool = False
    relative: float | None = None
    relative_virial: float | None = None


class Labels(NamedTuple):
    """Labels to compare with; None compares the models with their mean."""

    energy: np.ndarray | None = None  # (nframes,) [eV/atom]
    force: np.ndarray | None = None  # (nframes, natoms, 3) [eV/Å]
    virial: np.ndarray | None = None  # (nframes, 9) [eV/atom]


def _spread(values: np.ndarray, label: np.ndarray | None) -> np.ndarray:
    """Return the standard deviation over the first axis.

    With a label, return the root mean square error.
    """
    if label is None:
        return np.asarray(np.std(values, axis=0))
    return np.asarray(np.sqrt(np.mean((values - label) ** 2, axis=0)))


def _relative(
    deviation: np.ndarray, values: np.ndarray, label: np.ndarray | None, level: float | None
) -> np.ndarray:
    """Divide a deviation by the magnitude of the vectors plus a level."""
    if level is None:
        return deviation
    reference = np.mean(values, axis=0) if label is None else label
    magnitude = np.linalg.norm(reference, axis=-1)
    # Of forces, a deviation is one number a vector; of virials, it has their components.
    trailing = (1,) * (deviation.ndim - magnitude.ndim)
    return np.asarray(deviation / (magnitude.reshape(magnitude.shape + trailing) + level))


def deviation_of_force(
    forces: np.ndarray, label: np.ndarray | None = None, relative: float | None = None
) -> np.ndarray:
    """Return the deviation of the force on every atom (nframes, natoms) [eV/Å].

    Parameters
    ----------
    forces
        Forces of every model (nmodels, nframes, natoms, 3) [eV/Å].
    label
        Labels (nframes, natoms, 3) [eV/Å]; None compares the models with their mean.
    relative
        See `DeviationSettings`.
    """
    deviation = np.linalg.norm(_spread(forces, label), axis=-1)
    return _relative(deviation, forces, label, relative)


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
    table : ndarray, (nframes, 7)
        `COLUMNS`: largest, smallest and root mean square deviation of the nine virial components
        [eV/atom]; largest, smallest and mean deviation of the forces on atoms [eV/Å]; deviation of
        the energy [eV/atom].
    force_deviation : ndarray, (nframes, natoms)
        Deviation of the force on every atom [eV/Å].

    Raises
    ------
    PredictionInputError
        When `real_error` lacks a label.
    """
    predictions = [predictor.evaluate(frames) for predictor in predictors]
    labels = _labels(frames) if settings.real_error else Labels()
    return deviations(predictions, settings, labels)


def deviations(
    predictions: Sequence[Prediction], settings: DeviationSettings, labels: Labels | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Return the results of `model_deviation` from predictions for the same frames."""
    if labels is None:
        labels = Labels()
    natoms = predictions[0].force.shape[1]
    energy = np.stack([prediction.energy for prediction in predictions]) / natoms
    force = np.stack([prediction.force for prediction in predictions])
    virial = np.stack([prediction.virial for prediction in predictions]) / natoms
    energy_deviation = _spread(energy, labels.energy)
    force_deviation = deviation_of_force(force, labels.force, settings.relative)
    virial_deviation = _relative(
        _spread(virial, labels.virial), virial, labels.virial, settings.relative_virial
    )
    table = {
        "max_devi_v": virial_deviation.max(axis=1),
        "min_devi_v": virial_deviation.min(axis=1),
        "avg_devi_v": np.linalg.norm(virial_deviation, axis=1) / 3.0,  # 3 = √9 components
        "max_devi_f": force_deviation.max(axis=1),
        "min_devi_f": force_deviation.min(axis=1),
        "avg_devi_f": force_deviation.mean(axis=1),
        "devi_e": energy_deviation,
    }
    return np.stack([table[name] for name in COLUMNS], axis=1), force_deviation


def common_parameters(predictors: Sequence[Predictor]) -> Parameters:
    """Return the frame and atomic parameters that all models read.

    Raises
    ------
    PredictionInputError
        When models read different numbers of them, or have different defaults.
    """
    common = predictors[0].parameters
    for predictor in predictors[1:]:
        parameters = predictor.parameters
        if parameters != common:
            differing = [
                f"{name} {first} and {other}"
                for name, first, other in zip(common._fields, common, parameters, strict=True)
                if first != other
            ]
            raise PredictionInputError(
                f"the models read different parameters: {', '.join(differing)}"
            )
    return common


def _labels(frames: Frames) -> Labels:
    """Return the labels of frames; missing ones count as zero, as in deepmd-kit."""
    if frames.energy is None and frames.force is None and frames.virial is None:
        raise PredictionInputError(
            "the errors of models need labels; the system has neither energy, force nor virial"
        )
    energy = np.zeros(frames.nframes) if frames.energy is None else frames.energy
    force = np.zeros_like(frames.coord) if frames.force is None else frames.force
    virial = np.zeros((frames.nframes, 9)) if frames.virial is None else frames.virial
    return Labels(
        energy=energy / frames.natoms,
        force=force,
        virial=virial.reshape(-1, 9) / frames.natoms,
    )


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
        self._path = path
        self._atomic = atomic
        make_folder_of(path)
        fresh_file(path).close()

    def add(
        self, system: str, steps: np.ndarray, table: np.ndarray, force_deviation: np.ndarray
    ) -> None:
        """Append the rows of one system; `steps` numbers them."""
        header = f"{system}\n{'step':10s}" + "".join(f"{name:19s}" for name in COLUMNS)
        rows = [steps[:, None], table]
        if self._atomic:
            header += f"{'atm_devi_f(N)':19s}"
            rows.append(force_deviation)
        columns = np.concatenate(rows, axis=1)
        formats = ["%12d"] + ["%19.6e"] * (columns.shape[1] - 1)
        with append_to(self._path) as file:
            np.savetxt(file, columns, fmt=formats, delimiter="", header=header)


def system_deviation(
    predictors: Sequence[Predictor],
    system: System,
    settings: DeviationSettings,
    chunk_atoms: int = 1 << 16,
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield `model_deviation` of the frames of a system, in order, in chunks that bound the memory.

    The frames of a chunk have the same labels.
    """
    system = system.with_parameters(common_parameters(predictors))
    for numbers in system.chunks(chunk_atoms):
        frames = system.frames(numbers)
        for run in frames.runs():
            alike = frames.rows(run)  # frames with the same labels
            with naming(system.name, numbers[run], alike):
                results = model_deviation(predictors, alike, settings)
            yield results
