"""Continuing a run with another type map: rows of the optimizer's state and of averages follow those of the weights."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch

from deepmd_muon.model import EnergyModel
from deepmd_muon.model.deepmd_kit import deepmd_kit_parameter_names
from deepmd_muon.model.type_map import TypeMove, move_weights, type_axes
from deepmd_muon.optim import HybridMuon
from deepmd_muon.optim.routing.rules import RouteTable, canonical_name

log = logging.getLogger(__name__)


def moved_content(
    content: Mapping[str, Any], model: EnergyModel, optimizer: torch.optim.Optimizer, move: TypeMove
) -> dict[str, Any]:
    """Return a checkpoint whose optimizer state and averages have the shapes of the present types.

    Parameters
    ----------
    content
        The checkpoint.
    model
        The present model, weights loaded.
    optimizer
        The run's.
    move
        From the checkpoint's type map to the present one.
    """
    moved = dict(content)
    if state := content.get("optimizer"):
        moved["optimizer"] = _move_state(state, model, optimizer, move)
    if average := content.get("ema"):
        moved["ema"] = {**average, "model": move_weights(model, average["model"], move)}
    return moved


def _move_state(
    state: Mapping[str, Any], model: EnergyModel, optimizer: torch.optim.Optimizer, move: TypeMove
) -> dict[str, Any]:
    """Move rows of moments; new types have none, as before a first step."""
    axes, parameters = type_axes(model), dict(model.named_parameters())
    routing = {entry.name: entry for entry in optimizer.routing} if isinstance(optimizer, HybridMuon) else {}
    unnamed = iter(deepmd_kit_parameter_names(model))  # deepmd-kit's own state is by position
    groups, values = [], dict(state["state"])
    for group in state["param_groups"]:
        changed = {key: list(group[key]) for key in ("routes", "views", "shapes") if key in group}
        names = group.get("param_names") or [next(unnamed, "") for _ in group["params"]]
        for index, (name, key) in enumerate(zip(map(canonical_name, names), group["params"], strict=True)):
            if name not in axes or name not in parameters:
                continue
            shape, old, entry = parameters[name].shape, values.get(key, {}), routing.get(name)
            if entry and entry.route != "frozen" and ("momentum_buffer" in old) != (entry.route == "muon"):
                old = {}  # with one type the table is not a matrix
            moments = {what: x for what, x in old.items() if torch.is_tensor(x) and x.dim() == len(shape)}
            values[key] = {**old, **{w: move.rows(x, x.new_zeros(shape), axes[name]) for w, x in moments.items()}}
            if entry and changed:
                for what, listed in RouteTable([entry]).manifest().items():
                    if what in changed:
                        changed[what][index] = listed[0]
            log.warning("optimizer state of %s: %s", name, move.describe() if old else "starts fresh")
        groups.append({**group, **changed})
    return {**state, "state": values, "param_groups": groups}
