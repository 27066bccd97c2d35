"""Stages 0 and 1: every rank holds the model, and gradients are averaged.

One all-reduce over all gradients after the backward pass, with the loss and the requests to stop at its end, is the
whole communication before the update on CPUs. On GPUs the gradients of the fitting nets are summed before, beside the
backward pass through the descriptor. The order of summation is fixed.

On GPUs nothing is read on the host in a step, so that it can be one CUDA graph, exchanges of the optimizer included.
The ranks read the requests to stop a few steps later, all of them after the same step.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from deepmd_muon.model import EnergyModel
from deepmd_muon.model.branches import Branches
from deepmd_muon.train.errors import TrainingError
from deepmd_muon.train.ranks.ranks import Ranks
from deepmd_muon.train.strategy.agreement import SIGNALS, SeveralRanks
from deepmd_muon.train.strategy.base import Reduced
from deepmd_muon.train.strategy.gradient_sum import GradientSum, Mean


class Replicated(SeveralRanks):
    """Every rank holds the model and works on its own batch.

    With `state_in_parts` each keeps a part of the optimizer's state (stage 1) instead of all of it (stage 0). With
    `stratified` ranks train different branches in a step. A gradient is then the mean over the ranks that have it.
    """

    reads_on_host = None

    def __init__(
        self,
        ranks: Ranks,
        model: EnergyModel | Branches,
        *,
        state_in_parts: bool = False,
        stratified: bool = False,
    ) -> None:
        super().__init__(ranks, model)
        self._replicas = init_device_mesh(
            ranks.device.type, (ranks.size,), mesh_dim_names=("replicas",)
        )
        self._state_in_parts = state_in_parts
        self._stratified = stratified
        if stratified:
            self.reads_on_host = "training/stratified is true"
        self._late = LateRequests(ranks)
        self._sums: dict[EnergyModel | None, GradientSum] = {}

    @property
    def _on_host(self) -> bool:
        """Whether steps read numbers on the host, as they do on CPUs, where that costs nothing."""
        return self.reads_on_host is not None or self.ranks.device.type == "cpu"

    @contextlib.contextmanager
    def overlapping(self, branch: EnergyModel | None = None) -> Iterator[None]:
        """Sum gradients beside the backward pass of a `with` block as soon as they are known."""
        found = self._sums.get(branch)
        if found is None:
            yield
            return
        found.begin()
        try:
            yield
        except BaseException:
            found.abandon()  # a capture ends with the reason only where no other stream is left in it
            raise

    def reduce(self, loss: Tensor, branch: EnergyModel | None = None) -> Reduced:
        """Average gradients and loss of all ranks, and let them agree on signals."""
        return self._reduce_on_host(loss) if self._on_host else self._reduce_on_device(loss, branch)

    def _reduce_on_host(self, loss: Tensor) -> Reduced:
        params = self._trainable()
        present = loss.new_tensor([float(p.grad is not None) for p in params])
        tail = torch.cat([self._loss_and_requests(loss), present])
        mean = GradientSum(self.ranks, params, len(tail)).finish(tail)
        with self.ranks.waiting():
            numbers = mean.tail.tolist()
        self._agree(numbers[1 : 1 + len(SIGNALS)])
        for p, gradient, there in zip(params, mean.gradients, numbers[-len(params) :], strict=True):
            # An optimizer leaves a parameter that has a gradient nowhere alone.
            if self._stratified and there:
                gradient.mul_(self.ranks.size / there)
            p.grad = gradient.view_as(p).to(p.dtype) if there else None
        return self._reduced(mean)

    def _reduce_on_device(self, loss: Tensor, branch: EnergyModel | None) -> Reduced:
        """Do the same without waiting.

        Parameters that had no gradient anywhere in the first step of a branch have none in its later ones.
        """
        if branch not in self._sums:
            self._sums[branch] = self._agreed_sum(branch)
        found = self._sums[branch]
        self._refuse_others(found)
        mean = found.finish(torch.cat([loss.reshape(1), self._late.mine.to(loss.dtype)]))
        self._late.summed.copy_(mean.tail[1:])
        for p, gradient in zip(found.params, mean.gradients, strict=True):
            p.grad = gradient.view_as(p).to(p.dtype)
        return self._reduced(mean)

    def _trainable(self) -> list[nn.Parameter]:
        return [p for p in self.model.parameters() if p.requires_grad]

    def _agreed_sum(self, branch: EnergyModel | None) -> GradientSum:
        """Sum the gradients of those parameters that have one on any rank in the first step of a branch.

        Those of the fitting nets come first.
        """
        params = self._trainable()
        here = torch.tensor([float(p.grad is not None) for p in params], device=self.ranks.device)
        with self.ranks.waiting():
            counts = self.ranks.sum(here).tolist()
        trained = [p for p, count in zip(params, counts, strict=True) if count]
        model = branch or self.model
        assert isinstance(model, EnergyModel)
        fitting = set(model.atomic_model.fitting_net.parameters())
        early, late = [p for p in trained if p in fitting], [p for p in trained if p not in fitting]
        # Two sums take longer than one where most is still to come.
        most = sum(p.numel() for p in early) > sum(p.numel() for p in late)
        return GradientSum(self.ranks, early + late, 1 + len(SIGNALS), len(early) if most else 0)

    def _refuse_others(self, found: GradientSum) -> None:
        summed = set(found.params)
        for name, p in self.model.named_parameters():
            if p.grad is not None and p not in summed:
                found.abandon()
                raise TrainingError(
                    f"the parameter {name} has a gradient now, but had none on any rank in the first step: "
                    "freeze it, or let it take part in every step"
                )

    def _reduced(self, mean: Mean) -> Reduced:
        found = [p.grad for p in self._trainable() if p.grad is not None]
        # In two steps: in a graph, torch's norm of a long vector first clears memory, which takes 10 us.
        norm = torch.linalg.vector_norm(torch.linalg.vector_norm(mean.rows, dim=1))
        return Reduced(found, norm, mean.tail[0] / self.ranks.size)

    def request_stop(self, number: int) -> None:
        """Tell the other ranks of a signal with the next exchange, which ends the run on all of them."""
        super().request_stop(number)
        self._late.request(number)

    def launched(self) -> None:
        """Read the requests to stop that were summed `LateRequests.STEPS` steps ago."""
        counts = self._late.read()
        if counts is not None:
            self._agree(counts)

    def _take_state(self, optimizer: torch.optim.Optimizer, whole: dict[str, Any]) -> None:
        optimizer.load_state_dict(whole)


class LateRequests:
    """Requests to stop that are summed on the device in every step, and read on the host some steps later.

    Every rank reads the sum of the same step after the same step, so all of them end together, and none waits for a
    step that has just been launched. `mine` and `summed` have one number a signal `(len(SIGNALS),)`, float64, on the
    device: this rank's request, and the requests of all.
    """

    #: Steps between the sum and its reading; the host is at most so far ahead of the device.
    STEPS = 16

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._on_gpu = ranks.device.type == "cuda"
        self.mine, self.summed = torch.zeros(
            2, len(SIGNALS), dtype=torch.float64, device=ranks.device
        ).unbind()
        self._waiting: int | None = None
        self._launched: deque[tuple[Tensor, torch.cuda.Event | None]] = deque()
        self._spare: list[Tensor] = []

    def request(self, number: int) -> None:
        """Ask all ranks to stop because of a signal; safe in a signal handler."""
        self._waiting = number

    def read(self) -> list[float] | None:
        """Note the sums of the step that has just been launched; return older ones, None before there are any."""
        if self._waiting is not None:
            self.mine.copy_(torch.tensor([float(number == self._waiting) for number in SIGNALS]))
            self._waiting = None
        host = (
            self._spare.pop()
            if self._spare
            else torch.zeros(len(SIGNALS), dtype=torch.float64, pin_memory=self._on_gpu)
        )
        host.copy_(self.summed, non_blocking=True)
        event = None
        if self._on_gpu:
            event = torch.cuda.Event()
            event.record()
        self._launched.append((host, event))
        if len(self._launched) <= self.STEPS:
            return None
        host, event = self._launched.popleft()
        if event is not None and not event.query():
            with self._ranks.waiting():
                event.synchronize()
        self._spare.append(host)
        return host.tolist()
