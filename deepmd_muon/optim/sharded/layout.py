"""The elements of a parameter that each rank holds, from global shape, mesh and placements; no communication.

Everything here is plain Python. Along one dimension a rank holds *runs*, half-open intervals of global indices in
increasing order: one for plain shards, several for strided shards (FSDP over tensor parallelism on one dimension)
and for dimensions that a matrix view folds together. A rank's local tensor is the product of its runs.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from deepmd_muon.optim.routing.views import Axis, MatrixView
from deepmd_muon.optim.rules.interface import Extent

Runs = tuple[tuple[int, int], ...]


@dataclasses.dataclass(frozen=True)
class ShardPlacement:
    """A mesh axis shards tensor dimension `dim`; with `stride` > 1, each of `stride` equal parts of it separately."""

    dim: int
    stride: int = 1

    def __str__(self) -> str:
        return (
            f"Shard({self.dim})" if self.stride == 1 else f"StridedShard({self.dim}, {self.stride})"
        )


@dataclasses.dataclass(frozen=True)
class Layout:
    """A device mesh, and the placement of a parameter on each of its axes.

    Attributes
    ----------
    mesh
        The mesh's shape.
    ranks
        Global ranks in row-major order of the mesh.
    placements
        One per mesh axis: a `ShardPlacement`, or None where the parameter is replicated.
    """

    mesh: tuple[int, ...]
    ranks: tuple[int, ...]
    placements: tuple[ShardPlacement | None, ...]

    def __str__(self) -> str:
        size = "x".join(map(str, self.mesh))
        return f"mesh {size}: {', '.join(str(p or 'Replicate') for p in self.placements)}"

    def coordinates(self) -> Iterator[tuple[int, ...]]:
        """Yield the mesh coordinates of every rank, in the order of `ranks`."""
        return itertools.product(*map(range, self.mesh))

    def replicas(self) -> tuple[tuple[int, ...], ...]:
        """Return the ranks of each complete copy of the parameter, shards in the same order in every copy."""
        copies: dict[tuple[int, ...], list[int]] = {}
        for rank, place in zip(self.ranks, self.coordinates(), strict=True):
            key = tuple(
                i for i, placement in zip(place, self.placements, strict=True) if placement is None
            )
            copies.setdefault(key, []).append(rank)
        return tuple(tuple(copy) for copy in copies.values())


def replicated(ranks: Sequence[int]) -> Layout:
    """Return the layout of a parameter that is replicated on these ranks."""
    return Layout((len(ranks),), tuple(ranks), (None,))


def state_layout(
    shape: Sequence[int], ranks: Sequence[int], mesh: tuple[int, ...], *, matrices: bool
) -> Layout:
    """Return the layout of the state of a replicated parameter, in equal parts (ZeRO-1).

    Matrices are sharded along the dimension that minimizes the largest part, other parameters along the first, so that
    each part is contiguous.
    """
    size = len(ranks)
    dim = 0
    if matrices:
        dim = min(
            range(len(shape)),
            key=lambda d: (-(-shape[d] // size) * (math.prod(shape) // max(1, shape[d])), d),
        )
    return Layout(mesh, tuple(ranks), (ShardPlacement(dim),) * len(mesh))


class Region(NamedTuple):
    """One rank's part of a parameter viewed as (batch, rows, columns)."""

    batch: Runs
    rows: Runs
    columns: Runs

    @property
    def shape(self) -> tuple[int, int, int]:
        """Shape of the local tensor in this view."""
        return total(self.batch), total(self.rows), total(self.columns)


class Overlap(NamedTuple):
    """One rank's part of a block along rows or columns: its interval in the local tensor, and indices in the block."""

    start: int
    stop: int
    runs: Runs

    @property
    def size(self) -> int:
        """Number of rows or columns."""
        return self.stop - self.start


def total(runs: Runs) -> int:
    """Return the number of indices in runs."""
    return sum(stop - start for start, stop in runs)


