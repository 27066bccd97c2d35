"""The stability experiment: watched dynamics against the package's, inputs of all settings, rates with errors."""

import copy
import json
import math
import sys
from dataclasses import replace
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
from deepmd_muon.train.learning_rate import learning_rate

DATA = Path(__file__).resolve().parents[3] / "examples" / "water_xtb" / "data" / "valid"


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


def test_routed_settings_choose_matrices_and_both_rates(tmp_path):
    chosen = settings.input_for("water", "first_c1.44_r3", tmp_path, seed=1, steps=10)
    assert chosen["optimizer"] == {
        "type": "HybridMuon",
        "adamw_patterns": ["*fitting_net*layers.0.matrix"],
        "lr_adjust_coeff": 1.44,
        "adam_lr_ratio": 3.0,
    }


def test_the_first_layer_alone_gets_the_lower_rate():
    blocks = [torch.zeros(1, 512, 96), torch.zeros(2, 96, 96), torch.zeros(1, 32, 64)]
    assert [f.item() for f in FirstLayerRate(factor=0.25).factors(blocks, {})] == [0.25, 1.0, 1.0]


def test_parts_of_a_plan_may_have_their_lengths(tmp_path):
    results = tmp_path / "r.jsonl"
    done = {"set": "water", "setting": "default", "seed": 2, "model": "se_e2_a", "steps": 1000}
    results.write_text(json.dumps(done) + "\n")
    plan = '[[["water"], ["default"], [1, 2], 3000, 1000], [["salt"], ["soap"], [3]]]'
    words = ["--data", str(tmp_path), "--results", str(results), "--steps", "7", "--plan", plan]
    assert runs.wanted(runs.arguments(words)) == [
        runs.Job("water", "default", 1, 3000),
        runs.Job("water", "default", 1, 1000),
        runs.Job("water", "default", 2, 3000),
        runs.Job("salt", "soap", 3, 7),
    ]


def test_longer_runs_are_expected_to_train_longer():
    assert runs.Duration(steps=1000, training=10.0, rest=5.0).of(3000) == pytest.approx(35.0)


def test_averages_are_left_out_on_demand(tmp_path):
    with_averages, without = (
        settings.input_for("water", "default", tmp_path, seed=1, steps=10, averages=averages)
        for averages in (True, False)
    )
    assert with_averages["training"]["enable_ema"] is True
    assert "enable_ema" not in without["training"]


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
def test_the_last_tenth_restarts_on_the_same_course(monkeypatch, tmp_path):
    given = []
    monkeypatch.setattr(
        runs,
        "run_train",
        lambda content, words: given.append((content, words)) or tmp_path / "m.pt",
    )
    args = runs.arguments(
        ["--data", str(tmp_path), "--results", str(tmp_path / "r.jsonl"), "--steps", "100"]
    )
    runs.trained(runs.Job("water", "slow_last_tenth", 1, 100), args, tmp_path)
    (first, _), (last, words) = given
    rates = []
    for content in (first, last):
        section = normalize(
            {
                **content,
                "training": {**content["training"], "training_data": {"systems": [str(DATA)]}},
            }
        )
        rates.append(
            learning_rate(section.settings.learning_rate, content["training"]["numb_steps"])(89)
        )
    assert rates[0] == pytest.approx(rates[1], rel=2e-3)
    assert (first["training"]["numb_steps"], last["training"]["numb_steps"]) == (90, 100)
    assert "lr_adjust_coeff" not in first["optimizer"]
    assert last["optimizer"]["lr_adjust_coeff"] == pytest.approx(0.864)
    assert words == ["--restart", str(tmp_path / "m.pt")]
    given.clear()
    runs.trained(runs.Job("water", "decay_3_first_half", 1, 100), args, tmp_path)
    seen = [
        (content["training"]["numb_steps"], content["optimizer"]["weight_decay"])
        for content, _ in given
    ]
    assert seen == [(50, 3.0), (100, 0.001)]


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


def test_tables_keep_models_apart():
    numbers = (0.1, 0.2, 1.0, 4, 8.0, 1, 1, 6.0, 0.5, 4, 1.0)
    first = table.Potential("dpa3", "water", "default", 1, 10, *numbers, "fails", 16, 2.0, 3, 0.3)
    some = [first, replace(first, model="se_e2_a", test=0.3, check_copies=64)]
    assert [(row.model, row.seeds, row.test) for row in table.settings_rows(some)] == [
        ("dpa3", 1, 0.1),
        ("se_e2_a", 1, 0.3),
    ]
    assert [line.split(" | ")[0::2] for line in table.verdict_table(some)[2:]] == [
        ["| dpa3, water, 10 steps", "1", "0"],
        ["| se_e2_a, water, 10 steps", "1", "0"],
        ["| check of 16 copies, 2 ps; 4 hotter runs, 10 steps", "1", "0"],
        ["| check of 64 copies, 2 ps; 4 hotter runs, 10 steps", "1", "0"],
        ["| all", "2", "0"],
    ]


