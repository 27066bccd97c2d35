"""The Triton kernel of the guard, one launch a step; `DeviceGuard.admits` defines its results."""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, misc, untyped-decorator"
# ruff: noqa: ANN001, ANN202
# Reason for both: Triton compiles these functions. Their arguments are of its own language, not of Python's, and a
# branch that is decided at compile time must be a statement.

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _judge_kernel(
    record,
    skip,
    loss,
    norm,
    freeze: tl.constexpr,
):
    """Count the step in `record` (seen, bad, first, loss, norm) and decide whether it is skipped."""
    value, length = tl.load(loss).to(tl.float64), tl.load(norm).to(tl.float64)
    total = value + length
    bad = tl.where(total - total == 0.0, 0.0, 1.0).to(tl.float64)  # NaN unless finite
    seen, before = tl.load(record) + 1.0, tl.load(record + 1)
    known = before > 0.0
    tl.store(record, seen)
    tl.store(record + 1, before + bad)
    tl.store(record + 2, tl.where(known, tl.load(record + 2), seen))
    tl.store(record + 3, tl.where(known, tl.load(record + 3), value))
    tl.store(record + 4, tl.where(known, tl.load(record + 4), length))
    flag = bad
    if freeze:
        flag = tl.minimum(before + bad, 1.0)
    tl.store(skip, flag.to(tl.float32))


def judge(
    record: torch.Tensor,
    skip: torch.Tensor,
    loss: torch.Tensor,
    norm: torch.Tensor,
    *,
    freeze: bool,
) -> None:
    """Write record and `skip` as `DeviceGuard.admits` does; `freeze` from the first bad step on."""
    _judge_kernel[(1,)](record, skip, loss, norm, freeze=freeze)
