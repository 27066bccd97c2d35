"""Rendezvous of a run's processes. Before the first exchange, each learns which ranks cannot begin, and why.

They meet in a store of torch at one host and port, which rank 0 keeps, or torchrun's agent. torch's own client waits
without end for an answer from another program that listens there, and takes part in the store of another run; so this
module tries the connection first, gives it a limit, and lets every rank claim its number.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import datetime
import itertools
import logging
import secrets
import socket
import threading
import time
from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

from deepmd_muon.train.errors import TrainingError
from deepmd_muon.train.ranks.launch import Place

log = logging.getLogger(__name__)

T = TypeVar("T")

#: Processes of a large job may start this far apart [s].
PATIENCE = 300.0
#: A store answers within this time [s]; torchrun's is there before its processes are.
ANSWER = 20.0
# A rank that waits longer for rank 0 logs it [s].
_SILENCE = 10.0
# The runs of this process, one after the other, of which torchrun keeps one store.
_NUMBERS = itertools.count()


class Meeting:
    """A process among those of its run, which waits `patience` seconds for the others; `store` reaches all of them.

    Raises
    ------
    TrainingError
        When the port is in use, rank 0 does not come, or another process has this rank.
    """

    def __init__(self, place: Place, patience: float = PATIENCE) -> None:
        self._place = place
        self._end = time.monotonic() + patience
        self._patience = patience
        number = next(_NUMBERS) if place.agent else 0
        connection = _listen(place) if place.hosts else _connect(place, patience)
        self.store: Store = PrefixStore(f"deepmd_muon{number}", connection)
        self.store.set_timeout(datetime.timedelta(seconds=ANSWER))
        token = secrets.token_hex(8)
        if (
            self._ask(lambda: self.store.compare_set(f"claim{place.rank}", "", token))
            != token.encode()
        ):
            raise TrainingError(
                f"another process is rank {place.rank} at {place.meeting} already: "
                "give each run a MASTER_PORT of its own"
            )
        size = self._ask(lambda: self.store.compare_set("size", "", str(place.size))).decode()
        if size != str(place.size):
            raise TrainingError(
                f"rank {place.rank} is one of {place.size} processes, those that it meets at {place.meeting} "
                f"are {size}: give each run a MASTER_PORT of its own"
            )

    def report(self, problem: str = "") -> dict[int, str]:
        """Say whether this rank can begin, and wait until all have come or one has a problem.

        Return the problems of the ranks that have one; without an entry, all can begin. A rank that does not come in
        time is a TrainingError.
        """
        size = self._place.size
        self._ask(lambda: self.store.set(f"report{self._place.rank}", problem))
        if self._ask(lambda: self.store.add("reports", 1)) == size or problem:
            self._ask(lambda: self.store.set("complete", ""))
        complete = self._wait(["complete"], min(self._end, time.monotonic() + _SILENCE))
        if not complete and time.monotonic() < self._end:
            self._log_missing()
            complete = self._wait(["complete"], self._end)
        if not complete:
            missing = ", ".join(map(str, self._missing()))
            raise TrainingError(
                f"rank {missing} has not come to {self._place.meeting} within "
                f"{self._patience:g} s; see its output, and that all of the {size} processes start"
            )
        return {rank: text for rank in range(size) if (text := self.problem_of(rank))}

    def _missing(self) -> list[int]:
        """Return the ranks that have not reported."""
        return [rank for rank in range(self._place.size) if not self._wait([f"report{rank}"])]

    def _log_missing(self) -> None:
        """Log the ranks that have not come; the lowest one that has come does so for all."""
        missing = self._missing()
        if missing and missing[: self._place.rank] == list(range(self._place.rank)):
            listed = ", ".join(map(str, missing[:8])) + (", …" if len(missing) > 8 else "")
            log.warning(
                "rank %d waits for rank %s at %s, up to %.0f s longer",
                self._place.rank,
                listed,
                self._place.meeting,
                self._end - time.monotonic(),
            )

    def leave(self, seconds: float) -> None:
        """Ask the store nothing more after a problem; where this process keeps it, wait until the others have left."""
        if self._place.hosts:
            self._wait(
                [f"heard{rank}" for rank in range(1, self._place.size)], time.monotonic() + seconds
            )
        else:
            with contextlib.suppress(
                RuntimeError
            ):  # the process with the store has ended and does not wait
                self.store.set(f"heard{self._place.rank}", "")

    def problem_of(self, rank: int, seconds: float = 0.0) -> str:
        """Return the problem of a rank once it has reported; nothing when it has none or does not report in time."""
        report = f"report{rank}"
        there = self._wait([report], time.monotonic() + seconds)
        return str(self._ask(lambda: self.store.get(report)).decode()) if there else ""

    def _wait(self, keys: list[str], end: float = 0.0) -> bool:
        """Return whether keys are there before a moment; torch's own wait does not hear Ctrl-C."""
        pause = 0.01
        while not (there := self._ask(lambda: self.store.check(keys))) and time.monotonic() < end:
            time.sleep(pause)
            pause = min(2 * pause, 0.5)
        return there

    def _ask(self, question: Callable[[], T]) -> T:
        try:
            return question()
        except RuntimeError as error:
            raise TrainingError(
                f"rank {self._place.rank} has lost {_keeper(self._place)}, which keeps {self._place.meeting}; "
                "see its output"
            ) from error


