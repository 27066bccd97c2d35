"""The messages of a bucket on one rank: the jobs they serve, the pieces they carry, and their format.

There is no communication here. `transport` sends the messages, `bucket` and `owned_matrices` fill and read
them, and `rule_state` does so for the state of rules. The three sections follow one chain: the jobs
of a rank, the pieces of these jobs, and the places of these pieces in the rank's messages.

The format of a message
-----------------------
In each leg of an exchange, each rank has one message to and one from every rank of the domain,
itself included. Messages of a rank are one behind the other in a float64 buffer. A message is a row
of 8-byte words:

    header of piece 0 | header of piece 1 | … | lines of piece 0 | … | elements of piece 0 | …

header
    Float64 values: whether there is a gradient (`PRESENCE`), then one number of the rules' state
    for each key of state per block (from `FIRST_STATE` on), then, in the gather only, the rules'
    sums (`header_words`). All headers of a domain have the same length.
lines
    The rules' state per row or column, float64.
elements
    In the wire type, one plane of the piece after the other. Each plane is (rows, columns). The end
    of the message is padded to a whole word.

Example
-------
Ranks 0 and 1 have 4 rows each of a matrix (8, 6) in float32, and rank 0 is its owner. No rule has
state, so a header is one word. A piece has 24 elements of 4 bytes, which are 12 words. `Side`
describes the messages of the gather:

                       rank 0, packing       rank 1, packing       rank 0, arriving
    pieces             rows 0 … 3            rows 4 … 7            rows 0 … 3, rows 4 … 7
    splits [words]     to 0: 13, to 1: 0     to 0: 13, to 1: 0     from 0: 13, from 1: 13
    header_index       [[0]]                 [[0]]                 [[0], [13]]
    element_start      2                     2                     2, 28

Element starts count elements of 4 bytes: word 14 is element 28. The return has the same messages in
the other direction: `leaving` of rank 0 is like its `arriving`, and `applying` of each rank like
its `packing`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from deepmd_muon.optim.sharded.layout import (
    MatrixLayout,
    Overlap,
    RankSet,
    Runs,
    block_bounds,
    overlap,
    regions_by_rank,
)
from deepmd_muon.optim.sharded.plan import WORD_BYTES, Domain, Job, Leg, Plan, rule_values

_FULL_PRECISION = {4: torch.float32, 8: torch.float64}  # by bytes of an element
_NARROW_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}


# ----- jobs --------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class RankJobs:
    """The jobs of one bucket, or portion, in which a rank takes part.

    Attributes
    ----------
    bucket
        Its number; None for a portion.
    jobs
        In the global order of `Domain.jobs`. A *job number* is a position in this tuple.
    """

    plan: Plan
    domain: Domain
    bucket: int | None
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
    free_bytes = 0  # of the last portion
    for job in domain.jobs:
        if job.bucket is None and job.owner == rank:
            n_bytes = sum(job.sources.values()) * domain.itemsize
            # A job that is larger than a bucket is a portion by itself.
            if n_bytes > free_bytes or not portions:
                portions.append([])
                free_bytes = plan.settings.bucket_bytes
            portions[-1].append(job)
            free_bytes -= n_bytes
    return [RankJobs(plan, domain, None, tuple(portion), rank) for portion in portions]


class Stack(NamedTuple):
    """Matrices of one parameter group and shape that a rank orthogonalizes together."""

    group: int  # number of the parameter group
    shape: tuple[int, int]
    job_numbers: list[int]  # of the jobs, one per matrix

    @property
    def elements(self) -> int:
        """Number of elements of all matrices."""
        rows, columns = self.shape
        return len(self.job_numbers) * rows * columns


def stacks_of(rank_jobs: RankJobs, group_numbers: Mapping[int, int]) -> list[Stack]:
    """Return the stacks of all matrices that a rank owns.

    `group_numbers` has the parameter group of each parameter, by position in the plan.
    """
    stacks: dict[tuple[int, tuple[int, int]], Stack] = {}
    for job_number, job in enumerate(rank_jobs.jobs):
        if job.owner == rank_jobs.rank:
            group = group_numbers[job.parameter]
            shapes = rank_jobs.plan.parameters[job.parameter].view.block_shapes
            shape = shapes[job.block % len(shapes)]  # the parts of all matrices are alike
            stack = stacks.setdefault((group, shape), Stack(group, shape, []))
            stack.job_numbers.append(job_number)
    return list(stacks.values())


class MatrixPlace(NamedTuple):
    """Where a rank has a matrix that it owns."""

    stack: int  # number of the stack
    index_in_stack: int
    number: int  # of the matrix among those of all stacks, counted stack by stack


def matrix_places(stacks: Sequence[Stack]) -> dict[int, MatrixPlace]:
    """Return the place of every owned matrix by job number, in the order of `MatrixPlace.number`."""
    places: dict[int, MatrixPlace] = {}
    for stack_number, stack in enumerate(stacks):
        for index_in_stack, job_number in enumerate(stack.job_numbers):
            places[job_number] = MatrixPlace(stack_number, index_in_stack, number=len(places))
    return places


# ----- pieces ------------------------------------------------------------------------------------


class Piece(NamedTuple):
    """The part of a block that one rank holds."""

    parameter: int  # position in the plan
    block: int  # number in the parameter: matrix · (parts of each matrix) + part
    rank: int  # that holds the piece
    batch_index: int | None  # of the matrix in the rank's local view; None if it has none of it
    rows: Overlap  # in the local view, and in the block
    columns: Overlap

    @property
    def elements(self) -> int:
        """Number of elements."""
        return 0 if self.batch_index is None else self.rows.size * self.columns.size

    @property
    def local_index(self) -> tuple[int, slice, slice]:
        """Index of a piece with elements in the rank's local view, (batch, rows, columns)."""
        assert self.batch_index is not None
        return self.batch_index, self.rows.local_slice, self.columns.local_slice


