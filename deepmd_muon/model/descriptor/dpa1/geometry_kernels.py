"""Triton kernels of DPA-1's rows and directions, and of their derivative; `geometry` defines the results."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from deepmd_muon.model.descriptor.dpa1.attention import NORMALIZE_EPS
from deepmd_muon.model.descriptor.environment import Reach
from deepmd_muon.model.descriptor.environment_kernels import (
    BLOCK,
    WARPS_OF_BLOCK,
    curvature,
    loaded_edges,
    store_four,
    switched,
)

_LEAST = tl.constexpr(NORMALIZE_EPS)


@triton.jit
def _standard(mean, inverse, edge, nnei, real, k: tl.constexpr):
    """Return mean and inverse deviation of component k."""
    at = edge // nnei * 4 + k
    return tl.load(mean + at, real, 0.0).to(tl.float64), tl.load(inverse + at, real, 0.0).to(
        tl.float64
    )


@triton.jit
def _rows(
    edges, neighbor, mean, inverse, edge, nnei, real,
    rcut: tl.constexpr, rcut_smth: tl.constexpr, protection: tl.constexpr,
):  # fmt: skip
    """Return components of r_ij, of R and of e, the inverse distance, and L over the least length."""
    x, y, z = loaded_edges(edges, neighbor, edge, real, rcut)
    distance, t, switch, _ = switched(x, y, z, rcut, rcut_smth, protection)
    per_distance, isotropic = 1.0 / distance, switch * t * t
    mean0, inverse0 = _standard(mean, inverse, edge, nnei, real, 0)
    mean1, inverse1 = _standard(mean, inverse, edge, nnei, real, 1)
    mean2, inverse2 = _standard(mean, inverse, edge, nnei, real, 2)
    mean3, inverse3 = _standard(mean, inverse, edge, nnei, real, 3)
    r0, r1 = (switch * t - mean0) * inverse0, (isotropic * x - mean1) * inverse1
    r2, r3 = (isotropic * y - mean2) * inverse2, (isotropic * z - mean3) * inverse3
    e1, e2, e3 = x * per_distance, y * per_distance, z * per_distance
    length = (r1 * e1 + r2 * e2 + r3 * e3) / _LEAST
    return (
        x,
        y,
        z,
        r0,
        r1,
        r2,
        r3,
        e1,
        e2,
        e3,
        per_distance,
        length,
        inverse0,
        inverse1,
        inverse2,
        inverse3,
    )


@triton.jit
def _geometry_kernel(
    rows, direction, edges, neighbor, mean, inverse, count, nnei,
    rcut: tl.constexpr, rcut_smth: tl.constexpr, protection: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    """Write R and D of some edges."""
    edge = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    real = edge < count
    _, _, _, r0, r1, r2, r3, e1, e2, e3, _, length, _, _, _, _ = _rows(
        edges, neighbor, mean, inverse, edge, nnei, real, rcut, rcut_smth, protection
    )
    store_four(rows, edge, real, r0, r1, r2, r3)
    short = tl.minimum(length, 1.0)
    dtype: tl.constexpr = direction.dtype.element_ty
    tl.store(direction + edge * 3, (e1 * short).to(dtype), real)
    tl.store(direction + edge * 3 + 1, (e2 * short).to(dtype), real)
    tl.store(direction + edge * 3 + 2, (e3 * short).to(dtype), real)


@triton.jit
def _pull_kernel(
    out, of_rows, of_direction, edges, neighbor, mean, inverse, count, nnei,
    rcut: tl.constexpr, rcut_smth: tl.constexpr, protection: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    """Write the cotangents of some edges."""
    edge = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    real = edge < count
    (
        x,
        y,
        z,
        _,
        r1,
        r2,
        r3,
        e1,
        e2,
        e3,
        per_distance,
        length,
        inverse0,
        inverse1,
        inverse2,
        inverse3,
    ) = _rows(edges, neighbor, mean, inverse, edge, nnei, real, rcut, rcut_smth, protection)
    d1 = tl.load(of_direction + edge * 3, real, 0.0).to(tl.float64)
    d2 = tl.load(of_direction + edge * 3 + 1, real, 0.0).to(tl.float64)
    d3 = tl.load(of_direction + edge * 3 + 2, real, 0.0).to(tl.float64)
    short = tl.minimum(length, 1.0)
    of_length = tl.where(length <= 1.0, (d1 * e1 + d2 * e2 + d3 * e3) / _LEAST, 0.0)
    a0 = tl.load(of_rows + edge * 4, real, 0.0).to(tl.float64) * inverse0
    a1 = (tl.load(of_rows + edge * 4 + 1, real, 0.0).to(tl.float64) + of_length * e1) * inverse1
    a2 = (tl.load(of_rows + edge * 4 + 2, real, 0.0).to(tl.float64) + of_length * e2) * inverse2
    a3 = (tl.load(of_rows + edge * 4 + 3, real, 0.0).to(tl.float64) + of_length * e3) * inverse3
    u1, u2, u3 = (
        d1 * short + of_length * r1,
        d2 * short + of_length * r2,
        d3 * short + of_length * r3,
    )
    inward = u1 * e1 + u2 * e2 + u3 * e3
    radial, isotropic, bend = curvature(x, y, z, rcut, rcut_smth, protection)
    scale = radial * a0 + bend * (a1 * x + a2 * y + a3 * z)
    held = real & (tl.load(neighbor + edge, real, -1) >= 0)
    tl.store(
        out + edge * 3,
        tl.where(held, isotropic * a1 + scale * x + (u1 - inward * e1) * per_distance, 0.0),
        real,
    )
    tl.store(
        out + edge * 3 + 1,
        tl.where(held, isotropic * a2 + scale * y + (u2 - inward * e2) * per_distance, 0.0),
        real,
    )
    tl.store(
        out + edge * 3 + 2,
        tl.where(held, isotropic * a3 + scale * z + (u3 - inward * e3) * per_distance, 0.0),
        real,
    )


@triton.jit
def _push_kernel(
    rows, direction, along, edges, neighbor, mean, inverse, count, nnei,
    rcut: tl.constexpr, rcut_smth: tl.constexpr, protection: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    """Apply the transpose of `_pull_kernel`: write the derivatives of R and D along a change of the edges."""
    edge = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    real = edge < count
    (
        x,
        y,
        z,
        _,
        r1,
        r2,
        r3,
        e1,
        e2,
        e3,
        per_distance,
        length,
        inverse0,
        inverse1,
        inverse2,
        inverse3,
    ) = _rows(edges, neighbor, mean, inverse, edge, nnei, real, rcut, rcut_smth, protection)
    held = real & (tl.load(neighbor + edge, real, -1) >= 0)
    c1, c2 = tl.load(along + edge * 3, held, 0.0), tl.load(along + edge * 3 + 1, held, 0.0)
    c3 = tl.load(along + edge * 3 + 2, held, 0.0)
    radial, isotropic, bend = curvature(x, y, z, rcut, rcut_smth, protection)
    inward = c1 * x + c2 * y + c3 * z
    turn = bend * inward
    m1, m2 = (isotropic * c1 + turn * x) * inverse1, (isotropic * c2 + turn * y) * inverse2
    m3 = (isotropic * c3 + turn * z) * inverse3
    store_four(rows, edge, real, radial * inward * inverse0, m1, m2, m3)
    outward = c1 * e1 + c2 * e2 + c3 * e3
    u1, u2 = (c1 - outward * e1) * per_distance, (c2 - outward * e2) * per_distance
    u3 = (c3 - outward * e3) * per_distance
    of_length = m1 * e1 + m2 * e2 + m3 * e3 + r1 * u1 + r2 * u2 + r3 * u3
    longer = tl.where(length <= 1.0, of_length / _LEAST, 0.0)
    short = tl.minimum(length, 1.0)
    dtype: tl.constexpr = direction.dtype.element_ty
    tl.store(direction + edge * 3, (u1 * short + e1 * longer).to(dtype), real)
    tl.store(direction + edge * 3 + 1, (u2 * short + e2 * longer).to(dtype), real)
    tl.store(direction + edge * 3 + 2, (u3 * short + e3 * longer).to(dtype), real)


def _launch(
    kernel: triton.JITFunction, written: tuple[Tensor, ...], read: tuple[Tensor, ...], reach: Reach
) -> None:
    """Launch a kernel on all edges; `read` ends with edges, neighbours, mean and inverse."""
    neighbor = read[-3]
    count = neighbor.numel()
    if count:
        rcut, rcut_smth, protection = reach
        kernel[(triton.cdiv(count, BLOCK),)](
            *written, *(x.contiguous() for x in read), count, neighbor.shape[1],
            rcut=rcut, rcut_smth=rcut_smth, protection=protection, block=BLOCK, num_warps=WARPS_OF_BLOCK,
        )  # fmt: skip


def _empty(neighbor: Tensor, mean: Tensor) -> tuple[Tensor, Tensor]:
    return mean.new_empty(*neighbor.shape, 4), mean.new_empty(*neighbor.shape, 3)


def geometry(
    edges: Tensor, neighbor: Tensor, mean: Tensor, inverse: Tensor, reach: Reach
) -> tuple[Tensor, Tensor]:
    """Return R and D; see `geometry.geometry`."""
    out = _empty(neighbor, mean)
    _launch(_geometry_kernel, out, (edges, neighbor, mean, inverse), reach)
    return out


def pull(
    of_rows: Tensor,
    of_direction: Tensor,
    edges: Tensor,
    neighbor: Tensor,
    mean: Tensor,
    inverse: Tensor,
    reach: Reach,
) -> Tensor:
    """Return the cotangent of the edges `(nreal, nnei, 3)` from those of R and D."""
    out = edges.new_empty(*neighbor.shape, 3)
    _launch(_pull_kernel, (out,), (of_rows, of_direction, edges, neighbor, mean, inverse), reach)
    return out


def push(
    along: Tensor, edges: Tensor, neighbor: Tensor, mean: Tensor, inverse: Tensor, reach: Reach
) -> tuple[Tensor, Tensor]:
    """Apply the transpose of `pull`: return the derivatives of R and D along a change of the edges."""
    out = _empty(neighbor, mean)
    _launch(_push_kernel, out, (along, edges, neighbor, mean, inverse), reach)
    return out
