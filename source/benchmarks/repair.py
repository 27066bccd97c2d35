"""Does a repair without labels make a potential right, or only quiet? Water, labels of GFN1-xTB.

    python source/benchmarks/repair.py examples/water_explore/model.ckpt.pt

The potential runs at 527 K. Structures that leave its data teach it: without labels, or with labels of GFN1-xTB
(`--labels`, as `dp explore` does). Without labels, two hinges act on them: the energy must be at least that of the
start plus 10 kT, and two atoms that are too close must push each other apart. Both fine-tune with the same steps on the
same data. At last, GFN1-xTB labels structures of the repaired potential's own dynamics.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from deepmd_muon.data import Frames, System, build_neighbors, open_systems, stack_neighbors
from deepmd_muon.dynamics import ForceField, Systems, simulate
from deepmd_muon.dynamics.systems import BOLTZMANN
from deepmd_muon.infer import Predictor
from deepmd_muon.model import EnergyModel, Structures
from deepmd_muon.stability.angles import angles_of
from deepmd_muon.stability.coverage import Coverage, coverage_of, pairs_of
from deepmd_muon.stability.snapshots import Snapshots
from deepmd_muon.stability.trajectories import starts

DATA = Path(__file__).resolve().parents[2] / "examples" / "water_xtb" / "data"
TYPES = ("O", "H")
TEMPERATURE = 527.0  # that of dp check [K]
DATA_TEMPERATURE = 350.0  # [K]
MASSES = (16.0, 4.0)  # [u]
TIME_STEP = 1.0  # [fs]
EVERY = 4  # steps between snapshots
#: A structure is bad where a distance is unknown, or below this part of the shortest in the data.
CLOSE = 0.95
#: Closer structures teach nothing.
CLOSEST = 0.45
#: How much a structure's energy rises at the temperature of the dynamics, by equipartition [eV/atom].
RISE = 0.75 * BOLTZMANN * (TEMPERATURE - DATA_TEMPERATURE)
#: Further energy of structures that the data never visited [eV].
BARRIER = 10.0 * BOLTZMANN * TEMPERATURE
#: Force that pushes a pair apart, for each part of the distance that it lacks [eV/Å].
PUSH = 20.0
#: Weights of the terms of the loss.
FORCE, ENERGY, DEPTH, PAIR = 100.0, 10.0, 50.0, 0.3
BAD_PER_STEP = 3
RATES = (1e-3, 1e-5)
LARGEST_FORCE = 30.0  # of labels that teach [eV/Å]


class Pair(NamedTuple):
    """Two atoms that are too close."""

    first: int
    second: int
    direction: np.ndarray  # from the first to the second
    lack: float  # 1 − distance/shortest of the data


@dataclass(frozen=True)
class Structure:
    """A structure of dynamics."""

    frame: Frames
    copy: int
    start_energy: float  # potential energy at the start of its copy [eV]
    closest: float  # ratio of a distance to the shortest of the data
    pairs: tuple[Pair, ...] = ()
    energy: float = np.nan  # label [eV]
    force: np.ndarray | None = None  # label (natoms, 3) [eV/Å]


@dataclass(frozen=True)
class Run:
    """Dynamics from frames of the data."""

    bad: list[Structure]
    good: list[Structure]
    blown: dict[int, float]  # time of each copy's blow-up [ps]
    departed: dict[int, float]  # time of each copy's first bad structure [ps]


def dynamics(
    predictor: Predictor,
    systems: Sequence[System],
    coverage: Coverage,
    *,
    copies: int,
    picoseconds: float,
    seed: int,
) -> Run:
    """Run copies at constant energy."""
    state = Systems.from_frames(starts(systems, copies, seed), TYPES, predictor.device, MASSES)
    state = state.heated(TEMPERATURE, torch.Generator().manual_seed(seed))
    scale = (TEMPERATURE / state.temperature).sqrt()[:, None, None]
    state = replace(state, velocity=state.velocity * scale)
    snapshots = Snapshots(coverage, angles_of(systems, coverage), predictor.device)
    run = Run([], [], {}, {})
    start_energy = None
    steps = round(1000 * picoseconds / TIME_STEP)
    for snapshot in simulate(ForceField(predictor), state, steps, TIME_STEP, every=EVERY):
        time_now = snapshot.step * TIME_STEP / 1000
        for lost in snapshot.lost:
            run.blown.setdefault(lost.copy, time_now)
        present = snapshot.systems
        frames = present.frames()
        kinetic = 1.5 * frames.natoms * BOLTZMANN * present.temperature.numpy()
        potential = snapshot.total_energy.numpy() - kinetic
        if start_energy is None:
            start_energy = potential
        compared = snapshots.compare(present, np.ones(len(present), dtype=bool))
        is_hot = present.hot(TEMPERATURE)
        for row, copy in enumerate(snapshot.copies.tolist()):
            if copy not in run.blown and is_hot[row]:
                run.blown[copy] = time_now
            if copy in run.blown:
                continue
            closest = float(compared.closest[row])
            structure = Structure(frames.rows([row]), copy, float(start_energy[copy]), closest)
            if compared.departs[row] or closest < CLOSE:
                run.departed.setdefault(copy, time_now)
                run.bad.append(structure)
            else:
                run.good.append(structure)
        if len(run.blown) == copies:
            break
    return run


def chosen(bad: Sequence[Structure], coverage: Coverage, per_copy: int) -> list[Structure]:
    """Return bad structures, evenly spaced in time, with their close pairs."""
    structures = []
    for copy in sorted({structure.copy for structure in bad}):
        usable = [one for one in bad if one.copy == copy and one.closest > CLOSEST]
        if usable:
            places = np.unique(np.linspace(0, len(usable) - 1, per_copy).astype(int))
            structures += [usable[place] for place in places]
    return [replace(one, pairs=close_pairs(one.frame, coverage)) for one in structures]


def close_pairs(frame: Frames, coverage: Coverage) -> tuple[Pair, ...]:
    """Return the pairs of a frame that are closer than `CLOSE` allows."""
    pairs = pairs_of(frame, 0, coverage.rcut)
    ratios = pairs.distance / coverage.shortest[pairs.types[pairs.i], pairs.types[pairs.j]]
    found = []
    for k in np.flatnonzero((ratios < CLOSE) & (pairs.i < pairs.j)):
        first, second = int(pairs.real[pairs.i[k]]), int(pairs.real[pairs.j[k]])
        vector = frame.coord[0, second] - frame.coord[0, first] + pairs.shift[k] @ frame.box[0]
        found.append(Pair(first, second, vector / pairs.distance[k], 1.0 - float(ratios[k])))
    return tuple(found)


def labelled(structures: Sequence[Structure]) -> list[Structure]:
    """Label structures with GFN1-xTB."""
    from ase import Atoms
    from tblite.ase import TBLite

    calculator = TBLite(method="GFN1-xTB", accuracy=0.1, verbosity=0)
    results = []
    for one in structures:
        symbols = [TYPES[kind] for kind in one.frame.atype[0]]
        atoms = Atoms(symbols, one.frame.coord[0], cell=one.frame.box[0], pbc=True)
        atoms.calc = calculator
        force = atoms.get_forces()
        results.append(replace(one, energy=atoms.get_potential_energy(), force=force))
    return results


def batch_of(model: EnergyModel, frames: Frames) -> Structures:
    """Return frames with their neighbours."""
    ntypes = len(model.type_map)
    neighbors = [
        build_neighbors(
            frames.coord[k],
            frames.cell(k),
            frames.atype[k],
            model.rcut,
            model.sel,
            model.by_type,
            ntypes,
            model.neighbors.inner,
        )
        for k in range(frames.nframes)
    ]
    return Structures.of(frames, stack_neighbors(neighbors), ntypes)


def error_loss(output: dict[str, Tensor], energy: np.ndarray, force: np.ndarray) -> Tensor:
    """Return the loss of energies and forces against labels."""
    natoms = force.shape[1]
    per_atom = (output["energy"] - torch.from_numpy(energy)) / natoms
    return (
        FORCE * (output["force"] - torch.from_numpy(force)).square().mean()
        + ENERGY * natoms * per_atom.square().mean()
    )


def hinge(output: dict[str, Tensor], structures: Sequence[Structure]) -> Tensor:
    """Return the loss of structures without labels."""
    natoms = structures[0].frame.natoms
    least = torch.tensor([one.start_energy + RISE * natoms + BARRIER for one in structures])
    depth = torch.relu(least - output["energy"]) / natoms
    loss = DEPTH * natoms * depth.square().mean()
    for row, one in enumerate(structures):
        for pair in one.pairs:
            pull = output["force"][row, pair.second] - output["force"][row, pair.first]
            push = 0.5 * (pull * torch.from_numpy(pair.direction)).sum()
            loss = loss + PAIR * torch.relu(PUSH * pair.lack - push).square()
    return loss


def fine_tune(
    model: EnergyModel,
    systems: Sequence[System],
    bad: Sequence[Structure],
    *,
    steps: int,
    seed: int,
    weight: float,
) -> None:
    """Train on the data and on bad structures: with their labels if they have some, else with hinges."""
    random = np.random.default_rng(seed)
    model.train()
    optimizer = torch.optim.Adam(model.parameters(), lr=RATES[0])
    decay = (RATES[1] / RATES[0]) ** (1 / steps)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, decay)
    for _ in range(steps):
        system = systems[random.integers(len(systems))]
        frames = system.frames([int(random.integers(system.nframes))])
        output = model(batch_of(model, frames), virial=False)
        loss = error_loss(output, frames.energy.reshape(-1), frames.force)
        some = [bad[k] for k in random.integers(len(bad), size=BAD_PER_STEP)]
        output = model(
            batch_of(model, Frames.concatenate([one.frame for one in some])), virial=False
        )
        if some[0].force is None:
            loss = loss + weight * hinge(output, some)
        else:
            energies = np.array([one.energy for one in some])
            forces = np.stack([one.force for one in some])
            loss = loss + weight * error_loss(output, energies, forces)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    model.eval()


def data_error(predictor: Predictor, systems: Sequence[System]) -> float:
    """Return the force error on frames of the data [eV/Å]."""
    squares = []
    for system in systems:
        frames = system.frames(np.arange(system.nframes))
        squares.append(((predictor.evaluate(frames).force - frames.force) ** 2).mean())
    return float(np.sqrt(np.mean(squares)))


def error_on(predictor: Predictor, structures: Sequence[Structure]) -> float:
    """Return the force error on labelled structures [eV/Å]."""
    frames = Frames.concatenate([one.frame for one in structures])
    labels = np.stack([one.force for one in structures])
    return float(np.sqrt(((predictor.evaluate(frames).force - labels) ** 2).mean()))


def main() -> None:
    """Repair a potential and print what it is worth."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path, help="checkpoint of examples/water_explore")
    parser.add_argument("--labels", action="store_true", help="label the bad structures")
    parser.add_argument("--rounds", type=int, default=3, help="0: only run the potential")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--weight", type=float, default=1.0, help="of the bad structures")
    parser.add_argument("--picoseconds", type=float, default=1.0)
    args = parser.parse_args()
    torch.set_num_threads(1)
    train, valid = (open_systems(str(DATA / part), TYPES) for part in ("train", "valid"))
    before, predictor = Predictor(args.model), Predictor(args.model)
    coverage = coverage_of(train, TYPES, float(predictor.model.rcut))
    length = args.picoseconds
    run = dynamics(predictor, train, coverage, copies=6, picoseconds=length, seed=1)
    print(
        f"before: {len(run.blown)} of 6 copies blew up, {len(run.departed)} left the data; "
        f"error {data_error(predictor, valid):.4f}",
        flush=True,
    )
    if not args.rounds:
        return
    usable = [
        one
        for one in labelled(chosen(run.bad, coverage, 6))
        if np.abs(one.force).max() < LARGEST_FORCE
    ]
    bad = list(usable) if args.labels else [replace(one, force=None) for one in usable]
    for number in range(1, args.rounds + 1):
        begun = time.monotonic()
        fine_tune(predictor.model, train, bad, steps=args.steps, seed=number, weight=args.weight)
        seconds = time.monotonic() - begun
        run = dynamics(predictor, train, coverage, copies=4, picoseconds=length, seed=9 + number)
        print(
            f"round {number} ({seconds:.0f} s): {len(run.blown)} of 4 blew up, {len(run.departed)} left the data; "
            f"error {data_error(predictor, valid):.4f}, on the first bad structures {error_on(predictor, usable):.3f} "
            f"(before {error_on(before, usable):.3f})",
            flush=True,
        )
        new = chosen(run.bad, coverage, 4)
        bad += labelled(new) if args.labels else new
    kinds = {
        "outside the data": chosen(run.bad, coverage, 4)[:12],
        "within": run.good[:: max(1, len(run.good) // 8)][:8],
    }
    for name, some in kinds.items():
        if some:
            judged = labelled(some)
            print(
                f"its own structures {name}: error {error_on(predictor, judged):.3f}, "
                f"of the first potential {error_on(before, judged):.3f}"
            )


if __name__ == "__main__":
    main()
