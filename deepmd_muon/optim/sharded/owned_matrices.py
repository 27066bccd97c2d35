"""The owner's half of a bucket: matrices assembled from pieces, updates divided into pieces.

Two sides of an `Exchange` concern the owner: holders' pieces arrive in `arriving`, and pieces of
the updates leave from `leaving`. Both may use the same buffer, so `assemble` copies everything out
of it before `pack_updates` overwrites it. Between the two the owner keeps whole matrices in a
workspace that all buckets share.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

from deepmd_muon.optim.rules.interface import Input, MatrixRule
from deepmd_muon.optim.sharded.jobs import RankJobs, Stack, matrix_places
from deepmd_muon.optim.sharded.messages import PRESENCE, CopyList, Side, first_sum
from deepmd_muon.optim.sharded.pieces import rectangles
from deepmd_muon.optim.sharded.plan import WORD_BYTES, rule_values
from deepmd_muon.optim.sharded.rule_state import OwnedRuleState
from deepmd_muon.optim.sharded.transport import Exchange


@dataclasses.dataclass(frozen=True)
class OwnedBlocks:
    """Properties of an owner's matrices, gathered with their pieces; one tensor per stack.

    Attributes
    ----------
    present
        Positive if any piece had a gradient, float64 (matrices,).
    measured
        Statistics by rule, (matrices,).
    state
        State of rules by key: (matrices,) per block; per line (matrices, lines), or
        (matrices, lines, values) if the rule keeps vectors. The caller of `assemble` replaces these
        tensors by the new state.
    """

    present: list[Tensor]
    measured: dict[MatrixRule, list[Tensor]]
    state: list[dict[str, Tensor]]


def workspace_words(rank_jobs: RankJobs, stacks: Sequence[Stack]) -> int:
    """Return the words of the workspace that these matrices and their inputs need."""
    n_planes = rank_jobs.domain.n_planes("gather")
    n_elements = n_planes * sum(stack.elements for stack in stacks)
    return -(-n_elements * rank_jobs.full_dtype.itemsize // WORD_BYTES)  # rounded up


class OwnedMatrices:
    """The matrices of a bucket that this rank owns, with all views of buffers and workspace.

    Parameters
    ----------
    rank_jobs, stacks
        The jobs of the bucket, and the stacks of the matrices that this rank owns.
    exchange
        The exchange of the bucket, after its `use_buffers`.
    workspace
        Float64 memory of at least `workspace_words`.
    device
        The device of buffers and workspace.

    Attributes
    ----------
    matrices
        Each stack as a tensor (matrices, rows, columns) in full precision. These are directions
        after `assemble`, and updates after `pack_updates`.
    inputs
        By kind, the inputs that rules request, shaped like `matrices`.
    """

    def __init__(
        self,
        rank_jobs: RankJobs,
        exchange: Exchange,
        stacks: Sequence[Stack],
        workspace: Tensor,
        device: torch.device,
    ) -> None:
        rules = rank_jobs.domain.rules
        self._exchange = exchange
        self._stack_sizes = [len(stack.job_numbers) for stack in stacks]
        self._places = matrix_places(stacks)
        self._measuring_rules = [rule for rule in rules if rule.sums]
        self._first_sum = first_sum(rank_jobs.domain)

        input_kinds = rule_values(rules).inputs
        flat = workspace.view(rank_jobs.full_dtype)
        planes = _stacks_of_planes(flat, stacks, n_planes=1 + len(input_kinds))
        self.matrices, *inputs = planes  # in the order of planes in messages
        self.inputs: dict[Input, list[Tensor]] = dict(zip(input_kinds, inputs, strict=True))
        self._arriving_elements = self._element_copies(exchange.arriving, planes)
        self._leaving_elements = self._element_copies(exchange.leaving, [self.matrices])
        self._rule_state = OwnedRuleState(
            rank_jobs, exchange, stacks=stacks, places=self._places, device=device
        )

        # Headers come in the order of messages. These indices relate it to `MatrixPlace.number`:
        # (matrices, most pieces of a matrix) of `arriving`, and (pieces,) of `leaving`.
        self._headers_of_matrix = torch.tensor(
            self._padded_arriving_pieces(), dtype=torch.int64, device=device
        )
        self._matrix_of_leaving = torch.tensor(
            [
                self._places[message_piece.job_number].number
                for message_piece in exchange.leaving.pieces
            ],
            dtype=torch.int64,
            device=device,
        )

    def _element_copies(self, side: Side, planes: Sequence[Sequence[Tensor]]) -> CopyList:
        """Return the copies between the elements of a side's pieces and the matrices of planes.

        `planes` has one tensor (matrices, rows, columns) for each plane and, in it, each stack.
        """
        copies = CopyList()
        for plane, tensors_of_stacks in enumerate(planes):
            views = side.element_views(plane)
            for message_piece, in_buffer in zip(side.pieces, views, strict=True):
                place = self._places[message_piece.job_number]
                matrix = tensors_of_stacks[place.stack][place.index_in_stack]
                for in_piece, in_block in rectangles(message_piece.piece):
                    copies.add(in_buffer[in_piece], matrix[in_block])
        return copies

    def _padded_arriving_pieces(self) -> list[list[int]]:
        """Return the positions in `arriving.pieces` of each matrix's pieces, as rows of one length.

        Rows of matrices with fewer pieces are padded with the position after the last piece, where
        `assemble` appends a header of zeros.
        """
        pieces = self._exchange.arriving.pieces
        rows: list[list[int]] = [[] for _ in self._places]
        for position, message_piece in enumerate(pieces):
            rows[self._places[message_piece.job_number].number].append(position)
        longest = max(map(len, rows), default=0)
        return [row + [len(pieces)] * (longest - len(row)) for row in rows]

    def assemble(self) -> OwnedBlocks:
        """Copy the pieces that have arrived to `matrices` and `inputs`.

        Return what their headers and lines say of the matrices.
        """
        self._arriving_elements.read_buffer()
        headers = self._exchange.arriving.read_headers()
        padding = headers.new_zeros(1, headers.shape[1])
        # (matrices, most pieces of a matrix, words of a header)
        headers = torch.cat([headers, padding])[self._headers_of_matrix]
        present = headers[:, :, PRESENCE].amax(dim=1).split(self._stack_sizes)
        measured = {}
        start = self._first_sum
        for rule in self._measuring_rules:
            sums = headers[:, :, start : start + rule.sums]
            measured[rule] = list(rule.combine(sums).split(self._stack_sizes))
            start += rule.sums
        # All holders of a matrix have the same scores, so the header of its first piece will do.
        state = self._rule_state.assemble(headers[:, 0])
        return OwnedBlocks(present=list(present), measured=measured, state=state)

    def pack_updates(self, updates: Sequence[Tensor], owned_blocks: OwnedBlocks) -> None:
        """Write the pieces of the updates, one tensor per stack, and their headers to `leaving`.

        `owned_blocks` is the result of `assemble`, with the new state.
        """
        torch._foreach_copy_(self.matrices, list(updates))
        self._leaving_elements.write_buffer()
        # The words of headers in their order: PRESENCE, then scores from FIRST_STATE on.
        words = [
            torch.cat(owned_blocks.present),
            *self._rule_state.pack_updates(owned_blocks.state),
        ]
        headers = torch.stack(words, dim=1)  # (matrices, words of a header)
        self._exchange.leaving.write_headers(headers[self._matrix_of_leaving])


def _stacks_of_planes(
    flat: Tensor, stacks: Sequence[Stack], *, n_planes: int
) -> list[list[Tensor]]:
    """Return views (matrices, rows, columns) of `flat` for each plane and, in it, each stack."""
    planes: list[list[Tensor]] = []
    start = 0
    for _ in range(n_planes):
        plane = []
        for stack in stacks:
            stop = start + stack.elements
            plane.append(flat[start:stop].view(-1, *stack.shape))
            start = stop
        planes.append(plane)
    return planes
