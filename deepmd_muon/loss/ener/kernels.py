"""Triton kernels of the usual loss: mean squares of energy, force and virial, one launch forward and one backward.

`EnergyLoss.compare` defines the result; its terms take some thirty launches of torch's operations.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepmd_muon.loss.ener.settings import LABELS, EnerLossSettings
from deepmd_muon.loss.interface import Labels

BLOCK = 1024
#: Columns of the table of a loss, a row a term: limit, start − limit, factor of the mean square, of its root if shown.
COLUMNS = tl.constexpr(4)


@triton.jit
def _errors(found, wanted, i, count, width, stride, present, mask, atomic: tl.constexpr):
    """Return which elements `i` count, and found − wanted, 0 where they do not.

    Rows of `wanted`, one a frame and `width` long, are `stride` apart. `present` tells which frames count, `mask`
    which atoms do in an `atomic` term; None stands for all.
    """
    row, counted = i // width, i < count
    if present is not None:
        counted &= tl.load(present + row, counted, 0) != 0
    if atomic and mask is not None:
        counted &= tl.load(mask + i // 3, counted, 0) != 0
    theirs = tl.load(wanted + row * stride + i % width, counted, 0.0)
    return counted, tl.load(found + i, counted, 0.0) - theirs


@triton.jit
def _per_atom(natoms, i, count, width, atomic: tl.constexpr):
    """Return 1/N of the frames of elements `i`; 1 where the table holds it, and for atomic terms."""
    per_atom = tl.full(i.shape, 1.0, tl.float64)
    if not atomic and natoms is not None:
        per_atom /= tl.maximum(tl.load(natoms + i // width, i < count, 1), 1).to(tl.float64)
    return per_atom


@triton.jit
def _term(
    out, table, fraction, mask, natoms, term: tl.constexpr, found, wanted, count, width, stride, present,
    terms: tl.constexpr, atomic: tl.constexpr, intensive: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    """Store the error that a term shows and the number of elements that count; return its part of the loss."""
    total = tl.zeros((block,), tl.float64)
    shown = tl.zeros((block,), tl.float64)
    often = tl.zeros((block,), tl.float64)
    for begin in range(0, count, block):
        i = begin + tl.arange(0, block)
        counted, error = _errors(found, wanted, i, count, width, stride, present, mask, atomic)
        per_atom = _per_atom(natoms, i, count, width, atomic)
        scaled = error * per_atom
        shown += scaled * scaled
        total += scaled * (scaled if intensive else error)
        often += counted.to(tl.float64)
    number = tl.maximum(tl.sum(often), 1.0)
    row = table + term * COLUMNS
    tl.store(out + 1 + term, tl.sqrt(tl.sum(shown) / number) * tl.load(row + 3))
    tl.store(out + 2 + terms + term, number)
    return (tl.load(row) + tl.load(row + 1) * fraction) * (
        tl.sum(total) / number * tl.load(row + 2)
    )


@triton.jit(do_not_specialize=["count0", "count1", "count2"])
def _loss_kernel(
    out, table, fraction, mask, natoms,
    found0, wanted0, count0, width0, stride0, present0,
    found1, wanted1, count1, width1, stride1, present1,
    found2, wanted2, count2, width2, stride2, present2,
    terms: tl.constexpr, force: tl.constexpr, intensive: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    """Store the loss, the shown error of each term, the root of the loss, and the elements of each term."""
    share = tl.load(fraction)
    loss = _term(
        out, table, share, mask, natoms, 0, found0, wanted0, count0, width0, stride0, present0,
        terms, force == 0, intensive, block,
    )  # fmt: skip
    if terms > 1:
        loss += _term(
            out, table, share, mask, natoms, 1, found1, wanted1, count1, width1, stride1, present1,
            terms, force == 1, intensive, block,
        )  # fmt: skip
    if terms > 2:
        loss += _term(
            out, table, share, mask, natoms, 2, found2, wanted2, count2, width2, stride2, present2,
            terms, force == 2, intensive, block,
        )  # fmt: skip
    tl.store(out, loss)
    tl.store(out + 1 + terms, tl.sqrt(loss))


@triton.jit
def _pull(
    target, table, fraction, scale, numbers, mask, natoms, term, i, found, wanted, count, width, stride, present,
    atomic: tl.constexpr, intensive: tl.constexpr,
):  # fmt: skip
    """Store the gradient of the loss with respect to some elements of a term's prediction."""
    row = table + term * COLUMNS
    weight = (tl.load(row) + tl.load(row + 1) * fraction) * tl.load(row + 2)
    _, error = _errors(found, wanted, i, count, width, stride, present, mask, atomic)
    per_atom = _per_atom(natoms, i, count, width, atomic)
    error *= per_atom * (per_atom if intensive else 1.0)
    tl.store(target + i, (scale * weight * 2.0 / tl.load(numbers + term)) * error, i < count)


