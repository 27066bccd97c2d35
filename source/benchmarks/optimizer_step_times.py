"""Time the optimizer steps of the tasks of `small_gpt_race.py --defaults`, launched from Python or captured.

    python source/benchmarks/optimizer_step_times.py --out times.json [--limit 100]

A process for each task and optimizer compiles and takes its first steps, all processes at once. Each
of them that is ready within `--limit` seconds then takes its timed steps, one process after the
other; the row is written before the next one starts. A process that is not ready or raises has a row
with the reason. Times [ms] are medians of 20 steps, with the device synchronized before and after.
"captured" is the replay of a CUDA graph that holds the step.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import itertools
import json
import multiprocessing
import multiprocessing.connection
import os
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from small_gpt_race import TASKS, TASKS_OF_DEFAULTS, Optimizers, variants

FIRST_STEPS = 10
TIMED_STEPS = 20
PATIENCE = 20.0  # seconds for the timed steps


class Case(NamedTuple):
    """An optimizer on the model of a task."""

    task: str
    optimizer: str
    rates: tuple[float, ...]
    is_captured: bool = False


class Running(NamedTuple):
    """The process of a case and the connection to it."""

    case: Case
    process: multiprocessing.process.BaseProcess
    connection: multiprocessing.connection.Connection


def cases(tasks: tuple[str, ...] = TASKS_OF_DEFAULTS, *, captured: bool = False) -> list[Case]:
    """Return all cases, or the captured ones; those of dion come first: they compile longest."""
    rates: dict[str, tuple[float, ...]] = {"muon_for(model)": (), "torch.optim.AdamW": (1e-3,)}
    if hasattr(torch.optim, "Muon"):
        rates["torch.optim.Muon"] = (0.02, 3e-3)
    if importlib.util.find_spec("dion"):
        rates = {"dion's Muon": (0.02, 3e-3), **rates}
    if captured:  # torch's Muon and dion's take numbers from the host
        rates = {name: rates[name] for name in ("muon_for(model)", "torch.optim.AdamW")}
    return [
        Case(task, name, numbers, captured) for name, numbers in rates.items() for task in tasks
    ]


def synchronize(device: str) -> None:
    """Wait for the device."""
    if device != "cpu":
        torch.cuda.synchronize()


def timed(step: Callable[[], object], device: str) -> float:
    """Return the time of a step [ms]."""
    synchronize(device)
    begun = time.perf_counter()
    step()
    synchronize(device)
    return 1e3 * (time.perf_counter() - begun)


def step_of(optimizers: Optimizers) -> None:
    """Step all optimizers."""
    for optimizer in optimizers:
        optimizer.step()


def captured(optimizers: Optimizers) -> Callable[[], None]:
    """Return the replay of a CUDA graph with a step of all optimizers."""
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    for group in itertools.chain(*(optimizer.param_groups for optimizer in optimizers)):
        group["lr"] = torch.tensor(group["lr"], device="cuda")
        group["capturable"] = True
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step_of(optimizers)
        with torch.cuda.graph(graph, stream=stream):
            step_of(optimizers)
    return graph.replay


def measure(case: Case, device: str, connection: multiprocessing.connection.Connection) -> None:
    """Take the first steps, report them, wait for a word, and send the time of a step."""
    torch.set_num_threads(1)
    torch.set_float32_matmul_precision("high")
    try:
        model = TASKS[case.task].make(1, 1, device).model().to(device)
        optimizers = variants()[case.optimizer](model, *case.rates)
        for p in model.parameters():
            p.grad = torch.randn_like(p)
        step = functools.partial(step_of, optimizers)
        if case.is_captured:
            step = captured(optimizers)
        for _ in range(FIRST_STEPS):
            timed(step, device)
        connection.send(None)
        connection.recv()
        connection.send(statistics.median(timed(step, device) for _ in range(TIMED_STEPS)))
    except Exception as error:  # a row tells it; the other cases go on
        connection.send(f"{type(error).__name__}: {error}".splitlines()[0])


def start(case: Case, device: str) -> Running:
    """Start the process of a case."""
    context = multiprocessing.get_context("spawn")
    connection, end_of_process = context.Pipe()
    process = context.Process(target=measure, args=(case, device, end_of_process), daemon=True)
    process.start()
    end_of_process.close()
    return Running(case, process, connection)


def answer(running: Running, seconds: float) -> Any:
    """Return what the process sends next, or a sentence if that is nothing within `seconds`."""
    try:
        if running.connection.poll(max(0.0, seconds)):
            return running.connection.recv()
    except EOFError:
        return "the process ended"
    return "not ready in time"


def table(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Return a table of times [ms] by task and optimizer (Markdown)."""
    names = list(dict.fromkeys(row["optimizer"] for row in rows))
    times = {(row["task"], row["optimizer"]): row for row in rows}
    lines = [f"| task | {' | '.join(names)} |", "|---" * (len(names) + 1) + "|"]
    for task in dict.fromkeys(row["task"] for row in rows):
        cells = [times.get((task, name), {}).get("ms") for name in names]
        shown = ("–" if ms is None else f"{ms:.2f}" for ms in cells)
        lines.append(f"| {task} | {' | '.join(shown)} |")
    return lines


def main() -> None:
    """Time all cases; write a row of each, and print them as a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--limit", type=float, default=100.0, help="seconds for the first steps")
    parser.add_argument("--captured", action="store_true", help="CUDA graphs of ours and AdamW")
    parser.add_argument("--only", default="", help="part of the names of tasks")
    parser.add_argument("--optimizer", default="", help="part of the names of optimizers")
    arguments = parser.parse_args()
    until = time.perf_counter() + arguments.limit
    tasks = tuple(name for name in TASKS_OF_DEFAULTS if arguments.only in name)
    # The processes are as many as the cores; each compiles by itself.
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
    every = cases(tasks, captured=arguments.captured)
    wanted = [case for case in every if arguments.optimizer in case.optimizer]
    all_running = [start(case, arguments.device) for case in wanted]
    problems = {each.case: answer(each, until - time.perf_counter()) for each in all_running}
    for each in all_running:
        if problems[each.case] == "not ready in time":
            each.process.kill()  # it would disturb the times of the others
    rows: list[dict[str, object]] = []
    for each in all_running:
        result = problems[each.case]
        if result is None:
            each.connection.send("go")
            result = answer(each, PATIENCE)
        key = "problem" if isinstance(result, str) else "ms"
        name = each.case.optimizer + (", captured" if each.case.is_captured else "")
        rows.append({"task": each.case.task, "optimizer": name, key: result})
        print(f"{each.case.task}, {name}: {result}", flush=True)
        arguments.out.write_text(json.dumps(rows, indent=0), encoding="utf-8")
    print(*table(rows), sep="\n")
    for each in all_running:
        each.process.kill()
        each.process.join()


if __name__ == "__main__":
    main()
