"""Train potentials with many settings and seeds side by side; measure errors, dynamics and the verdict of `dp check`.

    python source/benchmarks/race/stability_runs.py --data race-data --results runs.jsonl --steps 30000 \
        --seeds 1 2 3 4 5 6 7 8 --workers 20 --seconds 540

Each worker is a process that trains one potential after another with `dp train`. On a GPU, small steps of several
processes overlap where NVIDIA's Multi-Process Service runs. With several GPUs, start one service for each (with
`CUDA_VISIBLE_DEVICES` and `CUDA_MPS_PIPE_DIRECTORY`), and give all pipe directories as `--pipes`: the workers take them
in turn. Each finished potential is a line of the results; what the file already has is not repeated.
`stability_table.py` makes the tables.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import math
import multiprocessing
import os
import shutil
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))

from anchors import RunAnchors, Surroundings
from far_projection import Projection, RunProjection
from sets import SETS, Part
from settings import SETTINGS, STOP, input_for, merged
from watched import RATIOS, WatchedRun, copies_of

from deepmd_muon.checkpoint_file.file import read_checkpoint
from deepmd_muon.cli.main import main as dp
from deepmd_muon.data import Frames, System, open_systems
from deepmd_muon.dynamics.systems import Systems
from deepmd_muon.files import working_folder
from deepmd_muon.infer.predictor import Predictor
from deepmd_muon.model import EnergyModel
from deepmd_muon.stability.check import CheckSettings, ModelCheck, check_models
from deepmd_muon.stability.coverage import Coverage, coverage_of


@dataclass(frozen=True)
class Condition:
    """Dynamics of a set: frames to start from, temperature [K], time step [fs], and masses [u] where they are not real.

    Hydrogen of 4 u allows a time step of 1 fs, and changes no average of positions.
    """

    part: Part
    starts: str
    temperature: float
    time_step: float
    masses: tuple[float, ...] = ()


CONDITIONS = {
    "water": Condition("test", "350K", 350.0, 1.0, (16.0, 4.0)),
    "molecules": Condition("test", "*_300K", 1200.0, 1.0, (4.0, 12.0, 14.0, 16.0)),
    "alloys": Condition("out", "Cu11Ag11Au10_liquid_2000K", 2000.0, 2.0),
    "salt": Condition("test", "*_liquid_1300K", 1300.0, 2.0),
    "silicon": Condition("test", "liquid_2500K", 2500.0, 2.0),
    "aluminides": Condition("test", "*_liquid_2200K", 2200.0, 2.0),
}
#: Sets that run where nothing is asked for; the others choose no setting.
USUAL = ("water", "molecules", "alloys")
#: The copies of the check start so many times hotter.
HOTTER = 1.5
#: When dynamics are looked at [ps].
TIMES = (0.1, 0.25, 0.5, 1.0, 2.0, 5.0)
#: How often frames are repeated where a setting displaces atoms.
COPIES = 8
#: Size of a change of weights that tells how flat the minimum is, relative to the root mean square of their tensor.
CHANGE = 0.01
_LOG = "worker_{}.log"


class Job(NamedTuple):
    """A training run."""

    set: str
    setting: str
    seed: int
    steps: int


class Duration(NamedTuple):
    """How long a run took: its training of some steps, and the rest [s]."""

    steps: int
    training: float
    rest: float

    def of(self, steps: int) -> float:
        """Estimate how long a run of other steps takes [s]."""
        return self.training * steps / self.steps + self.rest


def opened(folders: Sequence[Path], type_map: Sequence[str]) -> list[System]:
    """Return the systems in folders, which may be none."""
    return open_systems([str(folder) for folder in folders], type_map) if folders else []


def errors_of(predictor: Predictor, systems: Sequence[System]) -> dict[str, dict[str, float]]:
    """Return root-mean-square errors of each system: force [eV/Å], energy [eV/atom]."""
    found = {}
    for system in systems:
        frames = system.frames(np.arange(system.nframes))
        predicted = predictor.evaluate(frames)
        assert frames.force is not None
        assert frames.energy is not None
        force = predicted.force - frames.force
        energy = (predicted.energy - frames.energy.reshape(-1)) / system.natoms
        errors = (math.sqrt(float((values**2).mean())) for values in (force, energy))
        found[Path(system.name).name] = dict(zip(("force", "energy"), errors, strict=True))
    return found


def flatness_of(predictor: Predictor, systems: Sequence[System]) -> list[float]:
    """Return the force error on all frames [eV/Å] after each of two random changes of all weights by `CHANGE`."""
    model = predictor.model
    assert isinstance(model, EnergyModel)
    generator, found = torch.Generator().manual_seed(1), []
    before = {name: value.clone() for name, value in model.state_dict().items()}
    for _ in range(2):
        with torch.no_grad():
            for value in model.parameters():
                noise = torch.randn(value.shape, generator=generator, dtype=torch.float64).to(value)
                value.add_(CHANGE * value.square().mean().sqrt() * noise)
        found.append(pooled(errors_of(predictor, systems)))
        model.load_state_dict(before)
    return found


def pooled(errors: Mapping[str, Mapping[str, float]]) -> float:
    """Return the root mean square of the force errors of systems."""
    return math.sqrt(sum(one["force"] ** 2 for one in errors.values()) / len(errors))


def dynamics_of(
    predictor: Predictor,
    name: str,
    folder: Path,
    coverage: Coverage,
    copies: tuple[int, int],
    picoseconds: float,
    *,
    hotter: float = HOTTER,
) -> dict[str, Any]:
    """Run copies at the condition's temperature, and others hotter, and return what became of them."""
    condition = CONDITIONS[name]
    paths = sorted(
        path.parent for path in (folder / condition.part).glob(f"{condition.starts}/type.raw")
    )
    frames = [
        Frames(frame.atype, frame.coord, frame.box)
        for system in opened(paths, predictor.type_map)
        for frame in [system.frames([k]) for k in range(system.nframes)]
    ]
    start = Frames.concatenate([frames[(7 * k) % len(frames)] for k in range(sum(copies))])
    heat = np.repeat([1.0, hotter], copies)
    kelvin = torch.tensor(heat * condition.temperature)
    systems = Systems.from_frames(start, predictor.type_map, predictor.device, condition.masses)
    systems = copies_of(systems, kelvin, seed=1)
    model = predictor.model
    run = WatchedRun(model, systems, coverage.shortest, kelvin, condition.time_step)
    times = tuple(t for t in TIMES if t < picoseconds)
    found = run.run(picoseconds, times)
    lowest = np.array([part.min(0, initial=np.inf) for part in np.split(found.pairs, copies[:1])])
    return {
        "temperature": condition.temperature,
        "copies": copies,
        "heat": heat.tolist(),
        "picoseconds": float(found.times[-1]),
        "blown": listed(found.blown, 4),
        "ratios": list(RATIOS),
        "passed": listed(found.passed, 4),
        "times": listed(found.times, 4),
        "least": listed(found.least, 3),
        "energy": listed(found.energy, 5),
        "pairs": listed(lowest, 3),  # of the copies at the temperature, then of the hotter ones
    }


