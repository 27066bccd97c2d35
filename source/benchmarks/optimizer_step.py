"""Time whole optimizer steps on a GPU, eager and captured, on the parameter sets in shapes/, with random gradients.

python optimizer_step.py --out results.json [--deepmd-kit PATH/hybrid_muon.py] [--sets se_e2_a,dpa1] [--llm]
"""

from __future__ import annotations

import argparse
import datetime
import importlib.util
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from deepmd_muon.optim import HybridMuon

SHAPES = Path(__file__).parent / "shapes"
SETS = ("se_e2_a", "dpa1", "dpa2", "dpa3", "dpa4_mini")
Named = list[tuple[str, nn.Parameter]]


def parameters(name: str) -> Named:
    """Return named parameters of one set in float32, with gradients."""
    if name == "llm":
        layer = {"qkv": (6144, 2048), "out": (2048, 2048), "up": (8192, 2048), "down": (2048, 8192), "norm": (2048,)}
        shapes: Iterable[tuple[str, Any]] = [(f"layers.{i}.{k}", s) for i in range(24) for k, s in layer.items()]
    else:
        shapes = [(k, s) for k, s, *_ in json.loads((SHAPES / f"{name}.json").read_text()) if 0 not in s]
    named = [(k, nn.Parameter(torch.randn(s, device="cuda"))) for k, s in shapes]
    for _, p in named:
        p.grad = torch.randn_like(p)
    return named


def torch_muon(named: Named) -> Callable[[], Any]:
    """Step torch's Muon on what it takes, matrices, and fused AdamW on the rest."""
    matrices = [p for _, p in named if p.ndim == 2 and min(p.shape) > 1]
    rest = [p for _, p in named if not (p.ndim == 2 and min(p.shape) > 1)]
    muon = torch.optim.Muon(matrices, lr=1e-3)
    adam = torch.optim.AdamW(rest, lr=1e-3, fused=True)
    return lambda: (muon.step(), adam.step())


def deepmd_kit(named: Named, path: Path) -> Callable[[], Any]:
    """Step deepmd-kit's HybridMuon with its defaults."""
    spec = importlib.util.spec_from_file_location("deepmd_kit_hybrid_muon", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    step: Callable[[], Any] = module.HybridMuonOptimizer([p for _, p in named], lr=1e-3, named_parameters=named).step
    return step


def times(step: Callable[[], Any], budget: float = 0.5) -> tuple[float, float]:
    """Return median device time and median host time of a step [ms]."""
    for _ in range(3):
        step()
    torch.cuda.synchronize()
    device: list[float] = []
    host: list[float] = []
    while len(device) < 7 or (sum(device) < 1e3 * budget and len(device) < 100):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        begun = time.perf_counter()
        step()
        host.append(1e3 * (time.perf_counter() - begun))
        end.record()
        end.synchronize()
        device.append(start.elapsed_time(end))
    return statistics.median(device), statistics.median(host)


def captured(step: Callable[[], Any]) -> Callable[[], None]:
    """Capture a step in a CUDA graph after some on a side stream, as torch asks for."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


def launches(step: Callable[[], Any]) -> int:
    """Count the kernels of a step."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA], acc_events=True) as profile:
        step()
        torch.cuda.synchronize()
    return sum(event.device_type == torch.autograd.DeviceType.CUDA for event in profile.events())


def measure(name: str, make: Callable[[Named], Callable[[], Any]], named: Named, graph: bool) -> dict[str, Any]:
    """Return times, kernels and workspace of one optimizer; a failure is a result, too."""
    result: dict[str, Any] = {"name": name}
    try:
        step = make(named)
        result["eager"], result["host"] = times(step)
        result["kernels"] = launches(step)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        step()
        result["workspace_mib"] = (torch.cuda.max_memory_allocated() - before) / 2**20
        if graph:
            result["graph"], _ = times(captured(step))
    except Exception as error:
        result["error"] = f"{type(error).__name__}: {error}"[:300]
    return result


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--sets", default=",".join(SETS))
    parser.add_argument("--deepmd-kit", type=Path, help="its hybrid_muon.py, to measure it beside")
    parser.add_argument("--llm", action="store_true", help="24 layers of width 2048, 1.21 G parameters")
    arguments = parser.parse_args()
    print(f"{datetime.date.today()} {torch.cuda.get_device_name()}, torch {torch.__version__}")
    print("| set | | eager ms | host ms | captured ms | kernels | workspace MiB |\n|---|---|---|---|---|---|---|")
    results = []
    for name in [*filter(None, arguments.sets.split(",")), *(["llm"] if arguments.llm else [])]:
        makers: dict[str, tuple[Callable[[Named], Callable[[], Any]], bool]] = {
            "fused AdamW": (
                lambda named: torch.optim.AdamW([p for _, p in named], lr=1e-3, fused=True, capturable=True).step,
                True,
            ),
            "HybridMuon": (lambda named: HybridMuon(named, lr=1e-3, capturable=True).step, True),
            "torch Muon + AdamW": (torch_muon, False),
        }
        if arguments.deepmd_kit:
            makers["deepmd-kit"] = (lambda named: deepmd_kit(named, arguments.deepmd_kit), False)
        for label, (make, graph) in makers.items():
            result = {"set": name} | measure(label, make, parameters(name), graph)
            results.append(result)
            keys = ("eager", "host", "graph", "kernels", "workspace_mib")
            cells = [f"{result[k]:.3f}" if k in result else "–" for k in keys]
            print(f"| {name} | {label} | {' | '.join(cells)} | {result.get('error', '')}", flush=True)
            torch.cuda.empty_cache()
    heading = {"date": str(datetime.date.today()), "device": torch.cuda.get_device_name()}
    arguments.out.write_text(json.dumps(heading | {"results": results}, indent=1))


if __name__ == "__main__":
    main()
