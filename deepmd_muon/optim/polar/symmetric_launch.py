"""Launches of the kernels in `symmetric`: workspaces and tensor descriptors for batches of large matrices."""

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
    PRESENT,
    TRANSPOSED_INPUT,
    measure,
    measure_contiguous,
    normalize,
    normalize_tiles,
)
from deepmd_muon.optim.polar.kernels.symmetric import (
    ANYWHERE,
    APPLIED,
    APPLIED_TRANSPOSED,
    IN_TILES,
    IN_TRANSPOSED_TILES,
    NEXT,
    SQUARE,
    symmetric_product,
    update,
)
from deepmd_muon.optim.polar.one_launch import on_device, run_launches
from deepmd_muon.optim.polar.schedules import Coefficients
from deepmd_muon.optim.polar.symmetric_program import Product, amplification, program
from deepmd_muon.optim.polar.tables import Application, Inputs, Launch, Span


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
        return max(self.update.columns, _DEPTH)


# Measured on an H200 by source/benchmarks/kernel_tiles.py. Two programs of the medium kind share a multiprocessor: one
# computes while the other stores. Small tiles occupy the device when there are few; large tiles read less.
_SYMMETRIC = {"small": Tile(64, 64, 4, 4), "medium": Tile(128, 128, 4, 3)}
# For X Xᵀ with at least _DEEP_FROM columns, if its programs occupy the device for _OCCUPIED of the time.
_DEEP = Tile(128, 256, 8, 3)
_DEEP_FROM, _OCCUPIED = 4096, 0.8
_UPDATE = {
    "small": Tile(64, 128, 4, 4),
    "medium": Tile(128, 128, 4, 3),
    "wide": Tile(128, 256, 8, 3),
    "large": Tile(128, 256, 8, 4),
}
_LAST_WARPS = 8  # the addresses of strided results take registers
_DEPTH = 64  # columns of the left factor per iteration of a product
_LARGE = 4096  # rows from which large tiles are faster in updates
_MANY = (
    2048,
    4,
)  # rows, and wide tiles per multiprocessor, from which wide tiles are faster in updates
_CHUNK = 1024  # terms that tensor cores accumulate in exact updates
_LIFT = 500.0  # updates are exact if later steps amplify small singular values by more than this
_KEEP = 50.0  # X is kept in fp32 if later steps amplify small singular values by more than this
_MULTIPROCESSORS = 132
_TYPES = {
    torch.float32: tl.float32,
    torch.float16: tl.float16,
    torch.bfloat16: tl.bfloat16,
}  # of parameters
_MOST_SPANS = 2  # with at most so many tensors in a batch, each has its own first and last update
# Inputs in tiles: the programs that measure each, the adjacent elements that these read at a time, and the tile copied.
_PROGRAMS, _RUN, _COPIED = 512, 4096, (64, 128)
_SHARES = (64, 512)  # smallest and largest number of programs that measure or copy a matrix


