"""The training run: wires data, model, loss, optimizer, reports and checkpoints, and goes through the steps."""

from __future__ import annotations

import contextlib
import errno
import logging
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch

from deepmd_muon.argcheck import Input
from deepmd_muon.argcheck.training import MultiTaskTrainingSettings
from deepmd_muon.checkpoint_file.errors import CheckpointError
from deepmd_muon.checkpoint_file.file import OWN_KEY
from deepmd_muon.data import DataLoader
from deepmd_muon.files import WriteError, is_special, replacement, whole_file
from deepmd_muon.model import EnergyModel
from deepmd_muon.model.branches import Branches
from deepmd_muon.optim import HybridMuon
from deepmd_muon.train.batches.streamed import StepSource
from deepmd_muon.train.branches import (
    RunBranch,
    StratifiedOrder,
    build_of,
    length_and_probabilities,
    require_labels,
    task_order,
)
from deepmd_muon.train.checkpoint.content import RunState
from deepmd_muon.train.checkpoint.newest import newest_finite
from deepmd_muon.train.checkpoint.optimizer_state import check_state
from deepmd_muon.train.checkpoint.saving import Checkpoints
from deepmd_muon.train.ema import Ema
from deepmd_muon.train.errors import NonFiniteError
from deepmd_muon.train.learning_rate import learning_rate
from deepmd_muon.train.process.abort import Moment, explained, last_good
from deepmd_muon.train.process.signals import StopSignals
from deepmd_muon.train.process.warm_up import compile_kernels
from deepmd_muon.train.ranks.ranks import Ranks, local_part
from deepmd_muon.train.ranks.watchdog import STEPPING, is_lost_connection
from deepmd_muon.train.report import Reports, open_reports
from deepmd_muon.train.report.divergence import Divergence
from deepmd_muon.train.report.metrics import RecentMetrics
from deepmd_muon.train.report.throughput import Throughput
from deepmd_muon.train.step.interpolation_schedule import Tuning
from deepmd_muon.train.step.stepper import DeviceParts, build_stepper
from deepmd_muon.train.strategy import choose_strategy
from deepmd_muon.train.strategy.base import build_optimizer
from deepmd_muon.train.validation.final_errors import check_command
from deepmd_muon.train.validation.run_validation import Validation
from deepmd_muon.train.validation.validate import numbers

log = logging.getLogger(__name__)

T = TypeVar("T")


