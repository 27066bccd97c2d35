"""Make the race's set of noble-metal alloys with ASE's EMT potential: ``python make_alloys.py --out race-data``.

A pair potential of these metals, which is cheaper, draws the frames; EMT labels them.

Training and test: binary alloys, solid, liquid and with surfaces. Out of distribution: alloys of three elements.
``--large`` adds nine trajectories of each training condition, with atoms in other places, and keeps all other frames.
``--emt`` has as many, and EMT draws all frames, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import ClassVar

import numpy as np
from ase import Atoms, units
from ase.build import bulk
from ase.calculators.calculator import Calculator, all_changes
from ase.calculators.emt import EMT
from sampling import Trajectory, make, more_training, size_parser
from sets import Part

ELEMENTS = ("Cu", "Ag", "Au")
LATTICE_CONSTANTS = {"Cu": 3.61, "Ag": 4.09, "Au": 4.08, "Ni": 3.52, "Al": 4.05}  # Å
BINARIES = ({"Cu": 16, "Ag": 16}, {"Cu": 16, "Au": 16}, {"Ag": 16, "Au": 16})
TERNARIES = ({"Cu": 11, "Ag": 11, "Au": 10}, {"Cu": 24, "Ag": 4, "Au": 4})
SOLID, HOT_SOLID, LIQUID, MELT = 500.0, 1000.0, 2000.0, 4000.0  # K
LIQUID_LENGTH = 1.04
VACUUM = 10.0  # Å
SPACING, SETTLE = 20, 200
LARGER = 10  # times the training frames


class LennardJones(Calculator):
    """The 12-6 potential of Heinz et al., J. Phys. Chem. C 112, 17281 (2008), for nearest images in orthorhombic cells.

    Depth and distance of unlike pairs are geometric means; forces are shifted to end at half of the shortest edge.
    """

    implemented_properties: ClassVar[list[str]] = ["energy", "forces"]
    depth: ClassVar = {"Cu": 4.72, "Ag": 4.56, "Au": 5.29}  # kcal/mol
    distance: ClassVar = {"Cu": 2.616, "Ag": 2.955, "Au": 2.951}  # Å, of the minimum

    def calculate(
        self,
        atoms: Atoms | None = None,
        properties: Sequence[str] = ("energy",),
        system_changes: Sequence[str] = all_changes,
    ) -> None:
        """Compute energy [eV] and forces [eV/Å]."""
        super().calculate(atoms, properties, system_changes)
        symbols = self.atoms.get_chemical_symbols()
        root = np.sqrt(
            [[self.depth[s] * units.kcal / units.mol, self.distance[s]] for s in symbols]
        )
        i, j = np.triu_indices(len(symbols), k=1)
        depth, rest = (root[i] * root[j]).T
        lengths = self.atoms.cell.lengths()
        vectors = self.atoms.positions[j] - self.atoms.positions[i]
        vectors -= lengths * np.round(vectors / lengths)
        r = np.sqrt((vectors**2).sum(axis=1))
        reach = lengths.min() / 2

        def energy_and_slope(x: np.ndarray | float) -> tuple[np.ndarray, np.ndarray]:
            sixth = (rest / x) ** 6
            return depth * (sixth**2 - 2 * sixth), -12 * depth * (sixth**2 - sixth) / x

        (energy, slope), (last_energy, last_slope) = energy_and_slope(r), energy_and_slope(reach)
        near = r < reach
        pull = np.where(near, (slope - last_slope) / r, 0.0)[:, None] * vectors
        forces = np.zeros((len(symbols), 3))
        np.add.at(forces, i, pull)
        np.add.at(forces, j, -pull)
        shifted = energy - last_energy - (r - reach) * last_slope
        self.results = {"energy": float(shifted[near].sum()), "forces": forces}


def alloy(
    content: dict[str, int], rng: np.random.Generator, length: float = 1.0, vacuum: float = 0.0
) -> Atoms:
    """Return 32 atoms on an fcc lattice in random places; with `vacuum` a slab of four layers.

    Atoms are sorted by element, so that all frames of a composition have the same atoms in the same order.
    """
    lattice = sum(LATTICE_CONSTANTS[name] * count for name, count in content.items()) / sum(
        content.values()
    )
    atoms = bulk("Cu", "fcc", a=lattice * length, cubic=True).repeat(2)
    atoms.positions = rng.permutation(atoms.positions)
    atoms.symbols[:] = [name for name, count in content.items() for _ in range(count)]
    cell = atoms.cell.lengths()
    cell[2] += vacuum
    atoms.set_cell(cell)
    return atoms


def plans(times: int = 1) -> list[Trajectory]:
    """Return the trajectories of the set, with so many times the training frames; those of the small set come first."""
    rng = np.random.default_rng(20261122)
    found = []
    contents: list[tuple[Part, tuple[dict[str, int], ...], int]] = [
        ("train", BINARIES, 24),
        ("test", BINARIES, 8),
        ("out", TERNARIES, 12),
    ]
    for part, compositions, frames in contents:
        rest = {"frames": frames, "spacing": SPACING, "settle": SETTLE}
        for content in compositions:
            name = "".join(f"{element}{count}" for element, count in content.items())
            solid, hot, slab = (
                alloy(content, rng),
                alloy(content, rng),
                alloy(content, rng, vacuum=VACUUM),
            )
            liquid = alloy(content, rng, LIQUID_LENGTH)
            found += [
                Trajectory(part, f"{name}_{SOLID:g}K", solid, SOLID, **rest),
                Trajectory(part, f"{name}_{HOT_SOLID:g}K", hot, HOT_SOLID, **rest),
                Trajectory(part, f"{name}_surface_{SOLID:g}K", slab, SOLID, **rest),
                Trajectory(part, f"{name}_liquid_{LIQUID:g}K", liquid, LIQUID, melt=MELT, **rest),
            ]
    return found + more_training(found, times - 1, partial(shuffled, rng=rng))


def shuffled(plan: Trajectory, rng: np.random.Generator) -> Atoms:
    """Return the first positions of a trajectory in another order: an alloy with its atoms in other places."""
    atoms = plan.atoms.copy()
    atoms.positions = rng.permutation(atoms.positions)
    return atoms


if __name__ == "__main__":
    parser = size_parser(__doc__.splitlines()[0], LARGER)
    parser.add_argument(
        "--emt", action="store_true", help="as many, all drawn by EMT, as the set alloys_emt"
    )
    args = parser.parse_args()
    make(
        args.out / ("alloys_emt" if args.emt else "alloys_large" if args.large else "alloys"),
        plans(LARGER if args.large or args.emt else 1),
        ELEMENTS,
        mover=EMT if args.emt else LennardJones,
        labeller=EMT,
        time_step=4.0,
        seed=20261122,
        workers=args.workers,
    )
