"""Trajectories and labels of the race's data sets, written as DeePMD systems below ``SET/{train,test,out}``.

Each condition of each part is a trajectory of its own with its own random numbers, so that no test frame stands near
a training frame in time. Positions are rounded to float32 before they are labelled: labels belong to stored numbers.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from ase import Atoms, units
from ase.calculators.calculator import Calculator
from ase.md.langevin import Langevin
from ase.stress import voigt_6_to_full_3x3_stress

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "examples"))

# examples/ is not a package: its shared module is imported by the path above
from sets import Part
from write_system import LabelledSystem, write_npy

FRICTION = 0.005  # 1/fs
CHECKSUMS = Path(__file__).resolve().parent / "checksums"


@dataclass(frozen=True)
class Trajectory:
    """One trajectory at constant temperature, from which frames are taken at equal distances.

    Attributes
    ----------
    part, name
        Where its frames go: ``part/name``.
    atoms
        Where it starts.
    temperature
        In K.
    frames
        How many are taken.
    spacing, settle
        Time steps between two frames, and before the first.
    melt
        Temperature [K] of `settle` further steps at its start; 0 for none.
    """

    part: Part
    name: str
    atoms: Atoms
    temperature: float
    frames: int
    spacing: int
    settle: int
    melt: float = 0.0


def sample(
    plan: Trajectory, calculator: Calculator, time_step: float, rng: np.random.Generator
) -> list[Atoms]:
    """Return the frames of a trajectory; the time step is in fs."""
    atoms = plan.atoms.copy()
    atoms.calc = calculator
    first = plan.melt or plan.temperature
    spread = np.sqrt(atoms.get_masses() * units.kB * first)[:, None]
    atoms.set_momenta(spread * rng.standard_normal((len(atoms), 3)))
    stages = [(plan.melt, plan.settle)] if plan.melt else []
    for kelvin, steps in [*stages, (plan.temperature, plan.settle)]:
        _dynamics(atoms, kelvin, time_step, rng).run(steps)
    dynamics = _dynamics(atoms, plan.temperature, time_step, rng)
    frames = []
    for _ in range(plan.frames):
        dynamics.run(plan.spacing)
        frames.append(atoms.copy())
    return frames


def _dynamics(
    atoms: Atoms, temperature: float, time_step: float, rng: np.random.Generator
) -> Langevin:
    friction = FRICTION / units.fs
    return Langevin(
        atoms,
        time_step * units.fs,
        temperature_K=temperature,
        friction=friction,
        fixcm=False,
        rng=rng,
    )


def labelled(
    frames: Sequence[Atoms], type_map: Sequence[str], calculator: Callable[[], Calculator]
) -> LabelledSystem:
    """Return frames with float32 positions and labels from a new calculator each; virials where there is a cell."""
    periodic = bool(frames[0].pbc.all())
    coord, energy, force, virial = [], [], [], []
    for frame in frames:
        atoms = frame.copy()
        # The centre wanders in Langevin dynamics, and float32 is finest near zero.
        atoms.positions -= atoms.positions.mean(axis=0)
        atoms.positions = atoms.positions.astype(np.float32).astype(np.float64)
        atoms.calc = calculator()
        coord.append(atoms.positions)
        energy.append(atoms.get_potential_energy())
        force.append(atoms.get_forces())
        if periodic:
            virial.append(-atoms.get_volume() * voigt_6_to_full_3x3_stress(atoms.get_stress()))
    return LabelledSystem(
        atype=np.array([type_map.index(symbol) for symbol in frames[0].get_chemical_symbols()]),
        type_map=tuple(type_map),
        coord=np.array(coord),
        box=np.array([frame.cell.array for frame in frames]) if periodic else None,
        energy=np.array(energy),
        force=np.array(force),
        virial=np.array(virial) if periodic else None,
    )


def make(
    out: Path,
    plans: Sequence[Trajectory],
    type_map: Sequence[str],
    *,
    mover: Callable[[], Calculator],
    labeller: Callable[[], Calculator],
    time_step: float,
    seed: int,
    workers: int = 1,
) -> None:
    """Sample, label and write all trajectories of a set, then its checksums.

    Trajectories of the same part and name become one system, in their order.

    Parameters
    ----------
    out
        Folder of the set.
    plans, type_map
        What is sampled, and the order of the elements.
    mover, labeller
        Make the calculator of the dynamics and that of the labels.
    time_step
        In fs.
    seed
        Of the random numbers of all trajectories, which do not depend on each other.
    workers
        Processes.
    """
    follow = partial(
        _labelled_trajectory,
        type_map=type_map,
        mover=mover,
        labeller=labeller,
        time_step=time_step,
        seed=seed,
    )
    systems: dict[str, list[LabelledSystem]] = {}
    # A thread each: a few dozen atoms give more threads nothing to do.
    with ProcessPoolExecutor(workers, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        for plan, system in zip(plans, pool.map(follow, enumerate(plans)), strict=True):
            systems.setdefault(f"{plan.part}/{plan.name}", []).append(system)
    for name, parts in systems.items():
        system = concatenated(parts)
        write_npy(out / name, system)
        print(f"{out.name}/{name}: {summary(system)}", flush=True)
    print(write_checksums(out))


def _labelled_trajectory(
    numbered: tuple[int, Trajectory],
    type_map: Sequence[str],
    mover: Callable[[], Calculator],
    labeller: Callable[[], Calculator],
    time_step: float,
    seed: int,
) -> LabelledSystem:
    number, plan = numbered
    frames = sample(plan, mover(), time_step, np.random.default_rng([seed, number]))
    return labelled(frames, type_map, labeller)


def more_training(
    plans: Sequence[Trajectory], times: int, start: Callable[[Trajectory], Atoms]
) -> list[Trajectory]:
    """Return so many further trajectories of every training condition, from the starts that `start` gives."""
    conditions = [plan for plan in plans if plan.part == "train"]
    return [replace(plan, atoms=start(plan)) for _ in range(times) for plan in conditions]


def concatenated(systems: Sequence[LabelledSystem]) -> LabelledSystem:
    """Return the frames of systems of the same atoms as one system."""
    first = systems[0]
    if any(
        other.type_map != first.type_map or not np.array_equal(other.atype, first.atype)
        for other in systems
    ):
        raise ValueError("systems of different atoms cannot be one system")
    periodic = first.box is not None
    gathered = {
        name: np.concatenate([getattr(system, name) for system in systems])
        for name in ("coord", "energy", "force", *(("box", "virial") if periodic else ()))
    }
    return replace(first, **gathered)


def summary(system: LabelledSystem) -> str:
    """Say what the frames of a system look like."""
    energy = system.energy / len(system.atype)
    return (
        f"{len(energy)} frames of {len(system.atype)} atoms, energy {energy.mean():.4f} ± {energy.std():.4f} eV/atom, "
        f"force {np.sqrt((system.force**2).mean()):.3f} eV/Å RMS, {np.abs(system.force).max():.2f} largest"
    )


def read_system(folder: Path) -> list[Atoms]:
    """Return all frames of a DeePMD npy folder."""
    types = np.loadtxt(folder / "type.raw", dtype=int).reshape(-1)
    symbols = np.array((folder / "type_map.raw").read_text().split())[types]
    coord = np.load(folder / "set.000" / "coord.npy").astype(float).reshape(-1, len(types), 3)
    if (folder / "nopbc").exists():
        return [Atoms(symbols, positions=positions) for positions in coord]
    boxes = np.load(folder / "set.000" / "box.npy").reshape(-1, 3, 3)
    return [
        Atoms(symbols, positions=x, cell=box, pbc=True) for x, box in zip(coord, boxes, strict=True)
    ]


def save(path: Path, **arrays: np.ndarray | float) -> None:
    """Save arrays under another name first, so that a file that exists is complete."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(f".{os.getpid()}.part")
    with part.open("wb") as file:
        np.savez(file, **arrays)
    part.replace(path)


