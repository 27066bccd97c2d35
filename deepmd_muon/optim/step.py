"""The compiled step, and the step of the parameters that this process steps by itself.

A small model's step is limited by the host. Everything that stays the same from step to step is
therefore compiled once, and each step first checks whether the `Snapshot` is still valid.
"""

from __future__ import annotations

import contextlib
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
from deepmd_muon.optim.groups.group_settings import raw_numbers, raw_structure
from deepmd_muon.optim.groups.param_groups import Group
from deepmd_muon.optim.polar.dispatch import unavailable
from deepmd_muon.optim.routing.routes import Route, RouteEntry
from deepmd_muon.optim.rules.interface import MatrixRule
from deepmd_muon.optim.rules.registry import matrix_rules
from deepmd_muon.optim.state.host_memory import HostMemory
from deepmd_muon.optim.state.schema import STATE_OF_ROUTE, State, StateHolder, known_tensors
from deepmd_muon.optim.update.gradients import StepControl, gradients_of, nonfinite_flags, waves
from deepmd_muon.optim.update.muon import muon_
from deepmd_muon.optim.waves import (
    RoutedParams,
    StateLists,
    StepContext,
    Wave,
    step_elements,
    waves_of,
)

if TYPE_CHECKING:
    from deepmd_muon.optim.sharded.step import ShardedStep
    from deepmd_muon.optim.update.fused_steps import FusedStepCache

# Elements from which a Muon wave is large enough to run concurrently with another one.
_LARGE_WAVE = 4 * 2**20
_is_trained = attrgetter("requires_grad")
_dtype = attrgetter("dtype")
_grad_layout = attrgetter("grad.layout")


class Snapshot:
    """The groups, settings, parameters, gradient layouts and state that a step was compiled for.

    `devices` has one parameter of each wave with its device. `shared` has the parameters that live
    on several ranks: the compiled step holds views of their local memory.
    """

    def __init__(
        self,
        param_groups: Sequence[dict[str, Any]],
        state: State,
        workspace: int,
        devices: Sequence[tuple[Tensor, torch.device]],
        shared: Sequence[Tensor],
    ) -> None:
        self._groups = list(param_groups)
        self._workspace = workspace
        self._settings = list(map(raw_structure, param_groups))
        self._sizes = [len(group["params"]) for group in param_groups]
        self._params = [p for group in param_groups for p in group["params"]]
        self._kinds = _kinds(self._params)
        self._gradients = _layouts(self._params)
        self._states = list(state.values())
        # For each key of state: a getter, the dicts that have the key, and their tensors.
        self._tensors = []
        for key in known_tensors():
            holders = [values for values in self._states if key in values]
            if holders:
                self._tensors.append(
                    (itemgetter(key), holders, [values[key] for values in holders])
                )
        self._devices = devices
        self._shared = shared
        self._specs = list(map(spec_of, shared))
        self._addresses = [local_of(p).data_ptr() for p in shared]

    def holds(self, param_groups: Sequence[dict[str, Any]], state: State, workspace: int) -> bool:
        """Return whether the compiled step is still valid."""
        # The cheapest checks first. Every eager step of a small model waits for this, so it uses
        # `map` with functions of the operator module, which is faster than comprehensions.
        return (
            [len(group["params"]) for group in param_groups] == self._sizes
            and all(map(is_, param_groups, self._groups))
            and workspace == self._workspace
            and all(map(eq, map(raw_structure, param_groups), self._settings))
            and self.same_tensors(param_groups, state)
            and _layouts(self._params) == self._gradients
            and _kinds(self._params) == self._kinds
            and self._same_shardings_of_gradients()
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
                    all(map(is_, map(get, holders), tensors))
                    for get, holders, tensors in self._tensors
                )
                and all(p.device == device for p, device in self._devices)
                and all(map(is_, map(spec_of, self._shared), self._specs))
                and [local_of(p).data_ptr() for p in self._shared] == self._addresses
            )
        except KeyError:  # a state tensor has been deleted
            return False

    def _same_shardings_of_gradients(self) -> bool:
        for p, spec in zip(self._shared, self._specs, strict=True):
            # Comparing specs takes long; they are almost always the same object.
            if p.grad is not None and spec_of(p.grad) is not spec and spec_of(p.grad) != spec:
                return False
        return True


