"""Captured steps of models with parameters and excluded types on a GPU: the weights of eager ones, and of the CPU."""

import pytest
import torch
from test_capture_gpu import _on_gpu, assert_equal_weights  # noqa: F401 (a fixture)
from test_parameter_runs import DESCRIPTORS, an_input, systems  # noqa: F401 (a fixture)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


@pytest.mark.parametrize("batch_size", [1, "mixed:3"])
@pytest.mark.parametrize("kind", DESCRIPTORS)
def test_captured_steps_give_the_weights_of_eager_ones(
    kind,
    batch_size,
    systems,  # noqa: F811
    train,
    load,
    monkeypatch,
):
    content = an_input(f"{kind}-everything", systems, numb_steps=8)
    content["training"]["training_data"]["batch_size"] = batch_size
    # Rounding, which differs between devices, does not grow.
    content["optimizer"] |= {"lr_adjust_coeff": 0.18, "precision": "float64"}
    found = {}
    for capture in ("off", "auto"):
        content["training"]["capture"] = capture
        assert train(content, skip_neighbor_stat=True) == 0
        found[capture] = load()
    assert_equal_weights(found["off"], found["auto"])
    monkeypatch.setenv("DEVICE", "cpu")
    assert train(content, skip_neighbor_stat=True) == 0
    for name, value in load()["model"].items():
        if isinstance(value, torch.Tensor) and value.numel():
            distance = float((found["auto"]["model"][name].cpu() - value).abs().max())
            assert distance <= 1e-5 * max(1.0, float(value.abs().max())), (name, distance)
