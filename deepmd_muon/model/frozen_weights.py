"""The weights in a frozen file, of this package or of deepmd-kit, as a checkpoint has them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from deepmd_muon.checkpoint_file.archive import ArchiveError
from deepmd_muon.checkpoint_file.errors import CheckpointError
from deepmd_muon.checkpoint_file.file import read_checkpoint
from deepmd_muon.checkpoint_file.frozen_archive import load_program, weights_of
from deepmd_muon.files import open_regular
from deepmd_muon.model.branch_settings import SINGLE
from deepmd_muon.model.scripted.exchange import BORDER_OP, TABULATED, declare_operators

#: Ending of frozen files.
FROZEN = ".pth"


def read_weights(path: Path) -> dict[str, Any]:
    """Read a checkpoint, or a frozen file as a checkpoint that has its weights and nothing else.

    Files of deepmd-kit hold parameters under its names, and the model section as text.

    Raises
    ------
    CheckpointError
        When there is no such file, it is damaged, or it does not hold weights to train on.
    """
    if path.suffix != FROZEN:
        return read_checkpoint(path)
    if not path.is_file():
        raise CheckpointError(f"there is no frozen file {path}")
    try:
        with open_regular(path) as file:
            content = file.read()
        entry = weights_of(content)
        if entry is None:
            declare_operators(BORDER_OP, *TABULATED)
            program = load_program(content, torch.device("cpu"), trust=False)
            section = json.loads(program.get_model_def_script())
            weights = {f"model.{SINGLE}.{name}": x for name, x in program.state_dict().items()}
            entry = {**weights, "_extra_state": {"model_params": section}}
    except (ArchiveError, OSError, RuntimeError, AttributeError, ValueError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise CheckpointError(
            f"{path} is not a frozen file that training can start from: {reason}; give the "
            "checkpoint that it was made from"
        ) from error
    return {"model": entry}
