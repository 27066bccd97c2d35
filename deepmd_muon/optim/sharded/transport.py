"""The exchange of one bucket: an all-to-all to the owners, and another one back.

    leg       holder's buffer                       owner's buffer
    gather    `packing`: pieces of directions   →   `arriving`: to assemble whole matrices
    return    `applying`: pieces to update      ←   `leaving`: all pieces of the updates

A rank is both: a holder of pieces of its own parameters, and the owner of some blocks. Each of its
two buffers has a message for each peer (`messages`).

The wire type is that of `gather_dtype` or `return_dtype`. Elements are rounded to it when they are
copied into the buffer. Directions are widened when they are copied to matrices; updates stay in the
buffer, and `apply_updates` widens them.

Buckets take turns with a fixed number of pairs of buffers (the setting `slots`), so that views of
them are created once. On GPUs collectives run on a high-priority stream and overlap with the work
that the caller launches before it waits. Buffers need no further synchronization: each is reused
only after waiting for the collective that read it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from deepmd_muon.optim.sharded.jobs import RankJobs
from deepmd_muon.optim.sharded.messages import Side
from deepmd_muon.optim.sharded.plan import LEGS, Leg
from deepmd_muon.optim.torch_hooks import in_phase, phase

Wait = Callable[[], Any]
"""Waits for a collective: on a GPU the current stream waits, not the host.

Call it once: it may also run `then` of `CollectiveStream.launch`, or copy what has arrived.
"""


class Exchange:
    """The two collectives of one bucket, on one rank.

    `process_group` has the domain's ranks in ascending order. It is None for a portion and for a
    domain of one rank: they have no collectives, their messages go to the rank itself.

    Attributes
    ----------
    packing, arriving, leaving, applying
        The sides of the two legs, as in the table of the module.
    """

    def __init__(
        self,
        rank_jobs: RankJobs,
        process_group: dist.ProcessGroup | None,
        device: torch.device,
    ) -> None:
        self._process_group = process_group
        # Whether a leg has a collective. The plan decides: a rank that only has messages to itself
        # joins the collective of the others. A portion has no bucket number, so it never crosses.
        crossing = rank_jobs.domain.crossing_buckets()
        self._crosses = {leg: rank_jobs.bucket in crossing[leg] for leg in LEGS}
        self.packing = Side(rank_jobs, "gather", device, owns=False)
        self.arriving = Side(rank_jobs, "gather", device, owns=True)
        self.leaving = Side(rank_jobs, "return", device, owns=True)
        self.applying = Side(rank_jobs, "return", device, owns=False)

    @property
    def holder_words(self) -> int:
        """Words that it needs of the holder's buffer."""
        return max(self.packing.words, self.applying.words)

    @property
    def owner_words(self) -> int:
        """Words that it needs of the owner's buffer."""
        return max(self.arriving.words, self.leaving.words)

    def use_buffers(self, holder_buffer: Tensor, owner_buffer: Tensor) -> None:
        """Use these buffers; one bucket at a time may use them.

        In the table of the module, a side uses its column's buffer. Only the receiving side of a
        leg without a collective uses the sender's: all messages are those of ranks to themselves,
        which have the same pieces in the same order on both sides.
        """
        self.packing.use_buffer(holder_buffer)
        self.arriving.use_buffer(owner_buffer if self._crosses["gather"] else holder_buffer)
        self.leaving.use_buffer(owner_buffer)
        self.applying.use_buffer(holder_buffer if self._crosses["return"] else owner_buffer)

    def start(self, leg: Leg, collectives: CollectiveStream) -> Wait:
        """Start to send the packed messages; return the wait for those to this rank.

        The pipeline has one `CollectiveStream` for all its buckets.
        """
        if not self._crosses[leg]:
            return lambda: None  # nothing moves: both sides share a buffer, see `use_buffers`
        sent = self.packing if leg == "gather" else self.leaving
        received = self.arriving if leg == "gather" else self.applying
        with in_phase(leg):
            wait = collectives.launch(
                dist.all_to_all_single,
                received.buffer,
                sent.buffer,
                received.splits,
                sent.splits,
                group=self._process_group,
            )
        return phase(leg)(wait)  # waiting belongs to the same range of the profiler


class CollectiveStream:
    """Launches collectives: on a high-priority stream on a GPU, else on the backend's threads."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device, priority=-1) if device.type == "cuda" else None
        # Keeps the last collective alive: if one of gloo's threads dropped the last reference,
        # freeing the tensors would need the GIL, and a process exiting meanwhile would abort.
        self._last: Any = None

    def launch(
        self,
        collective: Callable[..., Any],
        *args: Any,
        then: Callable[[], object] | None = None,
        **options: Any,
    ) -> Wait:
        """Start a collective after the current stream's work; return the wait.

        The caller keeps its tensors until the wait: the allocator does not know that another stream
        uses them. `then` runs after the collective: on a GPU in parallel to the current stream's
        work, else at the end of the wait.
        """
        if self._stream is None:
            work = self._last = collective(*args, **options, async_op=True)

            def arrive() -> None:
                work.wait()
                if then is not None:
                    then()

            return arrive
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            # Not asynchronous: NCCL then runs it on this stream, so `then` and `done` are after it.
            collective(*args, **options, async_op=False)
            if then is not None:
                then()
            done = self._stream.record_event()
        return lambda: torch.cuda.current_stream(self._device).wait_event(done)
