"""Environment rows and their pullbacks, for TorchScript and for trained models on a CPU."""

from typing import NamedTuple

import torch
from torch import Tensor


def quintic(u: Tensor) -> Tensor:
    """Return −u³·(10 − 15u + 6u²), in torch and TorchScript.

    1 + quintic(u) is the switch that falls from 1 at u = 0 to 0 at u = 1. −quintic(1 − u) is the
    same without cancellation near its end.
    """
    return u * u * u * ((15.0 - 6.0 * u) * u - 10.0)


class Rows(NamedTuple):
    """Environment rows w·(t, x·t², y·t², z·t²) of every edge, and the parts of their derivative.

    Attributes
    ----------
    edges
        r_ij `(ncentre, nnei, 3)` [Å]. In empty slots a vector beyond the cut-off, where everything
        vanishes.
    rows
        `(ncentre, nnei, 4)` [1/Å].
    radial, isotropic, bend
        The derivative: ∂row₀/∂x_k = radial·x_k, ∂row_i/∂x_k = isotropic·δ_ik + bend·x_i·x_k
        `(ncentre, nnei)` [1/Å³, 1/Å², 1/Å⁴].
    """

    edges: Tensor
    rows: Tensor
    radial: Tensor
    isotropic: Tensor
    bend: Tensor


def environment_rows(
    edges: Tensor, empty: Tensor, rcut: float, rcut_smth: float, protection: float
) -> Rows:
    """Compute the rows; see `environment` for the arguments."""
    edges = edges.masked_fill(empty.unsqueeze(-1), rcut)
    distance = (edges * edges).sum(-1).sqrt_()
    u = ((distance - rcut_smth) / (rcut - rcut_smth)).clamp_(0.0, 1.0)
    switch = quintic(u) + 1.0
    slope = (u * (u - 1.0)).square_().mul_(-30.0 / (rcut - rcut_smth))
    t = 1.0 / (distance + protection)
    isotropic = switch * t * t
    rows = torch.cat([(switch * t).unsqueeze(-1), isotropic.unsqueeze(-1) * edges], dim=-1)
    slope_t = slope * t
    per_distance = 1.0 / distance
    radial = (slope_t - isotropic) * per_distance
    bend = (slope_t - 2.0 * isotropic) * t * per_distance
    return Rows(edges, rows, radial, isotropic, bend)


def rows_pullback(
    adjoint: Tensor,
    edges: Tensor,
    radial: Tensor,
    isotropic: Tensor,
    bend: Tensor,
) -> Tensor:
    """Return dE/dr_ij `(ncentre, nnei, 3)` [eV/Å] from dE/drow `(ncentre, nnei, 4)`; see `Rows`."""
    along = (adjoint[..., 1:] * edges).sum(-1)
    scale = torch.addcmul(radial * adjoint[..., 0], bend, along)
    return torch.addcmul(isotropic.unsqueeze(-1) * adjoint[..., 1:], scale.unsqueeze(-1), edges)


def sums_pullback(adjoint: Tensor, a: Tensor, axis: int, slots: int) -> Tensor:
    """Return dE/d(slots·A) like A `(ncentre, 4, M)` from dE/dD; D begins with AᵀA_axis."""
    width = a.shape[2]
    d_bar = adjoint[:, : width * axis].reshape(-1, width, axis)
    a_bar = torch.bmm(a[:, :, :axis], d_bar.transpose(1, 2))
    a_bar[:, :, :axis] += torch.bmm(a, d_bar)
    return a_bar / slots
