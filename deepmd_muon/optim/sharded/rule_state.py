"""The rules' state in the messages of one bucket.

Holders pack it, owners advance it, and holders take it back. The headers of pieces contain the
numbers per block. The numbers per row or column (*lines*) follow the headers, before the elements.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from deepmd_muon.optim.rules.interface import StateTensor
from deepmd_muon.optim.rules.registry import tensors_of
from deepmd_muon.optim.sharded.layout import overlap, score_runs_by_rank
from deepmd_muon.optim.sharded.messages import (
    FIRST_STATE,
    Lines,
    MatrixPlace,
    MessagePiece,
    RankJobs,
    Side,
    Stack,
    lines_of,
    rows_index,
    run_slices,
)
from deepmd_muon.optim.sharded.plan import rule_values
from deepmd_muon.optim.sharded.transport import Exchange

LocalState = Mapping[int, Mapping[str, Tensor]]
"""This rank's state tensors, by parameter of the plan and key."""


class BlockNumbers(NamedTuple):
    """Numbers per block of some of this rank's pieces."""

    pieces: slice | Tensor  # the positions of these pieces: an index of rows of headers
    state: list[Tensor]  # for each of them, its block's number as a view of the state, (1,)


class _LinesInBuffer(NamedTuple):
    """The lines of one state tensor in a message."""

    piece: MessagePiece
    key: str
    lines: Lines
    values: Tensor  # a view of the buffer, (lines, values)


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


