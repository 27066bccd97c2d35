"""One table of settings, compared with the definition of a step and with every way of stepping.

Every case is trained plainly and in every way, and parameters and state are compared. A new
setting needs a line in `CASES` or `NUMBERS`, and its formula in `optim_definition`.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import pickle
from functools import partial
from typing import Any

import pytest
import recent_rules  # noqa: F401  # registers them
import torch
from example_rules import BRAKE, SOAP
from hypothesis import given, settings
from hypothesis import strategies as st
from optim_builders import assert_same, lay_out, random, through_file
from optim_definition import define
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
    "tall": (9, 5),
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
    "adam in lists": Case({**ADAM, "adam_implementation": "foreach"}),
    "adam one by one": Case({**ADAM, "adam_implementation": "for-loop"}, torch.bfloat16),
    "rate in a tensor": Case({"lr": torch.tensor(0.02)}),
    "2d": Case({"muon_mode": "2d"}),
    "flat": Case({"muon_mode": "flat"}),
    "blocks": Case(
        {"splits": ["wide: rows 4+2"], "conv_patterns": ["conv"], "expert_patterns": ["experts"]}
    ),
    "deepmd-kit's schedule": Case({"schedule": "deepmd-kit"}),
    "normuon": Case({"normuon": True, "layout": "in_out", "splits": ["wide: rows 4+2"]}),
    "cautious": Case({"cautious_decay": True, "normuon": True, "magma_muon": False}),
    "soap": Case(SOAP),
    "soap and normuon": Case({**SOAP, "normuon": True, "magma_muon": False}),
    "brake": Case(BRAKE),
    "soap and brake": Case({"rules": ["soap_muon", "radial_brake"], "magma_muon": False}),
    "recent rules": Case({"rules": ["mars", "contra", "ema_nesterov"], "magma_muon": False}),
}
# Settings and dtypes that no way of stepping treats apart from others.
NUMBERS = {
    "no damping": Case({"magma_muon": False}),
    "plain momentum": Case({"nesterov": False, "momentum": 0.8}),
    "masters of float16": Case({"master_weights": True}, torch.float16),
    "float16": Case(dtype=torch.float16),
    "adam": Case({"adam_betas": (0.5, 0.9), "adam_eps": 1e-3, "adam_lr_ratio": 0.3}),
    "adamw": Case({"vector_route": "adamw", "adam_weight_decay": 0.7}),
    "schedule of triples": Case({"schedule": [(3.4445, -4.7750, 2.0315)] * 5}),
    "schedule for large ones": Case({"large_schedule": "polar-express-5", "large_matrix_dim": 5}),
    "no scaling": Case({"scaling": "none"}),
    "spectral": Case({"scaling": "spectral", "layout": "in_out"}),
    "rectangular": Case({"scaling": "rectangular"}),
    "rectangular columns": Case({"scaling": "rectangular", "layout": "in_out"}),
    "coefficient": Case({"lr_adjust_coeff": 0.4}),
}
# Tested against deepmd-kit itself, and against programs in test_optim_recent_rules.
UNDEFINED = {"deepmd-kit's schedule", "recent rules"}
VIEWS = {
    "slices": {},
    "uphill": {"maximize": True},
    "flat": {"muon_mode": "flat"},
    "parts": {"splits": ["wide: rows 2+4", "tall: columns 1+4"]},
    "groups": {"splits": ["wide: rows 4+2 in 2 groups", "tall: columns 3+2 in 1 groups"]},
    "matrices": {
        "muon_mode": "flat",
        "conv_patterns": ["conv"],
        "expert_patterns": ["experts"],
        "splits": ["experts: columns 2+3"],
    },
}
RULES = [
    {"normuon": True, "magma_muon": False},
    {"normuon": True, "normuon_beta": 0.9, "layout": "in_out"},
    {"cautious_decay": True, "magma_muon": False},
    {"cautious_decay": True, "normuon": True},
    SOAP,
    {**SOAP, "normuon": True, "magma_muon": False},
    BRAKE,
    {"rules": ["soap_muon", "radial_brake"], "magma_muon": False},
]


class Net(nn.Module):
    """Parameters of the shapes that routes and rules distinguish."""

    def __init__(self, dtype, seed=0):
        super().__init__()
        for number, (name, shape) in enumerate(SHAPES.items()):
            start = random(*shape, seed=100 * seed + number, dtype=torch.float64)
            self.register_parameter(name, nn.Parameter(start.to(dtype)))


def settings_of(case):
    return {"lr": 0.02, "weight_decay": 0.1, **case.settings}


def make(case, *, seed=0, **more):
    model = Net(case.dtype, seed)
    return model, HybridMuon(model.named_parameters(), **{**settings_of(case), **more})


@functools.cache
def gradient(name, step):
    number = 1000 + 10 * step + list(SHAPES).index(name)
    return random(*SHAPES[name], seed=number, dtype=torch.float64)


def give_gradients(model, step):
    for name, p in model.named_parameters():
        # A parameter without a gradient now and then, as an expert that no token chose.
        has_gradient = name != "twin" or step not in (2, 3)
        p.grad = gradient(name, step).to(p.dtype, copy=True) if has_gradient else None


def train(model, optimizer, *steps):
    for step in steps or range(STEPS):
        give_gradients(model, step)
        optimizer.step()


def trained_as_defined(case, steps):
    """Train a model, and the definition of each of its parameters on the same gradients."""
    model, optimizer = make(case)
    defined = {
        entry.name: define(entry, model.get_parameter(entry.name), settings_of(case))
        for entry in optimizer.routing
    }
    for step in range(steps):
        give_gradients(model, step)
        for name, p in model.named_parameters():
            if p.grad is not None:
                defined[name].step(p.grad)
        optimizer.step()
    return model, optimizer, defined


def assert_as_defined(case, *, muon, adam, steps=STEPS):
    """Compare weights, or their masters, within absolute tolerances of both kinds of routes."""
    model, optimizer, defined = trained_as_defined(case, steps)
    for entry in optimizer.routing:
        p = model.get_parameter(entry.name)
        weight = optimizer.state[p].get("master_weight", p.detach())
        assert torch.equal(p, weight.to(p.dtype))
        tolerance = muon if entry.route == "muon" else adam
        torch.testing.assert_close(weight.double(), defined[entry.name].p, rtol=0, atol=tolerance)


@pytest.mark.parametrize("name", [name for name in CASES | NUMBERS if name not in UNDEFINED])
def test_a_case_takes_the_steps_of_its_definition(name):
    case = (CASES | NUMBERS)[name]
    narrow = case.dtype.itemsize == 2 and not case.settings.get("master_weights")
    tolerance = 4 * torch.finfo(case.dtype).eps if narrow else 1e-5
    muon = 1e-4 if "soap_muon" in case.settings.get("rules", ()) else tolerance
    adam = 1e-14 if case.dtype == torch.float64 else tolerance
    assert_as_defined(case, muon=muon, adam=adam)


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("rule", RULES)
def test_a_rule_takes_the_steps_of_its_definition_in_every_view(rule, view):
    more = {"lr": 0.05, "weight_decay": 0.3, "precision": "float64"}
    case = Case({**rule, **VIEWS[view], **more}, torch.float64)
    muon = 1e-4 if "soap_muon" in rule.get("rules", ()) else 2e-5
    assert_as_defined(case, muon=muon, adam=1e-14, steps=4)


@given(
    shape=st.tuples(st.integers(1, 3), st.integers(1, 9), st.integers(1, 9)),
    rule=st.sampled_from(RULES),
    seed=st.integers(0, 99),
)
@settings(max_examples=20, deadline=None)
def test_rules_take_the_steps_of_their_definition_in_any_shape(shape, rule, seed):
    p = nn.Parameter(random(*shape, seed=seed, dtype=torch.float64))
    chosen = {"lr": 0.05, "weight_decay": 0.3, "precision": "float64", **rule}
    optimizer = HybridMuon([("w", p)], **chosen)
    defined = define(optimizer.routing[0], p, chosen)
    for step in range(2):
        p.grad = random(*shape, seed=1000 + seed + step, dtype=torch.float64)
        defined.step(p.grad)
        optimizer.step()
    # The iteration's singular values end within 1e-3 of 1 however small they begin.
    torch.testing.assert_close(p.detach(), defined.p, rtol=0, atol=2e-3)


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


def with_settings(case, **more):
    made = make(case, **more)
    train(*made)
    return made


def restarted(case, *, before, after):
    """Stop after three steps; load weights and state from a file over other weights."""
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
    other = HybridMuon(wrapped[::-1], **settings_of(case))
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


def replaced(case, *, between, offload=False):
    """Put the parameters of a copied model into the optimizer, which finds their state by name."""
    model, optimizer = make(case, offload=offload)
    train(model, optimizer, 0, 1, 2)
    other = copy.deepcopy(model)
    (group,) = optimizer.param_groups
    group["params"] = [other.get_parameter(name) for name in group["param_names"]]
    between(optimizer)
    train(other, optimizer, 3, 4, 5)
    assert set(optimizer.state) == set(other.parameters())
    return other, optimizer


def with_another_default_device(case):
    """As where a GPU is the default, which gets tensors for the host: "meta" holds no numbers."""
    model, optimizer = make(case)
    with torch.device("meta"):
        for step in range(STEPS):
            with torch.device("cpu"):
                give_gradients(model, step)
            optimizer.step()
            if step == 1:
                optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    return model, optimizer


def with_changed_gradients(case, change, **more):
    model, optimizer = make(case, **more)
    for step in range(STEPS):
        give_gradients(model, step)
        for p in model.parameters():
            p.grad = None if p.grad is None else change(p.grad)
        optimizer.step()
    return model, optimizer


def laid_out(case, *, parameters=None, gradients=None, state=None):
    """Keep parameters, gradients, and before the fourth step the state, in other layouts."""
    model, optimizer = make(case)
    for p in model.parameters():
        p.data = lay_out(p.data, parameters)
    for step in range(STEPS):
        give_gradients(model, step)
        for p in model.parameters():
            p.grad = None if p.grad is None else lay_out(p.grad, gradients)
            for key, x in optimizer.state[p].items() if step == 3 and state else ():
                if key in ALL_MOMENTS:
                    optimizer.state[p][key] = lay_out(x, state)
        optimizer.step()
    return model, optimizer


def restarted_in_another_layout(case, *, layout, offload=False):
    """Load a state of contiguous tensors; moments get the layout of their parameter."""
    model, optimizer = make(case)
    train(model, optimizer, 0, 1, 2)
    resumed, second = make(case, seed=7, offload=offload)
    resumed.load_state_dict(model.state_dict())
    for p in resumed.parameters():
        p.data = lay_out(p.data, layout)
    second.load_state_dict(through_file(optimizer.state_dict()))
    for p in resumed.parameters():
        for key, x in second.state[p].items():
            assert key not in ALL_MOMENTS or x.stride() == lay_out(p.detach(), layout).stride()
    train(resumed, second, 3, 4, 5)
    return resumed, second


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
    "restarted": partial(restarted, before={}, after={}),
    "restarted from host memory": partial(restarted, before={"offload": True}, after={}),
    "restarted into host memory": partial(restarted, before={}, after={"offload": True}),
    "restarted by name": restarted_by_name,
    "restarted by torch": partial(restarted_by_torch, full=False),
    "restarted by torch, full": partial(restarted_by_torch, full=True),
    "copied in host memory": partial(copied, clone=copy.deepcopy, offload=True),
    "pickled": partial(copied, clone=lambda pair: pickle.loads(pickle.dumps(pair))),
    "replaced": partial(replaced, between=lambda _: None),
    "another default device": with_another_default_device,
    "pending signs": partial(with_changed_gradients, change=lambda g: torch._neg_view(-g)),
}
# These multiply matrices in other batches, divide by a scale, or choose between two results on the
# device.
CLOSE = {
    "offloaded in batches": partial(with_settings, offload=True, offload_bytes=700),
    "one at a time": partial(with_settings, workspace=1),
    "skipping": skipping,
    "scaled": scaled,
}
LAYOUTS = {
    **{
        f"{part} {layout}": partial(laid_out, **{part: layout})
        for part in ("parameters", "gradients", "state")
        for layout in ("channels last", "transposed", "columns", "every second")
    },
    "restarted in channels last": partial(restarted_in_another_layout, layout="channels last"),
    "restarted transposed": partial(restarted_in_another_layout, layout="transposed", offload=True),
    "all every second": partial(
        laid_out, parameters="every second", gradients="every second", state="every second"
    ),
}


@functools.cache
def plain(name):
    made = make(CASES[name])
    train(*made)
    return made


@pytest.mark.parametrize("way", EXACT)
@pytest.mark.parametrize("case", CASES)
def test_every_way_takes_the_same_steps(case, way):
    assert_same(plain(case), EXACT[way](CASES[case]))


@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("between", [HybridMuon.state_dict, copy.deepcopy, HybridMuon.offload])
def test_replaced_parameters_keep_their_state_when_something_reads_it_first(between, offload):
    assert_same(plain("defaults"), replaced(Case(), between=between, offload=offload))


def assert_close(pair, expected, tolerance):
    """Compare the parameters of two models, and their optimizers' states, as pairs."""
    (model, optimizer), (other, by) = pair, expected
    for name, p in model.named_parameters():
        q = other.get_parameter(name)
        torch.testing.assert_close(p, q, rtol=tolerance, atol=tolerance)
        assert {key: x.dtype for key, x in optimizer.state[p].items()} == {
            key: x.dtype for key, x in by.state[q].items()
        }


