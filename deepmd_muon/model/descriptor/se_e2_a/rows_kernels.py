"""Triton kernels of the standardised rows and of the intervals of s: `SeE2A` and `interpolation.cut` define them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from deepmd_muon.model.descriptor.se_e2_a.interpolation_kernels import type_table

BLOCK = 128


@triton.jit
def _standardise_kernel(out, empty, scale, rows, mean, stddev, kinds, stride, nnei, block: tl.constexpr):
    """Standardise the rows of one atom; write R of an empty slot and the factor as well."""
    atom = tl.program_id(0).to(tl.int64)
    kind = tl.load(kinds + atom)
    dtype: tl.constexpr = out.dtype.element_ty
    for k in tl.static_range(4):
        factor = 1.0 / tl.load(stddev + kind * stride + k)
        constant = -tl.load(mean + kind * stride + k) * factor
        tl.store(empty + atom * 4 + k, constant)
        tl.store(scale + atom * 4 + k, factor)
        for begin in range(0, nnei, block):
            column = begin + tl.arange(0, block)
            at = (atom * nnei + column) * 4 + k
            x = tl.load(rows + at, column < nnei, 0.0).to(dtype)
            tl.store(out + at, constant + x * factor, column < nnei)


@triton.jit
def _extremes_kernel(extremes, rows, empty, table, atoms, nnei, block: tl.constexpr):
    """Write the least and the largest s of one atom's neighbours of one type, an empty slot's among them."""
    atom, kind = tl.program_id(0).to(tl.int64), tl.program_id(1)
    first, width = tl.load(table + 3 * kind), tl.load(table + 3 * kind + 1)
    other = tl.load(empty + atom * 4)
    low = tl.zeros((block,), rows.dtype.element_ty) + other
    high = low
    for begin in range(0, width, block):
        column = begin + tl.arange(0, block)
        s = tl.load(rows + (atom * nnei + first + column) * 4, column < width, 0.0)
        s = tl.where(column < width, s, other)
        low, high = tl.minimum(low, s), tl.maximum(high, s)
    tl.store(extremes + kind * atoms + atom, tl.min(low))
    tl.store(extremes + (tl.num_programs(1) + kind) * atoms + atom, tl.max(high))


@triton.jit
def _start_kernel(start, extremes, atoms, least: tl.constexpr, pieces: tl.constexpr, block: tl.constexpr):
    """Write the least s of a type and pieces per unit of s."""
    kind = tl.program_id(0)
    low_at, high_at = extremes + kind * atoms, extremes + (tl.num_programs(0) + kind) * atoms
    dtype: tl.constexpr = extremes.dtype.element_ty
    low = tl.zeros((block,), dtype) + tl.load(low_at)
    high = tl.zeros((block,), dtype) + tl.load(high_at)
    for begin in range(0, atoms, block):
        atom = begin + tl.arange(0, block)
        low = tl.minimum(low, tl.load(low_at + atom, atom < atoms, float("inf")))
        high = tl.maximum(high, tl.load(high_at + atom, atom < atoms, float("-inf")))
    lowest = tl.min(low)
    span = tl.maximum(tl.max(high) - lowest, least).to(dtype)
    tl.store(start + 2 * kind, lowest)
    tl.store(start + 2 * kind + 1, pieces / span)


def standardise(
    rows: torch.Tensor, mean: torch.Tensor, stddev: torch.Tensor, kinds: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return R `(nreal, nnei, 4)`, R of an empty slot and dR/drow `(nreal, 4)` in the dtype of the statistics.

    Parameters
    ----------
    rows
        `(nreal, nnei, 4)`, float64.
    mean, stddev
        `(ntypes, slots, 4)`, the same for all slots.
    kinds
        Type of every atom `(nreal,)`.
    """
    atoms, nnei, _ = rows.shape
    out = mean.new_empty(rows.shape)
    empty, scale = mean.new_empty(2, atoms, 4).unbind()
    _standardise_kernel[(atoms,)](
        out, empty, scale, rows.contiguous(), mean, stddev, kinds, mean.stride(0), nnei, block=BLOCK
    )
    return out, empty, scale


def interval_starts(
    rows: torch.Tensor, empty: torch.Tensor, pieces: int, widths: Sequence[int], least: float
) -> torch.Tensor:
    """Return the least s of each type and pieces per unit of s `(types, 2)`; spans are at least `least`."""
    atoms, nnei, _ = rows.shape
    types = len(widths)
    extremes = rows.new_empty(2, types, atoms)
    table = type_table(tuple(widths), (0,) * types, rows.device)
    _extremes_kernel[(atoms, types)](extremes, rows.contiguous(), empty.contiguous(), table, atoms, nnei, block=BLOCK)
    start = rows.new_empty(types, 2)
    _start_kernel[(types,)](start, extremes, atoms, least=least, pieces=pieces, block=1024)
    return start
