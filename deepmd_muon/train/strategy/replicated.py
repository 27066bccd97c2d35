"""Stages 0 and 1: every rank holds the model, and gradients are averaged.

The gradient of a step comes from one explicit backward pass, after which every gradient is there. So none of
DistributedDataParallel's hooks and buckets are needed: one all-reduce over all gradients, with the loss and the
requests to stop at its end, is the whole communication before the update, and its order of summation is fixed.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from deepmd_muon.model import EnergyModel
from deepmd_muon.train.parallel import Ranks
from deepmd_muon.train.strategy.agreement import SeveralRanks
from deepmd_muon.train.strategy.base import Reduced


class Replicated(SeveralRanks):
    """Every rank holds the model and works on its own batch.

    Parameters
    ----------
    ranks, model
        The processes and their model.
    state_in_parts
        Whether each keeps a part of the optimizer's state (stage 1) instead of all of it (stage 0).
    """

    def __init__(self, ranks: Ranks, model: EnergyModel, *, state_in_parts: bool = False) -> None:
        super().__init__(ranks, model)
        self._replicas = init_device_mesh(ranks.device.type, (ranks.size,), mesh_dim_names=("replicas",))
        self._state_in_parts = state_in_parts

    def reduce(self, loss: Tensor) -> Reduced:
        """Average gradients and loss of all ranks, and let them agree on signals."""
        params = [p for p in self.model.parameters() if p.requires_grad]
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in params]
        dtype = max((g.dtype for g in grads), key=lambda dtype: dtype.itemsize)
        present = loss.new_tensor([float(p.grad is not None) for p in params])
        tail = torch.cat([self._loss_and_requests(loss), present])
        flat = self.ranks.sum(torch.cat([*(g.reshape(-1).to(dtype) for g in grads), tail.to(dtype)]))
        flat[: -tail.numel()].div_(self.ranks.size)
        *parts, summed = flat.split([*(g.numel() for g in grads), tail.numel()])
        with self.ranks.waiting():
            numbers = summed.tolist()
        self._agree(numbers)
        for p, g, part, there in zip(params, grads, parts, numbers[-len(params) :], strict=True):
            # An optimizer leaves a parameter that has a gradient nowhere alone.
            p.grad = part.view_as(g).to(g.dtype) if there else None
        found = [p.grad for p in params if p.grad is not None]
        return Reduced(found, torch.nn.utils.get_total_norm(found), summed[0] / self.ranks.size)

    def _take_state(self, optimizer: torch.optim.Optimizer, whole: dict[str, Any]) -> None:
        optimizer.load_state_dict(whole)
