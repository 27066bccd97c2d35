"""Run many trainings in one set of processes: each job is a folder, an input and what happens to it."""

from __future__ import annotations

import contextlib
import json
import multiprocessing.connection
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from dataclasses import dataclass, field
from pathlib import Path

import forked
import torch

from deepmd_muon.optim.state.schema import ALL_MOMENTS
from deepmd_muon.train.ranks.ranks import local_part

# How long a rank is stuck [s]: longer than the others wait for it and need to say so.
PAUSE = 5.0
# File that a rank leaves in the folder of its job before it stops for good.
STOPPED = "stopped"
# All jobs of a spawn together take this long at most on a busy machine [s].
PATIENCE = 900.0


@dataclass
class Job:
    """One training on all ranks.

    `options` go to `deepmd_muon.train.run`; `launcher` is the program whose variables are set.

    `accident` names a function of this module. Every rank calls it with its number before the run. It replaces what
    the accident needs, often with `_replace` or `_in_step`, and returns a function that puts it back, or None.
    """

    folder: Path
    content: dict
    options: dict = field(default_factory=dict)
    accident: str | None = None
    launcher: str = "torchrun"
    port: int = 0


def free_ports(count):
    """Return ports that nobody uses, in the range of those that are made of Slurm's job numbers."""
    sockets = []
    while len(sockets) < count:
        each = socket.socket()
        try:
            each.bind(("127.0.0.1", random.randrange(15001, 30000)))
        except OSError:
            each.close()
        else:
            sockets.append(each)
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


def run_jobs(world, jobs):
    """Return for every job what each rank ended with: an exit status or an error, as text."""
    for job, port in zip(jobs, free_ports(len(jobs)), strict=True):
        job.folder.mkdir(parents=True, exist_ok=True)
        (job.folder / "input.json").write_text(json.dumps(job.content))
        job.port = port
    context = forked.context()
    ends = context.SimpleQueue()
    processes = [
        context.Process(target=_work, args=(rank, world, jobs, ends)) for rank in range(world)
    ]
    for process in processes:
        process.start()
    found = [{} for _ in jobs]
    _join(processes, [job.folder / STOPPED for job in jobs])
    while not ends.empty():
        number, rank, end, took = ends.get()
        found[number][rank] = end
        print(f"{jobs[number].folder.name}, rank {rank}: {took:.1f} s")
    return [[each.get(rank, "no answer") for rank in range(world)] for each in found]


def _join(processes, marks):
    """Wait until all processes have ended; one that is stopped for good is killed when the others have ended."""
    end = time.monotonic() + PATIENCE
    alive = processes
    while alive := [process for process in alive if process.is_alive()]:
        last_is_stopped = len(alive) == 1 and any(mark.exists() for mark in marks)
        if time.monotonic() > end or last_is_stopped:
            for process in alive:
                process.kill()
        multiprocessing.connection.wait([process.sentinel for process in alive], timeout=0.2)
    for process in processes:
        process.join()
        if process.exitcode:
            print(f"{process.name} ended with {process.exitcode}")


def run_commands(pairs):
    """Run `dp train input.json` as two ranks, each in a folder; return exit status and stderr of every rank."""
    context = forked.context()
    processes = []
    for folders, port in zip(pairs, free_ports(len(pairs)), strict=True):
        for rank, folder in enumerate(folders):
            processes.append(
                context.Process(
                    target=_command, args=(folder, _environment("torchrun", rank, 2, port))
                )
            )
            processes[-1].start()
    for process in processes:
        process.join(PATIENCE)
    told = [(folder / "stderr").read_text() for folders in pairs for folder in folders]
    return [(process.exitcode, text) for process, text in zip(processes, told, strict=True)]


def _command(folder, environment):
    from deepmd_muon.cli.main import main

    os.chdir(folder)
    os.environ.update(environment, DEVICE="cpu")
    with open("stderr", "w") as file:
        os.dup2(file.fileno(), 2)
    sys.exit(main(["train", "input.json"]))


def _environment(launcher, rank, world, port):
    """Return what a launcher sets."""
    if launcher == "srun":
        # The meeting point is made of the step's nodes and the job's number.
        job = {
            "SLURM_JOB_ID": str(port - 15000),
            "SLURM_STEP_ID": "0",
            "SLURM_STEP_NODELIST": "localhost",
        }
        return {
            **job,
            "SLURM_PROCID": str(rank),
            "SLURM_LOCALID": str(rank),
            "SLURM_NTASKS": str(world),
        }
    local = 0 if launcher == "nodes" else rank  # one process on each node
    place = {"RANK": str(rank), "LOCAL_RANK": str(local), "WORLD_SIZE": str(world)}
    return {**place, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}


