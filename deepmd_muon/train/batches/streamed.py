"""Sources of a step's batches: converted on the spot, or streamed to the device one ahead.

A source yields feeds. A feed is one batch on its way into a step, or several if a step accumulates
gradients.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Collection, Hashable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol, TypeAlias

import numpy as np
import torch
from torch import Tensor

from deepmd_muon.data import Batch, DataLoader, group_limits, widen_sections
from deepmd_muon.data.sampling.loader import Origin
from deepmd_muon.train.batches.batch import TrainingBatch, map_tensors, tensors_of, to_device

#: Neighbour sections are padded to multiples of this, so that few shapes of batches occur.
SECTION_STEP = 8
#: The same for the counts within shorter cut-offs: angles grow with their square.
INNER_STEP = 4
#: Streamed batches of at most so many layouts keep their memory on the device.
MOST_LAYOUTS = 64

_CPU = torch.device("cpu")


class Feed(Protocol):
    """One batch on its way into a step."""

    @property
    def layout(self) -> Hashable | None:
        """Equal if steps launch the same work on the same memory; None for unshared memory."""

    @property
    def origin(self) -> Origin:
        """Where the frames come from."""

    @property
    def atoms(self) -> np.ndarray:
        """Real atoms of each frame, on the host."""

    def labelled_atoms(self, needed: Collection[str]) -> float:
        """Return the number of atoms in frames that have all these labels."""

    def read(self) -> TrainingBatch:
        """Return the batch on the device; part of the step, and of its graph."""


class BatchSource(Protocol):
    """An endless sequence of batches."""

    def next(self) -> Feed:
        """Return the next batch, without waiting for the device."""

    def close(self) -> None:
        """End background work."""


@dataclasses.dataclass(frozen=True)
class BatchFeed:
    """A batch on the host, and its copy in tensors that all batches of its layout share.

    Without a layout, no other batch shares them.
    """

    layout: Hashable | None
    host: TrainingBatch
    static: TrainingBatch

    @property
    def origin(self) -> Origin:
        """Where the frames come from."""
        return self.host.origin

    @property
    def atoms(self) -> np.ndarray:
        """Real atoms of each frame, on the host."""
        return self.host.atoms

    def labelled_atoms(self, needed: Collection[str]) -> float:
        """Return the number of atoms in frames that have all these labels."""
        return self.host.labelled_atoms(needed)

    def read(self) -> TrainingBatch:
        """Return the batch in the shared tensors."""
        return dataclasses.replace(self.static, origin=self.host.origin)


class HostBatches:
    """Batches of a loader, converted to tensors on `device` when they are asked for."""

    def __init__(self, loader: DataLoader, ntypes: int, device: torch.device) -> None:
        self._loader = loader
        self._ntypes = ntypes
        self._device = device

    def next(self) -> BatchFeed:
        """Return the next batch."""
        batch = to_device(self._loader.next(), self._ntypes, self._device)
        return BatchFeed(layout=None, host=batch, static=batch)

    def close(self) -> None:
        """Do nothing: the loader is closed by its owner."""


class StreamedBatches:
    """Batches of a loader, prepared one ahead in a thread and copied from pinned memory.

    Every batch of a layout overwrites the same tensors, in stream order.
    """

    def __init__(self, loader: DataLoader, ntypes: int, device: torch.device) -> None:
        self._loader = loader
        self._ntypes = ntypes
        self._device = device
        # The batches of a step must not share tensors: each has its number in the step.
        self._per_step = loader.batches_per_step
        self._number = 0
        cache = loader.cache
        self._limits = group_limits(cache.sel, cache.by_type, cache.ntypes)
        self._static: dict[Hashable, TrainingBatch] = {}
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="deepmd_muon-batches")
        self._ahead: Future[TrainingBatch] | None = None

    def next(self) -> BatchFeed:
        """Return the next batch and begin to prepare the one after it."""
        ahead = self._ahead if self._ahead is not None else self._submit()
        host = ahead.result()
        self._ahead = self._submit()
        self._loader.advance()
        layout: Hashable | None = layout_of(host)
        key = (self._number, layout)
        self._number = (self._number + 1) % self._per_step
        static = self._static.get(key)
        if static is None:
            static = map_tensors(host, lambda x: torch.empty_like(x, device=self._device))
            if len(self._static) < MOST_LAYOUTS * self._per_step:
                self._static[key] = static
            else:
                layout = None
        for target, source in zip(tensors_of(static), tensors_of(host), strict=True):
            target.copy_(source, non_blocking=True)
        return BatchFeed(layout, host, static)

    def close(self) -> None:
        """End the thread."""
        self._thread.shutdown(wait=True, cancel_futures=True)

    def _submit(self) -> Future[TrainingBatch]:
        # The order of the data must not depend on the thread.
        plan = self._loader.draw()
        return self._thread.submit(lambda: self._prepare(self._loader.build(plan)))

    def _prepare(self, batch: Batch) -> TrainingBatch:
        """Convert a batch on the host, its neighbour sections padded, in pinned memory."""
        widths = padded_widths(batch.neighbors.sections, self._limits)
        padded = dataclasses.replace(batch, neighbors=widen_sections(batch.neighbors, widths))
        converted = with_full_sections(to_device(padded, self._ntypes, _CPU))
        if self._device.type == "cuda":
            return map_tensors(converted, Tensor.pin_memory)
        return converted


@dataclasses.dataclass(frozen=True)
class AccumulatedFeed:
    """The batches of one step; they are read one by one, so that memory holds one."""

    feeds: tuple[Feed, ...]

    @property
    def layout(self) -> Hashable | None:
        """The layouts of all batches; None if one has memory of its own."""
        layouts = tuple(feed.layout for feed in self.feeds)
        return None if None in layouts else layouts

    @property
    def origin(self) -> Origin:
        """Where the frames come from."""
        return Origin(tuple(itertools.chain(*(feed.origin.parts for feed in self.feeds))))

    def read(self) -> AccumulatedFeed:
        """Return this object, whose `feeds` the step reads."""
        return self


StepFeed: TypeAlias = Feed | AccumulatedFeed
"""The input of a step: a batch, or several."""


def feeds_of(feed: StepFeed) -> tuple[Feed, ...]:
    """Return the batches of a step."""
    return feed.feeds if isinstance(feed, AccumulatedFeed) else (feed,)


class StepSource(Protocol):
    """An endless sequence of inputs of steps."""

    def next(self) -> StepFeed:
        """Return the input of the next step, without waiting for the device."""

    def close(self) -> None:
        """End background work."""


class AccumulatedBatches:
    """Group the batches of another source, `per_step` for each step.

    A source that shares tensors among batches must have as many sets of them.
    """

    def __init__(self, source: BatchSource, per_step: int) -> None:
        self._source = source
        self._per_step = per_step

    def next(self) -> AccumulatedFeed:
        """Return the batches of the next step."""
        return AccumulatedFeed(tuple(self._source.next() for _ in range(self._per_step)))

    def close(self) -> None:
        """End background work."""
        self._source.close()


def padded_widths(sections: Collection[int], limits: np.ndarray) -> tuple[int, ...]:
    """Round the widths of neighbour sections up, at most to what `sel` allows."""
    rounded = [-(-width // SECTION_STEP) * SECTION_STEP for width in sections]
    return tuple(min(int(limit), width) for width, limit in zip(rounded, limits, strict=True))


def with_full_sections(batch: TrainingBatch) -> TrainingBatch:
    """Mark every slot of the neighbour sections as filled, since a layout leaves out how many are.

    The counts within shorter cut-offs become one bound for all atoms, which is part of a layout.
    """
    structures = batch.structures
    nreal = structures.filled.shape[1]
    filled = np.repeat(np.array(structures.sections)[:, None], nreal, axis=1)
    inner = np.repeat(bounds_of(structures.inner)[:, None], nreal, axis=1)
    return dataclasses.replace(
        batch, structures=dataclasses.replace(structures, filled=filled, inner=inner)
    )


def bounds_of(inner: np.ndarray) -> np.ndarray:
    """Return a bound of each row of counts `(ninner, …)`, rounded up so that few occur."""
    bounds = [-(-int(row.max(initial=0)) // INNER_STEP) * INNER_STEP for row in inner]
    return np.array(bounds, dtype=np.int64)


def layout_of(batch: TrainingBatch) -> Hashable:
    """Return the layout of a batch: all but its tensors' values.

    Batches of one layout share their launches.
    """
    structures = batch.structures
    return (
        tuple((x.shape, x.dtype) for x in tensors_of(batch)),
        tuple(name for name, value in batch.labels.items() if value is not None),
        batch.mask is None,
        structures.box is None,
        structures.sections,
        structures.type_counts,
        tuple(structures.inner.max(axis=1, initial=0).tolist()),
    )
