"""Load a state dict by parameter name: compare it with the routing, migrate and place it.

A parameter keeps its saved tensors if shape, view and route are the saved ones.

- *switched*: the parameter was only frozen or unfrozen. It keeps its tensors, too.
- *difference*: any other change of a parameter. `on_route_change` decides.
- *explained*: the difference comes from the version that saved the state, not from a setting. It is
  migrated under every policy, except that 'migrate' refuses it if state is left out.
- *left out*: torch's flattened state dict lacks the state, because the parameter had another route
  (see `SavedParameter`).
- *unused*: a tensor of a rule that is off now, or whose present settings keep other tensors.
- *unfit*: a tensor whose parameter has changed route or view while it was frozen.

`load_state` changes nothing: it returns the new state, and the caller replaces the old one. After
each routing `drop_unused` removes what the settings no longer use.
"""

from __future__ import annotations

import logging
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from deepmd_muon.optim.config import RouteChange
from deepmd_muon.optim.errors import RoutingMismatchError
from deepmd_muon.optim.groups.param_groups import Group
from deepmd_muon.optim.routing.routes import RouteEntry
from deepmd_muon.optim.rules.interface import MatrixRule, StateTensor
from deepmd_muon.optim.rules.master_weights import MASTER, NARROW
from deepmd_muon.optim.rules.registry import known_rules, matrix_rules, tensors_of
from deepmd_muon.optim.state.migrate import SavedParameter, migrate
from deepmd_muon.optim.state.read import read_state
from deepmd_muon.optim.state.schema import known_tensors, state_tensors

log = logging.getLogger(__name__)

Place = Callable[[str, Tensor, Tensor, RouteEntry], Tensor]
"""Takes a state tensor's key, its saved value, the parameter and its route.

Returns a copy of the value with the present dtype, layout and device.
"""

_ADVICE = (
    "Restore the settings the state was saved with (muon_mode, min_matrix_dim, patterns, "
    "parameter names and shapes), set on_route_change to 'migrate' or 'reset', or start from the "
    "weights alone with a fresh optimizer state (dp train --init-model)."
)
# torch's set_optimizer_state_dict passes only keys of the present routes.
_FLATTENED = (
    "torch's flattened state dicts (flatten_optimizer_state_dict=True) leave out the state of "
    "former routes. Save and load without flattening to migrate it, or set on_route_change to "
    "'reset'."
)


def load_state(
    state_dict: Mapping[str, Any],
    groups: Sequence[Group],
    on_route_change: RouteChange,
    place: Place,
) -> dict[Tensor, dict[str, Any]]:
    """Return the state that a state dict holds for the parameters of these groups.

    See `HybridMuon.load_state_dict`.
    """
    comparison = _compare(read_state(state_dict, groups), groups)
    _check_consistency(comparison, groups)
    _check_differences(comparison, on_route_change)

    state: dict[Tensor, dict[str, Any]] = {}
    conversions: set[tuple[str, torch.dtype, torch.dtype]] = set()
    dropped: Counter[tuple[str, str]] = Counter()
    for p, entry, group in _parameters(groups):
        values = _present_values(comparison, entry, group, on_route_change)
        unused = _unused_keys(values, matrix_rules(group.settings), narrow=p.dtype in NARROW)
        dropped.update(unused.items())
        placed = {
            key: place(key, value, p, entry) for key, value in values.items() if key not in unused
        }
        if placed:
            state[p] = placed
        conversions |= {
            (key, values[key].dtype, value.dtype)
            for key, value in placed.items()
            if values[key].dtype != value.dtype
        }
    present = {entry.name for _, entry, _ in _parameters(groups)}
    for name, difference in comparison.differences.items():
        if name not in present:
            log.warning("%s; its state is dropped", difference)
    _log_switched(comparison)
    for (key, reason), count in sorted(dropped.items()):
        log.warning("%s now: the saved %s of %d parameters is dropped", reason, key, count)
    for key, saved_dtype, dtype in sorted(conversions, key=str):
        log.info("%s: saved as %s, now kept as %s", key, saved_dtype, dtype)
    return state


class _Comparison(NamedTuple):
    """Saved parameters next to the present routes."""

    saved: Mapping[str, SavedParameter]
    switched: Mapping[str, RouteEntry]  # present routes of parameters that were only (un)frozen
    differences: Mapping[str, str]  # a line in words for each other parameter that differs


