"""Measure atoms a second, and the time that a run loses to data, other ranks and padding.

Nothing here waits for a GPU. There, the host runs ahead of the device: its wait for data is an
upper bound of the device's, and only the device knows how long it waits for other ranks.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from deepmd_muon.train.batches.streamed import StepFeed, feeds_of
from deepmd_muon.train.ranks.ranks import Ranks


class _Totals(NamedTuple):
    """What a rank has counted so far."""

    seconds: float
    reading: float  # waiting for data [s]
    summing: float  # in sums over ranks [s]
    atoms: float
    places: float  # for atoms, those of padding among them


class Throughput:
    """Counts the atoms of a run and its lost time; exchanges of their numbers take place on CPUs.

    `atoms` counts the real atoms in the batches of all ranks so far; of several ranks, until the
    last `share`.
    """

    def __init__(self, ranks: Ranks, clock: Callable[[], float] = time.monotonic) -> None:
        self._ranks = ranks
        self._clock = clock
        self._reading = 0.0
        self._local_atoms = 0
        self._places = 0
        self._after_first_step: Tensor | None = None
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
        for batch in feeds_of(feed):
            self._local_atoms += int(batch.atoms.sum())
            # A layout that is a shape has the places for atoms of each type, those of padding among
            # them.
            self._places += int(sum(getattr(batch.layout, "counts", batch.atoms)))
        if self._ranks.size == 1:
            self.atoms = float(self._local_atoms)
        if self._after_first_step is None:
            # The first step compiles, opens files and waits for ranks that start later.
            self._after_first_step = self._totals()

    def share(self) -> None:
        """Add up the atoms of all ranks, all of which must call it."""
        if self._ranks.size > 1:
            atoms = torch.tensor(float(self._local_atoms), dtype=torch.float64)
            self.atoms = float(self._ranks.sum(atoms))

    def describe(self) -> str | None:
        """Return the figures since the first step, mean over ranks; None before the second step.

        All ranks must call it.
        """
        if self._after_first_step is None:
            return None
        size = self._ranks.size
        total = self._ranks.sum(self._totals() - self._after_first_step)
        mean = _Totals(*(total / size).tolist())
        if not mean.atoms or mean.seconds <= 0.0:
            return None
        on_gpu = self._ranks.device.type == "cuda"
        reading = f"{mean.reading / mean.seconds:.1%} waiting for data"
        lost = [f"at most {reading}" if on_gpu else reading]
        if size > 1 and on_gpu:
            lost.append("waiting for other ranks unknown to the host")
        elif size > 1:
            summing = mean.summing / mean.seconds
            lost.append(f"{summing:.1%} in sums over ranks, most of it waiting")
        lost.append(f"{1 - mean.atoms / mean.places:.1%} of atoms padding")
        rate = size * mean.atoms / mean.seconds
        return f"{rate:.4g} atoms/s since the first step; lost: {', '.join(lost)}"

    def _totals(self) -> Tensor:
        """Return `_Totals` as a tensor, float64."""
        totals = _Totals(
            seconds=self._clock(),
            reading=self._reading,
            summing=self._ranks.summing.seconds,
            atoms=self._local_atoms,
            places=self._places,
        )
        return torch.tensor(totals, dtype=torch.float64)
