"""deepmd-kit's own `ener` examples of our descriptors: `DEEPMD_KIT_EXAMPLES=…/examples pytest -m deepmd_kit`."""

import json
import os
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from deepmd_muon.argcheck import DeepmdKitOnlyError, InputError, load
from deepmd_muon.cli.main import main
from deepmd_muon.model.registry import DESCRIPTORS
from deepmd_muon.model.settings import HostedSettings

pytestmark = [
    pytest.mark.deepmd_kit,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(
        "DEEPMD_KIT_EXAMPLES" not in os.environ, reason="DEEPMD_KIT_EXAMPLES names no examples"
    ),
]
EXAMPLES = Path(os.environ.get("DEEPMD_KIT_EXAMPLES", "."))
# What each of the others asks for that this package does not have.
REFUSED = {
    "spin/se_e2_a/input_tf.json": "spin",
    "water/dplr/train/ener.json": "modifier",
    "water/se_e2_a_mixed_prec/input.json": "mixed_precision",
}
# Neither input nor data name the elements; deepmd-kit's PyTorch backend stops with a KeyError. Later revisions lack the
# second.
NAMELESS = ("fparam/train/input_aparam.json", "fparam/train/input_v2_compat.json")


# Energy models that deepmd-kit's modules compute here.
HOSTED = (
    "spin/dpa4/input-deepspin.json",
    "spin/dpa4/input.json",
    "spin/se_e2_a/input_torch.json",
    "water/d3/input_pt.json",
    "water/dpa2/input_torch_compressible.json",
    "water/dpa2/input_torch_large.json",
    "water/dpa2/input_torch_medium.json",
    "water/dpa2/input_torch_small.json",
    "water/dpa4/input-zbl.json",
    "water/dpa4/input.json",
    "water/dpa4/input_multitask.json",
    "water/dpa4/lmp/input.json",
    "water/dpa4/lora_ft.json",
    "water/hybrid/input.json",
    "water/linear/input_pt.json",
    "water/se_e2_r/input.json",
    "water/se_e3/input.json",
    "water/se_e3_tebd/input_torch.json",
    "water_multi_task/pytorch_example/input_torch.json",
    "water_multi_task/pytorch_example/input_torch_num_epoch_dict.json",
    "water_multi_task/pytorch_example/input_torch_sharefit.json",
)


def inputs():
    """Return the inputs with the energy fitting net and one of our descriptors."""
    found = {}
    for path in sorted(EXAMPLES.rglob("*.json")) if "DEEPMD_KIT_EXAMPLES" in os.environ else []:
        content = json.loads(path.read_text())
        model = content.get("model", {}) if isinstance(content, dict) else {}
        ours = model.get("descriptor", {}).get("type") in DESCRIPTORS.names()
        if (
            "training" in content
            and ours
            and model.get("fitting_net", {}).get("type", "ener") == "ener"
        ):
            found[path.relative_to(EXAMPLES).as_posix()] = content
    return found


INPUTS = inputs()


def shortened(name, folder):
    """Return the input of two steps of one frame each, whose outputs are in a folder."""
    content = json.loads((EXAMPLES / name).read_text())
    left_out = ("stat_file", "stop_batch", "tensorboard")
    training = {
        key: x
        for key, x in content["training"].items()
        if "epoch" not in key and key not in left_out
    }
    training.update(
        numb_steps=2,
        disp_freq=1,
        save_ckpt=str(folder / "model"),
        disp_file=str(folder / "lcurve"),
    )
    for data in (training, *training.get("data_dict", {}).values()):
        data.pop("stat_file", None)
        for section in ("training_data", "validation_data"):
            if section in data:
                data[section]["batch_size"] = 1
                data[section].pop("numb_btch", None)
    rates = {key: x for key, x in content["learning_rate"].items() if "warmup" not in key}
    return {**content, "learning_rate": rates, "training": training}


