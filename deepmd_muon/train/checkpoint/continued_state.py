"""Continue a run with other branches or types: optimizer state and averages follow."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from deepmd_muon.checkpoint_file.errors import CheckpointError
from deepmd_muon.checkpoint_file.file import OWN_KEY, understood
from deepmd_muon.model import EnergyModel
from deepmd_muon.model.branch_settings import SINGLE
from deepmd_muon.model.branches import Branches, all_names, branches_of
from deepmd_muon.model.deepmd_kit import deepmd_kit_parameter_names, naming_of
from deepmd_muon.model.type_map import TypeMove, move_weights, type_axes
from deepmd_muon.optim import HybridMuon
from deepmd_muon.optim.routing.routes import canonical_name, current_routes
from deepmd_muon.train.checkpoint.source import Source

log = logging.getLogger(__name__)

SHARED = "shared_parameters"
"""Key below ours in a checkpoint: the first name of every parameter that has several."""


def shared_names(model: EnergyModel | Branches) -> dict[str, str]:
    """Return, for every further name of a shared parameter, the name that optimizer state has."""
    return {name: names[0] for names in all_names(model).values() for name in names[1:]}


def state_of(
    sources: Mapping[str, Source], model: EnergyModel | Branches, optimizer: torch.optim.Optimizer
) -> Mapping[str, Any]:
    """Return the content of the checkpoint that a run restarts from, arranged as the present model.

    The weights are loaded already.

    Raises
    ------
    CheckpointError
        If the state of several branches would have to follow another type map.
    """
    source = next(iter(sources.values()))
    models = branches_of(model)
    moves = {}
    for name, branch_source in sources.items():
        move = branch_source.move_to(models[name].type_map)
        if move is not None:
            moves[name] = move
    if moves and len(models) > 1:
        raise CheckpointError(
            f"type_map is not that of {source.path}, which the state of several branches cannot "
            "follow: start from its weights with --init-model"
        )
    with understood(source.path):
        continued = {name: branch_source.branch for name, branch_source in sources.items()}
        content = for_branches(source.content, model, optimizer, continued)
        for name, move in moves.items():
            content = moved_content(content, models[name], optimizer, move)
    return content


# ----- other branches ----------------------------------------------------------------------------


def for_branches(
    content: Mapping[str, Any],
    model: EnergyModel | Branches,
    optimizer: torch.optim.Optimizer,
    continued: Mapping[str, str],
) -> Mapping[str, Any]:
    """Return a checkpoint with optimizer state and averages under the names of present parameters.

    Parameters that the checkpoint does not have start without state, as in a fresh run. State of
    parameters that are gone is dropped. A checkpoint with the present names comes back as it is, as
    does one without names. `continued` has the saved branch that each branch starts from; branches
    that start afresh are not in it.
    """
    saved_state = content.get("optimizer") or {}
    groups = saved_state.get("param_groups", [])
    if len(groups) != 1 or "param_names" not in groups[0]:
        return content
    group = groups[0]
    # Where each saved parameter is in the lists of the group, and which of them have state.
    saved_position = {canonical_name(name): i for i, name in enumerate(group["param_names"])}
    with_state = {
        name for name, i in saved_position.items() if group["params"][i] in saved_state["state"]
    }
    # Every present parameter by its first name, with all names that it has in branches.
    names = {
        canonical_name(alike[0]): [canonical_name(name) for name in alike]
        for alike in all_names(model).values()
    }
    same_branches = all(name == former for name, former in continued.items())
    is_complete = names.keys() <= saved_position.keys() and with_state <= names.keys()
    if same_branches and is_complete:
        return content

    former = _FormerNames(content, continued)
    saved_names: dict[str, str | None] = {}
    for name, alike in names.items():
        candidates = [former.state_name_of(branch_name) for branch_name in alike]
        with_position = [candidate for candidate in candidates if candidate in saved_position]
        saved_names[name] = with_position[0] if with_position else None
    rearranged = {
        **content,
        "optimizer": _moved_state(saved_state, saved_names, saved_position, optimizer),
    }
    if average := content.get("ema"):
        by_own_name = _with_own_names(average["model"], model)
        rearranged["ema"] = {
            **average,
            "model": {
                # A new parameter's average begins with its weight.
                name: by_own_name.get(former.name_of(name), parameter.detach())
                for name, parameter in model.named_parameters(remove_duplicate=False)
            },
        }
    _log_moved(saved_names, with_state)
    return rearranged


class _FormerNames:
    """Names of the present parameters in a checkpoint."""

    def __init__(self, content: Mapping[str, Any], continued: Mapping[str, str]) -> None:
        self._continued = continued
        self._has_branches = "model_dict" in content["model"]["_extra_state"]["model_params"]
        self._first_names = content.get(OWN_KEY, {}).get(SHARED, {})

    def name_of(self, name: str) -> str:
        """Return the name of a present parameter in the checkpoint, "" if its branch is new."""
        branch, _, name_in_branch = name.partition(".")
        if SINGLE in self._continued:  # names of a single model do not begin with a branch
            branch = SINGLE
            name_in_branch = name
        former = self._continued.get(branch)
        if former is None:
            return ""
        return f"{former}.{name_in_branch}" if self._has_branches else name_in_branch

    def state_name_of(self, name: str) -> str:
        """Return the name under which the checkpoint has the optimizer's state of a parameter."""
        former = self.name_of(name)
        return str(self._first_names.get(former, former))


