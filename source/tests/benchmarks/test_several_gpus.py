"""The script for several GPUs, tried on two processes with small networks, and its figures by hand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

TOP = Path(__file__).parents[3]
SMALL = {
    "descriptor": {
        "type": "se_e2_a",
        "sel": [40, 80],
        "rcut": 3.0,
        "rcut_smth": 0.5,
        "neuron": [4, 8],
        "axis_neuron": 2,
        "seed": 1,
    },
    "fitting_net": {"neuron": [8, 8], "seed": 1},
}


@pytest.fixture
def scripts(monkeypatch):
    monkeypatch.syspath_prepend(TOP / "source" / "benchmarks")
    monkeypatch.setenv("DEVICE", "cpu")


@pytest.mark.slow
def test_every_part_runs_on_two_processes(scripts, monkeypatch, tmp_path):
    import runs
    import several_gpus
    import training_step

    monkeypatch.setitem(training_step.MODELS, "se_e2_a", SMALL)
    monkeypatch.setattr(several_gpus, "ATOMS", 24)
    monkeypatch.setattr(runs, "LIMIT", 600.0)
    monkeypatch.setattr(several_gpus, "LIMITS", {})
    monkeypatch.setattr(several_gpus, "OTHER_LIMIT", 900.0)
    out = tmp_path / "out.json"
    parts = ["training", "weights", "restarts", "killed", "optimizer"]
    options = ["--gpus", "1", "2", "--scale", "0.02", "--cases", "se_e2_a:f64-b1"]
    options += ["--sets", "se_e2_a", "moe2x32x4", "--most", "1800", "--out", str(out)]
    several_gpus.main([*options, "--parts", *parts])
    results = {entry["what"]: entry for entry in json.loads(out.read_text())["results"]}
    assert not [entry for entry in results.values() if "failed" in entry]

    timed = results["training se_e2_a:f64-b1"]
    step = timed["2 GPUs, stage 1"]
    assert step["ratio"] == pytest.approx(step["ms"] / max(timed["1 GPU, ms"]), abs=1e-3)
    assert step["atoms/s and GPU"] == pytest.approx(24 / step["ms"] * 1e3, abs=1)

    weights = results["weights"]
    assert weights["as trained"]["N against 1"]["relative"] < 1e-10
    assert weights["deterministic"]["1 against itself"]["absolute"] == 0.0
    assert weights["restart"]["and back, at the end"]["absolute"] == 0.0
    ways = {**results["restarts"], "middle": weights["restart"]["N to 1 at step 1"]}
    assert {way for way in ways if " to " in way} == {"2 to 1", "2 to 1 to 2"}
    for way in ("2 to 1", "2 to 1 to 2", "middle"):
        assert ways[way]["differ"] == []
        assert ways[way]["tensors"] > 50

    killed = results["killed"]
    assert killed["others ended"] == [True]
    assert killed["named the rank"] == [True]
    assert max(killed["after [s]"]) < 60.0
    times = results["optimizer fsdp se_e2_a"]["results"]
    assert {entry["optimizer"] for entry in times} >= {"AdamW, fused", "HybridMuon"}
    assert all(entry["disagreement"] < 1e-5 for entry in times)


def test_only_exchanges_that_nothing_covers_are_exposed(scripts):
    from overlap import Kernel, covered, exposed

    kernels = [
        Kernel(0.0, 4.0, "gemm"),
        Kernel(3.0, 9.0, "ncclDevKernel_AllReduce"),
        Kernel(6.0, 7.0, "small"),
        Kernel(8.0, 12.0, "ncclDevKernel_AllGather"),
    ]
    assert covered(kernels) == 12.0
    assert exposed(kernels) == 2.0 + 5.0  # 4 to 6, 7 to 12


@pytest.mark.slow
def test_a_team_runs_programs_in_turn_and_names_a_failure(scripts, tmp_path):
    from runs import Job, RunError, Team

    script = tmp_path / "program.py"
    script.write_text(
        "import os, sys\nprint(os.getpid())\nif len(sys.argv) > 1: sys.exit(sys.argv[1])\n"
    )
    with Team([0, 1]) as team:
        first = Job(tmp_path / "first", (str(script),))
        second = Job(tmp_path / "second", (str(script),))
        team.run(first, 300.0)
        team.run(second, 300.0)
        assert [first.log(rank) for rank in (0, 1)] == [second.log(rank) for rank in (0, 1)]
        assert first.log(0) != first.log(1)
        with pytest.raises(RunError, match="out of luck"):
            team.run(Job(tmp_path / "third", (str(script), "out of luck")), 300.0)
        assert team.processes == []


def test_tables_show_ratios_goals_and_what_did_not_run(scripts, tmp_path):
    from show_several_gpus import optimizer_table, training_table

    step = {"ms": 0.84, "ratio": 1.2, "atoms/s and GPU": 228571}
    timed = {"1 GPU, ms": [0.69, 0.7], "1 GPU, atoms/s": 276258, "4 GPUs, stage 0": step}
    hybrid = {"optimizer": "HybridMuon", "gpu_ms": 1.25, "exposed_ms": 0.5, "disagreement": 2e-6}
    results = [
        {"what": "training se_e2_a:f64-b1", **timed},
        {"what": "training dpa3:f32-b1", "failed": "not begun in time"},
        {"what": "waiting se_e2_a:f64-b1 stage 0", "share": 0.125},
        {"what": "optimizer fsdp dpa3", "results": [hybrid]},
    ]
    (row,) = training_table({"results": results}).splitlines()[2:]
    assert row == (
        "| se_e2_a float64, batch 1 | 0 | 0.69–0.7 | 0.84 (1.20) | 1.15 | 276,258 / 228,571 | 12.5% |"
    )
    (row,) = optimizer_table({"results": results}).splitlines()[2:]
    assert row == "| dpa3 | FSDP2 | – | – | 1.25 | – | 0.5 | – | 2e-06 | – | – |"


def test_pages_show_what_was_measured(scripts):
    from show_several_gpus import optimizer_table, read, training_table

    folder = TOP / "doc" / "benchmarks"
    calls = ("h100x4", "h200x4", "h200x2", "optimizer_h200x4")

    def read_calls(*calls):
        return read([folder / "raw" / f"several_gpus_{call}_2026-11-28.json" for call in calls])

    content = read_calls(*calls)
    page = (folder / "several_gpus.md").read_text(encoding="utf-8")
    assert training_table(content) in page
    assert training_table(read_calls("h200x4_second")) in page
    assert optimizer_table(content) in (folder / "sharded_step.md").read_text(encoding="utf-8")


def test_batches_of_a_case_have_the_same_frames(scripts, tmp_path):
    from data_sets import water
    from runs import RunError
    from several_gpus import filled

    systems = [water(tmp_path / str(frames), 24, frames) for frames in (80, 64)]
    assert filled(systems, 8) == systems
    assert filled(systems, 32) == systems[1:]
    with pytest.raises(RunError, match="30 frames"):
        filled(systems, 30)
