"""Make the race's set of noble-metal alloys with ASE's EMT potential: ``python make_alloys.py --out race-data``.

Training and test: binary alloys, solid, liquid and with surfaces. Out of distribution: alloys of three elements.
"""

from __future__ import annotations

import numpy as np
from ase import Atoms
from ase.build import bulk
from ase.calculators.emt import EMT
from sampling import Trajectory, make, output_folder
from sets import Part

LATTICE_CONSTANTS = {"Cu": 3.61, "Ag": 4.09, "Au": 4.08}  # Å
BINARIES = ({"Cu": 16, "Ag": 16}, {"Cu": 16, "Au": 16}, {"Ag": 16, "Au": 16})
TERNARIES = ({"Cu": 11, "Ag": 11, "Au": 10}, {"Cu": 24, "Ag": 4, "Au": 4})
SOLID, HOT_SOLID, LIQUID, MELT = 500.0, 1000.0, 2000.0, 4000.0  # K
LIQUID_LENGTH = 1.04
VACUUM = 10.0  # Å
SPACING, SETTLE = 15, 100


def alloy(content: dict[str, int], rng: np.random.Generator, length: float = 1.0, vacuum: float = 0.0) -> Atoms:
    """Return 32 atoms on an fcc lattice in random places; with `vacuum` a slab of four layers.

    Atoms are sorted by element, so that all frames of a composition have the same atoms in the same order.
    """
    lattice = sum(LATTICE_CONSTANTS[name] * count for name, count in content.items()) / sum(content.values())
    atoms = bulk("Cu", "fcc", a=lattice * length, cubic=True).repeat(2)
    atoms.positions = rng.permutation(atoms.positions)
    atoms.symbols[:] = [name for name, count in content.items() for _ in range(count)]
    cell = atoms.cell.lengths()
    cell[2] += vacuum
    atoms.set_cell(cell)
    return atoms


def plans() -> list[Trajectory]:
    """Return the trajectories of the set."""
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
            solid, hot, slab = alloy(content, rng), alloy(content, rng), alloy(content, rng, vacuum=VACUUM)
            liquid = alloy(content, rng, LIQUID_LENGTH)
            found += [
                Trajectory(part, f"{name}_{SOLID:g}K", solid, SOLID, **rest),
                Trajectory(part, f"{name}_{HOT_SOLID:g}K", hot, HOT_SOLID, **rest),
                Trajectory(part, f"{name}_surface_{SOLID:g}K", slab, SOLID, **rest),
                Trajectory(part, f"{name}_liquid_{LIQUID:g}K", liquid, LIQUID, melt=MELT, **rest),
            ]
    return found


if __name__ == "__main__":
    folder = output_folder(__doc__.splitlines()[0])
    elements = tuple(LATTICE_CONSTANTS)
    make(folder / "alloys", plans(), elements, mover=EMT, labeller=EMT, time_step=4.0, seed=20261122)
