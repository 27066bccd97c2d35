"""Models of deepmd-kit that read spins, compared with deepmd-kit's own trainer (`pytest -m deepmd_kit`).

They run in an environment in which both packages can be imported.
"""

import importlib.util
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from ase import Atoms
from hosted_models import SPIN_MODELS, TYPE_MAP, TYPES, spin_input, write_spin_data
from test_hosted_training import assert_close, in_deepmd_kit, read
from write_systems import write_npy

from deepmd_muon.argcheck import InputError
from deepmd_muon.argcheck.hosted import host
from deepmd_muon.cli.main import main
from deepmd_muon.data import (
    DataError,
    DataLoader,
    NeighborCache,
    Parameters,
    open_systems,
    with_parameters,
)
from deepmd_muon.data.system import longest_spin
from deepmd_muon.explore.settings import ExploreError
from deepmd_muon.explore.training import BaseInput
from deepmd_muon.infer import DeepPotCalculator, Predictor
from deepmd_muon.loss import build_loss
from deepmd_muon.model import build_model
from deepmd_muon.model.hosted.kit import has_operators
from deepmd_muon.train.batches.batch import to_device
from deepmd_muon.train.batches.resident import ResidentBatches

pytestmark = [
    pytest.mark.deepmd_kit,
    pytest.mark.skipif(
        importlib.util.find_spec("deepmd") is None, reason="deepmd-kit is not importable here"
    ),
]
CPU = torch.device("cpu")
LONG = 20  # steps
VARIANTS = {**dict.fromkeys(SPIN_MODELS, "mse"), "se_e2_a mae": "mae"}


def tolerance_of(kind):
    """DPA-4 computes parts of its geometry in float32 whatever its precision."""
    return 1e-5 if kind.startswith("dpa4") else 1e-9


def long_input(variant, system):
    kind = variant.partition(" ")[0]
    content = spin_input(kind, system, LONG, save_freq=10)
    content["loss"]["loss_func"] = VARIANTS[variant]
    return content


@pytest.fixture(scope="module")
def in_both(tmp_path_factory):
    """The folder with deepmd-kit's runs of each variant."""
    folder = tmp_path_factory.mktemp("deepmd_kit")
    system = write_spin_data(folder)
    contents = {variant: long_input(variant, system) for variant in VARIANTS}
    in_deepmd_kit(folder, contents, losses="losses.jsonl")
    return folder


def lines_of(path):
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


@pytest.mark.parametrize("variant", VARIANTS)
def test_losses_are_deepmd_kits(variant, in_both, train):
    """Twenty steps of Adam from the same weights, on the same frame."""
    content = long_input(variant, str(in_both / "sys"))
    content["training"]["jsonl_file"] = "ours.jsonl"
    assert train(content, skip_neighbor_stat=True) == 0
    ours = lines_of("ours.jsonl")
    theirs = lines_of(in_both / variant / "losses.jsonl")
    assert len(ours) == len(theirs) == LONG
    # deepmd-kit divides by the number of atoms, or by its square, in float32.
    inverse = np.float32(1 / len(TYPES))
    prefix, per_atom = ("mae", inverse)
    if VARIANTS[variant] == "mse":
        prefix, per_atom = ("rmse", float(inverse**2) ** 0.5)
    factor = len(TYPES) * float(per_atom)
    for term, scale in {"e": factor, "fr": 1.0, "fm": 1.0, "v": factor}.items():
        name = f"{prefix}_{term}"
        np.testing.assert_allclose(
            [scale * step[f"{name}_trn"] for step in ours],
            [step[name] for step in theirs],
            rtol=tolerance_of(variant),
            err_msg=name,
        )


