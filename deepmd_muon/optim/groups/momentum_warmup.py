"""Momentum warm-up: the momentum of a group grows linearly over its first steps."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from deepmd_muon.optim.errors import CaptureError

START = 0.85  # of K. Jordan's runs (modded-nanogpt); a lower momentum stays as it is
# Number of steps that a group has taken, while its warm-up lasts.
STEPS = "momentum_steps"


def warm_up_momentum(group: dict[str, Any], *, capturing: bool) -> None:
    """Set the momentum of the next step, until `momentum_warmup` steps are taken.

    Raises CaptureError if the step is being captured: replays would repeat its momentum.
    """
    if not is_warming_up(group):
        return
    if capturing:
        raise CaptureError(
            "replays would not raise the momentum: capture after momentum_warmup steps, or set it "
            "to 0"
        )
    total = group["momentum_warmup"]
    steps = group.get(STEPS, 0)
    end = json.loads(group["constructed"])["momentum"]
    start = min(START, end)
    done = steps / total
    group["momentum"] = (1.0 - done) * start + done * end
    group[STEPS] = steps + 1


def is_warming_up(group: Mapping[str, Any]) -> bool:
    """Return whether the momentum of the next step differs from that of the step before."""
    total: int = group.get("momentum_warmup", 0)
    return total > 0 and total >= group.get(STEPS, 0)
