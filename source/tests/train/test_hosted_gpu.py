"""Captured steps of models of deepmd-kit on a GPU: the weights of launched ones, also after a restart."""

import importlib.util

import pytest
import torch
from hosted_models import (
    CAPTURED_MODELS,
    MODELS,
    SPIN_MODELS,
    hosted_input,
    spin_input,
    write_data,
    write_spin_data,
)
from test_capture_gpu import _on_gpu  # noqa: F401 (a fixture)
from test_hosted_training import assert_close, two_branches

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.deepmd_kit,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.skipif(
        importlib.util.find_spec("deepmd") is None, reason="deepmd-kit is not importable here"
    ),
]


@pytest.fixture
def check(train, load):
    """Compare captured steps with launched ones, and with a restart of captured ones."""

    def compare(kind, make_input):
        # DPA-4 computes its geometry in float32.
        tolerance = 1e-4 if kind.startswith("dpa4") else 1e-9
        weights = []
        for capture in ("off", "on"):
            content = make_input(save_freq=4, capture=capture)
            # Orthogonalized in float64, rounding does not grow.
            content["optimizer"] = {"type": "HybridMuon", "precision": "float64"}
            assert train(content, skip_neighbor_stat=True) == 0
            weights.append(load("model.ckpt-8.pt")["model"])
        assert_close(*weights, tolerance)
        assert train(content, skip_neighbor_stat=True, restart="model.ckpt-4.pt") == 0
        assert_close(load("model.ckpt-8.pt")["model"], weights[1], tolerance)

    return compare


@pytest.mark.parametrize("kind", [*MODELS, *CAPTURED_MODELS])
def test_captured_steps_of_a_model(kind, tmp_path, check):
    system = write_data(tmp_path, nframes=4)
    check(kind, lambda **training: hosted_input(kind, system, 8, **training))


@pytest.mark.parametrize("kind", SPIN_MODELS)
def test_captured_steps_with_spins(kind, tmp_path, check):
    system = write_spin_data(tmp_path, nframes=4)
    check(kind, lambda **training: spin_input(kind, system, 8, **training))


def test_captured_steps_of_two_branches(tmp_path, check):
    system = write_data(tmp_path, nframes=4)
    check("dpa4", lambda **training: two_branches(system, 8, **training))
