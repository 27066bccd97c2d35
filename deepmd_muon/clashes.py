"""Outputs of a command that are files it reads, or each other: found before anything is written."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType

from deepmd_muon.files import is_special, paths_matching

# Files of a system beside its sets.
_OF_SYSTEM = frozenset({"type.raw", "type_map.raw", "nopbc", "data.mdb"})


def refuse_clashes(
    error: type[Exception],
    outputs: Mapping[str, str | os.PathLike[str] | None],
    inputs: Mapping[str, str | os.PathLike[str] | None],
    systems: Mapping[str, Iterable[str]] = MappingProxyType({}),
) -> None:
    """Refuse to write one output over another, or over something that is read.

    Parameters
    ----------
    error
        Class of the error.
    outputs
        Files by the name of their option or setting; None and devices do not count.
    inputs
        Files that are read, by what they are; None and files that do not exist do not count.
    systems
        Paths or patterns of data, as `open_systems` takes them, by what they are.

    Raises
    ------
    error
        Naming every output that is something else as well.
    """
    places = {name: Path(path) for name, path in outputs.items() if path is not None and not is_special(Path(path))}
    problems = list(_twice(places))
    existing = {name: path for name, path in places.items() if path.exists()}
    for name, path in existing.items():
        problems += [f"{name} is {what}: {path}" for what, file in inputs.items() if file and _same(path, file)]
    problems += [
        f"{name} is a file of {what} {system}: {path}"
        for what, paths in systems.items()
        for system in (paths if existing else ())
        for name, path in existing.items()
        if _is_data(path, system)
    ]
    if problems:
        raise error("; ".join(problems) + ". Give the output another name: it would be overwritten")


def _twice(places: Mapping[str, Path]) -> Iterator[str]:
    """Yield a problem for every output that is an earlier one, too."""
    seen: dict[str, str] = {}
    for name, path in places.items():
        other = seen.setdefault(os.path.realpath(path), name)
        if other != name:
            yield f"{name} is {other}: {path}"


def _same(path: Path, other: str | os.PathLike[str]) -> bool:
    return os.path.exists(other) and os.path.samefile(path, other)


def _is_data(path: Path, system: str) -> bool:
    """Return whether a file that exists is one of a system, which is a path or a pattern as `open_systems` takes."""
    system = system if os.path.exists(system) else system.partition("#")[0]
    for place in [system] if os.path.exists(system) else paths_matching(system):
        if _same(path, place):
            return True
        real, folder = os.path.realpath(path), os.path.realpath(place)
        if os.path.isdir(folder) and real.startswith(f"{folder}{os.sep}"):
            parts = Path(real).relative_to(folder).parts
            if parts[-1] in _OF_SYSTEM or any(part.startswith("set.") for part in parts[:-1]):
                return True
    return False
