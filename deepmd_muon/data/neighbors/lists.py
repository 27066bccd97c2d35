"""Neighbour lists of single frames, found by vesin and laid out as batches want them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from deepmd_muon.data.errors import NeighborError
from deepmd_muon.data.neighbors.far_atoms import check_geometry, far_pairs, is_sparse
from deepmd_muon.data.neighbors.images import TIE, Images, compare_images, pairs_of, places_of

if TYPE_CHECKING:
    from vesin import NeighborList as Vesin

#: Atoms nearer than this lie at the same place [Å].
SAME_PLACE = 1e-6


@dataclass(frozen=True)
class NeighborList:
    """Neighbours of every atom of a batch of frames."""

    index: np.ndarray  # int32 (nframes, natoms, nnei): neighbour's atom index in the same frame; −1 is an empty slot
    # int8, int16 or int32 (nframes, natoms, nnei, 3): translations S, r_ij = coord[j] + S·box − coord[i]; 0 if empty
    shift: np.ndarray
    # Columns are grouped by the neighbour's type, `sections[t]` columns for type t (one group for all types when the
    # list is not by type). Real neighbours come first in each section, nearest first.
    sections: tuple[int, ...]
    # int32 (nframes, ninner, natoms): how many leading columns of an atom lie within each shorter cut-off that was
    # asked for.
    inner: np.ndarray


@dataclass(frozen=True)
class NeighborStatistics:
    """Common part of the neighbour lists of one or all frames."""

    min_distance: (
        float  # shortest distance between two atoms [Å]; infinite when none are within the cutoff
    )
    # Most neighbours of each type that any atom has within the cutoff, before any truncation.
    max_neighbors: tuple[int, ...]
    max_total: int  # most neighbours of all types

    def merge(self, other: NeighborStatistics) -> NeighborStatistics:
        """Return the statistics of both together."""
        return NeighborStatistics(
            min(self.min_distance, other.min_distance),
            tuple(max(pair) for pair in zip(self.max_neighbors, other.max_neighbors, strict=True)),
            max(self.max_total, other.max_total),
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
    """All pairs of one frame within the cutoff, own images included; i and j count the real atoms."""

    real: np.ndarray  # (nreal,) numbers of the atoms that are not padding
    types: np.ndarray  # (nreal,)
    i: np.ndarray  # (npairs,) int64
    j: np.ndarray  # (npairs,) int64
    shift: np.ndarray  # (npairs, 3) int32
    distance: np.ndarray  # (npairs,) [Å]

    def statistics(self, ntypes: int) -> NeighborStatistics:
        """Return the statistics of the frame from its pairs."""
        seen = np.bincount(self.i * ntypes + self.types[self.j], minlength=len(self.real) * ntypes)
        return _statistics(seen, self.distance, ntypes)


def _statistics(seen: np.ndarray, distance: np.ndarray, ntypes: int) -> NeighborStatistics:
    """Return statistics from the neighbours of each type that every atom has `(nreal · ntypes,)` and from distances."""
    seen = seen.reshape(-1, ntypes)
    return NeighborStatistics(
        float(distance.min(initial=np.inf)),
        tuple(seen.max(axis=0, initial=0).tolist()),
        int(seen.sum(axis=1).max(initial=0)),
    )


def find_pairs(coord: np.ndarray, box: np.ndarray | None, atype: np.ndarray, rcut: float) -> Pairs:
    """Find all pairs of one frame; arguments and errors as in `build_neighbors`."""
    real, points, box, inverse = _checked(coord, box, atype, rcut)
    search = far_pairs if is_sparse(points, inverse, rcut) else _vesin_pairs
    i, j, shift, distance = search(points, box, rcut)
    if distance.size and distance.min() < SAME_PLACE:
        k = int(distance.argmin())
        raise NeighborError(
            f"atoms {real[i[k]]} and {real[j[k]]} lie at the same place; remove one of them"
        )
    return Pairs(real, atype[real].astype(np.int64), i, j, shift, distance)


def frame_statistics(
    coord: np.ndarray, box: np.ndarray | None, atype: np.ndarray, rcut: float, ntypes: int
) -> NeighborStatistics:
    """Count the neighbours of one frame, of which no list is wanted; arguments and errors as in `build_neighbors`."""
    real, points, box, inverse = _checked(coord, box, atype, rcut)
    types = atype[real].astype(np.int64)
    if (counted := _counted_images(points, box, inverse, types, rcut, ntypes)) is not None:
        return counted
    if is_sparse(points, inverse, rcut):
        return find_pairs(coord, box, atype, rcut).statistics(ntypes)
    finder = _vesin(rcut, full=False)
    # Each pair once: vesin decides by r², which is the same to the last bit from i to j and from j to i.
    pair, distance = _computed(finder, points, box, "Pd")
    if distance.min(initial=np.inf) < SAME_PLACE:
        find_pairs(
            coord, box, atype, rcut
        )  # raises, and names the atoms in the order of whole lists
    pair = pair.astype(np.int64)
    seen = pair * ntypes + types[pair[:, ::-1]]
    return _statistics(np.bincount(seen.ravel(), minlength=len(real) * ntypes), distance, ntypes)


def _counted_images(
    points: np.ndarray,
    box: np.ndarray | None,
    inverse: np.ndarray | None,
    types: np.ndarray,
    rcut: float,
    ntypes: int,
) -> NeighborStatistics | None:
    """Count the neighbours of few atoms; None where there are more, or where rounding decides."""
    images = compare_images(points, box, inverse, rcut)
    near = None if images is None else images.within(rcut)
    if images is None or near is None:
        return None
    if not near.any():
        return NeighborStatistics(np.inf, (0,) * ntypes, 0)
    shortest = _shortest(points, box, inverse, rcut, images)
    if shortest is None:
        return None
    return image_statistics(near.sum(axis=0, dtype=np.int32), types, np.array([shortest]), ntypes)


def image_statistics(
    images: np.ndarray, types: np.ndarray, distance: np.ndarray, ntypes: int
) -> NeighborStatistics:
    """Return statistics from the near images of each pair `(…, npairs)`, types `(…, natoms)` and distances [Å]."""
    first, second = pairs_of(types.shape[-1])
    table = np.zeros((*types.shape, types.shape[-1]))
    table[..., first, second] = images
    atoms = np.arange(types.shape[-1])
    table[..., atoms, atoms] /= 2  # an image of an atom on one side has its like on the other
    seen = (table + table.swapaxes(-1, -2)) @ np.eye(ntypes)[types]
    return _statistics(seen.astype(np.int64), distance, ntypes)


def _shortest(
    points: np.ndarray,
    box: np.ndarray | None,
    inverse: np.ndarray | None,
    rcut: float,
    images: Images,
) -> float | None:
    """Return the shortest distance as vesin rounds it [Å]; None where atoms may lie at the same place."""
    least, atoms = images.nearest()
    if least < 4.0 * SAME_PLACE**2 + images.error or is_sparse(points[atoms], inverse, rcut):
        return None
    finder = _vesin(rcut, full=False)
    return float(_computed(finder, points[atoms], box, "d")[0].min())


def _checked(
    coord: np.ndarray, box: np.ndarray | None, atype: np.ndarray, rcut: float
) -> tuple[np.ndarray, np.ndarray, np.ndarray | None, np.ndarray | None]:
    """Return the numbers of the real atoms, their positions, the cell and its inverse, which have been looked at."""
    real = np.flatnonzero(atype >= 0)
    points = np.ascontiguousarray(coord[real], dtype=np.float64)
    box = None if box is None else np.asarray(box, dtype=np.float64)
    return real, points, box, check_geometry(points, box, rcut, real)


def _vesin(rcut: float, *, full: bool) -> Vesin:
    # vesin imports torch where it is installed; only those who build neighbour lists shall pay for that.
    from vesin import NeighborList as Vesin

    # One thread: a frame takes milliseconds, and the order of pairs, which decides ties, stays the same.
    return Vesin(cutoff=rcut, full_list=full, n_threads=1)


def _computed(
    finder: Vesin, points: np.ndarray, box: np.ndarray | None, quantities: str
) -> Sequence[np.ndarray]:
    """Return quantities of all pairs: views of memory that vesin frees with `finder`."""
    found: Sequence[np.ndarray] = finder.compute(
        points=points,
        box=np.zeros((3, 3)) if box is None else box,
        periodic=box is not None,
        quantities=quantities,
        copy=False,
    )
    return found


def _vesin_pairs(points: np.ndarray, box: np.ndarray | None, rcut: float) -> tuple[np.ndarray, ...]:
    """Find i, j, shift and distance of all pairs, each both ways."""
    finder = _vesin(rcut, full=True)
    pair, shift, distance = _computed(finder, points, box, "PSd")
    # Copied in one go with the conversion.
    return (
        pair[:, 0].astype(np.int64),
        pair[:, 1].astype(np.int64),
        np.array(shift),
        np.array(distance),
    )


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
        Cell vectors as rows [Å], triclinic and smaller than the cutoff allowed; None without periodicity.
    atype : ndarray of int, (natoms,)
        Types; atoms of type −1 are padding and have no neighbours.
    rcut : float
        Cutoff radius [Å].
    sel : sequence of int, optional
        Of the ``sum(sel)`` nearest neighbours, at most this many per type are kept, the nearest ones (all of them when
        not `by_type`), as in deepmd-kit; None keeps all.
    by_type : bool
        Group the columns by the neighbour's type.
    ntypes : int, optional
        Number of types; taken from `sel`, else from `atype` when left out.
    inner : sequence of (float, int)
        Shorter cutoffs [Å] of a list that is not by type, each with the most neighbours counted within it.

    Raises
    ------
    NeighborError
        When the cell has no volume or is too flat, a position is not finite or too far away, or two atoms lie at the
        same place; names the atom.
    """
    atype = np.asarray(atype)
    if ntypes is None:
        ntypes = len(sel) if sel is not None and by_type else int(atype.max(initial=-1)) + 1
    pairs = _distinct_pairs(coord, box, atype, rcut, [short for short, _ in inner])
    if pairs is None:
        pairs = find_pairs(coord, box, atype, rcut)
    limits = group_limits(sel, by_type, ntypes)
    found = pairs
    if sel is not None and by_type:
        pairs = _nearest(pairs, int(limits.sum()), rcut)
    within = np.zeros((len(inner), len(atype)), dtype=np.int32)
    for row, (short, most) in zip(within, inner, strict=True):
        near = np.bincount(pairs.real[pairs.i[pairs.distance < short]], minlength=len(atype))
        np.minimum(near, min(most, limits[0]), out=row, casting="unsafe")
    index, shift, sections = _lay_out(pairs, len(atype), rcut, limits, by_type)
    dropped = len(found.i) - int(np.count_nonzero(index >= 0))
    return FrameNeighbors(index, shift, sections, within, found.statistics(ntypes), dropped)


