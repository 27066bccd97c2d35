"""HybridMuon: Muon for matrices, Adam and AdamW for the rest, routed by name and shape."""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from deepmd_muon.optim.arguments import Arguments, documented, takes
from deepmd_muon.optim.cuda import is_capturing, refuse_unsafe_capture
from deepmd_muon.optim.dtensors import local_of, spec_of, with_local
from deepmd_muon.optim.groups.checks import (
    check_parameters,
    refuse_partitions,
    warn_idle_master_weights,
    warn_idle_settings,
    warn_of_kernels,
    warn_unmatched_patterns,
)
from deepmd_muon.optim.groups.group_settings import (
    ParamGroup,
    change,
    complete_group,
    current_spelling,
    fold,
    group_defaults,
    settings_shown,
    unfolded,
    words_of_group,
)
from deepmd_muon.optim.groups.momentum_warmup import is_warming_up, warm_up_momentum
from deepmd_muon.optim.groups.param_groups import Group, Routing, log_parameters, with_names
from deepmd_muon.optim.qk_clip.clip import Clipper, Logits, checked_logits
from deepmd_muon.optim.routing.routes import RouteEntry, RouteTable, is_local
from deepmd_muon.optim.rules.registry import matrix_rules
from deepmd_muon.optim.sharded.plan import Plan, plan_of_one_process
from deepmd_muon.optim.state.host_memory import HostMemory
from deepmd_muon.optim.state.load import drop_unused, load_state
from deepmd_muon.optim.state.replaced import move_state
from deepmd_muon.optim.state.restore_groups import restore_groups
from deepmd_muon.optim.state.saved_choices import saved_choices
from deepmd_muon.optim.state.schema import StateHolder, complete_rules
from deepmd_muon.optim.step import CompiledStep
from deepmd_muon.optim.torch_hooks import QuickOptimizer, profiled_on_demand, read_by_grad_scaler
from deepmd_muon.optim.words import understand_words

if TYPE_CHECKING:
    from deepmd_muon.optim.sharded.step import ShardedStep

log = logging.getLogger(__name__)

# Attributes that a pickle has besides torch's; all others are computed again.
_PICKLED = (
    "workspace",
    "offload_bytes",
    "_host_memory",
    "replicas",
    "sharded",
    "qk_clip",
    "on_route_change",
    "on_nonfinite",
    "alternates",
    "agreed_skip",
    "agreed_gradients",
)


