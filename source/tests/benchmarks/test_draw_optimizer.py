"""The pictures of doc/polar-factor.md are drawn, from the momenta of one matrix."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("matplotlib")


def test_the_pictures_of_the_optimizer_are_drawn(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "benchmarks")
    import draw_optimizer

    momenta = {
        "atomic_model.layer.matrix": torch.randn(9, 9, generator=torch.Generator().manual_seed(0))
    }
    torch.save(momenta, tmp_path / "momenta.pt")
    monkeypatch.setattr(
        sys, "argv", ["draw", "--momenta", str(tmp_path / "momenta.pt"), "--out", str(tmp_path)]
    )
    draw_optimizer.main()
    for name in ("schedules", "spectra", "noise"):
        assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")
