"""Reading checkpoints: files and directories, ours and deepmd-kit's."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from deepmd_muon.model import CheckpointFileError, checkpoint_directory
from deepmd_muon.model.checkpoint_directory import READ_ERRORS
from deepmd_muon.model.checkpoint_file import read_checkpoint
from deepmd_muon.train.errors import CheckpointError


def read(path: str | os.PathLike[str], leave: Collection[str] = ()) -> dict[str, Any]:
    """Read a checkpoint of ours or of deepmd-kit onto the CPU, see `read_checkpoint`; nothing in it is executed.

    Raises
    ------
    CheckpointError
        When the file does not exist, or is not a checkpoint.
    """
    try:
        return read_checkpoint(path, leave)
    except CheckpointFileError as error:
        raise CheckpointError(str(error)) from error


def read_into(path: Path, targets: Mapping[tuple[str | int, ...], Tensor]) -> None:
    """Read tensors of a directory, see `checkpoint_directory.read_into`.

    Raises
    ------
    CheckpointError
        When the directory is incomplete or damaged.
    """
    try:
        checkpoint_directory.read_into(path, targets)
    except READ_ERRORS as error:
        raise CheckpointError(f"{path} cannot be read as a checkpoint: {str(error).splitlines()[0]}") from error
