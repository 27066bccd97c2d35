"""The arguments of `HybridMuon` and the settings of its parameter groups, with their checks."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from operator import itemgetter
from typing import Any, TypeVar

import torch
from torch import Tensor

from deepmd_muon.optim.config import (
    DEEPMD_KIT,
    SCHEDULED_NUMBERS,
    DeePMDSettings,
    FurtherSettings,
    HybridMuonConfig,
    MuonMode,
    Steps,
)
from deepmd_muon.optim.errors import InvalidSettingError
from deepmd_muon.optim.groups.momentum_warmup import STEPS
from deepmd_muon.optim.polar.schedules import AnySchedule, coefficients_of
from deepmd_muon.optim.routing.routes import current_routes
from deepmd_muon.optim.rules.registry import unknown_rules
from deepmd_muon.optim.words import (
    REMOVED_SETTINGS,
    WORDS,
    nearest,
    settings_of_lr_adjust,
    translated,
)
from deepmd_muon.setting import check_settings, setting, setting_like

Params = Iterable[Tensor] | Iterable[tuple[str, Tensor]] | Iterable[dict[str, Any]]


@dataclasses.dataclass(frozen=True)
class _PositionalArguments:
    """The arguments that deepmd-kit's constructor takes by position, too."""

    params: Params = setting(
        doc=(
            "``model.named_parameters()``, or groups with their own settings. Rules on names need "
            "names."
        )
    )
    lr: float | Tensor = setting(
        5e-4,
        minimum=0.0,
        doc="Learning rate of the Muon route; a 0-dim tensor is read on its device.",
    )
    momentum: float = setting_like(HybridMuonConfig, "momentum")
    weight_decay: float = setting_like(HybridMuonConfig, "weight_decay")
    adam_betas: tuple[float, float] = setting(
        (DeePMDSettings.adam_beta1, DeePMDSettings.adam_beta2),
        minimum=0.0,
        below=1.0,
        doc="Decays of both moments on the Adam and AdamW routes.",
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class _DeepmdKitArguments(_PositionalArguments):
    """The arguments of deepmd-kit's constructor."""

    lr_adjust_coeff: float = setting_like(HybridMuonConfig, "lr_adjust_coeff")
    muon_mode: MuonMode = setting_like(HybridMuonConfig, "muon_mode")
    named_parameters: Iterable[tuple[str, Tensor]] | None = setting(
        None,
        doc=(
            "(name, parameter) pairs that name unnamed `params`; a warning lists trainable ones "
            "missing from `params`."
        ),
    )
    enable_gram: bool = setting_like(HybridMuonConfig, "enable_gram")
    flash_muon: bool = setting_like(HybridMuonConfig, "flash_muon")
    magma_muon: bool = setting_like(HybridMuonConfig, "magma_muon")

    def __post_init__(self) -> None:
        check_settings(self)


@dataclasses.dataclass(frozen=True, kw_only=True)
class GroupArguments(FurtherSettings, _DeepmdKitArguments):
    """The arguments of `HybridMuon` that a group may set, and those that name its parameters.

    The fields of the last base come first.
    """

    # Code may give schedules in more forms than an input.
    schedule: AnySchedule = setting_like(  # type: ignore[assignment]  # of the base
        HybridMuonConfig, "schedule"
    )
    large_schedule: AnySchedule | None = setting_like(  # type: ignore[assignment]  # of the base
        HybridMuonConfig, "large_schedule"
    )
    capturable: bool = setting(
        False,
        doc=(
            "Keep the learning rate on the parameters' device, so that a step captured in a CUDA "
            "graph reads it there."
        ),
    )
    maximize: bool = setting(False, doc="Maximize the objective instead of minimizing it.")
    momentum_warmup: int = setting(
        0,
        minimum=0,
        doc=(
            "Number of steps in which the momentum grows linearly from 0.85 to `momentum`; steps "
            "can be captured after them."
        ),
    )


Checked = TypeVar("Checked", bound=GroupArguments)

# Settings that apply to all groups.
OF_ALL_GROUPS = {"on_route_change", "on_nonfinite", "offload", "sharded"}
# Settings that a group stores in another form: both decays as `adam_betas`, schedules as lists.
_SCHEDULES = ("schedule", "large_schedule")
_OTHER_FORM = {"adam_beta1", "adam_beta2", *_SCHEDULES}
_FIELDS = [
    field
    for field in dataclasses.fields(HybridMuonConfig)
    if field.name not in OF_ALL_GROUPS | _OTHER_FORM
]
LISTS = tuple(
    field.name
    for field in _FIELDS
    if isinstance(field.default, tuple) or field.name == "conv_patterns"
)
PATTERNS = tuple(key for key in LISTS if key != "rules")
_PLAIN_SETTINGS = tuple(field.name for field in _FIELDS if field.name not in LISTS)
# Keys that torch's schedulers, and the warm-up of the momentum, add to groups.
SCHEDULER_KEYS = (
    *("initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum", "swa_lr"),
    STEPS,
)
# `SCHEDULED_NUMBERS` as groups store them.
SCHEDULED_SETTINGS = (
    "adam_betas",
    *(key for key in SCHEDULED_NUMBERS if key not in ("adam_beta1", "adam_beta2")),
)
# In `constructed` of groups that `build` makes: names of settings that it has chosen for a model,
# and entries of `adam_patterns` and `splits`.
CHOSEN = "chosen_by_build"
# In `constructed` of folded groups: the settings that are no keys; see `ParamGroup`.
FOLDED = "settings"
# Settings that are keys of every group: a step reads them, or a scheduler changes them.
_KEYS_OF_GROUPS = ("lr", "maximize", "capturable", "momentum_warmup", *SCHEDULED_SETTINGS)
# Other keys that a new group may have: parameters, a label for loggers, keys of schedulers, and
# `constructed` in a copied group.
_MORE_KEYS = ("params", "param_names", "name", *SCHEDULER_KEYS, "constructed")
_KNOWN_KEYS = {
    *(field.name for field in dataclasses.fields(GroupArguments)),
    *_MORE_KEYS,
    "routes",
}
# The numbers of a group that a scheduler may change; comparing them is faster than comparing
# dataclasses.
raw_numbers = itemgetter(*SCHEDULED_SETTINGS)


class ParamGroup(dict[str, Any]):
    """A parameter group of few keys; other settings are read and written as if they were keys.

    Its key `constructed` also holds the settings that differ from the defaults and that no scheduler
    changes. Reading a list makes it a key, so that it may be changed in place. The next step folds
    new keys.
    """

    def __missing__(self, key: str) -> Any:
        value = unfolded(self)[key]
        if isinstance(value, list):
            self[key] = value
        return value

    def get(self, key: str, default: Any = None) -> Any:
        """Return the value of a key or setting, or `default` if there is none."""
        if key in self:
            return self[key]
        return unfolded(self).get(key, default)

    def setdefault(self, key: str, default: Any = None) -> Any:
        """Return the value of a key or setting; if there is none, make a key with `default`."""
        try:
            return self[key]
        except KeyError:
            return super().setdefault(key, default)


def unfolded(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return a group, present or saved, with each setting as a key.

    Groups of earlier versions and of other optimizers come back as they are.
    """
    constructed = constructed_of(group)
    settings = constructed.pop(FOLDED, None)
    if settings is None:
        return dict(group)
    text = json.dumps(constructed)
    return {**_foldable_defaults(), **settings, **group, "constructed": text}


def fold(group: dict[str, Any]) -> None:
    """Move the settings of a checked group from its keys, but not those that a scheduler changes."""
    defaults = _foldable_defaults()
    constructed = constructed_of(group)
    if FOLDED in constructed and defaults.keys().isdisjoint(group):
        return
    settings = unfolded(group)
    # NumPy's numbers are numbers, too.
    as_text = json.dumps({key: settings[key] for key in defaults}, default=lambda x: x.item())
    differing = {key: x for key, x in json.loads(as_text).items() if x != defaults[key]}
    for key in defaults:
        group.pop(key, None)
    group["constructed"] = json.dumps({**constructed, FOLDED: differing})


def change(group: dict[str, Any], values: Mapping[str, Any]) -> None:
    """Give a group other values; its routing folds it."""
    group.update({**unfolded(group), **values})


@functools.cache
def _foldable_defaults() -> Mapping[str, Any]:
    defaults = group_defaults(GroupArguments(params=()))
    return {key: x for key, x in defaults.items() if key not in _KEYS_OF_GROUPS}


def raw_structure(group: Mapping[str, Any]) -> tuple[int, str]:
    """Return values that differ after a change of settings that no scheduler changes."""
    return len(group), group["constructed"]


def checked_arguments(
    kind: type[Checked], values: Mapping[str, Any], problems: Sequence[str] = ()
) -> Checked:
    """Return arguments of HybridMuon as a dataclass, with lists as tuples.

    Raises InvalidSettingError with `problems`, and with every setting of a wrong type or out of its
    range.
    """
    values = {**values, **{key: as_tuple(values[key]) for key in LISTS}}
    problems = [*_problems_of_lr(values["lr"]), *problems]
    if "sharded" in values and values["sharded"] is None:
        del values["sharded"]
    for key in _SCHEDULES:
        values[key] = _checked_schedule(values[key], key, problems)
    if isinstance(values["rules"], tuple):
        problems += unknown_rules(values["rules"])
    try:
        arguments = kind(**values)
    except InvalidSettingError as error:
        problems += error.problems
    if problems:
        raise InvalidSettingError(f"HybridMuon: {'; '.join(problems)}", problems)
    return arguments


def _checked_schedule(schedule: Any, key: str, problems: list[str]) -> str | Steps | None:
    """Return a schedule as settings hold it; add its problems, and return a valid one instead."""
    try:
        return frozen_schedule(schedule, key)
    except InvalidSettingError as error:
        problems += error.problems
        return HybridMuonConfig.schedule


def arguments_of(group: Mapping[str, Any], problems: Sequence[str] = ()) -> GroupArguments:
    """Return the settings of a parameter group as arguments of HybridMuon.

    Raises as `checked_arguments`.
    """
    names = (field.name for field in dataclasses.fields(GroupArguments))
    settings = unfolded(group)
    values = {name: settings[name] for name in names if name in settings}
    return checked_arguments(GroupArguments, values, problems)


def group_defaults(arguments: GroupArguments) -> dict[str, Any]:
    """Return the defaults of groups as plain values that a state dict may hold."""
    values = vars(arguments)
    of_groups = ("lr", "maximize", "capturable", "momentum_warmup", *_PLAIN_SETTINGS)
    defaults = {key: values[key] for key in of_groups}
    for key in LISTS:
        defaults[key] = None if values[key] is None else list(values[key])
    defaults["adam_betas"] = tuple(arguments.adam_betas)
    for key in _SCHEDULES:
        schedule = values[key]
        is_steps = isinstance(schedule, tuple)
        defaults[key] = [list(step) for step in schedule] if is_steps else schedule
    return defaults


def settings_shown(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a person wants to see of a group: its rate, and settings that are not the defaults.

    Lists of more than two patterns are counted.
    """
    group = unfolded(group)
    shown: dict[str, Any] = {"lr": float(group["lr"])}
    for field in dataclasses.fields(GroupArguments):
        value = group.get(field.name, field.default)
        default = field.default
        if field.name in ("params", "lr") or as_tuple(value) == as_tuple(default):
            continue
        is_idle = field.name == "lr_adjust_coeff" and group["scaling"] != "match_rms"
        if is_idle or (field.name in LISTS and not value):
            continue
        is_long = field.name in LISTS and len(value or ()) > 2
        shown[field.name] = f"({len(value)} entries)" if is_long else value
    return shown


def words_of_group(group: Any, defaults: Mapping[str, Any]) -> Any:
    """Return a new parameter group with other optimizers' words translated.

    Anything but a dict is returned as it is; torch raises an error for it.

    Raises
    ------
    InvalidSettingError
        Naming every word that cannot be translated, and every setting that `check_group` refuses.
    """
    if not isinstance(group, dict):
        return group
    group = ParamGroup(unfolded(group))  # a copied group may be folded
    try:
        new = translated(group, {*defaults, *_MORE_KEYS})
    except InvalidSettingError as error:
        problems = list(error.problems)
        try:
            settings = {key: group[key] for key in group.keys() & defaults.keys()}
            check_group({"params": (), **defaults, **settings}, defaults)
        except InvalidSettingError as invalid:
            problems += invalid.problems
        raise InvalidSettingError(f"HybridMuon: {'; '.join(problems)}", problems) from None
    if new.get("differentiable") is False:  # a key of torch's groups
        del new["differentiable"]
    return ParamGroup(new)


def complete_group(group: dict[str, Any], defaults: Collection[str]) -> None:
    """Check a new group, as `check_group` does, and add the optimizer's own keys.

    `constructed` holds its learning rate, scheduled settings and choices of `build` as text, which
    every kind of state dict preserves. At a load it distinguishes values that a scheduler has
    changed from values that were constructed differently. With `capturable`, a captured step reads
    the learning rate from a tensor on the parameters' device.
    """
    check_group(group, defaults)
    group["muon_mode"] = group["muon_mode"].lower()
    lr = group["lr"]
    params = group["params"]
    # Reading a tensor on a GPU would wait for it.
    is_readable = not isinstance(lr, Tensor) or lr.device.type == "cpu"
    constructed = {key: group[key] for key in SCHEDULED_SETTINGS}
    constructed |= {key: value for key, value in constructed_of(group).items() if key == CHOSEN}
    constructed["lr"] = float(lr) if is_readable else None
    # NumPy's numbers are numbers, too.
    group["constructed"] = json.dumps(constructed, default=float)
    if group["capturable"] and not isinstance(lr, Tensor) and params:
        has_float64 = any(p.dtype == torch.float64 for p in params)
        dtype = torch.float64 if has_float64 else torch.float32
        group["lr"] = torch.tensor(lr, dtype=dtype, device=params[0].device)


def constructed_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values with which a group was constructed; none for a group that lacks them."""
    if "constructed" not in group:
        return {}
    constructed: dict[str, Any] = json.loads(group["constructed"])
    return constructed


def check_group(group: Mapping[str, Any], defaults: Collection[str]) -> None:
    """Check a parameter group, which should have the keys of `defaults`.

    A misspelled setting is a problem; other unknown keys are the user's own. Raises as
    `checked_arguments`.
    """
    settings = ("params", *defaults)
    problems = []
    for key in sorted(own_keys(group)):
        near = nearest(str(key), settings)
        if near:
            problems.append(f"{key!r}: unknown in a parameter group; did you mean {near!r}?")
    problems += [
        f"{key}: holds for all groups; give it to HybridMuon"
        for key in sorted(OF_ALL_GROUPS & group.keys())
    ]
    arguments_of(group, problems)


def own_keys(group: Mapping[str, Any]) -> set[str]:
    """Return the keys of a group that are neither settings, nor words, nor the optimizer's."""
    return group.keys() - _KNOWN_KEYS - WORDS


def _problems_of_lr(lr: Any) -> list[str]:
    """Return the problems of a learning rate that is a tensor."""
    if not isinstance(lr, Tensor):
        return []
    if lr.numel() != 1 or not lr.is_floating_point():
        return [
            f"lr: a tensor must hold one real number; found {lr.dtype} of shape {tuple(lr.shape)}"
        ]
    # Reading a tensor on a GPU would wait for it.
    if lr.device.type == "cpu" and not 0 <= float(lr) < math.inf:
        return [f"lr: must be a number >= 0; found {float(lr):g}"]
    return []


def as_tuple(patterns: Any) -> Any:
    """Return patterns as a tuple.

    A single one becomes a tuple of one. The type check reports other types.
    """
    if isinstance(patterns, str):
        return (patterns,)
    return tuple(patterns) if isinstance(patterns, Iterable) else patterns


def differs(value: Any, other: Any) -> bool:
    """Return whether two values of a setting differ; a list equals a tuple of the same entries."""
    value = list(value) if isinstance(value, tuple) else value
    other = list(other) if isinstance(other, tuple) else other
    return bool(value != other)


def group_settings(group: Mapping[str, Any]) -> HybridMuonConfig:
    """Return a parameter group's settings, checked and explicit; equal settings are one object."""
    group = unfolded(group)
    values = {
        **_betas(group),
        **{key: frozen_schedule(group[key], key) for key in _SCHEDULES},
        **{key: as_tuple(group[key]) for key in LISTS},
        **{key: group[key] for key in _PLAIN_SETTINGS},
    }
    try:
        return _settings(**values)
    except TypeError:  # an unhashable value has the wrong type; the check names the setting
        return HybridMuonConfig(**values)


def with_numbers_of(group: Mapping[str, Any], settings: HybridMuonConfig) -> HybridMuonConfig:
    """Return settings with the numbers of a group that a scheduler may have changed, checked."""
    numbers = _betas(group)
    numbers |= {key: group[key] for key in SCHEDULED_SETTINGS if key != "adam_betas"}
    changed = settings.with_numbers(numbers)
    check_settings(changed, only=SCHEDULED_NUMBERS)
    return changed


def _betas(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return both decays of Adam's moments."""
    betas = group["adam_betas"]
    if not isinstance(betas, (list, tuple)) or len(betas) != 2:
        raise InvalidSettingError(f"adam_betas: must be a list of 2 numbers; found {betas!r}")
    return {"adam_beta1": betas[0], "adam_beta2": betas[1]}


@functools.lru_cache(maxsize=256, typed=True)
def _settings(**values: Any) -> HybridMuonConfig:
    return HybridMuonConfig(**values).explicit()


def frozen_schedule(schedule: AnySchedule | None, key: str) -> str | Steps | None:
    """Return a schedule as settings hold it: a name, a tuple of triples, or None.

    `key` names the setting in errors.
    """
    if schedule is None or isinstance(schedule, str):
        return schedule
    try:
        return coefficients_of(schedule)
    except TypeError:
        raise InvalidSettingError(
            f"{key}: must be a name or a list of triples; found {schedule!r}"
        ) from None


def current_spelling(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return a saved group, of deepmd-kit or of an earlier revision, with today's settings."""
    current = unfolded(current_routes(group))
    constructed = constructed_of(current)
    if CHOSEN in current:
        constructed[CHOSEN] = current.pop(CHOSEN)
    if "lr_adjust" in current:
        current = _without_lr_adjust(current)
        if constructed:
            constructed = _without_lr_adjust(constructed)
    if constructed:
        current["constructed"] = json.dumps(constructed)
    if current.get("deepmd_kit_arithmetic"):
        current["schedule"] = DEEPMD_KIT
    for key in ("deepmd_kit_arithmetic", "foreach", *REMOVED_SETTINGS):
        current.pop(key, None)
    return current


def _without_lr_adjust(values: Mapping[str, Any]) -> dict[str, Any]:
    """Replace DeePMD's switch by the two settings that it combines, unless they have values."""
    explicit = settings_of_lr_adjust(values.get("lr_adjust", 0.0))
    for key, value in values.items():
        # In earlier revisions, null meant that a setting follows the switch.
        follows = key in explicit and value is None
        if key != "lr_adjust" and not follows:
            explicit[key] = value
    return explicit
