"""The kernels in Triton's interpreter on a CPU: the cases of `kernel_cases`, small."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

HERE = Path(__file__).parent
INSIDE = os.environ.get("TRITON_INTERPRET") == "1"
INSTALLED = importlib.util.find_spec("triton") is not None

NUMPY = tuple(map(int, version("numpy").split(".")[:2]))

pytestmark = [
    pytest.mark.skipif(not INSTALLED, reason="Triton is not installed (pip install deepmd-muon[gpu])"),
    pytest.mark.skipif(NUMPY >= (2, 4), reason="Triton 3.6's interpreter loops over no array of NumPy 2.4 or later"),
]


@pytest.mark.skipif(INSIDE, reason="this is the interpreter's own process")
def test_kernels_in_the_interpreter():
    # Triton reads the variable when a kernel is defined, so the cases run in a process of their own.
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", str(Path(__file__))],
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        cwd=HERE,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:]
    assert " passed" in done.stdout


interpreted = pytest.mark.skipif(not INSIDE, reason="runs in the interpreter's process")


@interpreted
@pytest.mark.parametrize("shape", [(1, 1), (1, 8), (2, 1), (5, 7), (16, 16), (17, 33), (33, 130), (65, 64)])
def test_whole_matrices_keep_the_promise(shape):
    from kernel_cases import SPECTRA, check_quality

    check_quality("whole", shape, SPECTRA if shape[0] < 60 else ("gaussian", "rank8"), "cpu")


@interpreted
@pytest.mark.parametrize(
    ("name", "shape"), [("strips", (17, 70)), ("tiles", (65, 40)), ("symmetric", (33, 20)), ("symmetric", (20, 50))]
)
def test_shared_matrices_keep_the_promise(name, shape):
    from kernel_cases import check_quality

    check_quality(name, shape, ("gaussian", "rank1", "log5"), "cpu", batch=1)


@interpreted
@pytest.mark.parametrize(("name", "shape"), [("whole", (6, 9)), ("strips", (6, 9)), ("tiles", (4, 6))])
def test_views_dtypes_scales_and_special_values(name, shape):
    from kernel_cases import check_dtypes_and_scales, check_special_values, check_views

    check_views(name, shape, "cpu")
    check_special_values(name, shape, "cpu")
    if name == "whole":
        check_dtypes_and_scales(name, shape, "cpu")


@interpreted
def test_whole_matrices_are_the_same_bits_in_any_company():
    from kernel_cases import check_company

    check_company("whole", ((2, 5, 7), (1, 30, 9), (0, 4, 4), (3, 1, 8), (1, 40, 40)), "cpu")


@interpreted
def test_nothing_is_written_outside_the_results(monkeypatch):
    import torch
    from polar_oracle import matrices

    from deepmd_muon.optim.polar import launches
    from deepmd_muon.optim.polar.schedules import coefficients_of

    guard, kept = 64, []

    def guarded(size, **options):
        memory = torch.full((size + 2 * guard,), torch.nan, **options)
        kept.append((memory, size))
        return memory[guard : guard + size]

    monkeypatch.setattr(launches, "_result", guarded)
    xs = [matrices("gaussian", 2, 5, 7), matrices("gaussian", 1, 9, 4)]
    results = launches.orthogonalize_in_one_launch("whole", xs, coefficients_of("8+2"))
    memory, size = kept[0]
    assert torch.isnan(memory[:guard]).all()
    assert torch.isnan(memory[guard + size :]).all()
    assert all(torch.isfinite(o).all() for o in results)
