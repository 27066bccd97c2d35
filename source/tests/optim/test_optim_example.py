"""The example outside chemistry runs as its README says."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

EXAMPLE = Path(__file__).parents[3] / "examples" / "bring_your_own_model" / "train.py"


def test_the_example_trains():
    done = subprocess.run([sys.executable, EXAMPLE, "--steps", "60"], capture_output=True, text=True, check=True)
    losses = [float(value) for value in re.findall(r"excess loss ([\d.]+)$", done.stdout, re.MULTILINE)]
    assert len(losses) == 10
    assert losses[-1] < 0.85 * losses[0]
    assert "blocks.0.qkv.weight    192x64  1x192x64 rows 64+64+64  muon" in done.stdout
