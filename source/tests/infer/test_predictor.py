import copy

import numpy as np
import pytest
import torch

from deepmd_muon.checkpoint_file.errors import CheckpointError
from deepmd_muon.data import Frames
from deepmd_muon.infer import Predictor, load_model
from deepmd_muon.infer.errors import PredictionInputError
from deepmd_muon.model import build_model
from deepmd_muon.model.deepmd_kit import to_deepmd_kit
from deepmd_muon.train.ema import Ema

FIELDS = ("energy", "force", "virial", "atom_energy")


def assert_same(one, other, tolerance=1e-12):
    for name in FIELDS:
        np.testing.assert_allclose(
            getattr(one, name), getattr(other, name), rtol=0, atol=tolerance, err_msg=name
        )


@pytest.fixture
def frames(water_atoms):
    coord, box, atype = water_atoms
    moves = np.random.default_rng(3).normal(scale=0.05, size=(5, *coord.shape))
    return coord + moves, np.tile(box, (5, 1, 1)), atype


def test_shapes_and_sum_rules(predictor, frames):
    coord, box, atype = frames
    got = predictor.predict(coord, box, atype)
    assert [getattr(got, name).shape for name in FIELDS] == [(5,), (5, 24, 3), (5, 9), (5, 24)]
    assert all(getattr(got, name).dtype == np.float64 for name in FIELDS)
    np.testing.assert_allclose(got.atom_energy.sum(axis=1), got.energy, rtol=1e-12)
    np.testing.assert_allclose(got.force.sum(axis=1), 0.0, atol=1e-10)
    assert np.abs(got.force).max() > 1e-4


def test_batches_of_any_size_give_the_same(model, frames):
    coord, box, atype = frames
    whole = Predictor(model, device="cpu", batch_atoms=10_000).predict(coord, box, atype)
    for batch_atoms in (1, 48, 50):
        assert_same(
            Predictor(model, device="cpu", batch_atoms=batch_atoms).predict(coord, box, atype),
            whole,
        )


def test_one_frame_without_its_axis(predictor, frames):
    coord, box, atype = frames
    assert_same(
        predictor.predict(coord[0], box[0], atype), predictor.predict(coord[:1], box[:1], atype)
    )


def test_atoms_outside_the_cell_mean_the_same(predictor, frames):
    coord, box, atype = frames
    shifts = np.random.default_rng(5).integers(-2, 3, size=coord.shape)
    moved = coord + np.einsum("fni,fij->fnj", shifts, box)
    assert_same(
        predictor.predict(moved, box, atype), predictor.predict(coord, box, atype), tolerance=1e-9
    )


def test_without_a_cell(predictor, frames):
    coord, _, atype = frames
    lone = predictor.predict(coord, None, atype)
    wide = predictor.predict(coord, np.tile(60.0 * np.eye(3), (5, 1, 1)), atype)
    assert_same(lone, wide, tolerance=1e-10)


def test_padding_and_frames_with_and_without_cell_in_one_batch(predictor, frames):
    coord, box, atype = frames
    small = Frames(atype=np.array([[0, 1, 1]], dtype=np.int32), coord=coord[:1, :3])
    large = Frames(atype=atype[None].astype(np.int32), coord=coord[:1], box=box[:1])
    joined = predictor.evaluate(Frames.concatenate([small, large]))
    assert joined.energy[0] == pytest.approx(predictor.evaluate(small).energy[0], abs=1e-12)
    assert joined.energy[1] == pytest.approx(predictor.evaluate(large).energy[0], abs=1e-12)
    assert not joined.force[0, 3:].any()
    assert not joined.atom_energy[0, 3:].any()


def test_no_frames(predictor):
    got = predictor.predict(np.zeros((0, 3, 3)), None, np.array([0, 1, 1]))
    assert [getattr(got, name).shape for name in FIELDS] == [(0,), (0, 3, 3), (0, 9), (0, 3)]


def test_virial_is_the_energy_under_strain(predictor, frames):
    coord, box, atype = frames
    virial = predictor.predict(coord[0], box[0], atype).virial[0].reshape(3, 3)
    numeric = np.zeros((3, 3))
    for row in range(3):
        for column in range(3):
            step = np.zeros((3, 3))
            step[row, column] = 1e-4
            energies = [
                predictor.predict(
                    coord[0] @ (np.eye(3) + s), box[0] @ (np.eye(3) + s), atype
                ).energy[0]
                for s in (step, -step)
            ]
            # −volume·stress = −dE/dε.
            numeric[row, column] = -(energies[0] - energies[1]) / 2e-4
    np.testing.assert_allclose(virial, numeric, atol=1e-6)


