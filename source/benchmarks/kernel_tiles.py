"""Search the tiles, warps and pipeline stages of the orthogonalization kernels on a GPU.

The constants in `deepmd_muon.optim.polar.symmetric_launch` and `launches` were chosen from this table: nothing is
tuned when an optimizer runs. Times are medians over replays of a captured graph of ten launches.

    python source/benchmarks/kernel_tiles.py [--out tiles.csv] [--shapes 1x4096x4096,16x1024x4096]

symmetric  X Xᵀ, and a product of its polynomials with all that can be added to it; rate: operations of the half
update     X ← a X + P X with X in fp32, read and written, beside its fp16 copy
narrow     the same where fp16 is enough
launch     whole iterations (8+2) of small and middle matrices, with other warps and stages than the present ones
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import datetime
import functools
import itertools
import statistics
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor
from triton.runtime.errors import OutOfResources

from deepmd_muon.optim.polar import SCHEDULES
from deepmd_muon.optim.polar.kernels.normalized import WORKSPACE
from deepmd_muon.optim.polar.kernels.symmetric import (
    GRAM,
    NEXT,
    TWO_MATRICES,
    symmetric_product,
    update,
)
from deepmd_muon.optim.polar.launches import launches_for, run_launches, start_launch
from deepmd_muon.optim.polar.symmetric_launch import (
    DEPTH_STEP,
    NO_APPLICATION,
    SymmetricMatrix,
    Tile,
    Tiles,
    tiled,
    tiles_for,
)

SHAPES = "1x1024x1024,1x2048x2048,1x4096x4096,1x8192x8192,16x1024x4096,4x2048x8192,64x768x2048"
SYMMETRIC = tuple(
    Tile(*tile)
    for tile in [
        *[
            (64, 64, 4, 3),
            (64, 64, 4, 4),
            (128, 128, 4, 3),
            (128, 128, 4, 4),
            (128, 128, 8, 3),
            (128, 128, 8, 4),
        ],
    ]
)
UPDATE = tuple(
    Tile(*tile)
    for tile in [
        *[(64, 128, 4, 4), (128, 128, 4, 3), (128, 128, 8, 3), (64, 256, 4, 4)],
        *[(128, 256, 8, 3), (128, 256, 8, 4), (256, 128, 8, 4)],
    ]
)
LAUNCHES = {
    "whole": [(46, 128, 128), (64, 64, 64), (133, 16, 16)],
    "strips": [(6, 64, 320), (6, 128, 768), (2, 240, 240), (2, 240, 1600)],
}
Row = tuple[object, ...]
HEAD = ("shape", "kernel", "configuration", "microseconds", "TFLOP/s", "chosen")


def timed(run: Callable[[], object], calls: int = 10) -> float:
    """Return the time of one call in a captured graph of several [µs]."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            run()
    times = []
    for _ in range(15):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / calls * 1e3)
    return statistics.median(times[3:])


def half(count: int, order: int, *size: int) -> Tensor:
    """Return a random fp16 matrix (count · order, ...), scaled like an iterate."""
    return torch.randn(count * order, *size, device="cuda", dtype=torch.float16) / size[-1] ** 0.5


