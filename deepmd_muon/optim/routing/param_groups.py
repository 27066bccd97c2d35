"""Parameter groups: names for parameters given without, and a group's settings as the dataclass that checks them."""

from __future__ import annotations

import dataclasses
import functools
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from deepmd_muon.optim.config import (
    DEFAULT_ADAMW_PATTERNS,
    RENAMED_SETTINGS,
    HybridMuonConfig,
    NonFinite,
    RouteChange,
    Steps,
)
from deepmd_muon.optim.errors import InvalidParameterError, InvalidSettingError
from deepmd_muon.optim.polar.schedules import AnySchedule, coefficients_of
from deepmd_muon.optim.routing.rules import (
    RouteEntry,
    RouteTable,
    RoutingRules,
    canonical_name,
    choose_route,
    unnamed,
)
from deepmd_muon.optim.routing.views import FusedSplit
from deepmd_muon.optim.sharded_config import ShardedSettings
from deepmd_muon.setting import check_settings, setting


class Group(NamedTuple):
    """A parameter group as a step reads it.

    Attributes
    ----------
    values
        The group in `param_groups`; a step reads the learning rate and `maximize` from it, which may change at any
        time.
    settings
        Its settings, checked and frozen.
    routed
        Its parameters and their routes.
    """

    values: dict[str, Any]
    settings: HybridMuonConfig
    routed: tuple[tuple[Tensor, RouteEntry], ...]

    @property
    def lr(self) -> float | Tensor:
        """The learning rate: a number, read where that waits for nothing, or a 0-dim tensor."""
        lr: float | Tensor = self.values["lr"]
        if isinstance(lr, Tensor):
            return float(lr) if lr.device.type == "cpu" else lr.view(())
        return lr


Params = Iterable[Tensor] | Iterable[tuple[str, Tensor]] | Iterable[dict[str, Any]]

# Settings of the optimizer, not of a group; and those that a group holds in another form.
_OF_ALL_GROUPS = {"on_route_change", "on_nonfinite", "offload", "sharded"}
_OTHER_FORM = {"adam_beta1", "adam_beta2", "schedule"}
_FIELDS = [f for f in dataclasses.fields(HybridMuonConfig) if f.name not in _OF_ALL_GROUPS | _OTHER_FORM]
_LISTS = tuple(field.name for field in _FIELDS if isinstance(field.default, tuple))
_PLAIN_SETTINGS = tuple(field.name for field in _FIELDS if field.name not in _LISTS)
# What else a new group may hold: parameters, a label for loggers, and what torch's schedulers leave in a group that is
# given again.
_MORE_KEYS = (
    *("params", "param_names", "name", "initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum", "swa_lr"),
)
# Frames from a warning up to who calls the constructor: its decorator is one of them.
_CONSTRUCTOR = 4


def with_names(params: Params, named_parameters: Iterable[tuple[str, Tensor]] | None) -> list[Any]:
    """Turn plain parameters and their names, given apart, into the (name, parameter) pairs torch knows.

    A warning names the trainable parameters that `named_parameters` lists and `params` leaves out.
    """
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
            raise InvalidParameterError(f"named_parameters has no name for a parameter of shape {tuple(p.shape)}")
        used.add(p)
        return names[p], p

    named = [
        {**item, "params": [pair(p) for p in _as_list(item["params"])]} if isinstance(item, dict) else pair(item)
        for item in given
    ]
    omitted = [name for p, name in names.items() if p not in used and p.requires_grad]
    if omitted:
        warnings.warn(
            f"not optimized, though named_parameters lists them: {', '.join(omitted)}", stacklevel=_CONSTRUCTOR
        )
    return named


def _as_list(params: Any) -> list[Any]:
    return [params] if isinstance(params, Tensor) else list(params)


def check_parameters(groups: Sequence[dict[str, Any]]) -> None:
    """Refuse, by name, parameters that are complex, overlap themselves or are given twice, and names that are.

    Raises
    ------
    InvalidParameterError
        Naming the first such parameter.
    """
    seen: dict[Tensor, str] = {}
    taken: set[str] = set()
    for number, group in enumerate(groups):
        names = group.get("param_names") or [unnamed(number, i) for i in range(len(group["params"]))]
        for given, p in zip(names, group["params"], strict=True):
            name = canonical_name(given)
            if p.is_complex():
                raise InvalidParameterError(f"HybridMuon needs real parameters; {name!r} is {p.dtype}")
            if any(stride == 0 and size > 1 for stride, size in zip(p.stride(), p.shape, strict=True)):
                raise InvalidParameterError(
                    f"{name!r} of shape {tuple(p.shape)} and strides {p.stride()} has elements that share memory, "
                    "which no step can change one by one; make it of a copy: nn.Parameter(x.clone())"
                )
            if p in seen:
                raise InvalidParameterError(
                    f"{name!r} and {seen[p]!r} are the same parameter; give it once (model.named_parameters() does)"
                )
            if name in taken:
                raise InvalidParameterError(f"two parameters are called {name!r}; names must tell them apart")
            seen[p] = name
            taken.add(name)


