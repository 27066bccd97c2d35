"""The validation of a run's branches: reported errors, best checkpoints, the last table."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from deepmd_muon.model.branch_settings import SINGLE
from deepmd_muon.train.batches.batch import to_device
from deepmd_muon.train.validation.final_errors import (
    error_table,
    frames_of_sample,
    frames_to_compare,
    parity_command,
)
from deepmd_muon.train.validation.full_validation import FullValidation, error_sums, full_errors
from deepmd_muon.train.validation.validate import numbers, validate

if TYPE_CHECKING:
    from deepmd_muon.argcheck import Input
    from deepmd_muon.data import Batch
    from deepmd_muon.train.batches.batch import TrainingBatch
    from deepmd_muon.train.branches import RunBranch
    from deepmd_muon.train.strategy import Strategy

log = logging.getLogger(__name__)

T = TypeVar("T")

# Key of a checkpoint's train_infos: for each branch, the entries that deepmd-kit keeps of one
# model.
_OF_BRANCHES = "full_validation_of_branches"


class Validation:
    """Measures the errors of every branch with validation data; a collective.

    `note` tells the run's other ranks the activity and the step, see `Trainer._note`.
    """

    def __init__(
        self,
        run_input: Input,
        branches: Mapping[str, RunBranch],
        num_steps: int,
        strategy: Strategy,
        note: Callable[[str, int], None],
    ) -> None:
        self._run_input = run_input
        self._branches = {
            name: branch for name, branch in branches.items() if branch.data.validation
        }
        self._num_steps = num_steps
        self._strategy = strategy
        self._ranks = strategy.ranks
        self._note = note
        settings = run_input.settings
        self._full = {
            name: FullValidation(
                settings.validating, settings.training.save_ckpt, num_steps, strategy.ranks, name
            )
            for name in self._branches
        }

    def begin(self, step: int, *, fresh: bool) -> None:
        """Open files before the first step; see `FullValidation.begin`."""
        for full in self._full.values():
            full.begin(step, fresh=fresh)

    def close(self) -> None:
        """Close the files."""
        for full in self._full.values():
            full.close()

    def due(self, step: int) -> bool:
        """Return whether a full validation is due after the 1-based `step`."""
        return any(full.due(step) for full in self._full.values())

    def measure(self, lr_fraction: float) -> dict[str, float] | None:
        """Return the metrics of the present weights on the next batches; None without any."""
        measured = {}
        for branch in self._branches.values():
            batches = (
                (self._to_device(branch, batch), counts)
                for batch, counts in self._announced(self._deal(branch))
            )
            metrics = validate(branch.model, branch.loss, batches, lr_fraction, self._ranks.sum)
            with self._ranks.waiting():
                values = numbers(metrics)
            measured.update({branch.named(name): value for name, value in values.items()})
            self._strategy.reshard()
        return measured or None

    def _deal(self, branch: RunBranch) -> Iterator[tuple[Batch, bool]]:
        """Return the batches of a row of the learning curve, each with whether it counts."""
        section = branch.settings.data.validation_data
        loader = branch.data.validation
        assert section is not None
        assert loader is not None
        if section.numb_btch == "all":
            return loader.deal_all()
        if section.numb_btch == "sample":
            disp_freq = self._run_input.settings.training.disp_freq
            frames = frames_of_sample([system.nframes for system in loader.systems], disp_freq)
            return ((batch, counts) for batch, counts, _ in loader.deal_sample(frames))
        return loader.deal(int(section.numb_btch))

    def errors(self, step: int) -> dict[str, dict[str, float]]:
        """Return the errors of each branch on all its validation data."""
        errors = {}
        for name, branch in self._branches.items():
            assert branch.data.validation is not None
            dealt = self._announced(branch.data.validation.deal_all(), step)
            batches = ((self._to_device(branch, batch), counts) for batch, counts in dealt)
            errors[name] = full_errors(branch.model, batches, self._ranks.sum)
            self._strategy.reshard()
        return errors

    def take(
        self,
        step: int,
        errors: Mapping[str, Mapping[str, float]],
        content: Callable[[], Mapping[str, Any]],
    ) -> None:
        """Rank the errors of a step; see `FullValidation.take`."""
        before = self.stopped
        for name, of_branch in errors.items():
            self._full[name].take(step, of_branch, content)
        for name in sorted(self.stopped ^ before):
            which = "no" if name in self.stopped else "has a"
            log.info(
                "%s%s new best %s at step %d",
                self._branches[name].prefix,
                which,
                self._full[name].best.metric,
                step,
            )

    @property
    def stopped(self) -> frozenset[str]:
        """The branches that wait for a new best, see `early_stop_patience`; equal on all ranks."""
        return frozenset(name for name, full in self._full.items() if full.stopped)

    def state(self) -> dict[str, Any]:
        """Return the part that a checkpoint keeps."""
        if list(self._full) == [SINGLE]:
            return self._full[SINGLE].state()
        states = {name: full.state() for name, full in self._full.items()}
        states = {name: state for name, state in states.items() if state}
        return {_OF_BRANCHES: states} if states else {}

    def restore(self, infos: Mapping[str, Any]) -> None:
        """Take over the records of a checkpoint."""
        for name, full in self._full.items():
            of_branch = infos if name == SINGLE else infos.get(_OF_BRANCHES, {}).get(name, {})
            full.best.restore(of_branch)

    def keep_earlier(self, after: int = -1) -> None:
        """Keep files of later steps, or of another run; see `BestCheckpoints.keep_earlier`."""
        for full in self._full.values():
            full.best.keep_earlier(after)

    def compare_at_end(self, step: int) -> None:
        """Log the errors of the last weights; a signal ends it without its table."""
        for branch in self._branches.values():
            loader = branch.data.validation
            assert loader is not None
            frames = [system.nframes for system in loader.systems]
            compared = frames_to_compare(frames, self._num_steps)
            dealt = self._announced(loader.deal_sample(compared), step)
            batches = (
                (self._to_device(branch, batch), counts, system) for batch, counts, system in dealt
            )
            # Ranks agree on signals in their steps; only a single process sees one that comes now.
            until_signal = itertools.takewhile(
                lambda _: self._strategy.stop_signal is None, batches
            )
            sums = error_sums(branch.model, until_signal, len(frames), self._ranks.sum)
            self._strategy.reshard()
            if self._strategy.stop_signal is not None:
                return
            names = [system.name for system in loader.systems]
            for line in error_table(names, frames, compared, sums):
                log.info("%s%s", branch.prefix, line)
        if list(self._branches) == [SINGLE]:
            checkpoint = Path(f"{self._run_input.settings.training.save_ckpt}.pt")
            command = parity_command(self._run_input.source, checkpoint)
            if command:
                log.info("draw predictions against labels with: %s", command)

    def _to_device(self, branch: RunBranch, batch: Batch) -> TrainingBatch:
        return to_device(batch, branch.model.ntypes, self._ranks.device)

    def _announced(self, batches: Iterable[T], step: int = 0) -> Iterator[T]:
        """Note every batch as an activity: all together may take longer than ranks wait."""
        for batch in batches:
            self._note("validating", step)
            yield batch
