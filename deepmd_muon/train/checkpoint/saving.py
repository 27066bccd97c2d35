"""The checkpoints of a run in the forms that its input asks for."""

from __future__ import annotations

import contextlib
import logging
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deepmd_muon.checkpoint_file.file import OWN_KEY
from deepmd_muon.failures import is_disk_failure
from deepmd_muon.files import WriteError, make_folder_of, try_to_write
from deepmd_muon.train.checkpoint.files import FileSeries
from deepmd_muon.train.errors import TrainingError
from deepmd_muon.train.ranks.ranks import Ranks, gather_whole

if TYPE_CHECKING:
    from deepmd_muon.argcheck import RunSettings
    from deepmd_muon.train.checkpoint.directories import DirectorySeries

log = logging.getLogger(__name__)

# Longest time that a rank waits for rank 0 to name a directory that is complete [s].
_NAMING = 10.0


class Checkpoints:
    """Files, directories or both; every rank has one and calls its methods with the others.

    Rank 0 writes files, all write directories. A rank that will write but cannot is a TrainingError on all ranks.
    """

    def __init__(self, training: RunSettings, ranks: Ranks) -> None:
        prefix, keep = Path(training.save_ckpt), training.max_ckpt_keep
        ranks.run_on_rank0(
            "making the folder of checkpoints", lambda: _require_writable(prefix.parent)
        )
        self.files = FileSeries(prefix, keep)
        self.directories: DirectorySeries | None = None
        self._ranks = ranks
        self._saving = False
        self._always_files = training.checkpoint_format != "dcp"
        if training.checkpoint_format != "file":
            from deepmd_muon.train.checkpoint.directories import (
                DirectorySeries,  # brings torch.distributed.checkpoint along
            )

            with ranks.barrier("trying to write checkpoints"):
                problem = None  # on the machine of another rank, the folder that rank 0 has made may not be there
                try:
                    try_to_write(prefix.parent)
                except WriteError as error:
                    problem = f"on {socket.gethostname()}: {error.strerror}"
                found = [
                    f"rank {rank} {each}"
                    for rank, each in enumerate(ranks.gather_objects(problem))
                    if each
                ]
                if found:
                    raise TrainingError(
                        f"training/save_ckpt: cannot write checkpoints to {prefix.parent}: {'; '.join(found)}"
                    )
                self.directories = DirectorySeries(
                    prefix, keep, ranks, pointer=not self._always_files
                )

    @property
    def newest(self) -> Path | None:
        """The last complete checkpoint of this run."""
        return self.saved[-1] if self.saved else None

    @property
    def saved(self) -> list[Path]:
        """The complete checkpoints of this run that still exist, oldest first; of the same step, the directory last."""
        names = [*self.files.written, *(self.directories.written if self.directories else ())]
        return sorted((self.files.prefix.parent / name for name in names), key=_step)

    @property
    def writing(self) -> bool:
        """Whether a checkpoint is being written, also beside the steps."""
        return self._saving or (self.directories is not None and self.directories.under_way)

    def save(self, step: int, content: Callable[[], Mapping[str, Any]]) -> None:
        """Write the checkpoint of `step` updates; a directory is only begun.

        `content` returns the keys of the file, tensors laid out over the ranks as they are; lists of files are added.
        """
        with self.being_written():
            if self.directories:
                self.directories.finish()
            named = self._with_names(step, content())
            if self.directories:
                self.directories.save(step, named)
            if self._always_files:
                self._save_file(step, named)

    def complete(self, step: int, content: Callable[[], Mapping[str, Any]]) -> None:
        """Ensure that the last step of a run is saved, as a file too, and that no checkpoint is under way."""
        with self.being_written():
            self.finish()
            directory, file = (
                self.directories.newest if self.directories else None,
                self.files.newest,
            )
            if self.directories and (directory is None or _step(directory) != step):
                self.directories.save(step, self._with_names(step, content()))
            if file is None or _step(file) != step:
                self._save_file(step, self._with_names(step, content()))
            elif self._ranks.first:
                self.files.publish()  # a run that was killed after its last save may not have published it
            self.finish()
            if self.directories:
                self.directories.publish()  # the same; and the text file names the directory, not the file

    def poll(self) -> None:
        """Publish a directory whose writing has ended meanwhile."""
        if self.directories:
            with self.being_written():
                self.directories.poll()

    def finish(self) -> None:
        """Wait for the directory under way."""
        if self.directories:
            with self.being_written():
                self.directories.finish()

    def rescue(self, *, wait: bool) -> None:
        """Publish the directory under way when the run ends with an error, which matters more than an error here.

        Wait for it, unless another rank is lost, and with it perhaps its part.
        """
        try:
            self.finish() if wait else self.poll()
        except Exception as error:
            log.warning("%s", error)
        # Rank 0 gives a directory its name, and all ranks are to call the same one their last good checkpoint.
        newest, patience = self.newest, time.monotonic() + _NAMING
        while wait and newest is not None and not newest.exists() and time.monotonic() < patience:
            time.sleep(0.02)

    @contextlib.contextmanager
    def being_written(self) -> Iterator[None]:
        """Mark a `with` block as one in which a checkpoint is being written."""
        outer, self._saving = self._saving, True
        try:
            yield
        finally:
            self._saving = outer

    def adopt(self, own: Mapping[str, Any], source: Path) -> None:
        """Count the checkpoints of the run that is continued, which `own` lists under our key, as this run's own.

        Nothing happens unless this run saves in the same folder, or when `source` bears another name than it was saved
        under: the others' names may then be those of another run.
        """
        source, names = source.resolve(), {*own["series"], *own.get("directories", [])}
        folder = source.parent
        if folder != self.files.prefix.parent.resolve() or source.name not in names:
            return
        self.files.written = [name for name in own["series"] if (folder / name).exists()]
        if self.directories:
            self.directories.written = [
                name for name in own.get("directories", []) if (folder / name).exists()
            ]

    def _with_names(self, step: int, content: Mapping[str, Any]) -> dict[str, Any]:
        """Add the names of the checkpoints after this save, in both forms: a run may continue from either."""
        directories = self.directories.names_with(step) if self.directories else []
        own = {
            **content[OWN_KEY],
            "series": self.files.names_with(step),
            "directories": directories,
        }
        return {**content, OWN_KEY: own}

    def _save_file(self, step: int, content: Mapping[str, Any]) -> None:
        log.info("saved %s", self.files.save(step, gather_whole(content), write=self._ranks.first))


def _step(path: Path) -> int:
    """Return the N of prefix-N.pt."""
    return int(path.stem.rpartition("-")[2])


def _require_writable(folder: Path) -> None:
    """Make the folder of the checkpoints and write to it, so that a run does not fail at its first save."""
    try:
        make_folder_of(folder / "checkpoint")
        try_to_write(folder)
    except WriteError as error:
        if is_disk_failure(error):
            raise
        raise TrainingError(
            f"training/save_ckpt: cannot write checkpoints to {folder}: {error.strerror}"
        ) from error
