"""Triton kernels of the four passes over a layer's edges.

`dpa3.edges.Edges` defines the results, `nn.four_passes` the passes. `push_kernel` writes outputs
(pass 1, `value`) or their tangents (pass 3, `tangent`). `pull_kernel` turns derivatives by the
outputs into derivatives by the inputs: of the energy (pass 2, `adjoint`) or of the loss (pass 4,
`gradient`). An argument that a pass does not have is None; the compiler then drops its code.

A dot (`_dot`) marks tangents, a hat (`_hat`) the derivatives that the running pull propagates, a
bar (`_bar`) derivatives of the energy that pass 4 reads.

Notation (that of `dpa3.edges`)
-------------------------------
For the neighbours j of an atom i, with f applied to each element,

    z_ij = e_ij·W + p_i + q_j,   y = f(z),
    m_i = Σ_j w_ij·y_ij[:M],   H_i = Σ_j h_ij ⊗ [e_ij, v_j],

and y_ij[M:] is the update of the edge.

| symbol | name          | shape                 | meaning                                        |
|--------|---------------|-----------------------|------------------------------------------------|
| e      | `terms.e`     | (atoms, slots, E)     | edge features                                  |
| p      | `terms.p`     | (atoms, Y)            | term of the centre                             |
| q, v   | `terms.table` | (atoms, Y + V)        | term and features of a neighbour, side by side |
| w      | `terms.w`     | (atoms, slots)        | weight of an edge; 0 in empty slots            |
| h      | `terms.h`     | (atoms, slots, 3)     | weighted direction of an edge; 0 in empty slots|
| W      | `weight`      | (E, Y)                |                                                |
| m      | `message`     | (atoms, M)            |                                                |
| y[M:]  | `update`      | (atoms, slots, Y − M) | update of an edge; no elements if Y = M        |
| H      | `moment`      | (atoms, 3, E + V)     |                                                |

E, V, M and Y are the numbers of columns of e, v, m and y.

How the work is divided
-----------------------
A *tile* is `EDGE_TILE` consecutive slots of one atom. Tiles up to the atom's last edge count as
tiles *with an edge*, the others are *empty*. `Incoming.tile_order` lists the empty ones last.
Columns of y are taken in *chunks*, because a program's registers hold one chunk of W. Each of n
programs does

    for each chunk of y:
        for every n-th tile with an edge: compute and store
        for every n-th empty tile: store zeros
    for every n-th tile with an edge: the moments, in chunks of columns of [e, v]
    for every n-th empty tile, in `push_kernel`: store zero moments

No two programs add to one number. Each writes parts, which are added up afterwards, always in the
same order:

- sums over an atom's edges (m, H, p̂): one part for each tile;
- ŵ, a sum over columns of y: one part for each chunk;
- Ŵ, a sum over all edges: one part for each program;
- q̂, v̂, sums over an atom's appearances as a neighbour: one row for each edge. Rows of empty slots
  are never read.

ê has no parts: a program adds up the contributions of all chunks and of the moments in memory. This
works because all loops give it the same tiles.

m and H of an atom exist only after `add_parts`: a kernel sees one tile, so that it cannot compute
what is not linear in them, such as a norm.

Empty slots contribute nothing to any sum: w = h = 0, ẇ = ḣ = 0, and the cotangent of y[M:] is 0
there. The caller must not use what the kernels store in them. In empty tiles y[M:], ŵ and ĥ are 0.
In empty slots of tiles with an edge y[M:] is f(z), and ŵ and ĥ are not 0 either.

All tensors are contiguous and in single precision. Two tests in `test_model_kernels.py` compare the
kernels, in Triton's interpreter, with torch's operations in float64: `test_kernels_of_dpa3` with
one tile for each atom, `test_kernels_of_dpa3_within_reach` with several and with empty ones.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from deepmd_muon.model.descriptor.dpa3.geometry import EDGE_TILE, Incoming
from deepmd_muon.model.descriptor.dpa3.kernels.shared import (
    Tensors,
    add_parts,
    as_constexpr,
    concurrent_programs,
    contiguous,
    dot_precision,
    load_tile,
    sum_by_neighbor,
    tile_side,
)
from deepmd_muon.model.descriptor.dpa3.tensors import EdgeCotangents, EdgeTerms
from deepmd_muon.model.nn.activation import Formula
from deepmd_muon.model.nn.layer_kernels import curve


class EdgeLayer(NamedTuple):
    """What all passes over one layer's edges share.

    Attributes
    ----------
    neighbor
        The atom j of each slot (atoms, slots), int64; any atom in empty slots.
    incoming
        The edges sorted by neighbour, and the order of tiles.
    weight
        W (E, Y).
    message_columns
        M.
    formula
        Of the activation f.
    """

    neighbor: Tensor
    incoming: Incoming
    weight: Tensor
    message_columns: int
    formula: Formula


# ----- the passes --------------------------------------------------------------------------------


def value(terms: EdgeTerms, layer: EdgeLayer) -> Tensors:
    """Pass 1: return m (atoms, M), y[M:] (atoms, slots, Y − M) and H (atoms, 3, E + V)."""
    launch = Launch(terms, layer, PASS_1)
    out = launch.empty_outputs()
    push_kernel[launch.grid](out=out, dots=None, **launch.arguments)
    message, moment = add_parts(out.message, out.moment)
    return message, out.update, moment


def adjoint(cotangents: EdgeCotangents, terms: EdgeTerms, layer: EdgeLayer) -> EdgeTerms:
    """Pass 2: return the adjoints of the terms, each in the shape of its term."""
    launch = Launch(terms, layer)
    out = launch.empty_gradients()._replace(
        w=launch.empty(launch.n_chunks, *launch.terms.w.shape),
        h=launch.empty(*launch.terms.h.shape),
    )
    pull_kernel[launch.grid](out=out, hats=cotangents, bars=None, dots=None, **launch.arguments)
    p_bar, w_bar = add_parts(out.p, out.w)
    table_bar = sum_by_neighbor(out.table_rows, layer.incoming)
    return EdgeTerms(e=out.e, p=p_bar, table=table_bar, w=w_bar, h=out.h)


def tangent(terms: EdgeTerms, dots: EdgeTerms, layer: EdgeLayer) -> Tensors:
    """Pass 3: return the tangents of m, y[M:] and H, which are the cotangents of their adjoints."""
    launch = Launch(terms, layer)
    out = launch.empty_outputs()
    push_kernel[launch.grid](out=out, dots=contiguous(dots), **launch.arguments)
    message, moment = add_parts(out.message, out.moment)
    return message, out.update, moment


def gradient(
    hats: EdgeCotangents,
    bars: EdgeCotangents | None,
    terms: EdgeTerms,
    dots: EdgeTerms | None,
    layer: EdgeLayer,
) -> Tensors:
    """Pass 4: return the gradients of e, p, the table and W, in the order of `EdgeInputs`.

    `hats` are the cotangents of this pass, `bars` those of pass 2. `bars` and `dots` are None
    without forces.
    """
    launch = Launch(terms, layer)
    out = launch.empty_gradients()._replace(weight=launch.empty(*launch.grid, *layer.weight.shape))
    pull_kernel[launch.grid](
        out=out,
        hats=hats,
        bars=bars,
        dots=contiguous(dots) if dots else None,
        **launch.arguments,
    )
    weight_hat, p_hat = add_parts(out.weight, out.p)
    return out.e, p_hat, sum_by_neighbor(out.table_rows, layer.incoming), weight_hat


# ----- launches ----------------------------------------------------------------------------------


class Tuning(NamedTuple):
    """How a pass is launched."""

    chunk_columns: int  # columns of y that a program holds at a time
    programs: int  # for each multiprocessor
    num_warps: int


# Pass 1 keeps less than the others: smaller chunks let more programs run at once.
PASS_1 = Tuning(chunk_columns=32, programs=6, num_warps=2)
OTHER_PASSES = Tuning(chunk_columns=64, programs=2, num_warps=4)


class Launch:
    """The grid of a pass over one layer's edges, the arguments of all passes, and outputs."""

    def __init__(self, terms: EdgeTerms, layer: EdgeLayer, tuning: Tuning = OTHER_PASSES) -> None:
        self.layer = layer
        self.terms = contiguous(terms)
        self.n_atoms, self.n_slots = layer.neighbor.shape
        E, self.Y = layer.weight.shape
        V = self.terms.table.shape[1] - self.Y
        self.M = layer.message_columns
        self.moment_columns = E + V
        self.tiles_per_atom = triton.cdiv(self.n_slots, EDGE_TILE)
        self.n_chunks = triton.cdiv(self.Y, tuning.chunk_columns)
        n_programs = concurrent_programs(layer.weight.device, tuning.programs)
        self.grid = (min(self.n_atoms * self.tiles_per_atom, n_programs),)
        sizes = as_constexpr(
            Sizes(
                E=E,
                V=V,
                M=self.M,
                Y=self.Y,
                tile_rows=EDGE_TILE,
                e_width=tile_side(E),
                chunk_columns=tuning.chunk_columns,
                n_chunks=self.n_chunks,
                dot_precision=dot_precision(),
            )
        )
        self.arguments: dict[str, Any] = {
            "neighbor": layer.neighbor.contiguous(),
            "tile_order": layer.incoming.tile_order,
            "n_used_tiles": layer.incoming.n_used_tiles,
            "weight": layer.weight.contiguous(),
            "terms": self.terms,
            "n_atoms": self.n_atoms,
            "n_slots": self.n_slots,
            "sizes": sizes,
            **layer.formula.kernel_arguments,
            "num_warps": tuning.num_warps,
            "num_stages": 1,  # no prefetch of the next tile into shared memory
        }

    def empty(self, *shape: int) -> Tensor:
        """Allocate an output of this shape."""
        return self.layer.weight.new_empty(*shape)

    def empty_outputs(self) -> OutputParts:
        """Allocate what passes 1 and 3 write."""
        n_update = self.Y - self.M
        update_shape = (self.n_atoms, self.n_slots, n_update) if n_update else (0,)
        return OutputParts(
            message=self.empty(self.tiles_per_atom, self.n_atoms, self.M),
            update=self.empty(*update_shape),
            moment=self.empty(self.tiles_per_atom, self.n_atoms, 3, self.moment_columns),
        )

    def empty_gradients(self) -> GradientParts:
        """Allocate what passes 2 and 4 both write."""
        return GradientParts(
            e=self.empty(*self.terms.e.shape),
            p=self.empty(self.tiles_per_atom, *self.terms.p.shape),
            table_rows=self.empty(self.n_atoms * self.n_slots, self.terms.table.shape[1]),
        )


