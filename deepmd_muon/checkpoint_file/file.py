"""Read a checkpoint, ours or deepmd-kit's, without running any code in it."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from deepmd_muon.checkpoint_file.archive import ArchiveError, load_archive
from deepmd_muon.checkpoint_file.errors import CheckpointError
from deepmd_muon.files import open_regular

FORMAT_VERSION = 1
OWN_KEY = "deepmd_muon"
#: Ending of checkpoint directories, which earlier versions wrote.
DIRECTORY_SUFFIX = ".dcp"


def checkpoint_path(path: str | os.PathLike[str]) -> Path:
    """Return the path with ".pt" added if a user has omitted it, as users of deepmd-kit do."""
    path = Path(path)
    with_suffix = Path(f"{path}.pt")
    return with_suffix if with_suffix.is_file() and not path.is_file() else path


def read_checkpoint(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read a checkpoint onto the CPU; ".pt" may be omitted.

    Returns
    -------
    dict
        "model" is deepmd-kit's state dict, also if the file is that state dict itself. "optimizer",
        "ema" and `OWN_KEY` are there if the run wrote them.

    Raises
    ------
    CheckpointError
        If the file does not exist, is not a checkpoint, or was written by a later release.
    """
    path = checkpoint_path(path)
    if not path.is_file():
        refuse_directory(path)
        folder = ": it is a folder; give the checkpoint in it" if path.is_dir() else ""
        raise CheckpointError(f"there is no checkpoint {path}{folder}")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about files that are rejected below, with a reason
            with open_regular(path) as file:
                content = load_archive(file)
    except (ArchiveError, OSError) as error:
        reason = str(error)
        if isinstance(error, OSError):
            reason = (error.strerror or str(error)).lower()
        raise CheckpointError(f"{path} cannot be read as a checkpoint: {reason}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} is not a checkpoint: it holds a {type(content).__name__}")
    if "model" not in content and "_extra_state" in content:
        content = {"model": content}  # a bare state dict, as deepmd-kit's older releases wrote
    if not isinstance(content.get("model"), dict):
        raise CheckpointError(
            f"{path} is not a checkpoint: it has no state dict under 'model', "
            f"only {sorted(map(str, content))[:5]}"
        )
    _check_version(content.get(OWN_KEY, {}), path)
    return content


def refuse_directory(path: Path) -> None:
    """Refuse a checkpoint directory of an earlier version; its ending may be omitted.

    Raises
    ------
    CheckpointError
        If `path` names one.
    """
    for place in (path, Path(f"{path}{DIRECTORY_SUFFIX}")):
        if place.suffix == DIRECTORY_SUFFIX and place.is_dir():
            raise CheckpointError(
                f"{place} is a checkpoint directory, which revision 3adbaabc (2026-11-27), before "
                "0.1.0, is the last to read: continue there with training/checkpoint_format "
                '"file", and take the .pt file that it writes'
            )


def _check_version(own: Any, path: Path) -> None:
    """Refuse a later format; `own` is the content under `OWN_KEY`."""
    version = own.get("version", FORMAT_VERSION) if isinstance(own, dict) else None
    if type(version) is not int:  # a bool is an int, too
        raise CheckpointError(
            f"{path} is not a checkpoint: the content under {OWN_KEY!r} does not come from a run"
        )
    if version > FORMAT_VERSION:
        raise CheckpointError(
            f"{path} has format version {version}; "
            f"this release reads up to {FORMAT_VERSION}: update deepmd_muon"
        )


@contextmanager
def understood(path: str | os.PathLike[str]) -> Iterator[None]:
    """Report unexpected checkpoint contents as CheckpointError.

    Raises
    ------
    CheckpointError
        Naming the file. This package's own errors keep their class and name it, too.
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
            # Errors with fields build their text themselves, so only plain messages can be changed.
            if str(path) not in str(error) and error.args and str(error) == error.args[0]:
                error.args = (f"{path}: {error}", *error.args[1:])
            raise
        reason = (str(error) or "nothing more is known").splitlines()[0][:200]
        raise CheckpointError(
            f"{path} is a checkpoint, but its contents are not those that a run writes "
            f"({type(error).__name__}: {reason}); take another one"
        ) from error
