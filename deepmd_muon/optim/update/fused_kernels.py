"""Triton kernels for the element-wise operations of the Muon route: one launch for all parameters of a wave.

A program takes one chunk: consecutive elements of one block, located by a table row. Sums are stored per chunk and
added in a fixed order, so that a step is bitwise reproducible.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, misc, untyped-decorator"
# ruff: noqa: ANN001, ANN201
# Reason for both: Triton compiles these functions, whose arguments have Triton's types, not Python's, and a
# branch that is decided at compile time must be a statement.

from __future__ import annotations

import math

import triton
import triton.language as tl

from deepmd_muon.optim.polar.kernels.application import aligned, apply_part, join_float64
from deepmd_muon.optim.rules import magma

# Columns of a chunk's row, int64. Parameter, momentum and gradient share their layout, so one offset serves all.
ROW = tl.constexpr(13)
(
    START,
    SIZE,
    COLUMNS,
    STRIDE,
    OFFSET,
    PARAMETER,
    MOMENTUM,
    TENSOR,
    DIRECTION,
    GROUP,
    RESULT,
    BLOCK,
    PLAIN,
) = (tl.constexpr(i) for i in range(13))
# Columns of a block's row: its first chunk, its number of chunks, and the address of its Magma score.
BLOCK_ROW = tl.constexpr(3)
# Sums of a chunk. For Magma: the largest |m| and |g|, and Σ m g, Σ m², Σ g² relative to them. For `sum_squares`: Σ u²
# of the direction.
SUMS = tl.constexpr(6)

_HIGHEST = 1.0 / (1.0 + math.exp(-1.0 / magma.TEMPERATURE))
TEMPERATURE, LOWEST, SPAN = map(
    tl.constexpr, (magma.TEMPERATURE, 1.0 - _HIGHEST, 2.0 * _HIGHEST - 1.0)
)
PACE, MIN_SCALE = map(tl.constexpr, (1.0 - magma.SCORE_DECAY, magma.MIN_SCALE))


@triton.jit
def chunk_size(row, skip):
    """Return the block's number of elements; 0 for a skipped step, so that nothing is written."""
    size = tl.load(row + SIZE)
    if skip is not None:
        size = tl.where(tl.load(skip) > 0, 0, size)
    return size


@triton.jit
def floor_multiple(x, step: tl.constexpr):
    """Round down to a multiple of `step`, as a product that the compiler recognizes as such."""
    return x // step * step


@triton.jit
def places(row, WIDTH: tl.constexpr):
    """Return the chunk's element numbers in its block, and their offsets from the tensor's first element."""
    element = tl.load(row + START).to(tl.int32) + tl.arange(0, WIDTH)
    columns = tl.load(row + COLUMNS).to(tl.int32)
    r = element // columns
    return element, (r.to(tl.int64) * tl.load(row + STRIDE) + (element - r * columns)) + tl.load(
        row + OFFSET
    )


@triton.jit
def lerp(start, end, weight):
    """Return start + weight (end − start), computed from the nearer side as torch.lerp does."""
    return tl.where(
        weight < 0.5, start + weight * (end - start), end - (end - start) * (1.0 - weight)
    )


@triton.jit
def advance_part(
    m_pointers, g_pointers, u_pointers, inside, factor, weight, sums, MAGMA: tl.constexpr, NESTEROV: tl.constexpr,
    MAXIMIZE: tl.constexpr, WIDE: tl.constexpr, PEAKS: tl.constexpr, SQUARES: tl.constexpr,
):  # fmt: skip
    """Do m ← lerp(m, g), write the directions, and store the chunk's sums."""
    m = tl.load(m_pointers, mask=inside, other=0.0).to(WIDE)
    g = tl.load(g_pointers, mask=inside, other=0.0).to(WIDE)
    if factor is not None:
        g = g * factor
    if MAXIMIZE:
        g = -g
    m = lerp(m, g, weight)
    tl.store(m_pointers, m.to(m_pointers.dtype.element_ty), mask=inside)
    u = m
    if NESTEROV:
        u = lerp(g, m, 1.0 - weight)
    tl.store(u_pointers, u, mask=inside)
    if MAGMA:
        a = m.to(tl.float64)
        b = g.to(tl.float64)
        if PEAKS:  # squares of float64 can overflow; those of float32 cannot
            peak_a = tl.max(tl.abs(a))
            peak_b = tl.max(tl.abs(b))
            a = a / tl.where(peak_a == 0.0, 1.0, peak_a)
            b = b / tl.where(peak_b == 0.0, 1.0, peak_b)
            tl.store(sums, peak_a)
            tl.store(sums + 1, peak_b)
        tl.store(sums + 2, tl.sum(a * b))
        tl.store(sums + 3, tl.sum(a * a))
        tl.store(sums + 4, tl.sum(b * b))
    if SQUARES:
        wide = u.to(tl.float64)
        tl.store(sums + 5, tl.sum(wide * wide))


