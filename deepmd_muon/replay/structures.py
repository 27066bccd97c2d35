"""Structures that a potential visits itself, with its own labels.

Walkers start from structures at hand, strained at random if periodic. Each follows Langevin
dynamics on the potential at one of several temperatures. Four structures of each are kept, equally
far apart in time. Where the potential is unsound, a walker blows up; the structures it left behind
after that are not kept.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import torch

from deepmd_muon.data import Frames, System
from deepmd_muon.data.stores.memory import MemoryStore
from deepmd_muon.dynamics.forces import ForceField
from deepmd_muon.dynamics.integrators import Langevin, Snapshot, simulate
from deepmd_muon.dynamics.systems import Systems, usual_time_step
from deepmd_muon.infer.predictor import Predictor

log = logging.getLogger(__name__)

#: Structures of a walker.
KEPT = 4
FRICTION = 0.02  # 1/fs: a walker reaches its temperature within 50 fs
# Atoms that move together: memory of one force call.
_TOGETHER = 1 << 14


class ReplayError(ValueError):
    """Fine-tuning with replay cannot begin."""


def choose_starts(systems: Sequence[System], count: int, seed: int) -> Frames:
    """Return frames of systems, without labels, in random order.

    Some twice if there are too few.
    """
    rng = np.random.default_rng(seed)
    frames = np.array([system.nframes for system in systems])
    chosen = rng.choice(frames.sum(), count, replace=count > frames.sum())
    ends = np.cumsum(frames)
    parts = []
    for number in chosen.tolist():
        k = int(np.searchsorted(ends, number, side="right"))
        frame = systems[k].frames([number - int(ends[k] - frames[k])])
        parts.append(Frames(frame.atype, frame.coord, frame.box))
    return Frames.concatenate(parts)


def strained(frames: Frames, strain: float, seed: int) -> Frames:
    """Return frames whose cells and positions have been strained at random.

    Those without a cell stay as they are.

    `strain` is the standard deviation of each component of the symmetric strain.
    """
    if frames.box is None:
        return frames
    noise = np.random.default_rng(seed).standard_normal((frames.nframes, 3, 3)) * strain
    change = np.eye(3) + 0.5 * (noise + noise.transpose(0, 2, 1))
    change[~frames.box.any(axis=(1, 2))] = np.eye(3)
    return replace(frames, coord=frames.coord @ change, box=frames.box @ change)


def draw(
    predictor: Predictor,
    starts: Frames,
    *,
    temperatures: Sequence[float],
    steps: int,
    strain: float,
    seed: int,
) -> list[Frames]:
    """Return structures with energy, forces and virials of a potential, one `Frames` of a single frame each.

    A walker starts from each of the structures, strained at random, and takes `steps` of dynamics.
    The temperatures [K] are taken in turn.

    Raises
    ------
    ReplayError
        When fewer than half of the walkers keep to their temperatures: the potential describes no
        such structures.
    """
    present = {predictor.type_map[k] for k in np.unique(starts.atype) if k >= 0}
    time_step = usual_time_step(present)
    moved = strained(starts, strain, seed)
    kelvin = np.array(temperatures, dtype=float)[np.arange(starts.nframes) % len(temperatures)]
    size = max(1, _TOGETHER // starts.natoms)
    found: list[Frames] = []
    unsound = 0
    for first in range(0, starts.nframes, size):
        rows = slice(first, first + size)
        systems = Systems.from_frames(moved.rows(rows), predictor.type_map, predictor.device)
        warm = torch.as_tensor(kelvin[rows])
        systems = systems.heated(warm, torch.Generator().manual_seed(seed + first))
        gone: set[int] = set()
        for snapshot in simulate(
            ForceField(predictor),
            systems,
            steps,
            time_step,
            thermostat=Langevin(warm, FRICTION),
            every=-(-steps // KEPT),
            seed=seed + first,
        ):
            gone |= {lost.copy for lost in snapshot.lost}
            if snapshot.step:
                found += _sound(snapshot, warm, gone)
        unsound += len(gone)
    if 2 * unsound > starts.nframes:
        raise ReplayError(
            f"{unsound} of {starts.nframes} structures of the training data blow up in dynamics of "
            "the checkpoint, so that it cannot label structures like them: replay data that it "
            "was trained on (--replay DATA)"
        )
    if unsound:
        log.warning(
            "%d of %d dynamics of the checkpoint blew up; what came before is kept",
            unsound,
            starts.nframes,
        )
    return found


def _sound(snapshot: Snapshot, kelvin: torch.Tensor, gone: set[int]) -> Iterator[Frames]:
    """Yield the structures of walkers that have not blown up; note the others in `gone`."""
    frames, forces = snapshot.systems.frames(), snapshot.forces
    hot = snapshot.systems.hot(kelvin[snapshot.copies.cpu()].clamp(min=1.0))
    for row, copy in enumerate(snapshot.copies.tolist()):
        if copy in gone or hot[row]:
            gone.add(copy)
            continue
        real = frames.atype[row] >= 0
        cell = frames.cell(row)
        yield Frames(
            atype=frames.atype[row][real][None],
            coord=frames.coord[row][real][None],
            box=None if cell is None else cell[None],
            energy=forces.energy[row : row + 1].detach().cpu().numpy(),
            force=forces.force[row].detach().cpu().numpy()[real][None],
            virial=None if cell is None else forces.virial[row : row + 1].detach().cpu().numpy(),
        )


def as_systems(frames: Sequence[Frames], type_map: Sequence[str], name: str) -> list[System]:
    """Gather single frames into systems: one for each order of atoms, with a cell or without."""
    groups: dict[tuple[bytes, bool], list[Frames]] = {}
    for frame in frames:
        groups.setdefault((frame.atype.tobytes(), frame.box is not None), []).append(frame)
    systems = []
    for (_, periodic), members in groups.items():
        whole = Frames.concatenate(members)
        labels = (
            ("coord", "box", "energy", "force", "virial")
            if periodic
            else ("coord", "energy", "force")
        )
        arrays = {
            label: np.asarray(getattr(whole, label)).reshape(whole.nframes, -1) for label in labels
        }
        symbols = [type_map[k] for k in whole.atype[0]]
        systems.append(System(MemoryStore(name, symbols, [arrays], pbc=periodic), type_map))
    return systems
