"""`dp show plan` and `dp show kernels`."""

from __future__ import annotations

import json
import re

import pytest
import torch
from commands import run_dp

from deepmd_muon.argcheck import normalize
from deepmd_muon.model import build_model
from deepmd_muon.model.deepmd_kit import to_deepmd_kit
from deepmd_muon.optim import describe_kernels

DESCRIPTOR = {"type": "se_e2_a", "sel": "auto", "rcut": 4.0, "neuron": [8, 16], "axis_neuron": 4}
INPUT = {
    "model": {
        "type_map": ["O", "H"],
        "descriptor": DESCRIPTOR,
        "fitting_net": {"neuron": [24, 24]},
    },
    "learning_rate": {"type": "exp", "start_lr": 1e-3},
    "loss": {"type": "ener"},
    "optimizer": {"type": "HybridMuon"},
    "training": {
        "training_data": {"systems": ["nowhere"]},
        "numb_steps": 10,
        "zero_stage": 3,
        "data_parallel_replicate_degree": 2,
    },
}


@pytest.fixture(autouse=True)
def _folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "input.json").write_text(json.dumps(INPUT))
    (tmp_path / "adam.json").write_text(json.dumps({**INPUT, "optimizer": {"type": "Adam"}}))


def show(capsys, words):
    assert run_dp(f"show {words}") == 0
    return capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "title", "layout"),
    [
        ("", "8 ranks in 2 groups, zero_stage 3", "2x4: Replicate, Shard(0)"),
        ("--zero-stage 0", "8 ranks, zero_stage 0: every rank holds everything", "8: Replicate"),
        ("--zero-stage 1", "8 ranks, zero_stage 1", "8: Replicate"),
        (
            "--zero-stage 2 --hsdp 4",
            "8 ranks in 4 groups, zero_stage 2",
            "4x2: Replicate, Shard(0)",
        ),
        ("--hsdp 1", "8 ranks, zero_stage 3", "8: Shard(0)"),
    ],
)
def test_the_plan_of_an_input_needs_no_data(capsys, words, title, layout):
    shown = show(capsys, f"plan --world-size 8 {words} input.json")
    assert shown.startswith(title)
    # 4 embedding nets with one matrix of two dimensions each, 2 fitting nets with two.
    assert f"8 ranks; 8 parameters, 8 matrices on mesh {layout}" in shown
    assert re.search(r"FLOPs a rank: mean [\d.e+]+, largest", shown)


def test_an_input_without_types_needs_its_data(tmp_path, capsys):
    model = {key: value for key, value in INPUT["model"].items() if key != "type_map"}
    (tmp_path / "input.json").write_text(json.dumps({**INPUT, "model": model}))
    assert run_dp("show plan --world-size 8 input.json") == 2
    assert "type_map" in capsys.readouterr().err


def test_owners_are_listed_on_demand(capsys):
    shown = show(capsys, "plan input.json --world-size 64 --hsdp 1 --owners")
    owners = re.findall(r"rank (\d+): (\S+) block 0 \((\d+x\d+)\), (stays|bucket 0)", shown)
    assert len(owners) == 8
    assert len({rank for rank, *_ in owners}) == 8
    assert sorted(size for _, _, size, _ in owners) == ["24x24"] * 2 + ["64x24"] * 2 + ["8x16"] * 4


def test_the_plan_of_a_checkpoint_is_that_of_its_input(capsys):
    section = {**INPUT["model"], "descriptor": {**DESCRIPTOR, "sel": [8, 16]}}
    given = normalize({**INPUT, "model": section})
    model = build_model(given.normalized["model"])
    state = to_deepmd_kit(model, {"lr": 1e-3, "step": 0})
    own = {"version": 1, "step": 1, "settings": json.dumps(given.normalized)}
    torch.save({"model": state, "deepmd_muon": own}, "model.ckpt.pt")
    names = ("input.json", "model.ckpt.pt", "model.ckpt")
    plans = [show(capsys, f"plan {name} --world-size 4") for name in names]
    assert plans[0] == plans[1] == plans[2]
    torch.save({"model": state}, "theirs.pt")
    assert run_dp("show plan theirs.pt --world-size 4") == 2
    message = "comes from deepmd-kit and holds no settings; give the input file"
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("plan input.json", "needs the number of processes, --world-size N; found None"),
        ("plan input.json --world-size 7", "7 processes at zero_stage 3 cannot form 2 groups"),
        ("plan input.json --world-size 8 --zero-stage 1 --hsdp 2", "the stage be 2 or 3"),
        ("plan adam.json --world-size 2", "Adam steps every element by itself: there is no plan"),
        ("kernels input.json", "show kernels takes no file; found input.json"),
    ],
)
def test_what_cannot_be_shown_is_said(capsys, words, message):
    assert run_dp(f"show {words}") == 2
    assert message in capsys.readouterr().err


def test_kernels_are_those_of_this_machine(capsys):
    shown = show(capsys, "kernels")
    assert shown == f"{describe_kernels()}\n"
    assert "everything else" in shown
    assert show(capsys, "-v WARNING kernels") == shown


def test_attributes_of_models_that_we_lack_go_to_deepmd_kit(monkeypatch):
    handed = []
    monkeypatch.setattr(
        "deepmd_muon.cli.main.hand_over", lambda what, words, _: handed.append((what, words)) or 5
    )
    parts = {"descriptor": {"type": "dpa2"}, "fitting_net": {"type": "ener"}}
    extra = {"model_params": {"type_map": ["O"], **parts}, "train_infos": {}}
    torch.save({"model": {"_extra_state": extra}}, "dpa2.pt")
    assert run_dp("show dpa2.pt size") == 5
    assert [words for _, words in handed] == [["--pt", "show", "dpa2.pt", "size"]]
    assert "'dpa2'" in handed[0][0]
    assert run_dp("show dpa2.pt type-map descriptor") == 0  # which the file says
    assert run_dp("show dpa2.pt observed-type") == 2
    assert len(handed) == 1
