"""The smooth environment of an atom, without parameters: rows s(r)·(1, x/r, y/r, z/r).

With t = 1/(r + protection) and the switch w, a row is w·(t, x·t², y·t², z·t²). On a GPU, kernels
compute rows and derivatives (`environment_kernels`); the operations here define them.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from deepmd_muon.model.descriptor.reach import Reach
from deepmd_muon.model.nn import triton_support
from deepmd_muon.model.nn.layers import linear


class Jacobian(NamedTuple):
    """The derivative of environment rows by edge vectors.

    ∂row₀/∂x_k = radial·x_k and ∂row_i/∂x_k = isotropic·δ_ik + bend·x_i·x_k.

    Attributes
    ----------
    reach
        The radii.
    stored
        What the derivative is computed from. With kernels, which compute the factors again: edge
        vectors `(nreal, nnei, 3)` [Å] and neighbours `(nreal, nnei)`. Otherwise edge vectors, and
        radial, isotropic and bend `(nreal, nnei)` [1/Å³, 1/Å², 1/Å⁴]; empty slots are at the
        cut-off, where everything vanishes.
    """

    reach: Reach
    stored: tuple[Tensor, ...]


class Environment(NamedTuple):
    """Environment rows of every edge `(nreal, nnei, 4)` [1/Å], and their derivative."""

    rows: Tensor
    jacobian: Jacobian


def quintic(u: Tensor) -> Tensor:
    """Return −u³·(10 − 15u + 6u²), in torch and TorchScript.

    1 + quintic(u) is the switch that falls from 1 at u = 0 to 0 at u = 1. −quintic(1 − u) is the
    same without cancellation near its end.
    """
    return u * u * u * ((15.0 - 6.0 * u) * u - 10.0)


def environment(edges: Tensor, neighbor: Tensor, reach: Reach) -> Environment:
    """Compute environment rows with the quintic switch, and their derivative.

    Parameters
    ----------
    edges
        Vectors from centre to neighbour `(nreal, nnei, 3)` [Å].
    neighbor
        Negative where a slot has no neighbour `(nreal, nnei)`.
    reach
        Of the switch.
    """
    if triton_support.usable(edges.device):
        from deepmd_muon.model.descriptor import environment_kernels

        rows = environment_kernels.environment(edges, neighbor, reach)
        return Environment(rows, Jacobian(reach, (edges, neighbor)))
    rcut, rcut_smth, protection = reach
    edges = torch.where((neighbor < 0).unsqueeze(-1), rcut, edges)
    square = (edges * edges).sum(-1)
    distance = square.sqrt()
    u = ((distance - rcut_smth) / (rcut - rcut_smth)).clamp_(0.0, 1.0)
    switch = quintic(u) + 1.0
    slope = (u * (u - 1.0)).square_().mul_(-30.0 / (rcut - rcut_smth))
    t = 1.0 / (distance + protection) if protection else 1.0 / distance
    per_distance = 1.0 / distance if protection else t
    isotropic = switch * t * t
    rows = torch.cat([(switch * t).unsqueeze(-1), isotropic.unsqueeze(-1) * edges], dim=-1)
    slope_t = slope * t
    radial = (slope_t - isotropic) * per_distance
    bend = (slope_t - 2.0 * isotropic) * t * per_distance
    return Environment(rows, Jacobian(reach, (edges, radial, isotropic, bend)))


def edge_derivative(adjoint: Tensor, factor: Tensor, jacobian: Jacobian) -> Tensor:
    """Return dE/dr_ij `(nreal, nnei, 3)` [eV/Å] from dE/dR `(nreal, nnei, 4)`.

    R is `factor` `(nreal, 4)` · row + constant. The result is linear in dE/dR, the only argument
    that depends on parameters.
    """
    reach, stored = jacobian
    return linear(partial(_pull, reach), partial(_push, reach), adjoint, factor, *stored)


def _pull(reach: Reach, adjoint: Tensor, factor: Tensor, edges: Tensor, *stored: Tensor) -> Tensor:
    if len(stored) == 1:  # the neighbours, for kernels
        from deepmd_muon.model.descriptor import environment_kernels

        return environment_kernels.pull(adjoint, factor, edges, *stored, reach)
    radial, isotropic, bend = stored
    row_adjoint = (adjoint * factor.unsqueeze(1)).to(edges.dtype)
    along = (row_adjoint[..., 1:] * edges).sum(-1)
    scale = torch.addcmul(radial * row_adjoint[..., 0], bend, along)
    return torch.addcmul(isotropic.unsqueeze(-1) * row_adjoint[..., 1:], scale.unsqueeze(-1), edges)


def _push(
    reach: Reach, cotangent: Tensor, factor: Tensor, edges: Tensor, *stored: Tensor
) -> Tensor:
    """Return the Jacobian times the cotangent."""
    if len(stored) == 1:  # the neighbours, for kernels
        from deepmd_muon.model.descriptor import environment_kernels

        return environment_kernels.push(cotangent, factor, edges, *stored, reach)
    radial, isotropic, bend = stored
    along = (cotangent * edges).sum(-1)
    out = torch.empty((*along.shape, 4), dtype=cotangent.dtype, device=cotangent.device)
    torch.mul(radial, along, out=out[..., 0])
    torch.mul(isotropic.unsqueeze(-1), cotangent, out=out[..., 1:])
    out[..., 1:].addcmul_((bend * along).unsqueeze(-1), edges)
    return out.to(factor.dtype) * factor.unsqueeze(1)
