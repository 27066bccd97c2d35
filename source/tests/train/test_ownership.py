"""One run writes a set of files at a time; a fresh run keeps what an earlier one wrote; changed physics is refused."""

from __future__ import annotations

import json
import logging
import os
import signal
import time
from pathlib import Path

import forked
import pytest

from deepmd_muon.argcheck import load, normalize
from deepmd_muon.checkpoint_file.errors import CheckpointError
from deepmd_muon.checkpoint_file.file import read_checkpoint
from deepmd_muon.cli.main import main
from deepmd_muon.train import TrainingError
from deepmd_muon.train.checkpoint.ownership import RunFiles


def hold(folder, ready):
    """Hold the files of an input until this process is killed."""
    os.chdir(folder)
    with RunFiles(load("input.json")).held():
        ready.put("held")
        signal.pause()


@pytest.fixture
def holder(small_input):
    """Start another process that holds the files of the small input."""
    Path("input.json").write_text(json.dumps(small_input()))
    ready = forked.context().SimpleQueue()
    process = forked.context().Process(target=hold, args=(str(Path.cwd()), ready))
    process.start()
    while ready.empty():
        assert process.is_alive()
        time.sleep(0.02)
    assert ready.get() == "held"
    yield process
    process.kill()
    process.join()


def test_a_second_run_ends_and_names_the_first_and_a_killed_one_holds_nothing(
    holder, small_input, train, capfd
):
    before = sorted(os.listdir())
    assert main(["train", "input.json"]) == 2
    message = capfd.readouterr().err
    assert f"process {holder.pid} on " in message
    assert "input.json" in message
    assert sorted(os.listdir()) == before
    others = {"save_ckpt": "other", "disp_file": "other.out"}
    for changed, file in [
        ({"disp_file": "other.out"}, "model.ckpt"),
        ({"save_ckpt": "other"}, "lcurve.out"),
        (others, "checkpoint"),
        ({"save_ckpt": "new/other"}, "lcurve.out"),
    ]:
        with pytest.raises(
            TrainingError, match=rf"{file} is being written by process {holder.pid}"
        ):
            train(small_input(training=changed))
    in_a_folder = {name: f"new/{path}" for name, path in others.items()}
    assert train(small_input(training={**in_a_folder, "numb_steps": 1})) == 0
    holder.kill()
    holder.join()
    assert train(small_input(training={"numb_steps": 1})) == 0
    assert not list(Path().glob(".*.lock"))


def test_locks_are_not_taken_through_links(small_input):
    Path("victim").write_text("precious")
    Path(".model.ckpt.lock").symlink_to("victim")
    Path("input.json").write_text(json.dumps(small_input()))
    with pytest.raises(TrainingError, match="save_ckpt"), RunFiles(load("input.json")).held():
        pass
    assert Path("victim").read_text() == "precious"


def test_a_fresh_run_keeps_the_files_of_an_earlier_one(small_input, train):
    content = small_input(training={"max_ckpt_keep": 1, "numb_steps": 5})
    for run in range(3):
        content["training"]["seed"] = run
        train(content)
    names = sorted(
        path.name
        for path in Path().iterdir()
        if path.name.startswith(("model", "lcurve", "checkpoint"))
    )
    numbered = [f"model.ckpt{number}" for number in ("", ".1", ".2")]
    expected = [f"{name}{end}" for name in numbered for end in ("-5.pt", ".pt")]
    assert names == sorted([*expected, "checkpoint", "lcurve.out", "lcurve.out.1", "lcurve.out.2"])
    seeds = [
        json.loads(read_checkpoint(name)["deepmd_muon"]["settings"])["training"]["seed"]
        for name in numbered
    ]
    assert seeds == [2, 0, 1]
    # A kept checkpoint continues as another run: the files of the last one are not its own.
    content["training"].update(numb_steps=6, save_ckpt="model.ckpt", seed=1)
    train(content, restart="model.ckpt.2-5.pt")
    assert Path("model.ckpt-5.pt").exists()
    assert Path("model.ckpt.2-5.pt").exists()


