"""Neighbour lists against a plain sum over images, and what the cache does with them."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from write_systems import make_arrays, write_npy

from deepmd_muon.data import (
    NeighborCache,
    NeighborError,
    NeighborStatistics,
    build_neighbors,
    neighbor_statistics,
    open_systems,
    stack_neighbors,
)
from deepmd_muon.data.neighbors import cache as neighbor_cache
from deepmd_muon.data.neighbors.far_atoms import far_pairs
from deepmd_muon.data.neighbors.lists import _vesin_pairs, find_pairs, frame_statistics


def brute_force(coord, box, rcut):
    """All (i, j, S) within the cutoff, by trying every image that can reach; the law for the fast list."""
    if box is None:
        images = [(0, 0, 0)]
    else:
        # |S_k| is bounded by the distance over the height of the cell along k, plus the spread of the atoms.
        heights = 1.0 / np.linalg.norm(np.linalg.inv(box), axis=0)
        inside = coord @ np.linalg.inv(box)
        reach = np.ceil(rcut / heights + np.ptp(inside, axis=0)).astype(int)
        images = list(itertools.product(*(range(-r, r + 1) for r in reach)))
    found = {}
    for shift in images:
        offset = np.zeros(3) if box is None else np.array(shift) @ box
        distance = np.linalg.norm(coord[None, :] + offset - coord[:, None], axis=-1)
        for i, j in zip(*np.nonzero(distance < rcut), strict=True):
            if i != j or any(shift):
                found[(int(i), int(j), *shift)] = distance[i, j]
    return found


def as_set(neighbors):
    """The pairs of a list as a set; also checks that none stands twice and that empty slots are empty."""
    pairs = [
        (i, int(j), *(int(s) for s in neighbors.shift[i, k]))
        for i, row in enumerate(neighbors.index)
        for k, j in enumerate(row)
        if j >= 0
    ]
    assert len(set(pairs)) == len(pairs)
    assert not neighbors.shift[neighbors.index < 0].any()
    return set(pairs)


@st.composite
def structures(draw):
    """Cells of all shapes (flat, left-handed, smaller than the cutoff), atoms far outside of them."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    natoms = draw(st.integers(1, 7))
    lengths = np.array([draw(st.floats(1.2, 6.0)) for _ in range(3)])
    tilt = np.tril(rng.uniform(-0.8, 0.8, (3, 3)), -1)
    box = (np.eye(3) + tilt) * lengths
    if draw(st.booleans()):
        box = box[[1, 0, 2]]
    # A rotation, so that no vector lies along an axis.
    box = box @ np.linalg.qr(rng.standard_normal((3, 3)))[0]
    spread = draw(st.sampled_from([1.0, 3.0]))
    coord = rng.uniform(-spread, spread, (natoms, 3)) @ box
    return (
        coord,
        box if draw(st.booleans()) else None,
        rng.integers(0, 3, natoms),
        draw(st.floats(0.8, 3.5)),
    )


@given(structures())
def test_pairs_equal_the_sum_over_images(structure):
    coord, box, atype, rcut = structure
    expected = brute_force(coord, box, rcut)
    if expected and min(expected.values()) < 1e-3:
        return
    for by_type in (True, False):
        neighbors = build_neighbors(coord, box, atype, rcut, None, by_type, ntypes=3)
        # A pair at the cutoff itself may fall on either side by rounding; the switch is zero there.
        differing = as_set(neighbors) ^ set(expected)
        assert all(abs(expected.get(pair, rcut) - rcut) < 1e-9 for pair in differing)
        if not differing:
            check_layout(neighbors, coord, box, atype, by_type)
            check_statistics(neighbors.statistics, expected, atype)


def check_layout(neighbors, coord, box, atype, by_type):
    """Sections hold their type, real neighbours first, nearest first, and no more columns than needed."""
    start = 0
    for kind, width in enumerate(neighbors.sections):
        section = slice(start, start + width)
        index, shift = neighbors.index[:, section], neighbors.shift[:, section].astype(float)
        start += width
        real = index >= 0
        assert width == real.sum(axis=1).max(initial=0)
        assert (np.diff(real.astype(int), axis=1) <= 0).all()
        if by_type:
            assert (atype[index[real]] == kind).all()
        offset = 0.0 if box is None else shift @ box
        distance = np.linalg.norm(coord[index] + offset - coord[:, None], axis=-1)
        rising = np.diff(distance, axis=1) > -1e-12
        assert rising[real[:, 1:]].all()
    assert start == neighbors.index.shape[1]


