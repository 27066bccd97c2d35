"""Triton kernels of `se_e2_a`: rows, their interpolated sums, and the contraction.

`SeE2A._standardised`, `interpolation` and `embedding` have the same functions in torch's
operations, which define the results; `test_rows_kernels`, `test_interpolation_kernels` and
`test_contraction_kernels` compare them.

| symbol | name         | shape                             | meaning                              |
|--------|--------------|-----------------------------------|--------------------------------------|
| R      | `rows`       | (atoms, nnei, 4)                  | standardised environment; R₀ = s     |
| R∅     | `empty`      | (atoms, 4)                        | R of an empty slot                   |
|        | `intervals`  | (types, 2)                        | least s, and cells per unit of s     |
|        | `type_table` | (types, 3)                        | first column, columns, missing slots |
|        | `cells`      | (n_cells,)                        | piece of each cell, see `pieces`     |
|        | `spans`      | (pieces, 2)                       | first cell and 1/length of a piece   |
| B      | `b`          | (atoms, 4, types, pieces, orders) | sums over edges                      |
| P      | `p`          | like B                            | coefficients of polynomials          |
| A      | `a`          | (atoms, 4, M)                     | see `embedding`                      |
| D      | `d`          | (atoms, M, axis)                  | see `embedding`                      |
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepmd_muon.model.descriptor.environment_kernels import Row, loaded_edges, store_row, switched
from deepmd_muon.model.descriptor.pieces import (
    FEWEST,
    GRID,
    ORDERS,
    Edges,
    first_columns,
    places,
)
from deepmd_muon.model.descriptor.reach import Reach
from deepmd_muon.model.nn.vector_kernels import Vector

ROW_BLOCK = 128  # edges of an atom that are standardised together
ATOM_BLOCK = 1024  # atoms whose extremes are reduced together
FEATURE_BLOCK = 128  # rows of D that are computed together
EDGE_BLOCK = 32  # edges that are interpolated together
WARPS = 1  # of a program that works on one atom alone: one warp waits for no other

# ----- rows: a program standardises one atom ------------------------------------------------------


@triton.jit
def _load_four(pointer):
    """Return four numbers that are stored side by side."""
    return tl.load(pointer), tl.load(pointer + 1), tl.load(pointer + 2), tl.load(pointer + 3)


@triton.jit
def _store_four(pointer, x0, x1, x2, x3):
    """Store four numbers side by side."""
    tl.store(pointer, x0)
    tl.store(pointer + 1, x1)
    tl.store(pointer + 2, x2)
    tl.store(pointer + 3, x3)


@triton.jit
def _standard_rows_kernel(
    rows,  # (atoms, nnei, 4), written
    empty,  # (atoms, 4), written
    scale,  # (atoms, 4), written: 1/stddev
    edges,  # (atoms, nnei, 3): r_ij
    neighbor,  # (atoms, nnei), −1 in empty slots
    mean,  # (types, slots, 4)
    stddev,  # (types, slots, 4)
    kinds,  # (atoms,): types
    stride,  # between types of the statistics
    nnei,
    reach,
    block: tl.constexpr,
):
    """R = (w·(t, t²·r) − mean)/stddev with t = 1/(|r| + protection), and R∅ = −mean/stddev.

    w is the switch.
    """
    atom = tl.program_id(0).to(tl.int64)
    statistics = tl.load(kinds + atom) * stride
    stddev0, stddev1, stddev2, stddev3 = _load_four(stddev + statistics)
    scale0 = 1.0 / stddev0
    scale1 = 1.0 / stddev1
    scale2 = 1.0 / stddev2
    scale3 = 1.0 / stddev3
    mean0, mean1, mean2, mean3 = _load_four(mean + statistics)
    empty0 = -mean0 * scale0
    empty1 = -mean1 * scale1
    empty2 = -mean2 * scale2
    empty3 = -mean3 * scale3
    dtype: tl.constexpr = rows.dtype.element_ty
    for begin in range(0, nnei, block):
        column = begin + tl.arange(0, block)
        edge = atom * nnei + column
        mask = column < nnei
        r = loaded_edges(edges, neighbor, edge, mask, reach)
        f = switched(r, reach)
        isotropic = f.switch * f.t * f.t
        radial = empty0 + (f.switch * f.t).to(dtype) * scale0
        vector = Vector(
            empty1 + (isotropic * r.x).to(dtype) * scale1,
            empty2 + (isotropic * r.y).to(dtype) * scale2,
            empty3 + (isotropic * r.z).to(dtype) * scale3,
        )
        store_row(rows, edge, mask, Row(radial, vector))
    _store_four(empty + atom * 4, empty0, empty1, empty2, empty3)
    _store_four(scale + atom * 4, scale0, scale1, scale2, scale3)


def standard_rows(
    edges: Tensor, neighbor: Tensor, reach: Reach, mean: Tensor, stddev: Tensor, kinds: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return R `(nreal, nnei, 4)`, R∅ and dR/drow `(nreal, 4)` in the dtype of the statistics.

    `mean` and `stddev` `(ntypes, slots, 4)` are the same for all slots; `kinds` are the atoms'
    types. The other arguments are as in `environment.environment`.
    """
    atoms, nnei = neighbor.shape
    rows = mean.new_empty(atoms, nnei, 4)
    empty, scale = mean.new_empty(2, atoms, 4).unbind()
    if atoms:
        _standard_rows_kernel[(atoms,)](
            rows=rows,
            empty=empty,
            scale=scale,
            edges=edges.contiguous(),
            neighbor=neighbor.contiguous(),
            mean=mean,
            stddev=stddev,
            kinds=kinds,
            stride=mean.stride(0),
            nnei=nnei,
            reach=Reach(*map(tl.constexpr, reach)),
            block=ROW_BLOCK,
        )
    return rows, empty, scale


