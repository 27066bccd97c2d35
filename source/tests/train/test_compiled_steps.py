"""Steps whose gradient is one compiled program give the numbers of plain steps."""

import importlib.util
import logging

import numpy as np
import pytest
import torch
from compared import assert_same
from hosted_models import hosted_input, spin_input, write_data, write_spin_data

needs_deepmd_kit = pytest.mark.skipif(
    importlib.util.find_spec("deepmd") is None, reason="deepmd-kit is not importable here"
)
DEVICES = ["cpu"]
if torch.cuda.is_available():
    DEVICES.append("cuda")


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
def test_a_program_differentiates_and_draws_as_the_function_does(device):
    from deepmd_muon.train.step.fusion import fused

    def function(matrices, vectors, scale):
        scale = scale.detach().requires_grad_()
        with torch.enable_grad():
            points = vectors.detach().requires_grad_()
            turned = torch.bmm(matrices, (points * scale).tanh())  # small: a sum in a kernel
            squares = torch.bmm(turned.transpose(1, 2)[:, :20], turned)  # of 20 x 9 and 9 x 24
            traces = torch.bmm(squares, turned[:, :1].transpose(1, 2))  # sums of 24 terms
            outer = torch.bmm(turned[:1].transpose(1, 2), turned[:1])  # few: a library's
            kept = turned * torch.rand(turned.shape, dtype=turned.dtype, device=turned.device)
            energy = kept.pow(2).sum() + outer.sin().sum() + traces.sum()
            (slope,) = torch.autograd.grad(energy, points, create_graph=True)
            loss = slope.pow(2).sum()
            (gradient,) = torch.autograd.grad(loss, scale)
        gradient = gradient.add_(1.0)
        return [loss.detach(), gradient.t().contiguous().t()]

    torch.manual_seed(1)
    arguments = [
        torch.randn(shape, dtype=torch.float64, device=device)
        for shape in ((600, 9, 7), (600, 7, 24), (7, 24))
    ]
    for _ in range(2):
        program = fused(function, arguments)
        torch.manual_seed(2)
        results = program(list(arguments))
        torch.manual_seed(2)
        for result, expected in zip(results, function(*arguments), strict=True):
            assert result.stride() == expected.stride()
            torch.testing.assert_close(result, expected, rtol=1e-12, atol=1e-12)


@needs_deepmd_kit
@pytest.mark.deepmd_kit
@pytest.mark.parametrize(
    "kind", ["se_e2_r", "se_e2_a with spins", pytest.param("dpa4", marks=pytest.mark.slow)]
)
def test_a_compiled_run_gives_the_weights_of_a_plain_one(
    kind, tmp_path, train, load, on_device, caplog
):
    """With random numbers of the model, several batches a step, an average, and a restart."""
    on_device()
    kind, _, has_spins = kind.partition(" ")
    make_input, write = (spin_input, write_spin_data) if has_spins else (hosted_input, write_data)
    system = write(tmp_path, nframes=4)
    content = make_input(kind, system, 4, save_freq=2, enable_ema=True)
    content["training"]["accumulate_grad_batches"] = 2
    if kind == "dpa4":
        content["model"]["descriptor"]["random_gamma"] = True
    assert train(content, skip_neighbor_stat=True) == 0
    plain = load("model.ckpt-4.pt")
    content["training"]["enable_compile"] = True
    assert train(content, skip_neighbor_stat=True, log_level="INFO") == 0
    assert sum("compiled in" in message for message in caplog.messages) == 1
    compiled = load("model.ckpt-4.pt")
    # DPA-4 computes its geometry in float32; Adam divides small gradients by their size.
    assert_same(plain, compiled, 1e-4 if kind == "dpa4" else 1e-9, ("model", "ema"))
    assert train(content, skip_neighbor_stat=True, restart="model.ckpt-2.pt") == 0
    assert_same(compiled, load("model.ckpt-4.pt"), 0.0, ("model", "ema"))


@needs_deepmd_kit
@pytest.mark.deepmd_kit
def test_a_failing_compiler_leaves_plain_steps(tmp_path, train, on_device, caplog, monkeypatch):
    from deepmd_muon.train.step import fusion

    def fail(*_):
        raise RuntimeError("no compiler")

    on_device()
    monkeypatch.setattr(fusion, "fused", fail)
    content = hosted_input("se_e2_r", write_data(tmp_path), 2, enable_compile=True)
    with caplog.at_level(logging.WARNING):
        assert train(content, skip_neighbor_stat=True) == 0
    assert sum("no compiler" in message for message in caplog.messages) == 1
    assert np.isfinite(np.loadtxt("lcurve.out", comments="#")).all()


def test_the_log_says_why_steps_are_not_compiled(small_input, train, on_device, caplog):
    on_device()
    content = small_input(training={"enable_compile": True, "numb_steps": 2})
    assert train(content, log_level="INFO") == 0
    assert "training steps are not compiled: the model has kernels of its own" in caplog.text
