"""Time whole optimizer steps beside their peers: on a GPU eager and captured in a CUDA graph, or on a CPU.

    python source/benchmarks/optimizer_step.py --out results.json [--sets se_e2_a,llm] [--deepmd-kit hybrid_muon.py]
    python source/benchmarks/optimizer_step.py --out results.json --device cpu --threads 2 [--deepmd-kit hybrid_muon.py]

The parameter sets are those of five DeePMD models (shapes/*.json) and of 24 transformer layers of width 2048, all in
float32 unless --dtype says otherwise. `eager`: median of CUDA events around one step, gradients in place. `host`:
median time in which the call returns. `renewed`: eager, where every step finds its gradients at other addresses, as
after zero_grad(set_to_none=True). `captured`: median of graph replays, one at a time, including the time the host takes
to launch a graph. `in a row`: a replay among 20 that are launched without waiting, the device's time alone. `launches`:
kernels and copies of an eager step with gradients in place, and of a replay, by the profiler. `peak`: memory that a
step allocates beside parameters, gradients and state, the buffers kept between steps included. `reserved`: memory that
torch has taken from the device for the optimizer after three steps, in pieces of 2 to 20 MiB: state, buffers, recorded
graphs, and unused remainders.

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
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from measured_optimizers import (
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
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

from deepmd_muon.optim.polar.dispatch import describe


def timed(
    run: Callable[[], Any], between: Callable[[], Any] = lambda: None, budget: float = 0.4
) -> tuple[float, float]:
    """Return medians of a call's time on the device [ms] and on the host [µs]; `between` is not timed."""
    device, host = [], []
    until = time.perf_counter() + budget
    while len(device) < 10 or (time.perf_counter() < until and len(device) < 200):
        between()
        torch.cuda.synchronize()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        before = time.perf_counter()
        run()
        host.append(1e6 * (time.perf_counter() - before))
        end.record()
        end.synchronize()
        device.append(start.elapsed_time(end))
    return statistics.median(device), statistics.median(host)


