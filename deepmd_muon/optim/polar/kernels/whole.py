"""One launch for all small matrices: each program runs the whole iteration of one matrix.

The iterate X stays in registers in fp32 (the master); tensor cores multiply fp16 operands and sum in fp32.
Matrices of different shapes, strides and dtypes share a grid: each program reads its table row.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, misc, untyped-decorator"
# ruff: noqa: ANN001, ANN201, SIM102
# Reason for both: Triton compiles these functions, whose arguments have Triton's types, not Python's, and an
# `if` on a constant must stand alone to leave code out.

from __future__ import annotations

import triton
import triton.language as tl

# Columns of a table row, int64: the location of a matrix, read with its smaller dimension as rows.
ROW = tl.constexpr(13)
TILE, TENSOR, KIND, OFFSET, ROWS, COLUMNS, STRIDE, TRANSPOSED, OUT, OUT_ROW, OUT_COLUMN = (
    tl.constexpr(i) for i in range(11)
)
# Workspace offsets of a matrix that several programs share, in elements of each precision.
SINGLE, HALF = tl.constexpr(11), tl.constexpr(12)

# Tiles (rows, columns) that hold a matrix, by number; the mask of a launch selects those that it needs.
TILES = ((32, 64), (32, 256), (64, 64), (64, 128), (64, 256), (128, 128))


@triton.jit
def load_as_single(address, kind, offset, inside):
    """Load a tile of any kind except float64 as fp32."""
    if kind == 0:
        single = tl.load(address.to(tl.pointer_type(tl.float32)) + offset, mask=inside, other=0.0)
    elif kind == 2:
        single = tl.load(
            address.to(tl.pointer_type(tl.float16)) + offset, mask=inside, other=0.0
        ).to(tl.float32)
    else:
        single = tl.load(
            address.to(tl.pointer_type(tl.bfloat16)) + offset, mask=inside, other=0.0
        ).to(tl.float32)
    return single


@triton.jit
def load_as_double(address, kind, offset, inside):
    """Load a tile of any kind as float64."""
    if kind == 1:
        wide = tl.load(address.to(tl.pointer_type(tl.float64)) + offset, mask=inside, other=0.0)
    else:
        wide = load_as_single(address, kind, offset, inside).to(tl.float64)
    return wide


@triton.jit
def load_scaled(address, kind, offset, inside):
    """Load a tile of any floating-point kind; return it in fp32, divided by its largest magnitude, and this magnitude.

    A largest magnitude below the smallest normal number is replaced by this number; the tile is then smaller than 1.
    """
    if kind == 1:
        wide = tl.load(address.to(tl.pointer_type(tl.float64)) + offset, mask=inside, other=0.0)
        largest = tl.maximum(tl.max(tl.abs(wide)), 2.2250738585072014e-308)
        tile = (wide * (1.0 / largest)).to(tl.float32)
    else:
        single = load_as_single(address, kind, offset, inside)
        greatest = tl.maximum(tl.max(tl.abs(single)), 1.1754943508222875e-38)
        # One division, then products: fewer instructions to fetch.
        tile = single * (1.0 / greatest)
        largest = greatest.to(tl.float64)
    return tile, largest


@triton.jit
def load_matrix(row, addresses, r, c, ONLY: tl.constexpr):
    """Load the entries (r, c) of a table row's matrix as `load_scaled` does, zeros outside.

    Adjacent lanes read along the contiguous dimension: rows, or columns if transposed. ONLY is the kind of all
    matrices of the launch, so that the code for other kinds is left out; or −1.
    """
    m = tl.load(row + ROWS)
    n = tl.load(row + COLUMNS)
    address = tl.load(addresses + tl.load(row + TENSOR))
    offset = tl.load(row + OFFSET)
    stride = tl.load(row + STRIDE)
    if tl.load(row + TRANSPOSED) != 0:
        upright, largest = load_scaled(
            address,
            ONLY if ONLY >= 0 else tl.load(row + KIND),
            offset + (c * stride)[:, None] + r[None, :],
            (c[:, None] < n) & (r[None, :] < m),
        )
        tile = tl.trans(upright)
    else:
        tile, largest = load_scaled(
            address,
            ONLY if ONLY >= 0 else tl.load(row + KIND),
            offset + (r * stride)[:, None] + c[None, :],
            (r[:, None] < m) & (c[None, :] < n),
        )
    return tile, largest


@triton.jit
def load_single(row, addresses, r, c):
    """Load the entries (r, c) of a table row's matrix in fp32, or their transpose if transposed; not for float64."""
    m = tl.load(row + ROWS)
    n = tl.load(row + COLUMNS)
    address = tl.load(addresses + tl.load(row + TENSOR))
    kind = tl.load(row + KIND)
    offset = tl.load(row + OFFSET)
    stride = tl.load(row + STRIDE)
    if tl.load(row + TRANSPOSED) != 0:
        tile = load_as_single(
            address,
            kind,
            offset + (c * stride)[:, None] + r[None, :],
            (c[:, None] < n) & (r[None, :] < m),
        )
    else:
        tile = load_as_single(
            address,
            kind,
            offset + (r * stride)[:, None] + c[None, :],
            (r[:, None] < m) & (c[None, :] < n),
        )
    return tile


