"""Whole runs of `dp train` for benchmarks: each in new processes, or one after another in the same.

A `Team` is one process for each of some GPUs. They import torch and open their GPU once, and then
run programs of Python one after another, each as the processes of one job: a run of seconds need
not wait as long again for imports. `python runs.py` is such a process; `Team` starts it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import faulthandler
import gc
import importlib
import itertools
import json
import math
import os
import random
import runpy
import selectors
import signal
import socket
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar

INTERVAL = 100
#: A job of a team may take so long [s], with kernels to compile.
LIMIT = 90.0
ROOT = Path(__file__).parents[2]
TRAIN = ("-m", "deepmd_muon")
OPTIONS = ("--pt", "train", "input.json", "--skip-neighbor-stat")


class RunError(Exception):
    """A run failed, or did not end in time."""


def train(
    folder: Path,
    content: dict[str, Any],
    gpus: int,
    *options: str,
    program: Sequence[str] = TRAIN,
    device: str | None = None,
) -> str:
    """Train in new processes, one for each GPU; return the log.

    If `device` is given, the run sees that GPU only.
    """
    write_input(folder, content)
    command = [*program, *OPTIONS, *options]
    launcher: list[str] = []
    if gpus > 1:
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(gpus)]
    environment = _environment()
    if device is not None:
        environment["CUDA_VISIBLE_DEVICES"] = device
    done = subprocess.run(
        [sys.executable, *launcher, *command],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise SystemExit(
            f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr[-4000:]}"
        )
    return done.stderr


def write_input(folder: Path, content: dict[str, Any]) -> None:
    """Write the input of a run to its folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "input.json").write_text(json.dumps(content))


def milliseconds(folder: Path, skip: int = 3) -> float:
    """Return the median time of a step [ms], over the intervals of a run's JSON lines after the first ones."""
    rows = [json.loads(line) for line in (folder / "steps.jsonl").read_text().splitlines()]
    return statistics.median(
        1e3 * (after["time"] - before["time"]) / (after["step"] - before["step"])
        for before, after in itertools.pairwise(rows[skip:])
    )


def _environment() -> dict[str, str]:
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    threads = "4" if (os.cpu_count() or 1) >= 16 else "1"
    return os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": threads}


@dataclasses.dataclass(frozen=True)
class Job:
    """A program for all processes of a team.

    Attributes
    ----------
    folder
        Where it runs. Process R writes its output to the file `log.R` there.
    words
        The command line after `python`: `-m MODULE …` or `SCRIPT …`.
    deepmd_kit
        Whether deepmd-kit must be importable, see `hosted_step.import_deepmd_kit`.
    """

    folder: Path
    words: tuple[str, ...]
    deepmd_kit: bool = False

    def log(self, rank: int = 0) -> str:
        """Return the output of a process."""
        path = self.folder / f"log.{rank}"
        return path.read_text() if path.exists() else ""


@dataclasses.dataclass(frozen=True)
class End:
    """How a process ended a job: its exit status, None if it still runs, and after how long [s]."""

    status: int | None
    seconds: float


