"""On a CUDA device: quality with half-precision operands, captured steps, skipped steps, equality with the CPU."""

from __future__ import annotations

import pytest
import torch
from example_rules import BRAKE, SOAP
from optim_builders import parameters
from torch import nn

from deepmd_muon.optim import CaptureError, HybridMuon

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

SHAPES = {
    "a.matrix": (25, 50),
    "b.matrix": (240, 240),
    "c.matrix": (3, 20, 64),
    "a.bias": (50,),
    "adamw_g": (50,),
}


def make(device, **settings):
    params = parameters(SHAPES, device=device)
    return params, HybridMuon(params.items(), **{"lr": 0.02, **settings})


def give_gradients(params, step):
    for i, (name, p) in enumerate(params.items()):
        g = torch.randn(SHAPES[name], generator=torch.Generator().manual_seed(100 * step + i)).to(
            p.device
        )
        p.grad = g if p.grad is None else p.grad.copy_(g)


def test_steps_equal_those_of_the_cpu():
    cpu, on_cpu = make("cpu")
    gpu, on_gpu = make("cuda")
    for step in range(3):
        for params, optimizer in ((cpu, on_cpu), (gpu, on_gpu)):
            give_gradients(params, step)
            optimizer.step()
    for name, p in cpu.items():
        assert (p - gpu[name].cpu()).norm() <= 2e-3 * (p - make("cpu")[0][name]).norm(), name


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"on_nonfinite": "skip"},
        {"workspace": 1000},
        {"normuon": True, "cautious_decay": True},
        {"normuon": True, "layout": "in_out", "magma_muon": False, "on_nonfinite": "skip"},
        SOAP,
        {**BRAKE, "on_nonfinite": "skip"},
        {**SOAP, "magma_muon": False, "on_nonfinite": "skip"},
    ],
)
def test_a_captured_step_equals_the_eager_one_bitwise_and_follows_the_learning_rate(settings):
    eager, plain = make("cuda", capturable=True, **settings)
    captured, graphed = make("cuda", capturable=True, **settings)
    for params, optimizer in ((eager, plain), (captured, graphed)):
        give_gradients(params, 0)
        optimizer.step()
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    kept = {name: p.detach().clone() for name, p in captured.items()}
    with torch.cuda.graph(graph):
        graphed.step()
    assert all(torch.equal(kept[name], p) for name, p in captured.items())
    for step in range(1, 4):
        for params, optimizer in ((eager, plain), (captured, graphed)):
            give_gradients(params, step)
            optimizer.param_groups[0]["lr"].fill_(0.02 / step)
        plain.step()
        graph.replay()
    for name, p in eager.items():
        assert torch.equal(p, captured[name]), name
        for key, x in plain.state[p].items():
            assert torch.equal(x, graphed.state[captured[name]][key]), (name, key)


