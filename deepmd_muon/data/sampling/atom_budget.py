"""Batches of frames of any size under a bound on their atoms: batch size ``mix:N``.

An epoch is every frame once (systems whose probability is higher serve theirs more often), in a random order. Frames
are sorted by their number of atoms, those of equal size keep the random order, and the row is cut where the next frame
would take the padded batch beyond the bound. The batches come in a random order. Sizes and cuts are those of every
epoch, so that the position is one integer.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np

from deepmd_muon.data.errors import SamplingError
from deepmd_muon.data.sampling.sampler import Plan, SavedOrder

#: Frames of an epoch that the order is kept for; more are the mark of a probability near zero.
_MOST_FRAMES = 1 << 30


class AtomBudgetSampler(SavedOrder):
    """An endless, reproducible order of batches of at most `budget` atoms, padding included.

    A frame of more atoms is a batch of its own. `probabilities` (nsystems,) are the shares of systems in the frames of
    an epoch. `identity` says more about the systems; it is compared when a position is restored.

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
        frames = np.array(nframes, dtype=np.int64)
        drawn = probabilities > 0
        # As in deepmd-kit, every frame is served, and that of the rarest system once.
        total = float((frames[drawn] / probabilities[drawn]).max())
        if total > _MOST_FRAMES:
            raise SamplingError(
                f"an epoch in which the rarest system is seen once has {total:.3g} frames; raise its share"
            )
        self._nframes = frames
        self._counts = np.where(
            drawn, np.maximum(np.round(probabilities * total), frames), 0
        ).astype(np.int64)
        atoms = np.repeat(np.array(natoms, dtype=np.int64), self._counts)
        self._atoms = atoms
        self._cuts = _cuts(np.sort(atoms), budget)
        self.batches_per_epoch = len(self._cuts) - 1
        self.most_frames = int(np.diff(self._cuts).max())
        self.seed = int(seed)
        rule = (
            frames.tolist(),
            list(natoms),
            [float(p) for p in probabilities],
            int(budget),
            identity,
        )
        self._identity = hashlib.sha256(repr(rule).encode()).hexdigest()
        self._epoch: tuple[int, np.ndarray, np.ndarray, np.ndarray] | None = None
        self.step = 0

    def next(self) -> Plan:
        """Draw the next batch; frames of one system lie together."""
        epoch, turn = divmod(self.step, self.batches_per_epoch)
        self.step += 1
        if self._epoch is None or self._epoch[0] != epoch:
            self._epoch = (epoch, *self._order(epoch))
        _, system, frame, turns = self._epoch
        batch = slice(self._cuts[turns[turn]], self._cuts[turns[turn] + 1])
        systems, frames = system[batch], frame[batch]
        return Plan(tuple((int(s), frames[systems == s]) for s in np.unique(systems)))

    def _order(self, epoch: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return system and frame of every place of an epoch, sorted by size, and the order of its batches."""
        stream = np.random.Generator(np.random.PCG64([self.seed, 2, epoch]))
        system = np.repeat(np.arange(len(self._counts)), self._counts)
        served = []  # each frame of a system equally often but for a random remainder
        for n, count in zip(self._nframes.tolist(), self._counts.tolist(), strict=True):
            whole, rest = divmod(count, n)
            served += [np.tile(np.arange(n), whole), stream.permutation(n)[:rest]]
        frame = np.concatenate(served)
        shuffled = stream.permutation(len(system))
        shuffled = shuffled[np.argsort(self._atoms[shuffled], kind="stable")]
        return system[shuffled], frame[shuffled], stream.permutation(self.batches_per_epoch)

    def _forget(self) -> None:
        self._epoch = None


def _cuts(atoms: np.ndarray, budget: int) -> np.ndarray:
    """Return where batches begin in frames sorted by size, and the end: as long as frames · largest fits."""
    cuts = [0]
    while cuts[-1] < len(atoms):
        first = cuts[-1]
        # Atoms of the padded batch that ends with frame k; it grows with k.
        longest = max(1, budget // int(atoms[first]))
        part = atoms[first : first + longest]
        fits = int(np.count_nonzero(part * np.arange(1, len(part) + 1) <= budget))
        cuts.append(first + max(1, fits))
    return np.array(cuts)
