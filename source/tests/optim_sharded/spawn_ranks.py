"""Run many cases in one spawn per number of ranks: gloo on the CPU, or NCCL."""

from __future__ import annotations

import datetime
import logging
import os
import socket
import time
import traceback

import forked
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

TIMEOUT = datetime.timedelta(seconds=300)
# Functions that run on all ranks together, with the numbers of ranks.
CASES = {}


def on_ranks(*worlds):
    """Mark a function as a case for these numbers of ranks.

    Four ranks add meshes of two axes; three, in the slow tests, cut every matrix unevenly. What
    depends on neither is for two, and for eight in the slow tests. On GPUs all cases run.
    """

    def register(function):
        CASES[function] = worlds
        return function

    return register


def cases_on(world=None):
    """Return names and functions of the cases for a number of ranks, or of all."""
    return [
        (function.__name__.replace("_", " "), function)
        for function, worlds in CASES.items()
        if world is None or world in worlds
    ]


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def _begin(rank, world, port, device="cpu"):
    os.environ.update(
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(world)
    )
    torch.set_num_threads(1)
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(
        logging.ERROR
    )  # about its own all-gathers
    if device == "cuda":
        torch.cuda.set_device(rank)
        torch.set_default_device(f"cuda:{rank}")
    backend = "gloo" if device == "cpu" else "cpu:gloo,cuda:nccl"
    dist.init_process_group(backend, rank=rank, world_size=world, timeout=TIMEOUT)


def join(rank, world, port, function, queue):
    """Run a function on one rank and report what it raises."""
    _begin(rank, world, port)
    try:
        function()
    except Exception as error:
        queue.put(f"{type(error).__name__}: {error}")


def _run(rank, world, port, cases, results, device):
    _begin(rank, world, port, device)
    for name, case in cases:
        start = time.perf_counter()
        try:
            case()
            outcome = None
        except Exception:
            outcome = traceback.format_exc()
        results.put((rank, name, outcome, time.perf_counter() - start))
        if (
            outcome
        ):  # the collectives of the others may be out of step: leaving ends them with an error
            break
    dist.destroy_process_group()


def run_cases(world, cases, device="cpu"):
    """Run (name, function) cases; return tracebacks by (name, rank) and seconds by name.

    On "cuda" each rank has a GPU, on which tensors are made unless told otherwise. A failing case
    ends the run, since its collectives may be out of step.

    One case alone, from this folder with PYTHONPATH=..:../../.. (the helpers of all tests, and this
    checkout) and `python -c`::

        from sharded_cases import small_buckets
        from spawn_ranks import run_cases

        print(run_cases(2, [("small buckets", small_buckets)]))
    """
    results = forked.context().SimpleQueue()
    arguments = world, free_port(), cases, results, device
    mp.start_processes(_run, arguments, nprocs=world, join=True, start_method="forkserver")
    failures, seconds = {}, {}
    while not results.empty():
        rank, name, outcome, took = results.get()
        seconds[name] = max(seconds.get(name, 0.0), took)
        if outcome:
            failures.setdefault((name, rank), outcome)
    return failures, seconds
