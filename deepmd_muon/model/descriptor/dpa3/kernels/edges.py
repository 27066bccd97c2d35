"""Triton kernels of the four passes over a layer's edges.

`dpa3.edges.Edges` defines the results, and `nn.four_passes` explains the passes: a bar marks
derivatives of the energy, a dot tangents, a hat derivatives of the loss. Passes 1 (`value`) and 3
(`tangent`) launch `push_kernel`, passes 2 (`adjoint`) and 4 (`gradient`) `pull_kernel`. What a pass
does not have is None, so that the compiler leaves it out.

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

How the work is divided
-----------------------
A *tile* is `EDGE_TILE` consecutive slots of one atom. `TileOrder` has the tiles that hold an edge
first, then the empty ones. Columns of y are taken in *chunks*, because a program's registers hold
one chunk of W. Each of n programs does

    for each chunk of y:
        for every n-th tile with an edge: compute and store
        for every n-th empty tile: store zeros
    for every n-th tile with an edge: the moments, in chunks of columns of [e, v]

No two programs add to one number. Each writes parts, which are added up afterwards, always in the
same order:

- sums over an atom's edges (m, H, p̄, p̂): one part for each tile;
- w̄, a sum over columns of y: one part for each chunk;
- Ŵ, a sum over all edges: one part for each program;
- q̄, v̄, q̂, v̂, sums over an atom's appearances as a neighbour: one row for each edge. Rows of empty
  slots are never read.

m and H of an atom exist only after `add_parts`: a kernel sees one tile, so that it cannot compute
what is not linear in them, such as a norm.

Empty slots have w = h = 0, and the caller never uses y[M:] there, so its cotangent must be 0: they
then contribute nothing to any sum. The kernels store f(z) in empty slots of tiles with an edge, and
0 in empty tiles.

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
    add_to_neighbors,
    at_once,
    constants,
    contiguous,
    holding,
    load_tile,
    precision,
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
        The edges by neighbour, and the order of tiles.
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
    return EdgeTerms(e=out.e, p=p_bar, table=launch.sum_table_rows(out.table), w=w_bar, h=out.h)


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

    `hats` are the cotangents. `bars`, the cotangents of pass 2, and `dots` are None if there was no
    such pass.
    """
    launch = Launch(terms, layer)
    weight_parts = launch.empty(*launch.grid, *layer.weight.shape)
    out = launch.empty_gradients()._replace(weight=weight_parts)
    pull_kernel[launch.grid](
        out=out,
        hats=hats,
        bars=bars,
        dots=contiguous(dots) if dots else None,
        **launch.arguments,
    )
    weight_hat, p_hat = add_parts(out.weight, out.p)
    return out.e, p_hat, launch.sum_table_rows(out.table), weight_hat


# ----- launches ----------------------------------------------------------------------------------


class Tuning(NamedTuple):
    """How a pass is launched."""

    chunk_columns: int  # columns of y that a program holds at a time
    programs: int  # that a multiprocessor runs at once
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
        self.columns = E + V
        self.tiles_per_atom = triton.cdiv(self.n_slots, EDGE_TILE)
        self.n_chunks = triton.cdiv(self.Y, tuning.chunk_columns)
        programs = at_once(layer.weight.device, tuning.programs)
        self.grid = (min(self.n_atoms * self.tiles_per_atom, programs),)
        form = constants(
            Form(
                E=E,
                V=V,
                M=self.M,
                Y=self.Y,
                tile_rows=EDGE_TILE,
                e_width=holding(E),
                chunk_columns=tuning.chunk_columns,
                n_chunks=self.n_chunks,
                precision=precision(),
            )
        )
        self.arguments: dict[str, Any] = {
            "neighbor": layer.neighbor.contiguous(),
            "tile_order": TileOrder(order=layer.incoming.tiles, n_used=layer.incoming.used),
            "weight": layer.weight.contiguous(),
            "terms": self.terms,
            "n_atoms": self.n_atoms,
            "n_slots": self.n_slots,
            "form": form,
            **layer.formula.kernel_arguments,
            "num_warps": tuning.num_warps,
            "num_stages": 1,
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
            moment=self.empty(self.tiles_per_atom, self.n_atoms, 3, self.columns),
        )

    def empty_gradients(self) -> GradientParts:
        """Allocate what passes 2 and 4 both write."""
        return GradientParts(
            e=self.empty(*self.terms.e.shape),
            p=self.empty(self.tiles_per_atom, *self.terms.p.shape),
            table=self.empty(self.n_atoms * self.n_slots, self.terms.table.shape[1]),
        )

    def sum_table_rows(self, rows: Tensor) -> Tensor:
        """Return the sum over the edges that lead to each atom."""
        return add_to_neighbors(rows, self.layer.incoming.order, self.layer.incoming.start)


