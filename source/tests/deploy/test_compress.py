"""Compressed files: tables instead of embedding nets, the nets themselves beyond the tables."""

import logging
import re
import warnings

import numpy as np
import pytest
import torch
from frozen_models import LARGER, build
from small_models import SE_E2_A

from deepmd_muon.cli.main import main
from deepmd_muon.deploy.compress import compress, restored
from deepmd_muon.deploy.errors import FreezeError
from deepmd_muon.deploy.program import Program
from deepmd_muon.infer import DeepPotCalculator, Predictor
from deepmd_muon.model.deepmd_kit import to_deepmd_kit
from deepmd_muon.model.errors import ModelError
from deepmd_muon.model.registry import DESCRIPTORS
from deepmd_muon.model.scripted.tabulated import spline_coefficients, spline_matrix

DPA1 = {
    "type": "se_atten",
    "sel": 30,
    "rcut": 4.0,
    "rcut_smth": 1.0,
    "neuron": [4, 8],
    "axis_neuron": 2,
    "seed": 1,
}
SE_ATTEN_V2 = DPA1 | {"type": "se_atten_v2", "attn_layer": 0}
ONE_SIDE = {"type_one_side": True, "exclude_types": [[0, 1]], "neuron": [4, 4, 8]}
MODELS = {
    "se_e2_a": (SE_E2_A, {}),
    "fewer slots than neighbours": (SE_E2_A | {"sel": [5, 9]}, {}),
    "one side, time steps, excluded pairs": (
        SE_E2_A | ONE_SIDE | {"resnet_dt": True},
        {"resnet_dt": True},
    ),
    "vacuum energies": (
        SE_E2_A | {"activation_function": "gelu", "set_davg_zero": True, "env_protection": 0.01},
        {"atom_ener": [-1.0, None]},
    ),
    "float32": (SE_E2_A | {"precision": "float32"}, {"precision": "float32"}),
    "dpa1": (DPA1 | {"attn_layer": 0}, {}),
    "dpa1, fewer slots, one side": (
        DPA1 | {"attn_layer": 0, "sel": 9, "type_one_side": True, "resnet_dt": True},
        {},
    ),
    "dpa1 strip": (
        DPA1 | {"attn_layer": 0, "tebd_input_mode": "strip", "smooth_type_embedding": False},
        {},
    ),
    "se_atten_v2": (SE_ATTEN_V2, {}),
    "se_atten_v2, standardised, one side": (
        SE_ATTEN_V2 | {"set_davg_zero": False, "type_one_side": True, "concat_output_tebd": False},
        {},
    ),
    "se_atten_v2, float32": (SE_ATTEN_V2 | {"precision": "float32"}, {"precision": "float32"}),
}


def tabulated(model, program, **settings):
    """Return the compressed descriptor of a program."""
    return DESCRIPTORS.tabulated(model.settings.descriptor)(program.descriptor, **settings)


def assert_close(found, expected, tolerance):
    for name in ("energy", "force", "virial", "atom_energy"):
        value = getattr(expected, name)
        allowed = tolerance * max(1.0, np.abs(value).max())
        np.testing.assert_allclose(getattr(found, name), value, rtol=0, atol=allowed, err_msg=name)


@pytest.fixture
def close_frames(water_frames):
    """The first frame, with an O and an H 0.25 Å apart, and two H 0.3 Å."""
    coord, box, atype = (part[:1].copy() for part in water_frames)
    coord[0, 7] = coord[0, 0] + [0.15, 0.2, 0.0]
    coord[0, 10] = coord[0, 20] + [0.0, 0.0, 0.3]
    return coord, box, atype


def test_the_spline_is_a_polynomial_of_degree_5_and_its_slope():
    step, pieces = 0.25, 6

    def features(s):
        return torch.stack([1.0 + s - 2.0 * s**5, s**4], dim=1)

    table = spline_coefficients(features, step, pieces)
    u = torch.tensor([0.0, 0.3, 1.0], dtype=torch.float64)
    powers = torch.stack([u**n for n in range(6)])
    for cell in range(pieces):
        found = (spline_matrix() @ powers).t() @ table[cell : cell + 6]
        torch.testing.assert_close(found, features((cell + u) * step), rtol=0, atol=1e-9)


