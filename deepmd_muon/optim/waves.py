"""Waves: parameters of one group, route, device and dtype that are updated together."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from deepmd_muon.optim.dtensors import local_of
from deepmd_muon.optim.groups.param_groups import Group
from deepmd_muon.optim.routing.routes import Route, RouteEntry
from deepmd_muon.optim.routing.views import MatrixView
from deepmd_muon.optim.rules.interface import MatrixRule
from deepmd_muon.optim.rules.registry import matrix_rules
from deepmd_muon.optim.state.host_memory import HostMemory, TransferBatch
from deepmd_muon.optim.state.schema import ALL_MOMENTS, State, StateHolder, state_tensors
from deepmd_muon.optim.update.adam import adam_, moment_dtype
from deepmd_muon.optim.update.gradients import StepControl, waves

RoutedParams = list[tuple[Tensor, RouteEntry]]
StateLists = dict[str, list[Tensor]]  # by key, one tensor for each parameter


class StepContext(NamedTuple):
    """The parts of an optimizer that its step reads and changes.

    Attributes
    ----------
    groups, state
        The parameter groups, and the state by parameter.
    memory
        The moments in host memory; None if they are on the device.
    workspace
        Elements of a wave, at most.
    """

    groups: Sequence[Group]
    state: State
    memory: HostMemory | None
    workspace: int


@dataclasses.dataclass(frozen=True, eq=False)
class Wave:
    """Parameters that are updated together: this rank's elements and state.

    They have one group, route, device and dtype.

    If moments are in host memory, `transfer_batch` holds them, parameter by parameter, in the order
    of `state`.
    """

    group: Group
    route: Route
    device: torch.device
    params: list[Tensor]
    views: list[MatrixView]
    state: StateLists
    transfer_batch: TransferBatch | None
    holders: Sequence[StateHolder] = ()

    def with_moments(self, moments: Sequence[Tensor]) -> StateLists:
        """Return the state with its moments replaced by those of its transfer batch."""
        keys = [key for key in self.state if key in ALL_MOMENTS]
        by_key = {key: list(moments[i :: len(keys)]) for i, key in enumerate(keys)}
        return {**self.state, **by_key}


def waves_of(
    context: StepContext,
    number: int,
    route: Route,
    members: Sequence[tuple[Tensor, StateHolder]],
) -> Iterator[Wave]:
    """Divide parameters of group `number` and one route into waves; create missing state.

    `members` are their elements on this rank. A wave has at most `workspace` elements, and its
    moments fit in one transfer batch of `memory`; a larger parameter forms its own wave.
    """
    group = context.groups[number]
    memory = context.memory
    rules = matrix_rules(group.settings)
    most_elements = context.workspace
    if memory is not None and members:
        most_elements = min(most_elements, _most_in_batch(route, members, rules, memory))
    for wave in waves(members, most_elements):
        params = [p for p, _ in wave]
        holders = [holder for _, holder in wave]
        states = [holder.complete(context.state[holder.p], rules) for holder in holders]
        keys = state_tensors(route, rules, params[0].dtype)
        transfer_batch = None
        if memory is not None:
            moments = [(holder.p, key) for holder in holders for key in keys if key in ALL_MOMENTS]
            transfer_batch = memory.transfer_batch(
                context.state, moments
            )  # replaces them in `states`
        yield Wave(
            group=group,
            route=route,
            device=params[0].device,
            params=params,
            views=[holder.entry.view for holder in holders if holder.entry.view is not None],
            state={key: [local_of(values[key]) for values in states] for key in keys},
            transfer_batch=transfer_batch,
            holders=holders,
        )


def _most_in_batch(
    route: Route,
    members: Sequence[tuple[Tensor, StateHolder]],
    rules: Sequence[MatrixRule],
    memory: HostMemory,
) -> int:
    """Return the number of elements that have their moments in one transfer batch."""
    dtype = members[0][0].dtype
    # Moments are at least float32 on the Adam routes, and so are master weights.
    wide = -(-moment_dtype(dtype).itemsize // dtype.itemsize)
    moments = [key for key in state_tensors(route, rules, dtype) if key in ALL_MOMENTS]
    count = sum(1 if key == "momentum_buffer" else wide for key in moments)
    return memory.batch_bytes // (count * max(p.element_size() for p, _ in members))


def step_elements(
    wave: Wave, grads: Sequence[Tensor], state: StateLists, control: StepControl
) -> None:
    """Step a wave of one of the Adam routes."""
    adam_(
        wave.params,
        grads,
        state,
        decays=wave.route == "adamw",
        lr=wave.group.lr,
        settings=wave.group.settings,
        control=control,
        maximize=wave.group.values["maximize"],
    )
