"""Ranks as threads of one process on one device, whose exchanges are copies: a step of all ranks fits one CUDA graph.

torch's own thread groups copy on the stream of rank 0 alone; here the streams of all ranks wait for each other. Ranks
take turns: one runs until it joins a collective. While it records a small graph of its own, no other rank launches
anything: torch has 32 streams of a priority, so the other could hold the stream that is being recorded.
"""

from __future__ import annotations

import contextlib
import threading
from types import SimpleNamespace
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.testing._internal.distributed import multi_threaded_pg as threaded

_join, _barrier = threaded.Collective.join, distributed_c10d._store_based_barrier
_turn = threading.Lock()


@contextlib.contextmanager
def _others_turn():
    """Let other ranks run."""
    _turn.release()
    try:
        yield
    finally:
        _turn.acquire()


def _ordered_join(self, rank, data):
    """Join a collective; on a GPU the copies wait for all ranks' streams, and these for the copies."""
    on_gpu = torch.cuda.is_available()
    if on_gpu:
        _order(self, rank)
    if rank == 0:
        work = self._collective.work

        def in_turn(everything):
            with _turn:
                work(everything)

        self._collective = SimpleNamespace(work=in_turn)
    with _others_turn():
        found = _join(self, rank, data)
    if on_gpu and rank:
        torch.cuda.current_stream().wait_event(self.done)
    return found


def _wait_for_others(*args, **options):
    """Wait in the store until all ranks have made a group."""
    with _others_turn():
        _barrier(*args, **options)


def _order(self, rank):
    """Make the copies of a collective wait for this rank's stream, and record when they are done."""
    with self._start_cond:
        events = self.__dict__.setdefault("events", [])
        events.append(torch.cuda.Event())
        events[-1].record()
        self.__dict__.setdefault("done", torch.cuda.Event())
    if rank == 0:
        work = self._collective.work

        def in_order(everything):
            for event in events:
                torch.cuda.current_stream().wait_event(event)
            work(everything)
            self.done.record()

        self._collective = SimpleNamespace(work=in_order)


class Ranks:
    """Threads that are the ranks of a process group, and do what they are told, all the same.

    Parameters
    ----------
    world
        How many.
    """

    def __init__(self, world):
        self.world = world

    def __enter__(self):
        self._patches = contextlib.ExitStack()
        for place, name, new in (
            (threaded.Collective, "join", _ordered_join),
            # Asked only whether it exists; these groups are written in Python and have none.
            (threaded.ProcessLocalGroup, "_get_backend", lambda group, device: group),
            (threaded, "_store_based_barrier", _wait_for_others),
            (distributed_c10d, "_store_based_barrier", _wait_for_others),
        ):
            self._patches.enter_context(mock.patch.object(place, name, new))
        if not hasattr(
            threaded.ThreadLocalWorld, "comms"
        ):  # torch 2.11 reads it at the end of a group
            self._patches.enter_context(
                mock.patch.object(threaded.ThreadLocalWorld, "comms", [], create=True)
            )
        torch._C._distributed_c10d._set_thread_isolation_mode(True)
        threaded._install_threaded_pg()
        threaded.ProcessLocalGroup.reset()
        self._store = dist.HashStore()
        self._begin, self._end = (
            threading.Barrier(self.world + 1, timeout=900.0) for _ in range(2)
        )
        self._errors = []
        self._threads = [
            threading.Thread(target=self._work, args=(rank,), daemon=True)
            for rank in range(self.world)
        ]
        for thread in self._threads:
            thread.start()
        self.together(
            lambda rank: dist.init_process_group(
                "threaded", rank=rank, world_size=self.world, store=self._store
            )
        )
        return self

    def __exit__(self, kind, *_):
        if kind is None:
            self.together(None)
        self._begin.abort()  # after an error, threads may wait for a collective for good
        threaded._uninstall_threaded_pg()
        torch._C._distributed_c10d._set_thread_isolation_mode(False)
        self._patches.close()

    def together(self, task, stream=None):
        """Run a function on every rank and wait; raise what a rank raised first.

        The ranks share a stream that is given, for a capture. Otherwise each has one of its own.
        """
        self._task, self._stream = task, stream
        self._begin.wait()
        self._end.wait()
        if self._errors:
            error = self._errors[0]
            self._errors.clear()
            threaded.ProcessLocalGroup.reset()  # an error ends all later collectives otherwise
            raise error

    def _work(self, rank):
        own = torch.cuda.Stream() if torch.cuda.is_available() else None
        while True:
            try:
                self._begin.wait()
            except threading.BrokenBarrierError:
                return
            task = self._task
            try:
                if task is None:
                    dist.destroy_process_group()
                else:
                    with _turn, torch.cuda.stream(self._stream or own):
                        task(rank)
                    if own is not None and self._stream is None:
                        own.synchronize()
            except BaseException as error:
                self._errors.append(error)
                threaded.ProcessLocalGroup.exception_handle(error)  # the others need not wait
            self._end.wait()
            if task is None:
                return
