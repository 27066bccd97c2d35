"""Triton kernels of the usual loss: mean squares of energy, force and virial.

One launch computes the loss, another its gradient; torch's operations take some thirty. A term
compares a prediction x with a label y, `count` elements each, `width` of them in a frame:

    loss   = weight · factor · ⟨s·d⟩        d = x − y, s = d/N  (with `intensive` ⟨s·s⟩)
    shown  = shown_factor · √⟨s·s⟩          the error that `lcurve.out` shows
    weight = limit + (start − limit) · lr/start_lr
    ∂loss/∂x = weight · factor · 2·s / number

⟨⟩ is the mean over the elements that count, `number` of them, and N the number of atoms in the
frame. Without padding all frames have the same N: then s = d, and the factors hold N.

Reference: `EnergyLoss.compare`. `test_loss_kernels` and `test_gradients_of_the_loss_kernels`
compare both.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepmd_muon.loss.ener.settings import LABELS, EnerLossSettings
from deepmd_muon.loss.interface import ComparedAtoms, Labels

BLOCK = 1024  # elements that a program compares at a time
_MOST_TERMS = 3
#: Columns of the table of a loss, a row a term: limit, start − limit, factor, shown_factor.
COLUMNS = tl.constexpr(4)

# Sizes differ between batches. Triton would compile each kernel again for sizes that 16 divides;
# it can be told not to only for arguments that are no part of a tuple.
_SIZES = [f"{size}{term}" for size in ("count", "width", "stride") for term in range(_MOST_TERMS)]


# ----- what the kernels take ---------------------------------------------------------------------


class TermTensors(NamedTuple):
    """Tensors of a term."""

    predicted: Tensor  # (count,) float64, contiguous
    label: Tensor  # (nframes, width) float64; rows are contiguous and `stride` apart
    frames: Tensor | None  # (nframes,) bool: frames that have the label; None for all


class CountedAtoms(NamedTuple):
    """Which atoms count; both None if all do."""

    mask: Tensor | None  # (nframes, natoms) bool
    counts: Tensor | None  # (nframes,) int64


# ----- kernels -----------------------------------------------------------------------------------


@triton.jit
def _errors(tensors, mask, i, count, width, stride, atomic: tl.constexpr):
    """Return which elements `i` count, and their d; d is 0 where they do not."""
    frame = i // width
    counted = i < count
    if tensors.frames is not None:
        counted &= tl.load(tensors.frames + frame, counted, 0) != 0
    if atomic and mask is not None:
        counted &= tl.load(mask + i // 3, counted, 0) != 0  # three components an atom
    predicted = tl.load(tensors.predicted + i, counted, 0.0)
    label = tl.load(tensors.label + frame * stride + i % width, counted, 0.0)
    return counted, predicted - label


@triton.jit
def _per_atom(natoms, i, count, width, atomic: tl.constexpr):
    """Return 1/N of the frames of elements `i`; 1 if the table holds it, and for atomic terms."""
    per_atom = tl.full(i.shape, 1.0, tl.float64)
    if not atomic and natoms is not None:
        counts = tl.load(natoms + i // width, i < count, 1)
        per_atom /= tl.maximum(counts, 1).to(tl.float64)
    return per_atom


@triton.jit(do_not_specialize=_SIZES)
def _loss_kernel(
    out,  # (2·n_terms + 2,): the loss, the error of each term, √loss, the number of each term
    table,  # (n_terms, COLUMNS)
    fraction,  # (): lr/start_lr
    terms,  # a tuple of `TermTensors`
    atoms,  # `CountedAtoms`
    count0,
    count1,
    count2,
    width0,
    width1,
    width2,
    stride0,
    stride1,
    stride2,
    n_terms: tl.constexpr,
    force: tl.constexpr,  # the number of the atomic term; n_terms if there is none
    intensive: tl.constexpr,
    block: tl.constexpr,
):
    """Compute the loss and what its metrics and its gradient need, in a single program."""
    counts = (count0, count1, count2)
    widths = (width0, width1, width2)
    strides = (stride0, stride1, stride2)
    share = tl.load(fraction)
    loss = 0.0
    for term in tl.static_range(n_terms):
        count = counts[term]
        width = widths[term]
        loss_sum = tl.zeros((block,), tl.float64)
        shown_sum = tl.zeros((block,), tl.float64)
        counted_sum = tl.zeros((block,), tl.float64)
        for begin in range(0, count, block):
            i = begin + tl.arange(0, block)
            counted, d = _errors(
                terms[term],
                atoms.mask,
                i,
                count=count,
                width=width,
                stride=strides[term],
                atomic=term == force,
            )
            s = d * _per_atom(atoms.counts, i, count, width, atomic=term == force)
            shown_sum += s * s
            loss_sum += s * (s if intensive else d)
            counted_sum += counted.to(tl.float64)
        number = tl.maximum(tl.sum(counted_sum), 1.0)  # if nothing counts: 0, not 0/0
        row = table + term * COLUMNS
        weight = tl.load(row) + tl.load(row + 1) * share
        loss += weight * (tl.sum(loss_sum) / number * tl.load(row + 2))
        tl.store(out + 1 + term, tl.sqrt(tl.sum(shown_sum) / number) * tl.load(row + 3))
        tl.store(out + 2 + n_terms + term, number)
    tl.store(out, loss)
    tl.store(out + 1 + n_terms, tl.sqrt(loss))


@triton.jit(do_not_specialize=_SIZES)
def _gradient_kernel(
    gradients,  # of all predictions, one term after the other
    table,  # (n_terms, COLUMNS)
    fraction,  # (): lr/start_lr
    cotangent,  # (): derivative with respect to the loss
    numbers,  # (n_terms,)
    terms,
    atoms,
    count0,
    count1,
    count2,
    width0,
    width1,
    width2,
    stride0,
    stride1,
    stride2,
    n_terms: tl.constexpr,
    force: tl.constexpr,
    intensive: tl.constexpr,
    block: tl.constexpr,
):
    """Store the gradient of one block of one term; the second axis of the grid is the term."""
    counts = (count0, count1, count2)
    widths = (width0, width1, width2)
    strides = (stride0, stride1, stride2)
    i = tl.program_id(0) * block + tl.arange(0, block)
    share = tl.load(fraction)
    scale = tl.load(cotangent)
    begin = 0  # of the term's gradients
    for term in tl.static_range(n_terms):
        count = counts[term]
        if tl.program_id(1) == term:
            width = widths[term]
            _, d = _errors(
                terms[term],
                atoms.mask,
                i,
                count=count,
                width=width,
                stride=strides[term],
                atomic=term == force,
            )
            per_atom = _per_atom(atoms.counts, i, count, width, atomic=term == force)
            slope = d * (per_atom * (per_atom if intensive else 1.0))
            row = table + term * COLUMNS
            weight = (tl.load(row) + tl.load(row + 1) * share) * tl.load(row + 2)
            factor = scale * weight * 2.0 / tl.load(numbers + term)
            tl.store(gradients + begin + i, factor * slope, i < count)
        begin += count


# ----- the loss ----------------------------------------------------------------------------------


def evaluate(
    settings: EnerLossSettings,
    prediction: Mapping[str, Tensor],
    labels: Labels,
    lr_fraction: Tensor,
    atoms: ComparedAtoms,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return loss and metrics as `EnergyLoss.compare` does, if its `fits_kernels` allows it."""
    quantities = [LABELS[term] for term in settings.names]
    # With padding the number of atoms differs between frames, and the kernels read it.
    mask = atoms.mask
    natoms = atoms.natoms if mask is None else 1
    table = _table(settings, natoms, prediction["energy"].device)
    value, errors = FusedLoss.apply(
        settings,
        table,
        lr_fraction,
        None if mask is None else mask.contiguous(),
        [labels[quantity] for quantity in quantities],
        [labels.get(f"find_{quantity}") for quantity in quantities],
        *(prediction[quantity] for quantity in quantities),
    )
    names = [*(f"rmse_{term}" for term in settings.names), "rmse"]
    return value, dict(zip(names, errors.unbind(), strict=True))


