"""Triton kernels of the interpolated embedding: the sums over edges of `interpolation`, which defines their result."""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl

from deepmd_muon.model.descriptor.se_e2_a.edges import ORDERS, Edges, first_columns

EDGES = 32  # edges looked at together
WARPS = 1  # of a program that sums over the edges of an atom


@triton.jit
def _basis(place, pieces: tl.constexpr, orders: tl.constexpr, edges: tl.constexpr):
    """Return the piece, T_m(u) and T′_m(u) `(edges, orders)` of every place in [0, pieces]."""
    piece = tl.minimum(tl.maximum(place.to(tl.int32), 0), pieces - 1)
    u = 2.0 * (place - piece.to(place.dtype)) - 1.0
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
    return piece, values, slopes


@triton.jit
def _spread_kernel(
    out, rows, empty, moved, start, table, nnei,
    pieces: tl.constexpr, orders: tl.constexpr, edges: tl.constexpr, transpose: tl.constexpr,
):  # fmt: skip
    """Sum over the edges of one atom and neighbour type into `(4, pieces, orders)`.

    With `transpose`, the cotangents `moved` of `evaluate`; else R itself, empty slots included. Neighbours are sorted
    by distance, so that few pieces have edges in a block.
    """
    atom, kind = tl.program_id(0).to(tl.int64), tl.program_id(1)
    first, width, missing = tl.load(table + 3 * kind), tl.load(table + 3 * kind + 1), tl.load(table + 3 * kind + 2)
    low, rate = tl.load(start + 2 * kind), tl.load(start + 2 * kind + 1)
    dtype: tl.constexpr = rows.dtype.element_ty
    kinds = tl.num_programs(1)
    size: tl.constexpr = pieces * orders
    target = out + (atom * 4 * kinds + kind) * size
    for c in tl.static_range(4):
        tl.store(target + c * kinds * size + tl.arange(0, size), tl.zeros((size,), dtype))
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
        piece, values, slopes = _basis((s - low) * rate, pieces, orders, edges)
        if transpose:
            bend = tl.load(moved + at, real, 0.0) * (2.0 * rate)
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
                        terms = y[:, None] * values + (x * tl.where(mine, bend, 0.0))[:, None] * slopes
                    else:
                        stand_in = tl.load(empty + atom * 4 + c) * missing.to(dtype)
                        terms = tl.where(mine & is_empty, stand_in, x)[:, None] * values
                    sums = tl.load(cell + c * kinds * size) + tl.sum(terms, 0)
                    tl.debug_barrier()
                    tl.store(cell + c * kinds * size, sums)


@triton.jit
def _evaluate_kernel(
    out, rows, product, start, table, nnei, pieces: tl.constexpr, orders: tl.constexpr, edges: tl.constexpr
):
    """Evaluate the polynomials P of one atom and neighbour type at some of its edges."""
    atom, kind = tl.program_id(0).to(tl.int64), tl.program_id(1)
    kinds = tl.num_programs(1)
    first, width = tl.load(table + 3 * kind), tl.load(table + 3 * kind + 1)
    low, rate = tl.load(start + 2 * kind), tl.load(start + 2 * kind + 1)
    size: tl.constexpr = pieces * orders
    e = tl.program_id(2) * edges + tl.arange(0, edges)
    real = e < width
    at = (atom * nnei + first + e) * 4
    s = tl.where(real, tl.load(rows + at, real, 0.0), low)
    piece, values, slopes = _basis((s - low) * rate, pieces, orders, edges)
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
    tl.store(out + at, result0 + through_s * (2.0 * rate), real)


@lru_cache
def type_table(widths: tuple[int, ...], missing: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """Return first column, width and missing slots of each neighbour type."""
    found = list(zip(first_columns(widths), widths, missing, strict=True))
    return torch.tensor(found, dtype=torch.int32, device="cpu").to(device)


def _launch_spread(edges: Edges, moved: torch.Tensor | None) -> torch.Tensor:
    rows = edges.rows.contiguous()
    atoms, nnei, _ = rows.shape
    out = rows.new_empty(atoms, 4, edges.terms)
    _spread_kernel[(atoms, len(edges.widths))](
        out,
        rows,
        edges.empty.contiguous(),
        rows if moved is None else moved.contiguous(),
        edges.start,
        type_table(edges.widths, edges.missing, rows.device),
        nnei,
        pieces=edges.pieces,
        orders=ORDERS,
        edges=EDGES,
        transpose=moved is not None,
        num_warps=WARPS,
    )
    return out


def expand(edges: Edges) -> torch.Tensor:
    """See `interpolation.expand_reference`."""
    return _launch_spread(edges, None)


def spread(edges: Edges, moved: torch.Tensor) -> torch.Tensor:
    """See `interpolation.spread_reference`."""
    return _launch_spread(edges, moved)


def evaluate(edges: Edges, product: torch.Tensor) -> torch.Tensor:
    """See `interpolation.evaluate_reference`."""
    rows = edges.rows.contiguous()
    atoms, nnei, _ = rows.shape
    out = torch.empty_like(rows)
    grid = (atoms, len(edges.widths), triton.cdiv(max(edges.widths), EDGES))
    _evaluate_kernel[grid](
        out,
        rows,
        product.contiguous(),
        edges.start,
        type_table(edges.widths, edges.missing, rows.device),
        nnei,
        pieces=edges.pieces,
        orders=ORDERS,
        edges=EDGES,
    )
    return out