def check_statistics(statistics, expected, atype):
    counts = np.zeros((len(atype), 3), int)
    for i, j, *_ in expected:
        counts[i, atype[j]] += 1
    assert statistics.max_neighbors == tuple(counts.max(axis=0))
    assert statistics.max_total == counts.sum(axis=1).max()
    assert statistics.min_distance == pytest.approx(
        min(expected.values(), default=np.inf), rel=1e-12
    )


def test_one_atom_sees_its_images():
    """A simple cubic lattice has 6, 12 and 8 neighbours at 1, √2 and √3 lattice constants."""
    neighbors = build_neighbors(
        np.array([[7.3, -2.0, 0.1]]), np.eye(3) * 2.0, np.array([0]), 3.6, (40,), True
    )
    assert neighbors.sections == (26,)
    assert (neighbors.index == 0).all()
    lengths = np.linalg.norm(neighbors.shift[0] * 2.0, axis=-1)
    np.testing.assert_allclose(lengths, np.repeat([2.0, np.sqrt(8), np.sqrt(12)], [6, 12, 8]))
    assert neighbors.shift.dtype == np.int8


def test_atoms_far_from_their_cell_take_wider_integers():
    box = np.eye(3) * 4.0
    for cells, dtype in ((100, np.int8), (1000, np.int16), (100_000, np.int32)):
        coord = np.array([[0.5, 0.5, 0.5], [1.5 + 4.0 * cells, 0.5, 0.5]])
        neighbors = build_neighbors(coord, box, np.array([0, 0]), 1.5, None, True, ntypes=1)
        assert neighbors.shift.dtype == dtype
        assert as_set(neighbors) == {(0, 1, -cells, 0, 0), (1, 0, cells, 0, 0)}


def test_the_farthest_are_dropped():
    coord = np.array([[0.0, 0, 0], [1, 0, 0], [2.1, 0, 0], [0, 3.3, 0], [0, 0, 0.9]])
    atype = np.array([0, 1, 1, 1, 0])
    neighbors = build_neighbors(coord, None, atype, 4.0, (4, 2), True)
    assert neighbors.sections == (2, 2)
    assert neighbors.index[0].tolist() == [4, -1, 1, 2]
    # Atoms 0 and 4 see the three of type 1, each loses one; 1, 2 and 3 see two each.
    assert neighbors.dropped == 2
    assert neighbors.statistics.max_neighbors == (2, 3)
    together = build_neighbors(coord, None, atype, 4.0, (1, 2), False)
    assert together.sections == (3,)
    assert together.index[0].tolist() == [4, 1, 2]
    assert together.dropped == 5
    nothing = build_neighbors(coord, None, atype, 4.0, (0, 9), True)
    assert nothing.sections == (0, 3)


def test_padding_atoms_have_no_neighbours():
    arrays = make_arrays(1, 8)
    coord, box = arrays["coord"].reshape(8, 3), arrays["box"].reshape(3, 3)
    atype = np.array([0, -1, 1, 0, -1, -1, 1, 0])
    real = np.flatnonzero(atype >= 0)
    padded = build_neighbors(coord, box, atype, 4.0, None, True, ntypes=2)
    alone = build_neighbors(coord[real], box, atype[real], 4.0, None, True, ntypes=2)
    assert (padded.index[atype < 0] == -1).all()
    assert as_set(padded) == {(real[i], real[j], *s) for i, j, *s in as_set(alone)}


