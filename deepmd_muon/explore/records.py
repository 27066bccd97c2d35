"""The contents of `round.json` and `made_from.json`.

They hold the results of the stages of a round, and what these depend on. This module imports
neither numpy nor torch.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, BinaryIO, Literal

from deepmd_muon.files import open_regular
from deepmd_muon.section import Section, section
from deepmd_muon.setting import setting

Stage = Literal["draw", "labels", "training", "check"]


@dataclasses.dataclass(frozen=True)
class DrawRecord(Section):
    """Results of a round's dynamics."""

    copies: int = setting(minimum=1, doc="Trajectories.")
    blow_ups: int = setting(minimum=0, doc="Trajectories that blew up.")
    followed: float = setting(minimum=0.0, doc="Time followed in all [ps].")
    candidates: int = setting(minimum=0, doc="Structures that left the data.")
    chosen: int = setting(minimum=1, doc="Structures chosen to be labelled.")


@dataclasses.dataclass(frozen=True)
class LabelsRecord(Section):
    """Results of labelling."""

    labelled: int = setting(minimum=1, doc="Structures with labels.")
    failed: int = setting(minimum=0, doc="Structures without, or with too large forces.")


@dataclasses.dataclass(frozen=True)
class TrainingRecord(Section):
    """Force errors on the new frames [eV/Å]; None if they have no forces."""

    error_before: float | None = setting(minimum=0.0, doc="Before the training.")
    error_after: float | None = setting(minimum=0.0, doc="After it.")


@dataclasses.dataclass(frozen=True)
class CheckRecord(Section):
    """Result of `dp check`."""

    verdict: str = setting(
        choices=("holds", "doubtful", "fails"), doc="The worst verdict of all items."
    )
    summary: str = setting(doc="The items that do not hold.")


@dataclasses.dataclass(frozen=True)
class RoundRecord(Section):
    """The stages of a round that are done."""

    draw: DrawRecord | None = section(None, doc="Dynamics and choice.")
    labels: LabelsRecord | None = section(None, doc="Labelling.")
    training: TrainingRecord | None = section(None, doc="Training.")
    check: CheckRecord | None = section(None, doc="The check of the first model.")

    @property
    def begun(self) -> bool:
        """Whether any stage is done."""
        return self != RoundRecord()


@dataclasses.dataclass(frozen=True)
class Origins(Section):
    """The content of `made_from.json`: what each stage depends on, by setting or file.

    The content of a file is recorded as its hash, which begins with `HASH`.
    """

    draw: Mapping[str, Any] | None = setting(None, doc="Origins of candidates.xyz.")
    labels: Mapping[str, Any] | None = setting(None, doc="Origins of the labels.")
    training: Mapping[str, Any] | None = setting(None, doc="Origins of the trained models.")
    check: Mapping[str, Any] | None = setting(None, doc="Origins of check.json.")


def flat(value: Any, name: str) -> dict[str, Any]:
    """Return nested settings as one map from paths, such as model/descriptor/rcut.

    Lists stay whole.
    """
    if not isinstance(value, Mapping):
        return {name: value}
    paths: dict[str, Any] = {}
    for key, inner in value.items():
        paths |= flat(inner, f"{name}/{key}")
    return paths


def hash_of(path: Path) -> str | None:
    """Return the hash of a file or of the files of a folder; None if there is neither.

    Raises
    ------
    OSError
        When a file cannot be read or is not a regular one.
    """
    if not path.exists():
        return None
    files = [path]
    if path.is_dir():
        files = sorted(file for file in path.rglob("*") if file.is_file())
    digest = hashlib.sha256()
    for file in files:
        with open_regular(file) as content:
            digest.update(f"{file.relative_to(path)} {_digest(content)}\n".encode())
    return f"{HASH}{digest.hexdigest()[:16]}"


def hash_of_words(words: Iterable[str]) -> str:
    """Return one hash of several."""
    return f"{HASH}{hashlib.sha256(' '.join(words).encode()).hexdigest()[:16]}"


def _digest(content: BinaryIO) -> str:
    digest = hashlib.sha256()
    while block := content.read(1 << 20):
        digest.update(block)
    return digest.hexdigest()


#: First characters of the hash of a file's content.
HASH = "sha256:"
# Differences that a message lists.
_MAX_SHOWN = 6


def differences(recorded: Mapping[str, Any], present: Mapping[str, Any]) -> list[str]:
    """Return in words how two origins of a stage differ; files that are gone are not compared."""
    changes = []
    for name in dict.fromkeys([*recorded, *present]):
        before = recorded.get(name)
        now = present.get(name)
        file_is_gone = name in present and now is None and _is_hash(before)
        if before == now or file_is_gone:
            continue
        if _is_hash(before) or _is_hash(now):
            changes.append(f"{name} has another content")
        else:
            changes.append(f"{name} was {_shown(before)}, is {_shown(now)}")
    if len(changes) > _MAX_SHOWN:
        return [*changes[:_MAX_SHOWN], f"and {len(changes) - _MAX_SHOWN} more"]
    return changes


def _is_hash(value: object) -> bool:
    return isinstance(value, str) and value.startswith(HASH)


def _shown(value: object) -> str:
    text = "not set" if value is None else repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
