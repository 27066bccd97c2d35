"""Schedule for refining the interpolation tables of the embedding nets."""

from __future__ import annotations

import itertools
import logging

import torch

from deepmd_muon.data import DataLoader
from deepmd_muon.model import EnergyModel, Structures
from deepmd_muon.train.batches.batch import to_device

log = logging.getLogger(__name__)

# Steps between two looks late in a run; weights move fastest at its start, where looks are at powers of two.
_PERIOD = 1000
# Systems whose frames are looked at.
_MOST_SYSTEMS = 4


class Tuning:
    """Keeps the number of pieces of a model's interpolation in step with its weights.

    It looks at the same frames every time, so that a run repeats.

    Parameters
    ----------
    model
        On its device.
    loader
        Of the training data.
    device
        Where the model is.

    Attributes
    ----------
    looked
        Whether the run, or the one that it continues, has looked before.
    """

    def __init__(self, model: EnergyModel, loader: DataLoader, device: torch.device) -> None:
        self._model = model
        self._loader = loader
        self._device = device
        self._batches: list[Structures] = []
        self.looked = False

    def __call__(self, done: int) -> None:
        """Choose the number of pieces before update `done` + 1, where it is time to."""
        first, self.looked = not self.looked, True
        if not (first or done & (done - 1) == 0 or done % _PERIOD == 0):
            return
        if not self._batches:
            samples = itertools.islice(self._loader.sample_batches(1), _MOST_SYSTEMS)
            self._batches = [to_device(batch, self._model.ntypes, self._device).structures for batch in samples]
        before = self._model.pieces
        self._model.tune(self._batches)
        if self._model.pieces != before:
            log.info("embedding nets are %s", _describe(self._model.pieces))


def _describe(pieces: int) -> str:
    return f"interpolated on {pieces} pieces in training steps" if pieces else "evaluated at every edge"
