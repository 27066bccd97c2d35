"""Declaration of a setting, and the check of a value against its annotated type, with messages.

The dataclass field of a setting holds its default, meaning, choices and range. This module imports
neither the rest of the package nor torch.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import math
import operator
import re
import types
import typing
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from numbers import Integral, Real
from typing import Any

# Bounds on any setting: larger numbers soon overflow float32, and larger whole numbers do not fit
# in 64 bits.
_LARGEST = 1e30
_LARGEST_INTEGER = 2**63 - 1


class InvalidSettingError(ValueError):
    """Settings are unknown, of a wrong type, out of their range or not among their choices.

    Attributes
    ----------
    problems
        One phrase per setting that is wrong.
    """

    def __init__(self, message: str, problems: Sequence[str] = ()) -> None:
        self.problems = tuple(problems) or (message,)
        super().__init__(message)


@dataclasses.dataclass(frozen=True)
class Needs:
    """A condition on other settings of the same section, without which a setting has no effect.

    Attributes
    ----------
    reads
        Names of the other settings. A class without one of them passes None.
    holds
        Whether their values, in this order, let the setting have an effect.
    words
        The condition, as messages and the reference say it after "without": "normuon true".
    neutral
        Values of the setting that ask for nothing, so that nobody misses an effect; None means its
        default alone.
    """

    reads: tuple[str, ...]
    holds: Callable[..., bool]
    words: str
    neutral: tuple[Any, ...] | None = None

    def problem(self, of: Any) -> str | None:
        """Describe in one phrase why the setting has no effect beside the other settings of `of`.

        None if it has one.

        `of` returns the value of a setting by its name.
        """
        values = [of(name) for name in self.reads]
        if self.holds(*values):
            return None
        found = ", ".join(
            f"{name} {_as_json(value)}" for name, value in zip(self.reads, values, strict=True)
        )
        return f"has no effect without {self.words}; found {found}"


def switched_on(name: str) -> Needs:
    """Return the condition that a switch is true."""
    return Needs((name,), bool, f"{name} true")


def above_zero(name: str, neutral: tuple[Any, ...] | None = None) -> Needs:
    """Return the condition that a number is above 0."""
    return Needs((name,), bool, f"{name} above 0", neutral)


@dataclasses.dataclass(frozen=True)
class Setting:
    """Metadata of one field, for readers, checkers and the reference page.

    Attributes
    ----------
    doc
        Effect of the setting, in one or two sentences, with units.
    alias
        Other spellings that an input may use.
    choices
        Every allowed value, or None if only the type matters.
    minimum, maximum
        Inclusive bounds.
    above, below
        Exclusive bounds.
    pattern, forms
        Regular expression that a string must match in full, and a description of it for messages.
    note
        Reason for the rules; messages about a value that violates them end with it.
    lone
        Whether a single value stands for a list of one.
    nonempty
        Whether a list must have an element.
    any_case
        Whether upper and lower case are equivalent, as in deepmd-kit; settings keep the string in
        lower case.
    needs
        Conditions on other settings, without which this one has no effect.
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
    nonempty: bool = False
    any_case: bool = False
    needs: tuple[Needs, ...] = ()

    def idle(self, value: Any, default: Any, of: Callable[[str], Any]) -> str | None:
        """Describe in one phrase why a value has no effect.

        None if it has one, or if it asks for nothing.

        `of` returns the value of another setting of the section by its name.
        """
        for needs in self.needs:
            neutral = (default,) if needs.neutral is None else needs.neutral
            if value not in neutral and (problem := needs.problem(of)):
                return problem
        return None

    def folded(self, value: Any) -> Any:
        """Return a value as settings keep it: with `any_case`, a string in lower case."""
        return value.lower() if self.any_case and isinstance(value, str) else value

    def problem(self, value: Any) -> str | None:
        """Describe in one phrase the problem of `value`, or return None.

        Bounds, choices and pattern apply to a scalar, and to every element of a list or value of a
        map.
        """
        if isinstance(value, Mapping):
            return next((found for found in map(self.problem, value.values()) if found), None)
        if isinstance(value, (tuple, list)):
            empty = (
                "must have at least one element; found an empty list"
                if self.nonempty and not value
                else None
            )
            return empty or next((found for found in map(self.problem, value) if found), None)
        rule = self._broken_rule(value)
        if rule is None:
            return None
        hint = did_you_mean(self._nearest(value))
        note = f" ({self.note})" if self.note else ""
        return f"must be {rule}; found {literal(value)}{hint}{note}"

    def mismatch(self, value: Any, annotation: Any, words: str) -> str:
        """Describe the problem of a value of the wrong type.

        A setting with names for its values lists them.

        `words` is the description by the type alone.
        """
        if self.choices is not None:
            return f"must be {one_of(self.choices)}; found {shown(value)}"
        if self.forms and str in alternatives_of(annotation):
            return f"must be {self.forms}; found {shown(value)}"
        return words

    def _nearest(self, value: Any) -> str | None:
        """Return the choice, or the name among the forms, that a wrong string probably means."""
        if not isinstance(value, str) or ":" in value:
            return None
        names = [choice for choice in self.choices or () if isinstance(choice, str)]
        if self.pattern is not None:
            quoted = re.findall(r"""["']([^"']+)["']""", self.forms)
            names += [name for name in quoted if re.fullmatch(self.pattern, name)]
        # A number tells values apart: 'float16' is not a misspelled 'bfloat16'.
        cutoff = 1.0 if any(letter.isdigit() for letter in value) else 0.7
        return nearest_of(value, names, cutoff)

    def _broken_rule(self, value: Any) -> str | None:
        """Describe the rule that a scalar violates; None if it violates none."""
        if value is None:
            return None
        value = self.folded(value)
        if self.choices is not None and value not in self.choices:
            return one_of(self.choices)
        if (
            self.pattern is not None
            and isinstance(value, str)
            and not re.fullmatch(self.pattern, value)
        ):
            return self.forms or f"a match of {self.pattern}"
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            return None
        largest = _LARGEST_INTEGER if isinstance(value, int) else _LARGEST
        if abs(value) > largest:
            return f"at most {largest:.3g} in size"
        bounds = (
            (self.minimum, lambda b: value >= b, ">="),
            (self.maximum, lambda b: value <= b, "<="),
            (self.above, lambda b: value > b, ">"),
            (self.below, lambda b: value < b, "<"),
        )
        broken = [
            f"{sign} {bound:g}"
            for bound, holds, sign in bounds
            if bound is not None and not holds(bound)
        ]
        return " and ".join(broken) or None


