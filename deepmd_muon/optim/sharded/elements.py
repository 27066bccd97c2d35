"""The Adam routes on several ranks, and the gather of parts that ranks have stepped.

A rank with whole parameters may have only a part of their moments (ZeRO-1). It steps this part, and
a collective gathers the parts of all ranks (`GatheredParts`; `Pipeline` and `zero` use it, too).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from deepmd_muon.optim.routing.routes import Route
from deepmd_muon.optim.sharded.layout import Interval, RankSet
from deepmd_muon.optim.sharded.params import ShardedParameter, StateSharding
from deepmd_muon.optim.sharded.process_groups import group_of
from deepmd_muon.optim.sharded.transport import CollectiveStream, Wait
from deepmd_muon.optim.state.schema import StateHolder
from deepmd_muon.optim.update.gradients import StepControl
from deepmd_muon.optim.waves import StepContext, Wave, step_elements, waves_of

# torch 2.13 deprecates the second name; torch 2.11 lacks the first.
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class ElementwiseStep:
    """The element-wise routes of parameters that live on several ranks.

    `waves` has the parameters with a gradient, in the order in which `step` takes them.
    """

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

    def step(self, control: StepControl, moments: Iterator[list[Tensor]] | None) -> list[Wait]:
        """Step all waves; return functions that wait for the parts of all ranks and write them.

        `moments` yields each wave's offloaded moments on the device, in order: with offload every
        wave has a transfer batch.
        """
        for wave in self.waves:
            state = wave.state if moments is None else wave.with_moments(next(moments))
            # All have one: `compile` has chosen them.
            grads = [grad for holder in wave.holders if (grad := holder.gradient()) is not None]
            step_elements(wave, grads, state, control.on(wave.device))
        return start_gathers(self._gathers)


def start_gathers(gathers: Sequence[GatheredParts]) -> list[Wait]:
    """Start these gathers; return the functions that wait for them and write all parameters."""
    # First all copies: collectives start back to back then, without a copy between them.
    for gather in gathers:
        gather.read_parts()
    return [gather.start() for gather in gathers]


def gathered_parts(
    params: Iterable[tuple[Tensor, StateSharding | None]],
    collectives: CollectiveStream,
    *,
    keep: bool = True,
) -> list[GatheredParts]:
    """Return the gathers of parameters with sharded state, one for each dtype and set of ranks.

    Parameters
    ----------
    params
        Parameters on one device, and the sharding of their state.
    collectives, keep
        See `GatheredParts`.
    """
    by_kind: dict[tuple[RankSet, torch.dtype], list[ReplicatedParameter]] = defaultdict(list)
    for p, sharding in params:
        if sharding is not None and len(sharding.layout.ranks) > 1:
            by_kind[sharding.layout.ranks, p.dtype].append(ReplicatedParameter(p, sharding))
    return [GatheredParts(members, collectives, keep=keep) for members in by_kind.values()]


class ReplicatedParameter(NamedTuple):
    """A parameter that every rank has whole, and the sharding of its state."""

    p: Tensor
    sharding: StateSharding

    def stepped_part(self) -> Tensor:
        """Return the part that this rank steps, sharing memory."""
        return self.sharding.part(self.p.detach())


class _Part(NamedTuple):
    """One rank's part of a parameter: indices along a dimension."""

    p: Tensor
    dim: int
    interval: Interval

    def view(self) -> Tensor:
        """Return its elements; the parameter's memory may be replaced between two calls."""
        return self.p.detach().narrow(self.dim, *self.interval)


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
    sent_parts
        This rank's parts, by parameter, as contiguous views of the buffer that is sent.
    """

    def __init__(
        self,
        params: Sequence[ReplicatedParameter],
        collectives: CollectiveStream,
        *,
        keep: bool = True,
    ) -> None:
        first = params[0]  # all have the same ranks and dtype
        self._params = params
        self._collectives = collectives
        self._process_group = group_of(first.sharding.layout.sorted_ranks, first.p.device)

        # By ascending rank, as an all-gather receives them.
        self._parts_of_ranks: list[list[_Part]] = [[] for _ in first.sharding.layout.ranks]
        for p, sharding in params:
            intervals = sharding.intervals(p.shape)
            for parts, interval in zip(self._parts_of_ranks, intervals, strict=True):
                parts.append(_Part(p, sharding.dim, interval))
        # Every rank sends as much as the rank with the largest parts.
        self._n_sent = max(
            sum(part.view().numel() for part in parts) for parts in self._parts_of_ranks
        )

        self._sent = torch.empty(self._n_sent, dtype=first.p.dtype, device=first.p.device)
        self._kept_buffer = self._new_buffer() if keep else None
        self.sent_parts: dict[Tensor, Tensor] = {}
        offset = 0
        for param in params:
            local = param.stepped_part()
            flat = self._sent[offset : offset + local.numel()]
            self.sent_parts[param.p] = flat.view(local.shape)
            offset += local.numel()

    def read_parts(self) -> None:
        """Copy this rank's parts from the parameters to the buffer that is sent."""
        local = [param.stepped_part().reshape(-1) for param in self._params]
        n_elements = sum(map(torch.numel, local))
        if n_elements:
            torch.cat(local, out=self._sent[:n_elements])

    def start(self) -> Wait:
        """Start the collective; return the function that waits for it and writes all parameters."""
        received = self._new_buffer() if self._kept_buffer is None else self._kept_buffer
        wait = self._collectives.launch(all_gather, received, self._sent, group=self._process_group)

        def finish() -> None:
            wait()
            # Of all ranks, this one included: with master weights only the buffer has its new part.
            targets = []
            sources = []
            for number, parts in enumerate(self._parts_of_ranks):
                start = number * self._n_sent
                for target in map(_Part.view, parts):
                    stop = start + target.numel()
                    if stop > start:
                        targets.append(target)
                        sources.append(received[start:stop].view(target.shape))
                    start = stop
            torch._foreach_copy_(targets, sources)

        return finish

    def _new_buffer(self) -> Tensor:
        """Return memory for the parts of all ranks, one rank after the other."""
        return self._sent.new_empty(len(self._parts_of_ranks) * self._n_sent)
