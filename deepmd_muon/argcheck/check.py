"""Walk the schema over an input, collect everything that is wrong and build the settings."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

from deepmd_muon.argcheck.errors import Problem
from deepmd_muon.argcheck.schema import Key, advice_of, foreign_of, rules_of, tree
from deepmd_muon.section import Foreign, Section
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

# In place of a value that is wrong; None is a valid value.
_WRONG = object()
# At most this many unknown keys of a section are reported one by one: advice takes milliseconds.
_MOST_UNKNOWN = 20


@dataclasses.dataclass(frozen=True)
class Checked(Generic[T]):
    """Outcome of a check: the settings, or the problems.

    Attributes
    ----------
    notices
        One line for each key without effect here.
    idle
        The settings of the input that have no effect with the values of the others.
    """

    settings: T | None
    problems: tuple[Problem, ...]
    notices: tuple[str, ...]
    idle: tuple[Problem, ...]


@dataclasses.dataclass
class _SectionValues:
    """The valid values of one section, and how the file spells its keys, by name of the key."""

    section: type
    values: dict[str, Any]
    spellings: dict[str, str]


def check(section: type[T], plain: object) -> Checked[T]:
    """Check the content of an input file against a settings dataclass.

    Return the settings or every problem.
    """
    walk = _Walk(tree(section))
    values = walk.check_section(walk.root, plain, ())
    settings = None
    if values is not None and not walk.problems:
        settings = _freeze(values)
    return Checked(
        settings=settings,
        problems=tuple(walk.problems),
        notices=tuple(walk.notices),
        idle=tuple(walk.idle),
    )


def _freeze(values: Any) -> Any:
    """Build the dataclasses from the valid values."""
    if isinstance(values, _SectionValues):
        return values.section(**_freeze(values.values))
    if isinstance(values, dict):
        return {name: _freeze(value) for name, value in values.items()}
    return values


class _Walk:
    """One pass over an input, and what it has met."""

    def __init__(self, root: Key) -> None:
        self.root = root
        self.problems: list[Problem] = []
        self.notices: list[str] = []
        self.idle: list[Problem] = []

    def report(self, path: Path, message: str, elsewhere: str = "") -> None:
        self.problems.append(Problem("/".join(path), message, elsewhere))

    # ----- sections ------------------------------------------------------------------------------

    def check_section(self, key: Key, plain: object, path: Path) -> _SectionValues | None:
        """Check an object; return its valid values.

        Return None if it is not an object or of an unknown kind.
        """
        if not isinstance(plain, dict):
            self.report(path, f"must be an object with keys of its own; found {shown(plain)}")
            return None
        kind = self._kind(key, plain, path) if key.variants else key
        if kind is None or kind.section is None:
            return None
        return self._check_kind(kind, plain, path, has_type=key.variants is not None)

    def _check_kind(
        self, kind: Key, plain: dict[Any, Any], path: Path, *, has_type: bool
    ) -> _SectionValues:
        """Check an object of a known kind, which may have a key `type`; return its valid values."""
        assert kind.section is not None
        spellings = self._match_keys(kind, plain, path, has_type=has_type)
        values: dict[str, Any] = {}
        for name, key in kind.keys.items():
            if name in spellings:
                spelling = spellings[name]
                value = self._check_value(key, plain[spelling], (*path, spelling))
                if value is not _WRONG:
                    values[name] = value
            elif key.required:
                needed = "a section" if key.is_section else describe(key.annotation)
                self.report((*path, name), f"is missing; give {needed}")
            else:
                values[name] = key.value
        section = _SectionValues(kind.section, values, spellings)
        self._check_rules(section, path)
        self._collect_idle(kind, section, path)
        return section

    def _kind(self, key: Key, plain: dict[Any, Any], path: Path) -> Key | None:
        """Return the kind that a section's `type` names."""
        variants = key.variants
        assert variants is not None
        allowed = one_of(key.kinds)
        if "type" not in plain:
            if variants.default is None:
                self.report((*path, "type"), f"is missing; give {allowed}")
                return None
            return key.kinds[variants.default]
        name = plain["type"]
        if isinstance(name, str):
            kind = key.kinds.get(variants.alias.get(name, name))
            if kind is not None:
                return kind
        near = nearest_of(name, [*key.kinds, *variants.alias])
        self.report((*path, "type"), f"must be {allowed}; found {shown(name)}{did_you_mean(near)}")
        # The other keys have the problems that they have in the kind that was probably meant.
        kinds = list(key.kinds.values())
        if near:
            kinds = [key.kinds[variants.alias.get(near, near)]]
        self._report_common_problems(kinds, plain, path)
        return None

    def _report_common_problems(
        self, kinds: Sequence[Key], plain: dict[Any, Any], path: Path
    ) -> None:
        """Report the problems that a section has in every one of these kinds."""
        problems_by_kind: list[dict[str, Problem]] = []
        for kind in kinds:
            walk = _Walk(self.root)
            walk._check_kind(kind, plain, path, has_type=True)
            problems_by_kind.append({problem.path: problem for problem in walk.problems})
        for place, problem in problems_by_kind[0].items():
            if all(place in problems for problems in problems_by_kind):
                self.problems.append(problem)

    def _match_keys(
        self, kind: Key, plain: dict[Any, Any], path: Path, *, has_type: bool
    ) -> dict[str, str]:
        """Return how an object spells the keys of its section; report unknown and repeated keys."""
        assert kind.section is not None
        name_of = {
            spelling: key.name for key in kind.keys.values() for spelling in (key.name, *key.alias)
        }
        foreign = foreign_of(kind.section)
        spellings: dict[str, str] = {}
        n_unknown = 0
        for spelling, value in plain.items():
            if _is_comment(spelling, path) or (has_type and spelling == "type"):
                continue
            if spelling in foreign:
                self._check_foreign(foreign[spelling], value, (*path, spelling))
            elif spelling not in name_of:
                n_unknown += 1
                if n_unknown <= _MOST_UNKNOWN:
                    advice = advice_of(kind.section, str(spelling), plain)
                    if not advice:
                        hint = self._hint(str(spelling), list(name_of), path)
                        advice = f"is not a known key; {hint}"
                    self.report((*path, str(spelling)), advice)
            elif name_of[spelling] in spellings:
                earlier = spellings[name_of[spelling]]
                self.report(
                    (*path, spelling),
                    f"means the same as {earlier!r}, which is given too; keep one of them",
                )
            else:
                spellings[name_of[spelling]] = spelling
        if n_unknown > _MOST_UNKNOWN:
            self.report(path, f"has {n_unknown - _MOST_UNKNOWN} more unknown keys")
        return spellings

    def _check_foreign(self, foreign: Foreign, value: Any, path: Path) -> None:
        """Accept, leave out or report a key of deepmd-kit that has no counterpart here."""
        if foreign.accepts(value):
            return
        if foreign.inert:
            place = "/".join(path)
            self.notices.append(f"{place} has no effect here and is left out: {foreign.what}")
            return
        advice = "remove it"
        if foreign.neutral:
            advice += f" or set {' or '.join(map(shown, foreign.neutral))}"
        self.report(
            path,
            f"asks for {foreign.what}, which this package does not have; {advice}",
            elsewhere=foreign.what,
        )

    def _hint(self, name: str, known: list[str], path: Path) -> str:
        """Return what an unknown key below `path` may mean: a key there or in another section."""
        places = list(_places(self.root, (), ""))
        exact = [place for place in places if place.spelling == name]
        # A key of the same outermost section is likelier meant.
        nearby = [place for place in exact if place.path[:1] == path[:1]]
        candidates = [place.describe(path) for place in nearby or exact]
        if not candidates:
            near = nearest_of(name, known)
            if near:
                return f"did you mean {near!r}?"
            far = nearest_of(name, [place.spelling for place in places], cutoff=0.75)
            candidates = [place.describe(path) for place in places if place.spelling == far]
        if candidates:
            return f"did you mean {' or '.join(dict.fromkeys(candidates))}?"
        # A less similar key would be another setting: "lr" is not "lr_adjust".
        return "remove it; `dp doc-train-input` lists the keys"

    # ----- values --------------------------------------------------------------------------------

    def _check_value(self, key: Key, plain: Any, path: Path) -> Any:
        """Return a value as the field's type, or `_WRONG` after reporting the problem."""
        if isinstance(plain, Section):
            return plain  # checked elsewhere; a file holds no such object
        if plain is None and key.value is None:
            return None
        if key.named:
            return self._check_named(key, plain, path)
        if key.is_section:
            section = self.check_section(key, plain, path)
            return _WRONG if section is None else section
        setting = key.setting
        if setting.lone and not isinstance(plain, list):
            plain = [plain]
        value = convert(plain, key.annotation)
        if not isinstance(value, Mismatch):
            faults = tuple(_broken_rules(setting, value, ()))
        elif value.is_of_elements:
            faults = value.faults
        else:
            faults = (((), setting.mismatch(plain, key.annotation, value.words)),)
        for indices, message in faults:
            self.report((*path, *map(str, indices)), message)
        return _WRONG if faults else setting.folded(value)

    def _check_named(self, key: Key, plain: Any, path: Path) -> Any:
        """Check an object of sections; return their valid values by name."""
        if not isinstance(plain, dict):
            self.report(
                path, f"must be an object with a section for each name; found {shown(plain)}"
            )
            return _WRONG
        sections: dict[str, Any] = {}
        for name, inner in plain.items():
            if isinstance(inner, Section):
                sections[str(name)] = inner
            elif not _is_comment(name, path):
                sections[str(name)] = self.check_section(key, inner, (*path, str(name)))
        return _WRONG if None in sections.values() else sections

    # ----- several values ------------------------------------------------------------------------

    def _check_rules(self, section: _SectionValues, path: Path) -> None:
        """Report broken rules over several values, but not those that read an invalid value."""
        for rule in rules_of(section.section):
            names_read = [place.split("/") for place in rule.reads]
            values = [self._read(section, names, path) for names in names_read]
            if any(value is _WRONG for value in values):
                continue
            problem = rule.check(*values)
            if problem:
                self.report((*path, *_spelled(section, names_read[0])), problem)

    def _read(self, section: _SectionValues, names: Sequence[str], path: Path) -> Any:
        """Return the value at a rule's path, a section as its settings.

        Return `_WRONG` if it is invalid, and None below an absent section.
        """
        value: Any = section
        for name in names:
            value = (
                value.values.get(name, _WRONG)
                if isinstance(value, _SectionValues)
                else getattr(value, name, None)  # of settings that are a default
            )
            if value is _WRONG:
                return _WRONG
        if not isinstance(value, (_SectionValues, dict)):
            return value
        # A section can be built only if nothing below it was reported.
        place = "/".join((*path, *_spelled(section, names)))
        if any(f"{problem.path}/".startswith(f"{place}/") for problem in self.problems):
            return _WRONG
        return _freeze(value)

    def _collect_idle(self, kind: Key, section: _SectionValues, path: Path) -> None:
        """Collect the given settings that have no effect; skip those that read an invalid value."""
        invalid = kind.keys.keys() - section.values.keys()
        for name, spelling in section.spellings.items():
            key = kind.keys[name]
            names_read = {name}
            for needs in key.setting.needs:
                names_read.update(needs.reads)
            if names_read & invalid:
                continue
            problem = key.setting.idle(section.values[name], key.value, section.values.get)
            if problem:
                self.idle.append(Problem("/".join((*path, spelling)), problem))