class RuleState:
    """State of rules in one bucket on this rank, after the exchange has its buffers.

    `stacks` are the matrices that this rank owns, and `place_of_job` the matrix of each job.

    Attributes
    ----------
    keys
        Keys of the state tensors with one number per block, in the order of their columns in the
        headers.
    """

    def __init__(
        self,
        rank_jobs: RankJobs,
        exchange: Exchange,
        stacks: Sequence[Stack],
        place_of_job: Mapping[int, MatrixPlace],
        device: torch.device,
    ) -> None:
        self._rank_jobs = rank_jobs
        self._exchange = exchange
        self._device = device
        rules = rank_jobs.domain.rules
        self._tensors = tensors_of(rules)
        self.keys = rule_values(rules).block_keys
        self._place_of_job = place_of_job
        self._stack_sizes = [len(stack.job_numbers) for stack in stacks]
        # The lines of owned matrices, (matrices, lines, values), from their arrival until they
        # have left.
        self._owned: list[dict[str, Tensor]] = []
        for stack in stacks:
            rows, columns = stack.shape
            lines = {}
            parameter = rank_jobs.jobs[stack.job_numbers[0]].parameter
            for key, tensor in self._line_tensors(parameter):
                n_lines = rows if tensor.extent == "rows" else columns
                size = (len(stack.job_numbers), n_lines, tensor.length(rows, columns))
                lines[key] = torch.zeros(size, dtype=torch.float64, device=device)
            self._owned.append(lines)
        self._arriving_lines = self._owned_lines(exchange.arriving)
        self._leaving_lines = self._owned_lines(exchange.leaving)

    def _line_tensors(self, parameter: int) -> tuple[tuple[str, StateTensor], ...]:
        """Return key and description of a parameter's state per row or column."""
        return rule_values(self._rank_jobs.plan.parameters[parameter].rules).line_tensors

    # ----- views, created once -------------------------------------------------------------------

    def bind(self, state: LocalState) -> None:
        """Create all views of the state on this rank."""
        exchange = self._exchange
        self._packed_numbers = self._block_numbers(exchange.packing, state)
        self._packed_lines = self._local_lines(exchange.packing, state)
        self._returned_numbers = self._block_numbers(exchange.applying, state)
        self._returned_lines = self._local_lines(exchange.applying, state)

    def _block_numbers(self, side: Side, state: LocalState) -> list[BlockNumbers]:
        """Return, in the order of `keys`, the numbers of the blocks of this rank's pieces."""
        plan = self._rank_jobs.plan
        numbers = []
        for key in self.keys:
            positions = []
            views = []
            for position, message_piece in enumerate(side.pieces):
                piece = message_piece.piece
                if key in state[piece.parameter]:
                    elements = plan.parameters[piece.parameter].matrices()
                    blocks = score_runs_by_rank(elements)[piece.rank]
                    index = overlap(blocks, piece.block, piece.block + 1).start
                    positions.append(position)
                    views.append(state[piece.parameter][key][index : index + 1])
            numbers.append(
                BlockNumbers(rows_index(positions, len(side.pieces), self._device), views)
            )
        return numbers

    def _lines_in(self, side: Side) -> Iterator[_LinesInBuffer]:
        """Yield the lines in the messages of one side."""
        for message_piece in side.pieces:
            piece = message_piece.piece
            start = message_piece.line_start
            for key, tensor in self._line_tensors(piece.parameter):
                lines = lines_of(self._rank_jobs.plan, piece, tensor)
                if lines.n_values:
                    stop = start + lines.n_values
                    values = side.buffer[start:stop].view(-1, lines.values_per_line)
                    yield _LinesInBuffer(message_piece, key, lines, values)
                    start = stop

    def _local_lines(self, side: Side, state: LocalState) -> CopyList:
        """Return the copies between a buffer of this rank's pieces and its state."""
        copies = CopyList()
        for message_piece, key, lines, values in self._lines_in(side):
            # Vectors of smaller blocks are padded in storage.
            local = state[message_piece.piece.parameter][key].view(lines.shape)
            local = local[lines.batch_index, :, lines.part_number, : lines.values_per_line]
            copies.add(values, local[lines.overlap.local_slice])
        return copies

    def _owned_lines(self, side: Side) -> CopyList:
        """Return the copies between a buffer of holders' pieces and the lines of owned matrices."""
        copies = CopyList()
        for message_piece, key, lines, values in self._lines_in(side):
            place = self._place_of_job[message_piece.job_number]
            owned = self._owned[place.stack][key][place.matrix]
            for in_values, in_block in run_slices(lines.overlap.runs):
                copies.add(values[in_values], owned[in_block])
        return copies

    # ----- a step --------------------------------------------------------------------------------

    def pack(self, headers: Tensor) -> None:
        """Write this rank's state to its pieces' headers, (pieces, fields), and to the buffer."""
        for column, numbers in enumerate(self._packed_numbers, start=FIRST_STATE):
            if numbers.state:
                headers[numbers.pieces, column] = torch.cat(numbers.state).double()
        self._packed_lines.write_buffer()

    def arrive(self, headers: Tensor) -> list[dict[str, Tensor]]:
        """Return the state of the owned matrices by stack.

        `headers` has a header of each matrix, (matrices, fields).
        """
        self._arriving_lines.read_buffer()
        full_dtype = self._rank_jobs.full_dtype
        state: list[dict[str, Tensor]] = []
        for lines in self._owned:
            stack_state = {}
            for key, x in lines.items():
                tensor = self._tensors[key]
                if tensor.along is None:
                    x = x[:, :, 0]
                # A copy: `leave` writes the new state to `_owned`.
                stack_state[key] = x.to(tensor.dtype_for(full_dtype), copy=True)
            state.append(stack_state)
        for column, key in enumerate(self.keys, start=FIRST_STATE):
            numbers = headers[:, column].to(self._tensors[key].dtype_for(full_dtype))
            for stack_state, x in zip(state, numbers.split(self._stack_sizes), strict=True):
                stack_state[key] = x
        return state

    def leave(self, state: Sequence[Mapping[str, Tensor]]) -> Iterator[Tensor]:
        """Write the state of the owned matrices to the buffer; yield the columns of their headers.

        Each column is float64 (matrices,).
        """
        for lines, stack_state in zip(self._owned, state, strict=True):
            for key, x in lines.items():
                x.copy_(stack_state[key].view(x.shape))
        self._leaving_lines.write_buffer()
        for key in self.keys:
            yield torch.cat([stack_state[key] for stack_state in state]).double()

    def take(self) -> None:
        """Take the state back from the headers of this rank's pieces and from the buffer."""
        if any(numbers.state for numbers in self._returned_numbers):
            headers = self._exchange.applying.read_headers()  # costs a kernel on a GPU
            for column, numbers in enumerate(self._returned_numbers, start=FIRST_STATE):
                if numbers.state:
                    values = headers[numbers.pieces, column].to(numbers.state[0].dtype)
                    torch._foreach_copy_(numbers.state, list(values.split(1)))
        self._returned_lines.read_buffer()
