"""Stages 0 and 1: every rank holds the model, and gradients are averaged.

On CPUs one all-reduce after the backward pass is the whole communication before the update. It sums
all gradients, the loss and the requests to stop. On GPUs the gradients of the fitting nets are
summed earlier, during the backward pass through the descriptor. The order of summation is fixed.

On GPUs nothing is read on the host in a step, so that it can be one CUDA graph, exchanges of the
optimizer included. The ranks read the requests to stop a few steps later, all of them after the
same step.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from deepmd_muon.model import EnergyModel
from deepmd_muon.model.branches import Branches
from deepmd_muon.train.errors import TrainingError
from deepmd_muon.train.process.signals import SIGNALS
from deepmd_muon.train.ranks.ranks import Ranks
from deepmd_muon.train.strategy.base import Reduced, SeveralRanks
from deepmd_muon.train.strategy.gradient_sum import GradientSum, Mean


class Replicated(SeveralRanks):
    """Every rank holds the model and works on its own batch.

    With `state_in_parts` each keeps a part of the optimizer's state (stage 1) instead of all of it
    (stage 0). With `stratified` ranks train different branches in a step. A gradient is then the
    mean over the ranks that have it.
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
        self._late_requests = LateRequests(ranks)
        self._gradient_sums: dict[EnergyModel | None, GradientSum] = {}  # by branch

    @property
    def _on_host(self) -> bool:
        """Whether steps read numbers on the host, as they do on CPUs, where that costs nothing."""
        return self.reads_on_host is not None or self.ranks.device.type == "cpu"

    @contextlib.contextmanager
    def overlapping(self, branch: EnergyModel | None = None) -> Iterator[None]:
        """Sum the first gradients during the backward pass of a `with` block."""
        gradient_sum = self._gradient_sums.get(branch)
        if gradient_sum is None:
            yield
            return
        gradient_sum.begin()
        try:
            yield
        except BaseException:
            # A capture reports the reason of its end only if no other stream is left in it.
            gradient_sum.abandon()
            raise

    def reduce(self, loss: Tensor, branch: EnergyModel | None = None) -> Reduced:
        """Average gradients and loss of all ranks, and let them agree on signals."""
        return self._reduce_on_host(loss) if self._on_host else self._reduce_on_device(loss, branch)

    def _reduce_on_host(self, loss: Tensor) -> Reduced:
        params = self._trainable()
        present = loss.new_tensor([float(p.grad is not None) for p in params])
        tail = torch.cat([self._loss_and_requests(loss), present])
        mean = GradientSum(self.ranks, params, ntail=len(tail)).finish(tail)
        with self.ranks.waiting():
            numbers = mean.tail.tolist()
        end_of_requests = 1 + len(SIGNALS)
        self._agree(numbers[1:end_of_requests])
        counts = numbers[end_of_requests:]  # ranks with a gradient, for each parameter
        for p, gradient, count in zip(params, mean.gradients, counts, strict=True):
            if self._stratified and count:
                gradient.mul_(self.ranks.size / count)
            # An optimizer leaves a parameter alone that has a gradient nowhere.
            p.grad = gradient.view_as(p).to(p.dtype) if count else None
        return self._reduced(mean)

    def _reduce_on_device(self, loss: Tensor, branch: EnergyModel | None) -> Reduced:
        """Do the same without waiting.

        Parameters that had no gradient anywhere in the first step of a branch have none in its
        later ones.
        """
        if branch not in self._gradient_sums:
            self._gradient_sums[branch] = self._agree_on_sum(branch)
        gradient_sum = self._gradient_sums[branch]
        self._refuse_new_gradients(gradient_sum)
        requests = self._late_requests.of_this_rank.to(loss.dtype)
        mean = gradient_sum.finish(torch.cat([loss.reshape(1), requests]))
        self._late_requests.summed.copy_(mean.tail[1:])
        for p, gradient in zip(gradient_sum.params, mean.gradients, strict=True):
            p.grad = gradient.view_as(p).to(p.dtype)
        return self._reduced(mean)

    def _trainable(self) -> list[nn.Parameter]:
        return [p for p in self.model.parameters() if p.requires_grad]

    def _agree_on_sum(self, branch: EnergyModel | None) -> GradientSum:
        """Sum the gradients that some rank has in the first step of a branch.

        Gradients of the fitting net come first.
        """
        params = self._trainable()
        present = torch.tensor(
            [float(p.grad is not None) for p in params], device=self.ranks.device
        )
        with self.ranks.waiting():
            counts = self.ranks.sum(present).tolist()
        trained = [p for p, count in zip(params, counts, strict=True) if count]
        model = branch or self.model
        assert isinstance(model, EnergyModel)
        completed_first = model.early_parameters()
        early = [p for p in trained if p in completed_first]
        late = [p for p in trained if p not in completed_first]
        # Two sums take longer than one if most elements are late.
        overlaps = sum(p.numel() for p in early) > sum(p.numel() for p in late)
        return GradientSum(
            self.ranks,
            early + late,
            ntail=1 + len(SIGNALS),
            early=len(early) if overlaps else 0,
        )

    def _refuse_new_gradients(self, gradient_sum: GradientSum) -> None:
        """Refuse a gradient that no rank had in the first step of the branch."""
        summed = set(gradient_sum.params)
        for name, p in self.model.named_parameters():
            if p.grad is not None and p not in summed:
                gradient_sum.abandon()
                raise TrainingError(
                    f"the parameter {name} has a gradient now, but had none on any rank in the "
                    "first step: freeze it, or let it take part in every step"
                )

    def _reduced(self, mean: Mean) -> Reduced:
        gradients = [p.grad for p in self._trainable() if p.grad is not None]
        # In two steps: in a graph, torch's norm of a long vector first clears memory, which takes
        # 10 us.
        norm = torch.linalg.vector_norm(torch.linalg.vector_norm(mean.rows, dim=1))
        return Reduced(gradients, norm, mean.tail[0] / self.ranks.size)

    def request_stop(self, number: int) -> None:
        """Tell the other ranks of a signal with the next exchange, which ends the run on all."""
        super().request_stop(number)
        self._late_requests.request(number)

    def launched(self) -> None:
        """Read the requests to stop that were summed `LateRequests.STEPS` steps ago."""
        counts = self._late_requests.read()
        if counts is not None:
            self._agree(counts)

    def _take_state(self, optimizer: torch.optim.Optimizer, whole: dict[str, Any]) -> None:
        optimizer.load_state_dict(whole)


