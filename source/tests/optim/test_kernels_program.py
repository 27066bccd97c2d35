"""Which products large matrices go through, and that these are the steps they stand for."""

from __future__ import annotations

import gc
import importlib.util
import math
import weakref

import pytest
import torch

if importlib.util.find_spec("triton") is None:
    pytest.skip("Triton is not installed (pip install deepmd-muon[gpu])", allow_module_level=True)

from deepmd_muon.optim.polar import SCHEDULES, launches, symmetric_launch
from deepmd_muon.optim.polar.symmetric_program import Product, amplification, program, segments

WIDE = [(256, 768), (511, 2000), (512, 768), (2048, 8192)]
NARROW = [(255, 4096), (128, 384), (1024, 1024), (512, 767)]


def of(name):
    return SCHEDULES[name].coefficients


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("shape", WIDE + NARROW)
def test_segments_are_the_steps_in_their_order(name, shape):
    found = segments(of(name), *shape)
    assert sum(found, ()) == of(name)
    lengths = [len(segment) for segment in found]
    if shape in NARROW:
        assert set(lengths) == {1}
        return
    assert lengths[0] <= (4 if shape[0] >= 512 else 3)
    assert set(lengths[1:]) <= {1, 2}
    for k, segment in enumerate(found):
        growing = [a * a for a, _, _ in segment[:-1]]
        together = k == 0 and shape[0] >= 1024 and math.prod(growing) <= 12**3
        assert not growing or max(growing) <= 12 or (k == 0 and len(segment) == 2) or together


@pytest.mark.parametrize(
    ("name", "rows", "lengths"),
    [
        ("8+2", 256, [2, 2, 2, 2, 2]),
        ("8+2", 512, [4, 2, 2, 2]),
        ("keller-jordan", 256, [3, 2]),
        ("polar-express", 512, [2, 1, 1, 2, 2]),  # whose first steps grow too much for more
        ("polar-express", 1024, [3, 1, 2, 2]),
        ("polar-express-4", 1024, [2, 2]),
        ("polar-express-5", 512, [2, 1, 2]),
        ("polar-express-5", 1024, [3, 2]),
        ("polar-express-6", 1024, [3, 1, 2]),
        ("muon-fsdp2", 512, [2, 1, 2]),
    ],
)
def test_segments_of_the_schedules(name, rows, lengths):
    assert [len(segment) for segment in segments(of(name), rows, 4 * rows)] == lengths


@pytest.mark.parametrize(
    ("batch", "columns"),
    [
        ((1, 1024, 1024), 128),
        ((1, 2048, 2048), 128),
        ((1, 2048, 8192), 128),  # too few wide tiles to occupy the device
        ((3, 2048, 8192), 256),
        ((20, 2048, 2048), 256),
        ((16, 1024, 4096), 128),
        ((1, 4096, 4096), 256),
    ],
)
def test_many_rows_take_wide_tiles_of_the_update(batch, columns):
    count, m, n = batch
    assert symmetric_launch.tiles_for(m, n, count).update.columns == columns


@pytest.mark.parametrize("steps", range(1, 12))
def test_any_number_of_steps(steps):
    coefficients = (of("8+2")[0],) * steps
    assert sum(segments(coefficients, 1024, 4096), ()) == coefficients


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("shape", [(256, 768), (512, 2048), (1024, 1024)])
def test_products_are_the_steps(name, shape):
    """What is launched, done with exact products of small float64 matrices, is the iteration."""
    x = torch.randn(9, 30, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    x /= torch.linalg.matrix_norm(x)
    expected = x
    for a, b, c in of(name):
        gram = expected @ expected.mT
        expected = a * expected + (b * gram + c * gram @ gram) @ expected
    held = {"X": x}
    fine = set()
    for target, left, right, (w0, w1, w2), rests in program(of(name), *shape):
        if target == "X":
            held["X"] = w0 * held["X"] + held[left] @ held["X"]
            continue
        assert target not in (left, right)  # its tiles are written while others are read
        assert fine >= {
            side for side in (left, right) if side in rests
        }  # a rest that is read was written
        fine = (fine - {target}) | ({target} & set(rests))
        if left == "X":
            held[target] = held["X"] @ held["X"].mT
        else:
            held[target] = w0 * held[left] + w1 * held[right] + w2 * held[left] @ held[right]
    assert torch.linalg.matrix_norm(held["X"] - expected) <= 1e-11 * torch.linalg.matrix_norm(
        expected
    )
    assert math.isfinite(float(expected.sum()))


@pytest.mark.parametrize(
    ("name", "symmetric", "updates"),
    [
        ("polar-express-4", 13.1, 10.7),
        ("polar-express-5", 16.2, 11.1),
        ("polar-express-6", 19.7, 16.1),
        ("8+2", 32.4, 22.3),
    ],
)
def test_operations_of_the_transformer_set_are_those_of_the_page(name, symmetric, updates):
    """TFLOP of a step of 24 transformer layers: half of each symmetric product and its diagonal tiles, of 128 rows."""
    found = [0.0, 0.0]
    for m, n, count in [(2048, 2048, 24), (2048, 6144, 24), (2048, 8192, 48)]:
        for product in program(of(name), m, n):
            depth = n if "X" in (product.left, product.target) else m
            whole = product.target == "X"
            found[whole] += 2e-12 * count * m * m * depth * (1.0 if whole else (1 + 128 / m) / 2)
    assert found == pytest.approx([symmetric, updates], abs=0.05)


@pytest.mark.parametrize("count", [1, 2, 3, 5, 8, 16, 100, 1025, 100_000])
def test_a_power_of_two_of_programs_measures_a_matrix(count):
    shares = symmetric_launch._shares(count)
    assert shares & (shares - 1) == 0
    assert 64 <= shares <= 512
    assert shares * count >= 512


@pytest.mark.parametrize(
    ("later", "lift"),
    [
        ([], 1.0),
        ([3.0, 2.0], 6.0),
        ([3.0, 1e-3], 3.0),
        ([-3.0, 0.0, 5.0], 3.0),
        ([0.1, 100.0], 10.0),
    ],
)
def test_the_lift_is_the_largest_on_the_way(later, lift):
    launched = [Product(target, "A", "X", (a, 0.0, 1.0)) for a in later for target in ("R", "X")]
    assert amplification(launched) == pytest.approx(lift)


def test_tables_of_graphs_outlive_the_caches(monkeypatch):
    """A captured graph may be replayed when its shapes have long been forgotten."""
    read = []

    def start(launch, inputs, coefficients, out):
        read.extend(
            weakref.ref(x) for x in (launch.table, launches.on_device(coefficients, out.device))
        )

    def run(shape, coefficients, *, capturing):
        monkeypatch.setattr(launches, "is_capturing", lambda: capturing)
        launches.run_launches("whole", start, [torch.ones(shape)], coefficients)
        return read[-2:]

    monkeypatch.setattr(launches, "captured_addresses", lambda tensors: torch.zeros(len(tensors)))
    captured = run((1, 7, 9), ((1.5, -0.5, 0.0),), capturing=True)
    eager = run((1, 6, 9), ((1.5, -0.5, 0.0),), capturing=False)
    for k in range(200):
        run((1, 5, 10 + k), ((1.0 + k, 0.0, 0.0),), capturing=False)
    gc.collect()
    assert all(x() is not None for x in captured)
    assert eager[0]() is None
