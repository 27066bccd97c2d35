"""One training step: energy, forces, loss, gradient, update."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import math
from collections.abc import Hashable, Iterator, Sequence

import torch
from torch import Tensor

from deepmd_muon.data import DataLoader
from deepmd_muon.data.sampling.loader import Origin
from deepmd_muon.loss import Loss
from deepmd_muon.model import EnergyModel
from deepmd_muon.model.nn.triton_support import usable
from deepmd_muon.optim import HybridMuon, clip_adam_grad_norm_
from deepmd_muon.optim.cuda import keep_launchers_apart
from deepmd_muon.train.batches.batch import TrainingBatch
from deepmd_muon.train.batches.streamed import AccumulatedFeed
from deepmd_muon.train.ema import Ema
from deepmd_muon.train.ranks.ranks import local_part
from deepmd_muon.train.step.bad_frames import (
    FrameLoss,
    describe_batch,
    evaluate_frames,
    without_losses,
)
from deepmd_muon.train.step.compiled import CompiledGradient
from deepmd_muon.train.step.evaluate import evaluate
from deepmd_muon.train.step.guard import Guard
from deepmd_muon.train.strategy import Reduced, Strategy


@dataclasses.dataclass(frozen=True)
class TrainingStep:
    """A training step: everything except its batch and learning rate.

    Attributes
    ----------
    strategy
        The model, and how gradients are combined.
    loss, optimizer
        The other parts; the optimizer's groups share one learning rate.
    guard
        Keeps numbers that are not finite out of the weights.
    max_norm
        Largest norm of the gradient; 0 for no limit.
    ema
        The averaged parameters; None without.
    tf32
        Multiply float32 matrices in TF32 on the way to the gradient.
    model
        The model of the step's branch if the strategy holds several; None for the strategy's.
    adam_max_norm
        Largest norm of the gradients of HybridMuon's Adam routes, after `max_norm`; 0 for no limit.
    compiles
        Fuse the operations of loss and gradient by torch's compiler.
    loaders
        The loader of its batches, once they are opened: frames of a bad batch are read again.
    """

    strategy: Strategy
    loss: Loss
    optimizer: torch.optim.Optimizer
    guard: Guard
    max_norm: float = 0.0
    ema: Ema | None = None
    tf32: bool = False
    model: EnergyModel | None = None
    adam_max_norm: float = 0.0
    compiles: bool = False
    loaders: list[DataLoader] = dataclasses.field(default_factory=list, init=False)

    def __call__(
        self,
        batch: TrainingBatch | AccumulatedFeed,
        lr: float | Tensor,
        lr_fraction: float | Tensor,
        layout: Hashable | None = None,
    ) -> dict[str, Tensor]:
        """Update the parameters and their average once.

        Parameters
        ----------
        batch
            Structures and labels on the model's device; of several batches, the mean gradient is
            taken.
        lr
            The learning rate; a tensor is read on its device.
        lr_fraction
            The rate divided by the first one, which the prefactors of the loss follow.
        layout
            `Feed.layout` of the batch; a batch without one is not compiled.

        Returns
        -------
        dict
            Metrics before the update, scalars on the device; `(nbatches,)` of several batches.

        Raises
        ------
        NonFiniteError
            As the guard decides, when loss or gradient is not finite; parameters and optimizer
            state are untouched.
        """
        self.optimizer.zero_grad(set_to_none=True)
        if isinstance(self.optimizer, HybridMuon):
            self.optimizer.prefetch()
        with self._products():
            if isinstance(batch, AccumulatedFeed):
                value, metrics = self._accumulate(batch, lr_fraction)
            else:
                with self.strategy.overlapping(self.model):
                    value, metrics = self._differentiate(batch, lr_fraction, layout)
        reduced = self.strategy.reduce(value, self.model)
        if self.guard.admits(reduced, lambda: self._describe(batch.origin)):
            self._clip(reduced)
            for group in self.optimizer.param_groups:
                group["lr"] = lr
            self.optimizer.step()
        if self.ema is not None:
            self.ema.update(self.guard.weight(self.ema.weight()))
        return metrics

    def _products(self) -> contextlib.AbstractContextManager[None]:
        """Return the context in which loss and gradient are computed."""
        return float32_products("high") if self.tf32 else contextlib.nullcontext()

    def compile_kernels(
        self, batch: TrainingBatch | AccumulatedFeed, lr_fraction: float | Tensor
    ) -> None:
        """Compile the kernels of loss and gradient of a batch in parallel; nothing on a CPU."""
        if self.strategy.cuts_parameters or isinstance(batch, AccumulatedFeed) or not self._trained:
            return
        if self.compiles:  # other kernels run
            return
        device = self._trained[0].device
        if not usable(device):
            return
        from deepmd_muon.model.nn.compile_ahead import compile_ahead

        keep_launchers_apart()
        # Kernels depend on the precision of products.
        with self._products():
            compile_ahead(lambda: self._differentiate(batch, lr_fraction), device)
        self.optimizer.zero_grad(set_to_none=True)

    def _describe(self, origin: Origin) -> str:
        """Name the frames of a bad step on all ranks; the responsible ones if it ends the run."""
        frames = self.evaluate_frames(origin) if self.guard.ends_run else without_losses(origin)
        frames_of_ranks = self.strategy.ranks.gather_objects(frames)
        return describe_batch(list(itertools.chain(*frames_of_ranks)))

    def evaluate_frames(self, origin: Origin) -> list[FrameLoss]:
        """Return the frames of a batch with their losses at the present weights.

        If ranks cut the parameters, the frames have no losses: no rank has all weights.
        """
        if not self.loaders or self.strategy.cuts_parameters:
            return without_losses(origin)
        model = self._model
        params = [p for p in model.parameters() if p.requires_grad]

        def loss_and_norm(batch: TrainingBatch) -> float:
            self.optimizer.zero_grad(set_to_none=True)
            # Half of the first rate: both ends of each prefactor count.
            value, _ = differentiate(model, self.loss, batch, 0.5)
            norm = torch.nn.utils.get_total_norm([p.grad for p in params if p.grad is not None])
            return float(value) if math.isfinite(float(norm)) else math.inf

        device = self.strategy.ranks.device
        frames = evaluate_frames(origin, self.loaders[-1], model.ntypes, device, loss_and_norm)
        self.optimizer.zero_grad(set_to_none=True)
        return frames

    def _differentiate(
        self, batch: TrainingBatch, lr_fraction: float | Tensor, layout: Hashable | None = None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return loss and metrics of a batch; add its gradients to the parameters' `grad`."""
        if self.compiles and layout is not None:
            assert isinstance(lr_fraction, Tensor)
            result = self._compiled(layout, batch, lr_fraction)
            if result is not None:
                return result
        sharded = self.strategy.cuts_parameters
        return differentiate(
            self._model,
            self.loss,
            batch,
            lr_fraction,
            sharded=sharded,
            trained=None if sharded else self._trained,
        )

    @property
    def _model(self) -> EnergyModel:
        model = self.model or self.strategy.model
        assert isinstance(model, EnergyModel)
        return model

    @functools.cached_property
    def _compiled(self) -> CompiledGradient:
        return CompiledGradient(self._model, self.loss, self._trained, self.strategy.ranks)

    @functools.cached_property
    def _trained(self) -> list[torch.nn.Parameter]:
        """The parameters with gradients; to list them takes a hundredth of a small step."""
        return [p for p in self._model.parameters() if p.requires_grad]

    def _accumulate(
        self, feed: AccumulatedFeed, lr_fraction: float | Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the mean loss and all metrics of several batches, the mean gradients in `grad`."""
        losses: list[Tensor] = []
        metrics_of_batches: list[dict[str, Tensor]] = []
        for batch_feed in feed.feeds:
            loss, metrics = self._differentiate(batch_feed.read(), lr_fraction, batch_feed.layout)
            losses.append(loss)
            metrics_of_batches.append(metrics)
        gradients = [
            local_part(p.grad) for p in self.strategy.model.parameters() if p.grad is not None
        ]
        torch._foreach_div_(gradients, float(len(losses)))
        stacked = {
            name: torch.stack([metrics[name] for metrics in metrics_of_batches])
            for name in metrics_of_batches[0]
        }
        return torch.stack(losses).mean(), stacked

    def _clip(self, reduced: Reduced) -> None:
        """Scale gradients that are longer than `max_norm` or `adam_max_norm` down to it."""
        if self.max_norm > 0:
            scale = (self.max_norm / (reduced.norm + 1e-6)).clamp(max=1.0)  # as torch clips
            torch._foreach_mul_(reduced.gradients, scale)
        if self.adam_max_norm > 0:
            clip_adam_grad_norm_(self.optimizer, self.adam_max_norm)


def differentiate(
    model: EnergyModel,
    loss: Loss,
    batch: TrainingBatch,
    lr_fraction: float | Tensor,
    *,
    sharded: bool = False,
    trained: Sequence[Tensor] | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return loss and metrics of a batch, the gradients in the parameters' `grad`.

    Edges are leaves of the graph as well (`describe_by_autograd`). Only the parameters are asked
    for, so that second derivatives of edges are not computed. A `sharded` model has other tensors
    in place of its parameters, so there all leaves get gradients. `trained` are the parameters that
    have gradients; without it, the modules are walked through for them.
    """
    value, metrics = evaluate(model, loss, batch, lr_fraction)
    if trained is None:
        trained = [p for p in model.parameters() if p.requires_grad]
    value.backward(inputs=None if sharded else trained or None)
    return value.detach(), metrics


@contextlib.contextmanager
def float32_products(precision: str) -> Iterator[None]:
    """Set the precision of float32 products, "highest" or "high" (TF32), in a `with` block."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
