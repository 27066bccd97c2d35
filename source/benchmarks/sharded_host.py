"""What a sharded step costs the host: milliseconds and operations of a step whose arithmetic is next to nothing.

    python source/benchmarks/sharded_host.py [--ranks 2] [--set dpa3] [--profile 25]

The parameters of a molecular model (shapes/), every dimension cut to at most 16, are sharded by FSDP2 over gloo ranks
on CPUs, and orthogonalization is replaced by a copy. What is left is what launching such a step costs on any device:
the median over steps of the processor time of rank 0's thread in `step()`, without that inside the collectives, and the
operations that torch dispatches (on a GPU each but views is one or more launches).
"""

from __future__ import annotations

import argparse
import cProfile
import functools
import json
import os
import pstats
import statistics
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode

from deepmd_muon.optim import HybridMuon
from deepmd_muon.optim.state.host_memory import local_of, with_local

LARGEST = 16
REPEATS = 200


class Operations(TorchDispatchMode):
    """Count what is dispatched."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[str(func)] += 1
        return func(*args, **(kwargs or {}))


def parameters(name: str) -> list[tuple[str, Tensor]]:
    """Return names and small tensors."""
    rows = json.loads((Path(__file__).parent / "shapes" / f"{name}.json").read_text())
    torch.manual_seed(0)
    return [(row[0], torch.randn([min(n, LARGEST) for n in row[1]])) for row in rows if 0 not in row[1]]


def run(rank: int, args: argparse.Namespace) -> None:
    """Take steps on one rank; rank 0 prints."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=args.port, RANK=str(rank), WORLD_SIZE=str(args.ranks))
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (args.ranks,))
    waited = [0.0]
    _leave_out_collectives(waited)
    _leave_out_orthogonalization()

    def placed(x: Tensor) -> Tensor:
        return distribute_tensor(x, mesh, [Shard(0)])

    whole = parameters(args.set)
    named = [(name, nn.Parameter(placed(x) if x.ndim else x)) for name, x in whole]
    optimizer = HybridMuon(named, lr=1e-3)
    host = []
    for i in range(REPEATS):
        for _, p in named:
            p.grad = with_local(p, local_of(p).detach().clone())  # laid out by the parameter's own spec, as by FSDP2
        if i == REPEATS // 2 and args.profile and rank == 0:
            profile = cProfile.Profile()
            profile.enable()
        waited[0], start = 0.0, time.thread_time()
        optimizer.step()
        host.append((time.thread_time() - start - waited[0]) * 1e3)
    with Operations() as operations:
        optimizer.step()
    if args.profile and rank == 0:
        profile.disable()
        pstats.Stats(profile).sort_stats("tottime").print_stats(args.profile)
    if rank == 0:
        late = REPEATS // 2
        count = sum(operations.counts.values())
        print(
            f"{args.set}, {len(whole)} parameters, {args.ranks} ranks, torch {torch.__version__}: "
            f"{statistics.median(host[late:]):.2f} ms of host time a step, {count} operations, "
            f"{operations.counts.most_common(args.most)}"
        )
    dist.barrier()
    dist.destroy_process_group()


def _leave_out_collectives(waited: list[float]) -> None:
    """Add up the time inside collectives, from their start and in their wait."""
    original = dist.all_to_all_single

    class Timed:
        def __init__(self, work: Any) -> None:
            self.work = work

        def wait(self) -> None:
            start = time.thread_time()
            self.work.wait()
            waited[0] += time.thread_time() - start

    def timed(*args: Any, **kwargs: Any) -> Any:
        start = time.thread_time()
        work = original(*args, **kwargs)
        waited[0] += time.thread_time() - start
        return Timed(work) if work is not None else None

    dist.all_to_all_single = timed


def _leave_out_orthogonalization() -> None:
    """Orthogonalization is a copy; Magma's sums are those of a GPU, in few operations."""
    import deepmd_muon.optim.update.muon as muon
    from deepmd_muon.optim.rules import magma

    joined = functools.partial(magma.piece_sums_of_many, joined=True)
    magma.piece_sums_of_many = joined

    muon.polar_factors = lambda matrices, settings: list(torch._foreach_mul(list(matrices), 1.0))


def main() -> None:
    """Start the ranks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--set", default="dpa3")
    parser.add_argument("--port", default="29611")
    parser.add_argument("--profile", type=int, default=0, help="lines of rank 0's profile")
    parser.add_argument("--most", type=int, default=12, help="operations to name")
    args = parser.parse_args()
    mp.spawn(run, args=(args,), nprocs=args.ranks)


if __name__ == "__main__":
    main()
