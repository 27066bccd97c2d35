"""Frame parameters by their own names, such as charge and spin, as columns of fparam."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from deepmd_muon.data.errors import SystemFormatError
from deepmd_muon.data.stores.memory import FrameOrigin
from deepmd_muon.data.stores.storage import Store

_FPARAM = "fparam.npy"


class NamedParameters:
    """A store whose ``fparam.npy`` joins other files of each set, in the order of their names.

    Raises
    ------
    SystemFormatError
        When a set lacks one of the files.
    """

    def __init__(self, store: Store, names: Sequence[str]) -> None:
        self._store = store
        self._files = [f"{name}.npy" for name in names]
        self.root = store.root
        self.sampled = store.sampled
        self.origins: Sequence[FrameOrigin] = getattr(store, "origins", ())
        for folder in store.sets():
            missing = [file for file in self._files if file not in store.names(folder)]
            if missing:
                raise SystemFormatError(
                    store.root,
                    folder,
                    f"{' and '.join(missing)} missing, which frame_parameters names "
                    f"({', '.join(names)})",
                )

    def sets(self) -> list[str]:
        """Names of the sets."""
        return self._store.sets()

    def names(self, folder: str) -> frozenset[str]:
        """Names in a set, or of the system itself."""
        names = self._store.names(folder)
        return names | {_FPARAM} if folder else names

    def words(self, path: str) -> list[str]:
        """Words of a text file."""
        return self._store.words(path)

    def shape(self, path: str) -> tuple[int, ...]:
        """Shape of an array; that of ``fparam.npy`` is (nframes, values)."""
        folder, _, name = path.partition("/")
        if name != _FPARAM:
            return self._store.shape(path)
        shapes = [self._store.shape(f"{folder}/{file}") for file in self._files]
        nframes = shapes[0][0] if shapes[0] else 1
        return nframes, sum(int(np.prod(shape)) // max(1, nframes) for shape in shapes)

    def rows(self, path: str, indices: np.ndarray, single: bool) -> np.ndarray:
        """Rows of an array."""
        folder, _, name = path.partition("/")
        if name != _FPARAM:
            return self._store.rows(path, indices, single)
        columns = [self._store.rows(f"{folder}/{file}", indices, single) for file in self._files]
        return np.concatenate([column.reshape(len(indices), -1) for column in columns], axis=1)
