"""Fine-tuning, branches of multi-task checkpoints, other type maps and energy biases, against deepmd-kit's own."""

import itertools
import logging
from pathlib import Path

import pytest
import torch
from commands import run_dp
from finetune_data import FIXTURE, PREFIX, TABLE, an_input, write_files, write_input

from deepmd_muon.argcheck import load
from deepmd_muon.checkpoint_file.errors import CheckpointError
from deepmd_muon.cli.main import main
from deepmd_muon.model import ModelError, build_model
from deepmd_muon.model.deepmd_kit import from_deepmd_kit, to_deepmd_kit
from deepmd_muon.model.nn.type_embedding import identity
from deepmd_muon.model.settings import model_settings
from deepmd_muon.model.type_map import TypeMove, check_move, move_weights
from deepmd_muon.section import thaw
from deepmd_muon.train import TrainingError, run
from deepmd_muon.train.trainer import Trainer

TINY = {"rtol": 1e-9, "atol": 1e-11}


@pytest.fixture(autouse=True)
def _files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_files(tmp_path)


def start(content, **options):
    """Train on neighbours that are not counted, and return the exit status."""
    options = {"log_level": "WARNING", "skip_neighbor_stat": True, **options}
    return run(load(write_input(content)), **options)


def finetune(type_map, source, branch=None, *, way="finetune", script=True, **changes):
    """Train and return the model of the checkpoint."""
    options = {way: source, "model_branch": branch, "use_pretrain_script": script}
    assert start(an_input(type_map, **changes), **options) == 0
    return torch.load("model.ckpt.pt", weights_only=True)["model"]


def named():
    """Return a model of deepmd-kit's: its section as plain values, and its weights."""
    settings, state = from_deepmd_kit(FIXTURE["finetuned"]["named"])
    return thaw(settings), state


def assert_same(ours, theirs, but=()):
    """Compare all tensors but the deviation of the energies, which no energy model reads."""
    skipped = {f"{PREFIX}out_std", "model.Default.min_nbor_dist", *but}
    names = [name for name in theirs if name != "_extra_state" and name not in skipped]
    assert len(names) > 0
    for name in names:
        torch.testing.assert_close(
            ours[name], theirs[name], **TINY, msg=lambda text, name=name: f"{name}: {text}"
        )


def test_one_branch_is_fine_tuned_as_deepmd_kit_does():
    """The rows of two of 118 elements, the branch's case embedding, and the bias of the new data."""
    ours, theirs = finetune(["O", "H"], "branches.pt", "water"), FIXTURE["finetuned"]["named"]
    assert {name for name in theirs if "compress" not in name} <= set(ours)
    assert_same(ours, theirs)
    assert ours[f"{PREFIX}fitting_net.case_embd"].tolist() == [0.0, 1.0]
    assert ours["_extra_state"]["model_params"]["type_map"] == ["O", "H"]
    assert ours["_extra_state"]["model_params"]["fitting_net"]["dim_case_embd"] == 2


def test_the_command_line_fine_tunes(capsys):
    path = write_input(an_input(["O", "H"]))
    command = f"train {path} --model-branch water --use-pretrain-script --skip-neighbor-stat"
    assert run_dp(f"{command} -t branches") == 0  # .pt may be left out
    ours = torch.load("model.ckpt.pt", weights_only=True)["model"]
    torch.testing.assert_close(
        ours[f"{PREFIX}out_bias"], FIXTURE["finetuned"]["named"][f"{PREFIX}out_bias"], **TINY
    )
    capsys.readouterr()
    assert run_dp(command) == 2
    assert "--model-branch" in capsys.readouterr().err


def test_an_alias_names_its_branch():
    ours, theirs = finetune(["O", "H"], "branches.pt", "copper"), FIXTURE["finetuned"]["alias"]
    assert_same(ours, theirs)
    assert ours[f"{PREFIX}fitting_net.case_embd"].tolist() == [1.0, 0.0]


