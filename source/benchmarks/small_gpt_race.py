"""Race the rules of the Muon route, torch.optim.Muon and AdamW on the small GPT, each at its best learning rates.

    python source/benchmarks/small_gpt_race.py --out doc/benchmarks/raw/small_gpt_race_h200_DATE.csv [--steps 500]

A process for each optimizer, all at once on one GPU (or, with `--device cpu --processes 2`, on cores). Each optimizer
tunes its rates on seed 0: from its default by factors of 2 until the best is not the last one tried, first all rates
together, then that of AdamW's part alone, then Muon's alone. The rates of the lowest `validation` loss are kept for
three fresh seeds, which choose nothing. A seed decides weights and batches; all optimizers see the same. Schedule and
text are those of `small_gpt.py`. With `--known` the runs of an earlier file are not repeated. On a GPU the steps are
captured in CUDA graphs; torch.optim.Muon's step cannot be captured.

With `--sizes`, models of several sizes (`rate_tasks.py`) train at a grid of rates of AdamW's part instead, beside AdamW
and torch's Muon at theirs; the runs that matter most come first, and `--limit` ends them. Processes share `--gpus` GPUs.
Then `--out` is a JSON file, written after every run. `--defaults` trains the untouched `muon_for(model)` beside them,
three seeds each, on fewer tasks, with dion's Muon if it is importable; `--vision` trains what separates ours from
torch's Muon on images, eight seeds each. `optimizer_step_times.py` has the times of their steps.

Losses [nats a byte]: `train`, the last 20 batches; `validation` and `test`, each half of the held-out text; `tail`, on
the test half, of the mean of the weights after each of the last tenth of the steps.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import copy
import csv
import functools
import importlib.util
import itertools
import json
import math
import multiprocessing
import multiprocessing.pool
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from measured_optimizers import RULES
from rate_tasks import EQUIVARIANT, SYNTHETIC_TASKS, SizedTask
from small_gpt import BATCH, BETAS, GPT, LAYERS, LENGTH, WIDTH, Block, text, torch_muon
from small_vision import torch_muon as torch_muon_of_images
from torch import Tensor, nn

from deepmd_muon.model.nn.graphs import own_blas_workspaces
from deepmd_muon.optim import MuonConfig, muon_for

SEEDS = (1, 2, 3)
_TAIL = 0.1
_EAGER = 3  # steps before the capture
_MOST = 6  # rates that one search tries at most
Optimizers = list[torch.optim.Optimizer]


class Task(Protocol):
    """A model and its data."""

    def model(self) -> nn.Module:
        """Return a new model."""
        ...

    def loss(self, model: nn.Module, at: Tensor) -> Tensor:
        """Return the loss of batch number `at`, which is read on its device."""
        ...

    def held_out(self, model: nn.Module) -> list[float]:
        """Return the losses of two sets that are not trained on."""
        ...


class Contestant(NamedTuple):
    """An optimizer: made for a model, Muon's (or the only) rate, and AdamW's."""

    make: Callable[[nn.Module, float, float], Optimizers]
    rates: tuple[float, ...]  # where the searches begin


class Result(NamedTuple):
    """Losses of one run."""

    train: float
    validation: float
    test: float
    tail: float


def ours(model: nn.Module, lr: float, adamw_lr: float, **rule: object) -> Optimizers:
    """Return a Muon with a rule, AdamW for embeddings and vectors."""
    magma = rule.pop("magma_muon", False)
    optimizer = MuonConfig(adam_lr_ratio=adamw_lr / lr, **rule).build(model, lr)
    for group in optimizer.param_groups:
        group["magma_muon"] = magma
    return [optimizer]


def adamw(model: nn.Module, lr: float) -> Optimizers:
    """Return AdamW on every parameter."""
    return [torch.optim.AdamW(model.parameters(), lr, betas=BETAS, weight_decay=0.1, fused=True)]


def contestants() -> dict[str, Contestant]:
    """Return all optimizers by name."""
    found = {"Muon (MuonConfig)": Contestant(ours, (0.02, 0.02))}
    for name, rule in RULES.items():
        found[name] = Contestant(
            lambda model, lr, other, rule=rule: ours(model, lr, other, **rule), (0.02, 0.02)
        )
    if hasattr(torch.optim, "Muon"):
        found["torch.optim.Muon"] = Contestant(
            lambda model, *rates: torch_muon(*rates)(model), (0.02, 3e-3)
        )
    return found | {"torch.optim.AdamW": Contestant(adamw, (3e-3,))}


class HelpTopics:
    """A GPT on the bytes of Python's help topics: the batches of one seed."""

    def __init__(
        self, seed: int, steps: int, device: str, *, width: int = WIDTH, layers: int = LAYERS
    ) -> None:
        data = text().long().to(device)
        cut = len(data) * 9 // 10
        draw = torch.Generator().manual_seed(seed)
        starts = torch.randint(cut - LENGTH - 1, (steps, BATCH, 1), generator=draw)
        self.starts, self.data = starts.to(device), data[:cut]
        self.halves = data[cut:].chunk(2)
        self.width, self.layers = width, layers

    def model(self) -> nn.Module:
        """Return a new model."""
        return GPT(self.width, [Block(self.width) for _ in range(self.layers)])

    def loss(self, model: nn.Module, at: Tensor) -> Tensor:
        """Return the loss of batch number `at`, which is read on its device."""
        starts = self.starts.index_select(0, at)[0]
        pieces = self.data[starts + torch.arange(LENGTH + 1, device=at.device)]
        return loss_of(model, pieces)

    def held_out(self, model: nn.Module) -> list[float]:
        """Return the losses of both halves of the held-out text."""
        return [held_out_loss(model, half) for half in self.halves]


