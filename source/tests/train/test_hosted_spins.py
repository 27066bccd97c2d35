"""Models of deepmd-kit that read spins, compared with deepmd-kit's own trainer (`pytest -m deepmd_kit`).

They run in an environment in which both packages can be imported.
"""

import importlib.util
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from hosted_models import SPIN_MODELS, TYPES, spin_input, write_spin_data
from test_hosted_training import assert_close, in_deepmd_kit, read

from deepmd_muon.argcheck import InputError
from deepmd_muon.cli.main import main
from deepmd_muon.data import DataError, open_systems
from deepmd_muon.infer import Predictor

pytestmark = [
    pytest.mark.deepmd_kit,
    pytest.mark.skipif(
        importlib.util.find_spec("deepmd") is None, reason="deepmd-kit is not importable here"
    ),
]
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
    energy, force, virial, force_mag, mask = theirs
    tolerance = tolerance_of(kind)
    np.testing.assert_allclose(ours.energy, energy[:, 0], rtol=tolerance)
    for values, expected in ((ours.force, force), (ours.force_mag, force_mag)):
        np.testing.assert_allclose(values, expected, atol=tolerance * np.abs(expected).max())
    np.testing.assert_allclose(ours.virial, virial, atol=tolerance * np.abs(virial).max())
    assert (ours.mask_mag == mask[..., 0]).all()

    with caplog.at_level("INFO"):
        assert main(["test", "-m", checkpoint, "-s", str(in_both / "sys"), "-d", "detail"]) == 0
    difference = (force_mag - frames.force_mag)[mask[..., 0]]
    rmse = np.sqrt(np.square(difference).mean())
    lines = [record.getMessage() for record in caplog.records]
    (line,) = {line for line in lines if line.startswith("Force spin RMSE")}
    assert float(line.split(":")[1].split()[0]) == pytest.approx(rmse, rel=max(tolerance, 1e-6))
    assert np.loadtxt("detail.fm.out").shape == (TYPES.count(0), 6)


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


def frames_for(predictor, path):
    """The frame of a system with its spins."""
    (system,) = open_systems([str(path)])
    return system.with_parameters(predictor.parameters).frames([0])


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
