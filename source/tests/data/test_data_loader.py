"""Batches: equal to what lies on disk, exact after resuming, one order for any number of ranks."""

from __future__ import annotations

import time

import numpy as np
import pytest
from write_systems import make_arrays, write_npy

from deepmd_muon.data import (
    DataLoader,
    NeighborCache,
    SamplerStateError,
    SamplingError,
    build_neighbors,
    open_systems,
)
from deepmd_muon.data.sampling.loader import Origin

RCUT, SEL = 3.5, (40, 40)


@pytest.fixture
def systems(tmp_path):
    """Systems of 4, 6 and 8 atoms with 10, 7 and 5 frames."""
    for seed, (nframes, natoms) in enumerate([(10, 4), (7, 6), (5, 8)]):
        arrays = make_arrays(nframes, natoms, seed)
        write_npy(tmp_path / f"{seed}", [k % 2 for k in range(natoms)], [arrays])
    return open_systems(str(tmp_path))


def loader(systems, batch_size=2, **settings):
    return DataLoader(
        systems, batch_size, cache=NeighborCache(RCUT, SEL, True), **{"seed": 3, **settings}
    )


def same(a, b):
    """Whether two batches hold the same numbers."""
    return (
        a.origin == b.origin
        and a.neighbors.sections == b.neighbors.sections
        and np.array_equal(a.frames.coord, b.frames.coord)
        and np.array_equal(a.frames.energy, b.frames.energy)
        and np.array_equal(a.neighbors.index, b.neighbors.index)
        and np.array_equal(a.neighbors.shift, b.neighbors.shift)
    )


@pytest.mark.parametrize("batch_size", [1, 3, "mixed:5", "mix:30"])
def test_neighbours_belong_to_the_frames(systems, batch_size):
    data = loader(systems, batch_size)
    for _ in range(20):
        batch = data.next()
        frames, neighbors = batch.frames, batch.neighbors
        assert neighbors.index.shape == (frames.nframes, frames.natoms, sum(neighbors.sections))
        assert {name for name, _ in batch.origin.parts} <= {s.name for s in systems}
        rows = [(name, number) for name, numbers in batch.origin.parts for number in numbers]
        for k, (name, number) in enumerate(rows):
            (system,) = (system for system in systems if system.name == name)
            natoms = system.natoms
            expected = system.frames([number]).coord[0]
            assert np.array_equal(frames.coord[k, :natoms], expected)
        for k in range(frames.nframes):
            alone = build_neighbors(
                frames.coord[k], frames.box[k], frames.atype[k], RCUT, SEL, True
            )
            start = own = 0
            for width, narrow in zip(neighbors.sections, alone.sections, strict=True):
                part = neighbors.index[k, :, start : start + width]
                np.testing.assert_array_equal(part[:, :narrow], alone.index[:, own : own + narrow])
                assert (part[:, narrow:] == -1).all()
                shift = neighbors.shift[k, :, start : start + narrow]
                np.testing.assert_array_equal(shift, alone.shift[:, own : own + narrow])
                start, own = start + width, own + narrow


@pytest.mark.parametrize("prefetch", [False, True])
@pytest.mark.parametrize("batch_size", [1, 2, [3, 1, 2], "auto:20", "max:12", "mixed:3", "mix:25"])
def test_resuming_gives_the_batches_of_an_uninterrupted_run(systems, batch_size, prefetch):
    whole = loader(systems, batch_size)
    expected = [whole.next() for _ in range(25)]
    first = loader(systems, batch_size, prefetch=prefetch)
    assert all(same(first.next(), batch) for batch in expected[:11])
    state = first.state_dict()
    assert state["step"] == 11
    second = loader(systems, batch_size, prefetch=prefetch, seed=99)
    second.next()
    second.load_state_dict(state)
    assert second.state_dict() == state
    assert all(same(second.next(), batch) for batch in expected[11:])
    for data in (first, second):
        data.close()


def test_closing_keeps_the_position(systems):
    whole = loader(systems)
    expected = [whole.next() for _ in range(8)]
    data = loader(systems, prefetch=True)
    batches = [data.next() for _ in range(4)]
    data.close()
    data.close()
    batches += [data.next() for _ in range(4)]
    assert all(same(a, b) for a, b in zip(batches, expected, strict=True))


def test_passes_leave_the_order_alone(systems):
    whole = loader(systems)
    expected = [whole.next() for _ in range(6)]
    data = loader(systems, prefetch=True)
    first = [data.next() for _ in range(3)]
    list(data.sample_batches(1))
    assert all(
        same(a, b) for a, b in zip(first + [data.next() for _ in range(3)], expected, strict=True)
    )
    data.close()


def test_without_seed_orders_differ_but_resume(systems):
    one, two = loader(systems, seed=None), loader(systems, seed=None)
    assert one.state_dict()["seed"] != two.state_dict()["seed"]
    one.next()
    two.load_state_dict(one.state_dict())
    assert all(same(one.next(), two.next()) for _ in range(10))


def test_ranks_share_one_order(systems):
    single = loader(systems, 2)
    expected = [single.next() for _ in range(12)]
    ranks = [loader(systems, 2, rank=r, world_size=3, prefetch=r == 1) for r in range(3)]
    batches = [data.next() for _ in range(4) for data in ranks]
    assert all(same(a, b) for a, b in zip(batches, expected, strict=True))
    states = [data.state_dict() for data in ranks]
    assert states == [single.state_dict()] * 3
    # A checkpoint of three ranks continues on one.
    more = loader(systems, 2, seed=0)
    more.load_state_dict(states[1])
    assert same(more.next(), single.next())
    ranks[1].close()
    with pytest.raises(SamplingError, match="rank 3"):
        loader(systems, rank=3, world_size=3)


