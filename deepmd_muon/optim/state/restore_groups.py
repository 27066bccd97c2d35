"""Restore the values of parameter groups that a scheduler or the user writes.

`HybridMuon.load_state_dict` calls `saved_choices` first, because choices decide routes. It then
compares and places the state (`load_state`), and at last calls `restore_groups`.

| key of a saved group | restored |
|---|---|
| `lr` | always |
| `initial_lr` | if both groups were constructed with the same learning rate; else the present one |
| other `SCHEDULER_KEYS` such as `max_lr` | always |
| `SCHEDULED_SETTINGS` such as `momentum` | if both groups were constructed with the same value |
| the user's own keys | if this package saved the group |
| other settings | never; `saved_choices` has restored those that `build` had chosen |

Groups saved before they had a key `constructed`, or by another optimizer, count as constructed with
other values.

`constructed` of a group holds, among others, the learning rate and the scheduled settings with
which it was constructed. For example, a momentum of 0.93 is saved, and the group was constructed
with 0.95: a scheduler has changed it. A run that restarts with 0.95 takes 0.93. One that restarts
with 0.9 was changed on purpose and keeps 0.9.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from deepmd_muon.optim.errors import ForeignStateError
from deepmd_muon.optim.groups.group_settings import (
    SCHEDULED_SETTINGS,
    SCHEDULER_KEYS,
    constructed_of,
    current_spelling,
    differs,
    group_settings,
    own_keys,
    unfolded,
)
from deepmd_muon.optim.state.others import is_another_muon

log = logging.getLogger(__name__)

_NOT_LOGGED = frozenset(["params", "param_names", "lr", "initial_lr", "constructed", "routes"])


def restore_groups(
    param_groups: Sequence[dict[str, Any]], saved_groups: Sequence[Mapping[str, Any]]
) -> None:
    """Restore learning rates, what schedulers write, and the user's keys.

    Log each setting that differs, restored or not, except learning rates. Groups of another Muon
    restore nothing, and no group does if their number has changed.

    Raises
    ------
    InvalidSettingError
        When a saved value is out of its range; nothing is changed.
    ForeignStateError
        When a saved group has no learning rate; nothing is changed.
    """
    if is_another_muon(saved_groups):
        log.info("the state is another Muon's: its learning rates and settings are not taken over")
        return
    if len(saved_groups) != len(param_groups):
        log.info(
            "the state was saved with %d parameter groups and there are now %d: learning rates and "
            "settings are not restored",
            len(saved_groups),
            len(param_groups),
        )
        return
    restored = []
    for number, (group, saved) in enumerate(zip(param_groups, saved_groups, strict=True)):
        if "lr" not in saved:
            raise ForeignStateError(
                f"damaged optimizer state dict: param_groups[{number}] has no 'lr'"
            )
        present_values = unfolded(group)
        saved_values = current_spelling(saved)
        values = _values_to_restore(present_values, saved_values)
        _log_differences(number, present_values, saved_values, restored=values)
        restored.append(values)
    # Check all groups before one is changed: `group_settings` raises InvalidSettingError.
    for group, values in zip(param_groups, restored, strict=True):
        group_settings({**group, **values})
    for group, values in zip(param_groups, restored, strict=True):
        if isinstance(group["lr"], Tensor):
            # Captured steps read the memory of this tensor.
            values["lr"] = group["lr"].fill_(values["lr"])
        group.update(values)


def _values_to_restore(group: Mapping[str, Any], saved: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values that a present group takes from its saved group, both unfolded.

    A tensor in `lr` becomes a float.
    """
    constructed = constructed_of(group)
    constructed_alike = {
        key for key, value in constructed_of(saved).items() if value == constructed.get(key)
    }
    values: dict[str, Any] = {"lr": float(saved["lr"])}
    values |= {key: saved[key] for key in SCHEDULER_KEYS if key in saved}
    if "initial_lr" in saved and "lr" not in constructed_alike:
        # A scheduler that is constructed after the load starts from `initial_lr`. The saved one
        # belongs to the former rate.
        values["initial_lr"] = group.get("initial_lr", float(group["lr"]))
    for key in SCHEDULED_SETTINGS:
        if key in constructed_alike and key in saved:
            values[key] = saved[key]
    if "adam_betas" in values:
        values["adam_betas"] = tuple(values["adam_betas"])  # a state dict may have a list
    if "routes" in saved:  # in a group of another optimizer, all keys would look like the user's
        values |= {key: saved[key] for key in own_keys(saved)}
    return values


def _log_differences(
    number: int,
    group: Mapping[str, Any],
    saved: Mapping[str, Any],
    *,
    restored: Mapping[str, Any],
) -> None:
    """Log each setting that differs, and which of its two values is used."""
    for key in sorted(group.keys() & saved.keys() - _NOT_LOGGED):
        if not differs(group[key], saved[key]):
            continue
        if key in restored:
            message = "param_groups[%d] %s: %r as saved; it was %r"
            log.info(message, number, key, saved[key], group[key])
        else:
            log.info("param_groups[%d] %s: now %r, saved %r", number, key, group[key], saved[key])
