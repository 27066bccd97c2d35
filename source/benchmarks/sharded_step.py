"""Optimizer step of fully sharded parameters on several GPUs: HybridMuon against fused AdamW and torch's Muon.

    torchrun --standalone --nproc-per-node 4 source/benchmarks/sharded_step.py --out sharded_step.json

Parameters are sharded by FSDP2 (`fully_shard`, Shard(0)); gradients are random DTensors that stand ready, so that the
time of a step is all exposed: nothing hides it. Time is the median over steps of the slowest rank, by CUDA events
around `step()`, and by the host's clock from its call to the device's end. Agreement is measured against one GPU that
steps the same parameters whole. torch.optim.Muon takes the matrices (AdamW the rest) through DTensor's implicit
communication, where that runs. Without GPUs the same script runs gloo with the small set, as a check of itself.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from deepmd_muon.optim import HybridMuon
from deepmd_muon.optim.sharded import ShardedSettings

Shapes = list[tuple[str, tuple[int, ...]]]


def llm(layers: int = 24, width: int = 2048) -> Shapes:
    """Return the matrices of a language model of 1.2 G parameters."""
    found: Shapes = []
    for i in range(layers):
        found += [
            (f"{i}.qkv.weight", (3 * width, width)),
            (f"{i}.out.weight", (width, width)),
            (f"{i}.up.weight", (4 * width, width)),
            (f"{i}.down.weight", (width, 4 * width)),
            (f"{i}.norm.weight", (width,)),
        ]
    return found


def molecular(name: str) -> Shapes:
    """Return a molecular model's parameters from shapes/."""
    rows = json.loads((Path(__file__).parent / "shapes" / f"{name}.json").read_text())
    return [(row[0], tuple(row[1])) for row in rows if 0 not in row[1]]


class Parameters(torch.nn.Module):
    """A module that holds parameters of given shapes; `names` are theirs."""

    def __init__(self, shapes: Shapes, device: torch.device) -> None:
        super().__init__()
        generator = torch.Generator(device).manual_seed(0)
        for i, (_, shape) in enumerate(shapes):
            values = torch.randn(shape, generator=generator, device=device) * 0.02
            self.register_parameter(f"p{i}", torch.nn.Parameter(values))
        self.names = [name for name, _ in shapes]

    def named(self) -> list[tuple[str, torch.nn.Parameter]]:
        """Return the parameters under their own names."""
        return list(zip(self.names, self.parameters(), strict=True))


def gradient(shape: torch.Size, index: int, device: torch.device) -> torch.Tensor:
    """Return the whole gradient of a parameter, the same on every rank."""
    generator = torch.Generator(device).manual_seed(1000 + index)
    return torch.randn(shape, generator=generator, device=device)


def give_gradients(model: Parameters, device: torch.device) -> None:
    """Set the gradient of every parameter, sharded like it."""
    for i, p in enumerate(model.parameters()):
        whole = gradient(p.shape, i, device)
        p.grad = distribute_tensor(whole, p.device_mesh, p.placements) if isinstance(p, DTensor) else whole


