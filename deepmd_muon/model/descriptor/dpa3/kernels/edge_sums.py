"""The update of a DPA-3 layer's edges on a GPU: a few kernels in place of autograd's many.

From edge features e, their update u (see `edges`) and the messages m of the angles to the first edges of each atom
(see `angles`), with h = m·W + b, and h = b for the other edges,

    e′ = α·e + ρ₀∘u + ρ₁∘f(h).

`layer` defines the result by torch's operations.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from deepmd_muon.model.descriptor.dpa3.kernels.shared import add_parts
from deepmd_muon.model.nn.activation import Activation
from deepmd_muon.model.nn.four_passes import FourPasses, Perhaps, Tensors
from deepmd_muon.model.nn.layer_kernels import curve

ELEMENTS = 2048  # of a program's tile


@triton.jit
def _tile(h, rest, sizes, rows: tl.constexpr, columns: tl.constexpr):
    """Return places of a tile, which are present, those in h, which have one, the columns, and h or else `rest`."""
    count, width, slots, near = sizes[0], sizes[1], sizes[2], sizes[3]
    row, c = tl.program_id(0).to(tl.int64) * rows + tl.arange(0, rows), tl.arange(0, columns)
    in_c, k = c < width, row % slots
    real, has_h = (
        (row < count)[:, None] & in_c[None, :],
        ((row < count) & (k < near))[:, None] & in_c[None, :],
    )
    at = row[:, None] * width + c[None, :]
    at_h = ((row // slots) * near + k)[:, None] * width + c[None, :]
    other = tl.load(rest + c, in_c, 0.0)[None, :]
    return (
        at,
        real,
        at_h,
        has_h,
        c,
        tl.where((k < near)[:, None], tl.load(h + at_h, has_h, 0.0), other),
    )


@triton.jit
def _weights(rho, c, width):
    return tl.load(rho[0] + c, c < width, 0.0)[None, :], tl.load(rho[1] + c, c < width, 0.0)[
        None, :
    ]


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


@dataclass(frozen=True)
class EdgeSum(FourPasses):
    """The operation of one layer.

    Inputs: e and u `(atoms, slots, width)`, m `(atoms·near, width)`, W, b, ρ₀ and ρ₁. Output: e′. Kept: h.

    Attributes
    ----------
    activation
        f.
    carry
        α.
    near
        Edges of an atom that have messages.
    """

    activation: Activation
    carry: float
    near: int

    def value(self, given: Any) -> tuple[Perhaps, Perhaps]:
        """See `FourPasses`."""
        e, u, m, weight, bias, *rho = given
        h, out = torch.addmm(bias, m, weight), torch.empty_like(e)
        grid, sizes, form = self._launch(h, e.shape[1])
        value_kernel[grid](
            out, e.contiguous(), u.contiguous(), h, bias, tuple(rho), sizes, self.carry, **form
        )
        return (out,), (h,)

    def adjoint(self, cotangents: Any, given: Any, kept: Any) -> tuple[Tensors, Perhaps]:
        """Return the adjoints of e, u and m."""
        (y_bar,), (_, _, _, weight, bias, *rho), (h,) = cotangents, given, kept
        u_bar, h_bar = torch.empty_like(y_bar), torch.empty_like(h)
        grid, sizes, form = self._launch(h, y_bar.shape[1])
        adjoint_kernel[grid](u_bar, h_bar, y_bar, h, bias, tuple(rho), sizes, **form)
        return (y_bar * self.carry, u_bar, torch.mm(h_bar, weight.t())), (
            y_bar,
            h_bar,
            h,
            weight,
            bias,
            *rho,
        )

    def tangent(self, tangents: Any, left: Any) -> tuple[Perhaps, Perhaps]:
        """Return the derivative of e′; and u̇, ṁ and that of h."""
        (e_dot, u_dot, m_dot), (_, _, h, weight, bias, *rho) = tangents, left
        h_dot, out = torch.mm(m_dot, weight), torch.empty_like(e_dot)
        grid, sizes, form = self._launch(h, e_dot.shape[1])
        tangent_kernel[grid](
            out, e_dot, u_dot, h_dot, h, bias, tuple(rho), sizes, self.carry, **form
        )
        return (out,), (u_dot, m_dot, h_dot)

    def gradient(self, cotangents: Any, given: Any, kept: Any, left: Any, moved: Any) -> Perhaps:
        """See `FourPasses`."""
        (y,), (_, u, m, weight, bias, *rho), (h,) = cotangents, given, kept
        grid, sizes, form = self._launch(h, y.shape[1])
        u_hat, h_hat = torch.empty_like(y), torch.empty_like(h)
        parts, moving = h.new_empty(*grid, 3, h.shape[1]), moved is not None
        earlier = (left[0], moved[0], moved[2]) if moving else (y, y, h)
        terms = y, u.contiguous(), h, bias, tuple(rho), earlier
        gradient_kernel[grid](u_hat, h_hat, parts, *terms, sizes, **form, moving=moving)
        (sums,) = add_parts(
            parts
        )  # of ĥ with what the other edges' h gets, and the gradients of both ρ
        weight_hat = torch.mm(m.t(), h_hat)
        if moving:
            weight_hat.addmm_(moved[1].t(), left[1])
        e_hat = y if self.carry == 1.0 else y * self.carry
        return e_hat, u_hat, torch.mm(h_hat, weight.t()), weight_hat, *sums

    def _launch(
        self, h: torch.Tensor, slots: int
    ) -> tuple[tuple[int], tuple[int, ...], dict[str, Any]]:
        """Return grid, sizes, and what is known when a kernel is compiled, for so many `slots` an atom."""
        assert self.activation.formula is not None
        columns = triton.next_power_of_2(h.shape[1])
        rows = max(1, ELEMENTS // columns)
        count = len(h) // self.near * slots
        sizes = count, h.shape[1], slots, self.near
        return (
            (triton.cdiv(count, rows),),
            sizes,
            {**self.activation.formula.constants, "rows": rows, "columns": columns},
        )
