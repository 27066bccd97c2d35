"""Make the set of one drug-like molecule with GFN2-xTB: ``python make_bpa.py --out race-data``.

3-(benzyloxy)pyridin-2-amine has three torsions. As in the 3BPA set that MACE and NequIP publish, training frames are
at 300 K, and the parts out of distribution at 600 and 1200 K. Frames and labels are our own. Needs tblite.
"""

from __future__ import annotations

from functools import partial

from ase import Atoms
from make_molecules import LABEL_ACCURACY, MOVER_ACCURACY, SPACING, xtb
from sampling import Trajectory, argument_parser, make
from sets import Part

TYPE_MAP = ("H", "C", "N", "O")
SETTLE = 1000
# Positions [Å] of a conformer after a force-field relaxation.
POSITIONS = """
N 1.886 0.035 2.230
C 2.516 0.115 0.985
N 3.813 0.472 1.000
C 4.445 0.549 -0.194
C 3.840 0.283 -1.413
C 2.497 -0.074 -1.413
C 1.818 -0.134 -0.201
O 0.503 -0.515 -0.209
C -0.342 0.632 -0.058
C -1.775 0.163 -0.111
C -2.366 -0.175 -1.338
C -3.688 -0.619 -1.388
C -4.430 -0.736 -0.214
C -3.850 -0.414 1.011
C -2.527 0.031 1.064
H 2.608 0.157 2.935
H 1.398 -0.851 2.315
H 5.491 0.836 -0.142
H 4.403 0.350 -2.337
H 1.984 -0.299 -2.343
H -0.155 1.148 0.891
H -0.169 1.348 -0.873
H -1.793 -0.098 -2.259
H -4.137 -0.878 -2.343
H -5.458 -1.085 -0.254
H -4.426 -0.512 1.928
H -2.086 0.272 2.029
"""


def plans() -> list[Trajectory]:
    """Return one trajectory for each part and temperature."""
    rows = [line.split() for line in POSITIONS.strip().splitlines()]
    atoms = Atoms([row[0] for row in rows], [[float(x) for x in row[1:]] for row in rows])
    conditions: list[tuple[Part, float, int]] = [
        ("train", 300.0, 450),
        ("test", 300.0, 150),
        ("out", 600.0, 100),
        ("out", 1200.0, 100),
    ]
    return [
        Trajectory(part, f"bpa_{kelvin:g}K", atoms, kelvin, frames, SPACING, SETTLE)
        for part, kelvin, frames in conditions
    ]


if __name__ == "__main__":
    parser = argument_parser(__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, default=1, help="processes")
    args = parser.parse_args()
    make(
        args.out / "bpa",
        plans(),
        TYPE_MAP,
        mover=partial(xtb, MOVER_ACCURACY),
        labeller=partial(xtb, LABEL_ACCURACY),
        time_step=0.5,
        seed=20261128,
        workers=args.workers,
    )
