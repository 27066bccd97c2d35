"""The main job through the command line: train, test, show, restart, and a trajectory with the trained potential."""

import contextlib
import io
import json
import os
import re
from pathlib import Path

import numpy as np
import pytest

from deepmd_muon.cli.main import main

EXAMPLE = Path(__file__).parents[3] / "examples" / "water_xtb"


def dp(folder, command, *files, status=0):
    """Run a command with some files in a folder, in this process, and return what it printed."""
    words = [*command.split(), *map(str, files)]
    printed, before = io.StringIO(), os.getcwd()
    os.chdir(folder)
    try:
        with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
            assert main(words) == status, printed.getvalue()[-3000:]
    finally:
        os.chdir(before)
    return printed.getvalue()


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The example's input with a smaller network and fewer steps, trained."""
    folder = tmp_path_factory.mktemp("water")
    content = json.loads((EXAMPLE / "input.json").read_text())
    content["model"]["descriptor"].update(
        neuron=[8, 16, 32], axis_neuron=4, rcut=4.0, precision="float64"
    )
    content["model"]["fitting_net"].update(neuron=[48, 48], precision="float64")
    for part, kind in (("training_data", "train"), ("validation_data", "valid")):
        content["training"][part]["systems"] = [
            f"{EXAMPLE / 'water_xtb.hdf5'}#/{kind}/{t}K" for t in (300, 350)
        ]
    content["training"].update(numb_steps=160, disp_freq=40, save_freq=80)
    content["training"]["validation_data"].update(batch_size=1, numb_btch=2)
    content["learning_rate"]["stop_lr"] = 1e-4
    (folder / "input.json").write_text(json.dumps(content))
    log = dp(folder, "--pt train input.json")
    return folder, content, log


def test_log_tells_routes_and_errors(trained):
    _, _, log = trained
    routes = re.search(r"HybridMuon routing: muon (\d+) parameters .* adam (\d+) parameters", log)
    # Per type: embedding matrices (8, 16) and (16, 32); fitting (128, 48) and (48, 48).
    assert routes
    assert int(routes[1]) == 8
    assert re.search(r"Batch +160: val: rmse = .*rmse_f = ", log)


def test_the_error_falls_and_dp_test_finds_it(trained):
    folder, _, _ = trained
    rows = np.loadtxt(folder / "lcurve.out", comments="#")
    columns = (folder / "lcurve.out").read_text().split("\n", 1)[0].split()[1:]
    force = rows[:, columns.index("rmse_f_val")]
    assert force[-1] < 0.4 * force[0]
    systems = (EXAMPLE / "data" / "valid" / "300K", f"{EXAMPLE / 'water_xtb.hdf5'}#/valid/300K")
    npy = dp(folder, "--pt test -m model.ckpt -d detail -s", systems[0])
    hdf5 = dp(folder, "--pt test -m model.ckpt.pt -s", systems[1])
    found = [float(re.search(r"Force  RMSE +: (\S+) eV/Å", text)[1]) for text in (npy, hdf5)]
    assert found[0] == pytest.approx(found[1], rel=1e-6)
    assert found[0] == pytest.approx(force[-1], rel=0.3)
    details = np.loadtxt(folder / "detail.f.out")
    assert details.shape == (24 * 96, 6)
    assert np.sqrt(np.mean((details[:, 3:] - details[:, :3]) ** 2)) == pytest.approx(
        found[0], rel=1e-4
    )


def test_routing_is_shown_from_input_and_checkpoint(trained):
    folder, _, _ = trained
    from_input = dp(folder, "show routing input.json")
    from_checkpoint = dp(folder, "show routing model.ckpt.pt")
    name = "atomic_model.fitting_net.filter_layers.networks.1.layers.0.matrix"
    for text in (from_input, from_checkpoint):
        assert re.search(rf"^{re.escape(name)} +128x48 +1x128x48 +muon", text, re.MULTILINE)


def test_restart_with_another_mode_stops_with_every_difference(trained):
    folder, content, _ = trained
    changed = {**content, "optimizer": {**content["optimizer"], "min_matrix_dim": 10}}
    (folder / "changed.json").write_text(json.dumps(changed))
    command = "--pt train changed.json -o c.json --restart model.ckpt-80.pt"
    text = dp(folder, command, status=2)
    assert "Traceback" not in text
    assert text.count("saved: route muon") == 2  # the two embedding matrices of 8x16


def test_a_wrong_input_names_every_problem(trained):
    folder, content, _ = trained
    wrong = {
        **content,
        "optimizer": {"type": "HybridMuon", "muon_mode": "3d", "momentum": -3, "momentun": 1},
    }
    (folder / "wrong.json").write_text(json.dumps(wrong))
    text = dp(folder, "--pt train wrong.json", status=2)
    assert "Traceback" not in text
    for words in ("optimizer/muon_mode", "'3d'", "optimizer/momentum", "-3", "momentun"):
        assert words in text


def test_the_trained_potential_conserves_energy(trained):
    ase = pytest.importorskip("ase", reason="install the test extra for the trajectory")
    from ase import units
    from ase.md.verlet import VelocityVerlet

    from deepmd_muon.infer import DeepPotCalculator

    folder, _, _ = trained
    valid = EXAMPLE / "data" / "valid" / "300K"
    coord = np.load(valid / "set.000" / "coord.npy")[0].reshape(-1, 3)
    box = np.load(valid / "set.000" / "box.npy")[0].reshape(3, 3)
    atoms = ase.Atoms("OHH" * 32, positions=coord, cell=box, pbc=True)
    atoms.calc = DeepPotCalculator(str(folder / "model.ckpt.pt"))
    thermal = np.sqrt(300 * units.kB * atoms.get_masses())[:, None]
    atoms.set_momenta(thermal * np.random.default_rng(5).normal(size=(96, 3)))
    totals, kinetic = [], []
    for _ in VelocityVerlet(atoms, 0.25 * units.fs).irun(80):
        totals.append(atoms.get_total_energy())
        kinetic.append(atoms.get_kinetic_energy())
    assert np.ptp(kinetic) > 0.1  # eV: energy went to and fro
    assert np.ptp(totals) < 0.02 * np.ptp(kinetic)
    assert abs(totals[-1] - totals[0]) / len(atoms) < 5e-5  # eV per atom in 20 fs
