"""Triton kernels of the update of a layer's edges; `edge_sums` defines their results."""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, misc, untyped-decorator"
# ruff: noqa: ANN001, ANN202
# Reason for both: Triton compiles these functions. Their arguments are of its own language, not of Python's, and a
# branch that is decided at compile time must be a statement.

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from deepmd_muon.model.activation_kernels import curve
from deepmd_muon.model.descriptor.dpa3.sum_kernels import add_parts

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
    out,
    e,
    u,
    h,
    rest,
    rho,
    sizes,
    carry: tl.constexpr,
    curve_of: tl.constexpr,
    kind: tl.constexpr,
    rows: tl.constexpr,
    columns: tl.constexpr,
) -> None:
    """Store α·e + ρ₀∘u + ρ₁∘f(h)."""
    at, real, _, _, c, inside = _tile(h, rest, sizes, rows, columns)
    of_u, of_h = _weights(rho, c, sizes[1])
    total = carry * tl.load(e + at, real, 0.0) + of_u * tl.load(u + at, real, 0.0)
    tl.store(out + at, total + of_h * curve(inside, kind, curve_of)[0], real)


@triton.jit
def adjoint_kernel(
    u_bar,
    h_bar,
    y_bar,
    h,
    rest,
    rho,
    sizes,
    curve_of: tl.constexpr,
    kind: tl.constexpr,
    rows: tl.constexpr,
    columns: tl.constexpr,
) -> None:
    """Store ρ₀∘ȳ and ρ₁∘f′(h)·ȳ."""
    at, real, at_h, has_h, c, inside = _tile(h, rest, sizes, rows, columns)
    of_u, of_h = _weights(rho, c, sizes[1])
    y = tl.load(y_bar + at, real, 0.0)
    tl.store(u_bar + at, of_u * y, real)
    tl.store(h_bar + at_h, of_h * curve(inside, kind, curve_of)[1] * y, has_h)


@triton.jit
def tangent_kernel(
    out,
    e_dot,
    u_dot,
    h_dot,
    h,
    rest,
    rho,
    sizes,
    carry: tl.constexpr,
    curve_of: tl.constexpr,
    kind: tl.constexpr,
    rows: tl.constexpr,
    columns: tl.constexpr,
) -> None:
    """Store the tangent of what `value_kernel` stores; `rest` has none."""
    at, real, at_h, has_h, c, inside = _tile(h, rest, sizes, rows, columns)
    of_u, of_h = _weights(rho, c, sizes[1])
    total = carry * tl.load(e_dot + at, real, 0.0) + of_u * tl.load(u_dot + at, real, 0.0)
    moved = tl.load(h_dot + at_h, has_h, 0.0)
    tl.store(out + at, total + of_h * curve(inside, kind, curve_of)[1] * moved, real)


@triton.jit
def gradient_kernel(
    u_hat,
    h_hat,
    sums,
    y_hat,
    u,
    h,
    rest,
    rho,
    earlier,
    sizes,
    curve_of: tl.constexpr,
    kind: tl.constexpr,
    moving: tl.constexpr,
    rows: tl.constexpr,
    columns: tl.constexpr,
) -> None:
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
