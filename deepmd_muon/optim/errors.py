"""What the optimizer raises: each class derives from the built-in that callers already catch."""

from __future__ import annotations

from collections.abc import Sequence

from deepmd_muon.setting import InvalidSettingError as InvalidSettingError  # one of optim's public names


class InvalidParameterError(ValueError):
    """A parameter cannot be optimized: complex, given twice, or two parameters of one name."""


class InvalidShapeError(ValueError):
    """A tensor has no matrices to orthogonalize, or cannot be split as it should be."""


class InvalidGradientError(RuntimeError):
    """A gradient cannot be used: it is sparse."""


class NonFiniteGradientError(InvalidGradientError):
    """A gradient holds NaN or infinity and the setting `on_nonfinite` is 'error'.

    Attributes
    ----------
    names
        The parameters whose gradients do.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self.names = tuple(names)
        listed = ", ".join(repr(name) for name in self.names[:10]) + (", …" if len(self.names) > 10 else "")
        super().__init__(
            f"{len(self.names)} gradient{'s' if len(self.names) != 1 else ''} with NaN or infinity: {listed}; nothing "
            "was changed. on_nonfinite='skip' leaves such steps out."
        )


class CaptureError(RuntimeError):
    """A step cannot be captured in a CUDA graph as things are."""


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
            f"the optimizer state does not fit the present routing ({len(self.differences)} "
            f"parameter{'s' if len(self.differences) != 1 else ''} affected):\n{listed}\n{advice}"
        )


class ForeignStateError(ValueError):
    """A state dict does not come from HybridMuon, or carries no routing that could be checked."""


class ShardingError(RuntimeError):
    """A parameter, its gradient or its state cannot take part in a sharded step as it is laid out."""


class PartialPlacementError(ShardingError):
    """A parameter or gradient holds sums that have not been reduced yet."""


class GradientPlacementError(ShardingError):
    """A gradient is not laid out as its parameter."""


class ReshardedParameterError(ShardingError):
    """A parameter is laid out otherwise than its state."""


class UnsupportedTransportError(ShardingError):
    """The process group, device or dtype cannot carry the exchange."""


class PlanMismatchError(ShardingError):
    """Ranks have made different plans: their parameters, settings or meshes differ."""


class MissingGradientError(ShardingError):
    """Some ranks have a gradient and others have none, of a parameter whose steps do not travel."""


class QKClipError(ValueError):
    """QK-clip's layers or logits do not fit the model.

    Attributes
    ----------
    problems
        One phrase per layer, weight or logit that does not fit.
    """

    def __init__(self, problems: Sequence[str]) -> None:
        self.problems = tuple(problems)
        super().__init__(f"QK-clip: {'; '.join(self.problems)}")
