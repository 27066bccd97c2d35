"""HybridMuon on a mixture of experts, by one process or several.

    python train.py                                                       # one process
    torchrun --nproc-per-node 2 train.py                                  # FSDP2: every weight in parts
    torchrun --nproc-per-node 4 train.py --expert-parallel                # whole experts, the rest by FSDP2
    torchrun --nproc-per-node 2 train.py --save ckpt --steps 300 --stop 150 ; python train.py --load ckpt
    python train.py --compare                                             # the table of README.md

The loss is what the text's entropy leaves to be learned, in nats per symbol. It does not depend on the number of ranks,
up to rounding: each takes its share of the same sequences.
"""

from __future__ import annotations

import argparse
import datetime
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from model import (
    EXPERTS,
    HEADS,
    LAYERS,
    MixtureOfExperts,
    Text,
    Transformer,
    prediction_loss,
    training_loss,
)
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

from deepmd_muon.optim import HybridMuon
from deepmd_muon.optim.qk_clip import FusedQKV, LogitRecorder, QKClip

BATCH = 32
CLIP = QKClip(
    tuple(
        FusedQKV(f"blocks.{i}.attention", f"blocks.{i}.attention.qkv.weight", HEADS)
        for i in range(LAYERS)
    ),
    threshold=10.0,
)
TABLES = [
    "embedding.weight",
    "positions",
    "head.weight",
    "*.router.weight",
]  # matrices that AdamW steps
# Learning rates; README.md has others.
RATES = {"adamw": 3e-3, "torch_muon": 3e-2, "hybrid_muon": 3e-2}
Optimizers = list[torch.optim.Optimizer]


def hybrid_muon(model: nn.Module, lr: float, schedule: str = "8+2") -> Optimizers:
    """Make HybridMuon: each expert, and each of queries, keys and values, is a matrix of its own."""
    return [
        HybridMuon(
            model.named_parameters(),
            lr,
            weight_decay=0.01,
            magma_muon=False,
            layout="out_in",  # torch stores weights as (out, in)
            schedule=schedule,
            adamw_patterns=TABLES,
            expert_patterns=["blocks.0.moe.experts.*"],  # (experts, out, in)
            splits=[
                "*.qkv.weight: rows 3",
                f"blocks.1.moe.experts.*: rows {EXPERTS}",
            ],  # (experts · out, in)
            qk_clip=CLIP,
        )
    ]


def torch_muon(model: nn.Module, lr: float) -> Optimizers:
    """Make torch's Muon for the matrices in the layers, and AdamW for the rest; it takes fused weights whole."""
    named = dict(model.named_parameters())
    inside = [
        p
        for name, p in named.items()
        if name.startswith("blocks.") and p.ndim == 2 and "router" not in name
    ]
    rest = [p for p in named.values() if not any(p is q for q in inside)]
    muon = torch.optim.Muon(inside, lr, weight_decay=0.01, adjust_lr_fn="match_rms_adamw")
    return [muon, torch.optim.AdamW(rest, lr, (0.9, 0.95), weight_decay=0.01)]


def adamw(model: nn.Module, lr: float) -> Optimizers:
    """Make torch's AdamW."""
    return [torch.optim.AdamW(model.parameters(), lr, (0.9, 0.95), weight_decay=0.01)]


def average_gradient(p: torch.Tensor) -> None:
    """Divide an expert's gradient, a sum over the tokens of all ranks, by their number, as FSDP does."""
    if p.grad is not None:
        p.grad /= dist.get_world_size()


def shard(model: Transformer, mesh: DeviceMesh, *, expert_parallel: bool) -> None:
    """Shard all weights by FSDP2, but for the experts under expert parallelism: each rank has some of them, whole."""
    kept: set[nn.Parameter] = set()
    for moe in [
        module for module in model.modules() if isinstance(module, MixtureOfExperts)
    ] * expert_parallel:
        moe.expert_parallel = True
        for name, p in list(moe.experts.named_parameters()):
            mine = nn.Parameter(distribute_tensor(p.detach(), mesh, [Shard(0)]))
            mine.register_post_accumulate_grad_hook(average_gradient)
            setattr(moe.experts, name, mine)
            kept.add(mine)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, ignored_params=kept)
    fully_shard(model, mesh=mesh, ignored_params=kept)


