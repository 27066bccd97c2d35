"""Memory of an optimizer: bytes of state, the peak of what one step allocates beside it, and the time of a step.

    python source/benchmarks/optimizer_memory.py [--model 12x768] [--device cuda] [--out memory.json]

The parameters are those of a transformer of DEPTHxWIDTH (fused q|k|v, output, up, down, norms, biases) in float32,
or of a parameter set in a JSON file of [name, shape, dtype] entries. On a GPU, memory between steps is all that the
optimizer holds there (with offload the two rooms that moments pass through), the state in host memory is counted
apart, and a step's time is the median of five, from its call to the end of everything it has started. Rows with
offload need a GPU.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
import weakref
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from deepmd_muon.optim import HybridMuon

Named = list[tuple[str, nn.Parameter]]


class Allocations(TorchDispatchMode):
    """Follow the bytes of every storage that operations make, and their peak."""

    def __init__(self, known: list[Tensor]) -> None:
        super().__init__()
        self.now = self.peak = 0
        self.living: dict[int, Any] = {x.untyped_storage()._cdata: None for x in known}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for x in tree_leaves(result):
            if isinstance(x, Tensor) and x.untyped_storage()._cdata not in self.living:
                self._follow(x.untyped_storage())
        return result

    def _follow(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()

        def freed(_: object) -> None:
            self.living.pop(key, None)
            self.now -= size

        self.living[key] = weakref.ref(storage, freed)
        self.now += size
        self.peak = max(self.peak, self.now)


def transformer(depth: int, width: int) -> list[tuple[str, tuple[int, ...]]]:
    """Return names and shapes."""
    shapes: list[tuple[str, tuple[int, ...]]] = []
    for i in range(depth):
        layer = {"qkv.weight": (3 * width, width), "out.weight": (width, width)}
        layer |= {"up.weight": (4 * width, width), "down.weight": (width, 4 * width)}
        layer |= {"up.bias": (4 * width,), "down.bias": (width,), "norm1.weight": (width,), "norm2.weight": (width,)}
        shapes += [(f"blocks.{i}.{name}", shape) for name, shape in layer.items()]
    return shapes


def contestants(device: str) -> dict[str, Callable[[Named], list[torch.optim.Optimizer]]]:
    """Return how each optimizer is made."""

    def torch_muon(named: Named) -> list[torch.optim.Optimizer]:
        matrices = [p for _, p in named if p.ndim == 2]
        return [torch.optim.Muon(matrices), torch.optim.AdamW([p for _, p in named if p.ndim != 2], fused=True)]

    def hybrid(**settings: Any) -> Callable[[Named], list[torch.optim.Optimizer]]:
        return lambda named: [HybridMuon(named, **settings)]

    found = {
        "AdamW, fused": lambda named: [torch.optim.AdamW(named, fused=True)],
        "AdamW, foreach": lambda named: [torch.optim.AdamW(named, foreach=True)],
        "torch Muon + AdamW": torch_muon,
        "HybridMuon": hybrid(),
        "HybridMuon, workspace=16Mi": hybrid(workspace=16 * 2**20),
        "HybridMuon, workspace=4Mi": hybrid(workspace=4 * 2**20),
        "HybridMuon, foreach=False": hybrid(foreach=False),
    }
    if device == "cuda":
        found |= {
            "HybridMuon, offload (64 MiB at a time, as workspace=16Mi)": hybrid(offload=True),
            "HybridMuon, offload, offload_bytes=16Mi (as workspace=4Mi)": hybrid(offload=True, offload_bytes=2**24),
        }
    return found


def measure(
    make: Callable[[Named], list[torch.optim.Optimizer]], shapes: list[Any], device: str
) -> dict[str, float | None]:
    """Return bytes held between steps on the device and in host memory, a step's own peak, and its milliseconds."""
    named = [(name, nn.Parameter(torch.randn(tuple(shape), device=device))) for name, shape in shapes]
    for _, p in named:
        p.grad = torch.randn_like(p)
    before = torch.cuda.memory_allocated() if device == "cuda" else 0
    optimizers = make(named)
    for _ in range(2):
        for optimizer in optimizers:
            optimizer.step()
    state = [v for o in optimizers for values in o.state.values() for v in values.values() if isinstance(v, Tensor)]
    if device != "cuda":
        known = [x for _, p in named for x in (p, p.grad) if x is not None]
        with Allocations(known + state) as allocations:
            for optimizer in optimizers:
                optimizer.step()
        return {"held": sum(x.nbytes for x in state), "on_host": 0, "peak": allocations.peak, "ms": None}
    torch.cuda.synchronize()
    held = torch.cuda.memory_allocated() - before
    times = []
    for _ in range(5):
        torch.cuda.reset_peak_memory_stats()
        start = time.perf_counter()
        for optimizer in optimizers:
            optimizer.step()
        torch.cuda.synchronize()
        times.append((time.perf_counter() - start) * 1e3)
    peak = torch.cuda.max_memory_allocated() - before - held
    on_host = sum(x.nbytes for x in state if not x.is_cuda and x.ndim)
    return {"held": held, "on_host": on_host, "peak": peak, "ms": statistics.median(times)}


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="6x256", help="DEPTHxWIDTH, or a JSON file")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path, help="JSON file for the figures")
    args = parser.parse_args()
    if Path(args.model).suffix == ".json":
        shapes = [(name, shape) for name, shape, _ in json.loads(Path(args.model).read_text(encoding="utf-8"))]
    else:
        shapes = transformer(*map(int, args.model.split("x")))
    weights = sum(torch.Size(shape).numel() for _, shape in shapes)
    device = torch.cuda.get_device_name() if args.device == "cuda" else f"{platform.machine()} CPU"
    print(
        f"{args.model}: {weights / 1e6:.1f} M weights, float32, torch {torch.__version__}, {device}, {date.today()}\n"
    )
    print("Bytes per weight:\n")
    print("| optimizer | held between steps | in host memory | peak of a step beside them | step, ms |")
    print("|---|---|---|---|---|")
    results = []
    for name, make in contestants(args.device).items():
        found = measure(make, shapes, args.device)
        results.append({"optimizer": name, **found})
        sizes = " | ".join(f"{(found[key] or 0) / weights:.2f}" for key in ("held", "on_host", "peak"))
        print(f"| {name} | {sizes} | {'–' if found['ms'] is None else format(found['ms'], '.1f')} |", flush=True)
    if args.out:
        about = {"model": args.model, "weights": weights, "device": device, "torch": torch.__version__}
        args.out.write_text(json.dumps({**about, "date": str(date.today()), "results": results}, indent=1))


if __name__ == "__main__":
    main()
