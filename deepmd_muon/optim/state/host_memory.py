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

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from deepmd_muon.optim.dtensors import local_of, with_local
from deepmd_muon.optim.state.schema import ALL_MOMENTS

_ALIGNMENT = 256  # bytes; kernels read whole vectors


class TransferBatch:
    """State tensors that are copied together.

    `on_host` are their elements in host memory. They take `nbytes` on the `device` that steps them.
    """

    def __init__(self, tensors: Sequence[Tensor], device: torch.device) -> None:
        self.device = device
        self.on_host = [local_of(x) for x in tensors]
        *starts, self.nbytes = itertools.accumulate(map(_padded_size, tensors), initial=0)
        self._starts = starts  # in the buffer
        # By number of a device buffer: the buffer, and the tensors as its views.
        self._views: dict[int, tuple[Tensor, list[Tensor]]] = {}

    def views(self, number: int, buffer: Tensor) -> list[Tensor]:
        """Return the tensors as views of a device buffer; cached by the buffer's number."""
        cached_buffer, views = self._views.get(number, (None, []))
        if cached_buffer is not buffer:
            views = [
                _view(buffer[start:], x)
                for start, x in zip(self._starts, self.on_host, strict=True)
            ]
            self._views[number] = (buffer, views)
        return views


def _view(memory: Tensor, like: Tensor) -> Tensor:
    """Return the begin of some memory, uint8, as a tensor of the same layout as another one."""
    if not like.numel():
        return torch.empty_like(like, device=memory.device)
    return memory[: like.nbytes].view(like.dtype).as_strided(like.size(), like.stride())


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
        views = batch.views(k, self._buffers[k])
        if not self._has_streams:
            self._copy(views, batch.on_host)
            return
        with torch.cuda.stream(self._to_device):
            if self._emptied[k] is not None:
                self._to_device.wait_event(self._emptied[k])
            self._copy(views, batch.on_host)
        self._filled[k] = self._to_device.record_event()

    def _evict(self, batch: TransferBatch, k: int) -> None:
        """Copy buffer k back to the host, once everything launched so far has finished."""
        views = batch.views(k, self._buffers[k])
        if not self._has_streams:
            self._copy(batch.on_host, views)
            return
        launched = torch.cuda.current_stream(self._device).record_event()
        with torch.cuda.stream(self._to_host):
            self._to_host.wait_event(launched)
            self._copy(batch.on_host, views)
        self._emptied[k] = self._to_host.record_event()

    def _copy(self, into: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
        for target, source in zip(into, sources, strict=True):
            target.copy_(source, non_blocking=True)


def moments_of(
    state: Mapping[Tensor, Mapping[str, Any]],
    params: Iterable[Tensor],
) -> list[tuple[Tensor, str]]:
    """Return parameter and key of every moment that these parameters have."""
    return [(p, key) for p in params for key in ALL_MOMENTS if key in state.get(p, {})]


class HostMemory:
    """The moments of one optimizer in host memory.

    A transfer batch has at most `batch_bytes`, or one larger tensor.
    """

    def __init__(self, batch_bytes: int) -> None:
        self.batch_bytes = batch_bytes
        self._offloaded: dict[Tensor, dict[str, Tensor]] = {}
        self._buffers: dict[torch.device, DeviceBuffers] = {}

    def __reduce__(self) -> tuple[type[HostMemory], tuple[int]]:
        return HostMemory, (self.batch_bytes,)  # a copy of the optimizer allocates its own memory

    def transfer_batch(
        self, state: Mapping[Tensor, dict[str, Any]], wanted: Sequence[tuple[Tensor, str]]
    ) -> TransferBatch:
        """Return the transfer batch of some (parameter, key) state tensors.

        Offload them first where necessary.
        """
        self.offload(state, wanted)
        device = local_of(wanted[0][0]).device
        return TransferBatch([state[p][key] for p, key in wanted], device)

    def offload(
        self, state: Mapping[Tensor, dict[str, Any]], wanted: Iterable[tuple[Tensor, str]]
    ) -> None:
        """Move state tensors into host memory."""
        on_device = [
            (p, key)
            for p, key in wanted
            if state[p][key] is not self._offloaded.get(p, {}).get(key)
        ]
        remaining: Counter[torch.dtype] = Counter()  # bytes to offload
        for p, key in on_device:
            remaining[state[p][key].dtype] += _padded_size(state[p][key])
        # Pinned memory in large pieces: torch rounds each up to a power of two. Each dtype has its
        # own: torch.save refuses tensors of several dtypes in one storage.
        free: dict[torch.dtype, Tensor] = {}
        for p, key in on_device:
            value = state[p][key]
            nbytes = _padded_size(value)
            memory = free.get(value.dtype)
            if memory is None or nbytes > len(memory):
                size = max(nbytes, min(remaining[value.dtype], self.batch_bytes))
                memory = torch.empty(
                    size, dtype=torch.uint8, device="cpu", pin_memory=local_of(p).is_cuda
                )
            host = _view(memory, local_of(value))
            host.copy_(local_of(value))
            state[p][key] = with_local(value, host)
            self._offloaded.setdefault(p, {})[key] = state[p][key]
            free[value.dtype] = memory[nbytes:]
            remaining[value.dtype] -= nbytes

    def offload_all(
        self, state: dict[Tensor, dict[str, Any]], param_groups: Sequence[Mapping[str, Any]]
    ) -> None:
        """Move all moments into host memory, and drop references to state that no longer exists."""
        params = [p for group in param_groups for p in group["params"]]
        self._offloaded = {
            p: {key: value for key, value in values.items() if state[p].get(key) is value}
            for p, values in self._offloaded.items()
            if p in state
        }
        self.offload(state, moments_of(state, params))

    def restore(self, state: Mapping[Tensor, dict[str, Any]]) -> None:
        """Move all moments back to their parameters' devices."""
        self.wait()
        for p, offloaded in self._offloaded.items():
            values = state.get(p, {})
            for key, value in offloaded.items():
                if values.get(key) is value:
                    local = local_of(value).to(local_of(p).device, copy=True)
                    values[key] = with_local(value, local)
        self._offloaded = {}
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
