"""Checks of models that read frame parameters: at one set of values, near the frames that have it."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import numpy as np

from deepmd_muon.data import DataError, System
from deepmd_muon.data.opening import with_parameters
from deepmd_muon.infer.errors import PredictionInputError
from deepmd_muon.infer.predictor import Predictor
from deepmd_muon.stability.coverage import StabilityError

log = logging.getLogger(__name__)


def at_frame_parameters(
    names: Sequence[str],
    predictors: Sequence[Predictor],
    systems: Sequence[System],
    values: Sequence[float] | None = None,
) -> list[System]:
    """Fix the frame parameters of models that need some; return the frames that have these values.

    Parameters
    ----------
    names, predictors, systems
        Models with their names, and the data.
    values
        The frame parameters; None takes those of most frames.

    Raises
    ------
    StabilityError
        When a model reads atomic parameters, its frame parameters cannot be set, or no frame has
        `values`.
    """
    needing = [predictor for predictor in predictors if predictor.parameters.required]
    if not needing:
        if values is not None:
            raise StabilityError("--fparam: the models read no frame parameters, or have a default")
        return list(systems)
    for name, predictor in zip(names, predictors, strict=True):
        if predictor.parameters.of_atom:
            raise StabilityError(
                f"{name} reads parameters of atoms (numb_aparam) or their spins (model/spin), which "
                "scans and dynamics have no values for: dp check takes models without them"
            )
    try:
        systems = with_parameters(systems, needing[0].parameters)
    except DataError as error:
        raise StabilityError(str(error)) from error
    of_systems = []
    for system in systems:
        fparam = system.read_parameter("fparam", np.arange(system.nframes))
        assert fparam is not None
        of_systems.append(fparam)
    kinds, counts = np.unique(np.concatenate(of_systems), axis=0, return_counts=True)
    listed = ", ".join(str(tuple(kind.tolist())) for kind in kinds[np.argsort(-counts)][:5])
    chosen = kinds[counts.argmax()] if values is None else np.array(values, dtype=np.float64)
    if len(chosen) != kinds.shape[1] or not (kinds == chosen).all(axis=1).any():
        raise StabilityError(
            f"--fparam {tuple(chosen.tolist())}: no frame has these frame parameters; most have {listed}"
        )
    try:
        for predictor in needing:
            predictor.set_default_fparam(chosen.tolist())
    except PredictionInputError as error:
        raise StabilityError(str(error)) from error
    selected = []
    for system, fparam in zip(systems, of_systems, strict=True):
        numbers = np.flatnonzero((fparam == chosen).all(axis=1))
        if len(numbers):
            selected.append(system if len(numbers) == system.nframes else system.select(numbers))
    log.info(
        "checked at the frame parameters %s, near the %d of %d frames that have them; others: --fparam "
        "(%d kinds: %s)",
        tuple(chosen.tolist()),
        sum(system.nframes for system in selected),
        counts.sum(),
        len(kinds),
        listed,
    )
    return selected
