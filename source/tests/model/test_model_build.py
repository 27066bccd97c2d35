"""Building models: names, seeds, registries, trainability, statistics, errors, checkpoints of other kinds."""

import copy
import dataclasses
import math
from typing import ClassVar

import numpy as np
import pytest
import torch
from model_batches import make_batch, oxygen_batch, pull_back, read_fixture, section

from deepmd_muon.model import (
    CheckpointError,
    DescriptorSettings,
    ForeignModelError,
    ModelError,
    NeighborRequest,
    Structures,
    build_model,
    describe_by_autograd,
    environment_statistics,
    register_descriptor,
    register_fitting,
)
from deepmd_muon.model.deepmd_kit import (
    OURS_ONLY,
    deepmd_kit_parameter_names,
    from_deepmd_kit,
    to_deepmd_kit,
)
from deepmd_muon.model.errors import BranchError
from deepmd_muon.model.nn.networks import Layer, Network, Stream
from deepmd_muon.model.registry import DESCRIPTORS
from deepmd_muon.registry import NameTakenError
from deepmd_muon.setting import setting

STRUCTURES = read_fixture()["structures"]


def batch(kind="orthorhombic", sel=(40, 30), **more):
    data = STRUCTURES[kind]
    return make_batch(data["coord"], data["atype"], data["box"], 4.0, sel, **more)


def test_a_checkpoint_says_what_deepmd_kit_cannot_read(monkeypatch):
    model = build_model(section())
    assert OURS_ONLY not in to_deepmd_kit(model, {"step": 1})["_extra_state"]
    usual = DESCRIPTORS.translation(model.settings.descriptor)
    ours = dataclasses.replace(
        usual, ours_only=lambda own: [f"axis_neuron {own.axis_neuron} is ours"]
    )
    monkeypatch.setattr(DESCRIPTORS, "translation", lambda _: ours)
    stored = to_deepmd_kit(model, {"step": 1})
    assert stored["_extra_state"][OURS_ONLY] == ["descriptor: axis_neuron 4 is ours"]
    with pytest.raises(CheckpointError, match="axis_neuron 4 is ours"):
        deepmd_kit_parameter_names(model)
    assert from_deepmd_kit(stored)[1].keys() == model.state_dict().keys()


def test_parameter_names_and_order():
    model = build_model(
        section(descriptor={"neuron": [4, 8], "resnet_dt": True}, fitting_net={"neuron": [6, 6]})
    )
    hidden = ["0.matrix", "0.bias", "1.matrix", "1.bias", "1.idt"]
    parts = {"descriptor.sea": hidden, "fitting_net": [*hidden, "2.matrix", "2.bias"]}
    wanted = [
        f"atomic_model.{part}.filter_layers.networks.{i}.layers.{name}"
        for part, names in parts.items()
        for i in range(2)
        for name in names
    ]
    assert [name for name, _ in model.named_parameters()] == wanted
    assert {name for name, _ in model.named_buffers()} == {
        "atomic_model.out_bias",
        "atomic_model.out_std",
        "atomic_model.descriptor.sea.mean",
        "atomic_model.descriptor.sea.stddev",
        "atomic_model.fitting_net.bias_atom_e",
    }
    assert (model.type_map, model.ntypes) == (("O", "H"), 2)
    assert (model.rcut, model.sel, model.by_type) == (4.0, (40, 30), True)


