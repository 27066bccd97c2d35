"""Checkpoints of deepmd-kit 3.2: translation of names and settings, both ways.

Our parameters already carry deepmd-kit's names. A state dict of deepmd-kit adds the prefix
`model.Default.`, every network a second time under `_networks`, empty `compress_…` parameters,
`min_nbor_dist` and `_extra_state`, which holds the model section. With `use_srtab`, deepmd-kit sums
two models, the *network* and the *table*; here the table is `short_range`.

part
    A descriptor or fitting net; its `Translation` names the differences.
branch
    A model of a multi-task checkpoint, with the prefix `model.BRANCH.`; a single model is the branch
    "Default".
hosted model
    A module of deepmd-kit, which has its names and section without translation.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from deepmd_muon.checkpoint_file.errors import CheckpointError
from deepmd_muon.model.branch_settings import SINGLE
from deepmd_muon.model.branches import Branches, branches_of
from deepmd_muon.model.errors import BranchError, ForeignModelError, ModelError
from deepmd_muon.model.interface import EnergyModel
from deepmd_muon.model.registry import DESCRIPTORS, FITTING_NETS
from deepmd_muon.model.settings import (
    DEFAULT_ALPHA,
    HostedSettings,
    ModelSettings,
    changed,
    gives_energies,
    model_settings,
)
from deepmd_muon.section import thaw
from deepmd_muon.setting import annotations_of

log = logging.getLogger(__name__)

PREFIX = f"model.{SINGLE}."
OURS_ONLY = "only_deepmd_muon"  # key of `_extra_state`: why deepmd-kit cannot read the model
_DISTANCE = "min_nbor_dist"
UNKNOWN_DISTANCE = -1.0  # deepmd-kit's min_nbor_dist of a model that has seen no data

_REGISTRIES = {"descriptor": DESCRIPTORS, "fitting_net": FITTING_NETS}  # of the parts
_OWN_PREFIX = "atomic_model."
# With use_srtab:
_NETWORK = "atomic_model.models.0."
_TABLE = "atomic_model.models.1."
_OWN_TABLE = "short_range."
_NETWORK_OF_BRANCH = re.compile(rf"(^|\.){re.escape(_NETWORK)}")
_OUTPUT_STATISTICS = ("out_bias", "out_std")

# Keys that deepmd-kit's argument check adds to a model section; its builder reads some of them
# without a default.
_DEEPMD_KIT_KEYS: dict[str, Any] = {
    "data_bias_nsample": 10,
    "preset_out_bias": None,
    "srtab_add_bias": True,
    "model_branch_alias": [],
    "info": {},
    "bridging_method": "None",
    "bridging_r_inner": 0.5,
    "bridging_r_outer": 0.8,
}

# ----- the differences of one part ---------------------------------------------------------------


def own_parameters(part: torch.nn.Module) -> list[str]:
    """Return the names of a part's parameters in our order."""
    return [name for name, _ in part.named_parameters()]


@dataclasses.dataclass(frozen=True)
class Translation:
    """The differences between deepmd-kit's form of one kind of descriptor or fitting net and ours.

    Names are relative to the part: they lack the prefix up to `descriptor.` or `fitting_net.`.

    Attributes
    ----------
    section
        Converts deepmd-kit's normalised section to our keys and spellings.
    empty
        Names of the entries without elements that only deepmd-kit's state dict has, parameters or
        buffers.
    is_empty
        Whether a name of deepmd-kit's state dict is such an entry.
    parameters
        Names of all parameters in the order of deepmd-kit's `named_parameters`, empty ones
        included.
    ours_only
        Features that a part's settings request and deepmd-kit lacks, one phrase each; it cannot
        read such a model.
    check
        Raises `ForeignModelError` if weights of deepmd-kit do not fit our form of the part.
    """

    section: Callable[[Mapping[str, Any]], Mapping[str, Any]] = lambda section: section
    empty: Callable[[Any], list[str]] = lambda part: []
    is_empty: Callable[[str], bool] = lambda name: False
    parameters: Callable[[Any], list[str]] = own_parameters
    ours_only: Callable[[Any], Sequence[str]] = lambda settings: ()
    check: Callable[[Mapping[str, Tensor]], None] = lambda state: None


