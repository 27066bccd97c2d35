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


def two_branches(place, batch, stage=0, net=None, **training):
    """The input of `content` as two branches that share its descriptor, and its fitting net where that has a name."""
    given = content(place, batch, stage, **training)
    model, loss = given["model"], given.pop("loss")
    given["model"] = {
        "data_stat_nbatch": model["data_stat_nbatch"],
        "shared_dict": {
            "types": model["type_map"],
            "all": model["descriptor"],
            "net": model["fitting_net"],
        },
        "model_dict": {
            name: {
                "type_map": "types",
                "descriptor": "all",
                "fitting_net": net or {**model["fitting_net"], "seed": seed},
            }
            for seed, name in enumerate(("hot", "cold"))
        },
    }
    given["loss_dict"] = {"hot": loss, "cold": {**loss, "start_pref_v": 0.0, "limit_pref_v": 0.0}}
    data = {key: given["training"].pop(key) for key in ("training_data", "validation_data")}
    given["training"] |= {"data_dict": {"hot": data, "cold": data}}
    given["training"].setdefault("model_prob", {"hot": 1, "cold": 1})
    return given


def model_of(folder, step=STEPS):
    state = read_checkpoint(Path(folder, f"model.ckpt-{step}.pt"))["model"]
    return {name: x for name, x in state.items() if isinstance(x, torch.Tensor)}


def assert_close_models(found, expected, tolerance):
    for name, values in expected.items():
        torch.testing.assert_close(
            found[name], values, rtol=0, atol=tolerance, msg=lambda text, n=name: f"{n}: {text}"
        )


def test_two_ranks_train_as_one_process(place):
    """Every stage, what others saved and the device's steps are compared in the slow test below."""
    one = Job(place / "one", two_branches(place, 2))
    two = Job(place / "both", two_branches(place, 1, stage=1))
    assert run_jobs(1, [one]) == [["0"]]
    assert run_jobs(2, [two]) == [["0", "0"]]
    assert_close_models(model_of(two.folder), model_of(one.folder), 1e-9)


@pytest.mark.slow
def test_ranks_train_as_one_process_and_continue_runs_of_others(place):
    (alone,) = run_jobs(1, [Job(place / "alone", two_branches(place, 2))])
    assert alone == ["0"]
    jobs = [Job(place / f"two_{stage}", two_branches(place, 1, stage)) for stage in (0, 1, 3)]
    stopped = two_branches(place, 1)
    stopped["learning_rate"] |= {"start_lr": 1e-30, "stop_lr": 1e-30}  # which changes no weight
    stopped["validating"] = {"full_validation": True, "full_val_start": 0, "validation_freq": 1}
    stopped["validating"]["early_stop_patience"] = 1
    jobs.append(Job(place / "two_stopped", stopped))
    # Without reading on the host, as on GPUs.
    jobs += [
        Job(place / f"device_{stage}", two_branches(place, 1, stage), accident="on_device")
        for stage in (0, 1)
    ]
    assert run_jobs(2, jobs) == [["0", "0"]] * 6
    assert (place / "two_stopped" / "model.ckpt-2.pt").exists()
    assert not (place / "two_stopped" / f"model.ckpt-{HALF}.pt").exists()
    del jobs[3]  # which stopped
    whole = model_of(place / "alone")
    assert sum(".cold." in name for name in whole) == sum(".hot." in name for name in whole) > 0
    for job in jobs:
        assert_close_models(model_of(job.folder), whole, 1e-9)
    # From the half of each: one process, and two ranks with another way of keeping the state.
    halves = [str(job.folder / f"model.ckpt-{HALF}.pt") for job in jobs]
    again = Job(place / "again", two_branches(place, 1, 1), {"restart": halves[0]})
    assert run_jobs(2, [again]) == [["0", "0"]]
    for name, values in model_of(jobs[1].folder).items():
        torch.testing.assert_close(model_of(again.folder)[name], values, rtol=0, atol=1e-12)
    single = Job(place / "single", two_branches(place, 1), {"restart": halves[1]})
    assert run_jobs(1, [single]) == [["0"]]
    seen, positions = (
        read_checkpoint(place / folder / f"model.ckpt-{STEPS}.pt")["deepmd_muon"]
        for folder in ("two_1", "single")
    )
    assert seen["tasks"] == positions["tasks"]
    before = read_checkpoint(Path(halves[1]))["deepmd_muon"]["training_data"]
    for name in ("hot", "cold"):  # one process takes one batch a step where two ranks take two
        steps = [
            each["training_data"][name]["step"] - before[name]["step"] for each in (seen, positions)
        ]
        assert steps[0] == 2 * steps[1]


