"""DPA-1 in deepmd-kit's checkpoints.

They have statistics for each slot, empty tables of compression, and an order of parameters.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from deepmd_muon.model.deepmd_kit import Translation, check_slots, own_parameters
from deepmd_muon.model.descriptor.dpa1.module import DPA1
from deepmd_muon.model.errors import ForeignModelError

_EMPTY_PARAMETERS = ["se_atten.compress_info.0", "se_atten.compress_data.0"]
_EMPTY = [*_EMPTY_PARAMETERS, "se_atten.type_embd_data"]


def _parameters(descriptor: DPA1) -> list[str]:
    """Return the names of parameters in deepmd-kit's order."""
    names = own_parameters(descriptor)
    of_types = [name for name in names if name.startswith("type_embedding.")]
    before = [name for name in names if name not in of_types]
    return before + _EMPTY_PARAMETERS + of_types


def _check(state: Mapping[str, Tensor]) -> None:
    """Refuse statistics that differ between slots or directions."""
    check_slots(state, "se_atten", "mean", "stddev")
    for name in ("mean", "stddev"):
        angular = state[f"se_atten.{name}"][:, 0, 1:]
        isotropic = torch.equal(angular, angular[:, :1].expand_as(angular))
        if not isotropic or (name == "mean" and angular.any()):
            raise ForeignModelError(
                f"the descriptor's {name} differs between the directions of space"
            )


TRANSLATION = Translation(
    empty=lambda part: _EMPTY,
    is_empty=lambda name: name in _EMPTY,
    parameters=_parameters,
    check=_check,
)
