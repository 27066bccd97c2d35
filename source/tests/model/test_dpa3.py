"""DPA-3 against deepmd-kit 3.2.0 (from make_dpa3_fixtures.py), and against itself where it has two ways."""

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
from model_batches import HERE, batch_of, read_fixture

from deepmd_muon.argcheck import InputError, normalize
from deepmd_muon.loss import build_loss
from deepmd_muon.model import build_model, environment_statistics
from deepmd_muon.model.deepmd_kit import deepmd_kit_parameter_names, from_deepmd_kit, to_deepmd_kit
from deepmd_muon.model.descriptor.dpa3 import edges, geometry, module
from deepmd_muon.model.descriptor.dpa3.geometry import incoming
from deepmd_muon.model.descriptor.dpa3.settings import DPA3Settings, RepflowSettings
from deepmd_muon.model.nn import four_passes
from deepmd_muon.setting import InvalidSettingError

FIXTURE = read_fixture(HERE / "dpa3.pt.gz")
CASES = list(FIXTURE["cases"])
KINDS = list(FIXTURE["structures"])
WITH_GRADIENT = [name for name in CASES if "gradients" in FIXTURE["cases"][name]]
# In the tiny cell an atom's images at +S and −S are equally far: which one a short sel keeps is rounding.
PAIRS = [(name, kind) for name in CASES for kind in KINDS if not (name.startswith("truncated") and kind == "tiny")]


def load(name):
    settings, state = from_deepmd_kit(FIXTURE["cases"][name]["state"])
    model = build_model(settings)
    model.load_state_dict(state)
    return model


def gradients(model, data, energy=0.3):
    """Return the gradient of a random mixture of forces, virials and energies, by parameter."""
    out = model(batch_of(model, data))
    generator = torch.Generator().manual_seed(3)
    mixture = energy * out["energy"].sum()
    for key in ("force", "virial"):
        mixture = mixture + (out[key] * torch.randn(out[key].shape, generator=generator).double()).sum()
    model.zero_grad()
    mixture.backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize(("name", "kind"), PAIRS)
def test_same_numbers(name, kind):
    model = load(name)
    out = model(batch_of(model, FIXTURE["structures"][kind]))
    expected = FIXTURE["cases"][name]["outputs"][kind]
    # deepmd-kit's float32 models take differences of float32 coordinates, ours of float64 ones
    relative, absolute = (1e-5, 1e-5) if name == "float32" else (1e-12, 1e-13)
    for key, value in expected.items():
        rtol, atol = (relative, 0) if "energy" in key else (0, absolute)
        torch.testing.assert_close(out[key], value, rtol=rtol, atol=atol)
    assert kind in ("atom", "tiny") or expected["force"].abs().max() > 1e-3  # so that the comparison says something


@pytest.mark.parametrize("name", CASES)
def test_same_initial_weights(name):
    section, state = from_deepmd_kit(FIXTURE["cases"][name]["state"])
    drawn = dict(build_model(section).named_parameters())
    for key, value in drawn.items():
        assert value.dtype == state[key].dtype
        # on another processor torch's vectorised normal numbers may differ in the last bits
        torch.testing.assert_close(value.detach(), state[key], rtol=1e-6 if name == "float32" else 1e-14, atol=0)
    assert set(drawn) <= set(state)


@pytest.mark.parametrize("name", WITH_GRADIENT)
def test_same_gradient_of_the_loss(name):
    model = load(name)
    wanted = FIXTURE["cases"][name]["gradients"]
    prediction = model(batch_of(model, FIXTURE["structures"]["orthorhombic"]))
    natoms = prediction["atom_energy"].shape[1]
    value, _ = build_loss(wanted["settings"])(prediction, wanted["label"], wanted["lr_fraction"], natoms)
    torch.testing.assert_close(value, wanted["loss"], rtol=1e-11, atol=0)
    value.backward()
    ours = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert set(ours) == set(wanted["parameters"])  # the last layer's edges and angles get none
    for key, gradient in wanted["parameters"].items():
        torch.testing.assert_close(ours[key], gradient, rtol=1e-9, atol=1e-11 * gradient.abs().max().item(), msg=key)
    assert deepmd_kit_parameter_names(model) == wanted["order"]