@triton.jit
def advance(
    chunks, gradients, directions, sums, weight_high, weight_low, skip, scale, DTYPE: tl.constexpr,
    GRADIENT: tl.constexpr, WIDE: tl.constexpr, MAGMA: tl.constexpr, NESTEROV: tl.constexpr, MAXIMIZE: tl.constexpr,
    PEAKS: tl.constexpr, SQUARES: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Advance the momenta and write the directions; see `advance_part`."""
    number = tl.program_id(0).to(tl.int64)
    row = chunks + number * ROW
    size = chunk_size(row, skip)
    weight = join_float64(weight_high, weight_low).to(WIDE)
    factor = None
    if scale is not None:
        factor = (1.0 / tl.load(scale).to(tl.float64)).to(WIDE)
    gradient = tl.load(gradients + tl.load(row + TENSOR))
    momentum = tl.load(row + MOMENTUM)
    direction = tl.load(row + DIRECTION)
    if (tl.load(row + PLAIN) != 0) & (gradient % 16 == 0):
        # Aligned to 16 bytes and contiguous: the kernel reads and writes whole vectors.
        element = floor_multiple(tl.load(row + START), WIDTH) + tl.arange(0, WIDTH)
        offset = floor_multiple(tl.load(row + OFFSET), 16) + element
        advance_part(
            aligned(momentum, chunks, DTYPE) + offset,
            aligned(gradient, chunks, GRADIENT) + offset,
            directions + floor_multiple(direction, 16) + element, element < floor_multiple(size, 16),
            factor, weight, sums + number * SUMS, MAGMA, NESTEROV, MAXIMIZE, WIDE, PEAKS,
            SQUARES,
        )  # fmt: skip
    else:
        number_in_block, place = places(row, WIDTH)
        advance_part(
            momentum.to(tl.pointer_type(DTYPE)) + place, gradient.to(tl.pointer_type(GRADIENT)) + place,
            directions + direction + number_in_block, number_in_block < size,
            factor, weight, sums + number * SUMS, MAGMA, NESTEROV, MAXIMIZE, WIDE, PEAKS,
            SQUARES,
        )  # fmt: skip


@triton.jit
def sum_squares(blocks, sums, squares, WIDTH: tl.constexpr):
    """Write 1 and Σ u² of each block for `normalized.scale_of`; `blocks` has its first chunk and number of chunks."""
    number = tl.program_id(0)
    first = sums + tl.load(blocks + 2 * number) * SUMS
    count = tl.load(blocks + 2 * number + 1)
    total = tl.zeros((WIDTH,), tl.float64)
    for i in range(0, count, WIDTH):
        at = i + tl.arange(0, WIDTH)
        total += tl.load(first + at * SUMS + 5, mask=at < count, other=0.0)
    tl.store(squares + 2 * number, 1.0)
    tl.store(squares + 2 * number + 1, tl.sum(total))


@triton.jit
def damp(blocks, sums, scales, factors, skip, PEAKS: tl.constexpr, WIDTH: tl.constexpr):
    """Advance each block's Magma score and write scale · damping; see `deepmd_muon.optim.rules.magma`."""
    number = tl.program_id(0)
    row = blocks + number * BLOCK_ROW
    first = sums + tl.load(row) * SUMS
    count = tl.load(row + 1)
    peak_m = tl.full((), 1.0, tl.float64)
    peak_g = tl.full((), 1.0, tl.float64)
    if PEAKS:
        largest_m = tl.zeros((WIDTH,), tl.float64)
        largest_g = tl.zeros((WIDTH,), tl.float64)
        for i in range(0, count, WIDTH):
            at = i + tl.arange(0, WIDTH)
            largest_m = tl.maximum(
                largest_m, tl.load(first + at * SUMS, mask=at < count, other=0.0)
            )
            largest_g = tl.maximum(
                largest_g, tl.load(first + at * SUMS + 1, mask=at < count, other=0.0)
            )
        peak_m = tl.max(largest_m)
        peak_g = tl.max(largest_g)
        peak_m = tl.where(peak_m == 0.0, 1.0, peak_m)
        peak_g = tl.where(peak_g == 0.0, 1.0, peak_g)
    dot = tl.zeros((WIDTH,), tl.float64)
    mm = tl.zeros((WIDTH,), tl.float64)
    gg = tl.zeros((WIDTH,), tl.float64)
    for i in range(0, count, WIDTH):
        at = i + tl.arange(0, WIDTH)
        inside = at < count
        place = first + at * SUMS
        m = tl.full((WIDTH,), 1.0, tl.float64)
        g = tl.full((WIDTH,), 1.0, tl.float64)
        if PEAKS:
            m = tl.load(place, mask=inside, other=0.0) / peak_m
            g = tl.load(place + 1, mask=inside, other=0.0) / peak_g
        dot += m * g * tl.load(place + 2, mask=inside, other=0.0)
        mm += m * m * tl.load(place + 3, mask=inside, other=0.0)
        gg += g * g * tl.load(place + 4, mask=inside, other=0.0)
    norms = tl.sqrt(tl.sum(mm)) * tl.sqrt(tl.sum(gg))
    cosine = tl.where(norms > 0.0, tl.sum(dot) / norms, 0.0)
    cosine = tl.where(cosine > 1.0, 1.0, tl.where(cosine < -1.0, -1.0, cosine)).to(
        tl.float32
    )  # keeps a NaN
    target = (1.0 / (1.0 + tl.exp(-cosine / TEMPERATURE)) - LOWEST) / SPAN
    score_at = tl.load(row + 2).to(tl.pointer_type(tl.float32))
    score = tl.load(score_at)
    score = score + PACE * (target - score)
    if skip is None:
        tl.store(score_at, score)
    else:
        tl.store(score_at, score, mask=tl.load(skip) <= 0)
    tl.store(factors + number, tl.load(scales + number) * (MIN_SCALE + (1.0 - MIN_SCALE) * score))


@triton.jit
def apply(
    chunks, results, factors, rate, decay_high, decay_low, skip, DTYPE: tl.constexpr,
    POLAR: tl.constexpr, WIDE: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Do p ← p (1 − lr λ) − lr · factor · O for one chunk; `rate` is the learning rate, float64."""
    row = chunks + tl.program_id(0).to(tl.int64) * ROW
    size = chunk_size(row, skip)
    lr = tl.load(rate)
    kept = (1.0 - lr * join_float64(decay_high, decay_low)).to(WIDE)
    step = (lr * tl.load(factors + tl.load(row + BLOCK))).to(WIDE)
    parameter = tl.load(row + PARAMETER)
    result = tl.load(results + tl.load(row + GROUP))
    start = tl.load(row + RESULT)
    if (tl.load(row + PLAIN) != 0) & (result % 16 == 0):
        element = floor_multiple(tl.load(row + START), WIDTH) + tl.arange(0, WIDTH)
        offset = floor_multiple(tl.load(row + OFFSET), 16) + element
        inside = element < floor_multiple(size, 16)
        apply_part(
            aligned(parameter, chunks, DTYPE) + offset,
            tl.load(aligned(result, chunks, POLAR) + floor_multiple(start, 16) + element, inside, 0.0).to(WIDE),
            inside, kept, step, WIDE,
        )  # fmt: skip
    else:
        number_in_block, place = places(row, WIDTH)
        inside = number_in_block < size
        apply_part(
            parameter.to(tl.pointer_type(DTYPE)) + place,
            tl.load(result.to(tl.pointer_type(POLAR)) + start + number_in_block, inside, 0.0).to(WIDE),
            inside, kept, step, WIDE,
        )  # fmt: skip
