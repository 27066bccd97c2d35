"""Validation data held out of systems: whole systems, or blocks of time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from deepmd_muon.data.system import System
from deepmd_muon.data.writing import formula_of

# Fewer systems of a kind are split in time: each may be another temperature or phase, which
# training needs.
_SYSTEMS = 5
# Systems of fewer frames are not cut.
_FRAMES = 10


@dataclass(frozen=True)
class Share:
    """The frames of a system that training and validation take.

    Attributes
    ----------
    system
        The system.
    held_out
        Numbers of its validation frames, ascending `(nvalidation,)`; the others are for training.
    """

    system: System
    held_out: np.ndarray

    @classmethod
    def for_training(cls, system: System) -> Share:
        """Return the share of a system whose frames all train."""
        return cls(system, np.arange(0))

    @classmethod
    def for_validation(cls, system: System) -> Share:
        """Return the share of a system that is held out."""
        return cls(system, np.arange(system.nframes))

    @property
    def train(self) -> int:
        """Number of training frames."""
        return self.system.nframes - len(self.held_out)

    @property
    def training(self) -> System | None:
        """The training frames as a system."""
        return self._of(np.setdiff1d(np.arange(self.system.nframes), self.held_out))

    @property
    def validation(self) -> System | None:
        """The validation frames as a system."""
        return self._of(self.held_out)

    @property
    def whole(self) -> bool:
        """Whether the system is not cut."""
        return self.train in (0, self.system.nframes)

    def _of(self, numbers: np.ndarray) -> System | None:
        """Return some frames as a system."""
        if not len(numbers):
            return None
        first = int(numbers[0])
        end = int(numbers[-1]) + 1
        is_block = end - first == len(numbers)
        return self.system.part(first, end) if is_block else self.system.select(numbers)


def split(systems: Sequence[System], share: float) -> list[Share]:
    """Choose validation data that are not neighbours in time of training data.

    `share` is between 0 and 1. Of five or more systems of the same atoms, whole systems are held
    out. Of fewer, the last frames of each system are, if it has ten or more. If its frames have
    several `config_type` or frame parameters (charges), the last frames of each kind are held out.
    Smaller systems count as one kind, whatever their atoms. An element, and a lone atom, always
    stays in the training data. Return the share of each system, in the same order.
    """
    kinds: dict[tuple[str, int, bool], list[int]] = {}
    for number, system in enumerate(systems):
        kinds.setdefault((formula_of(system), system.natoms, system.pbc), []).append(number)
    few = [kind for kind in kinds.values() if len(kind) < _SYSTEMS]
    small = [number for kind in few for number in kind if systems[number].nframes < _FRAMES]
    cut = {number for kind in few for number in kind} - set(small)
    held_out: set[int] = set()
    for kind in [*kinds.values(), small]:
        if len(kind) >= _SYSTEMS:
            # A share of them, at least one, from the middle of equal stretches.
            count = max(1, round(share * len(kind)))
            held_out |= {kind[int((k + 0.5) * len(kind) / count)] for k in range(count)}
    held_out = _without_last_of_an_element(systems, held_out)
    shares = []
    for number, system in enumerate(systems):
        if number in held_out:
            shares.append(Share.for_validation(system))
        elif number in cut and system.natoms > 1:
            shares.append(Share(system, _last_of_each_kind(system, share)))
        else:
            shares.append(Share.for_training(system))
    return shares


def _last_of_each_kind(system: System, share: float) -> np.ndarray:
    """Return the numbers of the last frames of each kind, ascending.

    Kinds of few frames count as one. If that has few frames, they all train.
    """
    kinds: dict[object, list[int]] = {}
    for number, kind in enumerate(_kinds(system)):
        kinds.setdefault(kind, []).append(number)
    blocks = [numbers for numbers in kinds.values() if len(numbers) >= _FRAMES]
    rest = [number for numbers in kinds.values() if len(numbers) < _FRAMES for number in numbers]
    if len(rest) >= _FRAMES:
        blocks.append(sorted(rest))
    return np.sort(
        [number for block in blocks for number in block[-max(1, round(share * len(block))) :]]
    )


def _kinds(system: System) -> list[object]:
    """Return the `config_type` and the frame parameters of every frame."""
    numbers = np.arange(system.nframes)
    parameters = system.with_all_parameters().read_parameter("fparam", numbers)
    if parameters is None:
        parameters = np.zeros((system.nframes, 0))
    rows = np.nan_to_num(parameters).tolist()  # NaN differs from itself
    return [(system.origin(number).config_type, *row) for number, row in enumerate(rows)]


def _without_last_of_an_element(systems: Sequence[System], held_out: set[int]) -> set[int]:
    """Return systems to training that are the only ones with one of their types, or a lone atom."""
    types = []
    for system in systems:
        frames = np.arange(system.nframes if system.mixed else 1)
        types.append(set(np.unique(system.types(frames)).tolist()) - {-1})
    still_out = {number for number in held_out if systems[number].natoms > 1}
    trained_types: set[int] = set()
    for number, types_of_system in enumerate(types):
        if number not in still_out:
            trained_types |= types_of_system
    for number in sorted(still_out):
        if not types[number] <= trained_types:
            still_out.discard(number)
            trained_types |= types[number]
    return still_out
