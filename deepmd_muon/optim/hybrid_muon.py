"""HybridMuon: Muon for matrices, Adam and AdamW for the rest, routed by name and shape."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from deepmd_muon.optim.config import (
    HybridMuonConfig,
    MuonMode,
    NonFinite,
    Precision,
    RouteChange,
    Scaling,
    WeightLayout,
    reject_renamed_settings,
)
from deepmd_muon.optim.cuda import refuse_unsafe_capture
from deepmd_muon.optim.dtensors import spec_of
from deepmd_muon.optim.polar.schedules import AnySchedule
from deepmd_muon.optim.qk_clip.clip import Logits, checked_logits, clip_heads, clipper
from deepmd_muon.optim.qk_clip.layers import QKClip
from deepmd_muon.optim.routing.param_groups import (
    Group,
    Params,
    check_group,
    check_parameters,
    group_defaults,
    group_settings,
    lr_tensor,
    routes_of,
    rules_of,
    warn_unmatched_patterns,
    with_names,
)
from deepmd_muon.optim.routing.rules import RouteTable
from deepmd_muon.optim.sharded.plan import Plan
from deepmd_muon.optim.sharded_config import ShardedSettings
from deepmd_muon.optim.state.host_memory import HostMemory
from deepmd_muon.optim.state.load import drop_unused, load_state, place_state_tensor, restore_learning_rates
from deepmd_muon.optim.step import CompiledStep
from deepmd_muon.optim.torch_hooks import QuickOptimizer, profiled_on_demand, read_by_grad_scaler

if TYPE_CHECKING:
    from deepmd_muon.optim.config import Replicas
    from deepmd_muon.optim.sharded.step import ShardedStep


_DEFAULTS = HybridMuonConfig()


@reject_renamed_settings
class HybridMuon(QuickOptimizer):
    r"""Muon on every matrix, Adam on vectors and biases, AdamW on what the mode does not see as a matrix.

    One step of the Muon route, for a parameter seen as matrices (`deepmd_muon.optim.routing.views`)::

        m ← β m + (1 − β) g
        u = β m + (1 − β) g                       (nesterov; else u = m)
        O = polar factor of u                     (schedule, precision)
        p ← p (1 − lr λ) − lr · scale · damping · O

    `scale` is chosen by the setting `scaling`, e.g. ``lr_adjust_coeff · sqrt(max(rows, columns))`` for 'match_rms';
    `damping` is Magma's factor per matrix, or 1. The Adam routes step with ``lr · adam_lr_ratio``.

    Parameters
    ----------
    params
        ``model.named_parameters()``, or groups with their own settings; without names, rules on names are off.
    lr
        Learning rate of the Muon route; a 0-dim tensor is read on its device.
    momentum, weight_decay, adam_betas, lr_adjust, lr_adjust_coeff, muon_mode, enable_gram, flash_muon, magma_muon
        DeePMD's settings; see `HybridMuonConfig`, whose defaults they share.
    named_parameters
        Names of unnamed parameters, as (name, parameter) pairs; trainable ones missing from `params` are reported.
    nesterov, scaling, layout, adam_lr_ratio, schedule, precision, min_matrix_dim, deepmd_kit_arithmetic
        See `HybridMuonConfig`.
    adam_patterns, adamw_patterns, expert_patterns, splits
        Rules on names; see `HybridMuonConfig`.
    on_route_change, on_nonfinite
        What `load_state_dict` does with other routes, and `step` with non-finite gradients, for all groups.
    foreach
        False takes one parameter at a time, which is slow and needs least memory.
    capturable
        Keep the learning rate on the parameters' device, so that a step captured in a CUDA graph follows it.
    maximize, differentiable
        Climb instead of descend; the second must be False.
    workspace
        Bound on the parameter elements that are worked on at a time; beside the state, a step takes 20 to 24 bytes
        for each (float32; on a GPU up to 27 where wide matrices share products). A larger parameter is taken whole.
    offload
        Keep momenta and Adam's moments in (pinned) host memory; see `HybridMuonConfig` and the method `offload`.
    offload_bytes
        Bound on the bytes of moments that travel together; twice as much is on the device. It bounds the elements
        stepped together as `workspace` does. A single larger moment travels whole.
    replicas
        Ranks, as a device mesh or process group, that hold copies of the non-DTensor parameters with equal gradients
        (DDP), and share the step. Without it, this process steps such parameters alone. DTensors carry their layout.
    sharded
        How DTensors and replicated parameters are stepped; see `deepmd_muon.optim.sharded.ShardedSettings`.
    qk_clip
        Attention layers whose logits stay below a threshold; see `deepmd_muon.optim.qk_clip`.

    Attributes
    ----------
    routing : RouteTable
        Name, shape, view, route and reason of every parameter.

    Raises
    ------
    InvalidSettingError, InvalidParameterError, InvalidShapeError
        Each a ValueError: a setting out of its range; a complex or repeated parameter; a split that does not fit.

    Notes
    -----
    State: `momentum_buffer` in the parameter's dtype and `magma_score` (float32, one per matrix) on the Muon route;
    `step`, `exp_avg` and `exp_avg_sq` (the wider of float32 and the parameter's dtype) on the Adam routes.

    References
    ----------
    K. Jordan et al., "Muon", 2024; J. Liu et al., arXiv:2502.16982 (matching the update's RMS).
    """

    _step_supports_amp_scaling = property(lambda _: read_by_grad_scaler())
    _host_memory: HostMemory | None = None

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 5e-4,
        momentum: float = _DEFAULTS.momentum,
        weight_decay: float = _DEFAULTS.weight_decay,
        adam_betas: tuple[float, float] = (_DEFAULTS.adam_beta1, _DEFAULTS.adam_beta2),
        lr_adjust: float = _DEFAULTS.lr_adjust,
        lr_adjust_coeff: float = _DEFAULTS.lr_adjust_coeff,
        muon_mode: MuonMode = _DEFAULTS.muon_mode,
        named_parameters: Iterable[tuple[str, Tensor]] | None = None,
        enable_gram: bool = _DEFAULTS.enable_gram,
        flash_muon: bool = _DEFAULTS.flash_muon,
        magma_muon: bool = _DEFAULTS.magma_muon,
        *,
        nesterov: bool = _DEFAULTS.nesterov,
        scaling: Scaling | None = _DEFAULTS.scaling,
        layout: WeightLayout = _DEFAULTS.layout,
        adam_lr_ratio: float | None = _DEFAULTS.adam_lr_ratio,
        schedule: AnySchedule = _DEFAULTS.schedule,
        precision: Precision = _DEFAULTS.precision,
        min_matrix_dim: int = _DEFAULTS.min_matrix_dim,
        adam_patterns: Sequence[str] = _DEFAULTS.adam_patterns,
        adamw_patterns: Sequence[str] = _DEFAULTS.adamw_patterns,
        expert_patterns: Sequence[str] = _DEFAULTS.expert_patterns,
        splits: Sequence[str] = _DEFAULTS.splits,
        on_route_change: RouteChange = _DEFAULTS.on_route_change,
        on_nonfinite: NonFinite = _DEFAULTS.on_nonfinite,
        deepmd_kit_arithmetic: bool = _DEFAULTS.deepmd_kit_arithmetic,
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        workspace: int = 80 * 2**20,
        offload: bool = _DEFAULTS.offload,
        offload_bytes: int = 64 * 2**20,
        replicas: Replicas | None = None,
        sharded: ShardedSettings | None = None,
        qk_clip: QKClip | None = None,
    ) -> None:
        defaults = group_defaults(locals())
        self.on_route_change: RouteChange = on_route_change
        self.on_nonfinite: NonFinite = on_nonfinite
        self.workspace, self.offload_bytes = workspace, offload_bytes
        self._host_memory = HostMemory(offload_bytes) if offload else None
        self.replicas, self.sharded, self.qk_clip = replicas, sharded or ShardedSettings(), qk_clip
        self.routing = RouteTable(())
        self._compiled = CompiledStep()
        super().__init__(with_names(params, named_parameters), defaults)
        self._route_parameters()
        warn_unmatched_patterns(self.param_groups)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters with their own settings; a setting left out takes the constructor's value."""
        self._compiled.raise_deferred()
        with warnings.catch_warnings():
            # torch only warns of duplicates; they are refused by name below.
            warnings.filterwarnings("ignore", "optimizer contains a parameter group with duplicate")
            super().add_param_group(param_group)
        try:
            check_parameters(self.param_groups)
            group = self.param_groups[-1]
            check_group(group, self.defaults)
            if group["capturable"] and not isinstance(group["lr"], Tensor) and group["params"]:
                group["lr"] = lr_tensor(group)
            if self.routing:
                self._route_parameters()
                warn_unmatched_patterns(self.param_groups, new=len(self.param_groups) - 1)
        except ValueError:
            self.param_groups.pop()
            raise

    def _route_parameters(self) -> None:
        """Compute the routing anew from names, shapes and settings, and store its manifest in the groups."""
        self._compiled.raise_deferred()
        # All at once: a split that does not fit leaves everything as it was.
        self._entries = [routes_of(group, number) for number, group in enumerate(self.param_groups)]
        for group, entries in zip(self.param_groups, self._entries, strict=True):
            group.update(RouteTable(entries).manifest())
        self.routing = RouteTable([entry for entries in self._entries for entry in entries])
        self._routed_inputs = self._routing_inputs()
        groups = self._groups()
        self._clipper = clipper(self.qk_clip, [pair for group in groups for pair in group.routed], self.replicas)
        drop_unused(self.state, groups)
        self._compiled.reset()
        self._compiled.sharded = None
        self._sharded: ShardedStep | None = None
        if self.replicas is not None or any(spec_of(p) is not None for group in groups for p, _ in group.routed):
            from deepmd_muon.optim.sharded.step import sharded_step  # needs torch.distributed

            self._sharded = sharded_step(groups, self.replicas, self.sharded)
            self._compiled.sharded = self._sharded

    def _groups(self) -> list[Group]:
        """Return the parameter groups as a step reads them."""
        groups = zip(self.param_groups, self._entries, strict=True)
        return [Group(g, group_settings(g), tuple(zip(g["params"], some, strict=True))) for g, some in groups]

    @property
    def plan(self) -> Plan:
        """Who orthogonalizes what where parameters live on several ranks; `plan.describe()` says it in words."""
        return self._sharded.plan if self._sharded else Plan((), self.sharded, ())

    def fresh_state(self) -> dict[str, dict[str, Tensor]]:
        """Return state as the first step would make it, by parameter name, for parameters that live on several ranks.

        It tells how state is laid out, for a reader that fetches no more than this rank's part.
        """
        self._reroute_if_changed()
        return self._sharded.fresh_state(self._groups()) if self._sharded else {}

    def _routing_inputs(self) -> list[Any]:
        """Return what a user may change between steps that changes routes or the state they need."""
        return [(g["magma_muon"], rules_of(g), *(p.requires_grad for p in g["params"])) for g in self.param_groups]

    def _reroute_if_changed(self) -> None:
        """Route parameters anew where a switch or a routing setting of a group has changed, and log new routes."""
        if self._routing_inputs() != self._routed_inputs:
            before = self.routing
            self._route_parameters()
            self.routing.log_changes(before)

    def state_dict(self) -> dict[str, Any]:
        """Return the state with its routing; a frozen parameter keeps the state it had before.

        While the state is offloaded its tensors are in host memory, up to date when this returns. On several GPUs it
        raises MissingGradientError where ranks did not have the same gradients in the last step; also call it after
        the last step of a run.
        """
        self._compiled.raise_deferred()
        self._reroute_if_changed()
        found = super().state_dict()
        if self._host_memory is not None:
            self._host_memory.wait()
            found["state"] = {key: self._host_memory.exported(values) for key, values in found["state"].items()}
        return found

    @torch.no_grad()
    def offload(self, on: bool = True) -> None:
        """Keep momenta and Adam's moments in host memory from now on, or on the parameters' devices.

        Steps give the same results either way; see `HybridMuonConfig`. Read the state through `state_dict`, which
        waits until host memory is up to date.
        """
        if on and self._host_memory is None:
            self._host_memory = HostMemory(self.offload_bytes)
            self._host_memory.offload_all(self.state, self._params())
        elif not on and self._host_memory is not None:
            self._host_memory.restore(self.state)
            self._host_memory = None
        self._compiled.reset()

    def _params(self) -> list[Tensor]:
        return [p for group in self.param_groups for p in group["params"]]

    @profiled_on_demand
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None, qk_logits: Logits | None = None) -> Any:
        """Take one optimization step.

        Parameters
        ----------
        closure
            Evaluates the model again and returns the loss.
        qk_logits
            The largest attention logit of each head, (heads,) by layer name, for QK-clip.

        Returns
        -------
        Any
            What the closure returned, or None.

        Raises
        ------
        InvalidGradientError
            When a gradient is sparse; nothing has been changed then.
        NonFiniteGradientError
            When a gradient holds NaN or infinity and `on_nonfinite` is 'error'; nothing has been changed then.
        CaptureError
            When a CUDA graph is being captured that could not be replayed rightly.
        """
        with torch.enable_grad():
            loss = None if closure is None else closure()
        with torch._C._DisableAutocast():  # the closure alone sees the caller's autocast
            self._step(qk_logits)
        return loss

    def _step(self, qk_logits: Logits | None) -> None:
        logits = checked_logits(self._clipper, qk_logits)
        compiled, offloaded = self._compiled, self._host_memory is not None
        if not compiled.holds(self.param_groups, self.state, self.workspace):
            self._reroute_if_changed()
            compiled.prepare(self._groups(), self.state)
        refuse_unsafe_capture(
            self.param_groups, self.state, compiled.params, offloaded=offloaded, on_nonfinite=self.on_nonfinite
        )
        # torch.amp.GradScaler sets these two for the time of the call.
        scale, skip = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        control = compiled.decide(self.on_nonfinite, scale, skip)
        compiled.run(self.state, self._host_memory, self.workspace, control)
        clip_heads(self._clipper, logits, control.skip)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore state by parameter name, after checking that every route and view is the present one.

        Tensors keep their values bitwise. The running learning rate is restored; every other setting stays as it is
        now, and a difference from the saved one is logged. `initial_lr`, which schedulers start from, is the
        learning rate this optimizer was made with, never the saved one.

        Where a parameter's route, view or shape is no longer the saved one, or it is on one side only,
        `on_route_change` decides: 'error' raises; 'reset' starts that parameter afresh; 'migrate' carries over

        - Muon to Muon with another view: the momentum exactly; each new block's Magma score is the mean of the
          scores its elements had;
        - Adam to AdamW and back: both moments and the step count, exactly;
        - Muon to Adam: the momentum, an average of gradients in both, as if it were the one gradient seen so far
          (the second moment cannot be known and restarts from its square);
        - Adam to Muon: the bias-corrected first moment becomes the momentum; Magma scores restart;
        - anything to frozen: all of it, kept until the parameter is trained again; and back, but for Magma scores
          whose number has changed;
        - nothing where the shape changed.

        Magma scores are dropped where Magma is off. One warning per parameter says what happened. States of
        deepmd-kit's HybridMuon load too; where such a route differs because its version routed otherwise, it is
        migrated under every policy.

        Parameters
        ----------
        state_dict
            What `state_dict` returned, in this or another process; or a state dict of deepmd-kit's HybridMuon, see
            `deepmd_muon.optim.name_deepmd_kit_state` for one whose parameters are not in the present order.

        Raises
        ------
        RoutingMismatchError
            When parameters, routes or views differ and may not; nothing has been changed then.
        ForeignStateError
            When the state comes from another optimizer or carries no routing; nothing has been changed then.
        """
        self._compiled.raise_deferred()
        self._reroute_if_changed()
        state_dict = dict(state_dict)
        for hook in self._optimizer_load_state_dict_pre_hooks.values():
            changed = hook(self, state_dict)
            state_dict = changed if changed is not None else state_dict
        sharding_of = None if self._sharded is None else self._sharded.sharding_of
        place = functools.partial(place_state_tensor, offloaded=self._host_memory is not None, sharding_of=sharding_of)
        state = load_state(state_dict, self._groups(), self.on_route_change, place)
        restore_learning_rates(self.param_groups, state_dict["param_groups"])
        self.state.clear()
        self.state.update(state)
        for post_hook in self._optimizer_load_state_dict_post_hooks.values():
            post_hook(self)
        if self._host_memory is not None:
            self._host_memory.offload_all(self.state, self._params())
        self._route_parameters()

    def __getstate__(self) -> dict[str, Any]:
        own = ("workspace", "offload_bytes", "_host_memory", "replicas", "sharded", "qk_clip", "on_route_change")
        self._compiled.raise_deferred()
        if self._host_memory is not None:
            self._host_memory.wait()
        return {**super().__getstate__(), **{key: getattr(self, key) for key in (*own, "on_nonfinite")}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._compiled = CompiledStep()
        self._route_parameters()
