"""The optimizer's step for parameters that live on several ranks.

`ShardedStep.prepare` checks this rank. `agree` compares it with the others and raises the errors;
its docstring says when, and on which ranks. `run` takes the step. The matrices of a domain take one
of two ways:

- a `Pipeline` exchanges pieces of matrices with their owners;
- replicas that keep momenta in parts gather them, and each repeats the work (`RepeatedMuon`).

If all parameters are plain tensors with whole state and no job travels, the optimizer only agrees
here: each process then takes the step of a single process.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from deepmd_muon.optim.config import HybridMuonConfig, ShardedSettings
from deepmd_muon.optim.cuda import MOST_BESIDE, SideStream, is_capturing
from deepmd_muon.optim.errors import CaptureError, ShardingError, UnsupportedTransportError
from deepmd_muon.optim.groups.param_groups import Group
from deepmd_muon.optim.routing.routes import is_local
from deepmd_muon.optim.sharded.agreement import (
    ComparedParameter,
    StepComparison,
    check_replicas,
    check_routes_and_settings,
    shared_groups,
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
from deepmd_muon.optim.sharded.process_groups import (
    RankGroup,
    Statement,
    check_statements,
    group_of,
    largest_set,
)
from deepmd_muon.optim.sharded.repeated import RepeatedMuon, StepMatrices
from deepmd_muon.optim.sharded.transport import CollectiveStream
from deepmd_muon.optim.state.host_memory import TransferBatch
from deepmd_muon.optim.state.schema import State
from deepmd_muon.optim.update.gradients import StepControl
from deepmd_muon.optim.waves import RoutedParams, StepContext


def sharded_step(
    groups: Sequence[Group], replicas: Replicas | None, settings: ShardedSettings
) -> ShardedStep | None:
    """Return the step of the parameters that live on several ranks; None without any.

    Raises
    ------
    ShardingError, UnsupportedTransportError
        When a parameter has a dtype, or a sharding of its state, that cannot be stepped on several
        ranks.
    """
    sharded_params = []
    for group_number, group in enumerate(groups):
        for p, entry in group.routed:
            layout = layout_of(p, None if is_local(entry.name, group.settings) else replicas)
            if layout is None or entry.route == "frozen":
                continue
            sharding = None
            if settings.state == "sharded" and replicas is not None and not isinstance(p, DTensor):
                sharding = state_sharding(p, replicas, matrices=entry.route == "muon")
            param = ShardedParameter(
                p, entry, group=group_number, layout=layout, device=p.device, sharding=sharding
            )
            if entry.view is not None and entry.view.groups > 1:
                raise ShardingError(
                    f"{param}: the view {entry.view} gathers parts of several groups, which needs "
                    "the whole parameter on its process: split it without 'in … groups', or leave "
                    "out replicas"
                )
            if p.dtype not in DTYPES:
                raise UnsupportedTransportError(
                    f"{param}: {p.dtype} cannot be stepped; freeze it, or keep it in bfloat16 or "
                    "wider"
                )
            sharded_params.append(param)
    return ShardedStep(groups, sharded_params, settings) if sharded_params else None


class ShardedStep:
    """Steps the parameters that live on several ranks, given in the optimizer's order.

    They are on one device. The order of calls:

        method     called                   requires   sets
        prepare    if gradients, settings   –          `_error` of this rank; `_compiled` False;
                   or state have changed               `_bound` False unless tensors and structure
                                                       are the same
        agree      in every step            prepare    in the first: `_agreed`, `_comparison`
        run        in every step            agree      `_bound` and `_compiled` True; in the first
                                                       the parts (`_elements`, …)
        reset      between steps            –          `_bound` and `_compiled` False

    Attributes
    ----------
    plan
        The plan of the Muon route; plain values, made without communication.
    params
        The parameters that `run` steps; empty if each replica takes the step of a single process.
    state_holders
        By parameter, the object that creates and lays out its state.
    gathers_momenta
        Whether the replicas of some domain gather momenta before the step (`RepeatedMuon`).
    """

    def __init__(
        self,
        groups: Sequence[Group],
        sharded_params: Sequence[ShardedParameter],
        settings: ShardedSettings,
    ) -> None:
        largest_set([param.layout.sorted_ranks for param in sharded_params])  # it must exist
        self._settings = settings
        self._sharded_params = list(sharded_params)
        self.state_holders = {param.p: param for param in sharded_params}
        self._device = sharded_params[0].device
        self._matrices = [param for param in sharded_params if param.entry.route == "muon"]
        self.plan = make_plan(
            [
                PlannedParameter.of(
                    param.entry,
                    param.p.dtype,
                    groups[param.group].settings,
                    layout=param.layout,
                    state_layout=param.sharding.layout if param.sharding else None,
                )
                for param in self._matrices
            ],
            settings,
        )
        # Replicas with whole state that exchange nothing take the single-process step, with all
        # its fast paths, once their plans agree.
        self._single_process = not (
            any(isinstance(param.p, DTensor) or param.sharding for param in sharded_params)
            or any(domain.n_buckets for domain in self.plan.domains)
        )
        # By position in the plan: matrices of `RepeatedMuon`, and matrices of the `Pipeline`.
        self._repeated_matrices = {
            i: self._matrices[i]
            for domain in self.plan.domains
            if domain.gathers_momenta
            for i in domain.parameters
        }
        self._pipelined = {
            i: x for i, x in enumerate(self._matrices) if i not in self._repeated_matrices
        }
        self.gathers_momenta = bool(self._repeated_matrices)
        self.params: list[Tensor] = []
        if not self._single_process:
            self.params = [param.p for param in sharded_params]

        # Set by `prepare`; `agree` reads `_groups`, `_state` and `_error`.
        self._groups: Sequence[Group] = ()
        self._state: State = {}
        self._structures: list[HybridMuonConfig] = []  # settings of groups, for `run` to bind
        self._error: ShardingError | None = None
        self._ever_with_gradient: set[Tensor] = set()  # matrices that ever had a gradient
        # Set by `agree`.
        self._agreed = False  # whether the checks of the first step have passed
        self._comparison: StepComparison | None = None

        # The parts of the step, made before the first one.
        self._process_groups: list[dist.ProcessGroup | None] = []  # of the plan's domains
        self._pipeline: Pipeline | None = None
        self._repeated: RepeatedMuon | None = None
        self._elements: ElementwiseStep | None = None
        self._side_stream: SideStream | None = None  # of small Adam routes, on a GPU
        self._bound = False  # to parameters and state
        self._compiled = False  # for the present gradients

    def reset(self) -> None:
        """Release the state; the next step binds parameters and state again.

        Until then buckets keep their views of both. References to parameters stay.
        """
        self._bound = False
        self._compiled = False
        self._groups = ()
        self._state = {}
        if self._elements is not None:
            self._elements.waves = []
        if self._pipeline is not None:
            self._pipeline.momenta = {}
        if self._repeated is not None:
            self._repeated.release()

    def raise_deferred(self) -> None:
        """Raise deferred errors from the previous step; without communication."""
        if self._repeated is not None:
            self._repeated.wait()
        if self._comparison is not None:
            self._comparison.raise_deferred()

    def params_of_one_process(self, routed: RoutedParams) -> RoutedParams:
        """Return the parameters among these that each process steps by itself."""
        if self._single_process:
            return routed
        return [(p, entry) for p, entry in routed if p not in self.state_holders]

    def n_never_with_gradient(self) -> int:
        """Return the number of matrices with state that never had a gradient on this rank."""
        if self._single_process:
            return 0
        return sum(param.p not in self._ever_with_gradient for param in self._matrices)

    # ----- agreement -----------------------------------------------------------------------------

    def prepare(self, groups: Sequence[Group], state: State, *, same_tensors: bool) -> None:
        """Check parameters, gradients and state; `agree` raises the errors."""
        self._ever_with_gradient.update(
            param.p for param in self._matrices if param.p.grad is not None
        )
        self._error = layout_error(state, self._sharded_params)
        # The parts of the step read numbers that schedulers change (lr, …) when they run; other
        # settings are bound.
        structures = [group.settings.structure for group in groups]
        self._bound = self._bound and same_tensors and structures == self._structures
        self._compiled = False
        self._structures = structures
        self._groups = groups
        self._state = state

    def agree(self, flags: Tensor | None, *, same_gradients: bool = False) -> Tensor | None:
        """Agree with the other ranks to take a step; return the maximum of their flags.

        The other ranks are those of the largest set of ranks that hold a parameter of this rank.
        With `same_gradients` gradients are not compared, and settings in the first step only.

        Raises
        ------
        ShardingError
            When a parameter or its state cannot be exchanged; nothing is changed. In the first step
            on all ranks. Later on this rank: the collectives of the others fail when its process
            ends, or by timeout.
        MissingGradientError
            On all ranks, when only some replicas have a gradient of a parameter; on a GPU in the
            next step, or by `raise_deferred`.
        PlanMismatchError
            On all ranks, when parameters or routes differ in the first step, or settings of groups
            then or later.
        ReplicaMismatchError
            On all ranks, in the first step, when replicas differ.
        CaptureError
            During the capture of a CUDA graph, if no step was taken before or `run` has to bind
            again.
        """
        ready = self._single_process or (self._bound and self._elements is not None)
        if is_capturing() and not (self._agreed and ready):
            raise CaptureError(
                "parameters or state have changed since the last step, or there was none; "
                "take a step before the capture"
            )
        params = self._sharded_params
        if not self._agreed:
            self._compare_plans()
            check_routes_and_settings(
                self._state, self._groups, params, self._device, error=self._error
            )
        if self._error is not None:
            raise self._error
        if not self._agreed:
            check_replicas(self._state, params, self._device)
        self._agreed = True
        if self._comparison is None:
            self._comparison = self._make_comparison()
        if flags is not None:
            flags = flags.to(self._device).reshape(-1)
        return self._comparison.compare(flags, self._groups, only_flags=same_gradients)

    def _compare_plans(self) -> None:
        """Make the process groups of the plan, compare plans, and raise the errors of all ranks."""
        device = self._device
        self._process_groups = [group_of(domain.ranks, device) for domain in self.plan.domains]
        for domain, process_group in zip(self.plan.domains, self._process_groups, strict=True):
            if process_group is not None:
                rank_group = RankGroup(domain.ranks, process_group, device)
                texts = self.plan.statements(domain)
                statements = [Statement(domain.ranks, text) for text in texts]
                check_statements(statements, rank_group, self._error)

    def _make_comparison(self) -> StepComparison:
        """Return the comparison of every step.

        It has the gradients of parameters whose replicas would diverge. In the pipeline, headers
        tell which gradients exist, but only within one replica of the momentum: there the ranks
        with the same shard are compared.
        """
        pipelined: set[Tensor] = set()
        if not self._single_process:
            pipelined = {param.p for param in self._pipelined.values()}
        rank = dist.get_rank()
        compared = []
        for param in self._sharded_params:
            ranks = param.layout.sorted_ranks
            if param.p in pipelined:
                momentum = param.sharding.layout if param.sharding else param.layout
                shards = zip(*momentum.replicas(), strict=True)  # ranks with one shard, by shard
                ranks = next(tuple(sorted(shard)) for shard in shards if rank in shard)
            elif len(param.layout.replicas()) == 1:
                continue
            if len(ranks) > 1:
                name = f"{param} (route {param.entry.route})"
                compared.append(ComparedParameter(param.p, name, ranks))
        return StepComparison(
            compared,
            [param.layout.sorted_ranks for param in self._sharded_params],
            self._device,
            groups=shared_groups(self._sharded_params),
        )

    # ----- the step ------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the gathers of momenta for the next step, which need no gradient, if possible."""
        if self._repeated is not None and self._bound and self._compiled:
            self._repeated.start()

    def run(self, context: StepContext, control: StepControl, step_matrices: StepMatrices) -> None:
        """Take the step; `step_matrices` steps a wave of matrices as a single process does.

        The Adam routes run while momenta are gathered and the first pieces are exchanged. If all
        matrices have gathered momenta, and moments are not offloaded, small Adam routes run on
        another stream of the GPU.
        """
        if self._single_process:
            return
        elements = self._elements or self._build()
        self._bind(elements, context)
        # Every part takes its batches with `next`, in the order of `_transfer_batches`: first
        # buckets, waves, gathered momenta, other buckets.
        moments = None
        if context.memory is not None:
            moments = context.memory.fetch_in_turn(self._transfer_batches(elements, context))
        repeated = self._repeated
        if repeated is not None:
            repeated.start()  # unless `start` has, before the step
        pipeline_step = None
        if self._pipeline is not None:  # starts the first gathers
            pipeline_step = PipelineStep(self._pipeline, context, control, moments)
        if repeated is not None and self._side_stream is not None and moments is None:
            # There is no `pipeline_step`: `_build` makes a side stream only without a pipeline.
            control = control.on(self._device)  # before the fork: both streams read it
            self._side_stream.fork()
            repeated.step(control, None, step_matrices)
            with self._side_stream:
                for wait in elements.step(control, None):
                    wait()
        else:
            waits = elements.step(control, moments)
            if repeated is not None:
                repeated.step(control, moments, step_matrices)
            if pipeline_step is not None:
                waits += pipeline_step.finish()  # exhausts `moments`
            elif moments is not None:
                for _ in moments:  # exhausting it copies the last batch back to the host
                    pass
            for wait in waits:
                wait()
        if repeated is not None and self._settings.free_gradients:
            repeated.free_gradients()

    def _build(self) -> ElementwiseStep:
        """Make the parts of the step, before the first one."""
        collectives = CollectiveStream(self._device)
        elementwise = [param for param in self._sharded_params if param.entry.route != "muon"]
        if self._pipelined:
            self._pipeline = Pipeline(self.plan, self._pipelined, self._process_groups, collectives)
        if self._repeated_matrices:
            self._repeated = RepeatedMuon(list(self._repeated_matrices.values()), collectives)
            n_elements = sum(param.p.numel() for param in elementwise)
            is_small = n_elements <= MOST_BESIDE
            if self._device.type == "cuda" and is_small and self._pipeline is None:
                self._side_stream = SideStream(self._device)
        self._elements = ElementwiseStep(elementwise, collectives)
        return self._elements

    def _bind(self, elements: ElementwiseStep, context: StepContext) -> None:
        """Create what depends on parameters, gradients and state, if these have changed."""
        if not self._bound:
            if self._pipeline is not None:
                self._pipeline.bind(context)
            if self._repeated is not None:
                self._repeated.bind(context)
        if not (self._bound and self._compiled):
            elements.compile(context)
            if self._repeated is not None:
                self._repeated.choose_with_gradient()
        self._bound = True
        self._compiled = True

    def _transfer_batches(
        self, elements: ElementwiseStep, context: StepContext
    ) -> list[TransferBatch]:
        """Return the batches of offloaded moments, in the order in which `run` must take them."""
        batches = [
            wave.transfer_batch for wave in elements.waves if wave.transfer_batch is not None
        ]
        if self._repeated is not None:
            batches += self._repeated.transfer_batches()
        if self._pipeline is None:
            return batches
        # The constructor of `PipelineStep` packs the first buckets.
        n_first = self._pipeline.n_first
        first = self._pipeline.transfer_batches(context, self._pipeline.packing_order[:n_first])
        others = self._pipeline.transfer_batches(context, self._pipeline.packing_order[n_first:])
        return [*first, *batches, *others]
