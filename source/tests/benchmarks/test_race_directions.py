"""Other directions for stable potentials: fractional powers, the projection off far anchors, and the ensemble's mean."""

import dataclasses
import json
import sys
from pathlib import Path

import distill
import numpy as np
import pytest
import settings
import stability_runs as runs
import torch
from anchors import Anchors, Surroundings
from distill import MeanPredictor
from far_projection import (
    KEYS,
    FarProjection,
    ProjectedRun,
    Projection,
    RunProjection,
    orthonormal,
)
from fractional_power import (
    SMALLEST,
    FirstHalfPower,
    HalfPower,
    QuarterPower,
    ThreeQuarterPower,
)
from sets import input_of

from deepmd_muon.argcheck import normalize
from deepmd_muon.data import Frames, open_systems
from deepmd_muon.infer import Predictor
from deepmd_muon.model import build_model
from deepmd_muon.optim import orthogonalize

DATA = Path(__file__).resolve().parents[3] / "examples" / "water_xtb" / "data" / "valid"
SHAPES = [(2, 40, 12), (3, 12, 12), (1, 8, 20)]


def tiny(seed, precision="float32"):
    """Return a small potential of water on the CPU."""
    content = input_of("water", "tiny", [DATA / "300K"], seed=seed, steps=1)
    content["model"]["descriptor"] |= {"sel": [46, 92], "precision": precision}
    content["model"]["fitting_net"]["precision"] = precision
    content["learning_rate"] = {"start_lr": 1e-3}
    return Predictor(build_model(normalize(content).settings.model), device="cpu")


def matrices(shape, smallest):
    """Return U, Σ and V of matrices (b, rows, columns), float64; singular values fall from 1 to `smallest`."""
    left, _, right = torch.linalg.svd(torch.randn(shape, dtype=torch.float64), full_matrices=False)
    exponents = torch.linspace(0.0, np.log10(smallest), min(shape[1:]), dtype=torch.float64)
    return left, 10.0**exponents, right


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize(
    ("rule", "power", "tolerance"),
    [(HalfPower(), 0.5, 1e-3), (QuarterPower(), 0.25, 3e-3), (ThreeQuarterPower(), 0.75, 1e-3)],
)
def test_powers_are_those_of_the_singular_values(rule, power, tolerance, dtype):
    torch.manual_seed(0)
    parts = [matrices(shape, smallest=1e-4) for shape in SHAPES]
    directions = [0.01 * left * values @ right for left, values, right in parts]
    polar = [left @ right for left, _, right in parts]
    changed, state = rule.transform(
        [o.to(dtype) for o in polar], [u.to(dtype) for u in directions], {}
    )
    assert state == {}
    for x, (left, values, right) in zip(changed, parts, strict=True):
        largest = (values**8).square().sum() ** (1 / 16)
        assert 1.0 <= largest < 1.34
        expected = left * (values / largest + SMALLEST) ** power @ right
        assert x.dtype == dtype
        torch.testing.assert_close(x.double(), expected, rtol=0, atol=tolerance)


def test_powers_of_vanishing_momenta_are_finite():
    torch.manual_seed(0)
    left, values, right = matrices((1, 12, 8), smallest=1e-2)
    polar = (left @ right).float()
    direction = (left * values @ right).float()
    ((expected,), _) = HalfPower().transform([polar], [direction], {})
    ((found,), _) = HalfPower().transform([polar], [1e-30 * direction], {})
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("rule", [HalfPower(), QuarterPower(), ThreeQuarterPower()])
def test_noise_of_half_precision_does_not_grow(rule):
    torch.manual_seed(0)
    left, values, right = matrices((2, 64, 48), smallest=1e-12)
    direction = (left * values @ right).float()
    noisy = orthogonalize(direction, precision="float16")
    exact = (left @ right).float()
    noise = 1e-3 * torch.randn_like(noisy) / 64**0.5  # as large again as that of the products
    ((found,), _) = rule.transform([noisy + noise], [direction], {})
    ((expected,), _) = rule.transform([exact], [direction], {})
    along, wanted = (
        torch.diagonal(left.mT @ x.double() @ right.mT, dim1=1, dim2=2) for x in (found, expected)
    )
    large = values > 1e-2 * values.norm()
    torch.testing.assert_close(along[:, large], wanted[:, large], rtol=0.01, atol=0)
    assert along[:, ~large].abs().max() < wanted[:, large].min()


