"""Values of JSON against Python types: what fits, what is converted, and how a type is called in a message."""

from __future__ import annotations

import dataclasses
import math
import types
import typing
from collections.abc import Iterator
from typing import Any

from deepmd_muon.optim.setting import Setting


@dataclasses.dataclass(frozen=True)
class Mismatch:
    """Why a value is not of the type its key asks for.

    Attributes
    ----------
    faults
        What was asked for and what was found, each with the indices that lead there inside a list.
    """

    faults: tuple[tuple[tuple[int, ...], str], ...]


def convert(value: Any, annotation: Any) -> Any:
    """Return `value` as the annotated type, or a `Mismatch` when it does not fit.

    A list becomes a tuple, a whole number stands for a float, and a float without a fraction (1e6) for a whole
    number. A truth value is never a number, and NaN and infinity are no values.
    """
    alternatives = alternatives_of(annotation)
    if len(alternatives) > 1:
        return _convert_any(value, alternatives, annotation)
    if typing.get_origin(annotation) is tuple:
        return _convert_list(value, annotation)
    fitted = _scalar(value, annotation)
    if fitted is None and not (value is None and annotation is type(None)):
        return _mismatch(value, annotation)
    return fitted


def _scalar(value: Any, annotation: Any) -> Any:
    """Return a scalar as the annotated type, or None when it does not fit."""
    if typing.get_origin(annotation) is typing.Literal:
        # Which of the choices it must be is said by the setting's own rule.
        return value if any(type(value) is type(choice) for choice in typing.get_args(annotation)) else None
    if annotation is bool or isinstance(value, bool):
        return value if annotation is bool and isinstance(value, bool) else None
    if annotation is int and isinstance(value, (int, float)):
        return int(value) if math.isfinite(value) and value == int(value) else None
    if annotation is float and isinstance(value, (int, float)):
        return _finite(value)
    return value if annotation is str and isinstance(value, str) else None


def _finite(value: float) -> float | None:
    """Return a number as a float, or None when a float cannot hold it."""
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def _convert_any(value: Any, alternatives: tuple[Any, ...], annotation: Any) -> Any:
    """Return the value as the first member of a union that it fits."""
    lists = [a for a in alternatives if typing.get_origin(a) is tuple]
    if isinstance(value, list) and len(lists) == 1:
        # The wrong element of a list says more than that no member fits.
        return convert(value, lists[0])
    attempts = (convert(value, alternative) for alternative in alternatives)
    return next((fitted for fitted in attempts if not isinstance(fitted, Mismatch)), _mismatch(value, annotation))


def _convert_list(value: Any, annotation: Any) -> Any:
    """Return a list as a tuple of the annotated element types."""
    elements = typing.get_args(annotation)
    fixed = not (len(elements) == 2 and elements[1] is Ellipsis)
    if not isinstance(value, (list, tuple)) or (fixed and len(value) != len(elements)):
        return _mismatch(value, annotation)
    kinds = elements if fixed else (elements[0],) * len(value)
    converted = tuple(convert(element, kind) for element, kind in zip(value, kinds, strict=True))
    faults = tuple(
        ((index, *where), message)
        for index, element in enumerate(converted)
        if isinstance(element, Mismatch)
        for where, message in element.faults
    )
    return Mismatch(faults) if faults else converted


def _mismatch(value: Any, annotation: Any) -> Mismatch:
    return Mismatch((((), f"must be {describe(annotation)}; found {shown(value)}"),))


_NAMES: dict[Any, tuple[str, str]] = {
    bool: ("true or false", "truth values"),
    int: ("a whole number", "whole numbers"),
    float: ("a number", "numbers"),
    str: ("a string", "strings"),
    type(None): ("null", "nulls"),
}


def describe(annotation: Any, *, plural: bool = False) -> str:
    """Say in words what values an annotation allows, null as an option left out."""
    alternatives = [a for a in alternatives_of(annotation) if a is not type(None)]
    if len(alternatives) > 1:
        return " or ".join(describe(a, plural=plural) for a in alternatives)
    kind = alternatives[0] if alternatives else type(None)
    if typing.get_origin(kind) is typing.Literal:
        return describe(type(typing.get_args(kind)[0]), plural=plural)
    if typing.get_origin(kind) is not tuple:
        return _NAMES[kind][plural]
    elements = typing.get_args(kind)
    inner = describe(elements[0], plural=True)
    if type(None) in alternatives_of(elements[0]):
        inner += " or nulls"
    many = elements[1] is Ellipsis
    head = ("lists of " if plural else "a list of ") + ("" if many else f"{len(elements)} ")
    return head + inner


def shown(value: Any) -> str:
    """Return a value as it would stand in JSON, with its kind, shortened when long."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, dict):
        return "an object"
    text = repr(value)
    text = text if len(text) <= 60 else text[:57] + "..."
    kind = "the string " if isinstance(value, str) else "the list " if isinstance(value, (list, tuple)) else ""
    return kind + text


def alternatives_of(annotation: Any) -> tuple[Any, ...]:
    """Return the members of a union, or the annotation itself."""
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return typing.get_args(annotation)
    return (annotation,)


def dargs_types(annotation: Any, setting: Setting) -> list[Any]:
    """Return the types under which dargs checks plain values of an annotation."""
    return list(_dargs_types(annotation, setting))


def _dargs_types(annotation: Any, setting: Setting) -> Iterator[Any]:
    for kind in alternatives_of(annotation):
        if typing.get_origin(kind) is tuple:
            yield list_type(kind)
            if setting.lone:
                yield typing.get_args(kind)[0]
        elif typing.get_origin(kind) is typing.Literal:
            yield from {type(choice) for choice in typing.get_args(kind)}
        else:
            yield kind


def list_type(annotation: Any) -> Any:
    """Return a tuple annotation as the list annotation of its JSON form."""
    element = typing.get_args(annotation)[0]
    if typing.get_origin(element) is tuple:
        element = list_type(element)
    return types.GenericAlias(list, (element,))
