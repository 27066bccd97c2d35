"""Memory of an optimizer on a GPU: bytes held between steps, the peak of one step beside them, and the time of a step.

    python source/benchmarks/optimizer_memory.py [--model 12x768] [--out memory.json]

The parameters are transformer layers of DEPTHxWIDTH, or another set of `measured_optimizers.py`, in float32. The state
in host memory is counted apart. A step's time is the median of five, from its call to the end of everything it has
started.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from datetime import date
from pathlib import Path
from typing import Any

import torch
from measured_optimizers import Make, adamw, hybrid, parameters, torch_muon

CONTESTANTS: dict[str, Make] = {
    "AdamW, fused": adamw,
    "torch Muon + AdamW": torch_muon,
    "HybridMuon": hybrid(),
    "HybridMuon, workspace=16Mi": hybrid(workspace=16 * 2**20),
    "HybridMuon, offload (64 MiB at a time)": hybrid(offload=True),
}


def measure(make: Make, model: str) -> dict[str, Any]:
    """Return bytes held between steps on the device and in host memory, a step's own peak, and its milliseconds."""
    named = parameters(model, torch.float32)
    before = torch.cuda.memory_allocated()
    optimizers = make(named, False)
    for _ in range(2):
        for optimizer in optimizers:
            optimizer.step()
    state = [v for o in optimizers for values in o.state.values() for v in values.values() if torch.is_tensor(v)]
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
    weights = sum(p.numel() for _, p in named)
    return {"weights": weights, "held": held, "on_host": on_host, "peak": peak, "ms": statistics.median(times)}


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="12x768", help="DEPTHxWIDTH, or a parameter set")
    parser.add_argument("--out", type=Path, help="JSON file for the figures")
    args = parser.parse_args()
    about = {"model": args.model, "device": torch.cuda.get_device_name(), "torch": torch.__version__}
    print(f"{about}, {date.today()}; bytes per weight:\n")
    print("| optimizer | held between steps | in host memory | peak of a step beside them | step, ms |")
    print("|---|---|---|---|---|")
    results = []
    for name, make in CONTESTANTS.items():
        found = measure(make, args.model)
        results.append({"optimizer": name, **found})
        sizes = " | ".join(f"{found[key] / found['weights']:.2f}" for key in ("held", "on_host", "peak"))
        print(f"| {name} | {sizes} | {found['ms']:.1f} |", flush=True)
    if args.out:
        args.out.write_text(json.dumps({**about, "date": str(date.today()), "results": results}, indent=1))


if __name__ == "__main__":
    main()