def weights(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def test_seeds_make_weights_and_leave_the_global_stream_alone():
    before = torch.random.get_rng_state()
    first, second = build_model(section()), build_model(section())
    assert torch.equal(weights(first), weights(second))
    other = build_model(section(descriptor={"seed": 99}))
    assert not torch.equal(weights(first), weights(other))
    fitting = [name for name, _ in first.named_parameters() if "fitting" in name]
    assert all(torch.equal(first.get_parameter(n), other.get_parameter(n)) for n in fitting)
    free = section(descriptor={"seed": None}, fitting_net={"seed": None})
    assert torch.equal(weights(build_model(free, seed=5)), weights(build_model(free, seed=5)))
    assert not torch.equal(weights(build_model(free)), weights(build_model(free)))
    assert torch.equal(torch.random.get_rng_state(), before)


def test_no_two_layers_start_alike():
    nets_of_pairs = {"neuron": [8, 8, 8], "type_one_side": False}
    model = build_model(section(descriptor=nets_of_pairs, fitting_net={"neuron": [8, 8]}))
    squares = [p.flatten() for p in model.parameters() if p.shape == (8, 8)]
    assert len(squares) == 4 * 2 + 2
    assert len({tuple(p.tolist()) for p in squares}) == len(squares)


def test_starting_distribution():
    layer = Layer(200, 300, timestep=True, dtype=torch.float64, stream=Stream(1))
    assert layer.matrix.std().item() == pytest.approx(1 / math.sqrt(500), rel=0.02)
    assert layer.matrix.mean().item() == pytest.approx(0, abs=1e-3)
    assert layer.bias.std().item() == pytest.approx(1.0, rel=0.15)
    assert layer.idt.mean().item() == pytest.approx(0.1, abs=3e-4)
    assert layer.idt.std().item() == pytest.approx(1e-3, rel=0.15)
    single = Layer(200, 300, timestep=True, dtype=torch.float32, stream=Stream(1))
    assert torch.equal(single.matrix, layer.matrix.float())


def test_residuals_follow_the_widths():
    network = Network((1, 2, 2, 4, 5), None, timestep=True, dtype=torch.float64, stream=Stream(0))
    assert network.copies == (2, 1, 2, 0)
    assert [layer.idt is not None for layer in network.layers] == [True, True, True, False]


@pytest.mark.parametrize("part", ["descriptor", "fitting_net"])
def test_trainable_false_stops_gradients_of_that_part(part):
    model = build_model(section(**{part: {"trainable": False}}))
    for name, parameter in model.named_parameters():
        assert parameter.requires_grad == (f"atomic_model.{part}." not in name)
    model(batch())["force"].square().sum().backward()
    for parameter in model.parameters():
        assert (parameter.grad is not None) == parameter.requires_grad
    whole = build_model(section(fitting_net={"trainable": [True] * 3}))
    assert all(p.requires_grad for p in whole.parameters())
    partly = build_model(section(fitting_net={"trainable": [True, False, True]}))
    assert not any(p.requires_grad for p in partly.atomic_model.fitting_net.parameters())


def test_no_grad_keeps_nothing():
    model = build_model(section())
    with torch.no_grad():
        out = model(batch())
    assert not any(value.requires_grad for value in out.values())
    assert set(out) == {"energy", "atom_energy", "force", "virial"}
    assert set(model(batch(), virial=False)) == {"energy", "atom_energy", "force"}


def test_every_parameter_gets_a_gradient_even_of_an_absent_type():
    for one_side in (True, False):
        model = build_model(section(descriptor={"type_one_side": one_side}))
        pull_back(model(oxygen_batch()))
        hydrogen = [
            p for n, p in model.named_parameters() if "fitting_net.filter_layers.networks.1." in n
        ]
        assert all(p.grad is not None for p in model.parameters())
        assert all((p.grad == 0).all() for p in hydrogen)


@pytest.mark.parametrize("one_side", [True, False])
def test_a_type_may_have_no_slots(one_side):
    model = build_model(section(descriptor={"sel": [40, 0], "type_one_side": one_side}))
    out = model(batch(sel=(40, 0)))
    pull_back(out)
    assert all(p.grad.isfinite().all() for p in model.parameters())
    assert out["force"].abs().max() > 1e-3


@pytest.mark.parametrize("neuron", [[4, 8], [4, 4]])
def test_a_type_may_be_absent_from_a_batch(neuron):
    model = build_model(section(fitting_net={"neuron": neuron}))
    out = model(oxygen_batch())
    out["force"].square().sum().backward()
    assert out["force"].abs().max() > 1e-6
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.gpu
@pytest.mark.parametrize("one_side", [True, False])
def test_a_gpu_gives_the_same(one_side):
    """Also with an absent type, without a synchronisation, and from a captured graph."""
    model = build_model(section(descriptor={"type_one_side": one_side, "resnet_dt": True}))
    on_gpu = copy.deepcopy(model).cuda()

    def run(which, given):
        which.zero_grad(set_to_none=True)
        out = which(given)
        pull_back(out)
        return {key: value.detach() for key, value in out.items()}

    for given in (batch(), oxygen_batch()):
        there = given.to("cuda")
        run(on_gpu, there)
        torch.cuda.set_sync_debug_mode("error")
        try:
            ours = run(on_gpu, there)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        for key, value in run(model, given).items():
            torch.testing.assert_close(ours[key].cpu(), value, rtol=1e-11, atol=1e-11)
        for ours_p, p in zip(on_gpu.parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(ours_p.grad.cpu(), p.grad, rtol=1e-10, atol=1e-10)
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    there = batch().to("cuda")
    with torch.cuda.stream(stream):
        run(on_gpu, there)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        captured = run(on_gpu, there)
    there.coord.add_(0.25)  # a captured step follows its inputs; moving all atoms changes nothing
    graph.replay()
    for key, value in run(model, batch()).items():
        torch.testing.assert_close(captured[key].cpu(), value, rtol=1e-10, atol=1e-10)


def test_precision_of_parameters_and_outputs():
    model = build_model(
        section(descriptor={"precision": "float32"}, fitting_net={"precision": "float64"})
    )
    dtypes = {n.split(".")[1]: p.dtype for n, p in model.named_parameters()}
    assert dtypes == {"descriptor": torch.float32, "fitting_net": torch.float64}
    out = model(batch())
    assert {value.dtype for value in out.values()} == {torch.float64}
    out["force"].square().sum().backward()
    double = build_model(section())
    for wanted, given in zip(double.parameters(), model.parameters(), strict=True):
        wanted.data.copy_(given)
    torch.testing.assert_close(double(batch())["force"], out["force"], rtol=0, atol=1e-5)


def test_statistics_of_a_type_without_atoms():
    model = build_model(section())
    mean, stddev = environment_statistics(model, [oxygen_batch()])
    assert mean[1].tolist() == [0, 0, 0, 0]
    assert stddev[1].tolist() == [0.1] * 4
    assert stddev[0].min() >= 0.01
    wide = build_model({**section(), "data_stat_protect": 10.0})  # it counts for parameters alone
    for found, expected in zip(
        environment_statistics(wide, [batch()]),
        environment_statistics(model, [batch()]),
        strict=True,
    ):
        assert torch.equal(found, expected)


def test_statistics_of_small_batches_take_one_thread_and_give_it_back(monkeypatch):
    model = build_model(section())
    taken = []
    environment = model.atomic_model.descriptor.environment
    monkeypatch.setattr(
        model.atomic_model.descriptor,
        "environment",
        lambda *given: taken.append(torch.get_num_threads()) or environment(*given),
    )
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        environment_statistics(model, [batch()])
        monkeypatch.setattr("deepmd_muon.model.statistics._SINGLE_THREAD_SLOTS", 1)
        environment_statistics(model, [batch()])
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
    assert taken == [1, 2]


@pytest.mark.parametrize("excluded", [[], [[0, 1]], [[1, 1]]])
def test_statistics_in_parts_are_those_of_whole_batches(monkeypatch, excluded):
    """To the last bit; parts end within a type, between types and behind the last atom."""
    given = section()
    model = build_model({**given, "descriptor": {**given["descriptor"], "exclude_types": excluded}})
    made, seen = [batch(), batch()], []
    environment = model.atomic_model.descriptor.environment
    monkeypatch.setattr(
        model.atomic_model.descriptor,
        "environment",
        lambda part, edges: (
            seen.append(sum(part.type_counts) - len(part.neighbor)) or environment(part, edges)
        ),
    )
    whole = environment_statistics(model, made)
    assert len(seen) == 2
    natoms, width = made[0].neighbor.shape
    for atoms in (1, 2, natoms - 1):
        seen.clear()
        monkeypatch.setattr("deepmd_muon.model.statistics._SLOTS_PER_THREAD", atoms * width)
        for part, expected in zip(environment_statistics(model, made), whole, strict=True):
            assert torch.equal(part, expected)
        assert seen == [0] * (2 * -(-natoms // atoms))


def test_structures_sort_atoms_by_type_and_count_them():
    atype = np.array([[1, -1, 0], [0, 1, 1]])
    neighbor = np.array([[[2, 1], [-1, -1], [0, -1]], [[1, -1], [0, 2], [1, -1]]])
    made = Structures.from_numpy(np.zeros((2, 3, 3)), atype, None, neighbor, None, (1, 1), 3)
    assert made.order.tolist() == [2, 3, 0, 4, 5]
    assert made.type_counts == (2, 3, 0)
    assert made.sorted_frame.tolist() == [0, 1, 0, 1, 1]
    assert made.neighbor.tolist() == [[0, -1], [4, -1], [2, 1], [3, 5], [4, -1]]
    assert (made.nframes, made.natoms) == (2, 3)
    assert made.filled.tolist() == [[1, 1, 1, 1, 1], [0, 0, 1, 1, 0]]
    assert made.to("cpu").sections == (1, 1)


def test_empty_slots_may_come_anywhere():
    full = batch(widths=(40, 30))
    model = build_model(section())
    shuffled = np.random.default_rng(1).permuted(
        np.tile(np.arange(40), (len(full.neighbor), 1)), axis=1
    )
    columns = torch.cat(
        [torch.from_numpy(shuffled), torch.arange(40, 70).expand(len(shuffled), -1)], 1
    )
    neighbor = full.neighbor.gather(1, columns)
    filled = full.filled.copy()
    filled[0] = [1 + max(np.flatnonzero(row[:40] >= 0), default=-1) for row in neighbor.numpy()]
    shift = full.shift.gather(1, columns[..., None].expand(-1, -1, 3))
    moved = dataclasses.replace(full, neighbor=neighbor, shift=shift, filled=filled)
    for key, value in model(full).items():
        torch.testing.assert_close(model(moved)[key], value, rtol=1e-12, atol=1e-12)
    slots = np.array([[[-1, 1, -1, -1], [-1, -1, 0, 0]]])
    atype = np.array([[0, 1]])
    holes = Structures.from_numpy(np.zeros((1, 2, 3)), atype, None, slots, None, (2, 2), 2)
    assert holes.filled.tolist() == [[2, 0], [0, 2]]


def test_impossible_batches_are_refused():
    def structures(sections, ntypes=2, columns=1, types=(0, 1), box=None):
        no_neighbors = -np.ones((1, 2, columns))
        atype = np.array([types])
        zeros = np.zeros((1, 2, 3))
        return Structures.from_numpy(zeros, atype, box, no_neighbors, None, sections, ntypes)

    with pytest.raises(ModelError, match="atom type 2 found"):
        structures((1, 0), types=(0, 2))
    with pytest.raises(ModelError, match="do not add up to 1"):
        structures((1, 1))
    with pytest.raises(ModelError, match="cell translations"):
        structures((1, 0), box=np.eye(3)[None])
    model = build_model(section(descriptor={"sel": [2, 2]}))
    with pytest.raises(ModelError, match="more than sel 2"):
        model(batch())
    with pytest.raises(ModelError, match="2 neighbour sections, found 1"):
        model(structures((1,)))
    with pytest.raises(ModelError, match="2 types, the batch 3"):
        model(structures((1, 1), ntypes=3, columns=2))
    with pytest.raises(ModelError, match="2 values, found 3"):
        model.set_energy_bias([1.0, 2.0, 3.0])


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"descriptor": {"type": "unheard"}}, "type must be .*'se_e2_a'.*'unheard'"),
        ({"fitting_net": {"type": "dipole"}}, "type must be 'ener'; found .*'dipole'"),
        ({"descriptor": {"sel": "auto"}}, "sel .* count the neighbours"),
        ({"descriptor": {"sel": [10]}}, "sel: .*one number for each of the 2 types"),
        ({"descriptor": {"rcut_smth": 4.0}}, "rcut_smth: must be below rcut"),
        ({"descriptor": {"axis_neuron": 17}}, "axis_neuron: .*found 17"),
        ({"descriptor": {"precision": "bfloat16"}}, "precision: .*'bfloat16'"),
        ({"descriptor": {"activation_function": "tanh:2"}}, "activation_function: .*'tanh:2'"),
        ({"descriptor": {"rcutt": 2.0}}, "rcutt: is not a known key"),
        ({"fitting_net": {"numb_fparam": -2}}, "numb_fparam: must be >= 0; found -2"),
        ({"fitting_net": {"atom_ener": [1.0]}}, "atom_ener: .*each of the 2 types.*found 1"),
    ],
)
def test_impossible_sections_are_refused(changes, words):
    with pytest.raises(ModelError, match=words):
        build_model(section(**changes))