_SAME_FORM = Translation()  # for a part that deepmd-kit does not have, or stores as we do


def check_slots(state: Mapping[str, Tensor], part: str, *names: str) -> None:
    """Check that a descriptor has one mean and deviation for all neighbour slots of a centre type.

    Raises
    ------
    ForeignModelError
        If statistics differ between slots.
    """
    for name in names:
        values = state[f"{part}.{name}"]
        if not torch.equal(values, values[:, :1].expand_as(values)):
            raise ForeignModelError(
                f"the descriptor's {name} differs between neighbour slots of one centre type"
            )


def _translations(settings: ModelSettings) -> dict[str, Translation]:
    """Return the translation of each part, by the part's name in the state dict."""
    if isinstance(settings, HostedSettings):
        return {}
    return {
        part: registry.translation(getattr(settings, part)) or _SAME_FORM
        for part, registry in _REGISTRIES.items()
    }


def ours_only(settings: ModelSettings) -> list[str]:
    """Name the features of a model that deepmd-kit lacks; empty if it can read the model."""
    if isinstance(settings, HostedSettings):
        return []
    reasons = []
    for part, registry in _REGISTRIES.items():
        part_settings = getattr(settings, part)
        translation = registry.translation(part_settings)
        if translation is None:
            kind = registry.name_of(part_settings)
            reasons.append(f"{part}: deepmd-kit has no {registry.what} like {kind!r}")
        else:
            reasons += [f"{part}: {reason}" for reason in translation.ours_only(part_settings)]
    if settings.smin_alpha not in (None, DEFAULT_ALPHA):
        reasons.append(
            f"smin_alpha: deepmd-kit's PyTorch models take {DEFAULT_ALPHA} Å, "
            f"this one has {settings.smin_alpha}"
        )
    return reasons


# ----- names of tensors and parameters -----------------------------------------------------------


def _to_deepmd_kit_name(name: str, *, has_table: bool) -> str:
    """Return deepmd-kit's name of one of our tensors."""
    # The output statistics belong to the sum of network and table.
    if not has_table or name.removeprefix(_OWN_PREFIX) in _OUTPUT_STATISTICS:
        return name
    if name.startswith(_OWN_TABLE):
        return _TABLE + name.removeprefix(_OWN_TABLE)
    return _NETWORK + name.removeprefix(_OWN_PREFIX)


def _from_deepmd_kit_name(name: str, *, has_table: bool) -> str | None:
    """Return our name of one of deepmd-kit's tensors.

    None for the output statistics of network or table alone, which change nothing.
    """
    if not has_table:
        return name
    for prefix, own_prefix in ((_NETWORK, _OWN_PREFIX), (_TABLE, _OWN_TABLE)):
        if name.startswith(prefix):
            suffix = name.removeprefix(prefix)
            return None if suffix in _OUTPUT_STATISTICS else own_prefix + suffix
    return name


def own_parameter_name(name: str) -> str:
    """Return our name of a parameter in a file of deepmd-kit or ours.

    Names have their branch, but no prefix. Hosted models have the names of the file; see
    `naming_of`.
    """
    return _NETWORK_OF_BRANCH.sub(r"\1atomic_model.", name)


def naming_of(model: EnergyModel | Branches) -> Callable[[str], str]:
    """Return the function from names of parameters in files to those of a model's parameters."""
    hosted = any(
        isinstance(branch.settings, HostedSettings) for branch in branches_of(model).values()
    )
    return str if hosted else own_parameter_name


