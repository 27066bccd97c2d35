"""Load a state dict by parameter name: read it, compare it with the routing, migrate it, and place its tensors.

Nothing here changes the optimizer: `load_state` returns the new state, and the caller replaces the old one.
"""

from __future__ import annotations

import dataclasses
import glob
import itertools
import json
import logging
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from deepmd_muon.optim.config import HybridMuonConfig, RouteChange
from deepmd_muon.optim.errors import ForeignStateError, InvalidSettingError, RoutingMismatchError
from deepmd_muon.optim.groups.group_settings import (
    SCHEDULED_SETTINGS,
    SCHEDULER_KEYS,
    as_tuple,
    current_spelling,
    group_settings,
    own_keys,
)
from deepmd_muon.optim.groups.param_groups import Group
from deepmd_muon.optim.routing.modules import ATTENTION_SPLIT, is_computed_from
from deepmd_muon.optim.routing.routes import (
    Route,
    RouteEntry,
    RouteTable,
    RoutingRules,
    canonical_name,
    choose_route,
)
from deepmd_muon.optim.rules.interface import MatrixRule
from deepmd_muon.optim.rules.master_weights import MASTER, NARROW
from deepmd_muon.optim.rules.registry import known_rules, matrix_rules, tensors_of, unknown_rules
from deepmd_muon.optim.state.deepmd_kit import is_deepmd_kit, read_deepmd_kit
from deepmd_muon.optim.state.migrate import SavedParameter, migrate
from deepmd_muon.optim.state.others import is_another_muon, read_another_muon
from deepmd_muon.optim.state.schema import STATE_OF_ROUTE, known_tensors, state_tensors

log = logging.getLogger(__name__)

# Group keys that are not the user's settings.
_NOT_SETTINGS = {
    *(
        "params",
        "param_names",
        "lr",
        "initial_lr",
        "constructed",
        "routing_version",
        "routes",
        "views",
        "shapes",
    ),
}
_POWERS = (
    "beta1_pow",
    "beta2_pow",
)  # of the decays; the state holds them for deepmd-kit's class only


_ADVICE = (
    "Restore the settings the state was saved with (muon_mode, min_matrix_dim, patterns, parameter names and shapes), "
    "set on_route_change to 'migrate' or 'reset', or start from the weights alone with a fresh optimizer state "
    "(dp train --init-model)."
)
# set_optimizer_state_dict passes the state under the keys of the present routes, and {} for a key that is missing.
_FLATTENED = (
    "torch's flattened state dicts (flatten_optimizer_state_dict=True) leave out the state of former routes. "
    "Save and load without flattening to migrate it, or set on_route_change to 'reset'."
)


def drop_unused(state: Mapping[Tensor, dict[str, Any]], groups: Sequence[Group]) -> None:
    """Drop the state that the present settings do not use, and log it.

    Tensors of a rule that is off are dropped, so that stale ones cannot reappear. Other state becomes unused if
    settings change while a parameter is frozen. A frozen parameter keeps all state except that of rules that are off.
    """
    known = known_tensors()
    for p, entry, group in _parameters(groups):
        own, rules = state.get(p, {}), matrix_rules(group.settings)
        off = _unused(own, rules)
        unfit = [
            key
            for key in known.keys() & own.keys() - off.keys()
            if not _fits(key, own[key], entry, rules)
        ]
        for key in (*off, *unfit):
            del own[key]
        if off or unfit:
            why = _describe(entry) if unfit else "; ".join(sorted(set(off.values())))
            log.warning(
                "%s: its state %s is dropped: %s now",
                entry.name,
                ", ".join(sorted((*off, *unfit))),
                why,
            )


def _unused(
    values: Mapping[str, Any], rules: Sequence[MatrixRule], *, narrow: bool = True
) -> dict[str, str]:
    """Return the keys of state tensors that belong to known rules other than these, each with the reason.

    Only parameters of a `narrow` dtype (16 bits) use master weights.
    """
    used = tensors_of(rules).keys() - (set() if narrow else {MASTER})
    on = {rule.name for rule in rules}
    owners = {
        key: rule.name
        for rule in known_rules()
        for key in rule.tensors()
        if key in values and key not in used
    }
    return {
        key: f"{name} keeps other state" if name in on else f"{name} is off"
        for key, name in owners.items()
    }


