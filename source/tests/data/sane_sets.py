"""Sound data sets of many kinds, labelled by simple potentials: no check of the data may warn of any of them.

`FAST` and `SLOW` list a function for every kind, which returns its systems; `write_set` writes them.
"""

from __future__ import annotations

import importlib.util
import itertools
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from ase import Atoms, units
from ase.build import add_adsorbate, bulk, fcc111, molecule
from ase.calculators.emt import EMT
from ase.calculators.lj import LennardJones
from ase.calculators.morse import MorsePotential
from ase.md.langevin import Langevin
from ase.md.verlet import VelocityVerlet
from ase.optimize import FIRE
from ase.stress import voigt_6_to_full_3x3_stress

TOP = Path(__file__).resolve().parents[3]
EXAMPLES, RACE = TOP / "examples", TOP / "source" / "benchmarks" / "race"
FRAMES = 20


@dataclass
class SaneSystem:
    """Types, element names and arrays of a system, in DeePMD's shapes."""

    types: list[int]
    names: list[str]
    arrays: dict[str, np.ndarray]
    periodic: bool = True
    kinetic: np.ndarray = field(default_factory=lambda: np.zeros(0))  # (nframes,) [eV], of dynamics

    def write(self, folder: Path) -> None:
        """Write one npy folder."""
        places = folder / "set.000"
        places.mkdir(parents=True)
        (folder / "type.raw").write_text("\n".join(map(str, self.types)) + "\n")
        (folder / "type_map.raw").write_text("\n".join(self.names) + "\n")
        if not self.periodic:
            (folder / "nopbc").touch()
        for name, values in self.arrays.items():
            np.save(places / f"{name}.npy", values)


def write_set(systems: Sequence[SaneSystem], folder: Path) -> Path:
    """Write the systems of a set below a folder, and return it."""
    for number, system in enumerate(systems):
        system.write(folder / f"s{number:02d}")
    return folder


def labelled(
    frames: Sequence[Atoms], calculator: Any, names: Sequence[str], *, virial: bool = True
) -> SaneSystem:
    """Label frames of the same atoms; with virials where there is a cell."""
    periodic = bool(frames[0].pbc.all())
    rows: dict[str, list[np.ndarray]] = {name: [] for name in ("coord", "energy", "force")}
    rows |= {"box": []} if periodic else {}
    rows |= {"virial": []} if periodic and virial else {}
    for frame in frames:
        atoms = frame.copy()
        atoms.calc = calculator
        rows["coord"].append(atoms.positions.ravel())
        rows["energy"].append(np.array(atoms.get_potential_energy()))
        rows["force"].append(atoms.get_forces().ravel())
        if periodic:
            rows["box"].append(atoms.cell.array.ravel())
        if "virial" in rows:
            rows["virial"].append(_virial(atoms).ravel())
    types = [list(names).index(symbol) for symbol in frames[0].symbols]
    arrays = {name: np.array(values) for name, values in rows.items()}
    return SaneSystem(types, list(names), arrays, periodic)


def _virial(atoms: Atoms) -> np.ndarray:
    """Return −dE/dε (3, 3) [eV]."""
    if "stress" in atoms.calc.implemented_properties:
        return -atoms.get_volume() * voigt_6_to_full_3x3_stress(atoms.get_stress())
    # MorsePotential of ASE 3.23: the atoms of a molecule are in one piece, and nothing else acts.
    return np.asarray(atoms.positions.T @ atoms.get_forces())


def rattled(
    atoms: Atoms, width: float, seed: int, frames: int = FRAMES, strain: float = 0.0
) -> list[Atoms]:
    """Return copies with displacements of a width [Å], and cells strained by up to `strain`."""
    random = np.random.default_rng(seed)
    copies = []
    for _ in range(frames):
        copy = atoms.copy()
        if strain:
            change = np.eye(3) + random.uniform(-strain, strain, (3, 3))
            copy.set_cell(copy.cell.array @ change, scale_atoms=True)
        copy.positions += random.normal(0.0, width, copy.positions.shape)
        copies.append(copy)
    return copies


