"""One training step on a GPU: time, kernels, memory.

    python source/benchmarks/gpu_step.py --data WATER --cases se_e2_a:f64-b1 se_e2_a:f32-b8 dpa1:f64-b1
    python source/benchmarks/gpu_step.py --data WATER --cases dpa3:f32-b1 --kernels

A case is MODEL:PRECISION-bFRAMES, with `:recompute` or `:tf32` behind it for `recompute` and `enable_tf32`; the effect
of the last on the forces of one batch, at the weights of the run's end, is then shown.
WATER holds DeePMD's example systems (data_0, data_1, data_2, 192 atoms). Each case is one process that trains as
`dp train` does. The training loop is stopped after a few steps, when kernels are compiled and graphs are captured, and
again some hundred steps later: the time between is that of these steps alone, and nothing waits within.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

RESULT = "RESULT "
COLUMNS = (
    ("ms a step", "{:.3f}"),
    ("device ms", "{:.3f}"),
    ("idle %", "{:.0f}"),
    ("kernels", "{:.0f}"),
    ("allocated MiB", "{:.0f}"),
    ("reserved MiB", "{:.0f}"),
)


def child(case: str, options: argparse.Namespace) -> None:
    """Train a case in this process, which the parent has started, and print what was found."""
    from training_step import make_input

    from deepmd_muon.argcheck import load
    from deepmd_muon.train import run
    from deepmd_muon.train.trainer import Trainer

    model, precision, *others = case.split(":")
    own: dict[str, Any] = {"capture": "auto"}
    own |= {"enable_tf32": "tf32" in others, "recompute": "recompute" in others}
    content = make_input(model, precision, "HybridMuon", 1_000_000, options.data.resolve(), own)
    found: dict[str, float] = {}
    original = Trainer._take_steps

    def steps(trainer: Any, reports: Any, batches: Any) -> None:
        def go(count: int) -> None:
            trainer.num_steps = trainer.step + count
            original(trainer, reports, batches)

        measure(trainer, batches, go, found, options)

    Trainer._take_steps = steps  # type: ignore[method-assign]  # the same loop, stopped and looked at on the way
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        Path("input.json").write_text(json.dumps(content))
        run(load("input.json"), skip_neighbor_stat=True)
        os.chdir("/")
    if found:
        print(RESULT + json.dumps({"case": case, **found}), flush=True)


def measure(
    trainer: Any,
    batches: Any,
    go: Callable[[int], None],
    found: dict[str, float],
    options: argparse.Namespace,
) -> None:
    """Look at steps from the first to the steady ones; `go` takes some."""
    import torch

    def settled(count: int) -> float:
        torch.cuda.synchronize()
        begun = time.perf_counter()
        go(count)
        torch.cuda.synchronize()
        return (time.perf_counter() - begun) / count

    for _ in range(4):
        settled(1)
    trainer._interpolation_schedules = []  # their checks would fall into the short time measured
    settled(8)
    found["ms a step"] = 1e3 * settled(max(50, int(options.seconds / settled(20))))
    found["allocated MiB"] = torch.cuda.max_memory_allocated() / 2**20
    found["reserved MiB"] = torch.cuda.max_memory_reserved() / 2**20
    found |= profiled(go, 20, show=options.kernels)
    found["idle %"] = 100 * max(0.0, 1 - found["device ms"] / found["ms a step"])
    if trainer.run_input.settings.training.enable_tf32:
        compare_forces(trainer, batches)


def profiled(go: Callable[[int], None], count: int, *, show: bool) -> dict[str, float]:
    """Profile some steps: how long the device is busy in one, and with how many kernels."""
    import torch

    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        go(count)
        torch.cuda.synchronize()
    events = [e for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    events.sort(key=lambda e: e.time_range.start)
    busy, end = 0.0, 0.0
    for event in events:  # kernels of parallel branches overlap
        busy += max(0.0, event.time_range.end - max(end, event.time_range.start))
        end = max(end, event.time_range.end)
    if show:
        one = events[len(events) // count * (count // 2) : len(events) // count * (count // 2 + 1)]
        for event in one:
            at = event.time_range.start - one[0].time_range.start
            print(f"KERNEL {at:8.1f} µs {event.device_time:7.1f} µs  {event.name[:110]}")
    return {"device ms": busy / count * 1e-3, "kernels": len(events) / count}


def compare_forces(trainer: Any, batches: Any) -> None:
    """Print how far TF32 moves the forces of a batch, beside how far they are from their labels."""
    import torch

    from deepmd_muon.train.step.step import float32_products

    batch = batches.next().read()
    found = []
    with torch.no_grad():
        for precision in ("highest", "high"):
            with float32_products(precision):
                found.append(trainer.model(batch.structures)["force"])
    change, error = found[1] - found[0], found[0] - batch.labels["force"]
    size, moved, wrong = (float(x.square().mean().sqrt()) for x in (found[0], change, error))
    print(
        f"TF32 moves forces by {moved:.2e} eV/Å of {size:.3f} (RMS); they are wrong by {wrong:.3f}",
        flush=True,
    )


def parent(options: argparse.Namespace) -> None:
    """Run a process for each case and print the table."""
    rows = []
    for case in options.cases:
        command = [
            sys.executable,
            __file__,
            "--child",
            case,
            "--data",
            str(options.data),
            "--seconds",
            str(options.seconds),
        ]
        command += ["--kernels"] * options.kernels
        done = subprocess.run(
            command,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=options.timeout,
            check=False,
        )
        result = re.search(RESULT + "(.*)", done.stdout)
        if result is None:
            print(f"{case} failed ({done.returncode}):\n{done.stdout[-1500:]}", flush=True)
            continue
        rows.append(json.loads(result[1]))
        shown = [
            line for line in done.stdout.splitlines() if line.startswith(("KERNEL", "TF32", RESULT))
        ]
        print(case, *shown, sep="\n  ", flush=True)
    names = [name for name, _ in COLUMNS]
    print("\n| case | " + " | ".join(names) + " |\n|---|" + "---|" * len(names))
    for row in rows:
        print(
            f"| {row['case']} | "
            + " | ".join(form.format(row[name]) for name, form in COLUMNS)
            + " |"
        )


def main() -> None:
    """Run cases, or be one."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--data", type=Path, required=True, help="folder with data_0, data_1, data_2"
    )
    parser.add_argument("--cases", nargs="+", default=["se_e2_a:f64-b1", "se_e2_a:f32-b1"])
    parser.add_argument("--seconds", type=float, default=0.5, help="of steps that are timed")
    parser.add_argument("--timeout", type=float, default=120.0, help="seconds that a case may take")
    parser.add_argument(
        "--kernels", action="store_true", help="list the kernels of a step in order"
    )
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        child(options.child, options)
    else:
        parent(options)


if __name__ == "__main__":
    main()