def _fits(key: str, value: Tensor, entry: RouteEntry, rules: Sequence[MatrixRule]) -> bool:
    """Return whether a state tensor suits a parameter of this route and view with these rules."""
    if entry.route == "frozen":
        return True
    tensor = state_tensors(entry.route, rules).get(
        key
    )  # loading has dropped master weights of wide parameters
    return tensor is not None and (
        tensor.extent in ("parameter", "scalar")
        or tuple(value.shape) == tensor.shape_for(entry.shape, entry.view)
    )


def load_state(
    state_dict: Mapping[str, Any],
    groups: Sequence[Group],
    on_route_change: RouteChange,
    place: Callable[[str, Tensor, Tensor, RouteEntry], Tensor],
) -> dict[Tensor, dict[str, Any]]:
    """Return the state that a state dict holds for the parameters of these groups; see `HybridMuon.load_state_dict`.

    `place` takes a state tensor's key, value, parameter and route; it returns a copy with present dtype, layout and
    device.
    """
    present = RouteTable([entry for _, entry, _ in _parameters(groups)])
    saved = {name: _with_tensors(old) for name, old in _read(state_dict, groups, present).items()}
    switched = {
        entry.name: entry
        for entry in present
        if entry.name in saved and _only_trainable_changed(saved[entry.name], entry)
    }
    differences = {
        name: line for name, line in _differences(saved, present).items() if name not in switched
    }
    rules_now = {
        entry.name: matrix_rules(group.settings) for _, entry, group in _parameters(groups)
    }
    inconsistent = [
        problem
        for name, old in saved.items()
        for problem in _inconsistencies(
            old, rules_now.get(name), may_lack=old.left_out and name in differences
        )
    ]
    if inconsistent:
        raise RoutingMismatchError(
            inconsistent, "The file is damaged or was edited by hand: use another checkpoint."
        )
    unexplained = [
        line for name, line in differences.items() if name not in saved or not saved[name].explained
    ]
    left_out = [
        line for name, line in differences.items() if name in saved and saved[name].left_out
    ]
    if unexplained and on_route_change == "error":
        raise RoutingMismatchError(unexplained, f"{_ADVICE} {_FLATTENED}" if left_out else _ADVICE)
    if left_out and on_route_change == "migrate":
        raise RoutingMismatchError(left_out, _FLATTENED)

    state: dict[Tensor, dict[str, Any]] = {}
    converted: set[tuple[str, torch.dtype, torch.dtype]] = set()
    dropped: Counter[tuple[str, str]] = Counter()
    for p, entry, group in _parameters(groups):
        old = saved.get(entry.name)
        if entry.name not in differences:
            values = old.values if old else {}
        elif old is None or (on_route_change == "reset" and not old.explained):
            values = {}
            log.warning("%s; it starts without state", differences[entry.name])
        else:
            values, happened = migrate(
                old, entry, (group.settings.adam_beta1, group.settings.adam_beta2)
            )
            log.warning("%s; %s", differences[entry.name], happened)
        rules = matrix_rules(group.settings)
        off = _unused(values, rules, narrow=p.dtype in NARROW)
        values = {key: value for key, value in values.items() if key not in off}
        dropped.update(off.items())
        if values:
            state[p] = {key: place(key, value, p, entry) for key, value in values.items()}
            converted |= {
                (k, v.dtype, state[p][k].dtype)
                for k, v in values.items()
                if v.dtype != state[p][k].dtype
            }
    for name in differences.keys() - {entry.name for entry in present}:
        log.warning("%s; its state is dropped", differences[name])
    _log_switched(switched.values(), saved)
    for (key, why), count in sorted(dropped.items()):
        log.warning("%s now: the saved %s of %d parameters is dropped", why, key, count)
    for key, old_dtype, new_dtype in sorted(converted, key=str):
        log.info("%s: saved as %s, now kept as %s", key, old_dtype, new_dtype)
    return state


