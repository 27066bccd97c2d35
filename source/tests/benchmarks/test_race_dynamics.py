"""Dynamics of the race's potentials: ensembles of runs, blow-ups and close contacts."""

import json

import numpy as np
import pytest

pytest.importorskip("ase")
import dynamics
from ase import Atoms, units
from dynamics import WATCH, Ensemble, report, run_copies, shortest
from make_silicon import crystal
from stillinger_weber import StillingerWeber

pytestmark = pytest.mark.slow  # of scripts, not of the package


def as_potential(calculator, atoms):
    """Return a calculator of ASE as a function of the positions of copies."""

    def potential(positions):
        energies, forces = np.empty(len(positions)), np.empty_like(positions)
        for row, x in enumerate(positions):
            copy = atoms.copy()
            copy.positions, copy.calc = x, calculator()
            energies[row], forces[row] = copy.get_potential_energy(), copy.get_forces()
        return energies, forces

    return potential


def test_dynamics_keep_energy_and_find_a_potential_that_blows_up():
    atoms = crystal()
    potential = as_potential(StillingerWeber, atoms)
    cold = {"temperature": 300.0, "picoseconds": 0.02, "time_step": 1.0}
    both = run_copies(atoms, potential, seeds=[1, 2], **cold)
    (alone,) = run_copies(atoms, potential, seeds=[2], **cold)
    found = report(both)
    assert json.loads(json.dumps(found)) == json.loads(json.dumps(found, allow_nan=False))
    assert found["runs"][1] == alone.summary() != found["runs"][0] | {"seed": 2}
    for each in found["runs"]:
        assert each["stable"]
        assert each["picoseconds"] == 0.02
        assert (
            abs(each["drift"]) < 20
        )  # meV/atom/ps; the kinetic energy falls by some 1,000 in this time
        assert each["fluctuation"] < 0.2
        assert each["left"] == {}
    assert found["blow_ups_per_ps"] == (0.0, pytest.approx(25.0))
    hot = run_copies(
        atoms, potential, temperature=3000.0, seeds=[1], picoseconds=0.2, time_step=50.0
    )
    assert report(hot)["blow_ups_per_ps"][0] == pytest.approx(1.0 / hot[0].time)
    assert hot[0].summary()["drift"] is None


def test_dynamics_say_when_atoms_come_too_close(monkeypatch):
    monkeypatch.setattr(dynamics, "HOTTEST", np.inf)
    atoms = Atoms(
        "OHH",
        positions=[[0, 0, 0], [-7, 0, 0], [0, 9, 0]],
        cell=[10, 10, 10],
        pbc=[True, False, True],
    )
    assert shortest([atoms]) == pytest.approx({"H-H": 90**0.5, "H-O": 3.0})

    def falling(positions):  # towards an image of oxygen, alike for every copy
        forces = np.zeros_like(positions)
        forces[:, 1, 0] = -2.0
        return np.zeros(len(positions)), forces

    conditions = {"temperature": 1e-9, "seeds": [1, 2], "picoseconds": 0.012, "time_step": 0.5}
    courses = run_copies(atoms, falling, allowed={"H-O": 2.7, "O-O": 5.0}, **conditions)
    for course in courses:
        assert set(course.left) == {"H-O"}
        # ½·a·t² = 0.3 Å with 2 eV/Å on 1.008 u: 5.6 fs, at the next look
        assert course.left["H-O"] == pytest.approx(0.5e-3 * WATCH * np.ceil(5.6 / (0.5 * WATCH)))
    departures, uncertainty = report(courses)["departures_per_ps"]
    assert departures == pytest.approx(1.0 / courses[0].left["H-O"])
    assert uncertainty == pytest.approx(departures / 2**0.5)


PAIRS, STIFF = 16, 3.0  # springs between two atoms each, eV/Å²


def springs(constant):
    """Return the potential of atoms in pairs, whose vectors are Gaussian."""

    def potential(positions):
        vectors = positions[:, ::2] - positions[:, 1::2]
        forces = np.empty_like(positions)
        forces[:, ::2], forces[:, 1::2] = -constant * vectors, constant * vectors
        return 0.5 * constant * (vectors**2).sum(axis=(1, 2)), forces

    return potential


def variance(positions):
    return ((positions[:, ::2] - positions[:, 1::2]) ** 2).mean()


def test_friction_samples_the_temperature():
    atoms = Atoms("H" * 2 * PAIRS, positions=np.zeros((2 * PAIRS, 3)))
    # 2 fs are a fifth of the period: the positions of this scheme are right at any stable time step
    ensemble = Ensemble(atoms, springs(STIFF), 1000.0, range(40), friction=0.1)
    squares, kinetic = [], []
    for step in range(600):
        ensemble.step(2.0 * units.fs)
        if step > 60 and step % 5 == 0:
            squares.append(variance(ensemble.positions))
            kinetic.append(ensemble.kinetic().mean())
    assert np.mean(squares) == pytest.approx(units.kB * 1000.0 / STIFF, rel=0.02)
    # velocities are not: they are too slow by (time step · frequency / 2)²
    assert 0.5 < np.mean(kinetic) / (1.5 * units.kB * 1000.0 * len(atoms)) < 0.98
    alone = Ensemble(atoms, springs(STIFF), 1000.0, [39], friction=0.1)
    ensemble = Ensemble(atoms, springs(STIFF), 1000.0, [1, 39], friction=0.1)
    ensemble.keep(np.array([False, True]))
    for _ in range(10):
        alone.step(2.0 * units.fs)
        ensemble.step(2.0 * units.fs)
    np.testing.assert_array_equal(alone.positions, ensemble.positions)
