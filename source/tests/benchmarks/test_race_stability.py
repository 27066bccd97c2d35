"""The stability experiment: watched dynamics against the package's, inputs of all settings, rates with errors."""

import copy
import json
import math
import sys
from fnmatch import fnmatchcase
from pathlib import Path

import labels_to_stability
import numpy as np
import pytest
import rules_table
import settings
import stability_frontier as frontier
import stability_runs as runs
import stability_table as table
import torch
from anchors import AnchoredRun, Anchors, Surroundings
from first_layer_rate import FirstLayerRate
from sets import input_of
from spectral_cap import SpectralCap
from watched import RATIOS, WATCH, WatchedRun, copies_of

from deepmd_muon.argcheck import normalize
from deepmd_muon.data import Frames, open_systems
from deepmd_muon.dynamics import ForceField, Systems, simulate
from deepmd_muon.infer import Predictor
from deepmd_muon.model import build_model
from deepmd_muon.stability.coverage import pairs_of

TOP = Path(__file__).resolve().parents[3]
DATA = TOP / "examples" / "water_xtb" / "data" / "valid"
BENCHMARKS = TOP / "doc" / "benchmarks"


@pytest.fixture(scope="module", params=["tiny", pytest.param("dpa3", marks=pytest.mark.slow)])
def predictor(request):
    content = input_of("water", request.param, [DATA / "300K"], seed=1, steps=1)
    if request.param == "tiny":
        content["model"]["descriptor"]["sel"] = [46, 92]
    else:
        content["model"]["descriptor"]["repflow"] |= {"nlayers": 1, "e_sel": 100, "a_sel": 30}
    content["learning_rate"] = {"start_lr": 1e-3}
    return Predictor(build_model(normalize(content).settings.model), device="cpu")


@pytest.fixture
def copies(predictor):
    (system,) = open_systems(str(DATA / "300K"), predictor.type_map)
    frames = system.frames([0, 3])
    start = Frames(frames.atype, frames.coord, frames.box)
    kelvin = torch.tensor([300.0, 500.0], dtype=torch.float64)
    return copies_of(Systems.from_frames(start, predictor.type_map), kelvin, seed=1), kelvin


def test_watched_dynamics_are_those_of_the_package(predictor, copies):
    systems, kelvin = copies
    torch.testing.assert_close(systems.temperature, kelvin, rtol=1e-12, atol=0)
    shortest = np.full((2, 2), 1.5)
    run = WatchedRun(predictor.model, systems, shortest, kelvin, time_step=0.5)
    found = run.run(0.5e-3 * WATCH * 2)
    *_, last = simulate(ForceField(predictor), systems, 2 * WATCH, 0.5, every=WATCH)
    torch.testing.assert_close(run.forces(), last.forces.force, rtol=0, atol=1e-6)
    closest = [
        pairs_of(last.systems.frames(), k, 5.0).distance.min() / 1.5 for k in range(2)
    ]  # bonds become shorter or longer
    assert (found.least[-1] <= np.array(closest) + 1e-6).all()
    np.testing.assert_array_equal(
        np.isfinite(found.passed), found.least[-1][:, None] < np.array(RATIOS)
    )
    assert np.isinf(found.blown).all()
    assert np.abs(found.energy).max() < 1e-3


def test_a_copy_that_is_too_hot_ends_and_others_go_on(predictor, copies):
    systems, kelvin = copies
    found = WatchedRun(
        predictor.model, systems, np.ones((2, 2)), kelvin * torch.tensor([0.1, 1.0]), 0.5
    ).run(0.01)
    assert found.blown[0] == pytest.approx(0.5e-3 * WATCH)
    assert math.isinf(found.blown[1])
    assert np.isinf(found.pairs[0]).all()
    assert np.isfinite(found.pairs[1]).any()


def test_the_hinge_compares_present_forces_with_those_of_the_copy(predictor):
    systems = open_systems(str(DATA / "300K"), predictor.type_map)
    around = Surroundings(
        systems, np.full((2, 2), 0.5), temperature=500.0, time_step=0.5, masses=()
    )
    model = predictor.model
    run = AnchoredRun(model, around, Anchors(copies=2, looks=2, all_structures=True, free=0.0))
    run.explore()
    assert run.taken.tolist() == [2, 2]
    before = Predictor(copy.deepcopy(model), device="cpu")
    weights = copy.deepcopy(model.state_dict())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2.0)
    hinge = run.add_gradient(model, 1.0)
    frames = Frames(run._atype.numpy(), run._ring[[0, 1], [0, 1]].numpy(), run._box.numpy())
    present, wanted = (one.evaluate(frames).force for one in (predictor, before))
    excess = np.linalg.norm(present - wanted, axis=-1) - 0.1 * np.linalg.norm(wanted, axis=-1)
    assert (excess > 0.0).any()
    expected = 1000.0 * (np.sqrt(1.0 + np.maximum(excess, 0.0) ** 2) - 1.0).mean()
    assert float(hinge) == pytest.approx(expected, rel=1e-3)
    assert any(parameter.grad.abs().max() > 0.0 for parameter in model.parameters())
    model.zero_grad()
    model.load_state_dict(weights)


