"""One launch for all small matrices: each program runs the whole iteration of one matrix.

The iteration
-------------
    X ← X / ‖X‖, then in each step: R = X Xᵀ, X ← a X + (b R + c R²) X.

X is read with its smaller dimension as rows. It stays in registers in fp32 (the master); tensor
cores multiply fp16 operands and sum in fp32. Matrices of different shapes, strides and dtypes share
a grid: each program reads its table row.

`newton_schulz` defines the results; the gates of `kernel_cases` compare them.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, misc, untyped-decorator"
# ruff: noqa: ANN001, ANN201, SIM102
# Reason for both: Triton compiles these functions. Their arguments have Triton's types, and an `if`
# on a constant must stand alone to leave code out.

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

# Columns of a table row, int64: the location of a matrix, read with its smaller dimension as rows;
# `tables.MatrixLocation` explains them.
ROW = tl.constexpr(13)
TILE, TENSOR, KIND, OFFSET, ROWS, COLUMNS, STRIDE, TRANSPOSED, OUT, OUT_ROW, OUT_COLUMN = (
    tl.constexpr(i) for i in range(11)
)
# Workspace offsets of a matrix that several programs share, in elements of each precision.
SINGLE = tl.constexpr(11)
HALF = tl.constexpr(12)

# Values of the column KIND: the dtype of a matrix.
FLOAT32, DOUBLE, FLOAT16, BFLOAT16 = (tl.constexpr(i) for i in range(4))

# Tiles (rows, columns) that hold a matrix, by number; the mask of a launch selects those that it
# needs.
TILES = ((32, 64), (32, 256), (64, 64), (64, 128), (64, 256), (128, 128))
_N_TILES = tl.constexpr(len(TILES))
_TILE_ROWS = tl.constexpr(tuple(rows for rows, _ in TILES))
_TILE_COLUMNS = tl.constexpr(tuple(columns for _, columns in TILES))

# Smallest normal numbers.
_TINY_SINGLE = tl.constexpr(1.1754943508222875e-38)
_TINY_DOUBLE = tl.constexpr(2.2250738585072014e-308)
# The bits of the exponent of a float64 number: of a positive number they are the next lower power
# of two.
_EXPONENT = tl.constexpr(0x7FF0000000000000)

# ----- loads and stores --------------------------------------------------------------------------
# Adjacent lanes of a load read adjacent elements: `inner` numbers entries along the contiguous
# dimension, `outer` along the other one.


class Stored(NamedTuple):
    """Where a table row's matrix is stored."""

    rows: Any
    columns: Any
    address: Any
    offset: Any  # of the first element
    stride: Any  # along the dimension that is not contiguous


@triton.jit
def locate(row, addresses):
    """Read where a table row's matrix is stored."""
    return Stored(
        rows=tl.load(row + ROWS),
        columns=tl.load(row + COLUMNS),
        address=tl.load(addresses + tl.load(row + TENSOR)),
        offset=tl.load(row + OFFSET),
        stride=tl.load(row + STRIDE),
    )


@triton.jit
def load_as_single(at, kind, outer, inner, n_outer, n_inner):
    """Load entries of any kind except float64 as fp32; zeros outside."""
    offset = at.offset + (outer * at.stride)[:, None] + inner[None, :]
    mask = (outer[:, None] < n_outer) & (inner[None, :] < n_inner)
    if kind == FLOAT32:
        single = tl.load(at.address.to(tl.pointer_type(tl.float32)) + offset, mask=mask, other=0.0)
    elif kind == FLOAT16:
        # Two names: Triton refuses a variable that has another dtype in another branch.
        fp16 = tl.load(at.address.to(tl.pointer_type(tl.float16)) + offset, mask=mask, other=0.0)
        single = fp16.to(tl.float32)
    else:
        bf16 = tl.load(at.address.to(tl.pointer_type(tl.bfloat16)) + offset, mask=mask, other=0.0)
        single = bf16.to(tl.float32)
    return single


@triton.jit
def load_as_double(at, kind, outer, inner, n_outer, n_inner):
    """Load entries of any kind as float64; zeros outside."""
    if kind == DOUBLE:
        offset = at.offset + (outer * at.stride)[:, None] + inner[None, :]
        mask = (outer[:, None] < n_outer) & (inner[None, :] < n_inner)
        wide = tl.load(at.address.to(tl.pointer_type(tl.float64)) + offset, mask=mask, other=0.0)
    else:
        wide = load_as_single(
            at, kind, outer=outer, inner=inner, n_outer=n_outer, n_inner=n_inner
        ).to(tl.float64)
    return wide


