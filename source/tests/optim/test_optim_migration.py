"""Changed routes and views: which state is kept, which restarts, and that each change is logged."""

from __future__ import annotations

import logging
import math

import pytest
import torch
from optim_builders import assert_same_state, random
from torch import nn

from deepmd_muon.optim import HybridMuon, RoutingMismatchError, name_deepmd_kit_state
from deepmd_muon.optim.errors import ForeignStateError

BETAS = (0.9, 0.95)


def stepped(params, steps=3, **settings):
    optimizer = HybridMuon(params, 0.02, **settings)
    for step in range(steps):
        for i, (_, p) in enumerate(params):
            p.grad = random(*p.shape, seed=10 * step + i + 1)
        optimizer.step()
    return optimizer


def reloaded(params, saved, policy="migrate", **settings):
    optimizer = HybridMuon(params, 0.02, on_route_change=policy, **settings)
    optimizer.load_state_dict(saved.state_dict())
    return optimizer


def test_momentum_becomes_the_one_gradient_adam_has_seen(caplog):
    w = nn.Parameter(random(4, 6))
    saved = stepped([("w", w)])
    m = saved.state[w]["momentum_buffer"]
    loaded = reloaded([("w", w)], saved, adam_patterns=["w"])
    state = loaded.state[w]
    assert set(state) == {"step", "exp_avg", "exp_avg_sq"}
    assert state["step"].item() == 1
    assert torch.allclose(state["exp_avg"] / (1 - BETAS[0]), m, rtol=1e-6)
    assert torch.allclose((state["exp_avg_sq"] / (1 - BETAS[1])).sqrt(), m.abs(), rtol=1e-5)
    (warning,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert warning.startswith(
        "w: saved: route muon as 1x4x6, shape 4x6; present: route adam, shape 4x6; "
    )
    assert "second moment restarts" in warning
    before = w.detach().clone()
    w.grad = torch.zeros(4, 6)
    loaded.step()
    moved = (w - before).abs().max().item()
    assert moved <= 0.02 * 1.0


def test_first_moment_becomes_momentum_and_back():
    w = nn.Parameter(random(4, 6))
    saved = stepped([("w", w)], adam_patterns=["w"])
    first = saved.state[w]["exp_avg"] / (1 - BETAS[0] ** 3)
    loaded = reloaded([("w", w)], saved)
    assert set(loaded.state[w]) == {"momentum_buffer"}
    assert torch.allclose(loaded.state[w]["momentum_buffer"], first, rtol=1e-5)
    again = reloaded([("w", w)], loaded, adam_patterns=["w"])
    assert torch.allclose(again.state[w]["exp_avg"] / (1 - BETAS[0]), first, rtol=1e-5)
    w.grad = random(4, 6, seed=77)
    loaded.step()
    assert loaded.state[w]["magma_score"].shape == (1,)


def test_adam_and_adamw_share_their_state():
    w = nn.Parameter(random(4, 6))
    saved = stepped([("w", w)], adam_patterns=["w"])
    loaded = reloaded([("w", w)], saved, adamw_patterns=["w"])
    assert_same_state(saved.state[w], loaded.state[w])


def test_scores_follow_their_blocks_when_views_change():
    w = nn.Parameter(random(3, 4, 5))
    saved = stepped([("w", w)])
    scores = saved.state[w]["magma_score"]
    assert len(set(scores.tolist())) == 3
    merged = reloaded([("w", w)], saved, muon_mode="flat")
    assert torch.equal(merged.state[w]["momentum_buffer"], saved.state[w]["momentum_buffer"])
    assert torch.allclose(merged.state[w]["magma_score"], scores.mean().reshape(1))
    cut = reloaded([("w", w)], saved, splits=["w: rows 2"])
    assert torch.allclose(cut.state[w]["magma_score"], scores.repeat_interleave(2))
    regrouped = reloaded([("w", w)], cut, splits=["w: columns 2+3"])
    assert torch.allclose(regrouped.state[w]["magma_score"], scores.repeat_interleave(2), atol=1e-7)
    back = reloaded([("w", w)], cut)
    assert torch.allclose(back.state[w]["magma_score"], scores, atol=1e-7)


def test_uneven_blocks_are_weighed_by_their_elements():
    w = nn.Parameter(random(6, 5))
    saved = stepped([("w", w)], splits=["w: rows 4+2"])
    first, second = saved.state[w]["magma_score"].tolist()
    whole = reloaded([("w", w)], saved)
    assert whole.state[w]["magma_score"].item() == pytest.approx((4 * first + 2 * second) / 6)


def test_lost_new_and_reshaped_parameters_are_logged(caplog):
    params = {name: nn.Parameter(random(4, 6)) for name in ("kept", "gone", "frozen", "grown")}
    saved = stepped(list(params.items()))
    present = {
        "kept": params["kept"],
        "new": nn.Parameter(random(3, 3)),
        "frozen": nn.Parameter(random(4, 6), requires_grad=False),
        "grown": nn.Parameter(random(5, 6)),
    }
    loaded = reloaded(list(present.items()), saved)
    assert set(loaded.state) == {present["kept"], present["frozen"]}
    for name in ("kept", "frozen"):
        assert_same_state(saved.state[params[name]], loaded.state[present[name]])
    lines = sorted(
        record.getMessage() for record in caplog.records if record.levelname == "WARNING"
    )
    expected = (
        ("gone", "dropped"),
        ("grown", "shape changed"),
        ("new", "without state"),
    )
    for line, (name, key_word) in zip(lines, expected, strict=True):
        assert line.startswith(f"{name}: ")
        assert key_word in line.rpartition("; ")[2]


@pytest.mark.parametrize(
    ("before", "now", "kept", "key_word"),
    [
        (
            {},
            {"muon_mode": "flat"},
            {"momentum_buffer"},
            "scores restart",
        ),
        (
            {},
            {"adam_patterns": ["w"]},
            {"step", "exp_avg", "exp_avg_sq"},
            "second moment restarts",
        ),
        (
            {"adam_patterns": ["w"]},
            {},
            {"momentum_buffer"},
            "bias-corrected first moment",
        ),
    ],
)
def test_the_state_of_a_frozen_parameter_migrates_when_it_is_trained_again(
    before, now, kept, key_word, caplog
):
    w = nn.Parameter(random(3, 4, 5))
    saved = stepped([("w", w)], **before)
    w.requires_grad_(False)
    state = saved.state_dict()
    w.requires_grad_(True)
    loaded = HybridMuon([("w", w)], 0.02, on_route_change="migrate", **now)
    loaded.load_state_dict(state)
    assert set(loaded.state[w]) == kept
    warned = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert key_word in warned[-1].partition("; present: ")[2].partition("; ")[2]
    loaded.step()


def test_reset_starts_changed_parameters_afresh_and_keeps_the_rest(caplog):
    w, v = nn.Parameter(random(3, 4, 5)), nn.Parameter(random(4, 5))
    saved = stepped([("w", w), ("v", v)])
    loaded = reloaded([("w", w), ("v", v)], saved, "reset", muon_mode="flat")
    assert w not in loaded.state
    assert torch.equal(loaded.state[v]["momentum_buffer"], saved.state[v]["momentum_buffer"])
    (line,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert line.startswith("w: saved: route muon as 3x4x5")
    assert "without state" in line


@pytest.mark.parametrize("policy", ["error", "migrate", "reset"])
@pytest.mark.parametrize("settings", [{}, {"adam_patterns": ["w"]}], ids=["muon", "adam"])
def test_freezing_and_unfreezing_keep_the_state_under_every_policy(policy, settings, caplog):
    caplog.set_level(logging.INFO, "deepmd_muon")
    w = nn.Parameter(random(3, 4, 5))
    saved = stepped([("w", w)], **settings)
    state = saved.state_dict()
    w.requires_grad_(False)
    frozen = HybridMuon([("w", w)], 0.02, on_route_change=policy, **settings)
    frozen.load_state_dict(state)
    assert_same_state(saved.state[w], frozen.state[w])
    assert "frozen now" in caplog.messages[-1]
    state = frozen.state_dict()
    w.requires_grad_(True)
    again = HybridMuon([("w", w)], 0.02, on_route_change=policy, **settings)
    again.load_state_dict(state)
    assert_same_state(saved.state[w], again.state[w])
    assert "trained again" in caplog.messages[-1]
    assert not [record for record in caplog.records if record.levelname == "WARNING"]


@pytest.mark.parametrize("policy", ["error", "migrate", "reset"])
def test_a_state_of_deepmd_kit_loads_into_frozen_parameters(policy, caplog):
    """deepmd-kit's states list all parameters; those it never stepped have none."""
    group = {"adam_betas": BETAS, "lr_adjust": 0.0, "lr_adjust_coeff": 0.18, "muon_mode": "slice"}
    momentum = random(4, 5)
    state = {
        "state": {"w": {"momentum_buffer": momentum}},
        "param_groups": [{**group, "lr": 0.01, "params": ["w", "v"]}],
    }
    w = nn.Parameter(random(4, 5), requires_grad=False)
    v = nn.Parameter(random(4, 5, seed=1))
    loaded = HybridMuon([("w", w), ("v", v)], on_route_change=policy)
    loaded.load_state_dict(state)
    assert torch.equal(loaded.state[w]["momentum_buffer"], momentum)
    assert v not in loaded.state
    assert not [record for record in caplog.records if record.levelname == "WARNING"]


@pytest.mark.parametrize("policy", ["error", "migrate", "reset"])
def test_a_parameter_that_was_always_frozen_starts_without_state(policy, caplog):
    caplog.set_level(logging.INFO, "deepmd_muon")
    w = nn.Parameter(random(4, 5), requires_grad=False)
    state = HybridMuon([("w", w)]).state_dict()
    w.requires_grad_(True)
    loaded = HybridMuon([("w", w)], on_route_change=policy)
    loaded.load_state_dict(state)
    assert not loaded.state
    assert "start without state" in caplog.messages[-1]


@pytest.mark.parametrize("settings", [{"muon_mode": "flat"}, {"adam_patterns": ["w"]}])
def test_unfreezing_into_another_route_or_view_is_a_change_of_route(settings):
    w = nn.Parameter(random(3, 4, 5))
    saved = stepped([("w", w)])
    w.requires_grad_(False)
    state = saved.state_dict()
    w.requires_grad_(True)
    with pytest.raises(RoutingMismatchError, match="saved: route frozen"):
        HybridMuon([("w", w)], 0.02, **settings).load_state_dict(state)
    reset = HybridMuon([("w", w)], 0.02, on_route_change="reset", **settings)
    reset.load_state_dict(state)
    assert not reset.state


@pytest.mark.parametrize(
    ("kind", "route"), [(torch.optim.Adam, "adam"), (torch.optim.AdamW, "adamw")]
)
def test_torchs_adam_migrates_by_name(kind, route, caplog):
    def make():
        return [
            ("w", nn.Parameter(random(4, 6))),
            ("b", nn.Parameter(random(6))),
            ("v", nn.Parameter(random(3, 3))),
        ]

    old = make()
    saved = kind(old, lr=0.02)
    for seed in range(3):
        for name, p in old:
            p.grad = random(*p.shape, seed=seed) if name != "v" else None
        saved.step()
    new = make()
    patterns = {"adamw_patterns": ["b"]} if route == "adamw" else {}
    with pytest.raises(
        RoutingMismatchError, match=f"w: saved: route {route}, shape 4x6; present: route muon"
    ):
        HybridMuon(new[::-1], 0.02, **patterns).load_state_dict(saved.state_dict())
    loaded = HybridMuon(new[::-1], 0.02, on_route_change="migrate", **patterns)
    loaded.load_state_dict(saved.state_dict())
    (w, b, v), (old_w, old_b, _) = [p for _, p in new], [p for _, p in old]
    momentum = saved.state[old_w]["exp_avg"] / (1 - 0.9**3)
    torch.testing.assert_close(loaded.state[w]["momentum_buffer"], momentum)
    assert_same_state(saved.state[old_b], loaded.state[b])
    assert v not in loaded.state
    assert sum("becomes the momentum" in message for message in caplog.messages) == 1


# deepmd-kit's states, in the form its versions write.

SHAPES = {
    "descriptor.layers.0.matrix": (1, 25),
    "descriptor.layers.1.matrix": (25, 50),
    "descriptor.layers.1.bias": (1, 50),
    "fitting.layers.0.matrix": (240, 1),
    "fitting.layers.0.idt": (240,),
}


def deepmd_kit_group(count, **settings):
    return {
        "params": list(range(count)),
        "lr": 1e-4,
        "momentum": 0.95,
        "weight_decay": 0.001,
        "adam_betas": BETAS,
        "lr_adjust": 10.0,
        "lr_adjust_coeff": 0.2,
        "initial_lr": 1e-3,
        **settings,
    }


def adam_values(shape, steps, seed):
    return {
        "exp_avg": random(*shape, seed=seed),
        "exp_avg_sq": random(*shape, seed=seed).square(),
        "beta1_pow": BETAS[0] ** steps,
        "beta2_pow": BETAS[1] ** steps,
    }


def first_version_state(steps=100):
    state = {}
    for i, shape in enumerate(SHAPES.values()):
        state[i] = (
            {"momentum_buffer": random(*shape, seed=i)}
            if len(shape) == 2
            else adam_values(shape, steps, i)
        )
    return {
        "state": state,
        "param_groups": [deepmd_kit_group(len(SHAPES), muon_2d_only=True, min_2d_dim=1)],
    }


def latest_state(steps=100):
    state = {}
    for i, (name, shape) in enumerate(SHAPES.items()):
        if name == "descriptor.layers.1.matrix":
            state[i] = {
                "momentum_buffer": random(*shape, seed=i),
                "magma_score": torch.tensor([0.7]),
            }
        else:
            state[i] = adam_values(shape, steps, i)
    settings = {"muon_mode": "slice", "enable_gram": True, "magma_muon": True}
    return {"state": state, "param_groups": [deepmd_kit_group(len(SHAPES), **settings)]}


def present_parameters():
    return [(name, nn.Parameter(torch.zeros(shape))) for name, shape in SHAPES.items()]


def test_the_latest_version_loads_exactly():
    params = present_parameters()
    optimizer = HybridMuon(params, 0.5)
    saved = latest_state()
    optimizer.load_state_dict(saved)
    matrix = optimizer.state[params[1][1]]
    assert torch.equal(matrix["momentum_buffer"], saved["state"][1]["momentum_buffer"])
    assert matrix["magma_score"].tolist() == pytest.approx([0.7])
    for i in (0, 2, 3, 4):
        state = optimizer.state[params[i][1]]
        assert torch.equal(state["exp_avg"], saved["state"][i]["exp_avg"])
        assert torch.equal(state["exp_avg_sq"], saved["state"][i]["exp_avg_sq"])
        assert state["step"].item() == 100
    assert optimizer.param_groups[0]["lr"] == 1e-4
    assert optimizer.param_groups[0]["initial_lr"] == 0.5
    for _, p in params:
        p.grad = torch.ones_like(p)
    optimizer.step()


def test_the_first_version_loads_under_the_default_policy(caplog):
    params = present_parameters()
    optimizer = HybridMuon(params)
    saved = first_version_state()
    optimizer.load_state_dict(saved)
    assert torch.equal(
        optimizer.state[params[1][1]]["momentum_buffer"], saved["state"][1]["momentum_buffer"]
    )
    for i in (0, 2, 3):
        state = optimizer.state[params[i][1]]
        assert torch.allclose(
            state["exp_avg"] / (1 - BETAS[0]), saved["state"][i]["momentum_buffer"], rtol=1e-5
        )
    assert optimizer.state[params[4][1]]["step"].item() == 100
    warned = [
        record.getMessage().split(":")[0]
        for record in caplog.records
        if record.levelname == "WARNING"
    ]
    assert warned == [list(SHAPES)[i] for i in (0, 2, 3)]


def test_the_first_version_folded_trailing_dimensions_or_took_adam():
    w = nn.Parameter(torch.zeros(3, 4, 5))
    momentum = {"state": {0: {"momentum_buffer": random(3, 4, 5)}}}
    momentum["param_groups"] = [deepmd_kit_group(1, muon_2d_only=False, min_2d_dim=1)]
    optimizer = HybridMuon([("w", w)])
    optimizer.load_state_dict(momentum)
    assert torch.equal(
        optimizer.state[w]["momentum_buffer"], momentum["state"][0]["momentum_buffer"]
    )

    moments = {"state": {0: adam_values((3, 4, 5), 7, 0)}}
    moments["param_groups"] = [deepmd_kit_group(1, muon_2d_only=True, min_2d_dim=1)]
    plain = HybridMuon([("w", w)], muon_mode="2d")
    plain.load_state_dict(moments)
    assert plain.routing[0].route == "adamw"
    assert plain.state[w]["step"].item() == 7


def test_small_matrices_of_the_first_version_keep_their_route():
    w = nn.Parameter(torch.zeros(4, 50))
    saved = {"state": {0: adam_values((4, 50), 9, 0)}}
    saved["param_groups"] = [deepmd_kit_group(1, muon_2d_only=True, min_2d_dim=5)]
    optimizer = HybridMuon([("w", w)], min_matrix_dim=5)
    optimizer.load_state_dict(saved)
    assert torch.equal(optimizer.state[w]["exp_avg"], saved["state"][0]["exp_avg"])
    with pytest.raises(RoutingMismatchError, match="saved: route adam"):
        HybridMuon([("w", w)]).load_state_dict(saved)


def intermediate_state():
    """As the latest version's, but routed without names: a bias (1, 50) and today's exceptions alike."""
    saved = latest_state()
    del saved["param_groups"][0]["magma_muon"]
    del saved["state"][1]["magma_score"]
    return saved


def own_state():
    params = present_parameters()
    for index, (_, p) in enumerate(params):
        p.grad = random(*p.shape, seed=index)
    optimizer = HybridMuon(params)
    optimizer.step()
    return optimizer.state_dict()


ORIGINS = {
    "deepmd_muon": own_state,
    "deepmd-kit 3.2.0": latest_state,
    "deepmd-kit without names": intermediate_state,
    "deepmd-kit's first": first_version_state,
}
MATRIX, VECTOR = "descriptor.layers.1.matrix", "fitting.layers.0.idt"
# What changed, the parameter of which the route or view is another one now, and the state it migrates to.
CHANGES = {
    "smallest matrix": ({"min_matrix_dim": 26}, MATRIX, "exp_avg"),
    "route of a matrix": ({"adam_patterns": [MATRIX]}, MATRIX, "exp_avg"),
    "view of a matrix": ({"splits": [f"{MATRIX}: rows 5"]}, MATRIX, "momentum_buffer"),
    "Adam to AdamW": ({"adamw_patterns": [VECTOR]}, VECTOR, "exp_avg"),
    "AdamW for vectors": ({"vector_route": "adamw"}, VECTOR, "exp_avg"),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("origin", ORIGINS)
def test_a_changed_setting_is_seen_in_states_of_every_origin(origin, change):
    """Only the version explains a difference: `on_route_change` decides about those that a setting makes."""
    settings, name, key = CHANGES[change]

    def loaded(policy, **settings):
        params = present_parameters()
        optimizer = HybridMuon(params, on_route_change=policy, **settings)
        optimizer.load_state_dict(ORIGINS[origin]())
        return optimizer.state.get(dict(params)[name], {})

    assert loaded("error")
    with pytest.raises(RoutingMismatchError) as caught:
        loaded("error", **settings)
    assert name in [line.split(":")[0] for line in caught.value.differences]
    assert key in loaded("migrate", **settings)
    assert not loaded("reset", **settings)


@pytest.mark.parametrize("origin", ORIGINS)
def test_another_muon_mode_is_seen_in_states_of_every_origin(origin):
    """Weights with three dimensions: own states and those with `muon_mode` tell their view."""
    w = nn.Parameter(random(3, 4, 5))
    saved = stepped([("w", w)]).state_dict()
    group = {
        "deepmd_muon": saved["param_groups"][0],
        "deepmd-kit 3.2.0": deepmd_kit_group(1, muon_mode="slice", magma_muon=True),
        "deepmd-kit without names": deepmd_kit_group(1, muon_mode="slice"),
        "deepmd-kit's first": deepmd_kit_group(1, muon_2d_only=False, min_2d_dim=1),
    }[origin]
    state = {"state": saved["state"], "param_groups": [group]}
    now = "2d" if origin == "deepmd-kit's first" else "flat"
    with pytest.raises(RoutingMismatchError, match="w: saved: route muon"):
        HybridMuon([("w", w)], muon_mode=now).load_state_dict(state)
    reset = HybridMuon([("w", w)], muon_mode=now, on_route_change="reset")
    reset.load_state_dict(state)
    assert not reset.state


@pytest.mark.parametrize("keyed", ["names", "attached"])
def test_states_with_names_load_in_any_order(keyed):
    params = present_parameters()
    saved = latest_state()
    names = [f"model.Default.{name}" for name in SHAPES]
    if keyed == "names":
        state = {names[i]: values for i, values in saved["state"].items()}
        saved = {"state": state, "param_groups": [{**saved["param_groups"][0], "params": names}]}
    else:
        saved = name_deepmd_kit_state(saved, names)
    optimizer = HybridMuon(params[::-1])
    optimizer.load_state_dict(saved)
    expected = HybridMuon(params)
    expected.load_state_dict(latest_state())
    for _, p in params:
        assert_same_state(expected.state[p], optimizer.state[p])


def test_more_parameters_than_here_need_names():
    saved = latest_state()
    saved["param_groups"][0]["params"].append(5)
    params = present_parameters()
    with pytest.raises(ForeignStateError, match=r"6 parameters without names.* 5; attach names"):
        HybridMuon(params).load_state_dict(saved)
    with pytest.raises(ForeignStateError, match="lists 6 parameters; found 5 names"):
        name_deepmd_kit_state(saved, SHAPES)
    named = name_deepmd_kit_state(saved, [*SHAPES, "descriptor.compress_info.0"])
    optimizer = HybridMuon(params)
    optimizer.load_state_dict(named)
    assert len(optimizer.state) == 5


@pytest.mark.parametrize("taken", [None, 30000])
def test_step_counts_beyond_the_resolution_of_powers(taken):
    params = present_parameters()
    saved = name_deepmd_kit_state(latest_state(steps=20000), SHAPES, taken)
    assert saved["state"][4]["beta2_pow"] == 0.0
    optimizer = HybridMuon(params)
    optimizer.load_state_dict(saved)
    step = optimizer.state[params[4][1]]["step"].item()
    assert step == taken if taken else 1.0 - BETAS[1] ** step == 1.0
    assert math.isfinite(step)


@pytest.mark.parametrize("clock", ["of the group", "of each parameter"])
def test_the_clock_of_deepmd_kit_after_3_2_0(clock):
    """Instead of numbers: powers of the decays in the group, or 1 − power of each parameter."""
    saved = latest_state(steps=37)
    for values in saved["state"].values():
        for number in (1, 2):
            power = values.pop(f"beta{number}_pow", None)
            if power is not None and clock == "of each parameter":
                values[f"bias_correction{number}"] = torch.tensor(1.0 - power)
    if clock == "of the group":
        powers = {f"beta{n}_pow_device": torch.tensor(BETAS[n - 1] ** 37) for n in (1, 2)}
        saved["param_groups"][0] |= powers
    params = present_parameters()
    optimizer = HybridMuon(params)
    optimizer.load_state_dict(saved)
    expected = HybridMuon(params)
    expected.load_state_dict(latest_state(steps=37))
    for _, p in params:
        assert_same_state(expected.state[p], optimizer.state[p])


@pytest.mark.parametrize("saved_has_it", [True, False])
def test_parameters_without_elements_may_come_and_go(saved_has_it, caplog):
    """deepmd-kit's models hold empty ``compress_*``, which ours do not: they carry no state."""
    w, empty = nn.Parameter(random(4, 6)), nn.Parameter(torch.zeros(0, 4))
    sides = [("w", w)], [("w", w), ("compress_data.0", empty)]
    saved = stepped(sides[saved_has_it])
    loaded = reloaded(sides[not saved_has_it], saved, policy="error")
    assert torch.equal(loaded.state[w]["momentum_buffer"], saved.state[w]["momentum_buffer"])
    assert not [record for record in caplog.records if record.levelname == "WARNING"]
