"""How a run takes its steps: reading loss and gradient on the host, or without waiting for the device."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from typing import Protocol, TypeAlias

import torch
from torch import Tensor

from deepmd_muon.argcheck import RunSettings
from deepmd_muon.data import DataLoader
from deepmd_muon.loss import Loss
from deepmd_muon.model import EnergyModel
from deepmd_muon.model.nn.graphs import GraphMemory
from deepmd_muon.optim import HybridMuon
from deepmd_muon.train.batches.accumulated import AccumulatedBatches, StepFeed, StepSource
from deepmd_muon.train.batches.resident import ResidentBatches, why_not_on_device
from deepmd_muon.train.batches.streamed import BatchSource, HostBatches, StreamedBatches
from deepmd_muon.train.ema import Ema
from deepmd_muon.train.errors import TrainingError
from deepmd_muon.train.step.captured import CapturedStep, RateTable
from deepmd_muon.train.step.compiled import CompiledGradient
from deepmd_muon.train.step.guard import DeviceGuard, HostGuard, on_nonfinite
from deepmd_muon.train.step.step import TrainingStep
from deepmd_muon.train.strategy import Strategy

log = logging.getLogger(__name__)

Scalars: TypeAlias = Callable[[int], tuple[float, float]]
"""Maps the 0-based step to its learning rate and the fraction of the first one."""

# Share of a device's free memory that training data may take to live there.
_RESIDENT_SHARE = 0.25


class Stepper(Protocol):
    """Takes the steps of a run."""

    def __call__(self, feed: StepFeed, done: int) -> dict[str, Tensor]:
        """Update the parameters once, after `done` updates; return metrics from before the update."""

    def check(self, done: int) -> None:
        """Raise pending errors of steps, before anything is built on `done` updates."""

    def open_batches(self, loader: DataLoader, ntypes: int) -> StepSource:
        """Return where the batches of a run come from."""

    def close(self) -> None:
        """End: no step follows."""


class HostStepper:
    """Reads loss and gradient norm in every step: on CPUs, and where ranks share more than gradients.

    Parameters
    ----------
    step
        With a `HostGuard`.
    scalars
        The schedule.
    device
        Where the steps run.
    """

    def __init__(self, step: TrainingStep, scalars: Scalars, device: torch.device) -> None:
        self._step = step
        self._scalars = scalars
        self._device = device

    def __call__(self, feed: StepFeed, done: int) -> dict[str, Tensor]:
        """Update the parameters once; see `Stepper`."""
        return self._step(feed.read(), *self._scalars(done))

    def check(self, done: int) -> None:
        """Do nothing: steps raise themselves."""

    def close(self) -> None:
        """Do nothing: a step leaves nothing behind."""

    def open_batches(self, loader: DataLoader, ntypes: int) -> StepSource:
        """Return batches that are converted one by one; on a GPU those of `DeviceStepper`."""
        if self._device.type == "cuda":
            return _batches_on(self._device, loader, ntypes)
        return _by_step(HostBatches(loader, ntypes, self._device), loader)


@dataclasses.dataclass
class DeviceParts:
    """Parts of steps that wait for nothing, which the branches of a run share: made for the first of them.

    Attributes
    ----------
    guard
        Counts the steps of all branches, and freezes all parameters after a bad one.
    rates
        The schedule on the device; every step of any branch reads its next row.
    memory
        Of the captured graphs.
    """

    guard: DeviceGuard | None = None
    rates: RateTable | None = None
    memory: GraphMemory | None = None

    def rates_for(self, scalars: Scalars, optimizer: torch.optim.Optimizer, device: torch.device) -> RateTable:
        """Return the schedule for an optimizer."""
        # torch's fused Adam reads no other dtype.
        dtype = torch.float64 if isinstance(optimizer, HybridMuon) else torch.float32
        self.rates = self.rates or RateTable(scalars, dtype, device)
        return self.rates


class DeviceStepper:
    """Waits for nothing in a step, and captures it where it may.

    Parameters
    ----------
    step
        With a `DeviceGuard`.
    scalars
        The schedule.
    device
        Where the steps run.
    capture
        Whether to capture.
    keep_metrics
        Return metrics that the next step does not overwrite.
    parts
        Shared with the steppers of other branches; its guard is that of `step`.
    """

    def __init__(
        self,
        step: TrainingStep,
        scalars: Scalars,
        device: torch.device,
        *,
        capture: bool,
        keep_metrics: bool = False,
        parts: DeviceParts | None = None,
    ) -> None:
        assert isinstance(step.guard, DeviceGuard)
        parts = parts or DeviceParts(step.guard)
        if capture:
            parts.memory = parts.memory or GraphMemory()
        self._guard = step.guard
        self._strategy = step.strategy
        self._captured = CapturedStep(step, parts.rates_for(scalars, step.optimizer, device), parts.memory)
        self._device = device
        self._keep = keep_metrics

    def __call__(self, feed: StepFeed, done: int) -> dict[str, Tensor]:
        """Update the parameters once; see `Stepper`."""
        self._guard.expect(done)
        metrics = self._captured(feed, done)
        self._strategy.launched()
        return {name: value.clone() for name, value in metrics.items()} if self._keep else metrics

    def check(self, done: int) -> None:
        """Wait for the device and report steps that were not finite."""
        with self._strategy.ranks.waiting():
            self._guard.check(done)

    def close(self) -> None:
        """Drop what has been captured."""
        self._captured.close()

    def open_batches(self, loader: DataLoader, ntypes: int) -> StepSource:
        """Return batches gathered on the device, or made on the host where the device cannot make them."""
        return _batches_on(self._device, loader, ntypes)


def _by_step(source: BatchSource, loader: DataLoader) -> StepSource:
    each = loader.batches_per_step
    return source if each == 1 else AccumulatedBatches(source, each)


def _batches_on(device: torch.device, loader: DataLoader, ntypes: int) -> StepSource:
    """Return batches gathered on the device, or made on the host where the device cannot make them."""
    budget = 1 << 30
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        budget = int(free * _RESIDENT_SHARE)
    reason = why_not_on_device(loader)
    if reason is None:
        return _by_step(ResidentBatches(loader, device, budget), loader)
    log.info("batches are made on the host and copied to the device: %s", reason)
    return _by_step(StreamedBatches(loader, ntypes, device), loader)


def build_stepper(
    strategy: Strategy,
    loss: Loss,
    optimizer: torch.optim.Optimizer,
    ema: Ema | None,
    training: RunSettings,
    scalars: Scalars,
    model: EnergyModel | None = None,
    parts: DeviceParts | None = None,
) -> Stepper:
    """Make the stepper of a run.

    Parameters
    ----------
    strategy, loss, optimizer, ema
        The objects that a step uses.
    training
        The input's section: `capture`, `enable_compile`, `enable_tf32`, `gradient_max_norm`,
        `adam_gradient_max_norm`, `disp_freq`, `disp_avg`.
    scalars
        The schedule.
    model
        The model of the branch that it steps, where the strategy holds several.
    parts
        Shared by the steppers of these branches.

    Raises
    ------
    TrainingError
        When `capture` is 'on' where steps cannot be captured.
    """
    device, policy = strategy.ranks.device, on_nonfinite(optimizer)
    obstacle = "there is no GPU" if device.type != "cuda" else strategy.reads_on_host
    if obstacle and training.capture == "on":
        raise TrainingError(f'training/capture is "on", but {obstacle}: use "auto"')
    tf32 = training.enable_tf32 and device.type == "cuda"
    if obstacle:
        if training.enable_compile:
            log.info("training/enable_compile is ignored: %s", obstacle)
        if training.enable_tf32 and not tf32:
            log.info("training/enable_tf32 is ignored: %s", obstacle)
        step = TrainingStep(
            strategy,
            loss,
            optimizer,
            HostGuard(policy, training.disp_freq),
            training.gradient_max_norm,
            ema,
            tf32=tf32,
            model=model,
            adam_max_norm=training.adam_gradient_max_norm,
        )
        return HostStepper(step, scalars, device)
    parts = parts or DeviceParts()
    guard = parts.guard = parts.guard or DeviceGuard(
        policy, optimizer, device, training.disp_freq, strategy.ranks.gather_objects
    )
    capture = training.capture == "on" or (training.capture == "auto" and strategy.captured_by_default)
    whole = model or strategy.model
    assert isinstance(whole, EnergyModel)
    gradient = CompiledGradient(whole, loss) if capture and training.enable_compile else None
    norms = training.gradient_max_norm, training.adam_gradient_max_norm
    step = TrainingStep(strategy, loss, optimizer, guard, norms[0], ema, gradient, tf32, model, norms[1])
    return DeviceStepper(step, scalars, device, capture=capture, keep_metrics=training.disp_avg, parts=parts)
