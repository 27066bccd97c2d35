"""The kernels of model and training step against torch's operations, which define them, on each backend."""

import functools
import importlib.util
import itertools
from pathlib import Path

import pytest
import torch

if importlib.util.find_spec("triton") is None:
    pytest.skip("Triton is not installed (pip install deepmd-muon[gpu])", allow_module_level=True)

from corners import CORNERS, DESCRIPTORS, LAYERS, UNEVEN, assert_corner
from dpa1_attention import OPTIONS, attention_of, attention_results
from dpa1_embedding import NETS, assert_same_embedding, embedding_results
from dpa3_passes import angle_results, distance, edge_results, edge_sum_results, node_results
from kernel_backends import (
    DEVICE,
    in_interpreter_alone,
    on_each_backend,
    passed_in_interpreter,
    without_kernels,
)

from deepmd_muon.loss import ComparedAtoms, build_loss
from deepmd_muon.model import edges as edges_module
from deepmd_muon.model.descriptor import environment, environment_kernels
from deepmd_muon.model.descriptor.dpa1.geometry import geometry as dpa1_geometry
from deepmd_muon.model.descriptor.dpa3 import angles, edges, layer
from deepmd_muon.model.descriptor.dpa3.kernels import angles as angle_kernels
from deepmd_muon.model.descriptor.dpa3.kernels import edges as edge_kernels
from deepmd_muon.model.descriptor.pieces import lengths, uniform
from deepmd_muon.model.descriptor.reach import Reach
from deepmd_muon.model.descriptor.se_e2_a import interpolation
from deepmd_muon.model.descriptor.se_e2_a import kernels as se_e2_a_kernels
from deepmd_muon.model.nn import layer_kernels, layers, triton_support
from deepmd_muon.model.nn.activation import activation
from deepmd_muon.model.nn.networks import LayerTensors
from deepmd_muon.train.step.guard import DeviceGuard
from deepmd_muon.train.step.guard_kernel import judge
from deepmd_muon.train.strategy.base import Reduced

PASSES = {"angles": angle_results, "edges": edge_results}
SIZES = {
    "angles": {"width": 30, "atoms": 192, "n_a": 32, "n_m": 64},
    "edges": {"width": 120, "atoms": 192, "n_e": 64},
}
DTYPES = [torch.float64, torch.float32]
#: Of kernels that models at the corners run in float32, where float64 is compared more closely.
SLOW_IN_FLOAT32 = ["float64", pytest.param("float32", marks=pytest.mark.slow)]


HERE = Path(__file__)
OTHERS = (HERE.with_name("test_neighbor_search.py"), HERE.with_name("test_kernel_gates.py"))


@pytest.mark.parametrize(
    ("files", "tier", "count"),
    [
        # A new case raises the count: a case that is left out in silence would lower it.
        ((HERE, *OTHERS), "not slow", 144),
        pytest.param((HERE,), "slow", 76, marks=pytest.mark.slow),
    ],
    ids=["not slow", "slow"],
)
def test_kernels_in_the_interpreter(files, tier, count):
    assert passed_in_interpreter(*files, tier=tier) == count


class Draw:
    """Random tensors, the same on every backend."""

    def __init__(self, seed):
        self.generator = torch.Generator().manual_seed(seed)

    def normal(self, *shape, dtype=torch.float64):
        return torch.randn(*shape, dtype=dtype, generator=self.generator).to(DEVICE)

    def uniform(self, *shape, dtype=torch.float32):
        return torch.rand(*shape, dtype=dtype, generator=self.generator).to(DEVICE)

    def integers(self, low, high, shape):
        return torch.randint(low, high, shape, generator=self.generator).to(DEVICE)


def close(found, wanted, factor=1):
    """Compare relative to the largest element."""
    limit = factor * (1e-13 if wanted.dtype == torch.float64 else 2e-6)
    assert found.shape == wanted.shape
    assert float((found - wanted).abs().max()) <= limit * float(wanted.abs().max())


def fill_with_nan(x):
    return x.fill_(float("nan")) if x.is_floating_point() else x


