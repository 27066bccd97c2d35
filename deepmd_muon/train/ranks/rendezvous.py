"""Meet the other processes of a run, and learn which of them cannot begin, and why.

They meet in a store of torch at one host and port. Rank 0 keeps it, or torchrun's agent.
"""

from __future__ import annotations

import contextlib
import datetime
import itertools
import logging
import os
import secrets
import socket
import time
from collections.abc import Iterator

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

from deepmd_muon.train.errors import TrainingError
from deepmd_muon.train.ranks.launch import Place

log = logging.getLogger(__name__)

#: Processes of a large job may start this far apart [s].
PATIENCE = 300.0
#: A store answers within this time [s]. The store of torchrun exists before its processes.
ANSWER = 20.0
# A rank that waits longer logs whom it waits for [s].
_SILENCE = 10.0
# torchrun keeps one store for all runs of a process.
_run_numbers = itertools.count()


class Rendezvous:
    """The place where the processes of a run meet; `store` reaches all of them.

    Parameters
    ----------
    place
        This process.
    patience
        How long it waits for the others [s].

    Raises
    ------
    TrainingError
        When the port is in use or rank 0 does not come.
    """

    def __init__(self, place: Place, patience: float = PATIENCE) -> None:
        self._place = place
        self._patience = patience
        self._end = time.monotonic() + patience
        prefix = "deepmd_muon"
        if place.agent:
            # The store also outlives the processes that torchrun starts again after a failure.
            attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
            prefix += f"/{attempt}/{next(_run_numbers)}"
        self.store: Store = PrefixStore(prefix, _connect(place, patience))
        self.store.set_timeout(datetime.timedelta(seconds=ANSWER))

    def report(self, problem: str = "") -> dict[int, str]:
        """Share this rank's problem, and wait until all have come or one has a problem.

        Returns
        -------
        dict
            The problem of each rank that has one; empty when all can begin.

        Raises
        ------
        TrainingError
            When a rank does not come in time, or another process has this rank already.
        """
        place = self._place
        token = secrets.token_hex(8)
        with self._keeper_named():
            claim = self.store.compare_set(f"claim{place.rank}", "", token)
            if claim.decode() != token:
                raise TrainingError(
                    f"another process is rank {place.rank} at {place.meeting} already: "
                    "give each run a MASTER_PORT of its own"
                )
            self.store.set(f"report{place.rank}", problem)
            if self.store.add("reports", 1) == place.size or problem:
                self.store.set("complete", "")
            if not self._wait("complete", min(self._end, time.monotonic() + _SILENCE)):
                self._log_missing()
            if not self._wait("complete", self._end):
                missing = ", ".join(map(str, self._missing()))
                raise TrainingError(
                    f"rank {missing} has not come to {place.meeting} within {self._patience:g} s; "
                    f"see its output, and that all of the {place.size} processes start"
                )
            problems = {rank: self.problem_of(rank) for rank in range(place.size)}
        return {rank: text for rank, text in problems.items() if text}

    def problem_of(self, rank: int, seconds: float = 0.0) -> str:
        """Return the problem of a rank; empty if it has none or does not report in time."""
        key = f"report{rank}"
        if not self._wait(key, time.monotonic() + seconds):
            return ""
        return str(self.store.get(key).decode())

    def leave(self, seconds: float) -> None:
        """Say that this rank has read the store; its keeper waits until the others have said so."""
        with contextlib.suppress(RuntimeError):  # the keeper may have ended without waiting
            self.store.set(f"left{self._place.rank}", "")
            end = time.monotonic() + seconds
            for rank in range(self._place.size if self._place.hosts else 0):
                self._wait(f"left{rank}", end)

    def _wait(self, key: str, end: float) -> bool:
        """Return whether a key is there before a moment. torch's own wait does not hear Ctrl-C."""
        pause = 0.01
        while not (exists := self.store.check([key])) and time.monotonic() < end:
            time.sleep(pause)
            pause = min(2 * pause, 0.5)
        return bool(exists)

    def _missing(self) -> list[int]:
        """Return the ranks that have not reported."""
        return [rank for rank in range(self._place.size) if not self.store.check([f"report{rank}"])]

    def _log_missing(self) -> None:
        """Log which ranks have not come. The lowest rank that has come does so for all."""
        missing = self._missing()
        lowest_present = min(set(range(self._place.size)) - set(missing))
        if missing and self._place.rank == lowest_present:
            log.warning(
                "rank %d waits for rank %s at %s, up to %.0f s longer",
                self._place.rank,
                ", ".join(map(str, missing)),
                self._place.meeting,
                self._end - time.monotonic(),
            )

    @contextlib.contextmanager
    def _keeper_named(self) -> Iterator[None]:
        """Name the process that keeps the store in errors of the store."""
        try:
            yield
        except dist.DistError as error:
            raise TrainingError(
                f"rank {self._place.rank} has lost {_keeper(self._place)}, which keeps "
                f"{self._place.meeting}; see its output"
            ) from error


def _keeper(place: Place) -> str:
    return "torchrun" if place.agent else "rank 0"


def _connect(place: Place, patience: float) -> Store:
    """Make the store if this process keeps it; otherwise reach it as soon as it is there."""
    _await_address(place, patience)
    # Before it connects, and where it accepts, torch asks for the names of addresses. A resolver
    # whose server is silent answers after 10 s.
    timeout = datetime.timedelta(seconds=0.75 * ANSWER)
    try:
        return dist.TCPStore(  # type: ignore[attr-defined]  # not in the stubs
            place.host,
            place.port,
            is_master=place.hosts,
            timeout=timeout,
            wait_for_workers=False,
            multi_tenant=not place.agent,
        )
    except (RuntimeError, ValueError) as error:
        reason = str(error).partition("\n")[0]
        raise TrainingError(
            f"rank {place.rank} cannot meet the others at {place.meeting}: another program or run "
            f"uses this port; choose another MASTER_PORT ({reason})"
        ) from error


def _await_address(place: Place, patience: float) -> None:
    """Wait until a process listens at the address, or on rank 0 until its host is known.

    torch would wait without a word for the first, and log a page about an unknown host. In a
    cluster, the name of a machine may become known a few seconds after its start; an unknown host
    ends every rank soon after.
    """
    address = (place.host, place.port)
    begin = time.monotonic()
    logged = False
    pause = 0.01
    while True:
        try:
            if place.hosts:
                socket.getaddrinfo(*address)
            else:
                socket.create_connection(address, timeout=_SILENCE).close()
            return
        except OSError as error:
            reason = error.strerror or str(error)
            host_is_unknown = isinstance(error, socket.gaierror)
        waited = time.monotonic() - begin
        if waited > (_SILENCE if host_is_unknown or place.hosts else patience):
            raise TrainingError(
                f"rank {place.rank} does not reach {place.meeting} within {waited:.0f} s: "
                f"{reason}; MASTER_ADDR must name the machine of {_keeper(place)}"
            )
        if waited > _SILENCE and not logged:
            logged = True
            log.warning("rank %d waits for rank 0 at %s: %s", place.rank, place.meeting, reason)
        time.sleep(pause)
        pause = min(2 * pause, 0.5)


def describe(problems: dict[int, str]) -> str:
    """Describe the problems of ranks that cannot begin; each problem appears once."""
    ranks_with: dict[str, list[str]] = {}
    for rank, problem in sorted(problems.items()):
        ranks_with.setdefault(problem, []).append(str(rank))
    return "; ".join(
        f"rank {', '.join(ranks)} cannot begin: {problem}" for problem, ranks in ranks_with.items()
    )
