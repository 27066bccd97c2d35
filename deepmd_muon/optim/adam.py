"""The element-wise routes: Adam, and AdamW with decoupled decay, on lists of tensors.

The rule is that of D. P. Kingma and J. Ba (arXiv:1412.6980), with the decay of I. Loshchilov and F. Hutter
(arXiv:1711.05101), ε = 1e-20 outside the root and bias correction. torch's fused multi-tensor kernel does the work.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.optim.adam import adam as torch_adam

from deepmd_muon.optim.gradients import StepControl, ready_gradients

EPSILON = 1e-20


def moment_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of the moments: the wider of float32 and the parameter's."""
    return torch.promote_types(dtype, torch.float32)


def adam_(
    params: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    steps: Sequence[Tensor],
    *,
    lr: float | Tensor,
    betas: tuple[float, float],
    weight_decay: float,
    control: StepControl,
    maximize: bool = False,
) -> None:
    """Take one Adam step in place; with `weight_decay` > 0 the decoupled one of AdamW.

    Parameters
    ----------
    params
        Real tensors of one device and dtype, with gradients; 16-bit ones are updated in float32 and rounded once.
    exp_avgs, exp_avg_sqs
        First and second moments, in `moment_dtype` of the parameters.
    steps
        float32 scalars, the number of steps taken; advanced by one.
    lr
        Learning rate; a tensor is read on its device.
    betas
        Decays of the moments.
    weight_decay
        λ in p ← p (1 − lr λ).
    control
        Whether the step is left out, and the gradients' scale; on the parameters' device.
    maximize
        Climb instead of descend.
    """
    wide = moment_dtype(params[0].dtype)
    targets = [p.to(wide) for p in params]  # the parameters themselves unless they are 16 bits wide
    torch_adam(
        targets,
        ready_gradients(params, wide, control.scale, maximize=maximize),
        list(exp_avgs),
        list(exp_avg_sqs),
        [],
        list(steps),
        fused=True,
        found_inf=control.skip,
        amsgrad=False,
        beta1=betas[0],
        beta2=betas[1],
        lr=lr.float() if isinstance(lr, Tensor) else lr,  # the fused kernel takes no other dtype
        weight_decay=weight_decay,
        eps=EPSILON,
        maximize=False,
        decoupled_weight_decay=True,
    )
    if wide != params[0].dtype:
        torch._foreach_copy_(list(params), targets)
