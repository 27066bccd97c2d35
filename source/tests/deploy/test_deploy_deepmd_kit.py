"""Our frozen files in deepmd-kit's `DeepPot`, its frozen file in our predictor, and both model deviations."""

import numpy as np
import pytest
import torch
from deepmd_kit_program import MARKS, dp, has_operators, python
from frozen_models import LARGER, TABULATED, build
from write_systems import write_npy

from deepmd_muon.cli.main import main
from deepmd_muon.deploy.compress import compress
from deepmd_muon.deploy.freeze import freeze
from deepmd_muon.infer import Predictor
from deepmd_muon.model.deepmd_kit import to_deepmd_kit

pytestmark = MARKS

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


@pytest.fixture
def folder(tmp_path, monkeypatch, water_frames):
    monkeypatch.chdir(tmp_path)
    coord, box, atype = water_frames
    np.savez("given.npz", coord=coord, box=box, atype=atype[0])
    return tmp_path


def save(model, name):
    torch.save({"model": to_deepmd_kit(model, {"lr": 1e-3, "step": 0})}, name)


@pytest.mark.parametrize("kind", LARGER)
def test_deep_pot_takes_our_file_for_its_own(kind, folder, water_frames):
    if kind == "dpa3" and not has_operators():
        pytest.skip("deepmd-kit's operators are not built for its torch")
    model = build(LARGER[kind] | {"seed": 3})
    save(model, "model.pt")
    freeze(model, "ours.pth")
    dp("freeze", "-c", "model.pt", "-o", "theirs.pth")
    python("-c", EVALUATE, "ours.pth", "theirs.pth")
    found = np.load("found.npz")
    local = kind in (
        "se_e2_a",
        "se_atten",
    )  # the atomic virial of layers that pass messages is a matter of definition
    for key in ("energy", "force", "virial", "atom_energy", *(("atom_virial",) if local else ())):
        expected = found[f"theirs.pth native {key}"]
        for backend in ("auto", "native"):
            np.testing.assert_allclose(
                found[f"ours.pth {backend} {key}"], expected, rtol=0, atol=1e-11, err_msg=key
            )
            if key in ("force", "virial"):
                np.testing.assert_allclose(
                    found[f"ours.pth {backend} whole {key}"], expected, rtol=0, atol=1e-11
                )
    expected = Predictor(model, device="cpu").predict(*water_frames)
    np.testing.assert_allclose(found["ours.pth auto force"], expected.force, rtol=0, atol=1e-12)


@pytest.mark.parametrize("kind", TABULATED)
def test_deep_pot_takes_our_compressed_file(kind, folder, water_frames):
    model = build(TABULATED[kind] | {"seed": 3})
    compress(model, "ours.pth", min_distance=0.7)
    python("-c", EVALUATE, "ours.pth")
    found, expected = np.load("found.npz"), Predictor(model, device="cpu").predict(*water_frames)
    for backend in ("auto", "native"):
        np.testing.assert_allclose(
            found[f"ours.pth {backend} force"], expected.force, rtol=0, atol=1e-6
        )
        np.testing.assert_allclose(
            found[f"ours.pth {backend} energy"][:, 0], expected.energy, rtol=0, atol=1e-6
        )
        for key in ("virial", "whole virial"):
            np.testing.assert_allclose(
                found[f"ours.pth {backend} {key}"], expected.virial, rtol=0, atol=1e-5
            )


def test_its_file_is_read_here(folder, water_frames):
    model = build(LARGER["se_e2_a"] | {"seed": 3})
    save(model, "model.pt")
    dp("freeze", "-c", "model.pt", "-o", "theirs.pth")
    expected, found = (
        Predictor(x, device="cpu").predict(*water_frames) for x in (model, "theirs.pth")
    )
    for name in ("energy", "force", "virial", "atom_energy"):
        np.testing.assert_allclose(
            getattr(found, name), getattr(expected, name), rtol=0, atol=1e-11
        )


@pytest.mark.parametrize(
    "options", [[], ["--atomic", "-f", "5"], ["--relative", "0.3"], ["--real_error"]]
)
def test_the_deviation_table_is_its(options, folder, water_frames):
    for seed in (1, 2, 3):
        save(build(LARGER["se_e2_a"] | {"seed": seed}, {"seed": seed}), f"{seed}.pt")
    coord, box, atype = water_frames
    arrays = {
        "coord": coord,
        "box": box,
        "force": np.ones_like(coord),
        "energy": np.ones(3),
        "virial": np.ones((3, 9)),
    }
    write_npy(
        folder / "water", atype[0], [{name: x.reshape(3, -1) for name, x in arrays.items()}], "OH"
    )
    words = ["model-devi", "-m", "1.pt", "2.pt", "3.pt", "-s", "water", *options, "-o"]
    assert main(["--pt", *words, "ours.out"]) == 0
    dp(*words, "theirs.out")
    ours, theirs = (folder / name for name in ("ours.out", "theirs.out"))
    assert ours.read_text().splitlines()[:2] == theirs.read_text().splitlines()[:2]
    np.testing.assert_allclose(np.loadtxt(ours), np.loadtxt(theirs), rtol=2e-6, atol=1e-9)
