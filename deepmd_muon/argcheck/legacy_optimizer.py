"""Translate a section `optimizer` of an older spelling to today's settings of HybridMuon and Muon."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

# Values of removed settings that changed nothing. `out.json` of earlier revisions has these. The
# check refuses other values, with what to write instead (`deepmd_muon.optim.words`).
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
    """A section in today's spelling, and a line for each setting that it no longer has."""

    section: dict[str, Any]
    notices: list[str]


def translate_optimizer(section: Mapping[str, Any]) -> Translated:
    """Return a section `optimizer` in today's spelling."""
    translated = dict(section)
    for switch, off in _SWITCHES.items():
        if translated.get(switch) == off:
            del translated[switch]
    for key, switch in _OF_SWITCH.items():
        if switch not in translated:
            translated.pop(key, None)
    notices = []
    if isinstance(translated.get("sharded"), Mapping):
        sharded = dict(translated["sharded"])
        for key, default in _OF_SHARDED.items():
            if sharded.pop(key, default) != default:
                notices.append(f"optimizer/sharded/{key} has no effect any more and is left out")
        translated["sharded"] = sharded
    return Translated(translated, notices)
