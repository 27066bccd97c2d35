"""Backends that run the cases of kernels: Triton's interpreter, in a process of its own, and a GPU."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from deepmd_muon.model.nn import triton_support

INTERPRETING = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cpu" if INTERPRETING else "cuda")


def on_each_backend(test):
    """Run a test in the interpreter's process, and on a GPU with `pytest -m gpu`.

    Plain pytest leaves it out. One test in the interpreter: doc/change-a-descriptor.md, "Inside the
    kernels".
    """
    if INTERPRETING:
        return test
    return pytest.mark.gpu(
        pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no GPU")(test)
    )


@contextlib.contextmanager
def without_kernels():
    """Compute with torch's operations, which define the results of kernels; also as a decorator."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(triton_support, "usable", lambda device: False)
        yield


def in_interpreter_alone(test):
    """Run a test in the interpreter's process only."""
    return pytest.mark.skipif(not INTERPRETING, reason="runs in the interpreter's process")(test)


def passed_in_interpreter(*files: Path, tier: str = "not slow") -> int:
    """Return how many tests of some files passed there; fail with their output if one did not.

    Triton reads TRITON_INTERPRET when a kernel is defined, so the cases run in a process of their own.
    """
    if INTERPRETING:
        pytest.skip("this is the interpreter's own process")
    pytest.importorskip("triton", reason="Triton is not installed (pip install deepmd-muon[gpu])")
    paths = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [
            *(
                sys.executable,
                "-m",
                "pytest",
                "-o",
                "addopts=",
                "-p",
                "interpreted",
                "-p",
                "no:cacheprovider",
            ),
            *("-m", tier, *map(str, files)),
        ],
        env={
            **os.environ,
            "TRITON_INTERPRET": "1",
            "CUDA_VISIBLE_DEVICES": "",
            "PYTHONPATH": paths,
        },
        cwd=files[0].parent,
        capture_output=True,
        text=True,
        check=False,
    )
    passed = re.search(r"(\d+) passed", done.stdout)
    assert done.returncode == 0, done.stdout[-6000:]
    assert passed is not None, done.stdout[-6000:]
    return int(passed[1])
