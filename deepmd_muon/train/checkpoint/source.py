"""The checkpoint a run starts from: its model, and the parts that carry over to this input."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch

from deepmd_muon.argcheck import Input
from deepmd_muon.argcheck.changes import check_model_section
from deepmd_muon.argcheck.settings import MultiTaskSettings
from deepmd_muon.checkpoint_file.errors import CheckpointError
from deepmd_muon.checkpoint_file.file import checkpoint_path, understood
from deepmd_muon.model import EnergyModel
from deepmd_muon.model.branch_settings import SINGLE
from deepmd_muon.model.deepmd_kit import from_deepmd_kit, saved_branches
from deepmd_muon.model.frozen_weights import FROZEN, read_weights
from deepmd_muon.model.settings import HostedSettings, ModelSettings, changed
from deepmd_muon.model.type_map import TypeMove, check_move, move_weights
from deepmd_muon.train.checkpoint.optimizer_state import in_own_names

log = logging.getLogger(__name__)

Way = Literal["restart", "init_model", "finetune"]
# The name of a saved branch that asks for a new fitting net on the descriptor of the first branch.
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
        Everything in it. `RunState.content` has the keys that a run writes; the step, which
        deepmd-kit keeps elsewhere, is read by `RunState.restore`.
    settings
        The settings the model was trained with.
    model_state
        The model's state dict under our names: parameters, statistics, energy bias and table.
    way
        How the run uses it.
    new_fitting
        Only the descriptor is taken; the fitting net starts anew.
    branch
        Its name among the branches of the checkpoint.
    """

    path: Path
    content: Mapping[str, Any]
    settings: ModelSettings
    model_state: Mapping[str, torch.Tensor]
    way: Way
    new_fitting: bool = False
    branch: str = SINGLE

    @classmethod
    def of(cls, path: Path, content: Mapping[str, Any], choice: Choice) -> Source:
        """Take the model of a branch out of a checkpoint's content.

        Raises
        ------
        ForeignModelError
            If the model cannot be built here.
        """
        settings, model_state = from_deepmd_kit(content["model"], choice.branch)
        branches = saved_branches(content["model"])
        return cls(
            path=path,
            content=content,
            settings=settings,
            model_state=model_state,
            way=choice.way,
            new_fitting=choice.new_fitting,
            branch=branches.get(choice.branch or "", SINGLE),
        )

    @property
    def has_table(self) -> bool:
        """Whether it brings the table of `use_srtab`, so that the model needs no file."""
        return _TABLE in self.model_state

    def move_to(self, type_map: Collection[str]) -> TypeMove | None:
        """Return where its types are in another type map.

        None if the type maps are the same, or if networks belong to types.
        """
        if (
            self.settings.type_map == tuple(type_map)
            or not self.settings.descriptor.one_fitting_net
        ):
            return None
        return TypeMove(self.settings.type_map, tuple(type_map))

    def check_type_map(self, present: Collection[str]) -> None:
        """Refuse another type map for a model that cannot have one; see `check_move`."""
        if self.settings.type_map != tuple(present):
            move = TypeMove(self.settings.type_map, tuple(present))
            check_move(move, self.settings, checkpoint=str(self.path))

    def has_statistics(self, type_map: Collection[str]) -> bool:
        """Return whether it holds all statistics of the data that a model of these types needs."""
        move = self.move_to(type_map)
        return not self.new_fitting and not (move and move.new)

    def script(self, present: ModelSettings) -> ModelSettings:
        """Return the model for --use-pretrain-script.

        Fine-tuning keeps the type map and the trainable parts of the input; otherwise the model is
        the checkpoint's. If deepmd-kit cannot change its types, it keeps its type map, which must
        have all types of the input.
        """
        if self.way != "finetune":
            return self._with_adapters(self.settings, present)
        if isinstance(self.settings, HostedSettings):
            keeps_types = self.settings.has_fixed_types and (
                set(present.type_map) <= set(self.settings.type_map)
            )
            if keeps_types and present.type_map != self.settings.type_map:
                log.info("type_map becomes that of %s, whose types cannot change", self.path)
            saved = self.settings if keeps_types else self._model_for(present)
            saved = self._with_adapters(saved, present)
            return self._with_new_fitting(saved, present) if self.new_fitting else saved
        saved_model = self._model_for(present)
        parts = ["descriptor"] if self.new_fitting else ["descriptor", "fitting_net"]
        scripted = {}
        for part in parts:
            saved_part = getattr(saved_model, part)
            present_part = getattr(present, part)
            changes = {}
            # A third party's part may lack it.
            if hasattr(saved_part, "trainable") and hasattr(present_part, "trainable"):
                changes["trainable"] = present_part.trainable
            scripted[part] = changed(saved_part, changes, f"model/{part}")
        return changed(present, scripted)

    def check(self, present: ModelSettings, *, insist: bool) -> None:
        """Refuse to continue with weights of another model, or log the differences.

        See `check_model_section`.
        """
        saved_model = self._with_adapters(self._model_for(present), present)
        if self.new_fitting:
            saved_model = self._with_new_fitting(saved_model, present)
        check_model_section(saved_model, present, self.path, insist=insist)

    def _with_adapters(self, saved: ModelSettings, present: ModelSettings) -> ModelSettings:
        """Return a saved model with the adapters of another one, which a new run may add."""
        if self.way == "restart" or not isinstance(saved, HostedSettings):
            return saved
        return saved.with_adapters_of(present)

    @staticmethod
    def _with_new_fitting(saved: ModelSettings, present: ModelSettings) -> ModelSettings:
        """Return a saved model with the fitting net of another one."""
        if isinstance(saved, HostedSettings):
            return saved.with_fitting_net_of(present)
        return changed(saved, {"fitting_net": present.fitting_net})

    def _model_for(self, present: ModelSettings) -> ModelSettings:
        """Return its model with the type map of another one, if rows can move."""
        move = self.move_to(present.type_map)
        return move.settings(self.settings, present) if move else self.settings

    def load_into(self, model: EnergyModel, *, force: bool) -> None:
        """Load weights and statistics into a model of the input, in the rows of its type map.

        `force` loads matching parts and logs the others. Parts that the checkpoint lacks are not
        changed then.

        Raises
        ------
        CheckpointError
            Listing every tensor that is missing, unknown, of another shape or not finite.
        """
        self._require_finite()
        saved = self._model_state_for(model)
        if obsolete := model.obsolete_names(saved):
            log.info("deepmd-kit keeps these no longer: %s", ", ".join(sorted(obsolete)))
            saved = {name: x for name, x in saved.items() if name not in obsolete}
        present = model.state_dict()
        problems = _differences(saved, present)
        if problems and not force:
            # deepmd-kit's modules know their lists only when they are built.
            is_hosted = isinstance(self.settings, HostedSettings)
            sel = model.sel if is_hosted else self.settings.descriptor.neighbors().sel
            if sel != model.sel:
                # The cause of the other differences, so it comes first.
                problems.insert(
                    0,
                    f"model/descriptor/sel: {list(sel)} in the checkpoint, {list(model.sel)} here",
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
            name: x
            for name, x in saved.items()
            if name in present and _fits(name, x, present[name])
        }
        # Not strict: with --force-load, parts that do not fit keep their initial values.
        model.load_state_dict(fitting, strict=False)

    def _require_finite(self) -> None:
        not_finite = [
            name for name, x in self.model_state.items() if not bool(torch.isfinite(x).all())
        ]
        if not_finite:
            raise CheckpointError(
                f"{self.path} holds weights that are not finite ({', '.join(not_finite[:3])}): "
                "take an earlier checkpoint"
            )

    def _model_state_for(self, model: EnergyModel) -> Mapping[str, torch.Tensor]:
        """Return its state in the type map of a model; a new fitting net is the model's own.

        If the type maps differ, this sets the energy bias of the model to 0.
        """
        saved = self.model_state
        if move := self.move_to(model.type_map):
            log.warning("type_map is not that of %s: %s", self.path, move.describe())
            if not self.new_fitting:
                # The bias of new types stays 0 here; it is fitted afterwards.
                model.set_energy_bias([0.0] * model.ntypes)
            saved = move_weights(model, saved, move)
        if self.way != "restart":
            # New adapters keep their initial values.
            present = model.state_dict()
            saved = {**{name: present[name] for name in model.adapters}, **saved}
        if not self.new_fitting:
            return saved
        # The new fitting net keeps its initial values.
        descriptor = {
            name: x for name, x in saved.items() if name.startswith("atomic_model.descriptor.")
        }
        return {**model.state_dict(), **descriptor}


