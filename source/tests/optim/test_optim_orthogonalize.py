"""The polar factor against float64 singular value decompositions: quality, scales, shapes, special values."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from polar_oracle import SHAPES, SPECTRA, Oracle, error_inside, matrices, noise_fraction, oracle

from deepmd_muon.optim import HybridMuon, orthogonalize
from deepmd_muon.optim.polar import SCHEDULES, orthogonalize_matrices
from deepmd_muon.optim.polar.deepmd_kit import orthogonalize_as_deepmd_kit


def identify(shape):
    return f"{shape[0]}x{shape[1]}"


@pytest.mark.parametrize("shape", SHAPES, ids=identify)
def test_default_schedule_keeps_its_promise_on_every_spectrum(shape):
    batch = 3 if shape[0] < 200 else 1
    for kind in (*SPECTRA, "log6") if shape[1] < 1000 else ("gaussian", "rank8", "log6"):
        x = matrices(kind, batch, *shape)
        judge = Oracle(x)
        for precision in ("float32", "float16"):
            o = orthogonalize(x, precision=precision)
            assert o.shape == x.shape
            assert o.dtype == x.dtype
            assert judge.error(o, threshold=1e-3).max() <= 3e-3, (kind, precision)
            assert judge.noise(o).max() <= 1e-3, (kind, precision)


@pytest.mark.parametrize("schedule", [name for name in SCHEDULES if name != "8+2"])
def test_other_schedules_follow_their_scalar_map_in_both_forms(schedule):
    # Their first steps multiply what float32 leaves out of X Xᵀ by up to 24.
    limit = 1e-3 if schedule in ("polar-express-4", "polar-express-5", "polar-express-6") else 2e-4
    for shape in ((5, 7), (25, 50), (65, 64), (64, 256)):
        for kind in ("gaussian", "rank1", "rank-deficient", "log3", "log6"):
            x = matrices(kind, 2, *shape)
            judge = Oracle(x, schedule)
            for gram in (True, False):
                o = orthogonalize(x, schedule, gram=gram)
                assert judge.error(o, threshold=1e-3).max() <= limit, (shape, kind, gram)
                assert judge.noise(o).max() <= 1e-4, (shape, kind, gram)


@pytest.mark.parametrize("gram", [True, False])
def test_float64_reaches_float64(gram):
    x = matrices("log3", 2, 24, 60).double()
    o = orthogonalize(x, precision="float64", gram=gram)
    assert torch.linalg.matrix_norm(o - oracle(x)).max() < 1e-9


def test_momenta_of_a_force_field_come_out_without_noise():
    """A potential for water, of deepmd-muon 0.1.0 after 400 steps on DeePMD-kit's example."""
    momenta = torch.load(Path(__file__).with_name("force_field_momenta.pt"), weights_only=True)
    assert {tuple(m.shape) for m in momenta.values()} == {(25, 50), (50, 100), (100, 100)}
    for name, m in momenta.items():
        s = torch.linalg.svdvals(m.double())
        assert (s > 1e-3 * s[0]).sum() <= 10, "numerically low rank, as such momenta are"
        for precision in ("float32", "float16"):
            for schedule in SCHEDULES:
                o = orthogonalize(m[None], schedule, precision)
                assert noise_fraction(m[None], o).item() <= 1e-3, (name, precision, schedule)
            assert (
                error_inside(
                    m[None], orthogonalize(m[None], precision=precision), "8+2", 1e-3
                ).item()
                <= 3e-3
            )
        stored = orthogonalize_as_deepmd_kit([m[None]], gram=False)[0]
        assert noise_fraction(m[None], stored).item() > 0.5, "the promise is about something"


