"""Read an input file, check it, and write its normalised form."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from deepmd_muon.argcheck.check import check
from deepmd_muon.argcheck.errors import InputError, Problem
from deepmd_muon.argcheck.files import read
from deepmd_muon.argcheck.legacy import upgrade
from deepmd_muon.argcheck.schema import thaw
from deepmd_muon.argcheck.settings import Settings
from deepmd_muon.setting import shown
from deepmd_muon.whole_file import whole_file


@dataclasses.dataclass(frozen=True)
class Input:
    """An input that has passed every check.

    Attributes
    ----------
    settings
        The input as frozen dataclasses.
    normalized
        The same as plain dicts and lists, in today's spelling and with every default filled in. This is what
        `out.json` holds; giving it back gives the same again.
    notices
        One line for each older spelling that was translated and each key that has no effect.
    """

    settings: Settings
    normalized: dict[str, Any]
    notices: tuple[str, ...] = ()


def normalize(data: Mapping[str, Any], source: str = "the input") -> Input:
    """Check the contents of an input.

    Parameters
    ----------
    data
        What an input file holds.
    source
        Name of the file for the message of an error.

    Raises
    ------
    InputError
        With every problem of the input at once.
    """
    if not isinstance(data, Mapping):
        raise InputError([Problem("", f"must be an object with sections; found {shown(data)}")], source)
    upgraded = upgrade(dict(data))
    checked = check(Settings, upgraded.data)
    problems = [
        *upgraded.problems,
        *(Problem(upgraded.origin(problem.path), problem.message) for problem in checked.problems),
    ]
    if problems or checked.settings is None:
        raise InputError(problems, source)
    return Input(checked.settings, thaw(checked.settings), (*upgraded.notices, *checked.notices))


def load(path: str | os.PathLike[str]) -> Input:
    """Read and check an input file.

    Parameters
    ----------
    path
        A JSON file, or YAML when it ends in .yaml or .yml.

    Raises
    ------
    InputError
        When the file cannot be read or parsed, or with every problem of its contents at once.
    """
    return normalize(read(Path(path)), str(path))


def dump(normalized: Mapping[str, Any], path: str | os.PathLike[str]) -> None:
    """Write a normalised input as JSON; a reader sees the old file or the new one, never a part.

    Parameters
    ----------
    normalized
        `Input.normalized`.
    path
        File to write, usually out.json.
    """
    with whole_file(Path(path)) as file:
        file.write((json.dumps(normalized, indent=4, ensure_ascii=False) + "\n").encode())
