"""Checkpoints of deepmd-kit 3.2: translation of names, both ways.

Our parameters already carry deepmd-kit's names; a deepmd-kit state dict adds the prefix `model.Default.`, every
network a second time under `_networks`, empty `compress_…` parameters, `min_nbor_dist` and `_extra_state`.
"""

from __future__ import annotations

import dataclasses
import logging
import re
from collections.abc import Mapping
from typing import Any

import torch

from deepmd_muon.checkpoint_file.errors import CheckpointError
from deepmd_muon.model.branch_settings import SINGLE
from deepmd_muon.model.branches import Branches, branches_of
from deepmd_muon.model.energy_model import EnergyModel
from deepmd_muon.model.errors import BranchError, ForeignModelError, ModelError
from deepmd_muon.model.registry import DESCRIPTORS, FITTING_NETS
from deepmd_muon.model.settings import DEFAULT_ALPHA, ModelSettings, changed, model_settings
from deepmd_muon.model.translation import PLAIN, Translation
from deepmd_muon.section import thaw
from deepmd_muon.setting import annotations_of

log = logging.getLogger(__name__)

PREFIX = f"model.{SINGLE}."
OURS_ONLY = "only_deepmd_muon"  # key of `_extra_state`: why deepmd-kit cannot read the model
UNKNOWN_DISTANCE = -1.0  # deepmd-kit's min_nbor_dist of a model that never saw its data's
_NETWORK, _TABLE = "atomic_model.models.0.", "atomic_model.models.1."  # of a model with use_srtab
_NETWORK_OF_BRANCH = re.compile(rf"(^|\.){re.escape(_NETWORK)}")
_PARTS = {"descriptor": DESCRIPTORS, "fitting_net": FITTING_NETS}

# Keys that deepmd-kit's argument check adds to a model section; its builder reads some of them without a default.
_ONLY_THEIRS: dict[str, Any] = {
    "data_bias_nsample": 10,
    "preset_out_bias": None,
    "srtab_add_bias": True,
    "model_branch_alias": [],
    "info": {},
    "bridging_method": "None",
    "bridging_r_inner": 0.5,
    "bridging_r_outer": 0.8,
}


def _translations(settings: ModelSettings) -> dict[str, Translation]:
    """Return the translation of each part, by the part's name in the state dict."""
    return {
        part: table.translation(getattr(settings, part)) or PLAIN for part, table in _PARTS.items()
    }


def ours_only(settings: ModelSettings) -> list[str]:
    """Name the parts of a model that deepmd-kit lacks; empty if it can read the model."""
    found = []
    for part, table in _PARTS.items():
        own = getattr(settings, part)
        translation = table.translation(own)
        if translation is None:
            found.append(f"{part}: deepmd-kit has no {table.what} like {table.name_of(own)!r}")
        else:
            found += [f"{part}: {reason}" for reason in translation.ours_only(own)]
    if settings.smin_alpha not in (None, DEFAULT_ALPHA):
        found.append(
            f"smin_alpha: deepmd-kit's PyTorch models take {DEFAULT_ALPHA} Å, this one has {settings.smin_alpha}"
        )
    return found


def _theirs(name: str, *, table: bool) -> str:
    """Return deepmd-kit's name of a tensor; a model with a table is its sum of two."""
    if not table or name in ("atomic_model.out_bias", "atomic_model.out_std"):
        return name
    if name.startswith("short_range."):
        return _TABLE + name.removeprefix("short_range.")
    return _NETWORK + name.removeprefix("atomic_model.")


def _ours(name: str, *, table: bool) -> str | None:
    """Return our name of deepmd-kit's tensor, None for one that says nothing: a bias of one of two models."""
    if not table or not name.startswith((_NETWORK, _TABLE)):
        return name
    if name.endswith((".0.out_bias", ".0.out_std", ".1.out_bias", ".1.out_std")):
        return None
    if name.startswith(_TABLE):
        return "short_range." + name.removeprefix(_TABLE)
    return "atomic_model." + name.removeprefix(_NETWORK)


