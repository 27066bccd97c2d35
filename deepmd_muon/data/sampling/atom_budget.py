"""Batches of frames of any size under a bound on their atoms: batch size ``mix:N``.

An epoch is every frame once, in a random order; systems of higher probability serve their frames
more often. Frames are sorted by their number of atoms, frames of equal size keep the random order,
and the row is cut where the next frame would take the padded batch beyond the bound. The batches
come in a random order. Sizes and cuts are the same in every epoch, so that the position is one
integer.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from deepmd_muon.data.errors import SamplingError
from deepmd_muon.data.sampling.sampler import Plan, SavedOrder

# Frames of an epoch that the order is kept for, at most; more are the mark of a probability near
# zero.
_MOST_FRAMES = 1 << 30
# The second integer of the seed of an epoch's stream, see `sampler`.
_EPOCHS = 2


class _Epoch(NamedTuple):
    """One epoch of all systems."""

    number: int
    system: np.ndarray  # (nframes_of_epoch,): system of every place, sorted by size
    frame: np.ndarray  # (nframes_of_epoch,): number in the system
    batches: np.ndarray  # (batches_per_epoch,): numbers of the batches, in their order


class AtomBudgetSampler(SavedOrder):
    """An endless, reproducible order of batches of at most `budget` atoms, padding included.

    A frame of more atoms is a batch alone. `probabilities` (nsystems,) are the shares of systems in
    the frames of an epoch. `identity` says more about the systems; it is compared when a position
    is restored.

    Attributes
    ----------
    batches_per_epoch : int
        Batches until every frame was served.
    most_frames : int
        Frames of a batch, at most.
    """

    mixes_systems = True

    def __init__(
        self,
        nframes: Sequence[int],
        natoms: Sequence[int],
        probabilities: np.ndarray,
        budget: int,
        seed: int,
        identity: str = "",
    ) -> None:
        self._nframes = np.array(nframes, dtype=np.int64)
        is_drawn = probabilities > 0
        # As in deepmd-kit, every frame is served, and every frame of the rarest system once.
        total = float((self._nframes[is_drawn] / probabilities[is_drawn]).max())
        if total > _MOST_FRAMES:
            raise SamplingError(
                f"an epoch in which the rarest system is seen once has {total:.3g} frames; "
                "raise its share"
            )
        counts = np.maximum(np.round(probabilities * total), self._nframes)
        self._counts = np.where(is_drawn, counts, 0).astype(np.int64)  # served in an epoch
        self._atoms = np.repeat(np.array(natoms, dtype=np.int64), self._counts)
        self._cuts = _cuts(np.sort(self._atoms), budget)
        self.batches_per_epoch = len(self._cuts) - 1
        self.most_frames = int(np.diff(self._cuts).max())
        self.seed = int(seed)
        self.step = 0
        rule = (
            self._nframes.tolist(),
            list(natoms),
            [float(p) for p in probabilities],
            int(budget),
            identity,
        )
        self._identity = hashlib.sha256(repr(rule).encode()).hexdigest()
        self._epoch: _Epoch | None = None

    def next(self) -> Plan:
        """Draw the next batch; frames of one system come together."""
        number, turn = divmod(self.step, self.batches_per_epoch)
        self.step += 1
        if self._epoch is None or self._epoch.number != number:
            self._epoch = self._shuffle(number)
        batch = self._epoch.batches[turn]
        places = slice(self._cuts[batch], self._cuts[batch + 1])
        system = self._epoch.system[places]
        frame = self._epoch.frame[places]
        return Plan(tuple((int(k), frame[system == k]) for k in np.unique(system)))

    def _shuffle(self, number: int) -> _Epoch:
        """Return an epoch."""
        stream = np.random.Generator(np.random.PCG64([self.seed, _EPOCHS, number]))
        system = np.repeat(np.arange(len(self._counts)), self._counts)
        frames = []  # each frame of a system equally often but for a random remainder
        for nframes, count in zip(self._nframes.tolist(), self._counts.tolist(), strict=True):
            n_whole, n_rest = divmod(count, nframes)
            frames.append(np.tile(np.arange(nframes), n_whole))
            frames.append(stream.permutation(nframes)[:n_rest])
        frame = np.concatenate(frames)
        order = stream.permutation(len(system))
        order = order[np.argsort(self._atoms[order], kind="stable")]
        return _Epoch(
            number=number,
            system=system[order],
            frame=frame[order],
            batches=stream.permutation(self.batches_per_epoch),
        )

    def _forget(self) -> None:
        self._epoch = None


def _cuts(atoms: np.ndarray, budget: int) -> np.ndarray:
    """Return where batches begin in frames sorted by size, and the end.

    A batch takes frames as long as their number times the atoms of the largest fit.
    """
    cuts = [0]
    while cuts[-1] < len(atoms):
        begin = cuts[-1]
        longest = max(1, budget // int(atoms[begin]))
        sizes = atoms[begin : begin + longest]
        # Atoms of the padded batch that ends with each frame; they grow.
        padded = sizes * np.arange(1, len(sizes) + 1)
        n_fitting = int(np.count_nonzero(padded <= budget))
        cuts.append(begin + max(1, n_fitting))
    return np.array(cuts)
