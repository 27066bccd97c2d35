"""Triton kernels of edge vectors, environment rows and their derivative, one launch each.

`environment` and `deepmd_muon.model.energy_model.edge_vectors` define the results.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 256


@triton.jit
def _edge_vectors_kernel(
    out, coord, box, order, frame, neighbor, shift, count, nnei, periodic: tl.constexpr, block: tl.constexpr
):
    """r_ij = coord[j] + S·box − coord[i]."""
    edge = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    real = edge < count
    atom = edge // nnei
    here = tl.load(order + atom, real, 0) * 3
    there = tl.maximum(tl.load(neighbor + edge, real, 0), 0) * 3
    if periodic:
        cell = tl.load(frame + atom, real, 0) * 9
        s0 = tl.load(shift + edge * 3, real, 0).to(tl.float64)
        s1 = tl.load(shift + edge * 3 + 1, real, 0).to(tl.float64)
        s2 = tl.load(shift + edge * 3 + 2, real, 0).to(tl.float64)
    for k in tl.static_range(3):
        x = tl.load(coord + there + k, real, 0.0) - tl.load(coord + here + k, real, 0.0)
        if periodic:
            x += s0 * tl.load(box + cell + k, real, 0.0)
            x += s1 * tl.load(box + cell + 3 + k, real, 0.0)
            x += s2 * tl.load(box + cell + 6 + k, real, 0.0)
        tl.store(out + edge * 3 + k, x, real)


@triton.jit
def _environment_kernel(
    masked, rows, scalars, edges, empty, count,
    rcut: tl.constexpr, rcut_smth: tl.constexpr, protection: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    """Rows, and the three scalars of their derivative one after another in `scalars` (3, count)."""
    edge = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    real = edge < count
    none = tl.load(empty + edge, real, 1) != 0
    x = tl.where(none, rcut, tl.load(edges + edge * 3, real, 1.0))
    y = tl.where(none, rcut, tl.load(edges + edge * 3 + 1, real, 1.0))
    z = tl.where(none, rcut, tl.load(edges + edge * 3 + 2, real, 1.0))
    distance = tl.sqrt(x * x + y * y + z * z)
    u = tl.minimum(tl.maximum((distance - rcut_smth) / (rcut - rcut_smth), 0.0), 1.0)
    switch = u * u * u * ((15.0 - 6.0 * u) * u - 10.0) + 1.0
    bump = u * (u - 1.0)
    slope = bump * bump * (-30.0 / (rcut - rcut_smth))
    t = 1.0 / (distance + protection)
    per_distance = 1.0 / distance
    isotropic = switch * t * t
    slope_t = slope * t
    tl.store(masked + edge * 3, x, real)
    tl.store(masked + edge * 3 + 1, y, real)
    tl.store(masked + edge * 3 + 2, z, real)
    tl.store(rows + edge * 4, switch * t, real)
    tl.store(rows + edge * 4 + 1, isotropic * x, real)
    tl.store(rows + edge * 4 + 2, isotropic * y, real)
    tl.store(rows + edge * 4 + 3, isotropic * z, real)
    tl.store(scalars + edge, (slope_t - isotropic) * per_distance, real)
    tl.store(scalars + count + edge, isotropic, real)
    tl.store(scalars + 2 * count + edge, (slope_t - 2.0 * isotropic) * t * per_distance, real)


@triton.jit
def _pull_kernel(out, adjoint, factor, edges, radial, isotropic, bend, count, nnei, block: tl.constexpr):
    """dE/dr_ij from dE/dR, R = factor·row + constant."""
    edge = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    real = edge < count
    x, y = tl.load(edges + edge * 3, real, 0.0), tl.load(edges + edge * 3 + 1, real, 0.0)
    z = tl.load(edges + edge * 3 + 2, real, 0.0)
    at = factor + edge // nnei * 4
    a0 = tl.load(adjoint + edge * 4, real, 0.0).to(tl.float64) * tl.load(at, real, 0.0)
    a1 = tl.load(adjoint + edge * 4 + 1, real, 0.0).to(tl.float64) * tl.load(at + 1, real, 0.0)
    a2 = tl.load(adjoint + edge * 4 + 2, real, 0.0).to(tl.float64) * tl.load(at + 2, real, 0.0)
    a3 = tl.load(adjoint + edge * 4 + 3, real, 0.0).to(tl.float64) * tl.load(at + 3, real, 0.0)
    iso = tl.load(isotropic + edge, real, 0.0)
    scale = tl.load(radial + edge, real, 0.0) * a0 + tl.load(bend + edge, real, 0.0) * (a1 * x + a2 * y + a3 * z)
    tl.store(out + edge * 3, iso * a1 + scale * x, real)
    tl.store(out + edge * 3 + 1, iso * a2 + scale * y, real)
    tl.store(out + edge * 3 + 2, iso * a3 + scale * z, real)


@triton.jit
def _push_kernel(out, cotangent, factor, edges, radial, isotropic, bend, count, nnei, block: tl.constexpr):
    """Apply the transpose of `_pull_kernel`."""
    edge = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    real = edge < count
    x, y = tl.load(edges + edge * 3, real, 0.0), tl.load(edges + edge * 3 + 1, real, 0.0)
    z = tl.load(edges + edge * 3 + 2, real, 0.0)
    c1, c2 = tl.load(cotangent + edge * 3, real, 0.0), tl.load(cotangent + edge * 3 + 1, real, 0.0)
    c3 = tl.load(cotangent + edge * 3 + 2, real, 0.0)
    along = c1 * x + c2 * y + c3 * z
    iso, turn = tl.load(isotropic + edge, real, 0.0), tl.load(bend + edge, real, 0.0) * along
    at = factor + edge // nnei * 4
    first = tl.load(radial + edge, real, 0.0) * along
    dtype: tl.constexpr = out.dtype.element_ty
    tl.store(out + edge * 4, (first * tl.load(at, real, 0.0)).to(dtype), real)
    tl.store(out + edge * 4 + 1, ((iso * c1 + turn * x) * tl.load(at + 1, real, 0.0)).to(dtype), real)
    tl.store(out + edge * 4 + 2, ((iso * c2 + turn * y) * tl.load(at + 2, real, 0.0)).to(dtype), real)
    tl.store(out + edge * 4 + 3, ((iso * c3 + turn * z) * tl.load(at + 3, real, 0.0)).to(dtype), real)


@triton.jit
def _scatter_kernel(force, slope, order, neighbor, nnei, block: tl.constexpr):
    """Add the slopes of one atom's edges to the force on it, and take each from that on the neighbour."""
    atom = tl.program_id(0).to(tl.int64)
    here = force + tl.load(order + atom) * 3
    for begin in range(0, nnei, block):
        column = begin + tl.arange(0, block)
        edge = atom * nnei + column
        there = tl.load(neighbor + edge, column < nnei, -1)
        for k in tl.static_range(3):
            part = tl.load(slope + edge * 3 + k, column < nnei, 0.0)
            tl.atomic_add(here + k, tl.sum(part))
            tl.atomic_add(force + there * 3 + k, -part, there >= 0)


