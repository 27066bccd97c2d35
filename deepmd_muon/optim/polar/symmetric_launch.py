"""Launches of the kernels in `symmetric`: workspaces and tensor descriptors of large matrices.

`symmetric_program` lists the products of all steps. For each set of equal shapes, `_Iteration`
allocates the workspaces, normalises the inputs and starts one launch per product. The first update
of X can read the inputs, and the last one write the results, in tiles: then it takes one launch per
input tensor (*span*).

The *lift* of an update is the largest factor by which later steps amplify small singular values,
and with them the rounding errors of the update.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from deepmd_muon.optim.polar.kernels.normalized import (
    INPUT,
    TRANSPOSED_INPUT,
    WORKSPACE,
    measure,
    normalize,
    normalize_tiles,
)
from deepmd_muon.optim.polar.kernels.symmetric import (
    ANYWHERE,
    APPLIED,
    APPLIED_TRANSPOSED,
    GRAM,
    IN_TILES,
    IN_TRANSPOSED_TILES,
    NEXT,
    ONE_MATRIX,
    SQUARE,
    TWO_MATRICES,
    symmetric_product,
    update,
)
from deepmd_muon.optim.polar.launches import on_device, round_up, run_launches
from deepmd_muon.optim.polar.schedules import Coefficients
from deepmd_muon.optim.polar.symmetric_program import Product, amplification, program
from deepmd_muon.optim.polar.tables import Application, Inputs, Launch, Span

# ----- tiles -------------------------------------------------------------------------------------


class Tile(NamedTuple):
    """The tile of a product that a program computes, with its warps and stages."""

    rows: int
    columns: int
    warps: int
    stages: int


class Tiles(NamedTuple):
    """Tiles of the two kinds of product: the symmetric ones, and X ← a X + P X."""

    symmetric: Tile
    update: Tile

    @property
    def rows(self) -> int:
        """Rows are padded to a multiple of this."""
        return max(self.symmetric.rows, self.update.rows)

    @property
    def columns(self) -> int:
        """Columns are padded to a multiple of this."""
        return max(self.update.columns, DEPTH_STEP)


# Tiles and thresholds were measured on an H200 by source/benchmarks/kernel_tiles.py. Small tiles
# occupy the device when there are few; large tiles read less. Two programs of the medium kind share
# a multiprocessor: one computes while the other stores.
_SMALL_SYMMETRIC = Tile(rows=64, columns=64, warps=4, stages=4)
_MEDIUM_SYMMETRIC = Tile(rows=128, columns=128, warps=4, stages=3)
_WIDE_GRAM = Tile(rows=128, columns=256, warps=8, stages=3)  # of X Xᵀ only
_SMALL_UPDATE = Tile(rows=64, columns=128, warps=4, stages=4)
_MEDIUM_UPDATE = Tile(rows=128, columns=128, warps=4, stages=3)
_WIDE_UPDATE = Tile(rows=128, columns=256, warps=8, stages=3)
_LARGE_UPDATE = Tile(rows=128, columns=256, warps=8, stages=4)
_STRIDED_WARPS = 8  # of updates that write strided results, because addresses take registers

DEPTH_STEP = 64  # terms that a product adds per iteration, K in the kernels
_MULTIPROCESSORS = 132
# Columns of X from which wide tiles of X Xᵀ are faster, if their programs occupy the device for this
# share of the time.
_WIDE_GRAM_COLUMNS = 4096
_WIDE_GRAM_OCCUPANCY = 0.8
_LARGE_ROWS = 4096  # rows from which large tiles are faster in updates
_WIDE_ROWS = 2048  # rows from which wide tiles are faster in updates,
_WIDE_PER_MULTIPROCESSOR = 4  # if there are this many for each multiprocessor


@functools.lru_cache(maxsize=256)
def tiles_for(rows: int, columns: int, count: int) -> Tiles:
    """Return the tiles for `count` matrices of one shape, rows ≤ columns."""
    side = -(-rows // 128)
    n_symmetric = count * side * (side + 1) // 2
    n_update = count * side * -(-columns // 128)
    n_wide = count * side * -(-columns // 256)
    symmetric = _SMALL_SYMMETRIC if n_symmetric < _MULTIPROCESSORS else _MEDIUM_SYMMETRIC
    if n_update < _MULTIPROCESSORS:
        return Tiles(symmetric, _SMALL_UPDATE)
    if rows >= _LARGE_ROWS:
        return Tiles(symmetric, _LARGE_UPDATE)
    if rows >= _WIDE_ROWS and n_wide >= _WIDE_PER_MULTIPROCESSOR * _MULTIPROCESSORS:
        return Tiles(symmetric, _WIDE_UPDATE)
    return Tiles(symmetric, _MEDIUM_UPDATE)


def wide_gram_programs(order: int, depth: int, count: int) -> int:
    """Return the programs per matrix that compute X Xᵀ in wide tiles; 0 if others are faster."""
    if order % _WIDE_GRAM.columns or depth < _WIDE_GRAM_COLUMNS:
        return 0
    n = order // _WIDE_GRAM.columns
    programs = n * (n + 1)  # n pairs of rows of tiles; pair i has 2 (i + 1) tiles
    rounds = count * programs / _MULTIPROCESSORS
    return programs if rounds / math.ceil(rounds) >= _WIDE_GRAM_OCCUPANCY else 0


# ----- orthogonalization -------------------------------------------------------------------------


def orthogonalize_by_products(
    matrices: Sequence[Tensor], coefficients: Coefficients
) -> list[Tensor]:
    """Orthogonalize batches (b, m, n) of large matrices of any strides, equal shapes together.

    The float32 results (b, m, n) are parts of one new tensor. The workspace is freed on return: 4
    bytes per element of X, 8 with x32, and up to 16 per element of X Xᵀ, both padded to whole tiles.
    """
    return run_launches("symmetric", _run, matrices, coefficients)


def apply_by_products(
    matrices: Sequence[Tensor], coefficients: Coefficients, application: Application
) -> None:
    """Orthogonalize contiguous fp32 batches of large matrices, and update parameters.

    `can_apply` must hold for the size of each matrix.

    The polar factors are never written: the last product of a tile updates that tile of the
    parameters.
    """
    start = functools.partial(_run, application=application)
    run_launches("symmetric", start, matrices, coefficients, with_results=False)


def can_apply(rows: int, columns: int) -> bool:
    """Return whether the last product of contiguous matrices can update parameters.

    It can if matrices have whole tiles of any size, and fewer than 2³¹ elements.
    """
    rows, columns = sorted((rows, columns))
    largest = Tiles(_MEDIUM_SYMMETRIC, _LARGE_UPDATE)
    return rows % largest.rows == 0 and columns % largest.columns == 0 and rows * columns < 2**31


def _run(
    launch: Launch,
    inputs: Inputs,
    coefficients: Coefficients,
    out: Tensor,
    application: Application | None = None,
) -> None:
    """Run all steps for the matrices of one shape."""
    assert launch.shapes is not None
    products = program(coefficients, launch.shapes.rows, launch.shapes.columns)
    iteration = _Iteration(launch, inputs, products, out, application)
    for number, product in enumerate(products):
        if product.target == "X":
            iteration.update(number, product, last=number + 1 == len(products))
        else:
            iteration.multiply(number, product)


# ----- the launches of one shape -----------------------------------------------------------------

# Updates of a larger lift, of at least _LARGE_ROWS rows, are *exact*: fp32 units add the sums of
# _EXACT_CHUNK terms that tensor cores accumulate.
_EXACT_LIFT = 500.0
_EXACT_CHUNK = 1024
_X32_LIFT = 50.0  # updates of a larger lift write x32
# With more tensors in a batch, the first and the last update do not use tiles of them.
_MOST_SPANS = 2
_TYPES = {  # of parameters
    torch.float32: tl.float32,
    torch.float16: tl.float16,
    torch.bfloat16: tl.bfloat16,
}
# The arguments of `update` without parameters to update.
NO_APPLICATION: dict[str, Any] = dict.fromkeys(("targets", "factors", "numbers", "TYPE"))

# The tile of inputs in tiles that a program copies.
_COPIED_ROWS = 64
_COPIED_COLUMNS = 128
# Smallest and largest number of programs that measure or copy a matrix of any strides.
_MIN_SHARES = 64
_MAX_SHARES = 512


class _Access(NamedTuple):
    """How an update reads X or writes the next one: arguments of the kernel `update`."""

    mode: int  # READ or WRITE
    descriptor: Any  # `x_tiles` or `x32_out`; a dummy if results are not written in tiles


class _UpdateLaunch(NamedTuple):
    """The matrices that one launch of an update takes."""

    first_matrix: int
    matrices: int
    read: _Access
    write: _Access
    span: Span | None  # None for all matrices


class SymmetricMatrix:
    """Descriptors of a symmetric matrix D + E per input matrix; see the table in `symmetric`."""

    def __init__(
        self, values: Tensor, diagonal: Tensor, residual: Tensor | None, tiles: Tiles
    ) -> None:
        rows = tiles.symmetric.rows
        side = int(SQUARE.value)
        # The kernel does not read the residual of a matrix without one; a descriptor must be there.
        residual = values if residual is None else residual
        self.diagonal = diagonal
        # Of symmetric products; also the strips.
        self.product_factor = tiled(values, rows, DEPTH_STEP)
        self.turned_strips = tiled(values, side, rows)
        self.squares = tiled(values, side, side)
        self.residual_squares = tiled(residual, side, side)
        self.residual_strips = tiled(residual, rows, side)
        self.update_factor = tiled(values, tiles.update.rows, DEPTH_STEP)  # left factor of E X

    def as_operand(self, side: str) -> dict[str, Any]:
        """Return the arguments of `symmetric_product` for an operand, but the factor."""
        return {
            f"{side}_squares": self.squares,
            f"{side}_residual_squares": self.residual_squares,
            f"{side}_residual_strips": self.residual_strips,
            f"{side}_diagonal": self.diagonal,
        }

    def as_target(self) -> dict[str, Any]:
        """Return the arguments of `symmetric_product` for the result."""
        return {
            "target_squares": self.squares,
            "target_strips": self.product_factor,  # because DEPTH_STEP = SQUARE
            "target_turned_strips": self.turned_strips,
            "target_residual_squares": self.residual_squares,
            "target_residual_strips": self.residual_strips,
            "target_diagonal": self.diagonal,
        }


class _X16(NamedTuple):
    """Descriptors of an x16 (matrices · order, width)."""

    gram_factor: Any  # both factors of X Xᵀ
    update_factor: Any  # right factor of E X
    tiles: Any  # that updates read or write


class _Iteration:
    """The workspaces of the matrices of one shape, and the launches of their steps.

    Attributes
    ----------
    rows, columns
        Size of the matrices, rows ≤ columns.
    order, width
        The same, padded to whole tiles.
    lifts
        Lift of each update, by its number among the products.
    spans
        Those of the launch; empty if there are too many for tiles of them.
    tiled_inputs
        How the first update reads each span in tiles; empty after it, or if it cannot.
    symmetric
        R and the polynomials in it, by their names in products.
    norm_factors
        Two factors for each matrix, which normalise inputs in tiles.
    reads_x32
        Whether the next update reads X in fp32, from an input or from `x32`.
    x16, next_x16
        What the next update reads and writes.
    """

    def __init__(
        self,
        launch: Launch,
        inputs: Inputs,
        products: tuple[Product, ...],
        out: Tensor,
        application: Application | None,
    ) -> None:
        assert launch.shapes is not None
        self.rows, self.columns, spans = launch.shapes
        self.count = launch.matrices
        self.table = launch.table
        self.out = out
        self.application = application
        self.tiles = tiles_for(self.rows, self.columns, self.count)
        self.order = round_up(self.rows, self.tiles.rows)
        self.width = round_up(self.columns, self.tiles.columns)
        self.weights = on_device(tuple(product.weights for product in products), out.device)
        self.lifts = {
            number: amplification(products[number + 1 :])
            for number, product in enumerate(products)
            if product.target == "X"
        }
        self.spans = spans if len(spans) <= _MOST_SPANS else ()
        self.reads_x32 = amplification(products) > _X32_LIFT
        self.tiled_inputs = self._inputs_in_tiles(inputs.tensors) if self.reads_x32 else []

        x16, next_x16 = self._empty(2, self.count * self.order, self.width, dtype=torch.float16)
        normalizes_x32 = self.reads_x32 and not self.tiled_inputs
        x32 = next_x16  # a dummy, unless some launch writes x32
        if normalizes_x32 or any(lift > _X32_LIFT for lift in self.lifts.values()):
            x32 = self._empty(self.count * self.order, self.width, dtype=torch.float32)
        self.norm_factors = self._empty(self.count, 2, dtype=torch.float32)
        if self.tiled_inputs:
            self._normalize_tiles(inputs.addresses, x16)
        else:
            self._normalize(inputs.addresses, x32, x16, keep=normalizes_x32)

        self.symmetric = self._allocate_symmetric(products)
        self.x32 = self._update_tiles(x32)
        self.x16 = self._x16(x16)
        self.next_x16 = self._x16(next_x16)

    # ----- workspaces ----------------------------------------------------------------------------

    def _empty(self, *size: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=self.out.device)

    def _update_tiles(self, x: Tensor) -> Any:
        """Return a descriptor of x in half tiles of updates."""
        return tiled(x, self.tiles.update.rows, self.tiles.update.columns // 2)

    def _x16(self, x: Tensor) -> _X16:
        return _X16(
            gram_factor=tiled(x, self.tiles.symmetric.rows, DEPTH_STEP),
            update_factor=tiled(x, DEPTH_STEP, self.tiles.update.columns),
            tiles=self._update_tiles(x),
        )

    def _allocate_symmetric(self, products: Sequence[Product]) -> dict[str, SymmetricMatrix]:
        """Allocate the matrices of all symmetric products by name."""
        fine = {name for product in products for name in product.fine}
        rows = self.count * self.order
        return {
            name: SymmetricMatrix(
                values=self._empty(rows, self.order, dtype=torch.float16),
                diagonal=self._empty(rows, dtype=torch.float32),
                residual=self._empty(rows, self.order, dtype=torch.float16)
                if name in fine
                else None,
                tiles=self.tiles,
            )
            for name in dict.fromkeys(product.target for product in products)
            if name != "X"
        }

    # ----- inputs and results --------------------------------------------------------------------

    def _inputs_in_tiles(self, tensors: Sequence[Tensor]) -> list[_Access]:
        """Return how the first update reads each span in tiles; empty if it cannot."""
        accesses = []
        for span in self.spans:
            x = tensors[span.tensor]
            stored = x if x.stride(2) == 1 else x.mT
            if not stored.is_contiguous():
                return []
            # A square matrix that is stored by columns is read transposed, too.
            transposed = (stored is x) == (x.shape[1] > x.shape[2])
            descriptor = self._in_tiles(stored.flatten(), stored.shape[1:], transposed=transposed)
            if descriptor is None:
                return []
            mode = TRANSPOSED_INPUT if transposed else INPUT
            accesses.append(_Access(mode.value, descriptor))
        return accesses

    def _results_in_tiles(self) -> list[_Access]:
        """Return how the last update writes or applies each span; empty if none in tiles."""
        accesses = [self._result_access(span) for span in self.spans]
        if all(access.mode == ANYWHERE.value for access in accesses):
            return []
        return accesses

    def _result_access(self, span: Span) -> _Access:
        if self.application is not None:
            mode = APPLIED_TRANSPOSED if span.transposed else APPLIED
            return _Access(mode.value, self.x32)
        size = (self.columns, self.rows) if span.transposed else (self.rows, self.columns)
        results = self.out[span.place : span.place + span.count * self.rows * self.columns]
        descriptor = self._in_tiles(results, size, transposed=span.transposed)
        if descriptor is None:
            return _Access(ANYWHERE.value, self.x32)
        mode = IN_TRANSPOSED_TILES if span.transposed else IN_TILES
        return _Access(mode.value, descriptor)

    def _in_tiles(self, x: Tensor, size: Sequence[int], *, transposed: bool) -> Any:
        """Return a descriptor of contiguous fp32 matrices in half tiles of updates.

        None unless rows start at multiples of 16 bytes and no tile reaches into the next matrix.
        """
        rows, columns = size
        padded_rows = self.width if transposed else self.order
        if rows != padded_rows or columns % 4 or x.data_ptr() % 16:
            return None
        x = x.view(-1, columns)
        if transposed:
            return tiled(x, self.tiles.update.columns // 2, self.tiles.update.rows)
        return self._update_tiles(x)

    # ----- normalization -------------------------------------------------------------------------

    def _measure(self, addresses: Tensor) -> Tensor:
        """Return Σ x² of each share of each matrix, float64 (matrices, shares); see `normalized`."""
        # Triton's interpreter runs programs one after the other.
        shares = _shares(self.count) if self.out.is_cuda else 4
        sums = self._empty(self.count, shares, dtype=torch.float64)
        measure[shares, self.count](
            table=self.table,
            addresses=addresses,
            sums=sums,
            SHARES=shares,
            T=64,
            num_warps=8,
        )
        return sums

    def _normalize(self, addresses: Tensor, x32: Tensor, x16: Tensor, *, keep: bool) -> None:
        """Write x16, and with `keep` x32, from inputs of any strides."""
        sums = self._measure(addresses)
        shares = sums.shape[1]
        normalize[shares, self.count](
            table=self.table,
            addresses=addresses,
            sums=sums,
            factors=self.norm_factors,
            master=x32,
            iterate=x16,
            order=self.order,
            width=self.width,
            KEEP=keep,
            SHARES=shares,
            T=64,
        )

    def _normalize_tiles(self, addresses: Tensor, x16: Tensor) -> None:
        """Write x16 from inputs in tiles; an `Application` has summed their squares."""
        if self.application is None:
            sums_of_spans = self._measure(addresses).split([span.count for span in self.spans])
        else:
            sums_of_spans = tuple(self.application.squares[span.tensor] for span in self.spans)
        n_tiles = self.order // _COPIED_ROWS * (self.width // _COPIED_COLUMNS)
        first_matrix = 0
        for span, access, sums in zip(self.spans, self.tiled_inputs, sums_of_spans, strict=True):
            x = access.descriptor.base
            if access.mode == TRANSPOSED_INPUT.value:
                source = tiled(x, _COPIED_COLUMNS, _COPIED_ROWS)
            else:
                source = tiled(x, _COPIED_ROWS, _COPIED_COLUMNS)
            normalize_tiles[n_tiles, span.count](
                inputs=source,
                iterate=tiled(x16, _COPIED_ROWS, _COPIED_COLUMNS),
                sums=sums,
                factors=self.norm_factors,
                first_matrix=first_matrix,
                order=self.order,
                width=self.width,
                READ=access.mode,
                SHARES=sums.shape[1],
                T=_COPIED_ROWS,
                N=_COPIED_COLUMNS,
            )
            first_matrix += span.count

    # ----- products ------------------------------------------------------------------------------

    def multiply(self, number: int, product: Product) -> None:
        """Start product `number`, a symmetric one."""
        target = self.symmetric[product.target]
        tile = self.tiles.symmetric
        n_tile_rows = self.order // tile.rows
        programs = n_tile_rows * (n_tile_rows + 1) // 2
        if product.left == "X":
            kind = GRAM.value
            depth = self.width
            left_operand = right_operand = target  # dummies: X Xᵀ adds nothing
            left_factor = right_factor = self.x16.gram_factor
            wide_programs = 0
            if tile.rows == _WIDE_GRAM.rows:
                wide_programs = wide_gram_programs(self.order, depth, self.count)
            if wide_programs:
                programs = wide_programs
                tile = _WIDE_GRAM
                right_factor = tiled(right_factor.base, tile.columns, DEPTH_STEP)
        else:
            kind = (ONE_MATRIX if product.left == product.right else TWO_MATRICES).value
            depth = self.order
            left_operand = self.symmetric[product.left]
            right_operand = self.symmetric[product.right]
            left_factor = left_operand.product_factor
            right_factor = right_operand.product_factor
        symmetric_product[programs, self.count](
            left=left_factor,
            right=right_factor,
            **left_operand.as_operand("left"),
            **right_operand.as_operand("right"),
            **target.as_target(),
            weights=self.weights,
            weights_row=number,
            order=self.order,
            depth=depth,
            KIND=kind,
            LEFT_FINE=product.left in product.fine,  # X is never fine
            RIGHT_FINE=product.right in product.fine and kind == TWO_MATRICES.value,
            TARGET_FINE=product.target in product.fine,
            T=tile.rows,
            N=tile.columns,
            K=DEPTH_STEP,
            num_warps=tile.warps,
            num_stages=tile.stages,
        )

    def update(self, number: int, product: Product, *, last: bool) -> None:
        """Start product `number`, an update of X; the last one writes or applies the results."""
        tile = self.tiles.update
        lift = self.lifts[number]
        writes_x32 = lift > _X32_LIFT
        exact = self.rows >= _LARGE_ROWS and lift > _EXACT_LIFT
        polynomial = self.symmetric[product.left]
        programs = self.order // tile.rows * (self.width // tile.columns)
        for launch in self._update_launches(last=last):
            strided = launch.write.mode == ANYWHERE.value
            update[programs, launch.matrices](
                polynomial=polynomial.update_factor,
                diagonal=polynomial.diagonal,
                x_factor=self.x16.update_factor,
                x_tiles=launch.read.descriptor,
                norm_factors=self.norm_factors,
                x32_out=launch.write.descriptor,
                x16_out=self.next_x16.tiles,
                table=self.table,
                out=self.out,
                weights=self.weights,
                weights_row=number,
                first_matrix=launch.first_matrix,
                order=self.order,
                width=self.width,
                **(self._application_to(launch.span) if last else NO_APPLICATION),
                READ=launch.read.mode,
                WRITE=launch.write.mode,
                KEEP=writes_x32,
                CHUNK=_EXACT_CHUNK if exact else 0,
                T=tile.rows,
                N=tile.columns,
                K=DEPTH_STEP,
                num_warps=_STRIDED_WARPS if strided else tile.warps,
                num_stages=tile.stages,
            )
        self.tiled_inputs = []
        self.reads_x32 = writes_x32
        self.x16, self.next_x16 = self.next_x16, self.x16

    def _update_launches(self, *, last: bool) -> list[_UpdateLaunch]:
        """Divide the batch of an update into launches: one per span if it uses tiles of tensors."""
        read = _Access(WORKSPACE.value, self.x32 if self.reads_x32 else self.x16.tiles)
        write = _Access((ANYWHERE if last else NEXT).value, self.x32)
        results = self._results_in_tiles() if last else []
        if not self.tiled_inputs and not results:
            return [
                _UpdateLaunch(
                    first_matrix=0, matrices=self.count, read=read, write=write, span=None
                )
            ]
        launches = []
        first_matrix = 0
        for i, span in enumerate(self.spans):
            launches.append(
                _UpdateLaunch(
                    first_matrix=first_matrix,
                    matrices=span.count,
                    read=self.tiled_inputs[i] if self.tiled_inputs else read,
                    write=results[i] if results else write,
                    span=span,
                )
            )
            first_matrix += span.count
        return launches

    def _application_to(self, span: Span | None) -> dict[str, Any]:
        """Return the arguments with which the last update changes the parameters of a span."""
        application = self.application
        if application is None:
            return NO_APPLICATION
        # Only matrices in tiles are applied, and each span of them has a launch.
        assert span is not None
        return {
            "targets": application.targets[span.tensor],
            "factors": application.factors,
            "numbers": application.numbers,
            "TYPE": _TYPES[application.dtype],
        }


def _shares(count: int) -> int:
    """Return how many programs, a power of two, measure and copy each of `count` matrices."""
    shares = max(_MIN_SHARES, min(_MAX_SHARES, 1024 // count))
    return 1 << (shares.bit_length() - 1)


def tiled(x: Tensor, rows: int, columns: int) -> Any:
    """Return a descriptor of a matrix for tiles of rows × columns."""
    return TensorDescriptor(x, list(x.shape), list(x.stride()), [rows, columns])
