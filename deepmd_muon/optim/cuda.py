"""CUDA streams and graphs: side streams, recorded launches, first launches, refused captures."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType, TracebackType
from typing import Any, TypeVar

import torch
from torch import Tensor

from deepmd_muon.collector import without_collector
from deepmd_muon.optim.errors import CaptureError

_LOG = logging.getLogger(__name__)

T = TypeVar("T")

#: Elements of the Adam routes up to which they run on a stream beside the Muon route.
MOST_BESIDE = 4 * 2**20


class SideStream:
    """A second stream of a CUDA device.

    Work launched inside ``with side_stream:`` waits for the work queued on the current stream at
    the last `fork`, and not for later work; on exit the current stream waits for it. A captured
    graph contains both the fork and the join.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream = torch.cuda.Stream(device)
        self._inside = torch.cuda.stream(self._stream)
        self._forked = torch.cuda.Event()

    def fork(self) -> None:
        """Make work launched inside wait for everything queued up to here."""
        self._forked.record(torch.cuda.current_stream(self.device))

    def __enter__(self) -> None:
        self._stream.wait_event(self._forked)
        self._inside.__enter__()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._inside.__exit__(kind, error, trace)
        torch.cuda.current_stream(self.device).wait_stream(self._stream)


def record(launch: Callable[[], T], device: torch.device) -> tuple[torch.cuda.CUDAGraph, T]:
    """Record launches of compiled kernels on a CUDA device in a graph without running them.

    They must not synchronize. Return the graph, and the value of `launch`, in memory that each
    replay of the graph overwrites.
    """
    # torch hands out 32 streams in turn, so a new stream may be in use elsewhere. High-priority
    # streams have a separate pool, so that no copy by a data-loading thread lands in this graph.
    graph = torch.cuda.CUDAGraph()
    stream = torch.cuda.Stream(device, priority=-1)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream), without_collector():
        # Other threads may use the device meanwhile.
        graph.capture_begin(capture_error_mode="thread_local")
        try:
            result = launch()
        finally:
            graph.capture_end()
    return graph, result


def try_record(
    launch: Callable[[], T], device: torch.device, what: str
) -> tuple[torch.cuda.CUDAGraph, T] | None:
    """Record launches as `record` does.

    If that fails, log a warning that names `what` and return None.
    """
    try:
        return record(launch, device)
    except Exception as error:  # an error of the driver must not end a training run
        _LOG.warning("%s could not be recorded and is launched kernel by kernel: %s", what, error)
        return None


def launch_in_threads(launches: Sequence[Callable[[], object]], device: torch.device) -> None:
    """Run first launches, each of which compiles its kernel, in parallel threads; wait for them.

    Exceptions are dropped: the same launch raises them again where its result is needed.
    """
    # A thread starts on the default stream, which does not wait for other streams. The kernels would
    # read tables of addresses before the caller's stream has written them, or after it has reused
    # their memory.
    stream = torch.cuda.current_stream(device) if device.type == "cuda" else None

    def run(launch: Callable[[], object]) -> None:
        on_stream = contextlib.nullcontext() if stream is None else torch.cuda.stream(stream)
        with contextlib.suppress(Exception), on_stream, torch.no_grad():
            launch()

    keep_launchers_apart()
    n_threads = min(len(launches), os.cpu_count() or 1)
    with ThreadPoolExecutor(n_threads, thread_name_prefix="deepmd_muon-compile") as pool:
        list(pool.map(run, launches))


@functools.cache
def keep_launchers_apart() -> None:
    """Let threads that compile Triton kernels load C launchers without receiving one another's.

    Triton before 3.7 compiles a launcher for each signature. All launchers are Python modules of one
    name, and CPython keeps one module of a name: a thread that loads a launcher again writes its
    function into the module that another thread has just received.
    """
    from triton.runtime import build

    load = getattr(build, "_load_module_from_path", None)
    if load is None:
        return
    turns = threading.Lock()

    def load_apart(name: str, path: str) -> ModuleType:
        module = ModuleType(name)
        with turns:
            module.__dict__.update(load(name, path).__dict__)
        return module

    build._load_module_from_path = load_apart


def is_capturing() -> bool:
    """Return whether launches of this thread are being recorded in a CUDA graph."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def refuse_unsafe_capture(
    groups: Sequence[Mapping[str, Any]],
    state: Mapping[Tensor, Any],
    params: Sequence[Tensor],
    *,
    offloaded: bool,
    on_nonfinite: str,
    alternates: bool = False,
    n_never_with_gradient: int = 0,
) -> None:
    """Raise during a capture whose replays would not repeat the step.

    `params` are the parameters that have a gradient; with `alternates`, some have none on purpose.
    `n_never_with_gradient` others have state, because they live on several ranks, but had no
    gradient in any step.

    Raises
    ------
    CaptureError
        When a group is not capturable, state would be made inside the graph (again at each replay),
        a trainable parameter has no gradient, the state is offloaded, or `on_nonfinite` needs the
        host.
    """
    if not params or not params[0].is_cuda or not is_capturing():
        return
    if not all(group["capturable"] and isinstance(group["lr"], Tensor) for group in groups):
        raise CaptureError(
            "a captured step would freeze the learning rate; construct HybridMuon with "
            "capturable=True"
        )
    if offloaded:
        raise CaptureError(
            "moments in host memory are copied on other streams; call optimizer.offload(False) "
            "first"
        )
    if on_nonfinite == "error":
        raise CaptureError(
            "on_nonfinite='error' synchronizes with the device, which a graph cannot; use 'skip'"
        )
    fresh = sum(p not in state for p in params)
    if fresh:
        raise CaptureError(
            f"{fresh} parameters have no state yet; take one step before the capture"
        )
    missing = len(state) - len(params) - n_never_with_gradient
    if missing > 0 and not alternates:
        raise CaptureError(
            f"{missing} parameters with state have no gradient; replays would not step them"
        )
