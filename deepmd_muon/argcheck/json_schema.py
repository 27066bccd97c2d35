"""A JSON Schema of input.json, for editors that check and complete a file while it is written."""

from __future__ import annotations

import re
import typing
from collections.abc import Mapping
from typing import Any

from deepmd_muon.argcheck.legacy_optimizer import translated_keys
from deepmd_muon.argcheck.schema import Key, foreign_of, summary, tree
from deepmd_muon.argcheck.settings import MultiTaskSettings, Settings
from deepmd_muon.model.branch_settings import SHAREABLE
from deepmd_muon.section import thaw
from deepmd_muon.setting import Setting, alternatives_of

_SCALARS = {bool: "boolean", int: "integer", float: "number", str: "string", type(None): "null"}


def json_schema() -> dict[str, Any]:
    """Return the JSON Schema of an input file (draft 2020-12).

    It covers keys, aliases, types, choices and ranges, but neither rules over several keys nor the
    older layouts that `normalize` translates.
    """
    extra = {"$schema": {"type": "string"}}
    several = {"properties": {"model": {"required": ["model_dict"]}}, "required": ["model"]}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Input of deepmd-muon",
        "description": summary(Settings),
        "type": "object",
        # For editors that complete keys; the values are described below.
        "properties": {
            name: {"description": key.setting.doc} for name, key in tree(Settings).keys.items()
        },
        "if": several,
        "then": _several_models(extra),
        "else": _object(tree(Settings), extra),
    }


def json_schema_of(section: type, title: str) -> dict[str, Any]:
    """Return the JSON Schema of another command's input, whose root is the dataclass `section`."""
    head = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": title,
        "description": summary(section),
    }
    return head | _object(tree(section), {"$schema": {"type": "string"}})


def _several_models(extra: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of an input of several models."""
    schema = _object(tree(MultiTaskSettings), extra)
    model = schema["properties"]["model"]
    branch = model["properties"]["model_dict"]["additionalProperties"]
    shared = {"type": "string", "description": "Name of an entry of shared_dict, or name:level."}
    for section in SHAREABLE:
        branch["properties"][section] = {"anyOf": [shared, branch["properties"][section]]}
    # Keys that are the same in all branches may be given in `model` itself.
    del branch["required"]
    model["properties"] = {**branch["properties"], **model["properties"]}
    return schema


def _object(key: Key, extra: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of a section of one kind."""
    assert key.section is not None
    properties = dict(extra)
    for name, inner in key.keys.items():
        properties[name] = _property(inner)
        properties.update(
            {
                alias: {**_property(inner), "description": f"The same as {name}."}
                for alias in inner.alias
            }
        )
    foreign_keys = {**foreign_of(key.section), **translated_keys(key.section)}
    for name, foreign in foreign_keys.items():
        if foreign.inert:
            properties[name] = {"description": f"Left out: {foreign.what}."}
        else:
            properties[name] = {
                "enum": [None, *foreign.neutral],
                "description": f"Not available: {foreign.what}.",
            }
    schema: dict[str, Any] = {
        "type": "object",
        "properties": properties,
        "patternProperties": {"^_": True},
        "additionalProperties": False,
    }
    required = [name for name, inner in key.keys.items() if inner.required]
    return {**schema, "required": required} if required else schema


def _property(key: Key) -> dict[str, Any]:
    """Return the schema of one key."""
    if key.variants is not None:
        schema = _kinds(key)
    elif key.section is not None:
        schema = _object(key, {})
    else:
        schema = _value(key.annotation, key.setting)
    if key.named:
        schema = {
            "type": "object",
            "patternProperties": {"^_": True},
            "additionalProperties": schema,
        }
    if key.is_section and key.value is None:
        schema = {"anyOf": [schema, {"type": "null"}]}
    default = {} if key.required or key.is_section else {"default": thaw(key.value)}
    return {"description": key.setting.doc, **schema, **default}


def _kinds(key: Key) -> dict[str, Any]:
    """Return the schema of a section of several kinds; its `type` chooses its other keys."""
    assert key.variants is not None
    names = {name: [name, *kind.alias] for name, kind in key.kinds.items()}
    every = [spelling for spellings in names.values() for spelling in spellings]
    branches = []
    for name, kind in key.kinds.items():
        condition: dict[str, Any] = {"properties": {"type": {"enum": names[name]}}}
        if name != key.variants.default:
            condition["required"] = ["type"]
        tag = {"type": {"enum": names[name], "description": kind.setting.doc}}
        branches.append({"if": condition, "then": _object(kind, tag)})
    schema: dict[str, Any] = {
        "type": "object",
        "properties": {"type": {"enum": every}},
        "allOf": branches,
    }
    return schema if key.variants.default else {**schema, "required": ["type"]}


def _value(annotation: Any, setting: Setting) -> dict[str, Any]:
    """Return the schema of a value."""
    alternatives = alternatives_of(annotation)
    if len(alternatives) > 1:
        return {"anyOf": [_value(alternative, setting) for alternative in alternatives]}
    if annotation is type(None):
        return {"type": "null"}
    if typing.get_origin(annotation) is Mapping:
        inside = typing.get_args(annotation)[1]
        return {
            "type": "object",
            "additionalProperties": True if inside is Any else _value(inside, setting),
        }
    if typing.get_origin(annotation) is tuple:
        return _array(annotation, setting)
    if setting.choices is not None:
        every = {"enum": list(setting.choices)}
        anyhow = (
            {"type": "string", "pattern": _in_any_case("|".join(setting.choices))}
            if setting.any_case
            else None
        )
        return {"anyOf": [every, anyhow]} if anyhow else every
    bounds = {
        "minimum": setting.minimum,
        "exclusiveMinimum": setting.above,
        "maximum": setting.maximum,
        "exclusiveMaximum": setting.below,
    }
    limits = {
        name: bound
        for name, bound in bounds.items()
        if bound is not None and annotation in (int, float)
    }
    form = {}
    if setting.pattern and annotation is str:
        form["pattern"] = (
            _in_any_case(setting.pattern) if setting.any_case else f"^(?:{setting.pattern})$"
        )
    return {"type": _SCALARS[annotation], **limits, **form}


def _in_any_case(pattern: str) -> str:
    """Return a pattern that matches in any case; JSON Schema has no flag for that."""

    def both_cases(match: re.Match[str]) -> str:
        text = match[0]
        return text if text.startswith("\\") else f"[{text.upper()}{text}]"

    in_any_case = re.sub(r"\\.|[a-z]", both_cases, pattern)  # an escape stays as it is
    return f"^(?:{in_any_case})$"


def _array(annotation: Any, setting: Setting) -> dict[str, Any]:
    """Return the schema of a list, or of a single value in place of a list of one."""
    elements = typing.get_args(annotation)
    items = _value(elements[0], setting)
    schema: dict[str, Any] = {"type": "array", "items": items}
    if setting.nonempty and elements[1] is Ellipsis:
        schema["minItems"] = 1
    if elements[1] is not Ellipsis:
        schema.update(minItems=len(elements), maxItems=len(elements))
    return {"anyOf": [schema, items]} if setting.lone else schema
