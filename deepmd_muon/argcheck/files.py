"""Parse JSON and YAML files and report repeated keys."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator
from pathlib import Path
from typing import Any

import yaml

from deepmd_muon.argcheck.errors import InputError, Problem
from deepmd_muon.files import open_regular
from deepmd_muon.setting import shown

#: Bounds on an input; the largest in use have some hundred systems. Parsing YAML takes a hundred
#: times longer.
MAX_BYTES = 8 << 20
MAX_YAML_BYTES = 1 << 18
MAX_VALUES = 200_000
MAX_DEPTH = 64
MAX_MERGED = 1000
_SURROGATE = re.compile("[\ud800-\udfff]")

_JSON_WORDS = {"True": "true", "False": "false", "None": "null"}


class _Object(dict[Any, Any]):
    """An object of a file, with the keys that the file repeats."""

    doubled: tuple[str, ...] = ()

    @classmethod
    def of(cls, pairs: list[tuple[Any, Any]]) -> _Object:
        """Make an object of its key-value pairs."""
        made = cls(pairs)
        made.doubled = _doubles([key for key, _ in pairs])
        return made


def _doubles(keys: list[Any]) -> tuple[str, ...]:
    """Return the keys that occur more than once."""
    return tuple(sorted({str(key) for key, count in Counter(keys).items() if count > 1}))


_TAG = "tag:yaml.org,2002:"


class _YamlLoader(yaml.SafeLoader):
    """YAML 1.2's core schema: 1e-3 is a number.

    Yes, no, on, off, 12:30 and 2026-11-21 are words.
    """

    yaml_implicit_resolvers = {  # noqa: RUF012 - PyYAML declares it so
        first: [(tag, rule) for tag, rule in rules if tag in (f"{_TAG}null", f"{_TAG}merge")]
        for first, rules in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }
    yaml_constructors = {  # noqa: RUF012 - PyYAML declares it so
        tag: made
        for tag, made in yaml.SafeLoader.yaml_constructors.items()
        # The types of JSON. None is PyYAML's constructor for all other tags: it raises an error.
        if tag is None
        or tag.removeprefix(_TAG) in ("null", "bool", "int", "float", "str", "seq", "map")
    }

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        """Build a value; report the place of one that Python cannot convert (`!!int many`)."""
        try:
            return super().construct_object(node, deep)
        except (ValueError, KeyError, IndexError) as error:
            reason = f"{shown(node.value)} is not of type {node.tag.removeprefix(_TAG)}"
            raise yaml.constructor.ConstructorError(None, None, reason, node.start_mark) from error

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        """Merge in the mappings that "<<" names; raise if merges of merges multiply the keys."""
        super().flatten_mapping(node)
        if len(node.value) > MAX_MERGED:
            raise yaml.constructor.ConstructorError(
                None, None, "merges multiply its keys", node.start_mark
            )

    def object(self, node: yaml.MappingNode) -> Iterator[_Object]:
        """Build an object after its contents, so that PyYAML rejects an object that contains itself."""
        # An object may override the keys that "<<" merges in, so only its own keys count as
        # repeated.
        own = [key for key, _ in node.value if key.tag != f"{_TAG}merge"]
        doubled = _doubles([_hashable(self.construct_object(key, deep=True)) for key in own])
        self.flatten_mapping(node)
        made = _Object()
        for key, value in node.value:
            made[_hashable(self.construct_object(key, deep=True))] = self.construct_object(
                value, deep=True
            )
        made.doubled = doubled
        yield made


def _hashable(key: object) -> Hashable:
    return key if isinstance(key, Hashable) else str(key)


def _integer(loader: _YamlLoader, node: yaml.ScalarNode) -> int:
    text: str = node.value
    return int(text, {"0o": 8, "0x": 16}.get(text[:2], 10))


# PyYAML matches a rule against the beginning of a word, so each rule ends in \Z.
for _name, _rule, _first in (
    ("bool", r"(true|True|TRUE|false|False|FALSE)\Z", "tTfF"),
    ("int", r"([-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+)\Z", "-+0123456789"),
    (
        "float",
        r"([-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN))\Z",
        "-+.0123456789",
    ),
):
    _YamlLoader.add_implicit_resolver(_TAG + _name, re.compile(_rule), list(_first))
_YamlLoader.add_constructor(f"{_TAG}int", _integer)
_YamlLoader.add_constructor(f"{_TAG}map", _YamlLoader.object)


def read(path: Path) -> dict[str, Any]:
    """Parse a JSON or YAML file whose outermost value is an object.

    Raises
    ------
    InputError
        When it cannot be read or parsed, or repeats a key that is not a comment.
    """
    source = str(path)
    is_yaml = path.suffix.lower() in (".yaml", ".yml")
    most = MAX_YAML_BYTES if is_yaml else MAX_BYTES
    try:
        with open_regular(path) as file:
            content = file.read(most + 1)
        if len(content) > most:
            raise InputError(
                [Problem("", f"has more than {most >> 10} KiB, which no input needs")], source
            )
        text = content.decode("utf-8-sig").replace("\r\n", "\n")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise InputError([Problem("", f"cannot be read: {reason}")], source) from error
    data = _parse_yaml(text, source) if is_yaml else _parse_json(text, source)
    _bounded(data, source)
    if not isinstance(data, dict):
        raise InputError(
            [Problem("", f"must hold an object with sections; found {shown(data)}")], source
        )
    problems = list(_doubled(data, ()))
    if problems:
        raise InputError(problems, source)
    return data


def _parse_json(text: str, source: str) -> Any:
    try:
        return json.loads(text, object_pairs_hook=_Object.of)
    except json.JSONDecodeError as error:
        where = f"line {error.lineno}, column {error.colno}"
        problem = f"is not JSON: {_json_mistake(text, error)} at {where}{_marked(text, error)}"
        raise InputError([Problem("", problem)], source) from error
    except RecursionError as error:
        raise InputError([Problem("", "is nested too deeply")], source) from error
    except ValueError as error:  # Python refuses to read numbers of thousands of digits
        raise InputError([Problem("", f"is not JSON that can be read: {error}")], source) from error


def _json_mistake(text: str, error: json.JSONDecodeError) -> str:
    """Describe a common mistake; return the parser's message for any other."""
    before, rest = text[: error.pos].rstrip(), text[error.pos :].lstrip()
    trailing = before.endswith(",") and rest[:1] in ("]", "}")
    # Newer parsers stop at the comma itself.
    if trailing or (
        rest[:1] == "," and before[-1:] not in ("[", "{") and rest[1:].lstrip()[:1] in ("]", "}")
    ):
        return "a comma after the last entry (remove it)"
    if rest.startswith(("//", "/*", "#")):
        return 'a comment (JSON has none; write a key that starts with "_")'
    if rest.startswith("'"):
        return 'a single quote (write "…")'
    if word := re.match(r"True|False|None", rest):
        return f"Python's {word[0]} (write {_JSON_WORDS[word[0]]})"
    if not rest:
        return "the file ends before every bracket is closed,"
    if error.msg == "Expecting ',' delimiter":
        return "a comma is missing"
    return error.msg


