"""Optimizer step of fully sharded parameters on several GPUs: HybridMuon against fused AdamW and torch's Muon.

    torchrun --standalone --nproc-per-node 4 source/benchmarks/sharded_step.py --out sharded_step.json

Three parts, `--parts` chooses:

step    Parameters are sharded by FSDP2 (`fully_shard`, Shard(0)); gradients are random DTensors that stand ready, so
        that the time of a step is all exposed: nothing hides it. Time is the median over steps of the slowest rank, by
        CUDA events around `step()`, and by the host's clock from its call to the device's end and to its return.
        Agreement is measured against one GPU that steps the same parameters whole. torch.optim.Muon (`--peers`) takes
        the matrices (AdamW the rest) through DTensor's implicit communication, where that runs.
wire    The bytes that a step hands to its collectives for other ranks, beside the plan's figure, rank by rank.
loop    Forward pass, backward pass and step of models under FSDP2: transformer blocks (each a unit) of bfloat16
        products, and a small network of a molecular model's parameters. The exposed time of an optimizer is a
        turn of the loop with its step minus one without.

Without GPUs the same script runs gloo, as a check of itself: `--sets dpa3 --layers 1 --width 64`.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.functional import scaled_dot_product_attention

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


def sharded(shapes: Shapes, mesh: Any, device: torch.device) -> Parameters:
    """Return parameters of given shapes, cut by FSDP2."""
    return fully_shard(Parameters(shapes, device), mesh=mesh)  # type: ignore[return-value]  # the same module


def gradient(shape: torch.Size, index: int, device: torch.device) -> torch.Tensor:
    """Return the whole gradient of a parameter, the same on every rank."""
    generator = torch.Generator(device).manual_seed(1000 + index)
    return torch.randn(shape, generator=generator, device=device)


def give_gradients(model: Parameters, device: torch.device) -> None:
    """Set the gradient of every parameter, sharded like it."""
    for i, p in enumerate(model.parameters()):
        whole = gradient(p.shape, i, device)
        p.grad = distribute_tensor(whole, p.device_mesh, p.placements) if isinstance(p, DTensor) else whole


def seconds(step: Callable[[], Any], device: torch.device, repeats: int) -> tuple[float, float, float]:
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
    medians = torch.tensor([sorted(times)[repeats // 2] for times in (gpu, host, returned)], device=device)
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


def contestants(model: Parameters, *, peers: bool) -> dict[str, Callable[[], Callable[[], Any]]]:
    """Return what is timed, by name; each is made when its turn comes."""

    def hybrid(**settings: Any) -> Callable[[], Callable[[], Any]]:
        return lambda: HybridMuon(model.named(), lr=1e-3, sharded=ShardedSettings(**settings)).step

    named = {
        "AdamW, fused": lambda: torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True).step,
        "HybridMuon": hybrid(),
        "HybridMuon, 16-bit return": hybrid(return_dtype="bfloat16"),
        "HybridMuon, one slot (nothing overlaps)": hybrid(slots=1),
        "HybridMuon, buckets of 64 MiB": hybrid(bucket_bytes=64 * 2**20),
        "HybridMuon, buckets of 256 MiB": hybrid(bucket_bytes=256 * 2**20),
        "HybridMuon, offload": lambda: HybridMuon(model.named(), lr=1e-3, offload=True).step,
        "HybridMuon, gather everywhere": hybrid(exchange="reference"),
    }
    if peers:
        named["torch Muon + AdamW"] = lambda: torch_muon(model)
    return named


def disagreement(shapes: Shapes, mesh: Any, device: torch.device) -> float:
    """Return the largest relative difference of a parameter's update between sharded and whole after two steps."""
    many, whole = sharded(shapes, mesh, device), Parameters(shapes, device)
    start = [p.detach().clone() for p in whole.parameters()]
    pairs = [(model, HybridMuon(model.named(), lr=1e-3)) for model in (many, whole)]
    for model, optimizer in pairs:
        for _ in range(2):
            give_gradients(model, device)
            optimizer.step()
    worst = 0.0
    for p, q, s in zip(many.parameters(), whole.parameters(), start, strict=True):
        moved = (q.detach() - s).norm()
        worst = max(worst, float((p.detach().full_tensor() - q.detach()).norm() / moved))
    return worst