@dataclasses.dataclass(frozen=True)
class MeanDistanceSettings(DescriptorSettings):
    """Settings of `MeanDistance`."""

    type: ClassVar[str] = "mean_distance"
    rcut: float = setting(2.0, above=0.0, doc="Cut-off radius [Å].")

    def neighbors(self):
        return NeighborRequest(self.rcut, (20,), by_type=False)


class MeanDistance(torch.nn.Module):
    """A third party's descriptor: one trainable power of the distances, derivatives left to autograd."""

    def __init__(self, settings, type_map, seed=None):
        super().__init__()
        self.rcut, self.dim_out = settings.rcut, 1
        self.power = torch.nn.Parameter(torch.tensor(1.5, dtype=torch.float64))

    def forward(self, structures, edges, *, force=True):
        def power_sum(edges):
            r = torch.where(structures.neighbor >= 0, edges.norm(dim=-1), self.rcut)
            return ((self.rcut - r) ** self.power).sum(1, keepdim=True)

        return describe_by_autograd(power_sum, edges, force=force)


@pytest.fixture
def mean_distance():
    register_descriptor(
        "mean_distance", settings=MeanDistanceSettings, module=MeanDistance, aliases=("mean",)
    )
    yield
    del DESCRIPTORS._parts["mean_distance"], DESCRIPTORS.aliases["mean"]


