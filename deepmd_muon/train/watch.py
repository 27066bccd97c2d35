"""What every rank is doing, told to the others, so that the end of a run says who is missing and why.

Each rank keeps a note in the store through which the processes have found each other, renewed by a thread. A rank
whose note is no longer renewed is dead or stopped; one whose note is renewed but does not move on is stuck in what the
note says. No collective is involved, so that it works when collectives do not.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import json
import logging
import os
import re
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator

import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

log = logging.getLogger(__name__)

STEPPING = "in its step"
_IN_VAIN = "waiting for the others in vain"
_REACH = datetime.timedelta(seconds=5)


@dataclasses.dataclass(frozen=True)
class _Note:
    """What one rank has told: a count that grows while it lives, where it runs, what it does and for how long [s]."""

    beat: int
    where: str
    doing: str
    step: int
    seconds: float
    written: float
    ended: str = ""

    def at(self) -> str:
        return f"{self.doing} (step {self.step})" if self.step else self.doing


class Watch:
    """The notes of one rank and its view of the others'.

    Parameters
    ----------
    store
        Reaches all ranks; not used by anything else.
    rank, size
        Of this process.
    limit
        How long this rank waits for the others [s].
    give_up
        Called from the thread, with the reason, when this rank has waited longer, or another has stopped with an error
        while it waits. None where waiting ends by itself with an error (gloo).
    """

    def __init__(
        self, store: Store, rank: int, size: int, limit: float, give_up: Callable[[str], None] | None = None
    ) -> None:
        self._mine, self._theirs = (store.clone() for _ in range(2))  # type: ignore[attr-defined]  # not in the stubs
        for connection in (self._mine, self._theirs):
            connection.set_timeout(_REACH)
        self._rank, self._size, self._limit = rank, size, limit
        self._give_up = give_up
        self._interval = min(1.0, limit / 8)
        self._where = f"process {os.getpid()} on {socket.gethostname()}"
        self._state = ("starting", 0, time.monotonic())
        self._waiting: float | None = None
        self._beat = 0
        self._end = threading.Event()
        self._lock = threading.Lock()
        self._write()
        self._thread = threading.Thread(target=self._renew, name="deepmd_muon-watch", daemon=True)
        self._thread.start()

    def doing(self, what: str, step: int = 0) -> None:
        """Note what this rank does now; `step` counts from 1."""
        self._state = (what, step, time.monotonic())

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Mark a `with` block in which this rank can do nothing but wait for the others."""
        self._waiting = time.monotonic()
        try:
            yield
        finally:
            self._waiting = None

    def stopped(self, error: BaseException) -> None:
        """Tell the others that this rank ends with an error."""
        with contextlib.suppress(RuntimeError):  # whoever kept the notes may be gone
            self._write(ended=f"{type(error).__name__}: {error}")
            self._mine.set("stopped", str(self._rank))
        self._end.set()

    def close(self) -> None:
        """End the thread."""
        self._end.set()
        self._thread.join(self._interval)

    def verdict(self) -> str:
        """Say which ranks are missing, as far as their notes tell; takes a few intervals."""
        step = self._state[1]
        opening = f"rank {self._rank} has lost the others" + (f" at step {step}" if step else "")
        self.doing(_IN_VAIN, step)
        try:
            self._write()
            before = self._read()
            time.sleep(2.5 * self._interval)
            after = self._read()
        except RuntimeError:
            return f"{opening}: rank 0, through which they reach each other, is dead or stopped"
        finally:
            if self._rank == 0:
                time.sleep(2.5 * self._interval)  # the others may be reading, and the store may end with this process
        lines = {rank: self._say(rank, note, after[rank]) for rank, note in before.items()}
        blamed = [line for line, to_blame in lines.values() if to_blame]
        return f"{opening}: " + "; ".join(blamed or [line for line, _ in lines.values()])

    def _say(self, rank: int, before: _Note | None, after: _Note | None) -> tuple[str, bool]:
        """Describe another rank, and say whether it is to blame."""
        if before is None or after is None:
            return f"rank {rank} has never reported", True
        name = f"rank {rank} ({after.where})"
        if after.ended:
            return f"{name} stopped with {after.ended}", True
        if after.beat == before.beat:
            silent = max(0.0, time.time() - after.written)
            return f"{name} is dead or stopped: no sign of life for {silent:.0f} s, last seen {after.at()}", True
        return f"{name} has been {after.at()} for {after.seconds:.0f} s", after.doing not in (STEPPING, _IN_VAIN)

    def _read(self) -> dict[int, _Note | None]:
        notes: dict[int, _Note | None] = {}
        for rank in range(self._size):
            if rank != self._rank:
                there = self._theirs.check([f"note{rank}"])
                notes[rank] = _Note(**json.loads(self._theirs.get(f"note{rank}"))) if there else None
        return notes

    def _write(self, ended: str = "") -> None:
        with self._lock:
            what, step, since = self._state
            self._beat += 1
            note = _Note(self._beat, self._where, what, step, time.monotonic() - since, time.time(), ended)
            self._mine.set(f"note{self._rank}", json.dumps(dataclasses.asdict(note)))

    def _renew(self) -> None:
        while not self._end.wait(self._interval):
            try:
                self._write()
                since = self._waiting
                if self._give_up is None or since is None:
                    continue
                if time.monotonic() - since > self._limit or self._mine.check(["stopped"]):
                    self._give_up(self.verdict())
                    return
            except RuntimeError as error:  # the store's
                log.debug("the notes of the ranks cannot be reached: %s", error)


def end_process(reason: str) -> None:
    """End this process from a thread while the main thread is stuck in the device's queue."""
    log.error("%s", reason)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(1)


def reason(error: BaseException) -> str:
    """Return what an error of gloo or NCCL says, without the line of its source and advice."""
    text = str(error).partition("\n")[0]
    return re.sub(r"^\[[^\]]*\]\s*", "", text).partition(". ")[0]


def is_lost_connection(error: BaseException | None) -> bool:
    """Return whether an error, or what has caused it, comes from the exchange between ranks."""
    while error is not None:
        text = str(error)
        if isinstance(error, dist.DistError) or (
            isinstance(error, RuntimeError) and ("gloo" in text or "NCCL" in text)
        ):
            return True
        error = error.__cause__
    return False