@on_each_backend
@pytest.mark.parametrize("precision", SLOW_IN_FLOAT32)
@pytest.mark.parametrize("pieces", [uniform(16), uniform(32), UNEVEN], ids=["16", "32", "uneven"])
def test_interpolation_kernels(precision, pieces):
    normal = functools.partial(Draw(1).normal, dtype=getattr(torch, precision))
    rows, empty = normal(3, 7 + 40, 4), normal(3, 4)
    edges = interpolation.cut(rows, empty, pieces, (7, 40), (9, 40))
    # Polynomials of degree 15 on short pieces magnify the rounding of s, which differs between fused and plain sums.
    factor = 15**2 * 64 / min(lengths(pieces)) if DEVICE.type == "cuda" else 1
    close(se_e2_a_kernels.expand(edges), interpolation.expand_reference(edges), factor)
    product = normal(3, 4, edges.terms)
    close(
        se_e2_a_kernels.evaluate(edges, product),
        interpolation.evaluate_reference(edges, product),
        factor,
    )
    moved = normal(*rows.shape)
    close(
        se_e2_a_kernels.spread(edges, moved), interpolation.spread_reference(edges, moved), factor
    )


@on_each_backend
def test_interpolation_kernels_with_sorted_edges_and_pieces_without_any():
    """As neighbours are: the nearest first, several blocks in one piece, and padding in the lowest."""
    draw = Draw(2)
    rows, empty = draw.normal(2, 20 + 100, 4), draw.normal(2, 4)
    for first, last in ((0, 20), (20, 120)):
        rows[:, first:last, 0] = (
            9.0 * draw.uniform(2, last - first, dtype=torch.float64).sort(1, True).values ** 6
        )
        rows[:, last - 4 : last] = empty[:, None] = rows[:, last - 1 : last].amin() - 0.1
    edges = interpolation.cut(rows, empty, uniform(16), (20, 100), (20, 130))
    close(se_e2_a_kernels.expand(edges), interpolation.expand_reference(edges), 100)
    moved = draw.normal(*rows.shape)
    close(se_e2_a_kernels.spread(edges, moved), interpolation.spread_reference(edges, moved), 100)


@on_each_backend
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("width", "axis"), [(100, 16), (9, 3), (300, 16)])
def test_contraction_kernels(dtype, width, axis):
    draw = Draw(3)
    a, d_bar = draw.normal(5, 4, width, dtype=dtype), draw.normal(5, width, axis, dtype=dtype)
    wanted = torch.bmm(a.transpose(1, 2), a[:, :, :axis])
    close(se_e2_a_kernels.contract(a, axis), wanted)
    pulled = torch.bmm(a[:, :, :axis], d_bar.transpose(1, 2))
    pulled[:, :, :axis] += torch.bmm(a, d_bar)
    close(se_e2_a_kernels.pull_contraction(a, d_bar), pulled, 10)


@on_each_backend
@pytest.mark.parametrize("dtype", DTYPES)
def test_geometry_kernels(monkeypatch, dtype):
    """Including empty slots, edges beyond the cut-off, and some so near to it that their directions are shortened."""
    draw, reach = Draw(9), Reach(6.0, 0.5, 0.01)
    vectors, neighbor = 3.0 * draw.normal(3, 300, 3), draw.integers(-1, 3, (3, 300))
    if dtype == torch.float64:
        near = torch.linspace(1e-5, 5e-4, 30, dtype=torch.float64, device=DEVICE)
        vectors[:, :30] *= ((6.0 - near) / vectors[:, :30].norm(dim=-1)).unsqueeze(-1)
    mean, inverse = 1e-14 * draw.normal(3, 4, dtype=dtype), draw.uniform(3, 4, dtype=dtype) + 1.0
    mixed = draw.normal(3, 300, 4, dtype=dtype), draw.normal(3, 300, 3, dtype=dtype)
    moved, found = draw.normal(3, 300, 3), []
    for fused in (True, False):
        monkeypatch.setattr(triton_support, "usable", lambda _, fused=fused: fused)
        leaf, weights = (
            vectors.clone().requires_grad_(),
            [x.clone().requires_grad_() for x in mixed],
        )
        rows, direction, _ = dpa1_geometry(leaf, neighbor, mean, inverse, reach, False)
        total = (rows * weights[0]).sum() + (direction * weights[1]).sum()
        (slope,) = torch.autograd.grad(total, leaf, create_graph=True)
        found.append([rows, direction, slope, *torch.autograd.grad((slope * moved).sum(), weights)])
    for one, other in zip(*found, strict=True):
        assert one.isfinite().all()
        torch.testing.assert_close(
            one, other, rtol=1e-9 if dtype == torch.float64 else 2e-5, atol=1e-12
        )


