"""Name a missing rank, its machine and its activity; end a run that waits for it in vain.

torch's timeouts end an exchange (gloo) or the process (NCCL), but do not say who is missing. So a
thread of every rank writes a note into the store, at which the ranks have met, once a second: a
count of beats, the rank's activity, and the error that has ended it. If the beats stop, the rank is
dead or stopped. If they go on and the activity does not, it is stuck there. Notes need no
collective. The end of a process on this machine is seen at the next beat.

Rank 0, or torchrun, keeps the store. If that process is stopped, requests to the store get neither
an answer nor an error. So one thread talks to the store; another one, and the run, look at what it
has read.
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
from typing import Literal, NamedTuple

import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from deepmd_muon.train.ranks.processes import identify, life_of

log = logging.getLogger(__name__)

STEPPING = "in its step"
WAITING = "waiting for the others"
SAVING = "saving"
_GIVEN_UP = "waiting for the others in vain"
# Work of rank 0 before the first step, such as counting neighbours, may take this long [s].
_LONGEST_WORK = 6 * 3600.0
#: A rank that waits longer logs whom it waits for [s].
SILENCE = 10.0
#: Seconds between two ways to end a run that waits in vain, so that the first can name the missing
#: rank. On CPUs an exchange raises an error after the limit, and the thread ends what hangs longer.
#: On GPUs the thread acts after the limit, and NCCL, which ends the process without a message,
#: later.
GRACE = 15.0


class LostRankError(RuntimeError):
    """Another rank has given no sign of life for too long, or has given up."""


class _Activity(NamedTuple):
    doing: str
    step: int  # counts from 1; 0 before the first
    since: float  # time.monotonic()


class _Phase(NamedTuple):
    """What the main thread does that another rank may prevent.

    It waits for others in an exchange, or at a barrier, or works for all (`guarding`).
    """

    kind: Literal["waiting", "guarding", "barrier"]
    since: float  # time.monotonic()


@dataclasses.dataclass(frozen=True)
class _Note:
    """The note of one rank.

    Attributes
    ----------
    beat
        Grows while the rank lives.
    where
        Its process and machine.
    process
        The name of its process, see `identify`.
    doing, step, seconds
        Its activity, the step, and how long this takes by now [s].
    written
        `time.time()`.
    barrier
        Number of the last barrier that the rank has reached; on rank 0, that all have reached.
    error
        The error that has ended the rank; empty while it runs.
    """

    beat: int
    where: str
    process: str
    doing: str
    step: int
    seconds: float
    written: float
    barrier: int
    error: str

    @property
    def ended(self) -> bool:
        return bool(self.error) or self.doing == _GIVEN_UP

    @property
    def activity(self) -> str:
        return f"{self.doing} (step {self.step})" if self.step else self.doing


class Watch:
    """The note of this rank and its view of the others'.

    Attributes
    ----------
    store_has_ended
        Whether the process that keeps the store has closed the connection.

    Parameters
    ----------
    store
        Reaches all ranks; not used by anything else.
    rank, size
        Of this process.
    limit
        How long this rank waits for the others [s].
    give_up
        Called from a thread, with the reason, when this rank has waited longer, when another rank
        has stopped or died while it waits, and when its work for all (`guarding`) is in vain.
    errors_come
        Whether waiting too long ends with an error anyway (gloo), so that `give_up` is the last
        resort.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        size: int,
        limit: float,
        give_up: Callable[[str], None],
        *,
        errors_come: bool,
    ) -> None:
        self._store: Store = store.clone()  # type: ignore[attr-defined]  # not in the stubs
        self._patience_with_store = min(5.0, limit)
        self._store.set_timeout(datetime.timedelta(seconds=self._patience_with_store))
        self._rank = rank
        self._limit = limit
        self._give_up = give_up
        self._errors_come = errors_come
        self._others = [number for number in range(size) if number != rank]
        # Rank 0 watches all others, and they watch rank 0: reading all notes everywhere would load
        # the store.
        self._watched = self._others if rank == 0 else [0]
        self._interval = min(1.0, limit / 8)
        # This rank's note.
        self._where = f"process {os.getpid()} on {socket.gethostname()}"
        self._process = identify(os.getpid())
        self._activity = _Activity("starting", 0, time.monotonic())
        self._beat = 0
        self._barrier = 0
        self._error = ""
        # Written by the thread that talks to the store.
        self._notes: dict[int, _Note] = {}
        self._heard: dict[int, float] = {}  # when a rank's beat has changed
        self._answered = time.monotonic()  # when the last request began that was answered
        self.store_has_ended = False  # torch does not connect again
        self._any_ended = False
        self._deaths = ""  # describes ranks whose processes have ended without a word
        self._phase: _Phase | None = None  # of the main thread
        self._logged_phase: _Phase | None = None
        self._closed = threading.Event()
        self._wake = threading.Event()
        self._wake.set()
        self._threads = [
            threading.Thread(target=work, name="deepmd_muon-watch", daemon=True)
            for work in (self._exchange_notes, self._judge)
        ]
        for thread in self._threads:
            thread.start()

    def doing(self, what: str, step: int = 0) -> None:
        """Note the present activity of this rank; `step` counts from 1."""
        self._activity = _Activity(what, step, time.monotonic())

    def waiting(self) -> contextlib.AbstractContextManager[None]:
        """Mark a `with` block, possibly nested, in which this rank waits for the others."""
        return self._mark("waiting")

    def guarding(self) -> contextlib.AbstractContextManager[None]:
        """Mark a `with` block of long work of rank 0; it is given up when a rank is lost."""
        return self._mark("guarding")

    @contextlib.contextmanager
    def _mark(self, kind: Literal["waiting", "guarding", "barrier"]) -> Iterator[None]:
        """Begin a phase of the main thread, unless it is in one."""
        outer = self._phase
        self._phase = outer or _Phase(kind, time.monotonic())
        try:
            yield
        finally:
            self._phase = outer

    def barrier(self) -> None:
        """Wait until all ranks have arrived, as long as the missing ones give signs of life.

        Raises
        ------
        LostRankError
            When a watched rank has ended, or was silent for the limit.
        """
        begin = time.monotonic()
        number = self._barrier + 1
        if self._rank:
            self._barrier = number
        pause = 0.005
        with self._mark("barrier"):
            while not all(
                rank in self._notes and self._notes[rank].barrier >= number
                for rank in self._watched
            ):
                self._raise_if_lost(begin)
                self._wake.set()
                time.sleep(pause)
                pause = min(2 * pause, self._interval)
            self._barrier = number
            if self._rank == 0:
                self._refresh()  # the others wait for rank 0's note

    def stopped(self, error: BaseException) -> None:
        """Share the error that ends this rank."""
        self._error = f"{type(error).__name__}: {error}"
        self._refresh()
        self._linger()

    def close(self) -> None:
        """End the threads."""
        self._closed.set()
        self._wake.set()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(self._patience_with_store)

    def verdict(self) -> str:
        """Describe which ranks are missing, according to their notes; takes a few intervals."""
        step = self._activity.step
        opening = f"rank {self._rank} has lost the others" + (f" at step {step}" if step else "")
        self.doing(_GIVEN_UP, step)
        self._watched = self._others
        answered = self._refresh()
        before = dict(self._notes)
        if answered and not self._deaths:
            time.sleep(2.5 * self._interval)
            answered = self._refresh()
        self._linger()
        if self._deaths:
            return f"{opening}: {self._deaths}"
        if not answered:
            return f"{opening}: {self._describe_lost_store()}"
        descriptions = []
        for rank in self._others:
            note = self._notes.get(rank)
            if note is None or rank not in before:
                descriptions.append(_Description(f"rank {rank} has never reported", True))
            else:
                alive = note.beat != before[rank].beat
                descriptions.append(_describe(rank, note, alive=alive))
        blamed = [text for text, to_blame in descriptions if to_blame]
        return f"{opening}: " + "; ".join(blamed or [text for text, _ in descriptions])

    def _describe_lost_store(self) -> str:
        """Describe the last known notes if the store does not answer."""
        failed = [
            _describe(rank, note, alive=False).text
            for rank, note in self._notes.items()
            if note.error
        ]
        if failed:
            return "; ".join(failed)
        note = self._notes.get(0)
        where = f" ({note.where})" if note else ""
        last_seen = f", last seen {note.activity}" if note else ""
        return f"rank 0{where}, through which they reach each other, is dead or stopped{last_seen}"

    def _linger(self) -> None:
        """Give the others time to read rank 0's note before the store ends with it."""
        end = time.monotonic() + 2.5 * self._interval
        while self._rank == 0 and time.monotonic() < end:
            if all(rank in self._notes and self._notes[rank].error for rank in self._others):
                return
            self._wake.set()
            time.sleep(self._interval / 10)

    def _raise_if_lost(self, since: float) -> None:
        """Raise LostRankError if a watched rank has ended, or is silent for the limit."""
        for rank in self._watched:
            if rank in self._notes and self._notes[rank].ended:
                raise LostRankError(f"rank {rank} has ended")
        if self._deaths:
            raise LostRankError(self._deaths)
        if self.store_has_ended:
            raise LostRankError("their store has ended")
        waited = time.monotonic() - since
        # If this process itself has been stopped, it has to read the notes before it judges.
        silent = bool(self._silent(since, self._limit))
        silent = silent and (not self._refresh() or bool(self._silent(since, self._limit)))
        if silent or waited > _LONGEST_WORK:
            raise LostRankError(f"after {waited:.0f} s of waiting")

    def _silent(self, since: float, limit: float) -> list[int]:
        """Return the watched ranks that are silent for the limit, which begins at `since`."""
        now = time.monotonic()
        return [
            rank for rank in self._watched if now - max(since, self._heard.get(rank, since)) > limit
        ]

    # ----- the thread that talks to the store -----------------------------------------------------

    def _exchange_notes(self) -> None:
        """Write this rank's note and read those of the ranks that it watches, at every interval."""
        while not self._closed.is_set():
            self._wake.wait(self._interval)
            self._wake.clear()
            # Before the notes are read: a rank may write its error and end at once.
            ended = [  # of this machine
                rank
                for rank in self._watched
                if rank in self._notes and life_of(self._notes[rank].process) == "ended"
            ]
            if not self.store_has_ended:
                try:
                    self._exchange()
                except dist.DistNetworkError:
                    self.store_has_ended = True
                except RuntimeError:  # no answer in time
                    pass
            silent_ends = [rank for rank in ended if not self._notes[rank].ended]
            if silent_ends:
                if not self._deaths:
                    self._wake.set()  # the others learn it now
                self._deaths = "; ".join(
                    f"rank {rank} ({self._notes[rank].where}) is dead: its process has ended, last "
                    f"seen {self._notes[rank].activity}"
                    for rank in silent_ends
                )

    def _exchange(self) -> None:
        begin = time.monotonic()
        activity = self._activity
        self._beat += 1
        note = _Note(
            beat=self._beat,
            where=self._where,
            process=self._process,
            doing=activity.doing,
            step=activity.step,
            seconds=begin - activity.since,
            written=time.time(),
            barrier=self._barrier,
            error=self._error,
        )
        self._store.set(f"note{self._rank}", json.dumps(dataclasses.asdict(note)))
        if self._deaths:
            self._store.set("deaths", self._deaths)
        if self._deaths or note.ended:
            self._store.set("ended", "")
        self._any_ended = self._store.check(["ended"])
        if self._any_ended and not self._deaths and self._store.check(["deaths"]):
            self._deaths = self._store.get("deaths").decode()
        for rank in self._watched:
            if not self._store.check([f"note{rank}"]):
                continue
            watched_note = _Note(**json.loads(self._store.get(f"note{rank}")))
            last_note = self._notes.get(rank)
            if last_note is None or last_note.beat != watched_note.beat:
                self._notes[rank] = watched_note
                self._heard[rank] = time.monotonic()
        self._answered = begin

    def _refresh(self) -> bool:
        """Let the thread exchange notes now, and return whether the store has answered in time."""
        begin = time.monotonic()
        end = begin + self._patience_with_store
        while self._answered < begin and not self.store_has_ended and time.monotonic() < end:
            self._wake.set()
            time.sleep(0.005)
        return self._answered >= begin

    # ----- the thread that judges -----------------------------------------------------------------

    def _judge(self) -> None:
        """Log long waits, and give up when another rank is lost."""
        while not self._closed.wait(min(0.5, self._interval)):
            phase = self._phase
            if phase is None:
                in_vain = self._hangs()
            else:
                in_vain = self._is_in_vain(phase)
            if in_vain:
                self._give_up(self.verdict())
                return

    def _hangs(self) -> bool:
        """Return whether the main thread seems to wait for a dead rank where it does not say so.

        On a GPU, any call that needs the device waits for the exchange before it.
        """
        activity = self._activity
        seconds = time.monotonic() - activity.since
        may_hang = not self._errors_come and activity.doing != SAVING
        return may_hang and bool(self._deaths) and seconds > self._limit / 2

    def _is_in_vain(self, phase: _Phase) -> bool:
        """Return whether this thread has to end the phase of the main thread; log a long one."""
        seconds = time.monotonic() - phase.since
        if phase.kind != "guarding" and seconds > SILENCE and phase is not self._logged_phase:
            self._log_wait(phase, seconds)
        if phase.kind == "waiting":
            return self._waits_in_vain(phase.since, seconds)
        if phase.kind == "guarding":
            try:
                self._raise_if_lost(phase.since)
            except LostRankError:
                return True
        return False

    def _waits_in_vain(self, since: float, seconds: float) -> bool:
        """Return whether an exchange that began at `since` takes too long, or a rank is lost."""
        if self._errors_come:
            return seconds > self._limit + GRACE
        # After the last exchange of a run, ranks end while others still leave it.
        if seconds > 2 * self._interval and (self._any_ended or self._deaths):
            return True
        return seconds > self._limit or self._is_machine_lost(since)

    def _is_machine_lost(self, since: float) -> bool:
        """Return whether a watched rank of another machine is silent for half of the limit.

        On this machine, its process is there; it is busy or stopped, and may go on.
        """
        # Twice: a process that has been stopped itself has to read the notes before it judges.
        for _ in range(2):
            if not any(
                rank in self._notes and life_of(self._notes[rank].process) == "unknown"
                for rank in self._silent(since, self._limit / 2)
            ):
                return False
            self._refresh()
        return True

    def _log_wait(self, phase: _Phase, seconds: float) -> None:
        """Log once whom this rank waits for; rank 1 does so only if rank 0 is silent."""
        now = time.monotonic()
        silent = {rank for rank in self._watched if now - self._heard.get(rank, now) > SILENCE / 2}
        if self._rank > 1 or (self._rank == 1 and not silent):
            return
        self._logged_phase = phase
        descriptions = [
            _describe(rank, note, alive=rank not in silent) for rank, note in self._notes.items()
        ]
        blamed = "; ".join(text for text, to_blame in descriptions if to_blame)
        log.log(
            logging.WARNING if silent else logging.INFO,
            "waiting for %.0f s: %s",
            seconds,
            blamed or "the others are in the same step",
        )