@pytest.mark.parametrize("branch", [None, "RANDOM"])
def test_without_a_branch_the_fitting_net_starts_anew(branch, caplog):
    with caplog.at_level(logging.WARNING):
        ours = finetune(["O", "H"], "branches.pt", branch)
    theirs = FIXTURE["finetuned"]["random"]
    torch.testing.assert_close(ours[f"{PREFIX}out_bias"], theirs[f"{PREFIX}out_bias"], **TINY)
    named = FIXTURE["finetuned"]["named"]
    assert_same(ours, {name: x for name, x in named.items() if ".descriptor." in name})
    layer = f"{PREFIX}fitting_net.filter_layers.networks.0.layers.0.matrix"
    assert ours[layer].shape == (6, 120)  # without case embedding, at its default width
    assert "starts anew" in caplog.text


def test_a_type_map_grows_and_is_reordered(caplog):
    with caplog.at_level(logging.WARNING):
        ours = finetune(["H", "Xx", "O"], "named.pt")
    theirs, before = FIXTURE["finetuned"]["grown"], FIXTURE["finetuned"]["named"]
    torch.testing.assert_close(ours[f"{PREFIX}out_bias"], theirs[f"{PREFIX}out_bias"], **TINY)
    assert ours[f"{PREFIX}out_bias"][0, 1, 0] == 0.0  # there are no such atoms
    assert torch.equal(
        ours[f"{PREFIX}descriptor.repflows.stddev"], theirs[f"{PREFIX}descriptor.repflows.stddev"]
    )
    rows = ours[TABLE]  # three types and six features: two identities belong to the table
    torch.testing.assert_close(rows[[2, 0]], theirs[TABLE][[2, 0]], **TINY)
    torch.testing.assert_close(
        (rows + identity(rows))[[2, 0]], before[TABLE] + identity(before[TABLE]), **TINY
    )
    table = build_model(from_deepmd_kit(ours)[0]).get_parameter(
        TABLE.removeprefix("model.Default.")
    )
    torch.testing.assert_close(rows[1], table[1].detach(), **TINY)
    assert "those of Xx start fresh" in caplog.text


def test_init_model_takes_a_branch_and_leaves_the_bias():
    ours = finetune(["O", "H"], "branches.pt", "H2O", way="init_model")
    branches = FIXTURE["branches"]["_extra_state"]["model_params"]["model_dict"]
    # --use-pretrain-script
    assert ours["_extra_state"]["model_params"]["type_map"] == branches["water"]["type_map"]
    assert torch.equal(
        ours[f"{PREFIX}out_bias"], FIXTURE["branches"]["model.water.atomic_model.out_bias"]
    )


def test_init_model_fits_the_bias_of_new_types_alone():
    """Oxygen is new to a model of hydrogen: its energy explains what hydrogen's leaves."""
    section, state = named()
    one = {**section, "type_map": ["H"]}
    model = build_model(one)
    model.load_state_dict(move_weights(model, state, TypeMove(("O", "H"), ("H",))))

    torch.save({"model": to_deepmd_kit(model, {"lr": 1e-3, "step": 0}), "optimizer": {}}, "one.pt")
    content = an_input(["O", "H"])
    content["model"] = {**section, "type_map": ["O", "H"]}
    assert start(content, init_model="one.pt") == 0
    ours = torch.load("model.ckpt.pt", weights_only=True)["model"]
    bias = ours[f"{PREFIX}out_bias"][0, :, 0]
    assert bias[1] == state["atomic_model.out_bias"][0, 1, 0]
    assert -10 < bias[0] < -1


@pytest.mark.parametrize("mode", ["change", "set"])
@pytest.mark.parametrize("how", ["branch", "single"])
def test_change_bias_gives_deepmd_kits_numbers(mode, how):
    words = ["--pt", "change-bias", "-s", "target", "-m", mode, "-o", "out.pt"]
    if how == "branch":
        assert main([*words, "branches.pt", "--model-branch", "water"]) == 0
        before, theirs = FIXTURE["branches"], FIXTURE["changed"][mode]
        name = "model.water.atomic_model.out_bias"
    else:
        assert main([*words, "named.pt"]) == 0
        before, name = FIXTURE["finetuned"]["named"], f"{PREFIX}out_bias"
        theirs = {name: FIXTURE["finetuned"]["named" if mode == "change" else "random"][name]}
    ours = torch.load("out.pt", weights_only=True)["model"]
    torch.testing.assert_close(ours[name], theirs[name], **TINY)
    assert ours.keys() == before.keys()
    for key, value in before.items():
        if key not in (name, "_extra_state"):
            assert torch.equal(ours[key], value), key


