"""Walk the schema over an input, collect everything that is wrong and build the settings."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any, Generic, TypeVar

from deepmd_muon.argcheck.errors import Problem
from deepmd_muon.argcheck.schema import Key, advice_of, foreign_of, rules_of, tree
from deepmd_muon.section import Foreign
from deepmd_muon.setting import (
    Mismatch,
    Setting,
    convert,
    describe,
    did_you_mean,
    nearest_of,
    one_of,
    shown,
)

T = TypeVar("T")
Path = tuple[str, ...]

_WRONG = object()
# At most this many unknown keys of a section are reported one by one.
_MOST_UNKNOWN = 20


@dataclasses.dataclass(frozen=True)
class Checked(Generic[T]):
    """Outcome of a check: the settings, or the problems found."""

    settings: T | None
    problems: tuple[Problem, ...]
    notices: tuple[str, ...]
    idle: tuple[Problem, ...]  # given settings without effect beside the others


@dataclasses.dataclass
class _Found:
    """The valid values of one section, and how the file spells its keys."""

    section: type
    values: dict[str, Any]
    spellings: dict[str, str]


def check(section: type[T], given: object) -> Checked[T]:
    """Check the content of an input file against a settings dataclass.

    Return the settings or every problem.
    """
    walk = _Walk(tree(section))
    found = walk.section(walk.root, given, ())
    settings = _freeze(found) if found is not None and not walk.problems else None
    return Checked(settings, tuple(walk.problems), tuple(walk.notices), tuple(walk.idle))


def _freeze(found: Any) -> Any:
    """Build the dataclasses from the valid values."""
    if isinstance(found, _Found):
        return found.section(**{name: _freeze(value) for name, value in found.values.items()})
    return (
        {name: _freeze(value) for name, value in found.items()}
        if isinstance(found, dict)
        else found
    )


class _Walk:
    """One pass over an input."""

    def __init__(self, root: Key) -> None:
        self.root = root
        self.problems: list[Problem] = []
        self.notices: list[str] = []
        self.idle: list[Problem] = []

    def problem(self, path: Path, message: str, elsewhere: str = "") -> None:
        self.problems.append(Problem("/".join(path), message, elsewhere))

    def section(self, key: Key, given: object, path: Path) -> _Found | None:
        """Check an object.

        Return its valid values, or None if it is not an object or of an unknown kind.
        """
        if not isinstance(given, dict):
            self.problem(path, f"must be an object with keys of its own; found {shown(given)}")
            return None
        kind = self.kind(key, given, path) if key.variants else key
        if kind is None or kind.section is None:
            return None
        return self.section_of_kind(kind, given, path, tagged=key.variants is not None)

    def section_of_kind(
        self, kind: Key, given: dict[Any, Any], path: Path, *, tagged: bool
    ) -> _Found:
        """Check an object whose kind is known; return its valid values."""
        assert kind.section is not None
        spellings = self.spellings(kind, given, path, tagged=tagged)
        found = _Found(kind.section, {}, spellings)
        for name, inner in kind.keys.items():
            if name not in spellings:
                if inner.required:
                    wanted = "a section" if inner.is_section else describe(inner.annotation)
                    self.problem((*path, name), f"is missing; give {wanted}")
                else:
                    found.values[name] = inner.value
                continue
            value = self.value(inner, given[spellings[name]], (*path, spellings[name]))
            if value is not _WRONG:
                found.values[name] = value
        self.rules(found, path)
        self.needs(kind, found, path)
        return found

    def kind(self, key: Key, given: dict[Any, Any], path: Path) -> Key | None:
        """Return the kind that a section's `type` names."""
        assert key.variants is not None
        wanted = one_of(key.kinds)
        if "type" not in given:
            if key.variants.default is None:
                self.problem((*path, "type"), f"is missing; give {wanted}")
                return None
            return key.kinds[key.variants.default]
        name = given["type"]
        if isinstance(name, str):
            kind = key.kinds.get(key.variants.alias.get(name, name))
            if kind is not None:
                return kind
        near = nearest_of(name, [*key.kinds, *key.variants.alias])
        self.problem((*path, "type"), f"must be {wanted}; found {shown(name)}{did_you_mean(near)}")
        self.without_kind(key, near, given, path)
        return None

    def without_kind(self, key: Key, near: str | None, given: dict[Any, Any], path: Path) -> None:
        """Report the other problems of a section whose `type` is wrong: those of the nearest kind, or of all kinds."""
        assert key.variants is not None
        names = [key.variants.alias.get(near, near)] if near else list(key.kinds)
        problems_of_kinds: list[dict[str, Problem]] = []
        for name in names:
            walk = _Walk(self.root)
            walk.section_of_kind(key.kinds[name], given, path, tagged=True)
            problems_of_kinds.append({problem.path: problem for problem in walk.problems})
        first, *others = problems_of_kinds
        self.problems += [
            problem
            for place, problem in first.items()
            if all(place in problems for problems in others)
        ]

    def spellings(
        self, kind: Key, given: dict[Any, Any], path: Path, *, tagged: bool
    ) -> dict[str, str]:
        """Match the keys of an object with those of its section.

        Report unknown and doubled ones.
        """
        assert kind.section is not None
        known = {
            spelling: key.name for key in kind.keys.values() for spelling in (key.name, *key.alias)
        }
        foreign = foreign_of(kind.section)
        spellings: dict[str, str] = {}
        unknown: list[Any] = []
        for spelling, value in given.items():
            if _comment(spelling, path) or (tagged and spelling == "type"):
                continue
            if spelling in foreign:
                self.foreign(foreign[spelling], value, (*path, spelling))
            elif spelling not in known:
                unknown.append(spelling)
                if len(unknown) <= _MOST_UNKNOWN:  # advice takes milliseconds a key
                    advice = advice_of(kind.section, str(spelling), given)
                    if advice:
                        self.problem((*path, spelling), advice)
                    else:
                        self.unknown(spelling, list(known), path)
            elif known[spelling] in spellings:
                first = spellings[known[spelling]]
                self.problem(
                    (*path, spelling),
                    f"means the same as {first!r}, which is given too; keep one of them",
                )
            else:
                spellings[known[spelling]] = spelling
        if len(unknown) > _MOST_UNKNOWN:
            self.problem(path, f"has {len(unknown) - _MOST_UNKNOWN} more unknown keys")
        return spellings

    def value(self, key: Key, given: Any, path: Path) -> Any:
        """Return a value as the field's type, or `_WRONG` after reporting the problem."""
        if given is None and key.value is None:
            return None
        if key.named:
            return self.named(key, given, path)
        if key.is_section:
            found = self.section(key, given, path)
            return _WRONG if found is None else found
        if key.setting.lone and not isinstance(given, list):
            given = [given]
        value = convert(given, key.annotation)
        if not isinstance(value, Mismatch):
            faults = tuple(_broken_rules(key.setting, value, ()))
        elif value.is_of_elements:
            faults = value.faults
        else:
            faults = (((), key.setting.mismatch(given, key.annotation, value.words)),)
        for where, message in faults:
            self.problem((*path, *map(str, where)), message)
        return _WRONG if faults else key.setting.folded(value)

    def named(self, key: Key, given: Any, path: Path) -> Any:
        """Check an object of sections; return their valid values by name."""
        if not isinstance(given, dict):
            self.problem(
                path, f"must be an object with a section for each name; found {shown(given)}"
            )
            return _WRONG
        names = [name for name in given if not _comment(name, path)]
        found = {str(name): self.section(key, given[name], (*path, str(name))) for name in names}
        return _WRONG if None in found.values() else found

    def rules(self, found: _Found, path: Path) -> None:
        """Report broken rules over several values.

        Skip a rule if one of its values is invalid itself.
        """
        for rule in rules_of(found.section):
            values = [self.look(found, name.split("/"), path) for name in rule.reads]
            if any(value is _WRONG for value in values):
                continue
            problem = rule.check(*values)
            if problem:
                self.problem((*path, *_spelled(found, rule.reads[0].split("/"))), problem)

    def needs(self, kind: Key, found: _Found, path: Path) -> None:
        """Report the given settings that have no effect beside the others.

        Skip those with an invalid value.
        """
        invalid = kind.keys.keys() - found.values.keys()
        for name, spelling in found.spellings.items():
            key = kind.keys[name]
            reads = {name, *(other for needs in key.setting.needs for other in needs.reads)}
            if reads & invalid:
                continue
            if problem := key.setting.idle(found.values[name], key.value, found.values.get):
                self.idle.append(Problem("/".join((*path, spelling)), problem))

    def look(self, found: _Found, names: list[str], path: Path) -> Any:
        """Return the value at a rule's path, a section as its settings.

        `_WRONG` if it is invalid.
        """
        value = _look(found, names)
        if not isinstance(value, (_Found, dict)):
            return value
        place = "/".join((*path, *_spelled(found, names)))
        wrong = any(f"{problem.path}/".startswith(f"{place}/") for problem in self.problems)
        return _WRONG if wrong else _freeze(value)

    def foreign(self, key: Foreign, value: Any, path: Path) -> None:
        """Accept, leave out or report a key of deepmd-kit that has no counterpart here."""
        if key.accepts(value):
            return
        if key.inert:
            self.notices.append(f"{'/'.join(path)} has no effect here and is left out: {key.what}")
            return
        harmless = " or ".join(map(shown, key.neutral))
        advice = f"remove it or set {harmless}" if key.neutral else "remove it"
        self.problem(
            path, f"asks for {key.what}, which this package does not have; {advice}", key.what
        )

    def unknown(self, spelling: Any, known: list[str], path: Path) -> None:
        """Report an unknown key with the nearest known one, here or in another section."""
        name = str(spelling)
        places = list(_places(self.root, (), ""))
        exact = [
            _where(place, kind, path)
            for other, place, kind in places
            if other == name and place[:1] == path[:1]
        ]
        exact = exact or [
            _where(place, kind, path) for other, place, kind in places if other == name
        ]
        near = nearest_of(name, known)
        far = nearest_of(name, [other for other, _, _ in places], cutoff=0.75)
        similar = [_where(place, kind, path) for other, place, kind in places if other == far]
        if exact:
            hint = f"did you mean {' or '.join(dict.fromkeys(exact))}?"
        elif near:
            hint = f"did you mean {near!r}?"
        elif similar:
            hint = f"did you mean {' or '.join(dict.fromkeys(similar))}?"
        else:
            # A less similar key would be another setting; "lr" is not "lr_adjust".
            hint = "remove it; `dp doc-train-input` lists the keys"
        self.problem((*path, name), f"is not a known key; {hint}")