def listed(values: np.ndarray, digits: int) -> Any:
    """Return an array as lists of rounded numbers, None where one is not finite."""
    rounded = np.where(np.isfinite(values), np.round(values, digits), np.nan).astype(object)
    rounded[~np.isfinite(values)] = None
    return rounded.tolist()


def check_of(
    predictor: Predictor, systems: Sequence[System], temperature: float, copies: int | None
) -> dict[str, Any]:
    """Return the verdict of `dp check` at a temperature [K], and what it is made of."""
    settings = CheckSettings(temperature=temperature, copies=copies)
    check = check_models(["model"], [predictor], systems, settings)
    (model,) = check.models
    shortest = check.coverage.shortest
    held = np.isfinite(shortest)
    ratio = float((model.dynamics.reached[held] / shortest[held]).min())
    run = model.dynamics
    given = {
        "temperature": temperature,
        "copies": run.copies,
        "time": run.steps * run.time_step / 1000.0,
    }
    return {**given, "ratio": round(ratio, 4), **_values(model)}


def _values(model: ModelCheck) -> dict[str, Any]:
    run = model.dynamics
    return {
        "verdict": model.verdict.name,
        "items": {item.name: item.verdict.name for item in model.items},
        "reasons": {item.name: item.reason for item in model.items if item.verdict.value},
        "features": [
            [
                curve.kind,
                *curve.pair,
                f.kind,
                f.verdict.name,
                round(f.distance, 2),
                round(f.barrier, 3),
            ]
            for curve in model.curves
            for f in curve.features
            if np.isfinite([f.distance, f.barrier]).all()
        ],
        "blown": [round(blow_up.time, 4) for blow_up in run.blow_ups],
        "departed": [round(departure.time, 4) for departure in run.departures],
        "drift": float(run.drift) if np.isfinite(run.drift) else None,
    }


