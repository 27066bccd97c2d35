"""Keep what `build` chose for a model when its state was saved.

`build` looks at the model and decides what the input omits: it chooses values of settings
(`CHOSEN_BY_BUILD`), and it adds entries to the user's lists `splits` and `adam_patterns`. A later
release may choose otherwise. A run that restarts with it would get other routes than its state has,
so saved choices replace today's choices, and values that the input sets stay:

| value | saved | now | used |
|---|---|---|---|
| `vector_route`, chosen both times | "adamw" | "adam" | "adamw" |
| `vector_route`, chosen then, set by the input now | "adamw" | "adam" | "adam" |
| `vector_route`, set by the input then, chosen now | "adamw" | "adam" | "adam" |
| `splits`, [x] in both inputs, y added now | [x] | [x, y] | [x] |
| `splits`, [x] in the input then and [z] now, y added now | [x] | [z, y] | [z, y] |
| `splits`, [x] in the input then, and none now | [x] | [] | [] |
| `splits`, x added then, not now | [x] | [] | [x] |

A group for which `build` chooses nothing now keeps all its values.

A group records its *choices* in its key `constructed`, JSON text, as a list of strings under
`CHOSEN`: names of settings, and entries that were added to lists.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from deepmd_muon.optim.config import DEFAULT_ADAMW_PATTERNS
from deepmd_muon.optim.groups.group_settings import (
    CHOSEN,
    constructed_of,
    current_spelling,
    differs,
    unfolded,
)
from deepmd_muon.optim.other_configs import CHOSEN_BY_BUILD
from deepmd_muon.optim.routing.routes import RouteTable
from deepmd_muon.optim.routing.views import Shape

_LISTS = ("splits", "adam_patterns")  # to which `build` adds entries


class _Choices(NamedTuple):
    """What `build` decided for a group."""

    settings: set[str]  # names, some of CHOSEN_BY_BUILD
    entries: set[str]  # of the lists _LISTS


def saved_choices(
    param_groups: Sequence[Mapping[str, Any]], saved_groups: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """Return, for each present group, the saved values that replace today's choices.

    With them comes a new value of the group's key `constructed`. A group gets no values if its
    parameters or their shapes differ from the saved ones, if nothing was chosen for it, or if the
    saved group is not of this package. No group gets any if their number has changed.
    """
    if len(param_groups) != len(saved_groups):
        return [{} for _ in param_groups]
    return [
        _values_that_replace(unfolded(group), current_spelling(saved))
        for group, saved in zip(param_groups, saved_groups, strict=True)
    ]


def _values_that_replace(group: Mapping[str, Any], saved: Mapping[str, Any]) -> dict[str, Any]:
    """Return the saved values that replace choices of a present group, and its `constructed`."""
    constructed = constructed_of(group)
    record: Sequence[str] = constructed.get(CHOSEN, ())
    is_of_this_package = {"routes", "vector_route"} <= saved.keys()
    if not record or not is_of_this_package or _shapes_by_name(group) != _shapes_by_name(saved):
        return {}
    choices = _from_record(record)
    former = _former_choices(saved)
    added_since = choices.entries - former.entries
    settings = choices.settings & former.settings
    # A list stays if the input, not only `build`, has given it new entries or taken some away.
    lists = [
        key
        for key in _LISTS
        if {*group[key]} - {*saved[key]} <= added_since
        and {*saved[key]} - {*group[key]} <= former.entries
    ]
    values = {
        key: saved[key] for key in (*sorted(settings), *lists) if differs(saved[key], group[key])
    }
    if values:
        # Entries leave the record together with the list that has them. Those of a list that stays
        # remain choices, so that a later load can replace them.
        removed = added_since & {entry for key in lists for entry in group[key]}
        constructed[CHOSEN] = [choice for choice in record if choice not in removed]
        if "adam_lr_ratio" in values:
            # A scheduled setting. `restore_groups` restores it only if `constructed` has the same
            # value in both groups.
            constructed["adam_lr_ratio"] = values["adam_lr_ratio"]
        values["constructed"] = json.dumps(constructed)
    return values


def _from_record(record: Iterable[str]) -> _Choices:
    """Sort recorded choices into names of settings and entries of lists."""
    return _Choices(
        settings={*record} & {*CHOSEN_BY_BUILD},
        entries={*record} - {*CHOSEN_BY_BUILD},
    )


def _former_choices(saved: Mapping[str, Any]) -> _Choices:
    """Return what `build` had decided for a saved group."""
    is_version_0_1_0 = "adam_weight_decay" not in saved and saved["vector_route"] == "adamw"
    if not is_version_0_1_0:
        return _from_record(constructed_of(saved).get(CHOSEN, ()))
    # Version 0.1.0 recorded no choices. What it may have chosen counts as chosen, but
    # `adamw_patterns` without one of the defaults can only come from the input.
    settings = {*CHOSEN_BY_BUILD}
    if not {*DEFAULT_ADAMW_PATTERNS} <= {*saved["adamw_patterns"]}:
        settings.remove("adamw_patterns")
    return _Choices(settings, entries={entry for key in _LISTS for entry in saved[key]})


def _shapes_by_name(group: Mapping[str, Any]) -> dict[str, Shape]:
    """Return the shapes of parameters by name; {} if they have no names."""
    if "param_names" not in group:
        return {}
    return {entry.name: entry.shape for entry in RouteTable.from_groups([group])}
