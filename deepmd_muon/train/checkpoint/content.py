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
from deepmd_muon.checkpoint_file.errors import CheckpointError
from deepmd_muon.checkpoint_file.file import FORMAT_VERSION, OWN_KEY
from deepmd_muon.data import SamplerStateError
from deepmd_muon.model import EnergyModel
from deepmd_muon.model.branch_settings import SINGLE
from deepmd_muon.model.branches import Branches
from deepmd_muon.model.deepmd_kit import naming_of, to_deepmd_kit
from deepmd_muon.model.descriptor.pieces import uniform
from deepmd_muon.train.branches import RunBranch, StratifiedOrder, TaskOrder
from deepmd_muon.train.checkpoint.continued_state import SHARED, shared_names
from deepmd_muon.train.checkpoint.optimizer_state import in_deepmd_kits_order, parameter_order
from deepmd_muon.train.ema import Ema
from deepmd_muon.train.ranks.ranks import Ranks

log = logging.getLogger(__name__)

# Keys below ours that a checkpoint of several branches has by branch.
_OF_BRANCH = ("pieces", "training_data", "validation_data")


@dataclasses.dataclass(frozen=True)
class RunState:
    """The parts of a run that a checkpoint keeps the state of.

    Attributes
    ----------
    run_input
        The normalised input is stored, so that a restart can name changed settings.
    model, optimizer
        What is trained, as it is laid out over the ranks.
    branches
        For their data order and interpolation.
    order
        The order in which branches are trained.
    ema
        The average; None without one.
    ranks
        Each has random numbers of its own.
    """

    run_input: Input
    model: EnergyModel | Branches
    optimizer: torch.optim.Optimizer
    branches: Mapping[str, RunBranch]
    order: TaskOrder | StratifiedOrder
    ema: Ema | None
    ranks: Ranks

    def content(self, step: int, lr: float, infos: Mapping[str, Any]) -> dict[str, Any]:
        """Return the keys of a checkpoint after `step` updates, tensors laid out over the ranks.

        `lr` is the rate of the last update. `infos` are plain values that deepmd-kit keeps next to
        `lr` and `step`.
        """
        train_infos = {**infos, "lr": lr, "step": step - 1}  # deepmd-kit counts from 0
        distances = {name: branch.min_nbor_dist for name, branch in self.branches.items()}
        optimizer = _with_plain_rates(self.optimizer.state_dict())
        content: dict[str, Any] = {
            "model": to_deepmd_kit(
                self.model, train_infos, min_nbor_dist=self._by_branch(distances)
            ),
            "optimizer": in_deepmd_kits_order(
                optimizer, parameter_order(self.model), naming_of(self.model)
            ),
            OWN_KEY: self._own_content(step),
        }
        if self.ema:
            content["ema"] = self.ema.state_dict()
        return content

    def _own_content(self, step: int) -> dict[str, Any]:
        """Return what an exact restart needs and deepmd-kit ignores."""
        pieces = {}
        training = {}
        validation = {}
        for name, branch in self.branches.items():
            pieces[name] = list(branch.model.pieces)
            training[name] = branch.data.training.state_dict()
            loader = branch.data.validation
            validation[name] = loader.state_dict() if loader else {}
        ours = {
            "version": FORMAT_VERSION,
            "step": step,
            "settings": json.dumps(self.run_input.normalized),
            **_random_state(),
            "pieces": self._by_branch(pieces),
            "training_data": self._by_branch(training),
            "validation_data": self._by_branch(validation),
        }
        if self.ranks.size > 1:
            ours["rng_of_ranks"] = self.ranks.gather_objects(_random_state())
        if isinstance(self.model, Branches):
            ours["tasks"] = self.order.state_dict()
            ours[SHARED] = shared_names(self.model)
        return ours

    def _by_branch(self, values: dict[str, Any]) -> Any:
        """Return values by branch, or the value itself in a run of a single model."""
        return values if isinstance(self.model, Branches) else values[SINGLE]

    def alone(self, name: str, step: int, lr: float) -> dict[str, Any]:
        """Return a checkpoint of one branch as a single model, without the state for a restart."""
        branch = self.branches[name]
        infos = {"lr": lr, "step": step - 1}
        content: dict[str, Any] = {
            "model": to_deepmd_kit(branch.model, infos, min_nbor_dist=branch.min_nbor_dist),
            "optimizer": {"state": {}, "param_groups": []},
        }
        if self.ema:
            average = self.ema.state_dict()
            of_branch = {
                key: average["model"][f"{name}.{key}"] for key, _ in branch.model.named_parameters()
            }
            content["ema"] = {**average, "model": of_branch}
        return content

    def restore(self, content: Mapping[str, Any], path: Path) -> int:
        """Restore random numbers, data order and average; return the number of updates done.

        Weights and optimizer state are restored elsewhere. A checkpoint of deepmd-kit lacks some
        parts: they start afresh, with a warning.
        """
        ours = content.get(OWN_KEY)
        step = step_of(content)
        if ours is None:
            log.warning(
                "%s comes from deepmd-kit, which keeps neither data order nor random numbers: "
                "they start anew",
                path,
            )
        else:
            self._restore_random_state(ours)
            report_changes(json.loads(ours["settings"]), self.run_input.normalized, path)
            if isinstance(self.model, Branches) and "tasks" in ours:
                try:
                    self.order.load_state_dict(ours["tasks"])
                except SamplerStateError:
                    log.warning(
                        "branches or probabilities are not those of %s: their order starts anew",
                        path,
                    )
            self._restore_branches(ours, path)
        if self.ema:
            self.ema.resume(step)
            if "ema" in content:
                self.ema.load_state_dict(content["ema"])
            else:
                log.warning(
                    "%s has no averaged parameters: the average starts from its weights", path
                )
        return step

    def _restore_random_state(self, ours: Mapping[str, Any]) -> None:
        """Restore the random numbers of this rank, if the checkpoint has them."""
        states = ours.get("rng_of_ranks", [ours])
        if self.ranks.rank >= len(states):
            return  # the run had fewer ranks
        state = states[self.ranks.rank]
        torch.set_rng_state(state["torch_rng"])
        if torch.cuda.is_initialized() and state.get("cuda_rng") is not None:
            torch.cuda.set_rng_state(state["cuda_rng"])

    def _restore_branches(self, ours: Mapping[str, Any], path: Path) -> None:
        """Restore the order of each branch's data, and the interpolation of its embedding nets."""
        # By key, then by branch. A single model has its values without the name of a branch; its
        # first checkpoints had no pieces.
        if "tasks" in ours:
            values_of = {key: ours[key] for key in _OF_BRANCH}
        else:
            values_of = {key: {SINGLE: ours.get(key)} for key in _OF_BRANCH}
        for name, branch in self.branches.items():
            former = branch.continued if branch.continued in values_of["training_data"] else name
            if self.run_input.settings.training.interpolate_embedding:
                pieces = values_of["pieces"].get(former) or 0
                # Until 2026-11-24 pieces had one length, and their number was saved.
                branch.model.pieces = uniform(pieces) if isinstance(pieces, int) else tuple(pieces)
            loaders = {
                "training_data": branch.data.training,
                "validation_data": branch.data.validation,
            }
            for key, loader in loaders.items():
                state = values_of[key].get(former)
                if loader is None or not state:
                    continue
                try:
                    loader.load_state_dict(state)
                except SamplerStateError:
                    log.warning(
                        "%s%s is not that of %s: its order starts anew from training/seed",
                        branch.prefix,
                        key,
                        path,
                    )


