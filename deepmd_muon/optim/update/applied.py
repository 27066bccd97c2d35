"""Update parameters of large matrices in the last matrix product, without writing polar factors.

The momentum's launch also sums the squares of the directions, so that no other launch reads them
for their norms.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from deepmd_muon.optim.polar import dispatch
from deepmd_muon.optim.polar.dispatch import choose_for
from deepmd_muon.optim.polar.schedules import Coefficients, coefficients_of
from deepmd_muon.optim.polar.symmetric_launch import (
    apply_by_products,
    can_apply,
    orthogonalize_by_products,
)
from deepmd_muon.optim.polar.tables import Application
from deepmd_muon.optim.update.fused_kernels import sum_squares
from deepmd_muon.optim.update.muon import apply_updates

_LOG = logging.getLogger(__name__)
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_CHUNKS_AT_A_TIME = 256  # that a program of `sum_squares` reads
_TRIED: set[tuple[object, ...]] = set()  # devices, dtypes and shapes whose launches have run once


class ApplicationError(RuntimeError):
    """The updated parameters differ from the result of separate launches."""


class MatrixGroup(NamedTuple):
    """Matrices of one shape and schedule.

    Attributes
    ----------
    number
        Of the group in its wave.
    rows, columns
        Size of the matrices.
    schedule
        One (a, b, c) per step.
    targets
        Address in the parameters and number of the factor of each block, int64 (matrices, 2).
    chunks
        First chunk of each block, and its number of chunks, int64 (matrices, 2).
    """

    number: int
    rows: int
    columns: int
    schedule: Coefficients
    targets: Tensor
    chunks: Tensor


def takes(rows: int, columns: int, count: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Return whether the last product can update `count` contiguous matrices of this dtype."""
    if dtype not in _DTYPES or "symmetric" in dispatch.FAILED or not can_apply(rows, columns):
        return False
    return choose_for(count, rows, columns, torch.float32, device) == "symmetric"


class AppliedGroups:
    """Groups of one wave; their last products update parameters of one dtype.

    `takes` must hold for the groups, and their blocks be contiguous and start at multiples of 16
    bytes.
    """

    def __init__(self, groups: Sequence[MatrixGroup], dtype: torch.dtype) -> None:
        self.groups = groups
        self.numbers = [group.number for group in groups]
        self._dtype = dtype
        self._blocks = torch.cat([group.chunks for group in groups])
        # Σ u² of each block, as `Application` has it; one launch writes all groups'.
        self._all_squares = torch.empty(
            len(self._blocks), 1, dtype=torch.float64, device=self._blocks.device
        )
        self._squares = self._all_squares.split([len(group.targets) for group in groups])
        self._schedules = list(dict.fromkeys(group.schedule for group in groups))

    def run(
        self,
        matrices: Sequence[Tensor],
        *,
        sums: Tensor,
        factors: Tensor,
        rate: Tensor,
        decay: Tensor,
        skip: Tensor,
    ) -> None:
        """Orthogonalize the groups' directions and update the parameters.

        Parameters
        ----------
        matrices
            The directions of each group, (b, m, n).
        sums
            Of the chunks, as `fused_kernels.advance` writes them.
        factors
            Scale and damping of each block.
        rate, decay
            Learning rate and weight decay, float64 ().
        skip
            If above 0, the parameters stay unchanged.
        """
        sum_squares[(len(self._blocks),)](
            self._blocks, sums, self._all_squares, WIDTH=_CHUNKS_AT_A_TIME
        )
        for schedule in self._schedules:
            members = [i for i, group in enumerate(self.groups) if group.schedule == schedule]
            application = Application(
                targets=[self.groups[i].targets for i in members],
                squares=[self._squares[i] for i in members],
                dtype=self._dtype,
                factors=factors,
                rate=rate,
                decay=decay,
                skip=skip,
            )
            apply_by_products([matrices[i] for i in members], schedule, application)
        for group in self.groups:
            m, n = sorted((group.rows, group.columns))
            dispatch.COUNTS["symmetric", m, n] += len(group.targets)

    def usable(
        self,
        matrices: Sequence[Tensor],
        *,
        sums: Tensor,
        factors: Tensor,
        rate: Tensor,
        decay: Tensor,
    ) -> bool:
        """Run all launches once without changing the parameters.

        Return whether they worked, and log an error.
        """
        device = factors.device
        shapes = tuple(
            (group.rows, group.columns, len(group.targets), group.schedule) for group in self.groups
        )
        key = (device, self._dtype, shapes)
        if key in _TRIED:
            return True
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return False
        skip = torch.ones((), dtype=torch.float32, device=device)
        try:
            check(device, self._dtype)
            self.run(matrices, sums=sums, factors=factors, rate=rate, decay=decay, skip=skip)
        except Exception as error:  # an error of the compiler or driver must not end a training run
            reason = f"{type(error).__name__}: {error}".splitlines()[0]
            _LOG.warning(
                "updates after the last product of large matrices are separate launches: %s", reason
            )
            return False
        _TRIED.add(key)
        return True


@functools.lru_cache(maxsize=16)
def check(device: torch.device, dtype: torch.dtype) -> None:
    """Compare with polar factors that are written and then applied, in both orientations."""
    decay = 0.01
    lr = 0.1
    steps = coefficients_of("polar-express-5")
    coefficients = (steps[0], steps[1], steps[-1])  # X is kept in fp32 in between
    factors = torch.tensor([0.5, 0.25], device=device)
    for rows, columns in ((128, 256), (256, 128)):
        i = torch.arange(2 * rows * columns, device=device, dtype=torch.float32)
        i = i.view(2, rows, columns)
        x = torch.cos(0.3 * i) + torch.eye(rows, columns, device=device)
        p = torch.sin(0.7 * i).to(dtype)
        (o,) = orthogonalize_by_products([x], coefficients)
        expected = p.float()
        apply_updates([expected], [factors.view(2, 1, 1) * o], lr=lr, weight_decay=decay)

        size = rows * columns * p.element_size()
        targets = [[p.data_ptr() + k * size, k] for k in range(2)]
        squares = x.double().square().sum((1, 2))
        application = Application(
            targets=[torch.tensor(targets, dtype=torch.int64, device=device)],
            squares=[squares.view(2, 1)],
            dtype=dtype,
            factors=factors,
            rate=torch.full((), lr, dtype=torch.float64, device=device),
            decay=torch.full((), decay, dtype=torch.float64, device=device),
            skip=torch.zeros((), dtype=torch.float32, device=device),
        )
        apply_by_products([x], coefficients, application)
        error = float((p.float() - expected).abs().max())
        if not error <= max(1e-5, 2 * torch.finfo(dtype).eps):
            raise ApplicationError(
                f"parameters differ by {error:.1e} from those of separate launches"
            )
