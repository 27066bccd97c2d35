"""Checkpoints of an earlier revision, with and without Magma, whole and in parts, continue as they did then."""

from __future__ import annotations

import os
import tarfile

import pytest
import torch
from make_rule_files import ARCHIVE, HALF, RUNS, STEPS, content
from test_train_parallel import tensors
from train_ranks import Job, run_jobs

from deepmd_muon.model.checkpoint_file import read_checkpoint

# On another machine than that of the archive, sums may round otherwise; where it was made, they are equal bitwise.
TOLERANCE = 0.0 if os.environ.get("RULE_FILES_BITWISE") else 1e-12


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    found = tmp_path_factory.mktemp("earlier")
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(found, filter="data")
    return found


def optimizer_state(path):
    """Return state tensors by parameter name and key."""
    optimizer = read_checkpoint(path)["optimizer"]
    names = {
        key: name
        for group in optimizer["param_groups"]
        for key, name in zip(group["params"], group["param_names"], strict=True)
    }
    return {
        (names[key], kind): x
        for key, values in optimizer["state"].items()
        for kind, x in values.items()
        if kind not in ("beta1_pow", "beta2_pow")  # for deepmd-kit's class alone
    }


@pytest.mark.parametrize("world", [1, 2])
def test_earlier_checkpoints_load_bitwise_and_go_on(place, world):
    names = [name for name, (ranks, *_) in RUNS.items() if ranks == world]
    again = []
    for name in names:
        (path,) = (place / name).glob(f"model.ckpt-{HALF}.*")
        again.append((name, path, Job(place / f"{name}_again", content(name, HALF), {"restart": str(path)})))
        again.append((name, path, Job(place / f"{name}_further", content(name), {"restart": str(path)})))
    ends = run_jobs(world, [job for *_, job in again])
    assert ends == [["0"] * world] * len(again)
    for name, path, job in again:
        if job.folder.name.endswith("_again"):
            loaded, saved = optimizer_state(job.folder / f"model.ckpt-{HALF}.pt"), optimizer_state(path)
            assert loaded.keys() == saved.keys()
            assert all(torch.equal(loaded[key], x) and loaded[key].dtype == x.dtype for key, x in saved.items()), name
            assert any(kind == "magma_score" for _, kind in saved) == (name != "no_magma")
            continue
        last, then = (read_checkpoint(folder / f"model.ckpt-{STEPS}.pt") for folder in (job.folder, place / name))
        for part in ("model", "ema", "optimizer"):
            if part in then:
                found, expected = tensors(last[part]), tensors(then[part])
                assert found.keys() == expected.keys()
                for key, x in expected.items():
                    torch.testing.assert_close(found[key], x, rtol=TOLERANCE, atol=TOLERANCE, msg=f"{name}: {key}")