# ----- arguments of the kernels ------------------------------------------------------------------


class Sizes(NamedTuple):
    """Sizes that are known when a kernel is compiled; E, V, M and Y are those of the notation.

    Attributes
    ----------
    tile_rows
        Slots of a tile.
    e_width
        A power of two that holds E columns.
    chunk_columns, n_chunks
        Columns of a chunk, and how many chunks hold Y columns.
    dot_precision
        See `shared.dot_precision`.
    """

    E: tl.constexpr
    V: tl.constexpr
    M: tl.constexpr
    Y: tl.constexpr
    tile_rows: tl.constexpr
    e_width: tl.constexpr
    chunk_columns: tl.constexpr
    n_chunks: tl.constexpr
    dot_precision: tl.constexpr


class OutputParts(NamedTuple):
    """What passes 1 and 3 write: m, y[M:] and H, or their tangents."""

    message: Any  # (tiles, atoms, M): parts of m
    update: Any  # (atoms, slots, Y − M)
    moment: Any  # (tiles, atoms, 3, E + V): parts of H


class GradientParts(NamedTuple):
    """What passes 2 and 4 write."""

    e: Any  # (atoms, slots, E): ê
    p: Any  # (tiles, atoms, Y): parts of p̂
    table_rows: Any  # (atoms·slots, Y + V): for each edge [q̂, v̂]
    w: Any = None  # (chunks, atoms, slots): parts of ŵ; pass 2 only
    h: Any = None  # (atoms, slots, 3): ĥ; pass 2 only
    weight: Any = None  # (programs, E, Y): parts of Ŵ; pass 4 only