def warn_unmatched_patterns(groups: Sequence[Mapping[str, Any]], new: int = 0) -> None:
    """Warn of parameters without names, and once for all patterns that match no name in any group that has them.

    Groups before number `new`, and the patterns in them, were looked at before.
    """
    if not all("param_names" in group for group in groups[new:]):
        warnings.warn(
            "HybridMuon got parameters without names, so its rules on names (biases, adam_, adamw_, patterns) are off; "
            "pass model.named_parameters()",
            stacklevel=3 if new else _CONSTRUCTOR,
        )
    used: dict[tuple[str, str], bool] = {}
    for number, group in enumerate(groups):
        names = [canonical_name(name) for name in group.get("param_names", ())]
        deep = [name for name, p in zip(names, group["params"], strict=False) if p.ndim > 2]
        for key in _LISTS:
            for text in _several(group[key]) if names else ():
                pattern = FusedSplit.parse(text).pattern if key == "splits" else text
                hit = any(fnmatchcase(name, pattern) for name in (deep if key == "expert_patterns" else names))
                used[key, text] = used.get((key, text), number < new) or hit
    idle = [f"{key} {text!r}" for (key, text), hit in used.items() if not hit and text not in DEFAULT_ADAMW_PATTERNS]
    if idle:
        example = next(canonical_name(name) for group in groups for name in group.get("param_names", ()))
        warnings.warn(
            f"no parameter matches {', '.join(idle)}; patterns must match a whole name, such as {example!r}",
            stacklevel=3 if new else _CONSTRUCTOR,
        )


@dataclasses.dataclass(frozen=True)
class _Arguments:
    """What `HybridMuon` takes beside the fields of `HybridMuonConfig`; made to be checked."""

    lr: float = setting(minimum=0.0, doc="Learning rate of the Muon route.")
    adam_betas: tuple[float, float] = setting(doc="Decays of Adam's moments; their range is that of the configuration.")
    maximize: bool = setting(doc="Climb.")
    foreach: bool | None = setting(doc="Many parameters at a time.")
    capturable: bool = setting(doc="Keep the learning rate on the device.")
    workspace: int = setting(1, minimum=1, doc="Elements worked on at a time.")
    offload: bool = setting(False, doc="Keep moments in host memory.")
    offload_bytes: int = setting(1, minimum=1, doc="Bytes of moments that travel together.")
    on_route_change: RouteChange = setting("error", choices=("error", "migrate", "reset"), doc="At a load.")
    on_nonfinite: NonFinite = setting("ignore", choices=("ignore", "skip", "error"), doc="At a step.")
    differentiable: bool = setting(
        False, choices=(False,), note="HybridMuon is not differentiable", doc="Whether gradients flow through steps."
    )
    sharded: ShardedSettings | None = setting(None, doc="How several processes share the step.")

    def __post_init__(self) -> None:
        check_settings(self)


def _unknown_keys(group: Mapping[str, Any], defaults: Collection[str]) -> list[str]:
    """Return, in words, the keys of a parameter group that no code would read."""
    known = {*defaults, *_MORE_KEYS, *RouteTable(()).manifest()}
    unknown = [key for key in group if key not in known]
    problems = [f"{key} is now {RENAMED_SETTINGS[key]}" for key in unknown if key in RENAMED_SETTINGS]
    if others := ", ".join(repr(key) for key in unknown if key not in RENAMED_SETTINGS):
        problems.append(
            f"{others}: unknown in a parameter group; known are {', '.join(sorted(('params', 'name', *defaults)))}"
        )
    return problems


