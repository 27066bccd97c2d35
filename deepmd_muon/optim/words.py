"""Settings in the words of torch's optimizers and other Muons, translated to this package's. Does not import torch.

Sources of the words: `torch.optim.AdamW` and `torch.optim.Muon` (torch 2.13), K. Jordan's ``MuonWithAuxAdam``, the
Muon of Moonlight (arXiv:2502.16982), and dion (arXiv:2504.05295).
"""

from __future__ import annotations

import difflib
import functools
import inspect
import json
import math
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, TypeVar

from deepmd_muon.setting import InvalidSettingError, literal

T = TypeVar("T")
Translation = Callable[[Any], "dict[str, Any]"]

# Keys of HybridMuon's first version, each with its replacement.
RENAMED_SETTINGS = {
    "muon_2d_only": 'muon_mode: "2d" for true, "flat" for false',
    "min_2d_dim": "min_matrix_dim",
    "muon_min_2d_dim": "min_matrix_dim",
}

# Settings that earlier revisions of this package had, each with what to do instead.
_NOW_A_RULE = "it is a rule in examples/update_rules: import its file and give"
REMOVED_SETTINGS = {
    **dict.fromkeys(("soap_muon", "soap_beta"), f'{_NOW_A_RULE} rules ["soap_muon"]'),
    **dict.fromkeys(("norm_control", "norm_brake"), f'{_NOW_A_RULE} rules ["radial_brake"]'),
}

# Words that no single setting replaces, and what to write instead.
_HINTS = {
    "muon_params": "give all parameters at once and name those of AdamW in adamw_patterns, or use groups with use_muon",
    "adamw_params": "give all parameters at once and name these in adamw_patterns, or use a group with use_muon=False",
    "adamw_lr": "give adam_lr_ratio = adamw_lr / lr, or a group with its own lr",
    "adam_lr": "give adam_lr_ratio = adam_lr / lr, or a group with its own lr",
    **dict.fromkeys(
        ("adam_beta1", "adam_beta2"),
        "both decays are one setting: give adam_betas, such as [0.9, 0.95]",
    ),
    "distributed_mesh": "DTensors carry their mesh; for DDP give replicas=",
    "process_group": "DTensors carry their mesh; for DDP give replicas=",
    "newton_schulz_func": "give `schedule`, a name or a list of triples [a, b, c]",
    "use_triton": "give flash_muon",
    "backend": "give flash_muon, which switches the kernels on or off",
    "dampening": "the momentum is m ← β m + (1 − β) g; the polar factor does not depend on its scale",
    "adamw_wd": "weight_decay applies to both routes; a group may have its own",
    "rank_fraction": "low-rank updates of Dion do not exist here; Muon orthogonalizes the whole matrix",
    "no_weight_decay": "use a group with weight_decay=0.0",
}
# Words that a section of an input may contain by mistake; code has these arguments elsewhere.
_RATE = "the rate of every step is in the section learning_rate: write learning_rate/start_lr"
_KIND = 'the kind of optimizer is the key "type"'
_HINTS_OF_INPUTS = {
    **dict.fromkeys(("lr", "learning_rate", "muon_lr", "start_learning_rate"), _RATE),
    **dict.fromkeys(("opt_type", "optimizer", "optimizer_type", "name", "kind"), _KIND),
}
_JORDAN = (
    3.4445,
    -4.7750,
    2.0315,
)  # the coefficients of K. Jordan and the default of torch.optim.Muon
_JORDAN_STEPS = 5
# Similarity (difflib) from which an unknown key counts as a misspelled setting; 'weight_decay_mult' has 0.83.
_MISSPELLED = 0.87


def _one_of(table: Mapping[Any, dict[str, Any]]) -> Translation:
    def translate(value: Any) -> dict[str, Any]:
        if isinstance(value, (list, dict)) or value not in table:
            raise InvalidSettingError(
                f"must be one of {', '.join(map(literal, table))}; found {literal(value)}"
            )
        return table[value]

    return translate


def _only(allowed: bool, reason: str) -> Translation:
    """Accept a switch that has only one value here; the translation is empty."""

    def translate(value: Any) -> dict[str, Any]:
        if value is not allowed:
            raise InvalidSettingError(f"{reason}; leave it out (found {literal(value)})")
        return {}

    return translate


def _named(setting: str) -> Translation:
    return lambda value: {setting: value}


