"""The step under accelerate's FSDP2, which replaces the optimizer's parameters after it was made."""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist
from spawn_ranks import run_cases
from torch import nn
from torch.distributed.tensor import DTensor

from deepmd_muon.optim import HybridMuon, MuonConfig


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 4)).double()


def in_groups(model):
    """Two groups without names, as HF's Trainer makes them."""
    decayed = [p for p in model.parameters() if p.ndim > 1]
    rest = [p for p in model.parameters() if p.ndim < 2]
    return HybridMuon([{"params": decayed}, {"params": rest, "weight_decay": 0.0}], 0.02, precision="float64")


OPTIMIZERS = [
    lambda model: HybridMuon(model.named_parameters(), 0.02, precision="float64"),
    lambda model: MuonConfig(precision="float64").build(model),
    in_groups,
]


def train(model, optimizer, backward):
    for step in range(4):
        optimizer.zero_grad()
        x = torch.randn(5, 6, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
        backward(model(x).square().mean())
        optimizer.step()


def trained_by_accelerate():
    from accelerate import Accelerator, FullyShardedDataParallelPlugin
    from accelerate.state import AcceleratorState, PartialState
    from accelerate.utils import DistributedType

    os.environ["LOCAL_RANK"] = str(dist.get_rank())
    accelerator = Accelerator(cpu=True)
    # Accelerate shards models on accelerators only; FSDP2 itself, and all that accelerate does for it, run on a CPU.
    for state in (PartialState, AcceleratorState):
        state._shared_state["distributed_type"] = DistributedType.FSDP
    accelerator.state.fsdp_plugin = FullyShardedDataParallelPlugin(fsdp_version=2, cpu_ram_efficient_loading=False)
    for make in OPTIMIZERS:
        expected = make_model()
        train(expected, make(expected), torch.Tensor.backward)
        model = make_model()
        model, optimizer = accelerator.prepare(model, make(model))
        train(model, optimizer, accelerator.backward)
        for p, q in zip(model.parameters(), expected.parameters(), strict=True):
            assert isinstance(p, DTensor)
            assert torch.allclose(p.full_tensor(), q, rtol=0, atol=1e-10)


def test_models_that_accelerate_shards_are_trained_as_on_one_process():
    pytest.importorskip("accelerate")
    failures, _ = run_cases(2, [("accelerate", trained_by_accelerate)])
    assert not failures, failures
