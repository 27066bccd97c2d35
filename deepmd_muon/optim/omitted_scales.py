"""Values of HybridMuon's scales that an input omits, by run length, start_lr and descriptor length.

Torch-free.

deepmd-kit's 0.18 suits language models. The measurements behind the numbers are in
doc/learning-rate.md.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Mapping
from typing import Any

from deepmd_muon.optim.buildable import Buildable
from deepmd_muon.optim.config import HybridMuonConfig

# `lr_adjust_coeff` of short and of long runs. Times `_ADAM_RATE`, it bounds start_lr ·
# lr_adjust_coeff, the root mean square of a step of matrix entries. After 3000 steps the first is
# within 9 % of the best on five data sets. After 10,000 steps it doubles the error of molecules;
# the second does not, and costs 7 % on water. Between, the coefficient is a power of the length.
_MUON_COEFFICIENT = 8.64
_MUON_COEFFICIENT_OF_LONG_RUNS = 4.32
_SHORT_RUN = 3_000  # steps
_LONG_RUN = 10_000
# `adam_lr_ratio` of a short run, which sinks to 1 in inverse proportion to the length: 3 after
# 10,000 steps, 1 after 30,000. The Adam route starts at ratio · `_ADAM_RATE` at most. 10 halves the
# final error of DPA-3 in short runs; it makes long runs on molecules worse.
_ADAM_RATE = 1e-3
_ADAM_RATIO = 10.0
# Length of descriptors (root mean square over atoms, initial weights) from which a scale falls as
# 1/length. A step changes the output of the fitting net's first layer by about learning rate ×
# length of its input. For atoms with few and near neighbours, its tanh then saturates in a few
# steps, and all forces vanish. Lengths on water and alloys are 1 to 7, on small molecules 60 to 90
# (DPA-1) and 14 to 18 (DPA-3).
_LONG_FOR_MUON = 8.0
_LONG_FOR_ADAM = 16.0
# The section of deepmd-kit 3.2.0 with all its defaults, but lr_adjust, which is translated.
_KEYS_OF_DEEPMD_KIT = {
    "momentum",
    "adam_beta1",
    "adam_beta2",
    "weight_decay",
    "lr_adjust_coeff",
    "muon_mode",
    "enable_gram",
    "flash_muon",
    "magma_muon",
}
_FEW_TIMES = 4.0  # a coefficient so many times smaller than ours deserves a warning


@dataclasses.dataclass(frozen=True)
class SavedScales:
    """Scales and first learning rate of the run that wrote a checkpoint."""

    values: Mapping[str, float]
    start_lr: float
    source: str  # the checkpoint


@dataclasses.dataclass(frozen=True)
class OmittedScales:
    """Scales of HybridMuon that an input omits, and the values chosen for them."""

    values: Mapping[str, float]  # `lr_adjust_coeff`, and `adam_lr_ratio` if the input omits both
    start_lr: float
    notice: str  # the values and the reason, in one line
    kept: bool = False  # whether the values are those of the checkpoint of a continued run
    saved: SavedScales | None = None  # of a continued run whose start_lr rises

    def kept_from(
        self, group: Mapping[str, Any], start_lr: float | None, source: str
    ) -> OmittedScales:
        """Return the scales of a run that continues the checkpoint `source` with this group.

        The group is in today's spelling. `start_lr` is that of the checkpoint, None if it is not
        known. The scales stay as they are unless it is lower than that of this run. Then they fall
        towards those of a fresh run, but the rates of the checkpoint are kept.
        """
        values = {name: group[name] for name in self.values}
        if start_lr is not None and start_lr < self.start_lr:
            saved = SavedScales(values, start_lr, source)
            return dataclasses.replace(self, saved=saved)._limited(saved)
        return OmittedScales(values, self.start_lr, _unchanged(values, source), kept=True)

    @property
    def fallen(self) -> bool:
        """Whether a continued run takes other scales than its checkpoint."""
        return self.saved is not None and self.values != self.saved.values

    def _limited(self, saved: SavedScales) -> OmittedScales:
        """Return scales of at most the saved ones, and high enough to keep the saved rates."""
        rate_ratio = saved.start_lr / self.start_lr
        values = {}
        for name, upper in saved.values.items():
            lower = upper * rate_ratio
            if name == "adam_lr_ratio":
                lower = max(1.0, lower)
            values[name] = min(upper, max(_rounded(lower), self.values[name]))
        notice = _unchanged(values, saved.source)
        if values != saved.values:
            notice = (
                f"optimizer/lr_adjust_coeff is not given and takes {_written(values)} instead of "
                f"{_written(saved.values)} in {saved.source}: start_lr rises from "
                f"{saved.start_lr:g} to {self.start_lr:g}; give lr_adjust_coeff and adam_lr_ratio "
                "to choose other rates"
            )
        return dataclasses.replace(self, values=values, notice=notice)

    def for_descriptors(self, length: float) -> OmittedScales:
        """Return lower scales if descriptors of this `length` are long and no scales are kept."""
        if self.kept or not 0.0 < length < math.inf:
            return self
        coefficient = _MUON_COEFFICIENT * _ADAM_RATE * _LONG_FOR_MUON / length / self.start_lr
        ratio = _ADAM_RATIO * _ADAM_RATE * _LONG_FOR_ADAM / length / self.start_lr
        bounds = {"lr_adjust_coeff": coefficient, "adam_lr_ratio": max(1.0, ratio)}
        values = {name: min(value, _rounded(bounds[name])) for name, value in self.values.items()}
        if values == self.values:
            return self
        notice = (
            f"optimizer/lr_adjust_coeff is not given and takes {_written(values)}: descriptors are "
            f"{length:.3g} long, for which {_written(self.values)} would be too high "
            "(doc/learning-rate.md)"
        )
        lower = dataclasses.replace(self, values=values, notice=notice)
        return lower if self.saved is None else lower._limited(self.saved)


def omitted_scales(
    config: Buildable, input_keys: Collection[str], start_lr: float, numb_steps: int | None
) -> OmittedScales | None:
    """Choose the scales that an input omits.

    None if it omits none, or if deepmd-kit's default applies.

    Parameters
    ----------
    config
        Settings of the optimizer. Other classes than `HybridMuonConfig` have no such scales.
    input_keys
        Keys in the section `optimizer` of the input, in today's spelling.
    start_lr, numb_steps
        First learning rate and length of the run; a length in epochs (None) counts as long.
    """
    if not isinstance(config, HybridMuonConfig) or "lr_adjust_coeff" in input_keys:
        return None
    default = config.lr_adjust_coeff  # deepmd-kit's
    coefficient = _coefficient(start_lr, numb_steps)
    if config.scaling != "match_rms" or coefficient == default:
        return None
    values = {"lr_adjust_coeff": coefficient}
    if "adam_lr_ratio" not in input_keys:
        ratio = _adam_ratio(numb_steps)
        values["adam_lr_ratio"] = max(1.0, _at_rate(ratio, start_lr))
    length = "a long run" if numb_steps is None else f"{numb_steps} steps"
    notice = (
        f"optimizer/lr_adjust_coeff is not given and takes {_written(values)}, which suits force "
        f"fields at start_lr {start_lr:g} in {length}; deepmd-kit takes {default:g} "
        "(doc/learning-rate.md)"
    )
    return OmittedScales(values, start_lr, notice)


def deepmd_kits_default_scale(
    config: Buildable, input_keys: Collection[str], start_lr: float, numb_steps: int | None
) -> str | None:
    """Return why Muon's steps are small if deepmd-kit wrote the input (its out.json), else None.

    deepmd-kit writes out all its defaults, `lr_adjust_coeff` among them. Arguments as in
    `omitted_scales`.
    """
    if (
        not isinstance(config, HybridMuonConfig)
        or config.scaling != "match_rms"
        or config.lr_adjust_coeff != HybridMuonConfig().lr_adjust_coeff
        or set(input_keys) - {"type"} != _KEYS_OF_DEEPMD_KIT
    ):
        return None
    coefficient = _coefficient(start_lr, numb_steps)
    if coefficient < _FEW_TIMES * config.lr_adjust_coeff:
        return None
    return (
        f"optimizer/lr_adjust_coeff is {config.lr_adjust_coeff:g}, as deepmd-kit writes its "
        f"default to out.json: Muon's steps are {coefficient / config.lr_adjust_coeff:.0f} times "
        f"smaller than suits force fields at start_lr {start_lr:g}; remove the key for "
        f"{coefficient:g} (doc/learning-rate.md), or set 'schedule' to 'deepmd-kit' for "
        "deepmd-kit's numbers"
    )


def _coefficient(start_lr: float, numb_steps: int | None) -> float:
    """Return the `lr_adjust_coeff` that suits a run."""
    if numb_steps is None or numb_steps >= _LONG_RUN:
        return _at_rate(_MUON_COEFFICIENT_OF_LONG_RUNS, start_lr)
    # 0 for a short run, 1 for a long one.
    share = max(0.0, math.log(max(1, numb_steps) / _SHORT_RUN) / math.log(_LONG_RUN / _SHORT_RUN))
    fall = _MUON_COEFFICIENT_OF_LONG_RUNS / _MUON_COEFFICIENT
    return _at_rate(_MUON_COEFFICIENT * fall**share, start_lr)


def _adam_ratio(numb_steps: int | None) -> float:
    """Return the `adam_lr_ratio` that suits a run at `_ADAM_RATE`."""
    if numb_steps is None:
        return 1.0
    return min(_ADAM_RATIO, max(1.0, _ADAM_RATIO * _SHORT_RUN / max(1, numb_steps)))


def _at_rate(scale: float, start_lr: float) -> float:
    """Return a scale for `start_lr`: its product with rates above `_ADAM_RATE` stays."""
    return _rounded(scale * min(1.0, _ADAM_RATE / start_lr))


def _unchanged(values: Mapping[str, Any], source: str) -> str:
    """Return the notice for a run that keeps the scales of its checkpoint."""
    return f"optimizer/lr_adjust_coeff is not given and stays {_written(values)}, as in {source}"


def _rounded(value: float) -> float:
    """Return a scale with the three digits that a notice and out.json show."""
    return float(f"{value:.3g}")


def _written(scales: Mapping[str, Any]) -> str:
    """Return scales as a notice shows them, without an `adam_lr_ratio` of 1."""
    text = f"{scales['lr_adjust_coeff']:g}"
    ratio = scales.get("adam_lr_ratio", 1.0)
    return text if ratio == 1.0 else f"{text} and adam_lr_ratio {ratio:g}"