def _only_trainable_changed(saved: SavedParameter, present: RouteEntry) -> bool:
    """Return whether a parameter was frozen or unfrozen, and its state suits the present route and view.

    The route of a frozen parameter's state shows in its keys; its view shows in the shapes of the rules' tensors.
    """
    old = saved.entry
    trainable = (old.route != "frozen", present.route != "frozen")
    if old.shape != present.shape or trainable[0] == trainable[1] or saved.left_out:
        return False
    if present.route == "frozen" or not saved.values:
        return True
    if ("momentum_buffer" in saved.values) != (present.route == "muon"):
        return False
    known = known_tensors()
    return present.view is None or all(
        tuple(value.shape) == known[key].shape_for(present.shape, present.view)
        for key, value in saved.values.items()
        if key in known and known[key].extent not in ("parameter", "scalar")
    )


def _log_switched(switched: Iterable[RouteEntry], saved: Mapping[str, SavedParameter]) -> None:
    """Log which parameters are frozen now, or trained again, and what becomes of their state."""
    outcomes: dict[str, list[str]] = defaultdict(list)
    for entry in switched:
        if entry.route == "frozen":
            outcome = "are frozen now and keep their state"
        elif saved[entry.name].values:
            outcome = "are trained again, with the state they had before"
        else:
            outcome = "are trained now and start without state"
        outcomes[outcome].append(entry.name)
    for outcome, names in outcomes.items():
        examples = ", ".join(names[:2]) + (", …" if len(names) > 2 else "")
        log.info("%d parameters %s (%s)", len(names), outcome, examples)


def _with_tensors(saved: SavedParameter) -> SavedParameter:
    """Return saved state with tensors for plain numbers, as which old versions of torch count steps."""
    known = known_tensors()
    numbers = {
        key: torch.tensor(float(value), device="cpu")
        for key, value in saved.values.items()
        if isinstance(value, (int, float)) and key in known and known[key].extent == "scalar"
    }
    return dataclasses.replace(saved, values={**saved.values, **numbers}) if numbers else saved


def _parameters(groups: Sequence[Group]) -> list[tuple[Tensor, RouteEntry, Group]]:
    """Return every parameter with its routing entry and its group."""
    return [(p, entry, group) for group in groups for p, entry in group.routed]


def _read(
    state_dict: Mapping[str, Any], present: Sequence[Group], routing: RouteTable
) -> dict[str, SavedParameter]:
    """Return the content of a state dict, by parameter name."""
    if not {"param_groups", "state"} <= state_dict.keys():
        flattened = any(isinstance(key, str) and key.startswith("state.") for key in state_dict)
        raise ForeignStateError(
            f"not an optimizer state dict: it must hold 'state' and 'param_groups'; found keys {list(state_dict)[:5]}"
            + "; torch flattened it (flatten_optimizer_state_dict): load it by set_optimizer_state_dict"
            * flattened
        )
    groups, state = state_dict["param_groups"], state_dict["state"]
    if not isinstance(state, Mapping) or not all(
        isinstance(group, Mapping) and "params" in group for group in groups
    ):
        raise ForeignStateError(
            "damaged optimizer state dict: 'state' must be a dictionary and every parameter group must list its "
            f"'params'; found a {type(state).__name__} and groups with keys {[list(group)[:5] for group in groups]}"
        )
    groups = _with_names(groups, present)
    if all("routes" in group for group in groups):
        return _read_own([current_spelling(group) for group in groups], state, present)
    if is_deepmd_kit(groups):
        muon_modes = [group.settings.muon_mode for _, _, group in _parameters(present)]
        return read_deepmd_kit(groups, state, routing, muon_modes)
    if is_another_muon(groups):
        return read_another_muon(groups, state, routing)
    if all({"betas", "param_names"} <= group.keys() for group in groups):
        return _read_adam(groups, state, routing)
    keys = {key for values in state.values() for key in values}
    kind = "SGD with momentum" if "momentum_buffer" in keys else "another optimizer"
    kind = "Adam or AdamW" if "exp_avg" in keys else kind
    raise ForeignStateError(
        f"the optimizer state looks like that of {kind} and cannot be loaded: it has no routing manifest. Adam's state "
        "loads if it has names of parameters, or as many parameters in every group as this optimizer"
    )


