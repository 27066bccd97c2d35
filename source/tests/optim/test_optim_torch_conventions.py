"""What torch's users expect of an optimizer: closures, groups, hooks, schedulers, scalers, compilation, checkpoints."""

from __future__ import annotations

import copy
import pickle
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import lr_scheduler
from torch.overrides import TorchFunctionMode

from deepmd_muon.optim import (
    HybridMuon,
    InvalidParameterError,
    NonFiniteGradientError,
)
from deepmd_muon.optim.groups.group_settings import unfolded

SETTINGS = {"lr": 0.02, "weight_decay": 0.01}


def make_model(seed=0, dtype=torch.float32):
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2)
    ).to(dtype)


def loss_of(model, step=0):
    dtype = next(model.parameters()).dtype
    x = torch.randn(16, 5, generator=torch.Generator().manual_seed(step)).to(dtype)
    return (model(x) - x[:, :2]).square().mean()


def train(model, optimizer, steps, start=0):
    for step in range(start, start + steps):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        optimizer.step()


def weights(model):
    return [p.detach().clone() for p in model.parameters()]


def assert_equal(first, second):
    for p, q in zip(first, second, strict=True):
        assert torch.equal(p, q)


def test_closure_is_evaluated_with_gradients_and_returned():
    model, twin = make_model(), make_model()
    optimizer, other = (HybridMuon(m.named_parameters(), **SETTINGS) for m in (model, twin))

    def closure():
        optimizer.zero_grad()
        loss = loss_of(model)
        loss.backward()
        return loss

    expected = loss_of(model).item()
    assert optimizer.step(closure).item() == expected
    train(twin, other, 1)
    assert_equal(weights(model), weights(twin))


def test_duplicates_are_refused_by_name():
    p, q = nn.Parameter(torch.zeros(3, 3)), nn.Parameter(torch.zeros(3, 3))
    with pytest.raises(InvalidParameterError, match="'tied' and 'w' are the same parameter"):
        HybridMuon([("w", p), ("tied", p)])
    with pytest.raises(InvalidParameterError, match=r"two parameters.*'w'"):
        HybridMuon([("w", p), ("module.w", q)])
    with pytest.raises(ValueError, match="more than one parameter group"):
        HybridMuon([{"params": [("w", p)]}, {"params": [("v", p)]}])


def test_parameters_that_no_step_can_update_are_refused_by_name():
    narrow = nn.Parameter(torch.ones(4, 4).to(torch.float8_e4m3fn))
    imaginary = nn.Parameter(torch.randn(4, 4, dtype=torch.complex64).conj().imag)
    overlapping = nn.Parameter(torch.zeros(1).expand(5))
    for p, word in (
        (narrow, "float8_e4m3fn"),
        (imaginary, "resolve_neg"),
        (overlapping, "share memory"),
        (nn.Parameter(torch.zeros(3, 3, dtype=torch.complex64)), "complex64"),
    ):
        with pytest.raises(InvalidParameterError, match=f"'w'.*{word}"):
            HybridMuon([("w", p)])
    HybridMuon([("w", narrow.requires_grad_(False))]).step()
    with pytest.raises(TypeError, match=r"single tensor.*\[tensor\]"):
        HybridMuon(torch.ones(3))


def test_names_that_differ_by_a_prefix_of_wrappers_are_both_shown():
    model = nn.ModuleDict(
        {"module": nn.ModuleDict({"layer": nn.Linear(3, 3)}), "layer": nn.Linear(3, 3)}
    )
    with pytest.raises(InvalidParameterError, match=r"'module\.layer\.weight'.*'layer\.weight'"):
        HybridMuon(model.named_parameters())


def test_parameters_without_names_are_warned_about():
    model = make_model()
    with pytest.warns(UserWarning, match="without names"):
        optimizer = HybridMuon(model.parameters(), **SETTINGS)
    assert [e.name for e in optimizer.routing][:2] == ["group 0 parameter 0", "group 0 parameter 1"]
    assert [e.route for e in optimizer.routing] == ["muon", "adam"] * 3
    train(model, optimizer, 1)


