"""Neighbour lists of single frames: vesin finds the pairs, this file lays them out.

`build_neighbors` and `stack_neighbors` give the lists of batches, `with_ghosts` the form of MD
programs.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from deepmd_muon.data.errors import NeighborError
from deepmd_muon.data.neighbors.far_atoms import RawPairs, check_geometry, far_pairs, is_sparse

if TYPE_CHECKING:
    from vesin import NeighborList as Vesin

#: Atoms nearer than this are at the same place [Å].
SAME_PLACE = 1e-6
# `with_ghosts` wraps atoms into their cell if they see each other over more cells than this.
_MOST_CELLS = 100
_VESIN_IMPORT = threading.Lock()


@dataclass(frozen=True)
class NeighborList:
    """Neighbours of every atom of a batch of frames."""

    # int32 (nframes, natoms, nnei): the neighbour's number in the same frame; −1 is an empty slot
    index: np.ndarray
    # int8, int16 or int32 (nframes, natoms, nnei, 3): S in r_ij = coord[j] + S·box − coord[i]; 0 if
    # empty
    shift: np.ndarray
    # Columns are grouped by the neighbour's type, `sections[t]` columns for type t (one group for
    # all types when the list is not by type). Real neighbours come first in each section, nearest
    # first.
    sections: tuple[int, ...]
    # int32 (nframes, ninner, natoms): how many leading columns of an atom are within each shorter
    # cut-off
    inner: np.ndarray


@dataclass(frozen=True)
class NeighborStatistics:
    """Common part of the neighbour lists of one or all frames."""

    # Shortest distance between two atoms [Å]; infinite if none are within the cut-off.
    min_distance: float
    # Most neighbours of each type that any atom has within the cut-off, before any truncation.
    max_neighbors: tuple[int, ...]
    max_total: int  # most neighbours of all types

    def merge(self, other: NeighborStatistics) -> NeighborStatistics:
        """Return the statistics of both together."""
        pairs = zip(self.max_neighbors, other.max_neighbors, strict=True)
        return NeighborStatistics(
            min_distance=min(self.min_distance, other.min_distance),
            max_neighbors=tuple(max(pair) for pair in pairs),
            max_total=max(self.max_total, other.max_total),
        )


@dataclass(frozen=True)
class FrameNeighbors:
    """Neighbours of one frame, as in `NeighborList`, and statistics from building them."""

    index: np.ndarray  # int32 (natoms, nnei)
    shift: np.ndarray  # int8, int16 or int32 (natoms, nnei, 3)
    sections: tuple[int, ...]  # each as wide as this frame needs
    inner: np.ndarray  # int32 (ninner, natoms)
    statistics: NeighborStatistics  # of this frame, before truncation
    dropped: int  # neighbours beyond the nearest ``sel[t]`` that were left out

    @property
    def nbytes(self) -> int:
        """Memory of the arrays."""
        return self.index.nbytes + self.shift.nbytes + self.inner.nbytes


@dataclass(frozen=True)
class Pairs:
    """All pairs of one frame within the cut-off, each both ways.

    Images of an atom are its neighbours, too. i and j count the real atoms.
    """

    real: np.ndarray  # (nreal,) numbers of the atoms that are not padding
    types: np.ndarray  # (nreal,)
    i: np.ndarray  # (npairs,) int64
    j: np.ndarray  # (npairs,) int64
    shift: np.ndarray  # (npairs, 3) int32
    distance: np.ndarray  # (npairs,) [Å]

    def statistics(self, ntypes: int) -> NeighborStatistics:
        """Return the statistics of the frame."""
        slot = self.i * ntypes + self.types[self.j]
        counts = np.bincount(slot, minlength=len(self.real) * ntypes)
        return _statistics(counts, self.distance, ntypes)


# ----- lists of one frame ------------------------------------------------------------------------


def build_neighbors(
    coord: np.ndarray,
    box: np.ndarray | None,
    atype: np.ndarray,
    rcut: float,
    sel: Sequence[int] | None,
    by_type: bool,
    ntypes: int | None = None,
    inner: Sequence[tuple[float, int]] = (),
) -> FrameNeighbors:
    """Find the neighbours of every atom of one frame.

    Parameters
    ----------
    coord : ndarray, (natoms, 3)
        Positions [Å], inside the cell or not.
    box : ndarray, (3, 3), optional
        Cell vectors as rows [Å], triclinic and smaller than the cut-off allowed; None without
        periodicity.
    atype : ndarray of int, (natoms,)
        Types; atoms of type −1 are padding and have no neighbours.
    rcut : float
        Cut-off radius [Å].
    sel : sequence of int, optional
        Of the ``sum(sel)`` nearest neighbours, at most this many per type are kept, the nearest
        ones (all of them when not `by_type`), as in deepmd-kit; None keeps all.
    by_type : bool
        Group the columns by the neighbour's type.
    ntypes : int, optional
        Number of types; taken from `sel`, else from `atype` when left out.
    inner : sequence of (float, int)
        Shorter cut-offs [Å] of a list that is not by type, each with the most neighbours counted
        within it.

    Raises
    ------
    NeighborError
        When the cell has no volume or is too flat, a position is not finite or too far away, or two
        atoms are at the same place; names the atom.
    """
    atype = np.asarray(atype)
    if ntypes is None:
        ntypes = len(sel) if sel is not None and by_type else int(atype.max(initial=-1)) + 1
    all_pairs = find_pairs(coord, box, atype, rcut)
    limits = group_limits(sel, by_type, ntypes)
    pairs = all_pairs
    if sel is not None and by_type:
        pairs = _keep_nearest(all_pairs, int(limits.sum()), rcut)

    natoms = len(atype)
    inner_counts = np.zeros((len(inner), natoms), dtype=np.int32)
    for row, (radius, max_count) in zip(inner_counts, inner, strict=True):
        within = pairs.real[pairs.i[pairs.distance < radius]]
        counts = np.bincount(within, minlength=natoms)
        np.minimum(counts, min(max_count, limits[0]), out=row, casting="unsafe")
    index, shift, sections = _lay_out(pairs, natoms, rcut, limits, by_type)
    return FrameNeighbors(
        index=index,
        shift=shift,
        sections=sections,
        inner=inner_counts,
        statistics=all_pairs.statistics(ntypes),
        dropped=len(all_pairs.i) - int(np.count_nonzero(index >= 0)),
    )


def find_pairs(coord: np.ndarray, box: np.ndarray | None, atype: np.ndarray, rcut: float) -> Pairs:
    """Find all pairs of one frame; arguments and errors as in `build_neighbors`."""
    frame = _check(coord, box, atype, rcut)
    search = far_pairs if is_sparse(frame.points, frame.inverse, rcut) else _vesin_pairs
    pairs = search(frame.points, frame.box, rcut)
    if pairs.distance.size and pairs.distance.min() < SAME_PLACE:
        closest = int(pairs.distance.argmin())
        i = frame.real[pairs.i[closest]]
        j = frame.real[pairs.j[closest]]
        raise NeighborError(f"atoms {i} and {j} lie at the same place; remove one of them")
    types = atype[frame.real].astype(np.int64)
    return Pairs(frame.real, types, *pairs)


def frame_statistics(
    coord: np.ndarray, box: np.ndarray | None, atype: np.ndarray, rcut: float, ntypes: int
) -> NeighborStatistics:
    """Count the neighbours of one frame without a list; arguments as in `build_neighbors`."""
    frame = _check(coord, box, atype, rcut)
    if is_sparse(frame.points, frame.inverse, rcut):
        return find_pairs(coord, box, atype, rcut).statistics(ntypes)
    # Each pair once: vesin decides by r², which is the same to the last bit from i to j and from j
    # to i.
    finder = _vesin(rcut, full=False)
    pair, distance = _compute(finder, frame.points, frame.box, "Pd")
    if distance.min(initial=np.inf) < SAME_PLACE:
        # It raises, and names the atoms in the order of whole lists.
        find_pairs(coord, box, atype, rcut)
    pair = pair.astype(np.int64)  # (npairs, 2)
    types = atype[frame.real].astype(np.int64)
    slot = pair * ntypes + types[pair[:, ::-1]]
    counts = np.bincount(slot.ravel(), minlength=len(frame.real) * ntypes)
    return _statistics(counts, distance, ntypes)


def _statistics(counts: np.ndarray, distance: np.ndarray, ntypes: int) -> NeighborStatistics:
    """Return statistics from counts by atom and type `(nreal · ntypes,)` and all distances [Å]."""
    by_atom = counts.reshape(-1, ntypes)
    return NeighborStatistics(
        min_distance=float(distance.min(initial=np.inf)),
        max_neighbors=tuple(by_atom.max(axis=0, initial=0).tolist()),
        max_total=int(by_atom.sum(axis=1).max(initial=0)),
    )


class _CheckedFrame(NamedTuple):
    """The real atoms of a frame that `check_geometry` accepted."""

    real: np.ndarray  # (nreal,) their numbers
    points: np.ndarray  # (nreal, 3) float64, contiguous [Å]
    box: np.ndarray | None  # (3, 3) float64 [Å]
    inverse: np.ndarray | None  # (3, 3), of the cell [1/Å]


def _check(
    coord: np.ndarray, box: np.ndarray | None, atype: np.ndarray, rcut: float
) -> _CheckedFrame:
    real = np.flatnonzero(atype >= 0)
    points = np.ascontiguousarray(coord[real], dtype=np.float64)
    box = None if box is None else np.asarray(box, dtype=np.float64)
    inverse = check_geometry(points, box, rcut, real)
    return _CheckedFrame(real, points, box, inverse)


def _vesin(rcut: float, *, full: bool) -> Vesin:
    # vesin imports torch if it is installed; only those who build neighbour lists pay for that. The
    # first import fails in some threads when several start it.
    with _VESIN_IMPORT:
        from vesin import NeighborList as Vesin

    # One thread: a frame takes milliseconds, and the order of pairs, which decides ties, stays the
    # same.
    return Vesin(cutoff=rcut, full_list=full, n_threads=1)


def _compute(
    finder: Vesin, points: np.ndarray, box: np.ndarray | None, quantities: str
) -> Sequence[np.ndarray]:
    """Return quantities of all pairs: views of memory that vesin frees with `finder`."""
    views: Sequence[np.ndarray] = finder.compute(
        points=points,
        box=np.zeros((3, 3)) if box is None else box,
        periodic=box is not None,
        quantities=quantities,
        copy=False,
    )
    return views


def _vesin_pairs(points: np.ndarray, box: np.ndarray | None, rcut: float) -> RawPairs:
    finder = _vesin(rcut, full=True)
    pair, shift, distance = _compute(finder, points, box, "PSd")
    # Every column is copied out of vesin's memory: `astype` copies and converts at once.
    return RawPairs(
        i=pair[:, 0].astype(np.int64),
        j=pair[:, 1].astype(np.int64),
        shift=np.array(shift),
        distance=np.array(distance),
    )


def _keep_nearest(pairs: Pairs, most: int, rcut: float) -> Pairs:
    """Keep each atom's `most` nearest neighbours, as deepmd-kit does before it counts types."""
    counts = np.bincount(pairs.i)
    if counts.max(initial=0) <= most:
        return pairs
    order = np.argsort(pairs.i + pairs.distance / (2.0 * rcut))  # by atom, then by distance
    atom_start = np.cumsum(counts) - counts
    rank = np.arange(len(order)) - atom_start[pairs.i[order]]
    near = np.sort(order[rank < most])
    return replace(
        pairs,
        i=pairs.i[near],
        j=pairs.j[near],
        shift=pairs.shift[near],
        distance=pairs.distance[near],
    )


