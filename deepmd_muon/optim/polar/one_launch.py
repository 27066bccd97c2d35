"""Launches of the kernels that perform whole iterations; tables are created once per set of shapes."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from deepmd_muon.optim.cuda import try_record
from deepmd_muon.optim.polar.dispatch import Geometry, geometry_of
from deepmd_muon.optim.polar.kernels.shared import MAX_PROGRAMS, strips, tiles
from deepmd_muon.optim.polar.kernels.whole import TILES, small_matrices
from deepmd_muon.optim.polar.schedules import Coefficients
from deepmd_muon.optim.polar.tables import (
    AddressTable,
    Inputs,
    Launch,
    LaunchSet,
    MatrixLocation,
    Span,
    StartLaunch,
    captured_addresses,
)

_KINDS = {torch.float32: 0, torch.float64: 1, torch.float16: 2, torch.bfloat16: 3}
_STRIPS = (64, 128, 256)  # most rows of each kind of matrices that are divided into strips
_TILE = 64  # sizes are padded to multiples of it
# Programs that fit on one multiprocessor, limited by registers: of 256 threads, and of 128, with 255 registers each.
_STRIPS_AT_ONCE, _TILES_AT_ONCE = 1, 2
# Launches with up to this many elements are recorded; with more, the device takes longer than the host.
_RECORDED = 4 * 2**20
# Bound on the recordings of one launch set: if more sets alternate than the cache holds, recording costs more than it
# saves.
_MAX_RECORDINGS = 8


# Captured graphs, whose lifetime is unknown, read the tables of these launch sets at each replay.
_CAPTURED: set[LaunchSet] = set()


def run_launches(
    name: str,
    start: StartLaunch,
    matrices: Sequence[Tensor],
    coefficients: Coefficients,
    *,
    with_results: bool = True,
) -> list[Tensor]:
    """Orthogonalize batches (b, m, n) of any strides in as few launches of `name` as the device allows.

    The float32 results (b, m, n) are parts of one new tensor. The second call records the launches of small matrices;
    it and later calls replay them. Without results nothing is recorded.
    """
    device = matrices[0].device
    matrices = [readable(x) for x in matrices]
    plan = launches_for(name, geometry_of(matrices), device)
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    capturing = _capturing(device)
    if capturing:
        _CAPTURED.add(plan)
        addresses = captured_addresses(matrices)
    else:
        if stream not in plan.addresses:
            plan.addresses[stream] = AddressTable(len(matrices), device)
        addresses = plan.addresses[stream].of(matrices)
    recording = None
    small = device.type == "cuda" and plan.out_size <= _RECORDED and with_results
    if small and not capturing and plan.recordings <= _MAX_RECORDINGS:
        if (stream, coefficients) in plan.seen:
            recording = _recording(plan, start, coefficients, stream)
        plan.seen.add((stream, coefficients))  # the first call compiles the kernels
    if not with_results:
        out = torch.empty(0, dtype=torch.float32, device=device)
        for launch in plan.launches:
            start(name, launch, Inputs(addresses, matrices), coefficients, out)
        return []
    if recording is None:
        out = _launch_all(plan, start, Inputs(addresses, matrices), coefficients)
    else:
        graph, kept = recording
        graph.replay()
        out = kept.clone()
    return plan.results(out, matrices)


def _capturing(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def _launch_all(
    plan: LaunchSet, start: StartLaunch, inputs: Inputs, coefficients: Coefficients
) -> Tensor:
    out = torch.empty(plan.out_size, dtype=torch.float32, device=inputs.addresses.device)
    for launch in plan.launches:
        start(plan.name, launch, inputs, coefficients, out)
    return out


@functools.lru_cache(maxsize=8)  # each keeps its workspace, at most a few hundred MiB
def _recording(
    plan: LaunchSet, start: StartLaunch, coefficients: Coefficients, stream: int
) -> tuple[torch.cuda.CUDAGraph, Tensor] | None:
    """Record all launches of a launch set for one stream; return None if that fails."""
    plan.recordings += 1
    inputs = Inputs(plan.addresses[stream].table, None)
    return try_record(
        lambda: _launch_all(plan, start, inputs, coefficients), inputs.addresses.device, plan.name
    )


def readable(x: Tensor) -> Tensor:
    """Return a batch of matrices that is contiguous along rows or columns, as the kernels read it."""
    return x if x.stride(2) == 1 or x.stride(1) == 1 or min(x.shape[1:]) == 1 else x.contiguous()


def start_launch(
    name: str, launch: Launch, inputs: Inputs, coefficients: Coefficients, out: Tensor
) -> None:
    """Start one launch of the implementation `name`; see `StartLaunch`."""
    steps = on_device(coefficients, out.device)
    constants = {**launch.constants, "STEPS": len(coefficients)}
    if name == "whole":
        small_matrices[(launch.grid,)](launch.table, inputs.addresses, steps, out, **constants)
        return
    device = out.device
    half = torch.empty(launch.half, dtype=torch.float16, device=device)
    sums = torch.empty(2 * launch.grid, dtype=torch.float64, device=device)
    counters = torch.zeros(launch.matrices, dtype=torch.int32, device=device)
    if name == "strips":
        workspace: tuple[Tensor, ...] = (half, sums, counters)
        kernel = strips
    else:
        workspace = (
            torch.empty(launch.single, dtype=torch.float32, device=device),
            half,
            sums,
            counters,
        )
        kernel = tiles
    kernel[(launch.grid,)](
        launch.programs,
        launch.table,
        inputs.addresses,
        steps,
        out,
        *workspace,
        **constants,
        launch_cooperative_grid=True,
    )


@functools.cache  # kept, because graphs read them; there is one per schedule
def on_device(coefficients: Coefficients, device: torch.device) -> Tensor:
    """Return coefficients as a float32 tensor (steps, 3), copied to the device once."""
    return torch.tensor(coefficients, dtype=torch.float32, device=device)


@functools.lru_cache(maxsize=64)
def launches_for(name: str, geometry: Geometry, device: torch.device) -> LaunchSet:
    """Create the tables and the layout of results for one set of shapes."""
    pieces: list[MatrixLocation] = []
    places = []
    out = 0
    for tensor, (shape, strides, dtype) in enumerate(geometry):
        places.append(out)
        batch, rows, columns = shape
        order = (1, 0) if rows > columns else (0, 1)
        m, n = (shape[1 + i] for i in order)
        down, across = (strides[1 + i] for i in order)
        transposed = across != 1 and n > 1
        stride = across if transposed else down
        out_row, out_column = ((columns, 1)[i] for i in order)
        pieces += [
            MatrixLocation(
                tensor,
                _KINDS[dtype],
                i * strides[0],
                m,
                n,
                stride,
                transposed,
                out + i * m * n,
                out_row,
                out_column,
            )
            for i in range(batch)
        ]
        out += -(-batch * m * n // 4) * 4  # each tensor's results start at 16 bytes
    make = {"whole": _whole, "strips": _strips, "tiles": _tiles, "symmetric": _batches_by_shape}[
        name
    ]
    return LaunchSet(name, make(pieces, device), out, places)


def _batches_by_shape(pieces: Sequence[MatrixLocation], device: torch.device) -> list[Launch]:
    """Create one launch per shape."""
    groups: dict[tuple[int, int], list[MatrixLocation]] = {}
    for p in pieces:
        groups.setdefault((p.rows, p.columns), []).append(p)
    launches = []
    for (rows, columns), group in groups.items():
        counts = Counter(p.tensor for p in group)
        firsts = {p.tensor: p for p in reversed(group)}
        spans = [Span(n, counts[n], firsts[n].out, firsts[n].out_row == 1) for n in counts]
        table = torch.tensor([p.row() for p in group], dtype=torch.int64, device=device)
        launches.append(
            Launch(0, len(group), table, None, {"rows": rows, "columns": columns, "spans": spans})
        )
    return launches


def multiprocessors(device: torch.device) -> int:
    """Return the number of multiprocessors; 1 for Triton's interpreter."""
    return (
        torch.cuda.get_device_properties(device).multi_processor_count
        if device.type == "cuda"
        else 1
    )


