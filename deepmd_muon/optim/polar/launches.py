"""Tables and launches of the kernels; the results of a call share one tensor.

| implementation | launches                                                                |
|----------------|-------------------------------------------------------------------------|
| `whole`        | one program per matrix                                                  |
| `strips`       | cooperative: several programs share a matrix, each has a strip of it    |
| `symmetric`    | one `Launch` per shape, with several kernels: see `symmetric_launch`    |

The tables of the last sets of shapes are kept for later calls.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from deepmd_muon.optim.cuda import is_capturing
from deepmd_muon.optim.polar.dispatch import Geometry, geometry_of
from deepmd_muon.optim.polar.kernels.shared import strips
from deepmd_muon.optim.polar.kernels.whole import TILES, small_matrices
from deepmd_muon.optim.polar.schedules import Coefficients
from deepmd_muon.optim.polar.tables import (
    EqualShapes,
    Inputs,
    Launch,
    LaunchSet,
    MatrixLocation,
    Span,
    StartLaunch,
    captured_addresses,
)

# ----- calls -------------------------------------------------------------------------------------

# Captured graphs, whose lifetime is unknown, read the tables of these launch sets at each replay:
# the sets must outlive their entry in the cache of `launches_for`.
_CAPTURED: set[LaunchSet] = set()


def run_launches(
    name: str,
    start: StartLaunch,
    matrices: Sequence[Tensor],
    coefficients: Coefficients,
    *,
    with_results: bool = True,
) -> list[Tensor]:
    """Orthogonalize batches (b, m, n) of any strides by the launches of the implementation `name`.

    `start` starts one of them. The float32 results (b, m, n) are parts of one new tensor; without
    `with_results`, `start` consumes them and the list is empty.
    """
    device = matrices[0].device
    matrices = [readable(x) for x in matrices]
    launch_set = launches_for(name, geometry_of(matrices), device)
    if is_capturing():
        _CAPTURED.add(launch_set)
    inputs = Inputs(captured_addresses(matrices), matrices)
    out_size = launch_set.out_size if with_results else 0
    out = torch.empty(out_size, dtype=torch.float32, device=device)
    for launch in launch_set.launches:
        start(launch, inputs, coefficients, out)
    return launch_set.results(out, matrices) if with_results else []


def readable(x: Tensor) -> Tensor:
    """Return a batch of matrices as kernels read it: fp32, contiguous along rows or columns."""
    x = x.float()
    if x.stride(2) == 1 or x.stride(1) == 1 or min(x.shape[1:]) == 1:
        return x
    return x.contiguous()


def start_launch(
    name: str, launch: Launch, inputs: Inputs, coefficients: Coefficients, out: Tensor
) -> None:
    """Start one launch of `whole` or `strips`; see `StartLaunch`."""
    device = out.device
    arguments: dict[str, Any] = {
        "table": launch.table,
        "addresses": inputs.addresses,
        "coefficients": on_device(coefficients, device),
        "out": out,
        "STEPS": len(coefficients),
        **launch.constants,
    }
    if name == "whole":
        small_matrices[(launch.grid,)](**arguments)
        return
    strips[(launch.grid,)](
        programs=launch.programs,
        workspace=torch.empty(launch.workspace, dtype=torch.float16, device=device),
        sums=torch.empty(launch.grid, dtype=torch.float64, device=device),
        counters=torch.zeros(launch.matrices, dtype=torch.int32, device=device),
        # Programs wait for each other, so all must run at the same time.
        launch_cooperative_grid=True,
        **arguments,
    )


@functools.cache  # kept, because graphs read them; there are few schedules and programs
def on_device(coefficients: Coefficients, device: torch.device) -> Tensor:
    """Return coefficients, or weights of products, as float32 (n, 3), copied to the device once."""
    return torch.tensor(coefficients, dtype=torch.float32, device=device)


# ----- launch sets -------------------------------------------------------------------------------


@functools.lru_cache(maxsize=64)
def launches_for(name: str, geometry: Geometry, device: torch.device) -> LaunchSet:
    """Create the tables and the layout of results for one set of shapes."""
    locations: list[MatrixLocation] = []
    out_places = []
    out_size = 0
    for tensor, (shape, strides, _) in enumerate(geometry):
        out_places.append(out_size)
        count = shape[0]
        tall = shape[1] > shape[2]
        row_axis, column_axis = (2, 1) if tall else (1, 2)  # rows are the smaller dimension
        rows = shape[row_axis]
        columns = shape[column_axis]
        transposed = strides[column_axis] != 1 and columns > 1
        locations += [
            MatrixLocation(
                tensor=tensor,
                offset=i * strides[0],
                rows=rows,
                columns=columns,
                stride=strides[column_axis if transposed else row_axis],
                transposed=transposed,
                out=out_size + i * rows * columns,
                out_row=1 if tall else columns,
                out_column=rows if tall else 1,
            )
            for i in range(count)
        ]
        out_size += round_up(count * rows * columns, 4)  # results start at multiples of 16 bytes
    make_launches = {
        "whole": _whole_launches,
        "strips": _strips_launches,
        "symmetric": _symmetric_launches,
    }[name]
    return LaunchSet(name, make_launches(locations, device), out_size, out_places)


def round_up(size: int, step: int) -> int:
    """Return the smallest multiple of `step` that is at least `size`."""
    return -(-size // step) * step


def _symmetric_launches(locations: Sequence[MatrixLocation], device: torch.device) -> list[Launch]:
    """Create one launch per shape."""
    by_shape: dict[tuple[int, int], list[MatrixLocation]] = {}
    for location in locations:
        by_shape.setdefault((location.rows, location.columns), []).append(location)
    launches = []
    for (rows, columns), members in by_shape.items():
        spans = []
        for tensor, group in itertools.groupby(members, key=lambda location: location.tensor):
            first, *others = group
            spans.append(
                Span(
                    tensor=tensor,
                    count=1 + len(others),
                    place=first.out,
                    transposed=first.out_row == 1,
                )
            )
        table = [location.row() for location in members]
        launches.append(
            Launch(
                matrices=len(members),
                table=torch.tensor(table, dtype=torch.int64, device=device),
                shapes=EqualShapes(rows, columns, spans),
            )
        )
    return launches


def _whole_launches(locations: Sequence[MatrixLocation], device: torch.device) -> list[Launch]:
    """Put few matrices in one launch, and many in one launch per tile size.

    A launch takes as long as its slowest program.
    """
    by_tile: dict[int, list[MatrixLocation]] = {}
    for location in locations:
        by_tile.setdefault(_smallest_tile(location), []).append(location)
    if len(locations) > 2 * multiprocessors(device):
        tiles_of_launches = [[tile] for tile in sorted(by_tile)]
    else:
        tiles_of_launches = [sorted(by_tile, reverse=True)]  # programs that take longer start first
    launches = []
    for tiles in tiles_of_launches:
        table = [location.row(tile) for tile in tiles for location in by_tile[tile]]
        launches.append(
            Launch(
                grid=len(table),
                matrices=len(table),
                table=torch.tensor(table, dtype=torch.int64, device=device),
                constants={
                    "MASK": sum(1 << tile for tile in tiles),
                    # The same for every tile size: results do not depend on the other matrices.
                    "num_warps": 8,
                },
            )
        )
    return launches


def multiprocessors(device: torch.device) -> int:
    """Return the number of multiprocessors; 1 for Triton's interpreter."""
    if device.type != "cuda":
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count