def _lay_out(
    pairs: Pairs, natoms: int, rcut: float, limits: np.ndarray, by_type: bool
) -> tuple[np.ndarray, np.ndarray, tuple[int, ...]]:
    """Sort pairs into rows of atoms and sections of columns, nearest first; cut at `limits`.

    Return index `(natoms, nnei)`, shift `(natoms, nnei, 3)` and the widths of the sections.
    """
    nreal = len(pairs.real)
    nsections = len(limits)
    # A slot is one section of one atom.
    slot = pairs.i * nsections + pairs.types[pairs.j] if by_type else pairs.i  # (npairs,)
    slot_counts = np.bincount(slot, minlength=nreal * nsections)
    # One sort orders by slot and distance: slots are 1 apart, the scaled distance is at most 0.5.
    order = np.argsort(slot + pairs.distance / (2.0 * rcut))
    slot_start = np.cumsum(slot_counts) - slot_counts  # in `order`

    atom_counts = slot_counts.reshape(nreal, nsections)
    widths = np.minimum(atom_counts.max(axis=0, initial=0), limits)
    nnei = int(widths.sum())
    # Pairs of a slot take consecutive places from its first one on. Places are flat: numpy assigns
    # faster by one index than by row and column.
    section_start = np.cumsum(widths) - widths
    first_place = (pairs.real[:, None] * nnei + section_start).ravel()  # (nreal · nsections,)
    place = np.repeat(first_place - slot_start, slot_counts) + np.arange(len(order))
    if (atom_counts > widths).any():
        slot_widths = np.broadcast_to(widths, atom_counts.shape).ravel()
        fits = np.arange(len(order)) < np.repeat(slot_start + slot_widths, slot_counts)
        order = order[fits]
        place = place[fits]

    index = np.full((natoms, nnei), -1, dtype=np.int32)
    index.reshape(-1)[place] = pairs.real[pairs.j[order]]
    # The smallest type that holds the translations: int8, unless an atom left its cell far behind.
    largest = int(np.abs(pairs.shift).max(initial=0))
    shift = np.zeros((natoms, nnei, 3), dtype=np.min_scalar_type(-1 - largest))
    # numpy moves a row (S_x, S_y, S_z) as one value three times as fast.
    row_type = np.dtype((np.void, 3 * shift.itemsize))
    rows = np.ascontiguousarray(pairs.shift, dtype=shift.dtype).view(row_type)[:, 0]
    shift.reshape(-1, 3).view(row_type)[place, 0] = rows.take(order)
    return index, shift, tuple(int(width) for width in widths)


