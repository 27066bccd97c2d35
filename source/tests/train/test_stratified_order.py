"""The order of branches over ranks: shares, positions, and batches dealt out without loss or repetition."""

import itertools
from collections import deque
from types import SimpleNamespace

import numpy as np
import pytest

from deepmd_muon.data import DataLoader, Seats
from deepmd_muon.data.errors import SamplerStateError
from deepmd_muon.train.branches import StratifiedOrder

SHARES = {"a": 0.6, "b": 0.3, "c": 0.1}


def drawn(size, steps, seed=5, shares=SHARES):
    """Return the branch of every rank in every step, (steps, size)."""
    orders = [StratifiedOrder(shares, seed, rank, size) for rank in range(size)]
    return np.array([[order.next() for order in orders] for _ in range(steps)])


@pytest.mark.parametrize("size", [1, 2, 4, 7])
def test_a_branch_has_its_share_of_every_step(size):
    found = drawn(size, 3000)
    for name, share in SHARES.items():
        counts = (found == name).sum(1)
        assert counts.min() >= int(size * share)
        assert counts.max() <= -int(-size * share // 1)
        # Systematic sampling: the variance of the mean is below that of independent draws.
        assert counts.mean() / size == pytest.approx(share, abs=0.03)
    for rank in range(size):
        assert (found[:, rank] == "a").mean() == pytest.approx(0.6, abs=0.04)


def test_a_branch_of_probability_0_is_never_drawn():
    assert set(drawn(3, 500, shares={"a": 0.5, "b": 0.5, "c": 0.0}).ravel()) == {"a", "b"}


def test_a_position_holds_for_any_number_of_ranks():
    whole = StratifiedOrder(SHARES, 5, 1, 4)
    names = [whole.next() for _ in range(2000)]
    saved = StratifiedOrder(SHARES, 5, 0, 2)
    for _ in range(1100):
        saved.next()
    again = StratifiedOrder(SHARES, 77, 1, 4)
    again.load_state_dict(saved.state_dict())
    assert [again.next() for _ in range(900)] == names[1100:]
    with pytest.raises(SamplerStateError):
        StratifiedOrder({"a": 0.5, "b": 0.5}, 5, 0, 2).load_state_dict(saved.state_dict())


class Numbered:
    """A loader of batches with numbers: the arithmetic of seats, without data."""

    def __init__(self, each):
        self.batches_per_step = each
        count = itertools.count()
        self._order = SimpleNamespace(next=lambda: next(count))
        self._drawn = deque()
        self._balance = False
        self._step = self._taken = 0

    draw, advance, seat, begin_step = (
        DataLoader.draw,
        DataLoader.advance,
        DataLoader.seat,
        DataLoader.begin_step,
    )


@pytest.mark.parametrize("each", [1, 3])
@pytest.mark.parametrize("ahead", [0, 5])
def test_every_batch_is_taken_once_and_positions_agree(each, ahead):
    size, steps = 4, 60
    orders = [StratifiedOrder(SHARES, 5, rank, size) for rank in range(size)]
    loaders = [{name: Numbered(each) for name in SHARES} for _ in orders]
    queues = [{name: [] for name in SHARES} for _ in orders]
    taken = {name: [] for name in SHARES}
    for order, of_rank in zip(orders, loaders, strict=True):
        order.deal(of_rank)
    for _ in range(steps):
        for rank, order in enumerate(orders):
            name = order.next()
            loader, queue = loaders[rank][name], queues[rank][name]
            for _ in range(each):
                while len(queue) <= ahead:  # a thread draws ahead of the steps
                    queue.append(loader.draw())
                taken[name].append(queue.pop(0))
                loader.advance()
        positions = [
            {name: loader._step for name, loader in of_rank.items()} for of_rank in loaders
        ]
        assert all(each_rank == positions[0] for each_rank in positions)
        assert {name: len(numbers) for name, numbers in taken.items()} == positions[0]
    for numbers in taken.values():
        assert sorted(numbers) == [*range(len(numbers))]


def test_seats_are_those_of_the_rank():
    order = StratifiedOrder({"a": 1.0}, 5, 2, 3)
    loader = Numbered(1)
    order.deal({"a": loader})
    assert order.next() == "a"
    assert loader._n_present == 3
    assert next(loader._seats) == Seats(3, 2)
