"""The orthogonalization of deepmd-kit 3.2.0, for comparisons: every iterate is stored in 16 bits.

Square matrices take the 8+2 schedule in bfloat16. Rectangular ones, when its `enable_gram` is true,
take five Polar-Express steps slowed down by 1.05 on the Gram matrix in float16, restarted once
before the third.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from deepmd_muon.optim.polar.schedules import POLAR_EXPRESS_LIMIT, SCHEDULES, slow_down

_EPSILON = 1e-7
_RESTART = 2
GRAM_STEPS = slow_down(POLAR_EXPRESS_LIMIT[:5], 1.05, spare_last=False)


def orthogonalize_as_deepmd_kit(matrices: Sequence[Tensor], *, gram: bool) -> list[Tensor]:
    """Orthogonalize batches (b, m, n) as deepmd-kit 3.2.0 does; results are float32."""
    results = []
    for x in matrices:
        tall = x.shape[1] > x.shape[2]
        wide = x.mT if tall else x
        if gram and x.shape[1] != x.shape[2]:
            polar = _gram(wide.float())
        else:
            polar = _standard(wide.bfloat16())
        results.append((polar.mT if tall else polar).float())
    return results


def _standard(x: Tensor) -> Tensor:
    x = x / torch.linalg.matrix_norm(x, keepdim=True).clamp_min(_EPSILON)
    for a, b, c in SCHEDULES["8+2"].coefficients:
        r = torch.bmm(x, x.mT)
        x = torch.baddbmm(x, torch.baddbmm(r, r, r, beta=b, alpha=c), x, beta=a)
    return x


def _gram(x: Tensor) -> Tensor:
    x = (x / (torch.linalg.matrix_norm(x, keepdim=True) + _EPSILON)).half()
    for steps in (GRAM_STEPS[:_RESTART], GRAM_STEPS[_RESTART:]):
        r = torch.bmm(x, x.mT)
        q = torch.eye(r.shape[1], dtype=r.dtype, device=r.device).expand_as(r)
        for a, b, c in steps:
            z = torch.baddbmm(r, r, r, beta=b, alpha=c)
            q = torch.baddbmm(q, q, z, beta=a)
            rz = torch.baddbmm(r, r, z, beta=a)
            r = torch.baddbmm(rz, z, rz, beta=a)
        x = torch.bmm(q, x)
    return x
