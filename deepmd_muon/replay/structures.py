"""Structures that a potential visits in dynamics, with energies and forces of this potential.

Walkers start from structures at hand, strained at random if periodic. Each follows Langevin
dynamics at one of several temperatures and gives four structures, equally far apart in time. If the
potential is unsound there, a walker blows up and gives no structures from then on.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from deepmd_muon.data import Frames, System
from deepmd_muon.data.stores.memory import MemoryStore
from deepmd_muon.dynamics.forces import ForceField
from deepmd_muon.dynamics.integrators import Langevin, Snapshot, simulate
from deepmd_muon.dynamics.systems import Systems, usual_time_step
from deepmd_muon.infer.predictor import Predictor

log = logging.getLogger(__name__)

STRUCTURES_PER_WALKER = 4
FRICTION = 0.02  # 1/fs: a walker reaches its temperature within 50 fs
# Atoms of one force call, which bound its memory.
_ATOMS_PER_CALL = 1 << 14


class ReplayError(ValueError):
    """Fine-tuning with replay cannot begin."""


def choose_starts(systems: Sequence[System], count: int, seed: int) -> Frames:
    """Return frames of systems in random order, without labels.

    Some frames come twice if there are fewer than `count`.
    """
    rng = np.random.default_rng(seed)
    nframes = np.array([system.nframes for system in systems])
    numbers = rng.choice(nframes.sum(), count, replace=count > nframes.sum())
    ends = np.cumsum(nframes)
    starts = []
    for number in numbers.tolist():
        k = int(np.searchsorted(ends, number, side="right"))
        frame = systems[k].frames([number - int(ends[k] - nframes[k])])
        starts.append(Frames(frame.atype, frame.coord, frame.box))
    return Frames.concatenate(starts)


def strained(frames: Frames, strain: float, seed: int) -> Frames:
    """Return frames whose cells and positions have been strained at random.

    `strain` is the standard deviation of each component of the symmetric strain. Frames without a
    cell are not changed.
    """
    if frames.box is None:
        return frames
    noise = np.random.default_rng(seed).standard_normal((frames.nframes, 3, 3)) * strain
    deformation = np.eye(3) + 0.5 * (noise + noise.transpose(0, 2, 1))  # (nframes, 3, 3)
    deformation[~frames.box.any(axis=(1, 2))] = np.eye(3)
    return replace(frames, coord=frames.coord @ deformation, box=frames.box @ deformation)


def draw(
    predictor: Predictor,
    starts: Frames,
    *,
    temperatures: Sequence[float],
    steps: int,
    strain: float,
    seed: int,
) -> list[Frames]:
    """Return structures with energies, forces and virials of a potential, each a `Frames` of one.

    A walker starts from each frame of `starts`, strained at random, and takes `steps` of dynamics.
    Walkers take the temperatures [K] in turn.

    Raises
    ------
    ReplayError
        When more than half of the walkers leave their temperatures: the potential describes no
        such structures.
    """
    elements = {predictor.type_map[k] for k in np.unique(starts.atype) if k >= 0}
    time_step = usual_time_step(elements)
    walkers = strained(starts, strain, seed)
    turns = np.arange(starts.nframes) % len(temperatures)
    kelvin = np.array(temperatures, dtype=float)[turns]  # (nframes,)
    batch_size = max(1, _ATOMS_PER_CALL // starts.natoms)
    structures: list[Frames] = []
    n_unsound = 0
    for begin in range(0, starts.nframes, batch_size):
        rows = slice(begin, begin + batch_size)
        temperature = torch.as_tensor(kelvin[rows])
        systems = Systems.from_frames(walkers.rows(rows), predictor.type_map, predictor.device)
        generator = torch.Generator().manual_seed(seed + begin)
        unsound: set[int] = set()
        for snapshot in simulate(
            ForceField(predictor),
            systems.heated(temperature, generator),
            steps,
            time_step,
            thermostat=Langevin(temperature, FRICTION),
            every=-(-steps // STRUCTURES_PER_WALKER),
            seed=seed + begin,
        ):
            unsound |= {lost.copy for lost in snapshot.lost}
            if snapshot.step:  # the start is not drawn by the potential
                structures += _sound_structures(snapshot, temperature, unsound)
        n_unsound += len(unsound)
    if 2 * n_unsound > starts.nframes:
        raise ReplayError(
            f"{n_unsound} of {starts.nframes} structures of the training data blow up in dynamics "
            "of the checkpoint, so that it cannot label structures like them: replay data that it "
            "was trained on (--replay DATA)"
        )
    if n_unsound:
        log.warning(
            "%d of %d dynamics of the checkpoint blew up; what came before is kept",
            n_unsound,
            starts.nframes,
        )
    return structures


def _sound_structures(
    snapshot: Snapshot, temperature: Tensor, unsound: set[int]
) -> Iterator[Frames]:
    """Yield the structures of walkers that have not blown up; add the others to `unsound`."""
    frames = snapshot.systems.frames()
    energy = snapshot.forces.energy.detach().cpu().numpy()  # (nsystems,)
    force = snapshot.forces.force.detach().cpu().numpy()  # (nsystems, natoms, 3)
    # At 0 K every walker would count as too hot.
    hot = snapshot.systems.hot(temperature[snapshot.copies.cpu()].clamp(min=1.0))
    for row, walker in enumerate(snapshot.copies.tolist()):
        if walker in unsound or hot[row]:
            unsound.add(walker)
            continue
        real = frames.atype[row] >= 0  # not padding
        cell = frames.cell(row)
        virial = None
        if cell is not None:
            virial = snapshot.forces.virial[row : row + 1].detach().cpu().numpy()
        yield Frames(
            atype=frames.atype[row][real][None],
            coord=frames.coord[row][real][None],
            box=None if cell is None else cell[None],
            energy=energy[row : row + 1],
            force=force[row][real][None],
            virial=virial,
        )


def as_systems(frames: Sequence[Frames], type_map: Sequence[str], name: str) -> list[System]:
    """Gather single frames into systems: one for each order of atoms, with a cell or without."""
    groups: dict[tuple[bytes, bool], list[Frames]] = {}
    for frame in frames:
        groups.setdefault((frame.atype.tobytes(), frame.box is not None), []).append(frame)
    systems = []
    for (_, periodic), members in groups.items():
        joined = Frames.concatenate(members)
        labels = ["coord", "box", "energy", "force", "virial"]
        if not periodic:
            labels = ["coord", "energy", "force"]
        arrays = {}
        for label in labels:
            array = np.asarray(getattr(joined, label))
            arrays[label] = array.reshape(joined.nframes, -1)
        symbols = [type_map[k] for k in joined.atype[0]]
        store = MemoryStore(name, symbols, [arrays], pbc=periodic)
        systems.append(System(store, type_map))
    return systems
