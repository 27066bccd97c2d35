"""The element-wise routes: Adam, and AdamW with decoupled decay, on lists of tensors.

The rule is that of D. P. Kingma and J. Ba (arXiv:1412.6980), with the decay of I. Loshchilov and F.
Hutter (arXiv:1711.05101), ε outside the root, and bias correction, in torch's implementations.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from operator import is_
from typing import Any

import torch
from torch import Tensor
from torch.optim.adam import adam as torch_adam

from deepmd_muon.optim.config import HybridMuonConfig
from deepmd_muon.optim.rules.master_weights import MASTER, current_masters, round_masters
from deepmd_muon.optim.torch_hooks import phase
from deepmd_muon.optim.update.gradients import StepControl, in_dtype, prepare_gradients

# Targets, gradients, first and second moments.
TensorLists = tuple[list[Tensor], list[Tensor], list[Tensor], list[Tensor]]


def moment_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of the moments: the wider of float32 and the parameter's."""
    return torch.promote_types(dtype, torch.float32)


@phase("adam")
def adam_(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    state: Mapping[str, Sequence[Tensor]],
    *,
    decays: bool,
    lr: float | Tensor,
    settings: HybridMuonConfig,
    control: StepControl,
    maximize: bool = False,
) -> None:
    """Take one Adam step in place on real tensors of one device and dtype.

    16-bit parameters are updated in float32 and rounded once; with master weights, these are
    updated.

    Parameters
    ----------
    state
        By key, one tensor per parameter: the moments in `moment_dtype`, and the number of steps,
        float32 scalars.
    decays
        Whether this is AdamW's step, with decoupled decay.
    lr
        Learning rate of the Muon route; a tensor is read on its device.
    control
        Whether to skip the step, and the gradients' scale; on the parameters' device.
    """
    wide = moment_dtype(params[0].dtype)
    grads = prepare_gradients(grads, wide, control.scale, maximize=maximize)
    # The parameters themselves, unless they have 16 bits.
    targets = list(params) if params[0].dtype is wide else in_dtype(params, wide)
    masters = state.get(MASTER)
    if masters is not None:
        targets = current_masters(masters, params)
    ratio = settings.adam_lr_ratio
    assert ratio is not None
    lr = lr if ratio == 1.0 else lr * ratio
    if isinstance(lr, Tensor) and not (targets[0].is_cuda and lr.is_cuda):
        lr = float(lr)
    tensors = (targets, grads, list(state["exp_avg"]), list(state["exp_avg_sq"]))
    steps = list(state["step"])
    values: dict[str, Any] = {
        "beta1": settings.adam_beta1,
        "beta2": settings.adam_beta2,
        "eps": settings.adam_eps,
        "weight_decay": settings.adamw_decay if decays else 0.0,
        "amsgrad": False,
        "maximize": False,
    }
    if settings.adam_implementation == "fused":
        _fused(tensors, steps, lr, {**values, "found_inf": control.skip})
    else:
        foreach = settings.adam_implementation == "foreach"
        _unfused(tensors, steps, control.skip, {**values, "lr": lr, "foreach": foreach})
    if masters is not None:
        round_masters(masters, targets, params)
    elif wide != params[0].dtype:
        torch._foreach_copy_(list(params), targets)


def _unfused(
    tensors: TensorLists, steps: list[Tensor], skip: Tensor | None, values: dict[str, Any]
) -> None:
    """Take torch's step without the fused kernel, unless `skip`; nothing waits for the device."""
    targets, _, exp_avgs, exp_avg_sqs = tensors
    changed = (*targets, *exp_avgs, *exp_avg_sqs, *steps)
    before = [] if skip is None else list(map(torch.clone, changed))
    # Steps are counted on the parameters' device; on a GPU `capturable` reads them there.
    values |= {"capturable": targets[0].is_cuda, "decoupled_weight_decay": True}
    torch_adam(*tensors, [], steps, **values)
    if skip is not None:
        for x, old in zip(changed, before, strict=True):
            x.copy_(torch.where(skip > 0, old, x))


