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
|        | `cells`      | (n_cells,)                        | the piece that each cell is in       |
|        | `spans`      | (pieces, 2)                       | first cell and 1/length of a piece   |
| B      | `b`          | (atoms, 4, types, pieces, orders) | sums over edges                      |
| P      | `p`          | like B                            | coefficients of polynomials          |
| A      | `a`          | (atoms, 4, M)                     | see `embedding`                      |
| D      | `d`          | (atoms, M, axis)                  | see `embedding`                      |

A section is the columns of one neighbour type in the list of one atom. The slots of `sel` beyond
its columns are missing from the list; they are empty. `interpolation` has the formulas, and all
types share their pieces. The place of an s is its distance from the start of the interval in cells;
u ∈ [−1, 1] is its coordinate within the piece.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
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

ROW_BLOCK = 128  # edges of an atom that are standardised, or reduced to extremes, together
ATOM_BLOCK = 1024  # atoms whose extremes are reduced together
FEATURE_BLOCK = 128  # rows of D that are computed together
EDGE_BLOCK = 32  # edges that are interpolated together
WARPS = 1  # of a program that works on one atom alone: one warp waits for no other

# ----- rows: a program standardises one atom ------------------------------------------------------


def standard_rows(
    edges: Tensor, neighbor: Tensor, reach: Reach, mean: Tensor, stddev: Tensor, kinds: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return R `(nreal, nnei, 4)`, R∅ and dR/drow `(nreal, 4)` in the dtype of the statistics.

    `mean` and `stddev` `(ntypes, slots, 4)` are the same for all slots; `kinds` are the
    types of the centres. The other arguments are as in `environment.environment`.
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
            type_stride=mean.stride(0),
            nnei=nnei,
            reach=Reach(*map(tl.constexpr, reach)),
            block=ROW_BLOCK,
        )
    return rows, empty, scale


@triton.jit
def _standard_rows_kernel(
    rows,  # (atoms, nnei, 4), written
    empty,  # (atoms, 4), written
    scale,  # (atoms, 4), written: 1/stddev
    edges,  # (atoms, nnei, 3): r_ij
    neighbor,  # (atoms, nnei), negative in empty slots and for excluded pairs
    mean,  # (types, slots, 4)
    stddev,  # (types, slots, 4)
    kinds,  # (atoms,): types of the centres
    type_stride,  # of mean and stddev, both contiguous
    nnei,
    reach,
    block: tl.constexpr,
):
    """Write R = (w·(t, t²·r) − mean)/stddev and R∅ = −mean/stddev; see `environment` for w and t."""
    atom = tl.program_id(0).to(tl.int64)
    statistics = tl.load(kinds + atom) * type_stride
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


# ----- intervals of s -----------------------------------------------------------------------------


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
    """Write min and max of the s in one section, and of an empty slot."""
    atom = tl.program_id(0).to(tl.int64)
    kind = tl.program_id(1)
    n_types = tl.num_programs(1)
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
    tl.store(extremes + (n_types + kind) * atoms + atom, tl.max(high))


@triton.jit
def _intervals_kernel(
    intervals,  # (types, 2), written
    extremes,  # (2, types, atoms)
    atoms,
    shortest: tl.constexpr,
    n_cells: tl.constexpr,
    block: tl.constexpr,
):
    """Write min s and n_cells / max(max s − min s, shortest) over all atoms, for one type."""
    kind = tl.program_id(0)
    n_types = tl.num_programs(0)
    lows = extremes + kind * atoms
    highs = extremes + (n_types + kind) * atoms
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


# ----- interpolated sums: a program works on one atom and one neighbour type ----------------------


def expand(edges: Edges) -> Tensor:
    """Return the result of `interpolation.expand_reference`."""
    return _sum_over_edges(edges, empty=edges.empty.contiguous(), cotangent=None)


def spread(edges: Edges, cotangent: Tensor) -> Tensor:
    """Return the result of `interpolation.spread_reference`."""
    return _sum_over_edges(edges, empty=None, cotangent=cotangent.contiguous())