def own_parameter_name(name: str) -> str:
    """Return our name of a parameter that a file names, deepmd-kit's or ours, with its branch but without prefix."""
    return _NETWORK_OF_BRANCH.sub(r"\1atomic_model.", name)


def deepmd_kit_parameter_names(model: EnergyModel | Branches) -> list[str]:
    """Return parameter names in the order of deepmd-kit's own `named_parameters`, without prefix.

    An optimizer state of deepmd-kit counts parameters by position; empty `compress_…` parameters take part. One that
    several branches share counts once, under the name that it has in the first.

    Raises
    ------
    CheckpointError
        When deepmd-kit has no such model.
    """
    if not isinstance(model, Branches):
        return [name for name, _ in _parameters(model)]
    names, seen = [], set()
    for branch, one in model.items():
        for name, what in _parameters(one):
            if id(what) not in seen:
                names.append(f"{branch}.{name}")
        seen |= {id(what) for _, what in _parameters(one)}
    return names


def _parameters(model: EnergyModel) -> list[tuple[str, torch.nn.Module | torch.Tensor]]:
    """Return deepmd-kit's parameters of one model in its order: our own by name, of empty ones the part with them."""
    reasons = ours_only(model.settings)
    if reasons:
        raise CheckpointError("deepmd-kit cannot read this model: " + "; ".join(reasons))
    found: list[tuple[str, torch.nn.Module | torch.Tensor]] = []
    for part, translation in _translations(model.settings).items():
        module = getattr(model.atomic_model, part)
        own = dict(module.named_parameters())
        place = _NETWORK if model.short_range is not None else "atomic_model."
        found += [
            (f"{place}{part}.{name}", own.get(name, module))
            for name in translation.parameters(module)
        ]
    return found


def to_deepmd_kit(
    model: EnergyModel | Branches,
    train_infos: Mapping[str, Any],
    *,
    min_nbor_dist: float | Mapping[str, float] = UNKNOWN_DISTANCE,
) -> dict[str, Any]:
    """Return the `"model"` entry of a checkpoint that deepmd-kit 3.2 tests, freezes and trains on.

    A model with parts that deepmd-kit does not have is stored in the same form under its own names, and says so under
    `OURS_ONLY` in `_extra_state`.

    Parameters
    ----------
    model
        The model whose settings and values are taken, or those of several branches; tensors are detached, not copied.
    train_infos
        `lr` and 0-based `step`.
    min_nbor_dist
        Smallest distance in the training data [Å], of each branch if there are several; model compression wants it.
    """
    several = isinstance(model, Branches)
    state: dict[str, Any] = {}
    sections, reasons = {}, []
    for name, one in branches_of(model).items():
        distance = (
            min_nbor_dist.get(name, UNKNOWN_DISTANCE)
            if isinstance(min_nbor_dist, Mapping)
            else min_nbor_dist
        )
        state |= _state_of_branch(one, f"model.{name}.", distance)
        sections[name] = {**_ONLY_THEIRS, **thaw(one.settings)}
        reasons += [
            f"{name}: {reason}" if several else reason for reason in ours_only(one.settings)
        ]
    if isinstance(model, Branches):
        for name, section in sections.items():
            section["model_branch_alias"] = list(model.aliases.get(name, ()))
    params = {"model_dict": sections, "shared_dict": {}} if several else sections[SINGLE]
    state["_extra_state"] = {"model_params": params, "train_infos": dict(train_infos)}
    if reasons:
        state["_extra_state"][OURS_ONLY] = reasons
    return state


def _state_of_branch(
    model: EnergyModel, prefix: str, min_nbor_dist: float
) -> dict[str, torch.Tensor]:
    """Return the tensors of one branch under deepmd-kit's names."""
    state = {f"{prefix}min_nbor_dist": torch.tensor(min_nbor_dist, dtype=torch.float64)}
    table = model.short_range is not None
    for own, value in model.state_dict().items():
        name = _theirs(own, table=table)
        state[prefix + name] = value.detach()
        if table and own in ("atomic_model.out_bias", "atomic_model.out_std"):
            for place in (_NETWORK, _TABLE):
                same = torch.zeros_like(value) if own.endswith("bias") else torch.ones_like(value)
                state[prefix + place + own.removeprefix("atomic_model.")] = same
        if re.search(r"\.filter_layers(_strip)?\.networks\.", name):
            state[prefix + name.replace(".networks.", "._networks.")] = value.detach()
    for part, translation in _translations(model.settings).items():
        module = getattr(model.atomic_model, part)
        for name in translation.empty(module):
            dtype = next(module.parameters()).dtype
            state[f"{prefix}{_NETWORK if table else 'atomic_model.'}{part}.{name}"] = torch.zeros(
                0, dtype=dtype
            )
    return state


