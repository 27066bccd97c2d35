"""Large matrices: products of whole batches of matrices.

One step is R = X Xᵀ, a polynomial P in R, and X ← a X + P X. R and all polynomials in it are
symmetric, so `symmetric_product` computes one half of each. `update` computes the new X.
`symmetric_program` lists the products of a schedule, `symmetric_launch` starts them.

How matrices are stored
-----------------------
| matrix           | stored as                                                               |
|------------------|-------------------------------------------------------------------------|
| X                | fp16 (matrices · order, width), if need be also fp32                    |
| symmetric, D + E | diagonal D, fp32 (matrices · order,); others E, fp16 (…, order)         |
| residual of E    | what rounding E lost, times ENLARGED, fp16, on and below the diagonal |

X is kept in fp32 while later steps would amplify its rounding errors.
A *fine* matrix has a residual. Residuals enter sums, but not products of matrices.
Sizes are padded with zeros to whole tiles, which changes nothing.

Tensor descriptors let the copy engine fetch tiles of one matrix in several shapes:
T × K and N × K tiles as factors of a product (K = SQUARE), SQUARE × SQUARE *squares*, and
T × SQUARE *strips*.

`test_products_are_the_steps` and the gates of `kernel_cases` compare the kernels with torch's.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, misc, untyped-decorator"
# ruff: noqa: ANN001, ANN201
# Reason for both: Triton compiles these functions. Their arguments have Triton's types.

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from deepmd_muon.optim.polar.kernels.application import ParameterUpdate, apply_tile
from deepmd_muon.optim.polar.kernels.normalized import INPUT, PRESENT, TRANSPOSED_INPUT
from deepmd_muon.optim.polar.kernels.whole import ROW, store_result

# Rounding residuals are scaled by this, so that they do not underflow in fp16.
ENLARGED = tl.constexpr(2048.0)
# Products are completed and stored in squares of this size.
SQUARE = tl.constexpr(64)

# ----- symmetric products ------------------------------------------------------------------------

# Kinds of symmetric products: X Xᵀ, a polynomial in one matrix L = S, and one in two matrices.
GRAM, ONE_MATRIX, TWO_MATRICES = (tl.constexpr(i) for i in range(3))


class Operand(NamedTuple):
    """Descriptors of L or S; see the table above."""

    tiles: Any  # as factor of the product; T × SQUARE for L and, if N = T, for S
    squares: Any
    residual_squares: Any
    residual_strips: Any
    diagonal: Any  # pointer
    fine: Any  # whether the residual is added


class Target(NamedTuple):
    """Descriptors of the result, written; see the table above."""

    squares: Any
    strips: Any
    turned_strips: Any  # SQUARE × T
    residual_squares: Any
    residual_strips: Any
    diagonal: Any  # pointer
    fine: Any  # whether the residual is stored


class Tile(NamedTuple):
    """The entry of the result where a tile, strip or square begins."""

    r: Any
    c: Any
    top: Any  # row of the descriptors where the matrix begins


@triton.jit(do_not_specialize=["step"])
def symmetric_product(
    left,  # L, or X, in T × K tiles
    left_squares,
    left_residual,
    left_residual_strips,
    left_diagonal,
    right,  # S, or X, in N × K tiles
    right_squares,
    right_residual,
    right_residual_strips,
    right_diagonal,
    target_squares,
    target_strips,
    target_turned_strips,
    target_residual,
    target_residual_strips,
    target_diagonal,
    weights,  # fp32 (steps, 3)
    step,  # row of `weights`
    order,
    depth,  # columns of the factors
    KIND: tl.constexpr,
    LEFT_FINE: tl.constexpr,
    RIGHT_FINE: tl.constexpr,
    FINE: tl.constexpr,
    T: tl.constexpr,  # SQUARE, or twice that
    N: tl.constexpr,  # T, or for GRAM twice that
    K: tl.constexpr,
):
    """Write X Xᵀ (GRAM), or the symmetric w₀ L + w₁ S + w₂ L S.

    For ONE_MATRIX, L and S are the same and w₁ = 0. A program computes one T × N tile on or below
    the diagonal, and mirrors it; the grid's second axis numbers the matrices.
    """
    number = tl.program_id(0)
    top = tl.program_id(1) * order
    if N == T:
        # Tiles are numbered row by row: row i begins at i (i + 1) / 2.
        i = ((tl.sqrt(8.0 * number + 1.0) - 1.0) * 0.5).to(tl.int32)
        r = i * T
        c = (number - i * (i + 1) // 2) * T
    else:
        # The rows of tiles 2 i and 2 i + 1 have i + 1 tiles each: row 2 i begins at i (i + 1).
        i = ((tl.sqrt(4.0 * number + 1.0) - 1.0) * 0.5).to(tl.int32)
        number -= i * (i + 1)
        r = (2 * i + number // (i + 1)) * T
        c = number % (i + 1) * N
    product = tl.zeros((T, N), tl.float32)
    for k in range(0, depth, K):
        product = tl.dot(left.load([top + r, k]), right.load([top + c, k]).T, product)

    left_operand = Operand(
        tiles=left,
        squares=left_squares,
        residual_squares=left_residual,
        residual_strips=left_residual_strips,
        diagonal=left_diagonal,
        fine=LEFT_FINE,
    )
    right_operand = Operand(
        tiles=right,
        squares=right_squares,
        residual_squares=right_residual,
        residual_strips=right_residual_strips,
        diagonal=right_diagonal,
        fine=RIGHT_FINE,
    )
    target = Target(
        squares=target_squares,
        strips=target_strips,
        turned_strips=target_turned_strips,
        residual_squares=target_residual,
        residual_strips=target_residual_strips,
        diagonal=target_diagonal,
        fine=FINE,
    )
    step_weights = weights + 3 * step
    if T == SQUARE:
        tile = Tile(r=r, c=c, top=top)
        finish_square(
            product,
            tile,
            left=left_operand,
            right=right_operand,
            target=target,
            weights=step_weights,
            KIND=KIND,
        )
    elif N == T:
        tile = Tile(r=r, c=c, top=top)
        finish_tile(
            product,
            tile,
            left=left_operand,
            right=right_operand,
            target=target,
            weights=step_weights,
            KIND=KIND,
        )
    else:
        halves = product.reshape(T, 2, T).permute(0, 2, 1).split()
        for side in tl.static_range(2):
            tile = Tile(r=r, c=c + side * T, top=top)
            finish_tile(
                halves[side],
                tile,
                left=left_operand,
                right=right_operand,
                target=target,
                weights=step_weights,
                KIND=KIND,
            )


@triton.jit
def finish_tile(product, tile, left, right, target, weights, KIND: tl.constexpr):
    """Finish a T × T tile of the product part by part, to save registers.

    A tile below the diagonal has two strips; on the diagonal, or if S is fine, it has four squares.
    Tiles and squares above the diagonal are skipped.
    """
    T: tl.constexpr = product.shape[0]
    in_strips = tile.c < tile.r
    if right.fine:
        in_strips = False
    if in_strips:
        halves = product.reshape(T, 2, SQUARE).permute(0, 2, 1).split()
        for across in tl.static_range(2):
            strip = Tile(r=tile.r, c=tile.c + across * SQUARE, top=tile.top)
            finish_strip(
                halves[across],
                strip,
                left=left,
                right=right,
                target=target,
                weights=weights,
                KIND=KIND,
            )
    elif tile.c <= tile.r:
        quarters = product.reshape(2, SQUARE, 2, SQUARE).permute(1, 3, 0, 2).split()
        for across in tl.static_range(2):
            column = quarters[across].split()
            for down in tl.static_range(2):
                r = tile.r + down * SQUARE
                c = tile.c + across * SQUARE
                if r >= c:
                    square = Tile(r=r, c=c, top=tile.top)
                    finish_square(
                        column[down],
                        square,
                        left=left,
                        right=right,
                        target=target,
                        weights=weights,
                        KIND=KIND,
                    )


@triton.jit
def finish_strip(product, tile, left, right, target, weights, KIND: tl.constexpr):
    """Turn a T × SQUARE strip of L Sᵀ below the diagonal into one of the result.

    `finish_square` explains the terms.
    """
    r = tile.r
    c = tile.c
    top = tile.top
    if KIND != GRAM:
        w0 = tl.load(weights)
        w1 = tl.load(weights + 1)
        w2 = tl.load(weights + 2)
        down = tl.load(left.diagonal + top + r + tl.arange(0, product.shape[0]))[:, None]
        across = tl.load(right.diagonal + top + c + tl.arange(0, SQUARE))[None, :]
        x = load_fine(left.tiles, left.residual_strips, top + r, c, left.fine)
        if KIND == ONE_MATRIX:
            product = tl.fma(w0 + w2 * (down + across), x, w2 * product)
        else:
            product = tl.fma(w0 + w2 * across, x, w2 * product)
            s = load_fine(right.tiles, right.residual_strips, top + r, c, right.fine)
            product = tl.fma(w1 + w2 * down, s, product)
    narrow = product.to(tl.float16)
    target.strips.store([top + r, c], narrow)
    target.turned_strips.store([top + c, r], narrow.T)
    if target.fine:
        target.residual_strips.store([top + r, c], rounding_residual(product, narrow))


@triton.jit
def finish_square(product, tile, left, right, target, weights, KIND: tl.constexpr):
    """Turn a square of L Sᵀ into one of the result, and write it and its mirror image.

    The factors had no diagonals. With L = D + E and S = D′ + E′,
    L S = D D′ + D E′ + E D′ + E E′, and only the last term is a product of matrices.
    """
    r = tile.r
    c = tile.c
    top = tile.top
    t = tl.arange(0, SQUARE)
    on_diagonal = (t[:, None] == t[None, :]) & (r == c)
    if KIND != GRAM:
        w0 = tl.load(weights)
        w1 = tl.load(weights + 1)
        w2 = tl.load(weights + 2)
        down = tl.load(left.diagonal + top + r + t)[:, None]
        across = tl.load(right.diagonal + top + c + t)[None, :]
        x = load_fine(left.squares, left.residual_squares, top + r, c, left.fine)
        product = w2 * product + tl.where(on_diagonal, w0 * down + (w1 + w2 * down) * across, 0.0)
        if KIND == ONE_MATRIX:
            product += (w0 + w2 * (down + across)) * x
        else:
            product += (w0 + w2 * across) * x
            s = load_fine(right.squares, right.residual_squares, top + r, c, right.fine)
            product += (w1 + w2 * down) * s
        if r == c:
            # Results are multiplied again, and an antisymmetric rounding error would grow.
            product = 0.5 * (product + product.T)
    if r == c:
        diagonal = tl.sum(tl.where(on_diagonal, product, 0.0), axis=1)
        tl.store(target.diagonal + top + r + t, diagonal)
    product = tl.where(on_diagonal, 0.0, product)
    narrow = product.to(tl.float16)
    target.squares.store([top + r, c], narrow)
    if r != c:
        target.squares.store([top + c, r], narrow.T)
    if target.fine:
        target.residual_squares.store([top + r, c], rounding_residual(product, narrow))


@triton.jit
def load_fine(tiles, residuals, r, c, FINE: tl.constexpr):
    """Load a tile of E in fp32, with its residuals if FINE."""
    x = tiles.load([r, c]).to(tl.float32)
    if FINE:
        x += residuals.load([r, c]).to(tl.float32) / ENLARGED
    return x


@triton.jit
def rounding_residual(x, narrow):
    """Return what rounding x to fp16 lost, as residuals store it."""
    return ((x - narrow.to(tl.float32)) * ENLARGED).to(tl.float16)


# ----- updates of X ------------------------------------------------------------------------------

# What an update writes: the next X; the result with any strides, in tiles, or in transposed tiles;
# or the parameters that the result updates, or updates transposed.
NEXT, ANYWHERE, IN_TILES, IN_TRANSPOSED_TILES, APPLIED, APPLIED_TRANSPOSED = (
    tl.constexpr(i) for i in range(6)
)
# Rows of tiles that programs with adjacent numbers compute together.
_TOGETHER = tl.constexpr(8)


class Iterate(NamedTuple):
    """Where an update reads X and writes the next one; see `update`."""

    present: Any
    factors: Any
    master: Any
    following: Any
    table: Any
    out: Any


class Place(NamedTuple):
    """The place of a program's work."""

    matrix: Any  # number of the matrix in the batch
    member: Any  # number of the matrix in this launch
    order: Any
    width: Any
    r: Any  # first row of the tile
    c: Any  # first column


