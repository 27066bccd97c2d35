"""Full validation: errors on all validation data at intervals, and the best checkpoints."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from deepmd_muon.checkpoint_file.file import OWN_KEY
from deepmd_muon.model.branch_settings import SINGLE
from deepmd_muon.train.errors import TrainingError
from deepmd_muon.train.ranks.ranks import Ranks, gather_whole
from deepmd_muon.train.validation.best import BestCheckpoints
from deepmd_muon.train.validation.validation_file import ValidationFile

if TYPE_CHECKING:
    from deepmd_muon.argcheck import ValidatingSettings
    from deepmd_muon.model import EnergyModel
    from deepmd_muon.train.batches.batch import TrainingBatch

log = logging.getLogger(__name__)

_FAMILIES = ("e", "f", "s", "v")


class FullValidation:
    """Decides when to validate, ranks the results, and writes files; a collective.

    Rank 0 writes. Files have the branch's name unless it is the only one. `best` are the best
    checkpoints so far.
    """

    def __init__(
        self,
        settings: ValidatingSettings,
        save_ckpt: str,
        num_steps: int,
        ranks: Ranks,
        branch: str = SINGLE,
    ) -> None:
        self._settings = settings
        self._ranks = ranks
        start = settings.full_val_start
        self._start = int(start * num_steps) if start < 1 else int(start)  # a fraction or a step
        self._last_step = 0  # that was validated
        self._enabled = settings.full_validation and start != 1
        folder = settings.best_folder(save_ckpt)
        of_branch = "" if branch == SINGLE else f".{branch}"
        self.best = BestCheckpoints(
            folder,
            settings.max_best_ckpt,
            settings.validation_metric.lower(),
            name=f"best{of_branch}.ckpt",
        )
        path = Path(settings.full_val_file)
        self._path = path.with_name(f"{path.stem}{of_branch}{path.suffix}")
        self._file: ValidationFile | None = None

    def begin(self, step: int, *, fresh: bool) -> None:
        """Open the file and tidy the folder before a run goes on after `step` updates."""
        if not self._enabled:
            return

        def open_file() -> None:
            self.best.remove_leftovers()
            if fresh:
                self.best.keep_earlier()
            elif self._settings.save_best and self.best.records:
                self.best.tidy()
            self._file = ValidationFile(self._path, self.best.metric, start_step=step)

        self._ranks.run_on_rank0("opening the file of full validations", open_file)

    def due(self, step: int) -> bool:
        """Return whether the 1-based `step` is to be validated, and has not been."""
        if not self._enabled or step <= self._last_step or step < self._start:
            return False
        return (step - self._start) % self._settings.validation_freq == 0

    def take(
        self, step: int, errors: Mapping[str, float], content: Callable[[], Mapping[str, Any]]
    ) -> None:
        """Rank the errors of a step, save it if it is among the best, and write the row.

        Parameters
        ----------
        step
            1-based.
        errors
            As `full_errors` returns them.
        content
            Returns the checkpoint of this step, in its layout over the ranks.

        Raises
        ------
        TrainingError
            When no validation data have the label of the error that decides.
        """
        error = errors[self.best.metric]
        if math.isnan(error):
            raise TrainingError(
                f"validating/validation_metric is {self.best.metric.upper()}, "
                "for which no validation data have labels"
            )
        note = None
        if self.best.enter(step, error) and self._settings.save_best:
            checkpoint = gather_whole(content())
            # It stands apart from the run's other checkpoints, which a run that continues from it
            # does not delete.
            checkpoint[OWN_KEY] = {**checkpoint[OWN_KEY], "series": []}
            self._ranks.run_on_rank0(
                "saving a best checkpoint",
                lambda: log.info("saved %s", self.best.save(step, checkpoint)),
            )
            note = f"saved {self.best.path(step)}"
        if self._file is not None:
            self._file.row(step, errors, note)
        self._last_step = step

    @property
    def stopped(self) -> bool:
        """Whether the last `early_stop_patience` validations brought no new best."""
        patience = self._settings.early_stop_patience
        return 0 < patience <= self.best.since_best

    def state(self) -> dict[str, Any]:
        """Return the part that a checkpoint keeps."""
        return self.best.state() if self._enabled else {}

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()


def full_errors(
    model: EnergyModel,
    batches: Iterable[tuple[TrainingBatch, bool]],
    add_up: Callable[[Tensor], Tensor],
) -> dict[str, float]:
    """Return mean absolute and root-mean-square errors, by deepmd-kit's definitions.

    Batches are on the model's device, with whether each counts; every rank must have one. `add_up`
    adds a tensor over all ranks.

    Returns
    -------
    dict
        "e:mae" and "e:rmse" [eV/atom], "f:…" [eV/Å], "s:…" [eV/Å³], "v:…" [eV/atom]; NaN if nothing
        is compared.
    """
    (sums,) = error_sums(model, ((batch, counts, 0) for batch, counts in batches), 1, add_up)
    return errors_of_sums(sums)


@torch.no_grad()
def error_sums(
    model: EnergyModel,
    batches: Iterable[tuple[TrainingBatch, bool, int]],
    nrows: int,
    add_up: Callable[[Tensor], Tensor],
) -> list[list[float]]:
    """Return the sums behind `full_errors`; each batch comes with its row, such as its system.

    A row has Σ|error|, Σ error² and the number of values of each of the four quantities, (12,).
    """
    device = next(model.parameters()).device
    total = torch.zeros(nrows, 12, dtype=torch.float64, device=device)
    for batch, counts, row in batches:
        # All ranks of a sharded model must call it, also if the batch does not count.
        sums = _error_sums(model(batch.structures, force=True, virial=True), batch)
        if counts:
            total[row] += sums
    rows: list[list[float]] = add_up(total).tolist()
    return rows


def errors_of_sums(sums: Sequence[float]) -> dict[str, float]:
    """Return the errors of `full_errors` from a row of `error_sums`, or from a sum of rows."""
    errors: dict[str, float] = {}
    for k, family in enumerate(_FAMILIES):
        absolute, square, count = sums[3 * k : 3 * k + 3]
        errors[f"{family}:mae"] = absolute / count if count else float("nan")
        errors[f"{family}:rmse"] = (square / count) ** 0.5 if count else float("nan")
    return errors


class _Errors(NamedTuple):
    """Errors of one quantity."""

    values: Tensor  # (nframes, number of values)
    labelled: Tensor  # which frames have the label (nframes,)

    def sums(self, counted: Tensor, divisor: Tensor | None = None) -> Tensor:
        """Return Σ|error|, Σ error² and the number of values.

        `counted` broadcasts to the values; they are divided by `divisor`, one a frame.
        """
        values = self.values if divisor is None else self.values / divisor[:, None]
        values = torch.where(counted, values, 0.0)
        number = counted.expand_as(values).sum().double()
        return torch.stack([values.abs().sum(), values.square().sum(), number])


def _errors_of(name: str, prediction: Mapping[str, Tensor], batch: TrainingBatch) -> _Errors | None:
    """Return the errors of a quantity; None if no frame has the label."""
    label = batch.labels.get(name)
    if label is None:
        return None
    nframes = len(batch.atoms)
    predicted = prediction[name]
    values = predicted.double() - label.reshape(predicted.shape).double()
    labelled = batch.labels.get(f"find_{name}")
    if labelled is None:
        labelled = torch.ones(nframes, dtype=torch.bool, device=values.device)
    return _Errors(values.reshape(nframes, -1), labelled)


def _error_sums(prediction: Mapping[str, Tensor], batch: TrainingBatch) -> Tensor:
    """Return Σ|error|, Σ error² and the number of values of every family, (12,) float64."""
    natoms = torch.as_tensor(batch.atoms, device=prediction["energy"].device)
    nframes = len(natoms)
    nothing = torch.zeros(3, dtype=torch.float64, device=natoms.device)
    sums = dict.fromkeys(_FAMILIES, nothing)
    energy = _errors_of("energy", prediction, batch)
    if energy is not None:
        sums["e"] = energy.sums(energy.labelled[:, None], divisor=natoms)
    force = _errors_of("force", prediction, batch)
    if force is not None:
        counted = force.labelled[:, None].expand(nframes, force.values.shape[1] // 3)
        if batch.mask is not None:
            counted = counted & batch.mask
        sums["f"] = force.sums(counted.repeat_interleave(3, dim=1))
    virial = _errors_of("virial", prediction, batch)
    box = batch.structures.box
    if virial is not None and box is not None:
        volume = torch.linalg.det(box.reshape(nframes, 3, 3).double()).abs()
        has_cell = volume > 0
        counted = (virial.labelled & has_cell)[:, None]
        sums["s"] = virial.sums(counted, divisor=torch.where(has_cell, volume, 1.0))
        sums["v"] = virial.sums(counted, divisor=natoms)
    return torch.cat([sums[family] for family in _FAMILIES])
