"""One rank's part of an exchange: its jobs, its pieces of blocks, and their places in messages.

There is no communication. A message is a row of 8-byte words:

    header of piece 0 | header of piece 1 | … | lines of piece 0 | … | elements of piece 0 | …

A header has three kinds of words: whether there is a gradient (`PRESENCE`), the rules' state per
block (from `FIRST_STATE` on) and, in the gather, the rules' sums (at the end). Lines are the rules'
state per row or column. Elements are in the wire type, all planes of a piece one after the other,
padded at the end of the message to whole words. Buffers are float64 tensors, and elements are views
of them, so that one collective carries everything.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple, cast

import torch
from torch import Tensor

from deepmd_muon.optim.routing.views import Axis
from deepmd_muon.optim.rules.interface import StateTensor
from deepmd_muon.optim.sharded.layout import (
    MatrixLayout,
    Overlap,
    RankSet,
    Runs,
    block_bounds,
    overlap,
    regions_by_rank,
    with_whole_lines,
)
from deepmd_muon.optim.sharded.plan import WORD_BYTES, Domain, Job, Leg, Plan

# Words of a header.
# Above 0, in the gather, if the piece has a gradient; in the return, if any piece of its block has.
PRESENCE = 0
FIRST_STATE = 1

_FULL_PRECISION = {4: torch.float32, 8: torch.float64}  # by bytes of an element
_NARROW_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}


# ----- jobs --------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class RankJobs:
    """The jobs of one bucket, or portion, in which a rank takes part."""

    plan: Plan
    domain: Domain
    bucket: int | None  # its number; None for a portion
    jobs: tuple[Job, ...]
    rank: int

    @property
    def peers(self) -> RankSet:
        """The ranks at the other end of its messages, ascending; itself included."""
        return (self.rank,) if self.bucket is None else self.domain.ranks

    @property
    def full_dtype(self) -> torch.dtype:
        """Element type of matrices and updates outside messages."""
        return _FULL_PRECISION[self.domain.itemsize]


def travelling_jobs(plan: Plan, domain: Domain, rank: int) -> list[RankJobs]:
    """Return a rank's jobs of every bucket of its domain.

    A bucket without jobs is among them: the rank joins its collectives all the same.
    """
    jobs_of_bucket: list[list[Job]] = [[] for _ in range(domain.n_buckets)]
    for job in domain.jobs:
        takes_part = rank == job.owner or rank in job.sources or rank in job.destinations
        if job.bucket is not None and takes_part:
            jobs_of_bucket[job.bucket].append(job)
    return [
        RankJobs(plan, domain, number, tuple(jobs), rank)
        for number, jobs in enumerate(jobs_of_bucket)
    ]


def staying_jobs(plan: Plan, domain: Domain, rank: int) -> list[RankJobs]:
    """Return the jobs that stay on a rank, in portions of at most a bucket's size or of one job."""
    portions: list[list[Job]] = []
    room = 0
    for job in domain.jobs:
        if job.bucket is None and job.owner == rank:
            n_bytes = sum(job.sources.values()) * domain.itemsize
            # A job that is larger than a bucket is a portion by itself.
            if n_bytes > room or not portions:
                portions.append([])
                room = plan.settings.bucket_bytes
            portions[-1].append(job)
            room -= n_bytes
    return [RankJobs(plan, domain, None, tuple(portion), rank) for portion in portions]


class Stack(NamedTuple):
    """Matrices of one parameter group and shape that a rank orthogonalizes together."""

    group: int  # number of the parameter group
    shape: tuple[int, int]
    job_numbers: list[int]  # positions in `RankJobs.jobs`

    @property
    def elements(self) -> int:
        """Number of elements of all matrices."""
        rows, columns = self.shape
        return len(self.job_numbers) * rows * columns


class MatrixPlace(NamedTuple):
    """The number of a stack, and the index of a matrix in it."""

    stack: int
    matrix: int


def stacks_of(rank_jobs: RankJobs, group_numbers: Mapping[int, int]) -> list[Stack]:
    """Return the stacks that a rank owns; see `Bucket` for `group_numbers`."""
    stacks: dict[tuple[int, tuple[int, int]], Stack] = {}
    for number, job in enumerate(rank_jobs.jobs):
        if job.owner == rank_jobs.rank:
            group = group_numbers[job.parameter]
            shapes = rank_jobs.plan.parameters[job.parameter].view.block_shapes
            shape = shapes[job.block % len(shapes)]  # the parts of all matrices are alike
            stacks.setdefault((group, shape), Stack(group, shape, [])).job_numbers.append(number)
    return list(stacks.values())