@pytest.mark.parametrize(
    ("coord", "box", "message"),
    [
        ([[0, 0, 0], [0, 0, 4.0]], np.eye(3) * 4.0, "atoms [01] and [01] lie at the same place"),
        ([[0, 0, 0], [0, np.nan, 1]], np.eye(3) * 4.0, "not finite"),
        ([[0, 0, 0], [0, 0, 1]], np.zeros((3, 3)), "volume 0 .* nopbc"),
        ([[0, 0, 0], [0, 0, 1]], np.diag([4.0, 4.0, 0.0]), "volume 0"),
    ],
)
def test_impossible_frames(coord, box, message):
    with pytest.raises(NeighborError, match=message):
        build_neighbors(np.array(coord, float), box, np.array([0, 0]), 2.0, (20,), True)


def test_sel_must_fit_the_types():
    with pytest.raises(NeighborError, match="one entry for each of the 3 types"):
        build_neighbors(np.zeros((1, 3)), None, np.array([0]), 2.0, (4, 4), True, ntypes=3)
    with pytest.raises(NeighborError, match="ntypes"):
        NeighborCache(6.0, None, True)
    with pytest.raises(NeighborError, match="rcut"):
        NeighborCache(0.0, (4,), True)


# -- batches ---------------------------------------------------------------------------------------------------


@pytest.fixture
def system(tmp_path):
    return open_systems(write_npy(tmp_path / "s", [0, 1] * 4, [make_arrays(6, 8)]))[0]


def test_stacking_keeps_every_pair():
    frames = []
    for natoms, rcut in ((3, 4.0), (8, 3.0), (5, 5.0)):
        arrays = make_arrays(1, natoms, seed=natoms)
        atype = np.arange(natoms) % 2
        coord, box = arrays["coord"].reshape(-1, 3), arrays["box"].reshape(3, 3)
        frames.append(build_neighbors(coord, box, atype, rcut, None, True, ntypes=2))
    batch = stack_neighbors(frames)
    assert batch.index.shape == (3, 8, sum(batch.sections))
    assert batch.sections == tuple(np.max([f.sections for f in frames], axis=0))
    cut = batch.sections[0]
    for k, frame in enumerate(frames):
        natoms, own = frame.index.shape[0], frame.sections[0]
        for whole, part, empty in ((batch.index, frame.index, -1), (batch.shift, frame.shift, 0)):
            np.testing.assert_array_equal(whole[k, :natoms, :own], part[:, :own])
            np.testing.assert_array_equal(
                whole[k, :natoms, cut : cut + frame.sections[1]], part[:, own:]
            )
            assert (whole[k, natoms:] == empty).all()
            assert (whole[k, :natoms, own:cut] == empty).all()
            assert (whole[k, :natoms, cut + frame.sections[1] :] == empty).all()


def test_a_batch_of_one_frame_is_not_copied(system):
    cache = NeighborCache(4.0, (50, 50), True)
    frames = system.frames([3])
    first, again = cache.batch(system, [3], frames), cache.batch(system, [3], frames)
    assert np.shares_memory(first.index, again.index)
    assert np.shares_memory(first.shift, again.shift)
    assert len(cache) == 1
    assert cache.nbytes == first.index.nbytes + first.shift.nbytes


def test_the_budget_holds(system):
    everything = NeighborCache(4.0, (50, 50), True)
    frames = system.frames(range(6))
    whole = everything.batch(system, range(6), frames)
    budget = everything.nbytes // 2
    half = NeighborCache(4.0, (50, 50), True, max_bytes=budget)
    for _ in range(2):
        batch = half.batch(system, range(6), frames)
        np.testing.assert_array_equal(batch.index, whole.index)
        np.testing.assert_array_equal(batch.shift, whole.shift)
    assert 0 < half.nbytes <= budget
    assert 0 < len(half) < 6


def test_statistics_with_and_without_cache_are_those_of_all_frames(system):
    frames = system.frames(range(6))
    single = [
        build_neighbors(
            frames.coord[k], frames.box[k], frames.atype[k], 4.0, None, True, ntypes=2
        ).statistics
        for k in range(6)
    ]
    expected = NeighborStatistics(
        min(s.min_distance for s in single),
        tuple(np.max([s.max_neighbors for s in single], axis=0).tolist()),
        max(s.max_total for s in single),
    )
    cache = NeighborCache(4.0, (3, 3), True)
    assert neighbor_statistics([system], 4.0) == expected
    assert neighbor_statistics([system], 4.0, cache, workers=3) == expected
    assert neighbor_statistics([system], 4.0, cache) == expected
    assert len(cache) == 6
    assert cache.dropped > 0
    with pytest.raises(NeighborError, match=r"rcut 4\.0"):
        neighbor_statistics([system], 5.0, cache)


