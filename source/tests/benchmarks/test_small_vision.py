"""The small vision models: their parameters, and the page that has what was measured."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

TOP = Path(__file__).parents[3]
RAW = TOP / "doc" / "benchmarks" / "raw" / "small_vision_cpu_2026-11-24.log"


@pytest.fixture
def small_vision(monkeypatch):
    monkeypatch.syspath_prepend(TOP / "source" / "benchmarks")
    import small_vision

    return small_vision


def test_every_optimizer_takes_every_parameter_once(small_vision):
    for make in small_vision.cases().values():
        for kind in (small_vision.ConvNet, small_vision.ViT):
            model = kind()
            params = [
                p
                for optimizer in make(model)
                for group in optimizer.param_groups
                for p in group["params"]
            ]
            assert len(params) == len(set(params)) == len(list(model.parameters()))


def test_kernels_are_matrices_and_a_vit_routes_as_it_should(small_vision):
    (optimizer,) = small_vision.muon()(small_vision.ConvNet())
    views = {entry.name: str(entry.view) for entry in optimizer.routing if entry.view}
    assert views == {
        "convs.1.weight": "1x32x144",
        "convs.2.weight": "1x32x72 rows 8+8+8+8",
        "convs.3.weight": "1x64x288",
    }
    (optimizer,) = small_vision.muon()(small_vision.ViT())
    muon = {entry.name for entry in optimizer.routing if entry.route == "muon"}
    layers = (
        "self_attn.in_proj_weight",
        "self_attn.out_proj.weight",
        "linear1.weight",
        "linear2.weight",
    )
    blocks = {f"blocks.layers.{i}.{layer}" for i in range(2) for layer in layers}
    assert muon == blocks


def test_images_are_the_same_every_time(small_vision):
    (x, label), (y, again) = (
        small_vision.images(8, torch.Generator().manual_seed(3)) for _ in range(2)
    )
    assert torch.equal(x, y)
    assert torch.equal(label, again)
    assert x.shape == (8, 3, 16, 16)
    assert small_vision.train(small_vision.ViT, small_vision.muon(), 1, 0)[0] < 4.0


def test_the_page_has_the_figures_of_the_run(small_vision):
    table = re.findall(r"^\|.*\|$", RAW.read_text(encoding="utf-8"), re.MULTILINE)
    assert [row.split("`")[1] for row in table[2:]] == list(small_vision.cases())
    page = (TOP / "doc" / "from-other-optimizers.md").read_text(encoding="utf-8")
    assert "\n".join(table) in page
