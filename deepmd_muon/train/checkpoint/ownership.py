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
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from deepmd_muon.argcheck.training import MultiTaskTrainingSettings
from deepmd_muon.failures import is_disk_failure
from deepmd_muon.files import (
    WriteError,
    is_special,
    leftovers_of,
    make_folder_of,
    regular_text,
    replace_link,
    whole_file,
    writing,
)
from deepmd_muon.train.checkpoint.files import REMOVED, write_pointer
from deepmd_muon.train.errors import TrainingError

if TYPE_CHECKING:
    from deepmd_muon.argcheck import RunSettings

log = logging.getLogger(__name__)

_NEW = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
_SUFFIXES = (".pt", ".dcp")
# A temporary file that several runs may write is left behind when it is older [s].
_LONGEST_SAVE = 3600.0


@contextlib.contextmanager
def held(
    training: RunSettings, input_path: str, best: Path | None = None, validations: str | None = None
) -> Iterator[None]:
    """Hold the checkpoints, the best ones and the reports of a run for the time of a `with` block.

    The lock is the system's, which releases it however the process ends; a file beside each says who holds it.

    Parameters
    ----------
    training
        The input's section: `save_ckpt`, `disp_file` and `jsonl_file` count.
    input_path
        The input file, for the message to others.
    best
        Prefix of the best checkpoints, whose names all runs share: two in one folder would delete each other's.
    validations
        The file of full validations.

    Raises
    ------
    TrainingError
        When another run holds them.
    """
    with contextlib.ExitStack() as stack:
        for path, setting in _places(training, best, validations).items():
            stack.enter_context(_lock(path, setting, input_path))
        yield


def _places(training: RunSettings, best: Path | None, validations: str | None) -> dict[Path, str]:
    """Return what one run at a time may write, and the setting that names each."""
    prefix = Path(training.save_ckpt)
    named = {
        "training/save_ckpt": prefix,
        "training/disp_file": _curve(training),
        "training/jsonl_file": training.jsonl_file,
        "validating/full_val_file": validations,
        "validating/save_best_dir": best,
    }
    places = {Path(path): setting for setting, path in named.items() if path is not None and not is_special(Path(path))}
    # deepmd-kit's text file names the newest checkpoint of a folder, whatever `save_ckpt` is.
    return places | {prefix.with_name("checkpoint"): "training/save_ckpt"}


def _curve(training: RunSettings) -> Path | None:
    path = Path(training.disp_file)
    return path if training.disp_training and not is_special(path) else None


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
        raise TrainingError(f"{setting}: cannot write {what} to {path.parent}: {error.strerror}") from error
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
            log.warning("%s cannot be locked (%s): see that no other run writes it", path, error.strerror)
            return handle
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.stat(place), os.fstat(handle)):
                return handle
        os.close(handle)  # its holder has just removed it


def remove_leftovers(
    training: RunSettings,
    outputs: Sequence[str | None] = (),
    best: Path | None = None,
    validations: str | None = None,
) -> None:
    """Delete what runs of the same names that were killed while they wrote have left; call it while they are held.

    Parameters
    ----------
    training
        The input's section, which names the files.
    outputs
        Other files that the run writes whole: the normalised input, the log, files of statistics.
    best, validations
        As of `held`.
    """
    prefix, curve = Path(training.save_ckpt), _curve(training)
    # Of this prefix alone: others in the folder, such as prefix-2, may be writing theirs.
    step = rf"\.{re.escape(prefix.name)}(-([0-9]+|{REMOVED}))?"
    own = re.compile(rf"{step}\.[0-9a-f]{{16}}\.(pt|dcp)|{step}\.dcp")
    found = [path for path in _entries(prefix.parent) if own.fullmatch(path.name)]
    if curve is not None:
        found += leftovers_of(curve)
    # Other runs may be writing these as well.
    others = [Path(name) for name in (training.jsonl_file, validations, *outputs) if name is not None]
    shared = [prefix.with_name("checkpoint"), prefix.with_name("try"), *others]
    left = [path for place in shared for path in leftovers_of(place)]
    mine = {_lock_of(path).name for path in _places(training, best, validations)}
    found += [path for path in left if _age(path) > _LONGEST_SAVE or not _locks(path.parent) - mine]
    for rest in found:
        with writing(rest):
            if rest.is_dir() and not rest.is_symlink():
                shutil.rmtree(rest)
            else:
                rest.unlink(missing_ok=True)
        log.info("removed %s, which a run that was killed had begun to write or to delete", rest)


