"""Errors of a potential on a data set: of all frames, systems, kinds and elements, and the worst."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from deepmd_muon.data import System
from deepmd_muon.data.stores.memory import FrameOrigin
from deepmd_muon.infer.evaluation import ComparedFrames, evaluate_system
from deepmd_muon.infer.metrics import Errors, ErrorSum, add_errors, frame_errors
from deepmd_muon.infer.predictor import Predictor
from deepmd_muon.show.errors import ShowError
from deepmd_muon.show.parity import ParityPoints
from deepmd_muon.train.validation.final_errors import spread_over


class FrameError(NamedTuple):
    """The errors of one frame, with the atom of the largest error of the force."""

    origin: FrameOrigin
    errors: Errors
    atom: int | None  # None without forces
    element: str
    force: float  # length of the error of that atom's force [eV/Å]


@dataclass
class DataErrors:
    """Errors of a potential on a data set."""

    elements: tuple[str, ...]
    nframes: int  # of the data
    points: ParityPoints
    frames: list[FrameError] = field(default_factory=list)
    by_system: dict[str, Errors] = field(default_factory=dict)
    by_element: dict[str, ErrorSum] = field(default_factory=dict)  # of force components [eV/Å]

    @property
    def total(self) -> Errors:
        """Errors of all frames."""
        return _summed(list(self.by_system.values()))

    def by_config_type(self) -> dict[str, Errors]:
        """Return the errors of each kind of frames; empty if no frame names its kind."""
        frames: dict[str, list[Errors]] = {}
        for frame in self.frames:
            frames.setdefault(frame.origin.config_type or "(none)", []).append(frame.errors)
        if list(frames) == ["(none)"]:
            return {}
        return {kind: _summed(errors) for kind, errors in sorted(frames.items())}

    def worst(self, count: int) -> list[FrameError]:
        """Return the frames with the largest errors: of a force, else of the energy."""

        def badness(frame: FrameError) -> float:
            if frame.atom is not None:
                return frame.force
            return frame.errors["energy_per_atom"].mae if "energy" in frame.errors else 0.0

        return sorted(self.frames, key=badness, reverse=True)[:count]


def compare(
    predictor: Predictor, systems: Sequence[System], budget: int, series: str
) -> DataErrors:
    """Compare a potential with at most about `budget` frames, drawn from every system.

    Raises
    ------
    ShowError
        When a prediction is not finite.
    """
    elements = predictor.type_map
    errors = DataErrors(
        elements=elements,
        nframes=sum(system.nframes for system in systems),
        points=ParityPoints(elements),
    )
    counts = spread_over([system.nframes for system in systems], budget)
    rng = np.random.default_rng(0)
    for system, count in zip(systems, counts, strict=True):
        shuffle = rng if count < system.nframes else None
        for batch in evaluate_system(predictor, system, limit=count, shuffle=shuffle):
            if batch.prediction.not_finite:
                raise ShowError(
                    f"{' and '.join(batch.prediction.not_finite)} predicted for {batch.system} are "
                    "not finite: the weights of the model are spoiled; report an earlier checkpoint"
                )
            _add(errors, system, batch)
            errors.points.add(batch.reference, batch.prediction, series)
    return errors


def _add(errors: DataErrors, system: System, batch: ComparedFrames) -> None:
    """Add some frames of a system."""
    difference = None
    if batch.reference.force is not None:
        difference = batch.prediction.force - batch.reference.force  # (nframes, natoms, 3)
        for kind, element in enumerate(errors.elements):
            of_element = difference[batch.reference.atype == kind]
            if of_element.size:
                total = errors.by_element.get(element, ErrorSum())
                errors.by_element[element] = total + ErrorSum.of(of_element)
    for k, number in enumerate(batch.numbers.tolist()):
        atom = None
        element = ""
        force = 0.0
        if difference is not None:
            lengths = np.linalg.norm(difference[k], axis=-1)
            lengths[batch.reference.atype[k] < 0] = 0.0  # padding
            atom = int(lengths.argmax())
            element = errors.elements[batch.reference.atype[k, atom]]
            force = float(lengths[atom])
        of_frame = frame_errors(batch.reference.rows([k]), batch.prediction.rows([k]))
        frame = FrameError(
            origin=system.origin(number),
            errors=of_frame,
            atom=atom,
            element=element,
            force=force,
        )
        errors.frames.append(frame)
        errors.by_system[batch.system] = add_errors(
            errors.by_system.get(batch.system, {}), of_frame
        )


def _summed(errors_of_systems: Sequence[Errors]) -> Errors:
    total: Errors = {}
    for errors in errors_of_systems:
        total = add_errors(total, errors)
    return total
