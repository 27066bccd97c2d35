"""Short dynamics at constant energy from frames of the data.

They show blow-ups, the drift of the energy, and the first departure of each copy from the data.
"""

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
from deepmd_muon.progress import tracked
from deepmd_muon.stability.angles import Angles
from deepmd_muon.stability.coverage import Coverage, pairs_of, sampled
from deepmd_muon.stability.snapshots import Snapshots

# For the mean curvature: displacement of the finite difference [Å], and directions of each frame.
_DISPLACEMENT = 0.01
_DIRECTIONS = 2
_TEMPERATURE_FRAMES = 8  # frames that a temperature is estimated from
_STEPS_PER_SNAPSHOT = 10
# Temperatures outside this range are not estimates of a temperature [K].
_COLDEST = 20.0
_HOTTEST = 20_000.0


@dataclass(frozen=True)
class BlowUp:
    """The end of a copy."""

    copy: int
    time: float  # [ps]
    atom: int
    element: str
    reason: str


@dataclass(frozen=True)
class Departure:
    """The first distance of a copy that its data do not hold."""

    copy: int
    time: float  # [ps]
    pair: str
    atoms: tuple[int, int]
    distance: float  # [Å]
    shortest: float  # of the pair in the data [Å]


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
    # (ntypes, ntypes): shortest distance of each pair over copies that had not blown up [Å].
    reached: np.ndarray = field(default_factory=lambda: np.zeros(0))
    # Extremes of the angles between near neighbours over the same copies; None before the dynamics.
    angles: Angles | None = None
    times: list[float] = field(default_factory=list)  # of the snapshots [ps]
    # Of each snapshot, (copies,), NaN after a copy's end: temperature [K],
    heat: list[np.ndarray] = field(default_factory=list)
    # total energy less that at the start [eV/atom],
    energy: list[np.ndarray] = field(default_factory=list)
    # and the smallest ratio of a distance to the shortest of its pair in the data.
    closeness: list[np.ndarray] = field(default_factory=list)
    # Structures at the end of the copies that did not blow up; None if all did.
    last: Frames | None = None

    @property
    def followed(self) -> float:
        """Time over all copies until each ended [ps]."""
        ends = {blow_up.copy: blow_up.time for blow_up in self.blow_ups}
        last = self.times[-1] if self.times else 0.0
        return float(sum(ends.get(copy, last) for copy in range(self.copies)))

    @property
    def drift(self) -> float:
        """Largest change of the total energy of a copy that did not blow up [eV/atom].

        NaN if all copies blew up.
        """
        ended = [blow_up.copy for blow_up in self.blow_ups]
        energy = np.delete(np.array(self.energy), ended, axis=1)  # (snapshots, copies)
        if not energy.size:
            return float("nan")
        # The mean of the last fifth: the energy of velocity Verlet fluctuates.
        final = energy[-max(1, len(energy) // 5) :].mean(0)
        return float(np.abs(final).max(initial=0.0))


def starts(systems: Sequence[System], copies: int, seed: int) -> Frames:
    """Return frames of the data to start from, without labels, in random order.

    Some occur twice if there are too few.
    """
    mean_atoms = sum(system.natoms for system in systems) / len(systems)
    frames = [
        Frames(frame.atype, frame.coord, frame.box)
        for _, _, frame in sampled(systems, int(4 * copies * mean_atoms))
    ]
    order = np.random.default_rng(seed).permutation(len(frames))
    return Frames.concatenate([frames[order[k % len(order)]] for k in range(copies)])


def estimate_temperature(force_field: ForceField, systems: Sequence[System]) -> float | None:
    """Estimate the temperature of data by their forces [K]; None if the forces tell none.

    The configurational temperature is kT = ⟨|F|²⟩ / ⟨tr H⟩ (Rugh, Phys. Rev. Lett. 78, 772
    (1997)). F are the forces of the labels, or of the potential for frames without. The trace of
    the Hessian H is that of the potential, by finite differences along random directions.
    """
    type_map = force_field.predictor.type_map
    generator = torch.Generator().manual_seed(0)
    max_atoms = max(system.natoms for system in systems)
    candidates = list(sampled(systems, _TEMPERATURE_FRAMES * max_atoms))
    square = 0.0
    curvature = 0.0
    for _, _, frame in candidates[:: max(1, len(candidates) // _TEMPERATURE_FRAMES)]:
        state = Systems.from_frames(
            frame, type_map, force_field.device, masses=[1.0] * len(type_map)
        )
        force_field.reset()
        force = frame.force
        if force is None or not np.isfinite(force).all():
            force = force_field(state.coord, state.box, state.atype).force.cpu().numpy()
        square += float((force[frame.atype >= 0] ** 2).sum())
        for _ in range(_DIRECTIONS):
            sign = 2.0 * torch.randint(0, 2, state.coord.shape, generator=generator).double() - 1.0
            sign = torch.where(state.real[..., None], sign.to(state.coord.device), 0.0)
            displacement = _DISPLACEMENT * sign
            ahead = force_field(state.coord + displacement, state.box, state.atype).force
            behind = force_field(state.coord - displacement, state.box, state.atype).force
            change = float(((behind - ahead) * sign).sum())
            curvature += change / (2.0 * _DISPLACEMENT * _DIRECTIONS)
    if not curvature > 0.0:
        return None
    kelvin = square / curvature / BOLTZMANN
    return kelvin if _COLDEST <= kelvin <= _HOTTEST else None


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
) -> Trajectories:
    """Follow copies at constant energy from a temperature [K], with the masses of the types [u]."""
    systems = Systems.from_frames(start, coverage.type_map, force_field.device, masses)
    systems = systems.heated(temperature, torch.Generator().manual_seed(seed))
    # Exactly the temperature: a few atoms would start much hotter or colder.
    scale = (temperature / systems.temperature.clamp(min=1e-9)).sqrt()[:, None, None]
    systems = replace(systems, velocity=systems.velocity * scale)
    run = Trajectories(
        temperature=temperature, time_step=time_step, steps=steps, copies=len(systems)
    )
    snapshots = Snapshots(coverage, angles, force_field.device)
    watch = _Watch(run, coverage, snapshots, systems)
    snapshots_of_run = simulate(force_field, systems, steps, time_step, every=_STEPS_PER_SNAPSHOT)
    what = f"dynamics at {temperature:.0f} K"
    for snapshot in tracked(snapshots_of_run, what, total=steps // _STEPS_PER_SNAPSHOT + 1):
        watch.add(snapshot)
        if len(run.blow_ups) == run.copies:
            break
    run.reached = snapshots.reached
    run.angles = snapshots.angles
    return run


class _Watch:
    """Notes in a run what its snapshots show."""

    def __init__(
        self, run: Trajectories, coverage: Coverage, snapshots: Snapshots, systems: Systems
    ) -> None:
        self._run = run
        self._coverage = coverage
        self._snapshots = snapshots
        self._types = systems.atype.cpu().numpy()
        self._natoms = systems.real.sum(1).cpu().numpy()  # (copies,)
        self._energy_at_start: np.ndarray | None = None
        self._departed: set[int] = set()
        self._ended: set[int] = set()

    def add(self, snapshot: Snapshot) -> None:
        """Add one snapshot."""
        run = self._run
        for lost in snapshot.lost:
            self._end(copy=lost.copy, step=lost.step, atom=lost.atom, reason=lost.reason)
        copies = snapshot.copies.cpu().numpy()
        heat = np.full(run.copies, np.nan)
        heat[copies] = snapshot.systems.temperature.cpu().numpy()
        energy = np.full(run.copies, np.nan)
        energy[copies] = snapshot.total_energy.cpu().numpy() / self._natoms[copies]

        is_hot = snapshot.systems.hot(run.temperature)
        fastest = snapshot.systems.velocity.square().sum(-1).argmax(1).cpu().numpy()
        for row, copy in enumerate(copies.tolist()):
            if copy not in self._ended and is_hot[row]:
                reason = f"{heat[copy]:.0f} K, {HOT:g} times its start or more"
                self._end(copy=copy, step=snapshot.step, atom=int(fastest[row]), reason=reason)

        runs_on = np.array([copy not in self._ended for copy in copies.tolist()], dtype=bool)
        compared = self._snapshots.compare(snapshot.systems, runs_on)
        closeness = np.full(run.copies, np.nan)
        closeness[copies] = compared.closest
        frames = snapshot.systems.frames()
        for row in np.flatnonzero(compared.departs).tolist():
            self._depart(frames, row, int(copies[row]), snapshot.step)
        run.last = frames.rows(np.flatnonzero(runs_on).tolist()) if runs_on.any() else None

        for values in (heat, energy, closeness):
            values[list(self._ended)] = np.nan
        if self._energy_at_start is None:
            self._energy_at_start = energy
        run.times.append(self._picoseconds(snapshot.step))
        run.heat.append(heat)
        run.energy.append(energy - self._energy_at_start)
        run.closeness.append(closeness)

    def _picoseconds(self, step: int) -> float:
        return step * self._run.time_step / 1000.0

    def _end(self, *, copy: int, step: int, atom: int, reason: str) -> None:
        """Note the end of a copy, unless it has ended before."""
        if copy in self._ended:
            return
        self._ended.add(copy)
        self._run.blow_ups.append(
            BlowUp(
                copy=copy,
                time=self._picoseconds(step),
                atom=atom,
                element=self._coverage.type_map[self._types[copy, atom]],
                reason=reason,
            )
        )

    def _depart(self, frames: Frames, row: int, copy: int, step: int) -> None:
        """Note the first departure of a copy."""
        if copy in self._departed:
            return
        coverage = self._coverage
        try:
            pairs = pairs_of(frames, row, coverage.rcut)
        except NeighborError:
            return
        _, k = coverage.compare(pairs)
        if k is None:
            return  # by rounding, the device placed the distance in another bin
        self._departed.add(copy)
        i = pairs.i[k]
        j = pairs.j[k]
        types = sorted((int(pairs.types[i]), int(pairs.types[j])))
        self._run.departures.append(
            Departure(
                copy=copy,
                time=self._picoseconds(step),
                pair=coverage.name(types),
                atoms=(int(pairs.real[i]), int(pairs.real[j])),
                distance=float(pairs.distance[k]),
                shortest=float(coverage.shortest[types[0], types[1]]),
            )
        )
