"""The best checkpoints by an error on validation data, under deepmd-kit's names: ``best.ckpt-STEP.t-RANK.pt``."""

from __future__ import annotations

import dataclasses
import logging
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from deepmd_muon.files import make_folder_of, whole_file, writing

log = logging.getLogger(__name__)


@dataclasses.dataclass
class BestCheckpoints:
    """The best checkpoints of a run: `keep` of them by the error `metric`, such as "e:mae", in a folder.

    `records` holds error and step of each, best first; of equal errors the earlier step. Names of files begin with
    `name`.
    """

    folder: Path
    keep: int
    metric: str
    records: list[tuple[float, int]] = dataclasses.field(default_factory=list)
    name: str = "best.ckpt"
    since_best: int = 0

    def enter(self, step: int, error: float) -> bool:
        """Rank a step; return whether it is among the best."""
        new_best = not self.records or error < self.records[0][0]
        self.since_best = 0 if new_best else self.since_best + 1
        ranked = sorted([*(record for record in self.records if record[1] != step), (error, step)])[
            : self.keep
        ]
        if (error, step) not in ranked:
            return False
        self.records = ranked
        return True

    def path(self, step: int) -> Path:
        """Path of a step among the best."""
        rank = [record[1] for record in self.records].index(step) + 1
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
        steps = {step for _, step in self.records}
        found = {
            path: int(name[1])
            for path in self._files()
            if (name := self._pattern.fullmatch(path.name))
        }
        for path, step in found.items():
            with writing(path):
                if step not in steps or (path != self.path(step) and self.path(step) in found):
                    path.unlink()
                elif path != self.path(step):
                    path.rename(self.path(step))

    def keep_earlier(self, after: int = -1) -> None:
        """Give files of later steps a number: ``best.ckpt-100.t-1.pt`` becomes ``best.ckpt.1-100.t-1.pt``."""
        names = {path: self._pattern.fullmatch(path.name) for path in self._files()}
        earlier = [path for path, name in names.items() if name and int(name[1]) > after]
        if not earlier:
            return
        kept = re.compile(rf"{re.escape(self.name)}\.([0-9]+)-.*")
        number = (
            max(
                (int(name[1]) for path in self._files() if (name := kept.fullmatch(path.name))),
                default=0,
            )
            + 1
        )
        for path in earlier:
            with writing(path):
                path.rename(
                    path.with_name(path.name.replace(self.name, f"{self.name}.{number}", 1))
                )
        log.info(
            "kept the best checkpoints of an earlier run as %s",
            self.folder / f"{self.name}.{number}-*",
        )

    @property
    def _pattern(self) -> re.Pattern[str]:
        return re.compile(rf"{re.escape(self.name)}-([0-9]+)\.t-([0-9]+)\.pt")

    def _files(self) -> list[Path]:
        return sorted(self.folder.glob(f"{self.name}*.pt"))

    def remove_leftovers(self) -> None:
        """Delete leftovers of runs that were killed while saving."""
        left = re.compile(rf"\.{re.escape(self.name)}-[0-9]+\.t-[0-9]+\.[0-9a-f]{{16}}\.pt")
        for rest in self.folder.glob(f".{self.name}-*.pt"):
            if left.fullmatch(rest.name):
                with writing(rest):
                    rest.unlink()

    def state(self) -> dict[str, Any]:
        """Return the records as deepmd-kit keeps them among a checkpoint's ``train_infos``, and `since_best`."""
        return {
            "full_validation_metric": self.metric,
            "full_validation_topk_records": [
                {"metric": error, "step": step} for error, step in self.records
            ],
            "full_validation_since_best": self.since_best,
        }

    def restore(self, infos: Mapping[str, Any]) -> None:
        """Take over the records of a checkpoint, ours or deepmd-kit's; records of another error are ignored."""
        records = infos.get("full_validation_topk_records", [])
        if infos.get("full_validation_metric") != self.metric or not isinstance(records, list):
            return
        self.records = sorted((float(r["metric"]), int(r["step"])) for r in records)[: self.keep]
        self.since_best = int(infos.get("full_validation_since_best", 0))
