"""The Muon route on lists of tensors: momentum, orthogonalization, scale, damping, update."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from deepmd_muon.optim.config import HybridMuonConfig, update_scale
from deepmd_muon.optim.phases import phase
from deepmd_muon.optim.polar import orthogonalize_matrices
from deepmd_muon.optim.polar.deepmd_kit import orthogonalize_as_deepmd_kit
from deepmd_muon.optim.routing.views import MatrixView
from deepmd_muon.optim.update import magma
from deepmd_muon.optim.update.adam import moment_dtype
from deepmd_muon.optim.update.gradients import StepControl, gradients_of, in_dtype, prepare_gradients


def muon_(
    params: Sequence[Tensor],
    buffers: Sequence[Tensor],
    scores: Sequence[Tensor],
    views: Sequence[MatrixView],
    *,
    lr: float | Tensor,
    settings: HybridMuonConfig,
    control: StepControl,
    maximize: bool = False,
) -> None:
    """Take one Muon step in place.

    Parameters
    ----------
    params
        Real tensors of one device and dtype, with gradients; 16-bit parameters are updated in float32 and rounded once.
    buffers
        Momenta, of the parameters' shapes and dtype.
    scores
        Magma scores, float32 (blocks,) each; empty when damping is off.
    views
        The parameters' matrix views.
    lr
        Learning rate; a tensor is read on its device.
    settings
        Settings of the parameters' group.
    control
        Whether to skip the step, and the gradients' scale; on the parameters' device.
    maximize
        Maximize instead of minimizing.
    """
    grads = gradients_of(params)
    momenta, grads = advance_momenta(grads, buffers, settings, control, maximize=maximize)
    factors = _damping(scores, views, momenta, grads, control.skip) if scores else None
    updates = _updates(directions_of(momenta, grads, settings), views, factors, settings)
    apply_updates(params, updates, effective_lr(lr, control), settings.weight_decay)


@phase("momentum")
def advance_momenta(
    grads: Sequence[Tensor],
    buffers: Sequence[Tensor],
    settings: HybridMuonConfig,
    control: StepControl,
    *,
    maximize: bool = False,
) -> tuple[list[Tensor], list[Tensor]]:
    """Do m ← β m + (1 − β) g in place; return the momenta and the gradients.

    Parameters are as in `muon_`; the results are in the wider of float32 and the momenta's dtype.
    """
    wide = moment_dtype(buffers[0].dtype)
    momenta = in_dtype(buffers, wide)  # the buffers themselves, unless they have 16 bits
    grads = prepare_gradients(grads, wide, control.scale, maximize=maximize)
    if control.skip is not None:
        # To skip the step, the momentum replaces the gradient and the learning rate is zero, so nothing changes.
        leave = control.skip > 0
        grads = [torch.where(leave, m, g) for m, g in zip(momenta, grads, strict=True)]
    torch._foreach_lerp_(momenta, grads, 1.0 - settings.momentum)
    if wide != buffers[0].dtype:
        torch._foreach_copy_(list(buffers), momenta)
    return momenta, grads


@phase("momentum")
def directions_of(momenta: list[Tensor], grads: list[Tensor], settings: HybridMuonConfig) -> list[Tensor]:
    """Return the matrices to orthogonalize, from the results of `advance_momenta`."""
    return list(torch._foreach_lerp(grads, momenta, settings.momentum)) if settings.nesterov else momenta


def effective_lr(lr: float | Tensor, control: StepControl) -> float | Tensor:
    """Return the learning rate; zero, on the device, for a skipped step."""
    return lr if control.skip is None else (control.skip > 0).logical_not().double() * lr


def _damping(
    scores: Sequence[Tensor],
    views: Sequence[MatrixView],
    momenta: Sequence[Tensor],
    grads: Sequence[Tensor],
    skip: Tensor | None,
) -> list[Tensor]:
    """Advance Magma's scores and return the damping factors, (batch, parts) per parameter."""
    pieces = (
        [piece for view, x in zip(views, several, strict=True) for piece in _vectors(view, x)]
        for several in (momenta, grads)
    )
    found = iter(magma.alignments(*pieces))
    several = ([next(found) for _ in view.block_shapes] for view in views)
    cosines = [parts[0] if len(parts) == 1 else torch.stack(parts, dim=1).reshape(-1) for parts in several]
    factors = magma.update_scores(scores, cosines, skip)
    return [factor.view(view.batch, -1) for factor, view in zip(factors, views, strict=True)]


