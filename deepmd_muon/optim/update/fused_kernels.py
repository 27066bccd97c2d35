"""Triton kernels for the element-wise operations of the Muon route on all parameters of a wave.

A step
------
| kernel        | result                                                             |
|---------------|--------------------------------------------------------------------|
| `advance`     | m ← m + (1 − β) (g − m); the direction u; sums                     |
| `damp`        | Magma's score and scale · damping of each block, from the sums     |
| `sum_squares` | Σ u² of each block, for `symmetric_launch`                         |
| `apply`       | p ← p (1 − lr λ) − lr · factor · O, with the polar factor O of u   |

u is m, or with Nesterov g + β (m − g).

A program takes one *chunk*: consecutive elements of one block, located by a table row. Sums are
stored per chunk and added in a fixed order, so that a step is bitwise reproducible.

`muon.muon_` defines the results; `test_optim_fused` compares them.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, misc, untyped-decorator"
# ruff: noqa: ANN001, ANN201
# Reason for both: Triton compiles these functions. Their arguments have Triton's types.

from __future__ import annotations

import math
from typing import Any, NamedTuple

import triton
import triton.language as tl

from deepmd_muon.optim.polar.kernels.application import aligned, apply_part
from deepmd_muon.optim.rules import magma

# Columns of a chunk's row, int64; `fused.ChunkRow` explains them.
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
# Columns of a block's row: its first chunk, its number of chunks, and the address of its Magma
# score.
BLOCK_ROW = tl.constexpr(3)
# Sums of a chunk, float64. For Magma: the largest |m| and |g|, and Σ m g, Σ m², Σ g² relative to
# them. For `sum_squares`: Σ u² of the direction.
SUMS = tl.constexpr(6)
PEAK_M, PEAK_G, DOT, M_SQUARES, G_SQUARES, U_SQUARES = (tl.constexpr(i) for i in range(6))

# Constants of Magma: the logistic function of cosine / TEMPERATURE is between LOWEST and LOWEST +
# SPAN.
_HIGHEST = 1.0 / (1.0 + math.exp(-1.0 / magma.TEMPERATURE))
TEMPERATURE = tl.constexpr(magma.TEMPERATURE)
LOWEST = tl.constexpr(1.0 - _HIGHEST)
SPAN = tl.constexpr(2.0 * _HIGHEST - 1.0)
PACE = tl.constexpr(1.0 - magma.SCORE_DECAY)
MIN_SCALE = tl.constexpr(magma.MIN_SCALE)

# ----- the elements of a chunk -------------------------------------------------------------------


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
def locate(row, WIDTH: tl.constexpr):
    """Return the chunk's element numbers in its block, and their offsets in the tensor."""
    element = tl.load(row + START).to(tl.int32) + tl.arange(0, WIDTH)
    columns = tl.load(row + COLUMNS).to(tl.int32)
    r = element // columns
    row_start = r.to(tl.int64) * tl.load(row + STRIDE)
    offset = (row_start + (element - r * columns)) + tl.load(row + OFFSET)
    return element, offset


# ----- momenta -----------------------------------------------------------------------------------


class Elements(NamedTuple):
    """Pointers to the elements of a chunk (WIDTH,)."""

    m: Any
    g: Any
    u: Any
    mask: Any  # the elements that belong to the block


class Form(NamedTuple):
    """What `advance` computes; known when it is compiled."""

    MAGMA: Any  # store Magma's sums
    NESTEROV: Any
    MAXIMIZE: Any
    PEAKS: Any  # scale Magma's sums by the peaks
    SQUARES: Any  # store Σ u²


@triton.jit
def lerp(start, end, weight):
    """Return start + weight (end − start), computed from the nearer side as torch.lerp does."""
    is_near_start = weight < 0.5
    from_start = start + weight * (end - start)
    from_end = end - (end - start) * (1.0 - weight)
    return tl.where(is_near_start, from_start, from_end)