@pytest.mark.parametrize("prefix", ["model", "model.ckpt", "model[300K]"])
def test_what_a_killed_run_left_is_removed(small_input, prefix):
    token = "0123456789abcdef"
    own = [f".{prefix}-7.{token}.pt", f".{prefix}.{token}.pt"]
    others = [
        f".{prefix}-2-7.{token}.pt",
        f".{prefix}2-7.{token}.pt",
        f".modelxckpt-7.{token}.pt",
        f".{prefix}-7.pt",
        f".{prefix}-7.x.pt",
        f"{prefix}-7.pt",
    ]
    for name in (*own, *others):
        Path(name).write_text("half")
    with RunFiles(normalize(small_input(training={"save_ckpt": prefix}))).held():
        pass
    assert sorted(os.listdir()) == sorted(others)


@pytest.mark.parametrize(
    ("way", "changed", "listed"),
    [
        ("restart", {"descriptor": {"rcut": 4.0}}, ["model/descriptor/rcut was 4.5, is 4.0"]),
        (
            "init_model",
            {name: {"activation_function": "relu"} for name in ("descriptor", "fitting_net")},
            [
                "model/descriptor/activation_function was 'tanh'",
                "model/fitting_net/activation_function was 'tanh', is 'relu'",
            ],
        ),
    ],
)
def test_a_changed_model_is_an_error_that_lists_the_settings(
    small_input, train, caplog, way, changed, listed
):
    train(small_input(training={"numb_steps": 1}))
    content = small_input(training={"numb_steps": 2})
    for section, values in changed.items():
        content["model"][section] = {**content["model"][section], **values}
    with pytest.raises(CheckpointError) as error:
        train(content, **{way: "model.ckpt-1.pt"})
    assert all(line in str(error.value) for line in listed)
    assert "--force-load" in str(error.value)
    caplog.clear()
    assert train(content, **{way: "model.ckpt-1.pt"}, force_load=True) == 0
    assert all(f"--force-load: {line}" in caplog.text for line in listed)


def test_seeds_statistics_and_what_is_trained_may_change(small_input, train):
    train(small_input(training={"numb_steps": 1}))
    content = small_input(training={"numb_steps": 2})
    content["model"] |= {"data_stat_nbatch": 3}
    content["model"]["fitting_net"] |= {"seed": 7, "precision": "float64", "rcond": 1e-6}
    assert train(content, restart="model.ckpt-1.pt") == 0


def test_changed_training_is_a_warning_that_lists_it(small_input, train, caplog):
    train(small_input(training={"numb_steps": 5}))
    content = small_input(loss={"start_pref_f": 7.0}, training={"numb_steps": 6, "disp_freq": 1})
    content["learning_rate"] = {"type": "exp", "start_lr": 1e-2, "stop_lr": 1e-5}
    caplog.clear()
    with caplog.at_level(logging.WARNING, "deepmd_muon"):
        train(content, restart="model.ckpt-5.pt")
    assert "loss/start_pref_f was 1000.0, is 7.0" in caplog.text
    assert "learning_rate/start_lr was 0.001, is 0.01" in caplog.text
    assert "training/numb_steps was 5, is 6" in caplog.text
    assert (
        "the learning rate was 2.51e-05 when model.ckpt-5.pt was written and goes on from"
        in caplog.text
    )
    assert "disp_freq" not in caplog.text


@pytest.mark.parametrize(
    ("reports", "validating", "message"),
    [
        (
            {},
            {"full_val_file": "other.log", "save_best_dir": "."},
            r"save_best_dir: best\.ckpt .*other\.json",
        ),
        ({}, {"save_best": False}, r"full_val_file: val\.log .*other\.json"),
        ({"jsonl_file": "log.jsonl"}, {}, r"jsonl_file: log\.jsonl .*other\.json"),
    ],
    ids=["best", "validations", "json lines"],
)
def test_runs_with_other_names_share_no_file(small_input, train, reports, validating, message):
    content = small_input(training={"numb_steps": 1, **reports})
    content |= {"validating": {"full_validation": True, "full_val_start": 0}}
    elsewhere = {"save_ckpt": "other/model", "disp_file": "other.out", **reports}
    other = small_input(training=elsewhere) | {
        "validating": {"full_validation": bool(validating), **validating}
    }
    with (
        RunFiles(normalize(other, "other.json")).held(),
        pytest.raises(TrainingError, match=message),
    ):
        train(content)
    assert train(content) == 0
    assert not list(Path().glob(".*.lock"))
