"""The same figures as deepmd-kit: run with `DEEPMD_KIT_DP=/path/to/dp pytest -m deepmd_kit`."""

from __future__ import annotations

import os
import re
import subprocess

import pytest
from write_systems import make_arrays, write_hdf5, write_npy

from deepmd_muon.data import neighbor_statistics, open_systems

DP = os.environ.get("DEEPMD_KIT_DP")


@pytest.mark.deepmd_kit
@pytest.mark.skipif(DP is None, reason="DEEPMD_KIT_DP does not name deepmd-kit's dp")
@pytest.mark.parametrize("kind", ["npy", "hdf5"])
def test_neighbor_statistics_agree(tmp_path, kind):
    """Sheared cells of 6 Å under a cutoff of 7 Å, so that atoms see their own images."""
    sets = [make_arrays(3, 8, seed=1), make_arrays(2, 8, seed=2)]
    for arrays in sets:
        arrays["box"][:, 3] += 2.5
    if kind == "npy":
        path = write_npy(tmp_path / "s", [0, 1] * 4, sets)
    else:
        path = write_hdf5(tmp_path / "d.hdf5", "s", [0, 1] * 4, sets)
    command = [DP, "--pt", "neighbor-stat", "-s", path, "-r", "7.0", "-t", "A", "B"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    text = done.stdout + done.stderr
    ours = neighbor_statistics(open_systems(path, ["A", "B"]), 7.0)
    assert float(re.search(r"min_nbor_dist: ([\d.]+)", text)[1]) == pytest.approx(ours.min_distance, abs=1e-6)
    sizes = re.search(r"max_nbor_size: \[\s*(\d+)\s+(\d+)\]", text)
    assert (int(sizes[1]), int(sizes[2])) == ours.max_neighbors
