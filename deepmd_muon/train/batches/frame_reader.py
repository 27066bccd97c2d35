"""Reading frames of several systems for a device: packed one after the other, the atoms of each sorted by type."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from deepmd_muon.data import Frames, System
from deepmd_muon.data.frames import ATOM_LABELS, FRAME_LABELS, LABELS

#: Atoms that are read at once.
CHUNK_ATOMS = 1 << 16


@dataclass(frozen=True)
class Chunk:
    """Some frames, packed.

    Attributes
    ----------
    numbers
        Of the frames `(nframes,)`, counted over all systems.
    natoms, counts
        Atoms of each frame, padding left out `(nframes,)`, and of each type `(nframes, ntypes)`.
    periodic
        Which frames have cells `(nframes,)`.
    box
        Cell vectors as rows [Å] `(nframes, 3, 3)`, zeros where a frame has none; None where no frame has one.
    coord, atype
        Positions [Å] and types of all atoms, `(natoms of all, 3)` and `(natoms of all,)`.
    labels
        By name, `(nframes, width)` or `(natoms of all, width)`; zeros where a frame has none.
    present
        Which frames have each label `(nframes,)`, by name.
    parameters
        Values of "fparam" `(nframes, numb_fparam)` and "aparam" `(natoms of all, numb_aparam)`.
    doubtful
        Numbers of the frames that the neighbour search rejects because of their cell.
    """

    numbers: np.ndarray
    natoms: np.ndarray
    counts: np.ndarray
    periodic: np.ndarray
    box: np.ndarray | None
    coord: np.ndarray
    atype: np.ndarray
    labels: dict[str, np.ndarray]
    present: dict[str, np.ndarray]
    parameters: dict[str, np.ndarray]
    doubtful: np.ndarray


def read_chunk(
    systems: Sequence[System], offset: np.ndarray, numbers: np.ndarray, ntypes: int
) -> Chunk:
    """Read frames, whose numbers rise; `offset` has the number of the first frame of each system `(nsystems + 1,)`."""
    owners = np.searchsorted(offset, numbers, side="right") - 1
    cuts = np.flatnonzero(np.diff(owners)) + 1
    parts = [
        _pack(systems[owners[mine[0]]], numbers[mine], int(offset[owners[mine[0]]]), ntypes)
        for mine in np.split(np.arange(len(numbers)), cuts)
    ]
    return parts[0] if len(parts) == 1 else _join(parts)


def _pack(system: System, numbers: np.ndarray, first: int, ntypes: int) -> Chunk:
    """Read frames of one system."""
    frames = system.frames(numbers - first)
    atype = frames.atype
    # Frames usually have the same types in the same order, and no padding: then rows move as a whole.
    same = bool((atype[0] >= 0).all()) and (not system.mixed or bool((atype == atype[0]).all()))
    different = atype[:1] if same else atype
    order = np.argsort(np.where(different < 0, 1 << 30, different), axis=1, kind="stable")
    real = np.ones_like(atype, dtype=bool) if same else np.take_along_axis(atype, order, 1) >= 0
    source = None if same else (np.arange(len(atype))[:, None] * atype.shape[1] + order)[real]
    turned = same and bool((np.diff(atype[0]) < 0).any())

    def packed(values: np.ndarray) -> np.ndarray:
        """Return values of the real atoms `(nframes, natoms, width)`, each frame's sorted by type, as rows."""
        if turned:
            values = values.take(order[0], axis=1)
        rows = values.reshape(-1, values.shape[2])
        return rows if source is None else np.asarray(rows.take(source, axis=0))

    labels, present = {}, {}
    for name in frames.labels:
        values, present[name] = getattr(frames, name), frames.present(name)
        if not present[name].all():
            values = np.where(present[name].reshape(-1, *(1,) * (values.ndim - 1)), values, 0.0)
        if name in FRAME_LABELS:
            labels[name] = values.reshape(len(values), FRAME_LABELS[name])
        else:
            labels[name] = packed(values.reshape(*atype.shape, ATOM_LABELS[name]))
    parameters = {} if frames.fparam is None else {"fparam": frames.fparam}
    if frames.aparam is not None:
        parameters["aparam"] = packed(frames.aparam)
    return Chunk(
        numbers=numbers,
        natoms=real.sum(1),
        counts=frames.type_counts(ntypes),
        periodic=np.full(len(numbers), system.pbc),
        box=np.asarray(frames.box, dtype=np.float64) if system.pbc else None,
        coord=packed(frames.coord),
        atype=packed(atype[..., None])[:, 0].astype(np.int64),
        labels=labels,
        present=present,
        parameters=parameters,
        doubtful=numbers[_doubtful(system, frames)],
    )


def _doubtful(system: System, frames: Frames) -> np.ndarray:
    """Return which frames the neighbour search rejects because of their cell `(nframes,)`; `System` checks lengths."""
    if not system.pbc or frames.box is None:
        return np.zeros(frames.nframes, dtype=bool)
    volume, length = np.abs(np.linalg.det(frames.box)), np.abs(frames.box).max(axis=(1, 2))
    return np.asarray(~(volume > 1e-6 * length**3))


def _join(parts: Sequence[Chunk]) -> Chunk:
    """Return frames of several systems as one chunk."""

    def joined(name: str) -> np.ndarray:
        return np.concatenate([getattr(part, name) for part in parts])

    labels, present = {}, {}
    for name in sorted({name for part in parts for name in part.labels}):
        width = LABELS[name]
        rows = [len(part.numbers) if name in FRAME_LABELS else len(part.atype) for part in parts]
        labels[name] = np.concatenate(
            [
                part.labels.get(name, np.zeros((n, width)))
                for part, n in zip(parts, rows, strict=True)
            ]
        )
        missing = [np.zeros(len(part.numbers), dtype=bool) for part in parts]
        present[name] = np.concatenate(
            [part.present.get(name, none) for part, none in zip(parts, missing, strict=True)]
        )
    box = None
    if any(part.box is not None for part in parts):
        box = np.concatenate(
            [
                np.zeros((len(part.numbers), 3, 3)) if part.box is None else part.box
                for part in parts
            ]
        )
    # All systems carry the same parameters.
    parameters = {
        name: np.concatenate([part.parameters[name] for part in parts])
        for name in parts[0].parameters
    }
    names = ("numbers", "natoms", "counts", "periodic", "coord", "atype", "doubtful")
    arrays = {name: joined(name) for name in names}
    return Chunk(**arrays, box=box, labels=labels, present=present, parameters=parameters)


def pieces(
    systems: Sequence[System], offset: np.ndarray, numbers: np.ndarray
) -> Iterator[np.ndarray]:
    """Cut frames, in rising order, into parts of about `CHUNK_ATOMS` atoms."""
    natoms = np.array([system.natoms for system in systems])[
        np.searchsorted(offset, numbers, side="right") - 1
    ]
    turn = (natoms.cumsum() - natoms) // CHUNK_ATOMS
    yield from np.split(numbers, np.flatnonzero(np.diff(turn)) + 1)