def _with_plain_rates(state: dict[str, Any]) -> dict[str, Any]:
    """Return an optimizer's state dict with learning rates as numbers, not tensors on a device."""
    groups = state["param_groups"]
    if not any(isinstance(group["lr"], torch.Tensor) for group in groups):
        return state
    plain = [{**group, "lr": float(group["lr"]), "capturable": False} for group in groups]
    return {**state, "param_groups": plain}


def _random_state() -> dict[str, torch.Tensor | None]:
    """Return the state of torch's random numbers, which some hosted models draw in a step."""
    cuda = torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None
    return {"torch_rng": torch.get_rng_state(), "cuda_rng": cuda}


def step_of(content: Mapping[str, Any]) -> int:
    """Return the number of updates before a checkpoint was written."""
    if OWN_KEY in content:
        return int(content[OWN_KEY]["step"])
    # deepmd-kit counts from 0
    return int(content["model"]["_extra_state"]["train_infos"]["step"]) + 1


def check_remaining_steps(content: Mapping[str, Any], num_steps: int, path: Path) -> None:
    """Raise CheckpointError if a checkpoint is beyond the last step of a run that continues it."""
    step = step_of(content)
    if step > num_steps:
        raise CheckpointError(
            f"{path} is at step {step}, beyond the last step {num_steps} of this input: raise "
            "training/numb_steps, or start from its weights with --init-model"
        )