def mean_over_ranks(x: torch.Tensor) -> float:
    """Return the mean of a scalar over all ranks."""
    x = x.detach().clone()
    if dist.is_initialized():
        dist.all_reduce(x)
        x /= dist.get_world_size()
    return x.item()


class Run:
    """A model and its optimizers in training.

    Parameters
    ----------
    make
        Makes the optimizers from model and learning rate.
    lr, steps, seed
        Learning rate, which falls linearly to zero within so many steps; seed of weights and text.
    expert_parallel
        Keep experts whole, each on one rank.
    """

    def __init__(
        self,
        make: Callable[..., Optimizers],
        lr: float,
        steps: int,
        seed: int = 0,
        *,
        expert_parallel: bool = False,
    ) -> None:
        torch.manual_seed(seed)
        self.text, self.lr, self.steps, self.seed, self.done = Text(), lr, steps, seed, 0
        self.rank, self.world = (
            (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        )
        if BATCH % self.world or EXPERTS % self.world:
            raise SystemExit(
                f"{BATCH} sequences and {EXPERTS} experts cannot be shared among {self.world} ranks"
            )
        self.model = Transformer()
        if dist.is_initialized():
            shard(
                self.model, init_device_mesh("cpu", (self.world,)), expert_parallel=expert_parallel
            )
        self.optimizers = make(self.model, lr)
        clips = isinstance(self.optimizers[0], HybridMuon)
        self.recorder = LogitRecorder(self.model, CLIP, every=4) if clips else None

    def step(self) -> float:
        """Take a step; return the loss above the text's entropy, over all ranks."""
        batch = self.text.draw(BATCH, 1000 + 100_000 * self.seed + self.done)[
            self.rank :: self.world
        ]
        loss, minimized = training_loss(self.model, batch)
        minimized.backward()
        options: dict[str, Any] = (
            {} if self.recorder is None else {"qk_logits": self.recorder.take()}
        )
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = self.lr * (1.0 - self.done / self.steps)
            optimizer.step(**options)
            optimizer.zero_grad()
        self.done += 1
        return mean_over_ranks(loss) - self.text.entropy

    @torch.no_grad()
    def test(self) -> float:
        """Return the loss on text that training does not see."""
        return mean_over_ranks(
            prediction_loss(self.model, self.text.draw(512, 2)[self.rank :: self.world])
        ) - (self.text.entropy)

    def save(self, folder: Path) -> None:
        """Write a checkpoint, every rank its part."""
        weights, state = get_state_dict(self.model, self.optimizers)
        content = {"model": weights, "optimizers": state, "done": torch.tensor(self.done)}
        dcp.save(content, checkpoint_id=folder, no_dist=self.world == 1)

    def load(self, folder: Path) -> None:
        """Restore what any number of ranks has written."""
        weights, state = get_state_dict(self.model, self.optimizers)
        content = {"model": weights, "optimizers": state, "done": torch.tensor(0)}
        dcp.load(content, checkpoint_id=folder, no_dist=self.world == 1)
        set_state_dict(
            self.model, self.optimizers, model_state_dict=weights, optim_state_dict=state
        )
        self.done = int(content["done"])

    def train(self, stop: int, every: int) -> list[tuple[int, float]]:
        """Train up to a step; return the mean loss of every so many steps, printed by rank 0."""
        curve: list[tuple[int, float]] = []
        recent: list[float] = []
        while self.done < stop:
            recent.append(self.step())
            if self.done % every == 0 or self.done == stop:
                curve.append((self.done, sum(recent) / len(recent)))
                recent = []
                if self.rank == 0:
                    print(f"step {self.done:5d}  excess loss {curve[-1][1]:.6f}", flush=True)
        return curve


def compare(steps: int, seeds: int, rates: dict[str, float]) -> None:
    """Print the loss curves of all contestants, means over seeds."""
    contestants: dict[str, tuple[str, Callable[..., Optimizers]]] = {
        "torch.optim.AdamW": ("adamw", adamw),
        "torch.optim.Muon + AdamW": ("torch_muon", torch_muon),
        "HybridMuon": ("hybrid_muon", hybrid_muon),
    }
    for schedule in ("polar-express-6", "polar-express-5", "polar-express-4"):
        contestants[f"HybridMuon, {schedule}"] = (
            "hybrid_muon",
            lambda model, lr, schedule=schedule: hybrid_muon(model, lr, schedule),
        )
    rows = []
    for title, (key, make) in contestants.items():
        start = time.perf_counter()
        curves, tests = [], []
        for seed in range(seeds):
            run = Run(make, rates[key], steps, seed)
            curves.append(run.train(steps, max(1, steps // 6)))
            tests.append(run.test())
        means = [
            sum(losses) / seeds
            for losses in zip(*([loss for _, loss in curve] for curve in curves), strict=True)
        ]
        spent = 1000 * (time.perf_counter() - start) / steps / seeds
        cells = [*(f"{x:.3f}" for x in means), f"{sum(tests) / seeds:.3f}", f"{spent:.0f}"]
        rows.append(f"| {title} | {rates[key]:g} | {' | '.join(cells)} |")
    columns = ["optimizer", "lr", *(f"{step}" for step, _ in curves[0]), "fresh text", "ms a step"]
    print("\n".join([f"| {' | '.join(columns)} |", "|---" * len(columns) + "|", *rows]))


HELD: list[Any] = []  # until the process ends


def leave() -> None:
    """End the process group when all ranks are done.

    A gloo thread that is the last to free an exchange's tensors needs the interpreter, and aborts the process if that
    has ended. So the last exchange is kept, and the threads have time to free the others.
    """
    last = dist.all_reduce(torch.zeros(1), async_op=True)
    last.wait()
    HELD.append(last)
    dist.destroy_process_group()
    time.sleep(0.1)


def main() -> None:
    """Train or compare."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--lr", type=float, help="default: RATES of this file")
    parser.add_argument(
        "--steps", type=int, default=300, help="within which the learning rate falls to zero"
    )
    parser.add_argument("--stop", type=int, help="stop after this step")
    parser.add_argument("--every", type=int, default=30, help="steps between printed losses")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--schedule", default="8+2", help="of the orthogonalization")
    parser.add_argument("--expert-parallel", action="store_true")
    parser.add_argument("--save", type=Path)
    parser.add_argument("--load", type=Path)
    parser.add_argument("--compare", action="store_true")
    args = parser.parse_args()
    if "WORLD_SIZE" in os.environ:  # started by torchrun
        dist.init_process_group("gloo", timeout=datetime.timedelta(minutes=30))
        torch.set_num_threads(1)
    if args.compare:
        compare(args.steps, args.seeds, {key: args.lr or rate for key, rate in RATES.items()})
        return
    run = Run(
        lambda model, lr: hybrid_muon(model, lr, args.schedule),
        args.lr or RATES["hybrid_muon"],
        args.steps,
        expert_parallel=args.expert_parallel,
    )
    (optimizer,) = run.optimizers
    if args.load:
        run.load(args.load)
    elif run.rank == 0:
        print(optimizer.routing, "\n")
    run.train(args.stop or args.steps, args.every)
    if args.save:
        run.save(args.save)
    loss = run.test()
    if run.rank == 0:
        print(f"excess loss on fresh text {loss:.6f}")
    if dist.is_initialized():
        leave()


if __name__ == "__main__":
    main()
