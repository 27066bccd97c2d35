"""The function that is compiled for captured steps: traced here, compiled on a GPU (`pytest -m gpu`)."""

import pytest
import torch

from deepmd_muon.argcheck import normalize
from deepmd_muon.data import DataLoader, NeighborCache, open_systems
from deepmd_muon.loss import build_loss
from deepmd_muon.model import build_model
from deepmd_muon.model.descriptor.pieces import uniform
from deepmd_muon.train.batches.batch import map_tensors, to_device
from deepmd_muon.train.batches.streamed import with_full_sections
from deepmd_muon.train.step import compiled
from deepmd_muon.train.step.compiled import CompiledGradient, differentiate

ATTENTION = {
    "rcut": 4.5,
    "rcut_smth": 2.0,
    "sel": 60,
    "neuron": [4, 8],
    "axis_neuron": 3,
    "attn": 6,
    "attn_layer": 2,
}
EDGES = {
    "n_dim": 6,
    "e_dim": 5,
    "nlayers": 2,
    "e_rcut": 4.5,
    "e_rcut_smth": 2.0,
    "e_sel": 60,
    "axis_neuron": 2,
}
ANGLES = {"a_dim": 4, "a_rcut": 3.2, "a_rcut_smth": 2.0, "a_sel": 20, "smooth_edge_update": True}
REPFLOW = {**EDGES, **ANGLES}
DESCRIPTORS = {
    "se_e2_a": {},
    "interpolated": {},
    "se_atten": {"type": "se_atten", **ATTENTION},
    "se_atten_v2": {"type": "se_atten_v2", **ATTENTION},
    "dpa3": {"type": "dpa3", "repflow": REPFLOW},
    "dpa3-dynamic": {
        "type": "dpa3",
        "repflow": {**REPFLOW, "use_dynamic_sel": True, "sel_reduce_factor": 1.0},
    },
    "dpa3-sequential": {
        "type": "dpa3",
        "repflow": {
            **REPFLOW,
            "sequential_update": True,
            "n_multi_edge_message": 2,
            "a_compress_rate": 1,
        },
    },
}


def prepare(small_input, name, device="cpu"):
    """Return a model, its loss and a batch."""
    content = small_input()
    if DESCRIPTORS[name]:
        content["model"]["descriptor"] = {**DESCRIPTORS[name], "seed": 1}
    else:
        content["model"]["descriptor"]["sel"] = [60]
    given = normalize(content)
    model = build_model(given.normalized["model"]).to(device)
    if name == "interpolated":
        model.pieces = uniform(16)
    settings = given.settings
    systems = open_systems(settings.training.training_data.systems, model.type_map)
    cache = NeighborCache.of(model.neighbors, 1)
    loader = DataLoader(systems, 2, seed=3, cache=cache)
    batch = with_full_sections(to_device(loader.next(), 1, torch.device(device)))
    return model, build_loss(settings.loss), batch


def gradients(model):
    found = {name: p.grad for name, p in model.named_parameters()}
    model.zero_grad(set_to_none=True)
    return found


