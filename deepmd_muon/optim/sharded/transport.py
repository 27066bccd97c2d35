"""The exchange of one bucket: an all-to-all to the owners, and another one back.

    gather    holders pack their pieces of directions   →   owners assemble whole matrices
    return    owners pack all pieces of their updates   →   holders apply theirs

A rank is both: a holder of pieces of its own parameters, and the owner of some blocks. It has a
buffer for each role; the gather goes from the holder's buffer to owners' buffers, the return back.

A buffer has a message for each peer. A message is a row of 8-byte words:

    header of piece 0 | header of piece 1 | … | lines of piece 0 | … | elements of piece 0 | …

A header has whether the piece has a gradient, the rules' state per block and, in the gather, their
sums. Lines are the rules' state per row or column. Elements are in the wire type, all planes of a
piece one after the other, padded at the end to whole words. Buffers are float64 tensors, and
elements are views of them, so that one collective carries everything.

The wire type is that of `gather_dtype` or `return_dtype`. Elements are rounded to it when they are
copied into the buffer. Directions are widened when they are copied to matrices; updates stay in the
buffer, and `apply_updates` widens them.

Buckets take turns with a fixed number of buffers (the setting `slots`), so that views of them are
created once. On GPUs collectives run on a high-priority stream and overlap with the work that the
caller launches before it waits. Buffers need no further synchronization: each is reused only after
waiting for the collective that read it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from deepmd_muon.optim.sharded.messages import Message, RankMessages
from deepmd_muon.optim.sharded.plan import LEGS, WORD, Domain, Leg, Plan
from deepmd_muon.optim.torch_hooks import in_phase, phase

_NARROW_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}


class Exchange:
    """The two collectives of bucket number `bucket` of a domain, on one rank.

    A portion of jobs that stay on the rank has no `bucket` and no collectives: the rank sends its
    messages to itself. `group` is the process group of the domain's ranks in ascending order; None
    for a domain of one rank, which has no collectives either.

    Attributes
    ----------
    messages
        The pieces in each message.
    full_dtype
        Element type of matrices and updates outside messages, float32 or float64.
    sending, receiving
        By leg: the end at which this rank sends, and the one at which it receives. Its message to
        itself is in both.
    buffer_words
        Words that the exchange needs of the holder's and of the owner's buffer; both legs use both.
    """

    def __init__(
        self,
        plan: Plan,
        domain: Domain,
        messages: RankMessages,
        bucket: int | None,
        group: dist.ProcessGroup | None,
        full_dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.messages = messages
        self.full_dtype = full_dtype
        self._group = group
        # Whether any rank has a message for another: a rank with messages to itself only must join
        # the collective of the others all the same. A portion, None, is in no leg.
        self._crosses = {
            leg: bucket in numbers for leg, numbers in domain.crossing_buckets().items()
        }

        end = functools.partial(
            End, plan, domain, peers=messages.peers, full_dtype=full_dtype, device=device
        )
        self.sending = {leg: end(leg, messages.sent[leg]) for leg in LEGS}
        self.receiving = {leg: end(leg, messages.received[leg]) for leg in LEGS}
        holder_words = max(self.sending["gather"].words, self.receiving["return"].words)
        owner_words = max(self.receiving["gather"].words, self.sending["return"].words)
        self.buffer_words = holder_words, owner_words

    def bind(self, holder_buffer: Tensor, owner_buffer: Tensor) -> None:
        """Use these buffers, which have at least `buffer_words`; one bucket at a time may use them.

        Without a collective, a leg receives in the buffer from which it sends: all messages are
        those of ranks to themselves, which have the same pieces in the same order at both ends.
        """
        for leg in LEGS:
            send_buffer = holder_buffer if leg == "gather" else owner_buffer
            receive_buffer = owner_buffer if leg == "gather" else holder_buffer
            if not self._crosses[leg]:
                receive_buffer = send_buffer
            self.sending[leg].bind(send_buffer)
            self.receiving[leg].bind(receive_buffer)

    def start(self, leg: Leg, collectives: CollectiveStream) -> Callable[[], Any]:
        """Start to send the packed messages.

        Return a function that waits until this rank has received its messages; on a GPU the current
        stream waits, not the host.
        """
        if not self._crosses[leg]:
            return lambda: None  # nothing moves: both ends have the same buffer, see `bind`
        receiving = self.receiving[leg]
        sending = self.sending[leg]
        with in_phase(leg):
            wait = collectives.launch(
                dist.all_to_all_single,
                receiving.buffer,
                sending.buffer,
                receiving.splits,
                sending.splits,
                group=self._group,
            )
        return phase(leg)(wait)  # waiting belongs to the same range of the profiler


class End:
    """The sending or the receiving end of a leg on one rank: where everything is in its messages.

    `messages` are those to, or from, each of `peers`.

    Attributes
    ----------
    buffer
        The messages, float64 `(words,)`; set by `bind`.
    wire_dtype
        Element type on the wire: `full_dtype` unless the settings name a narrower one.
    planes
        Number of planes: directions, then the inputs that rules request.
    splits
        Words of each message, as `all_to_all_single` takes them. The message of this rank to itself
        is among them, although it does not leave the rank.
    words
        Words of all messages.
    peers_of_pieces, line_starts, payloads
        For each piece, in the order of the messages: the rank at the other end, the first word of
        its lines, and its elements.
    """

    def __init__(
        self,
        plan: Plan,
        domain: Domain,
        leg: Leg,
        messages: Sequence[Message],
        peers: Sequence[int],
        full_dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        dtype_name = plan.settings.gather_dtype if leg == "gather" else plan.settings.return_dtype
        self.wire_dtype = _NARROW_DTYPES.get(dtype_name, full_dtype)
        self.planes = domain.planes(leg)
        header_words = domain.header_words(leg)
        self.splits = [message.words for message in messages]
        self.words = sum(self.splits)
        self.peers_of_pieces: list[int] = []
        self.line_starts: list[int] = []
        self.payloads: list[Payload] = []
        header_positions: list[int] = []
        message_start = 0
        for peer, message in zip(peers, messages, strict=True):
            self.peers_of_pieces += [peer] * len(message.jobs)
            word = message_start + len(message.jobs) * header_words
            header_positions += range(message_start, word)
            for n_values in message.line_values:
                self.line_starts.append(word)
                word += n_values
            element = word * WORD // self.wire_dtype.itemsize
            for job, n_elements in zip(message.jobs, message.elements, strict=True):
                self.payloads.append(Payload(job, start=element, elements=n_elements))
                element += self.planes * n_elements
            message_start += message.words
        positions = torch.tensor(header_positions, dtype=torch.int64, device=device)
        # An index into the buffer, (pieces, words of a header).
        self._header_positions = positions.view(-1, header_words)

    def bind(self, buffer: Tensor) -> None:
        """Keep the messages at the start of this buffer."""
        self.buffer = buffer[: self.words]

    def headers(self) -> Tensor:
        """Return the headers in the order of the messages, float64 (pieces, words of a header)."""
        return self.buffer[self._header_positions]

    def set_headers(self, headers: Tensor) -> None:
        """Write these headers to the buffer."""
        self.buffer[self._header_positions] = headers

    def element_views(self, plane: int = 0) -> list[Tensor]:
        """Return every piece's elements of one plane as a flat view of the buffer."""
        flat = self.buffer.view(self.wire_dtype)
        views = []
        for payload in self.payloads:
            start = payload.start + plane * payload.elements
            views.append(flat[start : start + payload.elements])
        return views


class Payload(NamedTuple):
    """Where the elements of one piece are in a buffer, counted in elements of the wire type."""

    job: int  # position in the exchange's jobs
    start: int  # of the first plane; the others follow
    elements: int  # in each plane


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
    ) -> Callable[[], Any]:
        """Start a collective after the current stream's work.

        Return a function that makes that stream wait for the collective. `then` takes what was
        received: on a GPU in parallel to the current stream's work, else in the function that is
        returned, which is called once.
        """
        if self._stream is None:
            work = self._last = collective(*args, **options, async_op=True)

            def wait() -> None:
                work.wait()
                if then is not None:
                    then()

            return wait
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            collective(*args, **options, async_op=False)
            if then is not None:
                then()
            done = self._stream.record_event()
        return lambda: torch.cuda.current_stream(self._device).wait_event(done)
