"""The messages of a bucket on one rank: their format, and the places of pieces in them.

There is no communication here. `transport` sends the messages, `bucket` and `owned_matrices` fill
and read them, and `rule_state` does so for the state of rules.

The format of a message
-----------------------
In each leg of an exchange a rank has one message to, or from, every rank of the domain, itself
included; in a portion only to itself. Its messages are one behind the other in a float64 buffer. A
message is a row of 8-byte words, and a header is a row of words, too:

    message    header of piece 0 | … | lines of piece 0 | … | elements of piece 0 | …
    header     PRESENCE | scores of rules, from FIRST_STATE on | sums of rules, from `first_sum` on

Headers and lines are float64. All headers of a leg and domain have the same length; only those of
the gather have sums. Elements are in the wire type, one plane of a piece after the other, and each
plane is (rows, columns). The end of the message is padded to a whole word.

Example
-------
Ranks 0 and 1 have 4 rows each of a matrix (8, 6) in float32, and rank 0 is its owner. There are no
rules, so a header is one word. A piece has 24 elements of 4 bytes, which are 12 words. `Side`
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
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from deepmd_muon.optim.sharded.jobs import RankJobs
from deepmd_muon.optim.sharded.pieces import Piece, piece_of
from deepmd_muon.optim.sharded.plan import WORD_BYTES, Domain, Leg, rule_values

# By value of `gather_dtype` or `return_dtype`; 'full' is not among them.
_NARROW_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}

# Words of a header.
# Above 0 if the piece has a gradient; in the return, if any piece of its block has one.
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

    With `owns` the rank acts as owner, and its peers hold the pieces. Otherwise it acts as holder,
    and its peers are the owners. The four sides of an `Exchange` are

                  gather                 return
        holder    packing (sends)        applying (receives)
        owner     arriving (receives)    leaving (sends)

    Attributes
    ----------
    wire_dtype
        Element type on the wire: full precision unless the settings name a narrower one.
    n_planes
        Number of planes: in the gather directions, then the inputs that rules request; in the
        return one, the updates.
    pieces
        The pieces, by peer, then by job. So a message has the same order for sender and receiver.
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
            # Headers,
            word += len(jobs) * header_words
            header_positions += range(message_start, word)
            # then lines,
            line_starts = []
            for job in jobs.values():
                line_starts.append(word)
                word += job.line_values.get(holder, 0)
            # then elements.
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
        """Write the headers of all pieces, (pieces, words of a header)."""
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
    """Return an index for the headers at these positions, of `count` in all.

    For all headers it is a slice: indexing with it makes a view, and costs no kernel.
    """
    if len(positions) == count:
        return slice(None)
    return torch.tensor(positions, dtype=torch.int64, device=device)


@dataclasses.dataclass
class CopyList:
    """Pairs of views of equal shapes, between which elements are copied.

    Attributes
    ----------
    in_buffer
        Views of the messages.
    local
        Views of other memory of this rank: matrices, or the state of rules.
    """

    in_buffer: list[Tensor] = dataclasses.field(default_factory=list)
    local: list[Tensor] = dataclasses.field(default_factory=list)

    def add(self, in_buffer: Tensor, local: Tensor) -> None:
        """Add a pair."""
        self.in_buffer.append(in_buffer)
        self.local.append(local)

    def write_buffer(self) -> None:
        """Copy from the local memory to the buffer."""
        if self.in_buffer:
            torch._foreach_copy_(self.in_buffer, self.local)

    def read_buffer(self) -> None:
        """Copy from the buffer to the local memory."""
        if self.in_buffer:
            torch._foreach_copy_(self.local, self.in_buffer)
