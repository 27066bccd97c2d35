"""The node part of a DPA-3 layer on a GPU: a few kernels in place of autograd's many.

From node features x, the message m of the edges and their moments H (see `edges`),

    G_ad = Σ_c H_ca·H_cd/3,   h₀ = x·W₀ + b₀,   h₁ = G·W₁ + b₁,   x′ = α·x + ρ₀∘f(h₀) + ρ₁∘f(h₁) + ρ₂∘m,

G of H's columns from edges and from nodes apart. Further terms ρ₃∘v, … are treated as ρ₂∘m.
`layer` defines the result by torch's operations.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from deepmd_muon.model.nn.activation import Activation
from deepmd_muon.model.nn.activation_kernels import curve
from deepmd_muon.model.nn.four_passes import FourPasses, Perhaps, Tensors

BLOCK = 256


@triton.jit
def _place(count, width, block: tl.constexpr):
    """Return the elements of a program, which are present, and their columns."""
    at = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    return at, at < count, at % width


@triton.jit
def value_kernel(
    out, x, plain, h, rho, count, width,
    carry: tl.constexpr, curve_of: tl.constexpr, kind: tl.constexpr, block: tl.constexpr,
) -> None:  # fmt: skip
    """Store α·x + ρ₀∘f(h₀) + ρ₁∘f(h₁) and ρ∘m of each plain term m."""
    at, real, column = _place(count, width, block)
    total = carry * tl.load(x + at, real, 0.0)
    for number in tl.static_range(len(plain)):
        total += tl.load(rho[2 + number] + column, real, 0.0) * tl.load(
            plain[number] + at, real, 0.0
        )
    for number in tl.static_range(2):
        total += (
            tl.load(rho[number] + column, real, 0.0)
            * curve(tl.load(h[number] + at, real, 0.0), kind, curve_of)[0]
        )
    tl.store(out + at, total, real)


@triton.jit
def adjoint_kernel(
    h_bar,
    plain_bar,
    y_bar,
    h,
    rho,
    count,
    width,
    curve_of: tl.constexpr,
    kind: tl.constexpr,
    block: tl.constexpr,
) -> None:
    """Store ρ∘f′(h)·ȳ for both h, and ρ∘ȳ for plain terms."""
    at, real, column = _place(count, width, block)
    y = tl.load(y_bar + at, real, 0.0)
    for number in tl.static_range(len(plain_bar)):
        tl.store(plain_bar[number] + at, tl.load(rho[2 + number] + column, real, 0.0) * y, real)
    for number in tl.static_range(2):
        slope = curve(tl.load(h[number] + at, real, 0.0), kind, curve_of)[1]
        tl.store(h_bar[number] + at, tl.load(rho[number] + column, real, 0.0) * slope * y, real)


@triton.jit
def tangent_kernel(
    out, x_dot, plain_dot, h_dot, h, rho, count, width,
    carry: tl.constexpr, curve_of: tl.constexpr, kind: tl.constexpr, block: tl.constexpr,
) -> None:  # fmt: skip
    """Store the tangent of what `value_kernel` stores."""
    at, real, column = _place(count, width, block)
    total = carry * tl.load(x_dot + at, real, 0.0)
    for number in tl.static_range(len(plain_dot)):
        total += tl.load(rho[2 + number] + column, real, 0.0) * tl.load(
            plain_dot[number] + at, real, 0.0
        )
    for number in tl.static_range(2):
        slope = curve(tl.load(h[number] + at, real, 0.0), kind, curve_of)[1]
        total += (
            tl.load(rho[number] + column, real, 0.0)
            * slope
            * tl.load(h_dot[number] + at, real, 0.0)
        )
    tl.store(out + at, total, real)


@triton.jit
def gradient_kernel(
    out, plain_hat, y_hat, plain, h, earlier, rho, count, width,
    curve_of: tl.constexpr, kind: tl.constexpr, moving: tl.constexpr, block: tl.constexpr,
) -> None:  # fmt: skip
    """Store ĥ of both h, the terms of the gradients of every ρ, and the gradients of plain terms.

    `earlier` holds ȳ, both ḣ and the tangents of plain terms where `moving`.
    """
    at, real, column = _place(count, width, block)
    y = tl.load(y_hat + at, real, 0.0)
    if moving:
        y_bar = tl.load(earlier[0] + at, real, 0.0)
    for number in tl.static_range(len(plain)):
        tl.store(plain_hat[number] + at, tl.load(rho[2 + number] + column, real, 0.0) * y, real)
        of_rho = tl.load(plain[number] + at, real, 0.0) * y
        if moving:
            of_rho += tl.load(earlier[3 + number] + at, real, 0.0) * y_bar
        tl.store(out + (4 + number) * count + at, of_rho, real)
    for number in tl.static_range(2):
        value, slope, bend = curve(tl.load(h[number] + at, real, 0.0), kind, curve_of)
        of_h, of_rho = slope * y, value * y
        if moving:
            moved = tl.load(earlier[1 + number] + at, real, 0.0) * y_bar
            of_h += bend * moved
            of_rho += slope * moved
        tl.store(out + number * count + at, tl.load(rho[number] + column, real, 0.0) * of_h, real)
        tl.store(out + (2 + number) * count + at, of_rho, real)


@triton.jit
def _part(part: tl.constexpr, edge: tl.constexpr, node: tl.constexpr, wide: tl.constexpr):
    """Return the first column of a part of H, how many it has, their numbers, and which are present."""
    d = tl.arange(0, wide)
    if part == 0:
        return 0, edge, d, d < edge
    return edge, node, edge + d, d < node


@triton.jit
def symmetric_kernel(
    out, moment, moment_dot,
    moving: tl.constexpr, axis: tl.constexpr, edge: tl.constexpr, node: tl.constexpr, tall: tl.constexpr,
    wide: tl.constexpr,
) -> None:  # fmt: skip
    """Store Σ_c H_ca·H_cd/3 of each part of an atom's H, or where `moving` the tangent."""
    width: tl.constexpr = edge + node
    atom, a = tl.program_id(0).to(tl.int64), tl.arange(0, tall)
    for part in tl.static_range(2):
        first, columns, d, in_d = _part(part, edge, node, wide)
        total = tl.zeros([tall, wide], moment.dtype.element_ty)
        for axis_of_space in tl.static_range(3):
            row = (atom * 3 + axis_of_space) * width
            left, right = (
                tl.load(moment + row + first + a, a < axis, 0.0),
                tl.load(moment + row + d, in_d, 0.0),
            )
            if moving:
                left_dot = tl.load(moment_dot + row + first + a, a < axis, 0.0)
                right_dot = tl.load(moment_dot + row + d, in_d, 0.0)
                total += left_dot[:, None] * right[None, :] + left[:, None] * right_dot[None, :]
            else:
                total += left[:, None] * right[None, :]
        at = atom * axis * width + axis * first + a[:, None] * columns + (d - first)[None, :]
        tl.store(out + at, total / 3.0, (a < axis)[:, None] & in_d[None, :])


