"""A parameter's state: how it begins, and how it comes back from a state dict by name, every route and view checked."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from deepmd_muon.optim.dtensors import whole
from deepmd_muon.optim.errors import ForeignStateError, RoutingMismatchError
from deepmd_muon.optim.routing.rules import RouteEntry, RouteTable, RoutingRules, canonical_name
from deepmd_muon.optim.state.deepmd_kit import is_deepmd_kit, read_deepmd_kit
from deepmd_muon.optim.state.migrate import Saved, migrate
from deepmd_muon.optim.state.schema import KEYS_OF_ROUTE, MOVED, STATE_KEYS
from deepmd_muon.optim.update.adam import moment_dtype

if TYPE_CHECKING:
    from deepmd_muon.optim.hybrid_muon import HybridMuon

log = logging.getLogger(__name__)

# Group keys that describe the parameters or the run rather than the user's settings.
_NOT_SETTINGS = {"params", "param_names", "lr", "initial_lr", "routing_version", "routes", "views", "shapes"}


_ADVICE = (
    "Restore the settings the state was saved with (muon_mode, min_matrix_dim, patterns, parameter names and shapes), "
    "set on_route_change to 'migrate' or 'reset', or start from the weights alone with a fresh optimizer state "
    "(dp train --init-model)."
)


def drop_unfit(optimizer: HybridMuon) -> None:
    """Drop, and say so, state that the present settings do not use.

    Scores go where Magma is off, so that they cannot come back stale. Other state is unfit where settings changed
    while a parameter was frozen; a frozen parameter itself keeps all state but the scores.
    """
    for p, entry, group in _parameters(optimizer):
        state = optimizer.state.get(p, {})
        unfit = [key for key in STATE_KEYS & set(state) if not _fits(key, state[key], entry, group)]
        for key in unfit:
            del state[key]
        if unfit:
            why = "magma_muon is off" if unfit == ["magma_score"] and not group["magma_muon"] else _describe(entry)
            log.warning("%s: its state %s is dropped: %s now", entry.name, ", ".join(sorted(unfit)), why)


def _fits(key: str, value: Tensor, entry: RouteEntry, group: Mapping[str, Any]) -> bool:
    """Whether a known state tensor belongs to a parameter of this route and these settings."""
    if key == "magma_score" and not group["magma_muon"]:
        return False
    if entry.route == "frozen":
        return True
    blocks = entry.view.blocks if entry.view else 0
    return key in KEYS_OF_ROUTE[entry.route] and (key != "magma_score" or tuple(value.shape) == (blocks,))


def load_checked_state(optimizer: HybridMuon, state_dict: Mapping[str, Any]) -> None:
    """Load `state_dict` into `optimizer`; see `HybridMuon.load_state_dict`."""
    state_dict = dict(state_dict)
    for hook in optimizer._optimizer_load_state_dict_pre_hooks.values():
        changed = hook(optimizer, state_dict)
        state_dict = dict(changed) if changed is not None else state_dict

    saved = _read(optimizer, state_dict)
    differences = _differences(saved, optimizer.routing)
    damaged = [problem for old in saved.values() for problem in _damage(old.entry, old.values)]
    if damaged:
        raise RoutingMismatchError(damaged, "The file is damaged or was changed by hand: use another checkpoint.")
    unexplained = [line for name, line in differences.items() if name not in saved or not saved[name].explained]
    if unexplained and optimizer.on_route_change == "error":
        raise RoutingMismatchError(unexplained, _ADVICE)

    state: dict[Tensor, dict[str, Any]] = {}
    converted: set[tuple[str, torch.dtype, torch.dtype]] = set()
    without_scores = 0
    for p, entry, group in _parameters(optimizer):
        old = saved.get(entry.name)
        if entry.name not in differences:
            values = old.values if old else {}
        elif old is None or (optimizer.on_route_change == "reset" and not old.explained):
            values = {}
            log.warning("%s; it starts afresh", differences[entry.name])
        else:
            values, happened = migrate(old, entry, group["adam_betas"])
            log.warning("%s; %s", differences[entry.name], happened)
        if "magma_score" in values and not group["magma_muon"]:
            values = {key: value for key, value in values.items() if key != "magma_score"}
            without_scores += 1
        if values:
            state[p] = {key: _placed(optimizer, key, value, p) for key, value in values.items()}
            converted |= {(k, v.dtype, state[p][k].dtype) for k, v in values.items() if v.dtype != state[p][k].dtype}
    for name in differences.keys() - {entry.name for entry in optimizer.routing}:
        log.warning("%s; its state is dropped", differences[name])
    if without_scores:
        log.warning("magma_muon is off: the saved Magma scores of %d parameters are dropped", without_scores)
    for key, old_dtype, new_dtype in sorted(converted, key=str):
        log.info("%s: saved as %s, kept as %s from now on", key, old_dtype, new_dtype)

    _restore_learning_rates(optimizer, state_dict["param_groups"])
    optimizer.state.clear()
    optimizer.state.update(state)
    for post_hook in optimizer._optimizer_load_state_dict_post_hooks.values():
        post_hook(optimizer)


def _parameters(optimizer: HybridMuon) -> list[tuple[Tensor, RouteEntry, dict[str, Any]]]:
    """Return every parameter with its routing entry and its group."""
    grouped = [(p, group) for group in optimizer.param_groups for p in group["params"]]
    return [(p, entry, group) for (p, group), entry in zip(grouped, optimizer.routing, strict=True)]


def _read(optimizer: HybridMuon, state_dict: Mapping[str, Any]) -> dict[str, Saved]:
    """Return what a state dict holds, by parameter name."""
    if not {"param_groups", "state"} <= state_dict.keys():
        raise ForeignStateError(
            f"this is no optimizer's state dict, which holds 'state' and 'param_groups'; found {list(state_dict)[:5]}"
        )
    groups, state = state_dict["param_groups"], state_dict["state"]
    if all("routes" in group for group in groups):
        return _read_own(groups, state)
    if is_deepmd_kit(groups):
        rules = [RoutingRules(group["muon_mode"], group["min_matrix_dim"]) for _, _, group in _parameters(optimizer)]
        return read_deepmd_kit(groups, state, optimizer.routing, rules)
    raise ForeignStateError(
        f"the optimizer state carries no routing manifest; it looks like that of {_kind(state)}. "
        "Start from the weights alone with a fresh optimizer state (dp train --init-model)."
    )


def _read_own(groups: list[dict[str, Any]], state: Mapping[Any, dict[str, Any]]) -> dict[str, Saved]:
    """Read a state dict with a manifest; its parameters are numbers, or names where torch.distributed made it."""
    table = RouteTable.from_manifest(groups)
    keys = [key for group in groups for key in group["params"]]
    by_name = {canonical_name(key): key for key in keys if isinstance(key, str)}
    if not {entry.name for entry in table} <= by_name.keys():
        if len(keys) != len(table):
            raise ForeignStateError(
                f"the state dict lists {len(keys)} parameters but routes {len(table)} of them: it is damaged"
            )
        by_name = {entry.name: key for entry, key in zip(table, keys, strict=True)}
    return {entry.name: Saved(entry, _without_powers(state.get(by_name[entry.name], {}))) for entry in table}


def _without_powers(values: Mapping[str, Any]) -> dict[str, Any]:
    """Leave out what a state carries for deepmd-kit's class alone, which counts no steps."""
    return {key: value for key, value in values.items() if key not in ("beta1_pow", "beta2_pow")}


