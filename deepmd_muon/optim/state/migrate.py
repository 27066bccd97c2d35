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
from deepmd_muon.optim.rules.interface import MatrixRule
from deepmd_muon.optim.rules.master_weights import MASTER
from deepmd_muon.optim.rules.registry import known_rules, tensors_of


@dataclasses.dataclass(frozen=True)
class SavedParameter:
    """One parameter of a state dict."""

    entry: RouteEntry  # saved name, shape, view and route
    values: Mapping[str, Tensor]
    explained: bool = False  # the version that saved it, not a setting, explains a difference from the present route
    left_out: bool = (
        False  # torch omitted the state of the saved route; see `deepmd_muon.optim.state.load`
    )
    rules: tuple[MatrixRule, ...] = ()  # on the Muon route, its state must hold their tensors


def migrate(
    saved: SavedParameter, present: RouteEntry, betas: tuple[float, float]
) -> tuple[dict[str, Tensor], str]:
    """Return the migrated state of a parameter that has changed, and a phrase for the log.

    `betas` are the present decays of Adam's moments.
    """
    old = saved.entry
    values: dict[str, Any] = dict(saved.values)
    if old.shape != present.shape:
        return {}, "its shape changed, so it starts without state"
    if not values:
        return {}, "it had no state"
    if present.route == "frozen":
        return values, "it is frozen now and keeps its state"
    kept = {key: values[key] for key in (MASTER,) if key in values}
    was_muon = (
        "momentum_buffer" in values
    )  # only the state shows the former route of a frozen parameter
    if was_muon and present.route == "muon":
        return _other_view(values, old.shape, old.view, present.view)
    if was_muon:
        m = values["momentum_buffer"]
        wide = torch.promote_types(m.dtype, torch.float32)
        m = m.to(wide)
        state = {"exp_avg": (1 - betas[0]) * m, "exp_avg_sq": (1 - betas[1]) * m.square()}
        state["step"] = torch.ones((), device="cpu")
        return {
            **state,
            **kept,
        }, "its momentum becomes the first moment after one gradient; the second moment restarts"
    if present.route == "muon":
        seen = 1.0 - betas[0] ** float(values["step"])
        momentum = values["exp_avg"] / seen if seen > 0 else values["exp_avg"]
        return {"momentum_buffer": momentum, **kept}, (
            "its bias-corrected first moment becomes the momentum; the second moment is dropped, "
            "rules restart"
        )
    return values, "both moments and the step count are kept"


def _other_view(
    values: dict[str, Tensor],
    shape: tuple[int, ...],
    old: MatrixView | None,
    new: MatrixView | None,
) -> tuple[dict[str, Tensor], str]:
    """Keep the momentum; set each number of a rule to the mean over its elements' old numbers."""
    assert new is not None
    known = tensors_of(known_rules())
    of_rules = {
        key: tensor for key, tensor in known.items() if key in values and key != MASTER
    }  # in the same order on all ranks, which gather together
    if old is None:  # it was frozen; its former view is not recorded
        unfit = [
            key
            for key, x in of_rules.items()
            if tuple(values[key].shape) != x.shape_for(shape, new)
        ]
        for key in unfit:
            del values[key]
        restarting = ", ".join(f"{key}s" for key in sorted(unfit))
        return values, f"its momentum is kept; {restarting} restart"
    for key, tensor in of_rules.items():
        assert tensor.extent in ("blocks", "rows", "columns")
        if tensor.along:
            del values[key]
            continue
        x = values[key]
        of_element = full_tensor(x).reshape(-1).double().cpu()[old.numbers(tensor.extent)]
        numbers, like = new.numbers(tensor.extent), tensor.shape_for(shape, new)
        size = math.prod(like)
        total = torch.zeros(size, dtype=torch.float64, device="cpu").index_add_(
            0, numbers, of_element
        )
        mean = total / torch.bincount(numbers, minlength=size)
        values[key] = mean.to(x.device, x.dtype).view(like)
    restarting = "".join(f"; {key} restarts" for key, tensor in of_rules.items() if tensor.along)
    text = "its momentum is kept; the state of its rules becomes the mean over each element's old values"
    return values, text + restarting
