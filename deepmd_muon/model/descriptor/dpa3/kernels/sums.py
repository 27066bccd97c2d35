"""Triton kernels of the update of a layer's edges, which `edge_sums` defines, and of the sums of other kernels' parts.

Every sum is taken in the same order every time.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from deepmd_muon.model.nn.activation_kernels import curve

FEW = 32  # parts that a program adds one by one
BLOCK = 512  # elements of a program that adds few parts
ROWS, COLUMNS = 64, 32  # of the tile of a program that adds many parts
NEIGHBOR_ROWS, NEIGHBOR_COLUMNS = 32, 64  # of one that adds rows for an atom


@triton.jit
def few_kernel(outs, parts, sizes, counts, block: tl.constexpr) -> None:
    """Add up the parts of several tensors, `counts` of each, known when it is compiled."""
    program = tl.program_id(0)
    for number in tl.static_range(len(outs)):
        size = sizes[number]
        if (program >= 0) & (program * block < size):
            at = program * block + tl.arange(0, block)
            real = at < size
            total = tl.load(parts[number] + at, real, 0.0)
            for part in tl.static_range(1, counts[number]):
                total += tl.load(parts[number] + tl.full([], size, tl.int64) * part + at, real, 0.0)
            tl.store(outs[number] + at, total, real)
        program -= tl.cdiv(size, block)


@triton.jit
def many_kernel(outs, parts, sizes, counts, rows: tl.constexpr, columns: tl.constexpr) -> None:
    """Add up the parts of several tensors, many of each."""
    program, r = tl.program_id(0), tl.arange(0, rows)
    for number in tl.static_range(len(outs)):
        size, count = sizes[number], counts[number]
        if (program >= 0) & (program * columns < size):
            at = program * columns + tl.arange(0, columns)
            total = tl.zeros([rows, columns], outs[number].dtype.element_ty)
            for first in range(0, count, rows):
                part = first + r
                real = (part < count)[:, None] & (at < size)[None, :]
                total += tl.load(parts[number] + part[:, None].to(tl.int64) * size + at[None, :], real, 0.0)
            tl.store(outs[number] + at, tl.sum(total, 0), at < size)
        program -= tl.cdiv(size, columns)


def add_parts(*parts: torch.Tensor) -> list[torch.Tensor]:
    """Return the sums of dense tensors over their first axis."""
    outs = [x[0] if len(x) == 1 else x.new_empty(x.shape[1:]) for x in parts]
    work = [(out, x) for out, x in zip(outs, parts, strict=True) if len(x) > 1 and out.numel()]
    few, many = ([(out, x) for out, x in work if (len(x) <= FEW) == is_few] for is_few in (True, False))
    for pairs, kernel, width in ((few, few_kernel, BLOCK), (many, many_kernel, COLUMNS)):
        if pairs:
            totals, given = zip(*pairs, strict=True)
            sizes, counts = tuple(out.numel() for out in totals), tuple(len(x) for x in given)
            grid = (sum(triton.cdiv(size, width) for size in sizes),)
            if kernel is few_kernel:
                few_kernel[grid](totals, given, sizes, tuple(map(tl.constexpr, counts)), block=BLOCK)
            else:
                many_kernel[grid](totals, given, sizes, counts, rows=ROWS, columns=COLUMNS)
    return outs


@triton.jit
def neighbor_kernel(out, values, order, start, width, rows: tl.constexpr, columns: tl.constexpr) -> None:
    """Add up the rows of `values` that belong to an atom: those that `order` lists from its `start` on."""
    atom = tl.program_id(0)
    c, r = tl.program_id(1) * columns + tl.arange(0, columns), tl.arange(0, rows)
    total = tl.zeros([rows, columns], out.dtype.element_ty)
    end = tl.load(start + atom + 1)
    for first in range(tl.load(start + atom), end, rows):
        real = first + r < end
        row = tl.load(order + first + r, real, 0)
        total += tl.load(values + row[:, None] * width + c[None, :], real[:, None] & (c < width)[None, :], 0.0)
    tl.store(out + atom * width + c, tl.sum(total, 0), c < width)


def add_to_neighbors(values: torch.Tensor, order: torch.Tensor, start: torch.Tensor) -> torch.Tensor:
    """Return, for each atom, the sum of the rows of `values` that belong to it.

    Parameters
    ----------
    values
        One row for each edge `(edges, width)`.
    order
        The edges, sorted by neighbour `(edges,)`, int64.
    start
        Where each atom's edges start in `order`, and the end `(atoms + 1,)`, int64.
    """
    atoms, width = len(start) - 1, values.shape[1]
    out = values.new_empty(atoms, width)
    grid = (atoms, triton.cdiv(width, NEIGHBOR_COLUMNS))
    neighbor_kernel[grid](out, values, order, start, width, rows=NEIGHBOR_ROWS, columns=NEIGHBOR_COLUMNS)
    return out


ELEMENTS = 2048  # of a program's tile


@triton.jit
def _tile(h, rest, sizes, rows: tl.constexpr, columns: tl.constexpr):
    """Return places of a tile, which are present, those in h, which have one, the columns, and h or else `rest`."""
    count, width, slots, near = sizes[0], sizes[1], sizes[2], sizes[3]
    row, c = tl.program_id(0).to(tl.int64) * rows + tl.arange(0, rows), tl.arange(0, columns)
    in_c, k = c < width, row % slots
    real, has_h = (row < count)[:, None] & in_c[None, :], ((row < count) & (k < near))[:, None] & in_c[None, :]
    at = row[:, None] * width + c[None, :]
    at_h = ((row // slots) * near + k)[:, None] * width + c[None, :]
    other = tl.load(rest + c, in_c, 0.0)[None, :]
    return at, real, at_h, has_h, c, tl.where((k < near)[:, None], tl.load(h + at_h, has_h, 0.0), other)


@triton.jit
def _weights(rho, c, width):
    return tl.load(rho[0] + c, c < width, 0.0)[None, :], tl.load(rho[1] + c, c < width, 0.0)[None, :]


@triton.jit
def value_kernel(
    out, e, u, h, rest, rho, sizes,
    carry: tl.constexpr, curve_of: tl.constexpr, kind: tl.constexpr, rows: tl.constexpr, columns: tl.constexpr,
) -> None:  # fmt: skip
    """Store α·e + ρ₀∘u + ρ₁∘f(h)."""
    at, real, _, _, c, inside = _tile(h, rest, sizes, rows, columns)
    of_u, of_h = _weights(rho, c, sizes[1])
    total = carry * tl.load(e + at, real, 0.0) + of_u * tl.load(u + at, real, 0.0)
    tl.store(out + at, total + of_h * curve(inside, kind, curve_of)[0], real)


@triton.jit
def adjoint_kernel(
    u_bar, h_bar, y_bar, h, rest, rho, sizes,
    curve_of: tl.constexpr, kind: tl.constexpr, rows: tl.constexpr, columns: tl.constexpr,
) -> None:  # fmt: skip
    """Store ρ₀∘ȳ and ρ₁∘f′(h)·ȳ."""
    at, real, at_h, has_h, c, inside = _tile(h, rest, sizes, rows, columns)
    of_u, of_h = _weights(rho, c, sizes[1])
    y = tl.load(y_bar + at, real, 0.0)
    tl.store(u_bar + at, of_u * y, real)
    tl.store(h_bar + at_h, of_h * curve(inside, kind, curve_of)[1] * y, has_h)


@triton.jit
def tangent_kernel(
    out, e_dot, u_dot, h_dot, h, rest, rho, sizes,
    carry: tl.constexpr, curve_of: tl.constexpr, kind: tl.constexpr, rows: tl.constexpr, columns: tl.constexpr,
) -> None:  # fmt: skip
    """Store the tangent of what `value_kernel` stores; `rest` has none."""
    at, real, at_h, has_h, c, inside = _tile(h, rest, sizes, rows, columns)
    of_u, of_h = _weights(rho, c, sizes[1])
    total = carry * tl.load(e_dot + at, real, 0.0) + of_u * tl.load(u_dot + at, real, 0.0)
    moved = tl.load(h_dot + at_h, has_h, 0.0)
    tl.store(out + at, total + of_h * curve(inside, kind, curve_of)[1] * moved, real)


@triton.jit
def gradient_kernel(
    u_hat, h_hat, sums, y_hat, u, h, rest, rho, earlier, sizes,
    curve_of: tl.constexpr, kind: tl.constexpr, moving: tl.constexpr, rows: tl.constexpr, columns: tl.constexpr,
) -> None:  # fmt: skip
    """Store û and ĥ, and each program's sums over rows: of ĥ or what `rest` gets, and of the terms of both ρ.

    `earlier` holds ȳ, u̇ and ḣ where `moving`.
    """
    at, real, at_h, has_h, c, inside = _tile(h, rest, sizes, rows, columns)
    of_u, of_h = _weights(rho, c, sizes[1])
    value, slope, bend = curve(inside, kind, curve_of)
    y = tl.load(y_hat + at, real, 0.0)
    tl.store(u_hat + at, of_u * y, real)
    to_u, to_h, inner = tl.load(u + at, real, 0.0) * y, value * y, slope * y
    if moving:
        y_bar = tl.load(earlier[0] + at, real, 0.0)
        to_u += tl.load(earlier[1] + at, real, 0.0) * y_bar
        moved = tl.load(earlier[2] + at_h, has_h, 0.0) * y_bar
        to_h += slope * moved
        inner += bend * moved
    inner *= of_h
    tl.store(h_hat + at_h, inner, has_h)
    width = sizes[1]
    here = sums + tl.program_id(0) * 3 * width + c
    tl.store(here, tl.sum(inner, 0), c < width)
    tl.store(here + width, tl.sum(to_u, 0), c < width)
    tl.store(here + 2 * width, tl.sum(to_h, 0), c < width)


class Edges:
    """Launches on the edges of a layer.

    Parameters
    ----------
    h, rest
        h of the first edges of each atom `(atoms·near, width)`, and of the others `(width,)`.
    rho
        ρ₀ and ρ₁.
    slots, near
        Edges of an atom, and those that have an h of their own.
    carry
        α.
    kind, curve_of
        Members of an `activation.Formula`.
    """

    def __init__(
        self,
        h: torch.Tensor,
        rest: torch.Tensor,
        rho: Sequence[torch.Tensor],
        slots: int,
        near: int,
        carry: float,
        kind: str,
        curve_of: Sequence[float],
    ) -> None:
        width = h.shape[1]
        columns = triton.next_power_of_2(width)
        rows = max(1, ELEMENTS // columns)
        count = len(h) // near * slots
        self._given = (h, rest, tuple(rho))
        self._sizes, self._carry = (count, width, slots, near), carry
        # numbers known at compile time keep double precision
        known = tuple(curve_of)
        self._form = {"curve_of": known, "kind": kind, "rows": rows, "columns": columns}
        self._grid = (triton.cdiv(count, rows),)

    def value(self, e: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
        """Return α·e + ρ₀∘u + ρ₁∘f(h)."""
        out = torch.empty_like(e)
        value_kernel[self._grid](out, e, u, *self._given, self._sizes, self._carry, **self._form)
        return out

    def adjoint(self, y_bar: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the adjoints of u and h."""
        u_bar, h_bar = torch.empty_like(y_bar), torch.empty_like(self._given[0])
        adjoint_kernel[self._grid](u_bar, h_bar, y_bar, *self._given, self._sizes, **self._form)
        return u_bar, h_bar

    def tangent(self, e_dot: torch.Tensor, u_dot: torch.Tensor, h_dot: torch.Tensor) -> torch.Tensor:
        """Return the tangent of `value`."""
        out = torch.empty_like(e_dot)
        given = (e_dot, u_dot, h_dot, *self._given)
        tangent_kernel[self._grid](out, *given, self._sizes, self._carry, **self._form)
        return out

    def gradient(
        self, y_hat: torch.Tensor, u: torch.Tensor, earlier: Sequence[torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return û, ĥ, and sums: of ĥ with what `rest` gets, and the gradients of both ρ.

        `earlier` holds ȳ, u̇ and ḣ, or nothing.
        """
        h = self._given[0]
        u_hat, h_hat = torch.empty_like(y_hat), torch.empty_like(h)
        sums, moving = h.new_empty(*self._grid, 3, h.shape[1]), len(earlier) > 0
        given = tuple(earlier) if moving else (y_hat, y_hat, h)
        gradient_kernel[self._grid](
            u_hat, h_hat, sums, y_hat, u, *self._given, given, self._sizes, **self._form, moving=moving
        )
        return u_hat, h_hat, add_parts(sums)[0]
