"""Translate keys of a section `optimizer` that stand for other settings, or that are gone.

DeePMD's switch `lr_adjust` is an official key of deepmd-kit, so inputs have it. The other keys were
settings of earlier revisions, whose `out.json` lists all of them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from deepmd_muon.optim.config import DEEPMD_KIT, HybridMuonConfig
from deepmd_muon.optim.words import settings_of_lr_adjust
from deepmd_muon.section import Foreign
from deepmd_muon.setting import InvalidSettingError

_TRANSLATED_KEYS = {
    "lr_adjust": Foreign("scaling and adam_lr_ratio take its place", inert=True),
    "deepmd_kit_arithmetic": Foreign(f'schedule "{DEEPMD_KIT}" takes its place', inert=True),
}
# Values of removed settings that changed nothing. The check refuses other values, with what to
# write instead (`deepmd_muon.optim.words`).
_SWITCHES = {"soap_muon": False, "norm_control": "none"}
# Settings without effect while these switches are off.
_OF_SWITCH = {"soap_beta": "soap_muon", "norm_brake": "norm_control"}
# Removed settings of `sharded`, with their defaults. They never changed a result.
_OF_SHARDED = {
    "exchange": "owners",
    "flops_per_second": 1e14,
    "bytes_per_second": 2e10,
    "latency": 5e-5,
}


class Translated(NamedTuple):
    """A section in today's spelling, and a line for each key that it no longer has."""

    section: dict[str, Any]
    notices: list[str]


def translated_keys(section: type) -> Mapping[str, Foreign]:
    """Return the keys that `translate_optimizer` replaces, for programs that know only keys."""
    return _TRANSLATED_KEYS if section is HybridMuonConfig else {}


def translate_optimizer(section: Mapping[str, Any]) -> Translated:
    """Return a section `optimizer` of type HybridMuon or Muon in today's spelling."""
    translated = dict(section)
    notices: list[str] = []
    if section.get("type") == "HybridMuon":
        notices += _split_lr_adjust(translated)
        notices += _choose_schedule(translated)
    notices += _drop_removed(translated)
    return Translated(translated, notices)


def current_optimizer(saved: Mapping[str, Any]) -> dict[str, Any]:
    """Return a normalized section `optimizer` of an earlier revision with today's keys."""
    section = translate_optimizer(saved).section
    if saved.get("type") == "HybridMuon":
        for key in ("scaling", "adam_lr_ratio"):
            section.setdefault(key, getattr(HybridMuonConfig, key))
    return section


def _split_lr_adjust(section: dict[str, Any]) -> list[str]:
    """Replace `lr_adjust` by the two settings that it combines; these override either half."""
    # In earlier revisions, null meant that a setting follows the switch.
    for key in ("scaling", "adam_lr_ratio"):
        if section.get(key, ...) is None:
            del section[key]
    if "lr_adjust" not in section:
        return []
    try:
        explicit = settings_of_lr_adjust(section["lr_adjust"])
    except InvalidSettingError:
        return []  # the check reports it
    value = section.pop("lr_adjust")
    if value <= 0:
        return []  # both settings have these values by default
    meant = {key: half for key, half in explicit.items() if key not in section}
    section.update(meant)
    if not meant:
        return ["optimizer/lr_adjust has no effect: scaling and adam_lr_ratio are given"]
    written = ", ".join(f"{key}: {json.dumps(half)}" for key, half in meant.items())
    return [f"optimizer/lr_adjust: {value:g} is DeePMD's switch; it means {written}"]


def _choose_schedule(section: dict[str, Any]) -> list[str]:
    """Replace `deepmd_kit_arithmetic` by the settings that it implies."""
    if not isinstance(section.get("deepmd_kit_arithmetic"), bool):
        return []  # absent, or the check reports it
    if not section.pop("deepmd_kit_arithmetic"):
        return []
    section["schedule"] = DEEPMD_KIT
    # deepmd-kit takes weights as stored, and has one scale for all runs.
    if section.get("layout", "auto") == "auto":
        section["layout"] = "as_stored"
    section.setdefault("lr_adjust_coeff", HybridMuonConfig.lr_adjust_coeff)
    meant = {key: section[key] for key in ("schedule", "layout", "lr_adjust_coeff")}
    written = ", ".join(f"{key}: {json.dumps(value)}" for key, value in meant.items())
    return [f"optimizer/deepmd_kit_arithmetic is an older form; write {written}"]


def _drop_removed(section: dict[str, Any]) -> list[str]:
    """Leave out removed settings that change nothing."""
    for switch, off in _SWITCHES.items():
        if section.get(switch) == off:
            del section[switch]
    for key, switch in _OF_SWITCH.items():
        if switch not in section:
            section.pop(key, None)
    if not isinstance(section.get("sharded"), Mapping):
        return []
    sharded = dict(section["sharded"])
    notices = []
    for key, default in _OF_SHARDED.items():
        if sharded.pop(key, default) != default:
            notices.append(f"optimizer/sharded/{key} has no effect any more and is left out")
    section["sharded"] = sharded
    return notices
