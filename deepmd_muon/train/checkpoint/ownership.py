"""Lock a run's files, find the checkpoint it continues, set files of earlier runs aside."""

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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from deepmd_muon.checkpoint_file.errors import CheckpointError
from deepmd_muon.checkpoint_file.file import (
    DIRECTORY_SUFFIX,
    OWN_KEY,
    checkpoint_path,
    read_checkpoint,
    refuse_directory,
)
from deepmd_muon.failures import is_disk_failure
from deepmd_muon.files import (
    WriteError,
    make_folder_of,
    refuse_clashes,
    regular_text,
    replace_link,
    whole_file,
    writing,
)
from deepmd_muon.train.checkpoint.saving import write_pointer
from deepmd_muon.train.errors import TrainingError

if TYPE_CHECKING:
    from deepmd_muon.argcheck import Input
    from deepmd_muon.train.checkpoint.source import Source

log = logging.getLogger(__name__)

#: Values of --restart that stand for the newest checkpoint, if there is one.
AUTOMATIC = ("auto", "latest")

_NEW = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC


class _OtherRun(NamedTuple):
    """Another run in the folder, as its normalised input describes it."""

    prefix: Path
    reports: frozenset[str | None]

    @classmethod
    def of(cls, sections: Any) -> _OtherRun:
        """Read the names from an input, which may be anything."""
        training = sections["training"]
        return cls(
            prefix=Path(training["save_ckpt"]),
            reports=frozenset(
                [
                    training.get("disp_file"),
                    training.get("jsonl_file"),
                    sections.get("validating", {}).get("full_val_file"),
                ]
            ),
        )


