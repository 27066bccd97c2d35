"""Carrying one bucket: pack → all-to-all to the owners → … → all-to-all back → unpack.

A message is a row of 8-byte words: a header per piece (presence, Magma's sums or cosine), then all elements in the
wire's type. Buffers are float64 tensors, of which the elements are views, so that one collective carries both.
Collectives are asynchronous: they overlap with what the caller launches before it waits, on NCCL's own stream.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from deepmd_muon.optim.sharded.plan import Domain, Leg, Plan
from deepmd_muon.optim.sharded.routes import Message, Route, header_words, payload_starts

_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclasses.dataclass(frozen=True)
class Side:
    """All messages that a rank sends, or receives, in one leg.

    Attributes
    ----------
    splits
        Words to or from every peer.
    headers
        int64 (pieces, header words): where each header lies.
    payloads
        Job, first element and number of elements of every piece.
    dtype
        Of the elements.
    """

    splits: tuple[int, ...]
    headers: Tensor
    payloads: tuple[tuple[int, int, int], ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, messages: Sequence[Message], header: int, dtype: torch.dtype, device: torch.device) -> Side:
        """Compile messages."""
        positions = torch.tensor(header_words(messages, header), dtype=torch.int64).view(-1, header)
        starts = payload_starts(messages, header, dtype.itemsize)
        return cls(tuple(message.words for message in messages), positions.to(device), tuple(starts), dtype)

    @property
    def words(self) -> int:
        """Length of the buffer."""
        return sum(self.splits)

    def elements(self, buffer: Tensor) -> list[Tensor]:
        """Return every piece's elements as a flat view of the buffer."""
        flat = buffer.view(self.dtype)
        return [flat[start : start + count] for _, start, count in self.payloads]


class Flight:
    """A collective under way."""

    def __init__(self, sent: Tensor, received: Tensor, side: Side, work: dist.Work | None) -> None:
        self._sent: Tensor | None = sent  # kept until the collective has read it
        self._received = received
        self._side = side
        self._work = work

    def wait(self) -> tuple[Tensor, list[Tensor]]:
        """Return the headers, (pieces, header words), and every piece's elements, flat."""
        if self._work is not None:
            self._work.wait()
        self._sent = None
        return self._received[self._side.headers], self._side.elements(self._received)


class Exchange:
    """One bucket of one domain on one rank, or a portion of the jobs that stay on it.

    Parameters
    ----------
    plan, domain, route
        What travels.
    bucket
        Its number; None for jobs that stay.
    group
        Process group of the domain's ranks, in ascending order of global ranks.
    dtype
        Of elements in full precision.
    device
        Of the buffers.
    """

    def __init__(
        self,
        plan: Plan,
        domain: Domain,
        route: Route,
        bucket: int | None,
        group: dist.ProcessGroup | None,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.route = route
        self.dtype = dtype
        self._group = group
        self._device = device
        crossing = domain.exchanges()
        self._crosses = {leg: bucket is not None and bucket in crossing[leg] for leg in crossing}

        def side(messages: Sequence[Message], leg: Leg) -> Side:
            wire = plan.settings.gather_dtype if leg == "gather" else plan.settings.return_dtype
            return Side.of(messages, domain.header(leg), _DTYPES.get(wire, dtype), device)

        self.outward: dict[Leg, Side] = {
            "gather": side(route.gather_out, "gather"),
            "return": side(route.return_out, "return"),
        }
        self.inward: dict[Leg, Side] = {
            "gather": side(route.gather_in, "gather"),
            "return": side(route.return_in, "return"),
        }

    def start(self, leg: Leg, headers: Tensor, pieces: Sequence[Tensor]) -> Flight:
        """Pack and send one leg.

        Parameters
        ----------
        leg
            'gather' or 'return'.
        headers
            float64 (pieces, header words), in the order of the outward side.
        pieces
            Elements of the same pieces, of any shape and real dtype.

        Returns
        -------
        Flight
            What arrives, once it has.
        """
        side = self.outward[leg]
        buffer = torch.empty(side.words, dtype=torch.float64, device=self._device)
        buffer[side.headers] = headers
        moved = [(t, x) for t, x in zip(side.elements(buffer), pieces, strict=True) if t.numel()]
        if moved:
            torch._foreach_copy_([t.view(x.shape) for t, x in moved], [x for _, x in moved])
        arriving = self.inward[leg]
        if not self._crosses[leg]:
            return Flight(buffer, buffer, arriving, None)  # every message is to oneself, in the same order
        received = torch.empty(arriving.words, dtype=torch.float64, device=self._device)
        work = dist.all_to_all_single(
            received, buffer, list(arriving.splits), list(side.splits), group=self._group, async_op=True
        )
        return Flight(buffer, received, arriving, work)
