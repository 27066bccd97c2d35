"""CUDA graphs of functions that read and write tensors at constant addresses."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator

import torch

from deepmd_muon.collector import without_collector

log = logging.getLogger(__name__)


class GraphMemory:
    """The stream that graphs of a run are captured on, and their common pool of memory.

    Graphs that replay one after the other may share a pool: each overwrites what the others left.
    """

    def __init__(self) -> None:
        self.stream = torch.cuda.Stream()
        self.pool = torch.cuda.graph_pool_handle()

    def run_aside(self, launch: Callable[[], None]) -> None:
        """Launch on the stream of captures, in order with the current stream."""
        current = torch.cuda.current_stream()
        self.stream.wait_stream(current)
        with torch.cuda.stream(self.stream):
            launch()
        current.wait_stream(self.stream)

    def recorded(self, launch: Callable[[], None]) -> torch.cuda.CUDAGraph:
        """Return the work that a function launches as a graph, without running it."""
        graph = torch.cuda.CUDAGraph()
        # The outer context returns to this stream even after an error. thread_local: other threads
        # use the device meanwhile, those that prepare batches for example.
        with (
            torch.cuda.stream(torch.cuda.current_stream()),
            own_blas_workspaces(),
            without_collector(),
            torch.cuda.graph(graph, self.pool, self.stream, capture_error_mode="thread_local"),
        ):
            launch()
        return graph


class Replayed:
    """A function that is called once, recorded at its second call, and replayed from then on.

    Parameters
    ----------
    launch
        The function. Its tensors keep their addresses, and it does not wait for the device.
    memory
        Where graphs are captured; None always calls the function.
    """

    def __init__(self, launch: Callable[[], None], memory: GraphMemory | None) -> None:
        self._launch = launch
        self._memory = memory
        self._called = False
        self.graph: torch.cuda.CUDAGraph | None = None

    def __call__(self) -> None:
        """Launch the work."""
        if self.graph is not None:
            self.graph.replay()
            return
        if self._memory is None:
            self._launch()
            return
        if self._called:
            try:
                self.graph = self._memory.recorded(self._launch)
            except Exception as error:  # no exception of a driver or module may end a run
                reason = f"{type(error).__name__}: {error}".splitlines()[0]
                log.warning(
                    "kernels are launched one at a time, because they cannot be captured: %s",
                    reason,
                )
                self._memory = None
                self._launch()
                return
            self.graph.replay()
            return
        self._called = True
        self._memory.run_aside(self._launch)


@contextlib.contextmanager
def own_blas_workspaces() -> Iterator[None]:
    """Let a capture in this context take cuBLAS's workspaces from the graph's pool.

    torch keeps one workspace a handle and stream, and a graph keeps its address. Graphs that were
    captured on the same streams would share it, and write over one another's partial sums when they
    replay at the same time.
    """
    torch._C._cuda_clearCublasWorkspaces()
    try:
        yield
    finally:
        torch._C._cuda_clearCublasWorkspaces()
