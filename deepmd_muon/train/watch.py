"""Share every rank's activity with the others, so that the error that ends a run names missing ranks and the reason.

Each rank keeps a note in the store through which the processes have found each other, renewed by a thread. A rank
whose note is no longer renewed is dead or stopped; one whose note is renewed but does not move on is stuck in the
activity of the note. No collective is involved, so that it works when collectives do not.

Rank 0 keeps the store. While that process is stopped, requests get neither an answer nor an error, so every request
runs in its own thread, for which the caller waits a few seconds.
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
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

log = logging.getLogger(__name__)

STEPPING = "in its step"
WAITING = "waiting for the others"
_IN_VAIN = "waiting for the others in vain"
# Work of rank 0 before the first step, such as counting neighbours, may take this long [s].
_LONGEST_WORK = 6 * 3600.0
# On CPUs an exchange ends with an error of its own; this much later the thread ends what still hangs [s].
_GRACE = 15.0

T = TypeVar("T")


class LostRankError(RuntimeError):
    """Another rank has given no sign of life for too long, or has given up."""


@dataclasses.dataclass(frozen=True)
class _Note:
    """The note of one rank: a count that grows while it lives, its place, its activity and how long that takes [s].

    `met` counts the meetings that it has come to; on rank 0, those that all have come to.
    """

    beat: int
    where: str
    doing: str
    step: int
    seconds: float
    written: float
    met: int = 0
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
        Called from the thread, with the reason, when this rank has waited longer, another has stopped with an error
        while it waits, or the work that it does for all (`guarding`) is in vain.
    errors_come
        Whether waiting too long ends with an error by itself (gloo), so that `give_up` is the last resort.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        size: int,
        limit: float,
        give_up: Callable[[str], None] | None = None,
        *,
        errors_come: bool = False,
    ) -> None:
        self._mine, self._theirs = (store.clone() for _ in range(2))  # type: ignore[attr-defined]  # not in the stubs
        self._reach = min(5.0, limit)
        for connection in (self._mine, self._theirs):
            connection.set_timeout(datetime.timedelta(seconds=self._reach))
        self._rank, self._size, self._limit = rank, size, limit
        self._give_up = give_up
        self._errors_come = errors_come
        self._met = 0
        self._ended = ""
        self._seen: dict[int, _Note] = {}
        self._heard: dict[int, tuple[int, float]] = {}  # the last new beat of a rank, and when it came
        self._guarding = False
        self._logged: set[str] = set()  # errors of the thread
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
        """Note the present activity of this rank; `step` counts from 1."""
        self._state = (what, step, time.monotonic())

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Mark a `with` block in which this rank can do nothing but wait for the others."""
        self._waiting = time.monotonic()
        try:
            yield
        finally:
            self._waiting = None

    def meet(self) -> None:
        """Wait until all ranks have come here, for as long as those that are missing show that they live.

        Rank 0 looks at all others, they at rank 0 alone.

        Raises
        ------
        LostRankError
            When a rank that is missing has not been heard of for the limit, or has ended.
        """
        number = self._met + 1
        if self._rank:
            self._met = number
            self._write()
        begin = time.monotonic()
        self._heard = {}
        pause = 0.005
        while missing := self._missing(number):
            waited = time.monotonic() - begin
            if self._silence(missing) > self._limit or waited > _LONGEST_WORK:
                raise LostRankError(f"after {waited:.0f} s of waiting")
            time.sleep(pause)
            pause = min(2 * pause, self._interval)
        self._met = number
        self._write()

    @contextlib.contextmanager
    def guarding(self) -> Iterator[None]:
        """Let the thread of rank 0 give up when another rank ends or falls silent in a `with` block of long work."""
        self._heard = {}
        self._guarding = True
        try:
            yield
        finally:
            self._guarding = False

    def _silence(self, ranks: Sequence[int]) -> float:
        """Return for how long the most silent of some ranks has not been heard of, since this was first asked [s]."""
        now, heard = time.monotonic(), self._heard  # for which the other thread may put an empty one meanwhile
        for rank in ranks:
            beat = self._seen[rank].beat if rank in self._seen else 0
            if rank not in heard or heard[rank][0] != beat:
                heard[rank] = beat, now
        return now - min(heard[rank][1] for rank in ranks)

    def _missing(self, number: int) -> list[int]:
        """Return the ranks, of those that this one watches, that have not come to a meeting."""
        others = [*range(1, self._size)] if self._rank == 0 else [0]
        with contextlib.suppress(RuntimeError):  # no answer: nobody is heard of
            self._read(others)
        missing = [rank for rank in others if rank not in self._seen or self._seen[rank].met < number]
        for rank in missing:
            if (note := self._seen.get(rank)) is not None and (note.ended or note.doing == _IN_VAIN):
                raise LostRankError(f"rank {rank} has ended")
        return missing

    def stopped(self, error: BaseException) -> None:
        """Tell the others that this rank ends with an error."""
        self._ended = f"{type(error).__name__}: {error}"
        with contextlib.suppress(RuntimeError):  # the rank that kept the notes may have ended
            self._write()
            self._in_time(lambda: self._mine.set("stopped", str(self._rank)))
        self._end.set()
        self._let_them_read()

    def close(self) -> None:
        """End the thread."""
        self._end.set()
        self._thread.join(self._reach)

    def verdict(self) -> str:
        """Say which ranks are missing, as far as their notes tell; takes a few intervals."""
        step = self._state[1]
        opening = f"rank {self._rank} has lost the others" + (f" at step {step}" if step else "")
        self.doing(_IN_VAIN, step)
        others = [rank for rank in range(self._size) if rank != self._rank]
        try:
            self._write()
            before = self._read(others)
            time.sleep(2.5 * self._interval)
            after = self._read(others)
        except RuntimeError:
            return f"{opening}: {self._last_seen(others)}"
        finally:
            self._let_them_read()
        lines = {rank: self._say(rank, before.get(rank), after.get(rank)) for rank in others}
        blamed = [line for line, to_blame in lines.values() if to_blame]
        return f"{opening}: " + "; ".join(blamed or [line for line, _ in lines.values()])

    def _last_seen(self, others: Sequence[int]) -> str:
        """Describe the last known notes when the store, which rank 0 keeps, no longer answers."""
        notes = {rank: note for rank in others if (note := self._seen.get(rank)) is not None}
        ended = [_ended(rank, note) for rank, note in notes.items() if note.ended]
        if ended:
            return "; ".join(ended)
        name, last = (f"rank 0 ({notes[0].where})", f", last seen {notes[0].at()}") if 0 in notes else ("rank 0", "")
        return f"{name}, through which they reach each other, is dead or stopped{last}"

    def _let_them_read(self) -> None:
        """Give the others time to read rank 0's note before the store ends with it, unless all have ended."""
        end = time.monotonic() + 2.5 * self._interval
        others = range(1, self._size)
        while self._rank == 0 and time.monotonic() < end:
            with contextlib.suppress(RuntimeError):
                self._read(others)
            if all(rank in self._seen and self._seen[rank].ended for rank in others):
                return
            time.sleep(self._interval / 10)

    def _say(self, rank: int, before: _Note | None, after: _Note | None) -> tuple[str, bool]:
        """Describe another rank, and say whether it is to blame."""
        if before is None or after is None:
            return f"rank {rank} has never reported", True
        if after.ended:
            return _ended(rank, after), True
        name = f"rank {rank} ({after.where})"
        if after.doing == _IN_VAIN:
            return f"{name} has given up", False
        if after.beat == before.beat:
            silent = max(0.0, time.time() - after.written)
            return f"{name} is dead or stopped: no sign of life for {silent:.0f} s, last seen {after.at()}", True
        return f"{name} has been {after.at()} for {after.seconds:.0f} s", after.doing not in (STEPPING, WAITING)

    def _read(self, ranks: Sequence[int]) -> dict[int, _Note]:
        """Return the notes of ranks that have written one.

        Raises
        ------
        RuntimeError
            When the store does not answer.
        """

        def read() -> dict[int, _Note]:
            there = [rank for rank in ranks if self._theirs.check([f"note{rank}"])]
            return {rank: _Note(**json.loads(self._theirs.get(f"note{rank}"))) for rank in there}

        found = self._in_time(read)
        self._seen.update(found)
        return found

    def _in_time(self, ask: Callable[[], T]) -> T:
        """Return the store's answer to a question, or raise a RuntimeError."""
        answers: list[T] = []

        def wait() -> None:
            with contextlib.suppress(RuntimeError):
                answers.append(ask())

        thread = threading.Thread(target=wait, name="deepmd_muon-question", daemon=True)
        thread.start()
        thread.join(self._reach)
        if not answers:
            raise RuntimeError("the store does not answer")
        return answers[0]

    def _write(self) -> None:
        with self._lock:
            what, step, since = self._state
            self._beat += 1
            seconds, now = time.monotonic() - since, time.time()
            note = _Note(self._beat, self._where, what, step, seconds, now, self._met, self._ended)
            self._mine.set(f"note{self._rank}", json.dumps(dataclasses.asdict(note)))

    def _someone_stopped(self) -> bool:
        try:
            return self._in_time(lambda: bool(self._theirs.check(["stopped"])))
        except RuntimeError:  # no answer
            return False

    def _renew(self) -> None:
        while not self._end.wait(self._interval):
            self._look()

    def _look(self) -> None:
        """Renew the note, and give up when it is time to; errors are logged once, never fatal."""
        try:
            with contextlib.suppress(RuntimeError):  # the store has ended with rank 0, whom this one may wait for
                self._write()
            if self._give_up is not None and (self._waited_too_long() or (self._guarding and self._lost_one())):
                self._give_up(self.verdict())
                self._end.set()
            elif self._rank:
                with contextlib.suppress(RuntimeError):
                    self._read([0])  # keeps its last activity in case the store ends with it
        except Exception as error:  # without the thread, the others would take a healthy rank for dead
            if repr(error) not in self._logged:
                self._logged.add(repr(error))
                log.warning("the watch of rank %d continues after an error:", self._rank, exc_info=True)

    def _lost_one(self) -> bool:
        others = range(1, self._size)
        with contextlib.suppress(RuntimeError):  # no answer: nobody is heard of
            self._read(others)
        ended = any(rank in self._seen and self._seen[rank].ended for rank in others)
        return ended or self._silence(others) > self._limit

    def _waited_too_long(self) -> bool:
        since = self._waiting
        if since is None:
            return False
        patience = self._limit + (_GRACE if self._errors_come else 0.0)
        return time.monotonic() - since > patience or (not self._errors_come and self._someone_stopped())


def _ended(rank: int, note: _Note) -> str:
    return f"rank {rank} ({note.where}) stopped with {note.ended}"


def end_process(reason: str) -> None:
    """End this process from a thread while the main thread is stuck, such as in the device's queue."""
    log.error("%s", reason)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(1)


def reason(error: BaseException) -> str:
    """Return the message of an error of gloo or NCCL, without the line of its source and advice."""
    text = str(error).partition("\n")[0]
    return re.sub(r"^\[[^\]]*\]\s*", "", text).partition(". ")[0]


def is_lost_connection(error: BaseException | None) -> bool:
    """Return whether an error, or its cause, comes from the exchange between ranks."""
    while error is not None:
        text = str(error)
        if isinstance(error, (dist.DistError, LostRankError)) or (
            isinstance(error, RuntimeError) and ("gloo" in text or "NCCL" in text)
        ):
            return True
        error = error.__cause__
    return False
