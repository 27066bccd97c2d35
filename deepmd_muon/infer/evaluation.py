"""Predictions and errors of test systems, chunk by chunk."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from deepmd_muon.data import Frames, System
from deepmd_muon.infer.metrics import Errors, frame_errors
from deepmd_muon.infer.prediction import Prediction
from deepmd_muon.infer.predictor import Predictor, naming


@dataclass(frozen=True)
class ComparedFrames:
    """Some frames of a system with the model's predictions.

    Attributes
    ----------
    system
        Name of the system.
    numbers
        Numbers of the frames in the system, (nframes,).
    reference, prediction
        Positions and labels of the frames, and the prediction of the same shapes.
    """

    system: str
    numbers: np.ndarray
    reference: Frames
    prediction: Prediction

    @property
    def errors(self) -> Errors:
        """Errors of every quantity that the reference has."""
        return frame_errors(self.reference, self.prediction)


def evaluate_system(
    predictor: Predictor,
    system: System,
    *,
    limit: int | None = None,
    shuffle: np.random.Generator | None = None,
    atomic: bool = False,
    chunk_atoms: int = 1 << 18,
) -> Iterator[ComparedFrames]:
    """Predict the frames of a system, in chunks that bound the memory.

    The frames of a chunk have the same labels.

    Parameters
    ----------
    predictor
        The model.
    system
        The system, opened with the model's type map.
    limit
        At most this many frames; None takes all.
    shuffle
        Draw the order of the frames from this generator; None keeps the system's order.
    atomic
        Compare atomic energies, if the system has them.
    chunk_atoms
        Atoms read at once, at least one frame.
    """
    system = system.with_parameters(predictor.parameters)
    order = np.arange(system.nframes) if shuffle is None else shuffle.permutation(system.nframes)
    for numbers in system.chunks(chunk_atoms, order[:limit]):
        reference = system.frames(numbers)
        if not atomic:
            reference = replace(reference, atom_ener=None)
        for run in reference.runs():
            alike = reference.rows(run)  # frames with the same labels
            with naming(system.name, numbers[run], alike):
                prediction = predictor.evaluate(alike)
            yield ComparedFrames(
                system=system.name, numbers=numbers[run], reference=alike, prediction=prediction
            )
