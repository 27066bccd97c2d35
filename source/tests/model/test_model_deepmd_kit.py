"""deepmd-kit reads our checkpoints."""

import json

import numpy as np
import pytest
import torch
from deepmd_kit_program import MARKS, dp
from model_batches import make_batch, read_fixture, section, write_system

from deepmd_muon.loss import ComparedAtoms, build_loss
from deepmd_muon.model import build_model
from deepmd_muon.model.deepmd_kit import to_deepmd_kit
from deepmd_muon.section import thaw

pytestmark = MARKS

PAIR_NETS = {"type_one_side": False, "exclude_types": [[0, 0]], "neuron": [4, 8, 8, 16]}
ATTENTION = {"sel": 70, "rcut": 4.0, "attn": 8, "seed": 3}
SETTINGS = {
    "one_side": {},
    "pair_nets": {
        "descriptor": {**PAIR_NETS, "resnet_dt": True},
        "fitting_net": {"atom_ener": [-3.0, None]},
    },
    "float32": {"descriptor": {"precision": "float32"}, "fitting_net": {"precision": "float32"}},
    "dpa1": {"descriptor": {"type": "se_atten", "type_one_side": True, **ATTENTION}},
    "dpa1_v2": {"descriptor": {"type": "se_atten_v2", **ATTENTION}},
}


@pytest.fixture(params=SETTINGS, scope="module")
def case(request, tmp_path_factory):
    """A folder with a system of random labels and our checkpoint, and our own prediction."""
    folder = tmp_path_factory.mktemp(request.param)
    data = read_fixture()["structures"]["orthorhombic"]
    labels = write_system(folder / "system", data)
    model = build_model(section(**SETTINGS[request.param]))
    # with every default: deepmd-kit's classes have others than its input check
    built = thaw(model.settings)
    angular = [0.12] * 3
    model.set_statistics(
        torch.tensor([[0.11, 0, 0, 0], [0.09, 0, 0, 0]]).double(),
        torch.tensor([[0.2, *angular], [0.17, *angular]]).double(),
    )
    model.set_energy_bias([-3.0, 1.0])
    # --init-model asks for the key "optimizer", not for what it holds
    content = {"model": to_deepmd_kit(model, {"lr": 1e-3, "step": 0}), "optimizer": {}}
    torch.save(content, folder / "model.ckpt.pt")
    with torch.no_grad():
        types = None if model.by_type else model.ntypes
        frames = (data["coord"], data["atype"], data["box"])
        prediction = model(make_batch(*frames, model.rcut, model.sel, ntypes=types))
    tolerance = 2e-4 if request.param == "float32" else 1e-8
    return folder, built, labels, prediction, tolerance


def compare(folder, model_file, prediction, tolerance):
    dp("test", "-m", model_file, "-s", "system", "-d", "detail", folder=folder)
    energy, force, virial = (np.loadtxt(folder / f"detail.{kind}.out") for kind in ("e", "f", "v"))
    np.testing.assert_allclose(
        energy[:, 1], prediction["energy"], rtol=2e-6 if tolerance > 1e-6 else 1e-10
    )
    np.testing.assert_allclose(force[:, 3:], prediction["force"].reshape(-1, 3), atol=tolerance)
    np.testing.assert_allclose(virial[:, 9:], prediction["virial"], atol=tolerance)


def test_dp_test_reads_our_checkpoint(case):
    folder, _, _, prediction, tolerance = case
    compare(folder, "model.ckpt.pt", prediction, tolerance)


def test_dp_freeze_takes_our_checkpoint(case):
    folder, _, _, prediction, tolerance = case
    dp("freeze", "-c", "model.ckpt.pt", "-o", "frozen.pth", folder=folder)
    compare(folder, "frozen.pth", prediction, tolerance)


def test_dp_train_goes_on_from_our_checkpoint(case):
    """Its first step reports the errors that our model has before any update."""
    folder, built, labels, prediction, _ = case
    starts = {"start_pref_e": 0.02, "start_pref_f": 1000, "start_pref_v": 0.1}
    prefactors = {**starts, "limit_pref_e": 1, "limit_pref_f": 1, "limit_pref_v": 1}
    data = {"systems": ["system"], "batch_size": 2}
    training = {"training_data": data, "numb_steps": 2, "seed": 1, "disp_freq": 1, "save_freq": 2}
    rate = {"type": "exp", "start_lr": 1e-3, "stop_lr": 1e-4, "decay_steps": 10}
    # its input check takes no null for a key without a default
    given_keys = {key: value for key, value in built["descriptor"].items() if value is not None}
    given = {
        "model": {**built, "descriptor": given_keys},
        "learning_rate": rate,
        "loss": prefactors,
        "training": training,
    }
    (folder / "input.json").write_text(json.dumps(given))
    words = "train input.json --init-model model.ckpt.pt --skip-neighbor-stat"
    dp(*words.split(), folder=folder)
    columns = (folder / "lcurve.out").read_text().splitlines()[0].split()[1:]
    first = dict(zip(columns, np.atleast_2d(np.loadtxt(folder / "lcurve.out"))[0], strict=True))
    label = {key: torch.from_numpy(np.asarray(value)) for key, value in labels.items()}
    natoms = prediction["force"].shape[1]
    atoms = ComparedAtoms(torch.zeros(len(prediction["energy"]), natoms, dtype=torch.int64))
    _, metrics = build_loss(prefactors, built["type_map"])(prediction, label, 1.0, atoms)
    for name in ("rmse_e", "rmse_f", "rmse_v"):
        key = next(column for column in (f"{name}_trn", name) if column in first)
        assert first[key] == pytest.approx(metrics[name].item(), rel=6e-3), name