class Run:
    """One training run, whose step is a graph where the device and the optimizer allow it."""

    def __init__(
        self,
        make: Callable[[nn.Module], Optimizers],
        seed: int,
        steps: int,
        device: str,
        task: Callable[[int, int, str], Task] = HelpTopics,
    ) -> None:
        self.task = task(seed, steps, device)
        torch.manual_seed(seed)
        self.model = self.task.model().to(device)
        self.optimizers = make(self.model)
        self.capturing = False
        warm, falling = (torch.arange(steps, dtype=torch.float64) + k for k in (1, 0))
        factors = (warm / (0.05 * steps)).clamp_max(1.0) * (1.0 - falling / steps)
        self.host_factors, self.factors = factors.tolist(), factors.to(device)
        self.at = torch.zeros(1, dtype=torch.int64, device=device)
        self.losses = torch.zeros(steps, device=device)
        self.steps, self.done = steps, 0
        self.on_gpu = device != "cpu"
        # Numbers: dion's groups hold the tensors that its steps read and that `_update` fills.
        self.rates = [
            [float(group["lr"]) for group in optimizer.param_groups]
            for optimizer in self.optimizers
        ]
        self.tail = [torch.zeros_like(p) for p in self.model.parameters()]
        self.averaged = 0
        self.graph: torch.cuda.CUDAGraph | None = None
        if device != "cpu" and not any(map(_is_eager, self.optimizers)):
            self.read_on_device()

    def read_on_device(self) -> None:
        """Let steps read batches and rates on the device, so that a graph can hold them."""
        self.capturing = True
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = torch.tensor(group["lr"], dtype=torch.float32, device=self.at.device)
                group["capturable"] = True

    def _gradients(self) -> None:
        """Compute the gradients of the next batch."""
        loss = self.task.loss(self.model, self.at)
        for p in self.model.parameters():
            if p.grad is not None:
                p.grad.zero_()
        loss.backward()
        self.losses.index_copy_(0, self.at, loss.detach().view(1))

    def _on_device(self) -> None:
        """Take a step that reads batch and rate on the device."""
        self._gradients()
        factor = self.factors.index_select(0, self.at).squeeze()
        for optimizer, rates in zip(self.optimizers, self.rates, strict=True):
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                group["lr"].copy_(rate * factor)
            optimizer.step()
        self.at += 1

    def _update(self) -> None:
        """Step the optimizers with rates from the host."""
        for optimizer, rates in zip(self.optimizers, self.rates, strict=True):
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = rate * self.host_factors[self.done]
            optimizer.step()

    def step(self) -> None:
        """Take a step; the fourth is captured first."""
        work = self._on_device if self.capturing else self._gradients
        if self.on_gpu and self.done == _EAGER:
            self.graph = torch.cuda.CUDAGraph()
            # A run that ends frees the workspaces of its stream, which this graph must not hold (pytorch#193402).
            with (
                own_blas_workspaces(),
                torch.cuda.graph(self.graph, stream=torch.cuda.current_stream()),
            ):
                work()
        if self.graph is None:
            work()
        else:
            self.graph.replay()
        if not self.capturing:
            self._update()
            self.at += 1
        self.done += 1
        if self.done > (1.0 - _TAIL) * self.steps:
            torch._foreach_add_(self.tail, [p.detach() for p in self.model.parameters()])
            self.averaged += 1

    @torch.no_grad()
    def result(self) -> Result:
        """Return the losses after the last step."""
        found = [self.losses[-20:].mean().item(), *self.task.held_out(self.model)]
        average = copy.deepcopy(self.model)
        torch._foreach_copy_(
            list(average.parameters()), torch._foreach_div(self.tail, self.averaged)
        )
        found.append(self.task.held_out(average)[-1])
        return Result(*(x if math.isfinite(x) else math.inf for x in found))