@pytest.mark.parametrize(
    "name", [*(name for name in INPUTS if name not in (*REFUSED, *NAMELESS, *HOSTED)), *HOSTED]
)
def test_an_example_trains_two_steps(name, tmp_path, monkeypatch):
    if name in HOSTED and find_spec("deepmd") is None:
        pytest.skip("deepmd-kit is not importable here")
    path = tmp_path / "input.json"
    content = shortened(name, tmp_path)
    path.write_text(json.dumps(content))
    monkeypatch.chdir((EXAMPLES / name).parent)  # its systems are relative to it
    assert main(["--pt", "train", str(path), "-o", str(tmp_path / "out.json"), "-v", "ERROR"]) == 0
    names = (tmp_path / "lcurve").read_text().splitlines()[0].split()[1:]
    columns = dict(zip(names, np.loadtxt(tmp_path / "lcurve", ndmin=2).T, strict=True))
    assert columns["step"].tolist() == [1, 2]
    # Some ask for virials that their data lack. A step trains one branch of several.
    if "data_dict" not in content["training"]:
        of_virials = ("rmse_v_", "mae_v_")
        for column, values in columns.items():
            assert np.isfinite(values).all() or column.startswith(of_virials), column


@pytest.mark.skipif(find_spec("deepmd") is None, reason="deepmd-kit is not importable here")
def test_every_energy_model_is_accepted():
    """Others ask for other labels, for features of deepmd-kit's trainer, or for TensorFlow."""
    kinds = {"native": set(), "hosted": set(), "handed over": set()}
    for path in sorted(EXAMPLES.rglob("*.json")):
        content = json.loads(path.read_text())
        if isinstance(content, dict) and {"model", "training"} <= content.keys():
            name = path.relative_to(EXAMPLES).as_posix()
            try:
                branches = load(path).branches.values()
            except DeepmdKitOnlyError:
                kinds["handed over"].add(name)
                continue
            hosted = any(isinstance(branch.model, HostedSettings) for branch in branches)
            kinds["hosted" if hosted else "native"].add(name)
    assert len(kinds["native"]) >= 15
    assert kinds["hosted"] >= set(HOSTED)


@pytest.mark.parametrize("name", REFUSED)
def test_names_what_this_package_lacks(name):
    with pytest.raises(InputError, match=REFUSED[name]):
        load(EXAMPLES / name)


def test_atomic_parameters_in_one_row(tmp_path, monkeypatch):
    """`aparam.npy` has shape (1, 5400) for 100 frames of 54 atoms."""
    content = INPUTS["fparam/train/input_aparam.json"]
    training = {key: x for key, x in content["training"].items() if key != "stop_batch"}
    training.update(
        numb_steps=2,
        disp_freq=1,
        save_ckpt=str(tmp_path / "model"),
        disp_file=str(tmp_path / "lcurve"),
    )
    path = tmp_path / "input.json"
    path.write_text(
        json.dumps(
            {**content, "model": {**content["model"], "type_map": ["W"]}, "training": training}
        )
    )
    monkeypatch.chdir(EXAMPLES / "fparam" / "train")
    assert main(["--pt", "train", str(path), "-o", str(tmp_path / "out.json"), "-v", "ERROR"]) == 0
    assert np.isfinite(np.loadtxt(tmp_path / "lcurve")).all()


@pytest.mark.parametrize("name", [name for name in NAMELESS if name in INPUTS])
def test_an_example_without_elements_is_refused(name, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir((EXAMPLES / name).parent)
    assert (
        main(["--pt", "train", Path(name).name, "-o", str(tmp_path / "out.json"), "-v", "ERROR"])
        == 2
    )
    assert "type map" in capsys.readouterr().err


def test_all_descriptors_have_examples():
    kinds = {INPUTS[name]["model"]["descriptor"]["type"] for name in INPUTS if name not in REFUSED}
    assert kinds >= {"se_e2_a", "dpa1", "se_atten", "se_atten_v2", "dpa3"}