def _smallest_tile(location: MatrixLocation) -> int:
    """Return the number of the smallest tile that holds a matrix."""
    fitting = [
        i
        for i, (rows, columns) in enumerate(TILES)
        if location.rows <= rows and location.columns <= columns
    ]
    return min(fitting, key=lambda i: TILES[i][0] * TILES[i][1])


# ----- launches whose programs share matrices ----------------------------------------------------

# Matrices of kind k have at most _HEIGHTS[k] rows; `shared` has the same kinds.
_HEIGHTS = (64, 128, 256)


class _SharedMatrix(NamedTuple):
    """A matrix that several programs share."""

    location: MatrixLocation
    n_programs: int
    workspace_size: int  # in fp16 elements
    kind: int


def _strips_launches(locations: Sequence[MatrixLocation], device: torch.device) -> list[Launch]:
    """Give each matrix one program per strip of columns.

    Strips are narrow if all programs then run at once.
    """
    # One program per multiprocessor: 256 threads with 255 registers each fill it.
    capacity = multiprocessors(device)
    if device.type == "cuda":
        widths: tuple[int, ...] = (32, 64)
    else:
        # Triton's interpreter runs programs one after the other, without barriers: one strip takes
        # all columns, also if its width is halved.
        most_columns = max(location.columns for location in locations)
        widths = (2 << most_columns.bit_length(),)
    for width in widths:  # the last one, the widest, is taken in any case
        matrices = [_in_strips(location, width) for location in locations]
        if sum(matrix.n_programs for matrix in matrices) <= capacity:
            break
    launches = []
    for group in _split_into_launches(matrices, capacity):
        constants = {
            "MASK": sum(1 << kind for kind in {matrix.kind for matrix in group}),
            "WIDE": width,
            "num_warps": 8,
            "num_stages": 4,
        }
        members = _with_helpers(group, capacity) if device.type == "cuda" else group
        launches.append(_cooperative(members, constants, device))
    return launches


