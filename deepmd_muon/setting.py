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
from typing import Any, NamedTuple

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
        pairs = zip(self.reads, values, strict=True)
        present = ", ".join(f"{name} {_as_json(value)}" for name, value in pairs)
        return f"has no effect without {self.words}; found {present}"


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
            problem = None if value in neutral else needs.problem(of)
            if problem:
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
            return next(filter(None, map(self.problem, value.values())), None)
        if isinstance(value, (tuple, list)):
            if self.nonempty and not value:
                return "must have at least one element; found an empty list"
            return next(filter(None, map(self.problem, value)), None)
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
        broken = []
        if self.minimum is not None and not value >= self.minimum:
            broken.append(f">= {self.minimum:g}")
        if self.maximum is not None and not value <= self.maximum:
            broken.append(f"<= {self.maximum:g}")
        if self.above is not None and not value > self.above:
            broken.append(f"> {self.above:g}")
        if self.below is not None and not value < self.below:
            broken.append(f"< {self.below:g}")
        return " and ".join(broken) or None


def setting(default: Any = dataclasses.MISSING, *, doc: str, **rules: Any) -> Any:
    """Declare a dataclass field that carries its `Setting`.

    Without a default, the field is required.
    """
    return dataclasses.field(default=default, metadata={"setting": Setting(doc, **rules)})


def setting_like(settings: type, name: str, default: Any = dataclasses.MISSING) -> Any:
    """Declare a dataclass field with rules and text of another class's field.

    Without `default`, it has the default of that field, too.
    """
    declared: Any = settings
    (field,) = (field for field in dataclasses.fields(declared) if field.name == name)
    if default is dataclasses.MISSING:
        default = field.default
    without_alias = dataclasses.replace(setting_of(field), alias=())
    return dataclasses.field(default=default, metadata={"setting": without_alias})


def setting_of(field: dataclasses.Field[Any], annotation: Any = None) -> Setting:
    """Return the `Setting` that `setting` attached to a dataclass field.

    A Literal annotation gives its choices.
    """
    declared = field.metadata["setting"]
    assert isinstance(declared, Setting)
    literals = [
        kind for kind in alternatives_of(annotation) if typing.get_origin(kind) is typing.Literal
    ]
    if declared.choices is None and len(literals) == 1:
        return dataclasses.replace(declared, choices=typing.get_args(literals[0]))
    return declared


def check_settings(settings: Any, of: str = "", only: Collection[str] | None = None) -> None:
    """Raise `InvalidSettingError` if a field of a settings dataclass has a wrong type or value.

    Strings with `any_case` become lower case. The message starts with `of`, or with the dataclass's
    name. `only` names the fields to check; None means all.
    """
    settings_class: Any = type(settings)
    problems = []
    for name, annotation, setting in _declared(settings_class):
        if only is not None and name not in only:
            continue
        value = getattr(settings, name)
        fitted = convert(value, annotation, exact=True)
        if not isinstance(fitted, Mismatch):
            problem = setting.problem(value)
        elif fitted.is_of_elements:
            problem = fitted.words
        else:
            problem = setting.mismatch(value, annotation, fitted.words)
        if problem:
            problems.append(f"{name}: {problem}")
        elif setting.any_case:
            object.__setattr__(settings, name, setting.folded(value))
    if problems:
        raise InvalidSettingError(
            f"{of or type(settings).__name__}: " + "; ".join(problems), problems
        )


def idle_settings(settings: Any) -> dict[str, str]:
    """Return the settings of a dataclass without effect, each with the reason.

    The values of its other settings decide that. A setting with its default, or with another value
    that asks for nothing, is not among them.
    """
    kind: Any = type(settings)
    defaults = {field.name: field.default for field in dataclasses.fields(kind)}

    def value_of(name: str) -> Any:
        return getattr(settings, name, None)

    reasons = {}
    for name, _, setting in _declared(kind):
        reason = setting.idle(value_of(name), defaults[name], value_of)
        if reason:
            reasons[name] = reason
    return reasons


class _Declared(NamedTuple):
    """A field of a settings dataclass."""

    name: str
    annotation: Any
    setting: Setting


@functools.cache
def _declared(settings: Any) -> tuple[_Declared, ...]:
    """Return the fields of a settings dataclass that carry a `Setting`."""
    annotations = annotations_of(settings)
    declared = []
    for field in dataclasses.fields(settings):
        if "setting" in field.metadata:
            annotation = annotations[field.name]
            setting = setting_of(field, annotation)
            declared.append(_Declared(field.name, annotation, setting))
    return tuple(declared)


