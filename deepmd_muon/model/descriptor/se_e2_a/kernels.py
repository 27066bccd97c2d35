"""Triton kernels of `se_e2_a`: `SeE2A`, `contraction` and `interpolation` define their results.

Matrix products in batches whose sums have four terms are bound by the small tiles of their launches. The kernels of the
contraction read and write each number once.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepmd_muon.model.descriptor.environment import Reach
from deepmd_muon.model.descriptor.environment_kernels import loaded_edges, store_four, switched
from deepmd_muon.model.descriptor.pieces import FEWEST, GRID, places
from deepmd_muon.model.descriptor.se_e2_a.edges import ORDERS, Edges, first_columns

ROWS = 128  # of an atom's environment, standardised together
FEATURES = 128  # of the contraction, looked at together
EDGES = 32  # looked at together in sums over pieces
WARPS = 1  # of a program for the edges of an atom, or for its contraction's derivative: one warp waits for no other


@triton.jit
def _standard_rows_kernel(
    out, empty, scale, edges, neighbor, mean, stddev, kinds, stride, nnei,
    rcut: tl.constexpr, rcut_smth: tl.constexpr, protection: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    """Write R of one atom's edges; and R of an empty slot, and the factor of rows."""
    atom = tl.program_id(0).to(tl.int64)
    at = tl.load(kinds + atom) * stride
    factor0, factor1 = 1.0 / tl.load(stddev + at), 1.0 / tl.load(stddev + at + 1)
    factor2, factor3 = 1.0 / tl.load(stddev + at + 2), 1.0 / tl.load(stddev + at + 3)
    none0, none1 = -tl.load(mean + at) * factor0, -tl.load(mean + at + 1) * factor1
    none2, none3 = -tl.load(mean + at + 2) * factor2, -tl.load(mean + at + 3) * factor3
    dtype: tl.constexpr = out.dtype.element_ty
    for begin in range(0, nnei, block):
        column = begin + tl.arange(0, block)
        edge, real = atom * nnei + column, column < nnei
        x, y, z = loaded_edges(edges, neighbor, edge, real, rcut)
        _, t, switch, _ = switched(x, y, z, rcut, rcut_smth, protection)
        isotropic = switch * t * t
        store_four(
            out, edge, real,
            none0 + (switch * t).to(dtype) * factor0, none1 + (isotropic * x).to(dtype) * factor1,
            none2 + (isotropic * y).to(dtype) * factor2, none3 + (isotropic * z).to(dtype) * factor3,
        )  # fmt: skip
    tl.store(empty + atom * 4, none0)
    tl.store(empty + atom * 4 + 1, none1)
    tl.store(empty + atom * 4 + 2, none2)
    tl.store(empty + atom * 4 + 3, none3)
    tl.store(scale + atom * 4, factor0)
    tl.store(scale + atom * 4 + 1, factor1)
    tl.store(scale + atom * 4 + 2, factor2)
    tl.store(scale + atom * 4 + 3, factor3)


@triton.jit
def _extremes_kernel(extremes, rows, empty, table, atoms, nnei, block: tl.constexpr):
    """Write the least and the largest s of one atom's neighbours of one type, an empty slot's among them."""
    atom, kind = tl.program_id(0).to(tl.int64), tl.program_id(1)
    first, width = tl.load(table + 3 * kind), tl.load(table + 3 * kind + 1)
    other = tl.load(empty + atom * 4)
    low = tl.zeros((block,), rows.dtype.element_ty) + other
    high = low
    for begin in range(0, width, block):
        column = begin + tl.arange(0, block)
        s = tl.load(rows + (atom * nnei + first + column) * 4, column < width, 0.0)
        s = tl.where(column < width, s, other)
        low, high = tl.minimum(low, s), tl.maximum(high, s)
    tl.store(extremes + kind * atoms + atom, tl.min(low))
    tl.store(extremes + (tl.num_programs(1) + kind) * atoms + atom, tl.max(high))


@triton.jit
def _start_kernel(
    start, extremes, atoms, least: tl.constexpr, cells: tl.constexpr, block: tl.constexpr
):
    """Write the least s of a type and cells per unit of s."""
    kind = tl.program_id(0)
    low_at, high_at = extremes + kind * atoms, extremes + (tl.num_programs(0) + kind) * atoms
    dtype: tl.constexpr = extremes.dtype.element_ty
    low = tl.zeros((block,), dtype) + tl.load(low_at)
    high = tl.zeros((block,), dtype) + tl.load(high_at)
    for begin in range(0, atoms, block):
        atom = begin + tl.arange(0, block)
        low = tl.minimum(low, tl.load(low_at + atom, atom < atoms, float("inf")))
        high = tl.maximum(high, tl.load(high_at + atom, atom < atoms, float("-inf")))
    lowest = tl.min(low)
    span = tl.maximum(tl.max(high) - lowest, least).to(dtype)
    tl.store(start + 2 * kind, lowest)
    tl.store(start + 2 * kind + 1, cells / span)


