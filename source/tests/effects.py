"""Whether each setting has an effect on a result beside any other one, or an answer says that it has none."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from deepmd_muon.setting import InvalidSettingError, annotations_of, setting_of

Settings = frozenset[tuple[str, Any]]


class HashableDict(dict[str, Any]):
    """A map as the value of a setting; contexts are sets of values."""

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(frozenset(self.items()))


def values_of(section: type, name: str, given: Mapping[str, Sequence[Any]]) -> Sequence[Any]:
    """Return values of a setting besides its default: given ones, the other truth value, or the other choices."""
    declared: Any = section
    (field,) = (field for field in dataclasses.fields(declared) if field.name == name)
    if name in given:
        return [HashableDict(x) if isinstance(x, dict) else x for x in given[name]]
    if isinstance(field.default, bool):
        return [not field.default]
    choices = setting_of(field, annotations_of(section)[name]).choices
    assert choices is not None, f"{name}: give a value for the test"
    return [choice for choice in choices if choice != field.default]


def asks_for_nothing(section: type, name: str, value: Any) -> bool:
    """Return whether the declaration names a value, besides the default, as one that nobody misses an effect of."""
    declared: Any = section
    (field,) = (field for field in dataclasses.fields(declared) if field.name == name)
    return any(value in (needs.neutral or ()) for needs in setting_of(field).needs)


def wrong_answers(
    name: str,
    values: Sequence[Any],
    contexts: Sequence[Settings],
    outcome: Callable[[Settings], tuple[Any, frozenset[str]]],
    says_the_same: Callable[[Settings, Settings], bool],
) -> list[str]:
    """Return a line for each context in which a setting has an effect and an answer, or neither.

    `outcome` takes settings and returns the result, and the settings that an answer names. `says_the_same` tells
    whether settings with and without this one have the same meaning in other words. A context that excludes the setting
    is left out.
    """
    wrong = []
    for value in values:
        for context in contexts:
            settings = context | {(name, value)}
            try:
                without, _ = outcome(context)
                result, answered = outcome(settings)
            except InvalidSettingError:
                continue
            has_effect = result != without
            if has_effect == (name in answered) and not says_the_same(settings, context):
                what = "an effect" if has_effect else "no effect"
                wrong.append(f"{value!r} with {dict(context)}: {what}, answers {sorted(answered)}")
    return wrong
