"""The ranks that hold a block, and the choice of its owner."""

from __future__ import annotations

import dataclasses
import functools
import heapq
import itertools
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple, cast

from deepmd_muon.optim.routing.views import Axis
from deepmd_muon.optim.rules.interface import StateTensor
from deepmd_muon.optim.sharded.layout import (
    MatrixLayout,
    RankSet,
    Runs,
    block_bounds,
    overlap,
    regions_by_rank,
    score_layout,
    score_runs_by_rank,
    with_whole_lines,
)

OwnerSet = RankSet
"""Ranks that would do the same work, one per replica; one rank if replicas share the work."""


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
        """Return the candidate with the least work.

        In a tie, it is the one with fewer bytes, then the one of lower ranks.
        """
        heap = self._heaps.get(candidates)
        if heap is None:
            heap = [(self.weight(owners), owners) for owners in candidates]
            heapq.heapify(heap)
            self._heaps[candidates] = heap
        while True:
            old_weight, owners = heap[0]
            weight = self.weight(owners)
            if weight == old_weight:
                return owners
            # Weights only grow, so the old weights of the others are lower bounds.
            heapq.heapreplace(heap, (weight, owners))


class Assignment(NamedTuple):
    """An owner, and the ranks that send to it and receive from it, with numbers of elements."""

    owner: int
    sources: Mapping[int, int]
    destinations: Mapping[int, int]


class Candidates(NamedTuple):
    """Sets of owners to choose from, and the ones that hold a piece of the block."""

    possible: tuple[OwnerSet, ...]
    preferred: tuple[OwnerSet, ...]  # may be empty


@dataclasses.dataclass(frozen=True, eq=False)
class BlockHolders:
    """The ranks that hold the elements, and the state of rules, of blocks of one kind.

    Attributes
    ----------
    replicas
        The ranks of each complete copy of the momentum.
    copies
        For each of these copies, the ranks that hold elements of the block, and how many.
    destinations
        For each complete copy of the parameter, the ranks that need the update or the rules' state,
        and how many elements.
    line_values
        For each rank, the number of values of rules' state per row or column that it keeps.
    """

    replicas: tuple[RankSet, ...]
    copies: tuple[Mapping[int, int], ...]
    destinations: tuple[Mapping[int, int], ...]
    line_values: Mapping[int, int]

    @functools.cached_property
    def _is_whole(self) -> bool:
        """Whether a single rank holds the whole block, in every replica."""
        return all(len(copy) == 1 for copy in self.copies)

    @functools.cached_property
    def _candidates(self) -> Mapping[bool, Candidates]:
        """The candidates if replicas share the work (True), and if they repeat it (False)."""
        ranks = itertools.chain(*self.replicas)
        return {
            True: self._candidates_among([(rank,) for rank in ranks]),
            False: self._candidates_among([*zip(*self.replicas, strict=True)]),
        }

    def _candidates_among(self, possible: Sequence[OwnerSet]) -> Candidates:
        holders = set(itertools.chain(*self.copies))
        holding = tuple(owners for owners in possible if holders.issuperset(owners))
        return Candidates(holding if self._is_whole else tuple(possible), preferred=holding)

    @functools.cached_property
    def _all_destinations(self) -> Mapping[int, int]:
        return {rank: n for copy in self.destinations for rank, n in copy.items()}

    @functools.cached_property
    def _replica_of_rank(self) -> Mapping[int, int]:
        return {rank: i for i, replica in enumerate(self.replicas) for rank in replica}

    def assign(
        self, balance: Balance, work: int, size: int, *, spread: bool
    ) -> Iterator[Assignment]:
        """Choose the owner, or one per replica, and yield each with its sources and destinations.

        A block that one rank holds whole stays there. Any rank may own another block; among equally
        busy ranks, one that holds a piece is preferred.
        """
        candidates = self._candidates[spread]
        owners = balance.lightest(candidates.possible)
        if candidates.preferred:
            holding = balance.lightest(candidates.preferred)
            # Only the work is compared, not the bytes.
            if balance.weight(holding)[0] <= balance.weight(owners)[0]:
                owners = holding
        for rank in owners:
            balance.loads[rank] += work
            balance.bytes[rank] += size
        if spread:
            (owner,) = owners
            sources = self.copies[self._replica_of_rank[owner]]
            yield Assignment(owner, sources, self._all_destinations)
        else:
            for assignment in zip(owners, self.copies, self.destinations, strict=True):
                yield Assignment(*assignment)


class _Holdings(NamedTuple):
    """The parts of matrices that ranks hold in one layout.

    Attributes
    ----------
    sizes
        For each part of a matrix, the rows and columns of each rank, if it holds some of the
        matrix.
    ranks
        For each matrix, the ranks that hold some of it.
    """

    sizes: list[dict[int, tuple[int, int]]]
    ranks: list[RankSet]

    def elements(self, matrix: int, part: int) -> dict[int, int]:
        """Return the ranks that hold elements of a block, and how many."""
        counts = {rank: math.prod(self.sizes[part][rank]) for rank in self.ranks[matrix]}
        return {rank: count for rank, count in counts.items() if count}