@pytest.mark.parametrize("name", ["se_atten_v2", "dpa3", "dpa3-sequential"])
def test_recomputed_layers_give_the_same_gradient_from_less_memory(small_input, name):
    model, loss, batch = prepare(small_input, name)
    kept, found = [], []
    for _ in range(2):
        sizes = []

        def pack(x, sizes=sizes):
            sizes.append(x.nbytes)
            return x

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            model(batch.structures, force=False)
        kept.append(sum(sizes))
        differentiate(model, loss, batch, 1.0)
        found.append(gradients(model))
        assert model.recompute_layers()
    assert kept[1] < 0.6 * kept[0]
    assert found[0].keys() == found[1].keys()
    for parameter, gradient in found[0].items():
        torch.testing.assert_close(found[1][parameter], gradient, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("name", ["interpolated", "se_atten_v2", "dpa3", "dpa3-sequential"])
def test_the_traced_function_is_the_plain_one(small_input, name):
    model, loss, first = prepare(small_input, name)
    fraction = torch.tensor(0.5, dtype=torch.float64)
    differentiate(model, loss, first, fraction)
    gradients(model)
    gradient = CompiledGradient(model, loss, compiler=lambda graph, arguments: graph)
    gradient.expect("layout")
    assert gradient.wants("layout")
    gradient.compile(first, fraction)
    assert gradient.failed is None
    assert not gradient.wants("layout")
    # Other values in everything that may change between steps.
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(1.1)
    moved = map_tensors(first, lambda x: x * 1.001 if x.dtype == torch.float64 else x)
    fraction = torch.tensor(0.25, dtype=torch.float64)
    expected, metrics = differentiate(model, loss, moved, fraction)
    wanted = gradients(model)
    value, found = gradient(moved, fraction)
    torch.testing.assert_close(value, expected, rtol=1e-12, atol=0)
    assert found.keys() == metrics.keys()
    for key, metric in metrics.items():
        torch.testing.assert_close(found[key], metric, rtol=1e-10, atol=1e-14, equal_nan=True)
    for key, mine in gradients(model).items():
        if wanted[key] is None:
            assert mine is None or not mine.any(), key
        else:
            torch.testing.assert_close(
                mine, wanted[key], rtol=1e-9, atol=1e-11 * float(wanted[key].abs().max())
            )


def test_what_cannot_be_compiled_stays_plain_and_says_so_once(small_input, caplog):
    model, loss, first = prepare(small_input, "se_e2_a")
    fraction = torch.tensor(1.0, dtype=torch.float64)
    expected, _ = differentiate(model, loss, first, fraction)

    def broken(graph, arguments):
        raise RuntimeError("no compiler\nhere")

    gradient = CompiledGradient(model, loss, compiler=broken)
    gradient.expect("layout")
    gradient.compile(first, fraction)
    assert gradient.failed == "RuntimeError: no compiler … here"
    assert not gradient.wants("another layout")
    assert torch.equal(gradient(first, fraction)[0], expected)
    assert [record.levelname for record in caplog.records].count("WARNING") == 1


def test_a_bounded_number_of_layouts_is_compiled_until_the_model_computes_otherwise(
    small_input, monkeypatch
):
    monkeypatch.setattr(compiled, "MOST_COMPILED", 2)
    model, loss, first = prepare(small_input, "se_e2_a")
    fraction = torch.tensor(1.0, dtype=torch.float64)
    gradient = CompiledGradient(model, loss, compiler=lambda graph, arguments: graph)
    for layout in range(2):
        assert gradient.wants(layout)
        gradient.expect(layout)
        gradient.compile(first, fraction)
    assert not gradient.wants(2)
    gradient.forget()
    assert gradient.wants(2)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(
            name,
            marks=pytest.mark.xfail(
                reason="torch 2.11's compiler fails on it", raises=AssertionError
            ),
        )
        if name.startswith("dpa3")
        else name
        for name in DESCRIPTORS
    ],
)
def test_the_compiled_function_is_the_plain_one(small_input, name):
    model, loss, first = prepare(small_input, name, "cuda")
    fraction = torch.tensor(0.5, dtype=torch.float64, device="cuda")
    differentiate(model, loss, first, fraction)
    gradients(model)
    gradient = CompiledGradient(model, loss)
    gradient.expect("layout")
    gradient.compile(first, fraction)
    assert gradient.failed is None
    batch = map_tensors(first, lambda x: x * 1.001 if x.dtype == torch.float64 else x)
    expected, _ = differentiate(model, loss, batch, fraction)
    wanted = gradients(model)
    value, _ = gradient(batch, fraction)
    torch.testing.assert_close(value, expected, rtol=1e-11, atol=0)
    for key, mine in gradients(model).items():
        if wanted[key] is not None:
            torch.testing.assert_close(
                mine, wanted[key], rtol=1e-8, atol=1e-10 * float(wanted[key].abs().max())
            )
