"""The ranks that hold a block, and the choice of its owner."""

from __future__ import annotations

import dataclasses
import functools
import heapq
import itertools
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import cast

from deepmd_muon.optim.routing.views import Axis, MatrixView
from deepmd_muon.optim.rules.interface import StateTensor
from deepmd_muon.optim.sharded.layout import (
    Layout,
    Runs,
    block_bounds,
    lines_layout,
    overlap,
    regions_by_rank,
    score_layout,
    score_runs_by_rank,
)

# Ranks that would do the same work, one per replica; a single rank if replicas share the work.
OwnerSet = tuple[int, ...]
Assignment = tuple[int, Mapping[int, int], Mapping[int, int]]


class Balance:
    """Work and bytes assigned to each rank so far."""

    def __init__(self, loads: Mapping[int, int]) -> None:
        self.loads = dict(loads)
        self.bytes = dict.fromkeys(loads, 0)
        self._heaps: dict[tuple[OwnerSet, ...], list[tuple[tuple[int, int], OwnerSet]]] = {}

    def weight(self, owners: OwnerSet) -> tuple[int, int]:
        """Return the work and bytes of the busiest of these ranks."""
        return max((self.loads[rank], self.bytes[rank]) for rank in owners)

    def lightest(self, candidates: tuple[OwnerSet, ...]) -> OwnerSet:
        """Return the candidate with the least work; in a tie, the one with fewer bytes, then the one of lower ranks."""
        heap = self._heaps.get(candidates)
        if heap is None:
            heap = self._heaps[candidates] = [
                (self.weight(owners), owners) for owners in candidates
            ]
            heapq.heapify(heap)
        while True:
            known, owners = heap[0]
            now = self.weight(owners)
            if now == known:
                return owners
            heapq.heapreplace(
                heap, (now, owners)
            )  # weights only grow, so an old weight is a lower bound


@dataclasses.dataclass(frozen=True, eq=False)
class BlockHolders:
    """The ranks that hold the elements, and the state of rules, of blocks of one kind."""

    replicas: tuple[tuple[int, ...], ...]  # the ranks of each complete copy of the momentum
    copies: tuple[
        Mapping[int, int], ...
    ]  # for each copy, the ranks that hold elements of the block, and how many
    # For each complete copy of the parameter, the ranks that need the update or the rules' state, and how many
    # elements.
    destinations: tuple[Mapping[int, int], ...]
    lines: Mapping[
        int, int
    ]  # for each rank, the number of values of rules' state per row or column that it keeps

    @property
    def whole(self) -> bool:
        """Whether a single rank holds the whole block, in every replica."""
        return all(len(copy) == 1 for copy in self.copies)

    @functools.cached_property
    def _spread(self) -> tuple[tuple[OwnerSet, ...], tuple[OwnerSet, ...]]:
        holding = tuple((rank,) for copy in self.copies for rank in copy)
        return (
            (holding, ())
            if self.whole
            else (tuple((r,) for copy in self.replicas for r in copy), holding)
        )

    @functools.cached_property
    def _repeat(self) -> tuple[tuple[OwnerSet, ...], tuple[OwnerSet, ...]]:
        if self.whole:
            return (tuple(next(iter(copy)) for copy in self.copies),), ()
        candidates = tuple(zip(*self.replicas, strict=True))
        return candidates, tuple(
            s for s in candidates if all(r in copy for r, copy in zip(s, self.copies, strict=True))
        )

    @functools.cached_property
    def _shared(self) -> tuple[Mapping[int, int], Mapping[int, int]]:
        """The number of elements of every rank that needs the update, and the number of every rank's copy."""
        everyone = {rank: size for copy in self.destinations for rank, size in copy.items()}
        return everyone, {rank: i for i, copy in enumerate(self.replicas) for rank in copy}

    def assign(
        self, balance: Balance, work: int, size: int, *, spread: bool
    ) -> Iterator[Assignment]:
        """Choose the owner, or one per replica, and yield each with its sources and destinations.

        A block that one rank holds whole stays there. Any rank may own another block; among equally busy ranks, one
        that holds a piece is preferred.
        """
        candidates, preferred = self._spread if spread else self._repeat
        owners = balance.lightest(candidates)
        if preferred:
            near = balance.lightest(preferred)
            owners = near if balance.weight(near)[0] <= balance.weight(owners)[0] else owners
        for rank in owners:
            balance.loads[rank] += work
            balance.bytes[rank] += size
        if spread:
            everyone, copy_of = self._shared
            yield owners[0], self.copies[copy_of[owners[0]]], everyone
        else:
            yield from zip(owners, self.copies, self.destinations, strict=True)