class Team:
    """Processes for these GPUs (CPUs: any numbers), started with the first job and after a failure.

    Attributes
    ----------
    deadline
        `time.monotonic()` at which no team waits any longer for a job.
    """

    deadline: ClassVar[float] = math.inf

    def __init__(self, gpus: Sequence[int]) -> None:
        self.gpus = tuple(gpus)
        self.processes: list[subprocess.Popen[str]] = []

    def __enter__(self) -> Team:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def open(self) -> None:
        """Start the processes, unless they run."""
        if self.processes:
            return
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        names = visible.split(",") if visible and self.gpus[-1] < len(visible.split(",")) else None
        devices = {
            "CUDA_VISIBLE_DEVICES": ",".join(names[k] if names else str(k) for k in self.gpus)
        }
        for rank in range(len(self.gpus)):
            place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": len(self.gpus)}
            self.processes.append(
                subprocess.Popen(
                    [sys.executable, str(Path(__file__).resolve())],
                    env=_environment() | devices | {key: str(n) for key, n in place.items()},
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                )
            )

    def begin(self, job: Job) -> None:
        """Give all processes a job; `ends` waits for it."""
        self.open()
        job.folder.mkdir(parents=True, exist_ok=True)
        order = {
            "folder": str(job.folder),
            "words": job.words,
            "port": _free_port(),
            "deepmd_kit": job.deepmd_kit,
        }
        for process in self.processes:
            assert process.stdin is not None
            print(json.dumps(order), file=process.stdin, flush=True)

    def ends(self, limit: float) -> list[End]:
        """Wait for every process to answer or to end, at most so long [s] and until the deadline."""
        begun = time.monotonic()
        limit = max(0.0, min(limit, Team.deadline - begun))
        ends = [End(None, limit)] * len(self.processes)
        with selectors.DefaultSelector() as selector:
            for rank, process in enumerate(self.processes):
                assert process.stdout is not None
                selector.register(process.stdout, selectors.EVENT_READ, rank)
            while selector.get_map() and (rest := begun + limit - time.monotonic()) > 0:
                for key, _ in selector.select(rest):
                    process = self.processes[key.data]
                    assert process.stdout is not None
                    answer = process.stdout.readline()  # empty if the process has ended
                    status = int(answer) if answer else process.wait()
                    ends[key.data] = End(status, time.monotonic() - begun)
                    selector.unregister(process.stdout)
        return ends

    def run(self, job: Job, limit: float | None = None) -> None:
        """Run a job on all processes, at most for `limit` seconds, or `LIMIT`.

        Raises
        ------
        RunError
            When a process fails or does not end in time. The next job has new processes.
        """
        self.begin(job)
        ends = self.ends(LIMIT if limit is None else limit)
        failed = [rank for rank, end in enumerate(ends) if end.status != 0]
        if failed:
            self._dump_stacks()
            self.close()
            what = {rank: ends[rank].status for rank in failed}
            logs = "\n".join(f"rank {rank}: {job.log(rank)[-2500:]}" for rank in failed)
            raise RunError(f"{job.folder.name}: ends {what}: {logs}")

    def _dump_stacks(self) -> None:
        """Let the processes that still run write what their threads do to their logs."""
        running = [process for process in self.processes if process.poll() is None]
        for process in running:
            process.send_signal(signal.SIGUSR1)
        if running:
            time.sleep(0.5)

    def close(self) -> None:
        """End the processes."""
        for process in self.processes:
            process.kill()
        for process in self.processes:
            with contextlib.suppress(subprocess.TimeoutExpired):  # a driver may hold it
                process.communicate(timeout=10.0)
        self.processes.clear()


def _free_port() -> int:
    """Return a port that nobody uses, below those that connections of other ranks get."""
    while True:
        with socket.socket() as listening, contextlib.suppress(OSError):
            listening.bind(("127.0.0.1", random.randrange(15000, 30000)))
            return int(listening.getsockname()[1])


# ----- a process of a team -----------------------------------------------------------------------


def work() -> None:
    """Take jobs from standard input, and answer each with its exit status; end after a failure."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    import torch

    importlib.import_module("deepmd_muon.train.start")
    if torch.cuda.is_available():
        torch.zeros(1, device=f"cuda:{os.environ['LOCAL_RANK']}")
    for line in sys.stdin:
        order = json.loads(line)
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(order["port"]))
        os.chdir(order["folder"])
        with open(f"log.{os.environ['RANK']}", "w") as log:
            for stream in (sys.stdout, sys.stderr):
                os.dup2(log.fileno(), stream.fileno())
        faulthandler.register(signal.SIGUSR1)  # writes stacks of all threads to stderr
        status = run_program(order["words"], deepmd_kit=order["deepmd_kit"])
        sys.stdout.flush()
        print(status, file=answers, flush=True)
        if status:
            os._exit(status)  # an exchange that others have left would hold it
        gc.collect()
        torch.cuda.empty_cache()


def run_program(words: list[str], *, deepmd_kit: bool) -> int:
    """Run what `python WORDS` would; return the exit status."""
    try:
        if deepmd_kit and "hosted_step" not in sys.modules:
            from hosted_step import import_deepmd_kit

            import_deepmd_kit()
        if words[0] == "-m":
            sys.argv = words[1:]
            runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = words
            runpy.run_path(words[0], run_name="__main__")
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
            return 1
        return end.code or 0
    except Exception:
        traceback.print_exc()
        return 1
    return 0


if __name__ == "__main__":
    work()
