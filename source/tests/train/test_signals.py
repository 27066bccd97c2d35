"""SIGINT and SIGTERM: no checkpoint is lost that is being written, whenever and however often they come."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from deepmd_muon.checkpoint_file.file import read_checkpoint
from deepmd_muon.train.process.signals import StopSignals

# Trains once for every input. A save stops before its first byte, and goes on when a line comes from outside.
CHILD = """
import select
import signal
import sys
import torch
from deepmd_muon.cli.main import main

# A shell that starts the tests in the background lets them ignore SIGINT.
signal.signal(signal.SIGINT, signal.default_int_handler)
save = torch.save

def paused(*args, **kwargs):
    global waiting
    if waiting:
        waiting = False
        print("writing", flush=True)
        # Without the timeout, the handler of a signal that comes just before the call that waits
        # would not run before a line comes.
        while not select.select([sys.stdin], [], [], 0.05)[0]:
            pass
        sys.stdin.readline()
    return save(*args, **kwargs)

torch.save = paused
for path in sys.argv[1:]:
    waiting = True
    status = main(["train", path, "-v", "WARNING"])
    print(status, flush=True)
sys.exit(status)
"""
# Whether the save is the last one, and what comes during it.
CASES = [
    (False, ("SIGTERM",)),
    (False, ("SIGINT", "SIGINT", "SIGTERM")),
    (True, ("SIGINT",)),
    (True, ("SIGTERM", "SIGTERM")),
]


def test_a_checkpoint_that_is_being_written_outlives_signals(small_input):
    for number, (final, _) in enumerate(CASES):
        steps = {"numb_steps": 2, "save_freq": 100} if final else {"numb_steps": 4, "save_freq": 2}
        names = {
            "save_ckpt": f"{number}/model",
            "disp_file": f"{number}/lcurve.out",
        }
        Path(f"{number}.json").write_text(json.dumps(small_input(training={**steps, **names})))
    words = [
        sys.executable,
        "-c",
        CHILD,
        *(f"{number}.json" for number in range(len(CASES))),
    ]
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    with subprocess.Popen(
        words, **pipes, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}
    ) as child:
        for number, (_, names) in enumerate(CASES):
            assert child.stdout.readline() == "writing\n"
            for name in names:
                child.send_signal(signal.Signals[name])
                while f"{name}: " not in child.stderr.readline():  # the child has seen it
                    assert child.poll() is None
            print(file=child.stdin, flush=True)
            expected = 128 + signal.Signals[names[0]]
            assert child.stdout.readline() == f"{expected}\n"
            check_saved(Path(str(number)))
        child.communicate()
    assert child.returncode == expected


def check_saved(folder):
    """Look for a whole checkpoint of step 2, and for nothing half written."""
    saved = [path for path in folder.iterdir() if not path.is_symlink() and "-2." in path.name]
    assert "model-2.pt" in {path.name for path in saved}
    assert {read_checkpoint(path)["deepmd_muon"]["step"] for path in saved} == {2}
    assert read_checkpoint(folder / "model")["deepmd_muon"]["step"] >= 2
    assert not [path for path in folder.iterdir() if path.name.startswith(".")]


@pytest.fixture
def usual_handlers():
    """Python's own handlers: a shell that starts the tests in the background lets them ignore SIGINT."""
    usual = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}
    before = {number: signal.signal(number, handler) for number, handler in usual.items()}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("usual_handlers")
def test_outside_of_a_save_a_further_signal_ends_the_process():
    def writing():
        return busy

    for repeats in (0, 1):
        busy, requested = True, []
        with StopSignals(requested.append, writing, repeats) as signals:
            for _ in range(3):
                signal.raise_signal(signal.SIGINT)
            busy = False
            for _ in range(repeats):
                signal.raise_signal(signal.SIGINT)
            with pytest.raises(KeyboardInterrupt):
                signal.raise_signal(signal.SIGINT)
        assert requested == [signal.SIGINT]
        assert signals.number == signal.SIGINT
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