def _where(place: Path, kind: str, path: Path) -> str:
    """Describe the place of a known key in a hint on a misplaced key below `path`."""
    return f"{'/'.join(place)} with type {kind!r}" if place[:-1] == path else "/".join(place)


def _broken_rules(
    setting: Setting, value: Any, where: tuple[int | str, ...]
) -> Iterator[tuple[tuple[int | str, ...], str]]:
    """Yield a setting's objections to a value, or to each element of a list or value of a map."""
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from _broken_rules(setting, inner, (*where, name))
    elif isinstance(value, tuple) and value:
        for index, element in enumerate(value):
            yield from _broken_rules(setting, element, (*where, index))
    else:
        problem = setting.problem(value)
        if problem:
            yield where, problem


def _comment(key: Any, path: Path) -> bool:
    """Whether a key is a comment, or the schema reference that editors put on top of a file."""
    return isinstance(key, str) and (key.startswith("_") or (key == "$schema" and not path))


def _look(found: Any, names: list[str]) -> Any:
    """Return the value at a rule's path, `_WRONG` if it is invalid, None below an absent section."""
    for name in names:
        found = (
            found.values.get(name, _WRONG)
            if isinstance(found, _Found)
            else getattr(found, name, None)
        )
        if found is _WRONG:
            return _WRONG
    return found


def _spelled(found: Any, names: list[str]) -> list[str]:
    """Return a rule's path as the file spells it."""
    spelled = []
    for name in names:
        spelled.append(found.spellings.get(name, name) if isinstance(found, _Found) else name)
        found = found.values.get(name) if isinstance(found, _Found) else None
    return spelled


def _places(key: Key, path: Path, kind: str) -> Iterator[tuple[str, Path, str]]:
    """Yield every spelling of every key below a section, with its path and the kind of section it is for."""
    for name, inner in key.keys.items():
        place = (*path, name)
        yield from ((spelling, place, kind) for spelling in (name, *inner.alias))
        if inner.section is not None:
            yield from _places(inner, place, "")
        for tag, choice in inner.kinds.items():
            yield from _places(choice, place, tag)
