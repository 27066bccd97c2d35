"""One place for a setting: its default, meaning, choices and range stand on the dataclass field itself."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

from deepmd_muon.optim.errors import InvalidSettingError


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
    pattern, forms
        Regular expression that a string must match in full, and the same in words for messages.
    note
        Why the rules are as they are; stands behind the message when a value breaks them.
    lone
        Whether a single value stands for a list of one.
    """

    doc: str
    alias: tuple[str, ...] = ()
    choices: tuple[Any, ...] | None = None
    minimum: float | None = None
    maximum: float | None = None
    above: float | None = None
    below: float | None = None
    pattern: str | None = None
    forms: str = ""
    note: str = ""
    lone: bool = False

    def problem(self, value: Any) -> str | None:
        """Say in one phrase what is wrong with `value`, or return None when nothing is.

        Bounds, choices and pattern hold for a scalar and for every element of a list.
        """
        if isinstance(value, (tuple, list)):
            return next((found for found in map(self.problem, value) if found), None)
        rule = self._broken_rule(value)
        return f"must be {rule}; found {_shown(value)}" + (f" ({self.note})" if self.note else "") if rule else None

    def _broken_rule(self, value: Any) -> str | None:
        """Return the words for the rule that a scalar breaks, if any."""
        if value is None:
            return None
        if self.choices is not None and value not in self.choices:
            words = ", ".join(map(_shown, self.choices))
            return f"one of {words}" if len(self.choices) > 1 else words
        if self.pattern is not None and isinstance(value, str) and not re.fullmatch(self.pattern, value):
            return self.forms or f"a match of {self.pattern}"
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            return None
        bounds = (
            (self.minimum, lambda b: value >= b, ">="),
            (self.maximum, lambda b: value <= b, "<="),
            (self.above, lambda b: value > b, ">"),
            (self.below, lambda b: value < b, "<"),
        )
        broken = [f"{sign} {bound:g}" for bound, holds, sign in bounds if bound is not None and not holds(bound)]
        return " and ".join(broken) or None


def _shown(value: Any) -> str:
    """Return a value as a message shows it: truth values and whole numbers as in JSON."""
    return str(value).lower() if isinstance(value, bool) else repr(value).removesuffix(".0")


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
    """Raise `InvalidSettingError` naming every field of a settings dataclass that breaks its own rules."""
    problems = []
    for field in dataclasses.fields(settings):
        if "setting" in field.metadata:
            problem = setting_of(field).problem(getattr(settings, field.name))
            if problem:
                problems.append(f"{field.name}: {problem}")
    if problems:
        raise InvalidSettingError(f"{type(settings).__name__}: " + "; ".join(problems))
