"""The compiled step, and the step of the parameters that this process steps by itself.

A small model's step is limited by the host. Everything that stays the same from step to step is therefore compiled
once, and each step first checks whether the `Snapshot` still holds.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from deepmd_muon.optim.config import HybridMuonConfig, NonFinite
from deepmd_muon.optim.cuda import SideStream
from deepmd_muon.optim.dtensors import local_of
from deepmd_muon.optim.errors import InvalidGradientError
from deepmd_muon.optim.polar.dispatch import unavailable
from deepmd_muon.optim.routing.param_groups import Group
from deepmd_muon.optim.routing.rules import Route, RouteEntry
from deepmd_muon.optim.routing.views import MatrixView
from deepmd_muon.optim.rules.interface import MatrixRule
from deepmd_muon.optim.rules.master_weights import MASTER
from deepmd_muon.optim.rules.registry import matrix_rules
from deepmd_muon.optim.snapshot import Snapshot
from deepmd_muon.optim.state.host_memory import HostMemory, TransferBatch
from deepmd_muon.optim.state.schema import (
    ALL_MOMENTS,
    STATE_OF_ROUTE,
    LocalStateFactory,
    State,
    complete_state,
    moments_of,
    state_tensors,
)
from deepmd_muon.optim.update.adam import adam_, moment_dtype
from deepmd_muon.optim.update.gradients import StepControl, decide, gradients_of, waves
from deepmd_muon.optim.update.muon import muon_

if TYPE_CHECKING:
    from deepmd_muon.optim.update.fused_steps import FusedStepCache

RoutedParams = list[tuple[Tensor, RouteEntry]]
# State tensors of several parameters: by key, one tensor for each parameter.
StateLists = Mapping[str, list[Tensor]]

_SMALL = 4 * 2**20  # elements


@dataclasses.dataclass(frozen=True, eq=False)
class Wave:
    """Parameters of one group, route, device and dtype, updated together, and their state.

    With moments in host memory, `transfer_batch` holds them, parameter by parameter, in the order of `moments_of`.
    """

    group: Group
    route: Route
    device: torch.device
    params: list[Tensor]
    views: list[MatrixView]
    state: StateLists
    transfer_batch: TransferBatch | None


class ShardedPart(Protocol):
    """The part of a step on parameters that live on several ranks."""

    @property
    def params(self) -> Sequence[Tensor]:
        """The parameters whose local memory the compiled step holds views of; none if each rank steps all by itself."""

    def prepare(self, groups: Sequence[Group], state: State, *, same_tensors: bool) -> None:
        """Check parameters, gradients and state, all of which may have changed."""

    def agree(self, flags: Tensor | None) -> Tensor | None:
        """Agree with the other ranks to take a step; return the elementwise maximum of all ranks' flags."""

    def run(
        self, groups: Sequence[Group], state: State, memory: HostMemory | None, workspace: int, control: StepControl
    ) -> None:
        """Step the parameters that live on several ranks."""

    def local_params(self, routed: RoutedParams) -> RoutedParams:
        """Return those of the given parameters that each process steps by itself."""

    def raise_deferred(self) -> None:
        """Raise deferred errors from the previous step."""

    def reset(self) -> None:
        """Release all references to parameters' memory and state."""


