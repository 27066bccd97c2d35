"""Rules of the Muon route: their state in every situation, and rules of other packages."""

from __future__ import annotations

import copy
import dataclasses

import pytest
import torch
from example_rules import BRAKE, MAX_DIM, SOAP, SoapMuon, next_basis
from optim_definition import define
from polar_oracle import oracle
from torch import nn

from deepmd_muon.optim import (
    HybridMuon,
    HybridMuonConfig,
    InvalidSettingError,
    RoutingMismatchError,
)
from deepmd_muon.optim.routing.views import MatrixView
from deepmd_muon.optim.rules import registry
from deepmd_muon.optim.rules.interface import MatrixRule, StateTensor
from deepmd_muon.optim.rules.registry import matrix_rules, register_rule

BETA, BETA2, LR, DECAY = 0.95, 0.9, 0.05, 0.3
ON = {"normuon": True, "normuon_beta": BETA2, "cautious_decay": True}
SHAPES = [(5, 9), (9, 5), (3, 4, 6), (2, 3, 4, 5), (6, 6), (7,)]


def random(shape, seed, dtype=torch.float64):
    return torch.randn(
        shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    ).to(dtype)


def make(shapes=SHAPES, dtype=torch.float64, **settings):
    params = {f"w{i}": nn.Parameter(random(shape, i, dtype)) for i, shape in enumerate(shapes)}
    options = {"precision": "float64", "normuon_beta": BETA2, **settings}
    return params, HybridMuon(params.items(), LR, BETA, DECAY, **options)


def give(params, step, dtype=torch.float64):
    for i, p in enumerate(params.values()):
        p.grad = random(p.shape, 100 + 10 * step + i, dtype)


def test_soap_finds_the_eigenvectors():
    base = torch.linalg.qr(random((1, 30, 30), 1))[0]
    covariance = base * torch.logspace(0, -3, 30, dtype=torch.float64).unsqueeze(0) @ base.mT
    basis = torch.zeros_like(covariance)
    for _ in range(200):
        basis = next_basis(covariance, basis)
    p = basis + torch.eye(30, dtype=torch.float64)
    torch.testing.assert_close(
        p.mT @ p, torch.eye(30, dtype=torch.float64).unsqueeze(0), rtol=0, atol=1e-6
    )
    rotated = p.mT @ covariance @ p
    d = rotated.diagonal(dim1=1, dim2=2)
    torch.testing.assert_close(
        d.sort(descending=True).values[0],
        torch.logspace(0, -3, 30, dtype=torch.float64),
        rtol=1e-4,
        atol=0,
    )


def test_long_sides_are_not_rotated():
    tensors = SoapMuon().tensors()
    view = MatrixView(2, MAX_DIM + 1, 3)
    shapes = {key: x.shape_for(view.shape, view) for key, x in tensors.items()}
    assert shapes["soap_left"] == shapes["soap_left_basis"] == (2, MAX_DIM + 1, 0)
    assert shapes["soap_right"] == (2, 3, 3)
    p = nn.Parameter(random((MAX_DIM + 1, 3), 1, torch.float32))
    optimizer = HybridMuon([("w", p)], LR, **SOAP)
    p.grad = random(p.shape, 2, torch.float32)
    optimizer.step()
    again = HybridMuon([("w", p)], LR, **SOAP)
    again.load_state_dict(optimizer.state_dict())
    assert p.isfinite().all()


@pytest.mark.parametrize("rule", [ON, {**SOAP, **ON}, BRAKE, {**SOAP, "magma_muon": False}])
@pytest.mark.parametrize("weights", [0.0, 1.0])
def test_zeros_leave_numbers(rule, weights):
    params, optimizer = make(**rule)
    for p in params.values():
        p.data *= weights
        p.grad = torch.zeros_like(p) if weights else torch.ones_like(p)
    optimizer.step()
    assert all(p.isfinite().all() for p in params.values())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_state_is_one_number_per_neuron(dtype):
    params, optimizer = make(dtype=dtype, splits=["w1: columns 1+4"], **ON)
    give(params, 0, dtype)
    optimizer.step()
    wide = torch.promote_types(dtype, torch.float32)
    found = {name: optimizer.state[p].get("second_moment_of_rows") for name, p in params.items()}
    assert {name: x if x is None else tuple(x.shape) for name, x in found.items()} == {
        "w0": (5, 1), "w1": (9, 2), "w2": (3, 4, 1), "w3": (2, 3, 4, 1), "w4": (6, 1), "w5": None,
    }  # fmt: skip
    assert all(x is None or x.dtype == wide for x in found.values())


def reloaded(params, saved, **settings):
    optimizer = HybridMuon(
        params.items(), LR, BETA, DECAY, on_route_change="migrate", **{**ON, **settings}
    )
    optimizer.load_state_dict(saved.state_dict())
    return optimizer