def piece_of(plan: Plan, parameter: int, block: int, rank: int, leg: Leg) -> Piece:
    """Return a rank's piece of a block's momentum, for the gather, or of its update."""
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


# ----- places in messages ------------------------------------------------------------------------

# Words of a header.
# Above 0, in the gather, if the piece has a gradient; in the return, if any piece of its block has.
PRESENCE = 0
FIRST_STATE = 1


def first_sum(domain: Domain) -> int:
    """Return the first word of the rules' sums in a header of the gather."""
    return FIRST_STATE + len(rule_values(domain.rules).block_keys)


class MessagePiece(NamedTuple):
    """A piece in a message, and its place in the buffer."""

    job_number: int  # position in `RankJobs.jobs`
    piece: Piece
    # From the start of the buffer:
    line_start: int  # first word of its lines
    element_start: int  # its first element, counted in elements of the wire type


class Side:
    """The sending or the receiving side of one leg: the places of all pieces in a rank's messages.

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
        The pieces in the order of the messages, which is the same for sender and receiver: by peer,
        then by job.
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
        domain = rank_jobs.domain
        settings = rank_jobs.plan.settings
        dtype_name = settings.gather_dtype if leg == "gather" else settings.return_dtype
        self.wire_dtype = _NARROW_DTYPES.get(dtype_name, rank_jobs.full_dtype)
        self.n_planes = domain.n_planes(leg)
        self.pieces: list[MessagePiece] = []
        self.splits: list[int] = []
        header_words = domain.header_words(leg)
        header_positions: list[int] = []
        # The sizes of messages must equal those of `Domain.bytes_of_messages`.
        elements_per_word = WORD_BYTES // self.wire_dtype.itemsize
        word = 0  # next free word of the buffer
        for peer in rank_jobs.peers:
            message_start = word
            holder = peer if owns else rank_jobs.rank
            owner = rank_jobs.rank if owns else peer
            jobs = {
                number: job
                for number, job in enumerate(rank_jobs.jobs)
                if job.owner == owner and holder in job.holders(leg)
            }
            word += len(jobs) * header_words
            header_positions += range(message_start, word)
            line_starts = []
            for job in jobs.values():
                line_starts.append(word)
                word += job.line_values.get(holder, 0)
            element = word * elements_per_word  # next free element
            for (number, job), line_start in zip(jobs.items(), line_starts, strict=True):
                piece = piece_of(rank_jobs.plan, job.parameter, job.block, holder, leg)
                self.pieces.append(MessagePiece(number, piece, line_start, element))
                element += self.n_planes * piece.elements
            word = -(-element // elements_per_word)  # rounded up
            self.splits.append(word - message_start)
        self.words = word
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


def header_rows(positions: Sequence[int], count: int, device: torch.device) -> slice | Tensor:
    """Return the index of some of `count` headers; of all headers a slice, which makes a view."""
    if len(positions) == count:
        return slice(None)
    return torch.tensor(positions, dtype=torch.int64, device=device)


@dataclasses.dataclass
class CopyList:
    """Pairs of views of equal shapes: elements are copied between `buffer` and `local` memory."""

    buffer: list[Tensor] = dataclasses.field(default_factory=list)
    local: list[Tensor] = dataclasses.field(default_factory=list)

    def add(self, in_buffer: Tensor, local: Tensor) -> None:
        """Add a pair."""
        self.buffer.append(in_buffer)
        self.local.append(local)

    def write_buffer(self) -> None:
        """Copy from the local memory to the buffer."""
        if self.buffer:
            torch._foreach_copy_(self.buffer, self.local)

    def read_buffer(self) -> None:
        """Copy from the buffer to the local memory."""
        if self.buffer:
            torch._foreach_copy_(self.local, self.buffer)
