"""States of other Muons are brought along: torch's, K. Jordan's, Moonlight's and dion's.

torch's are built by torch; the others by programs of their formulas, in the layouts of their public sources
(github.com/KellerJordan/Muon muon.py, MoonshotAI/Moonlight examples/toy_train.py, microsoft/dion dion/muon.py).
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

from deepmd_muon.optim import (
    ForeignStateError,
    HybridMuon,
    MuonConfig,
    RoutingMismatchError,
    import_state,
)

BETA, BETAS, EPS, RATE, DECAY = 0.9, (0.8, 0.9), 1e-8, 0.02, 0.1
EXACT = [[1.875, -1.25, 0.375]] * 30  # the polar factor of a matrix of full rank


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3)).double()


def gradients(model, step):
    model.zero_grad()
    x = torch.randn(16, 5, generator=torch.Generator().manual_seed(step)).double()
    ((model(x) - x[:, :3]).square().mean()).backward()


def polar(x):
    u, _, v = torch.linalg.svd(x, full_matrices=False)
    return u @ v


class Sums:
    """A Muon whose momentum is m = β m + g, and AdamW for the rest, with the exact polar factor."""

    def __init__(self, model):
        self.params = sorted(model.parameters(), key=lambda p: p.ndim != 2)
        self.state = {}
        self.steps = 0

    def step(self):
        self.steps += 1
        for i, p in enumerate(self.params):
            with torch.no_grad():
                self.step_one(self.state.setdefault(i, {}), p, p.grad)

    def step_one(self, state, p, g):
        p.mul_(1 - RATE * DECAY)
        if p.ndim == 2:
            m = state["m"] = BETA * state.get("m", 0) + g
            p.sub_(RATE * 0.2 * max(p.shape) ** 0.5 * polar(g + BETA * m))
            return
        m = state["m"] = BETAS[0] * state.get("m", 0) + (1 - BETAS[0]) * g
        v = state["v"] = BETAS[1] * state.get("v", 0) + (1 - BETAS[1]) * g**2
        correction = [1 - beta**self.steps for beta in BETAS]
        p.sub_(RATE * (m / correction[0]) / ((v / correction[1]).sqrt() + EPS))

    def moonlight(self):
        group = {"lr": RATE, "wd": DECAY, "momentum": BETA, "nesterov": True, "ns_steps": 5}
        group |= {"adamw_betas": BETAS, "adamw_eps": EPS, "params": list(range(4))}
        state = {
            i: {"use_muon": True, "momentum_buffer": s["m"]}
            if "v" not in s
            else {"use_muon": False, "moment1": s["m"], "moment2": s["v"], "step": self.steps}
            for i, s in self.state.items()
        }
        return {"state": state, "param_groups": [group]}

    def dion(self):
        more = {
            "lr": RATE,
            "mu": BETA,
            "beta1": BETAS[0],
            "beta2": BETAS[1],
            "weight_decay": DECAY,
            "step": self.steps,
        }
        more |= {"epsilon": EPS, "nesterov": True, "flatten": False, "adjust_lr": "rms_norm"}
        groups = [
            {**more, "algorithm": "muon", "params": [0, 1]},
            {**more, "algorithm": "adamw", "params": [2, 3]},
        ]
        state = {
            i: {"momentum": s["m"], "variance": s["v"]} if "v" in s else {"momentum": s["m"]}
            for i, s in self.state.items()
        }
        return {"state": state, "param_groups": groups}

    def jordan(self):
        muon = {
            "lr": RATE,
            "momentum": BETA,
            "weight_decay": DECAY,
            "use_muon": True,
            "params": [0, 1],
        }
        adam = {
            "lr": RATE,
            "betas": BETAS,
            "eps": EPS,
            "weight_decay": DECAY,
            "use_muon": False,
            "params": [2, 3],
        }
        state = {
            i: {"exp_avg": s["m"], "exp_avg_sq": s["v"], "step": self.steps}
            if "v" in s
            else {"momentum_buffer": (1 - BETA) * s["m"]}
            for i, s in self.state.items()
        }
        return {"state": state, "param_groups": [adam, muon]}


def ours(model):
    words = {
        "momentum": BETA,
        "betas": BETAS,
        "eps": EPS,
        "weight_decay": DECAY,
        "vector_route": "adamw",
    }
    return MuonConfig(
        **words, adamw_patterns=(), scaling="match_rms", schedule=EXACT, precision="float64"
    ).build(model, RATE)


SORTED = ["0.weight", "2.weight", "0.bias", "2.bias"]


@pytest.mark.parametrize("kind", ["moonlight", "dion", "jordan"])
def test_training_goes_on_as_the_other_muon_would(kind):
    model, twin = make_model(), make_model()
    peer = Sums(model)
    for step in range(4):
        gradients(model, step)
        peer.step()
    twin.load_state_dict(model.state_dict())
    optimizer = ours(twin)
    names = [*SORTED[2:], *SORTED[:2]] if kind == "jordan" else SORTED  # in the order of its groups
    optimizer.load_state_dict(import_state(getattr(peer, kind)(), names=names))
    assert float(optimizer.state[twin[0].bias]["step"]) == 4
    assert optimizer.param_groups[0]["lr"] == RATE
    for step in range(4, 7):
        gradients(model, step)
        gradients(twin, step)
        peer.step()
        optimizer.step()
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(q, p, rtol=0, atol=1e-7)


def torch_pair(model, named=False):
    pairs = [(name, p) for name, p in model.named_parameters() if p.ndim == 2]
    rest = [(name, p) for name, p in model.named_parameters() if p.ndim < 2]
    matrices, others = (pairs, rest) if named else ([p for _, p in pairs], [p for _, p in rest])
    muon = torch.optim.Muon(matrices, 0.02, momentum=BETA)
    return muon, torch.optim.AdamW(others, 0.003, betas=BETAS)


@pytest.mark.parametrize("named", [False, True])
def test_torchs_muon_and_the_adamw_beside_it(named):
    model = make_model()
    pair = torch_pair(model, named)
    for step in range(3):
        gradients(model, step)
        for each in pair:
            each.step()
    optimizer = MuonConfig(momentum=BETA, betas=BETAS, adamw_patterns=()).build(model, 0.02)
    optimizer.load_state_dict(
        import_state(*(each.state_dict() for each in pair), names=None if named else SORTED)
    )
    for each in pair:
        for p, values in each.state.items():
            assert optimizer.state[p].keys() == values.keys()
            assert all(torch.equal(optimizer.state[p][key], x) for key, x in values.items())
    twin = make_model()
    twin.load_state_dict(model.state_dict())
    other = MuonConfig(momentum=BETA, betas=BETAS, weight_decay=0.1, adamw_patterns=()).build(
        twin, 0.02
    )
    other.load_state_dict(optimizer.state_dict())
    gradients(model, 3)
    gradients(twin, 3)
    pair[0].step()
    other.step()
    for layer in (0, 2):  # torch's iterates are bfloat16
        torch.testing.assert_close(twin[layer].weight, model[layer].weight, rtol=0, atol=1e-3)


def test_the_state_of_torchs_muon_alone_loads_by_position():
    model = nn.Sequential(nn.Linear(5, 8, bias=False), nn.Linear(8, 3, bias=False))
    muon = torch.optim.Muon(model.parameters(), 0.02)
    model(torch.ones(1, 5)).sum().backward()
    muon.step()
    optimizer = HybridMuon(model.named_parameters())
    optimizer.load_state_dict(muon.state_dict())
    for p in model.parameters():
        assert torch.equal(optimizer.state[p]["momentum_buffer"], muon.state[p]["momentum_buffer"])
    optimizer.step()


def test_rejects_states_that_do_not_fit():
    model = make_model()
    peer = Sums(model)
    gradients(model, 0)
    peer.step()
    with pytest.raises(ForeignStateError, match=r"no names.*import_state"):
        ours(model).load_state_dict(peer.dion())
    with pytest.raises(ForeignStateError, match="4 parameters; found 3 names"):
        import_state(peer.dion(), names=SORTED[:3])
    with pytest.raises(ForeignStateError, match="give names="):
        import_state(peer.dion())
    lion = peer.dion()
    lion["param_groups"][1]["algorithm"] = "lion"
    with pytest.raises(ForeignStateError, match="'lion' has no counterpart"):
        ours(model).load_state_dict(import_state(lion, names=SORTED))
    state = import_state(peer.moonlight(), names=SORTED)
    with pytest.raises(RoutingMismatchError) as error:
        MuonConfig(adamw_patterns=["0.*"]).build(model).load_state_dict(state)
    assert error.value.differences == (
        "0.weight: saved: route muon as 1x8x5, shape 8x5; present: route adamw, shape 8x5",
    )
    optimizer = MuonConfig(adamw_patterns=["0.*"], on_route_change="migrate").build(model)
    optimizer.load_state_dict(state)
    assert {"exp_avg", "exp_avg_sq", "step"} == optimizer.state[model[0].weight].keys()


def as_saved(kind, model, steps=3):
    """Return a state as a successor of Moonlight's or dion's Muon saves it, and the sums in it."""
    peer = Sums(model)
    for step in range(steps):
        gradients(model, step)
        peer.step()
    matrices, rest = SORTED[:2], SORTED[2:]
    if kind == "pytorch_optimizer":  # it counts steps in the group
        saved = peer.moonlight()
        (group,) = saved["param_groups"]
        group["step"] = steps
        for values in saved["state"].values():
            values.pop("step", None)
        group["param_names"] = SORTED
    elif kind == "Motif":  # it has names under another key
        saved = peer.moonlight()
        (group,) = saved["param_groups"]
        common = {key: group[key] for key in group if key != "params"}
        saved["param_groups"] = [
            {**common, "use_muon": True, "names": matrices, "params": [0, 1]},
            {**common, "use_muon": False, "names": rest, "params": [2, 3]},
        ]
    else:
        saved = peer.dion()
        for group in saved["param_groups"]:
            group["param_names"] = [SORTED[i] for i in group["params"]]
        if kind == "normuon":
            for group in saved["param_groups"]:
                group["algorithm"] = group["algorithm"].replace("muon", "normuon")
            for i in (0, 1):
                rows = len(saved["state"][i]["momentum"])
                saved["state"][i]["variance_neuron"] = torch.arange(1.0, rows + 1).view(-1, 1)
    return saved, peer


@pytest.mark.parametrize("kind", ["pytorch_optimizer", "Motif", "normuon"])
def test_states_of_successors_load_by_their_layout(kind):
    model = make_model()
    saved, peer = as_saved(kind, model)
    optimizer = MuonConfig(momentum=BETA, normuon=kind == "normuon", adamw_patterns=()).build(model)
    optimizer.load_state_dict(saved)
    for i, (name, p) in enumerate(zip(SORTED, peer.params, strict=True)):
        state = optimizer.state[p]
        if p.ndim == 2:
            expected = (1 - BETA) * peer.state[i]["m"]
            torch.testing.assert_close(state["momentum_buffer"], expected, msg=name)
            if kind == "normuon":
                rows = torch.arange(1.0, len(p) + 1).view(-1, 1)
                assert torch.equal(state["second_moment_of_rows"].float(), rows)
        else:
            assert float(state["step"]) == 3
            assert torch.equal(state["exp_avg_sq"], peer.state[i]["v"])
    gradients(model, 4)
    optimizer.step()


def test_moments_without_a_number_of_steps_are_refused():
    model = make_model()
    saved, _ = as_saved("pytorch_optimizer", model)
    del saved["param_groups"][0]["step"]
    with pytest.raises(ForeignStateError, match="no number of steps"):
        MuonConfig().build(model).load_state_dict(saved)