@triton.jit
def advance(
    chunks,  # (chunks, ROW)
    gradients,  # int64 addresses by number of the tensor
    directions,  # of all blocks, written
    sums,  # float64 (chunks, SUMS), written with MAGMA or SQUARES
    pace,  # 1 − β, float64 ()
    skip,  # float32 () or None
    scale,  # float32 (): the gradients were multiplied by it; or None
    DTYPE: tl.constexpr,  # of parameters and momenta
    GRADIENT: tl.constexpr,  # dtype of the gradients
    WIDE: tl.constexpr,  # dtype of the computation
    MAGMA: tl.constexpr,
    NESTEROV: tl.constexpr,
    MAXIMIZE: tl.constexpr,
    PEAKS: tl.constexpr,
    SQUARES: tl.constexpr,
    WIDTH: tl.constexpr,  # elements of a chunk
):
    """Advance the momenta, write the directions and store the sums of one chunk."""
    number = tl.program_id(0).to(tl.int64)
    row = chunks + number * ROW
    size = chunk_size(row, skip)
    form = Form(
        MAGMA=MAGMA,
        NESTEROV=NESTEROV,
        MAXIMIZE=MAXIMIZE,
        PEAKS=PEAKS,
        SQUARES=SQUARES,
    )
    weight = tl.load(pace).to(WIDE)
    factor = None
    if scale is not None:
        factor = (1.0 / tl.load(scale).to(tl.float64)).to(WIDE)
    gradient = tl.load(gradients + tl.load(row + TENSOR))
    momentum = tl.load(row + MOMENTUM)
    direction = tl.load(row + DIRECTION)
    # Each branch has a call: the compiler knows the alignment of pointers only inside of the first.
    if (tl.load(row + PLAIN) != 0) & (gradient % 16 == 0):
        # Aligned to 16 bytes and contiguous: the kernel reads and writes whole vectors.
        element = floor_multiple(tl.load(row + START), WIDTH) + tl.arange(0, WIDTH)
        offset = floor_multiple(tl.load(row + OFFSET), 16) + element
        vectors = Elements(
            m=aligned(momentum, chunks, DTYPE) + offset,
            g=aligned(gradient, chunks, GRADIENT) + offset,
            u=directions + floor_multiple(direction, 16) + element,
            mask=element < floor_multiple(size, 16),
        )
        advance_elements(vectors, factor, weight, sums=sums + number * SUMS, form=form, WIDE=WIDE)
    else:
        number_in_block, place = locate(row, WIDTH)
        scattered = Elements(
            m=momentum.to(tl.pointer_type(DTYPE)) + place,
            g=gradient.to(tl.pointer_type(GRADIENT)) + place,
            u=directions + direction + number_in_block,
            mask=number_in_block < size,
        )
        advance_elements(scattered, factor, weight, sums=sums + number * SUMS, form=form, WIDE=WIDE)


@triton.jit
def advance_elements(at, factor, weight, sums, form, WIDE: tl.constexpr):
    """Do m ← lerp(m, g), write the directions, and store the sums of a chunk."""
    m = tl.load(at.m, mask=at.mask, other=0.0).to(WIDE)
    g = tl.load(at.g, mask=at.mask, other=0.0).to(WIDE)
    if factor is not None:
        g = g * factor
    if form.MAXIMIZE:
        g = -g
    m = lerp(m, g, weight)
    tl.store(at.m, m.to(at.m.dtype.element_ty), mask=at.mask)
    u = m
    if form.NESTEROV:
        u = lerp(g, m, 1.0 - weight)
    tl.store(at.u, u, mask=at.mask)
    if form.MAGMA:
        wide_m = m.to(tl.float64)
        wide_g = g.to(tl.float64)
        if form.PEAKS:  # squares of float64 can overflow; those of float32 cannot
            peak_m = tl.max(tl.abs(wide_m))
            peak_g = tl.max(tl.abs(wide_g))
            wide_m = wide_m / tl.where(peak_m == 0.0, 1.0, peak_m)
            wide_g = wide_g / tl.where(peak_g == 0.0, 1.0, peak_g)
            tl.store(sums + PEAK_M, peak_m)
            tl.store(sums + PEAK_G, peak_g)
        tl.store(sums + DOT, tl.sum(wide_m * wide_g))
        tl.store(sums + M_SQUARES, tl.sum(wide_m * wide_m))
        tl.store(sums + G_SQUARES, tl.sum(wide_g * wide_g))
    if form.SQUARES:
        wide_u = u.to(tl.float64)
        tl.store(sums + U_SQUARES, tl.sum(wide_u * wide_u))


# ----- blocks ------------------------------------------------------------------------------------


@triton.jit
def sum_squares(
    blocks,  # int64 (blocks, 2): first chunk and number of chunks
    sums,  # (chunks, SUMS)
    squares,  # float64 (blocks,), written
    WIDTH: tl.constexpr,
):
    """Write Σ u² of each block, as `normalized.scale_of` reads it."""
    number = tl.program_id(0)
    block_sums = sums + tl.load(blocks + 2 * number) * SUMS
    count = tl.load(blocks + 2 * number + 1)
    total = tl.zeros((WIDTH,), tl.float64)
    for i in range(0, count, WIDTH):
        chunk = i + tl.arange(0, WIDTH)
        total += tl.load(block_sums + chunk * SUMS + U_SQUARES, mask=chunk < count, other=0.0)
    tl.store(squares + number, tl.sum(total))


