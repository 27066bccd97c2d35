"""Translate a section `optimizer` of an older spelling to today's settings of HybridMuon and Muon."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# Values of removed settings that changed nothing. `out.json` of earlier revisions has these. The
# check refuses other values, with what to write instead (`deepmd_muon.optim.words`).
_SWITCHES = {"soap_muon": False, "norm_control": "none"}
# Settings without effect while these switches are off.
_OF_SWITCH = {"soap_beta": "soap_muon", "norm_brake": "norm_control"}


def translate_optimizer(section: Mapping[str, Any]) -> dict[str, Any]:
    """Return a section `optimizer` in today's spelling."""
    translated = dict(section)
    for switch, off in _SWITCHES.items():
        if translated.get(switch) == off:
            del translated[switch]
    for key, switch in _OF_SWITCH.items():
        if switch not in translated:
            translated.pop(key, None)
    return translated