def _with_names(
    groups: Sequence[Mapping[str, Any]], present: Sequence[Group]
) -> Sequence[Mapping[str, Any]]:
    """Return saved groups with the names of the present parameters, in order, if either side has no names.

    torch's optimizers load by position, too. Here, all groups must have as many parameters as the present ones.
    """
    named = all("param_names" in group for group in groups) and all(
        "param_names" in group.values for group in present
    )
    by_number = all(isinstance(key, int) for group in groups for key in group["params"])
    if (
        named
        or not by_number
        or [len(g["params"]) for g in groups] != [len(group.routed) for group in present]
    ):
        return groups
    names = [[entry.name for _, entry in group.routed] for group in present]
    return [{**group, "param_names": own} for group, own in zip(groups, names, strict=True)]


def _explained_by_build(
    saved: RouteEntry, group: Mapping[str, Any], present: tuple[RouteEntry, Group] | None
) -> bool:
    """Return whether a version saved this parameter that `build` did not find yet in a module.

    Versions without `conv_patterns` found no kernels. Later ones found no kernels and tables that modules compute from
    this parameter (`weights_of`), and did not split q, k and v of attention modules.
    """
    if present is None:
        return False
    rules = RoutingRules.of(present[1].settings)
    fused = f"{glob.escape(saved.name)}: {ATTENTION_SPLIT}"
    if fused in rules.splits and fused not in (as_tuple(group.get("splits")) or ()):
        others = dataclasses.replace(
            rules, splits=tuple(split for split in rules.splits if split != fused)
        )
        return choose_route(saved.name, saved.shape, others).placement == saved.placement
    if is_computed_from(saved.name):
        keys = ("conv_patterns", "adamw_patterns")
        return any(
            glob.escape(saved.name)
            in set(getattr(rules, key)) - set(as_tuple(group.get(key)) or ())
            for key in keys
        )
    if "conv_patterns" in group:
        return False
    if (
        choose_route(saved.name, saved.shape, dataclasses.replace(rules, splits=())).placement
        == saved.placement
    ):
        return False
    before = dataclasses.replace(rules, conv_patterns=(), splits=())
    return choose_route(saved.name, saved.shape, before).placement == saved.placement


def _read_own(
    groups: Sequence[Mapping[str, Any]],
    state: Mapping[Any, dict[str, Any]],
    present: Sequence[Group],
) -> dict[str, SavedParameter]:
    """Read a state dict with a manifest; its keys of parameters are numbers, or names from torch.distributed."""
    known = {entry.name: (entry, group) for _, entry, group in _parameters(present)}
    table = RouteTable.from_manifest(groups)
    keys = [key for group in groups for key in group["params"]]
    by_name = {canonical_name(key): key for key in keys if isinstance(key, str)}
    if not {entry.name for entry in table} <= by_name.keys():
        if len(keys) != len(table):
            raise ForeignStateError(
                f"the state dict lists {len(keys)} parameters but routes {len(table)} of them: it is damaged"
            )
        by_name = {entry.name: key for entry, key in zip(table, keys, strict=True)}
    found = {}
    entries = iter(table)
    for group in groups:
        rules = _saved_rules(group)
        for entry in itertools.islice(entries, len(group["routes"])):
            values = state.get(by_name[entry.name], {})
            missing = {
                key for key, value in values.items() if isinstance(value, dict)
            }  # see _FLATTENED
            kept = {
                key: value for key, value in values.items() if key not in missing.union(_POWERS)
            }
            left_out = bool(missing) and entry.route != "frozen"
            explained = _explained_by_build(entry, group, known.get(entry.name))
            found[entry.name] = SavedParameter(
                entry, kept, explained, left_out=left_out, rules=rules
            )
    return found


