"""The Triton kernels of model and training step in the interpreter, against torch's operations, which define them."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent
PYTEST = [sys.executable, "-m", "pytest", "-o", "addopts=", "-p", "interpreted", "-p", "no:cacheprovider"]
NEIGHBORS = str(HERE / "test_neighbor_search.py")
INSIDE = os.environ.get("TRITON_INTERPRET") == "1"
if importlib.util.find_spec("triton") is None:
    pytest.skip("Triton is not installed (pip install deepmd-muon[gpu])", allow_module_level=True)


@pytest.mark.skipif(INSIDE, reason="this is the interpreter's own process")
def test_kernels_in_the_interpreter():
    # Triton reads the variable when a kernel is defined, so the cases run in a process of their own.
    paths = os.pathsep.join([str(HERE.parent / "optim"), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [*PYTEST, __file__, NEIGHBORS],
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": paths},
        cwd=HERE,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-6000:]
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed is not None, done.stdout[-6000:]
    assert int(passed[1]) == 143


if INSIDE:
    from corners import CORNERS, DESCRIPTORS, assert_corner
    from dpa3_passes import angle_results, distance, edge_results, edge_sum_results, node_results

    from deepmd_muon.loss import build_loss
    from deepmd_muon.loss.ener import fused as fused_loss
    from deepmd_muon.model import energy_model
    from deepmd_muon.model.descriptor import environment, environment_kernels
    from deepmd_muon.model.descriptor.dpa3 import angles, edge_sums, edges, nodes
    from deepmd_muon.model.descriptor.dpa3.kernels import angles as angle_kernels
    from deepmd_muon.model.descriptor.dpa3.kernels import edges as edge_kernels
    from deepmd_muon.model.descriptor.se_e2_a import interpolation, interpolation_kernels, rows_kernels
    from deepmd_muon.model.nn import layer_kernels, layers, triton_support
    from deepmd_muon.model.nn.activation import activation
    from deepmd_muon.train.step.guard import DeviceGuard
    from deepmd_muon.train.step.guard_kernel import judge
    from deepmd_muon.train.strategy.base import Reduced

    CPU = torch.device("cpu")
    DTYPES = [torch.float64, torch.float32]

    def close(found, wanted):
        """Compare relative to the largest element."""
        limit = 1e-13 if wanted.dtype == torch.float64 else 2e-6
        assert found.shape == wanted.shape
        assert float((found - wanted).abs().max()) <= limit * float(wanted.abs().max())

    def fill_with_nan(x):
        return x.fill_(float("nan")) if x.is_floating_point() else x

    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("pieces", [16, 32])
    def test_interpolation_kernels(dtype, pieces):
        generator = torch.Generator().manual_seed(1)
        rows = torch.randn(3, 7 + 40, 4, dtype=dtype, generator=generator)
        empty = torch.randn(3, 4, dtype=dtype, generator=generator)
        edges = interpolation.cut(rows, empty, pieces, (7, 40), (9, 40))
        close(interpolation_kernels.expand(edges), interpolation.expand_reference(edges))
        product = torch.randn(3, 4, edges.terms, dtype=dtype, generator=generator)
        close(interpolation_kernels.evaluate(edges, product), interpolation.evaluate_reference(edges, product))
        moved = torch.randn(rows.shape, dtype=dtype, generator=generator)
        close(interpolation_kernels.spread(edges, moved), interpolation.spread_reference(edges, moved))

    @pytest.mark.parametrize("dtype", DTYPES)
    def test_rows_kernels(dtype):
        generator = torch.Generator().manual_seed(8)
        rows = torch.randn(3, 7 + 200, 4, dtype=torch.float64, generator=generator)
        mean, stddev = torch.rand(2, 2, 1, 4, dtype=dtype, generator=generator).expand(2, 2, 9, 4).contiguous().unbind()
        kinds = torch.tensor([0, 1, 1])
        found = rows_kernels.standardise(rows, mean, stddev, kinds)
        wanted_scale = 1.0 / stddev[:, 0][kinds]
        wanted_empty = -mean[:, 0][kinds] * wanted_scale
        wanted = torch.addcmul(wanted_empty[:, None], rows.to(dtype), wanted_scale[:, None])
        for one, other in zip(found, (wanted, wanted_empty, wanted_scale), strict=True):
            close(one, other)
        edges = interpolation.cut(wanted, wanted_empty, 16, (7, 200), (9, 200))
        start = rows_kernels.interval_starts(wanted, wanted_empty, 16, (7, 200), interpolation.SHORTEST)
        close(start, edges.start)

    @pytest.mark.parametrize("protection", [0.0, 0.01])
    def test_environment_kernels(protection):
        generator = torch.Generator().manual_seed(2)
        vectors = 3.0 * torch.randn(5, 60, 3, dtype=torch.float64, generator=generator)
        empty = torch.rand(5, 60, generator=generator) < 0.2
        env = environment.environment(vectors, empty, 6.0, 0.5, protection)
        masked, rows, scalars = environment_kernels.environment(vectors, empty, 6.0, 0.5, protection)
        for found, wanted in zip((masked, rows, *scalars), env, strict=True):
            close(found, wanted)
        for dtype in DTYPES:
            adjoint = torch.randn(5, 60, 4, dtype=dtype, generator=generator, requires_grad=True)
            factor = torch.randn(5, 4, dtype=dtype, generator=generator)
            data = factor, env.edges, env.radial, env.isotropic, env.bend
            slope = environment.edge_derivative(adjoint, *data)
            limit = {} if dtype == torch.float64 else {"rtol": 1e-5, "atol": 1e-6}
            torch.testing.assert_close(environment_kernels.pull(adjoint.detach(), *data), slope.detach(), **limit)
            moved = torch.randn(slope.shape, dtype=torch.float64, generator=generator)
            close(environment_kernels.push(moved, *data), torch.autograd.grad(slope, adjoint, moved)[0])

    def test_force_kernels():
        generator = torch.Generator().manual_seed(7)
        neighbor = torch.randint(-1, 8, (6, 300), generator=generator)
        slope = torch.randn(6, 300, 3, dtype=torch.float64, generator=generator) * (neighbor >= 0)[..., None]
        order = torch.tensor([0, 1, 3, 4, 6, 7])
        found = environment_kernels.scatter(slope, order, neighbor, 8)
        slope.requires_grad_()
        wanted = energy_model.Forces.apply(slope, order, neighbor, 8)
        close(found, wanted.detach())
        moved = torch.randn(8, 3, dtype=torch.float64, generator=generator)
        (back,) = torch.autograd.grad(wanted, slope, moved)
        real = (neighbor >= 0)[..., None]
        close(environment_kernels.gather(moved, order, neighbor) * real, back * real)
        assert not environment_kernels.scatter(slope[:, :0].detach(), order, neighbor[:, :0], 8).any()

    @pytest.mark.parametrize("periodic", [False, True])
    def test_edge_vectors_kernel(periodic):
        generator = torch.Generator().manual_seed(3)
        coord = torch.randn(2, 4, 3, dtype=torch.float64, generator=generator)
        box = torch.randn(2, 3, 3, dtype=torch.float64, generator=generator) if periodic else None
        neighbor = torch.randint(-1, 8, (6, 5), generator=generator)
        shift = torch.randint(-2, 3, (6, 5, 3), generator=generator).to(torch.int16) if periodic else None
        order, frame = torch.tensor([0, 1, 3, 4, 6, 7]), torch.tensor([0, 0, 0, 1, 1, 1])
        flat = coord.view(-1, 3)
        wanted = flat[neighbor.clamp(min=0)] - flat[order][:, None]
        if periodic:
            wanted = wanted + torch.bmm(shift.double(), box[frame])
        close(environment_kernels.edge_vectors(coord, box, order, frame, neighbor, shift), wanted)

    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize(("copies", "n_in", "name"), [(0, 7, "tanh"), (1, 6, "silut:1.0"), (2, 3, "tanh")])
    def test_layer_kernels(dtype, copies, n_in, name):
        generator, f, n = torch.Generator().manual_seed(4), activation(name), 6

        def normal(*shape):
            return torch.randn(*shape, dtype=dtype, generator=generator)

        for idt in (None, normal(n)):
            h, x, before, down = normal(5, n), normal(5, n_in), normal(5, n), normal(5, n)
            wanted, keep = layers.forward(f, h.clone(), idt, x, copies)
            found = layer_kernels.forward(h, idt, x, residual=copies > 0, formula=f.formula)
            close(found[0], wanted)
            close(found[1], keep)
            for above in (normal(5, n), normal(1, n).expand(5, n), normal(n, 5).t()):
                close(layer_kernels.slope(keep, idt, above, f.formula), layers.slope(f, keep, idt, above))
                pair, of_bias, of_idt = layers.cotangents(f, keep, idt, before, down, above)
                stacked = layer_kernels.cotangents(keep, idt, before, down, above, f.formula)
                close(stacked[-2:], pair)
                close(stacked[-2].sum(0), of_bias)
                if idt is not None:
                    close(stacked[0].sum(0), of_idt)
            wanted = layers.tangent(f, keep, idt, before, x, copies)
            close(layer_kernels.tangent(keep, idt, before, x, residual=copies > 0, formula=f.formula), wanted)

    @pytest.mark.parametrize("policy", ["error", "skip"])
    @pytest.mark.parametrize("dtype", DTYPES)
    def test_judge_kernel(policy, dtype):
        plain, fused = (DeviceGuard(policy, torch.optim.SGD([torch.zeros(1)]), CPU) for _ in range(2))
        numbers = [(1.0, 2.0), (3.0, float("inf")), (4.0, 5.0), (float("nan"), 6.0), (7.0, 8.0)]
        for loss, norm in numbers:
            reduced = Reduced([], torch.tensor(norm, dtype=dtype), torch.tensor(loss, dtype=torch.float64))
            plain.admits(reduced, lambda: "")
            judge(fused._record, fused.skip, reduced.loss, reduced.norm, freeze=policy == "error")
            torch.testing.assert_close(fused._record, plain._record, equal_nan=True)
            assert fused.skip == plain.skip
        assert fused._record[:3].tolist() == [5.0, 2.0, 2.0]

    @pytest.mark.parametrize(
        "settings",
        [{}, {"start_pref_v": 2.0, "limit_pref_v": 3.0, "intensive_ener_virial": True}, {"start_pref_e": 0.0}],
    )
    def test_loss_kernels(monkeypatch, settings):
        """Errors over several blocks, labels that are parts of wider rows, and a loss that is not the last node."""
        generator, (frames, atoms) = torch.Generator().manual_seed(8), (5, 150)
        loss = build_loss(settings)

        def draw(*shape):
            return torch.randn(*shape, dtype=torch.float64, generator=generator)

        energy, force, virial = draw(frames, 17), draw(frames, atoms * 3 + 7), draw(frames, 9)
        labels = {"energy": energy[:, 3], "force": force[:, 2:-5].view(frames, atoms, 3), "virial": virial}
        values = {"energy": draw(frames), "force": draw(frames, atoms, 3), "virial": draw(frames, 9)}
        fraction, results = torch.tensor(0.3, dtype=torch.float64), []
        for fused in (False, True):
            monkeypatch.setattr(triton_support, "usable", lambda _, fused=fused: fused)
            prediction = {name: value.clone().requires_grad_() for name, value in values.items()}
            assert fused_loss.fits(loss.settings, prediction, labels, None)
            value, metrics = loss(prediction, labels, fraction, atoms)
            (0.7 * value).backward()
            results.append([value.detach(), *metrics.values(), *(prediction[name].grad for name in prediction)])
            assert list(metrics) == [*(term.metric for term in loss.terms), "rmse"]
            assert not any(x.requires_grad for x in metrics.values())
        assert type(value.grad_fn).__name__ == "FusedLossBackward"
        for found, wanted in zip(*results[::-1], strict=True):
            assert (found is None) == (wanted is None)
            if wanted is not None:
                close(found, wanted)

    def test_gradients_of_the_loss_kernels(monkeypatch):
        monkeypatch.setattr(triton_support, "usable", lambda _: True)
        generator, loss = torch.Generator().manual_seed(9), build_loss({"start_pref_v": 1.0, "limit_pref_v": 1.0})
        names = {"energy": (2,), "force": (2, 3, 3), "virial": (2, 9)}
        labels, values = (
            {name: torch.randn(shape, dtype=torch.float64, generator=generator) for name, shape in names.items()}
            for _ in range(2)
        )

        def value(*predicted):
            fraction = torch.tensor(0.6, dtype=torch.float64)
            return loss(dict(zip(names, predicted, strict=True)), labels, fraction, 3)[0]

        assert torch.autograd.gradcheck(value, tuple(x.requires_grad_() for x in values.values()), fast_mode=True)

    @pytest.mark.parametrize(("tail", "force", "width"), [(True, True, 17), (False, True, 3), (True, False, 3)])
    @pytest.mark.parametrize("name", ["angles", "edges"])
    def test_kernels_of_dpa3(monkeypatch, name, tail, force, width):
        compute = {"angles": angle_results, "edges": edge_results}[name]
        wanted = [x.detach() for x in compute(torch.float64, tail=tail, force=force, width=width, atoms=2)]
        module, launches = {"angles": (angles, angle_kernels), "edges": (edges, edge_kernels)}[name]
        monkeypatch.setattr(module, "_kernels", lambda *_: launches)
        found = compute(torch.float32, tail=tail, force=force, width=width, atoms=2)
        assert distance(found, wanted) < 1e-6

    @pytest.mark.parametrize("reach", [[17, 9], [2, 0]])
    @pytest.mark.parametrize("name", ["angles", "edges"])
    def test_kernels_of_dpa3_within_reach(monkeypatch, name, reach):
        """In two tiles of neighbours, the last of which an atom does not reach."""
        compute = {"angles": angle_results, "edges": edge_results}[name]
        module, launches = {"angles": (angles, angle_kernels), "edges": (edges, edge_kernels)}[name]
        reach = reach if name == "angles" else [2 * n for n in reach]
        sizes = {"tail": True, "width": 2 * reach[0] + 1 if name == "edges" else 17, "atoms": 2, "reach": reach}
        wanted = [x.detach() for x in compute(torch.float64, **sizes)]
        monkeypatch.setattr(angle_kernels, "ROWS", 16)
        monkeypatch.setattr(module, "_kernels", lambda *_: launches)
        new_empty = torch.Tensor.new_empty
        # What no kernel writes must not pass for a zero.
        monkeypatch.setattr(torch.Tensor, "new_empty", lambda x, *size, **kw: fill_with_nan(new_empty(x, *size, **kw)))
        assert distance(compute(torch.float32, **sizes), wanted) < 1e-6

    @pytest.mark.parametrize(("style", "force"), [("res_residual", True), ("res_residual", False), ("res_avg", True)])
    def test_nodes_and_edge_features_of_dpa3(monkeypatch, style, force):
        for module, compute in ((nodes, node_results), (edge_sums, edge_sum_results)):
            monkeypatch.setattr(module, "fits", lambda *_: False)
            wanted = [x.detach() for x in compute(torch.float64, style=style, force=force)]
            monkeypatch.setattr(module, "fits", lambda *_: True)
            found = compute(torch.float64, style=style, force=force)
            assert distance(found, wanted) < 1e-13

    def test_nodes_of_dpa3_take_further_terms(monkeypatch):
        monkeypatch.setattr(nodes, "fits", lambda *_: False)
        wanted = [x.detach() for x in node_results(torch.float64, terms=3)]
        monkeypatch.setattr(nodes, "fits", lambda *_: True)
        assert distance(node_results(torch.float64, terms=3), wanted) < 1e-13

    @pytest.mark.parametrize("precision", ["float64", "float32"])
    @pytest.mark.parametrize("corner", CORNERS)
    @pytest.mark.parametrize("name", DESCRIPTORS)
    def test_models_at_the_corners(monkeypatch, name, corner, precision):
        assert_corner(name, corner, precision, monkeypatch)
