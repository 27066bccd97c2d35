"""From settings dataclasses to one tree of dargs arguments.

A section of input.json is a frozen dataclass whose fields are declared with `setting` (a value) or `section` (a
sub-section). Everything else is derived from it: the dargs tree here, the check in `check`, the reference and the
JSON Schema in `document`.
"""

from __future__ import annotations

import dataclasses
import functools
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar

from dargs import Argument, Variant

from deepmd_muon.setting import Setting, alternatives_of, setting_of


@dataclasses.dataclass(frozen=True)
class Rule:
    """A rule over several values of a section.

    Attributes
    ----------
    reads
        Paths of the values below the section, such as `descriptor/sel`. A problem is reported at the first one;
        the rule is left out when one of the values is itself wrong.
    check
        Takes the values in that order and returns what is wrong, or None.
    """

    reads: tuple[str, ...]
    check: Callable[..., str | None]


@dataclasses.dataclass(frozen=True)
class Foreign:
    """A key that deepmd-kit knows and this package does not carry.

    Attributes
    ----------
    what
        What the key asks for, in words.
    neutral
        Values beside null that ask for nothing: accepted and left out of the normalised input.
    inert
        Whether every other value is left out too, with a notice, because it changes no result.
    """

    what: str
    neutral: tuple[Any, ...] = ()
    inert: bool = False


class Section:
    """Base of the settings dataclasses of input.json: they hold to their own rules when built by hand, too."""

    rules: ClassVar[tuple[Rule, ...]] = ()
    foreign: ClassVar[Mapping[str, Foreign]] = {}

    def __post_init__(self) -> None:
        own: Any = type(self)
        found = [(key.name, key.setting.problem(getattr(self, key.name))) for key in keys_of(own)]
        if not any(problem for _, problem in found):
            # Only values that are good themselves can be compared with each other.
            found = [
                (rule.reads[0], rule.check(*(_attribute(self, path) for path in rule.reads))) for rule in self.rules
            ]
        broken = [f"{name}: {problem}" for name, problem in found if problem]
        if broken:
            raise ValueError(f"{type(self).__name__}: " + "; ".join(broken))


@dataclasses.dataclass(frozen=True)
class Variants:
    """The kinds a sub-section comes in, told apart by its key `type`.

    Attributes
    ----------
    choices
        Name of each kind and its dataclass.
    default
        The kind of a section without `type`; None when `type` is required.
    alias
        Other names and the kind they stand for.
    """

    choices: Mapping[str, type]
    default: str | None = None
    alias: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def name_of(self, section: type) -> str:
        """Return the name under which a dataclass is chosen."""
        return next(name for name, choice in self.choices.items() if choice is section)


def section(default: Any = dataclasses.MISSING, *, doc: str, variants: Variants | None = None) -> Any:
    """Declare a dataclass field that is a sub-section.

    Parameters
    ----------
    default
        What an absent section means; left out, the section is required.
    doc
        What the section is for.
    variants
        The kinds it comes in; None when the annotation names a single dataclass.
    """
    metadata = {"setting": Setting(doc), "variants": variants}
    return dataclasses.field(default=default, metadata=metadata)


class Key(Argument):
    """A dargs argument that remembers the dataclass field it was made from.

    Attributes
    ----------
    setting : Setting
        Documentation, choices and bounds.
    annotation : object
        Type of the field; of a section, its dataclass or union of dataclasses.
    section : type or None
        Dataclass of a sub-section of one kind, or of one kind of a sub-section.
    variants : Variants or None
        The kinds of a sub-section.
    value : object
        Default of the field, `dataclasses.MISSING` when required.
    """

    setting: Setting
    annotation: Any
    section: type | None
    variants: Variants | None
    value: Any

    @property
    def is_section(self) -> bool:
        """Whether the value is an object with keys of its own."""
        return self.section is not None or self.variants is not None

    @property
    def required(self) -> bool:
        """Whether an input must give the key."""
        return self.value is dataclasses.MISSING

    @property
    def keys(self) -> dict[str, Key]:
        """The keys inside a section of one kind."""
        return typing.cast("dict[str, Key]", self.sub_fields)

    @property
    def kinds(self) -> dict[str, Key]:
        """The kinds of a section that has several."""
        return typing.cast("dict[str, Key]", self.sub_variants["type"].choice_dict) if self.variants else {}


