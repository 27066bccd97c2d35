"""What a setting allows, in the words of the reference."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator
from typing import Any

from deepmd_muon.setting import Setting


def limits_of(setting: Setting) -> Iterator[str]:
    """Yield choices and range of a setting, and what it needs."""
    if values := values_of(setting):
        yield values
    if bounds := " and ".join(bounds_of(setting)):
        yield bounds
    yield from conditions(setting)


def values_of(setting: Setting) -> str:
    """List the choices of a value, or describe its forms; empty if only its type matters."""
    values = setting.forms if setting.choices is None else choices_of(setting.choices)
    return f"{values}, in any case" if setting.any_case else values


def conditions(setting: Setting) -> Iterator[str]:
    """Yield what a setting needs in order to have an effect."""
    return (f"no effect without {needs.words}" for needs in setting.needs)


def choices_of(choices: Collection[Any]) -> str:
    """List the choices of a value."""
    return f"{'one of' if len(choices) > 1 else 'only'} {', '.join(map(as_json, choices))}"


def bounds_of(setting: Setting) -> Iterator[str]:
    """Yield the bounds of a number."""
    for sign, bound in (
        ("≥", setting.minimum),
        (">", setting.above),
        ("≤", setting.maximum),
        ("<", setting.below),
    ):
        if bound is not None:
            yield f"{sign} {bound:g}"


def as_json(value: Any) -> str:
    """Return a value as it would stand in an input."""
    return json.dumps(value, ensure_ascii=False)
