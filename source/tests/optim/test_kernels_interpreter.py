"""The kernels in Triton's interpreter on a CPU: the gates of `kernel_cases`, as far as its time allows.

A matrix of 64 × 64 costs the interpreter 0.04 s as a whole and 0.2 to 0.4 s otherwise; 240 × 240 takes 1 to 4 s. So
large ones and batch 133 have few cases here, most marked slow, and one case is enough where another differs in size
only; all run on a GPU (test_kernels_gpu.py). The interpreter runs programs one after the other: kernels whose programs
meet at barriers get one program a matrix here, so barriers and the division of work are tested on a GPU only.
"""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent
INSIDE = os.environ.get("TRITON_INTERPRET") == "1"

if importlib.util.find_spec("triton") is None:
    pytest.skip("Triton is not installed (pip install deepmd-muon[gpu])", allow_module_level=True)


@pytest.mark.skipif(INSIDE, reason="this is the interpreter's own process")
@pytest.mark.parametrize(
    ("files", "tier", "count"),
    [
        (("test_kernels_interpreter.py", "test_optim_fused.py"), "not slow", 75),
        pytest.param(("test_kernels_interpreter.py",), "slow", 15, marks=pytest.mark.slow),
    ],
)
def test_kernels_in_the_interpreter(files, tier, count):
    # Triton reads the variable when a kernel is defined, so the cases run in one process of their own.
    done = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-o", "addopts=", "-p", "interpreted", "-p", "no:cacheprovider"),
            "-m",
            tier,
            *files,
        ],
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        cwd=HERE,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-6000:]
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed is not None, done.stdout[-6000:]
    assert int(passed[1]) >= count


if INSIDE:
    from kernel_cases import (
        FEW_COEFFICIENTS,
        SCALES,
        SHAPES,
        SPECTRA,
        Way,
        check_batches,
        check_company,
        check_memory,
        check_quality,
        check_repeats,
        check_scales,
        check_schedules,
        check_signs,
        check_special_values,
        check_tiles,
        check_views,
    )

    from deepmd_muon.optim.polar import symmetric_program
    from deepmd_muon.optim.polar.dispatch import IMPLEMENTATIONS
    from deepmd_muon.optim.polar.kernels.symmetric import symmetric_product
    from deepmd_muon.optim.polar.symmetric_launch import _tiled

    SMALL = tuple(shape for shape in SHAPES if max(shape) <= 65)
    FEW = ("rank8", "log5", "log8")
    WHOLE, STRIPS, TILES, SYMMETRIC, DEFAULT = (
        Way(name, "cpu") for name in ("whole", "strips", "tiles", "symmetric", "default")
    )
    QUALITY = [
        *((WHOLE, shape, SPECTRA) for shape in SMALL),
        (STRIPS, (17, 33), SPECTRA),
        *((STRIPS, shape, FEW) for shape in ((5, 7), (63, 65), (65, 64))),
        (TILES, (5, 7), ("log5",)),
        (TILES, (65, 64), ("rank8", "log8")),
        (SYMMETRIC, (25, 50), FEW),
        (SYMMETRIC, (65, 64), ("rank8", "log8")),
        (SYMMETRIC, (127, 129), ("log5",)),
        (DEFAULT, (63, 65), SPECTRA),
        (DEFAULT, (127, 129), ("log5",)),
    ]
    SLOW_QUALITY = [
        (STRIPS, (65, 64), SPECTRA),
        *((STRIPS, shape, FEW) for shape in ((16, 16), (25, 50), (127, 129))),
        (STRIPS, (128, 384), ("log5",)),
        (SYMMETRIC, (128, 384), ("log5",)),
        *((STRIPS, shape, ("log5",)) for shape in ((240, 240), (241, 1607))),
        *((TILES, shape, ("log5",)) for shape in ((127, 129), (240, 240))),
        (SYMMETRIC, (16, 16), FEW),
        (SYMMETRIC, (25, 50), SPECTRA),
        (SYMMETRIC, (241, 1607), ("log5",)),
    ]
    QUALITY = [
        pytest.param(
            *case, id=f"{case[0].name}-{case[1][0]}x{case[1][1]}", marks=[pytest.mark.slow] * (case in SLOW_QUALITY)
        )
        for case in (*QUALITY, *SLOW_QUALITY)
    ]
else:
    QUALITY = []


def quick(name):
    """Return an implementation that takes four steps; what depends on their number is tested with all ten."""
    return Way(name, "cpu", FEW_COEFFICIENTS)


interpreted = pytest.mark.skipif(not INSIDE, reason="runs in the interpreter's process")
FORCED = ("whole", "strips", "tiles", "symmetric")


@interpreted
def test_no_implementation_is_left_out():
    assert {*FORCED, "torch"} == set(IMPLEMENTATIONS)


@interpreted
@pytest.mark.parametrize(("way", "shape", "kinds"), QUALITY)
def test_quality(way, shape, kinds):
    check_quality(way, shape, kinds)


@interpreted
@pytest.mark.parametrize("kind", ["rank1", pytest.param("log5", marks=pytest.mark.slow)])
def test_schedules(kind):
    check_schedules(SYMMETRIC, (25, 50), (kind,))


@interpreted
@pytest.mark.parametrize(
    ("steps", "kind", "shape"),
    [
        (3, "rank8", (70, 90)),
        (4, "gaussian", (70, 90)),
        pytest.param(3, "rank8", (256, 400), marks=pytest.mark.slow),
        pytest.param(4, "gaussian", (256, 400), marks=pytest.mark.slow),
    ],
)
def test_steps_that_share_products(steps, kind, shape, monkeypatch):
    # From 256 rows on three do and from 512 on four, which would take long here.
    monkeypatch.setattr(symmetric_program, "_FIRST_STEPS", ((shape[0], steps),))
    symmetric_program.program.cache_clear()
    check_quality(SYMMETRIC, shape, (kind,))
    symmetric_program.program.cache_clear()