class RunFiles:
    """The files that a run writes, as its checked input and the command line name them."""

    def __init__(
        self, run_input: Input, output: str = "out.json", log_path: str | None = None
    ) -> None:
        training = run_input.settings.training
        validating = run_input.settings.validating
        self._input = run_input
        self._training = training
        self._prefix = Path(training.save_ckpt)
        self._output = Path(output)
        self._log_path = log_path
        self._curve = training.disp_file if training.disp_training else None
        self._validations = validating.full_val_file if validating.full_validation else None
        self._best_prefix = validating.best_prefix(training.save_ckpt)
        self._earlier_input = b""

    def check(self, checkpoint: str | None = None) -> None:
        """Refuse to overwrite the input, the data, another output, or `checkpoint`.

        The run starts from this checkpoint; ".pt" may be omitted.
        """
        training = self._training
        outputs = {
            "the output (-o)": self._output,
            "-l": self._log_path,
            "training/disp_file": self._curve,
            "training/jsonl_file": training.jsonl_file,
            "training/profiling_file": training.profiling_file if training.profiling else None,
            "validating/full_val_file": self._validations,
            # deepmd-kit's text file that names the newest checkpoint
            "the run's file checkpoint": self._prefix.with_name("checkpoint"),
        }
        link = Path(f"{training.save_ckpt}.pt")
        if not link.is_symlink():  # a link is left from an earlier run
            outputs["training/save_ckpt"] = link
        systems = {}
        for name, branch in self._input.branches.items():
            outputs[f"{branch.data_path}/stat_file"] = branch.data.stat_file
            of_branch = f" of {name}" if self._input.multi_task else ""
            systems[f"the training data{of_branch}"] = branch.data.training_data.systems
            if branch.data.validation_data:
                systems[f"the validation data{of_branch}"] = branch.data.validation_data.systems
        inputs: dict[str, str | Path | None] = {"the input": self._input.source}
        if checkpoint is not None:
            inputs["the checkpoint"] = checkpoint_path(checkpoint)
        refuse_clashes(TrainingError, outputs, inputs, systems)

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Lock checkpoints and reports for the time of a `with` block.

        The operating system releases the locks however the process ends; a file next to each output
        says who holds it. Temporary checkpoints that a killed run has left are deleted.

        Raises
        ------
        TrainingError
            If another run holds a lock.
        """
        # Checkpoints of all runs in a folder share the text file `checkpoint`; best checkpoints of
        # all runs in a folder have the same names, so two runs would delete each other's.
        setting_of_file: dict[str | Path | None, str] = {
            self._prefix: "training/save_ckpt",
            self._curve: "training/disp_file",
            self._training.jsonl_file: "training/jsonl_file",
            self._validations: "validating/full_val_file",
            self._best_prefix: "validating/save_best_dir",
            self._prefix.with_name("checkpoint"): "training/save_ckpt",
        }
        with contextlib.ExitStack() as locks:
            for file, setting in setting_of_file.items():
                if file is not None:
                    locks.enter_context(_lock(Path(file), setting, self._input.source))
            self._remove_leftovers()
            if self._output.is_file():
                self._earlier_input = self._output.read_bytes()
            yield

    def _remove_leftovers(self) -> None:
        """Delete temporary checkpoints and links of killed runs of this prefix.

        Their names have a step, so no later write of the same name would remove them.
        """
        name = re.escape(self._prefix.name)
        temporary = re.compile(rf"\.{name}(-[0-9]+)?\.[0-9a-f]{{16}}\.pt")
        for path in _files_matching(temporary, self._prefix.parent):
            with writing(path):
                path.unlink(missing_ok=True)
            log.info("removed %s, which a killed run had begun to write", path)

    def keep(self, source: Source | None, step: int, keep_best: Callable[[int], None]) -> None:
        """Set aside what this run would overwrite: ``lcurve.out`` becomes ``lcurve.out.1``.

        One rule: checkpoints of later steps than the run begins with, and reports that would lose
        rows, take the first number that is free for all of them. A fresh run sets everything aside.
        A run that continues `source` after `step` updates sets aside what follows this step, and
        all reports of a run with another ``save_ckpt``.

        Parameters
        ----------
        source
            The checkpoint of --restart; None for a fresh run, which --init-model and --finetune
            begin, too.
        step
            Updates done.
        keep_best
            Sets the best checkpoints after a step aside, -1 for all.
        """
        reports = [self._curve, self._training.jsonl_file, self._training.exported_path]
        continues_reports = False
        if source is None:
            # Full validation sets its own file and best checkpoints aside.
            checkpoints = self._checkpoints_after(-1)
            message = "kept the files of an earlier run as %s"
        elif other_run := self._reports_of_another_run(source):
            checkpoints = []
            reports = [
                name for name in (*reports, self._validations) if str(name) in other_run.reports
            ]
            keep_best(-1)
            message = f"reports of the run with save_ckpt {other_run.prefix} are kept as %s"
        else:
            continued = source.path.resolve()
            same_folder = continued.parent == self._prefix.parent.resolve()
            same_name = continued.name.rpartition("-")[0] == self._prefix.name
            checkpoints = self._checkpoints_after(step) if same_folder and same_name else []
            if not checkpoints:
                return
            reports.append(self._validations)
            continues_reports = True
            keep_best(step)
            message = f"this run goes back to step {step}: later files are kept as %s"
        report_files = [Path(name) for name in reports if name is not None]
        report_files = [path for path in report_files if path.is_file() and path.stat().st_size]
        if not checkpoints and not report_files:
            return

        number = _free_number(self._prefix, report_files)
        new_names = self._number_checkpoints(checkpoints, number, source)
        for path in report_files:
            numbered = path.with_name(f"{path.name}.{number}")
            new_names.append(numbered.name)
            if continues_reports:  # the run will cut the report at its first step
                with whole_file(numbered) as copy, path.open("rb") as report:
                    shutil.copyfileobj(report, copy)
            else:
                with writing(path):
                    path.rename(numbered)
        if source is None and self._earlier_input:
            numbered = self._output.with_name(f"{self._output.name}.{number}")
            new_names.append(numbered.name)
            with whole_file(numbered) as file:
                file.write(self._earlier_input)
        log.log(logging.WARNING if source else logging.INFO, message, ", ".join(new_names))

    def _checkpoints_after(self, step: int) -> list[Path]:
        """Return the checkpoints of this prefix after a step, in the order of their names."""
        name = re.compile(rf"{re.escape(self._prefix.name)}-[0-9]+\.pt")
        checkpoints = sorted(_files_matching(name, self._prefix.parent))
        return [path for path in checkpoints if _step(path) > step]

    def _reports_of_another_run(self, source: Source) -> _OtherRun | None:
        """Return the run to whose reports this one would add its rows; None if they are its own.

        Two runs with different `save_ckpt` and the same `disp_file` may follow each other in a
        folder. The normalised input in the folder says which of them wrote the reports.
        """
        try:
            other_run = _OtherRun.of(json.loads(self._earlier_input))
        except (ValueError, LookupError, TypeError, AttributeError):  # not an input of ours
            return None
        ours = source.content.get(OWN_KEY)
        continued = json.loads(ours["settings"])["training"].get("save_ckpt") if ours else None
        continued = Path(continued or str(source.path).rpartition("-")[0])
        is_ours = other_run.prefix.resolve() in (self._prefix.resolve(), continued.resolve())
        return None if is_ours else other_run

    def _number_checkpoints(
        self, checkpoints: Sequence[Path], number: int, source: Source | None
    ) -> list[str]:
        """Rename checkpoints, the link and the pointer that name one; return the new names."""
        prefix = self._prefix
        link = prefix.with_name(f"{prefix.name}.pt")
        target = os.readlink(link) if link.is_symlink() else ""
        new_names = {
            path.name: f"{prefix.name}.{number}{path.name[len(prefix.name) :]}"
            for path in checkpoints
        }
        for old, new in new_names.items():
            with writing(prefix.parent / new):
                (prefix.parent / old).rename(prefix.parent / new)
        if target in new_names:
            replace_link(prefix.with_name(f"{prefix.name}.{number}.pt"), new_names[target])
            link.unlink()
        pointer = ""
        if checkpoints and source is not None:
            pointer = source.path.resolve().name
            replace_link(link, pointer)
        else:
            with contextlib.suppress(OSError):  # there is none
                text = regular_text(prefix.with_name("checkpoint"))
                pointer = new_names.get(text.strip(), "")
        if pointer:
            write_pointer(prefix.parent, pointer)
        return list(new_names.values())


# ----- locks -------------------------------------------------------------------------------------


@contextlib.contextmanager
def _lock(path: Path, setting: str, input_path: str) -> Iterator[None]:
    """Hold the lock of an output, in the file ``.NAME.lock`` next to it."""
    place = path.with_name(f".{path.name}.lock")
    try:
        make_folder_of(place)
        with writing(place):
            handle = _open_locked(place, path, setting)
    except WriteError as error:
        if is_disk_failure(error):
            raise
        kind = "reports" if setting.endswith("file") else "checkpoints"
        raise TrainingError(
            f"{setting}: cannot write {kind} to {path.parent}: {error.strerror}"
        ) from error
    try:
        started = time.strftime("%Y-%m-%d %H:%M:%S")
        holder = (
            f"process {os.getpid()} on {socket.gethostname()}, "
            f"started {started} with {os.path.abspath(input_path)}"
        )
        with writing(place):
            os.truncate(handle, 0)
            os.pwrite(handle, os.fsencode(holder), 0)
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
            holder = os.pread(handle, 1000, 0).decode(errors="replace") or "another run"
            os.close(handle)
            raise TrainingError(
                f"{setting}: {path} is being written by {holder}; wait until it ends, "
                f"or give this run another {'folder' if path.name == 'checkpoint' else 'name'}"
            ) from error
        except OSError as error:  # a file system without locks
            log.warning(
                "%s cannot be locked (%s): see that no other run writes it", path, error.strerror
            )
            return handle
        # The holder before may have removed the file between opening and locking: then this lock
        # is on a file that no other run can find.
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.stat(place), os.fstat(handle)):
                return handle
        os.close(handle)


# ----- the newest checkpoint ---------------------------------------------------------------------


def continued_by(restart: str | None, save_ckpt: str) -> str | None:
    """Return the checkpoint that a run with ``--restart`` continues; None if it starts afresh.

    The link of the prefix stands for the newest checkpoint: a run that was killed, or met a full
    disk, may have written it but not linked it. All other paths stand for themselves.
    """
    if restart is None:
        return None
    if restart in AUTOMATIC:
        return newest_checkpoint(save_ckpt)
    path = checkpoint_path(restart)
    link = Path(f"{save_ckpt}.pt")
    if not path.is_symlink() or path.absolute() != link.absolute():
        return restart
    newest = newest_checkpoint(save_ckpt)
    return newest if newest is not None and _step(Path(newest)) > _step(path) else restart


def newest_checkpoint(save_ckpt: str) -> str | None:
    """Return the newest checkpoint of a prefix, or None.

    The link names it. A run that was killed between writing a checkpoint and linking it has left a
    later one, which lists the linked one among those before it. A later checkpoint of a run that
    was given up does not.

    Raises
    ------
    CheckpointError
        If the newest is a checkpoint directory of an earlier version.
    """
    prefix = Path(save_ckpt)
    link = Path(f"{prefix}.pt")
    linked = link if link.exists() else None
    directory = Path(f"{prefix}{DIRECTORY_SUFFIX}")
    if directory.exists() and (linked is None or _step(directory) > _step(linked)):
        refuse_directory(directory)
    name = re.compile(rf"{re.escape(prefix.name)}-[0-9]+\.pt")
    files = _files_matching(name, prefix.parent)
    unlinked = [path for path in files if path.is_file() and not path.is_symlink()]
    if linked is not None:
        unlinked = [path for path in unlinked if _step(path) > _step(linked)]
    for path in sorted(unlinked, key=_step, reverse=True):
        if linked is None or linked.resolve().name in _series_of(path):
            return str(path)
    if linked is None:
        log.info("there is no %s.pt: starting afresh", prefix)
        return None
    return str(linked)


def _series_of(path: Path) -> Sequence[str]:
    """Return the names of the checkpoints that existed when one was written."""
    try:
        ours = read_checkpoint(path).get(OWN_KEY, {})
    except CheckpointError as error:
        log.warning("%s", error)
        return ()
    series: Sequence[str] = ours.get("series", ())
    return series


def newest_finite(saved: Sequence[Path], continued: Path | None) -> Path | None:
    """Return the last checkpoint whose numbers are finite; `continued` if there is none.

    The newest may hold the weights that made a loss NaN, or moments that make weights NaN.
    `continued`, the checkpoint that the run went on from, was examined when it was read. `saved` is
    in order, oldest first.
    """
    for path in reversed(saved):
        try:
            content = read_checkpoint(path)
        except CheckpointError as error:
            log.warning("%s", error)
            continue
        not_finite = [name for name, x in _tensors_in(content) if not bool(torch.isfinite(x).all())]
        if not not_finite:
            return path
        log.warning("%s holds numbers that are not finite (%s)", path, ", ".join(not_finite[:3]))
    return continued


def _tensors_in(node: Any, name: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors in nested dicts and lists with the keys that lead to them."""
    if isinstance(node, torch.Tensor):
        yield name, node
        return
    children: Iterable[tuple[Any, Any]] = ()
    if isinstance(node, Mapping):
        children = node.items()
    elif isinstance(node, list):
        children = enumerate(node)
    for key, child in children:
        yield from _tensors_in(child, f"{name}/{key}" if name else str(key))