@pytest.mark.parametrize(
    "settings", [{}, {"normuon": True, "rules": ["soap_muon", "radial_brake"]}]
)
def test_captured_steps_of_several_optimizers_run_beside_each_other(settings):
    """On streams of their own, begun while others run: no memory of one is another's."""
    eager, captured = (
        [make("cuda", capturable=True, **settings) for _ in range(3)] for _ in range(2)
    )
    streams, graphs = [torch.cuda.Stream() for _ in captured], []
    torch.cuda.synchronize()
    for number, (params, optimizer) in enumerate(captured):
        with torch.cuda.stream(streams[number]):
            for k in range(3):
                give_gradients(params, k + number)
                optimizer.step()
        streams[number].synchronize()
        graphs.append(torch.cuda.CUDAGraph())
        with torch.cuda.graph(graphs[-1], stream=streams[number]):
            optimizer.step()
    for _ in range(50):
        for graph, stream in zip(graphs, streams, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
    torch.cuda.synchronize()
    for number, (params, optimizer) in enumerate(eager):
        for k in range(53):
            if k < 3:
                give_gradients(params, k + number)
            optimizer.step()
        for name, p in params.items():
            assert torch.equal(p, captured[number][0][name]), (number, name)


def test_recorded_steps_of_a_large_model_equal_launched_ones(monkeypatch):
    """With gradients elsewhere in memory and another rate in each step."""
    from deepmd_muon.optim.update import fused, fused_steps  # need Triton

    monkeypatch.setattr(fused, "_STEPS_BEFORE_RECORDING", 1)
    shapes = ((2048, 1024), (1024, 2048), (768, 2048), (7, 40))
    results = []
    for share in (0.0, fused_steps._RECORDED_SHARE):
        monkeypatch.setattr(fused_steps, "_RECORDED_SHARE", share)
        random = torch.Generator("cuda").manual_seed(0)
        params = [
            nn.Parameter(torch.randn(shape, generator=random, device="cuda")) for shape in shapes
        ]
        optimizer = HybridMuon([(f"w{i}.matrix", p) for i, p in enumerate(params)], lr=0.02)
        for step in range(4):
            for p in params:
                p.grad = torch.randn(p.shape, generator=random, device="cuda")
            optimizer.param_groups[0]["lr"] = 0.02 / (step + 1)
            optimizer.step()
        (fused_step,) = optimizer._compiled._fused._known.values()
        assert bool(fused_step._recorded) == (share > 0)
        results.append([p.detach() for p in params])
    for launched, recorded in zip(*results, strict=True):
        assert torch.equal(launched, recorded)


def test_captures_that_would_go_wrong_are_refused():
    params, optimizer = make("cuda")
    give_gradients(params, 0)
    optimizer.step()
    torch.cuda.synchronize()
    for broken, message in (
        (lambda: optimizer, "capturable=True"),
        (lambda: make_fresh(), "take one step before the capture"),
    ):
        candidate = broken()
        with pytest.raises(CaptureError, match=message), torch.cuda.graph(torch.cuda.CUDAGraph()):
            candidate.step()
        torch.cuda.synchronize()


def make_fresh():
    params, optimizer = make("cuda", capturable=True)
    give_gradients(params, 0)
    torch.cuda.synchronize()
    return optimizer


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"normuon": True, "cautious_decay": True},
        SOAP,
        BRAKE,
    ],
)
def test_no_step_waits_for_the_device(settings):
    params, optimizer = make("cuda", on_nonfinite="skip", **settings)
    give_gradients(params, 0)
    optimizer.step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        optimizer.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_a_skipped_step_changes_no_bit():
    params, optimizer = make("cuda", on_nonfinite="skip")
    give_gradients(params, 0)
    optimizer.step()
    before = {name: p.detach().clone() for name, p in params.items()}
    give_gradients(params, 1)
    params["b.matrix"].grad[3, 4] = float("nan")
    optimizer.step()
    assert all(torch.equal(before[name], p) for name, p in params.items())


def test_restarts_are_bitwise_on_the_device():
    params, optimizer = make("cuda")
    for step in range(2):
        give_gradients(params, step)
        optimizer.step()
    other, fresh = make("cuda")
    for name, p in other.items():
        p.data.copy_(params[name])
    fresh.load_state_dict(optimizer.state_dict())
    for which, mover in ((params, optimizer), (other, fresh)):
        give_gradients(which, 2)
        mover.step()
    assert all(torch.equal(p, other[name]) for name, p in params.items())


@pytest.mark.parametrize("settings", [{}, {"on_nonfinite": "skip"}, {"adam_lr_ratio": 0.5}])
def test_adam_beside_muon_uses_the_gradients_and_rate_of_the_step(settings):
    later = [
        {name: torch.randn(shape, device="cuda") for name, shape in SHAPES.items()}
        for _ in range(6)
    ]
    results = []
    for beside in (True, False):
        params, optimizer = make("cuda", capturable=True, **settings)
        give_gradients(params, 0)
        optimizer.step()
        assert optimizer._compiled.side_stream is not None
        if not beside:
            optimizer._compiled.side_stream = None
        for k, grads in enumerate(later):
            torch.cuda._sleep(
                2_000_000
            )  # gradients and the learning rate are there long after the step is launched
            for name, p in params.items():
                p.grad.copy_(grads[name])
            optimizer.param_groups[0]["lr"].fill_(0.02 / (1 + k))
            optimizer.step()
            for p in params.values():
                p.grad.fill_(7.0)  # must not be seen by the step
        assert (optimizer._compiled.side_stream is not None) == beside
        results.append(
            [*params.values(), *(x for s in optimizer.state.values() for x in s.values())]
        )
    assert all(torch.equal(p, q) for p, q in zip(*results, strict=True))


