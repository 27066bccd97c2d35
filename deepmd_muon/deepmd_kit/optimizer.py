"""HybridMuon as deepmd-kit's trainers call it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor

from deepmd_muon.optim import HybridMuon


def lr_adjust_of(group: Mapping[str, Any]) -> float:
    """Return deepmd-kit's setting that stands for a group's `scaling` and `adam_lr_ratio`."""
    return 1.0 / group["adam_lr_ratio"] if group["scaling"] == "rectangular" else 0.0


class DeepmdKitHybridMuon(HybridMuon):
    """HybridMuon with the two methods that deepmd-kit's trainers and checkpoints expect."""

    def set_param_names(self, named_parameters: Iterable[tuple[str, Tensor]]) -> None:
        """Do nothing: the constructor has received the names."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state with its routing, and with what deepmd-kit's class reads.

        It reads the powers of Adam's betas, and `lr_adjust` of groups.
        """
        state_dict = super().state_dict()
        state = dict(state_dict["state"])
        for group in state_dict["param_groups"]:
            beta1, beta2 = group["adam_betas"]
            group["lr_adjust"] = lr_adjust_of(group)
            for key in group["params"]:
                if "step" in state.get(key, {}):
                    steps = float(state[key]["step"])
                    powers = {"beta1_pow": beta1**steps, "beta2_pow": beta2**steps}
                    state[key] = {**state[key], **powers}
        return {**state_dict, "state": state}
