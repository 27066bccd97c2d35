"""What a step remembers is noticed to be old: whatever is changed between steps counts in the next one.

Each case runs beside an optimizer that remembers nothing; on a GPU, where launches are recorded, there as well.
"""

from __future__ import annotations

import pytest
import torch
from optim_builders import parameters
from torch import nn
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.profiler import ProfilerActivity, profile

from deepmd_muon.optim import HybridMuon, InvalidGradientError
from deepmd_muon.optim.step import CompiledStep

SHAPES = {
    "a.matrix": (6, 10),
    "b.matrix": (12, 12),
    "c.matrix": (3, 5, 8),
    "a.bias": (10,),
    "adamw_g": (7,),
}
DEVICES = [
    "cpu",
    pytest.param(
        "cuda",
        marks=[
            pytest.mark.gpu,
            pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
        ],
    ),
]


def draw(shape, seed, device):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device)


def make(device="cpu", **settings):
    params = parameters(SHAPES, device=device)
    return params, HybridMuon(params.items(), **{"lr": 0.02, **settings})


def give_gradients(params, step):
    for i, p in enumerate(params.values()):
        g = draw(p.shape, 100 * step + i, p.device).to(p.dtype)
        p.grad = g if p.grad is None else p.grad.copy_(g)


def edit_lists(params, optimizer):
    optimizer.param_groups[0]["schedule"][0][0] = 3.0


def move_parameters(params, optimizer):
    for p in params.values():
        p.data = p.data.clone()


def move_state(params, optimizer):
    for state in optimizer.state.values():
        for key in state:
            state[key].data = state[key].data.clone()


def replace_state(params, optimizer):
    for state in optimizer.state.values():
        for key in state:
            state[key] = state[key] * 0.5


def forget_state(params, optimizer):
    optimizer.state[params["a.matrix"]].clear()
    del optimizer.state[params["a.bias"]]


def load(params, optimizer):
    optimizer.load_state_dict(optimizer.state_dict())


def freeze(params, optimizer):
    params["b.matrix"].requires_grad_(False)  # its gradient stays


def drop_gradients(params, optimizer):
    params["a.matrix"].grad = params["adamw_g"].grad = None


def move_gradients(params, optimizer):
    for p in params.values():
        p.grad = p.grad.clone()


def turn_gradients(params, optimizer):
    p = params["b.matrix"]
    p.grad = p.grad.mT.contiguous().mT


def widen_gradients(params, optimizer):
    for p in params.values():
        p.grad_dtype = None
        p.grad = p.grad.double()


def widen_everything(params, optimizer):
    for p in params.values():
        p.grad = None
        p.data = p.data.double()
        p.grad = torch.ones_like(p)
        state = optimizer.state[p]
        state.update({key: state[key].double() for key in state.keys() - {"step", "magma_score"}})


def replace_a_parameter(params, optimizer):
    fresh = params["b.matrix"] = nn.Parameter(params["b.matrix"].detach() * 2)
    fresh.grad = torch.ones_like(fresh)
    optimizer.param_groups[0]["params"][1] = fresh


def add_a_group(params, optimizer):
    params["d.matrix"] = nn.Parameter(draw((4, 9), 77, params["a.bias"].device))
    params["d.matrix"].grad = draw((4, 9), 78, params["a.bias"].device)
    optimizer.add_param_group({"params": [("d.matrix", params["d.matrix"])], "lr": 0.5})


def replace_the_group(params, optimizer):
    optimizer.param_groups[0] = {**optimizer.param_groups[0], "lr": 0.1}


def set_group(**settings):
    def change(params, optimizer):
        optimizer.param_groups[0].update(settings)

    change.__name__ = "set_" + "_".join(settings)
    return change


# Those that lead elsewhere, and those that must not.
TURNS = [
    widen_everything,
    edit_lists,
    replace_state,
    forget_state,
    freeze,
    drop_gradients,
    replace_a_parameter,
    replace_the_group,
    set_group(lr=0.5),
    set_group(momentum=0.5),
    set_group(weight_decay=0.3),
    set_group(adam_betas=(0.5, 0.6)),
    set_group(magma_muon=False),
    set_group(maximize=True),
    set_group(scaling="rectangular"),
]
MOVES = [move_parameters, move_state, load, move_gradients, widen_gradients, add_a_group]
ROUNDS = [turn_gradients]  # sums may be taken in another order


