"""Exceptions of the infer room."""


class InferError(ValueError):
    """Base class: a model or frames that cannot be used as asked."""


class PredictionInputError(InferError):
    """Positions, cells or types whose shapes or values do not fit together or the model."""
