"""Checkpoints: deepmd-kit's own format with our state beside it, written in one piece.

A file holds ``{"model": …, "optimizer": …, "ema": …, "deepmd_muon": …}``. The first three are deepmd-kit's keys, so
that deepmd-kit tests, freezes and continues from the file; the last one is what an exact restart needs besides.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from deepmd_muon.files import make_folder_of, replace_link, whole_file, writing
from deepmd_muon.model.checkpoint_file import OWN_KEY

log = logging.getLogger(__name__)


@dataclasses.dataclass
class FileSeries:
    """The checkpoints of one run: ``prefix-N.pt``, the link ``prefix.pt`` and the text file ``checkpoint``.

    Attributes
    ----------
    prefix
        Path of the files without ``-N.pt``.
    keep
        How many are kept. Only files that this run wrote are ever deleted, the oldest first; those of a run that was
        restarted count as its own.
    written
        Names of the files of this run that still exist, oldest first.
    """

    prefix: Path
    keep: int
    written: list[str] = dataclasses.field(default_factory=list)

    @property
    def newest(self) -> Path | None:
        """The last checkpoint of this run."""
        return self.prefix.parent / self.written[-1] if self.written else None

    def save(self, step: int, content: Mapping[str, Any], *, write: bool = True) -> Path:
        """Write the checkpoint of `step` updates and bring link, text file and retention up to date.

        Parameters
        ----------
        step
            Updates done; the N of the name.
        content
            The keys of the file; the series adds its own list of files under ``deepmd_muon``.
        write
            False where another process writes the files: only the list is kept.
        """
        path = self.prefix.parent / f"{self.prefix.name}-{step}.pt"
        written = [name for name in self.written if name != path.name] + [path.name]
        if not write:
            self.written = written[-self.keep :]
            return path
        make_folder_of(path)
        own = {**content[OWN_KEY], "series": written}
        with whole_file(path) as file:
            torch.save({**content, OWN_KEY: own}, file)
        self.written = written
        replace_link(self.prefix.parent / f"{self.prefix.name}.pt", path.name)
        write_pointer(self.prefix.parent, path.name)
        while len(self.written) > self.keep:
            oldest = self.prefix.parent / self.written.pop(0)
            with writing(oldest):
                oldest.unlink(missing_ok=True)
        return path


def write_pointer(folder: Path, name: str) -> None:
    """Write deepmd-kit's text file ``checkpoint``, which names the newest one."""
    with whole_file(folder / "checkpoint") as file:
        file.write(f"{name}\n".encode())