def saved_branches(state_dict: Mapping[str, Any]) -> dict[str, str]:
    """Return the branches of a multi-task checkpoint, names before aliases, and the name each stands for.

    Empty for a checkpoint of a single model.
    """
    branches = state_dict.get("_extra_state", {}).get("model_params", {}).get("model_dict", {})
    aliases = {
        alias: name
        for name, section in branches.items()
        for alias in section.get("model_branch_alias") or ()
    }
    return {**{name: name for name in branches}, **aliases}


def _branch(state_dict: Mapping[str, Any], wanted: str | None) -> tuple[str, Mapping[str, Any]]:
    """Return name and model parameters of the branch that is wanted, or of the only one."""
    params, known = state_dict["_extra_state"]["model_params"], saved_branches(state_dict)
    if not known:
        if wanted not in (None, SINGLE):
            raise BranchError(f"the checkpoint has no branch {wanted!r}: it holds a single model")
        return SINGLE, params
    names = ", ".join(params["model_dict"])
    if wanted is None:
        raise BranchError(
            f"the checkpoint holds several models: name one of its branches ({names}) by --head or --model-branch; "
            "dp freeze --head writes one alone"
        )
    if wanted not in known:
        raise BranchError(f"the checkpoint has no branch {wanted!r}; its branches are {names}")
    section = params["model_dict"][known[wanted]]
    return known[wanted], {
        key: x for key, x in section.items() if key not in ("model_branch_alias", "finetune_head")
    }


def branch_prefix(state_dict: Mapping[str, Any], branch: str | None = None) -> str:
    """Return the prefix of a branch's names; arguments and errors are those of `from_deepmd_kit`."""
    return f"model.{_branch(state_dict, branch)[0]}."


def min_distance_of(state_dict: Mapping[str, Any], branch: str | None = None) -> float:
    """Return the smallest distance in a branch's training data [Å], negative when the checkpoint has none."""
    found = state_dict.get(f"{branch_prefix(state_dict, branch)}min_nbor_dist")
    return UNKNOWN_DISTANCE if found is None else float(found)


