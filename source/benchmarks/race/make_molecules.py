"""Make the race's set of small molecules with GFN2-xTB: ``python make_molecules.py --out race-data``.

Training and test: three molecules at 300 K. Out of distribution: the same at 600 and 1200 K. Needs tblite.
"""

from __future__ import annotations

from ase import Atoms
from ase.build import molecule
from ase.calculators.calculator import Calculator
from sampling import Trajectory, make, output_folder
from sets import Part

MOLECULES = {"ethanol": "CH3CH2OH", "acetic_acid": "CH3COOH", "acetamide": "CH3CONH2"}
TYPE_MAP = ("H", "C", "N", "O")
HYDROGEN_MASS = 4.0  # u: positions of the canonical distribution know no masses, and it allows the time step
SPACING, SETTLE = 20, 300
MOVER_ACCURACY, LABEL_ACCURACY = 1.0, 0.01  # tblite's thresholds scale with them


def xtb(accuracy: float) -> Calculator:
    """Return a new GFN2-xTB calculator."""
    from tblite.ase import TBLite

    return TBLite(method="GFN2-xTB", accuracy=accuracy, verbosity=0)


def heavy(name: str) -> Atoms:
    """Return a molecule of ASE's database with heavy hydrogen."""
    atoms = molecule(name)
    atoms.set_masses([HYDROGEN_MASS if symbol == "H" else None for symbol in atoms.symbols])
    return atoms


def plans() -> list[Trajectory]:
    """Return the trajectories of the set."""
    conditions: list[tuple[Part, float, int]] = [
        ("train", 300.0, 150),
        ("test", 300.0, 30),
        ("out", 600.0, 30),
        ("out", 1200.0, 30),
    ]
    return [
        Trajectory(part, f"{name}_{t:g}K", heavy(formula), t, frames, SPACING, SETTLE)
        for name, formula in MOLECULES.items()
        for part, t, frames in conditions
    ]


if __name__ == "__main__":
    folder = output_folder(__doc__.splitlines()[0])
    make(
        folder / "molecules",
        plans(),
        TYPE_MAP,
        mover=lambda: xtb(MOVER_ACCURACY),
        labeller=lambda: xtb(LABEL_ACCURACY),
        time_step=1.0,
        seed=20261122,
    )