def symmetric(count: int, rows: int, columns: int, tile: Tile) -> tuple[float, float]:
    """Time X Xᵀ and the costliest other product, w₀ L + w₁ S + w₂ L S [µs]; return their joint rate, too."""
    order, depth = (-(-n // 256) * 256 for n in (rows, columns))
    x = half(count, order, depth)
    diagonal = torch.ones(count * order, device="cuda")
    tiles = Tiles(symmetric=tile, update=tile)

    def matrix() -> SymmetricMatrix:
        values = half(count, order, order)
        return SymmetricMatrix(values, diagonal, torch.zeros_like(values), tiles)

    left = matrix()
    right = matrix()
    n_tile_rows = order // tile.rows
    common = {
        **left.as_operand("left"),
        **right.as_operand("right"),
        **matrix().as_target(),
        "weights": torch.ones(1, 3, device="cuda"),
        "weights_row": 0,
        "order": order,
        "TARGET_FINE": True,
        "T": tile.rows,
        "N": tile.rows,
        "K": DEPTH_STEP,
        "num_warps": tile.warps,
        "num_stages": tile.stages,
    }

    def run(left_factor: object, right_factor: object, size: int, kind: int) -> None:
        symmetric_product[n_tile_rows * (n_tile_rows + 1) // 2, count](
            left=left_factor,
            right=right_factor,
            depth=size,
            KIND=kind,
            LEFT_FINE=kind != GRAM.value,
            RIGHT_FINE=kind == TWO_MATRICES.value,
            **common,
        )

    x_factor = tiled(x, tile.rows, DEPTH_STEP)
    time = timed(lambda: run(x_factor, x_factor, depth, GRAM.value))
    time += timed(lambda: run(left.product_factor, right.product_factor, order, TWO_MATRICES.value))
    return time, count * order * (order + tile.rows) * (order + depth) / time * 1e-6


def updated(
    count: int, rows: int, columns: int, tile: Tile, *, wide: bool = True
) -> tuple[float, float]:
    """Time one update of X [µs]; return its rate, too [TFLOP/s]."""
    order, width = (-(-n // 256) * 256 for n in (rows, columns))
    x = half(count, order, width)
    master = x.float()
    weights = torch.ones(1, 3, device="cuda")

    def tiles(matrix: Tensor) -> object:
        return tiled(matrix, tile.rows, tile.columns // 2)

    arguments = {
        "polynomial": tiled(half(count, order, order), tile.rows, DEPTH_STEP),
        "diagonal": torch.ones(count * order, device="cuda"),
        "x_factor": tiled(x, DEPTH_STEP, tile.columns),
        "x_tiles": tiles(master if wide else x),
        "norm_factors": weights,  # not read
        "x32_out": tiles(master),
        "x16_out": tiles(torch.empty_like(x)),
        "table": torch.empty(1, dtype=torch.int64, device="cuda"),  # not read
        "out": master,  # not written
        "weights": weights,
        "weights_row": 0,
        "first_matrix": 0,
        "order": order,
        "width": width,
        **NO_APPLICATION,
        "READ": WORKSPACE.value,
        "WRITE": NEXT.value,
        "KEEP": wide,
        "CHUNK": 0,
        "T": tile.rows,
        "N": tile.columns,
        "K": DEPTH_STEP,
        "num_warps": tile.warps,
        "num_stages": tile.stages,
    }
    grid = (order // tile.rows * (width // tile.columns), count)
    time = timed(lambda: update[grid](**arguments))
    return time, 2 * count * order * order * width / time * 1e-6


def products(shapes: str) -> Iterator[Row]:
    """Yield rows of the two kinds of product."""
    for shape in shapes.split(","):
        count, rows, columns = map(int, shape.split("x"))
        present = tiles_for(rows, columns, count)
        kinds = (
            ("symmetric", symmetric, SYMMETRIC, present.symmetric),
            ("update", updated, UPDATE, present.update),
            ("narrow", functools.partial(updated, wide=False), UPDATE, present.update),
        )
        for kind, measure, candidates, chosen in kinds:
            found = {tile: measure(count, rows, columns, tile) for tile in candidates}
            for tile, (time, rate) in found.items():
                name = f"{tile.rows}×{tile.columns}, {tile.warps} warps, {tile.stages} stages"
                yield shape, kind, name, f"{time:.1f}", f"{rate:.0f}", int(tile == chosen)


def whole_iterations() -> Iterator[Row]:
    """Yield rows of the kernels that take whole iterations."""
    coefficients = SCHEDULES["8+2"].coefficients
    for name, shapes in LAUNCHES.items():
        for shape in shapes:
            x = torch.randn(*shape, device="cuda")
            start = functools.partial(start_launch, name)
            (launch,) = launches_for(name, ((shape, x.stride(), x.dtype),), x.device).launches
            present = dict(launch.constants)
            for warps, stages in itertools.product((4, 8), (2, 3, 4)):
                launch.constants.update(num_warps=warps, num_stages=stages)
                try:
                    time = timed(
                        lambda name=name, start=start, x=x: run_launches(
                            name, start, [x], coefficients
                        )
                    )
                except (
                    RuntimeError,
                    OutOfResources,
                ) as error:  # more programs than then fit at once, or too much shared memory
                    print(
                        f"{shape}, {name}, {warps} warps, {stages} stages: {error}".splitlines()[0],
                        flush=True,
                    )
                    continue
                same = (warps, stages) == (present["num_warps"], present.get("num_stages", 3))
                yield (
                    "x".join(map(str, shape)),
                    name,
                    f"{warps} warps, {stages} stages",
                    f"{time:.1f}",
                    "",
                    int(same),
                )
            launch.constants.clear()
            launch.constants.update(present)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="write the CSV here, too")
    parser.add_argument("--shapes", default=SHAPES, help="batch x rows x columns of the products")
    arguments = parser.parse_args()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {datetime.date.today()}")
    with contextlib.ExitStack() as stack:
        outputs = [
            sys.stdout,
            *([stack.enter_context(arguments.out.open("w"))] if arguments.out else []),
        ]
        for row in itertools.chain([HEAD], products(arguments.shapes), whole_iterations()):
            for output in outputs:
                csv.writer(output, lineterminator="\n").writerow(row)
                output.flush()


if __name__ == "__main__":
    main()