def test_the_first_layer_alone_takes_the_power():
    torch.manual_seed(0)
    parts = [matrices(shape, smallest=1e-3) for shape in ((1, 48, 12), (2, 12, 12))]
    directions = [left * values @ right for left, values, right in parts]
    polar = [left @ right for left, _, right in parts]
    (first, other), _ = FirstHalfPower().transform(polar, directions, {})
    ((expected,), _) = HalfPower().transform(polar[:1], directions[:1], {})
    torch.testing.assert_close(first, expected, rtol=0, atol=1e-12)
    assert torch.equal(other, polar[1])


def test_the_power_of_zeros_is_zero():
    zeros = torch.zeros(2, 4, 3)
    ((found,), _) = HalfPower().transform([zeros], [zeros], {})
    assert torch.equal(found, zeros)


def test_the_projection_takes_off_the_span_of_the_directions():
    torch.manual_seed(0)
    gradients = torch.randn(len(KEYS), 6, 5, dtype=torch.float64)
    directions = orthonormal(gradients[0], list(gradients[1:]))
    polar = torch.randn(1, 6, 5, dtype=torch.float64)
    state = {key: [q[None]] for key, q in zip(KEYS, directions, strict=True)}
    ((found,), _) = FarProjection().transform([polar], [polar], state)
    span = gradients.flatten(1).mT
    fitted = span @ torch.linalg.lstsq(span, polar.flatten()[:, None]).solution
    torch.testing.assert_close(found.flatten(), polar.flatten() - fitted[:, 0], rtol=0, atol=1e-12)


def test_dependent_and_vanishing_gradients_give_no_direction():
    x = torch.randn(3, 2, dtype=torch.float64)
    newest, same, zero = orthonormal(x, [2.0 * x, torch.zeros_like(x)])
    torch.testing.assert_close(newest, x / x.norm(), rtol=0, atol=1e-15)
    assert torch.equal(same, torch.zeros_like(x))
    assert torch.equal(zero, torch.zeros_like(x))


@pytest.fixture
def around():
    systems = open_systems(str(DATA / "300K"), ["O", "H"])
    # Every pair is nearer than this shortest distance allows, so every structure is an anchor.
    far = np.full((2, 2), 1.5)
    return Surroundings(systems, far, temperature=500.0, time_step=0.5, masses=())


def test_gradients_are_those_of_the_change_of_forces(around):
    predictor = tiny(1, "float64")
    model = predictor.model
    run = ProjectedRun(model, around, Anchors(copies=2, looks=2))
    parameter = next(p for name, p in model.named_parameters() if "layers.1.matrix" in name)
    (before_anchors,) = run.change_gradients(model, [parameter])
    assert torch.equal(before_anchors, torch.zeros_like(parameter))
    run.explore()
    assert run.taken.tolist() == [2, 2]
    run.change_gradients(model, [parameter])  # looks at the anchors
    coord, before = run._watched_coord.clone(), run._watched_force.clone()
    frames = Frames(run._atype.numpy(), coord.numpy(), run._box.numpy())
    torch.manual_seed(0)
    change = 0.1 * torch.randn_like(parameter)
    with torch.no_grad():
        parameter.add_(change)

    def half_square():
        force = torch.from_numpy(predictor.evaluate(frames).force)
        return float(0.5 * (force - before).square().sum())

    (gradient,) = run.change_gradients(model, [parameter])
    values = []
    for sign in (1.0, -1.0):
        with torch.no_grad():
            parameter.add_(sign * 1e-4 * change)
            values.append(half_square())
            parameter.sub_(sign * 1e-4 * change)
    slope = (values[0] - values[1]) / 2e-4
    assert slope > 0.0
    assert float((gradient * change).sum()) == pytest.approx(slope, rel=1e-3)


@pytest.fixture
def race_data(tmp_path):
    """Return a folder with a small set of water."""
    folder = tmp_path / "data" / "water"
    for part, name in (("train", "300K"), ("test", "350K"), ("out", "350K")):
        (folder / part).mkdir(parents=True, exist_ok=True)
        (folder / part / name).symlink_to(DATA / ("300K" if part == "train" else "350K"))
    return tmp_path / "data"