def test_twenty_steps_of_adam_follow_deepmd_kit():
    model = load("split")
    case = FIXTURE["cases"]["split"]
    given = case["gradients"]
    loss = build_loss(given["settings"])
    adam = torch.optim.Adam(model.parameters(), lr=1e-2)
    batch = batch_of(model, FIXTURE["structures"]["orthorhombic"])
    for expected in case["followed"]:
        adam.zero_grad()
        prediction = model(batch)
        value, _ = loss(prediction, given["label"], given["lr_fraction"], batch.natoms)
        assert value.item() == pytest.approx(expected, rel=1e-9)
        value.backward()
        adam.step()
    assert len(case["followed"]) == 20
    assert case["followed"][-1] < 0.999 * case["followed"][0]


def test_same_statistics():
    model = load("statistics")
    stddev = model.atomic_model.descriptor.repflows.stddev
    wanted = stddev.clone()
    stddev.fill_(torch.nan)
    sampled = [data for kind, data in FIXTURE["structures"].items() if kind not in ("atom", "far")]
    model.set_statistics(*environment_statistics(model, [batch_of(model, data) for data in sampled]))
    torch.testing.assert_close(stddev, wanted, rtol=1e-12, atol=0)
    assert len(wanted.unique()) == 4  # radial and angular, of two types
    fixed = load("plain")
    fixed.set_statistics(torch.ones(2, 4), torch.ones(2, 4))
    assert fixed.atomic_model.descriptor.repflows.stddev.unique().tolist() == [0.3]


@pytest.mark.parametrize("name", CASES)
def test_state_dict_round_trip(name):
    model = load(name)
    theirs = FIXTURE["cases"][name]["state"]
    ours = to_deepmd_kit(model, {"lr": 1e-3, "step": 7})
    assert set(ours) == set(theirs)
    for key, value in theirs.items():
        if key != "_extra_state":
            assert ours[key].dtype == value.dtype
            assert torch.equal(ours[key], value)
    params, wanted = ours["_extra_state"]["model_params"], theirs["_extra_state"]["model_params"]
    for part in ("descriptor", "fitting_net"):
        known = {key: value for key, value in wanted[part].items() if key in params[part] and key != "repflow"}
        assert {key: value for key, value in params[part].items() if key != "repflow"} == known
    repflow = params["descriptor"]["repflow"]
    assert repflow == {key: value for key, value in wanted["descriptor"]["repflow"].items() if key in repflow}


@pytest.mark.parametrize("name", ["split", "truncated", "dynamic", "no_angles"])
@pytest.mark.parametrize("way", ["padded", "small_blocks", "bounds"])
def test_every_order_of_evaluation_gives_the_same(name, way, monkeypatch):
    """One padded block, as on a GPU, the smallest blocks, and bounds instead of counts agree with the usual way."""
    model = load(name)
    data = FIXTURE["structures"]["orthorhombic"]
    energy, wanted = model(batch_of(model, data))["atom_energy"], gradients(model, data)
    if way == "padded":
        monkeypatch.setattr(module, "plan_angles", geometry.padded_angles)
        monkeypatch.setattr(edges, "EDGE_BLOCK_ROWS", 10**9)
    elif way == "bounds":
        exact = geometry.exact_angles
        monkeypatch.setattr(module, "plan_angles", lambda counts, *more: exact(np.full_like(counts, 44), *more))
    else:
        monkeypatch.setattr(geometry, "ANGLE_BLOCK_ROWS", 1)
        monkeypatch.setattr(edges, "EDGE_BLOCK_ROWS", 1)
    torch.testing.assert_close(model(batch_of(model, data))["atom_energy"], energy, rtol=1e-13, atol=0)
    for key, value in gradients(model, data).items():
        torch.testing.assert_close(value, wanted[key], rtol=1e-9, atol=1e-12 * wanted[key].abs().max().item(), msg=key)


def test_dynamic_selection_differs_from_static_in_scale_alone():
    model = load("dynamic")
    repflow = dataclasses.replace(model.settings.descriptor.repflow, use_dynamic_sel=False, e_sel=30, a_sel=20)
    descriptor = dataclasses.replace(model.settings.descriptor, repflow=repflow)
    other = build_model(dataclasses.replace(model.settings, descriptor=descriptor))
    state = model.state_dict()
    short = {key: value[:, :30] if key.endswith((".mean", ".stddev")) else value for key, value in state.items()}
    other.load_state_dict(short)
    data = FIXTURE["structures"]["open"]
    assert batch_of(model, data).neighbor.shape[1] <= 30
    torch.testing.assert_close(model(batch_of(model, data)), other(batch_of(other, data)), rtol=1e-13, atol=1e-15)


