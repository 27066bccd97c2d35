"""The input file as dargs arguments, for DP-GUI and deepmd-kit's own check.

They are plain arguments of dargs, made from the same declarations as our own check. They know keys,
aliases, types, choices and ranges, but neither rules over several keys nor older layouts;
`normalize` knows these.
"""

from __future__ import annotations

import functools
import json
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from dargs import Argument, ArgumentEncoder, Variant

from deepmd_muon.argcheck.legacy_optimizer import translated_keys
from deepmd_muon.argcheck.limits import limits_of
from deepmd_muon.argcheck.schema import Key, foreign_of, tree
from deepmd_muon.argcheck.settings import MultiTaskSettings, Settings
from deepmd_muon.model.branch_settings import SHAREABLE
from deepmd_muon.optim.words import RENAMED_SETTINGS
from deepmd_muon.section import Foreign, thaw
from deepmd_muon.setting import Mismatch, alternatives_of, convert

_ANY = (bool, int, float, str, list, dict, type(None))
# Older names that mean the same setting with the same values, by the setting.
_OLDER_NAMES = {
    setting: tuple(old for old, new in RENAMED_SETTINGS.items() if new == setting)
    for setting in RENAMED_SETTINGS.values()
}


def gen_args(multi_task: bool = False) -> list[Argument]:
    """Return the sections of an input file as dargs arguments.

    deepmd-kit's function for its own arguments has the same name.

    Parameters
    ----------
    multi_task
        Describe an input of several models.

    Examples
    --------
    Check an input as deepmd-kit does::

        base = Argument("base", dict, gen_args())
        data = base.normalize_value(data, trim_pattern="_*")
        base.check_value(data, strict=True)
    """
    if not multi_task:
        return arguments_of(Settings)
    sections = {section.name: section for section in arguments_of(MultiTaskSettings)}
    model = sections["model"]
    branch = model.sub_fields["model_dict"]
    # Keys that are the same in all branches may stand in `model` itself: a branch needs none, and a
    # default that dargs filled in would hide the common value.
    branch.sub_fields = {key.name: key for key in _branch_fields()}
    common = [key for key in _branch_fields() if key.name not in model.sub_fields]
    model.extend_subfields(common)
    return list(sections.values())


def _branch_fields() -> list[Argument]:
    """Return the keys of a branch, all optional; some may name an entry of `shared_dict`."""
    branch = tree(MultiTaskSettings).keys["model"].keys["model_dict"]
    fields = _fields(branch, has_defaults=False)
    for field in fields:
        field.optional = True
        if field.name in SHAREABLE:
            field.doc += " Or the name of an entry of shared_dict, or name:level."
            field.dtype = (*field.dtype, str)
            takes = field.extra_check
            field.extra_check = takes and functools.partial(_is_name_or, takes)
    return fields


def _is_name_or(takes: Callable[[Any], bool], value: Any) -> bool:
    return isinstance(value, str) or takes(value)


def gen_args_multi_task() -> Argument:
    """Return an input of several models as one dargs argument."""
    return Argument("multi-task", dict, gen_args(multi_task=True), doc="Input of several models.")


def encoded(arguments: Sequence[Argument]) -> str:
    """Return dargs arguments as JSON, the form that DP-GUI reads."""
    return json.dumps(tuple(arguments), cls=ArgumentEncoder, ensure_ascii=False) + "\n"


def arguments_of(section: type) -> list[Argument]:
    """Return the keys of a settings dataclass as dargs arguments, in the order of its fields."""
    return _fields(tree(section))


def _fields(section: Key, *, has_defaults: bool = True) -> list[Argument]:
    """Return the keys of a section of one kind.

    They include deepmd-kit's keys without a counterpart here.
    """
    assert section.section is not None
    left_out: frozenset[str] = getattr(section.section, "left_out", frozenset())
    arguments = []
    for name, key in section.keys.items():
        has_default = has_defaults and name not in left_out
        arguments.append(_argument(key, has_default=has_default))
    without_counterpart = {**foreign_of(section.section), **translated_keys(section.section)}
    for name, foreign in without_counterpart.items():
        arguments.append(_foreign_argument(name, foreign))
    return arguments


