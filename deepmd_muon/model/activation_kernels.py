"""Activation functions inside Triton kernels; `activation` defines their results."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# ruff: noqa: ANN001, ANN201, ANN202
# Reason for both: Triton compiles these functions. Their arguments are of its own language, not of Python's.

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _tanh(x):
    return 2.0 * tl.sigmoid(2.0 * x) - 1.0


@triton.jit
def curve(h, kind: tl.constexpr, curve_of: tl.constexpr):
    """Return f(h), f′(h) and f″(h); `curve_of` are threshold, rate and start of an `activation.Formula`.

    The compiler drops those that are not used. Numbers of a launch, and of variables, would be rounded to single
    precision; constants are not.
    """
    if kind == "tanh":
        value = _tanh(h)
        slope = 1.0 - value * value
        return value, slope, -2.0 * value * slope
    sigmoid = tl.sigmoid(h)
    rest = 1.0 - sigmoid
    q = h * sigmoid * rest
    value = h * sigmoid
    slope = sigmoid + q
    bend = 2.0 * sigmoid * rest + q * (rest - sigmoid)
    if kind == "silut":
        threshold: tl.constexpr = curve_of[0]
        rate: tl.constexpr = curve_of[1]
        start: tl.constexpr = curve_of[2]
        beyond = h - threshold >= 0.0  # a comparison would round the constant
        tail = _tanh(rate * (h - threshold))
        fall = 1.0 - tail * tail
        value = tl.where(beyond, start + tail, value)
        slope = tl.where(beyond, rate * fall, slope)
        bend = tl.where(beyond, -2.0 * rate * rate * tail * fall, bend)
    return value, slope, bend