def _compare(saved: Mapping[str, SavedParameter], groups: Sequence[Group]) -> _Comparison:
    """Find the parameters that exist on one side only, or with another shape, route or view.

    Parameters without elements may be missing: deepmd-kit's models have some that ours lack.
    """
    present = {entry.name: entry for _, entry, _ in _parameters(groups)}
    switched = {}
    differences = {}
    for name, entry in present.items():
        if name not in saved:
            if 0 not in entry.shape:
                differences[name] = f"{name}: not in the saved state; present: {_describe(entry)}"
            continue
        former = saved[name].entry
        if _is_mere_switch(saved[name], entry):
            switched[name] = entry
        elif (former.shape, former.view, former.route) != (entry.shape, entry.view, entry.route):
            was = _describe(former)
            differences[name] = f"{name}: saved: {was}; present: {_describe(entry)}"
    for name, parameter in saved.items():
        if name not in present and 0 not in parameter.entry.shape:
            was = _describe(parameter.entry)
            differences[name] = f"{name}: saved: {was}; not among the present parameters"
    return _Comparison(saved, switched, differences)


def _is_mere_switch(saved: SavedParameter, entry: RouteEntry) -> bool:
    """Return whether a parameter was frozen or unfrozen, and its state suits the present route."""
    was_trained = saved.entry.route != "frozen"
    is_trained = entry.route != "frozen"
    if saved.entry.shape != entry.shape or was_trained == is_trained or saved.left_out:
        return False
    if not is_trained or not saved.values:
        return True
    # The route "frozen" hides the route and view of the saved state: the keys show the route, the
    # shapes of the rules' tensors the view.
    if ("momentum_buffer" in saved.values) != (entry.route == "muon"):
        return False
    if entry.view is None:
        return True
    tensors = known_tensors()
    return all(
        tuple(value.shape) == tensors[key].shape_for(entry.shape, entry.view)
        for key, value in saved.values.items()
        if key in tensors and _depends_on_view(tensors[key])
    )


def _depends_on_view(tensor: StateTensor) -> bool:
    """Return whether a state tensor has the shape of the view: of blocks, rows or columns."""
    return tensor.extent not in ("parameter", "scalar")


def _check_consistency(comparison: _Comparison, groups: Sequence[Group]) -> None:
    """Raise RoutingMismatchError if saved tensors do not suit their own route, view and rules."""
    rule_names = {
        entry.name: {rule.name for rule in matrix_rules(group.settings)}
        for _, entry, group in _parameters(groups)
    }
    problems = []
    for name, saved in comparison.saved.items():
        # torch's flattened state dicts have only keys of the present optimizer. Tensors of rules
        # that are off now may be missing, and after a change of route all tensors.
        rules = saved.rules
        if name in rule_names:
            rules = tuple(rule for rule in rules if rule.name in rule_names[name])
        may_lack_all = saved.left_out and name in comparison.differences
        problems += _inconsistencies(saved, rules, may_lack_all=may_lack_all)
    if problems:
        advice = "The file is damaged or was edited by hand: use another checkpoint."
        raise RoutingMismatchError(problems, advice)


def _inconsistencies(
    saved: SavedParameter, rules: Sequence[MatrixRule], *, may_lack_all: bool
) -> list[str]:
    """List the problems of a parameter's saved tensors.

    Those of its route and of `rules` must be there, except master weights. A parameter without
    state, or that `may_lack_all`, needs none.
    """
    entry = saved.entry
    values = saved.values
    route = entry.route
    # It keeps the state of its former route and rules, whose names are not saved.
    if route == "frozen":
        route = "muon" if "momentum_buffer" in values else "adam"
        rules = ()
    # Of all rules: the state may hold tensors of those that are off now. Their shapes are checked.
    possible = state_tensors(route, known_rules())
    problems = [
        f"{entry.name}: unexpected state {key!r} on route {entry.route}"
        for key in sorted(values.keys() - possible)
    ]
    if values and not may_lack_all:
        needed = state_tensors(route, rules).keys() - {MASTER}
        problems += [
            f"{entry.name}: state {key!r} is missing on route {entry.route}"
            for key in sorted(needed - values.keys())
        ]
    malformed = [key for key, value in values.items() if not _is_dense_real(value)]
    problems += [f"{entry.name}: state {key!r} is not a dense real tensor" for key in malformed]
    for key, tensor in possible.items():
        if key in values and key not in malformed:
            problem = _problem_of_shape(key, tensor, values[key], entry)
            problems += [f"{entry.name}: {problem}"] if problem else []
    return problems


def _is_dense_real(value: Any) -> bool:
    is_tensor = isinstance(value, Tensor)
    return is_tensor and not value.is_complex() and value.layout == torch.strided


def _problem_of_shape(
    key: str, tensor: StateTensor, value: Tensor, entry: RouteEntry
) -> str | None:
    """Return why a saved tensor has the wrong shape, else None."""
    shape = tuple(value.shape)
    if tensor.extent == "scalar":
        return None if value.numel() == 1 else f"{key} has shape {shape}, it must be one number"
    if tensor.extent == "parameter":
        suits = shape == entry.shape
        return None if suits else f"{key} has shape {shape}, the parameter {entry.shape}"
    if entry.view is None:
        return None
    expected = tensor.shape_for(entry.shape, entry.view)
    if shape == expected:
        return None
    if tensor.extent == "blocks":
        return f"{key} has shape {shape}, the view has {entry.view.blocks} matrices"
    return f"{key} has shape {shape}, the view has shape {expected}"


