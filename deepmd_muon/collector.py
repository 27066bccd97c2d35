"""Pauses of Python's garbage collector."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without_collector() -> Iterator[None]:
    """Disable the collector: it might destroy a CUDA graph, which must not happen during a capture."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


@contextmanager
def importing_torch() -> Iterator[None]:
    """Disable the collector while torch is imported for the first time, and exempt what was imported.

    It would find nothing. A training of two steps takes 3.1 s of processor time instead of 3.7.
    """
    if "torch" in sys.modules:
        yield
        return
    with without_collector():
        yield
        gc.freeze()
