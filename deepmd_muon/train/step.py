"""One training step: energy, forces, loss, gradient, update."""

from __future__ import annotations

import dataclasses
import logging
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from deepmd_muon.train.errors import NonFiniteError

if TYPE_CHECKING:
    from deepmd_muon.loss import EnergyLoss
    from deepmd_muon.train.batch import TrainingBatch
    from deepmd_muon.train.strategy import Strategy

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class TrainingStep:
    """What a step needs besides its batch and learning rate.

    Attributes
    ----------
    strategy
        The model, and how gradients are combined.
    loss, optimizer
        The other parts; the optimizer's groups share one learning rate.
    max_norm
        Largest norm of the gradient; 0 for no limit.
    """

    strategy: Strategy
    loss: EnergyLoss
    optimizer: torch.optim.Optimizer
    max_norm: float = 0.0

    def __call__(self, batch: TrainingBatch, lr: float, lr_fraction: float) -> dict[str, Tensor]:
        """Update the parameters once.

        Parameters
        ----------
        batch
            Structures and labels on the model's device.
        lr
            Learning rate of the update.
        lr_fraction
            Learning rate divided by the first one, which the prefactors of the loss follow.

        Returns
        -------
        dict
            Metrics before the update, tensors on the device.

        Raises
        ------
        NonFiniteError
            When loss or gradient is not finite, unless the optimizer's `on_nonfinite` is "skip"; parameters and
            optimizer state are untouched either way.
        """
        self.optimizer.zero_grad(set_to_none=True)
        prediction = self.strategy.model(batch.structures, force=self.loss.needs_force, virial=self.loss.needs_virial)
        value, metrics = self.loss(prediction, batch.labels, lr_fraction, batch.structures.natoms, batch.mask)
        value.backward()
        if self._finite_and_clipped(value.detach(), batch.system):
            for group in self.optimizer.param_groups:
                group["lr"] = lr
            self.optimizer.step()
        return metrics

    def _finite_and_clipped(self, loss: Tensor, system: str) -> bool:
        """Shorten a gradient that is too long; refuse one that is not finite, or leave its step out if asked to."""
        grads, norm, loss = self.strategy.reduce(loss)
        # One read of the device a step: the price of never writing a NaN into the weights.
        if not bool(torch.isfinite(norm + loss)):
            where = ", ".join(self.strategy.ranks.gather_objects(system))
            problem = f"the loss is {float(loss):g} and the norm of its gradient {float(norm):g} on a batch of {where}"
            if getattr(self.optimizer, "on_nonfinite", "error") != "skip":
                raise NonFiniteError(problem)
            log.warning("%s: the step is left out", problem)
            return False
        if self.max_norm > 0:
            torch._foreach_mul_(grads, (self.max_norm / (norm + 1e-6)).clamp(max=1.0))
        return True
