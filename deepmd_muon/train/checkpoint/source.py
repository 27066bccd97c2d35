"""The checkpoint a run starts from: its model, and the parts that carry over to this input."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Literal

import torch

from deepmd_muon.argcheck import Input
from deepmd_muon.argcheck.changes import check_model_section
from deepmd_muon.argcheck.settings import MultiTaskSettings
from deepmd_muon.checkpoint_file.errors import CheckpointError
from deepmd_muon.checkpoint_file.file import checkpoint_path, read_checkpoint, understood
from deepmd_muon.model import EnergyModel
from deepmd_muon.model.branch_settings import SINGLE
from deepmd_muon.model.deepmd_kit import from_deepmd_kit, saved_branches
from deepmd_muon.model.settings import ModelSettings, changed
from deepmd_muon.model.type_map import TypeMove, check_move, move_weights
from deepmd_muon.train.checkpoint.optimizer_state import in_own_names

log = logging.getLogger(__name__)

Way = Literal["restart", "init_model", "finetune"]
# The branch that stands for a new fitting net on the descriptor of the first one.
RANDOM = "RANDOM"
_TABLE = "short_range.tab_data"


@dataclasses.dataclass(frozen=True)
class Source:
    """One model of a checkpoint, taken apart.

    Attributes
    ----------
    path
        The file.
    content
        Everything in it.
    model
        The settings it was trained with.
    weights
        The model's state, under our names.
    way
        How the run uses it.
    new_fitting
        Only the descriptor is taken; the fitting net starts anew.
    branch
        Its name among the branches of the checkpoint.
    """

    path: Path
    content: Mapping[str, Any]
    model: ModelSettings
    weights: Mapping[str, torch.Tensor]
    way: Way
    new_fitting: bool = False
    branch: str = SINGLE

    @classmethod
    def of(
        cls,
        path: Path,
        content: Mapping[str, Any],
        way: Way,
        branch: str | None = None,
        new_fitting: bool = False,
    ) -> Source:
        """Take the model of a branch out of a checkpoint's content; ForeignModelError where it cannot be built here."""
        settings, weights = from_deepmd_kit(content["model"], branch)
        saved = saved_branches(content["model"])
        return cls(
            path, content, settings, weights, way, new_fitting, saved.get(branch or "", SINGLE)
        )

    @property
    def has_table(self) -> bool:
        """Whether it brings the table of `use_srtab`, so that the model needs no file."""
        return _TABLE in self.weights

    def move_to(self, type_map: Collection[str]) -> TypeMove | None:
        """Return where its types are in another type map; None for the same, or where networks belong to types."""
        if self.model.type_map == tuple(type_map) or not self.model.descriptor.one_fitting_net:
            return None
        return TypeMove(self.model.type_map, tuple(type_map))

    def check_type_map(self, present: Collection[str]) -> None:
        """Refuse another type map for a model that cannot have one; see `check_move`."""
        if self.model.type_map != tuple(present):
            check_move(TypeMove(self.model.type_map, tuple(present)), self.model)

    def has_statistics(self, type_map: Collection[str]) -> bool:
        """Return whether it holds all that the statistics of data would give to a model of these types."""
        move = self.move_to(type_map)
        return not self.new_fitting and not (move and move.new)

    def script(self, present: ModelSettings) -> ModelSettings:
        """Return the model for --use-pretrain-script.

        Fine-tuning keeps the type map and the trainable parts of the input; otherwise the model is the checkpoint's.
        """
        if self.way != "finetune":
            return self.model
        saved = self._model_for(present)
        taken = {}
        for part in ("descriptor",) if self.new_fitting else ("descriptor", "fitting_net"):
            old, new = getattr(saved, part), getattr(present, part)
            both = hasattr(old, "trainable") and hasattr(
                new, "trainable"
            )  # a third party's part may lack it
            taken[part] = changed(
                old, {"trainable": new.trainable} if both else {}, f"model/{part}"
            )
        return changed(present, taken)

    def check(self, present: ModelSettings, *, insist: bool) -> None:
        """Refuse to go on with weights of another model, or log the differences; see `check_model_section`."""
        saved = self._model_for(present)
        if self.new_fitting:
            saved = changed(saved, {"fitting_net": present.fitting_net})
        check_model_section(saved, present, self.path, insist=insist)

    def load_into(self, model: EnergyModel, *, force: bool) -> None:
        """Load weights and statistics into a model of the input; rows of types move to where its type map has them.

        `force` loads matching parts and logs the others. Parts that the checkpoint lacks are not changed then.

        Raises
        ------
        CheckpointError
            Listing every tensor that is missing, unknown, of another shape or not finite.
        """
        weights = self.weights
        spoiled = [name for name, x in weights.items() if not bool(torch.isfinite(x).all())]
        if spoiled:
            raise CheckpointError(
                f"{self.path} holds weights that are not finite ({', '.join(spoiled[:3])}): take an earlier checkpoint"
            )
        if move := self.move_to(model.type_map):
            log.warning("type_map is not that of %s: %s", self.path, move.describe())
            if not self.new_fitting:
                model.set_energy_bias([0.0] * model.ntypes)  # of new types; it is fitted afterwards
            weights = move_weights(model, weights, move)
        if self.new_fitting:
            taken = {
                name: x
                for name, x in weights.items()
                if name.startswith("atomic_model.descriptor.")
            }
            weights = {**model.state_dict(), **taken}
        present = model.state_dict()
        problems = [f"{name}: not in the checkpoint" for name in present if name not in weights]
        problems += [
            f"{name}: not in the model of this input" for name in weights if name not in present
        ]
        problems += [
            f"{name}: shape {tuple(tensor.shape)} in the checkpoint, {tuple(present[name].shape)} here"
            for name, tensor in weights.items()
            if name in present and not _fits(name, tensor, present[name])
        ]
        if problems and not force:
            saved = self.model.descriptor.neighbors().sel
            if saved != model.sel:
                problems.insert(
                    0,
                    f"model/descriptor/sel: {list(saved)} in the checkpoint, {list(model.sel)} here",
                )
            listed = "\n".join(f"  {problem}" for problem in problems)
            raise CheckpointError(
                f"the weights of {self.path} do not fit the model of this input:\n{listed}\n"
                "Use the model section the checkpoint was trained with (--use-pretrain-script), "
                "or --force-load to take what fits."
            )
        for problem in problems:
            log.warning("--force-load: %s", problem)
        fitting = {
            name: tensor
            for name, tensor in weights.items()
            if name in present and _fits(name, tensor, present[name])
        }
        model.load_state_dict(fitting, strict=False)

    def _model_for(self, present: ModelSettings) -> ModelSettings:
        """Return its model with the type map of another one, where rows can move."""
        move = self.move_to(present.type_map)
        return move.settings(self.model, present) if move else self.model


