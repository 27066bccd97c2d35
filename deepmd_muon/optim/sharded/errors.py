"""What the sharded step raises, before any byte moves."""

from __future__ import annotations


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
