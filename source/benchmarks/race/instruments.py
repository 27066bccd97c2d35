"""Do cheap measures of a potential tell which one blows up? Areas under the ROC curve of some of them.

    python source/benchmarks/race/instruments.py --data race-data --weights weights --csv instruments.csv stability.csv

`--weights` are those that `stability_runs.py` kept by `--keep`; the results are its own, or of `stability_table.py`. For
each set: the probability that a potential that blew up has a larger value than one that did not; 0.5 is chance.
"""

from __future__ import annotations

import argparse
import csv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from sets import SETS
from stability_runs import CONDITIONS, opened
from stability_table import Potential, read_results

from deepmd_muon.data import Frames, System
from deepmd_muon.dynamics.systems import BOLTZMANN
from deepmd_muon.infer.predictor import Predictor
from deepmd_muon.stability.trajectories import starts

FRAMES = 8
#: Evaluations of the climb and of the power iteration, displacement of an atom in one of the climb, and of all [Å].
CLIMB, POWER, STRIDE, SMALL = 40, 10, 0.02, 0.01


@dataclass(frozen=True)
class Forces:
    """The forces of a potential on displaced frames."""

    predictor: Predictor
    frames: Frames

    def at(self, coord: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return forces `(nframes, natoms, 3)` [eV/Å] and energies [eV]."""
        frames = Frames(self.frames.atype, coord, self.frames.box)
        predicted = self.predictor.evaluate(frames)
        return predicted.force, predicted.energy.reshape(-1)


def worst_atom(predictor: Predictor, systems: Sequence[System]) -> float:
    """Return the largest error of an atom's force on training frames [eV/Å]."""
    errors = []
    for system in systems:
        frames = system.frames(np.arange(system.nframes))
        error = predictor.evaluate(frames).force - frames.force
        errors.append(np.linalg.norm(error, axis=-1).max())
    return float(max(errors))


def curvature(forces: Forces) -> tuple[float, float]:
    """Return the largest curvature of training frames [eV/Å²], and that over the largest force [1/Å].

    It is that of the stiffest direction, by power iteration.
    """
    coord = forces.frames.coord
    start, _ = forces.at(coord)
    direction = np.random.default_rng(1).normal(size=coord.shape)
    values = np.zeros(len(coord))
    for _ in range(POWER):
        direction /= np.linalg.norm(direction, axis=(1, 2), keepdims=True)
        force, _ = forces.at(coord + SMALL * direction)
        direction = (start - force) / SMALL
        values = np.linalg.norm(direction, axis=(1, 2))
    largest = np.linalg.norm(start, axis=-1).max(1)
    return float(values.max()), float((values / largest).max())


def climb(forces: Forces, kt: float) -> tuple[float, float]:
    """Return minus the least height of a climb against the forces [kT], and the largest curvature on it [eV/Å²].

    A potential whose walls end soon is low there.
    """
    coord = forces.frames.coord.copy()
    force, first = forces.at(coord)
    stiffest, height = 0.0, np.zeros(len(coord))
    for _ in range(CLIMB):
        longest = np.linalg.norm(force, axis=-1).max(1)[:, None, None]
        step = -STRIDE * force / longest
        coord = coord + step
        before, (force, energy) = force, forces.at(coord)
        change = np.linalg.norm(force - before, axis=(1, 2)) / np.linalg.norm(step, axis=(1, 2))
        stiffest = max(stiffest, float(change.max()))
        height = np.maximum(height, (energy - first) / kt)
    return -float(height.min()), stiffest


def measured(file: Path, name: str, data: Path) -> dict[str, float]:
    """Return all measures of a potential; larger ones should blow up."""
    predictor = Predictor(file)
    systems = opened(SETS[name].systems(data / name, "train"), predictor.type_map)
    frames = starts(systems, FRAMES, 0)
    forces = Forces(predictor, Frames(frames.atype, frames.coord, frames.box))
    stiffness, relative = curvature(forces)
    low, stiffest = climb(forces, BOLTZMANN * CONDITIONS[name].temperature)
    return {
        "worst atom": worst_atom(predictor, systems),
        "curvature": stiffness,
        "curvature over force": relative,
        "low climb": low,
        "curvature of the climb": stiffest,
    }


def outcomes(potentials: Sequence[Potential]) -> dict[str, dict[str, float]]:
    """Return what is known of each potential by the name of its weights: whether it blew up, and its gain.

    The gain is the force error after a change of all weights by 1 %, over the error before.
    """
    return {
        f"{p.set}_{p.setting}_{p.steps}_{p.seed}": {"blown": float(p.blown), "gain": p.flatness}
        for p in potentials
        if p.model == "se_e2_a" and p.runs
    }


def checked(potentials: Sequence[Potential]) -> dict[str, dict[str, float]]:
    """Return how close atoms came in `dp check`, of the potentials that it checked."""
    return {
        f"{p.set}_{p.setting}_{p.steps}_{p.seed}": {
            "blown": float(p.blown),
            "close in the check": -p.check_least,
        }
        for p in potentials
        if p.model == "se_e2_a" and p.runs and p.check_least is not None
    }


def area(rows: Sequence[Mapping[str, float]], key: str) -> float:
    """Return the area under the ROC curve of a measure."""
    bad, good = (
        np.array([row[key] for row in rows if (row["blown"] > 0) is is_bad])
        for is_bad in (True, False)
    )
    if not len(bad) or not len(good):
        return float("nan")
    return float(((bad[:, None] > good) + 0.5 * (bad[:, None] == good)).mean())


def main() -> None:
    """Measure the potentials and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--weights", type=Path, required=True)
    parser.add_argument(
        "--csv", type=Path, required=True, help="file that gets all values, and keeps those it has"
    )
    parser.add_argument("results", type=Path, nargs="+")
    args = parser.parse_args()
    torch.set_num_threads(1)
    potentials, _ = read_results(args.results)
    known = outcomes(potentials)
    print_areas(by_set(known))
    print_areas(by_set(checked(potentials)))
    rows = earlier(args.csv)
    for weights in sorted(args.weights.glob("*.pt")):
        if weights.stem in known and weights.stem not in rows:
            name = weights.stem.partition("_")[0]
            rows[weights.stem] = {
                **known[weights.stem],
                **measured(weights, name, args.data),
            }
    with args.csv.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["potential", *next(iter(rows.values()))])
        for name, row in sorted(rows.items()):
            writer.writerow([name, *(f"{value:.5g}" for value in row.values())])
    print_areas(by_set(rows))


def earlier(path: Path) -> dict[str, dict[str, float]]:
    """Return the rows of a file that another run wrote; none without a file."""
    if not path.exists():
        return {}
    with path.open(newline="") as file:
        return {
            row.pop("potential"): {key: float(value) for key, value in row.items()}
            for row in csv.DictReader(file)
        }


def by_set(rows: Mapping[str, dict[str, float]]) -> dict[str, list[dict[str, float]]]:
    """Return the rows of potentials by their sets."""
    sets: dict[str, list[dict[str, float]]] = {}
    for name, row in rows.items():
        sets.setdefault(name.partition("_")[0], []).append(row)
    return sets


def print_areas(sets: Mapping[str, Sequence[Mapping[str, float]]]) -> None:
    """Print the areas of all measures, as Markdown."""
    if not sets:
        return
    keys = [key for key in next(iter(sets.values()))[0] if key != "blown"]
    print("| set | potentials | blow up | " + " | ".join(keys) + " |")
    print("|" + "---|" * (3 + len(keys)))
    for name, rows in sets.items():
        bad = sum(row["blown"] > 0 for row in rows)
        areas = " | ".join(f"{area(rows, key):.2f}" for key in keys)
        print(f"| {name} | {len(rows)} | {bad} | {areas} |")
    print(flush=True)


if __name__ == "__main__":
    main()
