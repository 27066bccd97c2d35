"""FIRE relaxations of many structures at once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from deepmd_muon.dynamics.forces import ForceField, Forces
from deepmd_muon.dynamics.stretch import Stretch
from deepmd_muon.dynamics.systems import DynamicsError, Systems

# Constants of Bitzek et al., Phys. Rev. Lett. 97, 170201 (2006), with ASE's step lengths; masses are 1.
_PATIENCE, _FASTER, _SLOWER, _MIXING, _LESS = 5, 1.1, 0.5, 0.1, 0.99
_FIRST, _LONGEST, _FARTHEST = 0.1, 1.0, 0.2
# Steps that a device takes before the host checks whether all structures are at rest.
_LOOK = 10


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
    largest: torch.Tensor
    steps: torch.Tensor


def relax(
    force_field: ForceField, systems: Systems, *, fmax: float = 0.05, steps: int = 500
) -> Relaxed:
    """Move atoms downhill in fixed cells until no force is larger than `fmax`; each structure has its own step length.

    A structure whose forces are not finite stays where it is, with `largest` NaN.

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
    found = force_field(systems.coord, systems.box, systems.atype)
    descent = _Descent(systems, found, fmax)
    stretch, left = None, steps
    while left and bool((descent.largest > fmax).any()):
        taken = 0
        if force_field.launchable(systems.box, systems.atype):
            stretch = stretch or Stretch(
                force_field, descent.state, lambda: descent.go(force_field.launch)
            )
            taken = stretch(min(left, _LOOK))
        if not taken:
            descent.go(lambda coord: force_field(coord, systems.box, systems.atype))
            taken, stretch = 1, None
        left -= taken
    end = replace(systems, coord=descent.coord, velocity=torch.zeros_like(systems.coord))
    return Relaxed(end, descent.found, descent.largest, descent.taken)


class _Descent:
    """The state of all relaxations, in tensors that are updated in place."""

    def __init__(self, systems: Systems, found: Forces, fmax: float) -> None:
        self._fmax = fmax
        self.coord, self.found = systems.coord.clone(), found.clone()
        self._velocity = torch.zeros_like(self.coord)
        ones = self.coord.new_ones(len(systems), 1, 1)
        self._step, self._mixing, self._downhill = (
            _FIRST * ones,
            _MIXING * ones,
            torch.zeros_like(ones),
        )
        self.taken = torch.zeros(len(systems), dtype=torch.int64, device=ones.device)
        self.largest = found.largest

    @property
    def state(self) -> list[torch.Tensor]:
        """All tensors that `go` changes."""
        own = [
            self.coord,
            self._velocity,
            self._step,
            self._mixing,
            self._downhill,
            self.taken,
            self.largest,
        ]
        return [*own, *self.found.tensors]

    def go(self, evaluate: Callable[[torch.Tensor], Forces]) -> None:
        """Move all structures that are not at rest, and evaluate them."""
        force, velocity, mixing = self.found.force, self._velocity, self._mixing
        going = (self.largest > self._fmax)[:, None, None]
        self.taken.add_(going.flatten())
        power = (force * velocity).sum((1, 2), keepdim=True)
        forward = power > 0.0
        size = velocity.square().sum((1, 2), keepdim=True).sqrt()
        direction = force / force.square().sum((1, 2), keepdim=True).sqrt().clamp(min=1e-30)
        velocity.copy_(
            torch.where(forward, (1.0 - mixing) * velocity + mixing * size * direction, 0.0)
        )
        patient = forward & (self._downhill > _PATIENCE)
        longer, shorter = (_FASTER * self._step).clamp(max=_LONGEST), _SLOWER * self._step
        step = torch.where(patient, longer, torch.where(forward, self._step, shorter))
        self._step.copy_(torch.where(self.taken.view(-1, 1, 1) > 1, step, _FIRST))
        mixing.copy_(torch.where(patient, _LESS * mixing, torch.where(forward, mixing, _MIXING)))
        self._downhill.copy_(torch.where(forward, self._downhill + 1.0, 0.0))
        velocity.add_(self._step * force)
        change = self._step * velocity
        length = change.square().sum((1, 2), keepdim=True).sqrt()
        change = change * (_FARTHEST / length.clamp(min=_FARTHEST))
        self.coord.copy_(torch.where(going, self.coord + change, self.coord))
        self.found.take(evaluate(self.coord))
        self.largest.copy_(self.found.largest)