@pytest.fixture
def checkpoint(model, model_section, tmp_path):
    """A checkpoint with averaged weights, and the predictors of both kinds of weights."""
    ema = Ema(model, decay=0.5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.1)
    ema.update()
    path = tmp_path / "model.ckpt-1.pt"
    state = to_deepmd_kit(model, {"lr": 1e-3, "step": 0})
    torch.save({"model": state, "ema": ema.state_dict()}, path)
    return path, ema


def test_a_checkpoint_gives_the_model_back(checkpoint, predictor, frames):
    path, ema = checkpoint
    last = predictor.predict(*frames)
    assert_same(Predictor(path, device="cpu").predict(*frames), last)
    assert_same(Predictor(str(path).removesuffix(".pt"), device="cpu").predict(*frames), last)
    averaged = copy.deepcopy(predictor)
    averaged.model.load_state_dict(ema.averages(), strict=False)
    average = averaged.predict(*frames)
    assert_same(Predictor(path, device="cpu", ema=True).predict(*frames), average)
    assert abs(average.energy - last.energy).max() > 1e-6


def test_a_checkpoint_may_be_the_bare_state_dict(model, model_section, tmp_path, predictor, frames):
    torch.save(to_deepmd_kit(model, {"lr": 1e-3, "step": 0}), tmp_path / "bare.pt")
    assert_same(
        Predictor(tmp_path / "bare.pt", device="cpu").predict(*frames), predictor.predict(*frames)
    )


def test_rejects_non_checkpoints(tmp_path, model, model_section):
    with pytest.raises(CheckpointError, match="there is no checkpoint"):
        load_model(tmp_path / "none.pt")
    (tmp_path / "text.pt").write_text("not a checkpoint")
    with pytest.raises(CheckpointError, match="cannot be read as a checkpoint"):
        load_model(tmp_path / "text.pt")
    torch.save([1, 2], tmp_path / "list.pt")
    with pytest.raises(CheckpointError, match="holds a list"):
        load_model(tmp_path / "list.pt")
    torch.save({"model": to_deepmd_kit(model, {"lr": 1e-3, "step": 0})}, tmp_path / "plain.pt")
    with pytest.raises(CheckpointError, match="no averaged weights"):
        load_model(tmp_path / "plain.pt", ema=True)


def test_arrays_that_do_not_fit_are_refused(predictor, frames):
    coord, box, atype = frames
    with pytest.raises(
        PredictionInputError, match=r"coord must be \(nframes, natoms, 3\); found shape \(5, 72\)"
    ):
        predictor.predict(coord.reshape(5, 72), box, atype)
    with pytest.raises(
        PredictionInputError, match=r"atype .* with 24 atoms; found int\d+ of shape \(23,\)"
    ):
        predictor.predict(coord, box, atype[:-1])
    with pytest.raises(PredictionInputError, match=r"box must be .* for 5 frames; found \(5, 9\)"):
        predictor.predict(coord, box.reshape(5, 9), atype)
    with pytest.raises(
        PredictionInputError, match=r"box must be .*found \(3,\)"
    ):  # lengths of edges
        predictor.predict(coord, np.array([10.0, 10.0, 10.0]), atype)
    with pytest.raises(PredictionInputError, match=r"atype must be indices into type_map"):
        predictor.predict(coord, box, ["O"] * 24)
    with pytest.raises(PredictionInputError, match=r"type 2 found, but the model has 2"):
        predictor.predict(coord, box, atype + 1)


def test_out_of_memory_halves_the_batch(model, frames, monkeypatch):
    predictor = Predictor(model, device="cpu", batch_atoms=5 * 24)
    expected = predictor.predict(*frames)
    evaluate, sizes = Predictor._evaluate_batch, []

    def limited(self, frames):
        sizes.append(frames.nframes)
        if sizes[-1] > 2:
            raise torch.cuda.OutOfMemoryError
        return evaluate(self, frames)

    monkeypatch.setattr(Predictor, "_evaluate_batch", limited)
    assert_same(predictor.predict(*frames), expected)
    assert sizes == [5, 2, 2, 1]


def test_the_model_is_built_alike_from_its_section(model_section, frames):
    one, other = (Predictor(build_model(model_section), device="cpu") for _ in range(2))
    assert_same(one.predict(*frames), other.predict(*frames), tolerance=0.0)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_a_gpu_gives_the_same(model_section, frames):
    expected = Predictor(build_model(model_section), device="cpu").predict(*frames)
    assert_same(
        Predictor(build_model(model_section), device="cuda").predict(*frames),
        expected,
        tolerance=1e-10,
    )