def test_parameters_missing_in_named_parameters_are_named():
    model = make_model()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        apart = HybridMuon(model.parameters(), named_parameters=model.named_parameters())
    assert apart.routing == HybridMuon(model.named_parameters()).routing
    with pytest.warns(UserWarning, match=r"named_parameters.*: 4\.weight, 4\.bias"):
        HybridMuon(list(model.parameters())[:4], named_parameters=model.named_parameters())
    with pytest.raises(InvalidParameterError, match=r"no name for a parameter of shape \(7,\)"):
        HybridMuon([nn.Parameter(torch.zeros(7))], named_parameters=model.named_parameters())


def test_frozen_and_empty_parameters_are_named_and_left_alone():
    model = make_model()
    model[0].weight.requires_grad_(False)
    empty = nn.Parameter(torch.zeros(0, 4))
    optimizer = HybridMuon([*model.named_parameters(), ("compress_info", empty)], **SETTINGS)
    assert [(e.route, e.reason) for e in (optimizer.routing[0], optimizer.routing[6])] == [
        ("frozen", "requires_grad is False"),
        ("frozen", "has no elements"),
    ]
    before = weights(model)
    empty.grad = torch.zeros(0, 4)
    train(model, optimizer, 1)
    assert torch.equal(before[0], model[0].weight)
    model[0].weight.requires_grad_(True)
    train(model, optimizer, 1)
    assert optimizer.routing[0].route == "muon"
    # Its first step: five singular values of 1, scaled to the size of Adam's, damped for a score of 0.55.
    moved = (model[0].weight - before[0] * (1 - 0.02 * 0.01)).norm().item()
    assert moved == pytest.approx(0.02 * 0.18 * 8**0.5 * 5**0.5 * (0.1 + 0.9 * 0.55), rel=1e-3)


def test_hooks_run():
    model = make_model()
    optimizer = HybridMuon(model.named_parameters())
    calls = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("before step"))
    optimizer.register_step_post_hook(lambda *_: calls.append("after step"))
    optimizer.register_state_dict_post_hook(lambda _, state: calls.append("saved"))
    optimizer.register_load_state_dict_pre_hook(lambda _, state: calls.append("before load"))
    optimizer.register_load_state_dict_post_hook(lambda _: calls.append("loaded"))
    train(model, optimizer, 1)
    optimizer.load_state_dict(optimizer.state_dict())
    assert calls == ["before step", "after step", "saved", "before load", "loaded"]


def test_initial_lr_cannot_go_stale():
    model = make_model()
    first = HybridMuon(model.named_parameters(), 0.1)
    schedule = lr_scheduler.ExponentialLR(first, 0.5)
    for _ in range(3):
        train(model, first, 1)
        schedule.step()
    saved = first.state_dict()
    assert saved["param_groups"][0]["initial_lr"] == 0.1

    second = HybridMuon(model.named_parameters(), 0.4)
    second.load_state_dict(saved)
    (group,) = second.param_groups
    assert group["lr"] == pytest.approx(0.0125)
    assert group["initial_lr"] == 0.4
    lr_scheduler.LambdaLR(second, lambda t: 1.0)
    assert group["lr"] == 0.4

    third = HybridMuon(model.named_parameters(), torch.tensor(0.4))
    kept = third.param_groups[0]["lr"]
    third.load_state_dict(saved)
    assert third.param_groups[0]["lr"] is kept
    assert kept.item() == pytest.approx(0.0125)


def test_a_gradient_scaler_with_clipping_in_between():
    model, twin = make_model(), make_model()
    optimizer, other = (HybridMuon(m.named_parameters(), **SETTINGS) for m in (model, twin))
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    for step in range(3):
        optimizer.zero_grad()
        other.zero_grad()
        scaler.scale(loss_of(model, step)).backward()
        loss_of(twin, step).backward()
        scaler.unscale_(optimizer)
        for m in (model, twin):
            nn.utils.clip_grad_norm_(m.parameters(), 0.01)
        scaler.step(optimizer)
        scaler.update()
        other.step()
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.allclose(p, q, atol=1e-6)