def _work(rank, world, jobs, ends):
    from deepmd_muon.argcheck import load
    from deepmd_muon.train import run, systems

    systems.suspicions = lambda _: []  # a fifth of a short run, which has tests of its own
    torch.set_num_threads(1)
    os.environ["DEVICE"] = "cpu"
    for number, job in enumerate(jobs):
        os.chdir(job.folder)
        environment = _environment(job.launcher, rank, world, job.port)
        os.environ.update(environment)
        undo = globals()[job.accident](rank) if job.accident else None
        start = time.perf_counter()
        try:
            end = str(run(load("input.json"), log_level="WARNING", **job.options))
        except Exception as error:
            expected = type(error).__module__.startswith("deepmd_muon")
            end = (
                f"{type(error).__name__}: {error}"
                if expected or job.accident
                else traceback.format_exc()
            )
        if undo:
            undo()
        for name in environment:
            del os.environ[name]
        ends.put((number, rank, end, time.perf_counter() - start))


def _replace(owner, name, value):
    """Replace an attribute; return what puts it back."""
    original = getattr(owner, name)
    setattr(owner, name, value)
    return lambda: setattr(owner, name, original)


def _in_step(who, step, happen):
    """Call a function with the batch in one step of one rank."""

    def prepare(rank):
        from deepmd_muon.train.step.step import TrainingStep

        original, count = TrainingStep.__call__, 0

        def call(self, batch, *others):
            nonlocal count
            count += 1
            if (rank, count) == (who, step):
                happen(batch)
            return original(self, batch, *others)

        return _replace(TrainingStep, "__call__", call)

    return prepare


def _spoil(batch):
    """Make a position that is no number."""
    batch.structures.coord[0] = float("nan")


def _fail(text):
    def happen(batch):
        raise MemoryError(text)

    return happen


def _pause(batch):
    """Stop this process for a while."""
    subprocess.Popen(["sh", "-c", f"sleep {PAUSE}; kill -CONT {os.getpid()}"])
    os.kill(os.getpid(), signal.SIGSTOP)


def _stop_for_good(batch=None):
    """Stop this process, which `run_jobs` kills when the others have ended."""
    time.sleep(1.5)  # several notes to the others
    Path(STOPPED).touch()
    os.kill(os.getpid(), signal.SIGSTOP)


poison = _in_step(1, 3, _spoil)
interrupt = _in_step(1, 4, lambda _: os.kill(os.getpid(), signal.SIGTERM))
fail = _in_step(1, 3, _fail("rank 1 has had enough"))
fail_first = _in_step(0, 3, _fail("rank 0 has had enough"))  # through which they reach each other
die = _in_step(1, 3, lambda _: os._exit(7))
stop = _in_step(1, 3, _pause)
stop_first_stepping = _in_step(0, 3, _stop_for_good)


def _without_errors(rank):
    """Exchanges of a dead rank hang, as over NCCL; the reason that ends a process goes to a file."""
    import torch.distributed as dist

    from deepmd_muon.train.ranks import ranks

    all_reduce, watch = dist.all_reduce, ranks.Watch

    def hang(*tensors, **options):
        try:
            return all_reduce(*tensors, **options)
        except RuntimeError:
            time.sleep(PATIENCE)

    def give_up(reason):
        Path(f"reason{rank}").write_text(reason)
        os._exit(1)

    def make(**options):
        return watch(**options | {"errors_come": False, "give_up": give_up})

    undone = [_replace(dist, "all_reduce", hang), _replace(ranks, "Watch", make)]
    return lambda: [undo() for undo in undone]


def own_folder(rank):
    """Every rank has an input of its own."""
    os.chdir(str(rank))


def busy_port(rank):
    """Another program listens where the ranks want to meet."""
    from deepmd_muon.train.ranks import rendezvous

    patience, rendezvous.ANSWER = rendezvous.ANSWER, 1.0
    if rank:

        def undo():
            rendezvous.ANSWER = patience
            Path("ended").touch()

        return undo
    server = socket.create_server(("127.0.0.1", int(os.environ["MASTER_PORT"])))

    def answer():
        with contextlib.suppress(OSError):
            while True:
                server.accept()[0].close()

    threading.Thread(target=answer, daemon=True).start()

    def undo_first():
        rendezvous.ANSWER = patience
        while not Path("ended").exists():  # it listens for as long as rank 1 tries
            time.sleep(0.05)
        server.close()

    return undo_first


