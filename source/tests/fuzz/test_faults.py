"""A training whose disk fails at any system call loses nothing, and goes on as if nothing had happened."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

TOP = Path(__file__).parents[3]
SCRIPT = TOP / "source" / "tools" / "fuzz" / "faults.py"
# Calls that have failed before, or stand for many.
CHOSEN = r"(rename|close) run/(model\.ckpt\.pt|checkpoint|val\.log|best\.ckpt-9.*)$|write run/lcurve|unlink run/model"

pytestmark = pytest.mark.skipif(
    not (shutil.which("cc") or shutil.which("gcc")),
    reason="a C compiler makes the library whose calls fail",
)


def run_faults(*words: str) -> dict[str, list[int]]:
    """Let calls fail; return the number of calls, faults, runs that ended, states and failures of each kind."""
    environment = {**os.environ, "PYTHONPATH": str(TOP)}
    command = [sys.executable, str(SCRIPT), *words]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    summary = r"(\w+): (\d+) calls, (\d+) faults, (\d+) ended the run, (\d+) states restarted, (\d+) failures"
    found = {
        kind: [int(number) for number in numbers]
        for kind, *numbers in re.findall(summary, done.stdout)
    }
    assert done.returncode == 0, done.stdout + done.stderr
    return found


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["file", "best"])
def test_a_few_faults(kind):
    found = run_faults(kind, "--only", CHOSEN, "--every", "10")
    assert list(found) == [kind]
    calls, faults, ended, states, failures = found[kind]
    assert failures == 0
    assert calls > 200
    assert faults >= 3
    assert 0 < ended <= faults
    assert 0 < states <= faults


@pytest.mark.hours
@pytest.mark.timeout(14400)
@pytest.mark.parametrize("kind", ["file", "best"])
def test_every_call_with_every_fault(kind):
    calls, faults, *_, failures = run_faults("--each", kind)[kind]
    assert failures == 0
    assert faults == 6 * calls
