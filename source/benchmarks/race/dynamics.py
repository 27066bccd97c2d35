"""Dynamics with trained models: drift and stability of NVE, and radial distribution functions beside the reference's.

    python source/benchmarks/race/dynamics.py --models kept/water_*.pt --system race-data/water/out/600K_1g \
        --temperature 600 --picoseconds 5

Starts from the first frame of the system. The reference's distribution is that of all frames of the system, which the
labelling method (or, for water, the sampler of the example) has visited. One JSON line a model.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from ase import Atoms, units
from ase.calculators.calculator import Calculator
from ase.md.verlet import VelocityVerlet

from deepmd_muon.infer import DeepPotCalculator

WIDTH = 0.05  # Å, of a bin
HOTTEST = 3.0  # a run above this multiple of its first temperature has blown up
SAMPLES = 200  # of energy and distances in a run
EQUILIBRATION = 0.2  # of the run, before distances count


def read_system(folder: Path) -> list[Atoms]:
    """Return all frames of a DeePMD npy folder."""
    types = np.loadtxt(folder / "type.raw", dtype=int).reshape(-1)
    symbols = np.array((folder / "type_map.raw").read_text().split())[types]
    coord = np.load(folder / "set.000" / "coord.npy").astype(float).reshape(-1, len(types), 3)
    if (folder / "nopbc").exists():
        return [Atoms(symbols, positions=positions) for positions in coord]
    boxes = np.load(folder / "set.000" / "box.npy").reshape(-1, 3, 3)
    return [Atoms(symbols, positions=x, cell=box, pbc=True) for x, box in zip(coord, boxes, strict=True)]


def pair_distribution(frames: Sequence[Atoms], first: str, second: str, reach: float) -> np.ndarray:
    """Return g(r) of two elements in orthorhombic cells, in bins of `WIDTH` up to `reach` [Å]."""
    edges = np.arange(0.0, reach + WIDTH / 2, WIDTH)
    shells = 4.0 / 3.0 * math.pi * np.diff(edges**3)
    total = np.zeros(len(shells))
    for frame in frames:
        i, j = (np.flatnonzero(frame.symbols == name) for name in (first, second))
        vectors = frame.positions[j][None] - frame.positions[i][:, None]
        lengths = frame.cell.lengths()
        vectors -= lengths * np.round(vectors / lengths)
        distance = np.linalg.norm(vectors, axis=-1)
        counts, _ = np.histogram(distance[i[:, None] != j[None]], edges)
        pairs = len(i) * len(j) - (len(i) if first == second else 0)
        total += counts * frame.get_volume() / (pairs * shells)
    return total / len(frames)


def distances_apart(found: Sequence[Atoms], reference: Sequence[Atoms]) -> dict[str, float]:
    """Return ∫|g − g_reference| dr [Å] of each pair of elements, up to half of the shortest edge."""
    reach = min(frame.cell.lengths().min() for frame in (*found, *reference)) / 2
    elements = sorted(set(reference[0].symbols))
    pairs = [(a, b) for k, a in enumerate(elements) for b in elements[k:]]
    curves = {pair: [pair_distribution(frames, *pair, reach) for frames in (found, reference)] for pair in pairs}
    return {f"{a}-{b}": float(np.abs(ours - theirs).sum() * WIDTH) for (a, b), (ours, theirs) in curves.items()}


def constant_energy(
    start: Atoms, calculator: Calculator, temperature: float, picoseconds: float, time_step: float, seed: int
) -> tuple[dict[str, Any], list[Atoms]]:
    """Run NVE and return drift and stability, and the frames after equilibration.

    Parameters
    ----------
    start
        First positions; not changed.
    calculator
        The potential.
    temperature
        Of the first momenta [K].
    picoseconds, time_step
        Length of the run, and of a step [fs].
    seed
        Of the momenta.
    """
    atoms = start.copy()
    atoms.calc = calculator
    masses = atoms.get_masses()[:, None]
    momenta = np.random.default_rng(seed).standard_normal((len(atoms), 3)) * np.sqrt(units.kB * temperature * masses)
    atoms.set_momenta(momenta - masses * momenta.sum(axis=0) / masses.sum())
    dynamics = VelocityVerlet(atoms, time_step * units.fs)
    steps = round(1e3 * picoseconds / time_step)
    stride = max(1, steps // SAMPLES)
    times, energies, frames = [], [], []
    stable = True
    for step in range(0, steps + 1, stride):
        times.append(1e-3 * step * time_step)
        energies.append(1e3 * atoms.get_total_energy() / len(atoms))
        stable = bool(math.isfinite(energies[-1]) and atoms.get_temperature() < HOTTEST * temperature)
        if not stable:
            break
        if step >= EQUILIBRATION * steps:
            frames.append(atoms.copy())
        dynamics.run(stride)
    slope = float(np.polyfit(times, energies, 1)[0]) if stable and len(times) > 2 else math.nan
    found = {
        "stable": stable,
        "picoseconds": times[-1],
        "drift": None if math.isnan(slope) else slope,
        "fluctuation": float(np.std(energies)) if stable else None,
    }
    return found, frames


def size_of_matrices(path: Path) -> float:
    """Return the root mean square of the matrices' entries times √(larger dimension), the mean over matrices.

    It is about 1 at the start of a training. Rows and columns, whose size the Adam route sets, do not count.
    """
    content = torch.load(path, map_location="cpu", weights_only=True)["model"]
    matrices = [x.double() for name, x in content.items() if name.endswith("matrix") and min(x.shape) > 1]
    return statistics.mean(float(x.square().mean().sqrt()) * math.sqrt(max(x.shape)) for x in matrices)


def main() -> None:
    """Run the dynamics of every model; drift is in meV/atom/ps, fluctuation in meV/atom."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=Path, nargs="+", required=True, help="files that race.py --keep wrote")
    parser.add_argument("--system", type=Path, required=True, help="folder with the first frame and the reference")
    parser.add_argument("--temperature", type=float, required=True, help="K")
    parser.add_argument("--picoseconds", type=float, default=5.0)
    parser.add_argument("--time-step", type=float, default=0.5, help="fs")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    reference = read_system(args.system)
    for path in args.models:
        calculator = DeepPotCalculator(path)
        run = (args.temperature, args.picoseconds, args.time_step, args.seed)
        found, frames = constant_energy(reference[0], calculator, *run)
        apart = distances_apart(frames, reference) if frames and reference[0].pbc.all() else {}
        about = {"model": path.stem, "system": args.system.name, "temperature": args.temperature}
        about |= {"seed": args.seed, "size_of_matrices": size_of_matrices(path)}
        print(json.dumps({**about, **found, "pair_distributions_apart": apart}), flush=True)


if __name__ == "__main__":
    main()
