"""The Adam routes on this rank's elements of parameters that live on several ranks.

If each rank has all elements but only a part of the moments, it steps its part, and a collective
gathers the parts.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from deepmd_muon.optim.routing.routes import Route
from deepmd_muon.optim.sharded.layout import RankSet
from deepmd_muon.optim.sharded.params import ShardedParameter, StateSharding
from deepmd_muon.optim.sharded.process_groups import group_of
from deepmd_muon.optim.sharded.transport import CollectiveStream
from deepmd_muon.optim.state.schema import StateHolder
from deepmd_muon.optim.update.gradients import StepControl
from deepmd_muon.optim.waves import StepContext, Wave, step_elements, waves_of

# torch 2.13 deprecates the second name; torch 2.11 lacks the first.
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class ElementwiseStep:
    """The element-wise routes of parameters that live on several ranks."""

    def __init__(
        self, sharded_params: Sequence[ShardedParameter], collectives: CollectiveStream
    ) -> None:
        self._sharded_params = sharded_params
        self.waves: list[Wave] = []
        self._gathers = gathered_parts(
            [(param.p, param.sharding) for param in sharded_params], collectives
        )

    def compile(self, context: StepContext) -> None:
        """Divide the parameters that have a gradient into waves; create missing state."""
        members: dict[tuple[int, Route], list[tuple[Tensor, StateHolder]]] = defaultdict(list)
        for param in self._sharded_params:
            if param.p.grad is not None:
                members[param.group, param.entry.route].append((param.elements(), param))
        self.waves = []
        for (number, route), params in members.items():
            self.waves += waves_of(context, number, route, params)

    def step(
        self, control: StepControl, moments: Iterator[list[Tensor]] | None
    ) -> list[Callable[[], None]]:
        """Step all waves; return functions that wait for the other ranks' parts and write them.

        `moments` yields each wave's offloaded moments on the device, in order.
        """
        for wave in self.waves:
            state = wave.state if moments is None else wave.with_moments(next(moments))
            grads = [grad for param in wave.holders if (grad := param.gradient()) is not None]
            step_elements(wave, grads, state, control.on(wave.device))
        # All are read before the first collective starts.
        for gather in self._gathers:
            gather.read()
        return [gather.gather() for gather in self._gathers]


def gathered_parts(
    params: Iterable[tuple[Tensor, StateSharding | None]],
    collectives: CollectiveStream,
    *,
    keep: bool = True,
) -> list[GatheredParts]:
    """Return the gathers of the parameters with state that is sharded over several ranks.

    Parameters
    ----------
    params
        Parameters on one device, and the sharding of their state.
    collectives, keep
        See `GatheredParts`.
    """
    by_kind: dict[tuple[RankSet, torch.dtype], list[ReplicatedParameter]]
    by_kind = defaultdict(list)
    for p, sharding in params:
        if sharding is not None and len(sharding.layout.ranks) > 1:
            by_kind[sharding.layout.ranks, p.dtype].append(ReplicatedParameter(p, sharding))
    return [GatheredParts(replicated, collectives, keep=keep) for replicated in by_kind.values()]


class ReplicatedParameter(NamedTuple):
    """A parameter that every rank has whole, and the sharding of its state."""

    p: Tensor
    sharding: StateSharding

    def local_part(self) -> Tensor:
        """Return the part that this rank steps, sharing memory."""
        return self.sharding.part(self.p.detach())


class _PartInBuffer(NamedTuple):
    """One rank's part of a parameter: indices along a dimension, and its elements in the buffer."""

    p: Tensor
    dim: int
    start: int
    length: int
    offset: int
    elements: int


class GatheredParts:
    """Gathers, by one collective, the parts of parameters that the ranks of a group have stepped.

    All parameters have one dtype, and their states are sharded over the same ranks.

    Parameters
    ----------
    params
        The parameters.
    collectives
        Launches the collective.
    keep
        Whether to keep the buffer for all parts. Otherwise each gather allocates it, so that it
        takes no memory between steps.

    Attributes
    ----------
    local_parts
        This rank's parts, by parameter, as contiguous views of the buffer that is sent.
    """

    def __init__(
        self,
        params: Sequence[ReplicatedParameter],
        collectives: CollectiveStream,
        *,
        keep: bool = True,
    ) -> None:
        param = params[0]  # all have the same ranks and dtype
        self._params = params
        self._collectives = collectives
        self._n_ranks = len(param.sharding.layout.ranks)
        self._group = group_of(param.sharding.layout.sorted_ranks, param.p.device)

        # By parameter and rank. A row is all elements with one index along the sharded dimension.
        intervals = [sharding.intervals(p.shape) for p, sharding in params]
        row_sizes = [p.numel() // max(1, p.shape[sharding.dim]) for p, sharding in params]
        # Every rank sends as much as the rank with the largest parts.
        self._longest = max(
            sum(
                of_ranks[number].length * row_size
                for of_ranks, row_size in zip(intervals, row_sizes, strict=True)
            )
            for number in range(self._n_ranks)
        )
        self._parts: list[_PartInBuffer] = []
        for number in range(self._n_ranks):
            offset = number * self._longest
            for (p, sharding), of_ranks, row_size in zip(params, intervals, row_sizes, strict=True):
                start, length = of_ranks[number]
                n_elements = length * row_size
                if n_elements:
                    self._parts.append(
                        _PartInBuffer(
                            p,
                            sharding.dim,
                            start=start,
                            length=length,
                            offset=offset,
                            elements=n_elements,
                        )
                    )
                offset += n_elements

        self._sent = torch.empty(self._longest, dtype=param.p.dtype, device=param.p.device)
        self._kept = self._new_buffer() if keep else None
        self.local_parts: dict[Tensor, Tensor] = {}
        offset = 0
        for param in params:
            local = param.local_part()
            flat = self._sent[offset : offset + local.numel()]
            self.local_parts[param.p] = flat.view(local.shape)
            offset += local.numel()

    def read(self) -> None:
        """Copy this rank's parts from the parameters to the buffer."""
        local = [param.local_part().reshape(-1) for param in self._params]
        n_elements = sum(map(torch.numel, local))
        if n_elements:
            torch.cat(local, out=self._sent[:n_elements])

    def gather(self) -> Callable[[], None]:
        """Start the collective; return the function that waits for it and writes all parameters."""
        received = self._new_buffer() if self._kept is None else self._kept
        wait: Callable[[], Any] = self._collectives.launch(
            all_gather, received, self._sent, group=self._group
        )

        def take() -> None:
            wait()
            targets = []
            sources = []
            for interval in self._parts:
                # The parameter's memory may have been replaced since the constructor.
                p = interval.p.detach()
                target = p.narrow(interval.dim, interval.start, interval.length)
                targets.append(target)
                flat = received[interval.offset : interval.offset + interval.elements]
                sources.append(flat.view(target.shape))
            torch._foreach_copy_(targets, sources)

        return take

    def _new_buffer(self) -> Tensor:
        return self._sent.new_empty(self._n_ranks * self._longest)
