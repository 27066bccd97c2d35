"""Time of one training step, ours against deepmd-kit's, on the same input, data and machine.

    python source/benchmarks/training_step.py --data WATER --deepmd-kit /path/to/other/venv/bin/dp
    python source/benchmarks/training_step.py --data WATER --cases f64-b1 f32-b1 --log steps.jsonl
    python source/benchmarks/training_step.py --data WATER --model dpa3 --cases f32-b1 --steps 2 6 --threads 2
    python source/benchmarks/training_step.py --data WATER --deepmd-kit here --in-one-run --steps 100 300

WATER holds DeePMD's example water systems (data_0, data_1, data_2, 192 atoms). deepmd-kit 3.2.0 lives in an
environment of its own, or, with `here`, in that of this process, where its Python is enough; without --deepmd-kit only
our times are shown.

Milliseconds a step are the slope of wall time between two lengths of `dp train`, display, validation and checkpoints
off: start-up is thus excluded, and everything that a user waits for is counted. Start-up itself is what the line
leaves at no steps. With --in-one-run, both lengths are those of one run, which displays these two steps. Processor
time, which counts all threads, is a slope as well; peak memory is that of the longer run. The trainers take turns, so
that a drift of the machine's speed meets all. `gpu_step.py` shows what a GPU does in a step.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch

# The networks of DeePMD's water examples.
MODELS: dict[str, dict[str, Any]] = json.loads(
    Path(__file__).with_name("water_models.json").read_text()
)["training"]
SCHEDULE = {"type": "exp", "decay_steps": 5000, "start_lr": 1e-3, "stop_lr": 1e-6}
PRECISIONS = {"f64": "float64", "f32": "float32"}


def make_input(
    kind: str, case: str, optimizer: str, steps: int, data: Path, own: dict[str, Any] | None
) -> dict[str, Any]:
    """Return the input of a model in a case such as f64-b8: precision and frames in a batch.

    `own` holds keys of `training` that only our trainer knows; None for deepmd-kit's.
    """
    precision, batch = case.split("-b")
    networks = MODELS[kind]
    model = {
        "type_map": ["O", "H"],
        "descriptor": {**networks["descriptor"], "precision": PRECISIONS[precision]},
        "fitting_net": {
            "neuron": [240, 240, 240],
            "resnet_dt": True,
            **networks["fitting_net"],
            "precision": PRECISIONS[precision],
        },
    }
    training: dict[str, Any] = {
        "training_data": {
            "systems": [str(data.resolve() / f"data_{i}") for i in range(3)],
            "batch_size": int(batch),
        },
        "numb_steps": steps,
        "seed": 1,
        "disp_training": False,
        "save_freq": 100_000_000,
    }
    training.update(own or {})
    section: dict[str, Any] = {"type": optimizer}
    # Explicit, so that runs of every length take the same steps and none measures descriptors first.
    if optimizer == "HybridMuon" and own is not None:
        section["lr_adjust_coeff"] = 8.64
    return {
        "model": model,
        "learning_rate": SCHEDULE,
        "loss": {"type": "ener"},
        "optimizer": section,
        "training": training,
    }


class Run(NamedTuple):
    """Wall time [s], processor time of all threads [s] and peak memory [MiB] of a training run.

    Attributes
    ----------
    gpu
        Peak of the memory that torch reserved on a GPU [MiB]; None on a CPU and where it is not known.
    displayed
        Seconds after which a displayed step was over.
    """

    seconds: float
    processor: float
    memory: float
    gpu: float | None = None
    displayed: dict[int, float] = {}  # noqa: RUF012 (a default that nobody changes)


def train(command: list[str], content: dict[str, Any], threads: int) -> Run:
    """Train from the command line."""
    with tempfile.TemporaryDirectory() as folder, Path(folder, "output").open("w+") as output:
        Path(folder, "input.json").write_text(json.dumps(content))
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": str(threads),
            "DP_INTRA_OP_PARALLELISM_THREADS": "0",
        }
        begun, start = time.time(), time.perf_counter()
        process = subprocess.Popen(
            [*command, "--pt", "train", "--skip-neighbor-stat", "input.json"],
            cwd=folder,
            env=environment,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        _, status, usage = os.wait4(process.pid, 0)
        seconds = time.perf_counter() - start
        output.seek(0)
        log = output.read()
    if status:
        raise SystemExit(f"{' '.join(command)} failed:\n{log[-3000:]}")
    displayed = show_log(log, begun)
    reserved = re.search(r"GPU memory: .* allocated, (\d+) MiB", log)
    gpu = float(reserved[1]) if reserved else None
    return Run(seconds, usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024, gpu, displayed)


def show_log(log: str, begun: float) -> dict[int, float]:
    """Print the lines of a log that bear a time, with the seconds since the process was started.

    Returns
    -------
    dict
        Seconds after which each displayed step was over.
    """
    displayed = {}
    for line in log.splitlines():
        found = re.match(r"\[([\d-]+ [\d:]+),(\d+)\] DEEPMD (.*)", line)
        if found:
            at = time.mktime(time.strptime(found[1], "%Y-%m-%d %H:%M:%S")) + int(found[2]) / 1e3
            print(f"    {at - begun:7.2f} s  {found[3].strip()[:150]}")
            if step := re.search(r"Batch +(\d+): total wall time", found[3]):
                displayed[int(step[1])] = at - begun
    return displayed


class Step(NamedTuple):
    """Wall and processor time of a step [ms], start-up [s] and peak memory [MiB], of a GPU's apart."""

    wall: float
    processor: float
    start_up: float
    memory: float
    gpu: float | None

    @classmethod
    def between(cls, short: Run, long: Run, lengths: tuple[int, int]) -> Step:
        """Return the slopes between two runs of these numbers of steps."""
        steps = lengths[1] - lengths[0]
        wall, processor = (
            (after - before) / steps for before, after in zip(short[:2], long[:2], strict=True)
        )
        return cls(
            1e3 * wall, 1e3 * processor, short.seconds - wall * lengths[0], long.memory, long.gpu
        )

    @classmethod
    def within(cls, run: Run, lengths: tuple[int, int]) -> Step:
        """Return the slope between two displayed steps of one run; its processor time is not known."""
        first, last = (run.displayed[number] for number in lengths)
        wall = (last - first) / (lengths[1] - lengths[0])
        return cls(1e3 * wall, float("nan"), first - wall * lengths[0], run.memory, run.gpu)


