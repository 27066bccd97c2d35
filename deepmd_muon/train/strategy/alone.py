"""Training in a single process."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from deepmd_muon.model import EnergyModel
from deepmd_muon.model.branches import Branches
from deepmd_muon.train.checkpoint.optimizer_state import load_optimizer_state
from deepmd_muon.train.strategy.base import Reduced, Strategy


class Alone(Strategy):
    """One process holds everything."""

    def load_optimizer_state(
        self,
        optimizer: torch.optim.Optimizer,
        content: Mapping[str, Any],
        source: Path,
        build_whole: Callable[[], tuple[EnergyModel | Branches, torch.optim.Optimizer]],
    ) -> None:
        """Load the optimizer's state; see `Strategy.load_optimizer_state`."""
        load_optimizer_state(optimizer, self.model, content, source)

    def reduce(self, loss: Tensor, branch: EnergyModel | None = None) -> Reduced:
        """Return this process's gradients, their norm and the loss."""
        gradients = [p.grad for p in self.model.parameters() if p.requires_grad and p.grad is not None]
        return Reduced(gradients, torch.nn.utils.get_total_norm(gradients), loss)

    def request_stop(self, number: int) -> None:
        """End the run after this step."""
        self.stop_signal = number
