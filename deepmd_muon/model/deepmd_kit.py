"""Checkpoints of deepmd-kit 3.2: its names for what we store, both ways.

Our parameters already carry deepmd-kit's names; a deepmd-kit state dict adds the prefix `model.Default.`, every
network a second time under `_networks`, empty `compress_…` parameters, `min_nbor_dist` and `_extra_state`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from deepmd_muon.model.descriptor.se_e2_a import SeE2A
from deepmd_muon.model.energy_model import EnergyModel
from deepmd_muon.model.errors import CheckpointError
from deepmd_muon.model.registry import known_descriptors

PREFIX = "model.Default."
UNKNOWN_DISTANCE = -1.0  # deepmd-kit's min_nbor_dist of a model that never saw its data's
_SEA = "atomic_model.descriptor.sea."
_SE_E2_A = ("se_e2_a", "se_a")

_DESCRIPTOR_DEFAULTS: dict[str, Any] = {
    "sel": None,
    "rcut": 6.0,
    "rcut_smth": 0.5,
    "neuron": [10, 20, 40],
    "axis_neuron": 4,
    "activation_function": "tanh",
    "resnet_dt": False,
    "type_one_side": False,
    "precision": "default",
    "trainable": True,
    "seed": None,
    "exclude_types": [],
    "env_protection": 0.0,
    "set_davg_zero": False,
}
_FITTING_DEFAULTS: dict[str, Any] = {
    "neuron": [120, 120, 120],
    "resnet_dt": True,
    "activation_function": "tanh",
    "precision": "default",
    "trainable": True,
    "seed": None,
    "atom_ener": [],
    "rcond": None,
    "numb_fparam": 0,
    "numb_aparam": 0,
}
_STATISTICS_DEFAULTS: dict[str, Any] = {"data_stat_nbatch": 10, "data_stat_protect": 0.01}
# What deepmd-kit's argument check adds to a model section; its builder reads some of them without a default.
_ONLY_THEIRS: dict[str, Any] = {
    "data_bias_nsample": 10,
    "pair_exclude_types": [],
    "atom_exclude_types": [],
    "preset_out_bias": None,
    "srtab_add_bias": True,
    "type": "standard",
    "model_branch_alias": [],
    "info": {},
    "bridging_method": "None",
    "bridging_r_inner": 0.5,
    "bridging_r_outer": 0.8,
}
_ONLY_THEIR_FITTING: dict[str, Any] = {
    "default_fparam": None,
    "dim_case_embd": 0,
    "use_aparam_as_mask": False,
}


def _plain(value: Any) -> Any:
    """Tuples to lists, all the way down: what JSON and deepmd-kit expect."""
    if isinstance(value, Mapping):
        return {key: _plain(inner) for key, inner in value.items()}
    return [_plain(inner) for inner in value] if isinstance(value, (list, tuple)) else value


def _compress_names(model: EnergyModel) -> list[str]:
    nets = len(_descriptor(model).sea.filter_layers.networks)
    return [f"{_SEA}compress_{what}.{i}" for what in ("info", "data") for i in range(nets)]


def _descriptor(model: EnergyModel) -> SeE2A:
    descriptor = model.atomic_model.descriptor
    if not isinstance(descriptor, SeE2A):
        raise CheckpointError(f"deepmd-kit has no descriptor for {type(descriptor).__name__}; only se_e2_a translates")
    return descriptor


def deepmd_kit_parameter_names(model: EnergyModel) -> list[str]:
    """Return parameter names in the order of deepmd-kit's own `named_parameters`, without prefix.

    An optimizer state of deepmd-kit counts parameters by position; empty `compress_…` parameters take part.

    Raises
    ------
    CheckpointError
        When deepmd-kit has no such model.
    """
    names = [name for name, _ in model.named_parameters()]
    fitting = [name for name in names if name.startswith("atomic_model.fitting_net.")]
    return [name for name in names if name not in set(fitting)] + _compress_names(model) + fitting


def to_deepmd_kit(
    model: EnergyModel,
    model_section: Mapping[str, Any],
    train_infos: Mapping[str, Any],
    *,
    min_nbor_dist: float = UNKNOWN_DISTANCE,
) -> dict[str, Any]:
    """Return the `"model"` entry of a checkpoint that deepmd-kit 3.2 tests, freezes and trains on.

    A third party's descriptor, which deepmd-kit does not have, is stored in the same form under its own names.

    Parameters
    ----------
    model
        The model whose values are taken; tensors are detached, not copied.
    model_section
        The normalised section that `build_model` got.
    train_infos
        `lr` and 0-based `step`.
    min_nbor_dist
        Smallest distance in the training data [Å]; model compression wants it.
    """
    descriptor = model.atomic_model.descriptor
    own = {name: value.detach() for name, value in model.state_dict().items()}
    state: dict[str, Any] = {f"{PREFIX}min_nbor_dist": torch.tensor(min_nbor_dist, dtype=torch.float64)}
    for name, value in own.items():
        state[PREFIX + name] = value
        if ".filter_layers.networks." in name:
            state[PREFIX + name.replace(".networks.", "._networks.")] = value
    if isinstance(descriptor, SeE2A):
        for name in _compress_names(model):
            state[PREFIX + name] = torch.zeros(0, dtype=descriptor.sea.mean.dtype)
    params = _plain(model_section)
    params = {**_ONLY_THEIRS, **_STATISTICS_DEFAULTS, **params}
    params["fitting_net"] = {**_ONLY_THEIR_FITTING, **params["fitting_net"]}
    state["_extra_state"] = {"model_params": params, "train_infos": dict(train_infos)}
    return state


def from_deepmd_kit(state_dict: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Read the `"model"` entry of a deepmd-kit checkpoint.

    Returns
    -------
    tuple
        The model section for `build_model`, and the state dict for `EnergyModel.load_state_dict`.

    Raises
    ------
    CheckpointError
        When the model is of a kind that we do not have; the message names what stands in the way.
    """
    if "_extra_state" not in state_dict:
        raise CheckpointError(
            "the state dict has no '_extra_state': it is no checkpoint of deepmd-kit's PyTorch backend"
        )
    params = state_dict["_extra_state"]["model_params"]
    problems = list(_foreign(params))
    if problems:
        raise CheckpointError("the checkpoint's model cannot be built here: " + "; ".join(problems))
    plain_se_e2_a = params["descriptor"]["type"] in _SE_E2_A
    section = _own_section(params) if plain_se_e2_a else _third_party_section(params)
    own: dict[str, torch.Tensor] = {}
    for name, value in state_dict.items():
        if name == "_extra_state" or "._networks." in name or name == f"{PREFIX}min_nbor_dist":
            continue
        if not name.startswith(PREFIX):
            raise CheckpointError(f"the checkpoint holds {name!r}; names must begin with {PREFIX!r}")
        short = name[len(PREFIX) :]
        if short.startswith(f"{_SEA}compress_"):
            if value.numel():
                raise CheckpointError("the checkpoint holds a compressed model; give the one it was compressed from")
            continue
        own[short] = value
    for what in ("mean", "stddev") if plain_se_e2_a else ():
        values = own[f"{_SEA}{what}"]
        if not torch.equal(values, values[:, :1].expand_as(values)):
            raise CheckpointError(f"the descriptor's {what} differs between neighbour slots of one centre type")
    return section, own


