"""Exceptions of the deploy room."""


class FreezeError(ValueError):
    """A model cannot be frozen, or its file does not compute what the checkpoint does."""
