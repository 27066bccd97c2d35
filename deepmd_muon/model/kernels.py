"""Whether Triton kernels can run where a tensor lives."""

from __future__ import annotations

import contextlib
import importlib.util
import logging
from collections.abc import Iterator
from functools import lru_cache

import torch

log = logging.getLogger(__name__)


# Whether torch is recording operations for its compiler.
_tracing = False


def usable(device: torch.device) -> bool:
    """Tell whether Triton kernels run on a device; logs once why they do not on a GPU.

    A trace does not see them, and what replaces torch's operations here the compiler does as well.
    """
    return device.type == "cuda" and not _tracing and _works()


def usable_as_operators(device: torch.device) -> bool:
    """Tell whether a trace is being made on a device where Triton kernels run: it sees those that torch knows."""
    return device.type == "cuda" and _tracing and _works()


@contextlib.contextmanager
def traced() -> Iterator[None]:
    """Compute with operations that torch can record, within the context."""
    global _tracing
    _tracing = True
    try:
        yield
    finally:
        _tracing = False


@lru_cache
def _works() -> bool:
    """Launch the smallest kernel, which needs Triton and a C compiler."""
    if importlib.util.find_spec("triton") is None:
        log.warning("triton is not installed: the model runs torch's own operations on this GPU")
        return False
    try:
        from deepmd_muon.model.descriptor import environment_kernels

        one = torch.ones(1, 1, 3, dtype=torch.float64, device="cuda")
        environment_kernels.environment(one, torch.zeros(1, 1, dtype=torch.bool, device="cuda"), 6.0, 0.5, 0.0)
    except Exception as error:  # a missing compiler fails in many ways
        log.warning("Triton kernels do not run here (%s): the model runs torch's own operations", error)
        return False
    return True
