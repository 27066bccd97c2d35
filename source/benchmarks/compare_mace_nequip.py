"""Train MACE, NequIP and potentials of this package on equal frames for equal seconds; measure errors and dynamics.

    python compare_mace_nequip.py run --data race-data --set bpa --seconds 60 --work WORK --json FILE \
        --site mace=FOLDER --site nequip=FOLDER

`race/make_bpa.py` and `race/make_water.py` make the sets. Each program trains with its own command line. mace-torch and
nequip need different versions of e3nn, so `--site` names a folder for PYTHONPATH of each. A callback ends NequIP's
training after the seconds. For the others a short run finds out how many steps take them, or `--per-step` says it. The
seconds count the training loop alone, after imports and compilation; on a CPU they are seconds of the processor, so
that other jobs do not matter. The last tenth of the training frames validates.

Errors of a potential are measured while the next program trains, dynamics one after the other at the end. The file of
`--json` gets a line for the errors of a program and another one for its dynamics. Every five seconds the last line of
the running program is printed. A program that takes longer than `--limit` ends, and the others go on. The tables are in
doc/mace-nequip.md.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import math
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from ase import Atoms, units
from ase.calculators.calculator import Calculator
from ase.data import covalent_radii
from ase.io import read, write
from ase.md.langevin import Langevin
from ase.md.velocitydistribution import MaxwellBoltzmannDistribution

BENCHMARKS = Path(__file__).resolve().parent
SETS = {"bpa": 1200.0, "water": 420.0}  # temperature of the dynamics [K]
RCUT = 5.0
BATCH = {"bpa": 5, "water": 1}  # frames in a batch of MACE and NequIP
TIME_STEP = 0.5  # fs
# Atoms closer than the sum of their covalent radii times the first factor are bonded. A bond is broken if its length
# grows by the second factor.
BONDED = 1.2
BROKEN = 1.6
_PROGRESS_SECONDS = 5.0
_WARM_UP_STEPS = 1  # of NequIP, before its clock starts
_START = time.monotonic()


@dataclass(frozen=True)
class Job:
    """What a program trains on, and where."""

    name: str
    data_set: str
    work: Path
    elements: tuple[str, ...]
    seed: int
    device: str
    seconds: float
    per_step: float | None  # seconds of a step; None finds out
    limit: float  # seconds of a command, starts included
    environment: Mapping[str, str]


class Trained(NamedTuple):
    """A trained model, and what is known of its training."""

    model: Path
    steps: int
    seconds: float
    validation: str  # what the program's log says about validation errors


def main() -> None:
    """Run the comparison, or measure one potential in its own environment."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    run_parser = commands.add_parser("run")
    run_parser.add_argument("--data", type=Path, required=True)
    run_parser.add_argument("--set", choices=SETS, required=True)
    run_parser.add_argument("--methods", nargs="+", choices=TRAINERS, default=list(TRAINERS))
    run_parser.add_argument("--seconds", type=float, default=60.0)
    run_parser.add_argument("--seed", type=int, default=1)
    run_parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    run_parser.add_argument("--per-step", nargs="+", default=[], metavar="PROGRAM=SECONDS")
    run_parser.add_argument("--limit", type=float, default=3600.0, help="seconds of a command")
    run_parser.add_argument("--dynamics-steps", type=int, default=1000)
    run_parser.add_argument("--dynamics-seconds", type=float, default=60.0)
    run_parser.add_argument("--every", type=int, default=1, help="measure every N-th test frame")
    run_parser.add_argument("--work", type=Path, required=True)
    run_parser.add_argument("--json", type=Path, required=True, help="one line for each program")
    run_parser.add_argument("--site", nargs="+", default=[], metavar="PROGRAM=FOLDER")
    measure_parser = commands.add_parser("measure")
    measure_parser.add_argument("calculator", choices=CALCULATORS)
    measure_parser.add_argument("model", type=Path)
    measure_parser.add_argument("frames", nargs="+", type=Path)
    measure_parser.add_argument("--device", required=True)
    measure_parser.add_argument("--temperature", type=float, required=True)
    measure_parser.add_argument("--dynamics-steps", type=int, required=True)
    measure_parser.add_argument("--dynamics-seconds", type=float, required=True)
    measure_parser.add_argument("--every", type=int, required=True)
    measure_parser.add_argument("--lock", type=Path, required=True)
    measure_parser.add_argument("--json", type=Path, required=True)
    measure_parser.add_argument("--line", type=json.loads, required=True, help="its beginning")
    args = parser.parse_args()
    if args.command == "run":
        compare(args)
    else:
        measure(args)


