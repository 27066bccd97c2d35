"""Large matrices: their norms, and fp16 copies of X / ‖X‖, padded with zeros to whole tiles.

Several programs, the *shares* of a matrix, measure one matrix: program (i, b) of a grid is share i
of matrix b. A share stores its Σ x² in `sums`, float64 (matrices, shares), as `shared.inverse_norm`
reads them.

`kernel_cases` compares the results of the iteration with torch's.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, misc, untyped-decorator"
# ruff: noqa: ANN001, ANN201
# Reason for both: Triton compiles these functions. Their arguments have Triton's types.

from __future__ import annotations

import triton
import triton.language as tl

from deepmd_muon.optim.polar.kernels.shared import inverse_norm
from deepmd_muon.optim.polar.kernels.whole import COLUMNS, ROW, ROWS, load_matrix

# Where an update reads X: its workspace, or in the first step the input or the transposed input, in
# tiles.
WORKSPACE, INPUT, TRANSPOSED_INPUT = (tl.constexpr(i) for i in range(3))


@triton.jit
def measure(
    table,  # rows of `whole.ROW`, one per matrix
    addresses,
    sums,  # (matrices, SHARES), written
    SHARES: tl.constexpr,
    T: tl.constexpr,
):
    """Store this program's share of each matrix's norm, read in T × T tiles."""
    matrix = tl.program_id(1)
    row = table + matrix.to(tl.int64) * ROW
    down = tl.cdiv(tl.load(row + ROWS), T).to(tl.int32)
    along = tl.cdiv(tl.load(row + COLUMNS), T).to(tl.int32)
    t = tl.arange(0, T)
    total = tl.zeros((T, T), tl.float64)
    for number in range(tl.program_id(0), down * along, SHARES):
        x = load_matrix(row, addresses, number % down * T + t, number // down * T + t)
        wide = x.to(tl.float64)
        total += wide * wide
    tl.store(sums + matrix * SHARES + tl.program_id(0), tl.sum(total))


@triton.jit
def scale_of(sums, factors, matrix, SHARES: tl.constexpr):
    """Return two factors in fp32 with the product 1 / ‖X‖, which itself may overflow in fp32.

    They are a power of two and a mantissa. The first program stores both in `factors` (matrices, 2).
    The grid's second axis numbers the matrices in `sums`.
    """
    inverse = inverse_norm(sums, tl.program_id(1) * SHARES, SHARES, SHARES)
    # The exponent's bits of a float64 number: the next lower power of two.
    power = (inverse.to(tl.int64, bitcast=True) & 0x7FF0000000000000).to(tl.float64, bitcast=True)
    power = tl.minimum(tl.maximum(power, 2.0**-126), 2.0**126)
    mantissa = (inverse / power).to(tl.float32)
    power = power.to(tl.float32)
    if tl.program_id(0) == 0:
        tl.store(factors + 2 * matrix, power)
        tl.store(factors + 2 * matrix + 1, mantissa)
    return power, mantissa


@triton.jit
def normalize(
    table,
    addresses,
    sums,  # (matrices, SHARES)
    factors,  # (matrices, 2), written
    master,  # fp32 (matrices, order, width), written with KEEP
    iterate,  # fp16 (matrices, order, width), written
    order,
    width,
    KEEP: tl.constexpr,
    SHARES: tl.constexpr,
    T: tl.constexpr,
):
    """Write X / ‖X‖, padded with zeros.

    X is multiplied by one of the `factors` after the other.
    """
    matrix = tl.program_id(1)
    row = table + matrix.to(tl.int64) * ROW
    power, mantissa = scale_of(sums, factors, matrix, SHARES)
    t = tl.arange(0, T)
    down = order // T
    base = matrix.to(tl.int64) * order * width
    for number in range(tl.program_id(0), down * (width // T), SHARES):
        r = number % down * T + t
        c = number // down * T + t
        x = load_matrix(row, addresses, r, c) * power * mantissa
        offset = base + r[:, None].to(tl.int64) * width + c[None, :]
        if KEEP:
            tl.store(master + offset, x)
        tl.store(iterate + offset, x.to(tl.float16))


@triton.jit(do_not_specialize=["first_matrix"])
def normalize_tiles(
    inputs,  # descriptor of the inputs in T × N tiles; in N × T tiles if transposed
    iterate,  # descriptor of the fp16 X (matrices · order, width) in T × N tiles, written
    sums,  # (inputs, SHARES)
    factors,  # (matrices, 2), written
    first_matrix,  # number of the first input's matrix in `iterate` and `factors`
    order,
    width,
    READ: tl.constexpr,  # INPUT or TRANSPOSED_INPUT
    SHARES: tl.constexpr,
    T: tl.constexpr,
    N: tl.constexpr,
):
    """Write X / ‖X‖ in fp16, one tile per program; the grid's second axis numbers the inputs."""
    number = tl.program_id(0)
    matrix = first_matrix + tl.program_id(1)
    power, mantissa = scale_of(sums, factors, matrix, SHARES)
    down = order // T
    r = number % down * T
    c = number // down * N
    if READ == TRANSPOSED_INPUT:
        x = inputs.load([tl.program_id(1) * width + c, r]).T
    else:
        x = inputs.load([tl.program_id(1) * order + r, c])
    iterate.store([matrix * order + r, c], (x * power * mantissa).to(tl.float16))
