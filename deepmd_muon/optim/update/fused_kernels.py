"""Triton kernels for the element-wise operations of the Muon route on all parameters of a wave.

A step
------
| kernel    | result                                                                       |
|-----------|------------------------------------------------------------------------------|
| `advance` | m ← m + (1 − β) (g − m); the direction u; sums                               |
| `combine` | of each block, from the sums: Magma's score, scale · damping; Σ u²           |
| `apply`   | p ← p (1 − lr λ) − lr · factor · O, with the polar factor O of u             |

u is m, or with Nesterov g + β (m − g).

A program takes one *chunk*: consecutive elements of one block, located by a table row. Sums are
stored per chunk and added in a fixed order, so that a step is bitwise reproducible.

`muon.muon_` defines the results; `test_optim_fused` compares them. Magma's formulas are those of
`rules.magma`, compiled.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, misc, untyped-decorator"
# ruff: noqa: ANN001, ANN201
# Reason for both: Triton compiles these functions. Their arguments have Triton's types.

from __future__ import annotations

from types import FunctionType
from typing import Any, NamedTuple

import triton
import triton.language as tl

from deepmd_muon.optim.polar.kernels.application import (
    FACTOR,
    PACE,
    SKIP,
    aligned,
    apply_part,
    factors_of_update,
)
from deepmd_muon.optim.rules import magma

# Columns of a chunk's row, int64: its first element, and the fields of `fused_tables.BlockLocation`.
ROW = tl.constexpr(13)
(
    START,
    SIZE,
    RUN_LENGTH,
    STRIDE,
    OFFSET,
    PARAMETER,
    MOMENTUM,
    TENSOR,
    BLOCK,
    PLAIN,
    GROUP,
    RESULT,
    DIRECTION,
) = (tl.constexpr(i) for i in range(13))
# Columns of a block's row: its first chunk, its number of chunks, the address of its Magma score,
# and its place in the squares.
BLOCK_ROW = tl.constexpr(4)
FIRST_CHUNK, CHUNK_COUNT, SCORE, PLACE = (tl.constexpr(i) for i in range(4))
# Sums of a chunk, float64: for Magma Σ m g, Σ m², Σ g², for `Application` Σ u² of the direction.
SUMS = tl.constexpr(4)
DOT, M_SQUARES, G_SQUARES, U_SQUARES = (tl.constexpr(i) for i in range(4))


def compiled(formula):
    """Return a formula of torch as a function of Triton, which looks up `tl` and annotations."""
    names = {**formula.__globals__, "tl": tl, "Tensor": tl.tensor}
    return triton.jit(FunctionType(formula.__code__, names, argdefs=formula.__defaults__))


next_score = compiled(magma.next_score)
damping = compiled(magma.damping)

# ----- the elements of a chunk -------------------------------------------------------------------


@triton.jit
def chunk_size(row, numbers):
    """Return the block's number of elements; 0 for a skipped step, so that nothing is written."""
    return tl.where(tl.load(numbers + SKIP) > 0, 0, tl.load(row + SIZE))


@triton.jit
def floor_multiple(x, step: tl.constexpr):
    """Round down to a multiple of `step`, as a product that the compiler recognizes as such."""
    return x // step * step


@triton.jit
def locate(row, WIDTH: tl.constexpr):
    """Return the chunk's element numbers in its block, and their offsets in the tensor."""
    element = tl.load(row + START).to(tl.int32) + tl.arange(0, WIDTH)
    run_length = tl.load(row + RUN_LENGTH).to(tl.int32)
    run = element // run_length
    run_start = run.to(tl.int64) * tl.load(row + STRIDE)
    offset = (run_start + (element - run * run_length)) + tl.load(row + OFFSET)
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
    numbers,  # of the step, see `application`
    DTYPE: tl.constexpr,  # of parameters and momenta
    GRADIENT: tl.constexpr,  # dtype of the gradients
    WIDE: tl.constexpr,  # dtype of the computation
    MAGMA: tl.constexpr,
    NESTEROV: tl.constexpr,
    SQUARES: tl.constexpr,
    WIDTH: tl.constexpr,  # elements of a chunk
):
    """Advance the momenta, write the directions and store the sums of one chunk."""
    number = tl.program_id(0).to(tl.int64)
    row = chunks + number * ROW
    size = chunk_size(row, numbers)
    form = Form(MAGMA=MAGMA, NESTEROV=NESTEROV, SQUARES=SQUARES)
    weight = tl.load(numbers + PACE).to(WIDE)
    factor = tl.load(numbers + FACTOR).to(WIDE)
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
    """Do m ← lerp(m, factor · g), write the directions, and store the sums of a chunk."""
    m = tl.load(at.m, mask=at.mask, other=0.0).to(WIDE)
    g = tl.load(at.g, mask=at.mask, other=0.0).to(WIDE) * factor
    m = lerp(m, g, weight)
    tl.store(at.m, m.to(at.m.dtype.element_ty), mask=at.mask)
    u = m
    if form.NESTEROV:
        u = lerp(g, m, 1.0 - weight)
    tl.store(at.u, u.to(at.u.dtype.element_ty), mask=at.mask)
    if form.MAGMA:
        wide_m = m.to(tl.float64)
        wide_g = g.to(tl.float64)
        tl.store(sums + DOT, tl.sum(wide_m * wide_g))
        tl.store(sums + M_SQUARES, tl.sum(wide_m * wide_m))
        tl.store(sums + G_SQUARES, tl.sum(wide_g * wide_g))
    if form.SQUARES:
        wide_u = u.to(tl.float64)
        tl.store(sums + U_SQUARES, tl.sum(wide_u * wide_u))