def check_group(given: Mapping[str, Any], defaults: Collection[str] | None = None) -> None:
    """Check the constructor's arguments, or a parameter group, whose keys are then those of `defaults`.

    Raises
    ------
    InvalidSettingError
        Naming every setting that is unknown, of a wrong type or out of its range.
    """
    values = {field.name: given[field.name] for field in dataclasses.fields(_Arguments) if field.name in given}
    checked = dict(given)
    values["lr"], problems = _plain_lr(given["lr"])
    problems += [] if defaults is None else _unknown_keys(given, defaults)

    def check(make: Callable[[], Any]) -> None:
        try:
            make()
        except InvalidSettingError as error:
            problems.extend(error.problems)

    check(lambda: _Arguments(**values))
    check(lambda: frozen_schedule(given["schedule"]))
    # What has been reported must not keep the rest from being checked.
    stand_ins = {"adam_betas": (0.0, 0.0), "schedule": "8+2"}
    checked |= {key: x for key, x in stand_ins.items() if any(problem.startswith(key) for problem in problems)}
    check(lambda: group_settings(checked))
    if problems:
        raise InvalidSettingError(f"HybridMuon: {'; '.join(problems)}", problems)


def _plain_lr(lr: Any) -> tuple[Any, list[str]]:
    """Return a learning rate as the number to check, and what is wrong with it as a tensor."""
    if not isinstance(lr, Tensor):
        return lr, []
    if lr.numel() != 1 or not lr.is_floating_point():
        return 0.0, [f"lr: a tensor must hold one real number; found {lr.dtype} of shape {tuple(lr.shape)}"]
    # Reading a tensor on a GPU would wait for it.
    return float(lr) if lr.device.type == "cpu" else 0.0, []


def rules_of(group: Mapping[str, Any]) -> RoutingRules:
    """Return what of a group's settings decides routes."""
    return RoutingRules.of(group_settings(group))


def lr_tensor(group: Mapping[str, Any]) -> Tensor:
    """Return a group's learning rate as a tensor beside its parameters, which a captured step reads."""
    params: list[Tensor] = group["params"]
    wide = any(p.dtype == torch.float64 for p in params)
    return torch.tensor(group["lr"], dtype=torch.float64 if wide else torch.float32, device=params[0].device)


def group_defaults(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a group takes from the constructor's arguments, as the plain values that a state dict may hold."""
    check_group(given)
    schedule = frozen_schedule(given["schedule"])
    return {
        **{key: given[key] for key in ("lr", "maximize", "foreach", "capturable", *_PLAIN_SETTINGS)},
        **{key: list(_several(given[key])) for key in _LISTS},
        "adam_betas": tuple(given["adam_betas"]),
        "schedule": schedule if isinstance(schedule, str) else [list(step) for step in schedule],
    }


def _several(patterns: Any) -> Any:
    """Take a single pattern for a list of one, and leave what is neither to the check of its type."""
    if isinstance(patterns, str):
        return (patterns,)
    return tuple(patterns) if isinstance(patterns, Iterable) else patterns


@functools.lru_cache(maxsize=256, typed=True)
def _settings(**values: Any) -> HybridMuonConfig:
    return HybridMuonConfig(**values).explicit()


def group_settings(group: Mapping[str, Any]) -> HybridMuonConfig:
    """Return a parameter group's settings as the dataclass that checks them, made explicit."""
    beta1, beta2 = group["adam_betas"]
    values = {
        "adam_beta1": beta1,
        "adam_beta2": beta2,
        "schedule": frozen_schedule(group["schedule"]),
        **{key: _several(group[key]) for key in _LISTS},
        **{key: group[key] for key in _PLAIN_SETTINGS},
    }
    try:
        return _settings(**values)
    except TypeError:  # a value that cannot be hashed is of a wrong type; say of which
        return HybridMuonConfig(**values)


def routes_of(group: Mapping[str, Any], number: int) -> tuple[RouteEntry, ...]:
    """Return the routes of a group's parameters, from their names and shapes and the group's settings."""
    rules = rules_of(group)
    names = group.get("param_names")
    chosen = []
    for i, p in enumerate(group["params"]):
        entry = choose_route(names[i] if names else None, tuple(p.shape), rules, trainable=p.requires_grad)
        chosen.append(entry if names else dataclasses.replace(entry, name=unnamed(number, i)))
    return tuple(chosen)


# A group's settings as they stand there, to be compared; quicker than the dataclass.
raw_settings = itemgetter(*("adam_betas", "schedule", *_LISTS, *_PLAIN_SETTINGS))


def frozen_schedule(schedule: AnySchedule) -> str | Steps:
    """Return a schedule as settings hold it: a name, or a tuple of triples."""
    try:
        return schedule if isinstance(schedule, str) else coefficients_of(schedule)
    except TypeError:
        raise InvalidSettingError(f"schedule: must be a name or a list of triples; found {schedule!r}") from None
