"""Reading a state dict back: parameters are matched by name, and every route and view is checked first."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor

from deepmd_muon.optim.errors import ForeignStateError, RoutingMismatchError
from deepmd_muon.optim.routing import RouteEntry, RouteTable

if TYPE_CHECKING:
    from deepmd_muon.optim.hybrid_muon import HybridMuon

log = logging.getLogger(__name__)

# Group keys that describe the parameters or the run rather than the user's settings.
_NOT_SETTINGS = {"params", "param_names", "lr", "initial_lr", "routing_version", "routes", "views", "shapes"}

# Shape of each state tensor: like the parameter, one per matrix, or a scalar.
_LIKE_PARAMETER = ("momentum_buffer", "exp_avg", "exp_avg_sq")
_KEYS_OF_ROUTE = {
    "muon": {"momentum_buffer", "magma_score"},
    "adam": {"step", "exp_avg", "exp_avg_sq"},
    "adamw": {"step", "exp_avg", "exp_avg_sq"},
    "frozen": set[str](),
}

_ADVICE = (
    "Restore the settings the state was saved with (muon_mode, min_matrix_dim, patterns, parameter names and shapes), "
    "or start from the weights alone with a fresh optimizer state (dp train --init-model)."
)


def load_checked_state(optimizer: HybridMuon, state_dict: Mapping[str, Any]) -> None:
    """Load `state_dict` into `optimizer`; see `HybridMuon.load_state_dict`."""
    state_dict = dict(state_dict)
    for hook in optimizer._optimizer_load_state_dict_pre_hooks.values():
        changed = hook(optimizer, state_dict)
        state_dict = dict(changed) if changed is not None else state_dict

    groups = state_dict["param_groups"]
    _refuse_foreign(groups, state_dict["state"])
    saved = RouteTable.from_manifest(groups)
    saved_ids = [index for group in groups for index in group["params"]]
    if len(saved_ids) != len(saved):
        raise ForeignStateError(
            f"the state dict lists {len(saved_ids)} parameters but routes {len(saved)} of them: it is damaged"
        )
    order = match_entries(saved, optimizer.routing)
    state: dict[Tensor, dict[str, Any]] = {}
    params = [p for group in optimizer.param_groups for p in group["params"]]
    damaged = []
    for p, entry, position in zip(params, optimizer.routing, order, strict=True):
        values = state_dict["state"].get(saved_ids[position])
        if values:
            damaged += _damage(entry, values)
            state[p] = {
                key: value.detach().to(p.device, copy=True) if isinstance(value, Tensor) else value
                for key, value in values.items()
            }
    if damaged:
        raise RoutingMismatchError(damaged, "The file is damaged or was changed by hand: use another checkpoint.")

    _restore_learning_rates(optimizer, groups)
    optimizer.state.clear()
    optimizer.state.update(state)
    for post_hook in optimizer._optimizer_load_state_dict_post_hooks.values():
        post_hook(optimizer)


def match_entries(saved: RouteTable, present: RouteTable) -> list[int]:
    """Return, for each present parameter, its position among the saved ones.

    Parameters
    ----------
    saved, present
        Routing of the state dict and of the optimizer. Names decide; a parameter without a name stands for its
        place in its group.

    Raises
    ------
    RoutingMismatchError
        Naming each parameter that is missing on either side, or whose shape, route or view differs.
    """
    positions = {entry.name: i for i, entry in enumerate(saved)}
    differences = []
    for entry in present:
        if entry.name not in positions:
            differences.append(f"{entry.name}: not in the saved state; present: {_describe(entry)}")
            continue
        old = saved[positions[entry.name]]
        if (old.shape, old.view, old.route) != (entry.shape, entry.view, entry.route):
            differences.append(f"{entry.name}: saved: {_describe(old)}; present: {_describe(entry)}")
    names = {entry.name for entry in present}
    differences += [
        f"{old.name}: saved: {_describe(old)}; not among the present parameters"
        for old in saved
        if old.name not in names
    ]
    if differences:
        raise RoutingMismatchError(differences, _ADVICE)
    return [positions[entry.name] for entry in present]


def _describe(entry: RouteEntry) -> str:
    shape = "x".join(map(str, entry.shape)) or "scalar"
    view = f" as {entry.view}" if entry.view else ""
    return f"route {entry.route}{view}, shape {shape}"


def _refuse_foreign(groups: list[dict[str, Any]], state: Mapping[Any, Mapping[str, Any]]) -> None:
    """Say what a state dict without a routing manifest looks like."""
    if all("routes" in group for group in groups):
        return
    keys = {key for values in state.values() for key in values}
    if "momentum_buffer" in keys and "exp_avg" in keys:
        kind = "HybridMuon of deepmd-kit, which records no routing"
    elif "exp_avg" in keys:
        kind = "Adam or AdamW"
    elif "momentum_buffer" in keys:
        kind = "SGD with momentum or a plain Muon"
    else:
        kind = "another optimizer"
    raise ForeignStateError(
        f"the optimizer state carries no routing manifest; it looks like that of {kind}. "
        "Start from the weights alone with a fresh optimizer state (dp train --init-model)."
    )


def _damage(entry: RouteEntry, values: Mapping[str, Any]) -> list[str]:
    """List what does not fit between a parameter's saved state and its route."""
    problems = [
        f"{entry.name}: unexpected state {key!r} on route {entry.route}"
        for key in sorted(set(values) - _KEYS_OF_ROUTE[entry.route])
    ]
    problems += [
        f"{entry.name}: {key} has shape {tuple(values[key].shape)}, the parameter {entry.shape}"
        for key in _LIKE_PARAMETER
        if key in values and tuple(values[key].shape) != entry.shape
    ]
    blocks = entry.view.batch if entry.view else 0
    if "magma_score" in values and tuple(values["magma_score"].shape) != (blocks,):
        problems.append(
            f"{entry.name}: magma_score has shape {tuple(values['magma_score'].shape)}, the view has {blocks} matrices"
        )
    return problems


def _restore_learning_rates(optimizer: HybridMuon, groups: list[dict[str, Any]]) -> None:
    """Take the running learning rates over, and log every other setting that has changed since the save."""
    if len(groups) != len(optimizer.param_groups):
        log.info(
            "the state was saved with %d parameter groups, there are %d now: learning rates stay as they are",
            len(groups),
            len(optimizer.param_groups),
        )
        return
    for number, (present, saved) in enumerate(zip(optimizer.param_groups, groups, strict=True)):
        present["lr"] = saved["lr"]
        for key in sorted(set(present) & set(saved) - _NOT_SETTINGS):
            if _plain(present[key]) != _plain(saved[key]):
                log.info("param_groups[%d] %s: now %r, saved %r", number, key, present[key], saved[key])


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value