# ----- kernels -----------------------------------------------------------------------------------
# Sizes that differ between batches are not specialized: Triton would compile a kernel again for
# sizes that 16 divides, and again for 1.


@triton.jit(do_not_specialize=["n_atoms", "n_slots"])
def push_kernel(
    out,  # OutputParts, written
    neighbor,  # (atoms, slots)
    tile_order,  # (tiles·atoms,): the tiles with an edge, then the others
    n_used_tiles,  # (1,): how many have an edge
    weight,  # (E, Y)
    terms,  # EdgeTerms
    dots,  # EdgeTerms: tangents; None in pass 1
    n_atoms,
    n_slots,
    sizes,  # Sizes
    kind: tl.constexpr,  # `kind` and `curve_constants` are those of `curve`
    curve_constants: tl.constexpr,
) -> None:
    """Write m, y[M:] and H (pass 1), or their tangents (pass 3).

    y = f(z); m = Σ_j w·y[:M] and H = Σ_j h ⊗ [e, v], one part for each tile. Their tangents are
    ẏ = f′(z)∘ż, ṁ = Σ_j (w·ẏ[:M] + ẇ·y[:M]) and Ḣ = Σ_j (ḣ ⊗ [e, v] + h ⊗ [ė, v̇]).
    """
    tiles = _open_tiles(
        neighbor=neighbor,
        tile_order=tile_order,
        n_used_tiles=n_used_tiles,
        n_atoms=n_atoms,
        n_slots=n_slots,
        sizes=sizes,
    )
    for chunk_number in range(sizes.n_chunks):
        chunk = _load_chunk(weight, chunk_number, sizes)
        for index in range(tl.program_id(0), tiles.n_used, tl.num_programs(0)):
            tile = _find_tile(index, tiles, sizes)
            e = _load_e(terms.e, tile, sizes)
            if dots is not None:
                e_dot = _load_e(dots.e, tile, sizes)
            z = _pre_activation(terms, e, tile, chunk, sizes)
            if dots is not None:
                z_dot = _pre_activation(dots, e_dot, tile, chunk, sizes)
            y, slope, _ = curve(z, kind, curve_constants)
            w = tl.load(terms.w + tile.edge, tile.mask, 0.0)
            if dots is None:
                message = tl.sum(y * w[:, None], 0)
                update = y
            else:
                y_dot = slope * z_dot
                w_dot = tl.load(dots.w + tile.edge, tile.mask, 0.0)
                message = tl.sum(y_dot * w[:, None] + y * w_dot[:, None], 0)
                update = y_dot
            _store_row(out.message, message, _part_row(tile, tiles), chunk.column, sizes.M)
            _store_update(out.update, update, tile, chunk, sizes)
        for index in range(tiles.n_used + tl.program_id(0), tiles.n_tiles, tl.num_programs(0)):
            tile = _find_tile(index, tiles, sizes)
            zero_row = tl.zeros([sizes.chunk_columns], tl.float32)
            zeros = tl.zeros([sizes.tile_rows, sizes.chunk_columns], tl.float32)
            _store_row(out.message, zero_row, _part_row(tile, tiles), chunk.column, sizes.M)
            _store_update(out.update, zeros, tile, chunk, sizes)
    _push_moments(out.moment, terms, dots, tiles, sizes)


