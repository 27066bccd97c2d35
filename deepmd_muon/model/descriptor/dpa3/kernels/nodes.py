"""Triton kernels of the element-wise and symmetric parts of a layer's nodes; `nodes` says where each stands."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from deepmd_muon.model.nn.activation_kernels import curve

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
        total += tl.load(rho[2 + number] + column, real, 0.0) * tl.load(plain[number] + at, real, 0.0)
    for number in tl.static_range(2):
        total += tl.load(rho[number] + column, real, 0.0) * curve(tl.load(h[number] + at, real, 0.0), kind, curve_of)[0]
    tl.store(out + at, total, real)


@triton.jit
def adjoint_kernel(
    h_bar, plain_bar, y_bar, h, rho, count, width, curve_of: tl.constexpr, kind: tl.constexpr, block: tl.constexpr
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
        total += tl.load(rho[2 + number] + column, real, 0.0) * tl.load(plain_dot[number] + at, real, 0.0)
    for number in tl.static_range(2):
        slope = curve(tl.load(h[number] + at, real, 0.0), kind, curve_of)[1]
        total += tl.load(rho[number] + column, real, 0.0) * slope * tl.load(h_dot[number] + at, real, 0.0)
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
            left, right = tl.load(moment + row + first + a, a < axis, 0.0), tl.load(moment + row + d, in_d, 0.0)
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


def _grid(x: torch.Tensor) -> tuple[int]:
    return (triton.cdiv(x.numel(), BLOCK),)


class Rows:
    """Launches on matrices of one shape, with ρ, α and the activation of a layer.

    Parameters
    ----------
    rho
        ρ₀, ρ₁ of both h, and those of plain terms.
    carry
        α.
    kind, curve_of
        Members of an `activation.Formula`.
    """

    def __init__(self, rho: Sequence[torch.Tensor], carry: float, kind: str, curve_of: Sequence[float]) -> None:
        # numbers known at compile time keep double precision
        self._curve = {"curve_of": tuple(curve_of), "kind": kind}
        self._rho, self._carry = tuple(rho), carry

    def value(self, x: torch.Tensor, plain: Sequence[torch.Tensor], h: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return α·x + ρ₀∘f(h₀) + ρ₁∘f(h₁) and ρ∘m of each plain term m."""
        out = torch.empty_like(x)
        value_kernel[_grid(x)](
            out, x, tuple(plain), tuple(h), self._rho, x.numel(), x.shape[1], self._carry, **self._curve, block=BLOCK
        )
        return out

    def adjoint(self, y_bar: torch.Tensor, h: Sequence[torch.Tensor]) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        """Return the adjoints of both h in one tensor, and those of plain terms."""
        h_bar, plain_bar = y_bar.new_empty(2, *y_bar.shape), tuple(torch.empty_like(y_bar) for _ in self._rho[2:])
        sizes = y_bar.numel(), y_bar.shape[1]
        adjoint_kernel[_grid(y_bar)](
            tuple(h_bar), plain_bar, y_bar, tuple(h), self._rho, *sizes, **self._curve, block=BLOCK
        )
        return h_bar, plain_bar

    def tangent(
        self,
        x_dot: torch.Tensor,
        plain_dot: Sequence[torch.Tensor],
        h_dot: Sequence[torch.Tensor],
        h: Sequence[torch.Tensor],
    ) -> torch.Tensor:
        """Return the tangent of `value`."""
        out = torch.empty_like(x_dot)
        sizes = x_dot.numel(), x_dot.shape[1], self._carry
        tangent_kernel[_grid(x_dot)](
            out, x_dot, tuple(plain_dot), tuple(h_dot), tuple(h), self._rho, *sizes, **self._curve, block=BLOCK
        )
        return out

    def gradient(
        self,
        y_hat: torch.Tensor,
        plain: Sequence[torch.Tensor],
        h: Sequence[torch.Tensor],
        earlier: Sequence[torch.Tensor],
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, ...], torch.Tensor]:
        """Return ĥ of both h, the gradients of plain terms, and sums over rows: of ĥ₀, ĥ₁ and for each ρ.

        `earlier` holds ȳ, both ḣ and the tangents of plain terms, or nothing.
        """
        terms, plain_hat = y_hat.new_empty(4 + len(plain), *y_hat.shape), tuple(map(torch.empty_like, plain))
        sizes, moving = (y_hat.numel(), y_hat.shape[1]), len(earlier) > 0
        given = tuple(earlier) if moving else (y_hat,) * (3 + len(plain))
        gradient_kernel[_grid(y_hat)](
            terms,
            plain_hat,
            y_hat,
            tuple(plain),
            tuple(h),
            given,
            self._rho,
            *sizes,
            **self._curve,
            moving=moving,
            block=BLOCK,
        )
        return terms[:2], plain_hat, terms.sum(1)


class Symmetric:
    """Launches for G_ad = Σ_c H_ca·H_cd/3, `axis` columns a, of H's parts of edges and nodes apart.

    Parameters
    ----------
    axis, edge, node
        Columns a, and of H of both parts.
    """

    def __init__(self, axis: int, edge: int, node: int) -> None:
        wide = triton.next_power_of_2(max(edge, node))
        self._width = axis * (edge + node)
        self._sizes = {"axis": axis, "edge": edge, "node": node, "tall": triton.next_power_of_2(axis), "wide": wide}

    def value(self, moment: torch.Tensor, moment_dot: torch.Tensor | None = None) -> torch.Tensor:
        """Return G `(atoms, axis·columns)` from H `(atoms, 3, columns)`, or its tangent."""
        out = moment.new_empty(len(moment), self._width)
        moving = moment_dot is not None
        symmetric_kernel[(len(moment),)](out, moment, moment_dot if moving else moment, moving=moving, **self._sizes)
        return out

    def pull(self, *pairs: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        """Return the adjoint of H from H and the adjoint of G; the sum over several pairs."""
        moments, bars = zip(*pairs, strict=True)
        out = torch.empty_like(moments[0])
        pull_kernel[(len(out),)](out, moments, bars, **self._sizes)
        return out
