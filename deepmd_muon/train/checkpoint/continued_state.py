"""Continuing a run with other branches or types: optimizer state and averages follow the parameters."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch

from deepmd_muon.checkpoint_file.directory import is_directory
from deepmd_muon.checkpoint_file.errors import CheckpointError
from deepmd_muon.checkpoint_file.file import OWN_KEY, understood
from deepmd_muon.model import EnergyModel
from deepmd_muon.model.branch_settings import SINGLE
from deepmd_muon.model.branches import Branches, all_names, branches_of
from deepmd_muon.model.deepmd_kit import deepmd_kit_parameter_names, own_parameter_name
from deepmd_muon.model.type_map import TypeMove, move_weights, type_axes
from deepmd_muon.optim import HybridMuon
from deepmd_muon.optim.routing.routes import RouteTable, canonical_name
from deepmd_muon.train.checkpoint.source import Source

log = logging.getLogger(__name__)

SHARED = "shared_parameters"
"""Key below ours in a checkpoint: the first name of every parameter that has several."""
_MANIFEST = ("routes", "views", "shapes")


def shared_names(model: EnergyModel | Branches) -> dict[str, str]:
    """Return, for every further name of a shared parameter, the name that optimizer state has."""
    return {name: names[0] for names in all_names(model).values() for name in names[1:]}


def state_of(
    sources: Mapping[str, Source],
    model: EnergyModel | Branches,
    optimizer: torch.optim.Optimizer,
    *,
    alone: bool,
) -> Mapping[str, Any]:
    """Return the content of the checkpoint that a run restarts from, its state arranged as the present model's.

    Several ranks (not `alone`) cannot rearrange the state of a directory. The weights are loaded already.

    Raises
    ------
    CheckpointError
        When the state cannot follow other branches, or the types of another type map.
    """
    source, models = next(iter(sources.values())), branches_of(model)
    moves = {
        name: move for name, one in sources.items() if (move := one.move_to(models[name].type_map))
    }
    fixed = not alone and is_directory(source.path)
    if moves and fixed:
        raise CheckpointError(
            f"type_map is not that of {source.path}, a directory whose state several processes cannot rearrange: "
            "continue from a file, or start on one process"
        )
    if moves and len(models) > 1:
        raise CheckpointError(
            f"type_map is not that of {source.path}, which the state of several branches cannot follow: start from its "
            "weights with --init-model"
        )
    with understood(source.path):
        continued = {name: one.branch for name, one in sources.items()}
        content = for_branches(source.content, model, optimizer, continued)
        if content is not source.content and fixed:
            raise CheckpointError(
                f"the branches of this input are not those of {source.path}, a directory whose state several processes "
                "cannot rearrange: continue from a file, or start on one process"
            )
        for name, move in moves.items():
            content = moved_content(content, models[name], optimizer, move)
    return content


def for_branches(
    content: Mapping[str, Any],
    model: EnergyModel | Branches,
    optimizer: torch.optim.Optimizer,
    continued: Mapping[str, str],
) -> Mapping[str, Any]:
    """Return a checkpoint whose optimizer state and averages bear the names of the present parameters.

    Parameters that the checkpoint does not have start without state, as in a fresh run; state of parameters that are
    gone is dropped. A checkpoint with the present names comes back as it is, as does one without names. `continued` has
    the saved branch that each branch starts from; those that start anew have none.
    """
    saved = content.get("optimizer") or {}
    groups = saved.get("param_groups", [])
    if len(groups) != 1 or "param_names" not in groups[0]:
        return content
    (group,) = groups
    places = {canonical_name(name): place for place, name in enumerate(group["param_names"])}
    names = {
        canonical_name(found[0]): [*map(canonical_name, found)]
        for found in all_names(model).values()
    }
    kept = {name for name, place in places.items() if group["params"][place] in saved["state"]}
    same = all(name == former for name, former in continued.items())
    if same and names.keys() <= places.keys() and kept <= names.keys():
        return content
    former = _Former(content, continued)
    sources = {name: next((place for each in alike if (place := former.find(each)) in places), None)
               for name, alike in names.items()}  # fmt: skip
    moved = {**content, "optimizer": _moved_state(saved, sources, places, optimizer)}
    if average := content.get("ema"):
        parameters = dict(model.named_parameters(remove_duplicate=False))
        stored = _with_own_names(average["model"])
        found = {name: stored.get(former.name_of(name)) for name in parameters}
        values = {name: parameters[name].detach() if x is None else x for name, x in found.items()}
        moved["ema"] = {**average, "model": values}
    fresh = [name for name, source in sources.items() if source is None]
    gone = sorted(kept - {*sources.values()})
    log.warning(
        "optimizer state: %d parameters continue; %s",
        len(sources) - len(fresh),
        "; ".join(_describe(fresh, gone)) or "all",
    )
    return moved


def _with_own_names(stored: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return an average under the names of this package's models."""
    return {own_parameter_name(name): x for name, x in stored.items()}