@functools.cache
def annotations_of(settings: type) -> dict[str, Any]:
    """Return the evaluated annotations of a dataclass, with `tuple[X, ...]` for `Sequence[X]`."""
    hints = typing.get_type_hints(settings)
    return {name: _as_tuple(annotation) for name, annotation in hints.items()}


def _as_tuple(annotation: Any) -> Any:
    """Return an annotation with `tuple[X, ...]` for `Sequence[X]`."""
    if typing.get_origin(annotation) is Sequence:
        element = typing.get_args(annotation)[0]
        return types.GenericAlias(tuple, (_as_tuple(element), ...))
    members = alternatives_of(annotation)
    if len(members) == 1:
        return annotation
    return functools.reduce(operator.or_, map(_as_tuple, members))


class _Fault(NamedTuple):
    """A wrong type inside a value."""

    indices: tuple[int | str, ...]  # inside nested lists and maps
    describe: Callable[[], str]  # says the expected type and the value


@dataclasses.dataclass(frozen=True)
class Mismatch:
    """The reasons why a value does not have the type of its setting.

    They are functions: nobody reads those of an attempt that another member of a union replaces,
    and describing a tensor takes milliseconds.
    """

    reasons: tuple[_Fault, ...]

    @property
    def faults(self) -> tuple[tuple[tuple[int | str, ...], str], ...]:
        """Of each fault: indices inside nested lists, expected type and value in words."""
        return tuple((fault.indices, fault.describe()) for fault in self.reasons)

    @property
    def is_of_elements(self) -> bool:
        """Whether the value has the right type, but elements of it do not."""
        return bool(self.reasons[0].indices)

    @property
    def words(self) -> str:
        """Description of the first fault, with its indices inside nested lists."""
        fault = self.reasons[0]
        if not fault.indices:
            return fault.describe()
        return f"element {'/'.join(map(str, fault.indices))} {fault.describe()}"


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
        types_of_choices = {type(choice) for choice in typing.get_args(kind)}
        return value if type(value) in types_of_choices else None
    if kind is bool or (isinstance(value, bool) and kind in _NAMES):
        return value if kind is bool and isinstance(value, bool) else None
    if kind is int and isinstance(value, Real):
        if isinstance(value, Integral):
            return int(value)
        number = float(value)
        return int(number) if not exact and number.is_integer() else None
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
    container: Any = None
    if isinstance(value, (list, tuple)):
        container = tuple
    elif isinstance(value, Mapping):
        container = Mapping
    if container is not None:
        alike = [member for member in members if typing.get_origin(member) is container]
        if len(alike) == 1:
            # Naming the wrong element of a list or map helps more than saying that no member fits.
            return convert(value, alike[0], exact=exact)
    for member in members:
        fitted = convert(value, member, exact=exact)
        if not isinstance(fitted, Mismatch):
            return fitted
    return _mismatch(value, annotation)


def _convert_list(value: Any, annotation: Any, *, exact: bool) -> Any:
    """Return a list as a tuple of the annotated element types."""
    elements = typing.get_args(annotation)
    any_length = len(elements) == 2 and elements[1] is Ellipsis
    if not isinstance(value, (list, tuple)):
        return _mismatch(value, annotation)
    if not any_length and len(value) != len(elements):
        return _mismatch(value, annotation)
    kinds = (elements[0],) * len(value) if any_length else elements
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


def _faults_within(converted: Iterable[tuple[int | str, Any]]) -> Mismatch | None:
    """Return the faults of elements, each with the index of the element first; None without any."""
    faults = [
        _Fault((index, *fault.indices), fault.describe)
        for index, element in converted
        if isinstance(element, Mismatch)
        for fault in element.reasons
    ]
    return Mismatch(tuple(faults)) if faults else None


def _mismatch(value: Any, annotation: Any) -> Mismatch:
    def words() -> str:
        return f"must be {describe(annotation)}; found {shown(value)}"

    return Mismatch((_Fault((), words),))


_NAMES: dict[Any, tuple[str, str]] = {
    bool: ("true or false", "truth values"),
    int: ("a whole number", "whole numbers"),
    float: ("a number", "numbers"),
    str: ("a string", "strings"),
    type(None): ("null", "nulls"),
}


def describe(annotation: Any, *, plural: bool = False) -> str:
    """Describe the values that an annotation allows, but not null, which leaves a setting out."""
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
    count = "" if elements[1] is Ellipsis else f"{len(elements)} "
    return f"{'lists' if plural else 'a list'} of {count}{inner}"


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
    if len(text) > 60:
        text = text[:57] + "..."
    if isinstance(value, str):
        return f"the string {text}"
    if isinstance(value, (list, tuple)):
        return f"the list {text}"
    return text


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
