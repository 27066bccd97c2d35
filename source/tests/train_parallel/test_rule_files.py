"""Checkpoints of an earlier revision, with and without Magma, continue; those of later rules restart.

Revision 8046313 wrote them (torch 2.13, one thread, 2026-11-23), in which Magma was not yet a rule
of its own. The runs of two ranks wrote directories at half of their steps, which are no longer read;
these were taken out of the archive.
"""

from __future__ import annotations

import os
import tarfile
from pathlib import Path

import pytest
import torch
from compared import tensors
from test_train_parallel import content as common
from train_ranks import Job, run_jobs

from deepmd_muon.checkpoint_file.file import read_checkpoint

ARCHIVE = Path(__file__).parent / "rule_files.tar.xz"
HALF, STEPS = 3, 6
# What each run adds to the input; the last two take two ranks.
RUNS: dict[str, tuple[int, dict[str, object], dict[str, object]]] = {
    "magma": (1, {}, {"enable_ema": True, "ema_decay": 0.9}),
    "no_magma": (1, {"magma_muon": False}, {}),
    "offload": (1, {"offload": True}, {}),
    "zero_1": (2, {}, {"zero_stage": 1}),
    "zero_2": (2, {}, {"zero_stage": 2}),
}
# On another machine than that of the archive, sums may round otherwise.
TOLERANCE = 0.0 if os.environ.get("RULE_FILES_BITWISE") else 1e-12


def content(name: str, steps: int = STEPS) -> dict[str, object]:
    """Return the input of a run; its data are the folder `train` beside the folder of the run."""
    world, optimizer, training = RUNS[name]
    given = common(ARCHIVE.parent, world)
    training_data = {
        **given["training"]["training_data"],
        "systems": ["../train"],
        "batch_size": 2 // world,
    }
    kept = {key: given["training"][key] for key in ("numb_steps", "seed", "disp_freq", "save_freq")}
    given["optimizer"] |= optimizer
    given["training"] = {**kept, **training, "training_data": training_data, "numb_steps": steps}
    return given


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    found = tmp_path_factory.mktemp("earlier")
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(found)  # a file of this repository; `filter` needs Python 3.11.4
    return found


def optimizer_state(path):
    """Return state tensors by parameter name and key."""
    optimizer = read_checkpoint(path)["optimizer"]
    names = {
        key: name
        for group in optimizer["param_groups"]
        for key, name in zip(group["params"], group["param_names"], strict=True)
    }
    return {
        (names[key], kind): x
        for key, values in optimizer["state"].items()
        for kind, x in values.items()
        if kind not in ("beta1_pow", "beta2_pow")  # for deepmd-kit's class alone
    }


@pytest.mark.parametrize("world", [1, 2])
def test_earlier_checkpoints_load_bitwise_and_go_on(place, world):
    """The archive has the last checkpoint of every run, and one of half of the steps if it had one rank."""
    names = [name for name, (ranks, *_) in RUNS.items() if ranks == world]
    again, further = {}, {}
    for name in names:
        path = place / name / f"model.ckpt-{HALF if world == 1 else STEPS}.pt"
        steps = int(path.stem.rpartition("-")[2])
        again[name] = Job(place / f"{name}_again", content(name, steps), {"restart": str(path)})
        if world == 1:
            further[name] = Job(place / f"{name}_further", content(name), {"restart": str(path)})
    jobs = [*again.values(), *further.values()]
    assert run_jobs(world, jobs) == [["0"] * world] * len(jobs)
    for name, job in again.items():
        path = Path(job.options["restart"])
        loaded, saved = optimizer_state(job.folder / path.name), optimizer_state(path)
        assert loaded.keys() == saved.keys()
        assert all(
            torch.equal(loaded[key], x) and loaded[key].dtype == x.dtype for key, x in saved.items()
        ), name
        assert any(kind == "magma_score" for _, kind in saved) == (name != "no_magma")
    for name, job in further.items():
        last, then = (
            read_checkpoint(folder / f"model.ckpt-{STEPS}.pt")
            for folder in (job.folder, place / name)
        )
        for part in ("model", "ema", "optimizer"):
            if part in then:
                found, expected = tensors(last[part]), tensors(then[part])
                assert found.keys() == expected.keys()
                for key, x in expected.items():
                    torch.testing.assert_close(
                        found[key], x, rtol=TOLERANCE, atol=TOLERANCE, msg=f"{name}: {key}"
                    )


@pytest.mark.slow
def test_runs_with_later_rules_restart_on_other_ranks(place):
    """Two ranks at stages 1 and 2 equal one process; their files load bitwise on one and on two."""
    chosen = {"normuon": True, "cautious_decay": True}  # neurons are columns under `dp train`
    jobs = {
        name: Job(place / f"{name}_rules", content(name)) for name in ("magma", "zero_1", "zero_2")
    }
    for job in jobs.values():
        job.content["optimizer"] |= chosen
    assert run_jobs(1, [jobs["magma"]]) == [["0"]]
    assert run_jobs(2, [jobs["zero_1"], jobs["zero_2"]]) == [["0", "0"]] * 2
    expected = optimizer_state(jobs["magma"].folder / f"model.ckpt-{STEPS}.pt")
    assert sum(kind == "second_moment_of_columns" for _, kind in expected) == 3
    for name in ("zero_1", "zero_2"):
        found = optimizer_state(jobs[name].folder / f"model.ckpt-{STEPS}.pt")
        for key, x in expected.items():
            torch.testing.assert_close(found[key], x, rtol=1e-7, atol=1e-9, msg=f"{name}: {key}")
    moves = []
    for name, world in (("zero_1", 1), ("zero_2", 1), ("magma", 2), ("zero_1", 2)):
        path = jobs[name].folder / f"model.ckpt-{HALF}.pt"
        given = content("zero_2", HALF) if world == 2 else content("magma", HALF)
        given["optimizer"] |= chosen
        given["training"] = {
            key: x for key, x in given["training"].items() if not key.startswith("e")
        }  # no average
        moves.append(
            (world, path, Job(place / f"{name}_rules_on_{world}", given, {"restart": str(path)}))
        )
    for world in (1, 2):
        some = [job for ranks, _, job in moves if ranks == world]
        assert run_jobs(world, some) == [["0"] * world] * len(some)
    for _, path, job in moves:
        loaded, saved = optimizer_state(job.folder / f"model.ckpt-{HALF}.pt"), optimizer_state(path)
        assert loaded.keys() == saved.keys()
        assert all(torch.equal(loaded[key], x) for key, x in saved.items())
