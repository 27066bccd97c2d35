"""The optimizer's moments in host memory: copied to the device and back batch by batch.

A *transfer batch* holds the state that one wave needs. While the wave of batch i is stepped, batch
i + 1 is copied to the device and batch i − 1 back. Two device buffers take turns; besides the
step's workspace, they are the only device memory that offloading needs. Copies run on two CUDA
streams, one in each direction, between pinned memory and the buffers. Without a GPU the same code
copies synchronously from memory to memory.

Momenta, Adam's moments and master weights are offloaded. Step counts and the other tensors of rules
are not.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from deepmd_muon.optim.dtensors import local_of, with_local
from deepmd_muon.optim.state.schema import ALL_MOMENTS

_ALIGNMENT = 256  # bytes; kernels read whole vectors


@dataclasses.dataclass(frozen=True)
class HostSlot:
    """The pinned memory of one state tensor; `value` is the tensor in the state."""

    slab: Tensor
    start: int
    nbytes: int  # padded to whole vectors, so it may exceed the tensor's size
    value: Tensor


@dataclasses.dataclass
class _Copy:
    """One copy between host memory and a device buffer; it may cover several adjacent slots."""

    slab: Tensor
    slab_start: int
    buffer_start: int
    nbytes: int


class TransferBatch:
    """State tensors that are copied together.

    They take `nbytes` on the `device` that steps them.
    """

    def __init__(self, slots: Sequence[HostSlot], device: torch.device) -> None:
        self.device = device
        self.nbytes = 0
        self._copies: list[_Copy] = []
        starts = [0] * len(slots)  # in the buffer
        # Slots of one dtype are adjacent, as in their slab.
        by_dtype = sorted(range(len(slots)), key=lambda number: str(slots[number].value.dtype))
        for number in by_dtype:
            slot = slots[number]
            starts[number] = self.nbytes
            last = self._copies[-1] if self._copies else None
            if (
                last is not None
                and last.slab is slot.slab
                and last.slab_start + last.nbytes == slot.start
            ):
                last.nbytes += slot.nbytes
            else:
                self._copies.append(_Copy(slot.slab, slot.start, self.nbytes, slot.nbytes))
            self.nbytes += slot.nbytes
        local_tensors = [local_of(slot.value) for slot in slots]
        self._tensors = list(zip(starts, local_tensors, strict=True))
        # By number of a device buffer: the buffer, and the tensors as its views.
        self._views: dict[int, tuple[Tensor, list[Tensor]]] = {}

    def copies(self, buffer: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Return the copies as pairs (host memory, device memory).

        Adjacent slots share one copy.
        """
        return [
            (
                copy.slab[copy.slab_start : copy.slab_start + copy.nbytes],
                buffer[copy.buffer_start : copy.buffer_start + copy.nbytes],
            )
            for copy in self._copies
            if copy.nbytes
        ]

    def views(self, number: int, buffer: Tensor) -> list[Tensor]:
        """Return the tensors as views of a device buffer; cached by the buffer's number."""
        cached_buffer, views = self._views.get(number, (None, []))
        if cached_buffer is not buffer:
            views = [self._view(buffer, start, x) for start, x in self._tensors]
            self._views[number] = (buffer, views)
        return views

    def _view(self, buffer: Tensor, start: int, x: Tensor) -> Tensor:
        """Return the part of a buffer that holds a tensor like `x`."""
        if not x.numel():
            return torch.empty_like(x, device=self.device)
        return buffer[start : start + x.nbytes].view(x.dtype).as_strided(x.size(), x.stride())