def test_change_bias_sets_values_and_keeps_the_optimizer():
    content = an_input(["O", "H"], optimizer="HybridMuon", lr=1e-3)
    content["model"], _ = named()
    assert start(content) == 0
    assert main(["--pt", "change-bias", "model.ckpt.pt", "-b", "-4.5", "-1.25"]) == 0
    before, after = (
        torch.load(name, weights_only=True) for name in ("model.ckpt.pt", "model.ckpt_updated.pt")
    )
    assert after["model"][f"{PREFIX}out_bias"].flatten().tolist() == [-4.5, -1.25]
    assert after["optimizer"]["param_groups"] == before["optimizer"]["param_groups"]
    content["training"]["numb_steps"] = 2
    assert start(content, restart="model.ckpt_updated.pt") == 0


@pytest.mark.parametrize(
    ("words", "key"),
    [
        (["branches.pt", "-s", "target"], "metal"),
        (["branches.pt", "--model-branch", "steel", "-s", "target"], "steel"),
        (["named.pt", "--model-branch", "water", "-s", "target"], "water"),
        (["named.pt", "-b", "1.0"], "each type"),
        (["named.pt", "-s", "target", "-n", "-1"], "-n"),
        (["named.pt", "-f", "nowhere.txt"], "nowhere.txt"),
        (["named.pt", "-s", "target", "-o", "out.pth"], "out.pth"),
    ],
)
def test_what_change_bias_refuses(words, key, capsys):
    assert main(["--pt", "change-bias", *words]) == 2
    assert key in capsys.readouterr().err
    assert not Path("named_updated.pt").exists()


def test_some_frames_are_enough_for_a_bias():
    """Two of the four frames of each system, by least squares."""
    assert main(["--pt", "change-bias", "named.pt", "-s", "target", "-n", "2", "-m", "set"]) == 0
    bias = torch.load("named_updated.pt", weights_only=True)["model"][f"{PREFIX}out_bias"].flatten()
    systems = FIXTURE["target"].values()
    counts = torch.tensor(
        [[(x["type"] == x["type_map"].index(name)).sum() for name in "OH"] for x in systems]
    ).double()
    pairs = [list(pair) for pair in itertools.combinations(range(4), 2)]
    energies = [[x["energy"][pair] for pair in pairs] for x in systems]
    fits = [
        torch.linalg.lstsq(
            counts.repeat_interleave(2, 0), torch.cat(chosen)[:, None]
        ).solution.flatten()
        for chosen in itertools.product(*energies)
    ]
    assert min((fit - bias).abs().max() for fit in fits) < 1e-9


def test_a_model_of_another_size_is_refused():
    with pytest.raises(CheckpointError, match="n_dim"):
        finetune(["O", "H"], "named.pt", script=False)


@pytest.mark.parametrize("way", ["init_model", "finetune", "restart"])
@pytest.mark.parametrize("sel", ["auto", [20, 40]])
def test_se_e2_a_says_that_it_cannot_take_new_types(small_input, way, sel):
    content = small_input()
    content["training"]["numb_steps"] = 1
    assert run(load(write_input(content)), log_level="WARNING") == 0
    saved = content["model"]["type_map"]
    content["model"]["descriptor"]["sel"] = sel
    content["model"]["type_map"] = [*saved, "Xx"]
    with pytest.raises(ModelError, match="cannot take new types") as caught:
        run(load(write_input(content)), log_level="WARNING", **{way: "model.ckpt.pt"})
    message = str(caught.value)
    for word in ("se_e2_a", "(Xx)", str(saved), "dpa3", "se_atten"):
        assert word in message
    content["model"]["descriptor"]["sel"] = "auto"
    forced = {"finetune": "model.ckpt.pt", "force_load": True, "skip_neighbor_stat": False}
    assert start(content, **forced) == 0
    with pytest.raises(ModelError, match="cannot change its type map"):
        check_move(TypeMove(("O", "H"), ("H", "O")), model_settings(content["model"]))


