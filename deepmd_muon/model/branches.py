"""Several energy models that share parts: a shared part is one module of all its branches."""

from __future__ import annotations

import glob
from collections.abc import Callable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

import torch
from torch import Tensor

from deepmd_muon.model.branch_settings import ENTIRE, SINGLE, Shared
from deepmd_muon.model.energy_model import build_model
from deepmd_muon.model.errors import ModelError
from deepmd_muon.model.interface import EnergyModel
from deepmd_muon.model.settings import ModelSettings


class Branches(torch.nn.Module):
    """Energy models by the names of their branches.

    `named_parameters` lists a shared parameter once, under its first branch; `state_dict` lists it
    under all.

    Parameters
    ----------
    models
        The models.
    aliases
        Further names of branches.
    """

    def __init__(
        self, models: Mapping[str, EnergyModel], aliases: Mapping[str, Sequence[str]] | None = None
    ) -> None:
        super().__init__()
        self.aliases = dict(aliases or {})
        # Under any name: `add_module` refuses names of this class's own methods.
        self._modules.update(models)

    def forward(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call one of the models with the hooks of this module."""
        return call(*args, **kwargs)

    def items(self) -> Iterator[tuple[str, EnergyModel]]:
        """Yield the names of the branches and their models."""
        yield from self._modules.items()  # type: ignore[misc]  # of this class only


def branches_of(model: EnergyModel | Branches) -> dict[str, EnergyModel]:
    """Return the models of all branches by name; a single model is the branch "Default"."""
    return dict(model.items()) if isinstance(model, Branches) else {SINGLE: model}


def all_names(model: EnergyModel | Branches) -> dict[Tensor, list[str]]:
    """Return every parameter with all names that it has, those of earlier branches first."""
    names: dict[Tensor, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    return names


def for_any_name(patterns: Sequence[str], model: Branches) -> tuple[str, ...]:
    """Return `patterns`, and first names of parameters that they match only by a later name."""
    result: dict[str, None] = {}  # a set in order
    names_of_parameters = all_names(model).values()
    for pattern in patterns:
        first_names = [
            names[0]
            for names in names_of_parameters
            if any(fnmatchcase(name, pattern) for name in names)
        ]
        unmatched = [name for name in first_names if not fnmatchcase(name, pattern)]
        # A pattern that matches nothing is kept, so that the optimizer reports it.
        if len(unmatched) < len(first_names) or not first_names:
            result[pattern] = None
        result.update(dict.fromkeys(glob.escape(name) for name in unmatched))
    return tuple(result)


def build_branches(
    models: Mapping[str, ModelSettings],
    references: Mapping[str, Mapping[str, Shared]],
    aliases: Mapping[str, Sequence[str]] | None = None,
) -> EnergyModel | Branches:
    """Build the models of all branches and let them share parts.

    Parameters
    ----------
    models
        The settings of each; the one model of a run that is not multi-task is called "Default".
    references
        By branch and part, which entry of model/shared_dict it is.
    aliases
        Further names of branches.

    Returns
    -------
    EnergyModel or Branches
        A single model as such.

    Raises
    ------
    ModelError
        When a model cannot be built, or a fitting net cannot be shared because descriptors differ
        in length.
    """
    built = {name: build_model(settings) for name, settings in models.items()}
    if list(built) == [SINGLE]:
        return built[SINGLE]
    links: dict[tuple[str, str], list[_Link]] = {}  # by part and entry of shared_dict
    for name, parts in references.items():
        for part, shared in parts.items():
            if part != "type_map":
                links.setdefault((part, shared.key), []).append(_Link(name, shared.level))
    for (part, _), part_links in links.items():
        # The base is the first of the branches that share most.
        base, *followers = sorted(part_links, key=lambda link: link.level)
        for link in followers:
            _share(built, part, link, base.branch)
    rows = sorted(built)  # deepmd-kit's order
    for name, model in built.items():
        case = getattr(model.atomic_model.fitting_net, "case_embd", None)
        if case is not None:
            case[rows.index(name)] = 1.0
    return Branches(built, aliases)


class _Link(NamedTuple):
    """A branch that shares an entry of shared_dict, and the level at which it does."""

    branch: str
    level: int


def _share(built: Mapping[str, EnergyModel], part: str, link: _Link, base: str) -> None:
    """Let a branch take a part of the branch `base`: all of it, or a descriptor's type embedding.

    Of a fitting net it takes the weights; its buffers, such as the energy bias, stay.
    """
    model = built[link.branch].atomic_model
    base_model = built[base].atomic_model
    if part == "descriptor" and link.level == ENTIRE:
        model.descriptor = base_model.descriptor
    elif part == "descriptor":
        model.descriptor.type_embedding = base_model.descriptor.type_embedding
    else:
        net = model.fitting_net
        base_net = base_model.fitting_net
        if _parameter_shapes(net) != _parameter_shapes(base_net):
            raise ModelError(
                f"model/model_dict/{link.branch}/{part} cannot be that of {base!r}: "
                "their weights differ in shape, because their descriptors differ in length"
            )
        net._modules.update(base_net._modules)
        net._parameters.update(base_net._parameters)


def _parameter_shapes(module: torch.nn.Module) -> dict[str, torch.Size]:
    return {name: p.shape for name, p in module.named_parameters()}
