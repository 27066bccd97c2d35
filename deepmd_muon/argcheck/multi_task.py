"""Inputs of several models, which may share parts.

Before the check, `expand` replaces the names of shared parts by the parts. `fold` puts the names
back into a normalised input.
"""

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
"""The entry of model/shared_dict for each shared part of each branch."""

# Keys of an input of one model, and their counterparts in an input of several.
_SINGLE_MODEL_KEYS = {
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
    """An input in which every branch is written out; an input of one model as it is.

    Attributes
    ----------
    data
        The input.
    references
        The entry of shared_dict for each shared part of each branch.
    problems
        Unknown, missing or mismatched names.
    notices
        One line for each entry of shared_dict that no branch uses.
    origins
        The path in the file of each path of the expanded input that is elsewhere there.
    """

    data: dict[str, Any]
    references: dict[str, dict[str, Shared]] = dataclasses.field(default_factory=dict)
    problems: list[Problem] = dataclasses.field(default_factory=list)
    notices: list[str] = dataclasses.field(default_factory=list)
    origins: dict[str, str] = dataclasses.field(default_factory=dict)

    def report(self, path: str, message: str) -> None:
        """Add a problem at a path in the file."""
        self.problems.append(Problem(path, message))

    def origin(self, path: str) -> str:
        """Return the path in the file of a path of the expanded input."""
        place = path
        while place not in self.origins and "/" in place:
            place = place.rpartition("/")[0]
        return self.origins.get(place, place) + path[len(place) :]

    def located(self, problems: Iterable[Problem]) -> list[Problem]:
        """Return all problems with their paths in the file, a problem of a shared part once.

        `problems` have paths of the expanded input. They give way to those found by `expand`.
        """
        reported = {problem.path for problem in self.problems}
        unique: dict[tuple[str, str], Problem] = {}
        for problem in problems:
            path = self.origin(problem.path)
            if path not in reported:
                unique.setdefault((path, problem.message), dataclasses.replace(problem, path=path))
        return [*self.problems, *unique.values()]


def expand(data: Mapping[str, Any]) -> Expanded:
    """Return a multi-task input with every branch written out.

    A branch gets its shared parts in full, and a copy of each key that is common to all branches.
    """
    expanded = Expanded(copy.deepcopy(dict(data)))
    model = expanded.data["model"]
    branches = model["model_dict"]
    if not isinstance(branches, dict):
        return expanded  # the check reports this
    branches = {name: branch for name, branch in branches.items() if not str(name).startswith("_")}
    shared_dict = model.pop("shared_dict", None) or {}
    if not isinstance(shared_dict, dict):
        expanded.report(
            "model/shared_dict",
            f"must be an object with parts by names; found {shown(shared_dict)}",
        )
        shared_dict = {}
    common = {key: model.pop(key) for key in [*model] if key != "model_dict"}
    for name, branch in branches.items():
        path = f"model/model_dict/{name}"
        if not isinstance(name, str) or name in _NO_NAMES or {*name} & {".", "/"}:
            expanded.report(
                path,
                "is no name of a branch: it must have neither . nor /, and not be "
                f"{_or(_NO_NAMES)}",
            )
        if isinstance(branch, dict):
            for key, value in common.items():
                if key not in branch and not key.startswith("_"):
                    branch[key] = copy.deepcopy(value)
                    expanded.origins[f"{path}/{key}"] = f"model/{key}"
            _insert_shared_parts(expanded, name, branch, shared_dict)
    _check_type_maps(expanded, branches)
    used = {shared.key for sections in expanded.references.values() for shared in sections.values()}
    for key in shared_dict:
        if key not in used and not key.startswith("_"):
            expanded.notices.append(f"model/shared_dict/{key} is left out: no branch refers to it")
    _report_single_model_keys(expanded)
    _check_names(expanded, [*branches])
    return expanded


def _insert_shared_parts(
    expanded: Expanded, name: str, branch: dict[str, Any], shared_dict: Mapping[str, Any]
) -> None:
    """Replace the names of shared parts in a branch by copies of the parts."""
    for section in SHAREABLE:
        reference = branch.get(section)
        if not isinstance(reference, str):
            continue
        path = f"model/model_dict/{name}/{section}"
        origin = expanded.origin(path)
        key, colon, level = reference.partition(":")
        if key not in shared_dict:
            near = difflib.get_close_matches(key, [*shared_dict], 1)
            hint = f"it has {_or(shared_dict) or 'nothing'}"
            if near:
                hint = f"did you mean {near[0]!r}?"
            expanded.report(origin, f"names {key!r}, which is not in model/shared_dict; {hint}")
            continue
        levels = levels_of(section, shared_dict[key])
        if colon and (not level.isdigit() or int(level) not in levels):
            allowed = " or ".join(map(str, levels))
            expanded.report(origin, f"must share at level {allowed}; found {reference!r}")
            level = ""
        branch[section] = copy.deepcopy(shared_dict[key])
        expanded.origins[path] = f"model/shared_dict/{key}"
        references = expanded.references.setdefault(name, {})
        references[section] = Shared(key=key, level=int(level or ENTIRE), given=reference)


def _check_type_maps(expanded: Expanded, branches: Mapping[str, Any]) -> None:
    """Check that branches that share weights have the same type map."""
    first_user: dict[str, str] = {}  # of each entry of shared_dict
    for name, references in expanded.references.items():
        for section, shared in references.items():
            if section == "type_map":
                continue
            base = first_user.setdefault(shared.key, name)
            type_map = branches[name].get("type_map")
            base_map = branches[base].get("type_map")
            both_lists = isinstance(type_map, list) and isinstance(base_map, list)
            if both_lists and type_map != base_map:
                expanded.report(
                    expanded.origin(f"model/model_dict/{name}/type_map"),
                    f"must be that of the branch {base!r}, with which it shares {shared.key!r}: "
                    f"{base_map}; found {type_map}",
                )
                break  # once for each branch


def _report_single_model_keys(expanded: Expanded) -> None:
    """Remove keys of an input of one model and report them."""
    for path, counterpart in _SINGLE_MODEL_KEYS.items():
        section_name, _, key = path.rpartition("/")
        section = expanded.data.get(section_name) if section_name else expanded.data
        if isinstance(section, dict) and key in section:
            del section[key]
            expanded.report(
                path,
                f"belongs to an input of one model; with model/model_dict, write {counterpart}",
            )


def _check_names(expanded: Expanded, names: Collection[str]) -> None:
    """Check that losses, data, probabilities and epochs use the names of the branches."""
    training = expanded.data.get("training")
    if not isinstance(training, dict):
        training = {}
    required_sections = {
        "loss_dict": expanded.data.get("loss_dict"),
        "training/data_dict": training.get("data_dict"),
    }
    optional_numbers = {
        "training/model_prob": training.get("model_prob") or None,
        "training/num_epoch_dict": training.get("num_epoch_dict") or None,
    }
    for path, by_name in {**required_sections, **optional_numbers}.items():
        if not isinstance(by_name, dict):
            continue  # absent, or reported by the check
        needed = "a section" if path in required_sections else "a number"
        for name in names:
            if name not in by_name:
                expanded.report(f"{path}/{name}", f"is missing; give {needed}")
        for name in by_name:
            if name not in names and not str(name).startswith("_"):
                near = difflib.get_close_matches(str(name), [*names], 1)
                hint = f"did you mean {near[0]!r}?" if near else f"there are {_or(names)}"
                expanded.report(f"{path}/{name}", f"is no branch of model/model_dict; {hint}")


def fold(plain: Mapping[str, Any], references: References) -> dict[str, Any]:
    """Put the names of shared parts back into a normalised input, the inverse of `expand`."""
    shared_dict: dict[str, Any] = {}
    branches = {}
    for name, branch in plain["model"]["model_dict"].items():
        branches[name] = dict(branch)
        for section, shared in references.get(name, {}).items():
            shared_dict.setdefault(shared.key, branch[section])
            branches[name][section] = shared.given
    return {**plain, "model": {"shared_dict": shared_dict, "model_dict": branches}}


def _or(words: Iterable[Any]) -> str:
    return " or ".join(repr(word) for word in words)