def trajectory(
    atoms: Atoms,
    calculator: Any,
    kelvin: float,
    *,
    seed: int,
    frames: int = FRAMES,
    spacing: int = 8,
    step: float = 3.0,
) -> list[Atoms]:
    """Return frames of Langevin dynamics, `spacing` time steps of `step` [fs] apart."""
    random = np.random.default_rng(seed)
    atoms = atoms.copy()
    atoms.calc = calculator
    widths = np.sqrt(atoms.get_masses() * units.kB * kelvin)[:, None]
    atoms.set_momenta(widths * random.standard_normal((len(atoms), 3)))
    dynamics = Langevin(
        atoms, step * units.fs, temperature_K=kelvin, friction=0.02 / units.fs, rng=random
    )
    dynamics.run(50)
    found = []
    for _ in range(frames):
        dynamics.run(spacing)
        found.append(atoms.copy())
    return found


def copper(size: tuple[int, int, int] = (2, 2, 2)) -> Atoms:
    """Cubic cells of copper."""
    return bulk("Cu", "fcc", a=3.61, cubic=True).repeat(size)


def alloy(seed: int, elements: Sequence[str] = ("Cu", "Au"), length: float = 3.85) -> Atoms:
    """32 atoms of two metals, half of each, at random sites."""
    atoms = bulk("Cu", "fcc", a=length, cubic=True).repeat((2, 2, 2))
    symbols = np.repeat(list(elements), 16)
    atoms.set_chemical_symbols(np.random.default_rng(seed).permutation(symbols).tolist())
    return atoms