# ----- names of files ----------------------------------------------------------------------------


def _step(path: Path) -> int:
    """Return the N of prefix-N.pt, of a link that of its target; 0 for other names."""
    name = re.search(r"-(\d+)$", path.resolve().stem)
    return int(name[1]) if name else 0


def _free_number(prefix: Path, reports: Sequence[Path]) -> int:
    """Return the first number above those of all files that were set aside before."""
    numbered = re.compile(rf"{re.escape(prefix.name)}\.([0-9]+)[-.].*")
    numbers = _numbers_of(numbered, prefix.parent)
    for report in reports:
        numbered = re.compile(rf"{re.escape(report.name)}\.([0-9]+)")
        numbers += _numbers_of(numbered, report.parent)
    return max(numbers, default=0) + 1


def _numbers_of(pattern: re.Pattern[str], folder: Path) -> list[int]:
    """Return the number in the name of each file that matches."""
    matches = (pattern.fullmatch(path.name) for path in _files_matching(pattern, folder))
    return [int(match[1]) for match in matches if match]


def _files_matching(pattern: re.Pattern[str], folder: Path) -> list[Path]:
    """Return the entries of a folder whose whole names match, in any order."""
    if not folder.is_dir():
        return []
    return [path for path in folder.iterdir() if pattern.fullmatch(path.name)]
