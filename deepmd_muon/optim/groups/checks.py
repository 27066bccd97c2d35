"""Checks of parameter groups: errors for unusable parameters, warnings without effect."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

import torch
from torch import Tensor

from deepmd_muon.optim.config import DEFAULT_ADAMW_PATTERNS
from deepmd_muon.optim.dtensors import spec_of
from deepmd_muon.optim.errors import IdleSettingWarning, InvalidParameterError, warn_caller
from deepmd_muon.optim.groups.group_settings import PATTERNS, arguments_of, as_tuple, unfolded
from deepmd_muon.optim.groups.param_groups import Group
from deepmd_muon.optim.routing.routes import RouteEntry, canonical_name, unnamed
from deepmd_muon.optim.routing.views import FusedSplit, Shape, effective_shape
from deepmd_muon.optim.rules.master_weights import NARROW
from deepmd_muon.setting import idle_settings

_TRAINABLE = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
# A weight of four or more dimensions looks like a convolution kernel if it has square matrices of
# at most this size, and at least this many of them.
_LARGEST_KERNEL = 7
_MANY_MATRICES = 16


def check_parameters(groups: Sequence[dict[str, Any]]) -> None:
    """Raise InvalidParameterError for unusable or repeated parameters and for repeated names."""
    names_by_parameter: dict[Tensor, str] = {}
    given_names: dict[str, str] = {}  # names with wrappers' prefixes, by canonical name
    for number, group in enumerate(groups):
        params = group["params"]
        names = group.get("param_names") or [unnamed(number, i) for i in range(len(params))]
        if len(names) != len(params):
            raise InvalidParameterError(
                f"param_groups[{number}] has {len(params)} parameters and {len(names)} names; "
                "change params and param_names together"
            )
        for given_name, p in zip(names, params, strict=True):
            name = canonical_name(given_name)
            if problem := _problem_of(name, p):
                raise InvalidParameterError(problem)
            if p in names_by_parameter:
                raise InvalidParameterError(
                    f"{name!r} and {names_by_parameter[p]!r} are the same parameter; pass it once, "
                    "as model.named_parameters() does"
                )
            if name in given_names:
                former = given_names[name]
                prefixes = f" without wrappers' prefixes ({former!r}, {given_name!r})"
                raise InvalidParameterError(
                    f"two parameters are named {name!r}{'' if former == given_name else prefixes}; "
                    "names must be unique"
                )
            names_by_parameter[p] = name
            given_names[name] = given_name


def refuse_partitions(
    groups: Sequence[dict[str, Any]], former: Sequence[Sequence[RouteEntry]]
) -> None:
    """Raise InvalidParameterError if flat tensors have replaced the matrices of a group.

    DeepSpeed's ZeRO puts this rank's part of all parameters of a group, one-dimensional, in their
    place. `former` has the earlier routes of each group.
    """
    for number, (group, entries) in enumerate(zip(groups, former, strict=False)):
        params = group["params"]
        were_matrices = any(len(entry.shape) > 1 for entry in entries)
        if params and were_matrices and all(p.ndim == 1 for p in params):
            raise InvalidParameterError(
                f"the {len(entries)} parameters of param_groups[{number}] were replaced by flat "
                f"tensors of shapes {[tuple(p.shape) for p in params]}, as DeepSpeed's ZeRO does: "
                f"matrices cannot be recognized in them. {_WHOLE}"
            )


# What to use instead of flattened parameters.
_WHOLE = (
    "Shard the model with torch.distributed.fsdp.fully_shard (FSDP2) instead, or keep it whole "
    "with DistributedDataParallel and replicas="
)


def _problem_of(name: str, p: Tensor) -> str | None:
    """Return why no step can update a parameter; None if one can."""
    if hasattr(p, "ds_shape"):
        return (
            f"{name!r} is partitioned by DeepSpeed's ZeRO stage 3, of which this rank has "
            f"{p.numel()} elements: matrices cannot be recognized in it. {_WHOLE}"
        )
    if getattr(p, "_fsdp_flattened", False):
        return (
            f"{name!r} is a part of a parameter that FullyShardedDataParallel (FSDP1) has "
            f"flattened, of shape {tuple(p.shape)} on this rank: matrices cannot be recognized in "
            f"it. {_WHOLE}"
        )
    if p.is_complex():
        return f"HybridMuon needs real parameters; {name!r} is {p.dtype}"
    # The sharded plan checks DTensors.
    if p.requires_grad and p.dtype not in _TRAINABLE and spec_of(p) is None:
        return (
            f"HybridMuon cannot train {name!r}, which is {p.dtype}: freeze it "
            "(requires_grad_(False)), or keep it in 16 bits or more"
        )
    if p.is_neg():
        return (
            f"{name!r} is a view that negates another tensor's numbers, such as the imaginary part "
            "of a conjugate, and cannot be updated; make the parameter from a copy: "
            "nn.Parameter(x.resolve_neg())"
        )
    if any(stride == 0 and size > 1 for stride, size in zip(p.stride(), p.shape, strict=True)):
        return (
            f"{name!r} of shape {tuple(p.shape)} and strides {p.stride()} has elements that share "
            "memory and cannot be updated separately; make the parameter from a copy: "
            "nn.Parameter(x.clone())"
        )
    return None


class _Pattern(NamedTuple):
    """A pattern of a setting, as the user wrote it."""

    setting: str
    text: str

    def __str__(self) -> str:
        return f"{self.setting} {self.text!r}"


def warn_unmatched_patterns(groups: Sequence[Mapping[str, Any]], new: int = 0) -> None:
    """Warn of parameters without names, and of patterns that decide about no parameter.

    Groups before number `new`, and their patterns, were checked earlier.
    """
    if not all("param_names" in group for group in groups[new:]):
        warn_caller(
            "HybridMuon got parameters without names, so rules on names (biases, adam_, adamw_, "
            "patterns) do not apply; pass model.named_parameters()",
        )
    matches: dict[_Pattern, bool] = {}
    decides: dict[_Pattern, bool] = {}
    for number, group in enumerate(map(unfolded, groups)):
        if not group.get("param_names"):
            continue
        checked_earlier = number < new
        for pattern, effect in _effects_of_patterns(group).items():
            matches[pattern] = matches.get(pattern, checked_earlier) or effect.matches
            decides[pattern] = decides.get(pattern, checked_earlier) or effect.decides
    unmatched = [str(pattern) for pattern, hit in matches.items() if not hit]
    if unmatched:
        names = (name for group in groups for name in group.get("param_names", ()))
        example = canonical_name(next(names))
        warn_caller(
            f"no parameter matches {', '.join(unmatched)}; patterns must match a whole name, such "
            f"as {example!r}",
        )
    idle = [str(pattern) for pattern, hit in matches.items() if hit and not decides[pattern]]
    if idle:
        warn_caller(
            f"no effect: {', '.join(idle)}; other settings decide about the names that they match. "
            "The order is: muon_patterns (for two dimensions above 1), adam_patterns, "
            "adamw_patterns, expert_patterns, conv_patterns, splits",
        )


class _Effect(NamedTuple):
    """What a pattern does in a group."""

    matches: bool  # some name
    decides: bool  # about a name that it matches


def _effects_of_patterns(group: Mapping[str, Any]) -> dict[_Pattern, _Effect]:
    """Return the effect of each pattern in a group of parameters with names."""
    names = [canonical_name(name) for name in group["param_names"]]
    # A group may have another number of parameters than names until `check_parameters` sees it.
    shapes = {name: tuple(p.shape) for name, p in zip(names, group["params"], strict=False)}
    deep_names = [name for name, shape in shapes.items() if len(shape) > 2]
    names_open_to = _names_open_to(group, shapes)
    effects = {}
    for pattern in _given_patterns(group):
        setting, text = pattern
        shell_pattern = FusedSplit.parse(text).pattern if setting == "splits" else text
        if shell_pattern == "*":
            hits = set(names)
            decided = hits
        else:
            of_deep = setting in ("expert_patterns", "conv_patterns")
            hits = _names_matching(deep_names if of_deep else names, (shell_pattern,))
            decided = hits & names_open_to.get(setting, hits)
        effects[pattern] = _Effect(bool(hits), bool(decided))
    return effects


def _given_patterns(group: Mapping[str, Any]) -> Iterator[_Pattern]:
    """Yield the patterns of a group, but not the default patterns of `MuonConfig` as a whole."""
    for setting in PATTERNS:
        patterns = as_tuple(group[setting]) or ()
        has_defaults = setting == "adamw_patterns" and {*DEFAULT_ADAMW_PATTERNS} <= {*patterns}
        for text in patterns:
            if not (has_defaults and text in DEFAULT_ADAMW_PATTERNS):
                yield _Pattern(setting, text)


def _names_open_to(group: Mapping[str, Any], shapes: Mapping[str, Shape]) -> dict[str, set[str]]:
    """Return, by setting, the names that its patterns may decide, given the settings before it."""
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
    """Warn of settings that have no effect in any group, given the others of the group."""
    arguments = [arguments_of(group) for group in groups]
    reasons_by_group = [idle_settings(of_group) for of_group in arguments]
    reasons = {}
    for of_group, idle in zip(arguments, reasons_by_group, strict=True):
        for name, reason in idle.items():
            has_effect = any(
                getattr(arguments_of_group, name) == getattr(of_group, name)
                and name not in idle_in_group
                for arguments_of_group, idle_in_group in zip(
                    arguments, reasons_by_group, strict=True
                )
            )
            if not has_effect:
                reasons[name] = reason
    if reasons:
        text = "; ".join(f"{name} {reason}" for name, reason in reasons.items())
        warn_caller(IdleSettingWarning(text))


def warn_idle_master_weights(groups: Sequence[Mapping[str, Any]]) -> None:
    """Warn of `master_weights` if no parameter of the groups with them has 16 bits."""
    dtypes = {
        p.dtype for group in groups if unfolded(group)["master_weights"] for p in group["params"]
    }
    if dtypes and dtypes.isdisjoint(NARROW):
        warn_caller(
            "master_weights have no effect: they belong to parameters of 16 bits, and these are "
            + ", ".join(sorted(map(str, dtypes))),
        )


def warn_of_kernels(groups: Sequence[Group]) -> None:
    """Warn of parameters that look like convolution kernels and form many small matrices."""
    kernels = []
    for group in groups:
        if unfolded(group.values)["conv_patterns"] is not None:
            continue
        for _, entry in group.routed:
            view = entry.view
            if view is None or len(entry.shape) < 4 or view.batch < _MANY_MATRICES:
                continue
            if view.rows == view.columns <= _LARGEST_KERNEL:
                kernels.append((entry, view))
    if not kernels:
        return
    entry, view = kernels[0]
    like_it = f", and {len(kernels) - 1} more parameters like it" if len(kernels) > 1 else ""
    warn_caller(
        f"{entry.name!r} of shape {entry.shape} is seen as {view.batch} matrices of "
        f"{view.rows}x{view.columns}{like_it}. If it is the kernel of a convolution, build the "
        "optimizer from the model, HybridMuonConfig().build(model), or name it in conv_patterns; "
        "conv_patterns=[] keeps the small matrices",
    )
