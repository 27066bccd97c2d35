"""One table of settings, and the ways of stepping and saving that must not change a result.

Every case is trained plainly and in every way, and parameters and state are compared. What a step computes is tested
against formulas in `test_optim_step` and `test_optim_rules`.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import pickle
from typing import Any

import pytest
import torch
from example_rules import BRAKE, SOAP
from optim_builders import random, through_file
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from deepmd_muon.optim import HybridMuon
from deepmd_muon.optim.state.schema import ALL_MOMENTS

SHAPES = {
    "wide": (6, 10),
    "twin": (6, 10),
    "experts": (3, 4, 5),
    "conv": (4, 3, 2, 2),
    "bias": (10,),
    "adamw_scale": (7,),
    "scalar": (),
}
STEPS = 6
ADAM = {"adam_patterns": ["*"]}


@dataclasses.dataclass(frozen=True)
class Case:
    """Settings of the optimizer, and the dtype of the parameters."""

    settings: dict[str, Any] = dataclasses.field(default_factory=dict)
    dtype: torch.dtype = torch.float32


CASES = {
    "defaults": Case(),
    "float64": Case(dtype=torch.float64),
    "bfloat16": Case(dtype=torch.bfloat16),
    "masters of bfloat16": Case({"master_weights": True}, torch.bfloat16),
    "masters of float16": Case({"master_weights": True}, torch.float16),
    "adam in lists": Case({**ADAM, "adam_implementation": "foreach"}),
    "adam one by one": Case({**ADAM, "adam_implementation": "for-loop"}, torch.bfloat16),
    "rate in a tensor": Case({"lr": torch.tensor(0.02)}),
    "2d": Case({"muon_mode": "2d"}),
    "flat": Case({"muon_mode": "flat"}),
    "blocks": Case(
        {"splits": ["wide: rows 4+2"], "conv_patterns": ["conv"], "expert_patterns": ["experts"]}
    ),
    "deepmd-kit's schedule": Case({"schedule": "deepmd-kit"}),
    "no damping": Case({"magma_muon": False}),
    "normuon": Case({"normuon": True, "layout": "in_out", "splits": ["wide: rows 4+2"]}),
    "cautious": Case({"cautious_decay": True, "normuon": True, "magma_muon": False}),
    "soap": Case(SOAP),
    "soap and normuon": Case({**SOAP, "normuon": True, "magma_muon": False}),
    "brake": Case(BRAKE),
    "soap and brake": Case({"rules": ["soap_muon", "radial_brake"], "magma_muon": False}),
}


class Net(nn.Module):
    """Parameters of the shapes that routes and rules distinguish."""

    def __init__(self, dtype, seed=0):
        super().__init__()
        for number, (name, shape) in enumerate(SHAPES.items()):
            start = random(*shape, seed=100 * seed + number, dtype=torch.float64)
            self.register_parameter(name, nn.Parameter(start.to(dtype)))


def make(case, *, seed=0, **more):
    model = Net(case.dtype, seed)
    settings = {"lr": 0.02, "weight_decay": 0.1, **case.settings, **more}
    return model, HybridMuon(model.named_parameters(), **settings)


def give_gradients(model, step):
    for number, (name, p) in enumerate(model.named_parameters()):
        g = random(*p.shape, seed=1000 + 10 * step + number, dtype=torch.float64)
        # A parameter without a gradient now and then, as an expert that no token chose.
        p.grad = None if name == "twin" and step in (2, 3) else g.to(p.dtype)


def train(model, optimizer, *steps):
    for step in steps or range(STEPS):
        give_gradients(model, step)
        optimizer.step()


def offloaded_now_and_then(case):
    model, optimizer = make(case)
    for step in range(STEPS):
        if step in (1, 4, 5):  # the last time it is there already
            optimizer.offload()
        if step == 3:
            optimizer.offload(False)
        train(model, optimizer, step)
    offloaded = optimizer._host_memory._offloaded.values()
    in_host_memory = {id(x) for by_key in offloaded for x in by_key.values()}
    assert in_host_memory == {
        id(x)
        for state in optimizer.state.values()
        for key, x in state.items()
        if key in ALL_MOMENTS
    }
    return model, optimizer


def offloaded_in_batches(case):
    made = make(case, offload=True, offload_bytes=700)
    train(*made)
    return made


def one_parameter_at_a_time(case):
    made = make(case, workspace=1)
    train(*made)
    return made


def restarted(case, *, before, after):
    """Stop after three steps; weights and state come from a file, into an optimizer with other weights."""
    model, optimizer = make(case, **before)
    train(model, optimizer, 0, 1, 2)
    saved = through_file({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    resumed, second = make(case, seed=7, **after)
    resumed.load_state_dict(saved["model"])
    second.load_state_dict(saved["optimizer"])
    train(resumed, second, 3, 4, 5)
    return resumed, second


def restarted_by_name(case):
    """Load into an optimizer with the parameters in another order and under a wrapper's names."""
    model, optimizer = make(case)
    train(model, optimizer, 0, 1, 2)
    wrapped = [(f"module._orig_mod.{name}", p) for name, p in model.named_parameters()]
    settings = {"lr": 0.02, "weight_decay": 0.1, **case.settings}
    other = HybridMuon(wrapped[::-1], **settings)
    other.load_state_dict(optimizer.state_dict())
    train(model, other, 3, 4, 5)
    return model, other


