"""Run under deepmd-kit's Python: trainings in its own trainer, one after the other, with every step on record.

Usage: python train_in_deepmd_kit.py JOBS, in JSON: a list of ``{"input", "restart", "record", "backend"}``.

Where RANK is set the trainings are distributed over gloo. deepmd-kit cannot start that by itself, since it picks a
GPU for each rank. Three calls are redirected for that, and nothing else: `init_process_group` takes gloo,
`torch.cuda.set_device` does nothing, and `DistributedDataParallel` is not given a GPU.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)


def main(jobs_file: str) -> None:
    """Run the jobs; a record holds gradients and learning rate of each step, and the weights around them."""
    jobs = json.loads(Path(jobs_file).read_text())
    rank = int(os.environ.get("RANK", "0"))
    for number, job in enumerate(jobs):
        if "RANK" in os.environ:
            _use_cpus(f"{jobs_file}.{number}.store")
        _run(job, write=rank == 0)


def _run(job: dict[str, Any], write: bool) -> None:
    output = job["input"] + ".out"
    if job.get("backend") == "pt_expt":
        from deepmd.pt_expt.entrypoints import main as entry

        with _recorded(entry, "deepmd.pt_expt.train.training") as record:
            entry.train(
                job["input"], restart=job.get("restart"), skip_neighbor_stat=True, output=output
            )
    else:
        from deepmd.pt.entrypoints import main as entry

        with _recorded(entry, "deepmd.pt.train.training") as record:
            entry.train(
                job["input"],
                None,
                job.get("restart"),
                None,
                None,
                "",
                skip_neighbor_stat=True,
                output=output,
            )
    if write:
        torch.save(record, job["record"])


@contextlib.contextmanager
def _recorded(entry: Any, trainers: str) -> Iterator[dict[str, Any]]:
    """Keep what every step of the trainer's optimizer saw and made."""
    module: Any = sys.modules[trainers]
    trainer_class = module.Trainer
    record: dict[str, Any] = {"steps": [], "weights": []}
    trainer: list[Any] = []

    class Recorded(trainer_class):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            trainer.append(self)
            super().__init__(*args, **kwargs)

    def before(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if optimizer is trainer[0].optimizer:
            named = dict(trainer[0].wrapper.named_parameters())
            step = {
                "optimizer": f"{type(optimizer).__module__}.{type(optimizer).__name__}",
                "lr": float(optimizer.param_groups[0]["lr"]),
                "gradients": {
                    name: _whole(p.grad) for name, p in named.items() if p.grad is not None
                },
            }
            record["steps"].append(step)
            if not record["weights"]:
                record["weights"].append({name: _whole(p) for name, p in named.items()})

    def after(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if optimizer is trainer[0].optimizer:
            record["weights"].append(
                {name: _whole(p) for name, p in trainer[0].wrapper.named_parameters()}
            )

    module.Trainer = Recorded
    hooks = [register_optimizer_step_pre_hook(before), register_optimizer_step_post_hook(after)]
    try:
        yield record
    finally:
        module.Trainer = trainer_class
        for hook in hooks:
            hook.remove()


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    full = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return full.detach().clone()


def _use_cpus(store: str) -> None:
    """Redirect the calls with which deepmd-kit gives each rank a GPU."""
    start = dist.distributed_c10d.init_process_group
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group = lambda **_: start(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=world
    )
    torch.cuda.set_device = lambda *_: None
    import deepmd.pt.train.training as module

    def replicate(
        wrapper: torch.nn.Module, device_ids: Any, output_device: Any, **kwargs: Any
    ) -> torch.nn.Module:
        return DistributedDataParallel(wrapper, **kwargs)

    module.DDP = replicate


if __name__ == "__main__":
    main(*sys.argv[1:])
