"""The element-wise routes: Adam, and AdamW with decoupled decay, on lists of tensors.

The rule is that of D. P. Kingma and J. Ba (arXiv:1412.6980), with the decay of I. Loshchilov and F. Hutter
(arXiv:1711.05101), ε = 1e-20 outside the root and bias correction. torch's fused multi-tensor kernel does the work.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.optim.adam import adam as torch_adam

EPSILON = 1e-20

_FUSED_DEVICES = ("cpu", "cuda", "xpu", "mps")


def moment_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of the moments: the wider of float32 and the parameter's."""
    return torch.promote_types(dtype, torch.float32)


def adam_(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    steps: Sequence[Tensor],
    *,
    lr: float | Tensor,
    betas: tuple[float, float],
    weight_decay: float,
) -> None:
    """Take one Adam step in place; with `weight_decay` > 0 the decoupled one of AdamW.

    Parameters
    ----------
    params, grads
        Real tensors of equal shapes, any floating dtype; 16-bit parameters are updated in float32 and rounded once.
    exp_avgs, exp_avg_sqs
        First and second moments, in `moment_dtype` of the parameter.
    steps
        float32 scalars, the number of steps taken; advanced by one.
    lr
        Learning rate; a tensor is read on its device.
    betas
        Decays of the moments.
    weight_decay
        λ in p ← p (1 − lr λ).
    """
    kinds: dict[tuple[torch.device, torch.dtype], list[int]] = defaultdict(list)
    for i, p in enumerate(params):
        kinds[p.device, p.dtype].append(i)
    for (device, dtype), members in kinds.items():
        wide = moment_dtype(dtype)
        targets = [params[i] if dtype == wide else params[i].to(wide) for i in members]
        torch_adam(
            targets,
            [grads[i].to(wide) for i in members],
            [exp_avgs[i] for i in members],
            [exp_avg_sqs[i] for i in members],
            [],
            [steps[i] for i in members],
            fused=device.type in _FUSED_DEVICES,
            amsgrad=False,
            beta1=betas[0],
            beta2=betas[1],
            lr=lr,
            weight_decay=weight_decay,
            eps=EPSILON,
            maximize=False,
            decoupled_weight_decay=True,
        )
        if dtype != wide:
            torch._foreach_copy_([params[i] for i in members], targets)
