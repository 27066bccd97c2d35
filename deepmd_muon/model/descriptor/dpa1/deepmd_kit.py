"""DPA-1 in deepmd-kit's checkpoints: statistics per slot, empty compression tables, its order of parameters."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from deepmd_muon.model.deepmd_kit import Translation, check_slots, own_parameters
from deepmd_muon.model.descriptor.dpa1.module import DPA1
from deepmd_muon.model.errors import ForeignModelError

_PARAMETERS = ["se_atten.compress_info.0", "se_atten.compress_data.0"]
_EMPTY = [*_PARAMETERS, "se_atten.type_embd_data"]


def _parameters(descriptor: DPA1) -> list[str]:
    own = own_parameters(descriptor)
    types = [name for name in own if name.startswith("type_embedding.")]
    return [name for name in own if name not in types] + _PARAMETERS + types


def _check(state: Mapping[str, torch.Tensor]) -> None:
    check_slots(state, "se_atten", "mean", "stddev")
    for what in ("mean", "stddev"):
        angular = state[f"se_atten.{what}"][:, 0, 1:]
        if not torch.equal(angular, angular[:, :1].expand_as(angular)) or (
            what == "mean" and angular.any()
        ):
            raise ForeignModelError(
                f"the descriptor's {what} differs between the directions of space"
            )


TRANSLATION = Translation(
    empty=lambda part: _EMPTY,
    is_empty=lambda name: name in _EMPTY,
    parameters=_parameters,
    check=_check,
)
