import numpy as np
import pytest

from deepmd_muon.data import open_systems
from deepmd_muon.infer.evaluation import evaluate_system
from deepmd_muon.infer.metrics import add_errors


@pytest.fixture
def system(tmp_path, water_atoms):
    """Five frames in two sets, of which the first alone has forces."""
    coord, box, atype = water_atoms
    random = np.random.default_rng(5)
    (tmp_path / "type_map.raw").write_text("O\nH\n")
    (tmp_path / "type.raw").write_text("\n".join(map(str, atype)))
    for k, count in enumerate((3, 2)):
        folder = tmp_path / f"set.{k:03d}"
        folder.mkdir()
        np.save(
            folder / "coord.npy",
            (coord + random.normal(scale=0.05, size=(count, *coord.shape))).reshape(count, -1),
        )
        np.save(folder / "box.npy", np.tile(box.reshape(1, 9), (count, 1)))
        np.save(folder / "energy.npy", random.normal(size=count))
        if k == 0:
            np.save(folder / "force.npy", random.normal(size=(count, coord.size)))
    return open_systems(str(tmp_path), ["O", "H"])[0]


@pytest.mark.parametrize("shuffle", [None, 1])
def test_errors_are_over_the_frames_that_have_the_label(predictor, system, shuffle):
    random = None if shuffle is None else np.random.default_rng(shuffle)
    parts = list(evaluate_system(predictor, system, shuffle=random))
    errors = {}
    for part in parts:
        errors = add_errors(errors, part.errors)
        assert part.reference.nframes == part.prediction.energy.shape[0]
    frames = system.frames(range(5))
    predicted = predictor.evaluate(frames)
    assert errors["energy"].weight == 5
    assert errors["energy"].mae == pytest.approx(np.abs(predicted.energy - frames.energy).mean())
    assert errors["force"].weight == 3 * 24 * 3
    difference = predicted.force[:3] - frames.force[:3]
    assert errors["force"].rmse == pytest.approx(np.sqrt(np.square(difference).mean()))
    if shuffle is None:
        assert [part.reference.labels for part in parts] == [{"energy", "force"}, {"energy"}]
    np.testing.assert_array_equal(
        np.sort(np.concatenate([part.reference.energy for part in parts])), np.sort(frames.energy)
    )
