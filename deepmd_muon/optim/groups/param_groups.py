"""Parameter groups: names for parameters without one, checks of parameters, and their routes."""

from __future__ import annotations

import dataclasses
import logging
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from deepmd_muon.optim.config import DEFAULT_ADAMW_PATTERNS, HybridMuonConfig
from deepmd_muon.optim.dtensors import spec_of
from deepmd_muon.optim.errors import IdleSettingWarning, InvalidParameterError
from deepmd_muon.optim.groups.group_settings import (
    PATTERNS,
    Params,
    arguments_of,
    as_tuple,
    group_settings,
)
from deepmd_muon.optim.routing.routes import (
    RouteEntry,
    RouteTable,
    RoutingRules,
    canonical_name,
    choose_route,
    is_local,
    unnamed,
)
from deepmd_muon.optim.routing.views import FusedSplit, effective_shape
from deepmd_muon.optim.rules.master_weights import NARROW
from deepmd_muon.optim.rules.registry import matrix_rules
from deepmd_muon.setting import idle_settings

log = logging.getLogger(__name__)


class Group(NamedTuple):
    """A parameter group as a step reads it: the group in `param_groups`, its checked settings, parameters and routes.

    A step reads the learning rate and `maximize` from `values`, because they may change between steps.
    """

    values: dict[str, Any]
    settings: HybridMuonConfig
    routed: tuple[tuple[Tensor, RouteEntry], ...]

    @property
    def lr(self) -> float | Tensor:
        """The learning rate: a number where reading it does not synchronize, or a 0-dim tensor."""
        lr: float | Tensor = self.values["lr"]
        if isinstance(lr, Tensor):
            return float(lr) if lr.device.type == "cpu" else lr.view(())
        return lr


_TRAINABLE = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
# Stack level of the constructor's caller: the constructor's two decorators are among the frames.
_CONSTRUCTOR = 5
# A weight of four or more dimensions looks like a convolution kernel if it has square matrices of at most this size,
# and at least this many of them.
_LARGEST_KERNEL, _MANY = 7, 16


def with_names(params: Params, named_parameters: Iterable[tuple[str, Tensor]] | None) -> list[Any]:
    """Join parameters with their names from `named_parameters` into torch's (name, parameter) pairs.

    A warning lists the trainable parameters of `named_parameters` that are missing from `params`.
    """
    if isinstance(params, nn.Module):
        raise TypeError(
            f"params must be an iterable of parameters, found {type(params).__name__}; pass model.named_parameters()"
        )
    if isinstance(params, Tensor):  # its rows would be taken for parameters
        raise TypeError(
            "params must be an iterable of parameters or groups; found a single tensor: write [tensor]"
        )
    given: list[Any] = list(params)
    if named_parameters is None:
        return given
    names = {p: name for name, p in named_parameters}
    used: set[Tensor] = set()

    def pair(p: Any) -> Any:
        if not isinstance(p, Tensor):
            used.add(p[1])  # already a pair
            return p
        if p not in names:
            raise InvalidParameterError(
                f"named_parameters has no name for a parameter of shape {tuple(p.shape)}"
            )
        used.add(p)
        return names[p], p

    named = []
    for item in given:
        if isinstance(item, dict):
            params = item["params"]
            named.append(
                {
                    **item,
                    "params": [
                        pair(p) for p in ([params] if isinstance(params, Tensor) else params)
                    ],
                }
            )
        else:
            named.append(pair(item))
    omitted = [name for p, name in names.items() if p not in used and p.requires_grad]
    if omitted:
        warnings.warn(
            f"missing from params, though named_parameters lists them: {', '.join(omitted)}",
            stacklevel=_CONSTRUCTOR,
        )
    return named


