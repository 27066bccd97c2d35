"""HybridMuon: Muon for matrices, Adam and AdamW for the rest, routed by name and shape."""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from deepmd_muon.optim import magma
from deepmd_muon.optim.adam import adam_, moment_dtype
from deepmd_muon.optim.config import HybridMuonConfig, MuonMode, Precision, RouteChange, Scaling
from deepmd_muon.optim.errors import InvalidGradientError
from deepmd_muon.optim.groups import Params, adam_lr_ratio, group_settings, update_scale, with_names
from deepmd_muon.optim.polar import orthogonalize_matrices
from deepmd_muon.optim.routing import RouteEntry, RouteTable, RoutingRules, choose_route, unnamed
from deepmd_muon.optim.state import load_checked_state
from deepmd_muon.optim.views import MatrixView


class HybridMuon(Optimizer):
    r"""Muon on every matrix, Adam on vectors and biases, AdamW on what the mode does not see as a matrix.

    One step of the Muon route, for a parameter seen as matrices (`deepmd_muon.optim.views`)::

        m ← β m + (1 − β) g
        u = β m + (1 − β) g                       (nesterov; else u = m)
        O = polar factor of u                     (schedule, precision)
        p ← p (1 − lr λ) − lr · scale · damping · O

    `scale` is ``lr_adjust_coeff · sqrt(max(rows, columns))`` for scaling 'match_rms' and
    ``sqrt(max(1, rows/columns))`` for 'rectangular'; `damping` is Magma's factor per matrix, or 1. The Adam routes
    step with ``lr · adam_lr_ratio``.

    Parameters
    ----------
    params
        Named parameters, ``model.named_parameters()``; or parameters, or parameter groups with their own settings.
        Without names the rules on names are off.
    lr
        Learning rate of the Muon route; a 0-dim tensor is read on its device.
    momentum, weight_decay, adam_betas, lr_adjust, lr_adjust_coeff, muon_mode, enable_gram, flash_muon, magma_muon
        DeePMD's settings; see `HybridMuonConfig`, whose defaults they share.
    named_parameters
        Names for parameters that are given without, as (name, parameter) pairs.
    nesterov, scaling, adam_lr_ratio, schedule, precision, min_matrix_dim, adam_patterns, adamw_patterns
        See `HybridMuonConfig`.
    on_route_change
        What `load_state_dict` does when a route or view differs; see `HybridMuonConfig`.
    workspace
        Bound on the matrix elements that are orthogonalized at a time; a step needs about ten times as many bytes
        beside the state. A single larger parameter is still taken whole.

    Attributes
    ----------
    routing : RouteTable
        Name, shape, view, route and reason of every parameter.

    Raises
    ------
    ValueError
        When a setting is out of its range, or a parameter is given twice or is complex.

    Notes
    -----
    State: `momentum_buffer` in the parameter's dtype and `magma_score` (float32, one per matrix) on the Muon route;
    `step`, `exp_avg` and `exp_avg_sq` (the wider of float32 and the parameter's dtype) on the Adam routes.

    References
    ----------
    K. Jordan et al., "Muon: an optimizer for hidden layers in neural networks", 2024; J. Liu et al., "Muon is
    scalable for LLM training", arXiv:2502.16982 (matching the update's RMS).
    """

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 5e-4,
        momentum: float = 0.95,
        weight_decay: float = 1e-3,
        adam_betas: tuple[float, float] = (0.9, 0.95),
        lr_adjust: float = 0.0,
        lr_adjust_coeff: float = 0.18,
        muon_mode: MuonMode = "slice",
        named_parameters: Iterable[tuple[str, Tensor]] | None = None,
        enable_gram: bool = True,
        flash_muon: bool = True,
        magma_muon: bool = True,
        *,
        nesterov: bool = True,
        scaling: Scaling | None = None,
        adam_lr_ratio: float | None = None,
        schedule: str = "8+2",
        precision: Precision = "auto",
        min_matrix_dim: int = 1,
        adam_patterns: Sequence[str] = (),
        adamw_patterns: Sequence[str] = (),
        on_route_change: RouteChange = "error",
        workspace: int = 64 * 2**20,
    ) -> None:
        if not isinstance(lr, Tensor) and lr < 0:
            raise ValueError(f"lr must be >= 0; found {lr}")
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "weight_decay": weight_decay,
            "adam_betas": tuple(adam_betas),
            "lr_adjust": lr_adjust,
            "lr_adjust_coeff": lr_adjust_coeff,
            "muon_mode": muon_mode,
            "enable_gram": enable_gram,
            "flash_muon": flash_muon,
            "magma_muon": magma_muon,
            "nesterov": nesterov,
            "scaling": scaling,
            "adam_lr_ratio": adam_lr_ratio,
            "schedule": schedule,
            "precision": precision,
            "min_matrix_dim": min_matrix_dim,
            "adam_patterns": list(adam_patterns),
            "adamw_patterns": list(adamw_patterns),
            "on_route_change": on_route_change,
        }
        self.workspace = workspace
        self.routing = RouteTable(())
        super().__init__(with_names(params, named_parameters), defaults)
        self._route_parameters()
        if not all("param_names" in group for group in self.param_groups):
            warnings.warn(
                "HybridMuon got parameters without names, so its rules on names (biases, adam_, adamw_, patterns) "
                "are off; pass model.named_parameters()",
                stacklevel=2,
            )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters with their own settings; a setting left out takes the constructor's value."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        for p in group["params"]:
            if p.is_complex():
                raise ValueError(f"HybridMuon needs real parameters; found {p.dtype} of shape {tuple(p.shape)}")
        group_settings(group)  # every setting in its range, or an error that names it
        if self.routing:
            self._route_parameters()

    def _route_parameters(self) -> None:
        """Compute the routing anew from names, shapes and settings, and store its manifest in the groups."""
        entries: list[RouteEntry] = []
        self._entries: dict[int, list[RouteEntry]] = {}
        for number, group in enumerate(self.param_groups):
            rules = RoutingRules.of(group_settings(group))
            names = group.get("param_names")
            chosen = []
            for i, p in enumerate(group["params"]):
                entry = choose_route(names[i] if names else None, tuple(p.shape), rules, trainable=p.requires_grad)
                chosen.append(entry if names else _renamed(entry, unnamed(number, i)))
            self._entries[number] = chosen
            group.update(RouteTable(chosen).manifest())
            entries += chosen
        self.routing = RouteTable(entries)
        self._trainable = self._requires_grad()

    def _requires_grad(self) -> list[bool]:
        return [p.requires_grad for group in self.param_groups for p in group["params"]]

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one optimization step.

        Parameters
        ----------
        closure
            Evaluates the model again and returns the loss.

        Returns
        -------
        Any
            What the closure returned, or None.

        Raises
        ------
        InvalidGradientError
            When a gradient is sparse; nothing has been changed then.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self._requires_grad() != self._trainable:
            self._route_parameters()
        work = [self._collect(number) for number in range(len(self.param_groups))]
        for group, by_route in zip(self.param_groups, work, strict=True):
            settings = group_settings(group)
            for wave in _waves(by_route["muon"], self.workspace):
                self._muon(wave, group["lr"], settings)
            self._adam(by_route["adam"], group["lr"], settings, weight_decay=0.0)
            self._adam(by_route["adamw"], group["lr"], settings, weight_decay=settings.weight_decay)
        return loss

    def _collect(self, number: int) -> dict[str, list[tuple[Tensor, RouteEntry]]]:
        """Sort one group's parameters that have a usable gradient by route."""
        by_route: dict[str, list[tuple[Tensor, RouteEntry]]] = {"muon": [], "adam": [], "adamw": []}
        for p, entry in zip(self.param_groups[number]["params"], self._entries[number], strict=True):
            if p.grad is None or p.numel() == 0:
                continue
            if p.grad.is_sparse:
                raise InvalidGradientError(
                    f"the gradient of {entry.name!r} is sparse; HybridMuon needs dense gradients "
                    "(for an embedding set sparse=False)"
                )
            by_route[entry.route].append((p, entry))
        return by_route

    def _muon(self, wave: Sequence[tuple[Tensor, MatrixView]], lr: float | Tensor, settings: HybridMuonConfig) -> None:
        """Momentum, orthogonalization and update of some Muon parameters of one group."""
        for members in _by_device(wave).values():
            params = [p for p, _ in members]
            views = [view for _, view in members]
            grads = [p.grad for p in params if p.grad is not None]
            buffers = [self._muon_state(p, view) for p, view in members]
            torch._foreach_lerp_(buffers, grads, 1.0 - settings.momentum)
            directions = torch._foreach_lerp(grads, buffers, settings.momentum) if settings.nesterov else buffers
            factors = self._damping(members, buffers, grads) if settings.magma_muon else None
            updates = orthogonalize_matrices(
                [u.reshape(view.shape) for u, view in zip(directions, views, strict=True)],
                settings.schedule,
                settings.precision,
                gram=settings.enable_gram,
            )
            torch._foreach_mul_(updates, [update_scale(view, settings) for view in views])
            if factors is not None:
                updates = list(torch._foreach_mul(updates, [f.view(-1, 1, 1) for f in factors]))
            _apply(params, updates, lr, settings.weight_decay)

    def _muon_state(self, p: Tensor, view: MatrixView) -> Tensor:
        """Return a parameter's momentum buffer, made on first use."""
        state = self.state[p]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(p, memory_format=torch.preserve_format)
        buffer = state["momentum_buffer"]
        assert isinstance(buffer, Tensor)
        return buffer

    def _damping(
        self, members: Sequence[tuple[Tensor, MatrixView]], buffers: Sequence[Tensor], grads: Sequence[Tensor]
    ) -> list[Tensor]:
        """Advance Magma's scores and return the damping factors, (batch,) per parameter."""
        scores, cosines = [], []
        for (p, view), m, g in zip(members, buffers, grads, strict=True):
            state = self.state[p]
            if "magma_score" not in state:
                state["magma_score"] = torch.full(
                    (view.batch,), magma.SCORE_START, dtype=torch.float32, device=p.device
                )
            scores.append(state["magma_score"])
            cosines.append(magma.alignment(m.reshape(view.batch, -1), g.reshape(view.batch, -1)))
        return magma.update_scores(scores, cosines)

    def _adam(
        self,
        members: Sequence[tuple[Tensor, RouteEntry]],
        lr: float | Tensor,
        settings: HybridMuonConfig,
        weight_decay: float,
    ) -> None:
        """Take the Adam or AdamW step of some parameters of one group."""
        for p, _ in members:
            state = self.state[p]
            if "exp_avg" not in state:
                dtype = moment_dtype(p.dtype)
                state["step"] = torch.zeros((), dtype=torch.float32, device=p.device)
                state["exp_avg"] = torch.zeros_like(p, dtype=dtype, memory_format=torch.preserve_format)
                state["exp_avg_sq"] = torch.zeros_like(p, dtype=dtype, memory_format=torch.preserve_format)
        if members:
            params = [p for p, _ in members]
            adam_(
                params,
                [p.grad for p in params if p.grad is not None],
                *([self.state[p][key] for p in params] for key in ("exp_avg", "exp_avg_sq", "step")),
                lr=lr * adam_lr_ratio(settings),
                betas=(settings.adam_beta1, settings.adam_beta2),
                weight_decay=weight_decay,
            )

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore state by parameter name, after checking that every route and view is the present one.

        Tensors keep their own dtype. The running learning rate is restored; every other setting stays as it is now,
        and a difference from the saved one is logged.

        Parameters
        ----------
        state_dict
            What `state_dict` returned, in this or another process.

        Raises
        ------
        RoutingMismatchError
            When parameters, routes or views differ; nothing has been changed then.
        ForeignStateError
            When the state comes from another optimizer or carries no routing.
        """
        load_checked_state(self, state_dict)
        self._route_parameters()

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "workspace": self.workspace}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._route_parameters()


def _renamed(entry: RouteEntry, name: str) -> RouteEntry:
    return RouteEntry(name, entry.shape, entry.view, entry.route, entry.reason)


def _waves(members: Sequence[tuple[Tensor, RouteEntry]], workspace: int) -> Iterator[list[tuple[Tensor, MatrixView]]]:
    """Cut the Muon parameters into runs of at most `workspace` elements."""
    wave: list[tuple[Tensor, MatrixView]] = []
    size = 0
    for p, entry in members:
        if wave and size + p.numel() > workspace:
            yield wave
            wave, size = [], 0
        assert entry.view is not None
        wave.append((p, entry.view))
        size += p.numel()
    if wave:
        yield wave


def _by_device(
    members: Sequence[tuple[Tensor, MatrixView]],
) -> dict[tuple[torch.device, torch.dtype], list[tuple[Tensor, MatrixView]]]:
    """Sort parameters by device and dtype, which multi-tensor operations need to be equal."""
    kinds: dict[tuple[torch.device, torch.dtype], list[tuple[Tensor, MatrixView]]] = defaultdict(list)
    for p, view in members:
        kinds[p.device, p.dtype].append((p, view))
    return kinds


def _apply(params: Sequence[Tensor], updates: Sequence[Tensor], lr: float | Tensor, weight_decay: float) -> None:
    """Do p ← p (1 − lr λ) − lr · update in place; 16-bit parameters are computed in float32 and rounded once."""
    wide = moment_dtype(params[0].dtype)
    targets = [p.to(wide) for p in params]  # the parameters themselves unless they are 16 bits wide
    if weight_decay:
        torch._foreach_mul_(targets, 1.0 - lr * weight_decay)
    steps = [u.to(wide).reshape(p.shape) for u, p in zip(updates, params, strict=True)]
    if isinstance(lr, Tensor):
        torch._foreach_mul_(steps, lr)
        torch._foreach_sub_(targets, steps)
    else:
        torch._foreach_add_(targets, steps, alpha=-lr)
    if wide != params[0].dtype:
        torch._foreach_copy_(list(params), targets)
