"""Our frozen files in deepmd-kit's `DeepPot`, its frozen file in our predictor, and both model deviations."""

import os
import subprocess

import numpy as np
import pytest
import torch
from frozen_models import LARGER, TABULATED, build

from deepmd_muon.cli.main import main
from deepmd_muon.deploy.compress import compress
from deepmd_muon.deploy.freeze import freeze
from deepmd_muon.infer import Predictor
from deepmd_muon.model.deepmd_kit import to_deepmd_kit

pytestmark = pytest.mark.deepmd_kit

EVALUATE = """
import sys
import numpy as np
from deepmd.infer import DeepPot
given = np.load("given.npz")
out = {}
for name in sys.argv[1:]:
    for backend in ("auto", "native"):
        potential = DeepPot(name, nlist_backend=backend)
        values = potential.eval(given["coord"], given["box"].reshape(-1, 9), given["atype"], atomic=True)
        for key, value in zip(("energy", "force", "virial", "atom_energy", "atom_virial"), values):
            out[f"{name} {backend} {key}"] = value
        energy, force, virial = potential.eval(given["coord"], given["box"].reshape(-1, 9), given["atype"])
        out |= {f"{name} {backend} whole force": force, f"{name} {backend} whole virial": virial}
np.savez("found.npz", **out)
"""

BUILT = "from deepmd.pt.cxx_op import ENABLE_CUSTOMIZED_OP as built; raise SystemExit(not built)"


@pytest.fixture
def folder(tmp_path, monkeypatch, water_frames):
    for name in ("DEEPMD_KIT_DP", "DEEPMD_KIT_PYTHON"):
        if name not in os.environ:
            pytest.skip(f"needs {name}")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PYTHONPATH", raising=False)
    coord, box, atype = water_frames
    np.savez("given.npz", coord=coord, box=box, atype=atype[0])
    return tmp_path


def save(model, name):
    torch.save({"model": to_deepmd_kit(model, {"lr": 1e-3, "step": 0})}, name)


@pytest.mark.parametrize("kind", LARGER)
def test_deep_pot_takes_our_file_for_its_own(kind, folder, water_frames):
    if kind == "dpa3" and subprocess.run([os.environ["DEEPMD_KIT_PYTHON"], "-c", BUILT]).returncode:
        pytest.skip("deepmd-kit's operators, which exchange features of ghosts, are not built for its torch")
    model = build(LARGER[kind] | {"seed": 3})
    save(model, "model.pt")
    freeze(model, "ours.pth")
    subprocess.run([os.environ["DEEPMD_KIT_DP"], "--pt", "freeze", "-c", "model.pt", "-o", "theirs.pth"], check=True)
    command = [os.environ["DEEPMD_KIT_PYTHON"], "-c", EVALUATE, "ours.pth", "theirs.pth"]
    subprocess.run(command, check=True)
    found = np.load("found.npz")
    local = kind in ("se_e2_a", "se_atten")  # the atomic virial of layers that pass messages is a matter of definition
    for key in ("energy", "force", "virial", "atom_energy", *(("atom_virial",) if local else ())):
        expected = found[f"theirs.pth native {key}"]
        for backend in ("auto", "native"):
            np.testing.assert_allclose(found[f"ours.pth {backend} {key}"], expected, rtol=0, atol=1e-11, err_msg=key)
            if key in ("force", "virial"):
                np.testing.assert_allclose(found[f"ours.pth {backend} whole {key}"], expected, rtol=0, atol=1e-11)
    expected = Predictor(model, device="cpu").predict(*water_frames)
    np.testing.assert_allclose(found["ours.pth auto force"], expected.force, rtol=0, atol=1e-12)


@pytest.mark.parametrize("kind", TABULATED)
def test_deep_pot_takes_our_compressed_file(kind, folder, water_frames):
    model = build(TABULATED[kind] | {"seed": 3})
    compress(model, "ours.pth", min_distance=0.7)
    subprocess.run([os.environ["DEEPMD_KIT_PYTHON"], "-c", EVALUATE, "ours.pth"], check=True)
    found, expected = np.load("found.npz"), Predictor(model, device="cpu").predict(*water_frames)
    for backend in ("auto", "native"):
        np.testing.assert_allclose(found[f"ours.pth {backend} force"], expected.force, rtol=0, atol=1e-6)
        np.testing.assert_allclose(found[f"ours.pth {backend} energy"][:, 0], expected.energy, rtol=0, atol=1e-6)
        for key in ("virial", "whole virial"):
            np.testing.assert_allclose(found[f"ours.pth {backend} {key}"], expected.virial, rtol=0, atol=1e-5)


def test_its_file_is_read_here(folder, water_frames):
    model = build(LARGER["se_e2_a"] | {"seed": 3})
    save(model, "model.pt")
    subprocess.run([os.environ["DEEPMD_KIT_DP"], "--pt", "freeze", "-c", "model.pt", "-o", "theirs.pth"], check=True)
    expected, found = (Predictor(x, device="cpu").predict(*water_frames) for x in (model, "theirs.pth"))
    for name in ("energy", "force", "virial", "atom_energy"):
        np.testing.assert_allclose(getattr(found, name), getattr(expected, name), rtol=0, atol=1e-11)


@pytest.mark.parametrize("options", [[], ["--atomic", "-f", "5"], ["--relative", "0.3"], ["--real_error"]])
def test_the_deviation_table_is_its(options, folder, water_frames):
    for seed in (1, 2, 3):
        save(build(LARGER["se_e2_a"] | {"seed": seed}, {"seed": seed}), f"{seed}.pt")
    coord, box, atype = water_frames
    (folder / "water" / "set.000").mkdir(parents=True)
    (folder / "water" / "type.raw").write_text(" ".join(map(str, atype[0])))
    (folder / "water" / "type_map.raw").write_text("O\nH\n")
    labels = {"coord": coord, "box": box, "force": np.ones_like(coord), "energy": np.ones(3), "virial": np.ones((3, 9))}
    for name, array in labels.items():
        np.save(folder / "water" / "set.000" / f"{name}.npy", array.reshape(3, -1))
    words = ["--pt", "model-devi", "-m", "1.pt", "2.pt", "3.pt", "-s", "water", *options, "-o"]
    assert main([*words, "ours.out"]) == 0
    subprocess.run([os.environ["DEEPMD_KIT_DP"], *words, "theirs.out"], check=True)
    ours, theirs = (folder / name for name in ("ours.out", "theirs.out"))
    assert ours.read_text().splitlines()[:2] == theirs.read_text().splitlines()[:2]
    np.testing.assert_allclose(np.loadtxt(ours), np.loadtxt(theirs), rtol=2e-6, atol=1e-9)