def _argument(key: Key, *, has_default: bool = True) -> Argument:
    """Return one key; the text of a value says its limits, which dargs cannot show otherwise.

    Without `has_default`, a normalised input leaves out the key where an input does.
    """
    optional: dict[str, Any] = {} if key.required else {"optional": True}
    if not key.required and has_default:
        optional["default"] = _default(key)
    limits = [] if key.is_section else list(limits_of(key.setting))
    allowed = f"Allowed: {'; '.join(limits)}." if limits else ""
    argument = Argument(
        key.name,
        _types_of(key),
        sub_fields=_fields(key) if key.section else None,
        sub_variants=[_variant(key)] if key.variants else None,
        repeat=key.named,
        alias=(*key.alias, *_OLDER_NAMES.get(key.name, ())),
        doc=f"{key.setting.doc} {allowed}".strip(),
        extra_check=None if key.is_section else lambda value: _fits(key, value),
        extra_check_errmsg=allowed or "It has another type than it must have.",
        **optional,
    )
    # dargs keeps types in a set, whose order differs from run to run.
    argument.dtype = tuple(sorted(argument.dtype, key=str))
    return argument


def _types_of(key: Key) -> list[Any]:
    """Return the types under which dargs checks plain values of a key."""
    if key.is_section:
        # A null from the input means an absent section.
        return [dict] if key.required or key.value is not None else [dict, type(None)]
    kinds: list[Any] = []
    for kind in alternatives_of(key.annotation):
        origin = typing.get_origin(kind)
        if origin is tuple:
            kinds.append(_list_type(kind))
            if key.setting.lone:
                kinds.append(typing.get_args(kind)[0])
        elif origin is Mapping:
            kinds.append(dict)
        elif origin is typing.Literal:
            kinds += {type(choice) for choice in typing.get_args(kind)}
        else:
            kinds.append(kind)
    return kinds


def _list_type(annotation: Any) -> Any:
    """Return a tuple annotation as the list annotation of its JSON form."""
    element = typing.get_args(annotation)[0]
    if typing.get_origin(element) is tuple:
        element = _list_type(element)
    return types.GenericAlias(list, (element,))


def _default(key: Key) -> Any:
    """Return the plain default of a key.

    Dargs does not fill in the keys of an absent section by itself.
    """
    if key.variants is None or key.value is None:
        return thaw(key.value)
    return {"type": key.variants.name_of(type(key.value)), **thaw(key.value)}


def _variant(key: Key) -> Variant:
    """Return the kinds of a section that has several."""
    assert key.variants is not None
    kinds = [
        Argument(name, dict, _fields(kind), alias=kind.alias, doc=kind.setting.doc)
        for name, kind in key.kinds.items()
    ]
    default = key.variants.default
    return Variant(
        "type",
        kinds,
        optional=default is not None,
        default_tag=default or "",
        doc="Kind of the section; the other keys depend on it.",
    )


def _foreign_argument(name: str, foreign: Foreign) -> Argument:
    """Return a key of deepmd-kit that has no effect here; values that ask for something fail."""
    quiet = " or ".join(json.dumps(value) for value in (None, *foreign.neutral))
    text = (
        f"Left out: {foreign.what}."
        if foreign.inert
        else f"Not available: {foreign.what}. Allowed: {quiet}."
    )
    return Argument(
        name,
        list(_ANY),
        optional=True,
        doc=text,
        extra_check=lambda value: foreign.inert or foreign.accepts(value),
        extra_check_errmsg=text,
    )


def _fits(key: Key, value: Any) -> bool:
    """Return whether our own check takes a value."""
    if value is None and key.value is None:
        return True
    if key.setting.lone and not isinstance(value, list):
        value = [value]
    fitted = convert(value, key.annotation)
    return not isinstance(fitted, Mismatch) and key.setting.problem(fitted) is None
