"""Systems that a text file lists."""

from __future__ import annotations

from pathlib import Path

from deepmd_muon.cli.errors import CommandError


def listed_systems(path: str) -> list[str]:
    """Return the systems of a text file, one a line; empty lines and those that begin with # do not count.

    Raises
    ------
    CommandError
        When there is no such file.
    """
    if not Path(path).exists():
        raise CommandError(f"there is no list of systems {path}")
    names = [line.strip() for line in Path(path).read_text(encoding="utf-8").splitlines()]
    return [name for name in names if name and not name.startswith("#")]
