"""The elements of a parameter that each rank holds, from global shape, mesh and placements.

Everything here is plain Python, without communication. Along one dimension a rank holds *runs*,
half-open intervals of global indices in increasing order. There is one run for a plain shard.
Strided shards (FSDP over tensor parallelism on one dimension) have several, and so have dimensions
that a matrix view folds together. A rank's local tensor is the product of its runs.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

from deepmd_muon.optim.routing.views import Axis, MatrixView, Shape
from deepmd_muon.optim.rules.interface import Extent

RankSet = tuple[int, ...]
"""Global ranks."""
Run = tuple[int, int]
"""First index, and the index after the last one."""
Runs = tuple[Run, ...]


@dataclasses.dataclass(frozen=True)
class ShardPlacement:
    """A mesh axis shards tensor dimension `dim`.

    With `stride` > 1 it shards each of `stride` equal parts of the dimension separately.
    """

    dim: int
    stride: int = 1

    def __str__(self) -> str:
        if self.stride == 1:
            return f"Shard({self.dim})"
        return f"StridedShard({self.dim}, {self.stride})"


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
        One per mesh axis: a `ShardPlacement`, or None if the axis replicates the parameter.
    """

    mesh: tuple[int, ...]
    ranks: RankSet
    placements: tuple[ShardPlacement | None, ...]

    def __str__(self) -> str:
        size = "x".join(map(str, self.mesh))
        return f"mesh {size}: {', '.join(str(p or 'Replicate') for p in self.placements)}"

    @property
    def sorted_ranks(self) -> RankSet:
        """Global ranks, ascending."""
        return tuple(sorted(self.ranks))

    def places(self) -> dict[int, tuple[int, ...]]:
        """Return the mesh coordinates of every rank, in the order of `ranks`."""
        coordinates = itertools.product(*map(range, self.mesh))
        return dict(zip(self.ranks, coordinates, strict=True))

    def replicas(self) -> tuple[RankSet, ...]:
        """Return the ranks of each complete copy, with shards in the same order in every copy."""
        copies: dict[tuple[int, ...], list[int]] = {}
        for rank, place in self.places().items():
            # Ranks of one copy have the same coordinates on the axes that replicate.
            axes = zip(place, self.placements, strict=True)
            key = tuple(index for index, placement in axes if placement is None)
            copies.setdefault(key, []).append(rank)
        return tuple(tuple(copy) for copy in copies.values())


def replicated(ranks: Sequence[int]) -> Layout:
    """Return the layout of a parameter that is replicated on these ranks."""
    return Layout(mesh=(len(ranks),), ranks=tuple(ranks), placements=(None,))


