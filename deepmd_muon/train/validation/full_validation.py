"""Full validation: errors on all validation data at intervals, and the checkpoints that are best by them."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from deepmd_muon.checkpoint_file.file import OWN_KEY
from deepmd_muon.model.branch_settings import SINGLE
from deepmd_muon.train.errors import TrainingError
from deepmd_muon.train.ranks.ranks import Ranks, gather_whole
from deepmd_muon.train.report.validation_file import ValidationFile
from deepmd_muon.train.validation.best import BestCheckpoints

if TYPE_CHECKING:
    from deepmd_muon.argcheck import ValidatingSettings
    from deepmd_muon.model import EnergyModel
    from deepmd_muon.train.batches.batch import TrainingBatch

log = logging.getLogger(__name__)

_FAMILIES = ("e", "f", "s", "v")


class FullValidation:
    """Decides when to validate, ranks the results, and writes files; every rank has one and calls it with the others.

    Rank 0 writes. Files bear the branch's name unless it is the only one. `best` are the best checkpoints so far.
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
        self._start = int(start * num_steps) if start < 1 else int(start)
        self._taken = 0
        self._enabled = settings.full_validation and start != 1
        folder = settings.best_folder(save_ckpt)
        whose = "" if branch == SINGLE else f".{branch}"
        name = f"best{whose}.ckpt"
        self.best = BestCheckpoints(
            folder, settings.max_best_ckpt, settings.validation_metric.lower(), name=name
        )
        path = Path(settings.full_val_file)
        self._path = path.with_name(f"{path.stem}{whose}{path.suffix}")
        self._file: ValidationFile | None = None

    def begin(self, step: int, *, fresh: bool) -> None:
        """Open the file and settle what lies in the folder, before the first step of a run after `step` updates."""
        if not self._enabled:
            return

        def settle() -> None:
            self.best.remove_leftovers()
            if fresh:
                self.best.keep_earlier()
            elif self._settings.save_best and self.best.records:
                self.best.tidy()
            self._file = ValidationFile(self._path, self.best.metric, start_step=step)

        self._ranks.run_on_rank0("opening the file of full validations", settle)

    def due(self, step: int) -> bool:
        """Return whether the 1-based `step` is to be validated, and has not been."""
        since = step - self._start
        return (
            self._enabled
            and step > self._taken
            and since >= 0
            and since % self._settings.validation_freq == 0
        )

    def take(
        self, step: int, errors: Mapping[str, float], content: Callable[[], Mapping[str, Any]]
    ) -> None:
        """Rank the errors of a step, equal on all ranks, save it if it is among the best, and write the row.

        `content` returns the checkpoint of this step, laid out over the ranks as it is. Validation data without a label
        for the error that decides are a TrainingError.
        """
        error = errors[self.best.metric]
        if math.isnan(error):
            raise TrainingError(
                f"validating/validation_metric is {self.best.metric.upper()}, for which no validation data have labels"
            )
        note = None
        if self.best.enter(step, error) and self._settings.save_best:
            whole = gather_whole(content())
            # It stands apart from the run's other checkpoints, which a run that continues from it does not delete.
            whole[OWN_KEY] = {**whole[OWN_KEY], "series": [], "directories": []}
            self._ranks.run_on_rank0(
                "saving a best checkpoint",
                lambda: log.info("saved %s", self.best.save(step, whole)),
            )
            note = f"saved {self.best.path(step)}"
        if self._file is not None:
            self._file.row(step, errors, note)
        self._taken = step

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
    """Return mean absolute and root-mean-square errors over all batches, by deepmd-kit's definitions.

    Batches are on the model's device, with whether each counts; every rank must have one. `add_up` adds a tensor over
    all ranks.

    Returns
    -------
    dict
        "e:mae" and "e:rmse" [eV/atom], "f:…" [eV/Å], "s:…" [eV/Å³], "v:…" [eV/atom]; NaN where nothing is compared.
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
    """Return the sums behind `full_errors` in `nrows` rows, such as one a system, to which each batch names its own.

    A row has Σ|error|, Σ error² and the number of values of each of the four quantities, (12,).
    """
    device = next(model.parameters()).device
    total = torch.zeros(nrows, 12, dtype=torch.float64, device=device)
    for batch, counts, row in batches:
        sums = _error_sums(model(batch.structures, force=True, virial=True), batch)
        if counts:
            total[row] += sums
    found: list[list[float]] = add_up(total).tolist()
    return found


def errors_of_sums(sums: Sequence[float]) -> dict[str, float]:
    """Return the errors that `full_errors` describes from a row of `error_sums`, or from a sum of rows."""
    errors: dict[str, float] = {}
    for k, family in enumerate(_FAMILIES):
        absolute, square, count = sums[3 * k : 3 * k + 3]
        errors[f"{family}:mae"] = absolute / count if count else float("nan")
        errors[f"{family}:rmse"] = (square / count) ** 0.5 if count else float("nan")
    return errors


def _error_sums(prediction: Mapping[str, Tensor], batch: TrainingBatch) -> Tensor:
    """Return Σ|error|, Σ error² and the number of values of every family, (12,) float64."""
    box = batch.structures.box
    natoms = torch.as_tensor(batch.atoms, device=prediction["energy"].device)
    nframes = len(natoms)

    def errors_of(name: str) -> tuple[Tensor, Tensor] | None:
        """Return errors (nframes, values) and which frames have the label."""
        wanted = batch.labels.get(name)
        if wanted is None:
            return None
        error = (
            prediction[name].double() - wanted.reshape(prediction[name].shape).double()
        ).reshape(nframes, -1)
        found = batch.labels.get(f"find_{name}")
        return error, torch.ones(
            nframes, dtype=torch.bool, device=error.device
        ) if found is None else found

    def sums(error: Tensor, counted: Tensor) -> Tensor:
        kept = torch.where(counted, error, 0.0)
        return torch.stack(
            [kept.abs().sum(), kept.square().sum(), counted.expand_as(error).sum().double()]
        )

    nothing = torch.zeros(3, dtype=torch.float64, device=natoms.device)
    energy, force, virial = errors_of("energy"), errors_of("force"), errors_of("virial")
    found = {"e": nothing, "f": nothing, "s": nothing, "v": nothing}
    if energy is not None:
        found["e"] = sums(energy[0] / natoms[:, None], energy[1][:, None])
    if force is not None:
        real = force[1][:, None].expand(nframes, force[0].shape[1] // 3)
        real = real if batch.mask is None else real & batch.mask
        found["f"] = sums(force[0], real.repeat_interleave(3, dim=1))
    if virial is not None and box is not None:
        volume = torch.linalg.det(box.reshape(nframes, 3, 3).double()).abs()
        counted = (virial[1] & (volume > 0))[:, None]
        found["s"] = sums(virial[0] / torch.where(volume > 0, volume, 1.0)[:, None], counted)
        found["v"] = sums(virial[0] / natoms[:, None], counted)
    return torch.cat([found[family] for family in _FAMILIES])
