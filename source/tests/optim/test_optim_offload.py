"""Moments in host memory: the same steps, states and copies of the optimizer, and copies in the right order."""

from __future__ import annotations

import contextlib
import copy
import gc
import weakref

import pytest
import torch
from optim_builders import assert_same, parameters, train
from torch import nn

from deepmd_muon.optim import HybridMuon, HybridMuonConfig, InvalidSettingError
from deepmd_muon.optim.state.host_memory import DeviceBuffers, HostMemory, TransferBatch
from deepmd_muon.optim.state.schema import ALL_MOMENTS, StateHolder

SHAPES = {
    "a_weight": (12, 20),
    "b_weight": (12, 20),
    "experts": (3, 8, 5),
    "a_bias": (20,),
    "adamw_scale": (7,),
    "scalar": (),
}


def make(**settings):
    params = nn.ParameterDict(parameters(SHAPES))
    return params, HybridMuon(params.items(), **{"lr": 0.02, "weight_decay": 0.1, **settings})


@pytest.mark.parametrize("size", [1, 700, 2**20])
def test_buffers_hold_one_batch(size):
    model, optimizer = make(offload=True, offload_bytes=size)
    train(model, optimizer, 2)
    (buffers,) = optimizer._host_memory._buffers.values()
    largest = 12 * 20 * 4
    for buffer in buffers._buffers:
        assert buffer.numel() <= max(size, largest) + 10 * 256  # tensors start at multiples of 256


def test_moments_are_in_few_storages():
    model, optimizer = make(offload=True)
    train(model, optimizer, 1)
    for number, keys in ((1, ("momentum_buffer",)), (2, ("exp_avg", "exp_avg_sq"))):
        found = [s[key] for s in optimizer.state.values() for key in keys if key in s]
        assert len(found) == 3 * number
        # AdamW's parameter is stepped apart from Adam's.
        assert len({x.untyped_storage().data_ptr() for x in found}) == number
        assert all(x.data_ptr() % 64 == 0 for x in found)


class LoggedBuffers(DeviceBuffers):
    """Buffers that log their copies."""

    def __init__(self, device, log):
        super().__init__(device)
        self.log = log

    def _fetch(self, batch, k):
        self.log.append(("fetch", batch, k))
        super()._fetch(batch, k)

    def _evict(self, batch, k):
        self.log.append(("evict", batch, k))
        super()._evict(batch, k)


def test_the_next_batch_is_fetched_before_a_batch_is_stepped_and_buffers_take_turns():
    cpu, log = torch.device("cpu"), []
    offload = HostMemory(batch_bytes=64)
    params = [nn.Parameter(torch.full((4, 4), float(i))) for i in range(4)]
    state = {p: {"momentum_buffer": p.detach().clone()} for p in params}
    batches = [offload.transfer_batch(state, [(p, "momentum_buffer")]) for p in params]
    buffers = LoggedBuffers(cpu, log)
    for step in range(2):
        for i, (batch, (moment,)) in enumerate(
            zip(batches, buffers.fetch_in_turn(batches), strict=True)
        ):
            log.append(("step", batch, None))
            assert torch.equal(moment, torch.full((4, 4), float(i + step)))
            moment += 1
            home = state[params[i]]["momentum_buffer"]
            assert moment.data_ptr() != home.data_ptr()
            assert torch.equal(home, moment - 1)  # until it is copied back
    a, b, c, d = batches
    order = [
        ("fetch", a, 0),
        ("fetch", b, 1),
        ("step", a, None),
        ("evict", a, 0),
        ("fetch", c, 0),
        ("step", b, None),
    ]
    order += [
        ("evict", b, 1),
        ("fetch", d, 1),
        ("step", c, None),
        ("evict", c, 0),
        ("step", d, None),
        ("evict", d, 1),
    ]
    assert log == 2 * order
    assert [state[p]["momentum_buffer"][0, 0].item() for p in params] == [2.0, 3.0, 4.0, 5.0]
    assert [buffer.numel() for buffer in buffers._buffers] == [256, 256]


class FakeStream:
    """A stream that knows what it has waited for: for every stream, how many of its operations are surely done."""

    now = None

    def __init__(self, name):
        self.name, self.done = name, {}

    def record_event(self):
        return dict(self.done)

    def wait_event(self, event):
        self.done = {
            name: max(self.done.get(name, 0), event.get(name, 0)) for name in {*self.done, *event}
        }

    def wait_stream(self, other):
        self.wait_event(other.record_event())


