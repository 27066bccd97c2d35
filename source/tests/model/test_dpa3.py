"""DPA-3 against itself where it has two ways, and its settings."""

import dataclasses
import functools
import gc
import itertools
import threading
import weakref

import numpy as np
import pytest
import torch
from dpa3_passes import angle_results, derivative, distance, edge_results
from model_batches import HERE, batch_of, read_fixture, stored_model

from deepmd_muon.model import build_model
from deepmd_muon.model.descriptor.dpa3 import edges, geometry, module
from deepmd_muon.model.descriptor.dpa3.geometry import sort_by_neighbor
from deepmd_muon.model.descriptor.dpa3.layer import RepflowLayer
from deepmd_muon.model.descriptor.dpa3.settings import DPA3Settings, RepflowSettings
from deepmd_muon.model.nn import four_passes, triton_support
from deepmd_muon.setting import InvalidSettingError

FIXTURE = read_fixture(HERE / "dpa3.pt.gz")


def gradients(model, data, energy=0.3):
    """Return the gradient of a random mixture of forces, virials and energies, by parameter."""
    out = model(batch_of(model, data))
    generator = torch.Generator().manual_seed(3)
    mixture = energy * out["energy"].sum()
    for key in ("force", "virial"):
        mixture = (
            mixture + (out[key] * torch.randn(out[key].shape, generator=generator).double()).sum()
        )
    model.zero_grad()
    mixture.backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize(
    "name",
    [
        *("split", "truncated", "dynamic", "no_angles"),
        *("linear", "heads", "sequential_smooth", "sequential_truncated"),
    ],
)
@pytest.mark.parametrize("way", ["padded", "small_blocks", "bounds"])
def test_every_order_of_evaluation_gives_the_same(name, way, monkeypatch):
    """One padded block, as on a GPU, the smallest blocks, and bounds instead of counts agree with the usual way."""
    model = stored_model(FIXTURE, name)
    data = FIXTURE["structures"]["orthorhombic"]
    energy, wanted = model(batch_of(model, data))["atom_energy"], gradients(model, data)
    if way == "padded":
        monkeypatch.setattr(module, "plan_angles", geometry.padded_angles)
        monkeypatch.setattr(edges, "EDGE_BLOCK_ROWS", 10**9)
    elif way == "bounds":
        exact = geometry.exact_angles
        monkeypatch.setattr(
            module, "plan_angles", lambda counts, *more: exact(np.full_like(counts, 44), *more)
        )
    else:
        monkeypatch.setattr(geometry, "ANGLE_BLOCK_ROWS", 1)
        monkeypatch.setattr(edges, "EDGE_BLOCK_ROWS", 1)
    torch.testing.assert_close(
        model(batch_of(model, data))["atom_energy"], energy, rtol=1e-13, atol=0
    )
    for key, value in gradients(model, data).items():
        torch.testing.assert_close(
            value, wanted[key], rtol=1e-9, atol=1e-12 * wanted[key].abs().max().item(), msg=key
        )


def test_angles_beside_edges_borrow_all_that_they_read(monkeypatch):
    """Memory that their stream reads must not be reused while it does; other streams do not wait for it."""
    lent, read = [], []

    class Branches(triton_support.Branches):
        def lend(self, number, *tensors):
            lent.append({id(tensor) for tensor in tensors})

    angles = RepflowLayer._run_angles

    def watched(self, features, graph, **how):
        read.append(
            [
                *features,
                graph.angle_weight,
                *(getattr(graph.plan, f.name) for f in dataclasses.fields(graph.plan)),
            ]
        )
        return angles(self, features, graph, **how)

    monkeypatch.setattr(module, "plan_angles", geometry.padded_angles)
    monkeypatch.setattr(triton_support, "Branches", Branches)
    monkeypatch.setattr(RepflowLayer, "_run_angles", watched)
    model = stored_model(FIXTURE, "split")
    model(batch_of(model, FIXTURE["structures"]["orthorhombic"]))
    assert len(lent) == len(read) > 0
    for given, values in zip(lent, read, strict=True):
        tensors = [value for value in values if isinstance(value, torch.Tensor)]
        assert len(tensors) == 7  # nodes, edges, angles, weights, and three of the plan
        assert {id(tensor) for tensor in tensors} <= given


def test_dynamic_selection_differs_from_static_in_scale_alone():
    model = stored_model(FIXTURE, "dynamic")
    repflow = dataclasses.replace(
        model.settings.descriptor.repflow, use_dynamic_sel=False, e_sel=30, a_sel=20
    )
    descriptor = dataclasses.replace(model.settings.descriptor, repflow=repflow)
    other = build_model(dataclasses.replace(model.settings, descriptor=descriptor))
    state = model.state_dict()
    short = {
        key: value[:, :30] if key.endswith((".mean", ".stddev")) else value
        for key, value in state.items()
    }
    other.load_state_dict(short)
    data = FIXTURE["structures"]["open"]
    assert batch_of(model, data).neighbor.shape[1] <= 30
    torch.testing.assert_close(
        model(batch_of(model, data)), other(batch_of(other, data)), rtol=1e-13, atol=1e-15
    )


