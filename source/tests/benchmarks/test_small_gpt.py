"""The small GPT measures the optimizer that the README shows, and its page has what was measured."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from deepmd_muon.optim import MuonConfig

TOP = Path(__file__).parents[3]
RAW = TOP / "doc" / "benchmarks" / "raw" / "small_gpt_cpu_2026-11-23.log"


@pytest.fixture
def small_gpt(monkeypatch):
    monkeypatch.syspath_prepend(TOP / "source" / "benchmarks")
    import small_gpt

    return small_gpt


def test_the_snippet_of_the_readme_is_measured_and_routes_the_gpt(small_gpt):
    line = small_gpt.readme_snippet()[1]
    assert f"\n{line}\n" in (TOP / "README.md").read_text(encoding="utf-8")
    assert next(iter(small_gpt.cases())) == line.removeprefix("optimizer = ")
    (optimizer,) = small_gpt.from_readme(small_gpt.GPT())
    muon = {entry.name for entry in optimizer.routing if entry.route == "muon"}
    layers = ("qkv", "proj", "fc", "out")
    assert muon == {f"h.{i}.{layer}.weight" for i in range(small_gpt.LAYERS) for layer in layers}
    config = MuonConfig()
    assert small_gpt.train(small_gpt.from_readme, 2) == small_gpt.train(lambda model: [config.build(model)], 2)


def test_every_optimizer_of_the_benchmark_takes_every_parameter_once(small_gpt):
    assert hasattr(torch.optim, "Muon") == any("torch.optim.Muon" in name for name in small_gpt.cases())
    for make in small_gpt.cases().values():
        model = small_gpt.GPT()
        params = [p for optimizer in make(model) for group in optimizer.param_groups for p in group["params"]]
        assert len(params) == len(set(params)) == len(list(model.parameters()))


def test_the_page_has_the_figures_of_the_run(small_gpt):
    table = re.findall(r"^\|.*\|$", RAW.read_text(encoding="utf-8"), re.MULTILINE)
    names = [row.split("`")[1] for row in table[2:]]
    assert names == [name for name in small_gpt.cases() if "optim.Muon" not in name or hasattr(torch.optim, "Muon")]
    page = (TOP / "doc" / "optimizer.md").read_text(encoding="utf-8")
    assert "\n".join(table) in page
    losses = {name: float(row.split("|")[2].split("±")[0]) for name, row in zip(names, table[2:], strict=True)}
    assert min(losses, key=losses.get) == "MuonConfig().build(model)"
