"""Restore values of parameter groups: learning rates, keys of schedulers, the user's keys.

`load_state_dict` first takes over what `settings_of_checkpoint` returns, because it decides the
routes, and then calls `restore_groups`.

A group's key `constructed` holds two records as JSON text:

- the learning rate and the `SCHEDULED_SETTINGS` with which the group was constructed. Where the
  group's value differs, a scheduler has changed it;
- under `CHOSEN`, the *choices*: what `build` chose for the model because the input omits it. A
  choice is the name of a setting (`CHOSEN_BY_BUILD`), or an entry that `build` has added to the
  lists `splits` and `adam_patterns`.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from deepmd_muon.optim.config import DEFAULT_ADAMW_PATTERNS
from deepmd_muon.optim.errors import ForeignStateError
from deepmd_muon.optim.groups.group_settings import (
    CHOSEN,
    SCHEDULED_SETTINGS,
    SCHEDULER_KEYS,
    constructed_of,
    current_spelling,
    group_settings,
    own_keys,
    unfolded,
)
from deepmd_muon.optim.other_configs import CHOSEN_BY_BUILD
from deepmd_muon.optim.routing.routes import RouteTable
from deepmd_muon.optim.routing.views import Shape
from deepmd_muon.optim.state.others import is_another_muon

log = logging.getLogger(__name__)

_CHOSEN_LISTS = ("splits", "adam_patterns")
_NOT_SETTINGS = frozenset(["params", "param_names", "lr", "initial_lr", "constructed", "routes"])


def settings_of_checkpoint(
    param_groups: Sequence[Mapping[str, Any]], saved_groups: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """Return, for each group, the saved values that replace today's choices.

    A restarted run keeps them, so that it stays the same if a later release chooses otherwise.
    Groups whose parameters differ from the saved ones keep today's choices.
    """
    if len(param_groups) != len(saved_groups):
        return [{} for _ in param_groups]
    return [
        _saved_values_of_choices(unfolded(group), current_spelling(saved))
        for group, saved in zip(param_groups, saved_groups, strict=True)
    ]


def _saved_values_of_choices(group: Mapping[str, Any], saved: Mapping[str, Any]) -> dict[str, Any]:
    """Return the saved values that replace today's choices in a group.

    Among them is the group's new `constructed`, without the choices that are replaced.
    """
    constructed = constructed_of(group)
    choices = constructed.get(CHOSEN, ())
    saved_by_us = {"routes", "vector_route"} <= saved.keys()
    if not choices or not saved_by_us or _shapes_by_name(group) != _shapes_by_name(saved):
        return {}
    saved_choices = _choices_of(saved)
    settings = [key for key in choices if key in CHOSEN_BY_BUILD and key in saved_choices]
    # A saved list replaces today's if today's has no further entries but those that `build` adds
    # now and did not add then.
    new_entries = {*choices} - {*CHOSEN_BY_BUILD} - {*saved_choices}
    lists = [key for key in _CHOSEN_LISTS if {*group[key]} - {*saved[key]} <= new_entries]
    values = {
        key: saved[key]
        for key in (*settings, *lists)
        if _as_list(saved[key]) != _as_list(group[key])
    }
    if values:
        # Lists that are not replaced keep their new entries, so these stay recorded as choices.
        replaced = {entry for key in lists for entry in group[key]}
        constructed[CHOSEN] = [key for key in choices if key not in new_entries & replaced]
        if "adam_lr_ratio" in values:  # a scheduled setting, now constructed with this value
            constructed["adam_lr_ratio"] = values["adam_lr_ratio"]
        values["constructed"] = json.dumps(constructed)
    return values


def _choices_of(saved: Mapping[str, Any]) -> Sequence[str]:
    """Return the choices of `build` for a saved group."""
    is_version_0_1_0 = "adam_weight_decay" not in saved and saved["vector_route"] == "adamw"
    if not is_version_0_1_0:
        choices: Sequence[str] = constructed_of(saved).get(CHOSEN, ())
        return choices
    # It recorded no choices. `adamw_patterns` that lack one of the defaults came from the input;
    # those with all defaults and further ones cannot be told from choices.
    if {*DEFAULT_ADAMW_PATTERNS} <= {*saved["adamw_patterns"]}:
        return CHOSEN_BY_BUILD
    return [key for key in CHOSEN_BY_BUILD if key != "adamw_patterns"]


def _shapes_by_name(group: Mapping[str, Any]) -> dict[str, Shape]:
    """Return the shapes of parameters by name; {} if they have no names."""
    if "param_names" not in group:
        return {}
    return {entry.name: entry.shape for entry in RouteTable.from_groups([group])}


def restore_groups(
    param_groups: Sequence[dict[str, Any]], saved_groups: Sequence[Mapping[str, Any]]
) -> None:
    """Restore what schedulers write and the user's own keys of groups; log differences in settings.

    A group always takes the saved learning rate and keys of schedulers. A scheduled setting that
    was constructed with the same value then and now takes its saved value. Any other setting was
    changed on purpose, and keeps its present value.

    Raises
    ------
    InvalidSettingError, ForeignStateError
        When a saved value is out of its range, or there is no learning rate; nothing is changed.
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
        saved = current_spelling(saved)
        values = _restored_values(number, group, saved)
        _log_differences(number, unfolded(group), saved, values)
        restored.append(values)
    for group, values in zip(param_groups, restored, strict=True):
        group_settings({**group, **values})  # checks them, before any group is changed
    for group, values in zip(param_groups, restored, strict=True):
        lr = group["lr"]
        group.update(values)
        if isinstance(lr, Tensor):  # keep its memory, which a captured step reads
            group["lr"] = lr.fill_(values["lr"])


def _restored_values(
    number: int, group: Mapping[str, Any], saved: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the values that a group takes from its saved group."""
    if "lr" not in saved:
        raise ForeignStateError(f"damaged optimizer state dict: param_groups[{number}] has no 'lr'")
    constructed = constructed_of(group)
    constructed_alike = {
        key for key, value in constructed_of(saved).items() if value == constructed.get(key)
    }
    values: dict[str, Any] = {"lr": float(saved["lr"])}
    values |= {key: saved[key] for key in SCHEDULER_KEYS if key in saved}
    if "initial_lr" in saved and "lr" not in constructed_alike:
        # A scheduler that is constructed after the load starts from `initial_lr`: from the present
        # rate, because the saved one was constructed with another.
        values["initial_lr"] = group.get("initial_lr", float(group["lr"]))
    values |= {
        key: saved[key] for key in SCHEDULED_SETTINGS if key in constructed_alike and key in saved
    }
    if "routes" in saved:  # in a group of another optimizer, all keys would look like the user's
        values |= {key: saved[key] for key in own_keys(saved)}
    if "adam_betas" in values:
        values["adam_betas"] = tuple(values["adam_betas"])
    return values


def _log_differences(
    number: int,
    group: Mapping[str, Any],
    saved: Mapping[str, Any],
    restored: Mapping[str, Any],
) -> None:
    """Log each setting that differs, and which of its values holds."""
    for key in sorted(group.keys() & saved.keys() - _NOT_SETTINGS):
        if _as_list(group[key]) == _as_list(saved[key]):
            continue
        present = group[key]
        if key in restored:
            log.info(
                "param_groups[%d] %s: %r as saved; it was %r", number, key, saved[key], present
            )
        else:
            log.info("param_groups[%d] %s: now %r, saved %r", number, key, present, saved[key])


def _as_list(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value