def test_only_the_gradient_scaler_leaves_unscaling_to_the_step():
    """Lightning refuses to clip the gradients of an optimizer with this attribute, also in bf16 without a scaler."""
    model = make_model()
    optimizer = HybridMuon(model.named_parameters(), **SETTINGS)
    assert getattr(optimizer, "_step_supports_amp_scaling", False) is False
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    scaler.scale(loss_of(model)).backward()
    scaled = model[0].weight.grad.clone()
    scaler.step(optimizer)
    assert torch.equal(
        model[0].weight.grad, scaled
    )  # unscaled inside of the step alone, without waiting for it
    assert not hasattr(optimizer, "grad_scale")


def overflow(model, value):
    loss_of(model).backward()
    model[2].weight.grad[0, 0] = value


def test_a_large_float64_gradient_is_finite_and_dtypes_may_mix():
    w, v = nn.Parameter(torch.zeros(3, 4, dtype=torch.float64)), nn.Parameter(torch.zeros(3, 4))
    optimizer = HybridMuon([("w", w), ("v", v)], 0.1, on_nonfinite="error")
    w.grad, v.grad = torch.full_like(w, 1e300), torch.ones_like(v)
    optimizer.step()
    assert torch.allclose(w.float(), v)
    v.grad[0, 0] = float("inf")
    with pytest.raises(NonFiniteGradientError) as caught:
        optimizer.step()
    assert caught.value.names == ("v",)


def test_an_error_names_the_parameters_and_changes_nothing():
    model = make_model()
    optimizer = HybridMuon(model.named_parameters(), **SETTINGS, on_nonfinite="error")
    before = weights(model)
    overflow(model, float("nan"))
    model[4].bias.grad[0] = float("inf")
    with pytest.raises(
        NonFiniteGradientError, match=r"2 gradients with NaN or infinity: '2\.weight', '4\.bias'"
    ) as e:
        optimizer.step()
    assert e.value.names == ("2.weight", "4.bias")
    assert_equal(before, weights(model))
    assert not optimizer.state


def test_ignored_nan_spoils_its_own_parameter_only():
    model, twin = make_model(), make_model()
    optimizer, other = (HybridMuon(m.named_parameters(), **SETTINGS) for m in (model, twin))
    overflow(model, float("nan"))
    loss_of(twin).backward()
    optimizer.step()
    other.step()
    for (name, p), q in zip(model.named_parameters(), twin.parameters(), strict=True):
        if name == "2.weight":
            assert p.isnan().any()
        else:
            assert torch.equal(p, q), name


def test_a_compiled_training_step_equals_the_plain_one():
    model, twin = make_model(), make_model()
    optimizer, other = (HybridMuon(m.named_parameters(), **SETTINGS) for m in (model, twin))

    @torch.compile(backend="eager")
    def step(i):
        optimizer.zero_grad()
        loss_of(model, i).backward()
        optimizer.step()

    for i in range(3):
        step(i)
    train(twin, other, 3)
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.allclose(p, q, atol=1e-6)


