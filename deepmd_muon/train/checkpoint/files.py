"""Checkpoints: deepmd-kit's own format with our state beside it, written atomically.

A file holds ``{"model": …, "optimizer": …, "ema": …, "deepmd_muon": …}``. The first three are deepmd-kit's keys, so
that deepmd-kit tests, freezes and continues from the file; an exact restart also needs the last one.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import torch

from deepmd_muon.files import make_folder_of, replace_link, whole_file, writing

log = logging.getLogger(__name__)

REMOVED = "removed"
"""Stands for the step in the name of a checkpoint directory that is being deleted."""


class Series:
    """The checkpoints of one run under one prefix.

    Only those that this run wrote are ever deleted, the oldest first; those of a run that was restarted count as its
    own.

    Attributes
    ----------
    prefix
        Path of the checkpoints without ``-N.pt``.
    keep
        How many are kept.
    written
        Names of those of this run that still exist, oldest first.
    """

    suffix: ClassVar[str]

    def __init__(self, prefix: Path, keep: int) -> None:
        self.prefix = prefix
        self.keep = keep
        self.written: list[str] = []

    @property
    def newest(self) -> Path | None:
        """The last complete checkpoint of this run."""
        return self.prefix.parent / self.written[-1] if self.written else None

    def names_with(self, step: int) -> list[str]:
        """Return the names that exist when the checkpoint of `step` has been written, before surplus ones go."""
        name = f"{self.prefix.name}-{step}{self.suffix}"
        return [*(other for other in self.written if other != name), name]


class FileSeries(Series):
    """The checkpoints ``prefix-N.pt``, the link ``prefix.pt`` and the text file ``checkpoint``."""

    suffix = ".pt"

    def save(self, step: int, content: Mapping[str, Any], *, write: bool = True) -> Path:
        """Write the checkpoint of `step` updates and bring link, text file and retention up to date.

        Where another process writes the files (`write` is false), only the list is kept.
        """
        path = self.prefix.parent / f"{self.prefix.name}-{step}.pt"
        written = self.names_with(step)
        if not write:
            self.written = written[-self.keep :]
            return path
        make_folder_of(path)
        with whole_file(path) as file:
            torch.save(dict(content), file)
        self.written = written
        self.publish()
        return path

    def publish(self) -> None:
        """Let link and text file name the newest checkpoint, and delete surplus ones.

        A run that was killed after it had written its last checkpoint, or could not rename the link, has not done so.
        """
        if self.newest is None:
            return
        link = self.prefix.parent / f"{self.prefix.name}.pt"
        if not link.is_symlink() or os.readlink(link) != self.newest.name:
            replace_link(link, self.newest.name)
        write_pointer(self.prefix.parent, self.newest.name)
        while len(self.written) > self.keep:
            oldest = self.prefix.parent / self.written.pop(0)
            with writing(oldest):
                oldest.unlink(missing_ok=True)


def write_pointer(folder: Path, name: str) -> None:
    """Write deepmd-kit's text file ``checkpoint``, which names the newest one."""
    with whole_file(folder / "checkpoint") as file:
        file.write(os.fsencode(f"{name}\n"))