def _lock_of(path: Path) -> Path:
    return path.with_name(f".{path.name}.lock")


def _locks(folder: Path) -> set[str]:
    """Return the names of the locks in a folder: of runs that write there, or were killed."""
    return {path.name for path in folder.glob(".*.lock")}


def _age(path: Path) -> float:
    """Return how long ago a file was written [s]; 0 when it is gone."""
    try:
        return time.time() - path.lstat().st_mtime
    except FileNotFoundError:
        return 0.0


def keep_earlier(training: RunSettings, normalized: tuple[Path, bytes] | None = None) -> None:
    """Give the files of an earlier run of the same names a number, before a fresh run writes its own.

    ``lcurve.out`` becomes ``lcurve.out.1``, ``model.ckpt-100.pt`` becomes ``model.ckpt.1-100.pt``; the first number
    that is free for all of them is taken.

    Parameters
    ----------
    training
        The input's section, which names the files.
    normalized
        Place and earlier content of the normalised input, which the new run has written already.
    """
    prefix = Path(training.save_ckpt)
    saved, reports = _saved(prefix), _reports(training)
    written = _not_empty(reports)
    if not saved and not written:
        return
    number = _free_number(prefix, reports)
    names = [*_set_aside(prefix, saved, number), *(f"{path.name}.{number}" for path in written)]
    for path in written:
        with writing(path):
            path.rename(path.with_name(f"{path.name}.{number}"))
    if normalized is not None and normalized[1]:
        place = normalized[0].with_name(f"{normalized[0].name}.{number}")
        with whole_file(place) as file:
            file.write(normalized[1])
        names.append(place.name)
    log.info("kept the files of an earlier run as %s", ", ".join(names))


def keep_later(training: RunSettings, source: Path, step: int, validations: str | None = None) -> bool:
    """Give checkpoints beyond the one that a run continues a number: the run would overwrite them one by one.

    ``model.ckpt-100.pt`` becomes ``model.ckpt.1-100.pt``. The run will cut the reports at its first step, so they are
    copied to ``lcurve.out.1``.

    Parameters
    ----------
    training
        The input's section, which names the files.
    source
        The checkpoint that is continued. Only one of `save_ckpt` has later ones.
    step
        Updates done in it.
    validations
        The file of full validations.

    Returns
    -------
    bool
        Whether there were any.
    """
    prefix, source = Path(training.save_ckpt), source.resolve()
    mine = source.parent == prefix.parent.resolve() and source.name.rpartition("-")[0] == prefix.name
    later = [path for path in _saved(prefix) if int(path.stem.rpartition("-")[2]) > step] if mine else []
    if not later:
        return False
    written = _not_empty(_reports(training, validations))
    number = _free_number(prefix, written)
    names = _set_aside(prefix, later, number)
    replace_link(prefix.with_name(f"{prefix.name}{source.suffix}"), source.name)
    write_pointer(prefix.parent, source.name)
    for path in written:
        copy = path.with_name(f"{path.name}.{number}")
        with whole_file(copy) as file, path.open("rb") as report:
            shutil.copyfileobj(report, file)
        names.append(copy.name)
    log.warning("this run goes back to step %d: later files are kept as %s", step, ", ".join(names))
    return True


