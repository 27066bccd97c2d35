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
from deepmd_muon.model.scripted.rows import environment_rows, rows_pullback


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
    values = environment_rows(edges, neighbor < 0, *reach)
    factors = (values.edges, values.radial, values.isotropic, values.bend)
    return Environment(values.rows, Jacobian(reach, factors))


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
    return rows_pullback((adjoint * factor.unsqueeze(1)).to(edges.dtype), edges, *stored)


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
