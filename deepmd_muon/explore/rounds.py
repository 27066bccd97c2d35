"""Rounds on disk.

Each round has a folder, which records the finished stages, so that a command can continue after a
kill.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from deepmd_muon.argcheck.check import check
from deepmd_muon.argcheck.errors import InputError
from deepmd_muon.argcheck.files import read
from deepmd_muon.explore.records import Origins, RoundRecord, Stage, differences
from deepmd_muon.explore.settings import ExploreError
from deepmd_muon.explore.training import CHECKPOINT
from deepmd_muon.files import make_folder_of, write_text, writing
from deepmd_muon.section import Section, thaw

log = logging.getLogger(__name__)
R = TypeVar("R", bound=Section)


@dataclass(frozen=True)
class Round:
    """The folder of a round; round 0 is the check of the first models.

    `round.json` holds the results of each stage that is done: "draw", "labels", "training",
    "check". `made_from.json` holds what each stage depends on, once it has begun.
    """

    folder: Path
    number: int

    @property
    def candidates(self) -> Path:
        """Chosen structures without labels."""
        return self.folder / "candidates.xyz"

    @property
    def labels(self) -> Path:
        """Folder of single labelled structures."""
        return self.folder / "labels"

    @property
    def labelled(self) -> Path:
        """Labelled structures, which are trained on."""
        return self.folder / "labelled.xyz"

    def model(self, member: int) -> Path:
        """Folder of the training of one model."""
        return self.folder / f"model_{member}"

    @property
    def record(self) -> Path:
        """Results of the stages that are done."""
        return self.folder / "round.json"

    @property
    def origins(self) -> Path:
        """What the stages depend on."""
        return self.folder / "made_from.json"

    def done(self) -> RoundRecord:
        """Return the results of the stages that are done.

        Raises
        ------
        ExploreError
            When another program has written the file.
        """
        remedy = f"remove {self.folder} and the folders of later rounds to repeat them"
        return self._read(self.record, RoundRecord, remedy)

    def note(self, stage: Stage, result: Section) -> None:
        """Record that a stage is done."""
        change: dict[str, Any] = {stage: result}
        self._write(self.record, dataclasses.replace(self.done(), **change))

    def begin(self, stage: Stage, origin: Mapping[str, Any]) -> bool:
        """Record what a stage depends on, before its work begins, or compare it with the record.

        Returns
        -------
        bool
            False when the check is done and has to be repeated with other settings.

        Raises
        ------
        ExploreError
            When results of the stage exist that depend on something else.
        """
        remedy = "remove it to keep the results as they are"
        origins = self._read(self.origins, Origins, remedy)
        origin = json.loads(json.dumps(origin))  # as the file returns it
        recorded = getattr(origins, stage)
        has_results = self._has_results(stage)
        if has_results and recorded is None:
            log.warning(
                "%s does not say what its stage %s was made from; its results are kept as they are",
                self.folder,
                stage,
            )
            return True
        changes = differences(recorded, origin) if has_results else []
        # A check of other settings is repeated: it takes minutes, and nothing else depends on it.
        if not all(change.startswith("check/") for change in changes):
            partly = stage == "labels" and self.done().labels is None
            outdated = self.labels if partly else f"{self.folder} and the folders of later rounds"
            raise ExploreError(
                f"{self.folder} was made otherwise: {'; '.join(changes)}. Undo the change or give "
                f"another folder; to repeat the work, remove {outdated}; to keep it, remove "
                f"{self.origins}"
            )
        if not has_results or changes:
            update: dict[str, Any] = {stage: origin}
            self._write(self.origins, dataclasses.replace(origins, **update))
        if changes:
            log.info("%s is checked again: %s", self.folder, "; ".join(changes))
        return not changes

    def _has_results(self, stage: Stage) -> bool:
        """Return whether a stage is done, or has written results for the next command."""
        if getattr(self.done(), stage) is not None:
            return True
        if stage == "labels":
            return any(self.labels.glob("*.xyz"))
        return stage == "training" and any(self.folder.glob(f"model_*/{CHECKPOINT}.pt"))

    def _read(self, path: Path, kind: type[R], remedy: str) -> R:
        if not path.exists():
            return kind()
        try:
            checked = check(kind, read(path))
        except InputError as error:
            raise ExploreError(f"{error}\n  {remedy}") from error
        if checked.settings is None:
            raise ExploreError(f"{InputError(checked.problems, str(path))}\n  {remedy}")
        return checked.settings

    def _write(self, path: Path, content: Section) -> None:
        plain = {name: value for name, value in thaw(content).items() if value is not None}
        make_folder_of(path)
        write_text(path, json.dumps(plain, indent=2, allow_nan=False))


@contextlib.contextmanager
def held(folder: Path) -> Iterator[None]:
    """Lock the folder of the rounds: one command at a time.

    The system releases the lock however the process ends.

    Raises
    ------
    ExploreError
        When another process holds it.
    """
    lock = folder / ".lock"
    make_folder_of(lock)
    with writing(lock):
        handle = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ExploreError(
                f"another dp explore works in {folder}: wait for it, or name another folder"
            ) from error
        yield
    finally:
        os.close(handle)


def table_of(rounds: Sequence[RoundRecord]) -> list[str]:
    """Return the rounds as lines of a table; the given models come first."""
    head = [
        "round",
        "blew up",
        "candidates",
        "chosen",
        "labelled",
        "failed",
        "force error on them",
        "check",
    ]
    rows = [head, *(_row(number, record) for number, record in enumerate(rounds))]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]


def _row(number: int, record: RoundRecord) -> list[str]:
    """Return the cells of a round."""
    cells = [str(number)]
    if draw := record.draw:
        cells += [f"{draw.blow_ups} of {draw.copies}", str(draw.candidates), str(draw.chosen)]
    else:
        cells += ["-", "-", "-"]
    if labels := record.labels:
        cells += [str(labels.labelled), str(labels.failed)]
    else:
        cells += ["-", "-"]
    if training := record.training:
        errors = (training.error_before, training.error_after)
        cells.append(" -> ".join("-" if error is None else f"{error:.3f}" for error in errors))
    else:
        cells.append("-")
    cells.append(record.check.summary if record.check else "-")
    return cells
