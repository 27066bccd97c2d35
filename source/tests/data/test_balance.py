"""Batches of similar cost next to each other, whatever the number of ranks."""

import itertools

import numpy as np
import pytest
from write_systems import make_arrays, write_npy

from deepmd_muon.data import DataLoader, NeighborCache, SamplerStateError, open_systems
from deepmd_muon.data.sampling.balance import WINDOW, distribute


def loader(systems, **options):
    cache = NeighborCache(3.5, (60,), False, ntypes=1, inner=((2.0, 40),))
    return DataLoader(systems, options.pop("batch_size", 1), seed=7, cache=cache, **options)


@pytest.fixture
def systems(tmp_path):
    """Cells of 2 to 40 atoms and of different density."""
    for k, natoms in enumerate((2, 40, 5, 17, 28, 9)):
        write_npy(
            tmp_path / f"{k}", [0] * natoms, [make_arrays(7, natoms, k, scale=5.0 + k)], ("A",)
        )
    return open_systems(str(tmp_path))


def drawn(data, count):
    return [tuple((k, tuple(frames)) for k, frames in data.draw().parts) for _ in range(count)]


@pytest.mark.parametrize("batch_size", [1, "mixed:3", "mix:40"])
def test_the_order_does_not_depend_on_the_number_of_ranks(systems, batch_size):
    options = {"balance": True, "batch_size": batch_size}
    alone = drawn(loader(systems, **options), 3 * WINDOW)
    for world in (2, 3):
        each = [
            drawn(loader(systems, rank=r, world_size=world, **options), WINDOW)
            for r in range(world)
        ]
        assert list(itertools.chain(*zip(*each, strict=True))) == alone[: world * WINDOW]
    plain = drawn(loader(systems, batch_size=batch_size), WINDOW)
    assert alone[:WINDOW] != plain
    assert sorted(alone[:WINDOW]) == sorted(plain)  # of the same batches, in another order


@pytest.mark.parametrize("world", [2, 4, 8])
def test_ranks_wait_less(systems, world):
    cost = loader(systems)._cost

    def lost(balance):
        data = loader(systems, balance=balance)
        costs = np.array([cost(data.draw()) for _ in range(4 * WINDOW)]).reshape(-1, world)
        return 1.0 - costs.mean() / costs.max(axis=1).mean()

    assert lost(balance=True) < 0.25 * lost(balance=False)


@pytest.mark.parametrize("step", [0, 5, WINDOW, WINDOW + 11])
def test_a_saved_position_continues_in_a_window(systems, step):
    data = loader(systems, balance=True)
    wanted = drawn(data, step + 30)
    first = loader(systems, balance=True)
    for _ in range(step):
        first.draw()
        first.advance()
    again = loader(systems, balance=True)
    again.load_state_dict(first.state_dict())
    assert drawn(again, 30) == wanted[step:]
    with pytest.raises(SamplerStateError):
        loader(systems).load_state_dict(first.state_dict())


def test_batches_of_a_step_are_distributed_by_cost():
    assert distribute([1.0] * 6, 2) == [[0, 2, 4], [1, 3, 5]]  # dealt out in turn
    assert distribute([9.0, 1.0, 1.0, 9.0, 5.0, 5.0], 3) == [[0, 1], [2, 3], [4, 5]]
    assert distribute([4.0], 1) == [[0]]


def test_ranks_that_take_several_batches_in_a_step_share_their_cost(systems):
    steps, each = 10, 4
    for balance in (False, True):
        ranks = [
            loader(systems, rank=r, world_size=2, batches_per_step=each, balance=balance)
            for r in range(2)
        ]
        found = [[drawn(data, each) for _ in range(steps)] for data in ranks]
        alone = loader(systems, batches_per_step=2 * each, balance=balance)
        for step in range(steps):
            assert sorted(found[0][step] + found[1][step]) == sorted(drawn(alone, 2 * each))
        if not balance:
            plain = drawn(loader(systems), 2 * each * steps)
            assert [batch for step in found[1] for batch in step] == plain[1::2]
