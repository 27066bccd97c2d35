"""The Muon route on lists of tensors: momentum, rules, orthogonalization, scale, update."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from deepmd_muon.optim.config import DEEPMD_KIT, HybridMuonConfig, update_scale
from deepmd_muon.optim.polar import orthogonalize_matrices
from deepmd_muon.optim.polar.deepmd_kit import orthogonalize_as_deepmd_kit
from deepmd_muon.optim.routing.views import MatrixView
from deepmd_muon.optim.rules.interface import Blocks, BlockState, Input, MatrixRule
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
    # Before the directions are allocated: the sums take memory of their own.
    measured = _measure(rules, views, momenta, grads)
    directions = _cut_all(directions_of(momenta, grads, settings), views)
    inputs: dict[Input, Sequence[Tensor]] = {}
    for kind in inputs_of(rules):
        wide = grads if kind == "gradient" else in_dtype(params, momenta[0].dtype)
        inputs[kind] = _cut_all(wide, views)
    block_state = {
        key: [
            piece
            for x, view in zip(state[key], views, strict=True)
            for piece in tensor.cut(x, view)
        ]
        for key, tensor in tensors_of(rules).items()
        if key != MASTER
    }
    rate = effective_lr(lr, control)
    block_updates, new_state = update_blocks(
        directions,
        inputs=inputs,
        state=block_state,
        measured=measured,
        rules=rules,
        settings=settings,
        lr=rate,
    )
    for key, values in new_state.items():
        _store_state(block_state[key], values, control.skip)
    remaining = iter(block_updates)
    updates = [view.join([next(remaining) for _ in view.block_shapes]) for view in views]
    apply_updates(
        params,
        updates,
        lr=rate,
        weight_decay=settings.weight_decay,
        rules=rules,
        masters=state.get(MASTER),
    )


def _cut_all(tensors: Sequence[Tensor], views: Sequence[MatrixView]) -> list[Tensor]:
    """Return the blocks of all tensors in a row."""
    return [piece for x, view in zip(tensors, views, strict=True) for piece in view.cut(x)]


def _store_state(old: Sequence[Tensor], new: Sequence[Tensor], skip: Tensor | None) -> None:
    """Write the new state of blocks, unless `skip` is above 0 on its device."""
    if skip is not None:
        # One operation for all blocks.
        old_flat = torch.cat([x.reshape(-1) for x in old])
        new_flat = torch.cat([x.reshape(-1) for x in new])
        result = torch.where(skip > 0, old_flat, new_flat).split([x.numel() for x in old])
        new = [x.view(block.shape) for x, block in zip(result, old, strict=True)]
    torch._foreach_copy_(list(old), list(new))


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
        # To skip the step, the momentum replaces the gradient and the learning rate is zero, so
        # nothing changes.
        leave = control.skip > 0
        grads = [torch.where(leave, m, g) for m, g in zip(momenta, grads, strict=True)]
    torch._foreach_lerp_(momenta, grads, 1.0 - _momentum_of(settings))
    if wide != buffers[0].dtype:
        torch._foreach_copy_(list(buffers), momenta)
    return momenta, grads


@phase("momentum")
def directions_of(
    momenta: list[Tensor], grads: list[Tensor], settings: HybridMuonConfig
) -> list[Tensor]:
    """Return the matrices to orthogonalize, from the results of `advance_momenta`."""
    if not settings.nesterov:
        return momenta
    return list(torch._foreach_lerp(grads, momenta, _momentum_of(settings)))


def _momentum_of(settings: HybridMuonConfig) -> float:
    """Return the decay β of the momentum; 0 if a rule has a momentum of its own."""
    replaced = any(rule.replaces_momentum for rule in matrix_rules(settings))
    return 0.0 if replaced else settings.momentum


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
    momentum_vectors = _block_vectors(momenta, views)
    gradient_vectors = _block_vectors(grads, views)
    return {
        rule: rule.measure_whole(momentum_vectors, gradient_vectors) for rule in rules if rule.sums
    }


def _block_vectors(tensors: Sequence[Tensor], views: Sequence[MatrixView]) -> list[Tensor]:
    """Return the elements of all blocks, (batch, elements) each."""
    vectors = []
    for x, view in zip(tensors, views, strict=True):
        if view.axis:
            vectors += [piece.flatten(1) for piece in view.cut(x)]
        else:
            vectors.append(x.reshape(view.batch, -1))
    return vectors


def update_blocks(
    directions: Sequence[Tensor],
    inputs: Mapping[Input, Sequence[Tensor]],
    state: BlockState,
    measured: Mapping[MatrixRule, Sequence[Tensor]],
    rules: Sequence[MatrixRule],
    settings: HybridMuonConfig,
    lr: float | Tensor,
) -> tuple[list[Tensor], dict[str, Sequence[Tensor]]]:
    """Orthogonalize blocks of one device and dtype with the rules of their settings.

    Blocks are batches (b, rows, columns).

    `inputs`, of the same shapes, and `measured`, (b,) each, are given for the rules that need them.
    Return the scaled updates and the rules' new state; `state` stays unchanged.
    """
    new: dict[str, Sequence[Tensor]] = {}
    gradients = inputs.get("gradient", ())
    weights = inputs.get("weight", ())
    for rule in rules:
        read = _asked(rule, gradients, weights)
        directions, changed = rule.orient(Blocks(directions, *read), state)
        new.update(changed)
    polar: Sequence[Tensor] = polar_factors(directions, settings)
    for rule in rules:
        polar, changed = rule.transform(polar, directions, {**state, **new})
        new.update(changed)
    for rule in rules:
        new.update(rule.advance(polar, state, measured.get(rule)))
    updates: Sequence[Tensor] = scaled(list(polar), {**state, **new}, rules, settings)
    for rule in rules:
        _, read_weights = _asked(rule, gradients, weights)
        updates, changed = rule.finish(updates, read_weights, {**state, **new}, lr)
        new.update(changed)
    return list(updates), new


def _asked(
    rule: MatrixRule, gradients: Sequence[Tensor], weights: Sequence[Tensor]
) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
    """Return the gradients and the weights, each empty unless the rule asks for it."""
    return (
        gradients if "gradient" in rule.inputs else (),
        weights if "weight" in rule.inputs else (),
    )


def scaled(
    polar: list[Tensor], state: BlockState, rules: Sequence[MatrixRule], settings: HybridMuonConfig
) -> list[Tensor]:
    """Scale polar factors, in place, by shape and by the factors of rules with this state."""
    combined: Sequence[Any] = [update_scale((x.shape[1], x.shape[2]), settings) for x in polar]
    for rule in rules:
        factors = rule.factors(polar, state)
        if factors is not None:
            combined = torch._foreach_mul(factors, combined)
    torch._foreach_mul_(polar, list(combined))
    return polar


@phase("orthogonalize")
def polar_factors(matrices: Sequence[Tensor], settings: HybridMuonConfig) -> list[Tensor]:
    """Orthogonalize batches (b, rows, columns) with the given settings."""
    if settings.schedule == DEEPMD_KIT:
        return orthogonalize_as_deepmd_kit(matrices, gram=settings.enable_gram)
    results = list(matrices)
    by_schedule: dict[Any, list[int]] = defaultdict(list)
    for i, x in enumerate(matrices):
        by_schedule[settings.schedule_of(x.shape)].append(i)
    for schedule, members in by_schedule.items():
        polar = orthogonalize_matrices(
            [matrices[i] for i in members],
            schedule,
            settings.precision,
            gram=settings.enable_gram,
            flash=settings.flash_muon,
        )
        for i, o in zip(members, polar, strict=True):
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
    """Do p ← p (1 − lr λ) − lr · update in place, on master weights if there are any.

    Elements decay if all rules allow it.
    """
    wide = moment_dtype(params[0].dtype)
    # The parameters themselves, unless they have 16 bits.
    targets = in_dtype(params, wide) if masters is None else current_masters(masters, params)
    # On a CPU, _foreach_add_ converts them on the fly, which saves memory.
    steps = in_dtype(updates, wide) if targets[0].is_cuda or isinstance(lr, Tensor) else updates
    steps = [
        u if u.shape == p.shape else u.reshape(p.shape) for u, p in zip(steps, params, strict=True)
    ]
    if weight_decay:
        _decay(targets, steps, 1.0 - lr * weight_decay, rules)
    if isinstance(lr, Tensor):
        torch._foreach_sub_(targets, torch._foreach_mul(steps, lr))
    else:
        torch._foreach_add_(targets, steps, alpha=-lr)
    if masters is not None:
        round_masters(masters, targets, params)
    elif wide != params[0].dtype:
        torch._foreach_copy_(list(params), targets)


def _decay(
    targets: list[Tensor], steps: Sequence[Tensor], factor: Any, rules: Sequence[MatrixRule]
) -> None:
    """Multiply the elements of `targets` by `factor` that all rules allow to decay."""
    rule_masks = [rule.decays(targets, steps) for rule in rules]
    restricting = [masks for masks in rule_masks if masks is not None]
    if not restricting:
        torch._foreach_mul_(targets, factor)
        return
    decayed = torch._foreach_mul(targets, factor)
    for p, p_decayed, *masks in zip(targets, decayed, *restricting, strict=True):
        mask = torch.stack(masks).all(dim=0) if len(masks) > 1 else masks[0]
        p.copy_(torch.where(mask, p_decayed, p))
