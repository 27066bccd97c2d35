"""Dynamics with trained models: how long NVE lasts, drift, and radial distribution functions beside the reference's.

    python source/benchmarks/race/dynamics.py --models kept/water_*.pt --system race-data/water/train/350K \
        --temperature 350 --picoseconds 2.5 --seeds 1 2 3 4

All runs of a model start from one frame of the system with momenta of their own, and advance together. The
reference's distribution is that of all frames of the system, which the labelling method (or, for water, the sampler of
the example) has visited. One JSON line a model; `blow_ups_per_ps` is their number over the time that all runs lasted.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from ase import Atoms, units

from deepmd_muon.infer import Predictor

Potential = Callable[[np.ndarray], tuple[np.ndarray, np.ndarray]]
"""From positions `(nruns, natoms, 3)` [Å] to energies `(nruns,)` [eV] and forces `(nruns, natoms, 3)` [eV/Å]."""

WIDTH = 0.05  # Å, of a bin
HOTTEST = 3.0  # a run above this multiple of its first temperature has blown up
SAMPLES = 200  # of energy and distances in a run
EQUILIBRATION = 0.2  # of the run, before distances count
CLOSER = 0.9  # of the shortest distance in training frames: closer atoms have left what training knows
WATCH = 4  # time steps between two looks at the shortest distances


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


def potential_of(path: Path, atoms: Atoms) -> Potential:
    """Return a trained potential for atoms and a cell like these."""
    predictor = Predictor(path)
    types = np.array([predictor.type_map.index(symbol) for symbol in atoms.symbols])
    cell = atoms.cell.array if atoms.pbc.all() else None

    def potential(positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        found = predictor.predict(positions, cell, types)
        return found.energy, found.force

    return potential


class Contacts:
    """Shortest distances between atoms of each two elements, by nearest images in an orthorhombic cell.

    Parameters
    ----------
    atoms
        Elements and cell.
    """

    def __init__(self, atoms: Atoms) -> None:
        self._first, self._second = np.triu_indices(len(atoms), 1)
        ends = zip(atoms.symbols[self._first], atoms.symbols[self._second], strict=True)
        names = np.array(["-".join(sorted(pair)) for pair in ends])
        self._of = {str(name): names == name for name in np.unique(names)}
        self._lengths = np.where(atoms.pbc, atoms.cell.lengths(), 0.0)
        self._per_length = np.divide(1.0, self._lengths, out=np.zeros(3), where=atoms.pbc)

    def __call__(self, positions: np.ndarray) -> dict[str, np.ndarray]:
        """Return the shortest distance of each pair of elements `(nruns,)` [Å], from `(nruns, natoms, 3)`."""
        vectors = positions[:, self._second] - positions[:, self._first]
        vectors -= self._lengths * np.round(vectors * self._per_length)
        distance = np.sqrt((vectors**2).sum(axis=-1))
        return {name: distance[:, chosen].min(axis=1) for name, chosen in self._of.items()}


@dataclass
class Course:
    """One run of several.

    Attributes
    ----------
    seed
        Of its momenta.
    time
        How long it has lasted [ps].
    blew_up
        Whether it has ended because it was too hot.
    samples
        Time [ps], total energy [meV/atom] and temperature [K].
    frames
        Positions after equilibration.
    left
        When a pair of elements first came closer than it may [ps].
    closest
        Shortest distance of each pair of elements so far [Å].
    """

    seed: int
    time: float = 0.0
    blew_up: bool = False
    samples: list[tuple[float, float, float]] = field(default_factory=list)
    frames: list[Atoms] = field(default_factory=list)
    left: dict[str, float] = field(default_factory=dict)
    closest: dict[str, float] = field(default_factory=dict)

    def watch(self, pair: str, distance: float, allowed: float) -> None:
        """Take note of the present shortest distance of a pair of elements, and of one below the allowed."""
        self.closest[pair] = min(distance, self.closest.get(pair, math.inf))
        if distance < allowed:
            self.left.setdefault(pair, self.time)

    def summary(self) -> dict[str, Any]:
        """Return what it has found; drift is in meV/atom/ps, fluctuation in meV/atom."""
        steady = not self.blew_up and len(self.samples) > 2
        times, energies, kelvin = np.array(self.samples).T if steady else np.zeros((3, 1))
        return {
            "seed": self.seed,
            "stable": not self.blew_up,
            "picoseconds": round(self.time, 6),
            "left": {pair: round(time, 6) for pair, time in self.left.items()},
            "closest": {pair: round(distance, 3) for pair, distance in self.closest.items()},
            "drift": float(np.polyfit(times, energies, 1)[0]) if steady else None,
            "fluctuation": float(np.std(energies)) if steady else None,
            "temperature": float(kelvin[len(kelvin) // 2 :].mean()) if steady else None,
        }


class Ensemble:
    """Copies of a system with velocities of their own, which take steps of velocity Verlet together.

    Parameters
    ----------
    start
        First positions; not changed.
    potential
        What moves the atoms.
    temperature
        Of the first momenta [K].
    seeds
        Of the momenta of each copy, which is at rest as a whole.
    """

    def __init__(self, start: Atoms, potential: Potential, temperature: float, seeds: Sequence[int]) -> None:
        self._potential = potential
        self._masses = start.get_masses()[:, None]
        spread = np.sqrt(units.kB * temperature * self._masses)
        momenta = np.stack([np.random.default_rng(seed).standard_normal((len(start), 3)) * spread for seed in seeds])
        self.positions = np.repeat(start.positions[None], len(seeds), axis=0)
        self.velocities = momenta / self._masses - momenta.sum(axis=1, keepdims=True) / self._masses.sum()
        self.energies, self.forces = potential(self.positions)

    def step(self, time_step: float) -> None:
        """Advance by a time step [ASE's units]."""
        self.velocities += 0.5 * time_step * self.forces / self._masses
        self.positions += time_step * self.velocities
        self.energies, self.forces = self._potential(self.positions)
        self.velocities += 0.5 * time_step * self.forces / self._masses

    def kinetic(self) -> np.ndarray:
        """Return the kinetic energy of each copy `(ncopies,)` [eV]."""
        energies: np.ndarray = 0.5 * (self._masses * self.velocities**2).sum(axis=(1, 2))
        return energies

    def keep(self, chosen: np.ndarray) -> None:
        """Go on with some of the copies only."""
        self.positions, self.velocities, self.energies, self.forces = (
            values[chosen] for values in (self.positions, self.velocities, self.energies, self.forces)
        )


def constant_energy(
    start: Atoms,
    potential: Potential,
    *,
    temperature: float,
    seeds: Sequence[int],
    picoseconds: float,
    time_step: float,
    allowed: Mapping[str, float] | None = None,
) -> list[Course]:
    """Run NVE from one frame with several momenta.

    Parameters
    ----------
    start, potential, temperature, seeds
        See `Ensemble`.
    picoseconds, time_step
        Length of the runs, and of a step [fs].
    allowed
        How close each pair of elements may come [Å], see `Course.left`.
    """
    courses = [Course(seed) for seed in seeds]
    running, ensemble, contacts = list(courses), Ensemble(start, potential, temperature, seeds), Contacts(start)
    steps = round(1e3 * picoseconds / time_step)
    stride = max(1, steps // SAMPLES)
    for step in range(steps + 1):
        if step:
            ensemble.step(time_step * units.fs)
        kinetic = ensemble.kinetic()
        kelvin = kinetic / (1.5 * units.kB * len(start))
        total = 1e3 * (kinetic + ensemble.energies) / len(start)
        distances = contacts(ensemble.positions) if step % WATCH == 0 else {}
        for row, course in enumerate(running):
            course.time = 1e-3 * step * time_step
            course.blew_up = not kelvin[row] < HOTTEST * temperature
            for pair, found in distances.items():
                course.watch(pair, float(found[row]), (allowed or {}).get(pair, 0.0))
            if step % stride == 0:
                course.samples.append((course.time, float(total[row]), float(kelvin[row])))
            if step % stride == 0 and step >= EQUILIBRATION * steps:
                course.frames.append(start.copy())
                course.frames[-1].positions = ensemble.positions[row]
        if any(course.blew_up for course in running):
            ensemble.keep(np.array([not course.blew_up for course in running]))
            running = [course for course in running if not course.blew_up]
        if not running:
            break
    return courses


def rate(times: Sequence[float], ended: int) -> tuple[float, float]:
    """Return events per ps with their statistical uncertainty, from the time until each event or the end of its run."""
    total = sum(times)
    return ended / total, math.sqrt(max(ended, 1)) / total


def report(courses: Sequence[Course]) -> dict[str, Any]:
    """Return blow-ups and departures per ps with uncertainties, and every run."""
    first = [min(course.left.values(), default=course.time) for course in courses]
    return {
        "blow_ups_per_ps": rate([course.time for course in courses], sum(course.blew_up for course in courses)),
        "departures_per_ps": rate(first, sum(bool(course.left) for course in courses)),
        "runs": [course.summary() for course in courses],
    }


def size_of_matrices(path: Path) -> float:
    """Return the root mean square of the matrices' entries times √(larger dimension), the mean over matrices.

    It is about 1 at the start of a training. Rows and columns, whose size the Adam route sets, do not count.
    """
    content = torch.load(path, map_location="cpu", weights_only=True)["model"]
    matrices = [x.double() for name, x in content.items() if name.endswith("matrix") and min(x.shape) > 1]
    return statistics.mean(float(x.square().mean().sqrt()) * math.sqrt(max(x.shape)) for x in matrices)


def shortest(frames: Sequence[Atoms]) -> dict[str, float]:
    """Return the shortest distance of each pair of elements in all frames [Å]."""
    found: dict[str, float] = {}
    for frame in frames:
        for pair, distance in Contacts(frame)(frame.positions[None]).items():
            found[pair] = min(float(distance[0]), found.get(pair, math.inf))
    return found


def main() -> None:
    """Run the dynamics of every model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=Path, nargs="+", required=True, help="files that race.py --keep wrote")
    parser.add_argument("--system", type=Path, required=True, help="folder with the first frame and the reference")
    parser.add_argument("--training", type=Path, nargs="+", help="folders of training frames; that of --system if none")
    parser.add_argument("--frame", type=int, default=0, help="of the system, where runs start")
    parser.add_argument("--temperature", type=float, required=True, help="K")
    parser.add_argument("--picoseconds", type=float, default=5.0)
    parser.add_argument("--time-step", type=float, default=0.5, help="fs")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1], help="of the momenta, a run each")
    args = parser.parse_args()
    reference = read_system(args.system)
    start = reference[args.frame]
    training = [frame for folder in args.training or [args.system] for frame in read_system(folder)]
    allowed = {pair: CLOSER * distance for pair, distance in shortest(training).items()}
    for path in args.models:
        courses = constant_energy(
            start,
            potential_of(path, start),
            temperature=args.temperature,
            seeds=args.seeds,
            picoseconds=args.picoseconds,
            time_step=args.time_step,
            allowed=allowed,
        )
        frames = [frame for course in courses for frame in course.frames]
        apart = distances_apart(frames, reference) if frames and start.pbc.all() else {}
        about = {"model": path.stem, "system": args.system.name, "frame": args.frame, "temperature": args.temperature}
        about |= {"time_step": args.time_step, "size_of_matrices": size_of_matrices(path)}
        print(json.dumps({**about, **report(courses), "pair_distributions_apart": apart}), flush=True)


if __name__ == "__main__":
    main()
