"""Exceptions of the deploy room."""


class FreezeError(ValueError):
    """A model cannot be frozen, or its file and the checkpoint give different results."""
