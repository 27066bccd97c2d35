"""The mean of all gradients over the ranks, a part of which is summed beside the backward pass."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from deepmd_muon.optim.sharded.transport import CollectiveStream
from deepmd_muon.train.ranks.ranks import Ranks

#: Elements of a row of all gradients.
ROW = 1024
# Elements of a copy, and copies that are made in addition to one for each gradient, at most.
_SHORT, _COPIES = 1 << 14, 64


class Mean(NamedTuple):
    """Gradients averaged over the ranks.

    Attributes
    ----------
    rows
        All of them, and zeros that complete rows `(nrows, ROW)`.
    gradients
        Each of them, a flat view of `rows`.
    tail
        The sum of the other numbers.
    """

    rows: Tensor
    gradients: list[Tensor]
    tail: Tensor


class GradientSum:
    """Averages the gradients of parameters over the ranks; a missing gradient counts as zero.

    The first `early` parameters have their gradients long before the backward pass ends. After `begin`, which all ranks
    call or none does, the sum of these starts beside that pass, as soon as the last is there. `finish` sums the others,
    and `ntail` other numbers. Every rank launches these two sums in this order, whatever gradients it has. Without
    `begin` there is one sum of all.

    Attributes
    ----------
    params
        The parameters, in the order of the means.
    """

    def __init__(
        self, ranks: Ranks, params: Sequence[nn.Parameter], ntail: int, early: int = 0
    ) -> None:
        self._ranks = ranks
        self.params = list(params)
        early = early if ranks.size > 1 else 0
        self._early, self._late = list(params[:early]), list(params[early:])
        sizes = [sum(p.numel() for p in group) for group in (self._early, self._late)]
        self._sections = [*(size + -size % ROW for size in sizes), ntail]
        self._dtype = max((p.dtype for p in params), key=lambda dtype: dtype.itemsize)
        self._collectives = CollectiveStream(ranks.device) if self._early else None
        self._vector: Tensor | None = None
        self._hooks: list[Any] = []
        self._missing = 0
        self._arrive: Callable[[], object] | None = None

    def begin(self) -> None:
        """Watch the coming backward pass for the early gradients."""
        self.abandon()
        if self._early:
            self._missing = len(self._early)
            self._hooks = [p.register_post_accumulate_grad_hook(self._count) for p in self._early]
            self._vector = self._empty()

    def finish(self, tail: Tensor) -> Mean:
        """Return the mean of all gradients, and the sum of `tail` `(ntail,)` in their precision."""
        begun = self._vector is not None
        if begun and self._arrive is None:
            self._start()
        vector = self._empty() if self._vector is None else self._vector
        early, late, summed = vector.split(self._sections)
        means = [*_views(early, self._early), *_views(late, self._late)]
        first = len(self._early) if begun else 0
        _pack([*means[first:], summed], [*_gradients(self.params[first:]), tail])
        self.abandon()
        self._ranks.sum(vector[len(early) :] if begun else vector)
        (late if begun else vector[: -len(summed)]).div_(self._ranks.size)
        return Mean(vector[: -len(summed)].view(-1, ROW), means, summed)

    def abandon(self) -> None:
        """Forget a backward pass; the current stream waits for a sum that it has started."""
        for hook in self._hooks:
            hook.remove()
        if self._arrive is not None:
            self._arrive()
        self._hooks, self._vector, self._arrive = [], None, None

    def _empty(self) -> Tensor:
        """Return a vector for all gradients and the tail, with zeros where they complete rows."""
        vector = torch.empty(sum(self._sections), dtype=self._dtype, device=self._ranks.device)
        for section, params in zip(
            vector.split(self._sections), (self._early, self._late), strict=False
        ):
            section[sum(p.numel() for p in params) :].zero_()
        return vector

    def _count(self, _: Tensor) -> None:
        self._missing -= 1
        if not self._missing:
            self._start()

    def _start(self) -> None:
        """Launch the sum of the early gradients."""
        assert self._vector is not None
        assert self._collectives is not None
        section = self._vector[: self._sections[0]]

        def collect(async_op: bool) -> dist.Work | None:
            _pack(_views(section, self._early), _gradients(self._early))
            work: dist.Work | None = dist.all_reduce(section, async_op=async_op)
            return work

        self._arrive = self._collectives.launch(
            collect, then=lambda: section.div_(self._ranks.size)
        )


def _gradients(params: Sequence[nn.Parameter]) -> list[Tensor]:
    return [torch.zeros_like(p) if p.grad is None else p.grad for p in params]


def _views(section: Tensor, params: Sequence[nn.Parameter]) -> list[Tensor]:
    """Return the part of a section that belongs to each parameter."""
    sizes = [p.numel() for p in params]
    return list(section[: sum(sizes)].split(sizes)) if sizes else []


def _pack(parts: Sequence[Tensor], tensors: Sequence[Tensor]) -> None:
    """Copy tensors to flat parts of a vector.

    Many short copies occupy more of a GPU's multiprocessors than a few long ones.
    """
    short = max(_SHORT, sum(len(part) for part in parts) // _COPIES)
    into: list[Tensor] = []
    out_of: list[Tensor] = []
    for part, tensor in zip(parts, tensors, strict=True):
        into += part.split(short)
        out_of += tensor.reshape(-1).split(short)
    torch._foreach_copy_(into, out_of)
