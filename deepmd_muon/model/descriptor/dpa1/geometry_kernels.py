"""Triton kernels of DPA-1's rows and directions, and of their derivative.

`geometry` has the formulas and defines the results; `test_geometry_kernels` compares them. Edges
are numbered as in `environment_kernels`. The number behind a name is a component: 1, 2, 3 for x, y,
z, and 0 for the radial one of a row.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from deepmd_muon.model.descriptor.dpa1.attention import NORMALIZE_EPS
from deepmd_muon.model.descriptor.environment_kernels import (
    curvature,
    edges_of_program,
    launch_on_edges,
    load_three,
    loaded_edges,
    store_four,
    store_three,
    switched,
)
from deepmd_muon.model.descriptor.reach import Reach

_LEAST = tl.constexpr(NORMALIZE_EPS)


class Rows(NamedTuple):
    """What all kernels compute of some edges."""

    r0: Any  # R
    r1: Any
    r2: Any
    r3: Any
    e1: Any  # e = r_ij/r
    e2: Any
    e3: Any
    per_distance: Any  # 1/r
    length: Any  # L/1e-12; D is shorter than e where this is below 1
    inverse0: Any  # inverse deviation of each component
    inverse1: Any
    inverse2: Any
    inverse3: Any


def geometry(
    edges: Tensor, neighbor: Tensor, mean: Tensor, inverse: Tensor, reach: Reach
) -> tuple[Tensor, Tensor]:
    """Return R and D; see `geometry.geometry`."""
    outputs = {
        "rows": mean.new_empty(*neighbor.shape, 4),
        "direction": mean.new_empty(*neighbor.shape, 3),
    }
    launch_on_edges(_geometry_kernel, edges, neighbor, reach, mean=mean, inverse=inverse, **outputs)
    return outputs["rows"], outputs["direction"]


def pull(
    rows_bar: Tensor,
    direction_bar: Tensor,
    edges: Tensor,
    neighbor: Tensor,
    mean: Tensor,
    inverse: Tensor,
    reach: Reach,
) -> Tensor:
    """Return the cotangent of the edges (nreal, nnei, 3) from those of R and D."""
    edges_bar = edges.new_empty(*neighbor.shape, 3)
    launch_on_edges(
        _pull_kernel,
        edges,
        neighbor,
        reach,
        edges_bar=edges_bar,
        rows_bar=rows_bar.contiguous(),
        direction_bar=direction_bar.contiguous(),
        mean=mean,
        inverse=inverse,
    )
    return edges_bar


def push(
    edges_dot: Tensor, edges: Tensor, neighbor: Tensor, mean: Tensor, inverse: Tensor, reach: Reach
) -> tuple[Tensor, Tensor]:
    """Apply the transpose of `pull`: return derivatives of R and D along a change of the edges."""
    outputs = {
        "rows_dot": mean.new_empty(*neighbor.shape, 4),
        "direction_dot": mean.new_empty(*neighbor.shape, 3),
    }
    launch_on_edges(
        _push_kernel,
        edges,
        neighbor,
        reach,
        edges_dot=edges_dot.contiguous(),
        mean=mean,
        inverse=inverse,
        **outputs,
    )
    return outputs["rows_dot"], outputs["direction_dot"]


@triton.jit(do_not_specialize=["count", "nnei"])
def _geometry_kernel(
    rows,  # (nreal, nnei, 4), written: R
    direction,  # (nreal, nnei, 3), written: D
    edges,  # (nreal, nnei, 3), float64
    neighbor,  # (nreal, nnei), negative in empty slots
    mean,  # (nreal, 4)
    inverse,  # (nreal, 4)
    count,
    nnei,
    reach,
    block: tl.constexpr,
):
    """Write R = (row − mean)·inverse and D = e·min(1, L/1e-12)."""
    edge, real = edges_of_program(count, block)
    x, y, z = loaded_edges(edges, neighbor, edge, real, reach)
    f = switched(x, y, z, reach)
    r = _rows(x, y, z, f, mean=mean, inverse=inverse, edge=edge, nnei=nnei, real=real)
    store_four(rows, edge, real, a=r.r0, b=r.r1, c=r.r2, d=r.r3)
    shortening = tl.minimum(r.length, 1.0)
    store_three(
        direction, edge, real, x=r.e1 * shortening, y=r.e2 * shortening, z=r.e3 * shortening
    )


@triton.jit(do_not_specialize=["count", "nnei"])
def _pull_kernel(
    edges_bar,  # (nreal, nnei, 3), written
    rows_bar,  # (nreal, nnei, 4): R̄
    direction_bar,  # (nreal, nnei, 3): D̄
    edges,
    neighbor,
    mean,
    inverse,
    count,
    nnei,
    reach,
    block: tl.constexpr,
):
    """Write the cotangents of the edges, 0 in empty slots.

    With q = min(1, L/1e-12), D = e·q depends on e and, through L = R·e, on R. So

        L̄ = D̄·e/1e-12 where L < 1e-12, else 0;   ē = q·D̄ + L̄·R;   a = (R̄ + L̄·(0, e))·inverse.

    The row contributes what `environment_kernels._pull_kernel` writes from a, the direction e
    contributes (ē − (ē·e)·e)/r.
    """
    edge, real = edges_of_program(count, block)
    x, y, z = loaded_edges(edges, neighbor, edge, real, reach)
    f = switched(x, y, z, reach)
    r = _rows(x, y, z, f, mean=mean, inverse=inverse, edge=edge, nnei=nnei, real=real)
    d1, d2, d3 = load_three(direction_bar, edge, real)
    d1 = d1.to(tl.float64)
    d2 = d2.to(tl.float64)
    d3 = d3.to(tl.float64)
    shortening = tl.minimum(r.length, 1.0)
    along = d1 * r.e1 + d2 * r.e2 + d3 * r.e3
    length_bar = tl.where(r.length <= 1.0, along / _LEAST, 0.0)
    a0 = tl.load(rows_bar + edge * 4, real, 0.0).to(tl.float64)
    a1 = tl.load(rows_bar + edge * 4 + 1, real, 0.0).to(tl.float64)
    a2 = tl.load(rows_bar + edge * 4 + 2, real, 0.0).to(tl.float64)
    a3 = tl.load(rows_bar + edge * 4 + 3, real, 0.0).to(tl.float64)
    a0 = a0 * r.inverse0
    a1 = (a1 + length_bar * r.e1) * r.inverse1
    a2 = (a2 + length_bar * r.e2) * r.inverse2
    a3 = (a3 + length_bar * r.e3) * r.inverse3
    e1_bar = d1 * shortening + length_bar * r.r1
    e2_bar = d2 * shortening + length_bar * r.r2
    e3_bar = d3 * shortening + length_bar * r.r3
    inward = e1_bar * r.e1 + e2_bar * r.e2 + e3_bar * r.e3
    j = curvature(x, y, z, reach)
    scale = j.radial * a0 + j.bend * (a1 * x + a2 * y + a3 * z)
    x_bar = j.isotropic * a1 + scale * x + (e1_bar - inward * r.e1) * r.per_distance
    y_bar = j.isotropic * a2 + scale * y + (e2_bar - inward * r.e2) * r.per_distance
    z_bar = j.isotropic * a3 + scale * z + (e3_bar - inward * r.e3) * r.per_distance
    has_neighbor = real & (tl.load(neighbor + edge, real, -1) >= 0)
    store_three(
        edges_bar,
        edge,
        real,
        x=tl.where(has_neighbor, x_bar, 0.0),
        y=tl.where(has_neighbor, y_bar, 0.0),
        z=tl.where(has_neighbor, z_bar, 0.0),
    )


@triton.jit(do_not_specialize=["count", "nnei"])
def _push_kernel(
    rows_dot,  # (nreal, nnei, 4), written: Ṙ
    direction_dot,  # (nreal, nnei, 3), written: Ḋ
    edges_dot,  # (nreal, nnei, 3)
    edges,
    neighbor,
    mean,
    inverse,
    count,
    nnei,
    reach,
    block: tl.constexpr,
):
    """Write the tangents of R and D along c, the tangent of the edges; empty slots have c = 0.

    With q = min(1, L/1e-12),

        Ṙ = (radial·(c·r_ij), isotropic·c + bend·(c·r_ij)·r_ij)·inverse;   ė = (c − (c·e)·e)/r;
        Ḋ = q·ė + e·q̇,   q̇ = (Ṙ·e + R·ė)/1e-12 where L < 1e-12, else 0.
    """
    edge, real = edges_of_program(count, block)
    x, y, z = loaded_edges(edges, neighbor, edge, real, reach)
    f = switched(x, y, z, reach)
    r = _rows(x, y, z, f, mean=mean, inverse=inverse, edge=edge, nnei=nnei, real=real)
    has_neighbor = real & (tl.load(neighbor + edge, real, -1) >= 0)
    c1, c2, c3 = load_three(edges_dot, edge, has_neighbor)
    j = curvature(x, y, z, reach)
    along = c1 * x + c2 * y + c3 * z
    turn = j.bend * along
    r1_dot = (j.isotropic * c1 + turn * x) * r.inverse1
    r2_dot = (j.isotropic * c2 + turn * y) * r.inverse2
    r3_dot = (j.isotropic * c3 + turn * z) * r.inverse3
    store_four(rows_dot, edge, real, a=j.radial * along * r.inverse0, b=r1_dot, c=r2_dot, d=r3_dot)
    outward = c1 * r.e1 + c2 * r.e2 + c3 * r.e3
    e1_dot = (c1 - outward * r.e1) * r.per_distance
    e2_dot = (c2 - outward * r.e2) * r.per_distance
    e3_dot = (c3 - outward * r.e3) * r.per_distance
    length_dot = (
        r1_dot * r.e1 + r2_dot * r.e2 + r3_dot * r.e3
        + r.r1 * e1_dot + r.r2 * e2_dot + r.r3 * e3_dot
    )  # fmt: skip
    shortening_dot = tl.where(r.length <= 1.0, length_dot / _LEAST, 0.0)
    shortening = tl.minimum(r.length, 1.0)
    store_three(
        direction_dot,
        edge,
        real,
        x=e1_dot * shortening + r.e1 * shortening_dot,
        y=e2_dot * shortening + r.e2 * shortening_dot,
        z=e3_dot * shortening + r.e3 * shortening_dot,
    )


@triton.jit
def _rows(x, y, z, f, mean, inverse, edge, nnei, real):
    """Return `Rows` from r_ij and `Switched`."""
    per_distance = 1.0 / f.distance
    isotropic = f.switch * f.t * f.t
    row = edge // nnei * 4
    inverse0 = _load_number(inverse + row, real)
    inverse1 = _load_number(inverse + row + 1, real)
    inverse2 = _load_number(inverse + row + 2, real)
    inverse3 = _load_number(inverse + row + 3, real)
    r0 = (f.switch * f.t - _load_number(mean + row, real)) * inverse0
    r1 = (isotropic * x - _load_number(mean + row + 1, real)) * inverse1
    r2 = (isotropic * y - _load_number(mean + row + 2, real)) * inverse2
    r3 = (isotropic * z - _load_number(mean + row + 3, real)) * inverse3
    e1 = x * per_distance
    e2 = y * per_distance
    e3 = z * per_distance
    return Rows(
        r0=r0,
        r1=r1,
        r2=r2,
        r3=r3,
        e1=e1,
        e2=e2,
        e3=e3,
        per_distance=per_distance,
        length=(r1 * e1 + r2 * e2 + r3 * e3) / _LEAST,
        inverse0=inverse0,
        inverse1=inverse1,
        inverse2=inverse2,
        inverse3=inverse3,
    )


@triton.jit
def _load_number(pointer, mask):
    return tl.load(pointer, mask, 0.0).to(tl.float64)
