"""Fumi and Tosi's potential of NaCl and KCl (J. Phys. Chem. Solids 25, 31 and 45 (1964)), also for their mixtures.

Ions of charge ±1 repel each other exponentially and attract each other by dispersion. The sum over charges is the
damped and shifted one of Fennell and Gezelter (J. Chem. Phys. 124, 234104 (2006)). All terms end at `CUT`: the energy
is a sum over near pairs, which a model of finite range can represent.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from ase import units
from autograd_calculator import AutogradCalculator
from torch import Tensor

IONS = ("Na", "K", "Cl")
CHARGES = (1.0, 1.0, -1.0)
CUT, DAMPING = 5.2, 0.3  # Å, 1/Å
COULOMB = units.Hartree * units.Bohr  # e²/(4πε₀) [eV·Å]
STRENGTH = 0.338e-19 * units.J  # b of the papers [eV]
RADII = (1.170, 1.463, 1.585)  # Å
# Pauling's factors 1 + z_i/n_i + z_j/n_j, with eight outer electrons of every ion.
FACTORS = ((1.25, 1.25, 1.0), (1.25, 1.25, 1.0), (1.0, 1.0, 0.75))
# The papers give each salt its own Cl–Cl. One set of ions needs one: the mean of both. Na–K, which they do not have,
# takes the mean length and the geometric mean of the dispersion.
SOFTNESS = ((0.317, 0.327, 0.317), (0.327, 0.337, 0.337), (0.317, 0.337, 0.327))  # Å
SIXTH = ((1.68, 6.39, 11.2), (6.39, 24.3, 48.0), (11.2, 48.0, 120.25))  # C [1e-79 J·m⁶]
EIGHTH = ((0.8, 4.38, 13.9), (4.38, 24.0, 73.0), (13.9, 73.0, 241.5))  # D [1e-99 J·m⁸]


def _tables() -> Tensor:
    """Return product of charges, size [eV] and length [Å] of the repulsion, C [eV·Å⁶] and D [eV·Å⁸] of each pair."""
    charge, radius, softness = (
        torch.tensor(values, dtype=torch.float64) for values in (CHARGES, RADII, SOFTNESS)
    )
    size = (
        STRENGTH
        * torch.tensor(FACTORS, dtype=torch.float64)
        * ((radius[:, None] + radius) / softness).exp()
    )
    sixth = torch.tensor(SIXTH, dtype=torch.float64) * 1e-79 * units.J * units.m**6
    eighth = torch.tensor(EIGHTH, dtype=torch.float64) * 1e-99 * units.J * units.m**8
    return torch.stack([charge[:, None] * charge, size, softness, sixth, eighth])


TABLES = _tables()


def pair_energy(r: Tensor, tables: Tensor) -> tuple[Tensor, Tensor]:
    """Return the energy of pairs [eV] and its derivative [eV/Å] before they are shifted.

    Parameters
    ----------
    r
        Distances [Å].
    tables
        The five numbers of each pair, a column of `TABLES` each `(5, npairs)`.
    """
    charge, size, softness, sixth, eighth = tables
    damped = torch.erfc(DAMPING * r) / r
    repulsion = size * torch.exp(-r / softness)
    energy = COULOMB * charge * damped + repulsion - sixth / r**6 - eighth / r**8
    slope = damped / r + 2 * DAMPING / math.sqrt(math.pi) * torch.exp(-((DAMPING * r) ** 2)) / r
    return (
        energy,
        -COULOMB * charge * slope - repulsion / softness + 6 * sixth / r**7 + 8 * eighth / r**9,
    )


class TosiFumi(AutogradCalculator):
    """The potential as a calculator; energy and force of a pair vanish at `CUT`."""

    def energy_of(self, vectors: Tensor, symbols: Sequence[str]) -> Tensor:
        """Return the energy [eV] of the pairs, and of each ion with the charge that neutralises its sphere."""
        kinds = torch.tensor([IONS.index(symbol) for symbol in symbols])
        i, j = torch.triu_indices(len(kinds), len(kinds), 1)
        square = (vectors[i, j] ** 2).sum(-1)
        near = (square < CUT**2).nonzero()[:, 0]
        r, tables = square[near].sqrt(), TABLES[:, kinds[i[near]], kinds[j[near]]]
        last_energy, last_slope = pair_energy(torch.tensor(CUT, dtype=torch.float64), tables)
        pairs = pair_energy(r, tables)[0] - last_energy - (r - CUT) * last_slope
        alone = math.erfc(DAMPING * CUT) / (2 * CUT) + DAMPING / math.sqrt(math.pi)
        squares = torch.tensor(CHARGES, dtype=torch.float64)[kinds] ** 2
        return pairs.sum() - COULOMB * alone * squares.sum()
