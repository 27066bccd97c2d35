"""LAMMPS with our frozen files: LAMMPS_LMP=its program, LAMMPS_MPIEXEC=its mpiexec, `pytest -m lammps`."""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from frozen_models import LARGER, TABULATED, build
from hosted_models import hosted_input

from deepmd_muon.argcheck.load import normalize
from deepmd_muon.cli.main import main
from deepmd_muon.deploy.compress import compress
from deepmd_muon.deploy.freeze import freeze
from deepmd_muon.infer import DeepPotCalculator, Predictor
from deepmd_muon.model import build_model
from deepmd_muon.model.deepmd_kit import to_deepmd_kit

EXAMPLE = Path(__file__).parents[3] / "examples" / "water_md"

pytestmark = [
    pytest.mark.lammps,
    pytest.mark.skipif("LAMMPS_LMP" not in os.environ, reason="needs LAMMPS_LMP"),
]


def live_model(descriptor, seed, **section):
    """A model with small forces: larger ones would let atoms collapse. A table adds its forces."""
    model = build({**descriptor, "seed": seed}, {"neuron": [24, 24], "seed": seed}, **section)
    return with_small_forces(model)


def with_small_forces(model):
    """Scale the energies of a model, so that its largest force is 0.1 eV/Å on a frame of the example."""
    data = EXAMPLE.parent / "water_xtb" / "data" / "valid" / "300K"
    coord, box = (
        np.load(data / "set.000" / f"{name}.npy")[0].reshape(-1, 3) for name in ("coord", "box")
    )
    force = (
        Predictor(model, device="cpu")
        .predict(coord, box, np.loadtxt(data / "type.raw", dtype=int))
        .force
    )
    with torch.no_grad():
        for net in model.atomic_model.fitting_net.filter_layers.networks:
            net.layers[-1].matrix.mul_(0.1 / np.abs(force).max())
    return model