@pytest.mark.parametrize("kind", ["atom", "far", "open"])
def test_second_derivatives_are_finite_without_neighbours(kind):
    model = load("split")
    for key, value in gradients(model, {**FIXTURE["structures"][kind], "box": None}).items():
        assert value.isfinite().all(), key


def test_padding_atoms_change_nothing():
    model = load("split")
    data = FIXTURE["structures"]["orthorhombic"]
    nframes = len(data["coord"])
    padded = {
        "coord": torch.cat([data["coord"], torch.zeros(nframes, 2, 3).double()], 1),
        "atype": torch.cat([data["atype"], -torch.ones(nframes, 2, dtype=torch.int64)], 1),
        "box": data["box"],
    }
    alone, beside = model(batch_of(model, data)), model(batch_of(model, padded))
    torch.testing.assert_close(beside["force"][:, :-2], alone["force"], rtol=0, atol=1e-15)
    torch.testing.assert_close(beside["energy"], alone["energy"], rtol=1e-14, atol=0)
    for key, value in gradients(model, padded).items():
        assert value.isfinite().all(), key


def moved(data, change):
    return {**data, "coord": change(data["coord"])}


def test_forces_are_finite_differences_of_the_energy():
    model = load("split")
    data = {key: None if value is None else value[:1] for key, value in FIXTURE["structures"]["orthorhombic"].items()}
    force = model(batch_of(model, data))["force"][0]
    rng = np.random.default_rng(0)
    for _ in range(6):
        atom, axis, step = rng.integers(force.shape[0]), rng.integers(3), 1e-4
        energies = []
        for sign in (1, -1):
            shift = torch.zeros_like(data["coord"])
            shift[0, atom, axis] = sign * step
            energies.append(model(batch_of(model, moved(data, lambda x, s=shift: x + s)))["energy"].item())
        assert force[atom, axis].item() == pytest.approx(-(energies[0] - energies[1]) / (2 * step), abs=2e-8)


def test_energy_is_invariant_and_forces_turn_along():
    model = load("dynamic")
    data = FIXTURE["structures"]["triclinic"]
    turn = torch.linalg.qr(torch.randn(3, 3, generator=torch.Generator().manual_seed(1)).double())[0]
    turned = {**moved(data, lambda x: (x + 0.37) @ turn), "box": data["box"] @ turn}
    one, other = model(batch_of(model, data)), model(batch_of(model, turned))
    torch.testing.assert_close(other["energy"], one["energy"], rtol=1e-13, atol=0)
    torch.testing.assert_close(other["force"], one["force"] @ turn, rtol=0, atol=1e-13)
    order = torch.randperm(data["coord"].shape[1], generator=torch.Generator().manual_seed(2))
    shuffled = model(batch_of(model, {**data, "coord": data["coord"][:, order], "atype": data["atype"][:, order]}))
    torch.testing.assert_close(shuffled["force"], one["force"][:, order], rtol=0, atol=1e-13)


def test_dynamics_conserve_the_energy():
    """Velocity Verlet: the error of the total energy falls with the square of the time step."""
    model = load("dynamic")
    data = {key: None if value is None else value[:1] for key, value in FIXTURE["structures"]["open"].items()}
    start = 0.05 * torch.randn(data["coord"].shape, generator=torch.Generator().manual_seed(4)).double()

    def spread(dt, steps):
        x, v, totals, potentials = data["coord"].clone(), start.clone(), [], []
        out = model(batch_of(model, {**data, "coord": x}))
        for _ in range(steps):
            v = v + 0.5 * dt * out["force"].detach()
            x = x + dt * v
            out = model(batch_of(model, {**data, "coord": x}))
            v = v + 0.5 * dt * out["force"].detach()
            potentials.append(out["energy"].item())
            totals.append(potentials[-1] + 0.5 * v.square().sum().item())
        return np.ptp(totals), np.ptp(potentials)

    coarse, exchanged = spread(0.2, 8)
    fine, _ = spread(0.1, 16)
    assert coarse < 0.02 * exchanged
    assert fine < 0.4 * coarse


