"""What DPA-1 reads of the positions: standardised rows of every edge, unit vectors and switches.

For r_ij = (x_k) of length r, t = 1/(r + protection) and the switch w,

    row = w·(t, x·t², y·t², z·t²);   R = (row − mean)/deviation;
    e = r_ij/r;   D = e·min(1, L/1e-12), L = Σ_k R_k·e_k.

deepmd-kit divides the last three entries of R by their length, but at least by 1e-12. So D is a
unit vector, except within some 1e-4 Å of the cut-off, where R is shorter than 1e-12. Without smooth
attention, the energy of a neighbour fades there, with forces.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from deepmd_muon.model.descriptor.dpa1.attention import NORMALIZE_EPS
from deepmd_muon.model.descriptor.environment import quintic
from deepmd_muon.model.descriptor.reach import Reach
from deepmd_muon.model.nn import triton_support


def geometry(
    edges: Tensor, neighbor: Tensor, mean: Tensor, inverse: Tensor, reach: Reach, with_switch: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return R, D and the switch, twice differentiable by the edges, in the dtype of `mean`.

    Parameters
    ----------
    edges, neighbor, reach
        As in `environment`.
    mean, inverse
        Mean and inverse deviation of the rows of every atom `(nreal, 4)`.
    with_switch
        Whether w is wanted. The kernels do not compute it.

    Returns
    -------
    tuple
        R `(nreal, nnei, 4)`; D `(nreal, nnei, 3)`; w `(nreal, nnei)`, 0 in empty slots, or None.
    """
    if not with_switch and triton_support.usable(edges.device):
        rows, direction = _Geometry.apply(edges, neighbor, mean, inverse, reach)
        return rows, direction, None
    rows, switch, unit = smooth_rows(edges, neighbor >= 0, *reach)
    rows = (rows.to(mean.dtype) - mean.unsqueeze(1)) * inverse.unsqueeze(1)
    direction = shortened(unit.to(mean.dtype), rows)
    return rows, direction, switch.to(mean.dtype) if with_switch else None


def smooth_rows(
    edges: Tensor, real: Tensor, rcut: float, rcut_smth: float, protection: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return environment rows, w and e; also in TorchScript.

    `real` says which slots have neighbours. The results are `(nreal, nnei, 4)`, `(nreal, nnei)` and
    `(nreal, nnei, 3)`.
    """
    edges = torch.where(real.unsqueeze(-1), edges, rcut)
    distance = (edges * edges).sum(-1).sqrt()
    v = ((rcut - distance) / (rcut - rcut_smth)).clamp(0.0, 1.0)
    # 1 + quintic(1 − v) would cancel near the cut-off, and `shortened` would magnify the error.
    switch = -quintic(v) * real
    t = 1.0 / (distance + protection)
    radial = (switch * t).unsqueeze(-1)
    angular = (switch * t * t).unsqueeze(-1) * edges
    return torch.cat([radial, angular], dim=-1), switch, edges / distance.unsqueeze(-1)


def shortened(direction: Tensor, rows: Tensor, least: float = NORMALIZE_EPS) -> Tensor:
    """Return D `(nreal, nnei, 3)` from e and R."""
    length = (rows[..., 1:4] * direction).sum(-1, keepdim=True)
    return direction * (length * (1.0 / least)).clamp(max=1.0)


class _Geometry(torch.autograd.Function):
    """R and D by a kernel."""

    @staticmethod
    def forward(
        ctx: Any, edges: Tensor, neighbor: Tensor, mean: Tensor, inverse: Tensor, reach: Reach
    ) -> Any:
        from deepmd_muon.model.descriptor.dpa1 import geometry_kernels

        ctx.reach = reach
        ctx.save_for_backward(edges, neighbor, mean, inverse)
        return geometry_kernels.geometry(edges, neighbor, mean, inverse, reach)

    @staticmethod
    def backward(ctx: Any, rows_bar: Tensor, direction_bar: Tensor) -> Any:
        edges_bar = _Pull.apply(rows_bar, direction_bar, ctx.reach, *ctx.saved_tensors)
        return edges_bar, None, None, None, None


class _Pull(torch.autograd.Function):
    """The cotangent of the edges, which is linear in R̄ and D̄; only these have a derivative."""

    @staticmethod
    def forward(
        ctx: Any, rows_bar: Tensor, direction_bar: Tensor, reach: Reach, *tensors: Tensor
    ) -> Tensor:
        from deepmd_muon.model.descriptor.dpa1 import geometry_kernels

        ctx.reach = reach
        ctx.save_for_backward(*tensors)
        edges, neighbor, mean, inverse = tensors
        return geometry_kernels.pull(
            rows_bar, direction_bar, edges, neighbor, mean=mean, inverse=inverse, reach=reach
        )

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, edges_dot: Tensor) -> Any:
        from deepmd_muon.model.descriptor.dpa1 import geometry_kernels

        edges, neighbor, mean, inverse = ctx.saved_tensors
        rows_dot, direction_dot = geometry_kernels.push(
            edges_dot, edges, neighbor, mean=mean, inverse=inverse, reach=ctx.reach
        )
        return rows_dot, direction_dot, None, None, None, None, None