def setting(default: Any = dataclasses.MISSING, *, doc: str, **rules: Any) -> Any:
    """Declare a dataclass field that carries its `Setting`.

    Without a default, the field is required.
    """
    return dataclasses.field(default=default, metadata={"setting": Setting(doc, **rules)})


def setting_like(settings: type, name: str, default: Any = dataclasses.MISSING) -> Any:
    """Declare a dataclass field with rules and text of another class's field, and its default or the given one."""
    declared: Any = settings
    (field,) = (field for field in dataclasses.fields(declared) if field.name == name)
    default = field.default if default is dataclasses.MISSING else default
    return dataclasses.field(
        default=default, metadata={"setting": dataclasses.replace(setting_of(field), alias=())}
    )


def setting_of(field: dataclasses.Field[Any], annotation: Any = None) -> Setting:
    """Return the `Setting` that `setting` attached to a dataclass field.

    A Literal annotation gives its choices.
    """
    found = field.metadata["setting"]
    assert isinstance(found, Setting)
    literals = [
        kind for kind in alternatives_of(annotation) if typing.get_origin(kind) is typing.Literal
    ]
    if found.choices is None and len(literals) == 1:
        return dataclasses.replace(found, choices=typing.get_args(literals[0]))
    return found


def check_settings(settings: Any, of: str = "") -> None:
    """Raise `InvalidSettingError` naming every field of a settings dataclass that violates its type or rules.

    Strings with `any_case` become lower case. The message starts with `of`, or with the dataclass's
    name.
    """
    kind: Any = type(settings)
    problems = []
    for name, annotation, own in _declared(kind):
        value = getattr(settings, name)
        fitted = convert(value, annotation, exact=True)
        if not isinstance(fitted, Mismatch):
            problem = own.problem(value)
        elif fitted.is_of_elements:
            problem = fitted.words
        else:
            problem = own.mismatch(value, annotation, fitted.words)
        if problem:
            problems.append(f"{name}: {problem}")
        elif own.any_case:
            object.__setattr__(settings, name, own.folded(value))
    if problems:
        raise InvalidSettingError(
            f"{of or type(settings).__name__}: " + "; ".join(problems), problems
        )


