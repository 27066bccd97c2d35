"""Models of deepmd-kit on two ranks reach what one process reaches (`pytest -m deepmd_kit`)."""

import importlib.util

import pytest
import torch
from hosted_models import hosted_input, spin_input, write_data, write_spin_data
from train_ranks import Job, run_jobs

pytestmark = [
    pytest.mark.deepmd_kit,
    pytest.mark.skipif(
        importlib.util.find_spec("deepmd") is None, reason="deepmd-kit is not importable here"
    ),
]


def test_two_ranks_reach_the_weights_of_one_process(tmp_path):
    """All batches are one frame, so that the mean gradient of the ranks is that of one process."""
    system = write_data(tmp_path)
    jobs = {}
    for name, stage in (("alone", 0), ("stage_0", 0), ("stage_1", 1), ("stage_2", 2)):
        content = hosted_input("dpa4", system, 3, zero_stage=stage)
        content["optimizer"] = {"type": "HybridMuon"}
        jobs[name] = Job(tmp_path / name, content, {"skip_neighbor_stat": True})
    assert run_jobs(1, [jobs["alone"]]) == [["0"]]
    *ends, refused = run_jobs(2, [jobs["stage_0"], jobs["stage_1"], jobs["stage_2"]])
    assert ends == [["0", "0"]] * 2
    assert all("zero_stage" in end for end in refused)

    alone = weights_of(tmp_path / "alone" / "model.ckpt-3.pt")
    for name in ("stage_0", "stage_1"):
        for key, x in weights_of(tmp_path / name / "model.ckpt-3.pt").items():
            torch.testing.assert_close(x, alone[key], rtol=0, atol=1e-9)


def test_two_ranks_reach_the_weights_of_one_process_with_spins(tmp_path):
    """Also for virtual atoms, which neighbour lists have to reach on every rank."""
    system = write_spin_data(tmp_path)
    options = {"skip_neighbor_stat": True}
    jobs = [
        Job(tmp_path / name, spin_input("se_e2_a", system, 3), options) for name in ("alone", "two")
    ]
    assert run_jobs(1, jobs[:1]) == [["0"]]
    assert run_jobs(2, jobs[1:]) == [["0", "0"]]
    alone = weights_of(tmp_path / "alone" / "model.ckpt-3.pt")
    for key, x in weights_of(tmp_path / "two" / "model.ckpt-3.pt").items():
        torch.testing.assert_close(x, alone[key], rtol=0, atol=1e-9)


def weights_of(path):
    """The floating-point tensors of a checkpoint."""
    model = torch.load(path, weights_only=True)["model"]
    return {name: x for name, x in model.items() if torch.is_tensor(x) and x.is_floating_point()}


def test_ranks_draw_other_numbers_and_restart_bitwise(tmp_path):
    """DPA-4 rotates each edge by a random angle in training; in float32 that changes the forces."""
    content = hosted_input("dpa4", write_data(tmp_path), 4, save_freq=2)
    content["model"]["descriptor"] |= {"random_gamma": True, "precision": "float32"}
    options = {"skip_neighbor_stat": True}
    whole = tmp_path / "whole"
    again = {**options, "restart": str(whole / "model.ckpt-2.pt")}
    jobs = [Job(whole, content, options), Job(tmp_path / "again", content, again)]
    assert run_jobs(2, jobs) == [["0", "0"]] * 2
    expected = torch.load(whole / "model.ckpt-4.pt", weights_only=True)
    first, second = (state["torch_rng"] for state in expected["deepmd_muon"]["rng_of_ranks"])
    assert not torch.equal(first, second)
    restarted = weights_of(tmp_path / "again" / "model.ckpt-4.pt")
    for name, x in weights_of(whole / "model.ckpt-4.pt").items():
        assert torch.equal(restarted[name], x), name
