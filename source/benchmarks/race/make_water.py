"""Make the race's water set with GFN1-xTB: ``python make_water.py --out race-data``, some minutes. Needs tblite.

Training and test are those of ``examples/water_xtb`` (300, 350 and 420 K at 1 g/cm³, split by time blocks). Out of
distribution: hotter water, and denser water, sampled and labelled by the example's own script.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from sampling import output_folder, summary, write_checksums

EXAMPLE = Path(__file__).resolve().parents[3] / "examples" / "water_xtb"
sys.path.insert(0, str(EXAMPLE))

# The example is no package: the path above must be set before its script can be found.
from make_data import DENSITY, as_system, labelled, sample  # noqa: E402
from write_system import write_npy  # noqa: E402

CONDITIONS = ((600.0, DENSITY), (350.0, 1.2))  # K, g/cm³
MOLECULES, FRAMES, SEED = 32, 20, 20261122


def main() -> None:
    """Copy the example's parts, make the third, and write checksums."""
    out = output_folder(__doc__.splitlines()[0]) / "water"
    for part, source in (("train", "train"), ("test", "valid")):
        shutil.copytree(EXAMPLE / "data" / source, out / part, dirs_exist_ok=True)
    for temperature, density in CONDITIONS:
        frames = sample(MOLECULES, temperature, FRAMES, SEED, density)
        system = as_system([labelled(frame, temperature, 0, (SEED, k)) for k, frame in enumerate(frames)])
        name = f"{temperature:g}K_{density:g}g"
        write_npy(out / "out" / name, system)
        print(f"water/out/{name}: {summary(system)}", flush=True)
    print(write_checksums(out))


if __name__ == "__main__":
    main()
