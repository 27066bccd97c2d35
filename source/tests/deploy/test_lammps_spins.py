"""LAMMPS with frozen models that read spins (`pytest -m "lammps and deepmd_kit"`, LAMMPS_LMP=its program)."""

import importlib.util
import os
import subprocess

import numpy as np
import pytest
import torch
from ase import Atoms
from hosted_models import TYPE_MAP, TYPES, spin_input

from deepmd_muon.argcheck.load import normalize
from deepmd_muon.cli.main import main
from deepmd_muon.infer import DeepPotCalculator, Predictor
from deepmd_muon.model import build_model
from deepmd_muon.model.deepmd_kit import to_deepmd_kit
from deepmd_muon.model.hosted.kit import has_operators

pytestmark = [
    pytest.mark.lammps,
    pytest.mark.deepmd_kit,
    pytest.mark.skipif("LAMMPS_LMP" not in os.environ, reason="needs LAMMPS_LMP"),
    pytest.mark.skipif(importlib.util.find_spec("deepmd") is None, reason="needs deepmd-kit"),
]
LENGTH = 7.0  # of the cell [Å]
HBAR = 4.135667403e-3 / (2 * np.pi)  # as LAMMPS has it [eV ps]
INPUT = f"""
units metal
atom_style spin
atom_modify map yes
read_data frame.lmp
mass 1 15.999
mass 2 1.008
pair_style deepspin {{}}
pair_coeff * * {" ".join(TYPE_MAP)}
compute spins all property/atom sp spx spy spz fmx fmy fmz
dump frame all custom 1 frame.dump fx fy fz c_spins[*]
dump_modify frame sort id format float %.17g
run 0
print "$(pe:%.17g)" file energy.txt
"""


def magnetic_frame():
    """Twelve atoms in a cubic cell; oxygen has spins."""
    rng = np.random.default_rng(1)
    grid = np.stack(np.meshgrid(*[np.arange(3)] * 3), -1).reshape(-1, 3)[: len(TYPES)]
    positions = (grid + rng.uniform(0.1, 0.2, grid.shape)) * LENGTH / 3
    symbols = [TYPE_MAP[kind] for kind in TYPES]
    atoms = Atoms(symbols, positions, cell=[LENGTH] * 3, pbc=True)
    atoms.set_array("spin", rng.normal(size=grid.shape) * (np.array(TYPES)[:, None] == 0))
    return atoms


def write_frame(atoms, path):
    """Write a data file of LAMMPS: a spin is a direction and a length."""
    lines = ["", f"{len(atoms)} atoms", f"{len(TYPE_MAP)} atom types"]
    lines += [f"0 {LENGTH} {axis}lo {axis}hi" for axis in "xyz"]
    lines += ["", "Atoms # spin", ""]
    for number, (kind, position, spin) in enumerate(
        zip(TYPES, atoms.positions, atoms.arrays["spin"], strict=True), start=1
    ):
        length = np.linalg.norm(spin)
        direction = spin / length if length else np.array([0.0, 0.0, 1.0])
        values = " ".join(f"{x:.17g}" for x in (*position, *direction, length))
        lines.append(f"{number} {kind + 1} {values}")
    path.write_text("\n".join(lines) + "\n")


@pytest.mark.parametrize(
    ("kind", "output"),
    [
        ("se_e2_a", "frozen.pth"),
        ("dpa1", "frozen.pth"),
        # Compiling takes minutes.
        pytest.param("dpa4_native", "frozen.pt2", marks=pytest.mark.slow),
        pytest.param("dpa4_virtual", "frozen.pt2", marks=pytest.mark.slow),
    ],
)
def test_lammps_has_energy_forces_and_magnetic_forces(kind, output, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model = build_model(normalize(spin_input(kind, str(tmp_path), 1)).settings.model)
    if not has_operators():
        pytest.skip("deepmd-kit's operators do not fit the installed torch")
    torch.save({"model": to_deepmd_kit(model, {"lr": 1e-3, "step": 0})}, "model.pt")
    assert main(["freeze", "-c", "model.pt", "-o", "frozen"]) == 0
    atoms = magnetic_frame()
    write_frame(atoms, tmp_path / "frame.lmp")
    (tmp_path / "in.lammps").write_text(INPUT.format(output))
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    command = [os.environ["LAMMPS_LMP"], "-in", "in.lammps"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]

    atoms.calc = DeepPotCalculator(Predictor(model, device="cpu"))
    # DPA-4 computes parts of its geometry in float32.
    tolerance = 1e-5 if kind.startswith("dpa4") else 1e-10
    energy = float((tmp_path / "energy.txt").read_text())
    assert energy == pytest.approx(atoms.get_potential_energy(), rel=tolerance)
    forces, lengths, magnetic = np.split(np.loadtxt("frame.dump", skiprows=9), [3, 7], axis=1)
    expected = atoms.get_forces()
    np.testing.assert_allclose(forces, expected, atol=tolerance * np.abs(expected).max())
    # LAMMPS turns directions of spins: its force is the slope times |spin| / ħ [rad/ps].
    expected = atoms.calc.results["force_mag"] * lengths[:, :1] / HBAR
    assert np.abs(expected).max() > 0.0
    np.testing.assert_allclose(magnetic, expected, atol=tolerance * np.abs(expected).max())