def compare(args: argparse.Namespace) -> None:
    """Train one program after the other, and measure them."""
    work = args.work.resolve()
    work.mkdir(parents=True, exist_ok=True)
    elements = write_frames(args.data / args.set, work)
    sites = dict(pair.split("=", 1) for pair in args.site)
    per_step = {name: float(seconds) for name, seconds in (p.split("=") for p in args.per_step)}
    with (work / "dynamics.lock").open("w") as lock, ThreadPoolExecutor(len(TRAINERS)) as pool:
        fcntl.flock(lock, fcntl.LOCK_SH)  # dynamics wait for it
        for name in args.methods:
            job = Job(
                name=name,
                data_set=args.set,
                work=work / name,
                elements=elements,
                seed=args.seed,
                device=args.device,
                seconds=args.seconds,
                per_step=per_step.get(name),
                limit=args.limit,
                environment=environment_of(sites.get(name)),
            )
            job.work.mkdir(exist_ok=True)
            with reported(name):
                trained = TRAINERS[name](job)
                tell(f"{name} trained: {trained}")
                calculator = name if name in sites else "deepmd_muon"
                pool.submit(measure_job, job, trained, calculator, args)
        fcntl.flock(lock, fcntl.LOCK_UN)


def measure_job(job: Job, trained: Trained, calculator: str, args: argparse.Namespace) -> None:
    """Measure a potential in its own environment."""
    line = {
        "program": job.name,
        "set": job.data_set,
        "steps": trained.steps,
        "seconds": trained.seconds,
        "validation": trained.validation,
    }
    options = {
        "device": job.device,
        "temperature": SETS[job.data_set],
        "dynamics-steps": args.dynamics_steps,
        "dynamics-seconds": args.dynamics_seconds,
        "every": args.every,
        "lock": job.work.parent / "dynamics.lock",
        "json": args.json.resolve(),
        "line": json.dumps(line),
    }
    command = [sys.executable, __file__, "measure", calculator, str(trained.model)]
    command += map(str, sorted(job.work.parent.glob("test_*.xyz")))
    command += [f"--{name}={value}" for name, value in options.items()]
    with reported(job.name):
        done = run(command, job.work / "measure.log", job.environment, limit=3600.0)
        tell(f"{job.name} measured: {done.output.splitlines()[-1]}")


def tell(message: str) -> None:
    """Print a message after the seconds since the start."""
    print(f"{time.monotonic() - _START:6.0f} s  {message}", flush=True)


@contextmanager
def reported(name: str) -> Iterator[None]:
    """Print the error of a program that fails, so that the others go on."""
    try:
        yield
    except (subprocess.SubprocessError, OSError, LookupError, ValueError) as error:
        tell(f"{name} failed: {type(error).__name__}: {error}")


def write_frames(folder: Path, work: Path) -> tuple[str, ...]:
    """Write train.xyz, valid.xyz and one test file for each system; return the elements.

    Validation frames are the last tenth of each training trajectory.
    """
    sys.path.insert(0, str(BENCHMARKS / "race"))
    from sampling import read_system

    parts: dict[str, list[Atoms]] = {"train": [], "valid": []}
    for system in sorted(path.parent for path in folder.glob("*/*/type.raw")):
        frames = read_system(system)
        energies = np.load(system / "set.000" / "energy.npy").ravel()
        forces = np.load(system / "set.000" / "force.npy").reshape(len(frames), -1, 3)
        for frame, energy, force in zip(frames, energies, forces, strict=True):
            frame.info["REF_energy"] = float(energy)
            frame.arrays["REF_forces"] = force.astype(float)
        if system.parent.name == "train":
            split = len(frames) - len(frames) // 10
            parts["train"] += frames[:split]
            parts["valid"] += frames[split:]
        else:
            parts[f"test_{system.parent.name}_{system.name}"] = frames
    for name, frames in parts.items():
        write(work / f"{name}.xyz", frames, format="extxyz")
    return tuple(sorted({symbol for frame in parts["train"] for symbol in frame.symbols}))


def environment_of(site: str | None) -> dict[str, str]:
    """Return the environment of a program, with its packages first."""
    paths = [str(BENCHMARKS), os.environ.get("PYTHONPATH", "")]
    if site is not None:
        paths.insert(0, str(Path(site).resolve()))
    # e3nn 0.4.4 reads its constants with torch.load as it was before torch 2.6.
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(paths),
        "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD": "1",
    }


