import numpy as np
import pytest

pytest.importorskip("ase")
from ase import Atoms, units
from ase.md.verlet import VelocityVerlet

from deepmd_muon.infer import DeepPotCalculator
from deepmd_muon.infer.errors import PredictionInputError


@pytest.fixture
def atoms(water_atoms, predictor):
    coord, box, atype = water_atoms
    atoms = Atoms("".join("OH"[t] for t in atype), positions=coord, cell=box, pbc=True)
    atoms.calc = DeepPotCalculator(predictor)
    return atoms


def test_results_are_the_predictors(atoms, predictor, water_atoms):
    coord, box, atype = water_atoms
    expected = predictor.predict(coord, box, atype)
    assert atoms.get_potential_energy() == expected.energy[0]
    assert np.array_equal(atoms.get_forces(), expected.force[0])
    assert np.array_equal(atoms.get_potential_energies(), expected.atom_energy[0])
    sigma = -expected.virial[0].reshape(3, 3) / np.linalg.det(box)
    np.testing.assert_allclose(atoms.get_stress(voigt=False), (sigma + sigma.T) / 2, rtol=1e-12)


def test_stress_is_the_energys_slope_under_finite_strain(atoms):
    stress = atoms.get_stress(voigt=False)
    cell, positions, volume = np.array(atoms.cell), atoms.positions.copy(), atoms.get_volume()
    for row, column in ((0, 0), (1, 1), (2, 2), (1, 2), (0, 2), (0, 1)):
        energies = []
        for sign in (1, -1):
            strain = np.zeros((3, 3))
            strain[row, column] += sign * 5e-5
            strain[column, row] += sign * 5e-5
            atoms.set_cell(cell @ (np.eye(3) + strain))
            atoms.set_positions(positions @ (np.eye(3) + strain))
            energies.append(atoms.get_potential_energy())
        # A diagonal entry is strained twice by 5e-5, an off-diagonal pair once each.
        assert stress[row, column] == pytest.approx((energies[0] - energies[1]) / (2e-4 * volume), abs=1e-8)


def drift(atoms, start, timestep, steps):
    """Largest deviation of the total energy [eV] in a run, and the range of the potential energy."""
    atoms.set_positions(start[0])
    atoms.set_velocities(start[1])
    total, potential = [], []
    dynamics = VelocityVerlet(atoms, timestep * units.fs)
    for _ in dynamics.irun(steps):
        total.append(atoms.get_total_energy())
        potential.append(atoms.get_potential_energy())
    return np.ptp(total), np.ptp(potential)


def test_nve_conserves_energy_to_second_order(atoms):
    spread = np.sqrt(units.kB * 600.0 / atoms.get_masses())[:, None]
    start = atoms.positions.copy(), spread * np.random.default_rng(11).normal(size=(len(atoms), 3))
    coarse, moved = drift(atoms, start, 0.5, 40)
    fine, _ = drift(atoms, start, 0.25, 80)
    assert moved > 1e-3  # the potential did something
    assert coarse < 0.02 * moved
    # Verlet's energy error is of second order: half the step, a quarter of the error.
    assert fine / coarse == pytest.approx(0.25, rel=0.2)


def test_partly_periodic_systems(atoms, predictor, water_atoms):
    coord, box, atype = water_atoms
    atoms.pbc = False
    lone = predictor.predict(coord, None, atype)
    assert atoms.get_potential_energy() == pytest.approx(lone.energy[0], abs=1e-12)
    atoms.pbc = (True, True, False)
    # The slab by hand: the third vector perpendicular and long; the one that the cell had is not asked for.
    wide = box.copy()
    wide[2] = [0.0, 0.0, 80.0]
    slab = predictor.predict(coord, wide, atype)
    assert atoms.get_potential_energy() == pytest.approx(slab.energy[0], abs=1e-10)
    np.testing.assert_allclose(atoms.get_forces(), slab.force[0], atol=1e-10)
    assert abs(slab.energy[0] - lone.energy[0]) > 1e-6
    with pytest.raises(NotImplementedError, match="stress"):
        atoms.get_stress()


@pytest.mark.parametrize("pbc", [(True, True, True), (False, False, True)])
def test_periodic_axes_need_vectors(atoms, pbc):
    atoms.cell[2] = 0.0
    atoms.pbc = pbc
    with pytest.raises(PredictionInputError, match=r"pbc=.*T.*do not span"):
        atoms.get_potential_energy()


def test_foreign_elements_are_named(atoms):
    atoms.symbols[3] = "Na"
    with pytest.raises(PredictionInputError, match="knows O, H; these atoms hold Na"):
        atoms.get_potential_energy()


def test_without_ase_the_message_says_what_to_install(monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "ase", None)
    monkeypatch.delitem(sys.modules, "deepmd_muon.infer.ase_calculator")
    with pytest.raises(ImportError, match="DeepPotCalculator needs ASE: install the package ase"):
        import deepmd_muon.infer.ase_calculator  # noqa: F401 (its import is what is tested)
