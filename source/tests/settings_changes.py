"""Each setting of a section changed from its default, as its declaration allows.

For tests of fast paths: with each change, a gate says no, or the fast path gives the results of the slow one. The
changes follow from the dataclass, so a new setting takes part by itself, or fails the test until someone says how.
"""

from __future__ import annotations

import dataclasses
import typing
from typing import Any

from deepmd_muon.setting import alternatives_of, annotations_of, setting_of


def changes_of(
    section: Any, examples: dict[str, list[dict[str, Any]]] | None = None
) -> dict[str, dict[str, Any]]:
    """Return changes of every setting of a section, by a name for the case.

    Parameters
    ----------
    section
        The settings from which a change starts.
    examples
        Changes of the settings that no other value can be derived for, or that need other settings beside them.

    Raises
    ------
    AssertionError
        When a setting has neither an example nor a value that follows from its declaration, or an example is of no
        setting.
    """
    examples = examples or {}
    fields = {field.name: field for field in dataclasses.fields(section)}
    assert examples.keys() <= fields.keys(), f"no settings: {examples.keys() - fields.keys()}"
    annotations = annotations_of(type(section))
    cases = {}
    for name, field in fields.items():
        before = getattr(section, name)
        changes = examples.get(name)
        if changes is None:
            values = other_values(field, annotations[name], before)
            assert values is not None, f"{type(section).__name__}.{name}: give an example of it"
            changes = [{name: value} for value in values]
        for change in changes:
            assert name in change
            assert change[name] != before, f"{name} is {before} anyway"
            cases[", ".join(f"{key} {value}" for key, value in change.items())] = change
    return cases


def other_values(field: dataclasses.Field[Any], annotation: Any, before: Any) -> list[Any] | None:
    """Return other values of a setting, none if it has a single choice; None where nothing follows."""
    declared = setting_of(field, annotation)
    if declared.choices is not None:
        return [choice for choice in declared.choices if choice != before]
    kinds = [kind for kind in alternatives_of(annotation) if kind is not type(None)]
    if isinstance(before, bool) or (before is None and bool in kinds):
        return [not before]
    number = typing.cast(Any, next((kind for kind in kinds if kind in (int, float)), None))
    if number is None or isinstance(before, str):
        return None
    scaled = [float(f"{scale * (before or 1.0):.6g}") for scale in (0.7, 1.5)]
    wanted = [3, 2, 1] if number is int else scaled
    allowed = [x for x in wanted if x != before and declared.problem(x) is None]
    return allowed[:1] or None
