"""The training run: strategy, optimizer, reports, checkpoints, and the loop over the steps.

A `Trainer` is made, continues from a checkpoint by `restart` if the run has one, and trains by
`run`. Its *moment* is the run's present activity, which errors name and other ranks see.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from deepmd_muon.argcheck import Input
from deepmd_muon.argcheck.training import MultiTaskTrainingSettings
from deepmd_muon.checkpoint_file.file import OWN_KEY
from deepmd_muon.data import DataLoader
from deepmd_muon.files import WriteError, replacement, whole_file
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
from deepmd_muon.train.checkpoint.content import RunState, check_remaining_steps
from deepmd_muon.train.checkpoint.optimizer_state import check_state
from deepmd_muon.train.checkpoint.ownership import newest_finite
from deepmd_muon.train.checkpoint.saving import Checkpoints
from deepmd_muon.train.ema import Ema
from deepmd_muon.train.errors import NonFiniteError
from deepmd_muon.train.learning_rate import learning_rate
from deepmd_muon.train.process.abort import Moment, explained, last_good
from deepmd_muon.train.process.signals import StopSignals
from deepmd_muon.train.process.warm_up import compile_kernels
from deepmd_muon.train.ranks.ranks import Ranks, local_part
from deepmd_muon.train.ranks.watchdog import SAVING, STEPPING
from deepmd_muon.train.report import Reports, open_reports
from deepmd_muon.train.report.divergence import Divergence
from deepmd_muon.train.report.metrics import RecentMetrics
from deepmd_muon.train.report.throughput import Throughput
from deepmd_muon.train.step.interpolation_schedule import Tuning
from deepmd_muon.train.step.stepper import DeviceParts, Stepper, build_stepper
from deepmd_muon.train.strategy import choose_strategy
from deepmd_muon.train.strategy.base import build_optimizer
from deepmd_muon.train.validation.final_errors import check_command
from deepmd_muon.train.validation.run_validation import Validation
from deepmd_muon.train.validation.validate import numbers

log = logging.getLogger(__name__)


class Trainer:
    """A run from its first step to its last.

    Parameters
    ----------
    run_input
        The checked input, with numbers in `sel`.
    model
        The model, or those of all branches, with statistics set or weights loaded, on its device.
    branches
        The branches by name.
    seed
        Seed of the order in which branches are trained.
    ranks
        The processes that train together, each with its own batches; by default this one alone.

    Attributes
    ----------
    run_input, model, branches, ranks
        The parameters.
    step
        Updates done so far.
    num_steps
        Updates of the whole run.
    rate
        The learning rate as a function of the 0-based step.
    strategy, optimizer, ema, checkpoints, validation
        The parts of the run; `ema` is None without averages.
    restarted_from
        The checkpoint of --restart; None in a run that begins at step 0, as those of --init-model
        and --finetune do.
    """

    def __init__(
        self,
        run_input: Input,
        model: EnergyModel | Branches,
        branches: Mapping[str, RunBranch],
        seed: int,
        ranks: Ranks | None = None,
    ) -> None:
        self.run_input = run_input
        self.model = model
        self.branches = branches
        self._training = run_input.settings.training
        self._device = next(model.parameters()).device
        self.ranks = ranks or Ranks(self._device)
        self.step = 0
        self._first_step = 0
        self.restarted_from: Path | None = None
        self._moment = Moment("starting")
        self._throughput = Throughput(self.ranks)
        self._divergence = Divergence()

        data = {name: branch.data for name, branch in branches.items()}
        self.num_steps, probabilities = length_and_probabilities(run_input, data)
        self._trained_branches = {name for name, share in probabilities.items() if share > 0}
        require_labels(branches)
        self._order = task_order(run_input, probabilities, seed, self.ranks)
        self.rate = learning_rate(run_input.settings.learning_rate, self.num_steps)

        # Strategies make process groups, and the ranks arrive here at different times.
        with self.ranks.barrier("laying out the model"):
            self.strategy = choose_strategy(self._training, self.ranks, model)
            self.optimizer = self._build_optimizer()
            self.ema = self._build_ema()
        self.checkpoints = Checkpoints(self._training, self.ranks)
        self.validation = Validation(
            run_input, branches, self.num_steps, self.strategy, self._note_moment
        )
        # Before `_compile_kernels`, whose thread reads the groups: captured steppers add a key.
        self._steppers = self._build_steppers()
        self._compile_kernels()
        self._recompute_layers()
        self._interpolation_schedules = self._build_interpolation_schedules()
        self._run_state = RunState(
            run_input=run_input,
            model=model,
            optimizer=self.optimizer,
            branches=branches,
            order=self._order,
            ema=self.ema,
            ranks=self.ranks,
        )

    def _build_optimizer(self) -> torch.optim.Optimizer:
        optimizer = self.strategy.build_optimizer(self.run_input.settings.optimizer, self.rate(0))
        if isinstance(optimizer, HybridMuon):
            # A step of one branch leaves the other fitting nets without gradients.
            optimizer.alternates = len(self.branches) > 1
        return optimizer

    def _build_ema(self) -> Ema | None:
        training = self._training
        if not training.enable_ema:
            return None
        first_update = None
        if training.ema_tail:
            first_update = round(self.num_steps * (1.0 - training.ema_tail))
        return Ema(self.model, training.ema_decay, first_update)

    def _build_steppers(self) -> dict[str, Stepper]:
        """Return the stepper of each branch; they share memory of graphs and the guard."""
        device_parts = DeviceParts()
        return {
            name: build_stepper(
                strategy=self.strategy,
                loss=branch.loss,
                optimizer=self.optimizer,
                ema=self.ema,
                training=self._training,
                scalars=self._rate_and_fraction,
                model=branch.model,
                device_parts=device_parts,
            )
            for name, branch in self.branches.items()
        }

    def _compile_kernels(self) -> None:
        """Begin to compile the optimizer's kernels in a thread, while data are read."""
        # In TF32, a thread could change the precision of the first step's products.
        on_gpu = self._device.type == "cuda" and not self._training.enable_tf32
        if on_gpu and isinstance(self.optimizer, HybridMuon):
            compile_kernels(self.optimizer)

    def _recompute_layers(self) -> None:
        if not self._training.recompute:
            return
        with_layers = [branch.model.recompute_layers() for branch in self.branches.values()]
        if not any(with_layers):
            log.warning(
                "training/recompute has no effect: the descriptor has no layers to compute again"
            )

    def _build_interpolation_schedules(self) -> list[Tuning]:
        """Return the schedule of each interpolated descriptor; branches may share a descriptor."""
        if not self._training.interpolate_embedding or self.strategy.cuts_parameters:
            return []
        users_of: dict[object, list[tuple[EnergyModel, DataLoader]]] = {}
        for branch in self.branches.values():
            if branch.model.can_interpolate:
                users = users_of.setdefault(branch.model.statistics_owner, [])
                users.append((branch.model, branch.data.training))
        return [Tuning(users, self._device) for users in users_of.values()]

    # ----- restart -------------------------------------------------------------------------------

    def restart(self, content: Mapping[str, Any], path: Path) -> None:
        """Continue from a checkpoint: optimizer, averages, data order and random numbers.

        The weights are loaded already.

        Raises
        ------
        CheckpointError
            If the optimizer state is missing or of another kind of optimizer, or the checkpoint is
            beyond the run's last step.
        RoutingMismatchError
            If a parameter's route or matrix view has changed.
        """
        check_remaining_steps(content, self.num_steps, path)
        self.strategy.load_optimizer_state(self.optimizer, content, path, self._build_whole)
        self.restarted_from = path
        self.step = self._run_state.restore(content, path)
        with self.ranks.barrier("checking the optimizer's state"):
            check_state(self.optimizer, self.ema.averages() if self.ema else {}, path)
        train_infos = content["model"]["_extra_state"]["train_infos"]
        self.validation.restore(train_infos)
        self._compare_rates(train_infos, path)
        if OWN_KEY in content:  # not deepmd-kit's
            self.checkpoints.adopt(content[OWN_KEY], path)
            # Pieces in the checkpoint are the models' already: then no first check is due.
            for schedule in self._interpolation_schedules:
                schedule.looked = "pieces" in content[OWN_KEY]
        log.info("restarting from %s at step %d", path, self.step)

    def _compare_rates(self, train_infos: Mapping[str, Any], path: Path) -> None:
        """Warn if the schedule gives another rate for the last update than the saved one."""
        if not self.step:
            return
        saved = float(train_infos["lr"])
        present = self._last_rate()
        if abs(present - saved) > 1e-6 * max(abs(saved), abs(present)):
            log.warning(
                "the learning rate was %.3g when %s was written and goes on from %.3g",
                saved,
                path,
                present,
            )

    def _build_whole(self) -> tuple[EnergyModel | Branches, torch.optim.Optimizer]:
        """Make model and optimizer as a single process has them."""
        model = build_of(self.run_input)
        return model, build_optimizer(self.run_input.settings.optimizer, model, self.rate(0))

    # ----- the run -------------------------------------------------------------------------------

    def run(self, begun: float | None = None) -> int:
        """Train until the last step, the early stop of validation, or a signal.

        Parameters
        ----------
        begun
            `time.monotonic()` when the command began, for the log.

        Returns
        -------
        int
            0, or 128 plus the number of the signal that ended the run early. A checkpoint has been
            saved then.

        Raises
        ------
        RunError
            If it cannot go on: loss or gradient is not finite, a disk is full, memory is short,
            data are unreadable. The message names the last good checkpoint.
        """
        self._first_step = self.step
        with self.ranks.barrier("starting"):
            log.info("training from step %d to step %d", self.step, self.num_steps)
        with (
            explained(
                moment=lambda: self._moment,
                newest=lambda: self.checkpoints.newest or self.restarted_from,
            ),
            StopSignals(
                self.strategy.request_stop,
                lambda: self.checkpoints.is_saving,
                # The launcher of several ranks repeats signals that they get from the terminal.
                repeats=0 if self.ranks.size == 1 else 1,
            ) as signals,
        ):
            try:
                self._train(begun)
                # After a signal the run ends soon; the table of errors would take long.
                if self.strategy.stop_signal is None:
                    self.validation.compare_at_end(self.step)
            except NonFiniteError as error:
                self._rescue()
                raise self._non_finite_error(error) from error
            except Exception:
                self._rescue()
                raise
        # A signal that came too late to be agreed on counts on the ranks that received it alone.
        stop_signal = self.strategy.stop_signal or signals.number
        if stop_signal is not None:
            log.warning(
                "stopped by %s after step %d; continue with --restart %s",
                signal.Signals(stop_signal).name,
                self.step,
                self.checkpoints.newest,
            )
            return 128 + stop_signal
        self._log_end()
        return 0

    def _non_finite_error(self, error: NonFiniteError) -> NonFiniteError:
        """Return the error with the number of the update and the last checkpoint that is finite."""
        update = error.update or self.step + 1
        remedy = last_good(newest_finite(self.checkpoints.saved, self.restarted_from))
        return NonFiniteError(f"training stopped before update {update}: {error}; {remedy}", update)

    def _log_end(self) -> None:
        """Log whether the run diverged; if not, how to check its model."""
        newest = self.checkpoints.newest
        weights = (local_part(p) for p in self.model.parameters())
        if self.ranks.first and (problem := self._divergence.describe(weights)):
            log.warning("training diverged: %s", problem)
            log.warning(
                "do not use the model %s: train again with a lower learning_rate/start_lr "
                "or optimizer/weight_decay",
                newest,
            )
            return
        log.info("training done; the model is %s", newest)
        checkpoint = Path(f"{self._training.save_ckpt}.pt")
        # Dynamics have no spins.
        has_dynamics = not any(b.model.settings.spins.read for b in self.branches.values())
        if (
            has_dynamics
            and len(self.branches) == 1
            and (command := check_command(self.run_input.source, checkpoint))
        ):
            log.info("check that dynamics with it are stable: %s", command)

    def _train(self, begun: float | None) -> None:
        """Open reports and batches, take all steps, save, and close.

        An error of closing loses no step: the last checkpoint is written before.
        """
        training = self._training
        with contextlib.ExitStack() as stack:
            # Closed in reverse order: batches, validation, reports, then the loaders and graphs of
            # each branch.
            for name, stepper in self._steppers.items():
                data = self.branches[name].data
                stack.callback(stepper.close)
                if data.validation is not None:
                    stack.callback(data.validation.close)
                stack.callback(data.training.close)
            self._note_moment("opening its reports")
            reports = open_reports(
                training,
                num_steps=self.num_steps,
                start_step=self.step,
                begun=begun,
                silent=not self.ranks.first,
                atoms=lambda: self._throughput.atoms,
            )
            stack.callback(reports.close)
            self.validation.begin(self.step, fresh=self.restarted_from is None)
            stack.callback(self.validation.close)
            # After a position has been restored, and before loaders read ahead.
            self._order.deal({name: branch.data.training for name, branch in self.branches.items()})
            batches = {}
            for name, branch in self.branches.items():
                batches[name] = self._steppers[name].open_batches(
                    branch.data.training, branch.model.ntypes
                )
                stack.callback(batches[name].close)
            profiling = training.profiling and self.ranks.first
            with torch.profiler.profile() if profiling else contextlib.nullcontext() as profile:
                self._take_steps(reports, batches)
                self._raise_pending()
            if training.disp_training and training.time_training:
                with self.ranks.waiting():
                    throughput = self._throughput.describe()
                if throughput is not None:
                    log.info("%s", throughput)
            self._note_moment(SAVING, self.step)
            self.checkpoints.complete(self.step, self._checkpoint_content)
            self._export()
            if profile is not None:
                _write_trace(profile, Path(training.profiling_file))

    def _take_steps(self, reports: Reports, batches: Mapping[str, StepSource]) -> None:
        """Go through the steps, reporting and saving on the way."""
        training = self._training
        recent = RecentMetrics(
            self.branches,
            averaged=training.disp_avg,
            stratified=isinstance(self._order, StratifiedOrder),
        )
        warned_of_neighbors = False
        # Ranks sum gradients in every step, so all must leave the loop after the same one. These
        # three conditions are equal on all of them.
        while (
            self.step < self.num_steps
            and self.strategy.stop_signal is None
            and not self._stops_early()
        ):
            lr, fraction = self._rate_and_fraction(self.step)
            branch_name = self._order.next(self.validation.stopped)
            self._note_moment(
                "reading its batch", self.step + 1, reads_data=True, between_steps=True
            )
            with self._throughput.reading():
                batch = batches[branch_name].next()
            for schedule in self._interpolation_schedules:
                schedule(self.step)
            self._note_moment(STEPPING, self.step + 1)
            metrics = self._steppers[branch_name](batch, self.step)
            self.step += 1
            self._throughput.take(batch)

            due = reports.due(self.step)
            recent.add(branch_name, metrics, batch, due=due)
            if due:
                self._report(reports, recent, lr, fraction)
            reports.advance(self.step)
            cache = self.branches[branch_name].data.training.cache
            if not warned_of_neighbors and cache.dropped:
                warned_of_neighbors = True
                log.warning(
                    "some atoms have more neighbours than sel allows: the farthest are left out"
                )
            if self.validation.due(self.step):
                self._validate_fully()
            if self.step % training.save_freq == 0:
                self.save()

    def _report(self, reports: Reports, recent: RecentMetrics, lr: float, fraction: float) -> None:
        """Write a row of metrics; `fraction` is the learning rate divided by `start_lr`."""
        self._raise_pending()
        averaged = recent.take(self.ranks)
        validated = None
        if reports.due_validation(self.step):
            validated = self.validation.measure(fraction)
        with self.ranks.waiting():  # on a GPU, reading them waits for the sum over ranks
            self._throughput.share()
            row = numbers(averaged)
        self._note_moment("reporting", self.step, between_steps=True)
        reports.step(self.step, lr, row, validated)
        self._divergence.add(row)

    def _stops_early(self) -> bool:
        """Return, and log, whether no trained branch has had a new best within its patience.

        Equal on all ranks, which measure validation errors together.
        """
        if not self._trained_branches <= self.validation.stopped:
            return False
        log.info(
            "stopped early after step %d of %d: %d full validations brought no new best",
            self.step,
            self.num_steps,
            self.run_input.settings.validating.early_stop_patience,
        )
        return True

    def _rate_and_fraction(self, step: int) -> tuple[float, float]:
        """Return the learning rate of a 0-based step, and its fraction of `start_lr`."""
        lr = self.rate(step)
        return lr, lr / self.run_input.settings.learning_rate.start_lr

    def _note_moment(
        self, doing: str, step: int = 0, *, reads_data: bool = False, between_steps: bool = False
    ) -> None:
        """Note the run's activity, see `Moment`, for other ranks and for an error that ends it."""
        self._moment = Moment(doing, step, reads_data, between_steps)
        self.ranks.doing(doing, step)

    def _raise_pending(self) -> None:
        """Raise errors of earlier steps that are still pending on the device."""
        for stepper in self._steppers.values():
            stepper.check(self.step)

    # ----- checkpoints ---------------------------------------------------------------------------

    def save(self) -> None:
        """Write a checkpoint of the present step; all ranks must call it."""
        self._raise_pending()
        self._note_moment(SAVING, self.step)
        self.checkpoints.save(self.step, self._checkpoint_content)

    def _checkpoint_content(self) -> dict[str, Any]:
        """Return the content of a checkpoint of the present step, laid out over the ranks."""
        return self._run_state.content(self.step, self._last_rate(), self.validation.state())

    def _last_rate(self) -> float:
        """Return the learning rate of the last update, of the first one if there was none."""
        return self.rate(max(0, self.step - 1))

    def _validate_fully(self) -> None:
        """Measure the present weights on all validation data; save them if among the best."""
        self._raise_pending()
        errors = self.validation.errors(self.step)
        self._note_moment(SAVING, self.step)
        with self.checkpoints.being_written():
            self.validation.take(self.step, errors, self._checkpoint_content)

    def _export(self) -> None:
        """Write the branch of `export_branch` as a checkpoint of one model."""
        training = self._training
        path = training.exported_path
        if path is None or not self.ranks.first:
            return
        assert isinstance(training, MultiTaskTrainingSettings)
        assert training.export_branch is not None
        content = self._run_state.alone(training.export_branch, self.step, self._last_rate())
        with self.checkpoints.being_written(), whole_file(path) as file:
            torch.save(content, file)
        log.info("the model of the branch %s alone is %s", training.export_branch, path)

    def _rescue(self) -> None:
        """Save the last step if an error came after it; only warn of an error here."""
        # Within a step, the weights are partly updated. The moments of validating and saving are
        # not marked `between_steps` either. One of several ranks cannot save alone.
        if not self._moment.between_steps or self.ranks.size > 1 or self.step == self._first_step:
            return
        try:
            self._raise_pending()
            if self.validation.due(self.step):
                # Reports come before it, so the error may have; a restart would not repeat it.
                self._validate_fully()
            self.checkpoints.complete(self.step, self._checkpoint_content)
        except Exception as error:
            log.warning("step %d could not be saved either: %s", self.step, error)


def _write_trace(profile: torch.profiler.profile, path: Path) -> None:
    """Write a trace for chrome://tracing; torch reports no error of its writer."""
    with replacement(path) as temporary:
        profile.export_chrome_trace(str(temporary))
        # torch's own temporary file, which stays if it could not write all
        temporary.with_name(f"{temporary.name}.tmp").unlink(missing_ok=True)
        if not temporary.read_bytes().rstrip().endswith((b"}", b"]")):
            raise WriteError(errno.EIO, "torch has written a part of the trace only", str(path))
