"""Batches gathered on the device give the losses and gradients of the loader's own, whatever they are padded to."""

import dataclasses
import math
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from deepmd_muon.data import DataLoader, NeighborCache, NeighborError, open_systems
from deepmd_muon.data.frames import Frames
from deepmd_muon.loss import build_loss
from deepmd_muon.model.neighbors.atoms import MOST_NEIGHBORS
from deepmd_muon.train.batches import frame_store, shapes, windows
from deepmd_muon.train.batches import resident as resident_module
from deepmd_muon.train.batches.batch import to_device
from deepmd_muon.train.batches.resident import ResidentBatches, why_not_on_device
from deepmd_muon.train.batches.shapes import Shape, Shapes, merge
from deepmd_muon.train.step.step import differentiate

sys.path.append(str(Path(__file__).parents[1] / "model"))

import corners
from corners import DESCRIPTORS, corner_model
from write_systems import make_arrays, write_npy

CPU = torch.device("cpu")
NAMES = ("Ni", "Pd", "Al")
EXACT = ("energy", "force", "virial")


@pytest.fixture(autouse=True)
def wide_lists(monkeypatch):
    """Where `sel` cuts no list, all rules of cutting agree."""
    for name, section in DESCRIPTORS.items():
        wide = {"e_sel": 60, "a_sel": 40}
        changed = {"repflow": section["repflow"] | wide} if name.startswith("dpa3") else {"sel": 60}
        if "se_e2_a" in name:
            changed = {"sel": [40, 40, 40]}
        monkeypatch.setitem(corners.DESCRIPTORS, name, section | changed)


@pytest.fixture
def systems(tmp_path):
    """Six compositions of 1 to 14 atoms in random order of types, one without a cell, some labels and weights missing."""
    rng = np.random.default_rng(4)
    paths = []
    for k, natoms in enumerate([14, 9, 1, 5, 9, 12]):
        labels = {0: (*EXACT, "weight"), 4: ("energy", "weight")}.get(k, EXACT)
        arrays = make_arrays(5, natoms, k, labels, scale=7.0)
        types = np.sort(rng.integers(0, 3, natoms)) if k == 1 else rng.integers(0, 3, natoms)
        paths.append(write_npy(tmp_path / f"system{k}", types, [arrays], NAMES, nopbc=k == 3))
    return open_systems(paths, NAMES)


def loader(systems, model, batch_size):
    request = model.neighbors
    cache = NeighborCache(request.rcut, request.sel, request.by_type, ntypes=3, inner=request.inner)
    return DataLoader(systems, batch_size, seed=5, cache=cache)


def outcome(model, loss, batch):
    """Return the loss, its metrics, and the gradient."""
    model.zero_grad(set_to_none=True)
    value, metrics = differentiate(model, loss, batch, 0.5)
    gradient = [p.grad.flatten() for p in model.parameters() if p.grad is not None]
    return value, metrics, torch.cat(gradient)


@pytest.fixture(params=["at once", "when needed", "passing"])
def way(request, monkeypatch):
    """How frames reach the device: all before the first step, before they are needed, or anew in each window."""
    if request.param != "at once":
        monkeypatch.setattr(windows, "AT_ONCE", 0)
        monkeypatch.setattr(windows, "_FIRST_ATOMS", 30)
        monkeypatch.setattr(windows, "_WINDOW_ATOMS", 40)
    return 0 if request.param == "passing" else 1 << 30


# The number of shapes and the way of frames are no business of the descriptor.
SIZES = (2, "mixed:3", "mix:30")
PADDED = [("se_e2_a", batch_size, most) for batch_size in SIZES for most in (1, 3, 16)]
OTHERS = [name for name in DESCRIPTORS if name != "se_e2_a"]
PADDED += [(name, batch_size, 3) for name in OTHERS for batch_size in SIZES]
WAYS = [(case, "at once") for case in PADDED]
WAYS += [(case, way) for case in PADDED[:9] for way in ("when needed", "passing")]


def is_enough(case, way):
    """Whether a case is in the default run: every descriptor, size of batches, number of shapes and way once."""
    name, batch_size, most = case
    if batch_size == "mixed:3":
        return most == 3
    return name == "se_e2_a" and way == "at once" and (batch_size, most) in ((2, 1), ("mix:30", 16))


@pytest.mark.parametrize("way", ["at once", "passing"], indirect=True)
def test_batches_have_room_for_all_edges(systems, way):
    """A model that reads a list of edges gets their bound."""
    cache = NeighborCache(4.0, (MOST_NEIGHBORS,), False, ntypes=3, bound_edges=True)
    batches = ResidentBatches(DataLoader(systems, "mixed:3", seed=5, cache=cache), CPU, way)
    rooms = []
    for _ in range(12):
        structures = batches.next().read().structures
        n_edges = int((structures.neighbor >= 0).sum())
        assert 0 < n_edges <= structures.edges
        rooms.append(structures.neighbor.numel() - structures.edges)
    batches.close()
    assert max(rooms) > 0


