"""Training and optimizer steps on 1, 2, 4 and 8 GPUs of one machine, by whole runs of `dp train`.

    python source/benchmarks/several_gpus.py --data WATER --gpus 1 2 4 8 --out FILE.json

Numbers of GPUs that the machine lacks are left out. WATER holds DeePMD's example systems (data_0 to
data_2, 192 atoms); without --data, frames of 192 atoms with random labels are made. Every GPU has
the same batch. Parts, about in the order in which they run:

killed      a rank is killed in a step: when and how the others end
training    ms a step, atoms per second and GPU. One GPU: a run on each GPU at the same time. Of two
            GPUs, stages 0 and 1 run at the same time if the machine has four. A figure is the
            median over intervals of a run; a ratio is to the slowest single GPU.
weights     float64 weights after 100 steps on N GPUs against one with N times the batch
restarts    checkpoints that go from N GPUs to 1 and back, and to more GPUs
optimizer   the optimizer alone, `sharded_step.py`: dpa3, a transformer of 1.2 G parameters, experts
balance     10,000 compositions of molecules: costs of the ranks, time of a step
waiting     the share of a step in which the GPU of rank 0 does nothing but exchange and wait; with `training`
peers       the optimizer alone: torch's Muon, and dion's if it is importable
optimizer2  the optimizer alone on half of the GPUs

Results are written after each. Each has its own limit of time, and all end after --most seconds;
what has not begun by then is left out, and named. A
model of deepmd-kit (mini: DPA-4 Mini) needs deepmd-kit on PYTHONPATH. Without GPUs the ranks are
processes on CPUs that exchange through gloo, as a check of the script itself.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib.util
import json
import platform
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from data_sets import water, write_set
from hosted_step import MODELS, TYPE_MAP
from overlap import Kernel, exposed
from runs import OPTIONS, TRAIN, Job, RunError, Team, milliseconds, write_input
from several_gpus_checks import kill_rank, restart_on_others, weights_after
from training_step import make_input

from deepmd_muon.data import DataLoader, NeighborCache, open_systems
from deepmd_muon.data.sampling.balance import cost_of_frame

PARTS = (
    *("killed", "training", "weights", "restarts"),
    *("optimizer", "balance", "waiting", "peers", "optimizer2"),
)
#: Most seconds of one entry of a part, with the start of its processes.
LIMITS = {
    "training": 110.0,
    "weights": 150.0,
    "restarts": 120.0,
    "killed": 75.0,
    "optimizer": 60.0,
    "balance": 90.0,
}
OTHER_LIMIT = 45.0
#: A failed job runs again if so many seconds are left.
RETRY = 30.0
ATOMS = 192
#: Lines of a log that tell how steps ran have one of these.
NOTED = ("graph", "launched one", "interpolated on")


@dataclasses.dataclass(frozen=True)
class Length:
    """Steps of a run, and of the intervals over which its time is measured."""

    steps: int
    interval: int


CASES = {
    "se_e2_a:f64-b1": Length(2000, 100),
    "se_e2_a:f64-b8": Length(1500, 100),
    "dpa3:f32-b1": Length(400, 25),
    "se_e2_a:f64-b32": Length(600, 50),
    "mini:f32-b1": Length(200, 20),
    "dpa1:f64-b1": Length(500, 25),
    "dpa3:f32-b8": Length(120, 10),
}
MOLECULES = "molecules10000:dpa3:f32-bmix:512"
LAYOUTS = ("ddp", "zero1", "fsdp", "hsdp", "tp", "ep")


class LateError(RunError):
    """A part took too long."""


class Machine:
    """Teams of 1, 2, 4, … GPUs; those of one size have all GPUs together."""

    def __init__(self, widths: Sequence[int]) -> None:
        self.widths = sorted(widths)
        self.gpus = self.widths[-1]
        self.teams = {
            width: [Team(range(first, first + width)) for first in range(0, self.gpus, width)]
            for width in self.widths
        }
        self.open()

    def open(self) -> None:
        """Start all processes."""
        for teams in self.teams.values():
            for team in teams:
                team.open()

    def close(self) -> None:
        """End all processes."""
        for teams in self.teams.values():
            for team in teams:
                team.close()

    @contextlib.contextmanager
    def limited(self, seconds: float) -> Iterator[None]:
        """Interrupt a `with` block after so long with a LateError; waits for its jobs end first."""
        Team.deadline = time.monotonic() + seconds

        def interrupt(*_: object) -> None:
            raise LateError(f"took longer than {seconds:.0f} s")

        signal.signal(signal.SIGALRM, interrupt)
        signal.setitimer(signal.ITIMER_REAL, seconds + 3.0)
        try:
            yield
        except LateError:
            self.close()
            raise
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0.0)

    def run(self, width: int, jobs: Sequence[Job]) -> list[str]:
        """Run each job on GPUs of its own, as many jobs at a time as fit; return their errors.

        A job that fails runs once more, in new processes, unless it took too long.
        """
        teams = self.teams[width]
        errors: list[str] = []
        with ThreadPoolExecutor(len(teams)) as pool:
            for first in range(0, len(jobs), len(teams)):
                errors += pool.map(run_twice, teams, jobs[first : first + len(teams)])
        return errors

    def run_on_all(self, job: Job) -> None:
        """Run a job on all GPUs together; raises RunError."""
        self.teams[self.gpus][0].run(job)


def run_twice(team: Team, job: Job) -> str:
    """Run a job, again if it fails early; return the last error, empty if there was none."""
    error = error_of(team, job)
    if error and time.monotonic() < Team.deadline - RETRY:
        return error_of(team, job)
    return error


def error_of(team: Team, job: Job) -> str:
    """Run a job; return its error, empty if there was none."""
    try:
        team.run(job)
    except RunError as error:
        return str(error)
    return ""


@dataclasses.dataclass
class Bench:
    """What all parts need.

    Attributes
    ----------
    machine
        Its GPUs.
    data
        Folder with the water systems.
    folder
        Of all runs.
    scale
        Factor of all numbers of steps, for a trial.
    times
        Measured steps of the part `training` [ms], by case, number of GPUs and stage.
    """

    machine: Machine
    data: Path
    folder: Path
    scale: float = 1.0
    times: dict[tuple[str, int, int], float] = dataclasses.field(default_factory=dict)

    def job(self, case: str, name: str, **training: Any) -> Job:
        """Return a run of a case in a new folder, with these keys in its section `training`."""
        place = self.folder / f"{case}_{name}".replace(":", "_")
        length = CASES[case]
        interval = max(1, round(self.scale * length.interval))
        own = {
            "numb_steps": interval * (length.steps // length.interval),
            "disp_freq": interval,
            "jsonl_file": "steps.jsonl",
            "save_freq": 100_000_000,
            **training,
        }
        write_input(place, input_of(case, self.data, self.folder, own))
        return Job(place, (*TRAIN, *OPTIONS), deepmd_kit=case.startswith("mini"))


def input_of(case: str, data: Path, folder: Path, own: dict[str, Any]) -> dict[str, Any]:
    """Return the input of a case, with its own keys of the section `training`."""
    kind, sizes = case.split(":")
    if kind != "mini":
        content = make_input(kind, sizes, "HybridMuon", own["numb_steps"], data, own)
        section = content["training"]["training_data"]
        section["systems"] = filled(section["systems"], section["batch_size"])
        return content
    if importlib.util.find_spec("deepmd") is None:
        raise RunError("deepmd-kit is not on PYTHONPATH")
    system = folder / "water_of_mini"
    if not system.exists():
        water(system, ATOMS)
    own |= {"enable_tf32": True, "gradient_max_norm": 5.0}
    content = make_input("se_e2_a", sizes, "HybridMuon", own["numb_steps"], data, own)
    content["training"]["training_data"]["systems"] = [str(system)]
    fitting = {"neuron": [0], "precision": "float32", "seed": 42}
    content["model"] = {"type_map": TYPE_MAP, **MODELS[kind], "fitting_net": fitting}
    content["optimizer"] = {"type": "HybridMuon"}
    return content


def filled(systems: Sequence[str], frames: int) -> list[str]:
    """Return the systems that a batch size divides: a rank with fewer frames waits for the others.

    Raises
    ------
    RunError
        If there are none.
    """
    numbers = [system.nframes for system in open_systems(systems)]
    fitting = [name for name, n in zip(systems, numbers, strict=True) if n % frames == 0]
    if not fitting:
        raise RunError(f"no system can be cut into batches of {frames} frames: they have {numbers}")
    return fitting


# ----- training ----------------------------------------------------------------------------------


def time_case(bench: Bench, case: str) -> dict[str, Any]:
    """Return the times of a case on one GPU and on several, at stages 0 and 1."""
    machine = bench.machine
    singles = [bench.job(case, f"1_{gpu}") for gpu in range(machine.gpus)]
    errors = {"1": machine.run(1, singles)}
    one = [round(milliseconds(job.folder), 3) for job in finished(singles, errors["1"])]
    frames = int(case.rpartition("-b")[2])
    found: dict[str, Any] = {
        "frames": frames,
        "1 GPU, ms": one,
        "1 GPU, atoms/s": rate(frames, statistics.median(one)) if one else None,
    }
    jobs = list(singles)
    for width in machine.widths[1:] if one else ():
        stages = [bench.job(case, f"{width}_{stage}", zero_stage=stage) for stage in (0, 1)]
        errors[str(width)] = machine.run(width, stages)
        for stage, job in enumerate(stages):
            if job not in finished(stages, errors[str(width)]):
                continue
            step = round(milliseconds(job.folder), 3)
            bench.times[case, width, stage] = step
            found[f"{width} GPUs, stage {stage}"] = {
                "ms": step,
                "ratio": round(step / max(one), 3) if one else None,
                "atoms/s and GPU": rate(frames, step),
            }
        jobs += stages
    found["notes"] = sorted({note for job in jobs for note in notes(job)})
    failed = [error for of_width in errors.values() for error in of_width if error]
    return found | ({"failed": failed} if failed else {})


def finished(jobs: Sequence[Job], errors: Sequence[str]) -> list[Job]:
    """Return the jobs without an error."""
    return [job for job, error in zip(jobs, errors, strict=True) if not error]


def rate(frames: int, step: float) -> int:
    """Return atoms per second of one GPU, from the time of its step [ms]."""
    return round(1e3 * frames * ATOMS / step)


def notes(job: Job) -> list[str]:
    """Return what a log says of graphs and pieces."""
    return [
        line.partition("] ")[2].partition("INFO")[2].strip()[:160]
        for line in job.log().splitlines()
        if any(word in line for word in NOTED)
    ]


# ----- waiting -----------------------------------------------------------------------------------


def waiting(bench: Bench, case: str, stage: int, steps: int = 10) -> dict[str, Any]:
    """Return the share of exposed exchanges in the last steps of a short run on all GPUs."""
    step = bench.times.get((case, bench.machine.gpus, stage))
    if step is None:
        raise RunError("the part `training` has not measured this case")
    length = {"numb_steps": 6 * steps, "disp_freq": 6 * steps}
    job = bench.job(case, f"waiting_{stage}", zero_stage=stage, profiling=True, **length)
    bench.machine.run_on_all(job)
    kernels = read_kernels(job.folder / "timeline.json")
    if not kernels:
        raise RunError("the profile has no kernels of a GPU")
    window = 1e3 * steps * step  # µs
    end = max(kernel.end for kernel in kernels)
    late = [kernel for kernel in kernels if kernel.begin > end - window]
    return {
        "share": round(exposed(late) / window, 4),
        "exposed us a step": round(exposed(late) / steps, 1),
        "kernels a step": round(len(late) / steps, 1),
    }


def read_kernels(path: Path) -> list[Kernel]:
    """Return the kernels of a trace for chrome://tracing."""
    return [
        Kernel(event["ts"], event["ts"] + event["dur"], event["name"])
        for event in json.loads(path.read_text())["traceEvents"]
        if event.get("cat") == "kernel"
    ]