def test_the_bound_on_noise_holds_for_float16_and_not_for_bfloat16():
    """Rank 1, where the page's table has its largest figure; many seeds, of which few are the worst."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(40, 16, 1, generator=generator) @ torch.randn(40, 1, 16, generator=generator)
    largest = {
        p: noise_fraction(x, orthogonalize(x, precision=p)).max().item()
        for p in ("float16", "bfloat16")
    }
    assert largest["float16"] < 1e-3
    assert 0.03 < largest["bfloat16"] < 0.3


@pytest.mark.parametrize("scale", [1e-30, 1e-20, 1e-7, 1.0, 1e7, 1e20, 1e30])
def test_scale_does_not_matter(scale):
    x = matrices("gaussian", 2, 16, 40)
    expected = orthogonalize(x)
    assert torch.allclose(orthogonalize(x * scale), expected, atol=2e-6)


def test_denormal_and_extreme_float64_inputs():
    x = matrices("gaussian", 1, 8, 12).double()
    expected = oracle(x)
    for scale in (1e-300, 1e300):
        assert torch.allclose(orthogonalize(x * scale), expected, atol=1e-5)
    tiny = (x * 2.0**-140).float()  # below the smallest normal float32: a few bits are left
    assert torch.allclose(orthogonalize(tiny).double(), oracle(tiny), atol=1e-4)


def test_zeros_stay_exactly_zero_and_the_input_is_not_changed():
    x = torch.zeros(3, 6, 9)
    x[1] = matrices("gaussian", 1, 6, 9)[0]
    before = x.clone()
    o = orthogonalize(x)
    assert torch.equal(o[0], torch.zeros(6, 9))
    assert torch.equal(o[2], torch.zeros(6, 9))
    assert torch.allclose(o[1].double(), oracle(x[1:2])[0], atol=1e-5)
    assert torch.equal(x, before)


@pytest.mark.parametrize("shape", [(6, 9), (9, 6), (4, 40), (7, 7), (1, 5)], ids=identify)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_bad_matrix_leaves_its_neighbours_bitwise_alone(shape, bad):
    x = matrices("gaussian", 4, *shape)
    expected = orthogonalize(x)
    x[2, 0, 0] = bad
    o = orthogonalize(x)
    assert torch.isnan(o[2]).any()
    for i in (0, 1, 3):
        assert torch.equal(o[i], expected[i])


def test_vectors_are_normalized_exactly_whatever_the_schedule():
    x = matrices("gaussian", 5, 1, 33)
    for schedule in SCHEDULES:
        for v in (x, x.mT):
            o = orthogonalize(v, schedule)
            assert torch.allclose(o, v / torch.linalg.matrix_norm(v)[:, None, None], atol=1e-7)


def test_views_of_every_stride():
    base = matrices("gaussian", 1, 12, 40)[0]
    expected = oracle(base[None])[0]
    strided = torch.zeros(24, 80)[::2, ::2]
    strided.copy_(base)
    offset = torch.cat([torch.full((1, 40), 7.0), base])[1:]
    transposed = base.T.contiguous().T
    for x in (strided, offset, transposed):
        assert torch.allclose(orthogonalize(x).double(), expected, atol=1e-5)
    expanded = base[:, :1].expand(12, 40)
    assert torch.allclose(orthogonalize(expanded).double(), oracle(expanded[None])[0], atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_dtypes(dtype):
    x = matrices("gaussian", 1, 10, 30).to(dtype)
    o = orthogonalize(x)
    assert o.dtype == dtype
    assert torch.allclose(
        o.double(), oracle(x), atol=torch.finfo(dtype).eps if dtype.itemsize == 2 else 1e-5
    )


def test_results_carry_no_gradient():
    x = matrices("gaussian", 2, 5, 8).requires_grad_()
    o = orthogonalize(x)
    assert not o.requires_grad
    assert torch.equal(o, orthogonalize(x.detach()))


def test_leading_dimensions_and_empty_batches():
    x = matrices("gaussian", 6, 5, 8)
    o = orthogonalize(x.reshape(2, 3, 5, 8))
    assert torch.allclose(o.reshape(6, 5, 8), orthogonalize(x), atol=1e-6)
    assert orthogonalize(torch.zeros(0, 5, 8)).shape == (0, 5, 8)
    assert orthogonalize(torch.zeros(2, 0, 8)).shape == (2, 0, 8)


def test_matrices_of_different_shapes_together_equal_each_alone():
    shapes = [(2, 8, 40), (1, 40, 8), (3, 8, 8), (1, 8, 20), (1, 1, 7), (1, 30, 30)]
    xs = [matrices("gaussian", *shape, seed=i) for i, shape in enumerate(shapes)]
    for x, o in zip(xs, orthogonalize_matrices(xs, "8+2"), strict=True):
        assert torch.allclose(o, orthogonalize(x), atol=2e-6)


@pytest.mark.parametrize(
    ("x", "schedule", "message"),
    [
        (torch.zeros(3), "8+2", r"real matrices of shape \(\.\.\., m, n\); found shape \(3,\)"),
        (torch.zeros(3, 3, dtype=torch.complex64), "8+2", "complex64"),
        (torch.zeros(3, 3, dtype=torch.int64), "8+2", "int64"),
        (torch.zeros(3, 3), "sesame", "unknown schedule 'sesame'; known are 8[+]2"),
    ],
)
def test_rejects_tensors_that_are_no_real_matrices(x, schedule, message):
    with pytest.raises(ValueError, match=message):
        orthogonalize(x, schedule)


@pytest.mark.parametrize("name", SCHEDULES)
def test_schedule_bands_hold_from_the_cutoff_to_one(name):
    schedule = SCHEDULES[name]
    sigma = torch.logspace(
        torch.log10(torch.tensor(schedule.cutoff)).item(), 0, 20001, dtype=torch.float64
    )
    reached = schedule(sigma.clamp(schedule.cutoff, 1.0).tolist())
    low, high = schedule.band
    assert low <= min(reached)
    assert max(reached) <= high
    assert schedule.source


@pytest.mark.parametrize(("name", "steps"), [(f"polar-express-{n}", n) for n in (4, 5, 6)])
def test_the_short_schedules_are_the_best_composition_with_headroom(name, steps):
    """Chebyshev's criterion: each step's error takes its largest value four times with alternating sign."""
    schedule = SCHEDULES[name]
    low, high = schedule.cutoff, 1.0
    assert len(schedule.coefficients) == steps
    for a, b, c in schedule.coefficients:
        turning = torch.tensor(
            [-3 * b - s * (9 * b * b - 20 * a * c) ** 0.5 for s in (1.0, -1.0)]
        ) / (10 * c)
        sigma = torch.cat(
            [torch.tensor([low]), turning.sqrt(), torch.tensor([1.02 * high])]
        ).double()
        errors = sigma * (a + sigma**2 * (b + sigma**2 * c)) - 1.0
        largest = errors.abs().max().item()
        assert errors.tolist() == pytest.approx([-largest, largest, -largest, largest], abs=5e-3)
        low, high = 1.0 - largest, 1.0 + largest
    assert largest == pytest.approx(0.05, abs=1e-3)


@pytest.mark.parametrize("name", SCHEDULES)
def test_schedules_do_not_flip_or_diverge_when_rounding_lifts_the_norm(name):
    # Half-precision operands can put the largest singular value a little above one.
    lifted = SCHEDULES[name]([1.0, 1.002, 1.005, 1.01])
    assert all(0.5 < value < 1.5 for value in lifted)


@pytest.fixture(params=["autocast", "high", "medium", "newer interface"])
def reduced_precision(request):
    """Let torch multiply float32 matrices in fewer bits, and expect to find the setting again afterwards."""
    matmul = torch.backends.mkldnn.matmul
    before = matmul.fp32_precision
    if request.param == "autocast":
        with torch.autocast("cpu", torch.bfloat16):
            yield
            assert torch.mm(torch.ones(2, 2), torch.ones(2, 2)).dtype == torch.bfloat16
    elif request.param == "newer interface":
        matmul.fp32_precision = "bf16"
        yield
        assert matmul.fp32_precision == "bf16"
        torch.set_float32_matmul_precision("highest")
    else:
        torch.set_float32_matmul_precision(request.param)
        yield
        assert torch.get_float32_matmul_precision() == request.param
        torch.set_float32_matmul_precision("highest")
    matmul.fp32_precision = before


def test_reduced_precision_of_the_caller_does_not_matter(reduced_precision):
    """On the Gram matrix of a matrix of rank 1, products in bf16 end in NaN."""
    x = torch.outer(torch.arange(1.0, 25.0), torch.arange(1.0, 65.0).cos())
    u = x / torch.linalg.vector_norm(x)
    assert torch.allclose(orthogonalize(x), u, atol=1e-3)

    def stepped(*, wrapped):
        named = {"wide": (24, 64), "square": (32, 32), "bias": (8,)}
        params = {name: torch.nn.Parameter(torch.ones(shape)) for name, shape in named.items()}
        optimizer = HybridMuon(params.items(), lr=0.1)

        def closure():
            for p in params.values():
                p.grad = torch.arange(float(p.numel())).view(p.shape)
            return torch.mm(params["square"], params["square"]).dtype

        with torch.autocast("cpu", enabled=torch.is_autocast_enabled("cpu") and wrapped):
            seen = [optimizer.step(closure) for _ in range(3)][-1]
        return seen, [p.detach() for p in params.values()]

    (seen, inside), (_, outside) = stepped(wrapped=True), stepped(wrapped=False)
    assert seen == (torch.bfloat16 if torch.is_autocast_enabled("cpu") else torch.float32)
    for p, q in zip(inside, outside, strict=True):
        assert p.isfinite().all()
        assert torch.equal(p, q)
