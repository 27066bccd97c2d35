"""The exchange of one bucket: pack → all-to-all to the owners → … → all-to-all back → unpack.

A message is a row of 8-byte words: a header per piece (presence, the rules' state per block and sums), the rules'
state per row or column, then all elements in the type of messages. Buffers are float64 tensors; the elements are views
of them, so that one collective carries everything.

Buckets take turns with a fixed number of buffers (the setting `slots`), so that views of them are created once. On GPUs
collectives run on a high-priority stream and overlap with the work that the caller launches before it waits. Buffers
need no further synchronization: each is reused only after waiting for the collective that read it.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from deepmd_muon.optim.phases import Phase, in_phase, phase
from deepmd_muon.optim.sharded.messages import RankMessages
from deepmd_muon.optim.sharded.plan import LEGS, WORD, Domain, Leg, Plan

_PHASES: dict[Leg, Phase] = {"gather": "gather", "return": "scatter"}
_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}


class Side:
    """All messages that a rank sends to its peers, or receives from them, in one leg."""

    def __init__(
        self,
        plan: Plan,
        domain: Domain,
        leg: Leg,
        messages: RankMessages,
        wide: torch.dtype,
        device: torch.device,
        *,
        sending: bool,
    ) -> None:
        wire = plan.settings.gather_dtype if leg == "gather" else plan.settings.return_dtype
        self.dtype, self.planes, header = (
            _DTYPES.get(wire, wide),
            domain.planes(leg),
            domain.header(leg),
        )
        several = (messages.out if sending else messages.into)[leg]
        self.splits = [message.words for message in several]
        self.words = sum(self.splits)  # length of the buffer
        # For every piece: the other rank (`peers`); first and last word (exclusive) of rules' state per row or column
        # (`lines`); job, first element, and number of elements in each plane (`payloads`). Planes are directions, then
        # inputs of rules.
        self.peers = [
            peer
            for peer, message in zip(messages.peers, several, strict=True)
            for _ in message.jobs
        ]
        self.lines: list[tuple[int, int]] = []
        self.payloads: list[tuple[int, int, int]] = []
        headers: list[int] = []
        start = 0
        for message in several:
            body = start + len(message.jobs) * header
            headers += range(start, body)
            ends = [*itertools.accumulate(message.lines, initial=body)]
            self.lines += itertools.pairwise(ends)
            first = ends[-1] * WORD // self.dtype.itemsize
            firsts = itertools.accumulate(
                (self.planes * n for n in message.elements), initial=first
            )
            self.payloads += zip(message.jobs, firsts, message.elements, strict=False)
            start += message.words
        # The words of every piece's header, (pieces, header words).
        self.headers = torch.tensor(headers, dtype=torch.int64, device=device).view(-1, header)

    def elements(self, buffer: Tensor, plane: int = 0) -> list[Tensor]:
        """Return every piece's elements of one plane as a flat view of the buffer."""
        flat = buffer.view(self.dtype)
        return [
            flat[start + plane * count : start + (plane + 1) * count]
            for _, start, count in self.payloads
        ]


class CollectiveStream:
    """Launches collectives: on a high-priority stream on a GPU, on the backend's threads elsewhere."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device, priority=-1) if device.type == "cuda" else None
        # Keeps the last collective alive: if one of gloo's threads dropped the last reference, freeing the tensors
        # would need the GIL, and a process exiting meanwhile would abort.
        self._last: Any = None

    def launch(
        self,
        collective: Callable[..., Any],
        *args: Any,
        then: Callable[[], object] | None = None,
        **options: Any,
    ) -> Callable[[], Any]:
        """Start a collective after the current stream's work; return a function that makes that stream wait for it.

        `then` takes what has arrived: on a GPU beside the current stream's work, else in the function that is returned,
        which is called once.
        """
        if self._stream is None:
            self._last = collective(*args, **options, async_op=True)
            return functools.partial(_arrive, self._last, then)
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            collective(*args, **options, async_op=False)
            if then is not None:
                then()
            done = self._stream.record_event()
        return lambda: torch.cuda.current_stream(self._device).wait_event(done)


def _arrive(work: Any, then: Callable[[], object] | None) -> None:
    work.wait()
    if then is not None:
        then()


class Exchange:
    """One bucket of one domain on one rank, or, without `bucket`, a portion of the jobs that stay on it.

    `group` is the process group of the domain's ranks in ascending order; `dtype` is that of full-precision elements.
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

        make = functools.partial(Side, plan, domain, messages=messages, wide=dtype, device=device)
        self.outward = {leg: make(leg, sending=True) for leg in LEGS}
        self.inward = {leg: make(leg, sending=False) for leg in LEGS}
        out, into = self.outward, self.inward
        # Length of the buffers on the holders' side and on the owners' side.
        self.words = (
            max(out["gather"].words, into["return"].words),
            max(into["gather"].words, out["return"].words),
        )
        self.sent: dict[Leg, Tensor] = {}
        self.received: dict[Leg, Tensor] = {}

    def bind(self, holders: Tensor, owners: Tensor) -> None:
        """Use these buffers, which one bucket at a time may use: one on the holders' side, one on the owners' side.

        The gather copies from the first to the second, the return from the second to the first. If all messages of a
        leg stay on the rank, they are read from the buffer in which they were packed.
        """
        for leg in LEGS:
            near, far = (holders, owners) if leg == "gather" else (owners, holders)
            self.sent[leg] = near[: self.outward[leg].words]
            self.received[leg] = (far if self._crosses[leg] else near)[: self.inward[leg].words]

    def start(self, leg: Leg, collectives: CollectiveStream) -> Callable[[], Any]:
        """Start sending the packed messages; return a function that waits for this rank's messages."""
        if not self._crosses[leg]:
            return lambda: None  # all messages stay on this rank, in the same order
        received, sent = self.inward[leg], self.outward[leg]
        with in_phase(_PHASES[leg]):
            wait = collectives.launch(
                dist.all_to_all_single,
                self.received[leg],
                self.sent[leg],
                received.splits,
                sent.splits,
                group=self._group,
            )
        return phase(_PHASES[leg])(wait)
