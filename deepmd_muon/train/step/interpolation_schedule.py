"""Schedule for refining the interpolation tables of the embedding nets."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Sequence
from typing import NamedTuple

import torch

from deepmd_muon.data import DataLoader
from deepmd_muon.model import EnergyModel, Structures
from deepmd_muon.model.descriptor.pieces import finest
from deepmd_muon.train.batches.batch import to_device

log = logging.getLogger(__name__)

# Steps between two checks late in a run. Weights change fastest at its start, where checks are at
# powers of two.
_PERIOD = 1000
# Systems of which a frame is examined.
_MOST_SYSTEMS = 4


class _Sample(NamedTuple):
    model: EnergyModel
    batches: list[Structures]


class Tuning:
    """Keeps the pieces of a descriptor's interpolation in step with its weights.

    It examines the same frames every time, so that a run is reproducible. `branches` are the models
    that have the descriptor, with the loaders of their training data: the pieces suffice for all of
    them. `looked` says whether the run, or the one that it continues, has done so before.
    """

    def __init__(
        self, branches: Sequence[tuple[EnergyModel, DataLoader]], device: torch.device
    ) -> None:
        self._branches = branches
        self._device = device
        self._samples: list[_Sample] = []
        self.looked = False

    def __call__(self, done: int) -> None:
        """Choose the pieces before update `done` + 1, if a check is due."""
        is_power_of_two = done & (done - 1) == 0
        due = not self.looked or is_power_of_two or done % _PERIOD == 0
        self.looked = True
        if not due:
            return
        if not self._samples:
            self._samples = [self._sample(model, loader) for model, loader in self._branches]
        pieces = finest(sample.model.wanted_pieces(sample.batches) for sample in self._samples)
        model = self._samples[0].model  # its descriptor is the one of all
        present = model.pieces
        if pieces != present:
            model.pieces = pieces
        if len(pieces) == len(present):
            return
        if pieces:
            log.info("embedding nets are interpolated on %d pieces in training steps", len(pieces))
        else:
            log.info("embedding nets are evaluated at every edge")

    def _sample(self, model: EnergyModel, loader: DataLoader) -> _Sample:
        batches = itertools.islice(loader.sample_batches(1), _MOST_SYSTEMS)
        structures = [to_device(batch, model.ntypes, self._device).structures for batch in batches]
        return _Sample(model, structures)
