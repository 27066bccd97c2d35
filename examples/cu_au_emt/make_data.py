"""Write all.xyz: dynamics of five copper-gold crystals with EMT, labelled with names as other programs write them.

python examples/cu_au_emt/make_data.py
"""

from __future__ import annotations

import argparse
import io
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from ase import Atoms, units
from ase.build import bulk
from ase.calculators.emt import EMT
from ase.io import write
from ase.md.langevin import Langevin

SHARES_OF_GOLD = (0.0, 0.25, 0.5, 0.75, 1.0)
COPPER, GOLD = 3.61, 4.06  # lattice constants [Å]; mixtures lie between them
TEMPERATURE = 600.0  # [K]
FIRST, EVERY = 250, 25  # steps of 4 fs


def crystal(gold: float, random: np.random.Generator) -> Atoms:
    """Return 32 atoms on the sites of an fcc crystal, `gold` of them gold, at random."""
    atoms = bulk("Cu", "fcc", a=(1 - gold) * COPPER + gold * GOLD, cubic=True).repeat(2)
    atoms.symbols[random.permutation(len(atoms))[: round(gold * len(atoms))]] = "Au"
    return atoms


def trajectory(atoms: Atoms, frames: int, random: np.random.Generator) -> Iterator[Atoms]:
    """Yield labelled frames of dynamics at constant temperature, 0.1 ps apart."""
    widths = np.sqrt(2 * units.kB * TEMPERATURE / atoms.get_masses())[
        :, None
    ]  # half of it becomes potential energy
    atoms.set_velocities(widths * random.normal(size=(len(atoms), 3)))
    dynamics = Langevin(
        atoms,
        4.0 * units.fs,
        temperature_K=TEMPERATURE,
        friction=0.02 / units.fs,
        fixcm=False,
        rng=random,
    )
    atoms.calc = EMT()
    dynamics.run(FIRST)
    for _ in range(frames):
        dynamics.run(EVERY)
        # Positions are rounded before they are labelled, so the labels belong to exactly the stored numbers.
        frame = Atoms(
            atoms.symbols,
            positions=atoms.positions.round(6),
            cell=atoms.cell,
            pbc=True,
            calculator=EMT(),
        )
        energy, forces, stress = (
            frame.get_potential_energy(),
            frame.get_forces(),
            frame.get_stress(),
        )
        frame.calc = None
        frame.info |= {"REF_energy": round(float(energy), 8), "REF_stress": stress.round(9)}
        frame.arrays["REF_forces"] = forces
        yield frame


def compact(line: str) -> str:
    """Return a line of extended XYZ without the spaces and zeros that ASE fills the columns of atoms with."""
    symbol, *numbers = line.split()
    if len(numbers) != 6 or "=" in line:
        return line
    return " ".join([symbol, *(f"{float(number):.6f}" for number in numbers)])


def main() -> None:
    """Write the file."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--frames", type=int, default=40, help="of each composition")
    parser.add_argument("--seed", type=int, default=20261123)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "all.xyz")
    args = parser.parse_args()
    random = np.random.default_rng(args.seed)
    frames = [
        frame
        for gold in SHARES_OF_GOLD
        for frame in trajectory(crystal(gold, random), args.frames, random)
    ]
    text = io.StringIO()
    write(text, frames, format="extxyz", columns=["symbols", "positions", "REF_forces"])
    args.out.write_text("\n".join(map(compact, text.getvalue().splitlines())) + "\n")
    print(f"{len(frames)} frames in {args.out}")


if __name__ == "__main__":
    main()