def check_parameters(groups: Sequence[dict[str, Any]]) -> None:
    """Raise InvalidParameterError for parameters that no step can update, repeated ones, and repeated names."""
    seen: dict[Tensor, str] = {}
    taken: dict[str, str] = {}
    for number, group in enumerate(groups):
        names = group.get("param_names") or [
            unnamed(number, i) for i in range(len(group["params"]))
        ]
        if len(names) != len(group["params"]):
            raise InvalidParameterError(
                f"param_groups[{number}] has {len(group['params'])} parameters and {len(names)} names; change params "
                "and param_names together"
            )
        for given, p in zip(names, group["params"], strict=True):
            name = canonical_name(given)
            if getattr(p, "_fsdp_flattened", False):
                raise InvalidParameterError(
                    f"{name!r} is a part of a parameter that FullyShardedDataParallel (FSDP1) has flattened, of shape "
                    f"{tuple(p.shape)} on this rank: matrices cannot be recognized in it. Shard the model with "
                    "torch.distributed.fsdp.fully_shard (FSDP2) instead, or keep it whole with DistributedDataParallel "
                    "and replicas="
                )
            if p.is_complex():
                raise InvalidParameterError(
                    f"HybridMuon needs real parameters; {name!r} is {p.dtype}"
                )
            if (
                p.requires_grad and p.dtype not in _TRAINABLE and spec_of(p) is None
            ):  # the sharded plan checks DTensors
                raise InvalidParameterError(
                    f"HybridMuon cannot train {name!r}, which is {p.dtype}: freeze it (requires_grad_(False)), or keep "
                    "it in 16 bits or more"
                )
            if p.is_neg():
                raise InvalidParameterError(
                    f"{name!r} is a view that negates another tensor's numbers, such as the imaginary part of a "
                    "conjugate, and cannot be updated; make the parameter from a copy: nn.Parameter(x.resolve_neg())"
                )
            if any(
                stride == 0 and size > 1 for stride, size in zip(p.stride(), p.shape, strict=True)
            ):
                raise InvalidParameterError(
                    f"{name!r} of shape {tuple(p.shape)} and strides {p.stride()} has elements that share memory and "
                    "cannot be updated separately; make the parameter from a copy: nn.Parameter(x.clone())"
                )
            if p in seen:
                raise InvalidParameterError(
                    f"{name!r} and {seen[p]!r} are the same parameter; pass it once, as model.named_parameters() does"
                )
            if name in taken:
                both = (
                    ""
                    if taken[name] == given
                    else f" without wrappers' prefixes ({taken[name]!r}, {given!r})"
                )
                raise InvalidParameterError(
                    f"two parameters are named {name!r}{both}; names must be unique"
                )
            seen[p] = name
            taken[name] = given


def warn_unmatched_patterns(groups: Sequence[Mapping[str, Any]], new: int = 0) -> None:
    """Warn of parameters without names, and of patterns that decide about no parameter of any group with them.

    Groups before number `new`, and their patterns, were checked earlier.
    """
    if not all("param_names" in group for group in groups[new:]):
        warnings.warn(
            "HybridMuon got parameters without names, so rules on names (biases, adam_, adamw_, patterns) do not "
            "apply; pass model.named_parameters()",
            stacklevel=3 if new else _CONSTRUCTOR,
        )
    matched: dict[tuple[str, str], bool] = {}
    decided: dict[tuple[str, str], bool] = {}
    for number, group in enumerate(groups):
        names = [canonical_name(name) for name in group.get("param_names", ())]
        if not names:
            continue
        shapes = {name: tuple(p.shape) for name, p in zip(names, group["params"], strict=False)}
        deep = [name for name, shape in shapes.items() if len(shape) > 2]
        open_to = _names_open_to(group, shapes)
        for key, text in _given_patterns(group):
            pattern = FusedSplit.parse(text).pattern if key == "splits" else text
            kernels = key in ("expert_patterns", "conv_patterns") and pattern != "*"
            hits = _names_matching(deep if kernels else names, (pattern,))
            decides = hits if pattern == "*" else hits & open_to.get(key, hits)
            checked = number < new
            matched[key, text] = matched.get((key, text), checked) or bool(hits)
            decided[key, text] = decided.get((key, text), checked) or bool(decides)
    unmatched = [f"{key} {text!r}" for (key, text), hit in matched.items() if not hit]
    if unmatched:
        example = next(
            canonical_name(name) for group in groups for name in group.get("param_names", ())
        )
        warnings.warn(
            f"no parameter matches {', '.join(unmatched)}; patterns must match a whole name, such as {example!r}",
            stacklevel=3 if new else _CONSTRUCTOR,
        )
    idle = [
        f"{key} {text!r}" for (key, text), hit in matched.items() if hit and not decided[key, text]
    ]
    if idle:
        warnings.warn(
            f"no effect: {', '.join(idle)}; other settings decide about the names that they match. The order is: "
            "muon_patterns (for two dimensions above 1), adam_patterns, adamw_patterns, expert_patterns, conv_patterns, "
            "splits",
            stacklevel=3 if new else _CONSTRUCTOR,
        )


