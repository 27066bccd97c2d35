"""Pieces of blocks: where a rank's elements are in its local tensor, and in the block.

For example, ranks 0 and 1 have a parameter of shape (8, 6). Its rows are in two equal parts, and a
strided shard (`ShardPlacement(0, stride=2)`) divides each of them among the ranks. Rank 1 has rows
2, 3, 6 and 7. Its piece of the only block is as follows; intervals exclude their end:

    batch_index    0
    rows           0 … 4 of the local tensor, runs (2, 4) and (6, 8) of the block
    columns        0 … 6 of the local tensor, run (0, 6) of the block

It has two rectangles: rows 0 … 2 of the piece are rows 2 … 4 of the block, and 2 … 4 are 6 … 8.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from deepmd_muon.optim.sharded.layout import (
    MatrixLayout,
    Overlap,
    Runs,
    block_bounds,
    overlap,
    regions_by_rank,
)
from deepmd_muon.optim.sharded.plan import Leg, Plan


class Piece(NamedTuple):
    """The part of a block that one rank holds."""

    parameter: int  # position in the plan
    block: int  # number in the parameter: matrix · (parts of each matrix) + part
    rank: int  # that holds the piece
    # Index of the matrix in the local tensor (batch, rows, columns). None if the batch of this rank
    # does not have the matrix; a piece with an index may have no elements, too.
    batch_index: int | None
    rows: Overlap  # in the local tensor, and in the block
    columns: Overlap

    @property
    def elements(self) -> int:
        """Number of elements."""
        return 0 if self.batch_index is None else self.rows.size * self.columns.size

    @property
    def local_index(self) -> tuple[int, slice, slice]:
        """Index of a piece with elements in the local tensor (batch, rows, columns)."""
        assert self.batch_index is not None
        return self.batch_index, self.rows.local_slice, self.columns.local_slice


def piece_of(plan: Plan, parameter: int, block: int, rank: int, leg: Leg) -> Piece:
    """Return a rank's piece of a block.

    In the gather it is a piece of the momentum, in the return a piece of what the rank updates.
    """
    return piece_in(plan.parameters[parameter].matrices(leg), parameter, block, rank)


def piece_in(matrices: MatrixLayout, parameter: int, block: int, rank: int) -> Piece:
    """Return the piece of a block that a rank has in this layout of the parameter."""
    region = regions_by_rank(matrices)[rank]
    bounds_of_parts = block_bounds(matrices.view)
    matrix, part_number = divmod(block, len(bounds_of_parts))
    bounds = bounds_of_parts[part_number]
    in_batch = overlap(region.batch, matrix, matrix + 1)
    return Piece(
        parameter=parameter,
        block=block,
        rank=rank,
        batch_index=in_batch.start if in_batch.size else None,
        rows=overlap(region.rows, bounds.row_start, bounds.row_stop),
        columns=overlap(region.columns, bounds.column_start, bounds.column_stop),
    )


class Rectangle(NamedTuple):
    """Adjacent rows and columns of a piece, as indices of the piece and of its block."""

    in_piece: tuple[slice, slice]
    in_block: tuple[slice, slice]


def rectangles(piece: Piece) -> Iterator[Rectangle]:
    """Yield the rectangles of a piece: none without elements, and one for a plain shard.

    Strided shards and folded dimensions give several.
    """
    if not piece.elements:
        return
    for rows_in_piece, rows_in_block in run_slices(piece.rows.runs):
        for columns_in_piece, columns_in_block in run_slices(piece.columns.runs):
            yield Rectangle((rows_in_piece, columns_in_piece), (rows_in_block, columns_in_block))


def run_slices(runs: Runs) -> Iterator[tuple[slice, slice]]:
    """Yield each run as a slice of the concatenated runs, and as a slice of the block."""
    position = 0
    for start, stop in runs:
        end = position + stop - start
        yield slice(position, end), slice(start, stop)
        position = end


def local_shape(plan: Plan, parameter: int, rank: int, leg: Leg) -> tuple[int, int, int]:
    """Return the shape (batch, rows, columns) of a rank's local tensor.

    In the gather it is the momentum, in the return what the rank updates.
    """
    return regions_by_rank(plan.parameters[parameter].matrices(leg))[rank].shape


def part_slices_of(plan: Plan, parameter: int, rank: int) -> list[tuple[slice, slice]]:
    """Return, for each part of a matrix, its rows and columns in the local momentum."""
    planned = plan.parameters[parameter]
    slices = []
    # The first blocks are the parts of the first matrix; the parts of all matrices are alike.
    for block in range(len(planned.view.block_shapes)):
        piece = piece_of(plan, parameter, block, rank, "gather")
        slices.append((piece.rows.local_slice, piece.columns.local_slice))
    return slices