@triton.jit
def damp(
    blocks,  # int64 (blocks, BLOCK_ROW)
    sums,  # (chunks, SUMS)
    scales,  # float32 (blocks,)
    factors,  # float32 (blocks,), written
    skip,
    PEAKS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Advance each block's Magma score and write scale · damping.

    See `deepmd_muon.optim.rules.magma`.
    """
    number = tl.program_id(0)
    row = blocks + number * BLOCK_ROW
    block_sums = sums + tl.load(row) * SUMS
    count = tl.load(row + 1)
    peak_m = tl.full((), 1.0, tl.float64)
    peak_g = tl.full((), 1.0, tl.float64)
    if PEAKS:
        largest_m = tl.zeros((WIDTH,), tl.float64)
        largest_g = tl.zeros((WIDTH,), tl.float64)
        for i in range(0, count, WIDTH):
            chunk = i + tl.arange(0, WIDTH)
            mask = chunk < count
            peaks = block_sums + chunk * SUMS
            largest_m = tl.maximum(largest_m, tl.load(peaks + PEAK_M, mask=mask, other=0.0))
            largest_g = tl.maximum(largest_g, tl.load(peaks + PEAK_G, mask=mask, other=0.0))
        peak_m = tl.max(largest_m)
        peak_g = tl.max(largest_g)
        peak_m = tl.where(peak_m == 0.0, 1.0, peak_m)
        peak_g = tl.where(peak_g == 0.0, 1.0, peak_g)

    dot = tl.zeros((WIDTH,), tl.float64)
    m_squares = tl.zeros((WIDTH,), tl.float64)
    g_squares = tl.zeros((WIDTH,), tl.float64)
    for i in range(0, count, WIDTH):
        chunk = i + tl.arange(0, WIDTH)
        mask = chunk < count
        chunk_sums = block_sums + chunk * SUMS
        # A chunk's sums are relative to its peaks, the block's to its own.
        m = tl.full((WIDTH,), 1.0, tl.float64)
        g = tl.full((WIDTH,), 1.0, tl.float64)
        if PEAKS:
            m = tl.load(chunk_sums + PEAK_M, mask=mask, other=0.0) / peak_m
            g = tl.load(chunk_sums + PEAK_G, mask=mask, other=0.0) / peak_g
        dot += m * g * tl.load(chunk_sums + DOT, mask=mask, other=0.0)
        m_squares += m * m * tl.load(chunk_sums + M_SQUARES, mask=mask, other=0.0)
        g_squares += g * g * tl.load(chunk_sums + G_SQUARES, mask=mask, other=0.0)

    norms = tl.sqrt(tl.sum(m_squares)) * tl.sqrt(tl.sum(g_squares))
    cosine = tl.where(norms > 0.0, tl.sum(dot) / norms, 0.0)
    # Comparisons keep a NaN.
    cosine = tl.where(cosine > 1.0, 1.0, tl.where(cosine < -1.0, -1.0, cosine)).to(tl.float32)
    target = (1.0 / (1.0 + tl.exp(-cosine / TEMPERATURE)) - LOWEST) / SPAN
    score_pointer = tl.load(row + 2).to(tl.pointer_type(tl.float32))
    score = tl.load(score_pointer)
    score = score + PACE * (target - score)
    if skip is None:
        tl.store(score_pointer, score)
    else:
        tl.store(score_pointer, score, mask=tl.load(skip) <= 0)
    damping = MIN_SCALE + (1.0 - MIN_SCALE) * score
    tl.store(factors + number, tl.load(scales + number) * damping)


# ----- parameters --------------------------------------------------------------------------------


@triton.jit
def apply(
    chunks,  # (chunks, ROW)
    results,  # int64 addresses of the polar factors by number of the group
    factors,  # float32 (blocks,)
    rate,  # learning rate, float64 ()
    decay,  # λ, float64 ()
    skip,  # float32 () or None
    DTYPE: tl.constexpr,  # of the parameters
    POLAR: tl.constexpr,  # dtype of the polar factors
    WIDE: tl.constexpr,  # dtype of the computation
    WIDTH: tl.constexpr,  # elements of a chunk
):
    """Do p ← p (1 − lr λ) − lr · factor · O for one chunk."""
    row = chunks + tl.program_id(0).to(tl.int64) * ROW
    size = chunk_size(row, skip)
    lr = tl.load(rate)
    shrink = (1.0 - lr * tl.load(decay)).to(WIDE)
    step = (lr * tl.load(factors + tl.load(row + BLOCK))).to(WIDE)
    parameter = tl.load(row + PARAMETER)
    result = tl.load(results + tl.load(row + GROUP))
    start = tl.load(row + RESULT)
    # Each branch has a call, see `advance`.
    if (tl.load(row + PLAIN) != 0) & (result % 16 == 0):
        element = floor_multiple(tl.load(row + START), WIDTH) + tl.arange(0, WIDTH)
        offset = floor_multiple(tl.load(row + OFFSET), 16) + element
        mask = element < floor_multiple(size, 16)
        p_pointers = aligned(parameter, chunks, DTYPE) + offset
        o_pointers = aligned(result, chunks, POLAR) + floor_multiple(start, 16) + element
        o = tl.load(o_pointers, mask, 0.0).to(WIDE)
        apply_part(p_pointers, o, mask, shrink=shrink, step=step, WIDE=WIDE)
    else:
        number_in_block, scattered = locate(row, WIDTH)
        inside = number_in_block < size
        pointers = parameter.to(tl.pointer_type(DTYPE)) + scattered
        polar = result.to(tl.pointer_type(POLAR)) + start + number_in_block
        o_scattered = tl.load(polar, inside, 0.0).to(WIDE)
        apply_part(pointers, o_scattered, inside, shrink=shrink, step=step, WIDE=WIDE)