def deepmd_kit_parameter_names(model: EnergyModel | Branches) -> list[str]:
    """Return parameter names in the order of deepmd-kit's own `named_parameters`, without prefix.

    An optimizer state of deepmd-kit counts parameters by position; empty `compress_…` parameters
    take part. A parameter that several branches share counts once, under its name in the first
    branch.

    Raises
    ------
    CheckpointError
        If deepmd-kit has no such model.
    """
    if not isinstance(model, Branches):
        return [parameter.name for parameter in _deepmd_kit_parameters(model)]
    names = []
    earlier_branches: set[int] = set()  # ids of `shared_as`
    for branch_name, branch in model.items():
        parameters = _deepmd_kit_parameters(branch)
        names += [
            f"{branch_name}.{p.name}" for p in parameters if id(p.shared_as) not in earlier_branches
        ]
        # After the whole branch: the empty parameters of one part have the same `shared_as`.
        earlier_branches.update(id(p.shared_as) for p in parameters)
    return names


class _DeepmdKitParameter(NamedTuple):
    """A parameter of deepmd-kit.

    Attributes
    ----------
    name
        Its name without prefix.
    shared_as
        The object that branches have in common if they share it: our parameter, or the part of an
        empty one.
    """

    name: str
    shared_as: torch.nn.Module | Tensor


def _deepmd_kit_parameters(model: EnergyModel) -> list[_DeepmdKitParameter]:
    """Return deepmd-kit's parameters of one model in its order."""
    if isinstance(model.settings, HostedSettings):
        return [_DeepmdKitParameter(name, shared_as=p) for name, p in model.named_parameters()]
    reasons = ours_only(model.settings)
    if reasons:
        raise CheckpointError("deepmd-kit cannot read this model: " + "; ".join(reasons))
    prefix = _parts_prefix(model)
    parameters = []
    for part, translation in _translations(model.settings).items():
        module = getattr(model.atomic_model, part)
        by_name = dict(module.named_parameters())
        parameters += [
            _DeepmdKitParameter(f"{prefix}{part}.{name}", shared_as=by_name.get(name, module))
            for name in translation.parameters(module)
        ]
    return parameters


def _parts_prefix(model: EnergyModel) -> str:
    """Return the prefix of deepmd-kit's names of the tensors of parts."""
    return _OWN_PREFIX if model.short_range is None else _NETWORK


# ----- writing -----------------------------------------------------------------------------------


def to_deepmd_kit(
    model: EnergyModel | Branches,
    train_infos: Mapping[str, Any],
    *,
    min_nbor_dist: float | Mapping[str, float] = UNKNOWN_DISTANCE,
) -> dict[str, Any]:
    """Return the `"model"` entry of a checkpoint that deepmd-kit 3.2 tests, freezes and trains on.

    A model with parts that deepmd-kit does not have is stored in the same form under its own names.
    `OURS_ONLY` in `_extra_state` then says why.

    Parameters
    ----------
    model
        One model, or several branches; tensors are detached, not copied.
    train_infos
        `lr` and 0-based `step`.
    min_nbor_dist
        Smallest distance in the training data [Å], by branch if there are several; model
        compression reads it.
    """
    state: dict[str, Any] = {}
    sections: dict[str, dict[str, Any]] = {}
    reasons: list[str] = []
    for name, branch in branches_of(model).items():
        distance = min_nbor_dist
        if isinstance(distance, Mapping):
            distance = distance.get(name, UNKNOWN_DISTANCE)
        state.update(_branch_state(branch, f"model.{name}.", distance))
        is_hosted = isinstance(branch.settings, HostedSettings)
        # deepmd-kit has completed the section of its own module, but for these.
        added = {"model_branch_alias": [], "info": {}} if is_hosted else _DEEPMD_KIT_KEYS
        sections[name] = {**added, **thaw(branch.settings)}
        prefix = f"{name}: " if isinstance(model, Branches) else ""
        reasons += [prefix + reason for reason in ours_only(branch.settings)]
    if isinstance(model, Branches):
        for name, section in sections.items():
            section["model_branch_alias"] = list(model.aliases.get(name, ()))
        model_params = {"model_dict": sections, "shared_dict": {}}
    else:
        model_params = sections[SINGLE]
    state["_extra_state"] = {"model_params": model_params, "train_infos": dict(train_infos)}
    if reasons:
        state["_extra_state"][OURS_ONLY] = reasons
    return state


