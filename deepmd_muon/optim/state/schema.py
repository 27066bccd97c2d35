"""Which state tensors a parameter of each route keeps, and how they are made."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from deepmd_muon.optim.routing.rules import Route, RouteEntry
from deepmd_muon.optim.update import magma
from deepmd_muon.optim.update.adam import moment_dtype

if TYPE_CHECKING:
    from deepmd_muon.optim.hybrid_muon import HybridMuon


States = list[dict[str, Tensor]]

# What of a route's state has the size of its parameters.
MOMENTS: dict[Route, tuple[str, ...]] = {
    "muon": ("momentum_buffer",),
    "adam": ("exp_avg", "exp_avg_sq"),
    "adamw": ("exp_avg", "exp_avg_sq"),
}

MOVED = ("momentum_buffer", "exp_avg", "exp_avg_sq")

KEYS_OF_ROUTE = {
    "muon": {"momentum_buffer", "magma_score"},
    "adam": {"step", "exp_avg", "exp_avg_sq"},
    "adamw": {"step", "exp_avg", "exp_avg_sq"},
}
STATE_KEYS = set[str]().union(*KEYS_OF_ROUTE.values())


def state_of(optimizer: HybridMuon, p: Tensor, entry: RouteEntry, *, damped: bool) -> dict[str, Tensor]:
    """Return a parameter's state, made on first use."""
    state: dict[str, Tensor] = optimizer.state[p]
    if entry.route == "muon":
        assert entry.view is not None
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(p, memory_format=torch.preserve_format)
        if damped and "magma_score" not in state:
            state["magma_score"] = magma.initial_scores(entry.view.blocks, p.device)
    elif "exp_avg" not in state:
        dtype = moment_dtype(p.dtype)
        state["step"] = torch.zeros((), dtype=torch.float32, device=p.device)
        state["exp_avg"] = torch.zeros_like(p, dtype=dtype, memory_format=torch.preserve_format)
        state["exp_avg_sq"] = torch.zeros_like(p, dtype=dtype, memory_format=torch.preserve_format)
    return state
