"""Outputs of a run that are its inputs, or each other: refused before anything is written."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from deepmd_muon.clashes import refuse_clashes
from deepmd_muon.train.errors import TrainingError

if TYPE_CHECKING:
    from deepmd_muon.argcheck import Input


def check_outputs(
    given: Input, input_path: str, output: str, log_path: str | None, checkpoint: str | None = None
) -> None:
    """Refuse to write over the input, the data, the checkpoint that a run starts from, or one output over another.

    Parameters
    ----------
    given
        The checked input, which names data and outputs.
    input_path, checkpoint
        Files that the run reads.
    output, log_path
        Where the normalised input and the log go.

    Raises
    ------
    TrainingError
        Naming every output that is something else as well.
    """
    training, validating = given.settings.training, given.settings.validating
    outputs = {"-o": output, "-l": log_path, "training/jsonl_file": training.jsonl_file}
    outputs |= {f"{branch.data_path}/stat_file": branch.data.stat_file for branch in given.branches.values()}
    if training.disp_training:
        outputs["training/disp_file"] = training.disp_file
    if training.profiling:
        outputs["training/profiling_file"] = training.profiling_file
    # The text file that names the newest checkpoint.
    outputs["the run's file checkpoint"] = str(Path(training.save_ckpt).with_name("checkpoint"))
    if validating.full_validation:
        outputs["validating/full_val_file"] = validating.full_val_file
    link = Path(f"{training.save_ckpt}.pt")
    if not link.is_symlink():  # a link is what an earlier run has left
        outputs["training/save_ckpt"] = str(link)
    systems = {}
    for name, branch in given.branches.items():
        whose = f" of {name}" if given.multi_task else ""
        systems[f"the training data{whose}"] = branch.data.training_data.systems
        if branch.data.validation_data:
            systems[f"the validation data{whose}"] = branch.data.validation_data.systems
    refuse_clashes(TrainingError, outputs, {"the input": input_path, "the checkpoint": checkpoint}, systems)