def _is_comment(key: Any, path: Path) -> bool:
    """Whether a key is a comment, or the schema reference that editors put on top of a file."""
    return isinstance(key, str) and (key.startswith("_") or (key == "$schema" and not path))


def _spelled(section: Any, names: Sequence[str]) -> list[str]:
    """Return a rule's path as the file spells it."""
    spelled = []
    for name in names:
        if isinstance(section, _SectionValues):
            spelled.append(section.spellings.get(name, name))
            section = section.values.get(name)
        else:
            spelled.append(name)
    return spelled


def _broken_rules(
    setting: Setting, value: Any, indices: tuple[int | str, ...]
) -> Iterator[tuple[tuple[int | str, ...], str]]:
    """Yield a setting's objections to a value, or to each element of a list or value of a map."""
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from _broken_rules(setting, inner, (*indices, name))
    elif isinstance(value, tuple) and value:
        for index, element in enumerate(value):
            yield from _broken_rules(setting, element, (*indices, index))
    else:
        problem = setting.problem(value)
        if problem:
            yield indices, problem


class _Place(NamedTuple):
    """One spelling of a key, and where it belongs."""

    spelling: str
    path: Path
    kind: str  # of its section; empty for a section of one kind

    def describe(self, path: Path) -> str:
        """Describe the place in a hint on a misplaced key below `path`."""
        place = "/".join(self.path)
        return f"{place} with type {self.kind!r}" if self.path[:-1] == path else place


def _places(key: Key, path: Path, kind: str) -> Iterator[_Place]:
    """Yield every spelling of every key below a section."""
    for name, inner in key.keys.items():
        place = (*path, name)
        for spelling in (name, *inner.alias):
            yield _Place(spelling, place, kind)
        if inner.section is not None:
            yield from _places(inner, place, "")
        for tag, choice in inner.kinds.items():
            yield from _places(choice, place, tag)