def test_labels_count_until_no_copy_blows_up_and_no_check_fails():
    rounds = [(0, 3, None), (40, 0, "fails"), (75, 0, "doubtful")]
    lines = [
        {"set": "water", "setting": "default", "seed": seed, "round": number, "labels": labels}
        | {"blown": blown, "verdict": verdict, "test": 0.03 - 0.01 * number}
        for seed, last in ((1, 3), (2, 2))
        for number, (labels, blown, verdict) in enumerate(rounds[:last])
    ]
    assert labels_to_stability.table(lines)[2:] == [
        "| water | default | 75, > 40 | 0.0300 | 0.0150 |"
    ]


@pytest.mark.slow
@pytest.mark.parametrize("name", settings.SETTINGS)
def test_inputs_of_settings_are_accepted(name, tmp_path):
    (tmp_path / "train" / "300K").mkdir(parents=True)
    (tmp_path / "train" / "300K" / "type.raw").write_text("0")
    content = settings.input_for("alloys", name, tmp_path, seed=2, steps=10)
    assert normalize(content).settings.training.numb_steps == 10
    assert content["training"]["seed"] == 2


@pytest.mark.parametrize(
    ("part", "layers"),
    [
        ("none", []),
        ("embedding", [("descriptor", k) for k in range(3)]),
        ("fitting", [("fitting_net", k) for k in range(4)]),
        ("first", [("fitting_net", 0)]),
        ("last", [("fitting_net", 2)]),
        ("first_last", [("fitting_net", 0), ("fitting_net", 2)]),
    ],
)
def test_routes_match_the_matrices_of_their_part(part, layers):
    content = input_of("water", "tiny", [DATA / "300K"], seed=1, steps=1)
    content["model"]["descriptor"] |= {"sel": [46, 92], "neuron": [4, 8, 16]}
    content["learning_rate"] = {"start_lr": 1e-3}
    model = build_model(normalize(content).settings.model)
    matched = {
        (next(net for net in ("descriptor", "fitting_net") if net in name), name.split(".")[-2])
        for name, _ in model.named_parameters()
        if any(fnmatchcase(name, pattern) for pattern in settings.ROUTES[part])
    }
    assert matched == {(net, str(number)) for net, number in layers}


def test_the_first_layer_alone_gets_the_lower_rate():
    blocks = [torch.zeros(1, 512, 96), torch.zeros(2, 96, 96), torch.zeros(1, 32, 64)]
    assert [f.item() for f in FirstLayerRate(factor=0.25).factors(blocks, {})] == [0.25, 1.0, 1.0]


def test_noise_displaces_copies_of_frames(tmp_path):
    written = runs.noisy(DATA / "300K", tmp_path, 0.02, 1)
    (plain,), (noisy,) = (
        open_systems(str(DATA / "300K"), ["O", "H"]),
        open_systems(written, ["O", "H"]),
    )
    n = plain.nframes
    before, after = plain.frames(np.arange(n)), noisy.frames(np.arange(runs.COPIES * n))
    np.testing.assert_array_equal(after.coord[:n], before.coord)
    moved = after.coord[n:] - np.tile(before.coord, (runs.COPIES - 1, 1, 1))
    assert moved.std() == pytest.approx(0.02, rel=0.02)
    np.testing.assert_array_equal(after.force, np.tile(before.force, (runs.COPIES, 1, 1)))


@pytest.mark.slow
def test_a_run_gives_a_line_a_potential(tmp_path, monkeypatch):
    folder = tmp_path / "data" / "water"
    for part, name in (("train", "300K"), ("test", "350K"), ("out", "350K")):
        (folder / part).mkdir(parents=True, exist_ok=True)
        (folder / part / name).symlink_to(DATA / ("300K" if part == "train" else "350K"))
    words = [
        "--data",
        str(tmp_path / "data"),
        "--sets",
        "water",
        "--settings",
        "default",
        "--steps",
        "4",
    ]
    words += [
        "--model",
        "tiny",
        "--copies",
        "1",
        "1",
        "--picoseconds",
        "water=0.01",
        "--check-seeds",
        "1",
    ]
    words += [
        "--check-copies",
        "1",
        "--results",
        str(tmp_path / "r.jsonl"),
        "--logs",
        str(tmp_path),
    ]
    monkeypatch.setattr(sys, "argv", ["stability_runs.py", *words])
    runs.main()
    lines = [json.loads(line) for line in (tmp_path / "r.jsonl").read_text().splitlines()]
    assert [line["setting"] for line in lines] == ["default", "default_average"]
    potentials = table.potentials_of(table.read_lines([tmp_path / "r.jsonl"]))
    assert all(
        p.verdict and p.test > 0 and p.flatness > 0 and p.time == pytest.approx(0.008)
        for p in potentials
    )
    assert len(table.settings_table(potentials)) == 4
    assert runs.wanted(runs.arguments(words)) == []


