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
from deepmd_muon.optim.omitted_scales import OmittedScales, omitted_scales
from deepmd_muon.section import thaw
from deepmd_muon.setting import shown

_NO_OPTIMIZER = (
    'optimizer is not given and is Adam, as in deepmd-kit; "optimizer": {"type": "HybridMuon"} would orthogonalize the '
    "updates of weight matrices and leave the rest to Adam (doc/optimizer.md; results in doc/benchmarks/race.md)"
)


@dataclasses.dataclass(frozen=True)
class Input:
    """An input that has passed every check.

    Attributes
    ----------
    settings
        Everything it says, as frozen dataclasses.
    source
        Name of its file.
    notices
        One line for each older spelling that was translated, and each key that has no effect.
    remarks
        One line where the input leaves out the optimizer.
    scales
        The scales of HybridMuon that it omits; None where it omits none.
    """

    settings: Settings
    source: str = dataclasses.field(default="the input", compare=False)
    notices: tuple[str, ...] = ()
    remarks: tuple[str, ...] = ()
    scales: OmittedScales | None = None

    @property
    def normalized(self) -> dict[str, Any]:
        """The settings as plain dicts and lists, in today's spelling and with every default filled in.

        This is what `out.json` holds; giving it back gives the same again.
        """
        plain: dict[str, Any] = thaw(self.settings)
        return plain

    def changed(self, **sections: Any) -> Input:
        """Return the input with other settings of some sections."""
        return dataclasses.replace(self, settings=dataclasses.replace(self.settings, **sections))

    def with_scales(self, scales: OmittedScales) -> Input:
        """Return the input whose optimizer takes these scales."""
        optimizer = dataclasses.replace(self.settings.optimizer, **scales.values)
        return dataclasses.replace(self.changed(optimizer=optimizer), scales=scales)


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
    remarks = () if "optimizer" in upgraded.data else (_NO_OPTIMIZER,)
    given = Input(checked.settings, source, (*upgraded.notices, *checked.notices), remarks)
    scales = omitted_scales(
        checked.settings.optimizer,
        upgraded.data.get("optimizer", {}),
        checked.settings.learning_rate.start_lr,
        checked.settings.training.numb_steps,
    )
    return given.with_scales(scales) if scales else given


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
