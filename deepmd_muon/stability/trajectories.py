"""Short dynamics at constant energy from frames of the data: blow-ups, drift, and the first departure from them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from deepmd_muon.data import Frames, System
from deepmd_muon.data.errors import NeighborError
from deepmd_muon.dynamics.forces import ForceField
from deepmd_muon.dynamics.integrators import Snapshot, simulate
from deepmd_muon.dynamics.systems import BOLTZMANN, HOT, Systems
from deepmd_muon.stability.angles import Angles
from deepmd_muon.stability.coverage import Coverage, pairs_of, sampled
from deepmd_muon.stability.snapshots import Snapshots

# Displacement [Å] of the finite difference, and directions a frame, for the mean curvature.
_DISPLACEMENT, _DIRECTIONS = 0.01, 2


@dataclass(frozen=True)
class BlowUp:
    """The end of a copy: when [ps], which atom of which element, and why."""

    copy: int
    time: float
    atom: int
    element: str
    reason: str


@dataclass(frozen=True)
class Departure:
    """The first distance of a copy that its data do not hold: when [ps], which atoms, how far [Å]."""

    copy: int
    time: float
    pair: str
    atoms: tuple[int, int]
    distance: float
    shortest: float


@dataclass
class Trajectories:
    """The results of the dynamics."""

    temperature: float  # of the velocities at the start [K]
    time_step: float  # [fs]
    steps: int
    copies: int  # number of structures
    # At most one of each a copy.
    blow_ups: list[BlowUp] = field(default_factory=list)
    departures: list[Departure] = field(default_factory=list)
    # Shortest distance of each pair of types over copies that had not blown up `(ntypes, ntypes)` [Å].
    reached: np.ndarray = field(default_factory=lambda: np.zeros(0))
    # Extremes of the angles between near neighbours over the same copies; None before the dynamics.
    angles: Angles | None = None
    times: list[float] = field(default_factory=list)  # of the snapshots [ps]
    # Of each snapshot and copy, NaN after a copy's end.
    heat: list[np.ndarray] = field(default_factory=list)  # temperature [K]
    energy: list[np.ndarray] = field(
        default_factory=list
    )  # total energy less that at the start [eV/atom]
    closeness: list[np.ndarray] = field(
        default_factory=list
    )  # smallest distance over the shortest of its pair in data
    last: Frames | None = (
        None  # structures at the end of the copies that did not blow up; None without one
    )

    @property
    def followed(self) -> float:
        """Time over all copies until each ended [ps]."""
        ended = {blow_up.copy: blow_up.time for blow_up in self.blow_ups}
        last = self.times[-1] if self.times else 0.0
        return float(sum(ended.get(copy, last) for copy in range(self.copies)))

    @property
    def drift(self) -> float:
        """Largest change of the total energy of a copy that did not blow up [eV/atom]; NaN when all did."""
        gone = [blow_up.copy for blow_up in self.blow_ups]
        kept = np.delete(np.array(self.energy), gone, axis=1)
        # The mean of the last fifth: the energy of velocity Verlet fluctuates.
        return (
            float(np.abs(kept[-max(1, len(kept) // 5) :].mean(0)).max(initial=0.0))
            if kept.size
            else float("nan")
        )


def starts(systems: Sequence[System], copies: int, seed: int) -> Frames:
    """Return frames of the data to start from, without labels, in random order; some twice if there are too few."""
    mean = sum(system.natoms for system in systems) / len(systems)
    frames = [
        Frames(frame.atype, frame.coord, frame.box)
        for _, _, frame in sampled(systems, int(4 * copies * mean))
    ]
    order = np.random.default_rng(seed).permutation(len(frames))
    return Frames.concatenate([frames[order[k % len(order)]] for k in range(copies)])


def estimate_temperature(
    force_field: ForceField, systems: Sequence[System], frames: int = 8
) -> float | None:
    """Estimate the temperature of data by their forces [K]; None where forces say nothing of it.

    The configurational temperature kT = ⟨|F|²⟩ / ⟨tr H⟩ (Rugh, Phys. Rev. Lett. 78, 772 (1997)): forces of the labels
    where there are some, and the potential's mean curvature by finite differences along random directions.
    """
    generator, type_map = torch.Generator().manual_seed(0), force_field.predictor.type_map
    natoms = max(system.natoms for system in systems)
    square = curvature = 0.0
    some = list(sampled(systems, frames * natoms))
    for _, _, frame in some[:: max(1, len(some) // frames)]:
        state = Systems.from_frames(frame, type_map, force_field.device, [1.0] * len(type_map))
        force_field.reset()
        force = frame.force
        if force is None or not np.isfinite(force).all():
            force = force_field(state.coord, state.box, state.atype).force.cpu().numpy()
        square += float((force[frame.atype >= 0] ** 2).sum())
        for _ in range(_DIRECTIONS):
            sign = 2.0 * torch.randint(0, 2, state.coord.shape, generator=generator).double() - 1.0
            sign = torch.where(state.real[..., None], sign.to(state.coord.device), 0.0)
            ahead, behind = (
                force_field(state.coord + step * sign, state.box, state.atype).force
                for step in (_DISPLACEMENT, -_DISPLACEMENT)
            )
            curvature += float(((behind - ahead) * sign).sum()) / (
                2.0 * _DISPLACEMENT * _DIRECTIONS
            )
    if not curvature > 0.0:
        return None
    kelvin = square / curvature / BOLTZMANN
    return kelvin if 20.0 <= kelvin <= 20_000.0 else None


def run_dynamics(  # noqa: PLR0913 - the conditions of one trajectory
    force_field: ForceField,
    start: Frames,
    coverage: Coverage,
    angles: Angles,
    *,
    masses: Sequence[float],
    temperature: float,
    time_step: float,
    steps: int,
    seed: int,
    every: int = 10,
) -> Trajectories:
    """Follow copies at constant energy from a temperature [K], with the masses of the types [u]."""
    generator = torch.Generator().manual_seed(seed)
    systems = Systems.from_frames(start, coverage.type_map, force_field.device, masses).heated(
        temperature, generator
    )
    # Exactly the temperature: a few atoms would start much hotter or colder.
    scale = (temperature / systems.temperature.clamp(min=1e-9)).sqrt()[:, None, None]
    systems = replace(systems, velocity=systems.velocity * scale)
    run = Trajectories(temperature, time_step, steps, len(systems))
    snapshots = Snapshots(coverage, angles, force_field.device)
    watch = _Watch(run, coverage, snapshots, systems, time_step)
    for snapshot in simulate(force_field, systems, steps, time_step, every=every):
        watch.look(snapshot)
        if len(run.blow_ups) == run.copies:
            break
    run.reached, run.angles = snapshots.reached, snapshots.angles
    return run


class _Watch:
    """Note what snapshots show."""

    def __init__(
        self,
        run: Trajectories,
        coverage: Coverage,
        snapshots: Snapshots,
        systems: Systems,
        time_step: float,
    ) -> None:
        self.run, self.coverage, self.snapshots, self.time_step = (
            run,
            coverage,
            snapshots,
            time_step,
        )
        self.types = systems.atype.cpu().numpy()
        self.atoms = systems.real.sum(1).cpu().numpy()
        self.first: np.ndarray | None = None
        self.departed: set[int] = set()
        self.gone: set[int] = set()

    def look(self, snapshot: Snapshot) -> None:
        """Add one snapshot."""
        run = self.run
        for lost in snapshot.lost:
            self._end(lost.copy, lost.step, lost.atom, lost.reason)
        rows = {name: np.full(run.copies, np.nan) for name in ("heat", "energy", "closeness")}
        copies = snapshot.copies.cpu().numpy()
        rows["heat"][copies] = snapshot.systems.temperature.cpu().numpy()
        rows["energy"][copies] = snapshot.total_energy.cpu().numpy() / self.atoms[copies]
        hot = snapshot.systems.hot(run.temperature)
        speed = snapshot.systems.velocity.square().sum(-1).argmax(1).cpu().numpy()
        for row, copy in enumerate(copies.tolist()):
            if copy not in self.gone and hot[row]:
                reason = f"{rows['heat'][copy]:.0f} K, {HOT:g} times its start or more"
                self._end(copy, snapshot.step, int(speed[row]), reason)
        frames = snapshot.systems.frames()
        left = np.array([copy not in self.gone for copy in copies.tolist()], dtype=bool)
        compared = self.snapshots.compare(snapshot.systems, left)
        rows["closeness"][copies] = compared.closest
        for row in np.flatnonzero(compared.departs).tolist():
            self._depart(frames, row, int(copies[row]), snapshot.step)
        run.last = frames.rows(np.flatnonzero(left).tolist()) if left.any() else None
        for values in rows.values():
            values[list(self.gone)] = np.nan
        self.first = rows["energy"] if self.first is None else self.first
        run.times.append(snapshot.step * self.time_step / 1000.0)
        run.heat.append(rows["heat"])
        run.energy.append(rows["energy"] - self.first)
        run.closeness.append(rows["closeness"])

    def _end(self, copy: int, step: int, atom: int, reason: str) -> None:
        if copy in self.gone:
            return
        self.gone.add(copy)
        element = self.coverage.type_map[self.types[copy, atom]]
        self.run.blow_ups.append(
            BlowUp(copy, step * self.time_step / 1000.0, atom, element, reason)
        )

    def _depart(self, frames: Frames, row: int, copy: int, step: int) -> None:
        """Note the first departure of a copy."""
        if copy in self.departed:
            return
        coverage = self.coverage
        try:
            pairs = pairs_of(frames, row, coverage.rcut)
        except NeighborError:
            return
        _, k = coverage.compare(pairs)
        if k is None:  # rounding decides
            return
        self.departed.add(copy)
        first, second = pairs.types[pairs.i[k]], pairs.types[pairs.j[k]]
        types = sorted((int(first), int(second)))
        atoms = int(pairs.real[pairs.i[k]]), int(pairs.real[pairs.j[k]])
        shortest, time = float(coverage.shortest[first, second]), step * self.time_step / 1000.0
        departure = Departure(
            copy, time, coverage.name(types), atoms, float(pairs.distance[k]), shortest
        )
        self.run.departures.append(departure)
