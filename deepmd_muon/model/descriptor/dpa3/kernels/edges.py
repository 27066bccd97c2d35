"""Triton kernels of the four passes over a layer's edges; `edges` defines their results.

A program takes tiles of an atom's neighbours one after the other, and the features of y in chunks, as `angles` do;
then the columns of [e, v] in chunks, for the moments. Zeros are stored for tiles of empty slots alone. The
contributions of a tile to its atom, and of an edge to its neighbour, are written apart and added up afterwards.

A launch takes `terms`, the members of `edges.EdgeTerms`, and `dots`, their tangents; cotangents are contiguous and
those of `edges.EdgeCotangents`, without elements where y has no features beyond the message. All are in single
precision. Further arguments are those of `Launch`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from deepmd_muon.model.descriptor.dpa3.geometry import EDGE_TILE
from deepmd_muon.model.descriptor.dpa3.kernels.angles import load_tile
from deepmd_muon.model.descriptor.dpa3.kernels.shared import (
    Tensors,
    add_parts,
    add_to_neighbors,
    at_once,
    fits_weight,
    holding,
    precision,
)
from deepmd_muon.model.nn.activation import Formula
from deepmd_muon.model.nn.activation_kernels import curve


class Terms(NamedTuple):
    """The tensors of `edges.EdgeTerms`, or their tangents."""

    e: Any
    p: Any
    table: Any
    w: Any
    h: Any


class Tiles(NamedTuple):
    """`tiles` and `used` of `geometry.Incoming`."""

    order: Any
    used: Any


class Form(NamedTuple):
    """Sizes that are known when a kernel is compiled.

    Attributes
    ----------
    edge, node, message, features
        Columns of e, of v, of m and of y.
    rows, inner
        Neighbours in a tile, and a power of two that holds the columns of e.
    columns, chunks
        Features in a chunk, and how many chunks hold all of y.
    precision
        See `angles.Form`.
    """

    edge: tl.constexpr
    node: tl.constexpr
    message: tl.constexpr
    features: tl.constexpr
    rows: tl.constexpr
    inner: tl.constexpr
    columns: tl.constexpr
    chunks: tl.constexpr
    precision: tl.constexpr


@triton.jit
def _matrix(weight, i, c, form):
    """Load a chunk of W."""
    return load_tile(
        weight, i, c, (i < form.edge)[:, None] & (c < form.features)[None, :], form.features
    )


@triton.jit
def _tile(index, tiles, atoms, width, form):
    """Return atom and number of a tile, its edges, and which are present."""
    item = tl.load(tiles.order + index)
    tile, atom = (item // atoms).to(tl.int64), (item % atoms).to(tl.int64)
    k = tile * form.rows + tl.arange(0, form.rows)
    return atom, tile, atom * width + k, k < width


@triton.jit
def _clear_sums(sums, rest, tile, atom, atoms, edge, c, in_k, columns, form):
    """Store zeros in place of a tile's sums over edges, and of its update unless None."""
    tl.store(
        sums + (tile * atoms + atom) * columns + c,
        tl.zeros([form.columns], tl.float32),
        c < columns,
    )
    if rest is not None:
        to, present = c - form.message, (c >= form.message) & (c < form.features)
        at = rest + edge[:, None] * (form.features - form.message) + to[None, :]
        tl.store(
            at, tl.zeros([form.rows, form.columns], tl.float32), in_k[:, None] & present[None, :]
        )


@triton.jit
def _clear_edges(e, w, h, edge, in_k, chunk, form):
    """Store zeros in place of what a tile's edges get."""
    i, zero = tl.arange(0, form.inner), tl.zeros([form.rows], tl.float32)
    in_x = in_k[:, None] & (i < form.edge)[None, :] & (chunk == 0)
    tl.store(
        e + edge[:, None] * form.edge + i[None, :],
        tl.zeros([form.rows, form.inner], tl.float32),
        in_x,
    )
    if w is not None:
        tl.store(w + edge, zero, in_k)
        for axis in tl.static_range(3):
            tl.store(h + edge * 3 + axis, zero, in_k)


@triton.jit
def _sum(terms, x, matrix, atom, other, c, in_k, form):
    """Return e·W + p_i + q_j of a tile."""
    in_y = c < form.features
    p = tl.load(terms.p + atom * form.features + c, in_y, 0.0)[None, :]
    q = load_tile(terms.table, other, c, in_k[:, None] & in_y[None, :], form.features + form.node)
    return tl.dot(x, matrix, input_precision=form.precision) + p + q