class Block(torch.nn.Module):
    """A transformer block without biases."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = torch.nn.ModuleList(torch.nn.RMSNorm(width) for _ in range(2))
        sizes = {"qkv": (width, 3 * width), "out": (width, width), "up": (width, 4 * width), "down": (4 * width, width)}
        self.linears = torch.nn.ModuleDict({k: torch.nn.Linear(a, b, bias=False) for k, (a, b) in sizes.items()})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the residual stream, (batch, tokens, width)."""
        qkv = self.linears["qkv"](self.norms[0](x)).unflatten(-1, (3, self.heads, -1))
        q, k, v = (part.transpose(1, 2) for part in qkv.unbind(2))
        x = x + self.linears["out"](scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.linears["down"](torch.nn.functional.gelu(self.linears["up"](self.norms[1](x))))


class Small(torch.nn.Module):
    """A network that uses every parameter of a molecular model once, in products as wide as it."""

    def __init__(self, shapes: Shapes) -> None:
        super().__init__()
        self.weights = torch.nn.ParameterList(torch.randn(shape) / 10 for _, shape in shapes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return one number per row of x, (rows, 1024)."""
        total = x[:, 0]
        for w in self.weights:
            y = x[:, : w.shape[0]] * w if w.ndim == 1 else torch.tanh(x[:, : w.shape[0]] @ w)
            total = total + y.mean(dim=1)
        return total


def loop_model(name: str, args: argparse.Namespace, mesh: Any, device: torch.device) -> tuple[Any, torch.Tensor]:
    """Return a model under FSDP2 and what it is given."""
    torch.manual_seed(0)
    if name == "blocks":
        with device:  # more than a thousand million random numbers take long on a CPU
            model = torch.nn.Sequential(*(Block(args.width, max(1, args.width // 128)) for _ in range(args.layers)))
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for block in model:
            fully_shard(block, mesh=mesh, mp_policy=policy)
        fully_shard(model, mesh=mesh, mp_policy=policy)
        return model, torch.randn(args.batch, args.tokens, args.width, device=device)
    model = fully_shard(Small(molecular(name)).to(device), mesh=mesh)
    return model, torch.randn(args.batch * args.tokens, 1024, device=device)


def loop_times(name: str, args: argparse.Namespace, mesh: Any, device: torch.device) -> list[dict[str, Any]]:
    """Return the time of a turn of the training loop without step and with each optimizer's [ms]."""
    makers: dict[str, Callable[[Any], Any]] = {
        "none": lambda model: None,
        "AdamW, fused": lambda model: torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True),
        "HybridMuon": lambda model: HybridMuon(model.named_parameters(), lr=1e-4),
        "HybridMuon, 16-bit return": lambda model: HybridMuon(
            model.named_parameters(), lr=1e-4, sharded=ShardedSettings(return_dtype="bfloat16")
        ),
    }
    found: list[dict[str, Any]] = []
    for title, make in makers.items():
        model, x = loop_model(name, args, mesh, device)
        optimizer = make(model)

        def turn(model: Any = model, x: torch.Tensor = x, optimizer: Any = optimizer) -> None:
            model(x).float().square().mean().backward()
            if optimizer is not None:
                optimizer.step()
            model.zero_grad()

        _, host, _ = seconds(turn, device, args.repeats)
        exposed = host - found[0]["ms"] if found else 0.0
        found.append({"loop": name, "optimizer": title, "ms": host, "exposed_ms": exposed})
        del model, optimizer, turn
    return found


@contextmanager
def counted() -> Iterator[dict[str, int]]:
    """Count collectives, and the bytes that this rank hands to all-to-alls for others."""
    counts = {"bytes": 0, "all_to_all_single": 0, "others": 0}
    names = ("all_to_all_single", "all_gather", "all_gather_into_tensor", "all_reduce", "broadcast", "reduce_scatter")
    originals = {name: getattr(dist, name) for name in names}

    def counting(name: str) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            if name == "all_to_all_single":
                _, sent, _, splits = args
                counts["bytes"] += sent.element_size() * sum(n for r, n in enumerate(splits) if r != dist.get_rank())
                counts[name] += 1
            else:
                counts["others"] += 1
            return originals[name](*args, **options)

        return call

    with mock.patch.multiple(dist, **{name: counting(name) for name in names}):
        yield counts


def wire(name: str, shapes: Shapes, mesh: Any, device: torch.device) -> list[dict[str, Any]]:
    """Return each rank's bytes and collectives of a step, counted and planned."""
    model = sharded(shapes, mesh, device)
    give_gradients(model, device)
    found: list[Any] = []
    for title, settings in (("full", {}), ("16-bit return", {"return_dtype": "bfloat16"})):
        optimizer = HybridMuon(model.named(), lr=1e-3, sharded=ShardedSettings(**settings))
        optimizer.step()  # compares the plans
        with counted() as counts:
            optimizer.step()
        plan = optimizer.plan
        mine = {
            "set": name,
            "wire": title,
            "rank": dist.get_rank(),
            "bytes": counts["bytes"],
            "planned_bytes": sum(domain.sent(plan.settings).get(dist.get_rank(), 0) for domain in plan.domains),
            "collectives": counts["all_to_all_single"],
            "planned_collectives": sum(len(b) for domain in plan.domains for b in domain.exchanges().values()),
            "others": counts["others"],
        }
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, mine)
        found += everyone
    return found