# ----- intervals of s -----------------------------------------------------------------------------


@triton.jit
def _extremes_kernel(
    extremes,  # (2, types, atoms), written: least and largest s
    rows,  # (atoms, nnei, 4)
    empty,  # (atoms, 4)
    type_table,  # (types, 3)
    atoms,
    nnei,
    block: tl.constexpr,
):
    """Min and max of the s of one atom's neighbours of one type and of an empty slot."""
    atom = tl.program_id(0).to(tl.int64)
    kind = tl.program_id(1)
    kinds = tl.num_programs(1)
    first_column = tl.load(type_table + 3 * kind)
    width = tl.load(type_table + 3 * kind + 1)
    empty_s = tl.load(empty + atom * 4)
    low = tl.zeros((block,), rows.dtype.element_ty) + empty_s
    high = low
    for begin in range(0, width, block):
        column = begin + tl.arange(0, block)
        mask = column < width
        s = tl.load(rows + (atom * nnei + first_column + column) * 4, mask, 0.0)
        s = tl.where(mask, s, empty_s)
        low = tl.minimum(low, s)
        high = tl.maximum(high, s)
    tl.store(extremes + kind * atoms + atom, tl.min(low))
    tl.store(extremes + (kinds + kind) * atoms + atom, tl.max(high))


@triton.jit
def _intervals_kernel(
    intervals,  # (types, 2), written
    extremes,  # (2, types, atoms)
    atoms,
    shortest: tl.constexpr,
    n_cells: tl.constexpr,
    block: tl.constexpr,
):
    """(min s, n_cells / max(max s − min s, shortest)) over all atoms, for one type."""
    kind = tl.program_id(0)
    kinds = tl.num_programs(0)
    lows = extremes + kind * atoms
    highs = extremes + (kinds + kind) * atoms
    dtype: tl.constexpr = extremes.dtype.element_ty
    low = tl.zeros((block,), dtype) + tl.load(lows)
    high = tl.zeros((block,), dtype) + tl.load(highs)
    for begin in range(0, atoms, block):
        atom = begin + tl.arange(0, block)
        mask = atom < atoms
        low = tl.minimum(low, tl.load(lows + atom, mask, float("inf")))
        high = tl.maximum(high, tl.load(highs + atom, mask, float("-inf")))
    lowest = tl.min(low)
    span = tl.maximum(tl.max(high) - lowest, shortest).to(dtype)
    tl.store(intervals + 2 * kind, lowest)
    tl.store(intervals + 2 * kind + 1, n_cells / span)