def idle_settings(settings: Any) -> dict[str, str]:
    """Return the settings of a dataclass that have no effect beside its others, each with the reason.

    A setting with its default, or with another value that asks for nothing, is not among them.
    """
    kind: Any = type(settings)
    defaults = {field.name: field.default for field in dataclasses.fields(kind)}
    reasons = {
        name: own.idle(
            getattr(settings, name), defaults[name], lambda other: getattr(settings, other, None)
        )
        for name, _, own in _declared(kind)
    }
    return {name: reason for name, reason in reasons.items() if reason}


@functools.cache
def _declared(settings: Any) -> tuple[tuple[str, Any, Setting], ...]:
    """Return name, annotation and `Setting` of the fields of a settings dataclass that have one."""
    annotations = annotations_of(settings)
    fields = [field for field in dataclasses.fields(settings) if "setting" in field.metadata]
    return tuple((f.name, annotations[f.name], setting_of(f, annotations[f.name])) for f in fields)


@functools.cache
def annotations_of(settings: type) -> dict[str, Any]:
    """Return the evaluated annotations of a settings dataclass, with `tuple[X, ...]` for `Sequence[X]`."""
    return {
        name: _as_tuple(annotation) for name, annotation in typing.get_type_hints(settings).items()
    }


def _as_tuple(annotation: Any) -> Any:
    """Return an annotation with `tuple[X, ...]` for `Sequence[X]`."""
    if typing.get_origin(annotation) is Sequence:
        return types.GenericAlias(tuple, (_as_tuple(typing.get_args(annotation)[0]), ...))
    members = alternatives_of(annotation)
    return (
        functools.reduce(operator.or_, map(_as_tuple, members)) if len(members) > 1 else annotation
    )


@dataclasses.dataclass(frozen=True)
class Mismatch:
    """The reasons why a value does not have the type of its setting.

    Attributes
    ----------
    found
        For each fault, its indices inside nested lists, and a function that describes it. Most
        mismatches are attempts without a reader, and describing a tensor takes milliseconds.
    """

    found: tuple[tuple[tuple[int | str, ...], Callable[[], str]], ...]

    @property
    def faults(self) -> tuple[tuple[tuple[int | str, ...], str], ...]:
        """Indices inside nested lists, and a description of expected type and found value, of each fault."""
        return tuple((where, word()) for where, word in self.found)

    @property
    def is_of_elements(self) -> bool:
        """Whether the value has the right type, but elements of it do not."""
        return bool(self.found[0][0])

    @property
    def words(self) -> str:
        """Description of the first fault, with its indices inside nested lists."""
        where, word = self.found[0]
        return f"element {'/'.join(map(str, where))} {word()}" if where else word()