def step_times(name: str, shapes: Shapes, args: argparse.Namespace, mesh: Any, device: torch.device) -> list[Any]:
    """Time every contestant's step on one set."""
    on_gpu = device.type == "cuda"
    difference = disagreement(shapes if name != "llm" else llm(min(2, args.layers), args.width), mesh, device)
    results = []
    for title in contestants(Parameters([], device), peers=args.peers):
        model = sharded(shapes, mesh, device)
        give_gradients(model, device)
        before = torch.cuda.memory_allocated() if on_gpu else 0
        held_runs = gpu = host = returned = peak = float("nan")
        try:
            step = contestants(model, peers=args.peers)[title]()
            step()
            if on_gpu:
                torch.cuda.synchronize()
                held_runs = (torch.cuda.memory_allocated() - before) / 2**20
                torch.cuda.reset_peak_memory_stats()
            gpu, host, returned = seconds(step, device, args.repeats)
            peak = (torch.cuda.max_memory_allocated() - before) / 2**20 - held_runs if on_gpu else float("nan")
        except (RuntimeError, NotImplementedError, AssertionError, TypeError) as error:
            title = f"{title} ({str(error).splitlines()[0][:80]})"
        entry = {"set": name, "ranks": dist.get_world_size(), "optimizer": title, "disagreement": difference}
        times = {"gpu_ms": gpu, "host_ms": host, "returned_ms": returned}
        results.append({**entry, **times, "held_mib": held_runs, "peak_mib": peak})
        del model
    plan = HybridMuon(sharded(shapes, mesh, device).named(), lr=1e-3).plan
    if dist.get_rank() == 0:
        print(f"\n{name}, {dist.get_world_size()} ranks:\n{plan.describe()}", flush=True)
    return results


def report(steps: list[Any], wires: list[Any], loops: list[Any]) -> None:
    """Print the tables."""
    if steps:
        print(
            "\n| set | optimizer | GPU ms | host ms | returns ms | held MiB | peak MiB beside | differs from one GPU |"
        )
        print("|---|---|---|---|---|---|---|---|")
    for e in steps:
        ours = f"{e['disagreement']:.1e}" if e["optimizer"] == "HybridMuon" else ""
        sizes = f"{e['held_mib']:.0f} | {e['peak_mib']:.0f}"
        times = " | ".join(f"{e[key]:.2f}" for key in ("gpu_ms", "host_ms", "returned_ms"))
        print(f"| {e['set']} | {e['optimizer']} | {times} | {sizes} | {ours} |")
    if wires:
        print("\n| set | wire | rank | bytes sent | planned | collectives | planned | others |")
        print("|---|---|---|---|---|---|---|---|")
    for e in wires:
        counts = f"{e['collectives']} | {e['planned_collectives']} | {e['others']}"
        print(f"| {e['set']} | {e['wire']} | {e['rank']} | {e['bytes']} | {e['planned_bytes']} | {counts} |")
    if loops:
        print("\n| loop | optimizer | ms a turn | exposed ms |\n|---|---|---|---|")
    for e in loops:
        print(f"| {e['loop']} | {e['optimizer']} | {e['ms']:.2f} | {e['exposed_ms']:.2f} |")


def main() -> None:
    """Measure what is asked for and print tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", default=["step", "wire", "loop"], choices=["step", "wire", "loop"])
    parser.add_argument("--sets", nargs="+", default=["dpa3", "llm"], help="of parts step and wire")
    parser.add_argument("--loops", nargs="+", default=["dpa3", "blocks"], help="of part loop")
    parser.add_argument("--layers", type=int, default=24, help="of the language model and the blocks")
    parser.add_argument("--width", type=int, default=2048, help="likewise")
    parser.add_argument("--batch", type=int, default=4, help="sequences of a rank")
    parser.add_argument("--tokens", type=int, default=1024, help="of a sequence")
    parser.add_argument("--repeats", type=int, default=11)
    parser.add_argument("--peers", action="store_true", help="torch.optim.Muon too; slow under DTensor")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpu else "gloo")
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    sets = {name: llm(args.layers, args.width) if name == "llm" else molecular(name) for name in args.sets}
    steps, wires, loops = (list[Any]() for _ in range(3))
    for name, shapes in sets.items():
        if "wire" in args.parts:
            wires += wire(name, shapes, mesh, device)
        if "step" in args.parts:
            steps += step_times(name, shapes, args, mesh, device)
    for name in args.loops if "loop" in args.parts else ():
        loops += loop_times(name, args, mesh, device)
    if dist.get_rank() == 0:
        machine = torch.cuda.get_device_name() if on_gpu else "CPU, gloo"
        print(f"\n{machine} × {dist.get_world_size()}, torch {torch.__version__}")
        report(steps, wires, loops)
        if args.out:
            about = {"machine": machine, "torch": torch.__version__, "ranks": dist.get_world_size()}
            args.out.write_text(json.dumps({**about, "results": steps, "wire": wires, "loops": loops}, indent=1))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
