"""deepmd-kit 3.2.0 in an environment of its own, with which `pytest -m deepmd_kit` compares.

DEEPMD_KIT_DP names its `dp`, DEEPMD_KIT_PYTHON its python.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

NAMES = ("DEEPMD_KIT_DP", "DEEPMD_KIT_PYTHON")
MARKS = [
    pytest.mark.deepmd_kit,
    pytest.mark.skipif(
        not {*NAMES} <= os.environ.keys(), reason=f"{' and '.join(NAMES)} name no deepmd-kit"
    ),
]


def needs_deepmd_kit(test):
    """Give one test these marks."""
    for mark in MARKS:
        test = mark(test)
    return test


def dp(*words: object, folder: Path | str | None = None) -> str:
    """Run a command of deepmd-kit's `dp --pt` and return what it says."""
    return _run(os.environ["DEEPMD_KIT_DP"], "--pt", *words, folder=folder)


def python(*words: object, folder: Path | str | None = None, given: str | None = None) -> str:
    """Run deepmd-kit's Python with some text as its input, and return what it says."""
    return _run(os.environ["DEEPMD_KIT_PYTHON"], *words, folder=folder, given=given)


def has_operators() -> bool:
    """Say whether deepmd-kit's operators, which exchange features of ghosts, are built for its torch."""
    code = "from deepmd.pt.cxx_op import ENABLE_CUSTOMIZED_OP as built; raise SystemExit(not built)"
    return not subprocess.run(
        [os.environ["DEEPMD_KIT_PYTHON"], "-c", code], env=_environment(), check=False
    ).returncode


def _environment() -> dict[str, str]:
    """Return ours without the places of our own modules, with one thread."""
    return {key: value for key, value in os.environ.items() if key != "PYTHONPATH"} | {
        "OMP_NUM_THREADS": "1"
    }


def _run(*words: object, folder: Path | str | None, given: str | None = None) -> str:
    command = [str(word) for word in words]
    done = subprocess.run(
        command,
        cwd=folder,
        env=_environment(),
        input=given,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr
