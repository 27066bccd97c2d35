"""Read an input file, check it, and write its normalised form."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from deepmd_muon.argcheck.check import check
from deepmd_muon.argcheck.elsewhere import only_in_deepmd_kit
from deepmd_muon.argcheck.errors import DeepmdKitOnlyError, InputError, Problem
from deepmd_muon.argcheck.files import read
from deepmd_muon.argcheck.legacy import upgrade
from deepmd_muon.argcheck.schema import tree
from deepmd_muon.argcheck.settings import Settings
from deepmd_muon.files import whole_file
from deepmd_muon.optim.config import HybridMuonConfig
from deepmd_muon.section import thaw
from deepmd_muon.setting import shown

# start_lr · lr_adjust_coeff, the root-mean-square step of a matrix entry: within 9 % of the best of a scan after 3000
# and after 18,000 steps, and the smallest value within 25 % of it (doc/benchmarks/convergence.md).
_GOOD_MUON_STEP = 0.00864
_LEAST_MUON_STEP = 0.00432


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
        One line for each older spelling that was translated, each key that has no effect, and each default that is
        seldom the best.
    """

    settings: Settings
    normalized: dict[str, Any]
    notices: tuple[str, ...] = ()


def normalize(data: Mapping[str, Any], source: str = "the input") -> Input:
    """Check the contents of an input.

    Parameters
    ----------
    data
        Content of an input file.
    source
        Name of the file for the message of an error.

    Raises
    ------
    DeepmdKitOnlyError
        When deepmd-kit, not this package, has the features that the input requests.
    InputError
        With every problem of the input at once.
    """
    if not isinstance(data, Mapping):
        raise InputError([Problem("", f"must be an object with sections; found {shown(data)}")], source)
    upgraded = upgrade(dict(data))
    checked = check(Settings, upgraded.data)
    elsewhere = only_in_deepmd_kit(upgraded.data, tree(Settings))
    found = [
        dataclasses.replace(problem, path=upgraded.origin(problem.path)) for problem in elsewhere or checked.problems
    ]
    problems = found if elsewhere else [*upgraded.problems, *found]
    if problems and all(problem.elsewhere for problem in problems):
        raise DeepmdKitOnlyError(problems, source)
    if problems or checked.settings is None:
        raise InputError(problems, source)
    notices = (*upgraded.notices, *checked.notices, *_open_muon_scale(upgraded.data, checked.settings))
    return Input(checked.settings, thaw(checked.settings), notices)


def _open_muon_scale(data: Mapping[str, Any], settings: Settings) -> list[str]:
    """Say what DeePMD's `lr_adjust_coeff` means when the input leaves it open and the step of Muon is small."""
    optimizer, start_lr = settings.optimizer, settings.learning_rate.start_lr
    if not isinstance(optimizer, HybridMuonConfig) or "lr_adjust_coeff" in data.get("optimizer", {}):
        return []
    matches_rms = optimizer.scaling == "match_rms" or (optimizer.scaling is None and optimizer.lr_adjust <= 0)
    step = start_lr * optimizer.lr_adjust_coeff
    if not matches_rms or step >= _LEAST_MUON_STEP:
        return []
    default, good = f"{optimizer.lr_adjust_coeff:g}", f"{_GOOD_MUON_STEP / start_lr:.3g}"
    return [
        f"optimizer/lr_adjust_coeff is not given and takes DeePMD's default {default}: with start_lr {start_lr:g} a "
        f"step moves an entry of a matrix by {step:.2g}, which is slow for force fields and on short runs loses to "
        f"Adam; set lr_adjust_coeff to {good} (doc/learning-rate.md), or to {default} to keep the default without "
        "this warning"
    ]


def load(path: str | os.PathLike[str]) -> Input:
    """Read and check an input file.

    Parameters
    ----------
    path
        A JSON file, or YAML when it ends in .yaml or .yml.

    Raises
    ------
    DeepmdKitOnlyError
        When deepmd-kit, not this package, has the features that the input requests.
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
