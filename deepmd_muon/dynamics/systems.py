"""The state of many structures: positions, cells, types, masses and velocities."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from deepmd_muon.data import Frames
from deepmd_muon.data.elements import MASSES

#: Boltzmann's constant [eV/K] (CODATA 2018).
BOLTZMANN = 8.617333262e-5
#: Acceleration [Å/fs²] of a mass of 1 u by a force of 1 eV/Å.
ACCELERATION = 9.648533212e-3
#: A structure has blown up if its temperature exceeds this multiple of the initial or the
#: thermostat's temperature.
HOT = 3.0


class DynamicsError(ValueError):
    """Dynamics cannot start with these structures or settings, or have lost all structures."""


def usual_time_step(elements: Iterable[str]) -> float:
    """Return the time step of dynamics at constant temperature [fs].

    Hydrogen needs a shorter one.
    """
    return 0.5 if min(MASSES.get(name, math.inf) for name in elements) < 5.0 else 1.0


@dataclass(frozen=True)
class Systems:
    """Structures in rows of equal length; shorter structures end with padding atoms of type −1.

    Attributes
    ----------
    coord
        Positions `(nsystems, natoms, 3)` [Å], float64, inside the cell or not.
    box
        Cell vectors as rows `(nsystems, 3, 3)` [Å], zeros for a structure without cell; None if no
        structure has one.
    atype
        Types `(nsystems, natoms)`, int64.
    mass
        Masses `(nsystems, natoms)` [u]; 1 for padding.
    velocity
        Velocities `(nsystems, natoms, 3)` [Å/fs]; zero for padding.
    """

    coord: Tensor
    box: Tensor | None
    atype: Tensor
    mass: Tensor
    velocity: Tensor

    def __len__(self) -> int:
        return self.coord.shape[0]

    @property
    def real(self) -> Tensor:
        """Whether each atom is not padding, bool `(nsystems, natoms)`."""
        return self.atype >= 0

    @classmethod
    def from_frames(
        cls,
        frames: Frames,
        type_map: Sequence[str],
        device: torch.device | str = "cpu",
        masses: Sequence[float] = (),
    ) -> Systems:
        """Return structures at rest.

        Parameters
        ----------
        frames
            Positions, cells and types.
        type_map
            Element symbols of the types.
        device
            Device of the tensors.
        masses
            Masses of the types [u]; by default those of their elements.

        Raises
        ------
        DynamicsError
            When there is no atom, an occurring type has no mass above 0, or the number of masses is
            wrong.
        """
        if not frames.nframes or not (frames.atype >= 0).any():
            raise DynamicsError("there is no structure with an atom to start from")
        type_masses = list(masses) or [MASSES.get(name, math.nan) for name in type_map]
        if len(type_masses) != len(type_map):
            raise DynamicsError(
                f"{len(type_masses)} masses for {len(type_map)} types {tuple(type_map)}: "
                "give one per type"
            )
        # The type −1 of padding reads the last mass, 1.
        mass = np.array([*type_masses, 1.0])[frames.atype]
        if np.isnan(mass).any():
            unknown = sorted({type_map[t] for t in np.unique(frames.atype[np.isnan(mass)])})
            raise DynamicsError(
                f"the types {', '.join(unknown)} are not elements: give their masses"
            )
        if not (mass > 0.0).all():
            raise DynamicsError(f"masses must be above 0 u; found {type_masses}")
        box = None
        if frames.box is not None:
            box = torch.tensor(frames.box, dtype=torch.float64, device=device)
        coord = torch.tensor(frames.coord, dtype=torch.float64, device=device)
        return cls(
            coord=coord,
            box=box,
            atype=torch.tensor(frames.atype, dtype=torch.int64, device=device),
            mass=torch.tensor(mass, dtype=torch.float64, device=device),
            velocity=torch.zeros_like(coord),
        )

    def rows(self, rows: Tensor | slice) -> Systems:
        """Return some of the structures, chosen by number, mask or slice."""
        return Systems(
            coord=self.coord[rows],
            box=None if self.box is None else self.box[rows],
            atype=self.atype[rows],
            mass=self.mass[rows],
            velocity=self.velocity[rows],
        )

    def of_each(self, value: float | Tensor, name: str) -> Tensor:
        """Return one value per structure `(nsystems,)` from one value for all or one per structure.

        Raises
        ------
        DynamicsError
            When there is another number of values.
        """
        values = torch.as_tensor(value, dtype=torch.float64, device=self.coord.device).reshape(-1)
        if len(values) not in (1, len(self)):
            raise DynamicsError(
                f"{len(values)} {name}s for {len(self)} structures: give one, or one per structure"
            )
        return values.expand(len(self))

    def heated(self, temperature: float | Tensor, generator: torch.Generator) -> Systems:
        """Return the structures with velocities of a temperature, and centres of mass at rest.

        Velocities follow the Maxwell–Boltzmann distribution.

        Parameters
        ----------
        temperature
            One for all, or one per structure `(nsystems,)` [K].
        generator
            Source of random numbers on the CPU, so that a seed gives the same run on every device.
        """
        kelvin = self.of_each(temperature, "temperature")[:, None]
        if not ((kelvin >= 0.0) & kelvin.isfinite()).all():
            raise DynamicsError(f"a temperature is 0 K or more; found {temperature}")
        noise = torch.randn(self.coord.shape, generator=generator, dtype=torch.float64)
        real = self.real[..., None]
        spread = (BOLTZMANN * kelvin * ACCELERATION / self.mass).sqrt()[..., None]  # [Å/fs]
        velocity = torch.where(real, spread * noise.to(self.coord.device), 0.0)
        mass = torch.where(self.real, self.mass, 0.0)[..., None]
        drift = (mass * velocity).sum(1, keepdim=True) / mass.sum(1, keepdim=True)
        # A single atom moves with its centre of mass: without the drift it would be at rest.
        single = (self.real.sum(1) < 2)[:, None, None]
        velocity = velocity - torch.where(single | ~real, 0.0, drift)
        return replace(self, velocity=velocity)

    @property
    def kinetic(self) -> Tensor:
        """Kinetic energy `(nsystems,)` [eV]."""
        return (0.5 / ACCELERATION) * (self.mass[..., None] * self.velocity.square()).sum((1, 2))

    @property
    def temperature(self) -> Tensor:
        """Kinetic temperature `(nsystems,)` [K].

        Each atom has three degrees of freedom; the centre of mass has none.
        """
        atoms = self.real.sum(1)
        return 2.0 * self.kinetic / (BOLTZMANN * (3 * atoms - 3).clamp(min=3))

    def hot(self, kelvin: float | Tensor) -> np.ndarray:
        """Return whether each structure has blown up, bool `(nsystems,)`.

        `kelvin` is as in `heated`.
        """
        atoms = self.real.sum(1).double()
        # The temperature of few atoms fluctuates more.
        fluctuation = 1.0 + 2.0 / (3.0 * atoms).sqrt()
        limit = HOT * self.of_each(kelvin, "temperature") * fluctuation
        return (~(self.temperature <= limit)).cpu().numpy()

    def frames(self) -> Frames:
        """Return positions, cells and types as arrays."""
        return Frames(
            atype=self.atype.cpu().numpy().astype(np.int32),
            coord=self.coord.detach().cpu().numpy().copy(),
            box=None if self.box is None else self.box.cpu().numpy().copy(),
        )
