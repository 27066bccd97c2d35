"""The content of a run's checkpoint, and how a run continues from it."""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from deepmd_muon.argcheck import Input
from deepmd_muon.argcheck.changes import report_changes
from deepmd_muon.checkpoint_file.file import FORMAT_VERSION, OWN_KEY, checkpoint_path
from deepmd_muon.data import SamplerStateError
from deepmd_muon.model import EnergyModel
from deepmd_muon.model.deepmd_kit import to_deepmd_kit
from deepmd_muon.train.checkpoint.for_deepmd_kit import in_deepmd_kits_order, parameter_order
from deepmd_muon.train.ema import Ema
from deepmd_muon.train.setup import Data

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class RunState:
    """The parts of a run whose state a checkpoint keeps.

    Attributes
    ----------
    given
        The checked input.
    model, optimizer, data
        The parts themselves.
    ema
        The averaged parameters; None without.
    min_nbor_dist
        Shortest distance in the training data [Å], which deepmd-kit keeps in its checkpoints.
    """

    given: Input
    model: EnergyModel
    optimizer: torch.optim.Optimizer
    data: Data
    ema: Ema | None
    min_nbor_dist: float

    def content(self, step: int, lr: float, infos: Mapping[str, Any]) -> dict[str, Any]:
        """Return the keys of a checkpoint, tensors laid out over the ranks as they are.

        Parameters
        ----------
        step
            Updates done.
        lr
            Learning rate of the last update.
        infos
            Plain values that deepmd-kit keeps beside these two.
        """
        content: dict[str, Any] = {
            "model": to_deepmd_kit(
                self.model,
                {**infos, "lr": lr, "step": step - 1},  # deepmd-kit counts from 0
                min_nbor_dist=self.min_nbor_dist,
            ),
            "optimizer": in_deepmd_kits_order(
                _with_plain_rates(self.optimizer.state_dict()), parameter_order(self.model)
            ),
            OWN_KEY: {
                "version": FORMAT_VERSION,
                "step": step,
                "settings": json.dumps(self.given.normalized),
                "torch_rng": torch.get_rng_state(),
                "pieces": self.model.pieces,
                "training_data": self.data.training.state_dict(),
                "validation_data": self.data.validation.state_dict() if self.data.validation else {},
            },
        }
        if self.ema:
            content["ema"] = self.ema.state_dict()
        return content

    def restore(self, content: Mapping[str, Any], source: Path) -> int:
        """Restore random numbers, data order and average; return the number of updates done.

        Weights and optimizer state are restored elsewhere. Parts that the checkpoint lacks start anew, with a
        warning.

        Parameters
        ----------
        content
            A checkpoint of ours or of deepmd-kit.
        source
            Its path.
        """
        own = content.get(OWN_KEY)
        if own is None:
            step = int(content["model"]["_extra_state"]["train_infos"]["step"]) + 1
            log.warning(
                "%s comes from deepmd-kit, which keeps neither data order nor random numbers: they start anew", source
            )
        else:
            step = int(own["step"])
            self._restore_own(own, source)
        if self.ema:
            if "ema" in content:
                self.ema.load_state_dict(content["ema"], checkpoint_path(source))
            else:
                log.warning("%s has no averaged parameters: the average starts from its weights", source)
        return step

    def _restore_own(self, own: Mapping[str, Any], source: Path) -> None:
        """Restore the part that only our checkpoints have: random numbers and data order; log changed settings."""
        torch.set_rng_state(own["torch_rng"])
        if self.given.settings.training.interpolate_embedding:
            self.model.pieces = int(own.get("pieces", 0))
        report_changes(json.loads(own["settings"]), self.given.normalized, source)
        loaders = {"training_data": self.data.training, "validation_data": self.data.validation}
        for name, loader in loaders.items():
            if loader is None or not own[name]:
                continue
            try:
                loader.load_state_dict(own[name])
            except SamplerStateError:
                log.warning("%s is not that of %s: its order starts anew from training/seed", name, source)


def _with_plain_rates(state: dict[str, Any]) -> dict[str, Any]:
    """Return an optimizer's state dict whose learning rates are numbers, as on a CPU, not tensors on a device."""
    groups = state["param_groups"]
    if not any(isinstance(group["lr"], torch.Tensor) for group in groups):
        return state
    plain = [{**group, "lr": float(group["lr"]), "capturable": False} for group in groups]
    return {**state, "param_groups": plain}