class Races:
    """Accesses to memory by several streams; two of them, one a write, must be in an order that waits enforce."""

    def __init__(self):
        self.seen = {}

    def access(self, x, *, write):
        stream = FakeStream.now
        stream.done[stream.name] = stream.done.get(stream.name, 0) + 1
        for name, count, wrote in self.seen.setdefault(x.data_ptr(), []):
            assert not (write or wrote) or stream.done.get(name, 0) >= count, (
                f"{stream.name} does not wait for {name}"
            )
        self.seen[x.data_ptr()].append((stream.name, stream.done[stream.name], write))


@pytest.mark.parametrize(
    "forgotten", [None, "fetch before step", "step before evict", "evict before fetch", "steps"]
)
def test_streams_wait_for_each_other_wherever_they_share_memory(monkeypatch, forgotten):
    """Streams of a fake device, all of whose accesses are checked; leaving out any kind of wait is noticed."""
    races, main = Races(), FakeStream("main")

    @contextlib.contextmanager
    def on(stream):
        before, FakeStream.now = FakeStream.now, stream
        yield
        FakeStream.now = before

    class FakeBuffers(DeviceBuffers):
        def _copy(self, into, sources):
            for target, source in zip(into, sources, strict=True):
                races.access(source, write=False)
                races.access(target, write=True)
                target.copy_(source)

    monkeypatch.setattr(FakeStream, "now", main)
    monkeypatch.setattr(torch.cuda, "stream", on)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: FakeStream.now)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda *_: None)
    buffers = FakeBuffers(torch.device("cpu"))
    inward = buffers._to_device = FakeStream("in")
    outward = buffers._to_host = FakeStream("out")
    buffers._has_streams = True
    waits = {"fetch before step": main, "step before evict": outward, "evict before fetch": inward}
    if forgotten in waits:
        monkeypatch.setattr(waits[forgotten], "wait_event", lambda _: None)
    if forgotten == "steps":
        monkeypatch.setattr(inward, "wait_stream", lambda _: None)
    offload = HostMemory(batch_bytes=64)
    state = {p: {"exp_avg": p.detach().clone()} for p in [torch.randn(4, 4) for _ in range(5)]}
    batches = [offload.transfer_batch(state, [(p, "exp_avg")]) for p in state]

    def steps():
        for some in (batches, batches, batches[:2], batches[1:2]):
            for (moment,) in buffers.fetch_in_turn(some):
                races.access(moment, write=True)
                moment += 1

    if forgotten is None:
        steps()
        for i, (p, values) in enumerate(state.items()):
            torch.testing.assert_close(values["exp_avg"], p + (3, 4, 2, 2, 2)[i])
    else:
        with pytest.raises(AssertionError, match="does not wait for"):
            steps()


def test_a_transfer_batch_keeps_layouts_and_empty_tensors():
    offload = HostMemory(batch_bytes=2**20)
    params = [
        torch.randn(3, 4, dtype=torch.float64).T,
        torch.randn(0, 5),
        torch.randn(5).bfloat16(),
    ]
    state = {p: {"exp_avg": p.clone()} for p in params}
    batch = offload.transfer_batch(state, [(p, "exp_avg") for p in params])
    assert isinstance(batch, TransferBatch)
    (moments,) = DeviceBuffers(torch.device("cpu")).fetch_in_turn([batch])
    for p, x in zip(params, moments, strict=True):
        assert (x.dtype, x.shape, x.stride()) == (p.dtype, p.shape, p.stride())
        assert torch.equal(x, p)


def test_memory_is_released_when_moments_are_offloaded_loaded_and_restored():
    model, optimizer = make()
    train(model, optimizer, 2)
    moments = [
        weakref.ref(x) for s in optimizer.state.values() for k, x in s.items() if k in ALL_MOMENTS
    ]
    optimizer.offload()
    assert len(moments) == 9
    assert not any(moment() is not None for moment in moments)
    train(model, optimizer, 1, start=2)
    saved = copy.deepcopy(optimizer.state_dict())
    for release in (lambda: optimizer.load_state_dict(saved), lambda: optimizer.offload(False)):
        on_host = [
            weakref.ref(x)
            for by_key in optimizer._host_memory._offloaded.values()
            for x in by_key.values()
        ]
        release()
        assert len(on_host) == 9
        assert not any(x() is not None for x in on_host)


def test_no_moment_stays_where_the_first_step_created_it(monkeypatch):
    """On a GPU that would be the device, and offloading would save nothing."""
    created = []
    full = StateHolder.full

    def create(holder, tensor):
        value = full(holder, tensor)
        if tensor.extent == "parameter":
            created.append(weakref.ref(value))
        return value

    monkeypatch.setattr(StateHolder, "full", create)
    model, optimizer = make(offload=True)
    train(model, optimizer, 2)
    assert len(created) == 9
    assert not any(moment() is not None for moment in created)


