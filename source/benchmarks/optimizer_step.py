"""Time whole optimizer steps beside their peers: on a GPU eager and captured in a CUDA graph, or on a CPU.

    python source/benchmarks/optimizer_step.py --out results.json [--sets se_e2_a,llm] [--deepmd-kit hybrid_muon.py]
    python source/benchmarks/optimizer_step.py --out results.json --rules [--sets se_e2_a,dpa3]
    python source/benchmarks/optimizer_step.py --out results.json --device cpu --threads 2 [--deepmd-kit hybrid_muon.py]

The parameter sets are those of five DeePMD models (shapes/*.json) and of 24 transformer layers of width 2048, all in
float32 unless --dtype says otherwise. `eager`: median of CUDA events around one step, gradients in place. `captured`:
median of graph replays, one at a time, including the time the host takes to launch a graph. `peak`: memory that a step
allocates beside parameters, gradients and state, the buffers kept between steps included. `launches`: kernels and
copies of a replay. `--rules` measures every rule of the Muon route beside none, instead of the peers.

On a CPU: `step`, a whole step, and `products`, the same step's matrix products alone, each written to a buffer that was
made before; shortest and median of rounds in which all optimizers take turns. On a busy machine compare the processor
time of one thread (`--threads 1`) and its `ratio` to HybridMuon's in the same round. The load is printed.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from measured_optimizers import (
    RULES,
    SETS,
    Make,
    Named,
    adamw,
    deepmd_kit,
    hybrid,
    parameters,
    torch_muon,
)
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode

from deepmd_muon.optim.polar.dispatch import describe


def timed(run: Callable[[], Any], budget: float = 0.4) -> float:
    """Return the median of a call's time on the device [ms]."""
    times = []
    until = time.perf_counter() + budget
    while len(times) < 10 or (time.perf_counter() < until and len(times) < 200):
        torch.cuda.synchronize()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times)


def launches(run: Callable[[], Any]) -> int:
    """Return how many kernels and copies a call starts on the device."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as found:
        run()
        torch.cuda.synchronize()
    return sum(event.device_type == torch.autograd.DeviceType.CUDA for event in found.events())


def measure(make: Make, name: str, dtype: torch.dtype) -> dict[str, Any]:
    """Return all figures of one optimizer on one parameter set."""
    named = parameters(name, dtype)
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    optimizers = make(named, False)

    def step() -> None:
        for optimizer in optimizers:
            optimizer.step()

    for _ in range(3):
        step()
    state = [x for optimizer in optimizers for s in optimizer.state.values() for x in s.values()]
    before += sum(
        x.numel() * x.element_size() for x in state if isinstance(x, torch.Tensor) and x.is_cuda
    )
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    step()
    result: dict[str, Any] = {
        "peak_mib": (torch.cuda.max_memory_allocated() - before) / 2**20,
        "eager_ms": timed(step),
    }
    try:
        result |= captured(make, named)
    except NotImplementedError as error:
        result["not_captured"] = str(error)
    return result


def captured(make: Make, named: Named) -> dict[str, Any]:
    """Return the time of a replay of a captured step [ms], and its launches."""
    (optimizer,) = make(named, True)
    for _ in range(2):
        optimizer.step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        optimizer.step()
    for _ in range(3):
        graph.replay()
    return {"captured_ms": timed(graph.replay), "launches": launches(graph.replay)}


class Products(TorchDispatchMode):
    """Note the matrix products that are computed inside, to compute them again and nothing else."""

    KINDS = ("aten::bmm", "aten::baddbmm", "aten::mm", "aten::addmm")

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Compute, and note a product with operands of its own."""
        result = func(*args, **(kwargs or {}))
        if func._schema.name in self.KINDS:
            kept = tuple(
                x.clone() if isinstance(x, torch.Tensor) else x for x in args
            )  # clones keep the layout
            options = {key: x for key, x in (kwargs or {}).items() if key != "out"}
            operation = getattr(torch, func._schema.name.removeprefix("aten::"))
            self.calls.append((operation, kept, {**options, "out": torch.empty_like(result)}))
        return result

    def run(self) -> None:
        """Compute them again."""
        for operation, operands, options in self.calls:
            operation(*operands, **options)


def measure_on_cpu(
    makers: dict[str, Make], name: str, dtype: torch.dtype, rounds: int
) -> dict[str, dict[str, Any]]:
    """Return milliseconds of each optimizer's step, and of its products alone, taken in turns.

    Wall time and processor time, and the median of the rounds' ratios to HybridMuon's processor time.
    """
    runs: dict[str, Callable[[], Any]] = {}
    for title, make in makers.items():
        optimizers = make(parameters(name, dtype, "cpu"), False)

        def step(optimizers: list[Optimizer] = optimizers) -> None:
            for optimizer in optimizers:
                optimizer.step()

        step()
        runs[title] = step
        if title.startswith("HybridMuon"):
            with Products() as products:
                step()
            runs[title + ": products"] = products.run
    times: dict[str, list[tuple[float, float]]] = {title: [] for title in runs}
    for _ in range(rounds):
        for title, run in runs.items():
            run()  # fills the caches
            start = time.perf_counter(), time.process_time()
            run()
            times[title].append(
                (1e3 * (time.perf_counter() - start[0]), 1e3 * (time.process_time() - start[1]))
            )
    found = {}
    for title, pairs in times.items():
        wall, processor = zip(*pairs, strict=True)
        found[title] = {"min_ms": min(wall), "median_ms": statistics.median(wall)}
        found[title] |= {
            "processor_min_ms": min(processor),
            "processor_median_ms": statistics.median(processor),
        }
        ours = [x for _, x in times.get(title.removesuffix(": products"), pairs)]
        found[title]["ratio"] = statistics.median(
            x / y for x, y in zip(processor, ours, strict=True)
        )
    return found