def _moved_state(
    saved_state: Mapping[str, Any],
    saved_names: Mapping[str, str | None],
    saved_position: Mapping[str, int],
    optimizer: torch.optim.Optimizer,
) -> dict[str, Any]:
    """Return an optimizer's state dict of the present parameters, with the state of their sources.

    `saved_names` has the name of each present parameter in the checkpoint, None for a new one.
    """
    group = current_routes(saved_state["param_groups"][0])
    lists: dict[str, list[Any]] = {
        "params": list(range(len(saved_names))),
        "param_names": list(saved_names),
    }
    if isinstance(optimizer, HybridMuon) and "routes" in group:
        present = {entry.name: entry.text for entry in optimizer.routing}
        # New parameters have the present route, so that none of them counts as changed.
        lists["routes"] = [
            present[name] if saved_name is None else group["routes"][saved_position[saved_name]]
            for name, saved_name in saved_names.items()
        ]
    state = {}
    for number, saved_name in enumerate(saved_names.values()):
        if saved_name is None:
            continue
        tensors = saved_state["state"].get(group["params"][saved_position[saved_name]], {})
        if tensors:
            # Copies: one shared parameter may have become two.
            state[number] = {
                key: x.clone() if torch.is_tensor(x) else x for key, x in tensors.items()
            }
    return {**saved_state, "state": state, "param_groups": [{**group, **lists}]}


def _with_own_names(
    stored: Mapping[str, torch.Tensor], model: EnergyModel | Branches
) -> dict[str, torch.Tensor]:
    """Return an average under the names of this package's models."""
    own_name_of = naming_of(model)
    return {own_name_of(name): x for name, x in stored.items()}


def _log_moved(saved_names: Mapping[str, str | None], with_state: set[str]) -> None:
    """Log how many parameters continue, start without state, or are gone, and their branches."""
    new = [name for name, saved_name in saved_names.items() if saved_name is None]
    gone = sorted(with_state - {*saved_names.values()})
    changes = []
    if new:
        changes.append(f"{len(new)} start without state (of {_branches_in(new)})")
    if gone:
        changes.append(
            f"{len(gone)} are gone, and their state is dropped (of {_branches_in(gone)})"
        )
    n_continued = len(saved_names) - len(new)
    log.warning(
        "optimizer state: %d parameters continue; %s", n_continued, "; ".join(changes) or "all"
    )


def _branches_in(names: list[str]) -> str:
    return ", ".join(dict.fromkeys(name.partition(".")[0] for name in names))


# ----- other types -------------------------------------------------------------------------------


def moved_content(
    content: Mapping[str, Any], model: EnergyModel, optimizer: torch.optim.Optimizer, move: TypeMove
) -> dict[str, Any]:
    """Return a checkpoint with optimizer state and averages in the shapes of the present types."""
    rearranged = dict(content)
    if state := content.get("optimizer"):
        rearranged["optimizer"] = _move_state(state, model, optimizer, move)
    if average := content.get("ema"):
        stored = _with_own_names(average["model"], model)
        rearranged["ema"] = {**average, "model": move_weights(model, stored, move)}
    return rearranged


class _TypedParameter(NamedTuple):
    """A parameter with rows for types."""

    name: str
    shape: torch.Size
    type_axis: int
    entry: Any  # its entry in HybridMuon's routing, None for other optimizers


def _move_state(
    state: Mapping[str, Any], model: EnergyModel, optimizer: torch.optim.Optimizer, move: TypeMove
) -> dict[str, Any]:
    """Move rows of moments; rows of new types are zero, as before a first step."""
    typed = _typed_parameters(model, optimizer)
    # deepmd-kit's own state has no names; it is by position.
    names_by_position = list(map(naming_of(model), deepmd_kit_parameter_names(model)))
    groups = []
    tensors_of = dict(state["state"])
    start = 0  # position of the group's first parameter among those of all groups
    for group in map(current_routes, state["param_groups"]):
        routes = list(group.get("routes", ()))
        end = start + len(group["params"])
        names = group.get("param_names") or names_by_position[start:end]
        start = end
        for i, (name, number) in enumerate(zip(names, group["params"], strict=True)):
            parameter = typed.get(canonical_name(name))
            if parameter is None:
                continue
            tensors_of[number] = _move_rows(tensors_of.get(number, {}), parameter, move)
            if parameter.entry is not None and routes:
                routes[i] = parameter.entry.text
        groups.append({**group, "routes": routes} if routes else group)
    return {**state, "state": tensors_of, "param_groups": groups}


def _typed_parameters(
    model: EnergyModel, optimizer: torch.optim.Optimizer
) -> dict[str, _TypedParameter]:
    """Return the parameters with rows for types by name."""
    entries = {}
    if isinstance(optimizer, HybridMuon):
        entries = {entry.name: entry for entry in optimizer.routing}
    axes = type_axes(model)
    return {
        name: _TypedParameter(
            name=name, shape=parameter.shape, type_axis=axes[name], entry=entries.get(name)
        )
        for name, parameter in model.named_parameters()
        if name in axes
    }


def _move_rows(
    tensors: Mapping[str, Any], parameter: _TypedParameter, move: TypeMove
) -> dict[str, Any]:
    """Return a parameter's state with its moments in the rows of the present types."""
    entry = parameter.entry
    if entry is not None and entry.route != "frozen":
        # With one type the table is not a matrix, so the parameter may change its route.
        same_route = ("momentum_buffer" in tensors) == (entry.route == "muon")
        tensors = tensors if same_route else {}
    in_present_rows = dict(tensors)
    for key, x in tensors.items():
        if torch.is_tensor(x) and x.dim() == len(parameter.shape):
            in_present_rows[key] = move.rows(x, x.new_zeros(parameter.shape), parameter.type_axis)
    log.warning(
        "optimizer state of %s: %s",
        parameter.name,
        move.describe() if tensors else "starts fresh",
    )
    return in_present_rows
