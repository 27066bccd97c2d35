"""Optimizer step of parameters on several GPUs: HybridMuon, eager and captured, against AdamW and torch's Muon.

    torchrun --standalone --nproc-per-node 4 source/benchmarks/sharded_step.py --out sharded_step.json

FSDP2 shards the parameters (`fully_shard`, Shard(0)), or they are replicas whose state is in parts (`--layout zero1`)
or whole (`--layout ddp`). Random gradients stand ready, so that nothing hides the time of a step. Time is the median
over steps of the slowest rank, by CUDA events around `step()`, and by the host's clock from its call to the device's
end and to its return. Agreement is measured against one GPU that steps the same parameters whole. torch.optim.Muon
(`--peers`) takes the matrices (AdamW the rest) through DTensor's implicit communication, where that runs.

Without GPUs the same script runs gloo, as a check of itself: `--sets dpa3`. With `--alone N` one process takes the part
of rank 0 of N in every step, and exchanges are copies on its own GPU: the time of N GPUs without that of the wire.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from measured_optimizers import shapes_of
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from deepmd_muon.optim import AdamWConfig, HybridMuon
from deepmd_muon.optim.sharded import ShardedSettings

Shapes = list[tuple[str, tuple[int, ...]]]


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


def sharded(shapes: Shapes, mesh: Any, device: torch.device, layout: str) -> Parameters:
    """Return parameters of given shapes, cut by FSDP2 if `layout` is "fsdp"."""
    made = Parameters(shapes, device)
    return fully_shard(made, mesh=mesh) if layout == "fsdp" else made  # type: ignore[return-value]  # the same module


def gradient(shape: torch.Size, index: int, device: torch.device) -> torch.Tensor:
    """Return the whole gradient of a parameter, the same on every rank."""
    generator = torch.Generator(device).manual_seed(1000 + index)
    return torch.randn(shape, generator=generator, device=device)


def give_gradients(model: Parameters, device: torch.device) -> None:
    """Set the gradient of every parameter, sharded like it."""
    for i, p in enumerate(model.parameters()):
        whole = gradient(p.shape, i, device)
        if isinstance(p, DTensor):  # every rank makes the whole gradient
            whole = distribute_tensor(whole, p.device_mesh, p.placements, src_data_rank=None)
        p.grad = whole


def seconds(
    step: Callable[[], Any], device: torch.device, repeats: int
) -> tuple[float, float, float]:
    """Return the slowest rank's median (GPU ms, host-to-end ms, host-to-return ms) of a step."""
    for _ in range(3):
        step()
    gpu, host, returned = [], [], []
    for _ in range(repeats):
        dist.barrier()
        if device.type == "cuda":
            torch.cuda.synchronize()
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start = time.perf_counter()
            begin.record()
            step()
            end.record()
            returned.append((time.perf_counter() - start) * 1e3)
            torch.cuda.synchronize()
            gpu.append(begin.elapsed_time(end))
        else:
            start = time.perf_counter()
            step()
            gpu.append((time.perf_counter() - start) * 1e3)
            returned.append(gpu[-1])
        host.append((time.perf_counter() - start) * 1e3)
    medians = torch.tensor(
        [sorted(times)[repeats // 2] for times in (gpu, host, returned)], device=device
    )
    dist.all_reduce(medians, op=dist.ReduceOp.MAX)
    return float(medians[0]), float(medians[1]), float(medians[2])


def torch_muon(model: Parameters) -> Callable[[], None]:
    """Return a step of torch.optim.Muon on the matrices and fused AdamW on the rest."""
    matrices = [p for p in model.parameters() if p.ndim == 2 and min(p.shape) > 1]
    rest = [p for p in model.parameters() if not (p.ndim == 2 and min(p.shape) > 1)]
    optimizers = [torch.optim.Muon(matrices, lr=1e-3), torch.optim.AdamW(rest, lr=1e-3, fused=True)]

    def step() -> None:
        for optimizer in optimizers:
            optimizer.step()

    return step


def captured(optimizer: torch.optim.Optimizer) -> Callable[[], Any]:
    """Take two steps, and return the replay of a third one as a CUDA graph."""
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        optimizer.step()
        optimizer.step()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        optimizer.step()
    return graph.replay


def contestants(
    model: Parameters, mesh: Any, layout: str, *, peers: bool, on_gpu: bool
) -> dict[str, Callable[[], Callable[[], Any]]]:
    """Return what is timed, by name; each is made when its turn comes."""
    common: dict[str, Any] = {} if layout == "fsdp" else {"replicas": mesh}
    state = {"zero1": {"state": "sharded"}}.get(layout, {})

    def hybrid_with(settings: dict[str, Any], **options: Any) -> HybridMuon:
        sharded_settings = ShardedSettings(**{**state, **settings})
        return HybridMuon(model.named(), lr=1e-3, sharded=sharded_settings, **common, **options)

    def hybrid(**settings: Any) -> Callable[[], Callable[[], Any]]:
        return lambda: hybrid_with(settings).step

    def adamw() -> torch.optim.Optimizer:
        if layout == "zero1":
            made = AdamWConfig().build(model, 1e-3, mesh)
            for group in made.param_groups:
                group["capturable"] = on_gpu
            return made
        return torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True, capturable=on_gpu)

    named: dict[str, Callable[[], Callable[[], Any]]] = {
        "AdamW, fused": lambda: adamw().step,
        "HybridMuon": hybrid(),
    }
    if on_gpu:
        named["AdamW, fused, captured"] = lambda: captured(adamw())
        named["HybridMuon, captured"] = lambda: captured(hybrid_with({}, capturable=True))
    if layout == "ddp":
        for way in ("spread", "repeat"):
            named[f"HybridMuon, {way}"] = hybrid(replication=way)
            if on_gpu:
                named[f"HybridMuon, {way}, captured"] = functools.partial(
                    lambda way: captured(hybrid_with({"replication": way}, capturable=True)), way
                )
    if on_gpu:
        named["HybridMuon, buckets of 256 MiB, captured"] = lambda: captured(
            hybrid_with({"bucket_bytes": 256 * 2**20}, capturable=True)
        )
    return named | {
        "HybridMuon, 16-bit return": hybrid(return_dtype="bfloat16"),
        "HybridMuon, one slot (nothing overlaps)": hybrid(slots=1),
        "HybridMuon, buckets of 64 MiB": hybrid(bucket_bytes=64 * 2**20),
        "HybridMuon, buckets of 256 MiB": hybrid(bucket_bytes=256 * 2**20),
        "HybridMuon, offload": lambda: hybrid_with({}, offload=True).step,
        **({"torch Muon + AdamW": lambda: torch_muon(model)} if peers else {}),
    }


def disagreement(shapes: Shapes, mesh: Any, device: torch.device, layout: str) -> float:
    """Return the largest relative difference of a parameter's update between sharded and whole after two steps."""
    many, whole = sharded(shapes, mesh, device, layout), Parameters(shapes, device)
    start = [p.detach().clone() for p in whole.parameters()]
    told: dict[str, Any] = {} if layout == "fsdp" else {"replicas": mesh}
    pairs = [
        (many, HybridMuon(many.named(), lr=1e-3, **told)),
        (whole, HybridMuon(whole.named(), lr=1e-3)),
    ]
    for model, optimizer in pairs:
        for _ in range(2):
            give_gradients(model, device)
            optimizer.step()
    worst = 0.0
    for p, q, s in zip(many.parameters(), whole.parameters(), start, strict=True):
        moved = (q.detach() - s).norm()
        p = p.detach()
        worst = max(
            worst,
            float(((p.full_tensor() if isinstance(p, DTensor) else p) - q.detach()).norm() / moved),
        )
    return worst


def step_times(
    name: str, shapes: Shapes, args: argparse.Namespace, mesh: Any, device: torch.device
) -> list[Any]:
    """Time every contestant's step on one set."""
    on_gpu = device.type == "cuda"
    few = shapes_of("2x2048") if name == "llm" else shapes
    difference = float("nan") if args.alone else disagreement(few, mesh, device, args.layout)
    results = []

    def chosen(model: Parameters) -> dict[str, Callable[[], Callable[[], Any]]]:
        found = contestants(model, mesh, args.layout, peers=args.peers, on_gpu=on_gpu)
        return {title: make for title, make in found.items() if not args.only or title in args.only}

    for title in chosen(Parameters([], device)):
        model = sharded(shapes, mesh, device, args.layout)
        give_gradients(model, device)
        before = torch.cuda.memory_allocated() if on_gpu else 0
        held_runs = gpu = host = returned = peak = float("nan")
        try:
            step = chosen(model)[title]()
            step()
            if on_gpu:
                torch.cuda.synchronize()
                held_runs = (torch.cuda.memory_allocated() - before) / 2**20
                torch.cuda.reset_peak_memory_stats()
            gpu, host, returned = seconds(step, device, args.repeats)
            peak = (
                (torch.cuda.max_memory_allocated() - before) / 2**20 - held_runs
                if on_gpu
                else float("nan")
            )
        except (RuntimeError, NotImplementedError, AssertionError, TypeError) as error:
            title = f"{title} ({str(error).splitlines()[0][:80]})"
        entry = {
            "set": name,
            "ranks": dist.get_world_size(),
            "layout": args.layout,
            "alone": bool(args.alone),
        }
        entry |= {"optimizer": title, "disagreement": difference}
        times = {"gpu_ms": gpu, "host_ms": host, "returned_ms": returned}
        results.append({**entry, **times, "held_mib": held_runs, "peak_mib": peak})
        del model
    told: dict[str, Any] = {} if args.layout == "fsdp" else {"replicas": mesh}
    settings = ShardedSettings(state="sharded" if args.layout == "zero1" else "replicated")
    plan = HybridMuon(
        sharded(shapes, mesh, device, args.layout).named(), lr=1e-3, sharded=settings, **told
    ).plan
    if dist.get_rank() == 0:
        print(f"\n{name}, {dist.get_world_size()} ranks:\n{plan.describe()}", flush=True)
    return results


def report(steps: list[Any]) -> None:
    """Print the table."""
    print(
        "\n| set | optimizer | GPU ms | host ms | returns ms | held MiB | peak MiB beside | differs from one GPU |"
    )
    print("|---|---|---|---|---|---|---|---|")
    for e in steps:
        ours = f"{e['disagreement']:.1e}" if e["optimizer"] == "HybridMuon" else ""
        sizes = f"{e['held_mib']:.0f} | {e['peak_mib']:.0f}"
        times = " | ".join(f"{e[key]:.2f}" for key in ("gpu_ms", "host_ms", "returned_ms"))
        print(f"| {e['set']} | {e['optimizer']} | {times} | {sizes} | {ours} |")


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--sets", nargs="+", default=["dpa3", "llm"], help="of measured_optimizers.py"
    )
    parser.add_argument("--repeats", type=int, default=11)
    parser.add_argument(
        "--peers", action="store_true", help="torch.optim.Muon too; slow under DTensor"
    )
    parser.add_argument("--layout", choices=("fsdp", "zero1", "ddp"), default="fsdp")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="time these alone")
    parser.add_argument(
        "--alone", type=int, default=0, metavar="N", help="be rank 0 of N without the others"
    )
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    on_gpu = torch.cuda.is_available()
    device = (
        torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        if on_gpu
        else torch.device("cpu")
    )
    if on_gpu:
        torch.cuda.set_device(device)
    if args.alone:
        from torch.testing._internal.distributed.fake_pg import FakeStore

        dist.init_process_group("fake", rank=0, world_size=args.alone, store=FakeStore())
    else:
        dist.init_process_group("nccl" if on_gpu else "gloo")
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    steps = [
        entry
        for name in args.sets
        for entry in step_times(name, shapes_of(name), args, mesh, device)
    ]
    if dist.get_rank() == 0:
        machine = torch.cuda.get_device_name() if on_gpu else "CPU, gloo"
        print(f"\n{machine} × {dist.get_world_size()}, torch {torch.__version__}")
        report(steps)
        if args.out:
            about = {"machine": machine, "torch": torch.__version__, "ranks": dist.get_world_size()}
            args.out.write_text(json.dumps({**about, "results": steps}, indent=1))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