def restarted_by_torch(case, *, full):
    options = StateDictOptions(full_state_dict=full)
    model, optimizer = make(case)
    train(model, optimizer, 0, 1, 2)
    resumed, second = make(case, seed=7, offload=True)
    state = get_optimizer_state_dict(model, optimizer, options=options)
    set_optimizer_state_dict(resumed, second, state, options=options)
    resumed.load_state_dict(model.state_dict())
    train(resumed, second, 3, 4, 5)
    return resumed, second


def copied(case, *, clone, offload=False):
    pair = make(case, offload=offload)
    train(*pair, 0, 1, 2)
    other = clone(pair)
    train(*pair, 3)  # must not reach the copy
    train(*other, 3, 4, 5)
    return other


def with_another_default_device(case):
    """Scripts make a GPU the default, and tensors for the host land there: "meta" holds no numbers at all."""
    model, optimizer = make(case)
    with torch.device("meta"):
        for step in range(STEPS):
            with torch.device("cpu"):
                give_gradients(model, step)
            optimizer.step()
            if step == 1:
                optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    return model, optimizer


def with_pending_signs(case):
    """Gradients that torch stores negated, with a note to change the sign."""
    model, optimizer = make(case)
    for step in range(STEPS):
        give_gradients(model, step)
        for p in model.parameters():
            p.grad = None if p.grad is None else torch._neg_view(-p.grad)
        optimizer.step()
    return model, optimizer


def maximizing(case):
    model, optimizer = make(case, maximize=True)
    for step in range(STEPS):
        give_gradients(model, step)
        for p in model.parameters():
            p.grad = None if p.grad is None else -p.grad
        optimizer.step()
    return model, optimizer


def spoil(model, step, value):
    give_gradients(model, step)
    model.experts.grad[1, 2, 3] = value


def numbers(model, optimizer):
    state = optimizer.state_dict()["state"].values()
    return copy.deepcopy(
        [*model.state_dict().values(), *(x for own in state for x in own.values())]
    )


def assert_no_bit_changes(model, optimizer, step):
    before = numbers(model, optimizer)
    step()
    assert all(map(torch.equal, before, numbers(model, optimizer)))


def skipping(case):
    model, optimizer = make(case, on_nonfinite="skip")
    for step in range(STEPS):
        if step in (2, 4):
            spoil(model, step, float("nan" if step == 2 else "-inf"))
            assert_no_bit_changes(model, optimizer, optimizer.step)
        train(model, optimizer, step)
    return model, optimizer


def scaled(case):
    """Gradients of a scaled loss, with an overflow on the way."""
    model, optimizer = make(case)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)

    def step_and_update():
        scaler.step(optimizer)
        scaler.update()

    for step in range(STEPS):
        scaler.scale(torch.zeros(()))  # a scaler begins with the first loss
        if step == 2:
            spoil(model, step, float("inf"))
            assert_no_bit_changes(model, optimizer, step_and_update)
            assert scaler.get_scale() == 2.0
        give_gradients(model, step)
        for p in model.parameters():
            p.grad = None if p.grad is None else p.grad * scaler.get_scale()
        step_and_update()
    return model, optimizer


EXACT = {
    "offloaded now and then": offloaded_now_and_then,
    "restarted": functools.partial(restarted, before={}, after={}),
    "restarted from host memory": functools.partial(restarted, before={"offload": True}, after={}),
    "restarted into host memory": functools.partial(restarted, before={}, after={"offload": True}),
    "restarted by name": restarted_by_name,
    "restarted by torch": functools.partial(restarted_by_torch, full=False),
    "restarted by torch, full": functools.partial(restarted_by_torch, full=True),
    "copied": functools.partial(copied, clone=copy.deepcopy),
    "copied in host memory": functools.partial(copied, clone=copy.deepcopy, offload=True),
    "pickled": functools.partial(copied, clone=lambda pair: pickle.loads(pickle.dumps(pair))),
    "another default device": with_another_default_device,
    "pending signs": with_pending_signs,
    "maximizing": maximizing,
}
# These multiply matrices in other batches, divide by a scale, or choose between two results on the device.
CLOSE = {
    "offloaded in batches": offloaded_in_batches,
    "one at a time": one_parameter_at_a_time,
    "skipping": skipping,
    "scaled": scaled,
}


@functools.cache
def plain(name):
    made = make(CASES[name])
    train(*made)
    return made


def state_by_name(model, optimizer):
    return {name: optimizer.state[p] for name, p in model.named_parameters()}


@pytest.mark.parametrize("way", EXACT)
@pytest.mark.parametrize("case", CASES)
def test_every_way_takes_the_same_steps(case, way):
    found = EXACT[way](CASES[case])
    for name, p in found[0].named_parameters():
        assert torch.equal(p, plain(case)[0].get_parameter(name)), name
    states, expected = state_by_name(*found), state_by_name(*plain(case))
    for name, state in states.items():
        assert state.keys() == expected[name].keys(), name
        for key, x in state.items():
            assert (x.dtype, x.stride()) == (
                expected[name][key].dtype,
                expected[name][key].stride(),
            )
            assert torch.equal(x, expected[name][key]), (name, key)


@pytest.mark.parametrize("way", CLOSE)
@pytest.mark.parametrize("case", CASES)
def test_every_way_takes_steps_as_close_as_rounding(case, way):
    found = CLOSE[way](CASES[case])
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-6}.get(CASES[case].dtype, 2e-2)
    states, expected = state_by_name(*found), state_by_name(*plain(case))
    for name, p in found[0].named_parameters():
        q = plain(case)[0].get_parameter(name)
        torch.testing.assert_close(p, q, rtol=tolerance, atol=tolerance)
        assert {key: x.dtype for key, x in states[name].items()} == {
            key: x.dtype for key, x in expected[name].items()
        }
