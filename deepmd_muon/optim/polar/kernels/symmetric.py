"""Large matrices: products of whole batches of matrices.

One step is R = X Xᵀ, a polynomial P in R, and X ← w₀ X + P X. R and all polynomials in it are
symmetric, so `symmetric_product` computes one half of each. `update` computes the new X.
`symmetric_program` lists the products of a schedule, `symmetric_launch` starts them.

How matrices are stored
-----------------------
| matrix           | stored as                                                             |
|------------------|-----------------------------------------------------------------------|
| X                | x16: fp16 (matrices · order, width), if need be also x32: fp32        |
| symmetric, D + E | diagonal D, fp32 (matrices · order,); others E, fp16 (…, order)       |
| residual of E    | what rounding E lost, times ENLARGED, fp16, on and below the diagonal |

x32 exists while later steps would amplify the rounding errors of x16.
A *fine* matrix has a residual. Residuals enter sums, but not products of matrices.
Sizes are padded with zeros to whole tiles, which changes nothing.

Arguments that are tiles, squares or strips are tensor descriptors: the copy engine fetches one
matrix in several shapes. Tiles of T × K and N × K are factors of a product (K = SQUARE). A *square*
has SQUARE × SQUARE entries, a *strip* T × SQUARE, and a *turned strip* is its transpose.

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
from deepmd_muon.optim.polar.kernels.normalized import INPUT, TRANSPOSED_INPUT, WORKSPACE
from deepmd_muon.optim.polar.kernels.whole import ROW, store_result

# Rounding residuals are scaled by this, so that they do not underflow in fp16.
ENLARGED = tl.constexpr(2048.0)
# Products are completed and stored in squares of this size.
SQUARE = tl.constexpr(64)

# ----- symmetric products ------------------------------------------------------------------------

# Kinds of symmetric products: X Xᵀ, a polynomial in one matrix L = S, and one in two matrices.
GRAM, ONE_MATRIX, TWO_MATRICES = (tl.constexpr(i) for i in range(3))


class Operand(NamedTuple):
    """A symmetric factor, L = D + E or S = D′ + E′."""

    tiles: Any  # of E: a factor of the product; also its strips (of S only if N = T)
    squares: Any  # of E
    residual_squares: Any
    residual_strips: Any
    diagonal: Any  # pointer to D
    fine: Any  # whether the residual is added


class Target(NamedTuple):
    """The symmetric result, written."""

    squares: Any
    strips: Any
    turned_strips: Any
    residual_squares: Any
    residual_strips: Any
    diagonal: Any  # pointer
    fine: Any  # whether the residual is stored


class Corner(NamedTuple):
    """Where a tile, strip or square begins."""

    r: Any  # row of the matrix
    c: Any  # column
    top: Any  # row of the descriptors where the matrix begins


@triton.jit(do_not_specialize=["weights_row"])
def symmetric_product(
    left,  # L, or X, in T × K tiles
    left_squares,  # from here on: the fields of `Operand` and `Target`
    left_residual_squares,
    left_residual_strips,
    left_diagonal,
    right,  # S, or X, in N × K tiles
    right_squares,
    right_residual_squares,
    right_residual_strips,
    right_diagonal,
    target_squares,
    target_strips,
    target_turned_strips,
    target_residual_squares,
    target_residual_strips,
    target_diagonal,
    weights,  # fp32 (products, 3)
    weights_row,  # number of the product
    order,
    depth,  # columns of the factors
    KIND: tl.constexpr,
    LEFT_FINE: tl.constexpr,
    RIGHT_FINE: tl.constexpr,
    TARGET_FINE: tl.constexpr,
    T: tl.constexpr,  # SQUARE, or twice that
    N: tl.constexpr,  # T, or for GRAM twice that
    K: tl.constexpr,
):
    """Write X Xᵀ (GRAM), or the symmetric w₀ L + w₁ S + w₂ L S.

    For ONE_MATRIX, L and S are the same and w₁ = 0. A program computes one T × N tile, and writes
    and mirrors its part on or below the diagonal; the grid's second axis numbers the matrices.
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
        residual_squares=left_residual_squares,
        residual_strips=left_residual_strips,
        diagonal=left_diagonal,
        fine=LEFT_FINE,
    )
    right_operand = Operand(
        tiles=right,
        squares=right_squares,
        residual_squares=right_residual_squares,
        residual_strips=right_residual_strips,
        diagonal=right_diagonal,
        fine=RIGHT_FINE,
    )
    target = Target(
        squares=target_squares,
        strips=target_strips,
        turned_strips=target_turned_strips,
        residual_squares=target_residual_squares,
        residual_strips=target_residual_strips,
        diagonal=target_diagonal,
        fine=TARGET_FINE,
    )
    product_weights = weights + 3 * weights_row
    if N == T:
        finish_tile(
            product,
            Corner(r=r, c=c, top=top),
            left=left_operand,
            right=right_operand,
            target=target,
            weights=product_weights,
            KIND=KIND,
        )
    else:
        halves = product.reshape(T, 2, T).permute(0, 2, 1).split()  # columns 0 … T − 1, and others
        for side in tl.static_range(2):
            finish_tile(
                halves[side],
                Corner(r=r, c=c + side * T, top=top),
                left=left_operand,
                right=right_operand,
                target=target,
                weights=product_weights,
                KIND=KIND,
            )