def measure(args: argparse.Namespace) -> dict[tuple[str, str, str], list[Step]]:
    """Return the measurements, one a round, of every trainer, case and optimizer."""
    measured = str(Path(__file__).with_name("measured_train.py"))
    ours = [sys.executable, measured, "ours"]
    trainers: dict[str, tuple[list[str], dict[str, Any] | None]] = {
        "ours": (ours, {"capture": "auto"})
    }
    if args.deepmd_kit:
        theirs = [shutil.which(args.deepmd_kit) or args.deepmd_kit]
        trainers["deepmd-kit"] = (
            [sys.executable, measured, "deepmd-kit"] if args.deepmd_kit == "here" else theirs,
            None,
        )
    found: dict[tuple[str, str, str], list[Step]] = {}
    for number in range(args.rounds):
        for case in args.cases:
            for optimizer in args.optimizers:
                for name, (command, own) in trainers.items():
                    inputs = [
                        make_input(args.model, case, optimizer, n, args.data, own)
                        for n in args.steps
                    ]
                    if args.warm_up and not number:
                        train(command, inputs[0], args.threads)
                    if args.in_one_run:
                        inputs[1]["training"].update(disp_training=True, disp_freq=args.steps[0])
                        runs = [train(command, inputs[1], args.threads)]
                        step = Step.within(runs[0], args.steps)
                    else:
                        runs = [train(command, content, args.threads) for content in inputs]
                        step = Step.between(*runs, args.steps)
                    found.setdefault((name, case, optimizer), []).append(step)
                    given = {
                        "model": args.model,
                        "trainer": name,
                        "case": case,
                        "optimizer": optimizer,
                    }
                    report(args.log, round=number, **given, runs=runs)
                    print(
                        f"round {number}: {name}, {case}, {optimizer}: {step.wall:.3f} ms a step, processor "
                        f"{step.processor:.3f} ms, peak {step.memory:.0f} MiB, on the GPU {step.gpu} MiB, "
                        f"start-up {step.start_up:.1f} s",
                        flush=True,
                    )
    return found


def show_table(found: dict[tuple[str, str, str], list[Step]]) -> None:
    """Print medians over the rounds, and their ratios to deepmd-kit's."""
    print(
        "| trainer | case | optimizer | ms a step | range | of deepmd-kit's | processor ms | range | of deepmd-kit's |",
        end="",
    )
    print(" peak MiB | on the GPU | start-up s |\n|" + "---|" * 12)
    for (name, case, optimizer), steps in found.items():
        cells = [name, case, optimizer]
        other = found.get(("deepmd-kit", case, optimizer))
        for kind in ("wall", "processor"):
            times = [getattr(step, kind) for step in steps]
            median = statistics.median(times)
            ratio = (
                f"{median / statistics.median(getattr(step, kind) for step in other):.3f}"
                if other
                else "–"
            )
            cells += [f"{median:.3f}", f"{min(times):.3f}–{max(times):.3f}", ratio]
        memory, start_up = (
            statistics.median(getattr(step, kind) for step in steps)
            for kind in ("memory", "start_up")
        )
        reserved = [step.gpu for step in steps if step.gpu is not None]
        cells += [
            f"{memory:.0f}",
            f"{statistics.median(reserved):.0f}" if reserved else "–",
            f"{start_up:.1f}",
        ]
        print("| " + " | ".join(cells) + " |")


def report(log: Path | None, **values: Any) -> None:
    """Append a line to the raw log."""
    if log is not None:
        with log.open("a") as file:
            file.write(json.dumps(values) + "\n")


def main() -> None:
    """Take turns, print medians and ratios."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--data", type=Path, required=True, help="folder with data_0, data_1, data_2"
    )
    parser.add_argument("--deepmd-kit", help="the dp command of deepmd-kit 3.2.0, or `here`")
    parser.add_argument("--model", default="se_e2_a", choices=tuple(MODELS))
    parser.add_argument(
        "--cases",
        nargs="+",
        default=["f64-b1", "f64-b8", "f64-b32", "f32-b1"],
        help="precision-bFRAMES",
    )
    parser.add_argument(
        "--warm-up", action="store_true", help="a run before the first, which fills caches on disk"
    )
    parser.add_argument(
        "--steps", type=int, nargs=2, default=(500, 2500), help="two lengths of a run"
    )
    parser.add_argument(
        "--in-one-run", action="store_true", help="time between two displayed steps of one run"
    )
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--optimizers", nargs="+", default=["HybridMuon"])
    parser.add_argument("--log", type=Path, help="file for the raw times, JSON lines")
    args = parser.parse_args()
    found = measure(args)
    device = (
        torch.cuda.get_device_name() if torch.cuda.is_available() else f"{platform.machine()} CPU"
    )
    print(
        f"\n{device}, {args.threads} threads, torch {torch.__version__}, slopes between {args.steps[0]} and "
        f"{args.steps[1]} steps, {args.rounds} rounds\n"
    )
    show_table(found)


if __name__ == "__main__":
    main()
