"""Dynamics of many structures: velocity Verlet at constant energy, BAOAB Langevin at constant temperature."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch

from deepmd_muon.data.errors import NeighborError
from deepmd_muon.dynamics.barostat import Barostat
from deepmd_muon.dynamics.forces import ForceField, Forces
from deepmd_muon.dynamics.stretch import Stretch
from deepmd_muon.dynamics.systems import ACCELERATION, BOLTZMANN, DynamicsError, Systems

#: Bound on the motion of an atom in one step [Å]; for comparison, hydrogen at 1000 K moves 0.02 Å in 0.5 fs.
FARTHEST = 0.5
# Largest number of steps that the device takes before the host checks them, and largest size of their noise [bytes].
_MOST_STEPS, _NOISE_BYTES = 32, 1 << 26


@dataclass(frozen=True)
class Langevin:
    """A Langevin thermostat.

    Attributes
    ----------
    temperature
        One for all, or one per structure `(nsystems,)` [K].
    friction
        Decay rate of velocities [1/fs].
    """

    temperature: float | torch.Tensor
    friction: float = 0.01


Settings = TypeVar("Settings", Langevin, Barostat)


@dataclass(frozen=True)
class Lost:
    """A structure that the run dropped."""

    copy: int  # its number among the initial structures
    step: int  # the step that failed
    atom: int  # the fastest atom, or the first with a force that is not finite
    reason: str  # a phrase for messages


@dataclass(frozen=True)
class Snapshot:
    """The structures that are left in a run after some step.

    Attributes
    ----------
    step
        Number of steps done.
    copies
        Numbers `(n,)` of these structures among the initial ones.
    systems
        Positions and velocities.
    forces
        Energy, forces and virials at these positions.
    lost
        Structures dropped since the previous snapshot.
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
    """The structures that are left in a run, and their forces."""

    def __init__(
        self,
        force_field: ForceField,
        systems: Systems,
        thermostat: Langevin | None,
        barostat: Barostat | None,
        generator: torch.Generator,
    ) -> None:
        self.force_field = force_field
        self.systems = systems
        self.thermostat = thermostat  # with one value per structure, like the barostat
        self.barostat = barostat
        self.generator = generator
        self.copies = torch.arange(len(systems), device=systems.coord.device)
        self.lost: list[Lost] = []
        self.step = 0
        self.noise: list[torch.Tensor] = []  # drawn in advance; each step takes the first
        self._stretch: _DeviceSteps | None = None
        self._recorded = 0
        self.forces = self._evaluated()

    def drop(self, gone: torch.Tensor, atoms: torch.Tensor, reason: str) -> None:
        """Drop structures, given as a mask `(n,)`, and record atom and reason."""
        for k in torch.nonzero(gone).flatten().tolist():
            self.lost.append(Lost(int(self.copies[k]), self.step, int(atoms[k]), reason))
        self._keep(~gone)

    def _keep(self, mask: torch.Tensor) -> None:
        self.systems = self.systems.rows(mask)
        if hasattr(self, "forces") and len(self.forces.energy) == len(mask):
            self.forces = Forces(*(x[mask] for x in self.forces.tensors))
        self.thermostat = self.thermostat and _rows(self.thermostat, mask)
        self.barostat = self.barostat and _rows(self.barostat, mask)
        self.copies = self.copies[mask]
        self.noise = [noise[mask] for noise in self.noise]
        self._stretch = None
        self.force_field.reset()

    def _evaluated(self) -> Forces:
        """Return the forces; drop structures with coinciding atoms, or with forces or energies that are not finite."""
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
        self.systems = replace(
            self.systems, coord=self.systems.coord + time * self.systems.velocity
        )

    def refuse_fast(self, time: float) -> None:
        """Drop structures in which an atom would move by more than `FARTHEST`."""
        far = self.systems.velocity.square().sum(-1).sqrt() * time
        gone = ~(far.amax(1) <= FARTHEST)
        if gone.any():
            fastest = torch.nan_to_num(far, nan=math.inf).argmax(1)
            self.drop(gone, fastest, f"an atom would move by more than {FARTHEST:g} Å in one step")

    def thermalize(self, time: float) -> None:
        """Apply friction and noise for some time [fs] by their exact solution."""
        assert self.thermostat is not None
        now = self.systems
        noise = self.noise.pop(0) if self.noise else self.draw(1)[0]
        self.systems = replace(
            now, velocity=thermalized(now, self.thermostat, time, now.velocity, noise)
        )

    def draw(self, steps: int) -> torch.Tensor:
        """Return the noise of some steps `(steps, nsystems, natoms, 3)`."""
        shape, source = self.systems.coord.shape, self.generator
        # Step by step, so that the numbers do not depend on how many steps are drawn together.
        noise = [
            torch.randn(shape, generator=source, dtype=torch.float64, device=source.device)
            for _ in range(steps)
        ]
        return torch.stack(noise).to(self.systems.coord.device)

    def go(self, steps: int, time_step: float) -> None:
        """Do at least one and at most `steps` steps, on the device alone if possible."""
        force_field = self.force_field
        if not force_field.launchable(self.systems.box, self.systems.atype):
            self.advance(time_step)
            return
        if self.barostat is not None:
            steps = min(steps, self.barostat.every - self.step % self.barostat.every)
        if self._stretch is None or self._recorded != force_field.version:
            self._stretch = _DeviceSteps(self, time_step)
        steps = min(steps, self._stretch.max_steps)
        done = self._stretch(self, steps)
        self._recorded = force_field.version
        if done == steps:
            self._scale_cells(time_step)
        else:
            self.advance(time_step)

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
        self._scale_cells(time_step)

    def _scale_cells(self, time_step: float) -> None:
        if self.barostat is not None and self.step % self.barostat.every == 0 and len(self.systems):
            self.systems = self.barostat.rescaled(
                self.systems, self.forces.virial, time_step, self.generator
            )
            self.forces = self._evaluated()