def test_moments_restart_after_another_route_and_follow_views(caplog):
    params, saved = make([(3, 4, 5)], **ON)
    (p,) = params.values()
    give(params, 0)
    saved.step()
    before = saved.state[p]["second_moment_of_rows"]
    assert before.shape == (3, 4, 1)
    flat = reloaded(params, saved, muon_mode="flat")
    assert torch.equal(
        flat.state[p]["second_moment_of_rows"], before
    )  # twelve rows are twelve rows
    parted = reloaded(params, saved, splits=["w0: columns 2+3"])
    assert torch.equal(parted.state[p]["second_moment_of_rows"], before.expand(3, 4, 2))
    back = reloaded(params, parted)
    torch.testing.assert_close(back.state[p]["second_moment_of_rows"], before, rtol=1e-15, atol=0)
    other = reloaded(params, saved, layout="in_out")
    assert "second_moment_of_rows" not in other.state[p]
    assert any(
        text.startswith("normuon keeps other state now: the saved second_moment")
        for text in caplog.messages
    )
    adam = reloaded(params, saved, adam_patterns=["w0"])
    assert set(adam.state[p]) == {"step", "exp_avg", "exp_avg_sq"}
    muon = reloaded(params, adam)
    assert set(muon.state[p]) == {"momentum_buffer"}
    m = muon.state[p]["momentum_buffer"].clone()
    chosen = {"lr": LR, "momentum": BETA, "weight_decay": DECAY, **ON}
    defined = define(muon.routing[0], p, chosen)
    defined.m = m
    give(params, 1)
    defined.step(p.grad)
    muon.step()
    torch.testing.assert_close(p.detach(), defined.p, rtol=0, atol=1e-4)


def test_vectors_of_rows_restart_with_another_view(caplog):
    soap = {**SOAP, "magma_muon": False}
    params, saved = make([(3, 4, 5)], **soap)
    (p,) = params.values()
    give(params, 0)
    saved.step()
    assert saved.state[p]["soap_left"].shape == (3, 4, 4)
    flat = reloaded(params, saved, normuon=False, muon_mode="flat", **soap)
    assert set(flat.state[p]) == {"momentum_buffer"}
    assert any("soap_second_moment restarts" in text for text in caplog.messages)
    give(params, 1)
    flat.step()
    assert flat.state[p]["soap_left"].shape == (3, 4, 12)
    split = reloaded(params, flat, normuon=False, splits=["w0: rows 1+3"], **soap)
    split.step()
    assert split.state[p]["soap_left"].shape == (3, 4, 3)  # the longer part's
    assert split.state[p]["soap_right"].shape == (3, 5, 10)  # one of 5 for each part
    split.load_state_dict(copy.deepcopy(split.state_dict()))


def test_a_saved_state_is_complete_before_the_first_step_of_a_route():
    params, saved = make([(3, 4)], adam_patterns=["w0"], **ON)
    give(params, 0)
    saved.step()
    muon = reloaded(params, saved)
    state = muon.state_dict()["state"][0]
    assert state.keys() == {"momentum_buffer", "magma_score", "second_moment_of_rows"}
    reloaded(params, muon)


@pytest.mark.parametrize("key", ["magma_score", "second_moment_of_rows"])
def test_missing_renamed_and_misshapen_tensors_are_errors_that_name_the_parameter(key):
    params, optimizer = make([(4, 6), (3, 2)], **ON)
    give(params, 0)
    optimizer.step()

    def damaged(change):
        saved = copy.deepcopy(optimizer.state_dict())
        change(saved["state"][1])
        with pytest.raises(RoutingMismatchError) as caught:
            make([(4, 6), (3, 2)], **ON)[1].load_state_dict(saved)
        return caught.value.differences

    assert damaged(lambda values: values.pop(key)) == (
        f"w1: state '{key}' is missing on route muon",
    )
    lines = damaged(lambda values: values.update({f"{key}s": values.pop(key)}))
    assert lines == (
        f"w1: unexpected state '{key}s' on route muon",
        f"w1: state '{key}' is missing on route muon",
    )
    (line,) = damaged(lambda values: values.update({key: torch.zeros(5)}))
    assert line.startswith(f"w1: {key} has shape (5,)")


def test_a_rule_switched_off_drops_its_state(caplog):
    params, optimizer = make([(4, 6)], **ON)
    give(params, 0)
    optimizer.step()
    saved = copy.deepcopy(optimizer.state_dict())
    optimizer.param_groups[0]["normuon"] = False
    optimizer.step()
    assert set(optimizer.state[params["w0"]]) == {"momentum_buffer", "magma_score"}
    assert caplog.messages == ["w0: its state second_moment_of_rows is dropped: normuon is off now"]
    make([(4, 6)])[1].load_state_dict(saved)
    assert (
        "normuon is off now: the saved second_moment_of_rows of 1 parameters is dropped"
        in caplog.messages[1:]
    )
    optimizer.param_groups[0]["normuon"] = True
    optimizer.step()
    assert optimizer.state[params["w0"]]["second_moment_of_rows"].shape == (4, 1)


