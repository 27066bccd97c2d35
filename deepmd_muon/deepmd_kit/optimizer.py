"""HybridMuon as deepmd-kit's trainers call it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor

from deepmd_muon.optim import HybridMuon
from deepmd_muon.optim.groups.group_settings import unfolded


def as_deepmd_kit_reads(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return a group of a state dict with a key for each setting.

    `lr_adjust` is deepmd-kit's setting for `scaling` and `adam_lr_ratio`.
    """
    settings = unfolded(group)
    is_rectangular = settings["scaling"] == "rectangular"
    settings["lr_adjust"] = 1.0 / settings["adam_lr_ratio"] if is_rectangular else 0.0
    return settings


class DeepmdKitHybridMuon(HybridMuon):
    """HybridMuon with the two methods that deepmd-kit's trainers and checkpoints expect."""

    def set_param_names(self, named_parameters: Iterable[tuple[str, Tensor]]) -> None:
        """Do nothing: the constructor has received the names."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state with its routing, and with what deepmd-kit's class reads.

        It reads the powers of Adam's betas, and each setting as a key of its group.
        """
        state_dict = super().state_dict()
        state = dict(state_dict["state"])
        groups = list(map(as_deepmd_kit_reads, state_dict["param_groups"]))
        for group in groups:
            beta1, beta2 = group["adam_betas"]
            for key in group["params"]:
                if "step" in state.get(key, {}):
                    steps = float(state[key]["step"])
                    powers = {"beta1_pow": beta1**steps, "beta2_pow": beta2**steps}
                    state[key] = {**state[key], **powers}
        return {**state_dict, "state": state, "param_groups": groups}
