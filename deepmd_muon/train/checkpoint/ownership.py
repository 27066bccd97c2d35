"""Lock the output folder: one run at a time, and never overwrite an earlier run's files."""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import re
import shutil
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from deepmd_muon.checkpoint_file.file import OWN_KEY
from deepmd_muon.failures import is_disk_failure
from deepmd_muon.files import (
    WriteError,
    is_special,
    leftovers_of,
    make_folder_of,
    refuse_clashes,
    regular_text,
    replace_link,
    whole_file,
    writing,
)
from deepmd_muon.train.checkpoint.files import REMOVED, write_pointer
from deepmd_muon.train.errors import TrainingError

if TYPE_CHECKING:
    from deepmd_muon.argcheck import Input
    from deepmd_muon.train.checkpoint.source import Source

log = logging.getLogger(__name__)

_NEW = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
_SUFFIXES = (".pt", ".dcp")
# A temporary file that several runs may write is left behind when it is older [s].
_LONGEST_SAVE = 3600.0


class RunFiles:
    """The files that a run writes, as its checked input and the command line name them."""

    def __init__(self, given: Input, output: str = "out.json", log_path: str | None = None) -> None:
        self._given, self._output, self._log_path = given, output, log_path
        self._training = given.settings.training
        self._prefix = Path(self._training.save_ckpt)
        validating = given.settings.validating
        self._validations = validating.full_val_file if validating.full_validation else None
        self._curve = self._training.disp_file if self._training.disp_training else None
        self._earlier_input = b""

    def check(self, checkpoint: str | None = None) -> None:
        """Refuse to write over the input, the data, the checkpoint of a run's start, or one output over another."""
        training = self._training
        outputs = {
            "the output (-o)": self._output,
            "-l": self._log_path,
            "training/jsonl_file": training.jsonl_file,
        }
        for branch in self._given.branches.values():
            outputs[f"{branch.data_path}/stat_file"] = branch.data.stat_file
        outputs["training/disp_file"] = self._curve
        if training.profiling:
            outputs["training/profiling_file"] = training.profiling_file
        # The text file that names the newest checkpoint.
        outputs["the run's file checkpoint"] = str(self._prefix.with_name("checkpoint"))
        outputs["validating/full_val_file"] = self._validations
        link = Path(f"{training.save_ckpt}.pt")
        if not link.is_symlink():  # a link is left from an earlier run
            outputs["training/save_ckpt"] = str(link)
        systems = {}
        for name, branch in self._given.branches.items():
            whose = f" of {name}" if self._given.multi_task else ""
            systems[f"the training data{whose}"] = branch.data.training_data.systems
            if branch.data.validation_data:
                systems[f"the validation data{whose}"] = branch.data.validation_data.systems
        inputs = {"the input": self._given.source, "the checkpoint": checkpoint}
        refuse_clashes(TrainingError, outputs, inputs, systems)

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Hold checkpoints and reports for the time of a `with` block; a TrainingError where another run holds them.

        The lock is the system's, which releases it however the process ends; a file beside each says who holds it.
        Delete temporary files that killed runs of the same names have left.
        """
        named = {
            "training/save_ckpt": self._prefix,
            "training/disp_file": self._curve,
            "training/jsonl_file": self._training.jsonl_file,
            "validating/full_val_file": self._validations,
            "validating/save_best_dir": self._given.settings.validating.best_prefix(
                self._training.save_ckpt
            ),
        }
        # All runs share the names of the best checkpoints: two in one folder would delete each other's. deepmd-kit's
        # text file names the newest checkpoint of a folder, whatever `save_ckpt` is.
        places = {path: setting for setting, one in named.items() for path in _files_of(one)}
        places |= {self._prefix.with_name("checkpoint"): "training/save_ckpt"}
        with contextlib.ExitStack() as stack:
            for path, setting in places.items():
                stack.enter_context(_lock(path, setting, self._given.source))
            self._remove_leftovers({_lock_of(path).name for path in places})
            if (output := Path(self._output)).is_file():
                self._earlier_input = output.read_bytes()
            yield

    def _remove_leftovers(self, mine: set[str]) -> None:
        """Delete temporary files of killed runs; `mine` are the names of this run's locks."""
        prefix = self._prefix
        # Of this prefix alone: others in the folder, such as prefix-2, may be writing theirs.
        step = rf"\.{re.escape(prefix.name)}(-([0-9]+|{REMOVED}))?"
        own = re.compile(rf"{step}\.[0-9a-f]{{16}}\.(pt|dcp)|{step}\.dcp")
        found = [path for path in _entries(prefix.parent) if own.fullmatch(path.name)]
        found += [left for path in _files_of(self._curve) for left in leftovers_of(path)]
        # Other runs may be writing these as well: they stay while another run has locks there, for an hour at most.
        named = [self._training.jsonl_file, self._validations, self._output, self._log_path]
        named += [branch.data.stat_file for branch in self._given.branches.values()]
        shared = [
            prefix.with_name("checkpoint"),
            prefix.with_name("try"),
            *(Path(name) for name in named if name),
        ]
        for rest in (left for path in shared for left in leftovers_of(path)):
            with contextlib.suppress(FileNotFoundError):  # its run has just renamed it
                old = time.time() - rest.lstat().st_mtime > _LONGEST_SAVE
                if old or {path.name for path in rest.parent.glob(".*.lock")} <= mine:
                    found.append(rest)
        for rest in found:
            with writing(rest):
                if rest.is_dir() and not rest.is_symlink():
                    shutil.rmtree(rest)
                else:
                    rest.unlink(missing_ok=True)
            log.info(
                "removed %s, which a run that was killed had begun to write or to delete", rest
            )

    def keep(self, source: Source | None, step: int, keep_best: Callable[[int], None]) -> None:
        """Give files that this run would overwrite a number: ``lcurve.out`` becomes ``lcurve.out.1``.

        A fresh run sets all files of an earlier one aside, ``model.ckpt-100.pt`` as ``model.ckpt.1-100.pt``; the first
        number that is free for all of them is taken. A run that continues `source` after `step` updates sets aside the
        reports of another run, or its own files of later steps. `keep_best` sets aside the best checkpoints after a
        step, -1 for all.
        """
        prefix = self._prefix
        reports = _not_empty(self._curve, self._training.jsonl_file, self._training.exported_path)
        every = [*reports, *_not_empty(self._validations)]
        saved: list[Path] = []
        if source is None:  # full validation keeps its file itself
            saved, told = _saved(prefix), "kept the files of an earlier run as %s"
        elif another := self._of_another_run(source):
            other, theirs = another
            reports = [path for path in every if str(path) in theirs]
            told = f"reports of the run with save_ckpt {other} are kept as %s"
            keep_best(-1)
        elif saved := self._later_than(source.path.resolve(), step):
            reports, told = every, f"this run goes back to step {step}: later files are kept as %s"
            keep_best(step)
        else:
            return
        if not saved and not reports:
            return
        number = _free_number(prefix, reports)
        renamed = _set_aside(prefix, saved, number)
        names = [*renamed.values()]
        if source is None and self._earlier_input:
            output = Path(self._output)
            names.append(f"{output.name}.{number}")
            with whole_file(output.with_name(names[-1])) as file:
                file.write(self._earlier_input)
        pointer = ""  # of deepmd-kit: a text file that names the newest checkpoint
        with contextlib.suppress(OSError):
            pointer = renamed.get(regular_text(prefix.with_name("checkpoint")).strip(), "")
        if source is not None and saved:
            pointer = source.path.resolve().name
            replace_link(prefix.with_name(f"{prefix.name}{source.path.resolve().suffix}"), pointer)
        if pointer:
            write_pointer(prefix.parent, pointer)
        for path in reports:
            names.append(f"{path.name}.{number}")
            if source is not None and saved:  # the run will cut the report at its first step
                with whole_file(path.with_name(names[-1])) as file, path.open("rb") as report:
                    shutil.copyfileobj(report, file)
            else:
                with writing(path):
                    path.rename(path.with_name(names[-1]))
        log.log(logging.WARNING if source else logging.INFO, told, ", ".join(names))

    def _later_than(self, source: Path, step: int) -> list[Path]:
        """Return the checkpoints beyond the one that is continued; only one of `save_ckpt` has later ones."""
        prefix = self._prefix
        if (
            source.parent != prefix.parent.resolve()
            or source.name.rpartition("-")[0] != prefix.name
        ):
            return []
        return [path for path in _saved(prefix) if int(path.stem.rpartition("-")[2]) > step]

    def _of_another_run(self, source: Source) -> tuple[Path, set[str | None]] | None:
        """Return `save_ckpt` and reports of another run, to which this one would add its rows; None for its own.

        Two runs with different `save_ckpt` and the same `disp_file` may follow each other in a folder. The normalised
        input that lies there says whose the reports are.
        """
        try:
            sections = json.loads(self._earlier_input)
            theirs = sections["training"]
            prefix, names = (
                Path(theirs["save_ckpt"]),
                {theirs.get("disp_file"), theirs.get("jsonl_file")},
            )
            names.add(sections.get("validating", {}).get("full_val_file"))
        except (ValueError, LookupError, TypeError, AttributeError):
            return None
        own = source.content.get(OWN_KEY)
        continued = json.loads(own["settings"])["training"].get("save_ckpt") if own else None
        continued = continued or str(source.path).rpartition("-")[0]
        own_prefixes = self._prefix.resolve(), Path(continued).resolve()
        return None if prefix.resolve() in own_prefixes else (prefix, names)


