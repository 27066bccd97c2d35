"""Large matrices: products of whole batches. X Xᵀ and polynomials in it are symmetric, so half of each is computed.

Operands are fp16 copies of X, padded with zeros to whole tiles, which changes nothing. X itself is kept in fp32 while
later steps would amplify its rounding errors.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, misc, untyped-decorator"
# ruff: noqa: ANN001, ANN201
# Reason for both: Triton compiles these functions, whose arguments have Triton's types, not Python's.

from __future__ import annotations

import triton
import triton.language as tl

from deepmd_muon.optim.polar.kernels.application import (
    TARGET_ROW,
    aligned,
    apply_tile,
    prefetch_lines,
)
from deepmd_muon.optim.polar.kernels.normalized import INPUT, PRESENT, TRANSPOSED_INPUT
from deepmd_muon.optim.polar.kernels.whole import ROW, store_result

# Rounding residuals are scaled by this, so that they do not underflow in fp16.
ENLARGED = tl.constexpr(2048.0)
# Products are completed and stored in squares of this size.
SQUARE = tl.constexpr(64)


@triton.jit(do_not_specialize=["step"])
def symmetric_product(
    left, right, left_squares, right_squares, target, left_rest, right_rest, rest, strips, turned_strips,
    left_rest_strips, right_rest_strips, rest_strips, left_diagonal, right_diagonal, diagonal, weights, step, order,
    depth, KIND: tl.constexpr, LEFT_FINE: tl.constexpr, RIGHT_FINE: tl.constexpr, FINE: tl.constexpr, T: tl.constexpr,
    N: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """Write L Sᵀ (KIND 0) or the symmetric w₀ L + w₁ S + w₂ L S (KIND 2, or KIND 1 if L and S are the same).

    Matrices (matrices, order, order) are stored as an fp32 diagonal and fp16 off-diagonal entries, except X, which KIND
    0 reads. Fine matrices also have a rest: scaled rounding residuals, on and below the diagonal, which enter sums
    but not the matrix product. `left` and `right` describe operands in T × K and N × K tiles; `left_squares` to `rest`,
    SQUARE × SQUARE tiles of L, S, the result and the rests; `strips` to `rest_strips`, T × SQUARE tiles of the result
    and of the rests, and SQUARE × T ones of the result. T is SQUARE, or twice that; N is T, or for KIND 0 twice that.
    """
    number = tl.program_id(0)
    top = tl.program_id(1) * order
    if N == T:
        i = ((tl.sqrt(8.0 * number + 1.0) - 1.0) * 0.5).to(tl.int32)
        r = i * T
        c = (number - i * (i + 1) // 2) * T
    else:  # the rows of tiles 2 i and 2 i + 1 have equally many tiles
        i = ((tl.sqrt(4.0 * number + 1.0) - 1.0) * 0.5).to(tl.int32)
        number -= i * (i + 1)
        r = (2 * i + number // (i + 1)) * T
        c = number % (i + 1) * N
    product = tl.zeros((T, N), tl.float32)
    for k in range(0, depth, K):
        product = tl.dot(left.load([top + r, k]), right.load([top + c, k]).T, product)
    if T == SQUARE:
        finish_square(
            product, r, c, top, left_squares, right_squares, target, left_rest, right_rest, rest, left_diagonal,
            right_diagonal, diagonal, weights + 3 * step, KIND, LEFT_FINE, RIGHT_FINE, FINE,
        )  # fmt: skip
    elif N == T:
        finish_tile(
            product, r, c, top, left, right, left_squares, right_squares, target, left_rest, right_rest, rest, strips,
            turned_strips, left_rest_strips, right_rest_strips, rest_strips, left_diagonal, right_diagonal, diagonal,
            weights + 3 * step, KIND, LEFT_FINE, RIGHT_FINE, FINE,
        )  # fmt: skip
    else:
        parts = product.reshape(T, 2, T).permute(0, 2, 1).split()
        for side in tl.static_range(2):
            finish_tile(
                parts[side], r, c + side * T, top, left, right, left_squares, right_squares, target, left_rest,
                right_rest, rest, strips, turned_strips, left_rest_strips, right_rest_strips, rest_strips,
                left_diagonal, right_diagonal, diagonal, weights + 3 * step, KIND, LEFT_FINE, RIGHT_FINE, FINE,
            )  # fmt: skip


@triton.jit
def finish_tile(
    product, r, c, top, left, right, left_squares, right_squares, target, left_rest, right_rest, rest, strips,
    turned_strips, left_rest_strips, right_rest_strips, rest_strips, left_diagonal, right_diagonal, diagonal, weights,
    KIND: tl.constexpr, LEFT_FINE: tl.constexpr, RIGHT_FINE: tl.constexpr, FINE: tl.constexpr,
):  # fmt: skip
    """Finish a T × T tile part by part, to save registers: in strips; on the diagonal or with RIGHT_FINE, in squares.

    Tiles above the diagonal are skipped.
    """
    T: tl.constexpr = product.shape[0]
    in_strips = c < r
    if RIGHT_FINE:
        in_strips = False
    if in_strips:
        halves = product.reshape(T, 2, SQUARE).permute(0, 2, 1).split()
        for across in tl.static_range(2):
            finish_strip(
                halves[across], r, c + across * SQUARE, top, left, right, strips, turned_strips, left_rest_strips,
                right_rest_strips, rest_strips, left_diagonal, right_diagonal, weights, KIND, LEFT_FINE, RIGHT_FINE,
                FINE,
            )  # fmt: skip
    elif c <= r:
        quarters = product.reshape(2, SQUARE, 2, SQUARE).permute(1, 3, 0, 2).split()
        for across in tl.static_range(2):
            column = quarters[across].split()
            for down in tl.static_range(2):
                if r + down * SQUARE >= c + across * SQUARE:
                    finish_square(
                        column[down], r + down * SQUARE, c + across * SQUARE, top, left_squares, right_squares, target,
                        left_rest, right_rest, rest, left_diagonal, right_diagonal, diagonal, weights, KIND, LEFT_FINE,
                        RIGHT_FINE, FINE,
                    )  # fmt: skip


@triton.jit
def finish_strip(
    product, r, c, top, left, right, strips, turned_strips, left_rest, right_rest, rest, left_diagonal, right_diagonal,
    weights, KIND: tl.constexpr, LEFT_FINE: tl.constexpr, RIGHT_FINE: tl.constexpr, FINE: tl.constexpr,
):  # fmt: skip
    """Turn a strip of the product L Sᵀ below the diagonal into one of the result; see `finish_square`."""
    if KIND > 0:
        w0 = tl.load(weights)
        w1 = tl.load(weights + 1)
        w2 = tl.load(weights + 2)
        down = tl.load(left_diagonal + top + r + tl.arange(0, product.shape[0]))[:, None]
        across = tl.load(right_diagonal + top + c + tl.arange(0, SQUARE))[None, :]
        x = precise(left, left_rest, top + r, c, LEFT_FINE)
        if KIND == 1:
            product = tl.fma(w0 + w2 * (down + across), x, w2 * product)
        else:
            product = tl.fma(w0 + w2 * across, x, w2 * product)
            product = tl.fma(
                w1 + w2 * down, precise(right, right_rest, top + r, c, RIGHT_FINE), product
            )
    narrow = product.to(tl.float16)
    strips.store([top + r, c], narrow)
    turned_strips.store([top + c, r], narrow.T)
    if FINE:
        rest.store([top + r, c], ((product - narrow.to(tl.float32)) * ENLARGED).to(tl.float16))


@triton.jit
def finish_square(
    product, r, c, top, left_squares, right_squares, target, left_rest, right_rest, rest, left_diagonal, right_diagonal,
    diagonal, weights, KIND: tl.constexpr, LEFT_FINE: tl.constexpr, RIGHT_FINE: tl.constexpr, FINE: tl.constexpr,
):  # fmt: skip
    """Turn a square of the product L Sᵀ into one of the result, and write it and its mirror image."""
    t = tl.arange(0, SQUARE)
    on_diagonal = (t[:, None] == t[None, :]) & (r == c)
    if KIND > 0:
        w0 = tl.load(weights)
        w1 = tl.load(weights + 1)
        w2 = tl.load(weights + 2)
        down = tl.load(left_diagonal + top + r + t)[:, None]
        across = tl.load(right_diagonal + top + c + t)[None, :]
        x = precise(left_squares, left_rest, top + r, c, LEFT_FINE)
        # (D + E) (D' + E') = D D' + D E' + E D' + E E', and only the last term is a product of matrices.
        product = w2 * product + tl.where(on_diagonal, w0 * down + (w1 + w2 * down) * across, 0.0)
        if KIND == 1:
            product += (w0 + w2 * (down + across)) * x
        else:
            product += (w0 + w2 * across) * x
            product += (w1 + w2 * down) * precise(right_squares, right_rest, top + r, c, RIGHT_FINE)
        if r == c:  # results are multiplied again, and an antisymmetric rounding error would grow
            product = 0.5 * (product + product.T)
    if r == c:
        tl.store(diagonal + top + r + t, tl.sum(tl.where(on_diagonal, product, 0.0), axis=1))
    product = tl.where(on_diagonal, 0.0, product)
    narrow = product.to(tl.float16)
    target.store([top + r, c], narrow)
    if r != c:
        target.store([top + c, r], narrow.T)
    if FINE:
        rest.store([top + r, c], ((product - narrow.to(tl.float32)) * ENLARGED).to(tl.float16))


@triton.jit
def precise(squares, rest, r, c, FINE: tl.constexpr):
    """Load a tile of a matrix, with its residuals if FINE."""
    x = squares.load([r, c]).to(tl.float32)
    if FINE:
        x += rest.load([r, c]).to(tl.float32) / ENLARGED
    return x


# Output of an update: the next X; the result with any strides, in tiles, or in transposed tiles; or the parameters that
# the result updates, or updates transposed.
NEXT, ANYWHERE, IN_TILES, IN_TRANSPOSED_TILES, APPLIED, APPLIED_TRANSPOSED = (
    tl.constexpr(i) for i in range(6)
)


@triton.jit(do_not_specialize=["step", "first"])
def update(
    polynomial, current, present, factors, master, following, diagonal, table, weights, out, step, first, order,
    width, source, targets, damping, rate, decay_high, decay_low, skip, READ: tl.constexpr, WRITE: tl.constexpr,
    KEEP: tl.constexpr, CHUNK: tl.constexpr, TYPE: tl.constexpr, PREFETCH: tl.constexpr, T: tl.constexpr,
    N: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """Do X ← w₀ X + (D + E) X and write it in fp16, with KEEP also in fp32; the last step writes or applies it.

    The grid's second axis numbers the matrices, starting at `first`.

    D and E both multiply the fp16 copy, because outside the range of X only the sum of both vanishes.

    Tensor cores truncate partial sums, so the error grows with the number of terms, and later steps amplify its part
    outside the range of X. With CHUNK > 0, tensor cores sum CHUNK terms at a time and fp32 units add these sums.
    `polynomial` describes E in T × K tiles, `current` the fp16 X in K × N tiles. The other descriptors have T × N/2
    tiles: `present` (X in fp32, or the same fp16 X), `master` (the next X in fp32, if it is kept) and `following` (the
    next X in fp16). In the first step `present` may describe the inputs starting at `first`, which `factors` normalise,
    and in the last step `master` their results; in N/2 × T tiles if these are transposed. Or the last step updates
    parameters of dtype TYPE; see `apply_tile` for the arguments from `targets` to `skip`, which are None otherwise.
    With PREFETCH, the tiles of inputs (from `source` on) and of parameters are fetched into the cache during the
    product; this needs matrices of whole tiles.
    """
    number = tl.program_id(0)
    matrix = first + tl.program_id(1)
    down = order // T
    along = width // N
    # Concurrent programs share rows and columns in the cache: 8 rows of tiles at a time.
    group = number // (8 * along)
    rows = tl.minimum(down - group * 8, 8)
    i = group * 8 + number % (8 * along) % rows
    j = number % (8 * along) // rows
    top = matrix * order
    if PREFETCH:
        if READ != PRESENT:
            prefetch_tile(
                source + tl.program_id(1).to(tl.int64) * order * width,
                i * T,
                j * N,
                order,
                width,
                READ == TRANSPOSED_INPUT,
                T,
                N,
            )
        if WRITE == APPLIED or WRITE == APPLIED_TRANSPOSED:  # noqa: SIM109
            parameters = aligned(tl.load(targets + tl.program_id(1) * TARGET_ROW), targets, TYPE)
            prefetch_tile(parameters, i * T, j * N, order, width, WRITE == APPLIED_TRANSPOSED, T, N)
    product = tl.zeros((T, N), tl.float32)
    if CHUNK > 0:
        for start in range(0, order, CHUNK):
            part = tl.zeros((T, N), tl.float32)
            for k in range(start, tl.minimum(start + CHUNK, order), K):
                part = tl.dot(
                    polynomial.load([top + i * T, k]), current.load([top + k, j * N]), part
                )
            product += part
    else:
        for k in range(0, order, K):
            product = tl.dot(
                polynomial.load([top + i * T, k]), current.load([top + k, j * N]), product
            )
    # a X is added last: tensor cores truncate partial sums, and it would lose a bit in each.
    a = tl.load(weights + 3 * step)
    d = tl.load(diagonal + top + i * T + tl.arange(0, T))[:, None]
    halves = product.reshape(T, 2, N // 2).permute(0, 2, 1).split()
    for side in tl.static_range(2):
        finish(
            halves[side], a, d, present, factors, master, following, table, matrix, out, order, i * T,
            j * N + side * (N // 2), width, targets, damping, rate, decay_high, decay_low, skip, READ, WRITE, KEEP,
            TYPE,
        )  # fmt: skip


@triton.jit
def prefetch_tile(
    pointers, r, c, order, width, TRANSPOSED: tl.constexpr, T: tl.constexpr, N: tl.constexpr
):  # fmt: skip
    """Fetch a T × N tile of a matrix, or the N × T one of its transpose, into the cache."""
    if TRANSPOSED:
        prefetch_lines(pointers, c, order, r, N, T)
    else:
        prefetch_lines(pointers, r, width, c, T, N)


@triton.jit
def finish(
    product, a, d, present, factors, master, following, table, matrix, out, order, r, c, width, targets, damping, rate,
    decay_high, decay_low, skip, READ: tl.constexpr, WRITE: tl.constexpr, KEEP: tl.constexpr, TYPE: tl.constexpr,
):  # fmt: skip
    """Add a X + D X to half a tile of the product, and write or apply it."""
    top = matrix * order
    here = tl.program_id(1) * order
    if READ == TRANSPOSED_INPUT:
        x = present.load([tl.program_id(1) * width + c, r]).T
    elif READ == INPUT:
        x = present.load([here + r, c])
    else:
        x = present.load([top + r, c]).to(tl.float32)
    if READ != PRESENT:
        x = x * tl.load(factors + 2 * matrix) * tl.load(factors + 2 * matrix + 1)
    # fma: all variants of the kernel round identically.
    x = tl.fma(x, a, tl.fma(x.to(tl.float16).to(tl.float32), d, product))
    if WRITE == IN_TILES:
        master.store([here + r, c], x)
    elif WRITE == IN_TRANSPOSED_TILES:
        master.store([tl.program_id(1) * width + c, r], x.T)
    elif WRITE == NEXT:
        if KEEP:
            master.store([top + r, c], x)
        following.store([top + r, c], x.to(tl.float16))
    else:
        down = r + tl.arange(0, product.shape[0])
        across = c + tl.arange(0, product.shape[1])
        if WRITE == APPLIED:
            apply_tile(
                x, targets, damping, rate, decay_high, decay_low, skip, down * width, across, TYPE
            )
        elif WRITE == APPLIED_TRANSPOSED:
            apply_tile(
                x.T, targets, damping, rate, decay_high, decay_low, skip, across * order, down, TYPE
            )
        else:
            store_result(table + matrix.to(tl.int64) * ROW, out, x, down, across)