@on_each_backend
@without_kernels()
def test_force_and_virial_kernel():
    """Two frames of three atoms, one of which is padding; more edges than are looked at together."""
    draw, order, frame = (
        Draw(4),
        torch.tensor([3, 0, 4, 1, 5], device=DEVICE),
        torch.tensor([1, 0, 1, 0, 1]),
    )
    neighbor, edges = draw.integers(-1, 6, (5, 300)), draw.normal(5, 300, 3)
    slope = draw.normal(5, 300, 3) * (neighbor >= 0)[..., None]
    wanted = slope.new_zeros(2, 9)
    wanted.index_add_(
        0, frame.to(DEVICE), torch.bmm(slope.transpose(1, 2), edges).reshape(-1, 9), alpha=-1
    )
    force, virial = environment_kernels.force_and_virial(slope, edges, order, neighbor, 2, 3)
    close(virial, wanted)
    close(force, edges_module.forces_of(slope, order, neighbor, 6))


@on_each_backend
@without_kernels()  # torch's operations define the results
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_kernels(dtype):
    draw, kinds, reach = (
        Draw(8),
        torch.tensor([0, 1, 1], device=DEVICE),
        Reach(6.0, 0.5, 0.01),
    )
    vectors, neighbor = 3.0 * draw.normal(3, 7 + 200, 3), draw.integers(-1, 3, (3, 7 + 200))
    mean, stddev = draw.uniform(2, 2, 1, 4, dtype=dtype).expand(2, 2, 9, 4).contiguous().unbind()
    found = se_e2_a_kernels.standard_rows(vectors, neighbor, reach, mean, stddev, kinds)
    wanted_scale = 1.0 / stddev[:, 0][kinds]
    wanted_empty = -mean[:, 0][kinds] * wanted_scale
    rows = environment.environment(vectors, neighbor, reach).rows
    wanted = torch.addcmul(wanted_empty[:, None], rows.to(dtype), wanted_scale[:, None])
    for one, other in zip(found, (wanted, wanted_empty, wanted_scale), strict=True):
        close(one, other)
    edges = interpolation.cut(wanted, wanted_empty, uniform(16), (7, 200), (9, 200))
    intervals = se_e2_a_kernels.intervals_of(wanted, wanted_empty, (7, 200), interpolation.SHORTEST)
    close(intervals, edges.intervals)


@on_each_backend
@without_kernels()
@pytest.mark.parametrize("protection", [0.0, 0.01])
def test_environment_kernels(protection):
    draw, reach = Draw(2), Reach(6.0, 0.5, protection)
    vectors, neighbor = 3.0 * draw.normal(5, 60, 3), draw.integers(-1, 4, (5, 60))
    env = environment.environment(vectors, neighbor, reach)
    close(environment_kernels.environment(vectors, neighbor, reach), env.rows)
    for dtype in DTYPES:
        adjoint, factor = (
            draw.normal(5, 60, 4, dtype=dtype).requires_grad_(),
            draw.normal(5, 4, dtype=dtype),
        )
        slope = environment.edge_derivative(adjoint, factor, env.jacobian)
        limit = {} if dtype == torch.float64 else {"rtol": 1e-5, "atol": 1e-6}
        found = environment_kernels.pull(adjoint.detach(), factor, vectors, neighbor, reach)
        torch.testing.assert_close(found, slope.detach(), **limit)
        moved = draw.normal(*slope.shape)
        pushed = environment_kernels.push(moved, factor, vectors, neighbor, reach)
        close(pushed, torch.autograd.grad(slope, adjoint, moved)[0])


@on_each_backend
def test_force_kernels():
    draw, order = Draw(7), torch.tensor([0, 1, 3, 4, 6, 7], device=DEVICE)
    neighbor = draw.integers(-1, 8, (6, 300))
    slope = draw.normal(6, 300, 3) * (neighbor >= 0)[..., None]
    found = environment_kernels.scatter(slope, order, neighbor, 8)
    slope.requires_grad_()
    wanted = edges_module.forces_of(slope, order, neighbor, 8)
    close(found, wanted.detach())
    moved = draw.normal(8, 3)
    (back,) = torch.autograd.grad(wanted, slope, moved)
    real = (neighbor >= 0)[..., None]
    close(environment_kernels.gather(moved, order, neighbor) * real, back * real)
    assert not environment_kernels.scatter(slope[:, :0].detach(), order, neighbor[:, :0], 8).any()


