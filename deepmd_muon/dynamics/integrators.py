"""Dynamics of many structures: velocity Verlet at constant energy, BAOAB with a thermostat.

`simulate` yields snapshots of a run. `_Run` holds the structures and does the steps. A step of
length Δt is

    v ← v + (Δt/2)·f/m                       kick
    x ← x + (Δt/2)·v                         drift
    v ← c·v + √(1 − c²)·√(kT/m)·ξ            thermostat, c = exp(−γ·Δt), ξ normal
    x ← x + (Δt/2)·v                         drift
    f ← force at x
    v ← v + (Δt/2)·f/m                       kick

Without a thermostat the two drifts are one. The host does one step at a time and drops structures
that fail. On a device that finds neighbours itself, up to 32 steps run without the host; see
`Stretch`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from deepmd_muon.data.errors import NeighborError
from deepmd_muon.dynamics.forces import ForceField, Forces
from deepmd_muon.dynamics.stretch import Stretch
from deepmd_muon.dynamics.systems import ACCELERATION, BOLTZMANN, DynamicsError, Systems

#: One GPa in eV/Å³ (CODATA 2018).
GIGAPASCAL = 1.0 / 160.2176634
#: Bound on the motion of an atom in one step [Å]. Hydrogen at 1000 K moves 0.02 Å in 0.5 fs.
FARTHEST = 0.5
# Bound on the relative change of a volume in one step. Far from equilibrium, the linear law would
# overshoot.
_MAX_VOLUME_CHANGE = 0.1
# Largest number of steps that the device does before the host checks them.
_MAX_STEPS = 32
# Largest size of the noise of these steps [bytes].
_MAX_NOISE_BYTES = 1 << 26


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

    temperature: float | Tensor
    friction: float = 0.01


@dataclass(frozen=True)
class Barostat:
    """Isotropic stochastic cell rescaling (Bernetti and Bussi, J. Chem. Phys. 153, 114107 (2020)).

    Attributes
    ----------
    pressure
        One for all, or one per structure `(nsystems,)` [GPa].
    temperature
        Temperature of the thermostat, in the same form [K].
    time
        Time in which the pressure relaxes [fs].
    compressibility
        Compressibility of the material [1/GPa], by default that of water. It changes the speed of
        the relaxation, not the distribution of volumes.
    every
        Steps between changes of the cell. Each change needs new neighbour lists.
    """

    pressure: float | Tensor
    temperature: float | Tensor
    time: float = 200.0
    compressibility: float = 0.45
    every: int = 10

    def rescaled(
        self, systems: Systems, virial: Tensor, time_step: float, generator: torch.Generator
    ) -> Systems:
        """Return the structures with other cells, positions and velocities.

        The change is that of `every` steps of `time_step` [fs]:

            Δε = r·(P_in − P) + √(2kT·r/V)·ξ,  r = compressibility · every · time_step / time

        with ε = ln V, the volume V, the internal pressure P_in and a normal number ξ. `virial` is
        −dE/dε `(nsystems, 9)` [eV]. Structures without a cell stay unchanged.
        """
        if systems.box is None:
            return systems
        volume = torch.linalg.det(systems.box).abs()  # (nsystems,) [Å³]
        periodic = volume > 0.0
        volume = torch.where(periodic, volume, 1.0)  # no division by zero in rows that are unused
        trace = virial.view(-1, 3, 3).diagonal(dim1=1, dim2=2).sum(1)
        inner_pressure = (2.0 * systems.kinetic + trace) / (3.0 * volume)  # [eV/Å³]
        pressure = GIGAPASCAL * systems.of_each(self.pressure, "pressure")
        kelvin = systems.of_each(self.temperature, "temperature")
        rate = self.compressibility / GIGAPASCAL / self.time * self.every * time_step
        noise = torch.randn(
            len(systems), generator=generator, dtype=torch.float64, device=generator.device
        )
        spread = (2.0 * BOLTZMANN * kelvin * rate / volume).sqrt()
        change = rate * (inner_pressure - pressure) + spread * noise.to(volume.device)
        change = change.clamp(-_MAX_VOLUME_CHANGE, _MAX_VOLUME_CHANGE)
        change = torch.where(periodic, change, 0.0)
        scale = (change / 3.0).exp()[:, None, None]
        return replace(
            systems,
            coord=scale * systems.coord,
            box=scale * systems.box,
            velocity=systems.velocity / scale,
        )


@dataclass(frozen=True)
class Lost:
    """A structure that the run dropped."""

    copy: int  # its number among the initial structures
    step: int  # the step that failed
    atom: int  # the fastest atom, or the first with a force that is not finite
    reason: str  # a phrase for messages


@dataclass(frozen=True)
class Snapshot:
    """The structures that remain in a run after some step.

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
    copies: Tensor
    systems: Systems
    forces: Forces
    lost: tuple[Lost, ...]

    @property
    def total_energy(self) -> Tensor:
        """Potential and kinetic energy `(n,)` [eV]."""
        return self.forces.energy + self.systems.kinetic


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
    """Run dynamics of many structures at once; yield the start and every `every`-th step.

    Without a thermostat this is velocity Verlet. With one it is BAOAB (Leimkuhler and Matthews,
    Appl. Math. Res. Express 2013, 34); its positions sample the temperature to second order in the
    step.

    A structure is dropped if an atom would move by more than `FARTHEST` in one step, if atoms
    coincide, or if energy or forces are not finite. The other structures continue. The run ends
    early when none remains.

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
        None for constant cells; otherwise a thermostat is required.
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
            "a run needs a time step above 0 fs, 0 steps or more and a snapshot every 1 step or "
            f"more; found {time_step} fs, {steps} and {every}"
        )
    if barostat is not None:
        if thermostat is None:
            raise DynamicsError(f"constant pressure needs a thermostat; found {barostat}")
        barostat = _barostat_of_each(systems, barostat)
    if thermostat is not None:
        thermostat = _thermostat_of_each(systems, thermostat)
    force_field.reset()
    run = _Run(
        force_field,
        systems,
        time_step=time_step,
        thermostat=thermostat,
        barostat=barostat,
        # A GPU draws its own noise, so a seed gives the same run only on devices of one kind.
        generator=torch.Generator(systems.coord.device).manual_seed(seed),
    )
    yield run.snapshot()
    while run.step < steps and len(run.systems):
        run.advance(min(every - run.step % every, steps - run.step))
        if run.step % every == 0 or run.step == steps or not len(run.systems):
            yield run.snapshot()


def _barostat_of_each(systems: Systems, barostat: Barostat) -> Barostat:
    """Return the barostat with a pressure and a temperature per structure."""
    for value in (barostat.time, barostat.compressibility, barostat.every):
        if not (value > 0.0 and math.isfinite(value)):
            raise DynamicsError(
                "constant pressure needs a relaxation time, a compressibility and an interval "
                f"above 0; found {barostat}"
            )
    pressure = systems.of_each(barostat.pressure, "pressure")
    if not pressure.isfinite().all():
        raise DynamicsError(f"a pressure is a number of GPa; found {barostat.pressure}")
    kelvin = systems.of_each(barostat.temperature, "temperature")
    return replace(barostat, pressure=pressure, temperature=kelvin)


def _thermostat_of_each(systems: Systems, thermostat: Langevin) -> Langevin:
    """Return the thermostat with a temperature per structure."""
    kelvin = systems.of_each(thermostat.temperature, "temperature")
    if not ((kelvin >= 0.0) & kelvin.isfinite()).all() or not thermostat.friction >= 0.0:
        raise DynamicsError(
            f"a thermostat needs temperatures and a friction of 0 or more; found {thermostat}"
        )
    return replace(thermostat, temperature=kelvin)


class _Run:
    """The structures that remain in a run, and their forces.

    Steps change positions, velocities and forces in place, because captured graphs contain the
    addresses. Dropping structures replaces these tensors, and the next stretch is captured again.
    """

    def __init__(
        self,
        force_field: ForceField,
        systems: Systems,
        *,
        time_step: float,
        thermostat: Langevin | None,
        barostat: Barostat | None,
        generator: torch.Generator,
    ) -> None:
        self.systems = _with_own_motion(systems)
        self.step = 0
        self._force_field = force_field
        self._time_step = time_step
        self._thermostat = thermostat  # with one value per structure, like the barostat
        self._barostat = barostat
        self._generator = generator
        device = systems.coord.device
        self._copies = torch.arange(len(systems), device=device)
        self._lost: list[Lost] = []
        self._drawn: list[Tensor] = []  # noise drawn in advance; each step takes the first
        # What a stretch of steps on the device reads and writes next to positions, velocities and
        # forces:
        self._stretch: Stretch | None = None
        self._noise = torch.empty(0, device=device)  # (steps, nsystems, natoms, 3)
        self._row = torch.zeros(1, dtype=torch.int64, device=device)  # the step's row of the noise
        self._valid = torch.ones(1, dtype=torch.bool, device=device)  # whether no structure failed
        self._valid_steps = torch.zeros(1, dtype=torch.int64, device=device)
        zeros = systems.coord.new_zeros
        self._forces = Forces(
            energy=zeros(len(systems)),
            force=torch.zeros_like(systems.coord),
            virial=zeros(len(systems), 9),
        )
        self._evaluate()

    def snapshot(self) -> Snapshot:
        """Return a copy of the structures, and those lost since the last call."""
        lost = tuple(self._lost)
        self._lost = []
        return Snapshot(
            step=self.step,
            copies=self._copies,
            systems=_with_own_motion(self.systems),
            forces=self._forces.clone(),
            lost=lost,
        )

    def advance(self, max_steps: int) -> None:
        """Do at least one and at most `max_steps` steps, on the device alone if possible."""
        barostat = self._barostat
        all_done = False
        if self._force_field.launchable(self.systems.box, self.systems.atype):
            steps = max_steps
            if barostat is not None:  # the host changes cells, between stretches
                steps = min(steps, barostat.every - self.step % barostat.every)
            steps = min(steps, self._max_device_steps())
            all_done = self._do_on_device(steps) == steps
        if not all_done:
            # If a step failed on the device, the host repeats it and drops the structures that
            # fail.
            self._do_on_host()
        if barostat is not None and self.step % barostat.every == 0 and len(self.systems):
            self._scale_cells(barostat)

    # ----- one step ------------------------------------------------------------------------------

    def _do_step(
        self,
        *,
        check_speed: Callable[[], None],
        next_noise: Callable[[], Tensor],
        evaluate: Callable[[], None],
    ) -> None:
        self._kick()
        check_speed()
        if self._thermostat is None:
            self._drift(self._time_step)
        else:
            self._drift(0.5 * self._time_step)
            self._thermalize(self._thermostat, next_noise())
            self._drift(0.5 * self._time_step)
        evaluate()
        self._kick()

    def _kick(self) -> None:
        """Change velocities by half a step of the present forces."""
        self.systems.velocity.addcdiv_(
            self._forces.force,
            self.systems.mass[..., None],
            value=0.5 * self._time_step * ACCELERATION,
        )

    def _drift(self, time: float) -> None:
        self.systems.coord.add_(self.systems.velocity, alpha=time)

    def _thermalize(self, thermostat: Langevin, noise: Tensor) -> None:
        """Apply friction and noise for one step by their exact solution."""
        systems = self.systems
        remaining = math.exp(-thermostat.friction * self._time_step)
        kelvin = systems.of_each(thermostat.temperature, "temperature")[:, None]
        spread = (BOLTZMANN * kelvin * ACCELERATION / systems.mass).sqrt()[..., None]
        velocity = (
            remaining * systems.velocity + math.sqrt(1.0 - remaining * remaining) * spread * noise
        )
        systems.velocity.copy_(torch.where(systems.real[..., None], velocity, 0.0))

    # ----- on the host, which may drop structures in the step ------------------------------------

    def _do_on_host(self) -> None:
        self.step += 1
        self._do_step(
            check_speed=self._drop_fast,
            next_noise=lambda: self._drawn.pop(0) if self._drawn else self._draw(1)[0],
            evaluate=self._evaluate,
        )

    def _drop_fast(self) -> None:
        """Drop structures in which an atom would move by more than `FARTHEST`."""
        distance = self.systems.velocity.square().sum(-1).sqrt() * self._time_step
        too_fast = ~(distance.amax(1) <= FARTHEST)  # also where it is NaN
        if too_fast.any():
            fastest = torch.nan_to_num(distance, nan=math.inf).argmax(1)
            reason = f"an atom would move by more than {FARTHEST:g} Å in one step"
            self._drop(too_fast, fastest, reason)

    def _evaluate(self) -> None:
        """Evaluate forces; drop structures with coinciding atoms or results that are not finite."""
        while len(self.systems):
            systems = self.systems
            try:
                forces = self._force_field(systems.coord, systems.box, systems.atype)
            except NeighborError as error:
                if error.frame is None:
                    raise
                at_fault = torch.zeros(len(systems), dtype=torch.bool, device=systems.coord.device)
                at_fault[error.frame] = True
                fastest = systems.velocity.square().sum(-1).argmax(1)
                self._drop(at_fault, fastest, error.problem)
                continue
            self._forces.take(forces)
            finite = forces.force.isfinite().all(-1)  # (nsystems, natoms)
            failed = ~(finite.all(1) & forces.energy.isfinite())
            if not failed.any():
                return
            reason = "the potential's energy or forces are not finite"
            self._drop(failed, (~finite).int().argmax(1), reason)

    def _drop(self, mask: Tensor, atoms: Tensor, reason: str) -> None:
        """Drop the structures of a mask `(nsystems,)`; record reason and atom `(nsystems,)`."""
        for k in torch.nonzero(mask).flatten().tolist():
            self._lost.append(
                Lost(copy=int(self._copies[k]), step=self.step, atom=int(atoms[k]), reason=reason)
            )
        remaining = ~mask
        self.systems = self.systems.rows(remaining)
        self._forces = Forces(*(x[remaining] for x in self._forces.tensors))
        if self._thermostat is not None:
            self._thermostat = _rows(self._thermostat, remaining)
        if self._barostat is not None:
            self._barostat = _rows(self._barostat, remaining)
        self._copies = self._copies[remaining]
        self._drawn = [noise[remaining] for noise in self._drawn]
        self._stretch = None  # its graph contains the addresses of the old tensors
        self._force_field.reset()  # so do its lists

    def _draw(self, steps: int) -> Tensor:
        """Return the noise of some steps `(steps, nsystems, natoms, 3)`."""
        coord = self.systems.coord
        generator = self._generator
        # Step by step, so that the numbers do not depend on how many steps are drawn together.
        noise = [
            torch.randn(
                coord.shape, generator=generator, dtype=torch.float64, device=generator.device
            )
            for _ in range(steps)
        ]
        return torch.stack(noise).to(coord.device)

    def _scale_cells(self, barostat: Barostat) -> None:
        scaled = barostat.rescaled(
            self.systems, self._forces.virial, self._time_step, self._generator
        )
        self.systems.coord.copy_(scaled.coord)
        self.systems.velocity.copy_(scaled.velocity)
        # A new tensor, by which the force field notices that the cells have changed.
        self.systems = replace(self.systems, box=scaled.box)
        self._evaluate()

    # ----- on the device, where failures are only noted ------------------------------------------

    def _max_device_steps(self) -> int:
        coord = self.systems.coord
        step_bytes = max(1, coord.numel() * coord.element_size())
        return max(1, min(_MAX_STEPS, _MAX_NOISE_BYTES // step_bytes))

    def _do_on_device(self, steps: int) -> int:
        """Do `steps` steps, or those before a structure fails; return their number."""
        if self._stretch is None:
            self._stretch = self._new_stretch()
        # In place, because the graph contains the addresses.
        self._row.zero_()
        self._valid.fill_(True)
        self._valid_steps.zero_()
        if self._thermostat is not None:
            missing = steps - len(self._drawn)
            if missing > 0:
                self._drawn.extend(self._draw(missing).unbind())
            torch.stack(self._drawn[:steps], out=self._noise[:steps])
        done = self._stretch(steps)
        self._drawn = self._drawn[done:]  # a run does not depend on where stretches end
        self.step += done
        return done

    def _new_stretch(self) -> Stretch:
        coord = self.systems.coord
        if self._thermostat is not None:
            self._noise = coord.new_zeros(self._max_device_steps(), *coord.shape)
        state = (
            coord,
            self.systems.velocity,
            *self._forces.tensors,
            self._row,
            self._valid,
            self._valid_steps,
        )
        return Stretch(self._force_field, state, self._launch_step, self._valid_steps)

    def _launch_step(self) -> None:
        """Launch one step; this work is captured, so it never waits for the device."""
        self._do_step(
            check_speed=self._note_fast,
            next_noise=self._take_row_of_noise,
            evaluate=self._launch_forces,
        )

    def _note_fast(self) -> None:
        square = self.systems.velocity.square().sum(-1).amax() * self._time_step**2
        # NaN fails the comparison, too.
        self._valid.logical_and_(square <= FARTHEST**2)

    def _take_row_of_noise(self) -> Tensor:
        noise = self._noise.index_select(0, self._row)[0]
        self._row.add_(1)
        return noise

    def _launch_forces(self) -> None:
        forces = self._force_field.launch(self.systems.coord)
        self._forces.take(forces)  # the next launch overwrites the results
        finite = forces.force.isfinite().all() & forces.energy.isfinite().all()
        self._valid.logical_and_(finite)
        self._valid_steps.add_(self._valid)


def _with_own_motion(systems: Systems) -> Systems:
    """Return the structures with copies of the tensors that steps change in place."""
    return replace(systems, coord=systems.coord.clone(), velocity=systems.velocity.clone())


_Settings = TypeVar("_Settings", Langevin, Barostat)


def _rows(settings: _Settings, mask: Tensor) -> _Settings:
    """Return a thermostat or barostat with the values of some structures."""
    tensors: dict[str, Any] = {
        name: x[mask] for name, x in vars(settings).items() if isinstance(x, Tensor)
    }
    return replace(settings, **tensors)
