"""A few shapes for the batches of any data set, so that few CUDA graphs hold all steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property

import numpy as np

#: Shapes that batches are padded to, at most.
MOST_SHAPES = 16


@dataclass(frozen=True)
class Shape:
    """The sizes of a batch, or room for it.

    Attributes
    ----------
    frames
        Number of frames.
    natoms
        Atoms of the largest frame.
    counts
        Atoms of each type in all frames.
    widths
        Columns of each neighbour section.
    inner
        Columns within each shorter cut-off.
    periodic
        Whether a frame has a cell.
    labels, partial
        Labels that a frame has, and those of them that a frame may lack.
    group
        The composition of all frames, where they have the same and fill the shape; None for others.
    capacity
        Neighbours of an atom that the search sorts, before `sel` cuts them.
    """

    frames: int
    natoms: int
    counts: tuple[int, ...]
    widths: tuple[int, ...]
    inner: tuple[int, ...]
    periodic: bool
    labels: frozenset[str] = frozenset()
    partial: frozenset[str] = frozenset()
    group: int | None = None
    capacity: int = 16

    @cached_property
    def _hash(self) -> int:
        return hash(tuple(getattr(self, field.name) for field in fields(self)))

    def __hash__(self) -> int:
        """Return a hash that is computed once: tables of graphs are read by shape in every step."""
        return self._hash

    @property
    def cost(self) -> float:
        """Work of a step: edges, and angles as pairs of near neighbours."""
        return sum(self.counts) * (1.0 + sum(self.widths) + sum(n * n for n in self.inner))

    @property
    def _numbers(self) -> tuple[int, ...]:
        return (self.frames, self.natoms, *self.counts, *self.widths, *self.inner)

    def holds(self, other: Shape) -> bool:
        """Return whether batches of another shape fit in."""
        if self == other:
            return True
        if self.group is not None and not self._differs_in_neighbors(other):
            return False
        room = all(a >= b for a, b in zip(self._numbers, other._numbers, strict=True))
        return room and self.joined(other) == self

    def _differs_in_neighbors(self, other: Shape) -> bool:
        """Return whether another shape is of the same composition, and differs in room for neighbours at most."""
        return replace(other, widths=self.widths, inner=self.inner, capacity=self.capacity) == self

    def joined(self, other: Shape) -> Shape:
        """Return the least shape that holds both."""
        labels = self.labels | other.labels
        partial = self.partial | other.partial | (self.labels ^ other.labels)
        return Shape(
            max(self.frames, other.frames),
            max(self.natoms, other.natoms),
            tuple(map(max, zip(self.counts, other.counts, strict=True))),
            tuple(map(max, zip(self.widths, other.widths, strict=True))),
            tuple(map(max, zip(self.inner, other.inner, strict=True))),
            self.periodic or other.periodic,
            labels,
            partial if self.frames == other.frames else labels,
            self.group if self._differs_in_neighbors(other) else None,
            max(self.capacity, other.capacity),
        )


class Shapes:
    """At most `MOST_SHAPES` shapes that hold all batches seen so far, chosen so that padding costs little."""

    def __init__(self) -> None:
        self._shapes: list[Shape] = []
        self._of: dict[Shape, Shape] = {}

    def learn(self, wanted: Sequence[Shape]) -> None:
        """Add the shapes of coming batches, each as often as it occurs."""
        new = [shape for shape in wanted if shape not in self._of and self._fitting(shape) is None]
        if not new:
            return
        weights: dict[Shape, int] = dict.fromkeys(self._shapes, 0)
        for shape in wanted:
            weights[shape] = weights.get(shape, 0) + 1
        # A composition with more neighbours than before no longer needs its former shape.
        grown = {
            shape
            for shape in self._shapes
            for one in new
            if shape.group is not None and one.group == shape.group and one.holds(shape)
        }
        self._shapes = merge(
            {shape: n for shape, n in weights.items() if shape not in grown}, MOST_SHAPES
        )
        self._of.clear()

    def of(self, wanted: Shape) -> Shape:
        """Return the shape to pad a batch to; `learn` must have seen its shape."""
        if wanted not in self._of:
            found = self._fitting(wanted)
            if found is None:
                self.learn([wanted])
                found = self._fitting(wanted)
            assert found is not None
            self._of[wanted] = found
        return self._of[wanted]

    def _fitting(self, wanted: Shape) -> Shape | None:
        fitting = [shape for shape in self._shapes if shape.holds(wanted)]
        return min(fitting, key=lambda shape: shape.cost, default=None)


def merge(weights: dict[Shape, int], most: int) -> list[Shape]:
    """Join shapes until at most so many are left, at each turn the two that cost least.

    Weights say how often each occurs. The shapes of a thousand batches are few enough to compare all pairs.
    """
    shapes = list(weights)
    often = np.array([weights[shape] for shape in shapes], dtype=np.float64)
    if len(shapes) <= most:
        return shapes
    sizes = len(shapes[0].counts), len(shapes[0].widths), len(shapes[0].inner)
    table = np.array([shape._numbers for shape in shapes], dtype=np.int64)
    alive = np.ones(len(shapes), dtype=bool)

    def costs(row: np.ndarray, rows: np.ndarray) -> np.ndarray:
        """Return the extra cost of joining one shape with each of the others."""
        both = np.maximum(row, rows)[:, 2:]
        atoms, columns, near = np.split(both, np.cumsum(sizes)[:-1], axis=1)
        return np.asarray(
            atoms.sum(1) * (1.0 + columns.sum(1) + (near.astype(np.float64) ** 2).sum(1))
        )

    own = np.array([shape.cost for shape in shapes])
    added = np.full((len(shapes), len(shapes)), np.inf)

    def compare(k: int) -> None:
        others = np.flatnonzero(alive)
        others = others[others != k]
        whole = (
            costs(table[k], table[others]) * (often[k] + often[others])
            - own[k] * often[k]
            - own[others] * often[others]
        )
        added[k, others] = added[others, k] = whole

    for k in range(len(shapes)):
        compare(k)
    for _ in range(len(shapes) - most):
        a, b = divmod(int(added.argmin()), len(shapes))
        shapes[a] = shapes[a].joined(shapes[b])
        table[a], often[a], own[a] = shapes[a]._numbers, often[a] + often[b], shapes[a].cost
        alive[b] = False
        added[b, :] = added[:, b] = np.inf
        compare(a)
    return [shape for shape, kept in zip(shapes, alive, strict=True) if kept]