@contextlib.contextmanager
def _lock(path: Path, setting: str, input_path: str) -> Iterator[None]:
    place = _lock_of(path)
    try:
        make_folder_of(place)
        with writing(place):
            handle = _open_locked(place, path, setting)
    except WriteError as error:
        if is_disk_failure(error):
            raise
        what = "reports" if setting.endswith("file") else "checkpoints"
        raise TrainingError(
            f"{setting}: cannot write {what} to {path.parent}: {error.strerror}"
        ) from error
    try:
        started = time.strftime("%Y-%m-%d %H:%M:%S")
        who = f"process {os.getpid()} on {socket.gethostname()}, started {started} with {os.path.abspath(input_path)}"
        with writing(place):
            os.truncate(handle, 0)
            os.pwrite(handle, os.fsencode(who), 0)
        yield
    finally:
        with contextlib.suppress(OSError):  # the next run takes the file as it is
            place.unlink(missing_ok=True)  # before the lock is released, see _open_locked
        os.close(handle)


def _open_locked(place: Path, path: Path, setting: str) -> int:
    """Return the handle of the lock's file, locked."""
    while True:
        handle = os.open(place, _NEW, 0o666)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            who = os.pread(handle, 1000, 0).decode(errors="replace") or "another run"
            os.close(handle)
            raise TrainingError(
                f"{setting}: {path} is being written by {who}; wait until it ends, or give this run another "
                f"{'folder' if path.name == 'checkpoint' else 'name'}"
            ) from error
        except OSError as error:  # a file system without locks
            log.warning(
                "%s cannot be locked (%s): see that no other run writes it", path, error.strerror
            )
            return handle
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.stat(place), os.fstat(handle)):
                return handle
        os.close(handle)  # its holder has just removed it


