"""The element-wise routes: Adam, and AdamW with decoupled decay, on lists of tensors.

The rule is that of D. P. Kingma and J. Ba (arXiv:1412.6980), with the decay of I. Loshchilov and F. Hutter
(arXiv:1711.05101), ε = 1e-20 outside the root and bias correction. torch's fused multi-tensor kernel does the work.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim.adam import adam as torch_adam

from deepmd_muon.optim.update.gradients import StepControl, in_dtype, ready_gradients

EPSILON = 1e-20


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
    control: StepControl,
    maximize: bool = False,
) -> None:
    """Take one Adam step in place; with `weight_decay` > 0 the decoupled one of AdamW.

    Parameters
    ----------
    params
        Real tensors of one device and dtype; 16-bit ones are updated in float32 and rounded once.
    grads
        Their gradients.
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
    # The parameters themselves unless they are 16 bits wide.
    targets = list(params) if params[0].dtype is wide else in_dtype(params, wide)
    grads = ready_gradients(grads, wide, control.scale, maximize=maximize)
    values: dict[str, Any] = {
        "beta1": betas[0],
        "beta2": betas[1],
        "lr": lr.float() if isinstance(lr, Tensor) else lr,  # the fused kernel takes no other dtype
        "weight_decay": weight_decay,
        "eps": EPSILON,
        "amsgrad": False,
        "maximize": False,
        "found_inf": control.skip,
    }
    nothing: list[Tensor] = []  # no maxima: this is not AMSGrad
    tensors = (targets, grads, list(exp_avgs), list(exp_avg_sqs), nothing, list(steps))
    if targets[0].is_cuda and not (isinstance(lr, Tensor) and not lr.is_cuda):
        _fused_on_gpu(*tensors, **values)
    else:
        torch_adam(*tensors, fused=True, decoupled_weight_decay=True, **values)
    if wide != params[0].dtype:
        torch._foreach_copy_(list(params), targets)


def _fused_on_gpu(
    targets: list[Tensor],
    grads: list[Tensor],
    exp_avgs: list[Tensor],
    exp_avg_sqs: list[Tensor],
    nothing: list[Tensor],
    steps: list[Tensor],
    *,
    found_inf: Tensor | None,
    **values: Any,
) -> None:
    """Do what torch's function does for tensors of one device and dtype, without grouping them once more.

    For 88 parameters grouping takes longer on the host than the launches.
    """
    torch._foreach_add_(steps, 1)
    torch._fused_adamw_(
        targets, grads, exp_avgs, exp_avg_sqs, nothing, steps, grad_scale=None, found_inf=found_inf, **values
    )
    if found_inf is not None:
        torch._foreach_sub_(steps, [found_inf] * len(steps))
