"""HybridMuon's settings in the ``optimizer`` section of deepmd-kit's input."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from dargs import Argument

from deepmd_muon.argcheck import InputError, Problem
from deepmd_muon.argcheck.check import check
from deepmd_muon.argcheck.dargs_tree import arguments_of
from deepmd_muon.argcheck.legacy_optimizer import translate_optimizer
from deepmd_muon.optim.config import HybridMuonConfig
from deepmd_muon.plugins import load_plugins

# The keys of deepmd-kit 3.2.0, which its trainers pass to the optimizer; besides lr_adjust, which
# is translated.
KEYS_OF_DEEPMD_KIT = frozenset(
    {
        *("momentum", "adam_beta1", "adam_beta2", "weight_decay", "lr_adjust_coeff"),
        *("muon_mode", "enable_gram", "flash_muon", "magma_muon"),
    }
)
_ALL_KEYS = [field.name for field in dataclasses.fields(HybridMuonConfig)]
FURTHER_KEYS = tuple(key for key in _ALL_KEYS if key not in KEYS_OF_DEEPMD_KIT)


def accept_further_keys(registry: Any) -> None:
    """Make deepmd-kit's strict input check accept the settings that its own HybridMuon lacks.

    `registry` is ``deepmd.utils.argcheck.opt_args_plugin``.
    """
    present: Argument = registry.get_argument("HybridMuon")
    further = [key for key in arguments_of(HybridMuonConfig) if key.name not in present.sub_fields]
    for key in further:
        # lr_adjust decides where the input omits these; a default that dargs fills in would hide it.
        if key.name in ("scaling", "adam_lr_ratio"):
            key.default = Argument(key.name, key.dtype).default

    def arguments() -> list[Argument]:
        return [*present.sub_fields.values(), *further]

    # The registry keeps one entry per name, aliases and text, so this replaces deepmd-kit's.
    register: Callable[..., Callable[..., Any]] = registry.register
    register("HybridMuon", present.alias or None, present.doc)(arguments)


def further_settings(section: Mapping[str, Any]) -> dict[str, Any]:
    """Return HybridMuon's settings beyond deepmd-kit's keys.

    deepmd-kit has checked the section ``optimizer`` that contains them.

    Raises
    ------
    InputError
        Naming every key, deepmd-kit's included, whose value is out of its range.
    """
    translated = translate_optimizer(section).section
    del translated["type"]
    checked = check(HybridMuonConfig, translated)
    if checked.settings is None:
        raise InputError(Problem(f"optimizer/{p.path}", p.message) for p in checked.problems)
    if checked.settings.rules:
        load_plugins()  # which register rules of other packages
    return {key: getattr(checked.settings, key) for key in FURTHER_KEYS}
