"""FIRE relaxations of many structures at once.

Constants are those of Bitzek et al., Phys. Rev. Lett. 97, 170201 (2006), with ASE's step lengths;
masses are 1.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from deepmd_muon.dynamics.forces import ForceField, Forces
from deepmd_muon.dynamics.stretch import Stretch
from deepmd_muon.dynamics.systems import DynamicsError, Systems

# Steps downhill before the step length grows.
_PATIENCE = 5
_STEP_GROWTH = 1.1
_STEP_SHRINKAGE = 0.5
_FIRST_MIXING = 0.1
_MIXING_SHRINKAGE = 0.99
_FIRST_STEP = 0.1
_LONGEST_STEP = 1.0
# Bound on the norm of all displacements of a structure in one step [Å].
_LONGEST_DISPLACEMENT = 0.2
# Steps that a device does before the host checks whether all structures are at rest.
_STEPS_BETWEEN_CHECKS = 10


@dataclass(frozen=True)
class Relaxed:
    """The end of a relaxation.

    Attributes
    ----------
    systems
        The final structures, with zero velocities.
    forces
        Energy, forces and virial at these positions.
    largest
        Largest force on an atom of each structure `(nsystems,)` [eV/Å].
    steps
        Number of steps of each structure `(nsystems,)`.
    """

    systems: Systems
    forces: Forces
    largest: Tensor
    steps: Tensor


def relax(
    force_field: ForceField, systems: Systems, *, fmax: float = 0.05, steps: int = 500
) -> Relaxed:
    """Move atoms downhill in fixed cells until no force is larger than `fmax`.

    Each structure has its own step length. A structure whose forces are not finite stays where it
    is, with `largest` NaN.

    Parameters
    ----------
    force_field
        The potential.
    systems
        Initial structures; velocities do not matter.
    fmax
        Bound on the largest force on an atom in the end [eV/Å].
    steps
        Largest number of steps.

    Raises
    ------
    DynamicsError
        When a number is out of range.
    NeighborError
        When atoms of an initial structure coincide.
    """
    if not fmax > 0.0 or steps < 0:
        raise DynamicsError(
            f"a relaxation needs fmax above 0 eV/Å and 0 steps or more; found {fmax} and {steps}"
        )
    force_field.reset()
    descent = _Descent(systems, force_field(systems.coord, systems.box, systems.atype), fmax)
    stretch = Stretch(force_field, descent.state, lambda: descent.step(force_field.launch))
    steps_done = 0
    while steps_done < steps and bool((descent.largest > fmax).any()):
        done = 0
        if force_field.launchable(systems.box, systems.atype):
            done = stretch(min(steps - steps_done, _STEPS_BETWEEN_CHECKS))
        if done == 0:
            descent.step(lambda coord: force_field(coord, systems.box, systems.atype))
            done = 1
        steps_done += done
    end = replace(systems, coord=descent.coord, velocity=torch.zeros_like(systems.coord))
    return Relaxed(
        systems=end, forces=descent.forces, largest=descent.largest, steps=descent.n_steps
    )


class _Descent:
    """The state of all relaxations, in tensors that are updated in place."""

    def __init__(self, systems: Systems, forces: Forces, fmax: float) -> None:
        self.coord = systems.coord.clone()
        self.forces = forces.clone()
        self.largest = forces.largest  # (nsystems,)
        self.n_steps = torch.zeros(len(systems), dtype=torch.int64, device=self.coord.device)
        self._fmax = fmax
        self._velocity = torch.zeros_like(self.coord)
        ones = self.coord.new_ones(len(systems), 1, 1)
        self._step_length = _FIRST_STEP * ones
        self._mixing = _FIRST_MIXING * ones
        self._n_downhill = torch.zeros_like(ones)  # steps downhill in a row

    @property
    def state(self) -> list[Tensor]:
        """All tensors that `step` changes."""
        return [
            self.coord,
            self._velocity,
            self._step_length,
            self._mixing,
            self._n_downhill,
            self.n_steps,
            self.largest,
            *self.forces.tensors,
        ]

    def step(self, evaluate: Callable[[Tensor], Forces]) -> None:
        """Move all structures that are not at rest, and evaluate them.

        The work may be captured in a graph, so it never waits for the device.
        """
        force = self.forces.force
        velocity = self._velocity
        mixing = self._mixing
        moving = (self.largest > self._fmax)[:, None, None]  # False where NaN
        self.n_steps.add_(moving.flatten())

        # Turn velocities towards the forces; stop structures that move uphill.
        power = (force * velocity).sum((1, 2), keepdim=True)
        downhill = power > 0.0
        speed = velocity.square().sum((1, 2), keepdim=True).sqrt()
        direction = force / force.square().sum((1, 2), keepdim=True).sqrt().clamp(min=1e-30)
        turned = (1.0 - mixing) * velocity + mixing * speed * direction
        velocity.copy_(torch.where(downhill, turned, 0.0))

        # Lengthen steps after some steps downhill; shorten them and start over after a step uphill.
        patient = downhill & (self._n_downhill > _PATIENCE)
        longer = (_STEP_GROWTH * self._step_length).clamp(max=_LONGEST_STEP)
        shorter = _STEP_SHRINKAGE * self._step_length
        unless_patient = torch.where(downhill, self._step_length, shorter)
        step_length = torch.where(patient, longer, unless_patient)
        # At the first step velocities are zero, which is not a step uphill.
        after_first = self.n_steps.view(-1, 1, 1) > 1
        self._step_length.copy_(torch.where(after_first, step_length, _FIRST_STEP))
        unless_patient = torch.where(downhill, mixing, _FIRST_MIXING)
        mixing.copy_(torch.where(patient, _MIXING_SHRINKAGE * mixing, unless_patient))
        self._n_downhill.copy_(torch.where(downhill, self._n_downhill + 1.0, 0.0))

        velocity.add_(self._step_length * force)
        change = self._step_length * velocity
        length = change.square().sum((1, 2), keepdim=True).sqrt()
        change = change * (_LONGEST_DISPLACEMENT / length.clamp(min=_LONGEST_DISPLACEMENT))
        self.coord.copy_(torch.where(moving, self.coord + change, self.coord))
        self.forces.take(evaluate(self.coord))
        self.largest.copy_(self.forces.largest)
