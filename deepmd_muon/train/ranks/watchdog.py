"""Share every rank's activity with the others, so that the error that ends a run names missing ranks and the reason.

torch's timeouts end an exchange (gloo) or the process (NCCL), but do not tell which rank is missing, where it runs and
what it was doing; they know nothing of a rank whose launcher has died, nor of work before the first exchange. So each
rank keeps a note in the store through which the processes have found each other, renewed by a thread. A rank whose note
is no longer renewed is dead or stopped; one whose note is renewed but does not move on is stuck in the activity of the
note. No collective is involved, so that it works when collectives do not.

Rank 0 keeps the store, or torchrun. While that process is stopped, requests get neither an answer nor an error. So one
thread alone asks the store; a second one, and the run itself, only look at what it has found.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import json
import logging
import os
import re
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence

import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

log = logging.getLogger(__name__)

STEPPING = "in its step"
WAITING = "waiting for the others"
_IN_VAIN = "waiting for the others in vain"
_FINISHED = "leaving the finished run"
# Work of rank 0 before the first step, such as counting neighbours, may take this long [s].
_LONGEST_WORK = 6 * 3600.0
#: A rank that waits longer logs the reason, and that another one gives no sign of life for longer [s].
SILENCE = 10.0
#: Between two ways to end a run that waits in vain [s], so that the first can look for the missing rank and name it. On
#: CPUs an exchange raises an error after the limit, and the thread ends what still hangs later. On GPUs the thread acts
#: after the limit, and NCCL, which ends the process without a message, later.
GRACE = 15.0


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
        Called from a thread, with the reason, when this rank has waited longer, another has stopped with an error
        while it waits, the work that it does for all (`guarding`) is in vain, or it has not ended although its
        launcher has died.
    errors_come
        Whether waiting too long ends with an error by itself (gloo), so that `give_up` is the last resort.
    launcher
        The process that started this one, in words. When it dies, this rank gets SIGTERM, at which a run finishes
        its step, saves and ends. Empty for a process that may outlive its parent.
    agent
        Whether the launcher keeps the store, so that a silent store counts as its death: a script between the two
        may outlive it.
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
        launcher: str = "",
        agent: bool = False,
    ) -> None:
        self._store: Store = store.clone()  # type: ignore[attr-defined]  # not in the stubs
        self._reach = min(5.0, limit)
        self._store.set_timeout(datetime.timedelta(seconds=self._reach))
        self._rank, self._limit, self._give_up = rank, limit, give_up
        self._errors_come, self._launcher, self._agent = errors_come, launcher, agent
        self._others = [other for other in range(size) if other != rank]
        self._watched = (
            self._others if rank == 0 else [0]
        )  # a rank that asked for all would load the store
        self._seen: dict[
            int, tuple[_Note, float]
        ] = {}  # the last note of a rank, and when it was new
        self._answered, self._failed = (
            time.monotonic(),
            0.0,
        )  # when the last request began that was answered, or not
        self._someone_stopped = False
        self._interval = min(1.0, limit / 8)
        self._where = f"process {os.getpid()} on {socket.gethostname()}"
        self._state = ("starting", 0, time.monotonic())
        self._beat = self._met = 0
        self._ended = ""
        self._waiting: float | None = None
        self._meeting: float | None = None
        # The wait whose reason has been logged, by its beginning, and the ranks logged as silent.
        self._logged_wait: float | None = None
        self._logged_silent: set[int] = set()
        self._guarding: float | None = None
        self._parent = os.getppid()
        self._orphaned: float | None = None
        self._end, self._wake = threading.Event(), threading.Event()
        self._wake.set()
        self._threads = [
            threading.Thread(
                target=self._repeat, args=(work,), name="deepmd_muon-watch", daemon=True
            )
            for work in (self._exchange, self._judge)
        ]
        for thread in self._threads:
            thread.start()

    def doing(self, what: str, step: int = 0) -> None:
        """Note the present activity of this rank; `step` counts from 1."""
        self._state = (what, step, time.monotonic())

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Mark a `with` block, also within another one, in which this rank can only wait for the others."""
        before = self._waiting
        self._waiting = time.monotonic() if before is None else before
        try:
            yield
        finally:
            self._waiting = before

    @contextlib.contextmanager
    def guarding(self) -> Iterator[None]:
        """Let the thread of rank 0 give up when another rank ends or falls silent in a `with` block of long work."""
        self._guarding = time.monotonic()
        try:
            yield
        finally:
            self._guarding = None

    def meet(self) -> None:
        """Wait until all ranks have arrived, as long as the missing ones give signs of life.

        Rank 0 watches all others, they watch rank 0 alone. A rank that has ended, or was silent for the limit, is lost.
        """
        self._meeting = time.monotonic()
        try:
            self._meet(self._met + 1, self._meeting)
        finally:
            self._meeting = None

    def _meet(self, number: int, begin: float) -> None:
        """Wait since `begin` until all ranks have arrived at this meeting."""
        if self._rank:
            self._met = number
        pause = 0.005
        while missing := [
            rank
            for rank in self._watched
            if (note := self._note_of(rank)) is None or note.met < number
        ]:
            for rank in missing:
                if (note := self._note_of(rank)) is not None and (
                    note.ended or note.doing == _IN_VAIN
                ):
                    raise LostRankError(f"rank {rank} has ended")
            waited = time.monotonic() - begin
            if self._silent(missing, begin) or waited > _LONGEST_WORK:
                raise LostRankError(f"after {waited:.0f} s of waiting")
            self._wake.set()
            time.sleep(pause)
            pause = min(2 * pause, self._interval)
        self._met = number
        if self._rank == 0:
            self._refresh()  # the others wait for it

    def stopped(self, error: BaseException) -> None:
        """Tell the others that this rank ends with an error."""
        self._ended = f"{type(error).__name__}: {error}"
        self._refresh()
        self._let_them_read()
        self._end.set()

    def finish(self) -> None:
        """Tell the others that this rank has finished the run, and end the threads."""
        self.doing(_FINISHED)
        self._refresh()
        self.close()

    def close(self) -> None:
        """End the threads."""
        self._end.set()
        self._wake.set()
        for thread in self._threads:
            thread.join(self._reach)

    def verdict(self) -> str:
        """Describe which ranks are missing, according to their notes; takes a few intervals."""
        step = self._state[1]
        opening = f"rank {self._rank} has lost the others" + (f" at step {step}" if step else "")
        self.doing(_IN_VAIN, step)
        self._watched = self._others
        try:
            there = self._refresh()
            before = {rank: self._note_of(rank) for rank in self._others}
            if there:
                time.sleep(2.5 * self._interval)
            if not there or not self._refresh():
                return f"{opening}: {self._last_seen()}"
        finally:
            self._let_them_read()
        lines = [self._say(rank, before[rank], self._note_of(rank)) for rank in self._others]
        blamed = [line for line, to_blame in lines if to_blame]
        return f"{opening}: " + "; ".join(blamed or [line for line, _ in lines])

    def _last_seen(self) -> str:
        """Describe the last known notes when the store, which rank 0 keeps, no longer answers."""
        notes = {rank: note for rank in self._others if (note := self._note_of(rank)) is not None}
        ended = [_ended(rank, note) for rank, note in notes.items() if note.ended]
        if ended:
            return "; ".join(ended)
        name, last = (
            (f"rank 0 ({notes[0].where})", f", last seen {notes[0].at()}")
            if 0 in notes
            else ("rank 0", "")
        )
        return f"{name}, through which they reach each other, is dead or stopped{last}"

    def _say(self, rank: int, before: _Note | None, after: _Note | None) -> tuple[str, bool]:
        """Describe another rank, and return whether it is to blame."""
        if before is None or after is None:
            return f"rank {rank} has never reported", True
        return _describe(rank, after, alive=after.beat != before.beat)

    def _log_wait(self, begin: float) -> None:
        """Log for which ranks rank 0, which sees all others, waits since `begin`."""
        waited = time.monotonic() - begin
        if self._rank or waited < SILENCE or begin == self._logged_wait:
            return
        self._logged_wait = begin
        lines = [
            _describe(rank, note, alive=True)
            for rank in self._others
            if (note := self._note_of(rank)) is not None and rank not in self._logged_silent
        ]
        blamed = "; ".join(line for line, to_blame in lines if to_blame)
        if blamed or not self._logged_silent:
            log.info("waiting for %.0f s: %s", waited, blamed or "the others are in the same step")

    def _log_silence(self) -> None:
        """Log once which ranks give no sign of life: rank 0 does for all others, rank 1 for rank 0."""
        if self._rank > 1 or not self._silent_ranks() - self._logged_silent:
            return
        self._refresh()  # this process itself may have been stopped, and not have asked
        silent = self._silent_ranks()
        for rank in sorted(silent - self._logged_silent):
            note = self._note_of(rank)
            assert note is not None
            log.warning("%s", _describe(rank, note, alive=False)[0])
        for rank in sorted(self._logged_silent - silent):
            log.warning("rank %d gives signs of life again", rank)
        self._logged_silent = silent

    def _silent_ranks(self) -> set[int]:
        """Return the watched ranks whose note has not been renewed for long although they have not ended."""
        now = time.monotonic()
        return {
            rank
            for rank in self._watched
            if rank in self._seen
            and now - self._seen[rank][1] > SILENCE
            and not self._seen[rank][0].ended
            and self._seen[rank][0].doing not in (_IN_VAIN, _FINISHED)
        }

    def _let_them_read(self) -> None:
        """Give the others time to read rank 0's note before the store ends with it, unless all have ended."""
        end = time.monotonic() + 2.5 * self._interval
        while self._rank == 0 and time.monotonic() < end:
            if all(map(self._has_ended, self._others)):
                return
            self._wake.set()
            time.sleep(self._interval / 10)

    def _note_of(self, rank: int) -> _Note | None:
        return self._seen[rank][0] if rank in self._seen else None

    def _has_ended(self, rank: int) -> bool:
        note = self._note_of(rank)
        return note is not None and bool(note.ended)

    def _silent(self, ranks: Sequence[int], since: float) -> bool:
        """Return whether one of some ranks has been silent for the limit, which begins at `since`."""

        def silent() -> bool:
            heard = min(
                max(since, self._seen[rank][1] if rank in self._seen else since) for rank in ranks
            )
            return time.monotonic() - heard > self._limit

        # This process itself may have been stopped, and not have asked.
        return silent() and (not self._refresh() or silent())

    def _refresh(self) -> bool:
        """Let the thread ask the store anew, and return whether it has answered in time."""
        begin = time.monotonic()
        if self._end.is_set():  # the last exchange of a run comes after `close`
            self._exchange()
        while max(self._answered, self._failed) < begin and time.monotonic() < begin + self._reach:
            self._wake.set()
            time.sleep(0.005)
        return self._answered >= begin

    def _repeat(self, work: Callable[[], None]) -> None:
        """Call a function repeatedly; its errors are logged once and never fatal."""
        logged: set[str] = set()
        while not self._end.is_set():
            try:
                work()
            except Exception as error:  # noqa: PERF203 (others would take a healthy rank without it for dead)
                if repr(error) not in logged:
                    logged.add(repr(error))
                    log.warning(
                        "the watch of rank %d continues after an error:", self._rank, exc_info=True
                    )

    def _exchange(self) -> None:
        """Renew this rank's note when it is time to, and read those of the ranks that it watches."""
        self._wake.wait(self._interval)
        self._wake.clear()
        begin = time.monotonic()
        what, step, since = self._state
        self._beat += 1
        note = _Note(
            self._beat, self._where, what, step, begin - since, time.time(), self._met, self._ended
        )
        try:
            self._store.set(f"note{self._rank}", json.dumps(dataclasses.asdict(note)))
            if note.ended:
                self._store.set("stopped", "")
            self._someone_stopped = self._store.check(["stopped"])
            for rank in [rank for rank in self._watched if self._store.check([f"note{rank}"])]:
                found = _Note(**json.loads(self._store.get(f"note{rank}")))
                if rank not in self._seen or self._seen[rank][0].beat != found.beat:
                    self._seen[rank] = found, time.monotonic()
            self._answered = begin
        except RuntimeError:  # the store has ended with the process that kept it
            self._failed = begin

    def _judge(self) -> None:
        """Give up when it is time to; end this rank when its launcher has died."""
        self._end.wait(min(0.5, self._interval))
        waiting, guarding = self._waiting, self._guarding
        self._log_silence()
        idle = self._meeting if waiting is None else waiting
        if idle is not None:
            self._log_wait(idle)
        if self._give_up is None:
            return
        lost = guarding is not None and (
            any(map(self._has_ended, self._others)) or self._silent(self._others, guarding)
        )
        if waiting is not None:
            patience = self._limit + (GRACE if self._errors_come else 0.0)
            lost |= time.monotonic() - waiting > patience or (
                not self._errors_come and self._someone_stopped
            )
        if lost:
            self._give_up(self.verdict())
            self._end.set()
        elif self._launcher:
            self._look_at_launcher(self._give_up)

    def _look_at_launcher(self, give_up: Callable[[str], None]) -> None:
        """Send SIGTERM when the launcher has died, so that this rank does not keep running in the background."""
        reason = f"{self._launcher}, which started rank {self._rank}, has died"
        if self._orphaned is None:
            silent = (
                self._agent
                and time.monotonic() - self._answered > self._limit
                and not self._refresh()
            )
            if silent or os.getppid() != self._parent:
                self._orphaned = time.monotonic()
                log.error("%s: ending this rank", reason)
                os.kill(os.getpid(), signal.SIGTERM)
        elif time.monotonic() - self._orphaned > self._limit:
            give_up(
                f"{reason}, and rank {self._rank} has not ended within {self._limit:g} s of SIGTERM"
            )


def _describe(rank: int, note: _Note, *, alive: bool) -> tuple[str, bool]:
    """Describe a rank by its last note, and return whether the others wait because of it."""
    if note.ended:
        return _ended(rank, note), True
    name = f"rank {rank} ({note.where})"
    if note.doing == _IN_VAIN:
        return f"{name} has given up", False
    if not alive:
        silent = max(0.0, time.time() - note.written)
        return (
            f"{name} is dead or stopped: no sign of life for {silent:.0f} s, last seen {note.at()}",
            True,
        )
    to_blame = note.doing not in (STEPPING, WAITING)
    return f"{name} has been {note.at()} for {note.seconds:.0f} s", to_blame


def _ended(rank: int, note: _Note) -> str:
    return f"rank {rank} ({note.where}) stopped with {note.ended}"


# In errors of exchanges. gloo says the last of an exchange beside another one whose time has run out.
_WORDS = ("gloo", "NCCL", "pair closure")


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
            isinstance(error, RuntimeError) and any(word in text for word in _WORDS)
        ):
            return True
        error = error.__cause__
    return False
