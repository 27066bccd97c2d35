import numpy as np
import pytest

from deepmd_muon.data import Frames
from deepmd_muon.infer.details import DetailFiles
from deepmd_muon.infer.metrics import ErrorSum, add_errors, frame_errors, report_lines
from deepmd_muon.infer.prediction import Prediction
from deepmd_muon.show import parity
from deepmd_muon.show.errors import PictureError
from deepmd_muon.show.parity import ParityPicture


def compared(
    seed, nframes=4, natoms=3, labels=("energy", "force", "virial", "atom_ener", "atom_pref")
):
    """Random reference frames with the last atom of the last frame a padding atom, and a random prediction."""
    random = np.random.default_rng(seed)
    shapes = {
        "energy": (nframes,),
        "force": (nframes, natoms, 3),
        "virial": (nframes, 9),
        "atom_ener": (nframes, natoms),
        "atom_pref": (nframes, natoms),
    }
    values = {name: random.normal(size=shapes[name]) for name in labels}
    if "atom_pref" in values:
        values["atom_pref"] = np.abs(values["atom_pref"])
    atype = np.zeros((nframes, natoms), dtype=np.int32)
    atype[-1, -1] = -1
    reference = Frames(
        atype=atype,
        coord=random.normal(size=(nframes, natoms, 3)),
        box=np.tile(2.0 * np.eye(3), (nframes, 1, 1)),
        **values,
    )
    prediction = Prediction(
        *(
            random.normal(size=shape)
            for shape in [(nframes,), (nframes, natoms, 3), (nframes, 9), (nframes, natoms)]
        )
    )
    return reference, prediction


def test_errors_by_hand():
    reference, prediction = compared(1)
    errors = frame_errors(reference, prediction)
    natoms = np.array([3, 3, 3, 2])
    energy = prediction.energy - reference.energy
    virial = prediction.virial - reference.virial
    force = np.delete((prediction.force - reference.force).reshape(-1, 3), -1, axis=0)
    weight = np.delete(reference.atom_pref.ravel(), -1)[:, None]
    assert errors["energy"].mae == pytest.approx(np.abs(energy).mean())
    assert errors["energy_per_atom"].rmse == pytest.approx(np.sqrt(((energy / natoms) ** 2).mean()))
    assert errors["force"].weight == 33
    assert errors["force"].rmse == pytest.approx(np.sqrt((force**2).mean()))
    assert errors["force_weighted"].mae == pytest.approx(
        (weight * np.abs(force)).sum() / (3 * weight.sum())
    )
    assert errors["virial_per_atom"].mae == pytest.approx(np.abs(virial / natoms[:, None]).mean())
    assert errors["stress"].rmse == pytest.approx(np.sqrt((virial**2).mean()) / 8.0)
    assert errors["atom_energy"].weight == 11


def test_parts_add_up_to_the_whole():
    parts = [frame_errors(*compared(seed, nframes=seed + 1)) for seed in range(4)]
    references, predictions = zip(
        *(compared(seed, nframes=seed + 1) for seed in range(4)), strict=True
    )
    joined = Prediction.concatenate(predictions)
    assert joined.force.shape[0] == joined.energy.size == 1 + 2 + 3 + 4
    whole = frame_errors(Frames.concatenate(references), joined)
    total = {}
    for part in parts:
        total = add_errors(total, part)
    assert set(total) == set(whole)
    for name, error in whole.items():
        assert (total[name].mae, total[name].rmse) == pytest.approx(
            (error.mae, error.rmse), rel=1e-13
        )


def test_what_has_no_reference_has_no_error():
    reference, prediction = compared(2, labels=("force",))
    assert list(frame_errors(reference, prediction)) == ["force"]
    assert np.isnan([ErrorSum().mae, ErrorSum().rmse]).all()


def test_report_has_deepmd_kits_lines():
    errors = {
        name: ErrorSum(absolute=1.0, square=8.0, weight=2.0)
        for name in ("energy", "energy_per_atom", "force", "virial", "virial_per_atom", "stress")
    }
    assert report_lines(errors) == [
        "Energy MAE         : 5.000000e-01 eV",
        "Energy RMSE        : 2.000000e+00 eV",
        "Energy MAE/Natoms  : 5.000000e-01 eV",
        "Energy RMSE/Natoms : 2.000000e+00 eV",
        "Force  MAE         : 5.000000e-01 eV/Å",
        "Force  RMSE        : 2.000000e+00 eV/Å",
        "Virial MAE         : 5.000000e-01 eV",
        "Virial RMSE        : 2.000000e+00 eV",
        "Virial MAE/Natoms  : 5.000000e-01 eV",
        "Virial RMSE/Natoms : 2.000000e+00 eV",
        "Stress MAE         : 5.000000e-01 eV/Å³",
        "Stress RMSE        : 2.000000e+00 eV/Å³",
    ]


