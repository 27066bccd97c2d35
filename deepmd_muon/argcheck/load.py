"""Read an input file, check it, and write its normalised form."""

from __future__ import annotations

import dataclasses
import json
import math
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

# `lr_adjust_coeff` where the input leaves it open. Times `_ADAM_RATE` it is the largest root-mean-square step of a
# matrix entry, start_lr · lr_adjust_coeff, that it may give. After 3000 steps within 9 % of the best on five sets; on
# four after 30,000 steps the second one is ahead of AdamW, where the first is not everywhere (doc/benchmarks/race.md).
_MUON_COEFFICIENT, _MUON_COEFFICIENT_OF_LONG_RUNS = 8.64, 4.32
_SHORT_RUN = 10_000  # steps
_ADAM_RATE = 1e-3
# `adam_lr_ratio` of a short run whose input leaves both open, less where the Adam route would start above the second.
# DPA-3 then ends at half the error, other models where they end with 1; a long run on molecules is worse for it.
_ADAM_RATIO, _MOST_ADAM_RATE = 10.0, 1e-2
# Length of descriptors (root mean square over atoms, first weights) from which a scale falls as 1/length. A step
# changes what the fitting net's first matrix returns by rate · length: atoms with few and near neighbours saturate its
# tanh in a few steps, and all forces vanish. Lengths on water and alloys are 1 to 7, on small molecules 60 to 90
# (DPA-1) and 14 to 18 (DPA-3).
_LONG_FOR_MUON, _LONG_FOR_ADAM = 8.0, 16.0


@dataclasses.dataclass(frozen=True)
class OpenScales:
    """Scales of HybridMuon's two routes that an input omits.

    Attributes
    ----------
    names
        `lr_adjust_coeff`, and `adam_lr_ratio` where the input omits both.
    notice
        One of the notices of the input: what they take.
    """

    names: tuple[str, ...]
    notice: str


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
        not deepmd-kit's.
    open_scales
        The scales of HybridMuon that the input omits and the notice about them; None where it omits none, or keeps
        those of a run that it continues.
    """

    settings: Settings
    normalized: dict[str, Any]
    notices: tuple[str, ...] = ()
    open_scales: OpenScales | None = None

    def with_model(self, section: Mapping[str, Any]) -> Input:
        """Return the input with another section `model`, in its plain form; it is checked like any input."""
        complete = normalize({**self.normalized, "model": section})
        return dataclasses.replace(complete, notices=self.notices, open_scales=self.open_scales)

    def keeping_scale(self, group: Mapping[str, Any], source: str) -> Input:
        """Return the input with the scales of a run that it continues, where it omits them.

        Parameters
        ----------
        group
            A parameter group of the run; without `adam_lr_ratio` where deepmd-kit wrote it.
        source
            Its checkpoint, for the notice.
        """
        optimizer, given = self.settings.optimizer, self.open_scales
        if given is None or not isinstance(optimizer, HybridMuonConfig):
            return self
        scales: dict[str, Any] = {name: group.get(name) for name in given.names}
        kept = f"optimizer/lr_adjust_coeff is not given and stays {_written(scales)}, as in {source}"
        return dataclasses.replace(self._with(scales, kept), open_scales=None)

    def for_descriptors(self, length: float) -> Input:
        """Return the input with lower scales where it omits them and descriptors are long; else itself.

        Parameters
        ----------
        length
            Of the descriptors, see `descriptor_length`.
        """
        optimizer, given = self.settings.optimizer, self.open_scales
        if given is None or not isinstance(optimizer, HybridMuonConfig) or not 0.0 < length < math.inf:
            return self
        start_lr = self.settings.learning_rate.start_lr
        most = {
            "lr_adjust_coeff": _MUON_COEFFICIENT * _ADAM_RATE * _LONG_FOR_MUON / length / start_lr,
            "adam_lr_ratio": max(1.0, _MOST_ADAM_RATE * _LONG_FOR_ADAM / length / start_lr),
        }
        old = {name: getattr(optimizer, name) for name in given.names}
        scales = {name: min(value, float(f"{most[name]:.3g}")) for name, value in old.items()}
        if scales == old:
            return self
        lower = (
            f"optimizer/lr_adjust_coeff is not given and takes {_written(scales)}: descriptors are {length:.3g} long, "
            f"for which {_written(old)} would be too high (doc/learning-rate.md)"
        )
        return self._with(scales, lower)

    def _with(self, scales: Mapping[str, Any], notice: str) -> Input:
        """Return the input with these values of its open scales, and the notice about them."""
        optimizer, given = self.settings.optimizer, self.open_scales
        assert given is not None
        assert isinstance(optimizer, HybridMuonConfig)
        settings = dataclasses.replace(self.settings, optimizer=dataclasses.replace(optimizer, **scales))
        notices = tuple(notice if old == given.notice else old for old in self.notices)
        return Input(settings, thaw(settings), notices, OpenScales(given.names, notice))


def _written(scales: Mapping[str, Any]) -> str:
    """Return scales as a notice shows them: without an `adam_lr_ratio` of 1, which changes nothing."""
    ratio = scales.get("adam_lr_ratio") or 1.0
    return f"{scales['lr_adjust_coeff']:g}" + (f" and adam_lr_ratio {ratio:g}" if ratio != 1.0 else "")


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
    settings, scales = _with_scales(upgraded.data, checked.settings)
    notices = (*upgraded.notices, *checked.notices, *([scales.notice] if scales else []))
    return Input(settings, thaw(settings), notices, scales)


def _with_scales(data: Mapping[str, Any], settings: Settings) -> tuple[Settings, OpenScales | None]:
    """Choose the scale of HybridMuon's matrices, and the Adam route's, where the input leaves them open, and say so.

    deepmd-kit's 0.18 suits language models, and its own arithmetic keeps it. See doc/learning-rate.md.
    """
    optimizer, start_lr = settings.optimizer, settings.learning_rate.start_lr
    given = data.get("optimizer", {})
    if not isinstance(optimizer, HybridMuonConfig) or optimizer.deepmd_kit_arithmetic or "lr_adjust_coeff" in given:
        return settings, None
    if optimizer.explicit().scaling != "match_rms":
        return settings, None
    steps = settings.training.numb_steps
    short = steps is not None and steps <= _SHORT_RUN
    most = _MUON_COEFFICIENT if short else _MUON_COEFFICIENT_OF_LONG_RUNS
    theirs, ours = optimizer.lr_adjust_coeff, min(most, float(f"{most * _ADAM_RATE / start_lr:.3g}"))
    if ours == theirs:
        return settings, None
    scales: dict[str, Any] = {"lr_adjust_coeff": ours}
    if optimizer.adam_lr_ratio is None and optimizer.lr_adjust <= 0:
        ratio = max(1.0, min(_ADAM_RATIO, float(f"{_MOST_ADAM_RATE / start_lr:.3g}"))) if short else 1.0
        scales["adam_lr_ratio"] = ratio
    notice = (
        f"optimizer/lr_adjust_coeff is not given and takes {_written(scales)}, which suits force fields at start_lr "
        f"{start_lr:g} in a {'short' if short else 'long'} run; deepmd-kit takes {theirs:g} (doc/learning-rate.md)"
    )
    chosen = dataclasses.replace(settings, optimizer=dataclasses.replace(optimizer, **scales))
    return chosen, OpenScales(tuple(scales), notice)


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
