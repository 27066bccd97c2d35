"""Train a small model for very many steps with restarts, and see that memory, handles and files stay as they are.

    nice python source/tools/fuzz/soak.py --steps 1000000 --seconds 1200
    python source/tools/fuzz/soak.py --device cuda --steps 1000000

The trainings run one after another in this process, each ended by SIGTERM and continued with `--restart auto`, with
validation, best checkpoints, an average, all reports and 121 systems in 484 files of arrays. On a CPU the process may
open 256 files; it holds far fewer, as small systems are read into memory. At the end all weights are finite, and the
last checkpoint but one, continued in another folder, gives the last one's bits. With `--folder` a later call continues
the training. Exit status 0 says that all of this held.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import resource
import shutil
import signal
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np
import torch
from kills import same

from deepmd_muon.checkpoint_file.file import read_checkpoint
from deepmd_muon.cli.main import main as dp

SYSTEMS, FRAMES = 120, 3
#: Open files that a run on a CPU may have. The driver of a GPU needs more.
HANDLES = 256
#: Growth that counts as flat between the second part of a training and its last one [MiB]: what an allocator scatters.
FLAT = 24.0
#: Seconds between two looks at the run.
_LOOK = 0.05


@dataclass(frozen=True)
class Sample:
    """What a process holds at a step; memory [MiB] is that of the process, of tensors on the GPU, and of the GPU."""

    step: int
    memory: float
    handles: int
    threads: int
    files: int
    tensors: float = 0.0
    device: float = 0.0

    @classmethod
    def now(cls, run: Path, step: int) -> Sample:
        """Look at this process and the folder of its run."""
        status = dict(
            line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines()
        )
        found = (
            int(status["VmRSS"].split()[0]) / 1024,
            len(os.listdir("/proc/self/fd")),
            int(status["Threads"]),
        )
        files = len(os.listdir(run))
        if not torch.cuda.is_initialized():
            return cls(step, *found, files)
        free, total = torch.cuda.mem_get_info()
        return cls(
            step, *found, files, torch.cuda.memory_allocated() / 2**20, (total - free) / 2**20
        )


class SoakError(AssertionError):
    """Something has grown, or a restart gives other bits."""


def write_data(folder: Path) -> None:
    """Write many small systems of several sizes, and one to validate on."""
    draw = np.random.default_rng(1)
    for number in range(SYSTEMS + 1):
        part = folder / ("valid" if number == SYSTEMS else f"train/{number:03d}") / "set.000"
        part.mkdir(parents=True)
        natoms = 4 + number % 3
        (part.parent / "type.raw").write_text("0 " * natoms)
        (part.parent / "type_map.raw").write_text("H")
        coord = np.arange(natoms)[:, None] * np.array([1.3, 0.7, 0.4]) + draw.normal(
            0, 0.05, (FRAMES, natoms, 3)
        )
        np.save(part / "coord.npy", coord.reshape(FRAMES, -1))
        np.save(part / "box.npy", np.tile(8.0 * np.eye(3).ravel(), (FRAMES, 1)))
        np.save(part / "energy.npy", draw.normal(-natoms, 0.1, FRAMES))
        np.save(part / "force.npy", draw.normal(0, 0.3, (FRAMES, natoms * 3)))


def write_input(folder: Path, steps: int, device: str) -> None:
    """Write the data and the input of the whole training."""
    write_data(folder / "data")
    run, every = folder / "run", max(50, steps // 100)
    run.mkdir()
    net = {
        "neuron": [4],
        "seed": 1,
    }  # a step costs its operators, whatever their size: as few layers as there can be
    descriptor = {
        "type": "se_e2_a",
        "sel": [6],
        "rcut": 4.0,
        "rcut_smth": 1.0,
        "axis_neuron": 2,
        **net,
    }
    content = {
        "model": {"type_map": ["H"], "descriptor": descriptor, "fitting_net": net},
        "learning_rate": {
            "type": "exp",
            "start_lr": 1e-3,
            "stop_lr": 1e-6,
            "decay_steps": max(1, steps // 50),
        },
        "loss": {"type": "ener"},
        "optimizer": {"type": "HybridMuon", "lr_adjust": 0.0},
        "training": {
            "training_data": {"systems": ["../data/train/*"], "batch_size": 2},
            "validation_data": {"systems": ["../data/valid"], "numb_btch": 1},
            "numb_steps": steps,
            "seed": 3,
            "disp_freq": max(1, every // 10),
            "save_freq": every,
            "max_ckpt_keep": 3,
            "enable_ema": True,
            "jsonl_file": "log.jsonl",
            "capture": "on" if device == "cuda" else "auto",
        },
        "validating": {
            "full_validation": True,
            "full_val_start": 0,
            "validation_freq": 3 * every,
            "max_best_ckpt": 2,
        }
        | {"validation_metric": "F:RMSE"},
    }
    (run / "input.json").write_text(json.dumps(content))


def last_step(run: Path) -> int:
    """Return the last step in the log of JSON lines; 0 before the first."""
    with (
        contextlib.suppress(OSError, IndexError, ValueError),
        (run / "log.jsonl").open("rb") as file,
    ):
        file.seek(max(0, file.seek(0, os.SEEK_END) - 2000))
        return int(json.loads(file.read().rpartition(b"\n")[0].rpartition(b"\n")[2])["step"])
    return 0


def train(run: Path, until: int, deadline: float, restart: str = "auto") -> list[Sample]:
    """Continue the training of a folder up to a step, a time or its end; return what it held at every report."""
    samples: list[Sample] = []
    begin, ended = last_step(run), threading.Event()

    def look() -> None:
        sent = False
        while not ended.wait(_LOOK):
            step = last_step(run)
            if step > (samples[-1].step if samples else begin):
                samples.append(Sample.now(run, step))
                if (step >= until or time.monotonic() > deadline) and not sent:
                    os.kill(os.getpid(), signal.SIGTERM)
                    sent = True

    looker, before = threading.Thread(target=look), Path.cwd()
    # The signal may come when the training has just ended: then it says nothing.
    previous = signal.signal(signal.SIGTERM, lambda *_: None)
    try:
        os.chdir(run)
        looker.start()
        status = dp(
            ["train", "input.json", "--restart", restart, "--skip-neighbor-stat", "-v", "ERROR"]
        )
    finally:
        ended.set()
        looker.join()
        signal.signal(signal.SIGTERM, previous)
        os.chdir(before)
    if status not in (0, 128 + signal.SIGTERM):
        raise SoakError(f"the training ended with status {status}")
    gc.collect()
    return samples


def check_flat(parts: list[list[Sample]]) -> list[str]:
    """Compare the most that the second part of a training held with the most that the last one did."""
    first, last = ([sample for sample in part if sample] for part in (parts[1], parts[-1]))
    problems = []
    for field in fields(Sample)[1:]:
        before, after = (
            max(getattr(sample, field.name) for sample in part) for part in (first, last)
        )
        allowed = (
            FLAT if field.type == "float" else 2
        )  # handles and threads come and go with a report
        if after > before + allowed:
            problems.append(f"{field.name} grew from {before:.0f} to {after:.0f}")
    return problems


def check_result(run: Path, again: Path) -> list[str]:
    """See that all weights are finite, and that the last checkpoint follows bitwise from the one before."""
    steps = sorted(int(path.stem.rpartition("-")[2]) for path in run.glob("model.ckpt-*.pt"))
    if len(steps) < 2:
        return [f"{len(steps)} checkpoints: give more steps or seconds"]
    first, last = steps[-2:]
    paths = {step: run / f"model.ckpt-{step}.pt" for step in (first, last)}
    content = read_checkpoint(paths[last])
    tensors = {
        name: x
        for name, x in content["model"].items()
        if isinstance(x, torch.Tensor) and x.is_floating_point()
    }
    problems = [
        f"{name} is not finite at step {last}"
        for name, x in tensors.items()
        if not x.isfinite().all()
    ]
    again.mkdir()
    content_of_input = json.loads((run / "input.json").read_text())
    content_of_input["training"]["save_freq"] = last  # which a signal may have chosen
    (again / "input.json").write_text(json.dumps(content_of_input))
    shutil.copy(paths[first], again)
    train(again, last, time.monotonic() + 3600, restart=paths[first].name)
    replayed = read_checkpoint(again / paths[last].name)
    different = [
        key for key in ("model", "optimizer", "ema") if not same(replayed[key], content[key])
    ]
    return problems + [
        f"{key} of step {last} differs when the run continues from step {first}"
        for key in different
    ]


def soak(
    folder: Path, steps: int, lives: int, device: str, seconds: float = float("inf")
) -> list[str]:
    """Train, print what every part held, and return all problems."""
    begin = time.monotonic()
    if not (run := folder / "run").exists():
        write_input(folder, steps, device)
    done, parts = last_step(run), []
    while last_step(run) < steps and (time.monotonic() - begin < seconds):
        goal = done + (steps - done) * (len(parts) + 1) // lives
        part_seconds = min(seconds, (len(parts) + 1) * seconds / lives)
        parts.append(train(run, goal if goal < steps else steps + 1, begin + part_seconds))
        if parts[-1]:
            low, high = (
                [f(getattr(x, y.name) for x in parts[-1]) for y in fields(Sample)]
                for f in (min, max)
            )
            held = ", ".join(
                f"{y.name} {a:.0f} to {b:.0f}"
                for y, a, b in zip(fields(Sample), low, high, strict=True)
                if b
            )
            print(f"part {len(parts)}, {time.monotonic() - begin:.0f} s: {held}", flush=True)
    trained = [part for part in parts if part]
    problems = (
        check_flat(trained)
        if len(trained) > 2
        else [f"only {len(trained)} parts: give more steps or seconds"]
    )
    again = folder / "again"
    shutil.rmtree(again, ignore_errors=True)
    problems += check_result(run, again)
    total = time.monotonic() - begin
    print(
        f"{last_step(run) - done} steps in {len(parts)} parts and {total:.0f} s on {device}: {problems or 'all well'}"
    )
    return problems


def main() -> int:
    """Soak as the command line says."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument(
        "--lives", type=int, default=10, help="trainings, each of which continues the last"
    )
    parser.add_argument("--seconds", type=float, default=float("inf"), help="end after that time")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument(
        "--folder", type=Path, help="keep the run here, and continue the one that is there"
    )
    options = parser.parse_args()
    os.environ["DEVICE"] = options.device
    if options.device == "cpu":
        torch.set_num_threads(1)
        resource.setrlimit(
            resource.RLIMIT_NOFILE, (HANDLES, resource.getrlimit(resource.RLIMIT_NOFILE)[1])
        )
    else:  # forces are otherwise added up in an order that varies, and no two runs have the same bits
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.utils.deterministic.fill_uninitialized_memory = (
            False  # it would be a kernel more for each empty tensor
        )
    with tempfile.TemporaryDirectory() as place:
        folder = (options.folder or Path(place)).resolve()
        return bool(soak(folder, options.steps, options.lives, options.device, options.seconds))


if __name__ == "__main__":
    sys.exit(main())
