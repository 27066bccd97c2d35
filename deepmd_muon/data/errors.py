"""Exceptions of the data package, all below `DataError`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager


class DataError(ValueError):
    """The training data, or the request for them, are wrong."""


class SystemNotFoundError(DataError, FileNotFoundError):
    """A path given as a system does not exist or holds no system."""


class SystemFormatError(DataError):
    """A file of a system is missing, truncated or does not fit the other files."""

    def __init__(self, system: str, file: str, problem: str) -> None:
        place = f"system {system}: {file}" if file else f"system {system}"
        super().__init__(f"{place}: {problem}")
        self.system = system
        self.file = file
        self.problem = problem

    def __reduce__(self) -> tuple[type, tuple[str, str, str]]:
        return (type(self), (self.system, self.file, self.problem))


class TypeMapError(DataError):
    """The element names of a system do not fit the type map asked for."""


class NeighborError(DataError):
    """A neighbour list cannot be built: degenerate cell, overlapping, far away or non-finite atoms.

    The error names frame and system if they are known.
    """

    def __init__(self, problem: str, frame: int | None = None, system: str | None = None) -> None:
        places = []
        if system is not None:
            places.append(f"system {system}")
        if frame is not None:
            places.append(f"frame {frame}")
        place = ", ".join(places)
        super().__init__(f"{place}: {problem}" if place else problem)
        self.problem = problem
        self.frame = frame
        self.system = system

    def __reduce__(self) -> tuple[type, tuple[str, int | None, str | None]]:
        return (type(self), (self.problem, self.frame, self.system))


@contextmanager
def naming_frame(frame: int, system: str | None = None) -> Iterator[None]:
    """Add frame and system to errors of the neighbour search."""
    try:
        yield
    except (NeighborError, RuntimeError) as error:
        problem = error.problem if isinstance(error, NeighborError) else str(error)
        raise NeighborError(problem, frame, system) from error


@contextmanager
def renumbering_frames(numbers: Sequence[int], system: str | None = None) -> Iterator[None]:
    """Give frames in errors of the neighbour search other numbers: frame k becomes `numbers[k]`."""
    try:
        yield
    except NeighborError as error:
        if error.frame is None:
            raise
        raise NeighborError(error.problem, int(numbers[error.frame]), system) from error


class SamplingError(DataError):
    """A batch size, probability rule or list of probabilities does not fit these systems."""


class SamplerStateError(DataError):
    """A saved sampler position belongs to other data or another batch rule."""
