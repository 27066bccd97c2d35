"""The Triton kernel of `DeviceGuard`, one launch a step.

It is a file of its own because a run on a CPU must not import Triton. `DeviceGuard.admits` is its
reference, and `test_model_kernels` compares the two.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, misc, untyped-decorator"
# ruff: noqa: ANN001, ANN202
# Reason for both: Triton compiles these functions. Their arguments are of its own language, not of
# Python's, and a branch that is decided at compile time must be a statement.

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _judge_kernel(
    record,  # (5,) float64: seen, bad, first, loss, norm; updated
    skip,  # scalar, float32; written
    loss,  # scalar
    norm,  # scalar
    freeze: tl.constexpr,
):
    """Count the step in `record` and decide whether it is skipped."""
    loss_now = tl.load(loss).to(tl.float64)
    norm_now = tl.load(norm).to(tl.float64)
    total = loss_now + norm_now
    is_bad = tl.where(total - total == 0.0, 0.0, 1.0).to(tl.float64)  # NaN unless finite
    seen = tl.load(record) + 1.0
    bad_before = tl.load(record + 1)
    # The record of the first bad step stays.
    was_bad = bad_before > 0.0
    tl.store(record, seen)
    tl.store(record + 1, bad_before + is_bad)
    tl.store(record + 2, tl.where(was_bad, tl.load(record + 2), seen))
    tl.store(record + 3, tl.where(was_bad, tl.load(record + 3), loss_now))
    tl.store(record + 4, tl.where(was_bad, tl.load(record + 4), norm_now))
    flag = is_bad
    if freeze:
        flag = tl.minimum(bad_before + is_bad, 1.0)
    tl.store(skip, flag.to(tl.float32))


def judge(
    record: torch.Tensor,
    skip: torch.Tensor,
    loss: torch.Tensor,
    norm: torch.Tensor,
    *,
    freeze: bool,
) -> None:
    """Update record and `skip`; `freeze` is whether the first bad step ends all updates."""
    _judge_kernel[(1,)](record, skip, loss, norm, freeze=freeze)
