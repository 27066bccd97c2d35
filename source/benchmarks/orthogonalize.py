"""Time the polar factor on a GPU beside its peers. `orthogonalize_quality.py` measures how accurate it is.

Every row is a batch of equal matrices. Time: median of CUDA events around one call, and of replays of a
captured graph of ten calls (of one when it takes longer than 1 ms), per call.
Floor: operations of the standard form with
its symmetric halves over the measured rate of fp16 products, or bytes over the measured copy rate, whichever is longer.

    python orthogonalize.py --out results.json [--deepmd-kit PATH/hybrid_muon.py] [--rows 46x128x128,1x1024x1024]
"""

from __future__ import annotations

import argparse
import datetime
import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from measured_optimizers import deepmd_kit_module
from torch import Tensor

from deepmd_muon.optim.polar import SCHEDULES, orthogonalize_matrices
from deepmd_muon.optim.polar.dispatch import describe

ROWS = (
    *[
        "64x32x64",
        "64x64x64",
        "12x96x96",
        "46x128x128",
        "133x16x16",
        "6x320x64",
        "6x768x128",
        "2x240x240",
    ],
    *[
        "4x240x240",
        "2x240x1600",
        "1x512x512",
        "1x1024x1024",
        "1x2048x2048",
        "1x4096x4096",
        "1x8192x8192",
    ],
    *["1x1024x4096", "1x2048x8192", "1x4096x16384", "16x1024x4096", "64x768x2048"],
)
Run = Callable[[Tensor], Tensor]


def ours(schedule: str) -> Run:
    """Return our polar factor with one schedule."""
    return lambda x: orthogonalize_matrices([x], schedule, flash=True)[0]


def torch_muon(x: Tensor) -> Tensor:
    """Orthogonalize as torch.optim.Muon does, which knows single matrices only."""
    from torch.optim._muon import _zeropower_via_newtonschulz

    return torch.stack(
        [_zeropower_via_newtonschulz(m, (3.4445, -4.7750, 2.0315), 5, 1e-7) for m in x]
    )


def deepmd_kit(path: Path) -> dict[str, Run]:
    """Return the two orthogonalizations of deepmd-kit's optimizer."""
    module = deepmd_kit_module(path)
    torch._dynamo.config.recompile_limit = 1000  # every row is a new shape to its compiled function
    gram = module._GramNewtonSchulzOrthogonalizer()
    return {"deepmd-kit bf16 10": module._batched_newton_schulz_orth, "deepmd-kit Gram 5": gram}


def milliseconds(run: Callable[[], Any], budget: float = 0.25) -> float:
    """Return the median time of a call on the device, host launches included."""
    for _ in range(3):
        run()
    torch.cuda.synchronize()
    times: list[float] = []
    while len(times) < 7 or (sum(times) < 1e3 * budget and len(times) < 200):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times)


def replayed(run: Callable[[], Any], calls: int) -> float:
    """Return the time of a call [ms] inside a captured graph of several calls, one after the other."""
    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            run()
    return milliseconds(graph.replay) / calls


def ceilings() -> tuple[float, float]:
    """Return the measured rates of fp16 products [operations/s] and of copies [bytes/s]."""
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.float16) for _ in range(2))
    products = 2 * 8192**3 / (1e-3 * milliseconds(lambda: a @ b))
    big = torch.empty(2**30, dtype=torch.uint8, device="cuda")
    copies = 2 * 2**30 / (1e-3 * milliseconds(lambda: big.clone()))
    return products, copies


def floor(shape: tuple[int, int, int], steps: int, rates: tuple[float, float]) -> float:
    """Return the shortest possible time [ms] of the standard form."""
    count, m, n = shape[0], min(shape[1:]), max(shape[1:])
    operations = count * steps * (m * m * n + m**3 + 2 * m * m * n)
    return 1e3 * max(operations / rates[0], 8 * count * m * n / rates[1])


def measure(name: str, run: Run, shape: tuple[int, int, int], graphs: bool) -> dict[str, Any]:
    """Return times and memory of one implementation on one shape; a failure is a result, too."""
    x = torch.randn(shape, device="cuda")
    result: dict[str, Any] = {"name": name}
    try:
        result["eager"] = milliseconds(lambda: run(x))
        if graphs:
            result["graph"] = replayed(lambda: run(x), calls=10 if result["eager"] < 1.0 else 1)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run(x)
        result["peak_mib"] = (torch.cuda.max_memory_allocated() - before) / 2**20
    except Exception as error:
        result["error"] = f"{type(error).__name__}: {error}"[:300]
    return result


def report(row: str, result: dict[str, Any], floor_ms: float) -> str:
    """Return one line of the table."""
    if "error" in result:
        return f"| {row} | {result['name']} | failed: {result['error']} |"
    best = min(result["eager"], result.get("graph", result["eager"]))
    numbers = [
        f"{result['eager']:.4f}",
        f"{result['graph']:.4f}" if "graph" in result else "–",
        f"{floor_ms / best:.0%}",
    ]
    numbers.append(f"{result['peak_mib']:.0f}")
    return f"| {row} | {result['name']} | {' | '.join(numbers)} |"


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rows", default=",".join(ROWS))
    parser.add_argument("--deepmd-kit", type=Path, help="its hybrid_muon.py, to measure it beside")
    arguments = parser.parse_args()
    rates = ceilings()
    device = torch.cuda.get_device_name()
    print(f"{datetime.date.today()} {device}, torch {torch.__version__}")
    print(
        f"fp16 products {rates[0] / 1e12:.0f} TFLOP/s, copies {rates[1] / 1e12:.2f} TB/s\n{describe()}"
    )
    print("| batch × m × n | | eager ms | graph ms | of floor | peak MiB |")
    print("|---|---|---|---|---|---|")
    peers = {"torch Muon 5": torch_muon} | (
        deepmd_kit(arguments.deepmd_kit) if arguments.deepmd_kit else {}
    )
    results = []
    for row in arguments.rows.split(","):
        shape: tuple[int, int, int] = tuple(map(int, row.split("x")))  # type: ignore[assignment]  # three by form
        runs = {"ours 8+2": ours("8+2"), "ours 5 steps": ours("keller-jordan")}
        for name, run in (runs | peers).items():
            steps = len(SCHEDULES["8+2"].coefficients) if "8+2" in name or "10" in name else 5
            result = measure(name, run, shape, graphs=name.startswith("ours") or shape[0] < 10)
            print(report(row, result, floor(shape, steps, rates)), flush=True)
            results.append({"row": row, "floor": floor(shape, steps, rates)} | result)
            torch.cuda.empty_cache()
    heading = {
        "date": str(datetime.date.today()),
        "device": device,
        "products": rates[0],
        "copies": rates[1],
    }
    arguments.out.write_text(json.dumps(heading | {"results": results}, indent=1))
    print(describe())


if __name__ == "__main__":
    main()
