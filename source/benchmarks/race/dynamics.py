"""Dynamics with trained models: how often runs blow up, how close atoms come, and how well NVE conserves energy.

    python source/benchmarks/race/dynamics.py --models kept/water_*.pt --system race-data/water/train/350K \
        --temperature 350 --picoseconds 2.5 --seeds 1 2 3 4

All runs of a model start from one frame of the system with momenta of their own, and advance together. Without
`--friction` the energy is constant; with it, runs are Langevin dynamics at the temperature. One JSON line a model;
`blow_ups_per_ps` is their number over the time that all runs lasted.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from ase import Atoms, units
from sampling import read_system

from deepmd_muon.infer import Predictor

Potential = Callable[[np.ndarray], tuple[np.ndarray, np.ndarray]]
"""From positions `(nruns, natoms, 3)` [Å] to energies `(nruns,)` [eV] and forces `(nruns, natoms, 3)` [eV/Å]."""

HOTTEST = 3.0  # a run above this multiple of its first temperature has blown up
SAMPLES = 200  # of the energy in a run
CLOSER = (
    0.9  # of the shortest distance in training frames: closer atoms have left what training knows
)
WATCH = 4  # time steps between two looks at the shortest distances


def with_masses(atoms: Atoms, hydrogen: float | None) -> Atoms:
    """Return a copy whose hydrogen has a mass [u], or its own for None."""
    copy = atoms.copy()
    if hydrogen is not None:
        copy.set_masses([hydrogen if symbol == "H" else None for symbol in copy.symbols])
    return copy


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
    left
        When a pair of elements first came closer than it may [ps].
    closest
        Shortest distance of each pair of elements so far [Å].
    """

    seed: int
    time: float = 0.0
    blew_up: bool = False
    samples: list[tuple[float, float, float]] = field(default_factory=list)
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
    """Copies of a system with velocities of their own, which take steps together.

    Steps are those of velocity Verlet, with friction those of Langevin dynamics that splits a step as B-A-O-A-B
    (Leimkuhler and Matthews, J. Chem. Phys. 138, 174102 (2013)).

    Parameters
    ----------
    start
        First positions; not changed.
    potential
        What moves the atoms.
    temperature
        Of the first momenta [K].
    seeds
        Of the random numbers of each copy, which is at rest as a whole at first.
    friction
        Of Langevin dynamics [1/fs]; 0 for constant energy.
    """

    def __init__(
        self,
        start: Atoms,
        potential: Potential,
        temperature: float,
        seeds: Sequence[int],
        friction: float = 0.0,
    ) -> None:
        self._potential = potential
        self._friction = friction / units.fs
        self._random = [np.random.default_rng(seed) for seed in seeds]
        self._masses = start.get_masses()[:, None]
        self._spread = np.sqrt(units.kB * temperature / self._masses)
        self.positions = np.repeat(start.positions[None], len(seeds), axis=0)
        self.draw_velocities()
        self.energies, self.forces = potential(self.positions)

    def _thermal(self) -> np.ndarray:
        """Return velocities of the temperature `(ncopies, natoms, 3)`."""
        shape = self.positions.shape[1:]
        return self._spread * np.stack([random.standard_normal(shape) for random in self._random])

    def draw_velocities(self) -> None:
        """Take new velocities of the temperature, with every copy at rest as a whole."""
        drawn = self._thermal()
        self.velocities = (
            drawn - (self._masses * drawn).sum(axis=1, keepdims=True) / self._masses.sum()
        )

    def step(self, time_step: float) -> None:
        """Advance by a time step [ASE's units]."""
        self.velocities += 0.5 * time_step * self.forces / self._masses
        self.positions += 0.5 * time_step * self.velocities
        if self._friction:
            kept = math.exp(-self._friction * time_step)
            self.velocities = kept * self.velocities + math.sqrt(1.0 - kept**2) * self._thermal()
        self.positions += 0.5 * time_step * self.velocities
        self.energies, self.forces = self._potential(self.positions)
        self.velocities += 0.5 * time_step * self.forces / self._masses

    def kinetic(self) -> np.ndarray:
        """Return the kinetic energy of each copy `(ncopies,)` [eV]."""
        energies: np.ndarray = 0.5 * (self._masses * self.velocities**2).sum(axis=(1, 2))
        return energies

    def keep(self, chosen: np.ndarray) -> None:
        """Go on with some of the copies only."""
        self.positions, self.velocities, self.energies, self.forces = (
            values[chosen]
            for values in (self.positions, self.velocities, self.energies, self.forces)
        )
        self._random = [random for random, kept in zip(self._random, chosen, strict=True) if kept]


