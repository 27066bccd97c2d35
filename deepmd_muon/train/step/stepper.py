"""How a run takes its steps: `HostStepper` reads loss and norm, `DeviceStepper` waits for nothing.

A step that waits for nothing is a function of tensors with fixed addresses: batch, learning rate,
weights, optimizer state, averages. Batches of one *layout* (`Feed.layout`) launch the same work on
the same memory. `CapturedStep` calls the function eagerly at the first batch of a layout (kernels
are compiled, state is made), captures it in a CUDA graph at the second one, and replays the graph
from then on. Without capture it always calls the function, on a CPU too, and gives the same
weights.
"""

from __future__ import annotations

import dataclasses
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable
from typing import TypeAlias

import torch
from torch import Tensor

from deepmd_muon.argcheck import RunSettings
from deepmd_muon.data import DataLoader
from deepmd_muon.loss import Loss
from deepmd_muon.model import EnergyModel
from deepmd_muon.model.nn.graphs import GraphMemory
from deepmd_muon.optim import HybridMuon
from deepmd_muon.train.batches.resident import ResidentBatches, why_not_on_device
from deepmd_muon.train.batches.streamed import (
    AccumulatedBatches,
    BatchSource,
    HostBatches,
    StepFeed,
    StepSource,
    StreamedBatches,
)
from deepmd_muon.train.ema import Ema
from deepmd_muon.train.errors import TrainingError
from deepmd_muon.train.step.guard import DeviceGuard, Guard, HostGuard, on_nonfinite
from deepmd_muon.train.step.step import TrainingStep
from deepmd_muon.train.strategy import Strategy

log = logging.getLogger(__name__)

Scalars: TypeAlias = Callable[[int], tuple[float, float]]
"""Maps the 0-based step to its learning rate and the fraction of `start_lr`."""

#: Graphs of a branch that are kept at most; batches of further layouts are stepped eagerly while
#: all are in use.
MOST_GRAPHS = 32
# Steps after which a graph that was not replayed makes room for another.
_UNUSED = 4096
# Steps whose learning rates are copied to the device at once.
_RATES = 1024
# Share of a device's free memory that training data may take to stay there.
_RESIDENT_SHARE = 0.25
# The same on a CPU, in tests [bytes].
_RESIDENT_BYTES_ON_CPU = 1 << 30


