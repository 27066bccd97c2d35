"""Restarts from optimizer states of every version of deepmd-kit's HybridMuon, for whole models of every descriptor."""

import logging
from pathlib import Path

import pytest
import torch

from deepmd_muon.checkpoint_file.errors import CheckpointError
from deepmd_muon.model import build_model
from deepmd_muon.model.deepmd_kit import deepmd_kit_parameter_names
from deepmd_muon.optim import HybridMuonConfig
from deepmd_muon.train.checkpoint.optimizer_state import load_optimizer_state

FITTING = {"type": "ener", "neuron": [6, 6], "seed": 2}
RADIAL = {"rcut": 4.0, "rcut_smth": 1.0, "neuron": [4, 8], "axis_neuron": 2}
CUTS = {"e_rcut": 4.0, "e_rcut_smth": 3.0, "e_sel": 9, "a_rcut": 3.0, "a_rcut_smth": 2.0}
WIDTHS = {"n_dim": 6, "e_dim": 4, "a_dim": 4, "nlayers": 2, "axis_neuron": 2, "a_sel": 5}
DESCRIPTORS = {
    "se_e2_a": {"sel": [9, 9], "resnet_dt": True, **RADIAL},
    "se_atten": {"sel": 9, "tebd_dim": 3, "attn": 6, **RADIAL},
    "se_atten_v2": {"sel": 9, "attn_layer": 0, **RADIAL},
    "dpa3": {"repflow": CUTS | WIDTHS},
}
BETAS = (0.9, 0.95)
STEPS = 7
# What the versions kept in their groups, and the smaller dimension from which a matrix took Muon.
FIRST = {"muon_2d_only": True, "min_2d_dim": 1}
VERSIONS = {
    "first": (FIRST, 1),
    "first, folding": ({**FIRST, "muon_2d_only": False}, 1),
    "first, larger matrices": ({**FIRST, "min_2d_dim": 5}, 5),
    "between": ({"muon_mode": "slice", "enable_gram": True}, None),
    "latest": ({"muon_mode": "slice", "enable_gram": True, "magma_muon": True}, None),
}


def model_of(kind):
    descriptor = {"type": kind, "precision": "float32", "seed": 1, **DESCRIPTORS[kind]}
    fitting_net = {**FITTING, "precision": "float32"}
    return build_model(
        {"type_map": ["O", "H"], "descriptor": descriptor, "fitting_net": fitting_net}
    )


def took_muon(shape, least):
    """Say what a version did: the first one looked at the number of dimensions, later ones left ones out."""
    if least is None:
        return sum(size > 1 for size in shape) >= 2
    return len(shape) == 2 and min(shape) >= least


def saved_state(model, group, least):
    """Return a checkpoint as deepmd-kit wrote it: by position, empty parameters of its model included."""
    parameters, random = dict(model.named_parameters()), torch.Generator().manual_seed(3)
    names, state = deepmd_kit_parameter_names(model), {}
    for key, name in enumerate(names):
        if name not in parameters:
            continue
        moments = [torch.rand(parameters[name].shape, generator=random) + 0.1 for _ in range(2)]
        if took_muon(parameters[name].shape, least):
            state[key] = {"momentum_buffer": moments[0]}
            if "magma_muon" in group:
                state[key]["magma_score"] = torch.tensor([0.7])
        else:
            state[key] = dict(zip(("exp_avg", "exp_avg_sq"), moments, strict=True))
            state[key] |= {f"beta{i + 1}_pow": beta**STEPS for i, beta in enumerate(BETAS)}
    settings = {"lr": 1e-3, "momentum": 0.95, "adam_betas": BETAS, "weight_decay": 0.001}
    settings |= {"lr_adjust": 10.0, "lr_adjust_coeff": 0.2, **group}
    groups = [{**settings, "params": list(range(len(names)))}]
    extra = {"train_infos": {"lr": 1e-3, "step": STEPS - 1}}
    return {
        "model": {"_extra_state": extra},
        "optimizer": {"state": state, "param_groups": groups},
    }, names


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("kind", DESCRIPTORS)
def test_states_of_every_version_continue(kind, version, caplog):
    group, least = VERSIONS[version]
    model = model_of(kind)
    optimizer = HybridMuonConfig(min_matrix_dim=least or 1).build(model, 1e-3)
    content, names = saved_state(model, group, least)
    load_optimizer_state(optimizer, model, content, Path("model.ckpt.pt"))
    warnings = [record for record in caplog.records if record.levelno == logging.WARNING]
    warned = {record.getMessage().split(":")[0] for record in warnings}
    parameters = dict(model.named_parameters())
    routes = {entry.name: entry.route for entry in optimizer.routing}
    changed = set()
    for key, old in content["optimizer"]["state"].items():
        name = names[key]
        new, was_muon = optimizer.state[parameters[name]], "momentum_buffer" in old
        if was_muon and routes[name] != "muon":
            changed.add(name)
            torch.testing.assert_close(new["exp_avg"], (1 - BETAS[0]) * old["momentum_buffer"])
            torch.testing.assert_close(
                new["exp_avg_sq"], (1 - BETAS[1]) * old["momentum_buffer"].square()
            )
            assert new["step"].item() == 1
        elif was_muon:
            assert torch.equal(new["momentum_buffer"], old["momentum_buffer"]), name
            assert ("magma_score" in new) == (version == "latest")
        else:
            assert routes[name] != "muon", name
            assert torch.equal(new["exp_avg"], old["exp_avg"]), name
            assert torch.equal(new["exp_avg_sq"], old["exp_avg_sq"]), name
            assert new["step"].item() == STEPS
    assert warned == changed
    columns = {name for name in changed if 1 in parameters[name].shape}
    assert columns == changed  # what is a matrix by its number of dimensions alone
    assert bool(changed) == (least == 1)
    for p in parameters.values():
        p.grad = torch.ones_like(p)
    optimizer.step()
    assert all(p.isfinite().all() for p in parameters.values())


@pytest.mark.parametrize("kind", DESCRIPTORS)
def test_a_state_of_another_model_is_refused(kind):
    model = model_of(kind)
    content, _ = saved_state(model, *VERSIONS["latest"])
    content["optimizer"]["param_groups"][0]["params"].append(10**6)
    optimizer = HybridMuonConfig().build(model, 1e-3)
    with pytest.raises(CheckpointError, match="parameters"):
        load_optimizer_state(optimizer, model, content, Path("model.ckpt.pt"))