@functools.lru_cache(maxsize=256)
def holders_of_blocks(
    shape: tuple[int, ...],
    view: MatrixView,
    layout: Layout,
    state_layout: Layout,
    update_layout: Layout,
    *,
    scored: bool,
    lines: tuple[StateTensor, ...] = (),
) -> tuple[BlockHolders, ...]:
    """Return the holders of every block, in the order of block numbers; blocks with the same holders share one object.

    `state_layout` is that of the parameter's momentum, `update_layout` that of its updates. With `scored`, ranks that
    keep a block's score need the result even if they hold no elements of the block. `lines` are the state tensors with
    values for each row or column; the ranks that keep these values need the result, too.
    """
    copies_of_state = state_layout.replicas()
    sizes, having = _overlaps(shape, view, update_layout)
    sizes_of_state, having_state = _overlaps(shape, view, state_layout)
    with_lines = []
    for tensor in lines:
        of = cast("Axis", tensor.extent)
        counts, having_lines = _overlaps(shape, view, lines_layout(shape, view, state_layout, of))
        with_lines.append((0 if of == "rows" else 1, tensor.lengths(view), counts, having_lines))
    with_scores: Sequence[tuple[int, ...]] = [()] * view.blocks
    if scored and any(score_layout(shape, view, layout).placements):
        with_scores = _ranks_by_index(view.blocks, score_runs_by_rank(shape, view, layout))
    elif scored:
        with_scores = [layout.ranks] * view.blocks
    known: dict[tuple[object, ...], BlockHolders] = {}
    found = []
    for (b, part), keeping in zip(
        itertools.product(range(view.batch), range(len(sizes))), with_scores, strict=True
    ):
        key = (
            having[b],
            having_state[b],
            keeping,
            part,
            *(having_lines[b] for *_, having_lines in with_lines),
        )
        if key not in known:
            holding = {rank: n for rank in having[b] if (n := math.prod(sizes[part][rank]))}
            state = {
                rank: n for rank in having_state[b] if (n := math.prod(sizes_of_state[part][rank]))
            }
            kept: Counter[int] = Counter()
            for axis, lengths, counts, having_lines in with_lines:
                kept.update(
                    {r: n for r in having_lines[b] if (n := lengths[part] * counts[part][r][axis])}
                )
            needing = {**dict.fromkeys((*keeping, *kept), 0), **holding}
            known[key] = BlockHolders(
                copies_of_state,
                tuple({r: state[r] for r in copy if r in state} for copy in copies_of_state),
                tuple({r: needing[r] for r in copy if r in needing} for copy in layout.replicas()),
                kept,
            )
        found.append(known[key])
    return tuple(found)


def _overlaps(
    shape: tuple[int, ...], view: MatrixView, layout: Layout
) -> tuple[list[dict[int, tuple[int, int]]], list[tuple[int, ...]]]:
    """Return each rank's rows and columns of each part of a matrix; and the ranks that hold some of each matrix."""
    regions = regions_by_rank(shape, view, layout)
    sizes = [
        {
            rank: (overlap(x.rows, r0, r1).size, overlap(x.columns, c0, c1).size)
            for rank, x in regions.items()
        }
        for r0, r1, c0, c1 in block_bounds(view)
    ]
    return sizes, _ranks_by_index(
        view.batch, {rank: region.batch for rank, region in regions.items()}
    )


def _ranks_by_index(count: int, runs: Mapping[int, Runs]) -> list[tuple[int, ...]]:
    """Return for each of `count` indices the ranks whose runs contain it."""
    found: list[list[int]] = [[] for _ in range(count)]
    for rank, own in runs.items():
        for start, stop in own:
            for i in range(start, stop):
                found[i].append(rank)
    return [tuple(ranks) for ranks in found]
