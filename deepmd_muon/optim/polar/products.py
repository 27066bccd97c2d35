"""Drive the products of `symmetric`: workspaces, descriptors and launches for batches of large matrices."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from deepmd_muon.optim.polar.launches import Launch, on_device, run
from deepmd_muon.optim.polar.schedules import Coefficients
from deepmd_muon.optim.polar.symmetric import SHARES, measure, normalize, symmetric_product, update


class Tile(NamedTuple):
    """What a program computes of a product, and how."""

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


# Found on an H200 by source/benchmarks/kernel_tiles.py. Two programs of the medium kind share a multiprocessor, and one
# computes while the other stores; small ones fill the device where there are few, large ones read less.
_SYMMETRIC = {"small": Tile(64, 64, 4, 4), "medium": Tile(128, 128, 4, 3), "large": Tile(256, 128, 8, 4)}
_UPDATE = {"small": Tile(64, 128, 4, 4), "medium": Tile(128, 128, 4, 3), "large": Tile(128, 256, 8, 4)}
_LAST_WARPS = 8  # addresses of results with any strides take registers
_DEPTH = 64  # columns of the left factor that a product takes at a time
_LARGE, _LARGEST = 4096, 8192  # rows from which large tiles win in updates, and in symmetric products
_CHUNK = 1024  # terms that tensor cores sum in exact updates
_LIFT = 1000.0  # updates are exact where later steps enlarge what is small by more than this
_MODEST = 9.0  # growth of two steps that may share products
_MULTIPROCESSORS = 132


@functools.lru_cache(maxsize=256)
def tiles_for(rows: int, columns: int, count: int) -> Tiles:
    """Return the tiles for `count` matrices of one shape, rows ≤ columns."""
    side = -(-rows // 128)
    few = count * side * (side + 1) // 2 < _MULTIPROCESSORS
    symmetric = "small" if few else "large" if rows >= _LARGEST else "medium"
    few = count * side * -(-columns // 128) < _MULTIPROCESSORS
    update = "small" if few else "large" if rows >= _LARGE else "medium"
    return Tiles(_SYMMETRIC[symmetric], _UPDATE[update])


class Product(NamedTuple):
    """One launch: target ← w₀ first + w₁ second + w₂ left rightᵀ; or, for target 'X', X ← w₀ X + left X."""

    target: str
    left: str
    right: str
    addends: tuple[str, ...]
    weights: tuple[float, float, float]


@functools.lru_cache(maxsize=64)
def program(coefficients: Coefficients, wide: bool) -> tuple[Product, ...]:
    """Return the launches of all steps.

    A step alone takes R = X Xᵀ, its polynomial B = b R + c R² and X ← a X + B X. Where X is wide, products with it are
    dear, and two steps share them where precision allows: with p = a I + B, the next R is p R p (all of these commute),
    and X ← p₁ p₀ X = a₀ a₁ X + (a₀ B₁ + a₁ B₀ + B₀ B₁) X. Near X Xᵀ = I these two terms almost cancel and 16-bit errors
    of the second come out a₀ a₁ times as large: the first two steps share, far from there, and two that hardly grow.
    """
    launches: list[Product] = []
    k = 0
    while k < len(coefficients):
        a0, b0, c0 = coefficients[k]
        launches += [
            Product("R", "X", "X", (), (0.0, 0.0, 1.0)),
            Product("B", "R", "R", ("R",), (b0, 0.0, c0)),
        ]
        a1, b1, c1 = coefficients[k + 1] if k + 1 < len(coefficients) else (math.inf, 0.0, 0.0)
        if wide and (a0 * a1 < _MODEST or (k == 0 and a1 < math.inf)):
            launches += [
                Product("W", "R", "B", ("R",), (a0, 0.0, 1.0)),  # R p
                Product("R", "B", "W", ("W",), (a0, 0.0, 1.0)),  # p R p, the next R
                Product("W", "R", "R", ("R",), (b1, 0.0, c1)),  # the next B
                Product("R", "B", "W", ("W", "B"), (a0, a1, 1.0)),
                Product("X", "R", "X", (), (a0 * a1, 0.0, 1.0)),
            ]
            k += 2
        else:
            launches.append(Product("X", "B", "X", (), (a0, 0.0, 1.0)))
            k += 1
    return tuple(launches)


def orthogonalize_by_products(matrices: Sequence[Tensor], coefficients: Coefficients) -> list[Tensor]:
    """Orthogonalize batches of large matrices, equal shapes together.

    Parameters
    ----------
    matrices
        Non-empty batches (b, m, n) of any strides on one device.
    coefficients
        One (a, b, c) a step.

    Returns
    -------
    list of Tensor
        float32 results (b, m, n), parts of one new tensor. The workspace, 8 bytes an element of X and 6 an element of
        X Xᵀ, is freed on return.
    """
    return run("symmetric", _run, matrices, coefficients)


def _run(_name: str, launch: Launch, addresses: Tensor, coefficients: Coefficients, out: Tensor) -> None:
    """Take the matrices of one shape through all steps."""
    rows, columns = launch.constants["rows"], launch.constants["columns"]
    count, device = launch.matrices, out.device
    tiles = tiles_for(rows, columns, count)
    high, t, *_ = tiles.symmetric
    down, across, *_ = tiles.update
    wide = columns >= 2 * rows and high == t  # only square tiles give exactly symmetric results
    products = program(coefficients, wide)
    order = -(-rows // tiles.rows) * tiles.rows
    width = -(-columns // tiles.columns) * tiles.columns
    sums = torch.empty(count, int(SHARES.value), 2, dtype=torch.float64, device=device)
    master = torch.empty(count * order, width, dtype=torch.float32, device=device)
    iterates = torch.empty(2, count * order, width, dtype=torch.float16, device=device)
    squares = dict(zip("RBW", torch.empty(3, count * order, order, dtype=torch.float16, device=device), strict=True))
    share = (int(SHARES.value), count)
    measure[share](launch.table, addresses, sums, T=64)
    normalize[share](launch.table, addresses, sums, master, iterates[0], order, width, T=64)
    weights = on_device(tuple(product.weights for product in products), device)
    halves = order // high
    symmetric = (high // t * halves * (halves + 1) // 2, count)
    full = (order // down * (width // across), count)
    talls, flats, results, mirrors = (
        {name: _tiled(x, *block) for name, x in squares.items()}
        for block in ((high, _DEPTH), (t, _DEPTH), (high, t), (t, high))
    )
    lefts = {name: _tiled(x, down, _DEPTH) for name, x in squares.items()}
    sources = [(_tiled(x, high, _DEPTH), _tiled(x, t, _DEPTH)) for x in iterates]
    rights = [_tiled(x, _DEPTH, across) for x in iterates]
    kept, *copies = (_tiled(x, down, across // 2) for x in (master, *iterates))
    now = 0
    for k, product in enumerate(products):
        if product.target == "X":
            lift = math.prod(later.weights[0] for later in products[k + 1 :] if later.target == "X")
            chunk = _CHUNK if rows >= _LARGE and lift > _LIFT else 0
            last = k + 1 == len(products)
            update[full](
                lefts[product.left], rights[now], kept, copies[1 - now], launch.table, weights, out, k, order, width,
                LAST=last, CHUNK=chunk, T=down, N=across, K=_DEPTH,
                num_warps=_LAST_WARPS if last else tiles.update.warps, num_stages=tiles.update.stages,
            )  # fmt: skip
            now = 1 - now
            continue
        from_x = product.left == "X"
        left, right = sources[now] if from_x else (talls[product.left], flats[product.right])
        addends = [results[name] for name in (*product.addends, "R", "R")][:2]  # unused ones stand for anything
        symmetric_product[symmetric](
            left, right, *addends, results[product.target], mirrors[product.target], weights, k, order,
            width if from_x else order, ADDENDS=len(product.addends), EVEN=wide, T=t, R=high // t, K=_DEPTH,
            num_warps=tiles.symmetric.warps, num_stages=tiles.symmetric.stages,
        )  # fmt: skip


def _tiled(x: Tensor, *block: int) -> Any:
    """Describe a matrix to the copy engine, which then fetches whole tiles."""
    return TensorDescriptor(x, list(x.shape), list(x.stride()), list(block))
