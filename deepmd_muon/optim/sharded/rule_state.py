"""The state of rules in the messages of one bucket.

A rule's state has one number per block (a *score*) or values per row or column (*lines*). Scores
are in the headers of pieces, lines between the headers and the elements. Both are float64 on the
way. Master weights, which have the shape of the parameter, do not travel. `Bucket` calls the
methods of `HeldRuleState`, and `OwnedMatrices` those of `OwnedRuleState`, in this order:

    method         class             from                              to
    pack           HeldRuleState     state on this rank                headers, buffer of `packing`
    assemble       OwnedRuleState    headers, buffer of `arriving`     state of owned matrices
    pack_updates   OwnedRuleState    new state of owned matrices       headers, buffer of `leaving`
    take           HeldRuleState     headers, buffer of `applying`     state on this rank

All holders of a block have the same score, and each sends it. Each holder sends the lines that it
keeps. If several holders keep the same lines, as with columns of a matrix with sharded rows, their
values are equal.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple, cast

import torch
from torch import Tensor

from deepmd_muon.optim.routing.views import Axis
from deepmd_muon.optim.rules.interface import StateTensor
from deepmd_muon.optim.rules.registry import tensors_of
from deepmd_muon.optim.sharded.jobs import MatrixPlace, RankJobs, Stack
from deepmd_muon.optim.sharded.layout import (
    Overlap,
    overlap,
    regions_by_rank,
    score_runs_by_rank,
    with_whole_lines,
)
from deepmd_muon.optim.sharded.messages import (
    FIRST_STATE,
    CopyList,
    MessagePiece,
    Side,
    header_rows,
)
from deepmd_muon.optim.sharded.pieces import Piece, piece_in, run_slices
from deepmd_muon.optim.sharded.plan import Plan, rule_values
from deepmd_muon.optim.sharded.transport import Exchange

LocalState = Mapping[int, Mapping[str, Tensor]]
"""This rank's state tensors, by parameter of the plan and key."""


# ----- the holder's half -------------------------------------------------------------------------


class _Scores(NamedTuple):
    """The scores of one key, for the pieces with parameters that have this key."""

    rows: slice | Tensor  # index of the headers of these pieces
    views: list[Tensor]  # for each of these pieces its score, a view (1,) of the local state


class HeldRuleState:
    """The local state of the blocks that this rank has pieces of.

    The exchange has been given its buffers (`use_buffers`).
    """

    def __init__(
        self, rank_jobs: RankJobs, exchange: Exchange, state: LocalState, device: torch.device
    ) -> None:
        self._plan = rank_jobs.plan
        self._device = device
        self._keys = rule_values(rank_jobs.domain.rules).block_keys  # in the order of the headers
        self._applying = exchange.applying
        self._packed_scores = self._scores(exchange.packing, state)
        self._packed_lines = self._lines(exchange.packing, state)
        self._returned_scores = self._scores(exchange.applying, state)
        self._returned_lines = self._lines(exchange.applying, state)

    def _scores(self, side: Side, state: LocalState) -> list[_Scores]:
        """Return the scores of the pieces of a side, by key."""
        scores = []
        for key in self._keys:
            positions = []
            views = []
            for position, message_piece in enumerate(side.pieces):
                piece = message_piece.piece
                if key in state[piece.parameter]:
                    # Scores have the layout of the elements, even if momenta are in parts.
                    matrices = self._plan.parameters[piece.parameter].matrices()
                    score_runs = score_runs_by_rank(matrices)[piece.rank]
                    index = overlap(score_runs, piece.block, piece.block + 1).start
                    positions.append(position)
                    views.append(state[piece.parameter][key][index : index + 1])
            rows = header_rows(positions, len(side.pieces), self._device)
            scores.append(_Scores(rows, views))
        return scores

    def _lines(self, side: Side, state: LocalState) -> CopyList:
        """Return the copies between the buffer of a side and the state."""
        copies = CopyList()
        for message_piece, key, lines, in_buffer in _lines_in_buffer(self._plan, side):
            # Vectors of smaller blocks are padded in storage.
            local = state[message_piece.piece.parameter][key].view(lines.shape)
            local = local[lines.batch_index, :, lines.part_number, : lines.values_per_line]
            copies.add(in_buffer, local[lines.overlap.local_slice])
        return copies

    def pack(self, headers: Tensor) -> None:
        """Write the state to `headers` of `packing`, (pieces, words), and to its buffer."""
        for column, scores in enumerate(self._packed_scores, start=FIRST_STATE):
            if scores.views:
                headers[scores.rows, column] = torch.cat(scores.views).double()
        self._packed_lines.write_buffer()

    def take(self) -> None:
        """Write the returned state, from headers and buffer of `applying`, to the local state."""
        if any(scores.views for scores in self._returned_scores):
            headers = self._applying.read_headers()  # costs a kernel on a GPU
            for column, scores in enumerate(self._returned_scores, start=FIRST_STATE):
                if scores.views:
                    values = headers[scores.rows, column].to(scores.views[0].dtype)
                    torch._foreach_copy_(scores.views, list(values.split(1)))
        self._returned_lines.read_buffer()


# ----- the owner's half --------------------------------------------------------------------------


