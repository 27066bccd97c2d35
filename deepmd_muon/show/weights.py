"""`dp show weights`: spectra and next updates of a checkpoint's parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from deepmd_muon.show.errors import ShowError

if TYPE_CHECKING:
    from deepmd_muon.optim import HybridMuonConfig
    from deepmd_muon.optim.routing.routes import RouteEntry
    from deepmd_muon.show.spectra import ParameterUpdate


def weights_page(path: Path, picture: Path) -> str:
    """Draw spectra and updates of a checkpoint's parameters; return them as a table.

    Raises
    ------
    ShowError
        When the checkpoint has no optimizer state with the names of its parameters.
    """
    from deepmd_muon.checkpoint_file.file import read_checkpoint, understood
    from deepmd_muon.show.spectra import plot_spectra, table

    checkpoint = read_checkpoint(path)
    with understood(path):
        parameters = _parameters(checkpoint, path)
        step = checkpoint["model"]["_extra_state"]["train_infos"].get("step", -1) + 1
    plot_spectra(parameters, picture, f"{path.name}, step {step}")
    return table(parameters)


def _parameters(checkpoint: Mapping[str, Any], path: Path) -> list[ParameterUpdate]:
    """Return every parameter of the optimizer, in the order of its groups."""
    from deepmd_muon.optim.routing.routes import RouteEntry, RouteTable, canonical_name
    from deepmd_muon.train.checkpoint.optimizer_state import in_own_names, in_own_order

    optimizer: Mapping[str, Any] = checkpoint.get("optimizer") or {}
    groups = optimizer.get("param_groups", [])
    if not groups or not all(group.get("param_names") for group in groups):
        raise ShowError(
            f"{path} holds no optimizer state with names of parameters; take a checkpoint of this "
            "package"
        )
    weights = _weights(checkpoint["model"])
    # A checkpoint lists deepmd-kit's parameters; our models lack the empty ones among them.
    optimizer = in_own_order(in_own_names(optimizer), list(weights))
    updates = []
    for group in optimizer["param_groups"]:
        if "routes" in group:
            entries = list(RouteTable.from_groups([group]))
        else:  # Adam or AdamW of torch
            route: Any = "adamw" if group.get("decoupled_weight_decay") else "adam"
            names = [canonical_name(name) for name in group["param_names"]]
            entries = [
                RouteEntry(name, tuple(weights[name].shape), None, route, "recorded")
                for name in names
            ]
        for entry, key in zip(entries, group["params"], strict=True):
            state = optimizer["state"].get(key, {})
            updates.append(_parameter(entry, weights[entry.name].double(), state, group))
    return updates


def _weights(state: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the weights of a model by name; with several branches, by branch.name."""
    from deepmd_muon.model.deepmd_kit import from_deepmd_kit, saved_branches

    branches = dict.fromkeys(saved_branches(state).values())
    if not branches:
        return dict(from_deepmd_kit(state)[1])
    weights = {}
    for branch in branches:
        _, branch_weights = from_deepmd_kit(state, branch)
        weights.update({f"{branch}.{name}": x for name, x in branch_weights.items()})
    return weights


def _parameter(
    entry: RouteEntry, weight: Tensor, state: Mapping[str, Any], group: Mapping[str, Any]
) -> ParameterUpdate:
    from deepmd_muon.show.spectra import ParameterUpdate

    momentum = state.get("momentum_buffer", state.get("exp_avg"))
    if momentum is None:
        update = None
    elif entry.route == "muon":
        update = _muon_update(entry, weight, state, group)
    else:
        update = _adam_update(state, group)
    return ParameterUpdate(
        name=entry.name,
        route=entry.route,
        shape=entry.shape,
        weights=_spectra(entry, weight),
        momenta=() if momentum is None else _spectra(entry, momentum),
        rms=_rms(weight),
        update=update,
    )


def _rms(x: Tensor) -> float:
    return float(x.double().square().mean().sqrt())


def _spectra(entry: RouteEntry, x: Tensor) -> tuple[np.ndarray, ...]:
    """Return the singular values of every matrix that Muon orthogonalizes.

    On an Adam route, a 2-D tensor is one matrix.
    """
    x = x.double()
    if entry.view is not None:
        matrices = [matrix for block in entry.view.cut(x) for matrix in block]
    elif x.ndim == 2 and min(x.shape) > 1:
        matrices = [x]
    else:
        return ()
    return tuple(torch.linalg.svdvals(matrix).numpy() for matrix in matrices)


def _settings(group: Mapping[str, Any]) -> HybridMuonConfig:
    """Return HybridMuon's settings of a group; those that it lacks have their defaults."""
    from deepmd_muon.optim import HybridMuonConfig
    from deepmd_muon.optim.groups.group_settings import current_spelling, group_settings

    return group_settings({**vars(HybridMuonConfig()), **current_spelling(group)})


def _muon_update(
    entry: RouteEntry, weight: Tensor, state: Mapping[str, Any], group: Mapping[str, Any]
) -> float:
    """Return the RMS of the learning rate times the scaled polar factors of the momentum.

    Nesterov's form would need a gradient, which no checkpoint holds.
    """
    from deepmd_muon.optim.rules.interface import Blocks
    from deepmd_muon.optim.rules.registry import matrix_rules, tensors_of
    from deepmd_muon.optim.update.muon import polar_factors, scaled

    assert entry.view is not None
    settings = _settings(group)
    rules = [rule for rule in matrix_rules(settings) if rule.tensors().keys() <= state.keys()]
    block_state = {
        key: tensor.cut(state[key].float(), entry.view) for key, tensor in tensors_of(rules).items()
    }
    directions: Sequence[Tensor] = entry.view.cut(state["momentum_buffer"].float())
    weights = entry.view.cut(weight.float())
    for rule in rules:
        directions, _ = rule.orient(Blocks(directions, directions, weights), block_state)
    updates: Sequence[Tensor] = polar_factors(directions, settings)
    for rule in rules:
        updates, _ = rule.transform(updates, directions, block_state)
    updates = scaled(list(updates), block_state, rules, settings)
    for rule in rules:
        updates, _ = rule.finish(updates, weights, block_state, float(group["lr"]))
    return float(group["lr"]) * _rms(entry.view.join(updates))


def _adam_update(state: Mapping[str, Any], group: Mapping[str, Any]) -> float:
    """Return the RMS of Adam's step from its present moments."""
    lr = float(group["lr"])
    if "routes" in group:
        settings = _settings(group)
        beta1 = settings.adam_beta1
        beta2 = settings.adam_beta2
        eps = settings.adam_eps
        lr *= settings.adam_lr_ratio
    else:
        beta1, beta2 = group["betas"]
        eps = group["eps"]
    step = max(1.0, float(state["step"]))
    mean = state["exp_avg"].double() / (1 - beta1**step)
    deviation = (state["exp_avg_sq"].double() / (1 - beta2**step)).sqrt()
    return lr * _rms(mean / (deviation + eps))
