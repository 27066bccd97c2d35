"""Make the race's water set with GFN1-xTB: ``python make_water.py --out race-data``, some minutes. Needs tblite.

Training and test are those of ``examples/water_xtb`` at 300 and 350 K and 1 g/cm³, split by time blocks. Out of
distribution: its test frames at 420 K, and hotter and denser water, sampled and labelled by the example's own script.
``--example-only`` leaves the latter out and needs no tblite.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from sampling import argument_parser, summary, write_checksums
from sets import Part

EXAMPLE = Path(__file__).resolve().parents[3] / "examples" / "water_xtb"
sys.path.insert(0, str(EXAMPLE))

# The example is not a package: its script is imported by the path above.
from make_data import DENSITY, as_system, labelled, sample  # noqa: E402
from write_system import write_npy  # noqa: E402

# Folders of the example for each part.
COPIED: dict[Part, tuple[str, ...]] = {
    "train": ("train/300K", "train/350K"),
    "test": ("valid/300K", "valid/350K"),
    "out": ("valid/420K",),
}
CONDITIONS = ((600.0, DENSITY), (350.0, 1.2))  # K, g/cm³
MOLECULES, FRAMES, SEED = 32, 20, 20261122


def main() -> None:
    """Copy the example's frames, make the others, and write checksums."""
    parser = argument_parser(__doc__.splitlines()[0])
    parser.add_argument(
        "--example-only", action="store_true", help="only the frames of examples/water_xtb"
    )
    args = parser.parse_args()
    out = args.out / "water"
    for part, sources in COPIED.items():
        for source in sources:
            shutil.copytree(
                EXAMPLE / "data" / source, out / part / Path(source).name, dirs_exist_ok=True
            )
    for temperature, density in () if args.example_only else CONDITIONS:
        frames = sample(MOLECULES, temperature, FRAMES, SEED, density)
        system = as_system(
            [labelled(frame, temperature, 0, (SEED, k)) for k, frame in enumerate(frames)]
        )
        name = f"{temperature:g}K_{density:g}g"
        write_npy(out / "out" / name, system)
        print(f"water/out/{name}: {summary(system)}", flush=True)
    print(write_checksums(out))


if __name__ == "__main__":
    main()
