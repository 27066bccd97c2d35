"""Exceptions of the optimizer; each derives from the built-in class that callers already catch."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence

from deepmd_muon.setting import (
    InvalidSettingError as InvalidSettingError,
)  # one of optim's public names

# Modules that warnings of this package do not point to: its own, and torch's between them.
_OPTIMIZER_MODULES = (__name__.rpartition(".")[0], "torch")


class IdleSettingWarning(UserWarning):
    """Settings have no effect beside the others."""


def warn_caller(message: str | Warning) -> None:
    """Warn, and point to the line outside of the optimizer's modules that led here."""
    frame = sys._getframe()
    level = 1
    while frame.f_back is not None and _is_of_optimizer(frame.f_globals.get("__name__", "")):
        frame = frame.f_back
        level += 1
    warnings.warn(message, stacklevel=level)


def _is_of_optimizer(module: str) -> bool:
    return any(module == name or module.startswith(f"{name}.") for name in _OPTIMIZER_MODULES)


class InvalidParameterError(ValueError):
    """A parameter cannot be optimized: it is complex, repeated, or has the name of another."""


class InvalidShapeError(ValueError):
    """A tensor has no matrices to orthogonalize, or cannot be split as requested."""


class InvalidGradientError(RuntimeError):
    """A gradient cannot be used: it is sparse."""


class NonFiniteGradientError(InvalidGradientError):
    """A gradient holds NaN or infinity and the setting `on_nonfinite` is 'error'.

    Attributes
    ----------
    names
        Names of the parameters with such gradients.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self.names = tuple(names)
        listed = ", ".join(repr(name) for name in self.names[:10]) + (
            ", …" if len(self.names) > 10 else ""
        )
        super().__init__(
            f"{len(self.names)} gradient{'s' if len(self.names) != 1 else ''} with NaN or "
            f"infinity: {listed}; nothing was changed. Set on_nonfinite='skip' to skip such steps."
        )


class CaptureError(RuntimeError):
    """A step cannot be captured in a CUDA graph in its present configuration."""


class RoutingMismatchError(ValueError):
    """The routes or matrix views of a state dict differ from those of the present parameters.

    Attributes
    ----------
    differences
        One line per affected parameter: name, saved route and view, present route and view.
    """

    def __init__(self, differences: Sequence[str], advice: str) -> None:
        self.differences = tuple(differences)
        listed = "\n".join(f"  {line}" for line in differences)
        super().__init__(
            f"the optimizer state does not match the present routing ({len(self.differences)} "
            f"parameter{'s' if len(self.differences) != 1 else ''} affected):\n{listed}\n{advice}"
        )


class ForeignStateError(ValueError):
    """A state dict is damaged, lacks names, or is of an unknown optimizer or a later version."""


class ShardingError(RuntimeError):
    """The layout of a parameter, its gradient or its state does not allow a sharded step."""


class PartialPlacementError(ShardingError):
    """A parameter or gradient has a Partial placement: its sums have not been reduced."""


class GradientPlacementError(ShardingError):
    """A gradient's layout differs from its parameter's."""


class ReshardedParameterError(ShardingError):
    """A parameter's layout differs from its state's."""


class UnsupportedTransportError(ShardingError):
    """The process group, device or dtype does not support the exchange."""


class PlanMismatchError(ShardingError):
    """Ranks have different plans: their parameters, settings or meshes differ."""


class MissingGradientError(ShardingError):
    """Only some ranks have a gradient of a parameter, and its step is not exchanged."""


class ReplicaMismatchError(ShardingError):
    """Parameters that are declared to be copies of each other have different values."""


class QKClipError(ValueError):
    """QK-clip's layers or logits do not match the model.

    Attributes
    ----------
    problems
        One phrase per layer, weight or logit that does not match.
    """

    def __init__(self, problems: Sequence[str]) -> None:
        self.problems = tuple(problems)
        super().__init__(f"QK-clip: {'; '.join(self.problems)}")