def sleep(rank):
    """The data of rank 1 take their time in the third step."""
    from deepmd_muon.data import DataLoader

    original, count = DataLoader.next, 0

    def slow(self):
        nonlocal count
        count += 1
        if rank == 1 and count == 3:
            time.sleep(PAUSE)
        return original(self)

    return _replace(DataLoader, "next", slow)


def _in_counting(happen):
    """Call a function while rank 0 counts neighbours."""
    from deepmd_muon.train import start

    original = start.resolve_sel

    def resolve(*args, **options):
        happen()
        return original(*args, **options)

    return _replace(start, "resolve_sel", resolve)


def count_long(rank):
    """Counting neighbours takes longer than ranks wait for each other."""
    return _in_counting(lambda: time.sleep(4.0))


def stop_first(rank):
    """Rank 0 is stopped while it counts neighbours, and never comes back."""

    return _in_counting(_stop_for_good)


def stop_second(rank):
    """Rank 1 is stopped before the first step, while rank 0 counts neighbours for long, and never comes back."""
    from deepmd_muon.train import start

    undo_counting = _in_counting(lambda: time.sleep(PATIENCE))
    original = start.check_same_run

    def compare(*args):
        original(*args)
        if rank == 1:
            _stop_for_good()

    undo_comparing = _replace(start, "check_same_run", compare)
    return lambda: (undo_comparing(), undo_counting())


def _after_steps(write):
    """Call a function with the optimizer after every step."""
    from deepmd_muon.train.step.step import TrainingStep

    original = TrainingStep.__call__

    def call(self, batch, *others):
        found = original(self, batch, *others)
        write(self.optimizer)
        return found

    return _replace(TrainingStep, "__call__", call)


def tell_plan(rank):
    """Rank 0 writes down the plan of its optimizer."""

    def write(optimizer):
        if rank == 0:
            Path("plan.txt").write_text(optimizer.plan.describe(owners=True))

    return _after_steps(write)


def tell_state(rank):
    """Every rank writes down how many elements of momenta and moments it holds."""

    def write(optimizer):
        moments = [
            x
            for state in optimizer.state.values()
            for key, x in state.items()
            if key in ALL_MOMENTS
        ]
        Path(f"state{rank}.txt").write_text(str(sum(local_part(x).numel() for x in moments)))

    return _after_steps(write)


def on_device(rank):
    """Steps wait for nothing, as on GPUs; what a CUDA graph replays is the same function."""
    from deepmd_muon.train import trainer
    from deepmd_muon.train.step.guard import DeviceGuard, on_nonfinite
    from deepmd_muon.train.step.step import TrainingStep
    from deepmd_muon.train.step.stepper import DeviceStepper
    from deepmd_muon.train.strategy.replicated import LateRequests, Replicated

    kept = trainer.build_stepper, Replicated._on_host, LateRequests.STEPS

    def build(strategy, loss, optimizer, ema, training, scalars, model, device_parts):
        cpu = torch.device("cpu")
        gather = strategy.ranks.gather_objects
        guard = device_parts.guard = device_parts.guard or DeviceGuard(
            on_nonfinite(optimizer), optimizer, cpu, 1, gather
        )
        step = TrainingStep(
            strategy, loss, optimizer, guard, training.gradient_max_norm, ema, model=model
        )
        return DeviceStepper(
            step,
            scalars,
            cpu,
            capture=False,
            keep_metrics=training.disp_avg,
            device_parts=device_parts,
        )

    trainer.build_stepper, Replicated._on_host, LateRequests.STEPS = build, False, 2

    def undo():
        trainer.build_stepper, Replicated._on_host, LateRequests.STEPS = kept

    return undo


def _both(first, second):
    def prepare(rank):
        undone = [first(rank), second(rank)]
        return lambda: [undo() for undo in undone]

    return prepare


# No exchange says that rank 1 has died.
die_unnoticed = _both(_without_errors, die)
poison_on_device, interrupt_on_device, die_on_device = (
    _both(on_device, each) for each in (poison, interrupt, die)
)
