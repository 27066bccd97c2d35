"""Triton kernels of edge vectors, environment rows and their derivative, one launch each.

`environment` and `deepmd_muon.model.energy_model.edge_vectors` define the results.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 256
WARPS_OF_BLOCK = 8  # a thread for each edge
WARPS = 1  # of a program for the edges of an atom: one warp waits for no other


@triton.jit
def _edge_vectors_kernel(
    out,
    coord,
    box,
    order,
    frame,
    neighbor,
    shift,
    count,
    nnei,
    periodic: tl.constexpr,
    block: tl.constexpr,
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
def loaded_edges(edges, neighbor, edge, real, rcut: tl.constexpr):
    """Return the components of some edge vectors; empty slots are at the cut-off, where everything vanishes."""
    none = tl.load(neighbor + edge, real, -1) < 0
    x = tl.where(none, rcut, tl.load(edges + edge * 3, real, 1.0))
    y = tl.where(none, rcut, tl.load(edges + edge * 3 + 1, real, 1.0))
    z = tl.where(none, rcut, tl.load(edges + edge * 3 + 2, real, 1.0))
    return x, y, z


@triton.jit
def switched(x, y, z, rcut: tl.constexpr, rcut_smth: tl.constexpr, protection: tl.constexpr):
    """Return the distance, t, the switch, without cancellation at the cut-off, and its slope."""
    distance = tl.sqrt(x * x + y * y + z * z)
    v = tl.minimum(tl.maximum((rcut - distance) / (rcut - rcut_smth), 0.0), 1.0)
    switch = v * v * v * (10.0 - (15.0 - 6.0 * v) * v)
    bump = v * (1.0 - v)
    return (
        distance,
        1.0 / (distance + protection),
        switch,
        bump * bump * (-30.0 / (rcut - rcut_smth)),
    )


@triton.jit
def curvature(x, y, z, rcut: tl.constexpr, rcut_smth: tl.constexpr, protection: tl.constexpr):
    """Return radial, isotropic and bend of the `Jacobian`."""
    distance, t, switch, slope = switched(x, y, z, rcut, rcut_smth, protection)
    per_distance, isotropic, slope_t = 1.0 / distance, switch * t * t, slope * t
    return (
        (slope_t - isotropic) * per_distance,
        isotropic,
        (slope_t - 2.0 * isotropic) * t * per_distance,
    )


@triton.jit
def store_four(out, edge, real, a, b, c, d):
    """Store four numbers of each edge side by side, in pairs."""
    first, second = tl.arange(0, 2)[None, :, None], tl.arange(0, 2)[None, None, :]
    values = tl.join(tl.join(a, c), tl.join(b, d))
    tl.store(
        out + edge[:, None, None] * 4 + first * 2 + second,
        values.to(out.dtype.element_ty),
        real[:, None, None],
    )


@triton.jit
def _environment_kernel(
    rows, edges, neighbor, count,
    rcut: tl.constexpr, rcut_smth: tl.constexpr, protection: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    """Write rows of some edges."""
    edge = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    real = edge < count
    x, y, z = loaded_edges(edges, neighbor, edge, real, rcut)
    _, t, switch, _ = switched(x, y, z, rcut, rcut_smth, protection)
    isotropic = switch * t * t
    store_four(rows, edge, real, switch * t, isotropic * x, isotropic * y, isotropic * z)


@triton.jit
def _pull_kernel(
    out, adjoint, factor, edges, neighbor, count, nnei,
    rcut: tl.constexpr, rcut_smth: tl.constexpr, protection: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    """dE/dr_ij from dE/dR, R = factor·row + constant."""
    edge = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    real = edge < count
    x, y, z = loaded_edges(edges, neighbor, edge, real, rcut)
    radial, isotropic, bend = curvature(x, y, z, rcut, rcut_smth, protection)
    at = factor + edge // nnei * 4
    a0 = tl.load(adjoint + edge * 4, real, 0.0).to(tl.float64) * tl.load(at, real, 0.0)
    a1 = tl.load(adjoint + edge * 4 + 1, real, 0.0).to(tl.float64) * tl.load(at + 1, real, 0.0)
    a2 = tl.load(adjoint + edge * 4 + 2, real, 0.0).to(tl.float64) * tl.load(at + 2, real, 0.0)
    a3 = tl.load(adjoint + edge * 4 + 3, real, 0.0).to(tl.float64) * tl.load(at + 3, real, 0.0)
    scale = radial * a0 + bend * (a1 * x + a2 * y + a3 * z)
    tl.store(out + edge * 3, isotropic * a1 + scale * x, real)
    tl.store(out + edge * 3 + 1, isotropic * a2 + scale * y, real)
    tl.store(out + edge * 3 + 2, isotropic * a3 + scale * z, real)


@triton.jit
def _push_kernel(
    out, cotangent, factor, edges, neighbor, count, nnei,
    rcut: tl.constexpr, rcut_smth: tl.constexpr, protection: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    """Apply the transpose of `_pull_kernel`."""
    edge = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    real = edge < count
    x, y, z = loaded_edges(edges, neighbor, edge, real, rcut)
    radial, isotropic, bend = curvature(x, y, z, rcut, rcut_smth, protection)
    c1, c2 = tl.load(cotangent + edge * 3, real, 0.0), tl.load(cotangent + edge * 3 + 1, real, 0.0)
    c3 = tl.load(cotangent + edge * 3 + 2, real, 0.0)
    along = c1 * x + c2 * y + c3 * z
    turn = bend * along
    at = factor + edge // nnei * 4
    store_four(
        out, edge, real,
        radial * along * tl.load(at, real, 0.0),
        (isotropic * c1 + turn * x) * tl.load(at + 1, real, 0.0),
        (isotropic * c2 + turn * y) * tl.load(at + 2, real, 0.0),
        (isotropic * c3 + turn * z) * tl.load(at + 3, real, 0.0),
    )  # fmt: skip


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
        difference = tl.load(force + here + k, real, 0.0) - tl.load(
            force + there * 3 + k, there >= 0, 0.0
        )
        tl.store(slope + edge * 3 + k, difference, real)


@triton.jit
def _force_and_virial_kernel(
    force, virial, slope, edges, order, neighbor, nnei, natoms, block: tl.constexpr
):
    """Add forces as `_scatter_kernel` does, and write the virial of one atom's edges to its column."""
    atom = tl.program_id(0).to(tl.int64)
    own = tl.load(order + atom)
    here, column_of_virial = force + own * 3, virial + own // natoms * (9 * natoms) + own % natoms
    zero = tl.zeros((block,), tl.float64)
    f0, f1, f2 = zero, zero, zero
    xx, xy, xz = zero, zero, zero
    yx, yy, yz = zero, zero, zero
    zx, zy, zz = zero, zero, zero
    for begin in range(0, nnei, block):
        column = begin + tl.arange(0, block)
        real = column < nnei
        edge = atom * nnei + column
        there = tl.load(neighbor + edge, real, -1)
        s0, s1 = tl.load(slope + edge * 3, real, 0.0), tl.load(slope + edge * 3 + 1, real, 0.0)
        s2 = tl.load(slope + edge * 3 + 2, real, 0.0)
        x, y = tl.load(edges + edge * 3, real, 0.0), tl.load(edges + edge * 3 + 1, real, 0.0)
        z = tl.load(edges + edge * 3 + 2, real, 0.0)
        f0, f1, f2 = f0 + s0, f1 + s1, f2 + s2
        xx, xy, xz = xx - s0 * x, xy - s0 * y, xz - s0 * z
        yx, yy, yz = yx - s1 * x, yy - s1 * y, yz - s1 * z
        zx, zy, zz = zx - s2 * x, zy - s2 * y, zz - s2 * z
        tl.atomic_add(force + there * 3, -s0, there >= 0)
        tl.atomic_add(force + there * 3 + 1, -s1, there >= 0)
        tl.atomic_add(force + there * 3 + 2, -s2, there >= 0)
    tl.atomic_add(here, tl.sum(f0))
    tl.atomic_add(here + 1, tl.sum(f1))
    tl.atomic_add(here + 2, tl.sum(f2))
    tl.store(column_of_virial, tl.sum(xx))
    tl.store(column_of_virial + natoms, tl.sum(xy))
    tl.store(column_of_virial + 2 * natoms, tl.sum(xz))
    tl.store(column_of_virial + 3 * natoms, tl.sum(yx))
    tl.store(column_of_virial + 4 * natoms, tl.sum(yy))
    tl.store(column_of_virial + 5 * natoms, tl.sum(yz))
    tl.store(column_of_virial + 6 * natoms, tl.sum(zx))
    tl.store(column_of_virial + 7 * natoms, tl.sum(zy))
    tl.store(column_of_virial + 8 * natoms, tl.sum(zz))


