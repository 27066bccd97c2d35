"""Frames that the labelling method of a set visits at a temperature: what dynamics of its potentials should find.

    python source/benchmarks/race/reference.py --set alloys --system race-data/alloys/out/Cu11Ag11Au10_liquid_2000K \
        --temperature 2000 --picoseconds 20 --time-step 4 --seeds 1 2 3 4 --out references

Langevin dynamics, by the same steps as `dynamics.py --friction`, or, where a potential is given by ``--potential``,
hybrid Monte Carlo (Duane et al., Phys. Lett. B 195, 216 (1987)): constant-energy dynamics with the potential proposes a
frame, and the energies of the labelling method accept or reject it. That is exact for any potential, and one energy
of the labelling method pays for many steps. Every seed is a file ``OUT/SET_SYSTEM_TEMPERATURE_SEED.npz``, which is
not made again where it exists. Then a JSON line says what all of them hold.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from ase import Atoms, units
from ase.calculators.calculator import Calculator

# These scripts are not a package; they and a test import one another by this path, and the example by its own.
HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parents[2] / "examples" / "water_xtb")]

from distributions import distributions, halves_apart, reach_of, read_runs, read_system, write_run  # noqa: E402
from dynamics import EQUILIBRATION, Ensemble, Potential, potential_of, run_copies, shortest, with_masses  # noqa: E402

SETTLE = 2.0  # ps of Langevin dynamics with the potential before hybrid Monte Carlo


def labelling_method(name: str) -> Callable[[], Calculator]:
    """Return what makes a calculator of a set's labelling method, with the thresholds of dynamics."""
    if name == "water":
        from make_data import XTB_ACCURACY, xtb

        return partial(xtb, XTB_ACCURACY)
    if name == "molecules":
        import make_molecules

        return partial(make_molecules.xtb, make_molecules.MOVER_ACCURACY)
    if name == "alloys":
        from ase.calculators.emt import EMT

        return EMT
    from stillinger_weber import StillingerWeber

    return StillingerWeber