def _vectors(view: MatrixView, x: Tensor) -> list[Tensor]:
    """Return the blocks of a tensor of the parameter's shape as vectors, each (batch, elements)."""
    return [piece.flatten(1) for piece in view.cut(x)] if view.axis else [x.reshape(view.batch, -1)]


def _updates(
    directions: Sequence[Tensor],
    views: Sequence[MatrixView],
    factors: Sequence[Tensor] | None,
    settings: HybridMuonConfig,
) -> list[Tensor]:
    """Orthogonalize the blocks of all parameters together; return scaled, damped updates (batch, rows, columns)."""
    blocks = [view.cut(u) for u, view in zip(directions, views, strict=True)]
    flat = [block for cut in blocks for block in cut]
    damping = None if factors is None else [column for factor in factors for column in factor.unbind(1)]
    polar = scaled_polar_factors(flat, settings, damping)
    remaining = iter(polar)
    return [view.join([next(remaining) for _ in cut]) for view, cut in zip(views, blocks, strict=True)]


@phase("orthogonalize")
def polar_factors(matrices: Sequence[Tensor], settings: HybridMuonConfig) -> list[Tensor]:
    """Orthogonalize batches (b, rows, columns) with the given settings."""
    if settings.deepmd_kit_arithmetic:
        return orthogonalize_as_deepmd_kit(matrices, gram=settings.enable_gram)
    results = list(matrices)
    schedules = [settings.schedule_of(x.shape) for x in matrices]
    for schedule in dict.fromkeys(schedules):
        chosen = [i for i, own in enumerate(schedules) if own == schedule]
        done = orthogonalize_matrices(
            [matrices[i] for i in chosen],
            schedule,
            settings.precision,
            gram=settings.enable_gram,
            flash=settings.flash_muon,
        )
        for i, o in zip(chosen, done, strict=True):
            results[i] = o
    return results


def scaled_polar_factors(
    matrices: Sequence[Tensor], settings: HybridMuonConfig, damping: Sequence[Tensor] | None = None
) -> list[Tensor]:
    """Orthogonalize batches (b, rows, columns), scale them by shape, and multiply them by `damping`, (b,) each."""
    polar = polar_factors(matrices, settings)
    scales = [update_scale((x.shape[1], x.shape[2]), settings) for x in matrices]
    if damping is None:
        torch._foreach_mul_(polar, scales)
    else:
        torch._foreach_mul_(polar, [x.view(-1, 1, 1) for x in torch._foreach_mul(list(damping), scales)])
    return polar


@phase("update")
def apply_updates(params: Sequence[Tensor], updates: Sequence[Tensor], lr: float | Tensor, weight_decay: float) -> None:
    """Do p ← p (1 − lr λ) − lr · update in place."""
    wide = moment_dtype(params[0].dtype)
    targets = in_dtype(params, wide)  # the parameters themselves, unless they have 16 bits
    if weight_decay:
        torch._foreach_mul_(targets, 1.0 - lr * weight_decay)
    # On a CPU, _foreach_add_ converts them on the fly, which saves memory.
    steps = in_dtype(updates, wide) if targets[0].is_cuda or isinstance(lr, Tensor) else updates
    steps = [u if u.shape == p.shape else u.reshape(p.shape) for u, p in zip(steps, params, strict=True)]
    if isinstance(lr, Tensor):
        torch._foreach_sub_(targets, torch._foreach_mul(steps, lr))
    else:
        torch._foreach_add_(targets, steps, alpha=-lr)
    if wide != params[0].dtype:
        torch._foreach_copy_(list(params), targets)
