"""Optimizer step of parameters on several GPUs: HybridMuon, eager and captured, against AdamW, torch's Muon and dion's.

    torchrun --standalone --nproc-per-node 4 source/benchmarks/sharded_step.py --out sharded_step.json

Layouts (`--layouts`) of the parameters:

ddp    replicas with whole state
zero1  replicas, each with a part of the state
fsdp   FSDP2 (`fully_shard`)
hsdp   FSDP2 within two groups of ranks that are replicas of each other
tp     pairs of ranks share each matrix by rows or columns (tensor parallelism), FSDP2 cuts the parts
ep     each rank has whole experts, FSDP2 cuts the rest; for the set `moe`

Random gradients stand ready, so that nothing hides the time of a step. Time is the median over steps of the slowest
rank, by CUDA events around `step()`, and by the host's clock from its call to the device's end and to its return. A
profile of three steps gives the exposed time, in which the GPU runs nothing but kernels of NCCL. Agreement is measured
against one GPU that steps the same parameters whole. torch.optim.Muon, dion's Muon and torchtitan's DistMuon (`--peers`)
take the matrices, AdamW the rest, where that runs; dion and torchtitan must be importable. Ours with the five steps of
Newton-Schulz that torch and torchtitan take is "Muon, five steps". `--brief` leaves out further settings of HybridMuon.

Without GPUs the same script runs gloo, as a check of itself: `--sets dpa3`. With `--alone N` one process takes the part
of rank 0 of N in every step, and exchanges are copies on its own GPU: the time of N GPUs without that of the wire.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import itertools
import json
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from measured_optimizers import shapes_of
from overlap import Kernel, exposed
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

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


LAYOUTS = ("ddp", "zero1", "fsdp", "hsdp", "tp", "ep")
REPLICATED = ("ddp", "zero1")


def mesh_of(layout: str, device: torch.device) -> DeviceMesh:
    """Return the mesh of a layout: two axes for hsdp and tp."""
    world = dist.get_world_size()
    if layout == "hsdp":
        return init_device_mesh(device.type, (2, world // 2), mesh_dim_names=("replica", "shard"))
    if layout == "tp":
        return init_device_mesh(device.type, (world // 2, 2), mesh_dim_names=("shard", "tensor"))
    return init_device_mesh(device.type, (world,), mesh_dim_names=("shard",))


def sharded(shapes: Shapes, mesh: DeviceMesh, device: torch.device, layout: str) -> Parameters:
    """Return parameters of given shapes in a layout."""
    made = Parameters(shapes, device)
    if layout in REPLICATED:
        return made
    ignored = set()
    for name, attribute in zip(made.names, dict(made.named_parameters()), strict=True):
        p = getattr(made, attribute)
        if layout == "tp" and p.ndim == 2:
            # As in a transformer: the second matrix of a pair is cut by columns.
            dim = int(name.endswith(("out.weight", "down.weight")))
            part = distribute_tensor(p.detach(), mesh["tensor"], [Shard(dim)], src_data_rank=None)
        elif layout == "ep" and p.ndim == 3:
            part = distribute_tensor(p.detach(), mesh, [Shard(0)], src_data_rank=None)
        else:
            continue
        setattr(made, attribute, torch.nn.Parameter(part))
        if layout == "ep":
            ignored.add(getattr(made, attribute))
    # A tuple of parameters to leave alone exists under FSDP2 only as a set.
    return fully_shard(  # type: ignore[return-value]  # the same module
        made, mesh=mesh["shard"] if layout == "tp" else mesh, ignored_params=ignored or None
    )


def give_gradients(model: Parameters, device: torch.device) -> None:
    """Set the gradient of every parameter, laid out like it: random numbers, equal on replicas."""
    for i, p in enumerate(model.parameters()):
        seed = 1000 + i
        if isinstance(p, DTensor):
            coordinate = p.device_mesh.get_coordinate()
            assert coordinate is not None
            for place, number in zip(p.placements, coordinate, strict=True):
                seed = seed * 64 + (0 if isinstance(place, Replicate) else number)
        generator = torch.Generator(device).manual_seed(seed)
        local = p.to_local() if isinstance(p, DTensor) else p
        values = torch.randn(local.shape, generator=generator, device=device)
        p.grad = like(values, p)


def like(local: torch.Tensor, p: torch.nn.Parameter) -> torch.Tensor:
    """Return this rank's part of a tensor that is laid out like a parameter."""
    if not isinstance(p, DTensor):
        return local
    return DTensor.from_local(
        local, p.device_mesh, p.placements, run_check=False, shape=p.shape, stride=p.stride()
    )