def test_potentials_survive_a_table_of_theirs(tmp_path):
    numbers = (0.1, 0.2, math.nan, 4, 8.0, 1, 1, 6.0, 0.5, 4, math.inf)
    checked = table.Potential(
        "se_e2_a", "water", "default", 1, 10, *numbers, "fails", 16, 2.0, 3, 0.3
    )
    unchecked = replace(checked, seed=2, verdict=None, check_copies=None, check_time=None)
    unchecked = replace(unchecked, check_blown=None, check_least=None)
    table.write_csv(tmp_path / "p.csv", [checked, unchecked])
    found, lines = table.read_results([tmp_path / "p.csv"])
    assert lines == []
    assert math.isnan(found[0].flatness)
    assert [replace(p, flatness=1.0) for p in found] == [
        replace(p, flatness=1.0) for p in (checked, unchecked)
    ]
    (again,) = [
        p for p in table.potentials_of([], [*found, replace(found[0], test=0.3)]) if p.seed == 1
    ]
    assert again.test == 0.3


def potential(setting, seed, steps, test, blown, departed):
    return table.Potential(
        model="se_e2_a",
        set="water",
        setting=setting,
        seed=seed,
        steps=steps,
        test=test,
        out=0.2,
        flatness=1.0,
        runs=10,
        time=50.0,
        blown=blown,
        departed=departed,
        departing=20.0,
        least=0.5,
        hot_runs=4,
        hot=1.0,
        verdict=None,
        check_copies=None,
        check_time=None,
        check_blown=None,
        check_least=None,
    )


def test_the_frontier_compares_optimizers_by_length(tmp_path):
    some = [
        potential("default", 1, 3000, 0.1, 10, 4),
        potential("default", 2, 3000, 0.3, 0, 0),
        potential("default", 1, 12000, 0.1, 0, 0),  # its dynamics were shorter
        potential("adamw", 1, 30000, 0.4, 0, 2),
    ]
    assert frontier.frontier_table(some)[2:] == [
        "| water | 3,000 | 0.2000 | 1/2 (10/20) | 0.100 | – | – | – |",
        "| water | 30,000 | – | – | – | 0.4000 | 0/1 (0/10) | 0.100 |",
    ]
    (point,) = frontier.points_of(some, "water", "default")
    assert (point.blown, point.blown_error) == (pytest.approx(0.5), pytest.approx(0.5))
    frontier.draw(some, tmp_path / "f.png")
    assert (tmp_path / "f.png").read_bytes().startswith(b"\x89PNG")


def test_routes_are_compared_with_the_default_of_the_same_seeds():
    some = [
        potential("default", 1, 30000, 0.1, 3, 4),
        potential("default", 2, 30000, 0.2, 0, 0),
        potential("default", 3, 30000, 9.0, 10, 0),
        potential("first_c4.32_r3", 1, 30000, 0.2, 1, 2),
        potential("first_c4.32_r3", 2, 30000, 0.2, 1, 2),
        potential("first_c4.32_r3", 4, 30000, 9.0, 1, 2),  # the default has no such seed
        potential("last_c4.32_r3", 1, 3000, 0.2, 1, 2),
        potential("adamw", 3, 30000, 4.5, 2, 2),
    ]
    assert frontier.routes_table(some) == [
        "| on AdamW | coefficient | ratio | water |",
        "|---|---|---|---|",
        "| first | 4.32 | 3 | 1.50 ± 0.50, 1.00; 2 (3) of 20 |",
        "| all | – | – | 0.50, 1.00; 2 (10) of 10 |",
    ]


def test_the_table_of_a_set_has_settings_with_all_seeds():
    some = [potential("default", seed, 30000, 0.1, 1, 4) for seed in range(1, 9)]
    some += [potential("adamw", seed, 30000, 0.1, 1, 4) for seed in range(1, 8)]
    some += [replace(one, steps=3000, test=0.3) for one in some]
    header, _, *rows = frontier.set_table(some, "water")
    assert header.startswith("| water | test")
    assert rows == ["| default | 0.1000 ± 0.0000 | 0.2000 ± 0.0000 | 8 | 8 | 0.200 ± 0.000 |"]


