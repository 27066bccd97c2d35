"""The validation of a run's branches: the errors that reports show, best checkpoints, and the table at the end."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from deepmd_muon.model.branch_settings import SINGLE
from deepmd_muon.train.batches.batch import to_device
from deepmd_muon.train.report.metrics import numbers
from deepmd_muon.train.validation.final_errors import (
    error_table,
    frames_of_sample,
    frames_to_compare,
    parity_command,
)
from deepmd_muon.train.validation.full_validation import FullValidation, error_sums, full_errors
from deepmd_muon.train.validation.validate import validate

if TYPE_CHECKING:
    from deepmd_muon.argcheck import Input
    from deepmd_muon.data import Batch
    from deepmd_muon.train.batches.batch import TrainingBatch
    from deepmd_muon.train.branches import RunBranch
    from deepmd_muon.train.strategy import Strategy

log = logging.getLogger(__name__)

T = TypeVar("T")

# Key of a checkpoint's train_infos: for each branch, the entries that deepmd-kit keeps of one model.
_OF_BRANCHES = "full_validation_of_branches"


class Validation:
    """Measures the errors of every branch that has validation data; every rank has one and calls it with the others.

    `now` notes the run's activity and step.
    """

    def __init__(
        self,
        given: Input,
        branches: Mapping[str, RunBranch],
        num_steps: int,
        strategy: Strategy,
        now: Callable[[str, int], None],
    ) -> None:
        self._given = given
        self._branches = {
            name: branch for name, branch in branches.items() if branch.data.validation
        }
        self._num_steps = num_steps
        self._strategy = strategy
        self._ranks = strategy.ranks
        self._now = now
        settings = given.settings
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
        """Return the metrics of the present weights on the next validation batches, None without any."""
        found = {}
        for branch in self._branches.values():
            section, loader = branch.settings.data.validation_data, branch.data.validation
            assert section is not None
            assert loader is not None
            frames = [system.nframes for system in loader.systems]
            dealt: Iterator[tuple[Batch, bool]]
            if section.numb_btch == "all":
                dealt = loader.deal_all()
            elif section.numb_btch == "sample":
                wanted = frames_of_sample(frames, self._given.settings.training.disp_freq)
                dealt = ((batch, counts) for batch, counts, _ in loader.deal_sample(wanted))
            else:
                dealt = loader.deal(int(section.numb_btch))
            batches = (
                (self._to_device(branch, batch), counts) for batch, counts in self._announced(dealt)
            )
            metrics = validate(branch.model, branch.loss, batches, lr_fraction, self._ranks.sum)
            with self._ranks.waiting():
                found.update(
                    {branch.named(name): value for name, value in numbers(metrics).items()}
                )
            self._strategy.reshard()
        return found or None

    def errors(self, step: int) -> dict[str, dict[str, float]]:
        """Return the errors of each branch on all its validation data."""
        found = {}
        for name, branch in self._branches.items():
            assert branch.data.validation is not None
            dealt = self._announced(branch.data.validation.deal_all(), step)
            batches = ((self._to_device(branch, batch), counts) for batch, counts in dealt)
            found[name] = full_errors(branch.model, batches, self._ranks.sum)
            self._strategy.reshard()
        return found

    def take(
        self,
        step: int,
        errors: Mapping[str, Mapping[str, float]],
        content: Callable[[], Mapping[str, Any]],
    ) -> None:
        """Rank the errors of a step and save it where it is among the best; see `FullValidation.take`."""
        before = self.stopped
        for name, found in errors.items():
            self._full[name].take(step, found, content)
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
        if [*self._full] == [SINGLE]:
            return self._full[SINGLE].state()
        found = {name: state for name, full in self._full.items() if (state := full.state())}
        return {_OF_BRANCHES: found} if found else {}

    def restore(self, infos: Mapping[str, Any]) -> None:
        """Take over the records of a checkpoint."""
        for name, full in self._full.items():
            full.best.restore(
                infos if name == SINGLE else infos.get(_OF_BRANCHES, {}).get(name, {})
            )

    def keep_earlier(self, after: int = -1) -> None:
        """Keep files of later steps, or of another run; see `BestCheckpoints.keep_earlier`."""
        for full in self._full.values():
            full.best.keep_earlier(after)

    def compare_at_end(self, step: int) -> None:
        """Log the errors of the last weights on the validation data; a signal ends it without its table."""
        for branch in self._branches.values():
            loader = branch.data.validation
            assert loader is not None
            frames = [system.nframes for system in loader.systems]
            compared = frames_to_compare(frames, self._num_steps)
            dealt = self._announced(loader.deal_sample(compared), step)
            batches = (
                (self._to_device(branch, batch), counts, system) for batch, counts, system in dealt
            )
            # Ranks agree on signals in their steps: one that comes now is seen at once by a single process alone.
            going_on = itertools.takewhile(lambda _: self._strategy.stop_signal is None, batches)
            sums = error_sums(branch.model, going_on, len(frames), self._ranks.sum)
            self._strategy.reshard()
            if self._strategy.stop_signal is not None:
                return
            for line in error_table(
                [system.name for system in loader.systems], frames, compared, sums
            ):
                log.info("%s%s", branch.prefix, line)
        checkpoint = Path(f"{self._given.settings.training.save_ckpt}.pt")
        if [*self._branches] == [SINGLE] and (
            command := parity_command(self._given.source, checkpoint)
        ):
            log.info("draw predictions against labels with: %s", command)

    def _to_device(self, branch: RunBranch, batch: Batch) -> TrainingBatch:
        return to_device(batch, branch.model.ntypes, self._ranks.device)

    def _announced(self, batches: Iterable[T], step: int = 0) -> Iterator[T]:
        """Tell the other ranks of every validation batch, because all of them may take longer than the ranks wait."""
        for batch in batches:
            self._now("validating", step)
            yield batch
