"""Triton kernels of edge vectors, environment rows and their derivative, and of forces.

`environment.environment`, `environment.edge_derivative`, `edges.edge_vectors` and
`edges.forces_of` define the results; `test_model_kernels` compares them.

An edge is a pair of an atom and a slot of its neighbour list: edge = i·nnei + slot, with the row i
of the list, atom order[i], and neighbour j. r_ij and intermediate results are in float64.
Environment rows, their cotangents and their factors may be stored in single precision.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepmd_muon.model.descriptor.reach import Reach
from deepmd_muon.model.nn.vector_kernels import (
    Vector,
    cast,
    dot,
    load_vector,
    minus,
    plus,
    scaled,
    store_vector,
    times,
)

BLOCK = 256  # edges of a program, at most
WARPS_OF_ROWS = 8  # in kernels of environment rows: a thread for each edge
WARPS_OF_ATOM = 1  # of `_force_and_virial_kernel`, an atom a program: one warp waits for no other


class Row(NamedTuple):
    """Four numbers of an edge: an environment row, a cotangent or a factor of one."""

    radial: Any  # component 0
    vector: Any  # Vector: components 1 to 3


class Switched(NamedTuple):
    """The functions of the distance in environment rows."""

    distance: Any  # r
    t: Any  # 1/(r + protection)
    switch: Any  # w
    switch_slope: Any  # dw/dr


class RowJacobian(NamedTuple):
    """∂row₀/∂x_k = radial·x_k and ∂row_i/∂x_k = isotropic·δ_ik + bend·x_i·x_k."""

    radial: Any
    isotropic: Any
    bend: Any


# ----- helpers of kernels ------------------------------------------------------------------------


@triton.jit
def edges_of_program(count, block: tl.constexpr):
    """Return the edges of a program, int64, and which of them exist, empty slots included."""
    edge = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    return edge, edge < count


@triton.jit
def loaded_edges(edges, neighbor, edge, exists, reach):
    """Return r_ij of some edges; those of empty slots are beyond the cut-off: rows vanish there."""
    empty = tl.load(neighbor + edge, exists, -1) < 0
    r = load_vector(edges, edge, exists, 1.0)
    return Vector(
        tl.where(empty, reach.rcut, r.x),
        tl.where(empty, reach.rcut, r.y),
        tl.where(empty, reach.rcut, r.z),
    )


@triton.jit
def switched(r, reach):
    """Return `Switched`: w = v³·(10 − 15v + 6v²) with v = (rcut − r)/(rcut − rcut_smth) in [0, 1].

    Written in v, w does not cancel near the cut-off.
    """
    distance = tl.sqrt(dot(r, r))
    v = (distance - reach.rcut) / (reach.rcut_smth - reach.rcut)
    v = tl.minimum(tl.maximum(v, 0.0), 1.0)
    bump = v * (1.0 - v)
    return Switched(
        distance=distance,
        t=1.0 / (distance + reach.protection),
        switch=v * v * v * (10.0 - (15.0 - 6.0 * v) * v),
        switch_slope=bump * bump * (-30.0 / (reach.rcut - reach.rcut_smth)),
    )


@triton.jit
def row_jacobian(r, reach):
    """Return the `RowJacobian` at r_ij."""
    f = switched(r, reach)
    per_distance = 1.0 / f.distance
    isotropic = f.switch * f.t * f.t
    slope_t = f.switch_slope * f.t
    return RowJacobian(
        radial=(slope_t - isotropic) * per_distance,
        isotropic=isotropic,
        bend=(slope_t - 2.0 * isotropic) * f.t * per_distance,
    )


@triton.jit
def load_row(rows, number, mask):
    """Load rows of a tensor (…, 4), 0 where the mask is false."""
    address = rows + number * 4
    radial = tl.load(address, mask, 0.0)
    x = tl.load(address + 1, mask, 0.0)
    y = tl.load(address + 2, mask, 0.0)
    z = tl.load(address + 3, mask, 0.0)
    return Row(radial, Vector(x, y, z))


@triton.jit
def store_row(out, number, mask, row):
    """Store rows of a tensor (…, 4), in its dtype and in one vectorized store."""
    pair = tl.arange(0, 2)[None, :, None]
    in_pair = tl.arange(0, 2)[None, None, :]
    vector = row.vector
    # `join` adds the last axis: (edges, 2, 2) with the pairs (radial, x) and (y, z).
    values = tl.join(tl.join(row.radial, vector.y), tl.join(vector.x, vector.z))
    tl.store(
        out + number[:, None, None] * 4 + pair * 2 + in_pair,
        values.to(out.dtype.element_ty),
        mask[:, None, None],
    )


# ----- edge vectors ------------------------------------------------------------------------------


def edge_vectors(
    coord: Tensor,
    box: Tensor | None,
    order: Tensor,
    frame: Tensor,
    neighbor: Tensor,
    shift: Tensor | None,
) -> Tensor:
    """Return r_ij (nreal, nnei, 3) [Å]; arguments as in `Structures`."""
    out = coord.new_empty(*neighbor.shape, 3)
    _edge_vectors_kernel[(triton.cdiv(neighbor.numel(), BLOCK),)](
        out=out,
        coord=coord.contiguous(),
        box=None if box is None else box.contiguous(),
        order=order,
        frame=frame,
        neighbor=neighbor.contiguous(),
        shift=None if shift is None else shift.contiguous(),
        count=neighbor.numel(),
        nnei=neighbor.shape[1],
        block=BLOCK,
    )
    return out


# Unlike `nnei`, `count` is specialized: known multiples of 16 let masked loads be vectorized.
@triton.jit(do_not_specialize=["nnei"])
def _edge_vectors_kernel(
    out,  # (nreal, nnei, 3), written
    coord,  # (atoms, 3)
    box,  # (frames, 3, 3); None without cells
    order,  # (nreal,): number of the atom
    frame,  # (nreal,)
    neighbor,  # (nreal, nnei): number of the neighbour, negative in empty slots
    shift,  # (nreal, nnei, 3): S, in cells; None without cells
    count,
    nnei,
    block: tl.constexpr,
):
    """Write r_ij = coord[j] + S·box − coord[i]; arbitrary in empty slots."""
    edge, exists = edges_of_program(count, block)
    i = edge // nnei
    atom_i = tl.load(order + i, exists, 0)
    atom_j = tl.maximum(tl.load(neighbor + edge, exists, 0), 0)
    if box is not None:
        cell = tl.load(frame + i, exists, 0) * 9
        s = cast(load_vector(shift, edge, exists, 0), tl.float64)
    for k in tl.static_range(3):
        x_j = tl.load(coord + atom_j * 3 + k, exists, 0.0)
        x = x_j - tl.load(coord + atom_i * 3 + k, exists, 0.0)
        if box is not None:
            x += s.x * tl.load(box + cell + k, exists, 0.0)
            x += s.y * tl.load(box + cell + 3 + k, exists, 0.0)
            x += s.z * tl.load(box + cell + 6 + k, exists, 0.0)
        tl.store(out + edge * 3 + k, x, exists)


# ----- environment rows and their derivative -----------------------------------------------------


def launch_on_edges(
    kernel: triton.JITFunction, edges: Tensor, neighbor: Tensor, reach: Reach, **others: Tensor
) -> None:
    """Launch a kernel of environment rows on all edges; `others` are its other tensors."""
    count = neighbor.numel()
    if not count:
        return
    kernel[(triton.cdiv(count, BLOCK),)](
        edges=edges.contiguous(),
        neighbor=neighbor.contiguous(),
        count=count,
        nnei=neighbor.shape[1],
        reach=Reach(*map(tl.constexpr, reach)),
        block=BLOCK,
        num_warps=WARPS_OF_ROWS,
        **others,
    )


def environment(edges: Tensor, neighbor: Tensor, reach: Reach) -> Tensor:
    """Return rows (nreal, nnei, 4); arguments as in `environment.environment`."""
    rows = edges.new_empty(*neighbor.shape, 4)
    launch_on_edges(_environment_kernel, edges, neighbor, reach, rows=rows)
    return rows


@triton.jit(do_not_specialize=["count", "nnei"])
def _environment_kernel(
    rows,  # (nreal, nnei, 4), written
    edges,  # (nreal, nnei, 3)
    neighbor,  # (nreal, nnei)
    count,
    nnei,
    reach,
    block: tl.constexpr,
):
    """Write row = w·(t, x·t², y·t², z·t²)."""
    edge, exists = edges_of_program(count, block)
    r = loaded_edges(edges, neighbor, edge, exists, reach)
    f = switched(r, reach)
    isotropic = f.switch * f.t * f.t
    store_row(rows, edge, exists, Row(f.switch * f.t, scaled(isotropic, r)))


def pull(adjoint: Tensor, factor: Tensor, edges: Tensor, neighbor: Tensor, reach: Reach) -> Tensor:
    """Return dE/dr_ij (nreal, nnei, 3) from dE/dR (nreal, nnei, 4), R = factor·row + constant."""
    out = torch.empty(edges.shape, dtype=edges.dtype, device=edges.device)
    launch_on_edges(
        _pull_kernel,
        edges,
        neighbor,
        reach,
        out=out,
        adjoint=adjoint.contiguous(),
        factor=factor.contiguous(),
    )
    return out


@triton.jit(do_not_specialize=["count", "nnei"])
def _pull_kernel(
    out,  # (nreal, nnei, 3), written
    adjoint,  # (nreal, nnei, 4): dE/dR
    factor,  # (nreal, 4): dR/drow
    edges,  # (nreal, nnei, 3)
    neighbor,  # (nreal, nnei)
    count,
    nnei,
    reach,
    block: tl.constexpr,
):
    """Write dE/dr_ij = isotropic·a + (radial·a₀ + bend·(a·r_ij))·r_ij with (a₀, a) = factor·dE/dR."""
    edge, exists = edges_of_program(count, block)
    r = loaded_edges(edges, neighbor, edge, exists, reach)
    jacobian = row_jacobian(r, reach)
    bar = load_row(adjoint, edge, exists)
    factor_row = load_row(factor, edge // nnei, exists)
    a0 = bar.radial.to(tl.float64) * factor_row.radial
    a = times(cast(bar.vector, tl.float64), factor_row.vector)
    along = jacobian.radial * a0 + jacobian.bend * dot(a, r)
    store_vector(out, edge, exists, plus(scaled(jacobian.isotropic, a), scaled(along, r)))


def push(
    cotangent: Tensor, factor: Tensor, edges: Tensor, neighbor: Tensor, reach: Reach
) -> Tensor:
    """Apply the transpose of `pull` to (nreal, nnei, 3): (nreal, nnei, 4), in `factor`'s dtype."""
    out = factor.new_empty(*neighbor.shape, 4)
    launch_on_edges(
        _push_kernel,
        edges,
        neighbor,
        reach,
        out=out,
        cotangent=cotangent.contiguous(),
        factor=factor.contiguous(),
    )
    return out


