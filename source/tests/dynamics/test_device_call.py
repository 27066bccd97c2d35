"""Forces whose lists live on the device equal the predictor's while atoms move, cells change and lists grow."""

import os
from dataclasses import replace

import numpy as np
import pytest
import torch
from conftest import build

from deepmd_muon.data import NeighborError
from deepmd_muon.infer import Predictor
from deepmd_muon.infer.device_call import DeviceCall
from deepmd_muon.model.neighbors import kernels
from deepmd_muon.model.nn import triton_support
from deepmd_muon.model.nn.graphs import GraphMemory


@pytest.fixture(params=["torch", pytest.param("kernels", marks=pytest.mark.gpu)])
def device(request, monkeypatch):
    if request.param == "torch":
        monkeypatch.setattr(triton_support, "usable", lambda _: False)
        return torch.device("cpu")
    if torch.cuda.is_available():
        return torch.device("cuda")
    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("there is no GPU; in the interpreter, test_model_kernels runs the kernels")
    monkeypatch.setattr(triton_support, "usable", lambda _: True)
    monkeypatch.setattr(kernels, "BLOCK", 128)
    return torch.device("cpu")


def call_of(name, frames, device, skin=0.8):
    model = build(name)
    atype = torch.tensor(frames.atype, dtype=torch.int64, device=device)
    memory = GraphMemory() if device.type == "cuda" else None
    call = DeviceCall(model.to(device), atype, frames.box is not None, skin, memory)
    # Triton's kernels must not take part in what they are compared with.
    return call, lambda given: Predictor(build(name), device="cpu").evaluate(given)


def assert_same(call, expect, frames, allowed=1e-9):
    found = call.predict(frames.coord, frames.box, None, None)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(triton_support, "usable", lambda _: False)
        expected = expect(frames)
    for name in ("energy", "virial", "force", "atom_energy"):
        np.testing.assert_allclose(getattr(found, name), getattr(expected, name), atol=allowed, err_msg=name)


@pytest.mark.parametrize("name", ["se_e2_a", "dpa1", "dpa3"])
def test_moving_atoms_and_cells(device, name, frames):
    random = np.random.default_rng(5)
    call, expect = call_of(name, frames, device)
    real = (frames.atype >= 0)[:, :, None]
    calls = 4
    for step in range(calls):
        assert_same(call, expect, frames)
        moved = frames.coord + random.normal(scale=0.04, size=frames.coord.shape) * real
        frames = replace(frames, coord=moved)
        if step == 2:
            assert int(call.lists.built.sum()) < 3 * len(frames.box)
            frames = replace(frames, box=1.03 * frames.box)
    assert call.version < calls


@pytest.mark.parametrize("name", ["smooth", "dpa3"])
def test_lists_grow(device, name, frames):
    """Atoms come together: what was enough for wide cells is not any more."""
    wide = replace(frames, coord=1.6 * frames.coord, box=1.6 * frames.box)
    call, expect = call_of(name, wide, device)
    assert_same(call, expect, wide)
    assert_same(call, expect, frames)
    assert call.version >= 1
    assert_same(call, expect, replace(frames, coord=0.9 * frames.coord, box=0.9 * frames.box))


def test_tables_reach_farther_when_atoms_come_closer(device, frames):
    call, expect = call_of("smooth", frames, device)
    assert_same(call, expect, frames)
    assert call._table is not None
    close = frames.coord.copy()
    close[:, 1] = close[:, 0] + [0.45, 0.0, 0.0]
    assert_same(call, expect, replace(frames, coord=close), allowed=1e-7)
    assert call.version == 1


@pytest.mark.parametrize(("change", "message"), [(np.nan, "finite"), (0.0, "same place")])
def test_atoms_at_fault_are_named(device, frames, change, message):
    call, _ = call_of("smooth", frames, device)
    call.predict(frames.coord, frames.box, None, None)
    wrong = frames.coord.copy()
    wrong[1, 3] = wrong[1, 4] + change
    with pytest.raises(NeighborError, match=message) as error:
        call.predict(wrong, frames.box, None, None)
    assert error.value.frame == 1
