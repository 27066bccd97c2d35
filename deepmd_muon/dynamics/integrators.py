"""Dynamics of many structures: velocity Verlet at constant energy, BAOAB Langevin at constant temperature."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from deepmd_muon.data.errors import NeighborError
from deepmd_muon.dynamics.barostat import Barostat, is_positive
from deepmd_muon.dynamics.errors import DynamicsError
from deepmd_muon.dynamics.forces import ForceField, Forces
from deepmd_muon.dynamics.systems import ACCELERATION, BOLTZMANN, Systems

#: No atom of a sound simulation moves so far in one step [Å]; hydrogen at 1000 K moves 0.02 Å in 0.5 fs.
FARTHEST = 0.5


@dataclass(frozen=True)
class Langevin:
    """A Langevin thermostat.

    Attributes
    ----------
    temperature
        One for all, or one of each structure `(nsystems,)` [K].
    friction
        Rate at which velocities are forgotten [1/fs].
    """

    temperature: float | torch.Tensor
    friction: float = 0.01


@dataclass(frozen=True)
class Lost:
    """A structure that could not be followed further.

    Attributes
    ----------
    copy
        Its number in the structures that the run began with.
    step
        The step that failed.
    atom
        The fastest atom, or the one that a message names.
    reason
        What happened, in words.
    """

    copy: int
    step: int
    atom: int
    reason: str


@dataclass(frozen=True)
class Snapshot:
    """The structures that a run still follows, after some step.

    Attributes
    ----------
    step
        Steps done.
    copies
        Numbers `(n,)` of these structures among those that the run began with.
    systems
        Positions and velocities.
    forces
        Energy, forces and virials at these positions.
    lost
        Structures that were lost since the snapshot before.
    """

    step: int
    copies: torch.Tensor
    systems: Systems
    forces: Forces
    lost: tuple[Lost, ...]

    @property
    def total_energy(self) -> torch.Tensor:
        """Potential and kinetic energy `(n,)` [eV]."""
        return self.forces.energy + self.systems.kinetic


class _Run:
    """The structures that are still followed, and their forces."""

    def __init__(self, force_field: ForceField, systems: Systems, generator: torch.Generator) -> None:
        self.force_field = force_field
        self.systems = systems
        self.generator = generator
        self.copies = torch.arange(len(systems), device=systems.coord.device)
        self.lost: list[Lost] = []
        self.step = 0
        self.thermostat: Langevin | None = None
        self.barostat: Barostat | None = None
        self.forces = self._evaluated()

    def drop(self, gone: torch.Tensor, atoms: torch.Tensor, reason: str) -> None:
        """Stop following structures, given as a mask `(n,)`, and note atom and reason."""
        for k in torch.nonzero(gone).flatten().tolist():
            self.lost.append(Lost(int(self.copies[k]), self.step, int(atoms[k]), reason))
        self._keep(~gone)

    def _keep(self, mask: torch.Tensor) -> None:
        self.systems = self.systems.rows(mask)
        if hasattr(self, "forces") and len(self.forces.energy) == len(mask):
            found = self.forces
            self.forces = Forces(found.energy[mask], found.force[mask], found.virial[mask])
        if self.thermostat is not None and isinstance(self.thermostat.temperature, torch.Tensor):
            self.thermostat = replace(self.thermostat, temperature=self.thermostat.temperature[mask.cpu()])
        self.barostat = self.barostat and self.barostat.rows(mask)
        self.copies = self.copies[mask]
        self.force_field.reset()

    def _evaluated(self) -> Forces:
        """Return forces of all structures; drop those whose atoms coincide or whose forces are not finite."""
        while len(self.systems):
            now = self.systems
            try:
                found = self.force_field(now.coord, now.box, now.atype)
            except NeighborError as error:
                if error.frame is None:
                    raise
                gone = torch.zeros(len(now), dtype=torch.bool, device=now.coord.device)
                gone[error.frame] = True
                fastest = now.velocity.square().sum(-1).argmax(1)
                self.drop(gone, fastest, error.problem)
                continue
            bad = ~(found.force.flatten(1).isfinite().all(1) & found.energy.isfinite())
            if not bad.any():
                return found
            self.forces = found
            where = (~found.force.isfinite().all(-1)).int().argmax(1)
            self.drop(bad, where, "the potential's energy or forces are not finite")
        zero = self.systems.coord.new_zeros
        return Forces(zero(0), torch.zeros_like(self.systems.coord), zero(0, 9))

    def kick(self, time: float) -> None:
        """Change velocities by the present forces."""
        now = self.systems
        change = (ACCELERATION * time) * self.forces.force / now.mass[..., None]
        self.systems = replace(now, velocity=now.velocity + change)

    def move(self, time: float) -> None:
        """Change positions by the present velocities."""
        self.systems = replace(self.systems, coord=self.systems.coord + time * self.systems.velocity)

    def refuse_fast(self, time: float) -> None:
        """Drop structures with an atom that would move too far."""
        far = self.systems.velocity.square().sum(-1).sqrt() * time
        gone = ~(far.amax(1) <= FARTHEST)
        if gone.any():
            fastest = torch.nan_to_num(far, nan=math.inf).argmax(1)
            self.drop(gone, fastest, f"an atom would move by more than {FARTHEST:g} Å in one step")

    def thermalize(self, time: float) -> None:
        """Exact solution of friction and noise for some time [fs]."""
        assert self.thermostat is not None
        now = self.systems
        keep = math.exp(-self.thermostat.friction * time)
        kelvin = torch.as_tensor(self.thermostat.temperature, dtype=torch.float64, device=now.coord.device)
        spread = (BOLTZMANN * kelvin.reshape(-1, 1) * ACCELERATION / now.mass).sqrt()[..., None]
        noise = torch.randn(now.coord.shape, generator=self.generator, dtype=torch.float64).to(now.coord.device)
        velocity = keep * now.velocity + math.sqrt(1.0 - keep * keep) * spread * noise
        self.systems = replace(now, velocity=torch.where(now.real[..., None], velocity, 0.0))

    def snapshot(self) -> Snapshot:
        lost, self.lost = tuple(self.lost), []
        return Snapshot(self.step, self.copies, self.systems, self.forces, lost)

    def advance(self, time_step: float) -> None:
        """Do one step: kick, drift (with the thermostat in its middle), kick."""
        self.step += 1
        self.kick(0.5 * time_step)
        self.refuse_fast(time_step)
        if self.thermostat is None:
            self.move(time_step)
        else:
            self.move(0.5 * time_step)
            self.thermalize(time_step)
            self.move(0.5 * time_step)
        self.forces = self._evaluated()
        self.kick(0.5 * time_step)
        if self.barostat is not None and self.step % self.barostat.every == 0 and len(self.systems):
            self.systems = self.barostat.rescaled(self.systems, self.forces.virial, time_step, self.generator)
            self.forces = self._evaluated()


def simulate(
    force_field: ForceField,
    systems: Systems,
    steps: int,
    time_step: float,
    *,
    thermostat: Langevin | None = None,
    barostat: Barostat | None = None,
    every: int = 10,
    seed: int = 0,
) -> Iterator[Snapshot]:
    """Run dynamics of many structures side by side, and yield the start and every so many steps.

    Without a thermostat this is velocity Verlet; with one, BAOAB (Leimkuhler and Matthews, Appl. Math. Res. Express
    2013, 34), whose positions sample the temperature to second order in the step.

    A structure with an atom that moves too far in one step, with atoms at the same place or with forces that are not
    finite is dropped; the others go on. The run ends early when none is left.

    Parameters
    ----------
    force_field
        The potential.
    systems
        Structures with velocities, on the device of the potential.
    steps
        Steps to do.
    time_step
        Time step [fs].
    thermostat
        None for constant energy.
    barostat
        None for constant cells; else it needs a thermostat.
    every
        Steps between snapshots; the last step is always one.
    seed
        Of the thermostat's noise.

    Raises
    ------
    DynamicsError
        When the numbers make no sense.
    """
    if not (time_step > 0.0 and math.isfinite(time_step)) or steps < 0 or every < 1:
        raise DynamicsError(
            f"a run needs a time step above 0 fs, 0 steps or more and a snapshot every 1 step or more; found "
            f"{time_step} fs, {steps} and {every}"
        )
    if barostat is not None and (thermostat is None or not is_positive(barostat)):
        raise DynamicsError(
            "constant pressure needs a thermostat, and a relaxation time, a compressibility and an interval above 0; "
            f"found {thermostat} and {barostat}"
        )
    force_field.reset()
    run = _Run(force_field, systems, torch.Generator().manual_seed(seed))
    run.thermostat, run.barostat = thermostat, barostat
    yield run.snapshot()
    while run.step < steps and len(run.systems):
        run.advance(time_step)
        if run.step % every == 0 or run.step == steps or not len(run.systems):
            yield run.snapshot()
