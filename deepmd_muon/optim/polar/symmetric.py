"""Large matrices: products of whole batches. X Xᵀ and all polynomials in it are symmetric: half of each is computed.

X is the fp32 master, updated in the epilogue of the third product; operands are fp16 copies, padded with zeros to whole
tiles, which changes nothing.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, misc, untyped-decorator"
# ruff: noqa: ANN001, ANN201, SIM102
# Reason for both: Triton compiles these functions. Their arguments are of its own language, not of Python's, and an
# `if` on a constant must stand alone to leave code out.

from __future__ import annotations

import triton
import triton.language as tl

from deepmd_muon.optim.polar.cooperative import merge, norm_of_all
from deepmd_muon.optim.polar.kernels import COLUMNS, KIND, ROW, ROWS, load_matrix, load_single, store_result

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
    place = 2 * (matrix * SHARES + tl.program_id(0))
    if tl.load(row + KIND) == 1:  # squares of float64 may leave its range
        largest = tl.zeros((), tl.float64)
        squares = tl.zeros((), tl.float64)
        for number in range(tl.program_id(0), down * along, SHARES):
            x, peak = load_matrix(row, addresses, number % down * T + t, number // down * T + t)
            largest, squares = merge(largest, squares, peak, tl.sum(x * x).to(tl.float64))
        tl.store(sums + place, largest)
        tl.store(sums + place + 1, squares)
    else:
        total = tl.zeros((T, T), tl.float64)
        for number in range(tl.program_id(0), down * along, SHARES):
            wide = load_single(row, addresses, number % down * T + t, number // down * T + t).to(tl.float64)
            total += wide * wide
        tl.store(sums + place, 1.0)
        tl.store(sums + place + 1, tl.sum(total))


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


@triton.jit(do_not_specialize=["step"])
def symmetric_product(
    tall, flat, first, second, target, mirror, weights, step, order, depth, ADDENDS: tl.constexpr,
    EVEN: tl.constexpr, T: tl.constexpr, R: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """Write the symmetric w₀ F + w₁ G + w₂ L Sᵀ, (matrices, order, order): RT × T tiles and their mirror images.

    `tall` describes L in RT × K tiles, `flat` S in T × K tiles, `first` F and `second` G, of which the first ADDENDS
    are used, and `target` the result in RT × T tiles, `mirror` the result in T × RT tiles.
    EVEN makes the result exactly symmetric; R must be 1 then.
    """
    number = tl.program_id(0)
    top = tl.program_id(1) * order
    half = number // R
    i = ((tl.sqrt(8.0 * half + 1.0) - 1.0) * 0.5).to(tl.int32)
    block = half - i * (i + 1) // 2
    r = i * R * T
    c = (R * block + number % R) * T
    product = tl.zeros((R * T, T), tl.float32)
    for k in range(0, depth, K):
        product = tl.dot(tall.load([top + r, k]), flat.load([top + c, k]).T, product)
    if ADDENDS > 0:
        product = tl.load(weights + 3 * step + 2) * product
        product += tl.load(weights + 3 * step) * first.load([top + r, c]).to(tl.float32)
        if ADDENDS > 1:
            product += tl.load(weights + 3 * step + 1) * second.load([top + r, c]).to(tl.float32)
        if EVEN:  # where results are multiplied again, an antisymmetric rounding error would grow
            if i == block:
                product = 0.5 * (product + product.T)
    narrow = product.to(tl.float16)
    target.store([top + r, c], narrow)
    if i != block:
        mirror.store([top + c, r], narrow.T)


@triton.jit(do_not_specialize=["step"])
def update(
    polynomial, current, master, following, table, weights, out, step, order, width, LAST: tl.constexpr,
    CHUNK: tl.constexpr, T: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """Do X ← w₀ X + P X in fp32 and write its fp16 copy; the last step writes the result instead.

    Tensor cores truncate their sums, and the error of a long one grows with its length; later steps lift what of it
    lies outside of the range of X. With CHUNK > 0 they sum so many terms at a time, and fp32 units add these up.
    `polynomial` describes P in T × K tiles, `current` the fp16 X in K × N tiles; `master`, X in fp32, and `following`,
    its next fp16 copy, are described in T × N/2 tiles.
    """
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
    product = tl.zeros((T, N), tl.float32)
    if CHUNK > 0:
        for start in range(0, order, CHUNK):
            part = tl.zeros((T, N), tl.float32)
            for k in range(start, tl.minimum(start + CHUNK, order), K):
                part = tl.dot(polynomial.load([top + i * T, k]), current.load([top + k, j * N]), part)
            product += part
    else:
        for k in range(0, order, K):
            product = tl.dot(polynomial.load([top + i * T, k]), current.load([top + k, j * N]), product)
    # a X is added at the end: tensor cores truncate their sums, and it would lose a bit in each of them.
    a = tl.load(weights + 3 * step)
    left, right = product.reshape(T, 2, N // 2).permute(0, 2, 1).split()
    finish(left, a, master, following, table, matrix, out, top, i * T, j * N, LAST)
    finish(right, a, master, following, table, matrix, out, top, i * T, j * N + N // 2, LAST)


@triton.jit
def finish(product, a, master, following, table, matrix, out, top, r, c, LAST: tl.constexpr):
    """Add a X to half a tile of the product and write it."""
    x = a * master.load([top + r, c]) + product
    if LAST:
        down = r + tl.arange(0, product.shape[0])
        across = c + tl.arange(0, product.shape[1])
        store_result(table + matrix.to(tl.int64) * ROW, out, x, down, across)
    else:
        master.store([top + r, c], x)
        following.store([top + r, c], x.to(tl.float16))