def chunk(runs: Runs, index: int, count: int) -> Runs:
    """Return part `index` of `count` as torch.chunk does: sizes rounded up, the last parts smaller or empty."""
    size = -(-total(runs) // count)
    start, stop = index * size, (index + 1) * size  # positions in the concatenated runs
    found = []
    position = 0
    for first, last in runs:
        low, high = max(start, position), min(stop, position + last - first)
        if low < high:
            found.append((first + low - position, first + high - position))
        position += last - first
    return tuple(found)


def _joined(runs: Sequence[tuple[int, int]]) -> Runs:
    """Merge adjacent runs."""
    merged: list[tuple[int, int]] = []
    for start, stop in runs:
        if merged and merged[-1][1] == start:
            merged[-1] = (merged[-1][0], stop)
        else:
            merged.append((start, stop))
    return tuple(merged)


def held_runs(size: int, dim: int, layout: Layout, place: Sequence[int]) -> Runs:
    """Return the indices of a dimension that the rank at mesh coordinates `place` holds.

    Placements apply from the first mesh axis to the last, each to the result of the previous ones, as in DTensor.
    """
    runs: Runs = ((0, size),) if size else ()
    for index, count, placement in zip(place, layout.mesh, layout.placements, strict=True):
        if placement is None or placement.dim != dim:
            continue
        pieces = [chunk(runs, i, placement.stride) for i in range(placement.stride)]
        runs = _joined([run for piece in pieces for run in chunk(piece, index, count)])
    return runs


def _folded(parts: Sequence[tuple[Runs, int]]) -> Runs:
    """Return the runs of several dimensions (runs, size) folded into one in row-major order."""
    runs: Runs = ((0, 1),)
    for inner, size in parts:
        if inner == ((0, size),):
            runs = tuple((start * size, stop * size) for start, stop in runs)
        else:
            outer = (i for start, stop in runs for i in range(start, stop))
            runs = _joined(
                [(i * size + start, i * size + stop) for i in outer for start, stop in inner]
            )
    return runs


@functools.lru_cache(maxsize=1024)
def regions_by_rank(shape: tuple[int, ...], view: MatrixView, layout: Layout) -> dict[int, Region]:
    """Return each rank's region of the view, in the order of `layout.ranks`."""
    i, j = view.axes(shape)
    found = {}
    for rank, place in zip(layout.ranks, layout.coordinates(), strict=True):
        parts = [(held_runs(size, dim, layout, place), size) for dim, size in enumerate(shape)]
        found[rank] = Region(_folded(parts[:i]), _folded(parts[i:j]), _folded(parts[j:]))
    return found


@functools.lru_cache(maxsize=1024)
def score_runs_by_rank(shape: tuple[int, ...], view: MatrixView, layout: Layout) -> dict[int, Runs]:
    """Return, by rank, the numbers of the blocks whose scores this rank keeps."""
    scores = score_layout(shape, view, layout)
    places = zip(scores.ranks, scores.coordinates(), strict=True)
    return {rank: held_runs(view.blocks, 0, scores, place) for rank, place in places}


@functools.lru_cache(maxsize=1024)
def score_layout(shape: tuple[int, ...], view: MatrixView, layout: Layout) -> Layout:
    """Return the layout of the scores, one per block: sharded like whole blocks if these are sharded, else replicated.

    Mesh axes that shard the leading batch dimension also shard the scores, if every rank then gets the scores of its
    blocks. With uneven shards and several blocks per index it does not; all ranks then keep all scores.
    """
    i, _ = view.axes(shape)
    axes = tuple(p if p is not None and p.dim == 0 and i > 0 else None for p in layout.placements)
    candidate = Layout(layout.mesh, layout.ranks, axes)
    parts = max(1, len(view.sizes))
    regions = regions_by_rank(shape, view, layout).values()
    for place, region in zip(layout.coordinates(), regions, strict=True):
        wanted = tuple((start * parts, stop * parts) for start, stop in region.batch)
        if held_runs(view.blocks, 0, candidate, place) != wanted:
            return Layout(layout.mesh, layout.ranks, (None,) * len(layout.mesh))
    return candidate


@functools.lru_cache(maxsize=1024)
def lines_layout(shape: tuple[int, ...], view: MatrixView, layout: Layout, of: Axis) -> Layout:
    """Return the layout that shards the rows, or columns, as `layout` does, but keeps each of them whole."""
    kept = view.dims_of(shape, of)
    axes = tuple(p if p is not None and p.dim in kept else None for p in layout.placements)
    return Layout(layout.mesh, layout.ranks, axes)


def rule_layout(shape: tuple[int, ...], view: MatrixView, layout: Layout, extent: Extent) -> Layout:
    """Return the layout of a rule's state tensor with this extent, from that of the parameter's state."""
    if extent not in ("rows", "columns"):
        return score_layout(shape, view, layout)
    kept = view.dims_of(shape, extent)
    lines = lines_layout(shape, view, layout, extent)
    axes = (
        None if p is None else ShardPlacement(kept.index(p.dim), p.stride) for p in lines.placements
    )
    return Layout(layout.mesh, layout.ranks, tuple(axes))


def overlap(runs: Runs, start: int, stop: int) -> Overlap:
    """Return the overlap of runs with the interval start … stop of a block."""
    position, first, found = 0, None, []
    end = 0
    for low, high in runs:
        a, b = max(low, start), min(high, stop)
        if a < b:
            first = position + a - low if first is None else first
            end = position + b - low
            found.append((a - start, b - start))
        position += high - low
    return Overlap(first or 0, end, tuple(found))


def block_bounds(view: MatrixView) -> tuple[tuple[int, int, int, int], ...]:
    """Return first row, last row, first column, last column (exclusive ends) of the blocks of one matrix."""
    if view.axis is None:
        return ((0, view.rows, 0, view.columns),)
    ends = list(itertools.accumulate(view.sizes, initial=0))
    if view.axis == "rows":
        return tuple((a, b, 0, view.columns) for a, b in itertools.pairwise(ends))
    return tuple((0, view.rows, a, b) for a, b in itertools.pairwise(ends))