def from_deepmd_kit(
    state_dict: Mapping[str, Any], branch: str | None = None
) -> tuple[ModelSettings, dict[str, torch.Tensor]]:
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
        When the model is of a kind that we do not have, or there is no such branch; the message names the reason.
    """
    if "_extra_state" not in state_dict:
        raise ForeignModelError(
            "the state dict has no '_extra_state': it is not a checkpoint of deepmd-kit's PyTorch backend"
        )
    name, params = _branch(state_dict, branch)
    prefix = f"model.{name}."
    settings = settings_of(params)
    if OURS_ONLY not in state_dict["_extra_state"]:
        settings = _as_deepmd_kit_computes(settings)
    translations = _translations(settings)
    own: dict[str, torch.Tensor] = {}
    others = tuple(f"model.{other}." for other in set(saved_branches(state_dict).values()) - {name})
    for name, value in state_dict.items():
        if name == "_extra_state" or "._networks." in name or name == f"{prefix}min_nbor_dist":
            continue
        if name.startswith(others):
            continue
        if not name.startswith(prefix):
            raise ForeignModelError(
                f"the checkpoint holds {name!r}; names must begin with {prefix!r}"
            )
        if (
            not isinstance(value, torch.Tensor)
            or value.is_complex()
            or value.layout is not torch.strided
        ):
            kind = (
                f"{value.dtype} {value.layout}"
                if isinstance(value, torch.Tensor)
                else type(value).__name__
            )
            raise ForeignModelError(
                f"the checkpoint holds {kind} under {name!r}; expected a tensor of real numbers"
            )
        translated = _ours(name[len(prefix) :], table=settings.use_srtab is not None)
        if translated is None:
            continue
        short = translated
        _, part, below = short.split(".", 2) if short.count(".") > 1 else ("", "", "")
        if part in translations and translations[part].is_empty(below):
            if value.numel():
                raise ForeignModelError(
                    "the checkpoint holds a compressed model; give the one it was compressed from"
                )
            continue
        own[short] = value
    for part, translation in translations.items():
        below = f"atomic_model.{part}."
        translation.check(
            {name[len(below) :]: value for name, value in own.items() if name.startswith(below)}
        )
    return settings, own


def _as_deepmd_kit_computes(settings: ModelSettings) -> ModelSettings:
    """Return the settings with which deepmd-kit computes a model; it does not read `smin_alpha`."""
    if settings.smin_alpha in (None, DEFAULT_ALPHA):
        return settings
    log.warning(
        "the checkpoint says smin_alpha %g, but deepmd-kit, which wrote it, computes with %g: so does this package",
        settings.smin_alpha,
        DEFAULT_ALPHA,
    )
    return changed(settings, {"smin_alpha": DEFAULT_ALPHA})


def settings_of(params: Mapping[str, Any]) -> ModelSettings:
    """Return deepmd-kit's section of a single model, as its checkpoints and frozen files hold it, as settings.

    Raises
    ------
    ForeignModelError
        When the model is of a kind that we do not have.
    """
    problems = list(_foreign(params))
    if problems:
        raise ForeignModelError(
            "the checkpoint's model cannot be built here: " + "; ".join(problems)
        )
    try:
        return model_settings(_own_section(params))
    except ModelError as error:
        raise ForeignModelError(f"the checkpoint's model cannot be built here: {error}") from error


def _foreign(params: Mapping[str, Any]) -> list[str]:
    """Name the entries of deepmd-kit's model parameters that have no counterpart here."""
    problems = [f"{key} is {params[key]!r}" for key in ("lora", "hessian_mode") if params.get(key)]
    problems += _refused(ModelSettings, params, "")
    if params.get("type", "standard") != "standard":
        problems.append(f"the model's type is {params['type']!r}, not 'standard'")
    for part, table in _PARTS.items():
        section = params.get(part, {})
        kind = section.get("type", "ener" if part == "fitting_net" else None)
        if kind not in table.names():
            problems.append(
                f"the {table.what}'s type is {kind!r}; known are {', '.join(table.names())}"
            )
        else:
            problems += _refused(table.settings_class(kind), section, f"{part}.")
    return problems


def _refused(settings: type[Any], section: Mapping[str, Any], where: str) -> list[str]:
    """Name the keys of deepmd-kit that request features a part lacks here."""
    problems = [
        f"{where}{key} is {section[key]!r}"
        for key, foreign in settings.foreign.items()
        if key in section
        and section[key]
        and not foreign.inert
        and not foreign.accepts(section[key])
    ]
    for key, below in _subsections(settings).items():
        problems += _refused(below, section.get(key, {}), f"{where}{key}.")
    return problems


def _own_section(params: Mapping[str, Any]) -> dict[str, Any]:
    """Return deepmd-kit's model section with the keys we have, in our spelling."""
    section = _known(ModelSettings, params)
    for part, table in _PARTS.items():
        given = params.get(part, {})
        kind = given.get("type", "ener")
        own = table.settings_class(kind)
        translation = table.translation(own) or PLAIN
        section[part] = {"type": kind, **_known(own, translation.section(given))}
    return section


def _known(settings: type[Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries of a section, and of its sub-sections, whose keys we have."""
    below = _subsections(settings)
    names = {field.name for field in dataclasses.fields(settings)}
    return {
        key: _known(below[key], value) if key in below else value
        for key, value in given.items()
        if key in names
    }


def _subsections(settings: type) -> dict[str, type[Any]]:
    """Return the settings class of every sub-section of a part."""
    annotations = annotations_of(settings).items()
    return {
        name: kind
        for name, kind in annotations
        if isinstance(kind, type) and dataclasses.is_dataclass(kind)
    }