def run_copies(
    start: Atoms,
    potential: Potential,
    *,
    temperature: float,
    seeds: Sequence[int],
    picoseconds: float,
    time_step: float,
    friction: float = 0.0,
    allowed: Mapping[str, float] | None = None,
) -> list[Course]:
    """Run dynamics from one frame with several momenta.

    Parameters
    ----------
    start, potential, temperature, seeds, friction
        See `Ensemble`.
    picoseconds, time_step
        Length of the runs, and of a step [fs].
    allowed
        How close each pair of elements may come [Å].
    """
    courses = [Course(seed) for seed in seeds]
    running = list(courses)
    ensemble, contacts = Ensemble(start, potential, temperature, seeds, friction), Contacts(start)
    steps = round(1e3 * picoseconds / time_step)
    stride, allowed = max(1, steps // SAMPLES), allowed or {}
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
                course.watch(pair, float(found[row]), allowed.get(pair, 0.0))
            if step % stride == 0:
                course.samples.append((course.time, float(total[row]), float(kelvin[row])))
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
        "blow_ups_per_ps": rate(
            [course.time for course in courses], sum(course.blew_up for course in courses)
        ),
        "departures_per_ps": rate(first, sum(bool(course.left) for course in courses)),
        "runs": [course.summary() for course in courses],
    }


def shortest(frames: Sequence[Atoms]) -> dict[str, float]:
    """Return the shortest distance of each pair of elements in all frames [Å]."""
    found: dict[str, float] = {}
    for frame in frames:
        for pair, distance in Contacts(frame)(frame.positions[None]).items():
            found[pair] = min(float(distance[0]), found.get(pair, math.inf))
    return found


def arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--models", type=Path, nargs="+", required=True, help="files that race.py --keep wrote"
    )
    parser.add_argument("--system", type=Path, required=True, help="folder with the first frame")
    parser.add_argument(
        "--training",
        type=Path,
        nargs="+",
        help="folders of frames that say how close atoms may come; the system if none",
    )
    parser.add_argument("--frame", type=int, default=0, help="of the system, where runs start")
    parser.add_argument("--temperature", type=float, required=True, help="K")
    parser.add_argument("--picoseconds", type=float, default=5.0)
    parser.add_argument("--time-step", type=float, default=0.5, help="fs")
    parser.add_argument("--friction", type=float, default=0.0, help="1/fs, of Langevin dynamics")
    parser.add_argument(
        "--hydrogen-mass", type=float, help="u; where it is heavy, time steps may be longer"
    )
    parser.add_argument(
        "--seeds", type=int, nargs="+", default=[1], help="of the momenta, a run each"
    )
    return parser.parse_args()


def main() -> None:
    """Run the dynamics of every model."""
    args = arguments()
    frames = read_system(args.system)
    start = with_masses(frames[args.frame], args.hydrogen_mass)
    training = [frame for folder in args.training or () for frame in read_system(folder)]
    allowed = {pair: CLOSER * distance for pair, distance in shortest(training or frames).items()}
    conditions = {key: getattr(args, key) for key in ("temperature", "time_step", "friction")}
    rest = {"seeds": args.seeds, "picoseconds": args.picoseconds}
    for path in args.models:
        potential = potential_of(path, start)
        courses = run_copies(start, potential, **conditions, **rest, allowed=allowed)
        about = {"model": path.stem, "system": args.system.name, "frame": args.frame, **conditions}
        about |= report(courses)
        if args.friction:  # the energy is not constant
            for run in about["runs"]:
                del run["drift"], run["fluctuation"]
        print(json.dumps(about), flush=True)


if __name__ == "__main__":
    main()
