"""Optimizers of torch and of other packages as one that the package's training step can call.

A captured step cannot hold an optimizer that reads its learning rate or its state on the host. On a GPU such an
optimizer steps outside: the graph keeps the gradients in fixed memory, and `Foreign.finish` steps from there. Where
the package allows it, that step becomes a graph of its own, see `Replayed`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from deepmd_muon.model.nn.graphs import own_blas_workspaces

log = logging.getLogger(__name__)


class Foreign(torch.optim.Optimizer):
    """Some optimizers that step together, each with its own multiple of the learning rate.

    Parameters
    ----------
    parts
        Optimizers and their multiples.
    deferred
        `step` keeps the gradients, and `finish` steps; False steps in `step`.
    """

    def __init__(self, parts: Sequence[tuple[Part, float]], *, deferred: bool) -> None:
        self._parts = tuple(parts)
        self._deferred = deferred
        self._trained: list[Tensor] = [p for part, _ in parts for p in parameters(part)]
        self._gradients = [torch.zeros_like(p) for p in self._trained]
        super().__init__(self._trained, {"lr": 0.0})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Take the gradients, and step unless that is deferred; a parameter without gradient has a zero one."""
        for p, kept in zip(self._trained, self._gradients, strict=True):
            if p.grad is None:
                kept.zero_()
            else:
                kept.copy_(p.grad)
        if not self._deferred:
            self.finish(float(self.param_groups[0]["lr"]))

    def finish(self, lr: float) -> None:
        """Step with the gradients that `step` kept."""
        for p, kept in zip(self._trained, self._gradients, strict=True):
            p.grad = kept
        for part, multiple in self._parts:
            for group in part.param_groups:
                group["lr"] = lr * multiple
            part.step()

    def train(self) -> None:
        """Put the training weights in place, where the optimizer keeps others for use."""
        for part, _ in self._parts:
            getattr(part, "train", lambda: None)()

    def eval(self) -> None:
        """Put the weights for use in place."""
        for part, _ in self._parts:
            getattr(part, "eval", lambda: None)()


class Replayed:
    """An optimizer whose step is launched as a CUDA graph, once its numbers on the host have settled.

    The graph holds a step at the learning rate of the capture, from which the wanted one follows: the displacement of
    the weights is proportional to the rate. Where the optimizer multiplies weight decay and update, an error of
    rate · decay remains, 1e-4 of the update at most. On a CPU every step is the optimizer's own.

    Parameters
    ----------
    optimizer
        Its state must live on the device.
    settled
        Steps after which nothing but the learning rate changes on the host.
    every
        Every so many steps the optimizer does something that no graph can hold: it takes that step itself; 0 for never.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, *, settled: int, every: int = 0) -> None:
        self._optimizer = optimizer
        self.param_groups = optimizer.param_groups
        self._trained = parameters(optimizer)
        self._settled = settled
        self._every = every
        self._done = 0
        self._recorded_lr: list[float] = []
        self._graph: torch.cuda.CUDAGraph | None = None
        self._wanted = self._trained[0].is_cuda
        self._before = [torch.zeros_like(p) for p in self._trained]
        self._scale = torch.ones((), device=self._trained[0].device)

    def step(self) -> None:
        """Update the weights."""
        self._done += 1
        outside = self._every > 0 and (self._done - 1) % self._every == 0
        if not self._wanted or self._done <= self._settled or outside:
            self._own_step()
            return
        if self._graph is None:
            self._record()
        if self._graph is None:
            self._own_step()
            return
        self._scale.fill_(self.param_groups[0]["lr"] / self._recorded_lr[0])
        self._graph.replay()
        self._count(1)

    @torch.no_grad()
    def scaled_step(self) -> None:
        """Step at the learning rate of the capture, and scale the displacement of the weights; on the device."""
        torch._foreach_copy_(self._before, self._trained)
        self._optimizer.step()
        torch._foreach_sub_(self._trained, self._before)
        torch._foreach_mul_(self._trained, self._scale)
        torch._foreach_add_(self._trained, self._before)

    def _own_step(self) -> None:
        """Let the optimizer step; state tensors that it replaces are copied to where they were, for the graph."""
        before = list(_tensors(self._optimizer.state.values()))
        self._optimizer.step()
        if self._graph is not None:
            kept = iter(before)
            for state in self._optimizer.state.values():
                _keep_in_place(state, kept)

    def _count(self, steps: int) -> None:
        """Advance the optimizer's own count of steps, where its groups have one."""
        for group in self.param_groups:
            if "step" in group:
                group["step"] += steps

    def _record(self) -> None:
        """Capture a step without taking it; where that fails, all steps are the optimizer's own."""
        self._recorded_lr = [group["lr"] for group in self.param_groups]
        counts = [group.get("step") for group in self.param_groups]
        graph = torch.cuda.CUDAGraph()
        try:
            with own_blas_workspaces(), torch.cuda.graph(graph, capture_error_mode="thread_local"):
                self.scaled_step()
            self._graph = graph
        except Exception as error:  # whatever a package or a driver raises must not end the race
            self._wanted = False
            log.warning(
                "%s is not captured: %s", type(self._optimizer).__name__, str(error).splitlines()[0]
            )
        for group, count in zip(self.param_groups, counts, strict=True):
            if count is not None:
                group["step"] = count


