"""Fine-tuning with replay: the run it makes, the data it draws, what it keeps, restarts and files."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from commands import run_dp

from deepmd_muon.argcheck import InputError, load
from deepmd_muon.cli.main import main
from deepmd_muon.data import open_systems
from deepmd_muon.infer.predictor import Predictor
from deepmd_muon.replay.prepare import prepare
from deepmd_muon.replay.structures import ReplayError, as_systems, choose_starts, draw, strained

EXAMPLE = Path(__file__).parents[3] / "examples" / "cu_emt" / "data"
OLD, NEW = (str(EXAMPLE / "train" / name) for name in ("fcc32", "triclinic8"))
DESCRIPTOR, FITTING = "atomic_model.descriptor.", "atomic_model.fitting_net."
DRAWN = {"frames": 40, "temperatures": [50, 300], "steps": 8}


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    return tmp_path_factory.mktemp("old") / "old.pt"


@pytest.fixture
def finetuning(small_input, train, kept):
    """The input of a fine-tuning run whose checkpoint, old.pt, is there."""
    if not kept.exists():
        old = small_input(training={"numb_steps": 60, "save_freq": 60, "save_ckpt": "old"})
        old["training"]["training_data"] = {"systems": OLD, "batch_size": 2}
        assert train(old, output="old.json") == 0
        shutil.copy("old.pt", kept)
        for path in Path().iterdir():
            path.unlink()
    shutil.copy(kept, "old.pt")
    content = small_input(training={"numb_steps": 6, "save_freq": 3})
    content["training"]["training_data"] = {"systems": NEW, "batch_size": 2}
    content["replay"] = dict(DRAWN)
    Path("input.json").write_text(json.dumps(content))
    return content


def finetune(content, *, replay=("pseudo",), output="out.json"):
    Path("input.json").write_text(json.dumps(content))
    named = f"--replay {' '.join(replay)}" if replay else ""
    return run_dp(f"train input.json --finetune old.pt {named} -o {output} -v ERROR")


def state_of(path, head):
    """Return the state of a branch, under its names in a single model."""
    found, prefix = torch.load(path, weights_only=True)["model"], f"model.{head}."
    return {name.removeprefix(prefix): x for name, x in found.items() if name.startswith(prefix)}


def shared(path, part):
    one, other = (state_of(path, head) for head in ("finetuned", "replay"))
    return all(torch.equal(one[name], other[name]) for name in one if name.startswith(part))


@pytest.mark.parametrize("one_net", [False, True])
def test_a_run_with_replay_has_two_branches(finetuning, one_net):
    finetuning["replay"]["share_fitting_net"] = one_net
    assert finetune(finetuning) == 0
    out = json.loads(Path("out.json").read_text())
    assert out["training"]["model_prob"] == {"finetuned": 0.5, "replay": 0.5}
    assert out["model"]["model_dict"]["replay"]["descriptor"] == "descriptor"
    assert (out["model"]["model_dict"]["replay"]["fitting_net"] == "fitting_net") is one_net
    assert shared("model.ckpt.pt", DESCRIPTOR)
    assert shared("model.ckpt.pt", f"{FITTING}filter_layers") is one_net
    energies = [
        float(state_of("model.ckpt.pt", head)["atomic_model.out_bias"])
        for head in ("finetuned", "replay")
    ]
    assert energies[0] != energies[1]  # of atoms, fitted to the data of each


def test_both_branches_begin_as_the_checkpoint(finetuning):
    finetuning["training"]["numb_steps"] = 0
    assert finetune(finetuning) == 0
    old = state_of("old.pt", "Default")
    for head in ("finetuned", "replay"):
        found = state_of("model.ckpt.pt", head)
        differing = {name for name in old if not torch.equal(old[name], found[name])}
        assert "atomic_model.out_bias" in differing
        assert differing <= {"atomic_model.out_bias", "min_nbor_dist"}
    # Its own labels tell it nothing new.
    bias = state_of("model.ckpt.pt", "replay")["atomic_model.out_bias"]
    torch.testing.assert_close(bias, old["atomic_model.out_bias"], rtol=0, atol=1e-4)


def test_drawn_structures_have_the_checkpoints_labels(finetuning):
    assert finetune(finetuning) == 0
    places = sorted(Path().glob("model.ckpt.replay-*.hdf5"))
    assert [place.name.count("valid") for place in places] == [0, 1]
    counts = [
        sum(system.nframes for system in open_systems(str(place), ["Cu"])) for place in places
    ]
    assert counts == [36, 4]  # 10 walkers of four structures, one held out
    predictor = Predictor("old.pt")
    for place in places:
        for system in open_systems(str(place), ["Cu"]):
            frames = system.frames(np.arange(system.nframes))
            found = predictor.evaluate(frames)
            np.testing.assert_allclose(found.energy, frames.energy, rtol=1e-9)
            np.testing.assert_allclose(found.force, frames.force, atol=1e-7)
            np.testing.assert_allclose(found.virial.reshape(-1, 9), frames.virial, atol=1e-6)
    # Of the same checkpoint, data and settings, they are not drawn again.
    times = [place.stat().st_mtime_ns for place in places]
    assert finetune(finetuning) == 0
    assert [place.stat().st_mtime_ns for place in places] == times
    finetuning["replay"]["steps"] = 12
    assert finetune(finetuning) == 0
    assert len(list(Path().glob("model.ckpt.replay-*.hdf5"))) == 4


def test_restart_is_bitwise(finetuning, train):
    assert finetune(finetuning) == 0
    whole = state_of("model.ckpt-6.pt", "finetuned")
    out = json.loads(Path("out.json").read_text())
    out["training"]["save_ckpt"] = "again"
    assert train(out, restart="model.ckpt-3.pt") == 0
    again = state_of("again-6.pt", "finetuned")
    assert whole.keys() == again.keys()
    assert all(torch.equal(whole[name], again[name]) for name in whole)


def test_the_normalised_input_is_the_run(finetuning, train):
    assert finetune(finetuning) == 0
    first = state_of("model.ckpt-6.pt", "finetuned")
    out = json.loads(Path("out.json").read_text())
    out["training"]["save_ckpt"] = "again"
    assert train(out, finetune="old.pt", output="again.json") == 0
    second = state_of("again-6.pt", "finetuned")
    assert all(torch.equal(first[name], second[name]) for name in first)
    again = json.loads(Path("again.json").read_text())
    again["training"]["save_ckpt"] = "model.ckpt"
    assert again == json.loads(Path("out.json").read_text())


def test_the_model_alone_is_that_of_the_branch(finetuning):
    finetuning["training"]["enable_ema"] = True
    assert finetune(finetuning) == 0
    (system,) = open_systems(NEW, ["Cu"])
    frames = system.frames(np.arange(2))
    for ema in (False, True):
        branch = Predictor("model.ckpt.pt", head="finetuned", ema=ema).evaluate(frames).energy
        np.testing.assert_array_equal(
            Predictor("model.ckpt.finetuned.pt", ema=ema).evaluate(frames).energy, branch
        )
    plain = Predictor("model.ckpt.pt", head="finetuned").evaluate(frames).energy
    for source, options in (
        ("model.ckpt.finetuned.pt", []),
        ("model.ckpt.pt", ["--head", "finetuned"]),
    ):
        assert main(["--pt", "freeze", "-c", source, "-o", "frozen", *options, "-v", "ERROR"]) == 0
        np.testing.assert_allclose(
            Predictor("frozen.pth").evaluate(frames).energy, plain, rtol=1e-12
        )
    assert run_dp(f"--pt test -m model.ckpt.finetuned.pt -s {NEW} -n 2 -v ERROR") == 0
    # It can be fine-tuned again, and an earlier one is kept.
    assert finetune(finetuning, replay=(OLD,)) == 0
    assert len(list(Path().glob("model.ckpt.finetuned.pt.[0-9]"))) == 1
    Path("model.ckpt.finetuned.pt").rename("old.pt")
    assert finetune(finetuning, replay=(OLD,)) == 0


def test_old_data_are_replayed_in_their_proportion(finetuning):
    finetuning["replay"] = {
        "proportion": 0.25,
        "batch_size": 1,
        "validation_data": {"systems": OLD, "batch_size": 1},
    }
    finetuning["training"]["numb_steps"] = 200
    assert finetune(finetuning, replay=(OLD,)) == 0
    own = torch.load("model.ckpt.pt", weights_only=True)["deepmd_muon"]
    served = {name: state["step"] for name, state in own["training_data"].items()}
    assert served["finetuned"] + served["replay"] == 200
    assert 30 <= served["replay"] <= 70  # 50 ± 6
    header = Path("lcurve.out").read_text().splitlines()[0]
    assert "rmse_f_val_replay" in header
    assert not list(Path().glob("*.hdf5"))


def test_replay_keeps_old_errors(finetuning):
    """Physics in small: the old error grows less, and the new one falls nearly as much."""

    def errors(path):
        found = []
        for place in (OLD, NEW):
            (system,) = open_systems(place, ["Cu"])
            frames = system.frames(np.arange(8))
            found.append(np.abs(Predictor(path).evaluate(frames).force - frames.force).mean())
        return found

    finetuning["training"] |= {"numb_steps": 60, "save_freq": 60}
    before = errors("old.pt")
    assert finetune(finetuning, replay=()) == 0
    plain = errors("model.ckpt.pt")
    finetuning["training"]["numb_steps"] = 120
    assert finetune(finetuning, replay=(OLD,)) == 0
    replayed = errors("model.ckpt.finetuned.pt")
    assert plain[1] < before[1]
    assert replayed[1] < before[1]
    assert replayed[0] < plain[0]


def test_a_branch_of_several_is_fine_tuned(finetuning):
    assert finetune(finetuning) == 0
    Path("model.ckpt-6.pt").rename("old-several.pt")
    finetuning["training"]["save_ckpt"] = "second"
    Path("input.json").write_text(json.dumps(finetuning))
    with pytest.raises(ReplayError, match="finetuned, replay: name it with --model-branch"):
        prepare(load("input.json"), "old-several.pt", None, [OLD])
    command = f"train input.json --finetune old-several.pt --replay {OLD} -v ERROR"
    assert run_dp(f"{command} --model-branch replay") == 0
    branches = json.loads(Path("out.json").read_text())["model"]["model_dict"]
    assert branches["finetuned"]["finetune_head"] == "replay"


def test_plain_fine_tuning_warns(finetuning, train, caplog):
    assert train(finetuning, finetune="old.pt") == 0
    assert "--replay" in caplog.text
    caplog.clear()
    assert finetune(finetuning, replay=(OLD,)) == 0
    assert "--replay" not in caplog.text


def test_obstacles_are_reported_together(finetuning):
    finetuning["training"] |= {"numb_epoch": 1, "zero_stage": 2}
    finetuning["replay"]["share_fitting_net"] = False
    del finetuning["training"]["numb_steps"]
    finetuning["model"]["descriptor"]["trainable"] = False
    Path("input.json").write_text(json.dumps(finetuning))
    with pytest.raises(InputError) as found:
        prepare(load("input.json"), "old.pt", None, ["pseudo"])
    paths = {problem.path for problem in found.value.problems}
    assert paths == {"training/numb_epoch", "training/zero_stage", "model/descriptor/trainable"}
    finetuning["replay"]["share_fitting_net"] = True
    finetuning["training"] = {**finetuning["training"], "numb_steps": 2, "zero_stage": 0}
    del finetuning["training"]["numb_epoch"]
    assert finetune(finetuning, replay=(OLD,)) == 0
    assert shared("model.ckpt.pt", FITTING)


def test_settings_of_replay_are_checked(finetuning):
    finetuning["replay"] = {"proportion": 1.0, "frames": 1, "temperatures": []}
    finetuning["replay"] |= {"batch_size": "many", "share": True}
    Path("input.json").write_text(json.dumps(finetuning))
    with pytest.raises(InputError) as found:
        load("input.json")
    assert {problem.path for problem in found.value.problems} == {
        f"replay/{name}" for name in ("proportion", "frames", "temperatures", "batch_size", "share")
    }


def test_replay_needs_a_checkpoint_and_one_kind_of_data(finetuning, capsys):
    assert main(["--pt", "train", "input.json", "--replay", "pseudo"]) == 2
    assert "--finetune" in capsys.readouterr().err
    with pytest.raises(ReplayError, match="alone"):
        prepare(load("input.json"), "old.pt", None, ["pseudo", OLD])


def test_starts_come_from_all_systems_and_strain_keeps_fractions():
    systems = [*open_systems(OLD, ["Cu"]), *open_systems(NEW, ["Cu"])]
    starts = choose_starts(systems, 40, seed=1)
    sizes = (starts.atype >= 0).sum(1)
    assert set(sizes.tolist()) == {8, 32}
    moved = strained(starts, 0.02, seed=3)
    assert 0.01 < np.abs(np.linalg.det(moved.box) / np.linalg.det(starts.box) - 1).mean() < 0.1
    fractions = [
        frames.coord[k] @ np.linalg.inv(frames.box[k]) for frames in (starts, moved) for k in (0, 7)
    ]
    np.testing.assert_allclose(fractions[0], fractions[2], atol=1e-10)
    np.testing.assert_allclose(fractions[1], fractions[3], atol=1e-10)


def test_a_potential_that_blows_up_draws_nothing(finetuning):
    predictor = Predictor("old.pt")
    starts = choose_starts(open_systems(NEW, predictor.type_map), 4, seed=1)
    settings = {"temperatures": [300.0], "steps": 8, "strain": 0.02, "seed": 1}
    found = draw(predictor, starts, **settings)
    assert len(found) == 16
    (system,) = as_systems(found, predictor.type_map, "drawn")
    assert (system.nframes, system.natoms) == (16, 8)
    for steps in (7, 11):  # four structures of a walker whatever the number of steps
        assert len(draw(predictor, starts, **{**settings, "steps": steps})) == 16
    with pytest.raises(ReplayError, match="4 of 4 structures"):
        draw(predictor, starts, **{**settings, "temperatures": [1e8]})  # atoms jump over each other
