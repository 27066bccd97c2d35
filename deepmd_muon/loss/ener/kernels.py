"""Triton kernels of the usual loss: mean squares of energy, force and virial, one launch forward and one backward.

`EnergyLoss.compare` defines the result; its terms take some thirty launches of torch's operations.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, misc, untyped-decorator"
# ruff: noqa: ANN001, ANN202
# Reason for both: Triton compiles these functions. Their arguments are of its own language, not of Python's, and a
# branch that is decided at compile time must be a statement.

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK = 1024
#: Columns of the table of a loss, a row a term: limit, start − limit, factor of the mean square, of its root if shown.
COLUMNS = tl.constexpr(4)


@triton.jit
def _differences(found, wanted, i, count, width, stride):
    """Return the elements `i` of found − wanted; rows of `wanted`, `width` long, are `stride` apart."""
    inside = i < count
    theirs = tl.load(wanted + (i // width) * stride + i % width, inside, 0.0)
    return tl.load(found + i, inside, 0.0) - theirs


@triton.jit
def _term(out, table, fraction, term: tl.constexpr, found, wanted, count, width, stride, block: tl.constexpr):
    """Store the error that a term shows, and return its part of the loss."""
    total = tl.zeros((block,), tl.float64)
    for begin in range(0, count, block):
        error = _differences(found, wanted, begin + tl.arange(0, block), count, width, stride)
        total += error * error
    square = tl.sum(total) / count.to(tl.float64)
    row = table + term * COLUMNS
    tl.store(out + 1 + term, tl.sqrt(square) * tl.load(row + 3))
    return (tl.load(row) + tl.load(row + 1) * fraction) * (square * tl.load(row + 2))


@triton.jit(do_not_specialize=["count0", "count1", "count2"])
def _loss_kernel(
    out, table, fraction,
    found0, wanted0, count0, width0, stride0,
    found1, wanted1, count1, width1, stride1,
    found2, wanted2, count2, width2, stride2,
    terms: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    """Store the loss, the shown error of each term, and the root of the loss."""
    share = tl.load(fraction)
    loss = _term(out, table, share, 0, found0, wanted0, count0, width0, stride0, block)
    if terms > 1:
        loss += _term(out, table, share, 1, found1, wanted1, count1, width1, stride1, block)
    if terms > 2:
        loss += _term(out, table, share, 2, found2, wanted2, count2, width2, stride2, block)
    tl.store(out, loss)
    tl.store(out + 1 + terms, tl.sqrt(loss))


@triton.jit
def _pull(target, table, fraction, scale, term, i, found, wanted, count, width, stride):
    """Store the gradient of the loss with respect to some elements of a term's prediction."""
    row = table + term * COLUMNS
    weight = (tl.load(row) + tl.load(row + 1) * fraction) * tl.load(row + 2)
    error = _differences(found, wanted, i, count, width, stride)
    tl.store(target + i, (scale * weight * 2.0 / count.to(tl.float64)) * error, i < count)


@triton.jit(do_not_specialize=["count0", "count1", "count2"])
def _gradient_kernel(
    target, table, fraction, cotangent,
    found0, wanted0, count0, width0, stride0,
    found1, wanted1, count1, width1, stride1,
    found2, wanted2, count2, width2, stride2,
    block: tl.constexpr,
):  # fmt: skip
    """Store the gradients of all terms one after the other; the second axis of the grid is the term."""
    term = tl.program_id(1)
    i = tl.program_id(0) * block + tl.arange(0, block)
    share, scale = tl.load(fraction), tl.load(cotangent)
    if term == 0:
        _pull(target, table, share, scale, 0, i, found0, wanted0, count0, width0, stride0)
    elif term == 1:
        _pull(target + count0, table, share, scale, 1, i, found1, wanted1, count1, width1, stride1)
    else:
        _pull(target + count0 + count1, table, share, scale, 2, i, found2, wanted2, count2, width2, stride2)


def _arguments(pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> list[torch.Tensor | int]:
    """Return tensors, counts, widths and strides of three terms; missing ones repeat the first."""
    found: list[torch.Tensor | int] = []
    for prediction, label in [*pairs, *pairs[:1] * (3 - len(pairs))]:
        found += [prediction, label, prediction.numel(), label.shape[1], label.stride(0)]
    return found


def loss_of(
    pairs: list[tuple[torch.Tensor, torch.Tensor]], table: torch.Tensor, fraction: torch.Tensor
) -> torch.Tensor:
    """Return the loss, the shown error of each term, and the root of the loss, float64 `(terms + 2,)`.

    Parameters
    ----------
    pairs
        Contiguous prediction, and label `(nframes, width)` with contiguous rows, of one to three terms, float64.
    table
        A row of `COLUMNS` a term, float64.
    fraction
        lr/start_lr, a float64 scalar.
    """
    out = table.new_empty(len(pairs) + 2)
    _loss_kernel[(1,)](out, table, fraction, *_arguments(pairs), terms=len(pairs), block=BLOCK, num_warps=8)
    return out


def gradients_of(
    pairs: list[tuple[torch.Tensor, torch.Tensor]], table: torch.Tensor, fraction: torch.Tensor, cotangent: torch.Tensor
) -> list[torch.Tensor]:
    """Return `cotangent` times the gradient of the loss with respect to each prediction; arguments as in `loss_of`."""
    sizes = [prediction.numel() for prediction, _ in pairs]
    target = table.new_empty(sum(sizes))
    grid = (triton.cdiv(max(sizes), BLOCK), len(pairs))
    _gradient_kernel[grid](target, table, fraction, cotangent, *_arguments(pairs), block=BLOCK)
    return [part.view(prediction.shape) for part, (prediction, _) in zip(target.split(sizes), pairs, strict=True)]
