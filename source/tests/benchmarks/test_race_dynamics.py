"""Dynamics of the race's potentials: ensembles of runs, close contacts, errors along them, pair distributions."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("ase")
# The race's scripts are not a package.
sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "source" / "benchmarks" / "race"))

import dynamics
from along import AROUND, chosen, errors, run
from ase import Atoms
from dynamics import WATCH, WIDTH, constant_energy, distances_apart, pair_distribution, report, shortest
from make_silicon import crystal
from stillinger_weber import StillingerWeber


def by_calculator(calculator, atoms):
    """Return a calculator of ASE as the function of positions of several copies that `dynamics` takes."""

    def potential(positions):
        moved = [atoms.copy() for _ in positions]
        for frame, x in zip(moved, positions, strict=True):
            frame.positions, frame.calc = x, calculator
        return tuple(
            np.array([get(frame) for frame in moved])
            for get in (lambda frame: frame.get_potential_energy(), lambda frame: frame.get_forces())
        )

    return potential


def test_dynamics_keep_energy_and_find_a_potential_that_blows_up():
    atoms = crystal()
    potential = by_calculator(StillingerWeber(), atoms)
    cold = {"temperature": 300.0, "picoseconds": 0.02, "time_step": 1.0}
    both = constant_energy(atoms, potential, seeds=[1, 2], **cold)
    (alone,) = constant_energy(atoms, potential, seeds=[2], **cold)
    found = report(both)
    assert json.loads(json.dumps(found)) == json.loads(json.dumps(found, allow_nan=False))
    assert found["runs"][1] == alone.summary() != found["runs"][0] | {"seed": 2}
    for each in found["runs"]:
        assert each["stable"]
        assert each["picoseconds"] == 0.02
        assert abs(each["drift"]) < 20  # meV/atom/ps; the kinetic energy falls by some 1,000 in this time
        assert each["fluctuation"] < 0.2
        assert each["left"] == {}
    assert [len(course.frames) for course in both] == [17, 17]
    assert found["blow_ups_per_ps"] == (0.0, pytest.approx(25.0))
    hot = constant_energy(atoms, potential, temperature=3000.0, seeds=[1], picoseconds=0.2, time_step=50.0)
    assert report(hot)["blow_ups_per_ps"][0] == pytest.approx(1.0 / hot[0].time)
    assert hot[0].summary()["drift"] is None


def test_dynamics_say_when_atoms_come_too_close(monkeypatch):
    monkeypatch.setattr(dynamics, "HOTTEST", np.inf)
    atoms = Atoms("OHH", positions=[[0, 0, 0], [-7, 0, 0], [0, 9, 0]], cell=[10, 10, 10], pbc=[True, False, True])
    assert shortest([atoms]) == pytest.approx({"H-H": 90**0.5, "H-O": 3.0})

    def falling(positions):  # towards an image of oxygen, alike for every copy
        forces = np.zeros_like(positions)
        forces[:, 1, 0] = -2.0
        return np.zeros(len(positions)), forces

    conditions = {"temperature": 1e-9, "seeds": [1, 2], "picoseconds": 0.012, "time_step": 0.5}
    courses = constant_energy(atoms, falling, allowed={"H-O": 2.7, "O-O": 5.0}, **conditions)
    for course in courses:
        assert set(course.left) == {"H-O"}
        # ½·a·t² = 0.3 Å with 2 eV/Å on 1.008 u: 5.6 fs, at the next look
        assert course.left["H-O"] == pytest.approx(0.5e-3 * WATCH * np.ceil(5.6 / (0.5 * WATCH)))
    departures, uncertainty = report(courses)["departures_per_ps"]
    assert departures == pytest.approx(1.0 / courses[0].left["H-O"])
    assert uncertainty == pytest.approx(departures / 2**0.5)


def test_errors_along_dynamics_are_those_of_the_potential():
    atoms, push = crystal(), np.array([0.0, 0.3, 0.0])
    true = by_calculator(StillingerWeber(), atoms)

    def wrong(positions):  # one atom is pushed, and the energy is too high
        energies, forces = true(positions)
        forces[:, 7] += push
        return energies + 0.25, forces

    moments = run(atoms, wrong, temperature=300.0, seed=1, picoseconds=0.03, time_step=1.0)
    assert [moment.time for moment in moments] == list(range(31))
    nearest = moments[0].closest["Si-Si"]
    distances = [moment.closest["Si-Si"] for moment in moments]
    least = np.quantile(distances, 0.3)
    first, frames = chosen(moments, {"Si-Si": least}, every=12.0)
    assert first == next(k for k, distance in enumerate(distances) if distance < least) > 0
    assert distances[0] == nearest == pytest.approx(5.431 * 3**0.5 / 4, abs=1e-3)
    wanted = {0, 12, 24} | {first + offset for offset in AROUND if 0 <= first + offset < 30}
    assert [moment.time for moment in frames] == sorted(wanted)
    found = errors(frames[-1], atoms, StillingerWeber)
    assert found["energy"] == pytest.approx(0.25)
    assert found["force_of_worst_atom"] == pytest.approx(0.3)
    assert found["force_of_median_atom"] == 0.0
    assert found["force"] == pytest.approx(0.3 / (3 * len(atoms)) ** 0.5, abs=1e-4)
    assert chosen(moments, {"Si-Si": 1.0}, every=12.0)[0] is None


def test_pair_distributions_count_neighbors():
    atoms = crystal()
    g = pair_distribution([atoms], "Si", "Si", 3.0)
    r = np.arange(len(g)) * WIDTH + WIDTH / 2
    shells = 4 / 3 * np.pi * ((r + WIDTH / 2) ** 3 - (r - WIDTH / 2) ** 3)
    neighbors = (g * shells).sum() * 63 / atoms.get_volume()
    assert neighbors == pytest.approx(4.0)
    assert distances_apart([atoms], [atoms]) == {"Si-Si": 0.0}
    pressed = crystal(0.95)
    assert distances_apart([pressed], [atoms])["Si-Si"] > 1.0