def _saved_rules(group: Mapping[str, Any]) -> tuple[MatrixRule, ...]:
    """Return the known rules that were on in a saved group; none if this release rejects its settings."""
    if (
        "adam_betas" not in group
    ):  # state of replaced parameters, in this process (`replaced.move_state`)
        return ()
    names = [name for name in group.get("rules", ()) if not unknown_rules([name])]
    try:
        return matrix_rules(group_settings({**vars(HybridMuonConfig()), **group, "rules": names}))
    except InvalidSettingError:
        return ()


def _read_adam(
    groups: Sequence[Mapping[str, Any]], state: Mapping[Any, Mapping[str, Any]], present: RouteTable
) -> dict[str, SavedParameter]:
    """Read a state dict of torch's Adam or AdamW; all its parameters have that route."""
    known = {entry.name: entry for entry in present}
    found = {}
    for group in groups:
        route: Route = "adamw" if group.get("decoupled_weight_decay") else "adam"
        for name, key in zip(
            map(canonical_name, group["param_names"]), group["params"], strict=True
        ):
            values = {k: v for k, v in state.get(key, {}).items() if k in STATE_OF_ROUTE[route]}
            if isinstance(values.get("exp_avg"), Tensor):
                entry = RouteEntry(name, tuple(values["exp_avg"].shape), None, route, "recorded")
                found[name] = SavedParameter(entry, values)
            elif name in known:  # never stepped: there is nothing to compare
                found[name] = SavedParameter(known[name], {})
    return found


def _differences(saved: Mapping[str, SavedParameter], present: RouteTable) -> dict[str, str]:
    """Return one line for each parameter that exists on one side only or whose shape, route or view differs.

    Parameters without elements may be missing: deepmd-kit's models have some that ours lack.
    """
    differences = {}
    for entry in present:
        if entry.name not in saved:
            if 0 in entry.shape:
                continue
            differences[entry.name] = (
                f"{entry.name}: not in the saved state; present: {_describe(entry)}"
            )
            continue
        old = saved[entry.name].entry
        if (old.shape, old.view, old.route) != (entry.shape, entry.view, entry.route):
            differences[entry.name] = (
                f"{entry.name}: saved: {_describe(old)}; present: {_describe(entry)}"
            )
    names = {entry.name for entry in present}
    for name in saved:
        old = saved[name].entry
        if name not in names and 0 not in old.shape:
            differences[name] = f"{name}: saved: {_describe(old)}; not among the present parameters"
    return differences


def _describe(entry: RouteEntry) -> str:
    shape = "x".join(map(str, entry.shape)) or "scalar"
    view = f" as {entry.view}" if entry.view else ""
    return f"route {entry.route}{view}, shape {shape}"


def _inconsistencies(
    saved: SavedParameter, rules_now: Sequence[MatrixRule] | None, *, may_lack: bool
) -> list[str]:
    """List the inconsistencies between a parameter's saved state and its route, view and rules.

    torch's flattened state dicts hold only tensors that the present optimizer has. So tensors of rules that are off now
    may be missing (`rules_now` None means unknown), and with `may_lack`, after a change of route, all others, too.
    """
    entry, values = saved.entry, saved.values
    # A frozen parameter keeps the state of the route it had before.
    before: Route = "muon" if "momentum_buffer" in values else "adam"
    route = before if entry.route == "frozen" else entry.route
    possible = state_tensors(route, known_rules())
    rules = [rule for rule in saved.rules if rules_now is None or rule.name in _names(rules_now)]
    needed = state_tensors(route, () if entry.route == "frozen" else rules).keys() - {MASTER}
    problems = [
        f"{entry.name}: unexpected state {key!r} on route {entry.route}"
        for key in sorted(values.keys() - possible)
    ]
    problems += [
        f"{entry.name}: state {key!r} is missing on route {entry.route}"
        for key in sorted(needed - values.keys())
        if values and not may_lack
    ]
    odd = [
        key
        for key, x in values.items()
        if not isinstance(x, Tensor) or x.is_complex() or x.layout != torch.strided
    ]
    problems += [f"{entry.name}: state {key!r} is not a dense real tensor" for key in odd]
    for key, tensor in possible.items():
        if key in odd:
            continue
        found = tuple(values[key].shape) if key in values else ()
        if key not in values or (
            tensor.extent not in ("parameter", "scalar") and entry.view is None
        ):
            continue
        shape = tensor.shape_for(entry.shape, entry.view)
        if tensor.extent == "scalar" and values[key].numel() != 1:
            problems.append(f"{entry.name}: {key} has shape {found}, it must be one number")
        elif tensor.extent == "parameter" and found != shape:
            problems.append(f"{entry.name}: {key} has shape {found}, the parameter {entry.shape}")
        elif tensor.extent not in ("parameter", "scalar") and found != shape:
            what = (
                f"{entry.view.blocks} matrices"
                if entry.view and tensor.extent == "blocks"
                else f"shape {shape}"
            )
            problems.append(f"{entry.name}: {key} has shape {found}, the view has {what}")
    return problems