def settings_of_lr_adjust(value: Any) -> dict[str, Any]:
    """Return the two settings that DeePMD's switch `lr_adjust` combines.

    At or below 0, Muon's update is scaled by lr_adjust_coeff·sqrt(max(rows, columns)), and the
    Adam routes have the same learning rate. Above 0 it is scaled by sqrt(max(1, rows/columns)),
    and the Adam routes have the learning rate divided by `lr_adjust`.
    """
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or not math.isfinite(value):
        raise InvalidSettingError(f"must be a number; found {literal(value)}")
    if value > 0:
        return {"scaling": "rectangular", "adam_lr_ratio": 1.0 / value}
    return {"scaling": "match_rms", "adam_lr_ratio": 1.0}


def _foreach(value: Any) -> dict[str, Any]:
    """Accept torch's `foreach` where it asks for what happens anyway."""
    if value is False:
        raise InvalidSettingError("give workspace=1 to step one parameter at a time")
    return {}


_BY_RMS = {"scaling": "match_rms", "rms_coefficient": 0.2}
_BOTH_ROUTES = {True: {"muon_patterns": ["*"]}, False: {"adamw_patterns": ["*"]}}

_TRANSLATIONS: dict[str, Translation] = {
    # The first are torch's; the others are settings of HybridMuon or of Muon that the other one names differently.
    **dict.fromkeys(("betas", "adamw_betas", "adam_betas"), _named("adam_betas")),
    **dict.fromkeys(("rms_coefficient", "lr_adjust_coeff"), _named("rms_coefficient")),
    **dict.fromkeys(("eps", "epsilon", "adamw_eps"), _named("adam_eps")),
    "wd": _named("weight_decay"),
    "mu": _named("momentum"),
    "cautious_wd": _named("cautious_decay"),
    "fused": _one_of(
        {
            None: {},
            True: {"adam_implementation": "fused"},
            False: {"adam_implementation": "foreach"},
        },
    ),
    "foreach": _foreach,
    "lr_adjust": settings_of_lr_adjust,
    "deepmd_kit_arithmetic": _one_of({True: {"schedule": "deepmd-kit"}, False: {}}),
    "amsgrad": _only(False, "the Adam routes have no AMSGrad"),
    "decoupled_weight_decay": _only(True, "weight decay is always decoupled"),
    "adjust_lr_fn": _one_of(
        {
            None: {"scaling": "rectangular"},
            "original": {"scaling": "rectangular"},
            "match_rms_adamw": _BY_RMS,
        }
    ),
    "adjust_lr": _one_of(
        {None: {"scaling": "none"}, "spectral_norm": {"scaling": "spectral"}, "rms_norm": _BY_RMS}
    ),
    "use_muon": _one_of(_BOTH_ROUTES),
    "algorithm": _one_of({"muon": _BOTH_ROUTES[True], "adamw": _BOTH_ROUTES[False]}),
    "flatten": _one_of({True: {"conv_patterns": ["*"]}, False: {"muon_mode": "slice"}}),
}
_SCHEDULE = ("ns_steps", "ns_coefficients")
WORDS = frozenset((*_TRANSLATIONS, *_SCHEDULE))


def translated(given: Mapping[str, Any], known: Collection[str]) -> dict[str, Any]:
    """Return arguments or a parameter group with other optimizers' words replaced by settings of this package.

    `known` are the settings of a class; a word that is one of them stays.

    Raises
    ------
    InvalidSettingError
        Naming every word without a counterpart, with a value that has none, or given beside the setting it stands for.
    """
    words = {key: value for key, value in given.items() if key not in known}
    kept = {key: value for key, value in given.items() if key in known}
    problems = [f"{key} is now {new}" for key, new in RENAMED_SETTINGS.items() if key in words]
    hints = {**REMOVED_SETTINGS, **_HINTS}
    problems += [f"{key}: {hint}" for key, hint in hints.items() if key in words]
    found: dict[str, tuple[str, Any]] = {}
    for key, value in words.items():
        if key not in _TRANSLATIONS:
            if key not in _SCHEDULE:
                kept[key] = value
            continue
        try:
            new = _for_class(_TRANSLATIONS[key](value), known)
        except InvalidSettingError as error:
            problems.append(f"{key}: {error}")
            continue
        if key == "lr_adjust":  # explicit settings override either half
            new = {setting: half for setting, half in new.items() if setting not in given}
        found |= {setting: (key, value) for setting, value in new.items()}
    if any(key in words for key in _SCHEDULE):
        try:
            found["schedule"] = "ns_steps", _schedule(words)
        except InvalidSettingError as error:
            problems.append(str(error))
    problems += [
        f"{key} stands for {setting}, which is given, too"
        for setting, (key, _) in found.items()
        if setting in kept
    ]
    if problems:
        raise InvalidSettingError("; ".join(problems), problems)
    return {**kept, **{setting: value for setting, (_, value) in found.items()}}