def test_other_limits_of_the_check_are_compared():
    numbers = (0.1, 0.2, 1.0, 4, 8.0, 1, 1, 6.0, 0.5, 4, 1.0)
    bad = table.Potential("dpa3", "water", "default", 1, 10, *numbers, "fails", 16, 2.0, 3, 0.3)
    good = replace(bad, blown=0, verdict="doubtful", check_blown=0, check_least=0.7)
    rows = {
        row.strip("| ").split(" | ")[0]: row.split(" | ")[1:]
        for row in table.limit_table([bad, good, good])[2:]
    }
    assert rows["dp check"] == ["1 of 1", "2 of 2 |"]
    assert rows["a pair comes closer than 0.75"] == ["1 of 1", "0 of 2 |"]
    assert rows["a pair comes closer than 0.2"] == ["0 of 1", "2 of 2 |"]
    assert rows["at least 2 of its copies blow up"] == ["1 of 1", "2 of 2 |"]
    assert rows["at least 8 of its copies blow up"] == ["0 of 1", "2 of 2 |"]


def test_checks_at_several_temperatures_are_compared(tmp_path):
    given = {"temperature": 300.0, "copies": 1, "time": 5.0, "ratio": 1.0, "features": []}
    passes = {**given, "items": {"dynamics": "doubtful"}, "blown": []}
    fails = {**given, "items": {"dynamics": "fails"}, "blown": [0.1]}
    run = {
        "copies": [1, 1],
        "picoseconds": 1.0,
        "ratios": [0.9, 0.75],
        "passed": [[None, None]] * 2,
        "least": [[1, 1]],
    }
    line = {"model": "m", "set": "s", "setting": "d", "seed": 1, "steps": 1, "test": {}, "out": {}}
    bad = {
        **line,
        "dynamics": {**run, "blown": [0.5, None]},
        "check": {"1.0": passes, "1.5": fails},
    }
    good = {
        **line,
        "dynamics": {**run, "blown": [None, None]},
        "check": {"1.0": passes, "1.5": fails},
    }
    one = {**good, "check": {"1.5": passes}}
    checks = table.heated_checks([bad, good, good, one])
    table.write_csv(tmp_path / "checks.csv", checks)
    assert table.read_results([tmp_path / "checks.csv"]) == ([], checks)
    assert table.heat_table(checks)[2:] == [
        "| 1.0 | 0 of 1 | 0 of 1 | 2 of 2 | 2 of 2 |",
        "| 1.5 | 1 of 1 | 1 of 1 | 0 of 2 | 0 of 2 |",
    ]
    assert table.heated_checks([one]) == []


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


def test_adamw_has_the_best_rate_of_each_model(tmp_path):
    def rate(model):
        given = settings.input_for("water", "adamw", tmp_path, seed=1, steps=10, model=model)
        return given["learning_rate"]["start_lr"]

    assert (rate("se_e2_a"), rate("dpa3")) == (0.024, 0.006)


def test_runs_of_another_model_or_length_are_others(tmp_path, monkeypatch, capsys):
    results = tmp_path / "r.jsonl"
    test = {"test": {"a": {"force": 0.5}}, "out": {"b": {"force": 0.25}}}
    lines = [{"set": "salt", "setting": "soap", "seed": seed, "failed": "x"} for seed in (1,)]
    lines += [{"set": "salt", "setting": "soap", "seed": 2, "model": "dpa3", "steps": 3000, **test}]
    lines += [
        {"set": "salt", "setting": "adamw", "seed": 2, "model": "se_e2_a", "steps": 30000, **test}
    ]
    results.write_text("".join(json.dumps(line) + "\n" for line in lines))
    plan = ["--plan", '[[["salt"], ["soap"], [1, 2, 3]]]']
    for model, left in (("dpa3", [3]), ("se_e2_a", [2, 3])):
        words = [
            "--data",
            str(tmp_path),
            "--results",
            str(results),
            "--steps",
            "3000",
            "--model",
            model,
            *plan,
        ]
        assert runs.wanted(runs.arguments(words)) == [
            runs.Job("salt", "soap", seed, 3000) for seed in left
        ]
    monkeypatch.setattr(sys, "argv", ["rules_table.py", str(results)])
    rules_table.main()
    found = capsys.readouterr().out.splitlines()
    assert found[1] == "| test [eV/Å] | salt, dpa3 | salt, 30,000 steps |"
    assert found[3:5] == [
        "| soap | 0.5000 (0.5000 – 0.5000), ×1 | – |",
        "| adamw | – | 0.5000 (0.5000 – 0.5000), ×1 |",
    ]


def test_dynamics_of_a_set_without_a_condition_are_refused(tmp_path, capsys):
    words = ["--data", str(tmp_path), "--results", str(tmp_path / "r.jsonl"), "--picoseconds"]
    assert runs.arguments([*words, "salt=2"]).sets == list(runs.USUAL)
    with pytest.raises(SystemExit):
        runs.arguments([*words, "dft_water=2"])
    assert "dft_water" in capsys.readouterr().err
