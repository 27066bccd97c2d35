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
ATOM_LABELS = {"force": 3, "force_mag": 3, "atom_ener": 1, "atom_pref": 1, "atom_ener_coeff": 1}
"""Labels of each atom that a system may carry, with the number of their values for an atom."""
LABELS = {**FRAME_LABELS, **ATOM_LABELS}
FRAME_PARAMETERS = ("fparam", "charge_spin")
"""Inputs of a model that belong to a frame."""
ATOM_PARAMETERS = ("aparam", "spin")
"""Inputs of a model that belong to an atom."""
PARAMETERS = (*FRAME_PARAMETERS, *ATOM_PARAMETERS)
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
    # float64 (nframes, natoms, 3): magnetic forces −dE/dspin [eV/unit of the spins].
    force_mag: np.ndarray | None = None
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
    # float64 (nframes, 2): charge [e] and spin of the frame, for models that embed them.
    charge_spin: np.ndarray | None = None
    # float64 (nframes, natoms, 3): spin vector of each atom, for models that read them.
    spin: np.ndarray | None = None

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

    @property
    def frame_parameters(self) -> np.ndarray | None:
        """All parameters of frames side by side (nframes, `Parameters.of_frame`), None without."""
        return self._side_by_side(FRAME_PARAMETERS)

    @property
    def atomic_parameters(self) -> np.ndarray | None:
        """All parameters of atoms (nframes, natoms, `Parameters.of_atom`), None without."""
        return self._side_by_side(ATOM_PARAMETERS)

    def _side_by_side(self, names: Sequence[str]) -> np.ndarray | None:
        columns = [getattr(self, name) for name in names]
        present = [column for column in columns if column is not None]
        return np.concatenate(present, axis=-1) if present else None

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
            is_of_atoms = name not in ("box", *FRAME_PARAMETERS, *FRAME_LABELS)
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


def longest_vector(vectors: np.ndarray) -> float:
    """Return the largest length of vectors (…, 3); NaN does not count."""
    squares = np.square(vectors).sum(axis=-1)
    return float(np.sqrt(np.nanmax(squares, initial=0.0)))


# The embeddings of deepmd-kit's models have rows for these, and read whole numbers.
_CHARGES = (-100, 99)
_SPINS = (0, 99)


def charge_spin_problem(charge_spin: np.ndarray) -> str | None:
    """Return what is wrong with charges and spins (nframes, 2); None if a model can read them."""
    for name, values, (low, high) in (
        ("charge", charge_spin[:, 0], _CHARGES),
        ("spin", charge_spin[:, 1], _SPINS),
    ):
        # NaN marks a missing value.
        outside = (values < low) | (values > high) | (values % 1 > 0)
        if outside.any():
            value = values[outside.argmax()]
            return f"{name} must be a whole number from {low} to {high}; found {value:g}"
    return None


class Parameters(NamedTuple):
    """The parameters that a model reads."""

    fparam: int = 0  # how many a frame has (``fparam.npy``)
    aparam: int = 0  # how many an atom has (``aparam.npy``)
    # Frame parameters of frames without ``fparam.npy``; None if they need it.
    default_fparam: tuple[float, ...] | None = None
    partial: bool = False  # whether values may be missing, which are NaN then
    charge_spin: int = 0  # 2 if the model embeds charge and spin (``charge_spin.npy``)
    default_charge_spin: tuple[float, ...] | None = None
    spin: int = 0  # 3 if the model reads the spin vector of each atom (``spin.npy``)
    default_spin: tuple[float, ...] | None = None

    @property
    def of_frame(self) -> int:
        """How many values a frame has: those of `fparam`, then charge and spin."""
        return self.fparam + self.charge_spin

    @property
    def of_atom(self) -> int:
        """How many values an atom has: those of `aparam`, then its spin."""
        return self.aparam + self.spin

    @property
    def required(self) -> bool:
        """Whether a prediction needs values that only the caller can give."""
        if self.spin:
            return True
        return any(getattr(self, name) > 0 and self.default(name) is None for name in PARAMETERS)

    def default(self, name: str) -> tuple[float, ...] | None:
        """Return the values of frames or atoms without a file; None if they need it."""
        values: tuple[float, ...] | None = getattr(self, f"default_{name}", None)
        return values

    @classmethod
    def of(cls, settings: Any) -> Parameters:
        """Return what a model with these settings reads."""
        fitting_net = settings.fitting_net
        conditions = settings.charge_spin
        return cls(
            fparam=getattr(fitting_net, "numb_fparam", 0),
            aparam=getattr(fitting_net, "numb_aparam", 0),
            default_fparam=getattr(fitting_net, "default_fparam", None),
            charge_spin=2 if conditions.embedded else 0,
            default_charge_spin=conditions.default,
            spin=3 if settings.spins.read else 0,
            default_spin=(0.0, 0.0, 0.0) if settings.spins.may_be_missing else None,
        )


def evenly_spread(total: int, count: int) -> np.ndarray:
    """Return at most `count` of the numbers below `total`, in order; 0 if there are none."""
    return np.unique(np.linspace(0, max(0, total - 1), count).astype(int))


def nearest_images(vectors: np.ndarray, box: np.ndarray) -> np.ndarray:
    """Return vectors (…, n, 3) less the cell vectors that make their fractions at most 1/2.

    The cells are (…, 3, 3). In a skewed cell another image may be nearer.
    """
    nearest: np.ndarray = vectors - np.round(vectors @ np.linalg.inv(box)) @ box
    return nearest