def _rows(settings: Settings, mask: torch.Tensor) -> Settings:
    """Return a thermostat or barostat with the values of some structures."""
    tensors: dict[str, Any] = {
        name: x[mask] for name, x in vars(settings).items() if isinstance(x, torch.Tensor)
    }
    return replace(settings, **tensors)


def thermalized(
    systems: Systems, thermostat: Langevin, time: float, velocity: torch.Tensor, noise: torch.Tensor
) -> torch.Tensor:
    """Return velocities after friction and noise for some time [fs], by the exact solution."""
    keep = math.exp(-thermostat.friction * time)
    kelvin = systems.of_each(thermostat.temperature, "temperature")[:, None]
    spread = (BOLTZMANN * kelvin * ACCELERATION / systems.mass).sqrt()[..., None]
    return torch.where(
        systems.real[..., None],
        keep * velocity + math.sqrt(1.0 - keep * keep) * spread * noise,
        0.0,
    )


class _DeviceSteps:
    """Steps of a run by work of the device alone, with the same arithmetic as `_Run.advance`.

    An instance is valid until the run drops structures or scales cells.
    """

    def __init__(self, run: _Run, time_step: float) -> None:
        self._force_field, self._systems, self._time = run.force_field, run.systems, time_step
        self._thermostat = run.thermostat
        self._coord, self._velocity = run.systems.coord.clone(), run.systems.velocity.clone()
        self._forces = run.forces.clone()
        self._row = torch.zeros(1, dtype=torch.int64, device=self._coord.device)
        self._valid, self._valid_steps = (
            torch.ones_like(self._row, dtype=torch.bool),
            torch.zeros_like(self._row),
        )
        each = self._coord.numel() * self._coord.element_size()
        #: Most steps of a call.
        self.max_steps = max(1, min(_MOST_STEPS, _NOISE_BYTES // max(1, each)))
        shape = (self.max_steps, *self._coord.shape) if self._thermostat is not None else (0,)
        self._noise = torch.zeros(shape, dtype=torch.float64, device=self._coord.device)
        state = (
            self._coord,
            self._velocity,
            *self._forces.tensors,
            self._row,
            self._valid,
            self._valid_steps,
        )
        self._stretch = Stretch(run.force_field, state, self._step, self._valid_steps)

    def __call__(self, run: _Run, steps: int) -> int:
        """Take `steps` steps, at most `max_steps`, or those before a structure has to be dropped; return how many."""
        self._coord.copy_(run.systems.coord)
        self._velocity.copy_(run.systems.velocity)
        self._forces.take(run.forces)
        self._row.zero_()
        self._valid.fill_(True)
        self._valid_steps.zero_()
        if self._thermostat is not None:
            while len(run.noise) < steps:
                run.noise.extend(run.draw(steps - len(run.noise)).unbind())
            torch.stack(run.noise[:steps], out=self._noise[:steps])
        if done := self._stretch(steps):
            run.noise = run.noise[done:]
            run.step += done
            run.systems = replace(
                run.systems, coord=self._coord.clone(), velocity=self._velocity.clone()
            )
            run.forces = self._forces.clone()
        return done

    def _kick(self) -> None:
        mass = self._systems.mass[..., None]
        self._velocity.addcdiv_(self._forces.force, mass, value=0.5 * self._time * ACCELERATION)

    def _step(self) -> None:
        self._kick()
        far = self._velocity.square().sum(-1).amax() * self._time**2
        self._valid.logical_and_(far <= FARTHEST**2)
        if self._thermostat is None:
            self._coord.add_(self._velocity, alpha=self._time)
        else:
            self._coord.add_(self._velocity, alpha=0.5 * self._time)
            noise = self._noise.index_select(0, self._row)[0]
            self._velocity.copy_(
                thermalized(self._systems, self._thermostat, self._time, self._velocity, noise)
            )
            self._coord.add_(self._velocity, alpha=0.5 * self._time)
            self._row.add_(1)
        found = self._force_field.launch(self._coord)
        self._forces.take(found)
        self._valid.logical_and_(found.force.isfinite().all() & found.energy.isfinite().all())
        self._valid_steps.add_(self._valid)
        self._kick()


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
    """Run dynamics of many structures at once; yield a snapshot of the start and of every `every`-th step.

    Without a thermostat this is velocity Verlet; with one, BAOAB (Leimkuhler and Matthews, Appl. Math. Res. Express
    2013, 34), whose positions sample the temperature to second order in the step.

    A structure is dropped if an atom would move by more than `FARTHEST` in one step, if atoms coincide, or if energy or
    forces are not finite. The others go on; the run ends early when none is left.

    Parameters
    ----------
    force_field
        The potential.
    systems
        Structures with velocities, on the device of the potential.
    steps
        Number of steps.
    time_step
        Time step [fs].
    thermostat
        None for constant energy.
    barostat
        None for constant cells; else it needs a thermostat.
    every
        Steps between snapshots; the last step is always one.
    seed
        Seed of the noise of thermostat and barostat.

    Raises
    ------
    DynamicsError
        When a number is out of range.
    """
    if not (time_step > 0.0 and math.isfinite(time_step)) or steps < 0 or every < 1:
        raise DynamicsError(
            f"a run needs a time step above 0 fs, 0 steps or more and a snapshot every 1 step or more; found "
            f"{time_step} fs, {steps} and {every}"
        )
    thermostat, barostat = _of_each(systems, thermostat, barostat)
    force_field.reset()
    # A GPU draws its own noise, so a seed gives the same run only on devices of one kind.
    run = _Run(
        force_field,
        systems,
        thermostat,
        barostat,
        torch.Generator(systems.coord.device).manual_seed(seed),
    )
    yield run.snapshot()
    while run.step < steps and len(run.systems):
        run.go(min(every - run.step % every, steps - run.step), time_step)
        if run.step % every == 0 or run.step == steps or not len(run.systems):
            yield run.snapshot()


def _of_each(
    systems: Systems, thermostat: Langevin | None, barostat: Barostat | None
) -> tuple[Langevin | None, Barostat | None]:
    """Return thermostat and barostat with one temperature and pressure per structure; refuse invalid numbers."""
    if barostat is not None:
        values = barostat.time, barostat.compressibility, float(barostat.every)
        if thermostat is None or not all(value > 0.0 and math.isfinite(value) for value in values):
            raise DynamicsError(
                "constant pressure needs a thermostat, and a relaxation time, a compressibility and an interval above "
                f"0; found {thermostat} and {barostat}"
            )
        pressure, kelvin = (
            systems.of_each(getattr(barostat, x), x) for x in ("pressure", "temperature")
        )
        if not pressure.isfinite().all():
            raise DynamicsError(f"a pressure is a number of GPa; found {barostat.pressure}")
        barostat = replace(barostat, pressure=pressure, temperature=kelvin)
    if thermostat is not None:
        kelvin = systems.of_each(thermostat.temperature, "temperature")
        if not ((kelvin >= 0.0) & kelvin.isfinite()).all() or not thermostat.friction >= 0.0:
            raise DynamicsError(
                f"a thermostat needs temperatures and a friction of 0 or more; found {thermostat}"
            )
        thermostat = replace(thermostat, temperature=kelvin)
    return thermostat, barostat