def trained(job: Job, args: argparse.Namespace, folder: Path) -> tuple[Path, dict[str, float]]:
    """Train a potential by `dp train`; return its checkpoint, and what its anchors did."""
    name, setting, seed, steps = job
    chosen = SETTINGS[setting]
    content = input_for(
        name,
        setting,
        args.data / name,
        seed=seed,
        steps=steps,
        model=args.model,
        averages=args.averages,
    )
    if chosen.noise:
        data = content["training"]["training_data"]
        data["systems"] = [
            noisy(Path(path), folder / "noisy", chosen.noise, seed) for path in data["systems"]
        ]
    with working_folder(folder):
        if chosen.anchors:
            kind = RunProjection if isinstance(chosen.anchors, Projection) else RunAnchors
            anchors = kind(chosen.anchors, surroundings(name, args.data / name))
            with anchors.acting():
                return run_train(content, []), anchors.counts()
        if not chosen.last:
            return run_train(content, []), {}
        # The same course of the rate: it falls by a constant factor a step.
        part = 1 - chosen.part
        change = {
            "training": {"numb_steps": round(part * steps)},
            "learning_rate": {"stop_lr_ratio": STOP**part},
        }
        earlier = run_train(merged(content, change), [])
        return run_train(merged(content, chosen.last), ["--restart", str(earlier)]), {}


def surroundings(name: str, data: Path) -> Surroundings:
    """Return what the dynamics of anchors need: those of the check, which are hotter."""
    condition, chosen = CONDITIONS[name], SETS[name]
    systems = opened(chosen.systems(data, "train"), chosen.type_map)
    return Surroundings(
        systems=systems,
        shortest=coverage_of(systems, chosen.type_map, chosen.rcut).shortest,
        temperature=HOTTER * condition.temperature,
        time_step=condition.time_step,
        masses=condition.masses,
    )


def run_train(content: Mapping[str, Any], words: Sequence[str]) -> Path:
    """Run `dp train` in the current folder, and return the last checkpoint."""
    path = Path("input.json").resolve()
    path.write_text(json.dumps(content))
    status = dp(["train", str(path), "-v", "ERROR", *words])
    if status:
        raise RuntimeError(f"dp train ended with {status}")
    return path.parent / f"model.ckpt-{content['training']['numb_steps']}.pt"


def noisy(system: Path, folder: Path, deviation: float, seed: int) -> str:
    """Write a system with its frames `COPIES` times, all but the first with displaced atoms and the labels of it."""
    random = np.random.default_rng(seed)
    target = folder / system.name
    for name in ("type.raw", "type_map.raw", "nopbc"):
        if (system / name).exists():
            target.mkdir(parents=True, exist_ok=True)
            shutil.copy(system / name, target)
    for path in sorted(system.glob("set.*/*.npy")):
        values = np.concatenate([np.load(path)] * COPIES)
        if path.name == "coord.npy":
            first = len(values) // COPIES
            values[first:] += random.normal(0, deviation, values[first:].shape).astype(values.dtype)
        (target / path.parent.name).mkdir(exist_ok=True)
        np.save(target / path.parent.name / path.name, values)
    return str(target)


