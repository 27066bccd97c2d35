"""What DPA-1 reads of the positions: standardised rows of every edge, unit vectors and switches.

For r_ij = (x_k) of length r, t = 1/(r + protection) and the switch w,

    row = w·(t, x·t², y·t², z·t²);   R = (row − mean)/deviation;   e = r_ij/r;   D = e·min(1, L/1e-12), L = Σ_k R_k·e_k.

deepmd-kit divides the last three entries of R by their length, but at least by 1e-12: so D is a unit vector, but
shorter where R is, which is within some 1e-4 Å of the cut-off. Without smooth attention, this is where the energy that
a neighbour adds there fades, with forces.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from deepmd_muon.model.descriptor.dpa1.attention import NORMALIZE_EPS
from deepmd_muon.model.descriptor.environment import Reach, quintic
from deepmd_muon.model.nn import triton_support


def geometry(
    edges: Tensor, neighbor: Tensor, mean: Tensor, inverse: Tensor, reach: Reach, with_switch: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return R `(nreal, nnei, 4)`, D `(nreal, nnei, 3)`, and w `(nreal, nnei)` if `with_switch`, 0 in empty slots.

    All are in the dtype of `mean`, and twice differentiable by the edges. Kernels know them without the switch; torch's
    operations define the result.

    Parameters
    ----------
    edges, neighbor, reach
        As in `environment`.
    mean, inverse
        Mean and inverse deviation of the rows of every atom `(nreal, 4)`.
    with_switch
        Whether w is wanted.
    """
    if not with_switch and triton_support.usable(edges.device):
        rows, direction = _Geometry.apply(edges, neighbor, mean, inverse, reach)
        return rows, direction, None
    rows, switch, unit = smooth_rows(edges, neighbor >= 0, *reach)
    rows = (rows.to(mean.dtype) - mean.unsqueeze(1)) * inverse.unsqueeze(1)
    return (
        rows,
        shortened(unit.to(mean.dtype), rows),
        switch.to(mean.dtype) if with_switch else None,
    )


def smooth_rows(
    edges: Tensor, real: Tensor, rcut: float, rcut_smth: float, protection: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return environment rows `(nreal, nnei, 4)`, w `(nreal, nnei)` and e `(nreal, nnei, 3)`, in torch and TorchScript.

    `real` says which slots have neighbours.
    """
    edges = torch.where(real.unsqueeze(-1), edges, rcut)
    distance = (edges * edges).sum(-1).sqrt()
    v = ((rcut - distance) / (rcut - rcut_smth)).clamp(0.0, 1.0)
    switch = (
        -quintic(v) * real
    )  # without cancellation at the cut-off, which `shortened` would magnify
    t = 1.0 / (distance + protection)
    rows = torch.cat([(switch * t).unsqueeze(-1), (switch * t * t).unsqueeze(-1) * edges], dim=-1)
    return rows, switch, edges / distance.unsqueeze(-1)


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
    def backward(ctx: Any, of_rows: Tensor, of_direction: Tensor) -> Any:
        return (
            _Pull.apply(of_rows, of_direction, *ctx.saved_tensors, ctx.reach),
            None,
            None,
            None,
            None,
        )


class _Pull(torch.autograd.Function):
    """The cotangent of the edges, which is linear in those of R and D; they alone have a derivative."""

    @staticmethod
    def forward(ctx: Any, of_rows: Tensor, of_direction: Tensor, *data: Any) -> Tensor:
        from deepmd_muon.model.descriptor.dpa1 import geometry_kernels

        ctx.reach = data[-1]
        ctx.save_for_backward(*data[:-1])
        found: Tensor = geometry_kernels.pull(of_rows, of_direction, *data)
        return found

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, along: Tensor) -> Any:
        from deepmd_muon.model.descriptor.dpa1 import geometry_kernels

        edges, neighbor, mean, inverse = ctx.saved_tensors
        rows, direction = geometry_kernels.push(along, edges, neighbor, mean, inverse, ctx.reach)
        return rows, direction, None, None, None, None, None