@documented(Arguments)
@understand_words
class HybridMuon(QuickOptimizer):
    r"""deepmd-kit's HybridMuon, with its arguments and defaults; `muon_for` is for any other model.

    Muon for matrices, Adam for vectors and biases, AdamW for tensors without a matrix view.

    One step of the Muon route, for a parameter viewed as matrices
    (`deepmd_muon.optim.routing.views`)::

        m ← β m + (1 − β) g
        u = β m + (1 − β) g                       (nesterov; else u = m)
        O = polar factor of u                     (schedule, precision)
        p ← p (1 − lr λ) − lr · scale · factors · O

    The setting `scaling` chooses `scale`, e.g. ``lr_adjust_coeff · sqrt(max(rows, columns))`` for
    'match_rms'; rules (`deepmd_muon.optim.rules`), such as Magma, give the factors. The Adam routes
    step with ``lr · adam_lr_ratio``.

    Parameters
    ----------
    {arguments}

    Attributes
    ----------
    routing : RouteTable
        Name, shape, view, route and reason of every parameter.
    alternates : bool
        Set this to True if steps update different parts of a model in turn, such as branches with
        separate heads. A captured step then leaves parameters without a gradient unchanged.
        Otherwise the capture raises, because a gradient that is missing at the capture is missing
        in all replays.
    agreed_skip : bool
        Set this to True if `found_inf` is the same on all ranks; steps on several ranks then do not
        compare it.
    agreed_gradients : bool
        Set this to True if gradients exist for the same parameters on all ranks in every step, with
        the same settings. Ranks then never compare gradients, and settings in the first step only.
        Some may then replay a captured step while others step eagerly, as when each captures the
        shapes of its batches: captured steps compare neither, and the collectives of all ranks must
        be the same.

    Raises
    ------
    InvalidSettingError, InvalidParameterError, InvalidShapeError
        Each a ValueError: a setting out of its range; a complex or repeated parameter; a split that
        does not fit.

    Notes
    -----
    The state of the Muon route is `momentum_buffer`, in the parameter's dtype, and rules' tensors.
    The state of the Adam routes is `step`, `exp_avg` and `exp_avg_sq`. The moments have the wider
    of float32 and the parameter's dtype.

    References
    ----------
    K. Jordan et al., "Muon", 2024; J. Liu et al., arXiv:2502.16982 (matching the update's RMS).
    """

    _step_supports_amp_scaling = property(lambda _: read_by_grad_scaler())
    alternates = agreed_skip = agreed_gradients = False
    _host_memory: HostMemory | None = None
    _sharded: ShardedStep | None = None
    _routing = Routing(())
    routing = RouteTable(())

    @takes(Arguments)
    def __init__(self, arguments: Arguments) -> None:
        self.on_route_change = arguments.on_route_change
        self.on_nonfinite = arguments.on_nonfinite
        self.workspace = arguments.workspace
        self.offload_bytes = arguments.offload_bytes
        self._host_memory = HostMemory(arguments.offload_bytes) if arguments.offload else None
        self.replicas = arguments.replicas
        self.sharded = arguments.sharded
        self.qk_clip = arguments.qk_clip
        self._compiled = CompiledStep()
        named = with_names(arguments.params, arguments.named_parameters)
        super().__init__(named, group_defaults(arguments))
        self._route_parameters()
        warn_unmatched_patterns(self.param_groups)
        warn_idle_settings(self.param_groups)
        warn_idle_master_weights(self.param_groups)
        warn_of_kernels(self._groups())

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters with their own settings; a setting left out takes the constructor's value.

        Other optimizers' words (`deepmd_muon.optim.words`) are translated. Other keys stay in the
        group and its state dict; nothing here reads them.
        """
        param_group = words_of_group(param_group, self.defaults)
        self._raise_deferred()
        with warnings.catch_warnings():
            # torch only warns of duplicates; they are refused by name below.
            warnings.filterwarnings("ignore", "optimizer contains a parameter group with duplicate")
            super().add_param_group(param_group)
        try:
            complete_group(self.param_groups[-1], self.defaults)
            if self.routing:
                self._route_parameters()
                warn_unmatched_patterns(self.param_groups, new=len(self.param_groups) - 1)
        except ValueError:
            self.param_groups.pop()
            raise

    def _route_parameters(self) -> None:
        """Recompute the routes and store them in the groups.

        The state of replaced parameters moves to the new ones of the same names.
        """
        self._raise_deferred()
        refuse_partitions(self.param_groups, self._routing.routes)
        check_parameters(self.param_groups)
        routing = Routing(self.param_groups, moves=self.replicas is None)
        groups = routing.groups(self.param_groups)
        clipper = None if self.qk_clip is None else Clipper(self.qk_clip, groups, self.replicas)
        sharded: ShardedStep | None = None
        has_dtensors = any(spec_of(p) is not None for group in groups for p, _ in group.routed)
        if self.replicas is not None or has_dtensors:
            from deepmd_muon.optim.sharded.step import sharded_step  # needs torch.distributed

            sharded = sharded_step(groups, self.replicas, self.sharded)
        holders: Mapping[Tensor, StateHolder] = {} if sharded is None else sharded.state_holders
        move_state(
            state=self.state,
            before=self._routing,
            after=groups,
            holders=holders,
            memory=self._host_memory,
            on_route_change=self.on_route_change,
        )
        # Nothing above changes the optimizer if it raises, for instance for a split that does not
        # fit.
        for group, entries in zip(self.param_groups, routing.routes, strict=True):
            group["routes"] = RouteTable(entries).texts()
            fold(group)
        if routing.table != self.routing and log.isEnabledFor(logging.DEBUG):
            log_parameters(groups, self.replicas)
            plan = sharded.plan if sharded else plan_of_one_process(groups, self.sharded)
            log.debug("%s", plan.describe())
        self._routing = routing
        self.routing = routing.table
        self._clipper = clipper
        self._sharded = sharded
        self._holders = holders
        drop_unused(self.state, groups)
        self._compiled.reset(sharded)

    def __repr__(self) -> str:
        """Return the routes in one line, and one line for each group: what differs from defaults."""
        lines = [f"{type(self).__name__}: {self.routing.summary()}"]
        for number, group in enumerate(self.param_groups):
            settings = ", ".join(f"{key} {value}" for key, value in settings_shown(group).items())
            lines.append(f"group {number}: {len(group['params'])} parameters, {settings}")
        return "\n".join(lines)

    def _raise_deferred(self) -> None:
        """Raise the errors of the last step that ranks agree on late."""
        if self._sharded is not None:
            self._sharded.raise_deferred()

    def compile_kernels(self) -> None:
        """Compile the kernels of the first step in advance, possibly in a thread.

        Meanwhile TF32 may be off.
        """
        self._compiled.compile_kernels(self._groups(), self.workspace)

    def _groups(self) -> list[Group]:
        return self._routing.groups(self.param_groups)

    def routed_parameters(self) -> list[tuple[Tensor, RouteEntry, bool]]:
        """Return every parameter with its route.

        The last value says whether the parameter belongs to this rank alone (`local_patterns`).
        """
        self._reroute_if_changed()
        return [
            (p, entry, spec_of(p) is None and is_local(entry.name, group.settings))
            for group in self._groups()
            for p, entry in group.routed
        ]

    @property
    def plan(self) -> Plan:
        """Which rank orthogonalizes which matrix, also on one process.

        `plan.describe()` lists its FLOPs.
        """
        if self._sharded:
            return self._sharded.plan
        return plan_of_one_process(self._groups(), self.sharded)

    def fresh_state(self) -> dict[str, dict[str, Tensor]]:
        """Return new state, by name and in its layout, of parameters that live on several ranks."""
        self._reroute_if_changed()
        fresh = {}
        for group in self._groups():
            rules = matrix_rules(group.settings)
            for p, entry in group.routed:
                if p in self._holders:
                    fresh[entry.name] = self._holders[p].complete({}, rules)
        return fresh

    def _reroute_if_changed(self) -> None:
        """Recompute the routing if parameters, their switches or routing settings have changed.

        Warn of each new route or view, unless the parameter was frozen or unfrozen.
        """
        if self._routing.is_current(self.param_groups):
            for group in self.param_groups:
                fold(group)
            return
        former = {entry.name: entry for entry in self.routing}
        self._route_parameters()
        for entry in self.routing:
            before = former.get(entry.name, entry)
            if "frozen" not in (before.route, entry.route) and before.placement != entry.placement:
                text = "%s: the route is now %s; it was %s"
                log.warning(text, entry.name, entry.placement, before.placement)

    def state_dict(self) -> dict[str, Any]:
        """Return the state with its routing; a frozen parameter keeps its earlier state.

        While the state is offloaded, its tensors are in host memory and up to date when this
        returns.

        Raises
        ------
        MissingGradientError
            On several GPUs, when a parameter had a gradient on only some ranks in the last step. A
            run should therefore end with a call of this method.
        """
        self._raise_deferred()
        self._reroute_if_changed()
        complete_rules(self.state, self._groups(), self._holders)
        state_dict = super().state_dict()
        if self._host_memory is not None:
            self._host_memory.wait()
            # torch.distributed.checkpoint requires the tensors of a state dict, scalars aside, on
            # one device.
            for number, values in state_dict["state"].items():
                on_host = {
                    key: with_local(x, local_of(x).cpu())
                    for key, x in values.items()
                    if isinstance(x, Tensor) and x.ndim
                }
                state_dict["state"][number] = {**values, **on_host}
        return state_dict

    @torch.no_grad()
    def offload(self, on: bool = True) -> None:
        """Move momenta and Adam's moments to host memory and keep them there.

        With `on` False, move them back.

        Results are the same either way; see `HybridMuonConfig`. Read the state through
        `state_dict`, which waits until host memory is up to date.
        """
        self._reroute_if_changed()
        if on and self._host_memory is None:
            self._host_memory = HostMemory(self.offload_bytes)
            self._host_memory.offload_all(self.state, self.param_groups)
            log.info("momenta and Adam's moments are now kept in host memory")
        elif not on and self._host_memory is not None:
            self._host_memory.restore(self.state)
            self._host_memory = None
            log.info("momenta and Adam's moments are now kept on the parameters' devices")
        self._compiled.reset(self._sharded)

    @torch.no_grad()
    def prefetch(self) -> None:
        """Start the exchanges of the next step that need no gradient.

        They run beside the forward and backward passes that follow. `step` starts what has not been
        started, so calls are optional; all ranks call it, or none. Until the step, state must not
        change.
        """
        if self._sharded is not None and self._host_memory is None:
            self._sharded.start()

    @profiled_on_demand
    @torch.no_grad()
    def step(
        self, closure: Callable[[], Any] | None = None, qk_logits: Logits | None = None
    ) -> Any:
        """Take one optimization step.

        Parameters
        ----------
        closure
            Evaluates the model again and returns the loss.
        qk_logits
            The largest attention logit of each head, (heads,) by layer name, for QK-clip; DTensors
            may shard the heads.

        Returns
        -------
        Any
            The value of the closure, or None.

        Raises
        ------
        InvalidGradientError, NonFiniteGradientError
            When a gradient is sparse, or holds NaN or infinity and `on_nonfinite` is 'error';
            nothing is changed.
        CaptureError
            When a CUDA graph is being captured and its replays would not repeat the step.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        # Modes apply to the closure only. Under `with torch.device(...)` each read of a tensor's
        # attribute runs Python.
        with torch._C._DisableAutocast(), torch._C.DisableTorchFunction():
            self._step(qk_logits)
        return loss

    def _step(self, qk_logits: Logits | None) -> None:
        compiled = self._compiled
        for group in self.param_groups:
            if is_warming_up(group):
                warm_up_momentum(group, capturing=is_capturing())
        if not self._is_prepared():
            self._reroute_if_changed()
            # Reading a list has made it a key; without that key groups may be as they were.
            if not self._is_prepared():
                compiled.prepare(self._groups(), self.state)
        logits = checked_logits(self._clipper, qk_logits)
        refuse_unsafe_capture(
            self.param_groups,
            self.state,
            compiled.params,
            offloaded=self._host_memory is not None,
            on_nonfinite=self.on_nonfinite,
            alternates=self.alternates,
            n_never_with_gradient=0
            if self._sharded is None
            else self._sharded.n_never_with_gradient(),
        )
        # torch.amp.GradScaler sets these two attributes during the call.
        scale = getattr(self, "grad_scale", None)
        skip = getattr(self, "found_inf", None)
        control = compiled.decide(
            self.on_nonfinite,
            scale,
            skip,
            agreed=self.agreed_skip,
            same_gradients=self.agreed_gradients,
        )
        compiled.run(self.state, self._host_memory, self.workspace, control)
        if self._clipper is not None and logits:
            self._clipper(logits, control.skip)

    def _is_prepared(self) -> bool:
        """Return whether the compiled step is valid, after it has followed schedulers."""
        holds = self._compiled.holds(self.param_groups, self.state, self.workspace)
        return holds and self._compiled.follow_schedules()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore state by parameter name, after comparing saved routes and views with the present.

        Tensors keep their values bitwise. The learning rate is restored, and so is everything that
        schedulers write into groups: their own keys, and numeric settings that both optimizers were
        constructed with at the same value. A setting constructed with another value keeps it, as
        switches do; each difference is logged (see `restore_groups`).

        Where a parameter's route, view or shape differs from the saved one, or it exists on one
        side only, `on_route_change` decides: 'error' raises; 'reset' discards that parameter's
        state; 'migrate' keeps the state with the same meaning on both
        (`deepmd_muon.optim.state.migrate` lists it). Freezing or unfreezing a parameter is allowed
        under every policy and keeps its state. State of rules that are off is dropped. One warning
        per parameter reports the outcome. States of deepmd-kit's HybridMuon load too; a route that
        differs because its version chose routes differently is migrated under every policy. So do
        states of torch.optim.Adam, AdamW and Muon, and of other Muons
        (`deepmd_muon.optim.state.others`); `deepmd_muon.optim.import_state` joins those of several
        optimizers and names their parameters. States without names load by position.

        Parameters
        ----------
        state_dict
            The result of `state_dict`, in this or another process; or a state dict of another Muon;
            or one of deepmd-kit's HybridMuon. If that lists parameters in another order, first name
            them with `deepmd_muon.optim.name_deepmd_kit_state`.

        Raises
        ------
        RoutingMismatchError
            When parameters, routes or views differ and `on_route_change` is 'error', or a tensor of
            a rule is missing or unknown; nothing is changed.
        ForeignStateError
            When the state comes from another optimizer or carries no routing; nothing is changed.
        """
        self._raise_deferred()
        self._reroute_if_changed()
        state_dict = dict(state_dict)
        for hook in self._optimizer_load_state_dict_pre_hooks.values():
            changed = hook(self, state_dict)
            state_dict = changed if changed is not None else state_dict
        offloaded = self._host_memory is not None

        def place(key: str, value: Tensor, p: Tensor, entry: RouteEntry) -> Tensor:
            holder = self._holders.get(p, StateHolder(p, entry))
            return holder.place(key, value, offloaded=offloaded)

        saved_groups = state_dict.get("param_groups", ())
        with self._choices_of_checkpoint(saved_groups):
            state = load_state(state_dict, self._groups(), self.on_route_change, place)
            restore_groups(self.param_groups, saved_groups)
        self.state.clear()
        self.state.update(state)
        for post_hook in self._optimizer_load_state_dict_post_hooks.values():
            post_hook(self)
        if self._host_memory is not None:
            self._host_memory.offload_all(self.state, self.param_groups)
        self._route_parameters()

    @contextlib.contextmanager
    def _choices_of_checkpoint(self, saved_groups: Sequence[Mapping[str, Any]]) -> Iterator[None]:
        """Take over what `build` had chosen when the state was saved; if the load fails, undo it."""
        choices = saved_choices(self.param_groups, saved_groups)
        if not any(choices):
            yield
            return
        former = [
            {key: unfolded(group)[key] for key in values}
            for group, values in zip(self.param_groups, choices, strict=True)
        ]
        try:
            for group, values in zip(self.param_groups, choices, strict=True):
                change(group, values)
            self._route_parameters()
            yield
        except Exception:
            for group, values in zip(self.param_groups, former, strict=True):
                change(group, values)
            self._route_parameters()
            raise
        keys = sorted({key for values in choices for key in values} - {"constructed"})
        text = "%s: the checkpoint's values hold, which differ from what build chooses now"
        log.warning(text, ", ".join(keys))

    def __getstate__(self) -> dict[str, Any]:
        if self.replicas is not None and isinstance(self.replicas, torch.distributed.ProcessGroup):
            raise TypeError(
                "an optimizer whose replicas is a process group cannot be pickled or copied; save "
                "its state_dict(), or give it a device mesh"
            )
        self._raise_deferred()
        self._reroute_if_changed()
        if self._host_memory is not None:
            self._host_memory.wait()
        attributes = {key: getattr(self, key) for key in _PICKLED}
        return {**super().__getstate__(), **attributes}

    def __setstate__(self, state: dict[str, Any]) -> None:
        groups = [ParamGroup(current_spelling(group)) for group in state["param_groups"]]
        super().__setstate__({**state, "param_groups": groups})
        self.defaults.pop("differentiable", None)  # torch adds it; groups have no such setting
        self._compiled = CompiledStep()
        self._route_parameters()
