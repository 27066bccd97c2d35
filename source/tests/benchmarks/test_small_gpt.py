"""The small GPT measures the optimizer that the README shows, and its page has what was measured."""

from __future__ import annotations

import functools
import json
import math
import re
from pathlib import Path

import pytest
import torch

from deepmd_muon.optim import MuonConfig

TOP = Path(__file__).parents[3]
RAW = TOP / "doc" / "benchmarks" / "raw" / "small_gpt_cpu_2026-11-28.log"


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
    assert small_gpt.train(small_gpt.from_readme, 2) == small_gpt.train(
        lambda model: [config.build(model)], 2
    )


def test_every_optimizer_of_the_benchmark_takes_every_parameter_once(small_gpt):
    assert hasattr(torch.optim, "Muon") == any(
        "torch.optim.Muon" in name for name in small_gpt.cases()
    )
    for make in small_gpt.cases().values():
        model = small_gpt.GPT()
        params = [
            p
            for optimizer in make(model)
            for group in optimizer.param_groups
            for p in group["params"]
        ]
        assert len(params) == len(set(params)) == len(list(model.parameters()))


def test_the_page_has_the_figures_of_the_run(small_gpt):
    table = re.findall(r"^\|.*\|$", RAW.read_text(encoding="utf-8"), re.MULTILINE)
    names = [row.split("`")[1] for row in table[2:]]
    assert names == [
        name
        for name in small_gpt.cases()
        if "optim.Muon" not in name or hasattr(torch.optim, "Muon")
    ]
    page = (TOP / "doc" / "optimizer.md").read_text(encoding="utf-8")
    assert "\n".join(table) in page
    losses = {
        name: float(row.split("|")[2].split("±")[0])
        for name, row in zip(names, table[2:], strict=True)
    }
    defaults = [name for name in names if "splits" not in name]
    assert min(defaults, key=losses.get) == "muon_for(model)"


@pytest.fixture
def small_gpt_race(small_gpt):
    import small_gpt_race

    return small_gpt_race


def test_rates_are_tuned_until_the_best_is_not_the_last(small_gpt_race):
    asked = []

    def loss(rates):
        asked.append(rates)
        return sum(
            math.log2(rate / best) ** 2 for rate, best in zip(rates, (0.16, 0.01), strict=True)
        )

    assert small_gpt_race.tune((0.02, 0.02), loss) == (0.16, 0.01)
    assert len(asked) == len(set(asked))
    assert small_gpt_race.tune((1.0,), lambda rates: -rates[0]) == (2.0**4,)  # after six


def test_runs_of_an_earlier_race_are_not_repeated(small_gpt_race, tmp_path, monkeypatch):
    trained = []

    def train(contestant, rates, seed, steps, device):
        trained.append(rates)
        loss = sum(math.log2(rate / 0.04) ** 2 for rate in rates)
        return small_gpt_race.Result(loss, loss, loss, loss)

    monkeypatch.setattr(small_gpt_race, "train", train)
    path = tmp_path / "race.csv"
    first = small_gpt_race.race("NorMuon", 5, "cpu")
    small_gpt_race.write(path, first)
    assert len(trained) == len(first)
    assert small_gpt_race.race("NorMuon", 5, "cpu", small_gpt_race.read(path)) == first
    assert len(trained) == len(first)
    assert len(small_gpt_race.race("NorMuon", 6, "cpu", small_gpt_race.read(path))) == len(
        trained
    ) - len(first)


def test_every_contestant_of_the_race_takes_every_parameter_once(small_gpt, small_gpt_race):
    for name, contestant in small_gpt_race.contestants().items():
        model = small_gpt.GPT()
        optimizers = contestant.make(model, *contestant.rates)
        params = [
            p
            for optimizer in optimizers
            for group in optimizer.param_groups
            for p in group["params"]
        ]
        assert len(params) == len(set(params)) == len(list(model.parameters())), name
        lowest = min(group["lr"] for optimizer in optimizers for group in optimizer.param_groups)
        assert lowest == min(contestant.rates), name