def _branch_state(model: EnergyModel, prefix: str, min_nbor_dist: float) -> dict[str, Tensor]:
    """Return the tensors of one branch under deepmd-kit's names."""
    tensors = {name: x.detach() for name, x in model.state_dict().items()}
    distance = torch.tensor(min_nbor_dist, dtype=torch.float64)
    if isinstance(model.settings, HostedSettings):
        # A model with virtual atoms keeps the distance in the model that it wraps.
        names = (name for name in tensors if name.endswith(f".{_DISTANCE}"))
        tensors[next(names, _DISTANCE)] = distance
        return {prefix + name: x for name, x in tensors.items()}
    state = {prefix + _DISTANCE: distance}
    has_table = model.short_range is not None
    for own_name, x in tensors.items():
        name = _to_deepmd_kit_name(own_name, has_table=has_table)
        state[prefix + name] = x
        statistic = own_name.removeprefix(_OWN_PREFIX)
        if has_table and statistic in _OUTPUT_STATISTICS:
            # Those of network and table must change nothing: bias 0, deviation 1.
            neutral = torch.zeros_like(x) if statistic == "out_bias" else torch.ones_like(x)
            for model_prefix in (_NETWORK, _TABLE):
                state[prefix + model_prefix + statistic] = neutral
        # deepmd-kit registers each network twice.
        if re.search(r"\.filter_layers(_strip)?\.networks\.", name):
            state[prefix + name.replace(".networks.", "._networks.")] = x
    for part, translation in _translations(model.settings).items():
        module = getattr(model.atomic_model, part)
        for name in translation.empty(module):
            dtype = next(module.parameters()).dtype
            state[f"{prefix}{_parts_prefix(model)}{part}.{name}"] = torch.zeros(0, dtype=dtype)
    return state


# ----- reading -----------------------------------------------------------------------------------


def from_deepmd_kit(
    state_dict: Mapping[str, Any], branch: str | None = None
) -> tuple[ModelSettings, dict[str, Tensor]]:
    """Read the `"model"` entry of a deepmd-kit checkpoint.

    Parameters
    ----------
    state_dict
        The entry.
    branch
        Name or alias of the branch to take from a multi-task checkpoint.

    Returns
    -------
    tuple
        The settings for `build_model`, and the state dict for `EnergyModel.load_state_dict`.

    Raises
    ------
    ForeignModelError
        If the model is of a kind that we do not have; the message names the reason.
    BranchError
        If there is no such branch, or there are several and none is named.
    """
    if "_extra_state" not in state_dict:
        raise ForeignModelError(
            "the state dict has no '_extra_state': "
            "it is not a checkpoint of deepmd-kit's PyTorch backend"
        )
    selected = _select_branch(state_dict, branch)
    settings = settings_of(selected.params)
    # Only this package writes models with another smin_alpha, and marks them.
    if OURS_ONLY not in state_dict["_extra_state"]:
        settings = _as_deepmd_kit_computes(settings)
    if isinstance(settings, HostedSettings):
        return settings, _hosted_weights(state_dict, selected.name)
    translations = _translations(settings)
    weights = _branch_weights(
        state_dict, selected.name, translations, has_table=settings.use_srtab is not None
    )
    for part, translation in translations.items():
        prefix = f"{_OWN_PREFIX}{part}."
        part_weights = {
            name.removeprefix(prefix): value
            for name, value in weights.items()
            if name.startswith(prefix)
        }
        translation.check(part_weights)
    return settings, weights


def _branch_weights(
    state_dict: Mapping[str, Any],
    branch: str,
    translations: Mapping[str, Translation],
    *,
    has_table: bool,
) -> dict[str, Tensor]:
    """Return the tensors of one branch under our names."""
    prefix = f"model.{branch}."
    other_branches = set(saved_branches(state_dict).values()) - {branch}
    skipped_prefixes = (f"{prefix}{_DISTANCE}", *(f"model.{name}." for name in other_branches))
    weights = {}
    for full_name, value in state_dict.items():
        if full_name == "_extra_state" or full_name.startswith(skipped_prefixes):
            continue
        if "._networks." in full_name:  # the same tensors as under `networks`
            continue
        if not full_name.startswith(prefix):
            raise ForeignModelError(
                f"the checkpoint holds {full_name!r}; names must begin with {prefix!r}"
            )
        _check_real_tensor(full_name, value)
        name = _from_deepmd_kit_name(full_name.removeprefix(prefix), has_table=has_table)
        if name is None:
            continue
        if _is_empty_entry(name, translations):
            if value.numel():
                raise ForeignModelError(
                    "the checkpoint holds a compressed model; give the one it was compressed from"
                )
            continue
        weights[name] = value
    return weights