class _LineKeepers(NamedTuple):
    """The ranks that keep a rule's state per row (axis 0) or column (axis 1).

    `lengths` has the number of values of a line of each part.
    """

    axis: int
    lengths: Sequence[int]
    holdings: _Holdings

    def values(self, matrix: int, part: int) -> dict[int, int]:
        """Return the ranks that keep values of a block, and how many."""
        sizes = self.holdings.sizes[part]
        length = self.lengths[part]
        ranks = self.holdings.ranks[matrix]
        counts = {rank: length * sizes[rank][self.axis] for rank in ranks}
        return {rank: count for rank, count in counts.items() if count}


@functools.lru_cache(maxsize=256)
def holders_of_blocks(
    elements: MatrixLayout,
    state: MatrixLayout,
    updates: MatrixLayout,
    *,
    scored: bool,
    line_tensors: tuple[StateTensor, ...] = (),
) -> tuple[BlockHolders, ...]:
    """Return the holders of every block, in the order of block numbers.

    Blocks with the same holders share one object.

    Parameters
    ----------
    elements, state, updates
        The layouts of the parameter, of its momentum, and of its updates.
    scored
        Whether ranks that keep a block's score need the result even if they hold no elements of the
        block.
    line_tensors
        The state tensors with values for each row or column; the ranks that keep these values need
        the result, too.
    """
    view = elements.view
    in_state = _holdings(state)
    in_updates = _holdings(updates)
    keepers_by_rule = []
    for tensor in line_tensors:
        of = cast("Axis", tensor.extent)
        holdings = _holdings(with_whole_lines(state, of))
        axis = 0 if of == "rows" else 1
        keepers_by_rule.append(_LineKeepers(axis, tensor.lengths(view), holdings))
    ranks_of_scores: Sequence[RankSet] = [()] * view.blocks
    if scored and any(score_layout(elements).placements):
        ranks_of_scores = _ranks_by_index(view.blocks, score_runs_by_rank(elements))
    elif scored:
        ranks_of_scores = [elements.layout.ranks] * view.blocks

    state_replicas = state.layout.replicas()
    replicas = elements.layout.replicas()
    by_kind: dict[tuple[object, ...], BlockHolders] = {}
    holders = []
    n_parts = len(view.block_shapes)
    for block, ranks_of_score in enumerate(ranks_of_scores):
        matrix, part_number = divmod(block, n_parts)
        kind = (
            part_number,
            in_updates.ranks[matrix],
            in_state.ranks[matrix],
            ranks_of_score,
            *(keepers.holdings.ranks[matrix] for keepers in keepers_by_rule),
        )
        if kind not in by_kind:
            n_values: Counter[int] = Counter()
            for keepers in keepers_by_rule:
                n_values.update(keepers.values(matrix, part_number))
            # Ranks with rules' state only need no elements.
            needed = dict.fromkeys((*ranks_of_score, *n_values), 0)
            needed.update(in_updates.elements(matrix, part_number))
            by_kind[kind] = BlockHolders(
                replicas=state_replicas,
                copies=_by_replica(in_state.elements(matrix, part_number), state_replicas),
                destinations=_by_replica(needed, replicas),
                line_values=n_values,
            )
        holders.append(by_kind[kind])
    return tuple(holders)


def _by_replica(
    elements: Mapping[int, int], replicas: Sequence[Sequence[int]]
) -> tuple[Mapping[int, int], ...]:
    return tuple(
        {rank: elements[rank] for rank in replica if rank in elements} for replica in replicas
    )


def _holdings(matrices: MatrixLayout) -> _Holdings:
    view = matrices.view
    regions = regions_by_rank(matrices)
    sizes = [
        {
            rank: (
                overlap(region.rows, bounds.row_start, bounds.row_stop).size,
                overlap(region.columns, bounds.column_start, bounds.column_stop).size,
            )
            for rank, region in regions.items()
        }
        for bounds in block_bounds(view)
    ]
    batches = {rank: region.batch for rank, region in regions.items()}
    return _Holdings(sizes, _ranks_by_index(view.batch, batches))


def _ranks_by_index(count: int, runs: Mapping[int, Runs]) -> list[RankSet]:
    """Return for each of `count` indices the ranks with runs that contain it."""
    ranks: list[list[int]] = [[] for _ in range(count)]
    for rank, rank_runs in runs.items():
        for start, stop in rank_runs:
            for i in range(start, stop):
                ranks[i].append(rank)
    return [tuple(ranks_of_index) for ranks_of_index in ranks]
