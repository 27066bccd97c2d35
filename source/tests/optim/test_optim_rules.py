"""Rules of the Muon route against independent definitions in float64, and their state in every situation."""

from __future__ import annotations

import copy
import dataclasses
import itertools

import pytest
import torch
from example_rules import BRAKE, MAX_DIM, SOAP, RadialBrake, SoapMuon, next_basis
from hypothesis import given, settings
from hypothesis import strategies as st
from polar_oracle import oracle
from test_optim_step import magma_factor
from torch import nn

from deepmd_muon.argcheck.check import check
from deepmd_muon.optim import (
    HybridMuon,
    HybridMuonConfig,
    InvalidSettingError,
    MuonConfig,
    RoutingMismatchError,
)
from deepmd_muon.optim.config import update_scale
from deepmd_muon.optim.routing.views import MatrixView
from deepmd_muon.optim.rules import registry
from deepmd_muon.optim.rules.interface import MatrixRule, StateTensor
from deepmd_muon.optim.rules.registry import matrix_rules, register_rule

BETA, BETA2, LR, DECAY = 0.95, 0.9, 0.05, 0.3
ON = {"normuon": True, "normuon_beta": BETA2, "cautious_decay": True}
SHAPES = [(5, 9), (9, 5), (3, 4, 6), (2, 3, 4, 5), (6, 6), (7,)]
RULES = [
    {"normuon": True, "magma_muon": False},
    {"normuon": True, "layout": "in_out"},
    {"cautious_decay": True, "magma_muon": False},
    {"cautious_decay": True, "normuon": True},
    SOAP,
    {**SOAP, "normuon": True, "magma_muon": False},
    BRAKE,
    {"rules": ["soap_muon", "radial_brake"], "magma_muon": False},
]


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


class Soap:
    """SOAP's part of a block, its bases turned element by element and made orthogonal by an SVD."""

    def __init__(self, rows, columns):
        self.covariances = [torch.zeros(n, n, dtype=torch.float64) for n in (rows, columns)]
        self.bases = [torch.eye(n, dtype=torch.float64) for n in (rows, columns)]
        self.v = torch.zeros(rows, columns, dtype=torch.float64)

    def divided(self, u, g):
        p, q = self.bases
        rotated = torch.einsum("ia,ij,jb->ab", p, u, q)
        self.v = 0.9 * self.v + 0.1 * rotated**2
        root = self.v.sqrt()
        found = torch.einsum("ia,ab,jb->ij", p, rotated / (root + 1e-5 * root.max()), q)
        for side, x in enumerate((g, g.T)):
            self.covariances[side] = 0.9 * self.covariances[side] + 0.1 * x @ x.T
            self.bases[side] = self.turned(self.covariances[side], self.bases[side])
        return found

    @staticmethod
    def turned(covariance, basis):
        a = basis.T @ covariance @ basis
        s = torch.zeros_like(a)
        for i, j in itertools.product(range(len(a)), repeat=2):
            if a[i, i] < a[j, j]:
                s[i, j] = a[i, j] / (a[j, j] + 1e-5 * a.diagonal().max())
                s[j, i] = -s[i, j]
        norm = min(s.abs().sum(dim=1).max().item(), s.norm().item() / 2**0.5)
        left, _, right = torch.linalg.svd(basis + basis @ s / max(1.0, norm))
        return left @ right