@interpreted
@pytest.mark.parametrize(
    ("kind", "fine", "tile"),
    [(0, True, (128, 256)), (1, True, (128, 128)), (2, True, (128, 128)), (2, False, (128, 128))],
)
def test_symmetric_products_in_large_tiles_are_those_in_small_ones(kind, fine, tile):
    order, depth = 512 if tile[1] > tile[0] else 256, 64 if kind == 0 else 256
    random = torch.Generator().manual_seed(0)
    left, right = (torch.randn(order, order, generator=random).tril(-1) / 16 for _ in range(2))
    left, right = ((m + m.mT).half() for m in (left, right))
    x = torch.randn(order, depth, generator=random).half() / 8
    diagonals = [torch.randn(order, generator=random) for _ in range(2)]
    weights, rest = torch.tensor([[0.5, -0.25, 2.0]]), torch.randn(order, order, generator=random).half()
    found = []
    for rows, columns in ((64, 64), tile):
        target, own_rest, diagonal = torch.full_like(left, 7.0), torch.zeros_like(left), torch.zeros(order)
        squares = [_tiled(m, 64, 64) for m in (left, right, target, rest, rest, own_rest)]
        strips = [
            _tiled(target, rows, 64),
            _tiled(target, 64, rows),
            *(_tiled(m, rows, 64) for m in (rest, rest, own_rest)),
        ]
        a, b = (x, x) if kind == 0 else (left, left if kind == 1 else right)
        count = order // columns * (order // columns + 1) // (1 if columns > rows else 2)
        symmetric_product[count, 1](
            *(_tiled(a, rows, 64), _tiled(b, columns, 64), *squares, *strips, *diagonals, diagonal, weights, 0, order),
            *(depth, kind, fine and kind > 0, fine and kind > 1, fine, rows, columns, 64),
        )  # fmt: skip
        assert torch.equal(target, target.mT)
        found.append((target.float() + own_rest.float() / 2048).tril(-1) + diagonal.diag())
    small, large = found
    assert (small - large).abs().max() <= (1e-6 if fine else 1e-3) * small.abs().max()


@interpreted
@pytest.mark.parametrize(
    ("name", "shape", "batches"),
    [
        *(("whole", shape, (1, 3)) for shape in [(1, 1), (1, 8), (2, 1), (17, 33), (65, 64)]),
        ("whole", (5, 7), (1, 3)),
        pytest.param("whole", (5, 7), (133,), marks=pytest.mark.slow),
        ("strips", (17, 33), (1, 3)),
        ("tiles", (5, 7), (1, 3)),
        ("symmetric", (5, 7), (1, 3)),
        ("default", (5, 7), (0, 1, 3)),
    ],
)
def test_batches(name, shape, batches):
    check_batches(quick(name), shape, batches)


@interpreted
@pytest.mark.parametrize("name", ["whole", "strips", pytest.param("tiles", marks=pytest.mark.slow), "symmetric"])
def test_views(name):
    check_views(quick(name), (6, 9), batch=1)
    if name == "whole":
        check_views(quick(name), (33, 20))


@interpreted
@pytest.mark.parametrize(
    ("shape", "scale"),
    [((64, 64), 1e30), pytest.param((128, 64), 1.0, marks=pytest.mark.slow), ((64, 140), 1.0)],
)
def test_results_and_inputs_in_tiles(shape, scale):
    check_tiles(quick("symmetric"), shape, 1 if shape == (64, 140) else 2, (scale,))


@interpreted
@pytest.mark.parametrize("name", FORCED)
def test_scales_and_dtypes(name):
    check_scales(quick(name), (6, 9), SCALES if name == "whole" else (1e-30, 2.0**90))


@interpreted
@pytest.mark.parametrize("name", FORCED)
def test_special_values(name):
    check_special_values(quick(name), (6, 9) if name != "symmetric" else (9, 6))


@interpreted
@pytest.mark.parametrize("name", FORCED)
def test_signs(name):
    check_signs(Way(name, "cpu"), (20, 30), seeds=2 if name in ("whole", "strips") else 1)


@interpreted
@pytest.mark.parametrize(
    ("name", "shapes"),
    [
        ("whole", ((2, 5, 7), (1, 9, 4), (1, 1, 8), (1, 64, 65), (1, 60, 250))),
        ("strips", ((2, 5, 7), (1, 70, 100))),
        pytest.param("strips", ((1, 60, 40), (1, 70, 300)), marks=pytest.mark.slow),
        ("tiles", ((1, 70, 20),)),
        pytest.param("tiles", ((2, 5, 7), (1, 70, 60)), marks=pytest.mark.slow),
        ("symmetric", ((1, 70, 20),)),
        pytest.param("symmetric", ((1, 5, 7), (1, 70, 60), (1, 20, 150)), marks=pytest.mark.slow),
        ("default", ((1, 5, 7), (1, 60, 70), (3, 1, 8))),
        pytest.param("default", ((1, 5, 7), (1, 127, 129), (3, 1, 8)), marks=pytest.mark.slow),
    ],
)
def test_memory(name, shapes):
    check_memory(quick(name), shapes)


@interpreted
def test_whole_matrices_are_the_same_bits_in_any_company_and_every_run():
    shapes = ((2, 5, 7), (1, 30, 9), (3, 1, 8), (1, 40, 40))
    check_company(WHOLE, shapes)
    check_repeats(WHOLE, shapes, runs=2)