@triton.jit
def finish_tile(product, corner, left, right, target, weights, KIND: tl.constexpr):
    """Finish a T × T tile of the product part by part, to save registers.

    A tile of more than one square has two strips if it is below the diagonal. On the diagonal, or
    if S is fine, it has four squares. Tiles and squares above the diagonal are skipped.
    """
    T: tl.constexpr = product.shape[0]
    if T == SQUARE:
        finish_square(
            product,
            corner,
            left=left,
            right=right,
            target=target,
            weights=weights,
            KIND=KIND,
        )
    else:
        in_strips = corner.c < corner.r
        if right.fine:
            in_strips = False
        if in_strips:
            halves = product.reshape(T, 2, SQUARE).permute(0, 2, 1).split()
            for across in tl.static_range(2):
                finish_strip(
                    halves[across],
                    Corner(r=corner.r, c=corner.c + across * SQUARE, top=corner.top),
                    left=left,
                    right=right,
                    target=target,
                    weights=weights,
                    KIND=KIND,
                )
        elif corner.c <= corner.r:
            quarters = product.reshape(2, SQUARE, 2, SQUARE).permute(1, 3, 0, 2).split()
            for across in tl.static_range(2):
                column = quarters[across].split()
                for down in tl.static_range(2):
                    r = corner.r + down * SQUARE
                    c = corner.c + across * SQUARE
                    if r >= c:
                        finish_square(
                            column[down],
                            Corner(r=r, c=c, top=corner.top),
                            left=left,
                            right=right,
                            target=target,
                            weights=weights,
                            KIND=KIND,
                        )


@triton.jit
def finish_strip(product, corner, left, right, target, weights, KIND: tl.constexpr):
    """Turn a strip of E E′ below the diagonal into one of the result, and mirror it.

    `finish_square` explains the terms. S is not fine, see `finish_tile`.
    """
    r = corner.r
    c = corner.c
    top = corner.top
    if KIND != GRAM:
        w0 = tl.load(weights)
        w1 = tl.load(weights + 1)
        w2 = tl.load(weights + 2)
        d_left = tl.load(left.diagonal + top + r + tl.arange(0, product.shape[0]))[:, None]
        d_right = tl.load(right.diagonal + top + c + tl.arange(0, SQUARE))[None, :]
        e_left = load_fine(left.tiles, left.residual_strips, top + r, c, left.fine)
        if KIND == ONE_MATRIX:
            product = tl.fma(w0 + w2 * (d_left + d_right), e_left, w2 * product)
        else:
            product = tl.fma(w0 + w2 * d_right, e_left, w2 * product)
            e_right = load_fine(right.tiles, right.residual_strips, top + r, c, right.fine)
            product = tl.fma(w1 + w2 * d_left, e_right, product)
    rounded = product.to(tl.float16)
    target.strips.store([top + r, c], rounded)
    target.turned_strips.store([top + c, r], rounded.T)
    if target.fine:
        target.residual_strips.store([top + r, c], rounding_residual(product, rounded))


