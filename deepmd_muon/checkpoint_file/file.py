"""Read a checkpoint, ours or deepmd-kit's, without running any code in it."""

from __future__ import annotations

import os
import warnings
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from deepmd_muon.checkpoint_file.archive import load_archive
from deepmd_muon.checkpoint_file.directory import READ_ERRORS, SUFFIX, is_directory, read_directory
from deepmd_muon.checkpoint_file.errors import CheckpointError
from deepmd_muon.files import open_regular

FORMAT_VERSION = 1
OWN_KEY = "deepmd_muon"


def checkpoint_path(path: str | os.PathLike[str]) -> Path:
    """Return the path with ".pt" or ".dcp" added if a user has omitted it, as users of deepmd-kit do."""
    path = Path(path)
    file, directory = (Path(f"{path}{suffix}") for suffix in (".pt", SUFFIX))
    if path.is_file() or is_directory(path):
        return path
    return file if file.is_file() else directory if is_directory(directory) else path


def read_checkpoint(path: str | os.PathLike[str], leave: Collection[str] = ()) -> dict[str, Any]:
    """Read a checkpoint onto the CPU.

    Parameters
    ----------
    path
        The file, or a directory of torch.distributed.checkpoint that training wrote; ".pt" or ".dcp" may be left out.
    leave
        Keys whose tensors are not read from a directory, see `read_directory`; a file is always read whole.

    Returns
    -------
    dict
        "model" is deepmd-kit's state dict, also when the file is that state dict itself; "optimizer", "ema" and
        `OWN_KEY` are there when the run wrote them.

    Raises
    ------
    CheckpointError
        When the file does not exist, is not a checkpoint, or was written by a later release.
    """
    path = checkpoint_path(path)
    parted = is_directory(path)
    if not path.is_file() and not parted:
        folder = ": it is a folder" + (
            ", and its checkpoint is incomplete"
            if path.suffix == SUFFIX
            else "; give the checkpoint in it"
        )
        raise CheckpointError(f"there is no checkpoint {path}" + (folder if path.is_dir() else ""))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about files that are rejected below, with a reason
            if parted:
                content = read_directory(path, leave)
            else:
                with open_regular(path) as file:
                    content = load_archive(file)
    except READ_ERRORS as error:
        reason = (str(error) or type(error).__name__).splitlines()[0]
        if isinstance(error, OSError):
            reason = (error.strerror or str(error)).lower()
        raise CheckpointError(f"{path} cannot be read as a checkpoint: {reason}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} is not a checkpoint: it holds a {type(content).__name__}")
    if "model" not in content and "_extra_state" in content:
        content = {"model": content}  # a bare state dict, as deepmd-kit's older releases wrote
    if not isinstance(content.get("model"), dict):
        raise CheckpointError(
            f"{path} is not a checkpoint: it has no state dict under 'model', only {sorted(map(str, content))[:5]}"
        )
    own = content.get(OWN_KEY, {})
    version = own.get("version", FORMAT_VERSION) if isinstance(own, dict) else None
    if type(version) is not int:
        raise CheckpointError(
            f"{path} is not a checkpoint: the content under {OWN_KEY!r} does not come from a run"
        )
    if version > FORMAT_VERSION:
        raise CheckpointError(
            f"{path} has format version {version}; this release reads up to {FORMAT_VERSION}: update deepmd_muon"
        )
    return content


@contextmanager
def understood(path: str | os.PathLike[str]) -> Iterator[None]:
    """Report unexpected checkpoint contents as CheckpointError.

    Raises
    ------
    CheckpointError
        Naming the file; this package's own errors keep their class and name it too.
    """
    try:
        yield
    except (
        LookupError,
        TypeError,
        ValueError,
        AttributeError,
        RuntimeError,
        ArithmeticError,
        MemoryError,
    ) as error:
        if type(error).__module__.startswith("deepmd_muon"):
            if str(path) not in str(error) and error.args and str(error) == error.args[0]:
                error.args = (f"{path}: {error}", *error.args[1:])
            raise
        found = (str(error) or "nothing more is known").splitlines()[0][:200]
        raise CheckpointError(
            f"{path} is a checkpoint, but its contents are not those that a run writes "
            f"({type(error).__name__}: {found}); take another one"
        ) from error
