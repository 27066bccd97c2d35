"""Schedule for refining the interpolation tables of the embedding nets."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Sequence

import torch

from deepmd_muon.data import DataLoader
from deepmd_muon.model import EnergyModel, Structures
from deepmd_muon.model.descriptor.pieces import finest
from deepmd_muon.train.batches.batch import to_device

log = logging.getLogger(__name__)

# Steps between two checks late in a run. Weights change fastest at its start, where checks are at powers of two.
_PERIOD = 1000
# Systems whose frames are examined.
_MOST_SYSTEMS = 4


class Tuning:
    """Keeps the pieces of a descriptor's interpolation in step with its weights.

    It examines the same frames every time, so that a run is reproducible. `branches` are the models that have the
    descriptor, with the loaders of their training data: the pieces suffice for all of them. `looked` says whether the
    run, or the one that it continues, has done so before.
    """

    def __init__(
        self, branches: Sequence[tuple[EnergyModel, DataLoader]], device: torch.device
    ) -> None:
        self._branches = branches
        self._device = device
        self._batches: list[tuple[EnergyModel, list[Structures]]] = []
        self.looked = False

    def __call__(self, done: int) -> None:
        """Choose the pieces before update `done` + 1, if a check is due."""
        first, self.looked = not self.looked, True
        if not (first or done & (done - 1) == 0 or done % _PERIOD == 0):
            return
        if not self._batches:
            for model, loader in self._branches:
                samples = itertools.islice(loader.sample_batches(1), _MOST_SYSTEMS)
                found = [
                    to_device(batch, model.ntypes, self._device).structures for batch in samples
                ]
                self._batches.append((model, found))
        pieces = finest(model.wanted_pieces(batches) for model, batches in self._batches)
        model, _ = self._branches[0]  # its descriptor is that of all
        present = model.pieces
        if pieces != present:
            model.pieces = pieces
        if len(pieces) != len(present):
            how = (
                f"interpolated on {len(pieces)} pieces in training steps"
                if pieces
                else "evaluated at every edge"
            )
            log.info("embedding nets are %s", how)