def test_trainable_parts_of_the_input_must_fit_the_net_of_the_checkpoint():
    content = an_input(["O", "H"])
    content["model"]["fitting_net"] = {"neuron": [4] * 6, "trainable": [True] * 7}
    with pytest.raises(
        ModelError, match=r"^model/fitting_net/trainable: must have one value for each"
    ):
        start(content, finetune="named.pt", use_pretrain_script=True, skip_neighbor_stat=False)


def test_data_without_energies_stop_a_fine_tuning():
    for energies in Path("target").rglob("energy.npy"):
        energies.unlink()
    with pytest.raises(TrainingError, match="energies"):
        finetune(["O", "H"], "named.pt")


@pytest.mark.parametrize("optimizer", ["HybridMuon", "Adam"])
@pytest.mark.parametrize("ema", [False, True])
def test_a_restart_moves_the_rows_of_the_optimizers_state(optimizer, ema, caplog, monkeypatch):
    section, _ = named()
    content = an_input(["O", "H"], optimizer=optimizer, lr=1e-3, numb_steps=2, enable_ema=ema)
    content["model"] = section
    assert start(content) == 0
    before = torch.load("model.ckpt-2.pt", weights_only=True)
    content["model"] = {**section, "type_map": ["H", "Xx", "O"]}
    content["training"]["numb_steps"] = 3
    started = []
    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING):
        patch.setattr(Trainer, "run", lambda self, begun: started.append(self) or 0)
        start(content, restart="model.ckpt-2.pt")
    after = started[0].optimizer.state_dict()
    table = TABLE.removeprefix("model.Default.")
    weights = started[0].model.state_dict()[table]
    torch.testing.assert_close(
        (weights + identity(weights))[[2, 0]], before["model"][TABLE], **TINY
    )
    assert f"optimizer state of {table}: rows of H, O move, those of Xx start fresh" in caplog.text
    names = before["optimizer"]["param_groups"][0]["param_names"]
    assert after["param_groups"][0]["param_names"] == names
    assert after["state"].keys() == before["optimizer"]["state"].keys()
    for key, old in before["optimizer"]["state"].items():
        name, new = names[key], after["state"][key]
        # The powers of decays are deepmd-kit's.
        old = {what: x for what, x in old.items() if torch.is_tensor(x)}
        assert old.keys() == new.keys()
        for what, value in old.items():
            rows = name == table and value.dim() == 2
            expected = (
                torch.stack([value[1], torch.zeros_like(value[0]), value[0]]) if rows else value
            )
            assert torch.equal(new[what], expected), (name, what)
    if ema:
        average = started[0].ema.averages()[table]
        torch.testing.assert_close(
            (average + identity(average))[[2, 0]], before["ema"]["model"][table], **TINY
        )
        assert torch.equal(average[1], weights[1])
    assert start(content, restart="model.ckpt-2.pt") == 0


def test_one_type_grows_to_two():
    """A table of one row takes Adam, of two rows Muon: its state starts fresh, all other state continues."""
    section, _ = named()
    content = an_input(["H"], optimizer="HybridMuon", lr=1e-3)
    content["model"] = {**section, "type_map": ["H"]}
    for types in Path("target").rglob("type.raw"):
        types.write_text("0\n" * len(types.read_text().split()))
        types.with_name("type_map.raw").write_text("H\n")
    assert start(content) == 0
    content["model"] = {**section, "type_map": ["O", "H"]}
    content["training"]["numb_steps"] = 2
    assert start(content, restart="model.ckpt.pt") == 0
    assert torch.load("model.ckpt.pt", weights_only=True)["deepmd_muon"]["step"] == 2


def test_the_identity_of_a_narrow_table_moves_along():
    """Where the width is the number of types an identity belongs to the table: vectors of types stay what they were."""
    section, _ = named()
    section["descriptor"]["repflow"] |= {"n_dim": 4, "axis_neuron": 2}
    section["fitting_net"]["dim_case_embd"] = 0
    old, new = ("O", "H"), ("H", "C", "O", "N")
    models = [build_model({**section, "type_map": list(types)}) for types in (old, new)]
    models[1].load_state_dict(move_weights(models[1], models[0].state_dict(), TypeMove(old, new)))
    before, after = (model.atomic_model.descriptor.type_embedding().detach() for model in models)
    torch.testing.assert_close(after[[2, 0]], before, rtol=1e-14, atol=1e-15)