@pytest.mark.parametrize("kind", SPIN_MODELS)
def test_a_restart_continues_bitwise_also_from_deepmd_kit(kind, in_both, train, load):
    """With validation and an average; Adam's moments of deepmd-kit's checkpoint are read."""
    system = str(in_both / "sys")
    validation = {"systems": [system], "batch_size": 1}
    content = spin_input(kind, system, 4, save_freq=2, enable_ema=True, validation_data=validation)
    content["optimizer"] = {"type": "HybridMuon"}
    assert train(content, skip_neighbor_stat=True) == 0
    whole = load("model.ckpt-4.pt")
    Path("model.ckpt-4.pt").unlink()
    assert train(content, skip_neighbor_stat=True, restart="model.ckpt-2.pt") == 0
    continued = load("model.ckpt-4.pt")
    for ours, expected in (
        (continued["model"], whole["model"]),
        (continued["ema"]["model"], whole["ema"]["model"]),
    ):
        for name, x in expected.items():
            if torch.is_tensor(x):
                torch.testing.assert_close(ours[name], x, rtol=0, atol=0)

    content = long_input(kind, system)
    options = {"restart": str(in_both / kind / "model.ckpt-10.pt"), "skip_neighbor_stat": True}
    assert train(content, **options) == 0
    theirs = read(in_both / kind / f"model.ckpt-{LONG}.pt")
    # Adam divides small gradients by their size: rounding grows.
    tolerance = 1e-4 if kind.startswith("dpa4") else 1e-6
    assert_close(load(f"model.ckpt-{LONG}.pt")["model"], theirs["model"], tolerance)


def test_deepmd_kit_continues_our_checkpoints(tmp_path, train):
    system = write_spin_data(tmp_path)
    contents = {}
    for kind in ("se_e2_a", "dpa4_native"):
        content = spin_input(kind, system, 3, save_ckpt=f"{kind}/ours")
        assert train(content, skip_neighbor_stat=True) == 0
        content["training"] |= {"numb_steps": 6, "save_ckpt": "model.ckpt"}
        contents[kind] = content
    in_deepmd_kit(tmp_path, contents, "--restart", "ours-3.pt")
    for kind in contents:
        states = read(tmp_path / kind / "model.ckpt-6.pt")["optimizer"]["state"].values()
        # It repeats the last step.
        assert {int(state["step"]) for state in states} == {7}


def assert_agree(prediction, theirs, tolerance):
    """Compare ours with what deepmd-kit's `DeepPot.eval` returns, relative to its largest values."""
    energy, force, virial, force_mag, mask = theirs
    np.testing.assert_allclose(prediction.energy, energy[:, 0], rtol=tolerance)
    for values, expected in (
        (prediction.force, force),
        (prediction.force_mag, force_mag),
        (prediction.virial, virial),
    ):
        np.testing.assert_allclose(values, expected, atol=tolerance * np.abs(expected).max())
    assert (prediction.mask_mag == mask[..., 0]).all()


@pytest.mark.parametrize("kind", SPIN_MODELS)
def test_predictions_are_deepmd_kits(kind, in_both, caplog):
    """Energies, forces, magnetic forces and virials of its checkpoint; errors of `dp test`."""
    from deepmd.infer import DeepPot

    checkpoint = str(in_both / kind / f"model.ckpt-{LONG}.pt")
    predictor = Predictor(checkpoint, device="cpu")
    frames = frames_for(predictor, in_both / "sys")
    ours = predictor.evaluate(frames)
    theirs = DeepPot(checkpoint).eval(
        frames.coord.reshape(1, -1), frames.box.reshape(1, 9), TYPES, spin=frames.spin
    )
    tolerance = tolerance_of(kind)
    assert_agree(ours, theirs, tolerance)
    energy, _, _, force_mag, mask = theirs

    atoms = Atoms(
        [predictor.type_map[k] for k in TYPES], frames.coord[0], cell=frames.box[0], pbc=True
    )
    atoms.set_array("spin", frames.spin[0])
    atoms.info["spin"] = 2.0  # of all atoms together, as headers of extended XYZ say
    atoms.calc = DeepPotCalculator(checkpoint)
    assert atoms.get_potential_energy() == pytest.approx(energy[0, 0], rel=tolerance)
    np.testing.assert_allclose(
        atoms.calc.results["force_mag"], force_mag[0], atol=tolerance * np.abs(force_mag).max()
    )

    with caplog.at_level("INFO"):
        assert main(["test", "-m", checkpoint, "-s", str(in_both / "sys"), "-d", "detail"]) == 0
    difference = (force_mag - frames.force_mag)[mask[..., 0]]
    rmse = np.sqrt(np.square(difference).mean())
    lines = [record.getMessage() for record in caplog.records]
    (line,) = {line for line in lines if line.startswith("Force spin RMSE")}
    assert float(line.split(":")[1].split()[0]) == pytest.approx(rmse, rel=max(tolerance, 1e-6))
    assert np.loadtxt("detail.fm.out").shape == (TYPES.count(0), 6)


