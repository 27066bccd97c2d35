"""Compile the Triton kernels of a computation in parallel, before it runs for the first time.

On a machine whose kernel cache is empty, each kernel takes a quarter of a second to four seconds to
compile, and the computation waits for one after the other. `compile_ahead` rehearses the
computation to learn which kernels it launches: a kernel that is not compiled yet is handed to a pool
of threads instead of being launched.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from triton import AsyncCompileMode

log = logging.getLogger(__name__)

_ALLOCATIONS = frozenset(
    (
        torch.ops.aten.empty,
        torch.ops.aten.empty_like,
        torch.ops.aten.empty_strided,
        torch.ops.aten.new_empty,
        torch.ops.aten.new_empty_strided,
    )
)


def compile_ahead(compute: Callable[[], object], device: torch.device) -> None:
    """Compile the kernels that a computation will launch, and wait until all are compiled.

    Parameters
    ----------
    compute
        The computation. It is called once, and its numbers are wrong in this call. It must not wait
        for the device, and must not keep what it computes.
    device
        The GPU on which it runs.

    Notes
    -----
    Memory that a skipped kernel would have filled is zero, so that torch's own operations may use
    it as an index. Errors of the rehearsal are dropped: they occur again in the computation itself.
    """
    with (
        ThreadPoolExecutor(os.cpu_count(), thread_name_prefix="deepmd_muon-compile") as pool,
        _Rehearsal(pool, device),
        _ZeroedMemory(),
        # The compile mode belongs to a thread, so the backward pass must run in this one.
        torch.autograd.set_multithreading_enabled(False),
    ):
        try:
            compute()
        except Exception as error:
            log.debug("kernels are compiled one by one: the rehearsal of a step failed: %s", error)


class _ZeroedMemory(TorchDispatchMode):
    """Fill all memory that torch allocates with zeros."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Tell torch not to import its compiler for this mode, which takes seconds."""
        return False

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.overloadpacket in _ALLOCATIONS:
            result.zero_()
        return result


class _Rehearsal(AsyncCompileMode):
    """Triton's mode for compiling in a pool, with kernels whose launches do nothing meanwhile."""

    def __init__(self, executor: Executor, device: torch.device) -> None:
        super().__init__(executor)
        self._device = device
        self._pending: dict[str, _PendingKernel] = {}
        self._finalize: dict[str, Callable[[Any], None]] = {}

    def submit(
        self, key: str, compile_fn: Callable[[], Any], finalize_fn: Callable[[Any], None]
    ) -> _PendingKernel:
        """Compile a new kernel in the pool; return what Triton launches in its place."""

        def compile_and_load() -> Any:
            with torch.cuda.device(self._device):
                kernel = compile_fn()
                _ = kernel.run  # compiles the C function that launches the kernel, and loads both
            return kernel

        if key not in self._pending:
            self._pending[key] = _PendingKernel(self.executor.submit(compile_and_load))
            self._finalize[key] = finalize_fn
        return self._pending[key]

    def __exit__(self, *error: Any) -> None:
        """Leave the mode, so that the computation itself never meets it; then wait for the pool."""
        super().__exit__(*error)
        for key, pending in self._pending.items():
            if pending.future.exception() is None:
                self._finalize[key](pending.future.result())


class _PendingKernel:
    """A kernel that is being compiled; its launches do nothing.

    Triton may keep this object in its cache until the kernel is compiled. If compiling failed, the
    object stays there, and the next launch raises the compiler's error.
    """

    function = None
    packed_metadata = None

    def __init__(self, future: Future[Any]) -> None:
        self.future = future

    def launch_metadata(self, *arguments: object) -> None:
        """Return what Triton's profilers want to know of a launch: nothing."""

    def run(self, *arguments: object) -> None:
        """Launch nothing."""
        if self.future.done():
            self.future.result()