def _differences(
    saved: Mapping[str, torch.Tensor], present: Mapping[str, torch.Tensor]
) -> list[str]:
    """Describe the tensors that are missing, unknown, or of another shape."""
    missing = [f"{name}: not in the checkpoint" for name in present if name not in saved]
    unknown = [f"{name}: not in the model of this input" for name in saved if name not in present]
    other_shapes = [
        f"{name}: shape {tuple(x.shape)} in the checkpoint, {tuple(present[name].shape)} here"
        for name, x in saved.items()
        if name in present and not _fits(name, x, present[name])
    ]
    return missing + unknown + other_shapes


def _fits(name: str, saved: torch.Tensor, present: torch.Tensor) -> bool:
    """Return whether a saved tensor can be loaded.

    A model without its `use_srtab` file accepts any table.
    """
    return saved.shape == present.shape or (name == _TABLE and not present.numel())


class Choice(NamedTuple):
    """How a branch of a run uses a branch of a checkpoint.

    Attributes
    ----------
    branch
        Its name in the checkpoint; None if that holds a single model.
    new_fitting
        Whether only the descriptor is taken.
    """

    way: Way
    branch: str | None
    new_fitting: bool


def read_sources(
    run_input: Input, ways: Mapping[Way, str | None], branch: str | None = None
) -> dict[str, Source]:
    """Read a checkpoint, and find the model in it that each branch of a run continues.

    Parameters
    ----------
    run_input
        The input.
    ways
        The checkpoint, ours or deepmd-kit's, under the way the run uses it. Only weights are
        taken from a frozen file.
    branch
        Name or alias of a branch of a multi-task checkpoint, for a run of one model. As in
        deepmd-kit, fine-tuning without one, or from "RANDOM", takes the descriptor of the first
        branch and starts the fitting net anew.

    Returns
    -------
    dict
        By name of the run's branches. Branches that start anew have none.
    """
    named = [(way, path) for way, path in ways.items() if path]
    if not named:
        return {}
    way, name_of_checkpoint = named[0]
    assert name_of_checkpoint is not None
    path = checkpoint_path(name_of_checkpoint)
    if path.suffix == FROZEN and way == "restart":
        raise CheckpointError(
            f"{path} is a frozen file, which holds no step and no optimizer: start from its "
            "weights with --init-model or --finetune, or restart the checkpoint it was made from"
        )
    content = read_weights(path)
    with understood(path):
        if isinstance(run_input.settings, MultiTaskSettings):
            if branch:
                raise CheckpointError(
                    "--model-branch names the branch for a run of one model; of several, each "
                    "names its own: set finetune_head in model/model_dict"
                )
            choices = _choose(run_input.settings, content["model"], path, way)
        else:
            new_fitting = False
            if way == "finetune" and branch in (None, RANDOM):
                # The descriptor of the first branch, if there are several.
                branches = saved_branches(content["model"])
                new_fitting = bool(branches) or branch == RANDOM
                branch = next(iter(branches), None)
            choices = {SINGLE: Choice(way, branch, new_fitting)}
        sources = {name: Source.of(path, content, choice) for name, choice in choices.items()}
        hosted = any(isinstance(source.settings, HostedSettings) for source in sources.values())
        if content.get("optimizer") and not hosted:
            content["optimizer"] = in_own_names(content["optimizer"])
    for name, source in sources.items():
        if source.new_fitting:
            of_branch = "" if name == SINGLE else f" of {name}"
            log.warning(
                "%s gives its descriptor alone; the fitting net%s starts anew", path, of_branch
            )
    return sources


