"""`se_e2_a` in deepmd-kit's checkpoints: statistics per slot, and empty `compress_…` parameters."""

from __future__ import annotations

from deepmd_muon.model.deepmd_kit import Translation, check_slots, own_parameters
from deepmd_muon.model.descriptor.se_e2_a.module import SeE2A


def _empty(descriptor: SeE2A) -> list[str]:
    nets = len(descriptor.sea.filter_layers.networks)
    return [f"sea.compress_{what}.{i}" for what in ("info", "data") for i in range(nets)]


def _parameters(descriptor: SeE2A) -> list[str]:
    return own_parameters(descriptor) + _empty(descriptor)


TRANSLATION = Translation(
    empty=_empty,
    is_empty=lambda name: name.startswith("sea.compress_"),
    parameters=_parameters,
    check=lambda state: check_slots(state, "sea", "mean", "stddev"),
)
