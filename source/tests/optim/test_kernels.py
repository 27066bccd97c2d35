"""The kernels that orthogonalize: the gates of `kernel_cases` in Triton's interpreter and on a GPU; captures there."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch

if importlib.util.find_spec("triton") is None:
    pytest.skip("Triton is not installed (pip install deepmd-muon[gpu])", allow_module_level=True)

from kernel_backends import (
    INTERPRETING,
    in_interpreter_alone,
    on_each_backend,
    passed_in_interpreter,
)
from kernel_cases import (
    CASES,
    FORCED,
    OWN,
    Way,
    check_company,
    check_quality,
    check_repeats,
    check_schedules,
    check_tiles,
)
from polar_oracle import error_inside, matrices, noise_fraction

from deepmd_muon.optim.polar import dispatch, orthogonalize_matrices, symmetric_program
from deepmd_muon.optim.polar.dispatch import counts
from deepmd_muon.optim.polar.kernels.symmetric import symmetric_product
from deepmd_muon.optim.polar.launches import launches_for
from deepmd_muon.optim.polar.symmetric_launch import SymmetricMatrix, Tile, Tiles, tiled

HERE = Path(__file__)
on_gpu = on_each_backend if not INTERPRETING else pytest.mark.skip(reason="captures need a GPU")


@pytest.mark.parametrize(
    ("files", "tier", "count"),
    [
        ((HERE, HERE.with_name("test_optim_fused.py")), "not slow", 68),
        pytest.param((HERE,), "slow", 15, marks=pytest.mark.slow),
    ],
)
def test_kernels_in_the_interpreter(files, tier, count):
    assert passed_in_interpreter(*files, tier=tier) >= count


def test_no_implementation_is_left_out():
    gates = {case.values[0].check for case in CASES} - {
        check_schedules,
        check_tiles,
        check_company,
        check_repeats,
    }
    for gate in gates:
        assert {case.values[0].name for case in CASES if case.values[0].check is gate} >= {*FORCED}


@on_each_backend
@pytest.mark.parametrize("case", CASES)
def test_gate(case):
    case.run()


@in_interpreter_alone
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
    check_quality(Way("symmetric"), shape, (kind,))
    symmetric_program.program.cache_clear()


@in_interpreter_alone
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
    weights = torch.tensor([[0.5, -0.25, 2.0]])
    rest = torch.randn(order, order, generator=random).half()
    found = []
    for rows, columns in ((64, 64), tile):
        tiles = Tiles(
            symmetric=Tile(rows=rows, columns=columns, warps=4, stages=3),
            update=Tile(rows=rows, columns=columns, warps=4, stages=3),
        )
        target, own_rest, diagonal = (
            torch.full_like(left, 7.0),
            torch.zeros_like(left),
            torch.zeros(order),
        )
        operands = [
            SymmetricMatrix(values, d, rest, tiles)
            for values, d in zip((left, right), diagonals, strict=True)
        ]
        a, b = (x, x) if kind == 0 else (left, left if kind == 1 else right)
        count = order // columns * (order // columns + 1) // (1 if columns > rows else 2)
        symmetric_product[count, 1](
            left=tiled(a, rows, 64),
            right=tiled(b, columns, 64),
            **operands[0].as_operand("left"),
            **operands[1].as_operand("right"),
            **SymmetricMatrix(target, diagonal, own_rest, tiles).as_target(),
            weights=weights,
            weights_row=0,
            order=order,
            depth=depth,
            KIND=kind,
            LEFT_FINE=fine and kind > 0,
            RIGHT_FINE=fine and kind > 1,
            TARGET_FINE=fine,
            T=rows,
            N=columns,
            K=64,
        )
        square = torch.arange(order) // columns
        beside = square[:, None] != square
        assert torch.equal(target[beside], target.mT[beside])
        # A BLAS may round X Xᵀ to either side of its diagonal differently; further products are made symmetric.
        torch.testing.assert_close(target, target.mT, rtol=2.0**-10 if kind == 0 else 0.0, atol=0.0)
        found.append((target.float() + own_rest.float() / 2048).tril(-1) + diagonal.diag())
    small, large = found
    assert (small - large).abs().max() <= (1e-6 if fine else 1e-3) * small.abs().max()


@on_gpu
def test_every_implementation_is_chosen_and_none_was_switched_off(monkeypatch):
    before = counts()
    assert not dispatch.FAILED
    for name, shape in OWN.items():
        x = matrices("gaussian", 2, *shape).cuda()
        others = [other for other in FORCED if name not in (other, "default")]
        monkeypatch.setattr(dispatch, "FAILED", dict.fromkeys(others, "left out"))
        orthogonalize_matrices([x], "8+2")
        assert len(dispatch.FAILED) == len(others)
        if name != "default":
            key = (name, min(shape), max(shape))
            assert counts()[key] == before.get(key, 0) + 2


@on_gpu
def test_dispatch_takes_a_whole_model_and_a_captured_call_equals_the_eager_one():
    shapes = [
        (1, 25, 50),
        (1, 50, 100),
        (1, 1600, 240),
        (2, 240, 240),
        (1, 1, 25),
        (3, 32, 576),
        (1, 520, 2100),
    ]
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


@on_gpu
@pytest.mark.parametrize("shape", [(2, 25, 50), (2, 240, 240), (1, 500, 500), (1, 1024, 1024)])
def test_repeated_calls_give_the_same_bits(shape):
    launches_for.cache_clear()
    x = matrices("gaussian", *shape).cuda()
    (first,) = orthogonalize_matrices([x], "8+2")
    other = matrices("gaussian", *shape, seed=1).cuda()
    (moved,) = orthogonalize_matrices([other], "8+2")  # from other addresses
    assert error_inside(other.cpu(), moved.cpu(), "8+2", 1e-3).max() <= 3e-3
    assert torch.equal(orthogonalize_matrices([x.clone()], "8+2")[0], first)
    with torch.cuda.stream(torch.cuda.Stream()):  # streams do not share workspaces
        assert torch.equal(orthogonalize_matrices([x], "8+2")[0], first)


@on_gpu
def test_flash_off_is_torch_and_agrees():
    x = matrices("rank8", 2, 60, 90).cuda()
    before = counts()
    (plain,) = orthogonalize_matrices([x], "8+2", flash=False)
    assert counts() == before
    (fast,) = orthogonalize_matrices([x], "8+2")
    assert (plain - fast).norm() / plain.norm() < 1e-2  # each has its own rounding of fp16 operands


@on_gpu
def test_large_low_rank_input_stays_clean():
    x = matrices("rank8", 1, 1500, 1800)
    (o,) = orthogonalize_matrices([x.cuda()], "8+2")
    assert noise_fraction(x, o.cpu()).max() <= 0.02
