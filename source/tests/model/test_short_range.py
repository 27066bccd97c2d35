"""Models with a short-range table against deepmd-kit 3.2.0 (`make_short_range_fixtures.py`), and as physics."""

import dataclasses
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from model_batches import HERE, make_batch, read_fixture

from deepmd_muon.argcheck import InputError, normalize
from deepmd_muon.cli.main import main
from deepmd_muon.deploy.freeze import freeze
from deepmd_muon.infer import Predictor
from deepmd_muon.model import ModelError, build_model
from deepmd_muon.model.deepmd_kit import deepmd_kit_parameter_names, from_deepmd_kit, to_deepmd_kit
from deepmd_muon.model.short_range import PairTable, splines_of

FIXTURE = read_fixture(HERE / "short_range.pt.gz")
TABLE = HERE / "short_range.txt"
EXAMPLE = HERE.parents[2] / "examples" / "cu_emt"


def load(name):
    """Return the model of the fixture; the table comes from the checkpoint, its file is not here."""
    settings, state = from_deepmd_kit(FIXTURE[name]["state"])
    model = build_model(settings)
    model.load_state_dict(state)
    return model


def batch_for(model, kind, name):
    data = FIXTURE[name]["structures"][kind]
    lists = {"ntypes": model.ntypes, "inner": model.neighbors.inner}
    return make_batch(data["coord"], data["atype"], data["box"], model.rcut, model.sel, **lists)


@pytest.mark.parametrize("kind", ["periodic", "open"])
@pytest.mark.parametrize("name", ["dpa1", "dpa3"])
def test_same_numbers(name, kind):
    model = load(name)
    out = model(batch_for(model, kind, name))
    for key, given in FIXTURE[name]["outputs"][kind].items():
        expected = given.reshape(out[key].shape)
        scale = float(expected.abs().max())
        torch.testing.assert_close(out[key], expected, rtol=1e-10, atol=1e-10 * scale)


@pytest.mark.parametrize("name", ["dpa1", "dpa3"])
def test_same_names(name):
    given = FIXTURE[name]["state"]
    model = load(name)
    written = to_deepmd_kit(model, given["_extra_state"]["train_infos"])
    assert set(written) == set(given)
    for key, value in given.items():
        if isinstance(value, torch.Tensor) and not key.endswith("min_nbor_dist"):
            torch.testing.assert_close(written[key], value, msg=key)
    theirs = given["_extra_state"]["model_params"]
    ours = written["_extra_state"]["model_params"]
    for key in ("use_srtab", "smin_alpha", "sw_rmin", "sw_rmax"):
        assert ours[key] == theirs[key]
    names = deepmd_kit_parameter_names(model)
    assert all(name.startswith("atomic_model.models.0.") for name in names)


@pytest.mark.parametrize("name", ["dpa1", pytest.param("dpa3", marks=pytest.mark.slow)])
def test_a_frozen_file_computes_the_same(name, tmp_path):
    model = load(name)
    freeze(model, tmp_path / "model.pth")
    frozen = Predictor(tmp_path / "model.pth", device="cpu")
    data = FIXTURE[name]["structures"]["periodic"]
    found = frozen.predict(*(data[key][0].numpy() for key in ("coord", "box", "atype")))
    expected = FIXTURE[name]["outputs"]["periodic"]
    scale = float(expected["force"].abs().max())
    np.testing.assert_allclose(
        found.force.reshape(12, 3), expected["force"][0].numpy(), rtol=0, atol=1e-10 * scale
    )
    np.testing.assert_allclose(
        found.virial.reshape(9), expected["virial"][0].numpy(), rtol=0, atol=1e-9 * scale
    )


@pytest.mark.parametrize("name", ["dpa1", "dpa3"])
def test_gradients_of_a_loss_of_forces_are_those_of_finite_differences(name):
    model = load(name)
    batch = batch_for(model, "periodic", name)
    weights = torch.randn(2, 12, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))

    def loss():
        out = model(batch)
        return (weights * out["force"]).sum() + out["energy"].sum() + out["virial"].sum()

    loss().backward()
    parameter = model.atomic_model.fitting_net.filter_layers.networks[0].layers[0].matrix
    for place in ((0, 0), (3, 2)):
        found = float(parameter.grad[place])
        with torch.no_grad():
            values = []
            for step in (1e-5, -1e-5):
                parameter[place] += step
                values.append(float(loss()))
                parameter[place] -= step
        assert found == pytest.approx((values[0] - values[1]) / 2e-5, rel=1e-5)