@triton.jit(do_not_specialize=["n_atoms", "n_slots"])
def pull_kernel(
    out,  # GradientParts, written
    hats,  # EdgeCotangents of this pass: of the energy in pass 2, of the loss in pass 4
    bars,  # EdgeCotangents of pass 2, for pass 4; None in pass 2, and without forces
    neighbor,  # (atoms, slots)
    tile_order,  # (tiles·atoms,): the tiles with an edge, then the others
    n_used_tiles,  # (1,): how many have an edge
    weight,  # (E, Y)
    terms,  # EdgeTerms
    dots,  # EdgeTerms: tangents; None in pass 2, and without forces
    n_atoms,
    n_slots,
    sizes,  # Sizes
    kind: tl.constexpr,
    curve_constants: tl.constexpr,
) -> None:
    """Write ê, p̂, q̂, v̂, and Ŵ (pass 4) or ŵ and ĥ (pass 2).

    ŷ[:M] = w·m̂ + ẇ·m̄, ȳ[:M] = w·m̄; ŷ[M:] and ȳ[M:] are the cotangents of the output y[M:];
    ẑ = f′(z)∘ŷ + f″(z)∘ż∘ȳ, z̄ = f′(z)∘ȳ;
    p̂ = Σ_j ẑ, q̂ = ẑ for each edge, Ŵ = Σ_edges (eᵀẑ + ėᵀz̄),
    [ê, v̂] = [ẑ·Wᵀ, 0] + Σ_c (h_c·Ĥ_c + ḣ_c·H̄_c), v̂ for each edge;
    ŵ = y[:M]·m̂, ĥ_c = [e, v]·Ĥ_c.
    Without bars and dots their terms are 0.
    """
    tiles = _open_tiles(
        neighbor=neighbor,
        tile_order=tile_order,
        n_used_tiles=n_used_tiles,
        n_atoms=n_atoms,
        n_slots=n_slots,
        sizes=sizes,
    )
    for chunk_number in range(sizes.n_chunks):
        chunk = _load_chunk(weight, chunk_number, sizes)
        if out.weight is not None:
            weight_hat = tl.zeros_like(chunk.weight)
        if out.w is not None:
            w_part = out.w + chunk_number * n_atoms * n_slots
        for index in range(tl.program_id(0), tiles.n_used, tl.num_programs(0)):
            tile = _find_tile(index, tiles, sizes)
            e = _load_e(terms.e, tile, sizes)
            z = _pre_activation(terms, e, tile, chunk, sizes)
            y, slope, bend = curve(z, kind, curve_constants)
            m_hat = _load_m_cotangent(hats.message, tile, chunk, sizes)
            if out.w is not None:
                tl.store(w_part + tile.edge, tl.sum(y * m_hat, 1), tile.mask)
            w = tl.load(terms.w + tile.edge, tile.mask, 0.0)
            y_hat = _y_cotangent(
                m_hat, w=w, update_hat=hats.update, tile=tile, chunk=chunk, sizes=sizes
            )
            if dots is not None:
                e_dot = _load_e(dots.e, tile, sizes)
                z_dot = _pre_activation(dots, e_dot, tile, chunk, sizes)
                w_dot = tl.load(dots.w + tile.edge, tile.mask, 0.0)
                m_bar = _load_m_cotangent(bars.message, tile, chunk, sizes)
                y_hat += m_bar * w_dot[:, None]
                y_bar = _y_cotangent(
                    m_bar, w=w, update_hat=bars.update, tile=tile, chunk=chunk, sizes=sizes
                )
                z_hat = slope * y_hat + bend * z_dot * y_bar
                z_bar = slope * y_bar
                # Only pass 4 has dots, and it has out.weight.
                weight_hat += tl.dot(tl.trans(e_dot), z_bar, input_precision=sizes.dot_precision)
            else:
                z_hat = slope * y_hat
            if out.weight is not None:
                weight_hat += tl.dot(tl.trans(e), z_hat, input_precision=sizes.dot_precision)
            _store_row(out.p, tl.sum(z_hat, 0), _part_row(tile, tiles), chunk.column, sizes.Y)
            _store_q(out.table_rows, z_hat, tile, chunk, sizes)
            e_hat = tl.dot(z_hat, tl.trans(chunk.weight), input_precision=sizes.dot_precision)
            _accumulate_e(out.e, e_hat, tile, chunk_number, sizes)
        for index in range(tiles.n_used + tl.program_id(0), tiles.n_tiles, tl.num_programs(0)):
            tile = _find_tile(index, tiles, sizes)
            zero_row = tl.zeros([sizes.chunk_columns], tl.float32)
            _store_row(out.p, zero_row, _part_row(tile, tiles), chunk.column, sizes.Y)
            _store_zero_e(out.e, tile, chunk_number, sizes)
            zeros = tl.zeros([sizes.tile_rows], tl.float32)
            if out.w is not None:
                tl.store(w_part + tile.edge, zeros, tile.mask)
            if out.h is not None:
                for c in tl.static_range(3):  # each chunk stores them again
                    tl.store(out.h + tile.edge * 3 + c, zeros, tile.mask)
        if out.weight is not None:
            i = tl.arange(0, sizes.e_width)
            weight_row = tl.program_id(0) * sizes.E + i[:, None]
            weight_mask = (i < sizes.E)[:, None] & chunk.in_y[None, :]
            tl.store(
                out.weight + weight_row * sizes.Y + chunk.column[None, :], weight_hat, weight_mask
            )
        # The next chunk, and the moments below, add to ê. Other threads of this program may have
        # written it.
        tl.debug_barrier()
    _pull_moments(out=out, hats=hats, bars=bars, terms=terms, dots=dots, tiles=tiles, sizes=sizes)


