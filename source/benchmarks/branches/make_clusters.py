"""Label water clusters with GFN1-xTB and GFN2-xTB: ``python make_clusters.py --out clusters``, a minute. Needs tblite.

A cluster is a molecule and its nearest neighbours in a frame of ``examples/water_xtb``, without a cell. Training
clusters come from its training frames, test clusters from its validation frames. Each set has 30 to 200 clusters:

- ``gfn1/train``: 200 hexamers of 300 and 350 K; ``gfn2/train``: 40 hexamers of 300 K; ``dense/train``: 40 hexamers of
  300 and 350 K with distances between molecules scaled by 0.88, GFN1;
- ``LEVEL/test``: hexamers of the same temperatures;
- ``LEVEL/hot``, ``LEVEL/dense``, ``LEVEL/large``: hexamers of 420 K, scaled by 0.88, and clusters of 12.
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
sys.path.insert(0, str(EXAMPLE.parent))

# examples/ is not a package: its shared module is imported by the path above.
from write_system import LabelledSystem, write_npy  # noqa: E402

TYPE_MAP = ("O", "H")
SEED, ACCURACY, DENSE = 20261123, 0.01, 0.88
BOTH, METHODS = ("300K", "350K"), {"gfn1": "GFN1-xTB", "gfn2": "GFN2-xTB"}


def clusters(
    part: str, temperatures: Sequence[str], count: int, *, molecules: int = 6, scale: float = 1.0
) -> list[np.ndarray]:
    """Return positions (3·molecules, 3) [Å] of clusters, atoms O, H, H, rounded to float32.

    Parameters
    ----------
    part, temperatures
        "train" or "valid", and names of systems of the example.
    count
        How many.
    molecules
        Of a cluster.
    scale
        Of the distances between oxygen atoms; molecules keep their shapes.
    """
    rng = np.random.default_rng([SEED, len(part), molecules, round(100 * scale), count])
    folders = [EXAMPLE / "data" / part / name / "set.000" for name in temperatures]
    frames = [(np.load(folder / "coord.npy"), np.load(folder / "box.npy")) for folder in folders]
    found = []
    for _ in range(count):
        coord, box = frames[rng.integers(len(frames))]
        number = rng.integers(len(coord))
        length, whole = box[number][0], coord[number].astype(np.float64).reshape(-1, 3, 3)
        apart = whole[:, 0] - whole[rng.integers(len(whole)), 0]
        apart -= length * np.round(apart / length)
        near = np.linalg.norm(apart, axis=1).argsort()[:molecules]
        inside = whole[near] - whole[near, :1]
        positions = (scale * apart[near, None] + inside).reshape(-1, 3)
        found.append((positions - positions.mean(axis=0)).astype(np.float32).astype(np.float64))
    return found


def label(positions: np.ndarray, method: str) -> tuple[float, np.ndarray]:
    """Return energy [eV] and forces [eV/Å] of a tightly converged calculation from scratch."""
    from tblite.ase import TBLite

    atoms = Atoms("OHH" * (len(positions) // 3), positions=positions)
    atoms.calc = TBLite(method=method, accuracy=ACCURACY, verbosity=0)
    return float(atoms.get_potential_energy()), atoms.get_forces()


def main() -> None:
    """Cut, label and write; systems that exist are left alone."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--workers", type=int, default=2, help="processes")
    args = parser.parse_args()
    sets = {
        "gfn1/train": clusters("train", BOTH, 200),
        "gfn2/train": clusters("train", BOTH[:1], 40),
        "dense/train": clusters("train", BOTH, 40, scale=DENSE),
    }
    for level in METHODS:
        sets[f"{level}/test"] = clusters("valid", BOTH if level == "gfn1" else BOTH[:1], 30)
        sets[f"{level}/hot"] = clusters("valid", ("420K",), 30)
        sets[f"{level}/dense"] = clusters("valid", BOTH, 30, scale=DENSE)
        sets[f"{level}/large"] = clusters("valid", BOTH, 30, molecules=12)
    with ProcessPoolExecutor(args.workers) as pool:
        for name, found in sets.items():
            if (args.out / name / "type.raw").exists():
                continue
            method = METHODS.get(name.partition("/")[0], METHODS["gfn1"])
            energy, force = zip(*pool.map(label, found, repeat(method)), strict=True)
            atype = np.array([0, 1, 1] * (len(found[0]) // 3))
            arrays = np.array(found), None, np.array(energy), np.array(force), None
            write_npy(args.out / name, LabelledSystem(atype, TYPE_MAP, *arrays))
            root = np.sqrt(np.square(force).mean())
            print(f"{name}: {len(found)} clusters, force {root:.3f} eV/Å RMS", flush=True)


if __name__ == "__main__":
    main()
