"""The mean of all gradients over the ranks; a part of them is summed during the backward pass."""

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
# `_pack` cuts copies into pieces of about this many elements, but adds at most so many copies to
# one for each gradient.
_SHORT_COPY = 1 << 14
_MOST_ADDED_COPIES = 64


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

    The first `early` parameters have their gradients long before the backward pass ends. After
    `begin`, which all ranks call or none does, their sum starts during that pass, as soon as the
    last of them is there. `finish` sums the others, and `ntail` other numbers. Every rank launches
    these two sums in this order, whatever gradients it has. Without `begin` there is one sum of
    all.

    Both sums are on parts of one vector: early gradients, zeros that complete a row, late
    gradients, zeros that complete a row, tail.

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
        self._early = self.params[:early]
        self._late = self.params[early:]
        self._sections = [_padded_size(self._early), _padded_size(self._late), ntail]
        self._dtype = max((p.dtype for p in params), key=lambda dtype: dtype.itemsize)
        self._collectives = CollectiveStream(ranks.device) if self._early else None
        self._vector: Tensor | None = None  # from `begin` to `abandon`
        self._hooks: list[Any] = []
        self._n_missing = 0
        self._wait_for_early: Callable[[], object] | None = None  # set once their sum has started

    def begin(self) -> None:
        """Watch the coming backward pass for the early gradients."""
        self.abandon()
        if self._early:
            self._n_missing = len(self._early)
            self._hooks = [
                p.register_post_accumulate_grad_hook(self._count_gradient) for p in self._early
            ]
            self._vector = self._empty()

    def _count_gradient(self, _: Tensor) -> None:
        self._n_missing -= 1
        if not self._n_missing:
            self._start_early()

    def _start_early(self) -> None:
        """Launch the sum of the early gradients."""
        assert self._vector is not None
        assert self._collectives is not None
        section = self._vector[: self._sections[0]]

        def collect(async_op: bool) -> dist.Work | None:
            _pack(_views(section, self._early), _gradients(self._early))
            work: dist.Work | None = dist.all_reduce(section, async_op=async_op)
            return work

        self._wait_for_early = self._collectives.launch(
            collect, then=lambda: section.div_(self._ranks.size)
        )

    def finish(self, tail: Tensor) -> Mean:
        """Return the mean of all gradients, and the sum of `tail` `(ntail,)` in their precision."""
        begun = self._vector is not None
        if begun and self._wait_for_early is None:
            # This rank's branch lacks some early gradients, but others wait for its part of the
            # sum.
            self._start_early()
        vector = self._empty() if self._vector is None else self._vector
        early, late, summed_tail = vector.split(self._sections)
        views = [*_views(early, self._early), *_views(late, self._late)]
        n_summed = len(self._early) if begun else 0
        _pack([*views[n_summed:], summed_tail], [*_gradients(self.params[n_summed:]), tail])
        self.abandon()  # the early sum has arrived from here on
        self._ranks.sum(vector[len(early) :] if begun else vector)
        n_gradients = len(early) + len(late)
        (late if begun else vector[:n_gradients]).div_(self._ranks.size)
        return Mean(rows=vector[:n_gradients].view(-1, ROW), gradients=views, tail=summed_tail)

    def abandon(self) -> None:
        """Forget a backward pass; the current stream waits for a sum that it has started."""
        for hook in self._hooks:
            hook.remove()
        if self._wait_for_early is not None:
            self._wait_for_early()
        self._hooks = []
        self._vector = None
        self._wait_for_early = None

    def _empty(self) -> Tensor:
        """Return a vector for all gradients and the tail, with zeros where they complete rows."""
        vector = torch.empty(sum(self._sections), dtype=self._dtype, device=self._ranks.device)
        early, late, _ = vector.split(self._sections)
        early[_size(self._early) :].zero_()
        late[_size(self._late) :].zero_()
        return vector


def _size(params: Sequence[nn.Parameter]) -> int:
    return sum(p.numel() for p in params)


def _padded_size(params: Sequence[nn.Parameter]) -> int:
    """Return the elements of these parameters in whole rows."""
    return -(-_size(params) // ROW) * ROW


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
    n_elements = sum(len(part) for part in parts)
    short = max(_SHORT_COPY, n_elements // _MOST_ADDED_COPIES)
    destinations: list[Tensor] = []
    sources: list[Tensor] = []
    for part, tensor in zip(parts, tensors, strict=True):
        destinations += part.split(short)
        sources += tensor.reshape(-1).split(short)
    torch._foreach_copy_(destinations, sources)
