"""The work of one exchange on one rank: what it packs, which matrices it orthogonalizes, which pieces it updates."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from deepmd_muon.optim.sharded import magma_sums
from deepmd_muon.optim.sharded.plan import Domain, Plan
from deepmd_muon.optim.sharded.routes import Piece, Target, piece_of, score_index, targets
from deepmd_muon.optim.sharded.transport import Exchange, Flight


@dataclasses.dataclass
class Moving:
    """A parameter of the plan during one step, on this rank.

    Attributes
    ----------
    direction
        What is to be orthogonalized, (batch, rows, columns) of this rank.
    sums
        Magma's sums of this rank's piece of every block, float64 (blocks here, 5), or None.
    present
        Whether it has a gradient here.
    """

    direction: Tensor
    sums: Tensor | None
    present: bool


@dataclasses.dataclass(frozen=True)
class Stack:
    """Matrices of one parameter group and shape that a rank orthogonalizes together."""

    group: int
    shape: tuple[int, int]
    jobs: tuple[int, ...]


class Bucket:
    """One exchange, compiled for this rank.

    Parameters
    ----------
    plan, domain
        What is planned.
    exchange
        Carries it.
    groups
        Number of the parameter group of every parameter of the plan.
    rank
        This rank.
    device
        Of the tensors.

    Attributes
    ----------
    parameters
        Positions in the plan of the parameters of which this rank packs or updates a piece. Their momenta advance on
        every replica, also where another one's is sent.
    applying
        The pieces whose updates arrive here, in the order of the messages.
    scores
        Where the score of each such piece's block is kept.
    """

    def __init__(
        self, plan: Plan, domain: Domain, exchange: Exchange, groups: Sequence[int], rank: int, device: torch.device
    ) -> None:
        self.exchange = exchange
        self._damped = domain.damped
        self._device = device
        jobs = exchange.route.jobs
        self._parts = [max(1, len(p.view.sizes)) for p in plan.parameters]

        def mine(payloads: Sequence[tuple[int, int, int]]) -> list[Piece]:
            return [piece_of(plan, jobs[j], rank) for j, _, _ in payloads]

        self._packing = mine(exchange.outward["gather"].payloads)
        self.applying = mine(exchange.inward["return"].payloads)
        self.parameters = tuple(dict.fromkeys(piece.parameter for piece in (*self._packing, *self.applying)))
        self.scores = [
            score_index(plan, jobs[j], rank) if plan.parameters[jobs[j].parameter].damped else 0
            for j, _, _ in exchange.inward["return"].payloads
        ]
        stacks: dict[tuple[int, tuple[int, int]], list[int]] = {}
        for j in exchange.route.owned:
            p = plan.parameters[jobs[j].parameter]
            shape = p.view.block_shapes[jobs[j].block % len(p.view.block_shapes)]
            stacks.setdefault((groups[jobs[j].parameter], shape), []).append(j)
        self.stacks = [Stack(*key, tuple(members)) for key, members in stacks.items()]
        self._slots = {j: (s, i) for s, stack in enumerate(self.stacks) for i, j in enumerate(stack.jobs)}

        def others(payloads: Sequence[tuple[int, int, int]], receivers: Sequence[int]) -> list[Piece]:
            return [piece_of(plan, jobs[j], r) for (j, _, _), r in zip(payloads, receivers, strict=True)]

        arriving, leaving = exchange.inward["gather"].payloads, exchange.outward["return"].payloads
        peers = domain.ranks if len(exchange.route.gather_in) == len(domain.ranks) else (rank,)
        senders = [r for r, m in zip(peers, exchange.route.gather_in, strict=True) for _ in m.jobs]
        receivers = [r for r, m in zip(peers, exchange.route.return_out, strict=True) for _ in m.jobs]
        self._arriving = [(self._slots[j], x) for (j, _, _), x in zip(arriving, others(arriving, senders), strict=True)]
        self._leaving = [(self._slots[j], x) for (j, _, _), x in zip(leaving, others(leaving, receivers), strict=True)]
        self._arriving_targets = [targets(piece) for _, piece in self._arriving]
        self._leaving_targets = [targets(piece) for _, piece in self._leaving]
        order = {j: i for i, j in enumerate(exchange.route.owned)}
        self._header_table = _table([order[j] for j, _, _ in arriving], len(order)).to(device)
        self._header_of_leaving = torch.tensor([order[j] for j, _, _ in leaving], dtype=torch.int64, device=device)

    def start_gather(self, moving: Mapping[int, Moving]) -> Flight:
        """Pack and send the directions, with presence and Magma's sums in the headers."""
        headers = torch.zeros(len(self._packing), 6 if self._damped else 1, dtype=torch.float64, device=self._device)
        pieces, rows, with_sums = [], [], []
        for i, piece in enumerate(self._packing):
            source = moving[piece.parameter]
            (r0, r1, _), (c0, c1, _) = piece.rows, piece.columns
            pieces.append(source.direction[piece.batch, r0:r1, c0:c1])
            if source.sums is not None:
                parts = self._parts[piece.parameter]
                rows.append(source.sums[piece.batch * parts + piece.block % parts])
                with_sums.append(i)
        absent = [i for i, piece in enumerate(self._packing) if not moving[piece.parameter].present]
        if len(absent) < len(self._packing):
            headers[:, 0] = 1.0
            if absent:
                headers[absent, 0] = 0.0
        if len(rows) == len(self._packing) and rows:
            headers[:, 1:] = torch.stack(rows)
        elif rows:
            headers[with_sums, 1:] = torch.stack(rows)
        return self.exchange.start("gather", headers, pieces)

    def assemble(self, flight: Flight) -> tuple[list[Tensor], Tensor]:
        """Wait for the pieces; return the matrices, (count, rows, columns) per stack, and the return headers.

        Headers are float64 (owned blocks, 1 or 2): whether any piece had a gradient, and Magma's cosine.
        """
        headers, elements = flight.wait()
        wide = self.exchange.dtype
        matrices = [torch.empty(len(x.jobs), *x.shape, dtype=wide, device=self._device) for x in self.stacks]
        into, out_of = [], []
        for (slot, piece), flat, rectangles in zip(self._arriving, elements, self._arriving_targets, strict=True):
            block = matrices[slot[0]][slot[1]]
            for target in rectangles:
                into.append(block[target.in_block])
                out_of.append(_rectangle(flat, piece, target))
        if into:
            torch._foreach_copy_(into, out_of)
        padded = torch.cat([headers, headers.new_zeros(1, headers.shape[1])])[self._header_table]
        columns = [(padded[:, :, 0].amax(dim=1)).unsqueeze(1)]
        if self._damped:
            columns.append(magma_sums.cosines(padded[:, :, 1:]).double().unsqueeze(1))
        return matrices, torch.cat(columns, dim=1)

    def start_return(self, updates: Sequence[Tensor], headers: Tensor) -> Flight:
        """Send every holder its piece of the updates, (count, rows, columns) per stack."""
        pieces = []
        for (slot, piece), rectangles in zip(self._leaving, self._leaving_targets, strict=True):
            block = updates[slot[0]][slot[1]]
            if len(rectangles) == 1 or not piece.elements:
                pieces.append(block[rectangles[0].in_block] if piece.elements else block[:0])
                continue
            joined = block.new_empty(piece.rows.size, piece.columns.size)
            for target in rectangles:
                joined[target.in_piece] = block[target.in_block]
            pieces.append(joined)
        return self.exchange.start("return", headers[self._header_of_leaving], pieces)


def _rectangle(flat: Tensor, piece: Piece, target: Target) -> Tensor:
    return flat.view(piece.rows.size, piece.columns.size)[target.in_piece]


def _table(owners: Sequence[int], count: int) -> Tensor:
    """Return int64 (count, most): for each owned block its pieces' positions, filled up with the number of pieces."""
    pieces: list[list[int]] = [[] for _ in range(count)]
    for i, owner in enumerate(owners):
        pieces[owner].append(i)
    most = max((len(found) for found in pieces), default=1)
    rows = [found + [len(owners)] * (most - len(found)) for found in pieces]
    return torch.tensor(rows, dtype=torch.int64).view(count, most)
