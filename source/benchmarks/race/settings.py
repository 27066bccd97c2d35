"""The settings of the stability experiment: what each changes in the input of a HybridMuon run that sets nothing."""

from __future__ import annotations

import copy
import dataclasses
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from anchors import Anchors
from far_projection import FarProjection, Projection
from first_layer_rate import FirstLayerRate
from fractional_power import (
    FirstHalfPower,
    FirstQuarterPower,
    HalfPower,
    QuarterPower,
    ThreeQuarterPower,
)
from sets import SETS, input_of
from spectral_cap import SpectralCap

sys.path.append(str(Path(__file__).resolve().parents[3] / "examples" / "update_rules"))

from radial_brake import RadialBrake  # needs the path above
from soap_muon import SoapMuon  # needs the path above

RATE = 1e-3
#: The last rate is this part of the first one, as in the race, unless a setting says otherwise.
STOP = 1e-3
#: Part of the run, at its end, over which weights are averaged.
TAIL = 0.25
#: Folder of a set with the structures that an ensemble's mean labels.
DISTILLED = "distilled"
#: AdamW's best rate in the race: of five for se_e2_a, 3,000 and 30,000 steps; of four or five for DPA-3, 3,000 steps.
ADAMW_RATES = {"water": 0.024, "molecules": 0.006, "alloys": 0.006}
ADAMW_RATES |= {"salt": 0.012}  # of three, se_e2_a, 3,000 steps
ADAMW_RATES |= {"aluminides": 0.024}  # of five, se_e2_a, 3,000 steps on a CPU
ADAMW_RATES |= {"silicon": 0.012}  # of six, 3,000 steps; after 30,000 it is within 2 % of the best
ADAMW_RATES |= {"dpa3/water": 0.006, "dpa3/molecules": 0.012, "dpa3/alloys": 0.024}


@dataclass(frozen=True)
class Setting:
    """A change of the input.

    Attributes
    ----------
    change
        Values of sections, which replace those of the plain run.
    rates
        First learning rate of each set, "MODEL/SET" for one model alone; `RATE` where it is missing.
    averaged
        Whether the run also gives a potential of the weights averaged over its last part, with a name of its own.
    last
        Values of sections that the last part of the run has instead, from a restart.
    part
        That part of the steps.
    noise
        Standard deviation [Å] of the displacements of atoms in further copies of each training frame. They keep its
        labels.
    anchors
        How the run is anchored to an early copy of itself; None without.
    distilled
        Whether the set's systems below ``distilled`` are training data, too.
    """

    change: Mapping[str, Any] = field(default_factory=dict)
    rates: Mapping[str, float] = field(default_factory=dict)
    averaged: bool = False
    last: Mapping[str, Any] = field(default_factory=dict)
    part: float = 0.1
    noise: float = 0.0
    anchors: Anchors | None = None
    distilled: bool = False


def muon(**settings: Any) -> Setting:
    """Return HybridMuon with settings of its own."""
    return Setting({"optimizer": settings})


