"""Large matrices: three launches a step. X Xᵀ and the polynomial in it are symmetric, so half of each is computed.

X is the fp32 master, updated in the epilogue of the third product; operands are fp16 copies, padded with zeros to whole
tiles, which changes nothing.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, misc, untyped-decorator"
# ruff: noqa: ANN001, ANN201
# Reason for both: Triton compiles these functions; their arguments are of its own language, not of Python's.

from __future__ import annotations

import triton
import triton.language as tl

from deepmd_muon.optim.polar.cooperative import merge, norm_of_all
from deepmd_muon.optim.polar.kernels import COLUMNS, ROW, ROWS, load_matrix, store_result

# Programs that measure or copy one matrix.
SHARES = tl.constexpr(128)


@triton.jit
def measure(table, addresses, sums, T: tl.constexpr):
    """Store this program's share of each matrix's norm."""
    matrix = tl.program_id(1)
    row = table + matrix.to(tl.int64) * ROW
    down = tl.cdiv(tl.load(row + ROWS), T).to(tl.int32)
    along = tl.cdiv(tl.load(row + COLUMNS), T).to(tl.int32)
    t = tl.arange(0, T)
    largest = tl.zeros((), tl.float64)
    squares = tl.zeros((), tl.float64)
    for number in range(tl.program_id(0), down * along, SHARES):
        x, peak = load_matrix(row, addresses, number % down * T + t, number // down * T + t)
        largest, squares = merge(largest, squares, peak, tl.sum(x * x).to(tl.float64))
    place = 2 * (matrix * SHARES + tl.program_id(0))
    tl.store(sums + place, largest)
    tl.store(sums + place + 1, squares)


@triton.jit
def normalize(table, addresses, sums, master, iterate, order, width, T: tl.constexpr):
    """Write X / ‖X‖ in fp32 and fp16, (matrices, order, width), with zeros around it."""
    matrix = tl.program_id(1)
    row = table + matrix.to(tl.int64) * ROW
    joint, norm = norm_of_all(sums, matrix * SHARES, SHARES)
    t = tl.arange(0, T)
    down = order // T
    base = matrix.to(tl.int64) * order * width
    for number in range(tl.program_id(0), down * (width // T), SHARES):
        r = number % down * T + t
        c = number // down * T + t
        x, peak = load_matrix(row, addresses, r, c)
        x = x * (peak / joint / norm).to(tl.float32)
        where = base + r[:, None].to(tl.int64) * width + c[None, :]
        tl.store(master + where, x)
        tl.store(iterate + where, x.to(tl.float16))


@triton.jit
def symmetric_product(
    source, addend, target, coefficients, step, order, depth, ADD: tl.constexpr, T: tl.constexpr, R: tl.constexpr,
    K: tl.constexpr,
):  # fmt: skip
    """Write S Sᵀ, or b S + c S Sᵀ for a symmetric S, (matrices, order, order): RT × T tiles and their mirror images."""
    number = tl.program_id(0)
    matrix = tl.program_id(1)
    half = number // R
    i = ((tl.sqrt(8.0 * half + 1.0) - 1.0) * 0.5).to(tl.int32)
    block = half - i * (i + 1) // 2
    j = R * block + number % R
    top = matrix * order
    product = tl.zeros((R * T, T), tl.float32)
    for k in range(0, depth, K):
        left = source.load([top + i * R * T, k])
        right = addend.load([top + j * T, k])
        product = tl.dot(left, right.T, product)
    r = (i * R * T + tl.arange(0, R * T)).to(tl.int64)
    c = (j * T + tl.arange(0, T)).to(tl.int64)
    base = target + top.to(tl.int64) * order
    if ADD:
        b = tl.load(coefficients + 3 * step + 1)
        d = tl.load(coefficients + 3 * step + 2)
        # A second half of the target's buffer holds S itself: it is read where the tile is written.
        same = tl.load(base + tl.num_programs(1).to(tl.int64) * order * order + r[:, None] * order + c[None, :])
        product = b * same.to(tl.float32) + d * product
    narrow = product.to(tl.float16)
    tl.store(base + r[:, None] * order + c[None, :], narrow)
    if i != block:
        tl.store(base + c[:, None] * order + r[None, :], tl.trans(narrow))


@triton.jit
def update(
    polynomial, current, table, coefficients, master, following, out, step, order, width, LAST: tl.constexpr,
    T: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """Do X ← a X + P X in fp32 and write its fp16 copy; the last step writes the result instead."""
    number = tl.program_id(0)
    matrix = tl.program_id(1)
    down = order // T
    along = width // N
    # Programs that run together share rows and columns in the cache: 8 rows of tiles at a time.
    group = number // (8 * along)
    rows = tl.minimum(down - group * 8, 8)
    i = group * 8 + number % (8 * along) % rows
    j = number % (8 * along) // rows
    top = matrix * order
    r = i * T + tl.arange(0, T)
    c = j * N + tl.arange(0, N)
    where = (top + r)[:, None].to(tl.int64) * width + c[None, :]
    x = tl.load(coefficients + 3 * step) * tl.load(master + where)
    for k in range(0, order, K):
        x = tl.dot(polynomial.load([top + i * T, k]), current.load([top + k, j * N]), x)
    if LAST:
        store_result(table + matrix.to(tl.int64) * ROW, out, x, r, c)
    else:
        tl.store(master + where, x)
        tl.store(following + where, x.to(tl.float16))
