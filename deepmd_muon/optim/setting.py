"""One place for a setting: its default, meaning, choices and range stand on the dataclass field itself."""

from __future__ import annotations

import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True)
class Setting:
    """What a reader, a checker and a reference page need to know about one field.

    Attributes
    ----------
    doc
        What the setting does, in one or two sentences, with units.
    alias
        Other spellings that an input may use.
    choices
        Every allowed value, or None when the type alone decides.
    minimum, maximum
        Inclusive bounds.
    above, below
        Exclusive bounds.
    """

    doc: str
    alias: tuple[str, ...] = ()
    choices: tuple[Any, ...] | None = None
    minimum: float | None = None
    maximum: float | None = None
    above: float | None = None
    below: float | None = None

    def problem(self, value: Any) -> str | None:
        """Say in one phrase what is wrong with `value`, or return None when nothing is."""
        if value is None:
            return None
        if self.choices is not None and value not in self.choices:
            return f"must be one of {', '.join(map(repr, self.choices))}; found {value!r}"
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            return None
        bounds = (
            (self.minimum, lambda b: value >= b, ">="),
            (self.maximum, lambda b: value <= b, "<="),
            (self.above, lambda b: value > b, ">"),
            (self.below, lambda b: value < b, "<"),
        )
        broken = [f"{sign} {bound:g}" for bound, holds, sign in bounds if bound is not None and not holds(bound)]
        return f"must be {' and '.join(broken)}; found {value!r}" if broken else None


def setting(default: Any = dataclasses.MISSING, *, doc: str, **rules: Any) -> Any:
    """Declare a dataclass field that carries its `Setting`.

    Parameters
    ----------
    default
        The field's default; a mutable one is not allowed. Left out, the field is required.
    doc, **rules
        As in `Setting`.
    """
    return dataclasses.field(default=default, metadata={"setting": Setting(doc, **rules)})


def setting_of(field: dataclasses.Field[Any]) -> Setting:
    """Return the `Setting` that `setting` attached to a dataclass field."""
    found = field.metadata["setting"]
    assert isinstance(found, Setting)
    return found


def check_settings(settings: Any) -> None:
    """Raise ValueError naming every field of a settings dataclass that breaks its own rules."""
    problems = []
    for field in dataclasses.fields(settings):
        if "setting" in field.metadata:
            problem = setting_of(field).problem(getattr(settings, field.name))
            if problem:
                problems.append(f"{field.name}: {problem}")
    if problems:
        raise ValueError(f"{type(settings).__name__}: " + "; ".join(problems))