def convert(value: Any, annotation: Any, *, exact: bool = False) -> Any:
    """Return `value` as the annotated type, or a `Mismatch` when it does not fit.

    A list becomes a tuple, a whole number stands for a float, and a float without a fraction (1e6)
    for a whole number unless `exact`. A truth value is never a number; NaN and infinity are
    rejected. Of a Literal, only the type of its members is checked here; `Setting.problem` compares
    with `choices`. Other kinds of annotations take any value.
    """
    if annotation is Any:
        return value
    members = alternatives_of(annotation)
    if len(members) > 1:
        return _convert_any(value, members, annotation, exact=exact)
    if typing.get_origin(annotation) is tuple:
        return _convert_list(value, annotation, exact=exact)
    if typing.get_origin(annotation) is Mapping:
        return _convert_map(value, annotation, exact=exact)
    fitted = _scalar(value, annotation, exact=exact)
    if fitted is None and not (value is None and annotation is type(None)):
        return _mismatch(value, annotation)
    return fitted


def _scalar(value: Any, kind: Any, *, exact: bool) -> Any:
    """Return a scalar as the annotated type, or None when it does not fit."""
    if typing.get_origin(kind) is typing.Literal:
        return (
            value if any(type(value) is type(choice) for choice in typing.get_args(kind)) else None
        )
    if kind is bool or (isinstance(value, bool) and kind in _NAMES):
        return value if kind is bool and isinstance(value, bool) else None
    if kind is int and isinstance(value, Real):
        number = float(value) if not isinstance(value, Integral) else value
        whole = isinstance(number, Integral) or (not exact and number.is_integer())
        return int(number) if whole else None
    if kind is float and isinstance(value, Real):
        return _finite(value)
    # In Python 3.10, list[str] counts as a type, which `isinstance` then refuses.
    is_class = isinstance(kind, type) and typing.get_origin(kind) is None
    return value if not is_class or isinstance(value, kind) else None


def _finite(value: Real) -> float | None:
    """Return a number as a float, or None when a float cannot hold it."""
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def _convert_any(value: Any, members: tuple[Any, ...], annotation: Any, *, exact: bool) -> Any:
    """Return the value in the type of the first member of a union that fits."""
    container: Any = (
        tuple
        if isinstance(value, (list, tuple))
        else Mapping
        if isinstance(value, Mapping)
        else None
    )
    alike = [member for member in members if typing.get_origin(member) is container]
    if container is not None and len(alike) == 1:
        # Naming the wrong element of a list or a map helps more than saying that no member fits.
        return convert(value, alike[0], exact=exact)
    attempts = (convert(value, member, exact=exact) for member in members)
    return next(
        (fitted for fitted in attempts if not isinstance(fitted, Mismatch)),
        _mismatch(value, annotation),
    )


def _convert_list(value: Any, annotation: Any, *, exact: bool) -> Any:
    """Return a list as a tuple of the annotated element types."""
    elements = typing.get_args(annotation)
    fixed = not (len(elements) == 2 and elements[1] is Ellipsis)
    if not isinstance(value, (list, tuple)) or (fixed and len(value) != len(elements)):
        return _mismatch(value, annotation)
    kinds = elements if fixed else (elements[0],) * len(value)
    converted = tuple(
        convert(element, kind, exact=exact) for element, kind in zip(value, kinds, strict=True)
    )
    return _faults_within(enumerate(converted)) or converted


def _convert_map(value: Any, annotation: Any, *, exact: bool) -> Any:
    """Return an object as a dict whose values are of the annotated type."""
    if not isinstance(value, Mapping):
        return _mismatch(value, annotation)
    kind = typing.get_args(annotation)[1]
    converted = {str(name): convert(inner, kind, exact=exact) for name, inner in value.items()}
    return _faults_within(converted.items()) or converted


def _faults_within(found: Iterable[tuple[int | str, Any]]) -> Mismatch | None:
    """Return the faults of elements, with the index of the element put first.

    None without faults.
    """
    faults = [
        ((index, *where), word)
        for index, element in found
        if isinstance(element, Mismatch)
        for where, word in element.found
    ]
    return Mismatch(tuple(faults)) if faults else None