def whole(x: torch.Tensor) -> torch.Tensor:
    """Return a tensor with the parts of all ranks."""
    return x.full_tensor() if isinstance(x, DTensor) else x


def exposed_time(step: Callable[[], Any], device: torch.device, steps: int = 3) -> float:
    """Return the time in a step in which the slowest GPU runs only kernels of NCCL [ms]."""
    dist.barrier()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(steps):
            step()
        torch.cuda.synchronize()
    kernels = [
        Kernel(event.time_range.start, event.time_range.end, event.name)
        for event in profile.events() or []
        if event.device_type == torch.autograd.DeviceType.CUDA and not event.is_user_annotation
    ]
    longest = torch.tensor(exposed(kernels) / steps / 1e3, device=device)
    dist.all_reduce(longest, op=dist.ReduceOp.MAX)
    return float(longest)


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
    matrices, rest = divided(model)
    optimizers = [torch.optim.Muon(matrices, lr=1e-3), torch.optim.AdamW(rest, lr=1e-3, fused=True)]

    def step() -> None:
        for optimizer in optimizers:
            optimizer.step()

    return step


def dion_muon(model: Parameters, mesh: DeviceMesh) -> Callable[[], Any]:
    """Return a step of dion's Muon on the matrices and its AdamW on the rest."""
    matrices, rest = divided(model)
    groups = [{"params": matrices}, {"params": rest, "algorithm": "adamw"}]
    where = mesh["shard"] if mesh.ndim > 1 else mesh
    plain = not isinstance(matrices[0], DTensor)
    made = importlib.import_module("dion").Muon(
        groups, distributed_mesh=mesh.get_group() if plain else where, lr=1e-3
    )
    return made.step  # type: ignore[no-any-return]


def torchtitan_muon(model: Parameters) -> Callable[[], None]:
    """Return a step of torchtitan's DistMuon on FSDP2's matrices and fused AdamW on the rest.

    As in torchtitan's recipes, one rank owns each whole matrix, and two layers are a bucket.
    """
    flex_shard = importlib.import_module("torchtitan.distributed.flex_shard")
    matrices, rest = divided(model)
    name_of = {p: name for name, p in model.named()}
    names = [name_of[p] for p in matrices]
    layers = [name.rsplit(".", 2)[0] for name in names]
    pairs = itertools.zip_longest(*[iter(dict.fromkeys(layers))] * 2)
    owned = flex_shard.ComputeLayout({"shard": flex_shard.Owned()})
    muon = flex_shard.build_dist_muon(
        [{"params": matrices, "param_names": names}],
        compute_sharding_by_fqn=dict.fromkeys(names, owned),
        bucket_configs=[
            flex_shard.BucketConfig(tuple(f"{layer}.*" for layer in pair if layer), str(pair[0]))
            for pair in pairs
        ],
        lr=1e-3,
    )
    adamw = torch.optim.AdamW(rest, lr=1e-3, fused=True)

    def step() -> None:
        muon.step()
        adamw.step()

    return step


def divided(model: Parameters) -> tuple[list[torch.nn.Parameter], list[torch.nn.Parameter]]:
    """Return the matrices and the other parameters."""
    matrices = [p for p in model.parameters() if p.ndim == 2 and min(p.shape) > 1]
    rest = [p for p in model.parameters() if not (p.ndim == 2 and min(p.shape) > 1)]
    return matrices, rest


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

    def replay(owner: torch.optim.Optimizer = optimizer) -> None:
        graph.replay()  # it reads and writes the state that `owner` keeps alive

    return replay