def _key(field: dataclasses.Field[Any], annotation: Any) -> Key:
    """Build the argument of one dataclass field."""
    setting = setting_of(field)
    variants: Variants | None = field.metadata.get("variants")
    choices = [a for a in alternatives_of(annotation) if dataclasses.is_dataclass(a)]
    nested = typing.cast("type", choices[0]) if choices and variants is None else None
    literal = typing.get_args(annotation) if typing.get_origin(annotation) is typing.Literal else None
    if setting.choices is None and literal is not None:
        setting = dataclasses.replace(setting, choices=literal)
    required = field.default is dataclasses.MISSING
    optional: dict[str, Any] = {} if required else {"optional": True, "default": thaw(field.default)}
    if choices:
        # dargs fills an absent section from its own keys when the default is an empty object.
        optional = optional and {"optional": True, "default": None if field.default is None else {}}
    key = Key(
        field.name,
        [dict] if choices else list(_dargs_types(annotation, setting)),
        sub_fields=keys_of(nested) if nested else None,
        sub_variants=[_variant(variants)] if variants else None,
        alias=setting.alias,
        doc=setting.doc,
        extra_check=None if choices else lambda value: setting.problem(value) is None,
        extra_check_errmsg="See the reference for its choices and bounds.",
        **optional,
    )
    key.setting, key.annotation, key.value = setting, annotation, field.default
    key.section, key.variants = nested, variants
    return key


def _dargs_types(annotation: Any, setting: Setting) -> Iterator[Any]:
    """Yield the types under which dargs checks plain values of an annotation."""
    for kind in alternatives_of(annotation):
        if typing.get_origin(kind) is tuple:
            yield _list_type(kind)
            if setting.lone:
                yield typing.get_args(kind)[0]
        elif typing.get_origin(kind) is typing.Literal:
            yield from {type(choice) for choice in typing.get_args(kind)}
        else:
            yield kind


def _list_type(annotation: Any) -> Any:
    """Return a tuple annotation as the list annotation of its JSON form."""
    element = typing.get_args(annotation)[0]
    if typing.get_origin(element) is tuple:
        element = _list_type(element)
    return types.GenericAlias(list, (element,))


def _variant(variants: Variants) -> Variant:
    """Build the dargs variant of a section with several kinds."""
    kinds = []
    for name, choice in variants.choices.items():
        alias = [other for other, target in variants.alias.items() if target == name]
        kind = Key(name, dict, keys_of(choice), alias=alias, doc=summary(choice))
        kind.setting, kind.annotation, kind.value = Setting(summary(choice)), choice, dataclasses.MISSING
        kind.section, kind.variants = choice, None
        kinds.append(kind)
    return Variant("type", kinds, optional=variants.default is not None, default_tag=variants.default or "")


def summary(section: type) -> str:
    """Return the first paragraph of a section's docstring on one line."""
    return " ".join((section.__doc__ or "").split("\n\n")[0].split())


@functools.cache
def keys_of(section: type) -> list[Key]:
    """Return the dargs arguments of a settings dataclass, in the order of its fields."""
    hints = typing.get_type_hints(section)
    return [_key(field, hints[field.name]) for field in dataclasses.fields(section)]


def tree(section: type, name: str = "input") -> Key:
    """Return a settings dataclass as one dargs argument."""
    key = Key(name, dict, keys_of(section), doc=summary(section))
    key.setting, key.annotation, key.value = Setting(summary(section)), section, dataclasses.MISSING
    key.section, key.variants = section, None
    return key


def foreign_of(section: type) -> Mapping[str, Foreign]:
    """Return the keys of deepmd-kit that a section refuses or leaves out."""
    found: Mapping[str, Foreign] = getattr(section, "foreign", {})
    return found


def rules_of(section: type) -> tuple[Rule, ...]:
    """Return the rules over several values of a section."""
    found: tuple[Rule, ...] = getattr(section, "rules", ())
    return found


def thaw(value: Any) -> Any:
    """Return settings as the plain objects of JSON."""
    if isinstance(value, tuple):
        return [thaw(element) for element in value]
    if not dataclasses.is_dataclass(value):
        return value
    plain = {}
    for field in dataclasses.fields(value):
        inner = getattr(value, field.name)
        variants: Variants | None = field.metadata.get("variants")
        kind = {"type": variants.name_of(type(inner))} if variants and inner is not None else {}
        plain[field.name] = {**kind, **thaw(inner)} if kind else thaw(inner)
    return plain


def _attribute(settings: Any, path: str) -> Any:
    """Return the value below settings that a path names, None below an absent section."""
    for name in path.split("/"):
        settings = getattr(settings, name, None)
    return settings
