"""What runs on each of two ranks in test_zero_stages.py."""

from __future__ import annotations

import copy

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import distribute_tensor

from deepmd_muon.deepmd_kit.checkpoint import laid_out, with_names
from deepmd_muon.deepmd_kit.optimizer import DeepmdKitHybridMuon
from deepmd_muon.deepmd_kit.zero_redundancy import ZeroRedundancyHybridMuon

SHAPES = {
    "a_matrix": (6, 4),
    "a_bias": (4,),
    "experts": (2, 3, 5),
    "b_matrix": (4, 8),
    "empty": (0,),
}
STEPS = 3


class Parameters(nn.Module):
    """Parameters of several routes, the same in every process."""

    def __init__(self):
        super().__init__()
        for seed, (name, shape) in enumerate(SHAPES.items()):
            value = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
            self.register_parameter(name, nn.Parameter(value))


def take_steps(optimizer, model, steps):
    """Step with the gradients of these steps, the same in every process."""
    for step in steps:
        for seed, p in enumerate(model.parameters()):
            generator = torch.Generator().manual_seed(100 * (step + 1) + seed)
            whole = torch.randn(p.shape, generator=generator)
            cut = hasattr(p, "device_mesh")
            p.grad = (
                distribute_tensor(whole, p.device_mesh, p.placements, src_data_rank=None)
                if cut
                else whole
            )
        optimizer.step()


def alone():
    """Return weights and state after the steps in one process, and the weights one step later."""
    model = Parameters()
    optimizer = DeepmdKitHybridMuon(model.named_parameters(), 0.01)
    take_steps(optimizer, model, range(STEPS))
    weights, state = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
    take_steps(optimizer, model, [STEPS])
    return weights, state, model.state_dict()


def assert_equal(ours, expected):
    for name, value in expected.items():
        whole = ours[name].full_tensor() if hasattr(ours[name], "full_tensor") else ours[name]
        assert torch.equal(whole, value), name


def redundancy(rank):
    """ZeRO-1: weights, state dict and restart are those of one process."""
    weights, state, later = alone()
    model = Parameters()
    optimizer = ZeroRedundancyHybridMuon(list(model.named_parameters()), 0.01, momentum=0.95)
    take_steps(optimizer, model, range(STEPS))
    assert_equal(model.state_dict(), weights)
    assert 0 < len(optimizer.optim.state) < len(state["state"])
    optimizer.consolidate_state_dict(to=0)
    if rank == 0:
        saved = optimizer.state_dict()
        assert saved["state"].keys() == state["state"].keys()
        for key, values in state["state"].items():
            assert saved["state"][key].keys() == values.keys()
            for name, value in values.items():
                other = saved["state"][key][name]
                assert torch.equal(other, value) if torch.is_tensor(value) else other == value
        (group,), (expected,) = saved["param_groups"], state["param_groups"]
        assert {key: group[key] for key in expected} == expected
    again = Parameters()
    again.load_state_dict(weights)
    restarted = ZeroRedundancyHybridMuon(list(again.named_parameters()), 0.5)
    restarted.load_state_dict(with_names(state, list(SHAPES), STEPS))
    assert restarted.param_groups[0]["lr"] == 0.01
    take_steps(restarted, again, [STEPS])
    assert_equal(again.state_dict(), later)


def parts(rank):
    """FSDP2 takes the whole state of one process."""
    weights, state, later = alone()
    model = Parameters()
    model.load_state_dict(weights)
    fully_shard(model)
    optimizer = DeepmdKitHybridMuon(model.named_parameters(), 0.5)
    optimizer.load_state_dict(laid_out(state, optimizer))
    take_steps(optimizer, model, [STEPS])
    assert_equal(model.state_dict(), later)


def run(rank, store):
    """Run the cases on one rank."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    redundancy(rank)
    parts(rank)
    dist.destroy_process_group()
