"""Migrate a parameter's state to another route or view.

- Muon to Muon with another view: the momentum stays exactly; each new block's Magma score is the mean of its elements'
  old scores.
- Adam to AdamW and back: both moments and the step count stay exactly.
- Muon to Adam: the momentum becomes the first moment after one gradient; the second moment restarts from its square.
- Adam to Muon: the bias-corrected first moment becomes the momentum; Magma scores restart.
- Any route to frozen, and back: all state stays, except Magma scores whose number has changed.
- Nothing stays where the shape changed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from deepmd_muon.optim.routing.rules import RouteEntry
from deepmd_muon.optim.routing.views import MatrixView


@dataclasses.dataclass(frozen=True)
class SavedParameter:
    """One parameter of a state dict.

    Attributes
    ----------
    entry
        Its name, shape, view and route there.
    values
        Its state.
    explained
        Whether the version that saved it, not a setting, explains a difference from the present route.
    left_out
        Whether torch left the state of the saved route out; see `deepmd_muon.optim.state.load`.
    """

    entry: RouteEntry
    values: Mapping[str, Tensor]
    explained: bool = False
    left_out: bool = False


def migrate(saved: SavedParameter, present: RouteEntry, betas: tuple[float, float]) -> tuple[dict[str, Tensor], str]:
    """Return the migrated state, and a phrase for the log.

    Parameters
    ----------
    saved
        The parameter in the state dict.
    present
        The same parameter now; shape, view or route differs.
    betas
        Decays of Adam's moments now.
    """
    old = saved.entry
    values: dict[str, Any] = dict(saved.values)
    if old.shape != present.shape:
        return {}, "its shape changed, so it starts without state"
    if not values:
        return {}, "it had no state"
    if present.route == "frozen":
        return values, "it is frozen now and keeps its state"
    was_muon = "momentum_buffer" in values  # only the state shows the former route of a frozen parameter
    if was_muon and present.route == "muon":
        return _other_view(values, old.view, present.view)
    if was_muon:
        m = values["momentum_buffer"]
        wide = torch.promote_types(m.dtype, torch.float32)
        m = m.to(wide)
        state = {"exp_avg": (1 - betas[0]) * m, "exp_avg_sq": (1 - betas[1]) * m.square()}
        state["step"] = torch.ones((), device="cpu")
        return state, "its momentum becomes the first moment after one gradient; the second moment restarts"
    if present.route == "muon":
        seen = 1.0 - betas[0] ** float(values["step"])
        momentum = values["exp_avg"] / seen if seen > 0 else values["exp_avg"]
        return {"momentum_buffer": momentum}, (
            "its bias-corrected first moment becomes the momentum; the second moment is dropped, Magma scores restart"
        )
    return values, "both moments and the step count are kept"


def _other_view(
    values: dict[str, Tensor], old: MatrixView | None, new: MatrixView | None
) -> tuple[dict[str, Tensor], str]:
    """Keep the momentum, and set each new block's score to the mean of its elements' old scores."""
    assert new is not None
    score = values.get("magma_score")
    if old is None:  # it was frozen; its former view is not recorded
        if score is None or score.shape == (new.blocks,):
            return values, "its state is kept"
        del values["magma_score"]
        return values, "its momentum is kept; Magma scores restart"
    if score is not None:
        of_element = score.double().cpu()[old.block_numbers()]
        numbers = new.block_numbers()
        total = torch.zeros(new.blocks, dtype=torch.float64, device="cpu").index_add_(0, numbers, of_element)
        count = torch.bincount(numbers, minlength=new.blocks)
        values["magma_score"] = (total / count).to(score)
    return values, "its momentum is kept; each new block takes the mean of its elements' Magma scores"
