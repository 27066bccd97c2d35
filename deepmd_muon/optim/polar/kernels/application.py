"""The update of the parameters, shared by the element-wise kernels and the last product of large matrices."""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, misc, untyped-decorator"
# ruff: noqa: ANN001, ANN201
# Reason for both: Triton compiles these functions, whose arguments have Triton's types, not Python's.

from __future__ import annotations

import triton
import triton.language as tl

# Columns of a row of `targets`, int64: the address of a matrix of parameters, and the number of its factor.
TARGET_ROW = tl.constexpr(2)


@triton.jit
def aligned(address, anchor, TYPE: tl.constexpr):
    """Return an address that is a multiple of 16 as a pointer whose alignment the compiler recognizes."""
    BYTES: tl.constexpr = TYPE.primitive_bitwidth // 8
    away = (address - anchor.to(tl.int64)) // 16 * (16 // BYTES)
    return anchor.to(tl.pointer_type(TYPE), bitcast=True) + away


@triton.jit
def joined(high, low):
    """Return the float64 number that the host split into two float32 numbers."""
    return tl.zeros((), tl.float64) + high + low


@triton.jit
def apply_part(p_pointers, o, inside, kept, step, WIDE: tl.constexpr):
    """Do p ← kept · p − step · O."""
    p = tl.load(p_pointers, mask=inside, other=0.0).to(WIDE)
    tl.store(p_pointers, (p * kept - step * o).to(p_pointers.dtype.element_ty), mask=inside)


@triton.jit
def apply_tile(
    o, targets, damping, rate, decay_high, decay_low, skip, row_offsets, column_offsets, TYPE: tl.constexpr,
):  # fmt: skip
    """Do p ← p (1 − lr λ) − lr · factor · O for a tile of fp32 results, unless `skip` is set.

    The grid's second axis numbers the rows of `targets`; offsets are those of the tile's rows and columns.
    """
    row = targets + tl.program_id(1) * TARGET_ROW
    lr = tl.load(rate)
    kept = (1.0 - lr * joined(decay_high, decay_low)).to(tl.float32)
    step = (lr * tl.load(damping + tl.load(row + 1))).to(tl.float32)
    place = row_offsets[:, None] + column_offsets[None, :]
    inside = tl.full(o.shape, tl.load(skip) <= 0, tl.int1)
    apply_part(aligned(tl.load(row), targets, TYPE) + place, o, inside, kept, step, tl.float32)


@triton.jit
def prefetch_lines(pointers, rows, stride, columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Fetch a tile of fp32 numbers into the L2 cache without waiting; each address fetches a line of 128 bytes."""
    place = (rows + tl.arange(0, ROWS))[:, None] * stride + (
        columns + tl.arange(0, COLUMNS // 32) * 32
    )[None, :]
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.b32 $0, 0;",
        "=r,l",
        [pointers + place],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )
