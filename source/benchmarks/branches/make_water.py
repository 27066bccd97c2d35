"""Label water with GFN1-xTB and GFN2-xTB: ``python make_water.py --out branches-data``, 10 minutes. Needs tblite.

The sampler and the tight calculations of ``examples/water_xtb`` make the frames. Its own 240 training frames at 300
and 350 K are the GFN1 data; these are new:

- ``gfn2/train`` and ``gfn2/test``: 300 K and 1 g/cm³, GFN2;
- ``hot/train``: 600 K and 1 g/cm³, GFN1;
- ``out/gfn1`` and ``out/gfn2``: the example's validation frames at 420 K, later frames at 600 K, and 350 K at
  1.2 g/cm³, with labels of both.

Blocks of a trajectory are four frames (1.2 ps) apart.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from itertools import repeat
from pathlib import Path

import numpy as np
from ase import Atoms

EXAMPLE = Path(__file__).resolve().parents[3] / "examples" / "water_xtb"
sys.path.insert(0, str(EXAMPLE))

# The example is not a package: its script is imported by the path above.
from make_data import DENSITY, TYPE_MAP, as_system, labelled, sample  # noqa: E402
from write_system import write_npy  # noqa: E402

MOLECULES, SEED = 32, 20261123
GAP, TEST = 4, 20  # frames
TRAINING = {"gfn2": 60, "hot": 40}  # frames
METHODS = {"gfn1": "GFN1-xTB", "gfn2": "GFN2-xTB"}


def example_frames(folder: Path) -> list[Atoms]:
    """Return the frames of a system of the example."""
    symbols = [TYPE_MAP[int(number)] for number in np.loadtxt(folder / "type.raw")]
    coord, box = (np.load(folder / "set.000" / f"{name}.npy") for name in ("coord", "box"))
    return [
        Atoms(symbols, positions=x.reshape(-1, 3), cell=b.reshape(3, 3), pbc=True)
        for x, b in zip(coord, box, strict=True)
    ]


def main() -> None:
    """Sample, label and write; systems that exist are left alone."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--workers", type=int, default=2, help="processes")
    args = parser.parse_args()
    with ProcessPoolExecutor(args.workers) as pool:

        def write(name: str, frames: Sequence[Atoms], temperature: float, method: str) -> None:
            if (args.out / name / "type.raw").exists():
                return
            found = pool.map(labelled, frames, repeat(temperature), repeat(0), repeat((SEED,)), repeat(METHODS[method]))
            system = as_system([*found])
            write_npy(args.out / name, system)
            energy, force = system.energy / MOLECULES, system.force
            print(
                f"{name}: {len(energy)} frames, {energy.mean():.4f} eV/molecule, "
                f"force {np.sqrt((force**2).mean()):.3f} eV/Å RMS and {np.abs(force).max():.2f} largest",
                flush=True,
            )

        drawn = {
            "gfn2": pool.submit(sample, MOLECULES, 300.0, TRAINING["gfn2"] + GAP + TEST, SEED),
            "hot": pool.submit(sample, MOLECULES, 600.0, TRAINING["hot"] + GAP + TEST, SEED),
            "dense": pool.submit(sample, MOLECULES, 350.0, TEST, SEED, 1.2 * DENSITY),
        }
        warm = example_frames(EXAMPLE / "data" / "valid" / "420K")
        write("out/gfn2/420K", warm, 420.0, "gfn2")
        hot, cool, dense = (drawn[name].result() for name in ("hot", "gfn2", "dense"))
        write("hot/train/600K", hot[: TRAINING["hot"]], 600.0, "gfn1")
        write("gfn2/train/300K", cool[: TRAINING["gfn2"]], 300.0, "gfn2")
        write("gfn2/test/300K", cool[-TEST:], 300.0, "gfn2")
        for method in METHODS:
            write(f"out/{method}/600K", hot[-TEST:], 600.0, method)
            write(f"out/{method}/350K_1.2g", dense, 350.0, method)
        write("out/gfn1/420K", warm, 420.0, "gfn1")


if __name__ == "__main__":
    main()
