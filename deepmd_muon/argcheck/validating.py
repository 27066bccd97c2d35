"""Section `validating`: passes over all validation data during training."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from deepmd_muon.section import Foreign, Section
from deepmd_muon.setting import setting

_NOTE = "choosing checkpoints by a pass over all validation data is not available; use dp test on them"
_UNUSED = "it belongs to full_validation"


@dataclasses.dataclass(frozen=True)
class ValidatingSettings(Section):
    """Passes over all validation data during training."""

    full_validation: bool = setting(
        False, choices=(False,), note=_NOTE, doc="Measure the error on all validation data during training."
    )

    foreign: ClassVar[dict[str, Foreign]] = {
        "ema_full_validation": Foreign("full validation of averaged parameters", (False,)),
        "validation_freq": Foreign(_UNUSED, (5000,), inert=True),
        "save_best": Foreign(_UNUSED, (True, False), inert=True),
        "save_best_dir": Foreign(_UNUSED, inert=True),
        "max_best_ckpt": Foreign(_UNUSED, (1,), inert=True),
        "validation_metric": Foreign(_UNUSED, ("E:MAE",), inert=True),
        "full_val_file": Foreign(_UNUSED, ("val.log",), inert=True),
        "full_val_start": Foreign(_UNUSED, (0.5,), inert=True),
        "compiled_infer": Foreign("compiled inference", (False,)),
        "tf32_infer": Foreign("TF32 arithmetic", (False,)),
        "amp_infer": Foreign("mixed precision in inference", (False,)),
    }
