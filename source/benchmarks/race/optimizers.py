"""Optimizers of torch and of other packages as one that the package's training step can call.

A captured step cannot hold an optimizer that reads its learning rate or its state on the host. On a GPU such an
optimizer steps outside: the graph keeps the gradients in fixed memory, and `Foreign.finish` steps from there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn


class Foreign(torch.optim.Optimizer):
    """Some optimizers that step together, each with its own multiple of the learning rate.

    Parameters
    ----------
    parts
        Optimizers and their multiples.
    deferred
        `step` keeps the gradients, and `finish` steps; False steps in `step`.
    """

    def __init__(self, parts: Sequence[tuple[torch.optim.Optimizer, float]], *, deferred: bool) -> None:
        self._parts = tuple(parts)
        self._deferred = deferred
        self._trained: list[Tensor] = [p for part, _ in parts for group in part.param_groups for p in group["params"]]
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


def torch_muon(model: nn.Module, ratio: float) -> list[tuple[torch.optim.Optimizer, float]]:
    """Return torch's Muon for matrices, at `ratio` times the learning rate, and AdamW for everything else.

    Weight decay is HybridMuon's; the decays of AdamW's moments too.
    """
    trained = [p for p in model.parameters() if p.requires_grad]
    matrices = [p for p in trained if p.ndim == 2 and min(p.shape) > 1]
    others = [p for p in trained if p.ndim != 2 or min(p.shape) == 1]
    muon = torch.optim.Muon(matrices, lr=1e-3, weight_decay=0.001, adjust_lr_fn="match_rms_adamw")
    adamw = torch.optim.AdamW(others, lr=1e-3, betas=(0.9, 0.95), weight_decay=0.0)
    return [(muon, ratio), (adamw, 1.0)]


def soap(model: nn.Module) -> list[tuple[torch.optim.Optimizer, float]]:
    """Return SOAP of the package pytorch-optimizer, with its defaults."""
    from pytorch_optimizer import SOAP

    return [(SOAP([p for p in model.parameters() if p.requires_grad], lr=1e-3), 1.0)]


def schedule_free(model: nn.Module, warmup_steps: int) -> list[tuple[torch.optim.Optimizer, float]]:
    """Return schedule-free AdamW of the package schedulefree, with its defaults and a warm-up."""
    from schedulefree import AdamWScheduleFree

    trained = [p for p in model.parameters() if p.requires_grad]
    return [(AdamWScheduleFree(trained, lr=1e-3, warmup_steps=warmup_steps), 1.0)]
