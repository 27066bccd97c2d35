"""Triton kernels of the contraction: `contraction` defines their results.

Of 4-term sums, matrix products in batches are bound by their launches' small tiles; these read and write each number
once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

FEATURES = 128  # looked at together


@triton.jit
def _contract_kernel(out, a, width, axis, features: tl.constexpr, columns: tl.constexpr):
    """Write some rows of D of one atom."""
    atom = tl.program_id(0).to(tl.int64)
    m = tl.program_id(1) * features + tl.arange(0, features)
    k = tl.arange(0, columns)
    total = tl.zeros((features, columns), a.dtype.element_ty)
    for c in tl.static_range(4):
        row = a + (atom * 4 + c) * width
        total += tl.load(row + m, m < width, 0.0)[:, None] * tl.load(row + k, k < axis, 0.0)[None, :]
    inside = (m < width)[:, None] & (k < axis)[None, :]
    tl.store(out + (atom * width + m[:, None]) * axis + k[None, :], total, inside)


@triton.jit
def _pull_kernel(out, a, d_bar, width, axis, features: tl.constexpr, columns: tl.constexpr):
    """Write dE/dA of one atom."""
    atom = tl.program_id(0).to(tl.int64)
    k = tl.arange(0, columns)
    within = k < axis
    dtype: tl.constexpr = a.dtype.element_ty
    here = a + atom * 4 * width
    first0 = tl.load(here + k, within, 0.0)
    first1 = tl.load(here + width + k, within, 0.0)
    first2 = tl.load(here + 2 * width + k, within, 0.0)
    first3 = tl.load(here + 3 * width + k, within, 0.0)
    of_axis0 = tl.zeros((columns,), dtype)
    of_axis1 = tl.zeros((columns,), dtype)
    of_axis2 = tl.zeros((columns,), dtype)
    of_axis3 = tl.zeros((columns,), dtype)
    target = out + atom * 4 * width
    for begin in range(0, width, features):
        m = begin + tl.arange(0, features)
        inside = m < width
        at = d_bar + (atom * width + m[:, None]) * axis + k[None, :]
        bar = tl.load(at, inside[:, None] & within[None, :], 0.0)
        tl.store(target + m, tl.sum(bar * first0[None, :], 1), inside)
        tl.store(target + width + m, tl.sum(bar * first1[None, :], 1), inside)
        tl.store(target + 2 * width + m, tl.sum(bar * first2[None, :], 1), inside)
        tl.store(target + 3 * width + m, tl.sum(bar * first3[None, :], 1), inside)
        of_axis0 += tl.sum(bar * tl.load(here + m, inside, 0.0)[:, None], 0)
        of_axis1 += tl.sum(bar * tl.load(here + width + m, inside, 0.0)[:, None], 0)
        of_axis2 += tl.sum(bar * tl.load(here + 2 * width + m, inside, 0.0)[:, None], 0)
        of_axis3 += tl.sum(bar * tl.load(here + 3 * width + m, inside, 0.0)[:, None], 0)
    tl.debug_barrier()  # other threads have written the first columns
    sum0 = tl.load(target + k, within, 0.0) + of_axis0
    sum1 = tl.load(target + width + k, within, 0.0) + of_axis1
    sum2 = tl.load(target + 2 * width + k, within, 0.0) + of_axis2
    sum3 = tl.load(target + 3 * width + k, within, 0.0) + of_axis3
    tl.debug_barrier()  # several threads may hold the same column
    tl.store(target + k, sum0, within)
    tl.store(target + width + k, sum1, within)
    tl.store(target + 2 * width + k, sum2, within)
    tl.store(target + 3 * width + k, sum3, within)


def contract(a: torch.Tensor, axis: int) -> torch.Tensor:
    """Return D `(natoms, M, axis)` from A `(natoms, 4, M)`."""
    natoms, _, width = a.shape
    out = a.new_empty(natoms, width, axis)
    if natoms:
        grid = natoms, triton.cdiv(width, FEATURES)
        _contract_kernel[grid](out, a.contiguous(), width, axis, features=FEATURES, columns=_columns(axis))
    return out


def pull(a: torch.Tensor, d_bar: torch.Tensor) -> torch.Tensor:
    """Return dE/dA `(natoms, 4, M)` from A and dE/dD `(natoms, M, axis)`."""
    natoms, width, axis = d_bar.shape
    out = a.new_empty(a.shape)
    if natoms:
        tensors = a.contiguous(), d_bar.contiguous()
        _pull_kernel[(natoms,)](out, *tensors, width, axis, features=FEATURES, columns=_columns(axis))
    return out


def _columns(axis: int) -> int:
    return max(2, int(triton.next_power_of_2(axis)))