@on_each_backend
@pytest.mark.parametrize("periodic", [False, True])
def test_edge_vectors_kernel(periodic):
    draw = Draw(3)
    coord = draw.normal(2, 4, 3)
    box = draw.normal(2, 3, 3) if periodic else None
    neighbor = draw.integers(-1, 8, (6, 5))
    shift = draw.integers(-2, 3, (6, 5, 3)).to(torch.int16) if periodic else None
    order, frame = torch.tensor([[0, 1, 3, 4, 6, 7], [0, 0, 0, 1, 1, 1]], device=DEVICE)
    flat = coord.view(-1, 3)
    wanted = flat[neighbor.clamp(min=0)] - flat[order][:, None]
    if periodic:
        wanted = wanted + torch.bmm(shift.double(), box[frame])
    close(environment_kernels.edge_vectors(coord, box, order, frame, neighbor, shift), wanted)


@on_each_backend
@without_kernels()  # `layers` defines the results without kernels
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("copies", "n_in", "name"), [(0, 7, "tanh"), (1, 6, "silut:1.0"), (2, 3, "tanh")]
)
def test_layer_kernels(dtype, copies, n_in, name):
    normal, f, n = functools.partial(Draw(4).normal, dtype=dtype), activation(name), 6
    for idt in (None, normal(n)):
        x, before, down = normal(5, n_in), normal(5, n), normal(5, n)
        dense = LayerTensors(normal(n_in, n), normal(n), idt)
        wanted, keep = layers.forward(f, dense, x, copies)
        z = torch.mm(x, dense.matrix)
        found = layer_kernels.forward(z, dense.bias, idt, x, residual=copies > 0, formula=f.formula)
        close(found[0], wanted)
        close(found[1], keep)
        for above in (normal(5, n), normal(1, n).expand(5, n), normal(n, 5).t()):
            close(
                layer_kernels.slope(keep, idt, above, f.formula), layers.slope(f, keep, idt, above)
            )
            pair, of_bias, of_idt = layers.cotangents(f, keep, idt, before, down, above)
            stacked = layer_kernels.cotangents(keep, idt, before, down, above, f.formula)
            close(stacked[-2:], pair)
            close(stacked[-2].sum(0), of_bias)
            if idt is not None:
                close(stacked[0].sum(0), of_idt)
        wanted = layers.tangent(f, keep, idt, before, x, copies)
        close(
            layer_kernels.tangent(keep, idt, before, x, residual=copies > 0, formula=f.formula),
            wanted,
        )


@on_each_backend
@pytest.mark.parametrize("precision", ["float64", "float32"])
@pytest.mark.parametrize("force", [True, False])
@pytest.mark.parametrize("name", NETS)
def test_kernels_of_the_embedding(name, force, precision, monkeypatch):
    found = []
    for fused in (True, False):
        monkeypatch.setattr(triton_support, "usable", lambda _, fused=fused: fused)
        found.append(embedding_results(name, precision, DEVICE, written=True, force=force))
    assert_same_embedding(*found, precision)


@on_each_backend
@pytest.mark.parametrize("precision", SLOW_IN_FLOAT32)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("columns", [4, 20])
def test_attention_kernels(columns, options, precision, monkeypatch):
    made = attention_of(columns, precision, device=DEVICE, **options)
    tolerance = 1e-11 if precision == "float64" else 2e-4
    for force in (True, False):
        found = []
        for fused in (True, False):
            monkeypatch.setattr(triton_support, "usable", lambda _, fused=fused: fused)
            found.append(attention_results(*made, written=True, force=force))
        for value, wanted in zip(*found, strict=True):
            scale = max(1.0, wanted.abs().max().item())
            torch.testing.assert_close(value, wanted, rtol=0, atol=tolerance * scale)


