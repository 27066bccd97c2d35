"""Forces whose lists live on the device equal the predictor's while atoms move, cells change and lists grow."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from dynamics_models import build

from deepmd_muon.checkpoint_file.archive import ArchiveError
from deepmd_muon.checkpoint_file.frozen_archive import MANIFEST, WEIGHTS, weights_of
from deepmd_muon.data import NeighborError
from deepmd_muon.deploy.freeze import freeze
from deepmd_muon.dynamics import Barostat, ForceField, Langevin, Systems, simulate
from deepmd_muon.dynamics.integrators import _Run
from deepmd_muon.infer import Predictor
from deepmd_muon.infer.device_call import DeviceCall
from deepmd_muon.infer.frozen import FrozenModel
from deepmd_muon.model.neighbors.atoms import ROOM
from deepmd_muon.model.nn import triton_support
from deepmd_muon.model.nn.graphs import GraphMemory


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
        np.testing.assert_allclose(
            getattr(found, name), getattr(expected, name), atol=allowed, err_msg=name
        )


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


def test_lists_of_launches_that_do_not_count_are_made_again(device, frames):
    wide = replace(frames, coord=1.6 * frames.coord, box=None)
    call, expect = call_of("smooth", wide, device)
    assert_same(call, expect, wide)
    call.lists.coord.copy_(torch.tensor(frames.coord))
    call.launch()
    room = call.needed()[ROOM]
    assert room
    call.discard()
    assert not any(call.needed())
    call.launch()
    assert call.needed()[ROOM] == room
    call.discard()
    call.lists.coord.copy_(torch.tensor(wide.coord))
    call.launch()
    version = call.version
    assert call.settled(call.needed())
    assert call.version == version


def test_tables_reach_as_far_as_atoms_came(device, frames):
    """Atoms that were near in one of several launches are so at the first repetition."""
    call, expect = call_of("smooth", frames, device)
    assert_same(call, expect, frames)
    nearer = replace(frames, coord=frames.coord.copy())
    nearer.coord[0, 1] = frames.coord[0, 0] + [0.2, 0.1, 0.0]
    for given in (frames, nearer, frames):
        call.lists.coord.copy_(torch.tensor(given.coord))
        call.launch()
    assert not call.settled(call.needed())
    call.prepare()
    assert 0.1 < call._table.nearest <= 0.05**0.5
    version = call.version
    assert_same(call, expect, nearer)
    assert call.version == version


def test_tables_reach_farther_when_atoms_come_closer(device, frames):
    call, expect = call_of("smooth", frames, device)
    assert_same(call, expect, frames)
    assert call._table is not None
    close = frames.coord.copy()
    close[:, 1] = close[:, 0] + [0.45, 0.0, 0.0]
    assert_same(call, expect, replace(frames, coord=close), allowed=1e-7)
    assert call.version == 1


def test_a_model_made_in_inference_mode_predicts(device, frames):
    with torch.inference_mode():
        call, expect = call_of("smooth", frames, device)
        assert_same(call, expect, frames)


def test_tables_follow_the_weights(device, frames):
    call, _ = call_of("smooth", frames, device)
    before = call.predict(frames.coord, frames.box, None, None).force
    model = build("smooth")
    with torch.no_grad():
        for own, other in zip(call._model.parameters(), model.parameters(), strict=True):
            own.mul_(1.01)
            other.mul_(1.01)
    assert_same(call, lambda given: Predictor(model, device="cpu").evaluate(given), frames)
    assert np.abs(call.predict(frames.coord, frames.box, None, None).force - before).max() > 1e-7


@pytest.mark.parametrize(("change", "message"), [(np.nan, "finite"), (0.0, "same place")])
def test_atoms_at_fault_are_named(device, frames, change, message):
    call, _ = call_of("smooth", frames, device)
    call.predict(frames.coord, frames.box, None, None)
    wrong = frames.coord.copy()
    wrong[1, 3] = wrong[1, 4] + change
    with pytest.raises(NeighborError, match=message) as error:
        call.predict(wrong, frames.box, None, None)
    assert error.value.frame == 1


@pytest.fixture
def force_fields(device):
    """Two force fields of one model: lists and results of the second stay on the device."""
    if device.type == "cpu" and triton_support.usable(device):
        pytest.skip("the force calls of the interpreter are compared above")
    found = [ForceField(Predictor(build("smooth"), device=device), skin=0.6) for _ in range(2)]
    for force_field, resident in zip(found, (False, True), strict=True):
        force_field.predictor.resident = force_field.predictor.model if resident else None
        force_field.predictor.batch_atoms = 48
    return found


def ends_of(force_fields, frames, run):
    """Return the ends of two runs from the same start."""
    device = force_fields[0].device
    systems = Systems.from_frames(frames, ("O", "H"), device).heated(
        300.0, torch.Generator().manual_seed(1)
    )
    return [run(force_field, systems) for force_field in force_fields]


@pytest.mark.parametrize("case", ["NVE", "Langevin", "pressure"])
def test_dynamics_on_the_device_are_those_of_the_host(force_fields, frames, case):
    thermostat = None if case == "NVE" else Langevin(torch.tensor([200.0, 300.0, 400.0]), 0.05)
    barostat = Barostat(0.1, 300.0, time=20.0, every=5) if case == "pressure" else None
    settings = {"thermostat": thermostat, "barostat": barostat, "every": 8, "seed": 4}
    host, device = ends_of(
        force_fields, frames, lambda f, s: list(simulate(f, s, 24, 0.5, **settings))
    )
    assert [snapshot.step for snapshot in device] == [snapshot.step for snapshot in host]
    assert force_fields[1].launchable(device[-1].systems.box, device[-1].systems.atype)
    for one, other in zip(host, device, strict=True):
        torch.testing.assert_close(other.systems.coord, one.systems.coord, rtol=0.0, atol=1e-7)
        torch.testing.assert_close(
            other.systems.velocity, one.systems.velocity, rtol=0.0, atol=1e-8
        )
        torch.testing.assert_close(other.forces.energy, one.forces.energy, rtol=0.0, atol=1e-7)


def test_lost_structures_are_those_of_the_host(force_fields, frames, monkeypatch):
    """The device stops before the step that loses a structure; the host takes only this step and names the atom."""
    by_host = []
    do_on_host = _Run._do_on_host
    monkeypatch.setattr(
        _Run, "_do_on_host", lambda run: [by_host.append(run.step), do_on_host(run)]
    )

    def run(force_field, systems):
        by_host.clear()
        systems.mass[1, 2] = 4e-6  # u: small forces make it too fast after some steps
        systems.velocity[0, 3] = torch.tensor([0.3, 0.0, 0.0])
        return [
            lost
            for snapshot in simulate(force_field, systems, 8, 0.55, every=8)
            for lost in snapshot.lost
        ]

    host, device = ends_of(force_fields, frames, run)
    assert host[0].step > 1
    assert device == host
    assert by_host == sorted({lost.step - 1 for lost in host})


def test_steps_are_repeated_where_lists_have_to_grow(force_fields, frames):
    settings = {"every": 8}
    apart = replace(frames.rows(slice(1, 2)), box=None)
    systems = Systems.from_frames(
        replace(apart, coord=1.8 * apart.coord), ("O", "H"), force_fields[0].device
    )
    inwards = systems.coord.mean(1, keepdim=True) - systems.coord
    systems = replace(systems, velocity=0.06 * inwards)
    host, device = (list(simulate(f, systems, 16, 0.5, **settings))[-1] for f in force_fields)
    torch.testing.assert_close(device.systems.coord, host.systems.coord, rtol=0.0, atol=1e-6)
    assert force_fields[1].version % 1_000_000 >= 1


@pytest.mark.parametrize(
    "name",
    [
        "se_e2_a",
        pytest.param("dpa1", marks=pytest.mark.slow),
        pytest.param("dpa3", marks=pytest.mark.slow),
    ],
)
def test_frozen_files_hold_their_model(name, frames, tmp_path, monkeypatch):
    freeze(build(name), tmp_path / "model.pth")
    frozen = FrozenModel(tmp_path / "model.pth", "cpu")
    assert list(frozen.program.get_type_map()) == ["O", "H"]
    expected, restored = build(name).state_dict(), frozen.restored().state_dict()
    assert expected.keys() == restored.keys()
    assert all(restored[key].equal(value) for key, value in expected.items())
    predictor = Predictor(tmp_path / "model.pth", device="cpu")
    assert predictor.resident is None
    force_field = ForceField(predictor)
    systems = Systems.from_frames(frames, ("O", "H"))
    expected = force_field(systems.coord, systems.box, systems.atype)
    predictor.resident = frozen.restored()
    force_field.reset()
    found = force_field(systems.coord, systems.box, systems.atype)
    assert force_field.launchable(systems.box, systems.atype)
    torch.testing.assert_close(found.force, expected.force, rtol=0.0, atol=1e-9)


def test_weights_of_a_frozen_file_are_compared_with_its_list(tmp_path):
    freeze(build("se_e2_a"), tmp_path / "model.pth")
    assert weights_of((tmp_path / "model.pth").read_bytes()) is not None
    held = {MANIFEST: "", WEIGHTS: ""}
    program = torch.jit.load(tmp_path / "model.pth", _extra_files=held)
    torch.jit.save(
        program, tmp_path / "other.pth", _extra_files=held | {WEIGHTS: held[WEIGHTS] + b" "}
    )
    with pytest.raises(ArchiveError, match="list"):
        weights_of((tmp_path / "other.pth").read_bytes())
