"""Rounds on disk: one folder a round, which records the finished stages, so that a killed command can go on."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deepmd_muon.explore.settings import ExploreError
from deepmd_muon.files import make_folder_of, whole_file, writing


@dataclass(frozen=True)
class Round:
    """The folder of a round; number 0 is the check of the models that were given.

    `round.json` holds a part for each stage that is done: "draw", "labels", "training", "check".
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

    def done(self) -> dict[str, Any]:
        """Return the stages that are done.

        Raises
        ------
        ExploreError
            When another program has written the file.
        """
        place = self.folder / "round.json"
        try:
            found = json.loads(place.read_bytes())
        except FileNotFoundError:
            return {}
        except ValueError as error:
            raise ExploreError(
                f"{place} is not JSON ({error}): remove the folder of this round to repeat it"
            ) from error
        if not isinstance(found, dict):
            raise ExploreError(
                f"{place} holds no object: remove the folder of this round to repeat it"
            )
        return found

    def note(self, stage: str, values: dict[str, Any]) -> None:
        """Record that a stage is done."""
        place = self.folder / "round.json"
        content = json.dumps({**self.done(), stage: values}, indent=2, allow_nan=False)
        make_folder_of(place)
        with whole_file(place) as file:
            file.write(content.encode())


@contextlib.contextmanager
def held(folder: Path) -> Iterator[None]:
    """Hold the folder of the rounds: one command at a time. The system releases the lock however the process ends.

    Raises
    ------
    ExploreError
        When another process holds it.
    """
    place = folder / ".lock"
    make_folder_of(place)
    with writing(place):
        handle = os.open(place, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
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


def table_of(rounds: Sequence[dict[str, Any]]) -> list[str]:
    """Return the rounds, each the content of its `round.json`, as lines of a table; the given models come first."""
    head = (
        "round",
        "blew up",
        "candidates",
        "chosen",
        "labelled",
        "failed",
        "force error on them",
        "check",
    )
    rows = [head]
    for number, done in enumerate(rounds):
        draw, labels, training = (done.get(name, {}) for name in ("draw", "labels", "training"))
        errors = [training.get(name) for name in ("error_before", "error_after")]
        change = (
            " -> ".join("-" if error is None else f"{error:.3f}" for error in errors)
            if training
            else "-"
        )
        rows.append(
            (
                str(number),
                f"{draw['blow_ups']} of {draw['copies']}" if draw else "-",
                *(str(draw.get(name, "-")) for name in ("candidates", "chosen")),
                *(str(labels.get(name, "-")) for name in ("labelled", "failed")),
                change,
                done.get("check", {}).get("summary", "-"),
            )
        )
    widths = [max(len(row[k]) for row in rows) for k in range(len(head))]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
