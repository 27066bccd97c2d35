"""Several models with shared parts in one run: what is shared, what is trained, restarts, files and commands."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from commands import run_dp
from small_models import COPPER_DESCRIPTORS as DESCRIPTORS

from deepmd_muon.checkpoint_file.errors import CheckpointError
from deepmd_muon.cli.main import main
from deepmd_muon.data import open_systems
from deepmd_muon.infer.predictor import Predictor, load_model
from deepmd_muon.optim.routing.routes import RouteTable
from deepmd_muon.train import trainer

EXAMPLE = Path(__file__).parents[3] / "examples" / "cu_emt" / "data"
HOT, COLD = (str(EXAMPLE / "train" / name) for name in ("fcc32", "triclinic8"))
DESCRIPTOR, FITTING = "atomic_model.descriptor.", "atomic_model.fitting_net."


def branch(content, name):
    """Return weights and statistics of a branch in a checkpoint, by their names in a single model."""
    prefix = f"model.{name}."
    found = {
        key.removeprefix(prefix): x for key, x in content["model"].items() if key.startswith(prefix)
    }
    return {key: x for key, x in found.items() if x.numel() and key != "min_nbor_dist"}


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


def below(state, prefix):
    return {key: x for key, x in state.items() if key.startswith(prefix)}


@pytest.mark.parametrize("kind", DESCRIPTORS)
def test_branches_share_the_descriptor_and_have_heads_of_their_own(two_branches, train, load, kind):
    assert train(two_branches(DESCRIPTORS[kind], numb_steps=4, save_freq=4)) == 0
    content = load()
    hot, cold = branch(content, "hot"), branch(content, "cold")
    assert same(below(hot, DESCRIPTOR), below(cold, DESCRIPTOR))
    assert not same(below(hot, FITTING), below(cold, FITTING))
    assert not torch.equal(hot["atomic_model.out_bias"], cold["atomic_model.out_bias"])
    names = content["optimizer"]["param_groups"][0]["param_names"]
    assert (
        sum(DESCRIPTOR in name for name in names)
        == sum(name.startswith(f"hot.{DESCRIPTOR}") for name in names)
        > 0
    )


def test_level_1_shares_the_type_embedding_alone(two_branches, train, load):
    assert train(two_branches(DESCRIPTORS["dpa1"], level=":1", numb_steps=4, save_freq=4)) == 0
    hot, cold = (below(branch(load(), name), DESCRIPTOR) for name in ("hot", "cold"))
    equal = {key for key in hot if torch.equal(hot[key], cold[key])}
    types = {key for key in hot if "type_embedding" in key}
    assert types
    assert types <= equal
    assert not [key for key in equal - types if "matrix" in key]


def test_a_shared_fitting_net_tells_branches_by_bias_and_case(two_branches, train, load):
    assert train(two_branches(net={"dim_case_embd": 2}, numb_steps=4, save_freq=4)) == 0
    hot, cold = (branch(load(), name) for name in ("hot", "cold"))
    assert same(below(hot, f"{FITTING}filter_layers"), below(cold, f"{FITTING}filter_layers"))
    assert hot[f"{FITTING}case_embd"].tolist() == [0.0, 1.0]  # rows by the order of names
    assert cold[f"{FITTING}case_embd"].tolist() == [1.0, 0.0]
    assert not torch.equal(hot["atomic_model.out_bias"], cold["atomic_model.out_bias"])


def test_shared_statistics_are_those_of_all_data_together(two_branches, small_input, train, load):
    assert train(two_branches(numb_steps=0)) == 0
    both = branch(load(), "cold")[f"{DESCRIPTOR}sea.stddev"]
    single = small_input(training={"numb_steps": 0, "save_ckpt": "one", "validation_data": None})
    single["model"]["descriptor"] = DESCRIPTORS["se_e2_a"]
    single["model"]["data_stat_nbatch"] = 2
    single["training"]["training_data"] = {"systems": [HOT, COLD], "batch_size": [2, 1]}
    assert train(single) == 0
    torch.testing.assert_close(
        both, branch(load("one.pt"), "Default")[f"{DESCRIPTOR}sea.stddev"], rtol=0, atol=1e-14
    )


def test_a_head_that_is_not_drawn_keeps_weights_and_momentum(two_branches, train, load):
    content = two_branches(numb_steps=6, save_freq=3)
    assert train(content) == 0
    content["training"] |= {
        "model_prob": {"hot": 1, "cold": 0},
        "save_ckpt": "hot",
        "numb_steps": 9,
    }
    assert train(content, restart="model.ckpt-6.pt") == 0
    before, after = load("model.ckpt-6.pt"), load("hot-9.pt")
    assert same(below(branch(before, "cold"), FITTING), below(branch(after, "cold"), FITTING))
    assert not same(below(branch(before, "hot"), FITTING), below(branch(after, "hot"), FITTING))
    assert not same(
        below(branch(before, "cold"), DESCRIPTOR), below(branch(after, "cold"), DESCRIPTOR)
    )
    saved, present = (below(states(content), f"cold.{FITTING}") for content in (before, after))
    assert saved
    for name, values in saved.items():
        assert same(values, present[name]), name


def test_only_runs_with_branches_may_lack_gradients_in_a_captured_step(
    two_branches, small_input, train, monkeypatch
):
    """In a run of one model, a gradient that is missing when a step is captured is an error."""
    found, original = [], trainer.build_stepper

    def build(**options):
        found.append(options["optimizer"].alternates)
        return original(**options)

    monkeypatch.setattr(trainer, "build_stepper", build)
    for content in (small_input(training={"numb_steps": 1}), two_branches(numb_steps=1)):
        content["optimizer"] = {"type": "HybridMuon"}
        assert train(content) == 0
    assert found == [False, True, True]


@pytest.mark.parametrize(("kind", "optimizer"), [("se_e2_a", "HybridMuon"), ("dpa1", "Adam")])
def test_restart_is_bitwise(two_branches, check_restart, kind, optimizer):
    content = two_branches(DESCRIPTORS[kind], numb_steps=9, save_freq=4, enable_ema=True)
    content["optimizer"] = {"type": optimizer}
    whole, again = check_restart(content, 4)
    assert whole["deepmd_muon"]["tasks"] == again["deepmd_muon"]["tasks"]
    served = {name: state["step"] for name, state in whole["deepmd_muon"]["training_data"].items()}
    assert sum(served.values()) == 9
    assert min(served.values()) > 0


def test_the_input_that_a_run_writes_is_that_run(two_branches, train, load):
    assert train(two_branches(numb_steps=3, save_freq=3)) == 0
    first = load()
    out = json.loads(Path("out.json").read_text())
    assert out["model"]["model_dict"]["cold"]["descriptor"] == "all"
    out["training"]["save_ckpt"] = "again"
    assert train(out, output="again.json") == 0
    assert same(branch(first, "cold"), branch(load("again.pt"), "cold"))


def test_an_automatic_sel_is_enough_for_all_branches(two_branches, train):
    content = two_branches(numb_steps=0)
    content["model"]["shared_dict"]["all"]["sel"] = "auto"
    assert train(content) == 0
    most = max(neighbors(path) for path in (HOT, COLD))
    (sel,) = json.loads(Path("out.json").read_text())["model"]["shared_dict"]["all"]["sel"]
    assert sel == (int(most * 1.1) + 3) // 4 * 4


def neighbors(path):
    from deepmd_muon.data import neighbor_statistics

    return neighbor_statistics(open_systems(path, ["Cu"]), 4.5).max_total


def test_reports_name_the_branches(two_branches, train):
    assert train(two_branches(numb_steps=8, disp_freq=4, jsonl_file="run.jsonl")) == 0
    lines = Path("lcurve.out").read_text().splitlines()
    names = lines[0].split()[1:]
    assert names[:3] == ["step", "rmse_val_hot", "rmse_trn_hot"]
    assert "rmse_e_trn_cold" in names
    assert "rmse_e_val_cold" not in names  # it has no validation data
    rows = np.loadtxt("lcurve.out")
    assert rows.shape == (3, len(names))
    assert np.isfinite(rows[:, names.index("rmse_f_val_hot")]).all()
    # Each row has the errors of the branches that were trained since the last one.
    trained = [names.index("rmse_f_trn_hot"), names.index("rmse_f_trn_cold")]
    assert np.isfinite(rows[1:, trained]).any(0).all()
    record = json.loads(Path("run.jsonl").read_text().splitlines()[-1])
    assert {"rmse_f_trn_hot", "rmse_f_val_hot", "rmse_f_trn_cold"} <= record.keys()


def test_every_branch_has_its_best_checkpoint(two_branches, train, load):
    content = two_branches(numb_steps=6)
    data = content["training"]["data_dict"]
    data["cold"]["validation_data"] = {"systems": str(EXAMPLE / "valid" / "triclinic8")}
    content["validating"] = {"full_validation": True, "full_val_start": 0, "validation_freq": 2}
    assert train(content) == 0
    for name in ("hot", "cold"):
        rows = np.loadtxt(f"val.{name}.log", comments="#")
        best = int(rows[rows[:, 1].argmin(), 0])
        assert Path(f"best.{name}.ckpt-{best}.t-1.pt").is_file()
    infos = load()["model"]["_extra_state"]["train_infos"]["full_validation_of_branches"]
    assert infos.keys() == {"hot", "cold"}


@pytest.mark.parametrize(
    "kind",
    [
        "se_e2_a",
        pytest.param("dpa1", marks=pytest.mark.slow),
        pytest.param("dpa3", marks=pytest.mark.slow),
    ],
)
def test_commands_take_a_branch(two_branches, train, caplog, kind):
    assert train(two_branches(DESCRIPTORS[kind], numb_steps=3, enable_ema=True)) == 0
    (system,) = open_systems(COLD, ["Cu"])
    frames = system.frames(np.arange(2))
    found = {
        name: Predictor("model.ckpt.pt", head=name).evaluate(frames).energy
        for name in ("hot", "cold")
    }
    assert not np.allclose(found["hot"], found["cold"])
    assert not np.allclose(
        Predictor("model.ckpt.pt", head="hot", ema=True).evaluate(frames).energy, found["hot"]
    )
    for name, energy in found.items():
        assert run_dp(f"--pt freeze -c model.ckpt.pt -o {name} --head {name} -v ERROR") == 0
        np.testing.assert_allclose(
            Predictor(f"{name}.pth").evaluate(frames).energy, energy, rtol=1e-12
        )
    assert run_dp(f"--pt test -m model.ckpt.pt -s {COLD} --head cold -n 2 -d of") == 0
    np.testing.assert_allclose(np.loadtxt("of.e.out")[:, 1], found["cold"], rtol=1e-9)
    for option in ("--head", "--model-branch"):
        assert run_dp(f"--pt change-bias model.ckpt.pt -b -1 -o moved.pt {option} hot") == 0
    assert float(load_model("moved.pt", head="hot").atomic_model.out_bias) == -1.0
    assert float(load_model("moved.pt", head="cold").atomic_model.out_bias) != -1.0
    devi = ["--pt", "model-devi", "-m", "model.ckpt.pt", "moved.pt", "-s", COLD, "-o", "devi"]
    assert main([*devi, "--head", "hot"]) == 0
    assert not np.loadtxt("devi")[:, 1:7].any()  # a bias moves no force
    assert main(devi) == 2


def test_epochs_of_branches_give_length_and_probabilities(two_branches, train, monkeypatch):
    seen = []
    original = trainer.length_and_probabilities

    def noted(*parts):
        seen.append(original(*parts))
        return seen[-1]

    monkeypatch.setattr(trainer, "length_and_probabilities", noted)
    content = two_branches()
    for key in ("numb_steps", "model_prob"):
        del content["training"][key]
    content["training"]["num_epoch_dict"] = {"hot": 0.25, "cold": 0.1}
    assert train(content) == 0
    (frames,) = {system.nframes for path in (HOT, COLD) for system in open_systems(path, ["Cu"])}
    steps = {"hot": 0.25 * frames / 2, "cold": 0.1 * frames}
    length, shares = seen[0]
    assert length == sum(steps.values())
    assert shares == pytest.approx({name: x / length for name, x in steps.items()})


def test_kept_statistics_depend_on_the_data_of_all_that_share(two_branches, train, caplog):
    content = two_branches(numb_steps=0)
    for name, data in content["training"]["data_dict"].items():
        data["stat_file"] = f"{name}.hdf5"
    for expected in (0, 2):
        caplog.clear()
        assert train(content, log_level="INFO") == 0
        assert len(re.findall("statistics come from", caplog.text)) == expected
    content["training"]["data_dict"]["cold"]["training_data"]["batch_size"] = 3
    caplog.clear()
    assert train(content, log_level="INFO") == 0
    assert "statistics come from" not in caplog.text


def test_show_lists_the_branches(two_branches, train, capsys):
    content = two_branches(numb_steps=1)
    content["model"]["model_dict"]["cold"]["model_branch_alias"] = ["ice", "snow"]
    assert train(content) == 0
    assert run_dp("--pt show model.ckpt.pt model-branch type-map size observed-type") == 0
    told = capsys.readouterr().err
    assert "['hot', 'cold', 'RANDOM']" in told
    assert "| cold         | ice, snow |" in told
    assert "The type_map of branch hot is ['Cu']" in told
    assert "cold: Observed types: ['Cu']" in told
    single = load_model("model.ckpt.pt", head="snow")
    assert f"total: {sum(p.numel() for p in single.parameters()):,}" in told


def states(content):
    """Return the optimizer state by name of the parameter."""
    optimizer = content["optimizer"]
    names = optimizer["param_groups"][0]["param_names"]
    found = {name: optimizer["state"].get(index, {}) for index, name in enumerate(names)}
    return {
        name: {key: torch.as_tensor(x) for key, x in values.items()}
        for name, values in found.items()
        if values
    }


def branch_sections(content):
    """Return the sections of an input with an entry for each branch."""
    return content["model"]["model_dict"], content["loss_dict"], content["training"]["data_dict"]


def without_steps(content, **training):
    """Let a run end where it begins, so that its checkpoint holds what it has loaded."""
    return {**content, "training": {**content["training"], "save_ckpt": "next/model", **training}}


@pytest.mark.parametrize("optimizer", ["HybridMuon", "Adam"])
def test_a_renamed_branch_keeps_its_state_and_place(two_branches, train, load, optimizer):
    content = two_branches(numb_steps=6, enable_ema=True)
    content["optimizer"] = {"type": optimizer}
    assert train(content) == 0
    before = load()
    for section in branch_sections(content):
        section["warm"] = section.pop("hot")
    content["training"]["model_prob"] = {"warm": 2, "cold": 1}
    content["model"]["model_dict"]["warm"]["model_branch_alias"] = ["hot"]
    assert train(without_steps(content), restart="model.ckpt-6.pt") == 0
    after = load("next/model.pt")
    assert same(branch(before, "hot"), branch(after, "warm"))
    known = states(before)
    for name, values in states(after).items():
        # The shared descriptor is named after the first branch, now cold.
        former = name.replace("warm.", "hot.").replace(f"cold.{DESCRIPTOR}", f"hot.{DESCRIPTOR}")
        assert same(known.pop(former), values), name
    assert not known
    average = {
        name.replace("warm.", "hot."): x for name, x in after["ema"]["model"].items() if x.numel()
    }
    assert same({name: x for name, x in before["ema"]["model"].items() if x.numel()}, average)
    positions = [content["deepmd_muon"]["training_data"] for content in (before, after)]
    assert positions[0]["hot"]["step"] == positions[1]["warm"]["step"] > 0


def test_an_added_branch_starts_anew_and_a_dropped_one_is_gone(two_branches, train, load, caplog):
    content = two_branches(numb_steps=6)
    assert train(content) == 0
    before, first = load(), json.loads(json.dumps(content))
    model = content["model"]["model_dict"]
    model["new"] = {**model["hot"], "fitting_net": {**model["hot"]["fitting_net"], "seed": 9}}
    content["loss_dict"]["new"] = content["loss_dict"]["hot"]
    content["training"]["data_dict"]["new"] = content["training"]["data_dict"]["cold"]
    content["training"]["model_prob"] = {"hot": 0, "cold": 0, "new": 1}
    assert train(without_steps(content, numb_steps=8), restart="model.ckpt-6.pt") == 0
    after = load("next/model.pt")
    assert same(below(branch(after, "cold"), FITTING), below(branch(before, "cold"), FITTING))
    assert same(below(branch(after, "new"), DESCRIPTOR), below(branch(after, "hot"), DESCRIPTOR))
    found, known = states(after), states(before)
    kept = {name for name in known if FITTING in name}
    assert all(same(found[name], known[name]) for name in kept)
    heads = {name for name in found if name.startswith(f"new.{FITTING}")}
    steps = [int(found[name]["step"]) for name in heads if "step" in found[name]]
    assert set(steps) == {2}
    # Back to the two: the third one's state goes, the others' stays.
    again = without_steps(first, numb_steps=8, save_ckpt="again/model")
    assert train(again, restart="next/model-8.pt") == 0
    for name, values in states(load("again/model.pt")).items():
        assert same(values, found[name])


@pytest.mark.parametrize("optimizer", ["HybridMuon", "Adam"])
def test_from_one_model_to_several_and_back(two_branches, small_input, train, load, optimizer):
    single = small_input(training={"numb_steps": 6, "save_ckpt": "one"})
    single["model"]["descriptor"] = DESCRIPTORS["se_e2_a"]
    single["optimizer"] = {"type": optimizer}
    assert train(single) == 0
    one = load("one.pt")
    content = two_branches(numb_steps=6)
    content["optimizer"] = {"type": optimizer}
    content["model"]["model_dict"]["cold"]["finetune_head"] = "Default"  # hot is new
    assert train(without_steps(content), restart="one-6.pt") == 0
    both = load("next/model.pt")
    assert same(branch(one, "Default"), branch(both, "cold"))
    known, found = states(one), states(both)
    assert len(found) == len(known)
    for name, values in found.items():
        assert same(known[name.partition(".")[2]], values), name
    assert not [name for name in found if name.startswith(f"hot.{FITTING}")]
    single["training"]["save_ckpt"] = "back/model"
    assert train(single, restart="next/model-6.pt", model_branch="cold") == 0
    back = load("back/model.pt")
    assert same(branch(one, "Default"), branch(back, "Default"))
    assert dict.fromkeys(states(back), 0) == dict.fromkeys(known, 0)
    assert all(same(values, known[name]) for name, values in states(back).items())


def test_a_checkpoint_without_these_branches_is_refused(two_branches, train):
    content = two_branches(numb_steps=2, save_freq=2)
    assert train(content) == 0
    for section in branch_sections(content):
        section["a"], section["b"] = section.pop("hot"), section.pop("cold")
    content["training"]["model_prob"] = {"a": 1, "b": 1}
    with pytest.raises(
        CheckpointError, match="has the branches hot, cold, and this input none of them"
    ):
        train(content, restart="model.ckpt-2.pt")


def test_the_routing_table_says_what_is_shared(two_branches, train, capsys):
    content = two_branches(numb_steps=1)
    assert train(content) == 0
    count = len(list(load_model("model.ckpt.pt", head="hot").atomic_model.descriptor.parameters()))
    for path in ("input.json", "model.ckpt.pt"):
        assert main(["show", "routing", path]) == 0
        table = capsys.readouterr().out
        assert f"{count} parameters of hot are those of cold as well" in table
        assert f"cold.{DESCRIPTOR}" not in table
        assert f"cold.{FITTING}" in table


def test_a_pattern_on_any_branch_finds_a_shared_parameter(two_branches, train, load):
    content = two_branches(numb_steps=1)
    content["optimizer"]["adam_patterns"] = [
        "cold.*descriptor*.layers.1.matrix",
        "cold.*fitting*.layers.0.*",
    ]
    assert train(content) == 0
    (group,) = load()["optimizer"]["param_groups"]
    routes = {entry.name: entry.route for entry in RouteTable.from_groups([group])}
    name = f"{DESCRIPTOR}sea.filter_layers.networks.0.layers.1.matrix"
    assert routes[f"hot.{name}"] == "adam"
    net = f"{FITTING}filter_layers.networks.0.layers.0.matrix"
    assert (routes[f"hot.{net}"], routes[f"cold.{net}"]) == ("muon", "adam")


def test_a_new_branch_shares_what_the_script_of_another_says(two_branches, train, load):
    content = two_branches(DESCRIPTORS["dpa1"], numb_steps=1)
    assert train(content) == 0
    model = content["model"]["model_dict"]
    content["model"]["model_dict"] = {"new": model["cold"], "hot": model["hot"]}
    content["model"]["shared_dict"]["all"] = {"type": "dpa1", "sel": "auto", "rcut": 4.0}
    content["loss_dict"]["new"] = content["loss_dict"].pop("cold")
    data = content["training"]["data_dict"]
    data["new"] = data.pop("cold")
    content["training"] |= {
        "model_prob": {"hot": 1, "new": 1},
        "numb_steps": 0,
        "save_ckpt": "next",
    }
    assert train(content, init_model="model.ckpt.pt", use_pretrain_script=True) == 0
    out = json.loads(Path("out.json").read_text())
    assert out["model"]["shared_dict"]["all"]["neuron"] == DESCRIPTORS["dpa1"]["neuron"]
    before, after = load("model.ckpt-1.pt"), load("next.pt")
    assert same(below(branch(before, "hot"), DESCRIPTOR), below(branch(after, "new"), DESCRIPTOR))