def lines_of(job: Job, args: argparse.Namespace, folder: Path) -> Iterator[dict[str, Any]]:
    """Yield the results of a run: one potential, or two where weights are averaged."""
    name, setting, seed, steps = job
    begun = time.monotonic()
    file, counts = trained(job, args, folder)
    seconds = time.monotonic() - begun
    data = args.data / name
    for averaged in (False, True) if SETTINGS[setting].averaged and args.averages else (False,):
        label = f"{setting}_average" if averaged else setting
        begun = time.monotonic()
        predictor = Predictor(file, ema=averaged)
        type_map = predictor.type_map
        training = opened(SETS[name].systems(data, "train"), type_map)
        parts: tuple[Part, ...] = ("test", "out")
        line: dict[str, Any] = {
            "set": name,
            "setting": label,
            "seed": seed,
            "steps": steps,
            "model": args.model,
        }
        if counts:
            line["anchors"] = counts
        line |= {
            part: errors_of(predictor, opened(SETS[name].systems(data, part), type_map))
            for part in parts
        }
        line["changed"] = flatness_of(predictor, opened(SETS[name].systems(data, "test"), type_map))
        times = {"train": seconds, "errors": time.monotonic() - begun}
        if args.picoseconds:
            begun = time.monotonic()
            coverage = coverage_of(training, type_map, float(predictor.model.rcut))
            long = dict(args.picoseconds)[name]
            line["dynamics"] = dynamics_of(
                predictor, name, data, coverage, tuple(args.copies), long
            )
            times["dynamics"] = time.monotonic() - begun
        if seed <= args.check_seeds:
            begun = time.monotonic()
            heats = {str(heat): heat * CONDITIONS[name].temperature for heat in args.check_heat}
            line["check"] = {
                heat: check_of(predictor, training, kelvin, args.check_copies)
                for heat, kelvin in heats.items()
            }
            times["check"] = time.monotonic() - begun
        line["seconds"] = {key: round(value, 2) for key, value in times.items()}
        if args.keep and seed <= args.keep_seeds:
            args.keep.mkdir(parents=True, exist_ok=True)
            if not averaged:
                kept = {"model": read_checkpoint(file)["model"]}
                torch.save(kept, args.keep / f"{name}_{label}_{steps}_{seed}.pt")
        yield line


Measure = Callable[[Job, argparse.Namespace, Path], Iterator[dict[str, Any]]]


def append(path: Path, line: Mapping[str, Any]) -> None:
    """Add a line, one process at a time."""
    with path.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.write(json.dumps(line, allow_nan=False) + "\n")