# ----- arguments of the kernels ------------------------------------------------------------------


class Form(NamedTuple):
    """Sizes that are known when a kernel is compiled; E, V, M and Y are those of the table above.

    Attributes
    ----------
    tile_rows
        Slots of a tile.
    e_width
        A power of two that holds E columns.
    chunk_columns, n_chunks
        Columns of a chunk, and how many chunks hold Y columns.
    precision
        Of products, see `shared.precision`.
    """

    E: tl.constexpr
    V: tl.constexpr
    M: tl.constexpr
    Y: tl.constexpr
    tile_rows: tl.constexpr
    e_width: tl.constexpr
    chunk_columns: tl.constexpr
    n_chunks: tl.constexpr
    precision: tl.constexpr


class OutputParts(NamedTuple):
    """What passes 1 and 3 write: m, y[M:] and H, or their tangents."""

    message: Any  # (tiles, atoms, M): parts of m
    update: Any  # (atoms, slots, Y − M)
    moment: Any  # (tiles, atoms, 3, E + V): parts of H


class GradientParts(NamedTuple):
    """What passes 2 and 4 write: adjoints, or gradients."""

    e: Any  # (atoms, slots, E)
    p: Any  # (tiles, atoms, Y): parts of p̂
    table: Any  # (atoms·slots, Y + V): for each edge [q̂, v̂]
    w: Any = None  # (chunks, atoms, slots): parts of w̄; pass 2 only
    h: Any = None  # (atoms, slots, 3); pass 2 only
    weight: Any = None  # (programs, E, Y): parts of Ŵ; pass 4 only


class TileOrder(NamedTuple):
    """`tiles` and `used` of `geometry.Incoming`."""

    order: Any  # (tiles·atoms,): the tiles with an edge, then the others
    n_used: Any  # (1,): how many have an edge


# ----- kernels -----------------------------------------------------------------------------------
# Sizes that differ between batches are not specialized: Triton would compile a kernel again for
# each number of atoms that 16 divides.


@triton.jit(do_not_specialize=["n_atoms", "n_slots"])
def push_kernel(
    out,  # OutputParts, written
    neighbor,  # (atoms, slots)
    tile_order,  # TileOrder
    weight,  # (E, Y)
    terms,  # EdgeTerms
    dots,  # EdgeTerms: tangents; None in pass 1
    n_atoms,
    n_slots,
    curve_constants: tl.constexpr,
    form,  # Form
    kind: tl.constexpr,  # of the activation, as is `curve_constants`
) -> None:
    """Write m, y[M:] and H (pass 1), or their tangents (pass 3).

    y = f(z); m = Σ_j w·y[:M] and H = Σ_j h ⊗ [e, v], one part for each tile. Their tangents are
    ẏ = f′(z)∘ż, ṁ = Σ_j (w·ẏ[:M] + ẇ·y[:M]) and Ḣ = Σ_j (ḣ ⊗ [e, v] + h ⊗ [ė, v̇]).
    """
    tiles = _tiles_of_launch(tile_order, neighbor, n_atoms, n_slots, form)
    for chunk_number in range(form.n_chunks):
        chunk = _load_chunk(weight, chunk_number, form)
        for index in range(tl.program_id(0), tiles.n_used, tl.num_programs(0)):
            tile = _find_tile(index, tiles, form)
            e = _load_e(terms.e, tile, form)
            if dots is not None:
                e_dot = _load_e(dots.e, tile, form)
            z = _pre_activation(terms, e, tile, chunk, form)
            if dots is not None:
                z_dot = _pre_activation(dots, e_dot, tile, chunk, form)
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
            _store_row(out.message, message, _row(tile, tiles), chunk.c, form.M)
            _store_update(out.update, update, tile, chunk, form)
        for index in range(tiles.n_used + tl.program_id(0), tiles.n_tiles, tl.num_programs(0)):
            tile = _find_tile(index, tiles, form)
            zero_row = tl.zeros([form.chunk_columns], tl.float32)
            zeros = tl.zeros([form.tile_rows, form.chunk_columns], tl.float32)
            _store_row(out.message, zero_row, _row(tile, tiles), chunk.c, form.M)
            _store_update(out.update, zeros, tile, chunk, form)
    _push_moments(out.moment, terms, dots, tiles, form)