def _whole(pieces: Sequence[MatrixLocation], device: torch.device) -> list[Launch]:
    """Put few matrices in one launch, which takes as long as its slowest program; many, in one per tile size."""
    numbered = []
    for p in pieces:  # each with the smallest tile that holds it
        fitting = [i for i, (mp, np) in enumerate(TILES) if p.rows <= mp and p.columns <= np]
        numbered.append((min(fitting, key=lambda i: TILES[i][0] * TILES[i][1]), p))
    numbered.sort(key=lambda pair: -pair[0])
    several = len(pieces) > 2 * multiprocessors(device)
    groups = (
        [[pair for pair in numbered if pair[0] == t] for t in range(len(TILES))]
        if several
        else [numbered]
    )
    launches = []
    for group in groups:
        if not group:
            continue
        used = {tile for tile, _ in group}
        table = torch.tensor(
            [piece.row(tile) for tile, piece in group], dtype=torch.int64, device=device
        )
        # The same number of warps for every tile size: results do not depend on the other matrices.
        constants = {
            "MASK": sum(1 << tile for tile in used),
            "ONLY": _only_kind(p for _, p in group),
            "num_warps": 8,
        }
        launches.append(Launch(len(group), len(group), table, None, constants))
    return launches


def _only_kind(pieces: Iterable[MatrixLocation]) -> int:
    """Return the kind of dtype of all matrices, so that kernels need no code for others; −1 for several kinds."""
    kinds = {piece.kind for piece in pieces}
    return kinds.pop() if len(kinds) == 1 else -1


