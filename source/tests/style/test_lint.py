"""The whole repository passes its linter, its formatter and its type checker."""

import os
import re
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

TOP = Path(__file__).parents[3]
# Standard modules without a name that a newer Python has: "Module "contextlib" has no attribute "chdir"".
MISSING = re.compile(r'error: Module( "[\w.]+")? has no attribute')


def oldest_python():
    """Return the lowest Python that the package allows, such as 3.10."""
    return re.search(r'requires-python = ">=([\d.]+)"', (TOP / "pyproject.toml").read_text())[1]


def scripts():
    """Return the Python files outside the package."""
    return [
        path for folder in ("source", "examples", "doc") for path in (TOP / folder).rglob("*.py")
    ]


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


@pytest.mark.slow
def test_types_fit():
    if find_spec("mypy") is None:
        pytest.skip("mypy is not installed; pip install -c constraints.txt '.[test]' brings it")
    # Writing a cache takes a tenth of the time, and a fresh checkout never reads it.
    cache = [] if (TOP / ".mypy_cache").is_dir() else ["--cache-dir", os.devnull]
    check(sys.executable, "-m", "mypy", *cache)


@pytest.mark.slow
def test_scripts_use_names_that_the_oldest_python_has():
    """Of the files outside the package, whose types are not checked; ruff checks their syntax alone."""
    if find_spec("mypy") is None:
        pytest.skip("mypy is not installed; pip install -c constraints.txt '.[test]' brings it")
    files = [str(path) for path in scripts()]
    options = [
        "--python-version",
        oldest_python(),
        "--ignore-missing-imports",
        "--follow-imports=skip",
    ]
    # Names of modules repeat (make_data.py of each example), so that the path becomes part of them.
    options += ["--explicit-package-bases", "--config-file", os.devnull, "--cache-dir", os.devnull]
    command = [sys.executable, "-m", "mypy", *options, *files]
    done = subprocess.run(command, cwd=TOP, capture_output=True, text=True)
    lines = done.stdout.splitlines()
    assert f"{len(files)} source files" in lines[-1], done.stdout + done.stderr
    assert not [line for line in lines if MISSING.search(line)]


def test_tools_check_for_the_oldest_python():
    settings = (TOP / "pyproject.toml").read_text()
    assert f'target-version = "py{oldest_python().replace(".", "")}"' in settings
    assert f'python_version = "{oldest_python()}"' in settings