def contestants(
    model: Parameters, mesh: DeviceMesh, layout: str, *, peers: bool, on_gpu: bool, brief: bool
) -> dict[str, Callable[[], Callable[[], Any]]]:
    """Return what is timed, by name; each is made when its turn comes."""
    common = of_layout(layout, mesh)
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
        groups: dict[Any, list[torch.nn.Parameter]] = {}
        for p in model.parameters():
            key = p.device_mesh if isinstance(p, DTensor) else None
            groups.setdefault(key, []).append(p)  # torch steps parameters of one mesh at a time
        by_mesh = [{"params": params} for params in groups.values()]
        return torch.optim.AdamW(by_mesh, lr=1e-3, fused=True, capturable=on_gpu)

    named: dict[str, Callable[[], Callable[[], Any]]] = {
        "AdamW, fused": lambda: adamw().step,
        "HybridMuon": hybrid(),
    }
    if on_gpu:
        named["AdamW, fused, captured"] = lambda: captured(adamw())
        named["HybridMuon, captured"] = lambda: captured(hybrid_with({}, capturable=True))
    if peers:
        named["torch Muon + AdamW"] = lambda: torch_muon(model)
        named["dion Muon + AdamW"] = lambda: dion_muon(model, mesh)
        if layout == "fsdp":
            named["torchtitan DistMuon + AdamW"] = lambda: torchtitan_muon(model)
        five = {"schedule": "keller-jordan", "magma_muon": False}
        named["Muon, five steps"] = lambda: hybrid_with({}, **five).step
        if on_gpu:
            named["Muon, five steps, captured"] = lambda: captured(
                hybrid_with({}, **five, capturable=True)
            )
    if brief:
        return named
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
    }


def of_layout(layout: str, mesh: DeviceMesh) -> dict[str, Any]:
    """Return HybridMuon's arguments for a layout."""
    if layout in REPLICATED:
        return {"replicas": mesh}
    # Weights of experts are (experts, in, out).
    return {"expert_patterns": ["*.experts.*"]} if layout == "ep" else {}


def disagreement(shapes: Shapes, mesh: DeviceMesh, device: torch.device, layout: str) -> float:
    """Return the largest relative difference of a parameter's update between sharded and whole after two steps."""
    many = sharded(shapes, mesh, device, layout)
    one = Parameters(shapes, device)
    start = [p.detach().clone() for p in one.parameters()]
    arguments = of_layout(layout, mesh)
    optimizer = HybridMuon(many.named(), lr=1e-3, **arguments)
    arguments.pop("replicas", None)
    reference = HybridMuon(one.named(), lr=1e-3, **arguments)
    give_gradients(many, device)
    for p, q in zip(many.parameters(), one.parameters(), strict=True):
        q.grad = whole(p.grad) if p.grad is not None else None
    for _ in range(2):
        optimizer.step()
        reference.step()
    differences = [
        (whole(p.detach()) - q.detach()).norm() / (q.detach() - begin).norm()
        for p, q, begin in zip(many.parameters(), one.parameters(), start, strict=True)
    ]
    return float(torch.stack(differences).max())


