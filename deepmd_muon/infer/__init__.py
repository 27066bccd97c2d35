"""Uses of a trained potential: predictions, an ASE calculator, errors on reference data."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from deepmd_muon.infer.ase_calculator import DeepPotCalculator
    from deepmd_muon.infer.prediction import Prediction
    from deepmd_muon.infer.predictor import Predictor, load_model

__all__ = ["DeepPotCalculator", "Prediction", "Predictor", "load_model"]


def __getattr__(name: str) -> Any:
    """Import the predictor (with torch) and the calculator (with ASE) at first use."""
    if name == "DeepPotCalculator":
        from deepmd_muon.infer.ase_calculator import DeepPotCalculator

        return DeepPotCalculator
    if name in __all__:
        from deepmd_muon.infer import predictor

        return getattr(predictor, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
