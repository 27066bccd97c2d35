"""Launches of the kernels of a layer's edges: one a pass.

`terms` are the members of `edges.EdgeTerms` and `dots` their tangents; cotangents are those of `edges.EdgeCotangents`,
without elements where y has no features beyond the message. All are in single precision, and cotangents contiguous.
Further arguments are those of `Launch`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl

from deepmd_muon.model.activation import Formula
from deepmd_muon.model.descriptor.dpa3 import edge_kernels, launching
from deepmd_muon.model.descriptor.dpa3.edge_kernels import Form, Terms, Tiles
from deepmd_muon.model.descriptor.dpa3.geometry import EDGE_TILE
from deepmd_muon.model.descriptor.dpa3.launching import Tensors, holding, precision
from deepmd_muon.model.descriptor.dpa3.sum_kernels import add_parts, add_to_neighbors

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
        programs = launching.at_once(weight.device, each)
        self.grid = (min(atoms * self.tiles, programs),)
        self.chunks = triton.cdiv(features, columns)
        sizes = (edge, terms[2].shape[1] - features, message, features, EDGE_TILE, holding(edge), columns, self.chunks)
        form = Form(*map(tl.constexpr, (*sizes, precision())))
        self.layer = (neighbor.contiguous(), Tiles(tiles, used), weight.contiguous())
        self.sizes = (atoms, width, tuple(curve_of), form, kind)


def update(terms: Tensors, *layer: Any) -> Tensors:
    """Pass 1; return m, y[width:] and H."""
    launch = Launch(terms, *layer, columns=UPDATE_COLUMNS, each=UPDATE_EACH)
    message, rest, moment = _parts(launch, terms, *layer)
    edge_kernels.update_kernel[launch.grid](
        message, rest, moment, *launch.layer, _dense(terms), *launch.sizes, **UPDATE_WARPS
    )
    message, moment = add_parts(message, moment)
    return message, rest, moment


def adjoint(cotangents: Tensors, terms: Tensors, *layer: Any) -> Tensors:
    """Pass 2; return the adjoints of the terms."""
    launch = Launch(terms, *layer)
    out = _outputs(launch, terms, layer[0])
    edge_kernels.adjoint_kernel[launch.grid](out, *cotangents, *launch.layer, _dense(terms), *launch.sizes, **WARPS)
    p, w = add_parts(out.p, out.w)
    return out.e, p, add_to_neighbors(out.table, *launch.incoming), w, out.h


def tangent(terms: Tensors, dots: Tensors, *layer: Any) -> Tensors:
    """Pass 3; return the tangents of m, y[width:] and H, which are the cotangents of their adjoints."""
    launch = Launch(terms, *layer)
    message, rest, moment = _parts(launch, terms, *layer)
    edge_kernels.tangent_kernel[launch.grid](
        message, rest, moment, *launch.layer, _dense(terms), _dense(dots), *launch.sizes, **WARPS
    )
    message, moment = add_parts(message, moment)
    return message, rest, moment


def gradient(given: Tensors, earlier: Tensors, terms: Tensors, dots: Tensors, *layer: Any) -> Tensors:
    """Pass 4; return the gradients of W, e, p and the table.

    `given` are the cotangents; `earlier`, those of pass 2, and `dots` are empty when there was no such pass.
    """
    launch = Launch(terms, *layer)
    neighbor, weight = layer[0], layer[5]
    out = _outputs(launch, terms, neighbor)
    weight_hat = weight.new_empty(*launch.grid, *weight.shape)
    moving = len(dots) > 0
    edge_kernels.gradient_kernel[launch.grid](
        out,
        weight_hat,
        tuple(given),
        tuple(earlier if moving else given),
        *launch.layer,
        _dense(terms),
        _dense(dots if moving else terms),
        *launch.sizes,
        moving=moving,
        **WARPS,
    )
    weight_hat, p = add_parts(weight_hat, out.p)
    return weight_hat, out.e, p, add_to_neighbors(out.table, *launch.incoming)


def _dense(terms: Tensors) -> Terms:
    return Terms(*(x.contiguous() for x in terms))


def _parts(launch: Launch, terms: Tensors, *layer: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Allocate m and H, one part per tile, and y[width:]."""
    of_message, rest, moment = outputs(terms, *layer)
    weight = layer[5]
    return weight.new_empty(launch.tiles, *of_message.shape), rest, weight.new_empty(launch.tiles, *moment.shape)


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


def outputs(
    terms: Tensors,
    neighbor: torch.Tensor,
    _order: torch.Tensor,
    _start: torch.Tensor,
    _tiles: torch.Tensor,
    _used: torch.Tensor,
    weight: torch.Tensor,
    message: int,
    *_: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Allocate m, y[width:] and H."""
    atoms, width = neighbor.shape
    rest = weight.shape[1] - message
    return (
        weight.new_empty(atoms, message),
        weight.new_empty(*((atoms, width, rest) if rest else (0,))),
        weight.new_empty(atoms, 3, weight.shape[0] + terms[2].shape[1] - weight.shape[1]),
    )


def fits(neighbor: torch.Tensor, weight: torch.Tensor, formula: Formula | None) -> bool:
    """Return whether there are edges, the kernels know the activation, and their tiles hold a layer with weights W."""
    return neighbor.numel() > 0 and launching.fits(weight, formula)