def _sum_over_edges(edges: Edges, *, empty: Tensor | None, cotangent: Tensor | None) -> Tensor:
    """Return the result of `_edge_sums_kernel`."""
    rows = edges.rows.contiguous()
    sums = rows.new_empty(len(rows), 4, edges.terms)
    _edge_sums_kernel[(len(rows), len(edges.widths))](
        sums=sums,
        empty=empty,
        cotangent=cotangent,
        clear_block=FEWEST * ORDERS,
        num_warps=WARPS,
        **_shared_arguments(edges, rows),
    )
    return sums


def evaluate(edges: Edges, p: Tensor) -> Tensor:
    """Return the result of `interpolation.evaluate_reference`."""
    rows = edges.rows.contiguous()
    out = torch.empty_like(rows)
    blocks = triton.cdiv(max(edges.widths), EDGE_BLOCK)
    _evaluate_kernel[(len(rows), len(edges.widths), blocks)](
        out=out, p=p.contiguous(), **_shared_arguments(edges, rows)
    )
    return out


def _shared_arguments(edges: Edges, rows: Tensor) -> dict[str, Any]:
    """Return what both kernels of interpolated sums take."""
    cells, spans = places(edges.pieces, rows.dtype, rows.device)
    return {
        "rows": rows,
        "tables": Tables(
            intervals=edges.intervals,
            type_table=_type_table(edges.widths, edges.missing, rows.device),
            cells=cells,
            spans=spans,
            nnei=rows.shape[1],
            n_pieces=len(edges.pieces),
        ),
        "sizes": Sizes(*map(tl.constexpr, (GRID, ORDERS, EDGE_BLOCK))),
    }


@cache  # captured graphs read these tables
def _type_table(widths: tuple[int, ...], missing: tuple[int, ...], device: torch.device) -> Tensor:
    """Return first column, columns and missing slots of each neighbour type `(types, 3)`."""
    entries = list(zip(first_columns(widths), widths, missing, strict=True))
    return torch.tensor(entries, dtype=torch.int32, device="cpu").to(device)


class Tables(NamedTuple):
    """The intervals of s and their pieces; see the module."""

    intervals: Any
    type_table: Any
    cells: Any
    spans: Any
    nnei: Any
    n_pieces: Any


class Sizes(NamedTuple):
    """Sizes that are known when a kernel is compiled."""

    n_cells: tl.constexpr
    orders: tl.constexpr
    block: tl.constexpr  # edges that are interpolated together


class Section(NamedTuple):
    """The section of a program, and its numbers (4, pieces, orders) in B or P."""

    atom: Any
    first_column: Any
    width: Any  # columns
    missing: Any  # slots beyond the columns
    low: Any  # least s
    rate: Any  # cells per unit of s
    n_numbers: Any  # of one component: pieces·orders
    start: Any  # of component 0 in B or P
    stride: Any  # between components in B or P


@triton.jit
def _section_of_program(tables, sizes):
    """Return the `Section` of a program."""
    atom = tl.program_id(0).to(tl.int64)
    kind = tl.program_id(1)
    n_types = tl.num_programs(1)
    entry = tables.type_table + 3 * kind
    n_numbers = tables.n_pieces * sizes.orders
    return Section(
        atom=atom,
        first_column=tl.load(entry),
        width=tl.load(entry + 1),
        missing=tl.load(entry + 2),
        low=tl.load(tables.intervals + 2 * kind),
        rate=tl.load(tables.intervals + 2 * kind + 1),
        n_numbers=n_numbers,
        start=(atom * 4 * n_types + kind) * n_numbers,
        stride=n_types * n_numbers,
    )


