"""State dicts: exact restarts, matching by name, mismatches that are named, foreign states that are recognised."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from optim_builders import assert_same, assert_same_state, through_file, train
from torch import nn

from deepmd_muon.optim import HybridMuon, RouteTable, RoutingMismatchError
from deepmd_muon.optim.errors import ForeignStateError


class Net(nn.Module):
    """A matrix, a batch of matrices, biases and a decayed scale."""

    def __init__(self, dtype=torch.float32, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.first = nn.Linear(6, 9, dtype=dtype)
        self.experts = nn.Parameter(torch.randn(3, 9, 5, dtype=torch.float64).to(dtype))
        self.adamw_scale = nn.Parameter(torch.ones(5, dtype=dtype))


def made(dtype=torch.float32, seed=0):
    model = Net(dtype, seed)
    return model, HybridMuon(model.named_parameters(), 0.02)


@pytest.mark.parametrize("between", ["step", "save at once"])
@pytest.mark.parametrize("name", ["first.weight", "first.bias"])
def test_a_parameter_frozen_on_the_way_keeps_its_state_through_a_file(name, between):
    def freeze(model, trainable):
        model.get_parameter(name).requires_grad_(trainable)
        model.get_parameter(name).grad = None

    (straight, optimizer), (stopped, first) = made(), made()
    steps = 2 if between == "step" else 0
    for model, each in ((straight, optimizer), (stopped, first)):
        train(model, each, 3)
        freeze(model, trainable=False)
        train(model, each, steps, start=3)
    saved = through_file({"model": stopped.state_dict(), "optimizer": first.state_dict()})
    frozen = [
        entry.name
        for entry in RouteTable.from_groups(saved["optimizer"]["param_groups"])
        if not entry.view
    ]
    assert name in frozen

    resumed, second = made(seed=7)
    freeze(resumed, trainable=False)
    resumed.load_state_dict(saved["model"])
    second.load_state_dict(saved["optimizer"])
    for model, each in ((straight, optimizer), (resumed, second)):
        train(model, each, 2, start=5)
        freeze(model, trainable=True)
        train(model, each, 3, start=7)
    assert_same((straight, optimizer), (resumed, second))


def test_state_that_no_longer_fits_goes_when_a_parameter_is_trained_again(caplog):
    model, optimizer = made()
    train(model, optimizer, 2)
    for p in (model.first.weight, model.experts):
        p.requires_grad_(False)
    train(model, optimizer, 1, start=2)
    (group,) = optimizer.param_groups
    group.update(muon_mode="flat", adam_patterns=["first.weight"])
    for p in (model.first.weight, model.experts):
        p.requires_grad_(True)
    train(model, optimizer, 1, start=3)
    assert set(optimizer.state[model.first.weight]) == {"step", "exp_avg", "exp_avg_sq"}
    assert optimizer.state[model.experts]["magma_score"].shape == (1,)
    assert sorted(caplog.messages) == [
        "experts: its state magma_score is dropped: route muon as 1x27x5, shape 3x9x5 now",
        "first.weight: its state magma_score, momentum_buffer is dropped: route adam, shape 9x6 now",
    ]


def test_loaded_state_is_a_copy():
    model = Net()
    optimizer = HybridMuon(model.named_parameters())
    train(model, optimizer, 1)
    saved = optimizer.state_dict()
    other = HybridMuon(Net().named_parameters())
    other.load_state_dict(saved)
    kept = saved["state"][0]["momentum_buffer"].clone()
    train(Net(seed=3), other, 0)
    next(iter(other.state.values()))["momentum_buffer"].add_(1.0)
    assert torch.equal(saved["state"][0]["momentum_buffer"], kept)


def test_a_mismatch_lists_every_parameter_and_changes_nothing():
    model = Net()
    optimizer = HybridMuon(model.named_parameters())
    train(model, optimizer, 1)
    saved = optimizer.state_dict()

    renamed = [(name.replace("first", "one"), p) for name, p in model.named_parameters()]
    other = HybridMuon(renamed, muon_mode="flat")
    train(model, other, 1, start=9)
    before = copy.deepcopy(other.state_dict())
    with pytest.raises(RoutingMismatchError) as caught:
        other.load_state_dict(saved)
    lines = caught.value.differences
    assert lines == (
        "experts: saved: route muon as 3x9x5, shape 3x9x5; present: route muon as 1x27x5, shape 3x9x5",
        "one.weight: not in the saved state; present: route muon as 1x9x6, shape 9x6",
        "one.bias: not in the saved state; present: route adam, shape 9",
        "first.weight: saved: route muon as 1x9x6, shape 9x6; not among the present parameters",
        "first.bias: saved: route adam, shape 9; not among the present parameters",
    )
    assert "5 parameters affected" in str(caught.value)
    assert all(line in str(caught.value) for line in lines)
    after = other.state_dict()
    assert after["param_groups"] == before["param_groups"]
    for index, values in before["state"].items():
        assert_same_state(values, after["state"][index])


@pytest.mark.parametrize(
    ("peer", "kind"),
    [
        (lambda p: torch.optim.SGD(p, 0.1, momentum=0.9), "SGD with momentum"),
        (torch.optim.Adagrad, "another optimizer"),
    ],
)
def test_states_of_other_optimizers_are_recognised(peer, kind):
    model = Net()
    other = peer(model.parameters())
    train(model, other, 1)
    with pytest.raises(ForeignStateError, match=f"looks like.*{kind}"):
        HybridMuon(model.named_parameters()).load_state_dict(other.state_dict())


def test_damaged_states_are_refused():
    model = Net()
    optimizer = HybridMuon(model.named_parameters())
    train(model, optimizer, 1)
    for key, value, message in (
        (
            "momentum_buffer",
            torch.zeros(3, 3),
            r"momentum_buffer has shape \(3, 3\), the parameter \(3, 9, 5\)",
        ),
        ("magma_score", torch.zeros(2), r"magma_score has shape \(2,\), the view has 3 matrices"),
        ("exp_avg", torch.zeros(3, 9, 5), "unexpected state 'exp_avg' on route muon"),
    ):
        saved = copy.deepcopy(optimizer.state_dict())
        saved["state"][0][key] = value
        with pytest.raises(RoutingMismatchError, match=f"experts: {message}"):
            optimizer.load_state_dict(saved)
    saved = copy.deepcopy(optimizer.state_dict())
    del saved["state"][0]["momentum_buffer"]
    with pytest.raises(
        RoutingMismatchError, match="experts: state 'momentum_buffer' is missing on route muon"
    ):
        optimizer.load_state_dict(saved)


@pytest.mark.parametrize(
    "value",
    [None, 3.0, torch.ones(3, 9, 5, dtype=torch.complex64), torch.ones(3, 9, 5).to_sparse()],
)
def test_state_that_is_not_a_dense_real_tensor_is_named(value):
    model, optimizer = made()
    train(model, optimizer, 1)
    saved = copy.deepcopy(optimizer.state_dict())
    saved["state"][0]["momentum_buffer"] = value
    with pytest.raises(RoutingMismatchError, match=r"experts.*momentum_buffer") as error:
        optimizer.load_state_dict(saved)
    assert len(error.value.differences) == 1


def test_rejects_damaged_groups():
    _, optimizer = made()
    saved = optimizer.state_dict()
    (group,) = saved["param_groups"]
    for damaged, word in (
        ({"state": None}, "NoneType"),
        ({"param_groups": [{key: x for key, x in group.items() if key != "params"}]}, "params"),
        ({"param_groups": [{key: x for key, x in group.items() if key != "lr"}]}, "lr"),
    ):
        with pytest.raises(ForeignStateError, match=word):
            optimizer.load_state_dict({**saved, **damaged})


@pytest.mark.parametrize("kind", [HybridMuon, torch.optim.Adam])
def test_a_count_of_steps_may_be_a_plain_number(kind):
    # torch before 1.12 counted so.
    model = Net()
    optimizer = kind(model.named_parameters())
    train(model, optimizer, 3)
    saved = copy.deepcopy(optimizer.state_dict())
    for values in saved["state"].values():
        if "step" in values:
            values["step"] = 3
    other = HybridMuon(model.named_parameters(), on_route_change="migrate")
    other.load_state_dict(saved)
    steps = [own["step"] for own in other.state.values() if "step" in own]
    assert steps
    assert all(torch.equal(step, torch.tensor(3.0)) for step in steps)


def test_a_count_of_steps_is_one_number():
    model = Net()
    optimizer = HybridMuon(model.named_parameters())
    train(model, optimizer, 1)
    saved = copy.deepcopy(optimizer.state_dict())
    stepped = [values for values in saved["state"].values() if "step" in values]
    assert stepped
    for values in stepped:
        values["step"] = values["step"].view(1)
    optimizer.load_state_dict(saved)
    assert all(state["step"].shape == () for state in optimizer.state.values() if "step" in state)
    for value in (torch.zeros(3), torch.zeros(0)):
        stepped[-1]["step"] = value
        with pytest.raises(
            RoutingMismatchError, match=rf"step has shape \({len(value)},\), it must be one number"
        ):
            optimizer.load_state_dict(saved)


def test_a_model_of_another_dtype_takes_the_state_and_says_so(caplog):
    model = Net(torch.bfloat16)
    optimizer = HybridMuon(model.named_parameters())
    train(model, optimizer, 2)
    wide = Net(torch.float64)
    other = HybridMuon(wide.named_parameters())
    with caplog.at_level("INFO", logger="deepmd_muon"):
        other.load_state_dict(optimizer.state_dict())
    for p, q in zip(model.parameters(), wide.parameters(), strict=True):
        for key, value in optimizer.state[p].items():
            assert torch.equal(value.double(), other.state[q][key].double()), key
    assert [record.getMessage() for record in caplog.records] == [
        "exp_avg: saved as torch.float32, now kept as torch.float64",
        "exp_avg_sq: saved as torch.float32, now kept as torch.float64",
        "momentum_buffer: saved as torch.bfloat16, now kept as torch.float64",
    ]
    train(wide, other, 1)


def test_present_settings_win_and_differences_are_logged(caplog):
    model = Net()
    saved = HybridMuon(model.named_parameters(), 0.1, weight_decay=0.3, momentum=0.8).state_dict()
    optimizer = HybridMuon(model.named_parameters(), 0.5, weight_decay=0.2, momentum=0.8)
    with caplog.at_level("INFO", logger="deepmd_muon"):
        optimizer.load_state_dict(saved)
    (group,) = optimizer.param_groups
    assert group["weight_decay"] == 0.2
    assert group["lr"] == 0.1
    assert [record.getMessage() for record in caplog.records] == [
        "param_groups[0] weight_decay: now 0.2, saved 0.3"
    ]


def test_copies_keep_flags_and_take_new_groups():
    _, optimizer = made()
    optimizer.alternates = optimizer.agreed_skip = optimizer.agreed_gradients = True
    optimizer.workspace = 100
    for clone in (copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))):
        other = clone(optimizer)
        assert other.alternates
        assert other.agreed_skip
        assert other.agreed_gradients
        assert other.workspace == 100
        assert other.defaults == optimizer.defaults
        other.add_param_group({"params": [("new", nn.Parameter(torch.ones(2, 2)))]})
        assert other.param_groups[1].keys() == optimizer.param_groups[0].keys()


def test_state_keys_and_dtypes():
    model = Net(torch.bfloat16)
    optimizer = HybridMuon(model.named_parameters())
    train(model, optimizer, 1)
    matrix = optimizer.state[model.experts]
    assert {key: (value.dtype, tuple(value.shape)) for key, value in matrix.items()} == {
        "momentum_buffer": (torch.bfloat16, (3, 9, 5)),
        "magma_score": (torch.float32, (3,)),
    }
    vector = optimizer.state[model.adamw_scale]
    assert {key: (value.dtype, tuple(value.shape)) for key, value in vector.items()} == {
        "step": (torch.float32, ()),
        "exp_avg": (torch.float32, (5,)),
        "exp_avg_sq": (torch.float32, (5,)),
    }


def test_rejects_other_dictionaries():
    optimizer = HybridMuon(Net().named_parameters())
    with pytest.raises(ForeignStateError, match=r"not an optimizer state dict.*'model'"):
        optimizer.load_state_dict({"model": 1})
