"""A short soak: memory, handles and files of a training with restarts stay, and a restart gives the same bits."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

TOP = Path(__file__).parents[3]
SCRIPT = TOP / "source" / "tools" / "fuzz" / "soak.py"


@pytest.mark.slow
def test_a_short_soak():
    command = [sys.executable, str(SCRIPT), "--steps", "600", "--lives", "3"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(TOP)}
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "all well" in done.stdout
