"""Errors of an input: all problems at once."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable


@dataclasses.dataclass(frozen=True)
class Problem:
    """One thing that is wrong with an input.

    Attributes
    ----------
    path
        Where it stands in the file, such as `model/descriptor/rcut`; empty for the file as a whole.
    message
        The problem, the value found and the remedy.
    elsewhere
        Requested features that deepmd-kit has and this package lacks, in words; empty for a
        mistake.
    """

    path: str
    message: str
    elsewhere: str = ""

    def __str__(self) -> str:
        return f"{self.path}: {self.message}" if self.path else self.message


class InputError(ValueError):
    """An input that cannot be used.

    Attributes
    ----------
    problems
        Everything that is wrong, in the order of the file.
    source
        Name of the file.
    """

    def __init__(self, problems: Iterable[Problem], source: str = "the input") -> None:
        self.problems = tuple(problems)
        self.source = source
        super().__init__(self.problems, source)

    def __str__(self) -> str:
        count = len(self.problems)
        head = f"{count} problem{'s' if count != 1 else ''} in {self.source}:"
        return "\n".join([head, *(f"  {problem}" for problem in self.problems)])


class DeepmdKitOnlyError(InputError):
    """The input requests features that deepmd-kit has and this package lacks."""

    @property
    def elsewhere(self) -> str:
        """The features that the input requests, in words."""
        return " and ".join(dict.fromkeys(problem.elsewhere for problem in self.problems))