def test_a_step_frees_its_graph():
    model = stored_model(FIXTURE, "split")
    gc.collect()
    gc.disable()
    try:
        batch = batch_of(model, FIXTURE["structures"]["orthorhombic"])
        calls = []
        init = four_passes._Call.__init__

        def remembered(self, *args, **kwargs):
            init(self, *args, **kwargs)
            calls.append(weakref.ref(self))

        four_passes._Call.__init__ = remembered
        out = model(batch)
        out["force"].square().sum().backward()
        del out
        assert len(calls) == 5
        assert all(call() is None for call in calls)
    finally:
        four_passes._Call.__init__ = init
        gc.enable()


REPFLOW = {
    "e_rcut": 6.0,
    "e_rcut_smth": 5.3,
    "e_sel": 120,
    "a_rcut": 4.0,
    "a_rcut_smth": 3.5,
    "a_sel": 30,
}


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"a_compress_rate": 1, "a_compress_e_rate": 4, "a_compress_use_split": True}, "e_dim"),
        ({"a_compress_rate": 1, "a_compress_use_split": True, "n_dim": 60}, "n_dim"),
        ({"a_compress_rate": 4, "a_dim": 4, "a_compress_e_rate": 2}, "even number"),
        ({"sequential_update": True, "update_style": "res_avg"}, "res_residual"),
        ({"sequential_update": True, "update_angle": False}, "update_angle"),
        ({"n_multi_edge_message": 0}, "n_multi_edge_message"),
        ({"a_compress_rate": 3, "a_compress_use_split": True}, "a_compress_rate"),
        ({"use_dynamic_sel": True}, "use_dynamic_sel"),
        ({"a_rcut": 7.0}, "a_rcut"),
        ({"a_sel": 130}, "a_sel"),
        ({"axis_neuron": 65}, "axis_neuron"),
        ({"e_rcut_smth": 6.0}, "e_rcut_smth"),
        ({"skip_stat": True, "fix_stat_std": 0.0}, "skip_stat"),
        ({"sel_reduce_factor": 0.0}, "sel_reduce_factor"),
    ],
)
def test_impossible_settings_are_refused(changes, key):
    with pytest.raises(InvalidSettingError, match=key):
        RepflowSettings(**{**REPFLOW, **changes})


def test_auto_selection_counts_both_cutoffs():
    settings = DPA3Settings(RepflowSettings(**{**REPFLOW, "e_sel": "auto", "a_sel": "auto:1.5"}))
    assert settings.needs_counts

    @dataclasses.dataclass
    class Counts:
        max_total: int
        max_neighbors: tuple[int, ...] = ()

    resolved = settings.with_counts(lambda rcut: Counts({6.0: 100, 4.0: 20}[rcut]))
    assert resolved.repflow.slots == (112, 32)
    assert not resolved.needs_counts
    assert resolved.neighbors().sel == (112,)
    assert resolved.neighbors().inner == ((4.0, 32),)
    assert settings.with_counts_of(resolved) == resolved


@pytest.mark.parametrize("compute_all", [angle_results, edge_results])
@pytest.mark.parametrize("curve", ["silut:1.0", "linear"])
def test_the_last_pass_waits_for_the_third(compute_all, curve):
    # autograd runs first what was recorded last, by counts of each thread: here the force's nodes count from 0
    found = []

    def derive(energy, positions):
        thread = threading.Thread(target=lambda: found.append(derivative(energy, positions)))
        thread.start()
        thread.join()
        return found[0]

    compute = functools.partial(compute_all, torch.float64, tail=True, curve=curve)
    wanted = compute()
    assert distance(compute(derive=derive), [x.detach() for x in wanted]) < 1e-13


def test_empty_slots_burden_no_atom():
    neighbor = torch.tensor([[1, 0, 2], [0, 0, 2], [1, 0, 0]])
    empty = torch.tensor([[False, True, False], [False, True, False], [False, True, True]])
    order, start, tiles, used = sort_by_neighbor(neighbor, empty)
    assert (tiles.tolist(), used.item()) == ([0, 1, 2], 3)
    edges = [order[first:end].tolist() for first, end in itertools.pairwise(start)]
    assert edges == [[3], [0, 6], [2, 5]]
    assert order.dtype == start.dtype == torch.int64
    wide = torch.zeros(3, 40, dtype=torch.int64)
    tiles, used = sort_by_neighbor(wide, torch.arange(40) >= torch.tensor([[33], [0], [32]]))[2:]
    assert (tiles.tolist(), used.item()) == ([0, 2, 3, 1, 4, 5], 3)