@on_each_backend
@pytest.mark.parametrize("policy", ["error", "skip"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_judge_kernel(policy, dtype):
    plain, fused = (
        DeviceGuard(policy, torch.optim.SGD([torch.zeros(1, device=DEVICE)]), DEVICE)
        for _ in range(2)
    )
    numbers = [(1.0, 2.0), (3.0, float("inf")), (4.0, 5.0), (float("nan"), 6.0), (7.0, 8.0)]
    for loss, norm in numbers:
        given = (
            torch.tensor(norm, dtype=dtype, device=DEVICE),
            torch.tensor(loss, dtype=torch.float64, device=DEVICE),
        )
        reduced = Reduced([], *given)
        plain.admits(reduced, lambda: "")
        judge(fused._record, fused.skip, reduced.loss, reduced.norm, freeze=policy == "error")
        torch.testing.assert_close(fused._record, plain._record, equal_nan=True)
        assert fused.skip == plain.skip
    assert fused._record[:3].tolist() == [5.0, 2.0, 2.0]


@on_each_backend
@pytest.mark.parametrize("padding", ["none", "atoms", "frames", "atoms and frames", "everything"])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"start_pref_v": 2.0, "limit_pref_v": 3.0, "intensive_ener_virial": True},
        {"start_pref_e": 0.0},
    ],
)
def test_loss_kernels(monkeypatch, settings, padding):
    """Errors over several blocks, labels that are parts of wider rows, and a loss that is not the last node."""
    draw, (frames, atoms), loss = Draw(8).normal, (5, 150), build_loss(settings, ["O"])
    energy, force, virial = draw(frames, 17), draw(frames, atoms * 3 + 7), draw(frames, 9)
    labels = {
        "energy": energy[:, 3],
        "force": force[:, 2:-5].view(frames, atoms, 3),
        "virial": virial,
    }
    values = {"energy": draw(frames), "force": draw(frames, atoms, 3), "virial": draw(frames, 9)}
    fraction, results = torch.tensor(0.3, dtype=torch.float64, device=DEVICE), []
    sizes = torch.tensor(
        [150, 7, 149, 80, 0] if padding != "everything" else [0] * 5, device=DEVICE
    )
    mask = (
        torch.arange(atoms, device=DEVICE) < sizes.unsqueeze(1)
        if padding not in ("none", "frames")
        else None
    )
    if padding in ("frames", "atoms and frames"):
        for name, found in {
            "energy": [1, 1, 0, 1, 0],
            "force": [1, 0, 1, 1, 0],
            "virial": [0] * 5,
        }.items():
            labels[f"find_{name}"] = torch.tensor(found, dtype=torch.bool, device=DEVICE)
    atype = torch.zeros(frames, atoms, dtype=torch.int64, device=DEVICE)
    compared = ComparedAtoms(atype, mask)
    for fused in (False, True):
        monkeypatch.setattr(triton_support, "usable", lambda _, fused=fused: fused)
        prediction = {name: value.clone().requires_grad_() for name, value in values.items()}
        assert loss.fits_kernels(prediction, labels)
        value, metrics = loss(prediction, labels, fraction, compared)
        (0.7 * value).backward()
        results.append(
            [value.detach(), *metrics.values(), *(prediction[name].grad for name in prediction)]
        )
        assert list(metrics) == [*(term.metric for term in loss.terms), "rmse"]
        assert not any(x.requires_grad for x in metrics.values())
    assert type(value.grad_fn).__name__ == "FusedLossBackward"
    for found, wanted in zip(*results[::-1], strict=True):
        assert (found is None) == (wanted is None)
        if wanted is not None:
            close(found, wanted)


@on_each_backend
def test_gradients_of_the_loss_kernels(monkeypatch):
    monkeypatch.setattr(triton_support, "usable", lambda _: True)
    draw, loss = Draw(9), build_loss({"start_pref_v": 1.0, "limit_pref_v": 1.0}, ["O"])
    atoms = ComparedAtoms(torch.zeros(2, 3, dtype=torch.int64, device=DEVICE))
    names = {"energy": (2,), "force": (2, 3, 3), "virial": (2, 9)}
    labels, values = (
        {name: draw.normal(*shape) for name, shape in names.items()} for _ in range(2)
    )

    def value(*predicted):
        fraction = torch.tensor(0.6, dtype=torch.float64, device=DEVICE)
        return loss(dict(zip(names, predicted, strict=True)), labels, fraction, atoms)[0]

    assert torch.autograd.gradcheck(
        value, tuple(x.requires_grad_() for x in values.values()), fast_mode=True
    )


