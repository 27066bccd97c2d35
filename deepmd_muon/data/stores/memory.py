"""Systems whose arrays are in memory, made from files of other programs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

Arrays = Mapping[str, np.ndarray]
CONFIG_TYPES = "config_type.raw"
"""File of a written system: the kind of each frame, quoted as in a URL; `NO_CONFIG_TYPE` for none."""
NO_CONFIG_TYPE = "Default"  # as `config_weights` names such frames


class FrameOrigin(NamedTuple):
    """Where a frame comes from."""

    file: str
    number: int  # of the frame in the file
    config_type: str = ""  # the kind of structure that the file names, if any
    words: Mapping[str, object] | None = None  # what else its header says, such as a charge


class MemoryStore:
    """A system as arrays: the same names as in a folder of npy files.

    Parameters
    ----------
    root
        Name of the system, for messages.
    symbols
        Element of every atom.
    sets
        Arrays of each set by name without ".npy": "coord" (nframes, 3·natoms), "box" (nframes, 9),
        labels. Frames with other labels are other sets.
    pbc
        Whether the frames have a cell.
    origins
        Where the frames of all sets come from, if they come from a file.
    """

    sampled = False

    def __init__(
        self,
        root: str,
        symbols: Sequence[str],
        sets: Sequence[Arrays],
        *,
        pbc: bool,
        origins: Sequence[FrameOrigin] = (),
    ) -> None:
        self.root = root
        self.origins = origins
        elements = sorted(set(symbols))
        self._words = {
            "type.raw": [str(elements.index(symbol)) for symbol in symbols],
            "type_map.raw": elements,
        }
        if not pbc:
            self._words["nopbc"] = []
        self._sets = {
            f"set.{k:03d}": {f"{name}.npy": array for name, array in arrays.items()}
            for k, arrays in enumerate(sets)
        }

    def sets(self) -> list[str]:
        """Names of the sets."""
        return sorted(self._sets)

    def names(self, folder: str) -> frozenset[str]:
        """Names in a set, or of the system itself."""
        return frozenset(self._sets[folder] if folder else self._words)

    def words(self, path: str) -> list[str]:
        """Return the words that a text file would hold."""
        return self._words[path]

    def shape(self, path: str) -> tuple[int, ...]:
        """Shape of an array."""
        folder, _, name = path.partition("/")
        return self._sets[folder][name].shape

    def rows(self, path: str, indices: np.ndarray, single: bool) -> np.ndarray:
        """Rows of an array, which always has an axis of frames."""
        folder, _, name = path.partition("/")
        rows: np.ndarray = self._sets[folder][name][indices]
        return rows