@pytest.mark.parametrize("way", CLOSE)
@pytest.mark.parametrize("case", CASES)
def test_every_way_takes_steps_as_close_as_rounding(case, way):
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-6}.get(CASES[case].dtype, 2e-2)
    assert_close(CLOSE[way](CASES[case]), plain(case), tolerance)


@pytest.mark.parametrize("way", LAYOUTS)
@pytest.mark.parametrize(
    "case", ["defaults", "bfloat16", "adam in lists", "2d", "soap and normuon"]
)
def test_layouts_in_memory_do_not_matter(case, way):
    pair, expected = LAYOUTS[way](CASES[case]), plain(case)
    tolerance = 1e-2 if CASES[case].dtype.itemsize == 2 else 1e-5
    assert_close(pair, expected, tolerance)
    for name, p in pair[0].named_parameters():
        for key, x in expected[1].state[expected[0].get_parameter(name)].items():
            found = pair[1].state[p][key]
            torch.testing.assert_close(found, x, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("settings", [{}, ADAM, {"adamw_patterns": ["*"]}])
def test_neighbours_in_memory_and_expanded_gradients_are_left_alone(settings):
    table = torch.arange(12.0).view(3, 4)
    before = table.clone()
    p, twin = nn.Parameter(table[:, 1:3]), nn.Parameter(table[:, 1:3].clone())
    for q, grad in ((p, torch.ones(1, 1).expand(3, 2)), (twin, torch.ones(3, 2))):
        optimizer = HybridMuon([("w", q)], 0.1, **settings)
        q.grad = grad
        optimizer.step()
    assert torch.equal(p, twin)
    assert not torch.equal(p, before[:, 1:3])
    assert torch.equal(table[:, [0, 3]], before[:, [0, 3]])