def keep_others(
    training: RunSettings, normalized: tuple[Path, bytes], continued: str, validations: str | None = None
) -> bool:
    """Give the reports of another run a number, before a run that continues would add its rows to them.

    Two runs with different `save_ckpt` and the same `disp_file` may follow each other in a folder. The normalised input
    that lies there says whose the reports are.

    Parameters
    ----------
    training
        The input's section, which names the files.
    normalized
        Place and earlier content of the normalised input.
    continued
        `save_ckpt` of the run that is continued, perhaps under another name.
    validations
        The file of full validations.

    Returns
    -------
    bool
        Whether another run was the last to write here.
    """
    try:
        sections = json.loads(normalized[1])
        theirs = sections["training"]
        prefix, names = Path(theirs["save_ckpt"]), {theirs.get("disp_file"), theirs.get("jsonl_file")}
        names.add(sections.get("validating", {}).get("full_val_file"))
    except (ValueError, LookupError, TypeError, AttributeError):
        return False
    if prefix.resolve() in (Path(training.save_ckpt).resolve(), Path(continued).resolve()):
        return False
    written = [path for path in _not_empty(_reports(training, validations)) if str(path) in names]
    number = _free_number(Path(training.save_ckpt), written)
    for path in written:
        with writing(path):
            path.rename(path.with_name(f"{path.name}.{number}"))
        log.warning("%s is that of the run with save_ckpt %s; it is kept as %s.%d", path, prefix, path, number)
    return True


def _saved(prefix: Path) -> list[Path]:
    """Return the checkpoints of a prefix."""
    own = re.compile(rf"{re.escape(prefix.name)}-[0-9]+({'|'.join(map(re.escape, _SUFFIXES))})")
    return sorted(path for path in _entries(prefix.parent) if own.fullmatch(path.name))


def _reports(training: RunSettings, validations: str | None = None) -> list[Path]:
    others = [Path(name) for name in (training.jsonl_file, validations) if name is not None]
    if exported := exported_path(training):
        others.append(exported)
    return [path for path in (_curve(training), *others) if path is not None and not is_special(path)]


def exported_path(training: RunSettings) -> Path | None:
    """Return the checkpoint of one branch that a run writes at its end; None where it writes none."""
    branch = training.export_branch if isinstance(training, MultiTaskTrainingSettings) else None
    return None if branch is None else Path(f"{training.save_ckpt}.{branch}.pt")


def _not_empty(reports: Sequence[Path]) -> list[Path]:
    return [path for path in reports if path.is_file() and path.stat().st_size > 0]


def _set_aside(prefix: Path, saved: Sequence[Path], number: int) -> list[str]:
    """Rename checkpoints, and what points at them; return the new names."""
    renamed = {path.name: f"{prefix.name}.{number}{path.name[len(prefix.name) :]}" for path in saved}
    links = {suffix: prefix.with_name(prefix.name + suffix) for suffix in _SUFFIXES}
    targets = {suffix: os.readlink(link) for suffix, link in links.items() if link.is_symlink()}
    for old, new in renamed.items():
        with writing(prefix.parent / new):
            (prefix.parent / old).rename(prefix.parent / new)
    for suffix, target in targets.items():
        if target in renamed:
            replace_link(prefix.with_name(f"{prefix.name}.{number}{suffix}"), renamed[target])
            links[suffix].unlink()
    _rename_in_pointer(prefix.parent, renamed)
    return list(renamed.values())


def _free_number(prefix: Path, reports: Sequence[Path]) -> int:
    """Return the first number that no kept file has."""
    taken = re.compile(rf"{re.escape(prefix.name)}\.([0-9]+)[-.].*")
    numbers = [int(found[1]) for path in _entries(prefix.parent) if (found := taken.fullmatch(path.name))]
    for report in reports:
        taken = re.compile(rf"{re.escape(report.name)}\.([0-9]+)")
        numbers += [int(found[1]) for path in _entries(report.parent) if (found := taken.fullmatch(path.name))]
    return max(numbers, default=0) + 1


def _rename_in_pointer(folder: Path, renamed: dict[str, str]) -> None:
    """Let the text file ``checkpoint`` name a kept checkpoint by its new name."""
    with contextlib.suppress(OSError):
        name = regular_text(folder / "checkpoint").strip()
        if name in renamed:
            write_pointer(folder, renamed[name])


def _entries(folder: Path) -> list[Path]:
    return list(folder.iterdir()) if folder.is_dir() else []