def standard_rows(
    edges: Tensor, neighbor: Tensor, reach: Reach, mean: Tensor, stddev: Tensor, kinds: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return R `(nreal, nnei, 4)`, R of an empty slot and dR/drow `(nreal, 4)` in the dtype of the statistics.

    These, `mean` and `stddev` `(ntypes, slots, 4)`, are the same for all slots; `kinds` are the atoms' types. Other
    arguments as in `environment.environment`.
    """
    atoms, nnei = neighbor.shape
    out = mean.new_empty(atoms, nnei, 4)
    empty, scale = mean.new_empty(2, atoms, 4).unbind()
    rcut, rcut_smth, protection = reach
    if atoms:
        _standard_rows_kernel[(atoms,)](
            out, empty, scale, edges.contiguous(), neighbor.contiguous(), mean, stddev, kinds, mean.stride(0), nnei,
            rcut=rcut, rcut_smth=rcut_smth, protection=protection, block=ROWS,
        )  # fmt: skip
    return out, empty, scale


def interval_starts(rows: Tensor, empty: Tensor, widths: Sequence[int], least: float) -> Tensor:
    """Return the least s of each type and cells per unit of s `(types, 2)`; spans are at least `least`."""
    atoms, nnei, _ = rows.shape
    types = len(widths)
    extremes = rows.new_empty(2, types, atoms)
    table = type_table(tuple(widths), (0,) * types, rows.device)
    _extremes_kernel[(atoms, types)](
        extremes, rows.contiguous(), empty.contiguous(), table, atoms, nnei, block=ROWS
    )
    start = rows.new_empty(types, 2)
    _start_kernel[(types,)](start, extremes, atoms, least=least, cells=GRID, block=1024)
    return start


@triton.jit
def _contract_kernel(out, a, width, axis, features: tl.constexpr, columns: tl.constexpr):
    """Write some rows of D of one atom."""
    atom = tl.program_id(0).to(tl.int64)
    m = tl.program_id(1) * features + tl.arange(0, features)
    k = tl.arange(0, columns)
    total = tl.zeros((features, columns), a.dtype.element_ty)
    for c in tl.static_range(4):
        row = a + (atom * 4 + c) * width
        total += (
            tl.load(row + m, m < width, 0.0)[:, None] * tl.load(row + k, k < axis, 0.0)[None, :]
        )
    inside = (m < width)[:, None] & (k < axis)[None, :]
    tl.store(out + (atom * width + m[:, None]) * axis + k[None, :], total, inside)


@triton.jit
def _pull_contraction_kernel(
    out, a, d_bar, width, axis, features: tl.constexpr, columns: tl.constexpr
):
    """Write dE/dA of one atom."""
    atom = tl.program_id(0).to(tl.int64)
    k = tl.arange(0, columns)
    within = k < axis
    dtype: tl.constexpr = a.dtype.element_ty
    here = a + atom * 4 * width
    first0 = tl.load(here + k, within, 0.0)
    first1 = tl.load(here + width + k, within, 0.0)
    first2 = tl.load(here + 2 * width + k, within, 0.0)
    first3 = tl.load(here + 3 * width + k, within, 0.0)
    of_axis0 = tl.zeros((columns,), dtype)
    of_axis1 = tl.zeros((columns,), dtype)
    of_axis2 = tl.zeros((columns,), dtype)
    of_axis3 = tl.zeros((columns,), dtype)
    target = out + atom * 4 * width
    for begin in range(0, width, features):
        m = begin + tl.arange(0, features)
        inside = m < width
        at = d_bar + (atom * width + m[:, None]) * axis + k[None, :]
        bar = tl.load(at, inside[:, None] & within[None, :], 0.0)
        tl.store(target + m, tl.sum(bar * first0[None, :], 1), inside)
        tl.store(target + width + m, tl.sum(bar * first1[None, :], 1), inside)
        tl.store(target + 2 * width + m, tl.sum(bar * first2[None, :], 1), inside)
        tl.store(target + 3 * width + m, tl.sum(bar * first3[None, :], 1), inside)
        of_axis0 += tl.sum(bar * tl.load(here + m, inside, 0.0)[:, None], 0)
        of_axis1 += tl.sum(bar * tl.load(here + width + m, inside, 0.0)[:, None], 0)
        of_axis2 += tl.sum(bar * tl.load(here + 2 * width + m, inside, 0.0)[:, None], 0)
        of_axis3 += tl.sum(bar * tl.load(here + 3 * width + m, inside, 0.0)[:, None], 0)
    tl.debug_barrier()  # other threads have written the first columns
    sum0 = tl.load(target + k, within, 0.0) + of_axis0
    sum1 = tl.load(target + width + k, within, 0.0) + of_axis1
    sum2 = tl.load(target + 2 * width + k, within, 0.0) + of_axis2
    sum3 = tl.load(target + 3 * width + k, within, 0.0) + of_axis3
    tl.debug_barrier()  # several threads may hold the same column
    tl.store(target + k, sum0, within)
    tl.store(target + width + k, sum1, within)
    tl.store(target + 2 * width + k, sum2, within)
    tl.store(target + 3 * width + k, sum3, within)


def contract(a: Tensor, axis: int) -> Tensor:
    """Return D `(natoms, M, axis)` from A `(natoms, 4, M)`."""
    natoms, _, width = a.shape
    out = a.new_empty(natoms, width, axis)
    if natoms:
        grid = natoms, triton.cdiv(width, FEATURES)
        _contract_kernel[grid](
            out, a.contiguous(), width, axis, features=FEATURES, columns=_columns(axis)
        )
    return out


def pull_contraction(a: Tensor, d_bar: Tensor) -> Tensor:
    """Return dE/dA `(natoms, 4, M)` from A and dE/dD `(natoms, M, axis)`."""
    natoms, width, axis = d_bar.shape
    out = a.new_empty(a.shape)
    if natoms:
        tensors = a.contiguous(), d_bar.contiguous()
        _pull_contraction_kernel[(natoms,)](
            out, *tensors, width, axis, features=FEATURES, columns=_columns(axis), num_warps=WARPS
        )
    return out


def _columns(axis: int) -> int:
    return max(2, int(triton.next_power_of_2(axis)))


@triton.jit
def _basis(place, cells, spans, most: tl.constexpr, orders: tl.constexpr, edges: tl.constexpr):
    """Return piece and inverse length `(edges,)`, T_m(u) and T′_m(u) `(edges, orders)` of every place in [0, most]."""
    piece = tl.load(cells + tl.minimum(tl.maximum(place.to(tl.int32), 0), most - 1))
    inverse = tl.load(spans + 2 * piece + 1)
    u = 2.0 * (place - tl.load(spans + 2 * piece)) * inverse - 1.0
    m = tl.arange(0, orders)[None, :]
    before, value = tl.full((edges,), 1.0, place.dtype), u
    slope_before, slope = tl.zeros((edges,), place.dtype), tl.full((edges,), 1.0, place.dtype)
    values = tl.where(m == 0, before[:, None], value[:, None])
    slopes = tl.where(m == 0, slope_before[:, None], slope[:, None])
    for k in tl.static_range(2, orders):
        slope, slope_before = 2.0 * (value + u * slope) - slope_before, slope
        value, before = 2.0 * u * value - before, value
        values = tl.where(m == k, value[:, None], values)
        slopes = tl.where(m == k, slope[:, None], slopes)
    return piece, inverse, values, slopes


@triton.jit
def _spread_kernel(
    out, rows, empty, moved, start, table, cells, spans, nnei, pieces,
    most: tl.constexpr, orders: tl.constexpr, edges: tl.constexpr, block: tl.constexpr, transpose: tl.constexpr,
):  # fmt: skip
    """Sum over the edges of one atom and neighbour type into `(4, pieces, orders)`.

    With `transpose`, the cotangents `moved` of `evaluate`; else R itself, empty slots included. Neighbours are sorted
    by distance, so that few pieces have edges in a block.
    """
    atom, kind = tl.program_id(0).to(tl.int64), tl.program_id(1)
    first, width, missing = (
        tl.load(table + 3 * kind),
        tl.load(table + 3 * kind + 1),
        tl.load(table + 3 * kind + 2),
    )
    low, rate = tl.load(start + 2 * kind), tl.load(start + 2 * kind + 1)
    dtype: tl.constexpr = rows.dtype.element_ty
    kinds = tl.num_programs(1)
    size = pieces * orders
    target = out + (atom * 4 * kinds + kind) * size
    for c in tl.static_range(4):
        for begin in range(0, size, block):
            tl.store(
                target + c * kinds * size + begin + tl.arange(0, block), tl.zeros((block,), dtype)
            )
    last = width if transpose else width + 1
    for begin in range(0, last, edges):
        e = begin + tl.arange(0, edges)
        real = e < width
        at = (atom * nnei + first + e) * 4
        # Lanes without an edge stay at the start of the interval: far outside it the polynomials overflow, and 0 · inf
        # is NaN.
        s = tl.where(real, tl.load(rows + at, real, 0.0), low)
        if not transpose:
            is_empty = e == width
            s = tl.where(is_empty, tl.load(empty + atom * 4), s)
            used = real | is_empty
        else:
            used = real
        piece, inverse, values, slopes = _basis((s - low) * rate, cells, spans, most, orders, edges)
        if transpose:
            bend = tl.load(moved + at, real, 0.0) * (2.0 * rate * inverse)
        highest = tl.max(tl.where(used, piece, -1))
        for number in range(tl.min(tl.where(used, piece, pieces)), highest + 1):
            mine = used & (piece == number)
            if tl.sum(mine.to(tl.int32)) > 0:
                cell = target + number * orders + tl.arange(0, orders)
                tl.debug_barrier()  # several threads may hold the same order
                for c in tl.static_range(4):
                    x = tl.load(rows + at + c, mine & real, 0.0)
                    if transpose:
                        y = tl.load(moved + at + c, mine, 0.0)
                        terms = (
                            y[:, None] * values + (x * tl.where(mine, bend, 0.0))[:, None] * slopes
                        )
                    else:
                        stand_in = tl.load(empty + atom * 4 + c) * missing.to(dtype)
                        terms = tl.where(mine & is_empty, stand_in, x)[:, None] * values
                    sums = tl.load(cell + c * kinds * size) + tl.sum(terms, 0)
                    tl.debug_barrier()
                    tl.store(cell + c * kinds * size, sums)


@triton.jit
def _evaluate_kernel(
    out, rows, product, start, table, cells, spans, nnei, pieces,
    most: tl.constexpr, orders: tl.constexpr, edges: tl.constexpr,
):  # fmt: skip
    """Evaluate the polynomials P of one atom and neighbour type at some of its edges."""
    atom, kind = tl.program_id(0).to(tl.int64), tl.program_id(1)
    kinds = tl.num_programs(1)
    first, width = tl.load(table + 3 * kind), tl.load(table + 3 * kind + 1)
    low, rate = tl.load(start + 2 * kind), tl.load(start + 2 * kind + 1)
    size = pieces * orders
    e = tl.program_id(2) * edges + tl.arange(0, edges)
    real = e < width
    at = (atom * nnei + first + e) * 4
    s = tl.where(real, tl.load(rows + at, real, 0.0), low)
    piece, inverse, values, slopes = _basis((s - low) * rate, cells, spans, most, orders, edges)
    cell = piece[:, None] * orders + tl.arange(0, orders)[None, :]
    source = product + (atom * 4 * kinds + kind) * size + cell
    through_s = tl.zeros((edges,), rows.dtype.element_ty)
    result0 = through_s
    for c in tl.static_range(4):
        mine = tl.load(source + c * kinds * size)
        through_s += tl.sum(mine * slopes, 1) * tl.load(rows + at + c, real, 0.0)
        result = tl.sum(mine * values, 1)
        if c == 0:
            result0 = result
        else:
            tl.store(out + at + c, result, real)
    tl.store(out + at, result0 + through_s * (2.0 * rate * inverse), real)


@lru_cache
def type_table(widths: tuple[int, ...], missing: tuple[int, ...], device: torch.device) -> Tensor:
    """Return first column, width and missing slots of each neighbour type."""
    found = list(zip(first_columns(widths), widths, missing, strict=True))
    return torch.tensor(found, dtype=torch.int32, device="cpu").to(device)


def _launch_spread(edges: Edges, moved: Tensor | None) -> Tensor:
    rows = edges.rows.contiguous()
    atoms, nnei, _ = rows.shape
    out = rows.new_empty(atoms, 4, edges.terms)
    _spread_kernel[(atoms, len(edges.widths))](
        out, rows, edges.empty.contiguous(), rows if moved is None else moved.contiguous(), edges.start,
        type_table(edges.widths, edges.missing, rows.device), *places(edges.pieces, rows.dtype, rows.device), nnei,
        len(edges.pieces), most=GRID, orders=ORDERS, edges=EDGES, block=FEWEST * ORDERS,
        transpose=moved is not None, num_warps=WARPS,
    )  # fmt: skip
    return out


def expand(edges: Edges) -> Tensor:
    """See `interpolation.expand_reference`."""
    return _launch_spread(edges, None)


def spread(edges: Edges, moved: Tensor) -> Tensor:
    """See `interpolation.spread_reference`."""
    return _launch_spread(edges, moved)


def evaluate(edges: Edges, product: Tensor) -> Tensor:
    """See `interpolation.evaluate_reference`."""
    rows = edges.rows.contiguous()
    atoms, nnei, _ = rows.shape
    out = torch.empty_like(rows)
    grid = (atoms, len(edges.widths), triton.cdiv(max(edges.widths), EDGES))
    _evaluate_kernel[grid](
        out, rows, product.contiguous(), edges.start, type_table(edges.widths, edges.missing, rows.device),
        *places(edges.pieces, rows.dtype, rows.device), nnei, len(edges.pieces),
        most=GRID, orders=ORDERS, edges=EDGES,
    )  # fmt: skip
    return out
