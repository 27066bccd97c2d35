"""Tables that the fused kernels read: locations of matrices, and the scalars that change from step to step."""

from __future__ import annotations

import dataclasses
import functools

import torch
from torch import Tensor

from deepmd_muon.optim.routing.views import MatrixView
from deepmd_muon.optim.update.fused_kernels import ROW
from deepmd_muon.optim.update.gradients import StepControl


@dataclasses.dataclass(frozen=True)
class BlockLocation:
    """The location of one block in its parameter: tensor number, offset, row stride and shape, in elements."""

    tensor: int
    offset: int
    stride: int
    rows: int
    columns: int


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