def _hosted_weights(state_dict: Mapping[str, Any], branch: str) -> dict[str, Tensor]:
    """Return the tensors of one branch, which a hosted model has under the same names."""
    prefix = f"model.{branch}."
    weights = {}
    for full_name, value in state_dict.items():
        if full_name.startswith(prefix) and full_name != f"{prefix}{_DISTANCE}":
            _check_real_tensor(full_name, value)
            weights[full_name.removeprefix(prefix)] = value
    return weights


def _is_empty_entry(name: str, translations: Mapping[str, Translation]) -> bool:
    """Return whether a tensor exists in deepmd-kit's form alone, without elements."""
    for part, translation in translations.items():
        prefix = f"{_OWN_PREFIX}{part}."
        if name.startswith(prefix):
            return translation.is_empty(name.removeprefix(prefix))
    return False


def _check_real_tensor(name: str, value: Any) -> None:
    if not isinstance(value, Tensor):
        kind = type(value).__name__
    elif value.is_complex() or value.layout is not torch.strided:
        kind = f"{value.dtype} {value.layout}"
    else:
        return
    raise ForeignModelError(
        f"the checkpoint holds {kind} under {name!r}; expected a tensor of real numbers"
    )


def _as_deepmd_kit_computes(settings: ModelSettings) -> ModelSettings:
    """Return the settings with which deepmd-kit computes a model; it does not read `smin_alpha`."""
    if settings.smin_alpha in (None, DEFAULT_ALPHA):
        return settings
    log.warning(
        "the checkpoint says smin_alpha %g, but deepmd-kit, which wrote it, computes with %g: "
        "so does this package",
        settings.smin_alpha,
        DEFAULT_ALPHA,
    )
    return changed(settings, {"smin_alpha": DEFAULT_ALPHA})


# ----- branches of a checkpoint ------------------------------------------------------------------


class _SelectedBranch(NamedTuple):
    """A branch of a checkpoint: its name, and its model section in deepmd-kit's form."""

    name: str
    params: Mapping[str, Any]


def saved_branches(state_dict: Mapping[str, Any]) -> dict[str, str]:
    """Return the branch that each name and each alias of a multi-task checkpoint selects.

    Names are listed first. If an alias is also the name of another branch, it selects its own.
    Empty for a checkpoint of a single model.
    """
    branches = state_dict.get("_extra_state", {}).get("model_params", {}).get("model_dict", {})
    name_of = {name: name for name in branches}
    for name, section in branches.items():
        name_of.update(dict.fromkeys(section.get("model_branch_alias") or (), name))
    return name_of


def _select_branch(state_dict: Mapping[str, Any], wanted: str | None) -> _SelectedBranch:
    """Return the branch of this name or alias, or the only one."""
    params = state_dict["_extra_state"]["model_params"]
    name_of = saved_branches(state_dict)
    if not name_of:
        if wanted not in (None, SINGLE):
            raise BranchError(f"the checkpoint has no branch {wanted!r}: it holds a single model")
        return _SelectedBranch(SINGLE, params)
    names = ", ".join(params["model_dict"])
    if wanted is None:
        raise BranchError(
            f"the checkpoint holds several models: name one of its branches ({names}) by --head or "
            "--model-branch; dp freeze --head writes one alone"
        )
    if wanted not in name_of:
        raise BranchError(f"the checkpoint has no branch {wanted!r}; its branches are {names}")
    name = name_of[wanted]
    section = dict(params["model_dict"][name])
    for key in ("model_branch_alias", "finetune_head"):
        section.pop(key, None)
    return _SelectedBranch(name, section)