def checksums(folder: Path) -> str:
    """Return the SHA-256 sums of a set's files, one line a file, as `sha256sum` writes them."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return "".join(
        f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.relative_to(folder)}\n"
        for path in files
    )


def write_checksums(folder: Path) -> str:
    """Compare a set with the committed checksums, or write them where there are none; return what was found."""
    path, found = CHECKSUMS / f"{folder.name}.sha256", checksums(folder)
    if not path.exists():
        path.parent.mkdir(exist_ok=True)
        path.write_text(found)
        return f"{folder.name}: checksums written to {path}"
    expected, present = (
        {name: digest for digest, name in (line.split("  ") for line in text.splitlines())}
        for text in (path.read_text(), found)
    )
    both = expected.keys() & present.keys()
    same = sum(expected[name] == present[name] for name in both)
    missing, others = len(expected.keys() - present.keys()), len(present.keys() - expected.keys())
    return f"{folder.name}: {same} files as published, {len(both) - same} differ, {missing} missing, {others} others"


def argument_parser(what: str) -> argparse.ArgumentParser:
    """Return the command line of a script that makes one set."""
    parser = argparse.ArgumentParser(description=what)
    parser.add_argument(
        "--out", type=Path, default=Path("race-data"), help="receives a folder for this set"
    )
    return parser


def size_parser(what: str, times: int) -> argparse.ArgumentParser:
    """Return the command line of a set that has a large variant."""
    parser = argument_parser(what)
    parser.add_argument(
        "--large",
        action="store_true",
        help=f"{times} times the training frames, as a set NAME_large",
    )
    parser.add_argument("--workers", type=int, default=1, help="processes")
    return parser
