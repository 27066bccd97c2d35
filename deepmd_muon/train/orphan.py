"""End this rank if its launcher has died, so that it does not keep running in the background."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping

from torch.distributed.distributed_c10d import Store

from deepmd_muon.train.launch import Place
from deepmd_muon.train.watch import end_process

log = logging.getLogger(__name__)

# Variables that torchrun and the launchers of MPI set; srun ends its processes itself.
_LAUNCHERS = {"TORCHELASTIC_RUN_ID": "torchrun", "PMIX_RANK": "mpirun", "PMI_RANK": "mpirun"}
# How often the parent is looked at [s].
_INTERVAL = 0.5


def _answers(store: Store, limit: float) -> Callable[[], bool]:
    """Return a function that asks a store now and then, and returns False once it has not answered for `limit`."""
    mine = store.clone()  # type: ignore[attr-defined]  # not in the stubs
    asked = heard = time.monotonic()

    def answers() -> bool:
        nonlocal asked, heard
        now = time.monotonic()
        if now - asked > min(5.0, limit / 2):
            asked = now
            with contextlib.suppress(RuntimeError):
                mine.check(["size"])
                heard = time.monotonic()
        return now - heard <= limit

    return answers


@contextlib.contextmanager
def ended_with_launcher(
    place: Place, store: Store, limit: float, environment: Mapping[str, str] = os.environ
) -> Iterator[None]:
    """End this process when its launcher dies in a `with` block.

    It gets SIGTERM, at which a run finishes its step, saves and ends; before the first step, SIGTERM ends it at once.
    If it has not ended after `limit`, it ends without saving.

    Parameters
    ----------
    place
        Which process this is.
    store
        Reaches the other ranks. The store of torchrun that does not answer for `limit` counts as its death: a script
        between torchrun and this process may outlive it.
    limit
        Longest wait [s].
    environment
        Tells which launcher it is; a process that was started by hand may outlive its shell.
    """
    launcher = next((name for variable, name in _LAUNCHERS.items() if variable in environment), None)
    if launcher is None:
        yield
        return
    finished, parent = threading.Event(), os.getppid()
    answers = _answers(store, limit) if place.agent else lambda: True

    def look() -> None:
        while os.getppid() == parent and answers():
            if finished.wait(_INTERVAL):
                return
        reason = f"{launcher}, which started rank {place.rank}, has died"
        log.error("%s: ending this rank", reason)
        os.kill(os.getpid(), signal.SIGTERM)
        if not finished.wait(limit):
            end_process(f"{reason}, and rank {place.rank} has not ended within {limit:g} s of SIGTERM")

    thread = threading.Thread(target=look, name="deepmd_muon-launcher", daemon=True)
    thread.start()
    try:
        yield
    finally:
        finished.set()
        thread.join()