def work(
    number: int,
    jobs: list[Job],
    taken: Any,
    durations: MutableMapping[str, Duration],
    args: argparse.Namespace,
    until: float,
    measure: Measure,
) -> None:
    """Train one potential after another until none is left or the time is over.

    Parameters
    ----------
    number
        Of this worker.
    jobs, taken
        The runs, and how many of them the workers have begun.
    durations
        Of the longest finished run of each set, by any worker.
    args, until
        The command line, and when all runs must have ended, as `time.monotonic` has it.
    measure
        Yields the results of a run.
    """
    out = os.open(args.logs / _LOG.format(number), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(out, 1)
    os.dup2(out, 2)
    torch.set_num_threads(1)
    while True:
        with taken.get_lock():
            place, taken.value = taken.value, taken.value + 1
        if place >= len(jobs):
            return
        job, begun = jobs[place], time.monotonic()
        known = durations.get(job.set)
        if begun + (known.of(job.steps) if known else 0.0) > until:
            continue
        folder = Path(tempfile.mkdtemp(prefix="stability-"))
        try:
            for line in measure(job, args, folder):
                append(args.results, line)
            known = durations.get(job.set)
            if "seconds" in line and (known is None or job.steps >= known.steps):
                training = line["seconds"]["train"]
                rest = time.monotonic() - begun - training
                durations[job.set] = Duration(job.steps, training, rest)
        except Exception as error:  # one that fails must not end the others
            traceback.print_exc()
            said = (args.logs / _LOG.format(number)).read_text()[-1000:]
            failure = {"model": args.model, "failed": repr(error)[:300], "log": said}
            append(args.results, {**job._asdict(), **failure})
        finally:
            shutil.rmtree(folder, ignore_errors=True)
            if torch.cuda.is_available():
                torch.cuda.empty_cache()


def wanted(args: argparse.Namespace) -> list[Job]:
    """Return the jobs that are not done, of each part of the plan seed by seed; failed ones again."""
    done: set[Job] = set()
    lines = map(json.loads, args.results.read_text().splitlines()) if args.results.exists() else ()
    for line in lines:
        job = Job(line["set"], line["setting"], line["seed"], line["steps"])
        if line.get("model", args.model) != args.model:
            continue
        if "failed" in line:
            done.discard(job)  # its average may fail after the line of its weights
        else:
            done.add(job)
    jobs = []
    for sets, settings, seeds, *steps in args.plan or [(args.sets, args.settings, args.seeds)]:
        jobs += [
            Job(name, setting, seed, length)
            for seed in seeds
            for length in steps or [args.steps]
            for name in sets
            for setting in settings
        ]
    return [job for job in jobs if job not in done]


def arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""

    def length(text: str) -> tuple[str, float]:
        name, _, value = text.partition("=")
        return name, float(value)

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--data", type=Path, required=True, help="holds the sets that make_*.py wrote"
    )
    parser.add_argument("--sets", nargs="+", choices=SETS, default=list(USUAL))
    parser.add_argument("--settings", nargs="+", choices=SETTINGS, default=list(SETTINGS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[1])
    parser.add_argument(
        "--plan",
        type=json.loads,
        help="instead of the three, one after the other: [[SETS, SETTINGS, SEEDS], …] as JSON; "
        "further numbers of a part are its steps",
    )
    parser.add_argument("--steps", type=int, default=30000)
    parser.add_argument("--model", default="se_e2_a")
    parser.add_argument(
        "--no-averages",
        dest="averages",
        action="store_false",
        help="no second potential of averaged weights",
    )
    parser.add_argument(
        "--copies", type=int, nargs=2, default=[16, 4], help="runs of a potential, and hotter ones"
    )
    parser.add_argument(
        "--picoseconds",
        type=length,
        nargs="*",
        default=[],
        metavar="SET=PS",
        help="none: no dynamics",
    )
    parser.add_argument(
        "--check-seeds", type=int, default=0, help="check potentials of seeds up to this one"
    )
    parser.add_argument("--check-copies", type=int, help="default: as many as dp check takes")
    parser.add_argument(
        "--check-heat",
        type=float,
        nargs="+",
        default=[HOTTER],
        help="temperature over that of the dynamics",
    )
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument(
        "--pipes", nargs="+", default=[], help="CUDA_MPS_PIPE_DIRECTORY of each GPU's service"
    )
    parser.add_argument(
        "--seconds", type=float, default=math.inf, help="begin no run that would end later"
    )
    parser.add_argument(
        "--grace", type=float, default=30.0, help="seconds after which workers are ended"
    )
    parser.add_argument("--keep", type=Path, help="folder that gets weights")
    parser.add_argument(
        "--keep-seeds", type=int, default=1, help="keep those of seeds up to this one"
    )
    parser.add_argument("--logs", type=Path, default=Path("."), help="folder of the workers' logs")
    parser.add_argument(
        "--results", type=Path, required=True, help="file that gets a line a potential"
    )
    args = parser.parse_args(given)
    for key in ("data", "results", "logs", "keep"):  # workers change their folder
        setattr(args, key, getattr(args, key) and getattr(args, key).resolve())
    for name, _ in args.picoseconds:
        if name not in CONDITIONS:
            parser.error(f"no dynamics are set up for {name}; they are for {', '.join(CONDITIONS)}")
    return args


def main(measure: Measure = lines_of) -> None:
    """Run the workers; `measure` yields the results of a run."""
    args, begun = arguments(), time.monotonic()
    args.logs.mkdir(parents=True, exist_ok=True)
    todo, context = wanted(args), multiprocessing.get_context("spawn")
    taken = context.Value("i", 0)
    durations = context.Manager().dict()
    until = begun + args.seconds
    workers = [
        context.Process(target=work, args=(number, todo, taken, durations, args, until, measure))
        for number in range(min(args.workers, len(todo)))
    ]
    for number, worker in enumerate(workers):
        if args.pipes:  # a process inherits it
            os.environ["CUDA_MPS_PIPE_DIRECTORY"] = args.pipes[number % len(args.pipes)]
        worker.start()
    for worker in workers:
        worker.join(None if math.isinf(until) else max(0.0, until + args.grace - time.monotonic()))
    for worker in workers:
        if worker.is_alive():
            worker.kill()
            worker.join()
    ends = sorted({str(worker.exitcode) for worker in workers})
    took = f"{time.monotonic() - begun:.0f} s with {len(workers)} workers, exit codes {', '.join(ends)}"
    print(f"{min(taken.value, len(todo))} of {len(todo)} runs begun, {took}", flush=True)


if __name__ == "__main__":
    main()
