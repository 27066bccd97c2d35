"""Section `model` of several models that share parts; torch-free."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

from deepmd_muon.model.registry import DESCRIPTORS
from deepmd_muon.model.settings import HostedSettings, ModelSettings
from deepmd_muon.section import Foreign, Rule, Section, section
from deepmd_muon.setting import setting

SINGLE = "Default"
"""Name of the branch of a model that is not multi-task, in deepmd-kit's files too."""
SHAREABLE = ("type_map", "descriptor", "fitting_net")
"""Keys of a branch that may name an entry of model/shared_dict."""
ENTIRE = 0
"""Level at which a part is shared with all its weights. At level 1 of a descriptor, only
`type_embedding` is."""


@dataclasses.dataclass(frozen=True)
class Shared:
    """A reference of a branch to an entry of model/shared_dict.

    Attributes
    ----------
    key
        Name of the entry.
    level
        How much of the entry the branch shares; see `ENTIRE`.
    given
        The value in the input, such as "key:1".
    """

    key: str
    level: int
    given: str


def levels_of(part: str, section: Any) -> tuple[int, ...]:
    """Return the levels at which a part of a model can be shared, given its plain section."""
    if part != "descriptor":
        return (ENTIRE,)
    kind = section.get("type") if isinstance(section, Mapping) else None
    name = DESCRIPTORS.aliases.get(kind, kind) if isinstance(kind, str) else ""
    if name not in DESCRIPTORS.settings:
        return (ENTIRE, 1)  # the check, or deepmd-kit, will judge it
    levels: tuple[int, ...] = DESCRIPTORS.settings_class(name).share_levels
    return levels


@dataclasses.dataclass(frozen=True, kw_only=True)
class BranchModelSettings(ModelSettings):
    """The model of one branch, with its settings for a multi-task run.

    Each of type_map, descriptor and fitting_net may be the name of an entry of model/shared_dict,
    or "name:level".
    """

    type_map: tuple[str, ...] = setting(
        nonempty=True, doc="Names of the types of atoms, such as ['O', 'H']."
    )
    finetune_head: str | None = setting(
        None,
        doc=(
            "Branch of the checkpoint of --finetune that this branch starts from; 'RANDOM' takes a "
            "descriptor and "
            "starts the fitting net anew. Left out, a branch continues the one of its name, else "
            "it starts as 'RANDOM'."
        ),
    )
    model_branch_alias: tuple[str, ...] = setting((), doc="Other names of the branch.")

    foreign: ClassVar[dict[str, Foreign]] = {
        key: value
        for key, value in ModelSettings.foreign.items()
        if key not in ("finetune_head", "model_branch_alias", "shared_dict")
    }

    @property
    def alone(self) -> ModelSettings:
        """The model without its settings for a multi-task run."""
        return ModelSettings(**_values_of(ModelSettings, self))

    def with_model(self, model: ModelSettings) -> BranchModelSettings:
        """Return the branch with another model."""
        return dataclasses.replace(self, **_values_of(type(self.alone), model))


@dataclasses.dataclass(frozen=True, kw_only=True)
class HostedBranchSettings(HostedSettings, BranchModelSettings):
    """The model of one branch, which a module of deepmd-kit computes."""

    rules = HostedSettings.rules

    @classmethod
    def around(cls, model: HostedSettings, branch: Mapping[str, Any]) -> HostedBranchSettings:
        """Return a branch with a model, and the branch's own keys of its plain section."""
        keys: dict[str, Any] = {"finetune_head": branch.get("finetune_head")}
        keys["model_branch_alias"] = tuple(branch.get("model_branch_alias") or ())
        return cls(**_values_of(HostedSettings, model), **keys)

    @property
    def alone(self) -> HostedSettings:
        """The model without its settings for a multi-task run."""
        return HostedSettings(**_values_of(HostedSettings, self))

    def plain_form(self) -> dict[str, Any]:
        """Return the section in deepmd-kit's form, with the keys of the branch."""
        keys: dict[str, Any] = {"model_branch_alias": list(self.model_branch_alias)}
        if self.finetune_head is not None:
            keys["finetune_head"] = self.finetune_head
        return {**super().plain_form(), **keys}


def _values_of(kind: type, settings: Any) -> dict[str, Any]:
    """Return the values of all fields of a settings class."""
    declared: Any = kind
    return {field.name: getattr(settings, field.name) for field in dataclasses.fields(declared)}


def _some_branch(model_dict: Mapping[str, BranchModelSettings]) -> str | None:
    return None if model_dict else "must have a branch; found an empty object"


def _one_protection(model_dict: Mapping[str, BranchModelSettings]) -> str | None:
    values = {name: branch.data_stat_protect for name, branch in model_dict.items()}
    if len(set(values.values())) > 1:
        listed = ", ".join(f"{name} {value:g}" for name, value in values.items())
        return f"must have one data_stat_protect for all branches; found {listed}"
    return None


def _a_row_for_each_branch(model_dict: Mapping[str, BranchModelSettings]) -> str | None:
    dims = {
        name: getattr(branch.fitting_net, "dim_case_embd", 0) for name, branch in model_dict.items()
    }
    listed = ", ".join(f"{name} {dim}" for name, dim in dims.items())
    if len(set(dims.values())) > 1:
        return f"must have one fitting_net/dim_case_embd for all branches; found {listed}"
    if 0 < max(dims.values(), default=0) < len(dims):
        return (
            f"must have a fitting_net/dim_case_embd of at least {len(dims)}, the number of "
            f"branches; found {listed}"
        )
    return None


def _names_once(model_dict: Mapping[str, BranchModelSettings]) -> str | None:
    taken = dict.fromkeys(model_dict, "the branch")
    problems = []
    for name, branch in model_dict.items():
        for alias in branch.model_branch_alias:
            if alias in taken:
                owner = f"{taken[alias]} {alias!r}"
                problems.append(
                    f"has the alias {alias!r} of {name!r}, which is already a name of {owner}"
                )
            else:
                taken[alias] = f"{name!r} as"
    return "; ".join(problems) or None


@dataclasses.dataclass(frozen=True, kw_only=True)
class MultiTaskModelSettings(Section):
    """Several models that share parts, one for each branch.

    Every key of a branch may stand here as well, for all branches that leave it out.
    """

    shared_dict: Mapping[str, Any] | None = setting(
        None,
        doc=(
            "Type maps, descriptors and fitting nets by names, to which branches refer. Level 0, "
            "as in 'name' or "
            "'name:0', shares all weights and the descriptor's statistics, of a fitting net all "
            "but the energy bias "
            "and the row of dim_case_embd; 'name:1' shares the type embedding of a dpa1 or dpa3 "
            "descriptor alone."
        ),
    )
    model_dict: Mapping[str, BranchModelSettings] = section(
        doc="The model of each branch, by its name."
    )

    rules = (
        Rule(("model_dict",), _some_branch),
        Rule(("model_dict",), _one_protection),
        Rule(("model_dict",), _a_row_for_each_branch),
        Rule(("model_dict",), _names_once),
    )
