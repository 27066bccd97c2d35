"""FIRE relaxations of many structures at once."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from deepmd_muon.dynamics.errors import DynamicsError
from deepmd_muon.dynamics.forces import ForceField, Forces
from deepmd_muon.dynamics.systems import Systems

# Bitzek et al., Phys. Rev. Lett. 97, 170201 (2006), with ASE's step lengths, for masses of 1.
_PATIENCE, _FASTER, _SLOWER, _MIXING, _LESS = 5, 1.1, 0.5, 0.1, 0.99
_FIRST, _LONGEST, _FARTHEST = 0.1, 1.0, 0.2


@dataclass(frozen=True)
class Relaxed:
    """The end of a relaxation.

    Attributes
    ----------
    systems
        Structures at rest.
    forces
        Energy, forces and virial there.
    largest
        Largest force on an atom of each `(nsystems,)` [eV/Å].
    steps
        Force calls made for each `(nsystems,)`.
    """

    systems: Systems
    forces: Forces
    largest: torch.Tensor
    steps: torch.Tensor


def relax(force_field: ForceField, systems: Systems, *, fmax: float = 0.05, steps: int = 500) -> Relaxed:
    """Move atoms downhill in fixed cells until no force is larger than `fmax`; each structure has its own step length.

    A structure whose forces are not finite stays where it is, with `largest` NaN.

    Parameters
    ----------
    force_field
        The potential.
    systems
        Where to start; velocities do not matter.
    fmax
        Largest force on an atom in the end [eV/Å].
    steps
        Most steps.

    Raises
    ------
    DynamicsError
        When the numbers make no sense.
    NeighborError
        When a structure begins with atoms at the same place.
    """
    if not fmax > 0.0 or steps < 0:
        raise DynamicsError(f"a relaxation needs fmax above 0 eV/Å and 0 steps or more; found {fmax} and {steps}")
    force_field.reset()
    coord, velocity = systems.coord.clone(), torch.zeros_like(systems.coord)
    ones = coord.new_ones(len(systems), 1, 1)
    step, mixing, downhill = _FIRST * ones, _MIXING * ones, torch.zeros_like(ones)
    taken = torch.zeros(len(systems), dtype=torch.int64, device=coord.device)
    found = force_field(coord, systems.box, systems.atype)
    largest = found.force.square().sum(-1).amax(1).sqrt()
    for _ in range(steps):
        going = (largest > fmax)[:, None, None]
        if not going.any():
            break
        taken += going.flatten()
        power = (found.force * velocity).sum((1, 2), keepdim=True)
        forward = power > 0.0
        size = velocity.square().sum((1, 2), keepdim=True).sqrt()
        direction = found.force / found.force.square().sum((1, 2), keepdim=True).sqrt().clamp(min=1e-30)
        velocity = torch.where(forward, (1.0 - mixing) * velocity + mixing * size * direction, 0.0)
        patient = forward & (downhill > _PATIENCE)
        step = torch.where(patient, (_FASTER * step).clamp(max=_LONGEST), torch.where(forward, step, _SLOWER * step))
        step = torch.where(taken.view(-1, 1, 1) > 1, step, _FIRST * ones)
        mixing = torch.where(patient, _LESS * mixing, torch.where(forward, mixing, _MIXING * ones))
        downhill = torch.where(forward, downhill + 1.0, 0.0)
        velocity = velocity + step * found.force
        change = step * velocity
        length = change.square().sum((1, 2), keepdim=True).sqrt()
        change = change * (_FARTHEST / length.clamp(min=_FARTHEST))
        coord = torch.where(going, coord + change, coord)
        found = force_field(coord, systems.box, systems.atype)
        largest = found.force.square().sum(-1).amax(1).sqrt()
    return Relaxed(replace(systems, coord=coord, velocity=torch.zeros_like(velocity)), found, largest, taken)