def _in_strips(location: MatrixLocation, width: int) -> _SharedMatrix:
    """Divide a matrix into strips of `width` columns, or of width/2 for the tallest kind."""
    kind = next(i for i, height in enumerate(_HEIGHTS) if location.rows <= height)
    height = _HEIGHTS[kind]
    strip = width // 2 if height == _HEIGHTS[-1] else width
    n_strips = -(-location.columns // strip)
    return _SharedMatrix(
        location=location,
        n_programs=n_strips,
        workspace_size=height * (n_strips * strip + height),  # X and R
        kind=kind,
    )


def _with_helpers(matrices: Sequence[_SharedMatrix], capacity: int) -> list[_SharedMatrix]:
    """Add *helpers*, programs without a strip, until each tile of X Xᵀ has a program.

    A kind gets helpers if all programs still run at once; the tallest kind comes first.
    """
    n_programs = [matrix.n_programs for matrix in matrices]
    for kind in sorted({matrix.kind for matrix in matrices}, reverse=True):
        # The kernel uses 64 × 64 tiles if it has fewer programs than 32 × 32 tiles.
        for tile in (64, 32):
            side = _HEIGHTS[kind] // tile
            n_tiles = side * (side + 1) // 2
            helped = [
                i
                for i, matrix in enumerate(matrices)
                if matrix.kind == kind and n_programs[i] < n_tiles
            ]
            if sum(n_programs) + sum(n_tiles - n_programs[i] for i in helped) <= capacity:
                for i in helped:
                    n_programs[i] = n_tiles
    return [matrix._replace(n_programs=n) for matrix, n in zip(matrices, n_programs, strict=True)]


def _split_into_launches(
    matrices: Sequence[_SharedMatrix], capacity: int
) -> list[list[_SharedMatrix]]:
    """Distribute matrices over launches whose programs all run at once."""
    launches: list[list[_SharedMatrix]] = []
    n_programs = 0
    for matrix in matrices:
        if not launches or n_programs + matrix.n_programs > capacity:
            launches.append([])
            n_programs = 0
        launches[-1].append(matrix)
        n_programs += matrix.n_programs
    return launches


def _cooperative(
    matrices: Sequence[_SharedMatrix], constants: dict[str, Any], device: torch.device
) -> Launch:
    """Create a launch whose programs share matrices; all of them run at once."""
    table = []
    programs = []  # rows of `Launch.programs`
    workspace_size = 0
    for i, matrix in enumerate(matrices):
        table.append(matrix.location.row(tile=matrix.kind, workspace_offset=workspace_size))
        programs += [(i, rank, matrix.n_programs) for rank in range(matrix.n_programs)]
        workspace_size += matrix.workspace_size
    return Launch(
        grid=len(programs),
        matrices=len(matrices),
        table=torch.tensor(table, dtype=torch.int64, device=device),
        programs=torch.tensor(programs, dtype=torch.int32, device=device),
        constants=constants,
        workspace=workspace_size,
    )