def _kind(state: Mapping[Any, Mapping[str, Any]]) -> str:
    """Say what a state dict without a routing manifest looks like."""
    keys = {key for values in state.values() for key in values}
    if "exp_avg" in keys:
        return "Adam or AdamW"
    if "momentum_buffer" in keys:
        return "SGD with momentum or a plain Muon"
    return "another optimizer"


def _differences(saved: Mapping[str, Saved], present: RouteTable) -> dict[str, str]:
    """Return one line for each parameter that is on one side only or whose shape, route or view differs.

    A parameter without elements may be missing: deepmd-kit's models have some that ours do not.
    """
    differences = {}
    for entry in present:
        if entry.name not in saved:
            if 0 in entry.shape:
                continue
            differences[entry.name] = f"{entry.name}: not in the saved state; present: {_describe(entry)}"
            continue
        old = saved[entry.name].entry
        if (old.shape, old.view, old.route) != (entry.shape, entry.view, entry.route):
            differences[entry.name] = f"{entry.name}: saved: {_describe(old)}; present: {_describe(entry)}"
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


def _damage(entry: RouteEntry, values: Mapping[str, Any]) -> list[str]:
    """List what does not fit between a parameter's saved state and its route."""
    # A frozen parameter keeps the state of the route it had before.
    before = "muon" if "momentum_buffer" in values else "adam"
    expected = KEYS_OF_ROUTE[before if entry.route == "frozen" else entry.route]
    problems = [
        f"{entry.name}: unexpected state {key!r} on route {entry.route}" for key in sorted(set(values) - expected)
    ]
    problems += [
        f"{entry.name}: state {key!r} is missing on route {entry.route}"
        for key in sorted(expected - set(values) - {"magma_score"})
        if values
    ]
    problems += [
        f"{entry.name}: {key} has shape {tuple(values[key].shape)}, the parameter {entry.shape}"
        for key in MOVED
        if key in values and tuple(values[key].shape) != entry.shape
    ]
    score = values.get("magma_score")
    if entry.view and score is not None and tuple(score.shape) != (entry.view.blocks,):
        problems.append(
            f"{entry.name}: magma_score has shape {tuple(score.shape)}, the view has {entry.view.blocks} matrices"
        )
    return problems