def test_failed_runs_are_run_again(tmp_path):
    results = tmp_path / "r.jsonl"
    words = ["--data", str(tmp_path), "--sets", "water", "salt", "--settings", "default"]
    words += ["--steps", "4", "--seeds", "1", "2", "--model", "tiny"]
    args = runs.arguments([*words, "--results", str(results), "--logs", str(tmp_path)])
    water, salt, water_again, salt_again = runs.wanted(args)
    end = {"model": "tiny", "failed": "RuntimeError"}
    lines = [{**water._asdict(), "model": "tiny"}, {**salt._asdict(), **end}]
    lines += [{**water_again._asdict(), "model": "tiny"}, {**water_again._asdict(), **end}]
    results.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert runs.wanted(args) == [salt, water_again, salt_again]


def test_the_page_shows_the_tables_of_the_published_runs(tmp_path):
    raw = BENCHMARKS / "raw" / "stability"
    page = "".join(
        (BENCHMARKS / name).read_text(encoding="utf-8")
        for name in (
            "stability.md",
            "stability_routes.md",
            "stability_dpa3.md",
            "stability_tried.md",
        )
    )
    potentials, checks = table.read_results([raw / "stability.csv", raw / "checks.csv"])
    for make in (
        frontier.goal_table,
        frontier.longest_table,
        frontier.sets_table,
        frontier.lengths_table,
        frontier.routes_table,
        frontier.directions_table,
        frontier.dpa3_table,
    ):
        assert "\n".join(make(potentials)) in page
    for name, rows in (("stability.csv", potentials), ("checks.csv", checks)):
        table.write_csv(tmp_path / name, rows)
        written, published = (folder / name for folder in (tmp_path, raw))
        assert sorted(written.read_text().split()) == sorted(published.read_text().split()), name
    water = [one for one in potentials if one.set == "water"]
    frontier.draw(water, tmp_path / "picture.png")
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")


def test_the_page_of_rules_shows_the_errors_of_the_published_runs(monkeypatch, capsys):
    names = ("rules_h200_2026-11-24.jsonl", "rules_seed3_h200_2026-11-24.jsonl")
    paths = [str(BENCHMARKS / "raw" / name) for name in names]
    monkeypatch.setattr(sys, "argv", ["rules_table.py", *paths])
    rules_table.main()
    rows = capsys.readouterr().out.splitlines()
    row = next(row for row in rows if row.startswith("| soap |"))
    cells = [cell.partition(", ×")[0].strip() for cell in row.split("|")[2:-1]]
    assert len(cells) == 5
    page = (BENCHMARKS / "rules.md").read_text(encoding="utf-8")
    assert " | ".join(["| SOAP-Muon", *cells]) in page


@pytest.mark.parametrize("shape", [(6, 4), (4, 6)])
def test_the_spectral_cap_bounds_singular_values(shape):
    rule, lr = SpectralCap(cap=2.0), torch.tensor(0.05, dtype=torch.float64)
    torch.manual_seed(0)
    w = torch.randn(2, *shape, dtype=torch.float64) / 4
    for _ in range(100):  # along the weights, which would reach 5
        left, values, right = torch.linalg.svd(w, full_matrices=False)
        u = -left @ right
        capped = w - lr * rule.constrain([u], [w], lr)[0]
        k = lr / 2.0
        alpha = (k / (3 * (1 + k) ** 5)).sqrt()
        x = (values + lr) / 2.0
        y = x - alpha * x**3
        expected = left @ torch.diag_embed(2.0 * (y + alpha * y**3)) @ right
        torch.testing.assert_close(capped, expected, rtol=0, atol=1e-12)
        w = capped
    largest = torch.linalg.matrix_norm(w, 2)
    assert ((largest > 1.8) & (largest < 2.1)).all()


def test_rates_have_the_error_of_potentials_that_differ():
    assert table.rate_of([0, 0], [10.0, 10.0]) == (0.0, 0.05)
    # Ten of ten runs of one potential and none of the other: as uncertain as one of two.
    rate, error = table.rate_of([10, 0], [50.0, 50.0])
    assert (rate, error) == (pytest.approx(0.1), pytest.approx(0.1))
    assert table.rate_of([5, 5], [50.0, 50.0]) == (pytest.approx(0.1), 0.0)