def intervals_of(rows: Tensor, empty: Tensor, widths: Sequence[int], shortest: float) -> Tensor:
    """Return the `intervals` of `Edges` `(types, 2)`, none shorter than `shortest`."""
    atoms, nnei, _ = rows.shape
    types = len(widths)
    extremes = rows.new_empty(2, types, atoms)
    _extremes_kernel[(atoms, types)](
        extremes=extremes,
        rows=rows.contiguous(),
        empty=empty.contiguous(),
        type_table=_type_table(tuple(widths), (0,) * types, rows.device),
        atoms=atoms,
        nnei=nnei,
        block=ROW_BLOCK,
    )
    intervals = rows.new_empty(types, 2)
    _intervals_kernel[(types,)](
        intervals=intervals,
        extremes=extremes,
        atoms=atoms,
        shortest=shortest,
        n_cells=GRID,
        block=ATOM_BLOCK,
    )
    return intervals


# ----- interpolated sums: a program works on one atom and one neighbour type ----------------------


class Cut(NamedTuple):
    """How the intervals of s are cut; see the table above."""

    intervals: Any
    type_table: Any
    cells: Any
    spans: Any
    nnei: Any
    pieces: Any


class Form(NamedTuple):
    """Sizes that are known when a kernel is compiled; `edges` are interpolated together."""

    n_cells: tl.constexpr
    orders: tl.constexpr
    edges: tl.constexpr


class Part(NamedTuple):
    """The atom and neighbour type of a program."""

    atom: Any
    first_column: Any
    width: Any  # columns
    missing: Any  # slots beyond the columns
    low: Any  # least s
    rate: Any  # cells per unit of s
    size: Any  # pieces·orders: numbers of a component in B or P
    start: Any  # of these numbers of component 0
    stride: Any  # between components


@triton.jit
def _part_of_program(cut, form):
    """Return the part of a program."""
    atom = tl.program_id(0).to(tl.int64)
    kind = tl.program_id(1)
    kinds = tl.num_programs(1)
    entry = cut.type_table + 3 * kind
    size = cut.pieces * form.orders
    return Part(
        atom=atom,
        first_column=tl.load(entry),
        width=tl.load(entry + 1),
        missing=tl.load(entry + 2),
        low=tl.load(cut.intervals + 2 * kind),
        rate=tl.load(cut.intervals + 2 * kind + 1),
        size=size,
        start=(atom * 4 * kinds + kind) * size,
        stride=kinds * size,
    )


@triton.jit
def _basis(place, cut, form):
    """Return piece and 1/length (edges,), T_m(u) and T′_m(u) (edges, orders) at some places.

    Places are in [0, n_cells].
    T_m = 2u·T_{m−1} − T_{m−2} and T′_m = 2(T_{m−1} + u·T′_{m−1}) − T′_{m−2}.
    """
    piece = tl.load(cut.cells + tl.minimum(tl.maximum(place.to(tl.int32), 0), form.n_cells - 1))
    first_cell = tl.load(cut.spans + 2 * piece)
    inverse = tl.load(cut.spans + 2 * piece + 1)
    u = 2.0 * (place - first_cell) * inverse - 1.0
    m = tl.arange(0, form.orders)[None, :]
    t_before = tl.full((form.edges,), 1.0, place.dtype)
    t = u
    slope_before = tl.zeros((form.edges,), place.dtype)
    slope = tl.full((form.edges,), 1.0, place.dtype)
    values = tl.where(m == 0, t_before[:, None], t[:, None])
    slopes = tl.where(m == 0, slope_before[:, None], slope[:, None])
    for k in tl.static_range(2, form.orders):
        slope_next = 2.0 * (t + u * slope) - slope_before
        t_next = 2.0 * u * t - t_before
        slope_before = slope
        slope = slope_next
        t_before = t
        t = t_next
        values = tl.where(m == k, t[:, None], values)
        slopes = tl.where(m == k, slope[:, None], slopes)
    return piece, inverse, values, slopes


@triton.jit
def _clear(target, part, block: tl.constexpr):
    """Write zeros to the (4, pieces, orders) sums of one atom and neighbour type."""
    for c in tl.static_range(4):
        for begin in range(0, part.size, block):
            zeros = tl.zeros((block,), target.dtype.element_ty)
            tl.store(target + c * part.stride + begin + tl.arange(0, block), zeros)