@pytest.mark.parametrize("name", ["split", "distance"])
@pytest.mark.parametrize("radius", ["e_rcut", "a_rcut"])
def test_energy_and_forces_are_smooth_at_both_cutoffs(name, radius):
    """An atom crosses a cut-off of another: no jump beyond what a smooth function does on the way.

    Without smooth_edge_update (case "distance") an edge that leaves the angles changes its message by a jump; then
    only the outer cut-off is smooth.
    """
    model = load(name)
    rcut = getattr(model.settings.descriptor.repflow, radius)
    base = torch.tensor([[0.0, 0, 0], [0.9, 0.3, 0.1], [0, 0, 0]]).double()

    def at(r):
        coord = base.clone()
        coord[2, 2] = r
        out = model(batch_of(model, {"coord": coord[None], "atype": torch.tensor([[0, 1, 1]]), "box": None}))
        return torch.cat([out["energy"], out["force"].flatten()]).detach()

    step = 1e-5
    before, below, above, after = (at(rcut + shift * step) for shift in (-3, -1, 1, 3))
    jump = (above - below - 0.5 * (below - before) - 0.5 * (after - above)).abs().max().item()
    if name == "distance" and radius == "a_rcut":
        assert jump > 1e-6
    else:
        assert jump < 1e-8


def test_a_step_frees_its_graph():
    model = load("split")
    gc.collect()
    gc.disable()
    try:
        batch = batch_of(model, FIXTURE["structures"]["orthorhombic"])
        records = []
        kept = four_passes._Record.__init__

        def remembered(self, *args, **kwargs):
            kept(self, *args, **kwargs)
            records.append(weakref.ref(self))

        four_passes._Record.__init__ = remembered
        out = model(batch)
        out["force"].square().sum().backward()
        del out
        assert len(records) == 5
        assert all(record() is None for record in records)
    finally:
        four_passes._Record.__init__ = kept
        gc.enable()


REPFLOW = {"e_rcut": 6.0, "e_rcut_smth": 5.3, "e_sel": 120, "a_rcut": 4.0, "a_rcut_smth": 3.5, "a_sel": 30}


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"a_compress_rate": 1}, "a_compress_rate"),
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


@pytest.mark.parametrize(
    ("section", "key", "value", "words"),
    [
        ("", "use_econf_tebd", True, "electron configurations"),
        ("", "add_chg_spin_ebd", True, "charge and spin"),
        ("/repflow", "n_multi_edge_message", 2, "several heads"),
        ("/repflow", "sequential_update", True, "one after another"),
        ("/repflow", "a_compress_rate", 1, "linear layers"),
    ],
)
def test_what_only_deepmd_kit_has_is_refused_by_name(section, key, value, words):
    descriptor = {"type": "dpa3", "repflow": dict(REPFLOW)}
    (descriptor["repflow"] if section else descriptor)[key] = value
    content = {
        "model": {"type_map": ["O"], "descriptor": descriptor, "fitting_net": {}},
        "learning_rate": {"type": "exp", "start_lr": 1e-3},
        "loss": {},
        "training": {"training_data": {"systems": ["a"]}, "numb_steps": 1},
    }
    with pytest.raises(InputError) as error:
        normalize(content)
    (problem,) = error.value.problems
    assert problem.path == f"model/descriptor{section}/{key}"
    assert words in problem.message


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
    order, start, tiles, used = incoming(neighbor, empty)
    assert (tiles.tolist(), used.item()) == ([0, 1, 2], 3)
    edges = [order[first:end].tolist() for first, end in itertools.pairwise(start)]
    assert edges == [[3], [0, 6], [2, 5]]
    assert order.dtype == start.dtype == torch.int64
    assert [len(x) for x in incoming(neighbor)] == [9, 4, 3, 1]
    assert incoming(neighbor).start.tolist() == [0, 5, 7, 9]
    wide = torch.zeros(3, 40, dtype=torch.int64)
    tiles, used = incoming(wide, torch.arange(40) >= torch.tensor([[33], [0], [32]]))[2:]
    assert (tiles.tolist(), used.item()) == ([0, 2, 3, 1, 4, 5], 3)
