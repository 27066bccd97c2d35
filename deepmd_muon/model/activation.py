"""Activation functions with first and second derivative, under the names that DeePMD inputs use.

Forces need the slope in the forward pass and their gradients need the curvature in the backward pass, so
each function offers both in closed form instead of asking autograd twice.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod

import torch

from deepmd_muon.model.errors import ModelError


class Activation(ABC):
    """A scalar function f applied to every element.

    `keep` is whatever tensor the derivatives are cheapest from: f(h) for tanh, h itself for gelu.
    """

    keeps_input: bool

    def __call__(self, h: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return f(h) and the tensor to keep for `slope` and `curvature`; `h` may be overwritten."""
        if self.keeps_input:
            return self.value(h), h
        value = self.value_(h)
        return value, value

    @abstractmethod
    def value(self, h: torch.Tensor) -> torch.Tensor:
        """Return f(h) in a new tensor."""

    def value_(self, h: torch.Tensor) -> torch.Tensor:
        """Return f(h), written over h where that is possible."""
        return self.value(h)

    @abstractmethod
    def slope(self, keep: torch.Tensor) -> torch.Tensor:
        """Return f′ from the kept tensor."""

    @abstractmethod
    def curvature(self, keep: torch.Tensor, slope: torch.Tensor) -> torch.Tensor:
        """Return f″ from the kept tensor and f′."""


class Tanh(Activation):
    """tanh h."""

    keeps_input = False

    def value(self, h: torch.Tensor) -> torch.Tensor:
        return torch.tanh(h)

    def value_(self, h: torch.Tensor) -> torch.Tensor:
        return torch.tanh_(h)

    def slope(self, keep: torch.Tensor) -> torch.Tensor:
        return (keep * keep).neg_().add_(1.0)

    def curvature(self, keep: torch.Tensor, slope: torch.Tensor) -> torch.Tensor:
        return (keep * slope).mul_(-2.0)


class Sigmoid(Activation):
    """1 / (1 + exp(−h))."""

    keeps_input = False

    def value(self, h: torch.Tensor) -> torch.Tensor:
        return torch.sigmoid(h)

    def slope(self, keep: torch.Tensor) -> torch.Tensor:
        return keep * (1.0 - keep)

    def curvature(self, keep: torch.Tensor, slope: torch.Tensor) -> torch.Tensor:
        return slope * (1.0 - 2.0 * keep)


