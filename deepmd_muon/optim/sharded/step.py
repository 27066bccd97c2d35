"""The optimizer's step for parameters that live on several ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from deepmd_muon.optim.config import ShardedSettings
from deepmd_muon.optim.cuda import MOST_BESIDE, SideStream, is_capturing
from deepmd_muon.optim.errors import CaptureError, ShardingError, UnsupportedTransportError
from deepmd_muon.optim.groups.param_groups import Group
from deepmd_muon.optim.routing.routes import is_local
from deepmd_muon.optim.sharded.agreement import (
    ComparedParameter,
    GradientPresence,
    GroupColumns,
    check_replicas,
    check_settings,
)
from deepmd_muon.optim.sharded.elements import ElementwiseStep
from deepmd_muon.optim.sharded.params import (
    DTYPES,
    Replicas,
    ShardedParameter,
    layout_error,
    layout_of,
    state_sharding,
)
from deepmd_muon.optim.sharded.pipeline import Pipeline, PipelineStep
from deepmd_muon.optim.sharded.plan import PlannedParameter, make_plan
from deepmd_muon.optim.sharded.process_groups import check_agreement, group_of
from deepmd_muon.optim.sharded.repeated import RepeatedMuon, StepMatrices
from deepmd_muon.optim.sharded.transport import CollectiveStream
from deepmd_muon.optim.state.host_memory import HostMemory, TransferBatch
from deepmd_muon.optim.state.schema import State
from deepmd_muon.optim.update.gradients import StepControl
from deepmd_muon.optim.waves import RoutedParams


def sharded_step(
    groups: Sequence[Group], replicas: Replicas | None, settings: ShardedSettings
) -> ShardedStep | None:
    """Return the step of the parameters that live on several ranks; None without any.

    Raises
    ------
    ShardingError, UnsupportedTransportError
        When a parameter has a dtype, or a sharding of its state, that cannot be stepped on several ranks.
    """
    sharded_params = []
    for number, group in enumerate(groups):
        for p, entry in group.routed:
            layout = layout_of(p, None if is_local(entry.name, group.settings) else replicas)
            if layout is not None and entry.route != "frozen":
                sharding = None
                if (
                    settings.state == "sharded"
                    and replicas is not None
                    and not isinstance(p, DTensor)
                ):
                    sharding = state_sharding(p, replicas, matrices=entry.route == "muon")
                sharded_params.append(
                    ShardedParameter(p, entry, number, layout, p.device, sharding)
                )
                if p.dtype not in DTYPES:
                    raise UnsupportedTransportError(
                        f"{sharded_params[-1]}: {p.dtype} cannot be stepped; freeze it, or keep it in bfloat16 or wider"
                    )
    return ShardedStep(groups, sharded_params, settings) if sharded_params else None


class ShardedStep:
    """Steps the parameters that live on several ranks, given in the optimizer's order.

    Attributes
    ----------
    plan
        The plan of the Muon route; plain values, made without communication.
    params
        The parameters; empty if every replica takes the whole step by itself.
    holders
        By parameter, the object that creates and lays out its state.
    gathers
        Whether momenta are gathered before the step, and every replica orthogonalizes whole matrices by itself.
    """

    def __init__(
        self,
        groups: Sequence[Group],
        sharded_params: Sequence[ShardedParameter],
        settings: ShardedSettings,
    ) -> None:
        self._settings = settings
        self._sharded_params = list(sharded_params)
        self.holders = {param.p: param for param in sharded_params}
        self._device = sharded_params[0].device
        self._muon = [param for param in sharded_params if param.entry.route == "muon"]
        planned = []
        for param in self._muon:
            state_layout = param.sharding.layout if param.sharding else None
            own = groups[param.group].settings
            planned.append(
                PlannedParameter.of(param.entry, param.p.dtype, own, param.layout, state_layout)
            )
        self.plan = make_plan(planned, settings)
        # Replicas that repeat the work take the single-process step, with all its fast paths, once their plans agree.
        plain = not any(isinstance(param.p, DTensor) for param in sharded_params)
        sharding = any(param.sharding is not None for param in sharded_params)
        self._repeating = (
            plain and not sharding and not any(domain.buckets for domain in self.plan.domains)
        )
        self.gathers = any(domain.gathered for domain in self.plan.domains)
        self._met: set[Tensor] = set()
        self.params: list[Tensor] = [] if self._repeating else [param.p for param in sharded_params]
        self._agreed = False
        self._columns = GroupColumns(sharded_params)
        self._prepared: tuple[Sequence[Group], State] = ((), {})
        self._error: ShardingError | None = None
        self._bound = self._compiled = False
        self._groups: list[dist.ProcessGroup | None] = []
        self._pipeline: Pipeline | None = None
        self._repeated: RepeatedMuon | None = None
        self._elements: ElementwiseStep | None = None
        self._beside: SideStream | None = None  # of small Adam routes, on a GPU
        self._presence: GradientPresence | None = None

    def reset(self) -> None:
        """Release all references to parameters' memory and state; the next step binds them again."""
        self._bound = self._compiled = False
        self._prepared = (), {}
        if self._elements is not None:
            self._elements.waves = []
        for update in self._pipeline.momentum_updates if self._pipeline is not None else ():
            update.buffers = []
        if self._repeated is not None:
            self._repeated.release()

    def raise_deferred(self) -> None:
        """Raise deferred errors from the previous step; without communication."""
        if self._repeated is not None:
            self._repeated.wait()
        if self._presence is not None:
            self._presence.raise_deferred()

    def local_params(self, routed: RoutedParams) -> RoutedParams:
        """Return the parameters among these that each process steps by itself."""
        return (
            routed
            if self._repeating
            else [(p, entry) for p, entry in routed if p not in self.holders]
        )

    def never_met(self) -> int:
        """Return the number of matrices that have had no gradient here in any step; they have state nevertheless."""
        return 0 if self._repeating else sum(param.p not in self._met for param in self._muon)

    def prepare(self, groups: Sequence[Group], state: State, *, same_tensors: bool) -> None:
        """Check parameters, gradients and state; `agree` raises the errors on all ranks."""
        self._met.update(param.p for param in self._muon if param.p.grad is not None)
        self._error = layout_error(state, self._sharded_params)
        self._prepared = groups, state
        self._columns.groups, self._columns.read = groups, []
        self._compiled = False
        self._bound = self._bound and same_tensors

    def agree(self, flags: Tensor | None) -> Tensor | None:
        """Agree with the other ranks to take a step; return the elementwise maximum of all ranks' flags.

        Raises
        ------
        ShardingError
            On all ranks, when a parameter or its state cannot be exchanged; nothing is changed.
        MissingGradientError
            On all ranks, when only some replicas have a gradient of a parameter whose step is not exchanged; on a GPU
            in the next step, or by `raise_deferred`.
        PlanMismatchError
            On all ranks, when parameters or routes differ in the first step, or settings of groups then or later.
        ReplicaMismatchError
            On all ranks, in the first step, when replicas differ.
        CaptureError
            During the capture of a CUDA graph, if no such step was taken before.
        """
        ready = self._repeating or (self._bound and self._elements is not None)
        if is_capturing() and not (self._agreed and ready):
            raise CaptureError(
                "parameters or state have changed since the last step, or there was none; "
                "take a step before the capture"
            )
        if not self._agreed:
            self._groups = [group_of(domain.ranks, self._device) for domain in self.plan.domains]
            for domain, group in zip(self.plan.domains, self._groups, strict=True):
                check_agreement(self.plan, domain, group, self._device, self._error)
        if self._error is not None:
            raise self._error
        if not self._agreed:
            groups, state = self._prepared
            check_settings(groups, self._sharded_params, self._device)
            check_replicas(state, self._sharded_params, self._device)
        self._agreed = True
        if self._presence is None:
            self._presence = self._compare_presence()
        return self._presence.compare(None if flags is None else flags.to(self._device).reshape(-1))

    def start(self) -> None:
        """Start the exchanges of the next step that need no gradient, if the last step has left everything ready."""
        if self._repeated is not None and self._bound and self._compiled:
            self._repeated.start()

    def run(
        self,
        groups: Sequence[Group],
        state: State,
        memory: HostMemory | None,
        workspace: int,
        control: StepControl,
        step_matrices: StepMatrices,
    ) -> None:
        """Take the step; the Adam routes run beside the Muon route, or while its first pieces are exchanged.

        `step_matrices` takes the step of a single process.
        """
        if self._repeating:
            return
        elements = self._elements or self._build()
        self._bind(elements, groups, state, memory, workspace)
        moments = None
        if memory is not None:
            before, after = self._transfer_batches(state, memory)
            own = [
                wave.transfer_batch for wave in elements.waves if wave.transfer_batch is not None
            ]
            moments = memory.fetch_in_turn([*before, *own, *after])
        if self._repeated is not None:
            self._run_repeated(self._repeated, elements, control, moments, step_matrices)
            return
        run = (
            None
            if self._pipeline is None
            else PipelineStep(self._pipeline, groups, state, memory, control, moments)
        )
        arriving = elements.step(control, moments)
        if run is not None:
            arriving += run.finish()
        for _ in moments or ():  # copies the last batch back to the host
            pass
        for take in arriving:
            take()

    def _run_repeated(
        self,
        repeated: RepeatedMuon,
        elements: ElementwiseStep,
        control: StepControl,
        moments: Iterator[list[Tensor]] | None,
        step_matrices: StepMatrices,
    ) -> None:
        """Take the step with gathered momenta; small Adam routes run beside the Muon route on a GPU."""
        repeated.start()
        if moments is not None or self._beside is None:
            arriving = elements.step(control, moments)
            repeated.step(control, moments, step_matrices)
            for _ in moments or ():  # copies the last batch back to the host
                pass
            for take in arriving:
                take()
        else:
            control = control.on(self._device)  # before the fork: both streams read it
            self._beside.fork()
            repeated.step(control, None, step_matrices)
            with self._beside:
                for take in elements.step(control, None):
                    take()
        if self._settings.free_gradients:
            repeated.free_gradients()

    def _build(self) -> ElementwiseStep:
        """Make the parts of the step, before the first one."""
        collectives = CollectiveStream(self._device)
        others = [param for param in self._sharded_params if param.entry.route != "muon"]
        if self.gathers:
            self._repeated = RepeatedMuon(self._muon, collectives)
            if (
                self._device.type == "cuda"
                and sum(param.p.numel() for param in others) <= MOST_BESIDE
            ):
                self._beside = SideStream(self._device)
        elif self._muon:
            self._pipeline = Pipeline(self.plan, self._muon, self._groups, collectives)
        self._elements = ElementwiseStep(others, collectives)
        return self._elements

    def _bind(
        self,
        elements: ElementwiseStep,
        groups: Sequence[Group],
        state: State,
        memory: HostMemory | None,
        workspace: int,
    ) -> None:
        """Create what depends on parameters, gradients and state, where these have changed."""
        if self._pipeline is not None and not self._bound:
            self._pipeline.bind(groups, state, memory)
        if self._repeated is not None and not self._bound:
            self._repeated.bind(groups, state, memory, workspace)
        if not self._compiled or not self._bound:
            elements.compile(groups, state, memory, workspace)
            if self._repeated is not None:
                self._repeated.choose()
        self._bound = self._compiled = True

    def _transfer_batches(
        self, state: State, memory: HostMemory
    ) -> tuple[list[TransferBatch], list[TransferBatch]]:
        """Return the transfer batches of the Muon route's momenta, before and after those of the Adam routes."""
        if self._pipeline is not None:
            return self._pipeline.transfer_batches(state, memory)
        return [], [] if self._repeated is None else self._repeated.transfer_batches()

    def _compare_presence(self) -> GradientPresence:
        """Return the comparison of gradients for parameters whose replicas would otherwise diverge."""
        still = self._repeating or self.gathers
        sharded_params = (
            self._sharded_params
            if still
            else [m for m in self._sharded_params if m.entry.route != "muon"]
        )
        compared = [
            ComparedParameter(
                param.p, f"{param} (route {param.entry.route})", tuple(sorted(param.layout.ranks))
            )
            for param in sharded_params
            if len(param.layout.replicas()) > 1
        ]
        known = [tuple(sorted(param.layout.ranks)) for param in self._sharded_params]
        return GradientPresence(compared, known, self._device, columns=self._columns)
