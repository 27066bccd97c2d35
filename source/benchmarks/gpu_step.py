"""One training step on a GPU: time, kernels, memory, start-up, and how far each is from its floor.

    python source/benchmarks/gpu_step.py --data WATER --cases se_e2_a:f64-b1 se_e2_a:f32-b8 dpa1:f64-b1:compiled
    python source/benchmarks/gpu_step.py --data WATER --cases se_e2_a:f64-b1 --pieces 16 64 --kernels

A case is MODEL:PRECISION-bFRAMES, with `:compiled`, `:recompute` or `:tf32` behind it for `enable_compile`, `recompute`
and `enable_tf32`; the effect of the last on the forces of one batch, at the weights of the run's end, is then shown.
WATER holds DeePMD's example systems (data_0, data_1, data_2, 192 atoms). Each case is one process that trains as
`dp train` does. The training loop is stopped after a few steps, when kernels are compiled and graphs are captured, and
again some hundred steps later: the time between is that of these steps alone, and nothing waits within. With 0
`--pieces` the run chooses how finely embedding nets are interpolated.

The floor of a step is the sum of three times, each at a rate measured here: its matrix products (FLOP at the weights'
precision), its memory traffic (arguments and results of every operation), and as many empty kernels in a graph.
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
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

RESULT = "RESULT "
COLUMNS = (
    ("ms a step", "{:.3f}"),
    ("host ms", "{:.3f}"),
    ("device ms", "{:.3f}"),
    ("idle %", "{:.0f}"),
    ("kernels", "{:.0f}"),
    ("peak MiB", "{:.0f}"),
    ("without data", "{:.0f}"),
    ("GFLOP", "{:.2f}"),
    ("MB", "{:.0f}"),
    ("floor ms", "{:.3f}"),
    ("% of floor", "{:.0f}"),
    ("pieces", "{:.0f}"),
)


def child(case: str, pieces: int, data: Path, options: argparse.Namespace) -> None:
    """Train a case in this process, which the parent has started, and print what was found."""
    from deepmd_muon.argcheck import load
    from deepmd_muon.train.early_start import open_device

    show_time("import argcheck")
    open_device()
    from training_step import make_input

    show_time("import torch")
    from deepmd_muon.train import run
    from deepmd_muon.train.trainer import Trainer

    show_time("import deepmd_muon.train")
    model, precision, *others = case.split(":")
    own: dict[str, Any] = {"capture": "auto", "enable_compile": "compiled" in others}
    own |= {"enable_tf32": "tf32" in others, "recompute": "recompute" in others}
    content = make_input(model, precision, "HybridMuon", 1_000_000, data, own)
    found: dict[str, float] = {}
    original = Trainer._steps

    def steps(trainer: Any, reports: Any, batches: Any) -> None:
        def go(count: int) -> float:
            begun = time.perf_counter()
            trainer.num_steps = trainer.step + count
            original(trainer, reports, batches)
            return (time.perf_counter() - begun) / count

        measure(trainer, batches, go, pieces, found, options)

    Trainer._steps = steps  # type: ignore[method-assign]  # the same loop, stopped and looked at on the way
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        Path("input.json").write_text(json.dumps(content))
        run(load("input.json"), skip_neighbor_stat=True)
        os.chdir("/")
    if found:
        print(RESULT + json.dumps({"case": case, **found}), flush=True)


def show_time(what: str) -> None:
    """Print the seconds since the parent started this process."""
    print(f"STAGE {time.time() - float(os.environ['BEGUN']):7.2f} s  {what}", flush=True)


def measure(
    trainer: Any,
    batches: Any,
    go: Callable[[int], float],
    pieces: int,
    found: dict[str, float],
    options: argparse.Namespace,
) -> None:
    """Look at steps from the first to the steady ones; `go` takes some and returns the seconds of each."""
    import torch

    def settled(count: int) -> float:
        torch.cuda.synchronize()
        begun = time.perf_counter()
        go(count)
        torch.cuda.synchronize()
        return (time.perf_counter() - begun) / count

    data = resident_bytes(batches) / 2**20
    for number in range(4):
        settled(1)
        show_time(f"step {number + 1}")
    trainer._tuning = None  # its looks, at powers of two, would fall into the short time that is measured
    if pieces:
        trainer.model.pieces = pieces
    settled(8)
    if not options.seconds:  # only caches are wanted
        return
    count = max(50, int(options.seconds / settled(20)))
    found["host ms"] = 1e3 * go(20)  # the device's queue takes some launches before it makes the host wait
    found["ms a step"] = 1e3 * settled(count)
    found["peak MiB"] = torch.cuda.max_memory_allocated() / 2**20
    found["reserved MiB"] = torch.cuda.max_memory_reserved() / 2**20
    found["without data"] = found["peak MiB"] - data
    found["pieces"] = trainer.model.pieces
    kernels = profiled(go, 20, show=options.kernels)
    found |= kernels
    found["idle %"] = 100 * max(0.0, 1 - kernels["device ms"] / found["ms a step"])
    compiled = trainer.given.settings.training.enable_compile
    found |= floor(trainer, batches, kernels["kernels"], compiled=compiled)
    if trainer.given.settings.training.enable_tf32:
        compare_forces(trainer, batches)
    found["% of floor"] = 100 * found["floor ms"] / found["ms a step"]


def resident_bytes(batches: Any) -> int:
    """Return the bytes of training data on the device; 0 where they are streamed."""
    import torch

    systems = getattr(batches, "_systems", [])
    tensors = {id(x): x for system in systems for x in _tensors(vars(system))}
    return sum(x.untyped_storage().nbytes() for x in tensors.values() if isinstance(x, torch.Tensor) and x.is_cuda)


def _tensors(node: Any) -> Iterator[Any]:
    import torch

    if isinstance(node, torch.Tensor):
        yield node
    elif isinstance(node, dict):
        for value in node.values():
            yield from _tensors(value)


def profiled(go: Callable[[int], float], count: int, *, show: bool) -> dict[str, float]:
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


def floor(trainer: Any, batches: Any, kernels: float, *, compiled: bool) -> dict[str, float]:
    """Return FLOP and traffic of one gradient, and the time that they and empty kernels take at measured rates.

    The traffic is that of operations as they stand; of compiled steps, which fuse them, it is unknown and left out.
    """
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils.flop_counter import FlopCounterMode
    from triton.runtime.jit import JITFunction

    from deepmd_muon.train.compiled_gradient import differentiate

    moved = [0]

    class Traffic(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            returns = func._schema.returns
            if not any(r.alias_info is not None and not r.alias_info.is_write for r in returns):
                tensors = [x for x in torch.utils._pytree.tree_leaves((args, out)) if isinstance(x, torch.Tensor)]
                moved[0] += sum(x.nbytes for x in tensors)
            return out

    launch = JITFunction.run

    def counted(self: Any, *args: Any, **kwargs: Any) -> Any:
        moved[0] += sum(x.nbytes for x in args if isinstance(x, torch.Tensor))
        return launch(self, *args, **kwargs)

    batch = batches.next().read()
    JITFunction.run = counted
    try:
        with FlopCounterMode(display=False) as flop, Traffic():
            differentiate(trainer.model, trainer.loss, batch, 1.0)
    finally:
        JITFunction.run = launch
    parameter = next(p for p in trainer.model.parameters() if p.ndim == 2)
    rate, bandwidth, gap = rates(parameter.dtype)
    total = float(flop.get_total_flops())
    traffic = float("nan") if compiled else moved[0]
    seconds = total / rate + (0.0 if compiled else traffic / bandwidth) + kernels * gap
    print(f"RATES {rate / 1e12:.1f} TFLOP/s, {bandwidth / 1e12:.2f} TB/s, {gap * 1e6:.2f} µs a kernel", flush=True)
    return {"GFLOP": total / 1e9, "MB": traffic / 1e6, "floor ms": 1e3 * seconds}


def compare_forces(trainer: Any, batches: Any) -> None:
    """Print how far TF32 moves the forces of a batch, beside how far they are from their labels."""
    import torch

    from deepmd_muon.train.step import float32_products

    batch = batches.next().read()
    found = []
    with torch.no_grad():
        for precision in ("highest", "high"):
            with float32_products(precision):
                found.append(trainer.model(batch.structures)["force"])
    change, error = found[1] - found[0], found[0] - batch.labels["force"]
    size, moved, wrong = (float(x.square().mean().sqrt()) for x in (found[0], change, error))
    print(f"TF32 moves forces by {moved:.2e} eV/Å of {size:.3f} (RMS); they are wrong by {wrong:.3f}", flush=True)


def rates(dtype: Any) -> tuple[float, float, float]:
    """Measure FLOP/s of a matrix product, bytes/s of a copy, and seconds of an empty kernel in a graph."""
    import torch

    def seconds(launch: Callable[[], Any], count: int) -> float:
        launch()
        torch.cuda.synchronize()
        begun = time.perf_counter()
        for _ in range(count):
            launch()
        torch.cuda.synchronize()
        return (time.perf_counter() - begun) / count

    x = torch.randn(4096, 4096, dtype=dtype, device="cuda")
    rate = 2 * 4096**3 / seconds(lambda: x @ x, 4)
    large, target = (torch.empty(1 << 29, dtype=torch.uint8, device="cuda") for _ in range(2))
    bandwidth = 2 * large.nbytes / seconds(lambda: target.copy_(large), 8)
    one, graph = torch.zeros(1, device="cuda"), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(200):
            one.add_(1)
    return rate, bandwidth, seconds(graph.replay, 20) / 200


def parent(options: argparse.Namespace) -> None:
    """Start a process for each case, show its start-up, and print the table."""
    runs = [
        (case, pieces) for case in options.cases for pieces in (options.pieces if case.startswith("se_e2_a") else (0,))
    ]
    if options.warm_up:
        fill_caches(options)
    rows = []
    for case, pieces in runs:
        process, begun = start(case, pieces, options, options.seconds)
        log = finish(process, options.timeout)
        print(f"\n{case}, pieces {pieces or 'as the run chooses'}: {time.time() - begun:.1f} s", flush=True)
        show(log, begun)
        result = re.search(RESULT + "(.*)", log)
        if result is None:
            print(f"  failed ({process.returncode}):\n{log[-1500:]}", flush=True)
        else:
            rows.append(json.loads(result[1]))
            print("  " + result[0], flush=True)
    names = [name for name, _ in COLUMNS]
    print("\n| case | " + " | ".join(names) + " |\n|---|" + "---|" * len(names))
    for row in rows:
        print(f"| {row['case']} | " + " | ".join(form.format(row[name]) for name, form in COLUMNS) + " |")


def fill_caches(options: argparse.Namespace) -> None:
    """Run a few steps of all cases beside each other, which compile kernels, and show when the first steps are done."""
    started = [(case, *start(case, 0, options, 0.0)) for case in options.cases]
    for case, process, begun in started:
        log = finish(process, options.timeout)
        steps = [line[6:].strip() for line in log.splitlines() if line.startswith("STAGE") and "step" in line]
        print(f"{case}, beside the other cases, caches as they were: {'; '.join(steps)}", flush=True)
        compiled = re.findall(r"compiled the training step in .*|.*not compiled: .*", log)
        print("   ", *compiled, f"ended after {time.time() - begun:.1f} s", flush=True)


def start(case: str, pieces: int, options: argparse.Namespace, seconds: float) -> tuple[subprocess.Popen[str], float]:
    """Start the process of a case; return it and the time of its start."""
    command = [sys.executable, __file__, "--child", case, str(pieces), "--data", str(options.data.resolve())]
    command += ["--seconds", str(seconds), *(["--kernels"] if options.kernels and seconds else [])]
    begun = time.time()
    output = tempfile.TemporaryFile("w+")  # noqa: SIM115 (read and closed by `finish`)
    environment = {**os.environ, "BEGUN": str(begun)}
    process = subprocess.Popen(command, env=environment, text=True, stdout=output, stderr=subprocess.STDOUT)
    process.stdout = output
    return process, begun


def finish(process: subprocess.Popen[str], timeout: float) -> str:
    """Wait for a process, at most so long, and return what it has written."""
    try:
        process.wait(timeout)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    assert process.stdout is not None
    process.stdout.seek(0)
    return process.stdout.read()


def show(log: str, begun: float) -> None:
    """Print log lines with the seconds since the process was started, in order, and lines of our own."""
    lines = []
    for line in log.splitlines():
        found = re.match(r"\[([\d-]+ [\d:]+),(\d+)\] DEEPMD (.*)", line)
        if found:
            at = time.mktime(time.strptime(found[1], "%Y-%m-%d %H:%M:%S")) + int(found[2]) / 1e3
            lines.append((at - begun, found[3].strip()[:120]))
        elif line.startswith("STAGE"):
            seconds, what = line[6:].split(" s  ", 1)
            lines.append((float(seconds), f"{what} done"))
        elif line.startswith(("KERNEL", "RATES", "TF32")):
            lines.append((float("inf"), line))
    for at, what in sorted(lines, key=lambda pair: pair[0]):
        print(f"  {at:7.2f} s  {what}" if at < float("inf") else f"  {what}")


def main() -> None:
    """Run cases, or be one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder with data_0, data_1, data_2")
    parser.add_argument("--cases", nargs="+", default=["se_e2_a:f64-b1", "se_e2_a:f32-b1"])
    parser.add_argument("--pieces", nargs="+", type=int, default=[0], choices=(0, 16, 32, 64))
    parser.add_argument("--seconds", type=float, default=0.5, help="of steps that are timed")
    parser.add_argument("--timeout", type=float, default=120.0, help="seconds that a case may take")
    parser.add_argument("--warm-up", action="store_true", help="run all cases beside each other first, to fill caches")
    parser.add_argument("--kernels", action="store_true", help="list the kernels of a step in order")
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        child(options.child[0], int(options.child[1]), options.data, options)
    else:
        parent(options)


if __name__ == "__main__":
    main()
