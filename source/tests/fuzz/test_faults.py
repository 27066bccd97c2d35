"""A training whose disk fails at any system call loses nothing, and goes on as if nothing had happened."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("faults.py")
# Calls that have failed before, or stand for many.
CHOSEN = {
    "file": r"rename run/(model\.ckpt\.pt|checkpoint)$|unlink run/model",
    "best": r"(rename|close) run/(val\.log|\.?best\.ckpt-9)|write run/lcurve",
}

pytestmark = pytest.mark.skipif(
    not (shutil.which("cc") or shutil.which("gcc")), reason="a C compiler makes the library whose calls fail"
)


def run_faults(*words: str) -> list[int]:
    """Let calls fail; return the number of calls, faults, runs that ended, states and failures."""
    environment = {**os.environ, "PYTHONPATH": str(SCRIPT.parents[3])}
    command = [sys.executable, str(SCRIPT), *words]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    summary = re.search(
        r"(\d+) calls, (\d+) faults, (\d+) ended the run, (\d+) states restarted, (\d+) failures", done.stdout
    )
    assert summary, done.stdout + done.stderr
    assert done.returncode == 0, done.stdout
    return [int(number) for number in summary.groups()]


@pytest.mark.parametrize("kind", CHOSEN)
def test_a_few_faults(kind):
    calls, faults, ended, states, failures = run_faults(kind, "--only", CHOSEN[kind], "--every", "4")
    assert failures == 0
    assert calls > 200
    assert faults >= 3
    assert 0 < ended <= faults
    assert 0 < states <= faults


@pytest.mark.slow
@pytest.mark.timeout(14400)
@pytest.mark.parametrize("kind", ["file", "dcp", "both", "best"])
def test_every_call_with_every_fault(kind):
    calls, faults, *_, failures = run_faults("--each", kind)
    assert failures == 0
    assert faults == 6 * calls