def test_a_checkpoint_of_deepmd_kit_computes_with_its_alpha(caplog):
    """deepmd-kit does not read `smin_alpha`; this package does, and says so in its checkpoints."""
    given = FIXTURE["dpa1"]["state"]
    extra = given["_extra_state"]
    params = {**extra["model_params"], "smin_alpha": 0.4}
    settings, state = from_deepmd_kit({**given, "_extra_state": {**extra, "model_params": params}})
    assert settings.smin_alpha == 0.1
    assert "smin_alpha 0.4" in caplog.text
    model = build_model(settings)
    model.load_state_dict(state)
    expected = FIXTURE["dpa1"]["outputs"]["periodic"]["force"]
    torch.testing.assert_close(
        model(batch_for(model, "periodic", "dpa1"))["force"].reshape(expected.shape),
        expected,
        rtol=1e-10,
        atol=1e-10 * float(expected.abs().max()),
    )
    own = build_model(dataclasses.replace(settings, smin_alpha=0.4))
    own.load_state_dict(state)
    again, _ = from_deepmd_kit(to_deepmd_kit(own, {"lr": 1e-3, "step": 1}))
    assert again.smin_alpha == 0.4


@pytest.mark.parametrize("optimizer", ["HybridMuon", "Adam"])
def test_a_run_with_a_table_keeps_state_and_average_under_deepmd_kits_names(
    optimizer, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    content = table_input(optimizer)
    train(content)
    first = torch.load("model.ckpt-3.pt", weights_only=True)
    (group,) = first["optimizer"]["param_groups"]
    names = deepmd_kit_parameter_names(Predictor("model.ckpt-3.pt", device="cpu").model)
    assert group["param_names"] == list(first["ema"]["model"]) == names
    assert all(name.startswith("atomic_model.models.0.") for name in names)
    averages = [x for x in first["ema"]["model"].values() if x.numel()]
    assert len(averages) == len(first["optimizer"]["state"]) > 4
    # Files of earlier releases have the names without `models.0.`, and no empty parameters.
    (tmp_path / "earlier").mkdir()
    group["param_names"] = [name.replace("models.0.", "") for name in names]
    first["ema"]["model"] = {
        name.replace("models.0.", ""): x for name, x in first["ema"]["model"].items() if x.numel()
    }
    torch.save(first, "earlier/model.pt")
    found = {}
    for source in ("model.ckpt-3.pt", "earlier/model.pt"):
        longer = {"numb_steps": 5, "save_freq": 5, "save_ckpt": f"on-{Path(source).stem}"}
        train(content | {"training": content["training"] | longer}, "--restart", source)
        found[source] = torch.load(f"on-{Path(source).stem}-5.pt", weights_only=True)
    one, other = found.values()
    for name, value in one["model"].items():
        if torch.is_tensor(value):
            assert torch.equal(value, other["model"][name])
    for name, value in one["ema"]["model"].items():
        assert torch.equal(value, other["ema"]["model"][name])
    assert main(["--pt", "test", "-m", "model.ckpt.pt", "-s", "data/valid", "--ema"]) == 0


def test_a_model_of_this_package_alone_keeps_its_average(tmp_path, monkeypatch):
    """A softmin that deepmd-kit lacks: there are no names of deepmd-kit's for it."""
    monkeypatch.chdir(tmp_path)
    content = table_input("Adam")
    content["model"]["smin_alpha"] = 0.3
    train(content)
    average = torch.load("model.ckpt-3.pt", weights_only=True)["ema"]["model"]
    assert all(x.numel() for x in average.values())
    assert main(["--pt", "test", "-m", "model.ckpt.pt", "-s", "data/valid", "--ema"]) == 0


def table_input(optimizer):
    """Return a small input with a table and an average, and write its data and its table."""
    shutil.copytree(EXAMPLE / "data", "data")
    np.savetxt("table.txt", np.loadtxt(TABLE)[:, [0, 1]])
    content = json.loads((EXAMPLE / "input.json").read_text())
    descriptor = {"type": "dpa1", "sel": 60, "rcut": 4.0, "neuron": [4, 8], "axis_neuron": 2}
    content["model"] |= {
        "descriptor": {**descriptor, "attn_layer": 0},
        "fitting_net": {"neuron": [8]},
        "use_srtab": "table.txt",
        "sw_rmin": 1.8,
        "sw_rmax": 2.6,
    }
    content["optimizer"] = {"type": optimizer}
    content["training"] |= {"numb_steps": 3, "disp_freq": 1, "save_freq": 3, "enable_ema": True}
    content["training"]["validation_data"]["numb_btch"] = 1
    return content


def train(content, *words):
    Path("input.json").write_text(json.dumps(content))
    assert main(["--pt", "train", "input.json", "-v", "ERROR", *words]) == 0


def table(alpha=0.1, rcut=6.0, **changes):
    return PairTable(str(TABLE), 2, rcut, changes.get("switch", (0.8, 1.3)), alpha)


def test_splines_are_those_of_a_clamped_cubic():
    interpolate = pytest.importorskip("scipy.interpolate")
    rows = np.loadtxt(TABLE)
    info, data = splines_of(str(TABLE), 2, 3.0)
    np.testing.assert_allclose(info, [0.02, 0.02, len(rows) - 1, 2])
    for column, (a, b) in enumerate(((0, 0), (0, 1), (1, 1)), start=1):
        spline = interpolate.CubicSpline(rows[:, 0], rows[:, column], bc_type="clamped")
        for u in (0.0, 0.3, 0.9):
            found = data[a, b] @ np.array([u**3, u**2, u, 1.0])
            np.testing.assert_allclose(found, spline(rows[:-1, 0] + 0.02 * u), atol=1e-9)
        np.testing.assert_array_equal(data[a, b], data[b, a])


# The last pieces of deepmd-kit 3.2.0's splines (`deepmd.utils.pair_tab.PairTab`) for type 1-1 of the table below.
CONTINUED = {
    2.1: [[-0.170003362, 0.190006724, 0.129996638, -0.15]],
    2.6: [
        [-0.007509946, 0.040291021, 0.043558238, -0.15],
        [-0.045710935, 0.017761182, 0.101610440, -0.073660687],
    ],
    3.3: [
        [0.006633390, -0.005009006, 0.017404256, -0.15],
        [-0.004548998, 0.014891164, 0.027286414, -0.13097136],
        [-0.001551657, 0.001244169, 0.043421748, -0.09334278],
        [-0.002358634, -0.003410802, 0.041255115, -0.05022852],
        [-0.002128069, -0.010486702, 0.027357611, -0.01474284],
    ],
}


@pytest.fixture
def open_table(tmp_path):
    """A table from 0.25 to 2 Å that does not end in zeros."""
    distance = 0.25 * np.arange(1, 9)
    columns = [distance, 3 * np.exp(-2 * distance), 2 * np.exp(-distance), -0.3 / distance]
    np.savetxt(tmp_path / "table", np.stack(columns, 1), fmt="%.6f")
    return str(tmp_path / "table")


@pytest.mark.parametrize("rcut", CONTINUED)
def test_a_table_falls_to_zero_before_the_cutoff_as_deepmd_kits(rcut, open_table):
    info, data = splines_of(open_table, 2, rcut)
    pieces = len(CONTINUED[rcut])
    assert info[2] == 7 + pieces
    np.testing.assert_allclose(data[1, 1, 7:], CONTINUED[rcut], rtol=0, atol=2e-9)
    assert np.abs(data[:, :, -1].sum(-1)).max() < 1e-12  # the last piece ends at 0


def test_an_energy_that_jumps_at_the_cutoff_is_told(open_table, caplog):
    splines_of(open_table, 2, 2.6)
    splines_of(str(TABLE), 2, 3.0)
    assert not [record for record in caplog.records if record.levelname == "WARNING"]
    info, _ = splines_of(open_table, 2, 1.9)
    assert info[2] == 7
    (warning,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert "0.301 eV" in warning
    assert "1.9" in warning


def test_slopes_are_those_of_finite_differences():
    one = table()
    random = torch.Generator().manual_seed(5)
    vectors = torch.randn(6, 5, 3, dtype=torch.float64, generator=random) * 0.6
    own = torch.tensor([0, 1, 0, 1, 0, 1])
    other = torch.randint(-1, 2, (6, 5), generator=random)
    found = one(vectors, own, other)
    assert int(((found.weight > 0.01) & (found.weight < 0.99)).sum()) > 0
    unit = vectors / found.distance.unsqueeze(2)
    for k in range(5):
        moved = []
        for step in (1e-6, -1e-6):
            changed = vectors.clone()
            changed[:, k] += step * unit[:, k]
            moved.append(one(changed, own, other))
        for name in ("weight", "energy"):
            numeric = (getattr(moved[0], name) - getattr(moved[1], name)) / 2e-6
            numeric = torch.where(other[:, k] >= 0, numeric, 0.0)
            torch.testing.assert_close(
                getattr(found, f"{name}_slope")[:, k], numeric, rtol=1e-5, atol=1e-5
            )


def test_atoms_that_are_far_from_all_others_keep_the_networks_energy():
    """Where exp(−r/α) underflows 1e-20, deepmd-kit divides by 1e-20, and the table takes over."""
    vectors = torch.tensor([[[5.5, 0.0, 0.0]], [[1.0, 0.0, 0.0]]], dtype=torch.float64)
    found = table()(vectors, torch.tensor([0, 0]), torch.tensor([[1], [-1]]))
    assert found.weight.tolist() == [0.0, 0.0]
    assert found.energy.tolist() == [0.0, 0.0]


def test_atoms_closer_than_the_table_are_pushed_apart():
    vectors = torch.tensor([[[0.01, 0.0, 0.0]], [[0.02, 0.0, 0.0]]], dtype=torch.float64)
    found = table()(vectors, torch.tensor([0, 0]), torch.tensor([[0], [0]]))
    assert found.weight[0].item() == 1.0
    # Clamped splines are flat at the first distance.
    near, first = found.energy.tolist()
    assert near == pytest.approx(first)


@pytest.mark.parametrize(
    ("rows", "word"),
    [
        ("0.1 1 2\n0.2 1 2\n0.3 0 0\n", "4 finite numbers"),
        ("0.1 1 2 3\n0.2 1 2 3\n0.4 0 0 0\n", "equal steps"),
        ("0.1 a b c\n", "numbers"),
    ],
)
def test_tables_that_cannot_be_used_are_refused(tmp_path, rows, word):
    (tmp_path / "table").write_text(rows)
    with pytest.raises(ModelError, match=word):
        splines_of(str(tmp_path / "table"), 2, 6.0)


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"descriptor": {"type": "se_e2_a", "sel": [4]}}, "use_srtab"),
        ({"sw_rmin": 2.0}, "sw_rmin"),
        ({"use_srtab": None}, "use_srtab"),
    ],
)
def test_settings_that_exclude_each_other_are_named(changes, word):
    content = json.loads((EXAMPLE / "input.json").read_text())
    table_keys = {"use_srtab": "t", "sw_rmin": 0.5, "sw_rmax": 1.0}
    content["model"] |= {"descriptor": {"type": "dpa1", "sel": 20}, **table_keys, **changes}
    with pytest.raises(InputError, match=word):
        normalize(content)