def _distinct_pairs(
    coord: np.ndarray,
    box: np.ndarray | None,
    atype: np.ndarray,
    rcut: float,
    further: Sequence[float],
) -> Pairs | None:
    """Find the pairs of few atoms by their images; None where their list depends on rounding, or vesin is faster.

    No two pairs have nearly the same distance, and none is nearly at the cut-off or a `further` radius [Å].
    """
    real, points, box, inverse = _checked(coord, box, atype, rcut)
    if box is not None and np.square(box).sum(axis=1).min() < rcut**2:
        return None  # an atom has two images at the same distance, on opposite sides
    images = compare_images(points, box, inverse, rcut)
    if images is None or any(images.within(radius) is None for radius in further):
        return None
    near = images.within(rcut)
    if near is None or not near.any():
        return None
    cell, pair = places_of(near)
    square = images.square[near]
    if np.diff(np.sort(square)).min(initial=np.inf) < TIE + 2.0 * images.error:
        return None
    shortest = _shortest(points, box, inverse, rcut, images)
    if shortest is None:
        return None
    distance = np.sqrt(square)
    distance[square.argmin()] = shortest
    first, second = images.first.take(pair), images.second.take(pair)
    shift = (images.cells.take(cell, axis=0) + images.moved.take(pair, axis=1).T).astype(np.int32)
    return Pairs(
        real,
        atype[real].astype(np.int64),
        i=np.concatenate([first, second]),
        j=np.concatenate([second, first]),
        shift=np.concatenate([shift, -shift]),
        distance=np.concatenate([distance, distance]),
    )