@triton.jit(do_not_specialize=["count0", "count1", "count2"])
def _gradient_kernel(
    target, table, fraction, cotangent, numbers, mask, natoms,
    found0, wanted0, count0, width0, stride0, present0,
    found1, wanted1, count1, width1, stride1, present1,
    found2, wanted2, count2, width2, stride2, present2,
    force: tl.constexpr, intensive: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    """Store the gradients of all terms one after the other; the second axis of the grid is the term."""
    term = tl.program_id(1)
    i = tl.program_id(0) * block + tl.arange(0, block)
    share, scale = tl.load(fraction), tl.load(cotangent)
    if term == 0:
        _pull(
            target, table, share, scale, numbers, mask, natoms, 0, i,
            found0, wanted0, count0, width0, stride0, present0, force == 0, intensive,
        )  # fmt: skip
    elif term == 1:
        _pull(
            target + count0, table, share, scale, numbers, mask, natoms, 1, i,
            found1, wanted1, count1, width1, stride1, present1, force == 1, intensive,
        )  # fmt: skip
    else:
        _pull(
            target + count0 + count1, table, share, scale, numbers, mask, natoms, 2, i,
            found2, wanted2, count2, width2, stride2, present2, force == 2, intensive,
        )  # fmt: skip


def evaluate(
    settings: EnerLossSettings,
    prediction: Mapping[str, Tensor],
    labels: Labels,
    lr_fraction: Tensor,
    natoms: int,
    mask: Tensor | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return loss and metrics as `EnergyLoss.compare` does, where `fits_kernels` says so."""
    quantities = [LABELS[term] for term in settings.names]
    # With a mask the number of atoms differs between frames, and the kernels read it.
    table = _table(settings, natoms if mask is None else 1, prediction["energy"].device)
    pairs = [x for name in quantities for x in (prediction[name], labels[name])]
    present = [labels.get(f"find_{name}") for name in quantities]
    mask = mask if mask is None else mask.contiguous()
    value, errors = FusedLoss.apply(settings, table, lr_fraction, mask, present, *pairs)
    names = [*(f"rmse_{term}" for term in settings.names), "rmse"]
    return value, dict(zip(names, errors.unbind(), strict=True))


@cache  # graphs read them as long as they exist; there is one for each number of atoms
def _table(settings: EnerLossSettings, natoms: int, device: torch.device) -> Tensor:
    """Return the rows that the kernels read, one for each term."""
    rows = []
    for term in settings.names:
        limit, start = (
            getattr(settings, f"limit_pref_{term}"),
            getattr(settings, f"start_pref_{term}"),
        )
        per_atom = 1.0 if term == "f" else 1.0 / natoms
        rows.append(
            [
                limit,
                start - limit,
                per_atom * per_atom if settings.intensive_ener_virial else per_atom,
                per_atom,
            ]
        )
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
        present: list[Tensor | None],
        *pairs: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Return a scalar and `(terms + 1,)`, float64; `pairs` hold prediction and label of each term in turn."""
        frames, count = pairs[1].shape[0], len(present)
        straight = [
            x.contiguous() if k % 2 == 0 else x.reshape(frames, -1) for k, x in enumerate(pairs)
        ]
        natoms = None if mask is None else mask.sum(1)
        ctx.settings = settings
        terms, options = _arguments(settings, mask, natoms, present, straight)
        # the loss, the shown error of each term, the root of the loss, and the elements of each term that count
        out = table.new_empty(2 * count + 2)
        _loss_kernel[(1,)](out, table, fraction, *terms, terms=count, num_warps=8, **options)
        value, errors, numbers = out.split([1, count + 1, count])
        ctx.save_for_backward(table, fraction, numbers, mask, natoms, *present, *straight)
        ctx.mark_non_differentiable(errors)
        return value[0], errors

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, cotangent: Tensor, _: Tensor) -> Any:
        """Return the gradient of every prediction."""
        table, fraction, numbers, mask, natoms, *rest = ctx.saved_tensors
        each = len(rest) // 3
        terms, options = _arguments(ctx.settings, mask, natoms, rest[:each], rest[each:])
        predictions = rest[each::2]
        sizes = [x.numel() for x in predictions]
        target = table.new_empty(sum(sizes))
        grid = (triton.cdiv(max(sizes), BLOCK), each)
        _gradient_kernel[grid](target, table, fraction, cotangent, numbers, *terms, **options)
        found = [
            part.view(x.shape) for part, x in zip(target.split(sizes), predictions, strict=True)
        ]
        return (*(None,) * 5, *(x for gradient in found for x in (gradient, None)))


def _arguments(
    settings: EnerLossSettings,
    mask: Tensor | None,
    natoms: Tensor | None,
    present: Sequence[Tensor | None],
    straight: Sequence[Tensor],
) -> tuple[list[Tensor | int | None], dict[str, Any]]:
    """Return the arguments that both kernels share, and the options known when they are compiled.

    Parameters
    ----------
    settings
        Their terms, one to three.
    mask, natoms
        Which atoms count `(nframes, natoms)`, bool, and their number in each frame `(nframes,)`; None for all, where
        the table holds 1/N.
    present
        Which frames count in each term `(nframes,)`, bool; None for all.
    straight
        Contiguous prediction, and label `(nframes, width)` with contiguous rows, of each term in turn, float64.
    """
    found: list[Tensor | int | None] = [mask, natoms]
    terms = [*zip(straight[::2], straight[1::2], present, strict=True)]
    for prediction, label, frames in [
        *terms,
        *terms[:1] * (3 - len(terms)),
    ]:  # missing ones repeat the first
        found += [prediction, label, prediction.numel(), label.shape[1], label.stride(0), frames]
    force = settings.names.index("f") if "f" in settings.names else len(terms)
    return found, {"force": force, "intensive": settings.intensive_ener_virial, "block": BLOCK}
