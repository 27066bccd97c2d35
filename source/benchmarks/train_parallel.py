"""Training on several ranks against one process with the larger batch: agreement, restarts, time of a step.

    python source/benchmarks/train_parallel.py --ranks 2 --device cuda --out FILE.md
    python source/benchmarks/train_parallel.py --ranks 4 --device cuda --stuck

A generated system in float64 (network of DeePMD's water example) is trained for a few steps at every `zero_stage`, and
under HSDP where there are four ranks or more. "Deviation" is the largest difference of weights and of optimizer state
from one process on the same device with N times the batch, relative to the largest element of the same tensor. The
half-way directory of stage 3 is then continued at stage 1, and the half-way file of stage 1 at stage 2; both must end
where the run in one go did. Times are means over the steps after the first ten, from the run's own log, reading of
batches included. "Held up" is how long a save keeps rank 0 from training. NCCL on GPUs, gloo on CPUs. With `--stuck`
the data of rank 1 take forever in the third step: how long until the others end, and what they say.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import platform
import re
import socket
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.multiprocessing as mp

from deepmd_muon.model.checkpoint_file import read_checkpoint

STEPS = 6


@dataclasses.dataclass
class Job:
    """One training of all ranks in a folder of its own."""

    name: str
    content: dict[str, Any]
    restart: str | None = None
    port: int = 0


def write_system(folder: Path, nframes: int, edge: int) -> Path:
    """Write a periodic system of edge³ atoms of two types near lattice sites, with random labels."""
    random = np.random.default_rng(0)
    part = folder / "set.000"
    part.mkdir(parents=True)
    sites = np.stack(np.meshgrid(*[np.arange(edge)] * 3), -1).reshape(-1, 3) * 2.2
    natoms = len(sites)
    (folder / "type.raw").write_text("\n".join(str(k % 2) for k in range(natoms)))
    (folder / "type_map.raw").write_text("O\nH")
    np.save(part / "coord.npy", (sites + random.uniform(-0.3, 0.3, (nframes, natoms, 3))).reshape(nframes, -1))
    np.save(part / "box.npy", np.tile(2.2 * edge * np.eye(3).ravel(), (nframes, 1)))
    np.save(part / "energy.npy", random.standard_normal(nframes) * natoms**0.5)
    np.save(part / "force.npy", random.standard_normal((nframes, 3 * natoms)))
    return folder


def content(data: Path, args: argparse.Namespace, **training: Any) -> dict[str, Any]:
    """Return an input; `training` adds to its section."""
    descriptor = {"type": "se_e2_a", "sel": "auto", "rcut": 6.0 if args.edge > 3 else 4.0, "seed": 1}
    descriptor |= {"neuron": args.neuron, "axis_neuron": 8, "type_one_side": True}
    defaults = {"numb_steps": STEPS, "save_freq": STEPS // 2, "disp_freq": 1000, "seed": 3, "checkpoint_format": "both"}
    return {
        "model": {
            "type_map": ["O", "H"],
            "data_stat_nbatch": 1000,  # every frame, whatever the batch
            "descriptor": descriptor,
            "fitting_net": {"neuron": args.fitting, "seed": 1},
        },
        "learning_rate": {"type": "exp", "start_lr": 1e-3, "stop_lr": 1e-5, "decay_steps": 5},
        "loss": {"type": "ener"},
        "optimizer": {"type": "HybridMuon", "precision": "float64"},
        "training": {
            "training_data": {"systems": [str(data)], "batch_size": 1},
            "enable_ema": True,
            **defaults,
            **training,
        },
    }


def work(rank: int, world: int, device: str, place: Path, jobs: list[Job], ends: Any) -> None:
    """Run all jobs as one of the ranks."""
    from deepmd_muon.argcheck import load
    from deepmd_muon.train import run
    from deepmd_muon.train.trainer import Trainer

    original = Trainer.save

    def save(self: Trainer) -> None:
        start = time.perf_counter()
        original(self)
        with Path(f"saves{rank}.txt").open("a") as file:
            file.write(f"{time.perf_counter() - start}\n")

    Trainer.save = save  # type: ignore[method-assign]  # timed
    torch.set_num_threads(1)
    if device == "cpu":
        os.environ["DEVICE"] = "cpu"
    for job in jobs:
        folder = place / job.name
        folder.mkdir(parents=True, exist_ok=True)
        os.chdir(folder)
        if rank == 0:
            Path("input.json").write_text(json.dumps(job.content))
        if world > 1:
            address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(job.port)}
            os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), **address)
            while not Path("input.json").exists():
                time.sleep(0.01)
            time.sleep(0.1)
        try:
            end = str(run(load("input.json"), restart=job.restart, log_level="INFO", log_path="train.log"))
        except Exception as error:
            end = f"{type(error).__name__}: {error}"
        ends.put((job.name, rank, end))


def ports(count: int) -> list[int]:
    """Return free ports."""
    sockets = [socket.socket() for _ in range(count)]
    for each in sockets:
        each.bind(("127.0.0.1", 0))
    found = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return found


def run_jobs(world: int, device: str, place: Path, jobs: list[Job]) -> None:
    """Run jobs one after another on `world` new processes; any that does not end well ends this script."""
    for job, port in zip(jobs, ports(len(jobs)), strict=True):
        job.port = port
    context = mp.get_context("spawn")
    ends = context.SimpleQueue()
    processes = [context.Process(target=work, args=(r, world, device, place, jobs, ends)) for r in range(world)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    found = []
    while not ends.empty():
        found.append(ends.get())
    bad = [end for end in found if end[2] != "0"]
    if bad or len(found) != world * len(jobs):
        raise SystemExit(f"{len(found)} of {world * len(jobs)} ended, of them badly: {bad}")


def tensors(node: Any, path: str = "") -> dict[str, torch.Tensor]:
    """Return every tensor of a checkpoint by its path."""
    if isinstance(node, torch.Tensor):
        return {path: node} if node.numel() and node.is_floating_point() else {}
    items = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, (list, tuple)) else ()
    return {key: value for name, inner in items for key, value in tensors(inner, f"{path}/{name}").items()}


def deviation(reference: Path, other: Path) -> tuple[float, float]:
    """Return the largest relative difference of weights, and of optimizer state but for Magma's float32 scores."""
    one, many = read_checkpoint(reference), read_checkpoint(other)
    worst = []
    for part in ("model", "optimizer"):
        a, b = tensors(one[part]), tensors(many[part])
        assert a.keys() == b.keys()
        differences = [
            float((b[name] - x).abs().max() / x.abs().max().clamp(min=1e-300))
            for name, x in a.items()
            if not name.endswith("magma_score")
        ]
        worst.append(max(differences))
    return worst[0], worst[1]