@triton.jit
def pull_kernel(
    out, moments, bars,
    axis: tl.constexpr, edge: tl.constexpr, node: tl.constexpr, tall: tl.constexpr, wide: tl.constexpr,
) -> None:  # fmt: skip
    """Store the adjoint of an atom's H from that of what `symmetric_kernel` stores; add up those of several pairs."""
    width: tl.constexpr = edge + node
    atom, a = tl.program_id(0).to(tl.int64), tl.arange(0, tall)
    for part in tl.static_range(2):
        first, columns, d, in_d = _part(part, edge, node, wide)
        at = atom * axis * width + axis * first + a[:, None] * columns + (d - first)[None, :]
        same = a[:, None] == (d - first)[None, :]
        for axis_of_space in tl.static_range(3):
            row = (atom * 3 + axis_of_space) * width
            total = tl.zeros([wide], out.dtype.element_ty)
            for number in tl.static_range(len(moments)):
                bar = tl.load(bars[number] + at, (a < axis)[:, None] & in_d[None, :], 0.0)
                left = tl.load(moments[number] + row + first + a, a < axis, 0.0)
                right = tl.load(moments[number] + row + d, in_d, 0.0)
                across = tl.sum(bar * right[None, :], 1)
                total += tl.sum(left[:, None] * bar + tl.where(same, across[:, None], 0.0), 0)
            tl.store(out + row + d, total / 3.0, in_d)


