"""How close atoms come in dynamics of the labelling method itself, at the conditions of `stability_runs.py`.

    python source/benchmarks/race/stability_reference.py --data race-data --sets alloys molecules

Needs ASE, and tblite for molecules and water. A line a run: the smallest ratio of a distance to the shortest of its
pair of elements in the training frames, until the end of each picosecond.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
from ase import units
from ase.calculators.calculator import Calculator
from ase.calculators.emt import EMT
from ase.md.verlet import VelocityVerlet
from dynamics import Contacts, shortest
from sampling import read_system
from stability_runs import CONDITIONS, HOTTER
from tosi_fumi import TosiFumi

RUNS = 3
STEPS = {"alloys": 1500, "molecules": 2000, "salt": 1500, "water": 2000}
#: tblite's methods, as in `make_molecules.py` and the example of water.
METHODS = {"molecules": "GFN2-xTB", "water": "GFN1-xTB"}


def labeller(name: str) -> Calculator:
    """Return the method that labelled a set."""
    if name == "alloys":
        return EMT()
    if name == "salt":
        return TosiFumi()
    from tblite.ase import TBLite

    return TBLite(method=METHODS[name], verbosity=0)


def main() -> None:
    """Run the dynamics."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=RUNS, help="runs at each temperature")
    parser.add_argument(
        "--data", type=Path, required=True, help="holds the sets that make_*.py wrote"
    )
    parser.add_argument("--sets", nargs="+", choices=STEPS, default=["alloys", "molecules"])
    parser.add_argument(
        "--heat",
        type=float,
        nargs="+",
        default=[1.0, HOTTER],
        help="temperatures over the usual one",
    )
    parser.add_argument("--steps", type=int, help=f"of a run; default: {STEPS}")
    args = parser.parse_args()
    for name in args.sets:
        condition = CONDITIONS[name]
        known = shortest(
            [
                f
                for path in sorted((args.data / name / "train").iterdir())
                for f in read_system(path)
            ]
        )
        paths = sorted((args.data / name / condition.part).glob(condition.starts))
        starts = [frame for path in paths for frame in read_system(path)[: args.runs]]
        picosecond = round(1000.0 / condition.time_step)
        for kelvin in (heat * condition.temperature for heat in args.heat):
            for seed in range(args.runs):
                atoms = starts[seed * len(paths) % len(starts)].copy()
                if condition.masses:
                    atoms.set_masses([4.0 if symbol == "H" else None for symbol in atoms.symbols])
                draw = np.random.default_rng(seed).standard_normal((len(atoms), 3))
                momenta = draw * np.sqrt(units.kB * kelvin * atoms.get_masses())[:, None]
                atoms.set_momenta(momenta - momenta.mean(0))
                atoms.set_momenta(atoms.get_momenta() * np.sqrt(kelvin / atoms.get_temperature()))
                atoms.calc, contacts, least = labeller(name), Contacts(atoms), np.inf
                run = VelocityVerlet(atoms, condition.time_step * units.fs).irun(
                    args.steps or STEPS[name]
                )
                reached = []
                for step, _ in enumerate(run):
                    if step % 4 == 0:
                        found = contacts(atoms.positions[None]).items()
                        least = min(
                            least,
                            *(float(d[0]) / known[pair] for pair, d in found if pair in known),
                        )
                    if step and step % picosecond == 0:
                        reached.append(f"{least:.3f}")
                print(f"{name} {kelvin:g} K, run {seed}: {' '.join(reached)}", flush=True)


if __name__ == "__main__":
    main()