@cache  # captured graphs read a table as long as they exist; there is one for each number of atoms
def _table(settings: EnerLossSettings, natoms: int, device: torch.device) -> Tensor:
    """Return the rows that the kernels read, one for each term."""
    rows = []
    for term in settings.names:
        limit = getattr(settings, f"limit_pref_{term}")
        start = getattr(settings, f"start_pref_{term}")
        per_atom = 1.0 if term == "f" else 1.0 / natoms
        factor = per_atom * per_atom if settings.intensive_ener_virial else per_atom
        rows.append([limit, start - limit, factor, per_atom])
    return torch.tensor(rows, dtype=torch.float64, device="cpu").to(device)


class FusedLoss(torch.autograd.Function):
    """The loss, and without gradient the error that each term shows and the root of the loss."""

    @staticmethod
    def forward(
        ctx: Any,
        settings: EnerLossSettings,
        table: Tensor,
        fraction: Tensor,
        mask: Tensor | None,
        labels: Sequence[Tensor],
        frames: Sequence[Tensor | None],
        *predictions: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Return a scalar and `(terms + 1,)`, float64."""
        n_terms = len(predictions)
        nframes = labels[0].shape[0]
        natoms = None if mask is None else mask.sum(1)
        straight = [prediction.contiguous() for prediction in predictions]
        rows = [label.reshape(nframes, -1) for label in labels]
        out = table.new_empty(2 * n_terms + 2)
        options = _shared_options(settings, CountedAtoms(mask, natoms), straight, rows, frames)
        _loss_kernel[(1,)](out, table, fraction, num_warps=8, **options)
        value, errors, numbers = out.split([1, n_terms + 1, n_terms])
        ctx.settings = settings
        ctx.save_for_backward(table, fraction, numbers, mask, natoms, *straight, *rows, *frames)
        ctx.mark_non_differentiable(errors)
        return value[0], errors

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, cotangent: Tensor, _: Tensor) -> Any:
        """Return the gradient of every prediction."""
        table, fraction, numbers, mask, natoms, *each_term = ctx.saved_tensors
        n_terms = len(each_term) // 3
        predictions = each_term[:n_terms]
        labels = each_term[n_terms : 2 * n_terms]
        frames = each_term[2 * n_terms :]
        sizes = [prediction.numel() for prediction in predictions]
        gradients = table.new_empty(sum(sizes))
        options = _shared_options(
            ctx.settings, CountedAtoms(mask, natoms), predictions, labels, frames
        )
        grid = (triton.cdiv(max(sizes), BLOCK), n_terms)
        _gradient_kernel[grid](gradients, table, fraction, cotangent, numbers, **options)
        by_prediction = [
            gradient.view(prediction.shape)
            for gradient, prediction in zip(gradients.split(sizes), predictions, strict=True)
        ]
        return None, None, None, None, None, None, *by_prediction


def _shared_options(
    settings: EnerLossSettings,
    atoms: CountedAtoms,
    predictions: Sequence[Tensor],
    labels: Sequence[Tensor],
    frames: Sequence[Tensor | None],
) -> dict[str, Any]:
    """Return the arguments that both kernels share; a term that does not exist has size 0."""
    n_terms = len(predictions)
    options: dict[str, Any] = dict.fromkeys(_SIZES, 0)
    for term, (prediction, label) in enumerate(zip(predictions, labels, strict=True)):
        options[f"count{term}"] = prediction.numel()
        options[f"width{term}"] = label.shape[1]
        options[f"stride{term}"] = label.stride(0)
    return {
        **options,
        "terms": tuple(map(TermTensors, predictions, labels, frames)),
        "atoms": atoms,
        "n_terms": n_terms,
        "force": settings.names.index("f") if "f" in settings.names else n_terms,
        "intensive": settings.intensive_ener_virial,
        "block": BLOCK,
    }