class Linear(Activation):
    """The identity."""

    keeps_input = False

    def value(self, h: torch.Tensor) -> torch.Tensor:
        return h.clone()

    def value_(self, h: torch.Tensor) -> torch.Tensor:
        return h

    def slope(self, keep: torch.Tensor) -> torch.Tensor:
        return torch.ones_like(keep)

    def curvature(self, keep: torch.Tensor, slope: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(keep)


class ReLU(Activation):
    """max(h, 0), optionally capped: relu6."""

    keeps_input = True

    def __init__(self, cap: float = math.inf) -> None:
        self.cap = cap

    def value(self, h: torch.Tensor) -> torch.Tensor:
        return torch.clamp(h, min=0.0, max=self.cap)

    def slope(self, keep: torch.Tensor) -> torch.Tensor:
        return ((keep > 0.0) & (keep < self.cap)).to(keep.dtype)

    def curvature(self, keep: torch.Tensor, slope: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(keep)


class Softplus(Activation):
    """log(1 + exp h), linear above 20 as torch has it."""

    keeps_input = True
    LINEAR_ABOVE = 20.0  # torch.nn.functional.softplus's default threshold

    def value(self, h: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.softplus(h, threshold=self.LINEAR_ABOVE)

    def slope(self, keep: torch.Tensor) -> torch.Tensor:
        return torch.where(keep > self.LINEAR_ABOVE, 1.0, torch.sigmoid(keep))

    def curvature(self, keep: torch.Tensor, slope: torch.Tensor) -> torch.Tensor:
        return slope * (1.0 - slope)


class GELU(Activation):
    """The tanh form of GELU, which DeePMD means by `gelu` and `gelu_tf` (Hendrycks & Gimpel 2016)."""

    keeps_input = True
    SCALE = math.sqrt(2.0 / math.pi)
    CUBIC = 0.044715

    def value(self, h: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.gelu(h, approximate="tanh")

    def _inner(self, h: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        square = h * h
        t = torch.tanh(self.SCALE * h * (1.0 + self.CUBIC * square))
        return t, self.SCALE * (1.0 + 3.0 * self.CUBIC * square)

    def slope(self, keep: torch.Tensor) -> torch.Tensor:
        t, inner_slope = self._inner(keep)
        return 0.5 * (1.0 + t) + 0.5 * keep * (1.0 - t * t) * inner_slope

    def curvature(self, keep: torch.Tensor, slope: torch.Tensor) -> torch.Tensor:
        t, inner_slope = self._inner(keep)
        inner_curvature = 6.0 * self.SCALE * self.CUBIC * keep
        bend = inner_slope + 0.5 * keep * (inner_curvature - 2.0 * t * inner_slope * inner_slope)
        return (1.0 - t * t) * bend


class SiLU(Activation):
    """h · sigmoid(h)."""

    keeps_input = True

    def value(self, h: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.silu(h)

    def slope(self, keep: torch.Tensor) -> torch.Tensor:
        sigmoid = torch.sigmoid(keep)
        return sigmoid * (1.0 + keep * (1.0 - sigmoid))

    def curvature(self, keep: torch.Tensor, slope: torch.Tensor) -> torch.Tensor:
        sigmoid = torch.sigmoid(keep)
        return sigmoid * (1.0 - sigmoid) * (2.0 + keep * (1.0 - 2.0 * sigmoid))


class SiLUT(Activation):
    """SiLU up to a threshold, beyond it a tanh that continues value and slope (`silut:T`, `custom_silu:T`)."""

    keeps_input = True

    def __init__(self, threshold: float = 3.0) -> None:
        sigmoid = 1.0 / (1.0 + math.exp(-threshold))
        self.threshold = threshold
        self.start = threshold * sigmoid
        self.rate = sigmoid + threshold * sigmoid * (1.0 - sigmoid)
        self._silu = SiLU()

    def value(self, h: torch.Tensor) -> torch.Tensor:
        tail = torch.tanh(self.rate * (h - self.threshold)) + self.start
        return torch.where(h >= self.threshold, tail, self._silu.value(h))

    def slope(self, keep: torch.Tensor) -> torch.Tensor:
        t = torch.tanh(self.rate * (keep - self.threshold))
        return torch.where(keep >= self.threshold, self.rate * (1.0 - t * t), self._silu.slope(keep))

    def curvature(self, keep: torch.Tensor, slope: torch.Tensor) -> torch.Tensor:
        t = torch.tanh(self.rate * (keep - self.threshold))
        tail = -2.0 * self.rate * self.rate * t * (1.0 - t * t)
        return torch.where(keep >= self.threshold, tail, self._silu.curvature(keep, slope))


_PLAIN = {
    "tanh": Tanh,
    "sigmoid": Sigmoid,
    "linear": Linear,
    "none": Linear,
    "relu": ReLU,
    "softplus": Softplus,
    "gelu": GELU,
    "gelu_tf": GELU,
    "silu": SiLU,
}


def activation(name: str) -> Activation:
    """Return the activation that a DeePMD input means by `name` (any case; `silut:3.0` carries a threshold).

    Raises
    ------
    ModelError
        When the name is unknown.
    """
    lowered = name.lower()
    if lowered in _PLAIN:
        return _PLAIN[lowered]()
    if lowered == "relu6":
        return ReLU(cap=6.0)
    kind, _, threshold = lowered.partition(":")
    if kind in ("silut", "custom_silu"):
        return SiLUT(float(threshold)) if threshold else SiLUT()
    known = ", ".join([*sorted(_PLAIN), "relu6", "silut:T", "custom_silu:T"])
    raise ModelError(f"activation_function {name!r} is not known; known are {known}")
