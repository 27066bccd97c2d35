"""The best checkpoints by an error on validation data, under deepmd-kit's names."""

from __future__ import annotations

import dataclasses
import logging
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from deepmd_muon.files import make_folder_of, whole_file, writing

log = logging.getLogger(__name__)


class BestRecord(NamedTuple):
    """A step among the best. Records sort by error, those of equal errors by step."""

    error: float
    step: int


@dataclasses.dataclass
class BestCheckpoints:
    """The `keep` best checkpoints of a run by the error `metric`, such as "e:mae".

    `records` are those of the checkpoints, best first. Names of files begin with `name`.
    `since_best` counts the validations since the last new best.
    """

    folder: Path
    keep: int
    metric: str
    records: list[BestRecord] = dataclasses.field(default_factory=list)
    name: str = "best.ckpt"
    since_best: int = 0

    def enter(self, step: int, error: float) -> bool:
        """Rank a step; return whether it is among the best."""
        is_new_best = not self.records or error < self.records[0].error
        self.since_best = 0 if is_new_best else self.since_best + 1
        record = BestRecord(error, step)
        earlier = [record for record in self.records if record.step != step]
        ranked = sorted([*earlier, record])[: self.keep]
        if record not in ranked:
            return False
        self.records = ranked
        return True

    def path(self, step: int) -> Path:
        """Path of a step among the best."""
        rank = [record.step for record in self.records].index(step) + 1
        return self.folder / f"{self.name}-{step}.t-{rank}.pt"

    def save(self, step: int, content: Mapping[str, Any]) -> Path:
        """Write the checkpoint of a step among the best, and give the others their ranks."""
        make_folder_of(self.path(step))
        with whole_file(self.path(step)) as file:
            torch.save(dict(content), file)
        self.tidy()
        return self.path(step)

    def tidy(self) -> None:
        """Rename the files to their ranks and delete those that are no longer among the best."""
        best_steps = {record.step for record in self.records}
        steps = self._steps_of_files()
        for path, step in steps.items():
            with writing(path):
                if step not in best_steps:
                    path.unlink()
                elif path != self.path(step):
                    if self.path(step) in steps:
                        path.unlink()  # a duplicate
                    else:
                        path.rename(self.path(step))

    def keep_earlier(self, after: int = -1) -> None:
        """Give files of later steps a number: ``best.ckpt-100…`` becomes ``best.ckpt.1-100…``."""
        earlier = [path for path, step in self._steps_of_files().items() if step > after]
        if not earlier:
            return
        numbered = re.compile(rf"{re.escape(self.name)}\.([0-9]+)-.*")
        matches = [numbered.fullmatch(path.name) for path in self._files()]
        number = 1 + max((int(match[1]) for match in matches if match), default=0)
        name = f"{self.name}.{number}"
        for path in earlier:
            with writing(path):
                path.rename(path.with_name(path.name.replace(self.name, name, 1)))
        log.info("kept the best checkpoints of an earlier run as %s", self.folder / f"{name}-*")

    def _steps_of_files(self) -> dict[Path, int]:
        """Return the steps of the checkpoints in the folder that have our names."""
        pattern = re.compile(rf"{re.escape(self.name)}-([0-9]+)\.t-([0-9]+)\.pt")
        matches = {path: pattern.fullmatch(path.name) for path in self._files()}
        return {path: int(match[1]) for path, match in matches.items() if match}

    def _files(self) -> list[Path]:
        return sorted(self.folder.glob(f"{self.name}*.pt"))

    def remove_leftovers(self) -> None:
        """Delete leftovers of runs that were killed while saving."""
        pattern = re.compile(rf"\.{re.escape(self.name)}-[0-9]+\.t-[0-9]+\.[0-9a-f]{{16}}\.pt")
        for path in self.folder.glob(f".{self.name}-*.pt"):
            if pattern.fullmatch(path.name):
                with writing(path):
                    path.unlink()

    def state(self) -> dict[str, Any]:
        """Return deepmd-kit's entries of a checkpoint's ``train_infos``, and `since_best`."""
        return {
            "full_validation_metric": self.metric,
            "full_validation_topk_records": [
                {"metric": record.error, "step": record.step} for record in self.records
            ],
            "full_validation_since_best": self.since_best,
        }

    def restore(self, infos: Mapping[str, Any]) -> None:
        """Take over the records of a checkpoint, unless they are of another error."""
        records = infos.get("full_validation_topk_records", [])
        if infos.get("full_validation_metric") != self.metric or not isinstance(records, list):
            return
        restored = [BestRecord(float(r["metric"]), int(r["step"])) for r in records]
        self.records = sorted(restored)[: self.keep]
        self.since_best = int(infos.get("full_validation_since_best", 0))