class Done(NamedTuple):
    """A command that ended: its standard output, and its seconds by the clock and of the processor."""

    output: str
    seconds: float
    processor: float

    def seconds_on(self, device: str) -> float:
        """Return the factor from seconds by the clock to those that count: on a CPU, its own."""
        return self.processor / self.seconds if device == "cpu" else 1.0


def run(
    command: list[str],
    log: Path,
    environment: Mapping[str, str],
    *,
    cwd: Path | None = None,
    limit: float,
) -> Done:
    """Run a command; its errors go to the log, its output to a file beside the log.

    Raises
    ------
    subprocess.TimeoutExpired
        after `limit` seconds; the command is killed.
    subprocess.CalledProcessError
        if it fails.
    """
    begin = time.perf_counter()
    output = log.with_suffix(".out")
    with log.open("a") as errors, output.open("w") as written:
        process = subprocess.Popen(command, env=environment, cwd=cwd, stdout=written, stderr=errors)
        ended = 0
        told = begin
        while not ended:
            time.sleep(0.1)
            # Seconds of the processor of this command alone: others may end at the same time.
            ended, status, usage = os.wait4(process.pid, os.WNOHANG)
            if time.perf_counter() - told > _PROGRESS_SECONDS:
                told = time.perf_counter()
                tell(f"{log.parent.name}/{log.stem}: {last_line(log, output)}")
            if not ended and time.perf_counter() - begin > limit:
                process.kill()
                process.wait()
                raise subprocess.TimeoutExpired(command[-1], limit)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, f"{log}: {last_line(log)}")
    return Done(
        output=output.read_text(),
        seconds=time.perf_counter() - begin,
        processor=usage.ru_utime + usage.ru_stime,
    )


def last_line(*files: Path) -> str:
    """Return the last line of the file that was written last."""
    newest = max(files, key=lambda path: path.stat().st_mtime)
    lines = newest.read_text(errors="replace").splitlines()
    return lines[-1][:160] if lines else "(nothing printed yet)"


# --- MACE: mace_run_train, 64 channels, L = 1, two layers, float32 ---


def train_mace(job: Job) -> Trained:
    """Train MACE by its own command: rates fall to a hundredth, averages of weights, stage two at the end."""

    def epochs_of(epochs: int, name: str, frames: str) -> tuple[list[float], str]:
        folder = job.work / name
        folder.mkdir(exist_ok=True)
        settings = {
            "name": "mace",
            "seed": job.seed,
            "work_dir": folder,
            "train_file": job.work.parent / frames,
            "valid_file": job.work.parent / "valid.xyz",
            "E0s": "average",
            "num_channels": 64,
            "max_L": 1,
            "r_max": RCUT,
            "batch_size": BATCH[job.data_set],
            "valid_batch_size": 10,
            "default_dtype": "float32",
            "device": job.device,
            "max_num_epochs": epochs,
            "scheduler": "ExponentialLR",
            "lr_scheduler_gamma": 0.01 ** (1 / epochs),
            "ema_decay": 0.99,
            "start_swa": max(1, int(0.75 * epochs)),
            "swa_lr": 3e-4,
            "plot": False,
        }
        options = [f"--{key}={value}" for key, value in settings.items()]
        command = [
            sys.executable,
            "-m",
            "mace.cli.run_train",
            *options,
            "--ema",
            "--amsgrad",
            "--swa",
        ]
        done = run(command, folder / "train.log", job.environment, cwd=folder, limit=job.limit)
        log = (folder / "logs" / f"mace_run-{job.seed}.log").read_text()
        epoch_ends = [done.seconds_on(job.device) * end for end in mace_epoch_ends(log)]
        return epoch_ends, re.findall(r"Epoch \d+: (.*)", log)[-1]

    if job.per_step is None:
        frames = read(job.work.parent / "train.xyz", index=":")
        few = frames[: 16 * BATCH[job.data_set]]
        write(job.work.parent / "few.xyz", few, format="extxyz")
        ends, _ = epochs_of(4, "short", "few.xyz")
        # The first epochs compile. Their validation counts as steps, so epochs are a little shorter.
        per_epoch = (ends[-1] - ends[1]) / 2 * len(frames) / len(few)
    else:
        per_epoch = job.per_step * steps_in_epoch(job)
    epochs = max(4, round(job.seconds / per_epoch))
    ends, errors = epochs_of(epochs, "long", "train.xyz")
    return Trained(
        model=job.work / "long" / "mace_stagetwo.model",
        steps=epochs * steps_in_epoch(job),
        seconds=(ends[-1] - ends[0]) * epochs / (epochs - 1),
        validation=errors,
    )


