"""Dynamics of the race's potentials: ensembles of runs, close contacts, errors along them, pair distributions."""

import json
import sys
from argparse import Namespace
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("ase")
# The race's scripts are not a package.
sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "source" / "benchmarks" / "race"))

import dynamics
import reference
from along import AROUND, chosen, errors, run
from ase import Atoms, units
from ase.build import molecule
from distributions import LONGEST, WIDTH, compare, distances_apart, distributions, halves_apart, pair_distribution
from dynamics import CLOSER, WATCH, Ensemble, limits, report, run_copies, shortest
from make_silicon import crystal
from reference import as_potential, hybrid_monte_carlo
from stillinger_weber import StillingerWeber


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
        assert abs(each["drift"]) < 20  # meV/atom/ps; the kinetic energy falls by some 1,000 in this time
        assert each["fluctuation"] < 0.2
        assert each["left"] == {}
    assert [len(course.frames) for course in both] == [17, 17]
    assert found["blow_ups_per_ps"] == (0.0, pytest.approx(25.0))
    hot = run_copies(atoms, potential, temperature=3000.0, seeds=[1], picoseconds=0.2, time_step=50.0)
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
    courses = run_copies(atoms, falling, allowed={"H-O": 2.7, "O-O": 5.0}, **conditions)
    for course in courses:
        assert set(course.left) == {"H-O"}
        # ½·a·t² = 0.3 Å with 2 eV/Å on 1.008 u: 5.6 fs, at the next look
        assert course.left["H-O"] == pytest.approx(0.5e-3 * WATCH * np.ceil(5.6 / (0.5 * WATCH)))
    departures, uncertainty = report(courses)["departures_per_ps"]
    assert departures == pytest.approx(1.0 / courses[0].left["H-O"])
    assert uncertainty == pytest.approx(departures / 2**0.5)


def test_errors_along_dynamics_are_those_of_the_potential():
    atoms, push = crystal(), np.array([0.0, 0.3, 0.0])
    true = as_potential(StillingerWeber, atoms)

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


def test_distances_in_molecules_have_a_density():
    water, far = molecule("H2O"), molecule("H2O")
    far.positions[1:] *= 1.5
    curves = distributions([water, far], LONGEST)
    assert set(curves) == {"H-H", "H-O"}
    for curve in curves.values():
        assert curve.sum() * WIDTH == pytest.approx(1.0)
    assert distances_apart([water], [water]) == {"H-H": 0.0, "H-O": 0.0}
    assert distances_apart([far], [water]) == pytest.approx({"H-H": 2.0, "H-O": 2.0})
    assert distances_apart([water, far], [water]) == pytest.approx({"H-H": 1.0, "H-O": 1.0})
    assert halves_apart([[water, far], [far, water], [water]]) == pytest.approx({"H-H": 1 / 3, "H-O": 1 / 3}, abs=1e-4)
    assert halves_apart([[water, far]]) == pytest.approx({"H-H": 2.0, "H-O": 2.0})
    assert halves_apart([[water]]) == {}
    found = limits([water, far])
    assert found["H-O"] == pytest.approx(CLOSER * water.get_distance(0, 1))
    assert found["extent"] == pytest.approx(far.get_distance(1, 2) / CLOSER)


def test_equal_distributions_differ_by_chance():
    rng = np.random.default_rng(1)

    def frames(count, spread):
        return [Atoms("H" * 20, positions=spread * rng.standard_normal((20, 3))) for _ in range(count)]

    def runs(number, count, spread=1.0):
        return [frames(count, spread) for _ in range(number)]

    reference = runs(4, 40)
    found = compare(runs(6, 10), reference)
    assert found["distributions_apart"]["H-H"] == pytest.approx(found["by_chance"]["H-H"], rel=0.25)
    assert found["halves_of_reference_apart"]["H-H"] < found["halves_of_runs_apart"]["H-H"]
    other = compare(runs(6, 10, 1.2), reference)
    assert other["distributions_apart"]["H-H"] > 2 * other["by_chance"]["H-H"]


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


def test_hybrid_monte_carlo_samples_the_energy_that_decides():
    atoms = Atoms("H" * 2 * PAIRS, positions=np.zeros((2 * PAIRS, 3)))
    true, wrong = springs(STIFF), springs(0.75 * STIFF)
    ensemble = Ensemble(atoms, wrong, 1000.0, [1])
    chain = hybrid_monte_carlo(
        ensemble,
        lambda x: true(x[None])[0][0],
        np.random.default_rng(1),
        temperature=1000.0,
        steps=4,
        time_step=1.0,
        until=lambda count: count == 3000,
    )
    assert chain.positions.shape == (3000, 2 * PAIRS, 3)
    kept, stayed = chain.accepted[1:], (chain.positions[1:] == chain.positions[:-1]).all(axis=(1, 2))
    np.testing.assert_array_equal(stayed, ~kept)
    assert 0.3 < kept.mean() < 0.9
    thermal = units.kB * 1000.0
    assert variance(chain.positions[300:]) == pytest.approx(thermal / STIFF, rel=0.05)  # the wrong one: a third more
    # what holds for every reversible proposal that keeps volumes (Creutz)
    assert np.exp(-chain.changes[300:] / thermal).mean() == pytest.approx(1.0, abs=0.1)


def test_a_reference_is_sampled_once_and_summarised(tmp_path):
    from make_alloys import alloy
    from sampling import LabelledSystem, write_npy

    atoms = alloy({"Cu": 16, "Au": 16}, np.random.default_rng(1))
    forces = np.zeros((1, 32, 3))
    system = {"coord": atoms.positions[None], "box": atoms.cell.array[None], "energy": np.zeros(1), "force": forces}
    atype = np.repeat([0, 1], 16)
    write_npy(tmp_path / "cold", LabelledSystem(atype=atype, type_map=("Cu", "Au"), virial=None, **system))
    conditions = {"temperature": 300.0, "picoseconds": 0.1, "time_step": 4.0, "friction": 0.01, "samples": 5}
    args = Namespace(
        set="alloys", system=tmp_path / "cold", out=tmp_path, potential=None, hydrogen_mass=4.0, **conditions
    )
    paths = [reference.sample(seed, args, np.inf) for seed in (1, 2)]
    assert [path.name for path in paths] == ["alloys_cold_300K_1.npz", "alloys_cold_300K_2.npz"]
    written = paths[0].stat().st_mtime_ns
    assert reference.sample(1, args, np.inf) == paths[0]
    assert paths[0].stat().st_mtime_ns == written
    found = reference.summary(paths, atoms)
    assert (found["runs"], found["frames"]) == (2, 10)
    assert set(found["distributions"]) == set(found["halves_apart"]) == {"Au-Au", "Au-Cu", "Cu-Cu"}
    assert 2.2 < found["closest"]["Cu-Cu"] < found["closest"]["Au-Au"] < 2.8
    assert 0.0 < found["halves_apart"]["Cu-Cu"] < 1.5
