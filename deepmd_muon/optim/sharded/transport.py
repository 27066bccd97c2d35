"""Carrying one bucket: pack → all-to-all to the owners → … → all-to-all back → unpack.

A message is a row of 8-byte words: a header per piece (presence, Magma's score and sums), then all elements in the
wire's type. Buffers are float64 tensors, of which the elements are views, so that one collective carries both.

Buffers are *slots* that the buckets take in turn and that live as long as the plan, so that every view of them is made
once. On GPUs collectives run on a stream of their own, with priority: they overlap with what the caller launches
before it waits. Nothing else needs that stream: whoever reuses a buffer has waited for the flight that read it.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from deepmd_muon.optim.phases import Phase, in_phase, run_in_phase
from deepmd_muon.optim.sharded.messages import Message, RankMessages, header_words, payload_starts
from deepmd_muon.optim.sharded.plan import Domain, Leg, Plan

_PHASES: dict[Leg, Phase] = {"gather": "gather", "return": "scatter"}
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
        positions = torch.tensor(header_words(messages, header), dtype=torch.int64, device=device).view(-1, header)
        starts = payload_starts(messages, header, dtype.itemsize)
        return cls(tuple(message.words for message in messages), positions, tuple(starts), dtype)

    @property
    def words(self) -> int:
        """Length of the buffer."""
        return sum(self.splits)

    def elements(self, buffer: Tensor) -> list[Tensor]:
        """Return every piece's elements as a flat view of the buffer."""
        flat = buffer.view(self.dtype)
        return [flat[start : start + count] for _, start, count in self.payloads]


class ExchangeBuffers:
    """The buffers of one bucket at a time: one on its holders' side, one on its owners'.

    The way to the owner leads from the first into the second, the way back from the second into the first; a leg on
    which every message is to oneself stays where it was packed.
    """

    def __init__(self, words: Sequence[int], device: torch.device) -> None:
        self.holders, self.owners = (torch.empty(n, dtype=torch.float64, device=device) for n in words)


class CollectiveStream:
    """Where collectives run: a stream with priority on a GPU, the backend's own threads elsewhere."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device, priority=-1) if device.type == "cuda" else None
        # Whoever lets go of a collective last frees its tensors, for which one of gloo's threads would need the
        # interpreter's lock; where the process ends meanwhile, it aborts. So it shall not be that thread.
        self._last: Any = None

    def launch(self, collective: Callable[..., Any], *args: Any, **options: Any) -> Callable[[], Any]:
        """Start a collective after what the present stream has been given; return what makes that stream wait."""
        if self._stream is None:
            self._last = collective(*args, **options, async_op=True)
            wait: Callable[[], Any] = self._last.wait
            return wait
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            collective(*args, **options, async_op=False)
            done = self._stream.record_event()
        return lambda: torch.cuda.current_stream(self._device).wait_event(done)


class Exchange:
    """One bucket of one domain on one rank, or a portion of the jobs that stay on it.

    Parameters
    ----------
    plan, domain, messages
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
        messages: RankMessages,
        bucket: int | None,
        group: dist.ProcessGroup | None,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.messages = messages
        self.dtype = dtype
        self._group = group
        crossing = domain.exchanges()
        self._crosses = {leg: bucket is not None and bucket in crossing[leg] for leg in crossing}

        def side(messages: Sequence[Message], leg: Leg) -> Side:
            wire = plan.settings.gather_dtype if leg == "gather" else plan.settings.return_dtype
            return Side.of(messages, domain.header(leg), _DTYPES.get(wire, dtype), device)

        self.outward: dict[Leg, Side] = {
            "gather": side(messages.gather_out, "gather"),
            "return": side(messages.return_out, "return"),
        }
        self.inward: dict[Leg, Side] = {
            "gather": side(messages.gather_in, "gather"),
            "return": side(messages.return_in, "return"),
        }
        self.sent: dict[Leg, Tensor] = {}
        self.received: dict[Leg, Tensor] = {}

    @property
    def words(self) -> tuple[int, int]:
        """Length of the buffers that it needs on the holders' side and on the owners'."""
        out, into = self.outward, self.inward
        return max(out["gather"].words, into["return"].words), max(into["gather"].words, out["return"].words)

    def bind(self, buffers: ExchangeBuffers) -> None:
        """Use these buffers from now on."""
        sides: dict[Leg, tuple[Tensor, Tensor]] = {
            "gather": (buffers.holders, buffers.owners),
            "return": (buffers.owners, buffers.holders),
        }
        for leg, (near, far) in sides.items():
            self.sent[leg] = near[: self.outward[leg].words]
            self.received[leg] = (far if self._crosses[leg] else near)[: self.inward[leg].words]

    def start(self, leg: Leg, collectives: CollectiveStream) -> Callable[[], Any]:
        """Send what has been packed; return what waits until this rank's part has arrived."""
        if not self._crosses[leg]:
            return _nothing  # every message is to oneself, in the same order
        received, sent = self.inward[leg], self.outward[leg]
        phase = _PHASES[leg]
        with in_phase(phase):
            wait = collectives.launch(
                dist.all_to_all_single,
                self.received[leg],
                self.sent[leg],
                list(received.splits),
                list(sent.splits),
                group=self._group,
            )
        return functools.partial(run_in_phase, phase, wait)


def _nothing() -> None:
    """Wait for nothing."""