def _mismatch(value: Any, annotation: Any) -> Mismatch:
    return Mismatch((((), lambda: f"must be {describe(annotation)}; found {shown(value)}"),))


_NAMES: dict[Any, tuple[str, str]] = {
    bool: ("true or false", "truth values"),
    int: ("a whole number", "whole numbers"),
    float: ("a number", "numbers"),
    str: ("a string", "strings"),
    type(None): ("null", "nulls"),
}


def describe(annotation: Any, *, plural: bool = False) -> str:
    """Describe the values that an annotation allows, except null, which means that a setting is left out."""
    members = [member for member in alternatives_of(annotation) if member is not type(None)]
    if len(members) > 1:
        return " or ".join(describe(member, plural=plural) for member in members)
    kind = members[0] if members else type(None)
    if typing.get_origin(kind) is typing.Literal:
        return describe(type(typing.get_args(kind)[0]), plural=plural)
    if typing.get_origin(kind) is Mapping:
        inner = typing.get_args(kind)[1]
        return "an object" if inner is Any else f"an object of {describe(inner, plural=True)}"
    if typing.get_origin(kind) is not tuple:
        return _NAMES[kind][plural] if kind in _NAMES else kind.__name__
    elements = typing.get_args(kind)
    inner = describe(elements[0], plural=True)
    if type(None) in alternatives_of(elements[0]):
        inner += " or nulls"
    many = elements[1] is Ellipsis
    head = ("lists of " if plural else "a list of ") + ("" if many else f"{len(elements)} ")
    return head + inner


def alternatives_of(annotation: Any) -> tuple[Any, ...]:
    """Return the members of a union, or the annotation itself."""
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return typing.get_args(annotation)
    return (annotation,)


def shown(value: Any) -> str:
    """Return a value as in JSON, with its kind, shortened if it is long."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return literal(value)
    if isinstance(value, dict):
        return "an object"
    text = repr(value)
    text = text if len(text) <= 60 else text[:57] + "..."
    kind = (
        "the string "
        if isinstance(value, str)
        else "the list "
        if isinstance(value, (list, tuple))
        else ""
    )
    return kind + text


def literal(value: Any) -> str:
    """Return a value as text: truth values and whole numbers as in JSON, long numbers rounded."""
    if isinstance(value, int) and abs(value) > _LARGEST_INTEGER:
        return f"{value:g}" if abs(value) < 10**300 else "a number of hundreds of digits"
    return str(value).lower() if isinstance(value, bool) else repr(value).removesuffix(".0")


def _as_json(value: Any) -> str:
    """Return a value as text like that of JSON, lists and null included."""
    if value is None:
        return "null"
    return literal(list(value) if isinstance(value, tuple) else value)


def one_of(choices: Collection[Any]) -> str:
    """Describe allowed values: "one of …", or the value itself if there is only one."""
    words = ", ".join(map(literal, choices))
    return f"one of {words}" if len(choices) > 1 else words


def nearest_of(value: Any, names: Iterable[str], cutoff: float = 0.6) -> str | None:
    """Return the name that a string probably means, None without any.

    Case, "-" and "_" do not count. Numbers must agree: 'float16' is not a misspelled 'float64'.
    `cutoff` is the least similarity (difflib).
    """
    if not isinstance(value, str):
        return None
    word = _letters(value)
    by_letters = {
        _letters(name): name for name in names if _digits(_letters(name)) == _digits(word)
    }
    if word in by_letters:
        return by_letters[word]
    near = difflib.get_close_matches(word, list(by_letters), 1, cutoff)
    return by_letters[near[0]] if near else None


def _letters(name: str) -> str:
    """Return the letters and digits of a name, in lower case."""
    return re.sub(r"[^a-z0-9]", "", name.lower())


def _digits(letters: str) -> str:
    return re.sub(r"[^0-9]", "", letters)


def did_you_mean(name: str | None) -> str:
    """Return the end of a message about a misspelled name; empty without a suggestion."""
    return f"; did you mean {name!r}?" if name else ""