def _fused(
    tensors: TensorLists, steps: list[Tensor], lr: float | Tensor, values: dict[str, Any]
) -> None:
    """Take the step by torch's fused kernel."""
    targets = tensors[0]
    # On a GPU the fused kernel reads a learning-rate tensor in float32 only.
    exact = lr if isinstance(lr, Tensor) and lr.dtype == targets[0].dtype == torch.float64 else None
    # A copy of all in one launch.
    before = () if exact is None else torch._foreach_mul(targets, 1.0)
    values["lr"] = lr.float() if isinstance(lr, Tensor) else lr
    if targets[0].is_cuda:
        _fused_on_gpu(tensors, steps, **values)
    else:  # torch's kernel assumes equal strides
        alike = _with_equal_strides(tensors)
        torch_adam(*alike, [], steps, fused=True, decoupled_weight_decay=True, **values)
        _copy_back(tensors, alike)
    if exact is not None:
        correct_rounded_lr(targets, list(before), exact)


def correct_rounded_lr(targets: list[Tensor], before: list[Tensor], lr: Tensor) -> None:
    """Correct a step taken with ``lr.float()`` to float64 `lr`.

    The change of the parameters is proportional to lr.
    """
    rate = lr.float().double()
    change = torch._foreach_sub(targets, before)
    torch._foreach_mul_(change, torch.where(rate > 0, (lr - rate) / rate, 0.0))
    torch._foreach_add_(targets, change)


def _fused_on_gpu(
    tensors: TensorLists, steps: list[Tensor], *, found_inf: Tensor | None, **values: Any
) -> None:
    """Call torch's kernel for tensors of one device and dtype, without torch's grouping by these.

    For 88 parameters the grouping takes longer on the host than the launches.
    """
    nothing: list[Tensor] = []  # AMSGrad's maxima
    values |= {"grad_scale": None, "found_inf": found_inf}
    torch._foreach_add_(steps, 1)
    try:
        torch._fused_adamw_(*tensors, nothing, steps, **values)
    except RuntimeError:  # different strides; torch checks them before it launches anything
        alike = _with_equal_strides(tensors)
        if all(map(is_, itertools.chain(*tensors), itertools.chain(*alike))):
            raise
        torch._fused_adamw_(*alike, nothing, steps, **values)
        _copy_back(tensors, alike)
    if found_inf is not None:
        torch._foreach_sub_(steps, [found_inf] * len(steps))


def _with_equal_strides(several: TensorLists) -> TensorLists:
    """Return lists with dense i-th tensors of equal strides, as torch's fused kernels assume.

    Tensors that comply are returned themselves; others are copied to contiguous ones. So are
    gradients whose signs are still to be changed (`Tensor.is_neg`), such as that of the imaginary
    part of a conjugate.
    """
    contiguous = all(map(Tensor.is_contiguous, itertools.chain(*several)))
    if contiguous and not any(map(Tensor.is_neg, several[1])):
        return several
    rows = []
    for row in zip(*several, strict=True):
        settled = [x.resolve_neg() for x in row]
        same = len({x.stride() for x in settled}) == 1 and _is_dense(settled[0])
        rows.append(settled if same else [x.contiguous() for x in settled])
    targets, grads, exp_avgs, exp_avg_sqs = (list(column) for column in zip(*rows, strict=True))
    return targets, grads, exp_avgs, exp_avg_sqs


def _is_dense(x: Tensor) -> bool:
    """Return whether a tensor is contiguous under some permutation of its dimensions."""
    dims = zip(x.stride(), x.shape, strict=True)
    expected = 1
    for stride, size in sorted((stride, size) for stride, size in dims if size != 1):
        if stride != expected:
            return False
        expected *= size
    return True


def _copy_back(originals: TensorLists, results: TensorLists) -> None:
    """Copy results from temporary tensors to the originals, except gradients (the second list)."""
    if originals is results:
        return
    for number, (tensors, copies) in enumerate(zip(originals, results, strict=True)):
        if number == 1:
            continue
        for original, result in zip(tensors, copies, strict=True):
            if original is not result:
                original.copy_(result)