def mace_epoch_ends(log: str) -> list[float]:
    """Return the times [s] at which MACE logged its epochs."""
    lines = re.findall(r"^(\S+ \S+) INFO: Epoch \d+:", log, re.MULTILINE)
    return [datetime.fromisoformat(stamp).timestamp() for stamp in lines]


# --- NequIP: nequip-train, four layers, l = 2, 32 features, float32 ---


class TimedTraining:
    """A callback of Lightning: rates fall along a cosine of the time, and training ends after the seconds."""

    def __new__(cls, seconds: float, device: str, path: str) -> Any:
        """Return a callback; Lightning is in NequIP's environment alone."""
        from lightning.pytorch import Callback

        clock = time.process_time if device == "cpu" else time.perf_counter

        class Timed(Callback):
            begin: float | None = None
            printed = 0.0

            def on_train_batch_start(self, trainer: Any, *args: Any) -> None:
                if trainer.global_step < _WARM_UP_STEPS:
                    return
                if self.begin is None:
                    self.begin = clock()
                share = min(1.0, (clock() - self.begin) / seconds)
                first_rate = trainer.optimizers[0].defaults["lr"]
                for group in trainer.optimizers[0].param_groups:
                    group["lr"] = first_rate * 0.5 * (1 + math.cos(math.pi * share))
                trainer.should_stop = share == 1.0

            def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
                if time.monotonic() - self.printed > _PROGRESS_SECONDS:
                    self.printed = time.monotonic()
                    print(f"step {trainer.global_step}", flush=True)

            def on_validation_epoch_end(self, trainer: Any, *args: Any) -> None:
                if self.begin is not None:
                    metrics = {key: float(each) for key, each in trainer.callback_metrics.items()}
                    content = {
                        "steps": trainer.global_step,
                        "seconds": clock() - self.begin,
                        "validation": json.dumps(metrics),
                    }
                    Path(path).write_text(json.dumps(content))

        return Timed()


def train_nequip(job: Job) -> Trained:
    """Train NequIP by its own command: rates fall along a cosine, averages of weights."""
    (job.work / "config.yaml").write_text(json.dumps(nequip_config(job)))
    main = "from nequip.scripts.train import main; main()"
    command = [sys.executable, "-c", main, "-cp", str(job.work), "-cn", "config"]
    run(command, job.work / "train.log", job.environment, cwd=job.work, limit=job.limit)
    content = json.loads((job.work / "timed.json").read_text())
    return Trained(model=job.work / "best.ckpt", **content)


