"""Distributions of distances between atoms, of every two elements, and how far apart two of them are.

    python source/benchmarks/race/distributions.py --system race-data/water/train/350K \
        --reference references/water_350K_*.npz --runs runs/water_*.npz

compares frames that `dynamics.py --out` kept with those of `reference.py`, and halves of each with each other.
"""

from __future__ import annotations

import argparse
import json
import math
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from ase import Atoms

Curves = dict[str, np.ndarray]
"""Of each pair of elements, "H-O", a value for each bin of `WIDTH`."""

WIDTH = 0.05  # Å, of a bin
LONGEST = 8.0  # Å, of distances that count where there is no cell


def read_system(folder: Path) -> list[Atoms]:
    """Return all frames of a DeePMD npy folder."""
    types = np.loadtxt(folder / "type.raw", dtype=int).reshape(-1)
    symbols = np.array((folder / "type_map.raw").read_text().split())[types]
    coord = np.load(folder / "set.000" / "coord.npy").astype(float).reshape(-1, len(types), 3)
    if (folder / "nopbc").exists():
        return [Atoms(symbols, positions=positions) for positions in coord]
    boxes = np.load(folder / "set.000" / "box.npy").reshape(-1, 3, 3)
    return [Atoms(symbols, positions=x, cell=box, pbc=True) for x, box in zip(coord, boxes, strict=True)]


def reach_of(frames: Sequence[Atoms]) -> float:
    """Return up to which distance [Å] distributions go: half of the shortest edge of the cells, if there are any."""
    return float(min(frame.cell.lengths().min() for frame in frames)) / 2 if frames[0].pbc.all() else LONGEST


def pair_distribution(frames: Sequence[Atoms], first: str, second: str, reach: float) -> np.ndarray:
    """Return the distribution of distances of two elements in bins of `WIDTH` up to `reach` [Å].

    It is g(r) in orthorhombic cells. Without cells it is the density of distances [1/Å], whose integral is 1 where no
    distance is longer than `reach`.
    """
    edges = np.arange(0.0, reach + WIDTH / 2, WIDTH)
    shells = 4.0 / 3.0 * math.pi * np.diff(edges**3)
    total = np.zeros(len(shells))
    for frame in frames:
        i, j = (np.flatnonzero(frame.symbols == name) for name in (first, second))
        vectors = frame.positions[j][None] - frame.positions[i][:, None]
        lengths = frame.cell.lengths()
        periodic = bool(frame.pbc.all())
        if periodic:
            vectors -= lengths * np.round(vectors / lengths)
        distance = np.linalg.norm(vectors, axis=-1)
        counts, _ = np.histogram(distance[i[:, None] != j[None]], edges)
        pairs = len(i) * len(j) - (len(i) if first == second else 0)
        total += counts * (frame.get_volume() / shells if periodic else 1.0 / WIDTH) / pairs
    return total / len(frames)


def distributions(frames: Sequence[Atoms], reach: float) -> Curves:
    """Return the distribution of distances of every pair of elements of which there are two atoms."""
    elements, counts = np.unique(frames[0].symbols, return_counts=True)
    number = dict(zip(map(str, elements), map(int, counts), strict=True))
    pairs = [(a, b) for k, a in enumerate(number) for b in list(number)[k:] if a != b or number[a] > 1]
    return {f"{a}-{b}": pair_distribution(frames, a, b, reach) for a, b in pairs}


def distances_apart(found: Sequence[Atoms], reference: Sequence[Atoms]) -> dict[str, float]:
    """Return ∫|Δ| dr of the distributions of each pair of elements.

    It is in Å between g(r) of frames with cells; without cells it is a number between 0 and 2.
    """
    end = reach_of([*found, *reference])
    ours, theirs = distributions(found, end), distributions(reference, end)
    return {pair: round(float(np.abs(ours[pair] - curve).sum() * WIDTH), 4) for pair, curve in theirs.items()}


def halves_apart(runs: Sequence[Sequence[Atoms]]) -> dict[str, float]:
    """Return `distances_apart` of two halves: every other run, or of a single run the first and second half in time."""
    (only, *others) = runs
    middle = len(only) // 2
    parts = (runs[::2], runs[1::2]) if others else ([only[:middle]], [only[middle:]])
    first, second = ([frame for run in part for frame in run] for part in parts)
    return distances_apart(first, second) if first and second else {}


def compare(runs: Sequence[Sequence[Atoms]], reference: Sequence[Sequence[Atoms]]) -> dict[str, dict[str, float]]:
    """Return how far apart runs and a reference are, two halves of each, and what chance alone would give.

    Halves of N frames differ by twice the uncertainty of the mean over all N. So runs and a reference of the same
    distribution differ by √(a² + b²)/2, where a and b are the differences between their halves.
    """
    ours, theirs = ([frame for run in some for frame in run] for some in (runs, reference))
    halves = halves_apart(runs), halves_apart(reference)
    return {
        "distributions_apart": distances_apart(ours, theirs),
        "by_chance": {
            pair: round(math.hypot(half, halves[1][pair]) / 2, 4)
            for pair, half in halves[0].items()
            if pair in halves[1]
        },
        "halves_of_runs_apart": halves[0],
        "halves_of_reference_apart": halves[1],
    }


def save(path: Path, **arrays: np.ndarray | float) -> None:
    """Save arrays in one go, so that a file that exists is complete."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(f".{os.getpid()}.part")
    with part.open("wb") as file:
        np.savez(file, **arrays)
    part.replace(path)


def write_run(path: Path, frames: Sequence[Atoms], **others: np.ndarray) -> None:
    """Write the frames of a run, as `save` does."""
    save(path, positions=np.array([frame.positions for frame in frames], dtype=np.float32), **others)


def read_runs(paths: Sequence[Path], like: Atoms) -> list[list[Atoms]]:
    """Return the frames of each file that `write_run` wrote, of a system with atoms and a cell like these."""
    runs = []
    for path in paths:
        with np.load(path) as arrays:
            positions = arrays["positions"].astype(float)
        frames = [like.copy() for _ in positions]
        for frame, x in zip(frames, positions, strict=True):
            frame.positions = x
        runs.append(frames)
    return runs


def main() -> None:
    """Compare files of frames."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--system", type=Path, required=True, help="folder, for atoms and cell")
    parser.add_argument("--reference", type=Path, nargs="+", required=True, help="files of reference.py")
    parser.add_argument("--runs", type=Path, nargs="+", required=True, help="files of dynamics.py, of one model")
    args = parser.parse_args()
    like = read_system(args.system)[0]
    found = compare(read_runs(args.runs, like), read_runs(args.reference, like))
    print(json.dumps({"system": args.system.name, "runs": [path.stem for path in args.runs], **found}))


if __name__ == "__main__":
    main()