# ----- pieces ------------------------------------------------------------------------------------


class Piece(NamedTuple):
    """The part of a block that one rank holds."""

    parameter: int  # position in the plan
    block: int  # number in the parameter: matrix · (parts of each matrix) + part
    rank: int  # that holds the piece
    batch_index: int  # index of the matrix in the rank's local view; -1 if the rank has none of it
    rows: Overlap  # in the local view, and in the block
    columns: Overlap

    @property
    def elements(self) -> int:
        """Number of elements."""
        return self.rows.size * self.columns.size if self.batch_index >= 0 else 0

    @property
    def local_index(self) -> tuple[int, slice, slice]:
        """Index of a piece with elements in the rank's local view, (batch, rows, columns)."""
        assert self.batch_index >= 0  # −1 would select the last matrix
        return self.batch_index, self.rows.local_slice, self.columns.local_slice


def piece_of(plan: Plan, parameter: int, block: int, rank: int, leg: Leg) -> Piece:
    """Return a rank's piece of a block's momentum, for the gather, or of its update."""
    matrices = plan.parameters[parameter].matrices(leg)
    return _piece_in(matrices, parameter, block, rank)


def _piece_in(matrices: MatrixLayout, parameter: int, block: int, rank: int) -> Piece:
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
        batch_index=in_batch.start if in_batch.size else -1,
        rows=overlap(region.rows, bounds.row_start, bounds.row_stop),
        columns=overlap(region.columns, bounds.column_start, bounds.column_stop),
    )


class Rectangle(NamedTuple):
    """Adjacent rows and columns of a piece, as indices of the piece and of its block."""

    in_piece: tuple[slice, slice]
    in_block: tuple[slice, slice]


def rectangles(piece: Piece) -> Iterator[Rectangle]:
    """Yield the rectangles of a piece; strided shards and folded dimensions give several."""
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
    p = plan.parameters[parameter]
    slices = []
    # The first blocks are the parts of the first matrix; the parts of all matrices are alike.
    for block in range(len(p.view.block_shapes)):
        piece = piece_of(plan, parameter, block, rank, "gather")
        slices.append((piece.rows.local_slice, piece.columns.local_slice))
    return slices


# ----- messages ----------------------------------------------------------------------------------


class MessagePiece(NamedTuple):
    """A piece in a message, and its place in the buffer."""

    job_number: int  # position in `RankJobs.jobs`
    piece: Piece
    # From the start of the buffer:
    line_start: int  # first word of its lines
    element_start: int  # its first element, counted in elements of the wire type


