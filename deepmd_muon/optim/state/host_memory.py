"""Moments of an optimizer in host memory: fetched lot by lot around a step, and brought back, beside the computation.

A *lot* is what one piece of a step's work needs. While lot i is stepped, lot i + 1 travels to the device and lot i − 1
back: two rooms on the device take turns, so that beside the step's own workspace they are all the memory that the
moments take there. Copies run on two streams of their own, one each way, between pinned memory and the rooms. Without
a GPU the same code copies from memory to memory, at once.

Momenta and Adam's moments live this way; step counts and Magma's scores, one number per parameter or matrix, stay.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from deepmd_muon.optim.dtensors import local_of, with_local
from deepmd_muon.optim.state.schema import ALL_MOMENTS

_ALIGNMENT = 256  # bytes; kernels read whole vectors


@dataclasses.dataclass(frozen=True)
class Home:
    """Where one state tensor lives: `room` bytes of pinned memory from `start` on; `value` is what the state holds."""

    slab: Tensor
    start: int
    room: int
    value: Tensor


class Lot:
    """State tensors that travel together.

    Attributes
    ----------
    device
        Where they are needed.
    size
        Bytes that they take there.
    """

    def __init__(self, homes: Sequence[Home], device: torch.device) -> None:
        self.device = device
        self._tensors: list[tuple[int, Tensor]] = []
        self._copies: list[list[Any]] = []  # slab, first byte there, first byte in the room, bytes
        self._views: dict[int, tuple[Tensor, list[Tensor]]] = {}
        self.size = 0
        for home in homes:
            self._tensors.append((self.size, local_of(home.value)))
            last = self._copies[-1] if self._copies else None
            if last and last[0] is home.slab and last[1] + last[3] == home.start:
                last[3] += home.room
            else:
                self._copies.append([home.slab, home.start, self.size, home.room])
            self.size += home.room

    def copies(self, room: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Return what is to be copied as pairs (host memory, device memory); neighbours are one copy."""
        return [(slab[a : a + n], room[b : b + n]) for slab, a, b, n in self._copies if n]

    def on(self, number: int, room: Tensor) -> list[Tensor]:
        """Return the tensors as they lie in a room of the device; remembered by its number."""
        known = self._views.get(number)
        if known is None or known[0] is not room:
            views = [
                room[b : b + x.nbytes].view(x.dtype).as_strided(x.size(), x.stride())
                if x.numel()
                else torch.empty_like(x, device=self.device)
                for b, x in self._tensors
            ]
            known = self._views[number] = room, views
        return known[1]


class Ring:
    """The rooms of one device, and the streams between them and host memory."""

    def __init__(self, device: torch.device, rooms: int = 2) -> None:
        self._device = device
        self._rooms = [torch.empty(0, dtype=torch.uint8, device=device) for _ in range(rooms)]
        self._streams = [torch.cuda.Stream(device) for _ in range(2)] if device.type == "cuda" else []
        self._filled: list[Any] = [None] * rooms  # events
        self._emptied: list[Any] = [None] * rooms

    def carry(self, lots: Sequence[Lot]) -> Iterator[list[Tensor]]:
        """Yield the tensors of one lot after the other on the device; what is done to them goes back to the host.

        Advancing the iterator says that everything that uses a lot's tensors has been launched.
        """
        self._make_room(lots)
        if self._streams:  # what the last step has sent home may be on its way yet
            self._streams[0].wait_stream(self._streams[1])
        count = len(self._rooms)
        for i in range(min(count - 1, len(lots))):
            self._fetch(lots[i], i)
        for i, lot in enumerate(lots):
            ahead = i + count - 1
            if ahead < len(lots):
                self._fetch(lots[ahead], ahead % count)
            if self._streams:
                torch.cuda.current_stream(self._device).wait_event(self._filled[i % count])
            yield lot.on(i % count, self._rooms[i % count])
            self._evict(lot, i % count)

    def wait(self) -> None:
        """Wait until host memory holds everything."""
        if self._streams:
            self._streams[1].synchronize()

    def _make_room(self, lots: Sequence[Lot]) -> None:
        """Let the rooms be as large as their lots; they are kept from step to step, and so are addresses in them."""
        for k, room in enumerate(self._rooms):
            size = max((lot.size for lot in lots[k :: len(self._rooms)]), default=0)
            if size > room.numel():
                self._rooms[k] = torch.empty(size, dtype=torch.uint8, device=self._device)
                for stream in self._streams:
                    # The allocator knows this memory by the present stream: others wait for its past use, and it for
                    # theirs before it gives the memory to anyone else.
                    stream.wait_stream(torch.cuda.current_stream(self._device))
                    self._rooms[k].record_stream(stream)

    def _fetch(self, lot: Lot, k: int) -> None:
        with self._on(0, self._emptied[k]):
            for host, room in lot.copies(self._rooms[k]):
                self._copy(room, host)
        if self._streams:
            self._filled[k] = self._streams[0].record_event()

    def _evict(self, lot: Lot, k: int) -> None:
        done = torch.cuda.current_stream(self._device).record_event() if self._streams else None
        with self._on(1, done):
            for host, room in lot.copies(self._rooms[k]):
                self._copy(host, room)
        if self._streams:
            self._emptied[k] = self._streams[1].record_event()

    @contextlib.contextmanager
    def _on(self, number: int, after: Any) -> Iterator[None]:
        """Use one of the streams, after an event, where there are streams."""
        if not self._streams:
            yield
            return
        with torch.cuda.stream(self._streams[number]):
            if after is not None:
                self._streams[number].wait_event(after)
            yield

    def _copy(self, into: Tensor, source: Tensor) -> None:
        into.copy_(source, non_blocking=True)


