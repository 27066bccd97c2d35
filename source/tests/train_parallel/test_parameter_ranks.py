"""Frame and atomic parameters and excluded types on two ranks: the run of one process with the larger batch."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from test_train_parallel import STEPS, content, write_system
from train_ranks import Job, run_jobs

from deepmd_muon.checkpoint_file.file import read_checkpoint


@pytest.fixture
def place(tmp_path, monkeypatch):
    monkeypatch.setenv("DEVICE", "cpu")
    for name, nframes in (("train", 24), ("valid", 5)):
        write_system(tmp_path / name, nframes)
        (tmp_path / name / "type.raw").write_text("0\n1\n" * 4)
        (tmp_path / name / "type_map.raw").write_text("Cu\nNi\n")
        random = np.random.default_rng(nframes)
        for folder in (tmp_path / name).rglob("set.*"):
            natoms = np.load(folder / "coord.npy").shape[1] // 3
            here = len(np.load(folder / "coord.npy"))
            np.save(folder / "fparam.npy", random.normal(size=(here, 2)))
            np.save(folder / "aparam.npy", random.normal(size=(here, natoms)))
    return tmp_path


def given(place, batch, stage=0):
    found = content(place, batch, stage)
    found["model"]["fitting_net"] |= {"numb_fparam": 2, "numb_aparam": 1}
    found["model"] |= {
        "type_map": ["Cu", "Ni"],
        "pair_exclude_types": [[0, 1]],
        "atom_exclude_types": [1],
    }
    return found


def test_two_ranks_equal_one_process_with_the_larger_batch(place):
    assert run_jobs(1, [Job(place / "alone", given(place, 2))]) == [["0"]]
    jobs = [Job(place / f"two_{stage}", given(place, 1, stage)) for stage in (0, 1)]
    assert run_jobs(2, jobs) == [["0", "0"]] * 2

    def weights(folder):
        state = read_checkpoint(folder / f"model.ckpt-{STEPS}.pt")["model"]
        return {name: x for name, x in state.items() if isinstance(x, torch.Tensor)}

    whole = weights(place / "alone")
    scale = whole["model.Default.atomic_model.fitting_net.fparam_inv_std"]
    assert scale.shape == (2,)
    assert (scale != 1.0).all()
    for job in jobs:
        found = weights(job.folder)
        assert found.keys() == whole.keys()
        for name, values in whole.items():
            torch.testing.assert_close(
                found[name], values, rtol=0, atol=1e-9, msg=lambda text, n=name: f"{n}: {text}"
            )
