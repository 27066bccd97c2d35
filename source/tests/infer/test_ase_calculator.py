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


@pytest.mark.parametrize("pbc", [(True, True, True), (True, True, False)])
def test_stress_is_the_energys_slope_under_finite_strain(atoms, pbc):
    atoms.pbc = pbc
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
        assert stress[row, column] == pytest.approx(
            (energies[0] - energies[1]) / (2e-4 * volume), abs=1e-8
        )


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
    for pbc in ((True, True, False), False):
        atoms.pbc = pbc
        atoms.cell[2] = 0.0
        with pytest.raises(NotImplementedError, match="volume" if np.any(pbc) else "molecule"):
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


def test_a_committee_gives_means_and_deepmd_kits_deviations(atoms, committee):
    alone = []
    for predictor in committee:
        atoms.calc = DeepPotCalculator(predictor)
        alone.append((atoms.get_potential_energy(), atoms.get_forces(), atoms.get_stress()))
        assert "forces_comm" not in atoms.calc.implemented_properties
    atoms.calc = DeepPotCalculator(committee)
    energy, forces, stress = (np.array(values) for values in zip(*alone, strict=True))
    assert atoms.get_potential_energy() == pytest.approx(energy.mean(), rel=1e-14)
    np.testing.assert_allclose(atoms.get_forces(), forces.mean(axis=0), atol=1e-14)
    np.testing.assert_allclose(atoms.get_stress(), stress.mean(axis=0), atol=1e-14)
    assert atoms.get_potential_energies().sum() == pytest.approx(energy.mean())
    results = atoms.calc.results
    for name, values in (("energy", energy), ("forces", forces), ("stress", stress)):
        assert np.array_equal(atoms.calc.get_property(f"{name}_comm", atoms), values)
    per_atom = np.sqrt(forces.var(axis=0).sum(axis=-1))
    np.testing.assert_allclose(results["devi_f"], per_atom, rtol=1e-10)
    for kind in ("max", "min", "mean"):
        name = f"{kind.replace('mean', 'avg')}_devi_f"
        assert results[name] == pytest.approx(getattr(per_atom, kind)(), rel=1e-10)
    assert results["devi_e"] == pytest.approx(energy.std() / len(atoms), rel=1e-10)
    assert 0 < results["min_devi_v"] < results["avg_devi_v"] < results["max_devi_v"]
    # The forces are the mean energy's slope: dynamics with a committee conserve it.
    moved = []
    for sign in (1, -1):
        atoms.positions[3, 1] += sign * 1e-4 * (1 if sign == 1 else 2)
        moved.append(atoms.get_potential_energy())
    assert forces.mean(axis=0)[3, 1] == pytest.approx((moved[1] - moved[0]) / 2e-4, rel=1e-5)


def test_models_of_a_committee_may_order_their_types_differently(atoms, predictor, model_section):
    from deepmd_muon.infer import Predictor
    from deepmd_muon.model import build_model

    other = Predictor(
        build_model({**model_section, "type_map": ["H", "O", "Na"]} | _three_types(model_section))
    )
    swapped = DeepPotCalculator(other).get_potential_energy(atoms)
    both = DeepPotCalculator([predictor, other])
    assert both.get_property("energy_comm", atoms)[1] == swapped
    atoms.symbols[3] = "Na"
    with pytest.raises(PredictionInputError, match="knows O, H; these atoms hold Na"):
        both.get_potential_energy(atoms)


def _three_types(section):
    return {"descriptor": {**section["descriptor"], "sel": [48, 24, 4]}}


def test_a_committee_survives_ases_files(atoms, committee, tmp_path):
    from ase.io import read, write

    atoms.calc = DeepPotCalculator(committee)
    energy = atoms.get_potential_energy()
    for name in ("committee.xyz", "committee.traj"):
        write(tmp_path / name, atoms)
        assert read(tmp_path / name).get_potential_energy() == pytest.approx(energy)


def test_a_committee_needs_a_model():
    with pytest.raises(PredictionInputError, match="empty"):
        DeepPotCalculator([])


def test_without_ase_the_message_says_what_to_install(monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "ase", None)
    monkeypatch.delitem(sys.modules, "deepmd_muon.infer.ase_calculator")
    with pytest.raises(ImportError, match="DeepPotCalculator needs ASE: install the package ase"):
        import deepmd_muon.infer.ase_calculator  # noqa: F401 (its import is what is tested)
