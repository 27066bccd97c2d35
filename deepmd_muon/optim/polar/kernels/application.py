"""The update of the parameters, p ← p (1 − lr λ) − lr · factor · O, which several kernels share.

O is the polar factor of the direction and λ the weight decay. `fused_kernels.apply` updates chunks
of elements, and the last product of large matrices (`symmetric.update`) whole tiles.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, misc, untyped-decorator"
# ruff: noqa: ANN001, ANN201
# Reason for both: Triton compiles these functions. Their arguments have Triton's types.

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

# Columns of a row of `targets`, int64: the address of a matrix of parameters, and the number of its
# factor.
TARGET_ROW = tl.constexpr(2)
# Numbers of a step, float64, which launches read on the device; `tables.StepNumbers` explains them.
RATE, DECAY, PACE, SKIP, FACTOR = (tl.constexpr(i) for i in range(5))


class ParameterUpdate(NamedTuple):
    """How results update parameters; all None if they are written instead."""

    targets: Any  # int64 (matrices, TARGET_ROW)
    factors: Any  # scale times damping, float32
    numbers: Any  # of the step


@triton.jit
def aligned(address, anchor, TYPE: tl.constexpr):
    """Return an address, a multiple of 16, as a pointer whose alignment the compiler recognizes.

    `anchor` is a pointer argument. The compiler knows that it is a multiple of 16, and the distance
    is a multiple of 16 by its form.
    """
    BYTES: tl.constexpr = TYPE.primitive_bitwidth // 8
    distance = (address - anchor.to(tl.int64)) // 16 * (16 // BYTES)
    return anchor.to(tl.pointer_type(TYPE), bitcast=True) + distance


@triton.jit
def factors_of_update(numbers, factor, WIDE: tl.constexpr):
    """Return 1 − lr λ and lr · factor, from the pointer to the factor of a block."""
    lr = tl.load(numbers + RATE)
    shrink = 1.0 - lr * tl.load(numbers + DECAY)
    return shrink.to(WIDE), (lr * tl.load(factor)).to(WIDE)


@triton.jit
def apply_part(p_pointers, o, mask, shrink, step, WIDE: tl.constexpr):
    """Do p ← shrink · p − step · O in dtype WIDE."""
    p = tl.load(p_pointers, mask=mask, other=0.0).to(WIDE)
    tl.store(p_pointers, (p * shrink - step * o).to(p_pointers.dtype.element_ty), mask=mask)


@triton.jit
def apply_tile(
    o,  # a tile of fp32 results
    parameters,  # ParameterUpdate
    row_offsets,  # of the tile's rows in the matrix of parameters, in elements
    column_offsets,
    TYPE: tl.constexpr,  # dtype of the parameters
):
    """Do p ← p (1 − lr λ) − lr · factor · O for a tile, unless the step is skipped.

    The grid's second axis numbers the rows of `targets`.
    """
    target = parameters.targets + tl.program_id(1) * TARGET_ROW
    factor = parameters.factors + tl.load(target + 1)
    shrink, step = factors_of_update(parameters.numbers, factor, tl.float32)
    offsets = row_offsets[:, None] + column_offsets[None, :]
    # Compared after the broadcast: Triton 3.9's interpreter makes a float of a broadcast comparison.
    mask = tl.broadcast_to(tl.load(parameters.numbers + SKIP), o.shape) <= 0
    p_pointers = aligned(tl.load(target), parameters.targets, TYPE) + offsets
    apply_part(p_pointers, o, mask, shrink=shrink, step=step, WIDE=tl.float32)