def edge_vectors(
    coord: Tensor,
    box: Tensor | None,
    order: Tensor,
    frame: Tensor,
    neighbor: Tensor,
    shift: Tensor | None,
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
    edges: Tensor, neighbor: Tensor, rcut: float, rcut_smth: float, protection: float
) -> Tensor:
    """Return rows `(nreal, nnei, 4)`; arguments as in `environment.environment`."""
    rows = edges.new_empty(*neighbor.shape, 4)
    _environment_kernel[(triton.cdiv(neighbor.numel(), BLOCK),)](
        rows, edges.contiguous(), neighbor.contiguous(), neighbor.numel(),
        rcut=rcut, rcut_smth=rcut_smth, protection=protection, block=BLOCK, num_warps=WARPS_OF_BLOCK,
    )  # fmt: skip
    return rows


def pull(
    adjoint: Tensor,
    factor: Tensor,
    edges: Tensor,
    neighbor: Tensor,
    rcut: float,
    rcut_smth: float,
    protection: float,
) -> Tensor:
    """Return dE/dr_ij `(nreal, nnei, 3)` from dE/dR `(nreal, nnei, 4)`, R = `factor` (nreal, 4) · row + constant."""
    out = torch.empty(edges.shape, dtype=edges.dtype, device=edges.device)
    tensors = adjoint.contiguous(), factor.contiguous(), edges.contiguous(), neighbor.contiguous()
    _pull_kernel[(triton.cdiv(neighbor.numel(), BLOCK),)](
        out, *tensors, neighbor.numel(), neighbor.shape[1],
        rcut=rcut, rcut_smth=rcut_smth, protection=protection, block=BLOCK, num_warps=WARPS_OF_BLOCK,
    )  # fmt: skip
    return out


