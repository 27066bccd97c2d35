"""Constant pressure by isotropic stochastic cell rescaling."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from deepmd_muon.dynamics.systems import BOLTZMANN, Systems

#: One GPa in eV/Å³ (CODATA 2018).
GIGAPASCAL = 1.0 / 160.2176634
# Bound on the relative change of a volume in one step; far from equilibrium, the linear law would overshoot.
_MOST = 0.1


@dataclass(frozen=True)
class Barostat:
    """Isotropic stochastic cell rescaling (Bernetti and Bussi, J. Chem. Phys. 153, 114107 (2020))."""

    pressure: float | torch.Tensor  # one for all, or one per structure `(nsystems,)` [GPa]
    temperature: float | torch.Tensor  # of the thermostat, in the same form [K]
    time: float = 200.0  # time in which the pressure relaxes [fs]
    # Compressibility of the material [1/GPa], by default water's. It changes only the speed of the relaxation, not the
    # distribution of volumes.
    compressibility: float = 0.45
    every: int = 10  # steps between changes of the cell, each of which needs new neighbour lists

    def rescaled(
        self, systems: Systems, virial: torch.Tensor, time_step: float, generator: torch.Generator
    ) -> Systems:
        """Return the structures with new cells, positions and velocities, after `every` steps of `time_step` [fs].

        `virial` is −dE/dε `(nsystems, 9)` [eV]. Structures without a cell stay unchanged.
        """
        if systems.box is None:
            return systems
        volume = torch.linalg.det(systems.box).abs()
        periodic = volume > 0.0
        volume = torch.where(periodic, volume, 1.0)
        wanted = systems.of_each(self.pressure, "pressure")
        kelvin = systems.of_each(self.temperature, "temperature")
        inner = (2.0 * systems.kinetic + virial.view(-1, 3, 3).diagonal(dim1=1, dim2=2).sum(1)) / (
            3.0 * volume
        )
        rate = self.compressibility / GIGAPASCAL / self.time * self.every * time_step
        noise = torch.randn(
            len(systems), generator=generator, dtype=torch.float64, device=generator.device
        )
        noise = noise.to(volume.device)
        change = (
            rate * (inner - GIGAPASCAL * wanted)
            + (2.0 * BOLTZMANN * kelvin * rate / volume).sqrt() * noise
        )
        change = torch.where(periodic, change.clamp(-_MOST, _MOST), 0.0)
        scale = (change / 3.0).exp()[:, None, None]
        return replace(
            systems,
            coord=scale * systems.coord,
            box=scale * systems.box,
            velocity=systems.velocity / scale,
        )