def _for_class(new: Mapping[str, Any], known: Collection[str]) -> dict[str, Any]:
    """Rename settings as the class with the settings `known` names them."""
    values = dict(new)
    if "rms_coefficient" in values and "rms_coefficient" not in known:
        values["lr_adjust_coeff"] = values.pop("rms_coefficient")
    if "adam_betas" in values and "adam_betas" not in known:
        betas = values.pop("adam_betas")
        if not isinstance(betas, (list, tuple)) or len(betas) != 2:
            raise InvalidSettingError(f"must be a list of 2 numbers; found {betas!r}")
        values["adam_beta1"], values["adam_beta2"] = betas
    return values


def _schedule(words: Mapping[str, Any]) -> Any:
    """Return the schedule of `ns_steps` equal steps with `ns_coefficients`."""
    steps, coefficients = (
        words.get("ns_steps", _JORDAN_STEPS),
        words.get("ns_coefficients", _JORDAN),
    )
    if isinstance(steps, bool) or not isinstance(steps, int) or not 1 <= steps < 100:
        raise InvalidSettingError(f"ns_steps: must be a whole number from 1 to 99; found {steps!r}")
    if not isinstance(coefficients, (list, tuple)) or len(coefficients) != 3:
        raise InvalidSettingError(
            f"ns_coefficients: must be a list of 3 numbers; found {coefficients!r}"
        )
    if steps == _JORDAN_STEPS and tuple(coefficients) == _JORDAN:
        return "keller-jordan"
    return (tuple(coefficients),) * steps


def advice(key: str, given: Mapping[str, Any], known: Collection[str]) -> str | None:
    """Return what to write instead of another optimizer's word in an input, None for other keys.

    `given` is the section that contains it; `known` are the settings of that section.
    """
    if key in _HINTS_OF_INPUTS:
        return f"is not a setting of an optimizer here; {_HINTS_OF_INPUTS[key]}"
    if key in REMOVED_SETTINGS:
        return f"is no longer a setting; {REMOVED_SETTINGS[key]}"
    if key not in WORDS and key not in _HINTS:
        return None
    words = {
        word: given[word] for word in (_SCHEDULE if key in _SCHEDULE else (key,)) if word in given
    }
    try:
        new = {
            setting: value
            for setting, value in translated(words, known).items()
            if setting in known
        }
    except InvalidSettingError as error:
        return f"is another optimizer's word: {error.problems[0].removeprefix(f'{key}: ')}"
    written = ", ".join(
        f"{json.dumps(setting)}: {json.dumps(value, default=str)}" for setting, value in new.items()
    )
    return (
        f"is another optimizer's word; write {written}"
        if written
        else "is another optimizer's word; remove it"
    )


def nearest(key: str, known: Iterable[str]) -> str | None:
    """Return the setting that an unknown key probably misspells, or None."""
    near = difflib.get_close_matches(key, list(known), 1, cutoff=_MISSPELLED)
    return near[0] if near else None


def understand_words(cls: type[T]) -> type[T]:
    """Decorate a class that takes settings as keywords, so that it also takes other optimizers' words.

    Raises
    ------
    InvalidSettingError
        In the constructor: a word cannot be translated (`translated`), or a key was renamed.
    TypeError
        In the constructor: a keyword is neither a setting nor a word; the message names the nearest setting, or the
        method `build` for the `lr` of a configuration.
    """
    init = cls.__init__
    known = tuple(inspect.signature(init).parameters)[1:]

    @functools.wraps(init)
    def checked(self: T, *args: Any, **kwargs: Any) -> None:
        if not kwargs.keys() <= set(known):
            try:
                kwargs = translated(kwargs, known)
            except InvalidSettingError as error:
                raise InvalidSettingError(f"{cls.__name__}: {error}", error.problems) from None
            for key in kwargs.keys() - set(known):
                if key == "lr":  # HybridMuon has it, so this is a configuration
                    raise TypeError(
                        f"{cls.__name__} has no 'lr'; write {cls.__name__}().build(model, lr=...)"
                    )
                near = difflib.get_close_matches(key, (*known, *sorted(WORDS)), 1)
                hint = f"; did you mean {near[0]!r}?" if near else ""
                raise TypeError(
                    f"{cls.__name__}.__init__() got an unexpected keyword argument {key!r}{hint}"
                )
        init(self, *args, **kwargs)

    cls.advice = staticmethod(functools.partial(advice, known=known))  # type: ignore[attr-defined]  # for the check
    cls.__init__ = checked  # type: ignore[method-assign, assignment]  # same arguments as `init`
    return cls
