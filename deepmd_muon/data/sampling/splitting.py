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
    """The frames of a system that training and validation take."""

    system: System
    train: int  # number of its first frames, for training; the others are for validation

    @property
    def training(self) -> System | None:
        """The training frames as a system."""
        return self.system.part(0, self.train) if self.train else None

    @property
    def validation(self) -> System | None:
        """The validation frames as a system."""
        if self.train == self.system.nframes:
            return None
        return self.system.part(self.train, self.system.nframes)

    @property
    def whole(self) -> bool:
        """Whether the system is not cut."""
        return self.train in (0, self.system.nframes)


def split(systems: Sequence[System], share: float) -> list[Share]:
    """Choose validation data that are not neighbours in time of training data.

    `share` is between 0 and 1. Of five or more systems of the same atoms, whole systems are held
    out. Of fewer, the last frames of each system are, if it has ten or more. Smaller systems count
    as one kind, whatever their atoms. An element, and a lone atom, always stays in the training
    data. Return the share of each system, in the same order.
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
        train = system.nframes
        if number in held_out:
            train = 0
        elif number in cut and system.natoms > 1:
            train -= max(1, round(share * system.nframes))
        shares.append(Share(system, train))
    return shares


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