def _is_eager(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether the optimizer takes numbers from the host, which a graph cannot repeat."""
    return type(optimizer).__name__ == "Muon"  # torch's and dion's


def loss_of(model: nn.Module, pieces: Tensor) -> Tensor:
    """Return the loss [nats a byte] of pieces (batch, length + 1)."""
    return F.cross_entropy(model(pieces[:, :-1]).flatten(0, 1), pieces[:, 1:].flatten())


def held_out_loss(model: nn.Module, data: Tensor) -> float:
    """Return the loss [nats a byte] of all pieces of some text."""
    pieces = data.unfold(0, LENGTH + 1, LENGTH)
    return sum(loss_of(model, some).item() * len(some) for some in pieces.split(256)) / len(pieces)


def train(
    contestant: Contestant, rates: Sequence[float], seed: int, steps: int, device: str
) -> Result:
    """Train with these rates."""
    run = Run(lambda model: contestant.make(model, *rates), seed, steps, device)
    for _ in range(steps):
        run.step()
    return run.result()


def tune(begin: tuple[float, ...], loss: Callable[[tuple[float, ...]], float]) -> tuple[float, ...]:
    """Return the best rates, by factors of 2: all of them together, then each one, the last first."""
    known = functools.cache(loss)
    best = begin
    each = [{i} for i in reversed(range(len(begin)))] if len(begin) > 1 else []
    for moved in [set(range(len(begin))), *each]:

        def at(
            k: int, center: tuple[float, ...] = best, moved: set[int] = moved
        ) -> tuple[float, ...]:
            return tuple(rate * 2.0**k if i in moved else rate for i, rate in enumerate(center))

        tried = [-1, 0, 1]
        while (least := min(tried, key=lambda k: known(at(k)))) in (tried[0], tried[-1]) and len(
            tried
        ) < _MOST:
            tried = [tried[0] - 1, *tried] if least == tried[0] else [*tried, tried[-1] + 1]
        best = at(least)
    return best


def race(
    name: str, steps: int, device: str, known: Sequence[dict[str, object]] = ()
) -> list[dict[str, object]]:
    """Tune one optimizer and train it with fresh seeds; return a row for each run. `known` has rows of earlier runs."""
    torch.set_num_threads(1)
    begun = time.perf_counter()
    contestant = contestants()[name]
    rows: list[dict[str, object]] = []

    def loss(rates: tuple[float, ...], seed: int = 0, role: str = "tuning") -> float:
        shown = dict(zip(("lr", "adamw_lr"), rates, strict=False))
        run = {"optimizer": name, "role": role, **shown, "seed": seed, "steps": steps}
        row = next((row for row in known if row.items() >= run.items()), None)
        rows.append(row or {**run, **train(contestant, rates, seed, steps, device)._asdict()})
        return float(rows[-1]["validation"])

    with torch.cuda.stream(torch.cuda.Stream()) if device != "cpu" else contextlib.nullcontext():
        best = tune(contestant.rates, loss)
        for seed in SEEDS:
            loss(best, seed, "fresh")
    if device != "cpu":
        torch.cuda.synchronize()
    print(f"{name}: {len(rows)} runs in {time.perf_counter() - begun:.1f} s", flush=True)
    return rows


def rows_of(
    name: str, pending: multiprocessing.pool.AsyncResult, until: float
) -> list[dict[str, object]]:
    """Return the rows of an optimizer; none, with a message, if it failed or was too slow."""
    try:
        return pending.get(max(0.1, until - time.perf_counter()))
    except Exception as error:  # the others' results are kept
        print(f"{name} failed: {type(error).__name__}: {error}", flush=True)
        return []


def write(path: Path, rows: Sequence[dict[str, object]]) -> None:
    """Write the rows of a race."""
    columns = ["optimizer", "role", "lr", "adamw_lr", "seed", "steps", *Result._fields]
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, columns, restval="")
        writer.writeheader()
        writer.writerows(rows)


def read(path: Path) -> list[dict[str, object]]:
    """Return the rows of a file that an earlier race has written."""
    with path.open(newline="") as file:
        return [
            {
                key: value if key in ("optimizer", "role") else _number(value)
                for key, value in row.items()
                if value
            }
            for row in csv.DictReader(file)
        ]


def _number(text: str) -> float:
    return int(text) if text.isdecimal() else float(text)


def table(rows: Sequence[dict[str, object]]) -> list[str]:
    """Return the lines of a table of the fresh seeds, the best first."""

    def shown(values: Sequence[float]) -> str:
        return f"{statistics.mean(values):.4f} ± {statistics.stdev(values):.4f}"

    fresh: dict[str, list[dict[str, object]]] = {}
    for row in rows:
        if row["role"] == "fresh":
            fresh.setdefault(str(row["optimizer"]), []).append(row)
    lines = []
    for name, its in fresh.items():
        test, tail = ([float(row[key]) for row in its] for key in ("test", "tail"))
        rates = ", ".join(f"{its[0][key]:g}" for key in ("lr", "adamw_lr") if its[0].get(key))
        lines.append(
            (statistics.mean(test), f"| {name} | {rates} | {shown(test)} | {shown(tail)} |")
        )
    head = [
        "| optimizer | rates: Muon, AdamW | test loss | of the mean of the last weights |",
        "|---|---|---|---|",
    ]
    return [*head, *(line for _, line in sorted(lines))]


TASKS = SYNTHETIC_TASKS | {
    f"help topics, width {width}": SizedTask(
        functools.partial(HelpTopics, width=width, layers=4), steps=500
    )
    for width in (64, 256, 512)
}
TASKS["equivariant potential"] = EQUIVARIANT


class Job(NamedTuple):
    """A run of `--sizes`: rates of Muon, of AdamW's part and, if it differs, of the output layer."""

    task: str
    optimizer: str
    rates: tuple[float, ...]
    seed: int


def torch_muon_anywhere(model: nn.Module, lr: float, adamw_lr: float) -> Optimizers:
    """Return torch.optim.Muon on the matrices that it takes and AdamW on the rest."""
    kind = torch_muon if hasattr(model, "h") else torch_muon_of_images
    return kind(lr, adamw_lr)(model)


def dion_muon(model: nn.Module, lr: float, adamw_lr: float) -> Optimizers:
    """Return dion's Muon on the matrices of `muon_for`, kernels and experts included, its AdamW on the rest."""
    from dion import Muon

    # dion compiles for each shape and each number of matrices, and raises beyond the limit (8).
    torch._dynamo.config.recompile_limit = 256
    matrices, kernels, rest = [], [], []
    for p, entry in zip(model.parameters(), muon_for(model).routing, strict=True):
        on_muon = kernels if p.ndim == 4 else matrices
        (on_muon if entry.route == "muon" else rest).append(p)
    groups = [
        {"params": matrices},
        {"params": kernels, "flatten": True},
        {"params": rest, "algorithm": "adamw", "lr": adamw_lr},
    ]
    groups = [group for group in groups if group["params"]]
    return [Muon(groups, lr=lr, betas=BETAS, weight_decay=0.1, nesterov=True)]


def untouched(model: nn.Module) -> Optimizers:
    """Return `muon_for` with its defaults."""
    return [muon_for(model)]


def twice_adamw_rate(model: nn.Module) -> Optimizers:
    """Return `muon_for` with twice the rate of AdamW's part: 128/width instead of 64/width."""
    (group,) = muon_for(model).param_groups
    return [muon_for(model, adam_lr=2 * group["lr"] * group["adam_lr_ratio"])]


def with_rate_of_head(model: nn.Module, lr: float, adamw_lr: float, head_lr: float) -> Optimizers:
    """Return a Muon whose output layer has an own rate."""
    (optimizer,) = ours(model, lr, adamw_lr)
    (group,) = optimizer.param_groups
    (name,) = {"head.weight", "lm_head.weight"} & set(group["param_names"])
    place = group["param_names"].index(name)
    head = [(group["param_names"].pop(place), group["params"].pop(place))]
    optimizer.add_param_group({"params": head, "adam_lr_ratio": head_lr / lr})
    return [optimizer]


def variants() -> dict[str, Callable[..., Optimizers]]:
    """Return the optimizers of `--sizes`."""
    return {
        "MuonConfig": ours,
        "MuonConfig, own rate of the head": with_rate_of_head,
        "MuonConfig, the classifier on Muon": functools.partial(ours, muon_patterns=["head.*"]),
        "MuonConfig, the first kernel on Muon": functools.partial(
            ours, muon_patterns=["patch_embed.weight", "convs.0.weight"]
        ),
        "MuonConfig, q, k and v as one matrix": functools.partial(
            ours, splits=["*.in_proj_weight: rows 1"]
        ),
        "MuonConfig, decaying vectors": functools.partial(ours, vector_route="adamw"),
        "muon_for(model)": untouched,
        "muon_for, twice AdamW's rate": twice_adamw_rate,
        "dion's Muon": dion_muon,
        "torch.optim.Muon": torch_muon_anywhere,
        "torch.optim.AdamW": adamw,
    }


LARGEST = "GPT, width 1024"
# Rates of AdamW's part, the most telling first.
RATES = (0.02, 0.005, 0.0025, 0.01, 0.00125, 0.04)
# Rates of tables and vectors, and of the output layer, in `OWN_RATE_TASKS`.
RATES_WITH_HEAD = (
    (0.02, 0.005),
    (0.02, 0.00125),
    (0.005, 0.02),
    (0.005, 0.00125),
    (0.00125, 0.005),
)
OWN_RATE_TASKS = ("GPT, width 768", "GPT, width 256", "experts, width 192", "ViT, width 192")


def grid(name: str) -> list[tuple[str, tuple[float, ...]]]:
    """Return optimizer and rates of the runs with one rate of AdamW's part."""
    return [("MuonConfig", (0.02, rate)) for rate in RATES if name != LARGEST or rate < 0.04]


def own_rates(name: str) -> list[tuple[str, tuple[float, ...]]]:
    """Return optimizer and rates of the runs whose output layer has an own rate."""
    if name not in OWN_RATE_TASKS:
        return []
    return [("MuonConfig, own rate of the head", (0.02, *rates)) for rates in RATES_WITH_HEAD]


def others(name: str) -> list[tuple[str, tuple[float, ...]]]:
    """Return optimizer and rates of the runs of torch's optimizers."""
    if name in ("GPT, width 128", "GPT, width 512"):
        return []
    adamw_rates = (5e-4, 1e-3, 3e-3) if name == LARGEST else (5e-4, 1e-3, 3e-3, 1e-2)
    runs: list[tuple[str, tuple[float, ...]]]
    runs = [("torch.optim.AdamW", (rate,)) for rate in adamw_rates]
    if hasattr(torch.optim, "Muon"):
        runs += [("torch.optim.Muon", (0.02, rate)) for rate in (1e-3, 3e-3, 1e-2)]
    return runs


def other_settings(name: str) -> list[tuple[str, tuple[float, ...]]]:
    """Return optimizer and rates of the runs with other settings of ours."""
    settings = ["MuonConfig, decaying vectors"]
    if not TASKS[name].is_text:
        settings.append("MuonConfig, the classifier on Muon")
    if name.startswith("ViT"):
        settings.append("MuonConfig, the first kernel on Muon")
    runs: list[tuple[str, tuple[float, ...]]]
    runs = [(setting, (0.02, rate)) for setting in settings for rate in (0.02, 0.005)]
    return [*runs, *(("MuonConfig", (lr, lr / 8)) for lr in (0.01, 0.04))]


# Runs of a task and the number of its seed, the most important first.
ORDER = ((grid, 0), (own_rates, 0), (others, 0), (grid, 1), (other_settings, 0), (others, 1))


def jobs() -> list[Job]:
    """Return the runs of `--sizes`, the most important first; each rate of a grid for all tasks."""
    ordered: list[Job] = []
    for runs_of, rank in ORDER:
        by_task = [
            [Job(name, *run, seed) for run in runs_of(name)]
            for name, task in TASKS.items()
            for seed in task.seeds[rank : rank + 1]
        ]
        ordered += _in_turn(by_task)
    return ordered


def _in_turn(by_task: Sequence[Sequence[Job]]) -> list[Job]:
    """Return the first run of each task, then the second of each, and so on."""
    return [job for row in itertools.zip_longest(*by_task) for job in row if job is not None]


TASKS_OF_DEFAULTS = (
    *("GPT, width 1024", "GPT, width 768", "GPT, width 256", "experts, width 192"),
    *("GPT, width 64", "ViT, width 192", "ConvNet", "equivariant potential", "GPT, width 32"),
)


def jobs_of_defaults() -> list[Job]:
    """Return the runs of `--defaults`: three seeds of ours, and of each rival at each rate."""
    runs: list[tuple[str, tuple[float, ...]]] = [("muon_for(model)", ())]
    if importlib.util.find_spec("dion"):
        runs += [("dion's Muon", (0.02, rate)) for rate in (1e-3, 3e-3, 1e-2)]
    if hasattr(torch.optim, "Muon"):
        runs += [("torch.optim.Muon", (0.02, rate)) for rate in (1e-3, 3e-3, 1e-2)]
    runs += [("torch.optim.AdamW", (rate,)) for rate in (1.25e-4, 2.5e-4, 5e-4, 1e-3, 3e-3, 1e-2)]
    ordered: list[Job] = []
    for seed in SEEDS:
        ordered += _in_turn([[Job(name, *run, seed) for run in runs] for name in TASKS_OF_DEFAULTS])
    return ordered


TASKS_OF_RATE = (
    *("GPT, width 1024", "GPT, width 768", "experts, width 192", "GPT, width 256"),
    *("GPT, width 64", "GPT, width 32", "help topics, width 512", "help topics, width 256"),
)


def jobs_of_rate() -> list[Job]:
    """Return the runs of `--rate`: three seeds of `muon_for` and of twice the rate of AdamW's part."""
    return [
        Job(name, optimizer, (), seed)
        for seed in SEEDS
        for name in TASKS_OF_RATE
        for optimizer in ("muon_for, twice AdamW's rate", "muon_for(model)")
    ]


# Optimizers and rates of `--vision`, by task.
VISION: dict[str, list[tuple[str, tuple[float, ...]]]] = {
    "ViT, width 192": [
        ("muon_for(model)", ()),
        ("MuonConfig, the first kernel on Muon", (0.02, 0.02 / 3)),
        ("MuonConfig", (0.02, 0.02)),
        ("torch.optim.Muon", (0.02, 0.01)),
        ("MuonConfig, the first kernel on Muon", (0.02, 0.02)),
        ("MuonConfig, q, k and v as one matrix", (0.02, 0.02 / 3)),
        ("MuonConfig, own rate of the head", (0.02, 0.02, 0.02 / 3)),
        ("MuonConfig, own rate of the head", (0.02, 0.02 / 3, 0.02)),
        ("MuonConfig, decaying vectors", (0.02, 0.02 / 3)),
    ],
    "ConvNet": [
        ("muon_for(model)", ()),
        ("MuonConfig, the first kernel on Muon", (0.02, 0.02)),
    ],
}


def jobs_of_vision() -> list[Job]:
    """Return the runs of `--vision`: eight seeds of each."""
    return [
        Job(name, *run, seed)
        for seed in range(1, 9)
        for name, runs in VISION.items()
        for run in runs
    ]


@functools.cache
def _stream_of_process() -> torch.cuda.Stream:
    """Return the stream of all runs of this process, which a graph can be captured on."""
    return torch.cuda.Stream()


def run_job(job: Job, device: str) -> dict[str, object]:
    """Train one model; return its losses."""
    torch.set_num_threads(1)
    torch.set_float32_matmul_precision("high")
    task = TASKS[job.task]
    make = variants()[job.optimizer]
    begun = time.perf_counter()
    with contextlib.nullcontext() if device == "cpu" else torch.cuda.stream(_stream_of_process()):
        try:
            run = Run(
                lambda model: make(model, *job.rates), job.seed, task.steps, device, task.make
            )
            for _ in range(task.steps):
                run.step()
            result = run.result()
        except torch.AcceleratorError as error:
            print(f"{job} failed: {error}".splitlines()[0], flush=True)
            os._exit(1)  # the process has lost its device; the pool starts another one
    count = sum(p.numel() for p in run.model.parameters())
    seconds = time.perf_counter() - begun
    return {**job._asdict(), **result._asdict(), "weights": count, "seconds": seconds}


def _take_gpu(count: int) -> None:
    """Let this process see one of `count` GPUs, in turn."""
    (number,) = multiprocessing.current_process()._identity[-1:]
    os.environ["CUDA_VISIBLE_DEVICES"] = str(number % count)


def race_of_jobs(
    lists: Sequence[Sequence[Job]],
    out: Path,
    device: str,
    *,
    processes: int,
    gpus: int,
    limit: float,
    known: Path | None,
) -> None:
    """Run all jobs that end within `limit` seconds; write all rows after each; print a table.

    The lists take turns. Jobs of the file `known` are not run again.
    """
    begun = time.perf_counter()
    rows: list[dict[str, Any]] = [] if known is None else json.loads(known.read_text("utf-8"))
    done = {Job(row["task"], row["optimizer"], tuple(row["rates"]), row["seed"]) for row in rows}
    in_turn = _in_turn([[job for job in jobs if job not in done] for jobs in lists])
    wanted = list(dict.fromkeys(in_turn))
    arguments = (gpus,) if device == "cuda" and gpus > 1 else None
    pool = multiprocessing.get_context("spawn").Pool(
        processes, _take_gpu if arguments else None, arguments or ()
    )
    pending = pool.imap_unordered(functools.partial(run_job, device=device), wanted)
    for _ in wanted:
        row = _next_row(pending, begun + limit)
        if row is None:
            break
        rows += [row] if row else []
        out.write_text(json.dumps(rows, indent=0), encoding="utf-8")
    pool.terminate()
    print(f"{len(rows)} of {len(wanted)} runs in {time.perf_counter() - begun:.0f} s")
    print(*table_of_sizes(rows), *table_of_defaults(rows), sep="\n")


def _next_row(pending: Iterator[dict[str, object]], until: float) -> dict[str, object] | None:
    """Return the row of the next run; none of a failed one, with a message; None after `until`."""
    try:
        return pending.next(max(0.1, until - time.perf_counter()))  # type: ignore[attr-defined]
    except multiprocessing.TimeoutError:
        return None
    except Exception as error:  # the others' results are kept
        print(f"a run failed: {type(error).__name__}: {error}", flush=True)
        return {}


def table_of_sizes(rows: Sequence[dict[str, object]]) -> list[str]:
    """Return lines: for each task and optimizer the mean loss over the seeds, by rate."""
    losses: dict[tuple[object, ...], dict[str, list[float]]] = {}
    for row in rows:
        *lr, last = row["rates"] or ("default",)
        lr_text = f" at {lr[0]:g}" if lr else ""
        by_rate = losses.setdefault(
            (row["task"], row["weights"], f"{row['optimizer']}{lr_text}"), {}
        )
        mean = (float(row["validation"]) + float(row["test"])) / 2
        by_rate.setdefault(str(last), []).append(mean)
    lines = []
    for (task, count, optimizer), by_rate in sorted(losses.items(), key=str):
        shown = " ".join(
            f"{rate}: {statistics.mean(each):.4f}"
            + (f" ± {statistics.stdev(each):.4f}" if len(each) > 1 else "")
            for rate, each in sorted(by_rate.items())
        )
        lines.append(f"{task} ({count}) | {optimizer} | {shown}")
    return lines


class Best(NamedTuple):
    """Held-out losses, one a seed, of an optimizer at its best rate of AdamW's part (or only one)."""

    losses: list[float]
    rate: float | None

    def __str__(self) -> str:
        mean = f"{statistics.mean(self.losses):.4f}"
        notes = [] if self.rate is None else [f"{self.rate:g}"]
        if len(self.losses) < len(SEEDS):
            notes.append(f"{len(self.losses)} seed" + "s" * (len(self.losses) > 1))
        else:
            mean += f" ± {statistics.stdev(self.losses):.4f}"
        return f"{mean} ({', '.join(notes)})" if notes else mean


def best_of(rows: Sequence[dict[str, Any]]) -> Best:
    """Return the losses at the best rate of an optimizer's runs of one task.

    Rates are compared on the seeds that at least half of them have; rates without one are left out.
    """
    by_rate: dict[float | None, dict[int, float]] = {}
    for row in rows:
        losses = by_rate.setdefault(row["rates"][-1] if row["rates"] else None, {})
        losses[row["seed"]] = (row["validation"] + row["test"]) / 2
    counts = collections.Counter(seed for losses in by_rate.values() for seed in losses)
    seeds = [seed for seed, count in counts.items() if count >= len(by_rate) / 2]
    means = {
        rate: statistics.mean(losses[seed] for seed in seeds)
        for rate, losses in by_rate.items()
        if losses.keys() >= set(seeds)
    }
    best = min(means, key=means.__getitem__)
    return Best(list(by_rate[best].values()), best)


def table_of_defaults(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Return a table of the runs of `--defaults` (Markdown); the lowest loss of each task is bold."""
    names = ("muon_for(model)", "torch.optim.Muon", "dion's Muon", "torch.optim.AdamW")
    lines = [f"| task | weights [million] | {' | '.join(names)} |", "|---" * (len(names) + 2) + "|"]
    for task in TASKS_OF_DEFAULTS:
        of_task = [row for row in rows if row["task"] == task and row["seed"] in SEEDS]
        results = {
            name: best_of(of_name)
            for name in names
            if (of_name := [row for row in of_task if row["optimizer"] == name])
        }
        if not results:
            continue
        most = max(len(best.losses) for best in results.values())
        complete = [best for best in results.values() if len(best.losses) == most]
        least = min(complete, key=lambda best: statistics.mean(best.losses))
        cells = [
            f"**{result}**" if result is least else str(result or "–")
            for result in map(results.get, names)
        ]
        lines.append(f"| {task} | {of_task[0]['weights'] / 1e6:.2f} | {' | '.join(cells)} |")
    return lines


def main() -> None:
    """Race, write all runs, and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--processes", type=int, default=len(contestants()))
    parser.add_argument(
        "--gpus", type=int, default=1, help="GPUs that the processes of --sizes share"
    )
    parser.add_argument(
        "--limit", type=float, default=3600.0, help="seconds after which optimizers are left out"
    )
    parser.add_argument("--known", type=Path, help="file of an earlier race")
    parser.add_argument("--only", default="", help="race only these optimizers, by name: A;B")
    parser.add_argument("--sizes", action="store_true", help="models of several sizes")
    parser.add_argument("--defaults", action="store_true", help="muon_for(model) beside rivals")
    parser.add_argument("--vision", action="store_true", help="settings on images")
    parser.add_argument("--rate", action="store_true", help="muon_for at twice AdamW's rate")
    arguments = parser.parse_args()
    chosen = {jobs: arguments.sizes, jobs_of_defaults: arguments.defaults}
    chosen |= {jobs_of_vision: arguments.vision, jobs_of_rate: arguments.rate}
    if any(chosen.values()):
        lists = [jobs_of() for jobs_of, is_wanted in chosen.items() if is_wanted]
        race_of_jobs(
            [[job for job in each if arguments.only in job.task] for each in lists],
            arguments.out,
            arguments.device,
            processes=arguments.processes,
            gpus=arguments.gpus,
            limit=arguments.limit,
            known=arguments.known,
        )
        return
    names = [
        name for name in contestants() if not arguments.only or name in arguments.only.split(";")
    ]
    device = torch.cuda.get_device_name() if arguments.device == "cuda" else "CPU"
    print(
        f"{time.strftime('%Y-%m-%d')}, {device}, torch {torch.__version__}, {arguments.steps} steps",
        flush=True,
    )
    begun = time.perf_counter()
    known = read(arguments.known) if arguments.known else []
    with multiprocessing.get_context("spawn").Pool(min(arguments.processes, len(names))) as pool:
        pending = {
            name: pool.apply_async(race, (name, arguments.steps, arguments.device, known))
            for name in names
        }
        rows = [
            row
            for name, each in pending.items()
            for row in rows_of(name, each, begun + arguments.limit)
        ]
        pool.close()
    write(arguments.out, rows)
    print(f"{len(rows)} runs in {time.perf_counter() - begun:.0f} s\n", *table(rows), sep="\n")


if __name__ == "__main__":
    main()