def state_layout(
    shape: Sequence[int], ranks: Sequence[int], mesh: tuple[int, ...], *, matrices: bool
) -> Layout:
    """Return the layout of the state of a replicated parameter, in equal parts (ZeRO-1).

    Matrices are sharded along the dimension that minimizes the largest part, other parameters along
    the first, so that each part is contiguous.
    """

    def largest_part(dim: int) -> int:
        row_size = math.prod(shape) // max(1, shape[dim])
        return -(-shape[dim] // len(ranks)) * row_size  # rounded up

    dim = min(range(len(shape)), key=largest_part) if matrices else 0
    return Layout(mesh, tuple(ranks), (ShardPlacement(dim),) * len(mesh))


# ----- runs of one dimension ---------------------------------------------------------------------


def total(runs: Runs) -> int:
    """Return the number of indices in runs."""
    return sum(stop - start for start, stop in runs)


def chunk(runs: Runs, index: int, count: int) -> Runs:
    """Return part `index` of `count` as torch.chunk does.

    Sizes are rounded up, and the last parts are smaller or empty.
    """
    size = -(-total(runs) // count)  # rounded up
    start = index * size  # a position in the concatenated runs
    stop = start + size
    runs_of_part = []
    position = 0
    for run_start, run_stop in runs:
        next_position = position + run_stop - run_start
        low = max(start, position)
        high = min(stop, next_position)
        if low < high:
            runs_of_part.append((run_start + low - position, run_start + high - position))
        position = next_position
    return tuple(runs_of_part)


def _merged(runs: Sequence[Run]) -> Runs:
    """Merge adjacent runs."""
    merged: list[Run] = []
    for start, stop in runs:
        if merged and merged[-1][1] == start:
            start = merged.pop()[0]
        merged.append((start, stop))
    return tuple(merged)


def held_runs(size: int, dim: int, layout: Layout, place: Sequence[int]) -> Runs:
    """Return the indices of dimension `dim` that the rank at mesh coordinates `place` holds.

    Placements apply from the first mesh axis to the last, each to the result of the previous ones,
    as in DTensor.
    """
    runs: Runs = ((0, size),) if size else ()
    for index, count, placement in zip(place, layout.mesh, layout.placements, strict=True):
        if placement is None or placement.dim != dim:
            continue
        shards: list[Run] = []
        for i in range(placement.stride):
            shards += chunk(chunk(runs, i, placement.stride), index, count)
        runs = _merged(shards)
    return runs


class Interval(NamedTuple):
    """Adjacent indices of one dimension."""

    start: int
    length: int


def held_interval(size: int, dim: int, layout: Layout, place: Sequence[int]) -> Interval:
    """Return the same as `held_runs` for a layout of plain shards along one dimension."""
    runs = held_runs(size, dim, layout, place)
    return Interval(start=runs[0][0] if runs else 0, length=total(runs))


class Overlap(NamedTuple):
    """One rank's part of a block along rows or columns.

    It is the interval start … stop of the local tensor, and `runs` of indices in the block.
    """

    start: int
    stop: int
    runs: Runs

    @property
    def size(self) -> int:
        """Number of rows or columns."""
        return self.stop - self.start

    @property
    def local_slice(self) -> slice:
        """The interval start … stop."""
        return slice(self.start, self.stop)


def overlap(runs: Runs, start: int, stop: int) -> Overlap:
    """Return the overlap of a rank's runs with the rows or columns start … stop of a block."""
    local_start = None
    local_stop = 0
    runs_in_block = []
    position = 0  # of the run in the local tensor
    for run_start, run_stop in runs:
        low = max(run_start, start)
        high = min(run_stop, stop)
        if low < high:
            if local_start is None:
                local_start = position + low - run_start
            local_stop = position + high - run_start
            runs_in_block.append((low - start, high - start))
        position += run_stop - run_start
    return Overlap(local_start or 0, local_stop, tuple(runs_in_block))


# ----- matrices ----------------------------------------------------------------------------------


class Region(NamedTuple):
    """One rank's part of a parameter viewed as (batch, rows, columns)."""

    batch: Runs
    rows: Runs
    columns: Runs

    @property
    def shape(self) -> tuple[int, int, int]:
        """Shape of the local tensor in this view."""
        return total(self.batch), total(self.rows), total(self.columns)


@dataclasses.dataclass(frozen=True)
class MatrixLayout:
    """A parameter that is read as matrices, and how ranks hold it, its state or its updates."""

    shape: Shape
    view: MatrixView
    layout: Layout

    def on(self, layout: Layout) -> MatrixLayout:
        """Return the same parameter in another layout."""
        return dataclasses.replace(self, layout=layout)


@functools.lru_cache(maxsize=1024)
def regions_by_rank(matrices: MatrixLayout) -> dict[int, Region]:
    """Return each rank's region of the view, in the order of `layout.ranks`."""
    shape = matrices.shape
    layout = matrices.layout
    i, j = matrices.view.axes(shape)
    regions = {}
    for rank, place in layout.places().items():
        dims = [(held_runs(size, dim, layout, place), size) for dim, size in enumerate(shape)]
        regions[rank] = Region(
            batch=_folded(dims[:i]), rows=_folded(dims[i:j]), columns=_folded(dims[j:])
        )
    return regions


def _folded(dims: Sequence[tuple[Runs, int]]) -> Runs:
    """Return the runs of several dimensions (runs, size) folded into one in row-major order."""
    folded: Runs = ((0, 1),)
    for inner, size in dims:
        if inner == ((0, size),):  # the whole dimension: adjacent runs stay adjacent
            folded = tuple((start * size, stop * size) for start, stop in folded)
            continue
        runs = []
        for outer_start, outer_stop in folded:
            for i in range(outer_start, outer_stop):
                runs += [(i * size + start, i * size + stop) for start, stop in inner]
        folded = _merged(runs)
    return folded


class BlockBounds(NamedTuple):
    """Rows and columns of a block in its matrix."""

    row_start: int
    row_stop: int
    column_start: int
    column_stop: int


def block_bounds(view: MatrixView) -> tuple[BlockBounds, ...]:
    """Return the bounds of the blocks of one matrix."""
    if view.axis is None:
        return (BlockBounds(0, view.rows, 0, view.columns),)
    ends = itertools.accumulate(view.sizes, initial=0)
    if view.axis == "rows":
        return tuple(BlockBounds(*rows, 0, view.columns) for rows in itertools.pairwise(ends))
    return tuple(BlockBounds(0, view.rows, *columns) for columns in itertools.pairwise(ends))


# ----- state of rules ----------------------------------------------------------------------------


def rule_layout(matrices: MatrixLayout, extent: Extent) -> Layout:
    """Return the layout of a rule's state tensor with this extent.

    `matrices` have the layout of the parameter's state.
    """
    if extent not in ("rows", "columns"):
        return score_layout(matrices)
    dims = matrices.view.dims_of(matrices.shape, extent)
    placements = tuple(
        None if p is None else ShardPlacement(dims.index(p.dim), p.stride)
        for p in with_whole_lines(matrices, extent).layout.placements
    )
    return dataclasses.replace(matrices.layout, placements=placements)


def with_whole_lines(matrices: MatrixLayout, of: Axis) -> MatrixLayout:
    """Return the layout that shards the rows, or columns, alike and keeps each of them whole."""
    dims = matrices.view.dims_of(matrices.shape, of)
    placements = tuple(
        p if p is not None and p.dim in dims else None for p in matrices.layout.placements
    )
    return matrices.on(dataclasses.replace(matrices.layout, placements=placements))


@functools.lru_cache(maxsize=1024)
def score_layout(matrices: MatrixLayout) -> Layout:
    """Return the layout of the scores, one per block.

    Mesh axes that shard the leading batch dimension also shard the scores, if every rank then gets
    the scores of its blocks. With uneven shards and several blocks per index it does not; all ranks
    then keep all scores.
    """
    view = matrices.view
    layout = matrices.layout
    i, _ = view.axes(matrices.shape)
    placements = tuple(
        p if p is not None and p.dim == 0 and i > 0 else None for p in layout.placements
    )
    sharded = dataclasses.replace(layout, placements=placements)
    n_parts = max(1, len(view.sizes))
    regions = regions_by_rank(matrices)
    for rank, place in layout.places().items():
        blocks = tuple((start * n_parts, stop * n_parts) for start, stop in regions[rank].batch)
        if held_runs(view.blocks, 0, sharded, place) != blocks:
            return dataclasses.replace(layout, placements=(None,) * len(layout.mesh))
    return sharded


@functools.lru_cache(maxsize=1024)
def score_runs_by_rank(matrices: MatrixLayout) -> dict[int, Runs]:
    """Return, by rank, the numbers of the blocks that this rank keeps the scores of."""
    scores = score_layout(matrices)
    blocks = matrices.view.blocks
    return {rank: held_runs(blocks, 0, scores, place) for rank, place in scores.places().items()}
