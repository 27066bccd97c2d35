"""Parameters and excluded types with deepmd-kit 3.2.0 itself, both ways."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from deepmd_kit_program import MARKS, dp, has_operators, python
from test_parameter_runs import DESCRIPTORS, FIXTURE, an_input, systems  # noqa: F401 (a fixture)

from deepmd_muon.cli.main import main
from deepmd_muon.data import open_systems, with_parameters
from deepmd_muon.infer import Predictor

pytestmark = MARKS

EVALUATE = """
import sys
import numpy as np
from ase import Atoms
from deepmd.calculator import DP
from deepmd.infer import DeepPot
given = np.load("given.npz")
out = {}
for name in sys.argv[1:]:
    potential = DeepPot(name)
    found = potential.eval(given["coord"], given["box"], given["atype"], fparam=given["fparam"], aparam=given["aparam"])
    out |= {f"{name} {key}": values for key, values in zip(("energy", "force", "virial"), found)}
    out[f"{name} numbers"] = [potential.get_dim_fparam(), potential.get_dim_aparam()]
    symbols = [potential.get_type_map()[kind] for kind in given["atype"]]
    atoms = Atoms(symbols, given["coord"][0].reshape(-1, 3), cell=given["box"][0].reshape(3, 3), pbc=True)
    atoms.info |= {"fparam": given["fparam"][0], "aparam": given["aparam"][0]}
    atoms.calc = DP(name)
    out[f"{name} ase"] = atoms.get_potential_energy()
np.savez("found.npz", **out)
"""


def expected_of(model, system):
    """Return the predictions for all frames of a system."""
    predictor = Predictor(model, device="cpu")
    (opened,) = with_parameters(open_systems(system, predictor.type_map), predictor.parameters)
    frames = opened.frames(range(opened.nframes))
    return frames, predictor.evaluate(frames)


def compare(model, system, prediction):
    dp("test", "-m", model, "-s", system, "-d", "theirs")
    energy, force, virial = (np.loadtxt(f"theirs.{kind}.out", ndmin=2) for kind in ("e", "f", "v"))
    np.testing.assert_allclose(energy[:, 1], prediction.energy, rtol=1e-10)
    np.testing.assert_allclose(force[:, 3:], prediction.force.reshape(-1, 3), rtol=0, atol=1e-10)
    np.testing.assert_allclose(virial[:, 9:], prediction.virial, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("kind", DESCRIPTORS)
def test_deepmd_kit_takes_our_files(kind, systems, train):  # noqa: F811
    """It tests, freezes and evaluates a checkpoint, and takes our frozen file for its own."""
    assert (
        train(an_input(f"{kind}-everything", systems, numb_steps=3), skip_neighbor_stat=True) == 0
    )
    frames, prediction = expected_of("model.ckpt.pt", systems[0])
    # Labels that the data lack make its table empty; virials are compared all the same.
    np.save(Path(systems[0], "set.000", "virial.npy"), np.zeros((2, 9)))
    compare("model.ckpt.pt", systems[0], prediction)
    dp("freeze", "-c", "model.ckpt.pt", "-o", "theirs.pth")
    assert main(["--pt", "freeze", "-o", "ours.pth", "-v", "ERROR"]) == 0
    box = frames.box.reshape(2, 9)
    given = {"coord": frames.coord.reshape(2, -1), "box": box, "atype": frames.atype[0]}
    np.savez("given.npz", **given, fparam=frames.fparam, aparam=frames.aparam)
    files = ["theirs.pth"] + ["ours.pth"] * (kind != "dpa3" or has_operators())
    python("-c", EVALUATE, *files)
    found = np.load("found.npz")
    for name in files:
        assert found[f"{name} numbers"].tolist() == [2, 1]
        for key in ("energy", "force", "virial"):
            values, own = found[f"{name} {key}"], getattr(prediction, key)
            np.testing.assert_allclose(
                values.reshape(own.shape), own, rtol=1e-10, atol=1e-10, err_msg=f"{name} {key}"
            )
        np.testing.assert_allclose(found[f"{name} ase"], prediction.energy[0], rtol=1e-10)
    _, ours = expected_of("theirs.pth", systems[0])  # its frozen file here
    np.testing.assert_allclose(ours.energy, prediction.energy, rtol=1e-10)
    np.testing.assert_allclose(ours.force, prediction.force, rtol=0, atol=1e-10)


def test_its_own_run_with_a_default_has_our_statistics(systems, train, load):  # noqa: F811
    """No system has fparam.npy: both take the default for all frames, its deviation the least one."""
    for system in systems:
        Path(system, "set.000", "fparam.npy").unlink()
    content = an_input("se_e2_a-everything", systems, numb_steps=1, save_freq=1)
    content["model"]["fitting_net"]["default_fparam"] = [290.0, 2.0]
    content["learning_rate"] = {
        "type": "exp",
        "start_lr": 1e-14,
        "stop_lr": 1e-15,
        "decay_steps": 5,
    }
    content["optimizer"] = {"type": "Adam"}
    Path("theirs.json").write_text(
        json.dumps({**content, "training": {**content["training"], "save_ckpt": "theirs"}})
    )
    dp("train", "theirs.json", "--skip-neighbor-stat")
    assert train(content, skip_neighbor_stat=True) == 0
    ours, wanted = load()["model"], load("theirs-1.pt")["model"]
    assert set(ours) == set(wanted)
    for name in wanted:
        if name.endswith(
            ("_avg", "_inv_std", "out_bias", "default_fparam_tensor", ".mean", ".stddev")
        ):
            torch.testing.assert_close(ours[name], wanted[name], rtol=1e-9, atol=1e-11, msg=name)
    name = "model.Default.atomic_model.fitting_net.fparam_inv_std"
    assert ours[name].tolist() == [100.0, 100.0]