def branch_prefix(state_dict: Mapping[str, Any], branch: str | None = None) -> str:
    """Return the prefix of a branch's names; arguments and errors as in `from_deepmd_kit`."""
    return f"model.{_select_branch(state_dict, branch).name}."


def min_distance_of(state_dict: Mapping[str, Any], branch: str | None = None) -> float:
    """Return the smallest distance in a branch's training data [Å]; negative if unknown."""
    prefix = branch_prefix(state_dict, branch)
    for name, value in state_dict.items():
        if name.startswith(prefix) and name.endswith(_DISTANCE):
            return float(value)
    return UNKNOWN_DISTANCE


# ----- deepmd-kit's model section ----------------------------------------------------------------


def settings_of(params: Mapping[str, Any]) -> ModelSettings:
    """Return the settings that deepmd-kit's model section means.

    Checkpoints and frozen files hold the section of a single model.

    Raises
    ------
    ForeignModelError
        If the model is of a kind that we do not have.
    """
    problems = _unsupported_features(params)
    if problems and gives_energies(params) and importlib.util.find_spec("deepmd"):
        return HostedSettings.of(params)
    if problems:
        raise ForeignModelError(
            "the checkpoint's model cannot be built here: " + "; ".join(problems)
        )
    section = _keep_known_keys(ModelSettings, params)
    for part, registry in _REGISTRIES.items():
        part_params = params.get(part, {})
        kind = part_params.get("type", "ener")
        settings_class = registry.settings_class(kind)
        translation = registry.translation(settings_class) or _SAME_FORM
        part_section = _keep_known_keys(settings_class, translation.section(part_params))
        section[part] = {"type": kind, **part_section}
    try:
        return model_settings(section)
    except ModelError as error:
        raise ForeignModelError(f"the checkpoint's model cannot be built here: {error}") from error


def _unsupported_features(params: Mapping[str, Any]) -> list[str]:
    """Name the entries of deepmd-kit's model section that request features we lack."""
    problems = [f"{key} is {params[key]!r}" for key in ("lora", "hessian_mode") if params.get(key)]
    problems += _unsupported_keys(ModelSettings, params, path="")
    if params.get("type", "standard") != "standard":
        problems.append(f"the model's type is {params['type']!r}, not 'standard'")
    for part, registry in _REGISTRIES.items():
        section = params.get(part, {})
        kind = section.get("type", "ener" if part == "fitting_net" else None)
        if kind in registry.names():
            settings_class = registry.settings_class(kind)
            problems += _unsupported_keys(settings_class, section, path=f"{part}.")
        else:
            kinds = ", ".join(registry.names())
            problems.append(f"the {registry.what}'s type is {kind!r}; known are {kinds}")
    return problems


def _unsupported_keys(
    settings_class: type[Any], section: Mapping[str, Any], *, path: str
) -> list[str]:
    """Name the keys of a section that request features we lack, also in its sub-sections."""
    problems = []
    for key, foreign in settings_class.foreign.items():
        value = section.get(key)
        if value and not foreign.inert and not foreign.accepts(value):
            problems.append(f"{path}{key} is {value!r}")
    for key, subsection_class in _subsections(settings_class).items():
        problems += _unsupported_keys(subsection_class, section.get(key, {}), path=f"{path}{key}.")
    return problems


def _keep_known_keys(settings_class: type[Any], section: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries of a section that we know, also in its sub-sections."""
    subsections = _subsections(settings_class)
    names = {field.name for field in dataclasses.fields(settings_class)}
    entries = {}
    for key, value in section.items():
        if key in subsections:
            entries[key] = _keep_known_keys(subsections[key], value)
        elif key in names:
            entries[key] = value
    return entries


def _subsections(settings_class: type) -> dict[str, type[Any]]:
    """Return the settings class of each sub-section of a part."""
    return {
        name: kind
        for name, kind in annotations_of(settings_class).items()
        if isinstance(kind, type) and dataclasses.is_dataclass(kind)
    }