# ----- tiles and chunks --------------------------------------------------------------------------


class Tiles(NamedTuple):
    """The tiles of a launch, and how to find their edges."""

    neighbor: Any  # (atoms, slots)
    order: Any  # (tiles·atoms,): the tiles with an edge, then the others
    n_used: Any  # how many have an edge
    n_tiles: Any  # of all atoms
    n_atoms: Any
    n_slots: Any


class Tile(NamedTuple):
    """One tile: `tile_rows` consecutive slots of an atom."""

    atom: Any
    number: Any  # among the atom's tiles
    edge: Any  # (tile_rows,): atom · n_slots + slot
    mask: Any  # (tile_rows,): false past an atom's last slot; true in empty slots
    j: Any  # (tile_rows,): the neighbour, as an atom's number


class Chunk(NamedTuple):
    """A chunk of the columns of y, and these columns of W."""

    column: Any  # (chunk_columns,)
    in_y: Any  # (chunk_columns,): column < Y, since the last chunk may reach past Y
    weight: Any  # (e_width, chunk_columns)


@triton.jit
def _open_tiles(neighbor, tile_order, n_used_tiles, n_atoms, n_slots, sizes):
    return Tiles(
        neighbor=neighbor,
        order=tile_order,
        n_used=tl.load(n_used_tiles),
        n_tiles=n_atoms * ((n_slots + sizes.tile_rows - 1) // sizes.tile_rows),
        n_atoms=n_atoms,
        n_slots=n_slots,
    )


@triton.jit
def _find_tile(index, tiles, sizes):
    """Return the index-th tile: the first `n_used` have an edge."""
    part_row = tl.load(tiles.order + index)  # see `_part_row`
    # int64, since edges · columns may exceed 2³¹.
    number = (part_row // tiles.n_atoms).to(tl.int64)
    atom = (part_row % tiles.n_atoms).to(tl.int64)
    slot = number * sizes.tile_rows + tl.arange(0, sizes.tile_rows)
    edge = atom * tiles.n_slots + slot
    mask = slot < tiles.n_slots
    return Tile(
        atom=atom,
        number=number,
        edge=edge,
        mask=mask,
        j=tl.load(tiles.neighbor + edge, mask, 0),
    )


@triton.jit
def _part_row(tile, tiles):
    """Return a tile's row in parts (tiles, atoms, …), its number in `Incoming.tile_order`.

    Computed again for each use: a field of `Tile` would hold registers in `pull_kernel`.
    """
    return tile.number * tiles.n_atoms + tile.atom


@triton.jit
def _load_chunk(weight, chunk_number, sizes):
    i = tl.arange(0, sizes.e_width)
    column = chunk_number * sizes.chunk_columns + tl.arange(0, sizes.chunk_columns)
    in_y = column < sizes.Y
    weight_mask = (i < sizes.E)[:, None] & in_y[None, :]
    return Chunk(
        column=column,
        in_y=in_y,
        weight=load_tile(weight, i, column, weight_mask, sizes.Y),
    )


# ----- tensors of a tile -------------------------------------------------------------------------


@triton.jit
def _pre_activation(terms, e, tile, chunk, sizes):
    """Return a chunk of z = e·W + p_i + q_j (tile_rows, chunk_columns), or of ż from tangents."""
    p = tl.load(terms.p + tile.atom * sizes.Y + chunk.column, chunk.in_y, 0.0)[None, :]
    q_mask = tile.mask[:, None] & chunk.in_y[None, :]
    q = load_tile(terms.table, tile.j, chunk.column, q_mask, sizes.Y + sizes.V)
    return tl.dot(e, chunk.weight, input_precision=sizes.dot_precision) + p + q


@triton.jit
def _load_e(e, tile, sizes):
    """Load edge features of a tile (tile_rows, e_width)."""
    i = tl.arange(0, sizes.e_width)
    mask = tile.mask[:, None] & (i < sizes.E)[None, :]
    return load_tile(e, tile.edge, i, mask, sizes.E)


@triton.jit
def _accumulate_e(e_out, value, tile, chunk_number, sizes):
    """Store what a chunk of y contributes to ê, added to that of earlier chunks."""
    i = tl.arange(0, sizes.e_width)
    mask = tile.mask[:, None] & (i < sizes.E)[None, :]
    # The first chunk must not read: the memory is not initialized.
    value += load_tile(e_out, tile.edge, i, mask & (chunk_number > 0), sizes.E)
    tl.store(e_out + tile.edge[:, None] * sizes.E + i[None, :], value, mask)


@triton.jit
def _store_zero_e(e_out, tile, chunk_number, sizes):
    """Store zeros in ê of an empty tile, once: with the first chunk."""
    i = tl.arange(0, sizes.e_width)
    mask = tile.mask[:, None] & (i < sizes.E)[None, :] & (chunk_number == 0)
    zeros = tl.zeros([sizes.tile_rows, sizes.e_width], tl.float32)
    tl.store(e_out + tile.edge[:, None] * sizes.E + i[None, :], zeros, mask)


@triton.jit
def _load_m_cotangent(message, tile, chunk, sizes):
    """Load m̂ or m̄ of an atom into the columns of y (1, chunk_columns); 0 beyond M."""
    in_message = chunk.column < sizes.M
    return tl.load(message + tile.atom * sizes.M + chunk.column, in_message, 0.0)[None, :]


@triton.jit
def _y_cotangent(m_hat, w, update_hat, tile, chunk, sizes):
    """Return a chunk of ŷ = [w·m̂, ŷ[M:]] of a tile (tile_rows, chunk_columns), or of ȳ from bars.

    m̂ must be 0 beyond M.
    """
    y_hat = m_hat * w[:, None]
    if sizes.Y > sizes.M:
        update_column = chunk.column - sizes.M
        mask = tile.mask[:, None] & ((update_column >= 0) & chunk.in_y)[None, :]
        y_hat += load_tile(update_hat, tile.edge, update_column, mask, sizes.Y - sizes.M)
    return y_hat


@triton.jit
def _store_update(update, value, tile, chunk, sizes):
    """Store the columns of y[M:] in a chunk of y of a tile."""
    if sizes.Y > sizes.M:
        update_column = chunk.column - sizes.M
        mask = tile.mask[:, None] & ((update_column >= 0) & chunk.in_y)[None, :]
        row = tile.edge[:, None] * (sizes.Y - sizes.M)
        tl.store(update + row + update_column[None, :], value, mask)


@triton.jit
def _store_q(table_rows, value, tile, chunk, sizes):
    """Store a chunk of q̂ in the row of each edge."""
    row = tile.edge[:, None] * (sizes.Y + sizes.V)
    mask = tile.mask[:, None] & chunk.in_y[None, :]
    tl.store(table_rows + row + chunk.column[None, :], value, mask)


@triton.jit
def _store_row(parts, value, row, column, n_columns):
    """Store some columns of a row of parts (…, n_columns)."""
    tl.store(parts + row * n_columns + column, value, column < n_columns)


# ----- moments -----------------------------------------------------------------------------------
# c is a component of space.


@triton.jit
def _push_moments(moment_parts, terms, dots, tiles, sizes):
    """Write H of each tile, or its tangent, to `moment_parts` (tiles, atoms, 3, E + V)."""
    n_columns: tl.constexpr = sizes.E + sizes.V
    for index in range(tl.program_id(0), tiles.n_used, tl.num_programs(0)):
        tile = _find_tile(index, tiles, sizes)
        for chunk_number in range((n_columns + sizes.chunk_columns - 1) // sizes.chunk_columns):
            column = chunk_number * sizes.chunk_columns + tl.arange(0, sizes.chunk_columns)
            e_and_v = _load_e_and_v(terms, tile, column, sizes)
            if dots is not None:
                e_and_v_dot = _load_e_and_v(dots, tile, column, sizes)
            for c in tl.static_range(3):
                h_c = tl.load(terms.h + tile.edge * 3 + c, tile.mask, 0.0)
                if dots is None:
                    moment = tl.sum(h_c[:, None] * e_and_v, 0)
                else:
                    h_c_dot = tl.load(dots.h + tile.edge * 3 + c, tile.mask, 0.0)
                    moment = tl.sum(h_c_dot[:, None] * e_and_v, 0)
                    moment += tl.sum(h_c[:, None] * e_and_v_dot, 0)
                _store_row(moment_parts, moment, _part_row(tile, tiles) * 3 + c, column, n_columns)
    for index in range(tiles.n_used + tl.program_id(0), tiles.n_tiles, tl.num_programs(0)):
        tile = _find_tile(index, tiles, sizes)
        for start in range(0, 3 * n_columns, sizes.chunk_columns):
            column = start + tl.arange(0, sizes.chunk_columns)
            zero_row = tl.zeros([sizes.chunk_columns], tl.float32)
            _store_row(moment_parts, zero_row, _part_row(tile, tiles), column, 3 * n_columns)


@triton.jit
def _pull_moments(out, hats, bars, terms, dots, tiles, sizes):
    """Add Σ_c (h_c·Ĥ_c + ḣ_c·H̄_c) to ê, store it as v̂ of each edge, and in pass 2 store ĥ."""
    n_columns: tl.constexpr = sizes.E + sizes.V
    for index in range(tl.program_id(0), tiles.n_used, tl.num_programs(0)):
        tile = _find_tile(index, tiles, sizes)
        # Three variables, because Triton cannot add to a column of a tensor.
        h_hat_x = tl.zeros([sizes.tile_rows], tl.float32)
        h_hat_y = tl.zeros([sizes.tile_rows], tl.float32)
        h_hat_z = tl.zeros([sizes.tile_rows], tl.float32)
        for chunk_number in range((n_columns + sizes.chunk_columns - 1) // sizes.chunk_columns):
            column = chunk_number * sizes.chunk_columns + tl.arange(0, sizes.chunk_columns)
            if out.h is not None:
                e_and_v = _load_e_and_v(terms, tile, column, sizes)
                moment_hat = hats.moment + tile.atom * 3 * n_columns
                h_hat_x += tl.sum(e_and_v * _load_row(moment_hat, 0, column, n_columns), 1)
                h_hat_y += tl.sum(e_and_v * _load_row(moment_hat, 1, column, n_columns), 1)
                h_hat_z += tl.sum(e_and_v * _load_row(moment_hat, 2, column, n_columns), 1)
            e_and_v_hat = _e_and_v_cotangent(hats.moment, terms.h, tile, column, sizes)
            if dots is not None:
                e_and_v_hat += _e_and_v_cotangent(bars.moment, dots.h, tile, column, sizes)
            _add_to_e_and_store_v(out, e_and_v_hat, tile, column, sizes)
        if out.h is not None:
            tl.store(out.h + tile.edge * 3, h_hat_x, tile.mask)
            tl.store(out.h + tile.edge * 3 + 1, h_hat_y, tile.mask)
            tl.store(out.h + tile.edge * 3 + 2, h_hat_z, tile.mask)


@triton.jit
def _load_e_and_v(terms, tile, column, sizes):
    """Load columns of [e, v] of a tile (tile_rows, chunk_columns)."""
    e_mask = tile.mask[:, None] & (column < sizes.E)[None, :]
    in_v = (column >= sizes.E) & (column < sizes.E + sizes.V)
    v_mask = tile.mask[:, None] & in_v[None, :]
    e = load_tile(terms.e, tile.edge, column, e_mask, sizes.E)
    v_column = column - sizes.E + sizes.Y  # of the table [q, v]
    v = load_tile(terms.table, tile.j, v_column, v_mask, sizes.Y + sizes.V)
    return e + v  # each is 0 in the columns of the other


@triton.jit
def _e_and_v_cotangent(moment, h, tile, column, sizes):
    """Return columns of Σ_c h_c·Ĥ_c, or Σ_c ḣ_c·H̄_c, of a tile (tile_rows, chunk_columns)."""
    n_columns: tl.constexpr = sizes.E + sizes.V
    atom_moment = moment + tile.atom * 3 * n_columns
    total = tl.zeros([sizes.tile_rows, sizes.chunk_columns], tl.float32)
    for c in tl.static_range(3):
        h_c = tl.load(h + tile.edge * 3 + c, tile.mask, 0.0)
        total += h_c[:, None] * _load_row(atom_moment, c, column, n_columns)
    return total


@triton.jit
def _load_row(matrix, row, column, n_columns):
    """Load some columns of a row (1, chunk_columns) of a matrix (…, n_columns)."""
    return tl.load(matrix + column + row * n_columns, column < n_columns, 0.0)[None, :]


@triton.jit
def _add_to_e_and_store_v(out, e_and_v_hat, tile, column, sizes):
    """Add columns of the cotangent of [e, v] to ê, and store those of v̂ in the row of each edge.

    No barrier between calls: each takes other columns.
    """
    e_mask = tile.mask[:, None] & (column < sizes.E)[None, :]
    e_at = out.e + tile.edge[:, None] * sizes.E + column[None, :]
    tl.store(e_at, tl.load(e_at, e_mask, 0.0) + e_and_v_hat, e_mask)
    in_v = (column >= sizes.E) & (column < sizes.E + sizes.V)
    v_mask = tile.mask[:, None] & in_v[None, :]
    row_at = out.table_rows + tile.edge[:, None] * (sizes.Y + sizes.V)
    tl.store(row_at + sizes.Y + (column - sizes.E)[None, :], e_and_v_hat, v_mask)