def test_rates_and_batches_read_on_the_device_mean_the_same(small_gpt_race):
    contestant = small_gpt_race.contestants()["NorMuon"]
    eager, other = (
        small_gpt_race.Run(lambda model: contestant.make(model, *contestant.rates), 1, 60, "cpu")
        for _ in range(2)
    )
    other.read_on_device()
    for run in (eager, other):
        for _ in range(3):
            run.step()
    torch.testing.assert_close(other.losses, eager.losses, rtol=1e-5, atol=1e-5)
    assert eager.losses[:3].min() > 3.0
    assert eager.losses[3:].max() == 0.0


@pytest.mark.parametrize("name", ["experts, width 192", "ViT, width 192", "equivariant potential"])
def test_a_task_of_some_size_trains_with_every_optimizer(small_gpt_race, name, monkeypatch):
    import rate_tasks
    import small_equivariant

    monkeypatch.setattr(small_equivariant, "BATCH", 2)
    monkeypatch.setattr(small_equivariant, "HELD_OUT", 4)
    for constant, value in {"BATCH": 2, "HELD_OUT": 4, "IMAGES": 4, "LENGTH": 20}.items():
        monkeypatch.setattr(rate_tasks, constant, value)
    monkeypatch.setattr(rate_tasks, "generated_images", rate_tasks.generated_images.__wrapped__)
    task = small_gpt_race.TASKS[name]._replace(steps=2)
    if name.startswith("experts"):
        small = functools.partial(rate_tasks.Text, width=16, layers=1, block=rate_tasks.Experts)
        task = task._replace(make=small)
    monkeypatch.setitem(small_gpt_race.TASKS, name, task)
    every = [*small_gpt_race.jobs_of_defaults(), *small_gpt_race.jobs()]
    jobs = [job for job in every if (job.task, job.seed) == (name, 1)]
    by_optimizer = {job.optimizer: job for job in jobs}
    rows = [small_gpt_race.run_job(job, "cpu") for job in by_optimizer.values()]
    assert len(by_optimizer) >= 3
    assert all(0.05 < row["validation"] < 12.0 for row in rows)
    lines = small_gpt_race.table_of_sizes(rows)
    assert len(lines) == len(rows)
    assert all(line.startswith(f"{name} ({rows[0]['weights']}) | ") for line in lines)


class _FillsRates(torch.optim.SGD):
    """An optimizer that keeps a tensor as the rate of its group, and fills it (as dion's do)."""

    def __init__(self, params, lr):
        super().__init__(params, lr)
        self.rate = torch.tensor(lr)
        self.param_groups[0]["lr"] = self.rate

    def step(self, closure=None):
        self.rate.copy_(torch.as_tensor(self.param_groups[0]["lr"]))
        self.param_groups[0]["lr"] = self.rate


def test_rates_that_an_optimizer_fills_follow_the_schedule(small_gpt_race):
    run = small_gpt_race.Run(
        lambda model: [_FillsRates(model.parameters(), 0.5)], seed=1, steps=60, device="cpu"
    )
    rates = []
    for _ in range(5):
        run.step()
        rates.append(run.optimizers[0].rate.item())
    # Three steps of warm-up, and a linear decay from the first step on.
    wanted = [0.5 * min((k + 1) / 3, 1.0) * (1 - k / 60) for k in range(5)]
    assert rates == pytest.approx(wanted, rel=1e-6)


def test_the_page_of_any_model_has_the_tables_of_its_runs(small_gpt_race):
    import optimizer_step_times

    page = (TOP / "doc" / "benchmarks" / "any_model.md").read_text(encoding="utf-8")
    raw = TOP / "doc" / "benchmarks" / "raw"
    runs = [
        run
        for path in sorted(raw.glob("any_model_[!t]*.json"))
        for run in json.loads(path.read_text(encoding="utf-8"))
    ]
    times = json.loads((raw / "any_model_times_h200_2026-11-28.json").read_text(encoding="utf-8"))
    assert "\n".join(small_gpt_race.table_of_defaults(runs)) in page
    assert "\n".join(optimizer_step_times.table(times)) in page
