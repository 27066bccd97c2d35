"""Section `validating`: passes over all validation data, and the best checkpoints by them."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import ClassVar

from deepmd_muon.section import Foreign, Rule, Section
from deepmd_muon.setting import setting, switched_on


def _some_validations(
    early_stop_patience: int, full_validation: bool, full_val_start: float
) -> str | None:
    if early_stop_patience and (not full_validation or full_val_start == 1):
        return f"needs full_validation, which is off; found {early_stop_patience}"
    return None


_VALIDATES = (switched_on("full_validation"),)
_KEEPS_BEST = (*_VALIDATES, switched_on("save_best"))


@dataclasses.dataclass(frozen=True)
class ValidatingSettings(Section):
    """Passes over all validation data during training."""

    full_validation: bool = setting(
        False,
        doc=(
            "Measure the errors on all validation data during training and keep the best "
            "checkpoints."
        ),
    )
    validation_freq: int = setting(
        5000, needs=_VALIDATES, minimum=1, doc="Steps between two full validations."
    )
    full_val_start: float = setting(
        0.5,
        needs=_VALIDATES,
        minimum=0.0,
        doc=(
            "First step of full validation: a fraction of the run if below 1, a step number if "
            "above 1. 0 starts at the beginning; 1 turns full validation off."
        ),
    )
    validation_metric: str = setting(
        "E:MAE",
        needs=_VALIDATES,
        pattern=r"[EeFfSsVv]:([Mm][Aa][Ee]|[Rr][Mm][Ss][Ee])",
        forms='"E:MAE", "E:RMSE", "F:MAE", "F:RMSE", "S:MAE", "S:RMSE", "V:MAE" or "V:RMSE"',
        doc=(
            "Error that decides which checkpoint is best: of the energy per atom (E), of the "
            "components of the forces (F), of the stress (S), or of the virial per atom (V)."
        ),
    )
    save_best: bool = setting(
        True,
        needs=_VALIDATES,
        doc="Write the best checkpoints as best.ckpt-STEP.t-RANK.pt; rank 1 is the best.",
    )
    save_best_dir: str | None = setting(
        None,
        needs=_KEEPS_BEST,
        doc="Folder of the best checkpoints; that of training/save_ckpt when left out.",
    )
    max_best_ckpt: int = setting(
        1, needs=_KEEPS_BEST, minimum=1, doc="Number of best checkpoints that are kept."
    )
    full_val_file: str = setting(
        "val.log", needs=_VALIDATES, doc="File of the errors of full validations."
    )
    early_stop_patience: int = setting(
        0,
        minimum=0,
        doc=(
            "End the run after this many full validations in a row without a new best; 0 turns "
            "this off. With several models, a model that reaches this number is not drawn again "
            "until it has a new best, and the run ends when all have reached it; a model without "
            "validation data never does. A stratified run draws all models to its end."
        ),
    )

    def best_folder(self, save_ckpt: str) -> Path:
        """Return the folder of the best checkpoints of a run with this prefix."""
        return Path(self.save_best_dir or Path(save_ckpt).parent)

    def best_prefix(self, save_ckpt: str) -> Path | None:
        """Return the path that the best checkpoints' names begin with.

        None for a run that keeps none.
        """
        return (
            self.best_folder(save_ckpt) / "best.ckpt"
            if self.full_validation and self.save_best
            else None
        )

    rules = (Rule(("early_stop_patience", "full_validation", "full_val_start"), _some_validations),)

    foreign: ClassVar[dict[str, Foreign]] = {
        "ema_full_validation": Foreign("full validation of averaged parameters", (False,)),
        "compiled_infer": Foreign("compiled inference", (False,)),
        "tf32_infer": Foreign("TF32 arithmetic", (False,)),
        "amp_infer": Foreign("mixed precision in inference", (False,)),
    }
