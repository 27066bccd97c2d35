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
    composition
        The composition of all frames, if they have the same and fill the shape; else None.
    capacity
        Neighbours of an atom that the search sorts, before `sel` cuts them.
    edges
        Neighbours of all atoms together; 0 if the model does not ask.
    """

    frames: int
    natoms: int
    counts: tuple[int, ...]
    widths: tuple[int, ...]
    inner: tuple[int, ...]
    periodic: bool
    labels: frozenset[str] = frozenset()
    partial: frozenset[str] = frozenset()
    composition: int | None = None
    capacity: int = 16
    edges: int = 0

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
    def numbers(self) -> tuple[int, ...]:
        """All sizes in a row."""
        return (self.frames, self.natoms, *self.counts, *self.widths, *self.inner, self.edges)

    def holds(self, other: Shape) -> bool:
        """Return whether batches of another shape fit in."""
        if self == other:
            return True
        if self.composition is not None and not self._differs_in_neighbors(other):
            return False
        has_room = all(a >= b for a, b in zip(self.numbers, other.numbers, strict=True))
        return has_room and self.joined(other) == self

    def _differs_in_neighbors(self, other: Shape) -> bool:
        """Return whether another shape differs in room for neighbours at most."""
        neighbors = ("widths", "inner", "capacity", "edges")
        return replace(other, **{name: getattr(self, name) for name in neighbors}) == self

    def joined(self, other: Shape) -> Shape:
        """Return the least shape that holds both."""
        labels = self.labels | other.labels
        # A batch with fewer frames is filled up with frames that have no labels.
        partial = labels
        if self.frames == other.frames:
            partial = self.partial | other.partial | (self.labels ^ other.labels)
        return Shape(
            frames=max(self.frames, other.frames),
            natoms=max(self.natoms, other.natoms),
            counts=_maxima(self.counts, other.counts),
            widths=_maxima(self.widths, other.widths),
            inner=_maxima(self.inner, other.inner),
            periodic=self.periodic or other.periodic,
            labels=labels,
            partial=partial,
            composition=self.composition if self._differs_in_neighbors(other) else None,
            capacity=max(self.capacity, other.capacity),
            edges=max(self.edges, other.edges),
        )


def _maxima(a: Sequence[int], b: Sequence[int]) -> tuple[int, ...]:
    return tuple(map(max, zip(a, b, strict=True)))


class Shapes:
    """At most `MOST_SHAPES` shapes that hold all batches so far with little padding."""

    def __init__(self) -> None:
        self._shapes: list[Shape] = []
        self._shape_for: dict[Shape, Shape] = {}

    def learn(self, needed: Sequence[Shape]) -> None:
        """Add the shapes of coming batches, each as often as it occurs."""
        new = [
            shape
            for shape in needed
            if shape not in self._shape_for and self._cheapest_for(shape) is None
        ]
        if not new:
            return
        weights: dict[Shape, int] = dict.fromkeys(self._shapes, 0)
        for shape in needed:
            weights[shape] = weights.get(shape, 0) + 1
        # A composition with more neighbours than before no longer needs its former shape.
        for former in self._shapes:
            if former.composition is None:
                continue
            if any(s.composition == former.composition and s.holds(former) for s in new):
                del weights[former]
        self._shapes = merge(weights, MOST_SHAPES)
        self._shape_for.clear()

    def of(self, needed: Shape) -> Shape:
        """Return the shape to pad a batch to; `learn` must have seen its shape."""
        if needed not in self._shape_for:
            shape = self._cheapest_for(needed)
            if shape is None:
                self.learn([needed])
                shape = self._cheapest_for(needed)
            assert shape is not None
            self._shape_for[needed] = shape
        return self._shape_for[needed]

    def _cheapest_for(self, needed: Shape) -> Shape | None:
        fitting = [shape for shape in self._shapes if shape.holds(needed)]
        return min(fitting, key=lambda shape: shape.cost, default=None)


def merge(weights: dict[Shape, int], max_shapes: int) -> list[Shape]:
    """Join shapes until `max_shapes` are left, at each turn the two that cost least.

    Weights say how often each occurs. The shapes of a thousand batches are few enough to compare
    all pairs.
    """
    shapes = list(weights)
    if len(shapes) <= max_shapes:
        return shapes
    weight = np.array([weights[shape] for shape in shapes], dtype=np.float64)
    cost = np.array([shape.cost for shape in shapes])
    numbers = np.array([shape.numbers for shape in shapes], dtype=np.int64)
    # Columns of `numbers`: frames, natoms, counts, widths, inner, edges.
    first_width = 2 + len(shapes[0].counts)
    first_inner = first_width + len(shapes[0].widths)
    alive = np.ones(len(shapes), dtype=bool)
    extra_cost = np.full((len(shapes), len(shapes)), np.inf)  # of joining two shapes

    def compare(k: int) -> None:
        """Compute the extra cost of joining shape k with each of the others."""
        is_other = alive.copy()
        is_other[k] = False
        candidates = np.flatnonzero(is_other)
        joined = np.maximum(numbers[k], numbers[candidates])
        atoms = joined[:, 2:first_width].sum(1)
        columns = joined[:, first_width:first_inner].sum(1)
        angles = (joined[:, first_inner:-1].astype(np.float64) ** 2).sum(1)
        joined_cost = atoms * (1.0 + columns + angles)  # see `Shape.cost`
        extra = joined_cost * (weight[k] + weight[candidates])
        extra = extra - cost[k] * weight[k] - cost[candidates] * weight[candidates]
        extra_cost[k, candidates] = extra
        extra_cost[candidates, k] = extra

    for k in range(len(shapes)):
        compare(k)
    for _ in range(len(shapes) - max_shapes):
        a, b = divmod(int(extra_cost.argmin()), len(shapes))
        shapes[a] = shapes[a].joined(shapes[b])
        numbers[a] = shapes[a].numbers
        weight[a] += weight[b]
        cost[a] = shapes[a].cost
        alive[b] = False
        extra_cost[b, :] = np.inf
        extra_cost[:, b] = np.inf
        compare(a)
    return [shape for shape, is_alive in zip(shapes, alive, strict=True) if is_alive]