@triton.jit
def load_upright(row, addresses, r, c):
    """Load the entries (r, c), as many rows as columns, of a table row's matrix in fp32; not for float64."""
    tile = load_single(row, addresses, r, c)
    if tl.load(row + TRANSPOSED) != 0:
        tile = tl.trans(tile)
    return tile


@triton.jit
def load_double(row, addresses, r, c, ONLY: tl.constexpr):
    """Load the entries (r, c) of a table row's matrix in float64; return them and a power of two near the largest.

    Sums in float64 of values scaled by powers of two hardly depend on how a matrix is divided. ONLY as in
    `load_matrix`.
    """
    m = tl.load(row + ROWS)
    n = tl.load(row + COLUMNS)
    address = tl.load(addresses + tl.load(row + TENSOR))
    offset = tl.load(row + OFFSET)
    stride = tl.load(row + STRIDE)
    if tl.load(row + TRANSPOSED) != 0:
        upright = load_as_double(
            address,
            ONLY if ONLY >= 0 else tl.load(row + KIND),
            offset + (c * stride)[:, None] + r[None, :],
            (c[:, None] < n) & (r[None, :] < m),
        )
        tile = tl.trans(upright)
    else:
        tile = load_as_double(
            address,
            ONLY if ONLY >= 0 else tl.load(row + KIND),
            offset + (r * stride)[:, None] + c[None, :],
            (r[:, None] < m) & (c[None, :] < n),
        )
    largest = tl.maximum(tl.max(tl.abs(tile)), 2.2250738585072014e-308)
    return tile, (largest.to(tl.int64, bitcast=True) & 0x7FF0000000000000).to(
        tl.float64, bitcast=True
    )


@triton.jit
def store_result(row, out, x, r, c):
    """Store entries (r, c) of a table row's result, which is contiguous along one axis."""
    m = tl.load(row + ROWS)
    n = tl.load(row + COLUMNS)
    down = tl.load(row + OUT_ROW)
    across = tl.load(row + OUT_COLUMN)
    out += tl.load(row + OUT)
    if down == 1:
        tl.store(
            out + (c * across)[:, None] + r[None, :],
            tl.trans(x),
            mask=(c[:, None] < n) & (r[None, :] < m),
        )
    else:
        tl.store(
            out + (r * down)[:, None] + c[None, :], x, mask=(r[:, None] < m) & (c[None, :] < n)
        )


@triton.jit
def whole_matrix(
    row, addresses, coefficients, out, MP: tl.constexpr, NP: tl.constexpr, ONLY: tl.constexpr, STEPS: tl.constexpr
):  # fmt: skip
    """Normalise one matrix, at most MP × NP, and run all steps."""
    r = tl.arange(0, MP)
    c = tl.arange(0, NP)
    x, _ = load_matrix(row, addresses, r, c, ONLY)
    norm = tl.sqrt(tl.sum(x * x))
    x = x * (1.0 / tl.where(norm == 0.0, 1.0, norm))
    # The polar factor of a vector is its direction: a, b, c = 1, 0, 0. (A branch around the loop would cost a layout
    # conversion per step.)
    vector = tl.load(row + ROWS) == 1
    for k in range(STEPS):
        a = tl.where(vector, 1.0, tl.load(coefficients + 3 * k))
        b = tl.where(vector, 0.0, tl.load(coefficients + 3 * k + 1))
        d = tl.where(vector, 0.0, tl.load(coefficients + 3 * k + 2))
        narrow = x.to(tl.float16)
        gram = tl.dot(narrow, tl.trans(narrow))
        narrow_gram = gram.to(tl.float16)
        polynomial = (b * gram + d * tl.dot(narrow_gram, narrow_gram)).to(tl.float16)
        x = tl.dot(polynomial, narrow, a * x)
    store_result(row, out, x, r, c)


@triton.jit
def small_matrices(
    table, addresses, coefficients, out, MASK: tl.constexpr, ONLY: tl.constexpr, STEPS: tl.constexpr
):  # fmt: skip
    """Orthogonalize one matrix per program; MASK has bit i set when some matrix uses tile i of TILES."""
    row = table + tl.program_id(0).to(tl.int64) * ROW
    tile = tl.load(row + TILE)
    if MASK & 1:
        if tile == 0:
            whole_matrix(row, addresses, coefficients, out, 32, 64, ONLY, STEPS)
    if MASK & 2:
        if tile == 1:
            whole_matrix(row, addresses, coefficients, out, 32, 256, ONLY, STEPS)
    if MASK & 4:
        if tile == 2:
            whole_matrix(row, addresses, coefficients, out, 64, 64, ONLY, STEPS)
    if MASK & 8:
        if tile == 3:
            whole_matrix(row, addresses, coefficients, out, 64, 128, ONLY, STEPS)
    if MASK & 16:
        if tile == 4:
            whole_matrix(row, addresses, coefficients, out, 64, 256, ONLY, STEPS)
    if MASK & 32:
        if tile == 5:
            whole_matrix(row, addresses, coefficients, out, 128, 128, ONLY, STEPS)


@triton.jit(do_not_specialize=[f"a{i}" for i in range(16)])
def write_addresses(
    addresses, first, a0, a1, a2, a3, a4, a5, a6, a7, a8, a9, a10, a11, a12, a13, a14, a15
):
    """Write 16 addresses passed as kernel arguments: no copy from the host, and a captured graph contains them."""
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
