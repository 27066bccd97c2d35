"""Triton kernels of the four passes over a layer's angles; `angles` defines their results.

A program takes atoms one after the other and, of each, every `groups`-th first neighbour j with one block of second
neighbours k: a tile of angles whose intermediate numbers never leave the chip. Neighbours beyond the reach of an atom
contribute zeros, so their tiles are not computed. The columns of a tile are features of y, those of the message first,
then those of the angle; a program takes them in chunks, as many as its registers hold, and adds up the contributions
of all chunks to a. Sums over k are written once a block, sums over j and over all angles once a group or program; they
are added up afterwards, in the same order every time.

A launch takes `terms`, which are a, u, t, s of `angles`, and `dots`, their tangents, all in single precision;
cotangents are contiguous. Where a′ is not wanted, ρ and a′ have no elements. Further arguments are those of `Launch`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from deepmd_muon.model.descriptor.dpa3.kernels.shared import (
    SMALLEST,
    Tensors,
    add_parts,
    at_once,
    holding,
    precision,
    share,
)
from deepmd_muon.model.nn.layer_kernels import curve


class Terms(NamedTuple):
    """The tensors a, u, t, s of `angles`, or their tangents."""

    a: Any
    u: Any
    t: Any
    s: Any


class Form(NamedTuple):
    """Sizes that are known when a kernel is compiled.

    Attributes
    ----------
    angle, message, features
        Columns of a, of m and of y.
    rows, blocks
        Second neighbours in a tile, a power of two, and how many blocks of so many hold all.
    inner
        A power of two that holds the columns of a.
    columns, chunks
        Features of y in a chunk, and how many chunks hold all.
    precision
        Of products: "tf32x3" splits each factor in two, which keeps single precision on tensor cores.
    """

    angle: tl.constexpr
    message: tl.constexpr
    features: tl.constexpr
    rows: tl.constexpr
    blocks: tl.constexpr
    inner: tl.constexpr
    columns: tl.constexpr
    chunks: tl.constexpr
    precision: tl.constexpr


@triton.jit
def load_tile(tensor, row, column, present, stride):
    """Load a tile `(row, column)` of a matrix with `stride` columns; 0 where not present."""
    return tl.load(tensor + row[:, None] * stride + column[None, :], present, 0.0)


@triton.jit
def _sum(terms, x, matrix, t, slot, c, form):
    """Return a·W + u_j + t_k of a tile."""
    u = tl.load(terms.u + slot * form.features + c, c < form.features, 0.0)
    return tl.dot(x, matrix, input_precision=form.precision) + u[None, :] + t


@triton.jit
def _vector(tensor, slot, c, form):
    """Load the message of a slot, or its cotangent, into the columns of y."""
    return tl.load(tensor + slot * form.message + c, c < form.message, 0.0)[None, :]


@triton.jit
def _columns(chunk, form):
    """Return the columns of a chunk, which are present, their columns of a, and which have one."""
    c = chunk * form.columns + tl.arange(0, form.columns)
    return c, c < form.features, c - form.message, (c >= form.message) & (c < form.features)


@triton.jit
def _matrix(weight, i, c, form):
    """Load a chunk of W."""
    return load_tile(
        weight, i, c, (i < form.angle)[:, None] & (c < form.features)[None, :], form.features
    )


@triton.jit
def _range(reach, atom, block, width, form):
    """Return where the first neighbours start that a program takes, and end, and those that it leaves out start."""
    far = tl.load(reach + atom)
    end = tl.where(far > block * form.rows, far, 0)
    start, step = tl.program_id(1), tl.num_programs(1)
    return start, end, start + (tl.maximum(end - start, 0) + step - 1) // step * step


@triton.jit
def _block(form):
    """Return which block of second neighbours a program takes.

    The last one, which few atoms reach, comes first: its programs run beside those that have more to do.
    """
    block = tl.zeros([], tl.int32)
    if form.blocks > 1:
        block += form.blocks - 1 - tl.program_id(2)
    return block


@triton.jit
def _part(sums, number, atoms, width, columns: tl.constexpr):
    """Return where a part starts of what each slot takes."""
    return sums + number.to(tl.int64) * atoms * width * columns


@triton.jit
def _clear(rows, angles, first, rest, width, k, in_x, c, columns: tl.constexpr, chunk, form):
    """Store zeros for first neighbours from `rest` on and, unless None, for their angles."""
    i, nothing = tl.arange(0, form.inner), tl.zeros([form.rows, form.inner], tl.float32)
    for j in range(rest, width, tl.num_programs(1)):
        slot = first + j
        tl.store(rows + slot * columns + c, tl.zeros([form.columns], tl.float32), c < columns)
        if angles is not None:
            angle = slot * width + k
            tl.store(
                angles + angle[:, None] * form.angle + i[None, :], nothing, in_x & (chunk == 0)
            )


@triton.jit
def update_kernel(
    message, updated, terms, weight, residual, reach, atoms, width, carry,
    curve_of: tl.constexpr, form, kind: tl.constexpr,
) -> None:  # fmt: skip
    """Pass 1: m_j = s_j·Σ_k s_k·y_jk and, where y has more features, a′ = α·a + ρ∘y."""
    i = tl.arange(0, form.inner)
    block = _block(form)
    message = _part(message, block, atoms, width, form.message)
    k = block * form.rows + tl.arange(0, form.rows)
    in_k = k < width
    in_x = in_k[:, None] & (i < form.angle)[None, :]
    for chunk in range(form.chunks):
        c, in_y, to_a, in_a = _columns(chunk, form)
        matrix, rho = _matrix(weight, i, c, form), tl.load(residual + to_a, in_a, 0.0)[None, :]
        in_a = in_k[:, None] & in_a[None, :]
        for atom in range(tl.program_id(0), atoms, tl.num_programs(0)):
            first = atom * tl.full([], width, tl.int64)
            start, end, rest = _range(reach, atom, block, width, form)
            s_k = tl.load(terms.s + first + k, in_k, 0.0)[:, None]
            t = load_tile(
                terms.t,
                first + k,
                c,
                (in_k & (start < end))[:, None] & in_y[None, :],
                form.features,
            )
            for j in range(start, end, tl.num_programs(1)):
                slot = first + j
                angle = slot * width + k
                x = load_tile(terms.a, angle, i, in_x, form.angle)
                y = curve(_sum(terms, x, matrix, t, slot, c, form), kind, curve_of)[0]
                m = tl.load(terms.s + slot) * tl.sum(y * s_k, 0)
                tl.store(message + slot * form.message + c, m, c < form.message)
                if form.features > form.message:
                    after = carry * load_tile(terms.a, angle, to_a, in_a, form.angle) + rho * y
                    tl.store(updated + angle[:, None] * form.angle + to_a[None, :], after, in_a)
            angles = updated if form.features > form.message else None
            _clear(message, angles, first, rest, width, k, in_x, c, form.message, chunk, form)


@triton.jit
def adjoint_kernel(
    out, s_parts, message, updated, terms, weight, residual, reach, atoms, width, carry,
    curve_of: tl.constexpr, form, kind: tl.constexpr,
) -> None:  # fmt: skip
    """Pass 2: the adjoints of m and a′ give `out`: those of a, u and, in parts, t and s as a first neighbour.

    `s_parts` takes those of s as a second neighbour.
    """
    i = tl.arange(0, form.inner)
    block = _block(form)
    of_u = _part(out.u, block, atoms, width, form.features)
    k = block * form.rows + tl.arange(0, form.rows)
    in_k = k < width
    in_x = in_k[:, None] & (i < form.angle)[None, :]
    for chunk in range(form.chunks):
        of_s = _part(out.s, block * form.chunks + chunk, atoms, width, 1)
        c, in_y, to_a, in_a = _columns(chunk, form)
        matrix, rho = _matrix(weight, i, c, form), tl.load(residual + to_a, in_a, 0.0)[None, :]
        in_a, in_z = in_k[:, None] & in_a[None, :], in_k[:, None] & in_y[None, :]
        for atom in range(tl.program_id(0), atoms, tl.num_programs(0)):
            first = atom * tl.full([], width, tl.int64)
            start, end, rest = _range(reach, atom, block, width, form)
            s_k = tl.load(terms.s + first + k, in_k, 0.0)
            t = load_tile(terms.t, first + k, c, in_z & (start < end), form.features)
            sum_t, sum_s = tl.zeros_like(t), tl.zeros_like(s_k)
            for j in range(start, end, tl.num_programs(1)):
                slot = first + j
                angle = slot * width + k
                x = load_tile(terms.a, angle, i, in_x, form.angle)
                y, slope, _ = curve(_sum(terms, x, matrix, t, slot, c, form), kind, curve_of)
                s_j, m = tl.load(terms.s + slot), _vector(message, slot, c, form)
                along = tl.sum(y * m, 1)
                tl.store(of_s + slot, tl.sum(along * s_k, 0))
                sum_s += s_j * along
                y_bar = m * (s_j * s_k)[:, None]
                if form.features > form.message:
                    y_bar += rho * load_tile(updated, angle, to_a, in_a, form.angle)
                z_bar = slope * y_bar
                sum_t += z_bar
                tl.store(of_u + slot * form.features + c, tl.sum(z_bar, 0), in_y)
                x_bar = tl.dot(z_bar, tl.trans(matrix), input_precision=form.precision)
                if form.features > form.message:
                    x_bar += carry * load_tile(updated, angle, i, in_x & (chunk == 0), form.angle)
                x_bar += load_tile(out.a, angle, i, in_x & (chunk > 0), form.angle)
                tl.store(out.a + angle[:, None] * form.angle + i[None, :], x_bar, in_x)
            _clear(of_u, out.a, first, rest, width, k, in_x, c, form.features, chunk, form)
            for j in range(rest, width, tl.num_programs(1)):
                tl.store(of_s + (first + j), 0.0)
            part = tl.program_id(1).to(tl.int64) * atoms + atom
            tl.store(s_parts + (chunk * tl.num_programs(1) * atoms + part) * width + k, sum_s, in_k)
            tl.store(out.t + (part * width + k)[:, None] * form.features + c[None, :], sum_t, in_z)
        tl.debug_barrier()


@triton.jit
def tangent_kernel(
    message, updated, terms, dots, weight, residual, reach, atoms, width, carry,
    curve_of: tl.constexpr, form, kind: tl.constexpr,
) -> None:  # fmt: skip
    """Pass 3: the tangents of a, u, t, s give those of m and a′."""
    i = tl.arange(0, form.inner)
    block = _block(form)
    message = _part(message, block, atoms, width, form.message)
    k = block * form.rows + tl.arange(0, form.rows)
    in_k = k < width
    in_x = in_k[:, None] & (i < form.angle)[None, :]
    for chunk in range(form.chunks):
        c, in_y, to_a, in_a = _columns(chunk, form)
        matrix, rho = _matrix(weight, i, c, form), tl.load(residual + to_a, in_a, 0.0)[None, :]
        in_a, in_z = in_k[:, None] & in_a[None, :], in_k[:, None] & in_y[None, :]
        for atom in range(tl.program_id(0), atoms, tl.num_programs(0)):
            first = atom * tl.full([], width, tl.int64)
            start, end, rest = _range(reach, atom, block, width, form)
            s_k, s_dot_k = (
                tl.load(terms.s + first + k, in_k, 0.0),
                tl.load(dots.s + first + k, in_k, 0.0),
            )
            t = load_tile(terms.t, first + k, c, in_z & (start < end), form.features)
            t_dot = load_tile(dots.t, first + k, c, in_z & (start < end), form.features)
            for j in range(start, end, tl.num_programs(1)):
                slot = first + j
                angle = slot * width + k
                x = load_tile(terms.a, angle, i, in_x, form.angle)
                y, slope, _ = curve(_sum(terms, x, matrix, t, slot, c, form), kind, curve_of)
                x_dot = load_tile(dots.a, angle, i, in_x, form.angle)
                y_dot = slope * _sum(dots, x_dot, matrix, t_dot, slot, c, form)
                s_j, s_dot_j = tl.load(terms.s + slot), tl.load(dots.s + slot)
                m = tl.sum(
                    y_dot * (s_j * s_k)[:, None] + y * (s_dot_j * s_k + s_j * s_dot_k)[:, None], 0
                )
                tl.store(message + slot * form.message + c, m, c < form.message)
                if form.features > form.message:
                    after = carry * load_tile(dots.a, angle, to_a, in_a, form.angle) + rho * y_dot
                    tl.store(updated + angle[:, None] * form.angle + to_a[None, :], after, in_a)
            angles = updated if form.features > form.message else None
            _clear(message, angles, first, rest, width, k, in_x, c, form.message, chunk, form)


@triton.jit
def _cotangent(given, earlier, z_dot, bends, rho, pairs, at, form, moving: tl.constexpr):
    """Return ẑ and z̄ of a tile, and the terms of the gradient of ρ; `bends` are f, f′, f″, `pairs` those of s and ṡ."""
    y, slope, bend = bends[0], bends[1], bends[2]
    slot, angle, c, to_a, in_a = at[0], at[1], at[2], at[3], at[4]
    y_hat = _vector(given[0], slot, c, form) * pairs[0]
    of_rho = tl.zeros_like(y)
    if form.features > form.message:
        now = load_tile(given[1], angle, to_a, in_a, form.angle)
        of_rho += y * now
        y_hat += rho * now
    if moving:
        m_bar = _vector(earlier[0], slot, c, form)
        y_hat += m_bar * pairs[1]
        y_bar = m_bar * pairs[0]
        if form.features > form.message:
            before = load_tile(earlier[1], angle, to_a, in_a, form.angle)
            of_rho += slope * z_dot * before
            y_bar += rho * before
        return slope * y_hat + bend * z_dot * y_bar, slope * y_bar, of_rho
    return slope * y_hat, y_hat, of_rho


@triton.jit
def gradient_kernel(
    out, sums, given, earlier, terms, dots, weight, residual, reach, atoms, width, carry,
    curve_of: tl.constexpr, form, kind: tl.constexpr, moving: tl.constexpr,
) -> None:  # fmt: skip
    """Pass 4: `given` cotangents of m and a′, and the `earlier` ones of pass 2, give `out` and `sums` of W and ρ.

    `out` takes the gradients of a, u and, in parts, t. Unless `moving`, there were no passes 2 and 3.
    """
    i = tl.arange(0, form.inner)
    program = tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)
    block = _block(form)
    of_u = _part(out.u, block, atoms, width, form.features)
    k = block * form.rows + tl.arange(0, form.rows)
    in_k = k < width
    in_x = in_k[:, None] & (i < form.angle)[None, :]
    for chunk in range(form.chunks):
        c, in_y, to_a, has_a = _columns(chunk, form)
        matrix, rho = _matrix(weight, i, c, form), tl.load(residual + to_a, has_a, 0.0)[None, :]
        in_a, in_z = in_k[:, None] & has_a[None, :], in_k[:, None] & in_y[None, :]
        sum_w, sum_rho = tl.zeros_like(matrix), tl.zeros([form.columns], tl.float32)
        for atom in range(tl.program_id(0), atoms, tl.num_programs(0)):
            first = atom * tl.full([], width, tl.int64)
            start, end, rest = _range(reach, atom, block, width, form)
            s_k, s_dot_k = (
                tl.load(terms.s + first + k, in_k, 0.0),
                tl.load(dots.s + first + k, in_k, 0.0),
            )
            t, t_dot = (
                load_tile(terms.t, first + k, c, in_z & (start < end), form.features),
                load_tile(dots.t, first + k, c, in_z & (start < end), form.features),
            )
            sum_t = tl.zeros_like(t)
            for j in range(start, end, tl.num_programs(1)):
                slot = first + j
                angle = slot * width + k
                x = load_tile(terms.a, angle, i, in_x, form.angle)
                bends = curve(_sum(terms, x, matrix, t, slot, c, form), kind, curve_of)
                s_j = tl.load(terms.s + slot)
                moved = (tl.load(dots.s + slot) * s_k + s_j * s_dot_k)[:, None]
                x_dot = load_tile(dots.a, angle, i, in_x, form.angle)
                z_dot = _sum(dots, x_dot, matrix, t_dot, slot, c, form)
                at, pairs = (slot, angle, c, to_a, in_a), ((s_j * s_k)[:, None], moved)
                z_hat, z_bar, of_rho = _cotangent(
                    given, earlier, z_dot, bends, rho, pairs, at, form, moving
                )
                sum_rho += tl.sum(of_rho, 0)
                sum_t += z_hat
                tl.store(of_u + slot * form.features + c, tl.sum(z_hat, 0), in_y)
                sum_w += tl.dot(tl.trans(x), z_hat, input_precision=form.precision)
                if moving:
                    sum_w += tl.dot(tl.trans(x_dot), z_bar, input_precision=form.precision)
                x_hat = tl.dot(z_hat, tl.trans(matrix), input_precision=form.precision)
                if form.features > form.message:
                    x_hat += carry * load_tile(given[1], angle, i, in_x & (chunk == 0), form.angle)
                x_hat += load_tile(out.a, angle, i, in_x & (chunk > 0), form.angle)
                tl.store(out.a + angle[:, None] * form.angle + i[None, :], x_hat, in_x)
            _clear(of_u, out.a, first, rest, width, k, in_x, c, form.features, chunk, form)
            part = ((tl.program_id(1).to(tl.int64) * atoms + atom) * width + k)[:, None]
            tl.store(out.t + part * form.features + c[None, :], sum_t, in_z)
        part = (program * form.blocks + block) * form.angle
        at = (part + i[:, None]) * form.features + c[None, :]
        tl.store(sums[0] + at, sum_w, (i < form.angle)[:, None] & in_y[None, :])
        if form.features > form.message:
            tl.store(sums[1] + part + to_a, sum_rho, has_a)
        tl.debug_barrier()


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
        programs = at_once(weight.device, each)

        def turns(groups: int) -> int:
            """Return how many first neighbours a program takes one after another."""
            sharing = share(atoms, groups, programs)
            return int(triton.cdiv(atoms, sharing) * triton.cdiv(width, groups))

        fewest = min(map(turns, range(1, width + 1)))
        self.groups = next(
            groups for groups in range(1, width + 1) if turns(groups) <= SLACK * fewest
        )
        sizes = (weight.shape[0], message, weight.shape[1])
        rows = min(ROWS, holding(width))
        self.blocks, self.chunks = triton.cdiv(width, rows), triton.cdiv(weight.shape[1], columns)
        self.grid = (share(atoms, self.groups, programs), self.groups, self.blocks)
        tile = (rows, self.blocks, holding(weight.shape[0]), columns, self.chunks)
        self.warps = rows // SMALLEST
        form = Form(*map(tl.constexpr, (*sizes, *tile, precision())))
        given = (weight.contiguous(), residual.contiguous(), reach)
        self.layer = (*given, atoms, width, carry, tuple(curve_of), form, kind)


def update(terms: Tensors, *layer: Any) -> Tensors:
    """Pass 1; return m and a′."""
    launch = Launch(terms, *layer, columns=UPDATE_COLUMNS, each=UPDATE_EACH)
    message, updated = _parts(launch, terms, *layer)
    update_kernel[launch.grid](
        message, updated, _dense(terms), *launch.layer, num_warps=launch.warps
    )
    return add_parts(message)[0], updated


def adjoint(
    message_bar: torch.Tensor, updated_bar: torch.Tensor, terms: Tensors, *layer: Any
) -> Tensors:
    """Pass 2; return the adjoints of a, u, t, s."""
    launch = Launch(terms, *layer)
    a, u, t, s = terms
    of_s = s.new_empty(launch.chunks * (launch.blocks + launch.groups), *s.shape)
    of_first, of_second = of_s.split([launch.chunks * launch.blocks, launch.chunks * launch.groups])
    of_u, of_t = (x.new_empty(n, *x.shape) for x, n in ((u, launch.blocks), (t, launch.groups)))
    out = Terms(a.new_empty(a.shape), of_u, of_t, of_first)
    adjoint_kernel[launch.grid](
        out,
        of_second,
        message_bar,
        updated_bar,
        _dense(terms),
        *launch.layer,
        num_warps=launch.warps,
    )
    return out.a, *add_parts(out.u, out.t, of_s)


def tangent(terms: Tensors, dots: Tensors, *layer: Any) -> Tensors:
    """Pass 3; return the tangents of m and a′, which are the cotangents of their adjoints."""
    launch = Launch(terms, *layer)
    message, updated = _parts(launch, terms, *layer)
    tangent_kernel[launch.grid](
        message, updated, _dense(terms), _dense(dots), *launch.layer, num_warps=launch.warps
    )
    return add_parts(message)[0], updated


def gradient(
    given: Tensors, earlier: Tensors, terms: Tensors, dots: Tensors, *layer: Any
) -> Tensors:
    """Pass 4; return the gradients of a, u, t, W, ρ.

    `given` are the cotangents of m and a′; `earlier` those of pass 2, and `dots`, are empty when there was none.
    """
    launch = Launch(terms, *layer)
    a, u, t, _ = terms
    weight, residual = layer[:2]
    of_u, of_t = (x.new_empty(n, *x.shape) for x, n in ((u, launch.blocks), (t, launch.groups)))
    out = Terms(a.new_empty(a.shape), of_u, of_t, None)
    sums = (
        weight.new_empty(*launch.grid, *weight.shape),
        residual.new_empty(*launch.grid, *residual.shape),
    )
    moving = len(dots) > 0
    gradient_kernel[launch.grid](
        Terms(*out[:3], out.a), sums, tuple(given), tuple(earlier if moving else given), _dense(terms),
        _dense(dots if moving else terms), *launch.layer,
        moving=moving, num_warps=launch.warps, num_stages=1,
    )  # fmt: skip
    return out.a, *add_parts(out.u, out.t, *(x.flatten(0, 2) for x in sums))


def _dense(terms: Tensors) -> Terms:
    return Terms(*(x.contiguous() for x in terms))


def _parts(launch: Launch, terms: Tensors, *layer: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Allocate m, one part per block, and a′."""
    message, updated = outputs(terms, *layer)
    return message.new_empty(launch.blocks, *message.shape), updated


def outputs(terms: Tensors, *layer: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Allocate m and a′."""
    (a, u), weight, message = terms[:2], layer[0], layer[4]
    return u.new_empty(u.shape[0], message), a.new_empty(a.shape) if weight.shape[
        1
    ] > message else a.new_empty(0)