def test_routes_may_change_and_parameters_be_added():
    plain, other = make(), make(offload=True)
    for model, optimizer in (plain, other):
        train(model, optimizer, 1)
        model.a_weight.requires_grad_(False)
        train(model, optimizer, 1, start=1)
        model.a_weight.requires_grad_(True)
        torch.manual_seed(1)
        model.late = nn.Parameter(torch.randn(6, 4))
        optimizer.add_param_group({"params": [("late", model.late)]})
        train(model, optimizer, 2, start=2)
    assert_same(plain, other)


def test_as_a_setting_of_the_input():
    model = nn.ParameterDict(parameters(SHAPES))
    assert HybridMuonConfig(offload=True).build(model)._host_memory is not None
    assert HybridMuonConfig().build(model)._host_memory is None
    with pytest.raises(InvalidSettingError, match="offload_bytes: must be >= 1; found 0"):
        HybridMuon(model.named_parameters(), offload_bytes=0)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
class TestOnAGPU:
    def make(self, **settings):
        torch.manual_seed(0)
        model = nn.ParameterList(torch.randn(512, 512, device="cuda") for _ in range(12))
        model.append(nn.Parameter(torch.randn(2**20, device="cuda")))
        return model, HybridMuon(model.named_parameters(), lr=0.02, **settings)

    def train(self, model, optimizer, steps, start=0):
        for step in range(start, start + steps):
            generator = torch.Generator("cuda").manual_seed(step)
            for p in model.parameters():
                p.grad = torch.randn(p.shape, generator=generator, device="cuda")
            optimizer.step()

    def memory_of_tensors(self):
        """Bytes on the device without what a process keeps for any optimizer, and drops for any.

        That is a workspace of cuBLAS for each stream that it has run on, maybe in earlier tests.
        """
        gc.collect()
        torch._C._cuda_clearCublasWorkspaces()
        return torch.cuda.memory_allocated()

    def test_steps_are_the_same_and_memory_is_pinned_and_bounded(self):
        made = []
        for settings in ({}, {"offload": True, "offload_bytes": 3 * 2**20}):
            before = self.memory_of_tensors()
            pair = self.make(workspace=3 * 2**18, **settings)
            self.train(*pair, 5)
            made.append((pair, self.memory_of_tensors() - before))
        (plain, held), (other, held_with_offload) = made
        moments, rooms = (
            12 * 2**20 + 8 * 2**20,
            3 * 2**20 + 8 * 2**20,
        )  # Adam's large parameter travels whole
        assert held_with_offload < held - moments + rooms + 2**21
        state = other[1].state_dict()["state"]
        for values, p, q in zip(
            state.values(), other[0].parameters(), plain[0].parameters(), strict=True
        ):
            assert torch.equal(p, q)
            for key, x in values.items():
                assert torch.equal(x.cpu(), plain[1].state[q][key].cpu())
                assert key in ("step", "magma_score") or x.is_pinned()
        other[1].offload(False)
        self.train(*plain, 2, start=5)
        self.train(*other, 2, start=5)
        assert all(
            torch.equal(p, q)
            for p, q in zip(other[0].parameters(), plain[0].parameters(), strict=True)
        )
        assert all(x.is_cuda for values in other[1].state.values() for x in values.values())

    def test_a_capture_is_refused(self):
        from deepmd_muon.optim import CaptureError

        model, optimizer = self.make(offload=True, capturable=True)
        self.train(model, optimizer, 1)
        graph = torch.cuda.CUDAGraph()
        with pytest.raises(CaptureError, match="offload\\(False\\)"), torch.cuda.graph(graph):
            optimizer.step()


def test_each_dtype_has_its_own_memory():
    """torch.save refuses storages with tensors of several dtypes."""
    params = [nn.Parameter(torch.randn(4, 6)) for _ in range(3)]
    kinds = {"momentum_buffer": torch.bfloat16, "master_weight": torch.float32}
    state = {p: {key: torch.randn(4, 6).to(dtype) for key, dtype in kinds.items()} for p in params}
    before = copy.deepcopy([list(state[p].values()) for p in params])
    batch = HostMemory(1 << 20).transfer_batch(state, [(p, key) for p in params for key in kinds])
    expected = [x for values in before for x in values]
    torch.testing.assert_close(batch.on_host, expected, rtol=0, atol=0)
    storages = {x.untyped_storage().data_ptr(): x.dtype for p in params for x in state[p].values()}
    assert sorted(map(str, storages.values())) == ["torch.bfloat16", "torch.float32"]
