"""Batches of similar cost next to each other, and their distribution among ranks.

Ranks wait for the slowest of them in every step. The order of batches is cut into windows. Each
window is sorted by cost and then shuffled as a binary tree: the halves of the window, of each half,
and so on, change places at random. Any aligned 2, 4, 8, … batches are therefore neighbours in cost,
and their order is random otherwise.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence

import numpy as np

from deepmd_muon.data.neighbors.lists import FrameNeighbors
from deepmd_muon.data.sampling.atom_budget import AtomBudgetSampler
from deepmd_muon.data.sampling.sampler import Plan, Sampler, SavedOrder

#: Batches of a window; part of the definition of the order, do not change.
WINDOW = 256
# The second integer of the seed of a window's stream, see `sampler`.
_WINDOWS = 3


class BalancedOrder(SavedOrder):
    """The batches of another order, with batches of similar cost next to each other.

    It is a function of that order, of the costs and of the seed, not of the number of ranks. Only
    this object may draw from `order`. The `cost` of a batch, in any unit, must be the same in every
    process.
    """

    def __init__(self, order: Sampler | AtomBudgetSampler, cost: Callable[[Plan], float]) -> None:
        self._order = order
        self._cost = cost
        self._identity = hashlib.sha256(f"{order._identity} balanced".encode()).hexdigest()
        self._window: tuple[int, list[Plan]] | None = None  # the last one, by its number
        self.seed = order.seed
        self.step = 0

    def next(self) -> Plan:
        """Draw the next batch."""
        number, place = divmod(self.step, WINDOW)
        if self._window is None or self._window[0] != number:
            plans = [self._order.next() for _ in range(WINDOW)]
            plans.sort(key=self._cost)
            stream = np.random.Generator(np.random.PCG64([self.seed, _WINDOWS, number]))
            self._window = number, _tree_shuffled(plans, stream)
        self.step += 1
        return self._window[1][place]

    def _forget(self) -> None:
        self._window = None
        self._order.seed = self.seed
        self._order.step = self.step // WINDOW * WINDOW  # `next` draws the window again
        self._order._forget()


def _tree_shuffled(plans: list[Plan], stream: np.random.Generator) -> list[Plan]:
    """Let the halves of a row change places at random, and the halves of each half, and so on."""
    if len(plans) == 1:
        return plans
    middle = len(plans) // 2
    # In this order: each call draws from the stream.
    low = _tree_shuffled(plans[:middle], stream)
    high = _tree_shuffled(plans[middle:], stream)
    return low + high if stream.random() < 0.5 else high + low


def distribute(costs: Sequence[float], ranks: int) -> list[list[int]]:
    """Distribute the batches of a step: each rank gets equally many, of about the same total cost.

    The most expensive batch first, each goes to the rank with the least cost so far that has room.
    Batches of equal cost are dealt out in turn. Return the positions of each rank's batches,
    ascending.
    """
    batches_per_rank = len(costs) // ranks
    batches: list[list[int]] = [[] for _ in range(ranks)]
    loads = [0.0] * ranks
    for k in sorted(range(len(costs)), key=lambda k: -costs[k]):
        with_room = [rank for rank in range(ranks) if len(batches[rank]) < batches_per_rank]
        rank = min(with_room, key=lambda rank: (loads[rank], len(batches[rank])))
        batches[rank].append(k)
        loads[rank] += costs[k]
    return [sorted(of_rank) for of_rank in batches]


def cost_of_frame(neighbors: FrameNeighbors) -> float:
    """Return the cost of a frame: atoms, pairs, and pairs of neighbours within inner cut-offs."""
    pairs = np.count_nonzero(neighbors.index >= 0)
    angles = np.square(neighbors.inner.astype(np.float64)).sum()
    return float(neighbors.index.shape[0] + pairs + angles)
