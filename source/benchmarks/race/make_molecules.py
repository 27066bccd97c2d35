"""Make the race's set of small molecules with GFN2-xTB: ``python make_molecules.py --out race-data``.

Training and test: three molecules at 300 K. Out of distribution: the same at 600 and 1200 K. Needs tblite.
``--large`` adds five trajectories of each molecule to the training frames, and keeps all other frames.
"""

from __future__ import annotations

from functools import partial

from ase import Atoms
from ase.build import molecule
from ase.calculators.calculator import Calculator
from sampling import Trajectory, make, more_training, size_parser
from sets import Part

MOLECULES = {"ethanol": "CH3CH2OH", "acetic_acid": "CH3COOH", "acetamide": "CH3CONH2"}
TYPE_MAP = ("H", "C", "N", "O")
HYDROGEN_MASS = (
    4.0  # u: positions of the canonical distribution know no masses, and it allows the time step
)
SPACING, SETTLE = 20, 300
LARGER = 6  # times the training frames
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


def plans(times: int = 1) -> list[Trajectory]:
    """Return the trajectories of the set, with so many times the training frames; those of the small set come first."""
    conditions: list[tuple[Part, float, int]] = [
        ("train", 300.0, 150),
        ("test", 300.0, 30),
        ("out", 600.0, 30),
        ("out", 1200.0, 30),
    ]
    found = [
        Trajectory(part, f"{name}_{t:g}K", heavy(formula), t, frames, SPACING, SETTLE)
        for name, formula in MOLECULES.items()
        for part, t, frames in conditions
    ]
    return found + more_training(found, times - 1, lambda plan: plan.atoms)


if __name__ == "__main__":
    args = size_parser(__doc__.splitlines()[0], LARGER).parse_args()
    make(
        args.out / ("molecules_large" if args.large else "molecules"),
        plans(LARGER if args.large else 1),
        TYPE_MAP,
        mover=partial(xtb, MOVER_ACCURACY),
        labeller=partial(xtb, LABEL_ACCURACY),
        time_step=1.0,
        seed=20261122,
        workers=args.workers,
    )