def _describe(fresh: list[str], gone: list[str]) -> list[str]:
    """Describe which branches have parameters that start without state, and which state is dropped."""
    told = []
    for names, what in (
        (fresh, "start without state"),
        (gone, "are gone, and their state is dropped"),
    ):
        if names:
            branches = dict.fromkeys(name.partition(".")[0] for name in names)
            told.append(f"{len(names)} {what} (of {', '.join(branches)})")
    return told


class _Former:
    """Names of the present parameters in a checkpoint."""

    def __init__(self, content: Mapping[str, Any], continued: Mapping[str, str]) -> None:
        self._continued = continued
        self._several = "model_dict" in content["model"]["_extra_state"]["model_params"]
        self._first = content.get(OWN_KEY, {}).get(SHARED, {})

    def name_of(self, name: str) -> str:
        """Return the name of a present parameter in the checkpoint, "" where its branch starts anew."""
        branch, _, rest = name.partition(".")
        if SINGLE in self._continued:
            branch, rest = SINGLE, name
        former = self._continued.get(branch)
        return "" if former is None else f"{former}.{rest}" if self._several else rest

    def find(self, name: str) -> str:
        """Return the name under which the checkpoint has its optimizer state."""
        former = self.name_of(name)
        return str(self._first.get(former, former))


def _moved_state(
    saved: Mapping[str, Any],
    sources: Mapping[str, str | None],
    places: Mapping[str, int],
    optimizer: torch.optim.Optimizer,
) -> dict[str, Any]:
    """Return an optimizer's state dict of the present parameters, each with the state of its source."""
    (group,) = saved["param_groups"]
    lists: dict[str, list[Any]] = {
        "params": list(range(len(sources))),
        "param_names": list(sources),
    }
    if isinstance(optimizer, HybridMuon):
        present = {entry.name: number for number, entry in enumerate(optimizer.routing)}
        manifest = optimizer.routing.manifest()
        for key in _MANIFEST:
            if key in group:
                lists[key] = [
                    manifest[key][present[name]] if source is None else group[key][places[source]]
                    for name, source in sources.items()
                ]
    state = {}
    for number, source in enumerate(sources.values()):
        values = {} if source is None else saved["state"].get(group["params"][places[source]], {})
        if values:  # a copy: what was shared may have become two parameters
            state[number] = {
                key: x.clone() if torch.is_tensor(x) else x for key, x in values.items()
            }
    return {**saved, "state": state, "param_groups": [{**group, **lists}]}


def moved_content(
    content: Mapping[str, Any], model: EnergyModel, optimizer: torch.optim.Optimizer, move: TypeMove
) -> dict[str, Any]:
    """Return a checkpoint whose optimizer state and averages have the shapes of the present types."""
    moved = dict(content)
    if state := content.get("optimizer"):
        moved["optimizer"] = _move_state(state, model, optimizer, move)
    if average := content.get("ema"):
        stored = _with_own_names(average["model"])
        moved["ema"] = {**average, "model": move_weights(model, stored, move)}
    return moved


def _move_state(
    state: Mapping[str, Any], model: EnergyModel, optimizer: torch.optim.Optimizer, move: TypeMove
) -> dict[str, Any]:
    """Move rows of moments; new types have none, as before a first step."""
    axes, parameters = type_axes(model), dict(model.named_parameters())
    routing = (
        {entry.name: entry for entry in optimizer.routing}
        if isinstance(optimizer, HybridMuon)
        else {}
    )
    # deepmd-kit's own state is by position.
    unnamed = iter([own_parameter_name(name) for name in deepmd_kit_parameter_names(model)])
    groups, values = [], dict(state["state"])
    for group in state["param_groups"]:
        changed = {key: list(group[key]) for key in ("routes", "views", "shapes") if key in group}
        names = group.get("param_names") or [next(unnamed, "") for _ in group["params"]]
        for index, (name, key) in enumerate(
            zip(map(canonical_name, names), group["params"], strict=True)
        ):
            if name not in axes or name not in parameters:
                continue
            shape, old, entry = parameters[name].shape, values.get(key, {}), routing.get(name)
            if (
                entry
                and entry.route != "frozen"
                and ("momentum_buffer" in old) != (entry.route == "muon")
            ):
                old = {}  # with one type the table is not a matrix
            moments = {
                what: x for what, x in old.items() if torch.is_tensor(x) and x.dim() == len(shape)
            }
            values[key] = {
                **old,
                **{w: move.rows(x, x.new_zeros(shape), axes[name]) for w, x in moments.items()},
            }
            if entry and changed:
                for what, listed in RouteTable([entry]).manifest().items():
                    if what in changed:
                        changed[what][index] = listed[0]
            log.warning(
                "optimizer state of %s: %s", name, move.describe() if old else "starts fresh"
            )
        groups.append({**group, **changed})
    return {**state, "state": values, "param_groups": groups}
