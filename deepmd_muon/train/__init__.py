"""Training: from an input file to checkpoints."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from deepmd_muon.train.errors import NonFiniteError, RunError, TrainingError

if TYPE_CHECKING:
    from deepmd_muon.train.start import run

__all__ = ["NonFiniteError", "RunError", "TrainingError", "run"]


def __getattr__(name: str) -> Any:
    # Commands that only print need a part of this package, and must not wait for torch's import.
    if name == "run":
        from deepmd_muon.train.start import run

        return run
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
