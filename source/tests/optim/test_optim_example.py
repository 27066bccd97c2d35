"""The example outside chemistry runs as its README says."""

from __future__ import annotations

import re
from pathlib import Path

from forked import run_script

EXAMPLE = Path(__file__).parents[3] / "examples" / "bring_your_own_model" / "train.py"


def test_the_example_trains(tmp_path):
    done = run_script(EXAMPLE, "--steps", "60", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    losses = [
        float(value) for value in re.findall(r"excess loss ([\d.]+)$", done.stdout, re.MULTILINE)
    ]
    assert len(losses) == 10
    assert losses[-1] < 0.85 * losses[0]
    assert "blocks.0.qkv.weight    192x64  1x192x64 rows 64+64+64  muon" in done.stdout
