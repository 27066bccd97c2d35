"""One rank's part of a plan: the pieces in each message that it sends and receives. No communication."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Mapping, Sequence
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
from deepmd_muon.optim.sharded.plan import LEGS, WORD, Domain, Job, Leg, Plan, PlannedParameter


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
        """Index of a piece with elements in the rank's local view, (batch, rows, columns)."""
        rows = slice(self.rows.start, self.rows.stop)
        columns = slice(self.columns.start, self.columns.stop)
        return self.batch, rows, columns


class Message(NamedTuple):
    """One rank's pieces in one message, of `words` words.

    For each piece: the position of its job in the exchange's jobs, the number of rules' values per row or column, and
    the number of elements.
    """

    jobs: tuple[int, ...]
    lines: tuple[int, ...]
    elements: tuple[int, ...]
    words: int


@dataclasses.dataclass(frozen=True)
class RankMessages:
    """One rank's messages in one exchange of one domain."""

    peers: tuple[int, ...]  # the ranks that it exchanges messages with, itself included
    jobs: tuple[Job, ...]  # in which the rank takes part
    owned: tuple[int, ...]  # positions in `jobs` of those that it owns
    out: dict[Leg, list[Message]]  # to every peer
    into: dict[Leg, list[Message]]  # from every peer


def _held(p: PlannedParameter, block: int, region: Region) -> tuple[int, int, Overlap, Overlap]:
    """Return a block's part of its matrix, the matrix in a rank's region (−1: none), and its rows and columns there."""
    parts = block_bounds(p.view)
    batch, part = divmod(block, len(parts))
    r0, r1, c0, c1 = parts[part]
    where = overlap(region.batch, batch, batch + 1)
    index = where.start if where.size else -1
    return part, index, overlap(region.rows, r0, r1), overlap(region.columns, c0, c1)


def piece_of(plan: Plan, parameter: int, block: int, rank: int, leg: Leg) -> Piece:
    """Return a rank's piece of a block: of the momentum, for the gather, or of the elements that it updates."""
    p = plan.parameters[parameter]
    return Piece(
        parameter,
        block,
        *_held(p, block, regions_by_rank(p.shape, p.view, p.layout_of(leg))[rank])[1:],
    )


class Lines(NamedTuple):
    """The part of a rule's state per row or column of a block that one rank keeps.

    `shape` is (batch, lines, blocks per line, values) of the rank's local state tensor. The block's lines are at
    indices `batch`, `inside` and `part` of it, with `values` numbers each; `inside` also has their indices in the
    block.
    """

    shape: tuple[int, int, int, int]
    batch: int
    inside: Overlap
    part: int
    values: int

    @property
    def length(self) -> int:
        """Number of values of all lines."""
        return self.inside.size * self.values if self.batch >= 0 else 0


def lines_of(plan: Plan, parameter: int, block: int, rank: int, tensor: StateTensor) -> Lines:
    """Return the rows or columns of a block whose values a rank keeps."""
    of = cast("Axis", tensor.extent)
    p = plan.parameters[parameter]
    region = regions_by_rank(
        p.shape, p.view, lines_layout(p.shape, p.view, p.layout_of("gather"), of)
    )[rank]
    part, batch, rows, columns = _held(p, block, region)
    repeats, (nbatch, nrows, ncolumns) = p.view.repeats(of), region.shape
    shape = nbatch, nrows if of == "rows" else ncolumns, repeats, max(tensor.lengths(p.view))
    values = tensor.lengths(p.view)[part]
    return Lines(
        shape, batch, rows if of == "rows" else columns, part if repeats > 1 else 0, values
    )


def local_shape(plan: Plan, parameter: int, rank: int, leg: Leg) -> tuple[int, int, int]:
    """Return the shape (batch, rows, columns) of a rank's local momentum, or of its elements."""
    p = plan.parameters[parameter]
    return regions_by_rank(p.shape, p.view, p.layout_of(leg))[rank].shape


def rectangles(piece: Piece) -> list[tuple[tuple[slice, slice], tuple[slice, slice]]]:
    """Return the rectangles of a piece, in it and in its block; strided shards and folded dimensions give several."""
    found = []
    row = 0
    for r0, r1 in piece.rows.runs:
        column = 0
        for c0, c1 in piece.columns.runs:
            in_piece = slice(row, row + r1 - r0), slice(column, column + c1 - c0)
            found.append((in_piece, (slice(r0, r1), slice(c0, c1))))
            column += c1 - c0
        row += r1 - r0
    return found


def local_messages(plan: Plan, domain: Domain, rank: int) -> list[RankMessages]:
    """Return the messages, to itself, of the jobs that stay on a rank, in portions of at most the size of a bucket."""
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
    pieces: dict[tuple[Leg, bool, int], list[tuple[int, int, int]]] = defaultdict(list)
    for i, job in enumerate(jobs):
        ends: Mapping[Leg, Mapping[int, int]] = {"gather": job.sources, "return": job.destinations}
        for leg, holders in ends.items():
            from_holder = leg == "gather"
            if rank in holders:
                pieces[leg, from_holder, job.owner].append(
                    (i, job.lines.get(rank, 0), holders[rank])
                )
            if rank == job.owner:
                for other, elements in holders.items():
                    pieces[leg, not from_holder, other].append(
                        (i, job.lines.get(other, 0), elements)
                    )

    def messages(leg: Leg, *, sending: bool) -> list[Message]:
        found = []
        for peer in peers:
            held_here = pieces.get((leg, sending, peer), [])
            lines, elements = tuple(n for _, n, _ in held_here), tuple(n for *_, n in held_here)
            words = (
                domain.message_bytes(leg, len(held_here), sum(lines), sum(elements), plan.settings)
                // WORD
            )
            found.append(Message(tuple(i for i, *_ in held_here), lines, elements, words))
        return found

    out = {leg: messages(leg, sending=True) for leg in LEGS}
    into = {leg: messages(leg, sending=False) for leg in LEGS}
    return RankMessages(
        peers, tuple(jobs), tuple(i for i, job in enumerate(jobs) if job.owner == rank), out, into
    )


def local_parts(plan: Plan, parameter: int, rank: int) -> list[tuple[slice, slice]]:
    """Return, for each part of a matrix, its rows and columns in the local momentum."""
    p = plan.parameters[parameter]
    region = regions_by_rank(p.shape, p.view, p.layout_of("gather"))[rank]
    found = []
    for r0, r1, c0, c1 in block_bounds(p.view):
        rows, columns = overlap(region.rows, r0, r1), overlap(region.columns, c0, c1)
        found.append((slice(rows.start, rows.stop), slice(columns.start, columns.stop)))
    return found
