"""Environment rows of `model.descriptor.environment` for TorchScript, and their pullbacks."""

from typing import NamedTuple

import torch

from deepmd_muon.model.descriptor.environment import quintic


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
        See `Environment`.
    """

    edges: torch.Tensor
    rows: torch.Tensor
    radial: torch.Tensor
    isotropic: torch.Tensor
    bend: torch.Tensor


def environment_rows(
    edges: torch.Tensor, empty: torch.Tensor, rcut: float, rcut_smth: float, protection: float
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


def rows_pullback(adjoint: torch.Tensor, rows: Rows) -> torch.Tensor:
    """Return dE/dr_ij `(ncentre, nnei, 3)` [eV/Å] from dE/drow `(ncentre, nnei, 4)`."""
    along = (adjoint[..., 1:] * rows.edges).sum(-1)
    scale = torch.addcmul(rows.radial * adjoint[..., 0], rows.bend, along)
    return torch.addcmul(
        rows.isotropic.unsqueeze(-1) * adjoint[..., 1:], scale.unsqueeze(-1), rows.edges
    )


def sums_pullback(adjoint: torch.Tensor, a: torch.Tensor, axis: int, slots: int) -> torch.Tensor:
    """Return dE/d(slots·A) like A `(ncentre, 4, M)` from dE/dD; D begins with AᵀA_axis."""
    width = a.shape[2]
    d_bar = adjoint[:, : width * axis].reshape(-1, width, axis)
    a_bar = torch.bmm(a[:, :, :axis], d_bar.transpose(1, 2))
    a_bar[:, :, :axis] += torch.bmm(a, d_bar)
    return a_bar / slots
