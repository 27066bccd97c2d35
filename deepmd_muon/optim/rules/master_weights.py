"""Master weights: 16-bit parameters are stepped in float32, so no rounding error is lost.

An update of 1e-4 is less than half of the last bit of a bfloat16 weight above 1/32, so without a
master such a weight would never change. This rule only declares the state; the updates of all
routes use it (`current_masters`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from deepmd_muon.optim.config import HybridMuonConfig
from deepmd_muon.optim.rules.interface import MatrixRule, StateTensor

MASTER = "master_weight"
NARROW = (torch.float16, torch.bfloat16)


@dataclasses.dataclass(frozen=True)
class MasterWeights(MatrixRule):
    """float32 copies of 16-bit parameters; others have none."""

    name = "master_weights"

    @classmethod
    def of(cls, settings: HybridMuonConfig) -> MasterWeights | None:
        """Return the rule that settings switch on, or None."""
        return cls() if settings.master_weights else None

    def tensors(self) -> Mapping[str, StateTensor]:
        """Return the master.

        Its initial value does not matter, because `current_masters` sets it.
        """
        return {MASTER: StateTensor("parameter", "moment")}


def current_masters(masters: Sequence[Tensor], params: Sequence[Tensor]) -> list[Tensor]:
    """Return masters on their parameters' devices, after resetting outdated elements.

    An element that does not round to the parameter is new, or the parameter was changed outside of
    a step, for instance by loading weights or QK-clip.
    """
    on_device = [
        master if master.device == p.device else master.to(p.device)
        for master, p in zip(masters, params, strict=True)
    ]
    for master, p in zip(on_device, params, strict=True):
        is_current = master.to(p.dtype) == p
        master.copy_(torch.where(is_current, master, p.to(master.dtype)))
    return on_device


def round_masters(
    masters: Sequence[Tensor], stepped: Sequence[Tensor], params: Sequence[Tensor]
) -> None:
    """Write stepped masters to the parameters.

    If they are copies of `masters` in host memory, write them there, too.
    """
    torch._foreach_copy_(list(params), list(stepped))
    for master, copy in zip(masters, stepped, strict=True):
        if master is not copy:
            master.copy_(copy)