class Offload:
    """The moments of one optimizer in host memory.

    Parameters
    ----------
    bucket_bytes
        Bound on the bytes of one lot; a larger tensor goes alone.
    """

    def __init__(self, bucket_bytes: int) -> None:
        self.bucket_bytes = bucket_bytes
        self._homes: dict[Tensor, dict[str, Home]] = {}
        self._rings: dict[torch.device, Ring] = {}

    def __reduce__(self) -> tuple[type[Offload], tuple[int]]:
        return Offload, (self.bucket_bytes,)  # a copy of the optimizer finds homes of its own

    def elements(self, params: Iterable[Tensor], moments: int) -> int:
        """Return how many elements, with so many moments each, a lot may have."""
        return self.bucket_bytes // (moments * max((p.element_size() for p in params), default=1))

    def lot(self, state: Mapping[Tensor, dict[str, Any]], wanted: Sequence[tuple[Tensor, str]]) -> Lot:
        """Return the lot of some state tensors, given as (parameter, key); those that were not yet move home first."""
        wanted = list(wanted)
        self.house(state, wanted)
        return Lot([self._homes[p][key] for p, key in wanted], local_of(wanted[0][0]).device)

    def house(self, state: Mapping[Tensor, dict[str, Any]], wanted: Iterable[tuple[Tensor, str]]) -> None:
        """Move state tensors into host memory, side by side in the order given."""
        strangers = []
        for p, key in wanted:
            known = self._homes.get(p, {}).get(key)
            if known is None or state[p][key] is not known.value:
                strangers.append((p, key))
        rooms = [-(-local_of(state[p][key]).nbytes // _ALIGNMENT) * _ALIGNMENT for p, key in strangers]
        slab, start, left = torch.empty(0, dtype=torch.uint8, device="cpu"), 0, sum(rooms)
        for (p, key), room in zip(strangers, rooms, strict=True):
            if start + room > slab.numel():
                size, start = max(room, min(left, self.bucket_bytes)), 0
                slab = torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=local_of(p).is_cuda)
            value = state[p][key]
            local = local_of(value)
            host = slab[start : start + local.nbytes].view(local.dtype).as_strided(local.size(), local.stride())
            host.copy_(local)
            state[p][key] = with_local(value, host)
            self._homes.setdefault(p, {})[key] = Home(slab, start, room, state[p][key])
            start, left = start + room, left - room

    def house_all(self, state: dict[Tensor, dict[str, Any]], params: Sequence[Tensor]) -> None:
        """Move all moments into host memory, and forget those that are no more."""
        kept = {p: {k: h for k, h in homes.items() if state[p].get(k) is h.value} for p, homes in self._homes.items()
                if p in state}  # fmt: skip
        self._homes = kept
        # Moments of one kind side by side: a lot is then few copies.
        for keys in (ALL_MOMENTS[:1], ALL_MOMENTS[1:]):
            self.house(state, [(p, key) for p in params for key in keys if key in state.get(p, {})])

    def release(self, state: Mapping[Tensor, dict[str, Any]]) -> None:
        """Move all moments back to their parameters' devices."""
        self.wait()
        for p, homes in self._homes.items():
            for key, home in homes.items():
                own = state.get(p, {})
                if own.get(key) is home.value:
                    local = local_of(home.value)
                    own[key] = with_local(home.value, local.to(local_of(p).device, copy=True))
        self._homes, self._rings = {}, {}

    def carry(self, lots: Sequence[Lot]) -> Iterator[list[Tensor]]:
        """Yield the tensors of one lot after the other, on its device; see `Ring.carry`."""
        for device, run in itertools.groupby(lots, lambda lot: lot.device):
            if device not in self._rings:
                self._rings[device] = Ring(device)
            yield from self._rings[device].carry(list(run))

    def wait(self) -> None:
        """Wait until host memory holds everything that steps have done."""
        for ring in self._rings.values():
            ring.wait()

    def outside(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Return one parameter's state as others see it: all of it in host memory but for scalars.

        (torch.distributed.checkpoint wants the tensors of a state dict, scalars aside, on one device.)
        """
        return {
            key: with_local(x, local_of(x).cpu()) if isinstance(x, Tensor) and x.ndim else x for key, x in state.items()
        }
