"""The training run: wires data, model, loss, optimizer, reports and checkpoints, and goes through the steps."""

from __future__ import annotations

import contextlib
import errno
import itertools
import logging
import signal
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from deepmd_muon.argcheck import Input
from deepmd_muon.argcheck.changes import report_rate
from deepmd_muon.checkpoint_file.errors import CheckpointError
from deepmd_muon.checkpoint_file.file import OWN_KEY
from deepmd_muon.data import Batch
from deepmd_muon.files import WriteError, is_special, replacement
from deepmd_muon.loss import build_loss, check_labels
from deepmd_muon.model import EnergyModel, build_model
from deepmd_muon.model.deepmd_kit import UNKNOWN_DISTANCE
from deepmd_muon.optim import HybridMuon
from deepmd_muon.train.batches.batch import TrainingBatch, to_device
from deepmd_muon.train.batches.streamed import BatchSource
from deepmd_muon.train.checkpoint.content import RunState
from deepmd_muon.train.checkpoint.newest import newest_finite
from deepmd_muon.train.checkpoint.saving import Checkpoints
from deepmd_muon.train.ema import Ema
from deepmd_muon.train.errors import NonFiniteError, TrainingError
from deepmd_muon.train.learning_rate import learning_rate
from deepmd_muon.train.optimizers import build_optimizer
from deepmd_muon.train.process.abort import Moment, explained, last_good
from deepmd_muon.train.process.signals import StopSignals
from deepmd_muon.train.process.warm_up import compile_kernels
from deepmd_muon.train.ranks.ranks import Ranks
from deepmd_muon.train.ranks.watchdog import STEPPING, is_lost_connection
from deepmd_muon.train.report import Reports, open_reports
from deepmd_muon.train.setup import Data, number_of_steps
from deepmd_muon.train.step.interpolation_schedule import Tuning
from deepmd_muon.train.step.stepper import build_stepper
from deepmd_muon.train.strategy import choose_strategy
from deepmd_muon.train.validation.final_errors import check_command, error_table, frames_to_compare, parity_command
from deepmd_muon.train.validation.full_validation import FullValidation, error_sums, full_errors
from deepmd_muon.train.validation.validate import mean_metrics, metric_weights, validate

log = logging.getLogger(__name__)

T = TypeVar("T")


