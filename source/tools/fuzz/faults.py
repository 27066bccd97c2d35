"""Let the system calls of a training fail one by one, and compare a restart with an undisturbed run.

    python source/tools/fuzz/faults.py --every 10 file best
    python source/tools/fuzz/faults.py --each best             # every call with every fault

A case is a training in a new folder in which one system call on the training's files fails, or that call and all that
follow, as when a disk is gone; or in which the process is killed at that call. It must end with status 0, or with
another one and one message. What `--restart auto` and `--restart model.ckpt` give afterwards must be bitwise what an
undisturbed run gives, and no temporary file may be left.

The calls fail in a library that is loaded before the C library (`failing_calls.c`; it needs a C compiler). Each
training is a process forked from this one, which has imported everything and run nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import errno
import hashlib
import importlib
import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from kills import (
    PRELOADED,
    KillError,
    result,
    same,
    whole_checkpoints,
    write_input,
)

SOURCE = Path(__file__).with_name("failing_calls.c")
#: Path of the library in the environment of a process that has loaded it.
LIBRARY = "DEEPMD_MUON_FAILING_CALLS"
ERRORS = ("ENOSPC", "EIO", "EACCES", "ESTALE", "EINTR")
#: Python repeats a call after EINTR until it succeeds, so that no EINTR lasts.
LASTING = tuple(f"{error} lasting" for error in ERRORS if error != "EINTR")
#: Errors of one call, the death of the process at that call, and errors of all calls from one on.
FAULTS = (*ERRORS, "kill", *LASTING)
#: What is trained: without and with best checkpoints and full validation.
KINDS = ("file", "best")
#: Seconds of processor time after which a training hangs: it needs about one.
PATIENCE = 60


class FaultError(AssertionError):
    """A call that failed has lost, changed or left something."""


class NoCompilerError(RuntimeError):
    """There is no C compiler."""


@dataclass(frozen=True)
class Ended:
    """How a training ended: its status (negative: the signal), what it said, and its system calls in words."""

    status: int
    said: str
    calls: tuple[str, ...]


def build_library(folder: Path) -> Path:
    """Compile the library whose calls fail.

    Raises
    ------
    NoCompilerError
        When there is no `cc` and no `gcc`.
    """
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        raise NoCompilerError("no C compiler (cc or gcc): system calls cannot be made to fail")
    library = folder / "failing_calls.so"
    words = [
        compiler,
        "-shared",
        "-fPIC",
        "-O1",
        "-o",
        str(library),
        str(SOURCE),
        "-ldl",
        "-lpthread",
    ]
    subprocess.run(words, check=True)
    return library


def prepare(folder: Path, kind: str) -> None:
    """Write data and input of a training."""
    write_input(folder)
    if kind == "best":
        path = folder / "run/input.json"
        content = json.loads(path.read_text())
        content["training"] |= {
            "validation_data": {"systems": ["../data"]},
            "jsonl_file": "log.jsonl",
        }
        content["validating"] = {"full_validation": True, "full_val_start": 0, "max_best_ckpt": 2}
        content["validating"] |= {"validation_freq": 1, "validation_metric": "E:MAE"}
        path.write_text(json.dumps(content))


def train(folder: Path, restart: str, number: int = 0, fault: str = "") -> Ended:
    """Start or continue the training of a folder in a process forked from this one.

    Parameters
    ----------
    folder
        With data and input.
    restart
        The value of `--restart`.
    number, fault
        1-based number of the system call that fails, and how, of `FAULTS`; 0 for none.
    """
    said, calls = (folder.with_name(f"{folder.name}.{ending}") for ending in ("said", "calls"))
    child = os.fork()
    if child == 0:
        _work(folder, restart, number, fault, said, calls)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return Ended(
        status, said.read_text(), tuple(_in_words(line) for line in calls.read_text().splitlines())
    )


def _work(folder: Path, restart: str, number: int, fault: str, said: Path, calls: Path) -> None:
    """Train in this process, which ends."""
    status = 99
    try:
        for descriptor in (1, 2):
            os.dup2(os.open(said, os.O_WRONLY | os.O_CREAT | os.O_APPEND), descriptor)
        log = os.open(calls, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        said.write_text("")
        signal.setitimer(signal.ITIMER_PROF, PATIENCE)  # a training that hangs is ended by SIGPROF
        os.environ["DEVICE"] = "cpu"
        torch.set_num_threads(1)
        os.chdir(folder / "run")
        from deepmd_muon.cli.main import main as dp

        error, _, lasting = fault.partition(" ")
        ended_by = -signal.SIGKILL if error == "kill" else getattr(errno, error, 0)
        library = ctypes.CDLL(os.environ[LIBRARY])
        library.failing_calls_arm(
            os.fsencode(folder), ctypes.c_long(number), int(ended_by), bool(lasting), log
        )
        status = dp(
            ["train", "input.json", "--restart", restart, "--skip-neighbor-stat", "-l", "train.log"]
        )
        library.failing_calls_disarm()
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)


def _in_words(line: str) -> str:
    """Return a call and its path without random parts."""
    call, _, path = line.partition(" ")
    return f"{call} {re.sub(r'[.][0-9a-f]{16}', '.*', os.path.normpath(path))}"


def outcome(run: Path, kind: str) -> dict:
    """Return what must not depend on faults: checkpoint, learning curve, validation and the names of the files."""
    names = sorted(path.name for path in run.iterdir())
    links = {path.name: os.readlink(path) for path in run.iterdir() if path.is_symlink()}
    texts = {
        name: (run / name).read_text()
        for name in ("checkpoint", "lcurve.out", "val.log")
        if name in names
    }
    best = {
        path.name: torch.load(path, weights_only=True)["model"] for path in run.glob("best.ckpt*")
    }
    return {"result": result(run), "best": best, "names": names, "links": links, **texts}


def digest(run: Path) -> str:
    """Return a hash of what a restart finds: names and contents of all files but the log, without times."""
    found = hashlib.sha256()
    for path in sorted(run.rglob("*")):
        name = re.sub(r"[.][0-9a-f]{16}", ".*", str(path.relative_to(run)))
        if path.is_symlink():
            content = os.readlink(path).encode()
        elif path.is_dir() or name == "train.log":
            content = b""
        else:
            content = re.sub(rb'"time": [0-9.]+', b"", path.read_bytes())
        found.update(repr((name, hashlib.sha256(content).hexdigest())).encode())
    return found.hexdigest()


@dataclass
class Sweep:
    """The cases of a kind of training.

    Attributes
    ----------
    place
        An empty folder.
    kind
        Of `KINDS`.
    checked
        Hashes of the folders from which a restart gave what it should. Most faults leave one of a few states.
    ended
        Cases whose training ended early: with another status than 0.
    """

    place: Path
    kind: str
    ended: int = 0

    def __post_init__(self) -> None:
        prepare(self.place / "undisturbed", self.kind)
        ended = train(self.place / "undisturbed", "auto")
        if ended.status:
            raise FaultError(f"the undisturbed run ended with {ended.status}: {ended.said}")
        _require(
            bool(ended.calls), "no call was counted: is the library loaded before the C library?"
        )
        self.calls = ended.calls
        self.undisturbed = outcome(self.place / "undisturbed/run", self.kind)
        self.checked: set[str] = set()

    def try_fault(self, number: int, fault: str) -> None:
        """Let a call of a training fail, continue the training, and check all that is promised.

        Raises
        ------
        FaultError, KillError
            When something is lost, damaged, left over or different.
        """
        folder = self.place / f"case{number}-{fault.replace(' ', '-')}"
        prepare(folder, self.kind)
        ended = train(folder, "auto", number, fault)
        self.ended += ended.status != 0
        saved = whole_checkpoints(folder / "run")
        if fault == "kill":
            _require(
                ended.status == -signal.SIGKILL,
                f"status {ended.status} instead of a kill: {ended.said}",
            )
        else:
            _check_end(ended, saved)
        key = digest(folder / "run")
        if key not in self.checked:
            for restart in ("auto", "model.ckpt"):
                self._check_restart(folder, restart, saved)
            self.checked.add(key)
        for path in folder.parent.glob(f"{folder.name}*"):
            shutil.rmtree(path) if path.is_dir() else path.unlink()

    def _check_restart(self, folder: Path, restart: str, saved: dict[int, Path]) -> None:
        """Continue a copy of a training and compare it with the undisturbed one."""
        again = folder.with_name(f"{folder.name}-{restart}")
        shutil.copytree(folder, again, symlinks=True)
        ended = train(again, restart)
        if restart == "model.ckpt" and ended.status == 2 and "there is no checkpoint" in ended.said:
            _require(not saved or not list((folder / "run").glob("model.ckpt.*")), ended.said)
            return
        _require(ended.status == 0, f"--restart {restart} ended with {ended.status}: {ended.said}")
        if not saved:  # the second run is a new one, which keeps the reports of the first
            for path in [*(again / "run").glob("*.1"), *(again / "run").glob("best.ckpt.1-*")]:
                path.unlink()
        found = outcome(again / "run", self.kind)
        different = [key for key in self.undisturbed if not same(found[key], self.undisturbed[key])]
        show = {
            key: (found[key], self.undisturbed[key])
            for key in different
            if key not in ("result", "best")
        }
        _require(not different, f"--restart {restart} gives other {different}: {show}")


def _check_end(ended: Ended, saved: dict[int, Path]) -> None:
    """See that a training ended well or with one message, which names a checkpoint if there is one."""
    _require("Traceback" not in ended.said, f"a traceback: {ended.said}")
    _require(ended.status >= 0, f"signal {-ended.status}: {ended.said}")
    messages = [line for line in ended.said.splitlines() if line.startswith("dp train: ")]
    _require(
        len(messages) == bool(ended.status),
        f"status {ended.status}, {len(messages)} messages: {ended.said}",
    )
    if saved and ended.status == 1:
        named = [path for path in saved.values() if f"{path.stem}." in "".join(messages)]
        _require(bool(named), f"the message names no checkpoint: {messages}")


def _require(holds: bool, otherwise: str) -> None:
    if not holds:
        raise FaultError(otherwise)


def run_faults(place: Path, kind: str, options: argparse.Namespace) -> list[str]:
    """Let calls fail one by one; print a summary and return all failures."""
    begin, failures, count = time.monotonic(), [], 0
    sweep = Sweep(place, kind)
    for case, (number, call, fault) in enumerate(_cases(sweep.calls, options)):
        if case < options.first or case % options.parts != options.part:
            continue
        if time.monotonic() - begin > options.seconds:
            print(f"{kind}: no time for case {case} and those after it", flush=True)
            break
        count += 1
        try:
            sweep.try_fault(number, fault)
        except (FaultError, KillError) as failure:
            failures.append(f"{kind}, call {number} ({call}), {fault}: {failure}")
            print(failures[-1], flush=True)
    print(
        f"{kind}: {len(sweep.calls)} calls, {count} faults, {sweep.ended} ended the run, {len(sweep.checked)} states "
        f"restarted, {len(failures)} failures in {time.monotonic() - begin:.0f} s",
        flush=True,
    )
    return failures


def _cases(calls: tuple[str, ...], options: argparse.Namespace) -> Iterator[tuple[int, str, str]]:
    """Yield number, words and fault: all faults of each call, or the next one."""
    chosen = [
        (number, call) for number, call in enumerate(calls, 1) if re.search(options.only, call)
    ]
    turns = itertools.cycle(options.faults)
    for number, call in chosen[:: options.every]:
        for fault in options.faults if options.each else [next(turns)]:
            yield number, call, fault


def options_of(words: list[str]) -> argparse.Namespace:
    """Return what the command line says."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("kinds", nargs="*", choices=[[], *KINDS], default=KINDS)
    parser.add_argument("--every", type=int, default=1, help="distance of the calls that fail")
    parser.add_argument("--only", default="", help="regular expression of the calls that fail")
    parser.add_argument("--faults", nargs="+", choices=FAULTS, default=(*ERRORS, "kill"))
    parser.add_argument(
        "--each", action="store_true", help="each call with each fault, not with the next of them"
    )
    parser.add_argument(
        "--list", action="store_true", help="print the calls of an undisturbed training"
    )
    parser.add_argument(
        "--parts", type=int, default=1, help="take only one of so many parts of the cases"
    )
    parser.add_argument("--part", type=int, default=0, help="which part, from 0")
    parser.add_argument("--first", type=int, default=0, help="number of the first case, from 0")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="time for each kind")
    return parser.parse_args(words)


def main() -> int:
    """Let calls fail as the command line says and print what came of it."""
    options = options_of(sys.argv[1:])
    if LIBRARY not in os.environ:
        with tempfile.TemporaryDirectory() as place:
            library = str(build_library(Path(place)))
            environment = {
                **os.environ,
                LIBRARY: library,
                "LD_PRELOAD": library,
                "OMP_NUM_THREADS": "1",
            }
            return subprocess.run(
                [sys.executable, *sys.argv], env=environment, check=False
            ).returncode
    for name in PRELOADED:
        importlib.import_module(name)
    problems = 0
    for kind in options.kinds:
        with tempfile.TemporaryDirectory() as place:
            if options.list:
                print("\n".join(Sweep(Path(place).resolve(), kind).calls))
            else:
                problems += len(run_faults(Path(place).resolve(), kind, options))
    return bool(problems)


if __name__ == "__main__":
    with contextlib.suppress(BrokenPipeError):
        sys.exit(main())
