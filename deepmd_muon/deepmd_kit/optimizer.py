"""HybridMuon as deepmd-kit's trainers call it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor

from deepmd_muon.deepmd_kit.checkpoint import with_powers
from deepmd_muon.optim import HybridMuon


class DeepmdKitHybridMuon(HybridMuon):
    """HybridMuon with the two things that deepmd-kit's trainers and checkpoints expect of theirs."""

    def set_param_names(self, named_parameters: Iterable[tuple[str, Tensor]]) -> None:
        """Ignore the trainer's call after the construction, which has received the names."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state with its routing, and with the powers of Adam's decays that deepmd-kit's class reads."""
        return with_powers(super().state_dict())