def _choose(
    settings: MultiTaskSettings, state: Mapping[str, Any], path: Path, way: Way
) -> dict[str, Choice]:
    """Choose the saved branch of each branch of a run, for fine-tuning as deepmd-kit does."""
    saved_names = saved_branches(state)
    branch_of_name: Mapping[str, str | None] = saved_names or {SINGLE: None}
    branches = settings.model.model_dict
    choices: dict[str, Choice] = {}
    for name, branch in branches.items():
        head = branch.finetune_head
        if way != "finetune":
            candidates = (name, *branch.model_branch_alias, head or "")
            matching = [candidate for candidate in candidates if candidate in branch_of_name]
            if matching:
                choices[name] = Choice(way, branch_of_name[matching[0]], new_fitting=False)
        elif head not in (None, RANDOM):
            if head not in branch_of_name:
                raise CheckpointError(
                    f"model/model_dict/{name}/finetune_head is {head!r}, "
                    f"but {path} has the branches {', '.join(branch_of_name)}"
                )
            choices[name] = Choice(way, branch_of_name[head], new_fitting=False)
        elif head == RANDOM or name not in branch_of_name.values():
            descriptor_branch = next(iter(branch_of_name.values()))
            choices[name] = Choice(way, descriptor_branch, new_fitting=True)
        else:
            # A saved branch without a head continues as it is, while the others are fine-tuned.
            choices[name] = Choice("init_model", name, new_fitting=False)
    if not choices and not saved_names:
        # A checkpoint of a single model has no names: it becomes the first branch.
        choices = {next(iter(branches)): Choice(way, None, new_fitting=False)}
    if not choices:
        raise CheckpointError(
            f"{path} has the branches {', '.join(branch_of_name)}, and this input none of them; "
            "where a branch has another name now, list the former one in its model_branch_alias"
        )
    for name in branches:
        if name not in choices:
            log.warning("the branch %s starts anew: %s has no branch of this name", name, path)
        elif choices[name].branch != name:
            saved_name = choices[name].branch or "the model"
            log.info("the branch %s starts from %s of %s", name, saved_name, path)
    return choices
