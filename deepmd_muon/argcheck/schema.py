"""From settings dataclasses to one tree of dargs arguments.

Everything is derived from the dataclasses that `deepmd_muon.section` describes: the dargs tree
here, the check in `check`, the reference and the JSON Schema in `document`.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from dargs import Argument, Variant

from deepmd_muon.section import Foreign, Rule, Variants, thaw
from deepmd_muon.setting import Setting, alternatives_of, annotations_of, setting_of


class Key(Argument):
    """A dargs argument with the dataclass field that it was made from.

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
    named : bool
        Whether the value maps names, chosen by the input, to such sections.
    """

    setting: Setting
    annotation: Any
    section: type | None
    variants: Variants | None
    value: Any
    named: bool = False

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
        return (
            typing.cast("dict[str, Key]", self.sub_variants["type"].choice_dict)
            if self.variants
            else {}
        )


def _key(field: dataclasses.Field[Any], annotation: Any) -> Key:
    """Build the argument of one dataclass field."""
    setting = setting_of(field, annotation)
    variants: Variants | None = field.metadata.get("variants")
    # The X of Mapping[str, X].
    inside = typing.get_args(annotation)[1] if typing.get_origin(annotation) is Mapping else None
    named = inside is not None and (variants is not None or dataclasses.is_dataclass(inside))
    annotation = inside if named else annotation
    kinds = [a for a in alternatives_of(annotation) if dataclasses.is_dataclass(a)]
    nested = typing.cast("type", kinds[0]) if kinds and variants is None else None
    is_section = nested is not None or variants is not None
    required = field.default is dataclasses.MISSING
    optional: dict[str, Any] = (
        {} if required else {"optional": True, "default": thaw(field.default)}
    )
    if is_section:
        # dargs fills an absent section from its own keys when the default is an empty object.
        optional = optional and {"optional": True, "default": None if field.default is None else {}}
    key = Key(
        field.name,
        [dict] if is_section else list(_dargs_types(annotation, setting)),
        sub_fields=keys_of(nested) if nested else None,
        sub_variants=[_variant(variants)] if variants else None,
        alias=setting.alias,
        doc=setting.doc,
        extra_check=None if is_section else lambda value: setting.problem(value) is None,
        extra_check_errmsg="See the reference for its choices and bounds.",
        repeat=named,
        **optional,
    )
    key.setting, key.annotation, key.value = setting, annotation, field.default
    key.section, key.variants, key.named = nested, variants, named
    return key


def _dargs_types(annotation: Any, setting: Setting) -> Iterator[Any]:
    """Yield the types under which dargs checks plain values of an annotation."""
    for kind in alternatives_of(annotation):
        if typing.get_origin(kind) is tuple:
            yield _list_type(kind)
            if setting.lone:
                yield typing.get_args(kind)[0]
        elif typing.get_origin(kind) is Mapping:
            yield dict
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
        kinds.append(_kind(name, choice, alias))
    return Variant(
        "type", kinds, optional=variants.default is not None, default_tag=variants.default or ""
    )


def _kind(name: str, section: type, alias: Iterable[str] = ()) -> Key:
    """Build the argument of a whole section, or of one of its kinds."""
    key = Key(name, dict, keys_of(section), alias=alias, doc=summary(section))
    key.setting, key.annotation, key.value = Setting(summary(section)), section, dataclasses.MISSING
    key.section, key.variants = section, None
    return key


def summary(section: type) -> str:
    """Return the first paragraph of a section's docstring on one line."""
    return " ".join((section.__doc__ or "").split("\n\n")[0].split())


def keys_of(section: type) -> list[Key]:
    """Return the dargs arguments of a settings dataclass, in the order of its fields."""
    hints = annotations_of(section)
    return [_key(field, hints[field.name]) for field in dataclasses.fields(section)]


_TREES: dict[tuple[type, str], Key] = {}


def tree(section: type, name: str = "input") -> Key:
    """Return a settings dataclass as one dargs argument.

    Rebuild it only if kinds were registered since.
    """
    known = _TREES.get((section, name))
    if known is None or not _is_current(known):
        known = _TREES[section, name] = _kind(name, section)
    return known


def _is_current(key: Key) -> bool:
    """Return whether the sections inside an argument have the kinds that are registered now."""
    if key.variants is not None:
        built = key.sub_variants["type"]
        kinds = {name: kind.section for name, kind in key.kinds.items()}
        if kinds != dict(key.variants.choices) or built.choice_alias != dict(key.variants.alias):
            return False
    return all(_is_current(inner) for inner in (*key.keys.values(), *key.kinds.values()))


def foreign_of(section: type) -> Mapping[str, Foreign]:
    """Return the keys of deepmd-kit that a section refuses or leaves out."""
    found: Mapping[str, Foreign] = getattr(section, "foreign", {})
    return found


def advice_of(section: type, key: str, given: Mapping[Any, Any]) -> str | None:
    """Return a section's advice on an unknown key of an input, None without any."""
    hints: Mapping[str, str] = getattr(section, "hints", {})
    if key in hints:
        return f"is not a known key; write {hints[key]}"
    advise = getattr(section, "advice", None)
    found: str | None = advise(key, given) if advise else None
    return found


def rules_of(section: type) -> tuple[Rule, ...]:
    """Return the rules over several values of a section."""
    found: tuple[Rule, ...] = getattr(section, "rules", ())
    return found
