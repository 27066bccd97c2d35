"""Checkpoints as directories of torch.distributed.checkpoint: every rank writes its part while training goes on."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import secrets
import shutil
import warnings
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import async_save

from deepmd_muon.checkpoint_file.directory import CONTENT, SUFFIX, take_apart
from deepmd_muon.failures import failure_of
from deepmd_muon.files import hidden_name, named_file, replace_link, writing
from deepmd_muon.train.checkpoint.files import REMOVED, Series, write_pointer
from deepmd_muon.train.errors import TrainingError
from deepmd_muon.train.ranks.ranks import Ranks

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class _Write:
    """A checkpoint under way: its final name, its temporary place, and the outcome of writing."""

    name: str
    place: Path
    done: Future[Any]


class _NamedFiles(FileSystem):
    """Opens the parts of a directory; its errors show the final name."""

    def __init__(self, path: Path) -> None:
        self._path = path

    @contextlib.contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[Any]:
        """Open a part."""
        assert mode == "wb"
        with named_file(Path(path), self._path) as stream:
            yield stream


class DirectorySeries(Series):
    """The directories of one run: ``prefix-N.dcp``, and the link ``prefix.dcp`` to the newest.

    Only one is written at a time. It has a temporary name until all ranks have written and synced their parts, so a
    directory with the final name is complete, whenever the run ends. All ranks make a series, and call its
    methods, together. Where `pointer` is true, the text file ``checkpoint`` names the newest as well.
    """

    suffix = SUFFIX

    def __init__(self, prefix: Path, keep: int, ranks: Ranks, *, pointer: bool) -> None:
        super().__init__(prefix, keep)
        self._ranks = ranks
        self._pointer = pointer
        self._under_way: _Write | None = None
        self._token = ranks.gather_objects(secrets.token_hex(8))[0]
        self._group: dist.ProcessGroup | None = None
        if ranks.size > 1:
            # A group of their own: torch's writer thread must not mix its collectives with those of the steps.
            self._group = dist.new_group(backend="gloo", timeout=ranks.timeout)
            dist.barrier(self._group)
        else:
            warnings.filterwarnings(
                "ignore", "torch.distributed is", UserWarning, "torch.distributed.checkpoint"
            )

    @property
    def under_way(self) -> bool:
        """Whether a checkpoint is being written beside the steps."""
        return self._under_way is not None

    def save(self, step: int, content: Mapping[str, Any]) -> None:
        """Copy the checkpoint of `step` updates to the host and begin to write it.

        Waits for the one before. `content` is the checkpoint file's, DTensors not put together.
        """
        self.finish()
        parts, tensors = take_apart(content)
        name = f"{self.prefix.name}-{step}{SUFFIX}"
        place = self.prefix.parent / f".{self.prefix.name}-{step}.{self._token}{SUFFIX}"
        writer = FileSystemWriter(place)
        writer.fs = files = _NamedFiles(self.prefix.parent / name)
        try:
            if self._ranks.first:
                with writing(self.prefix.parent / name):
                    place.mkdir(parents=True, exist_ok=True)  # another rank may have been first
                with files.create_stream(place / CONTENT, "wb") as file:
                    torch.save(parts, file)
            done = async_save(
                tensors,
                storage_writer=writer,
                process_group=self._group,
                no_dist=self._group is None,
            )
        except BaseException:
            self._discard(place)
            raise
        assert isinstance(done, Future)  # the writer copies at once, so there is no second answer
        self._under_way = _Write(name, place, done)

    def poll(self) -> None:
        """Publish the checkpoint under way if it is complete."""
        if self._under_way is not None and self._under_way.done.done():
            self.finish()

    def finish(self) -> None:
        """Wait for the checkpoint under way, and publish it.

        Raises
        ------
        TrainingError
            When some rank could not write its part.
        """
        write, self._under_way = self._under_way, None
        if write is None:
            return
        try:
            write.done.result()
        except (CheckpointException, Exception) as error:  # torch's is not a subclass of Exception
            failures = getattr(error, "failures", {self._ranks.rank: (error, None)})
            found = "; ".join(
                f"rank {rank}: {failure_of(e) or f'{type(e).__name__}: {e}'}"
                for rank, (e, _) in failures.items()
            )
            self._discard(write.place)
            raise TrainingError(
                f"the checkpoint {write.name} could not be written: {found}"
            ) from error
        folder = self.prefix.parent
        if self._ranks.first:
            with writing(folder / write.name):
                self._remove(write.name)  # the same step of an earlier run
                write.place.rename(folder / write.name)
        self.written = [*(name for name in self.written if name != write.name), write.name]
        self.publish()
        if self._ranks.first:
            log.info("saved %s", folder / write.name)

    def publish(self) -> None:
        """Let link and text file name the newest directory, and delete surplus ones.

        A run that was killed after it had named its last directory, or could not write the text file, has not done so.
        """
        surplus, self.written = self.written[: -self.keep], self.written[-self.keep :]
        if self.newest is None or not self._ranks.first:
            return
        replace_link(self.prefix.with_name(f"{self.prefix.name}{SUFFIX}"), self.newest.name)
        if self._pointer:
            write_pointer(self.prefix.parent, self.newest.name)
        for name in surplus:
            self._remove(name)

    def _discard(self, place: Path) -> None:
        """Delete the files of a checkpoint that will not be complete: they may fill the disk."""
        if self._ranks.first:
            shutil.rmtree(place, ignore_errors=True)

    def _remove(self, name: str) -> None:
        """Delete a directory if it exists; it is renamed first, so that no half-deleted checkpoint remains."""
        removed = hidden_name(self.prefix.with_name(f"{self.prefix.name}-{REMOVED}{SUFFIX}"))
        try:
            (self.prefix.parent / name).rename(removed)
        except FileNotFoundError:
            return
        shutil.rmtree(removed, ignore_errors=True)
