"""Inputs of several models: replace the names of shared parts by the parts before the check, and restore them after."""

from __future__ import annotations

import copy
import dataclasses
import difflib
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from deepmd_muon.argcheck.errors import Problem
from deepmd_muon.model.branch_settings import ENTIRE, SHAREABLE, SINGLE, Shared, levels_of
from deepmd_muon.setting import shown

References = Mapping[str, Mapping[str, Shared]]
"""Shared parts, which stand in model/shared_dict, by name of the branch and of the part."""

# Keys of an input of one model, and their counterparts in an input of several.
_OF_ONE_MODEL = {
    "loss": "loss_dict",
    "replay": "training/data_dict/<branch>",
    "training/training_data": "training/data_dict/<branch>/training_data",
    "training/validation_data": "training/data_dict/<branch>/validation_data",
    "training/stat_file": "training/data_dict/<branch>/stat_file",
    **dict.fromkeys(
        (f"training/{name}" for name in ("numb_epoch", "num_epoch", "num_epochs", "numb_epochs")),
        "training/num_epoch_dict",
    ),
}
_NO_NAMES = ("RANDOM", SINGLE, "")


def is_multi_task(data: Mapping[str, Any]) -> bool:
    """Whether an input asks for several models."""
    model = data.get("model")
    return isinstance(model, dict) and "model_dict" in model


@dataclasses.dataclass
class Expanded:
    """An input of several models in which every branch is written out.

    Attributes
    ----------
    data
        The input; its own copy.
    references
        The entry of shared_dict for each shared part of each branch.
    problems
        Unknown, missing or mismatched names.
    notices
        One line for each entry of shared_dict that no branch uses.
    origins
        Where a path of the expanded input stands in the file.
    """

    data: dict[str, Any]
    references: dict[str, dict[str, Shared]] = dataclasses.field(default_factory=dict)
    problems: list[Problem] = dataclasses.field(default_factory=list)
    notices: list[str] = dataclasses.field(default_factory=list)
    origins: dict[str, str] = dataclasses.field(default_factory=dict)

    def origin(self, path: str) -> str:
        """Return where a path of the expanded input stands in the file."""
        place = path
        while place not in self.origins and "/" in place:
            place = place.rpartition("/")[0]
        return self.origins.get(place, place) + path[len(place) :]

    def located(self, found: Iterable[Problem]) -> list[Problem]:
        """Return the problems with their places in the file, a problem of a shared part once."""
        moved = [dataclasses.replace(problem, path=self.origin(problem.path)) for problem in found]
        known = {problem.path for problem in self.problems}
        first = {
            (problem.path, problem.message): problem
            for problem in moved
            if problem.path not in known
        }
        return [*self.problems, *first.values()]

    def problem(self, path: str, message: str) -> None:
        """Add a problem at a place in the file."""
        self.problems.append(Problem(path, message))


def expand(data: Mapping[str, Any]) -> Expanded:
    """Return a multi-task input with every branch written out: shared parts in full, common keys in each."""
    found = Expanded(copy.deepcopy(dict(data)))
    model = found.data["model"]
    branches = model["model_dict"]
    if not isinstance(branches, dict):
        return found  # the check reports this
    branches = {name: branch for name, branch in branches.items() if not str(name).startswith("_")}
    common = {key: model.pop(key) for key in [*model] if key not in ("model_dict", "shared_dict")}
    pool = model.pop("shared_dict", None) or {}
    if not isinstance(pool, dict):
        found.problem(
            "model/shared_dict", f"must be an object with parts by names; found {shown(pool)}"
        )
        pool = {}
    for name, branch in branches.items():
        where = f"model/model_dict/{name}"
        if not isinstance(name, str) or name in _NO_NAMES or {*name} & {".", "/"}:
            found.problem(
                where,
                "is no name of a branch: it must have neither . nor /, and not be "
                f"{_or(_NO_NAMES)}",
            )
        if isinstance(branch, dict):
            for key, value in common.items():
                if key not in branch and not key.startswith("_"):
                    branch[key] = copy.deepcopy(value)
                    found.origins[f"{where}/{key}"] = f"model/{key}"
            _replace_names(found, name, branch, pool)
    _check_sharing(found, branches)
    used = {shared.key for parts in found.references.values() for shared in parts.values()}
    unused = [key for key in pool if key not in used and not key.startswith("_")]
    found.notices += [
        f"model/shared_dict/{key} is left out: no branch refers to it" for key in unused
    ]
    _check_names(found, [*branches])
    return found


