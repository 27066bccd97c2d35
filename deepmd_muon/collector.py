"""Python's collector of cycles, which must wait at times."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without_collector() -> Iterator[None]:
    """Collect no cycles within the context: where many objects are made that stay, and while a CUDA graph is captured.

    An object that goes may own another graph, which cannot be destroyed meanwhile.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()