@triton.jit
def _gather_kernel(slope, force, order, neighbor, count, nnei, block: tl.constexpr):
    """Apply the transpose of `_scatter_kernel`."""
    edge = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    real = edge < count
    here = tl.load(order + edge // nnei, real, 0) * 3
    there = tl.load(neighbor + edge, real, -1)
    for k in tl.static_range(3):
        difference = tl.load(force + here + k, real, 0.0) - tl.load(force + there * 3 + k, there >= 0, 0.0)
        tl.store(slope + edge * 3 + k, difference, real)


@triton.jit
def _virial_kernel(out, slope, edges, order, nnei, block: tl.constexpr):
    """Write the virial of one atom's edges to the row of the atom."""
    atom = tl.program_id(0).to(tl.int64)
    here = out + tl.load(order + atom) * 9
    for i in tl.static_range(3):
        sum0 = tl.zeros((block,), tl.float64)
        sum1 = tl.zeros((block,), tl.float64)
        sum2 = tl.zeros((block,), tl.float64)
        for begin in range(0, nnei, block):
            column = begin + tl.arange(0, block)
            real = column < nnei
            at = (atom * nnei + column) * 3
            along = tl.load(slope + at + i, real, 0.0)
            sum0 -= along * tl.load(edges + at, real, 0.0)
            sum1 -= along * tl.load(edges + at + 1, real, 0.0)
            sum2 -= along * tl.load(edges + at + 2, real, 0.0)
        tl.store(here + 3 * i, tl.sum(sum0))
        tl.store(here + 3 * i + 1, tl.sum(sum1))
        tl.store(here + 3 * i + 2, tl.sum(sum2))


def edge_vectors(
    coord: Tensor, box: Tensor | None, order: Tensor, frame: Tensor, neighbor: Tensor, shift: Tensor | None
) -> Tensor:
    """Return r_ij `(nreal, nnei, 3)` [Å]; arguments as in `Structures`."""
    out = coord.new_empty(*neighbor.shape, 3)
    periodic = box is not None and shift is not None
    _edge_vectors_kernel[(triton.cdiv(neighbor.numel(), BLOCK),)](
        out, coord.contiguous(), box.contiguous() if box is not None else coord, order, frame, neighbor.contiguous(),
        shift.contiguous() if shift is not None else neighbor, neighbor.numel(), neighbor.shape[1],
        periodic=periodic, block=BLOCK,
    )  # fmt: skip
    return out


def environment(
    edges: Tensor, empty: Tensor, rcut: float, rcut_smth: float, protection: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return edges with empty slots at the cutoff, rows, and `(3, nreal, nnei)` radial, isotropic, bend."""
    masked, rows = torch.empty_like(edges), edges.new_empty(*empty.shape, 4)
    scalars = edges.new_empty(3, *empty.shape)
    _environment_kernel[(triton.cdiv(empty.numel(), BLOCK),)](
        masked, rows, scalars, edges.contiguous(), empty.contiguous(), empty.numel(),
        rcut=rcut, rcut_smth=rcut_smth, protection=protection, block=BLOCK,
    )  # fmt: skip
    return masked, rows, scalars


def pull(adjoint: Tensor, factor: Tensor, edges: Tensor, *scalars: Tensor) -> Tensor:
    """Return dE/dr_ij `(nreal, nnei, 3)` from dE/dR `(nreal, nnei, 4)`, R = `factor` (nreal, 4) · row + constant."""
    out = torch.empty_like(edges)
    count = out.numel() // 3
    tensors = adjoint.contiguous(), factor.contiguous(), edges, *scalars
    _pull_kernel[(triton.cdiv(count, BLOCK),)](out, *tensors, count, edges.shape[1], block=BLOCK)
    return out


def push(cotangent: Tensor, factor: Tensor, edges: Tensor, *scalars: Tensor) -> Tensor:
    """Apply the transpose of `pull` `(nreal, nnei, 4)`, in the dtype of `factor`."""
    out = factor.new_empty(*edges.shape[:-1], 4)
    count = out.numel() // 4
    tensors = cotangent.contiguous(), factor.contiguous(), edges, *scalars
    _push_kernel[(triton.cdiv(count, BLOCK),)](out, *tensors, count, edges.shape[1], block=BLOCK)
    return out


def scatter(slope: Tensor, order: Tensor, neighbor: Tensor, natoms: int) -> Tensor:
    """Return the forces `(natoms, 3)` from dE/dr_ij `(nreal, nnei, 3)`; the order of additions varies."""
    force = slope.new_zeros(natoms, 3)
    block = min(BLOCK, max(16, triton.next_power_of_2(neighbor.shape[1])))
    _scatter_kernel[(neighbor.shape[0],)](
        force, slope.contiguous(), order, neighbor.contiguous(), neighbor.shape[1], block=block
    )
    return force


def virial(slope: Tensor, edges: Tensor, order: Tensor, nframes: int, natoms: int) -> Tensor:
    """Return −Σ dE/dr_ij ⊗ r_ij `(nframes, 9)` from tensors `(nreal, nnei, 3)`; each atom has a row of its own."""
    of_atoms = slope.new_zeros(nframes * natoms, 9)
    block = min(BLOCK, max(16, triton.next_power_of_2(edges.shape[1])))
    _virial_kernel[(edges.shape[0],)](
        of_atoms, slope.contiguous(), edges.contiguous(), order, edges.shape[1], block=block
    )
    return of_atoms.view(nframes, natoms, 9).sum(1)


def gather(force: Tensor, order: Tensor, neighbor: Tensor) -> Tensor:
    """Apply the transpose of `scatter` `(nreal, nnei, 3)`."""
    slope = force.new_empty(*neighbor.shape, 3)
    _gather_kernel[(triton.cdiv(neighbor.numel(), BLOCK),)](
        slope, force.contiguous(), order, neighbor.contiguous(), neighbor.numel(), neighbor.shape[1], block=BLOCK
    )
    return slope
