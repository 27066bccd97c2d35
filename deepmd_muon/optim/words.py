"""Settings in the words of torch's optimizers and other Muons, translated to this package's.

This module does not import torch.

Sources of the words: `torch.optim.AdamW` and `torch.optim.Muon` (torch 2.13), K. Jordan's
``MuonWithAuxAdam``, the Muon of Moonlight (arXiv:2502.16982), dion (arXiv:2504.05295), and
deepmd-kit's HybridMuon.
"""

from __future__ import annotations

import difflib
import functools
import inspect
import json
import math
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, NamedTuple, TypeVar

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
    "muon_params": (
        "give all parameters at once and name those of AdamW in adamw_patterns, or use groups with "
        "use_muon"
    ),
    "adamw_params": (
        "give all parameters at once and name these in adamw_patterns, or use a group with "
        "use_muon=False"
    ),
    "adamw_lr": "give adam_lr_ratio = adamw_lr / lr, or a group with its own lr",
    "adam_lr": "give adam_lr_ratio = adam_lr / lr, or a group with its own lr",
    "adam_beta1": "both decays are one setting: give adam_betas, such as [0.9, 0.95]",
    "adam_beta2": "both decays are one setting: give adam_betas, such as [0.9, 0.95]",
    "distributed_mesh": "DTensors carry their mesh; for DDP give replicas=",
    "process_group": "DTensors carry their mesh; for DDP give replicas=",
    "newton_schulz_func": "give `schedule`, a name or a list of triples [a, b, c]",
    "use_triton": "give flash_muon",
    "backend": "give flash_muon, which switches the kernels on or off",
    "dampening": (
        "the momentum is m ← β m + (1 − β) g; the polar factor does not depend on its scale"
    ),
    "adamw_wd": "weight_decay applies to both routes; a group may have its own",
    "rank_fraction": (
        "low-rank updates of Dion do not exist here; Muon orthogonalizes the whole matrix"
    ),
    "no_weight_decay": "use a group with weight_decay=0.0",
}
# Arguments of other optimizers' constructors that nothing here takes. A group may have such keys of
# its own.
_HINTS_OF_ARGUMENTS = {
    "warmup_step": "give sharded=ShardedSettings(slots=...), the number of buckets in flight",
    "chunk_size": "give sharded=ShardedSettings(bucket_bytes=...)",
    "debug": "set the logger 'deepmd_muon' to DEBUG, or print(optimizer.routing)",
    "clip_config": "give qk_clip=QKClip(...)",
    "use_distributed_muon": "leave it out: DTensors carry their mesh; for DDP give replicas=",
    "none_grad": "leave it out, or give sharded=ShardedSettings(free_gradients=True)",
    "max_grad_norm": "call clip_adam_grad_norm_(optimizer, ...) of deepmd_muon.optim before the step",
}
# Words that a section of an input may contain by mistake; code has these arguments elsewhere.
_RATE = "the rate of every step is in the section learning_rate: write learning_rate/start_lr"
_KIND = 'the kind of optimizer is the key "type"'
_HINTS_OF_INPUTS = {
    **dict.fromkeys(("lr", "learning_rate", "muon_lr", "start_learning_rate"), _RATE),
    **dict.fromkeys(("opt_type", "optimizer", "optimizer_type", "name", "kind"), _KIND),
}
# The coefficients of K. Jordan and the default of torch.optim.Muon.
_JORDAN = (3.4445, -4.7750, 2.0315)
_JORDAN_STEPS = 5
# Similarity (difflib) from which an unknown key counts as a misspelled setting; 'weight_decay_mult'
# has 0.83.
_MISSPELLED = 0.87


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


def _one_of(table: Mapping[Any, dict[str, Any]]) -> Translation:
    """Translate the values of a table; refuse others."""

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
    """Rename a setting."""
    return lambda value: {setting: value}


_BY_RMS = {"scaling": "match_rms", "rms_coefficient": 0.2}
_ALL_MUON = {"muon_patterns": ["*"]}
_ALL_ADAMW = {"adamw_patterns": ["*"]}
_TRANSLATIONS: dict[str, Translation] = {
    # The first are torch's; the others are settings of HybridMuon or of Muon that the other one
    # names differently.
    **dict.fromkeys(("betas", "adamw_betas", "adam_betas"), _named("adam_betas")),
    **dict.fromkeys(("rms_coefficient", "lr_adjust_coeff"), _named("rms_coefficient")),
    **dict.fromkeys(("eps", "epsilon", "adamw_eps"), _named("adam_eps")),
    "wd": _named("weight_decay"),
    "mu": _named("momentum"),
    "cautious_wd": _named("cautious_decay"),
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
    "use_muon": _one_of({True: _ALL_MUON, False: _ALL_ADAMW}),
    "algorithm": _one_of({"muon": _ALL_MUON, "adamw": _ALL_ADAMW}),
    "expert_keys": lambda keys: {"expert_patterns": [f"*{key}*" for key in keys or ()]},
    "flatten": _one_of({True: {"conv_patterns": ["*"]}, False: {"muon_mode": "slice"}}),
}
_SCHEDULE_WORDS = ("ns_steps", "ns_coefficients")
_IMPLEMENTATION_WORDS = ("fused", "foreach")
WORDS = frozenset((*_TRANSLATIONS, *_SCHEDULE_WORDS, *_IMPLEMENTATION_WORDS))