class _Description(NamedTuple):
    text: str
    to_blame: bool  # whether the others wait because of this rank


def _describe(rank: int, note: _Note, *, alive: bool) -> _Description:
    """Describe a rank by its last note; `alive` is whether its beats go on."""
    name = f"rank {rank} ({note.where})"
    if note.error:
        return _Description(f"{name} stopped with {note.error}", True)
    if note.doing == _GIVEN_UP:
        return _Description(f"{name} has given up", False)
    if not alive:
        seconds = max(0.0, time.time() - note.written)
        text = f"no sign of life for {seconds:.0f} s, last seen {note.activity}"
        return _Description(f"{name} is dead or stopped: {text}", True)
    to_blame = note.doing not in (STEPPING, WAITING)
    return _Description(f"{name} has been {note.activity} for {note.seconds:.0f} s", to_blame)


# Words in errors of exchanges. gloo says the last one of an exchange next to one that has timed
# out.
_WORDS = ("gloo", "NCCL", "pair closure")


def end_process(reason: str) -> None:
    """End this process from a thread while the main thread hangs."""
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
        if isinstance(error, (dist.DistError, LostRankError)):
            return True
        if isinstance(error, RuntimeError) and any(word in str(error) for word in _WORDS):
            return True
        error = error.__cause__
    return False