@triton.jit
def finish_square(product, corner, left, right, target, weights, KIND: tl.constexpr):
    """Turn a square of E E′ into one of the result, and mirror it.

    With L = D + E and S = D′ + E′, the result w₀ L + w₁ S + w₂ L S has

    - the diagonal w₀ D + (w₁ + w₂ D) D′ + w₂ diag(E E′), and
    - the others (w₀ + w₂ D′) E + (w₁ + w₂ D) E′ + w₂ E E′, where D scales rows and D′ columns.
    """
    r = corner.r
    c = corner.c
    top = corner.top
    t = tl.arange(0, SQUARE)
    on_diagonal = (t[:, None] == t[None, :]) & (r == c)
    if KIND != GRAM:
        w0 = tl.load(weights)
        w1 = tl.load(weights + 1)
        w2 = tl.load(weights + 2)
        d_left = tl.load(left.diagonal + top + r + t)[:, None]
        d_right = tl.load(right.diagonal + top + c + t)[None, :]
        e_left = load_fine(left.squares, left.residual_squares, top + r, c, left.fine)
        of_diagonals = w0 * d_left + (w1 + w2 * d_left) * d_right
        product = w2 * product + tl.where(on_diagonal, of_diagonals, 0.0)
        if KIND == ONE_MATRIX:
            product += (w0 + w2 * (d_left + d_right)) * e_left
        else:
            product += (w0 + w2 * d_right) * e_left
            e_right = load_fine(right.squares, right.residual_squares, top + r, c, right.fine)
            product += (w1 + w2 * d_left) * e_right
        if r == c:
            # Results are multiplied again, and an antisymmetric rounding error would grow.
            product = 0.5 * (product + product.T)
    if r == c:
        diagonal = tl.sum(tl.where(on_diagonal, product, 0.0), axis=1)
        tl.store(target.diagonal + top + r + t, diagonal)
    product = tl.where(on_diagonal, 0.0, product)
    rounded = product.to(tl.float16)
    target.squares.store([top + r, c], rounded)
    if r != c:
        target.squares.store([top + c, r], rounded.T)
    if target.fine:
        target.residual_squares.store([top + r, c], rounding_residual(product, rounded))


@triton.jit
def load_fine(tiles, residuals, r, c, FINE: tl.constexpr):
    """Load a tile of E in fp32, with its residuals if FINE."""
    e = tiles.load([r, c]).to(tl.float32)
    if FINE:
        e += residuals.load([r, c]).to(tl.float32) / ENLARGED
    return e


@triton.jit
def rounding_residual(e, rounded):
    """Return the residual of E as it is stored."""
    return ((e - rounded.to(tl.float32)) * ENLARGED).to(tl.float16)


# ----- updates of X ------------------------------------------------------------------------------

# What an update writes: the next X; the result with any strides, in tiles, or in transposed tiles;
# or the parameters that the result updates, or updates transposed.
NEXT, ANYWHERE, IN_TILES, IN_TRANSPOSED_TILES, APPLIED, APPLIED_TRANSPOSED = (
    tl.constexpr(i) for i in range(6)
)
# Rows of tiles that programs with adjacent numbers compute together.
_TOGETHER = tl.constexpr(8)


class Iterate(NamedTuple):
    """Where an update reads X and writes the next one: arguments of `update`."""

    x_tiles: Any
    norm_factors: Any
    x32_out: Any
    x16_out: Any
    table: Any
    out: Any


class Place(NamedTuple):
    """One of the two half tiles that a program finishes."""

    matrix: Any  # number of the matrix in the batch
    launched: Any  # number of the matrix in this launch
    order: Any
    width: Any
    r: Any  # first row
    c: Any  # first column