@functools.lru_cache(maxsize=256)
def tiles_for(rows: int, columns: int, count: int) -> Tiles:
    """Return the tiles for `count` matrices of one shape, rows ≤ columns."""
    side = -(-rows // 128)
    few = count * side * (side + 1) // 2 < _MULTIPROCESSORS
    symmetric = "small" if few else "medium"
    few = count * side * -(-columns // 128) < _MULTIPROCESSORS
    many = rows >= _MANY[0] and count * side * -(-columns // 256) >= _MANY[1] * _MULTIPROCESSORS
    update = "small" if few else "large" if rows >= _LARGE else "wide" if many else "medium"
    return Tiles(_SYMMETRIC[symmetric], _UPDATE[update])


def deep_programs(order: int, depth: int, count: int) -> int:
    """Return the number of programs per matrix that compute X Xᵀ in wide tiles; 0 if other tiles are faster."""
    if order % _DEEP.columns or depth < _DEEP_FROM:
        return 0
    pairs = order // _DEEP.columns  # two rows of tiles each
    rounds = count * pairs * (pairs + 1) / _MULTIPROCESSORS
    return pairs * (pairs + 1) if rounds / math.ceil(rounds) >= _OCCUPIED else 0


def orthogonalize_by_products(
    matrices: Sequence[Tensor], coefficients: Coefficients
) -> list[Tensor]:
    """Orthogonalize batches (b, m, n) of large matrices of any strides, equal shapes together.

    The float32 results (b, m, n) are parts of one new tensor. The workspace is freed on return: 4 bytes per element of
    X, 8 where X is kept in fp32, and up to 16 per element of X Xᵀ, both padded to whole tiles.
    """
    return run_launches("symmetric", _run, matrices, coefficients)


def apply_by_products(
    matrices: Sequence[Tensor], coefficients: Coefficients, application: Application
) -> None:
    """Orthogonalize contiguous fp32 batches of large matrices for which `can_apply` holds, and update parameters.

    The polar factors are never written: the last product of a tile updates that tile of the parameters.
    """
    start = functools.partial(_run, application=application)
    run_launches("symmetric", start, matrices, coefficients, with_results=False)


def can_apply(rows: int, columns: int) -> bool:
    """Return whether the last product of contiguous matrices can update parameters: in whole tiles of any size."""
    rows, columns = min(rows, columns), max(rows, columns)
    tiles = Tiles(_SYMMETRIC["medium"], _UPDATE["large"])
    return rows % tiles.rows == 0 and columns % tiles.columns == 0 and rows * columns < 2**31


def _run(
    _name: str, launch: Launch, inputs: Inputs, coefficients: Coefficients, out: Tensor,
    application: Application | None = None,
) -> None:  # fmt: skip
    """Run all steps for the matrices of one shape."""
    rows, columns = launch.constants["rows"], launch.constants["columns"]
    products = program(coefficients, rows, columns)
    work = _Workspace(launch, inputs, products, out, application)
    for k, product in enumerate(products):
        if product.target == "X":
            work.update(k, product, amplification(products[k + 1 :]), last=k + 1 == len(products))
        else:
            work.multiply(k, product)


def _shares(count: int) -> int:
    """Return the number of programs, a power of two, that measure and copy each of `count` matrices."""
    return 1 << (max(_SHARES[0], min(_SHARES[1], 1024 // count)).bit_length() - 1)


class _Workspace:
    """Workspaces of one shape, and its launches."""

    def __init__(
        self,
        launch: Launch,
        inputs: Inputs,
        products: tuple[Product, ...],
        out: Tensor,
        application: Application | None,
    ) -> None:
        rows, columns, count = (
            launch.constants["rows"],
            launch.constants["columns"],
            launch.matrices,
        )
        self.rows, self.columns, self.count = rows, columns, count
        self.tiles = tiles_for(rows, columns, count)
        self.exact = rows >= _LARGE
        self.order = order = -(-rows // self.tiles.rows) * self.tiles.rows
        self.width = width = -(-columns // self.tiles.columns) * self.tiles.columns
        # The prefetch computes addresses in 32 bits and needs whole tiles; Triton's interpreter has no inline assembly.
        whole = (order, width) == (rows, columns) and rows * columns < 2**31
        self.prefetch = out.is_cuda and whole
        self.table, self.out, self.application = launch.table, out, application
        self.weights = on_device(tuple(product.weights for product in products), out.device)
        half = functools.partial(torch.empty, dtype=torch.float16, device=out.device)
        single = functools.partial(torch.empty, dtype=torch.float32, device=out.device)
        self.factors = single(count, 2)
        self.single = amplification(products) > _KEEP  # whether X is kept in fp32
        spans = launch.constants["spans"]
        self.spans: Sequence[Span] = spans if len(spans) <= _MOST_SPANS else ()
        self.inputs = self._inputs(inputs.tensors) if self.single else []
        keep = self.single and not self.inputs
        shares = _PROGRAMS if self.inputs else _shares(count)
        if not out.is_cuda:
            shares = 4  # Triton's interpreter runs programs one after the other
        sums = torch.empty(count, shares, 2, dtype=torch.float64, device=out.device)
        kept = keep or any(
            amplification(products[k + 1 :]) > _KEEP
            for k, each in enumerate(products)
            if each.target == "X"
        )
        iterates = half(2, count * order, width)
        master = single(count * order, width) if kept else iterates[1]
        if not self.inputs:
            measure[shares, count](
                self.table, inputs.addresses, sums, SHARES=shares, T=64, num_warps=8
            )
            normalize[shares, count](
                self.table, inputs.addresses, sums, self.factors, master, iterates[0], order, width, KEEP=keep,
                SHARES=shares, T=64,
            )  # fmt: skip
        names = dict.fromkeys(product.target for product in products if product.target != "X")
        squares = {name: half(count * order, order) for name in names}
        self.diagonals = {name: single(count * order) for name in names}
        t, (down, across, *_), side = (
            self.tiles.symmetric.rows,
            self.tiles.update,
            int(SQUARE.value),
        )
        fine = dict.fromkeys(name for product in products for name in product.fine)
        self.rests = {name: _tiled(half(count * order, order), side, side) for name in fine}
        self.operands = {name: _tiled(x, t, _DEPTH) for name, x in squares.items()}
        self.turned = {name: _tiled(x, side, t) for name, x in squares.items()}
        self.lefts = {name: _tiled(x, down, _DEPTH) for name, x in squares.items()}
        self.squares = {name: _tiled(x, side, side) for name, x in squares.items()}
        self.sources = [_tiled(x, t, _DEPTH) for x in iterates]
        self.rights = [_tiled(x, _DEPTH, across) for x in iterates]
        self.master, *self.copies = (_tiled(x, down, across // 2) for x in (master, *iterates))
        self.half = order // t * (order // t + 1) // 2
        if self.inputs and inputs.tensors is not None:
            self._normalize_tiles(inputs.tensors, iterates[0], sums)

    def _inputs(self, tensors: Sequence[Tensor] | None) -> list[tuple[int, Any]]:
        """Return how the first update reads each span in tiles, with its descriptor; empty if it cannot."""
        found: list[tuple[int, Any]] = []
        for x in [tensors[span.tensor] for span in self.spans] if tensors is not None else []:
            lying = x if x.stride(2) == 1 else x.mT
            if x.dtype != torch.float32 or not lying.is_contiguous():
                return []
            transposed = (lying is x) == (x.shape[1] > x.shape[2])
            tiled = self._in_tiles(lying.flatten(), lying.shape[1:], transposed=transposed)
            if tiled is None:
                return []
            found.append(((TRANSPOSED_INPUT if transposed else INPUT).value, tiled))
        return found

    def _normalize_tiles(self, tensors: Sequence[Tensor], iterate: Tensor, sums: Tensor) -> None:
        """Start the launches that write the fp16 X from inputs that are read in tiles."""
        rows, columns = _COPIED
        tiles, first = self.order // rows * (self.width // columns), 0
        for span, (read, described) in zip(self.spans, self.inputs, strict=True):
            block = reversed(_COPIED) if read == TRANSPOSED_INPUT.value else _COPIED
            if self.application is None:
                own = sums[first:]
                measure_contiguous[own.shape[1], span.count](
                    tensors[span.tensor],
                    own,
                    self.rows * self.columns,
                    SHARES=own.shape[1],
                    WIDTH=_RUN,
                    num_warps=8,
                )
            else:
                own = self.application.squares[span.tensor]
            normalize_tiles[tiles, span.count](
                _tiled(described.base, *block), _tiled(iterate, *_COPIED), own, self.factors, first, self.order,
                self.width, READ=read, SHARES=own.shape[1], T=rows, N=columns,
            )  # fmt: skip
            first += span.count

    def _results(self, span: Span) -> tuple[int, Any]:
        """Return how results are written or applied, with a descriptor if they are written in tiles."""
        if self.application is not None:
            return (APPLIED_TRANSPOSED if span.transposed else APPLIED).value, self.master
        size = (self.columns, self.rows) if span.transposed else (self.rows, self.columns)
        results = self.out[span.place : span.place + span.count * self.rows * self.columns]
        tiled = self._in_tiles(results, size, transposed=span.transposed)
        if tiled is None:
            return ANYWHERE.value, self.master
        return (IN_TRANSPOSED_TILES if span.transposed else IN_TILES).value, tiled

    def _in_tiles(self, x: Tensor, size: Sequence[int], *, transposed: bool) -> Any:
        """Return a descriptor, in tiles of updates, of contiguous fp32 matrices of one size; None if impossible.

        Rows must start at multiples of 16 bytes, and tiles must not reach into the next matrix.
        """
        rows, columns = size
        if rows != (self.width if transposed else self.order) or columns % 4 or x.data_ptr() % 16:
            return None
        block = self.tiles.update.rows, self.tiles.update.columns // 2
        return _tiled(x.view(-1, columns), *(reversed(block) if transposed else block))

    def multiply(self, k: int, product: Product) -> None:
        """Start launch `k`, a symmetric product."""
        target, left, right, _, fine = product
        tile, programs = self.tiles.symmetric, self.half
        if left == "X":
            kind, depth, factors = 0, self.width, self.sources[:1] * 2
            left = right = target  # not read
            deep = deep_programs(self.order, depth, self.count) if tile.rows == _DEEP.rows else 0
            if deep:
                tile, programs = _DEEP, deep
                factors[1] = _tiled(factors[1].base, tile.columns, _DEPTH)
        else:
            kind, depth, factors = (
                1 if left == right else 2,
                self.order,
                [self.operands[left], self.operands[right]],
            )
        names = (left, right, target)
        squares = [self.squares[name] for name in names]
        rests = [self.rests[name] if name in fine else self.squares[name] for name in names]
        strips = [self.operands[target], self.turned[target]]
        strips += [_tiled(rest.base, tile.rows, _DEPTH) for rest in rests]
        symmetric_product[programs, self.count](
            *factors, *squares, *rests, *strips, *(self.diagonals[name] for name in names), self.weights, k, self.order,
            depth, KIND=kind, LEFT_FINE=left in fine and kind > 0, RIGHT_FINE=right in fine and kind > 1,
            FINE=target in fine, T=tile.rows, N=tile.columns, K=_DEPTH, num_warps=tile.warps, num_stages=tile.stages,
        )  # fmt: skip

    def update(self, k: int, product: Product, lift: float, *, last: bool) -> None:
        """Start update `k` of X; later steps amplify small singular values by `lift`.

        The first and the last update take one launch per span if inputs or results are in tiles.
        """
        tile, keep = self.tiles.update, lift > _KEEP
        across = self.order // tile.rows * (self.width // tile.columns)
        results = [self._results(span) for span in self.spans] if last else []
        if all(way == ANYWHERE.value for way, _ in results):
            results = []
        first = 0
        spans = self.spans if self.inputs or results else ()
        counts = [span.count for span in spans] or [self.count]
        for i, count in enumerate(counts):
            read, present = PRESENT.value, self.master if self.single else self.copies[0]
            write, target = (ANYWHERE if last else NEXT).value, self.master
            if self.inputs:
                read, present = self.inputs[i]
            if results:
                write, target = results[i]
            update[across, count](
                self.lefts[product.left], self.rights[0], present, self.factors, target, self.copies[1],
                self.diagonals[product.left], self.table, self.weights, self.out, k, first, self.order, self.width,
                source=present.base if self.inputs else None,
                **self._applied(spans[i] if last and self.application is not None else None),
                PREFETCH=self.prefetch,
                READ=read, WRITE=write, KEEP=keep, CHUNK=_CHUNK if self.exact and lift > _LIFT else 0,
                T=tile.rows, N=tile.columns, K=_DEPTH, num_stages=tile.stages,
                num_warps=_LAST_WARPS if write == ANYWHERE.value else tile.warps,
            )  # fmt: skip
            first += count
        self.single, self.inputs = keep, []
        for each in (self.sources, self.rights, self.copies):
            each.reverse()  # the next update reads the copy just written

    def _applied(self, span: Span | None) -> dict[str, Any]:
        """Return the arguments with which an update changes parameters; all None if it does not."""
        names = ("targets", "damping", "rate", "decay_high", "decay_low", "skip", "TYPE")
        if span is None or self.application is None:
            return dict.fromkeys(names)
        targets, _, dtype, damping, rate, decay, skip = self.application
        given = (targets[span.tensor], damping, rate, *decay, skip, _TYPES[dtype])
        return dict(zip(names, given, strict=True))


def _tiled(x: Tensor, *block: int) -> Any:
    """Return a descriptor of a matrix, from which the copy engine fetches whole tiles."""
    return TensorDescriptor(x, list(x.shape), list(x.stride()), list(block))
