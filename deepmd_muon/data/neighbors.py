"""Neighbour lists: built once a frame with vesin, kept padded, stacked into batches.

The cache keeps every frame in the very layout a batch has, so that a batch of one frame is a view of it.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from deepmd_muon.data.errors import NeighborError
from deepmd_muon.data.frames import Frames
from deepmd_muon.data.system import System


@dataclass(frozen=True)
class NeighborList:
    """Neighbours of every atom of a batch of frames.

    Attributes
    ----------
    index : ndarray of int32, (nframes, natoms, nnei)
        Neighbour's atom index in the same frame; −1 is an empty slot.
    shift : ndarray of int8, int16 or int32, (nframes, natoms, nnei, 3)
        Cell translations S: r_ij = coord[j] + S·box − coord[i]; zero in empty slots.
    sections : tuple of int
        Columns are grouped by the neighbour's type, `sections[t]` columns for type t (one group for all types
        when the list is not by type). Real neighbours come first in each section, nearest first.
    """

    index: np.ndarray
    shift: np.ndarray
    sections: tuple[int, ...]


@dataclass(frozen=True)
class FrameNeighbors:
    """Neighbours of one frame and what was seen while building them.

    Attributes
    ----------
    index : ndarray of int32, (natoms, nnei)
    shift : ndarray of int8, int16 or int32, (natoms, nnei, 3)
    sections : tuple of int
        As in `NeighborList`, each as wide as this frame needs.
    max_neighbors : tuple of int
        Largest number of neighbours of each type that any atom has within the cutoff, before truncation.
    max_total : int
        Largest number of neighbours of all types, before truncation.
    min_distance : float
        Shortest distance [Å]; infinite without neighbours.
    dropped : int
        Neighbours beyond the nearest ``sel[t]`` that were left out.
    """

    index: np.ndarray
    shift: np.ndarray
    sections: tuple[int, ...]
    max_neighbors: tuple[int, ...]
    max_total: int
    min_distance: float
    dropped: int

    @property
    def nbytes(self) -> int:
        """Memory of the arrays."""
        return self.index.nbytes + self.shift.nbytes


def _pairs(
    coord: np.ndarray, box: np.ndarray | None, rcut: float
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """All pairs (i, j, S, distance) within the cutoff, own images included."""
    # vesin imports torch where it is installed; only those who build neighbour lists shall pay for that.
    from vesin import NeighborList as Vesin

    if box is not None:
        volume = abs(float(np.linalg.det(box)))
        if not volume > 1e-12 * float(np.abs(box).max()) ** 3:
            raise NeighborError(
                f"the cell {box.tolist()} has volume {volume:.3g} Å³; is it a cell without nopbc?"
            )
    # One thread: a frame takes milliseconds, and the order of pairs (which decides ties) stays the same.
    finder = Vesin(cutoff=rcut, full_list=True, n_threads=1)
    cell = np.zeros((3, 3)) if box is None else box
    pair, shift, distance = finder.compute(
        points=coord, box=cell, periodic=box is not None, quantities="PSd", copy=False
    )
    # The arrays are views of memory that vesin frees with `finder`.
    return (
        pair[:, 0].astype(np.int64),
        pair[:, 1].astype(np.int32),
        np.array(shift),
        np.array(distance),
    )


def _smallest_integers(shift: np.ndarray) -> np.ndarray:
    """Store translations in the smallest type that holds them; int8 unless atoms left the cell far behind."""
    reach = int(np.abs(shift).max()) if shift.size else 0
    for dtype in (np.int8, np.int16):
        if reach <= np.iinfo(dtype).max:
            return shift.astype(dtype)
    return shift.astype(np.int32)


def build_neighbors(
    coord: np.ndarray,
    box: np.ndarray | None,
    atype: np.ndarray,
    rcut: float,
    sel: Sequence[int] | None,
    by_type: bool,
    ntypes: int | None = None,
    min_sections: Sequence[int] | None = None,
) -> FrameNeighbors:
    """Find the neighbours of every atom of one frame.

    Parameters
    ----------
    coord : ndarray, (natoms, 3)
        Positions [Å], inside the cell or not.
    box : ndarray, (3, 3), optional
        Cell vectors as rows [Å], triclinic and smaller than the cutoff allowed; None without periodicity.
    atype : ndarray of int, (natoms,)
        Types; atoms of type −1 are padding and have no neighbours.
    rcut : float
        Cutoff radius [Å].
    sel : sequence of int, optional
        At most this many neighbours per type are kept, the nearest ones (their sum when not `by_type`);
        None keeps all.
    by_type : bool
        Group the columns by the neighbour's type.
    ntypes : int, optional
        Number of types; taken from `sel`, else from `atype` when left out.
    min_sections : sequence of int, optional
        Make the sections at least this wide, so that batches of many frames share one shape.

    Raises
    ------
    NeighborError
        When the cell has no volume, a position is not finite, or two atoms coincide.
    """
    atype = np.asarray(atype)
    real = np.flatnonzero(atype >= 0)
    if ntypes is None:
        ntypes = len(sel) if sel is not None else int(atype.max(initial=-1)) + 1
    if not np.isfinite(coord).all():
        raise NeighborError("a position is not finite")
    i, j, shift, distance = _pairs(np.ascontiguousarray(coord[real], dtype=np.float64), box, rcut)
    min_distance = float(distance.min(initial=np.inf))
    if min_distance < 1e-6:
        k = int(distance.argmin())
        raise NeighborError(f"atoms {real[i[k]]} and {real[j[k]]} lie at the same place; remove one of them")
    types = atype[real].astype(np.int64)
    per_type = np.bincount(i * ntypes + types[j], minlength=len(real) * ntypes).reshape(len(real), ntypes)
    limits = _limits(sel, by_type, ntypes)
    groups = types[j] if by_type else np.zeros_like(i)
    ngroups = len(limits)
    slot = i * ngroups + groups
    counts = np.bincount(slot, minlength=len(real) * ngroups)
    # One sort orders by atom, group and distance: the scaled distance is at most 0.5, slots are 1 apart.
    order = np.argsort(slot + distance / (2.0 * rcut))
    slot, groups = slot[order], groups[order]
    rank = np.arange(len(order)) - (np.cumsum(counts) - counts)[slot]
    kept = rank < limits[groups]
    width = np.minimum(counts.reshape(len(real), ngroups).max(axis=0, initial=0), limits)
    if min_sections is not None:
        width = np.maximum(width, np.asarray(min_sections))
    column = (np.cumsum(width) - width)[groups] + rank
    order, column = order[kept], column[kept]
    rows = real[i[order]]
    index = np.full((len(atype), int(width.sum())), -1, dtype=np.int32)
    index[rows, column] = real[j[order]]
    small = _smallest_integers(shift)
    shifts = np.zeros((*index.shape, 3), dtype=small.dtype)
    shifts[rows, column] = small[order]
    return FrameNeighbors(
        index=index,
        shift=shifts,
        sections=tuple(int(w) for w in width),
        max_neighbors=tuple(int(c) for c in per_type.max(axis=0, initial=0)),
        max_total=int(per_type.sum(axis=1).max(initial=0)),
        min_distance=min_distance,
        dropped=int(len(kept) - kept.sum()),
    )


def _limits(sel: Sequence[int] | None, by_type: bool, ntypes: int) -> np.ndarray:
    """Most neighbours kept in each group."""
    if sel is None:
        return np.full(ntypes if by_type else 1, np.iinfo(np.int64).max)
    if by_type and len(sel) != ntypes:
        raise NeighborError(f"sel {list(sel)} must have one entry for each of the {ntypes} types")
    return np.array(sel if by_type else [sum(sel)], dtype=np.int64)


def stack_neighbors(parts: Sequence[FrameNeighbors]) -> NeighborList:
    """Put frames into one batch, each section as wide as the widest frame needs.

    One frame is not copied. Frames of fewer atoms are padded with atoms that have no neighbours.
    """
    if len(parts) == 1:
        only = parts[0]
        return NeighborList(only.index[None], only.shift[None], only.sections)
    sections = tuple(max(widths) for widths in zip(*(p.sections for p in parts), strict=True))
    if all(p.sections == sections and p.index.shape == parts[0].index.shape for p in parts):
        return NeighborList(np.stack([p.index for p in parts]), np.stack([p.shift for p in parts]), sections)
    natoms = max(p.index.shape[0] for p in parts)
    nnei = sum(sections)
    index = np.full((len(parts), natoms, nnei), -1, dtype=np.int32)
    shift = np.zeros((len(parts), natoms, nnei, 3), dtype=np.result_type(*(p.shift.dtype for p in parts)))
    for k, part in enumerate(parts):
        atoms = part.index.shape[0]
        source = target = 0
        for own, width in zip(part.sections, sections, strict=True):
            index[k, :atoms, target : target + own] = part.index[:, source : source + own]
            shift[k, :atoms, target : target + own] = part.shift[:, source : source + own]
            source += own
            target += width
    return NeighborList(index, shift, sections)


@dataclass
class NeighborCache:
    """Neighbour lists of frames, each built once and kept while the memory budget lasts.

    When the budget is spent, further frames are built anew each time and nothing is thrown out: training
    visits each frame once an epoch, so the least recently used one is among those needed next.

    Parameters
    ----------
    rcut : float
        Cutoff radius [Å].
    sel : tuple of int, optional
        Most neighbours kept per type; None keeps all.
    by_type : bool
        Group the columns by the neighbour's type.
    max_bytes : int
        Memory budget.
    ntypes : int, optional
        Number of types of the model; ``len(sel)`` when left out.
    min_sections : tuple of int, optional
        Widths every batch has at least; with the widths of `neighbor_statistics` all batches share one shape.

    Attributes
    ----------
    nbytes : int
        Memory in use.
    dropped : int
        Neighbours beyond `sel` left out so far, over all frames that were built.
    """

    rcut: float
    sel: tuple[int, ...] | None
    by_type: bool
    max_bytes: int = 2 << 30
    ntypes: int | None = None
    min_sections: tuple[int, ...] | None = None
    nbytes: int = field(default=0, init=False)
    dropped: int = field(default=0, init=False)
    _frames: dict[tuple[str, int], FrameNeighbors] = field(default_factory=dict, init=False, repr=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False, repr=False)

    def __post_init__(self) -> None:
        if not self.rcut > 0:
            raise NeighborError(f"rcut must be positive, found {self.rcut}")
        if self.ntypes is None:
            if self.sel is None or not self.by_type:
                raise NeighborError("give ntypes: without a sel per type it cannot be inferred")
            self.ntypes = len(self.sel)
        _limits(self.sel, self.by_type, self.ntypes)

    def __len__(self) -> int:
        return len(self._frames)

    def frame(self, system: System, number: int, frames: Frames, row: int) -> FrameNeighbors:
        """Neighbours of frame `number` of a system, whose positions are row `row` of `frames`."""
        key = (system.name, number)
        found = self._frames.get(key)
        if found is not None:
            return found
        box = frames.box[row] if system.pbc and frames.box is not None else None
        try:
            built = build_neighbors(
                frames.coord[row],
                box,
                frames.atype[row],
                self.rcut,
                self.sel,
                self.by_type,
                self.ntypes,
                self.min_sections,
            )
        except (NeighborError, RuntimeError) as error:
            raise NeighborError(f"system {system.name}, frame {number}: {error}") from error
        with self._lock:
            self.dropped += built.dropped
            if self.nbytes + built.nbytes <= self.max_bytes and key not in self._frames:
                self._frames[key] = built
                self.nbytes += built.nbytes
        return built

    def batch(self, system: System, indices: Sequence[int] | np.ndarray, frames: Frames) -> NeighborList:
        """Neighbours of a batch of frames of one system; `frames` are those frames.

        A batch of one frame is a view of the cache: do not write into it.
        """
        return stack_neighbors([self.frame(system, int(n), frames, row) for row, n in enumerate(indices)])
