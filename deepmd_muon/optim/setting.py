"""One place for a setting: its default, meaning, choices and range stand on the dataclass field itself."""

from __future__ import annotations

import dataclasses
import functools
import math
import re
import types
import typing
from collections.abc import Collection
from numbers import Integral, Real
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
            return one_of(self.choices)
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


def one_of(choices: Collection[Any]) -> str:
    """Return the words for what a value must be where these are all there are: a single one stands for itself."""
    words = ", ".join(map(_shown, choices))
    return f"one of {words}" if len(choices) > 1 else words


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


def check_settings(settings: Any, of: str = "") -> None:
    """Raise `InvalidSettingError` naming every field of a settings dataclass that breaks its type or its own rules.

    The message starts with `of`, or the dataclass's name.
    """
    own: Any = type(settings)
    annotations = _annotations(own)
    problems = []
    for field in dataclasses.fields(settings):
        if "setting" in field.metadata:
            value, kind = getattr(settings, field.name), annotations[field.name]
            problem = setting_of(field).problem(value)
            if not _fits(value, kind):
                problem = f"must be {_words(kind)}; found {value!r}"
            if problem:
                problems.append(f"{field.name}: {problem}")
    if problems:
        raise InvalidSettingError(f"{of or type(settings).__name__}: " + "; ".join(problems))


@functools.cache
def _annotations(settings: type) -> dict[str, Any]:
    return typing.get_type_hints(settings)


_NAMES: dict[Any, tuple[str, str]] = {
    bool: ("true or false", "truth values"),
    int: ("a whole number", "whole numbers"),
    float: ("a finite number", "finite numbers"),
    str: ("a string", "strings"),
    type(None): ("None", "None"),
}


def _alternatives(kind: Any) -> tuple[Any, ...]:
    """Return the members of a union, or the annotation itself."""
    return typing.get_args(kind) if typing.get_origin(kind) in (typing.Union, types.UnionType) else (kind,)


def _fits(value: Any, kind: Any) -> bool:
    """Whether a value is of an annotated type; lists stand for tuples, and whole numbers for floats.

    Which member of a Literal it must be is said by the setting's choices; an annotation of another kind is not checked.
    """
    if len(members := _alternatives(kind)) > 1:
        return any(_fits(value, member) for member in members)
    parts = typing.get_args(kind)
    if typing.get_origin(kind) is typing.Literal:
        return any(type(value) is type(part) for part in parts)
    if typing.get_origin(kind) is tuple:
        if not isinstance(value, (tuple, list)):
            return False
        kinds = parts[:1] * len(value) if parts[-1] is Ellipsis else parts
        return len(kinds) == len(value) and all(map(_fits, value, kinds))
    if dataclasses.is_dataclass(kind):
        return isinstance(value, kind)  # type: ignore[arg-type]  # a class: annotations hold no instances
    if kind not in _NAMES:
        return True
    if kind in (int, float) and not isinstance(value, bool):
        return isinstance(value, Integral) if kind is int else isinstance(value, Real) and _finite(value)
    return isinstance(value, kind) and (kind is bool or not isinstance(value, bool))


def _finite(value: Real) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # a whole number that no float holds
        return False


def _words(kind: Any, *, plural: bool = False) -> str:
    """Say which values an annotation allows."""
    if len(members := _alternatives(kind)) > 1:
        return " or ".join(_words(member, plural=plural) for member in members)
    parts = typing.get_args(kind)
    if typing.get_origin(kind) is typing.Literal:
        return one_of(parts)
    if typing.get_origin(kind) is tuple:
        many = "" if parts[-1] is Ellipsis else f"{len(parts)} "
        return f"{'lists' if plural else 'a list'} of {many}{_words(parts[0], plural=True)}"
    return _NAMES[kind][plural] if kind in _NAMES else kind.__name__
