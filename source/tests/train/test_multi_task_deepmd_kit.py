"""Several models here and in deepmd-kit 3.2.0: equal losses, and files that both continue (`pytest -m deepmd_kit`)."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from deepmd_kit_program import MARKS, dp, python
from test_multi_task import COLD, DESCRIPTORS, EXAMPLE, branch

from deepmd_muon.cli.main import main
from deepmd_muon.data import open_systems
from deepmd_muon.infer.predictor import Predictor

pytestmark = MARKS
STEPS = 20


def write(content, name):
    Path(name).write_text(json.dumps(content))
    return name


def one_frame(place, system, number):
    """Copy a frame of a system, so that there is one order of the data only."""
    source, folder = Path(system), Path(place)
    (folder / "set.000").mkdir(parents=True)
    for name in ("type.raw", "type_map.raw", "nopbc"):
        if (source / name).exists():
            shutil.copy(source / name, folder)
    for path in (source / "set.000").glob("*.npy"):
        np.save(folder / "set.000" / path.name, np.load(path)[number : number + 1])
    return str(folder)


# The structures of deepmd-kit's examples water_multi_task/pytorch_example/*.json.
STRUCTURES = (
    "input_torch",
    "input_torch_sharefit",
    "input_torch_with_alias",
    "input_torch_num_epoch_dict",
)


def structured(two_branches, structure, kind):
    """Return an input as one of the examples is built, with one of our descriptors; data have one batch a branch."""
    shared = structure in ("input_torch_sharefit", "input_torch_with_alias")
    content = two_branches(
        DESCRIPTORS[kind], net={"dim_case_embd": 2} if shared else None, disp_freq=1
    )
    branches, training = content["model"]["model_dict"], content["training"]
    if structure == "input_torch_with_alias":
        branches["hot"] |= {
            "model_branch_alias": ["Default", "Metal"],
            "info": {"observed_type": ["Cu"]},
        }
        branches["cold"]["model_branch_alias"] = ["Metal2"]
    if structure == "input_torch_num_epoch_dict":
        del training["model_prob"], training["numb_steps"]
        training["num_epoch_dict"] = {"hot": STEPS / 2, "cold": STEPS / 2}
    else:
        training |= {"numb_steps": STEPS, "model_prob": {"hot": 0.5, "cold": 0.5}}
    return content


@pytest.mark.parametrize("kind", DESCRIPTORS)
@pytest.mark.parametrize("structure", STRUCTURES)
def test_losses_are_equal_for_equal_weights_and_tasks(two_branches, train, load, structure, kind):
    content = structured(two_branches, structure, kind)
    content["optimizer"] = {"type": "Adam"}
    training = content["training"]
    for number, data in enumerate(training["data_dict"].values()):
        data.pop("validation_data", None)
        data["training_data"] = {
            "systems": [one_frame(f"frame_{number}", COLD, number)],
            "batch_size": 1,
        }
    start = json.loads(json.dumps(content))
    start["training"] |= {
        "numb_steps": 0,
        "save_ckpt": "start",
        "model_prob": {"hot": 1, "cold": 1},
    }
    start["training"].pop("num_epoch_dict", None)
    assert train(start, skip_neighbor_stat=True) == 0
    ours = json.loads(json.dumps(content))
    ours["training"] |= {"jsonl_file": "ours.jsonl", "interpolate_embedding": False}
    assert train(ours, init_model="start.pt", skip_neighbor_stat=True) == 0
    rows = [json.loads(line) for line in Path("ours.jsonl").read_text().splitlines()]
    tasks = [0 if row["rmse_f_trn_hot"] is not None else 1 for row in rows]
    assert 0 < sum(tasks) < STEPS == len(tasks)
    words = [
        "order.json",
        "theirs.json",
        "train",
        write(content, "kit.json"),
        "--init-model",
        "start.pt",
    ]
    write(tasks, "order.json")
    python(Path(__file__).with_name("multi_task_in_deepmd_kit.py"), *words, "--skip-neighbor-stat")
    theirs = json.loads(Path("theirs.json").read_text())
    assert len(theirs) == STEPS
    for task, row, found in zip(tasks, rows, theirs, strict=True):
        name = ("hot", "cold")[task]
        assert row["lr"] == pytest.approx(found["lr"], rel=1e-12)
        for error in ("rmse", "rmse_e", "rmse_f"):
            assert row[f"{error}_trn_{name}"] == pytest.approx(found[name][error], rel=1e-6), (
                error,
                row["step"],
            )


@pytest.mark.parametrize(
    ("kind", "level", "optimizer"),
    [("se_e2_a", "", "HybridMuon"), ("dpa1", ":1", "Adam"), ("dpa3", "", "HybridMuon")],
)
def test_both_continue_what_the_other_saved(two_branches, train, load, kind, level, optimizer):
    precision = (
        "float32" if optimizer == "HybridMuon" else "float64"
    )  # its HybridMuon restarts no float64 models
    content = two_branches(DESCRIPTORS[kind], level=level, numb_steps=3, save_freq=3)
    content["optimizer"] = {
        "type": optimizer,
        **({"lr_adjust_coeff": 0.18} if optimizer == "HybridMuon" else {}),
    }
    content["model"]["shared_dict"]["all"]["precision"] = precision
    for model in content["model"]["model_dict"].values():
        model["fitting_net"]["precision"] = precision
    assert train(content, skip_neighbor_stat=True) == 0
    tolerance = 1e-4 if precision == "float32" else 1e-9
    (system,) = open_systems(COLD, ["Cu"])
    frames = system.frames(np.arange(2))
    for head in ("hot", "cold"):
        dp("test", "-m", "model.ckpt.pt", "-s", COLD, "--head", head, "-n", "2", "-d", head)
        force = Predictor("model.ckpt.pt", head=head).evaluate(frames).force.reshape(-1, 3)
        np.testing.assert_allclose(np.loadtxt(f"{head}.f.out")[:, 3:], force, atol=tolerance)
    dp("freeze", "-c", "model.ckpt.pt", "-o", "theirs.pth", "--head", "cold")
    assert "'hot', 'cold', 'RANDOM'" in dp("show", "model.ckpt.pt", "model-branch")
    # Theirs on ours, ours on theirs.
    content["training"] |= {"numb_steps": 6, "save_freq": 6}
    dp("train", write(content, "six.json"), "--restart", "model.ckpt-3.pt", "--skip-neighbor-stat")
    content["training"] |= {"numb_steps": 8, "save_ckpt": "third"}
    assert train(content, restart="model.ckpt-6.pt", skip_neighbor_stat=True) == 0
    assert load("third.pt")["deepmd_muon"]["step"] == 8
    steps = {int(x["step"]) for x in load("third.pt")["optimizer"]["state"].values() if "step" in x}
    assert max(steps) <= 9  # it takes the third step again
    content["training"] |= {"numb_steps": 2, "save_ckpt": "fine"}
    dp("train", write(content, "fine.json"), "--finetune", "third-8.pt", "--skip-neighbor-stat")
    content["model"]["model_dict"]["hot"]["finetune_head"] = "cold"
    content["training"] |= {"numb_steps": 0, "save_ckpt": "from_theirs"}
    assert train(content, finetune="fine-2.pt", skip_neighbor_stat=True) == 0
    before, after = load("fine-2.pt"), load("from_theirs.pt")
    layers = "atomic_model.fitting_net.filter_layers"
    taken = {name: x for name, x in branch(before, "cold").items() if name.startswith(layers)}
    assert all(
        torch.equal(branch(after, name)[key], x)
        for name in ("hot", "cold")
        for key, x in taken.items()
    )


def test_one_model_takes_a_branch_as_deepmd_kit_does(two_branches, small_input, train, load):
    content = two_branches(numb_steps=2, save_freq=2)
    assert train(content) == 0
    single = small_input(training={"numb_steps": 0, "validation_data": None})
    single["model"]["descriptor"] = DESCRIPTORS["se_e2_a"]
    single["model"]["data_stat_nbatch"] = 20  # all frames
    single["training"]["training_data"]["systems"] = [str(EXAMPLE / "train" / "fcc32")]
    del single["training"]["validation_data"]
    found = []
    for name in ("ours", "theirs"):
        single["training"]["save_ckpt"] = name
        words = [
            write(single, f"{name}.json"),
            "--finetune",
            "model.ckpt-2.pt",
            "--model-branch",
            "cold",
        ]
        if name == "ours":
            assert main(["--pt", "train", *words, "--skip-neighbor-stat", "-v", "ERROR"]) == 0
        else:
            dp("train", *words, "--skip-neighbor-stat")
        found.append(branch(load(f"{name}-0.pt"), "Default"))
    assert found[0].keys() <= found[1].keys()
    del found[0]["atomic_model.out_std"]  # which no energy reads
    for name, values in found[0].items():
        torch.testing.assert_close(values, found[1][name], rtol=0, atol=1e-9, msg=name)
