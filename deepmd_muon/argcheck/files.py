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


def read(path: Path) -> dict[str, Any]:
    """Parse a JSON or YAML file whose outermost value is an object.

    Raises
    ------
    InputError
        When it cannot be read or parsed, or repeats a key that is not a comment.
    """
    source = str(path)
    is_yaml = path.suffix.lower() in (".yaml", ".yml")
    limit = MAX_YAML_BYTES if is_yaml else MAX_BYTES
    try:
        with open_regular(path) as file:
            content = file.read(limit + 1)
        if len(content) > limit:
            raise _error(source, f"has more than {limit >> 10} KiB, which no input needs")
        text = content.decode("utf-8-sig").replace("\r\n", "\n")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise _error(source, f"cannot be read: {reason}") from error
    data = _parse_yaml(text, source) if is_yaml else _parse_json(text, source)
    _check_bounds(data, source)
    if not isinstance(data, dict):
        raise _error(source, f"must hold an object with sections; found {shown(data)}")
    problems = list(_repeated_keys(data, ()))
    if problems:
        raise InputError(problems, source)
    return data


def _error(source: str, problem: str) -> InputError:
    """Return the error of a file as a whole."""
    return InputError([Problem("", problem)], source)


class _Object(dict[Any, Any]):
    """An object of a file, with the keys that the file repeats."""

    repeated: tuple[str, ...] = ()

    @classmethod
    def of(cls, pairs: list[tuple[Any, Any]]) -> _Object:
        """Make an object of its key-value pairs."""
        made = cls(pairs)
        made.repeated = _repeated([key for key, _ in pairs])
        return made


def _repeated(keys: list[Any]) -> tuple[str, ...]:
    """Return the keys that occur more than once."""
    return tuple(sorted({str(key) for key, count in Counter(keys).items() if count > 1}))


def _repeated_keys(value: Any, path: tuple[str, ...]) -> Iterator[Problem]:
    """Yield a problem for every key that an object repeats, except comments."""
    if isinstance(value, _Object):
        for key in value.repeated:
            if not key.startswith("_"):
                yield Problem(
                    "/".join((*path, key)),
                    "is given more than once in the same object; keep one of them",
                )
    inner: Iterable[tuple[Any, Any]] = ()
    if isinstance(value, dict):
        inner = value.items()
    elif isinstance(value, list):
        inner = enumerate(value)
    for key, element in inner:
        yield from _repeated_keys(element, (*path, str(key)))


# ----- JSON --------------------------------------------------------------------------------------

_JSON_WORDS = {"True": "true", "False": "false", "None": "null"}
_MARKED_CHARACTERS = 110  # of a long line that an error shows


def _parse_json(text: str, source: str) -> Any:
    try:
        return json.loads(text, object_pairs_hook=_Object.of)
    except json.JSONDecodeError as error:
        place = f"line {error.lineno}, column {error.colno}"
        mistake = _json_mistake(text, error)
        raise _error(source, f"is not JSON: {mistake} at {place}{_marked(text, error)}") from error
    except RecursionError as error:
        raise _error(source, "is nested too deeply") from error
    except ValueError as error:  # Python refuses to read numbers of thousands of digits
        raise _error(source, f"is not JSON that can be read: {error}") from error


def _json_mistake(text: str, error: json.JSONDecodeError) -> str:
    """Describe a common mistake; return the parser's message for any other."""
    before = text[: error.pos].rstrip()
    after = text[error.pos :].lstrip()
    # Python before 3.13 stops behind a comma after the last entry, later versions at it.
    is_behind_comma = before.endswith(",") and after[:1] in ("]", "}")
    follows_entry = before[-1:] not in ("[", "{")
    is_at_comma = after[:1] == "," and follows_entry and after[1:].lstrip()[:1] in ("]", "}")
    if is_behind_comma or is_at_comma:
        return "a comma after the last entry (remove it)"
    if after.startswith(("//", "/*", "#")):
        return 'a comment (JSON has none; write a key that starts with "_")'
    if after.startswith("'"):
        return 'a single quote (write "…")'
    if word := re.match(r"True|False|None", after):
        return f"Python's {word[0]} (write {_JSON_WORDS[word[0]]})"
    if not after:
        return "the file ends before every bracket is closed,"
    if error.msg == "Expecting ',' delimiter":
        return "a comma is missing"
    return error.msg


def _marked(text: str, error: json.JSONDecodeError) -> str:
    """Return the line of an error with a mark below its column; of a long line, the part there."""
    lines = text.splitlines()
    line = lines[error.lineno - 1] if error.lineno <= len(lines) else ""
    if not line.strip():
        return ""
    start = max(0, error.colno - 60)
    indent = " " * (error.colno - 1 - start)
    return f"\n    {line[start : start + _MARKED_CHARACTERS]}\n    {indent}^"