def _foreign(params: Mapping[str, Any]) -> list[str]:
    """Say what in deepmd-kit's model parameters has no counterpart here."""
    if "model_dict" in params:
        return [f"it has several branches ({', '.join(params['model_dict'])})"]
    problems = [
        f"{key} is {params[key]!r}"
        for key in ("spin", "use_srtab", "lora", "modifier", "hessian_mode", "type_embedding")
        if params.get(key)
    ]
    problems += [f"{key} is {params[key]!r}" for key in ("pair_exclude_types", "atom_exclude_types") if params.get(key)]
    if str(params.get("bridging_method", "none")).lower() not in ("none", ""):
        problems.append(f"bridging_method is {params['bridging_method']!r}")
    if params.get("type", "standard") != "standard":
        problems.append(f"the model's type is {params['type']!r}, not 'standard'")
    descriptor = params.get("descriptor", {}).get("type")
    if descriptor not in known_descriptors():
        problems.append(f"the descriptor's type is {descriptor!r}; known are {', '.join(known_descriptors())}")
    fitting = params.get("fitting_net", {})
    if fitting.get("type", "ener") != "ener":
        problems.append(f"the fitting net's type is {fitting['type']!r}, not 'ener'")
    problems += [
        f"fitting_net.{key} is {fitting[key]}"
        for key in ("numb_fparam", "numb_aparam", "dim_case_embd")
        if fitting.get(key)
    ]
    return problems


def _third_party_section(params: Mapping[str, Any]) -> dict[str, Any]:
    """Return the section of a model whose descriptor only we know: what `to_deepmd_kit` was given."""
    section = {key: _plain(value) for key, value in params.items() if key not in _ONLY_THEIRS}
    fitting = {key: value for key, value in section["fitting_net"].items() if key not in _ONLY_THEIR_FITTING}
    return {"type": "standard", **section, "fitting_net": fitting}


def _own_section(params: Mapping[str, Any]) -> dict[str, Any]:
    def keep(given: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
        return {key: _plain(given.get(key, value)) for key, value in defaults.items()}

    fitting = keep(params.get("fitting_net", {}), _FITTING_DEFAULTS)
    if isinstance(fitting["trainable"], list):
        fitting["trainable"] = all(fitting["trainable"])
    fitting["atom_ener"] = fitting["atom_ener"] or []
    return {
        "type": "standard",
        "type_map": list(params["type_map"]),
        **keep(params, _STATISTICS_DEFAULTS),
        "descriptor": {"type": "se_e2_a", **keep(params["descriptor"], _DESCRIPTOR_DEFAULTS)},
        "fitting_net": {"type": "ener", **fitting},
    }