@dataclasses.dataclass
class DeviceParts:
    """Parts of steps that the branches of a run share; the first branch makes them.

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


def build_stepper(
    *,
    strategy: Strategy,
    loss: Loss,
    optimizer: torch.optim.Optimizer,
    ema: Ema | None,
    training: RunSettings,
    scalars: Scalars,
    model: EnergyModel | None = None,
    device_parts: DeviceParts | None = None,
) -> Stepper:
    """Make the stepper of a run; branches pass their `model` and share `device_parts`.

    Raises
    ------
    TrainingError
        When `capture` is 'on' although steps cannot be captured.
    """
    device_parts = device_parts or DeviceParts()
    device = strategy.ranks.device
    # Why steps have to read on the host; None if they can wait for nothing.
    why_on_host = strategy.reads_on_host if device.type == "cuda" else "there is no GPU"
    why_not_captured = why_on_host or _why_not_captured(model or strategy.model)
    if why_not_captured and training.capture == "on":
        raise TrainingError(f'training/capture is "on", but {why_not_captured}: use "auto"')
    if why_not_captured and not why_on_host and training.capture == "auto":
        log.info("training steps are launched one kernel at a time: %s", why_not_captured)
    step = TrainingStep(
        strategy=strategy,
        loss=loss,
        optimizer=optimizer,
        guard=_build_guard(strategy, optimizer, training, device_parts, on_host=bool(why_on_host)),
        max_norm=training.gradient_max_norm,
        ema=ema,
        tf32=_uses_tf32(training, device),
        model=model,
        adam_max_norm=training.adam_gradient_max_norm,
        compiles=compiles_steps(model or strategy.model, training, why_on_host),
    )
    if why_on_host:
        return HostStepper(step, scalars, device)
    return DeviceStepper(
        step,
        scalars,
        device,
        capture=training.capture != "off" and not why_not_captured,
        keep_metrics=training.disp_avg,
        device_parts=device_parts,
    )


def _why_not_captured(model: object) -> str | None:
    """Return why a graph cannot hold the steps of a model, apart from how they are taken."""
    return model.why_not_captured if isinstance(model, EnergyModel) else None


def _build_guard(
    strategy: Strategy,
    optimizer: torch.optim.Optimizer,
    training: RunSettings,
    parts: DeviceParts,
    *,
    on_host: bool,
) -> Guard:
    """Return the guard of the steps; the branches of a run share one on the device."""
    policy = on_nonfinite(optimizer)
    if on_host:
        return HostGuard(policy, training.disp_freq)
    if parts.guard is None:
        parts.guard = DeviceGuard(
            policy=policy,
            optimizer=optimizer,
            device=strategy.ranks.device,
            interval=training.disp_freq,
            gather=strategy.ranks.gather_objects,
        )
    return parts.guard


def _uses_tf32(training: RunSettings, device: torch.device) -> bool:
    if training.enable_tf32 and device.type != "cuda":
        log.info("training/enable_tf32 is ignored: there is no GPU")
        return False
    return training.enable_tf32


def compiles_steps(model: object, training: RunSettings, why_on_host: str | None) -> bool:
    """Return whether torch's compiler fuses steps; log why not, if the input asks for it.

    `why_on_host` is why steps have to read on the host, which rules it out; None if they need not.
    """
    if not isinstance(model, EnergyModel):
        return False
    if not (training.enable_compile or model.asks_for_compiler):
        return False
    reason = why_on_host or model.why_not_compiled
    if reason:
        log.info("training steps are not compiled: %s", reason)
    return not reason


class Stepper(ABC):
    """Takes the steps of a run."""

    @abstractmethod
    def __call__(self, feed: StepFeed, done: int) -> dict[str, Tensor]:
        """Update the parameters after `done` updates; return metrics from before the update."""

    @abstractmethod
    def open_batches(self, loader: DataLoader, ntypes: int) -> StepSource:
        """Return where the batches of a run come from."""

    @abstractmethod
    def check(self, done: int) -> None:
        """Raise pending errors of steps, before anything is built on `done` updates."""

    def close(self) -> None:  # noqa: B027 (steps that read on the host leave nothing behind)
        """Release the stepper's resources; no step follows."""


class HostStepper(Stepper):
    """Reads loss and gradient norm in every step.

    Used on CPUs, if ranks share parameters, and with `training/stratified`.
    """

    def __init__(self, step: TrainingStep, scalars: Scalars, device: torch.device) -> None:
        self._step = step
        self._scalars = scalars
        self._device = device

    def __call__(self, feed: StepFeed, done: int) -> dict[str, Tensor]:
        """Update the parameters once; see `Stepper`."""
        lr, lr_fraction = self._scalars(done)
        return self._step(feed.read(), lr, lr_fraction)

    def check(self, done: int) -> None:
        """Judge the steps that were skipped; others raise themselves."""
        self._step.guard.check(done)

    def open_batches(self, loader: DataLoader, ntypes: int) -> StepSource:
        """Return batches that are converted one by one; on a GPU the batches of `DeviceStepper`."""
        self._step.loaders.append(loader)
        if self._device.type == "cuda":
            return _batches_on(self._device, loader, ntypes)
        return _by_step(HostBatches(loader, ntypes, self._device), loader)