def launches(run: Callable[[], Any]) -> tuple[int, dict[str, float]]:
    """Count what a step starts on the device, and sum its time there by name [µs]."""
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as record:
        run()
        torch.cuda.synchronize()
    on_device = [e for e in record.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    # The profiler shows ranges among the kernels.
    events = [e for e in on_device if not e.name.startswith(("Optimizer.step", "HybridMuon."))]
    times: dict[str, float] = {}
    for event in events:
        times[event.name[:60]] = times.get(event.name[:60], 0.0) + event.device_time
    return len(events), dict(sorted(times.items(), key=lambda item: -item[1])[:12])


def other_gradients(named: Named) -> Iterator[None]:
    """Give the parameters one of two sets of gradients in turn."""
    several = [[p.grad for _, p in named], [torch.randn_like(p) for _, p in named]]
    while True:
        for grads in several:
            for (_, p), g in zip(named, grads, strict=True):
                p.grad = g
            yield


def measure(make: Make, name: str, dtype: torch.dtype) -> dict[str, Any]:
    """Return all figures of one optimizer on one parameter set."""
    named = parameters(name, dtype)
    torch.cuda.empty_cache()
    before, reserved = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    optimizers = make(named, False)

    def step() -> None:
        for optimizer in optimizers:
            optimizer.step()

    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(3):
        step()
    torch.cuda.synchronize()
    result: dict[str, Any] = {"warm_up_s": time.perf_counter() - start}
    state = [x for optimizer in optimizers for s in optimizer.state.values() for x in s.values()]
    before += sum(x.numel() * x.element_size() for x in state if isinstance(x, torch.Tensor) and x.is_cuda)
    torch.cuda.empty_cache()
    result["reserved_mib"] = (torch.cuda.memory_reserved() - reserved) / 2**20
    torch.cuda.reset_peak_memory_stats()
    step()
    result["peak_mib"] = (torch.cuda.max_memory_allocated() - before) / 2**20
    result["eager_ms"], result["host_us"] = timed(step)
    result["launches"], result["device_us"] = launches(step)
    if name != "llm":
        turn = other_gradients(named)
        for _ in range(4):
            next(turn)
            step()
        result["renewed_ms"], result["renewed_host_us"] = timed(step, lambda: next(turn))
    try:
        result |= captured(make, named)
    except NotImplementedError as error:
        result["not_captured"] = str(error)
    return result


def captured(make: Make, named: Named, in_a_row: int = 20) -> dict[str, Any]:
    """Return the time of a replay of a captured step, alone and among replays in a row [ms], and its launches."""
    (optimizer,) = make(named, True)
    for _ in range(2):
        optimizer.step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        optimizer.step()
    for _ in range(3):
        graph.replay()

    def several() -> None:
        for _ in range(in_a_row):
            graph.replay()

    found = {"captured_ms": timed(graph.replay)[0], "in_a_row_ms": timed(several)[0] / in_a_row}
    found["captured_launches"], found["captured_device_us"] = launches(graph.replay)
    return found


class Products(TorchDispatchMode):
    """Note the matrix products that are computed inside, to compute them again and nothing else."""

    KINDS = ("aten::bmm", "aten::baddbmm", "aten::mm", "aten::addmm")

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        """Compute, and note a product with operands of its own."""
        result = func(*args, **(kwargs or {}))
        if func._schema.name in self.KINDS:
            kept = tuple(x.clone() if isinstance(x, torch.Tensor) else x for x in args)  # clones keep the layout
            options = {key: x for key, x in (kwargs or {}).items() if key != "out"}
            operation = getattr(torch, func._schema.name.removeprefix("aten::"))
            self.calls.append((operation, kept, {**options, "out": torch.empty_like(result)}))
        return result

    def run(self) -> None:
        """Compute them again."""
        for operation, operands, options in self.calls:
            operation(*operands, **options)


def measure_on_cpu(makers: dict[str, Make], name: str, dtype: torch.dtype, rounds: int) -> dict[str, dict[str, Any]]:
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
            times[title].append((1e3 * (time.perf_counter() - start[0]), 1e3 * (time.process_time() - start[1])))
    found = {}
    for title, pairs in times.items():
        wall, processor = zip(*pairs, strict=True)
        found[title] = {"min_ms": min(wall), "median_ms": statistics.median(wall)}
        found[title] |= {"processor_min_ms": min(processor), "processor_median_ms": statistics.median(processor)}
        ours = [x for _, x in times.get(title.removesuffix(": products"), pairs)]
        found[title]["ratio"] = statistics.median(x / y for x, y in zip(processor, ours, strict=True))
    return found


def on_cpu(arguments: argparse.Namespace, makers: dict[str, Make]) -> None:
    """Measure and print on a CPU."""
    torch.set_num_threads(arguments.threads)
    model = platform.processor() or platform.machine()
    if Path("/proc/cpuinfo").exists():
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        model = next((text.split(":")[1].strip() for text in lines if text.startswith("model name")), model)
    heading = {"date": str(datetime.date.today()), "device": model, "torch": torch.__version__}
    heading |= {"threads": arguments.threads, "capability": torch.backends.cpu.get_cpu_capability()}
    print(heading)
    print("| set | optimizer | shortest ms | median ms | shortest processor ms | median processor ms | ratio |")
    print("|---|---|---|---|---|---|---|")
    results = []
    for name in arguments.sets.split(","):
        load = os.getloadavg()[0]
        for title, r in measure_on_cpu(makers, name, getattr(torch, arguments.dtype), arguments.rounds).items():
            print(f"| {name} | {title} | {' | '.join(f'{x:.2f}' for x in r.values())} |", flush=True)
            results.append({"set": name, "optimizer": title, "load_before": load} | r)
        print(f"load before and after: {load:.2f}, {os.getloadavg()[0]:.2f}")
    arguments.out.write_text(json.dumps(heading | {"dtype": arguments.dtype, "results": results}, indent=1))


def line(name: str, title: str, r: dict[str, Any]) -> str:
    """Return one row of the table."""
    if "error" in r:
        return f"| {name} | {title} | failed: {r['error']} |"
    numbers = [f"{r['eager_ms']:.3f}", f"{r['host_us']:.0f}"]
    numbers += [f"{r['renewed_ms']:.3f}" if "renewed_ms" in r else "–"]
    numbers += [f"{r[key]:.3f}" if key in r else "–" for key in ("captured_ms", "in_a_row_ms")]
    numbers += [f"{r['launches']}", f"{r.get('captured_launches', '–')}", f"{r['peak_mib']:.1f}"]
    numbers += [f"{r['reserved_mib']:.0f}"]
    return f"| {name} | {title} | {' | '.join(numbers)} |"


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--sets", help="default: all, but for the transformer on a CPU")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--threads", type=int, default=2, help="of a CPU")
    parser.add_argument("--rounds", type=int, default=15, help="on a CPU")
    parser.add_argument("--dtype", choices=("float32", "float64", "bfloat16"), default="float32")
    parser.add_argument("--deepmd-kit", type=Path, help="its hybrid_muon.py, to measure it beside")
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
    if arguments.deepmd_kit:
        makers["deepmd-kit HybridMuon"] = deepmd_kit(arguments.deepmd_kit)
    arguments.sets = arguments.sets or ",".join(SETS[:-1] if arguments.device == "cpu" else SETS)
    if arguments.only:
        makers = {title: make for title, make in makers.items() if title in arguments.only.split(";")}
    if arguments.device == "cpu":
        on_cpu(arguments, {title: make for title, make in makers.items() if "flash" not in title})
        return
    device = torch.cuda.get_device_name()
    print(f"{datetime.date.today()} {device}, torch {torch.__version__}, {arguments.dtype}")
    times = "eager ms | host µs | renewed ms | captured ms | in a row ms"
    print(f"| set | optimizer | {times} | launches | captured launches | peak MiB | reserved MiB |")
    print("|---|---|---|---|---|---|---|---|---|---|---|")
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
    arguments.out.write_text(json.dumps(heading | {"dtype": arguments.dtype, "results": results}, indent=1))
    print(describe())


if __name__ == "__main__":
    main()