@pytest.mark.parametrize(
    ("kind", "output"),
    [
        ("se_e2_a", "frozen.pth"),
        ("dpa1", "frozen.pth"),
        # Compiling takes minutes.
        pytest.param("dpa4_native", "frozen.pt2", marks=pytest.mark.slow),
    ],
)
def test_a_frozen_file_in_deepmd_kit_is_the_checkpoint(kind, output, tmp_path, train):
    from deepmd.infer import DeepPot

    system = write_spin_data(tmp_path)
    assert train(spin_input(kind, system, 2), skip_neighbor_stat=True) == 0
    if kind.startswith("dpa4") and not has_operators():
        pytest.skip("deepmd-kit's operators do not fit the installed torch")
    assert main(["freeze", "-c", "model.ckpt-2.pt", "-o", "frozen"]) == 0
    predictor = Predictor("model.ckpt-2.pt", device="cpu")
    frames = frames_for(predictor, system)
    theirs = DeepPot(output).eval(
        frames.coord.reshape(1, -1), frames.box.reshape(1, 9), TYPES, spin=frames.spin
    )
    assert_agree(predictor.evaluate(frames), theirs, tolerance_of(kind))


@pytest.mark.parametrize("kind", ["se_e2_a", "dpa4_native"])
def test_fine_tuning_fits_the_bias(kind, in_both, train, load):
    content = long_input(kind, str(in_both / "sys"))
    content["training"]["numb_steps"] = 1
    content["learning_rate"] = {"type": "exp", "start_lr": 1e-30, "stop_lr": 1e-31}
    checkpoint = str(in_both / kind / f"model.ckpt-{LONG}.pt")
    before = read(checkpoint)["model"]
    assert train(content, skip_neighbor_stat=True, finetune=checkpoint) == 0
    after = load("model.ckpt-1.pt")["model"]
    (bias,) = (name for name in before if name.endswith("atomic_model.out_bias"))
    assert not torch.equal(after[bias], before[bias])
    predictor = Predictor("model.ckpt-1.pt", device="cpu")
    frames = frames_for(predictor, in_both / "sys")
    np.testing.assert_allclose(predictor.evaluate(frames).energy, frames.energy, rtol=1e-6)


def test_commands_read_a_checkpoint_or_say_why_not(in_both, caplog, capsys):
    checkpoint = str(in_both / "se_e2_a" / f"model.ckpt-{LONG}.pt")
    system = str(in_both / "sys")
    with caplog.at_level("INFO"):
        assert main(["show", checkpoint, "size", "observed-type"]) == 0
        assert main(["model-devi", "-m", checkpoint, checkpoint, "-s", system]) == 0
    assert "Observed types: ['H', 'O']" in caplog.text
    assert main(["change-bias", checkpoint, "-s", system, "-o", "changed.pt"]) == 0
    assert Predictor("changed.pt", device="cpu").model.out_bias.shape == (1, 2, 1)
    assert main(["check", checkpoint, "-s", system]) == 2
    assert "spins (model/spin)" in capsys.readouterr().err
    assert main(["freeze", "-c", checkpoint, "-o", "frozen"]) == 0
    assert main(["test", "-m", "frozen.pth", "-s", system]) == 2
    assert "test the checkpoint" in capsys.readouterr().err
    content = spin_input("se_e2_a", system, 1)
    Path("explored.json").write_text(json.dumps(content))
    with pytest.raises(ExploreError, match="model/spin"):
        BaseInput(Path("explored.json"))


