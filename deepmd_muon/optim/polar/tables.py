"""Data of launches: locations of matrices, tables of addresses, and the launch sets that the host keeps."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from deepmd_muon.optim.polar.kernels.whole import write_addresses
from deepmd_muon.optim.polar.schedules import Coefficients

_AT_ONCE = 16  # addresses that `write_addresses` takes


class AddressTable:
    """Addresses of `count` tensors that may move between launches, in `table`, int64, which recorded graphs read."""

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

    The cache saves copies because the allocator soon reuses addresses for gradients. A copy may still read an evicted
    entry: torch keeps its pinned memory until the copy has finished.
    """
    padded = [*addresses, *[0] * (_padded(len(addresses)) - len(addresses))]
    return torch.tensor(padded, dtype=torch.int64, device="cpu", pin_memory=pinned)


@dataclasses.dataclass(frozen=True)
class MatrixLocation:
    """One matrix: its tensor, offset, and shape with the smaller dimension as rows.

    `stride` is the stride of the rows; or of the columns if `transposed`, which means contiguous along the columns.
    """

    tensor: int
    kind: int
    offset: int
    rows: int
    columns: int
    stride: int
    transposed: bool
    out: int
    out_row: int
    out_column: int

    def row(self, tile: int = 0, single: int = 0, half: int = 0) -> list[int]:
        """Return the table row that the kernels read."""
        place = [
            self.tensor,
            self.kind,
            self.offset,
            self.rows,
            self.columns,
            self.stride,
            int(self.transposed),
        ]
        return [tile, *place, self.out, self.out_row, self.out_column, single, half]


@dataclasses.dataclass(frozen=True)
class Launch:
    """Tables on the device and the sizes of one launch."""

    grid: int
    matrices: int
    table: Tensor
    programs: Tensor | None
    constants: dict[str, Any]
    single: int = 0
    half: int = 0


@dataclasses.dataclass(frozen=True)
class Span:
    """The `count` matrices of tensor number `tensor` in a batch.

    Their contiguous results start at element `place`; if `transposed`, these have the smaller dimension as columns.
    """

    tensor: int
    count: int
    place: int
    transposed: bool


class Inputs(NamedTuple):
    """The matrices, as launches read them: addresses on the device, and tensors (None in a recording)."""

    addresses: Tensor
    tensors: Sequence[Tensor] | None


class Application(NamedTuple):
    """How results update parameters instead of being written."""

    # For each tensor of matrices, int64 (count, 2): addresses of contiguous parameters, and numbers of their factors.
    targets: Sequence[Tensor]
    squares: Sequence[
        Tensor
    ]  # for each, float64 (count, 1, 2): 1 and the sum of the squares of each matrix
    dtype: torch.dtype  # of the parameters: float32, float16 or bfloat16
    factors: Tensor  # scale and damping, float32 (factors,)
    rate: Tensor  # learning rate, float64 ()
    decay: tuple[float, float]  # weight decay, split by `split_float64`
    skip: Tensor  # float32 (); if above 0, the parameters stay unchanged


# Starts one launch: name, launch, inputs, coefficients, result.
StartLaunch = Callable[[str, Launch, Inputs, Coefficients, Tensor], None]


@dataclasses.dataclass(eq=False)  # hashed by identity
class LaunchSet:
    """All launches for one set of shapes, and each stream's table of addresses."""

    name: str
    launches: list[Launch]
    out_size: int
    out_places: list[int]
    addresses: dict[int, AddressTable] = dataclasses.field(default_factory=dict)
    seen: set[tuple[int, Coefficients]] = dataclasses.field(default_factory=set)
    recordings: int = 0

    def results(self, out: Tensor, matrices: Sequence[Tensor]) -> list[Tensor]:
        """Return the results as views of `out`, with the shapes of `matrices`."""
        places = zip(self.out_places, matrices, strict=True)
        return [out[place : place + x.numel()].view(x.shape) for place, x in places]