# ----- molecules of many sizes -------------------------------------------------------------------


def costs_of_ranks(bench: Bench, batch: int | str, ranks: int) -> dict[str, float]:
    """Return the mean of the largest cost of a rank over the mean cost, in random and balanced order.

    As for `balance_batches`, a frame costs as much as the first of its system.
    """
    systems, names = write_set(bench.folder / "molecules10000", "molecules10000", bench.data)
    shares = {}
    for balance in (False, True):
        loader = DataLoader(
            open_systems(systems, names),
            batch,
            seed=1,
            cache=NeighborCache(6.0, [120], by_type=False, ntypes=len(names)),
            balance=balance,
        )
        of_system = [
            cost_of_frame(loader.cache.frame(system, 0, system.frames(np.zeros(1, int)), 0))
            for system in loader.systems
        ]
        plans = [loader.draw() for _ in range(512 // ranks * ranks)]
        costs = [sum(len(frames) * of_system[k] for k, frames in plan.parts) for plan in plans]
        steps = np.array(costs).reshape(-1, ranks)
        name = "balanced" if balance else "random"
        shares[name] = round(float(steps.max(1).mean() / steps.mean()), 4)
    return shares


def balance_costs(bench: Bench) -> dict[str, Any]:
    """Return costs of ranks for 10,000 compositions."""
    return {
        f"largest cost of {width} ranks over the mean, batch {batch}": costs_of_ranks(
            bench, batch, width
        )
        for width in bench.machine.widths[1:]
        for batch in (1, "mix:512")
    }


def balance_step(bench: Bench, width: int, balanced: bool) -> dict[str, Any]:
    """Return the time of a step with 10,000 compositions."""
    name, kind, sizes = MOLECULES.split(":", 2)
    systems, names = write_set(bench.folder / name, name, bench.data)
    interval = max(1, round(20 * bench.scale))
    intervals = 50
    own = {"disp_freq": interval, "jsonl_file": "steps.jsonl"}
    content = make_input(kind, "f32-b1", "HybridMuon", intervals * interval, bench.data, own)
    content["model"]["type_map"] = names
    section = {"systems": systems, "batch_size": sizes.partition("-b")[2]}
    content["training"]["training_data"] |= section
    place = bench.folder / f"{name}_{width}_{balanced}"
    training = {**content["training"], "balance_batches": balanced}
    write_input(place, {**content, "training": training})
    job = Job(place, (*TRAIN, *OPTIONS))
    (error,) = bench.machine.run(width, [job])
    if error:
        raise RunError(error)
    # Up to step 240 ranks meet shapes for the first or second time, and record their graphs.
    return {"ms": round(milliseconds(place, skip=intervals // 2), 3), "notes": notes(job)}


# ----- the optimizer alone -----------------------------------------------------------------------


PEERS = ("torch Muon + AdamW", "dion Muon + AdamW")


def optimizer(bench: Bench, layout: str, name: str, width: int, *only: str) -> dict[str, Any]:
    """Return the times of `sharded_step.py` for one layout and set."""
    script = Path(__file__).with_name("sharded_step.py")
    place = bench.folder / f"optimizer_{layout}_{name}_{width}_{len(only)}"
    words = [str(script), "--layouts", layout, "--sets", name, "--repeats", "7", "--brief"]
    words += ["--peers", "--only", *only] if only else []
    job = Job(place, (*words, "--out", "times.json"))
    error = ""
    try:
        bench.machine.teams[width][0].run(job)
    except RunError as failure:
        error = str(failure)
    path = place / "times.json"
    found = json.loads(path.read_text()) if path.exists() else {}
    return found | ({"failed": error} if error else {})


# ----- all ---------------------------------------------------------------------------------------


def work_of(bench: Bench, cases: Sequence[str], sets: Sequence[str]) -> list[tuple[str, Any]]:
    """Return names and functions of everything to do, most valuable first."""
    gpus = bench.machine.gpus
    plan: list[tuple[str, Callable[[], dict[str, Any]]]] = []

    def add(name: str, function: Callable[..., dict[str, Any]], *arguments: Any) -> None:
        plan.append((name, lambda: function(bench, *arguments)))

    if gpus > 1:
        add("killed", lambda b: kill_rank(b.machine, b.data, b.folder / "killed"))
    for number, case in enumerate(cases):
        add(f"training {case}", time_case, case)
        if number != min(2, len(cases) - 1) or gpus == 1:
            continue
        add("weights", lambda b: weights_after(b.machine, b.data, b.folder / "weights", b.scale))
        add("restarts", lambda b: restart_on_others(b.machine, b.data, b.folder / "restarts"))
    if gpus == 1:
        return plan
    for name in sets:
        for layout in LAYOUTS:
            fits = gpus >= 4 or layout not in ("hsdp", "tp")
            if fits and (layout == "ep") == name.startswith("moe"):
                add(f"optimizer {layout} {name}", optimizer, layout, name, gpus)
    add("balance costs", balance_costs)
    add("balance 1 GPU", balance_step, 1, False)
    add(f"balance {gpus} GPUs, random order", balance_step, gpus, False)
    add(f"balance {gpus} GPUs, balanced order", balance_step, gpus, True)
    for case in cases:
        add(f"waiting {case} stage 0", waiting, case, 0)
    dense = [name for name in sets if not name.startswith("moe")]
    for name in dense:
        for layout in ("fsdp", "ddp"):
            add(f"peers {layout} {name}", optimizer, layout, name, gpus, *PEERS)
    for case in cases:
        add(f"waiting {case} stage 1", waiting, case, 1)
    if gpus // 2 in bench.machine.widths and gpus > 2:
        for name in dense:
            for layout in ("ddp", "zero1", "fsdp"):
                add(f"optimizer2 {layout} {name}", optimizer, layout, name, gpus // 2)
    return plan


def make_water(folder: Path) -> Path:
    """Write three systems of water with random labels."""
    for number in range(3):
        water(folder / f"data_{number}", ATOMS, frames=96)
    return folder


def main(arguments: Sequence[str] | None = None) -> None:
    """Do everything in order, and write the results after each."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, help="folder with data_0, data_1, data_2")
    parser.add_argument("--gpus", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--cases", nargs="*", choices=tuple(CASES), default=tuple(CASES))
    parser.add_argument(
        "--sets", nargs="*", default=["dpa3", "llm", "moe"], help="of sharded_step.py"
    )
    parser.add_argument("--scale", type=float, default=1.0, help="factor of numbers of steps")
    parser.add_argument("--most", type=float, default=480.0, help="seconds after which all ends")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args(arguments)
    begun = time.monotonic()
    has_gpus = torch.cuda.is_available()
    widths = [n for n in options.gpus if not has_gpus or n <= torch.cuda.device_count()]
    about = {
        "machine": f"{max(widths)} × {torch.cuda.get_device_name()}" if has_gpus else "CPU, gloo",
        "torch": torch.__version__,
        "python": platform.python_version(),
        "command": " ".join(["several_gpus.py", *(arguments or sys.argv[1:])]),
    }
    results: list[dict[str, Any]] = []
    machine = Machine([*{1, *widths}])
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        data = options.data.resolve() if options.data else make_water(folder / "water")
        bench = Bench(machine, data, folder, options.scale)
        parts = {*options.parts}
        if "waiting" in parts:
            parts.add("training")  # its steps are what the waiting is a share of
        for what, work in work_of(bench, options.cases, options.sets):
            if what.split()[0] not in parts:
                continue
            start = time.monotonic()
            if start > begun + options.most:
                found: dict[str, Any] = {"failed": "not begun in time"}
            else:
                limit = LIMITS.get(what.split()[0], OTHER_LIMIT)
                try:
                    with machine.limited(min(limit, begun + options.most - start)):
                        found = work()
                except (RunError, OSError, ValueError, KeyError) as error:
                    found = {"failed": f"{type(error).__name__}: {error}"}
            results.append({"what": what, **found, "took": round(time.monotonic() - start, 1)})
            print(f"{time.monotonic() - begun:6.1f} s  {json.dumps(results[-1])}", flush=True)
            options.out.write_text(json.dumps({**about, "results": results}, indent=1))
        machine.close()


if __name__ == "__main__":
    main()