def _replace_names(
    found: Expanded, name: str, branch: dict[str, Any], pool: Mapping[str, Any]
) -> None:
    """Replace the names of shared parts in a branch by copies of the parts."""
    for part in SHAREABLE:
        given = branch.get(part)
        if not isinstance(given, str):
            continue
        where = found.origin(f"model/model_dict/{name}/{part}")
        key, colon, level = given.partition(":")
        if key not in pool:
            near = difflib.get_close_matches(key, [*pool], 1)
            hint = f"did you mean {near[0]!r}?" if near else f"it has {_or(pool) or 'nothing'}"
            found.problem(where, f"names {key!r}, which is not in model/shared_dict; {hint}")
            continue
        levels = levels_of(part, pool[key])
        if colon and (not level.isdigit() or int(level) not in levels):
            found.problem(
                where, f"must share at level {' or '.join(map(str, levels))}; found {given!r}"
            )
            level = ""
        branch[part] = copy.deepcopy(pool[key])
        found.origins[f"model/model_dict/{name}/{part}"] = f"model/shared_dict/{key}"
        found.references.setdefault(name, {})[part] = Shared(key, int(level or ENTIRE), given)


def _check_sharing(found: Expanded, branches: Mapping[str, Any]) -> None:
    """Compare the type maps of branches that share weights."""
    first: dict[str, str] = {}
    for name, parts in found.references.items():
        for part, shared in parts.items():
            if part == "type_map":
                continue
            base = first.setdefault(shared.key, name)
            own, other = (branches[each].get("type_map") for each in (name, base))
            if own != other and isinstance(own, list) and isinstance(other, list):
                where = found.origin(f"model/model_dict/{name}/type_map")
                which = f"the branch {base!r}, with which it shares {shared.key!r}"
                found.problem(where, f"must be that of {which}: {other}; found {own}")
                break  # once for each branch


def _check_names(found: Expanded, names: Collection[str]) -> None:
    """Check that losses, data, probabilities and epochs use the names of the branches."""
    for path, other in _OF_ONE_MODEL.items():
        section, _, key = path.rpartition("/")
        place = found.data.get(section) if section else found.data
        if isinstance(place, dict) and key in place:
            del place[key]
            found.problem(
                path, f"belongs to an input of one model; with model/model_dict, write {other}"
            )
    training = found.data.get("training")
    training = training if isinstance(training, dict) else {}
    places = {
        "loss_dict": found.data.get("loss_dict"),
        "training/data_dict": training.get("data_dict"),
    }
    places |= {
        f"training/{key}": training.get(key) or None for key in ("model_prob", "num_epoch_dict")
    }
    for path, given in places.items():
        if not isinstance(given, dict):
            continue
        wanted = "a section" if path in ("loss_dict", "training/data_dict") else "a number"
        for name in names:
            if name not in given:
                found.problem(f"{path}/{name}", f"is missing; give {wanted}")
        for name in given:
            if name not in names and not str(name).startswith("_"):
                near = difflib.get_close_matches(str(name), [*names], 1)
                hint = f"did you mean {near[0]!r}?" if near else f"there are {_or(names)}"
                found.problem(f"{path}/{name}", f"is no branch of model/model_dict; {hint}")


def fold(plain: Mapping[str, Any], references: References) -> dict[str, Any]:
    """Put the names of shared parts back into a normalised input, the inverse of `expand`."""
    pool: dict[str, Any] = {}
    branches = {}
    for name, branch in plain["model"]["model_dict"].items():
        parts = references.get(name, {})
        for part, shared in parts.items():
            pool.setdefault(shared.key, branch[part])
        branches[name] = {**branch, **{part: shared.given for part, shared in parts.items()}}
    return {**plain, "model": {"shared_dict": pool, "model_dict": branches}}


def _or(words: Iterable[Any]) -> str:
    return " or ".join(repr(word) for word in words)
