"""One launch for all small matrices: a program takes one matrix through the whole iteration on its multiprocessor.

The iterate X stays in registers in fp32 (the master); the operands of the tensor cores are fp16 and their sums fp32.
Matrices of different shapes, strides and dtypes share a grid: each program reads what it needs from its table row.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, misc, untyped-decorator"
# ruff: noqa: ANN001, ANN201, SIM102
# Reason for both: Triton compiles these functions. Their arguments are of its own language, not of Python's, and an
# `if` on a constant must stand alone to leave code out.

from __future__ import annotations

import triton
import triton.language as tl

# Columns of a table row, int64: where a matrix lies and how it is read with its smaller dimension as rows.
ROW = tl.constexpr(14)
TILE, TENSOR, KIND, OFFSET, ROWS, COLUMNS, ROW_STRIDE, COLUMN_STRIDE, OUT, OUT_ROW, OUT_COLUMN, TURNED = (
    tl.constexpr(i) for i in range(12)
)
# Where a matrix that several programs share has its workspace, in elements of each precision.
SINGLE, HALF = tl.constexpr(12), tl.constexpr(13)

# Tiles (rows, columns) that hold a matrix, by their number in the table; the mask of a launch names those it needs.
TILES = ((32, 64), (32, 256), (64, 64), (64, 128), (64, 256), (128, 128))


@triton.jit
def load_scaled(address, kind, offset, inside):
    """Load a tile of any floating-point kind; return it in fp32, divided by its largest magnitude, and that."""
    if kind == 1:
        wide = tl.load(address.to(tl.pointer_type(tl.float64)) + offset, mask=inside, other=0.0)
        largest = tl.max(tl.abs(wide))
        tile = (wide / tl.where(largest == 0.0, 1.0, largest)).to(tl.float32)
    else:
        if kind == 0:
            single = tl.load(address.to(tl.pointer_type(tl.float32)) + offset, mask=inside, other=0.0)
        elif kind == 2:
            single = tl.load(address.to(tl.pointer_type(tl.float16)) + offset, mask=inside, other=0.0).to(tl.float32)
        else:
            single = tl.load(address.to(tl.pointer_type(tl.bfloat16)) + offset, mask=inside, other=0.0).to(tl.float32)
        greatest = tl.max(tl.abs(single))
        tile = single / tl.where(greatest == 0.0, 1.0, greatest)
        largest = greatest.to(tl.float64)
    return tile, largest


@triton.jit
def load_matrix(row, addresses, r, c):
    """Load the entries (r, c) of a table row's matrix as `load_scaled` does, zeros outside of it.

    Neighbouring lanes read neighbouring addresses whichever way the matrix lies in memory.
    """
    m = tl.load(row + ROWS)
    n = tl.load(row + COLUMNS)
    down = tl.load(row + ROW_STRIDE)
    across = tl.load(row + COLUMN_STRIDE)
    address = tl.load(addresses + tl.load(row + TENSOR))
    kind = tl.load(row + KIND)
    offset = tl.load(row + OFFSET)
    if tl.load(row + TURNED) != 0:
        upright, largest = load_scaled(
            address, kind, offset + c[:, None] * across + r[None, :] * down, (c[:, None] < n) & (r[None, :] < m)
        )
        tile = tl.trans(upright)
    else:
        tile, largest = load_scaled(
            address, kind, offset + r[:, None] * down + c[None, :] * across, (r[:, None] < m) & (c[None, :] < n)
        )
    return tile, largest


@triton.jit
def store_result(row, out, x, r, c):
    """Store entries (r, c) of a table row's result."""
    m = tl.load(row + ROWS)
    n = tl.load(row + COLUMNS)
    down = tl.load(row + OUT_ROW)
    across = tl.load(row + OUT_COLUMN)
    out += tl.load(row + OUT)
    if down == 1:
        tl.store(out + c[:, None] * across + r[None, :], tl.trans(x), mask=(c[:, None] < n) & (r[None, :] < m))
    else:
        tl.store(out + r[:, None] * down + c[None, :] * across, x, mask=(r[:, None] < m) & (c[None, :] < n))


@triton.jit
def whole_matrix(row, addresses, coefficients, out, MP: tl.constexpr, NP: tl.constexpr, STEPS: tl.constexpr):
    """Take one matrix, at most MP × NP, through normalisation and all steps."""
    r = tl.arange(0, MP)
    c = tl.arange(0, NP)
    x, _ = load_matrix(row, addresses, r, c)
    norm = tl.sqrt(tl.sum(x * x))
    x = x / tl.where(norm == 0.0, 1.0, norm)
    if tl.load(row + ROWS) > 1:  # the polar factor of a vector is its direction
        for k in range(STEPS):
            a = tl.load(coefficients + 3 * k)
            b = tl.load(coefficients + 3 * k + 1)
            d = tl.load(coefficients + 3 * k + 2)
            narrow = x.to(tl.float16)
            gram = tl.dot(narrow, tl.trans(narrow))
            narrow_gram = gram.to(tl.float16)
            polynomial = (b * gram + d * tl.dot(narrow_gram, narrow_gram)).to(tl.float16)
            x = tl.dot(polynomial, narrow, a * x)
    store_result(row, out, x, r, c)


@triton.jit
def small_matrices(table, addresses, coefficients, out, MASK: tl.constexpr, STEPS: tl.constexpr):
    """Orthogonalize one matrix per program; MASK has bit i set when some matrix uses tile i of TILES."""
    row = table + tl.program_id(0).to(tl.int64) * ROW
    tile = tl.load(row + TILE)
    if MASK & 1:
        if tile == 0:
            whole_matrix(row, addresses, coefficients, out, 32, 64, STEPS)
    if MASK & 2:
        if tile == 1:
            whole_matrix(row, addresses, coefficients, out, 32, 256, STEPS)
    if MASK & 4:
        if tile == 2:
            whole_matrix(row, addresses, coefficients, out, 64, 64, STEPS)
    if MASK & 8:
        if tile == 3:
            whole_matrix(row, addresses, coefficients, out, 64, 128, STEPS)
    if MASK & 16:
        if tile == 4:
            whole_matrix(row, addresses, coefficients, out, 64, 256, STEPS)
    if MASK & 32:
        if tile == 5:
            whole_matrix(row, addresses, coefficients, out, 128, 128, STEPS)


@triton.jit(do_not_specialize=[f"a{i}" for i in range(16)])
def write_addresses(addresses, first, a0, a1, a2, a3, a4, a5, a6, a7, a8, a9, a10, a11, a12, a13, a14, a15):
    """Write 16 addresses, which travel as arguments: no copy from the host, and a captured graph holds them."""
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
