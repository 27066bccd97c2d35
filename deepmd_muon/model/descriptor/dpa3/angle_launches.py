"""Launches of the kernels of a layer's angles: one a pass.

`terms` are a, u, t, s of `angles` and `dots` their tangents, all in single precision; cotangents are contiguous. Where
a′ is not wanted, ρ and a′ have no elements. Further arguments are those of `Launch`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl

from deepmd_muon.model.activation import Formula
from deepmd_muon.model.descriptor.dpa3 import angle_kernels, launching
from deepmd_muon.model.descriptor.dpa3.angle_kernels import Form, Terms
from deepmd_muon.model.descriptor.dpa3.launching import SMALLEST, Tensors, holding, precision
from deepmd_muon.model.descriptor.dpa3.sum_kernels import add_parts

ROWS = 32  # second neighbours that a program holds at a time, at most
COLUMNS, UPDATE_COLUMNS = 32, 16  # features of y that a program holds at a time; fewer in pass 1
EACH, UPDATE_EACH = 4, 8  # programs that a multiprocessor runs at once; more in pass 1
SLACK = 1.1  # how much longer programs may take so that fewer of them share an atom, whose parts are added up


class Launch:
    """Grid and arguments that all passes share."""

    def __init__(
        self,
        terms: Tensors,
        weight: torch.Tensor,
        residual: torch.Tensor,
        reach: torch.Tensor,
        width: int,
        message: int,
        carry: float,
        kind: str,
        curve_of: Sequence[float],
        *,
        columns: int = COLUMNS,
        each: int = EACH,
    ) -> None:
        atoms = terms[1].shape[0] // width
        programs = launching.at_once(weight.device, each)

        def turns(groups: int) -> int:
            """Return how many first neighbours a program takes one after another."""
            sharing = launching.share(atoms, groups, programs)
            return int(triton.cdiv(atoms, sharing) * triton.cdiv(width, groups))

        fewest = min(map(turns, range(1, width + 1)))
        self.groups = next(groups for groups in range(1, width + 1) if turns(groups) <= SLACK * fewest)
        sizes = (weight.shape[0], message, weight.shape[1])
        rows = min(ROWS, holding(width))
        self.blocks, self.chunks = triton.cdiv(width, rows), triton.cdiv(weight.shape[1], columns)
        self.grid = (launching.share(atoms, self.groups, programs), self.groups, self.blocks)
        tile = (rows, self.blocks, holding(weight.shape[0]), columns, self.chunks)
        self.warps = rows // SMALLEST
        form = Form(*map(tl.constexpr, (*sizes, *tile, precision())))
        given = (weight.contiguous(), residual.contiguous(), reach)
        self.layer = (*given, atoms, width, carry, tuple(curve_of), form, kind)


def update(terms: Tensors, *layer: Any) -> Tensors:
    """Pass 1; return m and a′."""
    launch = Launch(terms, *layer, columns=UPDATE_COLUMNS, each=UPDATE_EACH)
    message, updated = _parts(launch, terms, *layer)
    angle_kernels.update_kernel[launch.grid](message, updated, _dense(terms), *launch.layer, num_warps=launch.warps)
    return add_parts(message)[0], updated


def adjoint(message_bar: torch.Tensor, updated_bar: torch.Tensor, terms: Tensors, *layer: Any) -> Tensors:
    """Pass 2; return the adjoints of a, u, t, s."""
    launch = Launch(terms, *layer)
    a, u, t, s = terms
    of_s = s.new_empty(launch.chunks * (launch.blocks + launch.groups), *s.shape)
    of_first, of_second = of_s.split([launch.chunks * launch.blocks, launch.chunks * launch.groups])
    of_u, of_t = (x.new_empty(n, *x.shape) for x, n in ((u, launch.blocks), (t, launch.groups)))
    out = Terms(a.new_empty(a.shape), of_u, of_t, of_first)
    angle_kernels.adjoint_kernel[launch.grid](
        out, of_second, message_bar, updated_bar, _dense(terms), *launch.layer, num_warps=launch.warps
    )
    return out.a, *add_parts(out.u, out.t, of_s)


def tangent(terms: Tensors, dots: Tensors, *layer: Any) -> Tensors:
    """Pass 3; return the tangents of m and a′, which are the cotangents of their adjoints."""
    launch = Launch(terms, *layer)
    message, updated = _parts(launch, terms, *layer)
    angle_kernels.tangent_kernel[launch.grid](
        message, updated, _dense(terms), _dense(dots), *launch.layer, num_warps=launch.warps
    )
    return add_parts(message)[0], updated


def gradient(given: Tensors, earlier: Tensors, terms: Tensors, dots: Tensors, *layer: Any) -> Tensors:
    """Pass 4; return the gradients of a, u, t, W, ρ.

    `given` are the cotangents of m and a′; `earlier` those of pass 2, and `dots`, are empty when there was none.
    """
    launch = Launch(terms, *layer)
    a, u, t, _ = terms
    weight, residual = layer[:2]
    of_u, of_t = (x.new_empty(n, *x.shape) for x, n in ((u, launch.blocks), (t, launch.groups)))
    out = Terms(a.new_empty(a.shape), of_u, of_t, None)
    sums = weight.new_empty(*launch.grid, *weight.shape), residual.new_empty(*launch.grid, *residual.shape)
    moving = len(dots) > 0
    angle_kernels.gradient_kernel[launch.grid](
        Terms(*out[:3], out.a),
        sums,
        tuple(given),
        tuple(earlier if moving else given),
        _dense(terms),
        _dense(dots if moving else terms),
        *launch.layer,
        moving=moving,
        num_warps=launch.warps,
        num_stages=1,
    )
    return out.a, *add_parts(out.u, out.t, *(x.flatten(0, 2) for x in sums))


def _dense(terms: Tensors) -> Terms:
    return Terms(*(x.contiguous() for x in terms))


def _parts(launch: Launch, terms: Tensors, *layer: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Allocate m, one part per block, and a′."""
    message, updated = outputs(terms, *layer)
    return message.new_empty(launch.blocks, *message.shape), updated


def outputs(
    terms: Tensors,
    weight: torch.Tensor,
    _residual: torch.Tensor,
    _reach: torch.Tensor,
    _width: int,
    message: int,
    *_: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Allocate m and a′."""
    a, u = terms[:2]
    return u.new_empty(u.shape[0], message), a.new_empty(a.shape) if weight.shape[1] > message else a.new_empty(0)


def fits(weight: torch.Tensor, formula: Formula | None) -> bool:
    """Return whether the kernels know the activation, and their tiles hold a layer with weights W."""
    return launching.fits(weight, formula)