@triton.jit
def load_scaled(at, kind, outer, inner, n_outer, n_inner):
    """Load entries of any kind divided by their largest magnitude, fp32, and this magnitude.

    A largest magnitude below the smallest normal number is replaced by this number; the entries are
    then smaller than 1.
    """
    if kind == DOUBLE:
        wide = load_as_double(at, kind, outer=outer, inner=inner, n_outer=n_outer, n_inner=n_inner)
        largest = tl.maximum(tl.max(tl.abs(wide)), _TINY_DOUBLE)
        tile = (wide * (1.0 / largest)).to(tl.float32)
    else:
        single = load_as_single(
            at, kind, outer=outer, inner=inner, n_outer=n_outer, n_inner=n_inner
        )
        greatest = tl.maximum(tl.max(tl.abs(single)), _TINY_SINGLE)
        # One division, then products: fewer instructions to fetch.
        tile = single * (1.0 / greatest)
        largest = greatest.to(tl.float64)
    return tile, largest


@triton.jit
def load_matrix(row, addresses, r, c, ONLY: tl.constexpr):
    """Load the entries (r, c) of a table row's matrix as `load_scaled` does.

    ONLY is the kind of all matrices of the launch, so that the code for other kinds is left out; or
    −1.
    """
    at = locate(row, addresses)
    if tl.load(row + TRANSPOSED) != 0:
        upright, largest = load_scaled(
            at,
            ONLY if ONLY >= 0 else tl.load(row + KIND),
            outer=c,
            inner=r,
            n_outer=at.columns,
            n_inner=at.rows,
        )
        tile = tl.trans(upright)
    else:
        tile, largest = load_scaled(
            at,
            ONLY if ONLY >= 0 else tl.load(row + KIND),
            outer=r,
            inner=c,
            n_outer=at.rows,
            n_inner=at.columns,
        )
    return tile, largest


@triton.jit
def load_single(row, addresses, r, c):
    """Load the entries (r, c) of a table row's matrix in fp32, as they are stored; not for float64.

    The tile is transposed if the matrix is; there must be as many rows as columns.
    """
    at = locate(row, addresses)
    kind = tl.load(row + KIND)
    if tl.load(row + TRANSPOSED) != 0:
        tile = load_as_single(at, kind, outer=c, inner=r, n_outer=at.columns, n_inner=at.rows)
    else:
        tile = load_as_single(at, kind, outer=r, inner=c, n_outer=at.rows, n_inner=at.columns)
    return tile


@triton.jit
def load_upright(row, addresses, r, c):
    """Load the entries (r, c), as many rows as columns, of a table row's matrix in fp32.

    Not for float64.
    """
    tile = load_single(row, addresses, r, c)
    if tl.load(row + TRANSPOSED) != 0:
        tile = tl.trans(tile)
    return tile


@triton.jit
def load_double(row, addresses, r, c, ONLY: tl.constexpr):
    """Load entries (r, c) of a table row's matrix in float64, and a power of two near the largest.

    Sums in float64 of values scaled by powers of two hardly depend on how a matrix is divided. ONLY
    as in `load_matrix`.
    """
    at = locate(row, addresses)
    if tl.load(row + TRANSPOSED) != 0:
        upright = load_as_double(
            at,
            ONLY if ONLY >= 0 else tl.load(row + KIND),
            outer=c,
            inner=r,
            n_outer=at.columns,
            n_inner=at.rows,
        )
        tile = tl.trans(upright)
    else:
        tile = load_as_double(
            at,
            ONLY if ONLY >= 0 else tl.load(row + KIND),
            outer=r,
            inner=c,
            n_outer=at.rows,
            n_inner=at.columns,
        )
    largest = tl.maximum(tl.max(tl.abs(tile)), _TINY_DOUBLE)
    power = (largest.to(tl.int64, bitcast=True) & _EXPONENT).to(tl.float64, bitcast=True)
    return tile, power


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
    ONLY: tl.constexpr,
    STEPS: tl.constexpr,
):
    """Normalise one matrix, at most MP × NP, and run all steps."""
    r = tl.arange(0, MP)
    c = tl.arange(0, NP)
    x, _ = load_matrix(row, addresses, r, c, ONLY)
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
    ONLY: tl.constexpr,
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
                    ONLY=ONLY,
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
