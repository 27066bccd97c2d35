"""Activation functions inside Triton kernels; `activation` defines their results."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def tanh(x):
    """As torch on CPUs here: off by 2e-16 at most in float64."""
    return 2.0 * tl.sigmoid(2.0 * x) - 1.0


@triton.jit
def curve(h, kind: tl.constexpr, curve_of: tl.constexpr):
    """Return f(h), f′(h) and f″(h); `curve_of` are threshold, rate and start of an `activation.Formula`.

    The compiler drops those that are not used. Numbers of a launch, and of variables, would be rounded to single
    precision; constants are not.
    """
    if kind == "tanh":
        value = tanh(h)
        slope = 1.0 - value * value
        return value, slope, -2.0 * value * slope
    x = h
    if kind == "silut":  # one sigmoid σ for both pieces, since tanh x = 2σ(2x) − 1
        threshold: tl.constexpr = curve_of[0]
        rate: tl.constexpr = curve_of[1]
        start: tl.constexpr = curve_of[2]
        past = h - threshold  # a comparison would round the constant
        x = tl.where(past >= 0.0, 2.0 * rate * past, h)
    sigmoid = tl.sigmoid(x)
    rest = 1.0 - sigmoid
    change = sigmoid * rest
    turn = rest - sigmoid
    q = h * change
    value = h * sigmoid
    slope = sigmoid + q
    bend = 2.0 * change + q * turn
    if kind == "silut":
        value = tl.where(past >= 0.0, start - turn, value)
        slope = tl.where(past >= 0.0, 4.0 * rate * change, slope)
        bend = tl.where(past >= 0.0, 8.0 * rate * rate * change * turn, bend)
    return value, slope, bend