def merged(base: Mapping[str, Any], change: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy with values replaced, section by section."""
    found = copy.deepcopy(dict(base))
    for key, value in change.items():
        inner = found.get(key)
        found[key] = (
            merged(inner, value)
            if isinstance(inner, dict) and isinstance(value, Mapping)
            else value
        )
    return found


ADAMW = {"optimizer": {"type": "AdamW", "weight_decay": 0.01}}
SLOW_END = {"learning_rate": {"stop_lr_ratio": 0.03}}
SMALL = {
    "descriptor": {"neuron": [8, 16, 32], "axis_neuron": 4},
    "fitting_net": {"neuron": [48, 48, 48]},
}
SETTINGS = {
    "default": Setting(averaged=True),
    "adamw": Setting(ADAMW, ADAMW_RATES),
    "stop_0.03": Setting(SLOW_END, averaged=True),
    "adamw_stop_0.03": Setting(merged(ADAMW, SLOW_END), ADAMW_RATES),
    "half_rate": Setting({"learning_rate": {"start_lr": RATE / 2}}),
    "decay_1": muon(weight_decay=1.0),
    "cautious_decay_1": muon(weight_decay=1.0, cautious_decay=True),
    "normuon": muon(normuon=True),
    "soap": muon(rules=[SoapMuon.name]),
    "brake": muon(rules=[RadialBrake.name]),
    "force_last": Setting({"loss": {"limit_pref_f": 100.0}}),
    "energy_last": Setting({"loss": {"limit_pref_e": 20.0}}),
    "small_network": Setting({"model": SMALL}),
    "decay_3": muon(weight_decay=3.0),
    "small_decay_1": Setting({"model": SMALL, "optimizer": {"weight_decay": 1.0}}),
    "noise_0.01": Setting(noise=0.01),
    "noise_0.03": Setting(noise=0.03),
    # A fifth of the rate of matrices that an input with more than 10,000 steps takes where it sets nothing.
    "slow_last_tenth": Setting(last={"optimizer": {"lr_adjust_coeff": 4.32 / 5}}),
    "decay_3_first_half": Setting(
        {"optimizer": {"weight_decay": 3.0}}, last={"optimizer": {"weight_decay": 0.001}}, part=0.5
    ),
    "spectral_cap": muon(rules=[SpectralCap.name]),
    "first_layer_rate": muon(rules=[FirstLayerRate.name]),
    "projection": Setting({"optimizer": {"rules": [FarProjection.name]}}, anchors=Projection()),
    # One net on the data and on structures that an ensemble's mean labels, which `distill.py` writes.
    "distilled": Setting(distilled=True),
}
#: The rules of the Muon route that race, and what their rates of matrices are multiplied by beside 1.
RULES = ("default", "soap", "brake", "normuon")
FACTORS = (0.5, 2.0, 4.0, 8.0)
#: What an input that sets nothing takes in short runs.
SHORT = {"lr_adjust_coeff": 8.64, "adam_lr_ratio": 10.0}
SETTINGS |= {
    f"{rule}_x{factor:g}": Setting(
        merged(
            SETTINGS[rule].change,
            {"optimizer": {**SHORT, "lr_adjust_coeff": factor * SHORT["lr_adjust_coeff"]}},
        )
    )
    for rule in RULES
    for factor in FACTORS
}
#: Matrices that may take the AdamW route, by their part of the model.
ROUTES = {
    "none": (),
    "embedding": ("*descriptor*filter_layers*matrix",),
    "fitting": ("*fitting_net*matrix",),
    "first": ("*fitting_net*layers.0.matrix",),
    "last": ("*fitting_net*layers.2.matrix",),  # the last hidden layer of three
    "first_last": ("*fitting_net*layers.0.matrix", "*fitting_net*layers.2.matrix"),
    "types": ("*type_embedding*matrix",),  # of DPA-1 and DPA-3
    # What reads edges in the first layer of DPA-3. Their initial layers have one row: Adam updates them anyway.
    "edges": ("*repflows.layers.0.*edge*matrix",),
}
#: `lr_adjust_coeff`, which scales the rate of the matrices that stay on the Muon route; long runs take 4.32.
COEFFICIENTS = (1.44, 4.32, 12.96)
#: `adam_lr_ratio`: the rate of the Adam and AdamW routes, in units of `RATE`; long runs take 1.
RATIOS = (0.1, 0.3, 1.0, 3.0, 10.0, 30.0)
SETTINGS |= {
    f"{part}_c{coefficient:g}_r{ratio:g}": muon(
        adamw_patterns=list(patterns), lr_adjust_coeff=coefficient, adam_lr_ratio=ratio
    )
    for part, patterns in ROUTES.items()
    for coefficient in COEFFICIENTS
    for ratio in RATIOS
}

SETTINGS["none_c6_r3"] = muon(lr_adjust_coeff=6.0, adam_lr_ratio=3.0)
#: Fractional powers of the singular values, of all matrices or of the first layer of the fitting net.
POWERS = {
    "power_0.25": QuarterPower.name,
    "power_0.5": HalfPower.name,
    "power_0.75": ThreeQuarterPower.name,
    "first_power_0.25": FirstQuarterPower.name,
    "first_power_0.5": FirstHalfPower.name,
}
SETTINGS |= {name: muon(rules=[rule]) for name, rule in POWERS.items()}
# Powers make steps shorter: the rate of long runs, three times as high.
SETTINGS |= {
    f"{name}_c12.96": muon(rules=[rule], lr_adjust_coeff=12.96) for name, rule in POWERS.items()
}
#: Few Newton–Schulz steps, which leave small singular values small: n of them multiply these by 3.4445^n.
DEPTHS = (1, 2, 3)
SETTINGS |= {
    f"depth_{steps}_c{coefficient:g}": muon(
        schedule=[[3.4445, -4.775, 2.0315]] * steps, lr_adjust_coeff=coefficient
    )
    for steps in DEPTHS
    for coefficient in (4.32, 12.96)
}
# The same in the fitting net alone: no matrix of the embedding nets has 96 rows and columns.
SETTINGS |= {
    f"fitting_depth_{steps}_c{coefficient:g}": muon(
        large_schedule=[[3.4445, -4.775, 2.0315]] * steps,
        large_matrix_dim=96,
        lr_adjust_coeff=coefficient,
    )
    for steps in DEPTHS
    for coefficient in (4.32, 12.96)
}

# AdamW at one rate, for sets whose best one is not known.
SETTINGS |= {
    f"adamw_{rate:g}": Setting(ADAMW, dict.fromkeys(SETS, rate))
    for rate in (0.006, 0.012, 0.024, 0.048)
}
# The first layer on AdamW with the coefficient that suits the length of the run, which an input omits.
SETTINGS["first"] = muon(adamw_patterns=list(ROUTES["first"]))
SETTINGS |= {
    f"first_r{ratio:g}": muon(adamw_patterns=list(ROUTES["first"]), adam_lr_ratio=ratio)
    for ratio in (1.0, 3.0)
}
#: Runs with anchors: the setting that they change, and how.
ANCHORED = {
    "anchors": ("default", Anchors()),
    "anchors_x10": ("default", Anchors(weight=10.0)),
    "anchors_1k": ("default", Anchors(hand_over=1_000)),
    "anchors_all": ("default", Anchors(all_structures=True)),
    "first_anchors": ("first_c4.32_r1", Anchors()),
    "adamw_anchors": ("adamw", Anchors()),
}
SETTINGS |= {
    name: dataclasses.replace(SETTINGS[setting], averaged=False, anchors=anchors)
    for name, (setting, anchors) in ANCHORED.items()
}


def input_for(
    name: str,
    setting: str,
    folder: Path,
    *,
    seed: int,
    steps: int,
    model: str = "se_e2_a",
    averages: bool = True,
) -> dict[str, Any]:
    """Return the input of a run.

    Parameters
    ----------
    name, folder
        Of the set.
    setting
        A key of `SETTINGS`.
    seed, steps
        Of weights and data order, and the length.
    model
        See `input_of`.
    averages
        Whether the run averages weights if its setting does.
    """
    chosen = SETTINGS[setting]
    systems = SETS[name].systems(folder, "train")
    if chosen.distilled:
        systems += sorted(path.parent for path in (folder / DISTILLED).glob("*/type.raw"))
    content = input_of(name, model, systems, seed=seed, steps=steps)
    start = chosen.rates.get(f"{model}/{name}", chosen.rates.get(name, RATE))
    rate = {"type": "exp", "smooth": True, "stop_lr_ratio": STOP, "start_lr": start}
    plain = merged(content, {"optimizer": {"type": "HybridMuon"}, "learning_rate": rate})
    quiet: dict[str, Any] = {"disp_freq": steps, "save_freq": steps, "max_ckpt_keep": 1}
    if chosen.averaged and averages:
        quiet |= {"enable_ema": True, "ema_tail": TAIL}
    return merged(merged(plain, chosen.change), {"training": quiet})
