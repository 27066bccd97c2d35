"""Update parameters of large matrices in the last matrix product, without writing polar factors.

The momentum's launch also sums the squares of the directions, so that no other launch reads them
for their norms.
"""

from __future__ import annotations

import functools
import itertools
import logging
from collections import defaultdict
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
from deepmd_muon.optim.polar.tables import Application, NumbersOnDevice, StepNumbers
from deepmd_muon.optim.update.muon import apply_updates

_LOG = logging.getLogger(__name__)
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_TRIED: set[tuple[object, ...]] = set()  # devices, dtypes and shapes whose launches have run once


class ApplicationError(RuntimeError):
    """The updated parameters differ from the result of separate launches."""


class MatrixGroup(NamedTuple):
    """Contiguous matrices of one shape and schedule, which start at multiples of 16 bytes.

    Attributes
    ----------
    number
        Of the group in its wave.
    schedule
        One (a, b, c) per step.
    targets
        Address in the parameters and number of the factor of each block, int64 (matrices, 2).
    squares
        Σ u² of each block, float64 (matrices, 1).
    """

    number: int
    schedule: Coefficients
    targets: Tensor
    squares: Tensor


def takes(rows: int, columns: int, count: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Return whether the last product can update `count` contiguous matrices of this dtype."""
    if dtype not in _DTYPES or "symmetric" in dispatch.FAILED or not can_apply(rows, columns):
        return False
    return choose_for(count, rows, columns, torch.float32, device) == "symmetric"


class AppliedGroups:
    """Groups of one wave; their last products update parameters of one dtype.

    `factors` has scale and damping of each block, `numbers` are those of the step on the device.
    """

    def __init__(
        self, groups: Sequence[MatrixGroup], dtype: torch.dtype, factors: Tensor, numbers: Tensor
    ) -> None:
        self.group_numbers = [group.number for group in groups]
        self._dtype = dtype
        self._by_schedule: dict[Coefficients, list[MatrixGroup]] = defaultdict(list)
        for group in groups:
            self._by_schedule[group.schedule].append(group)
        self._applications = [
            Application(
                targets=[group.targets for group in members],
                squares=[group.squares for group in members],
                dtype=dtype,
                factors=factors,
                numbers=numbers,
            )
            for members in self._by_schedule.values()
        ]

    def run(self, matrices: Sequence[Tensor]) -> None:
        """Orthogonalize the groups' directions and update the parameters.

        `matrices` are the directions of all groups of the wave, (b, m, n) each.
        """
        for (schedule, members), application in zip(
            self._by_schedule.items(), self._applications, strict=True
        ):
            directions = [matrices[group.number] for group in members]
            apply_by_products(directions, schedule, application)
            for x in directions:
                dispatch.COUNTS["symmetric", min(x.shape[1:]), max(x.shape[1:])] += len(x)

    def usable(self, matrices: Sequence[Tensor]) -> bool:
        """Run all launches once, in a skipped step; return whether they work, and log an error."""
        device = matrices[0].device
        members = itertools.chain.from_iterable(self._by_schedule.values())
        shapes = [(matrices[group.number].shape, group.schedule) for group in members]
        key = (device, self._dtype, *shapes)
        if key in _TRIED:
            return True
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return False
        try:
            check(device, self._dtype)
            self.run(matrices)
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
    steps = coefficients_of("polar-express-5")
    schedule = (steps[0], steps[1], steps[-1])  # X is kept in fp32 in between
    factors = torch.tensor([0.5, 0.25], device=device)
    numbers = NumbersOnDevice(device)
    numbers.write(StepNumbers(rate=0.1, decay=0.01))
    for rows, columns in ((128, 256), (256, 128)):
        i = torch.arange(2 * rows * columns, device=device, dtype=torch.float32)
        i = i.view(2, rows, columns)
        x = torch.cos(0.3 * i) + torch.eye(rows, columns, device=device)
        p = torch.sin(0.7 * i).to(dtype)
        (o,) = orthogonalize_by_products([x], schedule)
        expected = p.float()
        apply_updates([expected], [factors.view(2, 1, 1) * o], lr=0.1, weight_decay=0.01)

        group = MatrixGroup(
            number=0,
            schedule=schedule,
            targets=torch.tensor([[q.data_ptr(), k] for k, q in enumerate(p)], device=device),
            squares=x.double().square().sum((1, 2)).unsqueeze(1),
        )
        AppliedGroups([group], dtype, factors, numbers.values).run([x])
        error = float((p.float() - expected).abs().max())
        if not error <= max(1e-5, 2 * torch.finfo(dtype).eps):
            raise ApplicationError(
                f"parameters differ by {error:.1e} from those of separate launches"
            )
