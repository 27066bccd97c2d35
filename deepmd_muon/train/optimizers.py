"""The run's optimizer: what it tells at the start, and how its state comes back from a checkpoint."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from deepmd_muon.optim import HybridMuon
from deepmd_muon.optim.errors import ForeignStateError, RoutingMismatchError
from deepmd_muon.train.errors import CheckpointError

log = logging.getLogger(__name__)


def describe_routing(optimizer: torch.optim.Optimizer) -> None:
    """Log how many parameters and weights each route has; the whole table at level DEBUG."""
    if isinstance(optimizer, HybridMuon):
        log.info("HybridMuon routing: %s", optimizer.routing.summary())
        log.debug("routes of all parameters:\n%s", optimizer.routing)
    else:
        count = sum(p.numel() for group in optimizer.param_groups for p in group["params"])
        log.info("%s on %d weights", type(optimizer).__name__, count)


def load_optimizer_state(optimizer: torch.optim.Optimizer, content: Mapping[str, Any], source: Path) -> None:
    """Load the optimizer state of a checkpoint after checking that it belongs to this optimizer.

    Parameters
    ----------
    optimizer
        The run's optimizer.
    content
        The checkpoint.
    source
        Its file, for messages.

    Raises
    ------
    CheckpointError
        When there is no optimizer state, or it is of another kind.
    RoutingMismatchError
        When it is HybridMuon's, but routes or matrix views differ.
    """
    state = content.get("optimizer")
    advice = f"to start from its weights with a fresh optimizer, use --init-model {source}"
    if not state:
        raise CheckpointError(f"{source} holds no optimizer state, so training cannot continue from it; {advice}")
    try:
        if isinstance(optimizer, HybridMuon):
            optimizer.load_state_dict(state)
        else:
            _load_adam_state(optimizer, state)
    except ForeignStateError as error:
        raise CheckpointError(f"{source}: {error}; {advice}") from error
    except RoutingMismatchError as error:
        raise CheckpointError(f"{source}: {error}") from error


def _load_adam_state(optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
    """Load torch's Adam state; its own loading is by position, so names are compared first."""
    kind = type(optimizer).__name__
    groups = state["param_groups"]
    if any("routes" in group for group in groups):
        raise ForeignStateError(f"the optimizer state is HybridMuon's, the input asks for {kind}")
    saved = [name for group in groups for name in group.get("param_names", [])]
    present = [name for group in optimizer.param_groups for name in group["param_names"]]
    if saved != present:
        only_saved, only_present = sorted(set(saved) - set(present)), sorted(set(present) - set(saved))
        raise ForeignStateError(
            f"the optimizer state is not of these parameters: {len(saved)} were saved, {len(present)} are here; "
            f"only saved: {only_saved[:5]}; only here: {only_present[:5]}"
        )
    optimizer.load_state_dict(dict(state))