def _keeper(place: Place) -> str:
    return "torchrun" if place.agent else "rank 0"


def _listen(place: Place) -> Store:
    """Make the store that this process keeps."""
    _require_known(place)
    try:
        return _store(place)
    except TimeoutError as error:
        raise TrainingError(
            f"rank 0 does not reach itself at {place.meeting} within {ANSWER:g} s: MASTER_ADDR must name its machine"
        ) from error
    except (RuntimeError, ValueError) as error:
        reason = str(error).partition("\n")[0]
        if "EADDRINUSE" in reason:
            reason = "another program or run uses this port; choose another MASTER_PORT"
        raise TrainingError(f"rank 0 cannot listen at {place.meeting}: {reason}") from error


def _require_known(place: Place) -> None:
    """Refuse a host without an address; torch would try for longer than its thread may live, and abort the process.

    In a cluster, the name of a machine may become known a few seconds after its start.
    """
    end = time.monotonic() + _SILENCE
    while True:
        try:
            socket.getaddrinfo(place.host, place.port)
            return
        except OSError as error:
            if time.monotonic() > end:
                raise TrainingError(
                    f"rank {place.rank} does not know the host of {place.meeting}: {error.strerror or error}; "
                    "MASTER_ADDR must name the machine of rank 0"
                ) from error
        time.sleep(0.5)


def _connect(place: Place, patience: float) -> Store:
    """Reach the store as soon as it is there."""
    _require_known(place)
    begin, logged, pause = time.monotonic(), False, 0.01
    while (refusal := _refusal(place)) is not None:
        waited = time.monotonic() - begin
        if waited > (min(patience, ANSWER) if place.agent else patience):
            raise TrainingError(
                f"rank {place.rank} has not found {_keeper(place)} at {place.meeting} within {waited:.0f} s: {refusal}"
            )
        if not logged and waited > _SILENCE:
            logged = True
            log.warning("rank %d waits for rank 0 at %s: %s", place.rank, place.meeting, refusal)
        time.sleep(pause)
        pause = min(2 * pause, 0.5)
    try:
        return _store(place)
    except (TimeoutError, RuntimeError) as error:
        raise TrainingError(
            f"rank {place.rank} finds something else than rank 0 at {place.meeting}: another program uses this port, "
            "or rank 0 is stopped; choose another MASTER_PORT"
        ) from error


def _refusal(place: Place) -> str | None:
    """Return the reason why the store's address cannot be reached; None if a process listens there."""
    try:
        socket.create_connection((place.host, place.port), timeout=min(ANSWER, _SILENCE)).close()
    except OSError as error:
        return error.strerror or str(error)
    return None


def _store(place: Place) -> Store:
    """Return torch's store, of which this process is the keeper or a client.

    Where another program listens there, torch waits for its answer without end: TimeoutError, and its thread is left.
    All other failures end within the time that the thread has: torch tries twice. A thread that comes back while the
    interpreter ends would abort the process.
    """
    made: concurrent.futures.Future[Store] = concurrent.futures.Future()

    def attempt() -> None:
        try:
            made.set_result(
                dist.TCPStore(  # type: ignore[attr-defined]  # not in the stubs
                    *(place.host, place.port, None, place.hosts),
                    timeout=datetime.timedelta(seconds=ANSWER / 4),
                    wait_for_workers=False,
                    multi_tenant=not place.agent,
                )
            )
        except BaseException as error:
            made.set_exception(error)

    threading.Thread(target=attempt, name="deepmd_muon-meeting", daemon=True).start()
    try:
        return made.result(ANSWER)
    except concurrent.futures.TimeoutError as error:  # a class of its own before Python 3.11
        raise TimeoutError(f"no answer within {ANSWER:g} s") from error


def describe(problems: dict[int, str]) -> str:
    """Describe, for a rank that could begin, the problems of the others; each problem appears once."""
    ranks: dict[str, list[str]] = {}
    for rank, problem in sorted(problems.items()):
        ranks.setdefault(problem, []).append(str(rank))
    return "; ".join(
        f"rank {', '.join(names)} cannot begin: {problem}" for problem, names in ranks.items()
    )