class _LaunchedSum(NamedTuple):
    """The requests of a launched step on their way to the host; no event on a CPU."""

    on_host: Tensor
    copied: torch.cuda.Event | None


class LateRequests:
    """Requests to stop that are summed on the device in every step, and read some steps later.

    Every rank reads the sum of the same step after the same step. So all of them end together, and
    none waits for a step that has just been launched.

    A request that comes while the host reads batch n, or launches step n, goes to the device after
    step n. Step n + 1 sums it, and every rank reads it after step n + 1 + `STEPS`. No step
    follows.

    Attributes
    ----------
    of_this_rank, summed
        One number a signal `(len(SIGNALS),)`, float64, on the device: this rank's request, and the
        requests of all.
    """

    #: Steps between the sum and its reading; the host is at most so far ahead of the device.
    STEPS = 16

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._on_gpu = ranks.device.type == "cuda"
        self.of_this_rank, self.summed = torch.zeros(
            2, len(SIGNALS), dtype=torch.float64, device=ranks.device
        ).unbind()
        self._requested: int | None = None
        self._launched: deque[_LaunchedSum] = deque()
        self._spare: list[Tensor] = []  # pinned memory takes long to allocate

    def request(self, number: int) -> None:
        """Ask all ranks to stop because of a signal; safe in a signal handler."""
        self._requested = number

    def read(self) -> list[float] | None:
        """Note the sums of the step that has just been launched; return earlier ones.

        None before there are any.
        """
        if self._requested is not None:
            flags = [float(number == self._requested) for number in SIGNALS]
            self.of_this_rank.copy_(torch.tensor(flags))
            self._requested = None
        self._launched.append(self._copy_to_host())
        if len(self._launched) <= self.STEPS:
            return None
        launched = self._launched.popleft()
        if launched.copied is not None and not launched.copied.query():
            with self._ranks.waiting():
                launched.copied.synchronize()
        self._spare.append(launched.on_host)
        return launched.on_host.tolist()

    def _copy_to_host(self) -> _LaunchedSum:
        """Begin to copy the sums of the step that has just been launched."""
        if self._spare:
            on_host = self._spare.pop()
        else:
            on_host = torch.zeros(len(SIGNALS), dtype=torch.float64, pin_memory=self._on_gpu)
        on_host.copy_(self.summed, non_blocking=True)
        copied = None
        if self._on_gpu:
            copied = torch.cuda.Event()
            copied.record()
        return _LaunchedSum(on_host, copied)
