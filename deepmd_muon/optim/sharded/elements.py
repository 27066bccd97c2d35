"""The Adam routes on this rank's elements of parameters that live on several ranks.

If each rank has all elements but only a part of the moments, it steps its part, and a collective gathers the parts.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from deepmd_muon.optim.groups.param_groups import Group
from deepmd_muon.optim.routing.routes import Route
from deepmd_muon.optim.sharded.layout import held_runs, total
from deepmd_muon.optim.sharded.params import ShardedParameter, StateSharding
from deepmd_muon.optim.sharded.process_groups import group_of
from deepmd_muon.optim.sharded.transport import CollectiveStream
from deepmd_muon.optim.state.host_memory import HostMemory
from deepmd_muon.optim.state.schema import State, StateHolder
from deepmd_muon.optim.update.gradients import StepControl
from deepmd_muon.optim.waves import Wave, step_elements, waves_of

# torch 2.13 deprecates the second name; torch 2.11 lacks the first.
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class ElementwiseStep:
    """The element-wise routes of parameters that live on several ranks."""

    def __init__(
        self, sharded_params: Sequence[ShardedParameter], collectives: CollectiveStream
    ) -> None:
        self._sharded_params = sharded_params
        self.waves: list[Wave] = []
        self._parts = gathered_parts(sharded_params, collectives)

    def compile(
        self, groups: Sequence[Group], state: State, memory: HostMemory | None, workspace: int
    ) -> None:
        """Divide the parameters that have a gradient into waves; create missing state."""
        kinds: dict[tuple[int, Route], list[tuple[Tensor, StateHolder]]] = defaultdict(list)
        for param in self._sharded_params:
            if param.p.grad is not None:
                kinds[param.group, param.entry.route].append((param.elements(), param))
        self.waves = []
        for (number, route), members in kinds.items():
            self.waves += waves_of(groups[number], route, members, state, memory, workspace)

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
        for parts in self._parts:
            parts.read()
        return [parts.gather() for parts in self._parts]


def gathered_parts(
    sharded_params: Iterable[ShardedParameter], collectives: CollectiveStream, *, keep: bool = True
) -> list[GatheredParts]:
    """Return the gathers of those parameters whose state is sharded over several ranks; see `GatheredParts`."""
    found: dict[tuple[tuple[int, ...], torch.dtype], list[tuple[Tensor, StateSharding]]] = (
        defaultdict(list)
    )
    for param in sharded_params:
        if param.sharding is not None and len(param.sharding.layout.ranks) > 1:
            found[param.sharding.layout.ranks, param.p.dtype].append((param.p, param.sharding))
    return [GatheredParts(chosen, collectives, keep=keep) for chosen in found.values()]


class GatheredParts:
    """Gathers, by one collective, the parts of parameters of one dtype that the ranks of a group have stepped.

    The states of all parameters are sharded over the same ranks. The object keeps one buffer for this rank's parts, and
    with `keep` one for all parts. Otherwise each gather allocates that one, so that it takes no memory between steps.

    Attributes
    ----------
    own
        This rank's parts, by parameter, as contiguous views of its buffer.
    """

    def __init__(
        self,
        params: Sequence[tuple[Tensor, StateSharding]],
        collectives: CollectiveStream,
        *,
        keep: bool = True,
    ) -> None:
        first = params[0]
        ranks = first[1].layout.ranks
        self._params = params
        self._collectives = collectives
        self._group = group_of(tuple(sorted(ranks)), first[0].device)
        places = first[1].layout.places()
        self._runs: list[
            list[tuple[int, int]]
        ] = []  # for each rank and parameter: first row and number of rows
        for rank in sorted(ranks):
            found = [
                held_runs(p.shape[sharding.dim], sharding.dim, sharding.layout, places[rank])
                for p, sharding in params
            ]
            self._runs.append([(runs[0][0] if runs else 0, total(runs)) for runs in found])
        self._row_sizes = [p.numel() // max(1, p.shape[sharding.dim]) for p, sharding in params]
        lengths = [
            sum(n * size for (_, n), size in zip(runs, self._row_sizes, strict=True))
            for runs in self._runs
        ]
        self._longest = max(lengths)
        self._mine = torch.empty(self._longest, dtype=first[0].dtype, device=first[0].device)
        self._kept = self._buffer() if keep else None
        self.own: dict[Tensor, Tensor] = {}
        start = 0
        for p, sharding in params:
            part = sharding.part(p.detach())
            self.own[p] = self._mine[start : start + part.numel()].view(part.shape)
            start += part.numel()

    def read(self) -> None:
        """Copy this rank's parts from the parameters to the buffer."""
        own = [sharding.part(p.detach()) for p, sharding in self._params]
        if any(x.numel() for x in own):
            torch.cat([x.reshape(-1) for x in own], out=self._mine[: sum(map(Tensor.numel, own))])

    def gather(self) -> Callable[[], None]:
        """Start the collective on the buffer; return the function that waits for it and writes all parameters."""
        everything = self._buffer() if self._kept is None else self._kept
        arrived: Callable[[], Any] = self._collectives.launch(
            all_gather, everything, self._mine, group=self._group
        )

        def take() -> None:
            arrived()
            into, out_of = [], []
            for number, runs in enumerate(self._runs):
                at = number * self._longest
                for (p, sharding), (start, rows), size in zip(
                    self._params, runs, self._row_sizes, strict=True
                ):
                    if rows * size:
                        target = p.detach().narrow(sharding.dim, start, rows)
                        into.append(target)
                        out_of.append(everything[at : at + rows * size].view(target.shape))
                    at += rows * size
            torch._foreach_copy_(into, out_of)

        return take

    def _buffer(self) -> Tensor:
        return self._mine.new_empty(len(self._runs) * self._longest)
