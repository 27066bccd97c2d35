"""Names of metrics in reports: those of several branches are called metric/branch."""

from __future__ import annotations

from collections.abc import Iterable


def branch_of(name: str) -> str:
    """Return the branch of a metric, "" where there is only one."""
    return name.partition("/")[2]


def column(name: str, ending: str) -> str:
    """Return deepmd-kit's name of a column: "rmse_e" and "val" to "rmse_e_val", "rmse_e/hot" to "rmse_e_val_hot"."""
    metric, _, branch = name.partition("/")
    return f"{metric}_{ending}_{branch}" if branch else f"{metric}_{ending}"


def in_order(names: Iterable[str]) -> list[str]:
    """Sort metrics by their names, those of each branch together, branches as they come."""
    given = list(names)
    branches = list(dict.fromkeys(map(branch_of, given)))
    return sorted(given, key=lambda name: (branches.index(branch_of(name)), name))
