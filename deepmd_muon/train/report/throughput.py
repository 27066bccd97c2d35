"""Atoms a second, and the time that a run loses to data, other ranks and padding, as far as the host knows them.

Nothing here waits for a GPU. There, the host runs ahead of the device: its wait for data is an upper bound of the
device's, and only the device knows how long it waits for other ranks.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from deepmd_muon.train.batches.streamed import StepFeed, parts_of
from deepmd_muon.train.ranks.ranks import Ranks


class Throughput:
    """Counts the atoms of a run and its lost time; exchanges of their numbers take place on CPUs.

    `atoms` counts the real atoms in the batches of all ranks so far; of several ranks, until the last `share`.
    """

    def __init__(self, ranks: Ranks, clock: Callable[[], float] = time.monotonic) -> None:
        self._ranks = ranks
        self._clock = clock
        self._reading = 0.0
        self._own, self._places = 0, 0
        self._first: Tensor | None = None
        self.atoms = 0.0

    @contextlib.contextmanager
    def reading(self) -> Iterator[None]:
        """Count the time of a `with` block as waiting for data."""
        begun = self._clock()
        try:
            yield
        finally:
            self._reading += self._clock() - begun

    def take(self, feed: StepFeed) -> None:
        """Count the batches of a step that has been taken, or launched."""
        for part in parts_of(feed):
            self._own += int(part.atoms.sum())
            # A layout that is a shape has the places for atoms of each type, those of padding among them.
            self._places += int(sum(getattr(part.layout, "counts", part.atoms)))
        if self._ranks.size == 1:
            self.atoms = float(self._own)
        if (
            self._first is None
        ):  # compiles, opens files, waits for ranks that start later: not like any other
            self._first = self._numbers()

    def share(self) -> None:
        """Add up the atoms of all ranks, all of which must call it."""
        if self._ranks.size > 1:
            self.atoms = float(self._ranks.sum(torch.tensor(float(self._own), dtype=torch.float64)))

    def describe(self) -> str | None:
        """Return what happened since the first step, mean over ranks, in one line; None before the second step.

        All ranks must call it.
        """
        if self._first is None:
            return None
        total = self._ranks.sum(self._numbers() - self._first).tolist()
        seconds, reading, summing, own, places = (value / self._ranks.size for value in total)
        if not own or seconds <= 0.0:
            return None
        on_gpu = self._ranks.device.type == "cuda"
        lost = [f"{'at most ' * on_gpu}{reading / seconds:.1%} waiting for data"]
        if self._ranks.size > 1:
            lost.append(
                "waiting for other ranks unknown to the host"
                if on_gpu
                else f"{summing / seconds:.1%} in sums over ranks, most of it waiting"
            )
        lost.append(f"{1 - own / places:.1%} of atoms padding")
        rate = self._ranks.size * own / seconds
        return f"{rate:.4g} atoms/s since the first step; lost: {', '.join(lost)}"

    def _numbers(self) -> Tensor:
        """Return time, waiting for data, waiting for ranks [s], atoms and places; `(5,)`, float64."""
        times = self._clock(), self._reading, self._ranks.summing.seconds
        return torch.tensor([*times, self._own, self._places], dtype=torch.float64)
