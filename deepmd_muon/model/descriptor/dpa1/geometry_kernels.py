"""Triton kernels of DPA-1's rows and directions, and of their derivative.

`geometry` has the formulas and defines the results; `test_geometry_kernels` compares them. Edges
are numbered as in `environment_kernels`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from deepmd_muon.model.descriptor.dpa1.attention import NORMALIZE_EPS
from deepmd_muon.model.descriptor.environment_kernels import (
    Row,
    edges_of_program,
    launch_on_edges,
    load_row,
    loaded_edges,
    row_jacobian,
    store_row,
    switched,
)
from deepmd_muon.model.descriptor.reach import Reach
from deepmd_muon.model.nn.vector_kernels import (
    Vector,
    across,
    cast,
    dot,
    load_vector,
    minus,
    plus,
    scaled,
    store_vector,
    times,
)

_LEAST = tl.constexpr(NORMALIZE_EPS)


class Rows(NamedTuple):
    """What all kernels compute of some edges."""

    row: Any  # R, a Row
    direction: Any  # e = r_ij/r
    per_distance: Any  # 1/r
    length: Any  # L/1e-12; D is shorter than e where this is below 1
    inverse: Any  # Row: inverse deviation of each component


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
    r = loaded_edges(edges, neighbor, edge, real, reach)
    f = switched(r, reach)
    rows_ij = _rows(r, f, mean, inverse, atom=edge // nnei, real=real)
    store_row(rows, edge, real, rows_ij.row)
    shortening = tl.minimum(rows_ij.length, 1.0)
    store_vector(direction, edge, real, scaled(shortening, rows_ij.direction))


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
    r = loaded_edges(edges, neighbor, edge, real, reach)
    f = switched(r, reach)
    rows_ij = _rows(r, f, mean, inverse, atom=edge // nnei, real=real)
    e = rows_ij.direction
    d_bar = cast(load_vector(direction_bar, edge, real, 0.0), tl.float64)
    length_bar = tl.where(rows_ij.length <= 1.0, dot(d_bar, e) / _LEAST, 0.0)
    shortening = tl.minimum(rows_ij.length, 1.0)
    e_bar = plus(scaled(shortening, d_bar), scaled(length_bar, rows_ij.row.vector))
    row_bar = _to_float64(load_row(rows_bar, edge, real))
    inverse_ij = rows_ij.inverse
    a = times(plus(row_bar.vector, scaled(length_bar, e)), inverse_ij.vector)
    j = row_jacobian(r, reach)
    scale = j.radial * (row_bar.radial * inverse_ij.radial) + j.bend * dot(a, r)
    through_row = plus(scaled(j.isotropic, a), scaled(scale, r))
    through_direction = scaled(rows_ij.per_distance, across(e_bar, e))
    has_neighbor = real & (tl.load(neighbor + edge, real, -1) >= 0)
    edge_bar = _where(has_neighbor, plus(through_row, through_direction))
    store_vector(edges_bar, edge, real, edge_bar)


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
    r = loaded_edges(edges, neighbor, edge, real, reach)
    f = switched(r, reach)
    rows_ij = _rows(r, f, mean, inverse, atom=edge // nnei, real=real)
    has_neighbor = real & (tl.load(neighbor + edge, real, -1) >= 0)
    c = load_vector(edges_dot, edge, has_neighbor, 0.0)
    j = row_jacobian(r, reach)
    along = dot(c, r)
    inverse_ij = rows_ij.inverse
    vector = plus(scaled(j.isotropic, c), scaled(j.bend * along, r))
    row_dot = Row(j.radial * along * inverse_ij.radial, times(vector, inverse_ij.vector))
    store_row(rows_dot, edge, real, row_dot)
    e = rows_ij.direction
    e_dot = scaled(rows_ij.per_distance, across(c, e))
    length_dot = dot(row_dot.vector, e) + dot(rows_ij.row.vector, e_dot)
    shortening_dot = tl.where(rows_ij.length <= 1.0, length_dot / _LEAST, 0.0)
    shortening = tl.minimum(rows_ij.length, 1.0)
    d_dot = plus(scaled(shortening, e_dot), scaled(shortening_dot, e))
    store_vector(direction_dot, edge, real, d_dot)


@triton.jit
def _rows(r, f, mean, inverse, atom, real):
    """Return `Rows` from r_ij and `Switched`."""
    per_distance = 1.0 / f.distance
    isotropic = f.switch * f.t * f.t
    inverse_ij = _to_float64(load_row(inverse, atom, real))
    mean_ij = _to_float64(load_row(mean, atom, real))
    radial = (f.switch * f.t - mean_ij.radial) * inverse_ij.radial
    vector = times(minus(scaled(isotropic, r), mean_ij.vector), inverse_ij.vector)
    direction = scaled(per_distance, r)
    return Rows(
        row=Row(radial, vector),
        direction=direction,
        per_distance=per_distance,
        length=dot(vector, direction) / _LEAST,
        inverse=inverse_ij,
    )


@triton.jit
def _to_float64(row):
    return Row(row.radial.to(tl.float64), cast(row.vector, tl.float64))


@triton.jit
def _where(mask, a):
    """Return a vector, and 0 where the mask is false."""
    return Vector(tl.where(mask, a.x, 0.0), tl.where(mask, a.y, 0.0), tl.where(mask, a.z, 0.0))
