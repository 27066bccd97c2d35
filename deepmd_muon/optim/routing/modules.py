"""Parameters that are no hidden matrices: tables, output layers, positions and tokens."""

from __future__ import annotations

import glob
import re
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn
from torch.nn.utils import parametrize

from deepmd_muon.optim.errors import InvalidShapeError
from deepmd_muon.optim.routing.routes import canonical_name, leaf_name
from deepmd_muon.optim.routing.views import effective_shape

# Of the weight that makes q, k and v in torch.nn.MultiheadAttention.
ATTENTION_SPLIT = "rows 3"

# Matches pos, pos_embed, position_ids, cls_token, register_tokens ..., but not `posterior`.
_ADDED = re.compile(r"pos(?:$|[_\d]|ition|e[nm][cb])|.*tokens?$")
# torch's modules that define no layers: `Module` itself, Sequential, ModuleList, ParameterList ...
_NOT_LAYERS = ("torch.nn.modules.module", "torch.nn.modules.container")

# Parameters from which pruning and the former spectral_norm and weight_norm compute a weight.
_ORIGINALS = ("weight_orig", "weight_v")
_COMPUTED_FROM = re.compile(
    r"(?:^|\.)(?:parametrizations\.\w+\.original\d*|" + "|".join(_ORIGINALS) + ")$"
)


def tables_and_heads(model: nn.Module) -> dict[str, str]:
    """Return the parameters that Muon should not orthogonalize, with the reason, by name.

    - Tables: the weight of nn.Embedding, nn.EmbeddingBag, and of every module that has
      `num_embeddings`. A gradient reaches few of their rows. Orthogonalization can move each row
      that has momentum equally far, even if its last gradient is long past; only rows without
      momentum stay. A tied output layer is the same parameter.
    - The output layer: the model's last nn.Linear, if its weight has the shape of a table.
    - Parameters added to activations: held directly by a module that is not one of torch's own
      layers, and either of shape (1, n, ...), which broadcasts over a batch, or named like a
      position or token (`pos...`, `...token`).

    The model may be wrapped by FSDP, DDP or torch.compile. Parameters with fewer than two
    dimensions above 1 are not listed.
    """
    reasons: dict[Tensor, str] = {}
    shapes = set()
    last: nn.Linear | None = None
    for module in model.modules():
        if hasattr(module, "num_embeddings"):
            for weight in weights_of(module):
                reasons[weight] = f"table of {type(module).__name__}"
                shapes.add(weight.shape)
        if isinstance(module, nn.Linear):
            last = module
        reasons.update(
            (p, f"added to activations by {type(module).__name__}") for p in _added(module)
        )
    for weight in () if last is None else weights_of(last):
        if weight.shape in shapes:
            reasons.setdefault(weight, "output layer: the last Linear, with the shape of a table")
    return {
        canonical_name(name): reasons[p]
        for name, p in model.named_parameters()
        if p in reasons and len(effective_shape(tuple(p.shape))) > 1
    }


def weights_of(module: nn.Module) -> list[Tensor]:
    """Return the weight of a module, or the parameters of its shape that it is computed from.

    torch computes it with parametrizations, weight_norm, spectral_norm and pruning. The computed
    weight is not read: that would advance the power iteration of spectral_norm. Vectors, such as
    the norms of weight_norm, are left out.
    """
    originals = [module._parameters.get(name) for name in _ORIGINALS]
    computed = [p for p in originals if p is not None]
    if parametrize.is_parametrized(module, "weight"):
        parametrizations: Any = module.parametrizations
        computed += parametrizations["weight"].parameters(recurse=False)
    if computed:
        return [p for p in computed if len(effective_shape(tuple(p.shape))) > 1]
    weight = getattr(module, "weight", None)
    return [weight] if isinstance(weight, Tensor) else []


def is_computed_from(name: str) -> bool:
    """Return whether torch computes a weight from the parameter of this name (`weights_of`)."""
    return _COMPUTED_FROM.search(name) is not None


def _added(module: nn.Module) -> Iterator[Tensor]:
    """Yield the parameters that a module holds directly and probably adds to activations."""
    homes = {
        base.__module__
        for base in type(module).__mro__
        if base.__module__.startswith("torch.nn.modules.")
    }
    if homes.difference(_NOT_LAYERS):
        return
    for name, p in module.named_parameters(recurse=False):
        if (p.ndim > 2 and p.shape[0] == 1) or _ADDED.match(leaf_name(name)):
            yield p


def convolutions(model: nn.Module) -> dict[str, int]:
    """Return the weights of convolution modules and their numbers of groups, by name."""
    groups: dict[Tensor, int] = {}
    for module in model.modules():
        if isinstance(module, nn.modules.conv._ConvNd):
            groups.update((weight, module.groups) for weight in weights_of(module))
    return {canonical_name(name): groups[p] for name, p in model.named_parameters() if p in groups}


def declared_splits(model: nn.Module) -> list[str]:
    """Return the splits that modules declare, as entries of the setting `splits`.

    A module declares them in its attribute ``muon_splits``: a mapping from the names of its own
    parameters to the part of an entry that follows the pattern, such as ``{"weight": "rows
    (128+64)*16"}``.

    Raises
    ------
    InvalidShapeError
        When a module declares a split of a parameter that it does not have.
    """
    splits: dict[Tensor, str] = {}
    for place, module in model.named_modules():
        for name, split in getattr(module, "muon_splits", {}).items():
            p = getattr(module, name, None)
            if not isinstance(p, nn.Parameter):
                raise InvalidShapeError(
                    f"{place or type(module).__name__}: muon_splits names {name!r}, no parameter "
                    "of it"
                )
            splits[p] = split
    return _entries(model, splits)


def attention_splits(model: nn.Module) -> list[str]:
    """Return entries that split weights of nn.MultiheadAttention into queries, keys and values."""
    modules = (module for module in model.modules() if isinstance(module, nn.MultiheadAttention))
    # There is no such parameter where kdim or vdim differ, and where a parametrization computes it.
    weights: Iterator[Tensor | None] = (
        module._parameters.get("in_proj_weight") for module in modules
    )
    return _entries(model, {p: ATTENTION_SPLIT for p in weights if p is not None})


def _entries(model: nn.Module, splits: Mapping[Tensor, str]) -> list[str]:
    names: dict[Tensor, str] = {p: canonical_name(name) for name, p in model.named_parameters()}
    return [f"{glob.escape(names[p])}: {split}" for p, split in splits.items()]