def group_limits(sel: Sequence[int] | None, by_type: bool, ntypes: int) -> np.ndarray:
    """Most neighbours kept in each group of columns, int64 (ngroups,).

    Raises
    ------
    NeighborError
        When `sel` does not fit the number of types.
    """
    if sel is None:
        return np.full(ntypes if by_type else 1, np.iinfo(np.int64).max)
    if by_type and len(sel) != ntypes:
        raise NeighborError(f"sel {list(sel)} must have one entry for each of the {ntypes} types")
    return np.array(sel if by_type else [sum(sel)], dtype=np.int64)


# ----- lists of batches --------------------------------------------------------------------------


def stack_neighbors(frames: Sequence[FrameNeighbors]) -> NeighborList:
    """Put frames into one batch, each section as wide as the widest frame needs.

    One frame is not copied. Frames of fewer atoms are padded with atoms that have no neighbours.
    """
    if len(frames) == 1:
        only = frames[0]
        return NeighborList(only.index[None], only.shift[None], only.sections, only.inner[None])
    sections = tuple(max(w) for w in zip(*(frame.sections for frame in frames), strict=True))
    shape = frames[0].index.shape
    if all(frame.sections == sections and frame.index.shape == shape for frame in frames):
        return NeighborList(
            index=np.stack([frame.index for frame in frames]),
            shift=np.stack([frame.shift for frame in frames]),
            sections=sections,
            inner=np.stack([frame.inner for frame in frames]),
        )
    natoms = max(frame.index.shape[0] for frame in frames)
    index = np.full((len(frames), natoms, sum(sections)), -1, dtype=np.int32)
    shift = np.zeros(
        (*index.shape, 3), dtype=np.result_type(*(frame.shift.dtype for frame in frames))
    )
    inner = np.zeros((len(frames), len(frames[0].inner), natoms), dtype=np.int32)
    for k, frame in enumerate(frames):
        n = frame.index.shape[0]
        _copy_sections(frame, index[k, :n], shift[k, :n], sections)
        inner[k, :, :n] = frame.inner
    return NeighborList(index, shift, sections, inner)