def test_change_bias_sees_all_virtual_atoms(in_both):
    """Those of long spins are within the cut-off of atoms far beyond it."""
    system = write_spin_data(Path.cwd())
    spins = Path(system) / "set.000" / "spin.npy"
    np.save(spins, 4 * np.load(spins))
    checkpoint = str(in_both / "se_e2_a" / f"model.ckpt-{LONG}.pt")
    assert main(["change-bias", checkpoint, "-s", system, "-o", "changed.pt"]) == 0
    predictor = Predictor("changed.pt", device="cpu")
    frames = frames_for(predictor, system)
    np.testing.assert_allclose(predictor.evaluate(frames).energy, frames.energy, rtol=1e-12)


def frames_for(predictor, path):
    """The frame of a system with its spins."""
    (system,) = open_systems([str(path)])
    return system.with_parameters(predictor.parameters).frames([0])


@pytest.mark.parametrize("kind", ["dpa1", "dpa4_native"])
def test_batches_on_the_device_have_the_outputs_of_plain_ones(kind, tmp_path):
    """Frames of two sizes in one batch, their spins as inputs and labels of magnetic forces."""
    large = Path(write_spin_data(tmp_path, nframes=3))
    cut = {}
    for path in (large / "set.000").glob("*.npy"):
        values = np.load(path)
        cut[path.stem] = values[:, :27] if values.shape[1:] == (3 * len(TYPES),) else values
    small = write_npy(tmp_path / "small", TYPES[:9], [cut], TYPE_MAP)
    section = spin_input(kind, small, 1)["model"]
    settings = host(section, "model")
    model = build_model(settings, seed=1)
    systems = with_parameters(open_systems([str(large), small], TYPE_MAP), Parameters.of(settings))
    model.reach_spins(longest_spin(systems))

    def loader():
        cache = NeighborCache.of(model.neighbors, 2)
        return DataLoader(systems, "mixed:3", seed=5, cache=cache)

    plain = loader()
    resident = ResidentBatches(loader(), CPU)
    for _ in range(3):
        batch = to_device(plain.next(), 2, CPU)
        expected = batch.compared(model(batch.structures))
        other = resident.next().read()
        values = other.compared(model(other.structures))
        torch.testing.assert_close(values["energy"], expected["energy"], rtol=1e-12, atol=1e-12)
        # The atoms of a frame in memory of the device are sorted by type.
        squares = [
            torch.stack([x["force_mag"].square().sum((1, 2)), x["mask_mag"].sum(1).double()])
            for x in (values, expected)
        ]
        torch.testing.assert_close(*squares, rtol=1e-10, atol=1e-12)
        loss = build_loss({"type": "ener_spin"}, TYPE_MAP)
        losses = [
            loss(prediction, x.labels, 1.0, x.compared_atoms(model.counted))[0]
            for prediction, x in ((values, other), (expected, batch))
        ]
        torch.testing.assert_close(*losses, rtol=1e-10, atol=0)


def test_what_spins_need_is_one_clear_error(tmp_path, train):
    system = Path(write_spin_data(tmp_path))
    content = spin_input("dpa4_native", str(system), 1)
    (system / "set.000" / "spin.npy").unlink()
    with pytest.raises(DataError, match=r"spin\.npy: missing"):
        train(content, skip_neighbor_stat=True)
    content["model"]["spin"]["allow_missing_label"] = True
    assert train(content, skip_neighbor_stat=True) == 0

    del content["model"]["spin"]
    with pytest.raises(InputError, match="needs model/spin"):
        train(content)
    content = spin_input("se_e2_a", str(system), 1)
    del content["model"]["spin"]["virtual_scale"]
    with pytest.raises(InputError, match="virtual_scale is missing"):
        train(content)