def nequip_config(job: Job) -> dict[str, Any]:
    """Return NequIP's configuration."""
    frames = job.work.parent
    elements = list(job.elements)
    metric = "val0_epoch/weighted_sum"
    coefficients = {"per_atom_energy_rmse": 1.0, "forces_rmse": 1.0}
    loader = {"_target_": "torch.utils.data.DataLoader", "num_workers": 0}
    return {
        "run": ["train"],
        "data": {
            "_target_": "nequip.data.datamodule.ASEDataModule",
            "seed": job.seed,
            "train_file_path": [str(frames / "train.xyz")],
            "val_file_path": [str(frames / "valid.xyz")],
            "include_keys": ["REF_energy", "REF_forces"],
            "key_mapping": {"REF_energy": "total_energy", "REF_forces": "forces"},
            "transforms": [
                {
                    "_target_": "nequip.data.transforms.ChemicalSpeciesToAtomTypeMapper",
                    "model_type_names": elements,
                },
                {"_target_": "nequip.data.transforms.NeighborListTransform", "r_max": RCUT},
            ],
            "train_dataloader": {**loader, "batch_size": BATCH[job.data_set], "shuffle": True},
            "val_dataloader": {**loader, "batch_size": 10},
            "stats_manager": {
                "_target_": "nequip.data.CommonDataStatisticsManager",
                "dataloader_kwargs": {"batch_size": 10},
                "type_names": elements,
            },
        },
        "trainer": {
            "_target_": "lightning.Trainer",
            "accelerator": "gpu" if job.device == "cuda" else "cpu",
            "devices": 1,
            "max_epochs": -1,
            "num_sanity_val_steps": 0,
            "enable_progress_bar": False,
            "logger": False,
            "callbacks": [
                {
                    "_target_": "lightning.pytorch.callbacks.ModelCheckpoint",
                    "monitor": metric,
                    "dirpath": str(job.work),
                    "filename": "best",
                },
                {
                    "_target_": "compare_mace_nequip.TimedTraining",
                    "seconds": job.seconds,
                    "device": job.device,
                    "path": str(job.work / "timed.json"),
                },
            ],
        },
        "training_module": {
            "_target_": "nequip.train.EMALightningModule",
            "ema_decay": 0.99,
            "loss": {
                "_target_": "nequip.train.EnergyForceLoss",
                "per_atom_energy": True,
                "coeffs": {"total_energy": 1.0, "forces": 1.0},
            },
            "val_metrics": {"_target_": "nequip.train.EnergyForceMetrics", "coeffs": coefficients},
            "optimizer": {"_target_": "torch.optim.Adam", "lr": 0.01, "amsgrad": True},
            "model": {
                "_target_": "nequip.model.NequIPGNNModel",
                "seed": job.seed,
                "model_dtype": "float32",
                "type_names": elements,
                "r_max": RCUT,
                "num_layers": 4,
                "l_max": 2,
                "num_features": 32,
                "radial_mlp_depth": 2,
                "radial_mlp_width": 64,
                "avg_num_neighbors": "${training_data_stats:num_neighbors_mean}",
                "per_type_energy_scales": "${training_data_stats:per_type_forces_rms}",
                "per_type_energy_shifts": "${training_data_stats:per_atom_energy_mean}",
            },
        },
        "global_options": {"seed": job.seed, "allow_tf32": False},
    }


# --- This package: the inputs of the race, HybridMuon at its defaults ---


def train_ours(job: Job) -> Trained:
    """Train a descriptor of this package by `dp train`."""

    def train(steps: int, name: str) -> tuple[float, dict[str, Any]]:
        """Return seconds a step, and the last line of the log."""
        folder = job.work / name
        folder.mkdir(exist_ok=True)
        (folder / "input.json").write_text(json.dumps(deepmd_input(job, steps)))
        command = [sys.executable, "-m", "deepmd_muon", "--pt", "train", "input.json"]
        done = run(command, folder / "train.log", job.environment, cwd=folder, limit=job.limit)
        lines = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
        first = lines[1]  # the first interval compiles
        last = lines[-1]
        seconds = (last["time"] - first["time"]) * done.seconds_on(job.device)
        return seconds / (last["step"] - first["step"]), last

    per_step = job.per_step or train(400, "short")[0]
    steps = max(400, round(job.seconds / per_step))
    per_step, last = train(steps, "long")
    errors = {name: last[name] for name in ("rmse_e_val", "rmse_f_val")}
    return Trained(
        model=job.work / "long" / f"model.ckpt-{steps}.pt",
        steps=steps,
        seconds=per_step * steps,
        validation=json.dumps(errors),
    )


def deepmd_input(job: Job, steps: int) -> dict[str, Any]:
    """Return the race's input for the frames of the comparison."""
    from sets import SETS as RACE_SETS
    from sets import input_of

    frames = job.work.parent
    content = input_of(job.data_set, job.name, [frames / "train.xyz"], seed=job.seed, steps=steps)
    assert RACE_SETS[job.data_set].rcut == RCUT
    content["optimizer"] = {"type": "HybridMuon"}
    content["learning_rate"] = {"type": "exp", "start_lr": 1e-3, "stop_lr": 1e-6}
    # MACE and NequIP train on energies and forces.
    content["loss"] |= {"start_pref_v": 0.0, "limit_pref_v": 0.0}
    content["training"] |= {
        "validation_data": {"systems": [str(frames / "valid.xyz")], "numb_btch": "all"},
        "disp_freq": 100,
        "save_freq": steps,
        "jsonl_file": "log.jsonl",
    }
    return content


# --- Common measurements ---


