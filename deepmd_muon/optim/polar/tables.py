"""Data of launches: locations of matrices, tables of addresses, and sets of launches."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from deepmd_muon.optim.polar.kernels.whole import write_addresses
from deepmd_muon.optim.polar.schedules import Coefficients

_PER_LAUNCH = 16  # addresses that `write_addresses` takes


class AddressTable:
    """Addresses of tensors that may move between launches.

    `table`, int64, has them on the device; recorded graphs read it.
    """

    def __init__(self, count: int, device: torch.device) -> None:
        self._written: tuple[int, ...] = ()
        self.table = torch.zeros(_padded(count), dtype=torch.int64, device=device)

    def of(self, tensors: Sequence[Tensor]) -> Tensor:
        """Return the table, updated to the tensors' present addresses without synchronizing."""
        addresses = tuple(map(Tensor.data_ptr, tensors))
        if addresses != self._written:
            self.table.copy_(_on_host(addresses, self.table.is_cuda), non_blocking=True)
            self._written = addresses
        return self.table


def captured_addresses(tensors: Sequence[Tensor]) -> Tensor:
    """Return a table of the tensors' addresses for the graph being captured.

    Each replay writes it.
    """
    table = torch.empty(_padded(len(tensors)), dtype=torch.int64, device=tensors[0].device)
    addresses = [x.data_ptr() for x in tensors]
    # The kernel writes 16 addresses; the table has room for copies of the last one.
    addresses += addresses[-1:] * (len(table) - len(addresses))
    for begin in range(0, len(table), _PER_LAUNCH):
        write_addresses[(1,)](table, begin, *addresses[begin : begin + _PER_LAUNCH])
    return table