def _lock_of(path: Path) -> Path:
    return path.with_name(f".{path.name}.lock")


def _saved(prefix: Path) -> list[Path]:
    """Return the checkpoints of a prefix."""
    own = re.compile(rf"{re.escape(prefix.name)}-[0-9]+({'|'.join(map(re.escape, _SUFFIXES))})")
    return sorted(path for path in _entries(prefix.parent) if own.fullmatch(path.name))


def _files_of(*named: str | Path | None) -> list[Path]:
    """Return the paths of those that are files, not devices."""
    return [Path(path) for path in named if path is not None and not is_special(Path(path))]


def _not_empty(*named: str | Path | None) -> list[Path]:
    return [path for path in _files_of(*named) if path.is_file() and path.stat().st_size > 0]


def _set_aside(prefix: Path, saved: Sequence[Path], number: int) -> dict[str, str]:
    """Rename checkpoints, and links that point at them; return the new names by the old ones."""
    renamed = {
        path.name: f"{prefix.name}.{number}{path.name[len(prefix.name) :]}" for path in saved
    }
    links = {suffix: prefix.with_name(prefix.name + suffix) for suffix in _SUFFIXES}
    targets = {suffix: os.readlink(link) for suffix, link in links.items() if link.is_symlink()}
    for old, new in renamed.items():
        with writing(prefix.parent / new):
            (prefix.parent / old).rename(prefix.parent / new)
    for suffix, target in targets.items():
        if target in renamed:
            replace_link(prefix.with_name(f"{prefix.name}.{number}{suffix}"), renamed[target])
            links[suffix].unlink()
    return renamed


def _free_number(prefix: Path, reports: Sequence[Path]) -> int:
    """Return the first number that no kept file has."""
    taken = re.compile(rf"{re.escape(prefix.name)}\.([0-9]+)[-.].*")
    numbers = [
        int(found[1]) for path in _entries(prefix.parent) if (found := taken.fullmatch(path.name))
    ]
    for report in reports:
        taken = re.compile(rf"{re.escape(report.name)}\.([0-9]+)")
        numbers += [
            int(found[1])
            for path in _entries(report.parent)
            if (found := taken.fullmatch(path.name))
        ]
    return max(numbers, default=0) + 1


def _entries(folder: Path) -> list[Path]:
    return list(folder.iterdir()) if folder.is_dir() else []
