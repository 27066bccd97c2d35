"""The whole repository passes its linter, its formatter and its type checker."""

import os
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

TOP = Path(__file__).parents[3]


def tool(name):
    """Return the command of a tool of this environment; skip without it."""
    beside = Path(sys.executable).with_name(name)
    command = str(beside) if beside.exists() else shutil.which(name)
    if command is None:
        pytest.skip(f"{name} is not installed; pip install -c constraints.txt '.[test]' brings it")
    return command


def check(*command):
    done = subprocess.run(command, cwd=TOP, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_ruff_finds_nothing():
    check(tool("ruff"), "check", "--no-cache", ".")


def test_every_file_is_formatted():
    check(tool("ruff"), "format", "--no-cache", "--check", ".")


def test_words_are_spelled_right():
    check(tool("codespell"))


def test_types_fit():
    if find_spec("mypy") is None:
        pytest.skip("mypy is not installed; pip install -c constraints.txt '.[test]' brings it")
    # Writing a cache takes a tenth of the time, and a fresh checkout never reads it.
    cache = [] if (TOP / ".mypy_cache").is_dir() else ["--cache-dir", os.devnull]
    check(sys.executable, "-m", "mypy", *cache)