@pytest.mark.parametrize("captured", [False, True])
def test_large_waves_on_two_streams_are_those_on_one(captured):
    results = []
    for together in (True, False):
        generator = torch.Generator("cuda").manual_seed(0)

        def draw(shape, generator=generator):
            return torch.randn(shape, device="cuda", generator=generator)

        params = [nn.Parameter(draw(shape)) for shape in [(2048, 2304)] * 3 + [(2304, 2048)] * 2]
        named = [(f"{i}.matrix", p) for i, p in enumerate(params)]
        optimizer = HybridMuon(named, lr=0.02, capturable=True, workspace=5_000_000)
        for p in params:
            p.grad = draw(p.shape)
        optimizer.step()
        assert len(optimizer._compiled.wave_streams) == 2
        if not together:
            optimizer._compiled.wave_streams = ()
        run = optimizer.step
        if captured:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                optimizer.step()
            run = graph.replay
        for k in range(4):
            later = [draw(p.shape) for p in params]
            torch.cuda._sleep(20_000_000)  # the gradients are there long after the step is launched
            for p, g in zip(params, later, strict=True):
                p.grad.copy_(g)
            optimizer.param_groups[0]["lr"].fill_(0.02 / (1 + k))
            run()
            for p in params:
                p.grad.fill_(7.0)  # must not be seen by the step
        assert bool(optimizer._compiled.wave_streams) == together
        results.append([*params, *(x for s in optimizer.state.values() for x in s.values())])
    assert all(torch.equal(p, q) for p, q in zip(*results, strict=True))


def test_parameters_may_live_on_another_device_than_the_current_one():
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two devices")
    results = []
    for device in ("cuda:0", "cuda:1"):
        params, optimizer = make(device)
        for step in range(3):
            give_gradients(params, step)
            optimizer.step()
        results.append([p.detach().cpu() for p in params.values()])
    assert all(torch.equal(p, q) for p, q in zip(*results, strict=True))


@pytest.mark.parametrize("settings", [{"adam_patterns": ["*"]}, {"adamw_patterns": ["*"]}, {}])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_strides_do_not_matter_and_a_float64_learning_rate_is_read_exactly(settings, dtype):
    lr = 0.1 if dtype == torch.float32 else torch.tensor(0.1, dtype=torch.float64, device="cuda")
    found = []
    for layout in (torch.contiguous_format, torch.channels_last):
        p = nn.Parameter(torch.linspace(-1, 1, 144, dtype=dtype, device="cuda").view(4, 6, 3, 2))
        optimizer = HybridMuon([("w", p)], lr, precision="float64", **settings)
        for step in range(3):
            p.data = p.data.contiguous(memory_format=layout)
            grad = torch.randn(
                p.shape, generator=torch.Generator().manual_seed(step), dtype=torch.float64
            )
            p.grad = grad.to("cuda", dtype)
            optimizer.step()
        found.append(p.detach().cpu())
    q = nn.Parameter(torch.linspace(-1, 1, 144, dtype=dtype).view(4, 6, 3, 2))
    on_cpu = HybridMuon([("w", q)], 0.1, precision="float64", **settings)
    for step in range(3):
        q.grad = torch.randn(
            q.shape, generator=torch.Generator().manual_seed(step), dtype=torch.float64
        ).to(dtype)
        on_cpu.step()
    # Matrices of 3 × 2 have small singular values, whose rounding the iteration enlarges.
    tolerance = 1e-5 if dtype == torch.float32 else 1e-12 if settings else 1e-8
    for p in found:
        torch.testing.assert_close(p, q.detach(), rtol=tolerance, atol=tolerance)


def test_a_captured_step_of_float64_parameters_keeps_the_learning_rate_in_float64():
    p = nn.Parameter(torch.ones(4, 6, dtype=torch.float64, device="cuda"))
    (group,) = HybridMuon([("w", p)], 0.1, capturable=True).param_groups
    assert group["lr"].dtype == torch.float64
    assert float(group["lr"]) == 0.1


def test_first_launches_wait_for_the_stream_of_a_busy_caller():
    """A thread's default stream does not: kernels read addresses that were not written yet."""
    from deepmd_muon.optim.update import fused_steps  # needs Triton

    params, optimizer = make("cuda")
    give_gradients(params, 0)
    optimizer.step()  # compiles
    fused_steps._COMPILED.clear()
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(10**9)
        optimizer.compile_kernels()
        junk = [torch.full((64,), -1, device="cuda") for _ in range(100)]
    torch.cuda.synchronize()  # raises an illegal access
    assert all(x[0] == -1 for x in junk)
