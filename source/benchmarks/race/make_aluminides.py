"""Make the race's set of nickel aluminides with ASE's EMT potential: ``python make_aluminides.py --out race-data``.

Training and test: crystals and melts of NiAl, Ni₃Al and NiAl₃. Out of distribution: other parts of nickel, hotter
melts, and crystal and melt under pressure. The set was made last, and no setting was chosen on it.
"""

from __future__ import annotations

import numpy as np
from ase.calculators.emt import EMT
from make_alloys import alloy
from sampling import Trajectory, argument_parser, make
from sets import SETS, Part

CONTENTS = ({"Ni": 16, "Al": 16}, {"Ni": 24, "Al": 8}, {"Ni": 8, "Al": 24})
OTHER_CONTENTS = ({"Ni": 20, "Al": 12}, {"Ni": 4, "Al": 28})
COLD, HOT, LIQUID, HOTTEST, MELT = 300.0, 900.0, 2200.0, 3500.0, 5000.0  # K
LIQUID_LENGTH = 1.04
PRESSED = 0.95  # length, of that at zero pressure
SPACING, SETTLE = 30, 300


def plans() -> list[Trajectory]:
    """Return the trajectories of the set."""
    rng = np.random.default_rng(20261128)
    trajectories = []

    def add(
        part: Part,
        content: dict[str, int],
        state: str,
        *,
        temperature: float,
        length: float,
        frames: int,
    ) -> None:
        name = "".join(f"{element}{count}" for element, count in content.items())
        trajectory = Trajectory(
            part,
            f"{name}_{state}_{temperature:g}K",
            alloy(content, rng, length),
            temperature,
            frames=frames,
            spacing=SPACING,
            settle=SETTLE,
            melt=MELT if "liquid" in state else 0.0,
        )
        trajectories.append(trajectory)

    for part, frames in (("train", 32), ("test", 8)):
        for content in CONTENTS:
            add(part, content, "crystal", temperature=COLD, length=1.0, frames=frames)
            add(part, content, "crystal", temperature=HOT, length=1.0, frames=frames)
            add(part, content, "liquid", temperature=LIQUID, length=LIQUID_LENGTH, frames=frames)
    for content in OTHER_CONTENTS:
        add("out", content, "crystal", temperature=HOT, length=1.0, frames=12)
        add("out", content, "liquid", temperature=LIQUID, length=LIQUID_LENGTH, frames=12)
    for content in CONTENTS:
        add("out", content, "liquid", temperature=HOTTEST, length=LIQUID_LENGTH, frames=12)
        add("out", content, "pressed_crystal", temperature=HOT, length=PRESSED, frames=12)
        add(
            "out",
            content,
            "pressed_liquid",
            temperature=LIQUID,
            length=LIQUID_LENGTH * PRESSED,
            frames=12,
        )
    return trajectories


if __name__ == "__main__":
    parser = argument_parser(__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, default=1, help="processes")
    args = parser.parse_args()
    make(
        args.out / "aluminides",
        plans(),
        SETS["aluminides"].type_map,
        mover=EMT,
        labeller=EMT,
        time_step=2.0,
        seed=20261128,
        workers=args.workers,
    )
