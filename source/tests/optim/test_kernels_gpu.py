"""The kernels on a GPU: the cases of `kernel_cases`, captures, and what the dispatch does by itself."""

from __future__ import annotations

import pytest
import torch
from kernel_cases import (
    SPECTRA,
    check_company,
    check_dtypes_and_scales,
    check_quality,
    check_special_values,
    check_views,
)
from polar_oracle import error_inside, matrices, noise_fraction

from deepmd_muon.optim.polar import orthogonalize_matrices
from deepmd_muon.optim.polar.dispatch import counts

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no GPU")]

CASES = {
    "whole": [(1, 1), (1, 8), (2, 1), (5, 7), (16, 16), (17, 33), (25, 50), (63, 65), (65, 64), (60, 250), (128, 128)],
    "strips": [(17, 33), (65, 64), (127, 129), (128, 384), (768, 128), (320, 64)],
    "tiles": [(65, 64), (127, 129), (240, 240), (241, 1607), (500, 700)],
    "symmetric": [(240, 240), (241, 1607), (1030, 520), (2050, 1024)],
}


@pytest.mark.parametrize(("name", "shape"), [(name, shape) for name, shapes in CASES.items() for shape in shapes])
def test_every_kernel_keeps_the_promise(name, shape):
    check_quality(name, shape, SPECTRA if shape[1] < 1000 else ("gaussian", "rank8", "log5"), "cuda")


@pytest.mark.parametrize(
    ("name", "shape"), [("whole", (6, 9)), ("strips", (40, 90)), ("tiles", (70, 90)), ("symmetric", (70, 90))]
)
def test_views_dtypes_scales_and_special_values(name, shape):
    check_views(name, shape, "cuda")
    check_special_values(name, shape, "cuda")
    check_dtypes_and_scales(name, shape, "cuda")


def test_whole_matrices_are_the_same_bits_in_any_company():
    check_company("whole", ((133, 5, 7), (1, 30, 9), (3, 1, 8), (2, 100, 120), (1, 64, 250)), "cuda", repeats=10)


def test_dispatch_takes_a_whole_model_and_a_captured_call_equals_the_eager_one():
    shapes = [(1, 25, 50), (1, 50, 100), (1, 1600, 240), (2, 240, 240), (1, 1, 25), (3, 32, 576), (1, 520, 2100)]
    xs = [matrices("gaussian", *shape, seed=i).cuda() for i, shape in enumerate(shapes)]
    before = sum(counts().values())
    eager = orthogonalize_matrices(xs, "8+2")
    assert sum(counts().values()) - before == sum(shape[0] for shape in shapes)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = orthogonalize_matrices(xs, "8+2")
    moved = [matrices("gaussian", *shape, seed=9 + i).cuda() for i, shape in enumerate(shapes)]
    others = orthogonalize_matrices(moved, "8+2")  # other addresses between capture and replay
    graph.replay()
    for x, a, b, shape in zip(xs, eager, captured, shapes, strict=True):
        assert torch.equal(a, b), shape
        assert error_inside(x.cpu(), a.cpu(), "8+2", 1e-3).max() <= 3e-3
    for x, y in zip(xs, moved, strict=True):
        x.copy_(y)
    graph.replay()
    for a, b in zip(others, captured, strict=True):
        assert torch.equal(a, b)


def test_flash_off_is_torch_and_agrees():
    x = matrices("rank8", 2, 60, 90).cuda()
    before = counts()
    (plain,) = orthogonalize_matrices([x], "8+2", flash=False)
    assert counts() == before
    (fast,) = orthogonalize_matrices([x], "8+2")
    assert (plain - fast).norm() / plain.norm() < 1e-2  # each has its own rounding of fp16 operands


def test_large_low_rank_input_stays_clean():
    x = matrices("rank8", 1, 1500, 1800)
    (o,) = orthogonalize_matrices([x.cuda()], "8+2")
    assert noise_fraction(x, o.cpu()).max() <= 0.02
