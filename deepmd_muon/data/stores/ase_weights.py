"""Weights of frames that ASE read: a number in the frame, and one for its `config_type`."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from deepmd_muon.data.checks.words import frame_words
from deepmd_muon.data.errors import SystemFormatError

if TYPE_CHECKING:
    from ase import Atoms

log = logging.getLogger(__name__)

# Names of a frame's weight: ours, and that of MACE.
_NAMES = ("weight", "config_weight")
# Frames of a config_type that `config_weights` does not name take the weight of this one, or 1; so
# does MACE.
_DEFAULT = "Default"


class Weights(NamedTuple):
    """Weights of the frames of one file in the loss."""

    by_frame: Mapping[int, float]
    counting: Sequence[int]  # numbers of the frames whose weight is above 0

    @property
    def differ(self) -> bool:
        """Whether a frame that counts has another weight than 1."""
        return any(self.by_frame[number] != 1.0 for number in self.counting)

    @classmethod
    def of(
        cls,
        frames: Sequence[Atoms],
        numbers: Sequence[int],
        path: str,
        config_weights: Mapping[str, float],
    ) -> Weights:
        """Multiply the weight of each frame by that of its config_type, and log what both do.

        Raises
        ------
        SystemFormatError
            When a weight is no number of at least 0, or all weights are 0.
        """
        by_frame: dict[int, float] = {}
        n_frames: Counter[tuple[str, float]] = Counter()
        weighted = []  # frames with a weight of their own
        for number in numbers:
            config_type = str(frames[number].info.get("config_type", _DEFAULT))
            of_type = config_weights.get(config_type, config_weights.get(_DEFAULT, 1.0))
            own_weight = _weight_of(frames[number], path, f"frame {number}")
            if own_weight != 1.0:
                weighted.append(number)
            by_frame[number] = of_type * own_weight
            n_frames[config_type, of_type] += 1
        if config_weights:
            listed = [
                f"{count} of {name}: {weight:g}" for (name, weight), count in n_frames.items()
            ]
            log.info("%s: weights of frames by config_weights: %s", path, ", ".join(listed))
        if weighted:
            log.info(
                "%s: the loss has the weights in the headers of %s", path, frame_words(weighted)
            )
        counting = [number for number in numbers if by_frame[number] > 0.0]
        if not counting:
            raise SystemFormatError(
                path,
                "",
                "the weight of every frame is 0: leave the file out, or give it other weights",
            )
        if len(counting) < len(numbers):
            left_out = [number for number in numbers if by_frame[number] == 0.0]
            log.info("%s: left out, their weight is 0: %s", path, frame_words(left_out))
        return cls(by_frame, counting)


def _weight_of(atoms: Atoms, path: str, place: str) -> float:
    """Return the weight that a frame states, else 1."""
    for name in _NAMES:
        if name in atoms.info:
            try:
                weight = float(atoms.info[name])
            except (TypeError, ValueError):
                weight = -1.0
            if not 0.0 <= weight < float("inf"):
                raise SystemFormatError(
                    path, place, f"{name} is {atoms.info[name]!r}; a weight is a number from 0 on"
                )
            return weight
    return 1.0