def _given_patterns(group: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield setting and pattern of a group, but not the default patterns of `MuonConfig` as a whole."""
    for key in PATTERNS:
        patterns = as_tuple(group[key]) or ()
        whole_default = key == "adamw_patterns" and {*DEFAULT_ADAMW_PATTERNS} <= {*patterns}
        for text in patterns:
            if not (whole_default and text in DEFAULT_ADAMW_PATTERNS):
                yield key, text


def _names_open_to(
    group: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, set[str]]:
    """Return, by setting, the names about which its patterns may decide, given the settings that come before it."""
    names = set(shapes)
    by_muon = _names_matching(names, group["muon_patterns"])
    by_adam = _names_matching(names, group["adam_patterns"]) - by_muon
    by_adamw = _names_matching(names, group["adamw_patterns"]) - by_muon
    return {
        "muon_patterns": {name for name in names if len(effective_shape(shapes[name])) > 1},
        "adam_patterns": names - by_muon,
        "adamw_patterns": names - by_muon - by_adam,
        "conv_patterns": names - _names_matching(names, group["expert_patterns"]),
        "splits": names - by_adam - by_adamw,
    }


def _names_matching(names: Iterable[str], patterns: Sequence[str] | None) -> set[str]:
    """Return the names that match one of some shell patterns."""
    listed = as_tuple(patterns) or ()
    return {name for name in names if any(fnmatchcase(name, pattern) for pattern in listed)}


def warn_idle_settings(groups: Sequence[Mapping[str, Any]]) -> None:
    """Warn of settings that have no effect beside the others of their group, unless they have one in another group."""
    arguments = [arguments_of(group) for group in groups]
    idle = [idle_settings(each) for each in arguments]
    reasons = {
        name: reason
        for each, found in zip(arguments, idle, strict=True)
        for name, reason in found.items()
        if not any(
            getattr(other, name) == getattr(each, name) and name not in found_there
            for other, found_there in zip(arguments, idle, strict=True)
        )
    }
    if reasons:
        text = "; ".join(f"{name} {reason}" for name, reason in reasons.items())
        warnings.warn(IdleSettingWarning(text), stacklevel=_CONSTRUCTOR)


def warn_idle_master_weights(groups: Sequence[Mapping[str, Any]]) -> None:
    """Warn of `master_weights` where no parameter of their groups has 16 bits."""
    wanting = [group for group in groups if group["master_weights"] and group["params"]]
    if wanting and not any(p.dtype in NARROW for group in wanting for p in group["params"]):
        dtypes = sorted({str(p.dtype) for group in wanting for p in group["params"]})
        warnings.warn(
            f"master_weights have no effect: they belong to parameters of 16 bits, and these are {', '.join(dtypes)}",
            stacklevel=_CONSTRUCTOR,
        )


def warn_of_kernels(groups: Sequence[Group]) -> None:
    """Warn of parameters that look like convolution kernels and form many small matrices."""
    open_groups = [group for group in groups if group.values["conv_patterns"] is None]
    entries = [(entry, entry.view) for group in open_groups for _, entry in group.routed]
    found = [
        (entry, view)
        for entry, view in entries
        if view is not None and len(entry.shape) >= 4 and view.batch >= _MANY
        if view.rows == view.columns <= _LARGEST_KERNEL
    ]
    if found:
        first, view = found[0]
        warnings.warn(
            f"{first.name!r} of shape {first.shape} is seen as {view.batch} matrices of {view.rows}x{view.columns}"
            + (f", and {len(found) - 1} more parameters like it" if len(found) > 1 else "")
            + ". If it is the kernel of a convolution, build the optimizer from the model, "
            "HybridMuonConfig().build(model), or name it in conv_patterns; conv_patterns=[] keeps the small matrices",
            stacklevel=_CONSTRUCTOR,
        )


class Routing:
    """The routes of all parameters (`table`), those of each group (`routes`), and the inputs they were computed from.

    `moves` says whether a parameter that moves to another device counts as another one. State that several ranks share
    does not follow it: that takes all of them.

    Raises
    ------
    InvalidShapeError
        When a split does not fit a parameter.
    """

    def __init__(self, param_groups: Sequence[dict[str, Any]], *, moves: bool = True) -> None:
        self._moves = moves
        self._inputs, self._params = _routing_inputs(param_groups), self._identities(param_groups)
        self.routes: list[list[RouteEntry]] = []
        for number, group in enumerate(param_groups):
            rules, names = RoutingRules.of(group_settings(group)), group.get("param_names")
            self.routes.append([])
            for i, p in enumerate(group["params"]):
                entry = choose_route(
                    names[i] if names else None, tuple(p.shape), rules, trainable=p.requires_grad
                )
                self.routes[-1].append(
                    entry if names else dataclasses.replace(entry, name=unnamed(number, i))
                )
        self.table = RouteTable([entry for entries in self.routes for entry in entries])

    def is_current(self, param_groups: Sequence[dict[str, Any]]) -> bool:
        """Return whether parameters, their `requires_grad` and routing settings are still those of the routing."""
        return self._params == self._identities(param_groups) and self._inputs == _routing_inputs(
            param_groups
        )

    def params_among(self, tensors: Iterable[Tensor]) -> dict[str, Tensor]:
        """Return, by name, the parameters among `tensors`, all of which existed when the routing was made."""
        known = {id(p): p for p in tensors}
        numbers = [identity.number for group in self._params for identity in group]
        return {
            entry.name: known[number]
            for entry, number in zip(self.table, numbers, strict=True)
            if number in known
        }

    def converted(self, params: Iterable[Tensor]) -> set[Tensor]:
        """Return the parameters that have another dtype, shape or device than when the routing was made."""
        earlier = {identity.number: identity for group in self._params for identity in group}
        return {p for p in params if (found := self._identity(p)) != earlier.get(id(p), found)}

    def groups(self, param_groups: Sequence[dict[str, Any]]) -> list[Group]:
        """Return the groups as a step reads them."""
        groups = zip(param_groups, self.routes, strict=True)
        return [
            Group(g, group_settings(g), tuple(zip(g["params"], some, strict=True)))
            for g, some in groups
        ]

    def _identity(self, p: Tensor) -> _Identity:
        plain = spec_of(p) is None
        return _Identity(
            id(p), p.shape, p.dtype, p.device if plain and self._moves else None, plain
        )

    def _identities(self, param_groups: Sequence[dict[str, Any]]) -> list[list[_Identity]]:
        """Return the identity of each parameter.

        These are not references: strong ones would keep replaced parameters alive, and torch refuses to swap a tensor
        that has weak ones (`torch.utils.swap_tensors`). A new parameter may get the id of one that was freed. If it
        also agrees in all else, everything derived from these remains valid.
        """
        return [[self._identity(p) for p in group["params"]] for group in param_groups]


def log_parameters(groups: Iterable[Group], replicas: object = None) -> None:
    """Log, at level DEBUG, each parameter's route with its reason, and the ranks or device that hold its elements."""
    for group in groups:
        for p, entry in group.routed:
            spec = spec_of(p)
            if spec is not None:
                where = f"placements {tuple(map(str, spec.placements))} on {spec.mesh}"
            else:
                alone = replicas is None or is_local(entry.name, group.settings)
                where = f"on {p.device}" if alone else f"replicated over {replicas}"
            shape = "x".join(map(str, entry.shape)) or "scalar"
            log.debug(
                "%s: %s, because %s; shape %s, %s",
                entry.name,
                entry.placement,
                entry.reason,
                shape,
                where,
            )


class _Identity(NamedTuple):
    """What shows whether a parameter was replaced, or converted in place by `Module.to` or an assignment to `.data`."""

    number: int
    shape: torch.Size
    dtype: torch.dtype
    device: torch.device | None
    is_plain: bool  # no DTensor


def _routing_inputs(param_groups: Sequence[dict[str, Any]]) -> list[Any]:
    """Return the values that may change between steps and that determine routes or their state."""
    found = []
    for group in param_groups:
        settings = group_settings(group)
        trained = [p.requires_grad for p in group["params"]]
        found.append(
            (
                matrix_rules(settings),
                as_tuple(group["local_patterns"]),
                RoutingRules.of(settings),
                trained,
            )
        )
    return found
