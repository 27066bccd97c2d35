"""Several energy models that share parts: a shared part is one module, and its parameters are in every branch."""

from __future__ import annotations

import glob
from collections.abc import Callable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch

from deepmd_muon.model.branch_settings import ENTIRE, SINGLE, Shared
from deepmd_muon.model.energy_model import EnergyModel, build_model
from deepmd_muon.model.errors import ModelError
from deepmd_muon.model.settings import ModelSettings


class Branches(torch.nn.Module):
    """Energy models by the names of their branches.

    `named_parameters` lists a shared parameter once, under the first branch that has it; `state_dict` lists it under
    all.

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
        self._modules.update(
            models
        )  # any name: torch's own containers refuse those of their methods

    def forward(self, call: Callable[..., Any], *given: Any, **options: Any) -> Any:
        """Call one of the models, within what has been hooked to this module."""
        return call(*given, **options)

    def items(self) -> Iterator[tuple[str, EnergyModel]]:
        """Yield the names of the branches and their models."""
        yield from self._modules.items()  # type: ignore[misc]  # of this class only


def branches_of(model: EnergyModel | Branches) -> dict[str, EnergyModel]:
    """Return the models of all branches by name; a single model is the branch "Default"."""
    return dict(model.items()) if isinstance(model, Branches) else {SINGLE: model}


def all_names(model: EnergyModel | Branches) -> dict[torch.Tensor, list[str]]:
    """Return every parameter with all names that it has, those of earlier branches first."""
    names: dict[torch.Tensor, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    return names


def for_any_name(patterns: Sequence[str], model: Branches) -> tuple[str, ...]:
    """Return patterns that match the first name of a shared parameter where the given ones match any of its names."""
    found: dict[str, None] = {}
    for pattern in patterns:
        matched = [
            names
            for names in all_names(model).values()
            if any(fnmatchcase(name, pattern) for name in names)
        ]
        others = [glob.escape(names[0]) for names in matched if not fnmatchcase(names[0], pattern)]
        kept = [pattern] if len(others) < len(matched) or not matched else []
        found.update(dict.fromkeys([*kept, *others]))
    return tuple(found)


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
        When a model cannot be built, or a fitting net cannot be shared because descriptors differ in length.
    """
    built = {name: build_model(settings) for name, settings in models.items()}
    if list(built) == [SINGLE]:
        return built[SINGLE]
    entries: dict[
        tuple[str, str], list[tuple[str, int]]
    ] = {}  # of shared_dict, with the branches that have them
    for name, parts in references.items():
        for part, shared in parts.items():
            if part != "type_map":
                entries.setdefault((part, shared.key), []).append((name, shared.level))
    for (part, _), links in entries.items():
        (base, _), *others = sorted(
            links, key=lambda link: link[1]
        )  # the first of those that share most
        for name, level in others:
            _share(built, part, name, base, level)
    rows = sorted(built)  # deepmd-kit's order
    for name, model in built.items():
        case = getattr(model.atomic_model.fitting_net, "case_embd", None)
        if case is not None:
            case[rows.index(name)] = 1.0
    return Branches(built, aliases)


def _share(built: Mapping[str, EnergyModel], part: str, name: str, base: str, level: int) -> None:
    """Let a branch take a part of another one: all of it, or a descriptor's type embedding.

    Of a fitting net it takes the weights; buffers, such as the energy bias, stay its own.
    """
    own, other = built[name].atomic_model, built[base].atomic_model
    if part == "descriptor" and level == ENTIRE:
        own.descriptor = other.descriptor
    elif part == "descriptor":
        own.descriptor.type_embedding = other.descriptor.type_embedding
    else:
        nets = own.fitting_net, other.fitting_net
        shapes = [{name: p.shape for name, p in net.named_parameters()} for net in nets]
        if shapes[0] != shapes[1]:
            raise ModelError(
                f"model/model_dict/{name}/{part} cannot be that of {base!r}: their weights differ in shape, because "
                "their descriptors differ in length"
            )
        nets[0]._modules.update(nets[1]._modules)
        nets[0]._parameters.update(nets[1]._parameters)