@pytest.mark.usefixtures("mean_distance")
def test_a_third_party_descriptor_runs_and_trains():
    made = build_model({**section(), "descriptor": {"type": "mean_distance", "rcut": 2.5}})
    assert not made.by_type
    assert len(made.atomic_model.fitting_net.filter_layers.networks) == 2
    coord = np.array([[[0.0, 0, 0], [1.1, 0, 0], [0, 1.3, 0.2]]])
    neighbor = np.array([[[1, 2], [0, 2], [0, 1]]])

    def energy(shift):
        moved = coord.copy()
        moved[0, 1, 1] += shift
        atype = np.array([[0, 1, 1]])
        return made(Structures.from_numpy(moved, atype, None, neighbor, None, (2,), 2))

    out = energy(0.0)
    mean, stddev = environment_statistics(made, [])
    made.set_statistics(mean, stddev)  # it standardises nothing
    slope = (energy(1e-5)["energy"] - energy(-1e-5)["energy"]).item() / 2e-5
    assert out["force"][0, 1, 1].item() == pytest.approx(-slope, abs=1e-8)
    out["force"].square().sum().backward()
    assert made.atomic_model.descriptor.power.grad.abs() > 0
    with pytest.raises(CheckpointError, match="mean_distance"):
        deepmd_kit_parameter_names(made)
    stored = to_deepmd_kit(made, {"step": 1})
    assert stored["_extra_state"][OURS_ONLY] == [
        "descriptor: deepmd-kit has no descriptor like 'mean_distance'"
    ]
    again, weights = from_deepmd_kit(stored)
    assert again.descriptor == MeanDistanceSettings(rcut=2.5)
    build_model(again).load_state_dict(weights)