def test_only_listed_frames_are_kept_and_the_others_counted(system, monkeypatch):
    built = []
    build = neighbor_cache.build_neighbors
    monkeypatch.setattr(
        neighbor_cache, "build_neighbors", lambda **given: built.append(given) or build(**given)
    )
    whole, cache = NeighborCache(4.0, (3, 3), True), NeighborCache(4.0, (3, 3), True)
    expected = neighbor_statistics([system], 4.0, whole)
    built.clear()
    assert neighbor_statistics([system], 4.0, cache, listed=[np.array([1, 4])]) == expected
    assert (len(built), len(cache)) == (2, 2)
    frames = system.frames(range(6))
    for number in (1, 4):
        kept = cache.frame(system, number, frames, number)
        np.testing.assert_array_equal(kept.index, whole.frame(system, number, frames, number).index)
    assert len(built) == 2
    # Frames that are only counted say, too, that `sel` cuts lists.
    for sel, cuts in ((3, 3), True), ((40, 40), False):
        counted = NeighborCache(4.0, sel, True)
        assert (
            neighbor_statistics([system], 4.0, counted, listed=[np.zeros(0, dtype=int)]) == expected
        )
        assert (len(counted), counted.dropped > 0) == (0, cuts)
    mixed = NeighborCache(4.0, (expected.max_total - 1,), False, ntypes=2)
    neighbor_statistics([system], 4.0, mixed, listed=[np.zeros(0, dtype=int)])
    assert mixed.dropped > 0


@pytest.mark.parametrize(
    ("find", "last"), [(build_neighbors, (None, True)), (frame_statistics, (1,))]
)
def test_atoms_at_the_same_place_are_named_across_the_cell(find, last):
    coord = np.random.default_rng(2).uniform(0.0, 10.0, (60, 3))
    coord[33] = coord[12] + [10.0, 0.0, -20.0]
    with pytest.raises(NeighborError, match=r"atoms (12 and 33|33 and 12) lie at the same place"):
        find(coord, np.eye(3) * 10.0, np.zeros(60, int), 6.0, *last)


LATTICES = {
    "simple": (np.eye(3), [[0, 0, 0]]),
    "face-centred": (np.eye(3), [[0, 0, 0], [0.5, 0.5, 0], [0.5, 0, 0.5], [0, 0.5, 0.5]]),
    "hexagonal": (
        [[1, 0, 0], [0.5, 0.75**0.5, 0], [0, 0, (8 / 3) ** 0.5]],
        [[0, 0, 0], [0.5, 0.29, 0.82]],
    ),
    "left-handed": ([[0, 1, 0], [1, 0.3, 0], [0, 0.2, 1]], [[0, 0, 0], [0.4, 0.5, 0.6]]),
}


@pytest.mark.parametrize("name", LATTICES)
@pytest.mark.parametrize("rcut", [2.7, 2.7 * 2**0.5, 5.4])
def test_counting_sees_the_neighbours_of_a_list(name, rcut):
    """Also those at the cut-off of a perfect crystal, where rounding decides."""
    cell, inside = (2.7 * np.array(values) for values in LATTICES[name])
    for moved in (0.0, 100.3):
        coord, atype = inside + moved, np.arange(len(inside)) % 3 - (moved > 0)
        whole = find_pairs(coord, cell, atype, rcut).statistics(3)
        assert frame_statistics(coord, cell, atype, rcut, 3) == whole


@pytest.mark.parametrize("far", [1.0, 1e6])
def test_counting_of_frames_without_a_cell(far):
    coord = np.array([[0, 0, 0], [1, 0, 0], [far, 2, 0], [0, 1.0, far], [far, 2, 0.7]])
    atype = np.array([0, 1, 1, -1, 0])
    whole = find_pairs(coord, None, atype, 3.0).statistics(2)
    assert frame_statistics(coord, None, atype, 3.0, 2) == whole
    alone = frame_statistics(coord[:1], None, atype[:1], 3.0, 2)
    assert alone == NeighborStatistics(np.inf, (0, 0), 0)


