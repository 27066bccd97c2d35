"""Which settings of a section a fast path implements.

This module imports neither torch nor other modules.

A fast path computes what a slow path defines. A gate that listed what the fast path lacks would let
a new setting through, which the fast path would then ignore. A `Coverage` lists what the fast path
implements: a setting that it does not name is covered at its default value only.
`source/tests/settings_changes.py` changes each setting in turn.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from typing import Any


@dataclasses.dataclass(frozen=True)
class Coverage:
    """The settings of a section with which a fast path gives the results of its slow path.

    Attributes
    ----------
    settings
        Names of settings whose every value is covered: the fast path reads them, or they act
        outside of both paths. Those of a sub-section are paths such as "repflow/e_dim"; the name of
        the sub-section covers all of it.
    values
        The covered values of further settings, the default included if it is covered.
    """

    settings: frozenset[str]
    values: Mapping[str, Collection[Any]] = dataclasses.field(default_factory=dict)

    def uncovered(self, section: Any, path: str = "") -> tuple[str, ...]:
        """Return the names of a section's settings whose value is not covered.

        `path` is put before them.
        """
        names: list[str] = []
        for field in dataclasses.fields(section):
            name = path + field.name
            value = getattr(section, field.name)
            if name in self.settings:
                continue
            if dataclasses.is_dataclass(value):
                names += self.uncovered(value, f"{name}/")
            elif value not in self.values.get(name, (field.default,)):
                names.append(name)
        return tuple(names)
