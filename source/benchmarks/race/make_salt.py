"""Make the race's set of alkali chlorides with Fumi and Tosi's potential: ``python make_salt.py --out race-data``.

Training and test: crystals and melts of NaCl, KCl and their mixture in equal parts. Out of distribution: hotter melts,
mixtures in other parts, and crystal and melt under pressure. The set was made last, and no setting was chosen on it.
"""

from __future__ import annotations

import numpy as np
from ase import Atoms
from ase.build import bulk
from sampling import Trajectory, argument_parser, make
from sets import SETS, Part
from tosi_fumi import TosiFumi

LATTICE_CONSTANTS = {"Na": 5.64, "K": 6.29}  # Å, of the chlorides
CATIONS = ({"Na": 32}, {"K": 32}, {"Na": 16, "K": 16})
OTHER_CATIONS = ({"Na": 8, "K": 24}, {"Na": 24, "K": 8})
COLD, HOT, LIQUID, HOTTEST, MELT = 300.0, 800.0, 1300.0, 2000.0, 3000.0  # K
HOT_LENGTH, LIQUID_LENGTH = (
    1.02,
    1.10,
)  # of the cold crystal's: thermal expansion, and the melt's lower density
PRESSED = 0.94  # length, of that at zero pressure
SPACING, SETTLE = 30, 500


def salt(cations: dict[str, int], rng: np.random.Generator, length: float = 1.0) -> Atoms:
    """Return 32 cations in random places of their lattice and 32 chloride ions, sorted by element."""
    lattice = sum(LATTICE_CONSTANTS[name] * count for name, count in cations.items()) / sum(
        cations.values()
    )
    atoms = bulk("NaCl", "rocksalt", a=lattice * length, cubic=True).repeat(2)
    chlorides = atoms.symbols == "Cl"
    places = rng.permutation(atoms.positions[~chlorides])
    atoms.positions = np.concatenate([places, atoms.positions[chlorides]])
    atoms.symbols[:] = [
        name for name, count in {**cations, "Cl": len(places)}.items() for _ in range(count)
    ]
    return atoms


def plans() -> list[Trajectory]:
    """Return the trajectories of the set."""
    rng = np.random.default_rng(20261124)
    found = []

    def add(
        part: Part,
        cations: dict[str, int],
        state: str,
        temperature: float,
        length: float,
        frames: int,
    ) -> None:
        name = (
            "".join(f"{element}{count}" for element, count in cations.items())
            + f"Cl32_{state}_{temperature:g}K"
        )
        melt = MELT if "liquid" in state else 0.0
        atoms = salt(cations, rng, length)
        found.append(Trajectory(part, name, atoms, temperature, frames, SPACING, SETTLE, melt))

    for part, frames in (("train", 32), ("test", 8)):
        for cations in CATIONS:
            add(part, cations, "crystal", COLD, 1.0, frames)
            add(part, cations, "crystal", HOT, HOT_LENGTH, frames)
            add(part, cations, "liquid", LIQUID, LIQUID_LENGTH, frames)
    for cations in OTHER_CATIONS:
        add("out", cations, "crystal", HOT, HOT_LENGTH, 12)
        add("out", cations, "liquid", LIQUID, LIQUID_LENGTH, 12)
    for cations in CATIONS:
        add("out", cations, "liquid", HOTTEST, LIQUID_LENGTH, 12)
        add("out", cations, "pressed_crystal", HOT, HOT_LENGTH * PRESSED, 12)
        add("out", cations, "pressed_liquid", LIQUID, LIQUID_LENGTH * PRESSED, 12)
    return found


if __name__ == "__main__":
    parser = argument_parser(__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, default=1, help="processes")
    args = parser.parse_args()
    make(
        args.out / "salt",
        plans(),
        SETS["salt"].type_map,
        mover=TosiFumi,
        labeller=TosiFumi,
        time_step=2.0,
        seed=20261124,
        workers=args.workers,
    )