class _Meaning(NamedTuple):
    """The value of a setting, and the word that stands for it."""

    word: str
    value: Any


def translated(arguments: Mapping[str, Any], settings: Collection[str]) -> dict[str, Any]:
    """Return arguments or a parameter group with other optimizers' words replaced by settings.

    `settings` are those of a class; a word that is one of them stays.

    Raises
    ------
    InvalidSettingError
        Naming every word without a counterpart, with a value that has none, or given beside the
        setting it stands for.
    """
    words = {key: value for key, value in arguments.items() if key not in settings}
    result = {key: value for key, value in arguments.items() if key in settings}
    hints = {
        **{key: f"{key} is now {new}" for key, new in RENAMED_SETTINGS.items()},
        **{key: f"{key}: {hint}" for key, hint in {**REMOVED_SETTINGS, **_HINTS}.items()},
    }
    problems = [hint for key, hint in hints.items() if key in words]
    meanings: dict[str, _Meaning] = {}
    for word, value in words.items():
        if word in _TRANSLATIONS:
            for setting, meant in _translate(word, value, settings, problems).items():
                # Explicit settings override either half of DeePMD's switch.
                if word != "lr_adjust" or setting not in arguments:
                    meanings[setting] = _Meaning(word, meant)
        elif word not in WORDS:
            result[word] = value
    for pair, setting, meaning_of in (
        (_SCHEDULE_WORDS, "schedule", _schedule),
        (_IMPLEMENTATION_WORDS, "adam_implementation", _adam_implementation),
    ):
        try:
            value = meaning_of(words)
        except InvalidSettingError as error:
            problems.append(str(error))
            continue
        if value is not None:
            meanings[setting] = _Meaning(next(word for word in pair if word in words), value)
    problems += [
        f"{meaning.word} stands for {setting}, which is given, too"
        for setting, meaning in meanings.items()
        if setting in result
    ]
    if problems:
        raise InvalidSettingError("; ".join(problems), problems)
    return {**result, **{setting: meaning.value for setting, meaning in meanings.items()}}


def _translate(
    word: str, value: Any, settings: Collection[str], problems: list[str]
) -> dict[str, Any]:
    """Return what a word means, in the settings of a class; add a problem with its value."""
    try:
        return _for_class(_TRANSLATIONS[word](value), settings)
    except InvalidSettingError as error:
        problems.append(f"{word}: {error}")
        return {}


def _for_class(values: Mapping[str, Any], settings: Collection[str]) -> dict[str, Any]:
    """Rename settings as the class with these `settings` names them."""
    renamed = dict(values)
    if "rms_coefficient" in renamed and "rms_coefficient" not in settings:
        renamed["lr_adjust_coeff"] = renamed.pop("rms_coefficient")
    if "adam_betas" in renamed and "adam_betas" not in settings:
        betas = renamed.pop("adam_betas")
        if not isinstance(betas, (list, tuple)) or len(betas) != 2:
            raise InvalidSettingError(f"must be a list of 2 numbers; found {betas!r}")
        renamed["adam_beta1"], renamed["adam_beta2"] = betas
    return renamed


def _adam_implementation(words: Mapping[str, Any]) -> str | None:
    """Return what torch's `fused` and `foreach` select together; None if neither is set."""
    fused, foreach = (words.get(word) for word in _IMPLEMENTATION_WORDS)
    for word, value in zip(_IMPLEMENTATION_WORDS, (fused, foreach), strict=True):
        if value is not None and not isinstance(value, bool):
            raise InvalidSettingError(f"{word}: must be true, false or null; found {value!r}")
    if fused and foreach:
        raise InvalidSettingError("fused: only one of fused and foreach can be true")
    if fused:
        return "fused"
    if foreach is False:
        return "for-loop"
    return "foreach" if foreach or fused is False else None


