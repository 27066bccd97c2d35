"""What the modules of a model say about its parameters: tables, output layers, stacks, gates."""

from __future__ import annotations

import glob
import itertools
import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from deepmd_muon.optim.errors import InvalidShapeError
from deepmd_muon.optim.routing.routes import Route, canonical_name, leaf_name
from deepmd_muon.optim.routing.views import Shape, effective_shape

# Of the weight that makes q, k and v in torch.nn.MultiheadAttention.
ATTENTION_SPLIT = "rows 3"
# Of the weights that make the gates of recurrent cells, which torch stores gate by gate.
_GATE_SPLITS = {"LSTM": "rows 4", "GRU": "rows 3", "LSTMCell": "rows 4", "GRUCell": "rows 3"}
_GATE_WEIGHT = re.compile(r"weight_[ih]h(?:_l\d+(?:_reverse)?)?$")

# Matches pos, pos_embed, position_ids, cls_token, register_tokens ..., but not `posterior`.
_ADDED = re.compile(r"pos(?:$|[_\d]|ition|e[nm][cb])|.*tokens?$")
# Matches embed, tok_embeddings, wte, codebook ..., but not `embedder` or `embed_proj`.
_TABLE = re.compile(r"(?:.*_)?(?:embed(?:ding)?s?|emb|wte|wpe|codebook|table)$")
# A state-space model's matrix of decay rates: the logarithms of numbers, not a linear map.
_RATES = "a_log"
# torch's modules that define no layers: `Module` itself, Sequential, ModuleList, ParameterList ...
_NOT_LAYERS = ("torch.nn.modules.module", "torch.nn.modules.container")
_DIGITS = re.compile(r"\d+")
# Attributes of modules with the width of their input.
_INPUT_WIDTHS = (
    "in_features",
    "in_channels",
    "input_size",
    "embed_dim",
    "num_features",
    "num_channels",
)

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
      momentum stay. A tied output layer is the same parameter. So is the matrix of a module that
      is not one of torch's own layers, if the last segment of its name says so (`tok_emb`,
      `embed.weight`).
    - Output layers (`_output_layers`).
    - Parameters added to activations: held directly by a module that is not one of torch's own
      layers, and either of shape (1, n, ...), which broadcasts over a batch, or named like a
      position or token (`pos...`, `...token`).
    - Kernels that read the model's input (`_input_kernels`).

    The model may be wrapped by FSDP, DDP or torch.compile. Parameters with fewer than two
    dimensions above 1 are not listed.
    """
    reasons = dict.fromkeys(_input_kernels(model), "reads the input of the model")
    shapes = set()
    for path, module in model.named_modules():
        if hasattr(module, "num_embeddings"):
            for weight in weights_of(module):
                reasons[weight] = f"table of {type(module).__name__}"
                shapes.add(weight.shape)
        for p, reason in _own_parameters(path, module):
            reasons.setdefault(p, reason)
    for weight, reason in _output_layers(model, shapes):
        reasons.setdefault(weight, reason)
    return _matrices_among(model, reasons)


def _output_layers(
    model: nn.Module, table_shapes: Collection[torch.Size]
) -> Iterator[tuple[Tensor, str]]:
    """Yield the weights of Linears that make a model's outputs; names do not count.

    No layer takes the output of a model, so no layer has an input of its width. That also holds for
    some hidden Linears, such as fused queries, keys and values. Therefore only these count, if no
    layer takes their width, and not the only matrix of a model:

    - the last layer, if it is no fused Linear of a repeated block (`_is_in_repeated_block`);
    - Linears of its shape or in the same module, if no other parameter has their width;
    - if the last layer is no output, Linears that the model itself holds and registers before all
      other layers, if no other parameter has their width. Those that make a multiple of their input
      are none, because fused Linears do;
    - Linears with the shape of a table. The last one counts even if a layer takes its width.
    """
    layers = {
        canonical_name(path): module
        for path, module in model.named_modules()
        if isinstance(module, (nn.Linear, nn.modules.conv._ConvNd))
    }
    linears = {path: layer for path, layer in layers.items() if isinstance(layer, nn.Linear)}
    n_matrices = sum(len(effective_shape(tuple(p.shape))) > 1 for p in model.parameters())
    if not linears or n_matrices == 1:
        return
    consumed = _input_widths(model)
    last_path, last = list(linears.items())[-1]
    ends_with_output = (
        list(layers)[-1] == last_path
        and last.out_features not in consumed
        and not _is_in_repeated_block(last_path, linears)
    )
    if ends_with_output:
        reason = "output layer: no layer takes the output of the last Linear"
        outputs = {
            path: linear
            for path, linear in linears.items()
            if path.rpartition(".")[0] == last_path.rpartition(".")[0]
            or _shape_of(linear) == _shape_of(last)
        }
    else:
        reason = "output layer: no layer takes the output of a Linear before the body"
        outputs = {
            path: linears[path]
            for path in itertools.takewhile(lambda path: "." not in path, layers)
            if path in linears and linears[path].out_features % max(1, linears[path].in_features)
        }
    of_outputs = {p for linear in outputs.values() for p in linear.parameters()}
    # The sizes of kernels are no widths.
    of_others = {width for p in model.parameters() if p not in of_outputs for width in p.shape[:2]}
    for path, linear in linears.items():
        is_taken = linear.out_features in consumed
        is_last_output = ends_with_output and linear is last
        is_output = path in outputs and (is_last_output or linear.out_features not in of_others)
        for weight in weights_of(linear):
            if weight.shape in table_shapes and (linear is last or not is_taken):
                yield weight, "output layer: a Linear with the shape of a table"
            elif is_output and not is_taken:
                yield weight, reason


def _is_in_repeated_block(path: str, linears: Mapping[str, nn.Linear]) -> bool:
    """Return whether a Linear that does not narrow has its like in another block of a model.

    Blocks differ in numbers of their paths. Outputs of several heads, which blocks may hold, too,
    narrow.
    """
    linear = linears[path]
    likes = [
        other
        for other, candidate in linears.items()
        if _DIGITS.sub("", other) == _DIGITS.sub("", path)
        and _shape_of(candidate) == _shape_of(linear)
        and other.rpartition(".")[0] != path.rpartition(".")[0]
    ]
    return bool(likes) and linear.out_features >= linear.in_features


def _shape_of(linear: nn.Linear) -> tuple[int, int]:
    return linear.out_features, linear.in_features


def _matrices_among(model: nn.Module, reasons: Mapping[Tensor, str]) -> dict[str, str]:
    """Return reasons by name, of parameters with two dimensions above 1."""
    return {
        canonical_name(name): reasons[p]
        for name, p in model.named_parameters()
        if p in reasons and len(effective_shape(tuple(p.shape))) > 1
    }


def rates_and_undecayed(model: nn.Module) -> dict[str, str]:
    """Return matrices that take Adam without decay, with the reason, by name.

    State-space models keep logarithms of decay rates in a matrix `A_log`, and mark such parameters
    with the attribute `_no_weight_decay`.
    """
    reasons: dict[Tensor, str] = {}
    for name, p in model.named_parameters():
        if leaf_name(name) == _RATES:
            reasons[p] = "rates of a state-space model"
        elif getattr(p, "_no_weight_decay", False):
            reasons[p] = "marked _no_weight_decay"
    return _matrices_among(model, reasons)


def stacked_matrices(model: nn.Module) -> dict[str, str]:
    """Return the parameters (b, m, n) with m, n > 1, which hold b matrices, with that, by name.

    So transformers and torchtitan store experts. Kernels of convolutions are none.
    """
    kernels = convolutions(model)
    stacks = {}
    for given_name, p in model.named_parameters():
        name = canonical_name(given_name)
        shape = tuple(p.shape)
        is_stack = len(effective_shape(shape)) == 3 and len(effective_shape(shape[1:])) == 2
        if is_stack and name not in kernels:
            stacks[name] = f"{shape[0]} matrices"
    return stacks


def shapes_of_tables(model: nn.Module) -> set[Shape]:
    """Return the shapes of tables, found by module or by name; positions and tokens are none."""
    reasons = tables_and_heads(model)
    names = {name for name, reason in reasons.items() if reason.startswith("table of ")}
    return {tuple(p.shape) for name, p in model.named_parameters() if canonical_name(name) in names}


def _input_kernels(model: nn.Module) -> Iterator[Tensor]:
    """Yield the kernels that read the input of a model, such as those that cut images into patches.

    They make more channels than they take, and take fewer than every layer registered before makes.
    Kernels of bottlenecks, dense blocks and skip connections take no fewer.
    """
    widths_before: set[int] = set()
    for module in model.modules():
        if isinstance(module, nn.modules.conv._ConvNd):
            is_narrowest = module.in_channels < min((module.out_channels, *widths_before))
            if module.groups == 1 and is_narrowest:
                yield from weights_of(module)
        widths = (getattr(module, name, None) for name in ("out_features", "out_channels"))
        widths_before.update(width for width in widths if isinstance(width, int))


def declared_routes(model: nn.Module) -> dict[str, Route]:
    """Return the routes that modules and parameters declare, by name.

    A module declares them in its attribute ``muon_routes``, a mapping from the names of its own
    parameters to "muon", "adam" or "adamw". A parameter may have the attribute ``use_muon``, or
    Megatron's ``is_embedding_or_output_parameter``.

    Raises
    ------
    InvalidShapeError
        When a module declares the route of a parameter that it does not have, or another route.
    """
    routes: dict[Tensor, Route] = {}
    for p in model.parameters():
        marker = getattr(p, "use_muon", None)
        if marker is not None:
            routes[p] = "muon" if marker else "adamw"
        elif getattr(p, "is_embedding_or_output_parameter", False):
            routes[p] = "adamw"
    for p, route, place in _declarations(model, "muon_routes"):
        if route not in ("muon", "adam", "adamw"):
            raise InvalidShapeError(
                f"{place}: muon_routes must say 'muon', 'adam' or 'adamw'; found {route!r}"
            )
        routes[p] = route
    return {canonical_name(name): routes[p] for name, p in model.named_parameters() if p in routes}


def _declarations(model: nn.Module, attribute: str) -> Iterator[tuple[nn.Parameter, Any, str]]:
    """Yield parameters, what their modules declare of them, and the modules' places.

    Raises InvalidShapeError for a name that is no parameter of the module.
    """
    for path, module in model.named_modules():
        place = path or type(module).__name__
        for name, declared in getattr(module, attribute, {}).items():
            p = getattr(module, name, None)
            if not isinstance(p, nn.Parameter):
                raise InvalidShapeError(f"{place}: {attribute} names {name!r}, no parameter of it")
            yield p, declared, place


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


def _own_parameters(path: str, module: nn.Module) -> Iterator[tuple[Tensor, str]]:
    """Yield parameters that a module holds directly: tables, or added to activations.

    torch's layers, and layers like them, hold none.
    """
    homes = {
        base.__module__
        for base in type(module).__mro__
        if base.__module__.startswith("torch.nn.modules.")
    }
    if homes.difference(_NOT_LAYERS):
        return
    kind = type(module).__name__
    is_linear = hasattr(module, "in_features") or hasattr(module, "in_channels")
    for name, p in module.named_parameters(recurse=False):
        leaf = leaf_name(name)
        if (p.ndim > 2 and p.shape[0] == 1) or _ADDED.match(leaf):
            yield p, f"added to activations by {kind}"
        elif not is_linear and _TABLE.match(leaf_name(path) if leaf == "weight" else leaf):
            yield p, f"table of {kind} by its name"


def _input_widths(model: nn.Module) -> set[int]:
    """Return the widths of the inputs that layers take."""
    widths: list[Any] = []
    for module in model.modules():
        widths += [getattr(module, name, None) for name in _INPUT_WIDTHS]
        widths += (getattr(module, "normalized_shape", None) or ())[-1:]
    # Modules of other packages keep lists of widths under such names.
    return {width for width in widths if isinstance(width, int)}


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
    splits: dict[Tensor, str] = {p: split for p, split, _ in _declarations(model, "muon_splits")}
    return _entries(model, splits)


def fused_splits(model: nn.Module) -> list[str]:
    """Return entries that split the weights that torch's layers fuse.

    They are queries, keys and values of nn.MultiheadAttention, and gates of LSTM and GRU.
    """
    splits: dict[Tensor, str] = {}
    for module in model.modules():
        if isinstance(module, nn.MultiheadAttention):
            # None if kdim or vdim differ, or if a parametrization computes it.
            weight = module._parameters.get("in_proj_weight")
            if weight is not None:
                splits[weight] = ATTENTION_SPLIT
        elif isinstance(module, (nn.RNNBase, nn.RNNCellBase)) and module.hidden_size > 1:
            kind = getattr(module, "mode", type(module).__name__)
            if kind in _GATE_SPLITS:
                for name, p in module.named_parameters(recurse=False):
                    if _GATE_WEIGHT.match(name):
                        splits[p] = _GATE_SPLITS[kind]
    return _entries(model, splits)


def _entries(model: nn.Module, splits: Mapping[Tensor, str]) -> list[str]:
    names: dict[Tensor, str] = {p: canonical_name(name) for name, p in model.named_parameters()}
    return [f"{glob.escape(names[p])}: {split}" for p, split in splits.items()]
