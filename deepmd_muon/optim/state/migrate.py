"""Migrate a parameter's state to another route or view.

- Muon to Muon with another view: the momentum stays exactly; each number of a rule's state, one per
  block, row or column, becomes the mean over its elements of the old numbers. Vectors of rows and
  columns restart.
- Adam to AdamW and back: both moments and the step count stay exactly.
- Muon to Adam: the momentum becomes the first moment after one gradient; the second moment restarts
  from its square.
- Adam to Muon: the bias-corrected first moment becomes the momentum; the state of rules restarts.
- Any route to frozen, and back: all state stays, except tensors of rules whose shape has changed.
- If the shape changed, no state stays.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from deepmd_muon.optim.dtensors import full_tensor
from deepmd_muon.optim.routing.routes import RouteEntry
from deepmd_muon.optim.routing.views import MatrixView
from deepmd_muon.optim.rules.interface import MatrixRule, StateTensor
from deepmd_muon.optim.rules.master_weights import MASTER
from deepmd_muon.optim.rules.registry import known_rules, tensors_of


@dataclasses.dataclass(frozen=True)
class SavedParameter:
    """One parameter of a state dict."""

    entry: RouteEntry  # saved name, shape, view and route
    values: Mapping[str, Tensor]
    # The version that saved it, not a setting, explains a difference from the present route.
    explained: bool = False
    left_out: bool = False  # torch's flattened state omitted the state of the saved route
    rules: tuple[MatrixRule, ...] = ()  # on the Muon route, its state must hold their tensors


def migrate(
    saved: SavedParameter, present: RouteEntry, betas: tuple[float, float]
) -> tuple[dict[str, Tensor], str]:
    """Return the migrated state of a parameter that has changed, and a phrase for the log.

    `betas` are the present decays of Adam's moments.
    """
    former = saved.entry
    values: dict[str, Any] = dict(saved.values)
    if former.shape != present.shape:
        return {}, "its shape changed, so it starts without state"
    if not values:
        return {}, "it had no state"
    if present.route == "frozen":
        return values, "it is frozen now and keeps its state"
    # Only the state shows the former route of a frozen parameter.
    was_muon = "momentum_buffer" in values
    if was_muon and present.route == "muon":
        return _other_view(values, former, present)
    if not was_muon and present.route != "muon":
        return values, "both moments and the step count are kept"
    master = {MASTER: values[MASTER]} if MASTER in values else {}
    if was_muon:
        momentum = values["momentum_buffer"]
        momentum = momentum.to(torch.promote_types(momentum.dtype, torch.float32))
        moments = {
            "exp_avg": (1 - betas[0]) * momentum,
            "exp_avg_sq": (1 - betas[1]) * momentum.square(),
            "step": torch.ones((), device="cpu"),
        }
        return {**moments, **master}, (
            "its momentum becomes the first moment after one gradient; the second moment restarts"
        )
    weight_of_gradients = 1.0 - betas[0] ** float(values["step"])  # bias correction
    momentum = values["exp_avg"]
    if weight_of_gradients > 0:
        momentum = momentum / weight_of_gradients
    return {"momentum_buffer": momentum, **master}, (
        "its bias-corrected first moment becomes the momentum; the second moment is dropped, rules "
        "restart"
    )


def _other_view(
    values: dict[str, Tensor], former: RouteEntry, present: RouteEntry
) -> tuple[dict[str, Tensor], str]:
    """Keep the momentum; set each number of a rule to the mean over its elements' old numbers."""
    assert present.view is not None
    # In the same order on all ranks, which gather together.
    of_rules = {
        key: tensor
        for key, tensor in tensors_of(known_rules()).items()
        if key in values and key != MASTER
    }
    if former.view is None:  # it was frozen; its former view is not recorded
        unfit = [
            key
            for key, tensor in of_rules.items()
            if tuple(values[key].shape) != tensor.shape_for(former.shape, present.view)
        ]
        for key in unfit:
            del values[key]
        restarting = ", ".join(f"{key}s" for key in sorted(unfit))
        return values, f"its momentum is kept; {restarting} restart"
    text = (
        "its momentum is kept; the state of its rules becomes the mean over each element's old "
        "values"
    )
    for key, tensor in of_rules.items():
        if tensor.along:  # vectors of another view mean nothing
            del values[key]
            text += f"; {key} restarts"
        else:
            values[key] = _means(values[key], tensor, former, present.view)
    return values, text


def _means(x: Tensor, tensor: StateTensor, former: RouteEntry, view: MatrixView) -> Tensor:
    """Return a rule's tensor for another view; all ranks must call it together."""
    assert tensor.extent in ("blocks", "rows", "columns")
    assert former.view is not None
    flat = full_tensor(x).reshape(-1).double().cpu()
    of_elements = flat[former.view.numbers(tensor.extent)]
    numbers = view.numbers(tensor.extent)
    shape = tensor.shape_for(former.shape, view)
    size = math.prod(shape)
    sums = torch.zeros(size, dtype=torch.float64, device="cpu")
    sums.index_add_(0, numbers, of_elements)
    means = sums / torch.bincount(numbers, minlength=size)
    return means.to(x.device, x.dtype).view(shape)