def widen_sections(neighbors: NeighborList, sections: Sequence[int]) -> NeighborList:
    """Return the neighbours of a batch in wider sections, filled up with empty slots."""
    if tuple(sections) == neighbors.sections:
        return neighbors
    index = np.full((*neighbors.index.shape[:2], sum(sections)), -1, dtype=neighbors.index.dtype)
    shift = np.zeros((*index.shape, 3), dtype=neighbors.shift.dtype)
    _copy_sections(neighbors, index, shift, sections)
    return replace(neighbors, index=index, shift=shift, sections=tuple(sections))


def _copy_sections(
    source: NeighborList | FrameNeighbors,
    index: np.ndarray,
    shift: np.ndarray,
    sections: Sequence[int],
) -> None:
    """Copy the columns of `source` to the starts of wider sections of `index` and `shift`."""
    source_start = 0
    start = 0
    for source_width, width in zip(source.sections, sections, strict=True):
        columns = slice(start, start + source_width)
        source_columns = slice(source_start, source_start + source_width)
        index[..., columns] = source.index[..., source_columns]
        shift[..., columns, :] = source.shift[..., source_columns, :]
        source_start += source_width
        start += width


# ----- frames as MD programs hold them -----------------------------------------------------------


@dataclass(frozen=True)
class GhostedFrame:
    """The real atoms of a frame, followed by their images within reach of another atom."""

    coord: np.ndarray  # float64 (nall, 3): positions [Å]
    owner: np.ndarray  # int64 (nall,): the frame's atom that each is, or is an image of
    # int64 (nreal, n): all atoms within the cut-off of each real atom, in any order; −1 in empty
    # slots
    neighbor: np.ndarray


