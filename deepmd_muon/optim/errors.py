"""What the optimizer raises: each class derives from the built-in that callers already catch."""

from __future__ import annotations

from collections.abc import Sequence


class InvalidGradientError(RuntimeError):
    """A gradient cannot be used: sparse, complex, or of another shape than its parameter."""


class RoutingMismatchError(ValueError):
    """The routes or matrix views of a state dict differ from those of the present parameters.

    Attributes
    ----------
    differences
        One line per affected parameter: name, saved route and view, present route and view.
    """

    def __init__(self, differences: Sequence[str], advice: str) -> None:
        self.differences = tuple(differences)
        listed = "\n".join(f"  {line}" for line in differences)
        super().__init__(
            f"the optimizer state does not fit the present routing ({len(self.differences)} "
            f"parameter{'s' if len(self.differences) != 1 else ''} affected):\n{listed}\n{advice}"
        )


class ForeignStateError(ValueError):
    """A state dict does not come from HybridMuon, or carries no routing that could be checked."""
