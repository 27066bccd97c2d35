"""How long a GPU does nothing but exchange or wait for other GPUs, from the kernels of a profile."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple


class Kernel(NamedTuple):
    """A kernel of a profile: when it began and ended [µs], and its name."""

    begin: float
    end: float
    name: str


def exposed(kernels: Iterable[Kernel]) -> float:
    """Return the time in which only kernels of NCCL ran [µs].

    Such a kernel runs from the arrival of its own GPU to the end of the exchange, so that waiting
    for the slowest GPU counts.
    """
    everything = list(kernels)
    computing = [kernel for kernel in everything if "nccl" not in kernel.name.lower()]
    return covered(everything) - covered(computing)


def covered(kernels: Iterable[Kernel]) -> float:
    """Return the time in which at least one of the kernels ran [µs]."""
    total = 0.0
    last = float("-inf")
    for kernel in sorted(kernels):
        total += max(0.0, kernel.end - max(last, kernel.begin))
        last = max(last, kernel.end)
    return total
