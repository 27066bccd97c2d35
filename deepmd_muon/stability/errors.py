"""Exceptions of the stability room."""


class StabilityError(ValueError):
    """Data, a model or settings that cannot be checked."""