def _padded(count: int) -> int:
    return -(-count // _PER_LAUNCH) * _PER_LAUNCH


@functools.lru_cache(maxsize=64)
def _on_host(addresses: tuple[int, ...], pinned: bool) -> Tensor:
    """Return addresses in (pinned) host memory, for copies to the device; it is never overwritten.

    The cache saves copies because the allocator soon reuses addresses for gradients. A copy may
    still read an evicted entry: torch keeps its pinned memory until the copy has finished.
    """
    padded = [*addresses, *[0] * (_padded(len(addresses)) - len(addresses))]
    return torch.tensor(padded, dtype=torch.int64, device="cpu", pin_memory=pinned)


@dataclasses.dataclass(frozen=True)
class MatrixLocation:
    """One fp32 matrix and its result, read with the smaller dimension as rows.

    Attributes
    ----------
    tensor
        Number of its tensor in the launch.
    offset
        Of its first element in the tensor.
    rows, columns
        Its size, rows ≤ columns.
    stride
        Of the rows; of the columns if `transposed`.
    transposed
        Whether it is contiguous along its columns.
    out
        Offset of its result in the results of all matrices.
    out_row, out_column
        Strides of the result.
    """

    tensor: int
    offset: int
    rows: int
    columns: int
    stride: int
    transposed: bool
    out: int
    out_row: int
    out_column: int

    def row(self, tile: int = 0, workspace_offset: int = 0) -> list[int]:
        """Return the table row that the kernels read, in the order of the constants in `whole`.

        `tile` is the number of the tile that holds the matrix, or its kind for `strips`, and
        `workspace_offset` its place in the fp16 workspace of the launch.
        """
        return [
            tile,
            self.tensor,
            self.offset,
            self.rows,
            self.columns,
            self.stride,
            int(self.transposed),
            self.out,
            self.out_row,
            self.out_column,
            workspace_offset,
        ]


@dataclasses.dataclass(frozen=True)
class Span:
    """The `count` matrices of tensor number `tensor` in a batch.

    Their contiguous results start at element `place`. If `transposed`, these have the smaller
    dimension as columns.
    """

    tensor: int
    count: int
    place: int
    transposed: bool


class EqualShapes(NamedTuple):
    """The matrices of a launch of `symmetric_launch`: rows ≤ columns, in the order of the spans."""

    rows: int
    columns: int
    spans: Sequence[Span]


@dataclasses.dataclass(frozen=True)
class Launch:
    """Tables on the device and the sizes of one launch.

    Attributes
    ----------
    matrices
        Number of matrices.
    table
        A row of `MatrixLocation.row` for each, int64.
    grid
        Number of programs.
    programs
        For each program its matrix, its rank and the number of programs of that matrix, int32
        (grid, 3); None if each matrix has one program.
    constants
        Arguments for which the kernel is compiled.
    workspace
        Elements of the fp16 workspace.
    shapes
        The sizes of equal matrices, for `symmetric_launch` only.
    """

    matrices: int
    table: Tensor
    grid: int = 0
    programs: Tensor | None = None
    constants: dict[str, Any] = dataclasses.field(default_factory=dict)
    workspace: int = 0
    shapes: EqualShapes | None = None


class Inputs(NamedTuple):
    """The matrices, and their addresses on the device."""

    addresses: Tensor
    tensors: Sequence[Tensor]


class StepNumbers(NamedTuple):
    """Numbers that may change from step to step, in the order of the constants in `application`.

    A tensor has its value on the device.

    Attributes
    ----------
    rate, decay
        Learning rate and weight decay.
    pace
        1 − β of the momentum.
    skip
        If above 0, parameters and state stay unchanged.
    factor
        Of the gradients: −1 to maximize, over the scale of the loss.
    """

    rate: float | Tensor
    decay: float | Tensor = 0.0
    pace: float | Tensor = 0.0
    skip: float | Tensor = 0.0
    factor: float | Tensor = 1.0


class NumbersOnDevice:
    """`StepNumbers` where recorded launches read them: `values`, float64."""

    def __init__(self, device: torch.device) -> None:
        count = len(StepNumbers._fields)
        self.values = torch.zeros(count, dtype=torch.float64, device=device)
        self._cells = self.values.unbind()
        self._written: list[float | None] = [None] * count
        self._from_device = [False] * count

    def write(self, numbers: StepNumbers) -> None:
        """Write numbers without synchronizing."""
        for i, number in enumerate(numbers):
            if isinstance(number, Tensor):
                self._cells[i].copy_(number)
                # From now on replays of a recorded copy may overwrite what the host writes.
                self._from_device[i] = True
            elif self._from_device[i] or self._written[i] != number:
                self._cells[i].fill_(number)
                self._written[i] = number


class Application(NamedTuple):
    """How results update parameters instead of being written.

    Attributes
    ----------
    targets
        For each tensor of matrices, int64 (count, 2): addresses of contiguous parameters, and
        numbers of their factors.
    squares
        For each tensor of matrices, float64 (count, 1): the sum of the squares of each matrix.
    dtype
        Of the parameters: float32, float16 or bfloat16.
    factors
        Scale and damping, float32 (factors,).
    numbers
        Of the step, float64, in the order of `StepNumbers`.
    """

    targets: Sequence[Tensor]
    squares: Sequence[Tensor]
    dtype: torch.dtype
    factors: Tensor
    numbers: Tensor


# Starts one launch: launch, inputs, coefficients, results.
StartLaunch = Callable[[Launch, Inputs, Coefficients, Tensor], None]


@dataclasses.dataclass(eq=False)  # hashed by identity
class LaunchSet:
    """All launches for one set of shapes.

    Attributes
    ----------
    name
        Of the implementation; see `dispatch`.
    out_size
        Elements of all results.
    out_places
        For each tensor of matrices, the place of its results.
    """

    name: str
    launches: list[Launch]
    out_size: int
    out_places: list[int]

    def results(self, out: Tensor, matrices: Sequence[Tensor]) -> list[Tensor]:
        """Return the results as views of `out`, with the shapes of `matrices`."""
        places = zip(self.out_places, matrices, strict=True)
        return [out[place : place + x.numel()].view(x.shape) for place, x in places]