def steps_in_epoch(job: Job) -> int:
    """Return the number of batches of MACE and NequIP in an epoch."""
    frames = len(read(job.work.parent / "train.xyz", index=":"))
    return -(-frames // BATCH[job.data_set])


def measure(args: argparse.Namespace) -> None:
    """Measure errors, and then dynamics, for which this waits until nothing else runs."""
    with args.lock.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_SH)
        calculator = CALCULATORS[args.calculator](args.model, args.device)
        errors = {path.stem: frame_errors(calculator, path, args.every) for path in args.frames}
        append_line(args.json, args.line | {"errors": errors})
        print("errors:", errors, flush=True)
        fcntl.flock(lock, fcntl.LOCK_EX)
        measured = dynamics(calculator, read(args.frames[0], index=0), args)
    append_line(args.json, args.line | {"dynamics": measured})
    print("dynamics:", measured)


def append_line(path: Path, content: Mapping[str, Any]) -> None:
    """Append a line of JSON to a file."""
    with path.open("a") as file:
        file.write(json.dumps(content) + "\n")


def mace_calculator(model: Path, device: str) -> Calculator:
    """Return MACE's calculator."""
    from mace.calculators import MACECalculator

    return MACECalculator(model_paths=str(model), device=device, default_dtype="float32")


def nequip_calculator(model: Path, device: str) -> Calculator:
    """Return NequIP's calculator of a checkpoint; its compilation takes minutes."""
    from nequip.integrations.ase import NequIPCalculator

    return NequIPCalculator._from_saved_model(str(model), device=device)


def deepmd_calculator(model: Path, device: str) -> Calculator:
    """Return this package's calculator."""
    from deepmd_muon.infer import DeepPotCalculator

    return DeepPotCalculator(model, device=device)


def frame_errors(calculator: Calculator, path: Path, every: int) -> dict[str, float]:
    """Return root mean square errors: energy [meV/atom], force [meV/Å]."""
    energies = []
    forces = []
    for frame in read(path, index=f"::{every}"):
        atoms = Atoms(frame.symbols, frame.positions, cell=frame.cell, pbc=frame.pbc)
        atoms.calc = calculator
        forces.append((atoms.get_forces() - frame.arrays["REF_forces"]).ravel())
        energies.append((atoms.get_potential_energy() - frame.info["REF_energy"]) / len(atoms))
    energy = float(np.sqrt(np.mean(np.square(energies))))
    force = float(np.sqrt(np.mean(np.square(np.concatenate(forces)))))
    return {"energy": 1e3 * energy, "force": 1e3 * force}


def dynamics(
    calculator: Calculator, start: Atoms, args: argparse.Namespace
) -> dict[str, float | int | None]:
    """Return milliseconds a step of Langevin dynamics in ASE, and the step at which a bond broke."""
    atoms = Atoms(start.symbols, start.positions, cell=start.cell, pbc=start.pbc)
    atoms.calc = calculator
    radii = covalent_radii[atoms.numbers]
    distances = atoms.get_all_distances(mic=bool(atoms.pbc.any()))
    bonds = np.triu(distances < BONDED * (radii[:, None] + radii), 1)
    random = np.random.default_rng(1)
    MaxwellBoltzmannDistribution(atoms, temperature_K=args.temperature, rng=random)
    molecular_dynamics = Langevin(
        atoms,
        TIME_STEP * units.fs,
        temperature_K=args.temperature,
        friction=0.01 / units.fs,
        rng=random,
    )
    molecular_dynamics.run(20)
    broken = None
    seconds = 0.0
    clock = time.process_time if args.device == "cpu" else time.perf_counter
    steps = 0
    while steps < args.dynamics_steps and seconds < args.dynamics_seconds and broken is None:
        begin = clock()
        molecular_dynamics.run(20)
        seconds += clock() - begin
        steps += 20
        stretched = atoms.get_all_distances(mic=bool(atoms.pbc.any()))[bonds]
        # A comparison with nan is false, so this also ends dynamics that blew up.
        if not (stretched < BROKEN * distances[bonds]).all():
            broken = steps
    return {"dynamics_steps": steps, "ms_per_step": 1e3 * seconds / steps, "broken_after": broken}


Trainer = Callable[[Job], Trained]
TRAINERS: dict[str, Trainer] = {
    "mace": train_mace,
    "nequip": train_nequip,
    "se_e2_a": train_ours,
    "dpa1_sel120": train_ours,
    "dpa3_sel120": train_ours,
}
CALCULATORS: dict[str, Callable[[Path, str], Calculator]] = {
    "mace": mace_calculator,
    "nequip": nequip_calculator,
    "deepmd_muon": deepmd_calculator,
}


if __name__ == "__main__":
    main()
