"""Launches as data: locations of matrices, tables, and objects that the host keeps between calls."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from deepmd_muon.optim.polar.schedules import Coefficients

if TYPE_CHECKING:
    from deepmd_muon.optim.polar.address_table import AddressTable  # needs Triton

# Shape, strides and dtype of each tensor.
Geometry = tuple[tuple[tuple[int, ...], tuple[int, ...], torch.dtype], ...]


@dataclasses.dataclass(frozen=True)
class MatrixLocation:
    """One matrix: its tensor, offset, and shape with the smaller dimension as rows.

    `stride` is the stride of the rows, or of the columns if `transposed`, that is contiguous along the columns.
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
        place = [self.tensor, self.kind, self.offset, self.rows, self.columns, self.stride, int(self.transposed)]
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
    """The matrices of one tensor in a batch.

    Attributes
    ----------
    tensor
        Number of the tensor.
    count
        Number of its matrices.
    place
        Offset of their contiguous results, in elements.
    transposed
        Whether results have the smaller dimension as columns.
    """

    tensor: int
    count: int
    place: int
    transposed: bool


class Inputs(NamedTuple):
    """The matrices, as launches read them.

    Attributes
    ----------
    addresses
        Addresses of the tensors, on the device, int64.
    tensors
        The tensors; None in a recording, whose addresses will change.
    """

    addresses: Tensor
    tensors: Sequence[Tensor] | None


class Application(NamedTuple):
    """How results update parameters instead of being written.

    Attributes
    ----------
    targets
        For each tensor of matrices, int64 (count, 2): the addresses of contiguous parameters, and the numbers of their
        factors.
    squares
        For each tensor, float64 (count, 1, 2): 1 and the sum of the squares of each matrix.
    dtype
        Of the parameters: float32, float16 or bfloat16.
    factors
        Scale and damping, float32 (factors,).
    rate
        Learning rate, float64 ().
    decay
        Weight decay, split by `split_float64`.
    skip
        Above 0 to leave the parameters as they are, float32 ().
    """

    targets: Sequence[Tensor]
    squares: Sequence[Tensor]
    dtype: torch.dtype
    factors: Tensor
    rate: Tensor
    decay: tuple[float, float]
    skip: Tensor


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
