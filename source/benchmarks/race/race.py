"""Race optimizers on several data sets in one process, in pieces that can be resumed and merged.

    python source/benchmarks/race/race.py --data race-data --sets water silicon --results results/a.jsonl --seconds 280
    python source/benchmarks/race/race.py --data race-data --sets water --results results/times.jsonl --time
    python source/benchmarks/race/race.py --data race-data --steps 30000 --seeds 1 2 3 --best-of results \
        --results results/long.jsonl

Every finished run is a line of the file of results. Runs that any file in its folder has are not repeated, so that the
same command continues a race, and `report.py` merges the files. Runs go together in waves: each takes a step in turn,
on a GPU on a stream of its own, where a step of a small model leaves most of the device idle. Curves are therefore
over steps; --time measures milliseconds a step of each contestant alone.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import itertools
import logging
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

# Streams share so many queues to the device; it is read when CUDA starts.
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")

import torch

# These scripts are not a package; they and a test import one another by this path.
sys.path.insert(0, str(Path(__file__).resolve().parent))

from contest import Arena, Run
from contestants import CONTESTANTS
from results import Key, Result, StepTime, append, best_rates, read
from sets import MODELS, SETS, USUAL

T = TypeVar("T")
POINTS = 8  # of a curve
# Steps of --time: before the clock runs (SOAP's graph comes after 200), a batch, and batches.
WARM_UP, TIMED, REPEATS = 220, 20, 4


def planned(args: argparse.Namespace) -> list[Key]:
    """Return the runs that the command line asks for, the first of which are the most wanted: all at the first seed."""
    results, _ = read(args.best_of.glob("*.jsonl")) if args.best_of else ({}, [])
    best = best_rates(results.values())
    found = []
    for seed, name, model, (contestant, rates) in itertools.product(
        args.seeds, args.sets, args.models, args.contestants
    ):
        if args.best_of:
            case = (name, model, contestant)
            rates = tuple(factor * best[case] for factor in args.factors) if case in best else ()
        found += [Key(name, model, contestant, rate, seed, args.steps) for rate in rates]
    return found


def waves(keys: Sequence[Key], size: int) -> Iterator[list[Key]]:
    """Divide runs into waves, in their order; contestants that step outside the graph go by themselves."""

    def outside(key: Key) -> str:
        return key.contestant if CONTESTANTS[key.contestant].parts is not None else ""

    for _, group in itertools.groupby(sorted(keys, key=outside), key=outside):
        yield from chunks(list(group), size)


def chunks(values: Sequence[T], size: int) -> Iterator[list[T]]:
    """Cut a sequence into lists of at most `size`."""
    for first in range(0, len(values), size):
        yield list(values[first : first + size])


class Arenas:
    """The arenas of the present wave, made when they are first asked for.

    Parameters
    ----------
    args
        The command line, which says where the sets are.
    device
        Where runs train.
    """

    def __init__(self, args: argparse.Namespace, device: torch.device) -> None:
        self._args = args
        self._device = device
        self._stream = (
            torch.cuda.Stream(device) if args.one_stream and device.type == "cuda" else None
        )
        self._made: dict[tuple[str, str, int, int], Arena] = {}

    def of(self, key: Key) -> Arena:
        """Return the arena of a run."""
        case = (key.set, key.model, key.seed, key.steps)
        if case not in self._made:
            self._made[case] = Arena(
                *case, folder_of(key.set, self._args), self._device, self._stream
            )
        return self._made[case]

    def keep(self, keys: Iterable[Key]) -> None:
        """Drop the arenas that none of these runs needs."""
        needed = {(key.set, key.model, key.seed, key.steps) for key in keys}
        self._made = {case: arena for case, arena in self._made.items() if case in needed}


def train(
    keys: Sequence[Key], arenas: Callable[[Key], Arena], until: float, keep: Path | None = None
) -> Iterator[Result]:
    """Train a wave step by step, and give the result of each run; nothing when the clock passes `until`.

    With `keep` the weights of a run that did not fail are saved in that folder.
    """
    steps = keys[0].steps
    points = {-(-steps * k // POINTS) for k in range(1, POINTS + 1)}
    running = [Run(key, arenas(key)) for key in keys]
    failed: list[Result] = []

    def attempt(run: Run, step: int) -> bool:
        try:
            run.advance()
            if step in points:
                run.check()
                run.measure()
        except Exception as error:  # a contestant that fails must not end the others
            failed.append(
                result_of(run, f"step {step}: {type(error).__name__}: {error}".splitlines()[0])
            )
            return False
        return True

    everyone, begun = list(running), time.monotonic()
    for step in range(1, steps + 1):
        running = [run for run in running if attempt(run, step)]
        if step in points and step < steps and time.monotonic() > until:
            return
    milliseconds = 1e3 * (time.monotonic() - begun) / (steps * len(everyone))
    print(f"{milliseconds:.3f} ms a step of a run, together and with measurements", flush=True)
    for run in everyone:
        run.close()
    yield from failed
    for run in running:
        if keep is not None:
            run.save(keep)
        yield result_of(run)


def result_of(run: Run, failed: str = "") -> Result:
    """Measure a run on all parts; one that failed has only its curve."""
    test, out, train_part = ({}, {}, {}) if failed else map(run.errors, ("test", "out", "train"))
    return Result(run.key, run.curve, test, out, failed, **here(), train=train_part)


def here() -> dict[str, str]:
    """Return machine, torch's version and the date."""
    machine = (
        torch.cuda.get_device_name()
        if torch.cuda.is_available()
        else platform.processor() or platform.machine()
    )
    date = datetime.datetime.now(datetime.timezone.utc).date().isoformat()
    return {"machine": machine, "torch": torch.__version__, "date": date}