class Side:
    """The sending or the receiving side of one leg: where everything is in this rank's messages.

    With `owns` the rank acts as owner, and its peers hold the pieces; otherwise it holds them. The
    four sides of an `Exchange` are

                  gather                 return
        holder    packing (sends)        applying (receives)
        owner     arriving (receives)    leaving (sends)

    Attributes
    ----------
    wire_dtype
        Element type on the wire: full precision unless the settings name a narrower one.
    n_planes
        Number of planes: directions, then the inputs that rules request; in the return one.
    pieces
        The pieces in the order of the messages, which is the same for sender and receiver.
    splits
        Words of the message to or from each of `RankJobs.peers`, as `all_to_all_single` takes them.
        The message of this rank to itself is among them, although it does not leave the rank.
    words
        Words of all messages.
    header_index
        Index of the words of all headers in the buffer, int64 (pieces, words of a header).
    buffer
        The messages, float64 (words,); set by `use_buffer`.
    """

    buffer: Tensor

    def __init__(self, rank_jobs: RankJobs, leg: Leg, device: torch.device, *, owns: bool) -> None:
        plan = rank_jobs.plan
        dtype_name = plan.settings.gather_dtype if leg == "gather" else plan.settings.return_dtype
        self.wire_dtype = _NARROW_DTYPES.get(dtype_name, rank_jobs.full_dtype)
        itemsize = self.wire_dtype.itemsize
        self.n_planes = rank_jobs.domain.n_planes(leg)
        self.pieces: list[MessagePiece] = []
        self.splits: list[int] = []
        header_words = rank_jobs.domain.header_words(leg)
        header_positions: list[int] = []
        message_start = 0  # positions are in words, except `element_start`
        for peer in rank_jobs.peers:
            holder, owner = (peer, rank_jobs.rank) if owns else (rank_jobs.rank, peer)
            jobs = {
                number: job
                for number, job in enumerate(rank_jobs.jobs)
                if job.owner == owner and holder in job.holders(leg)
            }
            headers_end = message_start + len(jobs) * header_words
            header_positions += range(message_start, headers_end)
            line_values = (job.line_values.get(holder, 0) for job in jobs.values())
            *line_starts, lines_end = itertools.accumulate(line_values, initial=headers_end)
            # The sizes must equal those of `Domain.bytes_of_messages`.
            element_start = lines_end * WORD_BYTES // itemsize
            for (number, job), line_start in zip(jobs.items(), line_starts, strict=True):
                piece = piece_of(plan, job.parameter, job.block, holder, leg)
                self.pieces.append(MessagePiece(number, piece, line_start, element_start))
                element_start += self.n_planes * piece.elements
            # `element_start` is now the end of the last piece. Rounded up.
            message_end = -(-element_start * itemsize // WORD_BYTES)
            self.splits.append(message_end - message_start)
            message_start = message_end
        self.words = message_start
        positions = torch.tensor(header_positions, dtype=torch.int64, device=device)
        self.header_index = positions.view(-1, header_words)

    def use_buffer(self, buffer: Tensor) -> None:
        """Use the first `words` of a buffer."""
        self.buffer = buffer[: self.words]

    def read_headers(self) -> Tensor:
        """Return a copy of the headers, (pieces, words of a header)."""
        return self.buffer[self.header_index]

    def write_headers(self, headers: Tensor) -> None:
        """Write the headers of all pieces."""
        self.buffer[self.header_index] = headers

    def element_views(self, plane: int = 0) -> list[Tensor]:
        """Return every piece's elements of one plane as a view of the buffer.

        Views are (rows, columns), or (0,) without elements.
        """
        flat = self.buffer.view(self.wire_dtype)
        views = []
        for message_piece in self.pieces:
            piece = message_piece.piece
            start = message_piece.element_start + plane * piece.elements
            view = flat[start : start + piece.elements]
            views.append(view.view(piece.rows.size, piece.columns.size) if piece.elements else view)
        return views


def rows_index(positions: Sequence[int], count: int, device: torch.device) -> slice | Tensor:
    """Return the index of some of `count` rows; for all rows a slice, which makes a view."""
    if len(positions) == count:
        return slice(None)
    return torch.tensor(positions, dtype=torch.int64, device=device)


# ----- lines -------------------------------------------------------------------------------------


class Lines(NamedTuple):
    """The part of a rule's state per row or column of a block that one rank keeps.

    Attributes
    ----------
    shape
        Of the rank's local state tensor: (batch, lines, blocks that a line crosses, values).
    batch_index, overlap, part_number
        The block's lines in this tensor, as indices of its first three dimensions. `overlap` also
        has their indices in the block. `batch_index` is -1 if the rank has none of the matrix.
    values_per_line
        Fewer than the last dimension if other blocks of the matrix have longer vectors.

    Examples
    --------
    Take the third block of a fused weight of 64 rows and 64 + 64 + 32 columns, on a rank with the
    first 32 rows. If rows have vectors along the columns, each row crosses three blocks: `shape` is
    (1, 32, 3, 64), `overlap` 0 … 32, `part_number` 2, `values_per_line` 32. If columns have
    numbers, each column crosses one block: (1, 160, 1, 1), 128 … 160, 0 and 1.
    """

    shape: tuple[int, int, int, int]
    batch_index: int
    overlap: Overlap
    part_number: int
    values_per_line: int

    @property
    def n_values(self) -> int:
        """Number of values of all lines."""
        return self.overlap.size * self.values_per_line if self.batch_index >= 0 else 0


def lines_of(plan: Plan, piece: Piece, tensor: StateTensor) -> Lines:
    """Return the rows or columns of a piece's block that its rank keeps the values of."""
    axis = cast("Axis", tensor.extent)
    matrices = with_whole_lines(plan.parameters[piece.parameter].matrices("gather"), axis)
    line_piece = _piece_in(matrices, piece.parameter, piece.block, piece.rank)
    batch, rows, columns = regions_by_rank(matrices)[piece.rank].shape
    blocks_per_line = matrices.view.repeats(axis)
    lengths = tensor.lengths(matrices.view)
    part_number = piece.block % len(lengths)
    return Lines(
        shape=(batch, rows if axis == "rows" else columns, blocks_per_line, max(lengths)),
        batch_index=line_piece.batch_index,
        overlap=line_piece.rows if axis == "rows" else line_piece.columns,
        # Lines of one block each: `overlap` alone selects the block.
        part_number=part_number if blocks_per_line > 1 else 0,
        values_per_line=lengths[part_number],
    )
