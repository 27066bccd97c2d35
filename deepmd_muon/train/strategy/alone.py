"""Training in a single process."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from deepmd_muon.model import EnergyModel
from deepmd_muon.train.strategy.base import Reduced, Strategy


class Alone(Strategy):
    """One process holds everything."""

    reads_on_host = None

    def reduce(self, loss: Tensor, branch: EnergyModel | None = None) -> Reduced:
        """Return this process's gradients, their norm and the loss."""
        gradients = [p.grad for p in self._trained if p.grad is not None]
        return Reduced(gradients, torch.nn.utils.get_total_norm(gradients), loss)

    @functools.cached_property
    def _trained(self) -> list[torch.nn.Parameter]:
        """The parameters with gradients; a walk through the modules would take a hundredth of a small step."""
        return [p for p in self.model.parameters() if p.requires_grad]

    def request_stop(self, number: int) -> None:
        """End the run after this step."""
        self.stop_signal = number