def step_time(folder: Path) -> float:
    """Return the mean time of the counted steps [ms], from the log."""
    (seconds,) = re.findall(r"average training time: ([\d.]+) s/batch", (folder / "train.log").read_text())
    return float(seconds) * 1e3


def held_up(folder: Path) -> float:
    """Return the median time that a save took rank 0 [ms], the first left out."""
    return statistics.median(map(float, (folder / "saves0.txt").read_text().split()[1:])) * 1e3


def compare(place: Path, data: Path, args: argparse.Namespace) -> str:
    """Train, restart and time; return the page."""
    world, device = args.ranks, args.device
    layouts = [(f"stage {stage}", {"zero_stage": stage}) for stage in range(4)]
    if world >= 4:
        hybrid = {"zero_stage": 3, "data_parallel_replicate_degree": 2}
        layouts.append(("stage 3, HSDP 2", hybrid))
    longer = {"numb_steps": 10 + args.steps, "disp_freq": 10, "save_freq": 10**6, "checkpoint_format": "file"}
    alone = content(data, args)
    alone["training"]["training_data"]["batch_size"] = world
    timed = content(data, args, **longer)
    run_jobs(1, device, place, [Job("alone", alone), Job("alone, timed", timed)])
    jobs = [Job(name, content(data, args, **layout)) for name, layout in layouts]
    moves = [
        ("stage 3", "dcp", "stage 1", {"zero_stage": 1}),
        ("stage 1", "pt", "stage 2", {"zero_stage": 2}),
    ]
    restarted = [
        Job(f"{old} to {new}", content(data, args, **layout), str(place / old / f"model.ckpt-{STEPS // 2}.{form}"))
        for old, form, new, layout in moves
    ]
    timings = [Job(f"{name}, timed", content(data, args, **layout, **longer)) for name, layout in layouts]
    often = {"zero_stage": 3, "numb_steps": 20, "save_freq": 4}
    forms = [
        (form, Job(f"saves, {form}", content(data, args, checkpoint_format=form, **often))) for form in ("file", "dcp")
    ]
    run_jobs(world, device, place, [*jobs, *restarted, *timings, *(job for _, job in forms)])
    end = f"model.ckpt-{STEPS}.pt"
    lines = ["| run | deviation of weights | of optimizer state | ms a step |", "|---|---|---|---|"]
    lines.append(f"| one process, batch 1 | | | {step_time(place / 'alone, timed'):.1f} |")
    for job, timing in zip(jobs, timings, strict=True):
        weights, state = deviation(place / "alone" / end, place / job.name / end)
        lines.append(f"| {job.name} | {weights:.1e} | {state:.1e} | {step_time(place / timing.name):.1f} |")
    for job, (_, _, new, _) in zip(restarted, moves, strict=True):
        weights, state = deviation(place / new / end, place / job.name / end)
        lines.append(f"| {job.name}, half-way, against one go | {weights:.1e} | {state:.1e} | |")
    took = ", ".join(f"{form} {held_up(place / job.name):.1f} ms" for form, job in forms)
    return "\n".join([*lines, "", f"Held up by one save at stage 3: {took}."])