def _strips(pieces: Sequence[MatrixLocation], device: torch.device) -> list[Launch]:
    """Give each matrix one program per strip of columns; narrow strips if all their programs run at once."""
    kinds = [next(i for i, most in enumerate(_STRIPS) if p.rows <= most) for p in pieces]
    capacity = _STRIPS_AT_ONCE * multiprocessors(device)
    # Triton's interpreter runs programs one after the other, without barriers: one strip takes all columns.
    all_columns = 1 << max(p.columns for p in pieces).bit_length() + 1
    for wide in (32, 64) if device.type == "cuda" else (all_columns,):
        strips = [wide // 2 if _STRIPS[kind] == 256 else wide for kind in kinds]
        owners = [-(-p.columns // strip) for p, strip in zip(pieces, strips, strict=True)]
        if sum(owners) <= capacity:
            break
    launches = []
    for group in _split_into_launches(owners, capacity):
        numbers = [kinds[i] for i in group]
        members = [pieces[i] for i in group]
        mask = sum(1 << kind for kind in set(numbers))
        constants = {
            "MASK": mask,
            "WIDE": wide,
            "ONLY": _only_kind(members),
            "num_warps": 8,
            "num_stages": 4,
        }
        sizes = [_STRIPS[kinds[i]] * (owners[i] * strips[i] + _STRIPS[kinds[i]]) for i in group]
        programs = [owners[i] for i in group]
        if device.type == "cuda":
            programs = _with_helpers(programs, numbers, capacity)
        launches.append(_cooperative(members, programs, [], sizes, constants, device, numbers))
    return launches


def _with_helpers(owners: Sequence[int], kinds: Sequence[int], capacity: int) -> list[int]:
    """Add programs that only compute tiles of X Xᵀ, tallest matrices first, if each tile then has its own."""
    programs = list(owners)
    for kind in sorted(set(kinds), reverse=True):
        for tile in (
            64,
            32,
        ):  # the kernel uses 64 × 64 tiles if it has fewer programs than 32 × 32 tiles
            side = _STRIPS[kind] // tile
            count = side * (side + 1) // 2
            members = [i for i, other in enumerate(kinds) if other == kind and programs[i] < count]
            if sum(programs) + sum(count - programs[i] for i in members) <= capacity:
                for i in members:
                    programs[i] = count
    return programs


def _tiles(pieces: Sequence[MatrixLocation], device: torch.device) -> list[Launch]:
    """Give each program the fewest tiles with which all matrices run at once; use small tiles if they fit."""
    padded = [(-(-p.rows // _TILE) * _TILE, -(-p.columns // _TILE) * _TILE) for p in pieces]
    capacity = _TILES_AT_ONCE * multiprocessors(device)
    for tile, symmetric in ((32, 32), (64, 32), (64, 64)):
        halves = [m // symmetric for m, _ in padded]
        most = [
            max(m * n // tile**2, h * (h + 1) // 2)
            for (m, n), h in zip(padded, halves, strict=True)
        ]
        if sum(most) <= (capacity // 2 if tile == 32 else capacity):
            break
    each = max(-(-sum(most) // capacity), *(-(-tiles // int(MAX_PROGRAMS.value)) for tiles in most))
    while sum(-(-tiles // each) for tiles in most) > max(capacity, len(most)):
        each += 1
    # Triton's interpreter runs programs one after the other, without barriers.
    programs = [-(-tiles // each) if device.type == "cuda" else 1 for tiles in most]
    constants = {
        "T": tile,
        "G": symmetric,
        "K": _TILE,
        "ONLY": _only_kind(pieces),
        "num_warps": 4,
        "num_stages": 4,
    }
    launches = []
    for group in _split_into_launches(programs, capacity):
        singles = [padded[i][0] * padded[i][1] for i in group]
        workspace = [2 * (padded[i][0] * padded[i][1] + padded[i][0] ** 2) for i in group]
        members, counts = [pieces[i] for i in group], [programs[i] for i in group]
        launches.append(_cooperative(members, counts, singles, workspace, constants, device))
    return launches


def _split_into_launches(programs: Sequence[int], capacity: int) -> list[list[int]]:
    """Distribute matrices over launches whose programs all run at once."""
    groups: list[tuple[int, list[int]]] = []
    for i, count in enumerate(programs):
        if not groups or groups[-1][0] + count > capacity:
            groups.append((0, []))
        total, members = groups[-1]
        groups[-1] = (total + count, [*members, i])
    return [members for _, members in groups]


def _cooperative(
    pieces: Sequence[MatrixLocation],
    programs: Sequence[int],
    singles: Sequence[int],
    halves: Sequence[int],
    constants: dict[str, Any],
    device: torch.device,
    numbers: Sequence[int] | None = None,
) -> Launch:
    """Create a launch whose programs share matrices; its table `programs` has (matrix, rank, count) per program."""
    kinds = numbers or [0] * len(pieces)
    rows = [
        piece.row(kinds[i], sum(singles[:i]), sum(halves[:i])) for i, piece in enumerate(pieces)
    ]
    shared = [(i, rank, count) for i, count in enumerate(programs) for rank in range(count)]
    return Launch(
        len(shared),
        len(pieces),
        torch.tensor(rows, dtype=torch.int64, device=device),
        torch.tensor(shared, dtype=torch.int32, device=device),
        constants,
        max(sum(singles), 1),
        sum(halves),
    )
