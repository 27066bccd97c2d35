"""Declaration of a section of input.json, and its plain form.

A section is a dataclass whose fields are declared with `setting` (a value) or `section` (a
sub-section). Its defaults, ranges and rules apply wherever it is built: by the input check, from a
checkpoint or by hand. This module imports only `setting`, and not torch.
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, TypeVar

from deepmd_muon.setting import (
    InvalidSettingError,
    Mismatch,
    Setting,
    alternatives_of,
    annotations_of,
    check_settings,
    convert,
    one_of,
    setting_of,
    shown,
)


@dataclasses.dataclass(frozen=True)
class Rule:
    """A rule over several values of a section.

    Attributes
    ----------
    reads
        Paths of the values below the section, such as `descriptor/sel`. A problem is reported at
        the first one. The rule is not checked if one of the values is itself wrong.
    check
        A function that takes the values in this order and returns the problem, or None.
    """

    reads: tuple[str, ...]
    check: Callable[..., str | None]


@dataclasses.dataclass(frozen=True)
class Foreign:
    """A key of deepmd-kit, or of earlier versions, that this package does not support.

    Attributes
    ----------
    what
        The feature that the key requests, as a phrase for messages.
    neutral
        Values besides null that request nothing; they are accepted and left out of the normalised
        input.
    inert
        Whether all other values are left out, too, with a notice, because they change no result.
    """

    what: str
    neutral: tuple[Any, ...] = ()
    inert: bool = False

    def accepts(self, value: Any) -> bool:
        """Return whether a value requests nothing."""
        same = any(
            value == neutral and isinstance(value, bool) == isinstance(neutral, bool)
            for neutral in self.neutral
        )
        return same or value is None


class Section:
    """Base class of the settings dataclasses of input.json; each instance checks its own rules.

    Raises
    ------
    InvalidSettingError
        Naming every setting that violates its type, its range or a rule.
    """

    rules: ClassVar[tuple[Rule, ...]] = ()
    foreign: ClassVar[Mapping[str, Foreign]] = {}
    #: Words of other programs for settings of this section, with what to write instead.
    hints: ClassVar[Mapping[str, str]] = {}
    #: Settings that the plain form omits if they are None, because deepmd-kit checks whether their
    #: keys exist.
    left_out: ClassVar[frozenset[str]] = frozenset()

    def plain_form(self) -> dict[str, Any] | None:
        """Return the plain form of settings whose keys another program declares; None for ours."""
        return None

    def __post_init__(self) -> None:
        check_settings(self)
        # Rules may assume that each value is valid by itself.
        broken = []
        for rule in self.rules:
            values = [_attribute(self, path) for path in rule.reads]
            problem = rule.check(*values)
            if problem:
                broken.append(f"{rule.reads[0]}: {problem}")
        if broken:
            raise InvalidSettingError(f"{type(self).__name__}: " + "; ".join(broken), broken)


@dataclasses.dataclass(frozen=True)
class Variants:
    """The kinds of a sub-section; its key `type` chooses one.

    Attributes
    ----------
    choices
        Name of each kind and its dataclass.
    default
        The kind of a section without `type`; None if `type` is required.
    alias
        Other names, with the names of their kinds.
    """

    choices: Mapping[str, type]
    default: str | None = None
    alias: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def name_of(self, section: type) -> str:
        """Return the `type` of a dataclass."""
        return next(name for name, choice in self.choices.items() if choice is section)

    def choose(self, name: Any) -> type:
        """Return the dataclass of a `type`; None stands for the default.

        Raises
        ------
        InvalidSettingError
            When no kind has this name.
        """
        kind = self.default if name is None else self.alias.get(name, name)
        if kind is None or kind not in self.choices:
            raise InvalidSettingError(f"type must be {one_of(self.choices)}; found {shown(name)}")
        return self.choices[kind]


def section(
    default: Any = dataclasses.MISSING, *, doc: str, variants: Variants | None = None
) -> Any:
    """Declare a dataclass field that is a sub-section; without a default, it is required.

    `variants` are its kinds; None if the annotation names a single dataclass. A field annotated
    ``Mapping[str, X]`` is an object of sections with names from the input.
    """
    metadata = {"setting": Setting(doc), "variants": variants}
    return dataclasses.field(default=default, metadata=metadata)


def declared_like(settings: type, name: str) -> Any:
    """Declare a dataclass field, setting or sub-section, exactly as another class does."""
    declared: Any = settings
    (field,) = (field for field in dataclasses.fields(declared) if field.name == name)
    return dataclasses.field(default=field.default, metadata=field.metadata)


def thaw(value: Any) -> Any:
    """Return settings as the plain objects of JSON."""
    if isinstance(value, tuple):
        return [thaw(element) for element in value]
    if isinstance(value, Mapping):
        return {name: thaw(inner) for name, inner in value.items()}
    if not dataclasses.is_dataclass(value):
        return value
    if isinstance(value, Section) and (foreign_form := value.plain_form()) is not None:
        return foreign_form
    plain = {}
    for field in dataclasses.fields(value):
        inner = getattr(value, field.name)
        if inner is None and field.name in getattr(value, "left_out", ()):
            continue
        variants: Variants | None = field.metadata.get("variants")
        if variants is None or inner is None:
            plain[field.name] = thaw(inner)
        elif isinstance(inner, Mapping):
            plain[field.name] = {key: _tagged(entry, variants) for key, entry in inner.items()}
        else:
            plain[field.name] = _tagged(inner, variants)
    return plain


def _tagged(inner: Any, variants: Variants) -> dict[str, Any]:
    """Return one of several kinds of a sub-section as plain objects."""
    return {"type": variants.name_of(type(inner)), **thaw(inner)}


T = TypeVar("T")


def freeze(section: type[T], plain: Mapping[str, Any]) -> T:
    """Build settings from their plain objects, the inverse of `thaw`; absent keys take defaults.

    Unlike `argcheck.check`, which checks users' inputs, it accepts only the present spellings, and
    raises at the first section with problems.

    Raises
    ------
    InvalidSettingError
        Naming every key of a section that is unknown, missing or wrong.
    """
    declared: Any = section
    annotations = annotations_of(declared)
    fields = {field.name: field for field in dataclasses.fields(declared)}
    problems = [
        f"{name}: is not a known key" for name in plain if name not in fields and name != "type"
    ]
    values: dict[str, Any] = {}
    for name, field in fields.items():
        if name in plain:
            values[name] = _frozen(field, annotations[name], plain[name])
            if isinstance(values[name], Mismatch):
                problems.append(f"{name}: {values[name].words}")
        elif field.default is dataclasses.MISSING:
            problems.append(f"{name}: is missing")
    if problems:
        raise InvalidSettingError(f"{section.__name__}: " + "; ".join(problems))
    return section(**values)


def _frozen(field: dataclasses.Field[Any], annotation: Any, value: Any) -> Any:
    """Return one plain value in the type of its field, or a `Mismatch`."""
    variants: Variants | None = field.metadata.get("variants")
    is_named = typing.get_origin(annotation) is Mapping
    inside = typing.get_args(annotation)[1] if is_named else annotation  # X of Mapping[str, X]
    sections: list[Any] = [
        kind for kind in alternatives_of(inside) if dataclasses.is_dataclass(kind)
    ]
    has_sections = variants is not None or bool(sections)

    def freeze_section(plain: Mapping[str, Any]) -> Any:
        section = sections[0] if variants is None else variants.choose(plain.get("type"))
        return freeze(section, plain)

    if is_named and has_sections:
        plain = convert(value, Mapping[str, Mapping[str, Any]])
        if isinstance(plain, Mismatch):
            return plain
        return {name: freeze_section(entry) for name, entry in plain.items()}
    if isinstance(value, Mapping) and has_sections:
        return freeze_section(value)
    if setting_of(field).lone and not isinstance(value, (list, tuple)):
        value = [value]
    return value if variants else convert(value, annotation)


def _attribute(settings: Any, path: str) -> Any:
    """Return the value at a path below settings; None below an absent section."""
    for name in path.split("/"):
        settings = getattr(settings, name, None)
    return settings
