"""The frames of a batch as plain arrays, and the inputs of a model besides the structure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

FRAME_LABELS = {"energy": 1, "virial": 9, "weight": 1}
"""Labels of a frame that a system may carry, with the number of their values.

`weight` multiplies what the frame adds to the loss.
"""
ATOM_LABELS = {"force": 3, "atom_ener": 1, "atom_pref": 1, "atom_ener_coeff": 1}
"""Labels of each atom that a system may carry, with the number of their values for an atom."""
LABELS = {**FRAME_LABELS, **ATOM_LABELS}
PARAMETERS = ("fparam", "aparam")
"""Inputs of a model besides the structure; the model decides how many values each has."""
MAX_LENGTH = 1e7
"""Positions and cells beyond it [Å] are mistakes; the neighbour list counts cells with 32 bits."""


def label_shape(label: str, nframes: int, natoms: int) -> tuple[int, ...]:
    """Shape of a label's array: a label of one value has no axis of values."""
    shape = (nframes,) if label in FRAME_LABELS else (nframes, natoms)
    width = LABELS[label]
    return (*shape, width) if width > 1 else shape


@dataclass(frozen=True)
class Frames:
    """Positions and labels of some frames.

    A label that no frame has is None. If only some frames have it, the others hold NaN: sums that
    ignore `present` become NaN instead of a wrong number.
    """

    # int32 (nframes, natoms): types as indices into the type map; −1 is a padding atom.
    atype: np.ndarray
    # float64 (nframes, natoms, 3): positions [Å].
    coord: np.ndarray
    # float64 (nframes, 3, 3): rows are the cell vectors [Å]; None without periodic boundaries. In a
    # batch that mixes both, frames without a cell have zeros.
    box: np.ndarray | None = None
    # float64 (nframes,): total energy [eV].
    energy: np.ndarray | None = None
    # float64 (nframes, natoms, 3): forces [eV/Å].
    force: np.ndarray | None = None
    # float64 (nframes, 9): −volume·stress [eV], row-major.
    virial: np.ndarray | None = None
    # float64 (nframes,): weight in the loss, 1 without.
    weight: np.ndarray | None = None
    # float64 (nframes, natoms): energy of each atom [eV].
    atom_ener: np.ndarray | None = None
    # float64 (nframes, natoms): weight of each atom in the loss of weighted forces.
    atom_pref: np.ndarray | None = None
    # float64 (nframes, natoms): coefficient of each atom's energy in the labelled total energy.
    atom_ener_coeff: np.ndarray | None = None
    # float64 (nframes, numb_fparam): frame parameters; None unless they were asked for, see
    # `System.with_parameters`.
    fparam: np.ndarray | None = None
    # float64 (nframes, natoms, numb_aparam): atomic parameters; None unless they were asked for.
    aparam: np.ndarray | None = None

    @property
    def nframes(self) -> int:
        """Number of frames."""
        return int(self.atype.shape[0])

    @property
    def natoms(self) -> int:
        """Number of atoms of a frame, padding included."""
        return int(self.atype.shape[1])

    @property
    def labels(self) -> frozenset[str]:
        """Names of the labels that at least one frame has."""
        return frozenset(name for name in LABELS if getattr(self, name) is not None)

    def cell(self, k: int) -> np.ndarray | None:
        """Return the cell of a frame, (3, 3) [Å]; None if it has none."""
        return None if self.box is None or not self.box[k].any() else self.box[k]

    def present(self, label: str) -> np.ndarray:
        """Return which frames have a label or a parameter, bool (nframes,)."""
        values: np.ndarray | None = getattr(self, label)
        if values is None:
            return np.zeros(self.nframes, dtype=bool)
        present: np.ndarray = ~np.isnan(values).reshape(self.nframes, -1).any(axis=1)
        return present

    def rows(self, rows: slice | Sequence[int]) -> Frames:
        """Return some frames; a label that none of them has becomes None."""
        arrays: dict[str, np.ndarray] = {}
        for field in fields(self):
            values = getattr(self, field.name)
            if values is not None:
                arrays[field.name] = values[rows]
        frames = Frames(**arrays)
        absent: dict[str, Any] = {
            label: None for label in frames.labels if not frames.present(label).any()
        }
        return replace(frames, **absent)

    def runs(self) -> Iterator[slice]:
        """Longest stretches of frames that have the same labels, in order."""
        present = np.stack([self.present(label) for label in LABELS], axis=1)
        changes = (present[1:] != present[:-1]).any(axis=1)
        bounds = [0, *(np.flatnonzero(changes) + 1).tolist(), self.nframes]
        for start, end in pairwise(bounds):
            yield slice(start, end)

    def type_counts(self, ntypes: int) -> np.ndarray:
        """Count the atoms of every type, (nframes, ntypes); padding is not counted."""
        # One bin for each frame and type; the first bin of a frame counts its padding.
        bins = np.arange(self.nframes)[:, None] * (ntypes + 1) + self.atype + 1
        counts = np.bincount(bins.ravel(), minlength=self.nframes * (ntypes + 1))
        return counts.reshape(self.nframes, ntypes + 1)[:, 1:]

    @classmethod
    def concatenate(cls, blocks: Sequence[Frames]) -> Frames:
        """Join frames of several systems, padding smaller ones with atoms of type −1.

        Padding atoms sit at the origin and carry zeros. Frames of a block without a label that
        another block has hold NaN there; frames without a cell have zeros.
        """
        if len(blocks) == 1:
            return blocks[0]
        natoms = max(block.natoms for block in blocks)
        ends = np.cumsum([block.nframes for block in blocks]).tolist()
        joined: dict[str, np.ndarray] = {}
        for field in fields(cls):
            name = field.name
            arrays = [getattr(block, name) for block in blocks]
            present = [array for array in arrays if array is not None]
            if not present:
                continue
            shape = list(present[0].shape)
            shape[0] = ends[-1]
            is_of_atoms = name not in ("box", "fparam", *FRAME_LABELS)
            if is_of_atoms:
                shape[1] = natoms
            padding = -1 if name == "atype" else 0
            joined[name] = np.full(shape, padding, dtype=np.result_type(*present))
            for block, array, end in zip(blocks, arrays, ends, strict=True):
                rows = joined[name][end - block.nframes : end]
                if array is None:
                    rows[:] = 0.0 if name == "box" else np.nan
                elif is_of_atoms:
                    rows[:, : block.natoms] = array
                else:
                    rows[:] = array
        return cls(**joined)


class Parameters(NamedTuple):
    """The parameters that a model reads."""

    fparam: int = 0  # how many a frame has (``fparam.npy``)
    aparam: int = 0  # how many an atom has (``aparam.npy``)
    # Frame parameters of frames without ``fparam.npy``; None if they need it.
    default_fparam: tuple[float, ...] | None = None
    partial: bool = False  # whether values may be missing, which are NaN then

    @property
    def required(self) -> bool:
        """Whether a prediction needs values that only the caller can give."""
        return self.aparam > 0 or (self.fparam > 0 and self.default_fparam is None)

    @classmethod
    def of(cls, fitting_net: Any) -> Parameters:
        """Return what a fitting net with these settings reads; nothing if it has no parameters."""
        return cls(
            fparam=getattr(fitting_net, "numb_fparam", 0),
            aparam=getattr(fitting_net, "numb_aparam", 0),
            default_fparam=getattr(fitting_net, "default_fparam", None),
        )
