"""Frames read on the host, numbered over all systems and packed for a device.

A *chunk* is some frames as a device stores them: one after the other, without padding, the atoms of
each sorted by type. For example, two frames with the types B A B and A B, padded to three atoms:

    read      B A B   A B −      coord (2, 3, 3)   force (2, 3, 3)   energy (2,)
    packed    A B B A B          coord (5, 3)      force (5, 3)      energy (2, 1)

Threads read and pack chunks. Nothing here uses torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from deepmd_muon.data import Frames, System
from deepmd_muon.data.frames import ATOM_LABELS, LABELS

#: Atoms of a chunk with padding, about.
CHUNK_ATOMS = 1 << 16
#: Names of values that belong to atoms; others belong to frames.
PER_ATOM = frozenset(["coord", "atype", "aparam", *ATOM_LABELS])
# Volume of a cell over the cube of its largest component. Cells up to this ratio are *flat*: the
# host checks them. The host rejects ratios up to 1e-12, and cells with too many images.
_FLAT = 1e-6


class Numbering:
    """Numbers of frames: all frames of the first system, then all of the next one.

    For example, of two systems with 3 and 2 frames, number 3 is frame 0 of the second one.

    Attributes
    ----------
    systems
        The systems.
    first
        Number of the first frame of each system `(nsystems + 1,)`; the last entry is `nframes`.
    natoms
        Atoms of a frame of each system, with padding `(nsystems,)`.
    nframes
        Frames of all systems.
    """

    def __init__(self, systems: Sequence[System]) -> None:
        self.systems = systems
        nframes = np.array([system.nframes for system in systems], dtype=np.int64)
        self.first = np.concatenate([[0], nframes.cumsum()])
        self.natoms = np.array([system.natoms for system in systems], dtype=np.int64)
        self.nframes = int(self.first[-1])

    def systems_of(self, numbers: np.ndarray) -> np.ndarray:
        """Return the index of each frame's system."""
        systems: np.ndarray = np.searchsorted(self.first, numbers, side="right") - 1
        return systems

    def natoms_of(self, numbers: np.ndarray) -> np.ndarray:
        """Return the atoms of each frame, with padding."""
        natoms: np.ndarray = self.natoms[self.systems_of(numbers)]
        return natoms

    def locate(self, number: int) -> tuple[System, int]:
        """Return the system of a frame, and its row there."""
        k = int(self.systems_of(np.array(number)))
        return self.systems[k], number - int(self.first[k])

    def by_system(self, numbers: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
        """Yield the index of each system of some frames, with the frames' rows in it.

        `numbers` rise, and there is at least one.
        """
        systems = self.systems_of(numbers)
        for in_one_system in np.split(numbers, np.flatnonzero(np.diff(systems)) + 1):
            k = int(self.systems_of(in_one_system[0]))
            yield k, in_one_system - self.first[k]

    def cut(self, numbers: np.ndarray, atoms: int = CHUNK_ATOMS) -> Iterator[np.ndarray]:
        """Cut rising numbers into chunks of about so many atoms; yield the numbers of each.

        Only the last frame of a chunk may exceed `atoms`, which count with padding.
        """
        chunk_of_frame = starts_of(self.natoms_of(numbers)) // atoms
        yield from np.split(numbers, np.flatnonzero(np.diff(chunk_of_frame)) + 1)


@dataclass(frozen=True)
class Chunk:
    """Some frames, packed one after the other, the atoms of each sorted by type.

    Attributes
    ----------
    numbers
        Numbers of the frames `(nframes,)`, rising.
    values
        By name as in `FrameStore.tensors`, without "first_atom": rows of frames, or of real atoms.
        Also "box" `(nframes, 3, 3)` [Å], and "periodic" `(nframes,)`: which frames have cells. A
        label and its "has_…", or "box", may be left out if no frame has one.
    flat
        Numbers of the frames whose cell is so flat that the host checks it.
    """

    numbers: np.ndarray
    values: dict[str, np.ndarray]
    flat: np.ndarray

    @property
    def natoms(self) -> np.ndarray:
        """Atoms of each frame without padding `(nframes,)`."""
        return self.values["natoms"]


def read_chunk(numbering: Numbering, numbers: np.ndarray, ntypes: int) -> Chunk:
    """Read frames, whose numbers rise, and pack them for a model of `ntypes` types."""
    chunks = []
    for k, rows in numbering.by_system(numbers):
        system = numbering.systems[k]
        frames = system.frames(rows)
        chunks.append(pack_frames(system, frames, rows + numbering.first[k], ntypes))
    return join(chunks)


def pack_frames(system: System, frames: Frames, numbers: np.ndarray, ntypes: int) -> Chunk:
    """Pack frames of one system, with their numbers in a `Numbering`, rising."""
    nframes, natoms = frames.atype.shape
    atoms = _AtomsByType(frames.atype, mixed=system.mixed)
    values = {
        "natoms": atoms.natoms,
        "type_counts": frames.type_counts(ntypes).astype(np.int32),
        "periodic": np.full(nframes, system.pbc),
        "coord": atoms.pack(frames.coord),
        "atype": atoms.pack(frames.atype[..., None])[:, 0].astype(np.int64),
    }
    if system.pbc:
        values["box"] = np.asarray(frames.box, dtype=np.float64)
    for name in frames.labels:
        label = getattr(frames, name)
        present = frames.present(name)
        if not present.all():  # the others hold NaN
            ones = (1,) * (label.ndim - 1)
            label = np.where(present.reshape(-1, *ones), label, 0.0)
        values[f"has_{name}"] = present
        if name in PER_ATOM:
            values[name] = atoms.pack(label.reshape(nframes, natoms, LABELS[name]))
        else:
            values[name] = label.reshape(nframes, LABELS[name])
    frame_parameters = frames.frame_parameters
    if frame_parameters is not None:
        values["fparam"] = frame_parameters
    atomic_parameters = frames.atomic_parameters
    if atomic_parameters is not None:
        values["aparam"] = atoms.pack(atomic_parameters)
    return Chunk(numbers, values, flat=numbers[_has_flat_cell(system, frames)])


class _AtomsByType:
    """The real atoms of some frames, each frame's sorted by type.

    Frames usually have the same types in the same order, and no padding. Then `pack` moves whole
    columns of atoms, or only reshapes; otherwise it takes single rows.

    Parameters
    ----------
    atype
        Types `(nframes, natoms)`, negative for padding.
    mixed
        Whether frames may differ in their types.

    Attributes
    ----------
    natoms
        Real atoms of each frame `(nframes,)`.
    """

    def __init__(self, atype: np.ndarray, *, mixed: bool) -> None:
        nframes, natoms = atype.shape
        # Sorted order of the atoms, equal in all frames (natoms,); None if they are sorted already,
        # or if `_rows` is set.
        self._columns: np.ndarray | None = None
        # Rows of the sorted real atoms among the atoms of all frames (real atoms,); None if all
        # frames have the same types and no padding.
        self._rows: np.ndarray | None = None
        has_equal_frames = not mixed or bool((atype == atype[0]).all())
        if has_equal_frames and bool((atype[0] >= 0).all()):
            self.natoms = np.full(nframes, natoms)
            if bool((np.diff(atype[0]) < 0).any()):
                self._columns = np.argsort(atype[0], kind="stable")
        else:
            padding_last = np.where(atype < 0, 1 << 30, atype)
            order = np.argsort(padding_last, axis=1, kind="stable")  # (nframes, natoms)
            real = np.take_along_axis(atype, order, 1) >= 0
            self.natoms = real.sum(1)
            self._rows = (np.arange(nframes)[:, None] * natoms + order)[real]

    def pack(self, values: np.ndarray) -> np.ndarray:
        """Return values `(nframes, natoms, width)` of these atoms `(real atoms, width)`."""
        if self._columns is not None:
            values = values.take(self._columns, axis=1)
        packed: np.ndarray = values.reshape(-1, values.shape[2])
        return packed if self._rows is None else packed.take(self._rows, axis=0)


def _has_flat_cell(system: System, frames: Frames) -> np.ndarray:
    """Return which frames the host must check because of their cell `(nframes,)`.

    `System` has checked the lengths of cell vectors, so that their cubes do not overflow.
    """
    if not system.pbc or frames.box is None:
        return np.zeros(frames.nframes, dtype=bool)
    volume = np.abs(np.linalg.det(frames.box))
    length = np.abs(frames.box).max(axis=(1, 2))
    return np.asarray(~(volume > _FLAT * length**3))  # also NaN


def join(chunks: Sequence[Chunk]) -> Chunk:
    """Return the frames of several chunks as one chunk."""
    if len(chunks) == 1:
        return chunks[0]

    def rows_of(chunk: Chunk, name: str, like: np.ndarray) -> np.ndarray:
        """Return the values of a chunk; zeros if it lacks the label or the cells."""
        if name in chunk.values:
            return chunk.values[name]
        n_rows = chunk.natoms.sum() if name in PER_ATOM else len(chunk.numbers)
        return np.zeros((n_rows, *like.shape[1:]), like.dtype)

    examples = {name: array for chunk in chunks for name, array in chunk.values.items()}
    return Chunk(
        numbers=np.concatenate([chunk.numbers for chunk in chunks]),
        values={
            name: np.concatenate([rows_of(chunk, name, like) for chunk in chunks])
            for name, like in examples.items()
        },
        flat=np.concatenate([chunk.flat for chunk in chunks]),
    )


# ----- frames one after the other ----------------------------------------------------------------


def starts_of(natoms: np.ndarray) -> np.ndarray:
    """Return the row of the first atom of each frame, if frames follow one another `(nframes,)`."""
    starts: np.ndarray = natoms.cumsum() - natoms
    return starts


def within_frames(natoms: np.ndarray) -> np.ndarray:
    """Return the index of every atom within its frame `(natoms.sum(),)`."""
    indices: np.ndarray = np.arange(natoms.sum()) - np.repeat(starts_of(natoms), natoms)
    return indices