class CompiledStep:
    """Everything that is compiled or cached for the steps of one optimizer.

    Attributes
    ----------
    params
        The parameters that have a gradient.
    sharded
        The part of the step on parameters that live on several ranks; None when there are none.
    side_stream
        Stream of the Adam routes where they run concurrently with the Muon route; None where they run after it.
    wave_streams
        Two streams on which large Muon waves take turns: kernels limited by memory, and products that do not occupy
        all multiprocessors, run beside the products of another wave. Empty where there are fewer than two such waves.
    """

    def __init__(self) -> None:
        self.params: list[Tensor] = []
        self.sharded: ShardedPart | None = None
        self.side_stream: SideStream | None = None
        self.wave_streams: tuple[SideStream, ...] = ()
        self._groups: Sequence[Group] = ()
        self._with_gradients: list[RoutedParams] = []
        self._waves: list[Wave] | None = None
        self._snapshot: Snapshot | None = None
        # Kept, since memory allocated on a stream is reused by that stream only.
        self._stream: SideStream | None = None
        self._streams_of_waves: tuple[SideStream, ...] = ()
        self._fused: FusedStepCache | None = None

    def holds(self, param_groups: Sequence[dict[str, Any]], state: State, workspace: int) -> bool:
        """Return whether the compiled step is still valid."""
        return self._snapshot is not None and self._snapshot.holds(param_groups, state, workspace)

    def prepare(self, groups: Sequence[Group], state: State) -> None:
        """Collect the parameters that have a gradient; `run` compiles the step itself.

        Raises
        ------
        InvalidGradientError
            When a gradient is sparse.
        """
        before, self._snapshot, self._waves = self._snapshot, None, None
        self._groups = groups
        self._with_gradients = [_with_gradient(group) for group in groups]
        self.params = [p for routed in self._with_gradients for p, _ in routed]
        if self.sharded is not None:
            same = before is not None and before.same_tensors([group.values for group in groups], state)
            self.sharded.prepare(groups, state, same_tensors=same)

    def decide(
        self, on_nonfinite: NonFinite, scale: Tensor | None, skip: Tensor | None, *, agreed: bool = False
    ) -> StepControl:
        """Decide on the device, identically on all ranks, whether this step is skipped; see `gradients.decide`.

        `agreed` tells that `skip` is the same on all ranks, so that they need not compare it.
        """
        agree = None if self.sharded is None else self.sharded.agree
        if on_nonfinite == "ignore" and (agree is None or agreed):
            if agree is not None:
                agree(None)
            return StepControl(skip, scale)
        routed = [member for group in self._groups for member in group.routed]
        grads = [p.grad if entry.route != "frozen" else None for p, entry in routed]
        local = [None if g is None else local_of(g) for g in grads]
        return decide([entry.name for _, entry in routed], local, on_nonfinite, scale, skip, agree)

    def run(self, state: State, memory: HostMemory | None, workspace: int, control: StepControl) -> None:
        """Step all parameters that have a gradient; compile the step if necessary."""
        if self.sharded is not None:
            self.sharded.run(self._groups, state, memory, workspace, control)
        if self._waves is None:
            self._waves = self._compile(state, memory, workspace)
        self._step_waves(self._waves, memory, control)
        if self._snapshot is None:
            devices = [(wave.params[0], wave.device) for wave in self._waves]
            shared = [] if self.sharded is None else self.sharded.params
            self._snapshot = Snapshot([group.values for group in self._groups], state, workspace, devices, shared)

    def compile_kernels(self, groups: Sequence[Group], workspace: int, *, skip: bool) -> None:
        """Compile the kernels of the Muon route on a GPU before the first step, of parameters on one process.

        Parameters
        ----------
        groups, workspace
            As in `prepare` and `run`.
        skip
            Whether steps will have a predicate that skips them.
        """
        if unavailable() or (self.sharded is not None and self.sharded.params):
            return
        from deepmd_muon.optim.update.fused import Variant  # needs Triton
        from deepmd_muon.optim.update.fused_steps import compile_kernels

        for group in groups:
            for wave in waves(_of_route(group.routed, "muon"), elements_at_a_time(group, "muon", [], None, workspace)):
                p, views = wave[0][0], tuple(entry.view for _, entry in wave if entry.view is not None)
                if _can_be_fused(p.device, group.settings):
                    variant = Variant(p.dtype, group.values["maximize"], skip, False)
                    compile_kernels(views, p.device, p.dtype, variant, group.settings)

    def raise_deferred(self) -> None:
        """Raise deferred errors from the previous step."""
        if self.sharded is not None:
            self.sharded.raise_deferred()

    def reset(self, sharded: ShardedPart | None) -> None:
        """Release all references to parameters, gradients and state; the next step is recompiled.

        Parameters
        ----------
        sharded
            The new part of the step on parameters that live on several ranks.
        """
        self._snapshot, self._waves = None, None
        self._groups, self._with_gradients, self.params = (), [], []
        self.sharded = sharded
        if sharded is not None:
            sharded.reset()

    def _compile(self, state: State, memory: HostMemory | None, workspace: int) -> list[Wave]:
        """Return the waves that this process steps locally, the Muon route first."""
        found: list[Wave] = []
        for group, routed in zip(self._groups, self._with_gradients, strict=True):
            mine = routed if self.sharded is None else self.sharded.local_params(routed)
            found += _waves_of(group, mine, state, memory, workspace)
        found.sort(key=lambda wave: wave.route != "muon")
        self.side_stream = self._side_stream_for(found) if memory is None else None
        self.wave_streams = self._wave_streams_for(found) if memory is None else ()
        return found

    def _side_stream_for(self, found: Sequence[Wave]) -> SideStream | None:
        """Return the stream of the Adam routes: on one GPU, if they are small and there is a Muon route."""
        devices, routes = {wave.device for wave in found}, {wave.route for wave in found}
        small = sum(p.numel() for wave in found if wave.route != "muon" for p in wave.params) <= _SMALL
        if not small or len(devices) != 1 or "muon" not in routes or len(routes) == 1:
            return None
        (device,) = devices
        if device.type != "cuda":
            return None
        if self._stream is None or self._stream.device != device:
            self._stream = SideStream(device)
        return self._stream

    def _wave_streams_for(self, found: Sequence[Wave]) -> tuple[SideStream, ...]:
        """Return the streams on which large Muon waves take turns: on one GPU, if there are at least two."""
        devices = [wave.device for wave in found if _is_large(wave)]
        if len(devices) < 2 or len(set(devices)) != 1 or devices[0].type != "cuda":
            return ()
        if not self._streams_of_waves or self._streams_of_waves[0].device != devices[0]:
            self._streams_of_waves = SideStream(devices[0]), SideStream(devices[0])
        return self._streams_of_waves

    def _step_waves(self, found: Sequence[Wave], memory: HostMemory | None, control: StepControl) -> None:
        side_streams = [*self.wave_streams, *([] if self.side_stream is None else [self.side_stream])]
        if side_streams:
            control = control.on(side_streams[0].device)
        for stream in side_streams:
            stream.fork()
        turns = itertools.cycle(self.wave_streams)
        for wave, state in zip(found, _ready(found, memory), strict=True):
            here = control.on(wave.device)
            if wave.route == "muon":
                with next(turns) if self.wave_streams and _is_large(wave) else contextlib.nullcontext():
                    self._step_matrices(wave, state, here)
            else:
                with self.side_stream or contextlib.nullcontext():
                    step_elements(wave.params, gradients_of(wave.params), state, wave.route, wave.group, here)

    def _step_matrices(self, wave: Wave, state: StateLists, control: StepControl) -> None:
        """Take a step of the Muon route."""
        settings, group = wave.group.settings, wave.group.values
        of_rules = {key: tensors for key, tensors in state.items() if key != "momentum_buffer"}
        lists = wave.params, state["momentum_buffer"], of_rules, wave.views
        options: dict[str, Any] = {"lr": wave.group.lr, "settings": settings, "control": control}
        fused = self._fused_steps(wave.device, settings)
        if fused is None or not fused.step(*lists, **options, maximize=group["maximize"]):
            muon_(*lists, **options, maximize=group["maximize"])

    def _fused_steps(self, device: torch.device, settings: HybridMuonConfig) -> FusedStepCache | None:
        """Return the fused form of the Muon route; None where torch's operations are used."""
        if not _can_be_fused(device, settings):
            return None
        if self._fused is None and not unavailable():
            from deepmd_muon.optim.update.fused_steps import FusedStepCache  # needs Triton

            self._fused = FusedStepCache()
        return self._fused