# ----- blocks ------------------------------------------------------------------------------------


@triton.jit
def total(sums, count, COLUMN: tl.constexpr, WIDTH: tl.constexpr):
    """Return one sum of all chunks of a block, in a fixed order."""
    partial = tl.zeros((WIDTH,), tl.float64)
    for i in range(0, count, WIDTH):
        chunk = i + tl.arange(0, WIDTH)
        partial += tl.load(sums + chunk * SUMS + COLUMN, mask=chunk < count, other=0.0)
    return tl.sum(partial)


@triton.jit
def combine(
    blocks,  # int64 (blocks, BLOCK_ROW)
    sums,  # (chunks, SUMS)
    scales,  # float32 (blocks,)
    factors,  # float32 (blocks,), written with MAGMA
    squares,  # float64 (blocks,): Σ u² of each, written with SQUARES
    numbers,  # of the step, see `application`
    MAGMA: tl.constexpr,
    SQUARES: tl.constexpr,
    WIDTH: tl.constexpr,  # chunks that a program reads at a time
):
    """Combine the sums of one block's chunks.

    With MAGMA, advance its score and write scale · damping. With SQUARES, write Σ u² where
    `normalized.scale_of` reads it.
    """
    number = tl.program_id(0)
    row = blocks + number * BLOCK_ROW
    block_sums = sums + tl.load(row + FIRST_CHUNK) * SUMS
    count = tl.load(row + CHUNK_COUNT)
    if SQUARES:
        u_squares = total(block_sums, count, U_SQUARES, WIDTH)
        tl.store(squares + tl.load(row + PLACE), u_squares)
    if MAGMA:
        m_squares = total(block_sums, count, M_SQUARES, WIDTH)
        g_squares = total(block_sums, count, G_SQUARES, WIDTH)
        norms = tl.sqrt(m_squares) * tl.sqrt(g_squares)
        cosine = tl.where(norms > 0.0, total(block_sums, count, DOT, WIDTH) / norms, 0.0)
        # Comparisons keep a NaN.
        cosine = tl.where(cosine > 1.0, 1.0, tl.where(cosine < -1.0, -1.0, cosine))
        score = tl.load(row + SCORE).to(tl.pointer_type(tl.float32))
        advanced = next_score(tl.load(score), cosine.to(tl.float32))
        tl.store(score, advanced, mask=tl.load(numbers + SKIP) <= 0)
        tl.store(factors + number, tl.load(scales + number) * damping(advanced))


# ----- parameters --------------------------------------------------------------------------------


@triton.jit
def apply(
    chunks,  # (chunks, ROW)
    results,  # int64 addresses of the polar factors by number of the group
    factors,  # float32 (blocks,)
    numbers,  # of the step, see `application`
    DTYPE: tl.constexpr,  # of the parameters
    POLAR: tl.constexpr,  # dtype of the polar factors
    WIDE: tl.constexpr,  # dtype of the computation
    WIDTH: tl.constexpr,  # elements of a chunk
):
    """Do p ← p (1 − lr λ) − lr · factor · O for one chunk."""
    row = chunks + tl.program_id(0).to(tl.int64) * ROW
    size = chunk_size(row, numbers)
    shrink, step = factors_of_update(numbers, factors + tl.load(row + BLOCK), WIDE)
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