Part = torch.optim.Optimizer | Replayed


def parameters(part: Part) -> list[Tensor]:
    """Return the parameters of an optimizer."""
    return [p for group in part.param_groups for p in group["params"]]


def _tensors(content: Iterable[Any]) -> Iterator[Tensor]:
    """Give the tensors in nested dicts and lists."""
    for value in content:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, dict):
            yield from _tensors(value.values())
        elif isinstance(value, list):
            yield from _tensors(value)


def _keep_in_place(content: dict[Any, Any] | list[Any], kept: Iterator[Tensor]) -> None:
    """Put the tensors of `kept` into a nested state, with the values that it has now."""
    for key, value in content.items() if isinstance(content, dict) else enumerate(content):
        if isinstance(value, Tensor):
            old = next(kept)
            if old is not value:
                content[key] = old.copy_(value)
        elif isinstance(value, (dict, list)):
            _keep_in_place(value, kept)


def keep_absent(optimizer: torch.optim.Optimizer) -> None:
    """Let an optimizer leave parameters alone whose whole gradient is zero, as those of an element that no frame has.

    A Muon step is as large without a gradient as with one, in the direction of the momentum; Adam's dies away.
    """
    step = optimizer.step
    trained = parameters(optimizer)

    @torch.no_grad()
    def masked(closure: Callable[[], float] | None = None) -> None:
        before = [p.detach().clone() for p in trained]
        step()
        for p, old in zip(trained, before, strict=True):
            if p.grad is not None:
                p.copy_(torch.where((p.grad != 0).any(), p, old))

    optimizer.step = masked  # type: ignore[assignment,method-assign]


def torch_muon(model: nn.Module, ratio: float) -> list[tuple[Part, float]]:
    """Return torch's Muon for matrices, at `ratio` times the learning rate, and AdamW for everything else.

    Weight decay is HybridMuon's; the decays of AdamW's moments too.
    """
    trained = [p for p in model.parameters() if p.requires_grad]
    matrices = [p for p in trained if p.ndim == 2 and min(p.shape) > 1]
    others = [p for p in trained if p.ndim != 2 or min(p.shape) == 1]
    muon = torch.optim.Muon(matrices, lr=1e-3, weight_decay=0.001, adjust_lr_fn="match_rms_adamw")
    on_gpu = trained[0].is_cuda
    adamw = torch.optim.AdamW(
        others, lr=1e-3, betas=(0.9, 0.95), weight_decay=0.0, capturable=on_gpu
    )
    return [(Replayed(muon, settled=3), ratio), (Replayed(adamw, settled=3), 1.0)]


def soap(model: nn.Module) -> list[tuple[Part, float]]:
    """Return SOAP of the package pytorch-optimizer, with its defaults."""
    from pytorch_optimizer import SOAP

    optimizer = SOAP([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    frequency = optimizer.param_groups[0]["precondition_frequency"]
    # After 200 steps the corrections of the moments' bias, with decays of 0.95, differ from 1 by less than 4e-5.
    return [(Replayed(optimizer, settled=200, every=frequency), 1.0)]


def schedule_free(model: nn.Module, warmup_steps: int) -> list[tuple[Part, float]]:
    """Return schedule-free AdamW of the package schedulefree, with its defaults and a warm-up."""
    from schedulefree import AdamWScheduleFree

    trained = [p for p in model.parameters() if p.requires_grad]
    return [(AdamWScheduleFree(trained, lr=1e-3, warmup_steps=warmup_steps), 1.0)]