class Definition:
    """One parameter of the Muon route, block by block, with an SVD for the polar factor."""

    def __init__(self, p, view, given):
        self.p, self.view, self.settings = (
            p.detach().double().clone(),
            view,
            HybridMuonConfig(**given).explicit(),
        )
        self.m = torch.zeros_like(self.p)
        self.moments, self.scores, self.soaps = {}, {}, {}

    def blocks(self, x):
        """Yield number and slice of every block of a tensor in storage order."""
        whole = x.reshape(self.view.shape)
        ends = [0, *itertools.accumulate(self.view.sizes)]
        for b in range(self.view.batch):
            for part in range(max(1, len(self.view.sizes))):
                inside = slice(ends[part], ends[part + 1]) if self.view.axis else slice(None)
                yield (
                    (b, part),
                    (whole[b][inside] if self.view.axis != "columns" else whole[b][:, inside]),
                )

    def step(self, g):
        own = self.settings
        self.m = BETA * self.m + (1 - BETA) * g
        u = BETA * self.m + (1 - BETA) * g
        update = torch.zeros(self.view.shape, dtype=torch.float64)
        everything = zip(
            self.blocks(u), self.blocks(self.m), self.blocks(g), self.blocks(update), strict=True
        )
        for (number, block), (_, m), (_, gradient), (_, into) in everything:
            if "soap_muon" in own.rules:
                block = self.soaps.setdefault(number, Soap(*block.shape)).divided(block, gradient)
            o = oracle(block[None])[0]
            if own.normuon:
                o = (
                    self.normalised(number, o.T).T
                    if own.layout == "in_out"
                    else self.normalised(number, o)
                )
            if own.magma_muon:
                self.scores[number], factor = magma_factor(
                    self.scores.get(number, 0.5), m, gradient
                )
                o = factor * o
            into.copy_(update_scale(tuple(o.shape), own) * o)
        update = update.reshape(self.p.shape)
        decaying = (update * self.p >= 0).double() if own.cautious_decay else 1.0
        if "radial_brake" in own.rules:
            for (_, w), (_, u) in zip(self.blocks(self.p), self.blocks(update), strict=True):
                u.copy_((w - self.controlled(w, w - LR * u)) / LR)
        self.p = self.p - LR * DECAY * decaying * self.p - LR * update

    def controlled(self, before, after):
        """Return the weights after a step, scaled to the norms that they may have."""
        old, new = (torch.linalg.vector_norm(x) for x in (before, after))
        wanted = torch.where(new > old, old + 0.5 * (new - old), new)
        return after * torch.where(old > 0, wanted / new, 1.0)

    def normalised(self, number, o):
        """Divide every row by the root of its second moment, and restore the norm."""
        v = self.moments.get(number, torch.zeros(len(o), dtype=torch.float64))
        v = self.moments[number] = BETA2 * v + (1 - BETA2) * o.square().mean(dim=1)
        changed = o / (v.sqrt() + 1e-10).unsqueeze(1)
        return changed * (o.norm() / changed.norm())


@pytest.mark.parametrize(
    "more", [{}, {"maximize": True}, {"splits": ["w0: rows 2+3", "w1: columns 1+4"]}]
)
@pytest.mark.parametrize("mode", ["2d", "flat", "slice"])
@pytest.mark.parametrize("rule", RULES)
def test_rules_follow_their_definition(rule, mode, more):
    params, optimizer = make(muon_mode=mode, **rule, **more)
    routed = [
        (params[entry.name], entry.view) for entry in optimizer.routing if entry.route == "muon"
    ]
    assert len(routed) == {"2d": 3}.get(mode, 5)
    given = {"normuon_beta": BETA2, **rule}
    defined = [Definition(p, view, given) for p, view in routed]
    for step in range(4):
        give(params, step)
        for each, (p, _) in zip(defined, routed, strict=True):
            each.step(-p.grad if more.get("maximize") else p.grad)
        optimizer.step()
    for each, (p, _) in zip(defined, routed, strict=True):
        torch.testing.assert_close(
            p.detach(), each.p, rtol=0, atol=1e-4 if "soap_muon" in rule.get("rules", ()) else 2e-5
        )


@pytest.mark.parametrize("shapes", [[(2, 5, 9), (1, 9, 5), (3, 5, 9)], [(1, 1, 3), (1, 3, 1)]])
def test_soap_divides_as_its_definition(shapes):
    rule = SoapMuon()
    views = [MatrixView(*shape) for shape in shapes]
    state = {
        key: [
            torch.zeros(x.shape_for(shape, view), dtype=torch.float64)
            for shape, view in zip(shapes, views, strict=True)
        ]
        for key, x in rule.tensors().items()
    }
    defined = [[Soap(*shape[1:]) for _ in range(shape[0])] for shape in shapes]
    for step in range(30):
        u, g = (
            [random(shape, 100 * step + 10 * i + k) for i, shape in enumerate(shapes)]
            for k in (1, 2)
        )
        cut = {
            key: [rule.tensors()[key].cut(x, v)[0] for x, v in zip(state[key], views, strict=True)]
            for key in state
        }
        found, new = rule.prepare(u, g, cut)
        for key, values in new.items():
            state[key] = [x.reshape(old.shape) for x, old in zip(values, state[key], strict=True)]
        for own, x, y, z in zip(defined, found, u, g, strict=True):
            expected = torch.stack(
                [each.divided(a, b) for each, a, b in zip(own, y, z, strict=True)]
            )
            torch.testing.assert_close(x, expected, rtol=0, atol=1e-4 * expected.abs().max().item())


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


@given(
    st.integers(1, 9),
    st.integers(1, 9),
    st.integers(1, 3),
    st.sampled_from(RULES),
    st.integers(0, 99),
)
@settings(max_examples=20, deadline=None)
def test_rules_follow_their_definition_in_any_shape(rows, columns, batch, rule, seed):
    p = nn.Parameter(random((batch, rows, columns), seed))
    optimizer = HybridMuon(
        [("w", p)], LR, BETA, DECAY, precision="float64", normuon_beta=BETA2, **rule
    )
    (entry,) = optimizer.routing
    if entry.route != "muon":
        return
    defined = Definition(p, entry.view, {"normuon_beta": BETA2, **rule})
    for step in range(2):
        p.grad = random(p.shape, 1000 + seed + step)
        defined.step(p.grad)
        optimizer.step()
    # The iteration's singular values end within 1e-3 of 1 however small they begin.
    torch.testing.assert_close(p.detach(), defined.p, rtol=0, atol=2e-3)