@triton.jit
def _piece_range(piece, used, pieces):
    """Return the first piece with a used edge, and the end of the range of such pieces."""
    lowest = tl.min(tl.where(used, piece, pieces))
    highest = tl.max(tl.where(used, piece, -1))
    return lowest, highest + 1


@triton.jit
def _add_terms(sums, terms):
    """Add the sum over edges of terms (edges, orders) to sums (orders,) in memory."""
    total = tl.load(sums) + tl.sum(terms, 0)
    tl.debug_barrier()  # several threads may hold the same order: all read before one writes
    tl.store(sums, total)


@triton.jit
def _spread_kernel(
    sums,  # (atoms, 4, types, pieces, orders), written: B, or P̄ with a cotangent
    rows,  # (atoms, nnei, 4)
    empty,  # (atoms, 4); None with a cotangent
    cotangent,  # (atoms, nnei, 4): of the result of `_evaluate_kernel`, y; None for B
    cut,  # Cut
    form,  # Form
    block: tl.constexpr,
):
    """B[c, jm] = Σ_{e in piece j} R_e[c]·T_m(u_e), the missing slots as one edge with row missing·R∅.

    P̄[c, jm] = Σ_{e in piece j} (y_e[c]·T_m(u_e) + y_e[0]·R_e[c]·T′_m(u_e)·du/ds), the transpose of
    `_evaluate_kernel`. Neighbours are sorted by distance, so that few pieces have edges in a block.
    """
    part = _part_of_program(cut, form)
    width = part.width
    target = sums + part.start
    _clear(target, part, block)
    n_edges = width + 1 if cotangent is None else width
    for begin in range(0, n_edges, form.edges):
        e = begin + tl.arange(0, form.edges)
        is_edge = e < width
        used = e < n_edges
        at = (part.atom * cut.nnei + part.first_column + e) * 4
        # Unused lanes stay at the start of the interval: far outside it polynomials overflow, and 0
        # · inf is NaN.
        s = tl.where(is_edge, tl.load(rows + at, is_edge, 0.0), part.low)
        if cotangent is None:
            s = tl.where(e == width, tl.load(empty + part.atom * 4), s)
        piece, inverse, values, slopes = _basis((s - part.low) * part.rate, cut, form)
        if cotangent is not None:
            y0_du_ds = tl.load(cotangent + at, used, 0.0) * (2.0 * part.rate * inverse)
        lowest, end = _piece_range(piece, used, cut.pieces)
        for number in range(lowest, end):
            inside = used & (piece == number)
            if tl.sum(inside.to(tl.int32)) > 0:
                piece_sums = target + number * form.orders + tl.arange(0, form.orders)
                tl.debug_barrier()  # other threads have written these sums
                for c in tl.static_range(4):
                    row = tl.load(rows + at + c, inside & is_edge, 0.0)
                    if cotangent is None:
                        stand_in = tl.load(empty + part.atom * 4 + c) * part.missing.to(row.dtype)
                        row = tl.where(inside & (e == width), stand_in, row)
                        terms = row[:, None] * values
                    else:
                        y = tl.load(cotangent + at + c, inside, 0.0)
                        slope_factor = row * tl.where(inside, y0_du_ds, 0.0)
                        terms = y[:, None] * values + slope_factor[:, None] * slopes
                    _add_terms(piece_sums + c * part.stride, terms)


@triton.jit
def _evaluate_kernel(
    out,  # (atoms, nnei, 4), written
    rows,  # (atoms, nnei, 4)
    p,  # (atoms, 4, types, pieces, orders)
    cut,  # Cut
    form,  # Form
):
    """out_e[c] = Σ_m P[c, jm]·T_m(u_e) + [c = 0]·Σ_bm R_e[b]·P[b, jm]·T′_m(u_e)·du/ds."""
    part = _part_of_program(cut, form)
    e = tl.program_id(2) * form.edges + tl.arange(0, form.edges)
    is_edge = e < part.width
    at = (part.atom * cut.nnei + part.first_column + e) * 4
    s = tl.where(is_edge, tl.load(rows + at, is_edge, 0.0), part.low)
    piece, inverse, values, slopes = _basis((s - part.low) * part.rate, cut, form)
    cell = piece[:, None] * form.orders + tl.arange(0, form.orders)[None, :]
    source = p + part.start + cell
    through_s = tl.zeros((form.edges,), rows.dtype.element_ty)
    result0 = through_s
    for c in tl.static_range(4):
        coefficients = tl.load(source + c * part.stride)
        row = tl.load(rows + at + c, is_edge, 0.0)
        through_s += tl.sum(coefficients * slopes, 1) * row
        result = tl.sum(coefficients * values, 1)
        if c == 0:
            result0 = result
        else:
            tl.store(out + at + c, result, is_edge)
    tl.store(out + at, result0 + through_s * (2.0 * part.rate * inverse), is_edge)