class DeviceStepper(Stepper):
    """Waits for nothing in a step, and captures it if it may.

    With `keep_metrics` the next step does not overwrite the metrics that are returned.
    `device_parts` are shared with the steppers of other branches.
    """

    def __init__(
        self,
        step: TrainingStep,
        scalars: Scalars,
        device: torch.device,
        *,
        capture: bool,
        keep_metrics: bool = False,
        device_parts: DeviceParts | None = None,
    ) -> None:
        assert isinstance(step.guard, DeviceGuard)
        device_parts = device_parts or DeviceParts(step.guard)
        if capture and device_parts.memory is None:
            device_parts.memory = GraphMemory()
        if device_parts.rates is None:
            # torch's fused Adam reads its rate in float32 only.
            dtype = torch.float64 if isinstance(step.optimizer, HybridMuon) else torch.float32
            device_parts.rates = RateTable(scalars, dtype, device)
        self._guard = step.guard
        self._strategy = step.strategy
        self._step = step
        self._captured = CapturedStep(step, device_parts.rates, device_parts.memory)
        self._device = device
        self._keep_metrics = keep_metrics

    def __call__(self, feed: StepFeed, done: int) -> dict[str, Tensor]:
        """Update the parameters once; see `Stepper`."""
        self._guard.expect(done)
        metrics = self._captured(feed, done)
        self._strategy.launched()
        if self._keep_metrics:
            return {name: value.clone() for name, value in metrics.items()}
        return metrics

    def check(self, done: int) -> None:
        """Wait for the device and report steps that were not finite."""
        with self._strategy.ranks.waiting():
            self._guard.check(done)

    def close(self) -> None:
        """Drop what has been captured."""
        self._captured.close()

    def open_batches(self, loader: DataLoader, ntypes: int) -> StepSource:
        """Return batches gathered on the device, or made on the host if it cannot."""
        self._step.loaders.append(loader)
        return _batches_on(self._device, loader, ntypes)


class RateTable:
    """The learning rates and their fractions of `start_lr` on the device, step by step.

    A step reads `lr`, of the dtype that the optimizer demands, and `lr_fraction`, float64: `read`
    writes them.
    """

    def __init__(self, scalars: Scalars, dtype: torch.dtype, device: torch.device) -> None:
        self._scalars = scalars
        self._table = torch.zeros(_RATES, 2, dtype=torch.float64, device=device)
        self._row = torch.zeros(1, dtype=torch.int64, device=device)  # that `read` takes next
        self._next_step = -1  # in that row
        self._end = -1  # first step beyond the table
        self.lr = torch.zeros((), dtype=dtype, device=device)
        self.lr_fraction = torch.zeros((), dtype=torch.float64, device=device)

    def expect(self, step: int) -> None:
        """Make sure that the next `read` gives the scalars of this step; on the host."""
        if step != self._next_step or step >= self._end:
            values = [self._scalars(number) for number in range(step, step + _RATES)]
            self._table.copy_(torch.tensor(values, dtype=torch.float64))
            self._row.zero_()
            self._end = step + _RATES
        self._next_step = step + 1

    def read(self) -> None:
        """Write the scalars of the step; on the device, part of the step."""
        row = self._table.index_select(0, self._row)  # (1, 2)
        self.lr.copy_(row[0, 0])
        self.lr_fraction.copy_(row[0, 1])
        self._row.add_(1)