def run_setting(setting, race_data, tmp_path):
    """Train with a setting for a few steps, and return the line of its potential."""
    results = tmp_path / f"{setting}.jsonl"
    words = f"--data {race_data} --sets water --settings {setting} --steps 12 --model tiny"
    words += f" --no-averages --copies 1 1 --picoseconds water=0.01 --results {results}"
    words += f" --logs {tmp_path}"
    args = runs.arguments(words.split())
    (job,) = runs.wanted(args)
    folder = tmp_path / setting
    folder.mkdir()
    (line,) = runs.lines_of(job, args, folder)
    return line


@pytest.mark.slow
@pytest.mark.parametrize("setting", ["anchors", "projection"])
def test_anchored_runs_end_with_a_potential(setting, race_data, tmp_path, monkeypatch):
    change = {"hand_over": 4, "explore_every": 4, "looks": 2, "every": 2, "copies": 2}
    chosen = settings.SETTINGS[setting]
    assert isinstance(chosen.anchors, Projection) == (setting == "projection")
    anchors = dataclasses.replace(chosen.anchors, all_structures=True, **change)
    shorter = dataclasses.replace(chosen, anchors=anchors)
    monkeypatch.setitem(settings.SETTINGS, setting, shorter)
    lengths = []
    act = RunProjection.act

    def noted(self, step, dynamics, lr_fraction):
        act(self, step, dynamics, lr_fraction)
        states = [state for state in step.optimizer.state.values() if KEYS[0] in state]
        lengths.append([float(state[KEYS[0]].norm()) for state in states])

    monkeypatch.setattr(RunProjection, "act", noted)
    line = run_setting(setting, race_data, tmp_path)
    assert line["anchors"]["taken"] == 8
    assert line["test"]["350K"]["force"] > 0.0
    if setting == "projection":
        assert line["anchors"]["looked"] == 4
        assert line["anchors"]["change"] > 0.0
        assert lengths[0] == [0.0] * len(lengths[0])
        assert lengths[-1] == pytest.approx([1.0] * len(lengths[-1]), rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("setting", ["power_0.25", "power_0.5", "power_0.75", "first_power_0.5"])
def test_powers_train(setting, race_data, tmp_path):
    line = run_setting(setting, race_data, tmp_path)
    assert line["dynamics"]["blown"] == [None, None]


def test_structures_have_the_mean_labels_of_the_members(around):
    members = [tiny(1), tiny(2)]
    mean = MeanPredictor(members)
    structures = distill.sampled(mean, around, copies=3, samples=2, spacing=4)
    assert structures.coord.shape[:2] == (2, 3)
    usable = np.array([[True, True, False], [True, False, False]])
    systems = distill.labelled(mean, around.systems, structures._replace(usable=usable))
    (system,) = systems.values()
    assert len(system.energy) == 3
    np.testing.assert_array_equal(system.coord[1], structures.coord[0, 1].astype(np.float32))
    frames = Frames(np.repeat(system.atype[None], 3, axis=0), system.coord, system.box)
    first, second = (member.evaluate(frames) for member in members)
    np.testing.assert_allclose(system.energy, (first.energy + second.energy) / 2, rtol=1e-12)
    np.testing.assert_allclose(system.force, (first.force + second.force) / 2, atol=1e-12)
    virial = system.virial.reshape(3, 9)
    np.testing.assert_allclose(virial, (first.virial + second.virial) / 2, atol=1e-12)
    assert not np.allclose(first.force, second.force, atol=1e-4)


@pytest.mark.slow
def test_the_mean_labels_training_data_for_one_net(race_data, tmp_path, monkeypatch):
    words = f"distill.py --set water --data {race_data} --results {tmp_path / 'means.jsonl'}"
    words += " --copies 2 --samples 2 --spacing 4 --members 1.pt 2.pt"
    monkeypatch.setattr(sys, "argv", words.split())
    monkeypatch.setattr(distill, "Predictor", lambda path: tiny(int(path.stem)))
    distill.main()
    line = json.loads((tmp_path / "means.jsonl").read_text())
    assert line["structures"] == 4
    assert line["blown"] == 0
    assert line["temperature"] == pytest.approx(525.0)
    written = race_data / "water" / "distilled" / "300K"
    assert np.load(written / "set.000" / "energy.npy").shape == (4,)
    content = settings.input_for("water", "distilled", race_data / "water", seed=1, steps=2)
    systems = content["training"]["training_data"]["systems"]
    assert systems == [str(race_data / "water" / "train" / "300K"), str(written)]
    trained = run_setting("distilled", race_data, tmp_path)
    assert trained["test"]["350K"]["force"] > 0.0