@in_interpreter_alone
@pytest.mark.parametrize(
    ("tail", "force", "width"), [(True, True, 17), (False, True, 3), (True, False, 3)]
)
@pytest.mark.parametrize("name", ["angles", "edges"])
def test_kernels_of_dpa3(monkeypatch, name, tail, force, width):
    compute = PASSES[name]
    wanted = [
        x.detach() for x in compute(torch.float64, tail=tail, force=force, width=width, atoms=2)
    ]
    module, launches = {"angles": (angles, angle_kernels), "edges": (edges, edge_kernels)}[name]
    monkeypatch.setattr(module, "_kernels", lambda *_: launches)
    found = compute(torch.float32, tail=tail, force=force, width=width, atoms=2)
    assert distance(found, wanted) < 1e-6


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no GPU")
@pytest.mark.parametrize("tail", [True, False])
@pytest.mark.parametrize("force", [True, False])
@pytest.mark.parametrize("name", PASSES)
@pytest.mark.parametrize("large", [True, False])
def test_kernels_keep_single_precision(name, force, tail, large):
    """On the same inputs they give the same bits."""
    sizes = SIZES[name] if large else {"width": 37, "reach": [37, 20, 0]}
    compute = functools.partial(PASSES[name], device="cuda", tail=tail, force=force, **sizes)
    assert triton_support.usable(torch.device("cuda"))
    found = compute(torch.float32)
    wanted = [
        x.detach().cpu() for x in compute(torch.float64)
    ]  # in double precision torch's operations do the work
    assert distance(found, wanted) < 1e-6
    again = compute(torch.float32)
    assert all(torch.equal(x, y) for x, y in zip(found, again, strict=True))


@in_interpreter_alone
@pytest.mark.parametrize("reach", [[17, 9], [2, 0]])
@pytest.mark.parametrize("name", ["angles", "edges"])
def test_kernels_of_dpa3_within_reach(monkeypatch, name, reach):
    """In two tiles of neighbours, the last of which an atom does not reach."""
    compute = PASSES[name]
    module, launches = {"angles": (angles, angle_kernels), "edges": (edges, edge_kernels)}[name]
    reach = reach if name == "angles" else [2 * n for n in reach]
    sizes = {
        "tail": True,
        "width": 2 * reach[0] + 1 if name == "edges" else 17,
        "atoms": 2,
        "reach": reach,
    }
    wanted = [x.detach() for x in compute(torch.float64, **sizes)]
    monkeypatch.setattr(angle_kernels, "MAX_TILE_ROWS", 16)
    monkeypatch.setattr(module, "_kernels", lambda *_: launches)
    new_empty = torch.Tensor.new_empty
    # What no kernel writes must not pass for a zero.
    monkeypatch.setattr(
        torch.Tensor, "new_empty", lambda x, *size, **kw: fill_with_nan(new_empty(x, *size, **kw))
    )
    assert distance(compute(torch.float32, **sizes), wanted) < 1e-6


@on_each_backend
@pytest.mark.parametrize(
    ("options", "computations"),
    [
        ({"style": "res_residual"}, (node_results, edge_sum_results)),
        ({"style": "res_residual", "force": False}, (node_results, edge_sum_results)),
        ({"style": "res_avg"}, (node_results, edge_sum_results)),
        ({"n_messages": 3}, (node_results,)),
    ],
)
def test_nodes_and_edge_features_of_dpa3(monkeypatch, options, computations):
    """All four passes: `kernels_fit` decides whether torch's operations or the kernels compute."""
    for compute in computations:
        monkeypatch.setattr(layer, "kernels_fit", lambda *_: False)
        wanted = [x.detach() for x in compute(torch.float64, DEVICE, **options)]
        monkeypatch.setattr(layer, "kernels_fit", lambda *_: True)
        assert distance(compute(torch.float64, DEVICE, **options), wanted) < 1e-13
        if DEVICE.type == "cuda":
            assert distance(compute(torch.float32, DEVICE, **options), wanted) < 1e-6


#: Descriptors with the kernels of another one. These corners have what differs: other slots and other nets.
VARIANTS = ("se_e2_a_pairs", "dpa1_smooth", "dpa3_dynamic")
CORNERS_OF_VARIANTS = ("no neighbours", "excluded types and parameters")


def corner_cases():
    """Return descriptor, corner and precision; float64 and what variants share are slow."""
    cases = []
    for name, corner, precision in itertools.product(DESCRIPTORS, CORNERS, ("float64", "float32")):
        shared = name in VARIANTS and corner not in CORNERS_OF_VARIANTS
        shared |= name == "dpa3" and corner == "one type"  # its kernels read no types
        slow = (pytest.mark.slow,) if shared or precision == "float64" else ()
        cases.append(pytest.param(name, corner, precision, marks=slow))
    return cases


@on_each_backend
@pytest.mark.parametrize(("name", "corner", "precision"), corner_cases())
def test_models_at_the_corners(monkeypatch, name, corner, precision):
    assert_corner(name, corner, precision, monkeypatch, DEVICE.type)


@on_each_backend
@pytest.mark.parametrize("name", LAYERS)
def test_options_of_layers(monkeypatch, name):
    assert_corner(name, "two of three types", "float32", monkeypatch, DEVICE.type)
