"""Activation functions with first and second derivative, under the names that DeePMD inputs use.

Forces need the slope in the forward pass and their gradients need the curvature in the backward
pass, so each function offers both in closed form instead of asking autograd twice.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from deepmd_muon.model.errors import ModelError

SOFTPLUS_LINEAR_ABOVE = 20.0  # torch.nn.functional.softplus's default threshold
# Hendrycks & Gimpel, arXiv:1606.08415, eq. 2.
GELU_SCALE = math.sqrt(2.0 / math.pi)
GELU_CUBIC = 0.044715
SILUT_THRESHOLD = 3.0  # deepmd-kit's, when the name carries none

_Function = Callable[[Tensor], Tensor]


class Formula(NamedTuple):
    """The function as kernels compute it (`layer_kernels.curve`).

    The one switch of all kernels that apply an activation: an `Activation` with a formula may take
    the kernels of layers and of DPA-3, one without takes torch's operations everywhere. A new kind
    therefore needs f, f′ and f″ in `curve`, precise enough for the kernels in float32.

    Attributes
    ----------
    kind
        "tanh", "silu" or "silut".
    threshold, rate, start
        Of `silut`: from h = threshold on, the function is start + tanh(rate·(h − threshold)).
    """

    kind: str
    threshold: float = 0.0
    rate: float = 0.0
    start: float = 0.0

    @property
    def kernel_arguments(self) -> dict[str, Any]:
        """What kernels pass to `curve`; compile-time constants keep double precision."""
        constants = self.threshold, self.rate, self.start
        return {"curve_constants": constants, "kind": self.kind}


@dataclass(frozen=True)
class Activation:
    """A function f of every element h, and the values from which its derivatives are cheapest.

    Attributes
    ----------
    value
        f(h) in a new tensor.
    slope
        f′ from the kept tensor, which is h when `keeps_input`, else f(h).
    curvature
        f″ from the kept tensor and f′.
    keeps_input
        See `slope`.
    formula
        None when kernels do not know the function.
    """

    value: _Function
    slope: _Function
    curvature: Callable[[Tensor, Tensor], Tensor]
    keeps_input: bool = True
    formula: Formula | None = None

    def __call__(self, h: Tensor) -> tuple[Tensor, Tensor]:
        """Return f(h) and the tensor to keep for the derivatives; `h` may be overwritten."""
        value = self.value(h)
        return value, h if self.keeps_input else value

    def value_of(self, keep: Tensor) -> Tensor:
        """Return f(h) from the kept tensor."""
        return self.value(keep) if self.keeps_input else keep

    def times_slope(self, keep: Tensor, x: Tensor) -> Tensor:
        """Return f′·x in a new tensor."""
        return self.slope(keep).mul_(x)

    def derivatives(self, keep: Tensor) -> tuple[Tensor, Tensor]:
        """Return f′ and f″ in new tensors."""
        slope = self.slope(keep)
        return slope, self.curvature(keep, slope)

    def pull_back_(self, keep: Tensor, tangent: Tensor | None, cotangent: Tensor) -> None:
        """Turn cotangents of (f(h), f′(h)·tangent) into those of (h, tangent), in place.

        Parameters
        ----------
        keep, tangent
            Shape `(rows, n)`; tangent None when there is no second part.
        cotangent
            Shape `(1 or 2, rows, n)`.
        """
        slope = self.slope(keep)
        bend = (
            None
            if tangent is None
            else self.curvature(keep, slope).mul_(tangent).mul_(cotangent[1])
        )
        cotangent *= slope
        if bend is not None:
            cotangent[0] += bend


@dataclass(frozen=True)
class Tanh(Activation):
    """tanh, the activation of nearly every DeePMD model, with its passes over memory fused."""

    def __call__(self, h: Tensor) -> tuple[Tensor, Tensor]:
        """See `Activation`; on CPUs 2σ(2h) − 1 takes half the time of tanh, errors are 2e-16."""
        value = h.mul_(2.0).sigmoid_().mul_(2.0).sub_(1.0) if h.device.type == "cpu" else h.tanh_()
        return value, value

    def times_slope(self, keep: Tensor, x: Tensor) -> Tensor:
        """See `Activation`."""
        out: Tensor = torch.ops.aten.tanh_backward(x, keep)
        return out

    def pull_back_(self, keep: Tensor, tangent: Tensor | None, cotangent: Tensor) -> None:
        """See `Activation`; with f″ = −2·f·f′ the slope is a common factor."""
        if tangent is not None:
            cotangent[0].addcmul_(keep * tangent, cotangent[1], value=-2.0)
        torch.ops.aten.tanh_backward.grad_input(
            cotangent, keep.expand_as(cotangent), grad_input=cotangent
        )


def _gelu() -> Activation:
    """Build the tanh form of GELU, which DeePMD means by `gelu` as well as `gelu_tf`."""

    def inner(h: Tensor) -> tuple[Tensor, Tensor]:
        square = h * h
        t = torch.tanh(GELU_SCALE * h * (1.0 + GELU_CUBIC * square))
        return t, GELU_SCALE * (1.0 + 3.0 * GELU_CUBIC * square)

    def slope(h: Tensor) -> Tensor:
        t, inner_slope = inner(h)
        return 0.5 * (1.0 + t) + 0.5 * h * (1.0 - t * t) * inner_slope

    def curvature(h: Tensor, _: Tensor) -> Tensor:
        t, inner_slope = inner(h)
        inner_curvature = 6.0 * GELU_SCALE * GELU_CUBIC * h
        return (1.0 - t * t) * (
            inner_slope + 0.5 * h * (inner_curvature - 2.0 * t * inner_slope * inner_slope)
        )

    return Activation(lambda h: torch.nn.functional.gelu(h, approximate="tanh"), slope, curvature)


@dataclass(frozen=True)
class Silu(Activation):
    """h·σ(h), with its passes over memory fused."""

    def times_slope(self, keep: Tensor, x: Tensor) -> Tensor:
        """See `Activation`."""
        out: Tensor = torch.ops.aten.silu_backward(x, keep)
        return out

    def derivatives(self, keep: Tensor) -> tuple[Tensor, Tensor]:
        """See `Activation`; with q = h·σ·(1 − σ), f′ = σ + q and f″ = 2·σ·(1 − σ) + q·(1 − 2σ)."""
        sigmoid = torch.sigmoid(keep)
        complement = 1.0 - sigmoid
        q = (keep * sigmoid).mul_(complement)
        curvature = (complement - sigmoid).mul_(q).addcmul_(sigmoid, complement, value=2.0)
        return q.add_(sigmoid), curvature


@dataclass(frozen=True)
class Silut(Silu):
    """SiLU up to a threshold, then a tanh that continues value and slope (`silut:T`).

    On a CPU, where asking costs little, a tensor that stays below the threshold takes the passes of
    SiLU.

    Attributes
    ----------
    below
        Whether no element of a tensor on a CPU reaches the threshold.
    """

    below: Callable[[Tensor], bool] = lambda _: False

    def times_slope(self, keep: Tensor, x: Tensor) -> Tensor:
        """See `Activation`."""
        return super().times_slope(keep, x) if self.below(keep) else self.slope(keep).mul_(x)

    def derivatives(self, keep: Tensor) -> tuple[Tensor, Tensor]:
        """See `Activation`."""
        return super().derivatives(keep) if self.below(keep) else Activation.derivatives(self, keep)


def _silu() -> Silu:
    def slope(h: Tensor) -> Tensor:
        sigmoid = torch.sigmoid(h)
        return sigmoid * (1.0 + h * (1.0 - sigmoid))

    def curvature(h: Tensor, _: Tensor) -> Tensor:
        sigmoid = torch.sigmoid(h)
        return sigmoid * (1.0 - sigmoid) * (2.0 + h * (1.0 - 2.0 * sigmoid))

    return Silu(torch.nn.functional.silu, slope, curvature, formula=Formula("silu"))


def _silut(threshold: float) -> Silut:
    sigmoid = 1.0 / (1.0 + math.exp(-threshold))
    start = threshold * sigmoid
    rate = sigmoid + threshold * sigmoid * (1.0 - sigmoid)
    silu = _silu()

    def below(h: Tensor) -> bool:
        return h.device.type == "cpu" and h.numel() > 0 and bool(h.detach().amax() < threshold)

    def tail(h: Tensor) -> Tensor:
        return torch.tanh(rate * (h - threshold))

    def value(h: Tensor) -> Tensor:
        low = silu.value(h)
        return low if below(h) else torch.where(h >= threshold, tail(h) + start, low)

    def slope(h: Tensor) -> Tensor:
        return torch.where(h >= threshold, rate * (1.0 - tail(h).square()), silu.slope(h))

    def curvature(h: Tensor, low: Tensor) -> Tensor:
        t = tail(h)
        return torch.where(
            h >= threshold, -2.0 * rate * rate * t * (1.0 - t * t), silu.curvature(h, low)
        )

    return Silut(
        value, slope, curvature, formula=Formula("silut", threshold, rate, start), below=below
    )


_TANH = Tanh(
    torch.tanh,
    lambda t: 1.0 - t * t,
    lambda t, slope: -2.0 * t * slope,
    keeps_input=False,
    formula=Formula("tanh"),
)
_SIGMOID = Activation(
    torch.sigmoid,
    lambda y: y * (1.0 - y),
    lambda y, slope: slope * (1.0 - 2.0 * y),
    keeps_input=False,
)
_LINEAR = Activation(torch.clone, torch.ones_like, lambda h, _: torch.zeros_like(h))
_SOFTPLUS = Activation(
    torch.nn.functional.softplus,
    lambda h: torch.sigmoid(h).masked_fill_(h > SOFTPLUS_LINEAR_ABOVE, 1.0),
    lambda _, slope: slope * (1.0 - slope),
)


def _relu(cap: float) -> Activation:
    return Activation(
        lambda h: h.clamp(0.0, cap),
        lambda h: ((h > 0.0) & (h < cap)).to(h.dtype),
        lambda h, _: torch.zeros_like(h),
    )


_BY_NAME: dict[str, Activation] = {
    "tanh": _TANH,
    "sigmoid": _SIGMOID,
    "linear": _LINEAR,
    "none": _LINEAR,
    "relu": _relu(math.inf),
    "relu6": _relu(6.0),
    "softplus": _SOFTPLUS,
    "gelu": _gelu(),
    "gelu_tf": _gelu(),
    "silu": _silu(),
    "silut": _silut(SILUT_THRESHOLD),
    "custom_silu": _silut(SILUT_THRESHOLD),
}


def activation(name: str) -> Activation:
    """Return the activation that a DeePMD input means by `name`.

    Upper and lower case are equal; `silut:3.0` has a threshold.

    Raises
    ------
    ModelError
        When the name is unknown.
    """
    kind, _, threshold = name.lower().partition(":")
    if threshold and kind in ("silut", "custom_silu"):
        return _silut(float(threshold))
    if threshold or kind not in _BY_NAME:
        raise ModelError(
            f"activation_function {name!r} is not known; known are {', '.join(_BY_NAME)}, silut:T"
        )
    return _BY_NAME[kind]
