"""The same figures as deepmd-kit."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from deepmd_kit_program import MARKS, dp, python
from write_systems import make_arrays, write_hdf5, write_npy

from deepmd_muon.data import neighbor_statistics, open_systems

pytestmark = MARKS


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
    text = dp("neighbor-stat", "-s", path, "-r", "7.0", "-t", "A", "B")
    ours = neighbor_statistics(open_systems(path, ["A", "B"]), 7.0)
    assert float(re.search(r"min_nbor_dist: ([\d.]+)", text)[1]) == pytest.approx(
        ours.min_distance, abs=1e-6
    )
    sizes = re.search(r"max_nbor_size: \[\s*(\d+)\s+(\d+)\]", text)
    assert (int(sizes[1]), int(sizes[2])) == ours.max_neighbors


@pytest.mark.parametrize("patterns", [["fcc*"], ["fcc*", "*8"], ["train/*", "cluster13"], ["*"]])
def test_rglob_patterns_find_the_same_systems(patterns):
    folder = str(Path(__file__).parents[3] / "examples" / "cu_emt" / "data")
    found = "sorted(rglob_sys_str(sys.argv[1], sys.argv[2:]))"
    code = f"import sys; from deepmd.common import rglob_sys_str; print('FOUND', *{found})"
    said = python("-c", code, folder, *patterns)
    theirs = re.search(r"^FOUND (.*)$", said, re.MULTILINE)[1].split()
    assert [system.name for system in open_systems(folder, patterns=patterns)] == theirs