@dataclass(frozen=True)
class Nodes(FourPasses):
    """The operation of one layer.

    Inputs: x `(atoms, n)`, H `(atoms, 3, columns)`, m and further terms `(atoms, n)`, W₀, b₀, W₁, b₁, and all ρ.
    Output: x′. Kept: G, h₀, h₁.

    Attributes
    ----------
    activation
        f.
    carry
        α.
    axis, edge
        Columns a of G, and columns of H that come from edges.
    """

    activation: Activation
    carry: float
    axis: int
    edge: int

    def value(self, given: Any) -> tuple[Perhaps, Perhaps]:
        """See `FourPasses`."""
        x, moment, plain, (w_0, b_0, w_1, b_1), rho = _sorted(given)
        squares, out = self._squares(moment), torch.empty_like(x)
        h = torch.addmm(b_0, x, w_0), torch.addmm(b_1, squares, w_1)
        grid, form = self._rows(x)
        value_kernel[grid](out, x, plain, h, rho, x.numel(), x.shape[1], self.carry, **form)
        return (out,), (squares, *h)

    def adjoint(self, cotangents: Any, given: Any, kept: Any) -> tuple[Tensors, Perhaps]:
        """Return the adjoints of x, H, m and further terms."""
        (y_bar,), (_, moment, plain, (w_0, _, w_1, _), rho), (_, *h) = (
            cotangents,
            _sorted(given),
            kept,
        )
        h_bar, plain_bar = (
            y_bar.new_empty(2, *y_bar.shape),
            tuple(torch.empty_like(y_bar) for _ in plain),
        )
        grid, form = self._rows(y_bar)
        adjoint_kernel[grid](
            tuple(h_bar), plain_bar, y_bar, tuple(h), rho, y_bar.numel(), y_bar.shape[1], **form
        )
        squares_bar = torch.mm(h_bar[1], w_1.t())
        x_bar = torch.addmm(y_bar, h_bar[0], w_0.t(), beta=self.carry)
        left = y_bar, *h_bar, squares_bar, *h, moment, w_0, w_1, *rho
        return (x_bar, self._pull((moment, squares_bar)), *plain_bar), left

    def tangent(self, tangents: Any, left: Any) -> tuple[Perhaps, Perhaps]:
        """Return the derivative of x′; and those of both h and of G, ẋ, Ḣ, ṁ, …."""
        (x_dot, moment_dot, *plain_dot), (_, _, _, _, h_0, h_1, moment, w_0, w_1, *rho) = (
            tangents,
            left,
        )
        squares_dot, out = self._squares(moment, moment_dot), torch.empty_like(x_dot)
        h_dot = torch.mm(x_dot, w_0), torch.mm(squares_dot, w_1)
        grid, form = self._rows(x_dot)
        terms = tuple(plain_dot), h_dot, (h_0, h_1), tuple(rho)
        tangent_kernel[grid](out, x_dot, *terms, x_dot.numel(), x_dot.shape[1], self.carry, **form)
        return (out,), (*h_dot, squares_dot, *tangents)

    def gradient(self, cotangents: Any, given: Any, kept: Any, left: Any, moved: Any) -> Perhaps:
        """See `FourPasses`."""
        (y,), (x, moment, plain, (w_0, _, w_1, _), rho), (squares, *h) = (
            cotangents,
            _sorted(given),
            kept,
        )
        terms, plain_hat = (
            y.new_empty(4 + len(plain), *y.shape),
            tuple(map(torch.empty_like, plain)),
        )
        moving = moved is not None
        earlier = (left[0], *moved[:2], *moved[5:]) if moving else (y,) * (3 + len(plain))
        grid, form = self._rows(y)
        given_terms = y, plain, tuple(h), earlier, rho
        gradient_kernel[grid](
            terms, plain_hat, *given_terms, y.numel(), y.shape[1], **form, moving=moving
        )
        (h_0_hat, h_1_hat), sums = terms[:2], terms.sum(1)
        squares_hat = torch.mm(h_1_hat, w_1.t())
        w_0_hat, w_1_hat = torch.mm(x.t(), h_0_hat), torch.mm(squares.t(), h_1_hat)
        pairs = [(moment, squares_hat)]
        if moving:
            _, _, squares_dot, x_dot, moment_dot, *_ = moved
            _, h_0_bar, h_1_bar, squares_bar, *_ = left
            w_0_hat.addmm_(x_dot.t(), h_0_bar)
            w_1_hat.addmm_(squares_dot.t(), h_1_bar)
            pairs.append((moment_dot, squares_bar))
        x_hat = torch.addmm(y, h_0_hat, w_0.t(), beta=self.carry)
        return x_hat, self._pull(*pairs), *plain_hat, w_0_hat, sums[0], w_1_hat, sums[1], *sums[2:]

    def _rows(self, x: torch.Tensor) -> tuple[tuple[int], dict[str, Any]]:
        """Return the grid of a kernel on matrices like x, and what is known when it is compiled."""
        assert self.activation.formula is not None
        return (triton.cdiv(x.numel(), BLOCK),), {
            **self.activation.formula.constants,
            "block": BLOCK,
        }

    def _sizes(self, moment: torch.Tensor) -> dict[str, int]:
        node = moment.shape[2] - self.edge
        tall, wide = triton.next_power_of_2(self.axis), triton.next_power_of_2(max(self.edge, node))
        return {"axis": self.axis, "edge": self.edge, "node": node, "tall": tall, "wide": wide}

    def _squares(
        self, moment: torch.Tensor, moment_dot: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return G `(atoms, axis·columns)` from H, or its tangent."""
        out = moment.new_empty(len(moment), self.axis * moment.shape[2])
        moving = moment_dot is not None
        given = moment, moment_dot if moving else moment
        symmetric_kernel[(len(moment),)](out, *given, moving=moving, **self._sizes(moment))
        return out

    def _pull(self, *pairs: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        """Return the adjoint of H from H and the adjoint of G; the sum over several pairs."""
        moments, bars = zip(*pairs, strict=True)
        out = torch.empty_like(moments[0])
        pull_kernel[(len(out),)](out, moments, bars, **self._sizes(out))
        return out


def _sorted(given: Any) -> tuple[Any, ...]:
    """Return x, H, m and further terms, weights and biases, and ρ: two more than there are terms."""
    x, moment, *rest = given
    terms = (len(rest) - 6) // 2
    return x, moment, tuple(rest[:terms]), rest[terms : terms + 4], tuple(rest[terms + 4 :])