def test_errors_name_system_and_frame(tmp_path):
    arrays = make_arrays(3, 4)
    arrays["coord"][2, :3] = arrays["coord"][2, 3:6]
    (system,) = open_systems(write_npy(tmp_path / "s", [0] * 4, [arrays], type_map=("A",)))
    for cache in (None, NeighborCache(4.0, (50,), True)):
        with pytest.raises(
            NeighborError, match=r"/s, frame 2: atoms . and . lie at the same place"
        ):
            neighbor_statistics([system], 4.0, cache)


def test_long_counts_tell_how_far_they_are(system, monkeypatch, caplog):
    monkeypatch.setattr(neighbor_cache, "CHUNK", 2)
    monkeypatch.setattr(neighbor_cache, "_LOG_INTERVAL", -1.0)
    caplog.set_level("INFO", "deepmd_muon")
    neighbor_statistics([system], 4.0)
    assert [line.partition(" % done")[0] for line in caplog.messages] == [
        "counting neighbours: 33",
        "counting neighbours: 67",
    ]
    caplog.clear()
    monkeypatch.undo()
    neighbor_statistics([system], 4.0)
    assert caplog.messages == []


def test_positions_in_nanometres_are_refused_before_they_are_counted(tmp_path, monkeypatch):
    arrays = make_arrays(3, 60)
    for name in ("coord", "box"):
        arrays[name][1:] /= 10
    (system,) = open_systems(write_npy(tmp_path / "nm", [0] * 60, [arrays], type_map=("A",)))
    counted = []
    monkeypatch.setattr(
        neighbor_cache, "frame_statistics", lambda *arguments: counted.append(arguments)
    )
    with pytest.raises(NeighborError, match=r"/nm, frame [12]: \d+ atoms per Å³"):
        neighbor_statistics([system], 6.0)
    assert counted == []


def pairs_of(found):
    i, j, shift, distance = found
    return {
        (int(a), int(b), *(int(s) for s in c)): d
        for a, b, c, d in zip(i, j, shift, distance, strict=True)
    }


@given(structures())
def test_pairs_of_far_atoms_equal_the_sum_over_images(structure):
    """On the frames of the other search, and scattered a thousand times as far."""
    coord, box, _, rcut = structure
    for scattered in (coord, coord * 1000.0):
        expected = (
            brute_force(coord, box, rcut)
            if scattered is coord
            else pairs_of(_vesin_pairs(scattered, box, rcut))
        )
        found = pairs_of(far_pairs(scattered.copy(), box, rcut))
        assert all(
            abs(expected.get(pair, rcut) - rcut) < 1e-7 for pair in found.keys() ^ expected.keys()
        )
        for pair in found.keys() & expected.keys():
            assert found[pair] == pytest.approx(expected[pair], rel=1e-6)


SPREAD = np.random.default_rng(0).uniform(0.0, 2000.0, (600, 3))
APART = {
    "one far away": (np.array([[0, 0, 0], [1.0, 0, 0], [1e6, 0, 0], [1e6, 1.5, 0]]), None),
    "farthest": (np.array([[-1e7, 1e7, 0], [1e7, -1e7, 0], [1e7, 1.5 - 1e7, 0]]), None),
    "flat": (SPREAD * [1, 1, 0], None),
    "flat along x": (SPREAD * [0, 1, 1], None),
    "line": (SPREAD * [0, 1e3, 0], None),
    "flat cell": (SPREAD * [1, 1, 0.001], np.diag([2000.0, 2000.0, 5.0])),
    "flat and tilted": (
        SPREAD * [1, 1, 0.001] - 1e5,
        np.array([[2000.0, 300, 0], [0, 2000, 1], [500, 0, 5]]),
    ),
    "long": (SPREAD * [0.001, 0.001, 1e3], np.diag([5.0, 5.0, 2e6])),
    "thin": (np.array([[0.0, 0, 0], [3, 3, 0]]), np.diag([10.0, 10.0, 0.05])),
}