def _is_large(wave: Wave) -> bool:
    """Return whether a Muon wave occupies the device for so long that another may run beside it."""
    return wave.route == "muon" and sum(p.numel() for p in wave.params) > _SMALL


def _can_be_fused(device: torch.device, settings: HybridMuonConfig) -> bool:
    """Return whether the fused form of the Muon route may be used."""
    return device.type == "cuda" and settings.flash_muon and not settings.deepmd_kit_arithmetic


def _of_route(routed: Iterable[tuple[Tensor, RouteEntry]], route: Route) -> RoutedParams:
    """Return the parameters of a route, equal shapes adjacent: they share batches even when there are several waves."""
    taken = [(p, entry) for p, entry in routed if entry.route == route]
    return sorted(taken, key=lambda member: (member[1].view.rows, member[1].view.columns) if member[1].view else (0, 0))


def _with_gradient(group: Group) -> RoutedParams:
    """Return one group's parameters that have a usable gradient."""
    routed = []
    for p, entry in group.routed:
        if p.grad is None or entry.route == "frozen":
            continue
        if p.grad.layout != torch.strided:
            raise InvalidGradientError(
                f"the gradient of {entry.name!r} is sparse; HybridMuon needs dense gradients "
                "(for an embedding set sparse=False)"
            )
        routed.append((p, entry))
    return routed