def _nearest(pairs: Pairs, most: int, rcut: float) -> Pairs:
    """Keep the `most` nearest neighbours of every atom, of whatever type, as deepmd-kit does before it counts types."""
    counts = np.bincount(pairs.i)
    if counts.max(initial=0) <= most:
        return pairs
    order = np.argsort(pairs.i + pairs.distance / (2.0 * rcut))
    rank = np.arange(len(order)) - (np.cumsum(counts) - counts)[pairs.i[order]]
    kept = np.sort(order[rank < most])
    return replace(
        pairs,
        i=pairs.i[kept],
        j=pairs.j[kept],
        shift=pairs.shift[kept],
        distance=pairs.distance[kept],
    )


def _lay_out(
    pairs: Pairs, natoms: int, rcut: float, limits: np.ndarray, by_type: bool
) -> tuple[np.ndarray, np.ndarray, tuple[int, ...]]:
    """Sort pairs into rows of atoms and columns of groups, nearest first, at most `limits` a group."""
    nreal, ngroups = len(pairs.real), len(limits)
    slot = pairs.i * ngroups + pairs.types[pairs.j] if by_type else pairs.i
    counts = np.bincount(slot, minlength=nreal * ngroups)
    # One sort orders by atom, group and distance: the scaled distance is at most 0.5, slots are 1 apart.
    order = np.argsort(slot + pairs.distance / (2.0 * rcut))
    table = counts.reshape(nreal, ngroups)
    widths = np.minimum(table.max(axis=0, initial=0), limits)
    index = np.full((natoms, int(widths.sum())), -1, dtype=np.int32)
    # Places in the flat arrays: numpy assigns faster by one index than by row and column. Those of a slot follow each
    # other from its first one on.
    first = (pairs.real[:, None] * index.shape[1] + (np.cumsum(widths) - widths)).ravel()
    begin = np.cumsum(counts) - counts
    place = np.repeat(first - begin, counts) + np.arange(len(order))
    if (table > widths).any():
        most = np.broadcast_to(widths, table.shape).ravel()
        kept = np.arange(len(order)) < np.repeat(begin + most, counts)
        order, place = order[kept], place[kept]
    index.reshape(-1)[place] = pairs.real[pairs.j[order]]
    # The smallest type that holds the translations: int8, unless an atom left its cell far behind.
    shift = np.zeros(
        (*index.shape, 3), dtype=np.min_scalar_type(-1 - int(np.abs(pairs.shift).max(initial=0)))
    )
    whole = np.dtype(
        (np.void, 3 * shift.itemsize)
    )  # numpy moves a row in one piece three times as fast
    moved = np.ascontiguousarray(pairs.shift, dtype=shift.dtype).view(whole)[:, 0]
    shift.reshape(-1, 3).view(whole)[place, 0] = moved.take(order)
    return index, shift, tuple(int(w) for w in widths)


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


