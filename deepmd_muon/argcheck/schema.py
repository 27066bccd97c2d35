"""From settings dataclasses to a tree of keys.

`deepmd_muon.section` describes the dataclasses. The check, the reference, the JSON Schema and the
dargs arguments all walk this tree.
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Mapping
from typing import Any

from deepmd_muon.section import Foreign, Rule, Variants
from deepmd_muon.setting import Setting, alternatives_of, annotations_of, setting_of


@dataclasses.dataclass(frozen=True, eq=False)
class Key:
    """A key of an input: a value or a section. A whole input and a kind of a section are keys, too.

    Attributes
    ----------
    name
        Its name; of a kind, the `type` that chooses it.
    setting
        Documentation, choices and bounds.
    annotation
        Type of the field; of a section, its dataclass or union of dataclasses.
    value
        Default of the field, `dataclasses.MISSING` when required.
    alias
        Other spellings of the name.
    section
        Dataclass of a section of one kind, or of one kind of a section.
    keys
        The keys inside a section of one kind, by name.
    variants, kinds
        The declared kinds of a section that has several, and their keys by `type`.
    named
        Whether the value maps names, chosen by the input, to such sections.
    """

    name: str
    setting: Setting
    annotation: Any
    value: Any
    alias: tuple[str, ...] = ()
    section: type | None = None
    keys: Mapping[str, Key] = dataclasses.field(default_factory=dict)
    variants: Variants | None = None
    kinds: Mapping[str, Key] = dataclasses.field(default_factory=dict)
    named: bool = False

    @property
    def is_section(self) -> bool:
        """Whether the value is an object with keys of its own."""
        return self.section is not None or self.variants is not None

    @property
    def required(self) -> bool:
        """Whether an input must give the key."""
        return self.value is dataclasses.MISSING


_TREES: dict[type, Key] = {}


def tree(section: type) -> Key:
    """Return the keys of a settings dataclass; rebuild them only if kinds were registered since."""
    key = _TREES.get(section)
    if key is None or not _is_current(key):
        key = _section_key("input", section)
        _TREES[section] = key
    return key


def _is_current(key: Key) -> bool:
    """Return whether the sections inside a key have the kinds that are registered now."""
    if key.variants is not None:
        sections = {name: kind.section for name, kind in key.kinds.items()}
        aliases = {alias: name for name, kind in key.kinds.items() for alias in kind.alias}
        if sections != dict(key.variants.choices) or aliases != dict(key.variants.alias):
            return False
    return all(_is_current(inner) for inner in (*key.keys.values(), *key.kinds.values()))


def _section_key(name: str, section: type, alias: tuple[str, ...] = ()) -> Key:
    """Build the key of a whole input, or of one kind of a section."""
    return Key(
        name=name,
        setting=Setting(summary(section)),
        annotation=section,
        value=dataclasses.MISSING,
        alias=alias,
        section=section,
        keys=_keys_of(section),
    )


def _keys_of(section: type) -> dict[str, Key]:
    """Build the keys of a settings dataclass, in the order of its fields."""
    annotations = annotations_of(section)
    fields: tuple[dataclasses.Field[Any], ...] = dataclasses.fields(typing.cast("Any", section))
    return {field.name: _field_key(field, annotations[field.name]) for field in fields}


def _field_key(field: dataclasses.Field[Any], annotation: Any) -> Key:
    """Build the key of one dataclass field."""
    setting = setting_of(field, annotation)
    variants: Variants | None = field.metadata.get("variants")
    named = False
    if typing.get_origin(annotation) is Mapping:
        inside = typing.get_args(annotation)[1]  # the X of Mapping[str, X]
        named = variants is not None or dataclasses.is_dataclass(inside)
        if named:
            annotation = inside
    section = None
    kinds = {}
    if variants is None:
        classes = [kind for kind in alternatives_of(annotation) if dataclasses.is_dataclass(kind)]
        section = typing.cast("type", classes[0]) if classes else None
    else:
        for name, choice in variants.choices.items():
            alias = tuple(word for word, target in variants.alias.items() if target == name)
            kinds[name] = _section_key(name, choice, alias)
    return Key(
        name=field.name,
        setting=setting,
        annotation=annotation,
        value=field.default,
        alias=setting.alias,
        section=section,
        keys={} if section is None else _keys_of(section),
        variants=variants,
        kinds=kinds,
        named=named,
    )


def summary(section: type) -> str:
    """Return the first paragraph of a section's docstring on one line."""
    return " ".join((section.__doc__ or "").split("\n\n")[0].split())


def foreign_of(section: type) -> Mapping[str, Foreign]:
    """Return the keys of deepmd-kit that a section refuses or leaves out."""
    foreign: Mapping[str, Foreign] = getattr(section, "foreign", {})
    return foreign


def rules_of(section: type) -> tuple[Rule, ...]:
    """Return the rules over several values of a section."""
    rules: tuple[Rule, ...] = getattr(section, "rules", ())
    return rules


def advice_of(section: type, key: str, plain: Mapping[Any, Any]) -> str | None:
    """Return a section's advice on an unknown key of its `plain` content, None without any."""
    hints: Mapping[str, str] = getattr(section, "hints", {})
    if key in hints:
        return f"is not a known key; write {hints[key]}"
    advise = getattr(section, "advice", None)
    advice: str | None = advise(key, plain) if advise else None
    return advice
