"""One launch for all small matrices: each program runs the whole iteration of one matrix.

The iteration
-------------
    X ← X / ‖X‖, then in each step: R = X Xᵀ, X ← a X + (b R + c R²) X.

X is read in fp32, with its smaller dimension as rows. It stays in registers (the master); tensor
cores multiply fp16 operands and sum in fp32. Matrices of different shapes and strides share a grid:
each program reads its table row.

`newton_schulz` defines the results; the gates of `kernel_cases` compare them.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, misc, untyped-decorator"
# ruff: noqa: ANN001, ANN201, SIM102
# Reason for both: Triton compiles these functions. Their arguments have Triton's types, and an `if`
# on a constant must stand alone to leave code out.

from __future__ import annotations

import triton
import triton.language as tl

# Columns of a table row, int64: the location of a matrix, read with its smaller dimension as rows;
# `tables.MatrixLocation` explains them.
ROW = tl.constexpr(11)
TILE, TENSOR, OFFSET, ROWS, COLUMNS, STRIDE, TRANSPOSED, OUT, OUT_ROW, OUT_COLUMN = (
    tl.constexpr(i) for i in range(10)
)
# Offset in the fp16 workspace of a matrix that several programs share, in elements.
WORKSPACE_OFFSET = tl.constexpr(10)

# Tiles (rows, columns) that hold a matrix, by number; the mask of a launch selects those that it
# needs.
TILES = ((32, 64), (32, 256), (64, 64), (64, 128), (64, 256), (128, 128))
_N_TILES = tl.constexpr(len(TILES))
_TILE_ROWS = tl.constexpr(tuple(rows for rows, _ in TILES))
_TILE_COLUMNS = tl.constexpr(tuple(columns for _, columns in TILES))

# The smallest normal fp32 number.
_TINY = tl.constexpr(1.1754943508222875e-38)

# ----- loads and stores --------------------------------------------------------------------------


@triton.jit
def load_block(pointer, stride, outer, inner, n_outer, n_inner):
    """Load entries (outer, inner) of a matrix that is contiguous along `inner`; zeros outside."""
    mask = (outer[:, None] < n_outer) & (inner[None, :] < n_inner)
    return tl.load(pointer + (outer * stride)[:, None] + inner[None, :], mask=mask, other=0.0)


@triton.jit
def load_matrix(row, addresses, r, c):
    """Load the entries (r, c) of a table row's fp32 matrix; zeros outside.

    Adjacent lanes read adjacent elements, also of a matrix that is stored transposed.
    """
    rows = tl.load(row + ROWS)
    columns = tl.load(row + COLUMNS)
    stride = tl.load(row + STRIDE)
    address = tl.load(addresses + tl.load(row + TENSOR))
    pointer = address.to(tl.pointer_type(tl.float32)) + tl.load(row + OFFSET)
    if tl.load(row + TRANSPOSED) != 0:
        tile = tl.trans(load_block(pointer, stride, c, r, n_outer=columns, n_inner=rows))
    else:
        tile = load_block(pointer, stride, r, c, n_outer=rows, n_inner=columns)
    return tile


@triton.jit
def store_result(row, out, x, r, c):
    """Store entries (r, c) of a table row's result, which is contiguous along one axis."""
    rows = tl.load(row + ROWS)
    columns = tl.load(row + COLUMNS)
    row_stride = tl.load(row + OUT_ROW)
    column_stride = tl.load(row + OUT_COLUMN)
    out += tl.load(row + OUT)
    if row_stride == 1:
        turned = out + (c * column_stride)[:, None] + r[None, :]
        tl.store(turned, tl.trans(x), mask=(c[:, None] < columns) & (r[None, :] < rows))
    else:
        upright = out + (r * row_stride)[:, None] + c[None, :]
        tl.store(upright, x, mask=(r[:, None] < rows) & (c[None, :] < columns))


# ----- the iteration -----------------------------------------------------------------------------


@triton.jit
def whole_matrix(
    row,
    addresses,
    coefficients,  # fp32 (STEPS, 3)
    out,
    MP: tl.constexpr,
    NP: tl.constexpr,
    STEPS: tl.constexpr,
):
    """Normalise one matrix, at most MP × NP, and run all steps."""
    r = tl.arange(0, MP)
    c = tl.arange(0, NP)
    x = load_matrix(row, addresses, r, c)
    # First by the largest magnitude, so that squares are in range; one division, then products:
    # fewer instructions to fetch.
    x = x * (1.0 / tl.maximum(tl.max(tl.abs(x)), _TINY))
    norm = tl.sqrt(tl.sum(x * x))
    x = x * (1.0 / tl.where(norm == 0.0, 1.0, norm))
    # The polar factor of a vector is its direction: a, b, c = 1, 0, 0. (A branch around the loop
    # would cost a layout conversion per step.)
    is_vector = tl.load(row + ROWS) == 1
    for k in range(STEPS):
        a = tl.where(is_vector, 1.0, tl.load(coefficients + 3 * k))
        b = tl.where(is_vector, 0.0, tl.load(coefficients + 3 * k + 1))
        d = tl.where(is_vector, 0.0, tl.load(coefficients + 3 * k + 2))
        narrow = x.to(tl.float16)
        gram = tl.dot(narrow, tl.trans(narrow))
        narrow_gram = gram.to(tl.float16)
        polynomial = (b * gram + d * tl.dot(narrow_gram, narrow_gram)).to(tl.float16)
        x = tl.dot(polynomial, narrow, a * x)
    store_result(row, out, x, r, c)


@triton.jit
def small_matrices(
    table,
    addresses,
    coefficients,
    out,
    MASK: tl.constexpr,
    STEPS: tl.constexpr,
):
    """Orthogonalize one matrix per program.

    MASK has bit i set if some matrix uses tile i of TILES.
    """
    row = table + tl.program_id(0).to(tl.int64) * ROW
    tile = tl.load(row + TILE)
    for i in tl.static_range(_N_TILES):
        if MASK & (1 << i):
            if tile == i:
                whole_matrix(
                    row,
                    addresses,
                    coefficients,
                    out,
                    MP=_TILE_ROWS[i],
                    NP=_TILE_COLUMNS[i],
                    STEPS=STEPS,
                )


@triton.jit(do_not_specialize=[f"a{i}" for i in range(16)])
def write_addresses(
    addresses, first, a0, a1, a2, a3, a4, a5, a6, a7, a8, a9, a10, a11, a12, a13, a14, a15
):
    """Write 16 addresses that are kernel arguments, so that a captured graph contains them."""
    p = addresses + first
    tl.store(p, a0)
    tl.store(p + 1, a1)
    tl.store(p + 2, a2)
    tl.store(p + 3, a3)
    tl.store(p + 4, a4)
    tl.store(p + 5, a5)
    tl.store(p + 6, a6)
    tl.store(p + 7, a7)
    tl.store(p + 8, a8)
    tl.store(p + 9, a9)
    tl.store(p + 10, a10)
    tl.store(p + 11, a11)
    tl.store(p + 12, a12)
    tl.store(p + 13, a13)
    tl.store(p + 14, a14)
    tl.store(p + 15, a15)