def step_times(
    name: str, layout: str, args: argparse.Namespace, device: torch.device
) -> Iterator[dict[str, Any]]:
    """Time every contestant's step on one set in one layout; yield each."""
    on_gpu = device.type == "cuda"
    mesh = mesh_of(layout, device)
    shapes = shapes_of(name)
    few = shapes_of("2x2048") if name == "llm" else shapes
    difference = float("nan")
    if not args.alone and (not args.only or "HybridMuon" in args.only):
        difference = disagreement(few, mesh, device, layout)

    def chosen(model: Parameters) -> dict[str, Callable[[], Callable[[], Any]]]:
        everyone = contestants(
            model, mesh, layout, peers=args.peers, on_gpu=on_gpu, brief=args.brief
        )
        return {title: everyone[title] for title in args.only or everyone if title in everyone}

    for title in chosen(Parameters([], device)):
        model = sharded(shapes, mesh, device, layout)
        give_gradients(model, device)
        entry = {
            "set": name,
            "ranks": dist.get_world_size(),
            "layout": layout,
            "alone": bool(args.alone),
            "optimizer": title,
            "disagreement": difference,
        }
        try:
            entry |= measure(chosen(model)[title], args, device)
        except (RuntimeError, AssertionError, TypeError, ValueError, ImportError) as error:
            reason = (str(error).splitlines() or [type(error).__name__])[0][:80]
            entry |= {"optimizer": f"{title} ({reason})"} | dict.fromkeys(MEASURED, float("nan"))
        del model
        yield entry
    settings = ShardedSettings(state="sharded" if layout == "zero1" else "replicated")
    model = sharded(shapes, mesh, device, layout)
    plan = HybridMuon(model.named(), lr=1e-3, sharded=settings, **of_layout(layout, mesh)).plan
    if dist.get_rank() == 0:
        print(f"\n{name}, {layout}, {dist.get_world_size()} ranks:\n{plan.describe()}", flush=True)


MEASURED = ("gpu_ms", "host_ms", "returned_ms", "exposed_ms", "held_mib", "peak_mib")


def measure(
    make: Callable[[], Callable[[], Any]], args: argparse.Namespace, device: torch.device
) -> dict[str, float]:
    """Return times [ms] and memory [MiB] of a contestant's step: `MEASURED`."""
    on_gpu = device.type == "cuda"
    before = torch.cuda.memory_allocated() if on_gpu else 0
    step = make()
    step()
    held = peak = exposed_ms = float("nan")
    if on_gpu:
        torch.cuda.synchronize()
        held = (torch.cuda.memory_allocated() - before) / 2**20
        torch.cuda.reset_peak_memory_stats()
    gpu, host, returned = seconds(step, device, args.repeats)
    if on_gpu:
        peak = (torch.cuda.max_memory_allocated() - before) / 2**20 - held
        exposed_ms = exposed_time(step, device)
    return dict(zip(MEASURED, (gpu, host, returned, exposed_ms, held, peak), strict=True))


def report(steps: list[Any]) -> None:
    """Print the table."""
    print(
        "\n| set | layout | optimizer | GPU ms | host ms | returns ms | exposed ms | held MiB | peak MiB beside "
        "| differs from one GPU |"
    )
    print("|---" * 10 + "|")
    for e in steps:
        ours = f"{e['disagreement']:.1e}" if e["optimizer"] == "HybridMuon" else ""
        sizes = f"{e['held_mib']:.0f} | {e['peak_mib']:.0f}"
        times = " | ".join(f"{e[key]:.2f}" for key in MEASURED[:4])
        cells = [e["set"], e["layout"], e["optimizer"], times, sizes, ours]
        print(f"| {' | '.join(cells)} |")


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
        "--peers", action="store_true", help="torch.optim.Muon, slow under DTensor, and dion too"
    )
    parser.add_argument("--layouts", nargs="+", choices=LAYOUTS, default=["fsdp"])
    parser.add_argument("--brief", action="store_true", help="HybridMuon as it is, and the others")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="time these alone, in this order")
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
    machine = torch.cuda.get_device_name() if on_gpu else "CPU, gloo"
    about = {"machine": machine, "torch": torch.__version__, "ranks": dist.get_world_size()}
    steps: list[dict[str, Any]] = []
    for name in args.sets:
        for layout in args.layouts:
            for entry in step_times(name, layout, args, device):
                steps.append(entry)
                if dist.get_rank() == 0:
                    print(
                        f"{name}, {layout}, {entry['optimizer']}: {entry['gpu_ms']:.2f} ms",
                        flush=True,
                    )
                    if args.out:
                        args.out.write_text(json.dumps({**about, "results": steps}, indent=1))
    if dist.get_rank() == 0:
        print(f"\n{machine} × {dist.get_world_size()}, torch {torch.__version__}")
        report(steps)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
