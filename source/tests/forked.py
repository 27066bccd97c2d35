"""Processes forked from one that has imported torch and this package, which takes every new Python seconds.

All tests that start ranks or scripts share that process: it imports their modules once.
"""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path
from typing import NamedTuple

import torch.multiprocessing as mp

# DTensor's first operation imports torch._dynamo.
PRELOADED = [
    *(
        "pytest",
        "numpy.random",
        "torch._dynamo",
        "torch.distributed.fsdp",
        "torch.distributed.checkpoint.state_dict",
    ),
    *("torch.testing._internal.distributed.fake_pg", "deepmd_muon.optim.hybrid_muon"),
    *(
        "deepmd_muon.optim.sharded.step",
        "deepmd_muon.train.start",
    ),
    *(
        "deepmd_muon.train.strategy.replicated",
        "deepmd_muon.train.strategy.fully_sharded",
        "deepmd_muon.optim.build",
    ),
    *(
        "deepmd_muon.model.descriptor.se_e2_a.deepmd_kit",
        "deepmd_muon.model.fitting.ener.deepmd_kit",
    ),
    *("deepmd_muon.model.descriptor.se_e2_a.interpolation", "numpy.ma", "numpy.ctypeslib", "vesin"),
]


class Finished(NamedTuple):
    """How a script ended, and what it printed."""

    returncode: int
    stdout: str
    stderr: str


def context():
    """Return the context of multiprocessing whose processes are forked from the one with the imports."""
    found = mp.get_context("forkserver")
    found.set_forkserver_preload(PRELOADED)
    return found


def run_scripts(commands, folder):
    """Run scripts beside each other in a folder, each as `(words, variables)`; return how they finished."""
    started = []
    for number, (words, variables) in enumerate(commands):
        streams = [Path(folder) / f".{name}{number}" for name in ("stdout", "stderr")]
        given = (
            [str(word) for word in words],
            str(folder),
            {**os.environ, **variables},
            list(map(str, streams)),
        )
        process = context().Process(target=_run, args=given)
        process.start()
        started.append((process, streams))
    for process, _ in started:
        process.join()
    finished = [
        Finished(process.exitcode, *(path.read_text() for path in streams))
        for process, streams in started
    ]
    for _, streams in started:
        for path in streams:
            path.unlink()
    return finished


def run_script(*words, folder, **variables):
    """Run one script in a folder with some variables of the environment; return how it finished."""
    (finished,) = run_scripts([(words, variables)], folder)
    return finished


def _run(words, folder, environment, streams):
    """Become `python WORDS`."""
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    for number, path in enumerate(streams, 1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), number)
    sys.argv = words
    sys.path.insert(0, str(Path(words[0]).resolve().parent))
    runpy.run_path(words[0], run_name="__main__")