def _layouts(params: Sequence[Tensor]) -> list[torch.layout | None]:
    """Return the layouts of gradients, None for a missing gradient."""
    try:  # twice as fast, if all parameters have a gradient
        return list(map(_grad_layout, params))
    except AttributeError:
        return [None if p.grad is None else p.grad.layout for p in params]


def _kinds(params: Sequence[Tensor]) -> tuple[list[bool], list[torch.dtype], list[int]]:
    """Return what `Module.to` and an assignment to `.data` change in a parameter.

    The number of elements represents the shape: reading shapes takes several times as long.
    """
    trained = list(map(_is_trained, params))
    dtypes = list(map(_dtype, params))
    sizes = list(map(Tensor.numel, params))
    return trained, dtypes, sizes


class CompiledStep:
    """Everything that is compiled or cached for the steps of one optimizer.

    Attributes
    ----------
    params
        The parameters that have a gradient.
    sharded
        The part of the step on parameters that live on several ranks; None when there are none.
    side_stream
        Stream of the Adam routes if they run concurrently with the Muon route; None if they run
        after it.
    wave_streams
        Two streams on which large Muon waves take turns: kernels limited by memory, and products
        that do not occupy all multiprocessors, run beside the products of another wave. Empty if
        there are fewer than two such waves.
    """

    def __init__(self) -> None:
        self.params: list[Tensor] = []
        self.sharded: ShardedStep | None = None
        self.side_stream: SideStream | None = None
        self.wave_streams: tuple[SideStream, ...] = ()
        self._groups: Sequence[Group] = ()
        self._numbers: list[Any] = []  # of the groups, that schedulers may change
        self._rules: list[tuple[MatrixRule, ...]] = []  # of the groups
        self._with_gradients: list[RoutedParams] = []  # for each group
        self._waves: list[Wave] | None = None
        self._snapshot: Snapshot | None = None
        # Kept, since memory allocated on a stream is reused by that stream only.
        self._streams: dict[torch.device, list[SideStream]] = {}
        self._fused: FusedStepCache | None = None

    def holds(self, param_groups: Sequence[dict[str, Any]], state: State, workspace: int) -> bool:
        """Return whether the compiled step is still valid."""
        return self._snapshot is not None and self._snapshot.holds(param_groups, state, workspace)

    def follow_schedules(self) -> bool:
        """Take over numbers that schedulers have changed in groups; the compiled step reads them.

        Return False if rules depend on them, so that the step must be prepared again.
        """
        numbers = [raw_numbers(group.values) for group in self._groups]
        if numbers == self._numbers:
            return True
        for group in self._groups:
            group.follow_schedules()
        if [matrix_rules(group.settings) for group in self._groups] != self._rules:
            return False
        self._numbers = numbers
        return True

    def prepare(self, groups: Sequence[Group], state: State) -> None:
        """Collect the parameters that have a gradient; `run` compiles the step itself.

        Raises InvalidGradientError when a gradient is sparse.
        """
        former = self._snapshot
        self._snapshot = None
        self._waves = None
        self._groups = groups = self._known_objects(groups)
        self._numbers = [raw_numbers(group.values) for group in groups]
        self._rules = [matrix_rules(group.settings) for group in groups]
        self._with_gradients = [_with_gradient(group) for group in groups]
        self.params = [p for routed in self._with_gradients for p, _ in routed]
        if self.sharded is not None:
            param_groups = [group.values for group in groups]
            same = former is not None and former.same_tensors(param_groups, state)
            self.sharded.prepare(groups, state, same_tensors=same)

    def _known_objects(self, groups: Sequence[Group]) -> Sequence[Group]:
        """Return the objects of the former step for the same groups: parts of the step hold them.

        After a change of routes `reset` has released them.
        """
        former = self._groups
        if [id(group.values) for group in former] != [id(group.values) for group in groups]:
            return groups
        for group, present in zip(former, groups, strict=True):
            group.settings = present.settings
        return former

    def decide(
        self,
        on_nonfinite: NonFinite,
        scale: Tensor | None,
        skip: Tensor | None,
        *,
        agreed: bool = False,
        same_gradients: bool = False,
    ) -> StepControl:
        """Decide on the device, identically on all ranks, whether this step is skipped.

        `scale` and `skip` are those of a gradient scaler. With `agreed`, `skip` is the same on all
        ranks, so they do not compare it. With `same_gradients` they do not compare which gradients
        exist either.

        Raises
        ------
        NonFiniteGradientError
            When a gradient holds NaN or infinity, `on_nonfinite` is 'error' and no scaler skips the
            step.
        """
        if on_nonfinite == "ignore" and (self.sharded is None or agreed):
            if self.sharded is not None:
                self.sharded.agree(None, same_gradients=same_gradients)
            return StepControl(skip, scale)
        # In the same order on all ranks.
        routed = [parameter for group in self._groups for parameter in group.routed]
        # For an error, the host reads the flags, one per parameter.
        names_wanted = on_nonfinite == "error" and skip is None
        flags = skip
        if on_nonfinite != "ignore":
            # Gradients that have elements on this rank, by number of the parameter.
            gradients = {
                number: local_of(p.grad)
                for number, (p, entry) in enumerate(routed)
                if p.grad is not None and entry.route != "frozen" and local_of(p.grad).numel()
            }
            bad = torch.zeros(0, device="cpu")
            if gradients:
                bad = nonfinite_flags(list(gradients.values())).float()
            if names_wanted:
                flags = bad.new_zeros(len(routed))
                flags[list(gradients)] = bad
            else:
                flags = bad.amax() if gradients else bad.sum()
                if skip is not None:
                    flags = torch.maximum(skip.to(flags.device), flags)
        if self.sharded is not None:
            flags = self.sharded.agree(flags, same_gradients=same_gradients)
        if flags is None or not flags.numel():
            return StepControl(None, scale)
        if names_wanted and flags.any():
            names = [
                entry.name
                for (_, entry), is_bad in zip(routed, flags.tolist(), strict=True)
                if is_bad
            ]
            raise NonFiniteGradientError(names)
        return StepControl(flags.amax() if flags.ndim else flags, scale)

    def run(
        self, state: State, memory: HostMemory | None, workspace: int, control: StepControl
    ) -> None:
        """Step all parameters that have a gradient; compile the step if necessary."""
        context = StepContext(self._groups, state, memory, workspace)
        if self.sharded is not None:
            self.sharded.run(context, control, self._step_matrices)
        if self._waves is None:
            self._waves = self._compile(context)
        self._step_waves(self._waves, memory, control)
        if self._snapshot is None:
            self._snapshot = Snapshot(
                param_groups=[group.values for group in self._groups],
                state=state,
                workspace=workspace,
                devices=[(wave.params[0], wave.device) for wave in self._waves],
                shared=[] if self.sharded is None else self.sharded.params,
            )

    def compile_kernels(self, groups: Sequence[Group], workspace: int) -> None:
        """Compile the kernels of the Muon route of one process before the first step, on a GPU."""
        exchanges = (
            self.sharded is not None and self.sharded.params and not self.sharded.gathers_momenta
        )
        if unavailable() or exchanges:
            return
        from deepmd_muon.optim.update.fused_steps import compile_kernels  # needs Triton

        for group in groups:
            for wave in waves(_of_route(group.routed, "muon"), workspace):
                p = wave[0][0]
                if _can_be_fused(p.device, group.settings):
                    views = tuple(entry.view for _, entry in wave if entry.view is not None)
                    compile_kernels(views, p.device, p.dtype, p.dtype, group.settings)

    def reset(self, sharded: ShardedStep | None) -> None:
        """Release all references to parameters, gradients and state, and set `sharded`.

        The next step is compiled again.
        """
        self._snapshot = None
        self._waves = None
        self._groups = ()
        self._numbers = []
        self._with_gradients = []
        self.params = []
        self.sharded = sharded
        if sharded is not None:
            sharded.reset()

    def _compile(self, context: StepContext) -> list[Wave]:
        """Return the waves that this process steps locally, the Muon route first."""
        compiled: list[Wave] = []
        for number, routed in enumerate(self._with_gradients):
            local = routed if self.sharded is None else self.sharded.params_of_one_process(routed)
            for route in STATE_OF_ROUTE:
                members = [(p, StateHolder(p, entry)) for p, entry in _of_route(local, route)]
                compiled += waves_of(context, number, route, members)
        compiled.sort(key=lambda wave: wave.route != "muon")
        self._choose_streams(compiled, offloaded=context.memory is not None)
        return compiled

    def _choose_streams(self, compiled: Sequence[Wave], *, offloaded: bool) -> None:
        """Let small Adam routes run beside the Muon route, and large waves take turns, on a GPU."""
        self.side_stream = None
        self.wave_streams = ()
        devices = {wave.device for wave in compiled}
        if offloaded or len(devices) != 1:
            return
        (device,) = devices
        if device.type != "cuda":
            return
        if device not in self._streams:
            self._streams[device] = [SideStream(device) for _ in range(3)]
        *wave_streams, side_stream = self._streams[device]
        adam_waves = [wave for wave in compiled if wave.route != "muon"]
        n_beside = sum(p.numel() for wave in adam_waves for p in wave.params)
        if 0 < len(adam_waves) < len(compiled) and n_beside <= MOST_BESIDE:
            self.side_stream = side_stream
        if sum(map(_is_large, compiled)) > 1:
            self.wave_streams = tuple(wave_streams)

    def _step_waves(
        self, compiled: Sequence[Wave], memory: HostMemory | None, control: StepControl
    ) -> None:
        side_streams = list(self.wave_streams)
        if self.side_stream is not None:
            side_streams.append(self.side_stream)
        if side_streams:
            # Before the forks: the streams read the predicate on their device.
            control = control.on(side_streams[0].device)
        for stream in side_streams:
            stream.fork()
        turns = itertools.cycle(self.wave_streams)
        states = (wave.state for wave in compiled)
        if memory is not None:  # moments in host memory are fetched when their wave comes
            batches = [wave.transfer_batch for wave in compiled if wave.transfer_batch is not None]
            fetched = zip(compiled, memory.fetch_in_turn(batches), strict=True)
            states = (wave.with_moments(moments) for wave, moments in fetched)
        for wave, state in zip(compiled, states, strict=True):
            on_device = control.on(wave.device)
            if wave.route == "muon":
                takes_turns = bool(self.wave_streams) and _is_large(wave)
                with next(turns) if takes_turns else contextlib.nullcontext():
                    self._step_matrices(wave, state, on_device)
            else:
                with self.side_stream or contextlib.nullcontext():
                    step_elements(wave, gradients_of(wave.params), state, on_device)

    def _step_matrices(self, wave: Wave, state: StateLists, control: StepControl) -> None:
        """Take a step of the Muon route."""
        settings = wave.group.settings
        of_rules = {key: tensors for key, tensors in state.items() if key != "momentum_buffer"}
        lists = (wave.params, state["momentum_buffer"], of_rules, wave.views)
        options: dict[str, Any] = {
            "lr": wave.group.lr,
            "settings": settings,
            "control": control,
            "maximize": wave.group.values["maximize"],
        }
        if _can_be_fused(wave.device, settings):
            if self._fused is None and not unavailable():
                from deepmd_muon.optim.update.fused_steps import FusedStepCache  # needs Triton

                self._fused = FusedStepCache()
            if self._fused is not None and self._fused.step(*lists, **options):
                return
        muon_(*lists, **options)


def _is_large(wave: Wave) -> bool:
    """Return whether a wave is a large one of the Muon route."""
    return wave.route == "muon" and sum(p.numel() for p in wave.params) > _LARGE_WAVE


def _can_be_fused(device: torch.device, settings: HybridMuonConfig) -> bool:
    """Return whether the fused form of the Muon route may be used."""
    return device.type == "cuda" and settings.flash_muon and settings.schedule != DEEPMD_KIT


def _of_route(routed: Iterable[tuple[Tensor, RouteEntry]], route: Route) -> RoutedParams:
    """Return the parameters of a route, equal shapes adjacent.

    They then share batches even if there are several waves.
    """

    def matrix_shape(parameter: tuple[Tensor, RouteEntry]) -> tuple[int, int]:
        view = parameter[1].view
        return (view.rows, view.columns) if view else (0, 0)

    return sorted([(p, entry) for p, entry in routed if entry.route == route], key=matrix_shape)


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
