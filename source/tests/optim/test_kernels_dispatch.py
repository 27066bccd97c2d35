"""The dispatch table: what goes where, and that nothing goes to a kernel where none can run."""

from __future__ import annotations

import logging

import pytest
import torch
from kernel_cases import BATCHES, default_choice
from polar_oracle import SHAPES

from deepmd_muon.optim.polar import dispatch, orthogonalization, orthogonalize_matrices
from deepmd_muon.optim.polar.dispatch import IMPLEMENTATIONS, TABLE, MatrixBatch, choose


@pytest.mark.parametrize(
    ("rows", "columns", "count", "name"),
    [
        (1, 1, 1, "whole"),
        (1, 256, 1, "whole"),
        (1, 5000, 1, "torch"),
        (25, 50, 4, "whole"),
        (64, 256, 1, "whole"),
        (128, 128, 46, "whole"),
        (65, 129, 1, "strips"),
        (128, 1208, 1, "strips"),
        (32, 576, 9, "strips"),
        (240, 240, 4, "strips"),
        (240, 1600, 2, "strips"),
        (512, 512, 1, "symmetric"),
        (1024, 1024, 1, "symmetric"),
        (1024, 4096, 1, "symmetric"),
        (8192, 8192, 1, "symmetric"),
        (768, 2048, 64, "symmetric"),
        (128, 5000, 1, "strips"),
        (240, 1600, 40, "symmetric"),
        (300, 700, 1, "symmetric"),
        (100, 500_000, 1, "torch"),
    ],
)
def test_shapes_go_where_they_are_fastest(rows, columns, count, name):
    assert choose(MatrixBatch(rows, columns, count)) == name


@pytest.mark.parametrize(
    ("capability", "operand"),
    [((7, 5), torch.float16), ((9, 0), torch.float32), ((9, 0), torch.bfloat16)],
)
def test_other_devices_and_operands_are_left_to_torch(capability, operand):
    shapes = ((25, 50), (128, 768), (240, 240), (4096, 4096))
    geometry = tuple(
        ((1, *shape), (shape[0] * shape[1], shape[1], 1), torch.float32) for shape in shapes
    )
    names = orthogonalization.choices(geometry, capability, operand, IMPLEMENTATIONS)
    assert names == ("torch",) * len(shapes)
    assert "torch" not in orthogonalization.choices(
        geometry, (9, 0), torch.float16, IMPLEMENTATIONS
    )


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: f"{shape[0]}x{shape[1]}")
def test_every_shape_of_the_gates_has_a_kernel_in_any_batch(shape):
    for batch in BATCHES:
        assert default_choice(shape, batch) != "torch"
        assert default_choice(shape[::-1], batch) == default_choice(shape, batch)


def test_the_choice_can_be_restricted():
    assert choose(MatrixBatch(25, 50, 1), ()) == "torch"
    assert choose(MatrixBatch(240, 240, 1), ("symmetric",)) == "symmetric"
    assert choose(MatrixBatch(25, 50, 1), ("whole", "symmetric")) == "whole"


def test_the_table_prints_and_ends_with_torch():
    text = dispatch.describe()
    for rule in TABLE:
        assert rule.implementation in text
        assert rule.means in text
    assert TABLE[-1].implementation == "torch"


def test_without_a_gpu_one_line_is_logged_and_torch_runs(monkeypatch, caplog):
    monkeypatch.setattr(dispatch, "unavailable", lambda: "torch finds no GPU")
    orthogonalization._kernels_available.cache_clear()
    x = torch.eye(3).expand(2, 3, 3)
    with caplog.at_level(logging.INFO):
        for _ in range(2):
            assert torch.allclose(
                orthogonalize_matrices([x], "8+2")[0], torch.eye(3).expand(2, 3, 3), atol=2e-3
            )
    assert [record.message for record in caplog.records] == [
        "matrices are orthogonalized by torch: torch finds no GPU"
    ]
    orthogonalization._kernels_available.cache_clear()


def test_a_failing_kernel_is_switched_off_with_one_line(monkeypatch, caplog):
    def broken(name, matrices, coefficients):
        raise RuntimeError("no compiler\nand more")

    monkeypatch.setattr(orthogonalization, "check", lambda name, device: None)
    monkeypatch.setattr(orthogonalization, "run_kernels", broken)
    monkeypatch.setattr(dispatch, "FAILED", {})
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    with caplog.at_level(logging.WARNING):
        assert (
            orthogonalization.try_kernels("whole", [torch.zeros(1, 2, 2)], ((1.0, 0.0, 0.0),))
            is None
        )
    assert [r.message for r in caplog.records] == [
        "'whole' is disabled, and torch is used instead: RuntimeError: no compiler"
    ]
    assert "whole is off: RuntimeError: no compiler" in dispatch.describe()
