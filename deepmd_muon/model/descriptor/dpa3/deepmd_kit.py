"""`dpa3` in deepmd-kit's checkpoints: equal names; statistics depend on the centre's type alone."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from deepmd_muon.model.deepmd_kit import Translation, check_slots
from deepmd_muon.model.errors import ForeignModelError


def _check(state: Mapping[str, Tensor]) -> None:
    if state["repflows.mean"].any():
        raise ForeignModelError("the descriptor's mean is not 0, which no DPA-3 of deepmd-kit has")
    check_slots(state, "repflows", "stddev")


TRANSLATION = Translation(check=_check)
