"""Make the race's silicon set with the Stillinger–Weber potential: ``python make_silicon.py --out race-data``.

Training and test: crystal, vacancy and liquid at zero pressure. Out of distribution: crystal and liquid under pressure.
``--large`` adds nine trajectories of each training condition, and keeps all other frames.
"""

from __future__ import annotations

from ase import Atoms
from ase.build import bulk
from sampling import Trajectory, make, more_training, size_parser
from sets import Part
from stillinger_weber import StillingerWeber

LATTICE_CONSTANT = 5.431  # Å
LIQUID_LENGTH = 0.985  # of the crystal's: the liquid is denser
CRYSTAL, LIQUID, MELT = (300.0, 900.0, 1500.0), 2500.0, 5000.0  # K
PRESSED = (0.95, 0.92)  # lengths, of those at zero pressure
SPACING, SETTLE = 40, 600
LARGER = 10  # times the training frames


def crystal(length: float = 1.0, *, vacancy: bool = False) -> Atoms:
    """Return 64 atoms, or 63, in a cubic cell."""
    atoms = bulk("Si", "diamond", a=LATTICE_CONSTANT * length, cubic=True).repeat(2)
    if vacancy:
        del atoms[0]
    return atoms


def plans(times: int = 1) -> list[Trajectory]:
    """Return the trajectories of the set, with so many times the training frames; those of the small set come first."""
    found = []
    lengths: list[tuple[Part, int]] = [("train", 50), ("test", 12)]
    for part, frames in lengths:
        rest = {"frames": frames, "spacing": SPACING, "settle": SETTLE}
        found += [Trajectory(part, f"crystal_{t:g}K", crystal(), t, **rest) for t in CRYSTAL]
        found += [
            Trajectory(part, f"vacancy_{t:g}K", crystal(vacancy=True), t, **rest)
            for t in CRYSTAL[1:]
        ]
        found.append(
            Trajectory(
                part, f"liquid_{LIQUID:g}K", crystal(LIQUID_LENGTH), LIQUID, melt=MELT, **rest
            )
        )
    rest = {"frames": 20, "spacing": SPACING, "settle": SETTLE}
    for length in PRESSED:
        found.append(
            Trajectory("out", f"crystal_pressed_{length:g}", crystal(length), 900.0, **rest)
        )
    pressed = crystal(LIQUID_LENGTH * PRESSED[0])
    found.append(
        Trajectory("out", f"liquid_pressed_{PRESSED[0]:g}", pressed, LIQUID, melt=MELT, **rest)
    )
    return found + more_training(found, times - 1, lambda plan: plan.atoms)


if __name__ == "__main__":
    args = size_parser(__doc__.splitlines()[0], LARGER).parse_args()
    make(
        args.out / ("silicon_large" if args.large else "silicon"),
        plans(LARGER if args.large else 1),
        ("Si",),
        mover=StillingerWeber,
        labeller=StillingerWeber,
        time_step=1.5,
        seed=20261122,
        workers=args.workers,
    )
