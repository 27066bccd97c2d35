import numpy as np
import pytest
from write_systems import write_npy

from deepmd_muon.cli.main import main
from deepmd_muon.data import Frames
from deepmd_muon.infer.errors import PredictionInputError
from deepmd_muon.infer.model_deviation import DeviationSettings, deviation_of_force, model_deviation
from deepmd_muon.model.deepmd_kit import to_deepmd_kit


@pytest.fixture
def frames(water_atoms):
    coord, box, atype = water_atoms
    moved = coord + np.random.default_rng(3).normal(scale=0.05, size=(2, *coord.shape))
    types = np.tile(atype, (2, 1)).astype(np.int32)
    return Frames(atype=types, coord=moved, box=np.tile(box, (2, 1, 1)), force=np.ones((2, 24, 3)))


def test_deviations_are_those_of_their_definition(committee, frames):
    table, per_atom = model_deviation(committee, frames, DeviationSettings())
    found = [predictor.evaluate(frames) for predictor in committee]
    for frame in range(2):
        forces = np.array([p.force[frame] for p in found])
        mean = forces.mean(axis=0)
        wanted = np.sqrt(((forces - mean) ** 2).sum(axis=-1).mean(axis=0))
        np.testing.assert_allclose(per_atom[frame], wanted, rtol=1e-10)
        np.testing.assert_allclose(
            table[frame, 3:6], [wanted.max(), wanted.min(), wanted.mean()], rtol=1e-10
        )
        virials = np.array([p.virial[frame] for p in found]) / 24
        spread = virials.std(axis=0)
        assert table[frame, :3] == pytest.approx(
            [spread.max(), spread.min(), np.sqrt((spread**2).mean())]
        )
        assert table[frame, 6] == pytest.approx(np.std([p.energy[frame] / 24 for p in found]))


def test_relative_and_real_errors(committee, frames):
    forces = np.stack([predictor.evaluate(frames).force for predictor in committee])
    plain = deviation_of_force(forces)
    size = np.linalg.norm(forces.mean(axis=0), axis=-1)
    np.testing.assert_allclose(deviation_of_force(forces, relative=0.5), plain / (size + 0.5))
    real, _ = model_deviation(committee, frames, DeviationSettings(real_error=True, relative=1.0))
    errors = np.sqrt(((forces - 1.0) ** 2).mean(axis=0).sum(axis=-1)) / (np.sqrt(3.0) + 1.0)
    np.testing.assert_allclose(real[:, 3], errors.max(axis=1))
    virials = np.stack([predictor.evaluate(frames).virial for predictor in committee]) / 24
    scale = np.linalg.norm(virials.mean(axis=0), axis=1, keepdims=True) + 0.1
    found, _ = model_deviation(committee, frames, DeviationSettings(relative_virial=0.1))
    np.testing.assert_allclose(found[:, 0], (virials.std(axis=0) / scale).max(axis=1))


def test_errors_need_labels(committee, frames):
    bare = Frames(atype=frames.atype, coord=frames.coord, box=frames.box)
    with pytest.raises(PredictionInputError, match="labels"):
        model_deviation(committee, bare, DeviationSettings(real_error=True))


@pytest.fixture
def files(committee, model_section, frames, tmp_path):
    """Three checkpoints and a system of two frames."""
    import torch

    for number, predictor in enumerate(committee):
        state = to_deepmd_kit(predictor.model, {"lr": 1e-3, "step": 0})
        torch.save({"model": state}, tmp_path / f"{number}.pt")
    arrays = {"coord": frames.coord.reshape(2, -1), "box": frames.box.reshape(2, -1)}
    write_npy(tmp_path / "water", frames.atype[0], [arrays], "OH")
    return tmp_path


def test_the_command_writes_deepmd_kits_table(files, committee, frames, monkeypatch):
    monkeypatch.chdir(files)
    words = ["--pt", "model-devi", "-m", "0.pt", "1.pt", "2.pt", "-s", "water"]
    assert main([*words, "-o", "out/devi.out", "-f", "10", "--atomic"]) == 0
    first, second, *rows = (files / "out" / "devi.out").read_text().splitlines()
    assert first == "# water"
    names = [f"{kind}_devi_{quantity}" for quantity in "vf" for kind in ("max", "min", "avg")]
    assert second.split() == ["#", "step", *names, "devi_e", "atm_devi_f(N)"]
    assert rows[1].startswith(f"{10:12d}")
    table, per_atom = model_deviation(committee, frames, DeviationSettings())
    expected = np.concatenate([[[0], [10]], table, per_atom], axis=1)
    np.testing.assert_allclose(np.loadtxt(files / "out" / "devi.out"), expected, rtol=1e-5)


def test_one_model_has_no_deviation(files, monkeypatch, capsys):
    monkeypatch.chdir(files)
    assert main(["--pt", "model-devi", "-m", "0.pt", "-s", "water"]) == 2
    assert "two models" in capsys.readouterr().err