class OwnedRuleState:
    """The state of the matrices that this rank owns, from their arrival until they have left.

    `places` has the place of each matrix by job number. The exchange has been given its buffers
    (`use_buffers`).
    """

    def __init__(
        self,
        rank_jobs: RankJobs,
        exchange: Exchange,
        *,
        stacks: Sequence[Stack],
        places: Mapping[int, MatrixPlace],
        device: torch.device,
    ) -> None:
        rules = rank_jobs.domain.rules
        self._tensors = tensors_of(rules)
        self._keys = rule_values(rules).block_keys  # in the order of the headers
        self._full_dtype = rank_jobs.full_dtype
        self._stack_sizes = [len(stack.job_numbers) for stack in stacks]
        # By stack and key, float64 (matrices, lines, values). A matrix has all of its lines; those
        # of its pieces are copied into them.
        self._lines: list[dict[str, Tensor]] = []
        for stack in stacks:
            rows, columns = stack.shape
            lines = {}
            # The parameters of a stack are in one group, so they have the same rules.
            parameter = rank_jobs.jobs[stack.job_numbers[0]].parameter
            for key, tensor in rule_values(rank_jobs.plan.parameters[parameter].rules).line_tensors:
                n_lines = rows if tensor.extent == "rows" else columns
                size = (len(stack.job_numbers), n_lines, tensor.length(rows, columns))
                lines[key] = torch.zeros(size, dtype=torch.float64, device=device)
            self._lines.append(lines)
        self._arriving_lines = self._line_copies(rank_jobs.plan, exchange.arriving, places)
        self._leaving_lines = self._line_copies(rank_jobs.plan, exchange.leaving, places)

    def _line_copies(self, plan: Plan, side: Side, places: Mapping[int, MatrixPlace]) -> CopyList:
        """Return the copies between the buffer of a side and `_lines`."""
        copies = CopyList()
        for message_piece, key, lines, in_buffer in _lines_in_buffer(plan, side):
            place = places[message_piece.job_number]
            lines_of_matrix = self._lines[place.stack][key][place.index_in_stack]
            for in_piece, in_block in run_slices(lines.overlap.runs):
                copies.add(in_buffer[in_piece], lines_of_matrix[in_block])
        return copies

    def assemble(self, headers: Tensor) -> list[dict[str, Tensor]]:
        """Return the state of all matrices, by stack and key; see `OwnedBlocks.state`.

        `headers` has one header per matrix, (matrices, words); lines come from the buffer.
        """
        self._arriving_lines.read_buffer()
        state: list[dict[str, Tensor]] = []
        for lines in self._lines:
            stack_state = {}
            for key, values in lines.items():
                tensor = self._tensors[key]
                if tensor.along is None:
                    values = values[:, :, 0]  # one number per line
                # A copy: `pack_updates` writes the new state to `_lines`.
                stack_state[key] = values.to(tensor.dtype_for(self._full_dtype), copy=True)
            state.append(stack_state)
        for column, key in enumerate(self._keys, start=FIRST_STATE):
            scores = headers[:, column].to(self._tensors[key].dtype_for(self._full_dtype))
            scores_by_stack = scores.split(self._stack_sizes)
            for stack_state, scores_of_stack in zip(state, scores_by_stack, strict=True):
                stack_state[key] = scores_of_stack
        return state

    def pack_updates(self, state: Sequence[Mapping[str, Tensor]]) -> list[Tensor]:
        """Write the lines to the buffer of `leaving`, and return the scores.

        `state` is the new state by stack and key. The scores are float64 (matrices,) for each key,
        in the order of the headers; matrices are counted stack by stack.
        """
        for lines, stack_state in zip(self._lines, state, strict=True):
            for key, values in lines.items():
                values.copy_(stack_state[key].view(values.shape))
        self._leaving_lines.write_buffer()
        return [
            torch.cat([stack_state[key] for stack_state in state]).double() for key in self._keys
        ]


# ----- lines in messages -------------------------------------------------------------------------


class Lines(NamedTuple):
    """The part of a rule's state per row or column of a block that one rank keeps.

    Attributes
    ----------
    shape
        Of the rank's local state tensor: (batch, lines, blocks that a line crosses, values).
    batch_index, overlap, part_number
        The block's lines in this tensor, as indices of its first three dimensions. `overlap` also
        has their indices in the block. `batch_index` is None as in `Piece`.
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
    batch_index: int | None
    overlap: Overlap
    part_number: int
    values_per_line: int

    @property
    def n_values(self) -> int:
        """Number of values of all lines."""
        return 0 if self.batch_index is None else self.overlap.size * self.values_per_line


def lines_of(plan: Plan, piece: Piece, tensor: StateTensor) -> Lines:
    """Return the lines of a piece's block for which its rank keeps values of this state tensor."""
    axis = cast("Axis", tensor.extent)
    matrices = with_whole_lines(plan.parameters[piece.parameter].matrices("gather"), axis)
    line_piece = piece_in(matrices, piece.parameter, piece.block, piece.rank)
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


class _LinesInBuffer(NamedTuple):
    """The lines of one state tensor in a message."""

    message_piece: MessagePiece
    key: str
    lines: Lines
    in_buffer: Tensor  # a view of the buffer, (lines, values)


def _lines_in_buffer(plan: Plan, side: Side) -> Iterator[_LinesInBuffer]:
    """Yield the lines in the messages of one side, piece by piece and tensor by tensor.

    Tensors without values for a piece are left out.
    """
    for message_piece in side.pieces:
        piece = message_piece.piece
        start = message_piece.line_start
        for key, tensor in rule_values(plan.parameters[piece.parameter].rules).line_tensors:
            lines = lines_of(plan, piece, tensor)
            if lines.n_values:
                stop = start + lines.n_values
                in_buffer = side.buffer[start:stop].view(-1, lines.values_per_line)
                yield _LinesInBuffer(message_piece, key, lines, in_buffer)
                start = stop
