"""Faults of data that are planted in sound sets: how to damage one, and the words and frames that a warning must have."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import sane_sets
from ase import units
from ase.calculators.emt import EMT
from ase.md.verlet import VelocityVerlet
from sane_sets import SaneSystem, labelled, rattled

Damage = Callable[[list[SaneSystem]], Any]


@dataclass(frozen=True)
class Fault:
    """A planted fault.

    Attributes
    ----------
    name
        What is wrong.
    base
        Makes the sound set.
    damage
        Changes its systems in place.
    words
        All must be in one warning.
    frame
        The frame that this warning must name; None where the whole system is wrong.
    """

    name: str
    base: Callable[[], list[SaneSystem]]
    damage: Damage
    words: Sequence[str]
    frame: int | None = None


# -- bases ---------------------------------------------------------------------------------------------------------


def copper() -> list[SaneSystem]:
    """Copper, 30 frames."""
    return [labelled(rattled(sane_sets.copper(), 0.1, 50, frames=30), EMT(), ["Cu"])]


def alloy() -> list[SaneSystem]:
    """An alloy in strained cells, 24 frames."""
    frames = rattled(sane_sets.alloy(51), 0.1, 52, frames=24, strain=0.03)
    return [labelled(frames, EMT(), ["Cu", "Au"])]


def two_alloys() -> list[SaneSystem]:
    """Two systems of alloys."""
    return [*alloy(), labelled(rattled(sane_sets.alloy(53), 0.1, 54), EMT(), ["Cu", "Au"])]


def trajectory() -> list[SaneSystem]:
    """Dynamics at constant energy, whose kinetic energies come with the frames."""
    atoms = sane_sets.alloy(55)
    atoms.calc = EMT()
    momenta = np.random.default_rng(56).standard_normal((len(atoms), 3))
    atoms.set_momenta(momenta * np.sqrt(atoms.get_masses() * units.kB * 900.0)[:, None])
    dynamics = VelocityVerlet(atoms, 3.0 * units.fs)
    frames = []
    kinetic = []
    for _ in range(30):
        dynamics.run(4)
        frames.append(atoms.copy())
        kinetic.append(atoms.get_kinetic_energy())
    system = labelled(frames, EMT(), ["Cu", "Au"])
    system.kinetic = np.array(kinetic)
    return [system]


def sparse_trajectory() -> list[SaneSystem]:
    """Every fourth frame of more of these dynamics: far apart."""
    (system,) = trajectory()
    rows = slice(None, None, 2)
    kinetic = system.kinetic[rows]
    arrays = {name: values[rows] for name, values in system.arrays.items()}
    return [SaneSystem(system.types, system.names, arrays, kinetic=kinetic)]


def molecule() -> list[SaneSystem]:
    """Methanol without a cell."""
    return [sane_sets.molecules()[2]]


# -- damages -------------------------------------------------------------------------------------------------------


def put(name: str, frame: int | slice, value: Any) -> Damage:
    """Overwrite the label of a frame of the first system."""

    def damage(systems: list[SaneSystem]) -> None:
        systems[0].arrays[name][frame] = value

    return damage


def changed(name: str, change: Callable[[np.ndarray], np.ndarray]) -> Damage:
    """Change an array of all systems."""

    def damage(systems: list[SaneSystem]) -> None:
        for system in systems:
            system.arrays[name] = change(system.arrays[name])

    return damage


def one_force(systems: list[SaneSystem]) -> None:
    """Make one component of one force 10,000 eV/Å."""
    systems[0].arrays["force"][17, 10] = 1e4


def nearly_coincident(apart: float) -> Damage:
    """Move an atom near to another one in one frame."""

    def damage(systems: list[SaneSystem]) -> None:
        coord = systems[0].arrays["coord"]
        coord[11, 9:12] = coord[11, 3:6] + np.array([apart, 0.0, 0.0])

    return damage


def sorted_types(systems: list[SaneSystem]) -> None:
    """Sort the types, and leave the positions of molecules."""
    for system in systems:
        system.types = sorted(system.types)


def exchanged_axes(order: Sequence[int]) -> Damage:
    """Write the virial with its axes in another order."""

    def damage(systems: list[SaneSystem]) -> None:
        for system in systems:
            virial = system.arrays["virial"].reshape(-1, 3, 3)
            system.arrays["virial"] = virial[:, order][:, :, order].reshape(-1, 9)

    return damage


def voigt_order(systems: list[SaneSystem]) -> None:
    """Write yz, xz, xy where xy, xz, yz belong."""
    for system in systems:
        virial = system.arrays["virial"].copy()
        for places, other in (((1, 3), 5), ((5, 7), 1)):
            for place in places:
                system.arrays["virial"][:, place] = virial[:, other]


def asymmetric_virial(systems: list[SaneSystem]) -> None:
    """Spoil one number of one frame."""
    systems[0].arrays["virial"][9, 5] += 20.0


def shifted(rows: slice | Sequence[int], constant: float) -> Damage:
    """Add a constant to the energies of some frames."""

    def damage(systems: list[SaneSystem]) -> None:
        systems[0].arrays["energy"][rows] += constant

    return damage


def shuffled(systems: list[SaneSystem]) -> None:
    """Give every frame the energy of another one."""
    energy = systems[0].arrays["energy"]
    systems[0].arrays["energy"] = np.random.default_rng(57).permutation(energy)


def repeated(systems: list[SaneSystem]) -> None:
    """Write frame 3 forty times more."""
    system = systems[0]
    for name, values in system.arrays.items():
        system.arrays[name] = np.concatenate([values, np.repeat(values[3:4], 40, axis=0)])


def with_kinetic_energy(systems: list[SaneSystem]) -> None:
    """Write total energies."""
    for system in systems:
        system.arrays["energy"] = system.arrays["energy"] + system.kinetic


def contradicting(systems: list[SaneSystem]) -> None:
    """Repeat frame 5, wrapped and shifted, with an energy 3 eV higher."""
    system = systems[0]
    for name, values in system.arrays.items():
        system.arrays[name] = np.concatenate([values, values[5:6]])
    box = system.arrays["box"][5].reshape(3, 3)
    system.arrays["coord"][-1] += np.tile(np.array([0.3, -0.2, 0.1]) + box[1], len(system.types))
    system.arrays["energy"][-1] += 3.0


def contradicting_system(systems: list[SaneSystem]) -> None:
    """Write a second system with the structures of the first and energies of another method."""
    first = systems[0]
    arrays = {name: values.copy() for name, values in first.arrays.items()}
    arrays["energy"] += 7.0
    systems.append(SaneSystem(first.types, first.names, arrays, first.periodic))


def half_precision(systems: list[SaneSystem]) -> None:
    """Store positions as float16."""
    for system in systems:
        system.arrays["coord"] = system.arrays["coord"].astype(np.float16)


def no_force(frames: Sequence[int] | slice, system: int = 0) -> Damage:
    """Set all forces of some frames to zero."""

    def damage(systems: list[SaneSystem]) -> None:
        systems[system].arrays["force"][frames] = 0.0

    return damage


def all_forces_zero(systems: list[SaneSystem]) -> None:
    """Set the forces of all systems to zero."""
    for system in systems:
        system.arrays["force"][:] = 0.0


every_second = slice(None, None, 2)
FAULTS = [
    Fault(
        "forces zero in one system", two_alloys, no_force(slice(None)), ["s00", "forces are zero"]
    ),
    Fault("forces zero in all systems", two_alloys, all_forces_zero, ["s01", "forces are zero"]),
    Fault("forces zero in some frames", copper, no_force([4, 9]), ["forces are zero"], 4),
    Fault("energy is a placeholder", copper, put("energy", 13, 9999.0), ["9999"], 13),
    Fault("energy is missing", alloy, put("energy", 7, 0.0), ["energy"], 7),
    Fault("energies are all a placeholder", copper, put("energy", slice(None), 9999.0), ["9999"]),
    Fault("one force of 1e4", copper, one_force, ["force", "1e+04"], 17),
    Fault("one force of 1e4, molecule", molecule, one_force, ["force", "1e+04"], 17),
    Fault("atoms 0.01 Å apart", copper, nearly_coincident(0.01), ["0.01 Å apart"], 11),
    Fault("atoms 0.2 Å apart, molecule", molecule, nearly_coincident(0.2), ["0.2 Å apart"], 11),
    Fault("types sorted, positions not", sane_sets.liquid_water, sorted_types, ["order O H H"]),
    Fault("virial: x and z exchanged", alloy, exchanged_axes([2, 1, 0]), ["virials", "order zyx"]),
    Fault("virial: axes turned", alloy, exchanged_axes([1, 2, 0]), ["virials", "order"]),
    Fault("virial: Voigt's order", alloy, voigt_order, ["virials", "in place of xy, xz and yz"]),
    Fault("virial not symmetric", alloy, asymmetric_virial, ["not symmetric"], 9),
    Fault("a constant in half of the frames", copper, shifted(slice(15, None), 5.0), ["above"], 0),
    Fault("a constant in every second frame", alloy, shifted(every_second, -2.0), ["above"], 0),
    Fault("a constant in water", sane_sets.liquid_water, shifted(every_second, 5.0), ["above"], 0),
    Fault("energies shuffled", copper, shuffled, ["energy does not follow", "other frames"]),
    Fault("energies shuffled, alloy", alloy, shuffled, ["energy does not follow"]),
    Fault("energies shuffled, molecule", molecule, shuffled, ["energy does not follow"]),
    Fault("energies equal", alloy, put("energy", slice(None), -3.25), ["in all frames"]),
    Fault("one frame 40 times", copper, repeated, ["copies of one structure"], 3),
    Fault("total energies", trajectory, with_kinetic_energy, ["kinetic"]),
    Fault("total energies, frames far apart", sparse_trajectory, with_kinetic_energy, ["kinetic"]),
    Fault("positions of float16", alloy, half_precision, ["float16"]),
    Fault("one structure, two energies", alloy, contradicting, ["same structure", "3 eV apart"], 5),
    Fault("two systems, two methods", alloy, contradicting_system, ["same structure", "7 eV"], 0),
]
