"""Triton kernels of the usual loss: mean squares of energy, force and virial, one launch forward and one backward.

`EnergyLoss.compare` defines the result; its terms take some thirty launches of torch's operations.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

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
    return (tl.load(row) + tl.load(row + 1) * fraction) * (tl.sum(total) / number * tl.load(row + 2))


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


class Terms(NamedTuple):
    """The terms of a loss, one to three.

    Attributes
    ----------
    pairs
        Contiguous prediction, and label `(nframes, width)` with contiguous rows, of each term, float64.
    present
        Which frames count in each term `(nframes,)`, bool; None for all.
    mask, natoms
        Which atoms count `(nframes, natoms)`, bool, and their number in each frame `(nframes,)`; None for all, where
        the table holds 1/N.
    force
        Number of the term that compares forces; any other where there is none.
    intensive
        Divide squares by N² instead of N; where `natoms` is given.
    """

    pairs: list[tuple[torch.Tensor, torch.Tensor]]
    present: list[torch.Tensor | None]
    mask: torch.Tensor | None
    natoms: torch.Tensor | None
    force: int
    intensive: bool

    def arguments(self) -> list[torch.Tensor | int | None]:
        """Return mask and numbers of atoms; tensors, counts, widths and strides of three terms."""
        found: list[torch.Tensor | int | None] = [self.mask, self.natoms]
        terms = [*zip(self.pairs, self.present, strict=True)]
        for (prediction, label), present in [*terms, *terms[:1] * (3 - len(terms))]:  # missing ones repeat the first
            found += [prediction, label, prediction.numel(), label.shape[1], label.stride(0), present]
        return found


def loss_of(terms: Terms, table: torch.Tensor, fraction: torch.Tensor) -> torch.Tensor:
    """Return the loss, the shown error of each term, the root of the loss, and the elements of each term that count.

    Parameters
    ----------
    terms
        What is compared.
    table
        A row of `COLUMNS` a term, float64.
    fraction
        lr/start_lr, a float64 scalar.

    Returns
    -------
    torch.Tensor
        float64 `(2 · terms + 2,)`.
    """
    number = len(terms.pairs)
    out = table.new_empty(2 * number + 2)
    options = {"force": terms.force, "intensive": terms.intensive, "block": BLOCK, "num_warps": 8}
    _loss_kernel[(1,)](out, table, fraction, *terms.arguments(), terms=number, **options)
    return out


def gradients_of(
    terms: Terms, table: torch.Tensor, fraction: torch.Tensor, cotangent: torch.Tensor, numbers: torch.Tensor
) -> list[torch.Tensor]:
    """Return `cotangent` times the gradient of the loss with respect to each prediction.

    `numbers` holds the elements of each term that count; other arguments as in `loss_of`.
    """
    sizes = [prediction.numel() for prediction, _ in terms.pairs]
    target = table.new_empty(sum(sizes))
    grid = (triton.cdiv(max(sizes), BLOCK), len(sizes))
    options = {"force": terms.force, "intensive": terms.intensive, "block": BLOCK}
    _gradient_kernel[grid](target, table, fraction, cotangent, numbers, *terms.arguments(), **options)
    return [part.view(prediction.shape) for part, (prediction, _) in zip(target.split(sizes), terms.pairs, strict=True)]
