"""Names of metrics in reports; metrics of several branches are called metric/branch."""

from __future__ import annotations

from collections.abc import Iterable


def branch_of(name: str) -> str:
    """Return the branch of a metric, "" if there is only one."""
    return name.partition("/")[2]


def column(name: str, ending: str) -> str:
    """Return deepmd-kit's name of a column, such as "rmse_e_val" or "rmse_e_val_branch"."""
    metric, _, branch = name.partition("/")
    return f"{metric}_{ending}_{branch}" if branch else f"{metric}_{ending}"


def in_order(names: Iterable[str]) -> list[str]:
    """Sort metrics by branch, branches as they come, and within a branch by name."""
    of_branches: dict[str, list[str]] = {}
    for name in names:
        of_branches.setdefault(branch_of(name), []).append(name)
    return [name for of_branch in of_branches.values() for name in sorted(of_branch)]