def stuck_worker(rank: int, world: int, device: str, place: Path, job: Job, ends: Any) -> None:
    """Run one job in which the data of rank 1 take forever in the third step."""
    from deepmd_muon.data import DataLoader

    original, count = DataLoader.next, 0

    def late(self: DataLoader) -> Any:
        nonlocal count
        count += 1
        if rank == 1 and count == 3:
            time.sleep(600)
        return original(self)

    DataLoader.next = late  # type: ignore[method-assign]  # an accident
    work(rank, world, device, place, [job], ends)


def show_stuck(place: Path, data: Path, args: argparse.Namespace) -> str:
    """Let rank 1 be stuck and return what rank 0 says, and when."""
    job = Job("stuck", content(data, args, rank_timeout=args.patience), port=ports(1)[0])
    context = mp.get_context("spawn")
    ends = context.SimpleQueue()
    given = (args.ranks, args.device, place, job, ends)
    processes = [context.Process(target=stuck_worker, args=(r, *given)) for r in range(args.ranks)]
    start = time.monotonic()
    for process in processes:
        process.start()
    processes[0].join(args.patience + 120)
    took = time.monotonic() - start
    for process in processes:
        process.kill()
    said = "" if ends.empty() else ends.get()[2]
    log = (place / "stuck" / "train.log").read_text().splitlines()
    said = said or next((line for line in log if "ERROR" in line), "nothing")
    return f"rank 0 ended after {took:.1f} s (start included, it waits {args.patience:g} s) and said: {said}"


def main() -> None:
    """Run what is asked for, and print it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--steps", type=int, default=50, help="timed steps")
    parser.add_argument("--edge", type=int, default=6, help="edge³ atoms")
    parser.add_argument("--neuron", type=int, nargs="+", default=[25, 50, 100])
    parser.add_argument("--fitting", type=int, nargs="+", default=[240, 240, 240])
    parser.add_argument("--stuck", action="store_true", help="only show how a stuck rank ends the run")
    parser.add_argument("--patience", type=float, default=10.0, help="rank_timeout with --stuck [s]")
    parser.add_argument("--out", type=Path, help="write the page to this file")
    args = parser.parse_args()
    if args.ranks < 2:
        parser.error("--ranks must be at least 2")
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        data = write_system(place / "data", 8, args.edge)
        table = show_stuck(place, data, args) if args.stuck else compare(place, data, args)
    on = (
        f"{args.ranks} × {torch.cuda.get_device_name()}, NCCL" if args.device == "cuda" else f"{args.ranks} ranks, gloo"
    )
    title = f"{on}, {platform.machine()}, torch {torch.__version__}, {args.edge**3} atoms, float64"
    page = f"{title}\n\n{table}\n"
    print(page)
    if args.out:
        args.out.write_text(page)


if __name__ == "__main__":
    main()