def test_stratified_ranks_train_branches_side_by_side(place):
    """In each step of two ranks one trains each branch; heads get their own mean, the descriptor that of both."""
    given = two_branches(place, 1, stratified=True)
    stages = (0, 1, 3)
    folders = [place / f"stratified_{stage}" for stage in stages]
    jobs = [
        Job(folder, two_branches(place, 1, stage, stratified=True))
        for stage, folder in zip(stages, folders, strict=True)
    ]
    assert run_jobs(2, jobs) == [["0", "0"]] * 3
    whole, *parted = (model_of(folder) for folder in folders)
    for other in parted:
        for name, values in whole.items():
            torch.testing.assert_close(other[name], values, rtol=0, atol=1e-10)
    own = read_checkpoint(folders[0] / f"model.ckpt-{STEPS}.pt")["deepmd_muon"]
    assert {name: state["step"] for name, state in own["training_data"].items()} == {
        "hot": STEPS,
        "cold": STEPS,
    }
    assert own["tasks"]["step"] == STEPS
    # From the half: the same run on two ranks, and its continuation on one.
    half = str(folders[0] / f"model.ckpt-{HALF}.pt")
    again = Job(place / "stratified_again", given, {"restart": half})
    assert run_jobs(2, [again]) == [["0", "0"]]
    for name, values in model_of(again.folder).items():
        torch.testing.assert_close(values, whole[name], rtol=0, atol=1e-12)
    single = Job(place / "stratified_single", given, {"restart": half})
    assert run_jobs(1, [single]) == [["0"]]
    own = read_checkpoint(single.folder / f"model.ckpt-{STEPS}.pt")["deepmd_muon"]
    assert sum(state["step"] for state in own["training_data"].values()) == 2 * HALF + (
        STEPS - HALF
    )


@pytest.mark.slow
def test_three_ranks_continue_a_run_of_two_as_one_process_does(place):
    """Stages 1 to 3, with fitting nets of their own and a shared one."""
    nets = {(2, 3): None, (3, 1): "net"}  # by the stages on two and on three ranks
    folders = {
        (size, net): place / f"on_{size}_{net}" for size in (1, 2, 3) for net in nets.values()
    }
    for size in (2, 3, 1):
        jobs = []
        for (first, last), net in nets.items():
            half = str(folders[2, net] / f"model.ckpt-{HALF}.pt")
            # Another seed lets the order of the data begin anew, as another size of batches does.
            given = two_branches(
                place, 6 // size, {1: 0, 2: first, 3: last}[size], net, seed=3 if size == 2 else 5
            )
            jobs.append(Job(folders[size, net], given, {} if size == 2 else {"restart": half}))
        assert run_jobs(size, jobs) == [["0"] * size] * 2
    for net in nets.values():
        found, whole = (model_of(folders[size, net]) for size in (3, 1))
        for name, values in whole.items():
            torch.testing.assert_close(found[name], values, rtol=0, atol=1e-9)


@pytest.mark.parametrize(("size", "stage"), [pytest.param(3, 0, marks=pytest.mark.slow), (3, 2)])
def test_a_head_of_some_ranks_gets_its_own_gradient(place, size, stage):
    """One stratified step against the gradients of each branch by itself."""
    steps = {"numb_steps": 1, "save_freq": 1}
    shares = {"hot": size - 1, "cold": 1}
    inputs = {
        "both": two_branches(place, 1, stage, stratified=True, **steps, model_prob=shares),
        "hot": two_branches(place, size - 1, **steps, model_prob={"hot": 1, "cold": 0}),
        "cold": two_branches(place, 1, **steps, model_prob={"hot": 0, "cold": 1}),
    }
    for each in inputs.values():
        # Without memory, the first moment is the gradient itself.
        each["optimizer"] = {"type": "Adam", "adam_beta1": 0.0}
        each["training"]["gradient_max_norm"] = 0.0
    jobs = {
        name: Job(place / f"step_{size}_{stage}_{name}", given) for name, given in inputs.items()
    }
    assert run_jobs(size, [jobs["both"]]) == [["0"] * size]
    assert run_jobs(1, [jobs[name] for name in ("hot", "cold")]) == [["0"]] * 2
    moments = {}
    for name in ("both", "hot", "cold"):
        optimizer = read_checkpoint(jobs[name].folder / "model.ckpt-1.pt")["optimizer"]
        names = optimizer["param_groups"][0]["param_names"]
        moments[name] = {
            names[k]: each["exp_avg"] for k, each in optimizer["state"].items() if "exp_avg" in each
        }
    assert moments["both"].keys() == moments["hot"].keys() | moments["cold"].keys()
    heads = 0
    for name, gradient in moments["both"].items():
        there = [branch for branch in shares if name in moments[branch]]
        heads += len(there) == 1
        mean = sum(shares[branch] * moments[branch][name] for branch in there) / sum(
            shares[b] for b in there
        )
        torch.testing.assert_close(gradient, mean, rtol=1e-9, atol=1e-12)
    assert 0 < heads < len(moments["both"])
