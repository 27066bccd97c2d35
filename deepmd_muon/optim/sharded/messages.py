"""One rank's part of a plan: the pieces in each message that it sends and receives.

There is no communication.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple, cast

from deepmd_muon.optim.routing.views import Axis
from deepmd_muon.optim.rules.interface import StateTensor
from deepmd_muon.optim.sharded.layout import (
    Overlap,
    Region,
    block_bounds,
    lines_layout,
    overlap,
    regions_by_rank,
)
from deepmd_muon.optim.sharded.plan import LEGS, Domain, Job, Leg, Plan, PlannedParameter

# ----- messages ----------------------------------------------------------------------------------


class Message(NamedTuple):
    """One rank's pieces in one message, of `words` words.

    For each piece: the position of its job in the exchange's jobs, the number of rules' values for
    all its lines together, and the number of elements.
    """

    jobs: tuple[int, ...]
    line_values: tuple[int, ...]
    elements: tuple[int, ...]
    words: int


@dataclasses.dataclass(frozen=True)
class RankMessages:
    """One rank's messages in one exchange of one domain."""

    # Ascending: all ranks of the domain, itself included, or of a portion only itself.
    peers: tuple[int, ...]
    jobs: tuple[Job, ...]  # in which the rank takes part
    owned: tuple[int, ...]  # positions in `jobs` of the jobs that it owns
    sent: dict[Leg, list[Message]]  # to every peer
    received: dict[Leg, list[Message]]  # from every peer


@dataclasses.dataclass(frozen=True)
class Stack:
    """Matrices of one parameter group and shape that a rank orthogonalizes together."""

    group: int
    shape: tuple[int, int]
    jobs: tuple[int, ...]  # positions in the exchange's jobs

    @property
    def elements(self) -> int:
        """Number of elements of all matrices."""
        rows, columns = self.shape
        return len(self.jobs) * rows * columns


def local_messages(plan: Plan, domain: Domain, rank: int) -> list[RankMessages]:
    """Return a rank's messages to itself: the jobs that stay on it, in portions.

    A portion has at most the size of a bucket.
    """
    portions: list[list[Job]] = []
    room = 0
    for job in domain.jobs:
        if job.bucket is None and job.owner == rank:
            size = sum(job.sources.values()) * domain.itemsize
            if size > room or not portions:
                portions.append([])
                room = plan.settings.bucket_bytes
            portions[-1].append(job)
            room -= size
    return [rank_messages(plan, domain, portion, (rank,), rank) for portion in portions]


def rank_messages(
    plan: Plan, domain: Domain, jobs: Sequence[Job], peers: tuple[int, ...], rank: int
) -> RankMessages:
    """Sort the pieces of these jobs into messages, in the same order for sender and receiver."""
    jobs_of_owner: dict[int, list[int]] = defaultdict(list)
    for number, job in enumerate(jobs):
        jobs_of_owner[job.owner].append(number)

    def message(leg: Leg, *, holder: int, owner: int) -> Message:
        """Return the message between a holder and an owner, in either direction."""
        numbers = [i for i in jobs_of_owner[owner] if holder in jobs[i].holders(leg)]
        line_values = tuple(jobs[i].line_values.get(holder, 0) for i in numbers)
        elements = tuple(jobs[i].holders(leg)[holder] for i in numbers)
        words = domain.message_words(
            leg,
            pieces=len(numbers),
            line_values=sum(line_values),
            elements=sum(elements),
            settings=plan.settings,
        )
        return Message(tuple(numbers), line_values, elements, words)

    as_holder = {leg: [message(leg, holder=rank, owner=peer) for peer in peers] for leg in LEGS}
    as_owner = {leg: [message(leg, holder=peer, owner=rank) for peer in peers] for leg in LEGS}
    return RankMessages(
        peers=peers,
        jobs=tuple(jobs),
        owned=tuple(jobs_of_owner[rank]),
        sent={"gather": as_holder["gather"], "return": as_owner["return"]},
        received={"gather": as_owner["gather"], "return": as_holder["return"]},
    )


# ----- pieces ------------------------------------------------------------------------------------


class Piece(NamedTuple):
    """The part of a block that one rank holds."""

    parameter: int  # position in the plan
    block: int
    batch: int  # index of the matrix in the rank's local view; -1 if the rank has none of it
    rows: Overlap  # in the local view, and in the block
    columns: Overlap

    @property
    def elements(self) -> int:
        """Number of elements."""
        return self.rows.size * self.columns.size if self.batch >= 0 else 0

    @property
    def local_index(self) -> tuple[int, slice, slice]:
        """Index of the piece in the rank's local view, (batch, rows, columns)."""
        rows = slice(self.rows.start, self.rows.stop)
        columns = slice(self.columns.start, self.columns.stop)
        return self.batch, rows, columns