def _marked(text: str, error: json.JSONDecodeError) -> str:
    """Return the line of an error with a mark below its column.

    Of a long line, the part around it.
    """
    lines = text.splitlines()
    line = lines[error.lineno - 1] if error.lineno <= len(lines) else ""
    first = max(0, error.colno - 60)
    return (
        f"\n    {line[first : first + 110]}\n    {' ' * (error.colno - 1 - first)}^"
        if line.strip()
        else ""
    )


def _digits(value: int) -> int:
    # Python refuses to write numbers of more than 4,300 digits; YAML's hexadecimal ones may have
    # more.
    return int((abs(value).bit_length() - 1) * math.log10(2)) + 1


def _parse_yaml(text: str, source: str) -> Any:
    try:
        return yaml.load(text, _YamlLoader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f" at line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        reason = getattr(error, "problem", None) or "it cannot be parsed"
        raise InputError([Problem("", f"is not YAML: {reason}{where}")], source) from error
    except RecursionError as error:
        raise InputError([Problem("", "is nested too deeply")], source) from error


def _bounded(data: Any, source: str) -> None:
    """Reject content that inputs do not need and later code cannot handle: multiplying aliases, depth, huge numbers."""
    stack = [(data, 0)]
    count, problem = 0, None
    while stack and problem is None:
        value, depth = stack.pop()
        count += 1
        inner = (
            value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
        )
        stack += [(element, depth + 1) for element in inner]
        words = [*value] if isinstance(value, dict) else [value]
        if count > MAX_VALUES:
            problem = f"stands for more than {MAX_VALUES} values"
        elif depth > MAX_DEPTH:
            problem = f"is nested deeper than {MAX_DEPTH} levels"
        elif type(value) is int and abs(value) >= 1 << 63:
            problem = (
                f"holds a whole number of {_digits(value)} digits, which does not fit into 64 bits"
            )
        elif any(isinstance(word, str) and _SURROGATE.search(word) for word in words):
            problem = "holds half of a surrogate pair, which is not a character"
        elif any(isinstance(word, str) and "\0" in word for word in words):
            problem = "holds the character NUL, which no name may contain"
    if problem:
        raise InputError([Problem("", problem)], source)


def _doubled(value: Any, path: tuple[str, ...]) -> Iterator[Problem]:
    """Yield a problem for every key that an object repeats, except comments."""
    if isinstance(value, _Object):
        for key in value.doubled:
            if not key.startswith("_"):
                yield Problem(
                    "/".join((*path, key)),
                    "is given more than once in the same object; keep one of them",
                )
    inner: Iterable[tuple[Any, Any]] = ()
    if isinstance(value, (dict, list)):
        inner = value.items() if isinstance(value, dict) else enumerate(value)
    for key, element in inner:
        yield from _doubled(element, (*path, str(key)))