def test_fused_steps_say_which_rules_they_do_not_know(caplog):
    pytest.importorskip("triton")
    from deepmd_muon.optim.update.fused_steps import FusedStepCache, fuses
    from deepmd_muon.optim.update.gradients import StepControl

    assert fuses(HybridMuonConfig().explicit(), torch.float32)
    assert fuses(HybridMuonConfig(magma_muon=False).explicit(), torch.bfloat16)
    masters = HybridMuonConfig(master_weights=True).explicit()
    assert fuses(masters, torch.float32)  # which has none
    assert not fuses(masters, torch.bfloat16)
    given = HybridMuonConfig(**ON, momentum=0.7).explicit()
    with caplog.at_level("INFO", logger="deepmd_muon"):
        done = FusedStepCache().step(
            [torch.zeros(2, 2)], [], {}, [], lr=0.1, settings=given, control=StepControl()
        )
    assert done is False
    assert any("normuon, cautious_decay" in text for text in caplog.messages)


@dataclasses.dataclass(frozen=True)
class Signs(MatrixRule):
    """Orthogonalize signs, and multiply by how often the gradient has been largest in its first element."""

    name = "signs"
    sums = 2

    def tensors(self):
        return {"sign_count": StateTensor("blocks", "float32", 1.0)}

    def measure(self, pieces, device):
        rows = [
            (g.reshape(shape).double().square().sum(1), torch.ones(shape[0]))
            for _, g, shape in pieces
        ]
        return torch.cat([torch.stack(row, dim=1) for row in rows])

    def combine(self, sums):
        return sums[..., 0].sum(dim=1).sqrt()

    def before(self, directions, state):
        return [torch.sign(u) for u in directions]

    def advance(self, polar, state, measured):
        return {
            "sign_count": [
                x + y.float() for x, y in zip(state["sign_count"], measured, strict=True)
            ]
        }

    def factors(self, polar, state):
        return [x.view(-1, 1, 1) for x in state["sign_count"]]


@pytest.fixture
def _registered(monkeypatch):
    monkeypatch.setattr(registry, "_REGISTERED", {})
    register_rule(Signs())
    yield
    matrix_rules.cache_clear()


@pytest.mark.usefixtures("_registered")
def test_rules_of_other_packages_are_chosen_by_name():
    p = nn.Parameter(random((2, 4, 6), 1))
    before = p.detach().clone()
    optimizer = HybridMuon(
        [("w", p)], 0.1, weight_decay=0.0, scaling="none", magma_muon=False, rules=["signs"]
    )
    g = p.grad = random((2, 4, 6), 2)
    optimizer.step()
    norms = g.flatten(1).norm(dim=1)
    torch.testing.assert_close(optimizer.state[p]["sign_count"], 1.0 + norms.float())
    expected = before - 0.1 * (1.0 + norms).view(-1, 1, 1) * oracle(torch.sign(g))
    torch.testing.assert_close(p.detach(), expected, rtol=0, atol=1e-4)
    saved = optimizer.state_dict()
    registry._REGISTERED.clear()
    matrix_rules.cache_clear()
    with pytest.raises(RoutingMismatchError, match="w: unexpected state 'sign_count'"):
        HybridMuon([("w", p)]).load_state_dict(saved)


@pytest.mark.usefixtures("_registered")
def test_names_and_keys_belong_to_one_rule():
    with pytest.raises(
        InvalidSettingError, match=r"no rule is registered as 'sings'; registered are 'signs'"
    ):
        HybridMuon([("w", nn.Parameter(random((2, 2), 1)))], rules=["sings"])
    with pytest.raises(InvalidSettingError, match="no rule is registered as 'sings'"):
        matrix_rules(HybridMuonConfig(rules=("sings",)))
    register_rule(Signs())  # again, as a notebook does

    class Other(Signs):
        name = "other"

    with pytest.raises(
        InvalidSettingError, match="'other' and 'signs' both have the state sign_count"
    ):
        register_rule(Other())

    class Whole(MatrixRule):
        name = "whole"

        def tensors(self):
            return {"square": StateTensor("parameter", "moment")}

    with pytest.raises(InvalidSettingError, match="'square' of 'whole' has the extent 'parameter'"):
        register_rule(Whole())

    class Taken(MatrixRule):
        name = "normuon"

    with pytest.raises(InvalidSettingError, match="'normuon' is the name of another rule"):
        register_rule(Taken())