@triton.jit(do_not_specialize=["weights_row", "first_matrix"])
def update(
    polynomial,  # E of the polynomial D + E in T × K tiles
    diagonal,  # D
    x_factor,  # x16 in K × N tiles
    x_tiles,  # X of w₀ X + D X: x32 or x16 in T × N/2 tiles, or in the first update an input in
    # such tiles, N/2 × T if transposed
    norm_factors,  # (matrices, 2), which normalise inputs
    x32_out,  # the next x32 or the results, in T × N/2 tiles; N/2 × T if transposed; written
    x16_out,  # the next x16 in T × N/2 tiles, written
    table,  # locations of the results, if these have any strides
    out,  # the results
    weights,  # fp32 (products, 3)
    weights_row,  # number of the product
    first_matrix,  # of this launch
    order,
    width,
    targets,  # from here on: the fields of `ParameterUpdate`, None unless WRITE applies
    factors,
    numbers,
    READ: tl.constexpr,  # WORKSPACE, INPUT or TRANSPOSED_INPUT
    WRITE: tl.constexpr,  # one of the constants above
    KEEP: tl.constexpr,  # whether the next x32 is written
    CHUNK: tl.constexpr,  # terms that tensor cores accumulate; 0 for all
    TYPE: tl.constexpr,  # dtype of the parameters, or None
    T: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
):
    """Do X ← w₀ X + (D + E) X, one T × N tile per program.

    The last update writes or applies the results.

    D and E both multiply x16, so that its rounding errors outside the range of X vanish: D + E is
    zero there, D and E alone are not. The grid's second axis numbers the matrices, starting at
    `first_matrix`.

    Tensor cores truncate partial sums. The error grows with the number of terms, and later steps
    amplify its part outside the range of X. With CHUNK > 0, tensor cores sum CHUNK terms at a time
    and fp32 units add these sums.
    """
    parameters = ParameterUpdate(targets=targets, factors=factors, numbers=numbers)
    iterate = Iterate(
        x_tiles=x_tiles,
        norm_factors=norm_factors,
        x32_out=x32_out,
        x16_out=x16_out,
        table=table,
        out=out,
    )
    number = tl.program_id(0)
    matrix = first_matrix + tl.program_id(1)
    tile_rows = order // T
    tile_columns = width // N
    # Programs that run at the same time share rows and columns in the cache.
    group = number // (_TOGETHER * tile_columns)
    group_rows = tl.minimum(tile_rows - group * _TOGETHER, _TOGETHER)
    i = group * _TOGETHER + number % (_TOGETHER * tile_columns) % group_rows
    j = number % (_TOGETHER * tile_columns) // group_rows
    top = matrix * order
    product = tl.zeros((T, N), tl.float32)
    if CHUNK > 0:
        for start in range(0, order, CHUNK):
            chunk = tl.zeros((T, N), tl.float32)
            for k in range(start, tl.minimum(start + CHUNK, order), K):
                e = polynomial.load([top + i * T, k])
                chunk = tl.dot(e, x_factor.load([top + k, j * N]), chunk)
            product += chunk
    else:
        for k in range(0, order, K):
            e = polynomial.load([top + i * T, k])
            product = tl.dot(e, x_factor.load([top + k, j * N]), product)
    # w₀ X is added last: tensor cores truncate partial sums, and it would lose a bit in each.
    w0 = tl.load(weights + 3 * weights_row)
    d = tl.load(diagonal + top + i * T + tl.arange(0, T))[:, None]
    halves = product.reshape(T, 2, N // 2).permute(0, 2, 1).split()
    for side in tl.static_range(2):
        place = Place(
            matrix=matrix,
            launched=tl.program_id(1),
            order=order,
            width=width,
            r=i * T,
            c=j * N + side * (N // 2),
        )
        finish_update(
            halves[side],
            w0,
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
    w0,
    d,  # D (T, 1)
    place,  # Place
    iterate,  # Iterate
    parameters,  # ParameterUpdate
    READ: tl.constexpr,
    WRITE: tl.constexpr,
    KEEP: tl.constexpr,
    TYPE: tl.constexpr,
):
    """Add w₀ X + D X to half a tile of the product, and write or apply it."""
    r = place.r
    c = place.c
    # First row of the matrix in the workspaces. Tiled inputs and results have only this launch's.
    top = place.matrix * place.order
    launch_top = place.launched * place.order
    launch_top_transposed = place.launched * place.width
    if READ == TRANSPOSED_INPUT:
        x = iterate.x_tiles.load([launch_top_transposed + c, r]).T
    elif READ == INPUT:
        x = iterate.x_tiles.load([launch_top + r, c])
    else:
        x = iterate.x_tiles.load([top + r, c]).to(tl.float32)
    if READ != WORKSPACE:
        power = tl.load(iterate.norm_factors + 2 * place.matrix)
        x = x * power * tl.load(iterate.norm_factors + 2 * place.matrix + 1)
    # fma: all variants of the kernel round identically.
    x = tl.fma(x, w0, tl.fma(x.to(tl.float16).to(tl.float32), d, product))
    if WRITE == IN_TILES:
        iterate.x32_out.store([launch_top + r, c], x)
    elif WRITE == IN_TRANSPOSED_TILES:
        iterate.x32_out.store([launch_top_transposed + c, r], x.T)
    elif WRITE == NEXT:
        if KEEP:
            iterate.x32_out.store([top + r, c], x)
        iterate.x16_out.store([top + r, c], x.to(tl.float16))
    else:
        rows = r + tl.arange(0, product.shape[0])
        columns = c + tl.arange(0, product.shape[1])
        if WRITE == APPLIED:
            apply_tile(x, parameters, rows * place.width, columns, TYPE)
        elif WRITE == APPLIED_TRANSPOSED:
            apply_tile(x.T, parameters, columns * place.order, rows, TYPE)
        else:
            row = iterate.table + place.matrix.to(tl.int64) * ROW
            store_result(row, iterate.out, x, rows, columns)