def _waves_of(
    group: Group, routed: RoutedParams, state: State, memory: HostMemory | None, workspace: int
) -> Iterator[Wave]:
    """Divide one group's parameters into waves; create missing state."""
    for route in STATE_OF_ROUTE:
        taken = _of_route(routed, route)
        for wave in waves(taken, elements_at_a_time(group, route, [p for p, _ in taken], memory, workspace)):
            params = [p for p, _ in wave]
            views = [entry.view for _, entry in wave if entry.view is not None]
            rules = matrix_rules(group.settings)
            states = [complete_state(state[p], LocalStateFactory(p, entry), rules) for p, entry in wave]
            keys = state_tensors(route, rules, params[0].dtype)
            transfer_batch = transfer_batch_of(state, memory, params, route, rules)
            lists = state_lists(states, keys)
            yield Wave(group, route, params[0].device, params, views, lists, transfer_batch)


def state_lists(states: Sequence[dict[str, Tensor]], keys: Iterable[str]) -> StateLists:
    """Return some state tensors of several parameters by key."""
    return {key: [local_of(values[key]) for values in states] for key in keys}


def elements_at_a_time(
    group: Group, route: Route, params: Sequence[Tensor], memory: HostMemory | None, workspace: int
) -> int:
    """Return the bound on the elements of a wave of such parameters."""
    if group.values["foreach"] is False:
        return 0
    if memory is None or not params:
        return workspace
    # Moments are at least float32 on the Adam routes, and so are master weights.
    dtype = params[0].dtype
    keys = moments_of(route, matrix_rules(group.settings), dtype)
    wide = -(-moment_dtype(dtype).itemsize // params[0].element_size())
    count = sum(1 if key == "momentum_buffer" else wide for key in keys)
    return min(workspace, memory.elements_per_batch(params, count))


def transfer_batch_of(
    state: State,
    memory: HostMemory | None,
    params: Sequence[Tensor],
    route: Route,
    rules: Sequence[MatrixRule],
) -> TransferBatch | None:
    """Return the moments of some parameters of one dtype as a transfer batch; None where they stay on the device."""
    if memory is None:
        return None
    keys = moments_of(route, rules, params[0].dtype)
    return memory.transfer_batch(state, [(p, key) for p in params for key in keys])


def with_moments(state: StateLists, route: Route, moments: Sequence[Tensor]) -> StateLists:
    """Return state with its moments replaced by those of its transfer batch."""
    keys = [key for key in (*STATE_OF_ROUTE[route], MASTER) if key in state and key in ALL_MOMENTS]
    return {**state, **{key: list(moments[i :: len(keys)]) for i, key in enumerate(keys)}}


def _ready(found: Sequence[Wave], memory: HostMemory | None) -> Iterable[StateLists]:
    """Return the state of each wave; offloaded moments are fetched when the iterator reaches the wave."""
    if memory is None:
        return [wave.state for wave in found]
    fetched = memory.fetch_in_turn([wave.transfer_batch for wave in found if wave.transfer_batch is not None])
    return (with_moments(wave.state, wave.route, moments) for wave, moments in zip(found, fetched, strict=True))


def step_elements(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    state: StateLists,
    route: Route,
    group: Group,
    control: StepControl,
) -> None:
    """Step parameters of one Adam route, group, device and dtype."""
    settings, lr = group.settings, group.lr
    ratio = settings.adam_lr_ratio
    assert ratio is not None
    adam_(
        params,
        grads,
        *(state[key] for key in ("exp_avg", "exp_avg_sq", "step")),
        lr=lr if ratio == 1.0 else lr * ratio,
        betas=(settings.adam_beta1, settings.adam_beta2),
        weight_decay=settings.weight_decay if route == "adamw" else 0.0,
        eps=settings.adam_eps,
        implementation=settings.adam_implementation,
        control=control,
        maximize=group.values["maximize"],
        masters=state.get(MASTER),
    )