@triton.jit(do_not_specialize=["step", "first_matrix"])
def update(
    polynomial,  # E of the polynomial D + E in T × K tiles
    diagonal,  # D
    current,  # fp16 X in K × N tiles
    present,  # X in T × N/2 tiles: fp32, or the same fp16 X, or in the first step an input
    factors,  # (matrices, 2), which normalise inputs
    master,  # the next X in fp32 or the results, in T × N/2 tiles; N/2 × T if transposed; written
    following,  # the next X in fp16 in T × N/2 tiles, written
    table,  # locations of the results of the last step, if these have any strides
    out,  # results of the last step
    weights,  # fp32 (steps, 3)
    step,  # row of `weights`
    first_matrix,  # of this launch
    order,
    width,
    targets,  # from here on: the fields of `ParameterUpdate`, None unless WRITE applies
    damping,
    numbers,
    READ: tl.constexpr,  # PRESENT, INPUT or TRANSPOSED_INPUT
    WRITE: tl.constexpr,  # one of the constants above
    KEEP: tl.constexpr,  # whether the next X is also written in fp32
    CHUNK: tl.constexpr,  # terms that tensor cores accumulate; 0 for all
    TYPE: tl.constexpr,  # dtype of the parameters, or None
    T: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
):
    """Do X ← w₀ X + (D + E) X, one T × N tile per program.

    The last step writes or applies the result.

    D and E both multiply the fp16 copy, because outside the range of X only the sum of both
    vanishes. The grid's second axis numbers the matrices, starting at `first_matrix`.

    Tensor cores truncate partial sums. The error grows with the number of terms, and later steps
    amplify its part outside the range of X. With CHUNK > 0, tensor cores sum CHUNK terms at a time
    and fp32 units add these sums.
    """
    parameters = ParameterUpdate(targets=targets, factors=damping, numbers=numbers)
    iterate = Iterate(
        present=present,
        factors=factors,
        master=master,
        following=following,
        table=table,
        out=out,
    )
    number = tl.program_id(0)
    matrix = first_matrix + tl.program_id(1)
    down = order // T
    along = width // N
    # Programs that run at the same time share rows and columns in the cache.
    group = number // (_TOGETHER * along)
    rows = tl.minimum(down - group * _TOGETHER, _TOGETHER)
    i = group * _TOGETHER + number % (_TOGETHER * along) % rows
    j = number % (_TOGETHER * along) // rows
    top = matrix * order
    product = tl.zeros((T, N), tl.float32)
    if CHUNK > 0:
        for start in range(0, order, CHUNK):
            chunk = tl.zeros((T, N), tl.float32)
            for k in range(start, tl.minimum(start + CHUNK, order), K):
                e = polynomial.load([top + i * T, k])
                chunk = tl.dot(e, current.load([top + k, j * N]), chunk)
            product += chunk
    else:
        for k in range(0, order, K):
            e = polynomial.load([top + i * T, k])
            product = tl.dot(e, current.load([top + k, j * N]), product)
    # a X is added last: tensor cores truncate partial sums, and it would lose a bit in each.
    a = tl.load(weights + 3 * step)
    d = tl.load(diagonal + top + i * T + tl.arange(0, T))[:, None]
    halves = product.reshape(T, 2, N // 2).permute(0, 2, 1).split()
    for side in tl.static_range(2):
        place = Place(
            matrix=matrix,
            member=tl.program_id(1),
            order=order,
            width=width,
            r=i * T,
            c=j * N + side * (N // 2),
        )
        finish_update(
            halves[side],
            a,
            d,
            place=place,
            iterate=iterate,
            parameters=parameters,
            READ=READ,
            WRITE=WRITE,
            KEEP=KEEP,
            TYPE=TYPE,
        )


@triton.jit
def finish_update(
    product,  # half a tile of E X, T × N/2
    a,  # w₀
    d,  # D (T, 1)
    place,  # Place
    iterate,  # Iterate
    parameters,  # ParameterUpdate
    READ: tl.constexpr,
    WRITE: tl.constexpr,
    KEEP: tl.constexpr,
    TYPE: tl.constexpr,
):
    """Add a X + D X to half a tile of the product, and write or apply it."""
    r = place.r
    c = place.c
    # Rows of the batch's descriptors, and of the inputs' and results', which have only this launch.
    top = place.matrix * place.order
    launch_top = place.member * place.order
    if READ == TRANSPOSED_INPUT:
        x = iterate.present.load([place.member * place.width + c, r]).T
    elif READ == INPUT:
        x = iterate.present.load([launch_top + r, c])
    else:
        x = iterate.present.load([top + r, c]).to(tl.float32)
    if READ != PRESENT:
        power = tl.load(iterate.factors + 2 * place.matrix)
        x = x * power * tl.load(iterate.factors + 2 * place.matrix + 1)
    # fma: all variants of the kernel round identically.
    x = tl.fma(x, a, tl.fma(x.to(tl.float16).to(tl.float32), d, product))
    if WRITE == IN_TILES:
        iterate.master.store([launch_top + r, c], x)
    elif WRITE == IN_TRANSPOSED_TILES:
        iterate.master.store([place.member * place.width + c, r], x.T)
    elif WRITE == NEXT:
        if KEEP:
            iterate.master.store([top + r, c], x)
        iterate.following.store([top + r, c], x.to(tl.float16))
    else:
        down = r + tl.arange(0, product.shape[0])
        across = c + tl.arange(0, product.shape[1])
        if WRITE == APPLIED:
            apply_tile(x, parameters, down * place.width, across, TYPE)
        elif WRITE == APPLIED_TRANSPOSED:
            apply_tile(x.T, parameters, across * place.order, down, TYPE)
        else:
            row = iterate.table + place.matrix.to(tl.int64) * ROW
            store_result(row, iterate.out, x, down, across)