def run(device, change=lambda *_: None, between=lambda _: None):
    """Take six steps with a change before the fourth; return parameters, and state."""
    params, optimizer = make(device, schedule=[[3.4445, -4.775, 2.0315]] * 5)
    for step in range(6):
        give_gradients(params, step)
        if step == 3:
            change(params, optimizer)
        between(optimizer)
        optimizer.step()
    state = [x for p in params.values() for x in optimizer.state.get(p, {}).values()]
    return [p.detach() for p in params.values()], state


def forget(optimizer):
    optimizer._compiled = CompiledStep()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("change", [*TURNS, *MOVES, *ROUNDS], ids=lambda change: change.__name__)
def test_a_change_between_steps_counts_in_the_next_one(change, device):
    params, state = run(device, change)
    for found, expected in zip((params, state), run(device, change, forget), strict=True):
        assert len(found) == len(expected)
        assert all(map(torch.equal, found, expected))
    same = all(map(torch.equal, params, run(device)[0]))
    assert change not in TURNS or not same
    assert change not in MOVES or same


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ["b.matrix", "a.bias"])
@pytest.mark.parametrize("steps", [0, 3])
def test_a_sparse_gradient_is_refused_before_anything_changes(name, device, steps):
    params, optimizer = make(device)
    for step in range(steps):
        give_gradients(params, step)
        optimizer.step()
    give_gradients(params, steps)
    before = [p.detach().clone() for p in params.values()]
    params[name].grad = params[name].grad.to_sparse()
    with pytest.raises(InvalidGradientError, match=rf"'{name}' is sparse.*sparse=False"):
        optimizer.step()
    assert all(torch.equal(p, q) for p, q in zip(before, params.values(), strict=True))


def test_an_unchanged_step_is_not_compiled_again():
    params, optimizer = make()
    for step in range(3):
        give_gradients(params, step)
        optimizer.step()
        optimizer.param_groups[0]["lr"] /= 2  # read anew anyhow
        if step == 0:
            first = optimizer._compiled._snapshot
    assert optimizer._compiled._snapshot is first
    assert optimizer.state[nn.Parameter(torch.zeros(1))] == {}  # a look makes an entry
    optimizer.step()
    assert optimizer._compiled._snapshot is not first


class Scaled(HybridMuon):
    """A step of somebody else's around ours."""

    def step(self, closure=None):
        """Do nothing but step."""
        return super().step(closure)


@pytest.mark.parametrize("kind", [HybridMuon, Scaled])
def test_profilers_and_hooks_see_each_step_once(kind):
    make()[1].step()
    params, _ = make()
    optimizer = kind(params.items())
    calls = []
    handles = [
        optimizer.register_step_pre_hook(lambda *_: calls.append("before")),
        optimizer.register_step_post_hook(lambda *_: calls.append("after")),
        register_optimizer_step_pre_hook(lambda *_: calls.append("before any")),
        register_optimizer_step_post_hook(lambda *_: calls.append("after any")),
    ]
    give_gradients(params, 0)
    optimizer.step()
    assert calls == ["before any", "before", "after", "after any"]
    for handle in handles:
        handle.remove()
    optimizer.step()
    assert len(calls) == 4
    with profile(activities=[ProfilerActivity.CPU]) as record:
        optimizer.step()
        optimizer.step()
    ranges = [e.name for e in record.events() if e.name.startswith("Optimizer.step")]
    assert ranges == [f"Optimizer.step#{kind.__name__}.step"] * 2


def test_a_hook_may_change_what_the_step_is_given():
    params, optimizer = make()
    calls = []
    optimizer.register_step_pre_hook(
        lambda *_: ((optimizer, lambda: calls.append("closure") or 3.0), {})
    )
    give_gradients(params, 0)
    assert optimizer.step() == 3.0
    assert calls == ["closure"]