@pytest.mark.parametrize("name", APART)
def test_atoms_far_apart_have_the_neighbours_they_have(name):
    """The neighbour library ends the process with SIGFPE in most of these."""
    coord, box = APART[name]
    pairs = find_pairs(coord.copy(), box, np.zeros(len(coord), int), 6.0)
    found = pairs_of((pairs.i, pairs.j, pairs.shift, pairs.distance))
    expected = {}
    images = [(0, 0, 0)]
    if box is not None:
        inside = np.floor(coord @ np.linalg.inv(box))
        coord = coord - inside @ box
        reach = np.ceil(6.0 * np.linalg.norm(np.linalg.inv(box), axis=0)).astype(int)
        images = itertools.product(*(range(-r, r + 1) for r in reach))
    for image in images:
        moved = coord + (0.0 if box is None else np.array(image) @ box)
        for i, position in enumerate(coord):
            distance = np.linalg.norm(moved - position, axis=1)
            for j in np.flatnonzero(distance < 6.0):
                if i != j or any(image):
                    shift = image if box is None else image + inside[i] - inside[j]
                    expected[(i, int(j), *(int(s) for s in shift))] = distance[j]
    differing = found.keys() ^ expected.keys()
    assert all(abs(expected.get(pair, 6.0) - 6.0) < 1e-6 for pair in differing)
    assert len(found) > 1
    for pair in found.keys() & expected.keys():
        assert found[pair] == pytest.approx(expected[pair], abs=1e-6)


@pytest.mark.parametrize(
    ("coord", "box", "named"),
    [
        ([[0, 0, 0], [0, 2e7, 0]], None, "atom 2"),
        ([[0, 0, 0], [np.nan, 0, 0]], None, "atom 2"),
        ([[0, 0, 0], [0, 1e300, 0]], np.eye(3) * 9, "atom 2"),
        ([[0, 0, 0], [0, 9e6, 0]], np.eye(3) * 1e-3, "cell"),
        ([[0, 0, 0], [1, 1, 0]], np.diag([10, 10, 1e-6]), "cell"),
        ([[0, 0, 0], [1, 1, 0]], np.diag([10, 10, np.nan]), "cell"),
        ([[0, 0, 0], [1, 1, 0]], np.diag([1e9, 10, 10.0]), "cell"),
    ],
)
def test_geometries_that_are_mistakes_name_the_atom(coord, box, named):
    """The first atom is padding."""
    with pytest.raises(NeighborError, match=named):
        find_pairs(np.array([[np.nan] * 3, *coord], dtype=float), box, np.array([-1, 0, 0]), 6.0)


@pytest.mark.parametrize("sel", [(2, 9), (9, 2), (3, 3), (0, 5)])
def test_a_cut_keeps_sel_of_each_type_among_the_nearest_of_all_types(sel):
    """deepmd-kit's rule, written down atom by atom."""
    rng = np.random.default_rng(3)
    coord, box, atype = (
        rng.uniform(0, 5, (12, 3)),
        np.eye(3) * 5.0 + np.tril(np.ones((3, 3)), -1),
        np.arange(12) % 2,
    )
    every = build_neighbors(coord, box, atype, 4.0, None, True, 2)
    cut = build_neighbors(coord, box, atype, 4.0, sel, True)

    def listed(frame, atom):
        shift = frame.shift[atom].astype(float) @ box
        distance = np.linalg.norm(coord[frame.index[atom]] + shift - coord[atom], axis=1)
        rows = zip(distance.tolist(), frame.index[atom].tolist(), strict=True)
        return sorted(row for row in rows if row[1] >= 0)

    total = 0
    for atom in range(12):
        nearest = listed(every, atom)[: sum(sel)]
        wanted = sorted(
            row for t in (0, 1) for row in [r for r in nearest if atype[r[1]] == t][: sel[t]]
        )
        assert listed(cut, atom) == wanted
        total += len(listed(every, atom)) - len(wanted)
    assert cut.dropped == total > 0
    assert cut.statistics == every.statistics