def test_models_without_a_table_do_not_name_it():
    content = json.loads((EXAMPLE / "input.json").read_text())
    assert "use_srtab" not in normalize(content).normalized["model"]


def test_training_restart_and_test_with_a_table(tmp_path, monkeypatch, capsys):
    """The table is in the checkpoint: its file may go after the first start."""
    monkeypatch.chdir(tmp_path)
    content = table_input("HybridMuon")
    train(content)
    (tmp_path / "table.txt").unlink()
    content["training"]["numb_steps"] = 5
    train(content, "--restart", "model.ckpt.pt")
    rows = np.loadtxt("lcurve.out")
    assert rows[-1, 0] == 5
    assert np.isfinite(rows[:, 1:4]).all()
    assert main(["--pt", "test", "-m", "model.ckpt.pt", "-s", "data/valid"]) == 0
    own = Predictor("model.ckpt-5.pt", device="cpu").model.short_range
    assert own.tab_data.shape[2] >= 174
    # Training from nothing needs the file, and says so before it begins: files of the run above keep their names.
    capsys.readouterr()
    for text, word in (None, "there is no file table.txt"), ("1 2 3\n", "3 rows or more"):
        if text is not None:
            Path("table.txt").write_text(text)
        assert main(["--pt", "train", "input.json", "-o", "other.json"]) == 2
        error = capsys.readouterr().err
        assert word in error
        assert "step" not in error
        assert (tmp_path / "model.ckpt-5.pt").exists()