@pytest.fixture(scope="module")
def process_group(tmp_path_factory):
    store = dist.FileStore(str(tmp_path_factory.mktemp("store") / "file"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("process_group")
def test_copies_with_replicas_need_a_mesh():
    model = make_model()
    mesh = dist.device_mesh.init_device_mesh("cpu", (1,))
    model, optimizer = copy.deepcopy(
        (model, HybridMuon(model.named_parameters(), **SETTINGS, replicas=mesh))
    )
    train(model, optimizer, 1)
    optimizer = HybridMuon(model.named_parameters(), **SETTINGS, replicas=dist.group.WORLD)
    with pytest.raises(TypeError, match=r"state_dict.*mesh"):
        copy.deepcopy(optimizer)


def test_torch_function_modes_see_the_closure_and_not_the_step():
    """A default device is such a mode: with it, Python would run for every attribute of a tensor that a step reads."""

    seen = []

    class Record(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            seen.append(func.__name__)
            return func(*args, **(kwargs or {}))

    params = {
        name: torch.nn.Parameter(torch.ones(shape))
        for name, shape in {"a": (8, 16), "b": (16,)}.items()
    }
    for p in params.values():
        p.grad = torch.ones_like(p)
    optimizer = HybridMuon(params.items(), lr=0.1)
    with Record():
        optimizer.step()
        optimizer.step(lambda: torch.add(params["a"], 1.0))
    assert [name for name in seen if name != "_set_grad_enabled"] == ["add"]


def test_the_default_device_does_not_matter_to_a_state_that_changes_route_or_view():
    named = {"a": (8, 16), "b": (16,), "e": (3, 4, 6)}

    def made(**settings):
        return HybridMuon(
            [(k, torch.nn.Parameter(torch.ones(s, device="cpu"))) for k, s in named.items()],
            **settings,
        )

    first = made(muon_mode="slice")
    for p in first.param_groups[0]["params"]:
        p.grad = torch.arange(float(p.numel())).view(p.shape)
    first.step()
    loaded = []
    for default in ("cpu", "meta"):
        with torch.device(default):
            for settings in (
                {"muon_mode": "2d"},
                {"muon_mode": "flat"},
                {"splits": ["a: columns 4"]},
            ):
                second = made(**settings, on_route_change="migrate")
                second.load_state_dict(copy.deepcopy(first.state_dict()))
                state = second.state_dict()["state"]
                loaded.append(
                    {
                        (i, key): value
                        for i, values in state.items()
                        for key, value in values.items()
                    }
                )
    for one, other in zip(loaded[:3], loaded[3:], strict=True):
        assert one.keys() == other.keys()
        assert all(torch.equal(one[key], other[key]) for key in one)


def test_groups_have_few_keys_and_take_every_setting_as_one(monkeypatch):
    params = {name: nn.Parameter(torch.eye(3) + 0.1) for name in "vw"}
    optimizer = HybridMuon(params.items(), nesterov=False, splits=["w: rows 2+1"])
    (group,) = optimizer.param_groups
    settings = {"nesterov": False, "splits": ["w: rows 2+1"], "muon_mode": "slice"}
    assert {key: group[key] for key in settings} == settings
    assert (group.get("nesterov"), group.get("lr"), group.get("nesterow", 5)) == (False, 5e-4, 5)
    with pytest.raises(KeyError):
        group["nesterow"]
    assert (group.setdefault("nesterov", True), group.setdefault("name", "all")) == (False, "all")
    assert (group["nesterov"], group.pop("name")) == (False, "all")

    def step():
        for p in params.values():
            p.grad = torch.eye(3)
        optimizer.step()

    step()
    keys = {"params", "param_names", "lr", "momentum", "weight_decay", "adam_betas", "routes"}
    keys |= {"maximize", "capturable", "momentum_warmup", "constructed"}
    keys |= {"lr_adjust_coeff", "adam_lr_ratio", "adam_eps", "adam_weight_decay"}
    assert group.keys() == optimizer.state_dict()["param_groups"][0].keys() == keys
    step()
    assert group["splits"] == ["w: rows 2+1"]  # is a key now
    with monkeypatch.context() as patched:  # a step that is compiled again would call it
        patched.setattr(optimizer._compiled, "prepare", None)
        step()
    assert group.keys() == keys
    group["splits"].append("v: columns 2+1")  # in place
    group["adam_patterns"] = ["none", "w"]
    step()
    assert [str(entry.view) for entry in optimizer.routing] == ["1x3x3 columns 2+1", "None"]
    assert group.keys() == keys
    copied = {**group, "params": [("x", nn.Parameter(torch.eye(3)))], "nesterov": True}
    optimizer.add_param_group(copied)
    added = optimizer.param_groups[1]
    assert added["nesterov"]
    assert added["adam_patterns"] == ["none", "w"]
    pickled = pickle.loads(pickle.dumps(optimizer))
    earlier = copy.copy(optimizer.__getstate__())  # groups with a key for each setting
    earlier["param_groups"] = list(map(unfolded, earlier["param_groups"]))
    unpickled = HybridMuon.__new__(HybridMuon)
    unpickled.__setstate__(earlier)
    for other in (pickled, unpickled):
        assert other.param_groups[1]["nesterov"]
        assert other.param_groups[1].keys() == added.keys()
        assert other.routing == optimizer.routing
