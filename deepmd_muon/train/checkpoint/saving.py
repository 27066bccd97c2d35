"""Write the checkpoints of a run: deepmd-kit's own format with our state added, written atomically.

A file holds ``{"model": …, "optimizer": …, "ema": …, "deepmd_muon": …}``. The first three keys are
deepmd-kit's, so deepmd-kit tests, freezes and continues from the file. An exact restart also needs
the last one.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from deepmd_muon.checkpoint_file.file import OWN_KEY
from deepmd_muon.failures import is_disk_failure
from deepmd_muon.files import (
    WriteError,
    make_folder_of,
    replace_link,
    try_to_write,
    whole_file,
    writing,
)
from deepmd_muon.train.errors import TrainingError
from deepmd_muon.train.ranks.ranks import Ranks, gather_whole

if TYPE_CHECKING:
    from deepmd_muon.argcheck import RunSettings

log = logging.getLogger(__name__)


class Checkpoints:
    """The checkpoints ``prefix-N.pt`` of a run, the link ``prefix.pt``, the file ``checkpoint``.

    Every rank has one and calls its methods together with the others; rank 0 writes. Only files
    that this run wrote are ever deleted, the oldest first. Files of a run that this one continues
    count as its own.

    Attributes
    ----------
    prefix
        Path of the checkpoints without ``-N.pt``.
    written
        Names of those of this run that still exist, oldest first.
    is_saving
        Whether a checkpoint is being written.
    """

    def __init__(self, training: RunSettings, ranks: Ranks) -> None:
        self.prefix = Path(training.save_ckpt)
        self.written: list[str] = []  # on all ranks: all name the same last one in an error
        self._keep = training.max_ckpt_keep
        self._ranks = ranks
        self.is_saving = False
        ranks.run_on_rank0("making the folder of checkpoints", self._require_writable)

    def _require_writable(self) -> None:
        """Make the folder and write to it, so that a run does not fail at its first save."""
        folder = self.prefix.parent
        try:
            make_folder_of(self.prefix)
            try_to_write(folder)
        except WriteError as error:
            if is_disk_failure(error):
                raise
            raise TrainingError(
                f"training/save_ckpt: cannot write checkpoints to {folder}: {error.strerror}"
            ) from error

    @property
    def saved(self) -> list[Path]:
        """The checkpoints of this run that still exist, oldest first."""
        return [self.prefix.parent / name for name in self.written]

    @property
    def newest(self) -> Path | None:
        """The last checkpoint of this run."""
        return self.saved[-1] if self.written else None

    @contextlib.contextmanager
    def being_written(self) -> Iterator[None]:
        """Mark a `with` block as one in which a checkpoint is being written."""
        outer = self.is_saving
        self.is_saving = True
        try:
            yield
        finally:
            self.is_saving = outer

    def save(self, step: int, content: Callable[[], Mapping[str, Any]]) -> None:
        """Write the checkpoint of `step` updates, and update link, text file and retention.

        `content` returns the keys of the file, tensors laid out over the ranks as they are. The
        list of the run's checkpoints is added to it.
        """
        with self.being_written():
            path = self._path_of(step)
            names = [name for name in self.written if name != path.name] + [path.name]
            laid_out = dict(content())
            laid_out = {**laid_out, OWN_KEY: {**laid_out[OWN_KEY], "series": names}}
            with self._ranks.waiting():
                gathered = gather_whole(laid_out)  # a collective of all ranks
                if self._ranks.size > 1 and self._ranks.device.type == "cuda":
                    torch.cuda.synchronize(self._ranks.device)  # not in `torch.save`
            if self._ranks.first:
                make_folder_of(path)  # it may have been deleted since the start
                with whole_file(path) as file:
                    torch.save(gathered, file)
            # Only now: if the file cannot be written, the checkpoint before is still the newest.
            self.written = names
            self._publish()
            log.info("saved %s", path)

    def complete(self, step: int, content: Callable[[], Mapping[str, Any]]) -> None:
        """Save the last step of a run unless it is saved already."""
        if self.newest != self._path_of(step):
            self.save(step, content)
        else:
            with self.being_written():
                self._publish()  # a killed run that this one continues may not have done so

    def _path_of(self, step: int) -> Path:
        return self.prefix.parent / f"{self.prefix.name}-{step}.pt"

    def _publish(self) -> None:
        """Let link and text file name the newest checkpoint, and delete surplus ones."""
        surplus = self.written[: -self._keep]
        if self._ranks.first:
            newest = self.written[-1]
            link = self.prefix.parent / f"{self.prefix.name}.pt"
            if not link.is_symlink() or os.readlink(link) != newest:
                replace_link(link, newest)
            write_pointer(self.prefix.parent, newest)
            for name in surplus:
                oldest = self.prefix.parent / name
                with writing(oldest):
                    oldest.unlink(missing_ok=True)
        self.written = self.written[-self._keep :]

    def adopt(self, ours: Mapping[str, Any], path: Path) -> None:
        """Count the checkpoints of the run that is continued as this run's own.

        `ours` lists them under our key of the checkpoint `path`. If `path` is in another folder
        than this run's, or has been renamed, the listed names may belong to another run: then
        nothing happens.
        """
        path = path.resolve()
        folder = path.parent
        if folder == self.prefix.parent.resolve() and path.name in ours["series"]:
            self.written = [name for name in ours["series"] if (folder / name).exists()]


def write_pointer(folder: Path, name: str) -> None:
    """Write deepmd-kit's text file ``checkpoint``, which names the newest one."""
    with whole_file(folder / "checkpoint") as file:
        file.write(os.fsencode(f"{name}\n"))