class Trainer:
    """A run from its first step to its last.

    Parameters
    ----------
    given
        The checked input, with numbers in `sel`.
    model
        The model, with statistics set or weights loaded, on its device.
    data
        Training and validation batches.
    min_nbor_dist
        Shortest distance in the training data [Å], which deepmd-kit keeps in its checkpoints.
    ranks
        The processes that train together, each with its own `data`; this one alone when left out.

    Attributes
    ----------
    step
        Updates done so far.
    source
        The checkpoint that the run continues; None in a fresh run.
    """

    def __init__(
        self,
        given: Input,
        model: EnergyModel,
        data: Data,
        min_nbor_dist: float = UNKNOWN_DISTANCE,
        ranks: Ranks | None = None,
    ) -> None:
        settings, training = given.settings, given.settings.training
        self.given = given
        self.model = model
        self.data = data
        self.num_steps = number_of_steps(training, data.training)
        self.rate = learning_rate(settings.learning_rate, self.num_steps)
        self.loss = build_loss(settings.loss)
        self._check_labels()
        self._device = next(model.parameters()).device
        self.ranks = ranks or Ranks(self._device)
        with self.ranks.together("laying out the model"):
            self.strategy = choose_strategy(training, self.ranks, model)
            self.optimizer = self.strategy.build_optimizer(settings.optimizer, self.rate(0))
            self.ema = Ema(model, training.ema_decay) if training.enable_ema else None
        self.checkpoints = Checkpoints(training, self.ranks)
        self.full_validation = FullValidation(settings.validating, training.save_ckpt, self.num_steps, self.ranks)
        self.step = self._first_step = 0
        self.source: Path | None = None
        self._moment = Moment("starting")
        parts = self.strategy, self.loss, self.optimizer, self.ema
        self._stepper = build_stepper(*parts, training, self._rate_and_fraction)
        # In TF32, a thread could change the precision of the first step's products.
        if isinstance(self.optimizer, HybridMuon) and self._device.type == "cuda" and not training.enable_tf32:
            compile_kernels(self.optimizer)
        if training.recompute and not model.recompute_layers():
            log.warning("training/recompute has no effect: the descriptor has no layers to compute again")
        self._tuning: Tuning | None = None
        if training.interpolate_embedding and model.can_interpolate and not self.strategy.cuts_parameters:
            self._tuning = Tuning(model, data.training, self._device)
        self._state = RunState(given, model, self.optimizer, data, self.ema, min_nbor_dist)

    def _check_labels(self) -> None:
        """Warn of terms of the loss that no system has labels for; refuse systems that have none for any."""
        found = check_labels(self.loss, self.data.training_systems)
        for warning in found.warnings:
            log.warning("%s", warning)
        if found.errors:
            raise TrainingError("; ".join(found.errors))

    def run(self, begun: float | None = None) -> int:
        """Train until the last step.

        Parameters
        ----------
        begun
            `time.monotonic()` when the command began, for the log; now by default.

        Returns
        -------
        int
            0, or 128 plus the number of the signal that ended the run early (after a checkpoint was saved).

        Raises
        ------
        RunError
            When it cannot go on: loss or gradient is not finite, a disk is full, memory is short, data are unreadable.
            The message names the last good checkpoint.
        """
        self._first_step = self.step
        with self.ranks.together("starting"):
            log.info("training from step %d to step %d", self.step, self.num_steps)
        # With several ranks, their launcher repeats signals that they have received from the terminal.
        repeats = 0 if self.ranks.size == 1 else 1
        with (
            explained(lambda: self._moment, lambda: self.checkpoints.newest or self.source),
            StopSignals(self.strategy.request_stop, lambda: self.checkpoints.writing, repeats) as signals,
        ):
            try:
                self._go_through_steps(begun)
                if self.strategy.stop_signal is None:
                    self._compare_at_end()
            except Exception as error:
                self._rescue(error)
                if not isinstance(error, NonFiniteError):
                    raise
                update, good = (
                    error.update or self.step + 1,
                    last_good(newest_finite(self.checkpoints.saved, self.source)),
                )
                message = f"training stopped before update {update}: {error}; {good}"
                raise NonFiniteError(message, update) from error
        newest = self.checkpoints.files.newest
        number = self.strategy.stop_signal or signals.number
        if number is not None:
            name = signal.Signals(number).name
            log.warning("stopped by %s after step %d; continue with --restart %s", name, self.step, newest)
            return 128 + number
        log.info("training done; the model is %s", newest)
        if command := check_command(self.given.source, Path(f"{self.given.settings.training.save_ckpt}.pt")):
            log.info("check that dynamics with it are stable: %s", command)
        return 0

    def _go_through_steps(self, begun: float | None) -> None:
        """Open reports and batches, take all steps, save, and close: an error of closing loses no step."""
        training = self.given.settings.training
        with contextlib.ExitStack() as stack:
            stack.callback(self._stepper.close)
            for loader in (self.data.validation, self.data.training):
                if loader is not None:
                    stack.callback(loader.close)
            self._now("opening its reports")
            steps = {"num_steps": self.num_steps, "start_step": self.step}
            reports = open_reports(training, **steps, begun=begun, silent=not self.ranks.first)
            stack.callback(reports.close)
            self.full_validation.begin(self.step, fresh=self.source is None)
            stack.callback(self.full_validation.close)
            batches = self._stepper.open_batches(self.data.training, self.model.ntypes, self.num_steps - self.step)
            stack.callback(batches.close)
            profiling = training.profiling and self.ranks.first
            with torch.profiler.profile() if profiling else contextlib.nullcontext() as profile:
                self._steps(reports, batches)
                self._stepper.check(self.step)
            self._now("saving", self.step)
            self.checkpoints.complete(self.step, self._content)
            if profile is not None:
                _write_trace(profile, Path(training.profiling_file))

    def _rescue(self, error: Exception) -> None:
        """Save work that an error would lose: a directory under way, and the last step if the error came after it."""
        self.checkpoints.rescue(wait=not is_lost_connection(error))
        if not self._moment.between_steps or self.ranks.size > 1 or self.step == self._first_step:
            return
        try:
            self._stepper.check(self.step)
            if self.full_validation.due(self.step):  # reports come before it; a restart would not make up for it
                self._validate_fully()
            self.checkpoints.complete(self.step, self._content)
        except Exception as another:
            log.warning("step %d could not be saved either: %s", self.step, another)

    def _now(self, doing: str, step: int = 0, *, reads_data: bool = False, between_steps: bool = False) -> None:
        """Note the run's activity, for its other ranks and for the error that may end it."""
        self._moment = Moment(doing, step, reads_data, between_steps)
        self.ranks.doing(doing, step)

    def _steps(self, reports: Reports, batches: BatchSource) -> None:
        """Go through the steps, reporting and saving on the way."""
        training = self.given.settings.training
        recent: list[tuple[Mapping[str, Tensor], Mapping[str, float]]] = []
        dropped = False
        while self.step < self.num_steps and self.strategy.stop_signal is None:
            lr, fraction = self._rate_and_fraction(self.step)
            self._now("reading its batch", self.step + 1, reads_data=True, between_steps=True)
            batch = batches.next()
            if self._tuning is not None:
                self._tuning(self.step)
            self._now(STEPPING, self.step + 1)
            metrics = self._stepper(batch, self.step)
            self.step += 1
            due = reports.due(self.step)
            if training.disp_avg or due:
                recent.append((metrics, metric_weights(self.loss, batch)))
            if due:
                self._stepper.check(self.step)
                several = len(recent) > 1 or self.ranks.size > 1
                averaged = mean_metrics(recent, self.ranks.sum) if several else metrics
                recent.clear()
                shown = self._validate(fraction) if reports.due_validation(self.step) else None
                with self.ranks.waiting():  # on a GPU, reading them waits for the sum over ranks
                    found = _numbers(averaged)
                self._now("reporting", self.step, between_steps=True)
                reports.step(self.step, lr, found, shown)
            reports.advance(self.step)
            if self.checkpoints.writing:
                self._now("saving", self.step)
                self.checkpoints.poll()
            if not dropped and self.data.training.cache.dropped:
                dropped = True
                log.warning("some atoms have more neighbours than sel allows: the farthest are left out")
            if self.full_validation.due(self.step):
                self._validate_fully()
            if self.step % training.save_freq == 0:
                self.save()

    def _rate_and_fraction(self, step: int) -> tuple[float, float]:
        """Return the learning rate of a 0-based step, and its fraction of the first one."""
        lr = self.rate(step)
        return lr, lr / self.given.settings.learning_rate.start_lr

    def _validate(self, lr_fraction: float) -> dict[str, float] | None:
        """Return the metrics of the present weights on the next validation batches."""
        section = self.given.settings.training.validation_data
        loader = self.data.validation
        if section is None or loader is None:
            return None
        dealt = loader.deal_all() if section.numb_btch == "all" else loader.deal(int(section.numb_btch))
        batches = ((self._to_device(batch), counts) for batch, counts in self._announced(dealt))
        metrics = validate(self.model, self.loss, batches, lr_fraction, self.ranks.sum)
        with self.ranks.waiting():
            found = _numbers(metrics)
        self.strategy.reshard()
        return found

    def _validate_fully(self) -> None:
        """Measure the present weights on all validation data, and save them if they are among the best."""
        assert self.data.validation is not None  # a rule of the input
        self._stepper.check(self.step)
        dealt = self._announced(self.data.validation.deal_all())
        batches = ((self._to_device(batch), counts) for batch, counts in dealt)
        errors = full_errors(self.model, batches, self.ranks.sum)
        self.strategy.reshard()
        self._now("saving", self.step)
        with self.checkpoints.being_written():
            self.full_validation.take(self.step, errors, self._content)

    def _compare_at_end(self) -> None:
        """Log the errors of the last weights on the validation data; a signal ends it without its table."""
        loader = self.data.validation
        if loader is None:
            return
        frames = [system.nframes for system in loader.systems]
        compared = frames_to_compare(frames, self.num_steps)
        dealt = self._announced(loader.deal_sample(compared))
        batches = ((self._to_device(batch), counts, system) for batch, counts, system in dealt)
        # Ranks agree on signals in their steps: one that comes now is seen at once by a single process alone.
        going_on = itertools.takewhile(lambda _: self.strategy.stop_signal is None, batches)
        sums = error_sums(self.model, going_on, len(frames), self.ranks.sum)
        self.strategy.reshard()
        if self.strategy.stop_signal is not None:
            return
        for line in error_table([system.name for system in loader.systems], frames, compared, sums):
            log.info("%s", line)
        if command := parity_command(self.given.source, Path(f"{self.given.settings.training.save_ckpt}.pt")):
            log.info("draw predictions against labels with: %s", command)

    def _to_device(self, batch: Batch) -> TrainingBatch:
        return to_device(batch, self.model.ntypes, self._device)

    def _announced(self, batches: Iterable[T]) -> Iterator[T]:
        """Tell the other ranks of every validation batch, because all of them may take longer than the ranks wait."""
        for batch in batches:
            self._now("validating", self.step)
            yield batch

    def save(self) -> None:
        """Write a checkpoint of the present step; all ranks must call it."""
        self._stepper.check(self.step)
        self._now("saving", self.step)
        self.checkpoints.save(self.step, self._content)

    def _content(self) -> dict[str, Any]:
        """Return the content of a checkpoint of the present step, in its present layout over the ranks."""
        return self._state.content(self.step, self.rate(max(0, self.step - 1)), self.full_validation.state())

    def restart(self, content: Mapping[str, Any], source: Path) -> None:
        """Continue from a checkpoint: optimizer, averages, data order and random numbers; the weights are loaded.

        Parameters
        ----------
        content
            What `read` returned; of a directory, tensors of optimizer and average may have been left.
        source
            The file, for messages.

        Raises
        ------
        CheckpointError
            When the optimizer state is missing or of another kind of optimizer.
        RoutingMismatchError
            When a parameter's route or matrix view has changed.
        """
        self.strategy.load_optimizer_state(self.optimizer, content, source, self._build_whole)
        self.source = source
        self.step = self._state.restore(content, source)
        infos = content["model"]["_extra_state"]["train_infos"]
        self.full_validation.best.restore(infos)
        if self.step:
            rate = float(infos["lr"])
            report_rate(rate, self.rate(self.step - 1), source)
        if self.step > self.num_steps:
            raise CheckpointError(
                f"{source} is at step {self.step}, beyond the last step {self.num_steps} of this input: "
                "raise training/numb_steps, or start from its weights with --init-model"
            )
        if OWN_KEY in content:
            self.checkpoints.adopt(content[OWN_KEY], source)
            if self._tuning is not None:
                self._tuning.looked = "pieces" in content[OWN_KEY]
        log.info("restarting from %s at step %d", source, self.step)

    def _build_whole(self) -> tuple[EnergyModel, torch.optim.Optimizer]:
        """Make model and optimizer as a single process has them."""
        model = build_model(self.given.settings.model)
        return model, build_optimizer(self.given.settings.optimizer, model, self.rate(0))


def _numbers(metrics: Mapping[str, Tensor]) -> dict[str, float]:
    """Read all metrics from the device in one transfer."""
    values = torch.stack([value.double() for value in metrics.values()]).tolist()
    return dict(zip(metrics, values, strict=True))


def _write_trace(profile: torch.profiler.profile, path: Path) -> None:
    """Write a trace for chrome://tracing; torch reports no error of its writer."""
    if is_special(path):
        profile.export_chrome_trace(str(path))
        return
    with replacement(path) as temporary:
        profile.export_chrome_trace(str(temporary))
        temporary.with_name(f"{temporary.name}.tmp").unlink(missing_ok=True)  # torch's, when it could not write all
        if not temporary.read_bytes().rstrip().endswith((b"}", b"]")):
            raise WriteError(errno.EIO, "torch has written a part of the trace only", str(path))
