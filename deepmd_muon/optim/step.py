"""The compiled step, and the step of the parameters that this process steps by itself.

A small model's step is limited by the host. Everything that stays the same from step to step is therefore compiled
once, and each step first checks whether the `Snapshot` is still valid.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
from collections.abc import Iterable, Sequence
from operator import attrgetter, eq, is_, itemgetter
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from deepmd_muon.optim.config import DEEPMD_KIT, HybridMuonConfig, NonFinite
from deepmd_muon.optim.cuda import MOST_BESIDE, SideStream
from deepmd_muon.optim.dtensors import local_of, spec_of
from deepmd_muon.optim.errors import InvalidGradientError, NonFiniteGradientError
from deepmd_muon.optim.groups.group_settings import raw_settings
from deepmd_muon.optim.groups.param_groups import Group
from deepmd_muon.optim.polar.dispatch import unavailable
from deepmd_muon.optim.routing.routes import Route, RouteEntry
from deepmd_muon.optim.state.host_memory import HostMemory
from deepmd_muon.optim.state.schema import STATE_OF_ROUTE, State, StateHolder, known_tensors
from deepmd_muon.optim.update.gradients import StepControl, gradients_of, nonfinite_flags, waves
from deepmd_muon.optim.update.muon import muon_
from deepmd_muon.optim.waves import RoutedParams, StateLists, Wave, step_elements, waves_of

if TYPE_CHECKING:
    from deepmd_muon.optim.sharded.step import ShardedStep
    from deepmd_muon.optim.update.fused_steps import FusedStepCache

_SMALL = 4 * 2**20  # elements of a wave
_is_trained, _dtype, _grad_layout = map(attrgetter, ("requires_grad", "dtype", "grad.layout"))


class Snapshot:
    """Groups and their settings, parameters, layouts of gradients, and state that a step was compiled for.

    `devices` has one parameter of each wave with its device; `shared` has the parameters that live on several ranks:
    the compiled step holds views of their local memory.
    """

    def __init__(
        self,
        param_groups: Sequence[dict[str, Any]],
        state: State,
        workspace: int,
        devices: Sequence[tuple[Tensor, torch.device]],
        shared: Sequence[Tensor],
    ) -> None:
        self._groups, self._workspace = list(param_groups), workspace
        self._settings = copy.deepcopy([raw_settings(group) for group in param_groups])
        self._sizes = [len(group["params"]) for group in param_groups]
        self._params = [p for group in param_groups for p in group["params"]]
        self._kinds = _kinds(self._params)
        self._gradients = _layouts(self._params)
        self._states = list(state.values())
        self._tensors = [
            (itemgetter(key), holders, [values[key] for values in holders])
            for key in known_tensors()
            if (holders := [values for values in self._states if key in values])
        ]
        self._devices = devices
        self._shared = shared
        self._specs = list(map(spec_of, shared))
        self._addresses = [local_of(p).data_ptr() for p in shared]

    def holds(self, param_groups: Sequence[dict[str, Any]], state: State, workspace: int) -> bool:
        """Return whether the compiled step is still valid."""
        return (
            [len(group["params"]) for group in param_groups] == self._sizes
            and all(map(is_, param_groups, self._groups))
            and workspace == self._workspace
            and all(map(eq, map(raw_settings, param_groups), self._settings))
            and self.same_tensors(param_groups, state)
            and _layouts(self._params) == self._gradients
            and _kinds(self._params) == self._kinds
            and all(
                g is None or spec_of(g) is s or spec_of(g) == s
                for g, s in zip([p.grad for p in self._shared], self._specs, strict=True)
            )
        )

    def same_tensors(self, param_groups: Sequence[dict[str, Any]], state: State) -> bool:
        """Return whether parameters and state are the same tensors in the same memory."""
        params = itertools.chain.from_iterable(group["params"] for group in param_groups)
        try:
            return (
                sum(len(group["params"]) for group in param_groups) == len(self._params)
                and all(map(is_, params, self._params))
                and len(state) == len(self._states)
                and all(map(is_, state.values(), self._states))
                and all(
                    all(map(is_, map(get, holders), known)) for get, holders, known in self._tensors
                )
                and all(p.device == device for p, device in self._devices)
                and all(map(is_, map(spec_of, self._shared), self._specs))
                and [local_of(p).data_ptr() for p in self._shared] == self._addresses
            )
        except KeyError:  # a state tensor has been deleted
            return False


def _layouts(params: Sequence[Tensor]) -> list[torch.layout | None]:
    try:  # twice as fast, if all parameters have a gradient
        return list(map(_grad_layout, params))
    except AttributeError:
        return [g if (g := p.grad) is None else g.layout for p in params]


def _kinds(params: Sequence[Tensor]) -> tuple[list[bool], list[torch.dtype], list[int]]:
    """Return what `Module.to` and an assignment to `.data` change in parameters, whose identity stays the same.

    The number of elements stands for the shape: reading shapes takes several times as long.
    """
    return (
        list(map(_is_trained, params)),
        list(map(_dtype, params)),
        list(map(Tensor.numel, params)),
    )


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
        self.sharded: ShardedStep | None = None
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

        Raises InvalidGradientError when a gradient is sparse.
        """
        before, self._snapshot, self._waves = self._snapshot, None, None
        self._groups = groups
        self._with_gradients = [_with_gradient(group) for group in groups]
        self.params = [p for routed in self._with_gradients for p, _ in routed]
        if self.sharded is not None:
            same = before is not None and before.same_tensors(
                [group.values for group in groups], state
            )
            self.sharded.prepare(groups, state, same_tensors=same)

    def decide(
        self,
        on_nonfinite: NonFinite,
        scale: Tensor | None,
        skip: Tensor | None,
        *,
        agreed: bool = False,
    ) -> StepControl:
        """Decide on the device, identically on all ranks, whether this step is skipped.

        `scale` and `skip` are those of a gradient scaler. With `agreed`, `skip` is the same on all ranks, so they do
        not compare it.

        Raises
        ------
        NonFiniteGradientError
            When a gradient holds NaN or infinity, `on_nonfinite` is 'error' and no scaler skips the step.
        """
        if on_nonfinite == "ignore" and (self.sharded is None or agreed):
            if self.sharded is not None:
                self.sharded.agree(None)
            return StepControl(skip, scale)
        routed = [
            member for group in self._groups for member in group.routed
        ]  # in the same order on all ranks
        grads = [
            None if p.grad is None or entry.route == "frozen" else local_of(p.grad)
            for p, entry in routed
        ]
        flags = skip
        named = (
            on_nonfinite == "error" and skip is None
        )  # the host reads the flags, one per parameter
        if on_nonfinite != "ignore":
            here = {i: g for i, g in enumerate(grads) if g is not None and g.numel()}
            bad = (
                nonfinite_flags(list(here.values())).float()
                if here
                else torch.zeros(0, device="cpu")
            )
            if named:
                flags = bad.new_zeros(len(grads))
                flags[list(here)] = bad
            else:
                worst = bad.amax() if here else bad.sum()
                flags = worst if skip is None else torch.maximum(skip.to(worst.device), worst)
        if self.sharded is not None:
            flags = self.sharded.agree(flags)
        if flags is None or not flags.numel():
            return StepControl(None, scale)
        if named and flags.any():
            found = zip(routed, flags.tolist(), strict=True)
            raise NonFiniteGradientError([entry.name for (_, entry), is_bad in found if is_bad])
        return StepControl(flags.amax() if flags.ndim else flags, scale)

    def run(
        self, state: State, memory: HostMemory | None, workspace: int, control: StepControl
    ) -> None:
        """Step all parameters that have a gradient; compile the step if necessary."""
        if self.sharded is not None:
            self.sharded.run(self._groups, state, memory, workspace, control, self._step_matrices)
        if self._waves is None:
            self._waves = self._compile(state, memory, workspace)
        self._step_waves(self._waves, memory, control)
        if self._snapshot is None:
            devices = [(wave.params[0], wave.device) for wave in self._waves]
            shared = [] if self.sharded is None else self.sharded.params
            self._snapshot = Snapshot(
                [group.values for group in self._groups], state, workspace, devices, shared
            )

    def compile_kernels(self, groups: Sequence[Group], workspace: int, *, skip: bool) -> None:
        """Compile the kernels of the Muon route before the first step, for parameters of one process on a GPU.

        `skip` says whether steps will have a predicate that skips them.
        """
        if unavailable() or (
            self.sharded is not None and self.sharded.params and not self.sharded.gathers
        ):
            return
        from deepmd_muon.optim.update.fused import Variant  # needs Triton
        from deepmd_muon.optim.update.fused_steps import compile_kernels

        for group in groups:
            for wave in waves(_of_route(group.routed, "muon"), workspace):
                p, views = (
                    wave[0][0],
                    tuple(entry.view for _, entry in wave if entry.view is not None),
                )
                if _can_be_fused(p.device, group.settings):
                    variant = Variant(p.dtype, group.values["maximize"], skip, False)
                    compile_kernels(views, p.device, p.dtype, variant, group.settings)

    def reset(self, sharded: ShardedStep | None) -> None:
        """Release all references to parameters, gradients and state, and set `sharded`; the next step is recompiled."""
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
            for route in STATE_OF_ROUTE:
                members = [(p, StateHolder(p, entry)) for p, entry in _of_route(mine, route)]
                found += waves_of(group, route, members, state, memory, workspace)
        found.sort(key=lambda wave: wave.route != "muon")
        self.side_stream = self._side_stream_for(found) if memory is None else None
        self.wave_streams = self._wave_streams_for(found) if memory is None else ()
        return found

    def _side_stream_for(self, found: Sequence[Wave]) -> SideStream | None:
        """Return the stream of the Adam routes: on one GPU, if they are small and there is a Muon route."""
        devices, routes = {wave.device for wave in found}, {wave.route for wave in found}
        small = (
            sum(p.numel() for wave in found if wave.route != "muon" for p in wave.params)
            <= MOST_BESIDE
        )
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

    def _step_waves(
        self, found: Sequence[Wave], memory: HostMemory | None, control: StepControl
    ) -> None:
        side_streams = [
            *self.wave_streams,
            *([] if self.side_stream is None else [self.side_stream]),
        ]
        if side_streams:
            control = control.on(side_streams[0].device)
        for stream in side_streams:
            stream.fork()
        turns = itertools.cycle(self.wave_streams)
        states: Iterable[StateLists] = [wave.state for wave in found]
        if memory is not None:  # moments are fetched when the iterator reaches their wave
            fetched = memory.fetch_in_turn(
                [wave.transfer_batch for wave in found if wave.transfer_batch is not None]
            )
            states = (
                wave.with_moments(moments) for wave, moments in zip(found, fetched, strict=True)
            )
        for wave, state in zip(found, states, strict=True):
            here = control.on(wave.device)
            if wave.route == "muon":
                with (
                    next(turns)
                    if self.wave_streams and _is_large(wave)
                    else contextlib.nullcontext()
                ):
                    self._step_matrices(wave, state, here)
            else:
                with self.side_stream or contextlib.nullcontext():
                    step_elements(wave, gradients_of(wave.params), state, here)

    def _step_matrices(self, wave: Wave, state: StateLists, control: StepControl) -> None:
        """Take a step of the Muon route."""
        settings, group = wave.group.settings, wave.group.values
        of_rules = {key: tensors for key, tensors in state.items() if key != "momentum_buffer"}
        lists = wave.params, state["momentum_buffer"], of_rules, wave.views
        options: dict[str, Any] = {"lr": wave.group.lr, "settings": settings, "control": control}
        fused = _can_be_fused(wave.device, settings)
        if fused and self._fused is None and not unavailable():
            from deepmd_muon.optim.update.fused_steps import FusedStepCache  # needs Triton

            self._fused = FusedStepCache()
        if (
            not fused
            or self._fused is None
            or not self._fused.step(*lists, **options, maximize=group["maximize"])
        ):
            muon_(*lists, **options, maximize=group["maximize"])


def _is_large(wave: Wave) -> bool:
    """Return whether a Muon wave is large enough to run concurrently with another one."""
    return wave.route == "muon" and sum(p.numel() for p in wave.params) > _SMALL


def _can_be_fused(device: torch.device, settings: HybridMuonConfig) -> bool:
    """Return whether the fused form of the Muon route may be used."""
    return device.type == "cuda" and settings.flash_muon and settings.schedule != DEEPMD_KIT


def _of_route(routed: Iterable[tuple[Tensor, RouteEntry]], route: Route) -> RoutedParams:
    """Return the parameters of a route, equal shapes adjacent: they share batches even when there are several waves."""
    taken = [(p, entry) for p, entry in routed if entry.route == route]
    return sorted(
        taken,
        key=lambda member: (
            (member[1].view.rows, member[1].view.columns) if member[1].view else (0, 0)
        ),
    )


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