@triton.jit
def _edge_sums_kernel(
    sums,  # (atoms, 4, types, pieces, orders), written: B (`expand`), or P̄ (`spread`)
    rows,  # (atoms, nnei, 4)
    empty,  # (atoms, 4); None for P̄
    cotangent,  # (atoms, nnei, 4): of the result of `_evaluate_kernel`, y; None for B
    tables,  # Tables
    sizes,  # Sizes
    clear_block: tl.constexpr,  # numbers of a section that are cleared together
):
    """Write B[c, jm] = Σ_e R_e[c]·T_m(u_e) over the edges e in piece j.

    The missing slots are one edge more, the stand-in, with the row missing·R∅. With a cotangent
    there is none; write P̄[c, jm] = Σ_e (y_e[c]·T_m(u_e) + y_e[0]·R_e[c]·T′_m(u_e)·du/ds), the
    transpose of `_evaluate_kernel`. Neighbours are sorted by distance: a block has few pieces.
    """
    section = _section_of_program(tables, sizes)
    width = section.width
    target = sums + section.start
    _clear(target, section, clear_block)
    n_edges = width + 1 if cotangent is None else width
    for begin in range(0, n_edges, sizes.block):
        e = begin + tl.arange(0, sizes.block)
        is_edge = e < width
        used = e < n_edges
        offset = (section.atom * tables.nnei + section.first_column + e) * 4
        # Unused lanes stay at the start of the interval: far outside it polynomials overflow, and
        # 0 · inf is NaN.
        s = tl.where(is_edge, tl.load(rows + offset, is_edge, 0.0), section.low)
        if cotangent is None:
            s = tl.where(e == width, tl.load(empty + section.atom * 4), s)
        basis = _basis(s, section, tables, sizes)
        if cotangent is not None:
            y0_du_ds = tl.load(cotangent + offset, used, 0.0) * basis.du_ds
        lowest, end = _piece_range(basis.piece, used, tables.n_pieces)
        for piece in range(lowest, end):
            in_piece = used & (basis.piece == piece)
            if tl.sum(in_piece.to(tl.int32)) > 0:
                piece_sums = target + piece * sizes.orders + tl.arange(0, sizes.orders)
                tl.debug_barrier()  # other threads have written these sums
                for c in tl.static_range(4):
                    row = tl.load(rows + offset + c, in_piece & is_edge, 0.0)
                    if cotangent is None:
                        empty_row = tl.load(empty + section.atom * 4 + c)
                        stand_in = empty_row * section.missing.to(row.dtype)
                        row = tl.where(in_piece & (e == width), stand_in, row)
                        addends = row[:, None] * basis.t
                    else:
                        y = tl.load(cotangent + offset + c, in_piece, 0.0)
                        slope_factor = row * tl.where(in_piece, y0_du_ds, 0.0)
                        addends = y[:, None] * basis.t + slope_factor[:, None] * basis.dt_du
                    _add_sum(piece_sums + c * section.stride, addends)


@triton.jit
def _clear(target, section, block: tl.constexpr):
    """Write zeros to the sums of a section, in blocks that divide their number."""
    for c in tl.static_range(4):
        for begin in range(0, section.n_numbers, block):
            zeros = tl.zeros((block,), target.dtype.element_ty)
            tl.store(target + c * section.stride + begin + tl.arange(0, block), zeros)


@triton.jit
def _piece_range(piece, used, n_pieces):
    """Return the first piece with a used edge, and the end of these pieces."""
    lowest = tl.min(tl.where(used, piece, n_pieces))
    highest = tl.max(tl.where(used, piece, -1))
    return lowest, highest + 1


@triton.jit
def _add_sum(sums, addends):
    """Add the sum over edges of addends (edges, orders) to sums (orders,) in memory."""
    total = tl.load(sums) + tl.sum(addends, 0)
    tl.debug_barrier()  # several threads may hold the same order: all read before one writes
    tl.store(sums, total)


@triton.jit
def _evaluate_kernel(
    out,  # (atoms, nnei, 4), written
    rows,  # (atoms, nnei, 4)
    p,  # (atoms, 4, types, pieces, orders)
    tables,  # Tables
    sizes,  # Sizes
):
    """Write out_e[c] = Σ_m P[c, jm]·T_m(u_e), with j the piece of e.

    Component 0, which is s, gets Σ_bm R_e[b]·P[b, jm]·T′_m(u_e)·du/ds more.
    """
    section = _section_of_program(tables, sizes)
    e = tl.program_id(2) * sizes.block + tl.arange(0, sizes.block)
    is_edge = e < section.width
    offset = (section.atom * tables.nnei + section.first_column + e) * 4
    s = tl.where(is_edge, tl.load(rows + offset, is_edge, 0.0), section.low)
    basis = _basis(s, section, tables, sizes)
    order = tl.arange(0, sizes.orders)[None, :]
    source = p + section.start + (basis.piece[:, None] * sizes.orders + order)
    through_s = tl.zeros((sizes.block,), rows.dtype.element_ty)
    result0 = through_s  # as the loop needs; replaced at c = 0
    for c in tl.static_range(4):
        coefficients = tl.load(source + c * section.stride)
        row = tl.load(rows + offset + c, is_edge, 0.0)
        through_s += tl.sum(coefficients * basis.dt_du, 1) * row
        result = tl.sum(coefficients * basis.t, 1)
        if c == 0:
            result0 = result
        else:
            tl.store(out + offset + c, result, is_edge)
    tl.store(out + offset, result0 + through_s * basis.du_ds, is_edge)