@triton.jit(do_not_specialize=["n_atoms", "n_slots"])
def pull_kernel(
    out,  # GradientParts, written
    hats,  # EdgeCotangents of this pass; in pass 2, each hat below stands for a bar
    bars,  # EdgeCotangents of pass 2; None in pass 2, and without forces
    neighbor,  # (atoms, slots)
    tile_order,  # TileOrder
    weight,  # (E, Y)
    terms,  # EdgeTerms
    dots,  # EdgeTerms: tangents; None in pass 2, and without forces
    n_atoms,
    n_slots,
    curve_constants: tl.constexpr,
    form,  # Form
    kind: tl.constexpr,
) -> None:
    """Write the gradients of e, p, the table and W (pass 4), or the adjoints of the terms (pass 2).

    ŷ = [w·m̂ + ẇ·m̄, ŷ[M:]], ȳ = [w·m̄, ȳ[M:]]; ẑ = f′(z)∘ŷ + f″(z)∘ż∘ȳ, z̄ = f′(z)∘ȳ;
    p̂ = Σ_j ẑ, q̂ = ẑ for each edge, Ŵ = Σ_edges (eᵀẑ + ėᵀz̄),
    [ê, v̂] = [ẑ·Wᵀ, 0] + Σ_a (h_a·Ĥ_a + ḣ_a·H̄_a), v̂ for each edge.
    Without bars and dots their terms are 0. Pass 2 writes no Ŵ, but ŵ = y[:M]·m̂ and
    ĥ_a = [e, v]·Ĥ_a.
    """
    tiles = _tiles_of_launch(tile_order, neighbor, n_atoms, n_slots, form)
    for chunk_number in range(form.n_chunks):
        chunk = _load_chunk(weight, chunk_number, form)
        if out.weight is not None:
            weight_hat = tl.zeros_like(chunk.weight)
        if out.w is not None:
            w_hat_chunk = out.w + chunk_number * n_atoms * n_slots
        for index in range(tl.program_id(0), tiles.n_used, tl.num_programs(0)):
            tile = _find_tile(index, tiles, form)
            e = _load_e(terms.e, tile, form)
            z = _pre_activation(terms, e, tile, chunk, form)
            y, slope, bend = curve(z, kind, curve_constants)
            message_hat = _load_message(hats.message, tile, chunk, form)  # 0 beyond M
            if out.w is not None:
                tl.store(w_hat_chunk + tile.edge, tl.sum(y * message_hat, 1), tile.mask)
            w = tl.load(terms.w + tile.edge, tile.mask, 0.0)
            y_hat = _y_cotangent(message_hat, w, hats.update, tile, chunk, form)
            if dots is not None:
                e_dot = _load_e(dots.e, tile, form)
                z_dot = _pre_activation(dots, e_dot, tile, chunk, form)
                w_dot = tl.load(dots.w + tile.edge, tile.mask, 0.0)
                message_bar = _load_message(bars.message, tile, chunk, form)
                y_hat += message_bar * w_dot[:, None]
                y_bar = _y_cotangent(message_bar, w, bars.update, tile, chunk, form)
                z_hat = slope * y_hat + bend * z_dot * y_bar
                z_bar = slope * y_bar
                weight_hat += tl.dot(tl.trans(e_dot), z_bar, input_precision=form.precision)
            else:
                z_hat = slope * y_hat
            if out.weight is not None:
                weight_hat += tl.dot(tl.trans(e), z_hat, input_precision=form.precision)
            _store_row(out.p, tl.sum(z_hat, 0), _row(tile, tiles), chunk.c, form.Y)
            _store_q(out.table, z_hat, tile, chunk, form)
            e_hat = tl.dot(z_hat, tl.trans(chunk.weight), input_precision=form.precision)
            _accumulate_e(out.e, e_hat, tile, chunk_number, form)
        for index in range(tiles.n_used + tl.program_id(0), tiles.n_tiles, tl.num_programs(0)):
            tile = _find_tile(index, tiles, form)
            zero_row = tl.zeros([form.chunk_columns], tl.float32)
            _store_row(out.p, zero_row, _row(tile, tiles), chunk.c, form.Y)
            _store_zero_e(out.e, tile, chunk_number, form)
            zeros = tl.zeros([form.tile_rows], tl.float32)
            if out.w is not None:
                tl.store(w_hat_chunk + tile.edge, zeros, tile.mask)
            if out.h is not None:
                for a in tl.static_range(3):  # each chunk repeats this
                    tl.store(out.h + tile.edge * 3 + a, zeros, tile.mask)
        if out.weight is not None:
            i = tl.arange(0, form.e_width)
            weight_row = tl.program_id(0) * form.E + i[:, None]
            weight_mask = (i < form.E)[:, None] & chunk.in_y[None, :]
            tl.store(out.weight + weight_row * form.Y + chunk.c[None, :], weight_hat, weight_mask)
        # The next chunk, and the moments below, add to ê, which other threads of this program have
        # written.
        tl.debug_barrier()
    _pull_moments(out, hats, bars, terms, dots, tiles, form)


