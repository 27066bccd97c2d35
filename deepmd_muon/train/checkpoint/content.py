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
from deepmd_muon.model.branch_settings import SINGLE
from deepmd_muon.model.branches import Branches
from deepmd_muon.model.deepmd_kit import to_deepmd_kit
from deepmd_muon.model.descriptor.pieces import uniform
from deepmd_muon.train.branches import RunBranch, StratifiedOrder, TaskOrder
from deepmd_muon.train.checkpoint.continued_state import SHARED, shared_names
from deepmd_muon.train.checkpoint.optimizer_state import in_deepmd_kits_order, parameter_order
from deepmd_muon.train.ema import Ema

log = logging.getLogger(__name__)

_LOADERS = ("training_data", "validation_data")


@dataclasses.dataclass(frozen=True)
class RunState:
    """The parts of a run whose state a checkpoint keeps; `ema` is None without an average."""

    given: Input
    model: EnergyModel | Branches
    optimizer: torch.optim.Optimizer
    branches: Mapping[str, RunBranch]
    order: TaskOrder | StratifiedOrder
    ema: Ema | None

    def content(self, step: int, lr: float, infos: Mapping[str, Any]) -> dict[str, Any]:
        """Return the keys of a checkpoint after `step` updates, tensors laid out over the ranks as they are.

        `lr` is the rate of the last update; `infos` are plain values that deepmd-kit keeps beside these two.
        """
        several = isinstance(self.model, Branches)

        def kept(values: dict[str, Any]) -> Any:  # of a single model, its own
            return values if several else values[SINGLE]

        branches = self.branches.items()
        own = {
            "version": FORMAT_VERSION,
            "step": step,
            "settings": json.dumps(self.given.normalized),
            "torch_rng": torch.get_rng_state(),
            "pieces": kept({name: list(one.model.pieces) for name, one in branches}),
            "training_data": kept({name: one.data.training.state_dict() for name, one in branches}),
            "validation_data": kept(
                {
                    name: one.data.validation.state_dict() if one.data.validation else {}
                    for name, one in branches
                }
            ),
        }
        if several:
            own |= {"tasks": self.order.state_dict(), SHARED: shared_names(self.model)}
        infos = {**infos, "lr": lr, "step": step - 1}  # deepmd-kit counts from 0
        distances = kept({name: one.min_nbor_dist for name, one in branches})
        optimizer = _with_plain_rates(self.optimizer.state_dict())
        content: dict[str, Any] = {
            "model": to_deepmd_kit(self.model, infos, min_nbor_dist=distances),
            "optimizer": in_deepmd_kits_order(optimizer, parameter_order(self.model)),
            OWN_KEY: own,
        }
        if self.ema:
            content["ema"] = self.ema.state_dict()
        return content

    def alone(self, name: str, step: int, lr: float) -> dict[str, Any]:
        """Return the keys of a checkpoint of one branch as a single model, without the state for a restart."""
        branch = self.branches[name]
        infos = {"lr": lr, "step": step - 1}
        content: dict[str, Any] = {
            "model": to_deepmd_kit(branch.model, infos, min_nbor_dist=branch.min_nbor_dist),
            "optimizer": {"state": {}, "param_groups": []},
        }
        if self.ema:
            average = self.ema.state_dict()
            own = {
                key: average["model"][f"{name}.{key}"] for key, _ in branch.model.named_parameters()
            }
            content["ema"] = {**average, "model": own}
        return content

    def restore(self, content: Mapping[str, Any], source: Path) -> int:
        """Restore random numbers, data order and average from a checkpoint; return the number of updates done.

        Weights and optimizer state are restored elsewhere. Parts that the checkpoint lacks, as one of deepmd-kit does,
        start anew, with a warning.
        """
        own = content.get(OWN_KEY)
        if own is None:
            step = int(content["model"]["_extra_state"]["train_infos"]["step"]) + 1
            log.warning(
                "%s comes from deepmd-kit, which keeps neither data order nor random numbers: they start anew",
                source,
            )
        else:
            step = int(own["step"])
            self._restore_own(own, source)
        if self.ema:
            self.ema.resume(step)
            if "ema" in content:
                self.ema.load_state_dict(content["ema"], checkpoint_path(source))
            else:
                log.warning(
                    "%s has no averaged parameters: the average starts from its weights", source
                )
        return step

    def _restore_own(self, own: Mapping[str, Any], source: Path) -> None:
        """Restore the part that only our checkpoints have: random numbers and data order; log changed settings."""
        torch.set_rng_state(own["torch_rng"])
        report_changes(json.loads(own["settings"]), self.given.normalized, source)
        if isinstance(self.model, Branches) and "tasks" in own:
            try:
                self.order.load_state_dict(own["tasks"])
            except SamplerStateError:
                log.warning(
                    "branches or probabilities are not those of %s: their order starts anew", source
                )
        saved = (
            own
            if "tasks" in own
            else {key: {SINGLE: own.get(key)} for key in ("pieces", *_LOADERS)}
        )
        for name, branch in self.branches.items():
            former = branch.continued if branch.continued in saved["training_data"] else name
            self._restore_branch(
                branch, {key: saved[key].get(former) for key in ("pieces", *_LOADERS)}, source
            )

    def _restore_branch(self, branch: RunBranch, saved: Mapping[str, Any], source: Path) -> None:
        """Restore the order of a branch's data, and how its embedding nets are interpolated."""
        if self.given.settings.training.interpolate_embedding:
            pieces = saved["pieces"] or 0
            branch.model.pieces = uniform(pieces) if isinstance(pieces, int) else tuple(pieces)
        for key, loader in zip(
            _LOADERS, (branch.data.training, branch.data.validation), strict=True
        ):
            if loader is None or not saved[key]:
                continue
            try:
                loader.load_state_dict(saved[key])
            except SamplerStateError:
                log.warning(
                    "%s%s is not that of %s: its order starts anew from training/seed",
                    branch.prefix,
                    key,
                    source,
                )


def _with_plain_rates(state: dict[str, Any]) -> dict[str, Any]:
    """Return an optimizer's state dict whose learning rates are numbers, as on a CPU, not tensors on a device."""
    groups = state["param_groups"]
    if not any(isinstance(group["lr"], torch.Tensor) for group in groups):
        return state
    plain = [{**group, "lr": float(group["lr"]), "capturable": False} for group in groups]
    return {**state, "param_groups": plain}
