"""The Muon route on lists of tensors: momentum, rules, orthogonalization, scale, update."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from deepmd_muon.optim.config import DEEPMD_KIT, HybridMuonConfig, update_scale
from deepmd_muon.optim.polar import orthogonalize_matrices
from deepmd_muon.optim.polar.deepmd_kit import orthogonalize_as_deepmd_kit
from deepmd_muon.optim.routing.views import MatrixView
from deepmd_muon.optim.rules.interface import BlockState, Input, MatrixRule
from deepmd_muon.optim.rules.master_weights import MASTER, current_masters, round_masters
from deepmd_muon.optim.rules.registry import inputs_of, matrix_rules, tensors_of
from deepmd_muon.optim.torch_hooks import phase
from deepmd_muon.optim.update.adam import moment_dtype
from deepmd_muon.optim.update.gradients import (
    StepControl,
    gradients_of,
    in_dtype,
    prepare_gradients,
)


def muon_(
    params: Sequence[Tensor],
    buffers: Sequence[Tensor],
    state: Mapping[str, Sequence[Tensor]],
    views: Sequence[MatrixView],
    *,
    lr: float | Tensor,
    settings: HybridMuonConfig,
    control: StepControl,
    maximize: bool = False,
) -> None:
    """Take one Muon step in place on real tensors of one device and dtype, with gradients.

    16-bit parameters are updated in float32 and rounded once.

    Parameters
    ----------
    buffers
        Momenta, of the parameters' shapes and dtype.
    state
        State tensors of the settings' rules by key, one per parameter; changed in place.
    lr
        Learning rate; a tensor is read on its device.
    control
        Whether to skip the step, and the gradients' scale; on the parameters' device.
    """
    grads = gradients_of(params)
    momenta, grads = advance_momenta(grads, buffers, settings, control, maximize=maximize)
    rules = matrix_rules(settings)
    masters = state.get(MASTER)
    measured = _measure(rules, views, momenta, grads)
    blocks = [
        view.cut(u) for u, view in zip(directions_of(momenta, grads, settings), views, strict=True)
    ]
    inputs: dict[Input, Sequence[Tensor]] = {}
    for kind in inputs_of(rules):
        wanted = grads if kind == "gradient" else in_dtype(params, momenta[0].dtype)
        inputs[kind] = [
            piece for x, view in zip(wanted, views, strict=True) for piece in view.cut(x)
        ]
    of_blocks = {
        key: [
            piece
            for x, view in zip(state[key], views, strict=True)
            for piece in tensor.cut(x, view)
        ]
        for key, tensor in tensors_of(rules).items()
        if key != MASTER
    }
    directions = [block for cut in blocks for block in cut]
    rate = effective_lr(lr, control)
    done, new = update_blocks(directions, inputs, of_blocks, measured, rules, settings, rate)
    for key, values in new.items():
        if control.skip is not None:  # on the device: the old state stays
            before, after = (
                torch.cat([x.reshape(-1) for x in some]) for some in (of_blocks[key], values)
            )
            kept = torch.where(control.skip > 0, before, after).split(
                [x.numel() for x in of_blocks[key]]
            )
            values = [x.view(old.shape) for x, old in zip(kept, of_blocks[key], strict=True)]
        torch._foreach_copy_(of_blocks[key], list(values))
    remaining = iter(done)
    updates = [
        view.join([next(remaining) for _ in cut]) for view, cut in zip(views, blocks, strict=True)
    ]
    apply_updates(params, updates, rate, settings.weight_decay, rules, masters)


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
def directions_of(
    momenta: list[Tensor], grads: list[Tensor], settings: HybridMuonConfig
) -> list[Tensor]:
    """Return the matrices to orthogonalize, from the results of `advance_momenta`."""
    return (
        list(torch._foreach_lerp(grads, momenta, settings.momentum))
        if settings.nesterov
        else momenta
    )


def effective_lr(lr: float | Tensor, control: StepControl) -> float | Tensor:
    """Return the learning rate; zero, on the device, for a skipped step."""
    return lr if control.skip is None else (control.skip > 0).logical_not().double() * lr


def _measure(
    rules: Sequence[MatrixRule],
    views: Sequence[MatrixView],
    momenta: Sequence[Tensor],
    grads: Sequence[Tensor],
) -> dict[MatrixRule, list[Tensor]]:
    """Return the statistics of all blocks that rules need, (batch,) each."""
    if not any(rule.sums for rule in rules):
        return {}
    vectors: list[list[Tensor]] = [
        [],
        [],
    ]  # the blocks of momenta and gradients, each (batch, elements)
    for found, several in zip(vectors, (momenta, grads), strict=True):
        for view, x in zip(views, several, strict=True):
            found += (
                [piece.flatten(1) for piece in view.cut(x)]
                if view.axis
                else [x.reshape(view.batch, -1)]
            )
    return {rule: rule.measure_whole(*vectors) for rule in rules if rule.sums}


def update_blocks(
    directions: Sequence[Tensor],
    inputs: Mapping[Input, Sequence[Tensor]],
    state: BlockState,
    measured: Mapping[MatrixRule, Sequence[Tensor]],
    rules: Sequence[MatrixRule],
    settings: HybridMuonConfig,
    lr: float | Tensor,
) -> tuple[list[Tensor], dict[str, Sequence[Tensor]]]:
    """Orthogonalize blocks, batches (b, rows, columns) of one device and dtype, with the rules of their settings.

    `inputs`, of the same shapes, and `measured`, (b,) each, are given for the rules that need them. Return the scaled
    updates and the rules' new state; `state` stays unchanged.
    """
    new: dict[str, Sequence[Tensor]] = {}
    for rule in rules:
        directions, prepared = rule.prepare(directions, inputs.get("gradient", ()), state)
        new.update(prepared)
    polar = polar_factors(directions, settings)
    for rule in rules:
        new.update(rule.advance(polar, state, measured.get(rule)))
    updates: Sequence[Tensor] = scaled(polar, {**state, **new}, rules, settings)
    for rule in rules:
        if "weight" in rule.inputs:
            updates = rule.constrain(updates, inputs["weight"], lr)
    return list(updates), new


def scaled(
    polar: list[Tensor], state: BlockState, rules: Sequence[MatrixRule], settings: HybridMuonConfig
) -> list[Tensor]:
    """Scale polar factors by shape and by the factors of rules with this state, in place."""
    scales = [update_scale((x.shape[1], x.shape[2]), settings) for x in polar]
    found = [factors for rule in rules if (factors := rule.factors(polar, state)) is not None]
    if not found:
        torch._foreach_mul_(polar, scales)
        return polar
    # The factors are smaller, so scales multiply them first.
    combined = torch._foreach_mul(found[0], scales)
    for factors in found[1:]:
        combined = torch._foreach_mul(combined, factors)
    torch._foreach_mul_(polar, list(combined))
    return polar


@phase("orthogonalize")
def polar_factors(matrices: Sequence[Tensor], settings: HybridMuonConfig) -> list[Tensor]:
    """Orthogonalize batches (b, rows, columns) with the given settings."""
    if settings.schedule == DEEPMD_KIT:
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


@phase("update")
def apply_updates(
    params: Sequence[Tensor],
    updates: Sequence[Tensor],
    lr: float | Tensor,
    weight_decay: float,
    rules: Sequence[MatrixRule] = (),
    masters: Sequence[Tensor] | None = None,
) -> None:
    """Do p ← p (1 − lr λ) − lr · update in place, with decay where the rules allow it; on master weights, if any."""
    wide = moment_dtype(params[0].dtype)
    # The parameters themselves, unless they have 16 bits.
    targets = in_dtype(params, wide) if masters is None else current_masters(masters, params)
    # On a CPU, _foreach_add_ converts them on the fly, which saves memory.
    steps = in_dtype(updates, wide) if targets[0].is_cuda or isinstance(lr, Tensor) else updates
    steps = [
        u if u.shape == p.shape else u.reshape(p.shape) for u, p in zip(steps, params, strict=True)
    ]
    if weight_decay:
        kept: Any = 1.0 - lr * weight_decay
        chosen = [where for rule in rules if (where := rule.decays(targets, steps)) is not None]
        if not chosen:
            torch._foreach_mul_(targets, kept)
        else:
            for p, q, *masks in zip(
                targets, torch._foreach_mul(targets, kept), *chosen, strict=True
            ):
                p.copy_(
                    torch.where(torch.stack(masks).all(dim=0) if len(masks) > 1 else masks[0], q, p)
                )
    if isinstance(lr, Tensor):
        torch._foreach_sub_(targets, torch._foreach_mul(steps, lr))
    else:
        torch._foreach_add_(targets, steps, alpha=-lr)
    if masters is not None:
        round_masters(masters, targets, params)
    elif wide != params[0].dtype:
        torch._foreach_copy_(list(params), targets)