@lru_cache  # captured graphs read these tables
def _type_table(widths: tuple[int, ...], missing: tuple[int, ...], device: torch.device) -> Tensor:
    """Return first column, columns and missing slots of each neighbour type `(types, 3)`."""
    entries = list(zip(first_columns(widths), widths, missing, strict=True))
    return torch.tensor(entries, dtype=torch.int32, device="cpu").to(device)


def _common(edges: Edges, rows: Tensor) -> dict[str, Any]:
    """Return the arguments that all kernels of interpolated sums share."""
    cells, spans = places(edges.pieces, rows.dtype, rows.device)
    return {
        "rows": rows,
        "cut": Cut(
            intervals=edges.intervals,
            type_table=_type_table(edges.widths, edges.missing, rows.device),
            cells=cells,
            spans=spans,
            nnei=rows.shape[1],
            pieces=len(edges.pieces),
        ),
        "form": Form(*map(tl.constexpr, (GRID, ORDERS, EDGE_BLOCK))),
    }


def expand(edges: Edges) -> Tensor:
    """Return the result of `interpolation.expand_reference`."""
    return _spread(edges, empty=edges.empty.contiguous(), cotangent=None)


def spread(edges: Edges, cotangent: Tensor) -> Tensor:
    """Return the result of `interpolation.spread_reference`."""
    return _spread(edges, empty=None, cotangent=cotangent.contiguous())


def _spread(edges: Edges, *, empty: Tensor | None, cotangent: Tensor | None) -> Tensor:
    """Return the result of `_spread_kernel`."""
    rows = edges.rows.contiguous()
    sums = rows.new_empty(len(rows), 4, edges.terms)
    _spread_kernel[(len(rows), len(edges.widths))](
        sums=sums,
        empty=empty,
        cotangent=cotangent,
        block=FEWEST * ORDERS,
        num_warps=WARPS,
        **_common(edges, rows),
    )
    return sums


def evaluate(edges: Edges, p: Tensor) -> Tensor:
    """Return the result of `interpolation.evaluate_reference`."""
    rows = edges.rows.contiguous()
    out = torch.empty_like(rows)
    blocks = triton.cdiv(max(edges.widths), EDGE_BLOCK)
    _evaluate_kernel[(len(rows), len(edges.widths), blocks)](
        out=out, p=p.contiguous(), **_common(edges, rows)
    )
    return out


# ----- contraction --------------------------------------------------------------------------------
# Batched matrix products with sums of four terms are bound by the small tiles of their launches;
# these kernels read and write each number once.


@triton.jit
def _load_rows(a, width, column, mask):
    """Return some columns of the four rows of A of one atom."""
    row0 = tl.load(a + column, mask, 0.0)
    row1 = tl.load(a + width + column, mask, 0.0)
    row2 = tl.load(a + 2 * width + column, mask, 0.0)
    row3 = tl.load(a + 3 * width + column, mask, 0.0)
    return row0, row1, row2, row3


@triton.jit
def _column_sums(bar, a_row, mask):
    """Return Σ_m A[c, m]·D̄[m, k] from D̄ (features, columns) and pointers to A[c, m]."""
    return tl.sum(bar * tl.load(a_row, mask, 0.0)[:, None], 0)


@triton.jit
def _contract_kernel(
    d,  # (atoms, M, axis), written
    a,  # (atoms, 4, M)
    width,  # M
    axis,
    features: tl.constexpr,
    columns: tl.constexpr,
):
    """D[m, k] = Σ_c A[c, m]·A[c, k], k < axis: some rows of one atom."""
    atom = tl.program_id(0).to(tl.int64)
    m = tl.program_id(1) * features + tl.arange(0, features)
    k = tl.arange(0, columns)
    m_mask = m < width
    k_mask = k < axis
    total = tl.zeros((features, columns), a.dtype.element_ty)
    for c in tl.static_range(4):
        row = a + (atom * 4 + c) * width
        a_m = tl.load(row + m, m_mask, 0.0)
        a_k = tl.load(row + k, k_mask, 0.0)
        total += a_m[:, None] * a_k[None, :]
    index = (atom * width + m[:, None]) * axis + k[None, :]
    tl.store(d + index, total, m_mask[:, None] & k_mask[None, :])