@pytest.mark.parametrize(
    ("case", "way"),
    [
        pytest.param(*each, marks=[] if is_enough(*each) else pytest.mark.slow, id=str(each))
        for each in WAYS
    ],
    indirect=["way"],
)
def test_padded_batches_have_the_losses_of_plain_ones(systems, monkeypatch, case, way):
    name, batch_size, most = case
    monkeypatch.setattr(shapes, "MOST_SHAPES", most)
    model = corner_model(name, "float64")
    model.pieces = ()
    loss = build_loss({"start_pref_v": 0.1, "limit_pref_v": 1.0}, NAMES)
    plain = loader(systems, model, batch_size)
    batches = ResidentBatches(loader(systems, model, batch_size), CPU, way)
    layouts = set()
    for _ in range(12):
        expected = to_device(plain.next(), 3, CPU)
        feed = batches.next()
        layouts.add(feed.layout)
        found = feed.read()
        assert (feed.origin, feed.atoms.tolist()) == (expected.origin, expected.atoms.tolist())
        for needed in ({"energy"}, {"energy", "force"}):
            assert feed.labelled_atoms(needed) == expected.labelled_atoms(needed)
        # Resident frames have their atoms in another order; frames without atoms may follow.
        types = expected.compared_atoms(None).atype
        resident_types = found.compared_atoms(None).atype
        assert len(resident_types) == len(found.labels["energy"])
        for kind in range(3):
            counts = (types == kind).sum(1)
            resident_counts = (resident_types == kind).sum(1)
            assert torch.equal(resident_counts[: len(types)], counts)
            assert not resident_counts[len(types) :].any()
        value, metrics, gradient = outcome(model, loss, expected)
        same, others, direction = outcome(model, loss, found)
        assert abs(float(same - value)) <= 1e-12 * abs(float(value))
        assert float((direction - gradient).abs().max()) <= 1e-12 * float(gradient.abs().max())
        for key, number in metrics.items():
            missing = number.isnan() or not number  # of no frame: unknown, or nothing
            assert missing or math.isclose(number, others[key], rel_tol=1e-12), key
        assert len(batches._shapes._shapes) <= most
    if way and windows.AT_ONCE:
        assert len(layouts) <= most
    assert plain.state_dict() == batches._loader.state_dict()


@pytest.mark.parametrize("batch_size", [1, 2, "mixed:3"])
def test_batches_of_one_composition_share_what_is_found_for_the_first(systems, batch_size):
    """Some frames of this loader lack labels, so that a composition alone does not say what a batch needs."""
    batches = ResidentBatches(loader(systems, corner_model("se_e2_a", "float64"), batch_size), CPU)
    window = batches._windows._draw().batches[:200]
    sizes = batches._store.sizes
    assert sizes.shapes_of(window) == [sizes.shape_of(numbers) for numbers in window]


def test_shapes_grow_when_later_batches_need_more(systems, monkeypatch):
    """The table of numbers is written anew, and the position in the order of batches is the loader's."""
    monkeypatch.setattr(windows, "_AHEAD", 3)
    monkeypatch.setattr(shapes, "MOST_SHAPES", 2)
    model = corner_model("se_e2_a", "float64")
    plain, batches = (
        loader(systems, model, "mixed:2"),
        ResidentBatches(loader(systems, model, "mixed:2"), CPU),
    )
    for _ in range(20):
        expected, found = plain.next(), batches.next().read()
        here = np.sort(found.labels["energy"].numpy())
        np.testing.assert_array_equal(here, np.sort(expected.frames.energy))


def test_frames_that_stay_are_read_once(systems, way, monkeypatch):
    model = corner_model("se_e2_a", "float64")
    read, original = [], windows.read_chunk

    def noted(numbering, numbers, ntypes):
        read.extend(numbers.tolist())
        return original(numbering, numbers, ntypes)

    monkeypatch.setattr(windows, "read_chunk", noted)
    batches = ResidentBatches(loader(systems, model, 2), CPU, way)
    steps = 80
    for _ in range(steps):
        batches.next().read()
    batches.close()
    if way:
        assert sorted(read) == list(range(30))
    else:
        assert len(read) > steps


def test_the_first_step_does_not_wait_for_later_windows(systems, monkeypatch):
    model = corner_model("se_e2_a", "float64")
    batches = ResidentBatches(loader(systems, model, 2), CPU, 0)
    ahead = []
    for _ in range(3):
        batches.next().read()
        ahead.append(len(batches._windows._waiting))
    assert ahead == [0, 2, 2]
    data = loader(systems, model, 2)
    data.batches_per_step = 2
    several = ResidentBatches(data, CPU, 0)
    ahead = []
    for _ in range(3):
        several.next().read()
        ahead.append(len(several._windows._waiting))
    assert ahead == [0, 0, 2]
    monkeypatch.setattr(windows, "_FIRST_ATOMS", 1)
    lone = ResidentBatches(loader(systems, model, 2), CPU, 0)
    lone.next().read()
    assert len(lone._windows._waiting) == 2, "a first window of one batch leaves no later chance"