def push(
    cotangent: Tensor,
    factor: Tensor,
    edges: Tensor,
    neighbor: Tensor,
    rcut: float,
    rcut_smth: float,
    protection: float,
) -> Tensor:
    """Apply the transpose of `pull` `(nreal, nnei, 4)`, in the dtype of `factor`."""
    out = factor.new_empty(*neighbor.shape, 4)
    tensors = cotangent.contiguous(), factor.contiguous(), edges.contiguous(), neighbor.contiguous()
    _push_kernel[(triton.cdiv(neighbor.numel(), BLOCK),)](
        out, *tensors, neighbor.numel(), neighbor.shape[1],
        rcut=rcut, rcut_smth=rcut_smth, protection=protection, block=BLOCK, num_warps=WARPS_OF_BLOCK,
    )  # fmt: skip
    return out


def scatter(slope: Tensor, order: Tensor, neighbor: Tensor, natoms: int) -> Tensor:
    """Return the forces `(natoms, 3)` from dE/dr_ij `(nreal, nnei, 3)`; the order of additions varies."""
    force = slope.new_zeros(natoms, 3)
    block = min(BLOCK, max(16, triton.next_power_of_2(neighbor.shape[1])))
    _scatter_kernel[(neighbor.shape[0],)](
        force, slope.contiguous(), order, neighbor.contiguous(), neighbor.shape[1], block=block
    )
    return force


def force_and_virial(
    slope: Tensor, edges: Tensor, order: Tensor, neighbor: Tensor, nframes: int, natoms: int
) -> tuple[Tensor, Tensor]:
    """Return the result of `scatter` `(nframes·natoms, 3)`, and −Σ dE/dr_ij ⊗ r_ij `(nframes, 9)`.

    Each atom has a place of its own for its part of the virial, so that the order of these additions does not vary.
    """
    zeros = slope.new_zeros(12, nframes * natoms)
    force, of_atoms = zeros[:3].view(-1, 3), zeros[3:].view(nframes, 9, natoms)
    block = min(BLOCK, max(16, triton.next_power_of_2(neighbor.shape[1])))
    _force_and_virial_kernel[(neighbor.shape[0],)](
        force, of_atoms, slope.contiguous(), edges.contiguous(), order, neighbor.contiguous(),
        neighbor.shape[1], natoms, block=block, num_warps=WARPS,
    )  # fmt: skip
    return force, of_atoms.sum(2)


def gather(force: Tensor, order: Tensor, neighbor: Tensor) -> Tensor:
    """Apply the transpose of `scatter` `(nreal, nnei, 3)`."""
    slope = force.new_empty(*neighbor.shape, 3)
    _gather_kernel[(triton.cdiv(neighbor.numel(), BLOCK),)](
        slope,
        force.contiguous(),
        order,
        neighbor.contiguous(),
        neighbor.numel(),
        neighbor.shape[1],
        block=BLOCK,
    )
    return slope
