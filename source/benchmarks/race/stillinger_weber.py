"""The Stillinger–Weber potential of silicon (Phys. Rev. B 31, 5262 (1985)), differentiated by torch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from autograd_calculator import AutogradCalculator
from torch import Tensor

EPSILON, SIGMA = 2.1683, 2.0951  # eV, Å
A, B, P, CUT, LAMBDA, GAMMA = 7.049556277, 0.6022245584, 4, 1.80, 21.0, 1.20
COS_TETRAHEDRAL = -1.0 / 3.0


def energy_of(vectors: Tensor) -> Tensor:
    """Return the energy [eV] from the vectors between atoms.

    Parameters
    ----------
    vectors
        From each atom to all others [Å], nearest images `(natoms, natoms, 3)`; the diagonal is not read.
    """
    natoms = len(vectors)
    others = ~torch.eye(natoms, dtype=torch.bool)
    square = (vectors**2).sum(-1).masked_fill(~others, 1e6)
    most = int((square < (CUT * SIGMA) ** 2).sum(1).max())
    near, index = square.topk(most, dim=1, largest=False)
    reduced = near.sqrt() / SIGMA
    inside = reduced < CUT - 1e-3  # all derivatives vanish at the cut-off
    # Any value inside does for what is masked; it keeps gradients finite.
    r = torch.where(inside, reduced, 1.0)
    two = torch.where(inside, A * (B * r**-P - 1.0) * torch.exp(1.0 / (r - CUT)), 0.0)
    decay = torch.where(inside, torch.exp(GAMMA / (r - CUT)), 0.0)
    unit = vectors.gather(1, index[..., None].expand(-1, -1, 3)) / (SIGMA * r)[..., None]
    cosine = unit @ unit.mT
    three = LAMBDA * (cosine - COS_TETRAHEDRAL) ** 2 * decay[:, :, None] * decay[:, None, :]
    pairs_of_neighbors = torch.triu(three, diagonal=1).sum()
    return EPSILON * (0.5 * two.sum() + pairs_of_neighbors)


class StillingerWeber(AutogradCalculator):
    """The potential as a calculator, with a cut-off of 3.77 Å."""

    def energy_of(self, vectors: Tensor, symbols: Sequence[str]) -> Tensor:
        """Return the energy [eV]; every atom is silicon."""
        return energy_of(vectors)