def piece_of(plan: Plan, parameter: int, block: int, rank: int, leg: Leg) -> Piece:
    """Return a rank's piece of a block's momentum, for the gather, or of its update."""
    p = plan.parameters[parameter]
    return _piece_in(regions_by_rank(p.shape, p.view, p.layout_of(leg))[rank], p, parameter, block)


def _piece_in(region: Region, p: PlannedParameter, parameter: int, block: int) -> Piece:
    """Return the piece of a block that a rank with this region of the parameter has."""
    bounds_of_parts = block_bounds(p.view)
    matrix, part_number = divmod(block, len(bounds_of_parts))
    bounds = bounds_of_parts[part_number]
    in_batch = overlap(region.batch, matrix, matrix + 1)
    return Piece(
        parameter=parameter,
        block=block,
        batch=in_batch.start if in_batch.size else -1,
        rows=overlap(region.rows, bounds.row_start, bounds.row_stop),
        columns=overlap(region.columns, bounds.column_start, bounds.column_stop),
    )


class Rectangle(NamedTuple):
    """Adjacent rows and columns of a piece, as indices of the piece and of its block."""

    in_piece: tuple[slice, slice]
    in_block: tuple[slice, slice]


def rectangles(piece: Piece) -> list[Rectangle]:
    """Return the rectangles of a piece.

    Strided shards and folded dimensions give several.
    """
    rectangles_of_piece = []
    row = 0
    for row_start, row_stop in piece.rows.runs:
        next_row = row + row_stop - row_start
        column = 0
        for column_start, column_stop in piece.columns.runs:
            next_column = column + column_stop - column_start
            rectangles_of_piece.append(
                Rectangle(
                    in_piece=(slice(row, next_row), slice(column, next_column)),
                    in_block=(slice(row_start, row_stop), slice(column_start, column_stop)),
                )
            )
            column = next_column
        row = next_row
    return rectangles_of_piece


def local_shape(plan: Plan, parameter: int, rank: int, leg: Leg) -> tuple[int, int, int]:
    """Return the shape (batch, rows, columns) of a rank's local momentum, or of its elements."""
    p = plan.parameters[parameter]
    return regions_by_rank(p.shape, p.view, p.layout_of(leg))[rank].shape


def local_parts(plan: Plan, parameter: int, rank: int) -> list[tuple[slice, slice]]:
    """Return, for each part of a matrix, its rows and columns in the local momentum."""
    p = plan.parameters[parameter]
    slices = []
    # The first blocks are the parts of the first matrix; the parts of all matrices are alike.
    for block in range(len(p.view.block_shapes)):
        _, rows, columns = piece_of(plan, parameter, block, rank, "gather").local_index
        slices.append((rows, columns))
    return slices


class Lines(NamedTuple):
    """The part of a rule's state per row or column of a block that one rank keeps.

    Attributes
    ----------
    shape
        (batch, lines, blocks per line, values) of the rank's local state tensor.
    batch, inside, part_number
        Indices of the block's lines in this tensor; `inside` also has their indices in the block.
        `batch` is -1 if the rank has none of the matrix.
    values
        Numbers of each line; shorter than the last dimension if other blocks have longer vectors.
    """

    shape: tuple[int, int, int, int]
    batch: int
    inside: Overlap
    part_number: int
    values: int

    @property
    def length(self) -> int:
        """Number of values of all lines."""
        return self.inside.size * self.values if self.batch >= 0 else 0


def lines_of(plan: Plan, parameter: int, block: int, rank: int, tensor: StateTensor) -> Lines:
    """Return the rows or columns of a block that a rank keeps the values of."""
    p = plan.parameters[parameter]
    of = cast("Axis", tensor.extent)
    layout = lines_layout(p.shape, p.view, p.layout_of("gather"), of)
    region = regions_by_rank(p.shape, p.view, layout)[rank]
    piece = _piece_in(region, p, parameter, block)
    batch, rows, columns = region.shape
    blocks_per_line = p.view.repeats(of)
    lengths = tensor.lengths(p.view)
    part_number = block % len(lengths)
    return Lines(
        shape=(batch, rows if of == "rows" else columns, blocks_per_line, max(lengths)),
        batch=piece.batch,
        inside=piece.rows if of == "rows" else piece.columns,
        part_number=part_number if blocks_per_line > 1 else 0,
        values=lengths[part_number],
    )