def water_calculator(natoms: int) -> Any:
    """Return the flexible SPC water of the example."""
    spec = importlib.util.spec_from_file_location(
        "water_xtb_make_data", EXAMPLES / "water_xtb" / "make_data.py"
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.FlexibleSPC(natoms), module.lattice_of_molecules


def argon() -> Any:
    """Return argon's Lennard-Jones potential."""
    return LennardJones(sigma=3.4, epsilon=0.0104, rc=8.0, smooth=True)


# -- sets ----------------------------------------------------------------------------------------------------------


def rattled_crystal() -> list[SaneSystem]:
    """Copper with random displacements, as for a first potential."""
    return [labelled(rattled(copper(), width, 1), EMT(), ["Cu"]) for width in (0.05, 0.2)]


def strained_cells() -> list[SaneSystem]:
    """Copper and an alloy in strained and sheared cells."""
    return [
        labelled(rattled(copper(), 0.08, 2, strain=0.06), EMT(), ["Cu"]),
        labelled(rattled(alloy(3), 0.08, 4, strain=0.04), EMT(), ["Cu", "Au"]),
    ]


def compressed_cells() -> list[SaneSystem]:
    """Copper from two thirds to four thirds of its volume, in one system each."""
    systems = []
    for scale in (0.88, 0.94, 1.0, 1.05, 1.1):
        atoms = copper()
        atoms.set_cell(atoms.cell.array * scale, scale_atoms=True)
        systems.append(labelled(rattled(atoms, 0.08, 5), EMT(), ["Cu"]))
    return systems


def equation_of_state() -> list[SaneSystem]:
    """Perfect crystals of several volumes: no force, by symmetry; in one system, and in one each."""
    frames = []
    for scale in np.linspace(0.9, 1.1, 11):
        atoms = copper((1, 1, 1))
        atoms.set_cell(atoms.cell.array * scale, scale_atoms=True)
        frames.append(atoms)
    together = labelled(frames, EMT(), ["Cu"])
    together.arrays["force"][:] = 0.0  # as a program prints them
    single = [labelled([frame], EMT(), ["Cu"]) for frame in frames]
    return [together, *single]


def surfaces() -> list[SaneSystem]:
    """Slabs with vacuum, clean and with an oxygen atom."""
    clean = fcc111("Cu", size=(2, 2, 4), vacuum=7.0, periodic=True)
    covered = clean.copy()
    add_adsorbate(covered, "O", height=1.2, position="fcc")
    covered.pbc = True
    return [
        labelled(rattled(clean, 0.08, 6), EMT(), ["Cu", "O"]),
        labelled(rattled(covered, 0.08, 7), EMT(), ["Cu", "O"]),
    ]


def isolated_atoms() -> list[SaneSystem]:
    """Single atoms in large cells and without a cell beside a crystal, as many recipes ask for."""
    alone = Atoms("Cu", positions=[[0.0, 0.0, 0.0]])
    in_cell = Atoms("Au", positions=[[7.5, 7.5, 7.5]], cell=[15.0] * 3, pbc=True)
    return [
        labelled([alone], EMT(), ["Cu", "Au"]),
        labelled([in_cell], EMT(), ["Cu", "Au"]),
        labelled(rattled(alloy(8), 0.1, 9), EMT(), ["Cu", "Au"]),
    ]


def hot_liquid() -> list[SaneSystem]:
    """A molten alloy at 3,000 K."""
    frames = trajectory(alloy(10, length=4.0), EMT(), 3000.0, seed=11)
    return [labelled(frames, EMT(), ["Cu", "Au"])]


def single_frames() -> list[SaneSystem]:
    """Sixteen systems of one frame each, of other sizes and compositions."""
    systems = []
    for seed in range(16):
        atoms = alloy(seed)
        del atoms[: 1 + seed % 5]
        (frame,) = rattled(atoms, 0.1, seed, frames=1)
        order = np.argsort(frame.numbers, kind="stable")
        systems.append(labelled([frame[order]], EMT(), ["Cu", "Au"]))
    return systems


def mixed_types() -> list[SaneSystem]:
    """Frames of other compositions in one system with `real_atom_types.npy`, padding included."""
    names = ["Cu", "Ag", "Au"]
    random = np.random.default_rng(12)
    parts = []
    for seed in range(FRAMES):
        atoms = bulk("Cu", "fcc", a=3.95, cubic=True).repeat((2, 2, 1))
        atoms.set_chemical_symbols(random.choice(names, len(atoms)).tolist())
        del atoms[: seed % 3]
        parts.append(labelled(rattled(atoms, 0.1, seed, frames=1), EMT(), names))
    natoms = max(len(part.types) for part in parts)
    types = np.full((FRAMES, natoms), -1)
    arrays = {
        name: np.concatenate([p.arrays[name] for p in parts])
        for name in ("energy", "box", "virial")
    }
    for name in ("coord", "force"):
        arrays[name] = np.zeros((FRAMES, 3 * natoms))
    for row, part in enumerate(parts):
        types[row, : len(part.types)] = part.types
        for name in ("coord", "force"):
            arrays[name][row, : 3 * len(part.types)] = part.arrays[name][0]
    arrays["real_atom_types"] = types
    return [SaneSystem([0] * natoms, names, arrays)]


def molecules() -> list[SaneSystem]:
    """Molecules without a cell, far from their minimum too."""
    systems = []
    for seed, name in enumerate(("CH4", "C2H6", "CH3OH", "NH3", "C6H6")):
        frames = rattled(molecule(name), 0.04, seed)
        systems.append(labelled(frames, EMT(), ["H", "C", "N", "O"]))
    return systems


def dimer_scan() -> list[SaneSystem]:
    """Two copper atoms from 1.7 to 6 Å: forces from tens of eV/Å to none."""
    frames = [Atoms("Cu2", positions=[[0, 0, 0], [0, 0, r]]) for r in np.linspace(1.7, 6.0, 30)]
    crystal = labelled(rattled(copper(), 0.1, 13), EMT(), ["Cu"])
    return [labelled(frames, EMT(), ["Cu"]), crystal]


def frames_that_hardly_move() -> list[SaneSystem]:
    """Finite displacements for phonons, and a crystal at a few kelvins."""
    widths = (1e-3, 0.01)
    systems = [labelled(rattled(alloy(14), width, 15), EMT(), ["Cu", "Au"]) for width in widths]
    displaced = []
    for atom, axis, sign in itertools.product(range(6), range(3), (-1, 1)):
        frame = copper()
        frame.positions[atom, axis] += 0.01 * sign
        displaced.append(frame)
    relaxed = fcc111("Cu", size=(2, 2, 4), vacuum=7.0, periodic=True)
    return [
        *systems,
        labelled(displaced, EMT(), ["Cu", "Au"]),
        labelled(rattled(relaxed, 2e-3, 16), EMT(), ["Cu", "Au"]),
    ]


def relaxed_glass() -> list[SaneSystem]:
    """Disordered silicon at rest, and moved a little: angles balance the pairs, which explain nothing then."""
    sys.path.insert(0, str(RACE))
    from stillinger_weber import StillingerWeber

    crystal = bulk("Si", "diamond", a=5.43, cubic=True).repeat((2, 2, 2))
    (atoms,) = rattled(crystal, 0.6, 36, frames=1)
    atoms.calc = StillingerWeber()
    frames: list[Atoms] = []
    relaxation = FIRE(atoms, logfile=None)
    relaxation.attach(lambda: frames.append(atoms.copy()))
    relaxation.run(fmax=0.05, steps=120)
    parts = [frames[-12:], frames[-1:], rattled(atoms, 5e-3, 37, frames=12)]
    return [labelled(part, StillingerWeber(), ["Si"]) for part in parts]


def relaxations() -> list[SaneSystem]:
    """Every step of two relaxations: the last ones hardly move, and forces fall to nothing."""
    systems = []
    for seed in (17, 18):
        (atoms,) = rattled(alloy(seed), 0.25, seed, frames=1)
        atoms.calc = EMT()
        frames: list[Atoms] = []
        relaxation = FIRE(atoms, logfile=None)
        relaxation.attach(lambda frames=frames, atoms=atoms: frames.append(atoms.copy()))
        relaxation.run(fmax=0.01, steps=120)
        systems.append(labelled(frames, EMT(), ["Cu", "Au"]))
    return systems


def defects() -> list[SaneSystem]:
    """A vacancy and an interstitial, whose energies per atom differ from the crystal's."""
    vacancy = copper()
    del vacancy[5]
    interstitial = copper() + Atoms("Cu", positions=[[1.805, 1.805, 1.805]])
    interstitial.calc = EMT()
    FIRE(interstitial, logfile=None).run(fmax=0.5, steps=40)
    return [labelled(rattled(a, 0.08, 19), EMT(), ["Cu"]) for a in (vacancy, interstitial)]


def two_phases_in_one_system() -> list[SaneSystem]:
    """A solid and its melt, one after the other: energies have two groups."""
    solid = rattled(alloy(20), 0.06, 21, frames=12)
    liquid = trajectory(alloy(20, length=3.85), EMT(), 4000.0, seed=22, frames=12)
    return [labelled([*solid, *liquid], EMT(), ["Cu", "Au"])]


def noble_gas() -> list[SaneSystem]:
    """Argon: weak forces and no bonds."""
    atoms = bulk("Ar", "fcc", a=5.3, cubic=True).repeat((2, 2, 2))
    return [labelled(rattled(atoms, 0.15, 23), argon(), ["Ar"])]


def dilute_gas() -> list[SaneSystem]:
    """Argon atoms that mostly do not feel each other."""
    random = np.random.default_rng(24)
    sites = np.stack(np.meshgrid(*[np.arange(2) * 9.0] * 3, indexing="ij"), -1).reshape(-1, 3)
    frames = [
        Atoms(
            "Ar8", positions=sites + random.uniform(-2, 2, sites.shape), cell=[18.0] * 3, pbc=True
        )
        for _ in range(FRAMES)
    ]
    return [labelled(frames, argon(), ["Ar"])]


def liquid_water() -> list[SaneSystem]:
    """Sixteen molecules of flexible SPC water, dense and at two temperatures; atoms in the order of molecules."""
    calculator, lattice = water_calculator(48)
    systems = []
    for kelvin in (300.0, 600.0):
        atoms = lattice(16, np.random.default_rng(int(kelvin)), 1.0)
        atoms.calc = calculator
        FIRE(atoms, logfile=None).run(fmax=1.0, steps=300)
        frames = trajectory(atoms, calculator, kelvin, seed=25, spacing=30, step=1.0)
        systems.append(labelled(frames, calculator, ["O", "H"], virial=False))
    return systems


def water_sorted_by_element() -> list[SaneSystem]:
    """The same with all oxygen atoms first, as many programs write it."""
    systems = []
    for system in liquid_water():
        order = np.argsort(system.types, kind="stable")
        arrays = dict(system.arrays)
        for name in ("coord", "force"):
            rows = arrays[name].reshape(len(arrays["energy"]), -1, 3)
            arrays[name] = rows[:, order].reshape(len(rows), -1)
        systems.append(SaneSystem([system.types[k] for k in order], system.names, arrays))
    return systems


def formic_acid() -> list[SaneSystem]:
    """A molecule of springs: with C and O in another order, a pair potential explains all forces."""
    springs = {(0, 1): 30.0, (1, 2): 90.0, (1, 4): 30.0, (0, 3): 47.0, (0, 2): 5.0}  # [eV/Å²]
    atoms = molecule("HCOOH")
    lengths = atoms.get_all_distances()
    random = np.random.default_rng(40)
    rows: dict[str, list[Any]] = {"coord": [], "energy": [], "force": []}
    for _ in range(FRAMES):
        coord = atoms.positions + random.normal(0.0, 0.06, (5, 3))
        energy = 0.0
        force = np.zeros((5, 3))
        for (i, j), strength in springs.items():
            vector = coord[j] - coord[i]
            length = np.linalg.norm(vector)
            stretch = length - lengths[i, j]
            energy += 0.5 * strength * stretch**2
            force[i] += strength * stretch * vector / length
            force[j] -= strength * stretch * vector / length
        rows["coord"].append(coord.ravel())
        rows["energy"].append(energy)
        rows["force"].append(force.ravel())
    names = ["H", "C", "O"]
    types = [names.index(symbol) for symbol in atoms.symbols]
    arrays = {name: np.array(values) for name, values in rows.items()}
    return [SaneSystem(types, names, arrays, periodic=False)]


def charged_frames() -> list[SaneSystem]:
    """Frames of two charges, with their charge as frame parameter: energies differ by electron volts."""
    system = labelled(rattled(alloy(26), 0.1, 27), EMT(), ["Cu", "Au"])
    charge = np.arange(FRAMES) % 2
    system.arrays["energy"] = system.arrays["energy"] + 6.0 * charge
    system.arrays["fparam"] = charge[:, None].astype(float)
    return [system]


def single_precision() -> list[SaneSystem]:
    """Labels and positions in float32, energies of all electrons: rounding is a few hundredths of an electron volt."""
    system = labelled(rattled(alloy(28), 0.1, 29), EMT(), ["Cu", "Au"])
    system.arrays["energy"] = system.arrays["energy"] - 1.0e6
    system.arrays = {name: values.astype(np.float32) for name, values in system.arrays.items()}
    return [system]


def unwrapped_and_shifted() -> list[SaneSystem]:
    """Atoms far outside of their cell, as dynamics without wrapping leave them."""
    system = labelled(rattled(copper(), 0.1, 30), EMT(), ["Cu"])
    random = np.random.default_rng(31)
    coord = system.arrays["coord"].reshape(FRAMES, -1, 3)
    moved = random.integers(-3, 4, coord.shape) @ system.arrays["box"].reshape(FRAMES, 3, 3)
    system.arrays["coord"] = (coord + moved).reshape(FRAMES, -1)
    return [system]


def constant_energy() -> list[SaneSystem]:
    """Frames of dynamics at constant energy, a few femtoseconds apart, and two frames that a restart wrote again."""
    atoms = alloy(32)
    atoms.calc = EMT()
    momenta = np.random.default_rng(33).standard_normal((len(atoms), 3))
    atoms.set_momenta(momenta * np.sqrt(atoms.get_masses() * units.kB * 800.0)[:, None])
    dynamics = VelocityVerlet(atoms, 3.0 * units.fs)
    frames = []
    for _ in range(30):
        dynamics.run(3)
        frames.append(atoms.copy())
    return [labelled([*frames[:20], *frames[18:]], EMT(), ["Cu", "Au"])]


def diatomic_gas() -> list[SaneSystem]:
    """Nitrogen in a cell, stiff bonds and weak contacts: a Morse bond within each molecule."""
    random = np.random.default_rng(34)
    frames = []
    for _ in range(FRAMES):
        length = 1.098 + random.normal(0.0, 0.03)
        direction = random.normal(size=3)
        direction /= np.linalg.norm(direction)
        centre = random.uniform(0, 8, 3)
        frames.append(
            Atoms("N2", positions=[centre, centre + length * direction], cell=[8.0] * 3, pbc=True)
        )
    bond = MorsePotential(epsilon=9.9, r0=1.098, rho0=2.96, rcut1=3.0, rcut2=3.5)
    return [labelled(frames, bond, ["N"])]


def molecular_dynamics() -> list[SaneSystem]:
    """Copper at 300 and 1,000 K."""
    return [
        labelled(trajectory(copper(), EMT(), kelvin, seed=35), EMT(), ["Cu"])
        for kelvin in (300.0, 1000.0)
    ]


#: Sets that take longer than a tenth of a second or so.
SLOW: list[Callable[[], list[SaneSystem]]] = [
    hot_liquid,
    relaxations,
    defects,
    two_phases_in_one_system,
    liquid_water,
    water_sorted_by_element,
    constant_energy,
    molecular_dynamics,
]
FAST: list[Callable[[], list[SaneSystem]]] = [
    rattled_crystal,
    strained_cells,
    compressed_cells,
    equation_of_state,
    surfaces,
    isolated_atoms,
    single_frames,
    mixed_types,
    molecules,
    formic_acid,
    dimer_scan,
    frames_that_hardly_move,
    relaxed_glass,
    noble_gas,
    dilute_gas,
    charged_frames,
    single_precision,
    unwrapped_and_shifted,
    diatomic_gas,
]