@pytest.mark.parametrize("cost", ["_FRAME_COST", "_SYSTEM_COST"])
def test_many_small_frames_or_systems_are_not_all_read_before_the_first_step(
    systems, monkeypatch, cost
):
    """They have few atoms, and reading them takes long."""
    model = corner_model("se_e2_a", "float64")
    counts = []
    for each in (0, windows.AT_ONCE):
        monkeypatch.setattr(windows, cost, each)
        monkeypatch.setattr(windows, "_FIRST_ATOMS", 30)
        counts.append(
            int(ResidentBatches(loader(systems, model, 2), CPU)._windows._requested.sum())
        )
    assert counts == [30, 30 // 14]


def test_memory_of_frames_that_pass_through_does_not_grow_with_the_data(systems, monkeypatch):
    monkeypatch.setattr(windows, "_WINDOW_ATOMS", 10)
    small, large = (
        ResidentBatches(loader(systems * n, corner_model("se_e2_a", "float64"), 1), CPU, 0)._store
        for n in (1, 20)
    )
    shapes = [{name: x.shape for name, x in store.tensors.items()} for store in (small, large)]
    assert shapes[0] == shapes[1]
    assert shapes[0]["coord"] == (10 + 14, 3)


def test_a_window_of_a_single_frame_has_room_for_the_first_sample(systems, monkeypatch):
    monkeypatch.setattr(windows, "_AHEAD", 1)
    model = corner_model("se_e2_a", "float64")
    plain, batches = (loader(systems, model, 1), ResidentBatches(loader(systems, model, 1), CPU, 0))
    for _ in range(3):
        energy = batches.next().read().labels["energy"]
        assert energy[0] == plain.next().frames.energy[0]


def test_steps_of_several_batches_lie_in_one_window(systems, way):
    """The table of slots is written between steps."""
    model = corner_model("se_e2_a", "float64")
    data = loader(systems, model, 2)
    data.batches_per_step = 3
    batches = ResidentBatches(data, CPU, way)
    for _ in range(20):
        turns = []
        for _ in range(3):
            turns.append(len(batches._drawn))
            batches.next().read()
        assert all(turns[1:]), "a window began within a step"


def test_later_frames_with_more_neighbours_widen_the_shape_of_their_composition():
    shapes_ = Shapes()
    narrow = Shape(2, 4, (4, 4), (8,), (), True, frozenset({"energy"}), frozenset(), 7)
    wide = dataclasses.replace(narrow, widths=(16,), capacity=32)
    shapes_.learn([narrow])
    shapes_.learn([wide])
    assert shapes_.of(narrow) is shapes_.of(wide) is wide
    assert shapes_._shapes == [wide]
    other = dataclasses.replace(narrow, labels=frozenset({"energy", "force"}))
    assert not wide.holds(other)


def test_dense_frames_are_refused_by_system_and_frame(systems, monkeypatch):
    monkeypatch.setattr(frame_store, "MOST_NEIGHBORS", 3)
    with pytest.raises(
        NeighborError, match=r"system0: frame \d: an atom has \d+ neighbours within"
    ):
        ResidentBatches(loader(systems, corner_model("se_e2_a", "float64"), 1), CPU)


def shape(natoms, often=1, width=8):
    return Shape(1, natoms, (natoms,), (width,), (), True), often


def test_merging_keeps_what_occurs_often_tight():
    wanted = dict([shape(10), shape(11), shape(100, often=50), shape(101), shape(12)])
    left = merge(wanted, 2)
    assert sorted(one.natoms for one in left) == [12, 101]
    assert [
        one.natoms for one in merge(dict([shape(10, 1000), shape(20), shape(40, 1000)]), 2)
    ] == [10, 40]


def test_a_uniform_shape_holds_its_own_composition_only():
    shapes_ = Shapes()
    own = Shape(2, 4, (4, 4), (8,), (), True, frozenset({"energy"}), frozenset(), 7)
    shapes_.learn([own])
    assert shapes_.of(own) is own
    other = Shape(2, 4, (4, 4), (8,), (), True, frozenset({"energy"}), frozenset(), 8)
    assert shapes_.of(other).holds(other)
    assert not own.holds(other)


def test_frames_with_more_than_the_device_keeps_are_left_to_the_host(systems, monkeypatch):
    @dataclasses.dataclass(frozen=True)
    class ChargedFrames(Frames):
        charge: np.ndarray | None = None

    data = loader(systems, corner_model("se_e2_a", "float64"), 1)
    assert why_not_on_device(data.systems) is None
    monkeypatch.setattr(resident_module, "Frames", ChargedFrames)
    assert "charge" in why_not_on_device(data.systems)


def test_large_structures_are_left_to_the_host(systems, monkeypatch):
    data = loader(systems, corner_model("se_e2_a", "float64"), 1)
    assert why_not_on_device(data.systems) is None
    monkeypatch.setattr(resident_module, "MOST_ATOMS", 5)
    assert "14 atoms" in why_not_on_device(data.systems)