class DeviceBuffers:
    """The buffers of one device, and the streams that copy between them and host memory."""

    def __init__(self, device: torch.device, count: int = 2) -> None:
        self._device = device
        self._buffers = [torch.empty(0, dtype=torch.uint8, device=device) for _ in range(count)]
        self._has_streams = device.type == "cuda"
        if self._has_streams:
            self._to_device = torch.cuda.Stream(device)
            self._to_host = torch.cuda.Stream(device)
        # Events, by buffer: after its last fill, and after its last copy to the host.
        self._filled: list[Any] = [None] * count
        self._emptied: list[Any] = [None] * count

    def fetch_in_turn(self, batches: Sequence[TransferBatch]) -> Iterator[list[Tensor]]:
        """Yield each batch's tensors on the device in turn.

        Changes made to them are copied back to the host. Advance the iterator once everything that
        uses the yielded tensors has been launched.
        """
        self._grow(batches)
        if self._has_streams:  # copies of the previous step to the host may still be running
            self._to_device.wait_stream(self._to_host)
        count = len(self._buffers)
        for i in range(min(count - 1, len(batches))):
            self._fetch(batches[i], i)
        for i, batch in enumerate(batches):
            ahead = i + count - 1
            if ahead < len(batches):
                self._fetch(batches[ahead], ahead % count)
            if self._has_streams:
                torch.cuda.current_stream(self._device).wait_event(self._filled[i % count])
            yield batch.views(i % count, self._buffers[i % count])
            self._evict(batch, i % count)

    def wait(self) -> None:
        """Wait until host memory is up to date."""
        if self._has_streams:
            self._to_host.synchronize()

    def _grow(self, batches: Sequence[TransferBatch]) -> None:
        """Enlarge the buffers to hold their batches.

        They are kept from step to step, so addresses stay.
        """
        for k, buffer in enumerate(self._buffers):
            nbytes = max((batch.nbytes for batch in batches[k :: len(self._buffers)]), default=0)
            if nbytes <= buffer.numel():
                continue
            self._buffers[k] = torch.empty(nbytes, dtype=torch.uint8, device=self._device)
            for stream in (self._to_device, self._to_host) if self._has_streams else ():
                # The caching allocator assigns this memory to the current stream. The copy streams
                # therefore wait for its earlier use, and record_stream makes the allocator wait for
                # theirs before it reuses the memory.
                stream.wait_stream(torch.cuda.current_stream(self._device))
                self._buffers[k].record_stream(stream)

    def _fetch(self, batch: TransferBatch, k: int) -> None:
        """Copy a batch into buffer k, once its former batch has been copied to the host."""
        copies = batch.copies(self._buffers[k])
        if not self._has_streams:
            for host, buffer in copies:
                self._copy(buffer, host)
            return
        with torch.cuda.stream(self._to_device):
            if self._emptied[k] is not None:
                self._to_device.wait_event(self._emptied[k])
            for host, buffer in copies:
                self._copy(buffer, host)
        self._filled[k] = self._to_device.record_event()

    def _evict(self, batch: TransferBatch, k: int) -> None:
        """Copy buffer k back to the host, once everything launched so far has finished."""
        copies = batch.copies(self._buffers[k])
        if not self._has_streams:
            for host, buffer in copies:
                self._copy(host, buffer)
            return
        launched = torch.cuda.current_stream(self._device).record_event()
        with torch.cuda.stream(self._to_host):
            self._to_host.wait_event(launched)
            for host, buffer in copies:
                self._copy(host, buffer)
        self._emptied[k] = self._to_host.record_event()

    def _copy(self, into: Tensor, source: Tensor) -> None:
        into.copy_(source, non_blocking=True)


def moments_of(
    state: Mapping[Tensor, Mapping[str, Any]],
    params: Iterable[Tensor],
    keys: Sequence[str] = ALL_MOMENTS,
) -> list[tuple[Tensor, str]]:
    """Return parameter and key of every moment that these parameters have."""
    return [(p, key) for p in params for key in keys if key in state.get(p, {})]