@triton.jit
def _vector(tensor, atom, c, form):
    """Load the message of an atom, or its cotangent, into the columns of y."""
    return tl.load(tensor + atom * form.message + c, c < form.message, 0.0)[None, :]


@triton.jit
def _beside(terms, edge, other, c, in_k, form):
    """Load columns of [e, v] of a tile."""
    in_e, in_v = c < form.edge, (c >= form.edge) & (c < form.edge + form.node)
    e = load_tile(terms.e, edge, c, in_k[:, None] & in_e[None, :], form.edge)
    at = form.features + c - form.edge
    return e + load_tile(
        terms.table, other, at, in_k[:, None] & in_v[None, :], form.features + form.node
    )


@triton.jit
def _spread(moment, h, atom, edge, c, in_k, form):
    """Return Σ_a h_a·H_a of a tile, in columns of [e, v]."""
    width: tl.constexpr = form.edge + form.node
    here = moment + atom * 3 * width + c
    out = tl.zeros([form.rows, form.columns], tl.float32)
    for axis in tl.static_range(3):
        out += (
            tl.load(h + edge * 3 + axis, in_k, 0.0)[:, None]
            * tl.load(here + axis * width, c < width, 0.0)[None, :]
        )
    return out


@triton.jit
def _collect(
    terms, neighbor, moment, h, x_of, tiles, used, items, atoms, width, more: tl.constexpr, form
):
    """Write Σ_j h ⊗ [e, v] of a program's tiles of neighbours, one part a tile; with `more`, add to it."""
    columns: tl.constexpr = form.edge + form.node
    for index in range(tl.program_id(0), used, tl.num_programs(0)):
        atom, tile, edge, in_k = _tile(index, tiles, atoms, width, form)
        other = tl.load(neighbor + edge, in_k, 0)
        for chunk in range((columns + form.columns - 1) // form.columns):
            c = chunk * form.columns + tl.arange(0, form.columns)
            x = _beside(terms, edge, other, c, in_k, form)
            part = (tile * atoms + atom) * 3
            for axis in tl.static_range(3):
                total = tl.sum(tl.load(h + edge * 3 + axis, in_k, 0.0)[:, None] * x, 0)
                if more:
                    x_dot = _beside(x_of, edge, other, c, in_k, form)
                    total += tl.sum(
                        tl.load(terms.h + edge * 3 + axis, in_k, 0.0)[:, None] * x_dot, 0
                    )
                tl.store(moment + (part + axis) * columns + c, total, c < columns)
    for index in range(used + tl.program_id(0), items, tl.num_programs(0)):
        atom, tile, _, _ = _tile(index, tiles, atoms, width, form)
        for first in range(0, 3 * columns, form.columns):
            c, zero = first + tl.arange(0, form.columns), tl.zeros([form.columns], tl.float32)
            tl.store(moment + (tile * atoms + atom) * 3 * columns + c, zero, c < 3 * columns)


@triton.jit
def _add_spread(out, to_neighbor, spread, edge, c, in_k, form):
    """Add the contributions of the moments to e, and store those to v."""
    in_e = in_k[:, None] & (c < form.edge)[None, :]
    at = out + edge[:, None] * form.edge + c[None, :]
    tl.store(at, tl.load(at, in_e, 0.0) + spread, in_e)
    in_v = in_k[:, None] & ((c >= form.edge) & (c < form.edge + form.node))[None, :]
    row = edge[:, None] * (form.features + form.node) + form.features
    tl.store(to_neighbor + row + (c - form.edge)[None, :], spread, in_v)


@triton.jit
def update_kernel(
    message, update, moment, neighbor, tiles, weight, terms, atoms, width,
    curve_of: tl.constexpr, form, kind: tl.constexpr,
) -> None:  # fmt: skip
    """Pass 1: parts of m and of H, and y[width:]."""
    i, items, used = (
        tl.arange(0, form.inner),
        atoms * ((width + form.rows - 1) // form.rows),
        tl.load(tiles.used),
    )
    for chunk in range(form.chunks):
        c = chunk * form.columns + tl.arange(0, form.columns)
        matrix, rest = _matrix(weight, i, c, form), c - form.message
        for index in range(tl.program_id(0), used, tl.num_programs(0)):
            atom, tile, edge, in_k = _tile(index, tiles, atoms, width, form)
            in_rest = in_k[:, None] & ((rest >= 0) & (c < form.features))[None, :]
            other = tl.load(neighbor + edge, in_k, 0)
            x = load_tile(terms.e, edge, i, in_k[:, None] & (i < form.edge)[None, :], form.edge)
            y = curve(_sum(terms, x, matrix, atom, other, c, in_k, form), kind, curve_of)[0]
            m = tl.sum(y * tl.load(terms.w + edge, in_k, 0.0)[:, None], 0)
            tl.store(message + (tile * atoms + atom) * form.message + c, m, c < form.message)
            if form.features > form.message:
                at = edge[:, None] * (form.features - form.message) + rest[None, :]
                tl.store(update + at, y, in_rest)
        for index in range(used + tl.program_id(0), items, tl.num_programs(0)):
            atom, tile, edge, in_k = _tile(index, tiles, atoms, width, form)
            to = update if form.features > form.message else None
            _clear_sums(message, to, tile, atom, atoms, edge, c, in_k, form.message, form)
    _collect(terms, neighbor, moment, terms.h, terms, tiles, used, items, atoms, width, False, form)


@triton.jit
def adjoint_kernel(
    out, message, update, moment, neighbor, tiles, weight, terms, atoms, width,
    curve_of: tl.constexpr, form, kind: tl.constexpr,
) -> None:  # fmt: skip
    """Pass 2: the adjoints of m, y[width:] and H give `out`.

    Those of p come in parts by tile, those of w by chunk, and those of the table by edge.
    """
    i, items, used = (
        tl.arange(0, form.inner),
        atoms * ((width + form.rows - 1) // form.rows),
        tl.load(tiles.used),
    )
    for chunk in range(form.chunks):
        c = chunk * form.columns + tl.arange(0, form.columns)
        in_y, rest, matrix = c < form.features, c - form.message, _matrix(weight, i, c, form)
        for index in range(tl.program_id(0), used, tl.num_programs(0)):
            atom, tile, edge, in_k = _tile(index, tiles, atoms, width, form)
            in_rest = in_k[:, None] & ((rest >= 0) & (c < form.features))[None, :]
            in_x = in_k[:, None] & (i < form.edge)[None, :]
            other = tl.load(neighbor + edge, in_k, 0)
            x = load_tile(terms.e, edge, i, in_x, form.edge)
            y, slope, _ = curve(_sum(terms, x, matrix, atom, other, c, in_k, form), kind, curve_of)
            m = _vector(message, atom, c, form)
            tl.store(out.w + (chunk * atoms * width + edge), tl.sum(y * m, 1), in_k)
            y_bar = m * tl.load(terms.w + edge, in_k, 0.0)[:, None]
            if form.features > form.message:
                y_bar += load_tile(update, edge, rest, in_rest, form.features - form.message)
            z_bar = slope * y_bar
            tl.store(out.p + (tile * atoms + atom) * form.features + c, tl.sum(z_bar, 0), in_y)
            at = edge[:, None] * (form.features + form.node) + c[None, :]
            tl.store(out.table + at, z_bar, in_k[:, None] & in_y[None, :])
            x_bar = tl.dot(z_bar, tl.trans(matrix), input_precision=form.precision)
            x_bar += load_tile(out.e, edge, i, in_x & (chunk > 0), form.edge)
            tl.store(out.e + edge[:, None] * form.edge + i[None, :], x_bar, in_x)
        for index in range(used + tl.program_id(0), items, tl.num_programs(0)):
            atom, tile, edge, in_k = _tile(index, tiles, atoms, width, form)
            _clear_sums(out.p, None, tile, atom, atoms, edge, c, in_k, form.features, form)
            _clear_edges(out.e, out.w + chunk * atoms * width, out.h, edge, in_k, chunk, form)
        tl.debug_barrier()
    columns: tl.constexpr = form.edge + form.node
    for index in range(tl.program_id(0), used, tl.num_programs(0)):
        atom, _, edge, in_k = _tile(index, tiles, atoms, width, form)
        other = tl.load(neighbor + edge, in_k, 0)
        zero = tl.zeros([form.rows], tl.float32)
        h_0, h_1, h_2 = zero, zero, zero
        for chunk in range((columns + form.columns - 1) // form.columns):
            c = chunk * form.columns + tl.arange(0, form.columns)
            x, here = _beside(terms, edge, other, c, in_k, form), moment + atom * 3 * columns + c
            h_0 += tl.sum(x * tl.load(here, c < columns, 0.0)[None, :], 1)
            h_1 += tl.sum(x * tl.load(here + columns, c < columns, 0.0)[None, :], 1)
            h_2 += tl.sum(x * tl.load(here + 2 * columns, c < columns, 0.0)[None, :], 1)
            _add_spread(
                out.e,
                out.table,
                _spread(moment, terms.h, atom, edge, c, in_k, form),
                edge,
                c,
                in_k,
                form,
            )
        tl.store(out.h + edge * 3, h_0, in_k)
        tl.store(out.h + edge * 3 + 1, h_1, in_k)
        tl.store(out.h + edge * 3 + 2, h_2, in_k)


@triton.jit
def tangent_kernel(
    message, update, moment, neighbor, tiles, weight, terms, dots, atoms, width,
    curve_of: tl.constexpr, form, kind: tl.constexpr,
) -> None:  # fmt: skip
    """Pass 3: the tangents of the terms give those of m and H, in parts, and of y[width:]."""
    i, items, used = (
        tl.arange(0, form.inner),
        atoms * ((width + form.rows - 1) // form.rows),
        tl.load(tiles.used),
    )
    for chunk in range(form.chunks):
        c = chunk * form.columns + tl.arange(0, form.columns)
        matrix, rest = _matrix(weight, i, c, form), c - form.message
        for index in range(tl.program_id(0), used, tl.num_programs(0)):
            atom, tile, edge, in_k = _tile(index, tiles, atoms, width, form)
            in_rest = in_k[:, None] & ((rest >= 0) & (c < form.features))[None, :]
            in_x = in_k[:, None] & (i < form.edge)[None, :]
            other = tl.load(neighbor + edge, in_k, 0)
            x, x_dot = (
                load_tile(terms.e, edge, i, in_x, form.edge),
                load_tile(dots.e, edge, i, in_x, form.edge),
            )
            y, slope, _ = curve(_sum(terms, x, matrix, atom, other, c, in_k, form), kind, curve_of)
            y_dot = slope * _sum(dots, x_dot, matrix, atom, other, c, in_k, form)
            w, w_dot = tl.load(terms.w + edge, in_k, 0.0), tl.load(dots.w + edge, in_k, 0.0)
            m = tl.sum(y_dot * w[:, None] + y * w_dot[:, None], 0)
            tl.store(message + (tile * atoms + atom) * form.message + c, m, c < form.message)
            if form.features > form.message:
                at = edge[:, None] * (form.features - form.message) + rest[None, :]
                tl.store(update + at, y_dot, in_rest)
        for index in range(used + tl.program_id(0), items, tl.num_programs(0)):
            atom, tile, edge, in_k = _tile(index, tiles, atoms, width, form)
            to = update if form.features > form.message else None
            _clear_sums(message, to, tile, atom, atoms, edge, c, in_k, form.message, form)
    _collect(terms, neighbor, moment, dots.h, dots, tiles, used, items, atoms, width, True, form)


@triton.jit
def _cotangent(given, earlier, terms, dots, z_dot, bends, at, form, moving: tl.constexpr):
    """Return ẑ and z̄ of a tile; `bends` are f′ and f″."""
    atom, edge, c, in_k = at[0], at[1], at[2], at[3]
    rest = c - form.message
    in_rest = in_k[:, None] & ((rest >= 0) & (c < form.features))[None, :]
    w = tl.load(terms.w + edge, in_k, 0.0)[:, None]
    y_hat = _vector(given[0], atom, c, form) * w
    if form.features > form.message:
        y_hat += load_tile(given[1], edge, rest, in_rest, form.features - form.message)
    if moving:
        m_bar = _vector(earlier[0], atom, c, form)
        y_hat += m_bar * tl.load(dots.w + edge, in_k, 0.0)[:, None]
        y_bar = m_bar * w
        if form.features > form.message:
            y_bar += load_tile(earlier[1], edge, rest, in_rest, form.features - form.message)
        return bends[0] * y_hat + bends[1] * z_dot * y_bar, bends[0] * y_bar
    return bends[0] * y_hat, y_hat


@triton.jit
def gradient_kernel(
    out, weight_hat, given, earlier, neighbor, tiles, weight, terms, dots, atoms, width,
    curve_of: tl.constexpr, form, kind: tl.constexpr, moving: tl.constexpr,
) -> None:  # fmt: skip
    """Pass 4: `given` cotangents of m, y[width:] and H, and the `earlier` ones of pass 2, give `out` and that of W.

    Those of p come in parts by tile, those of the table by edge; w and h get none.
    """
    i, items, used = (
        tl.arange(0, form.inner),
        atoms * ((width + form.rows - 1) // form.rows),
        tl.load(tiles.used),
    )
    for chunk in range(form.chunks):
        c = chunk * form.columns + tl.arange(0, form.columns)
        in_y, matrix = c < form.features, _matrix(weight, i, c, form)
        sum_w = tl.zeros_like(matrix)
        for index in range(tl.program_id(0), used, tl.num_programs(0)):
            atom, tile, edge, in_k = _tile(index, tiles, atoms, width, form)
            in_x = in_k[:, None] & (i < form.edge)[None, :]
            other = tl.load(neighbor + edge, in_k, 0)
            x, x_dot = (
                load_tile(terms.e, edge, i, in_x, form.edge),
                load_tile(dots.e, edge, i, in_x, form.edge),
            )
            _, slope, bend = curve(
                _sum(terms, x, matrix, atom, other, c, in_k, form), kind, curve_of
            )
            z_dot = _sum(dots, x_dot, matrix, atom, other, c, in_k, form)
            z_hat, z_bar = _cotangent(
                given,
                earlier,
                terms,
                dots,
                z_dot,
                (slope, bend),
                (atom, edge, c, in_k),
                form,
                moving,
            )
            tl.store(out.p + (tile * atoms + atom) * form.features + c, tl.sum(z_hat, 0), in_y)
            at = edge[:, None] * (form.features + form.node) + c[None, :]
            tl.store(out.table + at, z_hat, in_k[:, None] & in_y[None, :])
            sum_w += tl.dot(tl.trans(x), z_hat, input_precision=form.precision)
            if moving:
                sum_w += tl.dot(tl.trans(x_dot), z_bar, input_precision=form.precision)
            x_hat = tl.dot(z_hat, tl.trans(matrix), input_precision=form.precision)
            x_hat += load_tile(out.e, edge, i, in_x & (chunk > 0), form.edge)
            tl.store(out.e + edge[:, None] * form.edge + i[None, :], x_hat, in_x)
        for index in range(used + tl.program_id(0), items, tl.num_programs(0)):
            atom, tile, edge, in_k = _tile(index, tiles, atoms, width, form)
            _clear_sums(out.p, None, tile, atom, atoms, edge, c, in_k, form.features, form)
            _clear_edges(out.e, None, None, edge, in_k, chunk, form)
        at = (tl.program_id(0) * form.edge + i[:, None]) * form.features + c[None, :]
        tl.store(weight_hat + at, sum_w, (i < form.edge)[:, None] & in_y[None, :])
        tl.debug_barrier()
    columns: tl.constexpr = form.edge + form.node
    for index in range(tl.program_id(0), used, tl.num_programs(0)):
        atom, _, edge, in_k = _tile(index, tiles, atoms, width, form)
        for chunk in range((columns + form.columns - 1) // form.columns):
            c = chunk * form.columns + tl.arange(0, form.columns)
            spread = _spread(given[2], terms.h, atom, edge, c, in_k, form)
            if moving:
                spread += _spread(earlier[2], dots.h, atom, edge, c, in_k, form)
            _add_spread(out.e, out.table, spread, edge, c, in_k, form)


COLUMNS, UPDATE_COLUMNS = 64, 32  # features of y that a program holds at a time; fewer in pass 1
EACH, UPDATE_EACH = 2, 6  # programs that a multiprocessor runs at once; more in pass 1
WARPS, UPDATE_WARPS = {"num_warps": 4, "num_stages": 1}, {"num_warps": 2, "num_stages": 1}


class Launch:
    """Grid and arguments that all passes share; a multiprocessor runs `each` programs at once."""

    def __init__(
        self,
        terms: Tensors,
        neighbor: torch.Tensor,
        order: torch.Tensor,
        start: torch.Tensor,
        tiles: torch.Tensor,
        used: torch.Tensor,
        weight: torch.Tensor,
        message: int,
        kind: str,
        curve_of: Sequence[float],
        *,
        columns: int = COLUMNS,
        each: int = EACH,
    ) -> None:
        self.incoming = order, start
        atoms, width = neighbor.shape
        edge, features = weight.shape
        self.tiles = triton.cdiv(width, EDGE_TILE)
        programs = at_once(weight.device, each)
        self.grid = (min(atoms * self.tiles, programs),)
        self.chunks = triton.cdiv(features, columns)
        sizes = (
            edge,
            terms[2].shape[1] - features,
            message,
            features,
            EDGE_TILE,
            holding(edge),
            columns,
            self.chunks,
        )
        form = Form(*map(tl.constexpr, (*sizes, precision())))
        self.layer = (neighbor.contiguous(), Tiles(tiles, used), weight.contiguous())
        self.sizes = (atoms, width, tuple(curve_of), form, kind)


def update(terms: Tensors, *layer: Any) -> Tensors:
    """Pass 1; return m, y[width:] and H."""
    launch = Launch(terms, *layer, columns=UPDATE_COLUMNS, each=UPDATE_EACH)
    message, rest, moment = _parts(launch, terms, *layer)
    update_kernel[launch.grid](
        message, rest, moment, *launch.layer, _dense(terms), *launch.sizes, **UPDATE_WARPS
    )
    message, moment = add_parts(message, moment)
    return message, rest, moment


def adjoint(cotangents: Tensors, terms: Tensors, *layer: Any) -> Tensors:
    """Pass 2; return the adjoints of the terms."""
    launch = Launch(terms, *layer)
    out = _outputs(launch, terms, layer[0])
    adjoint_kernel[launch.grid](
        out, *cotangents, *launch.layer, _dense(terms), *launch.sizes, **WARPS
    )
    p, w = add_parts(out.p, out.w)
    return out.e, p, add_to_neighbors(out.table, *launch.incoming), w, out.h


def tangent(terms: Tensors, dots: Tensors, *layer: Any) -> Tensors:
    """Pass 3; return the tangents of m, y[width:] and H, which are the cotangents of their adjoints."""
    launch = Launch(terms, *layer)
    message, rest, moment = _parts(launch, terms, *layer)
    tangent_kernel[launch.grid](
        message, rest, moment, *launch.layer, _dense(terms), _dense(dots), *launch.sizes, **WARPS
    )
    message, moment = add_parts(message, moment)
    return message, rest, moment


def gradient(
    given: Tensors, earlier: Tensors, terms: Tensors, dots: Tensors, *layer: Any
) -> Tensors:
    """Pass 4; return the gradients of W, e, p and the table.

    `given` are the cotangents; `earlier`, those of pass 2, and `dots` are empty when there was no such pass.
    """
    launch = Launch(terms, *layer)
    neighbor, weight = layer[0], layer[5]
    out = _outputs(launch, terms, neighbor)
    weight_hat = weight.new_empty(*launch.grid, *weight.shape)
    moving = len(dots) > 0
    gradient_kernel[launch.grid](
        out, weight_hat, tuple(given), tuple(earlier if moving else given), *launch.layer, _dense(terms),
        _dense(dots if moving else terms), *launch.sizes,
        moving=moving, **WARPS,
    )  # fmt: skip
    weight_hat, p = add_parts(weight_hat, out.p)
    return weight_hat, out.e, p, add_to_neighbors(out.table, *launch.incoming)


def _dense(terms: Tensors) -> Terms:
    return Terms(*(x.contiguous() for x in terms))


def _parts(
    launch: Launch, terms: Tensors, *layer: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Allocate m and H, one part per tile, and y[width:]."""
    of_message, rest, moment = outputs(terms, *layer)
    weight = layer[5]
    return (
        weight.new_empty(launch.tiles, *of_message.shape),
        rest,
        weight.new_empty(launch.tiles, *moment.shape),
    )


def _outputs(launch: Launch, terms: Tensors, neighbor: torch.Tensor) -> Terms:
    """Allocate e and h, a part of p per tile and of w per chunk, and a row of the table per edge."""
    e, p, table, w, h = terms
    of_table = table.new_empty(neighbor.numel(), table.shape[1])
    return Terms(
        e.new_empty(e.shape),
        p.new_empty(launch.tiles, *p.shape),
        of_table,
        w.new_empty(launch.chunks, *w.shape),
        h.new_empty(h.shape),
    )


def outputs(terms: Tensors, *layer: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Allocate m, y[width:] and H."""
    neighbor, weight, message = layer[0], layer[5], layer[6]
    atoms, width = neighbor.shape
    rest = weight.shape[1] - message
    return (
        weight.new_empty(atoms, message),
        weight.new_empty(*((atoms, width, rest) if rest else (0,))),
        weight.new_empty(atoms, 3, weight.shape[0] + terms[2].shape[1] - weight.shape[1]),
    )


def fits(neighbor: torch.Tensor, weight: torch.Tensor, formula: Formula | None) -> bool:
    """Return whether there are edges, the kernels know the activation, and their tiles hold a layer with weights W."""
    return neighbor.numel() > 0 and fits_weight(weight, formula)
