import pytest
import torch
from small_models import section_of

from deepmd_muon.model import build_model
from deepmd_muon.train.ema import Ema, EmaError

FIRST = "atomic_model.descriptor.sea.filter_layers.networks.0.layers.0.matrix"


@pytest.fixture
def model():
    descriptor = {
        "type": "se_e2_a",
        "sel": [2, 4],
        "rcut": 3.0,
        "neuron": [2, 4],
        "axis_neuron": 2,
        "seed": 1,
    }
    return build_model(section_of(descriptor, {"neuron": [3], "seed": 1}))


def set_all(model, value):
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(value)


def test_average_follows_its_formula(model):
    set_all(model, 1.0)
    ema = Ema(model, decay=0.9)
    expected = 1.0
    for value in (2.0, -1.0, 5.0):
        set_all(model, value)
        ema.update()
        expected = 0.9 * expected + 0.1 * value
    for name, average in ema.averages().items():
        torch.testing.assert_close(average, torch.full_like(average, expected), msg=name)


def test_the_last_parameters_have_equal_weights(model):
    values = [float(value) for value in torch.randn(9, generator=torch.Generator().manual_seed(0))]
    ema = Ema(model, first=4)
    for done, value in enumerate(values, 1):
        set_all(model, value)
        if done == 7:  # a restart
            saved, ema = ema.state_dict(), Ema(model, first=4)
            ema.load_state_dict(saved)
            ema.resume(6)
        ema.update()
        expected = sum(values[4:done]) / (done - 4) if done > 4 else value
        for name, average in ema.averages().items():
            torch.testing.assert_close(
                average, torch.full_like(average, expected), msg=f"{name} {done}"
            )


def test_state_has_deepmd_kits_form_and_survives_weights_only_loading(model, tmp_path):
    ema = Ema(model, decay=0.75)
    set_all(model, 7.0)
    ema.update()
    torch.save(ema.state_dict(), tmp_path / "ema.pt")
    state = torch.load(tmp_path / "ema.pt", weights_only=True)
    assert set(state) == {"decay", "model", "validation_state"}
    # Parameters and deepmd-kit's empty ones, no buffers.
    filled = {name for name, tensor in state["model"].items() if tensor.numel()}
    assert filled == {name for name, _ in model.named_parameters()}
    empty = set(state["model"]) - filled
    assert empty == {
        f"atomic_model.descriptor.sea.compress_{kind}.{i}"
        for kind in ("info", "data")
        for i in range(4)
    }

    restarted = Ema(model, decay=0.75)
    restarted.load_state_dict(state)
    for name, average in ema.averages().items():
        assert torch.equal(restarted.averages()[name], average)


def test_state_does_not_change_with_later_updates(model):
    ema = Ema(model, decay=0.5)
    before = ema.state_dict()["model"][FIRST].clone()
    state = ema.state_dict()
    set_all(model, 9.0)
    ema.update()
    assert torch.equal(state["model"][FIRST], before)


def test_a_changed_decay_is_said_and_the_runs_own_kept(model, caplog):
    ema = Ema(model, decay=0.9)
    ema.load_state_dict(Ema(model, decay=0.5).state_dict())
    assert ema.decay == 0.9
    assert "ema_decay is 0.9 here and was 0.5 before the restart" in caplog.text


def test_another_models_state_is_refused(model):
    state = Ema(model, decay=0.9).state_dict()
    state["model"]["other"] = state["model"].pop(FIRST)
    with pytest.raises(EmaError, match=rf"lacks 1 .*'{FIRST}'.* has 1 others .*'other'"):
        Ema(model, decay=0.9).load_state_dict(state)
    state = Ema(model, decay=0.9).state_dict()
    state["model"][FIRST] = torch.zeros(3, 3)
    with pytest.raises(
        EmaError, match=r"layers\.0\.matrix has shape \(3, 3\); the model's is \(1, 2\)"
    ):
        Ema(model, decay=0.9).load_state_dict(state)


def test_decay_must_be_below_one(model):
    with pytest.raises(EmaError, match=r"\[0, 1\); found 1\.0"):
        Ema(model, decay=1.0)