def with_ghosts(
    coord: np.ndarray, box: np.ndarray | None, atype: np.ndarray, rcut: float
) -> GhostedFrame:
    """Find the images and neighbours of one frame within `rcut` [Å].

    Rows of `box` are the cell vectors, and positions may be outside the cell; None without
    periodicity. Atoms of type −1 are padding and left out.

    Raises
    ------
    NeighborError
        As `build_neighbors`.
    """
    pairs = find_pairs(coord, box, atype, rcut)
    if box is not None and np.abs(pairs.shift).max(initial=0) > _MOST_CELLS:
        # The table below has an entry for every translation between the smallest and the largest.
        coord = coord - np.floor(coord @ np.linalg.inv(box)) @ box
        pairs = find_pairs(coord, box, atype, rcut)
    nreal = len(pairs.real)
    points = np.asarray(coord, dtype=np.float64)[pairs.real]
    owner = pairs.real
    neighbor = pairs.j
    if box is not None and len(pairs.shift):
        lowest = pairs.shift.min(axis=0)  # at most 0: a full list has −S with every S
        span = tuple(pairs.shift.max(axis=0) - lowest + 1)
        # A key numbers translations and atoms; the atoms themselves are at the keys from `home` on.
        cell = np.ravel_multi_index(tuple((pairs.shift - lowest).T), span)
        key = cell * nreal + pairs.j
        home = int(np.ravel_multi_index(tuple(-lowest), span)) * nreal
        is_image = np.zeros(int(np.prod(span)) * nreal, dtype=bool)
        is_image[key] = True
        is_image[home : home + nreal] = False
        image_key = np.flatnonzero(is_image)

        number = np.empty(len(is_image), dtype=np.int64)  # of each key in the ghosted frame
        number[home : home + nreal] = np.arange(nreal)
        number[image_key] = nreal + np.arange(len(image_key))
        neighbor = number[key]

        image_cell, image_owner = np.divmod(image_key, nreal)
        translation = np.stack(np.unravel_index(image_cell, span), axis=1) + lowest
        image_points = points[image_owner] + translation @ np.asarray(box, dtype=np.float64)
        points = np.concatenate([points, image_points])
        owner = np.concatenate([owner, owner[image_owner]])
    return GhostedFrame(points, owner, _rows(pairs.i, neighbor, nreal))


def _rows(i: np.ndarray, neighbor: np.ndarray, nreal: int) -> np.ndarray:
    """Return the neighbours of each atom in a row `(nreal, n)`, filled up with −1."""
    counts = np.bincount(i, minlength=nreal)
    order = np.argsort(i, kind="stable")
    row = i[order]
    atom_start = np.cumsum(counts) - counts
    column = np.arange(len(row)) - atom_start[row]
    rows = np.full((nreal, int(counts.max(initial=0))), -1, dtype=np.int64)
    rows[row, column] = neighbor[order]
    return rows
