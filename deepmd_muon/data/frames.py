"""The frames of a batch as plain arrays."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

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

    A label that no frame has is None. Where only some frames have it, the others hold NaN: what sums over them
    without asking `present` shows NaN instead of a wrong number.
    """

    atype: np.ndarray  # int32 (nframes, natoms): types as indices into the type map; −1 is a padding atom
    coord: np.ndarray  # float64 (nframes, natoms, 3): positions [Å]
    # float64 (nframes, 3, 3): rows are the cell vectors [Å]; None without periodic boundaries. In a batch that mixes
    # both, frames without a cell have zeros.
    box: np.ndarray | None = None
    energy: np.ndarray | None = None  # float64 (nframes,): total energy [eV]
    force: np.ndarray | None = None  # float64 (nframes, natoms, 3): forces [eV/Å]
    virial: np.ndarray | None = None  # float64 (nframes, 9): −volume·stress [eV], row-major
    atom_ener: np.ndarray | None = None  # float64 (nframes, natoms): energy of each atom [eV]
    atom_pref: np.ndarray | None = None  # float64 (nframes, natoms): weight of each atom in the loss of weighted forces
    # float64 (nframes, natoms): coefficient of each atom's energy in the total energy of the label.
    atom_ener_coeff: np.ndarray | None = None
    # float64 (nframes, numb_fparam): frame parameters; None unless they were asked for, see `System.with_parameters`.
    fparam: np.ndarray | None = None
    aparam: np.ndarray | None = None  # float64 (nframes, natoms, numb_aparam): atomic parameters, likewise

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

    def present(self, label: str) -> np.ndarray:
        """Tell which frames have a label or a parameter, bool (nframes,)."""
        values: np.ndarray | None = getattr(self, label)
        if values is None:
            return np.zeros(self.nframes, dtype=bool)
        present: np.ndarray = ~np.isnan(values).reshape(self.nframes, -1).any(axis=1)
        return present

    def rows(self, rows: slice) -> Frames:
        """Return some consecutive frames; a label that none of them has becomes None."""
        arrays: dict[str, np.ndarray] = {
            field.name: values[rows] for field in fields(self) if (values := getattr(self, field.name)) is not None
        }
        chosen = Frames(**arrays)
        absent: dict[str, Any] = {label: None for label in chosen.labels if not chosen.present(label).any()}
        return replace(chosen, **absent)

    def runs(self) -> Iterator[slice]:
        """Longest stretches of frames that have the same labels, in order."""
        present = np.stack([self.present(label) for label in LABELS], axis=1)
        ends = [*(np.flatnonzero((present[1:] != present[:-1]).any(axis=1)) + 1).tolist(), self.nframes]
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
        NaN there.
        """
        if len(parts) == 1:
            return parts[0]
        natoms = max(part.natoms for part in parts)
        joined: dict[str, np.ndarray | None] = {}
        for field in fields(cls):
            values = [getattr(part, field.name) for part in parts]
            if field.name == "box":
                joined["box"] = _join_boxes(parts)
            elif all(value is None for value in values):
                joined[field.name] = None
            elif field.name == "fparam":
                joined["fparam"] = np.concatenate(values)
            elif field.name in LABELS:
                rows = [
                    np.full(label_shape(field.name, part.nframes, natoms), np.nan)
                    if value is None
                    else (value if field.name in FRAME_LABELS else _pad_atoms(value, natoms, 0))
                    for part, value in zip(parts, values, strict=True)
                ]
                joined[field.name] = np.concatenate(rows)
            else:
                fill = -1 if field.name == "atype" else 0
                joined[field.name] = np.concatenate([_pad_atoms(value, natoms, fill) for value in values])
        return cls(**joined)  # type: ignore[arg-type]  # atype and coord are never None


def _join_boxes(parts: Sequence[Frames]) -> np.ndarray | None:
    if all(part.box is None for part in parts):
        return None
    return np.concatenate([np.zeros((p.nframes, 3, 3)) if p.box is None else p.box for p in parts])


def _pad_atoms(values: np.ndarray, natoms: int, fill: int) -> np.ndarray:
    missing = natoms - values.shape[1]
    if missing == 0:
        return values
    widths = [(0, 0), (0, missing)] + [(0, 0)] * (values.ndim - 2)
    return np.pad(values, widths, constant_values=fill)
