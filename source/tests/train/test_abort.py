"""A run that cannot go on ends with status 1 and one message: the step, the cause, what helps, the last checkpoint."""

from __future__ import annotations

import json
import logging
import threading
from pathlib import Path

import numpy as np
import pytest
import torch

from deepmd_muon.checkpoint_file.file import read_checkpoint
from deepmd_muon.cli.main import main
from deepmd_muon.data import DataError, DataLoader
from deepmd_muon.failures import failure_of
from deepmd_muon.files import WriteError
from deepmd_muon.train import RunError, start
from deepmd_muon.train.process.abort import Moment, explained
from deepmd_muon.train.step.step import TrainingStep

CUDA = "CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of 79.11 GiB of which 1.00 GiB is free."
CPU = "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate"


def failing(original, number, error, thread=""):
    """Return a method that raises an error in its call of this number, of calls by threads with this name."""
    calls = []

    def call(*args, **kwargs):
        calls.extend([args] * threading.current_thread().name.startswith(thread))
        if len(calls) == number:
            raise error
        return original(*args, **kwargs)

    return call


@pytest.fixture
def ends(small_input, monkeypatch, capfd):
    """A function that trains with a method replaced; returns what it says."""

    def start(owner, method, replaced, *options, **training):
        content = small_input(training={"numb_steps": 6, "save_freq": 2, **training})
        content["training"].pop("validation_data")
        Path("input.json").write_text(json.dumps(content))
        monkeypatch.setattr(owner, method, replaced)
        assert main(["train", "input.json", "-v", "WARNING", *options]) == 1
        said = capfd.readouterr().err
        assert "Traceback" not in said
        (message,) = [line for line in said.splitlines() if line.startswith("dp train: ")]
        return message

    return start


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (torch.OutOfMemoryError(CUDA), ("step 4", "GPU", "2.50 GiB", "batch_size")),
        (
            RuntimeError(f"{CPU} 8000 bytes. Error code 12 (Cannot allocate memory)"),
            ("step 4", "8000 bytes", "batch"),
        ),
        (MemoryError("std::bad_alloc"), ("step 4", "memory", "batch_size")),
    ],
    ids=["gpu", "cpu", "host"],
)
def test_no_memory_in_a_step(ends, error, words):
    message = ends(TrainingStep, "__call__", failing(TrainingStep.__call__, 4, error))
    assert all(word in message for word in (*words, "model.ckpt-2.pt"))


READING_FAILS = [
    *(ValueError("broken"), MemoryError(), DataError("water is broken")),
    RuntimeError("can't start new thread"),
]


@pytest.mark.parametrize("error", READING_FAILS, ids=lambda error: type(error).__name__)
def test_the_thread_that_reads_ahead_dies(ends, error):
    message = ends(DataLoader, "build", failing(DataLoader.build, 4, error, "deepmd_muon-data"))
    # The three steps before are not lost.
    assert all(word in message for word in ("step 4", "reading", "model.ckpt-3.pt"))
    assert read_checkpoint("model.ckpt.pt")["deepmd_muon"]["step"] == 3
    assert not str(error) or str(error) in message or failure_of(error) in message


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_no_memory_on_the_gpu_itself(ends, monkeypatch):
    monkeypatch.setenv("DEVICE", "cuda")
    original, calls = TrainingStep.__call__, []

    def large(self, *args):
        calls.append(args)
        return original(self, *args) if len(calls) < 4 else torch.empty(1 << 50, device="cuda")

    message = ends(TrainingStep, "__call__", large, capture="off")
    assert all(
        word in message
        for word in ("step 4", "the GPU has no memory left", "batch_size", "model.ckpt-2.pt")
    )


def test_what_hides_a_lack_of_memory_does_not_count(ends):
    try:
        try:
            raise torch.OutOfMemoryError(CUDA)
        finally:
            raise RuntimeError("capture_end called before capture_begin")
    except RuntimeError as caught:
        error = caught
    assert "2.50 GiB" in ends(TrainingStep, "__call__", failing(TrainingStep.__call__, 4, error))


def test_debugging_shows_the_traceback(small_input, monkeypatch):
    Path("input.json").write_text(json.dumps(small_input(training={"numb_steps": 1})))
    monkeypatch.setattr(TrainingStep, "__call__", failing(TrainingStep.__call__, 1, MemoryError()))
    with pytest.raises(RunError, match="no checkpoint has been written yet") as caught:
        main(["train", "input.json", "-v", "DEBUG"])
    assert isinstance(caught.value.__cause__, MemoryError)


def test_a_run_that_fails_before_its_first_step_names_the_checkpoint_it_continues(
    small_input, monkeypatch
):
    Path("input.json").write_text(json.dumps(small_input(training={"numb_steps": 2})))
    assert main(["train", "input.json"]) == 0

    def fail(*args):
        raise MemoryError

    monkeypatch.setattr(start, "make_loaders", fail)
    for restart in ("auto", "model.ckpt-2.pt"):
        with pytest.raises(RunError, match=r"the last good checkpoint is model\.ckpt(-2)?\.pt"):
            main(["train", "input.json", "--restart", restart, "-v", "DEBUG"])


def test_a_mistake_of_ours_keeps_its_traceback_and_names_the_checkpoint(caplog):
    def spoil():
        with explained(lambda: Moment("in its step", 7), lambda: Path("model.ckpt-5.pt")):
            raise KeyError("ours")

    with caplog.at_level(logging.ERROR, "deepmd_muon"), pytest.raises(KeyError):
        spoil()
    assert "model.ckpt-5.pt" in caplog.text
    assert "step 7" in caplog.text


def test_a_place_that_cannot_be_written_is_a_mistake_of_the_input(small_input, capfd):
    Path("file").write_text("")
    Path("input.json").write_text(json.dumps(small_input(training={"save_ckpt": "file/model"})))
    assert main(["train", "input.json", "-v", "ERROR"]) == 2
    assert "training/save_ckpt: cannot write checkpoints to file: " in capfd.readouterr().err


def test_failures_are_known_by_what_libraries_raise():
    def raised(act):
        with pytest.raises(Exception) as caught:  # noqa: PT011 (each library has its own)
            act()
        return caught.value

    assert "this machine has no memory" in failure_of(raised(lambda: np.empty(1 << 55)))
    assert "this machine has no memory" in failure_of(raised(lambda: torch.empty(1 << 58)))
    for known in ("out of memory", "an illegal memory access"):
        words = {"out of memory": "the GPU has no memory"}.get(known, "illegal memory access")
        assert words in failure_of(RuntimeError(f"CUDA error: {known}\nCompile with"))
    assert "free space" in failure_of(WriteError(28, "No space left on device", "a.pt"))
    for other in (ValueError("memory"), OSError(2, "No such file", "a"), KeyError("allocate")):
        assert failure_of(other) is None