# ----- tiles and chunks --------------------------------------------------------------------------


class Tiles(NamedTuple):
    """The tiles of a launch, and how to find their edges."""

    neighbor: Any  # (atoms, slots)
    order: Any  # (tiles·atoms,), see TileOrder
    n_used: Any
    n_tiles: Any
    n_atoms: Any
    n_slots: Any


class Tile(NamedTuple):
    """One tile: some consecutive slots of an atom."""

    atom: Any
    number: Any  # among the tiles of the atom
    edge: Any  # (tile_rows,): atom · n_slots + slot
    mask: Any  # (tile_rows,): false past an atom's last slot; true in empty slots
    j: Any  # (tile_rows,): the neighbour, as an atom's number


class Chunk(NamedTuple):
    """A chunk of the columns of y, and what a program holds of it."""

    c: Any  # (chunk_columns,): numbers of the columns
    in_y: Any  # (chunk_columns,): c < Y, since the last chunk may reach past Y
    weight: Any  # (e_width, chunk_columns)


@triton.jit
def _tiles_of_launch(tile_order, neighbor, n_atoms, n_slots, form):
    """Return the tiles of a launch."""
    return Tiles(
        neighbor=neighbor,
        order=tile_order.order,
        n_used=tl.load(tile_order.n_used),
        n_tiles=n_atoms * ((n_slots + form.tile_rows - 1) // form.tile_rows),
        n_atoms=n_atoms,
        n_slots=n_slots,
    )


@triton.jit
def _find_tile(index, tiles, form):
    """Return the index-th tile: the first `n_used` have an edge."""
    item = tl.load(tiles.order + index)
    # `order` counts tile by tile: number · n_atoms + atom. int64, since edges · columns may exceed
    # 2³¹.
    number = (item // tiles.n_atoms).to(tl.int64)
    atom = (item % tiles.n_atoms).to(tl.int64)
    slot = number * form.tile_rows + tl.arange(0, form.tile_rows)
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
def _row(tile, tiles):
    """Return a tile's row in parts (tiles, atoms, …).

    It is computed where it is needed: a field of `Tile` would hold registers in `pull_kernel`.
    """
    return tile.number * tiles.n_atoms + tile.atom


@triton.jit
def _load_chunk(weight, chunk_number, form):
    """Load what a program holds of a chunk."""
    i = tl.arange(0, form.e_width)
    c = chunk_number * form.chunk_columns + tl.arange(0, form.chunk_columns)
    in_y = c < form.Y
    weight_mask = (i < form.E)[:, None] & in_y[None, :]
    return Chunk(c=c, in_y=in_y, weight=load_tile(weight, i, c, weight_mask, form.Y))


# ----- tensors of a tile -------------------------------------------------------------------------


@triton.jit
def _pre_activation(terms, e, tile, chunk, form):
    """Return a chunk of z = e·W + p_i + q_j (tile_rows, chunk_columns), or of ż from tangents."""
    p = tl.load(terms.p + tile.atom * form.Y + chunk.c, chunk.in_y, 0.0)[None, :]
    q_mask = tile.mask[:, None] & chunk.in_y[None, :]
    q = load_tile(terms.table, tile.j, chunk.c, q_mask, form.Y + form.V)
    return tl.dot(e, chunk.weight, input_precision=form.precision) + p + q


@triton.jit
def _load_e(e, tile, form):
    """Load edge features of a tile (tile_rows, e_width)."""
    i = tl.arange(0, form.e_width)
    mask = tile.mask[:, None] & (i < form.E)[None, :]
    return load_tile(e, tile.edge, i, mask, form.E)


@triton.jit
def _accumulate_e(e_out, value, tile, chunk_number, form):
    """Store what a chunk of y contributes to ē or ê, added to that of earlier chunks."""
    i = tl.arange(0, form.e_width)
    mask = tile.mask[:, None] & (i < form.E)[None, :]
    # The first chunk must not read: the memory is not initialized.
    value += load_tile(e_out, tile.edge, i, mask & (chunk_number > 0), form.E)
    tl.store(e_out + tile.edge[:, None] * form.E + i[None, :], value, mask)


@triton.jit
def _store_zero_e(e_out, tile, chunk_number, form):
    """Store zeros in ē or ê of an empty tile, once: with the first chunk."""
    i = tl.arange(0, form.e_width)
    mask = tile.mask[:, None] & (i < form.E)[None, :] & (chunk_number == 0)
    zeros = tl.zeros([form.tile_rows, form.e_width], tl.float32)
    tl.store(e_out + tile.edge[:, None] * form.E + i[None, :], zeros, mask)


@triton.jit
def _load_message(message, tile, chunk, form):
    """Load m̄ or m̂ of an atom into the columns of y (1, chunk_columns); 0 beyond M."""
    return tl.load(message + tile.atom * form.M + chunk.c, chunk.c < form.M, 0.0)[None, :]


@triton.jit
def _y_cotangent(message_bar, w, update, tile, chunk, form):
    """Return a chunk of ȳ = [w·m̄, ȳ[M:]] of a tile (tile_rows, chunk_columns), or of ŷ.

    `message_bar` is 0 beyond M; `update` is the cotangent of y[M:].
    """
    y_bar = message_bar * w[:, None]
    if form.Y > form.M:
        column = chunk.c - form.M
        mask = tile.mask[:, None] & ((column >= 0) & chunk.in_y)[None, :]
        y_bar += load_tile(update, tile.edge, column, mask, form.Y - form.M)
    return y_bar


@triton.jit
def _store_update(update, value, tile, chunk, form):
    """Store the columns of y[M:] in a chunk of y of a tile."""
    if form.Y > form.M:
        column = chunk.c - form.M
        mask = tile.mask[:, None] & ((column >= 0) & chunk.in_y)[None, :]
        tl.store(update + tile.edge[:, None] * (form.Y - form.M) + column[None, :], value, mask)


@triton.jit
def _store_q(table_out, value, tile, chunk, form):
    """Store what a chunk of y contributes to q in the row of each edge."""
    at = table_out + tile.edge[:, None] * (form.Y + form.V) + chunk.c[None, :]
    tl.store(at, value, tile.mask[:, None] & chunk.in_y[None, :])


@triton.jit
def _store_row(parts, value, row, c, columns):
    """Store columns c of a row of parts (…, columns)."""
    tl.store(parts + row * columns + c, value, c < columns)


# ----- moments -----------------------------------------------------------------------------------


@triton.jit
def _push_moments(moment_parts, terms, dots, tiles, form):
    """Write H of each tile, or its tangent, to `moment_parts` (tiles, atoms, 3, E + V)."""
    columns: tl.constexpr = form.E + form.V
    for index in range(tl.program_id(0), tiles.n_used, tl.num_programs(0)):
        tile = _find_tile(index, tiles, form)
        for chunk_number in range((columns + form.chunk_columns - 1) // form.chunk_columns):
            c = chunk_number * form.chunk_columns + tl.arange(0, form.chunk_columns)
            e_and_v = _load_e_and_v(terms, tile, c, form)
            if dots is not None:
                e_and_v_dot = _load_e_and_v(dots, tile, c, form)
            for a in tl.static_range(3):
                h_a = tl.load(terms.h + tile.edge * 3 + a, tile.mask, 0.0)
                if dots is None:
                    moment = tl.sum(h_a[:, None] * e_and_v, 0)
                else:
                    h_a_dot = tl.load(dots.h + tile.edge * 3 + a, tile.mask, 0.0)
                    moment = tl.sum(h_a_dot[:, None] * e_and_v, 0)
                    moment += tl.sum(h_a[:, None] * e_and_v_dot, 0)
                _store_row(moment_parts, moment, _row(tile, tiles) * 3 + a, c, columns)
    for index in range(tiles.n_used + tl.program_id(0), tiles.n_tiles, tl.num_programs(0)):
        tile = _find_tile(index, tiles, form)
        for start in range(0, 3 * columns, form.chunk_columns):
            c = start + tl.arange(0, form.chunk_columns)
            zero_row = tl.zeros([form.chunk_columns], tl.float32)
            _store_row(moment_parts, zero_row, _row(tile, tiles), c, 3 * columns)


@triton.jit
def _pull_moments(out, hats, bars, terms, dots, tiles, form):
    """Add what moments contribute to ê, and write v̂ for each edge and, in pass 2, ĥ."""
    columns: tl.constexpr = form.E + form.V
    for index in range(tl.program_id(0), tiles.n_used, tl.num_programs(0)):
        tile = _find_tile(index, tiles, form)
        # Three variables, because Triton cannot add to a column of a tensor.
        h_hat_x = tl.zeros([form.tile_rows], tl.float32)
        h_hat_y = tl.zeros([form.tile_rows], tl.float32)
        h_hat_z = tl.zeros([form.tile_rows], tl.float32)
        for chunk_number in range((columns + form.chunk_columns - 1) // form.chunk_columns):
            c = chunk_number * form.chunk_columns + tl.arange(0, form.chunk_columns)
            if out.h is not None:
                e_and_v = _load_e_and_v(terms, tile, c, form)
                at = hats.moment + tile.atom * 3 * columns + c
                h_hat_x += tl.sum(e_and_v * tl.load(at, c < columns, 0.0)[None, :], 1)
                h_hat_y += tl.sum(e_and_v * tl.load(at + columns, c < columns, 0.0)[None, :], 1)
                h_hat_z += tl.sum(e_and_v * tl.load(at + 2 * columns, c < columns, 0.0)[None, :], 1)
            spread = _spread_moment(hats.moment, terms.h, tile, c, form)
            if dots is not None:
                spread += _spread_moment(bars.moment, dots.h, tile, c, form)
            _add_spread(out, spread, tile, c, form)
        if out.h is not None:
            tl.store(out.h + tile.edge * 3, h_hat_x, tile.mask)
            tl.store(out.h + tile.edge * 3 + 1, h_hat_y, tile.mask)
            tl.store(out.h + tile.edge * 3 + 2, h_hat_z, tile.mask)


@triton.jit
def _load_e_and_v(terms, tile, c, form):
    """Load columns c of [e, v] of a tile (tile_rows, chunk_columns)."""
    e_mask = tile.mask[:, None] & (c < form.E)[None, :]
    v_mask = tile.mask[:, None] & ((c >= form.E) & (c < form.E + form.V))[None, :]
    e = load_tile(terms.e, tile.edge, c, e_mask, form.E)
    v = load_tile(terms.table, tile.j, c - form.E + form.Y, v_mask, form.Y + form.V)
    return e + v  # each is 0 in the columns of the other


@triton.jit
def _spread_moment(moment, h, tile, c, form):
    """Return columns c of Σ_a h_a·H_a of a tile (tile_rows, chunk_columns).

    This is the adjoint of Σ_j h ⊗ [e, v] by [e, v].
    """
    columns: tl.constexpr = form.E + form.V
    atom_moment = moment + tile.atom * 3 * columns + c
    total = tl.zeros([form.tile_rows, form.chunk_columns], tl.float32)
    for a in tl.static_range(3):
        h_a = tl.load(h + tile.edge * 3 + a, tile.mask, 0.0)
        moment_a = tl.load(atom_moment + a * columns, c < columns, 0.0)
        total += h_a[:, None] * moment_a[None, :]
    return total


@triton.jit
def _add_spread(out, spread, tile, c, form):
    """Add what moments contribute to ē or ê, and store it for v in the row of each edge.

    No barrier between calls: each takes other columns.
    """
    e_mask = tile.mask[:, None] & (c < form.E)[None, :]
    e_at = out.e + tile.edge[:, None] * form.E + c[None, :]
    tl.store(e_at, tl.load(e_at, e_mask, 0.0) + spread, e_mask)
    v_mask = tile.mask[:, None] & ((c >= form.E) & (c < form.E + form.V))[None, :]
    v_at = out.table + tile.edge[:, None] * (form.Y + form.V) + form.Y + (c - form.E)[None, :]
    tl.store(v_at, spread, v_mask)