def run_lammps(folder, model, ranks, *, steps=40, change=lambda text: text):
    """Run the example's input; return its thermo columns and the dumped frames."""
    ase_io = pytest.importorskip("ase.io")
    (folder / "in.lammps").write_text(change((EXAMPLE / "in.lammps").read_text()))
    variables = ["-var", "model", str(model), "-var", "steps", str(steps)]
    words = [os.environ["LAMMPS_LMP"], "-in", "in.lammps", *variables]
    if ranks > 1:
        if "LAMMPS_MPIEXEC" not in os.environ:
            pytest.skip("needs LAMMPS_MPIEXEC")
        words = [os.environ["LAMMPS_MPIEXEC"], "-n", str(ranks), *words]
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(
        words,
        cwd=folder,
        capture_output=True,
        text=True,
        env=environment | {"OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    table = re.search(r"^ *Step .*?\n(.*?)^Loop time", done.stdout, re.DOTALL | re.MULTILINE)
    assert table is not None, done.stdout
    thermo = np.array(
        [[float(word) for word in line.split()] for line in table.group(1).strip().splitlines()]
    )
    frames = ase_io.read(
        folder / "water.dump", index=":", format="lammps-dump-text", specorder=["O", "H"]
    )
    return thermo, frames


@pytest.fixture
def folder(tmp_path):
    subprocess.run([sys.executable, EXAMPLE / "make_structure.py"], cwd=tmp_path, check=True)
    return tmp_path


def pair_table(folder):
    """Write a table with weak repulsion up to 1.6 Å, and return the section that blends it in at O–H bonds."""
    distance = 0.01 * np.arange(1, 200)
    energy = 0.4 * np.clip(1.6 - distance, 0.0, None) ** 3
    np.savetxt(folder / "table.txt", np.stack([distance, energy, 1.5 * energy, 0.7 * energy], 1))
    return {
        "use_srtab": str(folder / "table.txt"),
        "smin_alpha": 0.1,
        "sw_rmin": 0.8,
        "sw_rmax": 1.3,
    }


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("kind", LARGER)
def test_forces_and_energies_are_the_checkpoints(kind, ranks, folder):
    follow(live_model(LARGER[kind], seed=1), ranks, folder)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("kind", ["se_atten", "dpa3"])
def test_a_short_range_table_is_that_of_the_checkpoint(kind, ranks, folder):
    model, table = (
        live_model(LARGER[kind], seed=1, **section) for section in ({}, pair_table(folder))
    )
    frames = follow(table, ranks, folder)
    frames[0].calc = DeepPotCalculator(Predictor(model, device="cpu"))
    without = frames[0].get_forces()
    frames[0].calc = DeepPotCalculator(Predictor(table, device="cpu"))
    assert np.abs(frames[0].get_forces() - without).max() > 0.01


def follow(model, ranks, folder):
    """Run a frozen model; its forces and energies must be the model's, and its energy constant."""
    freeze(model, folder / "model.pth")
    return follow_file(model, ranks, folder)


def follow_file(model, ranks, folder):
    """Run the frozen file of a model."""
    thermo, frames = run_lammps(folder, "model.pth", ranks)
    assert len(frames) == len(thermo) == 5
    calculator = DeepPotCalculator(Predictor(model, device="cpu"))
    for row, frame in zip(thermo, frames, strict=True):
        forces = frame.get_forces()
        assert np.abs(forces).max() > 0.05
        frame.calc = calculator
        np.testing.assert_allclose(forces, frame.get_forces(), rtol=0, atol=1e-10)
        np.testing.assert_allclose(row[3], frame.get_potential_energy(), rtol=1e-10)
    potential, total = thermo[:, 3], thermo[:, 4]
    assert np.ptp(potential) > 1e-3
    assert np.ptp(total) < 0.02 * np.ptp(potential)
    return frames


@pytest.mark.deepmd_kit
@pytest.mark.skipif(importlib.util.find_spec("deepmd") is None, reason="needs deepmd-kit")
@pytest.mark.parametrize("kind", ["hybrid", "se_e2_r", "se_e3", "dpa2"])
def test_forces_and_energies_of_a_model_of_deepmd_kit(kind, folder, monkeypatch):
    """Frozen by its own `dp freeze`."""
    settings = normalize(hosted_input(kind, str(folder), 1)).settings.model
    model = with_small_forces(build_model(settings))
    if model.frozen_without:
        pytest.skip("deepmd-kit's operators do not fit the installed torch")
    monkeypatch.chdir(folder)
    torch.save({"model": to_deepmd_kit(model, {"lr": 1e-3, "step": 0})}, "model.pt")
    assert main(["freeze", "-c", "model.pt", "-o", "model.pth"]) == 0
    follow_file(model, 1, folder)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("kind", TABULATED)
def test_a_compressed_file_gives_the_checkpoints_forces(kind, ranks, folder):
    """Tables end at 1.2 Å, so that O–H pairs see the nets and others the tables; energy is conserved."""
    model = live_model(TABULATED[kind], seed=1)
    compress(model, folder / "model.pth", min_distance=1.2, extrapolate=1.0)
    thermo, frames = run_lammps(folder, "model.pth", ranks)
    calculator = DeepPotCalculator(Predictor(model, device="cpu"))
    for row, frame in zip(thermo, frames, strict=True):
        forces = frame.get_forces()
        assert np.abs(forces).max() > 0.05
        frame.calc = calculator
        np.testing.assert_allclose(forces, frame.get_forces(), rtol=0, atol=1e-6)
        np.testing.assert_allclose(row[3], frame.get_potential_energy(), rtol=1e-6)
    assert np.ptp(thermo[:, 4]) < 0.02 * np.ptp(thermo[:, 3])


def test_a_committee_reports_its_deviation(folder):
    from deepmd_muon.infer.model_deviation import deviation_of_force

    models = [live_model(LARGER["se_e2_a"], seed) for seed in (1, 2, 3)]
    for number, model in enumerate(models):
        freeze(model, folder / f"{number}.pth")
    committee = "0.pth 1.pth 2.pth out_file deviation.out out_freq 10"
    _, frames = run_lammps(
        folder, "0.pth", 1, change=lambda text: text.replace("${model}", committee)
    )
    table = np.loadtxt(folder / "deviation.out", ndmin=2)
    assert len(table) == len(frames)
    for row, frame in zip(table, frames, strict=True):
        types = np.array(["OH".index(symbol) for symbol in frame.symbols])
        forces = [
            Predictor(m, device="cpu").predict(frame.positions, np.array(frame.cell), types).force
            for m in models
        ]
        per_atom = deviation_of_force(np.stack(forces))[0]
        np.testing.assert_allclose(
            row[4:7], [per_atom.max(), per_atom.min(), per_atom.mean()], rtol=1e-5
        )


def test_lammps_is_there():
    assert shutil.which(os.environ["LAMMPS_LMP"]), "LAMMPS_LMP names no program"