def test_the_norm_of_an_update_is_kept_and_neurons_become_alike():
    p = nn.Parameter(torch.zeros(30, 4, dtype=torch.float64))
    optimizer = HybridMuon(
        [("w", p)], 1.0, weight_decay=0.0, scaling="none", magma_muon=False, **ON
    )
    p.grad = random(p.shape, 3) * torch.logspace(-3, 0, 30, dtype=torch.float64).unsqueeze(1)
    optimizer.step()
    assert p.norm().item() == pytest.approx(2.0, rel=1e-3)  # of four singular values 1
    rows = p.detach().norm(dim=1)
    torch.testing.assert_close(rows, rows.mean().expand(30), rtol=1e-5, atol=0)


@pytest.mark.parametrize("rule", [ON, *RULES])
@pytest.mark.parametrize("weights", [0.0, 1.0])
def test_zeros_leave_numbers(rule, weights):
    params, optimizer = make(**rule)
    for p in params.values():
        p.data *= weights
        p.grad = torch.zeros_like(p) if weights else torch.ones_like(p)
    optimizer.step()
    assert all(p.isfinite().all() for p in params.values())


@pytest.fixture
def _whole_brake():
    register_rule(RadialBrake(brake=0.0))
    yield
    register_rule(RadialBrake())


@pytest.mark.usefixtures("_whole_brake")
def test_norms_do_not_grow_under_a_whole_brake():
    p = nn.Parameter(random((20, 12), 1, torch.float32))
    optimizer = HybridMuon([("w", p)], 0.1, weight_decay=0.0, **BRAKE)
    before = p.detach().norm()
    for step in range(50):
        p.grad = random(p.shape, step, torch.float32)
        optimizer.step()
        assert p.detach().norm() <= before * (1 + 1e-6)
        before = p.detach().norm()


@pytest.mark.usefixtures("_whole_brake")
def test_a_brake_lets_weights_shrink():
    found = []
    for own in ({}, BRAKE):
        for sign in (1, -1):
            p = nn.Parameter(random((6, 4), 1))
            optimizer = HybridMuon([("w", p)], 0.1, weight_decay=0.0, magma_muon=False, **own)
            before = p.norm().item()
            p.grad = sign * p.detach()
            optimizer.step()
            found.append(p.norm().item() / before)
    shrunk, grown, braked_shrunk, braked = found
    assert shrunk < 1 < grown
    assert (braked_shrunk, braked) == pytest.approx((shrunk, 1.0), rel=1e-9)


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
    defined = Definition(p, muon.routing[0].view, ON)
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


def test_groups_have_their_own_rules():
    one, two = nn.Parameter(random((4, 6), 1)), nn.Parameter(random((4, 6), 2))
    groups = [{"params": [("one", one)], **ON}, {"params": [("two", two)], "magma_muon": False}]
    optimizer = HybridMuon(groups, LR, BETA, DECAY, precision="float64")
    kept = one.detach().clone(), two.detach().clone()
    one.grad, two.grad = random((4, 6), 3), random((4, 6), 4)
    optimizer.step()
    assert [set(optimizer.state[p]) - {"momentum_buffer"} for p in (one, two)] == [
        {"magma_score", "second_moment_of_rows"},
        set(),
    ]
    for p, before, own in ((one, kept[0], ON), (two, kept[1], {"magma_muon": False})):
        defined = Definition(before, optimizer.routing[0].view, own)
        defined.step(p.grad)
        torch.testing.assert_close(p.detach(), defined.p, rtol=0, atol=2e-5)


def test_configurations_and_inputs_choose_rules():
    model = nn.Sequential(nn.Linear(4, 6))
    for config in (HybridMuonConfig(**ON), MuonConfig(**ON)):
        (group,) = config.build(model).param_groups
        assert [group[key] for key in ON] == list(ON.values())
    found = check(HybridMuonConfig, {"normuon": True, "normuon_beta": 0.9, "cautious_decay": True})
    assert [rule.name for rule in matrix_rules(found.settings)] == [
        "magma_muon",
        "normuon",
        "cautious_decay",
    ]
    bad = check(HybridMuonConfig, {"normuon": 1, "normuon_beta": 1.0})
    assert sorted(problem.path for problem in bad.problems) == ["normuon", "normuon_beta"]
    with pytest.raises(InvalidSettingError, match="normuon_beta: must be < 1"):
        make(**{**ON, "normuon_beta": 1.0})


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