# ----- YAML --------------------------------------------------------------------------------------

_TAG = "tag:yaml.org,2002:"
_JSON_TYPES = ("null", "bool", "int", "float", "str", "seq", "map")


class _YamlLoader(yaml.SafeLoader):
    """YAML 1.2's core schema.

    1e-3 is a number; yes, no, on, off, 12:30 and 2026-11-21 are words.
    """

    yaml_implicit_resolvers = {  # noqa: RUF012 - PyYAML declares it so
        first_letter: [(tag, rule) for tag, rule in rules if tag in (f"{_TAG}null", f"{_TAG}merge")]
        for first_letter, rules in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }
    yaml_constructors = {  # noqa: RUF012 - PyYAML declares it so
        tag: constructor
        for tag, constructor in yaml.SafeLoader.yaml_constructors.items()
        # None is PyYAML's constructor for all other tags: it raises an error.
        if tag is None or tag.removeprefix(_TAG) in _JSON_TYPES
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

    def construct_map(self, node: yaml.MappingNode) -> Iterator[_Object]:
        """Build an object after its contents, so that PyYAML rejects one that contains itself."""
        # A file may override the keys that "<<" merges in, so these do not count as repeated.
        written_keys = [
            self._construct_key(key) for key, _ in node.value if key.tag != f"{_TAG}merge"
        ]
        self.flatten_mapping(node)
        made = _Object()
        for key, value in node.value:
            made[self._construct_key(key)] = self.construct_object(value, deep=True)
        made.repeated = _repeated(written_keys)
        yield made

    def _construct_key(self, node: yaml.Node) -> Hashable:
        key = self.construct_object(node, deep=True)
        return key if isinstance(key, Hashable) else str(key)


def _construct_int(loader: _YamlLoader, node: yaml.ScalarNode) -> int:
    text: str = node.value
    return int(text, {"0o": 8, "0x": 16}.get(text[:2], 10))


# PyYAML matches a rule against the beginning of a word, so each rule ends in \Z. The last argument
# lists the characters that such a word can begin with.
_YamlLoader.add_implicit_resolver(
    f"{_TAG}bool", re.compile(r"(true|True|TRUE|false|False|FALSE)\Z"), list("tTfF")
)
_YamlLoader.add_implicit_resolver(
    f"{_TAG}int", re.compile(r"([-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+)\Z"), list("-+0123456789")
)
_YamlLoader.add_implicit_resolver(
    f"{_TAG}float",
    re.compile(
        r"([-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?"
        r"|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN))\Z"
    ),
    list("-+.0123456789"),
)
_YamlLoader.add_constructor(f"{_TAG}int", _construct_int)
_YamlLoader.add_constructor(f"{_TAG}map", _YamlLoader.construct_map)


def _parse_yaml(text: str, source: str) -> Any:
    try:
        return yaml.load(text, _YamlLoader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = f" at line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        reason = getattr(error, "problem", None) or "it cannot be parsed"
        raise _error(source, f"is not YAML: {reason}{place}") from error
    except RecursionError as error:
        raise _error(source, "is nested too deeply") from error


# ----- bounds ------------------------------------------------------------------------------------

_SURROGATE = re.compile("[\ud800-\udfff]")


def _check_bounds(data: Any, source: str) -> None:
    """Reject content that no input needs and later code cannot handle.

    Such are aliases that multiply, deep nesting, huge numbers and broken characters.
    """
    stack = [(data, 0)]
    count = 0
    while stack:
        value, depth = stack.pop()
        count += 1
        if count > MAX_VALUES:
            raise _error(source, f"stands for more than {MAX_VALUES} values")
        if depth > MAX_DEPTH:
            raise _error(source, f"is nested deeper than {MAX_DEPTH} levels")
        words: Iterable[Any] = [value]
        inner: Iterable[Any] = ()
        if isinstance(value, dict):
            words = value.keys()
            inner = value.values()
        elif isinstance(value, list):
            inner = value
        stack += [(element, depth + 1) for element in inner]
        if type(value) is int and abs(value) >= 1 << 63:
            raise _error(
                source,
                f"holds a whole number of {_count_digits(value)} digits, which does not fit into "
                "64 bits",
            )
        for word in words:
            if not isinstance(word, str):
                continue
            if _SURROGATE.search(word):
                raise _error(source, "holds half of a surrogate pair, which is not a character")
            if "\0" in word:
                raise _error(source, "holds the character NUL, which no name may contain")


def _count_digits(value: int) -> int:
    # Python refuses to write numbers of more than 4,300 digits; YAML's hexadecimal ones may have
    # more.
    return int((abs(value).bit_length() - 1) * math.log10(2)) + 1