def read_sources(
    given: Input, ways: Mapping[Way, str | None], branch: str | None = None, *, alone: bool = True
) -> dict[str, Source]:
    """Read a checkpoint of ours or of deepmd-kit, and find the model in it that each branch of a run continues.

    Parameters
    ----------
    ways
        The checkpoint, under the way the run uses it.
    branch
        Name or alias of a branch of a multi-task checkpoint, for a run of one model. As in deepmd-kit, fine-tuning
        without one, or from "RANDOM", takes the descriptor of the first branch and starts the fitting net anew.
    alone
        False for several ranks, which read optimizer state and average of a directory later, each its part.

    Returns
    -------
    dict
        By name of the run's branches; those that start anew have none.
    """
    way, named = next(((way, path) for way, path in ways.items() if path), (None, None))
    if way is None or named is None:
        return {}
    path = checkpoint_path(named)
    content = read_checkpoint(path, () if way == "restart" and alone else ("optimizer", "ema"))
    if content.get("optimizer"):
        content["optimizer"] = in_own_names(content["optimizer"])
    with understood(path):
        if isinstance(given.settings, MultiTaskSettings):
            if branch:
                raise CheckpointError(
                    "--model-branch names the branch for a run of one model; of several, each names its own: set "
                    "finetune_head in model/model_dict"
                )
            chosen = _choose(given.settings, content["model"], path, way)
        else:
            chosen = {SINGLE: (way, branch, False)}
            if way == "finetune" and branch in (None, RANDOM):
                branches = saved_branches(content["model"])
                chosen = {
                    SINGLE: (way, next(iter(branches), None), bool(branches) or branch == RANDOM)
                }
        found = {name: Source.of(path, content, *choice) for name, choice in chosen.items()}
    for name, source in found.items():
        if source.new_fitting:
            whose = "" if name == SINGLE else f" of {name}"
            log.warning("%s gives its descriptor alone; the fitting net%s starts anew", path, whose)
    return found


_Choice = tuple[
    Way, "str | None", bool
]  # how a branch is used, its name in the checkpoint, whether the net is new


def _choose(
    settings: MultiTaskSettings, state: Mapping[str, Any], path: Path, way: Way
) -> dict[str, _Choice]:
    """Choose the saved branch of each branch of a run, for fine-tuning as deepmd-kit does."""
    saved = saved_branches(state)
    known: Mapping[str, str | None] = saved or {SINGLE: None}
    chosen: dict[str, _Choice] = {}
    for name, branch in settings.model.model_dict.items():
        head = branch.finetune_head
        if way == "finetune" and head not in (None, RANDOM):
            if head not in known:
                raise CheckpointError(
                    f"model/model_dict/{name}/finetune_head is {head!r}, but {path} has the branches {', '.join(known)}"
                )
            chosen[name] = (way, known[head], False)
        elif way == "finetune" and (head == RANDOM or name not in known.values()):
            chosen[name] = (way, next(iter(known.values())), True)
        elif way == "finetune":
            chosen[name] = (
                "init_model",
                name,
                False,
            )  # it goes on as it is, beside those that are fine-tuned
        else:
            names = [
                each for each in (name, *branch.model_branch_alias, head or "") if each in known
            ]
            if names:
                chosen[name] = (way, known[names[0]], False)
    if not chosen and not saved:
        chosen = {next(iter(settings.model.model_dict)): (way, None, False)}
    if not chosen:
        raise CheckpointError(
            f"{path} has the branches {', '.join(known)}, and this input none of them; where a branch has another name "
            "now, list the former one in its model_branch_alias"
        )
    for name in settings.model.model_dict:
        if name not in chosen:
            log.warning("the branch %s starts anew: %s has no branch of this name", name, path)
        elif (other := chosen[name][1]) != name:
            log.info("the branch %s starts from %s of %s", name, other or "the model", path)
    return chosen


def _fits(name: str, saved: torch.Tensor, present: torch.Tensor) -> bool:
    """Return whether a saved tensor can be loaded; a model without its `use_srtab` file accepts any table."""
    return saved.shape == present.shape or (name == _TABLE and not present.numel())
