"""A table of tensor addresses on the device, which kernels read."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from deepmd_muon.optim.polar.kernels.whole import write_addresses

_AT_ONCE = 16  # addresses that `write_addresses` takes


class AddressTable:
    """Addresses of `count` tensors that may move between launches.

    Attributes
    ----------
    table
        int64, on the device; recorded graphs read it at each replay.
    """

    def __init__(self, count: int, device: torch.device) -> None:
        self._written: tuple[int, ...] = ()
        self.table = torch.zeros(_padded(count), dtype=torch.int64, device=device)

    def of(self, tensors: Sequence[Tensor]) -> Tensor:
        """Return the table, updated to the tensors' present addresses without synchronizing."""
        now = tuple(map(Tensor.data_ptr, tensors))
        if now != self._written:
            self.table.copy_(_on_host(now, self.table.is_cuda), non_blocking=True)
            self._written = now
        return self.table


def captured_addresses(tensors: Sequence[Tensor]) -> Tensor:
    """Return a table of the tensors' addresses for the graph being captured; each replay writes it."""
    table = torch.empty(_padded(len(tensors)), dtype=torch.int64, device=tensors[0].device)
    for first in range(0, len(tensors), _AT_ONCE):
        some = [x.data_ptr() for x in tensors[first : first + _AT_ONCE]]
        write_addresses[(1,)](table, first, *some, *(some[-1:] * (_AT_ONCE - len(some))))
    return table


def _padded(count: int) -> int:
    return -(-count // _AT_ONCE) * _AT_ONCE


@functools.lru_cache(maxsize=64)
def _on_host(addresses: tuple[int, ...], pinned: bool) -> Tensor:
    """Return addresses in (pinned) host memory, for copies to the device; it is never overwritten.

    The cache pays because the allocator soon reuses addresses for gradients. A copy may still read an evicted entry:
    torch keeps its pinned memory until the copy has finished.
    """
    padded = [*addresses, *[0] * (_padded(len(addresses)) - len(addresses))]
    return torch.tensor(padded, dtype=torch.int64, device="cpu", pin_memory=pinned)
