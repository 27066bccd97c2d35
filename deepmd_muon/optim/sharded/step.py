"""The optimizer's step for parameters that live on several ranks: agreement, then the step.

The protocol
------------
`HybridMuon` makes a `ShardedStep` with `sharded_step` when it routes parameters: at first, when
parameters or routes have changed, and when a state dict is loaded.
In each step `CompiledStep` makes these calls, on all ranks:

    call       when                                 what                             communication
    prepare    gradients, settings, parameters      checks this rank, and keeps      none
               or state have changed                its error
    agree      every step                           compares ranks, raises errors    one all-reduce
    run        every step                           takes the step                   all others

The first `agree` also takes the checks of the first step, a few collectives. The all-reduce is
small, and left out if there is nothing to compare (`StepComparison`).

Between steps `HybridMuon` makes these:

    start             optional: starts the gathers of momenta for the next step
    raise_deferred    before state is read or replaced: raises what `agree` learns one step late
    reset             when state has moved to other memory: releases it

The ways of a step
------------------
The plan chooses a way for each domain of matrices. On the Adam routes, the layout of a parameter
and of its state determines the way:

    layout of parameters                              Muon route                Adam routes
    DTensors (FSDP, tensor parallelism)               `Pipeline`                `ElementwiseStep`
    replicas, the plan shares the work                `Pipeline`                `ElementwiseStep`
    replicas, state in parts, the work repeated       `RepeatedMuon`            `ElementwiseStep`
    replicas, whole state, the work repeated          single process            single process

If the last row holds for all parameters, a `ShardedStep` only agrees, and each process takes the
step of a single process with all its fast paths. Otherwise `run` steps all parameters
(`StepParts`). Then the `Pipeline` also has the matrices of the last row, with jobs that stay, and
`ElementwiseStep` the other parameters of the last row.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from deepmd_muon.optim.config import HybridMuonConfig, ShardedSettings
from deepmd_muon.optim.cuda import is_capturing
from deepmd_muon.optim.errors import (
    CaptureError,
    PlanMismatchError,
    ShardingError,
    UnsupportedTransportError,
)
from deepmd_muon.optim.groups.param_groups import Group
from deepmd_muon.optim.routing.routes import is_local
from deepmd_muon.optim.sharded.agreement import (
    ComparedParameter,
    StepComparison,
    check_replicas,
    check_routes_and_settings,
    shared_groups,
)
from deepmd_muon.optim.sharded.layout import RankSet
from deepmd_muon.optim.sharded.params import (
    DTYPES,
    Replicas,
    ShardedParameter,
    layout_error,
    layout_of,
    state_sharding,
)
from deepmd_muon.optim.sharded.plan import Plan, PlannedParameter, make_plan
from deepmd_muon.optim.sharded.process_groups import (
    RankGroup,
    Statement,
    check_statements,
    group_of,
    largest_set,
)
from deepmd_muon.optim.sharded.repeated import StepMatrices
from deepmd_muon.optim.sharded.step_parts import StepParts
from deepmd_muon.optim.state.schema import State
from deepmd_muon.optim.update.gradients import StepControl
from deepmd_muon.optim.waves import RoutedParams, StepContext


def sharded_step(
    groups: Sequence[Group], replicas: Replicas | None, settings: ShardedSettings
) -> ShardedStep | None:
    """Return the step of the parameters that live on several ranks; None without any.

    Raises
    ------
    ShardingError
        When the blocks of a parameter are interleaved in groups, or when the sets of ranks that
        hold parameters only overlap.
    UnsupportedTransportError
        When a parameter has a dtype that cannot be stepped on several ranks.
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
    """The step of the parameters that live on several ranks, given in the optimizer's order.

    They must be on one device, which is not checked.

    Attributes
    ----------
    plan
        The plan of the Muon route; plain values, made without communication.
    params
        The parameters that `run` steps; empty if this object only agrees.
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
        # Raises if no set of ranks contains the others.
        largest_set([param.layout.sorted_ranks for param in sharded_params])
        self._sharded_params = list(sharded_params)
        self._device = sharded_params[0].device
        self.state_holders = {param.p: param for param in sharded_params}
        self._matrices = [param for param in sharded_params if param.entry.route == "muon"]
        self.plan = _plan_of(self._matrices, groups, settings)

        # The ways of the module's docstring. Matrices by position in the plan:
        self._repeated = {
            i: self._matrices[i]
            for domain in self.plan.domains
            if domain.gathers_momenta
            for i in domain.parameters
        }
        self._pipelined = {
            i: param for i, param in enumerate(self._matrices) if i not in self._repeated
        }
        self.gathers_momenta = bool(self._repeated)
        self._only_agrees = not (
            any(isinstance(param.p, DTensor) or param.sharding for param in sharded_params)
            or any(domain.n_buckets for domain in self.plan.domains)
        )
        self.params: list[Tensor] = []
        if not self._only_agrees:
            self.params = [param.p for param in sharded_params]

        # Set by `prepare` for the following steps.
        self._groups: Sequence[Group] = ()
        self._state: State = {}
        # By group: its settings, with defaults for the numbers that schedulers change.
        self._structures: list[HybridMuonConfig] = []
        self._error: ShardingError | None = None  # of this rank; `agree` raises it
        self._ever_with_gradient: set[Tensor] = set()  # matrices that ever had a gradient
        # Set by the first `agree`.
        self._has_checked = False  # whether all checks of the first step have passed
        self._process_groups: list[dist.ProcessGroup | None] = []  # of the plan's domains
        self._comparison: StepComparison | None = None
        # Made by the first `run`.
        self._parts: StepParts | None = None
        # What has changed since `_parts` took a step. "tensors": parameters, their state or
        # settings, and possibly gradients; "gradients": only which ones exist; None: neither.
        self._changed: Literal["tensors", "gradients"] | None = "tensors"

    # ----- before a step -------------------------------------------------------------------------

    def prepare(self, groups: Sequence[Group], state: State, *, same_tensors: bool) -> None:
        """Check and keep parameters, gradients and state; `agree` raises the errors.

        `same_tensors` says that parameters and state are the same tensors as in the last step.
        """
        self._ever_with_gradient.update(
            param.p for param in self._matrices if param.p.grad is not None
        )
        self._error = layout_error(state, self._sharded_params)
        # The parts of the step read numbers that schedulers change (lr, …) when they run; other
        # settings are bound.
        structures = [group.settings.structure for group in groups]
        if not same_tensors or structures != self._structures:
            self._changed = "tensors"
        elif self._changed is None:
            self._changed = "gradients"
        self._structures = structures
        self._groups = groups
        self._state = state

    def agree(self, flags: Tensor | None, *, same_gradients: bool = False) -> Tensor | None:
        """Agree with the other ranks to take a step; return the maximum of all ranks' flags.

        The ranks are those of the largest set of ranks that hold a parameter of this rank. Flags
        are float32, of any shape; their maxima are (n,), or None without flags. With
        `same_gradients` gradients are not compared, and settings in the first step only. These
        ranks raise errors together, with one exception.

        Raises
        ------
        ShardingError
            When a parameter or its state cannot be exchanged; nothing is changed. The exception: after
            the first step only this rank raises it, and the collectives of the others fail when its
            process ends, or by timeout.
        MissingGradientError
            When only some replicas have a gradient of a parameter; on a GPU in the next step, or by
            `raise_deferred`.
        PlanMismatchError
            When parameters, routes or settings of groups differ in the first step. Later, when
            settings of groups differ; it comes as late as MissingGradientError.
        ReplicaMismatchError
            In the first step, when replicas differ.
        CaptureError
            During the capture of a CUDA graph, if no step was taken before or `run` has to bind
            again.
        """
        is_bound = self._only_agrees or self._changed != "tensors"
        if is_capturing() and not (self._has_checked and is_bound):
            raise CaptureError(
                "parameters or state have changed since the last step, or there was none; "
                "take a step before the capture"
            )
        if not self._has_checked:
            self._check_first_step()
        elif self._error is not None:
            raise self._error
        if self._comparison is None:
            self._comparison = StepComparison(
                self._compared_parameters(),
                [param.layout.sorted_ranks for param in self._sharded_params],
                self._device,
                groups=shared_groups(self._sharded_params),
            )
        if flags is not None:
            flags = flags.to(self._device).reshape(-1)
        return self._comparison.compare(flags, self._groups, only_flags=same_gradients)

    def _check_first_step(self) -> None:
        """Make the process groups of the plan, and check that all ranks take the same step.

        The ranks of each domain compare their plans. Errors are shared by the following checks,
        which are collectives of all ranks that share a parameter with this one, so that they raise
        together.
        """
        params = self._sharded_params
        device = self._device
        error = self._error
        self._process_groups = [group_of(domain.ranks, device) for domain in self.plan.domains]
        for domain, process_group in zip(self.plan.domains, self._process_groups, strict=True):
            if process_group is None:
                continue
            texts = self.plan.statements(domain)
            statements = [Statement(domain.ranks, text) for text in texts]
            try:
                check_statements(statements, RankGroup(domain.ranks, process_group, device))
            except PlanMismatchError as mismatch:
                # Raised below: ranks outside of this domain must learn of it.
                error = error or mismatch
        check_routes_and_settings(self._state, self._groups, params, device, error=error)
        if error is not None:  # on a single rank
            raise error
        check_replicas(self._state, params, device)
        self._has_checked = True

    def _compared_parameters(self) -> list[ComparedParameter]:
        """Return the parameters with replicas that would diverge if only some had a gradient."""
        compared = []
        pipelined = {param.p for param in self._pipelined.values()}
        for param in self._sharded_params:
            ranks = param.layout.sorted_ranks
            if param.p in pipelined and not self._only_agrees:
                ranks = _ranks_with_shard(param)
            elif len(param.layout.replicas()) == 1:
                continue  # no replica to diverge from
            if len(ranks) > 1:
                name = f"{param} (route {param.entry.route})"
                compared.append(ComparedParameter(param.p, name, ranks))
        return compared

    def start(self) -> None:
        """Start the gathers of momenta for the next step, which need no gradient.

        Before the first step, and after a change of tensors or gradients, `run` starts them.
        """
        if self._parts is not None and self._parts.repeated is not None and self._changed is None:
            self._parts.repeated.start()

    # ----- the step ------------------------------------------------------------------------------

    def run(self, context: StepContext, control: StepControl, step_matrices: StepMatrices) -> None:
        """Take the step; `step_matrices` steps a wave of matrices as a single process does."""
        if self._only_agrees:
            return
        if self._parts is None:
            self._parts = StepParts(
                self.plan,
                self._process_groups,
                pipelined=self._pipelined,
                repeated=self._repeated,
                elementwise=[
                    param for param in self._sharded_params if param.entry.route != "muon"
                ],
                device=self._device,
            )
        if self._changed == "tensors":
            self._parts.bind(context)
        if self._changed is not None:
            self._parts.choose_with_gradient(context)
            self._changed = None
        self._parts.step(context, control, step_matrices)

    # ----- between steps -------------------------------------------------------------------------

    def raise_deferred(self) -> None:
        """Raise deferred errors from the previous step; start no collective.

        Also wait for the gathers of momenta that `start` has started: the caller may replace state.
        """
        if self._parts is not None and self._parts.repeated is not None:
            self._parts.repeated.wait()
        if self._comparison is not None:
            self._comparison.raise_deferred()

    def reset(self) -> None:
        """Release the state; the next step binds parameters and state again.

        Until then buckets keep their views of both. References to parameters stay.
        """
        self._changed = "tensors"
        self._groups = ()
        self._state = {}
        if self._parts is not None:
            self._parts.release()

    def params_of_one_process(self, routed: RoutedParams) -> RoutedParams:
        """Return the parameters among these that each process steps by itself."""
        if self._only_agrees:
            return routed
        return [(p, entry) for p, entry in routed if p not in self.state_holders]

    def n_never_with_gradient(self) -> int:
        """Return the number of matrices with state that never had a gradient on this rank."""
        if self._only_agrees:
            return 0
        return sum(param.p not in self._ever_with_gradient for param in self._matrices)


def _plan_of(
    matrices: Sequence[ShardedParameter], groups: Sequence[Group], settings: ShardedSettings
) -> Plan:
    """Return the plan of these parameters of the Muon route, in this order."""
    planned = [
        PlannedParameter.of(
            param.entry,
            param.p.dtype,
            groups[param.group].settings,
            layout=param.layout,
            state_layout=param.sharding.layout if param.sharding else None,
        )
        for param in matrices
    ]
    return make_plan(planned, settings)


def _ranks_with_shard(param: ShardedParameter) -> RankSet:
    """Return the ranks that hold the same shard of a momentum as this rank, one in each replica.

    In the pipeline, headers tell which gradients exist, but only within one replica of the
    momentum. Different replicas must therefore agree, shard by shard.
    """
    layout = param.sharding.layout if param.sharding else param.layout
    rank = dist.get_rank()
    shards = zip(*layout.replicas(), strict=True)
    return next(tuple(sorted(ranks)) for ranks in shards if rank in ranks)