def step_time(key: Key, arena: Arena) -> StepTime:
    """Train a run alone for some steps, and return the median time of a step."""
    run = Run(key, arena)
    for _ in range(WARM_UP):
        run.advance()
    found = []
    for _ in range(REPEATS):
        wait()
        start = time.perf_counter()
        for _ in range(TIMED):
            run.advance()
        wait()
        found.append(1e3 * (time.perf_counter() - start) / TIMED)
    run.close()
    return StepTime(key.set, key.model, key.contestant, statistics.median(found), **here())


def wait() -> None:
    """Wait for the device."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def folder_of(name: str, args: argparse.Namespace) -> Path:
    """Return the folder of a set."""
    folder: Path = args.water if name == "dft_water" else args.data / name
    return folder


def race(args: argparse.Namespace) -> None:
    """Train what is wanted and not there yet, wave by wave, until the time is over."""
    start = time.monotonic()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    done, times = read(args.results.parent.glob("*.jsonl"))
    keys = [key for key in planned(args) if key not in done]
    if args.time:
        timed = {(entry.set, entry.model, entry.contestant) for entry in times}
        first = {(key.set, key.model, key.contestant): key for key in reversed(keys)}
        keys = [key for case, key in first.items() if case not in timed]
    todo = list(waves(keys, 1 if args.time else args.wave))[args.shard[0] :: args.shard[1]]
    arenas, longest = Arenas(args, device), 0.0
    for number, wave in enumerate(todo, start=1):
        begun = time.monotonic()
        if begun - start + longest > args.seconds:
            print(f"{len(todo) - number + 1} waves are left for another piece", flush=True)
            return
        arenas.keep(wave)
        entries: Iterable[Result | StepTime] = (
            [step_time(wave[0], arenas.of(wave[0]))]
            if args.time
            else train(wave, arenas.of, start + args.seconds, args.keep)
        )
        for entry in entries:
            append(args.results, entry)
            print(line(entry), flush=True)
        gc.collect()  # graphs and their memory, before the next wave makes its own
        taken = time.monotonic() - begun
        longest = max(longest, taken)
        print(f"wave {number} of {len(todo)}: {len(wave)} runs, {taken:.1f} s", flush=True)


def line(entry: Result | StepTime) -> str:
    """Say a result in a line."""
    if isinstance(entry, StepTime):
        return f"{entry.set} {entry.model} {entry.contestant}: {entry.milliseconds:.3f} ms a step"
    key = entry.key
    found = entry.failed or ", ".join(f"{force:.4f}" for _, force, _ in entry.curve)
    return f"{key.set} {key.model} {key.contestant} {key.rate:g} seed {key.seed}: {found}"


def contestant_of(text: str) -> tuple[str, tuple[float, ...]]:
    """Read a contestant and its rates: its grid, where none are given."""
    name, _, rates = text.partition("=")
    if name not in CONTESTANTS:
        raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join(CONTESTANTS)}")
    return name, tuple(map(float, rates.split(","))) if rates else CONTESTANTS[name].grid


def arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--data", type=Path, default=Path("race-data"), help="holds the sets that make_*.py wrote"
    )
    parser.add_argument("--water", type=Path, help="DeePMD's water example, for the set dft_water")
    parser.add_argument("--sets", nargs="+", choices=SETS, default=list(USUAL))
    parser.add_argument("--models", nargs="+", choices=MODELS, default=["se_e2_a"])
    parser.add_argument(
        "--contestants",
        nargs="+",
        type=contestant_of,
        default=[(name, contestant.grid) for name, contestant in CONTESTANTS.items()],
        metavar="NAME[=RATE,…]",
        help=f"of {', '.join(CONTESTANTS)}, with rates instead of their grid",
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[1])
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument(
        "--best-of", type=Path, help="folder of results: run each contestant at its best rate there"
    )
    parser.add_argument(
        "--factors", type=float, nargs="+", default=[1.0], help="multiples of the best rate"
    )
    parser.add_argument("--wave", type=int, default=8, help="runs that take steps in turn")
    parser.add_argument(
        "--one-stream", action="store_true", help="let no steps of a wave overlap on the GPU"
    )
    parser.add_argument(
        "--shard", type=int, nargs=2, default=(0, 1), help="I N: every N-th wave from the I-th on"
    )
    parser.add_argument(
        "--seconds", type=float, default=float("inf"), help="start and continue no wave after these"
    )
    parser.add_argument("--time", action="store_true", help="measure milliseconds a step instead")
    parser.add_argument(
        "--keep", type=Path, help="folder that gets the trained weights, for dynamics.py"
    )
    parser.add_argument("--results", type=Path, required=True, help="file that gets a line a run")
    args = parser.parse_args(given)
    if "dft_water" in args.sets and args.water is None:
        parser.error("the set dft_water needs --water")
    return args


if __name__ == "__main__":
    logging.basicConfig(level=logging.WARNING)
    race(arguments())
