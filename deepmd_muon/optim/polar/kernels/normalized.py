"""Large matrices: their norms, and fp16 copies of the normalised matrices, padded with zeros to whole tiles."""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, misc, untyped-decorator"
# ruff: noqa: ANN001, ANN201
# Reason for both: Triton compiles these functions, whose arguments have Triton's types, not Python's.

from __future__ import annotations

import triton
import triton.language as tl

from deepmd_muon.optim.polar.kernels.shared import merge, norm_of_all
from deepmd_muon.optim.polar.kernels.whole import (
    COLUMNS,
    KIND,
    ROW,
    ROWS,
    load_matrix,
    load_single,
    load_upright,
)

# Input of an update: the present X, or the input, or the transposed input, in tiles.
PRESENT, INPUT, TRANSPOSED_INPUT = (tl.constexpr(i) for i in range(3))


@triton.jit
def measure(table, addresses, sums, SHARES: tl.constexpr, T: tl.constexpr):
    """Store this program's share of each matrix's norm."""
    matrix = tl.program_id(1)
    row = table + matrix.to(tl.int64) * ROW
    down = tl.cdiv(tl.load(row + ROWS), T).to(tl.int32)
    along = tl.cdiv(tl.load(row + COLUMNS), T).to(tl.int32)
    t = tl.arange(0, T)
    place = 2 * (matrix * SHARES + tl.program_id(0))
    if tl.load(row + KIND) == 1:  # squares of float64 may overflow
        largest = tl.zeros((), tl.float64)
        squares = tl.zeros((), tl.float64)
        for number in range(tl.program_id(0), down * along, SHARES):
            x, peak = load_matrix(row, addresses, number % down * T + t, number // down * T + t, -1)
            largest, squares = merge(largest, squares, peak, tl.sum(x * x).to(tl.float64))
        tl.store(sums + place, largest)
        tl.store(sums + place + 1, squares)
    else:
        total = tl.zeros((T, T), tl.float64)
        for number in range(tl.program_id(0), down * along, SHARES):
            wide = load_single(row, addresses, number % down * T + t, number // down * T + t).to(
                tl.float64
            )
            total += wide * wide
        tl.store(sums + place, 1.0)
        tl.store(sums + place + 1, tl.sum(total))


@triton.jit
def scale_of(sums, factors, matrix, SHARES: tl.constexpr):
    """Return a matrix's largest magnitude, its norm relative to that, and the two `factors` that normalise it.

    The first program stores the factors: a power of two in the range of fp32, and the rest. Their product may overflow.
    The grid's second axis numbers the matrices in `sums`.
    """
    joint, norm = norm_of_all(sums, tl.program_id(1) * SHARES, SHARES, SHARES)
    inverse = 1.0 / norm
    power = (inverse.to(tl.int64, bitcast=True) & 0x7FF0000000000000).to(tl.float64, bitcast=True)
    power = tl.minimum(tl.maximum(power, 2.0**-126), 2.0**126)
    rest = (inverse / power).to(tl.float32)
    power = power.to(tl.float32)
    if tl.program_id(0) == 0:
        tl.store(factors + 2 * matrix, power)
        tl.store(factors + 2 * matrix + 1, rest)
    return joint, norm, power, rest


@triton.jit
def normalize(
    table, addresses, sums, factors, master, iterate, order, width, KEEP: tl.constexpr, SHARES: tl.constexpr,
    T: tl.constexpr,
):  # fmt: skip
    """Write X / ‖X‖ in fp16, and with KEEP also in fp32, padded with zeros to (matrices, order, width).

    X is multiplied by both `factors` (matrices, 2) in turn; float64 matrices do not use them.
    """
    matrix = tl.program_id(1)
    row = table + matrix.to(tl.int64) * ROW
    joint, norm, power, rest = scale_of(sums, factors, matrix, SHARES)
    is_double = tl.load(row + KIND) == 1
    t = tl.arange(0, T)
    down = order // T
    base = matrix.to(tl.int64) * order * width
    for number in range(tl.program_id(0), down * (width // T), SHARES):
        r = number % down * T + t
        c = number // down * T + t
        if is_double:
            x, peak = load_matrix(row, addresses, r, c, -1)
            x = x * (peak / joint / norm).to(tl.float32)
        else:
            x = load_upright(row, addresses, r, c) * power * rest
        where = base + r[:, None].to(tl.int64) * width + c[None, :]
        if KEEP:
            tl.store(master + where, x)
        tl.store(iterate + where, x.to(tl.float16))


@triton.jit
def measure_contiguous(inputs, sums, size, SHARES: tl.constexpr, WIDTH: tl.constexpr):
    """Store this program's share of the norms of contiguous fp32 matrices of `size` elements."""
    matrix = tl.program_id(1)
    start = inputs + matrix.to(tl.int64) * size
    total = tl.zeros((WIDTH,), tl.float64)
    for chunk in range(tl.program_id(0) * WIDTH, size, SHARES * WIDTH):
        element = chunk + tl.arange(0, WIDTH)
        wide = tl.load(start + element, mask=element < size, other=0.0).to(tl.float64)
        total += wide * wide
    place = 2 * (matrix * SHARES + tl.program_id(0))
    tl.store(sums + place, 1.0)
    tl.store(sums + place + 1, tl.sum(total))


@triton.jit(do_not_specialize=["first"])
def normalize_tiles(
    inputs, iterate, sums, factors, first, order, width, READ: tl.constexpr, SHARES: tl.constexpr, T: tl.constexpr,
    N: tl.constexpr,
):  # fmt: skip
    """Write X / ‖X‖ in fp16, tile by tile, of inputs that `update` can read; see `normalize` and `update`.

    The grid's second axis numbers inputs and their `sums`; numbers in `iterate` and `factors` start at `first`.
    """
    number = tl.program_id(0)
    matrix = first + tl.program_id(1)
    _, _, power, rest = scale_of(sums, factors, matrix, SHARES)
    down = order // T
    r = number % down * T
    c = number // down * N
    if READ == TRANSPOSED_INPUT:
        x = inputs.load([tl.program_id(1) * width + c, r]).T
    else:
        x = inputs.load([tl.program_id(1) * order + r, c])
    iterate.store([matrix * order + r, c], (x * power * rest).to(tl.float16))