def as_potential(make: Callable[[], Calculator], atoms: Atoms) -> Potential:
    """Return a calculator of ASE as a function of positions; every copy of the atoms has a calculator of its own."""
    frames: list[Atoms] = []

    def potential(positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        while len(frames) < len(positions):
            frames.append(atoms.copy())
            frames[-1].calc = make()
        for frame, x in zip(frames, positions, strict=False):
            frame.positions = x
        chosen = frames[: len(positions)]
        return np.array([x.get_potential_energy() for x in chosen]), np.array([x.get_forces() for x in chosen])

    return potential


@dataclass(frozen=True)
class Chain:
    """Frames that follow one another in hybrid Monte Carlo.

    Attributes
    ----------
    positions
        After each proposal `(nproposals, natoms, 3)` [Å].
    changes
        Of the total energy by each proposal `(nproposals,)`, by the labelling method [eV].
    accepted
        Which were `(nproposals,)`.
    """

    positions: np.ndarray
    changes: np.ndarray
    accepted: np.ndarray


def hybrid_monte_carlo(
    ensemble: Ensemble,
    energy: Callable[[np.ndarray], float],
    rng: np.random.Generator,
    *,
    temperature: float,
    steps: int,
    time_step: float,
    until: Callable[[int], bool],
) -> Chain:
    """Sample positions with the Boltzmann distribution of an energy.

    Parameters
    ----------
    ensemble
        One copy at constant energy, whose potential proposes.
    energy
        From positions `(natoms, 3)` [Å] to the energy [eV] that decides.
    rng
        Of the decisions.
    temperature
        In K.
    steps, time_step
        Of each proposal; the time step is in fs.
    until
        Whether to stop after so many proposals.
    """
    now = energy(ensemble.positions[0])
    positions, changes, accepted = [], [], []
    while not (accepted and until(len(accepted))):
        before = [x.copy() for x in (ensemble.positions, ensemble.energies, ensemble.forces)]
        ensemble.draw_velocities()
        kinetic = float(ensemble.kinetic()[0])
        for _ in range(steps):
            ensemble.step(time_step * units.fs)
        then = energy(ensemble.positions[0])
        change = then - now + float(ensemble.kinetic()[0]) - kinetic
        accept = rng.random() < math.exp(min(0.0, -change / (units.kB * temperature)))
        if accept:
            now = then
        else:
            ensemble.positions, ensemble.energies, ensemble.forces = before
        positions.append(ensemble.positions[0].copy())
        changes.append(change)
        accepted.append(accept)
    return Chain(np.array(positions), np.array(changes), np.array(accepted))


def by_monte_carlo(path: Path, seed: int, args: argparse.Namespace, frames: list[Atoms], deadline: float) -> None:
    """Write the chain of a seed, after some dynamics with the potential and without its first part."""
    start = with_masses(frames[seed % len(frames)], args.hydrogen_mass)
    potential = potential_of(args.potential, start)
    settled = Ensemble(start, potential, args.temperature, [seed], args.friction)
    for _ in range(round(1e3 * SETTLE / args.time_step)):
        settled.step(args.time_step * units.fs)
    start.positions = settled.positions[0]
    labels = as_potential(labelling_method(args.set), start)
    most = max(1, round(1e3 * args.picoseconds / (args.time_step * args.steps)))
    chain = hybrid_monte_carlo(
        Ensemble(start, potential, args.temperature, [seed + 1000]),
        lambda x: float(labels(x[None])[0][0]),
        np.random.default_rng(seed),
        temperature=args.temperature,
        steps=args.steps,
        time_step=args.time_step,
        until=lambda count: count >= most or time.time() > deadline,
    )
    first = math.floor(EQUILIBRATION * len(chain.accepted))
    found = [start.copy() for _ in chain.positions[first:]]
    for frame, x in zip(found, chain.positions[first:], strict=True):
        frame.positions = x
    write_run(path, found, changes=chain.changes[first:], accepted=chain.accepted[first:])


def by_dynamics(path: Path, seed: int, args: argparse.Namespace, frames: list[Atoms]) -> None:
    """Write frames of Langevin dynamics with the labelling method."""
    start = with_masses(frames[seed % len(frames)], args.hydrogen_mass)
    conditions = {key: getattr(args, key) for key in ("temperature", "picoseconds", "time_step", "friction", "samples")}
    (course,) = run_copies(start, as_potential(labelling_method(args.set), start), seeds=[seed], **conditions)
    if course.blew_up:
        raise RuntimeError(f"dynamics of seed {seed} blew up after {course.time} ps; take a shorter time step")
    write_run(path, course.frames)


def sample(seed: int, args: argparse.Namespace, deadline: float) -> Path:
    """Write the file of a seed unless it exists."""
    path: Path = args.out / f"{args.set}_{args.system.name}_{args.temperature:g}K_{seed}.npz"
    if path.exists():
        return path
    frames = read_system(args.system)
    if args.potential:
        by_monte_carlo(path, seed, args, frames, deadline)
    else:
        by_dynamics(path, seed, args, frames)
    return path


def summary(paths: list[Path], like: Atoms) -> dict[str, Any]:
    """Say what the files of a reference hold: distributions, how far two halves of them are apart, and acceptance."""
    runs = read_runs(paths, like)
    frames = [frame for run in runs for frame in run]
    found: dict[str, Any] = {"runs": len(runs), "frames": len(frames)}
    kept = [dict(np.load(path)) for path in paths]
    if all("accepted" in arrays for arrays in kept):
        found["accepted"] = round(float(np.mean(np.concatenate([arrays["accepted"] for arrays in kept]))), 3)
    found["closest"] = {pair: round(distance, 3) for pair, distance in shortest(frames).items()}
    found["halves_apart"] = halves_apart(runs)
    curves = distributions(frames, reach_of(frames))
    return found | {"distributions": {pair: [round(float(x), 3) for x in curve] for pair, curve in curves.items()}}


def main() -> None:
    """Sample what is missing, and print a summary of all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--set", choices=("water", "molecules", "alloys", "silicon"), required=True)
    parser.add_argument("--system", type=Path, required=True, help="folder; seed N starts from its N-th frame")
    parser.add_argument("--temperature", type=float, required=True, help="K")
    parser.add_argument("--potential", type=Path, help="a trained potential that proposes frames")
    parser.add_argument("--picoseconds", type=float, default=20.0, help="of dynamics, also of all proposals together")
    parser.add_argument("--time-step", type=float, default=1.0, help="fs")
    parser.add_argument("--steps", type=int, default=100, help="of a proposal")
    parser.add_argument("--friction", type=float, default=0.005, help="1/fs")
    parser.add_argument("--hydrogen-mass", type=float, default=4.0, help="u; positions do not depend on masses")
    parser.add_argument("--samples", type=int, default=200, help="frames of a run of dynamics, and a fifth fewer")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1])
    parser.add_argument("--seconds", type=float, default=math.inf, help="end hybrid Monte Carlo after these")
    parser.add_argument("--workers", type=int, default=1, help="processes")
    parser.add_argument("--out", type=Path, default=Path("references"))
    args = parser.parse_args()
    deadline = time.time() + args.seconds
    # A forked process would inherit torch's threads in an unknown state
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(args.workers, spawn, torch.set_num_threads, (1,)) as pool:
        paths = list(pool.map(partial(sample, args=args, deadline=deadline), args.seeds))
    about = {key: getattr(args, key) for key in ("set", "temperature", "time_step", "friction", "hydrogen_mass")}
    about |= {"system": args.system.name, "potential": args.potential and args.potential.stem}
    print(json.dumps({**about, **summary(paths, read_system(args.system)[0])}))


if __name__ == "__main__":
    main()
