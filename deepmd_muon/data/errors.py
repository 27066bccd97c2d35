"""Exceptions of the data room, all below `DataError`."""

from __future__ import annotations


class DataError(ValueError):
    """Something about the training data, or about how it is asked for, is wrong."""


class SystemNotFoundError(DataError, FileNotFoundError):
    """A path given as a system does not exist or holds no system."""


class SystemFormatError(DataError):
    """A file of a system is missing, truncated or does not fit the other files."""

    def __init__(self, system: str, file: str, problem: str) -> None:
        super().__init__(": ".join(part for part in (f"system {system}", file, problem) if part))
        self.system = system
        self.file = file
        self.problem = problem

    def __reduce__(self) -> tuple[type, tuple[str, str, str]]:
        return (type(self), (self.system, self.file, self.problem))


class TypeMapError(DataError):
    """The element names of a system do not fit the type map asked for."""


class NeighborError(DataError):
    """A neighbour list cannot be built: degenerate cell, overlapping or non-finite atoms."""


class SamplingError(DataError):
    """A batch size, probability rule or list of probabilities makes no sense for these systems."""


class SamplerStateError(DataError):
    """A saved sampler position belongs to other data or another batch rule."""