class CapturedStep:
    """A training step that waits for nothing; captured if it has `memory` for graphs.

    Attributes
    ----------
    recorded
        Number of graphs that have been recorded.
    eager_reason
        Why a capture has failed, after which no other is tried; None if none has.
    """

    def __init__(self, step: TrainingStep, rates: RateTable, memory: GraphMemory | None) -> None:
        assert isinstance(step.guard, DeviceGuard)
        self._step = step
        self._guard = step.guard
        self._rates = rates
        self._memory = memory
        self._seen_layouts: set[Hashable] = set()
        self._graphs: dict[Hashable | None, torch.cuda.CUDAGraph] = {}  # by layout
        self._last_replay: dict[Hashable | None, int] = {}  # value of `_steps`, by layout
        self._steps = 0
        self._logged_full = False
        # All graphs write the metrics to one tensor; `_metrics` has views of its elements.
        self._metric_values: Tensor | None = None
        self._metrics: dict[str, Tensor] = {}
        model = step.model or step.strategy.model
        assert isinstance(model, EnergyModel)
        self._model = model
        self._pieces = model.pieces  # with which graphs were recorded
        self.recorded = 0
        self.eager_reason: str | None = None
        self._kernels_compiled = False
        if memory is not None:
            for group in step.optimizer.param_groups:
                group["capturable"] = True  # torch's optimizers then count steps on the device
            # The first steps run eagerly on purpose; torch's Adam would warn of it.
            step.optimizer._warned_capturable_if_run_uncaptured = True

    def __call__(self, feed: StepFeed, done: int) -> dict[str, Tensor]:
        """Update the parameters after `done` updates; the next step overwrites the metrics."""
        self._rates.expect(done)
        self._guard.note(feed.origin, self._step.evaluate_frames)
        # Other pieces of the interpolated embedding nets launch other kernels. The graphs are idle:
        # `wanted_pieces` has waited for the device, and none of them was replayed since.
        if self._pieces != self._model.pieces:
            self._pieces = self._model.pieces
            self._graphs.clear()
            self._seen_layouts.clear()
        self._steps += 1
        graph = self._graphs.get(feed.layout)
        if graph is None and self._is_time_to_capture(feed.layout):
            graph = self._capture(feed)
        if graph is not None:
            self._last_replay[feed.layout] = self._steps
            graph.replay()
        elif self._memory is not None:
            self._memory.run_aside(lambda: self._run(feed))
        else:
            self._run(feed)
        return self._metrics

    def close(self) -> None:
        """Drop the graphs, which must end before the communicator of their exchanges does."""
        if self._graphs:
            torch.cuda.synchronize()
            self._graphs.clear()

    def _run(self, feed: StepFeed) -> None:
        """Run the part of a step that a graph contains, all work on the device."""
        self._rates.read()
        batch = feed.read()
        if not self._kernels_compiled:
            self._kernels_compiled = True
            self._step.compile_kernels(batch, self._rates.lr_fraction)
        metrics = self._step(batch, self._rates.lr, self._rates.lr_fraction, feed.layout)
        values = torch.stack([value.double() for value in metrics.values()])
        if self._metric_values is None:
            self._metric_values = torch.empty_like(values)
            self._metrics = dict(zip(metrics, self._metric_values.unbind(), strict=True))
        self._metric_values.copy_(values)

    def _is_time_to_capture(self, layout: Hashable | None) -> bool:
        """Return whether to capture this step: from the second batch of its layout on.

        Notes the layout, and drops an unused graph if there are too many.
        """
        if self._memory is None or self.eager_reason is not None or layout is None:
            return False
        if len(self._graphs) == MOST_GRAPHS and not self._make_room():
            if not self._logged_full:
                self._logged_full = True
                log.info(
                    "batches have more than %d layouts: further ones are stepped without a graph",
                    MOST_GRAPHS,
                )
            return False
        is_new = layout not in self._seen_layouts
        self._seen_layouts.add(layout)
        return not is_new

    def _make_room(self) -> bool:
        """Drop the graph not replayed for longest, if it is unused; return whether it is."""
        oldest = min(self._graphs, key=lambda layout: self._last_replay[layout])
        if self._steps - self._last_replay[oldest] < _UNUSED:
            return False
        torch.cuda.synchronize()
        del self._graphs[oldest]
        self._seen_layouts.discard(oldest)
        return True

    def _capture(self, feed: StepFeed) -> torch.cuda.CUDAGraph | None:
        """Record a step in a graph without running it; None, with one log line, if that fails."""
        assert self._memory is not None
        try:
            graph = self._memory.recorded(lambda: self._run(feed))
        # No exception of a driver, compiler or module may end a training run.
        except Exception as error:
            self.eager_reason = f"{type(error).__name__}: {error}".splitlines()[0]
            log.warning(
                "training steps are launched one kernel at a time, "
                "because they cannot be captured: %s",
                self.eager_reason,
            )
            return None
        self._graphs[feed.layout] = graph
        self.recorded += 1
        return graph


def _by_step(source: BatchSource, loader: DataLoader) -> StepSource:
    """Return a source of the inputs of steps, which may take several batches each."""
    if loader.batches_per_step == 1:
        return source
    return AccumulatedBatches(source, loader.batches_per_step)


def _batches_on(device: torch.device, loader: DataLoader, ntypes: int) -> StepSource:
    """Return batches gathered on the device, or made on the host if it cannot."""
    reason = why_not_on_device(loader.systems)
    if reason is not None:
        log.info("batches are made on the host and copied to the device: %s", reason)
        return _by_step(StreamedBatches(loader, ntypes, device), loader)
    budget = _RESIDENT_BYTES_ON_CPU
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        budget = int(free * _RESIDENT_SHARE)
    return _by_step(ResidentBatches(loader, device, budget), loader)