# One of each kind. Of all, the program that the file holds is compared with the model below.
IN_FILES = ("se_e2_a", "dpa1", "se_atten_v2")


@pytest.mark.parametrize(
    "name",
    [name if name in IN_FILES else pytest.param(name, marks=pytest.mark.slow) for name in MODELS],
)
def test_the_file_is_the_model(name, tmp_path, water_frames):
    model = build(*MODELS[name])
    done = compress(model, tmp_path / "c.pth", min_distance=0.7)
    assert done.difference.force <= done.allowed < (1e-3 if name.endswith("float32") else 1.1e-6)
    expected = Predictor(model, device="cpu").predict(*water_frames)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = Predictor(tmp_path / "c.pth", device="cpu").predict(*water_frames)
    assert_close(found, expected, 1e-5 if name.endswith("float32") else 1e-6)


@pytest.mark.parametrize("name", ["se_e2_a", pytest.param("se_atten_v2", marks=pytest.mark.slow)])
def test_ase_calculates_with_the_file(name, tmp_path, water_frames):
    ase = pytest.importorskip("ase")
    model = build(*MODELS[name])
    compress(model, tmp_path / "c.pth", min_distance=0.7)
    coord, box, atype = (part[0] for part in water_frames)
    atoms = ase.Atoms([("O", "H")[kind] for kind in atype], positions=coord, cell=box, pbc=True)
    found = []
    for source in (Predictor(model, device="cpu"), tmp_path / "c.pth"):
        atoms.calc = DeepPotCalculator(source)
        found.append((atoms.get_potential_energy(), atoms.get_forces(), atoms.get_stress()))
    for expected, value in zip(*found, strict=True):
        np.testing.assert_allclose(value, expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", MODELS)
def test_atoms_much_closer_than_the_data_see_the_nets_themselves(name, close_frames):
    """At 0.25 and 0.3 Å with tables down to 0.5 Å, results are the model's."""
    model = build(*MODELS[name])
    program = Program(model, {}).eval()
    program.descriptor = tabulated(model, program, step=0.01, nearest=0.5)
    coord, box, atype = (torch.from_numpy(part) for part in close_frames)
    with pytest.warns(UserWarning, match=r"closer than 0\.\d+ Angstrom"):
        found = program(coord, atype, box)
    expected = Predictor(model, device="cpu").predict(*close_frames)
    assert np.abs(expected.force).max() > 0.1
    for key in ("force", "energy", "virial"):
        value = getattr(expected, key).reshape(found[key].shape)
        tolerance = (1e-5 if name.endswith("float32") else 1e-9) * max(1.0, np.abs(value).max())
        np.testing.assert_allclose(found[key].numpy(), value, rtol=0, atol=tolerance)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # once is enough
        program(coord, atype, box)


@pytest.mark.parametrize("name", ["se_e2_a", "se_atten_v2"])
def test_energy_and_forces_are_continuous_where_the_table_ends(close_frames, name):
    """Across the end, energy changes by the work of the forces."""
    model = build(*MODELS[name])
    program = Program(model, {}).eval()
    program.descriptor = tabulated(model, program, step=0.05, nearest=0.25)
    own = program.descriptor
    end = 1.0 / (own.pieces * own.step)
    coord, box, atype = (torch.from_numpy(part) for part in close_frames)
    direction = (coord[0, 7] - coord[0, 0]) / (coord[0, 7] - coord[0, 0]).norm()
    found = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for distance in (end + 1e-5, end - 1e-5):
            coord[0, 7] = coord[0, 0] + distance * direction
            found.append(program(coord, atype, box))
    work = sum(float(out["force"][0, 7] @ direction) for out in found) / 2 * 2e-5
    assert abs(work) > 1e-7
    assert float(found[1]["energy"] - found[0]["energy"]) == pytest.approx(
        work, rel=1e-4, abs=1e-10
    )


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A model, a checkpoint with the smallest distance of its data, and its frozen file."""
    folder = tmp_path_factory.mktemp("compress")
    model = build(SE_E2_A, {"atom_ener": [-1.0, None], "resnet_dt": True})
    torch.save(
        {"model": to_deepmd_kit(model, {"lr": 1e-3, "step": 0}, min_nbor_dist=0.8)},
        folder / "model.pt",
    )
    assert (
        main(["--pt", "freeze", "-c", str(folder / "model.pt"), "-o", str(folder / "model.pth")])
        == 0
    )
    return model, folder


@pytest.mark.parametrize(
    "words",
    [
        "compress -i model.pt",
        pytest.param("compress -i model.pth -e 1.5", marks=pytest.mark.slow),
        "freeze --interpolate -c model.pt",
    ],
)
def test_commands_write_the_same_potential(
    words, saved, tmp_path, monkeypatch, water_frames, caplog
):
    model, folder = saved
    monkeypatch.chdir(folder)
    with caplog.at_level(logging.INFO):
        assert main(["--pt", *words.split(), "-o", str(tmp_path / "c.pth")]) == 0
    assert [path.name for path in tmp_path.iterdir()] == ["c.pth"]
    assert re.search(r"down to 0\.(4|533) Å", caplog.text)
    assert re.search(r"energy \d\S+ eV/atom, forces \d\S+ eV/Å, virial \d\S+ eV/atom", caplog.text)
    found, expected = (
        Predictor(one, device="cpu").predict(*water_frames) for one in (tmp_path / "c.pth", model)
    )
    assert_close(found, expected, 1e-6)
    assert_close(
        Predictor(restored(tmp_path / "c.pth")[0], device="cpu").predict(*water_frames),
        expected,
        1e-12,
    )


def test_takes_a_given_step_and_warns_of_a_coarse_one(saved, tmp_path, monkeypatch, caplog):
    monkeypatch.chdir(saved[1])
    with caplog.at_level(logging.INFO):
        assert main(["compress", "-i", "model.pt", "-s", "0.9", "-o", str(tmp_path / "c")]) == 0
    assert "tables of step 0.9 down" in caplog.text
    assert "take a shorter --step" in caplog.text
    assert (tmp_path / "c.pth").is_file()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("-i model.pt -s 0", "--step must"),
        ("-i model.pt -e nan", "--extrapolate must"),
        ("-i model.pth --ema", "one set of weights"),
        ("-i model.pth -t in.json", "--training-script has no effect"),
        ("-i other.pt", "no file other.pt"),
        ("-i model.pt -s 1e-7", "MiB"),
    ],
)
def test_what_cannot_be_is_refused(words, message, saved, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(saved[1])
    assert main(["--pt", "compress", *words.split(), "-o", str(tmp_path / "c.pth")]) == 2
    assert message in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_other_descriptors_and_kinks_are_refused(tmp_path):
    with pytest.raises(FreezeError, match=r"'dpa3' cannot be compressed: .* use dp freeze"):
        compress(build(LARGER["dpa3"] | {"seed": 1}), tmp_path / "c.pth")
    with pytest.raises(FreezeError, match="kink"):
        compress(
            build(SE_E2_A | {"activation_function": "relu"}), tmp_path / "c.pth", min_distance=0.7
        )
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ModelError, match="attention"):
        compress(build(LARGER["se_atten"] | {"seed": 1}), tmp_path / "c.pth")


def test_a_file_without_weights_is_refused(tmp_path):
    model = build(SE_E2_A)
    torch.jit.save(torch.jit.script(Program(model, {})), tmp_path / "bare.pth")
    with pytest.raises(FreezeError, match="give the checkpoint"):
        restored(tmp_path / "bare.pth")


@pytest.mark.parametrize("name", ["se_e2_a", "se_atten_v2, standardised, one side"])
def test_tensors_are_made_where_the_positions_are(close_frames, name):
    """A tensor made without a device would be on "meta" here, and on the CPU in a program that runs on a GPU."""
    model = build(*MODELS[name])
    program = Program(model, {}).eval()
    program.descriptor = tabulated(model, program, step=0.1, nearest=0.5)
    coord, box, atype = (torch.from_numpy(part) for part in close_frames)
    with pytest.warns(UserWarning, match="closer"):
        expected = program(coord, atype, box)
    with torch.device("meta"):
        found = program(coord, atype, box)
    for key, value in expected.items():
        assert torch.equal(found[key], value)
