"""The differences between the input of a run and that of the checkpoint it starts from."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from deepmd_muon.argcheck.hosted import completed
from deepmd_muon.argcheck.legacy_optimizer import current_optimizer
from deepmd_muon.argcheck.training import RunSettings
from deepmd_muon.checkpoint_file.errors import CheckpointError
from deepmd_muon.model.settings import DEFAULT_ALPHA, HostedSettings, ModelSettings
from deepmd_muon.section import thaw

log = logging.getLogger(__name__)

# Settings of how weights and statistics are made, which a checkpoint already holds, of what is
# trained, and of how a step is computed.
_NOT_PHYSICS = (
    "trainable",
    "seed",
    "data_stat_nbatch",
    "data_stat_protect",
    "rcond",
    "set_davg_zero",
    "use_compile",
)
# Beginnings of the keys that decide which steps a run takes; a change of others is no warning.
_STEERING = ("optimizer/", "loss/", "learning_rate/", "training/training_data/", "training/numb_")


def check_model_section(
    saved: ModelSettings, present: ModelSettings, path: Path, *, insist: bool
) -> None:
    """Raise if the checkpoint `path` was trained with other model settings.

    With `insist`, log the changes instead.

    Weights load without error after a change of cutoff or activation, but the run would continue
    with other energies. Both sections must give `sel` as numbers.

    Raises
    ------
    CheckpointError
        Listing the settings that differ.
    """
    if isinstance(saved, HostedSettings) and isinstance(present, HostedSettings):
        saved = completed(saved)
        present = completed(present)  # --use-pretrain-script gives it the saved section
    saved_section = _with_one_spelling(thaw(saved))
    present_section = _with_one_spelling(thaw(present))
    changes = [
        change
        for key, change in changed_settings(saved_section, present_section, "model/").items()
        if key.rpartition("/")[2] not in _NOT_PHYSICS
    ]
    if changes and not insist:
        listed = "".join(f"  {change}\n" for change in changes)
        raise CheckpointError(
            f"{path} was trained with another model:\n{listed}Use its model section "
            "(--use-pretrain-script), or --force-load to go on with the changed one."
        )
    for change in changes:
        log.warning("--force-load: %s", change)


def report_changes(saved: Mapping[str, Any], present: Mapping[str, Any], path: Path) -> None:
    """Log the differences between two normalised inputs.

    Those that change the training are warnings.
    """
    saved_optimizer = saved.get("optimizer")
    if isinstance(saved_optimizer, Mapping):
        saved = {**saved, "optimizer": current_optimizer(saved_optimizer)}
    changes = changed_settings(saved, present)
    # Settings without effect today, which checkpoints of earlier versions have.
    left_out = {f"training/{name}" for name in RunSettings.foreign}
    changes = {
        key: change
        for key, change in changes.items()
        if not key.startswith(("model/", "replay")) and key not in left_out
    }
    important = [change for key, change in changes.items() if key.startswith(_STEERING)]
    if important:
        log.warning("since %s was written: %s", path, "; ".join(important))
    for change in changes.values():
        if change not in important:
            log.info("since %s was written: %s", path, change)


def changed_settings(
    saved: Mapping[str, Any], present: Mapping[str, Any], path: str = ""
) -> dict[str, str]:
    """Describe every setting that differs, by its path in the input."""
    changes: dict[str, str] = {}
    for key in sorted({*saved, *present}):
        setting = f"{path}{key}"
        old = saved.get(key)
        new = present.get(key)
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            changes |= changed_settings(old, new, f"{setting}/")
        elif setting == "training/seed" and old != new:
            effect = "without effect while the saved order of the data continues"
            changes[setting] = f"{setting} was {old}, is {new} ({effect})"
        elif old != new:
            changes[setting] = f"{setting} was {old!r}, is {new!r}"
    return changes


def _with_one_spelling(section: Mapping[str, Any]) -> dict[str, Any]:
    """Return a section in which settings with the same meaning have the same form.

    The precision "default" reads "float64", and a table has its `smin_alpha`.
    """
    spelled: dict[str, Any] = {}
    if "use_srtab" in section:
        spelled["smin_alpha"] = DEFAULT_ALPHA
    for key, value in section.items():
        if isinstance(value, Mapping):
            spelled[key] = _with_one_spelling(value)
        elif key == "precision" and value == "default":
            spelled[key] = "float64"
        else:
            spelled[key] = value
    return spelled
