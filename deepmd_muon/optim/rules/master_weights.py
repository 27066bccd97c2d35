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

    Such elements are new, or the parameter was changed outside of a step, for instance by loading
    weights or QK-clip.
    """
    here = [
        m if m.device == p.device else m.to(p.device) for m, p in zip(masters, params, strict=True)
    ]
    for m, p in zip(here, params, strict=True):
        m.copy_(torch.where(m.to(p.dtype) == p, m, p.to(m.dtype)))
    return here


def round_masters(
    masters: Sequence[Tensor], here: Sequence[Tensor], params: Sequence[Tensor]
) -> None:
    """Write stepped masters to the parameters, and back to masters in host memory."""
    torch._foreach_copy_(list(params), list(here))
    for kept, m in zip(masters, here, strict=True):
        if kept is not m:
            kept.copy_(m)