class Trainer:
    """A run from its first step to its last.

    Parameters
    ----------
    given
        The checked input, with numbers in `sel`.
    model
        The model, or those of all branches, with statistics set or weights loaded, on its device.
    seed
        Of the order in which branches are trained.
    ranks
        The processes that train together, each with its own batches; this one alone when left out.

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
        model: EnergyModel | Branches,
        branches: Mapping[str, RunBranch],
        seed: int,
        ranks: Ranks | None = None,
    ) -> None:
        settings, training = given.settings, given.settings.training
        self.given = given
        self.model = model
        self.branches = branches
        data = {name: branch.data for name, branch in branches.items()}
        self._device = next(model.parameters()).device
        self.ranks = ranks or Ranks(self._device)
        self.num_steps, shares = length_and_probabilities(given, data)
        self._drawn = {name for name, share in shares.items() if share > 0}
        require_labels(branches)
        self._order = task_order(given, shares, seed, self.ranks)
        self.rate = learning_rate(settings.learning_rate, self.num_steps)
        with self.ranks.barrier("laying out the model"):
            self.strategy = choose_strategy(training, self.ranks, model)
            self.optimizer = self.strategy.build_optimizer(settings.optimizer, self.rate(0))
            if isinstance(self.optimizer, HybridMuon):
                self.optimizer.alternates = len(branches) > 1
            first = round(self.num_steps * (1.0 - training.ema_tail)) if training.ema_tail else None
            self.ema = Ema(model, training.ema_decay, first) if training.enable_ema else None
        self.checkpoints = Checkpoints(training, self.ranks)
        self.validation = Validation(given, branches, self.num_steps, self.strategy, self._now)
        self.step = self._first_step = 0
        self.source: Path | None = None
        self._moment = Moment("starting")
        self._throughput = Throughput(self.ranks)
        self._divergence = Divergence()
        device_parts = DeviceParts()
        self._steppers = {
            name: build_stepper(
                strategy=self.strategy,
                loss=branch.loss,
                optimizer=self.optimizer,
                ema=self.ema,
                training=training,
                scalars=self._rate_and_fraction,
                model=branch.model,
                parts=device_parts,
            )
            for name, branch in branches.items()
        }
        # In TF32, a thread could change the precision of the first step's products.
        if (
            isinstance(self.optimizer, HybridMuon)
            and self._device.type == "cuda"
            and not training.enable_tf32
        ):
            compile_kernels(self.optimizer)
        recomputed = [
            branch.model.recompute_layers() for branch in branches.values() if training.recompute
        ]
        if training.recompute and not any(recomputed):
            log.warning(
                "training/recompute has no effect: the descriptor has no layers to compute again"
            )
        self._tuning: list[Tuning] = []
        if training.interpolate_embedding and not self.strategy.cuts_parameters:
            tuned: dict[object, list[tuple[EnergyModel, DataLoader]]] = {}
            for branch in branches.values():
                if branch.model.can_interpolate:
                    users = tuned.setdefault(branch.model.atomic_model.descriptor, [])
                    users.append((branch.model, branch.data.training))
            self._tuning = [Tuning(users, self._device) for users in tuned.values()]
        self._state = RunState(given, model, self.optimizer, branches, self._order, self.ema)

    def run(self, begun: float | None = None) -> int:
        """Train until the last step; `begun` is `time.monotonic()` when the command began, for the log.

        Return 0, or 128 plus the number of the signal that ended the run early (after a checkpoint was saved).

        Raises
        ------
        RunError
            When it cannot go on: loss or gradient is not finite, a disk is full, memory is short, data are unreadable.
            The message names the last good checkpoint.
        """
        self._first_step = self.step
        with self.ranks.barrier("starting"):
            log.info("training from step %d to step %d", self.step, self.num_steps)
        # With several ranks, their launcher repeats signals that they have received from the terminal.
        repeats = 0 if self.ranks.size == 1 else 1
        with (
            explained(lambda: self._moment, lambda: self.checkpoints.newest or self.source),
            StopSignals(
                self.strategy.request_stop, lambda: self.checkpoints.writing, repeats
            ) as signals,
        ):
            try:
                self._go_through_steps(begun)
                if self.strategy.stop_signal is None:
                    self.validation.compare_at_end(self.step)
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
            log.warning(
                "stopped by %s after step %d; continue with --restart %s", name, self.step, newest
            )
            return 128 + number
        weights = map(local_part, self.model.parameters())
        if self.ranks.first and (problem := self._divergence.describe(weights)):
            log.warning("training diverged: %s", problem)
            log.warning(
                "do not use the model %s: train again with a lower learning_rate/start_lr or optimizer/weight_decay",
                newest,
            )
            return 0
        log.info("training done; the model is %s", newest)
        checkpoint = Path(f"{self.given.settings.training.save_ckpt}.pt")
        if len(self.branches) == 1 and (command := check_command(self.given.source, checkpoint)):
            log.info("check that dynamics with it are stable: %s", command)
        return 0

    def _go_through_steps(self, begun: float | None) -> None:
        """Open reports and batches, take all steps, save, and close: an error of closing loses no step."""
        training = self.given.settings.training
        with contextlib.ExitStack() as stack:
            for name, stepper in self._steppers.items():
                stack.callback(stepper.close)
                for loader in (
                    self.branches[name].data.validation,
                    self.branches[name].data.training,
                ):
                    if loader is not None:
                        stack.callback(loader.close)
            self._now("opening its reports")
            steps = {"num_steps": self.num_steps, "start_step": self.step}
            silent, atoms = not self.ranks.first, lambda: self._throughput.atoms
            reports = open_reports(training, **steps, begun=begun, silent=silent, atoms=atoms)
            stack.callback(reports.close)
            self.validation.begin(self.step, fresh=self.source is None)
            stack.callback(self.validation.close)
            batches = {}
            self._order.deal({name: branch.data.training for name, branch in self.branches.items()})
            for name, branch in self.branches.items():
                batches[name] = self._steppers[name].open_batches(
                    branch.data.training, branch.model.ntypes
                )
                stack.callback(batches[name].close)
            profiling = training.profiling and self.ranks.first
            with torch.profiler.profile() if profiling else contextlib.nullcontext() as profile:
                self._steps(reports, batches)
                self._check()
            if training.disp_training and training.time_training:
                with self.ranks.waiting():
                    told = self._throughput.describe()
                if told is not None:
                    log.info("%s", told)
            self._now("saving", self.step)
            self.checkpoints.complete(self.step, self._content)
            self._export()
            if profile is not None:
                _write_trace(profile, Path(training.profiling_file))

    def _export(self) -> None:
        """Write the branch of `export_branch` as a checkpoint of one model."""
        training = self.given.settings.training
        path = training.exported_path
        if path is None or not self.ranks.first:
            return
        assert isinstance(training, MultiTaskTrainingSettings)
        assert training.export_branch is not None
        content = self._state.alone(
            training.export_branch, self.step, self.rate(max(0, self.step - 1))
        )
        with self.checkpoints.being_written(), whole_file(path) as file:
            torch.save(content, file)
        log.info("the model of the branch %s alone is %s", training.export_branch, path)

    def _rescue(self, error: Exception) -> None:
        """Save work that an error would lose: a directory under way, and the last step if the error came after it."""
        self.checkpoints.rescue(wait=not is_lost_connection(error))
        if not self._moment.between_steps or self.ranks.size > 1 or self.step == self._first_step:
            return
        try:
            self._check()
            if self.validation.due(
                self.step
            ):  # reports come before it; a restart would not make up for it
                self._validate_fully()
            self.checkpoints.complete(self.step, self._content)
        except Exception as another:
            log.warning("step %d could not be saved either: %s", self.step, another)

    def _now(
        self, doing: str, step: int = 0, *, reads_data: bool = False, between_steps: bool = False
    ) -> None:
        """Note the run's activity, for its other ranks and for the error that may end it."""
        self._moment = Moment(doing, step, reads_data, between_steps)
        self.ranks.doing(doing, step)

    def _check(self) -> None:
        """Raise errors of earlier steps that are still pending."""
        for stepper in self._steppers.values():
            stepper.check(self.step)

    def _steps(self, reports: Reports, batches: Mapping[str, StepSource]) -> None:
        """Go through the steps, reporting and saving on the way."""
        training = self.given.settings.training
        recent = RecentMetrics(
            self.branches,
            averaged=training.disp_avg,
            stratified=isinstance(self._order, StratifiedOrder),
        )
        dropped = False
        while (
            self.step < self.num_steps
            and self.strategy.stop_signal is None
            and not self._stops_early()
        ):
            lr, fraction = self._rate_and_fraction(self.step)
            name = self._order.next(self.validation.stopped)
            self._now("reading its batch", self.step + 1, reads_data=True, between_steps=True)
            with self._throughput.reading():
                batch = batches[name].next()
            for tuning in self._tuning:
                tuning(self.step)
            self._now(STEPPING, self.step + 1)
            metrics = self._steppers[name](batch, self.step)
            self.step += 1
            self._throughput.take(batch)
            due = reports.due(self.step)
            recent.add(name, metrics, batch, due=due)
            if due:
                self._check()
                averaged = recent.take(self.ranks)
                shown = (
                    self.validation.measure(fraction) if reports.due_validation(self.step) else None
                )
                with self.ranks.waiting():  # on a GPU, reading them waits for the sum over ranks
                    self._throughput.share()
                    found = numbers(averaged)
                self._now("reporting", self.step, between_steps=True)
                reports.step(self.step, lr, found, shown)
                self._divergence.add(found)
            reports.advance(self.step)
            if self.checkpoints.writing:
                self._now("saving", self.step)
                self.checkpoints.poll()
            if not dropped and self.branches[name].data.training.cache.dropped:
                dropped = True
                log.warning(
                    "some atoms have more neighbours than sel allows: the farthest are left out"
                )
            if self.validation.due(self.step):
                self._validate_fully()
            if self.step % training.save_freq == 0:
                self.save()

    def _stops_early(self) -> bool:
        """Return, and log, whether every branch that is drawn has used up its patience without a new best."""
        if not self._drawn <= self.validation.stopped:
            return False
        log.info(
            "stopped early after step %d of %d: %d full validations brought no new best",
            *(self.step, self.num_steps, self.given.settings.validating.early_stop_patience),
        )
        return True

    def _rate_and_fraction(self, step: int) -> tuple[float, float]:
        """Return the learning rate of a 0-based step, and its fraction of the first one."""
        lr = self.rate(step)
        return lr, lr / self.given.settings.learning_rate.start_lr

    def _validate_fully(self) -> None:
        """Measure the present weights on all validation data, and save them if they are among the best."""
        self._check()
        errors = self.validation.errors(self.step)
        self._now("saving", self.step)
        with self.checkpoints.being_written():
            self.validation.take(self.step, errors, self._content)

    def save(self) -> None:
        """Write a checkpoint of the present step; all ranks must call it."""
        self._check()
        self._now("saving", self.step)
        self.checkpoints.save(self.step, self._content)

    def _content(self) -> dict[str, Any]:
        """Return the content of a checkpoint of the present step, in its present layout over the ranks."""
        return self._state.content(
            self.step, self.rate(max(0, self.step - 1)), self.validation.state()
        )

    def restart(self, content: Mapping[str, Any], source: Path) -> None:
        """Continue from a checkpoint: optimizer, averages, data order and random numbers; the weights are loaded.

        Of a directory, tensors of optimizer and average may have been left there.

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
        with self.ranks.barrier("checking the optimizer's state"):
            check_state(self.optimizer, self.ema.averages() if self.ema else {}, source)
        infos = content["model"]["_extra_state"]["train_infos"]
        self.validation.restore(infos)
        if self.step:
            saved, present = float(infos["lr"]), self.rate(self.step - 1)
            if abs(present - saved) > 1e-6 * max(abs(saved), abs(present)):
                was = "the learning rate was %.3g when %s was written and goes on from %.3g"
                log.warning(was, saved, source, present)
        if self.step > self.num_steps:
            raise CheckpointError(
                f"{source} is at step {self.step}, beyond the last step {self.num_steps} of this input: "
                "raise training/numb_steps, or start from its weights with --init-model"
            )
        if OWN_KEY in content:
            self.checkpoints.adopt(content[OWN_KEY], source)
            for tuning in self._tuning:
                tuning.looked = "pieces" in content[OWN_KEY]
        log.info("restarting from %s at step %d", source, self.step)

    def _build_whole(self) -> tuple[EnergyModel | Branches, torch.optim.Optimizer]:
        """Make model and optimizer as a single process has them."""
        model = build_of(self.given)
        return model, build_optimizer(self.given.settings.optimizer, model, self.rate(0))


def _write_trace(profile: torch.profiler.profile, path: Path) -> None:
    """Write a trace for chrome://tracing; torch reports no error of its writer."""
    if is_special(path):
        profile.export_chrome_trace(str(path))
        return
    with replacement(path) as temporary:
        profile.export_chrome_trace(str(temporary))
        temporary.with_name(f"{temporary.name}.tmp").unlink(
            missing_ok=True
        )  # torch's, when it could not write all
        if not temporary.read_bytes().rstrip().endswith((b"}", b"]")):
            raise WriteError(errno.EIO, "torch has written a part of the trace only", str(path))