def stack_neighbors(parts: Sequence[FrameNeighbors]) -> NeighborList:
    """Put frames into one batch, each section as wide as the widest frame needs.

    One frame is not copied. Frames of fewer atoms are padded with atoms that have no neighbours.
    """
    if len(parts) == 1:
        only = parts[0]
        return NeighborList(only.index[None], only.shift[None], only.sections, only.inner[None])
    sections = tuple(max(widths) for widths in zip(*(p.sections for p in parts), strict=True))
    if all(p.sections == sections and p.index.shape == parts[0].index.shape for p in parts):
        arrays = [
            np.stack([getattr(p, name) for p in parts]) for name in ("index", "shift", "inner")
        ]
        return NeighborList(arrays[0], arrays[1], sections, arrays[2])
    natoms = max(p.index.shape[0] for p in parts)
    index = np.full((len(parts), natoms, sum(sections)), -1, dtype=np.int32)
    shift = np.zeros((*index.shape, 3), dtype=np.result_type(*(p.shift.dtype for p in parts)))
    inner = np.zeros((len(parts), len(parts[0].inner), natoms), dtype=np.int32)
    for k, part in enumerate(parts):
        own = part.index.shape[0]
        _copy_sections(part, index[k, :own], shift[k, :own], sections)
        inner[k, :, :own] = part.inner
    return NeighborList(index, shift, sections, inner)


def widen_sections(neighbors: NeighborList, sections: Sequence[int]) -> NeighborList:
    """Return the neighbours of a batch in sections that are at least as wide, filled up with empty slots."""
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
    """Copy columns to where wider sections begin."""
    begin = place = 0
    for own, width in zip(source.sections, sections, strict=True):
        index[..., place : place + own] = source.index[..., begin : begin + own]
        shift[..., place : place + own, :] = source.shift[..., begin : begin + own, :]
        begin += own
        place += width