def _check_differences(comparison: _Comparison, on_route_change: RouteChange) -> None:
    """Raise RoutingMismatchError for differences that `on_route_change` does not allow."""
    saved = comparison.saved
    unexplained = [
        line
        for name, line in comparison.differences.items()
        if name not in saved or not saved[name].explained
    ]
    left_out = [
        line
        for name, line in comparison.differences.items()
        if name in saved and saved[name].left_out
    ]
    if unexplained and on_route_change == "error":
        advice = f"{_ADVICE} {_FLATTENED}" if left_out else _ADVICE
        raise RoutingMismatchError(unexplained, advice)
    if left_out and on_route_change == "migrate":
        raise RoutingMismatchError(left_out, _FLATTENED)


def _present_values(
    comparison: _Comparison, entry: RouteEntry, group: Group, on_route_change: RouteChange
) -> Mapping[str, Tensor]:
    """Return the saved tensors of a parameter, migrated if its route, view or shape has changed."""
    saved = comparison.saved.get(entry.name)
    difference = comparison.differences.get(entry.name)
    if difference is None:
        return saved.values if saved else {}
    if saved is None or (on_route_change == "reset" and not saved.explained):
        log.warning("%s; it starts without state", difference)
        return {}
    betas = (group.settings.adam_beta1, group.settings.adam_beta2)
    values, outcome = migrate(saved, entry, betas)
    log.warning("%s; %s", difference, outcome)
    return values


def _log_switched(comparison: _Comparison) -> None:
    """Log which parameters are frozen now, or trained again, and what becomes of their state."""
    names_by_outcome: dict[str, list[str]] = defaultdict(list)
    for name, entry in comparison.switched.items():
        if entry.route == "frozen":
            outcome = "are frozen now and keep their state"
        elif comparison.saved[name].values:
            outcome = "are trained again, with the state they had before"
        else:
            outcome = "are trained now and start without state"
        names_by_outcome[outcome].append(name)
    for outcome, names in names_by_outcome.items():
        examples = ", ".join(names[:2]) + (", …" if len(names) > 2 else "")
        log.info("%d parameters %s (%s)", len(names), outcome, examples)


def _describe(entry: RouteEntry) -> str:
    shape = "x".join(map(str, entry.shape)) or "scalar"
    view = f" as {entry.view}" if entry.view else ""
    return f"route {entry.route}{view}, shape {shape}"


def _parameters(groups: Iterable[Group]) -> list[tuple[Tensor, RouteEntry, Group]]:
    """Return every parameter with its routing entry and its group."""
    return [(p, entry, group) for group in groups for p, entry in group.routed]


# ----- unused state ------------------------------------------------------------------------------


def drop_unused(state: Mapping[Tensor, dict[str, Any]], groups: Sequence[Group]) -> None:
    """Drop the state that the present settings do not use, and log it.

    Unused tensors are dropped, so that stale ones cannot reappear. A frozen parameter keeps all
    others, of which the unfit ones are dropped when it is trained again.
    """
    tensors = known_tensors()
    for p, entry, group in _parameters(groups):
        values = state.get(p, {})
        rules = matrix_rules(group.settings)
        # Loading has dropped master weights of wide parameters already.
        unused = _unused_keys(values, rules, narrow=True)
        unfit = [
            key
            for key in tensors.keys() & values.keys() - unused.keys()
            if not _fits(key, values[key], entry, rules)
        ]
        if not unused and not unfit:
            continue
        for key in (*unused, *unfit):
            del values[key]
        log.warning(
            "%s: its state %s is dropped: %s now",
            entry.name,
            ", ".join(sorted((*unused, *unfit))),
            _describe(entry) if unfit else "; ".join(sorted(set(unused.values()))),
        )


def _unused_keys(
    values: Mapping[str, Any], rules: Sequence[MatrixRule], *, narrow: bool
) -> dict[str, str]:
    """Return the keys of state tensors that these rules do not use, each with the reason.

    Only parameters of a `narrow` dtype (16 bits) use master weights.
    """
    used = tensors_of(rules).keys() - (set() if narrow else {MASTER})
    names_on = {rule.name for rule in rules}
    reasons = {}
    for rule in known_rules():
        for key in rule.tensors().keys() & values.keys() - used:
            keeps_other = rule.name in names_on
            reasons[key] = f"{rule.name} {'keeps other state' if keeps_other else 'is off'}"
    return reasons


def _fits(key: str, value: Tensor, entry: RouteEntry, rules: Sequence[MatrixRule]) -> bool:
    """Return whether a state tensor suits a parameter of this route and view with these rules."""
    if entry.route == "frozen":
        return True
    tensor = state_tensors(entry.route, rules).get(key)
    if tensor is None:
        return False
    if not _depends_on_view(tensor):
        return True
    return tuple(value.shape) == tensor.shape_for(entry.shape, entry.view)