def _placed(optimizer: HybridMuon, key: str, value: Tensor, p: Tensor) -> Tensor:
    """Copy a state tensor to where it lives, in the dtype this state has for such a parameter."""
    if key in ("step", "magma_score"):
        dtype = torch.float32
    else:
        dtype = p.dtype if key == "momentum_buffer" else moment_dtype(p.dtype)
    device = p.device
    if key in MOVED:
        device = torch.device("cpu") if optimizer._offload is not None else device
        value = _laid_out(optimizer, value, p)
        if not hasattr(value, "device_mesh"):
            # With the parameter's strides, whatever the saved ones were, as a first step would make it.
            return torch.empty_like(p, dtype=dtype, device=device, requires_grad=False).copy_(value.detach())
    return value.detach().to(device, dtype, copy=True)


def _laid_out(optimizer: HybridMuon, value: Tensor, p: Tensor) -> Tensor:
    """Return a moment laid out as a parameter's are now: cut where the state of a whole parameter is, or whole.

    All ranks must ask, since that takes collectives where it was laid out otherwise. What a DTensor parameter's state
    looks like is checked before the step, not here.
    """
    if hasattr(p, "device_mesh"):
        return value
    if optimizer._shared is not None and (cut := optimizer._shared.cut_of(p)) is not None:
        return cut.of(value)
    return whole(value)


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
        if "initial_lr" in saved:
            # A scheduler made after the load starts from the present setting, never from the saved one.
            present.setdefault("initial_lr", float(present["lr"]))
        if isinstance(present["lr"], Tensor):
            present["lr"].fill_(float(saved["lr"]))
        else:
            present["lr"] = float(saved["lr"])
        for key in sorted(set(present) & set(saved) - _NOT_SETTINGS):
            if _plain(present[key]) != _plain(saved[key]):
                log.info("param_groups[%d] %s: now %r, saved %r", number, key, present[key], saved[key])


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value
