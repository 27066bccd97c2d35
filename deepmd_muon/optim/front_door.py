"""The optimizer for any torch model, made in one call."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

from deepmd_muon.optim.config import RuleSettings, Scaling
from deepmd_muon.optim.other_configs import Advanced, MuonConfig
from deepmd_muon.setting import InvalidSettingError

if TYPE_CHECKING:
    from torch import Tensor, nn

    from deepmd_muon.optim.buildable import Replicas
    from deepmd_muon.optim.hybrid_muon import HybridMuon
    from deepmd_muon.optim.qk_clip.layers import QKClip

_DEFAULT_ADVANCED = Advanced()
_DEFAULTS = {field.name: field.default for field in dataclasses.fields(MuonConfig)}
# Names of the rate of AdamW's part elsewhere.
_OTHER_NAMES = {
    "adam_lr_ratio": "give adam_lr, which is adam_lr_ratio · lr",
    "adamw_lr": "give adam_lr",
}
# Rules of this package that a switch turns on; the argument `rules` takes their names, too.
_SWITCHES = {field.name for field in dataclasses.fields(RuleSettings) if field.default is False}


def muon_for(  # noqa: PLR0913  # the settings that people change, each by its name
    model: nn.Module,
    lr: float | Tensor = MuonConfig.own_lr,
    *,
    momentum: float = MuonConfig.momentum,
    momentum_warmup: int = 0,
    weight_decay: float = MuonConfig.weight_decay,
    scaling: Scaling = MuonConfig.scaling,
    adam_lr: float | None = None,
    adam_betas: tuple[float, float] = MuonConfig.adam_betas,
    adamw_patterns: Sequence[str] | None = None,
    muon_patterns: Sequence[str] = (),
    splits: Sequence[str] = (),
    rules: Sequence[str] = (),
    advanced: Advanced | None = None,
    replicas: Replicas | None = None,
    qk_clip: QKClip | None = None,
    **words: Any,
) -> HybridMuon:
    """Make the optimizer of a model: Muon for hidden matrices, AdamW for tables, Adam for vectors.

    It asks the modules of the model which parameter is what (doc/muon-config.md);
    ``print(optimizer.routing)`` shows the answer.

    Parameters
    ----------
    model
        The model, also after `fully_shard` or DDP.
    lr
        Learning rate of Muon; schedulers change it, and AdamW's with it.
    momentum
        Decay β of the momentum m ← β m + (1 − β) g.
    momentum_warmup
        Number of steps in which the momentum grows linearly from 0.85 to `momentum`.
    weight_decay
        Decoupled weight decay of matrices and tables: p ← p (1 − lr λ). Vectors have none.
    scaling
        Scale of Muon's update: 'rectangular' is sqrt(max(1, out/in)), 'spectral' is
        sqrt(out/in), 'match_rms' is 0.2·sqrt(max(rows, columns)) for the rates of AdamW,
        'none' is 1.
    adam_lr
        Learning rate of AdamW and Adam. None: chosen by the model's size.
    adam_betas
        Decays of their moments.
    adamw_patterns
        Shell patterns on full names of the matrices for AdamW. None: found by the modules.
    muon_patterns
        Shell patterns on full names of parameters that take Muon in any case.
    splits
        Fused weights that are several matrices, such as ``["*.qkv.weight: rows 3"]``.
    rules
        Names of rules that change Muon's step: 'normuon', 'cautious_decay', 'master_weights', and
        those of `register_rule`.
    advanced
        All other settings. None: their defaults.
    replicas
        Device mesh or process group whose ranks hold copies of the model (DDP) and share the step.
    qk_clip
        Attention layers whose logits stay below a threshold.
    **words
        Arguments of torch.optim.Muon, AdamW and other Muons, such as ``betas``; they are
        translated, or refused with what to write instead.

    Raises
    ------
    InvalidSettingError
        A ValueError: a setting out of its range, or an advanced one as an argument.
    """
    if advanced is None:
        advanced = _DEFAULT_ADVANCED
    if not isinstance(advanced, Advanced):
        raise TypeError(f"advanced must be an Advanced(...); found {type(advanced).__name__}")
    _refuse_moved_settings(words)
    rules = (rules,) if isinstance(rules, str) else tuple(rules)
    settings = {
        **vars(advanced),
        **{rule: True for rule in rules if rule in _SWITCHES},
        "momentum": momentum,
        "weight_decay": weight_decay,
        "scaling": scaling,
        "adam_betas": adam_betas,
        "adamw_patterns": adamw_patterns,
        "muon_patterns": muon_patterns,
        "splits": splits,
        "rules": tuple(rule for rule in rules if rule not in _SWITCHES),
    }
    if adam_lr is not None:
        number = float(lr)
        if not 0.0 < adam_lr < float("inf") or number <= 0.0:
            raise InvalidSettingError(
                f"muon_for: adam_lr and lr must be above 0; found {adam_lr!r} and {number:g}"
            )
        settings["adam_lr_ratio"] = adam_lr / number
    # A word may stand for any setting that has its default.
    changed = {key: value for key, value in settings.items() if value != _DEFAULTS[key]}
    try:
        config = MuonConfig(**changed, **words)
    except TypeError as error:  # of unknown words; it names the class
        raise TypeError(str(error).replace("MuonConfig.__init__()", "muon_for()")) from None
    optimizer = config.build(model, lr, replicas, qk_clip, momentum_warmup=momentum_warmup)
    return cast("HybridMuon", optimizer)


def _refuse_moved_settings(words: dict[str, Any]) -> None:
    """Raise InvalidSettingError for settings that are no arguments of `muon_for`."""
    problems = [
        f"{key}: write advanced=Advanced({key}={words[key]!r})"
        for key in words
        if key in vars(_DEFAULT_ADVANCED)
    ]
    problems += [f"{key}: {hint}" for key, hint in _OTHER_NAMES.items() if key in words]
    if problems:
        raise InvalidSettingError(f"muon_for: {'; '.join(problems)}", problems)
