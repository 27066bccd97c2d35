"""Batches at the edges of real data sets on a GPU; `test_model_kernels` has them in Triton's interpreter."""

import pytest
import torch
from corners import CORNERS, DESCRIPTORS, assert_corner

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


@pytest.mark.parametrize("precision", ["float64", "float32"])
@pytest.mark.parametrize("corner", CORNERS)
@pytest.mark.parametrize("name", DESCRIPTORS)
def test_models_at_the_corners(monkeypatch, name, corner, precision):
    assert_corner(name, corner, precision, monkeypatch, device="cuda")
