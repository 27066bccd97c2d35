"""The frames of a batch as plain arrays, and which inputs of a model they carry beside the structure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

import numpy as np

#: Per-frame labels and per-atom labels that a system may or may not carry, with values per frame or atom.
FRAME_LABELS = {"energy": 1, "virial": 9}
ATOM_LABELS = {"force": 3, "atom_ener": 1, "atom_pref": 1, "atom_ener_coeff": 1}
LABELS = {**FRAME_LABELS, **ATOM_LABELS}
#: Inputs of a model beside the structure, with as many values per frame or atom as the model wants.
PARAMETERS = ("fparam", "aparam")


def label_shape(label: str, nframes: int, natoms: int) -> tuple[int, ...]:
    """Shape of a label's array: a number of a frame or atom has no axis of its own."""
    width = LABELS[label]
    atoms = () if label in FRAME_LABELS else (natoms,)
    return (nframes, *atoms, *((width,) if width > 1 else ()))


@dataclass(frozen=True)
class Frames:
    """Positions and labels of some frames.

    A label that no frame has is None. Where only some frames have it, the others hold NaN: sums that
    ignore `present` become NaN instead of a wrong number.
    """

    atype: (
        np.ndarray
    )  # int32 (nframes, natoms): types as indices into the type map; −1 is a padding atom
    coord: np.ndarray  # float64 (nframes, natoms, 3): positions [Å]
    # float64 (nframes, 3, 3): rows are the cell vectors [Å]; None without periodic boundaries. In a batch that mixes
    # both, frames without a cell have zeros.
    box: np.ndarray | None = None
    energy: np.ndarray | None = None  # float64 (nframes,): total energy [eV]
    force: np.ndarray | None = None  # float64 (nframes, natoms, 3): forces [eV/Å]
    virial: np.ndarray | None = None  # float64 (nframes, 9): −volume·stress [eV], row-major
    atom_ener: np.ndarray | None = None  # float64 (nframes, natoms): energy of each atom [eV]
    atom_pref: np.ndarray | None = (
        None  # float64 (nframes, natoms): weight of each atom in the loss of weighted forces
    )
    # float64 (nframes, natoms): coefficient of each atom's energy in the total energy of the label.
    atom_ener_coeff: np.ndarray | None = None
    # float64 (nframes, numb_fparam): frame parameters; None unless they were asked for, see `System.with_parameters`.
    fparam: np.ndarray | None = None
    aparam: np.ndarray | None = (
        None  # float64 (nframes, natoms, numb_aparam): atomic parameters, likewise
    )

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
        """Return the cell of a frame, (3, 3) [Å]; None where it has none."""
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
        arrays: dict[str, np.ndarray] = {
            field.name: values[rows]
            for field in fields(self)
            if (values := getattr(self, field.name)) is not None
        }
        chosen = Frames(**arrays)
        absent: dict[str, Any] = {
            label: None for label in chosen.labels if not chosen.present(label).any()
        }
        return replace(chosen, **absent)

    def runs(self) -> Iterator[slice]:
        """Longest stretches of frames that have the same labels, in order."""
        present = np.stack([self.present(label) for label in LABELS], axis=1)
        ends = [
            *(np.flatnonzero((present[1:] != present[:-1]).any(axis=1)) + 1).tolist(),
            self.nframes,
        ]
        for first, end in zip([0, *ends[:-1]], ends, strict=True):
            yield slice(first, end)

    def type_counts(self, ntypes: int) -> np.ndarray:
        """Count the atoms of every type, (nframes, ntypes); padding is not counted."""
        bins = np.arange(self.nframes)[:, None] * (ntypes + 1) + self.atype + 1
        counts = np.bincount(bins.ravel(), minlength=self.nframes * (ntypes + 1))
        return counts.reshape(self.nframes, ntypes + 1)[:, 1:]

    @classmethod
    def concatenate(cls, parts: Sequence[Frames]) -> Frames:
        """Join frames of several systems, padding smaller ones with atoms of type −1.

        Padding atoms sit at the origin and carry zeros. Frames whose part lacks a label that another part has hold
        NaN there; frames without a cell have zeros.
        """
        if len(parts) == 1:
            return parts[0]
        natoms = max(part.natoms for part in parts)
        ends = np.cumsum([part.nframes for part in parts]).tolist()
        joined: dict[str, np.ndarray] = {}
        for name in (field.name for field in fields(cls)):
            given = [getattr(part, name) for part in parts]
            there = [value for value in given if value is not None]
            if not there:
                continue
            of_atoms = name not in ("box", "fparam", *FRAME_LABELS)
            shape = (
                (ends[-1], natoms, *there[0].shape[2:])
                if of_atoms
                else (ends[-1], *there[0].shape[1:])
            )
            whole = joined[name] = np.full(
                shape, -1 if name == "atype" else 0, dtype=np.result_type(*there)
            )
            for part, value, end in zip(parts, given, ends, strict=True):
                mine = whole[end - part.nframes : end]
                if value is None:
                    mine[:] = 0.0 if name == "box" else np.nan
                elif of_atoms:
                    mine[:, : part.natoms] = value
                else:
                    mine[:] = value
        return cls(**joined)


class Parameters(NamedTuple):
    """The parameters that a model reads."""

    fparam: int = 0  # how many a frame has (``fparam.npy``)
    aparam: int = 0  # how many an atom has (``aparam.npy``)
    # Frame parameters of frames without ``fparam.npy``; None where they need it.
    default_fparam: tuple[float, ...] | None = None
    partial: bool = False  # whether values may be missing, which are NaN then

    @property
    def required(self) -> bool:
        """Whether a prediction needs values that only the caller can give."""
        return self.aparam > 0 or (self.fparam > 0 and self.default_fparam is None)

    @classmethod
    def of(cls, fitting_net: Any) -> Parameters:
        """Return what a fitting net with these settings reads; nothing if it has no parameters."""
        default = getattr(fitting_net, "default_fparam", None)
        return cls(
            getattr(fitting_net, "numb_fparam", 0), getattr(fitting_net, "numb_aparam", 0), default
        )