@pytest.mark.usefixtures("mean_distance")
def test_a_taken_name_is_refused():
    own = {"settings": MeanDistanceSettings, "module": MeanDistance}
    register_descriptor("mean_distance", **own)  # again the same
    with pytest.raises(NameTakenError, match=r"'se_e2_a' is taken by .*SeE2A"):
        register_descriptor("se_e2_a", **own)
    with pytest.raises(NameTakenError, match=r"'se_a' is taken by .*SeE2A"):
        register_descriptor("another", **own, aliases=("se_a",))
    with pytest.raises(NameTakenError, match="'ener' is taken"):
        register_fitting("ener", **own)


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (lambda p: p.update(model_dict={"a": {}, "b": {}}), r"several models.*\(a, b\)"),
        (lambda p: p["descriptor"].update(type="se_t"), "descriptor's type is 'se_t'"),
        (lambda p: p["fitting_net"].update(type="dipole"), "fitting net's type is 'dipole'"),
        (lambda p: p.update(spin={"use_spin": [True]}), "spin is"),
        (lambda p: p.update(preset_out_bias={"energy": [1.0, None]}), "preset_out_bias is"),
        (lambda p: p.update(bridging_method="zbl"), "bridging_method is 'zbl'"),
        (lambda p: p.update(type="linear_ener"), "'linear_ener', not 'standard'"),
    ],
)
def test_models_of_another_kind_are_named(edit, words):
    state = copy.deepcopy(read_fixture()["cases"]["one_side"]["state"])
    edit(state["_extra_state"]["model_params"])
    with pytest.raises((ForeignModelError, BranchError), match=words):
        from_deepmd_kit(state)


def test_odd_tensors_of_a_checkpoint_are_named():
    state = read_fixture()["cases"]["one_side"]["state"]
    mean = "model.Default.atomic_model.descriptor.sea.mean"
    uneven = state[mean].clone()
    uneven[0, 3, 0] += 1e-9
    compressed = "model.Default.atomic_model.descriptor.sea.compress_data.0"
    for change, words in (
        ({mean: uneven}, "mean differs between"),
        ({compressed: torch.ones(2)}, "compressed"),
        ({"model.Branch.atomic_model.out_bias": torch.ones(2)}, "must begin with"),
    ):
        with pytest.raises(ForeignModelError, match=words):
            from_deepmd_kit({**state, **change})
    with pytest.raises(ForeignModelError, match="no '_extra_state'"):
        from_deepmd_kit({})
