"""Drive the products of `symmetric`: workspaces, descriptors and launches for batches of large matrices."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from deepmd_muon.optim.polar.launches import Launch, current_addresses, on_device, plan_for, readable
from deepmd_muon.optim.polar.schedules import Coefficients
from deepmd_muon.optim.polar.symmetric import SHARES, measure, normalize, symmetric_product, update


class Blocking(NamedTuple):
    """Tiles of the two kinds of product."""

    tile: int  # the symmetric products take ratio·tile × tile
    ratio: int
    update_rows: int
    update_columns: int
    depth: int
    warps: int
    stages: int

    @property
    def rows(self) -> int:
        """Rows are padded to a multiple of this."""
        return max(self.tile * self.ratio, self.update_rows)

    @property
    def columns(self) -> int:
        """Columns are padded to a multiple of this."""
        return max(self.update_columns, self.depth)


# Found on an H200. Large tiles do less traffic, small ones fill the device.
SMALL = Blocking(64, 1, 64, 128, 64, 4, 4)
MEDIUM = Blocking(128, 1, 128, 128, 64, 8, 3)
LARGE = Blocking(128, 2, 128, 256, 64, 8, 4)
_MULTIPROCESSORS = 132


@functools.lru_cache(maxsize=256)
def blocking(rows: int, count: int) -> Blocking:
    """Return the tiles for `count` matrices of so many rows, no more than columns."""
    halves = -(-rows // MEDIUM.tile)
    if count * halves * (halves + 1) // 2 < _MULTIPROCESSORS:
        return SMALL
    return MEDIUM if count * rows * rows < 8192 * 8192 else LARGE


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
    dear, and two steps of three share them: with p = a I + B, the next R is p R p (all of these commute), and
    X ← p₁ p₀ X = a₀ a₁ X + (a₀ B₁ + a₁ B₀ + B₀ B₁) X. Then R comes anew from X, before 16-bit errors of R grow; with
    all steps in pairs, values near the cut-off would be off by more than 3e-3.
    """
    launches: list[Product] = []
    k = 0
    while k < len(coefficients):
        a0, b0, c0 = coefficients[k]
        launches += [
            Product("R", "X", "X", (), (0.0, 0.0, 1.0)),
            Product("B", "R", "R", ("R",), (b0, 0.0, c0)),
        ]
        if wide and k % 3 == 0 and k + 1 < len(coefficients):
            a1, b1, c1 = coefficients[k + 1]
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
    device = matrices[0].device
    matrices = [readable(x) for x in matrices]
    plan = plan_for("symmetric", tuple((tuple(x.shape), x.stride(), x.dtype) for x in matrices), device)
    addresses = current_addresses(plan, matrices)
    out = torch.empty(plan.out_size, dtype=torch.float32, device=device)
    for launch in plan.launches:
        wide = launch.constants["columns"] >= 2 * launch.constants["rows"]
        wide = wide and blocking(launch.constants["rows"], launch.matrices).ratio == 1  # whose results are symmetric
        _run(launch, addresses, program(coefficients, wide), wide, out)
    return plan.results(out, matrices)


def _run(launch: Launch, addresses: Tensor, products: tuple[Product, ...], wide: bool, out: Tensor) -> None:
    """Take the matrices of one shape through all steps."""
    count, device = launch.matrices, out.device
    tiles = blocking(launch.constants["rows"], count)
    order = -(-launch.constants["rows"] // tiles.rows) * tiles.rows
    width = -(-launch.constants["columns"] // tiles.columns) * tiles.columns
    sums = torch.empty(count, int(SHARES.value), 2, dtype=torch.float64, device=device)
    master = torch.empty(count * order, width, dtype=torch.float32, device=device)
    iterates = torch.empty(2, count * order, width, dtype=torch.float16, device=device)
    squares = dict(zip("RBW", torch.empty(3, count * order, order, dtype=torch.float16, device=device), strict=True))
    share = (int(SHARES.value), count)
    measure[share](launch.table, addresses, sums, T=64)
    normalize[share](launch.table, addresses, sums, master, iterates[0], order, width, T=64)
    weights = on_device(tuple(product.weights for product in products), device)
    options: dict[str, Any] = {"num_warps": tiles.warps, "num_stages": tiles.stages, "K": tiles.depth}
    high, t = tiles.tile * tiles.ratio, tiles.tile
    halves = order // high
    symmetric = (tiles.ratio * halves * (halves + 1) // 2, count)
    full = (order // tiles.update_rows * (width // tiles.update_columns), count)
    talls, flats, results, mirrors = (
        {name: _tiled(x, *block) for name, x in squares.items()}
        for block in ((high, tiles.depth), (t, tiles.depth), (high, t), (t, high))
    )
    lefts = {name: _tiled(x, tiles.update_rows, tiles.depth) for name, x in squares.items()}
    sources = [(_tiled(x, high, tiles.depth), _tiled(x, t, tiles.depth)) for x in iterates]
    rights = [_tiled(x, tiles.depth, tiles.update_columns) for x in iterates]
    kept, *copies = (_tiled(x, tiles.update_rows, tiles.update_columns // 2) for x in (master, *iterates))
    now = 0
    for k, product in enumerate(products):
        if product.target == "X":
            update[full](
                lefts[product.left], rights[now], kept, copies[1 - now], launch.table, weights, out, k, order, width,
                LAST=k + 1 == len(products), T=tiles.update_rows, N=tiles.update_columns, **options,
            )  # fmt: skip
            now = 1 - now
            continue
        from_x = product.left == "X"
        left, right = sources[now] if from_x else (talls[product.left], flats[product.right])
        addends = [results[name] for name in (*product.addends, "R", "R")][:2]  # unused ones stand for anything
        symmetric_product[symmetric](
            left, right, *addends, results[product.target], mirrors[product.target], weights, k, order,
            width if from_x else order, ADDENDS=len(product.addends), EVEN=wide, T=t, R=tiles.ratio, **options,
        )  # fmt: skip


def _tiled(x: Tensor, *block: int) -> Any:
    """Describe a matrix to the copy engine, which then fetches whole tiles."""
    return TensorDescriptor(x, list(x.shape), list(x.stride()), list(block))
