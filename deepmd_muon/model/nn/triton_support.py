"""Where Triton kernels can run, and chains of kernels that overlap."""

from __future__ import annotations

import contextlib
import importlib.util
import logging
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

log = logging.getLogger(__name__)


_switched_off = False


def usable(device: torch.device) -> bool:
    """Return whether Triton kernels run on a device; on a GPU without them, log the reason once."""
    return device.type == "cuda" and not _switched_off and _works()


@contextlib.contextmanager
def without_kernels() -> Iterator[None]:
    """Let models run torch's own operations, which can be traced, in a `with` block."""
    global _switched_off
    before = _switched_off
    _switched_off = True
    try:
        yield
    finally:
        _switched_off = before


class Branches:
    """Independent chains of small kernels on separate streams, so that they overlap on a GPU.

    Work launched ``with branches.chain(i):`` waits for all work queued before the context was
    entered, and work queued after its end waits for all chains. Chain 0 stays on the current
    stream. Memory that a chain allocates may be freed at any time: only a later use of `Branches`
    can get it again. Autograd runs the backward of an operation on the operation's stream, so
    chains overlap there too: tensors that cross their borders are then used for longer than the
    context lasts, and must be declared with `lend` and `take`.

    Parameters
    ----------
    device
        Where the work runs; on a CPU, chains run one after the other.
    count
        How many chains there are.
    """

    def __init__(self, device: torch.device, count: int) -> None:
        several = device.type == "cuda" and count > 1
        self._streams = _streams(device, min(count, _MOST_CHAINS) - 1) if several else []

    def __enter__(self) -> Branches:
        for stream in self._streams:
            stream.wait_stream(torch.cuda.current_stream(stream.device))
        return self

    def __exit__(self, *error: object) -> None:
        for stream in self._streams:
            torch.cuda.current_stream(stream.device).wait_stream(stream)

    def lend(self, number: int, *tensors: Tensor | None) -> None:
        """Declare that a chain, or its backward, reads tensors from before the context."""
        number %= len(self._streams) + 1
        for tensor in tensors:
            if number and tensor is not None:
                tensor.record_stream(self._streams[number - 1])

    def take(self, *tensors: Tensor | None) -> None:
        """Declare that the current stream reads tensors from a chain."""
        for tensor in tensors:
            if self._streams and tensor is not None:
                tensor.record_stream(torch.cuda.current_stream(tensor.device))

    def chain(self, number: int) -> contextlib.AbstractContextManager[Any]:
        """Return the context of a chain; with more chains than streams, some share one."""
        number %= len(self._streams) + 1
        return torch.cuda.stream(self._streams[number - 1]) if number else contextlib.nullcontext()


# Chains that overlap at most; the same on every use, so that memory is reused in order.
_MOST_CHAINS = 4


@lru_cache
def _streams(device: torch.device, count: int) -> list[torch.cuda.Stream]:
    return [*_streams(device, count - 1), torch.cuda.Stream(device)] if count else []


def has_tensor_cores(device: torch.device) -> bool:
    """Return whether tensor cores multiply single precision: on NVIDIA GPUs from Ampere on."""
    return torch.version.hip is None and torch.cuda.get_device_capability(device) >= (8, 0)


@lru_cache
def _works() -> bool:
    """Launch the smallest kernel, which needs Triton and a C compiler."""
    if importlib.util.find_spec("triton") is None:
        log.warning("triton is not installed: the model runs torch's own operations on this GPU")
        return False
    try:
        from deepmd_muon.model.descriptor import environment_kernels
        from deepmd_muon.model.descriptor.reach import Reach

        edge = torch.ones(1, 1, 3, dtype=torch.float64, device="cuda")
        environment_kernels.environment(
            edge, torch.zeros(1, 1, dtype=torch.int64, device="cuda"), Reach(6.0, 0.5)
        )
    except Exception as error:  # a missing compiler fails in many ways
        log.warning(
            "Triton kernels do not run here (%s): the model runs torch's own operations", error
        )
        return False
    return True
