"""Several models on several ranks: all ranks train the branch that one seeded draw names, as one process would."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from test_train_parallel import HALF, STEPS, content, write_system
from train_ranks import Job, run_jobs

from deepmd_muon.checkpoint_file.file import read_checkpoint


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DEVICE", "cpu")
        found = tmp_path_factory.mktemp("tasks")
        write_system(found / "train", 24)
        write_system(found / "valid", 5)
        yield found


def two_branches(place, batch, stage=0, **training):
    """The input of `content` as two branches that share its descriptor."""
    given = content(place, batch, stage, **training)
    model, loss = given["model"], given.pop("loss")
    given["model"] = {
        "data_stat_nbatch": model["data_stat_nbatch"],
        "shared_dict": {"types": model["type_map"], "all": model["descriptor"]},
        "model_dict": {
            name: {"type_map": "types", "descriptor": "all", "fitting_net": {**model["fitting_net"], "seed": seed}}
            for seed, name in enumerate(("hot", "cold"))
        },
    }
    given["loss_dict"] = {"hot": loss, "cold": {**loss, "start_pref_v": 0.0, "limit_pref_v": 0.0}}
    data = {key: given["training"].pop(key) for key in ("training_data", "validation_data")}
    given["training"] |= {"data_dict": {"hot": data, "cold": data}, "model_prob": {"hot": 1, "cold": 1}}
    return given


def model_of(folder, step=STEPS):
    state = read_checkpoint(Path(folder, f"model.ckpt-{step}.pt"))["model"]
    return {name: x for name, x in state.items() if isinstance(x, torch.Tensor)}


def test_ranks_train_as_one_process_and_continue_what_others_saved(place):
    (alone,) = run_jobs(1, [Job(place / "alone", two_branches(place, 2))])
    assert alone == ["0"]
    jobs = [Job(place / f"two_{stage}", two_branches(place, 1, stage)) for stage in (0, 1)]
    assert run_jobs(2, jobs) == [["0", "0"]] * 2
    whole = model_of(place / "alone")
    assert sum(".cold." in name for name in whole) == sum(".hot." in name for name in whole) > 0
    for job in jobs:
        found = model_of(job.folder)
        for name, values in whole.items():
            torch.testing.assert_close(found[name], values, rtol=0, atol=1e-9, msg=lambda text, n=name: f"{n}: {text}")
    # From the half of each: one process, and two ranks with another way of keeping the state.
    halves = [str(job.folder / f"model.ckpt-{HALF}.pt") for job in jobs]
    again = Job(place / "again", two_branches(place, 1, 1), {"restart": halves[0]})
    assert run_jobs(2, [again]) == [["0", "0"]]
    for name, values in model_of(jobs[1].folder).items():
        torch.testing.assert_close(model_of(again.folder)[name], values, rtol=0, atol=1e-12)
    single = Job(place / "single", two_branches(place, 1), {"restart": halves[1]})
    assert run_jobs(1, [single]) == [["0"]]
    seen, positions = (
        read_checkpoint(place / folder / f"model.ckpt-{STEPS}.pt")["deepmd_muon"] for folder in ("two_1", "single")
    )
    assert seen["tasks"] == positions["tasks"]
    before = read_checkpoint(Path(halves[1]))["deepmd_muon"]["training_data"]
    for name in ("hot", "cold"):  # one process takes one batch a step where two ranks take two
        steps = [each["training_data"][name]["step"] - before[name]["step"] for each in (seen, positions)]
        assert steps[0] == 2 * steps[1]