def _schedule(words: Mapping[str, Any]) -> Any:
    """Return the schedule of `ns_steps` equal steps with `ns_coefficients`; None without them."""
    if not any(word in words for word in _SCHEDULE_WORDS):
        return None
    steps = words.get("ns_steps", _JORDAN_STEPS)
    coefficients = words.get("ns_coefficients", _JORDAN)
    if isinstance(steps, bool) or not isinstance(steps, int) or not 1 <= steps < 100:
        raise InvalidSettingError(f"ns_steps: must be a whole number from 1 to 99; found {steps!r}")
    if not isinstance(coefficients, (list, tuple)) or len(coefficients) != 3:
        raise InvalidSettingError(
            f"ns_coefficients: must be a list of 3 numbers; found {coefficients!r}"
        )
    if steps == _JORDAN_STEPS and tuple(coefficients) == _JORDAN:
        return "keller-jordan"
    return (tuple(coefficients),) * steps


def advice(key: str, section: Mapping[str, Any], settings: Collection[str]) -> str | None:
    """Return what to write instead of another optimizer's word in an input, None for other keys.

    `section` contains the key; `settings` are those of the section.
    """
    if key in _HINTS_OF_INPUTS:
        return f"is not a setting of an optimizer here; {_HINTS_OF_INPUTS[key]}"
    if key in _HINTS_OF_ARGUMENTS:
        return f"is another optimizer's word: {_HINTS_OF_ARGUMENTS[key]}"
    if key in REMOVED_SETTINGS:
        return f"is no longer a setting; {REMOVED_SETTINGS[key]}"
    if key not in WORDS and key not in _HINTS:
        return None
    pairs = (_SCHEDULE_WORDS, _IMPLEMENTATION_WORDS)
    together = next((pair for pair in pairs if key in pair), (key,))
    words = {word: section[word] for word in together if word in section}
    try:
        meant = translated(words, settings)
    except InvalidSettingError as error:
        return f"is another optimizer's word: {error.problems[0].removeprefix(f'{key}: ')}"
    written = ", ".join(
        f"{json.dumps(setting)}: {json.dumps(value, default=str)}"
        for setting, value in meant.items()
        if setting in settings
    )
    if not written:
        return "is another optimizer's word; remove it"
    return f"is another optimizer's word; write {written}"


def nearest(key: str, settings: Iterable[str]) -> str | None:
    """Return the setting that an unknown key probably misspells, or None."""
    near = difflib.get_close_matches(key, list(settings), 1, cutoff=_MISSPELLED)
    return near[0] if near else None


def understand_words(cls: type[T]) -> type[T]:
    """Decorate a class that takes settings as keywords: it also takes other optimizers' words.

    Raises
    ------
    InvalidSettingError
        In the constructor: a word cannot be translated (`translated`), or a key was renamed.
    TypeError
        In the constructor: keywords are neither settings nor words; the message names each, with the
        nearest setting, or the method `build` for the `lr` of a configuration.
    """
    init = cls.__init__
    settings = tuple(inspect.signature(init).parameters)[1:]

    @functools.wraps(init)
    def checked(self: T, *args: Any, **kwargs: Any) -> None:
        if not kwargs.keys() <= set(settings):
            unknown = _unexpected_keywords(cls, kwargs, settings)
            try:
                kwargs = translated(kwargs, settings)
            except InvalidSettingError as error:
                problems = [*error.problems, *unknown]
                text = f"{cls.__name__}: {'; '.join(problems)}"
                raise InvalidSettingError(text, problems) from None
            if unknown:
                raise TypeError(f"{cls.__name__}.__init__() got {'; '.join(unknown)}")
        init(self, *args, **kwargs)

    advise = staticmethod(functools.partial(advice, settings=settings))
    cls.advice = advise  # type: ignore[attr-defined]  # for the input check
    cls.__init__ = checked  # type: ignore[method-assign, assignment]  # same arguments as `init`
    return cls


def _unexpected_keywords(cls: type, keys: Iterable[str], settings: Collection[str]) -> list[str]:
    """Describe the keywords that are neither settings nor words."""
    answered = {*settings, *WORDS, *_HINTS, *RENAMED_SETTINGS, *REMOVED_SETTINGS}
    problems = []
    for key in keys:
        if key in answered:
            continue
        near = difflib.get_close_matches(key, (*settings, *sorted(WORDS)), 1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        if key == "lr":  # HybridMuon has it, so this is a configuration
            hint = f": write {cls.__name__}().build(model, lr=...)"
        elif key in _HINTS_OF_ARGUMENTS:
            hint = f": {_HINTS_OF_ARGUMENTS[key]}"
        problems.append(f"an unexpected keyword argument {key!r}{hint}")
    return problems