class Basis(NamedTuple):
    """Chebyshev polynomials at the s of some edges."""

    piece: Any  # (block,)
    du_ds: Any  # (block,)
    t: Any  # (block, orders): T_m(u)
    dt_du: Any  # (block, orders): T′_m(u)


@triton.jit
def _basis(s, section, tables, sizes):
    """Return the `Basis` at s (block,).

    T_m = 2u·T_{m−1} − T_{m−2} and T′_m = 2(T_{m−1} + u·T′_{m−1}) − T′_{m−2}.
    """
    place = (s - section.low) * section.rate
    cell = tl.minimum(tl.maximum(place.to(tl.int32), 0), sizes.n_cells - 1)
    piece = tl.load(tables.cells + cell)
    first_cell = tl.load(tables.spans + 2 * piece)
    inverse_length = tl.load(tables.spans + 2 * piece + 1)
    u = 2.0 * (place - first_cell) * inverse_length - 1.0
    m = tl.arange(0, sizes.orders)[None, :]
    t_before = tl.full((sizes.block,), 1.0, place.dtype)
    t = u
    slope_before = tl.zeros((sizes.block,), place.dtype)
    slope = tl.full((sizes.block,), 1.0, place.dtype)
    values = tl.where(m == 0, t_before[:, None], t[:, None])
    slopes = tl.where(m == 0, slope_before[:, None], slope[:, None])
    for k in tl.static_range(2, sizes.orders):
        slope_next = 2.0 * (t + u * slope) - slope_before
        t_next = 2.0 * u * t - t_before
        slope_before = slope
        slope = slope_next
        t_before = t
        t = t_next
        values = tl.where(m == k, t[:, None], values)
        slopes = tl.where(m == k, slope[:, None], slopes)
    return Basis(piece, 2.0 * section.rate * inverse_length, t=values, dt_du=slopes)


# ----- contraction --------------------------------------------------------------------------------
# An element of D is a sum of four terms. Batched matrix products are slow at this: their tiles are
# too small. These kernels write D, and read D̄, once.


def contract(a: Tensor, axis: int) -> Tensor:
    """Return D `(natoms, M, axis)` from A `(natoms, 4, M)`."""
    natoms, _, n_features = a.shape
    d = a.new_empty(natoms, n_features, axis)
    if natoms:
        _contract_kernel[(natoms, triton.cdiv(n_features, FEATURE_BLOCK))](
            d=d, a=a.contiguous(), **_contraction_sizes(n_features, axis)
        )
    return d


def pull_contraction(a: Tensor, d_bar: Tensor) -> Tensor:
    """Return Ā `(natoms, 4, M)` from A and D̄ `(natoms, M, axis)`."""
    natoms, n_features, axis = d_bar.shape
    a_bar = a.new_empty(a.shape)
    if natoms:
        _pull_contraction_kernel[(natoms,)](
            a_bar=a_bar,
            a=a.contiguous(),
            d_bar=d_bar.contiguous(),
            num_warps=WARPS,
            **_contraction_sizes(n_features, axis),
        )
    return a_bar


def _contraction_sizes(n_features: int, axis: int) -> dict[str, int]:
    return {
        "n_features": n_features,
        "axis": axis,
        "feature_block": FEATURE_BLOCK,
        "axis_block": max(2, int(triton.next_power_of_2(axis))),
    }


