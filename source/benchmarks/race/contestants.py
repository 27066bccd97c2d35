"""Who races: the optimizers, each with a grid of five rates, a factor of two apart.

The rate is the learning rate. Of the Muons that step matrices at a rate of their own it is lr · coefficient, the size
of an update of a matrix divided by the root of its larger dimension; vectors take Adam at `ADAM_RATE`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from optimizers import schedule_free, soap, torch_muon
from torch import nn

Parts = list[tuple[torch.optim.Optimizer, float]]

ADAM_RATE = 1e-3
# torch's "match_rms_adamw" multiplies by 0.2·sqrt(max(rows, columns)).
TORCH_COEFFICIENT = 0.2
WARMUP = 0.05  # of the run, for schedule-free AdamW


@dataclass(frozen=True)
class Contestant:
    """An optimizer with its grid.

    Attributes
    ----------
    grid
        Its rates.
    start_lr
        First learning rate, from a rate.
    section
        Section `optimizer` of the input, from a rate; None for one that the package does not have.
    parts
        Makes one that the package does not have, from model, rate and number of steps.
    decays
        Whether the learning rate decays.
    keeps_absent
        Whether parameters without gradient stay as they are, see `keep_absent`.
    """

    grid: tuple[float, ...]
    start_lr: Callable[[float], float]
    section: Callable[[float], dict[str, Any]] | None = None
    parts: Callable[[nn.Module, float, int], Parts] | None = None
    decays: bool = True
    keeps_absent: bool = False


def doubled(first: float) -> tuple[float, ...]:
    """Return five rates from the first one on, each twice the one before."""
    return tuple(first * 2**k for k in range(5))


def own(section: dict[str, Any], first: float) -> Contestant:
    """Return an optimizer of the package whose rate is the learning rate."""
    return Contestant(doubled(first), lambda rate: rate, lambda rate: section)


def hybrid_muon(
    section: dict[str, Any], *, adam_rate: float = ADAM_RATE, keeps_absent: bool = False
) -> Contestant:
    """Return HybridMuon with a rate of its matrices; `adam_rate` is the learning rate of everything else."""

    def scaled(rate: float) -> dict[str, Any]:
        return {"type": "HybridMuon", "lr_adjust_coeff": rate / adam_rate, **section}

    return Contestant(MATRIX_GRID, lambda rate: adam_rate, scaled, keeps_absent=keeps_absent)


MATRIX_GRID = doubled(0.00216)


UNTOUCHED = "hybrid_muon_untouched"  # an input that sets nothing; its rate is the learning rate


def untouched(steps: int) -> tuple[str, float]:
    """Return the contestant and the rate that `UNTOUCHED` equals in so many steps where descriptors are short."""
    return ("hybrid_muon_adam_10", 0.00864) if steps <= 10_000 else ("hybrid_muon", 0.00432)


CONTESTANTS = {
    "adam": own({"type": "Adam"}, 1.5e-3),
    "adamw": own({"type": "AdamW", "weight_decay": 0.01}, 1.5e-3),
    "hybrid_muon": hybrid_muon({}),
    "hybrid_muon_no_magma": hybrid_muon({"magma_muon": False}),
    # The default decay is 0.001: matrices lose 4e-3 of their size in 30,000 steps, with 1.0 all but 1 %.
    "hybrid_muon_decay_01": hybrid_muon({"weight_decay": 0.1}),
    "hybrid_muon_decay_03": hybrid_muon({"weight_decay": 0.3}),
    "hybrid_muon_decay_1": hybrid_muon({"weight_decay": 1.0}),
    "hybrid_muon_decay_3": hybrid_muon({"weight_decay": 3.0}),
    "hybrid_muon_adam_3": hybrid_muon({}, adam_rate=3e-3),
    "hybrid_muon_adam_10": hybrid_muon({}, adam_rate=1e-2),
    "hybrid_muon_adam_30": hybrid_muon({}, adam_rate=3e-2),
    UNTOUCHED: own({"type": "HybridMuon"}, ADAM_RATE / 4),
    "hybrid_muon_present": hybrid_muon({}, keeps_absent=True),
    "deepmd_kit_muon": own({"type": "HybridMuon", "deepmd_kit_arithmetic": True}, 3e-3),
    "torch_muon": Contestant(
        MATRIX_GRID,
        lambda rate: ADAM_RATE,
        parts=lambda model, rate, steps: torch_muon(model, rate / TORCH_COEFFICIENT / ADAM_RATE),
    ),
    "schedule_free": Contestant(
        doubled(6e-3),
        lambda rate: rate,
        parts=lambda model, rate, steps: schedule_free(model, round(WARMUP * steps)),
        decays=False,
    ),
    "soap": Contestant(
        doubled(3e-3), lambda rate: rate, parts=lambda model, rate, steps: soap(model)
    ),
}
