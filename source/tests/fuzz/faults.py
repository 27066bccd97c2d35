"""Let the calls of a training to the file system fail one by one, and compare a restart with an undisturbed run.

    python source/tests/fuzz/faults.py --every 10 file best

A case is a training in a new folder in which one call fails, or that call and all that follow, as when a disk is gone
or the process is killed. It must end with status 0, or with another one and one message. What `--restart auto` and
`--restart model.ckpt` give afterwards must be bitwise what an undisturbed run gives, and no temporary file may be left.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import functools
import io
import json
import logging
import os
import re
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from unittest import mock

import torch
from kills import FORMS, KillError, Kind, result, same, whole_checkpoints, write_input

from deepmd_muon import files
from deepmd_muon.cli.main import main as dp

#: Calls that fail, and which of their arguments is the path.
OPERATIONS = {"open": 0, "fsync": 0, "replace": 1, "rename": 1, "symlink": 1, "unlink": 0, "mkdir": 0, "rmdir": 0}
OPERATIONS |= {"truncate": 0, "pwrite": 0}
ERRORS = ("ENOSPC", "EACCES", "ESTALE", "EIO", "EINTR")
#: Errors of one call, and of all calls from one on.
FAULTS = tuple(error + lasting for lasting in ("", " lasting") for error in ERRORS)
#: What is trained: a form of checkpoints, or files with best checkpoints and full validation beside them.
KINDS = (*FORMS, "best")


class FaultError(AssertionError):
    """A call that failed has lost, changed or left something."""


@dataclass
class Disk:
    """Count the calls to the file system that name a folder's files, and let one of them fail.

    Attributes
    ----------
    folder
        Where the files are.
    fail_at
        1-based number of the call that fails; 0 for none.
    fault
        Of `FAULTS`.
    calls
        The calls so far, in words.
    """

    folder: Path
    fail_at: int = 0
    fault: str = "EIO"
    calls: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def in_use(self) -> Iterator[None]:
        """Stand between Python and the system in a `with` block."""
        with contextlib.ExitStack() as stack:
            for name, place in OPERATIONS.items():
                stack.enter_context(mock.patch.object(os, name, self._counted(name, place, getattr(os, name))))
            written = files._NamedFile.write

            def write(file: files._NamedFile, data: object) -> int:
                try:
                    with files.writing(file._path):
                        self._count("write", file.fileno())
                except files.WriteError as error:
                    file.failure = error
                    raise
                return written(file, data)

            stack.enter_context(mock.patch.object(files._NamedFile, "write", write))
            yield

    def _counted(self, name: str, place: int, original: Callable) -> Callable:
        @functools.wraps(original)
        def call(*args: object, **options: object) -> object:
            self._count(name, args[place])
            return original(*args, **options)

        return call

    def _count(self, name: str, path: object) -> None:
        place = os.readlink(f"/proc/self/fd/{path}") if isinstance(path, int) else os.path.abspath(os.fsdecode(path))
        if not place.startswith(f"{self.folder}{os.sep}"):
            return
        call = f"{name} {re.sub(r'[.][0-9a-f]{16}', '.*', os.path.relpath(place, self.folder))}"
        with self._lock:  # a directory is written by a thread of torch
            again = name == "write" and call == self.calls[-1]  # a row of writes counts as one
            self.calls += [] if again else [call]
            done, (error, lasting, _) = len(self.calls), self.fault.partition(" ")
        # Python repeats a write after EINTR until it succeeds, so that only its first call may fail.
        lasts = lasting and not (again and error == "EINTR")
        if (done == self.fail_at and not again) or (lasts and done >= self.fail_at > 0):
            number = getattr(errno, error)
            raise OSError(number, os.strerror(number), place)


def prepare(folder: Path, kind: str) -> None:
    """Write data and input of a training."""
    write_input(folder, Kind("file" if kind == "best" else kind, 1))
    if kind == "best":
        path = folder / "run/input.json"
        content = json.loads(path.read_text())
        content["training"] |= {"validation_data": {"systems": ["../data"]}, "jsonl_file": "log.jsonl"}
        content["validating"] = {"full_validation": True, "full_val_start": 0, "max_best_ckpt": 2}
        content["validating"] |= {"validation_freq": 1, "validation_metric": "E:MAE"}
        path.write_text(json.dumps(content))


def train(folder: Path, restart: str, disk: Disk | None = None) -> tuple[int, str]:
    """Start or continue the training of a folder in this process; return its status and what it said."""
    said = io.StringIO()
    before, threads = Path.cwd(), torch.get_num_threads()
    logger = logging.getLogger("deepmd_muon")
    try:
        os.chdir(folder / "run")
        torch.set_num_threads(1)
        with (
            mock.patch.dict(os.environ, {"DEVICE": "cpu"}),
            contextlib.redirect_stderr(said),
            disk.in_use() if disk else contextlib.nullcontext(),
        ):
            words = ["train", "input.json", "--restart", restart, "--skip-neighbor-stat", "-l", "train.log"]
            status = dp(words)
    finally:
        os.chdir(before)
        torch.set_num_threads(threads)
        for handler in [found for found in logger.handlers if getattr(found, "_deepmd_muon", False)]:
            logger.removeHandler(handler)
            handler.close()
    return status, said.getvalue()


def outcome(run: Path) -> dict:
    """Return what must not depend on faults: checkpoint, learning curve, validation and the names of the files."""
    names = sorted(path.name for path in run.iterdir())
    links = {path.name: os.readlink(path) for path in run.iterdir() if path.is_symlink()}
    texts = {name: (run / name).read_text() for name in ("checkpoint", "lcurve.out", "val.log") if name in names}
    best = {path.name: torch.load(path, weights_only=True)["model"] for path in run.glob("best.ckpt*")}
    return {"result": result(run), "best": best, "names": names, "links": links, **texts}


def try_fault(folder: Path, kind: str, number: int, fault: str, undisturbed: dict) -> None:
    """Let a call of a training fail, continue the training, and check all that is promised.

    Raises
    ------
    FaultError
        When something is lost, damaged, left over or different.
    """
    prepare(folder, kind)
    status, said = train(folder, "auto", Disk(folder / "run", number, fault))
    _require("Traceback" not in said, f"a traceback: {said}")
    messages = [line for line in said.splitlines() if line.startswith("dp train: ")]
    _require(len(messages) == bool(status), f"status {status} with {len(messages)} messages: {said}")
    saved = whole_checkpoints(folder / "run")
    if saved and status == 1:
        named = [path for path in saved.values() if f"{path.stem}." in "".join(messages)]
        _require(bool(named), f"the message names no checkpoint: {messages}")
    for restart in ("auto", "model.ckpt"):
        again = folder.with_name(f"{folder.name}-{restart}")
        shutil.copytree(folder, again, symlinks=True)
        status, said = train(again, restart)
        if restart == "model.ckpt" and status == 2 and "there is no checkpoint" in said:
            _require(not saved or not list((folder / "run").glob("model.ckpt.*")), said)
            continue
        _require(status == 0, f"--restart {restart} ended with {status}: {said}")
        if not saved:  # the second run is a new one, which keeps the reports of the first
            for path in [*(again / "run").glob("*.1"), *(again / "run").glob("best.ckpt.1-*")]:
                path.unlink()
        found = outcome(again / "run")
        different = [key for key in undisturbed if not same(found[key], undisturbed[key])]
        show = {key: (found[key], undisturbed[key]) for key in different if key not in ("result", "best")}
        _require(not different, f"--restart {restart} gives other {different}: {show}")
    for path in folder.parent.glob(f"{folder.name}*"):
        shutil.rmtree(path)


def _require(holds: bool, otherwise: str) -> None:
    if not holds:
        raise FaultError(otherwise)


def run_faults(
    place: Path, kind: str, every: int = 1, faults: tuple[str, ...] = FAULTS, only: str = ""
) -> tuple[int, list[str]]:
    """Let calls fail one by one, each with the next of the faults; return their number and all failures.

    Parameters
    ----------
    place
        An empty folder.
    kind
        Of `KINDS`.
    every
        Distance of the calls.
    faults
        Of `FAULTS`.
    only
        Regular expression of the calls.
    """
    prepare(place / "undisturbed", kind)
    disk = Disk(place / "undisturbed/run")
    status, said = train(place / "undisturbed", "auto", disk)
    if status:
        raise FaultError(f"the undisturbed run ended with {status}: {said}")
    undisturbed, failures = outcome(place / "undisturbed/run"), []
    calls = [(number, call) for number, call in enumerate(disk.calls, 1) if re.search(only, call)][::every]
    for count, (number, call) in enumerate(calls):
        fault = faults[count % len(faults)]
        try:
            try_fault(place / f"case{number}", kind, number, fault, undisturbed)
        except (FaultError, KillError) as failure:
            failures.append(f"{kind}, call {number} ({call}), {fault}: {failure}")
    return len(calls), failures


def main() -> int:
    """Let calls fail as the command line says and print what came of it."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("kinds", nargs="*", choices=[[], *KINDS], default=KINDS)
    parser.add_argument("--every", type=int, default=1, help="distance of the calls that fail")
    parser.add_argument("--only", default="", help="regular expression of the calls that fail")
    parser.add_argument("--faults", nargs="+", choices=FAULTS, default=FAULTS)
    options = parser.parse_args()
    problems = 0
    for kind in options.kinds:
        begin = time.monotonic()
        with tempfile.TemporaryDirectory() as place:
            count, failures = run_faults(
                Path(place).resolve(), kind, options.every, tuple(options.faults), options.only
            )
        for failure in failures:
            print(failure)
        problems += len(failures)
        print(f"{kind}: {count} faults, {len(failures)} failures in {time.monotonic() - begin:.0f} s", flush=True)
    return bool(problems)


if __name__ == "__main__":
    sys.exit(main())