@triton.jit
def _contract_kernel(
    d,  # (atoms, M, axis), written
    a,  # (atoms, 4, M)
    n_features,  # M
    axis,
    feature_block: tl.constexpr,
    axis_block: tl.constexpr,  # a power of two, at least `axis`
):
    """Write D[m, k] = Σ_c A[c, m]·A[c, k] for a block of m and all k < axis, of one atom."""
    atom = tl.program_id(0).to(tl.int64)
    m = tl.program_id(1) * feature_block + tl.arange(0, feature_block)
    k = tl.arange(0, axis_block)
    m_mask = m < n_features
    k_mask = k < axis
    total = tl.zeros((feature_block, axis_block), a.dtype.element_ty)
    for c in tl.static_range(4):
        row = a + (atom * 4 + c) * n_features
        a_m = tl.load(row + m, m_mask, 0.0)
        a_k = tl.load(row + k, k_mask, 0.0)
        total += a_m[:, None] * a_k[None, :]
    index = (atom * n_features + m[:, None]) * axis + k[None, :]
    tl.store(d + index, total, m_mask[:, None] & k_mask[None, :])


@triton.jit
def _pull_contraction_kernel(
    a_bar,  # (atoms, 4, M), written
    a,  # (atoms, 4, M)
    d_bar,  # (atoms, M, axis)
    n_features,  # M
    axis,
    feature_block: tl.constexpr,
    axis_block: tl.constexpr,  # a power of two, at least `axis`
):
    """Write Ā[c, m] = Σ_k A[c, k]·D̄[m, k], plus Σ_l A[c, l]·D̄[l, m] if m < axis, of one atom.

    The second sum needs all of D̄: it is added at the end to the first columns of Ā, in memory.
    """
    atom = tl.program_id(0).to(tl.int64)
    k = tl.arange(0, axis_block)
    k_mask = k < axis
    source = a + atom * 4 * n_features
    target = a_bar + atom * 4 * n_features
    a0_axis, a1_axis, a2_axis, a3_axis = _load_columns(source, n_features, k, k_mask)
    zeros = tl.zeros((axis_block,), a.dtype.element_ty)
    second0 = zeros
    second1 = zeros
    second2 = zeros
    second3 = zeros
    for begin in range(0, n_features, feature_block):
        m = begin + tl.arange(0, feature_block)
        m_mask = m < n_features
        index = (atom * n_features + m[:, None]) * axis + k[None, :]
        d_bar_tile = tl.load(d_bar + index, m_mask[:, None] & k_mask[None, :], 0.0)
        # One row of A after the other: all four at once do not fit the registers in float64.
        tl.store(target + m, tl.sum(d_bar_tile * a0_axis[None, :], 1), m_mask)
        tl.store(target + n_features + m, tl.sum(d_bar_tile * a1_axis[None, :], 1), m_mask)
        tl.store(target + 2 * n_features + m, tl.sum(d_bar_tile * a2_axis[None, :], 1), m_mask)
        tl.store(target + 3 * n_features + m, tl.sum(d_bar_tile * a3_axis[None, :], 1), m_mask)
        second0 += _column_sums(d_bar_tile, source + m, m_mask)
        second1 += _column_sums(d_bar_tile, source + n_features + m, m_mask)
        second2 += _column_sums(d_bar_tile, source + 2 * n_features + m, m_mask)
        second3 += _column_sums(d_bar_tile, source + 3 * n_features + m, m_mask)
    tl.debug_barrier()  # other threads have written the first columns
    a0_bar, a1_bar, a2_bar, a3_bar = _load_columns(target, n_features, k, k_mask)
    a0_bar += second0
    a1_bar += second1
    a2_bar += second2
    a3_bar += second3
    tl.debug_barrier()  # several threads may hold the same column: all read before one writes
    tl.store(target + k, a0_bar, k_mask)
    tl.store(target + n_features + k, a1_bar, k_mask)
    tl.store(target + 2 * n_features + k, a2_bar, k_mask)
    tl.store(target + 3 * n_features + k, a3_bar, k_mask)


@triton.jit
def _load_columns(a, n_features, column, mask):
    """Return some columns of A or Ā of one atom, row by row."""
    a0 = tl.load(a + column, mask, 0.0)
    a1 = tl.load(a + n_features + column, mask, 0.0)
    a2 = tl.load(a + 2 * n_features + column, mask, 0.0)
    a3 = tl.load(a + 3 * n_features + column, mask, 0.0)
    return a0, a1, a2, a3


@triton.jit
def _column_sums(d_bar_tile, a_row, mask):
    """Return Σ_m A[c, m]·D̄[m, k] from D̄ (feature_block, axis_block) and the address of A[c, m]."""
    return tl.sum(d_bar_tile * tl.load(a_row, mask, 0.0)[:, None], 0)