def _names(rules: Sequence[MatrixRule]) -> set[str]:
    return {rule.name for rule in rules}


def restore_groups(
    param_groups: Sequence[dict[str, Any]], groups: Sequence[Mapping[str, Any]]
) -> None:
    """Restore the values that schedulers write and the user's own keys of groups; log differences in settings.

    A setting constructed with the same value as the saved one takes the saved value, which a scheduler may have
    changed. A setting constructed with another value was changed on purpose, and keeps it.

    Raises
    ------
    InvalidSettingError, ForeignStateError
        When a saved value is out of its range, or there is no learning rate; nothing is changed.
    """
    if is_another_muon(groups):
        log.info("the state is another Muon's: its learning rates and settings are not taken over")
        return
    if len(groups) != len(param_groups):
        log.info(
            "the state was saved with %d parameter groups and there are now %d: learning rates and settings are not "
            "restored",
            len(groups),
            len(param_groups),
        )
        return
    found = [
        _restored(number, present, current_spelling(saved))
        for number, (present, saved) in enumerate(zip(param_groups, groups, strict=True))
    ]
    for present, values in zip(param_groups, found, strict=True):
        group_settings({**present, **values})  # checks them
    for group, values in zip(param_groups, found, strict=True):
        lr = group["lr"]
        group.update(values)
        if isinstance(lr, Tensor):  # keep its memory, which a captured step reads
            group["lr"] = lr.fill_(values["lr"])


def _restored(number: int, present: Mapping[str, Any], saved: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values that a group takes from its saved group; log differences in settings."""
    if "lr" not in saved:
        raise ForeignStateError(f"damaged optimizer state dict: param_groups[{number}] has no 'lr'")
    was, now = (json.loads(group.get("constructed", "{}")) for group in (saved, present))
    same = {key for key in was if was[key] == now.get(key)}
    values: dict[str, Any] = {"lr": float(saved["lr"])}
    values |= {key: saved[key] for key in SCHEDULER_KEYS if key in saved}
    if "initial_lr" in saved and "lr" not in same:
        # A scheduler constructed after the load starts from the present setting, not from the saved one.
        values["initial_lr"] = present.get("initial_lr", float(present["lr"]))
    values |= {key: saved[key] for key in SCHEDULED_SETTINGS if key in same and key in saved}
    if "routes" in saved:  # not a group of another optimizer
        values |= {key: saved[key] for key in own_keys(saved)}
    if "adam_betas" in values:
        values["adam_betas"] = tuple(values["adam_betas"])
    for key in sorted(set(present) & set(saved) - _NOT_SETTINGS):
        pair = [list(x) if isinstance(x, tuple) else x for x in (present[key], saved[key])]
        if pair[0] != pair[1]:
            if key in values:
                log.info(
                    "param_groups[%d] %s: %r as saved; it was %r",
                    number,
                    key,
                    saved[key],
                    present[key],
                )
            else:
                log.info(
                    "param_groups[%d] %s: now %r, saved %r", number, key, present[key], saved[key]
                )
    return values
