"""Errors of water potentials along their own dynamics, by GFN1-xTB (tblite), beside the shortest distances.

    python source/benchmarks/race/along.py --models kept/water_*.pt --system race-data/water/train/350K \
        --training race-data/water/train/* --temperature 350 --picoseconds 2.5 --seed 1

NVE starts as in `dynamics.py`. Labelled are frames at equal distances in time, and some around the moment at which a
pair of elements first comes closer than training knows. One JSON line a frame.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from ase import Atoms, units
from ase.calculators.calculator import Calculator

# These scripts are not a package; they and a test import one another by this path, and the example by its own.
HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parents[2] / "examples" / "water_xtb")]

from distributions import read_system  # noqa: E402
from dynamics import CLOSER, HOTTEST, Contacts, Ensemble, Potential, potential_of, shortest  # noqa: E402
from make_data import LABEL_ACCURACY, xtb  # noqa: E402

AROUND = (-200, -100, -50, -20, 0, 20, 50, 100)  # fs from the moment at which atoms come too close


@dataclass(frozen=True)
class Moment:
    """A frame of a run.

    Attributes
    ----------
    time
        Since the start [fs].
    kelvin
        Temperature.
    positions, energy, force
        Of the potential.
    closest
        Shortest distance of each pair of elements [Å].
    """

    time: float
    kelvin: float
    positions: np.ndarray
    energy: float
    force: np.ndarray
    closest: dict[str, float]


def run(
    start: Atoms, potential: Potential, *, temperature: float, seed: int, picoseconds: float, time_step: float
) -> list[Moment]:
    """Return all frames of NVE with the first momenta of a seed, the last of them too hot where a run blows up."""
    ensemble, contacts = Ensemble(start, potential, temperature, [seed]), Contacts(start)
    moments: list[Moment] = []
    for step in range(round(1e3 * picoseconds / time_step) + 1):
        if step:
            ensemble.step(time_step * units.fs)
        kelvin = float(ensemble.kinetic()[0]) / (1.5 * units.kB * len(start))
        closest = {pair: float(found[0]) for pair, found in contacts(ensemble.positions).items()}
        now = ensemble.positions[0].copy(), float(ensemble.energies[0]), ensemble.forces[0].copy()
        moments.append(Moment(step * time_step, kelvin, *now, closest))
        if not kelvin < HOTTEST * temperature:
            break
    return moments


def chosen(moments: Sequence[Moment], allowed: Mapping[str, float], every: float) -> tuple[float | None, list[Moment]]:
    """Return when atoms first came too close [fs], and the frames to label."""
    too_close = (m.time for m in moments if any(m.closest[pair] < least for pair, least in allowed.items()))
    first = next(too_close, None)
    last = moments[-1].time
    wanted = set(np.arange(0.0, last, every))
    if first is not None:
        wanted |= {first + offset for offset in AROUND if 0 <= first + offset < last}
    return first, [m for m in moments if m.time in wanted]


def errors(moment: Moment, start: Atoms, labels: Callable[[], Calculator]) -> dict[str, Any]:
    """Return the errors [eV, eV/Å] of a frame: of the energy, RMS of force components, and of one atom's force."""
    atoms = start.copy()
    atoms.positions, atoms.calc = moment.positions, labels()
    difference = moment.force - atoms.get_forces()
    of_atoms = np.linalg.norm(difference, axis=1)
    return {
        "fs": moment.time,
        "kelvin": round(moment.kelvin, 1),
        "energy": round(moment.energy - float(atoms.get_potential_energy()), 4),
        "force": round(float(np.sqrt((difference**2).mean())), 4),
        "force_of_median_atom": round(float(np.median(of_atoms)), 4),
        "force_of_worst_atom": round(float(of_atoms.max()), 4),
        "closest": {pair: round(distance, 3) for pair, distance in moment.closest.items()},
    }


def main() -> None:
    """Run and label each model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=Path, nargs="+", required=True, help="files that race.py --keep wrote")
    parser.add_argument("--system", type=Path, required=True, help="folder with the first frame")
    parser.add_argument("--training", type=Path, nargs="+", required=True, help="folders of training frames")
    parser.add_argument("--temperature", type=float, required=True, help="K")
    parser.add_argument("--picoseconds", type=float, default=2.5)
    parser.add_argument("--time-step", type=float, default=0.5, help="fs")
    parser.add_argument("--seed", type=int, default=1, help="of the momenta")
    parser.add_argument("--every", type=float, default=250.0, help="fs between labels")
    args = parser.parse_args()
    start = read_system(args.system)[0]
    training = [frame for folder in args.training for frame in read_system(folder)]
    allowed = {pair: CLOSER * distance for pair, distance in shortest(training).items()}
    conditions = {key: getattr(args, key) for key in ("temperature", "seed", "picoseconds", "time_step")}
    for path in args.models:
        moments = run(start, potential_of(path, start), **conditions)
        first, frames = chosen(moments, allowed, args.every)
        about = {"model": path.stem, **conditions, "too_close_fs": first, "last_fs": moments[-1].time}
        for moment in frames:
            print(json.dumps({**about, **errors(moment, start, lambda: xtb(LABEL_ACCURACY))}), flush=True)


if __name__ == "__main__":
    main()
