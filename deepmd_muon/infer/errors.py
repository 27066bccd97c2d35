"""Exceptions of the infer room."""


class InferError(ValueError):
    """Base class: a model, frames or a picture that cannot be had as asked."""


class PredictionInputError(InferError):
    """Positions, cells or types whose shapes or values do not fit together or the model."""


class PictureError(InferError):
    """There is nothing to draw, or the file to draw from has other content."""