def on_cpu(arguments: argparse.Namespace, makers: dict[str, Make]) -> None:
    """Measure and print on a CPU."""
    torch.set_num_threads(arguments.threads)
    model = platform.processor() or platform.machine()
    if Path("/proc/cpuinfo").exists():
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        model = next(
            (text.split(":")[1].strip() for text in lines if text.startswith("model name")), model
        )
    heading = {"date": str(datetime.date.today()), "device": model, "torch": torch.__version__}
    heading |= {"threads": arguments.threads, "capability": torch.backends.cpu.get_cpu_capability()}
    print(heading)
    print(
        "| set | optimizer | shortest ms | median ms | shortest processor ms | median processor ms | ratio |"
    )
    print("|---|---|---|---|---|---|---|")
    results = []
    for name in arguments.sets.split(","):
        load = os.getloadavg()[0]
        for title, r in measure_on_cpu(
            makers, name, getattr(torch, arguments.dtype), arguments.rounds
        ).items():
            print(
                f"| {name} | {title} | {' | '.join(f'{x:.2f}' for x in r.values())} |", flush=True
            )
            results.append({"set": name, "optimizer": title, "load_before": load} | r)
        print(f"load before and after: {load:.2f}, {os.getloadavg()[0]:.2f}")
    arguments.out.write_text(
        json.dumps(heading | {"dtype": arguments.dtype, "results": results}, indent=1)
    )


def line(name: str, title: str, r: dict[str, Any]) -> str:
    """Return one row of the table."""
    if "error" in r:
        return f"| {name} | {title} | failed: {r['error']} |"
    numbers = [
        f"{r[key]:.3f}" if key in r else "–" for key in ("eager_ms", "captured_ms", "peak_mib")
    ]
    numbers.append(str(r.get("launches", "–")))
    return f"| {name} | {title} | {' | '.join(numbers)} |"


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--sets", help="default: all, but for the transformer on a CPU")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--threads", type=int, default=2, help="of a CPU")
    parser.add_argument("--rounds", type=int, default=15, help="on a CPU")
    parser.add_argument("--dtype", choices=("float32", "float64", "bfloat16"), default="float32")
    parser.add_argument("--deepmd-kit", type=Path, help="its hybrid_muon.py, to measure it beside")
    parser.add_argument(
        "--rules", action="store_true", help="measure the rules instead of the peers"
    )
    parser.add_argument("--only", default="", help="measure only these optimizers, by title: A;B")
    arguments = parser.parse_args()
    makers: dict[str, Make] = {
        "HybridMuon": hybrid(),
        "HybridMuon, 5 steps": hybrid(schedule="keller-jordan"),
        "HybridMuon, polar-express-5": hybrid(schedule="polar-express-5"),
        "HybridMuon, polar-express-4": hybrid(schedule="polar-express-4"),
        "HybridMuon, polar-express-6": hybrid(schedule="polar-express-6"),
        "HybridMuon, flash_muon false": hybrid(flash_muon=False),
        "fused AdamW": adamw,
        "torch Muon + AdamW": torch_muon,
    }
    if arguments.rules:
        makers = {"HybridMuon": hybrid()} | {
            f"HybridMuon, {name}": hybrid(**rule) for name, rule in RULES.items()
        }
    if arguments.deepmd_kit:
        makers["deepmd-kit HybridMuon"] = deepmd_kit(arguments.deepmd_kit)
    arguments.sets = arguments.sets or ",".join(SETS[:-1] if arguments.device == "cpu" else SETS)
    if arguments.only:
        makers = {
            title: make for title, make in makers.items() if title in arguments.only.split(";")
        }
    if arguments.device == "cpu":
        on_cpu(arguments, {title: make for title, make in makers.items() if "flash" not in title})
        return
    device = torch.cuda.get_device_name()
    launches(
        torch.cuda.synchronize
    )  # the profiler sees inside graphs that are captured after its first start
    print(f"{datetime.date.today()} {device}, torch {torch.__version__}, {arguments.dtype}")
    print("| set | optimizer | eager ms | captured ms | peak MiB | launches |")
    print("|---|---|---|---|---|---|")
    results = []
    for name in arguments.sets.split(","):
        for title, make in makers.items():
            large_only = "polar-express" in title
            if ("false" in title) if name == "llm" else large_only:
                continue
            try:
                result = measure(make, name, getattr(torch, arguments.dtype))
            except Exception as error:  # a peer that fails is a result, too
                result = {"error": f"{type(error).__name__}: {error}".splitlines()[0][:200]}
            print(line(name, title, result), flush=True)
            results.append({"set": name, "optimizer": title} | result)
            torch.cuda.empty_cache()
    heading = {"date": str(datetime.date.today()), "device": device, "torch": torch.__version__}
    arguments.out.write_text(
        json.dumps(heading | {"dtype": arguments.dtype, "results": results}, indent=1)
    )
    print(describe())


if __name__ == "__main__":
    main()
