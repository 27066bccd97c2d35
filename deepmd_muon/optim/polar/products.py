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
        float32 results (b, m, n), parts of one new tensor. The workspace, 8 bytes an element of X and 4 a element of
        X Xᵀ, is freed on return.
    """
    device = matrices[0].device
    matrices = [readable(x) for x in matrices]
    plan = plan_for("symmetric", tuple((tuple(x.shape), x.stride(), x.dtype) for x in matrices), device)
    addresses = current_addresses(plan, matrices)
    steps = on_device(coefficients, device)
    out = torch.empty(plan.out_size, dtype=torch.float32, device=device)
    for launch in plan.launches:
        _iterate(launch, addresses, steps, out)
    return plan.results(out, matrices)


def _iterate(launch: Launch, addresses: Tensor, steps: Tensor, out: Tensor) -> None:
    """Take the matrices of one shape through all steps."""
    count, device = launch.matrices, out.device
    tiles = blocking(launch.constants["rows"], count)
    order = -(-launch.constants["rows"] // tiles.rows) * tiles.rows
    width = -(-launch.constants["columns"] // tiles.columns) * tiles.columns
    sums = torch.empty(count, int(SHARES.value), 2, dtype=torch.float64, device=device)
    master = torch.empty(count * order, width, dtype=torch.float32, device=device)
    iterates = torch.empty(2, count * order, width, dtype=torch.float16, device=device)
    gram, polynomial = torch.empty(2, count * order, order, dtype=torch.float16, device=device).unbind()
    share = (int(SHARES.value), count)
    measure[share](launch.table, addresses, sums, T=64)
    normalize[share](launch.table, addresses, sums, master, iterates[0], order, width, T=64)
    options: dict[str, Any] = {"num_warps": tiles.warps, "num_stages": tiles.stages, "K": tiles.depth}
    high, t = tiles.tile * tiles.ratio, tiles.tile
    halves = order // high
    symmetric = (tiles.ratio * halves * (halves + 1) // 2, count)
    full = (order // tiles.update_rows * (width // tiles.update_columns), count)
    sources = [(_tiled(x, high, tiles.depth), _tiled(x, t, tiles.depth)) for x in (*iterates, gram)]
    results = [(_tiled(x, high, t), _tiled(x, t, high)) for x in (gram, polynomial)]
    left = _tiled(polynomial, tiles.update_rows, tiles.depth)
    rights = [_tiled(x, tiles.depth, tiles.update_columns) for x in iterates]
    kept, *copies = (_tiled(x, tiles.update_rows, tiles.update_columns // 2) for x in (master, *iterates))
    for k in range(steps.shape[0]):
        now, next_one = k % 2, (k + 1) % 2
        for source, result, depth, add in (
            (sources[now], results[0], width, False),
            (sources[2], results[1], order, True),
        ):
            symmetric_product[symmetric](
                *source, results[0][0], *result, steps, k, order, depth, ADD=add, T=t, R=tiles.ratio, **options
            )
        update[full](
            left, rights[now], kept, copies[next_one], launch.table, steps, out, k, order, width,
            LAST=k + 1 == steps.shape[0], T=tiles.update_rows, N=tiles.update_columns, **options,
        )  # fmt: skip


def _tiled(x: Tensor, *block: int) -> Any:
    """Describe a matrix to the copy engine, which then fetches whole tiles."""
    return TensorDescriptor(x, list(x.shape), list(x.stride()), list(block))
