"""Restarts across the two programs."""

from pathlib import Path

import numpy as np
import pytest
import torch
from deepmd_kit_program import MARKS, dp
from finetune_data import an_input, write_files, write_input

pytestmark = MARKS


def test_a_checkpoint_of_deepmd_kit_continues_here(small_input, train, load):
    content = small_input(training={"numb_steps": 3, "save_freq": 3})
    content["model"]["descriptor"]["sel"] = [60]
    dp("train", write_input(content, "theirs.json"), "--skip-neighbor-stat")
    before = load("model.ckpt-3.pt")
    longer = small_input(training={"numb_steps": 5, "save_ckpt": "ours"})
    longer["model"]["descriptor"]["sel"] = [60]
    longer["optimizer"]["lr_adjust_coeff"] = 0.18
    assert train(longer, restart="model.ckpt-3.pt") == 0
    after = load("ours-5.pt")
    assert after["deepmd_muon"]["step"] == 5
    steps = [value["step"] for value in after["optimizer"]["state"].values() if "step" in value]
    assert steps
    assert all(int(step) == 5 for step in steps)
    name = "model.Default.atomic_model.fitting_net.filter_layers.networks.0.layers.0.matrix"
    assert before["model"][name].shape == after["model"][name].shape
    assert not torch.equal(before["model"][name], after["model"][name])
    # Two steps at this rate move the weights by little: the run continued, it did not start anew.
    assert torch.allclose(before["model"][name], after["model"][name], atol=0.02)


DESCRIPTORS = {
    "se_e2_a": {"sel": [30, 30], "rcut": 4.0, "rcut_smth": 1.0, "neuron": [4, 8], "axis_neuron": 2},
    "dpa1": {
        "sel": 30,
        "rcut": 4.0,
        "rcut_smth": 1.0,
        "neuron": [4, 8],
        "axis_neuron": 2,
        "attn": 6,
        "attn_layer": 1,
    },
    "dpa3": {},
}


TABLE = Path(__file__).parents[1] / "model" / "short_range.txt"


@pytest.mark.parametrize(
    ("kind", "optimizer", "table"),
    [
        ("se_e2_a", "HybridMuon", False),
        ("dpa1", "Adam", False),
        ("dpa3", "HybridMuon", False),
        ("dpa1", "HybridMuon", True),
    ],
)
def test_deepmd_kit_continues_our_checkpoint(kind, optimizer, table, tmp_path, train):
    """Three steps of ours and four of its own, which takes the last one again."""
    write_files(tmp_path)
    precision = (
        "float32" if optimizer == "HybridMuon" else "float64"
    )  # its HybridMuon restarts no float64 models
    content = an_input(["O", "H"], lr=1e-3, optimizer=optimizer, numb_steps=3, save_freq=3)
    given = (
        {**content["model"]["descriptor"], "type": kind}
        if kind == "dpa3"
        else {"type": kind, **DESCRIPTORS[kind]}
    )
    content["model"]["descriptor"] = {**given, "seed": 1, "precision": precision}
    content["model"]["fitting_net"] = {"neuron": [6, 6], "seed": 1, "precision": precision}
    if table:
        content["model"] |= {"use_srtab": str(TABLE), "sw_rmin": 0.8, "sw_rmax": 1.3}
    assert train(content, skip_neighbor_stat=True) == 0
    content["training"]["numb_steps"] = 6
    dp(
        "train",
        write_input(content, "more.json"),
        "--restart",
        "model.ckpt-3.pt",
        "--skip-neighbor-stat",
    )
    states = torch.load("model.ckpt-6.pt", weights_only=True)["optimizer"]["state"].values()
    if optimizer == "Adam":
        assert {int(state["step"]) for state in states if state} == {7}
    else:
        assert {
            round(state["beta1_pow"] / 0.9**7, 9) for state in states if "beta1_pow" in state
        } == {1.0}
    content["training"]["numb_steps"] = 7
    assert train(content, restart="model.ckpt-6.pt", skip_neighbor_stat=True) == 0


def read_curve(path):
    """Return the columns of a learning curve by name."""
    names = Path(path).read_text().splitlines()[0].split()[1:]
    return dict(zip(names, np.loadtxt(path, ndmin=2).T, strict=True))


@pytest.mark.parametrize("kind", ["dpa1", "dpa3"])
def test_a_run_learns_what_deepmd_kits_learns(kind, tmp_path, train):
    """Both commands from one input: the same weights from the seed, one frame, and 60 steps of Adam."""
    write_files(tmp_path)
    (system, *_) = sorted(path for path in (tmp_path / "target").iterdir())
    for key in ("coord", "box", "energy", "force"):
        file = system / "set.000" / f"{key}.npy"
        np.save(file, np.load(file)[:1])
    content = an_input(["O", "H"], lr=1e-2, numb_steps=60, save_freq=60, disp_freq=10)
    content["training"]["training_data"] = {"systems": [str(system)], "batch_size": 1}
    given = (
        {**content["model"]["descriptor"], "type": kind}
        if kind == "dpa3"
        else {"type": kind, **DESCRIPTORS[kind]}
    )
    content["model"]["descriptor"] = {**given, "seed": 1}
    if kind == "dpa3":
        given["repflow"].update(n_dim=8, e_dim=6, a_dim=4, nlayers=2)
    content["model"]["fitting_net"] = {"neuron": [6, 6], "seed": 1}
    theirs = {**content, "training": {**content["training"], "disp_file": "theirs.out"}}
    dp("train", write_input(theirs, "theirs.json"), "--skip-neighbor-stat")
    assert train(content, skip_neighbor_stat=True) == 0
    ours, wanted = read_curve("lcurve.out"), read_curve("theirs.out")
    assert ours["step"].tolist() == [1, 10, 20, 30, 40, 50, 60]
    for key in ("rmse_trn", "rmse_e_trn", "rmse_f_trn"):
        np.testing.assert_allclose(
            ours[key], wanted[key], rtol=1e-2, err_msg=key
        )  # three digits are printed
    assert ours["rmse_f_trn"][-1] < 0.98 * ours["rmse_f_trn"][0]


@pytest.mark.parametrize("branch", ["water", None])
def test_fine_tuning_gives_deepmd_kits_numbers(branch, tmp_path, train, load):
    """Both programs, one checkpoint and input, data of which all frames count; the rate is too small to matter."""
    write_files(tmp_path)
    content = an_input(["H", "O"])
    write_input(
        {**content, "training": {**content["training"], "save_ckpt": "theirs"}}, "theirs.json"
    )
    words = ["--model-branch", branch] if branch else []
    words += ["--use-pretrain-script", "--skip-neighbor-stat", "--finetune", "branches.pt"]
    dp("train", "theirs.json", *words)
    options = {"finetune": "branches.pt", "model_branch": branch, "use_pretrain_script": True}
    assert train(content, skip_neighbor_stat=True, **options) == 0
    ours, theirs = load()["model"], load("theirs-1.pt")["model"]
    for name, value in theirs.items():
        if name.endswith("out_bias") or (
            branch and name not in ("_extra_state",) and "out_std" not in name
        ):
            torch.testing.assert_close(ours[name], value, rtol=1e-9, atol=1e-11, msg=name)
    if branch:
        dp("test", "-m", "model.ckpt.pt", "-s", "target", "-d", "detail")
