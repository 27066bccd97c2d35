"""Tables that the fused kernels read: locations of matrices, and the scalars that change from step to step."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from deepmd_muon.optim.polar.kernels.whole import write_addresses
from deepmd_muon.optim.routing.views import MatrixView
from deepmd_muon.optim.update.fused_kernels import ROW
from deepmd_muon.optim.update.gradients import StepControl

_AT_ONCE = 16  # addresses that `write_addresses` takes


@dataclasses.dataclass(frozen=True)
class BlockLocation:
    """The location of one block in its parameter: tensor number, offset, row stride and shape, in elements."""

    tensor: int
    offset: int
    stride: int
    rows: int
    columns: int


class AddressTable:
    """Addresses of tensors that may move between steps, on the device."""

    def __init__(self, count: int, device: torch.device) -> None:
        self._written: tuple[int, ...] = ()
        self._table = torch.zeros(-(-count // _AT_ONCE) * _AT_ONCE, dtype=torch.int64, device=device)

    def of(self, tensors: Sequence[Tensor], capturing: bool) -> Tensor:
        """Return a table of the tensors' present addresses; a captured graph gets its own table."""
        now = tuple(map(Tensor.data_ptr, tensors))
        if capturing:
            table = torch.empty_like(self._table)
            for first in range(0, len(now), _AT_ONCE):
                some = now[first : first + _AT_ONCE]
                write_addresses[(1,)](table, first, *some, *(some[-1:] * (_AT_ONCE - len(some))))
            return table
        if now != self._written:
            self._table.copy_(_on_host(now, len(self._table), self._table.is_cuda), non_blocking=True)
            self._written = now
        return self._table


@functools.lru_cache(maxsize=64)
def _on_host(addresses: tuple[int, ...], length: int, pinned: bool) -> Tensor:
    """Return addresses in (pinned) host memory, for copies to the device; it is never overwritten.

    The cache pays because the allocator soon reuses addresses for gradients. A copy may still read an evicted entry:
    torch keeps its pinned memory until the copy has finished.
    """
    padded = [*addresses, *[0] * (length - len(addresses))]
    return torch.tensor(padded, dtype=torch.int64, device="cpu", pin_memory=pinned)


class StepScalars:
    """The learning rate, the skip predicate and the gradients' scale, at the addresses that recorded launches read."""

    def __init__(self, device: torch.device) -> None:
        self.rate = torch.zeros((), dtype=torch.float64, device=device)
        self.skip, self.scale = (torch.zeros((), dtype=torch.float32, device=device) for _ in range(2))
        self._rate: float | None = None

    def write(self, lr: float | Tensor, control: StepControl) -> None:
        """Write the present values without synchronizing."""
        if isinstance(lr, Tensor):
            self.rate.copy_(lr)
            self._rate = None
        elif lr != self._rate:
            self.rate.fill_(lr)
            self._rate = lr
        if control.skip is not None:
            self.skip.copy_(control.skip)
        if control.scale is not None:
            self.scale.copy_(control.scale)


def block_locations(tensor: int, view: MatrixView) -> list[BlockLocation]:
    """Return a parameter's blocks in the order of its Magma scores."""
    blocks = []
    for b in range(view.batch):
        offset = b * view.rows * view.columns
        for m, n in view.block_shapes:
            blocks.append(BlockLocation(tensor, offset, view.columns, m, n))
            offset += m * n if view.axis == "rows" else n
    return blocks


def chunks_of(table: Tensor, width: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Divide blocks into chunks; return the chunks' table, and each block's first chunk and number of chunks."""
    count = (table[:, 1] + width - 1) // width
    first = count.cumsum(0) - count
    chunks = table.repeat_interleave(count, dim=0)
    chunks[:, 0] = (torch.arange(len(chunks), device="cpu") - first.repeat_interleave(count)) * width
    assert chunks.shape[1] == int(ROW.value)
    return chunks.to(device), first, count


def split_float64(x: float) -> tuple[float, float]:
    """Split a float64 number into two float32 numbers, because kernel arguments are float32."""
    high = _rounded(x)
    return high, x - high


@functools.lru_cache(maxsize=64)
def _rounded(x: float) -> float:
    return float(torch.tensor(x, dtype=torch.float32, device="cpu"))