def served(dealt):
    """Energies of the frames that count."""
    return [batch.frames.energy.tolist() for batch, counts in dealt if counts]


@pytest.mark.parametrize("world", [1, 2, 3, 8])
def test_ranks_are_dealt_the_batches_of_one(systems, world):
    single = loader(systems, 2)
    expected = [single.next().frames.energy.tolist() for _ in range(7)]
    ranks = [loader(systems, 2, rank=r, world_size=world) for r in range(world)]
    for wanted in (expected[:5], expected[5:]):
        dealt = [list(data.deal(len(wanted))) for data in ranks]
        assert {len(each) for each in dealt} == {-(-len(wanted) // world)}
        parts = [served(each) for each in dealt]
        assert [parts[i % world][i // world] for i in range(len(wanted))] == wanted
        assert sum(map(len, parts)) == len(wanted)
    assert [data.state_dict() for data in ranks] == [single.state_dict()] * world


@pytest.mark.parametrize("batch_size", [2, "mixed:4", "max:9"])
@pytest.mark.parametrize("world", [1, 3])
def test_every_frame_is_dealt_once(systems, batch_size, world):
    ranks = [loader(systems, batch_size, rank=r, world_size=world) for r in range(world)]
    every = sorted(energy for s in systems for energy in s.frames(range(s.nframes)).energy)
    for _ in range(2):
        assert (
            sorted(e for data in ranks for part in served(data.deal_all()) for e in part) == every
        )
    assert ranks[0].state_dict()["step"] == 0


def test_an_epoch_of_all_ranks_serves_every_frame_once(systems):
    ranks = [loader(systems[:1], 2, rank=r, world_size=5) for r in range(5)]
    assert ranks[0].batches_per_epoch == 5
    seen = [energy for data in ranks for energy in data.next().frames.energy]
    assert sorted(seen) == sorted(systems[0].frames(range(10)).energy)


def test_other_data_refuse_the_position(systems):
    state = loader(systems).state_dict()
    with pytest.raises(SamplerStateError, match="other training data"):
        loader(systems[:2]).load_state_dict(state)
    with pytest.raises(SamplerStateError, match="other training data"):
        loader(systems, 3).load_state_dict(state)


def test_samples_are_spread_over_all_systems(systems):
    energies = [b.frames.energy.tolist() for b in loader(systems, 2).sample_batches(2)]
    every = [s.frames(range(s.nframes)).energy for s in systems]
    wanted = [
        every[0][[0, 2]],
        every[0][[5, 7]],
        every[1][[0, 1]],
        every[1][[3, 5]],
        every[2][[0, 1]],
        every[2][[2, 3]],
    ]
    assert energies == [w.tolist() for w in wanted]
    assert sum(b.frames.nframes for b in loader(systems, 2).sample_batches(100)) == 22


def test_batches_per_epoch(systems):
    assert loader(systems, 1).batches_per_epoch == 22
    assert loader(systems, 2).batches_per_epoch == 5 + 4 + 3
    assert loader(systems, 2, world_size=4).batches_per_epoch == 12
    # Slowest is the first system: 5 batches, drawn in a third of the steps.
    assert loader(systems, 2, auto_prob="prob_uniform").batches_per_epoch == 15
    assert loader(systems, 2, sys_probs=[0.5, 0.5, 0.0]).batches_per_epoch == 10
    assert loader(systems, "mixed:4").batches_per_epoch == 6
    # 6 and 4 frames of 4 atoms, 4 and 3 of 6, 3 and 2 of 8.
    assert loader(systems, "mix:24").batches_per_epoch == 6


def test_an_origin_names_systems_and_frames():
    assert str(Origin((("a", (3,)),))) == "a (frame 3)"
    assert (
        str(Origin((("a", (3, 1)), ("b", (0,)), ("a", (2,))))) == "a (frames 3, 1, 2), b (frame 0)"
    )
    many = str(Origin(tuple((f"s{k}", tuple(range(40))) for k in range(20))))
    assert many.startswith("s0 (frames 0, 1, 2, ")
    assert "15, … of 40), s1 (" in many
    assert many.endswith(", 12 more systems")


def test_filter_leaves_systems_out(systems):
    data = loader(systems, "filter:12")
    assert data.batch_sizes == (3, 2, 1)
    data = loader(systems, "filter:6")
    assert [s.natoms for s in data.systems] == [4, 6]
    assert {data.next().origin.parts[0][0] for _ in range(30)} == {s.name for s in systems[:2]}


def test_a_step_costs_a_fraction_of_a_millisecond(tmp_path):
    """192 atoms with about 90 neighbours, cached: the figure is 0.2 ms; ten times that is allowed."""
    rng = np.random.default_rng(0)
    grid = np.stack(np.meshgrid(*[np.arange(6)] * 3), -1).reshape(-1, 3)[:192]
    coord = (grid * 2.07 + rng.uniform(-0.3, 0.3, (4, 192, 3))).reshape(4, -1)
    arrays = {
        "coord": coord,
        "box": np.tile(np.eye(3).ravel() * 12.44, (4, 1)),
        "energy": np.zeros(4),
        "force": coord,
    }
    systems = open_systems(write_npy(tmp_path / "s", [0] * 64 + [1] * 128, [arrays]))
    data = DataLoader(systems, 1, seed=0, cache=NeighborCache(6.0, (46, 92), True))
    for _ in range(8):
        data.next()
    times = []
    for _ in range(50):
        start = time.thread_time()  # of this thread alone: what else runs does not count
        batch = data.next()
        times.append(time.thread_time() - start)
    assert batch.neighbors.index.shape[2] > 80
    assert np.median(times) < 2e-3