def seconds(step: Callable[[], Any], device: torch.device, repeats: int) -> tuple[float, float]:
    """Return the slowest rank's median (GPU ms, host-to-end ms) of a step."""
    for _ in range(3):
        step()
    gpu, host = [], []
    for _ in range(repeats):
        dist.barrier()
        if device.type == "cuda":
            torch.cuda.synchronize()
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start = time.perf_counter()
            begin.record()
            step()
            end.record()
            torch.cuda.synchronize()
            gpu.append(begin.elapsed_time(end))
        else:
            start = time.perf_counter()
            step()
            gpu.append((time.perf_counter() - start) * 1e3)
        host.append((time.perf_counter() - start) * 1e3)
    medians = torch.tensor([sorted(gpu)[repeats // 2], sorted(host)[repeats // 2]], device=device)
    dist.all_reduce(medians, op=dist.ReduceOp.MAX)
    return float(medians[0]), float(medians[1])


def torch_muon(model: Parameters) -> Callable[[], None]:
    """Return a step of torch.optim.Muon on the matrices and fused AdamW on the rest."""
    matrices = [p for p in model.parameters() if p.ndim == 2 and min(p.shape) > 1]
    rest = [p for p in model.parameters() if not (p.ndim == 2 and min(p.shape) > 1)]
    optimizers = [torch.optim.Muon(matrices, lr=1e-3), torch.optim.AdamW(rest, lr=1e-3, fused=True)]

    def step() -> None:
        for optimizer in optimizers:
            optimizer.step()

    return step


def contestants(model: Parameters, *, peers: bool) -> dict[str, Callable[[], Callable[[], Any]]]:
    """Return what is timed, by name; each is made when its turn comes."""

    def hybrid(**settings: Any) -> Callable[[], Callable[[], Any]]:
        return lambda: HybridMuon(model.named(), lr=1e-3, sharded=ShardedSettings(**settings)).step

    named = {
        "AdamW, fused": lambda: torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True).step,
        "HybridMuon": hybrid(),
        "HybridMuon, 16-bit return": hybrid(return_dtype="bfloat16"),
        "HybridMuon, gather everywhere": hybrid(exchange="reference"),
    }
    if peers:
        named["torch Muon + AdamW"] = lambda: torch_muon(model)
    return named


def disagreement(shapes: Shapes, mesh: Any, device: torch.device) -> float:
    """Return the largest relative difference of a parameter's update between sharded and whole after two steps."""
    sharded, whole = Parameters(shapes, device), Parameters(shapes, device)
    start = [p.detach().clone() for p in whole.parameters()]
    fully_shard(sharded, mesh=mesh)
    pairs = [(model, HybridMuon(model.named(), lr=1e-3)) for model in (sharded, whole)]
    for model, optimizer in pairs:
        for _ in range(2):
            give_gradients(model, device)
            optimizer.step()
    worst = 0.0
    for p, q, s in zip(sharded.parameters(), whole.parameters(), start, strict=True):
        moved = (q.detach() - s).norm()
        worst = max(worst, float((p.detach().full_tensor() - q.detach()).norm() / moved))
    return worst


def main() -> None:
    """Time every contestant on every set and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sets", nargs="+", default=["dpa3", "llm"])
    parser.add_argument("--layers", type=int, default=24, help="of the language model")
    parser.add_argument("--repeats", type=int, default=11)
    parser.add_argument("--peers", action="store_true", help="torch.optim.Muon too; slow under DTensor")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    on_gpu = torch.cuda.is_available()
    rank = int(os.environ["RANK"])
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpu else "gloo")
    world = dist.get_world_size()
    mesh = init_device_mesh(device.type, (world,))
    results = []
    for name in args.sets:
        shapes = llm(args.layers) if name == "llm" else molecular(name)
        checked = shapes if name != "llm" else llm(2)
        difference = disagreement(checked, mesh, device)
        for title in contestants(Parameters([], device), peers=args.peers):
            model = Parameters(shapes, device)
            fully_shard(model, mesh=mesh)
            give_gradients(model, device)
            try:
                step = contestants(model, peers=args.peers)[title]()
                step()
                if on_gpu:
                    torch.cuda.synchronize()
                    held = torch.cuda.memory_allocated()
                    torch.cuda.reset_peak_memory_stats()
                gpu, host = seconds(step, device, args.repeats)
                peak = (torch.cuda.max_memory_allocated() - held) / 2**20 if on_gpu else float("nan")
            except (RuntimeError, NotImplementedError, AssertionError, TypeError) as error:
                gpu = host = peak = float("nan")
                title = f"{title} ({str(error).splitlines()[0][:80]})"
            entry = {"set": name, "ranks": world, "optimizer": title, "gpu_ms": gpu, "host_ms": host, "peak_mib": peak}
            results.append({**entry, "disagreement": difference})
            del model
        plan = HybridMuon(_sharded(shapes, mesh, device).named(), lr=1e-3).plan
        if rank == 0:
            print(f"\n{name}, {world} ranks:\n{plan.describe()}", flush=True)
    if rank == 0:
        machine = torch.cuda.get_device_name() if on_gpu else "CPU, gloo"
        print(f"\n{machine} × {world}, torch {torch.__version__}\n")
        print("| set | optimizer | GPU ms | host ms | peak MiB over state | differs from one GPU |")
        print("|---|---|---|---|---|---|")
        for e in results:
            ours = f"{e['disagreement']:.1e}" if e["optimizer"] == "HybridMuon" else ""
            times = f"{e['gpu_ms']:.2f} | {e['host_ms']:.2f} | {e['peak_mib']:.0f}"
            print(f"| {e['set']} | {e['optimizer']} | {times} | {ours} |")
        if args.out:
            args.out.write_text(
                json.dumps({"machine": machine, "torch": torch.__version__, "results": results}, indent=1)
            )
    dist.destroy_process_group()


def _sharded(shapes: Shapes, mesh: Any, device: torch.device) -> Parameters:
    model = Parameters(shapes, device)
    fully_shard(model, mesh=mesh)
    return model


if __name__ == "__main__":
    main()
