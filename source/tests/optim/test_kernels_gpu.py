"""The kernels on a GPU: every gate of `kernel_cases`, each implementation forced and as the table chooses; captures."""

from __future__ import annotations

import pytest
import torch
from kernel_cases import (
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
    fits,
)
from polar_oracle import error_inside, matrices, noise_fraction

from deepmd_muon.optim.polar import orthogonalize_matrices
from deepmd_muon.optim.polar.dispatch import IMPLEMENTATIONS, counts

if torch.cuda.is_available():
    from deepmd_muon.optim.polar.one_launch import _recording, launches_for

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no GPU")]

FORCED = tuple(name for name in IMPLEMENTATIONS if name != "torch")
# Shapes at the borders of tiles and of the table's rules.
BORDERS = ((1, 256), (60, 250), (128, 128), (320, 64), (768, 128), (500, 700))
LARGE = ((1030, 520), (2050, 1024))
EVERY = (*SHAPES, *BORDERS)
CASES = [
    *((name, shape) for name in FORCED for shape in EVERY if fits(name, shape)),
    *(("default", shape) for shape in EVERY),
]
# A shape of every implementation's own for the gates that do not depend much on it.
OWN = {"whole": (17, 33), "strips": (65, 300), "tiles": (200, 170), "symmetric": (200, 450), "default": (65, 64)}


def named(case):
    return f"{case[0]}-{case[1][0]}x{case[1][1]}"


@pytest.mark.parametrize("case", CASES, ids=named)
def test_quality(case):
    name, shape = case
    check_quality(Way(name, "cuda"), shape, SPECTRA if max(shape) < 1000 else ("gaussian", "rank8", "log5", "log8"))


@pytest.mark.parametrize("case", [(name, s) for name in FORCED for s in LARGE if fits(name, s)], ids=named)
def test_quality_of_large_matrices(case):
    name, shape = case
    check_quality(Way(name, "cuda"), shape, ("rank8", "log5"))


@pytest.mark.parametrize("case", CASES, ids=named)
def test_batches(case):
    check_batches(Way(case[0], "cuda"), case[1], (1, 3, 133) if case[0] in FORCED else (0, 1, 3, 133))


@pytest.mark.parametrize("case", CASES, ids=named)
def test_views(case):
    check_views(Way(case[0], "cuda"), case[1])


@pytest.mark.parametrize("shape", [(2, 128, 128), (2, 256, 768), (8, 1024, 4096), (1, 4096, 4096), (3, 2048, 8192)])
def test_results_and_inputs_in_tiles(shape):
    check_tiles(Way("symmetric", "cuda"), shape[1:], shape[0], (1.0, 2.0**-100, 1e30))


@pytest.mark.parametrize("shape", [(128, 128), (256, 768), (300, 1000), (1024, 2048)])
def test_schedules(shape):
    check_schedules(Way("symmetric", "cuda"), shape)


@pytest.mark.parametrize("case", CASES, ids=named)
def test_scales_and_dtypes(case):
    check_scales(Way(case[0], "cuda"), case[1])


@pytest.mark.parametrize("case", CASES, ids=named)
def test_special_values(case):
    check_special_values(Way(case[0], "cuda"), case[1])


@pytest.mark.parametrize("case", CASES, ids=named)
def test_signs(case):
    check_signs(Way(case[0], "cuda"), case[1])


@pytest.mark.parametrize("name", OWN)
def test_every_run_gives_the_same_bits(name):
    check_repeats(Way(name, "cuda"), tuple((2, *s) for s in EVERY if name == "default" or fits(name, s)))


@pytest.mark.parametrize("name", OWN)
def test_memory(name):
    m, n = OWN[name]
    check_memory(Way(name, "cuda"), ((1, m, n), (3, n, m)))
    check_memory(Way(name, "cuda"), tuple((2, *s) for s in EVERY if name == "default" or fits(name, s)))


def test_whole_matrices_are_the_same_bits_in_any_company():
    check_company(Way("whole", "cuda"), ((133, 5, 7), (1, 30, 9), (3, 1, 8), (2, 100, 120), (1, 64, 250)))


def test_strips_are_the_same_bits_however_the_matrices_are_cut():
    """So that a step gives the same on any number of GPUs: what shares a launch decides on strips and tiles."""
    check_company(Way("strips", "cuda"), ((6, 768, 128), (6, 320, 128), (6, 320, 64), (2, 240, 240)))
    check_company(Way("strips", "cuda"), ((4, 240, 240), (2, 1600, 240), (2, 100, 384)))


def test_every_implementation_is_chosen_and_none_was_switched_off():
    before = counts()
    for name, shape in OWN.items():
        x = matrices("gaussian", 2, *shape).cuda()
        allowed = FORCED if name == "default" else (name,)
        orthogonalize_matrices([x], "8+2", flash=allowed)
        if name != "default":
            key = (name, min(shape), max(shape))
            assert counts()[key] == before.get(key, 0) + 2


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


@pytest.mark.parametrize("shape", [(2, 25, 50), (2, 240, 240), (1, 500, 500), (1, 1024, 1024)])
def test_repeated_calls_are_replayed_with_the_same_bits(shape):
    launches_for.cache_clear()
    _recording.cache_clear()
    x = matrices("gaussian", *shape).cuda()
    (first,) = orthogonalize_matrices([x], "8+2")
    assert _recording.cache_info().currsize == 0
    (again,) = orthogonalize_matrices([x], "8+2")
    assert _recording.cache_info().currsize == 1
    assert torch.equal(first, again)
    other = matrices("gaussian", *shape, seed=1).cuda()
    (moved,) = orthogonalize_matrices([other], "8+2")  # from other addresses
    assert torch.equal(first, again)  # results are the caller's
    assert error_inside(other.cpu(), moved.cpu(), "8+2", 1e-3).max() <= 3e-3
    assert torch.equal(orthogonalize_matrices([x.clone()], "8+2")[0], first)
    with torch.cuda.stream(torch.cuda.Stream()):
        for recordings in (1, 2):  # streams do not share workspaces
            assert torch.equal(orthogonalize_matrices([x], "8+2")[0], first)
            assert _recording.cache_info().currsize == recordings
    launches_for.cache_clear()
    _recording.cache_clear()


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
