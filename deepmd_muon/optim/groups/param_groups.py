"""Parameter groups as a step reads them: parameters and their routes."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from deepmd_muon.optim.config import HybridMuonConfig
from deepmd_muon.optim.dtensors import spec_of
from deepmd_muon.optim.errors import InvalidParameterError, warn_caller
from deepmd_muon.optim.groups.group_settings import (
    Params,
    group_settings,
    with_numbers_of,
)
from deepmd_muon.optim.routing.routes import (
    RouteEntry,
    RouteTable,
    RoutingRules,
    choose_route,
    is_local,
    unnamed,
)
from deepmd_muon.optim.rules.registry import matrix_rules

log = logging.getLogger(__name__)


@dataclasses.dataclass(eq=False)
class Group:
    """A parameter group as a step reads it.

    A step reads the learning rate and `maximize` from `values`, because they may change between
    steps. If a scheduler changes numbers in `settings`, `follow_schedules` replaces them here, where
    all parts of a compiled step read them.
    """

    values: dict[str, Any]  # the group in `param_groups`
    settings: HybridMuonConfig
    routed: tuple[tuple[Tensor, RouteEntry], ...]  # parameters and their routes

    @property
    def lr(self) -> float | Tensor:
        """The learning rate: a number if reading it does not synchronize, or a 0-dim tensor."""
        lr: float | Tensor = self.values["lr"]
        if isinstance(lr, Tensor):
            return float(lr) if lr.device.type == "cpu" else lr.view(())
        return lr

    def follow_schedules(self) -> None:
        """Take over the numbers that a scheduler has changed in the group.

        Raises InvalidSettingError for a number out of its range.
        """
        self.settings = with_numbers_of(self.values, self.settings)


def with_names(params: Params, named_parameters: Iterable[tuple[str, Tensor]] | None) -> list[Any]:
    """Join parameters with their names into torch's (name, parameter) pairs.

    A warning lists the trainable parameters of `named_parameters` that are missing from `params`.
    """
    if isinstance(params, nn.Module):
        raise TypeError(
            f"params must be an iterable of parameters, found {type(params).__name__}; pass "
            "model.named_parameters()"
        )
    if isinstance(params, Tensor):  # its rows would be taken for parameters
        raise TypeError(
            "params must be an iterable of parameters or groups; found a single tensor: write "
            "[tensor]"
        )
    items: list[Any] = list(params)
    if named_parameters is None:
        return items
    names = {p: name for name, p in named_parameters}
    used: set[Tensor] = set()

    def named(p: Any) -> Any:
        if not isinstance(p, Tensor):  # already a pair
            used.add(p[1])
            return p
        if p not in names:
            raise InvalidParameterError(
                f"named_parameters has no name for a parameter of shape {tuple(p.shape)}"
            )
        used.add(p)
        return names[p], p

    for i, item in enumerate(items):
        if not isinstance(item, dict):
            items[i] = named(item)
            continue
        of_group = item["params"]
        of_group = [of_group] if isinstance(of_group, Tensor) else of_group
        items[i] = {**item, "params": [named(p) for p in of_group]}
    omitted = [name for p, name in names.items() if p not in used and p.requires_grad]
    if omitted:
        warn_caller(
            f"missing from params, though named_parameters lists them: {', '.join(omitted)}"
        )
    return items


class _Identity(NamedTuple):
    """Shows whether a parameter was replaced, or converted by `Module.to` or through `.data`.

    It holds no reference: a strong one would keep replaced parameters alive, and torch refuses to
    swap a tensor that has a weak one (`torch.utils.swap_tensors`). A new parameter may get the id
    of one that was freed. If it also agrees in all else, everything derived from it remains valid.
    """

    number: int  # its id
    shape: torch.Size
    dtype: torch.dtype
    device: torch.device | None
    is_plain: bool  # no DTensor


class Routing:
    """The routes of all parameters, with the inputs that they were computed from.

    Attributes
    ----------
    routes
        The routes of each group.
    table
        The routes of all parameters.

    Parameters
    ----------
    param_groups
        The groups of the optimizer.
    moves
        Whether a parameter that moves to another device counts as another one. State that several
        ranks share does not follow it: that takes all of them.

    Raises
    ------
    InvalidShapeError
        When a split does not fit a parameter.
    """

    def __init__(self, param_groups: Sequence[dict[str, Any]], *, moves: bool = True) -> None:
        self._moves = moves
        self._inputs = _routing_inputs(param_groups)
        self._params = self._identities(param_groups)
        self.routes = [_routes_of_group(number, group) for number, group in enumerate(param_groups)]
        self.table = RouteTable([entry for entries in self.routes for entry in entries])

    def is_current(self, param_groups: Sequence[dict[str, Any]]) -> bool:
        """Return whether parameters, `requires_grad` and routing settings are the same."""
        same_params = self._params == self._identities(param_groups)
        return same_params and self._inputs == _routing_inputs(param_groups)

    def params_among(self, tensors: Iterable[Tensor]) -> dict[str, Tensor]:
        """Return the parameters among `tensors` by name; all existed when the routing was made."""
        by_id = {id(p): p for p in tensors}
        ids = [identity.number for group in self._params for identity in group]
        return {
            entry.name: by_id[number]
            for entry, number in zip(self.table, ids, strict=True)
            if number in by_id
        }

    def converted(self, params: Iterable[Tensor]) -> set[Tensor]:
        """Return the parameters that have changed dtype, shape or device since the routing."""
        former = {identity.number: identity for group in self._params for identity in group}
        return {p for p in params if id(p) in former and self._identity(p) != former[id(p)]}

    def groups(self, param_groups: Sequence[dict[str, Any]]) -> list[Group]:
        """Return the groups as a step reads them."""
        return [
            Group(group, group_settings(group), tuple(zip(group["params"], entries, strict=True)))
            for group, entries in zip(param_groups, self.routes, strict=True)
        ]

    def _identity(self, p: Tensor) -> _Identity:
        is_plain = spec_of(p) is None
        device = p.device if is_plain and self._moves else None
        return _Identity(id(p), p.shape, p.dtype, device, is_plain)

    def _identities(self, param_groups: Sequence[dict[str, Any]]) -> list[list[_Identity]]:
        return [[self._identity(p) for p in group["params"]] for group in param_groups]


def _routes_of_group(number: int, group: dict[str, Any]) -> list[RouteEntry]:
    """Return the routes of a group's parameters."""
    rules = RoutingRules.of(group_settings(group))
    names = group.get("param_names")
    entries = []
    for i, p in enumerate(group["params"]):
        name = names[i] if names else None
        entry = choose_route(name, tuple(p.shape), rules, trainable=p.requires_grad)
        if name is None:
            entry = dataclasses.replace(entry, name=unnamed(number, i))
        entries.append(entry)
    return entries


def _routing_inputs(param_groups: Sequence[dict[str, Any]]) -> list[Any]:
    """Return the values that may change between steps and that determine routes or their state."""
    inputs = []
    for group in param_groups:
        settings = group_settings(group)
        trained = [p.requires_grad for p in group["params"]]
        rules = matrix_rules(settings)
        inputs.append((rules, settings.local_patterns, RoutingRules.of(settings), trained))
    return inputs


def log_parameters(groups: Iterable[Group], replicas: object = None) -> None:
    """Log each parameter's route, its reason, and the ranks or device that hold it, as DEBUG."""
    for group in groups:
        for p, entry in group.routed:
            spec = spec_of(p)
            if spec is not None:
                place = f"placements {tuple(map(str, spec.placements))} on {spec.mesh}"
            elif replicas is None or is_local(entry.name, group.settings):
                place = f"on {p.device}"
            else:
                place = f"replicated over {replicas}"
            log.debug(
                "%s: %s, because %s; shape %s, %s",
                entry.name,
                entry.placement,
                entry.reason,
                "x".join(map(str, entry.shape)) or "scalar",
                place,
            )