@triton.jit
def _pull_contraction_kernel(
    a_bar,  # (atoms, 4, M), written
    a,  # (atoms, 4, M)
    d_bar,  # (atoms, M, axis)
    width,  # M
    axis,
    features: tl.constexpr,
    columns: tl.constexpr,
):
    """Ā[c, m] = Σ_k A[c, k]·D̄[m, k] + [m < axis]·Σ_l A[c, l]·D̄[l, m]: one atom."""
    atom = tl.program_id(0).to(tl.int64)
    k = tl.arange(0, columns)
    k_mask = k < axis
    source = a + atom * 4 * width
    target = a_bar + atom * 4 * width
    first0, first1, first2, first3 = _load_rows(source, width, k, k_mask)
    zeros = tl.zeros((columns,), a.dtype.element_ty)
    axis_sum0 = zeros
    axis_sum1 = zeros
    axis_sum2 = zeros
    axis_sum3 = zeros
    for begin in range(0, width, features):
        m = begin + tl.arange(0, features)
        m_mask = m < width
        index = (atom * width + m[:, None]) * axis + k[None, :]
        bar = tl.load(d_bar + index, m_mask[:, None] & k_mask[None, :], 0.0)
        # One row of A after the other: all four at once do not fit the registers in float64.
        tl.store(target + m, tl.sum(bar * first0[None, :], 1), m_mask)
        tl.store(target + width + m, tl.sum(bar * first1[None, :], 1), m_mask)
        tl.store(target + 2 * width + m, tl.sum(bar * first2[None, :], 1), m_mask)
        tl.store(target + 3 * width + m, tl.sum(bar * first3[None, :], 1), m_mask)
        axis_sum0 += _column_sums(bar, source + m, m_mask)
        axis_sum1 += _column_sums(bar, source + width + m, m_mask)
        axis_sum2 += _column_sums(bar, source + 2 * width + m, m_mask)
        axis_sum3 += _column_sums(bar, source + 3 * width + m, m_mask)
    tl.debug_barrier()  # other threads have written the first columns
    sum0, sum1, sum2, sum3 = _load_rows(target, width, k, k_mask)
    sum0 += axis_sum0
    sum1 += axis_sum1
    sum2 += axis_sum2
    sum3 += axis_sum3
    tl.debug_barrier()  # several threads may hold the same column: all read before one writes
    tl.store(target + k, sum0, k_mask)
    tl.store(target + width + k, sum1, k_mask)
    tl.store(target + 2 * width + k, sum2, k_mask)
    tl.store(target + 3 * width + k, sum3, k_mask)


def contract(a: Tensor, axis: int) -> Tensor:
    """Return D `(natoms, M, axis)` from A `(natoms, 4, M)`."""
    natoms, _, width = a.shape
    d = a.new_empty(natoms, width, axis)
    if natoms:
        _contract_kernel[(natoms, triton.cdiv(width, FEATURE_BLOCK))](
            d=d, a=a.contiguous(), **_contraction_sizes(width, axis)
        )
    return d


def pull_contraction(a: Tensor, d_bar: Tensor) -> Tensor:
    """Return Ā `(natoms, 4, M)` from A and D̄ `(natoms, M, axis)`."""
    natoms, width, axis = d_bar.shape
    a_bar = a.new_empty(a.shape)
    if natoms:
        _pull_contraction_kernel[(natoms,)](
            a_bar=a_bar,
            a=a.contiguous(),
            d_bar=d_bar.contiguous(),
            num_warps=WARPS,
            **_contraction_sizes(width, axis),
        )
    return a_bar


def _contraction_sizes(width: int, axis: int) -> dict[str, int]:
    return {
        "width": width,
        "axis": axis,
        "features": FEATURE_BLOCK,
        "columns": max(2, int(triton.next_power_of_2(axis))),
    }