def test_detail_files_hold_data_then_prediction(tmp_path):
    details = DetailFiles(str(tmp_path / "out" / "detail.v1"))
    first, second = compared(3), compared(4, nframes=2)
    details.add("sys/a", *first)
    details.add("sys/a", *first)  # a second chunk of the same system: no second header
    details.add("sys/b", *second)
    files = {path.name: path for path in (tmp_path / "out").iterdir()}
    assert sorted(files) == [
        f"detail.v1.{kind}.out" for kind in ("e", "e_peratom", "f", "s", "v", "v_peratom")
    ]
    rows = {name.split(".")[2]: np.loadtxt(path, encoding="utf-8") for name, path in files.items()}
    assert {kind: table.shape for kind, table in rows.items()} == {
        "e": (10, 2),
        "e_peratom": (10, 2),
        "f": (11 + 11 + 5, 6),
        "s": (10, 18),
        "v": (10, 18),
        "v_peratom": (10, 18),
    }
    reference, prediction = first
    np.testing.assert_allclose(
        rows["e"][:4], np.stack([reference.energy, prediction.energy], axis=1)
    )
    np.testing.assert_allclose(
        rows["e_peratom"][3], [reference.energy[3] / 2, prediction.energy[3] / 2]
    )
    np.testing.assert_allclose(rows["f"][1], [*reference.force[0, 1], *prediction.force[0, 1]])
    np.testing.assert_allclose(rows["v"][2], [*reference.virial[2], *prediction.virial[2]])
    np.testing.assert_allclose(
        rows["s"][2], [*(-reference.virial[2] / 8), *(-prediction.virial[2] / 8)]
    )
    headers = [
        line
        for line in files["detail.v1.f.out"].read_text(encoding="utf-8").splitlines()
        if line[0] == "#"
    ]
    columns = "data_fx data_fy data_fz pred_fx pred_fy pred_fz"
    assert headers == [f"# sys/a: {columns}", f"# sys/b: {columns}"]
    assert "data_vxx data_vxy data_vxz data_vyx" in files["detail.v1.v.out"].read_text(
        encoding="utf-8"
    )


def test_a_new_test_overwrites_old_detail_files(tmp_path):
    for _ in range(2):
        DetailFiles(str(tmp_path / "detail")).add("a", *compared(3))
    assert np.loadtxt(tmp_path / "detail.e.out").shape == (4, 2)


def test_parity_picture_has_a_panel_for_each_label(tmp_path):
    picture = ParityPicture(
        [tmp_path / "pictures" / "parity.png", tmp_path / "parity.pdf"], max_points=10
    )
    picture.add(*compared(5))
    picture.save()
    only_force = ParityPicture([tmp_path / "force.png"])
    only_force.add(*compared(5, labels=("force",)))
    only_force.save()
    from matplotlib.image import imread

    wide, narrow = imread(tmp_path / "pictures" / "parity.png"), imread(tmp_path / "force.png")
    assert wide.shape[1] == 3 * narrow.shape[1]
    assert wide.std() > 0.01
    assert (tmp_path / "parity.pdf").read_bytes().startswith(b"%PDF")


def test_parity_picture_shows_energies_without_the_offset_of_the_elements(tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr(parity, "write", lambda figure, path: drawn.append(figure))
    picture = ParityPicture([tmp_path / "parity.png"])
    rng = np.random.default_rng(5)
    for series, types in (("training", [0, 0, 1]), ("validation", [0, 1, 1, 1])):
        atype = np.tile(np.array(types, dtype=np.int32), (3, 1))
        offset = np.array([-2000.0, -30.0])[types].sum()
        energy = offset + rng.normal(size=3) * 0.01
        reference = Frames(atype=atype, coord=np.zeros((3, len(types), 3)), energy=energy)
        zeros = np.zeros((3, len(types), 3))
        prediction = Prediction(energy + 0.002, zeros, np.zeros((3, 9)), zeros[..., 0])
        picture.add(reference, prediction, series)
    picture.save()
    upper, lower = drawn[0].axes
    points = np.concatenate([series.get_offsets() for series in upper.collections])
    assert np.abs(points).max() < 0.02
    differences = np.concatenate([series.get_offsets()[:, 1] for series in lower.collections])
    np.testing.assert_allclose(differences, [0.002 / 3] * 3 + [0.002 / 4] * 3, rtol=1e-6)
    assert upper.get_legend_handles_labels()[1] == [
        "training\nMAE 0.00067, RMSE 0.00067 eV/atom",
        "validation\nMAE 0.0005, RMSE 0.0005 eV/atom",
    ]


def test_a_picture_that_cannot_be_drawn(tmp_path):
    with pytest.raises(PictureError, match="none of the systems has a label"):
        ParityPicture([tmp_path / "nothing.png"]).save()
    with pytest.raises(
        PictureError, match=r"no picture can be written to .*parity\.doc; use one of .*\.png"
    ):
        ParityPicture([tmp_path / "parity.doc"])
