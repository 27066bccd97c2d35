"""Exceptions of the dynamics room."""


class DynamicsError(ValueError):
    """Structures or settings with which no dynamics can begin, or dynamics that lost all of its structures."""
