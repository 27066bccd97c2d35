"""Several batches for one step, whose gradients are averaged."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Hashable
from typing import Protocol, TypeAlias

import numpy as np

from deepmd_muon.train.batches.streamed import BatchSource, Feed


@dataclasses.dataclass(frozen=True)
class AccumulatedFeed:
    """The batches of one step, in the order of the data; read one by one, so that memory holds a single one."""

    parts: tuple[Feed, ...]

    @property
    def layout(self) -> Hashable | None:
        """The layouts of all batches; None if one has memory of its own."""
        layouts = tuple(part.layout for part in self.parts)
        return None if None in layouts else layouts

    @property
    def system(self) -> str:
        """The systems of the frames."""
        return ", ".join(dict.fromkeys(part.system for part in self.parts))

    @property
    def atoms(self) -> np.ndarray:
        """Real atoms of each frame, on the host."""
        return np.concatenate([part.atoms for part in self.parts])

    def labelled_atoms(self, needed: Collection[str]) -> float:
        """Return the number of atoms in frames that have all these labels."""
        return sum(part.labelled_atoms(needed) for part in self.parts)

    def read(self) -> AccumulatedFeed:
        """Return this object, whose `parts` the step reads."""
        return self


StepFeed: TypeAlias = Feed | AccumulatedFeed
"""The input of a step: a batch, or several."""


def parts_of(feed: StepFeed) -> tuple[Feed, ...]:
    """Return the batches of a step."""
    return feed.parts if isinstance(feed, AccumulatedFeed) else (feed,)


class StepSource(Protocol):
    """An endless order of what steps read."""

    def next(self) -> StepFeed:
        """Return what the next step reads; nothing waits for the device."""

    def close(self) -> None:
        """End background work."""


class AccumulatedBatches:
    """The batches of another source, `each` for a step: as many sets of tensors, where it shares them among batches."""

    def __init__(self, source: BatchSource, each: int) -> None:
        self._source = source
        self._each = each

    def next(self) -> AccumulatedFeed:
        """Return the batches of the next step."""
        return AccumulatedFeed(tuple(self._source.next() for _ in range(self._each)))

    def close(self) -> None:
        """End background work."""
        self._source.close()
