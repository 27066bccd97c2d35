"""Our frozen files as models of metatomic; needs the package metatomic-torch: `pytest -m metatomic`."""

import numpy as np
import pytest
from frozen_models import LARGER, TABULATED, build

from deepmd_muon.deploy.compress import compress
from deepmd_muon.deploy.freeze import freeze
from deepmd_muon.infer import DeepPotCalculator

pytestmark = pytest.mark.metatomic


def calculator_of(folder):
    from metatomic_ase import MetatomicCalculator

    from deepmd_muon.infer.metatomic import export_metatomic

    export_metatomic(folder / "model.pth", folder / "model.pt")
    return MetatomicCalculator(folder / "model.pt", device="cpu", check_consistency=True)


def structure(pbc, symbols="O2H4"):
    from ase import Atoms

    random = np.random.default_rng(2)
    cell = np.array([[6.0, 0.0, 0.0], [1.5, 7.0, 0.0], [-1.0, 0.5, 6.5]])
    coord = np.array([[i, j, k] for i in range(3) for j in range(2) for k in range(1)]) * 1.6
    return Atoms(
        symbols, positions=coord + random.normal(scale=0.2, size=(6, 3)), cell=cell, pbc=pbc
    )


@pytest.mark.parametrize("pbc", [True, False])
@pytest.mark.parametrize("kind", [*LARGER, "compressed"])
def test_energy_forces_and_stress_are_the_calculators(kind, pbc, tmp_path):
    if kind == "compressed":
        compress(
            build(TABULATED["se_e2_a"] | {"seed": 3}), tmp_path / "model.pth", min_distance=0.8
        )
    else:
        freeze(build(LARGER[kind] | {"seed": 3}), tmp_path / "model.pth")
    atoms, expected = structure(pbc), structure(pbc)
    atoms.calc, expected.calc = (
        calculator_of(tmp_path),
        DeepPotCalculator(tmp_path / "model.pth", device="cpu"),
    )
    forces = expected.get_forces()
    assert np.abs(forces).max() > 1e-3
    np.testing.assert_allclose(atoms.get_forces(), forces, rtol=0, atol=1e-12)
    np.testing.assert_allclose(
        atoms.get_potential_energy(), expected.get_potential_energy(), rtol=1e-12
    )
    if pbc:
        np.testing.assert_allclose(atoms.get_stress(), expected.get_stress(), rtol=0, atol=1e-13)


def test_rejects_other_elements_and_slabs(tmp_path):
    freeze(build(LARGER["se_e2_a"] | {"seed": 3}), tmp_path / "model.pth")
    calculator = calculator_of(tmp_path)
    for atoms, word in (
        (structure(True, "O2H3C"), r"\b6\b"),
        (structure([True, True, False]), "periodic"),
    ):
        atoms.calc = calculator
        with pytest.raises(
            Exception, match=word
        ):  # of metatomic or TorchScript, which have classes of their own
            atoms.get_forces()