@triton.jit(do_not_specialize=["count", "nnei"])
def _push_kernel(
    out,  # (nreal, nnei, 4), written
    cotangent,  # (nreal, nnei, 3): c
    factor,  # (nreal, 4): dR/drow
    edges,  # (nreal, nnei, 3)
    neighbor,  # (nreal, nnei)
    count,
    nnei,
    reach,
    block: tl.constexpr,
):
    """Write out = factor·(radial·(c·r_ij), isotropic·c + bend·(c·r_ij)·r_ij)."""
    edge, exists = edges_of_program(count, block)
    r = loaded_edges(edges, neighbor, edge, exists, reach)
    jacobian = row_jacobian(r, reach)
    c = load_vector(cotangent, edge, exists, 0.0)
    along = dot(c, r)
    factor_row = load_row(factor, edge // nnei, exists)
    radial = jacobian.radial * along * factor_row.radial
    vector = plus(scaled(jacobian.isotropic, c), scaled(jacobian.bend * along, r))
    store_row(out, edge, exists, Row(radial, times(vector, factor_row.vector)))


# ----- forces and virial -------------------------------------------------------------------------


def scatter(slope: Tensor, order: Tensor, neighbor: Tensor, natoms: int) -> Tensor:
    """Return forces (natoms, 3) from dE/dr_ij (nreal, nnei, 3); the order of additions varies.

    `natoms` counts the atoms of all frames.
    """
    force = slope.new_zeros(natoms, 3)
    _scatter_kernel[(neighbor.shape[0],)](
        force=force,
        slope=slope.contiguous(),
        order=order,
        neighbor=neighbor.contiguous(),
        nnei=neighbor.shape[1],
        block=_block_of_atom(neighbor),
    )
    return force


def _block_of_atom(neighbor: Tensor) -> int:
    """Return how many edges of one atom a program takes at once."""
    return min(BLOCK, max(16, int(triton.next_power_of_2(neighbor.shape[1]))))


@triton.jit
def _scatter_kernel(
    force,  # (natoms, 3), added to
    slope,  # (nreal, nnei, 3): dE/dr_ij
    order,  # (nreal,)
    neighbor,  # (nreal, nnei)
    nnei,
    block: tl.constexpr,
):
    """Add Σ_j dE/dr_ij of one row i to the force on its atom, −dE/dr_ij to that on atom j."""
    i = tl.program_id(0).to(tl.int64)
    force_i = force + tl.load(order + i) * 3
    for begin in range(0, nnei, block):
        column = begin + tl.arange(0, block)
        edge = i * nnei + column
        j = tl.load(neighbor + edge, column < nnei, -1)
        slope_ij = load_vector(slope, edge, column < nnei, 0.0)
        _add_vector(force_i, _sum_of(slope_ij))
        _add_vector(force + j * 3, scaled(-1.0, slope_ij), j >= 0)


def gather(cotangent: Tensor, order: Tensor, neighbor: Tensor) -> Tensor:
    """Apply the transpose of `scatter` to (natoms, 3): return (nreal, nnei, 3)."""
    out = cotangent.new_empty(*neighbor.shape, 3)
    _gather_kernel[(triton.cdiv(neighbor.numel(), BLOCK),)](
        out=out,
        cotangent=cotangent.contiguous(),
        order=order,
        neighbor=neighbor.contiguous(),
        count=neighbor.numel(),
        nnei=neighbor.shape[1],
        block=BLOCK,
    )
    return out


@triton.jit(do_not_specialize=["nnei"])  # as `_edge_vectors_kernel`
def _gather_kernel(
    out,  # (nreal, nnei, 3), written
    cotangent,  # (natoms, 3): c
    order,  # (nreal,)
    neighbor,  # (nreal, nnei)
    count,
    nnei,
    block: tl.constexpr,
):
    """Write out_ij = c_i − c_j, with c_j = 0 in empty slots."""
    edge, exists = edges_of_program(count, block)
    atom_i = tl.load(order + edge // nnei, exists, 0)
    j = tl.load(neighbor + edge, exists, -1)
    # Component by component: a vector at once takes 40 registers in place of 32.
    for k in tl.static_range(3):
        c_i = tl.load(cotangent + atom_i * 3 + k, exists, 0.0)
        c_j = tl.load(cotangent + j * 3 + k, j >= 0, 0.0)
        tl.store(out + edge * 3 + k, c_i - c_j, exists)


def force_and_virial(
    slope: Tensor, edges: Tensor, order: Tensor, neighbor: Tensor, nframes: int, natoms: int
) -> tuple[Tensor, Tensor]:
    """Return the result of `scatter` (nframes·natoms, 3), and −Σ dE/dr_ij ⊗ r_ij (nframes, 9).

    The kernel writes the virial atom by atom, so that the order of its additions does not vary.
    `natoms` counts the atoms of one frame.
    """
    # One launch clears both: 3 numbers of each atom, then 9, in memory; padding stays 0.
    zeros = slope.new_zeros(12, nframes * natoms)
    force = zeros[:3].view(-1, 3)
    atom_virial = zeros[3:].view(nframes, 9, natoms)
    _force_and_virial_kernel[(neighbor.shape[0],)](
        force=force,
        atom_virial=atom_virial,
        slope=slope.contiguous(),
        edges=edges.contiguous(),
        order=order,
        neighbor=neighbor.contiguous(),
        nnei=neighbor.shape[1],
        natoms=natoms,
        block=_block_of_atom(neighbor),
        num_warps=WARPS_OF_ATOM,
    )
    return force, atom_virial.sum(2)


@triton.jit(do_not_specialize=["natoms"])
def _force_and_virial_kernel(
    force,  # (nframes·natoms, 3), added to
    atom_virial,  # (nframes, 9, natoms), written
    slope,  # (nreal, nnei, 3): dE/dr_ij
    edges,  # (nreal, nnei, 3): r_ij
    order,  # (nreal,): frame·natoms + atom
    neighbor,  # (nreal, nnei)
    nnei,
    natoms,
    block: tl.constexpr,
):
    """Add forces as `_scatter_kernel` does, and write −Σ_j dE/dr_ij ⊗ r_ij of one row i."""
    i = tl.program_id(0).to(tl.int64)
    atom = tl.load(order + i)
    force_i = force + atom * 3
    virial_i = atom_virial + atom // natoms * (9 * natoms) + atom % natoms
    zero = tl.zeros((block,), tl.float64)
    total = Vector(zero, zero, zero)
    virial_x = total
    virial_y = total
    virial_z = total
    for begin in range(0, nnei, block):
        column = begin + tl.arange(0, block)
        exists = column < nnei
        edge = i * nnei + column
        j = tl.load(neighbor + edge, exists, -1)
        slope_ij = load_vector(slope, edge, exists, 0.0)
        r = load_vector(edges, edge, exists, 0.0)
        total = plus(total, slope_ij)
        virial_x = minus(virial_x, scaled(slope_ij.x, r))
        virial_y = minus(virial_y, scaled(slope_ij.y, r))
        virial_z = minus(virial_z, scaled(slope_ij.z, r))
        _add_vector(force + j * 3, scaled(-1.0, slope_ij), j >= 0)
    _add_vector(force_i, _sum_of(total))
    _store_columns(virial_i, natoms, _sum_of(virial_x))
    _store_columns(virial_i + 3 * natoms, natoms, _sum_of(virial_y))
    _store_columns(virial_i + 6 * natoms, natoms, _sum_of(virial_z))


@triton.jit
def _sum_of(a):
    """Return the sum over the edges of a program."""
    return Vector(tl.sum(a.x), tl.sum(a.y), tl.sum(a.z))


@triton.jit
def _add_vector(out, a, mask=None):
    """Add a vector to three numbers in memory, atomically."""
    tl.atomic_add(out, a.x, mask)
    tl.atomic_add(out + 1, a.y, mask)
    tl.atomic_add(out + 2, a.z, mask)


@triton.jit
def _store_columns(out, stride, a):
    """Store a vector in three numbers that are `stride` apart."""
    tl.store(out, a.x)
    tl.store(out + stride, a.y)
    tl.store(out + 2 * stride, a.z)