class HostMemory:
    """The moments of one optimizer in host memory.

    A transfer batch has at most `batch_bytes`, or one larger tensor.
    """

    def __init__(self, batch_bytes: int) -> None:
        self.batch_bytes = batch_bytes
        self._slots: dict[Tensor, dict[str, HostSlot]] = {}
        self._buffers: dict[torch.device, DeviceBuffers] = {}

    def __reduce__(self) -> tuple[type[HostMemory], tuple[int]]:
        return HostMemory, (self.batch_bytes,)  # a copy of the optimizer allocates its own slots

    def transfer_batch(
        self, state: Mapping[Tensor, dict[str, Any]], wanted: Sequence[tuple[Tensor, str]]
    ) -> TransferBatch:
        """Return the transfer batch of some (parameter, key) state tensors.

        Offload them first where necessary.
        """
        self.offload(state, wanted)
        device = local_of(wanted[0][0]).device
        return TransferBatch([self._slots[p][key] for p, key in wanted], device)

    def offload(
        self, state: Mapping[Tensor, dict[str, Any]], wanted: Iterable[tuple[Tensor, str]]
    ) -> None:
        """Move state tensors into host memory.

        Those of one dtype become adjacent, in the given order.
        """
        not_yet_offloaded = []
        for p, key in wanted:
            slot = self._slots.get(p, {}).get(key)
            if slot is None or state[p][key] is not slot.value:
                not_yet_offloaded.append((p, key))
        remaining: Counter[torch.dtype] = Counter()  # bytes to offload
        for p, key in not_yet_offloaded:
            remaining[state[p][key].dtype] += _padded_size(state[p][key])
        # A slab for each dtype: torch.save refuses tensors of several dtypes in one storage.
        slabs: dict[torch.dtype, tuple[Tensor, int]] = {}  # and the start of its free part
        for p, key in not_yet_offloaded:
            value = state[p][key]
            nbytes = _padded_size(value)
            slab, start = slabs.get(value.dtype, (None, 0))
            if slab is None or start + nbytes > slab.numel():
                start = 0
                slab = torch.empty(
                    max(nbytes, min(remaining[value.dtype], self.batch_bytes)),
                    dtype=torch.uint8,
                    device="cpu",
                    pin_memory=local_of(p).is_cuda,
                )
            local = local_of(value)
            memory = slab[start : start + local.nbytes].view(local.dtype)
            host = memory.as_strided(local.size(), local.stride())
            host.copy_(local)
            state[p][key] = with_local(value, host)
            self._slots.setdefault(p, {})[key] = HostSlot(slab, start, nbytes, state[p][key])
            slabs[value.dtype] = (slab, start + nbytes)
            remaining[value.dtype] -= nbytes

    def offload_all(
        self, state: dict[Tensor, dict[str, Any]], param_groups: Sequence[Mapping[str, Any]]
    ) -> None:
        """Move all moments into host memory, and drop the slots of state that no longer exists."""
        params = [p for group in param_groups for p in group["params"]]
        self._slots = {
            p: {key: slot for key, slot in slots.items() if state[p].get(key) is slot.value}
            for p, slots in self._slots.items()
            if p in state
        }
        # Moments of one kind are adjacent, so that a transfer batch takes few copies.
        for keys in (ALL_MOMENTS[:1], ALL_MOMENTS[1:]):
            self.offload(state, moments_of(state, params, keys))

    def restore(self, state: Mapping[Tensor, dict[str, Any]]) -> None:
        """Move all moments back to their parameters' devices."""
        self.wait()
        for p, slots in self._slots.items():
            values = state.get(p, {})
            device = local_of(p).device
            for key, slot in slots.items():
                if values.get(key) is slot.value:
                    local = local_of(slot.value).to(device, copy=True)
                    values[key] = with_local(slot.value, local)
        self._slots = {}
        self._buffers = {}

    def fetch_in_turn(self, batches: Sequence[TransferBatch]) -> Iterator[list[Tensor]]:
        """Yield the tensors of each batch in turn on its device.

        See `DeviceBuffers.fetch_in_turn`.
        """
        for device, run in itertools.groupby(batches, lambda batch: batch.device):
            if device not in self._buffers:
                self._buffers[device] = DeviceBuffers(device)
            yield from self._buffers[device].fetch_in_turn(list(run))

    def wait(self) -> None:
        """Wait until host memory holds the results of all steps."""
        for buffers in self._buffers.values():
            buffers.wait()


def _padded_size(value: Tensor) -> int:
    """Return the bytes that a state tensor takes in host memory, in whole vectors."""
    return -(-local_of(value).nbytes // _ALIGNMENT) * _ALIGNMENT
